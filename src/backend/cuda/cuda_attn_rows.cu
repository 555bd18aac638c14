/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_attn_rows.cu - attention row by row, in float: decode, and whatever must be exact.
 *
 * A block takes one row, one KV head (or, for wide groups, GT of its query heads) and one split of
 * the keys; eight lanes share a key, so a warp works on four at a time.  Each lane keeps its part
 * of the weighted sums for all query heads of the tile, and K and V are read once for them.  Warps,
 * then splits, are merged by log-sum-exp, in a fixed order.  Logits are in units of log2.
 * NC: groups of 64 channels of a head. */
#include "backend/cuda/cuda_attn.cuh"
#include "backend/cuda/cuda_launch.cuh"

#define ROWS_THREADS 128u
#define ROWS_WARPS   (ROWS_THREADS / 32)
#define ROWS_KEYS    (ROWS_WARPS * 4) /* keys that a block works on at a time */

typedef struct rows_args {
    kvd_attn_args a;
    uint32_t      first, n_split, n_tile; /* n_tile: tiles of query heads of a KV head */
    bool          vec;                    /* rows of K and V are whole octets on 16 bytes */
    float        *part;
} rows_args;

/* Eight channels of a K or V row, as they lie in memory. */
template <bool F32> struct rows_raw {
    uint4 u[F32 ? 2 : 1];
};

/* Past the head, channels are 0. */
template <bool F32>
static __device__ __forceinline__ void rows_load(const uint8_t *row, uint32_t ch, uint32_t dim,
                                                 bool vec, rows_raw<F32> &r)
{
    const uint32_t n = F32 ? 2 : 1;
    uint32_t       word[4 * n];

    if (vec && ch < dim) {
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            r.u[i] = __ldg((const uint4 *)(row + (F32 ? 4ull : 2ull) * ch) + i);
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4 * n; i++) {
        const uint32_t c = F32 ? ch + i : ch + 2 * i;

        word[i] = 0;
        if (!vec && F32 && c < dim)
            word[i] = ((const uint32_t *)row)[c];
        if (!vec && !F32 && c < dim)
            word[i] = ((const uint16_t *)row)[c];
        if (!vec && !F32 && c + 1 < dim)
            word[i] |= (uint32_t)((const uint16_t *)row)[c + 1] << 16;
    }
#pragma unroll
    for (uint32_t i = 0; i < n; i++)
        r.u[i] = make_uint4(word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]);
}

template <bool F32>
static __device__ __forceinline__ void rows_unpack(const rows_raw<F32> &r, float *v)
{
#pragma unroll
    for (uint32_t i = 0; i < (F32 ? 2 : 1); i++) {
        const uint32_t u[4] = { r.u[i].x, r.u[i].y, r.u[i].z, r.u[i].w };
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            if (F32) {
                v[4 * i + j] = __uint_as_float(u[j]);
            } else {
                v[2 * j]     = __uint_as_float(u[j] << 16);
                v[2 * j + 1] = __uint_as_float(u[j] & 0xffff0000u);
            }
        }
    }
}

/* A lane's part of one key and its value. */
template <bool F32, uint32_t NC> struct rows_pair {
    rows_raw<F32> k[NC], v[NC];
};

template <bool F32, uint32_t NC>
static __device__ __forceinline__ void rows_fetch(rows_pair<F32, NC> &p, const kvd_kv_layout &kv,
                                                  const uint64_t *block, uint32_t kv_head,
                                                  uint32_t key, uint32_t sub, bool vec)
{
    const uint8_t *k = cuda_kv_row(kv, block, kv_head, key);

#pragma unroll
    for (uint32_t c = 0; c < NC; c++) {
        rows_load<F32>(k, c * 64 + sub * 8, kv.head_dim, vec, p.k[c]);
        rows_load<F32>(k + kv.record_bytes / 2, c * 64 + sub * 8, kv.head_dim, vec, p.v[c]);
    }
}

/* What a lane knows of the softmax over its own keys. */
template <uint32_t NC, uint32_t GT> struct rows_state {
    float max[GT], sum[GT], acc[GT][NC * 8];
};

template <uint32_t NC, uint32_t GT>
static __device__ __forceinline__ void rows_init(rows_state<NC, GT> &s)
{
#pragma unroll
    for (uint32_t g = 0; g < GT; g++) {
        s.max[g] = -INFINITY;
        s.sum[g] = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < NC * 8; i++)
            s.acc[g][i] = 0.0f;
    }
}

/* Logits of one key; the eight lanes that share it all get them. */
template <bool F32, uint32_t NC, uint32_t GT>
static __device__ __forceinline__ void rows_logits(const rows_pair<F32, NC> &kv, const float *q,
                                                   uint32_t sub, float *logit)
{
#pragma unroll
    for (uint32_t g = 0; g < GT; g++)
        logit[g] = 0.0f;
#pragma unroll
    for (uint32_t c = 0; c < NC; c++) {
        float x[8];

        rows_unpack<F32>(kv.k[c], x);
#pragma unroll
        for (uint32_t g = 0; g < GT; g++) {
            const float4 *y = (const float4 *)(q + g * NC * 64 + c * 64 + sub * 8);
            const float4  u = y[0], v = y[1];

            logit[g] += x[0] * u.x + x[1] * u.y + x[2] * u.z + x[3] * u.w + x[4] * v.x +
                        x[5] * v.y + x[6] * v.z + x[7] * v.w;
        }
    }
#pragma unroll
    for (uint32_t g = 0; g < GT; g++) {
#pragma unroll
        for (int d = 4; d; d >>= 1)
            logit[g] += __shfl_xor_sync(0xffffffffu, logit[g], d);
    }
}

template <bool F32, uint32_t NC, uint32_t GT>
static __device__ __forceinline__ void rows_add(rows_state<NC, GT> &s, const rows_pair<F32, NC> &kv,
                                                const float *logit, bool there)
{
    float p[GT];

#pragma unroll
    for (uint32_t g = 0; g < GT; g++) {
        const float max = there ? fmaxf(s.max[g], logit[g]) : s.max[g];
        p[g]            = there ? exp2f(logit[g] - max) : 0.0f;
        if (max > s.max[g]) {
            const float alpha = exp2f(s.max[g] - max);
            s.sum[g] *= alpha;
#pragma unroll
            for (uint32_t i = 0; i < NC * 8; i++)
                s.acc[g][i] *= alpha;
            s.max[g] = max;
        }
        s.sum[g] += p[g];
    }
#pragma unroll
    for (uint32_t c = 0; c < NC; c++) {
        float x[8];

        rows_unpack<F32>(kv.v[c], x);
#pragma unroll
        for (uint32_t g = 0; g < GT; g++) {
#pragma unroll
            for (uint32_t i = 0; i < 8; i++)
                s.acc[g][c * 8 + i] = fmaf(p[g], x[i], s.acc[g][c * 8 + i]);
        }
    }
}

/* The four groups of eight lanes of a warp become one. */
template <uint32_t NC, uint32_t GT>
static __device__ __forceinline__ void rows_merge_warp(rows_state<NC, GT> &s)
{
#pragma unroll
    for (uint32_t g = 0; g < GT; g++) {
        float max = s.max[g], alpha;

        max   = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 8));
        max   = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 16));
        alpha = s.max[g] == -INFINITY ? 0.0f : exp2f(s.max[g] - max);
        s.sum[g] *= alpha;
        s.sum[g] += __shfl_xor_sync(0xffffffffu, s.sum[g], 8);
        s.sum[g] += __shfl_xor_sync(0xffffffffu, s.sum[g], 16);
#pragma unroll
        for (uint32_t i = 0; i < NC * 8; i++) {
            float x = s.acc[g][i] * alpha;
            x += __shfl_xor_sync(0xffffffffu, x, 8);
            x += __shfl_xor_sync(0xffffffffu, x, 16);
            s.acc[g][i] = x;
        }
        s.max[g] = max;
    }
}

/* Merges the block's warps and writes out, or a part where keys are split. */
template <uint32_t NC, uint32_t GT>
static __device__ void rows_finish(const rows_args &r, const rows_state<NC, GT> &s, uint32_t head0,
                                   uint32_t n_head, uint64_t row)
{
    __shared__ float acc[ROWS_WARPS][NC * 64], max[ROWS_WARPS][GT], sum[ROWS_WARPS][GT];
    const uint32_t   warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = r.a.kv.head_dim;

    for (uint32_t g = 0; g < GT; g++) {
        if (lane == 0) {
            max[warp][g] = s.max[g];
            sum[warp][g] = s.sum[g];
        }
    }
#pragma unroll
    for (uint32_t g = 0; g < GT; g++) {
        float all = -INFINITY, weight = 0.0f;

        __syncthreads(); /* acc of the head before has been read */
        if (lane < 8) {
#pragma unroll
            for (uint32_t i = 0; i < NC * 8; i++)
                acc[warp][i / 8 * 64 + lane * 8 + i % 8] = s.acc[g][i];
        }
        __syncthreads();
        if (g >= n_head)
            continue;
        for (uint32_t w = 0; w < ROWS_WARPS; w++)
            all = fmaxf(all, max[w][g]);
        for (uint32_t w = 0; w < ROWS_WARPS; w++)
            weight += sum[w][g] > 0.0f ? sum[w][g] * exp2f(max[w][g] - all) : 0.0f;
        const uint32_t head = head0 + g;
        float *to = r.part + (((uint64_t)blockIdx.z * r.a.n_head + head) * r.n_split + blockIdx.x) *
                                 (dim + 2);
        if (r.n_split == 1)
            to = r.a.out + row * r.a.out_stride + (uint64_t)head * dim;
        for (uint32_t i = threadIdx.x; i < dim; i += blockDim.x) {
            float x = 0.0f;
            for (uint32_t w = 0; w < ROWS_WARPS; w++)
                x += sum[w][g] > 0.0f ? acc[w][i] * exp2f(max[w][g] - all) : 0.0f;
            to[i] = r.n_split == 1 ? x / weight : x;
        }
        if (r.n_split > 1 && threadIdx.x == 0) {
            to[dim]     = all;
            to[dim + 1] = weight;
        }
    }
}

/* Keys [t0, t0 + 4), then those ROWS_KEYS further, ..., below end; where registers hold them, the
 * next are on their way while these are worked on. */
template <bool F32, uint32_t NC, uint32_t GT>
static __device__ __forceinline__ void rows_scan(rows_state<NC, GT> &s, const rows_args &r,
                                                 const uint64_t *block, uint32_t kv_head,
                                                 const float *q, uint32_t t0, uint32_t end)
{
    constexpr bool     ahead = NC * (F32 ? 2 : 1) <= 4;
    const uint32_t     sub = threadIdx.x % 8, quad = threadIdx.x % 32 / 8;
    rows_pair<F32, NC> now, next;
    float              logit[GT];

    if (ahead && t0 < end)
        rows_fetch<F32, NC>(next, r.a.kv, block, kv_head, min(t0 + quad, end - 1), sub, r.vec);
    for (; t0 < end; t0 += ROWS_KEYS) {
        if (ahead)
            now = next;
        else
            rows_fetch<F32, NC>(now, r.a.kv, block, kv_head, min(t0 + quad, end - 1), sub, r.vec);
        if (ahead && t0 + ROWS_KEYS < end)
            rows_fetch<F32, NC>(next, r.a.kv, block, kv_head, min(t0 + ROWS_KEYS + quad, end - 1),
                                sub, r.vec);
        rows_logits<F32, NC, GT>(now, q, sub, logit);
        rows_add<F32, NC, GT>(s, now, logit, t0 + quad < end);
    }
}

template <bool F32, uint32_t NC, uint32_t GT>
static __global__ void __launch_bounds__(ROWS_THREADS)
    rows_kernel(const __grid_constant__ rows_args r)
{
    __shared__ __align__(16) float q_s[GT * NC * 64];
    const kvd_attn_args           &a     = r.a;
    const uint32_t                 group = a.n_head / a.kv.n_kv_head, dim = a.kv.head_dim;
    const uint32_t                 kv_head = blockIdx.y / r.n_tile, tile = blockIdx.y % r.n_tile;
    const uint32_t     n_head = min(GT, group - tile * GT), head0 = kv_head * group + tile * GT;
    const uint32_t     warp = threadIdx.x / 32;
    rows_state<NC, GT> s;
    kvd_kv_seq         seq;
    uint32_t           in_seq, begin, end;

    cuda_pdl_go();
    cuda_pdl_wait();
    if (!cuda_find_row(a.seq, a.n_seq, r.first + blockIdx.z, &seq, &in_seq))
        return;
    const uint64_t row = seq.first_row + in_seq;

    cuda_attn_split(seq.n_past + in_seq + 1, r.n_split, &begin, &end);
    for (uint32_t i = threadIdx.x; i < GT * NC * 64; i += blockDim.x) {
        const uint32_t g = i / (NC * 64), c = i % (NC * 64);
        q_s[i] = g < n_head && c < dim ? a.q[row * a.q_stride + (uint64_t)(head0 + g) * dim + c] *
                                             (a.scale * ATTN_LOG2E)
                                       : 0.0f;
    }
    __syncthreads();
    rows_init<NC, GT>(s);
    rows_scan<F32, NC, GT>(s, r, seq.block, kv_head, q_s, begin + warp * 4, end);
    rows_merge_warp<NC, GT>(s);
    rows_finish<NC, GT>(r, s, head0, n_head, row);
}

#define MERGE_THREADS 128u

/* A block a head of a row: the splits' parts become the result.  Weights first, so that the sums
 * over splits are loads that wait for nothing. */
static __global__ void __launch_bounds__(MERGE_THREADS)
    rows_merge_kernel(const __grid_constant__ rows_args r)
{
    __shared__ float weight[ATTN_SPLIT_MAX], sum_s;
    const uint32_t   head = blockIdx.x, dim = r.a.kv.head_dim, n = r.n_split;
    kvd_kv_seq       seq;
    uint32_t         in_seq;

    cuda_pdl_go();
    cuda_pdl_wait();
    if (!cuda_find_row(r.a.seq, r.a.n_seq, r.first + blockIdx.y, &seq, &in_seq))
        return;
    const float *part = r.part + ((uint64_t)blockIdx.y * r.a.n_head + head) * n * (dim + 2);
    float       *out  = r.a.out + (seq.first_row + in_seq) * r.a.out_stride + (uint64_t)head * dim;

    if (threadIdx.x < 32) {
        float max = -INFINITY, sum = 0.0f;
        for (uint32_t i = threadIdx.x; i < n; i += 32)
            max = fmaxf(max, part[(uint64_t)i * (dim + 2) + dim]);
        max = cuda_warp_max(max);
        for (uint32_t i = threadIdx.x; i < n; i += 32) {
            const float *p = part + (uint64_t)i * (dim + 2) + dim;
            weight[i]      = p[1] > 0.0f ? exp2f(p[0] - max) : 0.0f;
            sum += p[1] * weight[i];
        }
        sum = cuda_warp_sum(sum);
        if (threadIdx.x == 0)
            sum_s = sum;
    }
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < dim; c += MERGE_THREADS) {
        float x = 0.0f;
#pragma unroll 16
        for (uint32_t i = 0; i < n; i++)
            x = fmaf(part[(uint64_t)i * (dim + 2) + c], weight[i], x);
        out[c] = x / sum_s;
    }
}

template <bool F32, uint32_t NC, uint32_t GT>
static void rows_launch(const cuda_backend *be, rows_args *r, uint32_t n, cudaStream_t s)
{
    const uint32_t group = r->a.n_head / r->a.kv.n_kv_head;

    r->n_tile = cuda_div_up(group, GT);
    cuda_launch(be, rows_kernel<F32, NC, GT>, dim3(r->n_split, r->a.kv.n_kv_head * r->n_tile, n),
                dim3(ROWS_THREADS), 0, s, *r);
}

/* The tile of query heads that holds the group, within what registers hold: NC * GT <= 16. */
template <bool F32, uint32_t NC>
static void rows_choose(const cuda_backend *be, rows_args *r, uint32_t n, cudaStream_t s)
{
    const uint32_t     group = r->a.n_head / r->a.kv.n_kv_head;
    constexpr uint32_t most  = NC >= 8 ? 2 : NC == 4 ? 4 : 8;

    if (group == 1)
        rows_launch<F32, NC, 1>(be, r, n, s);
    else if (group == 2 || most == 2)
        rows_launch<F32, NC, 2>(be, r, n, s);
    else if (group <= 4 || most == 4)
        rows_launch < F32, NC, most<4 ? most : 4>(be, r, n, s);
    else
        rows_launch<F32, NC, most>(be, r, n, s);
}

template <bool F32>
static void rows_width(const cuda_backend *be, rows_args *r, uint32_t n, cudaStream_t s)
{
    if (r->a.kv.head_dim <= 64)
        rows_choose<F32, 1>(be, r, n, s);
    else if (r->a.kv.head_dim <= 128)
        rows_choose<F32, 2>(be, r, n, s);
    else if (r->a.kv.head_dim <= 256)
        rows_choose<F32, 4>(be, r, n, s);
    else
        rows_choose<F32, 8>(be, r, n, s);
}

void cuda_attn_rows(const cuda_backend *be, const kvd_attn_args *a, uint32_t first, uint32_t n,
                    uint32_t n_split, float *part, cudaStream_t s)
{
    rows_args r = {};

    r.a       = *a;
    r.first   = first;
    r.n_split = n_split;
    r.part    = part;
    r.vec     = a->kv.head_dim % 8 == 0 && cuda_attn_aligned(&a->kv);
    if (a->kv.type == KVD_DTYPE_F32)
        rows_width<true>(be, &r, n, s);
    else
        rows_width<false>(be, &r, n, s);
}

void cuda_attn_merge(const cuda_backend *be, const kvd_attn_args *a, uint32_t first, uint32_t n,
                     uint32_t n_split, const float *part, cudaStream_t s)
{
    rows_args r = {};

    r.a       = *a;
    r.first   = first;
    r.n_split = n_split;
    r.part    = (float *)part;
    cuda_launch(be, rows_merge_kernel, dim3(a->n_head, n), dim3(MERGE_THREADS), 0, s, r);
}
