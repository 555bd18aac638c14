/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_gguf.c - any bytes through gguf_open() and every accessor.
 *
 * Input: a file; or "SPL2", u32 n, n bytes of the first file of a set of two, the rest the second.
 * Checked beyond what the sanitizers see: failures are clean (nothing out, nothing leaked, a code
 * and a one-line message), memory stays in proportion to the input, tensors lie in their file,
 * names find what they name, the JSON is JSON.
 *
 * corpus/gguf began as tests/data/gguf and is what -merge=1 -set_cover_merge=1 leaves of a long
 * run, plus a set for each way a set can be wrong. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "format/format.h"
#include "fuzz/gguf_mutator.h"
#include "fuzz/memory_files.h"

int    LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

#define FIRST  "fuzz-00001-of-00002.gguf"
#define SECOND "fuzz-00002-of-00002.gguf"

/* ---- target ---------------------------------------------------------------------- */

static volatile uint64_t sink; /* so that reads are not optimised away */

static void touch_value(const gguf_kv *kv, uint64_t i)
{
    gguf_str s;
    uint64_t u = 0;
    int64_t  n = 0;
    double   f = 0;
    bool     b = false;

    if (gguf_kv_str(kv, i, &s) && s.len)
        sink += (uint8_t)s.data[0] + (uint8_t)s.data[s.len - 1];
    sink += gguf_kv_u64(kv, i, &u) + gguf_kv_i64(kv, i, &n) + gguf_kv_bool(kv, i, &b);
    sink += gguf_kv_f64(kv, i, &f) && f > 0;
    sink += u + (uint64_t)n + b;
}

static void touch_metadata(const gguf_file *g)
{
    for (uint64_t i = 0; i < gguf_n_kv(g); i++) {
        const gguf_kv *kv  = gguf_kv_at(g, i);
        const uint64_t n   = gguf_kv_count(kv);
        const gguf_str key = gguf_kv_key(kv);
        char          *z   = strndup(key.data, key.len);
        uint32_t       u;
        float          f;
        bool           b;
        gguf_str       s;

        must(z && gguf_find(g, z) == kv);
        sink += gguf_get_u32(g, z, true, &u, NULL) == KVD_OK;
        sink += gguf_get_f32(g, z, true, &f, NULL) == KVD_OK;
        sink += gguf_get_bool(g, z, true, &b, NULL) == KVD_OK;
        sink += gguf_get_str(g, z, true, &s, NULL) == KVD_OK;
        free(z);
        for (uint64_t k = 0; k < n && k < 4096; k++)
            touch_value(kv, k);
        touch_value(kv, n - 1);
        touch_value(kv, n);
    }
}

static void touch_tensors(const gguf_file *g)
{
    float    value[256];
    uint64_t sum = 0;

    for (uint64_t i = 0; i < gguf_n_tensor(g); i++) {
        const gguf_tensor    *t = gguf_tensor_at(g, i);
        const kvd_dtype_info *d = kvd_dtype_get(t->type_id);
        char                 *z = strndup(t->name.data, t->name.len);

        must(z && gguf_tensor_find(g, z) == t);
        free(z);
        must(kvd_dtype_name(t->type_id) && (d != NULL) == (t->data != NULL));
        must(t->n_dim >= 1 && t->n_dim <= GGUF_MAX_DIMS && t->n_elem > 0);
        must(t->n_elem == t->dim[0] * t->dim[1] * t->dim[2] * t->dim[3]);
        must(gguf_split_path(g, t->split) && t->offset % 8 == 0);
        must(gguf_n_split(g) > 1 || t->offset >= gguf_header_bytes(g));
        if (!d)
            continue;
        must(t->bytes == kvd_dtype_row_bytes(d->type, t->n_elem));
        must(t->bytes / d->block_bytes * d->block_len == t->n_elem); /* nothing has wrapped */
        kvd_dequantize(d->type, t->data, value, d->block_len);
        kvd_dequantize(d->type, (const uint8_t *)t->data + t->bytes - d->block_bytes, value,
                       d->block_len);
        sink += (uint64_t)(value[0] == 0);
        sum += t->bytes;
    }
    must(sum == gguf_tensor_bytes(g) && sum <= gguf_mapped_bytes(g));
}

static void touch_json(const gguf_file *g)
{
    kvd_buf      b = { 0 };
    json_error_t e;
    json_t      *j;

    gguf_to_json(g, &b);
    must(!b.oom);
    j = json_loadb(b.data, b.len, JSON_ALLOW_NUL, &e);
    must(j);
    json_decref(j);
    kvd_buf_free(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint64_t live = kvd_alloc_live(), before = kvd_alloc_bytes();
    size_t         first = size, skip = 0;
    gguf_file     *g   = NULL;
    kvd_err        err = { 0 };
    uint32_t       n;

    if (size >= 8 && memcmp(data, "SPL2", 4) == 0) {
        memcpy(&n, data + 4, sizeof(n));
        skip  = 8;
        first = n < size - skip ? n : size - skip;
    }
    memory_file[0].path  = FIRST;
    memory_file[0].data  = data + skip;
    memory_file[0].bytes = first;
    memory_file[1].path  = SECOND;
    memory_file[1].data  = data + skip + (skip ? first : 0);
    memory_file[1].bytes = skip ? size - skip - first : 0;
    (void)kvd_alloc_peak(true);
    if (gguf_open(&g, FIRST, &err) == KVD_OK) {
        must(g && gguf_heap_bytes(g) <= kvd_alloc_bytes() - before);
        must(kvd_alloc_peak(false) - before <= 5 * (uint64_t)size + 4096);
        touch_metadata(g);
        touch_tensors(g);
        touch_json(g);
        gguf_close(g);
    } else {
        must(!g && err.msg[0] && !strchr(err.msg, '\n'));
        must(err.code == KVD_E_CORRUPT || err.code == KVD_E_UNSUPPORTED || err.code == KVD_E_INVAL);
        must(kvd_alloc_peak(false) - before <= 5 * (uint64_t)size + 4096);
    }
    must(kvd_alloc_live() == live);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    static const char *const words[] = { "general.alignment",   "split.count", "split.no",
                                         "split.tensors.count", "w",           "a" };
    uint32_t                 n;

    if (!LLVMFuzzerMutate)
        return size;
    kvd_rng_seed(&rng, seed);
    mutator_words  = words;
    mutator_n_word = KVD_COUNTOF(words);
    if (size < 8 || memcmp(data, "SPL2", 4) != 0)
        return mutate_file(data, size, max_size);
    memcpy(&n, data + 4, sizeof(n));
    if (n > size - 8)
        n = (uint32_t)(size - 8);
    if (below(2)) /* the second file */
        return 8 + n +
               (8 + n < max_size ? mutate_file(data + 8 + n, size - 8 - n, max_size - 8 - n) : 0);
    /* The first one, in a copy, because it has a neighbour. */
    {
        const size_t room = max_size - 8 - (size - 8 - n);
        uint8_t     *copy = malloc(room ? room : 1);
        size_t       r;
        uint32_t     m;

        must(copy);
        memcpy(copy, data + 8, n);
        m = (uint32_t)mutate_file(copy, n, room);
        r = splice(data, size, max_size, 8, n, copy, m);
        free(copy);
        if (r)
            memcpy(data + 4, &m, sizeof(m));
        return r ? r : size;
    }
}
