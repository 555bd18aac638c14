/* SPDX-License-Identifier: Apache-2.0 */
/* engine_attention.c - how generated tokens attend: the user's wishes completed and turned into the
 * store's policy, and the admission of a sequence after its prompt.
 *
 * Thread: the session's. */
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "engine/engine.h"

#define DENSE_BELOW_DEFAULT 16384u
#define BUDGET_MIN          1024u /* of the default budget, tokens */
#define BUDGET_MAX          4096u
#define BUDGET_DIVISOR      16u
#define CAP_DEFAULT         2.0f
#define CAP_MIN             1.0f
#define CAP_MAX             1024.0f
#define ALPHA_DEFAULT       0.5f
#define MIN_MASS_DEFAULT    0.7f
#define MASS_STEPS          32u /* whose mean is judged */

/* ---- names -------------------------------------------------------------------------- */

static const struct index_name {
    const char    *name;
    kvd_index_kind kind;
    kvd_index_elem elem;
} index_names[] = {
    { "mean", KVD_INDEX_MEAN, KVD_INDEX_INT4 },
    { "mean-std", KVD_INDEX_MEAN_STD, KVD_INDEX_BF16 },
    { "box", KVD_INDEX_BOX, KVD_INDEX_BF16 },
    { "cluster", KVD_INDEX_CLUSTER, KVD_INDEX_BF16 },
    { "quant-k", KVD_INDEX_QUANT_K, KVD_INDEX_INT4 },
    { "cascade", KVD_INDEX_CASCADE, KVD_INDEX_INT4 },
};

static const char *const elem_names[] = { "bf16", "int8", "int4", "int2" };

/* Takes "-int4" off the end of name[0 .. *len), if it is there. */
static bool take_elem(const char *name, size_t *len, kvd_index_elem *out)
{
    for (uint32_t i = 0; i < KVD_COUNTOF(elem_names); i++) {
        const size_t n = strlen(elem_names[i]);

        if (*len > n + 1 && name[*len - n - 1] == '-' &&
            memcmp(name + *len - n, elem_names[i], n) == 0) {
            *len -= n + 1;
            *out = (kvd_index_elem)i;
            return true;
        }
    }
    return false;
}

static kvd_status parse_index(const char *name, uint32_t chunk_tokens, uint32_t head_dim,
                              kvd_index_desc *d, kvd_err *err)
{
    static const char radius[] = "+radius";
    const size_t      n_radius = sizeof(radius) - 1;
    size_t            len      = strlen(name);
    kvd_index_elem    elem;
    bool              given;

    *d = (kvd_index_desc){ .chunk_tokens = chunk_tokens,
                           .block_tokens = KV_BLOCK_TOKENS,
                           .head_dim     = head_dim,
                           .key_elem     = KVD_INDEX_INT4 };
    if (len > n_radius && memcmp(name + len - n_radius, radius, n_radius) == 0) {
        d->radius = true;
        len -= n_radius;
    }
    given = take_elem(name, &len, &elem);
    for (uint32_t i = 0; i < KVD_COUNTOF(index_names); i++) {
        if (strlen(index_names[i].name) != len || memcmp(index_names[i].name, name, len) != 0)
            continue;
        d->kind = index_names[i].kind;
        d->elem = given ? elem : index_names[i].elem;
        if (d->kind == KVD_INDEX_QUANT_K)
            d->key_elem = d->elem;
        if (kvd_index_valid(d))
            return KVD_OK;
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "index \"%s\" with chunks of %u tokens and heads of %u elements is not one "
                        "of those there are",
                        name, chunk_tokens, head_dim);
    }
    return kvd_fail(
        err, KVD_E_INVAL, 0,
        "index (index) \"%s\" is unknown; there are mean, mean-std, box, cluster, quant-k and "
        "cascade, with -bf16, -int8, -int4 or -int2 and +radius behind",
        name);
}

static kvd_status parse_rule(const char *name, kvd_gqa_rule *out, kvd_err *err)
{
    static const char *const names[] = { "mean", "max", "mean-chunks", "logits" };

    for (uint32_t i = 0; i < KVD_COUNTOF(names); i++) {
        if (strcmp(names[i], name) == 0) {
            *out = (kvd_gqa_rule)i;
            return KVD_OK;
        }
    }
    return kvd_fail(
        err, KVD_E_INVAL, 0,
        "group rule (group_rule) \"%s\" is unknown; there are mean, max, mean-chunks and logits",
        name);
}

/* ---- policies ------------------------------------------------------------------------ */

/* Whether a struct of this size has the field: callers may have been built with an older header. */
#define HAS(p, field) ((p)->struct_size >= offsetof(__typeof__(*(p)), field) + sizeof((p)->field))

kvd_status engine_policy_apply(const char *name, kvd_session_params *p, kvd_attention_params *a,
                               kvd_err *err)
{
    const sparse_policy *r     = sparse_policy_find(name);
    kvd_buf              known = { 0 };
    kvd_status           st;

    if (r) {
        const kvd_attention_params *f = &r->attention;

        a->mode     = f->mode;
        a->fetch    = f->fetch;
        a->attend   = f->attend;
        a->evict    = f->evict;
        a->min_mass = f->min_mass;
        a->index    = f->index;
        if (HAS(a, schedule))
            a->schedule = f->schedule;
        p->kv_record    = r->kv_record;
        p->chunk_tokens = r->chunk_tokens;
        p->n_sink       = r->n_sink;
        p->n_local      = r->n_local;
        if (HAS(p, lookup))
            p->lookup = r->lookup;
        if (HAS(p, tiers))
            p->tiers = r->tiers;
        return KVD_OK;
    }
    for (uint32_t i = 0; sparse_policy_at(i); i++)
        kvd_buf_printf(&known, "%s%s", i > 0 ? ", " : "", sparse_policy_at(i)->name);
    st = kvd_fail(err, KVD_E_INVAL, 0, "policy \"%s\" is unknown; there are %s", name,
                  known.data ? known.data : "");
    kvd_buf_free(&known);
    return st;
}

/* ---- completing --------------------------------------------------------------------- */

static kvd_status check_numbers(const kvd_attention_params *p, uint32_t chunk_tokens, kvd_err *err)
{
    const struct {
        const char *field;
        int         is, last; /* the first choice is 0 */
    } choice[] = {
        { "mode", (int)p->mode, KVD_ATTENTION_SPARSE },
        { "fetch", (int)p->fetch, KVD_FETCH_STRICT },
        { "attend", (int)p->attend, KVD_ATTEND_SELECTED },
        { "evict", (int)p->evict, KVD_EVICT_BY_RANDOM },
        { "schedule", (int)p->schedule, KVD_SCHEDULE_ELASTIC },
    };

    for (size_t i = 0; i < KVD_COUNTOF(choice); i++)
        if (choice[i].is < 0 || choice[i].is > choice[i].last)
            return kvd_fail(err, KVD_E_INVAL, 0, "kvd_attention_params.%s is %d: expected 0 to %d",
                            choice[i].field, choice[i].is, choice[i].last);
    if (!(p->budget_share >= 0.0f && p->budget_share <= 1.0f))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "budget of %g of the prompt (budget_share): expected 0 to 1",
                        (double)p->budget_share);
    if (!(p->cap >= CAP_MIN && p->cap <= CAP_MAX))
        return kvd_fail(err, KVD_E_INVAL, 0, "window of %g budgets (cap): expected 1 to 1,024",
                        (double)p->cap);
    if (!(p->ema_alpha > 0.0f && p->ema_alpha <= 1.0f))
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "weight of the newest score (ema_alpha) is %g: expected more than 0, at most 1",
            (double)p->ema_alpha);
    if (!(p->min_mass <= 1.0f))
        return kvd_fail(err, KVD_E_INVAL, 0, "least mass (min_mass) is %g: expected at most 1",
                        (double)p->min_mass);
    if (p->zone > KV_BLOCK_TOKENS ||
        (p->zone > 0 && (p->zone % chunk_tokens != 0 || KV_BLOCK_TOKENS % p->zone != 0)))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "cells of %u tokens in the estimation zone (zone): expected 0, or a "
                        "multiple of the chunk's %u that divides %u",
                        p->zone, chunk_tokens, KV_BLOCK_TOKENS);
    if (!(p->top_p >= 0.0f && p->top_p < 1.0f))
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "share of the selection (kvd_attention_params.top_p) is %g: expected 0 to below 1",
            (double)p->top_p);
    return KVD_OK;
}

static kvd_evict_policy evict_policy(kvd_evict e)
{
    switch (e) {
    case KVD_EVICT_BY_LRU:
        return KVD_EVICT_LRU;
    case KVD_EVICT_BY_LFU:
        return KVD_EVICT_LFU;
    case KVD_EVICT_BY_RANDOM:
        return KVD_EVICT_RANDOM;
    case KVD_EVICT_BY_EMA:
    case KVD_EVICT_BY_LOOKAHEAD:
        break;
    }
    return KVD_EVICT_EMA;
}

/* Caps of lanes: cap becomes the largest; equal ones are no more than that. */
static kvd_status complete_caps(kvd_attention_params *p, const model_hparams *hp, kvd_err *err)
{
    const uint32_t n     = hp->n_layer * hp->n_kv_head;
    bool           equal = true;

    if (!p->caps)
        return KVD_OK;
    if (p->n_caps != n)
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "windows (caps) for %u lanes (n_caps); the model has %u layers x %u KV heads",
            p->n_caps, hp->n_layer, hp->n_kv_head);
    p->cap = p->caps[0];
    for (uint32_t i = 0; i < n; i++) {
        if (!(p->caps[i] >= CAP_MIN && p->caps[i] <= CAP_MAX))
            return kvd_fail(
                err, KVD_E_INVAL, 0,
                "window of %g budgets (caps) in layer %u, KV head %u: expected 1 to 1,024",
                (double)p->caps[i], i / hp->n_kv_head, i % hp->n_kv_head);
        equal  = equal && !(p->caps[i] < p->caps[0]) && !(p->caps[i] > p->caps[0]);
        p->cap = p->caps[i] > p->cap ? p->caps[i] : p->cap;
    }
    if (equal)
        p->caps = NULL;
    return KVD_OK;
}

/* What is asked for, or the default; records without K need an index with keys. */
static kvd_status complete_index(const char *name, const kvd_session_params *sp, uint32_t head_dim,
                                 kvd_index_desc *d, kvd_err *err)
{
    const bool values = sp->kv_record == KVD_KV_RECORD_VALUES;

    if (!name)
        name = values ? "quant-k" : "mean-int4+radius";
    KVD_TRY(parse_index(name, sp->chunk_tokens, head_dim, d, err));
    if (values && d->kind != KVD_INDEX_QUANT_K && d->kind != KVD_INDEX_CASCADE)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "records of values alone (kv_record) need an index that keeps "
                        "keys, quant-k or cascade, not \"%s\"",
                        name);
    return KVD_OK;
}

kvd_status engine_attention_complete(const kvd_attention_params *in, const kvd_session_params *sp,
                                     const model_hparams *hp, engine_attention *out, kvd_err *err)
{
    kvd_attention_params *p    = &out->params;
    kvd_gqa_rule          rule = KVD_GQA_MEAN_KEPT;

    *p = *in;
    if (p->dense_below == 0)
        p->dense_below = DENSE_BELOW_DEFAULT;
    if (p->cap == 0.0f)
        p->cap = CAP_DEFAULT;
    if (p->min_mass == 0.0f)
        p->min_mass = MIN_MASS_DEFAULT;
    if (p->ema_alpha == 0.0f)
        p->ema_alpha = ALPHA_DEFAULT;
    KVD_TRY(complete_caps(p, hp, err));
    KVD_TRY(check_numbers(p, sp->chunk_tokens, err));
    KVD_TRY(complete_index(p->index, sp, hp->head_dim, &out->index, err));
    KVD_TRY(parse_rule(p->group_rule ? p->group_rule : "mean", &rule, err));
    p->index = p->group_rule = NULL; /* borrowed for this call only */
    out->policy              = (kv_policy){ .evict    = evict_policy(p->evict),
                                            .rule     = rule,
                                            .alpha    = p->ema_alpha,
                                            .top_p    = p->top_p,
                                            .strict   = p->fetch == KVD_FETCH_STRICT,
                                            .selected = p->attend == KVD_ATTEND_SELECTED,
                                            .zone     = p->zone > 0,
                                            .caps     = p->caps };
    if (p->evict == KVD_EVICT_BY_LOOKAHEAD)
        out->policy.alpha = 1.0f; /* the average is this step's score */
    return KVD_OK;
}

/* Whether a prompt of n tokens is followed by sparse steps. */
static bool is_sparse(const engine_attention *a, uint32_t n)
{
    return a->params.mode == KVD_ATTENTION_SPARSE ||
           (a->params.mode == KVD_ATTENTION_AUTO && n >= a->params.dense_below);
}

bool engine_attention_sparse(const engine_attention *a, uint32_t n_ctx)
{
    return is_sparse(a, n_ctx);
}

uint32_t engine_attention_budget(const engine_attention *a, uint32_t n)
{
    const kvd_attention_params *p = &a->params;

    if (p->budget)
        return p->budget;
    if (p->budget_share > 0.0f)
        return (uint32_t)kvd_max_u64(1, (uint64_t)lround((double)n * (double)p->budget_share));
    return (uint32_t)kvd_min_u64(BUDGET_MAX, kvd_max_u64(BUDGET_MIN, n / BUDGET_DIVISOR));
}

static uint32_t window_of(const engine_attention *a, uint32_t n_ctx, uint32_t chunk_tokens,
                          float cap)
{
    const uint64_t chunks = kvd_div_up(engine_attention_budget(a, n_ctx), chunk_tokens);
    const uint64_t most   = kvd_div_up(n_ctx, chunk_tokens);
    const double   window = ceil((double)chunks * (double)cap);

    return (uint32_t)kvd_min_u64(kvd_max_u64(1, window < (double)most ? (uint64_t)window : most),
                                 KVD_SLOT_NONE - 1) *
           chunk_tokens;
}

uint32_t engine_attention_window(const engine_attention *a, uint32_t n_ctx, uint32_t chunk_tokens,
                                 uint32_t lane)
{
    return window_of(a, n_ctx, chunk_tokens, a->params.caps ? a->params.caps[lane] : a->params.cap);
}

uint32_t engine_attention_largest(const engine_attention *a, uint32_t n_ctx, uint32_t chunk_tokens)
{
    return window_of(a, n_ctx, chunk_tokens, a->params.cap);
}

void engine_attention_keep(kvd_session *s, const engine_attention *a)
{
    s->attention = *a;
    if (a->params.caps)
        s->attention.params.caps =
            memcpy(s->caps, a->params.caps, a->params.n_caps * sizeof(*s->caps));
    s->attention.policy.caps = s->attention.params.caps;
}

/* FNV-1a. */
static uint64_t hash_caps(const kvd_attention_params *p)
{
    const uint8_t *b = (const uint8_t *)p->caps;
    uint64_t       h = 0xcbf29ce484222325u;

    for (size_t i = 0; i < p->n_caps * sizeof(*p->caps); i++)
        h = (h ^ b[i]) * 0x100000001b3u;
    return h;
}

/* Policy, and what generated blocks in the store are named by. */
void engine_attention_apply(kvd_session *s)
{
    const kvd_attention_params *p    = &s->attention.params;
    const uint64_t              caps = p->caps ? hash_caps(p) : 0;
    const struct {
        uint8_t choice[8]; /* mode, fetch, attend, evict, rule, late disk reads, cells of a block */
        uint32_t dense_below, budget, n_sink, n_local;
        float    share, cap, alpha, top_p, min_mass;
        uint32_t caps[2]; /* left out where there are none */
    } options = { { (uint8_t)p->mode, (uint8_t)p->fetch, (uint8_t)p->attend, (uint8_t)p->evict,
                    (uint8_t)s->attention.policy.rule, (uint8_t)(s->params.disk_lag - 1),
                    p->zone ? (uint8_t)(KV_BLOCK_TOKENS / p->zone) : 0 },
                  p->dense_below,
                  p->budget,
                  s->params.n_sink,
                  s->params.n_local,
                  p->budget_share,
                  p->cap,
                  p->ema_alpha,
                  p->top_p,
                  p->min_mass,
                  { (uint32_t)caps, (uint32_t)(caps >> 32) } };

    kv_set_policy(s->kv, &s->attention.policy);
    engine_schedule_apply(s);
    kv_set_provenance(s->kv, &options,
                      sizeof(options) - (p->caps ? 0 : (uint32_t)sizeof(options.caps)));
}

/* ---- sequences ----------------------------------------------------------------------- */

void engine_attention_admit(kvd_session *s, uint32_t seq)
{
    const uint32_t          n = kv_seq_len(s->kv, seq);
    const engine_attention *a = &s->attention;

    s->seq[seq].budget     = s->sparse && is_sparse(a, n) ? engine_attention_budget(a, n) : 0;
    s->seq[seq].n_fallback = 0;
    kv_seq_admit(s->kv, seq, s->seq[seq].budget, a->params.cap);
}

/* A selection that misses too much, by the index's own estimate, is first doubled, then given up.
 */
void engine_attention_watch(kvd_session *s, uint32_t seq)
{
    engine_seq *q = &s->seq[seq];
    double      mass;

    if (s->attention.params.min_mass <= 0.0f || !kv_seq_take_mass(s->kv, seq, MASS_STEPS, &mass) ||
        mass >= (double)s->attention.params.min_mass)
        return;
    q->budget = q->n_fallback == 0 ? 2 * q->budget : 0;
    q->n_fallback++;
    s->stats.n_fallback++;
    kvd_log(KVD_LOG_INFO, "sequence %u: attended mass of %.2f is below %.2f, goes on %s", seq, mass,
            (double)s->attention.params.min_mass,
            q->budget ? "with twice the budget" : "with exact attention");
    kv_seq_admit(s->kv, seq, q->budget, s->attention.params.cap);
}

/* Whether the session has room for windows of that kind. */
static kvd_status check_windows(const kvd_session *s, const engine_attention *a, kvd_err *err)
{
    const model_hparams *hp = model_get_hparams(s->model->net);

    for (uint32_t i = 0; i < hp->n_layer * hp->n_kv_head; i++) {
        const uint32_t layer = i / hp->n_kv_head, head = i % hp->n_kv_head;
        const uint32_t want =
            engine_attention_window(a, s->params.n_ctx, s->params.chunk_tokens, i);
        const uint32_t have = s->sparse ? kv_lane_window(s->kv, layer, head) : 0;

        if (want > have)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "sparse attention with windows of %u tokens (layer %u, KV head %u): "
                            "the session was opened for %u",
                            want, layer, head, have);
    }
    return KVD_OK;
}

kvd_status engine_session_set_attention(kvd_session *s, const kvd_attention_params *p, kvd_err *err)
{
    const kvd_session_params *sp = &s->params;
    engine_attention          a;

    KVD_TRY(engine_attention_complete(p, sp, model_get_hparams(s->model->net), &a, err));
    if (engine_attention_sparse(&a, sp->n_ctx)) {
        KVD_TRY(check_windows(s, &a, err));
        if (p->zone != 0 && p->zone != s->zone)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "an estimation zone of cells of %u tokens: the session was opened for "
                            "%u (0: none)",
                            p->zone, s->zone);
        KVD_TRY(kv_set_index(s->kv, s->model->stream, &a.index, err));
    }
    engine_attention_keep(s, &a);
    engine_attention_apply(s);
    for (uint32_t i = 0; i < sp->n_seq; i++)
        engine_attention_admit(s, i);
    return KVD_OK;
}
