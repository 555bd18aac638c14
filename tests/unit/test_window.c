/* SPDX-License-Identifier: Apache-2.0 */
/* test_window.c - the window op: every small case against a naive model, long random runs against
 * the same, and the rules stated one by one. --seed N repeats a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "base/base.h"

#define N_CHUNK_MAX 600
#define N_SLOT_MAX  200

static uint64_t     test_seed = 1;
static kvd_backend *be;
static kvd_stream  *stream;

/* One lane's state and what the op gives. */
typedef struct lane {
    uint32_t n_chunk, cap;
    uint32_t sel[N_CHUNK_MAX], n_sel;
    uint16_t ema[N_CHUNK_MAX], slot_of[N_CHUNK_MAX];
    uint32_t chunk_of[N_SLOT_MAX], stamp[N_SLOT_MAX];
    uint32_t stay[N_SLOT_MAX], fetch[N_CHUNK_MAX], into[N_CHUNK_MAX];
} lane;

static void lane_init(lane *l, uint32_t n_chunk, uint32_t cap)
{
    memset(l, 0, sizeof(*l));
    l->n_chunk = n_chunk;
    l->cap     = cap;
    memset(l->slot_of, 0xff, sizeof(l->slot_of));
    memset(l->chunk_of, 0xff, sizeof(l->chunk_of));
}

static kvd_window_result run(lane *l, uint32_t step, bool refill, kvd_evict_policy policy,
                             bool strict)
{
    const kvd_window_seq    q   = { .step     = step,
                                    .refill   = refill,
                                    .cap      = &l->cap,
                                    .sel      = l->sel,
                                    .ema      = l->ema,
                                    .slot_of  = l->slot_of,
                                    .chunk_of = l->chunk_of,
                                    .stamp    = l->stamp,
                                    .stay     = l->stay,
                                    .fetch    = l->fetch,
                                    .into     = l->into };
    const kvd_select_result sel = { .n_sel = l->n_sel };
    kvd_window_result       r   = { 0 };
    const kvd_window_args   a   = { .n_seq     = 1,
                                    .n_kv_head = 1,
                                    .seq       = &q,
                                    .select    = &sel,
                                    .result    = &r,
                                    .policy    = policy,
                                    .strict    = strict };

    assert_int_equal(be->ops->window(stream, &a, NULL), KVD_OK);
    return r;
}

static bool is_selected(const lane *l, uint32_t chunk)
{
    for (uint32_t i = 0; i < l->n_sel; i++) {
        if ((l->sel[i] & ~KVD_SELECT_URGENT) == chunk)
            return true;
    }
    return false;
}

/* The chunk that the rule says leaves next, by looking at all of them. */
static uint32_t next_victim(const lane *l, const uint32_t *chunk_of, kvd_evict_policy policy)
{
    uint32_t best = KVD_CHUNK_NONE, best_rank = 0;

    for (uint32_t s = 0; s < l->cap; s++) {
        const uint32_t c = chunk_of[s];
        uint32_t       rank;

        if (c == KVD_CHUNK_NONE || is_selected(l, c))
            continue;
        rank = policy == KVD_EVICT_EMA ? l->ema[c] : l->stamp[s];
        if (best == KVD_CHUNK_NONE || rank < best_rank || (rank == best_rank && c < best)) {
            best      = c;
            best_rank = rank;
        }
    }
    return best;
}

/* What the op should do to `before`, written to be read. */
static void check_step(const lane *before, const lane *after, const kvd_window_result *r,
                       kvd_evict_policy policy)
{
    uint32_t chunk_of[N_SLOT_MAX], n_miss = 0, n_used = 0, n_out, n_stay = 0;

    memcpy(chunk_of, before->chunk_of, sizeof(chunk_of));
    for (uint32_t i = 0; i < before->n_sel; i++)
        n_miss += before->slot_of[before->sel[i] & ~KVD_SELECT_URGENT] == KVD_SLOT_NONE;
    for (uint32_t s = 0; s < before->cap; s++)
        n_used += chunk_of[s] != KVD_CHUNK_NONE;
    n_out = n_used + n_miss > before->cap ? n_used + n_miss - before->cap : 0;
    assert_int_equal(r->n_miss, n_miss);
    assert_int_equal(r->n_hit, before->n_sel - n_miss);
    assert_int_equal(r->n_evict, n_out);
    for (uint32_t i = 0; i < n_out; i++) {
        const uint32_t victim = next_victim(before, chunk_of, policy);

        assert_int_not_equal(victim, KVD_CHUNK_NONE);
        chunk_of[before->slot_of[victim]] = KVD_CHUNK_NONE;
    }
    for (uint32_t s = 0; s < before->cap; s++) { /* attended at once: the rest, in slot order */
        if (chunk_of[s] != KVD_CHUNK_NONE) {
            assert_true(n_stay < r->n_stay);
            assert_int_equal(after->stay[n_stay++], s);
        }
    }
    assert_int_equal(n_stay, r->n_stay);
    for (uint32_t i = 0, s = 0; i < n_miss; i++) { /* misses into empty slots, in fetch order */
        while (chunk_of[s] != KVD_CHUNK_NONE)
            s++;
        assert_int_equal(after->into[i], s);
        chunk_of[s] = after->fetch[i];
        assert_int_equal(before->slot_of[after->fetch[i]], KVD_SLOT_NONE);
        assert_true(is_selected(before, after->fetch[i]));
    }
    assert_memory_equal(chunk_of, after->chunk_of, before->cap * sizeof(uint32_t));
    for (uint32_t c = 0; c < before->n_chunk; c++) {
        if (after->slot_of[c] != KVD_SLOT_NONE)
            assert_int_equal(after->chunk_of[after->slot_of[c]], c);
    }
}

/* Urgent misses come first, both parts ascend. */
static void check_fetch_order(const lane *l, const kvd_window_result *r, bool strict)
{
    for (uint32_t i = 0; i < r->n_miss; i++) {
        bool urgent = strict;

        for (uint32_t k = 0; k < l->n_sel; k++)
            urgent |= l->sel[k] == (l->fetch[i] | KVD_SELECT_URGENT);
        assert_int_equal(urgent, i < r->n_urgent);
        if (i > 0 && i != r->n_urgent)
            assert_true(l->fetch[i] > l->fetch[i - 1]);
    }
}

static void step_and_check(lane *l, uint32_t step, kvd_evict_policy policy, bool strict)
{
    static lane       before;
    kvd_window_result r;

    before = *l;
    r      = run(l, step, false, policy, strict);
    check_step(&before, l, &r, policy);
    check_fetch_order(l, &r, strict);
}

/* 5 chunks, 3 slots: every window, every selection of at most 3, every urgency, several ranks. */
static void test_every_small_case(void **state)
{
    static const uint16_t ranks[][5] = {
        { 1, 2, 3, 4, 5 }, { 5, 4, 3, 2, 1 }, { 7, 7, 7, 7, 7 }, { 2, 9, 2, 9, 2 }
    };
    static lane l;
    uint32_t    n_case = 0;

    (void)state;
    for (uint32_t w = 0; w < 6 * 6 * 6; w++) {
        const uint32_t in[3] = { w % 6, w / 6 % 6, w / 36 };

        if ((in[0] < 5 && (in[0] == in[1] || in[0] == in[2])) || (in[1] < 5 && in[1] == in[2]))
            continue;
        for (uint32_t s = 0; s < 1u << 10; s++) {
            for (uint32_t k = 0; k < KVD_COUNTOF(ranks); k++) {
                lane_init(&l, 5, 3);
                for (uint32_t i = 0; i < 3; i++) {
                    l.stamp[i] = (in[i] * 7 + k) % 3;
                    if (in[i] < 5) {
                        l.chunk_of[i]    = in[i];
                        l.slot_of[in[i]] = (uint16_t)i;
                    }
                }
                memcpy(l.ema, ranks[k], sizeof(ranks[k]));
                for (uint32_t c = 0; c < 5; c++) {
                    if (s >> c & 1)
                        l.sel[l.n_sel++] = c | (s >> (5 + c) & 1 ? KVD_SELECT_URGENT : 0);
                }
                if (l.n_sel > 3)
                    continue;
                step_and_check(&l, 9, k % 2 ? KVD_EVICT_LRU : KVD_EVICT_EMA, s >> 9 & 1);
                n_case++;
            }
        }
    }
    assert_true(n_case > 100000);
}

static uint32_t random_selection(lane *l, uint32_t most, kvd_rng *rng)
{
    const uint32_t want = 1 + (uint32_t)kvd_rng_below(rng, most);

    l->n_sel = 0;
    for (uint32_t c = 0; c < l->n_chunk && l->n_sel < want; c++) {
        if (kvd_rng_below(rng, l->n_chunk - c) < want - l->n_sel)
            l->sel[l->n_sel++] = c | (kvd_rng_below(rng, 8) == 0 ? KVD_SELECT_URGENT : 0);
    }
    return l->n_sel;
}

static void test_random_runs(void **state)
{
    static lane l;
    kvd_rng     rng;

    (void)state;
    kvd_rng_seed(&rng, test_seed);
    for (uint32_t p = 0; p < 3; p++) { /* RANDOM has no model here; see below */
        for (uint32_t round = 0; round < 30; round++) {
            lane_init(&l, 20 + (uint32_t)kvd_rng_below(&rng, N_CHUNK_MAX - 20),
                      2 + (uint32_t)kvd_rng_below(&rng, N_SLOT_MAX - 2));
            for (uint32_t step = 1; step < 40; step++) {
                for (uint32_t c = 0; c < l.n_chunk; c++)
                    l.ema[c] = (uint16_t)kvd_rng_below(&rng, 40);
                random_selection(&l, l.cap, &rng);
                step_and_check(&l, step, (kvd_evict_policy)p, round % 2);
            }
        }
    }
}

/* Random eviction depends on step and chunk alone, takes only what is not selected, and differs
 * from step to step. */
static void test_random_policy(void **state)
{
    static lane a, b;
    uint32_t    differ = 0;

    (void)state;
    for (uint32_t step = 1; step < 20; step++) {
        lane_init(&a, 100, 10);
        for (uint32_t i = 0; i < 10; i++) {
            a.chunk_of[i] = i;
            a.slot_of[i]  = (uint16_t)i;
        }
        a.n_sel  = 2;
        a.sel[0] = 3;
        a.sel[1] = 50;
        b        = a;
        run(&a, step, false, KVD_EVICT_RANDOM, false);
        run(&b, step, false, KVD_EVICT_RANDOM, false);
        assert_memory_equal(&a, &b, sizeof(a));
        assert_int_not_equal(a.slot_of[3], KVD_SLOT_NONE);
        differ += a.slot_of[50] != 0;
    }
    assert_true(differ > 5);
}

/* The first step after a prompt: whatever was there goes, the selection comes, all of it urgent. */
static void test_refill(void **state)
{
    static lane       l;
    kvd_window_result r;

    (void)state;
    lane_init(&l, 40, 6);
    l.chunk_of[1] = 7;
    l.slot_of[7]  = 1;
    l.n_sel       = 5;
    for (uint32_t i = 0; i < 5; i++)
        l.sel[i] = 6 + i; /* 7 among them */
    r = run(&l, 1, true, KVD_EVICT_EMA, false);
    assert_int_equal(r.n_hit, 0);
    assert_int_equal(r.n_miss, 5);
    assert_int_equal(r.n_urgent, 5);
    assert_int_equal(r.n_stay, 0);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(l.fetch[i], 6 + i);
        assert_int_equal(l.into[i], i);
    }
    assert_int_equal(l.chunk_of[5], KVD_CHUNK_NONE);
}

static int open_backend(void **state)
{
    const kvd_backend_limits lim = { .n_token   = 1,
                                     .n_seq     = 1,
                                     .n_col     = 1,
                                     .n_head    = 1,
                                     .n_kv_head = 1,
                                     .head_dim  = 16,
                                     .n_ctx     = 16,
                                     .n_slot    = N_SLOT_MAX };

    (void)state;
    return kvd_backend_open(&be, &(kvd_backend_params){ .n_thread = 1 }, NULL) != KVD_OK ||
           be->ops->stream_open(be, &stream, NULL) != KVD_OK ||
           be->ops->reserve(be, &lim, NULL) != KVD_OK;
}

static int close_backend(void **state)
{
    (void)state;
    be->ops->stream_close(stream);
    kvd_backend_close(be);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_every_small_case),
                                        cmocka_unit_test(test_random_runs),
                                        cmocka_unit_test(test_random_policy),
                                        cmocka_unit_test(test_refill) };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 0);
    print_message("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, open_backend, close_backend);
}
