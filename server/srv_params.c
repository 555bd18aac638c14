/* SPDX-License-Identifier: Apache-2.0 */
/* srv_params.c - fields that all requests for text share, and prompts as tokens. */
#include "srv_fields.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define PRIVATE_SALT 32u /* bytes, of a request that uses nothing cached */
#define TOKENS_SLACK 16u /* beyond one a byte: what a normaliser or a BOS adds */

static void get_sampling(srv_fields *f, kvd_sampler_params *p)
{
    const json_t *o    = f->root;
    int64_t       seed = -1, top_k = p->top_k, last = p->penalty_last_n;

    srv_get_float(f, o, "temperature", 0.0, 100.0, &p->temperature);
    srv_get_float(f, o, "top_p", 0.0, 1.0, &p->top_p);
    srv_get_float(f, o, "min_p", 0.0, 1.0, &p->min_p);
    srv_get_float(f, o, "typical_p", 0.0, 1.0, &p->typical_p);
    srv_get_float(f, o, "top_n_sigma", -1.0, 1000.0, &p->top_n_sigma);
    srv_get_float(f, o, "xtc_probability", 0.0, 1.0, &p->xtc_probability);
    srv_get_float(f, o, "xtc_threshold", 0.0, 1.0, &p->xtc_threshold);
    srv_get_float(f, o, "presence_penalty", -2.0, 2.0, &p->presence_penalty);
    srv_get_float(f, o, "frequency_penalty", -2.0, 2.0, &p->frequency_penalty);
    srv_get_float(f, o, "repetition_penalty", 0.01, 100.0, &p->repeat_penalty);
    srv_get_float(f, o, "repeat_penalty", 0.01, 100.0, &p->repeat_penalty);
    srv_get_int(f, o, "top_k", -1, INT32_MAX, &top_k);
    srv_get_int(f, o, "repeat_last_n", -1, INT32_MAX, &last);
    srv_get_int(f, o, "seed", INT64_MIN, INT64_MAX, &seed);
    p->top_k          = (int32_t)top_k;
    p->penalty_last_n = (int32_t)last;
    p->seed           = seed == -1 ? kvd_now_ns() : (uint64_t)seed; /* -1 says nothing */
}

/* Appends a text at *at, zero-terminated. */
static bool get_breaker(srv_fields *f, const json_t *v, char **at, const char **out)
{
    const size_t len = json_string_length(v);

    if (!json_is_string(v) || len == 0 || len > SRV_BREAKER_BYTES ||
        strlen(json_string_value(v)) != len)
        return srv_fields_bad(f, "dry_sequence_breakers", "expected strings of 1 to %u bytes",
                              SRV_BREAKER_BYTES);
    memcpy(*at, json_string_value(v), len + 1);
    *out = *at;
    *at += len + 1;
    return true;
}

/* The list and its texts are one allocation, the request's. */
static void get_breakers(srv_fields *f, srv_request *r)
{
    const json_t *o = srv_get(f->root, "dry_sequence_breakers"), *v;
    const size_t  n = json_array_size(o);
    char         *at;
    size_t        i;

    if (!o)
        return;
    if (!json_is_array(o) || n > SRV_BREAKER_MAX) {
        srv_fields_bad(f, "dry_sequence_breakers", "expected a list of at most %u texts",
                       SRV_BREAKER_MAX);
        return;
    }
    r->breaker = kvd_malloc(n * (sizeof(*r->breaker) + SRV_BREAKER_BYTES + 1) + 1);
    if (!r->breaker) {
        srv_fields_full(f, "no memory for the sequence breakers");
        return;
    }
    at = (char *)(r->breaker + n);
    json_array_foreach(o, i, v)
    {
        if (!get_breaker(f, v, &at, &r->breaker[i]))
            return;
    }
    r->sampling.dry_breaker   = r->breaker;
    r->sampling.n_dry_breaker = n;
}

static void get_dry(srv_fields *f, srv_request *r)
{
    kvd_sampler_params *p       = &r->sampling;
    int64_t             allowed = p->dry_allowed_length, last = p->dry_penalty_last_n;

    srv_get_float(f, f->root, "dry_multiplier", 0.0, 1000.0, &p->dry_multiplier);
    srv_get_float(f, f->root, "dry_base", 1.0, 1000.0, &p->dry_base);
    srv_get_int(f, f->root, "dry_allowed_length", 0, INT32_MAX, &allowed);
    srv_get_int(f, f->root, "dry_penalty_last_n", -1, INT32_MAX, &last);
    p->dry_allowed_length = (int32_t)allowed;
    p->dry_penalty_last_n = (int32_t)last;
    get_breakers(f, r);
}

/* Gives the bias v to n tokens; `what` names them in an error. */
static bool add_bias(srv_fields *f, kvd_sampler_params *p, kvd_logit_bias *bias, const int32_t *id,
                     uint32_t n, const char *what, const json_t *v)
{
    const double x = json_is_false(v) ? -100.0 : json_number_value(v);

    if (!(json_is_number(v) || json_is_false(v)) || !(x >= -100.0 && x <= 100.0))
        return srv_fields_bad(f, "logit_bias",
                              "the bias of token %.32s is not a number in [-100, 100] (-100 or "
                              "false: never)",
                              what);
    for (uint32_t i = 0; i < n; i++) {
        if (p->n_bias == SRV_BIAS_MAX)
            return srv_fields_bad(f, "logit_bias", "more tokens than can be, at most %u",
                                  SRV_BIAS_MAX);
        /* -100: never, as OpenAI has it */
        bias[p->n_bias++] =
            (kvd_logit_bias){ .token = id[i], .bias = x == -100.0 ? -1e9f : (float)x };
    }
    return true;
}

static bool add_bias_id(srv_fields *f, kvd_sampler_params *p, kvd_logit_bias *bias, json_int_t id,
                        const char *what, const json_t *v)
{
    const int32_t token = (int32_t)id;

    if (id < 0 || id >= f->s->info.n_vocab)
        return srv_fields_bad(f, "logit_bias",
                              "\"%.32s\" is none of this model's tokens, 0 to %u (/tokenize tells "
                              "those of a text)",
                              what, f->s->info.n_vocab - 1);
    return add_bias(f, p, bias, &token, 1, what, v);
}

/* By a text: a token's number in decimal, or a text whose tokens all get the bias. */
static bool add_bias_text(srv_fields *f, kvd_sampler_params *p, kvd_logit_bias *bias,
                          const char *text, const json_t *v)
{
    const char *digits = text + (*text == '-');
    srv_input   in     = { 0 };
    bool        ok;

    if (!*digits || !digits[strspn(digits, "0123456789")])
        return add_bias_id(f, p, bias, *digits ? strtoll(text, NULL, 10) : -1, text, v);
    ok = srv_tokenize(f, text, strlen(text), NULL, 0, false, &in) &&
         add_bias(f, p, bias, in.token, in.n, text, v);
    kvd_free(in.token);
    return ok;
}

/* llama-server's form: [[token or text, bias], ...]. */
static bool get_bias_list(srv_fields *f, kvd_sampler_params *p, kvd_logit_bias *bias,
                          const json_t *list)
{
    size_t  i;
    json_t *pair;

    json_array_foreach(list, i, pair)
    {
        const json_t *of = json_array_get(pair, 0), *v = json_array_get(pair, 1);
        bool          ok;
        char          what[24];

        if (json_array_size(pair) != 2 || !(json_is_string(of) || json_is_integer(of)))
            return srv_fields_bad(f, "logit_bias",
                                  "entry %zu of the list is not [token or text, bias]", i);
        snprintf(what, sizeof(what), "%lld", (long long)json_integer_value(of));
        ok = json_is_string(of) ? add_bias_text(f, p, bias, json_string_value(of), v)
                                : add_bias_id(f, p, bias, json_integer_value(of), what, v);
        if (!ok)
            return false;
    }
    return true;
}

static void get_bias(srv_fields *f, kvd_sampler_params *p)
{
    json_t         *o = srv_get(f->root, "logit_bias");
    const size_t    n = json_is_array(o) ? json_array_size(o) : json_object_size(o);
    kvd_logit_bias *bias;
    const char     *name;
    json_t         *v;

    if (o && !json_is_object(o) && !json_is_array(o))
        srv_fields_bad(f, "logit_bias",
                       "expected an object of biases by token, {\"15\": -100}, or a list of pairs");
    if (n == 0)
        return;
    if (n > SRV_BIAS_MAX) {
        srv_fields_bad(f, "logit_bias", "%zu entries, at most %u", n, SRV_BIAS_MAX);
        return;
    }
    bias    = kvd_calloc(SRV_BIAS_MAX, sizeof(*bias));
    p->bias = bias;
    if (!bias) {
        srv_fields_full(f, "no memory for it");
        return;
    }
    if (json_is_array(o)) {
        get_bias_list(f, p, bias, o);
        return;
    }
    json_object_foreach(o, name, v)
    {
        if (!add_bias_text(f, p, bias, name, v))
            return;
    }
}

static bool get_stop(srv_fields *f, srv_request *r, const char *name, const json_t *v)
{
    const size_t len = json_string_length(v);

    if (!json_is_string(v) || len == 0 || len > SRV_STOP_BYTES)
        return srv_fields_bad(f, name, "expected strings of 1 to %u bytes", SRV_STOP_BYTES);
    if (r->n_stop == SRV_STOP_MAX)
        return srv_fields_bad(f, name, "more than %u strings", SRV_STOP_MAX);
    r->stop[r->n_stop] = kvd_strndup(json_string_value(v), len);
    if (!r->stop[r->n_stop])
        return srv_fields_full(f, "no memory for it");
    r->stop_len[r->n_stop++] = len;
    return true;
}

void srv_get_stops(srv_fields *f, srv_request *r, const char *name)
{
    json_t *v = srv_get(f->root, name), *one;
    size_t  i;

    if (v && !json_is_array(v))
        get_stop(f, r, name, v);
    json_array_foreach(v, i, one)
    {
        if (!get_stop(f, r, name, one))
            return;
    }
}

static void get_salt(srv_fields *f, srv_request *r)
{
    const json_t *v   = srv_get(f->root, "cache_salt");
    const size_t  len = json_string_length(v);

    if (!v)
        return;
    if (!json_is_string(v) || len == 0 || len > sizeof(r->salt)) {
        srv_fields_bad(f, "cache_salt", "expected a string of 1 to %zu bytes", sizeof(r->salt));
        return;
    }
    memcpy(r->salt, json_string_value(v), len);
    r->n_salt = (uint32_t)len;
}

/* Without the cache a request has a salt that no other has. */
static void get_cache(srv_fields *f, srv_request *r)
{
    bool cache = true;

    get_salt(f, r);
    srv_get_bool(f, f->root, "cache_prompt", &cache);
    if (cache)
        return;
    if (getrandom(r->salt, PRIVATE_SALT, 0) != (ssize_t)PRIVATE_SALT)
        srv_fields_full(f, "the system gives no random numbers");
    r->n_salt = PRIVATE_SALT;
}

/* Of an answer's tokens; -1: the context alone is their limit. */
static void get_limit(srv_fields *f, srv_request *r, const char *name)
{
    int64_t n = r->n_max == UINT32_MAX ? -1 : (int64_t)r->n_max;

    srv_get_int(f, f->root, name, -1, UINT32_MAX - 1, &n);
    r->n_max = n < 0 ? UINT32_MAX : (uint32_t)n;
}

void srv_get_choices(srv_fields *f, srv_request *r)
{
    const json_t *options = srv_get_object(f, f->root, "stream_options");

    srv_get_stops(f, r, "stop");
    get_limit(f, r, "max_tokens");
    get_limit(f, r, "max_completion_tokens");
    srv_get_u32(f, f->root, "n", 1, SRV_CHOICE_MAX, &r->n);
    srv_get_bool(f, options, "include_usage", &r->include_usage);
    srv_get_bool(f, f->root, "return_progress", &r->progress);
}

void srv_get_params(srv_fields *f, srv_request *r)
{
    const json_t *model = srv_get(f->root, "model");

    if (model && !json_is_string(model))
        srv_fields_bad(f, "model", "expected a string, any one: the server has one model");
    r->sampling = f->s->p.sampling;
    get_sampling(f, &r->sampling);
    get_dry(f, r);
    get_bias(f, &r->sampling);
    get_cache(f, r);
    r->n     = 1;
    r->n_max = f->s->p.n_predict < 0 ? UINT32_MAX : (uint32_t)f->s->p.n_predict;
    get_limit(f, r, "n_predict");
    srv_get_bool(f, f->root, "stream", &r->stream);
    srv_get_bool(f, f->root, "ignore_eos", &r->ignore_eos);
    srv_get_bool(f, f->root, "debug_cache", &r->debug_cache);
}

bool srv_tokenize(srv_fields *f, const char *text, size_t len, const kvd_span *spans, size_t n_span,
                  bool bos, srv_input *out)
{
    const size_t cap = len + TOKENS_SLACK;
    size_t       n   = 0;
    kvd_err      err = { 0 };
    kvd_status   st;

    *out       = (srv_input){ 0 };
    out->token = kvd_malloc(cap * sizeof(*out->token));
    if (!out->token)
        return srv_fields_full(f, "no memory for the tokens of %zu bytes", len);
    st = kvd_tokenize(f->s->model, text, len, spans, n_span, bos, out->token, cap, &n, &err);
    if (st == KVD_E_FULL) {
        kvd_free(out->token);
        out->token = kvd_malloc(n * sizeof(*out->token));
        if (!out->token)
            return srv_fields_full(f, "no memory for %zu tokens", n);
        st = kvd_tokenize(f->s->model, text, len, spans, n_span, bos, out->token, n, &n, &err);
    }
    out->n = (uint32_t)n;
    return srv_fields_status(f, NULL, st, &err);
}

bool srv_get_special(srv_fields *f, bool *out)
{
    srv_get_bool(f, f->root, "parse_special", out);
    if (*out && !f->s->p.parse_special)
        srv_fields_bad(f, "parse_special",
                       "a client's text never becomes special tokens, unless the server runs with "
                       "--parse-special: leave it out");
    return !f->bad;
}

bool srv_tokenize_raw(srv_fields *f, const json_t *text, bool bos, srv_input *out)
{
    const size_t   len     = json_string_length(text);
    const kvd_span all     = { 0, len };
    bool           special = false;

    return srv_get_special(f, &special) &&
           srv_tokenize(f, json_string_value(text), len, &all, special, bos, out);
}
