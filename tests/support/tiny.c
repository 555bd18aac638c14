/* SPDX-License-Identifier: Apache-2.0 */
#include "support/tiny.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FNV_START 1469598103934665603u
#define FNV_PRIME 1099511628211u

kvd_model *tiny_model(const char *name)
{
    kvd_model_params p   = KVD_MODEL_PARAMS_INIT;
    kvd_err          err = { 0 };
    char             path[512];
    kvd_model       *m;

    snprintf(path, sizeof(path), "%s/tiny/%s.gguf", KVD_TEST_DATA, name);
    p.path          = path;
    p.n_thread      = 2;
    p.deterministic = true; /* prompts are cut where the cache ends */
    p.rope_scaling  = KVD_ROPE_LINEAR;
    p.rope_factor   = 64.0f;
    if (kvd_model_open(&m, &p, &err) != KVD_OK) {
        fprintf(stderr, "%s: %s\n", path, err.msg);
        exit(1);
    }
    return m;
}

kvd_session_params tiny_params(kvd_model *m, const tiny_options *o, kvd_attention_params *a)
{
    kvd_session_params p    = KVD_SESSION_PARAMS_INIT;
    kvd_plan           plan = { .struct_size = sizeof(plan) };

    *a          = (kvd_attention_params)KVD_ATTENTION_PARAMS_INIT;
    a->mode     = o->mode;
    a->budget   = 96;
    p.n_ctx     = TINY_CTX;
    p.n_seq     = o->n_seq;
    p.n_batch   = 96;
    p.attention = a;
    if (o->tiers && kvd_session_plan(m, &p, &plan, NULL) == KVD_OK)
        p.kv_device = plan.kv_device_bytes - 1;
    p.cache_dir   = o->dir;
    p.cache_bytes = o->cache_bytes;
    p.kv_host     = o->tiers && o->dir ? o->kv_host : 0;
    return p;
}

kvd_status tiny_session(kvd_session **out, kvd_model *m, const tiny_options *o, kvd_err *err)
{
    kvd_attention_params     a;
    const kvd_session_params p = tiny_params(m, o, &a);

    return kvd_session_open(out, m, &p, err);
}

void tiny_least_device(kvd_model *m, kvd_session_params *p)
{
    kvd_plan   plan = { .struct_size = sizeof(plan) };
    kvd_err    err  = { 0 };
    kvd_status st   = kvd_session_plan(m, p, &plan, &err);
    uint64_t   lo = 1, hi = plan.kv_device_bytes - 1;

    while (st == KVD_OK && lo < hi) {
        p->kv_device = lo + (hi - lo) / 2;
        if (kvd_session_plan(m, p, &plan, &err) == KVD_OK)
            hi = p->kv_device;
        else
            lo = p->kv_device + 1;
    }
    p->kv_device = lo;
    if (st == KVD_OK)
        st = kvd_session_plan(m, p, &plan, &err);
    if (st != KVD_OK || plan.kv_resident) {
        fprintf(stderr, "least device memory: %s\n", st == KVD_OK ? "resident" : err.msg);
        exit(1);
    }
}

int32_t tiny_token(uint32_t text, uint32_t i)
{
    return (int32_t)((i * 37 + text * 101 + i * i % 13 + i / 97) % 256);
}

kvd_status tiny_prefill(kvd_session *s, uint32_t text, uint32_t n, kvd_err *err)
{
    int32_t token[TINY_CTX];

    kvd_assert(n <= TINY_CTX);
    for (uint32_t i = 0; i < n; i++)
        token[i] = tiny_token(text, i);
    return kvd_prefill(s, 0, token, n, NULL, NULL, err);
}

kvd_status tiny_generate(kvd_session *s, uint32_t n, uint64_t *hash, int32_t *out, kvd_err *err)
{
    uint64_t h = FNV_START;

    for (uint32_t i = 0; i < n; i++) {
        const float *l = kvd_logits(s, 0);
        kvd_batch    b = KVD_BATCH_INIT;
        int32_t      t = 0;

        for (size_t k = 0; k < TINY_VOCAB * sizeof(float); k++)
            h = (h ^ ((const uint8_t *)l)[k]) * FNV_PRIME;
        for (int32_t k = 1; k < TINY_VOCAB; k++)
            t = l[k] > l[t] ? k : t;
        t = (t + (int32_t)(i * 7 % 61)) % 256;
        if (out)
            out[i] = t;
        b.n_token = 1;
        b.token   = &t;
        KVD_TRY(kvd_eval(s, &b, err));
    }
    if (hash)
        *hash = h;
    return KVD_OK;
}
