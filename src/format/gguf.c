/* SPDX-License-Identifier: Apache-2.0 */
/* gguf.c - opening a GGUF file or a split set, and the object that owns it.
 *
 * Owns: one mapping and path per file, the metadata of the first file, the tensor directory of
 * all files.  A set is NAME-00001-of-0000N.gguf and its N - 1 successors; each file carries
 * split.no (from 0) and split.count, the first one also split.tensors.count.
 *
 * Invariants, from gguf_open() on
 *  (1) whatever a gguf_str, a value or a tensor's data points at lies inside a mapping;
 *  (2) keys and tensor names are unique, and sorted in their order arrays;
 *  (3) part[i].n_tensor add up to n_tensor, and tensors of part i come before those of i + 1.
 *
 * Thread: immutable once opened, any thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "format/gguf_impl.h"

#define SPLIT_TAIL_BYTES 20 /* "-00001-of-00003.gguf" */

static gguf_reader reader_of(const gguf_part *p, kvd_err *err)
{
    return (gguf_reader){ p->map.data, p->map.bytes, 0, p->path, err };
}

/* Opens one file, whose path becomes p's also on failure, and reads its head. */
static kvd_status open_part(gguf_file *g, gguf_part *p, char *path, gguf_kv_set *kvs, kvd_err *err)
{
    p->path = path;
    if (!path)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for a path");
    g->heap_bytes += strlen(path) + 1;
    KVD_TRY(os_map_open(&p->map, path, err));
    return gguf_read_head(p, kvs, &g->heap_bytes, err);
}

/* An integer of the split keys: *out is left alone when the key is absent. */
static kvd_status split_key(const gguf_part *p, const gguf_kv_set *kvs, const char *key,
                            uint64_t *out, kvd_err *err)
{
    const gguf_reader r  = reader_of(p, err);
    const gguf_kv    *kv = gguf_kv_find(kvs, key);

    if (kv && (kv->type == GGUF_ARRAY || !gguf_kv_u64(kv, 0, out)))
        return gguf_bad(&r, KVD_E_CORRUPT, (uint64_t)(kv->val - r.data),
                        "key \"%s\" is not an unsigned integer", key);
    return KVD_OK;
}

/* The name of file i of a set of n whose first file is path.  NULL: no memory. */
static char *split_path(const char *path, uint64_t i, uint64_t n)
{
    const size_t stem = strlen(path) - SPLIT_TAIL_BYTES;
    char        *p    = kvd_strndup(path, stem + SPLIT_TAIL_BYTES);

    if (p)
        snprintf(p + stem, SPLIT_TAIL_BYTES + 1, "-%05u-of-%05u.gguf", (unsigned)(i + 1),
                 (unsigned)n);
    return p;
}

/* How many files the set has (1: no set), by the first file's metadata; checks that the name is
 * one from which the others follow. */
static kvd_status split_count(const gguf_part *p, const gguf_kv_set *kvs, uint64_t *n, kvd_err *err)
{
    const gguf_reader r   = reader_of(p, err);
    const size_t      len = strlen(p->path);
    uint64_t          no  = 0;
    char              tail[SPLIT_TAIL_BYTES + 1];

    *n = 1;
    KVD_TRY(split_key(p, kvs, "split.count", n, err));
    KVD_TRY(split_key(p, kvs, "split.no", &no, err));
    if (*n <= 1) {
        *n = 1;
        return KVD_OK;
    }
    if (*n > GGUF_MAX_SPLIT)
        return gguf_bad(&r, KVD_E_CORRUPT, 0,
                        "key \"split.count\" is %" PRIu64 "; at most %u files are accepted", *n,
                        GGUF_MAX_SPLIT);
    if (no != 0)
        return gguf_bad(&r, KVD_E_INVAL, 0,
                        "this is file %" PRIu64 " of a split set of %" PRIu64
                        "; open the first one (...-00001-of-%05" PRIu64 ".gguf)",
                        no + 1, *n, *n);
    snprintf(tail, sizeof(tail), "-00001-of-%05u.gguf", (unsigned)*n);
    if (len <= SPLIT_TAIL_BYTES || strcmp(p->path + len - SPLIT_TAIL_BYTES, tail) != 0)
        return gguf_bad(&r, KVD_E_INVAL, 0,
                        "the first of %" PRIu64 " files of a split set must be named NAME%s, so "
                        "that the others can be found",
                        *n, tail);
    return KVD_OK;
}

/* Opens file i > 0 of the set; its metadata serves only to check that it belongs there. */
static kvd_status open_successor(gguf_file *g, uint32_t i, kvd_err *err)
{
    gguf_part     *p   = &g->part[i];
    gguf_kv_set    kvs = { 0 };
    uint64_t       no = UINT64_MAX, n = 0; /* values that no file may have */
    const uint64_t heap = g->heap_bytes;
    kvd_err        why  = { 0 };
    kvd_status     st;
    gguf_reader    r;

    st = open_part(g, p, split_path(g->part[0].path, i, g->n_part), &kvs, &why);
    if (st == KVD_OK)
        st = split_key(p, &kvs, "split.no", &no, &why);
    if (st == KVD_OK)
        st = split_key(p, &kvs, "split.count", &n, &why);
    gguf_kv_set_free(&kvs);
    if (st != KVD_OK) {
        st = kvd_fail(err, st, 0, "file %" PRIu32 " of %" PRIu32 " of the split set: %s", i + 1,
                      g->n_part, why.msg);
        if (err)
            err->sys = why.sys; /* its text is in why.msg already */
        return st;
    }
    g->heap_bytes = heap + strlen(p->path) + 1;
    if (no == i && n == g->n_part)
        return KVD_OK;
    r = reader_of(p, err);
    if (n == 0 || no == UINT64_MAX)
        return gguf_bad(&r, KVD_E_CORRUPT, 0,
                        "not part of a split set: expected keys split.no and split.count");
    return gguf_bad(&r, KVD_E_CORRUPT, 0,
                    "expected split.no %" PRIu32 " and split.count %" PRIu32 ", found %" PRIu64
                    " and %" PRIu64,
                    i, g->n_part, no, n);
}

static kvd_status open_parts(gguf_file *g, const char *path, kvd_err *err)
{
    uint64_t    n_split, want;
    gguf_part  *all;
    gguf_reader r;

    g->part = kvd_calloc(1, sizeof(*g->part));
    if (!g->part)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory to open %s", path);
    g->n_part = 1;
    KVD_TRY(open_part(g, &g->part[0], kvd_strndup(path, strlen(path)), &g->meta, err));
    KVD_TRY(split_count(&g->part[0], &g->meta, &n_split, err));
    g->n_tensor = g->part[0].n_tensor;
    if (n_split > 1) {
        all = kvd_calloc(n_split, sizeof(*all));
        if (!all)
            return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %" PRIu64 " files", n_split);
        all[0] = g->part[0];
        kvd_free(g->part);
        g->part   = all;
        g->n_part = (uint32_t)n_split;
    }
    for (uint32_t i = 1; i < g->n_part; i++) {
        KVD_TRY(open_successor(g, i, err));
        g->n_tensor += g->part[i].n_tensor;
    }
    g->heap_bytes += g->n_part * sizeof(*g->part);
    r    = reader_of(&g->part[0], err);
    want = g->n_tensor;
    KVD_TRY(split_key(&g->part[0], &g->meta, "split.tensors.count", &want, err));
    if (g->n_tensor > GGUF_MAX_TENSOR || (g->n_part > 1 && want != g->n_tensor))
        return gguf_bad(&r, KVD_E_CORRUPT, 0,
                        "%" PRIu64 " tensors in %" PRIu32 " files; expected %" PRIu64
                        " (at most %u)",
                        g->n_tensor, g->n_part, want, GGUF_MAX_TENSOR);
    return KVD_OK;
}

static kvd_status read_directory(gguf_file *g, kvd_err *err)
{
    const gguf_reader r = reader_of(&g->part[0], err);
    gguf_tensor      *t;
    uint32_t          dup;
    char              q[GGUF_QUOTE_BYTES];

    g->tensor       = kvd_malloc(g->n_tensor * sizeof(*g->tensor));
    g->tensor_order = kvd_malloc(2 * g->n_tensor * sizeof(*g->tensor_order));
    if (!g->tensor || !g->tensor_order)
        return gguf_bad(&r, KVD_E_NOMEM, 0, "no memory for %" PRIu64 " tensors", g->n_tensor);
    g->heap_bytes += g->n_tensor * (sizeof(*g->tensor) + 2 * sizeof(*g->tensor_order));
    t = g->tensor;
    for (uint32_t i = 0; i < g->n_part; i++) {
        KVD_TRY(gguf_read_tensors(&g->part[i], i, t, err));
        t += g->part[i].n_tensor;
    }
    for (uint64_t i = 0; i < g->n_tensor; i++)
        g->tensor_bytes += g->tensor[i].bytes; /* below the sum of the mappings' sizes */
    if (!gguf_index_build(g->tensor, sizeof(*g->tensor), (uint32_t)g->n_tensor, g->tensor_order,
                          &dup)) {
        const gguf_tensor *d  = &g->tensor[dup];
        const gguf_reader  in = reader_of(&g->part[d->split], err);

        return gguf_bad(&in, KVD_E_CORRUPT, (uint64_t)((const uint8_t *)d->name.data - in.data) - 8,
                        "tensor %s occurs twice", gguf_quote(d->name, q));
    }
    return KVD_OK;
}

kvd_status gguf_open(gguf_file **out, const char *path, kvd_err *err)
{
    gguf_file *g = kvd_calloc(1, sizeof(*g));
    kvd_status st;

    *out = NULL;
    if (!g)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory to open %s", path);
    g->heap_bytes = sizeof(*g);
    st            = open_parts(g, path, err);
    if (st == KVD_OK)
        st = read_directory(g, err);
    if (st != KVD_OK) {
        gguf_close(g); /* accepts every partly opened file */
        return st;
    }
    *out = g;
    return KVD_OK;
}

void gguf_copy_to_memory(gguf_file *g)
{
    for (uint32_t i = 0; i < g->n_part; i++)
        if (!os_map_copy(&g->part[i].map))
            kvd_log(KVD_LOG_WARN, "%s: stays mapped, there is no memory for a copy",
                    g->part[i].path);
}

void gguf_close(gguf_file *g)
{
    if (!g)
        return;
    for (uint32_t i = 0; i < g->n_part; i++) {
        os_map_close(&g->part[i].map);
        kvd_free(g->part[i].path);
    }
    gguf_kv_set_free(&g->meta);
    kvd_free(g->part);
    kvd_free(g->tensor);
    kvd_free(g->tensor_order);
    kvd_free(g);
}

/* ---- questions ------------------------------------------------------------------- */

uint32_t gguf_version(const gguf_file *g)
{
    return g->part[0].version;
}

uint64_t gguf_mapped_bytes(const gguf_file *g)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < g->n_part; i++)
        sum += g->part[i].map.bytes;
    return sum;
}

uint64_t gguf_tensor_bytes(const gguf_file *g)
{
    return g->tensor_bytes;
}

uint64_t gguf_heap_bytes(const gguf_file *g)
{
    return g->heap_bytes;
}

uint64_t gguf_header_bytes(const gguf_file *g)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < g->n_part; i++)
        sum += kvd_min_u64(g->part[i].data_pos, g->part[i].map.bytes);
    return sum;
}

uint32_t gguf_n_split(const gguf_file *g)
{
    return g->n_part;
}

const char *gguf_split_path(const gguf_file *g, uint32_t split)
{
    return split < g->n_part ? g->part[split].path : NULL;
}

uint64_t gguf_n_kv(const gguf_file *g)
{
    return g->meta.n;
}

const gguf_kv *gguf_kv_at(const gguf_file *g, uint64_t i)
{
    kvd_assert(i < g->meta.n);
    return &g->meta.kv[i];
}

uint64_t gguf_n_tensor(const gguf_file *g)
{
    return g->n_tensor;
}

const gguf_tensor *gguf_tensor_at(const gguf_file *g, uint64_t i)
{
    kvd_assert(i < g->n_tensor);
    return &g->tensor[i];
}

const gguf_tensor *gguf_tensor_find(const gguf_file *g, const char *name)
{
    return gguf_index_find(g->tensor, sizeof(*g->tensor), (uint32_t)g->n_tensor, g->tensor_order,
                           name);
}
