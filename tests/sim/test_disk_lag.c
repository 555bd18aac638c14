/* SPDX-License-Identifier: Apache-2.0 */
/* test_disk_lag.c - records that come late from a simulated disk: until they are there nothing of
 * them is attended, afterwards their slots hold what they say, whatever happens in between.
 *
 * Every slot that a step gives to a record is filled with NaN before the record can come, so an
 * attention that reads it too early shows.  The disk decides by seed what is done when somebody
 * only looks; who waits gets it.
 * usage: test_disk_lag [--seed N] */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kv/kv_cache.h"
#include "support/disk_model.h"

enum {
    N_LAYER  = 5,
    N_KV     = 2,
    N_HEAD   = 4,
    HEAD     = 16,
    N_SEQ    = 2,
    N_CTX    = 2048,
    N_BATCH  = 256,
    N_OP     = 400,
    LAG_MOST = 5,
    NEVER    = 65536 /* a look finds nothing done */
};

static uint64_t seed_ = 1;

typedef struct world {
    kvd_backend *be;
    kvd_stream  *st;
    kv_store    *s;
    os_io_sim    sim;
    kvd_rng      rng;
    char         dir[256];
    int32_t      token[N_SEQ][N_CTX];
    float        out[N_LAYER][N_SEQ * N_HEAD * HEAD];
    float        query[N_SEQ * N_HEAD * HEAD + N_LAYER];
    uint64_t     n_step;
} world;

/* What K and V of a token are made of: its id, its place, lane and element. */
static float value(int32_t token, uint32_t t, uint32_t lane, uint32_t i, bool v)
{
    return (float)(((uint32_t)token * 7 + t * 13 + lane * 5 + i * 3 + (v ? 11 : 0)) % 61) / 32.0f -
           1.0f;
}

static void write_rows(world *w, uint32_t q, uint32_t n)
{
    const kvd_kv_seq part = { .n_row  = n,
                              .n_past = kv_seq_len(w->s, q),
                              .block  = kv_seq_blocks(w->s, q) };
    const size_t     row  = (size_t)N_KV * HEAD;
    float           *k = calloc(n * row, sizeof(*k)), *v = calloc(n * row, sizeof(*v));

    for (uint32_t il = 0; il < N_LAYER; il++) {
        kvd_kv_append_args a = { .n_seq    = 1,
                                 .seq      = &part,
                                 .kv       = kv_layout(w->s, il),
                                 .k_stride = row,
                                 .v_stride = row,
                                 .k        = k,
                                 .v        = v };

        for (uint32_t i = 0; i < n * row; i++) {
            const uint32_t t    = part.n_past + (uint32_t)(i / row);
            const uint32_t lane = il * N_KV + i / HEAD % N_KV;

            k[i] = value(w->token[q][t], t, lane, i % HEAD, false);
            v[i] = value(w->token[q][t], t, lane, i % HEAD, true);
        }
        assert_int_equal(w->be->ops->kv_append(w->st, &a, NULL), KVD_OK);
    }
    free(k);
    free(v);
}

static void world_open(world *w, uint32_t lag, uint32_t delay)
{
    const kvd_backend_params bp  = { .name = "cpu", .n_thread = 1 };
    const kvd_backend_limits lim = { .n_token   = N_BATCH,
                                     .n_seq     = N_SEQ,
                                     .n_col     = 64,
                                     .n_head    = N_HEAD,
                                     .n_kv_head = N_KV,
                                     .head_dim  = HEAD,
                                     .n_ctx     = N_CTX,
                                     .n_chunk   = N_CTX / 4,
                                     .n_slot    = 40 };
    const os_io_params       io  = { .kind = OS_IO_SIM, .sim = &w->sim };
    kv_params                p   = { .n_layer       = N_LAYER,
                                     .n_head        = N_HEAD,
                                     .n_kv_head     = N_KV,
                                     .head_dim      = HEAD,
                                     .n_seq         = N_SEQ,
                                     .n_ctx         = N_CTX,
                                     .n_token       = N_SEQ * N_CTX,
                                     .n_batch       = N_BATCH,
                                     .type          = KVD_DTYPE_BF16,
                                     .chunk_tokens  = 4,
                                     .n_sink        = 16,
                                     .n_local       = 64,
                                     .sparse        = true,
                                     .index         = { .kind         = KVD_INDEX_MEAN,
                                                        .elem         = KVD_INDEX_INT4,
                                                        .radius       = true,
                                                        .chunk_tokens = 4,
                                                        .block_tokens = KV_BLOCK_TOKENS,
                                                        .head_dim     = HEAD },
                                     .window_tokens = 160,
                                     .cache_dir     = w->dir,
                                     .host_bytes    = 40000,
                                     .disk_lag      = lag,
                                     .disk_io       = &io };
    kv_sizes                 z;

    memset(w, 0, sizeof(*w));
    w->sim = (os_io_sim){ .seed = seed_, .delay = delay };
    kvd_rng_seed(&w->rng, seed_);
    dm_dir_make(w->dir);
    assert_int_equal(kvd_backend_open(&w->be, &bp, NULL), KVD_OK);
    assert_int_equal(w->be->ops->stream_open(w->be, &w->st, NULL), KVD_OK);
    assert_int_equal(w->be->ops->reserve(w->be, &lim, NULL), KVD_OK);
    p.device_bytes = 1;
    assert_int_equal(kv_plan(&p, &z, NULL), KVD_E_INVAL);
    p.device_bytes = z.device_bytes;
    assert_int_equal(kv_store_open(&w->s, w->be, &p, NULL), KVD_OK);
    assert_non_null(w->s->tier);
    for (uint32_t q = 0; q < N_SEQ; q++)
        kv_seq_source(w->s, q, w->token[q], 0);
}

static void world_close(world *w)
{
    kv_store_close(w->s);
    w->be->ops->stream_close(w->st);
    kvd_backend_close(w->be);
    dm_dir_remove(w->dir);
}

/* ---- operations ---------------------------------------------------------------------- */

static void admit(world *w, uint32_t q)
{
    kv_seq_admit(w->s, q, 64 + 16 * q, 2.0f);
}

static void op_prompt(world *w, uint32_t q, uint32_t n)
{
    if (kv_seq_reserve(w->s, q, n, NULL) != KVD_OK)
        return;
    for (uint32_t i = 0; i < n; i++)
        w->token[q][kv_seq_len(w->s, q) + i] = (int32_t)kvd_rng_below(&w->rng, 50);
    write_rows(w, q, n);
    kv_seq_commit(w->s, q, n, KV_MADE_PROMPT);
    assert_int_equal(kv_seq_seal(w->s, w->st, q, false, NULL), KVD_OK);
    admit(w, q);
}

/* NaN into every slot whose record is still to come. */
static void poison(world *w, const kv_query *q)
{
    const kv_step *t = &w->s->step;

    for (uint32_t at = 0; at < q->n_row * N_KV; at++) {
        const uint64_t lane = kv_lane(w->s, q->seq[at / N_KV], q->layer) + at % N_KV;

        for (uint32_t i = 0; i < t->change[at].n_miss; i++)
            memset((uint8_t *)w->s->pool.ptr +
                       kv_record_in_window(w->s, lane,
                                           w->s->sinks + t->into[at * w->s->slots_max + i]),
                   0xff, w->s->layout.record_bytes);
    }
}

static world      *poisoned;
static kv_stage_fn fetch_urgent;

static kvd_status poison_and_fetch(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    poison(poisoned, q);
    return fetch_urgent(s, st, q, err);
}

/* The step program has been chosen: its first fetch finds poison in the slots of all misses. */
static void poison_fetches(world *w)
{
    kv_stage_fn *stage = &w->s->exec.stage[SPARSE_FETCH_URGENT];

    poisoned = w;
    if (*stage != poison_and_fetch)
        fetch_urgent = *stage;
    *stage = poison_and_fetch;
}

/* n_layer < N_LAYER: canceled there. */
static void run_step(world *w, const uint32_t *seq, uint32_t n, uint32_t n_layer)
{
    const uint32_t row[N_SEQ] = { 0, 1 };

    for (uint32_t i = 0; i < KVD_COUNTOF(w->query); i++) /* neighbouring steps are alike */
        w->query[i] = 0.95f * w->query[i] + kvd_rng_f32(&w->rng) - 0.5f;
    assert_int_equal(kv_step_begin(w->s, w->st, seq, row, n, NULL), KVD_OK);
    poison_fetches(w);
    for (uint32_t il = 0; il < n_layer; il++) {
        const kv_query q = { .layer      = il,
                             .n_row      = n,
                             .seq        = seq,
                             .row        = row,
                             .q_stride   = N_HEAD * HEAD,
                             .out_stride = N_HEAD * HEAD,
                             .q          = w->query + il,
                             .out        = w->out[il],
                             .scale      = 0.25f };

        assert_int_equal(kv_attend_sparse(w->s, w->st, &q, NULL), KVD_OK);
        for (uint32_t i = 0; i < n * N_HEAD * HEAD; i++)
            assert_true(isfinite(w->out[il][i]));
    }
    if (n_layer < N_LAYER)
        kv_step_abort(w->s, w->st);
    else
        assert_int_equal(kv_step_end(w->s, NULL), KVD_OK);
}

static void op_step(world *w, bool cancel)
{
    uint32_t seq[N_SEQ], n = 0;

    for (uint32_t q = 0; q < N_SEQ; q++) {
        if (kv_seq_sparse(w->s, q) && (n == 0 || kvd_rng_below(&w->rng, 4)) &&
            kv_seq_reserve(w->s, q, 1, NULL) == KVD_OK)
            seq[n++] = q;
    }
    for (uint32_t k = 0; k < n; k++) {
        w->token[seq[k]][kv_seq_len(w->s, seq[k])] = (int32_t)kvd_rng_below(&w->rng, 50);
        write_rows(w, seq[k], 1);
    }
    if (n > 0)
        run_step(w, seq, n, cancel ? 1 + (uint32_t)kvd_rng_below(&w->rng, N_LAYER - 1) : N_LAYER);
    for (uint32_t k = 0; k < n; k++) {
        if (cancel) {
            kv_seq_release(w->s, seq[k]);
            kv_seq_restart(w->s, seq[k]);
            continue;
        }
        kv_seq_commit(w->s, seq[k], 1, KV_MADE_SPARSE);
        assert_int_equal(kv_seq_seal(w->s, w->st, seq[k], true, NULL), KVD_OK);
    }
    w->n_step += !cancel && n > 0;
}

static void op_cut(world *w, uint32_t q)
{
    const uint32_t len = kv_seq_len(w->s, q);

    kv_seq_truncate(w->s, w->st, q, len - (uint32_t)kvd_rng_below(&w->rng, len + 1));
    admit(w, q);
}

/* Away, and back from the directory. */
static void op_restore(world *w, uint32_t q)
{
    const uint32_t len = kv_seq_len(w->s, q);

    kv_seq_truncate(w->s, w->st, q, 0);
    if (len > 1)
        (void)kv_seq_restore(w->s, w->st, q,
                             &(kv_restore_ask){ .n_token = len - 1, .final_len = len });
    admit(w, q);
}

/* All that is on its way has come: every slot holds its chunk. */
static void check_slots(world *w)
{
    const kv_store *s = w->s;

    kv_tier_settle(w->s);
    for (uint64_t at = 0; at < kv_n_lane(&s->params) * s->slots_max; at++) {
        const uint64_t lane = at / s->slots_max, slot = at % s->slots_max;
        const uint32_t q = (uint32_t)(lane / (N_LAYER * N_KV)), chunk = s->chunk_of[at];
        const uint8_t *rec =
            (const uint8_t *)s->pool.ptr + kv_record_in_window(s, lane, s->sinks + (uint32_t)slot);

        if (s->seq[q].step == 0 || !kv_seq_sparse(s, q) || chunk == KVD_CHUNK_NONE)
            continue;
        for (uint32_t i = 0; i < 8 * HEAD; i++) {
            const uint32_t t = chunk * 4 + i / HEAD % 4;
            uint16_t       h;

            memcpy(&h, rec + 2 * (size_t)i, 2);
            assert_true(kvd_bf16_to_f32(h) ==
                        kvd_bf16_to_f32(kvd_f32_to_bf16(value(w->token[q][t], t,
                                                              (uint32_t)(lane % (N_LAYER * N_KV)),
                                                              i % HEAD, i / HEAD >= 4))));
        }
    }
}

static kv_counts walk(uint32_t lag, uint32_t delay, kv_policy policy, bool disturbed)
{
    static world w;
    kv_counts    c;

    world_open(&w, lag, delay);
    kv_set_policy(w.s, &policy);
    for (uint32_t q = 0; q < N_SEQ; q++) {
        for (uint32_t i = 0; i < 4; i++)
            op_prompt(&w, q, N_BATCH);
    }
    for (uint32_t i = 0; i < N_OP; i++) {
        const uint64_t op = disturbed ? kvd_rng_below(&w.rng, 40) : 39;
        const uint32_t q  = (uint32_t)kvd_rng_below(&w.rng, N_SEQ);

        if (op < 1)
            op_cut(&w, q);
        else if (op < 4)
            op_prompt(&w, q, 1 + (uint32_t)kvd_rng_below(&w.rng, N_BATCH));
        else if (op < 5)
            op_restore(&w, q);
        else
            op_step(&w, op < 7);
        kv_check(w.s);
        if (i % 50 == 49)
            check_slots(&w);
    }
    kv_get_counts(w.s, &c);
    assert_true(w.n_step > 50 && c.n_disk > c.n_disk_urgent);
    world_close(&w);
    return c;
}

/* ---- tests --------------------------------------------------------------------------- */

/* The longer the lag, the fewer stalls; none is late with a lag of 1, nor on a disk that is done
 * whenever somebody looks. */
static void test_stalls_fall(void **state)
{
    const kv_policy policy = { .alpha = 0.5f };
    uint64_t        stalls[LAG_MOST];
    kv_counts       c;

    (void)state;
    for (uint32_t lag = 1; lag < LAG_MOST; lag++) {
        c           = walk(lag, NEVER, policy, false);
        stalls[lag] = c.n_disk_stall;
        print_message("lag %u: %llu stalls, %llu selected chunks late, %llu of %llu records "
                      "urgent\n",
                      lag, (unsigned long long)c.n_disk_stall, (unsigned long long)c.n_disk_late,
                      (unsigned long long)c.n_disk_urgent, (unsigned long long)c.n_disk);
        assert_true(c.n_select == c.n_hit + c.n_miss + c.n_disk_late);
        assert_true((c.n_disk_late > 0) == (lag > 1));
        assert_true(lag == 1 || stalls[lag] * 10 < stalls[1] * 9);
    }
    c = walk(4, 0, policy, false);
    assert_int_equal(c.n_disk_late, 0);
}

/* Cuts, prompts, steps that are canceled, prefixes that come back, on disks of any speed. */
static void test_disturbed(void **state)
{
    static const uint32_t delay[] = { 0, 20000, 60000, NEVER };

    (void)state;
    for (uint32_t i = 0; i < 4 * LAG_MOST; i++) {
        const kv_policy policy = { .evict    = (kvd_evict_policy)(i % KVD_EVICT_POLICY_COUNT),
                                   .alpha    = i % 3 ? 0.5f : 1.0f,
                                   .selected = i % 2 };

        (void)walk(1 + i / 4, delay[i % 4], policy, true);
    }
}

/* ---- syncs --------------------------------------------------------------------------- */

static kv_disk_stats disk_stats(const world *w)
{
    kv_disk_stats d;

    kv_disk_stats_get(w->s->cache->disk, &d);
    return d;
}

/* Steps beyond the sealing of one block of each sequence and more, of which the disk syncs none. */
static void seal_unsynced(world *w)
{
    const kv_policy policy = { .alpha = 0.5f };
    kv_counts       before, after;
    kv_disk_stats   was;

    world_open(w, 1, 0);
    kv_set_policy(w->s, &policy);
    for (uint32_t q = 0; q < N_SEQ; q++) {
        for (uint32_t i = 0; i < 3; i++)
            op_prompt(w, q, N_BATCH);
    }
    assert_int_equal(kv_flush(w->s, NULL), KVD_OK);
    was = disk_stats(w);
    kv_get_counts(w->s, &before);
    w->sim.hold_syncs = true;
    for (uint32_t i = 0; i < N_OP; i++) {
        op_step(w, false);
        kv_poll(w->s);
        kv_check(w->s);
    }
    check_slots(w);
    kv_get_counts(w->s, &after);
    assert_true(after.n_sealed >= before.n_sealed + N_SEQ && after.n_disk > before.n_disk);
    assert_int_equal(disk_stats(w).n_unit, was.n_unit); /* a row means synced bytes */
    assert_int_equal(disk_stats(w).n_timeout, 0);
}

static void test_no_step_waits_for_a_sync(void **state)
{
    static world  w;
    kv_disk_stats was;

    (void)state;
    seal_unsynced(&w);
    was              = disk_stats(&w);
    w.sim.hold_syncs = false;
    assert_int_equal(kv_flush(w.s, NULL), KVD_OK);
    assert_true(disk_stats(&w).n_unit >= was.n_unit + N_SEQ);
    for (uint32_t i = 0; i < 20; i++)
        op_step(&w, false);
    check_slots(&w);
    for (uint32_t q = 0; q < N_SEQ; q++)
        op_restore(&w, q);
    kv_check(w.s);
    check_slots(&w);
    world_close(&w);
}

static bool seals_next(const world *w)
{
    bool due = false;

    for (uint32_t q = 0; q < N_SEQ; q++)
        due = due || kv_sealed_at(&w->s->params, kv_seq_len(w->s, q) + 1) > w->s->seq[q].n_sealed;
    return due;
}

/* What could not be synced is not found again, and the sequences whose it is go on with it. */
static void test_failed_sync(void **state)
{
    static world  w;
    kv_disk_stats was;
    kvd_err       err = { 0 };

    (void)state;
    seal_unsynced(&w);
    was              = disk_stats(&w);
    w.sim.sync_eio   = 65536;
    w.sim.hold_syncs = false;
    assert_int_equal(kv_flush(w.s, &err), KVD_E_IO);
    assert_int_equal(disk_stats(&w).n_unit, was.n_unit);
    assert_int_equal(disk_stats(&w).pause, KV_DISK_PAUSE_ERROR);
    for (uint32_t i = 0; i < 20 && !seals_next(&w); i++)
        op_step(&w, false);
    check_slots(&w);
    kv_check(w.s);
    for (uint32_t q = 0; q < N_SEQ; q++)
        kv_seq_truncate(w.s, w.st, q, 0); /* nobody reads them any more: their places are free */
    kv_poll(w.s);
    kv_disk_check(w.s->cache->disk);
    world_close(&w);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_stalls_fall),
                                        cmocka_unit_test(test_disturbed),
                                        cmocka_unit_test(test_no_step_waits_for_a_sync),
                                        cmocka_unit_test(test_failed_sync) };

    seed_ = argc == 3 && strcmp(argv[1], "--seed") == 0 ? strtoull(argv[2], NULL, 0) : 1;
    print_message("seed %llu (--seed N repeats)\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
