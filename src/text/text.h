/* SPDX-License-Identifier: Apache-2.0 */
/* text.h - the door to text/: UTF-8, tokenizers, chat templates, grammars, tool calls.  Stands on
 * base/ only: what a tokenizer needs of a model file comes in as plain arrays (tok_vocab).
 * Thread: a tok, a tmpl and a gram_vocab are immutable once opened, any thread; a tok_stream, a
 * tool_stream and a gram have one owner at a time. */
#ifndef KVD_TEXT_H
#define KVD_TEXT_H

#include "base/base.h"

/* ---- UTF-8 ----------------------------------------------------------------------- */

/* Decodes one code point at s[0..len); returns bytes used (>= 1), *cp = U+FFFD for invalid bytes
 * (maximal-subpart rule of Unicode).  len >= 1. */
size_t utf8_decode(const char *s, size_t len, uint32_t *cp);
size_t utf8_encode(uint32_t cp, char out[4]); /* bytes written; surrogates and > 10FFFF as U+FFFD */
/* Length of the longest prefix of s that does not end inside a possibly valid sequence. */
size_t utf8_complete_prefix(const char *s, size_t len);
/* Columns of a terminal that a code point takes: 0 to 2.  Control characters take none. */
uint32_t utf8_columns(uint32_t cp);
/* Bytes of the first grapheme cluster of a text: what a reader counts as one character.  len > 0.
 */
size_t utf8_cluster(const char *s, size_t len);

/* ---- tokenizer ------------------------------------------------------------------- */

typedef enum tok_model { TOK_BPE, TOK_SPM } tok_model; /* "gpt2" and "llama" in GGUF */

typedef enum tok_attr { /* values of tokenizer.ggml.token_type */
                        TOK_NORMAL = 1,
                        TOK_UNKNOWN,
                        TOK_CONTROL,
                        TOK_USER_DEFINED,
                        TOK_UNUSED,
                        TOK_BYTE
} tok_attr;

typedef struct tok_str {
    const char *data;
    size_t      len;
} tok_str;

/* What a model file says of its tokenizer; every pointer is borrowed for the call only. */
typedef struct tok_vocab {
    tok_model      model;
    tok_str        pre; /* "smollm", "gpt-2", "llama-bpe", "qwen2", "gpt-4o", ...; len 0: absent */
    uint32_t       n_token;
    const tok_str *token; /* [n_token] as stored (byte-level alphabet for BPE) */
    const float   *score; /* [n_token], SPM; or NULL */
    const int32_t *attr;  /* [n_token] of tok_attr, or NULL: all normal */
    uint32_t       n_merge;
    const tok_str *merge;              /* [n_merge] "left right", BPE */
    int32_t        bos, eos, eot, unk; /* -1: none */
    bool           add_bos, add_eos, add_space_prefix;
} tok_vocab;

typedef struct tok tok;

/* Refuses an unknown pre-tokenizer by name (KVD_E_UNSUPPORTED); a missing one is recovered only
 * from an exact family signature of the vocabulary, else refused with the way out. */
kvd_status tok_open(tok **out, const tok_vocab *v, kvd_err *err);
void       tok_close(tok *t);

/* Encodes text.  A control token is recognised only when wholly inside a trusted span (adjacent
 * spans count as one); everywhere else its text is ordinary text.  A user-defined token is
 * recognised everywhere, but not where it would reach over the beginning or the end of such a span.
 * add_bos adds the BOS only if the model asks for one; an EOS is never added (a prompt goes on).
 * Appends to *ids; a failure leaves what they held.
 * Invalid UTF-8 is encoded byte by byte where the vocabulary allows, never rejected.
 * O(len log len) at worst, for any text. */
typedef struct tok_ids {
    int32_t *data;
    size_t   len, cap;
} tok_ids;
kvd_status tok_encode(const tok *t, const char *text, size_t len, const kvd_span *trusted,
                      size_t n_trusted, bool add_bos, tok_ids *ids, kvd_err *err);
void       tok_ids_free(tok_ids *ids);

/* What add_bos means where the file has no tokenizer.ggml.add_bos_token: the family's habit. */
bool tok_default_add_bos(tok_model model, tok_str pre);

uint32_t tok_n_token(const tok *t);
/* The bytes a token decodes to (byte-level alphabet and U+2581 undone); specials: their text.
 * Borrowed; *len = 0 outside the vocabulary. */
const char *tok_bytes(const tok *t, int32_t id, size_t *len);
bool        tok_is_special(const tok *t, int32_t id); /* control, unknown, unused */
/* The id whose stored text is exactly this control or user-defined token; -1: none. */
int32_t tok_find_special(const tok *t, const char *text, size_t len);
/* Ends of generation: eos, eot and the turn ends the family uses (<|im_end|>, <|eot_id|>, <|end|>,
 * <|endoftext|>, ...), as far as the vocabulary has them as control tokens. */
bool        tok_is_end(const tok *t, int32_t id);
int32_t     tok_bos(const tok *t);
int32_t     tok_eos(const tok *t);
bool        tok_adds_bos(const tok *t);
uint64_t    tok_heap_bytes(const tok *t);
const char *tok_pre_name(const tok *t);

/* Streaming decode; see kvd_detok in kvdrive.h. */
typedef struct tok_stream tok_stream;
kvd_status                tok_stream_open(tok_stream **out, const tok *t, kvd_err *err);
const char               *tok_stream_feed(tok_stream *s, int32_t id, bool show_special);
const char               *tok_stream_flush(tok_stream *s);
size_t tok_stream_len(const tok_stream *s); /* of the text returned last, which may hold zeros */
void   tok_stream_close(tok_stream *s);

/* ---- chat templates: a sandboxed interpreter of the Jinja subset models use ------- */

typedef struct tmpl tmpl;

/* Compiles; a construct, filter, test, function or method we do not run is KVD_E_UNSUPPORTED and
 * named with its line, at this point and not when rendering. */
kvd_status tmpl_open(tmpl **out, const char *src, size_t len, kvd_err *err);
void       tmpl_close(tmpl *t);

typedef struct tmpl_input {
    const char *messages_json; /* array; required */
    const char *tools_json;    /* array or NULL */
    const char *vars_json;     /* object of more variables or NULL; overrides nothing above */
    bool        add_generation_prompt;
    const char *bos_token, *eos_token; /* text, "" if none */
    int64_t     now_unix;              /* what strftime_now() shows; the caller's clock */
} tmpl_input;

/* Appends to out.  *spans (caller frees with kvd_free; may be NULL) receives the bytes of out that
 * were written in the template itself, merged and ascending: text that came through messages,
 * tools or vars is never in one, whatever filters it went through.  Two things from outside count
 * as the template's: bos_token and eos_token, and the "role" of a message when it is one of the
 * usual words, because templates write special tokens around it ('<|' + role + '|>').
 *
 * Limits: steps and memory in proportion to the input, depth, output size (text/tmpl_ast.h);
 * beyond is an error, never a hang.  raise_exception() gives KVD_E_INVAL with its message.  The
 * clock is shown as UTC: a caller who wants local time adds its offset to now_unix.  On failure
 * out, *spans and *n_span hold nothing new. */
kvd_status tmpl_render(const tmpl *t, const tmpl_input *in, kvd_buf *out, kvd_span **spans,
                       size_t *n_span, kvd_err *err);

/* ---- tool calls: how a model writes them, told from its chat template --------------- */

/* tool_form.h has a row for each form.  A template may be NULL. */
kvd_tool_format tool_format_of(const char *chat_template, size_t len);
kvd_reasoning   tool_reasoning_of(const char *chat_template, size_t len);
/* Whether an answer to the prompt, which the template rendered, begins inside of reasoning. */
kvd_reasoning_state tool_reasoning_state(kvd_reasoning r, const char *prompt, size_t len);
bool tool_is_mark(const tok *t, int32_t id); /* a special token that is in a text of some form */

/* The texts around reasoning; "": none. */
typedef enum tool_reasoning_part {
    TOOL_REASONING_BEGIN,  /* "<think>" */
    TOOL_REASONING_END,    /* "</think>" */
    TOOL_REASONING_BEHIND, /* between the end and what follows */
    TOOL_REASONING_ANSWER  /* before the text of the answer */
} tool_reasoning_part;
const char *tool_reasoning_text(kvd_reasoning r, tool_reasoning_part part);

/* tool_write.c, for templates that do not: calls as the form has them, of an array of calls as
 * OpenAI's chats have them; and what a system message says of the tools.  Appends to out. */
kvd_status tool_write_calls(kvd_tool_format f, const char *calls_json, kvd_buf *out, kvd_err *err);
kvd_status tool_write_tools(kvd_tool_format f, const char *tools_json, kvd_buf *out, kvd_err *err);

/* Generated text to events; see kvd_tool_stream in kvdrive.h. */
typedef struct tool_desc {
    kvd_tool_format     format;
    const char         *tools_json; /* types of parameters, where the form does not show them */
    kvd_reasoning       reasoning;
    kvd_reasoning_state state;
} tool_desc;
typedef struct tool_stream tool_stream;
kvd_status                 tool_stream_open(tool_stream **out, const tool_desc *d, kvd_err *err);
void                       tool_stream_close(tool_stream *s);
kvd_status tool_stream_feed(tool_stream *s, const char *text, size_t len, kvd_err *err);
kvd_status tool_stream_flush(tool_stream *s, kvd_err *err);
kvd_status tool_stream_cut(tool_stream *s, bool more, kvd_err *err);
bool       tool_stream_next(tool_stream *s, kvd_tool_event *out);
bool       tool_stream_reasons(const tool_stream *s); /* what comes next is reasoning */

/* ---- grammars: which tokens may come next ------------------------------------------- */

#define GRAM_MAX_DEPTH 64 /* brackets open at a time, with the string inside */

typedef struct gram_vocab gram_vocab; /* prefix trie of a tokenizer, which it borrows */
typedef struct gram       gram;

kvd_status gram_vocab_open(gram_vocab **out, const tok *t, kvd_err *err);
void       gram_vocab_close(gram_vocab *v);
uint64_t   gram_vocab_heap_bytes(const gram_vocab *v);

typedef struct gram_desc { /* one of schema_json, json_object, tools_json */
    const char     *schema_json;
    bool            json_object;
    const char     *tools_json;
    kvd_tool_format format;
    kvd_tool_choice choice;
    const char     *tool_name; /* the function that must be called, once; NULL: any */
    bool            single_call;
    uint32_t        max_calls; /* 0: TOOL_CALLS_MAX */

    kvd_reasoning       reasoning; /* before the rest; not constrained */
    kvd_reasoning_state state;
} gram_desc;

/* Borrows v.  What a schema asks for and cannot be had, and what is beyond a limit (gram_impl.h),
 * is KVD_E_INVAL or KVD_E_UNSUPPORTED by name. */
kvd_status  gram_open(gram **out, const gram_vocab *v, const gram_desc *d, kvd_err *err);
void        gram_close(gram *g);
uint64_t    gram_heap_bytes(const gram *g);
const char *gram_notes(const gram *g); /* "": nothing was relaxed */
uint32_t    gram_n_token(const gram *g);

/* Where a text is in a grammar: plain data, good for this grammar alone. */
typedef struct gram_at {
    uint32_t depth, white;
    bool     ended; /* an end of generation was accepted */
    struct {
        uint32_t set, count;
    } frame[GRAM_MAX_DEPTH];
} gram_at;

void gram_begin(const gram *g, gram_at *at);
/* The tokens that may come, ends of generation where the text may end: tok_n_token() bits.  An
 * error if there are none, or the grammar has met a limit.  Allocates nothing; nor do the others.
 */
kvd_status gram_mask(gram *g, const gram_at *at, uint64_t *bits, kvd_err *err);
bool       gram_allows(gram *g, const gram_at *at, int32_t token);
/* KVD_E_INVAL if the token may not come; at is then as it was. */
kvd_status gram_accept(gram *g, gram_at *at, int32_t token, kvd_err *err);
kvd_status gram_accept_text(gram *g, gram_at *at, const char *text, size_t len, kvd_err *err);
bool       gram_may_end(const gram *g, const gram_at *at);

typedef struct gram_stats {
    uint64_t n_mask, n_cached; /* masks made; of them from what was kept */
    uint32_t n_rule, n_node, n_set, n_trie;
    uint64_t n_visited; /* nodes of the trie, in all masks */
} gram_stats;
void gram_get_stats(const gram *g, gram_stats *out);

#endif
