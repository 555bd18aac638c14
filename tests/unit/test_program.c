/* SPDX-License-Identifier: Apache-2.0 */
/* test_program.c - step programs: what is ordered before what in every one that can be built, how
 * they print, and what the executor does with them on a device that does not exist.
 *
 * usage: test_program [--update]   writes tests/golden/steps anew */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "sparse/sparse.h"

#ifndef KVD_GOLDEN_STEPS
#error "KVD_GOLDEN_STEPS: the directory of golden programs"
#endif

static bool update;

/* ---- order ---------------------------------------------------------------------------- */

static bool before[SPARSE_STAGES_MAX][SPARSE_STAGES_MAX]; /* [b][a]: stage a goes before stage b */

static void follow(uint32_t b, uint32_t a)
{
    before[b][a] = true;
    for (uint32_t i = 0; i < a; i++)
        before[b][i] = before[b][i] || before[a][i];
}

/* Stage b follows those ahead of it on its stream, those it waits for, and all that the host did or
 * waited for before it gave b out. */
static void order_stages(const sparse_program *p)
{
    memset(before, 0, sizeof(before));
    for (uint32_t b = 0; b < p->n_stage; b++) {
        const sparse_stage *g = &p->stage[b];

        for (uint32_t a = 0; a < b; a++) {
            if (p->desc.unified || p->stage[a].stream == g->stream ||
                p->stage[a].stream == SPARSE_HOST)
                follow(b, a);
        }
        for (uint32_t i = 0; i < g->n_wait; i++)
            follow(b, g->wait[i].stage);
    }
}

static bool shares_rows(const sparse_program *p, uint32_t a, uint32_t b)
{
    uint32_t fa, na, fb, nb;

    sparse_stage_rows(p, a, &fa, &na);
    sparse_stage_rows(p, b, &fb, &nb);
    return fa < fb + nb && fb < fa + na;
}

/* Every stage of kind `first` goes before each of kind `then` that has a row in common with it;
 * where there are both. */
static void check_pair(const sparse_program *p, sparse_kind first, sparse_kind then)
{
    for (uint32_t a = 0; a < p->n_stage; a++) {
        for (uint32_t b = 0; b < p->n_stage; b++) {
            if (p->stage[a].kind != first || p->stage[b].kind != then || !shares_rows(p, a, b))
                continue;
            if (!before[b][a])
                fail_msg("stage %u, %s, is not ordered before stage %u, %s", a + 1,
                         sparse_stage_name(first), b + 1, sparse_stage_name(then));
        }
    }
}

static const struct pair {
    sparse_kind first, then;
} pairs[] = {
    { SPARSE_LIST, SPARSE_ATTEND_KEPT },
    { SPARSE_ATTEND_KEPT, SPARSE_SCORE },
    { SPARSE_SCORE, SPARSE_TAP },
    { SPARSE_SCORE, SPARSE_CHANGE },
    { SPARSE_AVERAGES, SPARSE_CHANGE },
    { SPARSE_CHANGE, SPARSE_SETTLE },
    { SPARSE_CHANGE, SPARSE_COUNT },
    { SPARSE_CHANGE, SPARSE_LIST_WINDOW },
    { SPARSE_CHANGE, SPARSE_FETCH_URGENT },
    { SPARSE_CHANGE, SPARSE_FETCH_LATE },
    { SPARSE_SELECT, SPARSE_FETCH_URGENT },
    { SPARSE_SELECT, SPARSE_FETCH_LATE },
    { SPARSE_SELECT, SPARSE_POST },
    { SPARSE_POST, SPARSE_FETCH_URGENT },
    { SPARSE_POST, SPARSE_FETCH_LATE },
    { SPARSE_SELECT, SPARSE_ATTEND },
    { SPARSE_SELECT, SPARSE_ATTEND_WINDOW },
    { SPARSE_LIST_WINDOW, SPARSE_ATTEND_WINDOW },
    { SPARSE_LIST_URGENT, SPARSE_ATTEND_URGENT },
    { SPARSE_FETCH_URGENT, SPARSE_ATTEND_URGENT },
    { SPARSE_FETCH_URGENT, SPARSE_ATTEND },
    { SPARSE_ATTEND_WINDOW, SPARSE_ATTEND_URGENT },
    { SPARSE_ATTEND_URGENT, SPARSE_ESTIMATE },
};

static uint32_t count(const sparse_program *p, sparse_kind kind)
{
    uint32_t rows = 0;

    for (uint32_t i = 0; i < p->n_stage; i++) {
        uint32_t first, n;

        sparse_stage_rows(p, i, &first, &n);
        rows += p->stage[i].kind == kind ? n : 0;
    }
    return rows;
}

/* Each row selects once, attends once to the kept set, to its window and to urgent misses, and gets
 * all its misses where records move. */
static void check_whole(const sparse_program *p)
{
    const sparse_step_desc *d     = &p->desc;
    const bool              moves = !d->resident && !d->no_fetch;
    const uint32_t          n     = d->n_row;

    assert_int_equal(count(p, SPARSE_SELECT) + count(p, SPARSE_ATTEND_KEPT), n);
    assert_int_equal(count(p, SPARSE_SELECT) + count(p, SPARSE_CHANGE), n);
    assert_int_equal(count(p, SPARSE_ATTEND) + count(p, SPARSE_ATTEND_WINDOW), n);
    assert_int_equal(count(p, SPARSE_ATTEND) + count(p, SPARSE_ATTEND_URGENT), n);
    assert_int_equal(count(p, SPARSE_FETCH_URGENT), moves ? n : 0);
    if (!d->strict)
        assert_int_equal(count(p, SPARSE_FETCH_LATE), moves ? n : 0);
    assert_int_equal(count(p, SPARSE_ESTIMATE), d->estimate ? n : 0);
    assert_int_equal(count(p, SPARSE_TAP), d->tap ? n : 0);
    assert_true(p->n_event <= SPARSE_EVENTS(p->n_part));
}

static void check_program(const sparse_step_desc *d)
{
    sparse_program p, again;

    sparse_program_build(&p, d);
    check_whole(&p);
    order_stages(&p);
    for (uint32_t i = 0; i < sizeof(pairs) / sizeof(*pairs); i++)
        check_pair(&p, pairs[i].first, pairs[i].then);
    sparse_program_build(&again, d);
    assert_memory_equal(&p, &again, sizeof(p));
}

/* All combinations of eleven choices and three batches. */
static void test_all_orders(void **state)
{
    static const struct {
        uint32_t n_row, micro_rows;
    } batch[]  = { { 1, 1 }, { 5, 2 }, { 4, 4 } };
    uint32_t n = 0;

    (void)state;
    for (uint32_t i = 0; i < sizeof(batch) / sizeof(*batch) << 11; i++) {
        const uint32_t         x = i / (sizeof(batch) / sizeof(*batch));
        const uint32_t         k = i % (sizeof(batch) / sizeof(*batch));
        const sparse_step_desc d = { .n_row         = batch[k].n_row,
                                     .micro_rows    = batch[k].micro_rows,
                                     .device_driven = x & 1u,
                                     .unified       = x >> 1 & 1u,
                                     .host_window   = x >> 2 & 1u,
                                     .resident      = x >> 3 & 1u,
                                     .disk          = x >> 4 & 1u,
                                     .strict        = x >> 5 & 1u,
                                     .elastic       = x >> 6 & 1u,
                                     .averages      = x >> 7 & 1u,
                                     .estimate      = x >> 8 & 1u,
                                     .tap           = x >> 9 & 1u,
                                     .no_fetch      = x >> 10 & 1u,
                                     .marks         = x >> 10 & 1u && x & 64u };

        if ((d.device_driven && (d.host_window || d.estimate || d.tap)) || (d.resident && d.disk))
            continue; /* what kv/ never asks for */
        check_program(&d);
        n++;
    }
    assert_true(n > 1000);
}

/* The most micro-batches that there may be. */
static void test_many_micro_batches(void **state)
{
    for (uint32_t host = 0; host < 2; host++) {
        const sparse_step_desc d = { .n_row         = KVD_MICRO_BATCHES_MAX * 3 - 1,
                                     .micro_rows    = 3,
                                     .device_driven = !host,
                                     .host_window   = host != 0,
                                     .elastic       = 1,
                                     .averages      = 1 };

        check_program(&d);
    }
    (void)state;
}

/* Any choice changes the hash: a recorded step would be another. */
static void test_hash_tells_all(void **state)
{
    const sparse_step_desc base = { .n_row = 4, .micro_rows = 2, .device_driven = 1 };
    sparse_program         p, q;

    (void)state;
    sparse_program_build(&p, &base);
    for (uint32_t i = 0; i < 6; i++) {
        sparse_step_desc d = base;

        d.n_row += i == 0;
        d.micro_rows += i == 1;
        d.strict   = i == 2;
        d.elastic  = i == 3;
        d.resident = i == 4;
        d.disk     = i == 5;
        sparse_program_build(&q, &d);
        assert_true(p.hash != q.hash);
    }
}

/* ---- prints ---------------------------------------------------------------------------- */

static const struct golden {
    const char      *name;
    sparse_step_desc d;
} goldens[] = {
    { "cpu-resident", { .n_row = 1, .micro_rows = 1, .unified = 1, .resident = 1, .averages = 1 } },
    { "cpu-disk-estimate",
      { .n_row = 2, .micro_rows = 2, .unified = 1, .disk = 1, .averages = 1, .estimate = 1 } },
    { "gpu-resident", { .n_row = 1, .micro_rows = 1, .device_driven = 1, .resident = 1 } },
    { "gpu-tiers", { .n_row = 4, .micro_rows = 4, .device_driven = 1 } },
    { "gpu-tiers-strict-elastic",
      { .n_row = 4, .micro_rows = 2, .device_driven = 1, .strict = 1, .elastic = 1 } },
    { "gpu-disk", { .n_row = 4, .micro_rows = 4, .device_driven = 1, .disk = 1 } },
    { "gpu-host-window-elastic",
      { .n_row = 4, .micro_rows = 2, .host_window = 1, .elastic = 1, .averages = 1 } },
    { "gpu-tap", { .n_row = 2, .micro_rows = 2, .tap = 1, .averages = 1 } },
};

static void check_golden(const struct golden *g)
{
    char           path[512], want[8192];
    sparse_program p;
    kvd_buf        b = { 0 };
    size_t         n;
    FILE          *f;

    sparse_program_build(&p, &g->d);
    sparse_program_print(&p, NULL, &b);
    assert_false(b.oom);
    (void)snprintf(path, sizeof(path), "%s/%s.txt", KVD_GOLDEN_STEPS, g->name);
    f = fopen(path, update ? "w" : "r");
    if (!f)
        fail_msg("%s cannot be opened", path);
    if (update) {
        assert_int_equal(fwrite(b.data, 1, b.len, f), b.len);
    } else {
        n       = fread(want, 1, sizeof(want) - 1, f);
        want[n] = '\0';
        assert_string_equal(b.data, want);
    }
    (void)!fclose(f);
    kvd_buf_free(&b);
}

static void test_goldens(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < sizeof(goldens) / sizeof(*goldens); i++)
        check_golden(&goldens[i]);
}

/* ---- the executor ---------------------------------------------------------------------- */

/* A device that only takes notes: streams and events are numbers. */
static char     notes[8192];
static size_t   n_note;
static uint32_t calls_left; /* before all fail */
static uint32_t n_after;    /* calls that failed */

static kvd_status note(kvd_err *err, const char *what, uintptr_t a, uintptr_t b)
{
    n_after += calls_left == 0;
    if (calls_left == 0)
        return kvd_fail(err, KVD_E_DEVICE, 0, "the device is gone");
    calls_left--;
    n_note += (size_t)snprintf(notes + n_note, sizeof(notes) - n_note, "%s %u %u\n", what,
                               (unsigned)a, (unsigned)b);
    return KVD_OK;
}

static kvd_status fake_record(kvd_event *ev, kvd_stream *st, kvd_err *err)
{
    return note(err, "record", (uintptr_t)ev, (uintptr_t)st);
}

static kvd_status fake_wait(kvd_event *ev, kvd_stream *st, kvd_err *err)
{
    return note(err, "wait", (uintptr_t)ev, (uintptr_t)st);
}

static kvd_status fake_poll(const kvd_event *ev, kvd_err *err)
{
    static uint32_t turn;

    return calls_left && ++turn % 3 ? KVD_E_BUSY : note(err, "poll", (uintptr_t)ev, 0);
}

static kvd_status fake_sync(kvd_stream *st, kvd_err *err)
{
    return note(err, "sync", (uintptr_t)st, 0);
}

static kvd_status fake_stage(void *ctx, sparse_kind kind, kvd_stream *st, uint32_t first,
                             uint32_t n, kvd_err *err)
{
    (void)ctx;
    return note(err, sparse_stage_name(kind), (uintptr_t)st, first * 100 + n);
}

static kvd_status run_fake(const sparse_step_desc *d, uint32_t n_call, kvd_err *err)
{
    static const kvd_backend_ops ops = { .event_record = fake_record,
                                         .event_wait   = fake_wait,
                                         .event_poll   = fake_poll,
                                         .stream_sync  = fake_sync };
    kvd_event                   *event[SPARSE_EVENTS_MAX];
    sparse_machine               m = { .ops = &ops, .event = event, .run = fake_stage };
    sparse_program               p;

    for (uintptr_t i = 0; i < SPARSE_EVENTS_MAX; i++)
        event[i] = (kvd_event *)(i + 1);
    for (uintptr_t i = 0; i < SPARSE_N_STREAM; i++)
        m.stream[i] = (kvd_stream *)(i + 10);
    n_note = n_after = 0;
    calls_left       = n_call;
    sparse_program_build(&p, d);
    return sparse_program_run(&p, &m, err);
}

static void test_executor_orders_streams(void **state)
{
    static const char      want[] = "select(fused) 11 2\nrecord 1 11\nwait 1 12\n"
                                    "fetch(urgent) 12 2\nrecord 3 12\n"
                                    "select(fused) 11 202\nrecord 2 11\nwait 2 12\n"
                                    "fetch(urgent) 12 202\nrecord 4 12\n"
                                    "attend(window) 11 4\nwait 3 11\nattend(urgent) 11 2\n"
                                    "wait 4 11\nattend(urgent) 11 202\n";
    const sparse_step_desc d      = {
             .n_row = 4, .micro_rows = 2, .device_driven = 1, .strict = 1, .elastic = 1
    };

    (void)state;
    assert_int_equal(run_fake(&d, UINT32_MAX, NULL), KVD_OK);
    assert_string_equal(notes, want);
}

/* Whatever call fails, its error comes out, and nothing more is given out. */
static void test_executor_stops(void **state)
{
    const sparse_step_desc d = {
        .n_row = 4, .micro_rows = 2, .host_window = 1, .elastic = 1, .averages = 1
    };
    uint32_t n = 0;

    (void)state;
    for (;; n++) {
        kvd_err          err = { 0 };
        const kvd_status st  = run_fake(&d, n, &err);

        if (st == KVD_OK)
            break;
        assert_int_equal(st, KVD_E_DEVICE);
        assert_string_equal(err.msg, "the device is gone");
        assert_in_range(n_after, 1, 2); /* a failed poll is asked again, for its error */
    }
    assert_true(n > 20);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_all_orders),
                                        cmocka_unit_test(test_many_micro_batches),
                                        cmocka_unit_test(test_hash_tells_all),
                                        cmocka_unit_test(test_goldens),
                                        cmocka_unit_test(test_executor_orders_streams),
                                        cmocka_unit_test(test_executor_stops) };

    update = argc > 1 && strcmp(argv[1], "--update") == 0;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
