/* SPDX-License-Identifier: Apache-2.0 */
/* test_profile_windows.c - the profile's windows against a session's own, the optimum against
 * trying everything. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/engine_profile.h"

enum { N_PROMPT = 1500, N_GEN = 120, N_CTX = N_PROMPT + N_GEN, BUDGET = 72 };

static kvd_err err;

static kvd_model *open_model(void)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    kvd_model       *m;

    p.path         = KVD_TEST_DATA "/tiny/qwen3.gguf";
    p.n_thread     = 2;
    p.rope_scaling = KVD_ROPE_LINEAR; /* for the context, not for sense */
    p.rope_factor  = 32.0f;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return m;
}

static kvd_session *open_session(kvd_model *m, kvd_evict evict, uint32_t cap)
{
    kvd_session_params   p = KVD_SESSION_PARAMS_INIT;
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    kvd_session         *s;

    a.mode      = KVD_ATTENTION_SPARSE;
    a.budget    = BUDGET;
    a.cap       = engine_profile_cap[cap];
    a.evict     = evict;
    a.min_mass  = -1.0f;
    p.n_ctx     = N_CTX;
    p.attention = &a;
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return s;
}

static void run_text(kvd_session *s, uint32_t seed)
{
    int32_t token[N_CTX];

    for (uint32_t i = 0; i < N_CTX; i++)
        token[i] = (int32_t)((i * 37 + seed * 101 + i * i % 13 + i / 97) % 256);
    assert_int_equal(kvd_seq_truncate(s, 0, 0, &err), KVD_OK);
    assert_int_equal(kvd_prefill(s, 0, token, N_PROMPT, NULL, NULL, &err), KVD_OK);
    for (uint32_t i = N_PROMPT; i < N_CTX; i++) {
        kvd_batch b = KVD_BATCH_INIT;

        b.n_token = 1;
        b.token   = token + i;
        if (kvd_eval(s, &b, &err) != KVD_OK)
            fail_msg("%s", err.msg);
    }
}

/* The window of the session's own policy and cap has exactly the session's hits, lane by lane, over
 * two texts and sealing; and watching changes nothing. */
static void test_own_window(void **state)
{
    static const kvd_evict policy[] = { KVD_EVICT_BY_EMA, KVD_EVICT_BY_LRU, KVD_EVICT_BY_LFU,
                                        KVD_EVICT_BY_RANDOM };
    kvd_model             *m        = open_model();
    const model_hparams   *hp       = model_get_hparams(m->net);

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(policy) * ENGINE_PROFILE_CAPS; i++) {
        const uint32_t             cap = i % ENGINE_PROFILE_CAPS;
        const kvd_evict            by  = policy[i / ENGINE_PROFILE_CAPS];
        kvd_session               *s = open_session(m, by, cap), *t = open_session(m, by, cap);
        kvd_stats                  st = { .struct_size = sizeof(st) };
        const engine_lane_profile *lane;
        engine_profile            *p;
        uint64_t                   selected = 0;

        assert_int_equal(engine_profile_open(&p, s, N_GEN, &err), KVD_OK);
        for (uint32_t text = 0; text < 2; text++) {
            run_text(s, text);
            run_text(t, text);
            assert_memory_equal(kvd_logits(s, 0), kvd_logits(t, 0), hp->n_vocab * sizeof(float));
            assert_int_equal(engine_profile_end(p, &err), KVD_OK);
        }
        lane = engine_profile_lanes(p);
        assert_int_equal(engine_profile_budget(p), BUDGET / 4);
        for (uint32_t l = 0; l < hp->n_layer * hp->n_kv_head; l++) {
            uint64_t n_select, n_hit;

            kv_lane_counts(s->kv, l / hp->n_kv_head, l % hp->n_kv_head, &n_select, &n_hit);
            assert_int_equal(lane[l].n_select, n_select);
            assert_int_equal(lane[l].hit[by][cap], n_hit);
            assert_true(lane[l].hit[ENGINE_PROFILE_OPTIMUM][cap] >= n_hit);
            selected += n_select;
        }
        kvd_session_get_stats(s, &st);
        assert_true(selected == st.n_selected && st.n_hit > 0);
        assert_true(st.n_miss > 0 && st.n_grown_blocks > 0);
        engine_profile_close(p);
        kvd_session_close(s);
        kvd_session_close(t);
    }
    kvd_model_close(m);
}

/* ---- the optimum -------------------------------------------------------------------- */

enum { CHUNKS = 7, STEPS = 7, SELECT = 3 };

/* Most hits from a step on, whatever leaves: window is a set of bits. */
static uint32_t try_all(const engine_trace *t, uint32_t step, uint32_t window, uint32_t slots)
{
    uint32_t want = 0, most = 0;

    if (step == t->n_step[0])
        return 0;
    for (uint32_t i = 0; i < t->n_sel[step]; i++)
        want |= 1u << engine_trace_sel(t, 0, step)[i];
    for (uint32_t kept = 0; kept < 1u << CHUNKS; kept++) {
        uint32_t n;

        if ((kept & ~(window | want)) || (kept & want) != want ||
            (uint32_t)__builtin_popcount(kept) > slots)
            continue;
        n    = try_all(t, step + 1, kept, slots);
        most = n > most ? n : most;
    }
    return most + (uint32_t)__builtin_popcount(want & window);
}

static void test_optimum(void **state)
{
    uint32_t     n_step = 0, n_chunk = CHUNKS, n_sel[STEPS], sel[STEPS * SELECT], n_start = 0;
    uint32_t     start[CHUNKS], next_use[STEPS * SELECT], next[CHUNKS], seen[CHUNKS];
    uint32_t     window[CHUNKS], n_at[STEPS + 1], differ = 0;
    uint8_t      held[CHUNKS];
    kvd_rng      rng;
    engine_trace t = { .n_lane      = 1,
                       .n_step_max  = STEPS,
                       .budget_max  = SELECT,
                       .slots_max   = CHUNKS,
                       .n_step      = &n_step,
                       .n_chunk_max = CHUNKS,
                       .n_chunk     = &n_chunk,
                       .n_sel       = n_sel,
                       .sel         = sel,
                       .n_start     = &n_start,
                       .start       = start,
                       .next_use    = next_use,
                       .next        = next,
                       .seen        = seen,
                       .held        = held,
                       .window      = window,
                       .n_at        = n_at };

    (void)state;
    kvd_rng_seed(&rng, 7);
    for (uint32_t round = 0; round < 300; round++) {
        const uint32_t slots = SELECT + (uint32_t)kvd_rng_below(&rng, 3);
        uint32_t       first = 0, most;

        n_step  = STEPS - 2 + (uint32_t)kvd_rng_below(&rng, 3);
        n_start = 1 + (uint32_t)kvd_rng_below(&rng, CHUNKS);
        for (uint32_t i = 0; i < n_start; i++)
            start[i] = (i * 3 + round) % CHUNKS;
        for (uint32_t s = 0; s < n_step; s++) {
            const uint32_t at = (uint32_t)kvd_rng_below(&rng, CHUNKS);

            n_sel[s] = 1 + (uint32_t)kvd_rng_below(&rng, SELECT);
            for (uint32_t i = 0; i < n_sel[s]; i++)
                sel[s * SELECT + i] = (at + i * 2) % CHUNKS;
        }
        for (uint32_t i = 0; i < n_start && i < slots; i++)
            first |= 1u << start[i];
        most = try_all(&t, 1, first, slots);
        assert_int_equal(engine_trace_optimum(&t, 0, slots), most);
        differ |= 1u << (most % 32);
    }
    assert_true(__builtin_popcount(differ) > 3);
}

/* Unions of the last selections, by hand. */
static void test_unions(void **state)
{
    uint32_t            n_step = 4, n_chunk = 6, n_sel[4] = { 2, 2, 1, 2 };
    uint32_t            sel[8] = { 0, 1, 1, 2, 0, 0, 2, 5 }, seen[6];
    engine_trace        t      = { .n_lane     = 1,
                                   .n_step_max = 4,
                                   .budget_max = 2,
                                   .n_step     = &n_step,
                                   .n_chunk    = &n_chunk,
                                   .n_sel      = n_sel,
                                   .sel        = sel,
                                   .seen       = seen };
    engine_lane_profile p      = { 0 };

    (void)state;
    engine_trace_unions(&t, 0, &p);
    assert_int_equal(p.union_hit[0], 1); /* step 1: 1; step 2: 0 was long ago; step 3: none */
    assert_int_equal(p.union_size[0], 2 + 2 + 1);
    assert_int_equal(p.union_hit[1], 1 + 1 + 1); /* 1; 0; 2 */
    assert_int_equal(p.union_size[1], 2 + 3 + 3);
    assert_int_equal(p.union_hit[5], 1 + 1 + 1);
    assert_int_equal(p.union_size[5], 2 + 3 + 3);
}

static void test_refusals(void **state)
{
    kvd_model           *m = open_model();
    kvd_session_params   p = KVD_SESSION_PARAMS_INIT;
    kvd_attention_params a = KVD_ATTENTION_PARAMS_INIT;
    engine_profile      *profile;
    kvd_session         *s;

    (void)state;
    p.n_ctx     = 300;
    p.attention = &a;
    a.mode      = KVD_ATTENTION_DENSE;
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_OK);
    assert_int_equal(engine_profile_open(&profile, s, 8, &err), KVD_E_INVAL);
    assert_null(profile);
    kvd_session_close(s);
    a.mode = KVD_ATTENTION_SPARSE; /* with the default of min_mass */
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_OK);
    assert_int_equal(engine_profile_open(&profile, s, 8, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "(min_mass)"));
    kvd_session_close(s);
    s = open_session(m, KVD_EVICT_BY_LOOKAHEAD, 2);
    assert_int_equal(engine_profile_open(&profile, s, 8, &err), KVD_E_INVAL);
    kvd_session_close(s);
    s = open_session(m, KVD_EVICT_BY_EMA, 2);
    assert_int_equal(engine_profile_open(&profile, s, 1, &err), KVD_E_INVAL);
    for (int64_t i = 0; i < 64; i++) { /* every allocation fails once */
        kvd_status st;

        kvd_alloc_fault(i, false);
        st = engine_profile_open(&profile, s, 8, &err);
        if (!kvd_alloc_fault_hit()) {
            assert_int_equal(st, KVD_OK);
            assert_true(i > 10);
            break;
        }
        assert_int_equal(st, KVD_E_NOMEM);
        assert_null(profile);
    }
    kvd_alloc_fault(-1, false);
    assert_int_equal(engine_profile_end(profile, &err), KVD_E_INVAL); /* no steps yet */
    engine_profile_close(profile);
    kvd_session_close(s);
    kvd_model_close(m);
    assert_int_equal(kvd_alloc_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_optimum),
        cmocka_unit_test(test_unions),
        cmocka_unit_test(test_own_window),
        cmocka_unit_test(test_refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
