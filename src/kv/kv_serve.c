/* SPDX-License-Identifier: Apache-2.0 */
/* kv_serve.c - the disk tier under a step that the device drives.
 *
 * What a layer misses and the host tier does not have, window_post writes to one of two queues in
 * pinned memory, urgent misses and others; window_fetch waits for it.  The host has nothing else to
 * do until the step's end, so the thread that owns the store serves: it starts a batch of reads for
 * what is posted together, looks for batches that have ended, and tells up to where records have
 * come, in the order of their requests.  So nothing of the store needs a lock; the device touches
 * the queues, and places and host records that nobody writes.
 *
 * Request i of a queue comes to place i modulo their number (kv_land.c).  A place is read into
 * again when all of the round before have been taken: back-pressure, for a window that is filled
 * anew has more misses than there are places.
 *
 * host_of does not change under a step.  After it, what has come and still lies in its place may
 * stay in the host tier: where it ranks above a chunk of its lane they change places.  Averages are
 * those that came with the request, and for chunks of the tier those that the host last saw: every
 * step brings some layers' down.
 *
 * A read that fails, or is not answered within the block store's time limit, ends the step: the
 * device is told that nothing more will come, goes on without, and its results are dropped.  Should
 * the host itself not answer, the device's own limit, which is longer, does the same.
 *
 * Owns: the queues, and reads under way.  Thread: the session's. */
#include <inttypes.h>
#include <string.h>

#include "kv/kv_tier.h"

#define LIMIT_MORE_NS UINT64_C(5000000000) /* of the device, beyond the block store's */
#define LIMIT_NS      UINT64_C(10000000000)
#define SEE_STEPS     16u   /* in which all layers' averages come down once */
#define LOOKS         4u    /* chunks among which an arrival finds one to take the place of */
#define ADMIT_MAX     4096u /* a step, of each queue */

enum { URGENT, REST, N_QUEUE };

typedef struct serve_batch { /* of reads under way */
    kv_disk_ticket ticket;
    uint32_t       end; /* requests below belong to it or to batches before */
    uint64_t       start_ns;
} serve_batch;

typedef struct serve_queue {
    kvd_miss_queue   *queue;
    kvd_miss_request *request; /* [n_request] */
    uint32_t          first, n_place;
    uint32_t          begun, arrived; /* requests that are read or have been; that have come */
    serve_batch      *batch;          /* [n_batch_max] oldest first, round about */
    uint32_t          at, n_batch;
} serve_queue;

struct kv_serve {
    kvd_mem         shared; /* pinned: queues, then requests */
    kvd_mem         device; /* states, then batches of all layers */
    kvd_miss_queue *queue;  /* [N_QUEUE] */
    kvd_miss_state *state;  /* [N_QUEUE] */
    kvd_miss_batch *batch;  /* [n_layer][N_QUEUE] */
    serve_queue     q[N_QUEUE];
    serve_batch    *batches; /* [N_QUEUE][n_batch_max] */
    kv_disk_read   *read; /* [KV_TIER_READS_MAX] of the batch that is begun: kv_tier's own are in */
    kv_arrival     *lost; /* likewise, use while a step waits for a dense row's reads */
    uint32_t        n_batch_max;
    uint32_t        see; /* layer whose averages come next */
    bool            active;
    kvd_status      status; /* the first failure */
    kvd_err         err;
    uint64_t        limit_ns;
};

/* ---- open and close ----------------------------------------------------------------- */

static bool is_served(const kv_params *p)
{
    return p->apart && p->device_steps && p->window_tokens > 0;
}

static uint64_t requests_max(const kv_params *p)
{
    return kv_n_lane(p) * (p->window_tokens / p->chunk_tokens);
}

static uint64_t batches_max(const kv_params *p)
{
    return KV_DISK_TICKET_MAX + (uint64_t)p->n_layer * kv_tier_lag(p);
}

static uint64_t shared_bytes(const kv_params *p)
{
    return N_QUEUE * (sizeof(kvd_miss_queue) + requests_max(p) * sizeof(kvd_miss_request));
}

uint64_t kv_serve_bytes(const kv_params *p)
{
    return is_served(p) ? sizeof(kv_serve) + shared_bytes(p) +
                              N_QUEUE * batches_max(p) * sizeof(serve_batch) +
                              KV_TIER_READS_MAX * (sizeof(kv_disk_read) + sizeof(kv_arrival))
                        : 0;
}

static void open_queue(kv_store *s, kv_serve *v, uint32_t i)
{
    const kv_land    *l    = &s->tier->land;
    const uint32_t    few  = l->n_late / 4;
    serve_queue      *q    = &v->q[i];
    kvd_miss_request *list = (kvd_miss_request *)(v->queue + N_QUEUE);

    q->queue   = v->queue + i;
    q->request = list + i * requests_max(&s->params);
    q->first   = l->n_now + (i == URGENT ? 0 : few);
    q->n_place = i == URGENT ? few : l->n_late - few;
    q->batch   = v->batches + (size_t)i * v->n_batch_max;
}

kvd_status kv_serve_open(kv_store *s, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;
    const kv_params       *p   = &s->params;
    kv_serve              *v;

    if (!is_served(p))
        return KVD_OK;
    v = s->tier->serve = kvd_calloc(1, sizeof(*v));
    if (!v)
        return kvd_fail(err, KVD_E_NOMEM, 0, "disk tier: no memory for its queues");
    v->n_batch_max = (uint32_t)batches_max(p);
    v->limit_ns    = (p->disk_timeout_ns ? p->disk_timeout_ns : LIMIT_NS) + LIMIT_MORE_NS;
    v->batches     = kvd_calloc(N_QUEUE * (size_t)v->n_batch_max, sizeof(*v->batches));
    v->read        = kvd_calloc(KV_TIER_READS_MAX, sizeof(*v->read));
    v->lost        = kvd_calloc(KV_TIER_READS_MAX, sizeof(*v->lost));
    if (!v->batches || !v->read || !v->lost)
        return kvd_fail(err, KVD_E_NOMEM, 0, "disk tier: no memory for its queues");
    KVD_TRY(ops->mem_alloc(s->be, KVD_MEM_PINNED, shared_bytes(p), &v->shared, err));
    KVD_TRY(ops->mem_alloc(s->be, KVD_MEM_DEVICE,
                           N_QUEUE * (sizeof(*v->state) + p->n_layer * sizeof(*v->batch)),
                           &v->device, err));
    v->queue = v->shared.ptr;
    v->state = v->device.ptr;
    v->batch = (kvd_miss_batch *)(v->state + N_QUEUE);
    for (uint32_t i = 0; i < N_QUEUE; i++)
        open_queue(s, v, i);
    return KVD_OK;
}

void kv_serve_close(kv_store *s)
{
    kv_serve *v = s->tier->serve;

    if (!v)
        return;
    s->be->ops->mem_free(s->be, &v->shared);
    s->be->ops->mem_free(s->be, &v->device);
    kvd_free(v->batches);
    kvd_free(v->read);
    kvd_free(v->lost);
    kvd_free(v);
    s->tier->serve = NULL;
}

bool kv_serves(const kv_store *s)
{
    return !s->tier || s->tier->serve;
}

/* ---- before a step ------------------------------------------------------------------ */

/* Averages of the next layers, of the step's sequences. */
static kvd_status see_some(kv_store *s, kvd_stream *st, kv_serve *v, kvd_err *err)
{
    const uint32_t n = (uint32_t)kvd_div_up(s->params.n_layer, SEE_STEPS);

    for (uint32_t k = 0; k < n; k++) {
        for (uint32_t i = 0; i < s->step.n_row; i++)
            KVD_TRY(kv_tier_see(s, st, s->step.rows_seq[i], v->see, err));
        v->see = (v->see + 1) % s->params.n_layer;
    }
    return KVD_OK;
}

kvd_status kv_serve_begin(kv_store *s, kvd_stream *st, kvd_err *err)
{
    kv_serve *v = s->tier ? s->tier->serve : NULL;

    if (!v)
        return KVD_OK;
    memset(v->queue, 0, N_QUEUE * sizeof(*v->queue));
    for (uint32_t i = 0; i < N_QUEUE; i++)
        v->q[i].begun = v->q[i].arrived = v->q[i].at = v->q[i].n_batch = 0;
    v->status = KVD_OK;
    v->active = true;
    KVD_TRY(s->be->ops->fill(st, v->device, 0, 0, N_QUEUE * sizeof(*v->state), 1, 0, err));
    return see_some(s, st, v, err);
}

kvd_miss_link kv_serve_link(const kv_store *s, uint32_t layer, bool urgent)
{
    const kv_serve    *v = s->tier ? s->tier->serve : NULL;
    const uint32_t     i = urgent ? URGENT : REST;
    const serve_queue *q = v ? &v->q[i] : NULL;

    if (!v)
        return (kvd_miss_link){ 0 };
    return (kvd_miss_link){ .queue    = q->queue,
                            .request  = q->request,
                            .state    = v->state + i,
                            .batch    = v->batch + (size_t)layer * N_QUEUE + i,
                            .place    = s->tier->land.record + q->first,
                            .n_place  = q->n_place,
                            .limit_ns = v->limit_ns };
}

/* ---- while it runs ------------------------------------------------------------------ */

/* A request as an arrival: whose it is, and where it comes to. */
static kv_arrival arrival_of(const kv_store *s, const serve_queue *q, uint32_t i)
{
    const kvd_miss_request *r        = &q->request[i];
    const uint32_t          in_layer = s->params.n_seq * s->params.n_kv_head;
    const uint32_t          at = r->lane % in_layer, n_h = s->params.n_kv_head;
    const uint32_t          seq = s->step.rows_seq[at / n_h];
    kv_arrival              a   = { .lane  = kv_lane(s, seq, r->lane / in_layer) + at % n_h,
                                    .seq   = seq,
                                    .chunk = r->chunk,
                                    .n     = 1,
                                    .land  = q->first + i % q->n_place };

    a.packed = kv_land_at(s, &s->tier->land, a.land);
    return a;
}

/* Whether there is such a record: a device that has gone wrong may ask for anything. */
static bool is_sound(const kv_store *s, const kvd_miss_request *r)
{
    const uint32_t in_layer = s->params.n_seq * s->params.n_kv_head;
    const uint32_t row      = r->lane % in_layer / s->params.n_kv_head;

    return r->lane / in_layer < s->params.n_layer && row < s->step.n_row &&
           r->chunk < s->seq[s->step.rows_seq[row]].n_sealed / s->params.chunk_tokens &&
           r->score <= UINT16_MAX;
}

/* Records [first, first + n) cannot be had: their blocks are lost, the step ends. */
static void fail(kv_store *s, const serve_queue *q, uint32_t first, uint32_t n, kvd_status st)
{
    kv_serve *v = s->tier->serve;

    if (v->status == KVD_OK)
        v->status = st;
    for (uint32_t i = 0; i < n; i++)
        v->lost[i] = arrival_of(s, q, first + i);
    kv_tier_lose(s, v->lost, n);
    kv_serve_give_up(s);
}

/* How many of what is posted may be read now: a round's places, when all of the round before have
 * been taken. */
static uint32_t room_of(const kv_store *s, const serve_queue *q)
{
    const uint32_t posted = __atomic_load_n(&q->queue->posted, __ATOMIC_ACQUIRE);
    const uint32_t taken  = __atomic_load_n(&q->queue->taken, __ATOMIC_ACQUIRE);
    const uint64_t most   = kvd_min_u64(posted, requests_max(&s->params));
    const uint64_t end    = kvd_min_u64(most, (uint64_t)taken + q->n_place);

    return end > q->begun ? (uint32_t)kvd_min_u64(end - q->begun, KV_TIER_READS_MAX) : 0;
}

/* What the next n requests read; false: not all of them make sense. */
static bool list_reads(kv_store *s, const serve_queue *q, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        kv_arrival a;

        if (!is_sound(s, &q->request[q->begun + i]))
            return false;
        a                       = arrival_of(s, q, q->begun + i);
        s->tier->serve->read[i] = kv_tier_read_of(s, &a);
    }
    return true;
}

/* Starts what is posted, as one batch; none when all tickets are out. */
static void start(kv_store *s, serve_queue *q, bool urgent)
{
    kv_serve      *v   = s->tier->serve;
    const uint32_t n   = room_of(s, q);
    serve_batch   *b   = &q->batch[(q->at + q->n_batch) % v->n_batch_max];
    kvd_err        err = { 0 };
    kvd_status     st;
    bool           was;

    if (n == 0 || q->n_batch == v->n_batch_max)
        return;
    if (!list_reads(s, q, n)) {
        v->status = kvd_fail(&v->err, KVD_E_DEVICE, 0,
                             "disk tier: the device asks for records that are none");
        kv_serve_give_up(s);
        return;
    }
    was = kvd_alloc_guard(false); /* checksums, when a unit is first read */
    st  = kv_disk_read_start(s->cache->disk, v->read, n, urgent, &b->ticket, &err);
    kvd_alloc_guard(was);
    if (st == KVD_E_BUSY)
        return;
    if (st != KVD_OK) {
        v->err = v->status == KVD_OK ? err : v->err;
        fail(s, q, q->begun, n, st);
        return;
    }
    q->begun += n;
    b->end      = q->begun;
    b->start_ns = kvd_trace_now(s->params.trace);
    q->n_batch++;
}

/* The oldest batch, if it has ended; wait: when it has. */
static bool end_batch(kv_store *s, serve_queue *q, bool wait)
{
    kv_serve          *v   = s->tier->serve;
    const serve_batch *b   = &q->batch[q->at];
    kvd_err            err = { 0 };
    kvd_status         st;

    if (q->n_batch == 0)
        return false;
    st = wait ? kv_disk_read_wait(s->cache->disk, b->ticket, &err)
              : kv_disk_read_poll(s->cache->disk, b->ticket, &err);
    if (st == KVD_E_BUSY)
        return false;
    if (st == KVD_OK) {
        kvd_trace_add(s->params.trace, KVD_TRACE_READ, b->start_ns, kvd_trace_now(s->params.trace),
                      q->request[q->arrived].lane / (s->params.n_seq * s->params.n_kv_head),
                      b->end - q->arrived);
    } else {
        v->err = v->status == KVD_OK ? err : v->err;
        fail(s, q, q->arrived, b->end - q->arrived, st);
    }
    q->arrived = b->end;
    q->at      = (q->at + 1) % v->n_batch_max;
    q->n_batch--;
    return true;
}

bool kv_serve_poll(kv_store *s)
{
    kv_serve *v    = s->tier ? s->tier->serve : NULL;
    bool      more = false;

    for (uint32_t i = 0; v && v->active && i < N_QUEUE; i++) {
        serve_queue *q = &v->q[i];

        if (v->status == KVD_OK)
            start(s, q, i == URGENT);
        while (end_batch(s, q, false) && v->status == KVD_OK)
            __atomic_store_n(&q->queue->arrived, q->arrived, __ATOMIC_RELEASE);
        more = more || q->n_batch > 0;
    }
    return more;
}

void kv_serve_give_up(kv_store *s)
{
    kv_serve *v = s->tier ? s->tier->serve : NULL;

    for (uint32_t i = 0; v && i < N_QUEUE; i++)
        __atomic_store_n(&v->queue[i].given_up, 1, __ATOMIC_RELEASE);
}

/* ---- after it ----------------------------------------------------------------------- */

/* The list's entry, of the next few, whose average was lowest. */
static uint32_t lowest(kv_tier_lane *t, const uint16_t *ema)
{
    uint32_t best = t->hand;

    for (uint32_t i = 0; i < LOOKS; i++) {
        if (ema[t->list[t->hand]] < ema[t->list[best]])
            best = t->hand;
        t->hand = t->hand + 1 < t->n ? t->hand + 1 : 0;
    }
    return best;
}

static void admit(kv_store *s, const serve_queue *q, uint32_t i)
{
    const kv_arrival a     = arrival_of(s, q, i);
    const uint32_t   score = q->request[i].score;
    kv_tier_lane    *t     = &s->tier->lane[a.lane];
    uint32_t        *host  = s->host_of + a.lane * s->n_chunk_max;
    uint16_t        *ema   = s->tier->ema + a.lane * s->n_chunk_max;
    uint32_t         at, victim;

    if (t->quota == 0)
        return;
    ema[a.chunk] = (uint16_t)score;
    if (t->n < t->quota) {
        kv_tier_keep(s, a.lane, a.chunk, a.packed, a.land, kv_tier_take(s, a.lane, a.chunk));
        return;
    }
    t->hand = t->hand < t->n ? t->hand : 0;
    at      = lowest(t, ema);
    victim  = t->list[at];
    if (score <= ema[victim])
        return;
    kv_tier_keep(s, a.lane, a.chunk, a.packed, a.land, host[victim]);
    host[victim] = KV_NO_HOST;
    t->list[at]  = a.chunk;
}

/* Requests of the last round, which still lie in their places. */
static void admit_all(kv_store *s, const serve_queue *q)
{
    const uint32_t n = (uint32_t)kvd_min_u64(kvd_min_u64(q->begun, q->n_place), ADMIT_MAX);

    for (uint32_t i = q->begun - n; i < q->begun; i++)
        admit(s, q, i);
}

static void count(kv_store *s, const kv_serve *v)
{
    kv_counts *c = &s->counts;

    for (uint32_t i = 0; i < N_QUEUE; i++) {
        c->n_disk += v->q[i].begun;
        c->bytes_up -= v->q[i].begun * s->packed_bytes; /* which are counted as the host tier's */
    }
    c->n_disk_urgent += v->q[URGENT].begun;
    c->n_disk_stall += v->queue[URGENT].n_wait;
    c->disk_wait_ns += v->queue[URGENT].wait_ns;
}

kvd_status kv_serve_end(kv_store *s, kvd_err *err)
{
    kv_serve *v = s->tier ? s->tier->serve : NULL;

    if (!v || !v->active)
        return KVD_OK;
    v->active = false;
    for (uint32_t i = 0; i < N_QUEUE; i++) {
        while (end_batch(s, &v->q[i], true)) /* or it would write into places that others have */
            ;
    }
    if (v->status != KVD_OK) {
        *err = v->err;
        return v->status;
    }
    for (uint32_t i = 0; i < N_QUEUE; i++) {
        if (v->queue[i].too_late || v->queue[i].given_up)
            return kvd_fail(err, KVD_E_IO, 0,
                            "disk tier: the device has waited for records longer than %" PRIu64
                            " s, and nobody has answered",
                            v->limit_ns / 1000000000u);
    }
    count(s, v);
    for (uint32_t i = 0; i < N_QUEUE; i++)
        admit_all(s, &v->q[i]);
    return KVD_OK;
}
