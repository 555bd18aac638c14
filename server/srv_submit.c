/* SPDX-License-Identifier: Apache-2.0 */
/* srv_submit.c - from a request's body to the engine's queue. */
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "srv_fields.h"
#include "srv_shape.h"

#define ID_BYTES  12
#define RETRY_MAX 60u

static bool name_job(srv_job *j, const char *prefix)
{
    uint8_t id[ID_BYTES];
    int     n = snprintf(j->id, sizeof(j->id), "%s", prefix);

    if (getrandom(id, sizeof(id), 0) != (ssize_t)sizeof(id))
        return false;
    for (size_t i = 0; i < sizeof(id); i++)
        n += snprintf(j->id + n, sizeof(j->id) - (size_t)n, "%02x", id[i]);
    j->created = (int64_t)time(NULL);
    return true;
}

/* Whether the session can ever hold it. */
static bool fits(srv *s, const srv_job *j, const char *field, srv_reply *r)
{
    const uint64_t room = s->ep.n_block * SRV_BLOCK_TOKENS;
    const uint64_t most = room < s->ep.n_ctx ? room : s->ep.n_ctx;

    for (uint32_t i = 0; i < j->req.n_input; i++) {
        const uint32_t n = j->req.input[i].n;

        if (n == 0)
            srv_reply_error(r, 400, field, NULL, "the prompt is empty, it has no tokens");
        else if (n >= most)
            srv_reply_error(r, 400, field, "context_length_exceeded",
                            "the prompt has %u tokens; prompt and answer together have at most "
                            "%llu (%s of the server)",
                            n, (unsigned long long)most, room < s->ep.n_ctx ? "--kv-tokens" : "-c");
        if (n >= most)
            atomic_fetch_add_explicit(&s->n_too_long, 1, memory_order_relaxed);
        if (r->status)
            return false;
    }
    return true;
}

static void refuse(srv *s, srv_reply *r, kvd_status st, const kvd_err *err)
{
    const uint32_t retry = 1 + s->p.n_queue / s->ep.n_seq;

    if (st == KVD_E_BUSY)
        srv_reply_error(r, 429, NULL, "queue_full", "%s", err->msg);
    else
        srv_reply_error(r, 503, NULL, NULL, "%s", err->msg);
    r->retry_s = retry < RETRY_MAX ? retry : RETRY_MAX;
}

static void enqueue(srv *s, srv_call *c, srv_job *j, const srv_shape *shape)
{
    kvd_err    err = { 0 };
    kvd_status st;

    if (!fits(s, j, shape->prompt, &c->reply))
        return;
    j->shape = shape;
    j->route = c->route->path;
    if (!name_job(j, shape->prefix)) {
        srv_reply_error(&c->reply, 503, NULL, NULL, "the system gives no random numbers");
        return;
    }
    st = srv_engine_submit(s->engine, j, &err);
    if (st != KVD_OK) {
        refuse(s, &c->reply, st, &err);
        return;
    }
    srv_job_ref(j);
    c->job = j;
}

srv_job *srv_read_job(srv *s, srv_call *c, bool (*request)(srv_fields *f, srv_request *r))
{
    srv_fields f;
    srv_job   *j = srv_job_new();
    bool       ok;

    if (!j) {
        srv_reply_error(&c->reply, 503, NULL, NULL, "no memory for the request");
        return NULL;
    }
    ok     = srv_fields_open(&f, s, c);
    f.asks = true;
    if (!ok || !request(&f, &j->req) || !srv_open_grammar(&f, &j->req)) {
        srv_job_unref(j);
        j = NULL;
    }
    srv_fields_close(&f);
    return j;
}

void srv_submit(srv *s, srv_call *c, const srv_shape *shape)
{
    srv_job *j = srv_read_job(s, c, shape->request);

    if (j)
        enqueue(s, c, j, shape);
    srv_job_unref(j);
}
