/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_edit.c - rewrites the metadata and keeps everything after it byte by byte.  A key "test.pad"
 * makes the change of size a multiple of the alignment, so that tensor data stays aligned. */
#include "support/gguf_edit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/gguf_impl.h"

#define N_PLACE     16
#define PLACE_BYTES (16 + 512 * 8)
#define HEAD_BYTES  24 /* magic, version, number of tensors, number of keys */
#define PAD_KEY     "test.pad"

static uint8_t place[N_PLACE][PLACE_BYTES];

static uint8_t *next_place(void)
{
    static unsigned n;
    uint8_t        *p = place[n++ % N_PLACE];

    memset(p, 0, PLACE_BYTES);
    return p;
}

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "gguf_edit: %s\n", what);
    abort();
}

gguf_edit gguf_edit_str(const char *key, const char *s)
{
    uint8_t       *p    = next_place();
    const uint32_t type = GGUF_STRING;
    const uint64_t len  = strlen(s);

    must(len <= PLACE_BYTES - 12, "a long string");
    memcpy(p, &type, sizeof(type));
    memcpy(p + 4, &len, sizeof(len));
    memcpy(p + 12, s, len);
    return (gguf_edit){ key, p, 12 + len };
}

static size_t size_of(uint32_t type)
{
    static const size_t size[] = { 1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8 };

    must(type < KVD_COUNTOF(size) && size[type], "no such type");
    return size[type];
}

gguf_edit gguf_edit_int(const char *key, uint32_t type, uint64_t x)
{
    uint8_t *p = next_place();

    memcpy(p, &type, sizeof(type));
    memcpy(p + 4, &x, size_of(type)); /* little-endian */
    return (gguf_edit){ key, p, 4 + size_of(type) };
}

gguf_edit gguf_edit_zeros(const char *key, uint32_t type, uint64_t n)
{
    uint8_t       *p     = next_place();
    const uint32_t array = GGUF_ARRAY;

    must(n * size_of(type) <= PLACE_BYTES - 16, "a long array");
    memcpy(p, &array, sizeof(array));
    memcpy(p + 4, &type, sizeof(type));
    memcpy(p + 8, &n, sizeof(n));
    return (gguf_edit){ key, p, 16 + n * size_of(type) };
}

gguf_edit gguf_edit_drop(const char *key)
{
    return (gguf_edit){ key, NULL, 0 };
}

static void put_key(kvd_buf *b, const char *key, const void *value, size_t n)
{
    const uint64_t len = strlen(key);

    kvd_buf_put(b, &len, sizeof(len));
    kvd_buf_put(b, key, len);
    kvd_buf_put(b, value, n);
}

static const gguf_edit *edit_of(gguf_str key, const gguf_edit *edit, size_t n_edit)
{
    for (size_t i = 0; i < n_edit; i++)
        if (gguf_str_eq(key, edit[i].key))
            return &edit[i];
    return NULL;
}

/* All keys, changed as asked for.  Returns how many. */
static uint64_t put_keys(kvd_buf *b, const gguf_file *g, const gguf_edit *edit, size_t n_edit)
{
    const uint8_t *file  = g->part[0].map.data;
    uint64_t       n_key = 0;

    for (uint64_t i = 0; i < g->meta.n; i++) {
        const gguf_kv   *kv    = &g->meta.kv[i];
        const uint8_t   *begin = (const uint8_t *)kv->key.data - 8;
        const uint8_t   *end   = i + 1 < g->meta.n ? (const uint8_t *)g->meta.kv[i + 1].key.data - 8
                                                   : file + g->part[0].tensor_pos;
        const gguf_edit *e     = edit_of(kv->key, edit, n_edit);

        if (!e)
            kvd_buf_put(b, begin, (size_t)(end - begin));
        else if (e->value)
            put_key(b, e->key, e->value, e->n);
        n_key += !e || e->value;
    }
    for (size_t i = 0; i < n_edit; i++) {
        if (!edit[i].value || gguf_find(g, edit[i].key))
            continue;
        put_key(b, edit[i].key, edit[i].value, edit[i].n);
        n_key++;
    }
    return n_key;
}

static void put_padding(kvd_buf *b, uint64_t was, uint64_t alignment)
{
    const uint64_t  at  = b->len + 8 + strlen(PAD_KEY) + 12; /* its end, were it empty */
    const uint64_t  len = (was % alignment + alignment - at % alignment) % alignment;
    const gguf_edit pad = gguf_edit_str(PAD_KEY, "");
    const char      zeros[GGUF_DEF_ALIGN] = { 0 };

    must(alignment <= GGUF_DEF_ALIGN, "a file of another alignment");
    put_key(b, PAD_KEY, pad.value, pad.n);
    memcpy(b->data + b->len - 8, &len, sizeof(len));
    kvd_buf_put(b, zeros, len);
}

void gguf_edit_copy(const char *from, const char *to, const gguf_edit *edit, size_t n_edit)
{
    kvd_buf    b   = { 0 };
    kvd_err    err = { 0 };
    gguf_file *g;
    gguf_part *p;
    uint64_t   n_key;
    FILE      *f;

    must(gguf_open(&g, from, &err) == KVD_OK, err.msg);
    p = &g->part[0];
    kvd_buf_put(&b, p->map.data, HEAD_BYTES);
    n_key = put_keys(&b, g, edit, n_edit) + 1;
    put_padding(&b, p->tensor_pos, p->alignment);
    memcpy(b.data + HEAD_BYTES - 8, &n_key, sizeof(n_key));
    kvd_buf_put(&b, p->map.data + p->tensor_pos, p->map.bytes - p->tensor_pos);
    f = fopen(to, "wb");
    must(f && !b.oom && fwrite(b.data, 1, b.len, f) == b.len && fclose(f) == 0, to);
    kvd_buf_free(&b);
    gguf_close(g);
}
