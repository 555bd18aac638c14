/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_elem.cu - embedding, the norm of rows, SwiGLU.
 * Sums of squares in float, by a fixed tree: a row's result does not depend on the others. */
#include "backend/cuda/cuda_dequant.cuh"
#include "backend/cuda/cuda_launch.cuh"

#define ELEM_THREADS 256u
#define NORM_OWN     8u /* elements of a row that a thread keeps */

/* ---- embedding --------------------------------------------------------------------- */

template <kvd_dtype T, bool A>
static __global__ void embed_kernel(kvd_weight table, const int32_t *token, float *out)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = table.n_col;
    const uint8_t *row =
        (const uint8_t *)table.data + (uint64_t)token[blockIdx.x] * table.row_bytes;
    float *to = out + (uint64_t)blockIdx.x * n;

    cuda_pdl_go();
    for (uint32_t step = warp; step * CUDA_DQ_STEP < n; step += blockDim.x / 32) {
        float w[16];

        cuda_dq_get<T, A>(row, n, step, lane, w);
#pragma unroll
        for (uint32_t i = 0; i < 16; i++) {
            const uint32_t e = cuda_dq_at<T>(step, lane, i / 4) + i % 4;
            if (e < n)
                to[e] = w[i];
        }
    }
}

struct embed_launch {
    const kvd_embed_args *a;
    cudaStream_t          s;

    template <kvd_dtype T> void operator()() const
    {
        if (cuda_dq_aligned(&a->table))
            embed_kernel<T, true><<<a->n_token, ELEM_THREADS, 0, s>>>(a->table, a->token, a->out);
        else
            embed_kernel<T, false><<<a->n_token, ELEM_THREADS, 0, s>>>(a->table, a->token, a->out);
    }
};

kvd_status cuda_embed(kvd_stream *st, const kvd_embed_args *a, kvd_err *err)
{
    if (a->n_token == 0)
        return KVD_OK;
    cuda_enter(st);
    cuda_dq_visit(a->table.type, embed_launch{ a, st->s });
    return cuda_launched("embed", err);
}

/* ---- norms ------------------------------------------------------------------------- */

/* Sum over the block; every thread gets it. */
static __device__ float block_sum(float x)
{
    __shared__ float part[32];
    const uint32_t   n_warp = blockDim.x / 32;

    x = cuda_warp_sum(x);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
    for (uint32_t i = 0; i < n_warp; i++)
        x += part[i];
    return x;
}

/* A row of at most NORM_OWN elements a thread is read once. */
static __global__ void rms_norm_kernel(const kvd_rms_norm_args a)
{
    const float *x   = a.x + blockIdx.x * a.x_stride;
    float       *out = a.out + blockIdx.x * a.out_stride;
    float        own[NORM_OWN], w[NORM_OWN], sum = 0.0f, scale;

    cuda_pdl_go();
#pragma unroll
    for (uint32_t i = 0; i < NORM_OWN; i++) {
        const uint32_t at = threadIdx.x + i * blockDim.x;
        w[i]              = at < a.n_col ? a.w[at] : 0.0f;
    }
    cuda_pdl_wait();
#pragma unroll
    for (uint32_t i = 0; i < NORM_OWN; i++) {
        const uint32_t at = threadIdx.x + i * blockDim.x;
        own[i]            = at < a.n_col ? x[at] : 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < NORM_OWN; i++)
        sum += own[i] * own[i];
    scale = rsqrtf(block_sum(sum) / (float)a.n_col + a.eps);
#pragma unroll
    for (uint32_t i = 0; i < NORM_OWN; i++) {
        const uint32_t at = threadIdx.x + i * blockDim.x;
        if (at < a.n_col)
            out[at] = own[i] * scale * w[i];
    }
}

static __global__ void rms_norm_wide_kernel(const kvd_rms_norm_args a)
{
    const float *x   = a.x + blockIdx.x * a.x_stride;
    float       *out = a.out + blockIdx.x * a.out_stride;
    float        sum = 0.0f, scale;

    cuda_pdl_go();
    cuda_pdl_wait();
    for (uint32_t i = threadIdx.x; i < a.n_col; i += blockDim.x)
        sum += x[i] * x[i];
    scale = rsqrtf(block_sum(sum) / (float)a.n_col + a.eps);
    for (uint32_t i = threadIdx.x; i < a.n_col; i += blockDim.x)
        out[i] = x[i] * scale * a.w[i];
}

kvd_status cuda_rms_norm(kvd_stream *st, const kvd_rms_norm_args *a, kvd_err *err)
{
    const cuda_backend *be       = cuda_enter(st);
    const uint32_t      n_thread = a->n_col >= 2048 ? 1024 : ELEM_THREADS;

    if (a->n_row == 0)
        return KVD_OK;
    cuda_launch(be, a->n_col <= NORM_OWN * n_thread ? rms_norm_kernel : rms_norm_wide_kernel,
                dim3(a->n_row), dim3(n_thread), 0, st->s, *a);
    return cuda_launched("rms_norm", err);
}

/* ---- SwiGLU ------------------------------------------------------------------------ */

static __device__ __forceinline__ float silu(float x)
{
    return x / (1.0f + expf(-x));
}

/* Four elements a thread, of token blockIdx.y; WIDE: they begin on 16 bytes. */
template <bool WIDE> static __global__ void swiglu_kernel(const kvd_swiglu_args a)
{
    const uint32_t i = 4 * (blockIdx.x * blockDim.x + threadIdx.x), t = blockIdx.y;
    const float   *gate = a.gate + t * a.gate_stride, *up = a.up + t * a.up_stride;
    float         *out = a.out + t * a.out_stride;

    cuda_pdl_go();
    cuda_pdl_wait();
    if (WIDE && i < a.n_col) {
        const float4 g = *(const float4 *)(gate + i), u = *(const float4 *)(up + i);

        *(float4 *)(out + i) =
            make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w);
    }
    for (uint32_t j = i; !WIDE && j < min(i + 4, a.n_col); j++)
        out[j] = silu(gate[j]) * up[j];
}

static bool swiglu_wide(const kvd_swiglu_args *a)
{
    return (((uintptr_t)a->gate | (uintptr_t)a->up | (uintptr_t)a->out) % 16 |
            (a->gate_stride | a->up_stride | a->out_stride | a->n_col) % 4) == 0;
}

kvd_status cuda_swiglu(kvd_stream *st, const kvd_swiglu_args *a, kvd_err *err)
{
    const cuda_backend *be = cuda_enter(st);
    const dim3          grid(cuda_div_up(a->n_col, 4 * ELEM_THREADS), a->n_token);

    if (a->n_token == 0 || a->n_col == 0)
        return KVD_OK;
    cuda_launch(be, swiglu_wide(a) ? swiglu_kernel<true> : swiglu_kernel<false>, grid,
                dim3(ELEM_THREADS), 0, st->s, *a);
    return cuda_launched("swiglu", err);
}
