/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_attn_decode.cu - attention row by row over bf16 keys, on tensor cores but with the precision
 * of floats: what cuda_attn_rows.cu does, quicker.
 *
 * A block takes one row, up to eight query heads of one KV head, and one split of the keys; a warp
 * 16 keys at a time.  K and V go from memory to registers as operands of mma.m16n8k16 as they are,
 * 16 bytes a load, because sums do not mind which channel is called which:
 *   - q K^T: thread (g = lane / 4, c = lane % 4) loads channels 32 i + 8 c .. + 7 of key 8 n + g;
 *     these are its operands of two steps, so step (i, h) has channel 32 i + 8 c + 4 h + ... there.
 *   - p V: it loads channels 64 j + 8 g .. + 7 of keys 2 c, 2 c + 1, 2 c + 8 and 2 c + 9, and pairs
 *     two keys' channels; so column g of tile 8 j + i is channel 64 j + 8 g + i.
 * Rows 0-7 of the left operand are heads, rounded to bf16; rows 8-15 what rounding has lost, so
 * that the sum of both halves has 16 bits of q and p. NC: groups of 64 channels. */
#include "backend/cuda/cuda_attn.cuh"
#include "backend/cuda/cuda_launch.cuh"

#define DEC_THREADS 128u
#define DEC_WARPS   (DEC_THREADS / 32)
#define DEC_HEADS   8u
#define DEC_KEYS    16u

typedef struct dec_args {
    kvd_attn_args a;
    uint32_t      first, n_split, n_tile; /* n_tile: of DEC_HEADS query heads of a KV head */
    float        *part;
} dec_args;

/* Of a thread: 16 keys of K and of V. */
template <uint32_t NC> struct dec_kv {
    uint4 k[2][2 * NC], v[4][NC];
};

template <uint32_t NC> struct dec_state {
    uint32_t q[4 * NC][4];
    float    o[8 * NC][4];
    float    max, sum; /* of head g; sum: over this thread's keys */
};

static __device__ __forceinline__ void dec_mma(float c[4], const uint32_t a[4], uint32_t b0,
                                               uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two floats as bf16, and what that has lost of them. */
static __device__ __forceinline__ void dec_round(float x, float y, uint32_t *high, uint32_t *low)
{
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    const __nv_bfloat162 l = __floats2bfloat162_rn(x - __low2float(h), y - __high2float(h));

    *high = *(const uint32_t *)&h;
    *low  = *(const uint32_t *)&l;
}

template <uint32_t NC>
static __device__ __forceinline__ void dec_init(dec_state<NC> &s, const dec_args &r, uint64_t row,
                                                uint32_t head0, uint32_t n_head)
{
    const uint32_t g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, dim = r.a.kv.head_dim;
    const float    scale = r.a.scale * ATTN_LOG2E;
    const float   *q     = r.a.q + row * r.a.q_stride + (uint64_t)(head0 + g) * dim;

#pragma unroll
    for (uint32_t i = 0; i < 4 * NC; i++) {
        const uint32_t ch    = 32 * (i / 2) + 8 * c + 4 * (i % 2);
        const bool     there = g < n_head && ch < dim; /* dim is a multiple of 8 */
#pragma unroll
        for (uint32_t k = 0; k < 2; k++)
            dec_round(there ? q[ch + 2 * k] * scale : 0.0f,
                      there ? q[ch + 2 * k + 1] * scale : 0.0f, &s.q[i][2 * k], &s.q[i][2 * k + 1]);
    }
#pragma unroll
    for (uint32_t i = 0; i < 8 * NC; i++)
        s.o[i][0] = s.o[i][1] = s.o[i][2] = s.o[i][3] = 0.0f;
    s.max = -INFINITY;
    s.sum = 0.0f;
}

static __device__ __forceinline__ uint4 dec_load(const uint8_t *row, uint32_t ch, uint32_t dim)
{
    uint4 v = make_uint4(0, 0, 0, 0);

    if (ch < dim)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(row + 2ull * ch));
    return v;
}

/* The lane's row of K of keys [t0, t0 + 16); those from end on are the last one again. */
static __device__ __forceinline__ uint64_t dec_row(const kvd_kv_layout &l, const uint64_t *block,
                                                   uint32_t kv_head, uint32_t t0, uint32_t end)
{
    return (uint64_t)cuda_kv_row(l, block, kv_head, min(t0 + threadIdx.x % DEC_KEYS, end - 1));
}

template <uint32_t NC>
static __device__ __forceinline__ void dec_fetch_k(dec_kv<NC> &kv, const kvd_kv_layout &l,
                                                   uint64_t own)
{
    const uint32_t g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;

#pragma unroll
    for (uint32_t n = 0; n < 2; n++) {
        const uint8_t *k = (const uint8_t *)__shfl_sync(0xffffffffu, own, 8 * n + g);
#pragma unroll
        for (uint32_t i = 0; i < 2 * NC; i++)
            kv.k[n][i] = dec_load(k, 32 * i + 8 * c, l.head_dim);
    }
}

template <uint32_t NC>
static __device__ __forceinline__ void dec_fetch_v(dec_kv<NC> &kv, const kvd_kv_layout &l,
                                                   uint64_t own)
{
    const uint32_t g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;

#pragma unroll
    for (uint32_t n = 0; n < 4; n++) {
        const uint32_t key = 2 * c + n % 2 + n / 2 * 8;
        const uint8_t *v = (const uint8_t *)__shfl_sync(0xffffffffu, own, key) + l.record_bytes / 2;
#pragma unroll
        for (uint32_t j = 0; j < NC; j++)
            kv.v[n][j] = dec_load(v, 64 * j + 8 * g, l.head_dim);
    }
}

/* Logits of head g for keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9. */
template <uint32_t NC>
static __device__ __forceinline__ void dec_logits(const dec_state<NC> &s, const dec_kv<NC> &kv,
                                                  float logit[4])
{
#pragma unroll
    for (uint32_t n = 0; n < 2; n++) {
        float x[4] = {};
#pragma unroll
        for (uint32_t i = 0; i < 2 * NC; i++) {
            dec_mma(x, s.q[2 * i], kv.k[n][i].x, kv.k[n][i].y);
            dec_mma(x, s.q[2 * i + 1], kv.k[n][i].z, kv.k[n][i].w);
        }
        logit[2 * n]     = x[0] + x[2];
        logit[2 * n + 1] = x[1] + x[3];
    }
}

/* Logits become operands p; sums and output are brought to the new maximum. */
template <uint32_t NC>
static __device__ __forceinline__ void dec_softmax(dec_state<NC> &s, float logit[4], uint32_t p[4])
{
    float max = fmaxf(fmaxf(logit[0], logit[1]), fmaxf(logit[2], logit[3]));

    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
    if (__any_sync(0xffffffffu, max > s.max)) {
        const float all   = fmaxf(max, s.max);
        const float alpha = exp2f(s.max - all);
#pragma unroll
        for (uint32_t i = 0; i < 8 * NC; i++) {
            s.o[i][0] *= alpha;
            s.o[i][1] *= alpha;
            s.o[i][2] *= alpha;
            s.o[i][3] *= alpha;
        }
        s.sum *= alpha;
        s.max = all;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        logit[i] = exp2f(logit[i] - s.max);
        s.sum += logit[i];
    }
    dec_round(logit[0], logit[1], &p[0], &p[1]);
    dec_round(logit[2], logit[3], &p[2], &p[3]);
}

template <uint32_t NC>
static __device__ __forceinline__ void dec_values(dec_state<NC> &s, const dec_kv<NC> &kv,
                                                  const uint32_t p[4])
{
#pragma unroll
    for (uint32_t j = 0; j < NC; j++) {
        const uint32_t v[4][4] = { { kv.v[0][j].x, kv.v[0][j].y, kv.v[0][j].z, kv.v[0][j].w },
                                   { kv.v[1][j].x, kv.v[1][j].y, kv.v[1][j].z, kv.v[1][j].w },
                                   { kv.v[2][j].x, kv.v[2][j].y, kv.v[2][j].z, kv.v[2][j].w },
                                   { kv.v[3][j].x, kv.v[3][j].y, kv.v[3][j].z, kv.v[3][j].w } };
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) { /* low halves are channel 2 i, high ones 2 i + 1 */
            dec_mma(s.o[8 * j + 2 * i], p, __byte_perm(v[0][i], v[1][i], 0x5410),
                    __byte_perm(v[2][i], v[3][i], 0x5410));
            dec_mma(s.o[8 * j + 2 * i + 1], p, __byte_perm(v[0][i], v[1][i], 0x7632),
                    __byte_perm(v[2][i], v[3][i], 0x7632));
        }
    }
}

/* The next 16 keys are asked for as soon as those before them are through, their values when these
 * are: there is always something on its way. */
template <uint32_t NC>
static __device__ __forceinline__ void dec_scan(dec_state<NC> &s, const kvd_kv_layout &l,
                                                const uint64_t *block, uint32_t kv_head,
                                                uint32_t t0, uint32_t end)
{
    const uint32_t c = threadIdx.x % 4;
    dec_kv<NC>     kv;
    uint64_t       own;

    if (t0 >= end)
        return;
    own = dec_row(l, block, kv_head, t0, end);
    dec_fetch_k<NC>(kv, l, own);
    dec_fetch_v<NC>(kv, l, own);
    for (; t0 < end; t0 += DEC_WARPS * DEC_KEYS) {
        float    logit[4];
        uint32_t p[4];

        own = dec_row(l, block, kv_head, t0 + DEC_WARPS * DEC_KEYS, end);
        dec_logits<NC>(s, kv, logit);
        dec_fetch_k<NC>(kv, l, own);
        if (t0 + DEC_KEYS > end) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                if (t0 + 2 * c + i % 2 + i / 2 * 8 >= end)
                    logit[i] = -INFINITY;
            }
        }
        dec_softmax<NC>(s, logit, p);
        dec_values<NC>(s, kv, p);
        dec_fetch_v<NC>(kv, l, own);
    }
}

template <uint32_t NC> struct dec_shared {
    float o[DEC_WARPS][DEC_HEADS][NC * 64], max[DEC_WARPS][DEC_HEADS], sum[DEC_WARPS][DEC_HEADS];
};

template <uint32_t NC>
static __device__ __forceinline__ void dec_publish(dec_shared<NC> &m, const dec_state<NC> &s)
{
    const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float          sum = s.sum;

    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (c == 0) {
        m.max[warp][g] = s.max;
        m.sum[warp][g] = sum;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8 * NC; i++) {
        float *to = &m.o[warp][g][64 * (i / 8) + 16 * c + i % 8];
        to[0]     = s.o[i][0] + s.o[i][2];
        to[8]     = s.o[i][1] + s.o[i][3];
    }
    __syncthreads();
}

/* Merges the block's warps and writes out, or a part where keys are split. */
template <uint32_t NC>
static __device__ __forceinline__ void dec_finish(const dec_shared<NC> &m, const dec_args &r,
                                                  uint32_t head, uint32_t g, uint64_t row)
{
    const uint32_t lane = threadIdx.x % 32, dim = r.a.kv.head_dim;
    float          all = -INFINITY, weight = 0.0f, alpha[DEC_WARPS];
    float         *to =
        r.part + (((uint64_t)blockIdx.z * r.a.n_head + head) * r.n_split + blockIdx.x) * (dim + 2);

    if (r.n_split == 1)
        to = r.a.out + row * r.a.out_stride + (uint64_t)head * dim;
#pragma unroll
    for (uint32_t w = 0; w < DEC_WARPS; w++)
        all = fmaxf(all, m.max[w][g]);
#pragma unroll
    for (uint32_t w = 0; w < DEC_WARPS; w++) {
        alpha[w] = m.sum[w][g] > 0.0f ? exp2f(m.max[w][g] - all) : 0.0f;
        weight += m.sum[w][g] * alpha[w];
    }
    for (uint32_t ch = lane; ch < dim; ch += 32) {
        float x = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < DEC_WARPS; w++)
            x += m.o[w][g][ch] * alpha[w];
        to[ch] = r.n_split == 1 ? x / weight : x;
    }
    if (r.n_split > 1 && lane == 0) {
        to[dim]     = all;
        to[dim + 1] = weight;
    }
}

template <uint32_t NC>
static __global__ void __launch_bounds__(DEC_THREADS) dec_kernel(const __grid_constant__ dec_args r)
{
    __shared__ dec_shared<NC> m;
    const kvd_attn_args      &a     = r.a;
    const uint32_t            group = a.n_head / a.kv.n_kv_head, warp = threadIdx.x / 32;
    const uint32_t            kv_head = blockIdx.y / r.n_tile, tile = blockIdx.y % r.n_tile;
    const uint32_t            n_head = min(DEC_HEADS, group - tile * DEC_HEADS);
    const uint32_t            head0  = kv_head * group + tile * DEC_HEADS;
    dec_state<NC>             s;
    kvd_kv_seq                seq;
    uint32_t                  in_seq, begin, end;

    cuda_pdl_go();
    cuda_pdl_wait();
    if (!cuda_find_row(a.seq, a.n_seq, r.first + blockIdx.z, &seq, &in_seq))
        return;
    const uint64_t row = seq.first_row + in_seq;

    cuda_attn_split(seq.n_past + in_seq + 1, r.n_split, &begin, &end);
    dec_init<NC>(s, r, row, head0, n_head);
    dec_scan<NC>(s, a.kv, seq.block, kv_head, begin + warp * DEC_KEYS, end);
    dec_publish<NC>(m, s);
    for (uint32_t g = warp; g < n_head; g += DEC_WARPS)
        dec_finish<NC>(m, r, head0 + g, g, row);
}

bool cuda_attn_decode_can(const kvd_kv_layout *kv)
{
    return kv->type == KVD_DTYPE_BF16 && kv->head_dim % 8 == 0 && kv->head_dim <= 128 &&
           cuda_attn_aligned(kv);
}

/* By registers: 246 of a thread, 128 for heads of up to 64. */
uint32_t cuda_attn_decode_blocks(const kvd_kv_layout *kv)
{
    return kv->head_dim <= 64 ? 4 : 2;
}

void cuda_attn_decode(const cuda_backend *be, const kvd_attn_args *a, uint32_t first, uint32_t n,
                      uint32_t n_split, float *part, cudaStream_t s)
{
    const uint32_t n_tile = cuda_div_up(a->n_head / a->kv.n_kv_head, DEC_HEADS);
    const dim3     grid(n_split, a->kv.n_kv_head * n_tile, n);
    const dec_args r = { *a, first, n_split, n_tile, part };

    cuda_launch(be, a->kv.head_dim <= 64 ? dec_kernel<1> : dec_kernel<2>, grid, dim3(DEC_THREADS),
                0, s, r);
}
