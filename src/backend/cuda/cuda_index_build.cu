/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_index_build.cu - the index of sealed blocks, and means for the estimation zone: the bits of
 * cpu_index_build.c and cpu_index_zone.c, whose order of operations is kept.
 *
 * A block of threads takes one lane of one block, 16 channels at a time.  Clusters: up to 16
 * segments' lanes at a time, each by one block of threads over its work area.
 * Scratch: those work areas.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_sparse.cuh"

extern "C" {
#include "backend/index_layout.h"
}

#define SLICE         16u
#define F16_MAX       65504.0f
#define N_KMEANS      6u /* rounds, as on the CPU */
#define BUILD_THREADS 256u
#define CHUNKS_MAX    (CPU_INDEX_BLOCK / 4)
#define GROUPS_MAX    4u
#define SEGMENT_CENT  (CPU_INDEX_SEGMENT * CPU_INDEX_CENTROID)
#define SEGMENT_CHUNK (CPU_INDEX_SEGMENT * CHUNKS_MAX)
#define SEGMENT_GRID  16u
#define DOTS          16u /* centroids whose distances a thread sums side by side */

typedef float slice_row[SLICE];

typedef struct build_slice {
    slice_row key[CPU_INDEX_BLOCK];
    slice_row a[CHUNKS_MAX], b[CHUNKS_MAX], spread[CHUNKS_MAX];
    slice_row scale[GROUPS_MAX], min[GROUPS_MAX];
} build_slice;

static __device__ uint8_t *build_lane(const kvd_index_build_args &a, uint32_t block, uint32_t head)
{
    return (uint8_t *)a.index.pool + a.iblock[block] + a.index.lane_off +
           head * a.index.head_stride;
}

/* Lanes lie on multiples of 64 bytes and are whole multiples long. */
static __device__ void build_clear(uint8_t *lane, uint64_t bytes)
{
    for (uint64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        ((uint4 *)lane)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

/* Channels [c0, c0 + 16) of the keys of one block; zeros past head_dim. */
static __device__ void build_load(const kvd_index_build_args &a, uint32_t block, uint32_t head,
                                  uint32_t c0, slice_row *key)
{
    for (uint32_t i = threadIdx.x; i < CPU_INDEX_BLOCK * SLICE; i += blockDim.x) {
        const uint32_t t = i / SLICE, c = c0 + i % SLICE;

        key[t][i % SLICE] =
            c < a.kv.head_dim ? sp_row_at(a.kv.type, cuda_kv_row(a.kv, a.block + block, head, t), c)
                              : 0.0f;
    }
    __syncthreads();
}

/* ---- planes ------------------------------------------------------------------------ */

static __device__ uint16_t build_f16(float x)
{
    if (!(x > -F16_MAX)) /* NaN too */
        x = -F16_MAX;
    return sp_to_f16(x < F16_MAX ? x : F16_MAX);
}

static __device__ void build_pack_bf16(const cpu_index_plane &p, uint8_t *lane, const slice_row *v,
                                       uint32_t c0)
{
    uint16_t      *out = (uint16_t *)(lane + p.code_off);
    const uint32_t n   = p.dim - c0 < SLICE ? p.dim - c0 : SLICE;

    for (uint32_t k = threadIdx.x; k < p.n_unit * n; k += blockDim.x) {
        const uint32_t u = k % p.n_unit, i = k / p.n_unit;

        out[((uint64_t)(u / CPU_INDEX_TILE) * p.dim + c0 + i) * CPU_INDEX_TILE +
            u % CPU_INDEX_TILE] = sp_to_bf16(v[u][i]);
    }
}

/* Scale and minimum of each channel over each group's units, as stored. */
static __device__ void build_params(const cpu_index_plane &p, uint8_t *lane, const slice_row *v,
                                    uint32_t c0, build_slice *m)
{
    const float levels = (float)((1u << p.bits) - 1u);

    for (uint32_t k = threadIdx.x; k < p.n_unit / p.group * SLICE; k += blockDim.x) {
        const uint32_t   g = k / SLICE, i = k % SLICE;
        const slice_row *u   = v + g * p.group;
        uint16_t        *par = (uint16_t *)(lane + p.param_off) + (uint64_t)g * 2 * p.dim_pad;
        float            lo = u[0][i], hi = lo;
        uint16_t         min, step;

        for (uint32_t n = 1; n < p.group; n++) {
            lo = u[n][i] < lo ? u[n][i] : lo;
            hi = u[n][i] > hi ? u[n][i] : hi;
        }
        min  = build_f16(lo);
        step = build_f16(__fdiv_rn(__fsub_rn(hi, lo), levels));
        if (c0 + i < p.dim_pad) {
            par[c0 + i]             = step;
            par[p.dim_pad + c0 + i] = min;
        }
        m->scale[g][i] = sp_from_f16(step);
        m->min[g][i]   = sp_from_f16(min);
    }
    __syncthreads();
}

static __device__ __forceinline__ uint32_t build_code(float x, float scale, float min, float levels)
{
    const float t =
        __fadd_rn(__fdiv_rn(__fsub_rn(x, min), scale > 0.0f ? scale : __uint_as_float(0x7f800000u)),
                  0.5f);
    const float c = t > 0.0f ? t : 0.0f; /* NaN too */

    return (uint32_t)(int32_t)(c < levels ? c : levels);
}

static __device__ void build_pack_int(const cpu_index_plane &p, uint8_t *lane, const slice_row *v,
                                      uint32_t c0, build_slice *m)
{
    const uint32_t per_row = 32u / p.bits, rows = SLICE / per_row;
    const float    levels = (float)((1u << p.bits) - 1u);

    build_params(p, lane, v, c0, m);
    for (uint32_t k = threadIdx.x; k < p.n_unit * rows; k += blockDim.x) {
        const uint32_t u = k % p.n_unit, c = k / p.n_unit * per_row, g = u / p.group;
        uint32_t       word = 0;

        if (c0 + c >= p.dim_pad)
            continue;
        for (uint32_t i = 0; i < per_row; i++) /* channel 4 s + r: byte r, bits from n s */
            word |= build_code(v[u][c + i], m->scale[g][c + i], m->min[g][c + i], levels)
                    << (8 * (i % 4) + p.bits * (i / 4));
        *(uint32_t *)(lane + p.code_off + u / CPU_INDEX_TILE * p.tile_bytes +
                      (uint64_t)((c0 + c) / per_row) * 64 + 4 * (u % CPU_INDEX_TILE)) = word;
    }
    __syncthreads();
}

static __device__ void build_pack(const cpu_index_plane &p, uint8_t *lane, const slice_row *v,
                                  uint32_t c0, build_slice *m)
{
    if (p.elem == KVD_INDEX_BF16)
        build_pack_bf16(p, lane, v, c0);
    else
        build_pack_int(p, lane, v, c0, m);
}

/* ---- landmarks of chunks ------------------------------------------------------------ */

static __device__ float build_mean(const slice_row *key, uint32_t ct, uint32_t i)
{
    float x = key[0][i];

    for (uint32_t t = 1; t < ct; t++)
        x = __fadd_rn(x, key[t][i]);
    return __fmul_rn(x, __fdiv_rn(1.0f, (float)ct));
}

static __device__ float build_spread(const slice_row *key, uint32_t ct, uint32_t i, float mean,
                                     float sum)
{
    for (uint32_t t = 0; t < ct; t++) {
        const float d = __fsub_rn(key[t][i], mean);

        sum = __fadd_rn(sum, __fmul_rn(d, d));
    }
    return sum;
}

/* The landmarks of one slice; spread gathers the squared distances for the radius. */
static __device__ void build_marks(const cpu_index_shape &s, uint8_t *lane, uint32_t c0,
                                   build_slice *m)
{
    const uint32_t ct = s.chunk_tokens;

    for (uint32_t k = threadIdx.x; k < s.n_chunk * SLICE; k += blockDim.x) {
        const uint32_t   u = k / SLICE, i = k % SLICE;
        const slice_row *key = m->key + (uint64_t)u * ct;

        if (s.kind == KVD_INDEX_BOX) {
            float lo = key[0][i], hi = lo;

            for (uint32_t t = 1; t < ct; t++) {
                lo = key[t][i] < lo ? key[t][i] : lo;
                hi = key[t][i] > hi ? key[t][i] : hi;
            }
            m->a[u][i] = lo;
            m->b[u][i] = hi;
            continue;
        }
        m->a[u][i] = build_mean(key, ct, i);
        if (s.radius)
            m->spread[u][i] = build_spread(key, ct, i, m->a[u][i], m->spread[u][i]);
        if (s.kind == KVD_INDEX_MEAN_STD)
            m->b[u][i] =
                __fsqrt_rn(__fdiv_rn(build_spread(key, ct, i, m->a[u][i], 0.0f), (float)ct));
    }
    __syncthreads();
    build_pack(s.mark[0], lane, m->a, c0, m);
    if (s.n_mark > 1)
        build_pack(s.mark[1], lane, m->b, c0, m);
}

static __device__ void build_radius(const cpu_index_shape &s, uint8_t *lane, const build_slice *m)
{
    uint16_t *out = (uint16_t *)(lane + s.radius_off);

    for (uint32_t u = threadIdx.x; u < s.n_chunk; u += blockDim.x) {
        float sum = m->spread[u][0];

        for (uint32_t i = 1; i < SLICE; i++)
            sum = __fadd_rn(sum, m->spread[u][i]);
        out[u] = build_f16(__fsqrt_rn(__fdiv_rn(sum, (float)s.chunk_tokens)));
    }
}

static __global__ void __launch_bounds__(BUILD_THREADS)
    build_blocks(const kvd_index_build_args a, const cpu_index_shape s)
{
    __shared__ build_slice m;
    uint8_t               *lane = build_lane(a, blockIdx.x, blockIdx.y);

    build_clear(lane, s.bytes);
    for (uint32_t k = threadIdx.x; k < CHUNKS_MAX * SLICE; k += blockDim.x)
        m.spread[k / SLICE][k % SLICE] = 0.0f;
    for (uint32_t c0 = 0; c0 < s.dim; c0 += SLICE) {
        __syncthreads();
        build_load(a, blockIdx.x, blockIdx.y, c0, m.key);
        if (s.n_mark)
            build_marks(s, lane, c0, &m);
        if (s.has_key)
            build_pack(s.key, lane, m.key, c0, &m);
    }
    __syncthreads();
    if (s.radius)
        build_radius(s, lane, &m);
}

/* ---- clusters ---------------------------------------------------------------------- */

/* One segment's work: the area in scratch, and what fits beside it. */
typedef struct build_segment {
    uint32_t n_chunk, n_cent, dim;
    float   *mean; /* [n_chunk][dim] */
    float   *cent; /* [dim][256] */
    float   *norm; /* [256] */
} build_segment;

typedef struct segment_mem {
    uint8_t     assign[SEGMENT_CHUNK];
    uint16_t    member[SEGMENT_CHUNK]; /* chunks by centroid, each list ascending */
    uint32_t    count[SEGMENT_CENT], first[SEGMENT_CENT];
    uint32_t    scan[WARP + 1];
    build_slice slice;
} segment_mem;

static uint64_t segment_floats(uint32_t dim)
{
    return (uint64_t)(SEGMENT_CHUNK + SEGMENT_CENT) * dim + SEGMENT_CENT;
}

uint64_t cuda_build_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    (void)be;
    return lim->n_chunk ? SEGMENT_GRID * segment_floats(lim->head_dim) * sizeof(float) : 0;
}

static __device__ void segment_means(const kvd_index_build_args &a, const cpu_index_shape &s,
                                     uint32_t first, uint32_t head, const build_segment &g)
{
    const float part = __fdiv_rn(1.0f, (float)s.chunk_tokens);

    for (uint32_t k = threadIdx.x; k < g.n_chunk * g.dim; k += blockDim.x) {
        const uint32_t  u = k / g.dim, c = k % g.dim, t0 = u % s.n_chunk * s.chunk_tokens;
        const uint64_t *block = a.block + first + u / s.n_chunk;
        float           x     = sp_row_at(a.kv.type, cuda_kv_row(a.kv, block, head, t0), c);

        for (uint32_t t = 1; t < s.chunk_tokens; t++)
            x = __fadd_rn(x, sp_row_at(a.kv.type, cuda_kv_row(a.kv, block, head, t0 + t), c));
        g.mean[k] = __fmul_rn(x, part);
    }
    __syncthreads();
}

/* The nearest centroid of each chunk, of equals the first: least |c|^2 - 2 m.c. */
static __device__ void segment_nearest(const build_segment &g, segment_mem *m)
{
    for (uint32_t k = threadIdx.x; k < SEGMENT_CENT; k += blockDim.x) {
        float x = 0.0f;

        for (uint32_t i = 0; i < g.dim; i++) {
            const float c = g.cent[(uint64_t)i * SEGMENT_CENT + k];

            x = __fadd_rn(x, __fmul_rn(c, c));
        }
        g.norm[k] = x;
    }
    __syncthreads();
    for (uint32_t u = threadIdx.x; u < g.n_chunk; u += blockDim.x) {
        uint32_t best  = 0;
        float    least = 0.0f;

        for (uint32_t k0 = 0; k0 < g.n_cent; k0 += DOTS) {
            float dot[DOTS] = { 0.0f };

            for (uint32_t i = 0; i < g.dim; i++) {
                const float  x = g.mean[(uint64_t)u * g.dim + i];
                const float *c = g.cent + (uint64_t)i * SEGMENT_CENT + k0;

#pragma unroll
                for (uint32_t k = 0; k < DOTS; k++)
                    dot[k] = __fadd_rn(dot[k], __fmul_rn(x, c[k]));
            }
#pragma unroll
            for (uint32_t k = 0; k < DOTS; k++) {
                const float far = __fsub_rn(g.norm[k0 + k], __fmul_rn(2.0f, dot[k]));

                if (k0 + k == 0 || far < least) {
                    best  = k0 + k;
                    least = far;
                }
            }
        }
        m->assign[u] = (uint8_t)best;
    }
    __syncthreads();
}

/* Lists of the chunks of each centroid. */
static __device__ void segment_members(const build_segment &g, segment_mem *m)
{
    uint32_t n = 0, all, at;

    for (uint32_t u = 0; threadIdx.x < g.n_cent && u < g.n_chunk; u++)
        n += m->assign[u] == threadIdx.x;
    at = sp_block_scan(n, &all, m->scan);
    if (threadIdx.x < g.n_cent) {
        m->count[threadIdx.x] = n;
        m->first[threadIdx.x] = at;
        for (uint32_t u = 0; u < g.n_chunk; u++) {
            if (m->assign[u] == threadIdx.x)
                m->member[at++] = (uint16_t)u;
        }
    }
    __syncthreads();
}

/* Centroids become the means of their chunks; one without chunks stays. */
static __device__ void segment_centroids(const build_segment &g, segment_mem *m)
{
    segment_members(g, m);
    for (uint32_t p = threadIdx.x; p < g.n_cent * g.dim; p += blockDim.x) {
        const uint32_t k = p / g.dim, i = p % g.dim, n = m->count[k];
        float          sum = 0.0f;

        for (uint32_t j = 0; j < n; j++)
            sum = __fadd_rn(sum, g.mean[(uint64_t)m->member[m->first[k] + j] * g.dim + i]);
        if (n)
            g.cent[(uint64_t)i * SEGMENT_CENT + k] = __fdiv_rn(sum, (float)n);
    }
    __syncthreads();
}

/* k-means from evenly spaced chunks. */
static __device__ void segment_kmeans(const build_segment &g, segment_mem *m)
{
    for (uint32_t p = threadIdx.x; p < SEGMENT_CENT * g.dim; p += blockDim.x) {
        const uint32_t k = p / g.dim, i = p % g.dim;

        g.cent[(uint64_t)i * SEGMENT_CENT + k] =
            k < g.n_cent ? g.mean[(uint64_t)k * g.n_chunk / g.n_cent * g.dim + i] : 0.0f;
    }
    __syncthreads();
    for (uint32_t round = 0; round < N_KMEANS; round++) {
        segment_nearest(g, m);
        segment_centroids(g, m);
    }
}

static __device__ void segment_store(const cpu_index_shape &s, const build_segment &g, uint32_t at,
                                     uint8_t *lane, segment_mem *m)
{
    build_clear(lane, s.bytes);
    for (uint32_t c0 = 0; c0 < s.dim; c0 += SLICE) {
        __syncthreads();
        for (uint32_t p = threadIdx.x; p < CPU_INDEX_CENTROID * SLICE; p += blockDim.x) {
            const uint32_t k = p / SLICE, c = c0 + p % SLICE;

            m->slice.a[k][p % SLICE] =
                c < s.dim ? g.cent[(uint64_t)c * SEGMENT_CENT + at * CPU_INDEX_CENTROID + k] : 0.0f;
        }
        __syncthreads();
        build_pack(s.mark[0], lane, m->slice.a, c0, &m->slice);
    }
    if (threadIdx.x == 0)
        lane[s.cluster_off] = (uint8_t)at;
    for (uint32_t u = threadIdx.x; u < s.n_chunk; u += blockDim.x)
        lane[s.cluster_off + 64 + u] = m->assign[at * s.n_chunk + u];
}

static __global__ void __launch_bounds__(SEGMENT_CHUNK)
    build_segments(const kvd_index_build_args a, const cpu_index_shape s, float *scratch)
{
    __shared__ segment_mem m;
    const uint32_t         n_segment = (a.n_block + CPU_INDEX_SEGMENT - 1) / CPU_INDEX_SEGMENT;

    for (uint32_t item = blockIdx.x; item < n_segment * a.index.n_kv_head; item += gridDim.x) {
        const uint32_t head  = item % a.index.n_kv_head;
        const uint32_t first = item / a.index.n_kv_head * CPU_INDEX_SEGMENT;
        const uint32_t left  = a.n_block - first,
                       n     = left < CPU_INDEX_SEGMENT ? left : CPU_INDEX_SEGMENT;
        build_segment g      = { n * s.n_chunk, n * CPU_INDEX_CENTROID, s.dim, scratch };

        g.mean += ((uint64_t)(SEGMENT_CHUNK + SEGMENT_CENT) * s.dim + SEGMENT_CENT) * blockIdx.x;
        g.cent = g.mean + (uint64_t)SEGMENT_CHUNK * s.dim;
        g.norm = g.cent + (uint64_t)SEGMENT_CENT * s.dim;
        segment_means(a, s, first, head, g);
        segment_kmeans(g, &m);
        for (uint32_t b = 0; b < n; b++)
            segment_store(s, g, b, build_lane(a, first + b, head), &m);
        __syncthreads();
    }
}

/* ---- the ops ------------------------------------------------------------------------ */

kvd_status cuda_index_build(kvd_stream *st, const kvd_index_build_args *a, kvd_err *err)
{
    const cuda_backend *be = cuda_enter(st);
    cpu_index_shape     s;

    cpu_index_shape_of(&s, &a->index.desc);
    kvd_assert(a->kv.block_tokens == CPU_INDEX_BLOCK && a->kv.head_dim == s.dim);
    kvd_assert(a->kv.n_kv_head == a->index.n_kv_head);
    if (a->n_block == 0)
        return KVD_OK;
    if (s.kind == KVD_INDEX_CLUSTER) {
        const uint64_t n = kvd_min_u64(SEGMENT_GRID, kvd_div_up(a->n_block, CPU_INDEX_SEGMENT) *
                                                         a->index.n_kv_head);

        build_segments<<<(uint32_t)n, SEGMENT_CHUNK, 0, st->s>>>(
            *a, s,
            (float *)cuda_scratch_of(be, CUDA_SCRATCH_BUILD,
                                     n * segment_floats(s.dim) * sizeof(float)));
    } else {
        build_blocks<<<dim3(a->n_block, a->index.n_kv_head), BUILD_THREADS, 0, st->s>>>(*a, s);
    }
    return cuda_launched("index_build", err);
}

/* Sums in the order of the tokens, by one thread a channel. */
static __global__ void zone_means(const kvd_zone_build_args a)
{
    const uint32_t b = blockIdx.x, head = blockIdx.y, n = a.kv.block_tokens / a.zone.block_tokens;
    const float    part = __fdiv_rn(1.0f, (float)n);

    for (uint32_t k = threadIdx.x; k < 2 * a.zone.block_tokens * a.kv.head_dim; k += blockDim.x) {
        const uint32_t i = k % a.kv.head_dim, z = k / a.kv.head_dim / 2;
        const bool     v = k / a.kv.head_dim % 2;
        float          x = 0.0f;

        for (uint32_t t = 0; t < n; t++)
            x = __fadd_rn(x, sp_row_at(a.kv.type,
                                       cuda_kv_row(a.kv, a.block + b, head, z * n + t) +
                                           (v ? a.kv.record_bytes / 2 : 0),
                                       i));
        sp_row_put(a.zone.type,
                   cuda_kv_row(a.zone, a.zblock + b, head, z) + (v ? a.zone.record_bytes / 2 : 0),
                   i, __fmul_rn(x, part));
    }
}

kvd_status cuda_zone_build(kvd_stream *st, const kvd_zone_build_args *a, kvd_err *err)
{
    cuda_enter(st);
    kvd_assert(a->kv.n_kv_head == a->zone.n_kv_head && a->kv.head_dim == a->zone.head_dim);
    kvd_assert(a->kv.block_tokens % a->zone.block_tokens == 0);
    if (a->n_block == 0)
        return KVD_OK;
    zone_means<<<dim3(a->n_block, a->kv.n_kv_head), BUILD_THREADS, 0, st->s>>>(*a);
    return cuda_launched("zone_build", err);
}
