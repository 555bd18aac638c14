/* SPDX-License-Identifier: Apache-2.0 */
/* srv_template.h - private to server/: what the chat template can show. */
#ifndef KVD_SRV_TEMPLATE_H
#define KVD_SRV_TEMPLATE_H

#include "kvdrive.h"

typedef struct srv_template {
    kvd_tool_format form; /* of calls; NONE: there is no template */
    bool            own;  /* the template has it; else it is the server's */
    bool            shows_system, shows_tools, shows_calls, shows_results;

    /* Of calls in history, where they are shown. */
    bool text_args;    /* arguments are JSON text; else an object */
    bool takes_text;   /* text that is no JSON, too */
    bool null_content; /* only beside content null */
    bool short_ids;    /* only with ids of nine letters and digits */
    bool one_call;     /* one a message */
} srv_template;

#endif
