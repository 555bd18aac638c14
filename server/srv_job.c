/* SPDX-License-Identifier: Apache-2.0 */
/* srv_job.c - jobs and their events. */
#include "srv_job.h"

#include <string.h>

srv_job *srv_job_new(void)
{
    srv_job *j = kvd_calloc(1, sizeof(*j));

    if (!j)
        return NULL;
    atomic_init(&j->refs, 1);
    pthread_mutex_init(&j->lock, NULL);
    return j;
}

void srv_job_ref(srv_job *j)
{
    atomic_fetch_add_explicit(&j->refs, 1, memory_order_relaxed);
}

static void free_request(srv_request *r)
{
    for (uint32_t i = 0; i < r->n_input; i++)
        kvd_free(r->input[i].token);
    kvd_free(r->input);
    for (uint32_t i = 0; i < r->n_stop; i++)
        kvd_free(r->stop[i]);
    kvd_free((void *)(uintptr_t)r->sampling.bias);
    kvd_free(r->breaker);
    kvd_grammar_close(r->grammar);
    kvd_free(r->tools_json);
    kvd_buf_free(&r->again);
    kvd_buf_free(&r->again_last);
    kvd_buf_free(&r->spaces);
}

void srv_job_unref(srv_job *j)
{
    srv_event *e;

    /* acq_rel: what others have done with it is over before it is freed */
    if (!j || atomic_fetch_sub_explicit(&j->refs, 1, memory_order_acq_rel) != 1)
        return;
    while ((e = srv_job_take(j)))
        srv_event_free(e);
    free_request(&j->req);
    srv_answer_free(&j->answer);
    pthread_mutex_destroy(&j->lock);
    kvd_free(j);
}

srv_event *srv_event_new(srv_event_kind kind, uint32_t choice, const char *text, size_t len,
                         uint32_t n_token)
{
    srv_event *e = kvd_calloc(1, sizeof(*e) + n_token * sizeof(srv_token) + len + 1);

    if (!e)
        return NULL;
    *e = (srv_event){ .kind = kind, .choice = choice, .n_token = n_token, .stop = -1, .len = len };
    e->token = (srv_token *)(e + 1);
    e->text  = (char *)(e->token + n_token);
    if (len)
        memcpy(e->text, text, len);
    return e;
}

void srv_event_free(srv_event *e)
{
    kvd_free(e);
}

static size_t bytes_of(const srv_event *e)
{
    return sizeof(*e) + e->n_token * sizeof(srv_token) + e->len;
}

void srv_job_add(srv_job *j, srv_event *e)
{
    bool lost;

    pthread_mutex_lock(&j->lock);
    lost = j->lost;
    if (!lost) {
        if (j->last)
            j->last->next = e;
        else
            j->first = e;
        j->last = e;
        j->bytes += bytes_of(e);
        j->finished = j->finished || e->kind == SRV_EVENT_END;
        j->ended    = j->ended || j->finished || e->kind == SRV_EVENT_ERROR;
    }
    pthread_mutex_unlock(&j->lock);
    if (lost) /* what came before it is not complete */
        srv_event_free(e);
}

void srv_job_lose(srv_job *j)
{
    pthread_mutex_lock(&j->lock);
    j->lost = j->ended = true;
    pthread_mutex_unlock(&j->lock);
}

srv_event *srv_job_take(srv_job *j)
{
    srv_event *e;

    pthread_mutex_lock(&j->lock);
    e = j->first;
    if (e) {
        j->first = e->next;
        j->last  = j->first ? j->last : NULL;
        j->bytes -= bytes_of(e);
        e->next = NULL;
    }
    pthread_mutex_unlock(&j->lock);
    return e;
}

bool srv_job_ended(srv_job *j)
{
    bool ended;

    pthread_mutex_lock(&j->lock);
    ended = j->ended;
    pthread_mutex_unlock(&j->lock);
    return ended;
}

bool srv_job_finished(srv_job *j)
{
    bool finished;

    pthread_mutex_lock(&j->lock);
    finished = j->finished;
    pthread_mutex_unlock(&j->lock);
    return finished;
}

bool srv_job_lost(srv_job *j)
{
    bool lost;

    pthread_mutex_lock(&j->lock);
    lost = j->lost && !j->first;
    pthread_mutex_unlock(&j->lock);
    return lost;
}

bool srv_job_full(srv_job *j)
{
    bool full;

    pthread_mutex_lock(&j->lock);
    full      = j->req.stream && j->bytes > SRV_EVENT_BYTES;
    j->paused = j->paused || full;
    pthread_mutex_unlock(&j->lock);
    return full;
}

bool srv_job_resumes(srv_job *j)
{
    bool resumes;

    pthread_mutex_lock(&j->lock);
    resumes   = j->paused && j->bytes <= SRV_EVENT_BYTES;
    j->paused = j->paused && !resumes;
    pthread_mutex_unlock(&j->lock);
    return resumes;
}
