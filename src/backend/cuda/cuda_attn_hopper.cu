/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_attn_hopper.cu - causal attention of many rows over bf16 keys, on the tensor cores of
 * compute capability 9.0.  Compiled for sm_90a alone.
 *
 * A block takes 128 rows of one sequence and one query head: two warp groups of 64 rows each, and a
 * third that has tiles of 128 keys brought to shared memory by the copy engine (TMA), straight from
 * the records.  Within a warp group the logits of a tile are computed while the weights of the tile
 * before it meet their values, and the softmax runs beside that (Shah et al., arXiv:2407.08608);
 * the two warp groups take turns at the tensor cores.  Keys go from the last tile to the first, so
 * that only the first ones are masked.  Logits are in units of log2. */
#include <cuda.h>

#include "backend/cuda/cuda_attn.cuh"
#include "backend/cuda/cuda_barrier.cuh"

#define HOP_KEYS    128u
#define HOP_ROWS    128u /* of a block */
#define HOP_GROUP   128u /* threads of a warp group, which has 64 of the rows */
#define HOP_THREADS (3 * HOP_GROUP)
#define HOP_HALF    (HOP_KEYS * 128u) /* bytes: 64 elements of each row of a tile */
#define HOP_WARPS   8u                /* that read keys and values */
#define HOP_UNIT    64u               /* bytes that a coordinate of the pool counts */

/* Tiles as wgmma reads them: rows of 128 bytes, their 16-byte pieces swizzled by the row. */
template <uint32_t D> struct hop_tiles {
    uint8_t  q[HOP_ROWS][2 * D]; /* on its way to registers; pieces changed about likewise */
    uint8_t  k[2][D / 64][HOP_HALF];
    uint8_t  v[2][D / 64][HOP_HALF];
    uint64_t k_full[2], k_free[2], v_full[2], v_free[2]; /* barriers */
};

/* What a thread holds: rows lane / 4 and lane / 4 + 8 of its warp's 16, columns 2 (lane % 4) and
 * the next, of each 8 columns. */
template <uint32_t D> struct hop_rows {
    float    s[HOP_KEYS / 2], o[D / 2];
    uint32_t q[D / 4];        /* in bf16, scaled */
    uint32_t p[HOP_KEYS / 4]; /* weights in bf16 */
    float    max[2], sum[2], alpha[2];
};

/* What a block has. */
struct hop_job {
    kvd_kv_seq seq;
    uint32_t   first, head; /* row in the sequence */
    uint32_t   n_tile;
};

/* ---- instructions ------------------------------------------------------------------ */

/* One arrival of a warp. */
static __device__ __forceinline__ void hop_bar_arrive(uint64_t *bar)
{
    if (threadIdx.x % 32 == 0)
        bar_arrive(bar);
}
/* Barriers of threads: 1 and 2 of a warp group, 3 and 4 for turns. */
static __device__ __forceinline__ void hop_sync(uint32_t id, uint32_t n)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}
static __device__ __forceinline__ void hop_arrive(uint32_t id, uint32_t n)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}
static __device__ __forceinline__ void hop_fence_proxy(void)
{
    asm volatile("fence.proxy.async;" ::: "memory");
}
static __device__ __forceinline__ void hop_load(void *to, const CUtensorMap *map, uint64_t *bar,
                                                uint32_t dim, uint32_t record, uint64_t off)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(bar_addr(to)),
                 "l"(map), "r"(bar_addr(bar)), "r"(dim), "r"(0), "r"(record),
                 "r"((uint32_t)(off % HOP_UNIT / 16)), "r"((uint32_t)(off / HOP_UNIT))
                 : "memory");
}

static __device__ __forceinline__ float hop_exp2(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ uint32_t hop_pack(float lo, float hi)
{
    uint32_t v;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static __device__ __forceinline__ void hop_mma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void hop_mma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> static __device__ __forceinline__ void hop_mma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Nothing that reads or writes x moves across. */
template <uint32_t N> static __device__ __forceinline__ void hop_keep(float (&x)[N])
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        asm volatile("" : "+f"(x[i])::"memory");
}
template <uint32_t N> static __device__ __forceinline__ void hop_keep(uint32_t (&x)[N])
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        asm volatile("" : "+r"(x[i])::"memory");
}

/* A matrix in shared memory, swizzled by 128 bytes: `next` between 64-element pieces along rows (of
 * one whose rows are the sum's index), 1024 between groups of 8 rows. */
static __device__ __forceinline__ uint64_t hop_matrix(const void *p, uint32_t next)
{
    return (uint64_t)((bar_addr(p) & 0x3ffff) >> 4) | (uint64_t)(next >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}

#define HOP_F8(x, i)                                                                            \
    "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), \
        "+f"(x[i + 6]), "+f"(x[i + 7])
#define HOP_F32(x, i) HOP_F8(x, i), HOP_F8(x, i + 8), HOP_F8(x, i + 16), HOP_F8(x, i + 24)
#define HOP_R32_0                                                                            \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
    "%24,%25,%26,%27,%28,%29,%30,%31"
#define HOP_R32_1                                                                      \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51," \
    "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

/* s (+)= q k^T of 16 dimensions. */
static __device__ __forceinline__ void hop_mma_qk(float (&s)[64], const uint32_t *q, uint64_t k,
                                                  int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HOP_R32_0 "," HOP_R32_1
                 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n"
                 "}"
                 : HOP_F32(s, 0), HOP_F32(s, 32)
                 : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k), "r"(add));
}
/* o += p v of 16 keys. */
static __device__ __forceinline__ void hop_mma_pv(float (&o)[64], const uint32_t *p, uint64_t v)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HOP_R32_0 "," HOP_R32_1
                 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
                 : HOP_F32(o, 0), HOP_F32(o, 32)
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}
static __device__ __forceinline__ void hop_mma_pv(float (&o)[32], const uint32_t *p, uint64_t v)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HOP_R32_0
                 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;\n"
                 : HOP_F32(o, 0)
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

/* ---- the warp group that fetches ----------------------------------------------------- */

template <uint32_t D>
static __device__ __forceinline__ void hop_fetch_tile(uint8_t (&to)[D / 64][HOP_HALF],
                                                      const kvd_attn_args &a, const hop_job &j,
                                                      const CUtensorMap *map, uint64_t *bar,
                                                      uint32_t tile, uint64_t add)
{
    const kvd_kv_layout &kv     = a.kv;
    const uint32_t       key    = tile * HOP_KEYS;
    const uint32_t       record = key % kv.block_tokens / kv.chunk_tokens;
    const uint64_t       off    = j.seq.block[key / kv.block_tokens] + kv.lane_off +
                         j.head / (a.n_head / kv.n_kv_head) * kv.head_stride + add;

    bar_expect(bar, D / 64 * HOP_HALF);
#pragma unroll
    for (uint32_t h = 0; h < D / 64; h++)
        hop_load(to[h], map, bar, 64 * h, record, off);
}

/* K of a tile goes before V of the one ahead of it, as they are used. */
template <uint32_t D>
static __device__ __forceinline__ void hop_fetch(hop_tiles<D> &t, const kvd_attn_args &a,
                                                 const hop_job &j, const CUtensorMap *map)
{
    for (uint32_t i = 0; i <= j.n_tile; i++) {
        if (i < j.n_tile) {
            if (i >= 2)
                bar_wait(&t.k_free[i % 2], (i / 2 + 1) % 2);
            hop_fetch_tile<D>(t.k[i % 2], a, j, map, &t.k_full[i % 2], j.n_tile - 1 - i, 0);
        }
        if (i > 0) {
            const uint32_t b = (i - 1) % 2;
            if (i >= 3)
                bar_wait(&t.v_free[b], ((i - 1) / 2 + 1) % 2);
            hop_fetch_tile<D>(t.v[b], a, j, map, &t.v_full[b], j.n_tile - i, a.kv.record_bytes / 2);
        }
    }
}

/* ---- the warp groups that compute ------------------------------------------------------ */

/* The warp group's queries, scaled, by way of shared memory: 16 bytes of bf16 at a time. */
template <uint32_t D>
static __device__ __forceinline__ void hop_load_q(hop_tiles<D> &t, hop_rows<D> &f,
                                                  const kvd_attn_args &a, const hop_job &j,
                                                  uint32_t group)
{
    const float scale = a.scale * ATTN_LOG2E;
    const bool  wide  = (uintptr_t)a.q % 16 == 0 && a.q_stride % 4 == 0;

#pragma unroll 4
    for (uint32_t i = threadIdx.x % HOP_GROUP; i < 64 * (D / 8); i += HOP_GROUP) {
        const uint32_t r = group * 64 + i / (D / 8), c = i % (D / 8);
        const float   *q = a.q + (uint64_t)(j.seq.first_row + j.first + r) * a.q_stride +
                         (uint64_t)j.head * D + 8 * c;
        float x[8] = {};

        if (j.first + r < j.seq.n_row) {
            if (wide) {
                *(float4 *)x       = *(const float4 *)q;
                *(float4 *)(x + 4) = *(const float4 *)(q + 4);
            } else {
#pragma unroll
                for (uint32_t e = 0; e < 8; e++)
                    x[e] = q[e];
            }
        }
        *(uint4 *)&t.q[r][(c ^ r % 8) * 16] =
            make_uint4(hop_pack(x[0] * scale, x[1] * scale), hop_pack(x[2] * scale, x[3] * scale),
                       hop_pack(x[4] * scale, x[5] * scale), hop_pack(x[6] * scale, x[7] * scale));
    }
    hop_sync(1 + group, HOP_GROUP);
#pragma unroll
    for (uint32_t i = 0; i < D / 4; i++) {
        const uint32_t lane = threadIdx.x % 32, c = i / 4 * 2 + i / 2 % 2;
        const uint32_t r = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4 + i % 2 * 8;

        f.q[i] = *(const uint32_t *)&t.q[r][(c ^ r % 8) * 16 + lane % 4 * 4];
    }
}

template <uint32_t D>
static __device__ __forceinline__ void hop_logits(hop_tiles<D> &t, hop_rows<D> &f, uint32_t b,
                                                  uint32_t group)
{
    hop_keep(f.s);
    hop_keep(f.q);
    hop_mma_fence();
#pragma unroll
    for (uint32_t i = 0; i < D / 16; i++)
        hop_mma_qk(f.s, f.q + 4 * i, hop_matrix(t.k[b][i / 4] + i % 4 * 32, 16), i > 0);
    hop_mma_commit();
}

template <uint32_t D>
static __device__ __forceinline__ void hop_values(hop_tiles<D> &t, hop_rows<D> &f, uint32_t b)
{
    hop_keep(f.o);
    hop_keep(f.p);
    hop_mma_fence();
#pragma unroll
    for (uint32_t i = 0; i < HOP_KEYS / 16; i++)
        hop_mma_pv(f.o, f.p + 4 * i, hop_matrix(t.v[b][0] + i * 16 * 128, HOP_HALF));
    hop_mma_commit();
}

/* s becomes exp2(s - max); what o and sum are to be multiplied with is alpha. */
template <uint32_t D>
static __device__ __forceinline__ void hop_softmax(hop_rows<D> &f, uint32_t tile, uint32_t limit)
{
    if (tile * HOP_KEYS + HOP_KEYS - 1 > limit) {
        const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (uint32_t i = 0; i < HOP_KEYS / 2; i++) {
            const uint32_t key = tile * HOP_KEYS + i / 4 * 8 + 2 * (lane % 4) + i % 2;
            if (key > limit + row + i / 2 % 2 * 8)
                f.s[i] = -INFINITY;
        }
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        float max = f.max[half], sum = 0.0f;

#pragma unroll
        for (uint32_t n = 0; n < HOP_KEYS / 8; n++)
            max = fmaxf(max, fmaxf(f.s[4 * n + 2 * half], f.s[4 * n + 2 * half + 1]));
        max                = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max                = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        const float finite = max == -INFINITY ? 0.0f : max; /* no key yet */
        f.alpha[half]      = hop_exp2(f.max[half] - finite);
        f.max[half]        = max;
#pragma unroll
        for (uint32_t n = 0; n < HOP_KEYS / 8; n++) {
            float *s = f.s + 4 * n + 2 * half;
            s[0]     = hop_exp2(s[0] - finite);
            s[1]     = hop_exp2(s[1] - finite);
            sum += s[0] + s[1];
        }
        f.sum[half] = f.sum[half] * f.alpha[half] + sum;
    }
}

template <uint32_t D> static __device__ __forceinline__ void hop_weights(hop_rows<D> &f)
{
#pragma unroll
    for (uint32_t i = 0; i < HOP_KEYS / 4; i++)
        f.p[i] = hop_pack(f.s[2 * i], f.s[2 * i + 1]);
}

/* Past the last token may lie anything: weight 0 times that must be 0. */
template <uint32_t D>
static __device__ __forceinline__ void hop_clear_tail(hop_tiles<D> &t, const hop_job &j,
                                                      uint32_t group)
{
    const uint32_t n_token = j.seq.n_past + j.seq.n_row, end = j.n_tile * HOP_KEYS;

    if (end <= n_token)
        return;
    for (uint32_t i = threadIdx.x % HOP_GROUP; i < (end - n_token) * 8; i += HOP_GROUP) {
#pragma unroll
        for (uint32_t h = 0; h < D / 64; h++)
            *(uint4 *)&t.v[0][h][HOP_HALF - 16 * (i + 1)] = make_uint4(0, 0, 0, 0);
    }
    hop_fence_proxy();
    hop_sync(1 + group, HOP_GROUP);
}

template <uint32_t D>
static __device__ __forceinline__ void hop_store(const hop_rows<D> &f, const kvd_attn_args &a,
                                                 const hop_job &j, uint32_t group)
{
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t r   = j.first + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * half;
        float          sum = f.sum[half];

        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (r >= j.seq.n_row)
            continue;
        float *out = a.out + (uint64_t)(j.seq.first_row + r) * a.out_stride + (uint64_t)j.head * D +
                     2 * (lane % 4);
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n++) {
            out[8 * n]     = f.o[4 * n + 2 * half] / sum;
            out[8 * n + 1] = f.o[4 * n + 2 * half + 1] / sum;
        }
    }
}

/* Logits of tile i and values of the tile before it, at once; then the softmax of tile i. */
template <uint32_t D>
static __device__ __forceinline__ void hop_step(hop_tiles<D> &t, hop_rows<D> &f, const hop_job &j,
                                                uint32_t i, uint32_t group, uint32_t limit)
{
    const uint32_t b = i % 2, before = (i - 1) % 2;

    bar_wait(&t.k_full[b], i / 2 % 2);
    hop_sync(3 + group, 2 * HOP_GROUP);
    hop_logits<D>(t, f, b, group);
    bar_wait(&t.v_full[before], (i - 1) / 2 % 2);
    hop_values<D>(t, f, before);
    hop_arrive(4 - group, 2 * HOP_GROUP);
    hop_mma_wait<1>();
    hop_keep(f.s);
    hop_bar_arrive(&t.k_free[b]);
    hop_softmax<D>(f, j.n_tile - 1 - i, limit);
    hop_mma_wait<0>();
    hop_keep(f.o);
    hop_keep(f.p);
    hop_bar_arrive(&t.v_free[before]);
#pragma unroll
    for (uint32_t n = 0; n < D / 2; n++)
        f.o[n] *= f.alpha[n / 2 % 2];
    hop_weights<D>(f);
}

template <uint32_t D>
static __device__ __forceinline__ void hop_compute(hop_tiles<D> &t, const kvd_attn_args &a,
                                                   const hop_job &j, uint32_t group)
{
    const uint32_t limit = j.seq.n_past + j.first + group * 64; /* last key of the first row */
    const uint32_t last  = j.n_tile - 1;
    hop_rows<D>    f;

    f.max[0] = f.max[1] = -INFINITY;
    f.sum[0] = f.sum[1] = 0.0f;
#pragma unroll
    for (uint32_t n = 0; n < D / 2; n++)
        f.o[n] = 0.0f;
    if (group == 1)
        hop_arrive(3, 2 * HOP_GROUP); /* the other one begins */
    hop_load_q<D>(t, f, a, j, group);
    bar_wait(&t.k_full[0], 0);
    hop_logits<D>(t, f, 0, group);
    hop_mma_wait<0>();
    hop_keep(f.s);
    hop_bar_arrive(&t.k_free[0]);
    hop_softmax<D>(f, last, limit);
    hop_weights<D>(f);
    bar_wait(&t.v_full[0], 0);
    hop_clear_tail<D>(t, j, group);
#pragma unroll 1
    for (uint32_t i = 1; i < j.n_tile; i++)
        hop_step<D>(t, f, j, i, group, limit);
    bar_wait(&t.v_full[last % 2], last / 2 % 2);
    hop_values<D>(t, f, last % 2);
    hop_mma_wait<0>();
    hop_keep(f.o);
    hop_store<D>(f, a, j, group);
}

/* Which sequence, rows and head a block has; false: none.  Blocks begin KV head by KV head, so that
 * its keys stay in the cache; of each the last tiles of rows first, which have most keys. */
static __device__ bool hop_find(const kvd_attn_args &a, hop_job *j)
{
    uint32_t tile = gridDim.y - 1 - blockIdx.y;

    for (uint32_t s = 0; s < a.n_seq; s++) {
        const uint32_t n = (a.seq[s].n_row + HOP_ROWS - 1) / HOP_ROWS;
        if (tile < n) {
            j->seq   = a.seq[s];
            j->first = tile * HOP_ROWS;
            j->head  = blockIdx.z * gridDim.x + blockIdx.x;
            j->n_tile =
                (j->seq.n_past + min(j->first + HOP_ROWS, j->seq.n_row) + HOP_KEYS - 1) / HOP_KEYS;
            return true;
        }
        tile -= n;
    }
    return false;
}
#endif

template <uint32_t D>
static __global__ void __launch_bounds__(HOP_THREADS, 1)
    hop_kernel(const __grid_constant__ kvd_attn_args a, const __grid_constant__ CUtensorMap map)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t hop_raw[];
    hop_tiles<D>  &t     = *(hop_tiles<D> *)(hop_raw + (1024 - bar_addr(hop_raw) % 1024) % 1024);
    const uint32_t group = threadIdx.x / HOP_GROUP; /* 2: fetches */
    hop_job        j;

    if (!hop_find(a, &j))
        return;
    if (threadIdx.x == 0) {
        for (uint32_t b = 0; b < 2; b++) {
            bar_init(&t.k_full[b], 1);
            bar_init(&t.v_full[b], 1);
            bar_init(&t.k_free[b], HOP_WARPS);
            bar_init(&t.v_free[b], HOP_WARPS);
        }
        bar_fence();
    }
    __syncthreads();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 2 * HOP_GROUP)
            hop_fetch<D>(t, a, j, &map);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        hop_compute<D>(t, a, j, group);
    }
#endif
}

/* ---- launch ------------------------------------------------------------------------- */

/* The pool as the copy engine sees it: element, row of a chunk, record of a lane, then where the
 * lane begins, in steps of 16 bytes and in units. */
static bool hop_map(CUtensorMap *map, const kvd_kv_layout *kv)
{
    const cuuint64_t dim[5] = { kv->head_dim, kv->chunk_tokens, kv->block_tokens / kv->chunk_tokens,
                                HOP_UNIT / 16, 1u << 31 };
    const cuuint64_t stride[4] = { 2ull * kv->head_dim, kv->record_bytes, 16, HOP_UNIT };
    const cuuint32_t box[5]    = { 64, kv->chunk_tokens, HOP_KEYS / kv->chunk_tokens, 1, 1 };
    const cuuint32_t one[5]    = { 1, 1, 1, 1, 1 };
    decltype(&cuTensorMapEncodeTiled) encode = NULL;
    cudaDriverEntryPointQueryResult   found;

    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess || !encode)
        return false;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, kv->pool, dim, stride, box, one,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <uint32_t D>
static kvd_status hop_launch(const kvd_attn_args *a, const CUtensorMap &map, cudaStream_t s,
                             kvd_err *err)
{
    const int  bytes = (int)sizeof(hop_tiles<D>) + 1024;
    const dim3 grid(a->n_head / a->kv.n_kv_head, cuda_div_up(a->n_token, HOP_ROWS) + a->n_seq - 1,
                    a->kv.n_kv_head);

    CUDA_TRY(cudaFuncSetAttribute(hop_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  bytes),
             "attn", err);
    hop_kernel<D><<<grid, HOP_THREADS, bytes, s>>>(*a, map);
    return cuda_launched("attn", err);
}

kvd_status cuda_attn_hopper(const kvd_attn_args *a, cudaStream_t s, bool *done, kvd_err *err)
{
    const kvd_kv_layout *kv = &a->kv;
    CUtensorMap          map;

    *done = (kv->head_dim == 64 || kv->head_dim == 128) && kv->type == KVD_DTYPE_BF16 &&
            cuda_attn_aligned(kv) && kv->record_bytes % 32 == 0 &&
            HOP_KEYS % kv->chunk_tokens == 0 && kv->block_tokens % HOP_KEYS == 0 &&
            hop_map(&map, kv);
    if (!*done)
        return KVD_OK;
    return kv->head_dim == 64 ? hop_launch<64>(a, map, s, err) : hop_launch<128>(a, map, s, err);
}
