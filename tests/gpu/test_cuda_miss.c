/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_miss.c - window_post and window_fetch of a GPU against the reference: misses below the
 * host tier are asked for once each, in whatever order, and come to their slots, though the host
 * has few places and answers late; and what happens when it does not.
 *
 * All memory is pinned, so that both sides read the same inputs.
 * usage: test_cuda_miss [module] */
#include "gpu/gpu_world.h"

enum {
    N_SEQ   = 3,
    N_KV    = 5,
    N_LANE  = N_SEQ * N_KV,
    N_CHUNK = 192, /* 3 blocks of 64 */
    N_SLOT  = 96,
    N_CALL  = 3,
    N_HOST  = N_LANE * N_CHUNK,
    N_PLACE = 2048, /* half of them for each queue: more than a call misses */
    N_ALL   = N_CALL * N_LANE * N_SLOT
};

static gpu_world W;

typedef struct side {             /* what ops write */
    kvd_miss_queue   *queue;      /* [2] */
    kvd_miss_request *request[2]; /* [N_ALL] */
    kvd_miss_state   *state;      /* [2] */
    kvd_miss_batch   *batch;      /* [N_CALL][2] */
    uint8_t          *pool;
} side;

typedef struct misses {
    kvd_mem            mem;
    uint64_t           used;
    kvd_record_format  format;
    kvd_window_seq    *seq;
    kvd_window_place  *place;
    kvd_window_result *change;
    uint8_t           *host, *param; /* records; parameters */
    uint64_t           pool_bytes, param_stride;
    uint32_t          *land; /* [N_PLACE] records behind the host tier's */
    side               dev, ref;
} misses;

static void *take(misses *m, uint64_t bytes)
{
    void *p = (uint8_t *)m->mem.ptr + m->used;

    m->used += kvd_align_up(bytes, 256);
    assert_true(m->used <= m->mem.bytes);
    return p;
}

static void fill_bytes(uint8_t *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        p[i] = (uint8_t)kvd_rng_below(&W.rng, 120); /* no NaN, in any type */
}

static side take_side(misses *m)
{
    side s = { .queue = take(m, 2 * sizeof(kvd_miss_queue)),
               .state = take(m, 2 * sizeof(kvd_miss_state)),
               .batch = take(m, 2 * N_CALL * sizeof(kvd_miss_batch)),
               .pool  = take(m, m->pool_bytes) };

    for (uint32_t i = 0; i < 2; i++)
        s.request[i] = take(m, N_ALL * sizeof(kvd_miss_request));
    return s;
}

/* n_miss ascending chunks of a lane in two parts, some of them below the host tier. */
static void fill_lane(misses *m, uint32_t at, uint32_t n_miss, uint32_t n_urgent, uint32_t below)
{
    const kvd_window_seq *s     = &m->seq[at / N_KV];
    const uint32_t        head  = at % N_KV;
    uint32_t             *fetch = s->fetch + head * N_SLOT, *into = s->into + head * N_SLOT;
    uint32_t             *host = (uint32_t *)m->place[at / N_KV].host_of + head * N_CHUNK;
    uint16_t             *ema  = (uint16_t *)s->ema + head * N_CHUNK;

    for (uint32_t c = 0; c < N_CHUNK; c++) {
        host[c] = kvd_rng_below(&W.rng, 8) < below ? KVD_HOST_NONE : at * N_CHUNK + c;
        ema[c]  = (uint16_t)kvd_rng_below(&W.rng, 30000);
    }
    for (uint32_t i = 0; i < n_miss; i++) {
        fetch[i] = i < n_urgent ? 2 * i + 1 : 2 * (i - n_urgent);
        into[i]  = (i * 7 + at) % N_SLOT;
    }
    m->change[at] = (kvd_window_result){ .n_miss = n_miss, .n_urgent = n_urgent };
}

static void misses_open(misses *m, kvd_record_type type, uint32_t dim)
{
    uint64_t *at, *iblock;

    memset(m, 0, sizeof(*m));
    m->format = (kvd_record_format){
        .type = type, .raw = KVD_DTYPE_BF16, .chunk_tokens = 4, .block_tokens = 256, .head_dim = dim
    };
    m->pool_bytes   = N_LANE * (N_SLOT + 2) * kvd_record_raw_bytes(&m->format);
    m->param_stride = kvd_record_param_bytes(&m->format);
    assert_int_equal(W.dev->ops->mem_alloc(W.dev, KVD_MEM_PINNED, 32 << 20, &m->mem, NULL), KVD_OK);
    m->seq    = take(m, N_SEQ * sizeof(*m->seq));
    m->place  = take(m, N_SEQ * sizeof(*m->place));
    m->change = take(m, N_LANE * sizeof(*m->change));
    m->host   = take(m, (N_HOST + N_PLACE) * kvd_record_bytes(&m->format));
    m->param  = take(m, 3 * N_KV * m->param_stride + 256);
    m->land   = take(m, N_PLACE * sizeof(*m->land));
    at        = take(m, N_LANE * sizeof(*at));
    iblock    = take(m, 3 * sizeof(*iblock));
    fill_bytes(m->host, N_HOST * kvd_record_bytes(&m->format));
    fill_bytes(m->param, 3 * N_KV * m->param_stride);
    for (uint32_t i = 0; i < 3; i++)
        iblock[i] = i * N_KV * m->param_stride;
    for (uint32_t i = 0; i < N_PLACE; i++)
        m->land[i] = N_HOST + (i * 5 + 3) % N_PLACE;
    for (uint32_t i = 0; i < N_LANE; i++)
        at[i] = i * (N_SLOT + 2) * kvd_record_raw_bytes(&m->format);
    for (uint32_t q = 0; q < N_SEQ; q++) {
        m->seq[q]   = (kvd_window_seq){ .ema   = take(m, 2 * N_KV * N_CHUNK),
                                        .fetch = take(m, 4 * N_KV * N_SLOT),
                                        .into  = take(m, 4 * N_KV * N_SLOT) };
        m->place[q] = (kvd_window_place){ .at      = at + (size_t)q * N_KV,
                                          .host_of = take(m, 4 * N_KV * N_CHUNK),
                                          .iblock  = iblock };
    }
    m->dev = take_side(m);
    m->ref = take_side(m);
}

static void misses_close(misses *m)
{
    W.dev->ops->mem_free(W.dev, &m->mem);
}

static void side_reset(misses *m, side *s)
{
    memset(s->queue, 0, 2 * sizeof(*s->queue));
    memset(s->state, 0, 2 * sizeof(*s->state));
    memset(s->pool, 0, m->pool_bytes);
}

static kvd_miss_link link_of(const misses *m, const side *s, uint32_t call, bool urgent,
                             uint32_t n_place, uint64_t limit_ns)
{
    const uint32_t i = urgent ? 0 : 1;

    return (kvd_miss_link){ .queue    = s->queue + i,
                            .request  = s->request[i],
                            .state    = s->state + i,
                            .batch    = s->batch + 2 * call + i,
                            .place    = m->land + (urgent ? 0 : N_PLACE / 2),
                            .n_place  = n_place,
                            .limit_ns = limit_ns };
}

static void post(misses *m, bool dev, uint32_t call)
{
    const side                *s   = dev ? &m->dev : &m->ref;
    const kvd_window_post_args a   = { .n_seq       = N_SEQ,
                                       .n_kv_head   = N_KV,
                                       .seq         = m->seq,
                                       .place       = m->place,
                                       .change      = m->change,
                                       .link        = { link_of(m, s, call, true, 1, 0),
                                                        link_of(m, s, call, false, 1, 0) },
                                       .lane_stride = N_CHUNK,
                                       .sel_stride  = N_SLOT,
                                       .first_lane  = call * N_LANE };
    kvd_err                    err = { 0 };

    gpu_check(dev ? W.dev->ops->window_post(W.st, &a, &err)
                  : W.ref->ops->window_post(W.ref_st, &a, &err),
              &err);
}

static void fetch(misses *m, bool dev, uint32_t call, bool urgent, uint32_t n_place, uint64_t limit)
{
    const side                 *s   = dev ? &m->dev : &m->ref;
    const uint64_t              raw = kvd_record_raw_bytes(&m->format);
    const kvd_window_fetch_args a   = { .n_seq        = N_SEQ,
                                        .n_kv_head    = N_KV,
                                        .seq          = m->seq,
                                        .place        = m->place,
                                        .change       = m->change,
                                        .kv           = { .type         = KVD_DTYPE_BF16,
                                                          .n_kv_head    = N_KV,
                                                          .head_dim     = m->format.head_dim,
                                                          .chunk_tokens = 4,
                                                          .block_tokens = 256,
                                                          .record_bytes = raw,
                                                          .pool         = s->pool },
                                        .format       = m->format,
                                        .host         = m->host,
                                        .param        = m->param,
                                        .slot_off     = 2 * raw,
                                        .lane_stride  = N_CHUNK,
                                        .sel_stride   = N_SLOT,
                                        .param_stride = m->param_stride,
                                        .urgent       = urgent,
                                        .link         = link_of(m, s, call, urgent, n_place, limit),
                                        .first_lane   = call * N_LANE };
    kvd_err                     err = { 0 };

    gpu_check(dev ? W.dev->ops->window_fetch(W.st, &a, &err)
                  : W.ref->ops->window_fetch(W.ref_st, &a, &err),
              &err);
}

static int by_lane(const void *a, const void *b)
{
    const kvd_miss_request *x = a, *y = b;

    if (x->lane != y->lane)
        return x->lane < y->lane ? -1 : 1;
    return x->chunk < y->chunk ? -1 : x->chunk > y->chunk;
}

/* The record of a request, as it lies in the host tier too, comes to its place. */
static void bring(misses *m, const side *s, uint32_t q, uint32_t i, uint32_t n_place)
{
    const kvd_miss_request *r     = &s->request[q][i];
    const uint64_t          bytes = kvd_record_bytes(&m->format);
    const uint32_t          place = m->land[(q ? N_PLACE / 2 : 0) + i % n_place];

    memcpy(m->host + place * bytes, m->host + (r->lane % N_LANE * N_CHUNK + r->chunk) * bytes,
           (size_t)bytes);
}

/* Serves a queue until all its requests have come, a few at a time. */
static void serve(misses *m, const side *s, uint32_t q, uint32_t n_place)
{
    kvd_miss_queue *k = &s->queue[q];
    uint32_t        n = k->arrived;

    while (n < __atomic_load_n(&k->posted, __ATOMIC_ACQUIRE)) {
        const uint32_t room = __atomic_load_n(&k->taken, __ATOMIC_ACQUIRE) + n_place - n;
        uint32_t       few  = 1 + (uint32_t)kvd_rng_below(&W.rng, 40);

        few = few < room ? few : room;
        for (uint32_t i = 0; i < few && n < k->posted; i++)
            bring(m, s, q, n++, n_place);
        __atomic_store_n(&k->arrived, n, __ATOMIC_RELEASE);
    }
}

static void same_requests(misses *m, uint32_t call)
{
    for (uint32_t q = 0; q < 2; q++) {
        const kvd_miss_batch   *d = &m->dev.batch[2 * call + q], *r = &m->ref.batch[2 * call + q];
        static kvd_miss_request x[N_LANE * N_SLOT], y[N_LANE * N_SLOT];

        assert_true(d->first == r->first && d->n == r->n);
        assert_int_equal(m->dev.queue[q].posted, m->ref.queue[q].posted);
        memcpy(x, m->dev.request[q] + d->first, d->n * sizeof(*x));
        memcpy(y, m->ref.request[q] + r->first, r->n * sizeof(*y));
        qsort(x, d->n, sizeof(*x), by_lane);
        qsort(y, r->n, sizeof(*y), by_lane);
        assert_memory_equal(x, y, d->n * sizeof(*x));
    }
}

static void fill_call(misses *m, uint32_t call)
{
    for (uint32_t at = 0; at < N_LANE; at++) {
        const uint32_t n = at % 4 == 3 ? 0 : (uint32_t)kvd_rng_below(&W.rng, N_SLOT / 2 + 1);

        fill_lane(m, at, n, n ? (uint32_t)kvd_rng_below(&W.rng, n + 1) : 0,
                  call == 0   ? 3
                  : call == 1 ? 8
                              : 0);
    }
}

/* Asked and answered, on both sides, urgent misses and the others. */
static void one_call(misses *m, uint32_t call, uint32_t n_place)
{
    fill_call(m, call);
    post(m, false, call);
    post(m, true, call);
    gpu_sync(&W);
    same_requests(m, call);
    for (uint32_t q = 0; q < 2; q++) {
        const kvd_miss_batch *b = &m->ref.batch[2 * call + q];

        for (uint32_t i = 0; i < b->n; i++)
            bring(m, &m->ref, q, b->first + i, N_PLACE / 2);
        m->ref.queue[q].arrived = m->ref.queue[q].posted;
        fetch(m, false, call, q == 0, N_PLACE / 2, 0);
        fetch(m, true, call, q == 0, n_place, UINT64_C(10000000000));
        serve(m, &m->dev, q, n_place);
        gpu_sync(&W);
        assert_false(m->dev.queue[q].too_late);
        assert_int_equal(m->dev.state[q].taken, m->dev.state[q].posted);
    }
    assert_memory_equal(m->dev.pool, m->ref.pool, m->pool_bytes);
}

static void test_served(void **state)
{
    static const uint32_t place[] = { N_PLACE / 2, 33, 7, 1 };
    static const uint32_t dim[]   = { 32, 24, 128 };
    misses                m;

    (void)state;
    for (uint32_t i = 0; i < 3 * KVD_COUNTOF(dim); i++) {
        misses_open(&m, (kvd_record_type)(i % 3), dim[i / 3]);
        for (uint32_t k = 0; k < KVD_COUNTOF(place); k++) {
            side_reset(&m, &m.dev);
            side_reset(&m, &m.ref);
            for (uint32_t call = 0; call < N_CALL; call++)
                one_call(&m, call, place[k]);
        }
        misses_close(&m);
    }
}

/* Nobody answers: the limit; or says that nothing will come.  What lies in the host tier comes. */
static void test_unanswered(void **state)
{
    misses m;

    (void)state;
    misses_open(&m, KVD_RECORD_RAW, 32);
    for (uint32_t k = 0; k < 2; k++) {
        uint64_t t0;

        side_reset(&m, &m.dev);
        side_reset(&m, &m.ref);
        fill_call(&m, 0);
        post(&m, true, 0);
        m.dev.queue[0].given_up = k;
        gpu_sync(&W);
        assert_true(m.dev.queue[0].posted > 0);
        t0 = kvd_now_ns();
        fetch(&m, true, 0, true, 64, k ? UINT64_C(60000000000) : UINT64_C(50000000));
        gpu_sync(&W);
        assert_true(kvd_now_ns() - t0 < UINT64_C(2000000000));
        assert_true(m.dev.queue[0].too_late == (k == 0));
        assert_int_equal(m.dev.state[0].taken, 0);
        m.ref.queue[0].given_up = 1;
        post(&m, false, 0);
        fetch(&m, false, 0, true, 64, 0);
        assert_memory_equal(m.dev.pool, m.ref.pool, m.pool_bytes);
    }
    misses_close(&m);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_served),
                                        cmocka_unit_test(test_unanswered) };
    int                     rc;

    if (!gpu_open(&W, argc, argv))
        return GPU_SKIP;
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&W);
    return rc;
}
