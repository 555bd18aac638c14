/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_once.cuh - one or two tokens by unquantised weights.
 *
 * A warp takes four rows at a time, so that activations are read once for them, and S warps share
 * those rows' columns: a load is 512 neighbouring bytes of a row, which memory gives at its best.
 * The first weights are asked for before the wait for the kernel ahead, a norm among those: as a
 * part of this kernel it costs more than it saves (B = 1: 5.61 ms a step in place of 5.56). */
#ifndef KVD_CUDA_GEMV_ONCE_CUH
#define KVD_CUDA_GEMV_ONCE_CUH

#include "backend/cuda/cuda_gemv_mma.cuh"

#define ONCE_ROWS   4u /* of a warp */
#define ONCE_LOADS  2u /* of each row, at once */
#define ONCE_BLOCKS 2u /* on a multiprocessor, by registers */

template <kvd_dtype T, uint32_t E>
static __device__ __forceinline__ void once_weights(const uint4 &w, float f[E])
{
#pragma unroll
    for (uint32_t j = 0; j < E / 2; j++) {
        uint32_t first, second;
        mma_weights<T>(w, j, &first, &second);
        f[2 * j]     = __uint_as_float(first);
        f[2 * j + 1] = __uint_as_float(second);
    }
}

/* Totals over the warp of N numbers a lane, N a power of 2: the lane has that of number
 * lane / (32 / N).  Each is added up in the same order, whatever N is. */
template <uint32_t N> static __device__ __forceinline__ float once_totals(float v[N])
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t       bit  = 16;

#pragma unroll
    for (uint32_t n = N / 2; n >= 1; n /= 2, bit /= 2) {
#pragma unroll
        for (uint32_t i = 0; i < n; i++) {
            const float give = lane & bit ? v[i] : v[i + n], keep = lane & bit ? v[i + n] : v[i];
            v[i] = keep + __shfl_xor_sync(0xffffffffu, give, bit);
        }
    }
#pragma unroll
    for (; bit > 0; bit /= 2)
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], bit);
    return v[0];
}

/* Columns c to c + E - 1: of all tokens by all of the warp's rows. */
template <kvd_dtype T, uint32_t NT, uint32_t E>
static __device__ __forceinline__ void once_step(const gemv_args &a, const uint4 w[ONCE_ROWS],
                                                 uint32_t c, float sum[ONCE_ROWS * NT])
{
    float x[NT][E];

#pragma unroll
    for (uint32_t t = 0; t < NT; t++)
        mma_x<E>(a.x + t * a.x_stride + c, x[t]);
#pragma unroll
    for (uint32_t r = 0; r < ONCE_ROWS; r++) {
        float f[E];

        once_weights<T, E>(w[r], f);
#pragma unroll
        for (uint32_t i = 0; i < NT * E; i++)
            sum[r * NT + i / E] = fmaf(f[i % E], x[i / E][i % E], sum[r * NT + i / E]);
    }
}

/* Output `row` of a block, of token t, from the totals of all warps. */
template <uint32_t S, uint32_t NT>
static __device__ __forceinline__ float once_output(const float (*part)[ONCE_ROWS * NT],
                                                    uint32_t row, uint32_t t)
{
    float sum = 0.0f;

#pragma unroll
    for (uint32_t k = 0; k < S; k++)
        sum += part[row / ONCE_ROWS * S + k][row % ONCE_ROWS * NT + t];
    return sum;
}

template <uint32_t S, uint32_t NT>
static __device__ __forceinline__ void once_finish(const gemv_args &a, float sum[ONCE_ROWS * NT])
{
    constexpr uint32_t ROWS = ONCE_ROWS * GEMV_WARPS / S, SAME = 32 / (ONCE_ROWS * NT);
    __shared__ float   part[GEMV_WARPS][ONCE_ROWS * NT];
    const uint32_t     rows = a.swiglu ? ROWS / 2 : ROWS, i = threadIdx.x / NT;
    const uint32_t     t = threadIdx.x % NT, row = blockIdx.x * rows + i;
    const float        total = once_totals<ONCE_ROWS * NT>(sum);

    if (threadIdx.x % SAME == 0)
        part[threadIdx.x / 32][threadIdx.x % 32 / SAME] = total;
    __syncthreads();
    if (i >= rows || row >= (a.swiglu ? a.n_row / 2 : a.n_row))
        return;
    if (a.swiglu)
        gemv_put_swiglu(a, row, t, once_output<S, NT>(part, i, t),
                        once_output<S, NT>(part, i + ROWS / 2, t));
    else
        gemv_put(a, row, t, once_output<S, NT>(part, i, t), gemv_before(a, row, t));
}

/* NT tokens, all there are; S warps share ONCE_ROWS rows.  Of one token what has been used is asked
 * for anew at once; of two there are no registers for that. */
template <kvd_dtype T, uint32_t NT, uint32_t S>
static __global__ void __launch_bounds__(GEMV_THREADS, ONCE_BLOCKS)
    once_kernel(const __grid_constant__ gemv_args a)
{
    constexpr uint32_t E = T == KVD_DTYPE_F32 ? 4 : 8, SIZE = 16 / E, STEP = 32 * E * S;
    constexpr uint32_t ROWS = ONCE_ROWS * GEMV_WARPS / S, NEXT = ONCE_LOADS * STEP;
    const uint32_t     warp = threadIdx.x / 32, first = warp / S * ONCE_ROWS;
    const uint32_t     begin = (warp % S * 32 + threadIdx.x % 32) * E;
    const uint8_t     *row[ONCE_ROWS];
    uint4              w[ONCE_LOADS][ONCE_ROWS];
    float              sum[ONCE_ROWS * NT] = {};

#pragma unroll
    for (uint32_t r = 0; r < ONCE_ROWS; r++)
        row[r] = gemv_row(a, gemv_block_row<ROWS>(a, blockIdx.x, first + r));
#pragma unroll
    for (uint32_t i = 0; i < ONCE_LOADS * ONCE_ROWS; i++)
        w[i / ONCE_ROWS][i % ONCE_ROWS] =
            mma_load(row[i % ONCE_ROWS], begin + i / ONCE_ROWS * STEP, SIZE, a.n_col);
    cuda_pdl_go();
    cuda_pdl_wait();
    for (uint32_t at = begin; at - begin < a.n_col; at += NEXT) {
#pragma unroll
        for (uint32_t u = 0; u < ONCE_LOADS; u++) {
            once_step<T, NT, E>(a, w[u], min(at + u * STEP, a.n_col - E), sum);
#pragma unroll
            for (uint32_t r = 0; NT == 1 && r < ONCE_ROWS; r++)
                w[u][r] = mma_load(row[r], at + u * STEP + NEXT, SIZE, a.n_col);
        }
#pragma unroll
        for (uint32_t i = 0; NT > 1 && i < ONCE_LOADS * ONCE_ROWS; i++)
            w[i / ONCE_ROWS][i % ONCE_ROWS] =
                mma_load(row[i % ONCE_ROWS], at + i / ONCE_ROWS * STEP + NEXT, SIZE, a.n_col);
    }
    once_finish<S, NT>(a, sum);
}

template <kvd_dtype T, uint32_t S>
static inline void once_launch(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    cuda_launch(be, a.n_token == 1 ? once_kernel<T, 1, S> : once_kernel<T, GEMV_ONCE_TOKENS, S>,
                gemv_blocks<ONCE_ROWS * GEMV_WARPS / S>(a), GEMV_THREADS, 0, s, a);
}

/* Large blocks where all of them are at work at once, else such of half the rows, which end closer
 * together (measured from 4096 to 128256 rows in bf16). */
template <kvd_dtype T>
static inline void once_choose(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    if (gemv_blocks<ONCE_ROWS * GEMV_WARPS / 2>(a) <= ONCE_BLOCKS * be->n_sm)
        once_launch<T, 2>(be, a, s);
    else
        once_launch<T, 4>(be, a, s);
}

#endif
