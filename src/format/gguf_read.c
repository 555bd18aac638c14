/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_read.c - the parser: header, metadata, tensor directory of one file.
 *
 * Everything here is read from outside, so every length is compared with the bytes that are left
 * before it is used, products and sums are checked, and memory is taken only for what was seen
 * to be in the file.  No recursion: arrays of arrays are refused.
 *
 *   "GGUF" | u32 version | u64 n_tensor | u64 n_kv | n_kv x (string key, u32 type, value)
 *   | n_tensor x (string name, u32 n_dim, u64 dim[n_dim], u32 type, u64 offset)
 *   | zeros up to the alignment | data; offsets count from here
 *
 * Thread: none of its own; pure functions over a mapping. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "format/gguf_impl.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF values are read in place");

#define KV_BYTES_MIN     14u /* key length, one letter, type, one byte of value */
#define TENSOR_BYTES_MIN 33u /* name length, one letter, n_dim, one dimension, type, offset */

static const struct {
    const char *name;
    uint32_t    bytes; /* of one value; of a string at least its length */
} types[] = {
    [GGUF_U8] = { "u8", 1 },        [GGUF_I8] = { "i8", 1 },     [GGUF_U16] = { "u16", 2 },
    [GGUF_I16] = { "i16", 2 },      [GGUF_U32] = { "u32", 4 },   [GGUF_I32] = { "i32", 4 },
    [GGUF_F32] = { "f32", 4 },      [GGUF_BOOL] = { "bool", 1 }, [GGUF_STRING] = { "string", 8 },
    [GGUF_ARRAY] = { "array", 12 }, [GGUF_U64] = { "u64", 8 },   [GGUF_I64] = { "i64", 8 },
    [GGUF_F64] = { "f64", 8 },
};
_Static_assert(KVD_COUNTOF(types) == GGUF_F64 + 1, "one row for each type");

const char *gguf_type_name(uint32_t type)
{
    return type < KVD_COUNTOF(types) ? types[type].name : "?";
}

const char *gguf_quote(gguf_str s, char buf[GGUF_QUOTE_BYTES])
{
    const size_t room = GGUF_QUOTE_BYTES - 6; /* quotes, three dots, terminator */
    size_t       n = 0, len = s.len < room ? (size_t)s.len : room;

    buf[n++] = '"';
    for (size_t i = 0; i < len; i++)
        buf[n++] = s.data[i] >= ' ' && s.data[i] < 127 ? s.data[i] : '?';
    snprintf(buf + n, GGUF_QUOTE_BYTES - n, "\"%s", len < s.len ? "..." : "");
    return buf;
}

kvd_status gguf_bad(const gguf_reader *r, kvd_status code, uint64_t at, const char *fmt, ...)
{
    char    name[KVD_SHORT_PATH_BYTES], text[KVD_ERR_MSG_BYTES];
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    return kvd_fail(r->err, code, 0, "%s: offset %" PRIu64 ": %s", kvd_short_path(r->path, name),
                    at, text);
}

/* ---- cursor ---------------------------------------------------------------------- */

static uint64_t left(const gguf_reader *r)
{
    return r->bytes - r->pos;
}

/* The file ends before n more bytes of what. */
static kvd_status short_file(const gguf_reader *r, uint64_t n, const char *what)
{
    uint64_t need;

    if (!kvd_add(r->pos, n, &need))
        need = UINT64_MAX;
    return gguf_bad(r, KVD_E_CORRUPT, r->pos,
                    "the file ends inside %s: at least %" PRIu64 " bytes expected, the file has "
                    "%" PRIu64 " (truncated, or a damaged length)",
                    what, need, r->bytes);
}

static kvd_status skip(gguf_reader *r, uint64_t n, const char *what)
{
    if (n > left(r))
        return short_file(r, n, what);
    r->pos += n;
    return KVD_OK;
}

static kvd_status read_u32(gguf_reader *r, uint32_t *out, const char *what)
{
    const uint64_t at = r->pos;

    KVD_TRY(skip(r, sizeof(*out), what));
    memcpy(out, r->data + at, sizeof(*out));
    return KVD_OK;
}

static kvd_status read_u64(gguf_reader *r, uint64_t *out, const char *what)
{
    const uint64_t at = r->pos;

    KVD_TRY(skip(r, sizeof(*out), what));
    memcpy(out, r->data + at, sizeof(*out));
    return KVD_OK;
}

static kvd_status read_str(gguf_reader *r, gguf_str *out, const char *what)
{
    KVD_TRY(read_u64(r, &out->len, what));
    out->data = (const char *)r->data + r->pos;
    return skip(r, out->len, what);
}

/* A key or a tensor's name: anything that a C string can hold, so that it can be asked for. */
static kvd_status read_name(gguf_reader *r, gguf_str *out, uint64_t len_max, const char *what)
{
    const uint64_t at = r->pos;

    KVD_TRY(read_str(r, out, what));
    if (out->len == 0 || out->len > len_max)
        return gguf_bad(r, KVD_E_CORRUPT, at, "%s of %" PRIu64 " bytes; expected 1 to %" PRIu64,
                        what, out->len, len_max);
    if (memchr(out->data, 0, (size_t)out->len))
        return gguf_bad(r, KVD_E_CORRUPT, at + 8, "%s holds a zero byte", what);
    return KVD_OK;
}

/* ---- metadata -------------------------------------------------------------------- */

/* Values of a bool are 0 and 1. */
static kvd_status check_bools(const gguf_reader *r, const gguf_kv *kv)
{
    char q[GGUF_QUOTE_BYTES];

    for (uint64_t i = 0; i < kv->count; i++) {
        if (kv->val[i] > 1)
            return gguf_bad(r, KVD_E_CORRUPT, (uint64_t)(kv->val + i - r->data),
                            "key %s: a bool is %u; expected 0 or 1", gguf_quote(kv->key, q),
                            kv->val[i]);
    }
    return KVD_OK;
}

/* Walks the strings, then notes where each begins. */
static kvd_status read_strings(gguf_reader *r, gguf_kv *kv, uint64_t *heap_bytes)
{
    const uint64_t begin = r->pos;
    char           q[GGUF_QUOTE_BYTES];
    gguf_str       s;

    for (uint64_t i = 0; i < kv->count; i++)
        KVD_TRY(read_str(r, &s, "an array of strings"));
    if (r->pos - begin > UINT32_MAX)
        return gguf_bad(r, KVD_E_UNSUPPORTED, begin,
                        "key %s: strings of %" PRIu64 " bytes; at most 4 GiB are supported",
                        gguf_quote(kv->key, q), r->pos - begin);
    kv->index = kvd_malloc((size_t)kv->count * sizeof(*kv->index));
    if (!kv->index)
        return gguf_bad(r, KVD_E_NOMEM, begin, "no memory to index %" PRIu64 " strings", kv->count);
    *heap_bytes += kv->count * sizeof(*kv->index);
    for (uint64_t i = 0, at = begin; i < kv->count; i++) {
        kv->index[i] = (uint32_t)(at - begin);
        at += 8 + gguf_load_u64(r->data + at);
    }
    return KVD_OK;
}

static kvd_status read_array(gguf_reader *r, gguf_kv *kv, uint64_t *heap_bytes)
{
    const uint64_t at = r->pos;
    uint32_t       elem;
    char           q[GGUF_QUOTE_BYTES];

    KVD_TRY(read_u32(r, &elem, "an array"));
    KVD_TRY(read_u64(r, &kv->count, "an array"));
    kv->val = r->data + r->pos;
    if (elem == GGUF_ARRAY)
        return gguf_bad(r, KVD_E_UNSUPPORTED, at, "key %s: an array of arrays is not supported",
                        gguf_quote(kv->key, q));
    if (elem >= KVD_COUNTOF(types))
        return gguf_bad(r, KVD_E_CORRUPT, at,
                        "key %s: unknown element type %" PRIu32 "; expected 0 to 12",
                        gguf_quote(kv->key, q), elem);
    kv->elem_type = (uint8_t)elem;
    if (kv->count > left(r) / types[elem].bytes) {
        uint64_t need;

        if (!kvd_mul(kv->count, types[elem].bytes, &need))
            need = UINT64_MAX;
        return short_file(r, need, "an array");
    }
    if (elem == GGUF_STRING)
        return read_strings(r, kv, heap_bytes);
    r->pos += kv->count * types[elem].bytes;
    return elem == GGUF_BOOL ? check_bools(r, kv) : KVD_OK;
}

static kvd_status read_kv(gguf_reader *r, gguf_kv *kv, uint64_t *heap_bytes)
{
    uint64_t at;
    uint32_t type;
    gguf_str s;
    char     q[GGUF_QUOTE_BYTES];

    KVD_TRY(read_name(r, &kv->key, GGUF_MAX_KEY, "a metadata key"));
    at = r->pos;
    KVD_TRY(read_u32(r, &type, "a metadata type"));
    if (type >= KVD_COUNTOF(types))
        return gguf_bad(r, KVD_E_CORRUPT, at,
                        "key %s: unknown metadata type %" PRIu32 "; expected 0 to 12",
                        gguf_quote(kv->key, q), type);
    kv->type  = (uint8_t)type;
    kv->count = 1;
    kv->val   = r->data + r->pos;
    if (type == GGUF_ARRAY)
        return read_array(r, kv, heap_bytes);
    kv->elem_type = kv->type;
    if (type == GGUF_STRING)
        return read_str(r, &s, "a metadata string");
    KVD_TRY(skip(r, types[type].bytes, "a metadata value"));
    return type == GGUF_BOOL ? check_bools(r, kv) : KVD_OK;
}

static kvd_status read_kvs(gguf_reader *r, gguf_kv_set *s, uint32_t n, uint64_t *heap_bytes)
{
    uint32_t dup;
    char     q[GGUF_QUOTE_BYTES];

    s->kv    = kvd_calloc(n, sizeof(*s->kv));
    s->order = kvd_malloc(2 * (size_t)n * sizeof(*s->order));
    if (!s->kv || !s->order)
        return gguf_bad(r, KVD_E_NOMEM, r->pos, "no memory for %" PRIu32 " metadata keys", n);
    *heap_bytes += (uint64_t)n * (sizeof(*s->kv) + 2 * sizeof(*s->order));
    for (; s->n < n; s->n++) /* an entry owns an index only once it is read whole */
        KVD_TRY(read_kv(r, &s->kv[s->n], heap_bytes));
    if (!gguf_index_build(s->kv, sizeof(*s->kv), n, s->order, &dup))
        return gguf_bad(r, KVD_E_CORRUPT,
                        (uint64_t)((const uint8_t *)s->kv[dup].key.data - r->data) - 8,
                        "key %s occurs twice", gguf_quote(s->kv[dup].key, q));
    return KVD_OK;
}

void gguf_kv_set_free(gguf_kv_set *s)
{
    for (uint32_t i = 0; i < s->n; i++)
        kvd_free(s->kv[i].index);
    kvd_free(s->kv);
    kvd_free(s->order);
    *s = (gguf_kv_set){ 0 };
}

/* ---- head ------------------------------------------------------------------------ */

static const char *instead_of_gguf(const gguf_reader *r)
{
    if (r->bytes >= 4 && memcmp(r->data, "vers", 4) == 0)
        return "; if it is a pointer of Git LFS, git lfs pull brings the file";
    return r->bytes ? "; a model of another form has to be converted" : "";
}

static kvd_status read_magic(gguf_reader *r, uint32_t *version)
{
    uint32_t swapped;

    if (r->bytes < 4 || memcmp(r->data, "GGUF", 4) != 0) {
        const gguf_str found = { (const char *)r->data, kvd_min_u64(r->bytes, 4) };
        char           q[GGUF_QUOTE_BYTES];

        return gguf_bad(r, KVD_E_CORRUPT, 0,
                        "not a GGUF file: expected \"GGUF\", found %s (the file has %" PRIu64
                        " bytes)%s",
                        gguf_quote(found, q), r->bytes, instead_of_gguf(r));
    }
    r->pos = 4;
    KVD_TRY(read_u32(r, version, "the header"));
    swapped = __builtin_bswap32(*version);
    if (*version == 2 || *version == 3)
        return KVD_OK;
    if (swapped >= 1 && swapped <= 3)
        return gguf_bad(r, KVD_E_UNSUPPORTED, 4,
                        "a big-endian GGUF file (version %" PRIu32 "); only little-endian files "
                        "are supported",
                        swapped);
    if (*version == 1)
        return gguf_bad(r, KVD_E_UNSUPPORTED, 4,
                        "GGUF version 1 is not supported, only 2 and 3; convert the file anew");
    return gguf_bad(r, KVD_E_UNSUPPORTED, 4, "GGUF version %" PRIu32 "; expected 2 or 3", *version);
}

static kvd_status check_count(const gguf_reader *r, uint64_t at, uint64_t n, uint64_t max,
                              uint64_t bytes_min, const char *what)
{
    if (n > max)
        return gguf_bad(r, KVD_E_CORRUPT, at, "%" PRIu64 " %s; at most %" PRIu64 " are accepted", n,
                        what, max);
    if (n > left(r) / bytes_min)
        return gguf_bad(r, KVD_E_CORRUPT, at,
                        "%" PRIu64 " %s need at least %" PRIu64 " bytes, the file has %" PRIu64, n,
                        what, r->pos + n * bytes_min, r->bytes);
    return KVD_OK;
}

static kvd_status find_alignment(const gguf_reader *r, const gguf_kv_set *kvs, uint32_t *out)
{
    const gguf_kv *kv = gguf_kv_find(kvs, "general.alignment");
    uint64_t       a  = GGUF_DEF_ALIGN;

    if (kv && (kv->type != GGUF_U32 || !gguf_kv_u64(kv, 0, &a)))
        return gguf_bad(r, KVD_E_CORRUPT, (uint64_t)(kv->val - r->data),
                        "key \"general.alignment\" is of type %s; expected u32",
                        gguf_type_name(kv->type));
    if (a < GGUF_MIN_ALIGN || a > GGUF_MAX_ALIGN || (a & (a - 1)) != 0)
        return gguf_bad(r, KVD_E_CORRUPT, (uint64_t)(kv ? kv->val - r->data : 0),
                        "alignment %" PRIu64 "; expected a power of two from %u to %u", a,
                        GGUF_MIN_ALIGN, GGUF_MAX_ALIGN);
    *out = (uint32_t)a;
    return KVD_OK;
}

/* Name, number of dimensions and where they are; leaves the cursor behind the entry. */
static kvd_status read_tensor_entry(gguf_reader *r, gguf_tensor *t, uint64_t *dim_pos)
{
    char q[GGUF_QUOTE_BYTES];

    KVD_TRY(read_name(r, &t->name, GGUF_MAX_NAME, "a tensor name"));
    KVD_TRY(read_u32(r, &t->n_dim, "the tensor directory"));
    if (t->n_dim == 0 || t->n_dim > GGUF_MAX_DIMS)
        return gguf_bad(r, KVD_E_CORRUPT, r->pos - 4,
                        "tensor %s has %" PRIu32 " dimensions; expected 1 to %d",
                        gguf_quote(t->name, q), t->n_dim, GGUF_MAX_DIMS);
    *dim_pos = r->pos;
    KVD_TRY(skip(r, 8 * (uint64_t)t->n_dim, "the tensor directory"));
    KVD_TRY(read_u32(r, &t->type_id, "the tensor directory"));
    return read_u64(r, &t->offset, "the tensor directory");
}

kvd_status gguf_read_head(gguf_part *p, gguf_kv_set *kvs, uint64_t *heap_bytes, kvd_err *err)
{
    gguf_reader r = { p->map.data, p->map.bytes, 0, p->path, err };
    gguf_tensor t;
    uint64_t    n_kv, dim_pos;

    KVD_TRY(read_magic(&r, &p->version));
    KVD_TRY(read_u64(&r, &p->n_tensor, "the header"));
    KVD_TRY(read_u64(&r, &n_kv, "the header"));
    KVD_TRY(check_count(&r, 8, p->n_tensor, GGUF_MAX_TENSOR, TENSOR_BYTES_MIN, "tensors"));
    KVD_TRY(check_count(&r, 16, n_kv, GGUF_MAX_KV, KV_BYTES_MIN, "metadata keys"));
    KVD_TRY(read_kvs(&r, kvs, (uint32_t)n_kv, heap_bytes));
    KVD_TRY(find_alignment(&r, kvs, &p->alignment));
    p->tensor_pos = r.pos;
    for (uint64_t i = 0; i < p->n_tensor; i++)
        KVD_TRY(read_tensor_entry(&r, &t, &dim_pos));
    p->data_pos = kvd_align_up(r.pos, p->alignment); /* pos is below the size of a mapping */
    return KVD_OK;
}

/* ---- tensors --------------------------------------------------------------------- */

static kvd_status read_dims(const gguf_reader *r, gguf_tensor *t, uint64_t dim_pos)
{
    char q[GGUF_QUOTE_BYTES];

    t->n_elem = 1;
    for (uint32_t i = 0; i < GGUF_MAX_DIMS; i++) {
        t->dim[i] = i < t->n_dim ? gguf_load_u64(r->data + dim_pos + 8 * (uint64_t)i) : 1;
        if (t->dim[i] == 0)
            return gguf_bad(r, KVD_E_CORRUPT, dim_pos + 8 * (uint64_t)i,
                            "tensor %s: dimension %" PRIu32 " is 0", gguf_quote(t->name, q), i);
        if (!kvd_mul(t->n_elem, t->dim[i], &t->n_elem) || t->n_elem > INT64_MAX)
            return gguf_bad(r, KVD_E_CORRUPT, dim_pos, "tensor %s: its dimensions overflow",
                            gguf_quote(t->name, q));
    }
    return KVD_OK;
}

/* Size and place of the data, relative to data_pos; bytes stays 0 for a type we do not read. */
static kvd_status size_tensor(const gguf_reader *r, const gguf_part *p, gguf_tensor *t,
                              uint64_t dim_pos)
{
    const kvd_dtype_info *d = kvd_dtype_get(t->type_id);
    char                  q[GGUF_QUOTE_BYTES];

    if (!d && !kvd_dtype_name(t->type_id))
        return gguf_bad(r, KVD_E_UNSUPPORTED, dim_pos + 8 * (uint64_t)t->n_dim,
                        "tensor %s: unknown type %" PRIu32, gguf_quote(t->name, q), t->type_id);
    if (t->offset % p->alignment != 0)
        return gguf_bad(r, KVD_E_CORRUPT, dim_pos + 8 * (uint64_t)t->n_dim + 4,
                        "tensor %s: data offset %" PRIu64 "; expected a multiple of %" PRIu32,
                        gguf_quote(t->name, q), t->offset, p->alignment);
    t->bytes = 0;
    if (!d)
        return KVD_OK;
    if (t->dim[0] % d->block_len != 0)
        return gguf_bad(r, KVD_E_CORRUPT, dim_pos,
                        "tensor %s: rows of %" PRIu64 " elements; %s needs a multiple of %" PRIu32,
                        gguf_quote(t->name, q), t->dim[0], d->name, d->block_len);
    if (!kvd_mul(t->n_elem / d->block_len, d->block_bytes, &t->bytes))
        return gguf_bad(r, KVD_E_CORRUPT, dim_pos, "tensor %s: its size overflows",
                        gguf_quote(t->name, q));
    return KVD_OK;
}

/* Turns offsets into absolute ones and pointers, once all data is known to be in the file. */
static kvd_status place_tensors(const gguf_reader *r, const gguf_part *p, gguf_tensor *t)
{
    const gguf_tensor *out  = NULL; /* the first one that is not wholly in the file */
    uint64_t           need = 0, end, sum = 0;
    char               q[GGUF_QUOTE_BYTES];

    for (uint64_t i = 0; i < p->n_tensor; i++) {
        if (!kvd_add(p->data_pos, t[i].offset, &end) || !kvd_add(end, t[i].bytes, &end))
            end = UINT64_MAX;
        if (end > p->map.bytes && !out)
            out = &t[i];
        need = kvd_max_u64(need, end);
    }
    if (out)
        return gguf_bad(r, KVD_E_CORRUPT, p->data_pos,
                        "tensor %s lies beyond the end of the file: %" PRIu64 " bytes expected, "
                        "the file has %" PRIu64 " (truncated?)",
                        gguf_quote(out->name, q), need, p->map.bytes);
    for (uint64_t i = 0; i < p->n_tensor; i++) {
        /* Below 2^64: at most 2^20 tensors, and sum stays under the file's size. */
        sum += t[i].bytes;
        if (sum > p->map.bytes - p->data_pos)
            return gguf_bad(r, KVD_E_CORRUPT, p->data_pos,
                            "tensors overlap: up to %s they take more than the %" PRIu64
                            " bytes of data",
                            gguf_quote(t[i].name, q), p->map.bytes - p->data_pos);
        t[i].offset += p->data_pos;
        if (t[i].bytes)
            t[i].data = p->map.data + t[i].offset;
    }
    return KVD_OK;
}

kvd_status gguf_read_tensors(const gguf_part *p, uint32_t split, gguf_tensor *out, kvd_err *err)
{
    gguf_reader r = { p->map.data, p->map.bytes, p->tensor_pos, p->path, err };
    uint64_t    dim_pos;

    for (uint64_t i = 0; i < p->n_tensor; i++) {
        out[i].split = split;
        out[i].data  = NULL;
        KVD_TRY(read_tensor_entry(&r, &out[i], &dim_pos));
        KVD_TRY(read_dims(&r, &out[i], dim_pos));
        KVD_TRY(size_tensor(&r, p, &out[i], dim_pos));
    }
    return p->n_tensor ? place_tensors(&r, p, out) : KVD_OK;
}
