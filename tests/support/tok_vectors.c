/* SPDX-License-Identifier: Apache-2.0 */
/* tok_vectors.c - vectors: llama.cpp's pairs of .inp and .out, and our .vec (the layout is in
 * scripts/tok_fixture.py). */
#include "support/tok_vectors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

tok *tok_must_open(ktv *k, const char *path)
{
    tok    *t   = NULL;
    kvd_err err = { 0 };

    if (!ktv_load(k, path) || tok_open(&t, &k->v, &err) != KVD_OK) {
        fprintf(stderr, "%s: %s\n", path, err.msg[0] ? err.msg : "cannot be read");
        exit(1);
    }
    return t;
}

static char *must_read(const char *path, size_t *len)
{
    char *data = ktv_read_file(path, len);

    if (!data) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(1);
    }
    return data;
}

static tok_ids encode(const tok *t, const char *s, size_t len)
{
    tok_ids ids = { 0 };
    kvd_err err;

    if (tok_encode(t, s, len, NULL, 0, false, &ids, &err) != KVD_OK) {
        fprintf(stderr, "%s\n", err.msg);
        exit(1);
    }
    return ids;
}

static bool ids_are(const tok_ids *ids, const char *line)
{
    for (size_t i = 0;; i++) {
        char      *end;
        const long want = strtol(line, &end, 10);

        if (end == line)
            return i == ids->len;
        if (i >= ids->len || ids->data[i] != want)
            return false;
        line = end;
    }
}

size_t tok_check_llama_cpp(const tok *t, const char *inp, const char *out, size_t *n)
{
    static const char separator[] = "\n__ggml_vocab_test__\n";
    size_t            len, bad = 0;
    char             *texts = must_read(inp, &len), *lines = must_read(out, &len);
    char             *text = texts, *line = lines;

    for (*n = 0; text; ++*n) {
        char   *next = strstr(text, separator), *newline = strchr(line, '\n');
        tok_ids ids = encode(t, text, next ? (size_t)(next - text) : strlen(text));

        if (newline)
            *newline = 0;
        if (!ids_are(&ids, line)) {
            fprintf(stderr, "%s: string %zu differs\n", out, *n);
            bad++;
        }
        tok_ids_free(&ids);
        line = newline ? newline + 1 : line + strlen(line);
        text = next ? next + strlen(separator) : NULL;
    }
    kvd_free(texts);
    kvd_free(lines);
    return bad;
}

static uint64_t hash_ids(const tok_ids *ids)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < ids->len; i++) {
        for (unsigned shift = 0; shift < 32; shift += 8)
            h = (h ^ ((uint32_t)ids->data[i] >> shift & 255)) * UINT64_C(0x100000001b3);
    }
    return h;
}

size_t tok_check_vec(const tok *t, const char *vec, size_t *n)
{
    size_t len, bad = 0;
    char  *data = must_read(vec, &len);
    char  *p    = data;

    for (*n = 0; p < data + len; ++*n) {
        const size_t   n_text = strtoull(p, &p, 10), n_id = strtoull(p, &p, 10);
        const uint64_t hash = strtoull(p, &p, 16);
        tok_ids        ids  = encode(t, p + 1, n_text);

        if (ids.len != n_id || hash_ids(&ids) != hash) {
            fprintf(stderr, "%s: string %zu differs\n", vec, *n);
            bad++;
        }
        tok_ids_free(&ids);
        p += 1 + n_text + 1;
    }
    kvd_free(data);
    return bad;
}
