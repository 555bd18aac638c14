/* SPDX-License-Identifier: Apache-2.0 */
/* engine_dry.c - DRY: a penalty on tokens that would make a repetition longer.
 *
 * A token that followed an earlier copy of the text's last n tokens, n >= allowed_length, loses
 * multiplier * base^(n - allowed_length) of its logit.  A copy does not reach back beyond the
 * last sequence breaker, a text such as a line feed. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/engine.h"

#define BREAKERS_MAX      64u
#define BREAKER_BYTES_MAX 64u

struct engine_dry {
    kvd_sampler_params p;
    const tok         *tok; /* borrowed; NULL: no token has a text */
    uint32_t           n_vocab;
    char               breaker[BREAKERS_MAX][BREAKER_BYTES_MAX]; /* not zero-terminated */
    size_t             breaker_len[BREAKERS_MAX];
    uint32_t           n_breaker;
    char               tail[BREAKER_BYTES_MAX]; /* last bytes of the text */
    size_t             n_tail;
    uint32_t           n_since; /* tokens behind the one in which the last breaker ended */
    int32_t           *ring;    /* [cap] last tokens */
    uint32_t           cap, len, at;
    uint32_t          *copy; /* [cap] by distance from the last token; see measure() */
    uint32_t          *best; /* [n_vocab] longest copy that the token followed, plus 1; 0: none */
};

static kvd_status take_breakers(engine_dry *d, kvd_err *err)
{
    static const char *const usual[] = { "\n", ":", "\"", "*" };
    const char *const       *list    = d->p.dry_breaker ? d->p.dry_breaker : usual;
    const size_t             n       = d->p.dry_breaker ? d->p.n_dry_breaker : KVD_COUNTOF(usual);

    if (n > BREAKERS_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "sampler: %zu sequence breakers (dry_breaker), at most %u", n,
                        BREAKERS_MAX);
    for (size_t i = 0; i < n; i++) {
        const size_t len = list[i] ? strlen(list[i]) : 0;

        if (len == 0 || len > BREAKER_BYTES_MAX)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "sampler: a sequence breaker (dry_breaker) has %zu bytes: expected 1 "
                            "to %u",
                            len, BREAKER_BYTES_MAX);
        memcpy(d->breaker[i], list[i], len);
        d->breaker_len[i] = len;
    }
    d->n_breaker     = (uint32_t)n;
    d->p.dry_breaker = NULL;
    return KVD_OK;
}

kvd_status engine_dry_open(engine_dry **out, uint32_t n_vocab, const tok *t,
                           const kvd_sampler_params *p, uint32_t n_max, kvd_err *err)
{
    engine_dry *d = kvd_calloc(1, sizeof(*d));
    kvd_status  st;

    *out = NULL;
    if (!d)
        return kvd_fail(err, KVD_E_NOMEM, 0, "sampler: no memory");
    d->p       = *p;
    d->p.bias  = NULL; /* the caller's */
    d->tok     = t;
    d->n_vocab = n_vocab;
    d->cap     = p->dry_penalty_last_n < 0
                     ? n_max
                     : (uint32_t)kvd_min_u64((uint32_t)p->dry_penalty_last_n, n_max);
    d->ring    = kvd_calloc(d->cap, sizeof(*d->ring));
    d->copy    = kvd_calloc(d->cap, sizeof(*d->copy));
    d->best    = kvd_calloc(n_vocab, sizeof(*d->best));
    st         = take_breakers(d, err);
    if (st == KVD_OK && (!d->ring || !d->copy || !d->best))
        st = kvd_fail(err, KVD_E_NOMEM, 0, "sampler: no memory");
    if (st == KVD_OK)
        *out = d;
    else
        engine_dry_close(d);
    return st;
}

void engine_dry_close(engine_dry *d)
{
    if (!d)
        return;
    kvd_free(d->ring);
    kvd_free(d->copy);
    kvd_free(d->best);
    kvd_free(d);
}

/* Whether a breaker ends in text, which follows the tail. */
static bool breaks(const engine_dry *d, const char *text, size_t len, uint32_t which)
{
    const char  *b = d->breaker[which];
    const size_t m = d->breaker_len[which];

    for (size_t i = 0; i + m <= len; i++)
        if (memcmp(text + i, b, m) == 0)
            return true;
    for (size_t s = 1; s < m && s <= d->n_tail; s++) /* s bytes of it are in the tail */
        if (m - s <= len && memcmp(d->tail + d->n_tail - s, b, s) == 0 &&
            memcmp(text, b + s, m - s) == 0)
            return true;
    return false;
}

static void add_text(engine_dry *d, const char *text, size_t len)
{
    const size_t take = len < sizeof(d->tail) ? len : sizeof(d->tail);
    const size_t keep = d->n_tail + take > sizeof(d->tail) ? sizeof(d->tail) - take : d->n_tail;

    memmove(d->tail, d->tail + d->n_tail - keep, keep);
    memcpy(d->tail + keep, text + len - take, take);
    d->n_tail = keep + take;
}

void engine_dry_accept(engine_dry *d, int32_t token)
{
    size_t      len  = 0;
    const char *text = d->tok ? tok_bytes(d->tok, token, &len) : NULL;
    bool        end  = false;

    if (d->cap == 0)
        return;
    if (text) {
        for (uint32_t i = 0; i < d->n_breaker && !end; i++)
            end = breaks(d, text, len, i);
        add_text(d, text, len);
    }
    d->n_since     = end ? 0 : d->n_since + (d->n_since < d->cap);
    d->ring[d->at] = token;
    d->at          = (d->at + 1) % d->cap;
    d->len += d->len < d->cap;
}

/* The token that lies i before the last one. */
static int32_t before_last(const engine_dry *d, uint32_t i)
{
    return d->ring[d->at > i ? d->at - 1 - i : d->at + d->cap - 1 - i];
}

/* copy[i]: how many tokens, read backwards, are the same from the last one and from the i-th
 * before it.  The Z algorithm: each token is compared a constant number of times. */
static void measure(engine_dry *d)
{
    uint32_t lo = 0, hi = 0; /* [lo, hi) is the copy that reaches farthest */

    for (uint32_t i = 1; i < d->len; i++) {
        uint32_t n = i < hi ? (uint32_t)kvd_min_u64(d->copy[i - lo], hi - i) : 0;

        while (i + n < d->len && before_last(d, n) == before_last(d, i + n))
            n++;
        d->copy[i] = n;
        if (i + n > hi) {
            lo = i;
            hi = i + n;
        }
    }
}

void engine_dry_apply(engine_dry *d, float *logit)
{
    const uint32_t allowed = (uint32_t)d->p.dry_allowed_length;
    const double   base    = (double)d->p.dry_base;
    /* a penalty stays below FLT_MAX */
    const double most = base > 1.000001 ? floor(log((double)FLT_MAX) / log(base)) : FLT_MAX;

    if (d->len <= allowed || d->n_since < allowed)
        return;
    measure(d);
    for (uint32_t i = 1; i < d->len; i++) {
        const uint32_t n    = (uint32_t)kvd_min_u64(d->copy[i], d->n_since);
        const int32_t  next = before_last(d, i - 1);

        if (n >= allowed && d->best[next] < n + 1)
            d->best[next] = n + 1;
    }
    for (uint32_t i = 1; i < d->len; i++) {
        const int32_t next = before_last(d, i - 1);

        if (d->best[next] == 0)
            continue; /* no copy, or done */
        logit[next] -= (float)((double)d->p.dry_multiplier *
                               pow(base, fmin((double)(d->best[next] - 1 - allowed), most)));
        d->best[next] = 0;
    }
}
