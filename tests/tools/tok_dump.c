/* SPDX-License-Identifier: Apache-2.0 */
/* tok_dump.c - encodes texts for scripts/tok-diff.py.
 *
 *   tok_dump VOCAB.ktv [PRE] < requests > answers
 *
 * A request is u32 length, u32 flags (1: all of the text is trusted, 2: BOS if the model adds one)
 * and the text; an answer u32 count, the ids, u32 length and the bytes the ids stream back to. */
#include "support/ktv.h"

#include <stdio.h>
#include <string.h>

static void put(const void *p, size_t n)
{
    if (fwrite(p, 1, n, stdout) != n)
        perror("tok_dump");
}

static void put_text(kvd_buf *b, const tok_stream *stream, const char *text)
{
    kvd_buf_put(b, text, tok_stream_len(stream));
}

static void answer(tok_stream *stream, const tok_ids *ids)
{
    const uint32_t n    = (uint32_t)ids->len;
    kvd_buf        back = { 0 };

    put(&n, sizeof(n));
    put(ids->data, n * sizeof(*ids->data));
    for (size_t i = 0; i < n; i++)
        put_text(&back, stream, tok_stream_feed(stream, ids->data[i], true));
    put_text(&back, stream, tok_stream_flush(stream));
    const uint32_t len = (uint32_t)back.len;
    put(&len, sizeof(len));
    put(back.data, len);
    kvd_buf_free(&back);
}

int main(int argc, char **argv)
{
    ktv         k;
    tok        *t      = NULL;
    tok_stream *stream = NULL;
    kvd_err     err    = { 0 };
    uint32_t    head[2];

    if (argc < 2 || !ktv_load(&k, argv[1])) {
        fprintf(stderr, "usage: tok_dump VOCAB.ktv [PRE] < requests > answers\n");
        return 2;
    }
    if (argc > 2)
        k.v.pre = (tok_str){ argv[2], strlen(argv[2]) };
    if (tok_open(&t, &k.v, &err) != KVD_OK || tok_stream_open(&stream, t, &err) != KVD_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    while (fread(head, sizeof(head), 1, stdin) == 1) {
        char    *text  = kvd_malloc(head[0] + 1u);
        kvd_span whole = { 0, head[0] };
        tok_ids  ids   = { 0 };

        if (!text || fread(text, 1, head[0], stdin) != head[0] ||
            tok_encode(t, text, head[0], &whole, head[0] ? head[1] & 1 : 0, head[1] & 2, &ids,
                       &err) != KVD_OK) {
            fprintf(stderr, "%s\n", err.msg);
            return 1;
        }
        answer(stream, &ids);
        tok_ids_free(&ids);
        kvd_free(text);
    }
    tok_stream_close(stream);
    tok_close(t);
    ktv_free(&k);
    return 0;
}
