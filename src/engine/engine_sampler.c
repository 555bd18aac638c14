/* SPDX-License-Identifier: Apache-2.0 */
/* engine_sampler.c - from logits to a token.
 *
 * Order: bias, penalties, DRY, greedy if temperature <= 0; else top-n-sigma, top-k, typical,
 * top-p, min-p and XTC over softmax of the logits at temperature 1, then the temperature on what
 * is left - llama.cpp's order.  All memory is taken at open.
 *
 * Without biases, penalties, DRY, top-n-sigma and grammar the largest logits are enough, one or
 * top_k of them.  With a grammar, logits of tokens that may not come become -inf before anything is
 * picked; greedily, the best one is tried alone first.
 *
 * The history is a ring of the last penalty_last_n tokens with a count per token beside it, so that
 * accepting costs O(1) and penalties two walks over the ring. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

#define HISTORY_MAX (1u << 20) /* what penalty_last_n = -1 and dry_penalty_last_n = -1 mean */
#define NEVER       (-1e8f)    /* a bias made a logit below it so: no part of their spread */
#define XTC_OFF     0.5f       /* two tokens cannot have more than this */

typedef struct candidate {
    float   logit;
    int32_t id;
} candidate;

struct kvd_sampler {
    kvd_sampler_params p;
    uint32_t           n_vocab;
    kvd_rng            rng;
    kvd_logit_bias    *bias;  /* [n_bias] */
    float             *logit; /* [n_vocab] working copy */
    candidate         *cand;  /* [n_vocab] */
    uint32_t          *count; /* [n_vocab] occurrences in the ring */
    int32_t           *ring;  /* [ring_cap] */
    uint32_t           ring_cap, ring_len, ring_at;
    engine_dry        *dry;  /* NULL: off */
    gram              *gram; /* NULL: none */
    gram_at            at;
    uint64_t          *mask; /* [n_vocab] bits; NULL until there was a grammar */
};

static kvd_status check_params(uint32_t n_vocab, const kvd_sampler_params *p, kvd_err *err)
{
    const struct {
        const char *field;
        float       x;
    } number[] = { { "temperature", p->temperature },
                   { "top_p", p->top_p },
                   { "min_p", p->min_p },
                   { "presence_penalty", p->presence_penalty },
                   { "frequency_penalty", p->frequency_penalty },
                   { "repeat_penalty", p->repeat_penalty },
                   { "typical_p", p->typical_p },
                   { "top_n_sigma", p->top_n_sigma },
                   { "xtc_probability", p->xtc_probability },
                   { "xtc_threshold", p->xtc_threshold },
                   { "dry_multiplier", p->dry_multiplier },
                   { "dry_base", p->dry_base } };

    for (size_t i = 0; i < KVD_COUNTOF(number); i++)
        if (!isfinite(number[i].x))
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "sampler: a value (%s) is %g: expected a finite number",
                            number[i].field, (double)number[i].x);
    if (!(p->repeat_penalty > 0.0f))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "sampler: a value (repeat_penalty) is %g: expected more than 0",
                        (double)p->repeat_penalty);
    if (p->dry_multiplier != 0.0f && (!(p->dry_base >= 1.0f) || p->dry_allowed_length < 0))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "sampler: DRY with a base (dry_base) of %g and a length "
                        "(dry_allowed_length) of %d: expected at least 1 and 0",
                        (double)p->dry_base, p->dry_allowed_length);
    if (p->n_bias && !p->bias)
        return kvd_fail(err, KVD_E_INVAL, 0, "sampler: %zu biases (n_bias), but no list (bias)",
                        p->n_bias);
    for (size_t i = 0; i < p->n_bias; i++) {
        if (p->bias[i].token < 0 || (uint32_t)p->bias[i].token >= n_vocab)
            return kvd_fail(err, KVD_E_INVAL, 0, "sampler: bias (bias) %zu is for token %d of %u",
                            i, p->bias[i].token, n_vocab);
        if (!(p->bias[i].bias < INFINITY)) /* a sum with it has no softmax; -inf means never */
            return kvd_fail(err, KVD_E_INVAL, 0, "sampler: the bias (bias) of token %d is %g",
                            p->bias[i].token, (double)p->bias[i].bias);
    }
    return KVD_OK;
}

kvd_status engine_sampler_open(kvd_sampler **out, uint32_t n_vocab, const tok *t,
                               const kvd_sampler_params *p, kvd_err *err)
{
    kvd_sampler *sm;
    kvd_status   st = KVD_OK;

    *out = NULL;
    KVD_TRY(check_params(n_vocab, p, err));
    sm = kvd_calloc(1, sizeof(*sm));
    if (!sm)
        return kvd_fail(err, KVD_E_NOMEM, 0, "sampler: no memory");
    sm->p             = *p;
    sm->p.bias        = NULL; /* the caller's, as the breakers */
    sm->p.dry_breaker = NULL;
    sm->n_vocab       = n_vocab;
    sm->ring_cap      = p->penalty_last_n < 0
                            ? HISTORY_MAX
                            : (uint32_t)kvd_min_u64((uint32_t)p->penalty_last_n, HISTORY_MAX);
    kvd_rng_seed(&sm->rng, p->seed);
    sm->bias  = kvd_calloc(p->n_bias, sizeof(*sm->bias));
    sm->logit = kvd_calloc(n_vocab, sizeof(*sm->logit));
    sm->cand  = kvd_calloc(n_vocab, sizeof(*sm->cand));
    sm->count = kvd_calloc(n_vocab, sizeof(*sm->count));
    sm->ring  = kvd_calloc(sm->ring_cap, sizeof(*sm->ring));
    if (p->dry_multiplier != 0.0f && p->dry_penalty_last_n != 0)
        st = engine_dry_open(&sm->dry, n_vocab, t, p, HISTORY_MAX, err);
    if (st == KVD_OK && (!sm->bias || !sm->logit || !sm->cand || !sm->count || !sm->ring))
        st = kvd_fail(err, KVD_E_NOMEM, 0, "sampler: no memory");
    if (st != KVD_OK) {
        engine_sampler_close(sm);
        return st;
    }
    if (p->n_bias)
        memcpy(sm->bias, p->bias, p->n_bias * sizeof(*sm->bias));
    *out = sm;
    return KVD_OK;
}

void engine_sampler_close(kvd_sampler *sm)
{
    if (!sm)
        return;
    kvd_free(sm->bias);
    kvd_free(sm->logit);
    kvd_free(sm->cand);
    kvd_free(sm->count);
    kvd_free(sm->ring);
    kvd_free(sm->mask);
    engine_dry_close(sm->dry);
    kvd_free(sm);
}

void engine_sampler_accept(kvd_sampler *sm, int32_t token)
{
    if (token < 0 || (uint32_t)token >= sm->n_vocab)
        return;
    if (sm->dry)
        engine_dry_accept(sm->dry, token);
    if (sm->ring_cap == 0)
        return;
    if (sm->ring_len == sm->ring_cap)
        sm->count[sm->ring[sm->ring_at]]--;
    else
        sm->ring_len++;
    sm->ring[sm->ring_at] = token;
    sm->ring_at           = (sm->ring_at + 1) % sm->ring_cap;
    sm->count[token]++;
}

static void penalise_token(kvd_sampler *sm, int32_t id, uint32_t n)
{
    const kvd_sampler_params *p = &sm->p;
    float                    *l = &sm->logit[id];

    *l = *l > 0.0f ? *l / p->repeat_penalty : *l * p->repeat_penalty;
    *l -= (float)n * p->frequency_penalty + p->presence_penalty;
}

static bool penalises(const kvd_sampler_params *p)
{
    return p->repeat_penalty != 1.0f || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
}

/* Each token of the ring once: its count is set aside while the ring is walked. */
static void penalise(kvd_sampler *sm)
{
    if (!penalises(&sm->p))
        return;
    for (uint32_t i = 0; i < sm->ring_len; i++) {
        const int32_t id = sm->ring[i];

        if (sm->count[id] == 0)
            continue; /* seen */
        penalise_token(sm, id, sm->count[id]);
        sm->count[id] = 0;
    }
    for (uint32_t i = 0; i < sm->ring_len; i++)
        sm->count[sm->ring[i]]++;
}

static int32_t argmax(const float *x, uint32_t n)
{
    uint32_t best = 0;

    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best] || isnan(x[best]))
            best = i;
    return (int32_t)best;
}

/* Descending by logit; of equals the lower id first, so that results repeat. */
static int by_logit(const void *a, const void *b)
{
    const candidate *x = a, *y = b;

    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Hoare's partition of c[lo, hi): returns j, lo <= j < hi - 1, with no element of [lo, j] worse
 * than any of [j + 1, hi).  The pivot is never the last element, so both sides have one. */
static uint32_t partition(candidate *c, uint32_t lo, uint32_t hi)
{
    const candidate pivot = c[lo + (hi - 1 - lo) / 2];
    uint32_t        i = lo, j = hi - 1;

    for (;;) {
        candidate t;

        while (by_logit(&c[i], &pivot) < 0)
            i++;
        while (by_logit(&c[j], &pivot) > 0)
            j--;
        if (i >= j)
            return j;
        t    = c[i];
        c[i] = c[j];
        c[j] = t;
        i++;
        j--;
    }
}

/* Moves the k best to the front of c, in any order (quickselect). */
static void select_top(candidate *c, uint32_t n, uint32_t k)
{
    uint32_t lo = 0, hi = n;

    while (hi - lo > 1 && k > lo && k < hi) {
        const uint32_t j = partition(c, lo, hi);

        if (k <= j + 1)
            hi = j + 1;
        else
            lo = j + 1;
    }
}

/* The least logit that top-n-sigma leaves: n standard deviations below the largest. */
static float sigma_floor(const kvd_sampler *sm)
{
    double   sum = 0.0, square = 0.0, top = (double)-FLT_MAX;
    uint32_t n = 0;

    if (sm->p.top_n_sigma <= 0.0f)
        return -INFINITY;
    for (uint32_t i = 0; i < sm->n_vocab; i++) {
        if (sm->logit[i] > NEVER) {
            sum += (double)sm->logit[i];
            top = fmax(top, (double)sm->logit[i]);
            n++;
        }
    }
    for (uint32_t i = 0; i < sm->n_vocab; i++) {
        const double d = (double)sm->logit[i] - sum / n;

        if (sm->logit[i] > NEVER)
            square += d * d;
    }
    return n ? (float)(top - (double)sm->p.top_n_sigma * sqrt(square / n)) : -INFINITY;
}

/* Fills cand with what may be sampled, best first; logits that are NaN or -inf never may. */
static uint32_t candidates(kvd_sampler *sm)
{
    const float least = sigma_floor(sm);
    uint32_t    n     = 0;

    for (uint32_t i = 0; i < sm->n_vocab; i++)
        if (sm->logit[i] > -FLT_MAX && !(sm->logit[i] < least))
            sm->cand[n++] = (candidate){ .logit = sm->logit[i], .id = (int32_t)i };
    if (sm->p.top_k > 0 && (uint32_t)sm->p.top_k < n) {
        select_top(sm->cand, n, (uint32_t)sm->p.top_k);
        n = (uint32_t)sm->p.top_k;
    }
    qsort(sm->cand, n, sizeof(*sm->cand), by_logit);
    return n;
}

/* Sum of exp over n sorted candidates, the largest being 1. */
static double mass_of(const candidate *c, uint32_t n)
{
    double total = 0.0;

    for (uint32_t i = 0; i < n; i++)
        total += exp((double)(c[i].logit - c[0].logit));
    return total;
}

/* Typical sampling leaves the tokens whose surprise is nearest to the entropy.  Sorted candidates
 * have rising surprise, so those are a window of them.  Returns its first; *n is the window's. */
static const candidate *cut_atypical(const kvd_sampler *sm, const candidate *c, uint32_t *n)
{
    double   log_mass, entropy = 0.0, sum = 0.0;
    uint32_t lo, hi;

    if (!(sm->p.typical_p > 0.0f && sm->p.typical_p < 1.0f))
        return c;
    log_mass = log(mass_of(c, *n));
    for (uint32_t i = 0; i < *n; i++) {
        const double surprise = log_mass - (double)(c[i].logit - c[0].logit);

        entropy += exp(-surprise) * surprise;
    }
    for (lo = 0; lo < *n && log_mass - (double)(c[lo].logit - c[0].logit) < entropy;)
        lo++;
    for (hi = lo; (lo > 0 || hi < *n) && sum <= (double)sm->p.typical_p;) {
        const double below =
            lo > 0 ? entropy - log_mass + (double)(c[lo - 1].logit - c[0].logit) : INFINITY;
        const double above =
            hi < *n ? log_mass - (double)(c[hi].logit - c[0].logit) - entropy : INFINITY;
        const uint32_t i = lo > 0 && (hi == *n || below <= above) ? --lo : hi++;

        sum += exp((double)(c[i].logit - c[0].logit) - log_mass);
    }
    *n = hi - lo;
    return c + lo;
}

/* XTC leaves out the best tokens, by chance, but for the last of those with at least
 * xtc_threshold.  Returns the first that is left; *n is how many are. */
static const candidate *cut_top(kvd_sampler *sm, const candidate *c, uint32_t *n)
{
    double   least;
    uint32_t last = 0;

    if (sm->p.xtc_probability <= 0.0f || sm->p.xtc_threshold > XTC_OFF || *n < 2)
        return c;
    if (kvd_rng_f32(&sm->rng) > sm->p.xtc_probability)
        return c;
    least = (double)sm->p.xtc_threshold * mass_of(c, *n);
    while (last + 1 < *n && exp((double)(c[last + 1].logit - c[0].logit)) >= least)
        last++;
    *n -= last;
    return c + last;
}

/* How many of the n sorted candidates top-p and min-p leave; at least one. */
static uint32_t cut_tail(const kvd_sampler *sm, const candidate *c, uint32_t n)
{
    double   sum  = 0.0;
    uint32_t keep = n;

    if (sm->p.top_p < 1.0f) {
        const double total = mass_of(c, n);

        for (keep = 0; keep < n && sum < (double)sm->p.top_p * total; keep++)
            sum += exp((double)(c[keep].logit - c[0].logit));
    }
    if (sm->p.min_p > 0.0f) /* exp(l - l0) >= min_p */
        while (keep > 1 && c[keep - 1].logit - c[0].logit < logf(sm->p.min_p))
            keep--;
    return keep ? keep : 1;
}

/* Draws one of the n >= 1 sorted candidates. */
static int32_t draw(kvd_sampler *sm, uint32_t n)
{
    const candidate *c     = cut_atypical(sm, sm->cand, &n);
    const double     inv_t = 1.0 / (double)sm->p.temperature;
    double           total = 0.0, u;
    uint32_t         i;

    n = cut_tail(sm, c, n);
    c = cut_top(sm, c, &n);
    for (i = 0; i < n; i++)
        total += exp((double)(c[i].logit - c[0].logit) * inv_t);
    u = (double)kvd_rng_f32(&sm->rng) * total;
    for (i = 0; i + 1 < n; i++) {
        u -= exp((double)(c[i].logit - c[0].logit) * inv_t);
        if (u < 0.0)
            break;
    }
    return c[i].id;
}

uint32_t engine_sampler_n_best(const kvd_sampler *sm)
{
    const kvd_sampler_params *p = &sm->p;

    if (p->n_bias || penalises(p) || sm->dry || sm->gram)
        return 0;
    if (p->temperature <= 0.0f)
        return 1;
    if (p->top_n_sigma > 0.0f)
        return 0;
    return p->top_k > 0 && (uint32_t)p->top_k <= KVD_BEST_MAX ? (uint32_t)p->top_k : 0;
}

int32_t engine_sampler_choose(kvd_sampler *sm, const kvd_best_item *best, uint32_t n)
{
    uint32_t k  = 0;
    int32_t  id = n > 0 && best[0].at >= 0 ? best[0].at : (int32_t)sm->n_vocab - 1; /* as argmax */

    if (sm->p.temperature > 0.0f) {
        for (; k < n && k < (uint32_t)sm->p.top_k && best[k].at >= 0 && best[k].value > -FLT_MAX;
             k++)
            sm->cand[k] = (candidate){ .logit = best[k].value, .id = best[k].at };
        if (k)
            id = draw(sm, k);
    }
    engine_sampler_accept(sm, id);
    return id;
}

/* ---- grammar --------------------------------------------------------------------------- */

kvd_status engine_sampler_set_grammar(kvd_sampler *sm, gram *g, kvd_err *err)
{
    if (g && !sm->mask) {
        sm->mask =
            kvd_calloc(kvd_max_u64(sm->n_vocab, gram_n_token(g)) / 64 + 1, sizeof(*sm->mask));
        if (!sm->mask)
            return kvd_fail(err, KVD_E_NOMEM, 0, "sampler: no memory");
    }
    sm->gram = g;
    if (g)
        gram_begin(g, &sm->at);
    return KVD_OK;
}

gram_at *engine_sampler_at(kvd_sampler *sm)
{
    return &sm->at;
}

bool engine_sampler_may_end(const kvd_sampler *sm)
{
    return !sm->gram || gram_may_end(sm->gram, &sm->at);
}

kvd_status engine_sampler_force(kvd_sampler *sm, int32_t token, kvd_err *err)
{
    if (sm->gram)
        KVD_TRY(gram_accept(sm->gram, &sm->at, token, err));
    engine_sampler_accept(sm, token);
    return KVD_OK;
}

/* Leaves only what the grammar allows. */
static kvd_status constrain(kvd_sampler *sm, kvd_err *err)
{
    if (sm->p.temperature <= 0.0f && gram_allows(sm->gram, &sm->at, argmax(sm->logit, sm->n_vocab)))
        return KVD_OK;
    KVD_TRY(gram_mask(sm->gram, &sm->at, sm->mask, err));
    for (uint32_t i = 0; i < sm->n_vocab; i++)
        if (!(sm->mask[i / 64] >> (i % 64) & 1))
            sm->logit[i] = -INFINITY;
        else if (!(sm->logit[i] > -FLT_MAX)) /* never by a bias, say: still better than nothing */
            sm->logit[i] = -FLT_MAX;
    return KVD_OK;
}

kvd_status engine_sampler_take(kvd_sampler *sm, const float *logits, int32_t *token, kvd_err *err)
{
    uint32_t n;

    memcpy(sm->logit, logits, sm->n_vocab * sizeof(*logits));
    for (size_t i = 0; i < sm->p.n_bias; i++)
        sm->logit[sm->bias[i].token] += sm->bias[i].bias;
    penalise(sm);
    if (sm->dry)
        engine_dry_apply(sm->dry, sm->logit);
    if (sm->gram)
        KVD_TRY(constrain(sm, err));
    if (sm->p.temperature <= 0.0f) {
        *token = argmax(sm->logit, sm->n_vocab);
    } else {
        n      = candidates(sm);
        *token = n ? draw(sm, n) : argmax(sm->logit, sm->n_vocab);
    }
    return engine_sampler_force(sm, *token, err);
}

int32_t engine_sampler_sample(kvd_sampler *sm, const float *logits)
{
    int32_t token;

    return engine_sampler_take(sm, logits, &token, NULL) == KVD_OK ? token : -1;
}
