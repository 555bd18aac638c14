/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_heads.cu - what is done to heads of q, k and v after their projection: norm, RoPE, the
 * append to the KV pool; as ops of their own and as the one of a step.
 * Sums of squares in float, by a fixed tree: a head's result does not depend on the others. */
#include "backend/cuda/cuda_launch.cuh"

#define HEADS_WARPS 4u
#define KV_THREADS  128u /* of the append alone: about a head */

/* To nearest even, NaN stays NaN: the bits of kvd_f32_to_bf16(). */
static __device__ __forceinline__ uint16_t to_bf16(float f)
{
    const uint32_t u = __float_as_uint(f);

    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* By n threads, of which this one is number i. */
static __device__ __forceinline__ void store_row(const kvd_kv_layout &kv, const float *x,
                                                 uint8_t *to, uint32_t i, uint32_t n)
{
    for (; i < kv.head_dim; i += n) {
        if (kv.type == KVD_DTYPE_F32)
            ((float *)to)[i] = x[i];
        else
            ((uint16_t *)to)[i] = to_bf16(x[i]);
    }
}

/* ---- norm, RoPE, append in one -------------------------------------------------------- */

/* The sequence of a row of the batch, by a warp together; false: of none. */
static __device__ __forceinline__ bool heads_find(const kvd_kv_append_args &a, uint32_t row,
                                                  kvd_kv_seq *q)
{
    for (uint32_t first = 0; first < a.n_seq; first += 32) {
        const uint32_t i   = first + threadIdx.x % 32;
        const bool     own = i < a.n_seq && row - a.seq[i].first_row < a.seq[i].n_row;
        const uint32_t any = __ballot_sync(0xffffffffu, own);

        if (any) {
            *q = a.seq[first + __ffs((int)any) - 1];
            return true;
        }
    }
    return false;
}

/* Norm and rotation of a head by a warp; room ends up with the same as x. */
static __device__ __forceinline__ void heads_turn(const kvd_qkv_finish_args &a, uint32_t token,
                                                  float *x, const float *norm, float *room)
{
    const uint32_t lane = threadIdx.x % 32, half = a.n_rot / 2;
    const float   *cs  = a.cos_sin + (uint64_t)token * a.n_rot;
    float          sum = 0.0f, scale;

    for (uint32_t i = lane; i < a.head_dim; i += 32) {
        room[i] = x[i];
        sum += room[i] * room[i];
    }
    if (norm) {
        scale = rsqrtf(cuda_warp_sum(sum) / (float)a.head_dim + a.eps);
        for (uint32_t i = lane; i < a.head_dim; i += 32)
            room[i] = room[i] * scale * norm[i];
    }
    __syncwarp();
    for (uint32_t i = lane; i < half; i += 32) {
        float      *x0 = a.neox ? room + i : room + 2 * i;
        float      *x1 = a.neox ? room + i + half : room + 2 * i + 1;
        const float c = cs[i], s = cs[half + i], u = *x0, v = *x1;

        *x0 = u * c - v * s;
        *x1 = u * s + v * c;
    }
    __syncwarp();
    for (uint32_t i = lane; i < a.head_dim; i += 32)
        x[i] = room[i];
}

/* A warp a head: those of q, of k, and of v where there is an append. */
static __global__ void __launch_bounds__(HEADS_WARPS * 32)
    heads_kernel(const __grid_constant__ kvd_qkv_finish_args a)
{
    __shared__ float rooms[HEADS_WARPS][KVD_HEAD_DIM_MAX];
    float           *room  = rooms[threadIdx.x / 32];
    const float     *x     = room;
    const uint32_t   token = blockIdx.y;
    uint32_t         head  = blockIdx.x * HEADS_WARPS + threadIdx.x / 32;
    kvd_kv_seq       seq;

    cuda_pdl_go();
    cuda_pdl_wait();
    if (head < a.n_head) {
        heads_turn(a, token, a.q + token * a.q_stride + (uint64_t)head * a.head_dim, a.q_norm,
                   room);
        return;
    }
    head -= a.n_head;
    if (head >= 2 * a.n_kv_head)
        return;
    const bool     v   = head >= a.n_kv_head;
    const uint32_t kv  = v ? head - a.n_kv_head : head;
    const uint64_t off = (uint64_t)kv * a.head_dim;

    if (v)
        x = a.store.v + token * a.store.v_stride + off;
    else
        heads_turn(a, token, a.k + token * a.store.k_stride + off, a.k_norm, room);
    if (!heads_find(a.store, token, &seq))
        return;
    uint8_t *to = cuda_kv_row(a.store.kv, seq.block, kv, seq.n_past + token - seq.first_row);

    store_row(a.store.kv, x, v ? to + a.store.kv.record_bytes / 2 : to, threadIdx.x % 32, 32);
}

static kvd_status heads_run(kvd_stream *st, const kvd_qkv_finish_args *a, const char *op,
                            kvd_err *err)
{
    const cuda_backend *be     = cuda_enter(st);
    const uint32_t      n_item = a->n_head + a->n_kv_head * 2;

    kvd_assert(a->n_rot % 2 == 0 && a->n_rot <= a->head_dim && a->head_dim <= KVD_HEAD_DIM_MAX);
    if (a->n_token == 0 || n_item == 0)
        return KVD_OK;
    cuda_launch(be, heads_kernel, dim3(cuda_div_up(n_item, HEADS_WARPS), a->n_token),
                dim3(HEADS_WARPS * 32), 0, st->s, *a);
    return cuda_launched(op, err);
}

kvd_status cuda_qkv_finish(kvd_stream *st, const kvd_qkv_finish_args *a, kvd_err *err)
{
    kvd_assert(a->k == a->store.k);
    return heads_run(st, a, "qkv_finish", err);
}

kvd_status cuda_head_norm(kvd_stream *st, const kvd_head_norm_args *a, kvd_err *err)
{
    kvd_qkv_finish_args f = {};

    f.n_token  = a->n_token;
    f.n_head   = a->n_head;
    f.head_dim = a->head_dim;
    f.q_stride = a->x_stride;
    f.q        = a->x;
    f.q_norm   = a->w;
    f.eps      = a->eps;
    return heads_run(st, &f, "head_norm", err);
}

kvd_status cuda_rope(kvd_stream *st, const kvd_rope_args *a, kvd_err *err)
{
    kvd_qkv_finish_args f = {};

    f.n_token  = a->n_token;
    f.n_head   = a->n_head;
    f.head_dim = a->head_dim;
    f.n_rot    = a->n_rot;
    f.neox     = a->neox;
    f.q_stride = a->x_stride;
    f.q        = a->x;
    f.cos_sin  = a->cos_sin;
    return heads_run(st, &f, "rope", err);
}

/* ---- append alone ---------------------------------------------------------------------- */

/* One block a row of the batch and a KV head. */
static __global__ void kv_append_kernel(const kvd_kv_append_args a)
{
    const uint32_t h   = blockIdx.y;
    const uint64_t off = (uint64_t)h * a.kv.head_dim;
    kvd_kv_seq     q;
    uint32_t       r;

    cuda_pdl_wait();
    if (!cuda_find_row(a.seq, a.n_seq, blockIdx.x, &q, &r))
        return;
    const uint64_t row = q.first_row + r;
    uint8_t       *to  = cuda_kv_row(a.kv, q.block, h, q.n_past + r);

    store_row(a.kv, a.k + row * a.k_stride + off, to, threadIdx.x, blockDim.x);
    store_row(a.kv, a.v + row * a.v_stride + off, to + a.kv.record_bytes / 2, threadIdx.x,
              blockDim.x);
}

kvd_status cuda_kv_append(kvd_stream *st, const kvd_kv_append_args *a, kvd_err *err)
{
    const cuda_backend *be = cuda_enter(st);

    if (a->n_seq == 0 || a->n_token == 0)
        return KVD_OK;
    cuda_launch(be, kv_append_kernel, dim3(a->n_token, a->kv.n_kv_head), dim3(KV_THREADS), 0, st->s,
                *a);
    return cuda_launched("kv_append", err);
}
