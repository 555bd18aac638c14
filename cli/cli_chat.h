/* SPDX-License-Identifier: Apache-2.0 */
/* cli_chat.h - private to kvdrive chat: the conversation that its files share. */
#ifndef KVD_CLI_CHAT_H
#define KVD_CLI_CHAT_H

#include "cli.h"
#include "cli_line.h"

typedef struct chat {
    const kvd_opts *o;
    kvd_model      *m;
    kvd_session    *s;
    kvd_sampler    *sm;
    kvd_detok      *detok;
    kvd_plan        plan;
    json_t         *messages;
    int32_t        *held; /* [n_ctx] tokens in sequence 0 */
    uint32_t        n_held;
    cli_stops       stops;
    kvd_buf         told;     /* what say() lets through */
    kvd_buf         attached; /* text of /read: goes before the next message */
    bool            tty;      /* messages are edited */
    line_editor     line;
} chat;

/* ---- cli_chat.c ------------------------------------------------------------------------ */

/* Begins a conversation with this system message; NULL or "": none.  false: not UTF-8. */
bool chat_begin_anew(chat *c, const char *system);
/* Answers the conversation as it stands; false when the program should end. */
bool chat_answer(chat *c);
bool chat_last_is(const chat *c, const char *role);
void chat_drop_last(chat *c, const char *role); /* if it is of this role */

/* ---- cli_chat_command.c ---------------------------------------------------------------- */

/* Follows a message that begins with a slash; false when it asks to leave. */
bool chat_command(chat *c, const char *line);

/* ---- cli_chat_file.c ------------------------------------------------------------------- */

/* Saves the messages of a conversation under a name of letters, digits, - _ and . in the user's
 * data directory; *replaced: there was one of this name. */
kvd_status chat_save(const json_t *messages, const char *name, const char *model, bool *replaced,
                     kvd_err *err);
/* The messages saved under a name, which the caller releases. */
kvd_status chat_load(json_t **messages, const char *name, kvd_err *err);
/* Prints the names there are. */
void chat_list(FILE *f);

#endif
