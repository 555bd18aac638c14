/* SPDX-License-Identifier: Apache-2.0 */
/* disk_gym.c - decode steps of several sequences with a part of their KV cache on disk: time a
 * step, what it read, what it waited for.  One process, one directory: the first session evaluates
 * the prompts, the others find them there.
 *
 * usage: disk_gym MODEL BACKEND DIR SEQUENCES TOKENS STEPS SHARE...
 * SHARE: eighths of the records that have no room in the host tier; more than once is repeated. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvdrive.h"

#include "base/base.h"

enum { SEQS_MAX = 16, BUDGET = 512, WARM = 4 };

typedef struct gym {
    kvd_model     *m;
    kvd_model_info info;
    const char    *dir;
    uint32_t       n_seq, n_token, n_step;
} gym;

static kvd_err err;

static void must(kvd_status st)
{
    if (st == KVD_OK)
        return;
    fprintf(stderr, "disk_gym: %s\n", err.msg);
    exit(1);
}

static int32_t token_at(const gym *g, uint32_t seq, uint32_t i)
{
    return (int32_t)(((i + seq * 77777u) * 2654435761u >> 8) % g->info.n_vocab);
}

static kvd_session *open_session(const gym *g, uint32_t eighths)
{
    kvd_attention_params a    = KVD_ATTENTION_PARAMS_INIT;
    kvd_session_params   p    = KVD_SESSION_PARAMS_INIT;
    kvd_plan             plan = { .struct_size = sizeof(plan) };
    kvd_session         *s;

    a.mode      = KVD_ATTENTION_SPARSE;
    a.budget    = BUDGET;
    a.min_mass  = -1.0f;
    p.attention = &a;
    p.n_ctx     = (g->n_token + g->n_step + WARM + 1 + 255) / 256 * 256;
    p.n_seq     = g->n_seq;
    p.n_batch   = 1024;
    p.cache_dir = g->dir;
    must(kvd_session_plan(g->m, &p, &plan, &err));
    p.kv_device = plan.kv_device_bytes - 1;
    must(kvd_session_plan(g->m, &p, &plan, &err));
    if (eighths)
        p.kv_host = (8 - eighths) * (uint64_t)g->n_token * g->n_seq / 8 * plan.kv_bytes_per_token;
    must(kvd_session_open(&s, g->m, &p, &err));
    return s;
}

static void step(const gym *g, kvd_session *s, uint32_t i)
{
    int32_t   t[SEQS_MAX];
    uint32_t  q[SEQS_MAX];
    uint8_t   want[SEQS_MAX];
    kvd_batch b = KVD_BATCH_INIT;

    for (uint32_t k = 0; k < g->n_seq; k++) {
        t[k]    = token_at(g, k + 100, i);
        q[k]    = k;
        want[k] = 1;
    }
    b.n_token     = g->n_seq;
    b.token       = t;
    b.seq         = q;
    b.want_logits = want;
    must(kvd_eval(s, &b, &err));
}

static void prompts(const gym *g, kvd_session *s)
{
    int32_t *t = kvd_calloc(g->n_token, sizeof(*t));

    for (uint32_t q = 0; t && q < g->n_seq; q++) {
        for (uint32_t i = 0; i < g->n_token; i++)
            t[i] = token_at(g, q, i);
        must(kvd_prefill(s, q, t, g->n_token, NULL, NULL, &err));
    }
    kvd_free(t);
}

static void run(const gym *g, uint32_t eighths)
{
    const uint64_t t0 = kvd_now_ns();
    kvd_session   *s  = open_session(g, eighths);
    kvd_stats      a = { .struct_size = sizeof(a) }, b = a;
    const double   n = g->n_step;
    uint64_t       t1, t2;

    prompts(g, s);
    must(kvd_session_flush(s, &err));
    for (uint32_t i = 0; i < WARM; i++)
        step(g, s, i);
    kvd_session_get_stats(s, &a);
    t1 = kvd_now_ns();
    for (uint32_t i = 0; i < g->n_step; i++)
        step(g, s, WARM + i);
    t2 = kvd_now_ns();
    kvd_session_get_stats(s, &b);
    printf("%u/8,%u,%.3f,%.1f,%.1f,%.1f,%.1f,%.1f,%.3f,%.1f,%.2f,%.2f,%.3f\n", eighths, g->n_seq,
           (double)(t2 - t1) / n / 1e6, n * g->n_seq * 1e9 / (double)(t2 - t1),
           (double)(b.n_miss - a.n_miss) / n, (double)(b.n_disk - a.n_disk) / n,
           (double)(b.n_disk_urgent - a.n_disk_urgent) / n,
           (double)(b.n_disk_read - a.n_disk_read) / n,
           (double)(b.disk_read_bytes - a.disk_read_bytes) / n / 1048576.0,
           (double)(b.n_disk_stall - a.n_disk_stall) / n,
           (double)(b.disk_wait_ns - a.disk_wait_ns) / n / 1e6, (double)(t1 - t0) / 1e9,
           (double)(b.n_hit - a.n_hit) / (double)(b.n_selected - a.n_selected));
    fflush(stdout);
    kvd_session_close(s);
}

int main(int argc, char **argv)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    gym              g = { .info = { .struct_size = sizeof(g.info) } };

    if (argc < 8) {
        fprintf(stderr, "usage: disk_gym MODEL BACKEND DIR SEQUENCES TOKENS STEPS SHARE...\n");
        return 2;
    }
    p.path    = argv[1];
    p.backend = argv[2];
    g.dir     = argv[3];
    g.n_seq   = (uint32_t)strtoul(argv[4], NULL, 10);
    g.n_token = (uint32_t)strtoul(argv[5], NULL, 10);
    g.n_step  = (uint32_t)strtoul(argv[6], NULL, 10);
    if (g.n_seq < 1 || g.n_seq > SEQS_MAX || g.n_token < 1024 || g.n_step < 1)
        return 2;
    must(kvd_model_open(&g.m, &p, &err));
    kvd_model_get_info(g.m, &g.info);
    printf("on_disk,sequences,ms_per_step,tok_s,misses,from_disk,urgent_from_disk,reads,read_mib,"
           "stalls,wait_ms,ready_s,hit_share\n");
    for (int i = 7; i < argc; i++)
        run(&g, (uint32_t)strtoul(argv[i], NULL, 10) % 8);
    kvd_model_close(g.m);
    return 0;
}
