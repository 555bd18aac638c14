/* SPDX-License-Identifier: Apache-2.0 */
/* text.h - the door to text/: UTF-8, tokenizers, chat templates.  Stands on base/ only: what a
 * tokenizer needs of a model file comes in as plain arrays (tok_vocab).
 * Thread: a tok and a tmpl are immutable once opened, any thread; a tok_stream has one owner. */
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
 * from an exact family signature of the vocabulary, else refused with the way out (--pre). */
kvd_status tok_open(tok **out, const tok_vocab *v, kvd_err *err);
void       tok_close(tok *t);

/* Encodes text, specials (control and user-defined tokens) recognised only when wholly inside a
 * trusted span (adjacent spans count as one); everywhere else their text is ordinary text.
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

#endif
