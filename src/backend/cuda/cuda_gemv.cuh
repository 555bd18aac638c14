/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv.cuh - products with up to 8 tokens: weights stream by once, dequantised on the way.
 *
 * A warp takes R rows and all tokens; activations stay in the first-level cache.  Against quantised
 * weights they are 16-bit integers with a scale per 32, as two planes of bytes (as in backend
 * "cpu"), unless floats are asked for: then they are floats, as against other weights.
 *
 * A token's sum is made in an order that depends on the row alone (lane, step; then the lanes by a
 * tree), so it has the same bits whatever the number of tokens and of rows a warp takes. */
#ifndef KVD_CUDA_GEMV_CUH
#define KVD_CUDA_GEMV_CUH

#include "backend/cuda/cuda_dequant.cuh"

#define GEMV_THREADS 256u
#define GEMV_WARPS   (GEMV_THREADS / 32)
#define GEMV_TOKENS  8u

/* Outputs of one type in one launch; rows are counted through all of them. */
typedef struct gemv_args {
    uint32_t       n_token, n_col, n_out, n_row;
    uint64_t       x_stride;
    const float   *x;
    const int8_t  *xq;        /* x in integers, rows of xq_stride, high bytes; NULL: not wanted */
    const int8_t  *xl;        /* low bytes, -128 to 127: x = scale * (256 xq + xl) */
    const float2  *xd;        /* [n_token][xq_stride / 32] their scale, scale * sum / 4 */
    uint64_t       xq_stride; /* whole steps; 0 past n_col */
    kvd_matmul_out out[KVD_MATMUL_OUT_MAX];
} gemv_args;

/* XA: rows of x begin on 16 bytes. */
template <bool XA>
static __device__ __forceinline__ float4 gemv_x(const float *x, uint32_t e, uint32_t n_col)
{
    if (XA && e + 4 <= n_col)
        return __ldg((const float4 *)(x + e));
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

template <uint32_t NT>
static __device__ __forceinline__ void gemv_store(const gemv_args &a, uint32_t row, float sum[NT],
                                                  uint32_t lane)
{
    const kvd_matmul_out *o = gemv_out(a, &row);

#pragma unroll
    for (uint32_t t = 0; t < NT; t++) {
        const float s = cuda_warp_sum(sum[t]);
        if (lane == 0 && t < a.n_token) {
            float      *y = o->y + t * o->y_stride + row;
            const float b = o->bias ? o->bias[row] : 0.0f;
            *y            = o->add ? *y + (s + b) : s + b;
        }
    }
}

/* Where row first + r of the launch lies; past the last it is that one again. */
static __device__ __forceinline__ const uint8_t *gemv_row(const gemv_args &a, uint32_t row)
{
    row                     = min(row, a.n_row - 1);
    const kvd_matmul_out *o = gemv_out(a, &row);

    return (const uint8_t *)o->w.data + row * o->w.row_bytes;
}

template <kvd_dtype T, bool A, bool XA, uint32_t NT, uint32_t R>
static __global__ void __launch_bounds__(GEMV_THREADS)
    gemv_kernel(const __grid_constant__ gemv_args a)
{
    const uint32_t lane  = threadIdx.x % 32;
    const uint32_t first = (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * R;
    const uint8_t *w_row[R];
    const float   *x[NT];
    float          sum[R][NT] = {};

    if (first >= a.n_row)
        return;
#pragma unroll
    for (uint32_t r = 0; r < R; r++)
        w_row[r] = gemv_row(a, first + r);
#pragma unroll
    for (uint32_t t = 0; t < NT; t++)
        x[t] = a.x + (t < a.n_token ? t : 0) * a.x_stride;
#pragma unroll(NT *R == 1 ? 4 : NT * R <= 4 ? 2 : 1)
    for (uint32_t step = 0; step * CUDA_DQ_STEP < a.n_col; step++) {
        float w[R][16];
#pragma unroll
        for (uint32_t r = 0; r < R; r++)
            cuda_dq_get<T, A>(w_row[r], a.n_col, step, lane, w[r]);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t e = cuda_dq_at<T>(step, lane, j);
#pragma unroll
            for (uint32_t t = 0; t < NT; t++) {
                const float4 v = gemv_x<XA>(x[t], e, a.n_col);
#pragma unroll
                for (uint32_t r = 0; r < R; r++) {
                    sum[r][t] = fmaf(w[r][4 * j], v.x, sum[r][t]);
                    sum[r][t] = fmaf(w[r][4 * j + 1], v.y, sum[r][t]);
                    sum[r][t] = fmaf(w[r][4 * j + 2], v.z, sum[r][t]);
                    sum[r][t] = fmaf(w[r][4 * j + 3], v.w, sum[r][t]);
                }
            }
        }
    }
#pragma unroll
    for (uint32_t r = 0; r < R; r++) {
        if (first + r < a.n_row)
            gemv_store<NT>(a, first + r, sum[r], lane);
    }
}

/* Two quads of a token's activations. */
struct gemv_ints {
    uint2  high, low;
    float2 d[2]; /* of the block of each */
};

static __device__ __forceinline__ int gemv_dot(uint32_t w, uint32_t high, uint32_t low)
{
    return __dp4a((int)w, (int)low, __dp4a((int)w, (int)high, 0) * 256);
}

/* Two quads of a row of weights by those of a token: a quarter of a block of 32 of x where the type
 * is paired, of which the minimum's share is then a quarter, too. */
template <typename D>
static __device__ __forceinline__ float gemv_quads(const cuda_dq_ints &w, uint32_t j,
                                                   const gemv_ints &x, float sum)
{
    const int first  = gemv_dot(w.q[j], x.high.x, x.low.x);
    const int second = gemv_dot(w.q[j + 1], x.high.y, x.low.y);

    if (D::paired) {
        sum = fmaf(w.scale[j], (float)(first + second) * x.d[0].x, sum);
        return D::has_min ? fmaf(w.min[j], x.d[0].y, sum) : sum;
    }
    sum = fmaf(w.scale[j], (float)first * x.d[0].x, sum);
    sum = fmaf(w.scale[j + 1], (float)second * x.d[1].x, sum);
    if (D::has_min) {
        const uint32_t ones = 0x01010101u;

        sum = fmaf(w.min[j], (float)gemv_dot(ones, x.high.x, x.low.x) * x.d[0].x, sum);
        sum = fmaf(w.min[j + 1], (float)gemv_dot(ones, x.high.y, x.low.y) * x.d[1].x, sum);
    }
    return sum;
}

/* Quads j and j + 1 of a plane; p is the lane's, in the step. */
template <typename D>
static __device__ __forceinline__ uint2 gemv_plane(const int8_t *p, uint32_t j)
{
    if (D::off(j + 1) == D::off(j) + 4)
        return __ldg((const uint2 *)(p + D::off(j)));
    return make_uint2(__ldg((const uint32_t *)(p + D::off(j))),
                      __ldg((const uint32_t *)(p + D::off(j + 1))));
}

template <typename D>
static __device__ __forceinline__ gemv_ints gemv_load(const int8_t *xq, const int8_t *xl,
                                                      const float2 *xd, uint32_t j)
{
    gemv_ints x;

    x.high = gemv_plane<D>(xq, j);
    x.low  = gemv_plane<D>(xl, j);
    x.d[0] = __ldg(xd + D::off(j) / 32);
    x.d[1] = D::paired ? x.d[0] : __ldg(xd + D::off(j + 1) / 32);
    return x;
}

template <kvd_dtype T, uint32_t NT, uint32_t R>
static __global__ void __launch_bounds__(GEMV_THREADS)
    gemv_int_kernel(const __grid_constant__ gemv_args a)
{
    typedef cuda_dq<T, true> D;
    const uint32_t           lane  = threadIdx.x % 32;
    const uint32_t           first = (blockIdx.x * GEMV_WARPS + threadIdx.x / 32) * R;
    const uint8_t           *w_row[R];
    const int8_t            *xq = a.xq + D::base(lane), *xl = a.xl + D::base(lane);
    const float2            *xd         = a.xd + D::base(lane) / 32;
    float                    sum[R][NT] = {};

    if (first >= a.n_row)
        return;
#pragma unroll
    for (uint32_t r = 0; r < R; r++)
        w_row[r] = gemv_row(a, first + r);
#pragma unroll(NT *R <= 2 ? 2 : 1)
    for (uint32_t at = 0; at < a.n_col; at += CUDA_DQ_STEP) {
        cuda_dq_ints w[R];
#pragma unroll
        for (uint32_t r = 0; r < R; r++) {
            D::ints(w_row[r], a.n_col - at, lane, w[r]);
            w_row[r] += D::step_bytes;
        }
#pragma unroll
        for (uint32_t t = 0; t < NT; t++) {
            const uint64_t to = (t < a.n_token ? t : 0) * a.xq_stride;
#pragma unroll
            for (uint32_t j = 0; j < 4; j += 2) {
                const gemv_ints x = gemv_load<D>(xq + to, xl + to, xd + to / 32, j);
#pragma unroll
                for (uint32_t r = 0; r < R; r++)
                    sum[r][t] = gemv_quads<D>(w[r], j, x, sum[r][t]);
            }
        }
        xq += CUDA_DQ_STEP;
        xl += CUDA_DQ_STEP;
        xd += CUDA_DQ_STEP / 32;
    }
#pragma unroll
    for (uint32_t r = 0; r < R; r++) {
        if (first + r < a.n_row)
            gemv_store<NT>(a, first + r, sum[r], lane);
    }
}

template <kvd_dtype T, bool A, bool XA, uint32_t NT, uint32_t R>
static inline void gemv_launch(const gemv_args &a, cudaStream_t s)
{
    gemv_kernel<T, A, XA, NT, R><<<cuda_div_up(a.n_row, GEMV_WARPS * R), GEMV_THREADS, 0, s>>>(a);
}

template <kvd_dtype T, uint32_t NT, uint32_t R>
static inline void gemv_int_launch(const gemv_args &a, cudaStream_t s)
{
    gemv_int_kernel<T, NT, R><<<cuda_div_up(a.n_row, GEMV_WARPS * R), GEMV_THREADS, 0, s>>>(a);
}

/* How many rows a warp takes: more share the loads of x, fewer fill the machine. */
template <kvd_dtype T>
static inline void gemv_float_choose(const gemv_args &a, uint32_t n_sm, bool w_aligned,
                                     bool x_aligned, cudaStream_t s)
{
    const bool many = a.n_row >= 2 * GEMV_WARPS * 4 * n_sm;

    if (!w_aligned)
        gemv_launch<T, false, false, 8, 1>(a, s);
    else if (!x_aligned)
        gemv_launch<T, true, false, 8, 1>(a, s);
    else if (a.n_token == 1 && many)
        gemv_launch<T, true, true, 1, 2>(a, s);
    else if (a.n_token == 1)
        gemv_launch<T, true, true, 1, 1>(a, s);
    else if (a.n_token == 2)
        gemv_launch<T, true, true, 2, 2>(a, s);
    else if (a.n_token <= 4)
        gemv_launch<T, true, true, 4, 2>(a, s);
    else
        gemv_launch<T, true, true, 8, 2>(a, s);
}

template <kvd_dtype T>
static inline void gemv_quant_choose(const gemv_args &a, uint32_t n_sm, bool w_aligned,
                                     cudaStream_t s)
{
    const bool many = a.n_row >= 2 * GEMV_WARPS * 4 * n_sm;

    if (!a.xq || !w_aligned)
        gemv_launch<T, false, false, 8, 1>(a, s);
    else if (a.n_token == 1 && many)
        gemv_int_launch<T, 1, 2>(a, s);
    else if (a.n_token == 1)
        gemv_int_launch<T, 1, 1>(a, s);
    else if (a.n_token == 2)
        gemv_int_launch<T, 2, 2>(a, s);
    else if (a.n_token <= 4)
        gemv_int_launch<T, 4, 2>(a, s);
    else
        gemv_int_launch<T, 8, 2>(a, s);
}

/* One function per group of types, so that they compile side by side: cuda_gemv_*.cu. */
void cuda_gemv_float(kvd_dtype type, const gemv_args &a, uint32_t n_sm, bool wa, bool xa,
                     cudaStream_t s);
void cuda_gemv_small(kvd_dtype type, const gemv_args &a, uint32_t n_sm, bool wa, cudaStream_t s);
void cuda_gemv_super(kvd_dtype type, const gemv_args &a, uint32_t n_sm, bool wa, cudaStream_t s);

#endif
