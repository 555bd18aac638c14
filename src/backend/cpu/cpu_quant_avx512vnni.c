/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_quant_avx512vnni.c - activations to groups of two int8 each.  See cpu_dot.h.
 *
 * Blocks of 32 with scale absmax / 32512 (127 * 256), rounded to nearest.  A block whose absmax is
 * below TINY becomes zero, so that no reciprocal overflows; one with a NaN gets the scale NaN. */
#include <immintrin.h>

#include "backend/cpu/cpu_dot_avx512vnni.h"

#define TINY 1e-30F

/* The largest lane of each of eight vectors. */
DOT_INLINE __m256i max_of_each(const __m256i v[8])
{
    __m256i a[4], b[2];

    for (int i = 0; i < 4; i++)
        a[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                                _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        b[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(a[2 * i], a[2 * i + 1]),
                                _mm256_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    return _mm256_max_epi32(_mm256_permute2x128_si256(b[0], b[1], 0x20),
                            _mm256_permute2x128_si256(b[0], b[1], 0x31));
}

/* Absmax of eight blocks: as integers, whose order is that of magnitudes, with NaN above all. */
DOT_INLINE __m256 block_maxima(const float *x)
{
    __m256i m[8];

    for (int b = 0; b < 8; b++) {
        const __m512i v =
            _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(x + 32 * b))),
                             _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(x + 32 * b + 16))));

        m[b] = _mm256_max_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    }
    return _mm256_castsi256_ps(max_of_each(m));
}

DOT_INLINE __m512i round_16(const float *x, __m512 inv)
{
    const __m512i low = _mm512_set1_epi32(-CPU_XQUANT_MAX); /* what NaN becomes */

    return _mm512_max_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inv)), low);
}

/* 64 integers in four vectors to bytes in order of vectors: one lane per vector. */
DOT_INLINE __m512i pack_lanes(const __m512i v[4])
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);

    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]),
                                                              _mm512_packs_epi32(v[2], v[3])));
}

/* 16 elements of each of four blocks as two bytes each: one lane per block. */
typedef struct halves {
    __m512i hi, lo;
} halves;

DOT_INLINE halves round_lanes(const float *x, const __m512 inv[4])
{
    __m512i hi[4], lo[4];

    for (int b = 0; b < 4; b++) {
        const __m512i q = round_16(x + 32 * b, inv[b]);

        hi[b] = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
        lo[b] = _mm512_sub_epi32(q, _mm512_slli_epi32(hi[b], 8));
    }
    return (halves){ pack_lanes(hi), pack_lanes(lo) };
}

/* The first and last 16 elements of four blocks, as halves of blocks and in order. */
DOT_INLINE void store_orders(int8_t *split, int8_t *q, __m512i first, __m512i last)
{
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i odd  = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);

    _mm512_store_si512(split, first);
    _mm512_store_si512(split + 64, last);
    _mm512_store_si512(q, _mm512_permutex2var_epi64(first, even, last));
    _mm512_store_si512(q + 64, _mm512_permutex2var_epi64(first, odd, last));
}

/* Sums of four elements. */
DOT_INLINE __m512i sum_fours(halves v)
{
    const __m512i ones = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();

    return _mm512_add_epi32(_mm512_slli_epi32(_mm512_dpbusd_epi32(zero, ones, v.hi), 8),
                            _mm512_dpbusd_epi32(zero, ones, v.lo));
}

/* Blocks 4 * part .. 4 * part + 3: both orders of quants; sums of four of them at a time. */
DOT_INLINE void quantize_part(const float *x, __m256 inv8, int part, cpu_xgroup *g, __m512i sum[2])
{
    __m512 inv[4];
    halves first, last;

    for (int b = 0; b < 4; b++)
        inv[b] =
            _mm512_permutexvar_ps(_mm512_set1_epi32(4 * part + b), _mm512_castps256_ps512(inv8));
    first = round_lanes(x, inv);
    last  = round_lanes(x + 16, inv);
    store_orders(g->split + 128 * part, g->q + 128 * part, first.hi, last.hi);
    store_orders(g->split_lo + 128 * part, g->q_lo + 128 * part, first.lo, last.lo);
    sum[0] = sum_fours(first);
    sum[1] = sum_fours(last);
}

/* From the sums of four vectors, a lane per block: the sums of 16 elements, in order. */
DOT_INLINE __m512i half_sums(const __m512i s[4])
{
    const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m512i a =
        _mm512_add_epi32(_mm512_unpacklo_epi32(s[0], s[1]), _mm512_unpackhi_epi32(s[0], s[1]));
    const __m512i b =
        _mm512_add_epi32(_mm512_unpacklo_epi32(s[2], s[3]), _mm512_unpackhi_epi32(s[2], s[3]));

    return _mm512_permutexvar_epi32(order, _mm512_add_epi32(_mm512_unpacklo_epi64(a, b),
                                                            _mm512_unpackhi_epi64(a, b)));
}

static void quantize_group(const float *x, cpu_xgroup *g)
{
    const __m512i  twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i  evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    const __m256   amax = block_maxima(x), top = _mm256_set1_ps((float)CPU_XQUANT_MAX);
    const __mmask8 zero = _mm256_cmp_ps_mask(amax, _mm256_set1_ps(TINY), _CMP_LE_OQ);
    const __m256   d    = _mm256_maskz_div_ps((__mmask8)~zero, amax, top);
    const __m256   inv  = _mm256_maskz_div_ps((__mmask8)~zero, top, amax);
    __m512i        sum[4], half, both;

    quantize_part(x, inv, 0, g, sum);
    quantize_part(x + 128, inv, 1, g, sum + 2);
    half = half_sums(sum);
    both = _mm512_add_epi32(half, _mm512_shuffle_epi32(half, 0xb1));
    both = _mm512_permutexvar_epi32(evens, both);
    _mm256_store_ps(g->d, d);
    _mm256_store_ps(g->sum, _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm512_castsi512_si256(both))));
    _mm512_store_ps(g->half, _mm512_mul_ps(_mm512_permutexvar_ps(twice, _mm512_castps256_ps512(d)),
                                           _mm512_cvtepi32_ps(half)));
}

void cpu_quantize_avx512vnni(const float *x, uint32_t n_col, cpu_xgroup *out)
{
    const uint32_t rest = n_col % CPU_XGROUP;

    for (uint32_t i = 0; i < n_col / CPU_XGROUP; i++)
        quantize_group(x + (uint64_t)CPU_XGROUP * i, out + i);
    if (rest) {
        float last[CPU_XGROUP] = { 0 };

        memcpy(last, x + (n_col - rest), rest * sizeof(float));
        quantize_group(last, out + n_col / CPU_XGROUP);
    }
}
