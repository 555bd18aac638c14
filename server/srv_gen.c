/* SPDX-License-Identifier: Apache-2.0 */
/* srv_gen.c - from tokens of a choice to its text: sampler, detokenizer, stop strings, calls of
 * tools, logprobs.
 *
 * Text goes out as soon as it cannot be part of a stop string any more: what is held back is the
 * longest end of it with which a stop string begins.  Logprobs go out with their token's text. */
#include "srv_engine.h"

#include <math.h>
#include <string.h>

srv_gen *srv_gen_new(srv_job *j, uint32_t choice)
{
    srv_gen *g = kvd_calloc(1, sizeof(*g));

    if (!g)
        return NULL;
    g->job      = j;
    g->choice   = choice;
    g->input    = choice / j->req.n;
    g->turn     = choice % j->req.n;
    g->n_prompt = g->n_token = j->req.input[g->input].n;
    srv_job_ref(j);
    return g;
}

void srv_gen_free(srv_gen *g)
{
    if (!g)
        return;
    kvd_hold_close(g->hold);
    kvd_sampler_close(g->sampler);
    kvd_detok_close(g->detok);
    kvd_tool_close(g->tools);
    kvd_buf_free(&g->text);
    kvd_free(g->held);
    kvd_free(g->echo);
    kvd_free(g->token);
    srv_job_unref(g->job);
    kvd_free(g);
}

/* Whether the sampler has a use for the prompt. */
static bool looks_back(const kvd_sampler_params *p)
{
    return p->repeat_penalty != 1.0f || p->presence_penalty != 0.0f ||
           p->frequency_penalty != 0.0f || p->dry_multiplier != 0.0f;
}

/* What takes reasoning and calls out of the text. */
static kvd_status open_parts(srv_gen *g, kvd_err *err)
{
    const srv_request *r = &g->job->req;
    kvd_answer_params  p = KVD_ANSWER_PARAMS_INIT;

    if (r->tools == KVD_TOOLS_NONE && r->reasoning == KVD_REASONING_NONE)
        return KVD_OK;
    p.tools           = r->tools;
    p.tools_json      = r->tools_json;
    p.reasoning       = r->reasoning;
    p.reasoning_state = r->reasoning_state;
    return kvd_answer_open(&g->tools, &p, err);
}

kvd_status srv_gen_open(srv_gen *g, const kvd_model *m, uint32_t n_ctx, kvd_err *err)
{
    const srv_request *r    = &g->job->req;
    const srv_input   *in   = &r->input[g->input];
    const uint32_t     room = n_ctx - in->n;
    kvd_sampler_params p    = r->sampling;

    if (g->token)
        return KVD_OK;
    g->n_max = r->n_max < room ? r->n_max : room;
    p.seed += g->turn;
    KVD_TRY(kvd_sampler_open(&g->sampler, m, &p, err));
    if (r->grammar)
        KVD_TRY(kvd_sampler_set_grammar(g->sampler, r->grammar, err));
    KVD_TRY(kvd_detok_open(&g->detok, m, err));
    KVD_TRY(open_parts(g, err));
    if (r->echo && r->logprobs && !(g->echo = kvd_calloc(in->n, sizeof(*g->echo))))
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the logprobs of %u tokens", in->n);
    g->token = kvd_malloc(((size_t)in->n + g->n_max) * sizeof(*g->token));
    if (!g->token)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %u tokens", in->n + g->n_max);
    memcpy(g->token, in->token, in->n * sizeof(*g->token));
    for (uint32_t i = 0; looks_back(&p) && i < in->n; i++)
        kvd_sampler_accept(g->sampler, in->token[i]);
    return KVD_OK;
}

uint32_t srv_gen_n_best(const srv_gen *g)
{
    return g->job->req.logprobs ? 0 : kvd_sampler_n_best(g->sampler);
}

/* ---- logprobs ------------------------------------------------------------------------- */

/* The n largest in order; of equals the lower id first. */
static uint32_t take_top(const float *logits, uint32_t n_vocab, uint32_t n, srv_top *top)
{
    uint32_t have = 0;

    for (uint32_t i = 0; n > 0 && i < n_vocab; i++) {
        uint32_t at = have;

        if (have == n && !(logits[i] > top[n - 1].logprob))
            continue;
        at = have < n ? have++ : n - 1;
        for (; at > 0 && logits[i] > top[at - 1].logprob; at--)
            top[at] = top[at - 1];
        top[at] = (srv_top){ .id = (int32_t)i, .logprob = logits[i] };
    }
    return have;
}

/* By the model's own distribution: no temperature, penalty or bias. */
static void measure(srv_token *t, const float *logits, uint32_t n_vocab, int32_t id, uint32_t n_top)
{
    float  most = -INFINITY;
    double sum  = 0.0, log_z;

    for (uint32_t i = 0; i < n_vocab; i++)
        most = logits[i] > most ? logits[i] : most;
    for (uint32_t i = 0; i < n_vocab; i++)
        sum += exp((double)logits[i] - (double)most);
    log_z      = (double)most + log(sum);
    t->id      = id;
    t->logprob = (float)((double)logits[id] - log_z);
    t->n_top   = take_top(logits, n_vocab, n_top, t->top);
    for (uint32_t i = 0; i < t->n_top; i++)
        t->top[i].logprob = (float)((double)t->top[i].logprob - log_z);
}

static srv_held *hold(srv_gen *g)
{
    if (g->n_held == g->cap_held) {
        const uint32_t cap  = g->cap_held ? 2 * g->cap_held : 8;
        srv_held      *more = kvd_realloc(g->held, cap * sizeof(*more));

        if (!more)
            return NULL;
        g->held     = more;
        g->cap_held = cap;
    }
    return &g->held[g->n_held++];
}

/* ---- text ------------------------------------------------------------------------------- */

/* What the tool stream has found goes out. */
static void tell_found(srv_gen *g, srv_engine *e)
{
    static const srv_event_kind kinds[] = { [KVD_TOOL_EVENT_TEXT]      = SRV_EVENT_TEXT,
                                            [KVD_TOOL_EVENT_BEGIN]     = SRV_EVENT_CALL,
                                            [KVD_TOOL_EVENT_DELTA]     = SRV_EVENT_ARGUMENTS,
                                            [KVD_TOOL_EVENT_END]       = SRV_EVENT_CALL_END,
                                            [KVD_TOOL_EVENT_REASONING] = SRV_EVENT_REASONING };
    kvd_tool_event              t       = { .struct_size = sizeof(t) };

    while (kvd_tool_next(g->tools, &t)) {
        srv_event *ev = srv_event_new(kinds[t.kind], g->choice, t.text, t.len, 0);
        if (ev) {
            ev->call     = t.call;
            ev->complete = t.complete;
        }
        g->has_calls = g->has_calls || t.kind == KVD_TOOL_EVENT_BEGIN;
        srv_tell(e, g->job, ev);
    }
}

/* The first n bytes of the text go out, with the tokens that end in them.  Where text is taken
 * apart a token's logprobs come before what becomes of its text. */
static void tell(srv_gen *g, srv_engine *e, size_t n)
{
    uint32_t   n_token = 0;
    srv_event *ev;

    while (n_token < g->n_held && g->held[n_token].end <= n)
        n_token++;
    if (n == 0 && n_token == 0)
        return;
    ev = srv_event_new(SRV_EVENT_TEXT, g->choice, g->text.data, g->tools ? 0 : n, n_token);
    for (uint32_t i = 0; ev && i < n_token; i++)
        ev->token[i] = g->held[i].token;
    for (uint32_t i = n_token; i < g->n_held; i++) {
        g->held[i - n_token] = g->held[i];
        if (g->held[i - n_token].end != SIZE_MAX)
            g->held[i - n_token].end -= n;
    }
    g->n_held -= n_token;
    if (!g->tools || !ev || n_token)
        srv_tell(e, g->job, ev);
    else
        srv_event_free(ev);
    if (g->tools && kvd_tool_feed(g->tools, g->text.data, n, NULL) != KVD_OK)
        srv_tell(e, g->job, NULL);
    if (g->tools)
        tell_found(g, e);
    if (n)
        memmove(g->text.data, g->text.data + n, g->text.len - n);
    g->text.len -= n;
}

/* Where a stop string begins that ends behind `from`; the earliest.  -1: there is none. */
static int32_t find_stop(const srv_gen *g, size_t from, size_t *at)
{
    const srv_request *r     = &g->job->req;
    int32_t            found = -1;

    for (uint32_t i = 0; i < r->n_stop; i++) {
        const size_t len   = r->stop_len[i];
        const size_t first = from + 1 > len ? from + 1 - len : 0;

        for (size_t k = first; k + len <= g->text.len; k++) {
            if (memcmp(g->text.data + k, r->stop[i], len) != 0)
                continue;
            if (found < 0 || k < *at) {
                found = (int32_t)i;
                *at   = k;
            }
            break;
        }
    }
    return found;
}

/* Bytes at the end with which a stop string begins. */
static size_t maybe_stop(const srv_gen *g)
{
    const srv_request *r    = &g->job->req;
    size_t             most = 0;

    for (uint32_t i = 0; i < r->n_stop; i++)
        for (size_t n = r->stop_len[i] - 1; n > most; n--)
            if (n <= g->text.len && memcmp(g->text.data + g->text.len - n, r->stop[i], n) == 0)
                most = n;
    return most;
}

/* More text; true: a stop string has ended it, and what came before has gone out. */
static bool add_text(srv_gen *g, srv_engine *e, const char *text, size_t len, int32_t *stop)
{
    const size_t from = g->text.len;
    size_t       at   = 0;

    kvd_buf_put(&g->text, text, len);
    for (uint32_t i = g->n_held; i > 0 && g->held[i - 1].end == SIZE_MAX; i--)
        g->held[i - 1].end = g->text.len;
    *stop = find_stop(g, from, &at);
    if (*stop >= 0) {
        while (g->n_held > 0 && g->held[g->n_held - 1].end > at)
            g->n_held--;
        tell(g, e, at);
        g->text.len = 0;
        g->n_held   = 0;
        return true;
    }
    tell(g, e, g->text.len - maybe_stop(g));
    return false;
}

static void flush(srv_gen *g, srv_engine *e)
{
    size_t      len;
    const char *text = kvd_detok_flush(g->detok, &len);

    kvd_buf_put(&g->text, text, len);
    for (uint32_t i = 0; i < g->n_held; i++)
        if (g->held[i].end > g->text.len)
            g->held[i].end = g->text.len;
    tell(g, e, g->text.len);
}

void srv_gen_end(srv_gen *g, srv_engine *e, bool stopped, bool cut)
{
    if (!stopped)
        flush(g, e);
    if (!g->tools)
        return;
    if ((g->job->req.tools != KVD_TOOLS_NONE ? kvd_tool_cut(g->tools, cut, NULL)
                                             : kvd_tool_flush(g->tools, NULL)) != KVD_OK)
        srv_tell(e, g->job, NULL);
    tell_found(g, e);
}

static void count_token(srv_gen *g, srv_engine *e)
{
    const uint64_t now = kvd_now_ns();

    if (g->last_ns) {
        srv_hist_add(&e->counts.gap, now - g->last_ns);
    } else {
        g->first_ns = now;
        if (!g->job->answer_ns[g->input])
            g->job->answer_ns[g->input] = now;
        srv_hist_add(&e->counts.prefill, now - g->start_ns);
    }
    g->last_ns = now;
    if (g->job->usage.n_generated++ == 0)
        srv_hist_add(&e->counts.first, now - g->job->submit_ns);
    e->counts.n_generated++;
}

kvd_status srv_gen_next(srv_gen *g, srv_engine *e, uint32_t row, bool *over, srv_finish *finish,
                        int32_t *stop, kvd_err *err)
{
    const srv_request *r = &g->job->req;
    const char        *text;
    size_t             len;
    int32_t            id;

    *over   = true;
    *finish = SRV_FINISH_STOP;
    *stop   = -1;
    KVD_TRY(kvd_sampler_pick(g->sampler, e->p.session, row, &id, err));
    count_token(g, e);
    g->job->usage.n_reasoning += g->tools && kvd_tool_reasons(g->tools);
    if (kvd_token_is_end(e->p.model, id) && (!r->ignore_eos || r->grammar)) /* nothing else fits */
        return KVD_OK;
    g->token[g->n_token++] = id;
    if (r->logprobs) {
        srv_held *h = hold(g);

        if (!h)
            return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for logprobs");
        measure(&h->token, kvd_logits(e->p.session, row), e->p.n_vocab, id, r->n_top);
        h->end = SIZE_MAX; /* its text is not complete yet */
    }
    text = kvd_detok_feed(g->detok, id, g->tools && kvd_token_is_tool_mark(e->p.model, id), &len);
    if (len > 0 && add_text(g, e, text, len, stop))
        return KVD_OK;
    if (g->text.oom)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the answer's text");
    *finish = SRV_FINISH_LENGTH;
    *over   = g->n_token - g->n_prompt >= g->n_max;
    return KVD_OK;
}

/* ---- the prompt, said again ------------------------------------------------------------------ */

void srv_gen_echo(srv_gen *g, const srv_engine *e, uint32_t at, uint32_t row)
{
    const float *logits = kvd_logits(e->p.session, row);

    if (logits && at + 1 < g->n_prompt)
        measure(&g->echo[at + 1], logits, e->p.n_vocab, g->token[at + 1], g->job->req.n_top);
}

void srv_gen_tell_echo(srv_gen *g, srv_engine *e)
{
    const uint32_t n = g->echo ? g->n_prompt : 0;
    kvd_buf        b = { 0 };
    kvd_detok     *d = NULL;
    const char    *text;
    size_t         len;
    srv_event     *ev = NULL;

    if (kvd_detok_open(&d, e->p.model, NULL) == KVD_OK) {
        for (uint32_t i = 0; i < g->n_prompt; i++) {
            text = kvd_detok_feed(d, g->token[i], false, &len);
            kvd_buf_put(&b, text, len);
        }
        text = kvd_detok_flush(d, &len);
        kvd_buf_put(&b, text, len);
        if (!b.oom)
            ev = srv_event_new(SRV_EVENT_TEXT, g->choice, b.data, b.len, n);
    }
    if (ev && n) {
        memcpy(ev->token, g->echo, n * sizeof(*ev->token));
        ev->token[0] = (srv_token){ .id = g->token[0], .logprob = NAN };
    }
    srv_tell(e, g->job, ev);
    kvd_detok_close(d);
    kvd_buf_free(&b);
}
