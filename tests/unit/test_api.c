/* SPDX-License-Identifier: Apache-2.0 */
/* test_api.c - callers who get the public functions wrong: struct sizes, impossible numbers, ids
 * and rows that are not there, samplers over logits that are no numbers.  Nothing may crash,
 * nothing wrong may be taken for right. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kvdrive.h"

#define N_VOCAB 264
#define TINY    KVD_TEST_DATA "/tiny/llama.gguf"

static kvd_err err;

static kvd_model *open_tiny(void)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    kvd_model       *m;

    p.path     = TINY;
    p.n_thread = 1;
    assert_int_equal(kvd_model_open(&m, &p, &err), KVD_OK);
    return m;
}

static void refuse_model(const kvd_model_params *p)
{
    kvd_model *m = (kvd_model *)&err;

    assert_int_equal(kvd_model_open(&m, p, &err), KVD_E_INVAL);
    assert_null(m);
    assert_int_not_equal(err.msg[0], 0);
    assert_int_equal(kvd_model_open(&m, p, NULL), KVD_E_INVAL);
}

static void test_model_params(void **state)
{
    static const float     base[] = { NAN, -3.0f, 0.5f, 1.0f, INFINITY };
    const kvd_model_params ok     = { .struct_size = sizeof(ok), .path = TINY, .n_thread = 1 };
    kvd_model_params       p      = ok;

    (void)state;
    refuse_model(NULL);
    p.struct_size = 0;
    refuse_model(&p);
    p.struct_size = SIZE_MAX;
    refuse_model(&p);
    p.struct_size = sizeof(size_t); /* a caller who knows no field gives no path */
    refuse_model(&p);
    p         = ok;
    p.backend = "none such";
    refuse_model(&p);
    p         = ok;
    p.cpu_isa = "none such";
    refuse_model(&p);
    p          = ok;
    p.n_thread = 5000;
    refuse_model(&p);
    p              = ok;
    p.rope_scaling = (kvd_rope_scaling)77;
    refuse_model(&p);
    p              = ok;
    p.rope_scaling = KVD_ROPE_YARN;
    p.rope_factor  = NAN;
    refuse_model(&p);
    p = ok;
    for (size_t i = 0; i < sizeof(base) / sizeof(*base); i++) {
        p.rope_base = base[i];
        refuse_model(&p);
    }
}

static void refuse_session(kvd_model *m, kvd_session_params p)
{
    kvd_plan     plan = { .struct_size = sizeof(plan) };
    kvd_session *s    = (kvd_session *)&err;

    p.struct_size = sizeof(p);
    assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_E_INVAL);
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_E_INVAL);
    assert_null(s);
}

static void test_session_params(void **state)
{
    kvd_model *m = open_tiny();

    (void)state;
    refuse_session(m, (kvd_session_params){ .n_ctx = UINT32_MAX });
    refuse_session(m, (kvd_session_params){ .n_ctx = 8, .n_seq = 4097 });
    refuse_session(m, (kvd_session_params){ .n_ctx = 8, .n_batch = 16385 });
    refuse_session(m, (kvd_session_params){ .n_ctx = 8, .kv_tokens = UINT64_MAX });
    refuse_session(m, (kvd_session_params){ .n_ctx = 8, .kv_tokens = 1ull << 56 });
    refuse_session(m, (kvd_session_params){ .n_ctx = 8, .kv_type = (kvd_kv_type)9 });
    kvd_model_close(m);
}

static void use_session(kvd_model *m, kvd_session_params p)
{
    const int32_t id[4] = { 1, 2, 3, 4 };
    kvd_session  *s;

    p.struct_size = sizeof(p);
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_OK);
    assert_int_equal(kvd_prefill(s, 0, id, 4, NULL, NULL, &err), KVD_OK);
    assert_int_equal(kvd_prefill(s, 0, id, 0, NULL, NULL, &err), KVD_E_INVAL);
    assert_int_equal(kvd_prefill(s, 0, NULL, 1, NULL, NULL, &err), KVD_E_INVAL);
    assert_int_equal(kvd_prefill(s, 0, id, SIZE_MAX, NULL, NULL, &err), KVD_E_FULL);
    assert_int_equal(kvd_eval(s, NULL, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_truncate(s, 0, UINT32_MAX, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_truncate(s, UINT32_MAX, 0, &err), KVD_E_INVAL);
    assert_int_equal(kvd_seq_len(s, 0), 4);
    assert_int_equal(kvd_seq_len(s, UINT32_MAX), 0);
    assert_null(kvd_logits(s, UINT32_MAX));
    kvd_session_close(s);
}

static void test_odd_sessions(void **state)
{
    kvd_model *m = open_tiny();

    (void)state;
    use_session(m, (kvd_session_params){ .n_ctx = 8, .n_batch = 1, .n_seq = 4 });
    use_session(m, (kvd_session_params){ .n_ctx = 8, .n_seq = 4096, .kv_tokens = 1024 });
    use_session(m, (kvd_session_params){ .n_ctx = 8, .kv_tokens = 1 });
    use_session(m, (kvd_session_params){ .n_ctx = 8, .n_logits = UINT32_MAX });
    kvd_model_close(m);
}

/* ---- structs that come out ------------------------------------------------------------------ */

typedef union any_out {
    size_t         struct_size;
    kvd_model_info info;
    kvd_plan       plan;
    kvd_stats      stats;
    kvd_stages     stages;
    kvd_placement  placement;
    kvd_tool_event event;
} any_out;

static char logged[KVD_ERR_MSG_BYTES];

static void log_last(void *ctx, kvd_log_level level, const char *msg)
{
    (void)ctx;
    assert_int_equal(level, KVD_LOG_ERROR);
    snprintf(logged, sizeof(logged), "%s", msg);
}

static void test_out_structs(void **state)
{
    static const size_t      none[] = { 0, 1, sizeof(size_t) - 1, 65537, SIZE_MAX };
    const kvd_session_params p      = { .struct_size = sizeof(p), .n_ctx = 8 };
    kvd_model               *m      = open_tiny();
    kvd_tool_stream         *t;
    kvd_session             *s;
    kvd_tool_event           e = KVD_TOOL_EVENT_INIT;

    (void)state;
    assert_int_equal(kvd_session_open(&s, m, &p, &err), KVD_OK);
    assert_int_equal(kvd_tool_open(&t, KVD_TOOLS_HERMES, &err), KVD_OK);
    kvd_set_log(log_last, NULL);
    for (size_t i = 0; i < sizeof(none) / sizeof(*none); i++) {
        any_out o, was;

        memset(&o, 0x55, sizeof(o));
        o.struct_size = none[i];
        was           = o;
        assert_int_equal(kvd_session_plan(m, &p, &o.plan, &err), KVD_E_INVAL);
        assert_non_null(strstr(err.msg, "kvd_plan.struct_size"));
        assert_int_equal(kvd_model_get_info(m, &o.info), KVD_E_INVAL);
        assert_non_null(strstr(logged, "kvd_model_info.struct_size"));
        assert_int_equal(kvd_session_get_stats(s, &o.stats), KVD_E_INVAL);
        assert_non_null(strstr(logged, "kvd_stats.struct_size"));
        assert_int_equal(kvd_session_get_stages(s, &o.stages), KVD_E_INVAL);
        assert_non_null(strstr(logged, "kvd_stages.struct_size"));
        assert_false(kvd_seq_placement(s, 0, &o.placement));
        assert_non_null(strstr(logged, "kvd_placement.struct_size"));
        assert_int_equal(kvd_tool_feed(t, "x", 1, &err), KVD_OK);
        assert_false(kvd_tool_next(t, &o.event));
        assert_non_null(strstr(logged, "kvd_tool_event.struct_size"));
        assert_int_equal(kvd_tool_feed(t, "y", 1, &err), KVD_E_INVAL);
        assert_int_equal(kvd_tool_flush(t, &err), KVD_E_INVAL);
        assert_int_equal(kvd_tool_cut(t, false, &err), KVD_E_INVAL);
        assert_non_null(strstr(err.msg, "kvd_tool_event.struct_size"));
        assert_true(kvd_tool_next(t, &e) && e.kind == KVD_TOOL_EVENT_TEXT);
        assert_string_equal(e.text, "x"); /* nothing was lost */
        assert_memory_equal(&o, &was, sizeof(o));
    }
    assert_int_equal(kvd_session_plan(m, &p, NULL, &err), KVD_E_INVAL);
    assert_int_equal(kvd_session_get_stats(s, NULL), KVD_E_INVAL);
    kvd_set_log(NULL, NULL);
    kvd_tool_close(t);
    kvd_session_close(s);
    kvd_model_close(m);
}

/* A caller of an older header gets what its struct has room for. */
static void test_short_out_struct(void **state)
{
    kvd_model     *m    = open_tiny();
    kvd_model_info info = KVD_MODEL_INFO_INIT;

    (void)state;
    info.struct_size = offsetof(kvd_model_info, backend);
    assert_int_equal(kvd_model_get_info(m, &info), KVD_OK);
    assert_int_equal(info.struct_size, offsetof(kvd_model_info, backend));
    assert_string_equal(info.arch, "llama");
    assert_null(info.backend);
    info = (kvd_model_info)KVD_MODEL_INFO_INIT;
    assert_int_equal(kvd_model_get_info(m, &info), KVD_OK);
    assert_string_equal(info.backend, "cpu");
    assert_int_equal(info.n_vocab, N_VOCAB);
    kvd_model_close(m);
}

/* Messages name fields and no program's options. */
static void test_messages_name_fields(void **state)
{
    static const struct {
        kvd_session_params   p;
        kvd_attention_params a;
        const char          *says;
    } bad[] = {
        { { .n_ctx = 1000 }, { 0 }, "(n_ctx)" },
        { { .n_ctx = 8, .n_seq = 9999 }, { 0 }, "(n_seq)" },
        { { .n_ctx = 8, .n_batch = 99999 }, { 0 }, "(n_batch)" },
        { { .n_ctx = 8, .chunk_tokens = 5 }, { 0 }, "(chunk_tokens)" },
        { { .n_ctx = 8, .n_sink = 3 }, { 0 }, "(n_sink)" },
        { { .n_ctx = 8, .disk_lag = 65 }, { 0 }, "(disk_lag)" },
        { { .n_ctx = 8 }, { .cap = 0.5f }, "(cap)" },
        { { .n_ctx = 8 }, { .zone = 7 }, "(zone)" },
        { { .n_ctx = 8 }, { .evict = (kvd_evict)9 }, "kvd_attention_params.evict" },
        { { .n_ctx = 8 }, { .index = "none" }, "(index)" },
        { { .n_ctx = 8 }, { .group_rule = "none" }, "(group_rule)" },
    };
    kvd_model *m = open_tiny();

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        kvd_attention_params a    = bad[i].a;
        kvd_session_params   p    = bad[i].p;
        kvd_plan             plan = KVD_PLAN_INIT;

        a.struct_size = sizeof(a);
        a.mode        = a.mode ? a.mode : KVD_ATTENTION_SPARSE;
        p.struct_size = sizeof(p);
        p.attention   = &a;
        assert_int_equal(kvd_session_plan(m, &p, &plan, &err), KVD_E_INVAL);
        if (!strstr(err.msg, bad[i].says) || strstr(err.msg, "--") || strstr(err.msg, "(-"))
            fail_msg("'%s' does not say %s", err.msg, bad[i].says);
    }
    kvd_model_close(m);
}

/* One session must not depend on another one's scratch, nor on the order of closing. */
static void test_two_sessions(void **state)
{
    kvd_model         *m     = open_tiny();
    kvd_session_params p     = KVD_SESSION_PARAMS_INIT;
    const int32_t      id[4] = { 1, 2, 3, 4 };
    float              x[N_VOCAB];
    kvd_session       *a, *b;

    (void)state;
    p.n_ctx   = 16;
    p.n_batch = 2;
    assert_int_equal(kvd_session_open(&a, m, &p, &err), KVD_OK);
    assert_int_equal(kvd_prefill(a, 0, id, 4, NULL, NULL, &err), KVD_OK);
    memcpy(x, kvd_logits(a, 0), sizeof(x));
    p.n_batch = 64;
    assert_int_equal(kvd_session_open(&b, m, &p, &err), KVD_OK);
    assert_int_equal(kvd_prefill(b, 0, id, 4, NULL, NULL, &err), KVD_OK);
    assert_memory_equal(kvd_logits(a, 0), x, sizeof(x));
    kvd_session_close(a);
    assert_int_equal(kvd_prefill(b, 0, id, 4, NULL, NULL, &err), KVD_OK);
    kvd_session_close(b);
    kvd_model_close(m);
    kvd_session_close(NULL);
    kvd_model_close(NULL);
    kvd_sampler_close(NULL);
    kvd_detok_close(NULL);
    kvd_free(NULL);
}

static void test_text(void **state)
{
    const kvd_span crossed[] = { { 0, 2 }, { 1, 3 } }, beyond = { 2, SIZE_MAX };
    kvd_model     *m = open_tiny();
    int32_t        id[8];
    size_t         n;

    (void)state;
    assert_int_equal(kvd_tokenize(m, NULL, 0, NULL, 0, true, NULL, 0, &n, &err), KVD_OK);
    assert_int_equal(kvd_tokenize(m, "abc", 3, NULL, 0, false, NULL, 0, &n, &err), KVD_E_FULL);
    assert_int_equal(n, 3);
    assert_int_equal(kvd_tokenize(m, "abc", 3, crossed, 2, false, id, 8, &n, &err), KVD_E_INVAL);
    assert_int_equal(kvd_tokenize(m, "abc", 3, &beyond, 1, false, id, 8, &n, &err), KVD_E_INVAL);
    kvd_token_bytes(m, INT32_MIN, &n);
    assert_int_equal(n, 0);
    assert_false(kvd_token_is_end(m, -5));
    assert_false(kvd_token_is_special(m, INT32_MAX));
    kvd_model_close(m);
}

/* Whatever the logits and the temperature are, an id of the vocabulary comes out. */
static void test_sampler_extremes(void **state)
{
    static const float fill[] = { 1.0f, NAN, -INFINITY, INFINITY, FLT_MAX, -FLT_MAX };
    static const float temp[] = { -1.0f, 0.0f, 1e-45f, 1e-30f, 1.0f, 1e30f, FLT_MAX };
    kvd_model         *m      = open_tiny();
    float              logits[N_VOCAB];

    (void)state;
    for (size_t f = 0; f < sizeof(fill) / sizeof(*fill); f++) {
        for (size_t i = 0; i < N_VOCAB; i++)
            logits[i] = fill[f];
        for (size_t i = 0; i < 4 * sizeof(temp) / sizeof(*temp); i++) {
            kvd_sampler_params p = KVD_SAMPLER_PARAMS_INIT;
            kvd_sampler       *sm;

            p.temperature = temp[i / 4];
            p.top_k       = i % 4 == 0 ? 1 : 0;
            p.top_p       = i % 4 == 1 ? 0.0f : 1.0f;
            p.min_p       = i % 4 == 2 ? 1e30f : 0.0f;
            if (i % 4 == 3) {
                p.repeat_penalty    = FLT_MAX;
                p.frequency_penalty = -FLT_MAX;
                p.penalty_last_n    = -1;
            }
            assert_int_equal(kvd_sampler_open(&sm, m, &p, &err), KVD_OK);
            for (int k = 0; k < 4; k++)
                assert_in_range(kvd_sampler_sample(sm, logits), 0, N_VOCAB - 1);
            kvd_sampler_close(sm);
        }
    }
    kvd_model_close(m);
}

/* DRY on "yabzqyabz": q followed "yabz".  A breaker in the text leaves only what is behind it. */
static void test_sequence_breakers(void **state)
{
    static const char *const list[] = { ":", "ab" }; /* two tokens make one */
    const char               text[] = "yabzqyabz";
    kvd_model               *m      = open_tiny();

    (void)state;
    for (size_t n = 0; n < 4; n++) { /* 3: the usual ones */
        kvd_sampler_params p               = KVD_SAMPLER_PARAMS_INIT;
        float              logits[N_VOCAB] = { 0 };
        kvd_sampler       *sm;
        int32_t            id[64];
        size_t             n_id;

        p.temperature    = 0.0f;
        p.dry_multiplier = 10.0f;
        p.dry_breaker    = n == 3 ? NULL : list;
        p.n_dry_breaker  = n;
        assert_int_equal(kvd_tokenize(m, "q", 1, NULL, 0, false, id, 64, &n_id, &err), KVD_OK);
        assert_int_equal(n_id, 1);
        logits[id[0]]     = 5.0f;
        const int32_t q   = id[0];
        const size_t  len = strlen(text);
        assert_int_equal(kvd_sampler_open(&sm, m, &p, &err), KVD_OK);
        assert_int_equal(kvd_tokenize(m, text, len, NULL, 0, false, id, 64, &n_id, &err), KVD_OK);
        assert_int_equal(n_id, len);
        for (size_t i = 0; i < n_id; i++)
            kvd_sampler_accept(sm, id[i]);
        if (n == 2)
            assert_int_equal(kvd_sampler_sample(sm, logits), q);
        else
            assert_int_not_equal(kvd_sampler_sample(sm, logits), q);
        kvd_sampler_close(sm);
    }
    kvd_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_params),         cmocka_unit_test(test_session_params),
        cmocka_unit_test(test_odd_sessions),         cmocka_unit_test(test_two_sessions),
        cmocka_unit_test(test_out_structs),          cmocka_unit_test(test_short_out_struct),
        cmocka_unit_test(test_messages_name_fields), cmocka_unit_test(test_text),
        cmocka_unit_test(test_sampler_extremes),     cmocka_unit_test(test_sequence_breakers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
