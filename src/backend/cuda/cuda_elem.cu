/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_elem.cu - embedding, norms, RoPE, SwiGLU and the append to the KV pool.
 * Sums of squares in float, by a fixed tree: a row's result does not depend on the others. */
#include "backend/cuda/cuda_dequant.cuh"
#include "backend/cuda/cuda_impl.h"

#define ELEM_THREADS 256u
#define KV_THREADS   128u /* of the append: about a head */

/* ---- embedding --------------------------------------------------------------------- */

template <kvd_dtype T, bool A>
static __global__ void embed_kernel(kvd_weight table, const int32_t *token, float *out)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = table.n_col;
    const uint8_t *row =
        (const uint8_t *)table.data + (uint64_t)token[blockIdx.x] * table.row_bytes;
    float *to = out + (uint64_t)blockIdx.x * n;

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

static __global__ void rms_norm_kernel(kvd_rms_norm_args a)
{
    const float *x   = a.x + blockIdx.x * a.x_stride;
    float       *out = a.out + blockIdx.x * a.out_stride;
    float        sum = 0.0f, scale;

    for (uint32_t i = threadIdx.x; i < a.n_col; i += blockDim.x)
        sum += x[i] * x[i];
    scale = rsqrtf(block_sum(sum) / (float)a.n_col + a.eps);
    for (uint32_t i = threadIdx.x; i < a.n_col; i += blockDim.x)
        out[i] = x[i] * scale * a.w[i];
}

kvd_status cuda_rms_norm(kvd_stream *st, const kvd_rms_norm_args *a, kvd_err *err)
{
    if (a->n_row == 0)
        return KVD_OK;
    cuda_enter(st);
    rms_norm_kernel<<<a->n_row, a->n_col >= 2048 ? 1024 : ELEM_THREADS, 0, st->s>>>(*a);
    return cuda_launched("rms_norm", err);
}

/* One warp a head. */
static __global__ void head_norm_kernel(kvd_head_norm_args a)
{
    const uint64_t item = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    float          sum  = 0.0f, scale;
    float         *x;

    if (item >= (uint64_t)a.n_token * a.n_head)
        return;
    x = a.x + item / a.n_head * a.x_stride + item % a.n_head * a.head_dim;
    for (uint32_t i = lane; i < a.head_dim; i += 32)
        sum += x[i] * x[i];
    scale = rsqrtf(cuda_warp_sum(sum) / (float)a.head_dim + a.eps);
    for (uint32_t i = lane; i < a.head_dim; i += 32)
        x[i] = x[i] * scale * a.w[i];
}

kvd_status cuda_head_norm(kvd_stream *st, const kvd_head_norm_args *a, kvd_err *err)
{
    const uint64_t n = (uint64_t)a->n_token * a->n_head;

    if (n == 0)
        return KVD_OK;
    cuda_enter(st);
    head_norm_kernel<<<cuda_div_up(n, ELEM_THREADS / 32), ELEM_THREADS, 0, st->s>>>(*a);
    return cuda_launched("head_norm", err);
}

/* ---- RoPE and SwiGLU --------------------------------------------------------------- */

static __global__ void rope_kernel(kvd_rope_args a)
{
    const uint32_t half = a.n_rot / 2;
    const uint64_t item = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; /* [token][head][pair] */
    const uint64_t per_token = (uint64_t)a.n_head * half;

    if (item >= a.n_token * per_token)
        return;
    const uint64_t t = item / per_token;
    const uint32_t h = (uint32_t)(item % per_token) / half, i = (uint32_t)(item % per_token) % half;
    const float   *cs = a.cos_sin + t * a.n_rot;
    float         *x  = a.x + t * a.x_stride + (uint64_t)h * a.head_dim;
    float         *x0 = a.neox ? x + i : x + 2 * i, *x1 = a.neox ? x + i + half : x + 2 * i + 1;
    const float    c = cs[i], s = cs[half + i], u = *x0, v = *x1;

    *x0 = u * c - v * s;
    *x1 = u * s + v * c;
}

kvd_status cuda_rope(kvd_stream *st, const kvd_rope_args *a, kvd_err *err)
{
    const uint64_t n = (uint64_t)a->n_token * a->n_head * (a->n_rot / 2);

    kvd_assert(a->n_rot % 2 == 0 && a->n_rot <= a->head_dim);
    if (n == 0)
        return KVD_OK;
    cuda_enter(st);
    rope_kernel<<<cuda_div_up(n, ELEM_THREADS), ELEM_THREADS, 0, st->s>>>(*a);
    return cuda_launched("rope", err);
}

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
    const dim3 grid(cuda_div_up(a->n_col, 4 * ELEM_THREADS), a->n_token);

    if (a->n_token == 0 || a->n_col == 0)
        return KVD_OK;
    cuda_enter(st);
    if (swiglu_wide(a))
        swiglu_kernel<true><<<grid, ELEM_THREADS, 0, st->s>>>(*a);
    else
        swiglu_kernel<false><<<grid, ELEM_THREADS, 0, st->s>>>(*a);
    return cuda_launched("swiglu", err);
}

/* ---- append ------------------------------------------------------------------------ */

/* To nearest even, NaN stays NaN: the bits of kvd_f32_to_bf16(). */
static __device__ __forceinline__ uint16_t to_bf16(float f)
{
    const uint32_t u = __float_as_uint(f);

    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static __device__ void store_row(const kvd_kv_layout &kv, const float *x, uint8_t *to)
{
    for (uint32_t i = threadIdx.x; i < kv.head_dim; i += blockDim.x) {
        if (kv.type == KVD_DTYPE_F32)
            ((float *)to)[i] = x[i];
        else
            ((uint16_t *)to)[i] = to_bf16(x[i]);
    }
}

/* One block a row of the batch and a KV head. */
static __global__ void kv_append_kernel(kvd_kv_append_args a)
{
    const uint32_t h   = blockIdx.y;
    const uint64_t off = (uint64_t)h * a.kv.head_dim;
    kvd_kv_seq     q;
    uint32_t       r;

    if (!cuda_find_row(a.seq, a.n_seq, blockIdx.x, &q, &r))
        return;
    const uint64_t row = q.first_row + r;
    uint8_t       *to  = cuda_kv_row(a.kv, q.block, h, q.n_past + r);

    store_row(a.kv, a.k + row * a.k_stride + off, to);
    store_row(a.kv, a.v + row * a.v_stride + off, to + a.kv.record_bytes / 2);
}

kvd_status cuda_kv_append(kvd_stream *st, const kvd_kv_append_args *a, kvd_err *err)
{
    if (a->n_seq == 0 || a->n_token == 0)
        return KVD_OK;
    cuda_enter(st);
    kv_append_kernel<<<dim3(a->n_token, a->kv.n_kv_head), KV_THREADS, 0, st->s>>>(*a);
    return cuda_launched("kv_append", err);
}
