/* SPDX-License-Identifier: Apache-2.0 */
/* sparse_gym.c - times the CUDA backend's sparse ops at the shape of Llama-3-8B: 32 query heads, 8
 * KV heads of 128, chunks of 4, INT4 landmarks with radius, 1.56 % of the tokens selected, windows
 * of twice that.  CSV: op, context, batch, us per op, GB/s of what it must read and write at least.
 * usage: sparse_gym MODULE [quick | CASE]   (CASE: a number, of one case alone)
 *
 * 32 copies of an op are recorded into a graph, each with data of its own as layers have, so that
 * they come from memory and not from the cache.  The median of several runs of the graph counts. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"

#define N_HEAD  32u
#define N_KV    8u
#define DIM     128u
#define CHUNK   4u
#define N_OP    32u
#define N_RUN   9u  /* medians of so many ... */
#define N_GRAPH 10u /* ... runs of the graph, waited for once */

/* ---- the world ------------------------------------------------------------------------------ */

static kvd_backend *be;
static kvd_stream  *st;

static void check(kvd_status rc, const kvd_err *err)
{
    if (rc != KVD_OK) {
        fprintf(stderr, "%s\n", err->msg);
        exit(1);
    }
}

static uint8_t *device(kvd_mem_kind kind, uint64_t bytes)
{
    kvd_err err = { 0 };
    kvd_mem m;

    check(be->ops->mem_alloc(be, kind, bytes, &m, &err), &err);
    return m.ptr;
}

static void up(void *dst, const void *src, uint64_t bytes)
{
    const kvd_mem to   = { dst, bytes, KVD_MEM_DEVICE };
    const kvd_mem from = { (void *)(uintptr_t)src, bytes, KVD_MEM_HOST };
    kvd_err       err  = { 0 };

    check(be->ops->copy(st, to, 0, from, 0, bytes, &err), &err);
    check(be->ops->stream_sync(st, &err), &err);
}

static float noise(kvd_rng *r)
{
    return (kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) + kvd_rng_f32(r) - 2.0f) * 1.73f;
}

/* n bf16 numbers, a run of them repeated. */
static void fill_bf16(uint8_t *dst, uint64_t n)
{
    const uint64_t run = 1u << 22;
    uint16_t      *x   = kvd_malloc(run * sizeof(*x));
    kvd_rng        rng;

    kvd_rng_seed(&rng, 7);
    for (uint64_t i = 0; i < run; i++)
        x[i] = kvd_f32_to_bf16(noise(&rng));
    for (uint64_t i = 0; i < n; i += run)
        up(dst + 2 * i, x, 2 * (n - i < run ? n - i : run));
    kvd_free(x);
}

/* ---- one case -------------------------------------------------------------------------------- */

typedef struct world {
    uint32_t         ctx, batch, n_chunk, n_block, k, slots;
    kvd_kv_layout    kv;
    kvd_index_layout ix;
    uint8_t         *q, *lse, *part, *out, *score, *sel, *result, *change, *stay, *fetch, *into;
    uint8_t         *row, *select, *window, *near, *kept, *src, *dst;
    uint8_t         *host, *pooled;
    uint8_t         *place, *listed, *near_list, *urgent_list; /* of a whole layer */
    uint64_t         span_bytes;                               /* of one copy's spans */
    uint64_t         n_fetch;
    uint8_t *miss_seq, *miss_place, *missed, *param, *packed, *offs; /* of fetches, packing */
} world;

/* Offsets of blocks in an order that is not theirs. */
static uint64_t *shuffled(uint64_t n, uint64_t step)
{
    uint64_t *at = kvd_malloc(n * sizeof(*at));

    for (uint64_t i = 0; i < n; i++)
        at[i] = (i * 7919 % n) * step;
    return at;
}

/* Seqs of select and window, of every copy. */
static void make_seqs(world *w, const uint8_t *iblock, uint8_t *ema, uint8_t *slot_of,
                      uint8_t *chunk_of, uint8_t *stamp, const uint8_t *k, const uint8_t *cap)
{
    const uint64_t  n   = (uint64_t)N_OP * w->batch;
    kvd_select_seq *sel = kvd_calloc(n, sizeof(*sel));
    kvd_window_seq *win = kvd_calloc(n, sizeof(*win));

    for (uint64_t i = 0; i < n; i++) {
        const uint64_t chunks = i * N_KV * w->n_chunk, slots = i * N_KV * w->slots;
        const uint64_t mine = i % w->batch * N_KV; /* lists are the step's, not the layer's */

        sel[i] = (kvd_select_seq){
            .row         = (uint32_t)(i % w->batch),
            .first_chunk = 1,
            .n_chunk     = w->n_chunk,
            .k           = (const uint32_t *)(const void *)k,
            .iblock      = (const uint64_t *)(const void *)iblock + i % w->batch * w->n_block,
            .score       = (float *)(void *)w->score + mine * w->n_chunk,
            .ema         = (uint16_t *)(void *)ema + chunks,
            .sel         = (uint32_t *)(void *)w->sel + mine * w->slots,
        };
        win[i] = (kvd_window_seq){
            .step     = 5,
            .cap      = (const uint32_t *)(const void *)cap,
            .sel      = sel[i].sel,
            .ema      = sel[i].ema,
            .slot_of  = (uint16_t *)(void *)slot_of + chunks,
            .chunk_of = (uint32_t *)(void *)chunk_of + slots,
            .stamp    = (uint32_t *)(void *)stamp + slots,
            .stay     = (uint32_t *)(void *)w->stay + mine * w->slots,
            .fetch    = (uint32_t *)(void *)w->fetch + mine * w->slots,
            .into     = (uint32_t *)(void *)w->into + mine * w->slots,
        };
    }
    w->select = device(KVD_MEM_DEVICE, n * sizeof(*sel));
    w->window = device(KVD_MEM_DEVICE, n * sizeof(*win));
    up(w->select, sel, n * sizeof(*sel));
    up(w->window, win, n * sizeof(*win));
    kvd_free(sel);
    kvd_free(win);
}

/* A window's records, random in the pool; and the kept set, a sink and 300 keys. */
static void make_spans(world *w, const uint8_t *block)
{
    const uint64_t lanes = (uint64_t)w->batch * N_KV, n = N_OP * lanes;
    kvd_attn_span *near = kvd_calloc(n, sizeof(*near)), *kept = kvd_calloc(n, sizeof(*kept));
    uint64_t      *rec = kvd_malloc(n * w->slots * sizeof(*rec));
    uint8_t       *at  = device(KVD_MEM_DEVICE, n * w->slots * sizeof(*rec));
    const uint64_t n_record =
        (uint64_t)w->batch * w->n_block * N_KV * w->kv.head_stride / w->kv.record_bytes;
    kvd_rng rng;

    kvd_rng_seed(&rng, 3);
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t *mine = (const uint64_t *)(const void *)at + i * w->slots;

        for (uint32_t s = 0; s < w->slots; s++)
            rec[i * w->slots + s] = kvd_rng_below(&rng, n_record) * w->kv.record_bytes;
        near[i] = (kvd_attn_span){ .record = mine, .n_record = w->slots };
        kept[i] = (kvd_attn_span){ .record    = mine,
                                   .n_record  = 1,
                                   .block     = (const uint64_t *)(const void *)block,
                                   .first_key = (uint32_t)(i % 7) * 256,
                                   .end_key   = (uint32_t)(i % 7) * 256 + 300 };
    }
    up(at, rec, n * w->slots * sizeof(*rec));
    w->near = device(KVD_MEM_DEVICE, n * sizeof(*near));
    w->kept = device(KVD_MEM_DEVICE, n * sizeof(*kept));
    up(w->near, near, n * sizeof(*near));
    up(w->kept, kept, n * sizeof(*kept));
    kvd_free(near);
    kvd_free(kept);
    kvd_free(rec);
}

static void make_places(world *w, const uint8_t *block)
{
    w->place = device(KVD_MEM_DEVICE, w->batch * sizeof(kvd_window_place));
    for (uint32_t i = 0; i < w->batch; i++) {
        const kvd_window_place p = { .block = (const uint64_t *)(const void *)block +
                                              (uint64_t)i * w->n_block };

        up(w->place + i * sizeof(p), &p, sizeof(p));
    }
}

static void make_copies(world *w)
{
    const uint64_t n   = (uint64_t)w->batch * N_KV * (w->k / 4) + 1;
    uint64_t      *off = kvd_malloc(n * sizeof(*off));

    w->n_fetch = n;
    w->src     = device(KVD_MEM_DEVICE, n * sizeof(*off));
    w->dst     = device(KVD_MEM_DEVICE, n * sizeof(*off));
    w->host    = device(KVD_MEM_PINNED, 1u << 30);
    w->pooled  = device(KVD_MEM_DEVICE, (uint64_t)w->batch * N_KV * w->slots * w->kv.record_bytes);
    for (uint64_t i = 0; i < n; i++)
        off[i] = i * 40503 % ((1u << 30) / w->kv.record_bytes) * w->kv.record_bytes;
    up(w->src, off, n * sizeof(*off));
    for (uint64_t i = 0; i < n; i++)
        off[i] = i * w->kv.record_bytes;
    up(w->dst, off, n * sizeof(*off));
    kvd_free(off);
}

static kvd_record_format packed_format(kvd_record_type type)
{
    return (kvd_record_format){ .type         = type,
                                .raw          = KVD_DTYPE_BF16,
                                .chunk_tokens = CHUNK,
                                .block_tokens = 256,
                                .head_dim     = DIM };
}

/* A fourth of each lane's selection is missed; its records lie anywhere in the host's. */
static void make_misses(world *w)
{
    const kvd_record_format f = packed_format(KVD_RECORD_INT8);
    const uint64_t          n = w->k / 4, lanes = (uint64_t)w->batch * N_KV;
    const uint64_t          aux = kvd_record_param_bytes(&f), block = N_KV * aux;
    uint32_t               *chunk   = kvd_malloc(lanes * w->slots * 4);
    uint32_t               *host    = kvd_malloc(lanes * w->n_chunk * 4);
    uint64_t               *at      = kvd_malloc((w->n_block + lanes) * sizeof(*at));
    uint8_t                *fetch   = device(KVD_MEM_DEVICE, lanes * w->slots * 4);
    uint8_t                *into    = device(KVD_MEM_DEVICE, lanes * w->slots * 4);
    uint8_t                *host_of = device(KVD_MEM_DEVICE, lanes * w->n_chunk * 4);
    uint8_t                *lists   = device(KVD_MEM_DEVICE, (w->n_block + lanes) * sizeof(*at));
    const kvd_window_result r       = { .n_miss = (uint32_t)n };

    w->param      = device(KVD_MEM_DEVICE, w->n_block * block);
    w->miss_seq   = device(KVD_MEM_DEVICE, w->batch * sizeof(kvd_window_seq));
    w->miss_place = device(KVD_MEM_DEVICE, w->batch * sizeof(kvd_window_place));
    w->missed     = device(KVD_MEM_DEVICE, lanes * sizeof(r));
    for (uint64_t i = 0; i < lanes * w->slots; i++)
        chunk[i] = (uint32_t)(i % w->slots);
    up(into, chunk, lanes * w->slots * 4);
    for (uint64_t i = 0; i < lanes * w->slots; i++)
        chunk[i] = (uint32_t)(i % w->slots * (w->n_chunk / w->slots));
    up(fetch, chunk, lanes * w->slots * 4);
    for (uint64_t i = 0; i < lanes * w->n_chunk; i++)
        host[i] = (uint32_t)(i * 40503 % ((1u << 30) / w->kv.record_bytes));
    up(host_of, host, lanes * w->n_chunk * 4);
    for (uint32_t b = 0; b < w->n_block; b++)
        at[b] = b * block;
    for (uint64_t i = 0; i < lanes; i++) {
        at[w->n_block + i] = i * w->slots * w->kv.record_bytes;
        up(w->missed + i * sizeof(r), &r, sizeof(r));
    }
    up(lists, at, (w->n_block + lanes) * sizeof(*at));
    for (uint32_t i = 0; i < w->batch; i++) {
        const uint64_t         slots = (uint64_t)i * N_KV * w->slots;
        const kvd_window_seq   q     = { .fetch = (uint32_t *)(void *)fetch + slots,
                                         .into  = (uint32_t *)(void *)into + slots };
        const kvd_window_place p     = {
                .at      = (uint64_t *)(void *)lists + w->n_block + (uint64_t)i * N_KV,
                .host_of = (uint32_t *)(void *)host_of + (uint64_t)i * N_KV * w->n_chunk,
                .iblock  = (uint64_t *)(void *)lists
        };

        up(w->miss_seq + i * sizeof(q), &q, sizeof(q));
        up(w->miss_place + i * sizeof(p), &p, sizeof(p));
    }
    kvd_free(chunk);
    kvd_free(host);
    kvd_free(at);
}

/* One block of a layer, to be packed. */
static void make_packed(world *w)
{
    const kvd_record_format f = packed_format(KVD_RECORD_INT8);
    uint64_t                at[3 * N_KV];

    for (uint32_t h = 0; h < N_KV; h++) {
        at[h]            = h * w->kv.head_stride;
        at[N_KV + h]     = h * kvd_record_param_bytes(&f);
        at[2 * N_KV + h] = h * (w->kv.head_stride / 2);
    }
    w->packed = device(KVD_MEM_DEVICE, N_KV * w->kv.head_stride / 2);
    w->offs   = device(KVD_MEM_DEVICE, sizeof(at));
    up(w->offs, at, sizeof(at));
}

static void make_outputs(world *w)
{
    const uint64_t lanes = (uint64_t)w->batch * N_KV, all = N_OP * lanes;
    kvd_rng        rng;
    float         *q = kvd_malloc((uint64_t)w->batch * N_HEAD * DIM * sizeof(*q));

    kvd_rng_seed(&rng, 5);
    for (uint64_t i = 0; i < (uint64_t)w->batch * N_HEAD * DIM; i++)
        q[i] = 2.0f * noise(&rng);
    w->q = device(KVD_MEM_DEVICE, (uint64_t)w->batch * N_HEAD * DIM * sizeof(*q));
    up(w->q, q, (uint64_t)w->batch * N_HEAD * DIM * sizeof(*q));
    kvd_free(q);
    w->row = device(KVD_MEM_DEVICE, w->batch * sizeof(uint32_t));
    for (uint32_t i = 0; i < w->batch; i++)
        up(w->row + i * sizeof(i), &i, sizeof(i));
    w->lse         = device(KVD_MEM_DEVICE, (uint64_t)w->batch * N_HEAD * 4);
    w->out         = device(KVD_MEM_DEVICE, (uint64_t)w->batch * N_HEAD * DIM * 4);
    w->part        = device(KVD_MEM_DEVICE, lanes * kvd_attn_part_floats(N_HEAD / N_KV, DIM) * 4);
    w->score       = device(KVD_MEM_DEVICE, lanes * w->n_chunk * 4);
    w->sel         = device(KVD_MEM_DEVICE, lanes * w->slots * 4);
    w->stay        = device(KVD_MEM_DEVICE, lanes * w->slots * 4);
    w->fetch       = device(KVD_MEM_DEVICE, lanes * w->slots * 4);
    w->into        = device(KVD_MEM_DEVICE, lanes * w->slots * 4);
    w->result      = device(KVD_MEM_DEVICE, all * sizeof(kvd_select_result));
    w->change      = device(KVD_MEM_DEVICE, all * sizeof(kvd_window_result));
    w->listed      = device(KVD_MEM_DEVICE, 2 * lanes * sizeof(kvd_attn_span));
    w->near_list   = device(KVD_MEM_DEVICE, lanes * w->slots * 8);
    w->urgent_list = device(KVD_MEM_DEVICE, lanes * w->slots * 8);
}

/* Blocks of one sequence after another; all copies read the same keys, but an index of their own.
 */
static void make_pools(world *w, uint8_t **block, uint8_t **iblock)
{
    const uint64_t n = (uint64_t)w->batch * w->n_block, step = N_KV * w->kv.head_stride;
    uint64_t      *at;

    w->kv.pool = device(KVD_MEM_DEVICE, n * step);
    fill_bf16(w->kv.pool, n * step / 2);
    at     = shuffled(n, step);
    *block = device(KVD_MEM_DEVICE, n * sizeof(*at));
    up(*block, at, n * sizeof(*at));
    kvd_free(at);
    at         = shuffled(n, N_OP * N_KV * w->ix.head_stride);
    w->ix.pool = device(KVD_MEM_DEVICE, n * N_OP * N_KV * w->ix.head_stride);
    *iblock    = device(KVD_MEM_DEVICE, n * sizeof(*at));
    up(*iblock, at, n * sizeof(*at));
    kvd_free(at);
}

static world world_of(uint32_t ctx, uint32_t batch)
{
    const kvd_index_desc d = {
        KVD_INDEX_MEAN, KVD_INDEX_INT4, KVD_INDEX_BF16, true, CHUNK, 256, DIM
    };
    world    w = { .ctx = ctx, .batch = batch, .n_chunk = ctx / CHUNK, .n_block = ctx / 256 };
    uint32_t k[N_KV], cap[N_KV];
    uint8_t *block, *iblock, *dk = device(KVD_MEM_DEVICE, sizeof(k));
    uint8_t *dcap = device(KVD_MEM_DEVICE, sizeof(cap)), *ema, *slot_of, *chunk_of, *stamp;
    uint64_t lanes;
    kvd_mem  m;
    kvd_err  err = { 0 };

    w.k     = w.n_chunk / 64;
    w.slots = 2 * w.k;
    w.kv    = (kvd_kv_layout){ .type         = KVD_DTYPE_BF16,
                               .n_kv_head    = N_KV,
                               .head_dim     = DIM,
                               .chunk_tokens = CHUNK,
                               .block_tokens = 256,
                               .record_bytes = 2 * CHUNK * DIM * 2,
                               .head_stride  = 256 * 2 * DIM * 2 };
    w.ix =
        (kvd_index_layout){ .desc = d, .n_kv_head = N_KV, .head_stride = kvd_index_lane_bytes(&d) };
    lanes = (uint64_t)N_OP * batch * N_KV;
    make_pools(&w, &block, &iblock);
    make_outputs(&w);
    for (uint32_t h = 0; h < N_KV; h++) {
        k[h]   = w.k;
        cap[h] = w.slots;
    }
    up(dk, k, sizeof(k));
    up(dcap, cap, sizeof(cap));
    ema      = device(KVD_MEM_DEVICE, lanes * w.n_chunk * 2);
    slot_of  = device(KVD_MEM_DEVICE, lanes * w.n_chunk * 2);
    chunk_of = device(KVD_MEM_DEVICE, lanes * w.slots * 4);
    stamp    = device(KVD_MEM_DEVICE, lanes * w.slots * 4);
    m        = (kvd_mem){ kvd_malloc(lanes * w.n_chunk * 2), lanes * w.n_chunk * 2, KVD_MEM_HOST };
    memset(m.ptr, 0xff, m.bytes);
    up(slot_of, m.ptr, m.bytes);
    up(chunk_of, m.ptr, lanes * w.slots * 4);
    kvd_free(m.ptr);
    make_seqs(&w, iblock, ema, slot_of, chunk_of, stamp, dk, dcap);
    make_spans(&w, block);
    make_places(&w, block);
    make_copies(&w);
    make_misses(&w);
    make_packed(&w);
    for (uint32_t i = 0; i < N_OP; i++) {
        kvd_index_build_args a = { .n_block = batch * w.n_block,
                                   .kv      = w.kv,
                                   .index   = w.ix,
                                   .block   = (const uint64_t *)(const void *)block,
                                   .iblock  = (const uint64_t *)(const void *)iblock };

        a.index.lane_off = (uint64_t)i * N_KV * w.ix.head_stride;
        check(be->ops->index_build(st, &a, &err), &err);
    }
    check(be->ops->stream_sync(st, &err), &err);
    return w;
}

/* ---- ops ------------------------------------------------------------------------------------- */

static kvd_select_args select_args(const world *w, uint32_t i)
{
    const uint64_t off = (uint64_t)i * N_KV * w->ix.head_stride;

    return (kvd_select_args){ .n_seq  = w->batch,
                              .n_head = N_HEAD,
                              .seq    = (const kvd_select_seq *)(const void *)w->select +
                                     (uint64_t)i * w->batch,
                              .index    = { w->ix.desc, N_KV, off, w->ix.head_stride, w->ix.pool },
                              .q_stride = N_HEAD * DIM,
                              .lse_stride  = N_HEAD,
                              .lane_stride = w->n_chunk,
                              .sel_stride  = w->slots,
                              .q           = (const float *)(const void *)w->q,
                              .kept_lse    = (const float *)(const void *)w->lse,
                              .result      = (kvd_select_result *)(void *)w->result,
                              .scale       = 1.0f / sqrtf((float)DIM),
                              .alpha       = 0.5f };
}

static void op_select(const world *w, uint32_t i)
{
    const kvd_select_args a   = select_args(w, i);
    kvd_err               err = { 0 };

    check(be->ops->select(st, &a, &err), &err);
}

static kvd_window_args window_args(const world *w, uint32_t i)
{
    return (kvd_window_args){ .n_seq     = w->batch,
                              .n_kv_head = N_KV,
                              .seq       = (const kvd_window_seq *)(const void *)w->window +
                                     (uint64_t)i * w->batch,
                              .select      = (const kvd_select_result *)(const void *)w->result,
                              .result      = (kvd_window_result *)(void *)w->change,
                              .lane_stride = w->n_chunk,
                              .slot_stride = w->slots,
                              .sel_stride  = w->slots };
}

static void op_window(const world *w, uint32_t i)
{
    const kvd_window_args a   = window_args(w, i);
    kvd_err               err = { 0 };

    check(be->ops->window(st, &a, &err), &err);
}

/* Records in place. */
static kvd_window_spans_args spans_args(const world *w, const kvd_choose_args *a)
{
    kvd_attn_span *span = (kvd_attn_span *)(void *)w->listed;

    return (kvd_window_spans_args){ .n_seq       = w->batch,
                                    .n_kv_head   = N_KV,
                                    .seq         = a->window.seq,
                                    .place       = (const kvd_window_place *)(const void *)w->place,
                                    .select      = a->window.select,
                                    .change      = a->window.result,
                                    .kv          = w->kv,
                                    .lane_stride = w->n_chunk,
                                    .slot_stride = w->slots,
                                    .sel_stride  = w->slots,
                                    .list_stride = w->slots,
                                    .near        = (uint64_t *)(void *)w->near_list,
                                    .urgent      = (uint64_t *)(void *)w->urgent_list,
                                    .near_span   = span,
                                    .urgent_span = span + w->batch * N_KV,
                                    .in_place    = true };
}

static void op_select_window(const world *w, uint32_t i)
{
    op_select(w, i);
    op_window(w, i);
}

static kvd_attn_span_args span_args(const world *w, const uint8_t *spans, uint32_t i, bool first)
{
    return (kvd_attn_span_args){ .n_row  = w->batch,
                                 .n_head = N_HEAD,
                                 .kv     = w->kv,
                                 .row    = (const uint32_t *)(const void *)w->row,
                                 .span   = (const kvd_attn_span *)(const void *)spans +
                                         (uint64_t)i * w->batch * N_KV,
                                 .q_stride   = N_HEAD * DIM,
                                 .out_stride = N_HEAD * DIM,
                                 .lse_stride = N_HEAD,
                                 .q          = (const float *)(const void *)w->q,
                                 .part       = (float *)(void *)w->part,
                                 .lse        = first ? (float *)(void *)w->lse : NULL,
                                 .out        = first ? NULL : (float *)(void *)w->out,
                                 .scale      = 1.0f / sqrtf((float)DIM),
                                 .first      = first };
}

static void span_of(const world *w, const uint8_t *spans, uint32_t i, bool first)
{
    const kvd_attn_span_args a   = span_args(w, spans, i, first);
    kvd_err                  err = { 0 };

    check(be->ops->attn_span(st, &a, &err), &err);
}

static void op_kept(const world *w, uint32_t i)
{
    span_of(w, w->kept, i, true);
}

static void op_near(const world *w, uint32_t i)
{
    span_of(w, w->near, i, false);
}

/* All of a layer: attention to the kept set, selection, the window, attention to that and to the
 * keys that came (none: a call for nothing). */
static void op_layer(const world *w, uint32_t i)
{
    kvd_choose_args    a    = { .kept   = span_args(w, w->kept, i, true),
                                .select = select_args(w, i),
                                .window = window_args(w, i) };
    kvd_attn_span_args near = span_args(w, w->listed, 0, false);
    kvd_err            err  = { 0 };

    a.spans   = spans_args(w, &a);
    near.then = near.span + w->batch * N_KV;
    check(be->ops->choose(st, &a, &err), &err);
    check(be->ops->attn_span(st, &near, &err), &err);
}

static void op_copy(const world *w, uint32_t i)
{
    const kvd_record_copy_args a   = { .n       = w->n_fetch,
                                       .bytes   = w->kv.record_bytes,
                                       .src_off = (const uint64_t *)(const void *)w->src,
                                       .dst_off = (const uint64_t *)(const void *)w->dst,
                                       .src     = w->host,
                                       .dst     = w->pooled };
    kvd_err                    err = { 0 };

    (void)i;
    check(be->ops->record_copy(st, &a, &err), &err);
}

static void fetch_as(const world *w, kvd_record_type type)
{
    const kvd_record_format f   = packed_format(type);
    kvd_window_fetch_args   a   = { .n_seq        = w->batch,
                                    .n_kv_head    = N_KV,
                                    .seq          = (const kvd_window_seq *)(void *)w->miss_seq,
                                    .place        = (const kvd_window_place *)(void *)w->miss_place,
                                    .change       = (const kvd_window_result *)(void *)w->missed,
                                    .kv           = w->kv,
                                    .format       = f,
                                    .host         = w->host,
                                    .param        = w->param,
                                    .lane_stride  = w->n_chunk,
                                    .sel_stride   = w->slots,
                                    .param_stride = kvd_record_param_bytes(&f) };
    kvd_err                 err = { 0 };

    a.kv.pool = w->pooled;
    check(be->ops->window_fetch(st, &a, &err), &err);
}

static void op_fetch_raw(const world *w, uint32_t i)
{
    (void)i;
    fetch_as(w, KVD_RECORD_RAW);
}

static void op_fetch_int8(const world *w, uint32_t i)
{
    (void)i;
    fetch_as(w, KVD_RECORD_INT8);
}

static void op_fetch_int4(const world *w, uint32_t i)
{
    (void)i;
    fetch_as(w, KVD_RECORD_INT4);
}

static void op_pack(const world *w, uint32_t i)
{
    const uint64_t             skip = i * N_KV * w->kv.head_stride;
    const uint64_t            *at   = (const uint64_t *)(const void *)w->offs;
    const kvd_record_pack_args a    = { .format    = packed_format(KVD_RECORD_INT8),
                                        .n         = N_KV,
                                        .src       = (uint8_t *)w->kv.pool + skip,
                                        .param     = w->param,
                                        .dst       = w->packed,
                                        .src_off   = at,
                                        .param_off = at + N_KV,
                                        .dst_off   = at + 2 * N_KV };
    kvd_err                    err  = { 0 };

    check(be->ops->record_pack(st, &a, &err), &err);
}

static int by_time(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static void measure(const world *w, const char *name, void (*op)(const world *, uint32_t),
                    double bytes)
{
    kvd_graph *graph;
    kvd_err    err = { 0 };
    uint64_t   ns[N_RUN];
    double     us;

    for (uint32_t i = 0; i < N_OP; i++) /* once without: windows fill, errors are plainer */
        op(w, i);
    check(be->ops->stream_sync(st, &err), &err);
    check(be->ops->graph_begin(st, &err), &err);
    for (uint32_t i = 0; i < N_OP; i++)
        op(w, i);
    check(be->ops->graph_end(st, &graph, &err), &err);
    check(be->ops->graph_run(graph, st, &err), &err);
    check(be->ops->stream_sync(st, &err), &err);
    for (uint32_t i = 0; i < N_RUN; i++) {
        const uint64_t t0 = kvd_now_ns();

        for (uint32_t k = 0; k < N_GRAPH; k++)
            check(be->ops->graph_run(graph, st, &err), &err);
        check(be->ops->stream_sync(st, &err), &err);
        ns[i] = kvd_now_ns() - t0;
    }
    be->ops->graph_close(graph);
    qsort(ns, N_RUN, sizeof(ns[0]), by_time);
    us = (double)ns[N_RUN / 2] / 1e3 / (N_OP * N_GRAPH);
    printf("%s,%u,%u,%.2f,%.0f\n", name, w->ctx, w->batch, us, bytes / us / 1e3);
    fflush(stdout);
}

static void run_case(uint32_t ctx, uint32_t batch)
{
    const world  w     = world_of(ctx, batch);
    const double lanes = (double)batch * N_KV, chunks = lanes * w.n_chunk;
    const double index = lanes * w.n_block * (double)w.ix.head_stride;
    const double token = 2.0 * DIM * 2, missed = lanes * (w.k / 4) * (double)w.kv.record_bytes;

    measure(&w, "select", op_select, index + chunks * 8);
    measure(&w, "window", op_window, lanes * w.slots * 16.0);
    measure(&w, "select+window", op_select_window, index + chunks * 8);
    measure(&w, "attn_span kept", op_kept, lanes * 304.0 * token);
    measure(&w, "attn_span window", op_near, lanes * w.slots * CHUNK * token);
    measure(&w, "all of a layer", op_layer,
            index + chunks * 8 + lanes * (304.0 + w.slots / 2.0 * CHUNK) * token);
    measure(&w, "record_copy from host", op_copy, (double)w.n_fetch * (double)w.kv.record_bytes);
    measure(&w, "window_fetch", op_fetch_raw, missed);
    measure(&w, "window_fetch INT8", op_fetch_int8, missed / 2);
    measure(&w, "window_fetch INT4", op_fetch_int4, missed / 4);
    measure(&w, "record_pack INT8", op_pack, 1.5 * N_KV * (double)w.kv.head_stride);
}

int main(int argc, char **argv)
{
    static const struct {
        uint32_t ctx, batch;
    } cases[]        = { { 32768, 1 },  { 122880, 1 }, { 32768, 8 }, { 61440, 8 },
                         { 122880, 8 }, { 122880, 4 }, { 524288, 1 } };
    const bool quick = argc > 2 && strcmp(argv[2], "quick") == 0;
    const int  first = argc > 2 && !quick ? (int)strtol(argv[2], NULL, 10) : 0;
    const int  end   = argc > 2 ? first + 1 : (int)KVD_COUNTOF(cases);
    kvd_err    err   = { 0 };

    for (int i = first; i < end && i < (int)KVD_COUNTOF(cases); i++) {
        const kvd_backend_params p = { .name = "cuda", .module = argc > 1 ? argv[1] : NULL };
        const kvd_backend_limits l = { .n_token   = 8,
                                       .n_seq     = 8,
                                       .n_col     = 128,
                                       .n_head    = N_HEAD,
                                       .n_kv_head = N_KV,
                                       .head_dim  = DIM,
                                       .n_ctx     = cases[i].ctx,
                                       .n_chunk   = cases[i].ctx / CHUNK,
                                       .n_slot    = cases[i].ctx / CHUNK / 32 };

        if (kvd_backend_open(&be, &p, &err) != KVD_OK) {
            printf("skipped: %s\n", err.msg);
            return 0;
        }
        check(be->ops->stream_open(be, &st, &err), &err);
        check(be->ops->reserve(be, &l, &err), &err);
        if (i == first)
            printf("op,context,batch,us,GB/s\n");
        run_case(cases[i].ctx, cases[i].batch);
        be->ops->stream_close(st);
        kvd_backend_close(be);
    }
    return 0;
}
