/* SPDX-License-Identifier: Apache-2.0 */
/* test_profile_host.c - host tiers that follow a profile: by hand, and what a plan makes of lanes
 * that stall and lanes that do not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine_profile.h"
#include "plan/plan.h"

enum { LANES = 2, CHUNKS = 16, CAP = 4 };

static uint32_t          n_chunk[LANES], read_list[CHUNKS];
static uint16_t          held[LANES * ENGINE_PROFILE_CAPS * CHUNKS];
static uint64_t          rank[CHUNKS];
static engine_host_tiers tiers = {
    .n_chunk_max = CHUNKS, .n_chunk = n_chunk, .held = held, .rank = rank, .read = read_list
};

static bool holds(uint32_t lane, uint32_t size, uint32_t chunk)
{
    return held[((uint64_t)lane * ENGINE_PROFILE_CAPS + CAP) * CHUNKS + chunk] >> size & 1;
}

static void check_reads(const engine_lane_profile *p, const uint64_t urgent[4],
                        const uint64_t late[4])
{
    for (uint32_t size = 0; size < 4; size++) {
        assert_int_equal(p->urgent_read[CAP][size], urgent[size]);
        assert_int_equal(p->late_read[CAP][size], late[size]);
    }
}

/* Tiers of 0, 1, 2 and 4 records. */
static void test_by_hand(void **state)
{
    static const uint32_t order[] = { 3, 5, 1 }, first[] = { 1, 5 }, again[] = { 1 }, old[] = { 3 };
    uint16_t              ema[CHUNKS] = { [3] = 10, [5] = 5, [1] = 7 };
    engine_lane_profile   p           = { 0 };

    (void)state;
    assert_int_equal(engine_host_records(CHUNKS, 3), 4);
    assert_int_equal(engine_host_records(CHUNKS, ENGINE_PROFILE_SIZES - 1), CHUNKS);
    memset(held, 0xff, sizeof(held)); /* of a text before */
    engine_host_start(&tiers, 0, 8, order, 3);
    assert_true(holds(0, 1, 3) && !holds(0, 1, 5) && holds(0, 2, 5) && !holds(0, 2, 1));
    assert_true(!holds(0, 0, 3) && holds(0, 3, 1) && !holds(0, 3, 0));

    /* chunk 1 is waited for and takes the place of 5, which is then read again and not kept */
    engine_host_step(&tiers, 0, CAP, ema, 8, first, 1, 2, &p);
    engine_host_end_step(&tiers, 0, 8);
    check_reads(&p, (uint64_t[]){ 1, 1, 1, 0 }, (uint64_t[]){ 1, 1, 1, 0 });
    assert_true(holds(0, 1, 3) && holds(0, 2, 3) && holds(0, 2, 1) && !holds(0, 2, 5));

    engine_host_step(&tiers, 0, CAP, ema, 8, again, 1, 1, &p);
    engine_host_end_step(&tiers, 0, 8);
    check_reads(&p, (uint64_t[]){ 2, 2, 1, 0 }, (uint64_t[]){ 1, 1, 1, 0 });

    /* chunks 8 and 9 are sealed: they come first, and are the first to go for what is read */
    engine_host_step(&tiers, 0, CAP, ema, 10, old, 0, 1, &p);
    engine_host_end_step(&tiers, 0, 10);
    check_reads(&p, (uint64_t[]){ 2, 2, 1, 0 }, (uint64_t[]){ 2, 2, 2, 0 });
    assert_true(holds(0, 1, 3) && holds(0, 2, 3) && holds(0, 2, 9) && !holds(0, 2, 8));
    assert_true(holds(0, 3, 3) && holds(0, 3, 8) && holds(0, 3, 9) && holds(0, 3, 1));
    assert_true(!holds(1, 1, 3) || held[ENGINE_PROFILE_CAPS * CHUNKS] == 0xffff); /* lane 1 apart */
}

/* Lane 0 asks for one chunk again and again, lane 1 for eight in turn. */
static void test_lane_that_stalls_gets_more(void **state)
{
    static const uint32_t order[CHUNKS] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    static const plan_key key           = { .fingerprint  = "x",
                                            .n_layer      = 1,
                                            .n_kv_head    = LANES,
                                            .head_dim     = 64,
                                            .chunk_tokens = 4,
                                            .budget       = 4,
                                            .index        = "box" };
    engine_lane_profile   p[LANES]      = { 0 };
    uint32_t              record[LANES];
    plan_shares           shares;
    plan_file             f;

    (void)state;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        uint16_t ema[CHUNKS] = { 0 };

        engine_host_start(&tiers, lane, CHUNKS, order, CHUNKS);
        for (uint32_t step = 0; step < 200; step++) {
            const uint32_t chunk = lane == 0 ? 15 : 8 + step % 8;

            ema[chunk] = 100;
            engine_host_step(&tiers, lane, CAP, ema, CHUNKS, &chunk, 1, 1, &p[lane]);
            engine_host_end_step(&tiers, lane, CHUNKS);
        }
    }
    assert_int_equal(p[0].urgent_read[CAP][0], 200);
    assert_int_equal(p[0].urgent_read[CAP][1], 1); /* one record is all it needs */
    assert_int_equal(p[1].urgent_read[CAP][4], 8); /* lane 1 takes eight */
    assert_true(p[1].urgent_read[CAP][3] > 90);
    assert_int_equal(p[1].urgent_read[CAP][6], 0);
    assert_int_equal(plan_file_init(&f, &key, 1, NULL), KVD_OK);
    assert_int_equal(plan_file_add_host(&f, ENGINE_PROFILE_SIZES, NULL), KVD_OK);
    f.n_step       = 200;
    f.lane_records = CHUNKS;
    for (uint32_t i = 0; i < LANES * ENGINE_PROFILE_SIZES; i++) {
        const uint32_t k = i % ENGINE_PROFILE_SIZES;

        f.size[k]   = engine_host_records(CHUNKS, k);
        f.urgent[i] = p[i / ENGINE_PROFILE_SIZES].urgent_read[CAP][k];
    }
    assert_int_equal(plan_file_share_host(&f, 10, CHUNKS, record, &shares, NULL), KVD_OK);
    assert_true(shares.by_stalls && record[1] >= 8 && record[0] >= 1 && record[0] <= 2);
    assert_true(shares.shared_urgent < 0.1 && shares.equal_urgent > 0.3);
    plan_file_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_lane_that_stalls_gets_more),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
