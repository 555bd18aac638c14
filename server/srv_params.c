/* SPDX-License-Identifier: Apache-2.0 */
/* srv_params.c - fields that all requests for text share, and prompts as tokens. */
#include "srv_fields.h"

#include <stdlib.h>
#include <string.h>

#define TOKENS_SLACK 16u /* beyond one a byte: what a normaliser or a BOS adds */

static void get_sampling(srv_fields *f, kvd_sampler_params *p)
{
    const json_t *o    = f->root;
    int64_t       seed = -1, top_k = p->top_k, last = p->penalty_last_n;

    srv_get_float(f, o, "temperature", 0.0, 100.0, &p->temperature);
    srv_get_float(f, o, "top_p", 0.0, 1.0, &p->top_p);
    srv_get_float(f, o, "min_p", 0.0, 1.0, &p->min_p);
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

static bool get_bias_entry(srv_fields *f, const char *name, const json_t *v, kvd_logit_bias *out)
{
    char      *end;
    const long id = strtol(name, &end, 10);
    double     x  = json_number_value(v);

    if (*name < '0' || *name > '9' || *end || id >= (long)f->s->info.n_vocab)
        return srv_fields_bad(f, "logit_bias",
                              "\"%.32s\" is none of this model's tokens, 0 to %u (/tokenize tells "
                              "those of a text)",
                              name, f->s->info.n_vocab - 1);
    if (!json_is_number(v) || !(x >= -100.0 && x <= 100.0))
        return srv_fields_bad(f, "logit_bias",
                              "the bias of token %ld is not a number in [-100, 100] (-100: never)",
                              id);
    *out = (kvd_logit_bias){ .token = (int32_t)id, .bias = (float)x };
    if (x == -100.0) /* never, as OpenAI has it */
        out->bias = -1e9f;
    return true;
}

static void get_bias(srv_fields *f, kvd_sampler_params *p)
{
    json_t         *o = srv_get(f->root, "logit_bias");
    const size_t    n = json_object_size(o);
    kvd_logit_bias *bias;
    const char     *name;
    json_t         *v;

    if (o && !json_is_object(o) && !(json_is_array(o) && json_array_size(o) == 0))
        srv_fields_bad(f, "logit_bias", "expected an object of biases by token: {\"15\": -100}");
    if (n == 0)
        return;
    if (n > SRV_BIAS_MAX) {
        srv_fields_bad(f, "logit_bias", "%zu entries, at most %u", n, SRV_BIAS_MAX);
        return;
    }
    bias    = kvd_calloc(n, sizeof(*bias));
    p->bias = bias;
    if (!bias) {
        srv_fields_full(f, "no memory for it");
        return;
    }
    json_object_foreach(o, name, v)
    {
        if (!get_bias_entry(f, name, v, &bias[p->n_bias]))
            return;
        p->n_bias++;
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
    get_bias(f, &r->sampling);
    get_salt(f, r);
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
