/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_unpack_avx512bf16.c - weights and activations as bf16 for the bf16 levels of cpu_gemm.
 *
 * Quantised weights are transposed as bytes, four at a time, so that lanes are rows before they
 * become floats; scales are then plain vectors.  Rounding is to nearest even. */
#include "backend/cpu/cpu_gemm_kernel.h"
#include "backend/cpu/cpu_unpack.h"

#include <immintrin.h>

/* In each 16-byte lane, the 4 x 4 transpose of the words of v[0..3]. */
UNPACK_INLINE void transpose_lanes(__m512i v[4])
{
    const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]);
    const __m512i b = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]);
    const __m512i d = _mm512_unpackhi_epi32(v[2], v[3]);

    v[0] = _mm512_unpacklo_epi64(a, c);
    v[1] = _mm512_unpackhi_epi64(a, c);
    v[2] = _mm512_unpacklo_epi64(b, d);
    v[3] = _mm512_unpackhi_epi64(b, d);
}

/* 256 + the byte whose bits are under the mask, as float: the byte is put into the mantissa. */
UNPACK_INLINE __m512 float_of_byte(__m512i shifted)
{
    const __m512i mask = _mm512_set1_epi32(0x007f8000);
    const __m512i base = _mm512_set1_epi32(0x43800000); /* 256.0F */

    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(shifted, mask, base, 0xea));
}

/* even and odd elements of a pair, interleaved as bf16 */
UNPACK_INLINE __m512i join_pair(__m512 even, __m512 odd)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);

    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

UNPACK_INLINE void expand_bf16(const unpack_unit *u, const unpack_affine *a, void *panel)
{
    __m512i *out = panel;

    for (int h = 0; h < 2; h++) {
        const __m512 scale = _mm512_load_ps(a->scale[h]);
        const __m512 offset =
            _mm512_fnmadd_ps(_mm512_set1_ps(256.0F), scale, _mm512_load_ps(a->offset[h]));
        __m512i v[4];

        for (int i = 0; i < 4; i++)
            v[i] = _mm512_load_si512(u->q[h][i]);
        transpose_lanes(v);
        for (int i = 0; i < 4; i++) {
            const __m512 e0 = float_of_byte(_mm512_slli_epi32(v[i], 15));
            const __m512 o0 = float_of_byte(_mm512_slli_epi32(v[i], 7));
            const __m512 e1 = float_of_byte(_mm512_srli_epi32(v[i], 1));
            const __m512 o1 = float_of_byte(_mm512_srli_epi32(v[i], 9));

            _mm512_store_si512(out++, join_pair(_mm512_fmadd_ps(e0, scale, offset),
                                                _mm512_fmadd_ps(o0, scale, offset)));
            _mm512_store_si512(out++, join_pair(_mm512_fmadd_ps(e1, scale, offset),
                                                _mm512_fmadd_ps(o1, scale, offset)));
        }
    }
}

/* 16 rows of 32 bf16, stride bytes apart, into one step of a panel. */
UNPACK_INLINE void transpose_step(const uint8_t *row, uint64_t stride, void *panel)
{
    __m512i *out = panel;

    for (int c = 0; c < 4; c++) {
        __m512i v[4];

        for (uint32_t i = 0; i < 4; i++) {
            const uint8_t *p = row + i * stride + 16 * c;

            v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)p));
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i *)(p + 4 * stride)), 1);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i *)(p + 8 * stride)), 2);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i *)(p + 12 * stride)), 3);
        }
        transpose_lanes(v);
        for (int i = 0; i < 4; i++)
            _mm512_store_si512(out++, v[i]);
    }
}

/* The first n lanes of 16. */
UNPACK_INLINE __mmask16 first_lanes(uint32_t n)
{
    return (__mmask16)(0xffffU >> (n >= 16 ? 0 : 16 - n));
}

/* n floats (n >= 32: 32) as bf16, then zeros. */
UNPACK_INLINE __m512i bf16_of_f32(const float *src, uint32_t n)
{
    const __m512 lo = _mm512_maskz_loadu_ps(first_lanes(n), src);
    const __m512 hi = _mm512_maskz_loadu_ps(first_lanes(n > 16 ? n - 16 : 0), src + 16);

    return (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
}

static void unpack_floats(kvd_dtype type, const uint8_t *row, uint64_t row_bytes, uint32_t n_row,
                          uint32_t first, uint32_t n_k, uint8_t *panel)
{
    _Alignas(64) uint8_t step[CPU_UNPACK_ROWS][64];
    float                f[GEMM_STEP];

    memset(step, 0, sizeof(step));
    for (uint32_t k = 0; k < n_k; k += GEMM_STEP) {
        const uint32_t n = n_k - k < GEMM_STEP ? n_k - k : GEMM_STEP;

        if (type == KVD_DTYPE_BF16 && n == GEMM_STEP && n_row == CPU_UNPACK_ROWS) {
            transpose_step(row + 2 * (uint64_t)(first + k), row_bytes, panel);
        } else {
            for (uint32_t r = 0; r < n_row; r++) {
                unpack_float_row(type, row + r * row_bytes, first + k, n, f);
                _mm512_store_si512(step[r], bf16_of_f32(f, n));
            }
            transpose_step(step[0], sizeof(step[0]), panel);
        }
        panel += GEMM_STEP_BYTES;
    }
}

void cpu_unpack_bf16(kvd_dtype type, const uint8_t *row, uint64_t row_bytes, uint32_t n_row,
                     uint32_t first, uint32_t n_k, void *panel)
{
    switch (type) {
        UNPACK_QUANTISED_CASES(expand_bf16, row, row_bytes, n_row, first, n_k, panel,
                               GEMM_STEP_BYTES)
    case KVD_DTYPE_F32:
    case KVD_DTYPE_F16:
    case KVD_DTYPE_BF16:
        unpack_floats(type, row, row_bytes, n_row, first, n_k, panel);
        break;
    }
}

void cpu_pack_bf16(const float *x, uint64_t x_stride, uint32_t n_token, uint32_t n_k, void *packed)
{
    uint8_t *out = packed;

    for (uint32_t k = 0; k < n_k; k += GEMM_STEP) {
        for (uint32_t t = 0; t < n_token; t++, out += 64)
            _mm512_store_si512(out, bf16_of_f32(x + t * x_stride + k, n_k - k));
        for (uint32_t t = n_token; t < GEMM_TOKEN_TILE; t++, out += 64)
            _mm512_store_si512(out, _mm512_setzero_si512());
    }
}
