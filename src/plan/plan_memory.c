/* SPDX-License-Identifier: Apache-2.0 */
/* plan_memory.c - the memory plan: which buffers a cache of some geometry takes on which tier.
 *
 * What is always on the device: index and chunk metadata of everything sealed, kept set and tail.
 * Then, the first that fits:
 *   all on the device   every record, attended in place; no windows, no staging, no lower tier
 *   all in the host     windows on the device; staging and every record in the host
 *   with the disk       windows; staging and as many records as the host takes; all on disk, with
 *                       the index and a checksum for each page
 * What each way takes never falls when n_ctx, n_seq or a cap grows: plan_fit.c relies on it.
 * Any thread. */
#include <inttypes.h>
#include <string.h>

#include "plan/plan.h"

#define PAGE_BYTES     4096u
#define CHECKSUM_BYTES 8u
#define BUDGET_LEAST   1024u
#define BUDGET_MOST    4096u

static const char *const record_name[] = { "bf16", "int8", "int4", "f32" };
static const uint32_t    record_bits[] = { 16, 8, 4, 32 };

const char *plan_record_name(plan_record r)
{
    return record_name[r];
}

/* Sums and products that stay unusable once one has left 64 bits. */
typedef struct sum {
    uint64_t n;
    bool     wrapped;
} sum;

static sum times(sum a, uint64_t b)
{
    a.wrapped |= !kvd_mul(a.n, b, &a.n);
    return a;
}

static sum plus(sum a, sum b)
{
    a.wrapped |= b.wrapped | !kvd_add(a.n, b.n, &a.n);
    return a;
}

static sum of(uint64_t n)
{
    return (sum){ .n = n };
}

/* One attempt: what everything takes for some n_ctx, n_seq and caps. */
typedef struct attempt {
    const plan_input *in;
    uint64_t          n_ctx, n_seq, budget, n_lane, n_record;
    uint32_t          cap; /* 0: those of the input */
    uint64_t          record_bytes[PLAN_N_TIER];
    sum               records[PLAN_N_TIER]; /* all of them, in that tier's type */
    sum               always, windows, index, page_sums;
    sum               extra[PLAN_N_TIER];
    uint64_t          host_cache;
} attempt;

uint64_t plan_record_bytes(uint32_t chunk_tokens, uint32_t head_dim, plan_record type)
{
    uint64_t bytes, out = 1;

    if ((unsigned)type >= KVD_COUNTOF(record_bits) || chunk_tokens > PLAN_MAX_DIM ||
        head_dim > PLAN_MAX_DIM)
        return 0;
    bytes = (2ull * chunk_tokens * head_dim * record_bits[type] + 7) / 8;
    while (out < bytes)
        out *= 2;
    return bytes ? out : 0;
}

static sum kept_set(const attempt *a)
{
    const plan_input *in = a->in;
    const uint64_t    tokens =
        in->n_sink + kvd_min_u64(a->n_ctx, (uint64_t)in->n_local + in->seal_tokens);
    const uint64_t size = in->record[PLAN_DEVICE] == PLAN_F32 ? 4 : 2;

    return times(times(of(2 * size * in->head_dim), tokens), a->n_lane);
}

/* Slots of all windows: no lane needs more of them than it has records. */
static sum windows(const attempt *a)
{
    const plan_input *in     = a->in;
    const uint64_t    n_pair = (uint64_t)in->n_layer * in->n_kv_head;
    sum               slots  = { 0 };

    for (uint64_t i = 0; i < n_pair; i++) {
        const uint64_t cap = a->cap ? a->cap : in->caps ? in->caps[i] : in->cap;
        const sum      one = times(of(kvd_div_up(a->budget, in->chunk_tokens)), cap);

        slots = plus(slots, of(one.wrapped ? a->n_record : kvd_min_u64(one.n, a->n_record)));
        if (!in->caps || a->cap) {
            slots = times(slots, n_pair);
            break;
        }
    }
    return times(times(slots, a->n_seq), a->record_bytes[PLAN_DEVICE]);
}

static void measure(attempt *a)
{
    const plan_input *in = a->in;
    const uint64_t    n_block =
        a->n_ctx > in->n_local ? (a->n_ctx - in->n_local) / in->seal_tokens : 0;
    sum lanes = times(of((uint64_t)in->n_layer * in->n_kv_head), a->n_seq);
    sum chunks;

    a->budget   = in->budget ? in->budget
                             : kvd_max_u64(BUDGET_LEAST, kvd_min_u64(BUDGET_MOST, a->n_ctx / 16));
    a->n_lane   = lanes.n;
    a->n_record = n_block * (in->seal_tokens / in->chunk_tokens);
    chunks      = times(lanes, a->n_record);
    a->index    = times(times(lanes, n_block), in->index_bytes);
    a->always   = plus(plus(a->index, times(chunks, in->chunk_bytes)), kept_set(a));
    for (int t = 0; t < PLAN_N_TIER; t++) {
        a->record_bytes[t] = plan_record_bytes(in->chunk_tokens, in->head_dim, in->record[t]);
        a->records[t]      = times(chunks, a->record_bytes[t]);
    }
    a->windows   = windows(a);
    a->page_sums = times(of(kvd_div_up(a->records[PLAN_DISK].n, PAGE_BYTES)), CHECKSUM_BYTES);
    for (uint32_t i = 0; i < in->n_extra; i++) {
        const plan_extra *e = &in->extra[i];

        a->extra[e->tier] = plus(a->extra[e->tier], of(e->bytes));
        a->extra[e->tier] = plus(a->extra[e->tier], times(of(e->bytes_per_seq), a->n_seq));
        a->extra[e->tier] = plus(a->extra[e->tier], times(of(e->bytes_per_ctx_token), a->n_ctx));
    }
}

/* The least the host must cache beside a disk: one layer's selection of every sequence. */
static sum host_least(const attempt *a)
{
    const uint64_t one = kvd_min_u64(kvd_div_up(a->budget, a->in->chunk_tokens), a->n_record);

    return times(times(times(of(one), a->in->n_kv_head), a->n_seq), a->record_bytes[PLAN_HOST]);
}

/* The host caches beside a disk what its budget holds; at least that much it needs. */
static sum host_with_disk(attempt *a)
{
    const plan_input *in    = a->in;
    const sum         fixed = plus(a->extra[PLAN_HOST], of(in->staging_bytes));
    const sum         least = plus(fixed, host_least(a));
    uint64_t          left;

    a->host_cache = host_least(a).n;
    if (least.wrapped || least.n > in->budget_bytes[PLAN_HOST])
        return least;
    left          = in->budget_bytes[PLAN_HOST] - fixed.n;
    a->host_cache = left / a->record_bytes[PLAN_HOST] * a->record_bytes[PLAN_HOST];
    return of(fixed.n + a->host_cache);
}

static void lay_out(attempt *a, plan_verdict way, sum need[PLAN_N_TIER])
{
    const plan_input *in = a->in;

    for (int t = 0; t < PLAN_N_TIER; t++)
        need[t] = a->extra[t];
    need[PLAN_DEVICE] = plus(plus(a->always, a->extra[PLAN_DEVICE]),
                             way == PLAN_ALL_ON_DEVICE ? a->records[PLAN_DEVICE] : a->windows);
    if (way == PLAN_ALL_IN_HOST)
        need[PLAN_HOST] =
            plus(plus(a->extra[PLAN_HOST], of(in->staging_bytes)), a->records[PLAN_HOST]);
    if (way == PLAN_USES_DISK) {
        need[PLAN_HOST] = host_with_disk(a);
        need[PLAN_DISK] =
            plus(plus(a->records[PLAN_DISK], a->index), plus(a->page_sums, a->extra[PLAN_DISK]));
    }
}

/* A plan_measure_fn over a plan_input. */
static bool measure_input(void *ctx, const plan_point *at, plan_verdict way,
                          uint64_t need[PLAN_N_TIER])
{
    attempt a = { .in = ctx, .n_ctx = at->n_ctx, .n_seq = at->n_seq, .cap = at->cap };
    sum     s[PLAN_N_TIER];

    if (way == PLAN_USES_DISK && a.in->budget_bytes[PLAN_DISK] == 0)
        return false;
    measure(&a);
    lay_out(&a, way, s);
    for (int t = 0; t < PLAN_N_TIER; t++)
        need[t] = s[t].wrapped ? UINT64_MAX : s[t].n;
    return true;
}

/* ---- telling --------------------------------------------------------------------- */

static void add(plan_memory *out, plan_tier t, const char *name, uint64_t bytes)
{
    if (bytes == 0)
        return;
    kvd_assert(out->n_buffer < PLAN_MAX_BUFFER);
    out->buffer[out->n_buffer++] = (plan_buffer){ .tier = t, .name = name, .bytes = bytes };
    out->tier_bytes[t] += bytes; /* fits: the need of the tier is their sum */
}

static void add_extras(plan_memory *out, const attempt *a, plan_tier t)
{
    for (uint32_t i = 0; i < a->in->n_extra; i++) {
        const plan_extra *e = &a->in->extra[i];

        if (e->tier == t)
            add(out, t, e->name,
                e->bytes + e->bytes_per_seq * a->n_seq + e->bytes_per_ctx_token * a->n_ctx);
    }
}

static void list_buffers(plan_memory *out, const attempt *a, plan_verdict way)
{
    const uint64_t kept = kept_set(a).n;

    add_extras(out, a, PLAN_DEVICE);
    add(out, PLAN_DEVICE, "index", a->index.n);
    add(out, PLAN_DEVICE, "chunk metadata", a->always.n - a->index.n - kept);
    add(out, PLAN_DEVICE, "kept set and tail", kept);
    if (way == PLAN_ALL_ON_DEVICE)
        add(out, PLAN_DEVICE, "records", a->records[PLAN_DEVICE].n);
    else
        add(out, PLAN_DEVICE, "windows", a->windows.n);
    add_extras(out, a, PLAN_HOST);
    if (way != PLAN_ALL_ON_DEVICE)
        add(out, PLAN_HOST, "staging", a->in->staging_bytes);
    if (way == PLAN_ALL_IN_HOST)
        add(out, PLAN_HOST, "records", a->records[PLAN_HOST].n);
    if (way == PLAN_USES_DISK)
        add(out, PLAN_HOST, "record cache", a->host_cache);
    add_extras(out, a, PLAN_DISK);
    if (way != PLAN_USES_DISK)
        return;
    add(out, PLAN_DISK, "records", a->records[PLAN_DISK].n);
    add(out, PLAN_DISK, "index", a->index.n);
    add(out, PLAN_DISK, "page checksums", a->page_sums.n);
}

/* ---- checks ---------------------------------------------------------------------- */

static kvd_status in_range(const char *name, uint64_t n, uint64_t least, uint64_t most,
                           kvd_err *err)
{
    if (n >= least && n <= most)
        return KVD_OK;
    return kvd_fail(err, KVD_E_INVAL, 0,
                    "memory plan: %s is %" PRIu64 ", expected %" PRIu64 " to %" PRIu64, name, n,
                    least, most);
}

static kvd_status check_parts(const plan_input *in, kvd_err *err)
{
    const uint64_t n_pair = (uint64_t)in->n_layer * in->n_kv_head;

    for (int t = 0; t < PLAN_N_TIER; t++)
        KVD_TRY(in_range("record", in->record[t], 0, KVD_COUNTOF(record_bits) - 1, err));
    KVD_TRY(in_range("n_extra", in->n_extra, 0, PLAN_MAX_EXTRA, err));
    for (uint32_t i = 0; i < in->n_extra; i++)
        KVD_TRY(in_range("extra.tier", in->extra[i].tier, 0, PLAN_N_TIER - 1, err));
    if (!in->caps)
        return in_range("cap", in->cap, 1, PLAN_MAX_DIM, err);
    KVD_TRY(in_range("n_layer x n_kv_head", n_pair, 1, PLAN_MAX_GROUP, err));
    for (uint64_t i = 0; i < n_pair; i++)
        KVD_TRY(in_range("caps", in->caps[i], 1, PLAN_MAX_DIM, err));
    return KVD_OK;
}

static kvd_status check(const plan_input *in, kvd_err *err)
{
    KVD_TRY(in_range("n_layer", in->n_layer, 1, PLAN_MAX_DIM, err));
    KVD_TRY(in_range("n_kv_head", in->n_kv_head, 1, PLAN_MAX_DIM, err));
    KVD_TRY(in_range("head_dim", in->head_dim, 1, PLAN_MAX_DIM, err));
    KVD_TRY(in_range("n_ctx", in->n_ctx, 1, PLAN_MAX_TOKENS, err));
    KVD_TRY(in_range("n_seq", in->n_seq, 1, PLAN_MAX_TOKENS, err));
    KVD_TRY(in_range("chunk_tokens", in->chunk_tokens, 1, PLAN_MAX_DIM, err));
    KVD_TRY(in_range("seal_tokens", in->seal_tokens, 1, PLAN_MAX_DIM, err));
    KVD_TRY(in_range("budget", in->budget, 0, PLAN_MAX_TOKENS, err));
    if (in->seal_tokens % in->chunk_tokens != 0)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "memory plan: seal_tokens %u is no multiple of chunk_tokens %u",
                        in->seal_tokens, in->chunk_tokens);
    return check_parts(in, err);
}

kvd_status plan_memory_make(const plan_input *in, plan_memory *out, kvd_err *err)
{
    plan_input copy = *in;
    plan_query q    = { .measure = measure_input,
                        .ctx     = &copy,
                        .at      = { in->n_ctx, in->n_seq, 0 },
                        .most    = { PLAN_MAX_TOKENS, PLAN_MAX_TOKENS, PLAN_MAX_DIM } };
    attempt    a    = { .in = in, .n_ctx = in->n_ctx, .n_seq = in->n_seq };
    sum        unused[PLAN_N_TIER];

    *out = (plan_memory){ 0 };
    KVD_TRY(check(in, err));
    memcpy(q.budget, in->budget_bytes, sizeof(q.budget));
    KVD_TRY(plan_fit_find(&q, &out->fit, err));
    measure(&a);
    lay_out(&a, out->fit.way, unused); /* for host_cache */
    memcpy(out->record_bytes, a.record_bytes, sizeof(out->record_bytes));
    out->n_lane   = a.n_lane;
    out->n_record = a.n_record;
    out->budget   = a.budget;
    list_buffers(out, &a, out->fit.way);
    return KVD_OK;
}
