/* SPDX-License-Identifier: Apache-2.0 */
/* test_api.c - callers who get the public functions wrong: struct sizes, impossible numbers, ids
 * and rows that are not there, samplers over logits that are no numbers.  Nothing may crash,
 * nothing wrong may be taken for right. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_params), cmocka_unit_test(test_session_params),
        cmocka_unit_test(test_odd_sessions), cmocka_unit_test(test_two_sessions),
        cmocka_unit_test(test_text),         cmocka_unit_test(test_sampler_extremes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
