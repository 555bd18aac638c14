/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_build.c - the index of sealed blocks, for "cpu" and "ref" alike.
 *
 * Plain float arithmetic in a fixed order, and no contraction (see cmake/flags.cmake): the same K
 * gives the same index bytes at every level, by every backend.  Channels are taken 16 at a time
 * ("slice"), which keeps what is worked on in L1 and lets the compiler use vectors across them.
 * Owns: nothing; clusters are found in the backend's index scratch.  Thread: the backend's caller;
 * a pool item is one lane of one block (or segment). */
#include <math.h>

#include "backend/cpu/cpu_index.h"
#include "backend/cpu/cpu_kv.h"
#include "backend/index_layout.h"

#define SLICE    16u
#define F16_MAX  65504.0f
#define N_KMEANS 6u /* rounds of k-means; hardly a chunk changes place after five */

typedef float slice_row[SLICE];

typedef struct build_job {
    const kvd_index_build_args *a;
    cpu_index_shape             shape;
    uint8_t                    *scratch; /* [n_thread][scratch_bytes] */
    uint64_t                    scratch_bytes;
} build_job;

static uint8_t *build_lane(const build_job *j, uint32_t block, uint32_t head)
{
    const kvd_index_layout *ix = &j->a->index;

    return (uint8_t *)ix->pool + j->a->iblock[block] + ix->lane_off + head * ix->head_stride;
}

/* Channels [c0, c0 + 16) of the keys of one block; zeros past head_dim. */
static void build_load(const build_job *j, uint32_t block, uint32_t head, uint32_t c0,
                       slice_row key[CPU_INDEX_BLOCK])
{
    const kvd_kv_layout *kv = &j->a->kv;
    const uint32_t       n  = kv->head_dim - c0 < SLICE ? kv->head_dim - c0 : SLICE;

    for (uint32_t t = 0; t < CPU_INDEX_BLOCK; t++) {
        const uint8_t *row = cpu_kv_row(kv, j->a->block + block, head, t);

        for (uint32_t i = n; i < SLICE; i++)
            key[t][i] = 0.0f;
        if (kv->type == KVD_DTYPE_F32) {
            memcpy(key[t], row + 4 * (uint64_t)c0, n * sizeof(float));
        } else {
            for (uint32_t i = 0; i < n; i++)
                key[t][i] = kvd_bf16_to_f32(((const uint16_t *)(const void *)row)[c0 + i]);
        }
    }
}

/* ---- planes ---------------------------------------------------------------------- */

static uint16_t build_f16(float x)
{
    if (!(x > -F16_MAX)) /* NaN too */
        x = -F16_MAX;
    return kvd_f32_to_f16(x < F16_MAX ? x : F16_MAX);
}

static void build_pack_bf16(const cpu_index_plane *p, uint8_t *lane, const slice_row *v,
                            uint32_t c0)
{
    uint16_t      *out = (uint16_t *)(void *)(lane + p->code_off);
    const uint32_t n   = p->dim - c0 < SLICE ? p->dim - c0 : SLICE;

    for (uint32_t u = 0; u < p->n_unit; u++) {
        uint16_t *tile = out + (uint64_t)(u / CPU_INDEX_TILE) * p->dim * CPU_INDEX_TILE;

        for (uint32_t i = 0; i < n; i++)
            tile[(c0 + i) * CPU_INDEX_TILE + u % CPU_INDEX_TILE] = kvd_f32_to_bf16(v[u][i]);
    }
}

/* Scale and minimum of each channel over the group's units, as stored. */
static void build_params(const cpu_index_plane *p, uint8_t *lane, const slice_row *v, uint32_t g,
                         uint32_t c0, float scale[SLICE], float min[SLICE])
{
    uint16_t   *par    = (uint16_t *)(void *)(lane + p->param_off) + (uint64_t)g * 2 * p->dim_pad;
    const float levels = (float)((1u << p->bits) - 1u);
    float       max[SLICE];

    memcpy(min, v[0], sizeof(slice_row));
    memcpy(max, v[0], sizeof(slice_row));
    for (uint32_t u = 1; u < p->group; u++) {
        for (uint32_t i = 0; i < SLICE; i++) {
            min[i] = v[u][i] < min[i] ? v[u][i] : min[i];
            max[i] = v[u][i] > max[i] ? v[u][i] : max[i];
        }
    }
    for (uint32_t i = 0; i < SLICE && c0 + i < p->dim_pad; i++) {
        const uint16_t lo = build_f16(min[i]), st = build_f16((max[i] - min[i]) / levels);

        par[c0 + i]              = st;
        par[p->dim_pad + c0 + i] = lo;
        scale[i]                 = kvd_f16_to_f32(st);
        min[i]                   = kvd_f16_to_f32(lo);
    }
}

static void build_pack_int(const cpu_index_plane *p, uint8_t *lane, const slice_row *v, uint32_t c0)
{
    const uint32_t per_row      = cpu_index_per_row(p);
    const float    levels       = (float)((1u << p->bits) - 1u);
    float          scale[SLICE] = { 0 }, min[SLICE];

    for (uint32_t u = 0; u < p->n_unit; u++) {
        uint8_t *tile = lane + p->code_off + u / CPU_INDEX_TILE * p->tile_bytes;
        uint32_t code[SLICE];

        if (u % p->group == 0)
            build_params(p, lane, v + u, u / p->group, c0, scale, min);
        for (uint32_t i = 0; i < SLICE; i++) {
            const float t = (v[u][i] - min[i]) / (scale[i] > 0.0f ? scale[i] : HUGE_VALF) + 0.5f;
            const float c = t > 0.0f ? t : 0.0f; /* NaN too */

            code[i] = (uint32_t)(int32_t)(c < levels ? c : levels);
        }
        for (uint32_t c = 0; c < SLICE && c0 + c < p->dim_pad; c += per_row) {
            uint8_t *row = tile + (uint64_t)((c0 + c) / per_row) * 64 + 4 * (u % CPU_INDEX_TILE);

            for (uint32_t r = 0; r < 4; r++) {
                uint32_t b = 0;

                for (uint32_t s = 0; s < 8 / p->bits; s++)
                    b |= code[c + 4 * s + r] << (p->bits * s);
                row[r] = (uint8_t)b;
            }
        }
    }
}

static void build_pack(const cpu_index_plane *p, uint8_t *lane, const slice_row *v, uint32_t c0)
{
    if (p->elem == KVD_INDEX_BF16)
        build_pack_bf16(p, lane, v, c0);
    else
        build_pack_int(p, lane, v, c0);
}

/* ---- landmarks of chunks --------------------------------------------------------- */

static void build_mean(const slice_row *key, uint32_t chunk_tokens, slice_row out)
{
    const float part = 1.0f / (float)chunk_tokens;

    memcpy(out, key[0], sizeof(slice_row));
    for (uint32_t t = 1; t < chunk_tokens; t++) {
        for (uint32_t i = 0; i < SLICE; i++)
            out[i] += key[t][i];
    }
    for (uint32_t i = 0; i < SLICE; i++)
        out[i] *= part;
}

/* sum += (key - mean)^2 over the chunk's tokens */
static void build_spread(const slice_row *key, uint32_t chunk_tokens, const slice_row mean,
                         slice_row sum)
{
    for (uint32_t t = 0; t < chunk_tokens; t++) {
        for (uint32_t i = 0; i < SLICE; i++) {
            const float d = key[t][i] - mean[i];

            sum[i] += d * d;
        }
    }
}

static void build_box(const slice_row *key, uint32_t chunk_tokens, slice_row min, slice_row max)
{
    memcpy(min, key[0], sizeof(slice_row));
    memcpy(max, key[0], sizeof(slice_row));
    for (uint32_t t = 1; t < chunk_tokens; t++) {
        for (uint32_t i = 0; i < SLICE; i++) {
            min[i] = key[t][i] < min[i] ? key[t][i] : min[i];
            max[i] = key[t][i] > max[i] ? key[t][i] : max[i];
        }
    }
}

/* The landmarks of one slice; spread gathers the squared distances for the radius. */
static void build_marks(const cpu_index_shape *s, uint8_t *lane, const slice_row *key, uint32_t c0,
                        slice_row *spread)
{
    slice_row      a[CPU_INDEX_BLOCK / 4], b[CPU_INDEX_BLOCK / 4];
    const uint32_t ct = s->chunk_tokens;

    for (uint32_t u = 0; u < s->n_chunk; u++) {
        const slice_row *k = key + (uint64_t)u * ct;

        if (s->kind == KVD_INDEX_BOX) {
            build_box(k, ct, a[u], b[u]);
            continue;
        }
        build_mean(k, ct, a[u]);
        if (s->radius)
            build_spread(k, ct, a[u], spread[u]);
        if (s->kind == KVD_INDEX_MEAN_STD) {
            memset(b[u], 0, sizeof(slice_row));
            build_spread(k, ct, a[u], b[u]);
            for (uint32_t i = 0; i < SLICE; i++)
                b[u][i] = sqrtf(b[u][i] / (float)ct);
        }
    }
    build_pack(&s->mark[0], lane, a, c0);
    if (s->n_mark > 1)
        build_pack(&s->mark[1], lane, b, c0);
}

static void build_radius(const cpu_index_shape *s, uint8_t *lane, const slice_row *spread)
{
    uint16_t *out = (uint16_t *)(void *)(lane + s->radius_off);

    for (uint32_t u = 0; u < s->n_chunk; u++) {
        float sum = spread[u][0];

        for (uint32_t i = 1; i < SLICE; i++)
            sum += spread[u][i];
        out[u] = build_f16(sqrtf(sum / (float)s->chunk_tokens));
    }
}

static void build_block(const build_job *j, uint32_t block, uint32_t head)
{
    const cpu_index_shape *s                           = &j->shape;
    uint8_t               *lane                        = build_lane(j, block, head);
    slice_row              spread[CPU_INDEX_BLOCK / 4] = { { 0 } };
    slice_row              key[CPU_INDEX_BLOCK];

    memset(lane, 0, s->bytes); /* what lies between sections goes to files too */
    for (uint32_t c0 = 0; c0 < s->dim; c0 += SLICE) {
        build_load(j, block, head, c0, key);
        if (s->n_mark)
            build_marks(s, lane, key, c0, spread);
        if (s->has_key)
            build_pack(&s->key, lane, key, c0);
    }
    if (s->radius)
        build_radius(s, lane, spread);
}

/* ---- clusters -------------------------------------------------------------------- */

/* The work area of one segment.  Centroids lie transposed, so that all distances of a chunk's mean
 * are summed side by side, each in the order of the channels. */
typedef struct build_segment {
    uint32_t n_chunk, n_cent, dim;
    float   *mean; /* [n_chunk][dim] */
    float   *cent; /* [dim][256] */
    float   *norm; /* [256] |centroid|^2 */
    float   *dot;  /* [256] */
    uint32_t count[CPU_INDEX_SEGMENT * CPU_INDEX_CENTROID];
    uint8_t *assign; /* [n_chunk] */
} build_segment;

#define SEGMENT_CENT  (CPU_INDEX_SEGMENT * CPU_INDEX_CENTROID)
#define SEGMENT_CHUNK (CPU_INDEX_SEGMENT * CPU_INDEX_BLOCK / 4)

static uint64_t build_segment_bytes(uint32_t dim)
{
    const uint64_t floats = (uint64_t)(SEGMENT_CHUNK + SEGMENT_CENT) * dim + 2 * SEGMENT_CENT;

    return kvd_align_up(floats * sizeof(float) + SEGMENT_CHUNK, 64);
}

static void build_norms(build_segment *g)
{
    memset(g->norm, 0, SEGMENT_CENT * sizeof(float));
    for (uint32_t i = 0; i < g->dim; i++) {
        const float *c = g->cent + (uint64_t)i * SEGMENT_CENT;

        for (uint32_t k = 0; k < SEGMENT_CENT; k++)
            g->norm[k] += c[k] * c[k];
    }
}

/* dot[k] += mean . centroid k over four channels, each in turn. */
static void build_dots(build_segment *g, const float *mean, uint32_t i)
{
    const float *c = g->cent + (uint64_t)i * SEGMENT_CENT;
    float       *d = g->dot;

    for (uint32_t k = 0; k < g->n_cent; k++)
        d[k] = (((d[k] + mean[i] * c[k]) + mean[i + 1] * c[SEGMENT_CENT + k]) +
                mean[i + 2] * c[2 * SEGMENT_CENT + k]) +
               mean[i + 3] * c[3 * SEGMENT_CENT + k];
}

/* The nearest centroid, of equals the first: least |c|^2 - 2 m.c. */
static uint8_t build_nearest(build_segment *g, const float *mean)
{
    uint32_t best = 0, i = 0;

    memset(g->dot, 0, SEGMENT_CENT * sizeof(float));
    for (; i + 4 <= g->dim; i += 4)
        build_dots(g, mean, i);
    for (; i < g->dim; i++) {
        for (uint32_t k = 0; k < g->n_cent; k++)
            g->dot[k] += mean[i] * g->cent[(uint64_t)i * SEGMENT_CENT + k];
    }
    for (uint32_t k = 1; k < g->n_cent; k++) {
        if (g->norm[k] - 2.0f * g->dot[k] < g->norm[best] - 2.0f * g->dot[best])
            best = k;
    }
    return (uint8_t)best;
}

/* Centroids become the means of their chunks; one without chunks stays. */
static void build_centroids(build_segment *g)
{
    memset(g->count, 0, sizeof(g->count));
    for (uint32_t u = 0; u < g->n_chunk; u++)
        g->count[g->assign[u]]++;
    for (uint32_t i = 0; i < g->dim; i++) {
        float  sum[SEGMENT_CENT] = { 0 };
        float *c                 = g->cent + (uint64_t)i * SEGMENT_CENT;

        for (uint32_t u = 0; u < g->n_chunk; u++)
            sum[g->assign[u]] += g->mean[(uint64_t)u * g->dim + i];
        for (uint32_t k = 0; k < g->n_cent; k++)
            c[k] = g->count[k] ? sum[k] / (float)g->count[k] : c[k];
    }
}

/* k-means from evenly spaced chunks. */
static void build_kmeans(build_segment *g)
{
    memset(g->cent, 0, (uint64_t)g->dim * SEGMENT_CENT * sizeof(float));
    for (uint32_t k = 0; k < g->n_cent; k++) {
        const float *m = g->mean + (uint64_t)k * g->n_chunk / g->n_cent * g->dim;

        for (uint32_t i = 0; i < g->dim; i++)
            g->cent[(uint64_t)i * SEGMENT_CENT + k] = m[i];
    }
    for (uint32_t round = 0; round < N_KMEANS; round++) {
        build_norms(g);
        for (uint32_t u = 0; u < g->n_chunk; u++)
            g->assign[u] = build_nearest(g, g->mean + (uint64_t)u * g->dim);
        build_centroids(g);
    }
}

static void build_segment_means(const build_job *j, uint32_t block, uint32_t head, float *mean)
{
    const cpu_index_shape *s = &j->shape;
    slice_row              key[CPU_INDEX_BLOCK], m;

    for (uint32_t c0 = 0; c0 < s->dim; c0 += SLICE) {
        const uint32_t n = s->dim - c0 < SLICE ? s->dim - c0 : SLICE;

        build_load(j, block, head, c0, key);
        for (uint32_t u = 0; u < s->n_chunk; u++) {
            build_mean(key + (uint64_t)u * s->chunk_tokens, s->chunk_tokens, m);
            memcpy(mean + (uint64_t)u * s->dim + c0, m, n * sizeof(float));
        }
    }
}

static void build_segment_store(const build_job *j, const build_segment *g, uint32_t at,
                                uint8_t *lane)
{
    const cpu_index_shape *s = &j->shape;
    slice_row              v[CPU_INDEX_CENTROID];

    memset(lane, 0, s->bytes);
    for (uint32_t c0 = 0; c0 < s->dim; c0 += SLICE) {
        for (uint32_t k = 0; k < CPU_INDEX_CENTROID; k++) {
            for (uint32_t i = 0; i < SLICE; i++)
                v[k][i] =
                    c0 + i < s->dim
                        ? g->cent[(uint64_t)(c0 + i) * SEGMENT_CENT + at * CPU_INDEX_CENTROID + k]
                        : 0.0f;
        }
        build_pack(&s->mark[0], lane, v, c0);
    }
    lane[s->cluster_off] = (uint8_t)at;
    memcpy(lane + s->cluster_off + 64, g->assign + (uint64_t)at * s->n_chunk, s->n_chunk);
}

static void build_clusters(const build_job *j, uint32_t first, uint32_t n_block, uint32_t head,
                           void *scratch)
{
    const cpu_index_shape *s = &j->shape;
    build_segment          g = { .n_chunk = n_block * s->n_chunk,
                                 .n_cent  = n_block * CPU_INDEX_CENTROID,
                                 .dim     = s->dim,
                                 .mean    = scratch };

    g.cent   = g.mean + (uint64_t)SEGMENT_CHUNK * s->dim;
    g.norm   = g.cent + (uint64_t)SEGMENT_CENT * s->dim;
    g.dot    = g.norm + SEGMENT_CENT;
    g.assign = (uint8_t *)(g.dot + SEGMENT_CENT);
    for (uint32_t b = 0; b < n_block; b++)
        build_segment_means(j, first + b, head, g.mean + (uint64_t)b * s->n_chunk * s->dim);
    build_kmeans(&g);
    for (uint32_t b = 0; b < n_block; b++)
        build_segment_store(j, &g, b, build_lane(j, first + b, head));
}

/* ---- the op ---------------------------------------------------------------------- */

static void build_item(void *ctx, uint32_t item, uint32_t thread)
{
    const build_job *j = ctx;
    const uint32_t   h = item % j->a->index.n_kv_head, b = item / j->a->index.n_kv_head;

    if (j->shape.kind == KVD_INDEX_CLUSTER) {
        const uint32_t first = b * CPU_INDEX_SEGMENT;

        build_clusters(j, first, (uint32_t)kvd_min_u64(j->a->n_block - first, CPU_INDEX_SEGMENT), h,
                       j->scratch + thread * j->scratch_bytes);
    } else {
        build_block(j, b, h);
    }
}

/* For clusters, whatever the kind: a session may change it.  Untouched pages cost nothing. */
uint64_t cpu_index_build_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim)
{
    if (lim->n_chunk == 0)
        return 0;
    return build_segment_bytes(lim->head_dim) * be->base.n_thread;
}

kvd_status cpu_index_build(kvd_stream *st, const kvd_index_build_args *a, kvd_err *err)
{
    cpu_backend *be = st->be;
    build_job    j  = { .a = a, .scratch = be->ix_scratch };
    uint32_t     n_item;

    (void)err;
    cpu_kv_check(&a->kv);
    cpu_index_shape_of(&j.shape, &a->index.desc);
    kvd_assert(a->kv.block_tokens == CPU_INDEX_BLOCK && a->kv.head_dim == j.shape.dim);
    kvd_assert(a->kv.n_kv_head == a->index.n_kv_head);
    n_item = a->n_block;
    if (j.shape.kind == KVD_INDEX_CLUSTER) {
        j.scratch_bytes = build_segment_bytes(j.shape.dim);
        kvd_assert(j.scratch_bytes * be->base.n_thread <= be->ix_scratch_bytes);
        n_item = (uint32_t)kvd_div_up(a->n_block, CPU_INDEX_SEGMENT);
    }
    n_item *= a->index.n_kv_head;
    if (be->pool && n_item > 1) {
        os_pool_run(be->pool, n_item, build_item, &j);
    } else {
        for (uint32_t i = 0; i < n_item; i++)
            build_item(&j, i, 0);
    }
    return KVD_OK;
}
