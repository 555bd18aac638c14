/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_ast.h - from source to tokens to tree: what lexer, parser and evaluator share.
 *
 * Owns: a tmpl holds the arena in which source, tokens, nodes and literals live.
 * Invariants
 *  (1) a node is at most TMPL_MAX_NEST levels high, so walking a tree is bounded recursion;
 *  (2) filters, tests and functions are resolved when the tree is built: no name lookup that
 *      could fail for want of an implementation is left to rendering, except names that are
 *      computed (map(x) with x not a literal).
 * Thread: immutable after tmpl_open(). */
#ifndef KVD_TEXT_TMPL_AST_H
#define KVD_TEXT_TMPL_AST_H

#include "text/tmpl_value.h"

#define TMPL_MAX_SOURCE      (256u << 10) /* bytes of a template; the longest known has 30 KB */
#define TMPL_MAX_NEST        200u         /* levels of a tree, and of the parser */
#define TMPL_MAX_DEPTH       500u         /* levels of evaluation */
#define TMPL_MAX_STEPS       1000000u     /* plus TMPL_STEPS_PER_BYTE of input */
#define TMPL_MAX_OUTPUT      (64u << 20)  /* bytes */
#define TMPL_STEPS_PER_BYTE  128u         /* gpt-oss looks ahead from every tool call: quadratic */
#define TMPL_MAX_MEMORY      (8u << 20) /* bytes of a render, plus TMPL_MEMORY_PER_BYTE of input */
#define TMPL_MEMORY_PER_BYTE 64u

typedef enum tmpl_tok_kind {
    TT_EOF,
    TT_DATA,
    TT_VAR_BEGIN,
    TT_VAR_END,
    TT_BLOCK_BEGIN,
    TT_BLOCK_END,
    TT_NAME,
    TT_STR,
    TT_INT,
    TT_FLOAT,
    TT_OP
} tmpl_tok_kind;

typedef struct tmpl_token {
    tmpl_tok_kind kind;
    int           op; /* TT_OP: the character, or TMPL_OP2 */
    uint32_t      line;
    const char   *text; /* data, name, digits; strings: after escapes */
    size_t        len;
} tmpl_token;

typedef enum tmpl_node_kind {
    /* expressions */
    TN_LIT,     /* lit */
    TN_NAME,    /* sym, name */
    TN_LIST,    /* list */
    TN_TUPLE,   /* list */
    TN_DICT,    /* list: key, value, key, value... */
    TN_ATTR,    /* a.name */
    TN_ITEM,    /* a[b] */
    TN_SLICE,   /* a[list[0]:list[1]:list[2]], entries may be NULL */
    TN_CALL,    /* a(list) */
    TN_FILTER,  /* a | fn(list); a NULL in a filter block */
    TN_TEST,    /* a is fn(list) */
    TN_NOT,     /* a */
    TN_NEG,     /* a */
    TN_POS,     /* a */
    TN_ARITH,   /* a op b */
    TN_AND,     /* a, b */
    TN_OR,      /* a, b */
    TN_COND,    /* b if a else c; c may be NULL */
    TN_CONCAT,  /* list */
    TN_COMPARE, /* a, then list with ops */
    /* statements */
    TN_BODY,         /* list */
    TN_TEXT,         /* lit */
    TN_PRINT,        /* a */
    TN_IF,           /* list: condition, body, condition, body...; c: else or NULL */
    TN_FOR,          /* a: target, b: iterable, c: body, d: else or NULL, e: condition or NULL */
    TN_SET,          /* a: target, b: value */
    TN_SET_BLOCK,    /* a: target, b: filter or NULL, c: body */
    TN_NS_ATTR,      /* a target only: namespace sym, attribute name */
    TN_MACRO,        /* sym, name; list: parameters (TN_NAME); deflt: defaults or NULL; c: body */
    TN_CALL_BLOCK,   /* a: call; b: macro of the body */
    TN_FILTER_BLOCK, /* b: filter, c: body */
    TN_WITH,         /* list: targets; deflt: values; c: body */
    TN_BREAK,
    TN_CONTINUE
} tmpl_node_kind;

/* Operators of TN_COMPARE beside the token's own. */
#define TMPL_OP_IN     TMPL_OP2('i', 'n')
#define TMPL_OP_NOT_IN TMPL_OP2('n', 'i')

typedef struct tmpl_node tmpl_node;
struct tmpl_node {
    tmpl_node_kind         kind;
    int                    op;
    uint32_t               line, height, sym;
    uint32_t               n, n_pos; /* of list; of it, positional arguments */
    tmpl_node             *a, *b, *c, *d, *e;
    tmpl_node            **list, **deflt;
    const int             *ops; /* [n] */
    const tmpl_str        *name;
    const tmpl_str *const *kw; /* [n - n_pos] */
    tmpl_val               lit;
    const tmpl_builtin    *fn;
};

typedef struct tmpl_sym {
    const tmpl_str     *name;
    const tmpl_builtin *global;   /* the function of that name, or NULL */
    bool                assigned; /* the template defines it somewhere */
} tmpl_sym;

struct tmpl {
    kvd_arena  mem;
    tmpl_node *root;
    tmpl_sym  *sym;
    uint32_t   n_sym, cap_sym;
    uint32_t  *hash; /* [cap_hash] index + 1 of sym, open addressing */
    uint32_t   cap_hash;
    uint32_t   sym_loop, sym_caller;
};

#define TMPL_NO_SYM UINT32_MAX
uint32_t tmpl_sym_find(const tmpl *t, const char *name, size_t len); /* or TMPL_NO_SYM */

/* Tokens in t's arena, ended by TT_EOF. */
kvd_status tmpl_lex(tmpl *t, const char *src, size_t len, tmpl_token **out, kvd_err *err);
kvd_status tmpl_parse(tmpl *t, const tmpl_token *token, kvd_err *err);

/* ---- parser internals shared by tmpl_parse.c (statements) and tmpl_expr.c -------- */

typedef struct tmpl_parser {
    tmpl             *t;
    const tmpl_token *tok; /* current */
    uint32_t          nest, n_loop, n_macro;
    tmpl_node        *calls; /* calls of a plain name, chained by d, checked at the end */
    kvd_status        st;
    kvd_err          *err;
} tmpl_parser;

void tmpl_parse_fail(tmpl_parser *p, kvd_status st, uint32_t line, const char *fmt, ...)
    KVD_PRINTF(4, 5);
bool  tmpl_parse_enter(tmpl_parser *p);
void  tmpl_parse_next(tmpl_parser *p);
bool  tmpl_parse_at(const tmpl_parser *p, int op);
bool  tmpl_parse_at_name(const tmpl_parser *p, const char *name);
bool  tmpl_parse_skip(tmpl_parser *p, int op);
bool  tmpl_parse_skip_name(tmpl_parser *p, const char *name);
void  tmpl_parse_expect(tmpl_parser *p, int op);
void  tmpl_parse_unexpected(tmpl_parser *p);
void *tmpl_parse_alloc(tmpl_parser *p, size_t n, size_t bytes);
/* NULL once the parser has failed. */
tmpl_node      *tmpl_node_new(tmpl_parser *p, tmpl_node_kind kind, tmpl_node *a, tmpl_node *b,
                              tmpl_node *c);
void            tmpl_node_push(tmpl_parser *p, tmpl_node *list_of, tmpl_node *item);
void            tmpl_node_raise(tmpl_parser *p, tmpl_node *n, const tmpl_node *child);
const tmpl_str *tmpl_parse_str(tmpl_parser *p, const char *text, size_t len);
uint32_t        tmpl_parse_sym(tmpl_parser *p, const char *name, size_t len);
tmpl_node      *tmpl_parse_name(tmpl_parser *p); /* the current token, a name, as TN_NAME */

tmpl_node *tmpl_parse_expr(tmpl_parser *p, bool with_cond);
tmpl_node *tmpl_parse_tuple(tmpl_parser *p, bool with_cond, bool parens);
tmpl_node *tmpl_parse_filters(tmpl_parser *p, tmpl_node *of, bool start); /* start: no '|' */

/* ---- evaluation, shared by tmpl_eval.c (expressions) and tmpl_exec.c (statements) - */

typedef struct tmpl_slot {
    uint32_t sym;
    tmpl_val val;
} tmpl_slot;

typedef struct tmpl_scope tmpl_scope;
struct tmpl_scope {
    tmpl_scope *parent;
    tmpl_slot  *slot;
    uint32_t    n, cap;
    bool        captured; /* a macro refers to it: it must not be reused */
    bool        dense;    /* the outermost: slot[sym], unset ones with sym == TMPL_NO_SYM */
};

struct tmpl_macro {
    const tmpl_node *node;
    tmpl_scope      *scope; /* where it was defined */
};

tmpl_scope *tmpl_scope_new(tmpl_run *r, tmpl_scope *parent);
tmpl_scope *tmpl_scope_root(tmpl_run *r);
void        tmpl_scope_set(tmpl_run *r, tmpl_scope *s, uint32_t sym, tmpl_val v);
tmpl_val   *tmpl_scope_find(tmpl_run *r, tmpl_scope *s, uint32_t sym); /* or NULL */

tmpl_val tmpl_eval(tmpl_run *r, const tmpl_node *n);
/* n is a TN_FILTER; applied to v instead of its own operand at the innermost place. */
tmpl_val tmpl_eval_filter_on(tmpl_run *r, const tmpl_node *n, tmpl_val v);
void     tmpl_exec(tmpl_run *r, const tmpl_node *body);
tmpl_val tmpl_macro_call(tmpl_run *r, const tmpl_macro *m, const tmpl_val *val, size_t n_pos,
                         const tmpl_str *const *kw, size_t n_kw, const tmpl_macro *caller);

#endif
