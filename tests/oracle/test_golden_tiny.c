/* SPDX-License-Identifier: Apache-2.0 */
/* test_golden_tiny.c - every architecture and RoPE variant against logits of transformers.
 *
 * tests/data/tiny/README.md describes the files and why 1e-4 is the bound of the reference backend.
 * Each case runs three ways, which must agree with the golden and, in the reference backend, to
 * float noise with each other: one batch; batches of 5; and token by token (which walks LongRoPE
 * over its switch inside a sequence).  The fast backend runs them in precise mode at every level.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kvdrive.h"
#include "os/os.h"

#ifndef KVD_TEST_DATA
#define KVD_TEST_DATA "tests/data"
#endif
#define REL_MAX 1e-4

static const char *const files[] = { "llama",      "llama3-rope", "qwen2",        "qwen3",
                                     "qwen3-yarn", "phi3",        "phi3-longrope" };

typedef struct golden_case {
    uint32_t  kind, orig_ctx, flags, n_token, n_pos;
    float     factor;
    int32_t  *token;
    uint32_t *pos;
    float    *logits; /* [n_pos][n_vocab] */
} golden_case;

typedef struct golden {
    uint32_t     n_vocab, n_case;
    golden_case *cases;
} golden;

static void read_all(FILE *f, void *p, size_t bytes)
{
    assert_int_equal(fread(p, 1, bytes, f), bytes);
}

static uint32_t read_u32(FILE *f)
{
    uint32_t x;

    read_all(f, &x, sizeof(x));
    return x;
}

static golden load(const char *name)
{
    char   path[512], magic[4];
    golden g;
    FILE  *f;

    snprintf(path, sizeof(path), "%s/tiny/%s.golden", KVD_TEST_DATA, name);
    f = fopen(path, "rb");
    assert_non_null(f);
    read_all(f, magic, 4);
    assert_memory_equal(magic, "KDGL", 4);
    assert_int_equal(read_u32(f), 1);
    g.n_vocab = read_u32(f);
    g.n_case  = read_u32(f);
    assert_in_range(g.n_case, 1, 1000);
    g.cases = calloc(g.n_case, sizeof(*g.cases));
    for (uint32_t i = 0; i < g.n_case; i++) {
        golden_case *c = &g.cases[i];

        c->kind = read_u32(f);
        read_all(f, &c->factor, 4);
        c->orig_ctx = read_u32(f);
        c->flags    = read_u32(f);
        c->n_token  = read_u32(f);
        c->token    = calloc(c->n_token, 4);
        read_all(f, c->token, 4 * (size_t)c->n_token);
        c->n_pos = read_u32(f);
        c->pos   = calloc(c->n_pos, 4);
        read_all(f, c->pos, 4 * (size_t)c->n_pos);
        c->logits = calloc((size_t)c->n_pos * g.n_vocab, 4);
        read_all(f, c->logits, 4 * (size_t)c->n_pos * g.n_vocab);
    }
    fclose(f);
    return g;
}

static void release(golden *g)
{
    for (uint32_t i = 0; i < g->n_case; i++) {
        free(g->cases[i].token);
        free(g->cases[i].pos);
        free(g->cases[i].logits);
    }
    free(g->cases);
}

static kvd_model *open_model(const char *name, const golden_case *c, const char *backend,
                             const char *isa)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    char             path[512];
    kvd_err          err = { 0 };
    kvd_model       *m;

    snprintf(path, sizeof(path), "%s/tiny/%s.gguf", KVD_TEST_DATA, name);
    p.path          = path;
    p.backend       = backend;
    p.cpu_isa       = isa;
    p.precise       = true;
    p.n_thread      = 2;
    p.rope_scaling  = (kvd_rope_scaling)c->kind;
    p.rope_factor   = c->factor;
    p.rope_orig_ctx = c->orig_ctx;
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s: %s", name, err.msg);
    return m;
}

/* Largest relative error (see README.md) over the golden positions of a case. */
static double run_case(kvd_model *m, const golden_case *c, uint32_t n_vocab, uint32_t step)
{
    kvd_session_params p     = KVD_SESSION_PARAMS_INIT;
    uint8_t           *want  = calloc(c->n_token, 1);
    double             worst = 0.0;
    kvd_err            err   = { 0 };
    kvd_session       *s;
    uint32_t           next = 0;

    p.n_ctx    = c->n_token;
    p.n_batch  = step;
    p.n_logits = step;
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    for (uint32_t i = 0; i < c->n_pos; i++)
        want[c->pos[i]] = 1;
    for (uint32_t at = 0; at < c->n_token; at += step) {
        kvd_batch b   = KVD_BATCH_INIT;
        uint32_t  row = 0;

        b.n_token     = c->n_token - at < step ? c->n_token - at : step;
        b.token       = c->token + at;
        b.want_logits = want + at;
        if (kvd_eval(s, &b, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        for (uint32_t i = 0; i < b.n_token; i++) {
            const float *got, *ref = c->logits + (size_t)next * n_vocab;
            double       diff = 0.0, max = 0.0;

            if (!want[at + i])
                continue;
            got = kvd_logits(s, row++);
            for (uint32_t v = 0; v < n_vocab; v++) {
                diff = fmax(diff, fabs((double)got[v] - (double)ref[v]));
                max  = fmax(max, fabs((double)ref[v]));
            }
            assert_false(isnan(got[0]));
            worst = fmax(worst, diff / max);
            next++;
        }
    }
    assert_int_equal(next, c->n_pos);
    kvd_session_close(s);
    free(want);
    return worst;
}

/* Positions before a LongRoPE switch differ when the sequence has not crossed it yet: cases that
 * cross can only be cut where the golden looks, at positions behind the switch. */
static bool can_be_cut(const char *name, const golden_case *c)
{
    if (strcmp(name, "phi3-longrope") != 0 || c->kind != 0 || c->n_token <= 64)
        return true;
    return c->pos[0] >= 64;
}

static double run_file(const char *name, const char *backend, const char *isa)
{
    golden   g     = load(name);
    double   worst = 0.0;
    uint32_t n_cut = 0;

    for (uint32_t i = 0; i < g.n_case; i++) {
        const golden_case *c = &g.cases[i];
        kvd_model         *m = open_model(name, c, backend, isa);

        worst = fmax(worst, run_case(m, c, g.n_vocab, c->n_token));
        if (can_be_cut(name, c)) {
            worst = fmax(worst, run_case(m, c, g.n_vocab, 5));
            worst = fmax(worst, run_case(m, c, g.n_vocab, 1));
            n_cut++;
        }
        kvd_model_close(m);
    }
    assert_true(n_cut > 0);
    release(&g);
    return worst;
}

static void test_reference_matches_transformers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        const double e = run_file(files[i], "ref", NULL);

        print_message("ref      %-14s max relative error %.1e\n", files[i], e);
        assert_true(e < REL_MAX);
    }
}

/* Precise mode keeps floats everywhere, so the same bound holds at every level. */
static void test_precise_levels_match_transformers(void **state)
{
    (void)state;
    for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++) {
        for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
            const double e = run_file(files[i], "cpu", os_isa_name((os_isa)isa));

            print_message("%-8s %-14s max relative error %.1e\n", os_isa_name((os_isa)isa),
                          files[i], e);
            assert_true(e < REL_MAX);
        }
    }
}

/* --backend NAME: another backend, precise. */
static const char *other;

static void test_other_matches_transformers(void **state)
{
    (void)state;
    for (size_t i = 0; other && i < sizeof(files) / sizeof(files[0]); i++) {
        const double e = run_file(files[i], other, NULL);

        print_message("%-8s %-14s max relative error %.1e\n", other, files[i], e);
        assert_true(e < REL_MAX);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest others[] = { cmocka_unit_test(test_other_matches_transformers) };
    const struct CMUnitTest tests[]  = {
         cmocka_unit_test(test_reference_matches_transformers),
         cmocka_unit_test(test_precise_levels_match_transformers),
    };

    if (argc == 3 && strcmp(argv[1], "--backend") == 0) {
        other = argv[2];
        return cmocka_run_group_tests(others, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
