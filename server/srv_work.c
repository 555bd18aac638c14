/* SPDX-License-Identifier: Apache-2.0 */
/* srv_work.c - threads that do what must not hold up the net thread: they parse bodies, render
 * templates, tokenize, and wait for the engine.  Calls are bounded by connections. */
#include "srv_http.h"

#include <string.h>

static srv_call *next_call(srv *s)
{
    srv_call *c;

    pthread_mutex_lock(&s->lock);
    while (!s->work && !s->work_ends)
        pthread_cond_wait(&s->work_wake, &s->lock);
    c = s->work_ends ? NULL : s->work;
    if (c) {
        s->work      = c->next_work;
        s->work_last = s->work ? s->work_last : NULL;
    }
    pthread_mutex_unlock(&s->lock);
    return c;
}

static void *work(void *arg)
{
    srv      *s = arg;
    srv_call *c;

    while ((c = next_call(s))) {
        c->route->run(s, c);
        kvd_buf_free(&c->body);
        pthread_mutex_lock(&s->lock);
        c->next_work = s->done;
        s->done      = c;
        pthread_mutex_unlock(&s->lock);
        srv_wake(s);
    }
    return NULL;
}

kvd_status srv_work_open(srv *s, kvd_err *err)
{
    for (; s->n_worker < SRV_WORKERS; s->n_worker++) {
        const int rc = pthread_create(&s->worker[s->n_worker], NULL, work, s);

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
    pthread_cond_signal(&s->work_wake);
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
