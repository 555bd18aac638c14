/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv.cuh - products with up to 8 tokens: weights stream by once, dequantised on the way.
 *
 *   gemv_kernel   a warp takes a row and all tokens, in floats, whatever the alignment; quantised
 *                 weights where floats are asked for
 *   once_kernel   (cuda_gemv_once.cuh) one token by unquantised weights
 *   mma_kernel    (cuda_gemv_mma.cuh) two or more tokens by unquantised weights: tensor cores
 *   tile_kernel   (cuda_gemv_tile.cuh) quantised weights: tensor cores, in integers
 *
 * The last three ask for their first weights before they wait for the kernel ahead, so that memory
 * is busy while that ends.  Each makes sums in an order that depends on shapes alone, so a token
 * has the same bits whatever other tokens the same kernel has. */
#ifndef KVD_CUDA_GEMV_CUH
#define KVD_CUDA_GEMV_CUH

#include "backend/cuda/cuda_dequant.cuh"
#include "backend/cuda/cuda_launch.cuh"

#define GEMV_THREADS 256u
#define GEMV_WARPS   (GEMV_THREADS / 32)
#define GEMV_TOKENS  8u

/* Outputs of one type in one launch; rows are counted through all of them. */
typedef struct gemv_args {
    uint32_t       n_token, n_col, n_out, n_row;
    bool           aligned; /* rows of weights: see cuda_dq_aligned() */
    bool           wide;    /* rows begin on 16 bytes, and are so long */
    bool           swiglu;  /* of two outputs: see kvd_matmul_args */
    uint64_t       x_stride;
    const float   *x;
    const uint4   *xq; /* x in integers: see cuda_gemv_tile.cuh; NULL: not wanted */
    const float2  *xd;
    kvd_matmul_out out[KVD_MATMUL_OUT_MAX];
} gemv_args;

/* No read-only loads: the kernel ahead may still be writing when this one begins. */
static __device__ __forceinline__ float4 gemv_x(const float *x, uint32_t e, uint32_t n_col)
{
    return make_float4(e < n_col ? x[e] : 0.0f, e + 1 < n_col ? x[e + 1] : 0.0f,
                       e + 2 < n_col ? x[e + 2] : 0.0f, e + 3 < n_col ? x[e + 3] : 0.0f);
}

static __device__ __forceinline__ const kvd_matmul_out *gemv_out(const gemv_args &a, uint32_t *row)
{
    uint32_t i = 0;

    while (i + 1 < a.n_out && *row >= a.out[i].w.n_row)
        *row -= a.out[i++].w.n_row;
    return &a.out[i];
}

static __device__ __forceinline__ void gemv_put(const gemv_args &a, uint32_t row, uint32_t token,
                                                float s)
{
    const kvd_matmul_out *o = gemv_out(a, &row);
    float                *y = o->y + token * o->y_stride + row;
    const float           b = o->bias ? o->bias[row] : 0.0f;

    *y = o->add ? *y + (s + b) : s + b;
}

/* Row of both outputs of a swiglu. */
static __device__ __forceinline__ void gemv_put_swiglu(const gemv_args &a, uint32_t row,
                                                       uint32_t token, float gate, float up)
{
    const kvd_matmul_out *o = a.out;

    gate += o[0].bias ? o[0].bias[row] : 0.0f;
    up += o[1].bias ? o[1].bias[row] : 0.0f;
    o[0].y[token * o[0].y_stride + row] = gate / (1.0f + expf(-gate)) * up;
}

/* Row i of a block's ROWS: of a swiglu the second half goes with the first, row by row. */
template <uint32_t ROWS>
static __device__ __forceinline__ uint32_t gemv_block_row(const gemv_args &a, uint32_t i)
{
    constexpr uint32_t PAIRS = ROWS > 1 ? ROWS / 2 : 1;
    const uint32_t     half = a.n_row / 2, row = blockIdx.x * PAIRS + i % PAIRS;

    if (!a.swiglu)
        return blockIdx.x * ROWS + i;
    return min(row, half - 1) + (i < PAIRS ? 0 : half);
}

/* Where a row of the launch lies; past the last it is that one again. */
static __device__ __forceinline__ const uint8_t *gemv_row(const gemv_args &a, uint32_t row)
{
    row                     = min(row, a.n_row - 1);
    const kvd_matmul_out *o = gemv_out(a, &row);

    return (const uint8_t *)o->w.data + row * o->w.row_bytes;
}

template <uint32_t ROWS>
static __device__ __forceinline__ float gemv_total(const float (*part)[ROWS][GEMV_TOKENS],
                                                   uint32_t row, uint32_t token)
{
    float s = 0.0f;

#pragma unroll
    for (uint32_t w = 0; w < GEMV_WARPS; w++)
        s += part[w][row][token];
    return s;
}

/* Sums of a block's warps, in their order. */
template <uint32_t ROWS>
static __device__ __forceinline__ void gemv_finish(const gemv_args &a,
                                                   const float (*part)[ROWS][GEMV_TOKENS])
{
    for (uint32_t i = threadIdx.x; i < ROWS * GEMV_TOKENS; i += GEMV_THREADS) {
        const uint32_t at = i / GEMV_TOKENS, token = i % GEMV_TOKENS;
        const uint32_t row = blockIdx.x * (a.swiglu ? ROWS / 2 : ROWS) + at;

        if (token >= a.n_token)
            continue;
        if (!a.swiglu && row < a.n_row)
            gemv_put(a, row, token, gemv_total<ROWS>(part, at, token));
        if (a.swiglu && at < ROWS / 2 && row < a.n_row / 2)
            gemv_put_swiglu(a, row, token, gemv_total<ROWS>(part, at, token),
                            gemv_total<ROWS>(part, at + ROWS / 2, token));
    }
}

/* How many blocks of ROWS rows a launch has. */
template <uint32_t ROWS> static inline uint32_t gemv_blocks(const gemv_args &a)
{
    return a.swiglu ? cuda_div_up(a.n_row / 2, (ROWS + 1) / 2) : cuda_div_up(a.n_row, ROWS);
}

/* What takes unquantised weights. */
typedef enum gemv_float_way { GEMV_WAY_ROWS, GEMV_WAY_ONCE, GEMV_WAY_MMA } gemv_float_way;

/* One way for any number of tokens where a token's bits may not depend on it. */
static inline gemv_float_way gemv_float_choose(const cuda_backend *be, const gemv_args &a)
{
    if (!a.aligned || (uintptr_t)a.x % 16 != 0 || a.x_stride % 4 != 0)
        return GEMV_WAY_ROWS;
    if (a.n_token > 1 || be->deterministic)
        return GEMV_WAY_MMA;
    return GEMV_WAY_ONCE;
}

/* A warp a row and up to 8 tokens. */
template <kvd_dtype T, bool A>
static __global__ void __launch_bounds__(GEMV_THREADS)
    gemv_kernel(const __grid_constant__ gemv_args a)
{
    constexpr uint32_t NT      = GEMV_TOKENS;
    const uint32_t     lane    = threadIdx.x % 32;
    const uint32_t     row     = blockIdx.x * GEMV_WARPS + threadIdx.x / 32;
    const uint8_t     *w_row   = gemv_row(a, row);
    float              sum[NT] = {};

    cuda_pdl_go();
    cuda_pdl_wait();
    for (uint32_t step = 0; step * CUDA_DQ_STEP < a.n_col; step++) {
        float w[16];

        cuda_dq_get<T, A>(w_row, a.n_col, step, lane, w);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t e = cuda_dq_at<T>(step, lane, j);
#pragma unroll
            for (uint32_t t = 0; t < NT; t++) {
                const float *x = a.x + (t < a.n_token ? t : 0) * a.x_stride;
                const float4 v = gemv_x(x, e, a.n_col);

                sum[t] = fmaf(w[4 * j], v.x, sum[t]);
                sum[t] = fmaf(w[4 * j + 1], v.y, sum[t]);
                sum[t] = fmaf(w[4 * j + 2], v.z, sum[t]);
                sum[t] = fmaf(w[4 * j + 3], v.w, sum[t]);
            }
        }
    }
#pragma unroll
    for (uint32_t t = 0; t < NT; t++) {
        const float s = cuda_warp_sum(sum[t]);

        if (lane == 0 && row < a.n_row && t < a.n_token)
            gemv_put(a, row, t, s);
    }
}

template <kvd_dtype T, bool A>
static inline void gemv_launch(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    cuda_launch(be, gemv_kernel<T, A>, cuda_div_up(a.n_row, GEMV_WARPS), GEMV_THREADS, 0, s, a);
}

/* One function per group of types, so that they compile side by side: cuda_gemv_*.cu. */
void cuda_gemv_float(const cuda_backend *be, kvd_dtype type, const gemv_args &a, cudaStream_t s);
kvd_status cuda_gemv_small(const cuda_backend *be, kvd_dtype type, const gemv_args &a,
                           cudaStream_t s, kvd_err *err);
kvd_status cuda_gemv_super(const cuda_backend *be, kvd_dtype type, const gemv_args &a,
                           cudaStream_t s, kvd_err *err);

#endif
