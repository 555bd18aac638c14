/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_avx512vnni.c - dot products for the types of 32-element blocks: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0.
 *
 * Work goes by units of four blocks (128 elements) of four rows.  All types are brought to unsigned
 * quants, w = d * q + m, so that one VPDPBUSD form serves them: y = sum d * dx * (q . xq) + m * sx.
 * The quants of a unit are two vectors, first halves and last halves of the four blocks: lane b
 * (of 128 bits) of both belongs to block b, so both add up in one integer vector and meet one
 * vector of scales.  The scales of four rows are converted and multiplied together: lane b,
 * element r of scale vectors is block b of row r.
 *
 * A unit at the end of a row that has fewer blocks reads its last block again in their place, or
 * zeros; activations are zero there.  See cpu_dot.h. */
#include <immintrin.h>

#include "backend/cpu/cpu_dot_avx512vnni.h"
#include "base/dtype_blocks.h"

#define UNIT_BLOCKS 4

typedef struct quants {
    __m512i lo, hi;
} quants;

/* What a type is, a constant after inlining. */
typedef struct small_kind {
    uint32_t block_bytes;
    quants (*load)(const uint8_t *unit, uint32_t last);
    /* f16 pairs (d, m or anything) of two rows: [block][row] */
    __m256i (*heads)(const uint8_t *unit0, const uint8_t *unit1, uint32_t last);
    bool  has_min;
    float bias; /* m = -bias * d if there is no min */
} small_kind;

/* ---- loads ----------------------------------------------------------------------- */

/* last: number of the last block that exists, a constant 3 except at the end of a row. */
DOT_INLINE const uint8_t *block_at(const uint8_t *unit, uint32_t b, uint32_t last, uint32_t bytes)
{
    return unit + (b < last ? b : last) * bytes;
}

/* 16 bytes at the same place of four blocks, one lane each. */
DOT_INLINE __m512i load_lanes(const uint8_t *unit, uint32_t last, uint32_t bytes, uint32_t at)
{
    __m512i v = _mm512_castsi128_si512(dot_load16(block_at(unit, 0, last, bytes) + at));

    v = _mm512_inserti32x4(v, dot_load16(block_at(unit, 1, last, bytes) + at), 1);
    v = _mm512_inserti32x4(v, dot_load16(block_at(unit, 2, last, bytes) + at), 2);
    return _mm512_inserti32x4(v, dot_load16(block_at(unit, 3, last, bytes) + at), 3);
}

DOT_INLINE quants split_nibbles(__m512i v)
{
    const __m512i mask = _mm512_set1_epi8(15);

    return (quants){ _mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi16(v, 4), mask) };
}

/* Word at each block's start, of two rows. */
DOT_INLINE __m256i heads_by_word(const uint8_t *unit0, const uint8_t *unit1, uint32_t last,
                                 uint32_t bytes)
{
    __m256i h = _mm256_set1_epi32(dot_load4(block_at(unit0, 0, last, bytes)));

    h = _mm256_mask_set1_epi32(h, 1 << 1, dot_load4(block_at(unit1, 0, last, bytes)));
    h = _mm256_mask_set1_epi32(h, 1 << 2, dot_load4(block_at(unit0, 1, last, bytes)));
    h = _mm256_mask_set1_epi32(h, 1 << 3, dot_load4(block_at(unit1, 1, last, bytes)));
    h = _mm256_mask_set1_epi32(h, 1 << 4, dot_load4(block_at(unit0, 2, last, bytes)));
    h = _mm256_mask_set1_epi32(h, 1 << 5, dot_load4(block_at(unit1, 2, last, bytes)));
    h = _mm256_mask_set1_epi32(h, 1 << 6, dot_load4(block_at(unit0, 3, last, bytes)));
    return _mm256_mask_set1_epi32(h, 1 << 7, dot_load4(block_at(unit1, 3, last, bytes)));
}

/* The same from vectors that hold a block's start in its lane. */
DOT_INLINE __m256i heads_from_lanes(__m512i a, __m512i b)
{
    const __m512i pick = _mm512_castsi256_si512(_mm256_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28));

    return _mm512_castsi512_si256(_mm512_permutex2var_epi32(a, pick, b));
}

/* ---- types ----------------------------------------------------------------------- */

DOT_INLINE quants load_q4_0(const uint8_t *unit, uint32_t last)
{
    return split_nibbles(load_lanes(unit, last, sizeof(kvd_block_q4_0), 2));
}

DOT_INLINE __m256i heads_q4_0(const uint8_t *unit0, const uint8_t *unit1, uint32_t last)
{
    return heads_by_word(unit0, unit1, last, sizeof(kvd_block_q4_0));
}

/* Blocks of Q4_1 are five words: a whole unit comes in two loads and one permutation. */
DOT_INLINE __m512i load_q4_1_words(const uint8_t *unit, uint32_t first, uint32_t last)
{
    const uint32_t n_word = 5 * (last + 1) - first;

    return n_word >= 16
               ? _mm512_loadu_si512(unit + 4 * first)
               : _mm512_maskz_loadu_epi32((__mmask16)((1U << n_word) - 1), unit + 4 * first);
}

DOT_INLINE quants load_q4_1(const uint8_t *unit, uint32_t last)
{
    const __m512i pick = _mm512_setr_epi32(1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 28, 29, 30, 31);

    return split_nibbles(_mm512_permutex2var_epi32(load_q4_1_words(unit, 0, last), pick,
                                                   load_q4_1_words(unit, 4, last)));
}

DOT_INLINE __m256i heads_q4_1(const uint8_t *unit0, const uint8_t *unit1, uint32_t last)
{
    const __m512i pick = _mm512_castsi256_si512(_mm256_setr_epi32(0, 16, 5, 21, 10, 26, 15, 31));

    return _mm512_castsi512_si256(_mm512_permutex2var_epi32(load_q4_1_words(unit0, 0, last), pick,
                                                            load_q4_1_words(unit1, 0, last)));
}

/* Adds the fifth bits, which lie in four bytes at place at of each lane of head. */
DOT_INLINE quants add_fifth_bits(quants q, __m512i head, int at)
{
    const __m512i bit    = _mm512_set1_epi64((int64_t)0x8040201008040201);
    const __m512i step   = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 0x01010101, 0x01010101));
    const __m512i spread = _mm512_add_epi8(step, _mm512_set1_epi8((char)at));
    const __m512i s_hi   = _mm512_add_epi8(step, _mm512_set1_epi8((char)(at + 2)));
    const __m512i b16    = _mm512_set1_epi8(16);

    q.lo = _mm512_mask_add_epi8(q.lo, _mm512_test_epi8_mask(_mm512_shuffle_epi8(head, spread), bit),
                                q.lo, b16);
    q.hi = _mm512_mask_add_epi8(q.hi, _mm512_test_epi8_mask(_mm512_shuffle_epi8(head, s_hi), bit),
                                q.hi, b16);
    return q;
}

DOT_INLINE quants load_q5_0(const uint8_t *unit, uint32_t last)
{
    const uint32_t bytes = sizeof(kvd_block_q5_0);

    return add_fifth_bits(split_nibbles(load_lanes(unit, last, bytes, 6)),
                          load_lanes(unit, last, bytes, 0), 2);
}

DOT_INLINE __m256i heads_q5_0(const uint8_t *unit0, const uint8_t *unit1, uint32_t last)
{
    return heads_from_lanes(load_lanes(unit0, last, sizeof(kvd_block_q5_0), 0),
                            load_lanes(unit1, last, sizeof(kvd_block_q5_0), 0));
}

DOT_INLINE quants load_q5_1(const uint8_t *unit, uint32_t last)
{
    const uint32_t bytes = sizeof(kvd_block_q5_1);

    return add_fifth_bits(split_nibbles(load_lanes(unit, last, bytes, 8)),
                          load_lanes(unit, last, bytes, 0), 4);
}

DOT_INLINE __m256i heads_q5_1(const uint8_t *unit0, const uint8_t *unit1, uint32_t last)
{
    return heads_from_lanes(load_lanes(unit0, last, sizeof(kvd_block_q5_1), 0),
                            load_lanes(unit1, last, sizeof(kvd_block_q5_1), 0));
}

DOT_INLINE quants load_q8_0(const uint8_t *unit, uint32_t last)
{
    const uint32_t bytes = sizeof(kvd_block_q8_0);
    const __m512i  flip  = _mm512_set1_epi8((char)0x80);

    return (quants){ _mm512_xor_si512(load_lanes(unit, last, bytes, 2), flip),
                     _mm512_xor_si512(load_lanes(unit, last, bytes, 18), flip) };
}

DOT_INLINE __m256i heads_q8_0(const uint8_t *unit0, const uint8_t *unit1, uint32_t last)
{
    return heads_by_word(unit0, unit1, last, sizeof(kvd_block_q8_0));
}

/* ---- the kernel ------------------------------------------------------------------ */

/* Two vectors of quants meet 128 activations' bytes. */
DOT_INLINE __m512i dot_products(__m512i q0, __m512i q1, const int8_t *x)
{
    const __m512i v = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q0, _mm512_load_si512(x));

    return _mm512_dpbusd_epi32(v, q1, _mm512_load_si512(x + 64));
}

typedef struct small_acc {
    __m512 dot[CPU_DOT_TOKENS][CPU_DOT_ROWS];
    __m512 min[CPU_DOT_TOKENS]; /* [block][row] */
} small_acc;

/* Four floats, each through a lane. */
DOT_INLINE __m512 spread_lanes(const float *p)
{
    const __m512i idx = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);

    return _mm512_permutexvar_ps(idx, _mm512_castps128_ps512(_mm_loadu_ps(p)));
}

/* All rows and tokens of a tile meet one unit at byte offset off; half: which of x's group. */
DOT_INLINE void small_unit(const small_kind *k, const dot_tile *tile, uint64_t off, uint32_t last,
                           uint64_t group, uint32_t half, uint32_t n_token, small_acc *acc)
{
    const __m512 h01 = _mm512_cvtph_ps(k->heads(tile->row[0] + off, tile->row[1] + off, last));
    const __m512 h23 = _mm512_cvtph_ps(k->heads(tile->row[2] + off, tile->row[3] + off, last));
    const __m512 d   = _mm512_shuffle_ps(h01, h23, 0x88);
    const __m512 m =
        k->has_min ? _mm512_shuffle_ps(h01, h23, 0xdd) : _mm512_mul_ps(d, _mm512_set1_ps(-k->bias));
    __m512 scale[CPU_DOT_TOKENS];

    for (uint32_t t = 0; t < n_token; t++) {
        const cpu_xgroup *x = tile->x[t] + group;

        scale[t]    = _mm512_mul_ps(d, spread_lanes(x->d + 4 * half));
        acc->min[t] = _mm512_fmadd_ps(m, spread_lanes(x->sum + 4 * half), acc->min[t]);
    }
    DOT_UNROLL
    for (uint32_t r = 0; r < CPU_DOT_ROWS; r++) {
        const quants q = k->load(tile->row[r] + off, last);

        for (uint32_t t = 0; t < n_token; t++) {
            const int8_t *hi = (tile->x[t] + group)->split + 128 * half;
            const int8_t *lo = (tile->x[t] + group)->split_lo + 128 * half;
            const __m512i dot =
                dot_pairs(dot_products(q.lo, q.hi, hi), dot_products(q.lo, q.hi, lo));
            const __m512 s = r == 0   ? _mm512_permute_ps(scale[t], 0x00)
                             : r == 1 ? _mm512_permute_ps(scale[t], 0x55)
                             : r == 2 ? _mm512_permute_ps(scale[t], 0xaa)
                                      : _mm512_permute_ps(scale[t], 0xff);

            acc->dot[t][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), s, acc->dot[t][r]);
        }
    }
}

DOT_INLINE void small_tile(const small_kind *k, const cpu_dot_job *job, const dot_tile *tile,
                           uint32_t n_token, float (*sum)[CPU_DOT_ROWS])
{
    const uint32_t n_block    = job->n_col / 32;
    const uint32_t unit_bytes = UNIT_BLOCKS * k->block_bytes;
    uint64_t       off        = 0;
    uint32_t       u          = 0;
    small_acc      acc;

    for (uint32_t t = 0; t < n_token; t++) {
        acc.min[t] = _mm512_setzero_ps();
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++)
            acc.dot[t][r] = _mm512_setzero_ps();
    }
    for (; u < n_block / UNIT_BLOCKS; u++, off += unit_bytes) {
        dot_fetch(tile, CPU_DOT_ROWS * off, CPU_DOT_ROWS * unit_bytes);
        small_unit(k, tile, off, UNIT_BLOCKS - 1, u / 2, u % 2, n_token, &acc);
    }
    if (n_block % UNIT_BLOCKS)
        small_unit(k, tile, off, n_block % UNIT_BLOCKS - 1, u / 2, u % 2, n_token, &acc);
    for (uint32_t t = 0; t < n_token; t++)
        _mm_storeu_ps(sum[t], dot_sum_lanes(_mm512_add_ps(dot_fold_rows(acc.dot[t]), acc.min[t])));
}

#define SMALL_KERNEL(type, ...)                                                                  \
    static const small_kind kind_##type = { sizeof(kvd_block_##type), load_##type, heads_##type, \
                                            __VA_ARGS__ };                                       \
    static DOT_KERNEL(dot_##type, small_tile, &kind_##type, 4)

SMALL_KERNEL(q4_0, false, 8.0F)
SMALL_KERNEL(q4_1, true, 0.0F)
SMALL_KERNEL(q5_0, false, 16.0F)
SMALL_KERNEL(q5_1, true, 0.0F)
SMALL_KERNEL(q8_0, false, 128.0F)

const cpu_dot_level cpu_dot_avx512vnni = {
    .quantize = cpu_quantize_avx512vnni,
    .quant = {
        [KVD_DTYPE_Q4_0] = dot_q4_0,
        [KVD_DTYPE_Q4_1] = dot_q4_1,
        [KVD_DTYPE_Q5_0] = dot_q5_0,
        [KVD_DTYPE_Q5_1] = dot_q5_1,
        [KVD_DTYPE_Q8_0] = dot_q8_0,
        [KVD_DTYPE_Q2_K] = cpu_dot_q2_k_avx512vnni,
        [KVD_DTYPE_Q3_K] = cpu_dot_q3_k_avx512vnni,
        [KVD_DTYPE_Q4_K] = cpu_dot_q4_k_avx512vnni,
        [KVD_DTYPE_Q5_K] = cpu_dot_q5_k_avx512vnni,
        [KVD_DTYPE_Q6_K] = cpu_dot_q6_k_avx512vnni,
    },
    .flt = cpu_dot_flt_avx512vnni,
};
