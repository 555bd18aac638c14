/* SPDX-License-Identifier: Apache-2.0 */
/* options_impl.h - private to options*.c. */
#ifndef KVD_BASE_OPTIONS_IMPL_H
#define KVD_BASE_OPTIONS_IMPL_H

#include "base/base.h"

#define OPT_NAME_MAX 64u

/* Another program's: not in help and suggestions. */
static inline bool opt_is_foreign(const kvd_opt *opt)
{
    return opt->kind == KVD_OPT_FOREIGN || opt->kind == KVD_OPT_REFUSED;
}

typedef struct opt_nearest { /* of the names looked at so far */
    const char *word;
    const char *name;  /* within few edits; NULL: none is */
    const char *whole; /* of which the word is the beginning */
    uint32_t    n_edit, n_kept, n_same, n_whole;
} opt_nearest;

/* name: what the spelling stands for. */
void        opt_look_at(opt_nearest *r, const char *spelling, const char *name);
const char *opt_found(const opt_nearest *r); /* NULL: nothing is near */

#endif
