/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tier.c - the disk as a tier: sealed records that the host tier has no room for are read from
 * the block store.
 *
 * Every sealed block is in the store and referenced, so it is not evicted there.  The host tier is
 * then an inclusive cache: a lane has a fixed share of it (all the same, or by lane_host), filled
 * as blocks are sealed, or by the first read of all of them, and from then on by score: what was
 * read from disk replaces what has a lower average score.
 *
 * A step reads its urgent misses at once and starts the others, a *flight*; it is waited for when
 * the lag-th step after it comes to the layer (the next one, unless --disk-lag is more).  With a
 * longer lag slots are *late* in between: their chunk has the slot, and is not attended.  A flight
 * joins as soon as it is seen to have arrived; it is waited for at once when a late slot is given
 * away, or its chunk is urgent.  So a read never writes into a slot that is read or another's.
 *
 * Every wait has the block store's time limit.  A read that fails loses the block: the step fails,
 * and kv_seq_lost() says from where on the sequence has to be evaluated again.
 *
 * Thread: the session's. */
#include <inttypes.h>
#include <string.h>

#include "kv/kv_tier.h"

/* ---- open and close ----------------------------------------------------------------- */

enum { LATE_NOT, LATE, LATE_WANTED };

static uint64_t arrivals_max(const kv_params *p)
{
    return (uint64_t)p->n_seq * p->n_kv_head * p->window_tokens / p->chunk_tokens;
}

uint32_t kv_tier_lag(const kv_params *p)
{
    return p->disk_lag > 1 ? p->disk_lag : 1;
}

uint32_t kv_tier_late_reads(const kv_params *p)
{
    return (uint32_t)kvd_max_u64(1, kvd_min_u64(arrivals_max(p), KV_TIER_READS_MAX));
}

static uint64_t late_bytes(const kv_params *p)
{
    return kv_tier_lag(p) > 1 ? kv_n_lane(p) * (p->window_tokens / p->chunk_tokens) : 0;
}

/* Where the averages are the device's alone the host has a copy. */
static uint64_t seen_bytes(const kv_params *p)
{
    const uint64_t chunks =
        kvd_div_up(p->n_ctx, KV_BLOCK_TOKENS) * (KV_BLOCK_TOKENS / p->chunk_tokens);

    return kv_averages_apart(p) ? kv_n_lane(p) * chunks * sizeof(uint16_t) : 0;
}

uint64_t kv_tier_bytes(const kv_params *p, uint64_t host_bytes, uint64_t record_bytes)
{
    const uint64_t blocks = kvd_div_up(p->n_ctx, KV_BLOCK_TOKENS);

    return sizeof(kv_tier) + kv_n_lane(p) * sizeof(kv_tier_lane) + host_bytes / record_bytes * 4 +
           p->n_seq * (blocks * (sizeof(kv_disk_unit) + 1) + 4) +
           KV_TIER_READS_MAX * (sizeof(kv_disk_read) + sizeof(kv_arrival)) +
           blocks * (KV_BLOCK_TOKENS / p->chunk_tokens) * 8 + late_bytes(p) +
           p->n_layer *
               (kv_tier_lag(p) * (sizeof(kv_flight) + arrivals_max(p) * sizeof(kv_arrival) +
                                  kv_disk_late_bytes(1, kv_tier_late_reads(p))) +
                4) +
           kv_land_bytes(p) + seen_bytes(p) + kv_serve_bytes(p);
}

/* Every lane's share, of a store whose host tier has room for all of them. */
static void share_out(kv_store *s)
{
    const kv_params *p     = &s->params;
    const uint64_t   lanes = kv_n_lane(p), each = lanes / p->n_seq;
    kv_tier         *t    = s->tier;
    uint32_t        *list = t->list;

    for (uint64_t i = 0; i < lanes; i++) {
        const uint64_t most = p->lane_host ? p->lane_host[i % each] : s->n_hrecord / lanes;

        t->lane[i] =
            (kv_tier_lane){ .list = list, .quota = (uint32_t)kvd_min_u64(most, s->n_chunk_max) };
        list += t->lane[i].quota;
    }
    kvd_assert((uint64_t)(list - t->list) <= s->n_hrecord);
}

kvd_status kv_tier_open(kv_store *s, kvd_err *err)
{
    const kv_params *p      = &s->params;
    const size_t     lanes  = (size_t)kv_n_lane(p);
    const size_t     blocks = (size_t)p->n_seq * s->blocks_max, late = (size_t)late_bytes(p);
    size_t           flights;
    kv_tier         *t;

    if (!s->sizes.spills)
        return KVD_OK;
    t = s->tier = kvd_calloc(1, sizeof(*t));
    if (!t)
        return kvd_fail(err, KVD_E_NOMEM, 0, "disk tier: no memory");
    flights         = (size_t)p->n_layer * kv_tier_lag(p);
    t->arrivals_max = arrivals_max(p);
    t->lane         = kvd_calloc(lanes, sizeof(*t->lane));
    t->list         = kvd_calloc(s->n_hrecord, sizeof(*t->list));
    t->unit         = kvd_calloc(blocks, sizeof(*t->unit));
    t->in_unit      = kvd_calloc(blocks, sizeof(*t->in_unit));
    t->read         = kvd_calloc(KV_TIER_READS_MAX, sizeof(*t->read));
    t->run          = kvd_calloc(KV_TIER_READS_MAX, sizeof(*t->run));
    t->rank         = kvd_calloc(s->n_chunk_max, sizeof(*t->rank));
    t->turn         = kvd_calloc(p->n_layer, sizeof(*t->turn));
    t->flight       = kvd_calloc(flights, sizeof(*t->flight));
    t->arrival      = kvd_calloc(flights * t->arrivals_max, sizeof(*t->arrival));
    t->late         = late ? kvd_calloc(late, 1) : NULL;
    t->lost         = kvd_calloc(p->n_seq, sizeof(*t->lost));
    if (!t->lane || !t->list || !t->unit || !t->in_unit || !t->read || !t->run || !t->rank ||
        !t->turn || !t->flight || !t->arrival || !t->lost || (late && !t->late))
        return kvd_fail(err, KVD_E_NOMEM, 0, "disk tier: no memory for its tables");
    t->lag = kv_tier_lag(p); /* until now there are no flights to settle */
    memset(t->lost, 0xff, p->n_seq * sizeof(*t->lost));
    share_out(s);
    t->ema = s->ema;
    KVD_TRY(s->be->ops->mem_alloc(s->be, KVD_MEM_PINNED, seen_bytes(p), &t->seen, err));
    if (t->seen.ptr)
        t->ema = t->seen.ptr;
    KVD_TRY(kv_land_open(s, &t->land, err));
    return kv_serve_open(s, err);
}

void kv_tier_close(kv_store *s)
{
    kv_tier *t = s->tier;

    if (!t)
        return;
    kvd_free(t->lane);
    kvd_free(t->list);
    kvd_free(t->unit);
    kvd_free(t->in_unit);
    kvd_free(t->read);
    kvd_free(t->run);
    kvd_free(t->rank);
    kvd_free(t->turn);
    kvd_free(t->late);
    kvd_free(t->flight);
    kvd_free(t->arrival);
    kvd_free(t->lost);
    kv_serve_close(s);
    kv_land_close(s, &t->land);
    s->be->ops->mem_free(s->be, &t->seen);
    kvd_free(t);
    s->tier = NULL;
}

/* ---- host records ------------------------------------------------------------------- */

/* A host record for a chunk, while the lane has a share left. */
uint32_t kv_tier_take(kv_store *s, uint64_t lane, uint32_t chunk)
{
    kv_tier_lane *t = s->tier ? &s->tier->lane[lane] : NULL;

    if (t) {
        if (t->n == t->quota)
            return KV_NO_HOST;
        t->list[t->n++] = chunk;
    }
    return s->hfree_stack[--s->n_hfree];
}

/* Chunks from first on leave the lane's list; the caller gives back their records. */
void kv_tier_forget(kv_store *s, uint64_t lane, uint32_t first)
{
    kv_tier_lane *t = s->tier ? &s->tier->lane[lane] : NULL;
    uint32_t      n = 0;

    for (uint32_t i = 0; t && i < t->n; i++) {
        if (t->list[i] < first)
            t->list[n++] = t->list[i];
    }
    if (t)
        t->n = n;
}

kvd_status kv_tier_see(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, kvd_err *err)
{
    const uint64_t bytes = s->n_chunk_max * sizeof(*s->ema);
    const uint64_t at    = kv_lane(s, seq, layer) * bytes;
    const uint8_t *ema   = (const uint8_t *)s->ema;
    uint32_t       r     = 0;

    if (!s->tier || !s->tier->seen.ptr)
        return KVD_OK;
    while (ema < (const uint8_t *)s->region[r].ptr ||
           ema >= (const uint8_t *)s->region[r].ptr + s->region[r].bytes)
        r++; /* they lie in one of them */
    return s->be->ops->copy(st, s->tier->seen, at, s->region[r],
                            (uint64_t)(ema - (const uint8_t *)s->region[r].ptr) + at,
                            s->params.n_kv_head * bytes, err);
}

void kv_tier_place(kv_store *s, uint64_t lane, uint32_t first, uint32_t end, bool newest)
{
    kv_tier_lane   *t    = &s->tier->lane[lane];
    uint64_t       *rank = s->tier->rank;
    uint32_t       *host = s->host_of + lane * s->n_chunk_max;
    const uint16_t *ema  = s->tier->ema + lane * s->n_chunk_max;
    uint32_t        m    = 0, drop;

    for (uint32_t i = 0; i < t->n; i++)
        rank[m++] = (uint64_t)ema[t->list[i]] << 32 | t->list[i];
    for (uint32_t c = first; c < end; c++)
        rank[m++] = (uint64_t)(newest ? UINT16_MAX : ema[c]) << 32 | c;
    drop = m > t->quota ? m - t->quota : 0;
    kvd_select_least(rank, m, drop);
    for (uint32_t i = 0; i < drop; i++) {
        uint32_t *of = &host[(uint32_t)rank[i]];

        if (*of != KV_NO_HOST)
            s->hfree_stack[s->n_hfree++] = *of;
        *of = KV_NO_HOST;
    }
    for (uint32_t i = drop; i < m; i++) {
        const uint32_t c = (uint32_t)rank[i];

        if (host[c] == KV_NO_HOST)
            host[c] = s->hfree_stack[--s->n_hfree];
        t->list[i - drop] = c;
    }
    t->n = m - drop;
}

void kv_tier_keep(kv_store *s, uint64_t lane, uint32_t chunk, const uint8_t *packed, uint32_t land,
                  uint32_t record)
{
    kv_land *l = &s->tier->land;

    if (land >= l->n_now && l->record) {
        const uint32_t place = l->record[land];

        l->record[land] = record;
        record          = place;
    } else {
        memcpy((uint8_t *)s->host.ptr + record * s->packed_bytes, packed, (size_t)s->packed_bytes);
    }
    s->host_of[lane * s->n_chunk_max + chunk] = record;
}

/* Arrivals of one lane take what is free of its share of the host tier, then the places of records
 * with a lower average score. */
static void admit_lane(kv_store *s, uint64_t lane, const kv_arrival *a, uint32_t n)
{
    kv_tier_lane   *t    = &s->tier->lane[lane];
    uint64_t       *rank = s->tier->rank;
    uint32_t       *host = s->host_of + lane * s->n_chunk_max;
    const uint16_t *ema  = s->tier->ema + lane * s->n_chunk_max;
    uint32_t        m, k;

    for (; n > 0 && t->n < t->quota; a++, n--)
        kv_tier_keep(s, lane, a->chunk, a->packed, a->land, kv_tier_take(s, lane, a->chunk));
    m = t->n;
    k = n < m ? n : m;
    for (uint32_t i = 0; i < m && k > 0; i++)
        rank[i] = (uint64_t)ema[t->list[i]] << 32 | i;
    kvd_select_least(rank, m, k);
    for (uint32_t i = 0; i < k; i++) {
        const uint32_t at = (uint32_t)rank[i], victim = t->list[at];

        if (ema[a[i].chunk] <= ema[victim])
            continue;
        kv_tier_keep(s, lane, a[i].chunk, a[i].packed, a[i].land, host[victim]);
        host[victim] = KV_NO_HOST;
        t->list[at]  = a[i].chunk;
    }
}

static void admit(kv_store *s, const kv_arrival *a, uint32_t n)
{
    for (uint32_t first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && a[end].lane == a[first].lane; end++)
            ;
        if (s->tier->lane[a[first].lane].quota > 0)
            admit_lane(s, a[first].lane, a + first, end - first);
    }
}

/* ---- which unit has a block --------------------------------------------------------- */

static kv_disk_unit *unit_of(kv_store *s, uint32_t seq, uint32_t b)
{
    return &s->tier->unit[(size_t)seq * s->blocks_max + b];
}

void kv_tier_unbind(kv_store *s, uint32_t seq, uint32_t b)
{
    kv_disk_unit *u;

    if (!s->tier)
        return;
    u = unit_of(s, seq, b);
    if (*u)
        kv_disk_unit_unref(s->cache->disk, *u);
    *u = 0;
    if (s->tier->lost[seq] >= b)
        s->tier->lost[seq] = UINT32_MAX;
}

void kv_tier_bind_match(kv_store *s, uint32_t seq, const kv_disk_match *m, uint32_t end)
{
    uint32_t b = 0;

    for (uint32_t i = 0; s->tier && i < m->n_span; i++) {
        for (uint32_t k = 0; k < m->span[i].n_block && b < end; k++, b++) {
            if (*unit_of(s, seq, b))
                continue;
            kv_disk_unit_ref(s->cache->disk, m->span[i].unit);
            *unit_of(s, seq, b) = m->span[i].unit;
            s->tier->in_unit[(size_t)seq * s->blocks_max + b] =
                (uint8_t)(m->span[i].first_block + k);
        }
    }
}

kvd_status kv_tier_bind(kv_store *s, uint32_t seq, uint32_t end, kvd_err *err)
{
    kv_disk_match m   = { 0 };
    kvd_err       why = { 0 };
    uint64_t      t0, t1;
    kvd_status    st;

    if (!s->tier)
        return KVD_OK;
    t0 = kvd_now_ns();
    (void)!kv_disk_flush_writes(s->cache->disk, &why);
    t1 = kvd_now_ns();
    s->counts.disk_put_wait_ns += t1 - t0;
    kvd_trace_add(s->params.trace, KVD_TRACE_IO_WAIT, t0, t1, KVD_TRACE_NOWHERE, 0);
    st = kv_cache_find(s, seq, end * KV_BLOCK_TOKENS, true, &m, err);
    if (st == KVD_OK && m.n_token < (uint64_t)end * KV_BLOCK_TOKENS) {
        /* Nothing was refused, and yet they are not there: a catalogue whose tables contradict each
         * other says nothing of it by itself, and would not find them the next time either. */
        if (!*why.msg && !*s->cache->told)
            (void)!kv_disk_verify_catalog(s->cache->disk, &why);
        st = kvd_fail(err, KVD_E_FULL, 0,
                      "the host tier (kv_host) is full and the disk tier has not taken the blocks "
                      "of sequence %u: %s",
                      seq,
                      *why.msg          ? why.msg
                      : *s->cache->told ? s->cache->told
                                        : "they are not found");
    }
    if (st == KVD_OK)
        kv_tier_bind_match(s, seq, &m, end);
    kv_disk_match_close(s->cache->disk, &m);
    return st;
}

/* ---- reading ------------------------------------------------------------------------ */

/* Where an arrival that is waited for lies when it has been read: in the pool where it is unpacked,
 * or from place number `land` on. */
static void place_now(kv_store *s, kv_arrival *a, uint32_t land)
{
    a->land   = land;
    a->packed = s->params.apart ? kv_land_at(s, &s->tier->land, land)
                                : (uint8_t *)s->pool.ptr + kv_packed_at(s, a->at, a->n);
}

kv_disk_read kv_tier_read_of(kv_store *s, const kv_arrival *a)
{
    const uint32_t b = a->chunk / s->block_chunks;

    return (kv_disk_read){ .unit  = *unit_of(s, a->seq, b),
                           .what  = KV_DISK_RECORDS,
                           .lane  = (uint32_t)(a->lane - kv_lane(s, a->seq, 0)),
                           .first = s->tier->in_unit[(size_t)a->seq * s->blocks_max + b] *
                                        s->block_chunks +
                                    a->chunk % s->block_chunks,
                           .n   = a->n,
                           .dst = a->packed };
}

/* n arrivals that have been read go to their places in the pool. */
static kvd_status bring_up(kv_store *s, kvd_stream *st, const kv_arrival *a, uint32_t n,
                           kvd_err *err)
{
    if (s->params.apart)
        return kv_land_up(s, st, &s->tier->land, a, n, err);
    for (uint32_t i = 0; i < n; i++)
        KVD_TRY(kv_unpack_run(s, st, a[i].seq, (uint32_t)(a[i].lane - kv_lane(s, a[i].seq, 0)),
                              a[i].chunk, a[i].n, a[i].at, err));
    return KVD_OK;
}

static bool is_bad(kv_store *s, uint32_t seq, uint32_t b)
{
    const kv_disk_unit u = *unit_of(s, seq, b);

    return u && kv_disk_unit_bad(s->cache->disk, u);
}

/* After a batch has failed: from which block on its sequences can no longer be had.  Blocks of
 * units that are bad now, of the whole sequence; where none is (time ran out), all that were asked
 * for. */
void kv_tier_lose(kv_store *s, const kv_arrival *a, uint32_t n)
{
    bool any = false;

    for (uint32_t i = 0; i < n && !any; i++)
        any = is_bad(s, a[i].seq, a[i].chunk / s->block_chunks);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t      *lost = &s->tier->lost[a[i].seq];
        const uint32_t b    = a[i].chunk / s->block_chunks;

        s->seq[a[i].seq].step = 0; /* its slots have not got what its window says */
        if (b < *lost && (!any || is_bad(s, a[i].seq, b)))
            *lost = b;
    }
}

uint32_t kv_seq_lost(const kv_store *s, uint32_t seq)
{
    const uint32_t b = s->tier ? s->tier->lost[seq] : UINT32_MAX;

    return b == UINT32_MAX ? UINT32_MAX : b * KV_BLOCK_TOKENS;
}

/* What all of a layer's records were read for may as well stay, while the lane has a share left:
 * the latest chunks, which are selected most. */
static void keep_run(kv_store *s, const kv_arrival *a)
{
    const kv_tier_lane *t       = &s->tier->lane[a->lane];
    const uint32_t     *host    = s->host_of + a->lane * s->n_chunk_max;
    const uint32_t      n_chunk = s->seq[a->seq].n_sealed / s->params.chunk_tokens;

    for (uint32_t i = 0; i < a->n; i++) {
        const uint32_t chunk = a->chunk + i, left = t->quota - t->n;

        if (left > 0 && chunk + left >= n_chunk && host[chunk] == KV_NO_HOST)
            kv_tier_keep(s, a->lane, chunk, a->packed + i * s->packed_bytes, 0,
                         kv_tier_take(s, a->lane, chunk));
    }
}

/* Reads n listed runs of one sequence and unpacks them.  The stream first passes what still reads
 * the places that they come to, on their way or in the host tier. */
static kvd_status read_now(kv_store *s, kvd_stream *st, uint32_t n, kvd_err *err)
{
    const kv_tier *t = s->tier;
    uint64_t       t0;
    kvd_status     rc;
    bool           was;

    if (n == 0)
        return KVD_OK;
    KVD_TRY(kv_wait_lists(s, st, err));
    t0  = kvd_now_ns();
    was = kvd_alloc_guard(false); /* checksums, when a unit is first read */
    do                            /* until what is served beside it leaves a ticket */
        rc = kv_disk_read_now(s->cache->disk, t->read, n, err);
    while (rc == KVD_E_BUSY && kv_serve_poll(s));
    kvd_alloc_guard(was);
    s->counts.disk_wait_ns += kvd_now_ns() - t0;
    if (rc != KVD_OK)
        kv_tier_lose(s, t->run, n);
    for (uint32_t i = 0; i < n && rc == KVD_OK; i++)
        keep_run(s, &t->run[i]);
    return rc == KVD_OK ? bring_up(s, st, t->run, n, err) : rc;
}

/* Runs of chunks of a lane's block that have no host record, behind n listed ones. */
static uint32_t list_runs(kv_store *s, uint32_t seq, uint32_t lane, uint32_t b, uint64_t at,
                          uint32_t n)
{
    const uint64_t  l        = kv_lane(s, seq, 0) + lane;
    const uint32_t *host     = s->host_of + l * s->n_chunk_max + (uint64_t)b * s->block_chunks;
    const uint32_t  land     = n ? s->tier->run[n - 1].land + s->tier->run[n - 1].n : 0;
    uint32_t        n_record = 0;

    for (uint32_t c = 0, end; c < s->block_chunks; c = end) {
        const uint32_t chunk = b * s->block_chunks + c;
        const uint64_t to    = at + c * s->layout.record_bytes;

        end = c + 1;
        if (host[c] != KV_NO_HOST)
            continue;
        while (end < s->block_chunks && host[end] == KV_NO_HOST)
            end++;
        s->tier->run[n] =
            (kv_arrival){ .lane = l, .at = to, .seq = seq, .chunk = chunk, .n = end - c };
        place_now(s, &s->tier->run[n], land + n_record);
        n_record += end - c;
        s->tier->read[n] = kv_tier_read_of(s, &s->tier->run[n]);
        n++;
    }
    return n;
}

/* Whether a block's runs fit behind n listed ones. */
static bool runs_fit(const kv_store *s, uint32_t n)
{
    const kv_tier *t = s->tier;

    if (n + s->block_chunks > KV_TIER_READS_MAX)
        return false;
    return !s->params.apart || n == 0 ||
           t->run[n - 1].land + t->run[n - 1].n + s->block_chunks <= t->land.n_now;
}

kvd_status kv_tier_load(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t first,
                        uint32_t end, const uint64_t *layer_at, kvd_err *err)
{
    uint32_t n = 0;

    for (uint32_t h = 0; s->tier && h < s->params.n_kv_head; h++) {
        for (uint32_t b = first; b < end; b++) {
            if (!runs_fit(s, n)) {
                KVD_TRY(read_now(s, st, n, err));
                n = 0;
            }
            n = list_runs(s, seq, layer * s->params.n_kv_head + h, b,
                          layer_at[b] + h * s->layout.head_stride, n);
        }
    }
    return read_now(s, st, n, err);
}

/* ---- misses of a step --------------------------------------------------------------- */

/* The flight of a layer's step under way. */
static kv_flight *flight_now(const kv_tier *t, uint32_t layer)
{
    return &t->flight[(uint64_t)layer * t->lag + t->turn[layer] % t->lag];
}

static kv_arrival *arrivals_of(const kv_tier *t, const kv_flight *f)
{
    return t->arrival + (uint64_t)(f - t->flight) * t->arrivals_max;
}

static uint32_t layer_of(const kv_tier *t, const kv_flight *f)
{
    return (uint32_t)(f - t->flight) / t->lag;
}

/* The slot, counted over all lanes, that a record goes to. */
static uint64_t slot_of(const kv_store *s, const kv_arrival *a)
{
    return a->lane * s->slots_max + (a->at - s->lane_at[a->lane]) / s->layout.record_bytes -
           s->sinks;
}

void kv_tier_miss(kv_store *s, uint32_t layer, uint32_t seq, uint64_t lane, uint32_t chunk,
                  uint64_t at)
{
    kv_flight *f = flight_now(s->tier, layer);

    kvd_assert(f->n < s->tier->arrivals_max);
    arrivals_of(s->tier, f)[f->n++] =
        (kv_arrival){ .lane = lane, .seq = seq, .chunk = chunk, .n = 1, .at = at };
}

static void set_late(kv_store *s, const kv_flight *f, uint8_t late)
{
    const kv_arrival *a = arrivals_of(s->tier, f);

    for (uint32_t i = f->come; s->tier->late && i < f->n; i++)
        s->tier->late[slot_of(s, &a[i])] = late;
}

/* A batch of n has ended as rc says.  Before the host tier changes the stream has passed what reads
 * it. */
static kvd_status batch_arrived(kv_store *s, const kv_arrival *a, uint32_t n, kvd_status rc,
                                kvd_err *err)
{
    if (rc != KVD_OK) {
        kv_tier_lose(s, a, n);
        return rc;
    }
    KVD_TRY(kv_wait_lists(s, s->tier->st, err));
    admit(s, a, n);
    return bring_up(s, s->tier->st, a, n, err);
}

/* The flight has ended as rc says. */
static kvd_status arrived(kv_store *s, kv_flight *f, kvd_status rc, kvd_err *err)
{
    const kv_arrival *a = arrivals_of(s->tier, f) + f->come;
    const uint32_t    n = f->n - f->come;

    set_late(s, f, LATE_NOT);
    kv_land_give(&s->tier->land, a, n);
    *f = (kv_flight){ 0 };
    return batch_arrived(s, a, n, rc, err);
}

/* Waits for a batch of n records of the flight, and counts a stall if it has to. */
static kvd_status await(kv_store *s, const kv_flight *f, uint32_t n, kvd_err *err)
{
    const uint32_t layer = layer_of(s->tier, f);
    const uint64_t t0    = kvd_now_ns();
    kvd_status     st    = kv_disk_read_poll(s->cache->disk, f->ticket, err);
    uint64_t       t1;

    if (st == KVD_E_BUSY) {
        s->counts.n_disk_stall++;
        st = kv_disk_read_wait(s->cache->disk, f->ticket, err);
    }
    t1 = kvd_now_ns();
    s->counts.disk_wait_ns += t1 - t0;
    kvd_trace_add(s->params.trace, KVD_TRACE_IO_WAIT, t0, t1, layer, n);
    kvd_trace_add(s->params.trace, KVD_TRACE_READ, f->start_ns, kvd_trace_now(s->params.trace),
                  layer, n);
    return st;
}

static kvd_status join(kv_store *s, kv_flight *f, kvd_err *err)
{
    return arrived(s, f, await(s, f, f->n - f->come, err), err);
}

/* Joins if it has arrived. */
static kvd_status try_join(kv_store *s, kv_flight *f, kvd_err *err)
{
    const kvd_status st = kv_disk_read_poll(s->cache->disk, f->ticket, err);

    if (st == KVD_E_BUSY)
        return KVD_OK;
    kvd_trace_add(s->params.trace, KVD_TRACE_READ, f->start_ns, kvd_trace_now(s->params.trace),
                  layer_of(s->tier, f), f->n - f->come);
    return arrived(s, f, st, err);
}

kvd_status kv_tier_begin(kv_store *s, kvd_stream *st, uint32_t layer, bool all, kvd_err *err)
{
    kv_tier *t = s->tier;

    if (!t)
        return KVD_OK;
    t->st = st; /* what joins now is attended by ops of this stream */
    t->turn[layer]++;
    for (uint32_t i = 0; i < t->lag; i++) {
        kv_flight *f = &t->flight[(uint64_t)layer * t->lag + i];

        if (f->started && (all || t->turn[layer] - f->turn >= t->lag))
            KVD_TRY(join(s, f, err));
        else if (f->started)
            KVD_TRY(try_join(s, f, err));
    }
    return KVD_OK;
}

void kv_tier_want(kv_store *s, uint64_t lane, uint32_t slot, bool urgent)
{
    uint8_t *late = s->tier->late + lane * s->slots_max + slot;

    if (*late != LATE_NOT && urgent)
        *late = LATE_WANTED;
}

bool kv_tier_is_late(const kv_store *s, uint64_t lane, uint32_t slot)
{
    return s->tier && s->tier->late && s->tier->late[lane * s->slots_max + slot] != LATE_NOT;
}

/* Whether a slot of the flight was given away, or is wanted. */
static bool is_claimed(const kv_store *s, const kv_flight *f)
{
    const kv_arrival *a = arrivals_of(s->tier, f);

    for (uint32_t i = f->come; i < f->n; i++) {
        const uint64_t slot = slot_of(s, &a[i]);

        if (s->chunk_of[slot] != a[i].chunk || s->tier->late[slot] == LATE_WANTED)
            return true;
    }
    return false;
}

kvd_status kv_tier_claim(kv_store *s, uint32_t layer, kvd_err *err)
{
    kv_tier *t = s->tier;

    for (uint32_t i = 0; t && t->late && i < t->lag; i++) {
        kv_flight *f = &t->flight[(uint64_t)layer * t->lag + i];

        if (f->started && is_claimed(s, f))
            KVD_TRY(join(s, f, err));
    }
    return KVD_OK;
}

bool kv_tier_waits(const kv_store *s, uint32_t layer)
{
    const kv_tier *t = s->tier;

    for (uint32_t i = 0; t && t->late && i < t->lag; i++) {
        if (t->flight[(uint64_t)layer * t->lag + i].started)
            return true;
    }
    return false;
}

void kv_tier_settle(kv_store *s)
{
    kv_tier *t   = s->tier;
    kvd_err  err = { 0 };

    for (uint32_t i = 0; t && i < s->params.n_layer * t->lag; i++) {
        if (t->flight[i].started && join(s, &t->flight[i], &err) != KVD_OK)
            kvd_log(KVD_LOG_WARN, "disk tier: %s", err.msg);
        t->flight[i] = (kv_flight){ 0 };
    }
}

static kv_flight *oldest_flight(const kv_store *s)
{
    kv_tier   *t      = s->tier;
    kv_flight *oldest = NULL;

    for (uint32_t i = 0; i < s->params.n_layer * t->lag; i++) {
        kv_flight *f = &t->flight[i];

        if (f->started && (!oldest || f->number < oldest->number))
            oldest = f;
    }
    return oldest;
}

/* Starts a batch; when all tickets are out, the oldest flight is waited for. */
static kvd_status start(kv_store *s, kv_flight *f, uint32_t n, bool urgent, kvd_err *err)
{
    kv_tier *t = s->tier;

    for (;;) {
        const bool       was = kvd_alloc_guard(false);
        const kvd_status st =
            kv_disk_read_start(s->cache->disk, t->read, n, urgent, &f->ticket, err);
        kv_flight *oldest = NULL;

        kvd_alloc_guard(was);
        if (st == KVD_E_BUSY)
            oldest = oldest_flight(s);
        if (!oldest) {
            f->started  = st == KVD_OK;
            f->start_ns = kvd_trace_now(s->params.trace);
            f->turn     = t->turn[layer_of(t, f)];
            f->number   = t->n_start++;
            return st;
        }
        KVD_TRY(join(s, oldest, err));
    }
}

/* Places for n arrivals that nobody waits for, if need be those of older flights. */
static kvd_status place_late(kv_store *s, kv_arrival *a, uint32_t n, kvd_err *err)
{
    kv_tier *t = s->tier;

    for (uint32_t i = 0; !s->params.apart && i < n; i++)
        place_now(s, &a[i], 0);
    if (!s->params.apart)
        return KVD_OK;
    while (!kv_land_take(s, &t->land, a, n)) {
        kv_flight *oldest = oldest_flight(s);

        kvd_assert(oldest && n <= t->land.n_late);
        KVD_TRY(join(s, oldest, err));
    }
    return kv_wait_lists(s, t->st, err); /* until what lay there has gone up */
}

/* Starts the next batch of a flight; of several only the last flies, and no urgent one does. */
static kvd_status fetch_batch(kv_store *s, kv_flight *f, bool urgent, kvd_err *err)
{
    kv_tier       *t    = s->tier;
    kv_arrival    *a    = arrivals_of(t, f) + f->come;
    const uint32_t left = f->n - f->come;
    const uint32_t most = !s->params.apart
                              ? KV_TIER_READS_MAX
                              : (uint32_t)kvd_min_u64(KV_TIER_READS_MAX, t->land.n_now);
    const uint32_t n    = left < most ? left : most;
    const bool     now  = urgent || n < left || (s->params.apart && n > t->land.n_late);
    kvd_status     st   = KVD_OK;

    if (now)
        KVD_TRY(kv_wait_lists(s, t->st, err));
    for (uint32_t i = 0; now && i < n; i++)
        place_now(s, &a[i], i);
    if (!now)
        st = place_late(s, a, n, err);
    for (uint32_t i = 0; i < n && st == KVD_OK; i++)
        t->read[i] = kv_tier_read_of(s, &a[i]);
    if (st == KVD_OK)
        st = start(s, f, n, urgent, err);
    if (st == KVD_OK && !now)
        return KVD_OK;
    if (!now)
        kv_land_give(&t->land, a, n);
    f->come += n;
    if (st == KVD_OK)
        st = await(s, f, n, err);
    f->started = false;
    return batch_arrived(s, a, n, st, err);
}

kvd_status kv_tier_fetch(kv_store *s, kvd_stream *stream, uint32_t layer, bool urgent, kvd_err *err)
{
    kv_tier   *t  = s->tier;
    kv_flight *f  = t ? flight_now(t, layer) : NULL;
    kvd_status st = KVD_OK;

    if (!f || f->n == 0)
        return KVD_OK;
    t->st = stream;
    s->counts.n_disk += f->n;
    s->counts.n_disk_urgent += urgent ? f->n : 0;
    while (f->come < f->n && !f->started && st == KVD_OK)
        st = fetch_batch(s, f, urgent, err);
    if (f->started)
        set_late(s, f, LATE);
    else
        *f = (kv_flight){ 0 };
    return st;
}

void kv_tier_check(const kv_store *s)
{
    const kv_tier *t = s->tier;
    uint64_t       n = 0, n_late = 0;

    for (uint64_t lane = 0; t && lane < kv_n_lane(&s->params); lane++) {
        const kv_tier_lane *l    = &t->lane[lane];
        const uint32_t     *host = s->host_of + lane * s->n_chunk_max;

        kvd_assert(l->n <= l->quota);
        for (uint32_t i = 0; i < l->n; i++)
            kvd_assert(l->list[i] < s->n_chunk_max && host[l->list[i]] != KV_NO_HOST);
    }
    for (uint32_t i = 0; t && t->late && i < s->params.n_layer * t->lag; i++) {
        const kv_flight  *f = &t->flight[i];
        const kv_arrival *a = arrivals_of(t, f);

        kvd_assert(f->started || f->n == 0);
        for (uint32_t k = f->come; k < f->n; k++)
            kvd_assert(t->late[slot_of(s, &a[k])] == LATE &&
                       s->chunk_of[slot_of(s, &a[k])] == a[k].chunk);
        n += f->n - f->come;
    }
    for (uint64_t i = 0; t && t->late && i < kv_n_lane(&s->params) * s->slots_max; i++)
        n_late += t->late[i] != LATE_NOT;
    kvd_assert(n == n_late);
}

void kv_cache_used(const kv_store *s, uint64_t *bytes, uint64_t *limit)
{
    kv_disk_stats d;

    *bytes = *limit = 0;
    if (!s->cache)
        return;
    kv_disk_stats_get(s->cache->disk, &d);
    *bytes = d.unit_bytes;
    *limit = s->params.cache_bytes;
}

uint64_t kv_tier_records(const kv_store *s, uint32_t seq)
{
    const kv_tier_lane *lane = s->tier->lane + kv_lane(s, seq, 0);
    uint64_t            n    = 0;

    for (uint32_t i = 0; i < s->params.n_layer * s->params.n_kv_head; i++)
        n += lane[i].n;
    return n;
}

void kv_tier_count(const kv_store *s, kv_counts *c)
{
    kv_disk_stats d;

    if (!s->cache)
        return;
    kv_disk_stats_get(s->cache->disk, &d);
    c->disk_read_bytes   = d.read_bytes;
    c->disk_useful_bytes = d.useful_bytes;
    c->n_disk_read       = d.n_read;
    c->disk_put_bytes    = d.record_bytes_put;
    c->disk_aux_bytes    = d.aux_bytes_put + d.tail_bytes_put;
    c->disk_tail_bytes   = d.tail_bytes_put;
    c->n_disk_bad        = d.n_quarantined;
    c->n_disk_failed     = d.n_read_failed;
    c->n_disk_timeout    = d.n_read_late;
    c->n_disk_corrupt    = d.n_read_corrupt;
    c->n_disk_refused    = d.n_put_refused + d.n_put_failed;
    if (d.pause == KV_DISK_PAUSE_FULL || d.pause == KV_DISK_PAUSE_ERROR ||
        d.pause == KV_DISK_PAUSE_GONE)
        memcpy(c->disk_pause, d.pause_text, sizeof(c->disk_pause));
    c->disk_read_ns = d.read_ns;
    c->disk_put_ns  = d.put_ns;
    c->disk_put_wait_ns += d.put_wait_ns;
}
