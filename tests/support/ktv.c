/* SPDX-License-Identifier: Apache-2.0 */
/* ktv.c - reads a .ktv vocabulary.  The files are ours: a broken one is a broken test. */
#include "support/ktv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const char *p, *end;
} reader;

static const char *take(reader *r, size_t n)
{
    const char *p = r->p;

    if ((size_t)(r->end - r->p) < n) {
        fprintf(stderr, "ktv: the file is cut short\n");
        exit(1);
    }
    r->p += n;
    return p;
}

static uint32_t varint(reader *r)
{
    uint32_t v = 0;

    for (unsigned shift = 0; shift < 35; shift += 7) {
        const uint8_t b = (uint8_t)*take(r, 1);

        v |= (uint32_t)(b & 0x7f) << shift;
        if (!(b & 0x80))
            break;
    }
    return v;
}

char *ktv_read_file(const char *path, size_t *len)
{
    FILE  *f   = fopen(path, "rb");
    size_t cap = 1 << 16, n = 0, got;
    char  *data = f ? kvd_malloc(cap + 1) : NULL;

    while (data && (got = fread(data + n, 1, cap - n, f)) > 0) {
        n += got;
        if (n == cap)
            data = kvd_realloc(data, (cap *= 2) + 1);
    }
    if (f)
        fclose(f);
    if (data)
        data[n] = 0;
    *len = n;
    return data;
}

static void read_header(ktv *k, reader *r)
{
    int32_t  id[4];
    uint32_t n[2];
    uint8_t  head[4];
    uint16_t pre_len;

    if (memcmp(take(r, 4), "KTV1", 4) != 0) {
        fprintf(stderr, "ktv: not such a file\n");
        exit(1);
    }
    memcpy(head, take(r, 2), 2);
    memcpy(&pre_len, take(r, 2), 2);
    k->v.model            = head[0] ? TOK_SPM : TOK_BPE;
    k->v.add_bos          = head[1] & 1;
    k->v.add_eos          = head[1] & 2;
    k->v.add_space_prefix = head[1] & 4;
    k->v.pre              = (tok_str){ take(r, pre_len), pre_len };
    memcpy(id, take(r, sizeof(id)), sizeof(id));
    memcpy(n, take(r, sizeof(n)), sizeof(n));
    k->v.bos     = id[0];
    k->v.eos     = id[1];
    k->v.eot     = id[2];
    k->v.unk     = id[3];
    k->v.n_token = n[0];
    k->v.n_merge = n[1];
    k->token     = kvd_calloc(n[0] + 1u, sizeof(*k->token));
    k->attr      = kvd_calloc(n[0] + 1u, sizeof(*k->attr));
    k->merge     = kvd_calloc(n[1] + 1u, sizeof(*k->merge));
    k->score     = head[1] & 8 ? kvd_calloc(n[0] + 1u, sizeof(*k->score)) : NULL;
}

/* "left right" in the arena; the token it makes is what stands without the space. */
static void join(ktv *k, uint32_t left, uint32_t right, bool space, tok_str *out, char **at)
{
    const tok_str a = k->token[left], b = k->token[right];

    out->data = *at;
    memcpy(*at, a.data, a.len);
    *at += a.len;
    if (space)
        *(*at)++ = ' ';
    memcpy(*at, b.data, b.len);
    *at += b.len;
    out->len = a.len + b.len + space;
}

bool ktv_load(ktv *k, const char *path)
{
    size_t len;

    *k      = (ktv){ 0 };
    k->file = ktv_read_file(path, &len);
    if (!k->file)
        return false;
    reader r = { k->file, k->file + len };
    read_header(k, &r);
    for (uint32_t i = 0; i < k->v.n_token; i++) {
        k->attr[i] = (uint8_t)*take(&r, 1);
        if (!(k->attr[i] & 0x80)) {
            k->token[i].len  = varint(&r);
            k->token[i].data = take(&r, k->token[i].len);
        }
        if (k->score)
            memcpy(&k->score[i], take(&r, 4), 4);
    }
    /* Merges name lower ids only where a token is made of them: one pass in order is enough. */
    uint32_t *pair  = kvd_calloc((size_t)k->v.n_merge * 2 + 1, sizeof(*pair));
    size_t    bytes = 0, used = 0;
    for (size_t i = 0; i < 2 * (size_t)k->v.n_merge; i++)
        pair[i] = varint(&r);
    for (uint32_t i = 0; i < k->v.n_token; i++) {
        if (k->attr[i] & 0x80) {
            k->token[i].len = k->token[pair[2 * used]].len + k->token[pair[2 * used + 1]].len;
            bytes += k->token[i].len;
            used++;
        }
    }
    for (size_t i = 0; i < k->v.n_merge; i++)
        bytes += k->token[pair[2 * i]].len + k->token[pair[2 * i + 1]].len + 1;
    char *at = k->arena = kvd_malloc(bytes + 1);
    used                = 0;
    for (uint32_t i = 0; i < k->v.n_token; i++) {
        if (k->attr[i] & 0x80) {
            join(k, pair[2 * used], pair[2 * used + 1], false, &k->token[i], &at);
            used++;
        }
        k->attr[i] &= 0x7f;
    }
    for (size_t i = 0; i < k->v.n_merge; i++)
        join(k, pair[2 * i], pair[2 * i + 1], true, &k->merge[i], &at);
    kvd_free(pair);
    k->v.token = k->token;
    k->v.attr  = k->attr;
    k->v.score = k->score;
    k->v.merge = k->merge;
    return true;
}

void ktv_free(ktv *k)
{
    kvd_free(k->token);
    kvd_free(k->merge);
    kvd_free(k->attr);
    kvd_free(k->score);
    kvd_free(k->arena);
    kvd_free(k->file);
    *k = (ktv){ 0 };
}
