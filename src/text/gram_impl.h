/* SPDX-License-Identifier: Apache-2.0 */
/* gram_impl.h - what the files of constrained generation share.  Private to text/.
 *
 *   gram.c          open, close, limits, how deep each node still has to go
 *   gram_build.c    nodes and edges: literals, code points, string rules
 *   gram_number.c   numbers between two bounds, multiples
 *   gram_regex.c    patterns to nodes over the bytes of a JSON string
 *   gram_dfa.c      a DFA of these nodes; what two of them accept
 *   gram_expand.c   $ref, allOf, anyOf, oneOf: a schema as a list of plain ones
 *   gram_merge.c    the plain schema that says what two say; schemas that exclude each other
 *   gram_schema.c   plain schemas to rules: objects, arrays, values
 *   gram_string.c   enum, pattern, format, length
 *   gram_names.c    names of properties
 *   gram_tool.c     tool calls around the schemas of functions
 *   gram_param.c    arguments that are written without JSON around them
 *   gram_until.c    free text up to a mark, reasoning
 *   gram_sets.c     lists of numbers, each kept once
 *   gram_run.c      the automaton as it runs: sets of nodes, transitions, frames
 *   gram_vocab.c    the prefix trie of a vocabulary
 *   gram_mask.c     which tokens may come next
 *   tool_form.c     forms of calls and of reasoning, a row each
 *   tool_stream.c   generated text to events; tool_head.c: the head of a call
 *   tool_write.c    calls and tools as text
 *
 * A grammar is a set of *rules*, each a nondeterministic automaton over bytes.  A rule is entered
 * by its opening byte ({, [ or ") and left by its closing one, so what is open is told by the text
 * alone: such an automaton can be made deterministic.  It runs as a stack of *frames*, one for
 * every open bracket or string; a frame is a set of nodes.  Entering a rule pushes the start of
 * every rule that may begin here; leaving pops, and takes the edges of the set below that called a
 * rule which has ended.  So alternatives never multiply with depth.
 *
 * What counts (characters of a string, commas of an array or object) is a number of the frame,
 * since it, too, is told by the text.  Nodes carry the bounds within which they are alive.
 *
 * Every node that is alive can still reach the end of its rule, with the stack that is left and
 * within its bounds: nodes that cannot are dropped, so the text can always be completed. */
#ifndef KVD_TEXT_GRAM_IMPL_H
#define KVD_TEXT_GRAM_IMPL_H

#include "base/json.h"
#include "text/text.h"

#define GRAM_NONE UINT32_MAX

/* Limits; beyond is KVD_E_INVAL with the limit's name. */
#define GRAM_MAX_BYTES      (1u << 20) /* of a schema's or of the tools' text */
#define GRAM_MAX_NESTING    100        /* of brackets in that text, and of schemas in schemas */
#define GRAM_MAX_RULES      10000u
#define GRAM_MAX_NODES      300000u
#define GRAM_MAX_EDGES      1000000u
#define GRAM_MAX_STEPS      6000000u /* of compiling: about 10 ns each */
#define GRAM_MAX_PLAIN      1000u    /* plain schemas that one schema stands for */
#define GRAM_MAX_ENUM       10000u   /* values */
#define GRAM_MAX_PATTERN    1000u    /* bytes of a regular expression */
#define GRAM_MAX_REPEAT     1000u    /* of {n,m} */
#define GRAM_MAX_DFA        2000u    /* states of a pattern */
#define GRAM_MAX_FEAS_BITS  (1u << 23)
#define GRAM_MAX_SETS       16384u      /* while running */
#define GRAM_MAX_SET_NODES  (1u << 20)  /* all sets together */
#define GRAM_MAX_TABLE      (16u << 20) /* bytes of transitions */
#define GRAM_MAX_WHITE      64u         /* blanks and newlines in a row */
#define GRAM_MAX_INT_DIGITS 19          /* before the point of a number that has no upper bound */
#define GRAM_MAX_FRACTION   16          /* behind it, where the bounds need no more */
#define GRAM_MAX_STEP       1000u       /* of multipleOf, its point left out */
/* Of a number whose upper bound has more: as many as 128 bits take. */
#define GRAM_MAX_WIDE_DIGITS 39
#define GRAM_MASKS           32 /* kept, of those that were expensive to make */

enum gram_edge_kind {
    GRAM_EPS,
    GRAM_BYTE, /* lo..hi */
    GRAM_CALL, /* the rule's opening byte */
    GRAM_RET   /* the closing byte of the rule it is in */
};

typedef struct gram_edge {
    uint32_t next; /* of the same node */
    uint32_t to, rule;
    uint8_t  kind, lo, hi;
    bool     counts; /* adds 1 to the frame's number */
} gram_edge;

enum gram_node_flag {
    GRAM_WHITE  = 1, /* white space may come here */
    GRAM_ACCEPT = 2, /* the text may end here */
    GRAM_TEXT   = 4  /* free text: special tokens, too */
};

typedef struct gram_node {
    uint32_t edge; /* first of a list */
    uint32_t rule;
    uint32_t min, max; /* alive while the frame's number is within */
    uint32_t feas;     /* first bit of its row in gram.feas; GRAM_NONE: has none */
    uint32_t need;     /* frames that the way to the rule's end takes; GRAM_NONE: there is none */
    uint8_t  flags;
} gram_node;

typedef struct gram_rule {
    uint32_t start;
    uint32_t height;     /* frames it takes, its own included */
    uint32_t row;        /* bits of a row of gram.feas */
    uint32_t min, max;   /* characters of a plain string */
    uint32_t body, shut; /* of a plain string: before a character, before the quote */
    char     open, close;
    bool     plain;  /* a string of any characters */
    bool     bounds; /* some node of it is not always alive */
} gram_rule;

/* ---- gram_sets.c: lists of numbers, ascending, each kept once --------------------------- */

typedef struct gram_sets {
    uint32_t *item, *off; /* list i is item[off[i] .. off[i + 1]) */
    uint32_t *slot;       /* hash */
    uint32_t  n, cap, cap_items, mask;
} gram_sets;

bool     gram_sets_open(gram_sets *s, uint32_t cap, uint32_t cap_items);
void     gram_sets_close(gram_sets *s);
uint64_t gram_sets_bytes(const gram_sets *s);
/* The list's number; GRAM_NONE: there is no room. */
uint32_t gram_sets_add(gram_sets *s, const uint32_t *item, uint32_t n);

/* ---- the grammar --------------------------------------------------------------------- */

enum gram_move { /* low bits of an entry of gram.table; the number above them */
                 GRAM_UNKNOWN,
                 GRAM_DEAD,
                 GRAM_STAY, /* set */
                 GRAM_PUSH, /* set */
                 GRAM_POP   /* list of rules that have ended */
};
#define GRAM_MOVE_BITS  3
#define GRAM_MOVE_COUNT 8u  /* adds 1 to the frame's number */
#define GRAM_MOVE_WHITE 16u /* white space */
#define GRAM_MOVE_SHIFT 5

enum gram_set_flag {
    GRAM_SET_ACCEPT = 1,
    GRAM_SET_TEXT   = 2,
    GRAM_SET_BOUNDS = 4, /* nodes of it may die of the frame's number */
    GRAM_SET_PLAIN  = 8  /* before a character of one plain string rule */
};

typedef struct gram_conf { /* where the automaton is while tokens are tried */
    uint32_t set, count, parent, depth, white;
    uint32_t links; /* gram.n_link behind it */
} gram_conf;

typedef struct gram_link { /* a frame below */
    uint32_t set, count, parent;
} gram_link;

typedef struct gram_exit { /* of a trie node's byte that leaves the frame it began in */
    uint32_t node, rules, count;
} gram_exit;

typedef struct gram_mask_slot {
    uint32_t set; /* GRAM_NONE: free */
    uint32_t n_exit;
    uint64_t used; /* when */
} gram_mask_slot;

struct gram {
    const gram_vocab *v;
    gram_node        *node;
    gram_edge        *edge;
    gram_rule        *rule;
    uint32_t          n_node, n_edge, n_rule;
    uint64_t         *feas; /* bits: node x frame's number -> the string can still end */
    uint32_t          start, max_need;
    uint32_t          first; /* set */
    char             *notes; /* what was relaxed; NULL: nothing */

    uint8_t  class_of[256];
    uint32_t n_class, max_sets;

    gram_sets sets, ends; /* of nodes; of rules */
    uint8_t  *set_flags;
    uint32_t *table;       /* [max_sets][n_class] */
    uint64_t *return_key;  /* set and ends -> set */
    uint32_t *return_to;   /* 0: free, else set + 1 */
    uint32_t *mark, stamp; /* [n_node] of the closure under way */
    uint32_t *list, *todo; /* [n_node] */
    bool      full;        /* a limit of running was met */

    gram_conf     *conf; /* [longest token + 1] */
    gram_link     *link; /* [GRAM_MAX_DEPTH + longest token] */
    uint32_t       n_link;
    gram_exit     *exit; /* [max_exit] of the walk under way, and [GRAM_MASKS] kept */
    uint32_t       n_exit, max_exit;
    gram_mask_slot slot[GRAM_MASKS];
    uint64_t      *slot_bits; /* [GRAM_MASKS][words] */
    gram_exit     *slot_exit; /* [GRAM_MASKS][max_exit] */
    gram_stats     stats;
};

/* ---- gram_run.c ------------------------------------------------------------------------ */

kvd_status gram_run_open(gram *g, kvd_err *err);
void       gram_run_close(gram *g);
/* One byte; false: it may not come.  The frame of depth `base` is never left: *ends gets the list
 * of rules that would end (base 0: all may be left, ends may be NULL). */
bool gram_step(gram *g, gram_conf *c, uint8_t byte, uint32_t base, uint32_t *ends);
/* Leaves the frame: the rules of list `ends` have ended.  false: nothing goes on behind them. */
bool     gram_return(gram *g, gram_conf *c, uint32_t ends);
uint32_t gram_set_at(gram *g, uint32_t node); /* of a node alone; GRAM_NONE: nothing leads out */
void     gram_load(gram *g, const gram_at *at, gram_conf *c);
void     gram_store(const gram *g, const gram_conf *c, gram_at *at);

/* ---- gram_vocab.c --------------------------------------------------------------------- */

typedef struct gram_trie_node {
    uint32_t end; /* behind its subtree */
    uint32_t
        token; /* first of its tokens in gram_vocab.token; the next node's is behind the last */
    uint16_t depth; /* bytes */
    uint8_t  byte;
} gram_trie_node;

struct gram_vocab {
    const tok      *t;
    uint32_t        n_token, words; /* words: of 64 bits of a mask */
    gram_trie_node *node;           /* in preorder, and one behind the last */
    uint32_t        n_node;
    uint32_t       *token; /* ids by their bytes */
    uint32_t        n_sorted;
    uint32_t        max_bytes, max_push; /* of a token: bytes, brackets that open */
    uint64_t       *special;             /* bits: may come in free text though not in the trie */
    uint64_t       *ends, *in_trie;      /* bits */

    /* What may come inside a plain string of any length, by characters */
    uint32_t   max_chars;
    uint32_t  *plain, *plain_off; /* ids with k characters: plain[plain_off[k] .. plain_off[k+1]) */
    uint64_t  *plain_bits;        /* all of them */
    gram_exit *plain_exit;        /* those that close the string; count: characters before */
    uint32_t   n_plain_exit;
    uint64_t   heap_bytes;
};

/* ---- gram_mask.c ---------------------------------------------------------------------- */

kvd_status gram_mask_open(gram *g, kvd_err *err);
void       gram_mask_close(gram *g);
/* Tries all tokens from c on and calls fn for each that may come, with the characters counted; what
 * would leave the frame goes to g->exit.  For gram_vocab.c. */
typedef void (*gram_found_fn)(void *ctx, uint32_t token, uint32_t count);
bool gram_walk_plain(gram *g, gram_found_fn fn, void *ctx);

/* ---- gram_build.c --------------------------------------------------------------------- */

typedef struct gram_range {
    uint32_t lo, hi; /* code points */
} gram_range;

typedef struct gram_pair { /* of a table: two pointers and what they stand for */
    const void *a, *b;
    uint32_t    number;
    void       *ptr;
} gram_pair;

typedef struct gram_map {
    gram_pair *slot;
    uint32_t   n, cap;
} gram_map;

typedef struct gram_job { /* a rule whose inside is still to be written */
    uint32_t rule;
    json_t  *schema;
    char    *path;
} gram_job;

/* A failure stays: what follows does nothing.  The results of functions that make nodes may then be
 * any. */
typedef struct gram_build {
    kvd_status  st;
    kvd_err    *err;
    const char *what; /* "schema", or "tools: get_weather" */
    char        path[256];

    gram_node *node;
    gram_edge *edge;
    gram_rule *rule;
    uint32_t   n_node, cap_node, n_edge, cap_edge, n_rule, cap_rule;
    uint32_t   max_node, owner; /* owner: rule of new nodes */
    uint64_t  *feas;
    uint64_t   n_feas;
    uint64_t   steps;

    kvd_json_texts texts; /* of the schemas' numbers */

    json_t   *root;      /* of $ref; NULL: no schema is being written */
    json_t   *made;      /* array: owns what merging made */
    json_t   *functions; /* object: name -> node before the call's body; NULL: no tool calls */
    gram_map  expanded, merged, rules;
    gram_job *job;
    uint32_t  n_job, cap_job, n_done; /* done: of the first ones the rules are written */
    uint32_t  nesting;
    json_t   *any, *none;  /* schemas: what fits everything, and nothing */
    uint32_t  free_string; /* rule */
} gram_build;

kvd_status gram_refuse(gram_build *b, const char *fmt, ...) KVD_PRINTF(2, 3);
kvd_status gram_no_memory(gram_build *b);
bool       gram_tick(gram_build *b, uint64_t steps); /* false: failed, or too many */
void       gram_build_free(gram_build *b);

uint32_t gram_node_new(gram_build *b);
void     gram_eps(gram_build *b, uint32_t from, uint32_t to);
void     gram_byte(gram_build *b, uint32_t from, uint32_t to, uint8_t lo, uint8_t hi, bool counts);
void     gram_call(gram_build *b, uint32_t from, uint32_t to, uint32_t rule);
void     gram_ret(gram_build *b, uint32_t from);
uint32_t gram_literal(gram_build *b, uint32_t from, const char *s, size_t len);
/* Code points as the inside of a JSON string has them: escaped where they must be, and only then.
 * The first byte counts.  Surrogates are left out. */
void gram_points(gram_build *b, uint32_t from, uint32_t to, gram_range r);
/* What a byte of a string is inside its quotes; returns the length. */
size_t   gram_quoted(unsigned char c, char out[16], bool *first);
uint32_t gram_rule_new(gram_build *b, char open);
/* Strings of min..max characters, max GRAM_NONE: any number. */
uint32_t gram_plain_string(gram_build *b, uint32_t min, uint32_t max);
/* The string rule of n values, each escaped as little as can be. */
uint32_t gram_words(gram_build *b, json_t *const *word, size_t n);
/* The rule of strings without escapes that are none of the keys of an object. */
uint32_t gram_other_keys(gram_build *b, json_t *object);

gram_pair *gram_map_find(const gram_map *m, const void *a, const void *b);
gram_pair *gram_map_add(gram_build *b, gram_map *m, const void *a, const void *key2);

/* ---- gram_number.c -------------------------------------------------------------------- */

typedef struct gram_bounds {
    bool        has_min, has_max;
    bool        above, below; /* the bound itself is outside */
    bool        integer;
    uint32_t    step_frac;
    uint64_t    step; /* multiples of step / 10^step_frac; 0: any number */
    kvd_decimal min, max;
} gram_bounds;

/* A keyword's number, `what` by name; false: refused. */
bool gram_decimal(gram_build *b, const char *what, const json_t *v, kvd_decimal *out);
/* What a plain schema says of numbers; integer: it allows no others. */
gram_bounds gram_bounds_of(gram_build *b, const json_t *schema, bool integer);
/* Whether a number of enum keeps to it. */
bool gram_number_fits(gram_build *b, const json_t *schema, const json_t *v);
void gram_number(gram_build *b, uint32_t from, uint32_t to, const gram_bounds *n);

/* ---- gram_regex.c --------------------------------------------------------------------- */

typedef struct gram_dfa {
    uint16_t *next;     /* [n][256]; 0: none */
    uint8_t  *flags;    /* [n]: 1 accepts, 2 its bytes begin characters */
    uint32_t  n;        /* state 0: dead; 1: start */
    uint32_t  min, max; /* characters, besides; max GRAM_NONE: any number */
} gram_dfa;
/* ---- gram_dfa.c ---- */
void gram_dfa_free(gram_dfa *d);
bool gram_dfa_open(gram_build *b, gram_dfa *d);
/* Of nodes from `start` to `accept`, by subsets. */
bool gram_dfa_of(gram_build *out, const gram_build *nfa, uint32_t start, uint32_t accept,
                 gram_dfa *d);
/* Of a regular expression as JSON Schema means it: it may match anywhere unless anchored. */
bool gram_regex(gram_build *b, const char *text, size_t len, gram_dfa *out);
/* What both accept; frees both. */
bool gram_dfa_and(gram_build *b, gram_dfa *x, gram_dfa *y, gram_dfa *out);
/* Takes the keys of an object out; frees d. */
bool gram_dfa_without(gram_build *b, gram_dfa *d, json_t *keys, gram_dfa *out);
bool gram_dfa_accepts(const gram_dfa *d, const char *s, size_t len);

/* ---- gram_string.c -------------------------------------------------------------------- */

#define GRAM_PATTERNS "\x01patterns" /* in merged schemas: array of "p" + regex, "f" + format */
/* The rule of the strings that a plain schema without enum and const says, but for the keys of an
 * object (NULL: none). */
uint32_t gram_string_rule(gram_build *b, json_t *schema, json_t *without);
/* Keeps those of an enum that fit; returns how many. */
size_t gram_words_that_fit(gram_build *b, json_t *schema, json_t **word, size_t n_word);
/* The integer of a keyword; absent: what `missing` says. */
uint32_t gram_count(gram_build *b, json_t *schema, const char *key, uint32_t missing);

/* ---- gram_expand.c, gram_merge.c ------------------------------------------------------- */

/* The plain schemas (no $ref, allOf, anyOf, oneOf; true and false are objects, too) of which a
 * value must fit one: an array that b owns; NULL after a failure. */
json_t *gram_expand(gram_build *b, json_t *schema);
/* What both of two plain schemas say: one that b owns; NULL: nothing fits both, or a failure. */
json_t *gram_merge(gram_build *b, json_t *x, json_t *y);
/* No value written by x fits y. */
bool gram_excludes(gram_build *b, json_t *x, json_t *y, int depth);
/* Numbers are equal by value, however they are written. */
bool    gram_equal(gram_build *b, const json_t *x, const json_t *y);
bool    gram_is_annotation(const char *key);
bool    gram_is_false(const json_t *plain);
bool    gram_has(const json_t *schema, const char *key);
json_t *gram_own(gram_build *b, json_t *made); /* hands a new value to b; NULL: no memory */

enum gram_type {
    GRAM_T_NULL    = 1,
    GRAM_T_BOOL    = 2,
    GRAM_T_INTEGER = 4,
    GRAM_T_NUMBER  = 8, /* integers, too */
    GRAM_T_STRING  = 16,
    GRAM_T_ARRAY   = 32,
    GRAM_T_OBJECT  = 64,
    GRAM_T_ANY     = 127
};
/* Those that a value is of. */
uint32_t gram_type_of(gram_build *b, const json_t *v);
uint32_t gram_types(gram_build *b, json_t *plain); /* named, or else told from its keywords */

/* ---- gram_schema.c --------------------------------------------------------------------- */

void gram_value(gram_build *b, uint32_t from, uint32_t to, json_t *schema, const char *step);
void gram_run_jobs(gram_build *b);
/* JSON text with limits on size and nesting. */
json_t *gram_read_json(gram_build *b, const char *text, size_t len);

/* ---- gram_names.c ---------------------------------------------------------------------- */

/* The plain schema that the names of an object's members must fit; NULL: any will do. */
json_t *gram_names_of(gram_build *b, json_t *object);
/* Those keys of an object that fit such a schema, as an object that b owns. */
json_t *gram_names_that_fit(gram_build *b, json_t *names, json_t *object);
/* The rule of the names that fit it, but for those of `taken`. */
uint32_t gram_names_rule(gram_build *b, json_t *names, json_t *taken);

/* ---- gram_until.c ---------------------------------------------------------------------- */

#define GRAM_MAX_MARKS 2

/* Any text from node `start` on, up to the first of n marks, behind which to[i] is; its nodes have
 * these flags.  first: bytes with which it does not begin (NULL: none); seen: text that stands
 * before it, "" or the beginning of a mark. */
void gram_until(gram_build *b, uint32_t start, const tok_str *mark, const uint32_t *to, size_t n,
                uint8_t flags, const char *first, const char *seen);
/* Reasoning, where the description has it, before what is written from the returned node on. */
uint32_t gram_think(gram_build *b, uint32_t start, const gram_desc *d);

/* ---- gram_tool.c ----------------------------------------------------------------------- */

/* The whole of a grammar of tool calls; notes gets what was relaxed. */
void gram_tools(gram_build *b, uint32_t from, const gram_desc *d, kvd_buf *notes);
/* gram_param.c: the parameters of a function (NULL: any) between two nodes, each in its mark.  Of
 * text alone an enum is applied: false where more is asked of some. */
bool gram_params(gram_build *b, uint32_t from, uint32_t to, json_t *parameters);

#endif
