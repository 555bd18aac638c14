/* SPDX-License-Identifier: Apache-2.0 */
/* tok_stream.c - ids to text, cut only between characters.
 *
 * Owns: `held`, the bytes of an unfinished sequence (a possible prefix of a character, at most 3),
 * followed by the token being fed; and `out`, three times as large, since an invalid byte becomes
 * the three bytes of U+FFFD.  Both are sized for the vocabulary's longest token at opening:
 * feeding never allocates.
 * Thread: one owner. */
#include "text/tok_impl.h"

#define MAX_HELD 3

struct tok_stream {
    const tok *t;
    size_t     n_held, out_len;
    char      *out;
    char       held[]; /* MAX_HELD + max_bytes */
};

kvd_status tok_stream_open(tok_stream **out, const tok *t, kvd_err *err)
{
    const size_t in = MAX_HELD + (size_t)t->max_bytes;
    tok_stream  *s  = kvd_calloc(1, sizeof(*s) + in + 3 * in + 1);

    *out = NULL;
    if (!s)
        return kvd_fail(err, KVD_E_NOMEM, 0, "detokenizer: no memory");
    s->t   = t;
    s->out = s->held + in;
    *out   = s;
    return KVD_OK;
}

void tok_stream_close(tok_stream *s)
{
    kvd_free(s);
}

/* Moves the first n held bytes to out as valid UTF-8. */
static const char *emit(tok_stream *s, size_t n)
{
    size_t len = 0;

    for (size_t i = 0; i < n;) {
        uint32_t cp;

        i += utf8_decode(s->held + i, n - i, &cp);
        len += utf8_encode(cp, s->out + len);
    }
    s->out[len] = 0;
    s->out_len  = len;
    s->n_held -= n;
    memmove(s->held, s->held + n, s->n_held);
    return s->out;
}

const char *tok_stream_feed(tok_stream *s, int32_t id, bool show_special)
{
    size_t      len;
    const char *bytes = tok_bytes(s->t, id, &len);

    if (len > 0 && (show_special || !tok_is_special(s->t, id))) {
        memcpy(s->held + s->n_held, bytes, len);
        s->n_held += len;
    }
    return emit(s, utf8_complete_prefix(s->held, s->n_held));
}

const char *tok_stream_flush(tok_stream *s)
{
    return emit(s, s->n_held);
}

size_t tok_stream_len(const tok_stream *s)
{
    return s->out_len;
}
