/* SPDX-License-Identifier: Apache-2.0 */
/* srv_info.c - routes that say how the server is and what it has; and the one that empties its
 * cache. */
#include "srv_routes.h"
#include "srv_shape.h"

#include <string.h>

/* Requests are answered all the same. */
static void put_cache_pause(srv *s, kvd_buf *b)
{
    char why[sizeof(((kvd_stats *)NULL)->cache_pause)];

    srv_engine_cache_pause(s->engine, why, sizeof(why));
    if (!why[0])
        return;
    kvd_buf_puts(b, ",\"cache\":\"paused\",\"cache_error\":");
    srv_put_text(b, why);
}

void srv_route_health(srv *s, srv_call *c)
{
    kvd_buf *b = &c->reply.body;

    if (s->sick_ns || atomic_load_explicit(&s->engine->failed, memory_order_acquire)) {
        c->reply.status = 503;
        kvd_buf_puts(b, "{\"status\":\"failed\"}");
    } else if (s->stop_ns) {
        c->reply.status = 503;
        kvd_buf_puts(b, "{\"status\":\"stopping\"}");
    } else {
        c->reply.status = 200;
        kvd_buf_puts(b, "{\"status\":\"ok\"");
        put_cache_pause(s, b);
        kvd_buf_puts(b, "}");
    }
}

static void put_model(const srv *s, kvd_buf *b)
{
    kvd_buf_puts(b, "{\"id\":");
    srv_put_text(b, s->name);
    kvd_buf_printf(
        b,
        ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"kvdrive\",\"aliases\":[],"
        "\"max_model_len\":%u,\"meta\":{\"n_ctx\":%u,"
        "\"n_params\":%llu,\"size\":%llu,\"n_vocab\":%u,\"n_ctx_train\":%u,\"n_embd\":%u}}",
        (long long)s->started, s->plan.n_ctx, s->plan.n_ctx, (unsigned long long)s->info.n_param,
        (unsigned long long)s->info.weight_bytes, s->info.n_vocab, s->info.n_ctx_train,
        s->info.n_embd);
}

void srv_route_models(srv *s, srv_call *c)
{
    c->reply.status = 200;
    kvd_buf_puts(&c->reply.body, "{\"object\":\"list\",\"data\":[");
    put_model(s, &c->reply.body);
    kvd_buf_puts(&c->reply.body, "]}");
}

void srv_route_model(srv *s, srv_call *c)
{
    if (strcmp(c->name, s->name) != 0) {
        srv_reply_error(&c->reply, 404, "model", "model_not_found",
                        "there is no model \"%s\", only \"%s\"", c->name, s->name);
        return;
    }
    c->reply.status = 200;
    put_model(s, &c->reply.body);
}

/* A token's text, or null. */
static void put_special(const srv *s, const char *name, int32_t id, kvd_buf *b)
{
    kvd_buf_printf(b, "\"%s\":", name);
    if (id < 0)
        kvd_buf_puts(b, "null");
    else
        srv_put_token(s, id, b);
}

void srv_route_tokenizer(srv *s, srv_call *c)
{
    kvd_buf *b = &c->reply.body;

    c->reply.status = 200;
    kvd_buf_putc(b, '{');
    put_special(s, "bos_token", s->info.bos_token, b);
    kvd_buf_putc(b, ',');
    put_special(s, "eos_token", s->info.eos_token, b);
    kvd_buf_putc(b, ',');
    put_special(s, "pad_token", s->info.eos_token, b); /* nothing is padded */
    kvd_buf_printf(b,
                   ",\"vocab_size\":%u,\"model_max_length\":%u,\"chat_template\":", s->info.n_vocab,
                   s->plan.n_ctx);
    if (s->info.chat_template)
        srv_put_text(b, s->info.chat_template);
    else
        kvd_buf_puts(b, "null");
    kvd_buf_putc(b, '}');
}

static void put_defaults(const srv *s, kvd_buf *b)
{
    const kvd_sampler_params *p = &s->p.sampling;

    kvd_buf_printf(
        b,
        "{\"n_ctx\":%u,\"temperature\":%g,\"top_k\":%d,\"top_p\":%g,\"min_p\":%g,\"repeat_"
        "penalty\":%g,"
        "\"presence_penalty\":%g,\"frequency_penalty\":%g,\"repeat_last_n\":%d,\"typical_p\":%g,"
        "\"top_n_sigma\":%g,\"xtc_probability\":%g,\"xtc_threshold\":%g,\"dry_multiplier\":%g,"
        "\"dry_base\":%g,\"dry_allowed_length\":%d,\"dry_penalty_last_n\":%d}",
        s->plan.n_ctx, (double)p->temperature, p->top_k, (double)p->top_p, (double)p->min_p,
        (double)p->repeat_penalty, (double)p->presence_penalty, (double)p->frequency_penalty,
        p->penalty_last_n, (double)p->typical_p, (double)p->top_n_sigma, (double)p->xtc_probability,
        (double)p->xtc_threshold, (double)p->dry_multiplier, (double)p->dry_base,
        p->dry_allowed_length, p->dry_penalty_last_n);
}

void srv_route_props(srv *s, srv_call *c)
{
    kvd_buf *b = &c->reply.body;

    c->reply.status = 200;
    kvd_buf_printf(b, "{\"version\":\"%s\",\"model\":", kvd_version());
    srv_put_text(b, s->name);
    kvd_buf_printf(b, ",\"build_info\":\"kvdrive-%s\",\"model_alias\":", kvd_version());
    srv_put_text(b, s->name);
    kvd_buf_puts(b, ",\"model_path\":");
    srv_put_text(b, s->p.path);
    kvd_buf_putc(b, ',');
    put_special(s, "bos_token", s->info.bos_token, b);
    kvd_buf_putc(b, ',');
    put_special(s, "eos_token", s->info.eos_token, b);
    kvd_buf_puts(b, ",\"architecture\":");
    srv_put_text(b, s->info.arch);
    kvd_buf_puts(b, ",\"backend\":");
    srv_put_text(b, s->info.backend);
    kvd_buf_printf(b,
                   ",\"total_slots\":%u,\"n_ctx\":%u,\"kv_tokens\":%llu,\"kv_device_bytes\":%llu,"
                   "\"kv_host_bytes\":%llu,\"kv_resident\":%s,\"default_generation_settings\":",
                   s->plan.n_seq, s->plan.n_ctx,
                   (unsigned long long)(s->ep.n_block * SRV_BLOCK_TOKENS),
                   (unsigned long long)s->plan.kv_device_bytes,
                   (unsigned long long)s->plan.kv_host_bytes,
                   s->plan.kv_resident ? "true" : "false");
    put_defaults(s, b);
    kvd_buf_puts(b, ",\"chat_template\":");
    if (s->info.chat_template)
        srv_put_text(b, s->info.chat_template);
    else
        kvd_buf_puts(b, "null");
    kvd_buf_putc(b, '}');
}

void srv_route_slots(srv *s, srv_call *c)
{
    static const char *const states[] = { "idle", "prompt", "answer" };
    kvd_buf                 *b        = &c->reply.body;
    srv_view                 v;

    srv_engine_look(s->engine, &v, s->slots);
    c->reply.status = 200;
    kvd_buf_printf(b, "{\"waiting\":%u,\"running\":%u,\"slots\":[", v.n_waiting, v.n_running);
    for (uint32_t i = 0; i < s->plan.n_seq; i++) {
        const srv_slot_view *w = &v.slot[i];

        kvd_buf_printf(b,
                       "%s{\"id\":%u,\"state\":\"%s\",\"request\":\"%s\",\"tokens\":%u,"
                       "\"prompt_tokens\":%u,\"generated_tokens\":%u}",
                       i ? "," : "", i, states[w->state], w->id, w->n_token, w->n_prompt,
                       w->n_generated);
    }
    kvd_buf_puts(b, "],\"parked\":[");
    for (uint32_t i = s->plan.n_seq, n = 0; i < s->plan.n_seq + s->plan.n_parked; i++)
        if (v.slot[i].n_token)
            kvd_buf_printf(b, "%s{\"id\":%u,\"tokens\":%u}", n++ ? "," : "", i, v.slot[i].n_token);
    kvd_buf_puts(b, "]}");
}

void srv_route_clear(srv *s, srv_call *c)
{
    char   *json = NULL;
    kvd_err err  = { 0 };

    if (srv_engine_clear(s->engine, &json, &err) != KVD_OK) {
        srv_reply_error(&c->reply, 503, NULL, NULL, "%s", err.msg);
        return;
    }
    c->reply.status = 200;
    kvd_buf_puts(&c->reply.body, json);
    kvd_free(json);
}
