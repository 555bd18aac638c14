/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_ints.cuh - activations as integers, for products with quantised weights.
 *
 * Of 16 bits with a scale per unit of 256 columns, as two planes of bytes: x = scale * (256 high +
 * low).  They are laid out as lanes take them (cuda_gemv_types.cuh): q[block of 32][token][lane of
 * 4]  high bytes of its eight columns, low bytes.  A warp makes those of a unit of a token. */
#ifndef KVD_CUDA_GEMV_INTS_CUH
#define KVD_CUDA_GEMV_INTS_CUH

#include "backend/cuda/cuda_gemv.cuh"

#define INTS_MAX (127 * 256) /* so that both bytes are signed ones */

/* The first of the lane's eight columns. */
static __device__ __forceinline__ uint32_t ints_col(uint32_t unit)
{
    return unit * GEMV_UNIT + threadIdx.x % 32 * 8;
}

/* Of a row of whole blocks of 32, so the eight are there or not; zeros where it is not.  wide: it
 * lies on 16 bytes. */
static __device__ __forceinline__ void ints_load(const float *row, bool wide, uint32_t n_col,
                                                 uint32_t unit, float v[8])
{
    const uint32_t e = ints_col(unit);
#pragma unroll
    for (uint32_t i = 0; i < 8; i += 4) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

        if (e < n_col)
            x = wide ? *(const float4 *)(row + e + i) : gemv_x(row, e + i, n_col);
        v[i]     = x.x;
        v[i + 1] = x.y;
        v[i + 2] = x.z;
        v[i + 3] = x.w;
    }
}

/* Part of a norm: sum of squares of a warp's unit. */
static __device__ __forceinline__ float ints_square(const float v[8])
{
    float sum = 0.0f;

#pragma unroll
    for (uint32_t k = 0; k < 8; k++)
        sum += v[k] * v[k];
    return cuda_warp_sum(sum);
}

/* What all columns are scaled by: part[unit], at most 32 of them. */
static __device__ __forceinline__ float ints_norm(const float *part, uint32_t n_unit,
                                                  uint32_t n_col, float eps)
{
    const uint32_t lane = threadIdx.x % 32;
    const float    sum  = cuda_warp_sum(lane < n_unit ? part[lane] : 0.0f);

    return rsqrtf(sum / (float)n_col + eps);
}

/* The unit's scale to *to; the lane's bytes are returned. */
static __device__ __forceinline__ uint4 ints_make(const float v[8], gemv_scale *to)
{
    const uint32_t lane    = threadIdx.x % 32;
    uint32_t       high[2] = {}, low[2] = {};
    int            sum = 0;
    float          max = 0.0f;

#pragma unroll
    for (uint32_t k = 0; k < 8; k++)
        max = fmaxf(max, fabsf(v[k]));
    max             = cuda_warp_max(max);
    const float inv = max > 0.0f ? INTS_MAX / max : 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < 8; k++) {
        const int i = __float2int_rn(v[k] * inv), h = (i + 128) >> 8, l = i - 256 * h;

        high[k / 4] |= (uint32_t)(h & 255) << (8 * (k % 4));
        low[k / 4] |= (uint32_t)(l & 255) << (8 * (k % 4));
        sum += i;
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane == 0)
        to->scale = max / INTS_MAX;
    if (lane % 4 == 0)
        to->sum[lane / 4] = sum;
    return make_uint4(high[0], high[1], low[0], low[1]);
}

#endif
