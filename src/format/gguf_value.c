/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_value.c - reading metadata values.
 *
 * What a key holds is up to the file, so a value of another type, or an element beyond an array's
 * end, is an answer (false) and never an assert.  Values lie unaligned in the mapping.
 * Immutable data; any thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "format/gguf_impl.h"

uint64_t gguf_load_u64(const uint8_t *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

gguf_str gguf_kv_key(const gguf_kv *kv)
{
    return kv->key;
}

gguf_type gguf_kv_type(const gguf_kv *kv)
{
    return (gguf_type)kv->type;
}

gguf_type gguf_kv_elem_type(const gguf_kv *kv)
{
    return (gguf_type)kv->elem_type;
}

uint64_t gguf_kv_count(const gguf_kv *kv)
{
    return kv->count;
}

/* An integer of any width as sign and 64 bits; false for other types. */
static bool load_int(const gguf_kv *kv, uint64_t i, uint64_t *bits, bool *negative)
{
    const uint8_t *p = kv->val;
    int64_t        s = 0;
    uint64_t       u = 0;

    if (i >= kv->count)
        return false;
#define LOAD(type, into)                             \
    do {                                             \
        type v_;                                     \
        memcpy(&v_, p + i * sizeof(v_), sizeof(v_)); \
        into = v_;                                   \
    } while (0)
    switch ((gguf_type)kv->elem_type) {
    case GGUF_U8:
        LOAD(uint8_t, u);
        break;
    case GGUF_U16:
        LOAD(uint16_t, u);
        break;
    case GGUF_U32:
        LOAD(uint32_t, u);
        break;
    case GGUF_U64:
        LOAD(uint64_t, u);
        break;
    case GGUF_I8:
        LOAD(int8_t, s);
        break;
    case GGUF_I16:
        LOAD(int16_t, s);
        break;
    case GGUF_I32:
        LOAD(int32_t, s);
        break;
    case GGUF_I64:
        LOAD(int64_t, s);
        break;
    default:
        return false;
    }
#undef LOAD
    *negative = s < 0;
    *bits     = u | (uint64_t)s; /* one of them is 0 */
    return true;
}

bool gguf_kv_u64(const gguf_kv *kv, uint64_t i, uint64_t *out)
{
    uint64_t bits;
    bool     negative;

    if (!load_int(kv, i, &bits, &negative) || negative)
        return false;
    *out = bits;
    return true;
}

bool gguf_kv_i64(const gguf_kv *kv, uint64_t i, int64_t *out)
{
    uint64_t bits;
    bool     negative;

    if (!load_int(kv, i, &bits, &negative) || (!negative && bits > INT64_MAX))
        return false;
    memcpy(out, &bits, sizeof(*out));
    return true;
}

bool gguf_kv_f64(const gguf_kv *kv, uint64_t i, double *out)
{
    uint64_t bits;
    bool     negative;
    float    f;

    if (i >= kv->count)
        return false;
    if (kv->elem_type == GGUF_F64) {
        memcpy(out, kv->val + i * sizeof(*out), sizeof(*out));
        return true;
    }
    if (kv->elem_type == GGUF_F32) {
        memcpy(&f, kv->val + i * sizeof(f), sizeof(f));
        *out = (double)f;
        return true;
    }
    if (!load_int(kv, i, &bits, &negative))
        return false;
    *out = negative ? -(double)(0 - bits) : (double)bits;
    return true;
}

bool gguf_kv_bool(const gguf_kv *kv, uint64_t i, bool *out)
{
    if (kv->elem_type != GGUF_BOOL || i >= kv->count)
        return false;
    *out = kv->val[i] != 0;
    return true;
}

bool gguf_kv_str(const gguf_kv *kv, uint64_t i, gguf_str *out)
{
    const uint8_t *p = kv->val;

    if (kv->elem_type != GGUF_STRING || i >= kv->count)
        return false;
    if (kv->index)
        p += kv->index[i];
    out->len  = gguf_load_u64(p);
    out->data = (const char *)p + 8;
    return true;
}

bool gguf_str_eq(gguf_str s, const char *z)
{
    const size_t len = strlen(z);

    return s.len == len && memcmp(s.data, z, len) == 0;
}

/* ---- typed look-ups -------------------------------------------------------------- */

const gguf_kv *gguf_kv_find(const gguf_kv_set *s, const char *key)
{
    return gguf_index_find(s->kv, sizeof(*s->kv), s->n, s->order, key);
}

const gguf_kv *gguf_find(const gguf_file *g, const char *key)
{
    return gguf_kv_find(&g->meta, key);
}

/* Where messages about metadata point. */
static gguf_reader where(const gguf_file *g, kvd_err *err)
{
    return (gguf_reader){ g->part[0].map.data, g->part[0].map.bytes, 0, g->part[0].path, err };
}

/* The entry of key, or NULL with *st set. */
static const gguf_kv *look_up(const gguf_file *g, const char *key, bool required, kvd_status *st,
                              kvd_err *err)
{
    const gguf_reader r  = where(g, err);
    const gguf_kv    *kv = gguf_find(g, key);

    *st = KVD_OK;
    if (!kv && required)
        *st = gguf_bad(&r, KVD_E_CORRUPT, 0, "the metadata has no key \"%s\"", key);
    return kv;
}

static kvd_status wrong(const gguf_file *g, const gguf_kv *kv, const char *expected, kvd_err *err)
{
    const gguf_reader r = where(g, err);
    char              q[GGUF_QUOTE_BYTES], found[64] = "";
    uint64_t          bits;
    bool              negative;
    const uint64_t    at = (uint64_t)(kv->val - r.data);

    if (kv->type == GGUF_ARRAY)
        return gguf_bad(&r, KVD_E_CORRUPT, at, "key %s is an array of %" PRIu64 " %s; expected %s",
                        gguf_quote(kv->key, q), kv->count, gguf_type_name(kv->elem_type), expected);
    if (load_int(kv, 0, &bits, &negative))
        (void)snprintf(found, sizeof(found), " %s%" PRIu64, negative ? "-" : "",
                       negative ? 0 - bits : bits);
    return gguf_bad(&r, KVD_E_CORRUPT, at, "key %s is %s%s; expected %s", gguf_quote(kv->key, q),
                    gguf_type_name(kv->type), found, expected);
}

kvd_status gguf_get_u32(const gguf_file *g, const char *key, bool required, uint32_t *out,
                        kvd_err *err)
{
    kvd_status     st;
    uint64_t       v;
    const gguf_kv *kv = look_up(g, key, required, &st, err);

    if (!kv)
        return st;
    if (kv->type == GGUF_ARRAY || !gguf_kv_u64(kv, 0, &v) || v > UINT32_MAX)
        return wrong(g, kv, "an integer from 0 to 4294967295", err);
    *out = (uint32_t)v;
    return KVD_OK;
}

kvd_status gguf_get_f32(const gguf_file *g, const char *key, bool required, float *out,
                        kvd_err *err)
{
    kvd_status     st;
    double         v;
    const gguf_kv *kv = look_up(g, key, required, &st, err);

    if (!kv)
        return st;
    /* Beyond the range of float the conversion itself would be undefined; NaN is not a setting. */
    if (kv->type == GGUF_ARRAY || !gguf_kv_f64(kv, 0, &v) || !(v >= -0x1.fffffep127) ||
        !(v <= 0x1.fffffep127))
        return wrong(g, kv, "a finite number in the range of f32", err);
    *out = (float)v;
    return KVD_OK;
}

kvd_status gguf_get_bool(const gguf_file *g, const char *key, bool required, bool *out,
                         kvd_err *err)
{
    kvd_status     st;
    const gguf_kv *kv = look_up(g, key, required, &st, err);

    if (!kv)
        return st;
    if (kv->type == GGUF_ARRAY || !gguf_kv_bool(kv, 0, out))
        return wrong(g, kv, "a bool", err);
    return KVD_OK;
}

kvd_status gguf_get_str(const gguf_file *g, const char *key, bool required, gguf_str *out,
                        kvd_err *err)
{
    kvd_status     st;
    const gguf_kv *kv = look_up(g, key, required, &st, err);

    if (!kv)
        return st;
    if (kv->type == GGUF_ARRAY || !gguf_kv_str(kv, 0, out))
        return wrong(g, kv, "a string", err);
    return KVD_OK;
}

kvd_status gguf_get_array(const gguf_file *g, const char *key, bool required, gguf_type elem,
                          const gguf_kv **out, kvd_err *err)
{
    kvd_status     st;
    char           expected[32];
    const gguf_kv *kv = look_up(g, key, required, &st, err);

    *out = NULL;
    if (!kv)
        return st;
    snprintf(expected, sizeof(expected), "an array of %s", gguf_type_name(elem));
    if (kv->type != GGUF_ARRAY || kv->elem_type != elem)
        return wrong(g, kv, expected, err);
    *out = kv;
    return KVD_OK;
}
