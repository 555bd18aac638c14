/* SPDX-License-Identifier: Apache-2.0 */
/* srv_step.c - one evaluation for all that run: a token of each answer, pieces of prompts; then
 * what comes of it. */
#include "server.h"
#include "srv_engine.h"

#include <string.h>

#define PROGRESS_NS 200000000ull /* between two notes of how far a prompt is */
#define STOPPED_NS  100000000ull /* of a step in which the process did not run: it says nothing */

void srv_tell(srv_engine *e, srv_job *j, srv_event *ev)
{
    if (ev) {
        srv_job_add(j, ev);
    } else {
        srv_job_lose(j);
        j->over = true;
        srv_sched_stop_waiting(e, j);
    }
    e->p.told(e->p.ctx, j);
}

/* ---- ends ----------------------------------------------------------------------------------- */

static void end_job(srv_engine *e, srv_job *j)
{
    j->over = true;
    e->counts.n_finished++;
    srv_hist_add(&e->counts.whole, kvd_now_ns() - j->submit_ns);
    srv_tell(e, j, srv_event_new(SRV_EVENT_END, 0, NULL, 0, 0));
}

static void count_time(srv_gen *g)
{
    const uint64_t now   = kvd_now_ns();
    const uint64_t first = g->first_ns ? g->first_ns : now;

    g->job->usage.prompt_ns += first - g->start_ns;
    g->job->usage.generate_ns += now - first;
}

void srv_step_finish(srv_engine *e, srv_slot *s, srv_finish why, int32_t stop)
{
    srv_gen   *g = s->gen;
    srv_job   *j = g->job;
    srv_event *ev;

    srv_gen_end(g, e, stop >= 0, why == SRV_FINISH_LENGTH);
    if (why == SRV_FINISH_STOP && stop < 0 && g->has_calls)
        why = SRV_FINISH_CALLS;
    count_time(g);
    ev = srv_event_new(SRV_EVENT_FINISH, g->choice, NULL, 0, 0);
    if (ev) {
        ev->finish = why;
        ev->stop   = stop;
    }
    srv_tell(e, j, ev);
    srv_sched_release(e, s);
    if (--j->n_left == 0)
        end_job(e, j);
    srv_gen_free(g);
}

void srv_step_fail(srv_engine *e, srv_job *j, int status, const char *msg)
{
    srv_event *ev;

    if (j->over)
        return;
    ev = srv_event_new(SRV_EVENT_ERROR, 0, msg, strlen(msg), 0);
    kvd_log(KVD_LOG_WARN, "%s: %s", j->id, msg);
    if (ev)
        ev->status = status;
    e->counts.n_failed++;
    j->over = true; /* its generations go next */
    srv_sched_stop_waiting(e, j);
    srv_tell(e, j, ev);
}

void srv_step_fail_err(srv_engine *e, srv_job *j, const kvd_err *err)
{
    srv_step_fail(e, j, err->code == KVD_E_NOMEM ? 503 : 500, err->msg);
}

void srv_step_fail_all(srv_engine *e, int status, const char *msg)
{
    for (uint32_t i = 0; i < e->p.n_seq; i++)
        if (e->slot[i].gen)
            srv_step_fail(e, e->slot[i].gen->job, status, msg);
    for (srv_gen *g = e->queue; g; g = g->next)
        srv_step_fail(e, g->job, status, msg);
}

/* ---- the batch --------------------------------------------------------------------------------
 */

static void add_row(srv_engine *e, uint32_t seq, int32_t token, bool want)
{
    e->row_token[e->n_row] = token;
    e->row_seq[e->n_row]   = seq;
    e->row_want[e->n_row]  = want;
    e->n_row++;
    e->n_want += want;
    e->slot_rows[seq]++;
}

static void add_answers(srv_engine *e)
{
    for (uint32_t i = 0; i < e->p.n_seq; i++) {
        srv_gen *g = e->slot[i].gen;

        if (g && g->state == SRV_GEN_ANSWER && !srv_job_full(g->job))
            add_row(e, i, g->token[g->n_token - 1], true);
    }
    e->n_answer = e->n_row;
}

/* Rows of logits that a prompt may have beyond one for each slot that has no rows yet. */
static uint32_t free_logits(const srv_engine *e)
{
    uint32_t n_kept = e->n_want;

    for (uint32_t i = 0; i < e->p.n_seq; i++)
        n_kept += e->slot_rows[i] == 0;
    return e->p.n_logits - n_kept + 1; /* its own */
}

/* Tokens of a prompt whose logits are all wanted.  Two at least: one alone would be a step of an
 * answer.  So it may be more than n, rather than nothing for as long as others answer. */
static uint32_t echo_piece_of(const srv_engine *e, const srv_slot *s, uint32_t n)
{
    const uint32_t left = s->gen->n_target - s->n;
    const uint32_t rows = free_logits(e), room = e->p.n_batch - e->n_row;

    n = n > SERVER_ECHO_MIN ? n : SERVER_ECHO_MIN;
    n = n < rows ? n : rows;
    n = n < room ? n : room;
    return left <= n ? left : n < SERVER_ECHO_MIN ? 0 : left - n == 1 ? n - 1 : n;
}

/* Tokens of a slot's prompt in this step, at most n.  The last token goes alone, whether the others
 * were evaluated or known, so that both give the same. */
static uint32_t piece_of(const srv_engine *e, const srv_slot *s, uint32_t n)
{
    const uint32_t left = s->gen->n_target - s->n;

    if (s->gen->echo)
        return echo_piece_of(e, s, n);
    return left == 1 ? 1 : n < left ? n : left - 1;
}

static srv_slot *oldest_prompt(srv_engine *e)
{
    srv_slot *old = NULL;

    for (uint32_t i = 0; i < e->p.n_seq; i++) {
        srv_slot *s = &e->slot[i];

        if (s->gen && s->gen->state == SRV_GEN_PROMPT && !s->gen->loading && e->slot_rows[i] == 0 &&
            (!old || s->gen->order < old->gen->order))
            old = s;
    }
    return old;
}

static void add_prompts(srv_engine *e)
{
    uint32_t  n = 0;
    srv_slot *s;

    if (oldest_prompt(e) && !(e->loads && e->n_answer)) /* one thing at a time beside answers */
        n = srv_pace_budget(&e->pace, e->n_answer, e->p.n_batch - e->n_row);

    while (n > 0 && (s = oldest_prompt(e))) {
        const uint32_t k = piece_of(e, s, n);

        if (k == 0)
            break;
        for (uint32_t i = 0; i < k; i++)
            add_row(e, (uint32_t)(s - e->slot), s->gen->token[s->n + i],
                    s->gen->echo || s->n + i + 1 == s->gen->n_target);
        n -= k < n ? k : n;
    }
    e->n_piece = e->n_row - e->n_answer;
}

/* The most that a row needs; 0: all. */
static uint32_t n_best(const srv_engine *e)
{
    uint32_t most = 0;

    for (uint32_t i = 0; i < e->n_row; i++) {
        const srv_gen *g = e->slot[e->row_seq[i]].gen;
        const uint32_t n = srv_gen_n_best(g);

        if (e->row_want[i] && n == 0)
            return 0;
        most = n > most ? n : most;
    }
    return most;
}

/* ---- what comes of it ------------------------------------------------------------------------ */

static void next_token(srv_engine *e, srv_slot *s, uint32_t row)
{
    srv_gen   *g   = s->gen;
    kvd_err    err = { 0 };
    srv_finish why;
    int32_t    stop;
    bool       over;

    if (g->n_max == 0) {
        srv_step_finish(e, s, SRV_FINISH_LENGTH, -1);
        return;
    }
    if (srv_gen_next(g, e, row, &over, &why, &stop, &err) != KVD_OK)
        srv_step_fail_err(e, g->job, &err);
    else if (over)
        srv_step_finish(e, s, why, stop);
}

static void tell_progress(srv_engine *e, srv_gen *g, uint32_t n_done)
{
    const uint64_t now = kvd_now_ns();
    srv_event     *ev;

    if (!g->job->req.progress || g->n_token > g->n_prompt ||
        (n_done < g->n_target && now - g->told_ns < PROGRESS_NS))
        return;
    g->told_ns = now;
    ev         = srv_event_new(SRV_EVENT_PROGRESS, g->choice, NULL, 0, 0);
    if (ev) {
        ev->n_done   = n_done;
        ev->n_total  = g->n_prompt;
        ev->n_cached = g->n_kept;
        ev->ns       = now - g->start_ns;
    }
    srv_tell(e, g->job, ev);
}

/* n rows were a slot's; its first logits are row number `want`. */
static void settle(srv_engine *e, srv_slot *s, uint32_t n, uint32_t want)
{
    srv_gen       *g  = s->gen;
    const uint32_t at = s->n;

    s->n += n;
    if (g->job->over)
        return;
    if (g->state == SRV_GEN_ANSWER) {
        next_token(e, s, want);
        return;
    }
    tell_progress(e, g, s->n);
    for (uint32_t i = 0; g->echo && i < n && g->n_token == g->n_prompt; i++)
        srv_gen_echo(g, e, at + i, want + i);
    if (s->n < g->n_target)
        return;
    if (g->echo && g->n_token == g->n_prompt)
        srv_gen_tell_echo(g, e);
    g->state = SRV_GEN_ANSWER;
    next_token(e, s, want + (g->echo ? n - 1 : 0));
}

static void settle_all(srv_engine *e)
{
    uint32_t want = 0;

    for (uint32_t first = 0; first < e->n_row;) {
        srv_slot      *s = &e->slot[e->row_seq[first]];
        const uint32_t n = e->slot_rows[e->row_seq[first]];
        uint32_t       w = 0;

        for (uint32_t i = 0; i < n; i++)
            w += e->row_want[first + i];
        settle(e, s, n, want);
        want += w;
        first += n;
    }
}

/* An evaluation has failed for other reasons than the device's: prompts are its likely cause. */
static void fail_rows(srv_engine *e, const kvd_err *err)
{
    for (uint32_t i = e->n_piece ? e->n_answer : 0; i < e->n_row; i++)
        srv_step_fail_err(e, e->slot[e->row_seq[i]].gen->job, err);
}

static void fail(srv_engine *e, kvd_status st, const kvd_err *err)
{
    if (st == KVD_E_CANCELED)
        return;
    if (st != KVD_E_DEVICE) {
        fail_rows(e, err);
        return;
    }
    e->broken = true;
    e->why    = *err;
    atomic_store_explicit(&e->failed, true, memory_order_release);
    srv_step_fail_all(e, 500, err->msg);
}

/* What a step took tells the pace, unless the process was stopped meanwhile. */
static void learn(srv_engine *e, uint32_t n_answer, uint32_t n_piece, uint64_t t0, uint64_t ran0)
{
    const uint64_t took = kvd_now_ns() - t0;

    if (took < kvd_ran_ns() - ran0 + STOPPED_NS)
        srv_pace_learn(&e->pace, n_answer, n_piece, (double)took);
}

/* For the map. */
static void note_ended(srv_engine *e, uint32_t n_answer, uint32_t n_prompt, uint64_t ns)
{
    e->ended = (srv_map_step){ .n_answer = n_answer,
                               .n_prompt = n_prompt,
                               .ns       = { [SRV_PART_REST] = ns } };
}

/* ---- a prompt alone -------------------------------------------------------------------------- */

typedef struct part {
    srv_engine *e;
    srv_slot   *s;
    uint32_t    n;
} part;

static bool part_goes_on(void *ctx, uint64_t done, uint64_t total)
{
    const part *p = ctx;
    srv_engine *e = p->e;
    srv_stop    stop;
    bool        was;

    (void)total;
    atomic_store_explicit(&e->step_ns, kvd_ran_ns(), memory_order_relaxed); /* it is alive */
    pthread_mutex_lock(&e->lock);
    stop = e->stop;
    pthread_mutex_unlock(&e->lock);
    was = kvd_alloc_guard(false); /* what we tell is no part of the evaluation */
    tell_progress(e, p->s->gen, p->s->n + (uint32_t)done);
    kvd_alloc_guard(was);
    return stop != SRV_STOP_NOW &&
           !atomic_load_explicit(&p->s->gen->job->canceled, memory_order_relaxed);
}

/* The only slot that runs, if it has a prompt that should go in parts; or NULL. */
static srv_slot *only_prompt(srv_engine *e)
{
    srv_slot *only = NULL;

    for (uint32_t i = 0; e->p.parts && i < e->p.n_seq; i++) {
        srv_slot *s = &e->slot[i];

        if (!s->gen)
            continue;
        if (only || s->gen->state != SRV_GEN_PROMPT || s->gen->echo || s->gen->loading ||
            s->gen->n_target - s->n <= e->p.n_batch)
            return NULL;
        only = s;
    }
    return only;
}

/* A part of the prompt, all but the last token at most, through the layers together. */
static void run_part(srv_engine *e, srv_slot *s)
{
    const uint32_t left = s->gen->n_target - s->n - 1;
    const uint32_t most = srv_pace_part(&e->pace, 2 * e->p.n_batch);
    part           p    = { .e = e, .s = s, .n = left < most ? left : most };
    kvd_err        err  = { 0 };
    const uint64_t t0 = kvd_now_ns(), ran0 = kvd_ran_ns();
    kvd_status     st;

    st = kvd_prefill(e->p.session, (uint32_t)(s - e->slot), s->gen->token + s->n, p.n, part_goes_on,
                     &p, &err);
    atomic_store_explicit(&e->step_ns, 0, memory_order_relaxed);
    if (st == KVD_OK) {
        learn(e, 0, p.n, t0, ran0);
        note_ended(e, 0, p.n, kvd_now_ns() - t0);
        s->n += p.n;
        st = srv_sched_begin(e, s, true, &err);
    }
    e->n_row = e->n_answer = e->n_piece = 0;
    if (st == KVD_E_DEVICE)
        fail(e, st, &err);
    else if (st != KVD_OK && st != KVD_E_CANCELED)
        srv_step_fail_err(e, s->gen->job, &err);
}

bool srv_step_run(srv_engine *e)
{
    kvd_batch  b   = KVD_BATCH_INIT;
    kvd_err    err = { 0 };
    srv_slot  *only;
    uint64_t   t0, ran0;
    kvd_status st;

    e->loads = srv_sched_load(e);
    only     = only_prompt(e);
    if (only) {
        run_part(e, only);
        return true;
    }
    e->n_row = e->n_want = e->n_answer = e->n_piece = 0;
    memset(e->slot_rows, 0, e->p.n_seq * sizeof(*e->slot_rows));
    add_answers(e);
    add_prompts(e);
    if (e->n_row == 0)
        return e->loads;
    b.n_token     = e->n_row;
    b.token       = e->row_token;
    b.seq         = e->row_seq;
    b.want_logits = e->row_want;
    b.n_best      = n_best(e);
    t0            = kvd_now_ns();
    ran0          = kvd_ran_ns();
    atomic_store_explicit(&e->step_ns, ran0, memory_order_relaxed);
    st = kvd_eval(e->p.session, &b, &err);
    atomic_store_explicit(&e->step_ns, 0, memory_order_relaxed);
    if (st != KVD_OK) {
        fail(e, st, &err);
        return true;
    }
    learn(e, e->n_answer, e->n_piece, t0, ran0);
    e->counts.n_step++;
    e->counts.n_mixed += e->n_answer && e->n_piece;
    settle_all(e);
    note_ended(e, e->n_answer, e->n_piece, kvd_now_ns() - t0);
    return true;
}
