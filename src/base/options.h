/* SPDX-License-Identifier: Apache-2.0 */
/* options.h - one table of options, four sources: flag > environment KVDRIVE_* > configuration file
 * > default.  Every value remembers where it came from.
 *
 * An option "n-predict" is --n-predict on the command line (also --n-predict=N and its aliases),
 * KVDRIVE_N_PREDICT in the environment, and `n-predict = N` in a configuration file, where values
 * are literal and `config` is refused.  A variable KVDRIVE_* that names no option is an error.
 * A path that begins with ~/ is the user's home directory's, whichever source gave it.
 * The only place of the tree that reads the environment.  One thread. */
#ifndef KVD_BASE_OPTIONS_H
#define KVD_BASE_OPTIONS_H

#include "base/buf.h"
#include "base/status.h"

typedef enum kvd_opt_kind {
    KVD_OPT_FLAG, /* --x, --no-x; true, false, 1, 0, on, off elsewhere */
    KVD_OPT_INT,
    KVD_OPT_COUNT, /* as INT, also 8K or 1.5M (powers of 1,024) */
    KVD_OPT_NUM,
    KVD_OPT_SIZE, /* bytes: 512M, 8G, 1T (powers of 1,024), or a plain number */
    KVD_OPT_TEXT,
    KVD_OPT_LIST,   /* a text that may be given several times; a stronger source replaces all */
    KVD_OPT_CHOICE, /* one of arg, which reads "a|b|c" */
    /* Another program's, which changes nothing here: not in the help, which says what there is
     * instead.  arg: "": no value; "*": one; "a|b": one if it is among these */
    KVD_OPT_FOREIGN,
    /* Another program's, without which something would be missing: refused, and the help says what
     * there is instead.  arg: "", or values "a|b" with which nothing would, and it is foreign */
    KVD_OPT_REFUSED,
    /* Text from the environment or a configuration file alone: others can read command lines.  Not
     * in the help, and never printed. */
    KVD_OPT_SECRET
} kvd_opt_kind;

typedef struct kvd_opt {
    const char  *name;
    const char  *alias; /* other spellings on the command line, separated by spaces; or "" */
    kvd_opt_kind kind;
    const char  *arg;      /* for help: "N"; "FILE" and "DIR": paths, never empty; or the choices */
    const char  *def;      /* default as text; NULL: not set */
    double       min, max; /* of INT, COUNT and NUM, when min < max */
    uint32_t     commands; /* bit set of the commands that take it */
    const char  *help;
} kvd_opt;

typedef enum kvd_opt_origin {
    KVD_OPT_UNSET,
    KVD_OPT_DEFAULT,
    KVD_OPT_FILE,
    KVD_OPT_ENV,
    KVD_OPT_ARGV
} kvd_opt_origin;

typedef struct kvd_opt_value {
    char          *text; /* as given; owned; NULL: not set */
    kvd_opt_origin origin;
    double         num;  /* INT, COUNT and NUM */
    uint64_t       size; /* SIZE */
    bool           flag; /* FLAG */
    char         **list; /* [n_list] of LIST, owned; text is the last of them */
    uint32_t       n_list;
} kvd_opt_value;

typedef struct kvd_opts {
    const kvd_opt *table;
    uint32_t       n;
    uint32_t       command; /* one bit */
    kvd_opt_value *value;   /* [n] */
    char         **rest;    /* [n_rest] arguments that are no options, paths expanded; owned */
    int            n_rest;
    char           config_path[512]; /* the file that was read, or "" */
} kvd_opts;

/* Reads all sources.  argv excludes program and command.  A configuration file is config_path if
 * given (then it must exist), else $XDG_CONFIG_HOME/kvdrive/config or ~/.config/kvdrive/config if
 * there is one.  Unknown names, values out of range and misplaced options are KVD_E_INVAL with the
 * nearest name that exists.  kvd_opts_close() after success and failure. */
kvd_status kvd_opts_open(kvd_opts *o, const kvd_opt *table, uint32_t n, uint32_t command, int argc,
                         const char *const *argv, kvd_err *err);
void       kvd_opts_close(kvd_opts *o);
/* Another value for an option of the command, as if given there. */
kvd_status kvd_opts_set(kvd_opts *o, const char *name, const char *text, kvd_err *err);

const kvd_opt_value *kvd_opts_get(const kvd_opts *o, const char *name); /* asserts that it exists */
const char          *kvd_opts_text(const kvd_opts *o, const char *name); /* NULL: not set */
int64_t              kvd_opts_int(const kvd_opts *o, const char *name);
double               kvd_opts_num(const kvd_opts *o, const char *name);
uint64_t             kvd_opts_size(const kvd_opts *o, const char *name);
bool                 kvd_opts_flag(const kvd_opts *o, const char *name);
#define KVD_OPT_WHERE_BYTES 256
/* Who said so, for messages: "--x", "KVDRIVE_X", or "config: x". */
const char *kvd_opts_where(const kvd_opts *o, const char *name, char out[KVD_OPT_WHERE_BYTES]);
bool        kvd_opts_given(const kvd_opts *o, const char *name); /* by any source but default */

/* One line per option of the command: name = value  # origin. */
void kvd_opts_print(const kvd_opts *o, kvd_buf *b);
/* The options of a command, formatted for a terminal of 80 columns; first: only those among these
 * names, which end in NULL.  Gives the number of options left out. */
uint32_t kvd_opts_help(const kvd_opt *table, uint32_t n, uint32_t command, const char *const *first,
                       kvd_buf *b);

bool kvd_parse_size(const char *text, uint64_t *out); /* "8G" */
bool kvd_parse_count(const char *text, double *out);  /* "-1", "8K": a whole number */
/* *out: the path with ~ or ~/ at its beginning replaced by the home directory; the caller frees it.
 * ~NAME is KVD_E_INVAL: a directory of that name is ./~NAME. */
kvd_status kvd_expand_path(const char *path, char **out, kvd_err *err);
/* Whether the terminal is said to be one that cannot move its cursor, or nothing is said of it. */
bool kvd_terminal_is_dumb(void);
/* Of the n names the one that word was probably meant to be: few edits away from it, or the only
 * one that begins with it; or NULL. */
const char *kvd_nearest(const char *word, const char *const *name, uint32_t n);
/* A directory of the user's from the environment: "XDG_CACHE_HOME" falls back to $HOME/home_sub.
 * false when neither is set or out is too small. */
bool kvd_user_dir(const char *variable, const char *home_sub, char *out, size_t cap);

#endif
