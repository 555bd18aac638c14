/* SPDX-License-Identifier: Apache-2.0 */
/* kv_store.c - opening a store, and which sequence has which blocks.
 *
 * Owns: the pool, landmarks, maps and host records (memory of the backend), stacks of what is free,
 * and per sequence a list of blocks long enough for n_ctx tokens.
 *
 *      free --reserve--> reserved --commit--> held --truncate--> free
 *                            \----release----> free
 *      held --seal--> sealed (in place where resident, else its records in the host tier)
 *
 * Invariants
 *  (1) a raw block is on the free stack, in exactly one sequence's list, once, or parked
 *      (kv_parked.c); so are an index block and, by chunk, a host record;
 *  (2) a sequence's list covers its length, and between calls of reserve and commit or release, its
 *      reserved tokens; after release or truncate it covers the length and no block more;
 *  (3) n_used is the sum of lengths, n_held that of list entries, parked ones included;
 *  (4) blocks below n_sealed have an index block (sparse) and host records (not resident); the
 *      others are raw.
 *
 * Free blocks are taken lowest offset first after open, so a lone sequence lies contiguously. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kv/kv_cache.h"

/* ---- open and close ----------------------------------------------------------------- */

static void layouts_init(kv_store *s)
{
    const kv_params *p    = &s->params;
    const uint64_t   elem = p->type == KVD_DTYPE_F32 ? 4 : 2;

    s->layout = (kvd_kv_layout){
        .type         = p->type,
        .n_kv_head    = p->n_kv_head,
        .head_dim     = p->head_dim,
        .chunk_tokens = p->chunk_tokens,
        .block_tokens = KV_BLOCK_TOKENS,
        .record_bytes = 2 * p->chunk_tokens * elem * p->head_dim,
        .head_stride  = 2 * KV_BLOCK_TOKENS * elem * p->head_dim,
        .pool         = s->pool.ptr,
    };
    if (p->sparse)
        s->index = (kvd_index_layout){ .desc        = p->index,
                                       .n_kv_head   = p->n_kv_head,
                                       .head_stride = kv_aux_bytes(p),
                                       .pool        = s->landmarks.ptr };
    kv_zone_layout(s);
}

static kvd_status alloc_tables(kv_store *s, kvd_err *err)
{
    const kv_params *p     = &s->params;
    const size_t     lanes = (size_t)p->n_layer * p->n_kv_head;

    s->n_hrecord   = s->sizes.bytes[KV_BUF_HOST] / s->packed_bytes;
    s->seq         = kvd_calloc(p->n_seq, sizeof(*s->seq));
    s->free_stack  = kvd_calloc(s->sizes.n_raw, sizeof(*s->free_stack));
    s->ifree_stack = kvd_calloc(s->sizes.n_block, sizeof(*s->ifree_stack));
    s->hfree_stack = kvd_calloc(s->n_hrecord, sizeof(*s->hfree_stack));
    s->lane_select = kvd_calloc(lanes, sizeof(*s->lane_select));
    s->lane_hit    = kvd_calloc(lanes, sizeof(*s->lane_hit));
    s->lane_mass   = kvd_calloc(lanes, sizeof(*s->lane_mass));
    s->lane_n_mass = kvd_calloc(lanes, sizeof(*s->lane_n_mass));
    if (!s->seq || !s->free_stack || !s->ifree_stack || !s->hfree_stack || !s->lane_select ||
        !s->lane_hit || !s->lane_mass || !s->lane_n_mass)
        return kvd_fail(err, KVD_E_NOMEM, 0,
                        "KV cache: no memory for its metadata (%" PRIu64 " bytes)",
                        s->sizes.bytes[KV_BUF_TABLE]);
    return KVD_OK;
}

static kvd_status alloc(kv_store *s, kvd_mem_kind kind, uint64_t bytes, kvd_mem *out,
                        const char *what, kvd_err *err)
{
    kvd_err          why = { 0 };
    const kvd_status st  = s->be->ops->mem_alloc(s->be, kind, bytes, out, &why);

    return st == KVD_OK ? KVD_OK
                        : kvd_fail(err, st, 0, "KV cache, %s of %" PRIu64 " MiB: %s", what,
                                   bytes >> 20, why.msg);
}

/* Maps and lists: regions, mirrors, and the pointers into them. */
static kvd_status open_regions(kv_store *s, kvd_err *err)
{
    const kv_params *p = &s->params;
    uint64_t         bytes[KV_N_REGION];

    kv_place_map(p, s->sizes.resident, s, NULL, bytes);
    for (uint32_t i = 0; i < KV_N_REGION; i++) {
        const bool device = kv_region_on_device(p, i);

        KVD_TRY(alloc(s, device ? KVD_MEM_DEVICE : KVD_MEM_PINNED, bytes[i], &s->region[i],
                      "lists of a step", err));
        if (kv_region_mirrored(p, i))
            KVD_TRY(alloc(s, KVD_MEM_DEVICE, bytes[i], &s->mirror[i], "lists of a step", err));
    }
    kv_place_map(&s->params, s->sizes.resident, s, s->region, bytes);
    for (uint32_t i = 0; s->params.sparse && i < s->params.n_head; i++)
        s->step.no_lse[i] = -INFINITY;
    for (uint32_t i = 0; i < s->params.n_seq; i++) {
        s->seq[i].block  = s->lists + (size_t)i * 2 * s->blocks_max;
        s->seq[i].iblock = s->seq[i].block + s->blocks_max;
    }
    return KVD_OK;
}

static void fill_stacks(kv_store *s)
{
    const uint64_t index_bytes =
        s->params.sparse ? (uint64_t)s->params.n_layer * s->params.n_kv_head * s->index.head_stride
                         : 0;

    for (uint64_t i = 0; i < s->sizes.n_raw; i++)
        s->free_stack[i] = (s->sizes.n_raw - 1 - i) * s->sizes.block_bytes;
    for (uint64_t i = 0; i < s->sizes.n_block; i++)
        s->ifree_stack[i] = (s->sizes.n_block - 1 - i) * index_bytes;
    for (uint64_t i = 0; i < s->n_hrecord; i++)
        s->hfree_stack[i] = (uint32_t)(s->n_hrecord - 1 - i);
    s->n_free  = s->sizes.n_raw;
    s->n_ifree = s->sizes.n_block;
    s->n_hfree = s->n_hrecord;
}

static kvd_status alloc_memory(kv_store *s, kvd_err *err)
{
    const uint64_t *z = s->sizes.bytes;

    s->window_off = z[KV_BUF_RAW];
    s->stage_off  = s->window_off + z[KV_BUF_WINDOW];
    KVD_TRY(alloc(s, KVD_MEM_DEVICE, s->stage_off + z[KV_BUF_STAGE], &s->pool,
                  "device tier (kv_device)", err));
    KVD_TRY(alloc(s, KVD_MEM_DEVICE, z[KV_BUF_INDEX], &s->landmarks, "index", err));
    KVD_TRY(open_regions(s, err));
    return alloc(s, KVD_MEM_PINNED,
                 z[KV_BUF_HOST] +
                     (s->sizes.spills ? kv_land_records(&s->params) : 0) * s->packed_bytes,
                 &s->host, "host tier (kv_host)", err);
}

/* Which windows lie where: sequence by sequence, lane by lane, each with its sinks in front. */
static void place_windows(kv_store *s, const kv_params *p)
{
    const uint64_t lanes = (uint64_t)p->n_layer * p->n_kv_head;
    uint64_t       at    = s->window_off;

    for (uint64_t i = 0; i < lanes; i++)
        s->lane_slots[i] = kv_lane_slots(p, i);
    for (uint64_t i = 0; i < kv_n_lane(p); i++) {
        s->cap[i] = 0;
        if (s->sizes.resident)
            continue;
        s->lane_at[i] = at;
        at += (s->sinks + s->lane_slots[i % lanes]) * s->layout.record_bytes;
    }
    kvd_assert(s->sizes.resident || at == s->stage_off);
}

static kv_params params_on(const kvd_backend *be, const kv_params *p)
{
    kv_params q = *p;

    q.apart       = !be->unified;
    q.host_lookup = p->host_lookup && p->window_tokens > 0; /* without windows nobody looks up */
    return q;
}

kvd_status kv_store_open(kv_store **out, kvd_backend *be, const kv_params *p, kvd_err *err)
{
    const kv_params full = params_on(be, p);
    kvd_status      st;
    kv_store       *s;
    kv_sizes        sizes;

    *out = NULL;
    p    = &full;
    kvd_assert(p->record == KVD_RECORD_RAW || p->sparse); /* parameters lie with the index */
    KVD_TRY(kv_plan(p, &sizes, err));
    if (!sizes.resident &&
        sizes.n_block * p->n_layer * p->n_kv_head * (KV_BLOCK_TOKENS / p->chunk_tokens) >=
            KV_NO_HOST)
        return kvd_fail(err, KVD_E_INVAL, 0, "KV cache: more than 2^32 records");
    s = kvd_calloc(1, sizeof(*s));
    if (!s)
        return kvd_fail(err, KVD_E_NOMEM, 0, "KV cache: no memory for its metadata");
    s->be           = be;
    s->params       = *p;
    s->sizes        = sizes;
    s->policy       = (kv_policy){ .alpha = 0.5f };
    s->blocks_max   = kv_blocks_for(p->n_ctx);
    s->block_chunks = KV_BLOCK_TOKENS / p->chunk_tokens;
    s->record       = kv_record_format(p);
    s->packed_bytes = kvd_record_bytes(&s->record);
    s->param_off    = p->sparse ? kvd_index_lane_bytes(&p->index) : 0;
    s->n_chunk_max  = s->blocks_max * s->block_chunks;
    s->sinks        = p->n_sink / p->chunk_tokens;
    s->slots_max    = p->sparse ? p->window_tokens / p->chunk_tokens : 0;

    st = alloc_tables(s, err);
    if (st == KVD_OK)
        st = alloc_memory(s, err);
    if (st != KVD_OK) {
        kv_store_close(s);
        return st;
    }
    layouts_init(s);
    fill_stacks(s);
    place_windows(s, p);
    s->params.lane_tokens = NULL; /* borrowed for the call */
    st                    = kv_leave_open(s, err);
    if (st == KVD_OK)
        st = kv_exec_open(s, err);
    if (st == KVD_OK)
        st = kv_cache_open(s, err);
    if (st == KVD_OK)
        st = kv_tier_open(s, err);
    if (st == KVD_OK)
        st = kv_parked_open(s, err);
    s->params.lane_host = NULL;
    if (st != KVD_OK) {
        kv_store_close(s);
        return st;
    }
    *out = s;
    return KVD_OK;
}

/* Latest first, so that they are taken again in the order they had. */
void kv_drop_blocks(kv_store *s, uint32_t seq, uint32_t n_keep)
{
    kv_seq *q = &s->seq[seq];

    while (q->n_block > n_keep) {
        const uint32_t b = --q->n_block;

        if (b < q->n_sealed / KV_BLOCK_TOKENS) {
            kv_unmap_block(s, seq, b);
            q->n_sealed = b * KV_BLOCK_TOKENS;
        }
        if (q->block[b] != KV_NO_BLOCK)
            s->free_stack[s->n_free++] = q->block[b];
        s->n_held--;
    }
    kvd_assert_dbg(s->n_free <= s->sizes.n_raw);
}

void kv_store_close(kv_store *s)
{
    if (!s)
        return;
    kv_tier_settle(s);
    for (uint32_t i = 0; s->tier && i < s->params.n_seq; i++)
        kv_drop_blocks(s, i, 0); /* and references to the block store */
    kv_parked_close(s);
    kv_tier_close(s);
    kv_cache_close(s);
    kv_exec_close(s);
    kv_leave_close(s);
    s->be->ops->mem_free(s->be, &s->pool);
    s->be->ops->mem_free(s->be, &s->landmarks);
    for (uint32_t i = 0; i < KV_N_REGION; i++) {
        s->be->ops->mem_free(s->be, &s->region[i]);
        s->be->ops->mem_free(s->be, &s->mirror[i]);
    }
    s->be->ops->mem_free(s->be, &s->host);
    kvd_free(s->seq);
    kvd_free(s->free_stack);
    kvd_free(s->ifree_stack);
    kvd_free(s->hfree_stack);
    kvd_free(s->lane_select);
    kvd_free(s->lane_hit);
    kvd_free(s->lane_mass);
    kvd_free(s->lane_n_mass);
    kvd_free(s);
}

/* ---- sequences ---------------------------------------------------------------------- */

uint32_t kv_seq_len(const kv_store *s, uint32_t seq)
{
    kvd_assert(seq < s->params.n_seq);
    return s->seq[seq].len;
}

uint64_t kv_used_tokens(const kv_store *s)
{
    return s->n_used;
}

uint64_t kv_capacity_tokens(const kv_store *s)
{
    return s->sizes.n_block * KV_BLOCK_TOKENS;
}

bool kv_resident(const kv_store *s)
{
    return s->sizes.resident;
}

kvd_status kv_check_growth(kv_store *s, uint32_t seq, uint32_t n_new, uint32_t *need, kvd_err *err)
{
    const kv_seq *q = &s->seq[seq];
    uint64_t      spare;

    if (n_new > s->params.n_ctx - q->len)
        return kvd_fail(err, KVD_E_FULL, 0,
                        "sequence %u holds %u tokens and cannot take %u more: its context is %u "
                        "tokens (n_ctx)",
                        seq, q->len, n_new, s->params.n_ctx);
    *need = kv_blocks_for((uint64_t)q->len + n_new);
    if (*need > q->n_block &&
        *need - q->n_block > kvd_min_u64(s->sizes.n_block - s->n_held, s->n_free))
        kv_restore_yield(s);
    spare = s->sizes.n_block - s->n_held;
    if (*need > q->n_block && *need - q->n_block > spare)
        return kvd_fail(err, KVD_E_FULL, 0,
                        "KV cache is full: sequence %u needs %u more blocks of %u tokens, %" PRIu64
                        " of %" PRIu64 " are free",
                        seq, *need - q->n_block, KV_BLOCK_TOKENS, spare, s->sizes.n_block);
    return KVD_OK;
}

kvd_status kv_refuse_unsealed(uint32_t seq, kvd_err *err)
{
    return kvd_fail(err, KVD_E_FULL, 0, "KV cache: sequence %u has tokens that were not sealed",
                    seq);
}

kvd_status kv_seq_reserve(kv_store *s, uint32_t seq, uint32_t n_new, kvd_err *err)
{
    kv_seq  *q;
    uint32_t need;

    kvd_assert(seq < s->params.n_seq && (s->sizes.resident || n_new <= s->params.n_batch));
    q = &s->seq[seq];
    KVD_TRY(kv_check_growth(s, seq, n_new, &need, err));
    kv_parked_yield(s, need > q->n_block ? need - q->n_block : 0);
    if (need > q->n_block && need - q->n_block > s->n_free) /* sealing has failed before */
        return kv_refuse_unsealed(seq, err);
    while (q->n_block < need) {
        q->block[q->n_block++] = s->free_stack[--s->n_free];
        s->n_held++;
    }
    return KVD_OK;
}

void kv_seq_commit(kv_store *s, uint32_t seq, uint32_t n_new, kv_made made)
{
    kv_seq *q;

    kvd_assert(seq < s->params.n_seq);
    q = &s->seq[seq];
    kvd_assert(kv_blocks_for((uint64_t)q->len + n_new) <= q->n_block);
    if (made != KV_MADE_PROMPT && n_new > 0)
        kv_cache_mark(s, seq, q->len, n_new, made == KV_MADE_SPARSE);
    q->len += n_new;
    s->n_used += n_new;
}

void kv_seq_release(kv_store *s, uint32_t seq)
{
    kvd_assert(seq < s->params.n_seq);
    kv_drop_blocks(s, seq, kv_blocks_for(s->seq[seq].len));
}

void kv_seq_truncate(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t n_keep)
{
    kvd_err err = { 0 };
    kv_seq *q;

    kvd_assert(seq < s->params.n_seq);
    q = &s->seq[seq];
    kvd_assert(n_keep <= q->len);
    kv_tier_settle(s);
    s->n_used -= q->len - n_keep;
    q->len  = n_keep;
    q->step = 0; /* the window may hold what is gone: the next step fills it anew */
    kv_cache_cut(s, seq, n_keep);
    kv_drop_blocks(s, seq, kv_blocks_for(n_keep));
    if (kv_unseal(s, st, seq, kv_sealed_at(&s->params, n_keep), &err) == KVD_OK)
        return;
    kvd_log(KVD_LOG_WARN, "sequence %u: %s; its tokens from %u on are evaluated again", seq,
            err.msg, q->n_sealed - KV_BLOCK_TOKENS);
    s->n_used -= q->len - (q->n_sealed - KV_BLOCK_TOKENS);
    q->len = q->n_sealed - KV_BLOCK_TOKENS;
    kv_drop_blocks(s, seq, kv_blocks_for(q->len));
}

kvd_kv_layout kv_layout(const kv_store *s, uint32_t layer)
{
    kvd_kv_layout l = s->layout;

    kvd_assert(layer < s->params.n_layer);
    l.lane_off = (uint64_t)layer * s->params.n_kv_head * l.head_stride;
    return l;
}

const uint64_t *kv_seq_blocks(const kv_store *s, uint32_t seq)
{
    kvd_assert(seq < s->params.n_seq);
    return kv_dev(s, s->seq[seq].block);
}

/* ---- looking in --------------------------------------------------------------------- */

void kv_get_counts(const kv_store *s, kv_counts *out)
{
    *out = s->counts;
    kv_tier_count(s, out);
}

void kv_reset_counts(kv_store *s)
{
    const size_t lanes = (size_t)s->params.n_layer * s->params.n_kv_head;

    s->counts = (kv_counts){ 0 };
    memset(s->lane_select, 0, lanes * sizeof(*s->lane_select));
    memset(s->lane_hit, 0, lanes * sizeof(*s->lane_hit));
    memset(s->lane_mass, 0, lanes * sizeof(*s->lane_mass));
    memset(s->lane_n_mass, 0, lanes * sizeof(*s->lane_n_mass));
}

void kv_lane_counts(const kv_store *s, uint32_t layer, uint32_t kv_head, uint64_t *n_select,
                    uint64_t *n_hit)
{
    const size_t i = (size_t)layer * s->params.n_kv_head + kv_head;

    kvd_assert(layer < s->params.n_layer && kv_head < s->params.n_kv_head);
    *n_select = s->lane_select[i];
    *n_hit    = s->lane_hit[i];
}

double kv_lane_mass(const kv_store *s, uint32_t layer, uint32_t kv_head)
{
    const size_t i = (size_t)layer * s->params.n_kv_head + kv_head;

    kvd_assert(layer < s->params.n_layer && kv_head < s->params.n_kv_head);
    return s->lane_n_mass[i] ? s->lane_mass[i] / (double)s->lane_n_mass[i] : 0.0;
}

/* Slots that a sequence's windows have in use, over all lanes. */
static uint64_t slots_in_use(const kv_store *s, uint32_t seq)
{
    const uint64_t lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;
    const kv_seq  *q     = &s->seq[seq];

    if (q->budget == 0 || q->step == 0)
        return 0;
    return kvd_min_u64(q->n_slot, lanes * (q->n_sealed / s->params.chunk_tokens));
}

void kv_used_bytes(const kv_store *s, kv_used *out)
{
    const kv_sizes *z       = &s->sizes;
    const uint64_t  lanes   = (uint64_t)s->params.n_layer * s->params.n_kv_head;
    uint64_t        records = 0;

    for (uint32_t i = 0; !z->resident && i < s->params.n_seq; i++)
        records += slots_in_use(s, i) + (s->seq[i].n_sealed > 0 ? lanes * s->sinks : 0);
    *out              = (kv_used){ 0 };
    out->device_bytes = (z->n_raw - s->n_free) * z->block_bytes + records * s->layout.record_bytes +
                        z->bytes[KV_BUF_STAGE] + z->bytes[KV_BUF_MAP];
    if (s->params.sparse)
        out->device_bytes += (z->n_block - s->n_ifree) * lanes * s->index.head_stride;
    out->host_bytes = (s->n_hrecord - s->n_hfree) * s->packed_bytes + z->bytes[KV_BUF_LISTS];
    kv_cache_used(s, &out->disk_bytes, &out->disk_limit_bytes);
}

void kv_seq_where(const kv_store *s, uint32_t seq, kv_where *out)
{
    const uint64_t lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;
    const kv_seq  *q     = &s->seq[seq];
    /* tokens below the device; while a prefix comes back more are sealed than it holds */
    const uint32_t low = s->sizes.resident ? 0 : (uint32_t)kvd_min_u64(q->n_sealed, q->len);

    kvd_assert(seq < s->params.n_seq);
    *out        = (kv_where){ .device = q->len - low, .host = low };
    out->window = low ? (uint32_t)(slots_in_use(s, seq) * s->params.chunk_tokens / lanes) : 0;
    if (s->tier && low)
        out->host =
            (uint32_t)kvd_min_u64(kv_tier_records(s, seq) * s->params.chunk_tokens / lanes, low);
    out->disk = low - out->host;
}

/* How often the value is on the stack. */
static uint32_t on_stack(const uint64_t *stack, uint64_t n, uint64_t value)
{
    uint32_t found = 0;

    for (uint64_t i = 0; i < n; i++)
        found += stack[i] == value;
    return found;
}

/* Holders of raw block number i and of index block number i; invariant (1) wants one each. */
static void check_block(const kv_store *s, uint64_t i)
{
    const uint64_t off = i * s->sizes.block_bytes;
    const uint64_t index_bytes =
        (uint64_t)s->params.n_layer * s->params.n_kv_head * s->index.head_stride;
    uint32_t raw = on_stack(s->free_stack, s->n_free, off), index = 0;

    for (uint32_t q = 0; q < s->params.n_seq; q++) {
        for (uint32_t b = 0; b < s->seq[q].n_block; b++) {
            raw += s->seq[q].block[b] == off;
            if (b < s->seq[q].n_sealed / KV_BLOCK_TOKENS)
                index += s->seq[q].iblock[b] == i * index_bytes;
        }
    }
    kv_parked_count(s, off, i * index_bytes, &raw, &index);
    raw += kv_restore_aside(s, off);
    kvd_assert(i >= s->sizes.n_raw || raw == 1);
    kvd_assert(!s->params.sparse ||
               index + on_stack(s->ifree_stack, s->n_ifree, i * index_bytes) == 1);
}

/* Host records that a sequence's sealed chunks hold. */
static uint64_t host_records(const kv_store *s, uint32_t seq)
{
    const uint32_t n_chunk = s->seq[seq].n_sealed / s->params.chunk_tokens;
    uint64_t       n       = 0;

    for (uint32_t l = 0; l < s->params.n_layer * s->params.n_kv_head; l++) {
        for (uint32_t c = 0; c < n_chunk; c++)
            n += s->host_of[(kv_lane(s, seq, 0) + l) * s->n_chunk_max + c] != KV_NO_HOST;
    }
    kvd_assert(s->tier ? n == kv_tier_records(s, seq)
                       : n == (uint64_t)n_chunk * s->params.n_layer * s->params.n_kv_head);
    return n;
}

/* Invariant (4), and that host records, n_parked of them of parked sequences, are held as often as
 * they are missing from the stack. */
static void check_sealed(const kv_store *s, uint64_t n_parked)
{
    uint64_t held = n_parked;

    for (uint32_t i = 0; i < s->params.n_seq; i++) {
        const kv_seq *q = &s->seq[i];

        kvd_assert(q->n_sealed % KV_BLOCK_TOKENS == 0);
        kvd_assert(q->n_sealed <= q->len || kv_restoring(s, i));
        for (uint32_t b = 0; b < q->n_block; b++)
            kvd_assert((q->block[b] == KV_NO_BLOCK) ==
                       (!s->sizes.resident && b < q->n_sealed / KV_BLOCK_TOKENS));
        held += s->sizes.resident ? 0 : host_records(s, i);
    }
    kvd_assert(s->n_hrecord - s->n_hfree == held);
}

/* What is told of use: never more than there is. */
static void check_use(const kv_store *s)
{
    kv_used u;

    kv_used_bytes(s, &u);
    kvd_assert(u.device_bytes <= s->sizes.device_bytes);
    kvd_assert(u.host_bytes <= s->sizes.host_bytes - s->sizes.bytes[KV_BUF_TABLE]);
    for (uint32_t i = 0; i < s->params.n_seq; i++) {
        uint64_t n_slot = 0;
        kv_where w;

        for (uint32_t l = 0; l < s->params.n_layer * s->params.n_kv_head; l++)
            n_slot += s->cap[kv_lane(s, i, 0) + l];
        kvd_assert(n_slot == s->seq[i].n_slot);
        kv_seq_where(s, i, &w);
        kvd_assert(w.host + w.disk <= s->seq[i].n_sealed && w.window <= s->seq[i].n_sealed);
        kvd_assert(w.device + w.host + w.disk == s->seq[i].len);
    }
}

void kv_check(const kv_store *s)
{
    uint64_t used = 0, held = kv_restore_n_aside(s), records = 0;

    for (uint64_t i = 0; i < s->sizes.n_block; i++)
        check_block(s, i);
    kv_parked_check(s, &used, &held, &records);
    check_sealed(s, records);
    for (uint32_t i = 0; i < s->params.n_seq; i++) {
        kvd_assert(kv_blocks_for(s->seq[i].len) <= s->seq[i].n_block); /* (2) */
        used += s->seq[i].len;
        held += s->seq[i].n_block;
    }
    kvd_assert(used == s->n_used && held == s->n_held); /* (3) */
    kv_check_windows(s);
    check_use(s);
}
