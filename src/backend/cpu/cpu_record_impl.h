/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_record_impl.h - text of the record kernels; included once by one file per level.
 *
 * A code q stands for q * scale + minimum.  Scale and minimum are rounded to binary16 first and
 * codes are taken against the rounded ones, so rounding them costs range, not accuracy.  The
 * compiler makes vectors of the loops; what it needs help with is binary16. */
#ifndef KVD_CPU_RECORD_IMPL_H
#define KVD_CPU_RECORD_IMPL_H

#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "backend/cpu/cpu_record.h"

#define REC_INLINE  static inline __attribute__((always_inline))
#define REC_F16_MAX 65504.0f

/* n binary16 to float. */
REC_INLINE void rec_widen(const uint8_t *p, float *out, uint32_t n)
{
    uint32_t i = 0;

#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(
                                      _mm_loadu_si128((const __m128i *)(const void *)(p + 2 * i))));
#endif
    for (; i < n; i++) {
        uint16_t h;

        memcpy(&h, p + 2 * i, sizeof(h));
        out[i] = kvd_f16_to_f32(h);
    }
}

REC_INLINE void rec_load(const kvd_record_format *f, const uint8_t *row, float *out)
{
    if (f->raw == KVD_DTYPE_F32) {
        memcpy(out, row, f->head_dim * sizeof(float));
        return;
    }
    for (uint32_t i = 0; i < f->head_dim; i++) {
        uint16_t h;

        memcpy(&h, row + 2 * i, sizeof(h));
        out[i] = kvd_bf16_to_f32(h);
    }
}

REC_INLINE void rec_store(const kvd_record_format *f, const float *x, uint8_t *row)
{
    if (f->raw == KVD_DTYPE_F32) {
        memcpy(row, x, f->head_dim * sizeof(float));
        return;
    }
    for (uint32_t i = 0; i < f->head_dim; i++) {
        const uint32_t u = kvd_f32_to_bits(x[i]); /* finite: codes and parameters are */
        const uint16_t h = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);

        memcpy(row + 2 * i, &h, sizeof(h));
    }
}

/* Rounds a range to parameters; *inv is what codes are made with. */
REC_INLINE void rec_param(float lo, float hi, float top, uint8_t *scale, uint8_t *min, float *inv,
                          float *base)
{
    const float l = lo < -REC_F16_MAX ? -REC_F16_MAX : lo > REC_F16_MAX ? REC_F16_MAX : lo;
    uint16_t    m = kvd_f32_to_f16(l), s;
    float       step;

    *base = kvd_f16_to_f32(m);
    step  = (hi - *base) / top;
    step  = step > 0.0f ? step : 0.0f; /* NaN too */
    s     = kvd_f32_to_f16(step < REC_F16_MAX ? step : REC_F16_MAX);
    step  = kvd_f16_to_f32(s);
    *inv  = step > 0.0f ? 1.0f / step : 0.0f;
    memcpy(scale, &s, sizeof(s));
    memcpy(min, &m, sizeof(m));
}

/* 0 .. top; what is no number is 0. */
REC_INLINE uint8_t rec_code(float x, float base, float inv, float top)
{
    const float v = (x - base) * inv + 0.5f;

    return (uint8_t)(v > 0.0f ? (v < top + 0.5f ? v : top) : 0.0f);
}

/* ---- packing ---------------------------------------------------------------------- */

REC_INLINE const uint8_t *rec_raw_row(const kvd_record_format *f, const uint8_t *lane, uint32_t t,
                                      bool v)
{
    const uint64_t row = kvd_record_raw_bytes(f) / (2ull * f->chunk_tokens);

    return lane + t / f->chunk_tokens * kvd_record_raw_bytes(f) +
           (t % f->chunk_tokens + (v ? f->chunk_tokens : 0)) * row;
}

/* A row of codes into its record. */
REC_INLINE void rec_put(const kvd_record_format *f, uint8_t *dst, uint32_t t, bool v,
                        const uint8_t *code)
{
    const uint32_t at  = t % f->chunk_tokens + (v ? f->chunk_tokens : 0);
    uint8_t       *rec = dst + t / f->chunk_tokens * kvd_record_bytes(f);

    if (f->type == KVD_RECORD_INT8) {
        memcpy(rec + (uint64_t)at * f->head_dim, code, f->head_dim);
        return;
    }
    for (uint32_t i = 0; i < f->head_dim / 2; i++)
        rec[(uint64_t)at * (f->head_dim / 2) + i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
}

REC_INLINE void rec_pack_k(const kvd_record_format *f, const uint8_t *src, uint32_t group,
                           uint8_t *param, uint8_t *dst, float top)
{
    const uint32_t d = f->head_dim, first = group * KVD_RECORD_GROUP;
    float          lo[KVD_HEAD_DIM_MAX], hi[KVD_HEAD_DIM_MAX], x[KVD_HEAD_DIM_MAX];
    float          inv[KVD_HEAD_DIM_MAX], base[KVD_HEAD_DIM_MAX];
    uint8_t        code[KVD_HEAD_DIM_MAX];

    rec_load(f, rec_raw_row(f, src, first, false), lo);
    memcpy(hi, lo, d * sizeof(float));
    for (uint32_t t = 1; t < KVD_RECORD_GROUP; t++) {
        rec_load(f, rec_raw_row(f, src, first + t, false), x);
        for (uint32_t i = 0; i < d; i++) {
            lo[i] = x[i] < lo[i] ? x[i] : lo[i];
            hi[i] = x[i] > hi[i] ? x[i] : hi[i];
        }
    }
    param += 4ull * group * d;
    for (uint32_t i = 0; i < d; i++)
        rec_param(lo[i], hi[i], top, param + 2 * i, param + 2 * (d + i), &inv[i], &base[i]);
    for (uint32_t t = 0; t < KVD_RECORD_GROUP; t++) {
        rec_load(f, rec_raw_row(f, src, first + t, false), x);
        for (uint32_t i = 0; i < d; i++)
            code[i] = rec_code(x[i], base[i], inv[i], top);
        rec_put(f, dst, first + t, false, code);
    }
}

REC_INLINE void rec_pack_v(const kvd_record_format *f, const uint8_t *src, uint32_t t,
                           uint8_t *param, uint8_t *dst, float top)
{
    float   x[KVD_HEAD_DIM_MAX], lo, hi, inv, base;
    uint8_t code[KVD_HEAD_DIM_MAX];

    rec_load(f, rec_raw_row(f, src, t, true), x);
    lo = hi = x[0];
    for (uint32_t i = 1; i < f->head_dim; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
    }
    rec_param(lo, hi, top, param + 2 * t, param + 2 * (f->block_tokens + t), &inv, &base);
    for (uint32_t i = 0; i < f->head_dim; i++)
        code[i] = rec_code(x[i], base, inv, top);
    rec_put(f, dst, t, true, code);
}

static void rec_pack(const kvd_record_format *f, const uint8_t *src, uint8_t *param, uint8_t *dst)
{
    const float    top     = f->type == KVD_RECORD_INT8 ? 255.0f : 15.0f;
    const uint32_t n_group = f->block_tokens / KVD_RECORD_GROUP;

    for (uint32_t g = 0; g < n_group; g++)
        rec_pack_k(f, src, g, param, dst, top);
    for (uint32_t t = 0; t < f->block_tokens; t++)
        rec_pack_v(f, src, t, param + 4ull * n_group * f->head_dim, dst, top);
}

/* ---- unpacking -------------------------------------------------------------------- */

REC_INLINE void rec_codes(const kvd_record_format *f, const uint8_t *rec, uint32_t at, float *out)
{
    const uint32_t d = f->head_dim;

    if (f->type == KVD_RECORD_INT8) {
        const uint8_t *p = rec + (uint64_t)at * d;

        for (uint32_t i = 0; i < d; i++)
            out[i] = (float)p[i];
        return;
    }
    for (uint32_t i = 0; i < d / 2; i++) {
        const uint8_t b = rec[(uint64_t)at * (d / 2) + i];

        out[2 * i]     = (float)(b & 15);
        out[2 * i + 1] = (float)(b >> 4);
    }
}

static void rec_unpack(const kvd_record_format *f, uint32_t chunk, const uint8_t *src,
                       const uint8_t *param, uint8_t *dst)
{
    const uint32_t d = f->head_dim, ct = f->chunk_tokens, first = chunk * ct;
    const uint8_t *pk  = param + 4ull * (first / KVD_RECORD_GROUP) * d;
    const uint8_t *pv  = param + 4ull * (f->block_tokens / KVD_RECORD_GROUP) * d;
    const uint64_t row = kvd_record_raw_bytes(f) / (2ull * ct);
    uint8_t        packed[2 * 16 * KVD_HEAD_DIM_MAX]; /* dst may lie over it */
    float          scale[KVD_HEAD_DIM_MAX], min[KVD_HEAD_DIM_MAX], x[KVD_HEAD_DIM_MAX];
    float          vs[16], vm[16];

    memcpy(packed, src, (size_t)kvd_record_bytes(f));
    rec_widen(pk, scale, d);
    rec_widen(pk + 2ull * d, min, d);
    for (uint32_t t = 0; t < ct; t++) {
        rec_codes(f, packed, t, x);
        for (uint32_t i = 0; i < d; i++)
            x[i] = x[i] * scale[i] + min[i];
        rec_store(f, x, dst + t * row);
    }
    rec_widen(pv + 2ull * first, vs, ct);
    rec_widen(pv + 2ull * (f->block_tokens + first), vm, ct);
    for (uint32_t t = 0; t < ct; t++) {
        rec_codes(f, packed, ct + t, x);
        for (uint32_t i = 0; i < d; i++)
            x[i] = x[i] * vs[t] + vm[t];
        rec_store(f, x, dst + (ct + t) * row);
    }
}

/* One key from the index: [dim_pad] floats. */
REC_INLINE void rec_key(const cpu_index_plane *p, const uint8_t *lane, uint32_t t,
                        const float *scale, const float *min, float *out)
{
    const uint32_t per_row = cpu_index_per_row(p), n_shift = 8 / p->bits;
    const uint32_t mask = (1u << p->bits) - 1u;
    const uint8_t *row =
        lane + p->code_off + t / CPU_INDEX_TILE * p->tile_bytes + 4ull * (t % CPU_INDEX_TILE);

    for (uint32_t c = 0; c < p->dim_pad; c += per_row, row += 64) {
        for (uint32_t s = 0; s < n_shift; s++) {
            for (uint32_t r = 0; r < 4; r++)
                out[c + 4 * s + r] = (float)((uint32_t)row[r] >> (p->bits * s) & mask);
        }
    }
    for (uint32_t i = 0; i < p->dim; i++)
        out[i] = out[i] * scale[i] + min[i];
}

REC_INLINE void rec_key_bf16(const cpu_index_plane *p, const uint8_t *lane, uint32_t t, float *out)
{
    const uint8_t *at = lane + p->code_off + t / CPU_INDEX_TILE * p->tile_bytes;

    for (uint32_t i = 0; i < p->dim; i++) {
        uint16_t h;

        memcpy(&h, at + 2ull * (i * CPU_INDEX_TILE + t % CPU_INDEX_TILE), sizeof(h));
        out[i] = kvd_bf16_to_f32(h);
    }
}

static void rec_unpack_values(const kvd_record_format *f, const cpu_index_shape *ix, uint32_t chunk,
                              const uint8_t *src, const uint8_t *index, uint8_t *dst)
{
    const cpu_index_plane *p  = &ix->key;
    const uint32_t         ct = f->chunk_tokens, first = chunk * ct;
    const uint64_t         row = kvd_record_raw_bytes(f) / (2ull * ct);
    const uint8_t *param = index + p->param_off + (uint64_t)(first / p->group) * 4 * p->dim_pad;
    float          scale[KVD_HEAD_DIM_MAX], min[KVD_HEAD_DIM_MAX], x[KVD_HEAD_DIM_MAX + 16];

    memmove(dst + ct * row, src, (size_t)kvd_record_bytes(f)); /* dst may begin at src or before */
    if (p->elem != KVD_INDEX_BF16) {
        rec_widen(param, scale, p->dim);
        rec_widen(param + 2ull * p->dim_pad, min, p->dim);
    }
    for (uint32_t t = 0; t < ct; t++) {
        if (p->elem == KVD_INDEX_BF16)
            rec_key_bf16(p, index, first + t, x);
        else
            rec_key(p, index, first + t, scale, min, x);
        rec_store(f, x, dst + t * row);
    }
}

#define CPU_RECORD_TABLE                                                           \
    {                                                                              \
        .pack = rec_pack, .unpack = rec_unpack, .unpack_values = rec_unpack_values \
    }

#endif
