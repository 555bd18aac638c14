/* SPDX-License-Identifier: Apache-2.0 */
/* srv_work.c - threads that do what must not hold up the net thread: they parse bodies, render
 * templates, tokenize, and wait for the engine.  Calls are bounded by connections.  A large body
 * may take seconds: all but one thread leave those alone, so that others need not wait for them. */
#include "srv_http.h"

#include <string.h>

#define LARGE (1u << 20) /* bytes of a body */

/* The first that waits, of those whose body is not larger than `most`, is taken out of the list. */
static srv_call *take_call(srv *s, size_t most)
{
    srv_call *last = NULL, *c = s->work;

    while (c && c->body.len > most) {
        last = c;
        c    = c->next_work;
    }
    if (!c)
        return NULL;
    if (last)
        last->next_work = c->next_work;
    else
        s->work = c->next_work;
    if (s->work_last == c)
        s->work_last = last;
    return c;
}

static srv_call *next_call(srv *s, size_t most)
{
    srv_call *c = NULL;

    pthread_mutex_lock(&s->lock);
    while (!s->work_ends && !(c = take_call(s, most)))
        pthread_cond_wait(&s->work_wake, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return c;
}

static void work(srv *s, size_t most)
{
    srv_call *c;

    while ((c = next_call(s, most))) {
        c->route->run(s, c);
        kvd_buf_free(&c->body);
        pthread_mutex_lock(&s->lock);
        c->next_work = s->done;
        s->done      = c;
        pthread_mutex_unlock(&s->lock);
        srv_wake(s);
    }
}

static void *work_all(void *arg)
{
    work(arg, SIZE_MAX);
    return NULL;
}

static void *work_small(void *arg)
{
    work(arg, LARGE);
    return NULL;
}

kvd_status srv_work_open(srv *s, kvd_err *err)
{
    for (; s->n_worker < SRV_WORKERS; s->n_worker++) {
        const int rc =
            pthread_create(&s->worker[s->n_worker], NULL, s->n_worker ? work_small : work_all, s);

        if (rc)
            return kvd_fail(err, KVD_E_NOMEM, 0, "server: no thread: %s", strerror(rc));
    }
    return KVD_OK;
}

void srv_work_close(srv *s)
{
    pthread_mutex_lock(&s->lock);
    s->work_ends = true;
    pthread_cond_broadcast(&s->work_wake);
    pthread_mutex_unlock(&s->lock);
    while (s->n_worker > 0)
        pthread_join(s->worker[--s->n_worker], NULL);
}

void srv_work_give(srv *s, srv_call *c)
{
    c->at_work   = true;
    c->next_work = NULL;
    pthread_mutex_lock(&s->lock);
    if (s->work_last)
        s->work_last->next_work = c;
    else
        s->work = c;
    s->work_last = c;
    pthread_cond_broadcast(&s->work_wake); /* not every worker takes it */
    pthread_mutex_unlock(&s->lock);
}

srv_call *srv_work_take_done(srv *s)
{
    srv_call *c;

    pthread_mutex_lock(&s->lock);
    c       = s->done;
    s->done = NULL;
    pthread_mutex_unlock(&s->lock);
    return c;
}
