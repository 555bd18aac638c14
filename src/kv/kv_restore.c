/* SPDX-License-Identifier: Apache-2.0 */
/* kv_restore.c - the longest known prefix of a prompt comes back from the block store.
 *
 * Layer by layer: index and records of the blocks that are sealed at the prompt's final length, raw
 * rows of the rest.  What is restored is what the same tokens had when they were stored, so the
 * text goes on as if they had been evaluated here.  A sequence that holds the beginning of the
 * prompt gets what the store knows beyond that.  Any failure gives the sequence back as it was, and
 * the rest of the prompt is evaluated instead; so does a disk that is slower than that.  What
 * evaluating a token takes is measured, and kept in the catalogue, so that it is known after a
 * restart.
 *
 * Thread: the session's. */
#include <inttypes.h>
#include <string.h>

#include "kv/kv_cache.h"

/* While a disk's rate is not known reads are small: till so many bytes, or their share of all. */
#define TRIAL_BYTES (16u << 20)
#define TRIAL_SHARE 16u /* of the time of evaluating, too: slowness is borne for so long */
#define TRIAL_READS 3u  /* at least: the slowest is left out, since disks have their moments */
#define PIECE_MIN   (32u << 10)
#define PIECE_MAX   (256u << 10)
#define PIECE_SHARE 64u
#define EVAL_TOKENS 16384.0
#define SHORT_NS    3.5e8 /* of reading: never too long, whatever evaluating takes */
#define SLOWER      1.05  /* times evaluating: too long */
#define TRY_AGAIN   8u    /* of the prefixes that should be too slow one is tried */
#define FIRST_READ  4u    /* blocks of the first read where there is little time */

const kv_disk_span *kv_restore_span(const kv_restore *r, uint32_t b, uint32_t *in_unit)
{
    const kv_disk_span *sp    = r->match.span;
    uint32_t            first = 0;

    while (b >= first + sp->n_block) {
        first += sp->n_block;
        sp++;
    }
    *in_unit = sp->first_block + b - first;
    return sp;
}

static const kv_disk_span *tail_spans(const kv_restore *r)
{
    return &r->match.span[r->match.n_span - r->match.n_tail_span];
}

bool kv_restore_part(const kv_restore *r, kv_tail_part *p)
{
    const kv_disk_span *const end = r->match.span + r->match.n_span;
    uint32_t                  at;

    if (r->n_tail == 0)
        return false;
    if (!p->span) {
        p->span = tail_spans(r);
    } else if (p->first + p->n < p->span->n_token) {
        p->first += p->n;
    } else {
        p->span++;
        p->first = 0;
    }
    if (p->span == end)
        return false;
    at       = p->block * KV_BLOCK_TOKENS + p->at + p->n;
    p->block = at / KV_BLOCK_TOKENS;
    p->at    = at % KV_BLOCK_TOKENS;
    p->n     = (uint32_t)kvd_min_u64(p->span->n_token - p->first, KV_BLOCK_TOKENS - p->at);
    return true;
}

/* How much of the match there is room for; what of it is sealed when the sequence has final_len
 * tokens. */
static void measure(kv_restore *r, uint32_t final_len)
{
    const kv_store *s = r->s;

    r->n_block = (uint32_t)(r->match.n_token / KV_BLOCK_TOKENS);
    r->n_tail  = r->match.n_tail_token;
    if (final_len == 0)
        final_len = r->n_block * KV_BLOCK_TOKENS + r->n_tail + 1;
    r->n_seal = kv_sealed_at(&s->params, final_len) / KV_BLOCK_TOKENS;
    if (r->n_seal > r->n_block)
        r->n_seal = r->n_block;
    if (s->record.type != KVD_RECORD_RAW && r->n_block > r->n_seal) {
        r->n_block =
            r->n_seal; /* what is not sealed must be raw, and packed records are not that */
        r->n_tail = 0;
    }
}

/* ---- blocks ------------------------------------------------------------------------- */

static void free_aside(kv_restore *r)
{
    kv_store *s = r->s;

    s->n_held -= r->n_aside;
    while (r->n_aside > 0)
        s->free_stack[s->n_free++] = r->aside[--r->n_aside];
}

/* Blocks that the sequence and the match have from the same: what follows one follows the other. */
static uint32_t same_blocks(const kv_restore *r)
{
    const kv_cache_seq *c    = &r->s->cache->seq[r->seq];
    const uint32_t      most = r->s->seq[r->seq].n_sealed / KV_BLOCK_TOKENS;
    uint32_t            b    = 0, in_unit;

    while (b < most && b < r->n_seal &&
           kv_cache_same_making(c->made[b],
                                kv_cache_accepted[kv_restore_span(r, b, &in_unit)->provenance]))
        b++;
    return b;
}

/* The sequence keeps its first sealed blocks, those of the match; the others' raw blocks are set
 * aside. */
static void set_aside(kv_restore *r)
{
    kv_store *s = r->s;
    kv_seq   *q = &s->seq[r->seq];

    kv_tier_settle(s);
    /* the others came about otherwise, or would not be sealed */
    if (q->n_sealed > r->base * KV_BLOCK_TOKENS)
        kv_seq_truncate(s, r->st, r->seq, r->base * KV_BLOCK_TOKENS);
    r->old_len = q->len;
    r->base    = q->n_sealed / KV_BLOCK_TOKENS;
    r->reads   = true;
    for (uint32_t b = r->base; b < q->n_block; b++)
        r->aside[r->n_aside++] = q->block[b];
    s->n_used -= q->len - q->n_sealed;
    q->n_block = r->base;
    q->len     = q->n_sealed;
    q->step    = 0;
}

/* The sequence is as it was; without what was set aside where there was no room for both. */
static void give_back(kv_restore *r)
{
    kv_store *s = r->s;
    kv_seq   *q = &s->seq[r->seq];

    if (!r->reads)
        return;
    kv_drop_blocks(s, r->seq, r->base);
    for (uint32_t i = 0; i < r->n_aside; i++)
        q->block[q->n_block++] = r->aside[i];
    if (r->n_aside > 0) {
        s->n_used += r->old_len - q->len;
        q->len = r->old_len;
    }
    r->n_aside = 0;
    kv_seq_truncate(s, r->st, r->seq, q->len);
}

/* Index blocks and host records for what is sealed, raw blocks for the rest (all, if resident). */
static kvd_status take_blocks(kv_restore *r, kvd_err *err)
{
    kv_store      *s    = r->s;
    kv_seq        *q    = &s->seq[r->seq];
    const uint32_t need = r->n_block + kv_blocks_for(r->n_tail);
    const uint32_t more = need - r->base;
    const uint32_t raw  = s->sizes.resident ? more : need - r->n_seal;

    kv_parked_yield(s, raw);
    if (need > s->blocks_max || more > s->sizes.n_block - s->n_held + r->n_aside ||
        raw > s->n_free + r->n_aside)
        return kvd_fail(err, KVD_E_FULL, 0, "no room for %u blocks of a known prefix", need);
    if (more > s->sizes.n_block - s->n_held || raw > s->n_free)
        free_aside(r); /* there is no room for both */
    for (uint32_t b = r->base; b < r->n_seal; b++)
        kv_map_block(s, r->seq, b, !s->tier);
    kv_tier_bind_match(s, r->seq, &r->match, r->n_seal);
    for (; q->n_block < need; q->n_block++, s->n_held++)
        q->block[q->n_block] =
            !s->sizes.resident && q->n_block < r->n_seal ? KV_NO_BLOCK : s->free_stack[--s->n_free];
    q->n_sealed = r->n_seal * KV_BLOCK_TOKENS;
    return KVD_OK;
}

static uint64_t layer_at(const kv_restore *r, uint32_t b, uint32_t layer)
{
    const uint64_t block = r->s->seq[r->seq].block[b];

    return block == KV_NO_BLOCK ? kv_stage_block(r->s, b) : kv_layer_of(r->s, block, layer);
}

/* ---- load or evaluate ----------------------------------------------------------------- */

/* The mean of about the last EVAL_TOKENS, so that beginnings and ends of prompts count as much as
 * there are of them: late tokens take longer. */
void kv_evaluated(kv_store *s, uint32_t n_token, uint64_t ns)
{
    kv_cache    *c = s->cache;
    const double n = n_token;

    if (!c)
        return;
    c->eval_weight = c->eval_weight * (n < EVAL_TOKENS ? 1.0 - n / EVAL_TOKENS : 0.0) + n;
    c->eval_ns += ((double)ns / n - c->eval_ns) * n / c->eval_weight;
}

static uint32_t known_of(const kv_restore *r)
{
    return r->n_block * KV_BLOCK_TOKENS + r->n_tail;
}

/* Tokens that the sequence would not have otherwise. */
static uint32_t gain_of(const kv_restore *r)
{
    return known_of(r) > r->old_len ? known_of(r) - r->old_len : 0;
}

static double evaluating_ns(const kv_restore *r)
{
    return r->s->cache->eval_ns * gain_of(r);
}

static double most_ns(const kv_restore *r)
{
    const double most = SLOWER * evaluating_ns(r);

    return most > SHORT_NS ? most : SHORT_NS;
}

static uint64_t token_bytes(const kv_store *s)
{
    return s->layout.record_bytes / s->params.chunk_tokens;
}

/* Of a block of a lane, as the disk reads it. */
static uint64_t index_bytes(const kv_store *s)
{
    return kvd_align_up(s->index.head_stride, KV_DISK_PAGE_BYTES);
}

static uint64_t bytes_of(const kv_restore *r)
{
    const kv_store *s     = r->s;
    const uint64_t  lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;
    const uint64_t  n_raw = r->n_block - (s->tier ? r->n_seal : r->base);

    return lanes * (n_raw * s->block_chunks * s->packed_bytes +
                    (r->n_seal - r->base) * index_bytes(s) + r->n_tail * token_bytes(s));
}

static kvd_status too_slow(kv_restore *r, double load_ns, kvd_err *err)
{
    r->slow = true;
    return kvd_fail(err, KVD_E_BUSY, 0, "%u tokens take %.3g s to read and %.3g s to evaluate",
                    gain_of(r), load_ns * 1e-9, evaluating_ns(r) * 1e-9);
}

/* By what was seen before. */
static kvd_status expect(kv_restore *r, kvd_err *err)
{
    kv_cache    *c    = r->s->cache;
    const double load = c->load_rate > 0.0 ? (double)r->bytes / c->load_rate : 0.0;

    if (c->eval_ns == 0.0 || load <= most_ns(r) || ++c->n_skip % TRY_AGAIN == 0)
        return KVD_OK;
    return too_slow(r, load, err);
}

static uint64_t disk_bytes(const kv_restore *r)
{
    kv_disk_stats st;

    kv_disk_stats_get(r->s->cache->disk, &st);
    return st.read_bytes;
}

/* Bytes in a nanosecond, but for the slowest read; 0: not known. */
static double rate_of(const kv_restore *r)
{
    if (r->n_read < TRIAL_READS)
        return 0.0;
    return (double)(r->disk - r->slow_bytes) / (double)(r->spent_ns - r->slow_ns + 1);
}

/* By what has been read so far: what is left must take less than evaluating all of it. */
static kvd_status judge(kv_restore *r, kvd_err *err)
{
    const double eval = evaluating_ns(r), rate = rate_of(r);
    const double spent = (double)(r->ready_ns + r->spent_ns);
    const double left  = r->bytes > r->done ? (double)(r->bytes - r->done) : 0.0;

    if (eval == 0.0 || rate == 0.0 || spent < eval / TRIAL_SHARE || left / rate <= most_ns(r))
        return KVD_OK;
    return too_slow(r, spent + left / rate, err);
}

static uint64_t read_bytes(const kv_restore *r, const kv_disk_read *read)
{
    const kv_store     *s  = r->s;
    const kv_disk_span *sp = tail_spans(r), *const end = r->match.span + r->match.n_span;

    if (read->what == KV_DISK_AUX)
        return read->n * index_bytes(s);
    while (sp < end && sp->unit != read->unit)
        sp++;
    if (sp == end)
        return read->n * s->packed_bytes;
    return read->n * (sp->kind == KV_DISK_TAIL ? token_bytes(s) : s->layout.record_bytes);
}

static void count_read(kv_restore *r, uint64_t bytes, uint64_t on_disk, uint64_t ns)
{
    r->n_read++;
    r->done += bytes;
    r->disk += on_disk;
    r->spent_ns += ns;
    if (ns > r->slow_ns) {
        r->slow_ns    = ns;
        r->slow_bytes = on_disk;
    }
}

static bool on_trial(const kv_restore *r)
{
    return r->s->cache->eval_ns > 0.0 &&
           (r->n_read < TRIAL_READS || r->done < kvd_min_u64(r->bytes / TRIAL_SHARE, TRIAL_BYTES));
}

kvd_status kv_restore_read(kv_restore *r, const kv_disk_read *read, uint32_t n, kvd_err *err)
{
    const uint64_t piece = kvd_min_u64(kvd_max_u64(r->bytes / PIECE_SHARE, PIECE_MIN), PIECE_MAX);

    for (uint32_t i = 0, k; i < n; i += k) {
        const uint64_t t0 = kvd_now_ns(), at = disk_bytes(r);
        uint64_t       bytes = 0;

        for (k = 0; i + k < n && (!on_trial(r) || bytes < piece); k++)
            bytes += read_bytes(r, &read[i + k]);
        KVD_TRY(kv_disk_read_now(r->s->cache->disk, read + i, k, err));
        count_read(r, bytes, disk_bytes(r) - at, kvd_now_ns() - t0);
        KVD_TRY(judge(r, err));
    }
    return KVD_OK;
}

static void learn_rate(const kv_restore *r)
{
    kv_cache    *c    = r->s->cache;
    const double rate = rate_of(r);

    if (rate > 0.0 && (r->slow || r->done >= r->bytes)) /* a little says little */
        c->load_rate = c->load_rate > 0.0 ? 0.5 * (c->load_rate + rate) : rate;
}

/* ---- reading ------------------------------------------------------------------------ */

static bool is_due(const kv_restore *r)
{
    return r->ask.until_ns > 0 && kvd_now_ns() >= r->ask.until_ns;
}

/* Blocks of a lane that there is time for. */
static uint32_t blocks_now(const kv_restore *r)
{
    const kv_store *s   = r->s;
    const uint32_t  all = r->n_block - r->block;
    const uint64_t  now = kvd_now_ns(), until = r->ask.until_ns;
    double          n = FIRST_READ;

    if (until == 0 || !s->sizes.resident)
        return all;
    if (rate_of(r) > 0.0)
        n = rate_of(r) * (until > now ? (double)(until - now) : 0.0) /
            (double)(s->block_chunks * s->packed_bytes);
    return n >= all ? all : n < 1.0 ? 1 : (uint32_t)n;
}

/* A lane's records from r->block on, or as many as there is time for. */
static kvd_status read_records(kv_restore *r, uint32_t layer, uint32_t h, kvd_err *err)
{
    kv_store      *s    = r->s;
    kv_disk_read  *read = s->cache->read;
    const uint32_t end  = r->block + blocks_now(r);
    uint32_t       n    = 0;

    for (uint32_t b = r->block; b < end; b++) {
        const uint64_t      at = layer_at(r, b, layer) + h * s->layout.head_stride;
        uint32_t            in_unit;
        const kv_disk_span *sp = kv_restore_span(r, b, &in_unit);

        read[n++] =
            (kv_disk_read){ .unit  = sp->unit,
                            .what  = KV_DISK_RECORDS,
                            .lane  = layer * s->params.n_kv_head + h,
                            .first = in_unit * s->block_chunks,
                            .n     = s->block_chunks,
                            .dst = (uint8_t *)s->pool.ptr + kv_packed_at(s, at, s->block_chunks) };
    }
    r->block = end;
    return kv_restore_read(r, read, n, err);
}

static kvd_status read_index(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store     *s    = r->s;
    kv_disk_read *read = s->cache->read;
    uint32_t      n    = 0;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint32_t lane = layer * s->params.n_kv_head + h;

        for (uint32_t b = r->base; b < r->n_seal; b++) {
            uint32_t            in_unit;
            const kv_disk_span *sp = kv_restore_span(r, b, &in_unit);

            read[n++] =
                (kv_disk_read){ .unit  = sp->unit,
                                .what  = KV_DISK_AUX,
                                .lane  = lane,
                                .first = in_unit,
                                .n     = 1,
                                .dst   = (uint8_t *)s->landmarks.ptr + s->seq[r->seq].iblock[b] +
                                       lane * s->index.head_stride };
        }
    }
    return kv_restore_read(r, read, n, err);
}

/* Records of an open block are raw ones already; the last may hold more tokens, which are not the
 * sequence's: its own will take their place. */
kvd_status kv_restore_read_part(kv_restore *r, const kv_tail_part *p, uint32_t lane, uint8_t *raw,
                                kvd_err *err)
{
    const kv_store    *s    = r->s;
    const bool         open = p->span->kind == KV_DISK_OPEN;
    const kv_disk_read read = {
        .unit  = p->span->unit,
        .what  = KV_DISK_RECORDS,
        .lane  = lane,
        .first = open ? 0 : p->first,
        .n     = open ? (uint32_t)kvd_div_up(p->n, s->params.chunk_tokens) : p->n,
        .dst   = open ? raw : s->cache->gather,
    };

    kvd_assert(!open || (p->at == 0 && p->first == 0));
    KVD_TRY(kv_restore_read(r, &read, 1, err));
    if (!open)
        kv_cache_copy_rows(s, raw, p->at, p->n, s->cache->gather, false);
    return KVD_OK;
}

static kvd_status read_tail(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store *s = r->s;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint32_t lane = layer * s->params.n_kv_head + h;
        kv_tail_part   p    = { 0 };

        while (kv_restore_part(r, &p))
            KVD_TRY(kv_restore_read_part(
                r, &p, lane, kv_cache_raw_lane(s, r->seq, r->n_block + p.block, lane), err));
    }
    return KVD_OK;
}

/* The sinks' records, where all others stay on disk for now. */
static kvd_status read_sinks(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store           *s = r->s;
    uint32_t            in_unit;
    const kv_disk_span *sp = kv_restore_span(r, 0, &in_unit);

    for (uint32_t h = 0; h < s->params.n_kv_head; h++) {
        const uint64_t at = kv_stage_block(s, 0) + h * s->layout.head_stride;

        s->cache->read[h] =
            (kv_disk_read){ .unit  = sp->unit,
                            .what  = KV_DISK_RECORDS,
                            .lane  = layer * s->params.n_kv_head + h,
                            .first = in_unit * s->block_chunks,
                            .n     = s->sinks,
                            .dst   = (uint8_t *)s->pool.ptr + kv_packed_at(s, at, s->sinks) };
    }
    return kv_disk_read_now(s->cache->disk, s->cache->read, s->params.n_kv_head, err);
}

static kvd_status unpack_lanes(kv_restore *r, uint32_t layer, uint32_t b, uint32_t n, kvd_err *err)
{
    kv_store *s = r->s;

    for (uint32_t h = 0; h < s->params.n_kv_head; h++)
        KVD_TRY(kv_unpack_run(s, r->st, r->seq, layer * s->params.n_kv_head + h,
                              b * s->block_chunks, n,
                              layer_at(r, b, layer) + h * s->layout.head_stride, err));
    return KVD_OK;
}

/* Records that were read go on to where they belong: in place, or from the stage to the host. */
static kvd_status settle(kv_restore *r, uint32_t layer, kvd_err *err)
{
    kv_store *s = r->s;

    for (uint32_t b = r->base; b < r->n_seal && !s->tier; b++) {
        if (!s->sizes.resident)
            KVD_TRY(kv_keep_packed(s, r->st, r->seq, layer, b, kv_stage_block(s, b), err));
        if (s->sizes.resident || b == 0)
            KVD_TRY(unpack_lanes(r, layer, b, s->block_chunks, err));
    }
    if (r->n_seal == 0 || r->base > 0 || s->sizes.resident || s->sinks == 0)
        return KVD_OK;
    if (s->tier) {
        KVD_TRY(read_sinks(r, layer, err));
        KVD_TRY(unpack_lanes(r, layer, 0, s->sinks, err));
    }
    return kv_keep_sinks(s, r->st, r->seq, layer, kv_stage_block(s, 0), err);
}

/* The first block whose records are read now: sealed ones stay on disk where that is a tier. */
static uint32_t first_read(const kv_restore *r)
{
    return r->s->tier ? r->n_seal : r->base;
}

/* A layer, or a part of a lane of it. */
static kvd_status read_part(kv_restore *r, kvd_err *err)
{
    kv_store *s = r->s;

    if (s->cache->ferry) {
        KVD_TRY(kv_restore_up(r, r->layer++, err));
        return KVD_OK;
    }
    if (!r->begun)
        KVD_TRY(read_index(r, r->layer, err)); /* first: with it come the records' parameters */
    if (!r->begun)
        r->block = first_read(r);
    r->begun = true;
    KVD_TRY(read_records(r, r->layer, r->head, err));
    if (r->block < r->n_block)
        return KVD_OK;
    r->block = first_read(r);
    if (++r->head < s->params.n_kv_head)
        return KVD_OK;
    KVD_TRY(read_tail(r, r->layer, err));
    KVD_TRY(settle(r, r->layer, err));
    r->head  = 0;
    r->begun = false;
    r->layer++;
    return KVD_OK;
}

/* Of a unit, one after the other. */
static kvd_status prepare(kv_restore *r, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();

    KVD_TRY(kv_disk_prepare(r->s->cache->disk, r->match.span[r->n_ready++].unit, err));
    r->ready_ns += kvd_now_ns() - t0; /* small reads say nothing of the disk's rate */
    return KVD_OK;
}

/* At least a part, then until the time is over: between layers, and where all is resident between
 * parts of them, since others use the stage meanwhile. */
static kvd_status read_layers(kv_restore *r, kvd_err *err)
{
    KVD_TRY(kv_ferry_drain(r->s, true, err)); /* others may have used its places */
    do
        KVD_TRY((r->n_ready < r->match.n_span ? prepare : read_part)(r, err));
    while (r->layer < r->s->params.n_layer && (!is_due(r) || (r->begun && !r->s->sizes.resident)));
    return KVD_OK;
}

/* Keys and makings of the new blocks, so that what follows continues the chain. */
static kvd_status name_blocks(kv_restore *r, kvd_err *err)
{
    kv_cache_seq *q = &r->s->cache->seq[r->seq];

    for (uint32_t b = r->base; b < r->n_block; b++) {
        uint32_t in_unit;

        q->made[b] = kv_cache_accepted[kv_restore_span(r, b, &in_unit)->provenance];
        KVD_TRY(kv_cache_name_block(r->s, r->seq, b, err));
    }
    for (uint32_t t = 0; t < r->n_tail; t += KV_BLOCK_TOKENS)
        q->made[r->n_block + t / KV_BLOCK_TOKENS] = 0;
    for (kv_tail_part p = { 0 }; kv_restore_part(r, &p);)
        q->made[r->n_block + p.block] |= kv_cache_accepted[p.span->provenance];
    return KVD_OK;
}

static kvd_status begin(kv_restore *r, kvd_err *err)
{
    kv_store *s = r->s;

    r->old_len = s->seq[r->seq].len;
    KVD_TRY(kv_cache_find(s, r->seq, r->ask.n_token, false, &r->match, err));
    measure(r, r->ask.final_len);
    if (gain_of(r) == 0)
        return KVD_OK;
    r->base  = same_blocks(r);
    r->bytes = bytes_of(r);
    KVD_TRY(expect(r, err));
    set_aside(r);
    r->bytes = bytes_of(r);
    return take_blocks(r, err);
}

static void end(kv_restore *r, kvd_status rc, kvd_err *err)
{
    kv_store *s = r->s;
    kv_seq   *q = &s->seq[r->seq];

    if (rc == KVD_OK && r->reads) {
        free_aside(r);
        rc = name_blocks(r, err);
    }
    if (rc != KVD_OK) {
        kvd_log(r->slow ? KVD_LOG_INFO : KVD_LOG_WARN,
                "prefix cache: %s; the prompt is evaluated instead", err->msg);
        s->counts.n_slow += r->slow;
        give_back(r);
    } else if (r->reads) {
        s->n_used += known_of(r) - q->len;
        q->len = known_of(r);
        s->counts.n_restored += gain_of(r);
    }
    learn_rate(r);
    kv_disk_match_close(s->cache->disk, &r->match);
    r->s = NULL;
}

void kv_restore_yield(kv_store *s)
{
    if (s->cache && s->cache->pending.s)
        free_aside(&s->cache->pending);
}

uint32_t kv_restore_n_aside(const kv_store *s)
{
    return s->cache && s->cache->pending.s ? s->cache->pending.n_aside : 0;
}

uint32_t kv_restore_aside(const kv_store *s, uint64_t raw)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < kv_restore_n_aside(s); i++)
        n += s->cache->pending.aside[i] == raw;
    return n;
}

bool kv_restoring(const kv_store *s, uint32_t seq)
{
    return s->cache && s->cache->pending.s && s->cache->pending.seq == seq;
}

void kv_restore_stop(kv_store *s, kvd_stream *st, uint32_t seq)
{
    kv_restore *r;

    if (!kv_restoring(s, seq))
        return;
    r     = &s->cache->pending;
    r->st = st;
    give_back(r);
    kv_disk_match_close(s->cache->disk, &r->match);
    r->s = NULL;
}

static bool restore(kv_store *s, kvd_stream *st, uint32_t seq, const kv_restore_ask *ask)
{
    kv_restore  at_once = { 0 };
    kv_restore *r;
    kvd_err     err = { 0 };
    kvd_status  rc  = KVD_OK;

    r = ask->until_ns || kv_restoring(s, seq) ? &s->cache->pending : &at_once;
    if (r->s && r->seq != seq)
        return false;
    if (!r->s) {
        *r = (kv_restore){ .s = s, .st = st, .seq = seq, .ask = *ask };

        r->aside = s->cache->aside + (r == &at_once ? s->blocks_max : 0);
        rc       = begin(r, &err);
    }
    r->ask.until_ns = ask->until_ns;
    if (rc == KVD_OK && r->reads) {
        rc = read_layers(r, &err);
        if (rc == KVD_OK && r->layer < s->params.n_layer)
            return false;
    }
    end(r, rc, &err);
    return true;
}

bool kv_seq_restore(kv_store *s, kvd_stream *st, uint32_t seq, const kv_restore_ask *ask)
{
    const uint64_t t0 = kvd_now_ns();
    bool           done;

    if (!s->cache || ask->n_token == 0)
        return true;
    done = restore(s, st, seq, ask);
    s->counts.restore_ns += kvd_now_ns() - t0;
    return done;
}
