/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_gguf.c - any bytes through gguf_open() and every accessor.
 *
 * Input: a file; or "SPL2", u32 n, n bytes of the first file of a set of two, the rest the second.
 * Checked beyond what the sanitizers see: failures are clean (nothing out, nothing leaked, a code
 * and a one-line message), memory stays in proportion to the input, tensors lie in their file,
 * names find what they name, the JSON is JSON.
 *
 * The mutator knows the format: it finds the fields of an input, bends one (or copies, drops,
 * grows an entry, keeping counts and padding right more often than not), so that mutations reach
 * past the first length check.  corpus/gguf began as tests/data/gguf and is what
 * -merge=1 -set_cover_merge=1 leaves of a long run, plus a set for each way a set can be wrong. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "format/format.h"
#include "fuzz/memory_files.h"

int    LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
/* libFuzzer's own; absent in the replay program. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) __attribute__((weak));

#define FIRST  "fuzz-00001-of-00002.gguf"
#define SECOND "fuzz-00002-of-00002.gguf"

#define must(e)                                                     \
    do {                                                            \
        if (!(e)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #e); \
            abort();                                                \
        }                                                           \
    } while (0)

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

/* ---- mutator --------------------------------------------------------------------- */

typedef enum field_kind { F_COUNT, F_LEN, F_TYPE, F_DIM, F_OFFSET, F_VALUE, F_BYTES } field_kind;

typedef struct field {
    size_t     at, bytes;
    field_kind kind;
} field;

typedef struct entry { /* one key with its value, or one tensor */
    size_t at, bytes;
    bool   tensor;
} entry;

#define FIELD_MAX 4096
#define ENTRY_MAX 512

/* The input as far as it can be read; everything after stop is padding and data, or unreadable. */
static struct {
    field  field[FIELD_MAX];
    entry  entry[ENTRY_MAX];
    size_t n_field, n_entry, stop;
} map;

static kvd_rng rng;

static uint64_t below(uint64_t n)
{
    return n ? kvd_rng_below(&rng, n) : 0;
}

static uint64_t get(const uint8_t *p, size_t bytes)
{
    uint64_t v = 0;

    memcpy(&v, p, bytes < 8 ? bytes : 8);
    return v;
}

/* Notes a field at *at and moves on; false at the end of the input. */
static bool note(size_t size, size_t *at, uint64_t bytes, field_kind kind)
{
    if (bytes > size - *at || map.n_field == FIELD_MAX)
        return false;
    map.field[map.n_field++] = (field){ *at, (size_t)bytes, kind };
    *at += (size_t)bytes;
    return true;
}

static bool note_str(const uint8_t *d, size_t size, size_t *at)
{
    return note(size, at, 8, F_LEN) && note(size, at, get(d + *at - 8, 8), F_BYTES);
}

static bool note_value(const uint8_t *d, size_t size, size_t *at, uint64_t type)
{
    static const uint8_t bytes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

    if (type == GGUF_STRING)
        return note_str(d, size, at);
    return type < sizeof(bytes) && note(size, at, bytes[type], F_VALUE);
}

static bool note_kv(const uint8_t *d, size_t size, size_t *at)
{
    uint64_t type, n;

    if (!note_str(d, size, at) || !note(size, at, 4, F_TYPE))
        return false;
    type = get(d + *at - 4, 4);
    if (type != GGUF_ARRAY)
        return note_value(d, size, at, type);
    if (!note(size, at, 4, F_TYPE) || !note(size, at, 8, F_COUNT))
        return false;
    type = get(d + *at - 12, 4);
    n    = get(d + *at - 8, 8);
    for (uint64_t i = 0; i < n; i++) {
        if (!note_value(d, size, at, type))
            return false;
    }
    return true;
}

static bool note_tensor(const uint8_t *d, size_t size, size_t *at)
{
    uint64_t n;

    if (!note_str(d, size, at) || !note(size, at, 4, F_COUNT))
        return false;
    n = get(d + *at - 4, 4);
    for (uint64_t i = 0; i < n; i++) {
        if (!note(size, at, 8, F_DIM))
            return false;
    }
    return note(size, at, 4, F_TYPE) && note(size, at, 8, F_OFFSET);
}

static void map_input(const uint8_t *d, size_t size)
{
    size_t at = 4;
    bool   ok = size >= 24;

    map.n_field = map.n_entry = 0;
    if (ok) {
        const uint64_t n_tensor = get(d + 8, 8), n_kv = get(d + 16, 8);

        ok = note(size, &at, 4, F_VALUE) && note(size, &at, 8, F_COUNT) &&
             note(size, &at, 8, F_COUNT);
        for (uint64_t i = 0; ok && map.n_entry < ENTRY_MAX && i < n_kv + n_tensor; i++) {
            const size_t begin = at;

            ok = i < n_kv ? note_kv(d, size, &at) : note_tensor(d, size, &at);
            if (ok)
                map.entry[map.n_entry++] = (entry){ begin, at - begin, i >= n_kv };
        }
    }
    map.stop = at < size ? at : size;
}

/* Replaces old bytes at at by fresh ones (which may lie in d itself); 0 if there is no room. */
static size_t splice(uint8_t *d, size_t size, size_t max, size_t at, size_t old,
                     const uint8_t *fresh, size_t bytes)
{
    uint8_t *copy;

    if (size - old + bytes > max)
        return 0;
    copy = malloc(bytes + 1);
    must(copy);
    if (bytes)
        memcpy(copy, fresh, bytes);
    memmove(d + at + bytes, d + at + old, size - at - old);
    if (bytes)
        memcpy(d + at, copy, bytes);
    free(copy);
    return size - old + bytes;
}

static uint64_t interesting(uint64_t now, size_t size)
{
    static const uint64_t k[] = {
        0,          1,          2,          3,          4,          5,         7,
        8,          12,         13,         30,         31,         32,        33,
        64,         255,        256,        65535,      65536,      65537,     1u << 20,
        0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 61, INT64_MAX, 1ull << 63,
    };

    /* Divisors: sizes of metadata types and of blocks, whose multiples wrap to small sums. */
    static const uint8_t unit[] = { 2, 4, 8, 18, 20, 22, 24, 34, 84, 110, 144, 176, 210 };

    switch (below(10)) {
    case 0:
        return now + 1;
    case 1:
        return now - 1;
    case 2:
        return now ^ 1ull << below(64);
    case 3:
        return size - below(64);
    case 4:
        return now * 2;
    case 5:
        return UINT64_MAX - below(64);
    case 6:
        return 0 - 32 * below(64);
    case 7:
        return UINT64_MAX / unit[below(sizeof(unit))] + below(64);
    default:
        return k[below(KVD_COUNTOF(k))];
    }
}

static size_t bend_field(uint8_t *d, size_t size, size_t max)
{
    static const char *const keys[] = { "general.alignment",   "split.count", "split.no",
                                        "split.tensors.count", "w",           "a" };
    const field              f      = map.field[below(map.n_field)];
    uint64_t                 v      = get(d + f.at, f.bytes);
    uint8_t                  fresh[64];
    size_t                   n, r;

    switch (f.kind) {
    case F_TYPE:
        v = below(4) ? below(42) : interesting(v, size);
        break;
    case F_BYTES: /* another string, with its length */
        if (f.at < 8)
            return 0;
        if (below(2)) {
            const char *key = keys[below(KVD_COUNTOF(keys))];

            n = strlen(key);
            memcpy(fresh, key, n);
        } else {
            n = below(sizeof(fresh));
            for (size_t i = 0; i < n; i++)
                fresh[i] = (uint8_t)kvd_rng_u64(&rng);
        }
        r = splice(d, size, max, f.at, f.bytes, fresh, n);
        if (r) {
            v = n;
            memcpy(d + f.at - 8, &v, 8);
        }
        return r;
    case F_DIM:
        v = below(2)   ? 32 * below(40)
            : below(4) ? interesting(v, size)
                       : (1ull << 62) + below(64); /* times 4 bytes wraps to little */
        break;
    case F_OFFSET:
        v = below(2) ? 32 * below(size / 32 + 2) : interesting(v, size);
        break;
    default:
        v = interesting(v, size);
        break;
    }
    memcpy(d + f.at, &v, f.bytes < 8 ? f.bytes : 8);
    return size;
}

/* Copies or drops an entry; mostly keeps the count right. */
static size_t bend_entries(uint8_t *d, size_t size, size_t max)
{
    const entry  e    = map.entry[below(map.n_entry)];
    const entry  to   = map.entry[below(map.n_entry)];
    const size_t n_at = e.tensor ? 8 : 16;
    const bool   copy = below(2) != 0;
    uint64_t     n    = get(d + n_at, 8);
    size_t       r;

    if (copy)
        r = splice(d, size, max, e.tensor == to.tensor ? to.at : e.at, 0, d + e.at, e.bytes);
    else
        r = splice(d, size, max, e.at, e.bytes, NULL, 0);
    n += copy ? 1 : UINT64_MAX;
    if (r && below(8))
        memcpy(d + n_at, &n, 8);
    return r;
}

/* Makes the data begin at a multiple of 32 again, as it did before the header grew by delta. */
static size_t repad(uint8_t *d, size_t size, size_t max, size_t delta)
{
    static const uint8_t zero[32];
    const size_t         wrong = delta & 31;

    map_input(d, size);
    if (!wrong || !map.n_entry || below(4) == 0)
        return size;
    delta = splice(d, size, max, map.stop, 0, zero, 32 - wrong);
    return delta ? delta : size;
}

static size_t mutate_file(uint8_t *d, size_t size, size_t max)
{
    size_t r = 0;

    map_input(d, size);
    switch (below(8)) {
    case 0:
        return LLVMFuzzerMutate(d, size, max);
    case 1: /* cut, mostly at a field's edge */
        if (map.n_field && below(2))
            r = map.field[below(map.n_field)].at + below(2);
        else
            r = 1 + below(size);
        return r < size ? r : size;
    case 2:
    case 3:
        r = map.n_entry ? bend_entries(d, size, max) : 0;
        break;
    default:
        r = map.n_field ? bend_field(d, size, max) : 0;
        break;
    }
    if (!r)
        return LLVMFuzzerMutate(d, size, max);
    return repad(d, r, max, r - size);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    uint32_t n;

    if (!LLVMFuzzerMutate)
        return size;
    kvd_rng_seed(&rng, seed);
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
