/* SPDX-License-Identifier: Apache-2.0 */
/* srv_main.c - the net thread's loop: sockets, what workers and the engine have done, time,
 * signals, and the ends: a stop, a failed device, a step that hangs. */
#include "srv_fields.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define TICK_MS     50 /* while there are calls */
#define TICK_IDLE   250
#define N_EVENT     64
#define LINGER_NS   2000000000ull /* after the engine has failed: health says so, replies go out */
#define LEAVE_NS    1500000000ull /* after the grace period: what was canceled is told */
#define EXIT_FAILED 1

static _Atomic int signal_fd = -1; /* the event fd, while signals are ours */
static atomic_uint n_signal;

static void on_signal(int sig)
{
    const uint64_t one = 1;
    const int      fd = signal_fd, was = errno;

    if (atomic_fetch_add(&n_signal, 1) > 0)
        _exit(128 + sig);
    if (fd >= 0)
        (void)!write(fd, &one, sizeof(one));
    errno = was;
}

/* SIGHUP, the end of a terminal, is as SIGTERM, but stays ignored where nohup has it so. */
static void watch_signals(int fd)
{
    struct sigaction a = { .sa_handler = fd >= 0 ? on_signal : SIG_DFL }, was;

    signal_fd = fd;
    n_signal  = 0;
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGINT, &a, NULL);
    if (sigaction(SIGHUP, NULL, &was) == 0 && was.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &a, NULL);
    a.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &a, NULL);
}

void srv_wake(srv *s)
{
    const uint64_t one = 1;

    (void)!write(s->event_fd, &one, sizeof(one));
}

/* Engine thread: a job has events, or (NULL) the thread has ended. */
static void on_told(void *ctx, srv_job *j)
{
    srv *s    = ctx;
    bool wake = !j;

    pthread_mutex_lock(&s->lock);
    if (j && !j->told) {
        wake = s->told == NULL;
        srv_job_ref(j);
        j->told      = true;
        j->next_told = s->told;
        s->told      = j;
    }
    pthread_mutex_unlock(&s->lock);
    if (wake)
        srv_wake(s);
}

/* Whether something is to be said that was not said before; of too much nothing is. */
static bool first_time(srv *s, const char word[48])
{
    uint32_t i     = 0;
    bool     first = false;

    pthread_mutex_lock(&s->lock);
    while (i < s->n_seen && strcmp(s->seen[i], word) != 0)
        i++;
    if (i == s->n_seen && s->n_seen < SRV_LOG_ONCE) {
        memcpy(s->seen[s->n_seen++], word, strlen(word) + 1);
        first = true;
    }
    pthread_mutex_unlock(&s->lock);
    return first;
}

void srv_log_unknown(srv *s, const char *name)
{
    char   word[48];
    size_t n = 0;

    for (; name[n] && n + 1 < sizeof(word); n++)
        word[n] = name[n] > ' ' && name[n] < 127 ? name[n] : '?';
    word[n] = 0;
    if (first_time(s, word))
        kvd_log(KVD_LOG_INFO, "requests have a field \"%s\", which is not known and has no effect",
                word);
}

/* The same of a whole text, by its FNV-1a hash. */
static bool first_time_of(srv *s, const char *text)
{
    char     word[48];
    uint64_t hash = 0xcbf29ce484222325u;

    for (const char *p = text; *p; p++)
        hash = (hash ^ (uint8_t)*p) * 0x100000001b3u;
    snprintf(word, sizeof(word), "\n%016llx", (unsigned long long)hash); /* no field's name */
    return first_time(s, word);
}

void srv_log_once(srv *s, const char *line)
{
    if (first_time_of(s, line))
        kvd_log(KVD_LOG_INFO, "%s", line);
}

void srv_log_notes(srv *s, const char *notes)
{
    if (*notes == 0 || !first_time_of(s, notes))
        return;
    for (const char *p = notes; *p; p += strcspn(p, "\n"), p += *p != 0)
        kvd_log(KVD_LOG_INFO, "a request's tools: %.*s", (int)strcspn(p, "\n"), p);
}

/* ---- what has come ------------------------------------------------------------------------------
 */

static void take_done(srv *s)
{
    for (srv_call *c = srv_work_take_done(s), *next; c; c = next) {
        next       = c->next_work;
        c->at_work = false;
        srv_http_body_read(c);
        if (c->job)
            c->job->conn = c;
        srv_http_resume(c);
    }
}

/* The lock is not held while a job is looked at: it may be told again meanwhile. */
static srv_job *next_told(srv *s)
{
    srv_job *j;

    pthread_mutex_lock(&s->lock);
    j = s->told;
    if (j) {
        s->told = j->next_told;
        j->told = false;
    }
    pthread_mutex_unlock(&s->lock);
    return j;
}

static void take_told(srv *s)
{
    srv_job *j;

    while ((j = next_told(s))) {
        srv_call *c = j->conn;

        if (c && (c->streams || srv_job_ended(j)))
            srv_http_resume(c);
        srv_job_unref(j);
    }
}

static void take_events(srv *s, int timeout_ms)
{
    struct epoll_event ev[N_EVENT];
    const int          n = epoll_wait(s->epoll_fd, ev, N_EVENT, timeout_ms);

    for (int i = 0; i < n; i++) {
        uint64_t count;

        if (ev[i].data.ptr == s)
            (void)!read(s->event_fd, &count, sizeof(count));
        else if (ev[i].data.ptr == &s->knocks)
            s->knocks = true;
        else
            srv_conn_event(s, ev[i].data.ptr, ev[i].events);
    }
}

static int timeout_of(const srv *s)
{
    if (s->ready)
        return 0;
    return s->n_call || s->stop_ns || s->sick_ns ? TICK_MS : TICK_IDLE;
}

/* ---- ends
 * ------------------------------------------------------------------------------------------ */

/* Every call that waits for the engine is told why nothing will come. */
static void break_calls(srv *s, const char *why)
{
    for (srv_call *c = s->calls; c; c = c->next) {
        c->broken = why;
        if (!c->at_work)
            srv_http_resume(c);
    }
}

static void look_at_engine(srv *s)
{
    const uint64_t now  = s->now_ns;
    const uint64_t step = atomic_load_explicit(&s->engine->step_ns, memory_order_relaxed);

    if (s->sick_ns)
        return;
    if (atomic_load_explicit(&s->engine->failed, memory_order_acquire)) {
        s->sick_ns = now;
        kvd_log(KVD_LOG_ERROR, "the device has failed: the server ends");
    } else if (step && now > step && (double)(now - step) > s->p.stall_s * 1e9) {
        s->sick_ns = now;
        s->stalled = true;
        kvd_log(KVD_LOG_ERROR, "a step has taken more than %g s (--stall-timeout): the server ends",
                s->p.stall_s);
        break_calls(s, "a step of the engine hangs");
    }
}

static void begin_stop(srv *s)
{
    s->stop_ns = s->now_ns;
    kvd_log(KVD_LOG_INFO, "stopping: %u requests have %g s (--grace)", s->n_call, s->p.grace_s);
    srv_conn_stop_listening(s);
    srv_engine_stop(s->engine, SRV_STOP_SOON);
}

/* Whether there is nothing more to do. */
static bool is_over(srv *s)
{
    const uint64_t now   = s->now_ns;
    const uint64_t grace = (uint64_t)(s->p.grace_s * 1e9);
    const bool     done  = atomic_load_explicit(&s->engine->finished, memory_order_acquire);

    if (s->sick_ns)
        return now - s->sick_ns > LINGER_NS;
    if (!s->stop_ns && n_signal > 0)
        begin_stop(s);
    if (!s->stop_ns)
        return false;
    if (done && s->n_call == 0)
        return true;
    if (!s->hurried && now - s->stop_ns > grace) {
        s->hurried = true;
        srv_engine_stop(s->engine, SRV_STOP_NOW);
    }
    return now - s->stop_ns > grace + LEAVE_NS;
}

static void loop(srv *s)
{
    do {
        take_events(s, timeout_of(s));
        s->now_ns = kvd_ran_ns();
        srv_conn_accept(s);
        take_done(s);
        take_told(s);
        look_at_engine(s);
        if (s->now_ns - s->tick_ns > TICK_MS * 1000000ull) {
            s->tick_ns = s->now_ns;
            srv_http_tick(s);
        }
        srv_conn_run(s);
    } while (!is_over(s));
}

/* ---- open and close
 * ------------------------------------------------------------------------------- */

static kvd_status watch(srv *s, int fd, void *tag, uint32_t events, kvd_err *err)
{
    struct epoll_event ev = { .events = events, .data = { .ptr = tag } };

    if (fd < 0 || epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, fd, &ev) != 0)
        return kvd_fail(err, KVD_E_IO, errno, "server: epoll");
    return KVD_OK;
}

static kvd_status open_engine(srv *s, kvd_session *session, kvd_err *err)
{
    const kvd_plan *plan = &s->plan;
    kvd_stats       st   = { .struct_size = sizeof(st) };

    kvd_session_get_stats(session, &st);
    s->ep = (srv_engine_params){ .model    = s->model,
                                 .session  = session,
                                 .n_seq    = plan->n_seq,
                                 .n_parked = plan->n_parked,
                                 .n_ctx    = plan->n_ctx,
                                 .n_batch  = plan->n_batch,
                                 .n_logits = plan->n_seq + SERVER_ECHO_ROWS,
                                 .n_vocab  = s->info.n_vocab,
                                 .n_block  = st.kv_capacity_tokens / SRV_BLOCK_TOKENS,
                                 .resident = plan->kv_resident,
                                 .parts    = plan->device_bytes > 0 || !plan->kv_resident,
                                 .cached   = s->p.cached,
                                 .n_queue  = s->p.n_queue,
                                 .gap_ms   = s->p.gap_ms,
                                 .told     = on_told,
                                 .ctx      = s };
    return srv_engine_open(&s->engine, &s->ep, err);
}

static kvd_status open_net(srv *s, kvd_err *err)
{
    const uint32_t all = s->plan.n_seq + s->plan.n_parked;

    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->slots    = kvd_calloc(all, sizeof(*s->slots));
    s->map      = srv_map_new(s->info.n_layer, s->info.n_kv_head, all);
    if (!s->slots || !s->map)
        return kvd_fail(err, KVD_E_NOMEM, 0, "server: no memory");
    KVD_TRY(watch(s, s->event_fd, s, EPOLLIN, err));
    KVD_TRY(srv_listen(s, err));
    for (uint32_t i = 0; i < SRV_LISTEN; i++)
        if (s->listen_fd[i] >= 0)
            KVD_TRY(watch(s, s->listen_fd[i], &s->knocks, EPOLLIN | EPOLLET, err));
    return KVD_OK;
}

static void close_all(srv *s)
{
    if (s->engine)
        srv_engine_stop(s->engine, SRV_STOP_NOW);
    srv_work_close(s);
    srv_conn_close_all(s);
    srv_engine_close(s->engine);
    take_told(s);
    srv_conn_stop_listening(s);
    if (s->event_fd >= 0)
        close(s->event_fd);
    if (s->epoll_fd >= 0)
        close(s->epoll_fd);
    kvd_free(s->slots);
    srv_map_free(s->map);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->work_wake);
}

/* The model's name in answers: what was given, or the file's, with a hyphen for each blank. */
static void name_model(srv *s)
{
    const char *name = s->p.name                       ? s->p.name
                       : s->info.name && *s->info.name ? s->info.name
                                                       : "kvdrive";
    size_t      n    = strlen(name);

    n = n < sizeof(s->name) ? n : sizeof(s->name) - 1;
    memcpy(s->name, name, n);
    s->name[n] = 0;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s->name[i] <= ' ' || s->name[i] == 0x7f)
            s->name[i] = '-';
}

static kvd_status serve(srv *s, kvd_session *session, kvd_err *err)
{
    KVD_TRY(open_net(s, err));
    KVD_TRY(open_engine(s, session, err));
    KVD_TRY(srv_work_open(s, err));
    watch_signals(s->event_fd);
    kvd_log(KVD_LOG_INFO,
            "%s: %u sequences (--parallel) of at most %u tokens (-c), %llu tokens of KV cache in "
            "all (--kv-tokens): device %llu MiB, host %llu MiB",
            s->name, s->plan.n_seq, s->plan.n_ctx,
            (unsigned long long)(s->ep.n_block * SRV_BLOCK_TOKENS),
            (unsigned long long)(s->plan.kv_device_bytes >> 20),
            (unsigned long long)(s->plan.kv_host_bytes >> 20));
    kvd_log(KVD_LOG_INFO,
            strchr(s->p.host, ':') ? "listening on http://[%s]:%u" : "listening on http://%s:%u",
            s->p.host, s->port);
    loop(s);
    if (s->stalled) {
        srv_log_close();
        _exit(EXIT_FAILED); /* a thread hangs: nothing can be taken down in order */
    }
    watch_signals(-1);
    return s->sick_ns ? kvd_fail(err, KVD_E_DEVICE, 0, "%s", s->engine->why.msg) : KVD_OK;
}

kvd_status server_run(kvd_model *m, kvd_session *session, const kvd_plan *plan,
                      const server_params *p, kvd_err *err)
{
    srv        s = { .p         = *p,
                     .model     = m,
                     .plan      = *plan,
                     .info      = { .struct_size = sizeof(s.info) },
                     .started   = (int64_t)time(NULL),
                     .listen_fd = { -1, -1 },
                     .epoll_fd  = -1,
                     .event_fd  = -1 };
    kvd_status st;

    kvd_model_get_info(m, &s.info);
    name_model(&s);
    srv_template_probe(&s);
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.work_wake, NULL);
    srv_log_open(p);
    st = serve(&s, session, err);
    close_all(&s);
    if (st == KVD_OK)
        kvd_log(KVD_LOG_INFO, "stopped");
    srv_log_close();
    return st;
}
