/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_mma.cuh - up to 8 tokens by unquantised weights, on tensor cores.
 *
 * A block takes 16 rows and its warps share the columns.  Operands are tf32, which holds 16-bit
 * weights exactly; activations, and 32-bit weights, are split in two (the upper 11 bits, and the
 * rest), so products have nearly the precision of floats.  Which column lands where in an
 * instruction is free as long as both operands agree: a lane loads 16 bytes of a row, E
 * neighbouring weights, and uses two of them in each step of 8 columns.
 *
 * A norm ahead is part of it: y = (sum of w x g) / rms(x), with sums of squares made beside. */
#ifndef KVD_CUDA_GEMV_MMA_CUH
#define KVD_CUDA_GEMV_MMA_CUH

#include "backend/cuda/cuda_gemv.cuh"

#define MMA_ROWS 16u /* of a block */

/* a[0], a[1]: rows lane / 4 and 8 further at column lane % 4, a[2], a[3] at 4 further; d: row
 * lane / 4, tokens 2 (lane % 4) and 1 further, then 8 rows further. */
static __device__ __forceinline__ void mma_tf32(float d[4], const uint32_t a[4], uint32_t b0,
                                                uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_split(float x, uint32_t *high, uint32_t *low)
{
    *high = __float_as_uint(x) & 0xffffe000u;
    *low  = __float_as_uint(x - __uint_as_float(*high));
}

/* Weights 2 j and 2 j + 1 of 16 bytes, as bits of floats. */
template <kvd_dtype T>
static __device__ __forceinline__ void mma_weights(const uint4 &v, uint32_t j, uint32_t *first,
                                                   uint32_t *second)
{
    const uint32_t word[4] = { v.x, v.y, v.z, v.w };
    float          f[2];

    if (T == KVD_DTYPE_F32) {
        *first  = word[2 * j % 4];
        *second = word[(2 * j + 1) % 4];
        return;
    }
    dq_half2<T == KVD_DTYPE_BF16>(word[j], f);
    *first  = __float_as_uint(f[0]);
    *second = __float_as_uint(f[1]);
}

/* One pair of columns: 8 of them over 4 lanes. */
template <kvd_dtype T>
static __device__ __forceinline__ void mma_pair(float d[4], const uint4 w[2], uint32_t j,
                                                const uint32_t high[2], const uint32_t low[2])
{
    uint32_t a[4];

    mma_weights<T>(w[0], j, &a[0], &a[2]);
    mma_weights<T>(w[1], j, &a[1], &a[3]);
    if (T == KVD_DTYPE_F32) {
        uint32_t up[4], rest[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            mma_split(__uint_as_float(a[i]), &up[i], &rest[i]);
        mma_tf32(d, rest, high[0], high[1]);
        mma_tf32(d, up, low[0], low[1]);
        mma_tf32(d, up, high[0], high[1]);
        return;
    }
    mma_tf32(d, a, low[0], low[1]);
    mma_tf32(d, a, high[0], high[1]);
}

/* A lane's E activations. */
template <uint32_t E> static __device__ __forceinline__ void mma_x(const float *x, float v[E])
{
#pragma unroll
    for (uint32_t i = 0; i < E; i += 4) {
        const float4 q = *(const float4 *)(x + i);
        v[i]           = q.x;
        v[i + 1]       = q.y;
        v[i + 2]       = q.z;
        v[i + 3]       = q.w;
    }
}

/* 16 bytes of each row, E columns of a lane from x on; norm: what those are to be scaled by. */
template <kvd_dtype T, uint32_t E, bool NORM>
static __device__ __forceinline__ void mma_step(const uint4 w[2], const float *x, const float *norm,
                                                bool there, float d[4], float *square)
{
    float v[E];

    mma_x<E>(x, v);
    if constexpr (NORM) {
        float g[E];

        mma_x<E>(norm, g);
#pragma unroll
        for (uint32_t i = 0; i < E; i++) {
            *square = fmaf(v[i], there ? v[i] : 0.0f, *square);
            v[i] *= g[i];
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < E / 2; j++) {
        uint32_t high[2], low[2];
        mma_split(v[2 * j], &high[0], &low[0]);
        mma_split(v[2 * j + 1], &high[1], &low[1]);
        mma_pair<T>(d, w, j, high, low);
    }
}

/* 16 bytes of weights of `size` bytes; zeros past the row's end. */
static __device__ __forceinline__ uint4 mma_load(const uint8_t *row, uint32_t e, uint32_t size,
                                                 uint32_t n_col)
{
    uint4 v;

    asm volatile("{.reg .pred p;\n"
                 "setp.lt.u32 p, %5, %6;\n"
                 "mov.b32 %0, 0;\n"
                 "mov.b32 %1, 0;\n"
                 "mov.b32 %2, 0;\n"
                 "mov.b32 %3, 0;\n"
                 "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(row + (uint64_t)e * size), "r"(e), "r"(n_col));
    return v;
}

/* The lane's token's scale, of all of the block's squares. */
static __device__ __forceinline__ float mma_norm(const gemv_args &a, float square,
                                                 float (*part)[GEMV_TOKENS])
{
    const uint32_t lane = threadIdx.x % 32;
    float          sum  = 0.0f;

    square += __shfl_xor_sync(0xffffffffu, square, 1);
    square += __shfl_xor_sync(0xffffffffu, square, 2);
    if (lane % 4 == 0)
        part[threadIdx.x / 32][lane / 4] = square;
    __syncthreads();
#pragma unroll
    for (uint32_t w = 0; w < GEMV_WARPS; w++)
        sum += part[w][threadIdx.x % GEMV_TOKENS];
    return rsqrtf(sum / (float)a.n_col + a.norm_eps);
}

/* LOADS of 16 bytes of each of a lane's two rows are on their way at once, of BLOCKS on a
 * multiprocessor; what has been used is asked for anew at once.  Lanes without a token compute
 * another's, so that nothing depends on that. */
template <kvd_dtype T, uint32_t LOADS, uint32_t BLOCKS, bool NORM>
static __global__ void __launch_bounds__(GEMV_THREADS, BLOCKS)
    mma_kernel(const __grid_constant__ gemv_args a)
{
    constexpr uint32_t E = T == KVD_DTYPE_F32 ? 4 : 8, STEP = 4 * E; /* columns */
    constexpr uint32_t NEXT = GEMV_WARPS * LOADS * STEP;
    __shared__ float   part[GEMV_WARPS][MMA_ROWS][GEMV_TOKENS], squares[GEMV_WARPS][GEMV_TOKENS];
    const uint32_t     lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const uint32_t     begin = warp * LOADS * STEP;
    const uint8_t     *row[2];
    uint4              w[LOADS][2];
    float              d[4] = {}, square = 0.0f, by = 1.0f;

#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
        row[i] = gemv_row(a, gemv_block_row<MMA_ROWS>(a, blockIdx.x, 8 * i + g));
#pragma unroll
    for (uint32_t i = 0; i < 2 * LOADS; i++)
        w[i / 2][i % 2] =
            mma_load(row[i % 2], begin + lane % 4 * E + i / 2 * STEP, 16 / E, a.n_col);
    cuda_pdl_go();
    cuda_pdl_wait();
    const float *x      = a.x + min(g, a.n_token - 1) * a.x_stride;
    const float  before = gemv_ahead<MMA_ROWS>(a, blockIdx.x);
    for (uint32_t at = begin; at < a.n_col; at += NEXT) {
#pragma unroll
        for (uint32_t u = 0; u < LOADS; u++) {
            const uint32_t e = at + lane % 4 * E + u * STEP, c = min(e, a.n_col - E);

            mma_step<T, E, NORM>(w[u], x + c, NORM ? a.norm + c : NULL, e < a.n_col, d, &square);
            w[u][0] = mma_load(row[0], e + NEXT, 16 / E, a.n_col);
            w[u][1] = mma_load(row[1], e + NEXT, 16 / E, a.n_col);
        }
    }
    *(float2 *)&part[warp][g][lane % 4 * 2]     = make_float2(d[0], d[1]);
    *(float2 *)&part[warp][8 + g][lane % 4 * 2] = make_float2(d[2], d[3]);
    if (NORM)
        by = mma_norm(a, square, squares);
    else
        __syncthreads();
    gemv_finish<MMA_ROWS>(a, blockIdx.x, part, by, before);
}

template <kvd_dtype T, uint32_t LOADS, uint32_t BLOCKS>
static inline void mma_launch(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    cuda_launch(be,
                a.norm ? mma_kernel<T, LOADS, BLOCKS, true> : mma_kernel<T, LOADS, BLOCKS, false>,
                gemv_blocks<MMA_ROWS>(a), GEMV_THREADS, 0, s, a);
}

/* Two blocks on a multiprocessor with more on its way each where that takes all of them, else three
 * (measured from 4096 to 128256 rows in bf16). */
template <kvd_dtype T>
static inline void mma_choose(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    if (gemv_blocks<MMA_ROWS>(a) <= 2 * be->n_sm)
        mma_launch<T, 4, 2>(be, a, s);
    else
        mma_launch<T, 2, 3>(be, a, s);
}

#endif
