/* SPDX-License-Identifier: Apache-2.0 */
/* tok_impl.h - what the tokenizer's files share.  Private to text/.
 *
 *   tok.c          open, close, accessors, names of pre-tokenizers, ends of generation
 *   tok_vocab.c    tables built from the file: token bytes, byte string -> id, merges
 *   tok_encode.c   text -> specials and segments -> words -> symbols -> ids
 *   tok_split.c    pre-tokenizers (the splitting regexes, hand-written and linear)
 *   tok_norm.c     NFC
 *   tok_merge.c    the merge loop of BPE and SPM
 *   tok_special.c  specials by text: lookup and leftmost-longest search
 *   tok_stream.c   ids -> UTF-8 */
#ifndef KVD_TEXT_TOK_IMPL_H
#define KVD_TEXT_TOK_IMPL_H

#include "text/text.h"

#define TOK_NONE UINT32_MAX /* no id, no symbol, no rank */

/* A longer token never results from a merge of SPM pieces (no real one is longer than 64 bytes)
 * and a longer special is never recognised: keeps building and searching linear. */
#define TOK_MAX_PIECE   256
#define TOK_MAX_SPECIAL 512
#define TOK_META_SPACE  "\xe2\x96\x81"      /* U+2581, SPM's space */
#define TOK_MAX_TEXT    ((size_t)INT32_MAX) /* bytes of one tok_encode() */

typedef enum tok_split {
    SPLIT_GPT2,
    SPLIT_SMOLLM,
    SPLIT_LLAMA3,
    SPLIT_QWEN2,
    SPLIT_GPT4O
} tok_split;

enum tok_flag {                  /* bits of tok.flag[] */
                FLAG_HIDDEN = 1, /* control, unknown, unused: tok_is_special() */
                FLAG_MATCH =
                    2, /* control (in trusted text), user-defined (everywhere): found by text */
                FLAG_END      = 4, /* ends generation */
                FLAG_RSTRIP   = 8, /* white space behind it belongs to it (Phi-3) */
                FLAG_ORDINARY = 16 /* normal: may stand for a whole word */
};

/* Open addressing, linear probing; a power of two slots, at most half full. */
typedef struct tok_merge {
    uint32_t left, right; /* left == TOK_NONE: free */
    uint32_t rank, id;
} tok_merge;

struct tok {
    tok_model   model;
    tok_split   split;
    const char *pre_name;    /* static */
    bool        nfc;         /* ordinary text is normalised */
    bool        whole_word;  /* a word that is a token is not merged */
    bool        inner_space; /* SPM: some piece has a space behind another character */
    bool        add_bos, add_space_prefix;
    uint32_t    n_token;
    int32_t     bos, eos, unk;

    char     *bytes;     /* decoded bytes of all tokens, one after the other */
    uint32_t *off;       /* [n_token + 1] into bytes */
    uint8_t  *flag;      /* [n_token] of tok_flag */
    uint32_t  max_bytes; /* of one token */

    uint32_t *word; /* hash of token bytes -> id, TOK_NONE free; what ordinary text can become */
    uint64_t  word_mask;

    tok_merge *merge;
    uint32_t   merge_shift; /* 64 - log2(slots) */

    uint32_t byte_id[256]; /* BPE: initial symbols; SPM: byte fallback; TOK_NONE: none */

    uint32_t *special; /* ids with FLAG_MATCH, sorted by their bytes */
    uint32_t  n_special;
    uint32_t  first[257]; /* first[b]..first[b + 1]: those that begin with byte b */

    uint64_t heap_bytes;
};

static inline const char *tok_text(const tok *t, uint32_t id, size_t *len)
{
    *len = t->off[id + 1] - t->off[id];
    return t->bytes + t->off[id];
}

/* ---- tok_vocab.c ---- */
void      *tok_alloc(tok *t, uint64_t n, size_t size); /* zeroed; counted in heap_bytes */
kvd_status tok_vocab_build(tok *t, const tok_vocab *v, kvd_err *err);
size_t   tok_undo_meta(const char *s, size_t len, char *dst); /* U+2581 -> space; may be in place */
uint32_t tok_word_find(const tok *t, const char *s, size_t len);

static inline const tok_merge *tok_merge_find(const tok *t, uint32_t left, uint32_t right)
{
    const uint64_t mask = (UINT64_C(1) << (64 - t->merge_shift)) - 1;
    uint64_t i = ((uint64_t)left << 32 | right) * UINT64_C(0x9e3779b97f4a7c15) >> t->merge_shift;

    for (;; i = (i + 1) & mask) {
        const tok_merge *m = &t->merge[i];

        if (m->left == left && m->right == right)
            return m;
        if (m->left == TOK_NONE)
            return NULL;
    }
}

/* ---- tok_split.c: where the word beginning at pos ends, pos < result <= end.
 * Walk a segment with one splitter from its start. */
typedef struct tok_splitter {
    tok_split   kind;
    const char *s;
    size_t      pos, end;
    size_t      piece_end; /* smollm: the text between digits is split on its own */
} tok_splitter;
void   tok_splitter_init(tok_splitter *sp, tok_split kind, const char *s, size_t len);
size_t tok_splitter_next(tok_splitter *sp); /* end of the next word; sp->pos is its start before */

/* ---- tok_norm.c: appends the NFC of s to out; invalid bytes stay as they are.
 * false: s was NFC already and nothing was appended. */
bool tok_nfc(const char *s, size_t len, kvd_buf *out);

/* ---- tok_merge.c ---- */
typedef struct tok_sym {
    uint32_t id;  /* TOK_NONE: not in the vocabulary */
    uint32_t off; /* where its text begins */
} tok_sym;
typedef struct tok_node {
    uint32_t id, off, prev, next;
    uint32_t rank, merged; /* of the pair with next; rank TOK_NONE: none, or merged away */
} tok_node;
typedef struct tok_scratch { /* grown on demand, freed by tok_scratch_free */
    tok_sym  *sym;
    size_t    sym_cap;
    tok_node *node;
    size_t    node_cap;
    uint64_t *heap; /* rank << 32 | left node */
    size_t    heap_len, heap_cap;
} tok_scratch;
/* Applies merges to sym[0..n) until none is left: lowest rank first, leftmost of equals. */
kvd_status tok_merge_all(const tok *t, tok_scratch *sc, size_t *n, kvd_err *err);
kvd_status tok_scratch_syms(tok_scratch *sc, size_t n, kvd_err *err);
void       tok_scratch_free(tok_scratch *sc);

/* ---- tok_special.c ---- */
kvd_status tok_special_build(tok *t, kvd_err *err);
typedef struct tok_special {
    uint32_t id;  /* TOK_NONE: none */
    size_t   len; /* bytes of its text; without one, how far to go on before looking again */
} tok_special;
/* The longest special that is a prefix of s[0..len).  In text that is not trusted a control token
 * is text: all of it is skipped, with the specials that begin inside it, as in Hugging Face's
 * tokenizers. */
tok_special tok_special_at(const tok *t, const char *s, size_t len, bool trusted);

#endif
