/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_once.cuh - one token by unquantised weights.
 *
 * As many warps share a row as it takes for each to load its part at once, before the wait for the
 * kernel ahead.  Blocks are small and short, so there is always one that loads. */
#ifndef KVD_CUDA_GEMV_ONCE_CUH
#define KVD_CUDA_GEMV_ONCE_CUH

#include "backend/cuda/cuda_gemv_mma.cuh"

/* Weights of one load and their activations; a load past the row's end gave zeros. */
template <kvd_dtype T, uint32_t E>
static __device__ __forceinline__ float once_dot(const uint4 &w, const float *x, float sum)
{
    float v[E];

    mma_x<E>(x, v);
#pragma unroll
    for (uint32_t j = 0; j < E / 2; j++) {
        uint32_t first, second;
        mma_weights<T>(w, j, &first, &second);
        sum = fmaf(__uint_as_float(first), v[2 * j], sum);
        sum = fmaf(__uint_as_float(second), v[2 * j + 1], sum);
    }
    return sum;
}

/* Total of a warp's S with the same row, or with swiglu both rows of one, to the outputs. */
template <uint32_t S>
static __device__ __forceinline__ void once_finish(const gemv_args &a, float s)
{
    constexpr uint32_t ROWS = GEMV_WARPS / S;
    __shared__ float   part[GEMV_WARPS];
    const uint32_t     i = threadIdx.x;

    if (i % 32 == 0)
        part[i / 32] = s;
    __syncthreads();
    if (i >= (a.swiglu ? ROWS / 2 : ROWS))
        return;
    float total = 0.0f, up = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < S; k++) {
        total += part[i * S + k];
        up += part[(i + ROWS / 2) % ROWS * S + k];
    }
    const uint32_t row = blockIdx.x * (a.swiglu ? ROWS / 2 : ROWS) + i;
    if (!a.swiglu && row < a.n_row)
        gemv_put(a, row, 0, total, gemv_before(a, row, 0));
    else if (a.swiglu && row < a.n_row / 2)
        gemv_put_swiglu(a, row, 0, total, up);
}

/* S warps a row; LOADS of 16 bytes by a lane at once. */
template <kvd_dtype T, uint32_t S, uint32_t LOADS>
static __global__ void __launch_bounds__(GEMV_THREADS)
    once_kernel(const __grid_constant__ gemv_args a)
{
    constexpr uint32_t E = T == KVD_DTYPE_F32 ? 4 : 8, SIZE = 16 / E, STEP = 32 * E * S;
    const uint32_t     warp  = threadIdx.x / 32;
    const uint32_t     begin = (warp % S * 32 + threadIdx.x % 32) * E;
    const uint8_t     *row   = gemv_row(a, gemv_block_row<GEMV_WARPS / S>(a, blockIdx.x, warp / S));
    uint4              w[LOADS];
    float              sum[2] = {};

#pragma unroll
    for (uint32_t u = 0; u < LOADS; u++)
        w[u] = mma_load(row, begin + u * STEP, SIZE, a.n_col);
    cuda_pdl_go();
    cuda_pdl_wait();
    for (uint32_t at = begin;;) {
#pragma unroll
        for (uint32_t u = 0; u < LOADS; u++)
            sum[u % 2] = once_dot<T, E>(w[u], a.x + min(at + u * STEP, a.n_col - E), sum[u % 2]);
        at += LOADS * STEP;
        if (at - begin >= a.n_col)
            break;
#pragma unroll
        for (uint32_t u = 0; u < LOADS; u++)
            w[u] = mma_load(row, at + u * STEP, SIZE, a.n_col);
    }
    once_finish<S>(a, cuda_warp_sum(sum[0] + sum[1]));
}

template <kvd_dtype T, uint32_t S, uint32_t LOADS>
static inline void once_launch(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    cuda_launch(be, once_kernel<T, S, LOADS>, gemv_blocks<GEMV_WARPS / S>(a), GEMV_THREADS, 0, s,
                a);
}

/* Short rows are best taken by four loads a lane, and a block with eight warps a row has no second
 * one for swiglu (measured from 4096 to 14336 columns in bf16). */
template <kvd_dtype T>
static inline void once_choose(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    const uint32_t load = 32 * (T == KVD_DTYPE_F32 ? 4 : 8); /* columns of a warp's */

    if (a.n_col <= 4 * load)
        once_launch<T, 1, 4>(be, a, s);
    else if (a.n_col <= 8 * load)
        once_launch<T, 2, 4>(be, a, s);
    else if (a.n_col <= 16 * load)
        once_launch<T, 4, 4>(be, a, s);
    else if (a.n_col <= 32 * load || a.swiglu)
        once_launch<T, 4, 8>(be, a, s);
    else
        once_launch<T, 8, 8>(be, a, s);
}

#endif
