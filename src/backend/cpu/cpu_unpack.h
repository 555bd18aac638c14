/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_unpack.h - private to the panel kernels: taking stored blocks apart, 16 rows at a time.
 *
 * All quantised types are brought to one form, so that a level has one expander for all of them:
 *   value = scale * quant + offset,   quant 0..255, scale and offset per row and 16 elements.
 * A unit is 32 elements of 16 rows.  Its quants lie as the expanders want them: so that 64
 * contiguous bytes hold 16 elements of the rows i, i + 4, i + 8, i + 12, and transposing 4 x 4
 * words inside each 16-byte lane gives 16 rows in order.
 *
 * The functions here are inlined into files of different levels; they are plain C that compilers
 * vectorise, with intrinsics only where that fails. */
#ifndef KVD_CPU_UNPACK_H
#define KVD_CPU_UNPACK_H

#include "backend/backend.h"
#include "base/dtype_blocks.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define CPU_UNPACK_ROWS 16
#define CPU_UNPACK_UNIT 32
#define UNPACK_INLINE   static inline __attribute__((always_inline))

typedef struct unpack_unit {
    _Alignas(64) uint8_t q[2][4][4][16]; /* [half of 16 elements][row % 4][row / 4][element] */
} unpack_unit;

/* What 16 rows of one block say about its sub-blocks; a small block is one sub-block. */
typedef struct unpack_scales {
    _Alignas(64) float d[16], m[16]; /* the f16 fields */
    uint16_t d16[16], m16[16];
    int8_t   scale[16][16]; /* [sub-block][row] */
    uint8_t  min[16][16];
} unpack_scales;

/* scale and offset of the two halves of a unit, by row */
typedef struct unpack_affine {
    _Alignas(64) float scale[2][16], offset[2][16];
} unpack_affine;

/* ---- quants of one row and unit: 16 + 16 bytes ----------------------------------- */

/* 16 bytes; shifts go through 16-bit lanes, which every level has, and are masked after. */
typedef uint8_t  unpack_u8 __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t unpack_u16 __attribute__((vector_size(16), aligned(1), may_alias));

UNPACK_INLINE unpack_u8 quants_load(const uint8_t *p)
{
    return *(const unpack_u8 *)p;
}

UNPACK_INLINE void quants_store(uint8_t *p, unpack_u8 v)
{
    *(unpack_u8 *)p = v;
}

/* (v >> shift) & mask of each byte; the mask must clear what the shift brings in. */
UNPACK_INLINE unpack_u8 quants_field(unpack_u8 v, uint32_t shift, uint8_t mask)
{
    return (unpack_u8)((unpack_u16)v >> (uint16_t)shift) & mask;
}

UNPACK_INLINE void quants_nibbles(const uint8_t *qs, uint8_t *lo, uint8_t *hi)
{
    const unpack_u8 v = quants_load(qs);

    quants_store(lo, v & 15);
    quants_store(hi, quants_field(v, 4, 15));
}

/* Adds 16 to the elements whose bit is set in the little-endian word at bits. */
UNPACK_INLINE void quants_fifth_bit(const uint8_t *bits, uint8_t *lo, uint8_t *hi)
{
    const unpack_u8 select = { 1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128 };
    unpack_u8       word   = { 0 }, a, b;

    memcpy(&word, bits, 4);
    a = __builtin_shufflevector(word, word, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    b = __builtin_shufflevector(word, word, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    a = (unpack_u8)((a & select) == select) & 16;
    b = (unpack_u8)((b & select) == select) & 16;
    quants_store(lo, quants_load(lo) | a);
    quants_store(hi, quants_load(hi) | b);
}

UNPACK_INLINE void quants_q4_0(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    (void)unit;
    quants_nibbles(((const kvd_block_q4_0 *)block)->qs, lo, hi);
}

UNPACK_INLINE void quants_q4_1(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    (void)unit;
    quants_nibbles(((const kvd_block_q4_1 *)block)->qs, lo, hi);
}

UNPACK_INLINE void quants_q5_0(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    const kvd_block_q5_0 *b = block;

    (void)unit;
    quants_nibbles(b->qs, lo, hi);
    quants_fifth_bit(b->qh, lo, hi);
}

UNPACK_INLINE void quants_q5_1(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    const kvd_block_q5_1 *b = block;

    (void)unit;
    quants_nibbles(b->qs, lo, hi);
    quants_fifth_bit(b->qh, lo, hi);
}

UNPACK_INLINE void quants_q8_0(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    const kvd_block_q8_0 *b = block;

    (void)unit;
    quants_store(lo, quants_load((const uint8_t *)b->qs) ^ 0x80);
    quants_store(hi, quants_load((const uint8_t *)b->qs + 16) ^ 0x80);
}

/* Bits from shift on of 32 bytes. */
UNPACK_INLINE void quants_bits(const uint8_t *qs, uint32_t shift, uint8_t mask, uint8_t *lo,
                               uint8_t *hi)
{
    quants_store(lo, quants_field(quants_load(qs), shift, mask));
    quants_store(hi, quants_field(quants_load(qs + 16), shift, mask));
}

/* Further bits, as a multiple of 2^at. */
UNPACK_INLINE void quants_or_bits(const uint8_t *qs, uint32_t shift, uint8_t mask, int at,
                                  uint8_t *lo, uint8_t *hi)
{
    const unpack_u8 a = quants_field(quants_load(qs), shift, mask);
    const unpack_u8 b = quants_field(quants_load(qs + 16), shift, mask);

    quants_store(lo, quants_load(lo) | (unpack_u8)((unpack_u16)a << at));
    quants_store(hi, quants_load(hi) | (unpack_u8)((unpack_u16)b << at));
}

UNPACK_INLINE void quants_q4_k(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    const kvd_block_q4_k *b = block;

    quants_bits(b->qs + 32 * (unit / 2), 4 * (unit % 2), 15, lo, hi);
}

UNPACK_INLINE void quants_q5_k(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    const kvd_block_q5_k *b = block;

    quants_bits(b->qs + 32 * (unit / 2), 4 * (unit % 2), 15, lo, hi);
    quants_or_bits(b->qh, unit, 1, 4, lo, hi);
}

UNPACK_INLINE void quants_q6_k(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    const kvd_block_q6_k *b    = block;
    const uint32_t        half = unit / 4, j = unit % 4;

    quants_bits(b->ql + 64 * half + 32 * (j % 2), 4 * (j / 2), 15, lo, hi);
    quants_or_bits(b->qh + 32 * half, 2 * j, 3, 4, lo, hi);
}

UNPACK_INLINE void quants_q2_k(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    const kvd_block_q2_k *b = block;

    quants_bits(b->qs + 32 * (unit / 4), 2 * (unit % 4), 3, lo, hi);
}

UNPACK_INLINE void quants_q3_k(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi)
{
    const kvd_block_q3_k *b = block;

    quants_bits(b->qs + 32 * (unit / 4), 2 * (unit % 4), 3, lo, hi);
    quants_or_bits(b->hmask, unit, 1, 2, lo, hi);
}

/* ---- scales of one row and block ------------------------------------------------- */

/* The f16 fields are raw bits; NULL min: the type has none. */
UNPACK_INLINE void scales_f16(unpack_scales *s, uint32_t row, uint16_t d, uint16_t m)
{
    s->d16[row] = d;
    s->m16[row] = m;
}

UNPACK_INLINE void scales_q4_0(const void *block, uint32_t row, unpack_scales *s)
{
    scales_f16(s, row, ((const kvd_block_q4_0 *)block)->d, 0);
}

UNPACK_INLINE void scales_q4_1(const void *block, uint32_t row, unpack_scales *s)
{
    const kvd_block_q4_1 *b = block;

    scales_f16(s, row, b->d, b->m);
}

UNPACK_INLINE void scales_q5_0(const void *block, uint32_t row, unpack_scales *s)
{
    scales_f16(s, row, ((const kvd_block_q5_0 *)block)->d, 0);
}

UNPACK_INLINE void scales_q5_1(const void *block, uint32_t row, unpack_scales *s)
{
    const kvd_block_q5_1 *b = block;

    scales_f16(s, row, b->d, b->m);
}

UNPACK_INLINE void scales_q8_0(const void *block, uint32_t row, unpack_scales *s)
{
    scales_f16(s, row, ((const kvd_block_q8_0 *)block)->d, 0);
}

UNPACK_INLINE void scales_6bit_pairs(const uint8_t packed[12], uint32_t row, unpack_scales *s)
{
    uint8_t scale[8], min[8];

    kvd_q4_k_scales(packed, scale, min);
    for (int i = 0; i < 8; i++) {
        s->scale[2 * i][row] = s->scale[2 * i + 1][row] = (int8_t)scale[i];
        s->min[2 * i][row] = s->min[2 * i + 1][row] = min[i];
    }
}

UNPACK_INLINE void scales_q4_k(const void *block, uint32_t row, unpack_scales *s)
{
    const kvd_block_q4_k *b = block;

    scales_f16(s, row, b->d, b->dmin);
    scales_6bit_pairs(b->scales, row, s);
}

UNPACK_INLINE void scales_q5_k(const void *block, uint32_t row, unpack_scales *s)
{
    const kvd_block_q5_k *b = block;

    scales_f16(s, row, b->d, b->dmin);
    scales_6bit_pairs(b->scales, row, s);
}

UNPACK_INLINE void scales_q6_k(const void *block, uint32_t row, unpack_scales *s)
{
    const kvd_block_q6_k *b = block;

    scales_f16(s, row, b->d, 0);
    for (int i = 0; i < 16; i++)
        s->scale[i][row] = b->scales[i];
}

UNPACK_INLINE void scales_q2_k(const void *block, uint32_t row, unpack_scales *s)
{
    const kvd_block_q2_k *b = block;

    scales_f16(s, row, b->d, b->dmin);
    for (int i = 0; i < 16; i++) {
        s->scale[i][row] = (int8_t)(b->scales[i] & 15);
        s->min[i][row]   = b->scales[i] >> 4;
    }
}

UNPACK_INLINE void scales_q3_k(const void *block, uint32_t row, unpack_scales *s)
{
    const kvd_block_q3_k *b = block;
    uint8_t               scale[16];

    scales_f16(s, row, b->d, 0);
    kvd_q3_k_scales(b->scales, scale);
    for (int i = 0; i < 16; i++)
        s->scale[i][row] = (int8_t)(scale[i] - 32);
}

/* ---- 16 rows --------------------------------------------------------------------- */

typedef void (*unpack_quants_fn)(const void *block, uint32_t unit, uint8_t *lo, uint8_t *hi);
typedef void (*unpack_scales_fn)(const void *block, uint32_t row, unpack_scales *s);

/* How one type is read; a constant after inlining. */
typedef struct unpack_kind {
    unpack_quants_fn quants;
    unpack_scales_fn scales;
    uint32_t         block_bytes, n_unit; /* units in a block */
    bool             has_min;             /* offset from m; else it is -bias * scale */
    float            bias;
} unpack_kind;

#define UNPACK_KIND_Q4_0                                                 \
    {                                                                    \
        quants_q4_0, scales_q4_0, sizeof(kvd_block_q4_0), 1, false, 8.0F \
    }
#define UNPACK_KIND_Q4_1                                                \
    {                                                                   \
        quants_q4_1, scales_q4_1, sizeof(kvd_block_q4_1), 1, true, 0.0F \
    }
#define UNPACK_KIND_Q5_0                                                  \
    {                                                                     \
        quants_q5_0, scales_q5_0, sizeof(kvd_block_q5_0), 1, false, 16.0F \
    }
#define UNPACK_KIND_Q5_1                                                \
    {                                                                   \
        quants_q5_1, scales_q5_1, sizeof(kvd_block_q5_1), 1, true, 0.0F \
    }
#define UNPACK_KIND_Q8_0                                                   \
    {                                                                      \
        quants_q8_0, scales_q8_0, sizeof(kvd_block_q8_0), 1, false, 128.0F \
    }
#define UNPACK_KIND_Q2_K                                                \
    {                                                                   \
        quants_q2_k, scales_q2_k, sizeof(kvd_block_q2_k), 8, true, 0.0F \
    }
#define UNPACK_KIND_Q3_K                                                 \
    {                                                                    \
        quants_q3_k, scales_q3_k, sizeof(kvd_block_q3_k), 8, false, 4.0F \
    }
#define UNPACK_KIND_Q4_K                                                \
    {                                                                   \
        quants_q4_k, scales_q4_k, sizeof(kvd_block_q4_k), 8, true, 0.0F \
    }
#define UNPACK_KIND_Q5_K                                                \
    {                                                                   \
        quants_q5_k, scales_q5_k, sizeof(kvd_block_q5_k), 8, true, 0.0F \
    }
#define UNPACK_KIND_Q6_K                                                  \
    {                                                                     \
        quants_q6_k, scales_q6_k, sizeof(kvd_block_q6_k), 8, false, 32.0F \
    }

UNPACK_INLINE void unpack_f16x16(const uint16_t src[16], float dst[16])
{
#if defined(__F16C__)
    for (int i = 0; i < 16; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
#else
    for (int i = 0; i < 16; i++)
        dst[i] = kvd_f16_to_f32(src[i]);
#endif
}

/* Reads the scale bits of one block of n_row rows; missing rows stay zero. */
UNPACK_INLINE void unpack_scales_rows(const unpack_kind *k, const uint8_t *data, uint64_t row_bytes,
                                      uint32_t n_row, unpack_scales *s)
{
    for (uint32_t r = 0; r < n_row; r++)
        k->scales(data + r * row_bytes, r, s);
}

UNPACK_INLINE void unpack_quants_rows(const unpack_kind *k, const uint8_t *data, uint64_t row_bytes,
                                      uint32_t n_row, uint32_t unit, unpack_unit *u)
{
    for (uint32_t r = 0; r < n_row; r++)
        k->quants(data + r * row_bytes, unit, u->q[0][r % 4][r / 4], u->q[1][r % 4][r / 4]);
}

/* Scale and offset of unit number unit of the block. */
UNPACK_INLINE void unpack_affine_rows(const unpack_kind *k, const unpack_scales *s, uint32_t unit,
                                      unpack_affine *a)
{
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t sub = 2 * unit + h;

        for (int r = 0; r < CPU_UNPACK_ROWS; r++) {
            const float d = k->n_unit == 1 ? s->d[r] : s->d[r] * (float)s->scale[sub][r];

            a->scale[h][r] = d;
            if (!k->has_min)
                a->offset[h][r] = -k->bias * d;
            else
                a->offset[h][r] = k->n_unit == 1 ? s->m[r] : -s->m[r] * (float)s->min[sub][r];
        }
    }
}

/* Expands one unit into a panel at 32 elements of 16 rows. */
typedef void (*unpack_expand_fn)(const unpack_unit *u, const unpack_affine *a, void *panel);

/* Expands elements [first, first + n) of n_row rows (at most 16) at data, unit after unit.
 * first and n are multiples of the block length.  What is stored narrow and read wide is read one
 * unit later, when it has reached the cache (no store forwarding). */
UNPACK_INLINE void unpack_quantised(const unpack_kind *k, unpack_expand_fn expand,
                                    const uint8_t *data, uint64_t row_bytes, uint32_t n_row,
                                    uint32_t first, uint32_t n, uint8_t *panel, uint64_t unit_bytes)
{
    const uint32_t block_len = k->n_unit * CPU_UNPACK_UNIT;
    const uint32_t n_block   = n / block_len;
    unpack_unit    unit[2];
    unpack_scales  scales[2];
    unpack_affine  affine;

    memset(unit, 0, sizeof(unit));
    memset(scales, 0, sizeof(scales));
    data += (uint64_t)(first / block_len) * k->block_bytes;
    unpack_scales_rows(k, data, row_bytes, n_row, &scales[0]);
    unpack_quants_rows(k, data, row_bytes, n_row, 0, &unit[0]);
    for (uint32_t b = 0; b < n_block; b++, data += k->block_bytes) {
        const uint8_t *next = data + (b + 1 < n_block ? k->block_bytes : 0);
        unpack_scales *s    = &scales[b % 2];

        unpack_f16x16(s->d16, s->d);
        if (k->has_min)
            unpack_f16x16(s->m16, s->m);
        for (uint32_t j = 0; j < k->n_unit; j++) {
            const uint32_t at = b * k->n_unit + j;

            if (j + 1 < k->n_unit) {
                unpack_quants_rows(k, data, row_bytes, n_row, j + 1, &unit[(at + 1) % 2]);
            } else {
                unpack_scales_rows(k, next, row_bytes, n_row, &scales[(b + 1) % 2]);
                unpack_quants_rows(k, next, row_bytes, n_row, 0, &unit[(at + 1) % 2]);
            }
            unpack_affine_rows(k, s, j, &affine);
            expand(&unit[at % 2], &affine, panel);
            panel += unit_bytes;
        }
    }
}

/* Calls unpack_quantised with the kind of type as a constant. */
#define UNPACK_CASE(T, ...)                               \
    case KVD_DTYPE_##T: {                                 \
        const unpack_kind unpack_kind_ = UNPACK_KIND_##T; \
        unpack_quantised(&unpack_kind_, __VA_ARGS__);     \
        break;                                            \
    }
#define UNPACK_QUANTISED_CASES(...) \
    UNPACK_CASE(Q4_0, __VA_ARGS__)  \
    UNPACK_CASE(Q4_1, __VA_ARGS__)  \
    UNPACK_CASE(Q5_0, __VA_ARGS__)  \
    UNPACK_CASE(Q5_1, __VA_ARGS__)  \
    UNPACK_CASE(Q8_0, __VA_ARGS__)  \
    UNPACK_CASE(Q2_K, __VA_ARGS__)  \
    UNPACK_CASE(Q3_K, __VA_ARGS__)  \
    UNPACK_CASE(Q4_K, __VA_ARGS__)  \
    UNPACK_CASE(Q5_K, __VA_ARGS__)  \
    UNPACK_CASE(Q6_K, __VA_ARGS__)

UNPACK_INLINE void unpack_f16_row(const uint8_t *src, uint32_t n, float *dst)
{
    uint32_t i = 0;
    uint16_t h;

#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i,
                         _mm256_cvtph_ps(_mm_loadu_si128((const void *)(src + 2 * (size_t)i))));
#endif
    for (; i < n; i++) {
        memcpy(&h, src + 2 * (size_t)i, sizeof(h));
        dst[i] = kvd_f16_to_f32(h);
    }
}

/* Elements [first, first + n) of one row of a float type, as float. */
UNPACK_INLINE void unpack_float_row(kvd_dtype type, const uint8_t *row, uint32_t first, uint32_t n,
                                    float *dst)
{
    uint16_t h;

    if (type == KVD_DTYPE_F32) {
        memcpy(dst, row + 4 * (uint64_t)first, 4 * (size_t)n);
    } else if (type == KVD_DTYPE_F16) {
        unpack_f16_row(row + 2 * (uint64_t)first, n, dst);
    } else {
        for (uint32_t i = 0; i < n; i++) {
            memcpy(&h, row + 2 * ((uint64_t)first + i), sizeof(h));
            dst[i] = kvd_bf16_to_f32(h);
        }
    }
}

#endif
