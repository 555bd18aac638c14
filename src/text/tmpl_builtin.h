/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_builtin.h - what the files of builtins share.  Each table ends with a NULL name.  An entry
 * without function exists in Python but is refused here: as an attribute it is there, as a call
 * it is not run. */
#ifndef KVD_TEXT_TMPL_BUILTIN_H
#define KVD_TEXT_TMPL_BUILTIN_H

#include "text/tmpl_ast.h"

extern const tmpl_builtin tmpl_filters_text[], tmpl_filters_seq[], tmpl_filters_pick[];
extern const tmpl_builtin tmpl_tests[], tmpl_globals[];
extern const tmpl_builtin tmpl_methods_str[], tmpl_methods_list[], tmpl_methods_dict[],
    tmpl_methods_loop[];

/* Arguments; deflt where it was not given.  A wrong type fails the run. */
int64_t         tmpl_arg_int(tmpl_run *r, const tmpl_args *a, size_t i, int64_t deflt);
bool            tmpl_arg_truth(const tmpl_args *a, size_t i, bool deflt);
const tmpl_str *tmpl_arg_str(tmpl_run *r, const tmpl_args *a, size_t i); /* NULL: not given */
bool            tmpl_arg_none(const tmpl_args *a, size_t i);             /* not given, or None */

/* Appends to a sequence that only this function has grown. */
void     tmpl_seq_push(tmpl_run *r, tmpl_seq *s, tmpl_val v);
tmpl_val tmpl_gen_new(tmpl_run *r, tmpl_seq *items);
tmpl_val tmpl_pair_new(tmpl_run *r, const tmpl_pair *p); /* the tuple (key, value) */

/* ---- letters (tmpl_case.c) ------------------------------------------------------- */

typedef enum tmpl_case {
    TMPL_UPPER,
    TMPL_LOWER,
    TMPL_CAPITALIZE,
    TMPL_TITLE,
    TMPL_TITLE_FILTER
} tmpl_case;
tmpl_val tmpl_str_case(tmpl_run *r, const tmpl_str *s, tmpl_case how);
bool     tmpl_str_all(tmpl_run *r, const tmpl_str *s, const char *what); /* "alpha", "digit"... */

/* ---- pieces of strings (tmpl_method_str.c) --------------------------------------- */

/* str.strip(chars) and its sides; chars NULL: white space. */
tmpl_val tmpl_str_strip(tmpl_run *r, const tmpl_str *s, const tmpl_str *chars, bool left,
                        bool right);
tmpl_val tmpl_str_replace(tmpl_run *r, const tmpl_str *s, const tmpl_str *old, const tmpl_str *with,
                          int64_t count);
tmpl_val tmpl_str_lines(tmpl_run *r, const tmpl_str *s); /* str.splitlines() */

#endif
