/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_value.h - values of the template interpreter, with Python's semantics, and the state of one
 * render.
 *
 * Owns nothing of its own: every value lives in the arenas of its tmpl_run (literals: in those of
 * the tmpl) and is immutable once built, except namespaces, loops, joiners and generators.
 *
 * Errors are sticky, as in kvd_buf: the first tmpl_fail() of a run is kept in run->st and filled
 * into the caller's kvd_err; whoever builds on a value may go on, whoever loops checks run->st.
 *
 * Provenance: tmpl_str.span lists the bytes that were written in the template (trusted), merged
 * and ascending.  Every function that makes a string out of strings carries the spans along; what
 * is made of anything else is untrusted, unless a number or constant was itself a literal.
 *
 * Thread: a run belongs to one thread. */
#ifndef KVD_TEXT_TMPL_VALUE_H
#define KVD_TEXT_TMPL_VALUE_H

#include "text/text.h"

#define TMPL_MAX_PARAM 6u
#define TMPL_UNKNOWN   SIZE_MAX

typedef enum tmpl_kind {
    TV_UNDEF, /* u.s: the name that was looked up, or NULL */
    TV_NONE,
    TV_BOOL,
    TV_INT,
    TV_FLOAT,
    TV_DIGITS, /* a number of JSON that neither holds; u.s: its text.  It is not computed with */
    TV_STR,
    TV_LIST,
    TV_TUPLE,
    TV_RANGE,
    TV_VIEW, /* dict.items() and its like: has a length but no index */
    TV_GEN,  /* what map() and its like give: always true, read once */
    TV_DICT,
    TV_NS,
    TV_MACRO,
    TV_FUNC,
    TV_METHOD,
    TV_LOOP,
    TV_JOINER
} tmpl_kind;

typedef struct tmpl_val     tmpl_val;
typedef struct tmpl_str     tmpl_str;
typedef struct tmpl_seq     tmpl_seq;
typedef struct tmpl_dict    tmpl_dict;
typedef struct tmpl_macro   tmpl_macro;
typedef struct tmpl_method  tmpl_method;
typedef struct tmpl_loop    tmpl_loop;
typedef struct tmpl_joiner  tmpl_joiner;
typedef struct tmpl_builtin tmpl_builtin;
typedef struct tmpl_run     tmpl_run;

struct tmpl_val {
    tmpl_kind kind;
    bool      trusted; /* numbers and constants: made of literals only */
    bool      markup;  /* strings: came from "safe" or "escape", so "+" escapes what is added */
    union {
        bool                b;
        int64_t             i;
        double              f;
        const tmpl_str     *s;
        tmpl_seq           *seq;
        tmpl_dict          *d;
        const tmpl_macro   *macro;
        const tmpl_builtin *fn;
        const tmpl_method  *method;
        tmpl_loop          *loop;
        tmpl_joiner        *joiner;
    } u;
};

struct tmpl_str {
    const char     *data; /* not zero-terminated */
    size_t          len;
    size_t          n_char; /* code points, or TMPL_UNKNOWN */
    const kvd_span *span;   /* [n_span] trusted bytes */
    size_t          n_span;
};

struct tmpl_seq {
    tmpl_val   *item;
    size_t      n;
    size_t      pos;               /* TV_GEN: first item not yet read */
    const char *view;              /* TV_VIEW: "dict_items"; TV_GEN: "generator" */
    int64_t     start, stop, step; /* TV_RANGE */
};

typedef struct tmpl_pair {
    tmpl_val key, val;
} tmpl_pair;

struct tmpl_dict {
    tmpl_pair *pair; /* insertion order */
    size_t     n, cap;
};

struct tmpl_loop {
    const tmpl_val *item;
    size_t          n, idx;
    tmpl_seq       *seen; /* arguments of the last loop.changed(), or NULL */
};

struct tmpl_joiner {
    tmpl_val sep;
    bool     used;
};

/* Arguments of a call: by parameter in v/has where the builtin names its parameters, and as
 * they were written. */
typedef struct tmpl_args {
    tmpl_val               self; /* the filtered value, the object of a method */
    tmpl_val               v[TMPL_MAX_PARAM];
    bool                   has[TMPL_MAX_PARAM];
    const tmpl_val        *val; /* [n_pos + n_kw] positional, then keywords */
    const tmpl_str *const *kw;  /* [n_kw] */
    size_t                 n_pos, n_kw;
} tmpl_args;

typedef tmpl_val (*tmpl_fn)(tmpl_run *r, const tmpl_args *a);

/* A filter, test, global function or method. */
struct tmpl_builtin {
    const char *name;
    const char *params; /* "old new count", a "-" before one never given by name; NULL: takes
                           anything and looks at val and kw */
    uint8_t min_arg;    /* parameters without default */
    tmpl_fn fn;         /* NULL: exists in Python, is not run here */
};

struct tmpl_method {
    tmpl_val            self;
    const tmpl_builtin *fn;
};

/* Bytes with provenance under construction; failures are in run->st. */
typedef struct tmpl_sb {
    tmpl_run *run;
    char     *data;
    size_t    len, cap, limit;
    kvd_span *span;
    size_t    n_span, cap_span;
} tmpl_sb;

struct tmpl_scope;

struct tmpl_run {
    const tmpl        *t;
    kvd_arena          mem, bytes; /* objects; string bytes */
    uint64_t           steps_left;
    uint32_t           depth;
    uint32_t           line; /* of the template, for messages */
    kvd_status         st;
    kvd_err           *err;
    int64_t            now_unix;
    struct tmpl_scope *scope;
    tmpl_sb           *out;
};

/* ---- run ------------------------------------------------------------------------- */

void tmpl_fail(tmpl_run *r, kvd_status st, const char *fmt, ...) KVD_PRINTF(3, 4);
/* Charges work; false when the run has failed or the steps are used up. */
bool tmpl_step(tmpl_run *r, uint64_t n);
/* Enters one level of nesting; every successful enter is paired with a leave. */
bool  tmpl_enter(tmpl_run *r);
void  tmpl_leave(tmpl_run *r);
void *tmpl_alloc(tmpl_run *r, size_t n, size_t bytes); /* zeroed; NULL: the run has failed */

/* ---- making values --------------------------------------------------------------- */

static inline tmpl_val tmpl_undef(const tmpl_str *name)
{
    return (tmpl_val){ .kind = TV_UNDEF, .u.s = name };
}
static inline tmpl_val tmpl_none(void)
{
    return (tmpl_val){ .kind = TV_NONE };
}
static inline tmpl_val tmpl_bool(bool b)
{
    return (tmpl_val){ .kind = TV_BOOL, .u.b = b };
}
static inline tmpl_val tmpl_int(int64_t i)
{
    return (tmpl_val){ .kind = TV_INT, .u.i = i };
}
static inline tmpl_val tmpl_float(double f)
{
    return (tmpl_val){ .kind = TV_FLOAT, .u.f = f };
}
static inline tmpl_val tmpl_of_str(const tmpl_str *s)
{
    return (tmpl_val){ .kind = s ? TV_STR : TV_UNDEF, .u.s = s };
}
static inline tmpl_val tmpl_of_seq(tmpl_kind kind, tmpl_seq *s)
{
    return (tmpl_val){ .kind = s ? kind : TV_UNDEF, .u.seq = s };
}
static inline bool tmpl_is_seq(const tmpl_val *v)
{
    return v->kind >= TV_LIST && v->kind <= TV_GEN;
}

tmpl_seq  *tmpl_seq_new(tmpl_run *r, size_t n); /* items are undefined values */
tmpl_dict *tmpl_dict_new(tmpl_run *r, size_t cap);
void       tmpl_dict_set(tmpl_run *r, tmpl_dict *d, tmpl_val key, tmpl_val val);
tmpl_val  *tmpl_dict_get(tmpl_run *r, const tmpl_dict *d, const tmpl_val *key); /* or NULL */
tmpl_val  *tmpl_dict_find(tmpl_run *r, const tmpl_dict *d, const char *key, size_t len);

/* ---- strings (tmpl_str.c) -------------------------------------------------------- */

tmpl_val tmpl_str_new(tmpl_run *r, const char *data, size_t len, bool trusted); /* copies */
/* The bytes [from, to) of s, shared with it. */
tmpl_val tmpl_str_part(tmpl_run *r, const tmpl_str *s, size_t from, size_t to);
tmpl_val tmpl_str_escape(tmpl_run *r, const tmpl_str *s); /* for HTML, as Jinja does */
tmpl_val tmpl_str_concat(tmpl_run *r, const tmpl_str *a, const tmpl_str *b);
size_t   tmpl_str_chars(const tmpl_str *s);
/* Byte offset of the n-th code point; n <= its number. */
size_t tmpl_str_offset(const tmpl_str *s, size_t n_char);
bool   tmpl_str_is(const tmpl_str *s, const char *text);
/* First occurrence of b in a at or after from, or TMPL_UNKNOWN. */
size_t tmpl_str_find(tmpl_run *r, const tmpl_str *a, const tmpl_str *b, size_t from);
/* Whether all of the bytes [from, to) are trusted. */
bool tmpl_str_trusted(const tmpl_str *s, size_t from, size_t to);
bool tmpl_is_space(uint32_t cp); /* as str.isspace() */

void     tmpl_sb_init(tmpl_sb *sb, tmpl_run *r);
void     tmpl_sb_put(tmpl_sb *sb, const char *data, size_t len, bool trusted);
void     tmpl_sb_puts(tmpl_sb *sb, const char *text); /* untrusted */
void     tmpl_sb_put_part(tmpl_sb *sb, const tmpl_str *s, size_t from, size_t to);
void     tmpl_sb_put_str(tmpl_sb *sb, const tmpl_str *s);
tmpl_val tmpl_sb_take(tmpl_sb *sb);

/* ---- what all values can do (tmpl_value.c, tmpl_repr.c) -------------------------- */

const char *tmpl_type_name(const tmpl_val *v); /* Python's */
bool        tmpl_truth(const tmpl_val *v);
bool        tmpl_equal(tmpl_run *r, const tmpl_val *a, const tmpl_val *b);
/* -1, 0, 1; 2: unordered (NaN). */
int     tmpl_order(tmpl_run *r, const tmpl_val *a, const tmpl_val *b);
bool    tmpl_contains(tmpl_run *r, const tmpl_val *container, const tmpl_val *v);
int64_t tmpl_length(tmpl_run *r, const tmpl_val *v);
bool    tmpl_is_iterable(const tmpl_val *v);
/* Items in order (characters, keys); uses a generator up.  NULL: not iterable or failed. */
tmpl_seq *tmpl_iterate(tmpl_run *r, const tmpl_val *v);
/* obj.name and obj[key] as Jinja resolves them. */
tmpl_val tmpl_attr(tmpl_run *r, const tmpl_val *obj, const tmpl_str *name);
tmpl_val tmpl_item(tmpl_run *r, const tmpl_val *obj, const tmpl_val *key);
tmpl_val tmpl_slice(tmpl_run *r, const tmpl_val *obj, const tmpl_val bound[3]);
bool     tmpl_is_number(const tmpl_val *v); /* bool included */
double   tmpl_as_float(const tmpl_val *v);
int64_t  tmpl_as_int(const tmpl_val *v); /* of a bool or int */

const tmpl_str *tmpl_to_str(tmpl_run *r, const tmpl_val *v); /* str(v); NULL: failed */
void            tmpl_repr(tmpl_sb *sb, const tmpl_val *v);
#define TMPL_FLOAT_TEXT 40
void tmpl_float_text(double f, char out[TMPL_FLOAT_TEXT]); /* repr(f) */

typedef struct tmpl_json_style {
    bool            ascii, sort_keys, pretty; /* pretty: line breaks */
    const tmpl_str *indent;                   /* one level, with pretty */
    const tmpl_str *item_sep, *key_sep;       /* NULL: json.dumps' */
} tmpl_json_style;
void tmpl_json_write(tmpl_sb *sb, const tmpl_val *v, const tmpl_json_style *style);
/* Reads JSON text (tmpl_json.c); what names it in messages. */
tmpl_val tmpl_json_read(tmpl_run *r, const char *text, const char *what, kvd_status *st);

/* ---- operators (tmpl_ops.c) ------------------------------------------------------ */

#define TMPL_OP2(a, b) (((int)(a) << 8) | (int)(b)) /* "**", "//", "==", "!=", "<=", ">=" */
#define TMPL_OP_FLOOR  TMPL_OP2('/', '/')

tmpl_val tmpl_arith(tmpl_run *r, int op, const tmpl_val *a, const tmpl_val *b);
tmpl_val tmpl_negate(tmpl_run *r, const tmpl_val *v, bool minus);

/* ---- builtins -------------------------------------------------------------------- */

const tmpl_builtin *tmpl_find_filter(const char *name, size_t len);
const tmpl_builtin *tmpl_find_test(const char *name, size_t len);
const tmpl_builtin *tmpl_find_global(const char *name, size_t len);
/* A method of values of this kind that Python has and the sandbox lets through; or NULL. */
const tmpl_builtin *tmpl_find_method(tmpl_kind kind, const char *name, size_t len);
/* A method that changes its object: Jinja lets a template with it run until it is reached. */
bool tmpl_method_mutates(const char *name, size_t len);
bool tmpl_method_runs(const char *name, size_t len); /* for any kind */
/* Why these arguments cannot be bound, as a text to be continued by arg; NULL: they can. */
const char *tmpl_args_check(const tmpl_builtin *b, size_t n_pos, const tmpl_str *const *kw,
                            size_t n_kw, const tmpl_str **arg);
/* Calls b with arguments as written; self as given. */
tmpl_val tmpl_builtin_call(tmpl_run *r, const tmpl_builtin *b, tmpl_val self, const tmpl_val *val,
                           size_t n_pos, const tmpl_str *const *kw, size_t n_kw);
tmpl_val tmpl_loop_attr(tmpl_run *r, tmpl_loop *l, const tmpl_val *self, const tmpl_str *name);

#endif
