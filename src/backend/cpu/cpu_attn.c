/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn.c - how attention and the KV store are cut into items for the thread pool.
 *
 * A *unit* is one row of the batch, or a run of rows of one sequence.
 * Row units: the keys are cut into splits whose length depends on the number of keys alone; each
 * split and KV head gives a partial softmax, and the partials are folded in ascending order.
 * Whether the splits run as items of their own or one after another in one item changes nothing in
 * the result, nor does the number of threads, nor the rest of the batch.
 * Tile units: taken where a sequence brings many rows, unless the backend is deterministic (a
 * prompt cut elsewhere would take the other way, and round differently).
 *
 * Scratch: the units; then partials of row units; then one work area per thread for tiles.
 * Owns: nothing (the backend owns the scratch).  Thread: the backend's caller. */
#include "backend/cpu/cpu_attn.h"

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_kv.h"

#define ATTN_SPLIT     512u /* keys of a split; 128 KB of bf16 at head_dim 64 */
#define ATTN_SPLIT_MAX 64u  /* splits of a unit; longer contexts take longer splits */
#define ATTN_PAIRS     8u   /* units x KV heads per thread up to which splits run apart */
#define ATTN_TILE_COLS 384u /* columns of a tile item at most */
#define APPEND_ROWS    16u  /* rows of an item of kv_append */

/* What the caller does alone, as starting and joining the pool takes as long: keys x KV heads of
 * attention, elements of kv_append. */
#define ATTN_ALONE   512u
#define APPEND_ALONE 32768u

typedef struct attn_unit {
    uint32_t seq, first_row;      /* row inside the sequence's part of the batch */
    uint32_t n_row;               /* 1: by splits; more, or in a tile sequence: by tiles */
    uint32_t n_split, split_keys; /* 0 in tile units */
    uint32_t first_item;
} attn_unit;

typedef struct attn_job {
    const cpu_attn_kernels     *k;
    const cpu_attn_tile_kernel *tile;
    const kvd_attn_args        *a;
    const attn_unit            *unit; /* tile units first: theirs are the long items */
    uint32_t                    n_unit, n_tile_unit, group;
    uint32_t                    n_tile_item;
    bool                        apart; /* an item is one split, not all of a unit's KV head */
    float                      *part;
    uint64_t                    part_floats;
    uint8_t                    *work; /* [n_thread][work_bytes] */
    uint64_t                    work_bytes;
} attn_job;

const cpu_attn_kernels *cpu_attn_kernels_for(const cpu_backend *be, uint32_t head_dim)
{
    if (be->isa >= OS_ISA_AVX512 && head_dim % cpu_attn_avx512.width == 0)
        return &cpu_attn_avx512;
    if (be->isa >= OS_ISA_AVX2 && head_dim % cpu_attn_avx2.width == 0)
        return &cpu_attn_avx2;
    return head_dim % cpu_attn_portable.width == 0 ? &cpu_attn_portable : &cpu_attn_scalar;
}

static const cpu_attn_tile_kernel *attn_tile_kernel(const cpu_backend *be, kvd_dtype type,
                                                    uint32_t head_dim)
{
    if (be->isa == OS_ISA_AMX && !be->precise && type == KVD_DTYPE_BF16 && head_dim % 16 == 0)
        return &cpu_attn_tile_amx;
    return &cpu_attn_kernels_for(be, head_dim)->tile;
}

static uint32_t attn_split_keys(uint32_t n_key)
{
    return ATTN_SPLIT * (uint32_t)kvd_div_up(n_key, (uint64_t)ATTN_SPLIT * ATTN_SPLIT_MAX);
}

static uint32_t attn_n_split(uint32_t n_key)
{
    return (uint32_t)kvd_div_up(n_key, attn_split_keys(n_key));
}

static uint64_t attn_unit_bytes(uint64_t n_row)
{
    return kvd_align_up(n_row * sizeof(attn_unit), KVD_CACHE_LINE);
}

/* Partials start on cache lines so that threads do not share one. */
static uint64_t attn_slot_floats(uint32_t group, uint32_t head_dim)
{
    return kvd_align_up(kvd_attn_part_floats(group, head_dim), KVD_CACHE_LINE / sizeof(float));
}

/* Columns of a tile item, at most: a unit has whole rows, at least one. */
static uint32_t attn_max_cols(uint32_t group)
{
    return group > ATTN_TILE_COLS ? group : ATTN_TILE_COLS;
}

static uint64_t attn_rows_bytes(const cpu_backend *be, uint64_t n_pair, uint64_t n_split,
                                uint32_t group, uint32_t head_dim)
{
    const uint64_t pairs  = kvd_min_u64(n_pair, (uint64_t)ATTN_PAIRS * be->base.n_thread);
    const uint64_t n_slot = kvd_max_u64(pairs * n_split, 2 * (uint64_t)be->base.n_thread);

    return n_slot * attn_slot_floats(group, head_dim) * sizeof(float);
}

/* Covers bf16 and float KV: a session may take either. */
uint64_t cpu_attn_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim)
{
    const uint32_t group  = (uint32_t)kvd_div_up(lim->n_head, kvd_max_u64(1, lim->n_kv_head));
    const uint32_t n_col  = attn_max_cols(group);
    const uint64_t splits = kvd_min_u64(ATTN_SPLIT_MAX, kvd_div_up(lim->n_ctx, ATTN_SPLIT));
    uint64_t       tile   = 0;

    if (!be->deterministic)
        tile = kvd_max_u64(
            attn_tile_kernel(be, KVD_DTYPE_F32, lim->head_dim)->scratch_bytes(n_col, lim->head_dim),
            attn_tile_kernel(be, KVD_DTYPE_BF16, lim->head_dim)
                ->scratch_bytes(n_col, lim->head_dim));
    return attn_unit_bytes(lim->n_token) +
           attn_rows_bytes(be, (uint64_t)lim->n_token * lim->n_kv_head, splits, group,
                           lim->head_dim) +
           tile * be->base.n_thread;
}

/* ---- items ----------------------------------------------------------------------- */

static const attn_unit *attn_unit_of(const attn_job *j, uint32_t item)
{
    uint32_t lo = 0, hi = j->n_unit;

    while (hi - lo > 1) { /* the last unit whose first item is not past this one */
        const uint32_t mid = lo + (hi - lo) / 2;

        if (j->unit[mid].first_item <= item)
            lo = mid;
        else
            hi = mid;
    }
    return &j->unit[lo];
}

static void attn_split_run(const attn_job *j, const attn_unit *u, uint32_t kv_head, uint32_t split,
                           float *part)
{
    const kvd_attn_args *a     = j->a;
    const kvd_kv_seq    *q     = &a->seq[u->seq];
    const uint32_t       n_key = q->n_past + u->first_row + 1;
    const uint32_t       first = split * u->split_keys;
    const uint64_t       row   = (uint64_t)q->first_row + u->first_row;
    const uint64_t       head  = (uint64_t)kv_head * j->group * a->kv.head_dim;
    const cpu_attn_rows  rows  = { .kv        = &a->kv,
                                   .block     = q->block,
                                   .kv_head   = kv_head,
                                   .n_q       = j->group,
                                   .first_key = first,
                                   .end_key =
                                       first + (uint32_t)kvd_min_u64(n_key - first, u->split_keys),
                                   .q     = a->q + row * a->q_stride + head,
                                   .scale = a->scale,
                                   .part  = part };

    j->k->rows(&rows);
}

static void attn_finish_run(const attn_job *j, const attn_unit *u, uint32_t kv_head,
                            const float *acc)
{
    const kvd_attn_args *a   = j->a;
    const uint64_t       row = (uint64_t)a->seq[u->seq].first_row + u->first_row;

    j->k->finish(acc, a->out + row * a->out_stride + (uint64_t)kv_head * j->group * a->kv.head_dim,
                 j->group, a->kv.head_dim);
}

static void attn_tile_run(const attn_job *j, const attn_unit *u, uint32_t kv_head, uint32_t thread)
{
    const kvd_attn_args *a    = j->a;
    const kvd_kv_seq    *q    = &a->seq[u->seq];
    const uint64_t       row  = (uint64_t)q->first_row + u->first_row;
    const uint64_t       head = (uint64_t)kv_head * j->group * a->kv.head_dim;
    const cpu_attn_tile  tile = { .kv         = &a->kv,
                                  .block      = q->block,
                                  .kv_head    = kv_head,
                                  .group      = j->group,
                                  .n_row      = u->n_row,
                                  .n_past     = q->n_past + u->first_row,
                                  .q_stride   = a->q_stride,
                                  .out_stride = a->out_stride,
                                  .q          = a->q + row * a->q_stride + head,
                                  .out        = a->out + row * a->out_stride + head,
                                  .scale      = a->scale,
                                  .scratch    = j->work + thread * j->work_bytes };

    j->tile->run(&tile);
}

static void attn_item(void *ctx, uint32_t item, uint32_t thread)
{
    const attn_job  *j  = ctx;
    const attn_unit *u  = attn_unit_of(j, item);
    const uint32_t   at = item - u->first_item;
    float           *acc, *next;

    if (item < j->n_tile_item) {
        attn_tile_run(j, u, at, thread);
        return;
    }
    if (j->apart) {
        attn_split_run(j, u, at / u->n_split, at % u->n_split,
                       j->part + (item - j->n_tile_item) * j->part_floats);
        return;
    }
    acc  = j->part + 2 * (uint64_t)thread * j->part_floats;
    next = acc + j->part_floats;
    for (uint32_t s = 0; s < u->n_split; s++) {
        attn_split_run(j, u, at, s, s == 0 ? acc : next);
        if (s > 0)
            j->k->fold(acc, next, j->group, j->a->kv.head_dim);
    }
    attn_finish_run(j, u, at, acc);
}

/* Folds the partials of one unit and KV head into the first of them. */
static void attn_merge(const attn_job *j, const attn_unit *u, uint32_t kv_head)
{
    float *acc = j->part +
                 (uint64_t)(u->first_item - j->n_tile_item + kv_head * u->n_split) * j->part_floats;

    for (uint32_t s = 1; s < u->n_split; s++)
        j->k->fold(acc, acc + s * j->part_floats, j->group, j->a->kv.head_dim);
    attn_finish_run(j, u, kv_head, acc);
}

/* ---- attention ------------------------------------------------------------------- */

/* By the shape alone: the number of threads must not change the result. */
static bool attn_by_tiles(const cpu_backend *be, const attn_job *j, const kvd_kv_seq *q)
{
    return !be->deterministic && q->n_row > 1 && (uint64_t)q->n_row * j->group >= j->tile->min_cols;
}

/* Rows of a tile unit: about four items for each thread, within what pays and what fits. */
static uint32_t attn_tile_rows(const cpu_backend *be, const attn_job *j, uint64_t n_row)
{
    const uint64_t n_col = n_row * j->a->n_head / (4 * (uint64_t)be->base.n_thread);
    const uint64_t most  = attn_max_cols(j->group);

    return (uint32_t)(kvd_max_u64(j->tile->min_cols, kvd_min_u64(most, n_col)) / j->group);
}

/* The last rows of a sequence see the most keys and go first. */
static void attn_list_tiles(attn_job *j, attn_unit *unit, uint32_t seq, uint32_t unit_rows)
{
    uint32_t end = j->a->seq[seq].n_row;

    while (end > 0) {
        const uint32_t n = end < unit_rows ? end : unit_rows;

        end -= n;
        unit[j->n_unit++] = (attn_unit){ .seq = seq, .first_row = end, .n_row = n };
    }
}

static void attn_list_rows(attn_job *j, attn_unit *unit, uint32_t seq)
{
    for (uint32_t r = 0; r < j->a->seq[seq].n_row; r++) {
        const uint32_t n = j->a->seq[seq].n_past + r + 1;

        unit[j->n_unit++] = (attn_unit){ .seq        = seq,
                                         .first_row  = r,
                                         .n_row      = 1,
                                         .n_split    = attn_n_split(n),
                                         .split_keys = attn_split_keys(n) };
    }
}

static void attn_list_units(const cpu_backend *be, attn_job *j, attn_unit *unit)
{
    const kvd_attn_args *a          = j->a;
    uint64_t             n_tile_row = 0;
    uint32_t             unit_rows;

    for (uint32_t s = 0; s < a->n_seq; s++)
        n_tile_row += attn_by_tiles(be, j, &a->seq[s]) ? a->seq[s].n_row : 0;
    unit_rows = (uint32_t)kvd_max_u64(1, attn_tile_rows(be, j, n_tile_row));
    for (uint32_t s = 0; s < a->n_seq; s++) {
        if (attn_by_tiles(be, j, &a->seq[s]))
            attn_list_tiles(j, unit, s, unit_rows);
    }
    j->n_tile_unit = j->n_unit;
    for (uint32_t s = 0; s < a->n_seq; s++) {
        if (!attn_by_tiles(be, j, &a->seq[s]))
            attn_list_rows(j, unit, s);
    }
}

static uint32_t attn_number_items(const cpu_backend *be, attn_job *j, attn_unit *unit)
{
    const uint64_t n_pair = (uint64_t)(j->n_unit - j->n_tile_unit) * j->a->kv.n_kv_head;
    uint32_t       n_item = 0;

    j->apart = n_pair <= (uint64_t)ATTN_PAIRS * be->base.n_thread;
    for (uint32_t i = 0; i < j->n_unit; i++) {
        if (i == j->n_tile_unit)
            j->n_tile_item = n_item;
        unit[i].first_item = n_item;
        n_item += j->a->kv.n_kv_head * (j->apart && i >= j->n_tile_unit ? unit[i].n_split : 1);
    }
    if (j->n_tile_unit == j->n_unit)
        j->n_tile_item = n_item;
    return n_item;
}

/* Lays out the scratch behind the units, and asserts that it was reserved. */
static void attn_place(const cpu_backend *be, attn_job *j, uint64_t n_row, uint32_t n_item)
{
    const uint64_t slots = j->apart ? n_item - j->n_tile_item : 2 * (uint64_t)be->base.n_thread;
    uint8_t       *at    = (uint8_t *)be->at_scratch + attn_unit_bytes(n_row);
    uint64_t       used  = attn_unit_bytes(n_row);

    j->part_floats = attn_slot_floats(j->group, j->a->kv.head_dim);
    j->part        = (float *)(void *)at;
    used += slots * j->part_floats * sizeof(float);
    j->work = (uint8_t *)be->at_scratch + used;
    if (j->n_tile_unit > 0) {
        j->work_bytes = j->tile->scratch_bytes(attn_max_cols(j->group), j->a->kv.head_dim);
        used += j->work_bytes * be->base.n_thread;
    }
    kvd_assert(used <= be->at_scratch_bytes);
}

/* Whether the pool would take longer to start than the caller to finish. */
static bool attn_alone(const cpu_backend *be, const attn_job *j)
{
    uint64_t n_key = 0;

    if (be->base.n_thread < 2)
        return true;
    for (uint32_t s = 0; s < j->a->n_seq; s++)
        n_key += (uint64_t)j->a->seq[s].n_row * (j->a->seq[s].n_past + j->a->seq[s].n_row);
    return n_key * j->a->kv.n_kv_head <= ATTN_ALONE;
}

static void attn_run(cpu_backend *be, attn_job *j, uint32_t n_item)
{
    if (attn_alone(be, j)) {
        for (uint32_t i = 0; i < n_item; i++)
            attn_item(j, i, 0);
    } else {
        os_pool_run(be->pool, n_item, attn_item, j);
    }
    if (!j->apart)
        return;
    for (uint32_t u = j->n_tile_unit; u < j->n_unit; u++) {
        for (uint32_t h = 0; h < j->a->kv.n_kv_head; h++)
            attn_merge(j, &j->unit[u], h);
    }
}

kvd_status cpu_attn(kvd_stream *st, const kvd_attn_args *a, kvd_err *err)
{
    cpu_backend *be    = st->be;
    attn_unit   *unit  = be->at_scratch;
    uint64_t     n_row = 0;
    uint32_t     n_item;
    attn_job     j = { .a     = a,
                       .unit  = unit,
                       .group = a->n_head / a->kv.n_kv_head,
                       .k     = cpu_attn_kernels_for(be, a->kv.head_dim),
                       .tile  = attn_tile_kernel(be, a->kv.type, a->kv.head_dim) };

    (void)err;
    cpu_kv_check(&a->kv);
    kvd_assert(a->n_head % a->kv.n_kv_head == 0 && a->kv.head_dim <= CPU_ATTN_HEAD_DIM_MAX);
    for (uint32_t s = 0; s < a->n_seq; s++)
        n_row += a->seq[s].n_row;
    kvd_assert(attn_unit_bytes(n_row) <= be->at_scratch_bytes);
    attn_list_units(be, &j, unit);
    n_item = attn_number_items(be, &j, unit);
    attn_place(be, &j, n_row, n_item);
    attn_run(be, &j, n_item);
    return KVD_OK;
}

/* ---- storing --------------------------------------------------------------------- */

typedef struct append_job {
    const cpu_attn_kernels   *k;
    const kvd_kv_append_args *a;
    uint64_t                  n_row;
} append_job;

static void append_row(const append_job *j, const kvd_kv_seq *q, uint32_t row)
{
    const kvd_kv_append_args *a = j->a;
    const uint64_t            t = (uint64_t)q->first_row + row;

    for (uint32_t h = 0; h < a->kv.n_kv_head; h++) {
        const uint64_t off = (uint64_t)h * a->kv.head_dim;
        uint8_t       *dst = cpu_kv_row(&a->kv, q->block, h, q->n_past + row);

        j->k->store(a->kv.type, a->k + t * a->k_stride + off, dst, a->kv.head_dim);
        j->k->store(a->kv.type, a->v + t * a->v_stride + off, dst + cpu_kv_v_off(&a->kv),
                    a->kv.head_dim);
    }
}

/* Rows [first, end) of the batch, counted through its sequences. */
static void append_rows(const append_job *j, uint64_t first, uint64_t end)
{
    uint64_t at = 0;

    for (uint32_t s = 0; s < j->a->n_seq && at < end; s++) {
        const kvd_kv_seq *q = &j->a->seq[s];

        for (uint64_t r = first > at ? first - at : 0; r < q->n_row && at + r < end; r++)
            append_row(j, q, (uint32_t)r);
        at += q->n_row;
    }
}

static void append_item(void *ctx, uint32_t item, uint32_t thread)
{
    const append_job *j     = ctx;
    const uint64_t    first = (uint64_t)item * APPEND_ROWS;

    (void)thread;
    append_rows(j, first, kvd_min_u64(j->n_row, first + APPEND_ROWS));
}

kvd_status cpu_kv_append(kvd_stream *st, const kvd_kv_append_args *a, kvd_err *err)
{
    cpu_backend *be = st->be;
    append_job   j  = { .k = cpu_attn_kernels_for(be, a->kv.head_dim), .a = a };

    (void)err;
    cpu_kv_check(&a->kv);
    for (uint32_t s = 0; s < a->n_seq; s++)
        j.n_row += a->seq[s].n_row;
    if (be->base.n_thread < 2 || j.n_row * a->kv.n_kv_head * a->kv.head_dim <= APPEND_ALONE)
        append_rows(&j, 0, j.n_row);
    else
        os_pool_run(be->pool, (uint32_t)kvd_div_up(j.n_row, APPEND_ROWS), append_item, &j);
    return KVD_OK;
}
