/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_scan.cu - logits of all chunks by the index.
 *
 * A warp takes two tiles of a plane (32 units) at a time by tensor cores: rows of the product are
 * units, columns query heads.  Which channel of a plane is which number of the sum does not matter,
 * so a thread reads 16 bytes as they lie (four units, 32 / bits channels each) and takes them as
 * operands: in group g of four threads, thread t holds units 4 (g % 4) .. + 3 of tile g / 4, in row
 * 4 j + t of its codes.  INTn: codes are made binary16 exactly (0x6400 | code is 1024 + code),
 * multiplied by their channels' scales and rounded; minima are a product of their own, which all
 * units share.  So rounding is relative to a channel's range, not to its values: 2^-12 of it at
 * most, against 1/30 that INT4 itself rounds by.  Queries are two binary16 (BF16: bfloat16) numbers
 * each, high and low part, in 8 columns: four heads with both parts, or eight heads twice.  They
 * are scaled by a power of two so that the largest is in [1, 2).
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_select.cuh"

#define SCAN_WARPS  8u
#define SCAN_HEADS  8u
#define SCAN_NARROW 4u /* heads whose two parts fit into 8 columns */
#define SCAN_AHEAD  3u /* pairs of tiles asked for ahead */
#define STEPS_MAX   (KVD_HEAD_DIM_MAX / 16u)
#define PAIR        (2u * CPU_INDEX_TILE)

/* The operand of one step of 16 channels, as a lane of a warp holds it. */
typedef struct scan_query {
    uint2 step[2][2][STEPS_MAX][WARP]; /* [plane][high, low part] */
} scan_query;

typedef struct scan_head {
    float unit;   /* 2^e: what products are to be multiplied by */
    float radius; /* |q| / sqrt(dim) */
} scan_head;

/* ---- queries ------------------------------------------------------------------------ */

/* What plane p is multiplied with. */
static __device__ __forceinline__ float query_part(kvd_index_kind kind, bool keys, uint32_t plane,
                                                   float q)
{
    if (keys)
        return q;
    if (kind == KVD_INDEX_BOX)
        return (plane == 0 && q > 0.0f) || (plane == 1 && q < 0.0f) ? 0.0f : q;
    return plane == 0 ? q : fabsf(q) * CPU_INDEX_STD;
}

/* One warp, one head. */
static __device__ void query_sizes(const select_job &j, const float *q, scan_head *out)
{
    float max = 0.0f, sum = 0.0f;

    for (uint32_t i = threadIdx.x % WARP; i < j.s.dim; i += WARP) {
        const float x = q[i] * j.a.scale;

        max = fmaxf(max, fabsf(x));
        sum += x * x;
    }
    max = cuda_warp_max(max);
    sum = cuda_warp_sum(sum);
    if (threadIdx.x % WARP == 0) {
        const uint32_t e = __float_as_uint(max) >> 23; /* biased; 0 and 255 stay unscaled */

        out->unit   = e > 4 && e < 250 ? __uint_as_float(e << 23) : 1.0f;
        out->radius = sqrtf(sum) / sqrtf((float)j.s.dim);
    }
}

template <bool BF16>
static __device__ __forceinline__ uint32_t query_pack(float x, float y, bool low)
{
    if (BF16) {
        const float          hx = __bfloat162float(__float2bfloat16_rn(x));
        const float          hy = __bfloat162float(__float2bfloat16_rn(y));
        const __nv_bfloat162 v  = __floats2bfloat162_rn(low ? x - hx : hx, low ? y - hy : hy);

        return *(const uint32_t *)&v;
    } else {
        const float   hx = __half2float(__float2half_rn(x)), hy = __half2float(__float2half_rn(y));
        const __half2 v = __floats2half2_rn(low ? x - hx : hx, low ? y - hy : hy);

        return *(const uint32_t *)&v;
    }
}

/* First of the channels c, c + 2; c + 1, c + 3 (BF16: c, c + 1; c + 8, c + 9) of a step. */
template <int BITS>
static __device__ __forceinline__ uint32_t query_channel(uint32_t step, uint32_t t)
{
    if constexpr (BITS == 16) {
        return step * 16 + 2 * t;
    } else {
        const uint32_t in_word = 8 / BITS;

        return 32 / BITS * (4 * (step / in_word) + t) + 4 * (step % in_word);
    }
}

template <int BITS, bool WIDE>
static __device__ void query_operands(const select_job &j, bool keys, const float *q,
                                      uint32_t n_head, uint32_t n_step, const scan_head *head,
                                      scan_query *out)
{
    const uint32_t n_plane = keys ? 1 : j.s.n_mark, parts = WIDE ? 2 : 1;
    constexpr bool BF16 = BITS == 16;

    for (uint32_t k = threadIdx.x; k < n_plane * parts * n_step * WARP; k += blockDim.x) {
        const uint32_t lane = k % WARP, step = k / WARP % n_step, part = k / WARP / n_step % parts;
        const uint32_t plane = k / WARP / n_step / parts, col = lane / 4;
        const uint32_t h = WIDE ? col : col % SCAN_NARROW, c = query_channel<BITS>(step, lane % 4);
        const bool     low = WIDE ? part == 1 : col >= SCAN_NARROW;
        float          x[4];

#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t at = BF16 ? c + i % 2 + i / 2 * 8 : c + i / 2 + i % 2 * 2;

            x[i] = h < n_head && at < j.s.dim
                       ? query_part(j.s.kind, keys, plane, q[h * j.s.dim + at] * j.a.scale) /
                             head[h].unit
                       : 0.0f;
        }
        out->step[plane][part][step][lane] =
            make_uint2(query_pack<BF16>(x[0], x[1], low), query_pack<BF16>(x[2], x[3], low));
    }
}

/* ---- products ------------------------------------------------------------------------ */

template <bool BF16>
static __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                           uint32_t a3, uint2 b)
{
    if (BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

/* Two codes, 16 bits apart, times their scales. */
template <int BITS>
static __device__ __forceinline__ uint32_t scan_value(uint32_t word, uint32_t scale)
{
    const uint32_t mask = ((1u << BITS) - 1u) * 0x10001u, bits = (word & mask) | 0x64006400u;
    const uint32_t base = 0x64006400u;
    const __half2  x    = __hmul2(__hsub2(*(const __half2 *)&bits, *(const __half2 *)&base),
                                  *(const __half2 *)&scale);

    return *(const uint32_t *)&x;
}

/* One row of codes of 32 units: 8 / BITS steps. */
template <int BITS, bool WIDE>
static __device__ __forceinline__ void scan_row(const uint4 &w, const uint2 *scale,
                                                const uint2 *min, const uint2 (*q0)[WARP],
                                                const uint2 (*q1)[WARP], float (&x)[4],
                                                float (&y)[4], float (&base)[4])
{
    const uint32_t lane = threadIdx.x % WARP;

#pragma unroll
    for (uint32_t s = 0; s < 8 / BITS; s++) {
        const uint32_t lo = BITS * s, hi = 8 + BITS * s;
        const uint32_t s0 = __byte_perm(scale[s].x, scale[s].y, 0x5410);
        const uint32_t s1 = __byte_perm(scale[s].x, scale[s].y, 0x7632);
        const uint32_t m0 = __byte_perm(min[s].x, min[s].y, 0x5410);
        const uint32_t m1 = __byte_perm(min[s].x, min[s].y, 0x7632);
        const uint32_t x0 = scan_value<BITS>(w.x >> lo, s0), x1 = scan_value<BITS>(w.y >> lo, s0);
        const uint32_t x2 = scan_value<BITS>(w.x >> hi, s1), x3 = scan_value<BITS>(w.y >> hi, s1);
        const uint32_t y0 = scan_value<BITS>(w.z >> lo, s0), y1 = scan_value<BITS>(w.w >> lo, s0);
        const uint32_t y2 = scan_value<BITS>(w.z >> hi, s1), y3 = scan_value<BITS>(w.w >> hi, s1);

        mma<false>(base, m0, m0, m1, m1, q0[s][lane]);
        mma<false>(x, x0, x1, x2, x3, q0[s][lane]);
        mma<false>(y, y0, y1, y2, y3, q0[s][lane]);
        if (WIDE) {
            mma<false>(base, m0, m0, m1, m1, q1[s][lane]);
            mma<false>(x, x0, x1, x2, x3, q1[s][lane]);
            mma<false>(y, y0, y1, y2, y3, q1[s][lane]);
        }
    }
}

/* What a thread reads of one row of codes. */
template <int BITS> struct scan_words {
    uint4 w;
    uint2 scale[8 / BITS], min[8 / BITS];
};

/* Rows past the end hold codes of 0. */
template <int BITS>
static __device__ __forceinline__ void scan_load(const uint8_t *code, const uint16_t *par,
                                                 uint32_t dim_pad, uint32_t row,
                                                 scan_words<BITS> &x)
{
    const uint32_t n_row = dim_pad * BITS / 32, at = row < n_row ? row : n_row - 1;

    x.w = *(const uint4 *)(code + (uint64_t)at * 64);
#pragma unroll
    for (uint32_t s = 0; s < 8 / BITS; s++) {
        x.scale[s] = *(const uint2 *)(par + at * (32 / BITS) + 4 * s);
        x.min[s]   = *(const uint2 *)(par + dim_pad + at * (32 / BITS) + 4 * s);
    }
    if (row >= n_row)
        x.w = make_uint4(0, 0, 0, 0);
}

/* Adds a plane's products of one pair of tiles: x of each thread's units 0 and 1, y of 2 and 3.
 * Several rows are read before the first is used. */
template <int BITS, bool WIDE>
static __device__ __forceinline__ void scan_codes(const cpu_index_plane &p, const uint8_t *lane,
                                                  uint32_t tile, const scan_query &q,
                                                  uint32_t plane, float (&x)[4], float (&y)[4])
{
    constexpr uint32_t in_word = 8 / BITS, ahead = BITS == 2 ? 2 : 4;
    const uint32_t     t = threadIdx.x % 4, g = threadIdx.x % WARP / 4;
    const uint32_t     n_step = (p.dim_pad * BITS / 32 + 3) / 4;
    const uint16_t    *par    = (const uint16_t *)(lane + p.param_off) +
                          (uint64_t)(tile * CPU_INDEX_TILE / p.group) * 2 * p.dim_pad;
    const uint8_t *code    = lane + p.code_off + tile * p.tile_bytes + 16 * (g % 4);
    float          base[4] = { 0.0f };

    if (tile + g / 4 < p.n_unit / CPU_INDEX_TILE)
        code += g / 4 * p.tile_bytes;
    for (uint32_t j0 = 0; j0 < n_step; j0 += ahead) {
        scan_words<BITS> w[ahead];

#pragma unroll
        for (uint32_t j = 0; j < ahead; j++)
            scan_load<BITS>(code, par, p.dim_pad, 4 * (j0 + j) + t, w[j]);
#pragma unroll
        for (uint32_t j = 0; j < ahead; j++) {
            if (j0 + j < n_step)
                scan_row<BITS, WIDE>(w[j].w, w[j].scale, w[j].min,
                                     &q.step[plane][0][(j0 + j) * in_word],
                                     &q.step[plane][1][(j0 + j) * in_word], x, y, base);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        x[i] += base[i % 2];
        y[i] += base[i % 2];
    }
}

/* BF16 planes lie channel by channel: 16 units of 2 bytes. */
template <bool WIDE>
static __device__ __forceinline__ void scan_bf16(const cpu_index_plane &p, const uint8_t *lane,
                                                 uint32_t tile, const scan_query &q, uint32_t plane,
                                                 float (&x)[4], float (&y)[4])
{
    const uint32_t t = threadIdx.x % 4, g = threadIdx.x % WARP / 4, n_step = (p.dim + 15) / 16;
    const uint8_t *at = lane + p.code_off + tile * p.tile_bytes + 8 * (g % 4);

    if (tile + g / 4 < p.n_unit / CPU_INDEX_TILE)
        at += g / 4 * p.tile_bytes;
#pragma unroll 4
    for (uint32_t s = 0; s < n_step; s++) {
        uint2 v[4];

#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t c = s * 16 + 2 * t + i % 2 + i / 2 * 8;

            v[i] = c < p.dim ? *(const uint2 *)(at + (uint64_t)c * 32) : make_uint2(0, 0);
        }
#pragma unroll
        for (uint32_t n = 0; n < (WIDE ? 2 : 1); n++) {
            const uint2 b = q.step[plane][n][s][threadIdx.x % WARP];

            mma<true>(x, __byte_perm(v[0].x, v[1].x, 0x5410), __byte_perm(v[0].x, v[1].x, 0x7632),
                      __byte_perm(v[2].x, v[3].x, 0x5410), __byte_perm(v[2].x, v[3].x, 0x7632), b);
            mma<true>(y, __byte_perm(v[0].y, v[1].y, 0x5410), __byte_perm(v[0].y, v[1].y, 0x7632),
                      __byte_perm(v[2].y, v[3].y, 0x5410), __byte_perm(v[2].y, v[3].y, 0x7632), b);
        }
    }
}

/* ---- logits -------------------------------------------------------------------------- */

/* Where the four logits of a thread belong. */
typedef struct scan_place {
    uint32_t unit;       /* first of four, in the block's plane */
    uint32_t first, end; /* chunks that count */
    uint32_t chunk0;     /* column of the block's first unit (keys: chunk) */
} scan_place;

/* Landmarks, centroids: four columns. */
static __device__ __forceinline__ void scan_put(const select_job &j, const scan_place &at,
                                                uint2 radius, const scan_head &head,
                                                const float (&l)[4], float *row, float *max,
                                                float *sum)
{
    const uint32_t c0 = at.chunk0 + at.unit;
    float          v[4], most = -INFINITY, add = 0.0f;

#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        v[i] = l[i] * head.unit + j.log_tokens;
        if (j.s.radius)
            v[i] +=
                head.radius * sp_from_f16((uint16_t)((i < 2 ? radius.x : radius.y) >> i % 2 * 16));
        if (c0 + i >= at.first && c0 + i < at.end)
            most = fmaxf(most, v[i]);
    }
    *(float4 *)(row + c0) = make_float4(v[0], v[1], v[2], v[3]);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        if (c0 + i >= at.first && c0 + i < at.end)
            add += expf(v[i] - most);
    }
    select_merge(max, sum, most, add);
}

/* Keys: the log-sum-exp of a chunk's tokens, which neighbouring threads may hold too. */
static __device__ __forceinline__ void scan_put_keys(const select_job &j, const scan_place &at,
                                                     const scan_head &head, const float (&l)[4],
                                                     bool put, float *row, float *max, float *sum)
{
    const uint32_t ct = j.s.chunk_tokens, c = at.chunk0 + at.unit / ct;
    float          most, add                = 0.0f;

    most = fmaxf(fmaxf(l[0], l[1]), fmaxf(l[2], l[3])) * head.unit;
    for (uint32_t i = 0; i < 4; i++)
        add += expf(l[i] * head.unit - most);
    for (uint32_t d = 4; d < ct; d *= 2) { /* a thread of the next four has the next units */
        const float most2 = __shfl_xor_sync(ALL_LANES, most, d);
        const float add2  = __shfl_xor_sync(ALL_LANES, add, d);

        select_merge(&most, &add, most2, add2);
    }
    if (!put || at.unit % ct != 0)
        return;
    row[c] = most + logf(add);
    if (c >= at.first && c < at.end)
        select_merge(max, sum, row[c], 1.0f);
}

/* ---- the kernel ---------------------------------------------------------------------- */

/* One pair of tiles: products of this thread's four units with its one head (WIDE: its two). */
template <int BITS, bool WIDE>
static __device__ __forceinline__ void scan_pair(const select_job &j, bool keys,
                                                 const uint8_t *lane, uint32_t tile,
                                                 const scan_query &q, float (&out)[2][4])
{
    const uint32_t n_plane = keys ? 1 : j.s.n_mark;
    float          x[4] = { 0.0f }, y[4] = { 0.0f };

    for (uint32_t p = 0; p < n_plane; p++) {
        const cpu_index_plane &plane = keys ? j.s.key : j.s.mark[p];

        if constexpr (BITS == 16)
            scan_bf16<WIDE>(plane, lane, tile, q, p, x, y);
        else
            scan_codes<BITS, WIDE>(plane, lane, tile, q, p, x, y);
    }
    if (!WIDE) { /* low parts are two threads further */
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            x[i] += __shfl_xor_sync(ALL_LANES, x[i], 2);
            y[i] += __shfl_xor_sync(ALL_LANES, y[i], 2);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const bool second = WIDE ? i == 1 : threadIdx.x / 2 % 2 == 1;

        out[i][0] = second ? x[1] : x[0];
        out[i][1] = second ? x[3] : x[2];
        out[i][2] = second ? y[1] : y[0];
        out[i][3] = second ? y[3] : y[2];
    }
}

typedef struct scan_mem {
    scan_head head[SCAN_HEADS];
    float     max[SCAN_WARPS][SCAN_HEADS], sum[SCAN_WARPS][SCAN_HEADS];
} scan_mem;

/* Largest and sum of this block, from what its threads hold of heads h (and h + 1). */
template <bool WIDE>
static __device__ void scan_fold(const select_job &j, scan_mem *m, float (&max)[2], float (&sum)[2],
                                 uint32_t head0, uint32_t n_head)
{
    const uint32_t lane = threadIdx.x % WARP, t = lane % 4, warp = threadIdx.x / WARP;

#pragma unroll
    for (uint32_t i = 0; i < (WIDE ? 2 : 1); i++) {
        for (uint32_t d = 4; d < WARP; d *= 2) {
            const float max2 = __shfl_xor_sync(ALL_LANES, max[i], d);
            const float sum2 = __shfl_xor_sync(ALL_LANES, sum[i], d);

            select_merge(&max[i], &sum[i], max2, sum2);
        }
        if (lane < 4) {
            const uint32_t h = WIDE ? 2 * t + i : t % 2 * 2 + t / 2;

            m->max[warp][h] = max[i];
            m->sum[warp][h] = sum[i];
        }
    }
    __syncthreads();
    if (threadIdx.x < n_head) {
        float most = -INFINITY, add = 0.0f;

        for (uint32_t w = 0; w < SCAN_WARPS; w++)
            select_merge(&most, &add, m->max[w][threadIdx.x], m->sum[w][threadIdx.x]);
        j.part[((uint64_t)blockIdx.y * j.n_part + blockIdx.x) * j.group + head0 + threadIdx.x] =
            make_float2(most, add);
    }
}

/* Asks for what a pair of tiles reads; a warp together. */
static __device__ void scan_ahead(const select_job &j, bool keys, const uint8_t *lane,
                                  uint32_t tile)
{
    const uint32_t n_plane = keys ? 1 : j.s.n_mark, line = threadIdx.x % WARP * 128;

    for (uint32_t i = 0; i < n_plane; i++) {
        const cpu_index_plane &p     = keys ? j.s.key : j.s.mark[i];
        const uint32_t         bytes = (uint32_t)p.tile_bytes * (tile + 1 < p.n_unit / 16 ? 2 : 1);
        const uint8_t         *code  = lane + p.code_off + tile * p.tile_bytes;

        for (uint32_t at = line; at < bytes; at += WARP * 128)
            sp_prefetch(code + at);
        if (p.elem != KVD_INDEX_BF16 && line < 4 * p.dim_pad)
            sp_prefetch(lane + p.param_off + tile * CPU_INDEX_TILE / p.group * 4 * p.dim_pad +
                        line);
    }
    if (line == 0 && j.s.radius)
        sp_prefetch(lane + j.s.radius_off + tile * CPU_INDEX_TILE * 2);
}

/* A warp's pairs of tiles: every step-th from the first.  Lane i knows where the block of the i-th
 * of the next 32 lies. */
typedef struct scan_walk {
    const kvd_select_seq *seq;
    const uint8_t        *pool;
    uint32_t              pairs, pair, step, end, n; /* n: taken so far */
    uint64_t              off;
} scan_walk;

static __device__ __forceinline__ void scan_look(scan_walk *w)
{
    const uint64_t mine = w->pair + (uint64_t)(threadIdx.x % WARP) * w->step;

    if (w->n % WARP == 0)
        w->off = mine < w->end ? w->seq->iblock[mine / w->pairs] : 0;
}

static __device__ __forceinline__ const uint8_t *scan_at(const scan_walk &w, uint32_t i)
{
    return w.pool + __shfl_sync(ALL_LANES, w.off, i % WARP);
}

/* Asks for the i-th pair from now, if it is known where it lies. */
static __device__ __forceinline__ void scan_ask(const select_job &j, bool keys, const scan_walk &w,
                                                uint32_t i)
{
    const uint64_t pair = w.pair + (uint64_t)i * w.step;

    if (pair < w.end && w.n % WARP + i < WARP)
        scan_ahead(j, keys, scan_at(w, w.n + i), (uint32_t)(pair % w.pairs) * 2);
}

static __device__ scan_walk scan_open(const select_job &j, bool keys)
{
    const kvd_select_seq  *seq = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    const cpu_index_plane &p   = keys ? j.s.key : j.s.mark[0];
    scan_walk              w;

    w.seq  = seq;
    w.pool = (const uint8_t *)j.a.index.pool + j.a.index.lane_off +
             blockIdx.y % j.a.index.n_kv_head * j.a.index.head_stride;
    w.pairs = (p.n_unit + PAIR - 1) / PAIR;
    w.step  = gridDim.x * SCAN_WARPS;
    w.end   = (seq->n_chunk + j.s.n_chunk - 1) / j.s.n_chunk * w.pairs;
    w.pair  = j.s.kind == KVD_INDEX_CLUSTER ? 0 : seq->first_chunk / j.s.n_chunk * w.pairs;
    w.pair += blockIdx.x * SCAN_WARPS + threadIdx.x / WARP;
    w.n = 0;
    scan_look(&w);
    for (uint32_t i = 0; i < SCAN_AHEAD; i++)
        scan_ask(j, keys, w, i);
    return w;
}

template <int BITS, bool WIDE>
static __device__ void scan_lane(const select_job &j, bool keys, scan_walk w, const scan_query &q,
                                 scan_mem *m, uint32_t head0, uint32_t n_head)
{
    const cpu_index_plane &p     = keys ? j.s.key : j.s.mark[0];
    const uint32_t         units = j.s.kind == KVD_INDEX_CLUSTER ? CPU_INDEX_CENTROID : j.s.n_chunk;
    const uint32_t         t = threadIdx.x % 4, g = threadIdx.x % WARP / 4;
    scan_place             at     = { 0, w.seq->first_chunk, w.seq->n_chunk, 0 };
    float                  max[2] = { -INFINITY, -INFINITY }, sum[2] = { 0.0f, 0.0f };

    for (; w.pair < w.end; w.pair += w.step, w.n++) {
        const uint32_t block = w.pair / w.pairs, tile = w.pair % w.pairs * 2;
        const bool     real = tile + g / 4 < p.n_unit / CPU_INDEX_TILE;
        const uint8_t *lane;
        uint2          radius = make_uint2(0, 0);
        float          l[2][4];

        scan_look(&w);
        lane = scan_at(w, w.n);
        scan_ask(j, keys, w, SCAN_AHEAD);
        at.unit   = (tile + g / 4) * CPU_INDEX_TILE + 4 * (g % 4);
        at.chunk0 = block * units;
        if (j.s.radius && real && !keys)
            radius = *(const uint2 *)(lane + j.s.radius_off + 2 * at.unit);
        scan_pair<BITS, WIDE>(j, keys, lane, tile, q, l);
#pragma unroll
        for (uint32_t i = 0; i < (WIDE ? 2 : 1); i++) {
            const uint32_t h = WIDE ? 2 * t + i : t % 2 * 2 + t / 2, hh = h < n_head ? h : 0;
            const bool     put = real && h < n_head;
            float         *row = select_logits(j, blockIdx.y, head0 + hh);

            if (keys)
                scan_put_keys(j, at, m->head[hh], l[i], put, row, &max[i], &sum[i]);
            else if (put)
                scan_put(j, at, radius, m->head[hh], l[i], row, &max[i], &sum[i]);
        }
    }
    scan_fold<WIDE>(j, m, max, sum, head0, n_head);
}

template <int BITS, bool WIDE>
static __global__ void __launch_bounds__(SCAN_WARPS *WARP, 2)
    scan(const __grid_constant__ select_job j, const bool keys)
{
    sp_begin();
    extern __shared__ uint4 scan_dynamic[];
    __shared__ scan_mem     m;
    scan_query             *q       = (scan_query *)scan_dynamic;
    const kvd_select_seq   *seq     = &j.a.seq[blockIdx.y / j.a.index.n_kv_head];
    const cpu_index_plane  &p       = keys ? j.s.key : j.s.mark[0];
    const uint32_t          per_row = 32 / BITS, head0 = blockIdx.z * SCAN_HEADS;
    const uint32_t          n_head = j.group - head0 < SCAN_HEADS ? j.group - head0 : SCAN_HEADS;
    const uint32_t          n_step =
        BITS == 16 ? (p.dim + 15) / 16 : (p.dim_pad / per_row + 3) / 4 * (per_row / 4);
    const float *x = j.a.q + seq->row * j.a.q_stride +
                     ((uint64_t)(blockIdx.y % j.a.index.n_kv_head) * j.group + head0) * j.s.dim;

    const scan_walk walk = scan_open(j, keys);

    if (threadIdx.x / WARP < n_head)
        query_sizes(j, x + (uint64_t)threadIdx.x / WARP * j.s.dim, &m.head[threadIdx.x / WARP]);
    __syncthreads();
    query_operands<BITS, WIDE>(j, keys, x, n_head, n_step, m.head, q);
    __syncthreads();
    scan_lane<BITS, WIDE>(j, keys, walk, *q, &m, head0, n_head);
}

template <int BITS>
static cudaError_t scan_launch(const cuda_backend *be, const select_job &j, bool keys,
                               cudaStream_t s)
{
    const dim3 grid(j.n_part, j.n_lane, (j.group + SCAN_HEADS - 1) / SCAN_HEADS);

    return sp_launch(be, s, grid, SCAN_WARPS * WARP, (uint32_t)sizeof(scan_query), 1,
                     j.group > SCAN_NARROW ? scan<BITS, true> : scan<BITS, false>, j, keys);
}

cudaError_t cuda_select_scan(const cuda_backend *be, const select_job &j, bool keys, cudaStream_t s)
{
    switch (keys ? j.s.key.bits : j.s.mark[0].bits) {
    case 16:
        return scan_launch<16>(be, j, keys, s);
    case 8:
        return scan_launch<8>(be, j, keys, s);
    case 4:
        return scan_launch<4>(be, j, keys, s);
    default:
        return scan_launch<2>(be, j, keys, s);
    }
}
