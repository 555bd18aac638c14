/* SPDX-License-Identifier: Apache-2.0 */
/* tok_encode.c - text to ids: control tokens in trusted spans and user-defined tokens anywhere cut
 * the text into segments; a segment is normalised, split into words, and each word's symbols are
 * merged.
 *
 * An encoder lives for one tok_encode(); on failure the caller's ids are cut back to what they
 * held.  Thread: the caller's. */
#include "text/tok_impl.h"

typedef struct encoder {
    const tok  *t;
    tok_ids    *ids;
    kvd_err    *err;
    tok_scratch scratch;
    kvd_buf     text; /* the segment rewritten (NFC, or with its space prefix) */
} encoder;

static kvd_status push_id(encoder *e, uint32_t id)
{
    tok_ids *ids = e->ids;

    if (ids->len == ids->cap) {
        const size_t cap  = ids->cap ? ids->cap * 2 : 64;
        int32_t     *data = kvd_realloc(ids->data, cap * sizeof(*data));

        if (!data)
            return kvd_fail(e->err, KVD_E_NOMEM, 0, "tokenizer: no memory for %zu ids", cap);
        ids->data = data;
        ids->cap  = cap;
    }
    ids->data[ids->len++] = (int32_t)id;
    return KVD_OK;
}

void tok_ids_free(tok_ids *ids)
{
    kvd_free(ids->data);
    *ids = (tok_ids){ 0 };
}

/* ---- BPE ---- */

static kvd_status encode_word(encoder *e, const char *s, size_t len)
{
    const tok *t = e->t;
    size_t     n = 0;

    if (t->whole_word) {
        const uint32_t id = tok_word_find(t, s, len);

        if (id != TOK_NONE && (t->flag[id] & FLAG_ORDINARY))
            return push_id(e, id);
    }
    KVD_TRY(tok_scratch_syms(&e->scratch, len, e->err));
    for (size_t i = 0; i < len; i++) {
        const uint32_t id = t->byte_id[(uint8_t)s[i]];

        if (id != TOK_NONE) /* a byte the vocabulary lacks cannot be said */
            e->scratch.sym[n++] = (tok_sym){ id, (uint32_t)i };
    }
    KVD_TRY(tok_merge_all(t, &e->scratch, &n, e->err));
    for (size_t i = 0; i < n; i++)
        KVD_TRY(push_id(e, e->scratch.sym[i].id));
    return KVD_OK;
}

static kvd_status encode_bpe(encoder *e, const char *s, size_t len)
{
    tok_splitter sp;

    e->text.len = 0;
    if (e->t->nfc && tok_nfc(s, len, &e->text)) {
        s   = e->text.data;
        len = e->text.len;
    }
    if (e->text.oom)
        return kvd_fail(e->err, KVD_E_NOMEM, 0, "tokenizer: no memory to normalise %zu bytes", len);
    tok_splitter_init(&sp, e->t->split, s, len);
    while (sp.pos < len) {
        const size_t pos = sp.pos, end = tok_splitter_next(&sp);

        KVD_TRY(encode_word(e, s + pos, end - pos));
    }
    return KVD_OK;
}

/* ---- SPM ---- */

/* A symbol no piece stands for: its bytes, or once the unknown token. */
static kvd_status push_fallback(encoder *e, const char *s, size_t len)
{
    const tok *t       = e->t;
    bool       unknown = false;

    for (size_t i = 0; i < len; i++) {
        const uint32_t id = t->byte_id[(uint8_t)s[i]];

        if (id != TOK_NONE)
            KVD_TRY(push_id(e, id));
        else
            unknown = true;
    }
    return unknown && t->unk >= 0 ? push_id(e, (uint32_t)t->unk) : KVD_OK;
}

static kvd_status encode_pieces(encoder *e, const char *s, size_t len)
{
    size_t n = 0;

    KVD_TRY(tok_scratch_syms(&e->scratch, len, e->err));
    for (size_t i = 0; i < len; n++) {
        uint32_t     cp;
        const size_t used = utf8_decode(s + i, len - i, &cp);

        e->scratch.sym[n] = (tok_sym){ tok_word_find(e->t, s + i, used), (uint32_t)i };
        i += used;
    }
    KVD_TRY(tok_merge_all(e->t, &e->scratch, &n, e->err));
    for (size_t i = 0; i < n; i++) {
        const tok_sym *sym = &e->scratch.sym[i];
        const size_t   end = i + 1 < n ? sym[1].off : len;

        KVD_TRY(sym->id != TOK_NONE ? push_id(e, sym->id)
                                    : push_fallback(e, s + sym->off, end - sym->off));
    }
    return KVD_OK;
}

/* Where no piece reaches across the gap between two words, words can be merged one by one. */
static size_t spm_word_end(const tok *t, const char *s, size_t pos, size_t len)
{
    if (t->inner_space)
        return len;
    while (pos < len && s[pos] == ' ')
        pos++;
    const char *space = pos < len ? memchr(s + pos, ' ', len - pos) : NULL;
    return space ? (size_t)(space - s) : len;
}

static kvd_status encode_spm(encoder *e, const char *s, size_t len)
{
    const bool prefix = e->t->add_space_prefix; /* of every segment, as Llama's reference does */

    e->text.len = 0;
    if (prefix)
        kvd_buf_putc(&e->text, ' ');
    kvd_buf_put(&e->text, s, len);
    if (e->text.oom)
        return kvd_fail(e->err, KVD_E_NOMEM, 0, "tokenizer: no memory for %zu bytes", len);
    len = tok_undo_meta(e->text.data, e->text.len, e->text.data);
    for (size_t pos = 0; pos < len;) {
        const size_t end = spm_word_end(e->t, e->text.data, pos, len);

        KVD_TRY(encode_pieces(e, e->text.data + pos, end - pos));
        pos = end;
    }
    return KVD_OK;
}

/* ---- segments ---- */

static kvd_status encode_segment(encoder *e, const char *s, size_t len)
{
    if (len == 0)
        return KVD_OK;
    return e->t->model == TOK_BPE ? encode_bpe(e, s, len) : encode_spm(e, s, len);
}

static kvd_status check_spans(const kvd_span *span, size_t n, size_t len, kvd_err *err)
{
    size_t pos = 0;

    for (size_t i = 0; i < n; i++) {
        if (span[i].start < pos || span[i].end < span[i].start || span[i].end > len)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "trusted span %zu: %zu..%zu of %zu bytes (ascending, disjoint)", i,
                            span[i].start, span[i].end, len);
        pos = span[i].end;
    }
    return KVD_OK;
}

static size_t skip_ascii_space(const char *s, size_t pos, size_t len)
{
    while (pos < len && (s[pos] == ' ' || (s[pos] >= '\t' && s[pos] <= '\r')))
        pos++;
    return pos;
}

/* The next byte that is trusted, at i or behind it, and the end of its span; len where none is.
 * Spans that touch count as one.  *at: the first span that holds a byte at i or behind it. */
static kvd_span next_trusted(const kvd_span *trusted, size_t n, size_t i, size_t len, size_t *at)
{
    kvd_span span = { len, len };

    while (*at < n && (trusted[*at].end <= i || trusted[*at].start == trusted[*at].end))
        (*at)++;
    if (*at == n)
        return span;
    span = trusted[*at];
    for (size_t k = *at + 1; k < n && trusted[k].start == span.end; k++)
        span.end = trusted[k].end;
    span.start = span.start < i ? i : span.start;
    return span;
}

static kvd_status encode_all(encoder *e, const char *text, size_t len, const kvd_span *trusted,
                             size_t n_trusted)
{
    kvd_span span    = { 0, 0 }; /* of trusted text, the one that holds i or comes next */
    size_t   pending = 0;        /* where the open segment began */
    size_t   at      = 0;

    for (size_t i = 0; i < len;) {
        if (span.end <= i)
            span = next_trusted(trusted, n_trusted, i, len, &at);
        const bool        inside = span.start <= i;
        const size_t      stop   = inside ? span.end : span.start;
        const tok_special found  = tok_special_at(e->t, text + i, stop - i, inside);

        if (found.id == TOK_NONE) {
            i += found.len;
            continue;
        }
        KVD_TRY(encode_segment(e, text + pending, i - pending));
        KVD_TRY(push_id(e, found.id));
        i += found.len;
        if (e->t->flag[found.id] & FLAG_RSTRIP)
            i = skip_ascii_space(text, i, len);
        pending = i;
    }
    return encode_segment(e, text + pending, len - pending);
}

kvd_status tok_encode(const tok *t, const char *text, size_t len, const kvd_span *trusted,
                      size_t n_trusted, bool add_bos, tok_ids *ids, kvd_err *err)
{
    const size_t before = ids->len;
    encoder      e      = { .t = t, .ids = ids, .err = err };
    kvd_status   st     = KVD_OK;

    if (len > TOK_MAX_TEXT)
        return kvd_fail(err, KVD_E_INVAL, 0, "text of %zu bytes, at most %zu can be encoded", len,
                        TOK_MAX_TEXT);
    KVD_TRY(check_spans(trusted, n_trusted, len, err));
    if (add_bos && t->add_bos)
        st = push_id(&e, (uint32_t)t->bos);
    if (st == KVD_OK)
        st = encode_all(&e, text, len, trusted, n_trusted);
    if (st != KVD_OK)
        ids->len = before;
    tok_scratch_free(&e.scratch);
    kvd_buf_free(&e.text);
    return st;
}
