/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_avx2.c - dot products for the types of 32-element blocks: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0.
 *
 * Block by block, four rows together: their scales are converted and multiplied as one vector.
 * Quants are unsigned, w = d * q + m, but for Q8_0: its products of 255 * 127 would saturate the 16
 * bits of VPMADDUBSW, so signs move to the activations there (which never are -128).
 * See cpu_dot.h. */
#include "backend/cpu/cpu_dot_avx2.h"
#include "base/dtype_blocks.h"

typedef struct small_kind {
    uint32_t block_bytes;
    __m256i (*load)(const uint8_t *block);
    bool  is_signed, has_min;
    float bias; /* m = -bias * d if there is no min */
} small_kind;

/* ---- types ----------------------------------------------------------------------- */

DOT_INLINE __m256i load_nibbles(const uint8_t *qs)
{
    const __m128i v = dot_load16(qs);

    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
}

DOT_INLINE __m256i load_q4_0(const uint8_t *block)
{
    return load_nibbles(((const kvd_block_q4_0 *)(const void *)block)->qs);
}

DOT_INLINE __m256i load_q4_1(const uint8_t *block)
{
    return load_nibbles(((const kvd_block_q4_1 *)(const void *)block)->qs);
}

DOT_INLINE __m256i load_q5_0(const uint8_t *block)
{
    const kvd_block_q5_0 *b = (const void *)block;

    return _mm256_or_si256(load_nibbles(b->qs), dot_bits(b->qh, 16));
}

DOT_INLINE __m256i load_q5_1(const uint8_t *block)
{
    const kvd_block_q5_1 *b = (const void *)block;

    return _mm256_or_si256(load_nibbles(b->qs), dot_bits(b->qh, 16));
}

DOT_INLINE __m256i load_q8_0(const uint8_t *block)
{
    return dot_load32(((const kvd_block_q8_0 *)(const void *)block)->qs);
}

/* ---- the kernel ------------------------------------------------------------------ */

typedef struct small_acc {
    __m256 dot[CPU_DOT_TOKENS][CPU_DOT_ROWS];
    __m128 min[CPU_DOT_TOKENS]; /* by row */
} small_acc;

/* d and m of four rows; m is meaningless where the type has none. */
DOT_INLINE void load_heads(const dot_tile *tile, uint64_t off, __m128 *d, __m128 *m)
{
    const __m128i pick = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m128i heads =
        _mm_setr_epi32(dot_load4(tile->row[0] + off), dot_load4(tile->row[1] + off),
                       dot_load4(tile->row[2] + off), dot_load4(tile->row[3] + off));
    const __m256 v = _mm256_cvtph_ps(_mm_shuffle_epi8(heads, pick));

    *d = _mm256_castps256_ps128(v);
    *m = _mm256_extractf128_ps(v, 1);
}

DOT_INLINE __m256i small_products(const small_kind *k, __m256i q, const int8_t *x)
{
    const __m256i xq  = dot_load32(x);
    const __m256i p16 = k->is_signed
                            ? _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(xq, q))
                            : _mm256_maddubs_epi16(q, xq);

    return _mm256_madd_epi16(p16, _mm256_set1_epi16(1));
}

/* All rows and tokens of a tile meet block number b. */
DOT_INLINE void small_block(const small_kind *k, const dot_tile *tile, uint64_t off, uint32_t b,
                            uint32_t n_token, small_acc *acc)
{
    __m256 scale[CPU_DOT_TOKENS]; /* rows 0 .. 3, twice */
    __m128 d, m;

    load_heads(tile, off, &d, &m);
    if (!k->has_min)
        m = _mm_mul_ps(d, _mm_set1_ps(-k->bias));
    for (uint32_t t = 0; t < n_token; t++) {
        const cpu_xgroup *x = tile->x[t] + b / 8;
        const __m128      s = _mm_mul_ps(d, _mm_set1_ps(x->d[b % 8]));

        scale[t] = _mm256_set_m128(s, s);
        if (!k->is_signed)
            acc->min[t] = _mm_fmadd_ps(m, _mm_set1_ps(x->sum[b % 8]), acc->min[t]);
    }
    DOT_UNROLL
    for (uint32_t r = 0; r < CPU_DOT_ROWS; r++) {
        const __m256i q = k->load(tile->row[r] + off);

        for (uint32_t t = 0; t < n_token; t++) {
            const cpu_xgroup *x  = tile->x[t] + b / 8;
            const __m256i     hi = small_products(k, q, x->q + 32 * (b % 8));
            const __m256i     lo = small_products(k, q, x->q_lo + 32 * (b % 8));
            const __m256      s  = r == 0   ? _mm256_permute_ps(scale[t], 0x00)
                                   : r == 1 ? _mm256_permute_ps(scale[t], 0x55)
                                   : r == 2 ? _mm256_permute_ps(scale[t], 0xaa)
                                            : _mm256_permute_ps(scale[t], 0xff);

            acc->dot[t][r] = _mm256_fmadd_ps(dot_pairs(hi, lo), s, acc->dot[t][r]);
        }
    }
}

DOT_INLINE void small_tile(const small_kind *k, const cpu_dot_job *job, const dot_tile *tile,
                           uint32_t n_token, float (*sum)[CPU_DOT_ROWS])
{
    uint64_t  off = 0;
    small_acc acc;

    for (uint32_t t = 0; t < n_token; t++) {
        acc.min[t] = _mm_setzero_ps();
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++)
            acc.dot[t][r] = _mm256_setzero_ps();
    }
    for (uint32_t b = 0; b < job->n_col / 32; b++, off += k->block_bytes) {
        dot_fetch(tile, CPU_DOT_ROWS * off, CPU_DOT_ROWS * k->block_bytes);
        small_block(k, tile, off, b, n_token, &acc);
    }
    for (uint32_t t = 0; t < n_token; t++)
        _mm_storeu_ps(sum[t], _mm_add_ps(dot_fold_rows(acc.dot[t]), acc.min[t]));
}

#define SMALL_KERNEL(type, ...)                                                                   \
    static const small_kind kind_##type = { sizeof(kvd_block_##type), load_##type, __VA_ARGS__ }; \
    static DOT_KERNEL(dot_##type, small_tile, &kind_##type, 2)

SMALL_KERNEL(q4_0, false, false, 8.0F)
SMALL_KERNEL(q4_1, false, true, 0.0F)
SMALL_KERNEL(q5_0, false, false, 16.0F)
SMALL_KERNEL(q5_1, false, true, 0.0F)
SMALL_KERNEL(q8_0, true, false, 0.0F)

const cpu_dot_level cpu_dot_avx2 = {
    .quantize = cpu_quantize_avx2,
    .quant = {
        [KVD_DTYPE_Q4_0] = dot_q4_0,
        [KVD_DTYPE_Q4_1] = dot_q4_1,
        [KVD_DTYPE_Q5_0] = dot_q5_0,
        [KVD_DTYPE_Q5_1] = dot_q5_1,
        [KVD_DTYPE_Q8_0] = dot_q8_0,
        [KVD_DTYPE_Q2_K] = cpu_dot_q2_k_avx2,
        [KVD_DTYPE_Q3_K] = cpu_dot_q3_k_avx2,
        [KVD_DTYPE_Q4_K] = cpu_dot_q4_k_avx2,
        [KVD_DTYPE_Q5_K] = cpu_dot_q5_k_avx2,
        [KVD_DTYPE_Q6_K] = cpu_dot_q6_k_avx2,
    },
    .flt = cpu_dot_flt_avx2,
};
