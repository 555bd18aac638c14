/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_attn_flash.cu - causal attention of many rows over bf16 keys, on tensor cores.
 *
 * A block takes 64 rows of one sequence and one query head, a warp 16 of them; tiles of BK keys
 * come through two buffers of shared memory.  Online softmax (Milakov, Gimelshein,
 * arXiv:1805.02867) over tiles as in FlashAttention-2 (Dao, arXiv:2307.08691), with logits in units
 * of log2.  Products are mma.m16n8k16 of bf16 with float sums: a thread holds rows lane / 4 and
 * lane / 4 + 8, columns 2 (lane % 4) and the next, of each 8 columns. */
#include "backend/cuda/cuda_attn.cuh"

#define FLASH_THREADS 128u
#define FLASH_ROWS    64u
#define FLASH_PAD     8u /* elements: rows of shared memory fall on different banks */

/* ---- instructions ------------------------------------------------------------------ */

static __device__ __forceinline__ uint32_t flash_smem(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
static __device__ __forceinline__ void flash_cp16(void *to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(flash_smem(to)), "l"(from));
}
static __device__ __forceinline__ void flash_commit(void)
{
    asm volatile("cp.async.commit_group;");
}
/* Waits for all groups but the last one. */
static __device__ __forceinline__ void flash_wait(void)
{
    asm volatile("cp.async.wait_group 1;");
}
static __device__ __forceinline__ void flash_ldm(uint32_t r[4], const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(flash_smem(p)));
}
static __device__ __forceinline__ void flash_ldm_t(uint32_t r[4], const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(flash_smem(p)));
}
static __device__ __forceinline__ void flash_mma(float c[4], const uint32_t a[4], uint32_t b0,
                                                 uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
static __device__ __forceinline__ uint32_t flash_pack(float lo, float hi)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *(const uint32_t *)&v;
}

/* ---- the kernel -------------------------------------------------------------------- */

template <uint32_t D, uint32_t BK> struct flash_tiles {
    uint16_t k[2][BK][D + FLASH_PAD];
    uint16_t v[2][BK][D + FLASH_PAD];
    uint64_t off[2][BK]; /* of K rows, from the pool */
};

/* What a thread holds of its warp's 16 rows. */
template <uint32_t D> struct flash_rows {
    uint32_t q[D / 16][4];
    float    o[D / 8][4];
    float    max[2], sum[2];
};

/* Which sequence and rows a block has; false: none. */
static __device__ bool flash_find(const kvd_attn_args &a, uint32_t tile, kvd_kv_seq *q,
                                  uint32_t *first)
{
    for (uint32_t s = 0; s < a.n_seq; s++) {
        const uint32_t n = (a.seq[s].n_row + FLASH_ROWS - 1) / FLASH_ROWS;
        if (tile < n) {
            *q     = a.seq[s];
            *first = tile * FLASH_ROWS;
            return true;
        }
        tile -= n;
    }
    return false;
}

/* Keys past the last one are that one again: read, and masked. */
template <uint32_t D, uint32_t BK>
static __device__ __forceinline__ void flash_offsets(flash_tiles<D, BK> &t, const kvd_kv_layout &kv,
                                                     const uint64_t *block, uint32_t kv_head,
                                                     uint32_t tile, uint32_t n_key)
{
    if (threadIdx.x < BK)
        t.off[tile & 1][threadIdx.x] =
            (uint64_t)(cuda_kv_row(kv, block, kv_head, min(tile * BK + threadIdx.x, n_key - 1)) -
                       (uint8_t *)kv.pool);
}

template <uint32_t D, uint32_t BK>
static __device__ __forceinline__ void flash_fetch(flash_tiles<D, BK> &t, const kvd_kv_layout &kv,
                                                   uint32_t tile)
{
    const uint32_t b = tile & 1;

#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < BK * (D / 8); i += FLASH_THREADS) {
        const uint32_t key = i / (D / 8), c = i % (D / 8) * 8;
        const uint8_t *k = (const uint8_t *)kv.pool + t.off[b][key] + 2ull * c;

        flash_cp16(&t.k[b][key][c], k);
        flash_cp16(&t.v[b][key][c], k + kv.record_bytes / 2);
    }
}

template <uint32_t D>
static __device__ __forceinline__ void flash_load_q(flash_rows<D> &f, const kvd_attn_args &a,
                                                    const kvd_kv_seq &seq, uint32_t row0,
                                                    uint32_t head)
{
    const uint32_t lane  = threadIdx.x % 32;
    const float    scale = a.scale * ATTN_LOG2E;

#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t r     = row0 + lane / 4 + 8 * half;
        const bool     there = r < seq.n_row;
        const float   *q     = a.q + (uint64_t)(seq.first_row + (there ? r : 0)) * a.q_stride +
                         (uint64_t)head * D + 2 * (lane % 4);
#pragma unroll
        for (uint32_t i = 0; i < D / 16; i++) {
            f.q[i][half]     = there ? flash_pack(q[16 * i] * scale, q[16 * i + 1] * scale) : 0;
            f.q[i][2 + half] = there ? flash_pack(q[16 * i + 8] * scale, q[16 * i + 9] * scale) : 0;
        }
        f.max[half] = -INFINITY;
        f.sum[half] = 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < D / 8; i++)
        f.o[i][0] = f.o[i][1] = f.o[i][2] = f.o[i][3] = 0.0f;
}

template <uint32_t D, uint32_t BK>
static __device__ __forceinline__ void flash_logits(const flash_tiles<D, BK> &t, uint32_t b,
                                                    const flash_rows<D> &f, float s[BK / 8][4])
{
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t n = 0; n < BK / 8; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < D / 16; i++) {
#pragma unroll
        for (uint32_t n = 0; n < BK / 8; n += 2) {
            uint32_t r[4];
            flash_ldm(r, &t.k[b][8 * n + lane / 16 * 8 + lane % 8][16 * i + lane / 8 % 2 * 8]);
            flash_mma(s[n], f.q[i], r[0], r[1]);
            flash_mma(s[n + 1], f.q[i], r[2], r[3]);
        }
    }
}

/* s becomes exp2(s - max); sums and output are brought to the new maximum. */
template <uint32_t D, uint32_t BK>
static __device__ __forceinline__ void flash_softmax(flash_rows<D> &f, float s[BK / 8][4])
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        float max = f.max[half], sum = 0.0f, alpha;

#pragma unroll
        for (uint32_t n = 0; n < BK / 8; n++)
            max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        max   = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max   = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        alpha = exp2f(f.max[half] - max);
#pragma unroll
        for (uint32_t n = 0; n < BK / 8; n++) {
            s[n][2 * half]     = exp2f(s[n][2 * half] - max);
            s[n][2 * half + 1] = exp2f(s[n][2 * half + 1] - max);
            sum += s[n][2 * half] + s[n][2 * half + 1];
        }
#pragma unroll
        for (uint32_t i = 0; i < D / 8; i++) {
            f.o[i][2 * half] *= alpha;
            f.o[i][2 * half + 1] *= alpha;
        }
        f.sum[half] = f.sum[half] * alpha + sum;
        f.max[half] = max;
    }
}

template <uint32_t D, uint32_t BK>
static __device__ __forceinline__ void flash_values(const flash_tiles<D, BK> &t, uint32_t b,
                                                    flash_rows<D> &f, const float s[BK / 8][4])
{
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t i = 0; i < BK / 16; i++) {
        const float   *lo = s[2 * i], *hi = s[2 * i + 1];
        const uint32_t p[4] = { flash_pack(lo[0], lo[1]), flash_pack(lo[2], lo[3]),
                                flash_pack(hi[0], hi[1]), flash_pack(hi[2], hi[3]) };
#pragma unroll
        for (uint32_t n = 0; n < D / 8; n += 2) {
            uint32_t r[4];
            flash_ldm_t(r, &t.v[b][16 * i + lane % 16][8 * n + lane / 16 * 8]);
            flash_mma(f.o[n], p, r[0], r[1]);
            flash_mma(f.o[n + 1], p, r[2], r[3]);
        }
    }
}

/* One tile of keys for the warp's rows; those it must not see yet are masked. */
template <uint32_t D, uint32_t BK>
static __device__ __forceinline__ void flash_tile(const flash_tiles<D, BK> &t, uint32_t tile,
                                                  flash_rows<D> &f, uint32_t first_limit)
{
    const uint32_t lane = threadIdx.x % 32, key0 = tile * BK;
    float          s[BK / 8][4];

    flash_logits<D, BK>(t, tile & 1, f, s);
    if (key0 + BK - 1 > first_limit) {
#pragma unroll
        for (uint32_t n = 0; n < BK / 8; n++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t key = key0 + 8 * n + 2 * (lane % 4) + i % 2;
                if (key > first_limit + lane / 4 + i / 2 * 8)
                    s[n][i] = -INFINITY;
            }
        }
    }
    flash_softmax<D, BK>(f, s);
    flash_values<D, BK>(t, tile & 1, f, s);
}

template <uint32_t D>
static __device__ __forceinline__ void flash_store(const flash_rows<D> &f, const kvd_attn_args &a,
                                                   const kvd_kv_seq &seq, uint32_t row0,
                                                   uint32_t head)
{
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t r   = row0 + lane / 4 + 8 * half;
        float          sum = f.sum[half];

        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (r >= seq.n_row)
            continue;
        float *out = a.out + (uint64_t)(seq.first_row + r) * a.out_stride + (uint64_t)head * D +
                     2 * (lane % 4);
#pragma unroll
        for (uint32_t i = 0; i < D / 8; i++) {
            out[8 * i]     = f.o[i][2 * half] / sum;
            out[8 * i + 1] = f.o[i][2 * half + 1] / sum;
        }
    }
}

template <uint32_t D, uint32_t BK>
static __global__ void __launch_bounds__(FLASH_THREADS)
    flash_kernel(const __grid_constant__ kvd_attn_args a)
{
    extern __shared__ __align__(16) uint8_t flash_shared[];
    flash_tiles<D, BK>                     &t = *(flash_tiles<D, BK> *)flash_shared;
    const uint32_t head = blockIdx.y, kv_head = head / (a.n_head / a.kv.n_kv_head);
    flash_rows<D>  f;
    kvd_kv_seq     seq;
    uint32_t       first;

    /* The last tiles have most keys: they begin first. */
    if (!flash_find(a, gridDim.x - 1 - blockIdx.x, &seq, &first))
        return;
    const uint32_t row0  = first + threadIdx.x / 32 * 16; /* of the warp */
    const uint32_t n_key = seq.n_past + min(first + FLASH_ROWS, seq.n_row);
    const uint32_t n     = (n_key + BK - 1) / BK;

    flash_load_q<D>(f, a, seq, row0, head);
    flash_offsets<D, BK>(t, a.kv, seq.block, kv_head, 0, n_key);
    __syncthreads();
    flash_fetch<D, BK>(t, a.kv, 0);
    flash_commit();
    for (uint32_t i = 0; i < n; i++) {
        if (i + 1 < n)
            flash_offsets<D, BK>(t, a.kv, seq.block, kv_head, i + 1, n_key);
        __syncthreads(); /* offsets are there, and nobody reads the other buffer */
        if (i + 1 < n)
            flash_fetch<D, BK>(t, a.kv, i + 1);
        flash_commit();
        flash_wait();
        __syncthreads();
        if (i * BK <= seq.n_past + row0 + 15)
            flash_tile<D, BK>(t, i, f, seq.n_past + row0);
    }
    flash_store<D>(f, a, seq, row0, head);
}

/* ---- launch ------------------------------------------------------------------------- */

template <uint32_t D, uint32_t BK>
static kvd_status flash_launch(const kvd_attn_args *a, cudaStream_t s, kvd_err *err)
{
    const int  bytes = (int)sizeof(flash_tiles<D, BK>);
    const dim3 grid(cuda_div_up(a->n_token, FLASH_ROWS) + a->n_seq, a->n_head);

    CUDA_TRY(cudaFuncSetAttribute(flash_kernel<D, BK>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  bytes),
             "attn", err);
    flash_kernel<D, BK><<<grid, FLASH_THREADS, bytes, s>>>(*a);
    return cuda_launched("attn", err);
}

bool cuda_attn_flash_can(const kvd_kv_layout *kv)
{
    const bool width = kv->head_dim == 64 || kv->head_dim == 80 || kv->head_dim == 96 ||
                       kv->head_dim == 128 || kv->head_dim == 256;

    return width && kv->type == KVD_DTYPE_BF16 && cuda_attn_aligned(kv);
}

kvd_status cuda_attn_flash(const kvd_attn_args *a, cudaStream_t s, kvd_err *err)
{
    switch (a->kv.head_dim) {
    case 64:
        return flash_launch<64, 64>(a, s, err);
    case 80:
        return flash_launch<80, 64>(a, s, err);
    case 96:
        return flash_launch<96, 64>(a, s, err);
    case 128:
        return flash_launch<128, 64>(a, s, err);
    default:
        return flash_launch<256, 32>(a, s, err);
    }
}
