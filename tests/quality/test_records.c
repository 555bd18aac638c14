/* SPDX-License-Identifier: Apache-2.0 */
/* test_records.c - what the form of records below the device costs: the text after a long prompt is
 * read on token by token, and each form's next-token distribution is compared with that of whole
 * records under the same attention.
 *
 *   test_records MODEL [--text FILE] [--prompt N] [--steps N] [--measure yes]
 *
 * KL(whole || form) in nats, mean and largest over the steps; whole records must give 0.  Limits
 * are three times what was measured with SmolLM2's file, and not those of --measure.  Exit 77: no
 * model. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvdrive.h"

#define TEXT_MAX  (1u << 20)
#define STEPS_MAX 512u

static const char *model_path, *text_path = "examples/long-text.txt";
static uint32_t    n_prompt = 2048, n_step = 48;
static bool        only_measure;

static kvd_model *model;
static int32_t   *token;
static uint32_t   n_vocab;
static float     *whole; /* [n_step][n_vocab] */
static kvd_err    err;

typedef struct record_form {
    const char   *name, *index;
    kvd_kv_record record;
    kvd_attention mode;
    double        limit; /* of the mean; 0: it is 0 */
} record_form;

static const record_form forms[] = {
    { "same, dense", NULL, KVD_KV_RECORD_SAME, KVD_ATTENTION_DENSE, 0.0 },
    { "same again, dense", NULL, KVD_KV_RECORD_SAME, KVD_ATTENTION_DENSE, 0.0 },
    { "int8, dense", NULL, KVD_KV_RECORD_INT8, KVD_ATTENTION_DENSE, 1.4e-4 },
    { "int4, dense", NULL, KVD_KV_RECORD_INT4, KVD_ATTENTION_DENSE, 1.1e-2 },
    { "values, dense", "quant-k", KVD_KV_RECORD_VALUES, KVD_ATTENTION_DENSE, 7.2e-3 },
    { "same, sparse", "quant-k", KVD_KV_RECORD_SAME, KVD_ATTENTION_SPARSE, 0.0 },
    { "same again, sparse", "quant-k", KVD_KV_RECORD_SAME, KVD_ATTENTION_SPARSE, 0.0 },
    { "int8, sparse", "quant-k", KVD_KV_RECORD_INT8, KVD_ATTENTION_SPARSE, 8e-4 },
    { "int4, sparse", "quant-k", KVD_KV_RECORD_INT4, KVD_ATTENTION_SPARSE, 1.5e-2 },
    { "values, sparse", "quant-k", KVD_KV_RECORD_VALUES, KVD_ATTENTION_SPARSE, 1e-2 },
};

static kvd_session *open_session(const record_form *f)
{
    kvd_attention_params a    = KVD_ATTENTION_PARAMS_INIT;
    kvd_session_params   p    = KVD_SESSION_PARAMS_INIT;
    kvd_plan             plan = { .struct_size = sizeof(plan) };
    kvd_session         *s;

    a.mode      = f->mode;
    a.budget    = n_prompt / 16;
    a.min_mass  = -1.0f;
    a.index     = f->index;
    p.n_ctx     = n_prompt + n_step + 1;
    p.attention = &a;
    p.kv_record = f->record;
    assert_int_equal(kvd_session_plan(model, &p, &plan, &err), KVD_OK);
    p.kv_device = plan.kv_device_bytes - 1; /* not resident: records move */
    if (kvd_session_open(&s, model, &p, &err) != KVD_OK)
        fail_msg("%s: %s", f->name, err.msg);
    return s;
}

static double log_sum_exp(const float *x)
{
    double max = (double)x[0], sum = 0.0;

    for (uint32_t i = 1; i < n_vocab; i++)
        max = fmax(max, (double)x[i]);
    for (uint32_t i = 0; i < n_vocab; i++)
        sum += exp((double)x[i] - max);
    return max + log(sum);
}

static double divergence(const float *p, const float *q)
{
    const double lp = log_sum_exp(p), lq = log_sum_exp(q);
    double       kl = 0.0;

    for (uint32_t i = 0; i < n_vocab; i++) {
        const double a = (double)p[i] - lp, b = (double)q[i] - lq;

        kl += exp(a) * (a - b);
    }
    return kl;
}

/* The mean over all steps; keep: these are the distributions that others are compared with. */
static double run(const record_form *f, bool keep)
{
    kvd_session *s   = open_session(f);
    kvd_stats    c   = { .struct_size = sizeof(c) };
    double       sum = 0.0, most = 0.0;

    if (kvd_prefill(s, 0, token, n_prompt, NULL, NULL, &err) != KVD_OK)
        fail_msg("%s: %s", f->name, err.msg);
    for (uint32_t i = 0; i < n_step; i++) {
        const int32_t t  = token[n_prompt + i];
        kvd_batch     b  = KVD_BATCH_INIT;
        float        *at = whole + (size_t)i * n_vocab;
        double        kl;

        b.n_token = 1;
        b.token   = &t;
        if (kvd_eval(s, &b, &err) != KVD_OK)
            fail_msg("%s: %s", f->name, err.msg);
        if (keep)
            memcpy(at, kvd_logits(s, 0), n_vocab * sizeof(float));
        kl = divergence(at, kvd_logits(s, 0));
        sum += kl;
        most = fmax(most, kl);
    }
    kvd_session_get_stats(s, &c);
    print_message("%-20s KL %.2e mean, %.2e largest; %.1f MiB up\n", f->name, sum / n_step, most,
                  (double)(c.bytes_up + c.bytes_dense) / 1048576.0);
    kvd_session_close(s);
    return sum / n_step;
}

static void test_forms(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(forms) / sizeof(*forms); i++) {
        const record_form *f    = &forms[i];
        const bool         keep = i == 0 || f->mode != forms[i - 1].mode;
        const double       kl   = run(f, keep);

        if (f->limit > 0.0)
            assert_true(kl > 0.0 && (only_measure || kl < f->limit));
        else
            assert_true(kl == 0.0);
    }
}

static void read_text(void)
{
    FILE            *f    = fopen(text_path, "r");
    char            *text = malloc(TEXT_MAX);
    kvd_model_info   info = { .struct_size = sizeof(info) };
    kvd_model_params p    = KVD_MODEL_PARAMS_INIT;
    size_t           len, n;

    assert_non_null(f);
    assert_non_null(text);
    len = fread(text, 1, TEXT_MAX, f);
    fclose(f);
    p.path = model_path;
    if (kvd_model_open(&model, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kvd_model_get_info(model, &info);
    n_vocab = info.n_vocab;
    token   = malloc(len * sizeof(*token));
    whole   = malloc((size_t)n_step * n_vocab * sizeof(float));
    assert_true(token && whole);
    assert_int_equal(kvd_tokenize(model, text, len, NULL, 0, false, token, len, &n, &err), KVD_OK);
    assert_in_range(n_prompt + n_step, 1, n);
    free(text);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_forms) };
    int                     failed;

    if (argc < 2 || !*argv[1])
        return 77;
    model_path = argv[1];
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--text") == 0)
            text_path = argv[i + 1];
        else if (strcmp(argv[i], "--prompt") == 0)
            n_prompt = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--steps") == 0)
            n_step = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--measure") == 0)
            only_measure = true;
    }
    if (n_step < 1 || n_step > STEPS_MAX || n_prompt < 512)
        return 2;
    read_text();
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(token);
    free(whole);
    kvd_model_close(model);
    return failed;
}
