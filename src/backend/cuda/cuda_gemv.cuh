/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv.cuh - products with up to 8 tokens: weights stream by once, dequantised on the way.
 *
 *   gemv_kernel   a warp takes a row and all tokens, in floats, whatever the alignment; quantised
 *                 weights where floats are asked for
 *   once_kernel   (cuda_gemv_once.cuh) one or two tokens by unquantised weights
 *   mma_kernel    (cuda_gemv_mma.cuh) more tokens by unquantised weights, or any number where the
 *                 backend is deterministic: tensor cores
 *   tile_kernel   (cuda_gemv_tile.cuh) quantised weights: tensor cores, in integers
 *   one_kernel    (cuda_gemv_one.cuh) the same for one token, from compute capability 9.0 on
 *
 * The last four ask for their first weights before they wait for the kernel ahead, so that memory
 * is busy while that ends.  Each makes sums in an order that depends on shapes alone, so a token
 * has the same bits whatever other tokens the same kernel has. */
#ifndef KVD_CUDA_GEMV_CUH
#define KVD_CUDA_GEMV_CUH

#include "backend/cuda/cuda_dequant.cuh"
#include "backend/cuda/cuda_launch.cuh"

#define GEMV_THREADS     256u
#define GEMV_WARPS       (GEMV_THREADS / 32)
#define GEMV_TOKENS      8u
#define GEMV_ONCE_TOKENS 2u   /* that once_kernel takes */
#define GEMV_UNIT        256u /* columns that share a scale of activations */

#define GEMV_OWN_COLS 16384u /* whose integers a block makes, at most */

/* Of a unit of a token's activations in integers: what they stand for, and sums of each 32. */
typedef struct gemv_scale {
    float   scale;
    int32_t unused[3], sum[8];
} gemv_scale;

/* Outputs of one type in one launch; rows are counted through all of them. */
typedef struct gemv_args {
    uint32_t       n_token, n_col, n_out, n_row;
    bool           aligned; /* rows of weights: see cuda_dq_aligned() */
    bool           wide;    /* rows begin on 16 bytes, and are so long */
    bool           x_wide;  /* so do rows of x */
    bool           swiglu;  /* of two outputs: see kvd_matmul_args */
    bool           ints;    /* activations are taken in integers (cuda_gemv_ints.cuh) */
    uint64_t       x_stride;
    const float   *x;
    const float   *norm; /* of x, in mma_kernel or where it becomes integers: weights, or NULL */
    float          norm_eps;
    uint4         *xq; /* the integers; NULL: the product makes them, of one token */
    gemv_scale    *xd; /* [unit][8 tokens] */
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

/* before: what the output was, if it is added to. */
static __device__ __forceinline__ void gemv_put(const gemv_args &a, uint32_t row, uint32_t token,
                                                float s, float before)
{
    const kvd_matmul_out *o = gemv_out(a, &row);
    float                *y = o->y + token * o->y_stride + row;
    const float           b = o->bias ? o->bias[row] : 0.0f;

    *y = o->add ? before + (s + b) : s + b;
}
static __device__ __forceinline__ float gemv_before(const gemv_args &a, uint32_t row,
                                                    uint32_t token)
{
    const kvd_matmul_out *o = gemv_out(a, &row);

    return o->add ? o->y[token * o->y_stride + row] : 0.0f;
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

/* Row i of block number `block` of ROWS: of a swiglu the second half goes with the first, row by
 * row. */
template <uint32_t ROWS>
static __device__ __forceinline__ uint32_t gemv_block_row(const gemv_args &a, uint32_t block,
                                                          uint32_t i)
{
    constexpr uint32_t PAIRS = ROWS > 1 ? ROWS / 2 : 1;
    const uint32_t     half = a.n_row / 2, row = block * PAIRS + i % PAIRS;

    if (!a.swiglu)
        return block * ROWS + i;
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

/* The thread's output of a block, which has at most as many; false: it has none. */
template <uint32_t ROWS>
static __device__ __forceinline__ bool gemv_mine(const gemv_args &a, uint32_t block, uint32_t *row,
                                                 uint32_t *token)
{
    const uint32_t rows = a.swiglu ? ROWS / 2 : ROWS, at = threadIdx.x / GEMV_TOKENS;

    static_assert(ROWS * GEMV_TOKENS <= GEMV_THREADS, "an output a thread");
    *row   = block * rows + at;
    *token = threadIdx.x % GEMV_TOKENS;
    return at < rows && *row < (a.swiglu ? a.n_row / 2 : a.n_row) && *token < a.n_token;
}

/* What is added to, asked for long before it is needed. */
template <uint32_t ROWS>
static __device__ __forceinline__ float gemv_ahead(const gemv_args &a, uint32_t block)
{
    uint32_t row, token;

    return !a.swiglu && gemv_mine<ROWS>(a, block, &row, &token) ? gemv_before(a, row, token) : 0.0f;
}

/* Sums of a block's warps, in their order; by: the scale of the thread's token, from a norm. */
template <uint32_t ROWS>
static __device__ __forceinline__ void gemv_finish(const gemv_args &a, uint32_t block,
                                                   const float (*part)[ROWS][GEMV_TOKENS], float by,
                                                   float before)
{
    const uint32_t at = threadIdx.x / GEMV_TOKENS;
    uint32_t       row, token;

    if (!gemv_mine<ROWS>(a, block, &row, &token))
        return;
    if (a.swiglu)
        gemv_put_swiglu(a, row, token, gemv_total<ROWS>(part, at, token) * by,
                        gemv_total<ROWS>(part, at + ROWS / 2, token) * by);
    else
        gemv_put(a, row, token, gemv_total<ROWS>(part, at, token) * by, before);
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
    if (!a.aligned || ((uintptr_t)a.x | (uintptr_t)a.norm) % 16 != 0 || a.x_stride % 4 != 0)
        return GEMV_WAY_ROWS;
    if (a.n_token > GEMV_ONCE_TOKENS || be->deterministic)
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
            gemv_put(a, row, t, s, gemv_before(a, row, t));
    }
}

template <kvd_dtype T, bool A>
static inline void gemv_launch(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    cuda_launch(be, gemv_kernel<T, A>, cuda_div_up(a.n_row, GEMV_WARPS), GEMV_THREADS, 0, s, a);
}

/* Whether a product by quantised weights is that of one token, which makes its integers itself
 * (cuda_gemv_one.cuh).  Its sums have another order than those of several tokens. */
static inline bool gemv_own_ints(const cuda_backend *be, const gemv_args &a)
{
    return a.n_token == 1 && be->cc >= 90 && !be->deterministic && a.wide &&
           a.n_col <= GEMV_OWN_COLS;
}

/* One function per group of types, so that they compile side by side: cuda_gemv_*.cu. */
void cuda_gemv_float(const cuda_backend *be, kvd_dtype type, const gemv_args &a, cudaStream_t s);
kvd_status cuda_gemv_small(const cuda_backend *be, kvd_dtype type, const gemv_args &a,
                           cudaStream_t s, kvd_err *err);
kvd_status cuda_gemv_super(const cuda_backend *be, kvd_dtype type, const gemv_args &a,
                           cudaStream_t s, kvd_err *err);

#endif
