/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn.c - how attention and the KV store are cut into items for the thread pool.
 *
 * A *unit* is one row of the batch.  Its keys are cut into splits whose length depends on the
 * number of keys alone; each split and KV head gives a partial softmax, and the partials are folded
 * in ascending order.  Whether the splits run as items of their own or one after another in one
 * item changes nothing in the result, nor does the number of threads.
 *
 * Scratch: the units, then the partials.  Owns: nothing (the backend owns the scratch).
 * Thread: the backend's caller. */
#include "backend/cpu/cpu_attn.h"

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_kv.h"

#define ATTN_SPLIT     512u /* keys of a split; 128 KB of bf16 at head_dim 64 */
#define ATTN_SPLIT_MAX 64u  /* splits of a unit; longer contexts take longer splits */
#define ATTN_PAIRS     8u   /* units x KV heads per thread up to which splits run apart */
#define ATTN_ALONE                                                                              \
    512u                    /* keys x KV heads that the caller does alone: about as long as the \
                               pool takes to start and join */
#define APPEND_ALONE 32768u /* elements, likewise */
#define APPEND_ROWS  16u    /* rows of an item of kv_append */

typedef struct attn_unit {
    uint32_t seq, row; /* row inside the sequence's part of the batch */
    uint32_t n_split, split_keys;
    uint32_t first_item;
} attn_unit;

typedef struct attn_job {
    const cpu_attn_kernels *k;
    const kvd_attn_args    *a;
    const attn_unit        *unit;
    uint32_t                n_unit, group;
    bool                    apart; /* an item is one split, not all splits of a unit's KV head */
    float                  *part;
    uint64_t                part_floats;
} attn_job;

static const cpu_attn_kernels *attn_kernels(const cpu_backend *be, uint32_t head_dim)
{
    if (be->isa >= OS_ISA_AVX512 && head_dim % cpu_attn_avx512.width == 0)
        return &cpu_attn_avx512;
    if (be->isa >= OS_ISA_AVX2 && head_dim % cpu_attn_avx2.width == 0)
        return &cpu_attn_avx2;
    return head_dim % cpu_attn_portable.width == 0 ? &cpu_attn_portable : &cpu_attn_scalar;
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
    return kvd_align_up(cpu_attn_part_floats(group, head_dim), KVD_CACHE_LINE / sizeof(float));
}

uint64_t cpu_attn_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim)
{
    const uint32_t group = (uint32_t)kvd_div_up(lim->n_head, kvd_max_u64(1, lim->n_kv_head));
    const uint64_t pairs = kvd_min_u64((uint64_t)lim->n_token * lim->n_kv_head,
                                       (uint64_t)ATTN_PAIRS * be->base.n_thread);
    const uint64_t n_slot =
        kvd_max_u64(pairs * kvd_min_u64(ATTN_SPLIT_MAX, kvd_div_up(lim->n_ctx, ATTN_SPLIT)),
                    2 * (uint64_t)be->base.n_thread);

    return attn_unit_bytes(lim->n_token) +
           n_slot * attn_slot_floats(group, lim->head_dim) * sizeof(float);
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
    const uint32_t       n_key = q->n_past + u->row + 1;
    const uint32_t       first = split * u->split_keys;
    const cpu_attn_rows  rows  = { .kv        = &a->kv,
                                   .block     = q->block,
                                   .kv_head   = kv_head,
                                   .n_q       = j->group,
                                   .first_key = first,
                                   .end_key =
                                     n_key - first < u->split_keys ? n_key : first + u->split_keys,
                                   .q = a->q + (uint64_t)(q->first_row + u->row) * a->q_stride +
                                        (uint64_t)kv_head * j->group * a->kv.head_dim,
                                   .scale = a->scale,
                                   .part  = part };

    j->k->rows(&rows);
}

static void attn_finish_run(const attn_job *j, const attn_unit *u, uint32_t kv_head,
                            const float *acc)
{
    const kvd_attn_args *a   = j->a;
    const uint64_t       row = (uint64_t)a->seq[u->seq].first_row + u->row;

    j->k->finish(acc, a->out + row * a->out_stride + (uint64_t)kv_head * j->group * a->kv.head_dim,
                 j->group, a->kv.head_dim);
}

static void attn_item(void *ctx, uint32_t item, uint32_t thread)
{
    const attn_job  *j  = ctx;
    const attn_unit *u  = attn_unit_of(j, item);
    const uint32_t   at = item - u->first_item;
    float           *acc, *next;

    if (j->apart) {
        attn_split_run(j, u, at / u->n_split, at % u->n_split, j->part + item * j->part_floats);
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
    float *acc = j->part + (uint64_t)(u->first_item + kv_head * u->n_split) * j->part_floats;

    for (uint32_t s = 1; s < u->n_split; s++)
        j->k->fold(acc, acc + s * j->part_floats, j->group, j->a->kv.head_dim);
    attn_finish_run(j, u, kv_head, acc);
}

/* ---- attention ------------------------------------------------------------------- */

/* Lists the units and returns how many keys they read, summed. */
static uint64_t attn_list_units(attn_job *j, attn_unit *unit)
{
    const kvd_attn_args *a     = j->a;
    uint64_t             n_key = 0;

    for (uint32_t s = 0; s < a->n_seq; s++) {
        for (uint32_t r = 0; r < a->seq[s].n_row; r++) {
            const uint32_t n = a->seq[s].n_past + r + 1;

            unit[j->n_unit++] = (attn_unit){
                .seq = s, .row = r, .n_split = attn_n_split(n), .split_keys = attn_split_keys(n)
            };
            n_key += n;
        }
    }
    return n_key;
}

static uint32_t attn_number_items(const attn_job *j, attn_unit *unit)
{
    uint32_t n_item = 0;

    for (uint32_t i = 0; i < j->n_unit; i++) {
        unit[i].first_item = n_item;
        n_item += j->a->kv.n_kv_head * (j->apart ? unit[i].n_split : 1);
    }
    return n_item;
}

static void attn_run(cpu_backend *be, attn_job *j, uint32_t n_item, bool alone)
{
    if (alone) {
        for (uint32_t i = 0; i < n_item; i++)
            attn_item(j, i, 0);
    } else {
        os_pool_run(be->pool, n_item, attn_item, j);
    }
    if (!j->apart)
        return;
    for (uint32_t u = 0; u < j->n_unit; u++) {
        for (uint32_t h = 0; h < j->a->kv.n_kv_head; h++)
            attn_merge(j, &j->unit[u], h);
    }
}

kvd_status cpu_attn(kvd_stream *st, const kvd_attn_args *a, kvd_err *err)
{
    cpu_backend *be    = st->be;
    attn_unit   *unit  = be->at_scratch;
    uint64_t     n_row = 0, n_key;
    uint32_t     n_item;
    attn_job     j = { .a = a, .unit = unit, .group = a->n_head / a->kv.n_kv_head };

    (void)err;
    cpu_kv_check(&a->kv);
    kvd_assert(a->n_head % a->kv.n_kv_head == 0 && a->kv.head_dim <= CPU_ATTN_HEAD_DIM_MAX);
    for (uint32_t s = 0; s < a->n_seq; s++)
        n_row += a->seq[s].n_row;
    kvd_assert(attn_unit_bytes(n_row) <= be->at_scratch_bytes);
    j.k           = attn_kernels(be, a->kv.head_dim);
    j.part        = (float *)(void *)((uint8_t *)be->at_scratch + attn_unit_bytes(n_row));
    j.part_floats = attn_slot_floats(j.group, a->kv.head_dim);
    j.apart       = n_row * a->kv.n_kv_head <= (uint64_t)ATTN_PAIRS * be->base.n_thread;
    n_key         = attn_list_units(&j, unit);
    n_item        = attn_number_items(&j, unit);
    kvd_assert(attn_unit_bytes(n_row) +
                   (j.apart ? n_item : 2 * (uint64_t)be->base.n_thread) * j.part_floats * 4 <=
               be->at_scratch_bytes);
    attn_run(be, &j, n_item, be->base.n_thread < 2 || n_key * a->kv.n_kv_head <= ATTN_ALONE);
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
    append_job   j  = { .k = attn_kernels(be, a->kv.head_dim), .a = a };

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
