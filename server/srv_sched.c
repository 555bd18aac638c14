/* SPDX-License-Identifier: Apache-2.0 */
/* srv_sched.c - which generation gets which slot, and who gives its memory up.
 *
 * An idle sequence belongs to its tokens, not to the slot in which they were evaluated.  When
 * another generation needs the slot, the sequence is parked; it stays until its memory is asked
 * for, or there are too many.  A generation goes on with the idle sequence, in a slot or parked,
 * with which it costs least: the one that holds most of its prompt, but rather none than the
 * beginning of a long conversation that may come back.  A sequence that holds the beginning of a
 * prompt that waits is left alone while another will do; where none will, that prompt goes first,
 * unless what the sequence holds is in the prefix cache, too.
 *
 * Choices of one prompt run one after the other at first, beside each other where their answers are
 * longer than the prompt is worth: admit_beside(). */
#include "srv_engine.h"

#include <string.h>

#define AGE_NS     60e9 /* after which what an idle slot holds counts half */
#define WANTED_MIN 32u  /* tokens that a slot has in common with a prompt, to be kept for it */
#define PASSED_MAX 8u   /* times that others go before one for what a slot holds */
#define LOOK_MAX   64u  /* prompts at the head of the queue that sequences are kept for */

/* ---- queue --------------------------------------------------------------------------------- */

void srv_sched_enqueue(srv_engine *e, srv_gen *g, bool first)
{
    srv_gen **at = &e->queue;

    while (*at && !first)
        at = &(*at)->next;
    g->state = SRV_GEN_WAIT;
    g->next  = *at;
    *at      = g;
}

/* Choices of one input share what its prompt left behind in a slot if they run one after the other.
 */
static bool may_run(const srv_gen *g)
{
    return g->job->n_running[g->input] == 0;
}

static void unlink_gen(srv_engine *e, srv_gen *g)
{
    srv_gen **at = &e->queue;

    while (*at != g)
        at = &(*at)->next;
    *at     = g->next;
    g->next = NULL;
}

static bool is_over(const srv_job *j)
{
    return j->over || atomic_load_explicit(&j->canceled, memory_order_relaxed);
}

/* Slots that nobody has, but those that inputs of jobs that run will take: each one that no choice
 * of it has, while one waits. */
static uint32_t count_open(srv_engine *e)
{
    const uint64_t count  = ++e->n_count;
    uint32_t       n_free = 0, n_next = 0;

    for (uint32_t i = 0; i < e->p.n_seq; i++)
        n_free += !e->slot[i].gen;
    for (const srv_gen *g = e->queue; g; g = g->next) {
        uint64_t *last = &g->job->counted[g->input];

        if (*last == count || !may_run(g) || !g->job->usage.queue_ns || is_over(g->job))
            continue;
        *last = count;
        n_next++;
    }
    return n_next < n_free ? n_free - n_next : 0;
}

void srv_sched_count_open(srv_engine *e)
{
    const uint32_t n = count_open(e);

    pthread_mutex_lock(&e->lock);
    e->n_open = n;
    pthread_mutex_unlock(&e->lock);
}

bool srv_sched_may_wait(srv_engine *e, srv_job *j)
{
    uint32_t n_open = e->n_open, n_beyond = 0;

    for (const srv_job *w = e->waiting; w; w = w->next_waiting) {
        n_beyond += n_open == 0;
        n_open -= w->req.n_input < n_open ? w->req.n_input : n_open;
    }
    if (n_open == 0 && n_beyond >= e->p.n_queue)
        return false;
    j->prev_waiting = e->waiting_last;
    j->next_waiting = NULL;
    if (j->prev_waiting)
        j->prev_waiting->next_waiting = j;
    else
        e->waiting = j;
    e->waiting_last = j;
    e->n_waiting++;
    return true;
}

void srv_sched_stop_waiting(srv_engine *e, srv_job *j)
{
    uint32_t n_open;

    if (j->usage.queue_ns)
        return;
    j->usage.queue_ns = kvd_now_ns() - j->submit_ns + 1;
    n_open            = count_open(e); /* its other inputs are among them from now on */
    pthread_mutex_lock(&e->lock);
    if (j->prev_waiting)
        j->prev_waiting->next_waiting = j->next_waiting;
    else
        e->waiting = j->next_waiting;
    if (j->next_waiting)
        j->next_waiting->prev_waiting = j->prev_waiting;
    else
        e->waiting_last = j->prev_waiting;
    e->n_waiting--;
    e->n_open = n_open;
    pthread_mutex_unlock(&e->lock);
}

/* Of prompts that were begun: tokens that were evaluated so far, also where they are not all done.
 */
static uint64_t evaluated(const srv_engine *e, const srv_job *j)
{
    uint64_t n = j->usage.n_evaluated;

    for (uint32_t i = 0; i < e->p.n_seq; i++) {
        const srv_slot *s = &e->slot[i];

        if (s->gen && s->gen->job == j && s->gen->state == SRV_GEN_PROMPT && !s->gen->loading &&
            s->gen->n_token == s->gen->n_prompt)
            n -= s->gen->n_target - s->n; /* it counts as a whole when it begins */
    }
    return n;
}

static void cancel(srv_engine *e, srv_job *j)
{
    const srv_usage *u        = &j->usage;
    uint64_t         n_prompt = 0;

    if (j->over)
        return;
    j->over = true;
    e->counts.n_canceled++;
    srv_sched_stop_waiting(e, j);
    for (uint32_t i = 0; i < j->req.n_input; i++)
        n_prompt += j->req.input[i].n;
    kvd_log(KVD_LOG_INFO,
            "%s: %s, canceled by its client, %.0f ms, prompt %llu (cached %llu+%llu+%llu, "
            "evaluated %llu), generated %llu",
            j->id, j->route, (double)(kvd_now_ns() - j->submit_ns) * 1e-6,
            (unsigned long long)n_prompt, (unsigned long long)u->n_cached[0],
            (unsigned long long)u->n_cached[1], (unsigned long long)u->n_cached[2],
            (unsigned long long)evaluated(e, j), (unsigned long long)u->n_generated);
}

void srv_sched_drop_canceled(srv_engine *e)
{
    bool dropped = false;

    for (uint32_t i = 0; i < e->p.n_seq; i++) {
        srv_gen *g = e->slot[i].gen;

        if (!g || !is_over(g->job))
            continue;
        cancel(e, g->job);
        srv_sched_release(e, &e->slot[i]);
        srv_gen_free(g);
    }
    for (srv_gen *g = e->queue, *next; g; g = next) {
        next = g->next;
        if (!is_over(g->job))
            continue;
        cancel(e, g->job);
        unlink_gen(e, g);
        srv_gen_free(g);
        dropped = true;
    }
    if (dropped)
        srv_sched_count_open(e);
}

/* ---- sequences ----------------------------------------------------------------------------- */

static uint32_t n_all(const srv_engine *e)
{
    return e->p.n_seq + e->p.n_parked;
}

static uint32_t number_of(const srv_engine *e, const srv_slot *s)
{
    return (uint32_t)(s - e->slot);
}

static bool is_parked(const srv_engine *e, const srv_slot *s)
{
    return number_of(e, s) >= e->p.n_seq;
}

static bool same_salt(const srv_slot *s, const srv_request *r)
{
    return s->n_salt == r->n_salt && memcmp(s->salt, r->salt, r->n_salt) == 0;
}

/* Tokens that a sequence can give a generation. */
static uint32_t common(const srv_engine *e, const srv_slot *s, const srv_gen *g)
{
    const srv_request *r     = &g->job->req;
    const int32_t     *token = g->token ? g->token : r->input[g->input].token;

    if (s->n == 0 || !same_salt(s, r))
        return 0;
    return kvd_seq_common(e->p.session, number_of(e, s), token, g->n_token);
}

static uint32_t blocks_of(uint32_t n_token)
{
    return (n_token + SRV_BLOCK_TOKENS - 1) / SRV_BLOCK_TOKENS;
}

/* Blocks a sequence holds, or will when its prompt is there and has room for a block of answer. */
static uint64_t claim_of(const srv_slot *s)
{
    const uint32_t n = s->gen && s->gen->n_target > s->n ? s->gen->n_target : s->n;

    return s->gen ? blocks_of(n + 1) : blocks_of(n);
}

static void cut(srv_engine *e, srv_slot *s, uint32_t n)
{
    const uint32_t number = number_of(e, s);
    kvd_err        err    = { 0 };

    if (s->n <= n)
        return;
    if (kvd_seq_truncate(e->p.session, number, n, &err) != KVD_OK)
        kvd_log(KVD_LOG_WARN, "sequence %u: %s", number, err.msg);
    s->n = kvd_seq_len(e->p.session, number);
}

void srv_sched_drop_idle(srv_engine *e)
{
    for (uint32_t i = 0; i < n_all(e); i++)
        if (!e->slot[i].gen)
            cut(e, &e->slot[i], 0);
}

/* again: it waits for a slot once more, which is counted then. */
static void give_up(srv_engine *e, srv_slot *s, bool again)
{
    if (s->gen->state == SRV_GEN_PROMPT) { /* what there is of the prompt stays, but it has ended */
        (void)!kvd_seq_truncate(e->p.session, number_of(e, s),
                                kvd_seq_len(e->p.session, number_of(e, s)), NULL);
        s->n = kvd_seq_len(e->p.session, number_of(e, s));
    }
    s->gen->job->n_running[s->gen->input]--;
    s->gen     = NULL;
    s->used_ns = kvd_now_ns();
    e->stale   = e->p.cached;
    if (!again)
        srv_sched_count_open(e);
}

void srv_sched_release(srv_engine *e, srv_slot *s)
{
    give_up(e, s, false);
}

/* What the library has given up of parked sequences is not there any more. */
static void look_at_parked(srv_engine *e)
{
    for (uint32_t i = e->p.n_seq; i < n_all(e); i++)
        e->slot[i].n = kvd_seq_len(e->p.session, i);
}

static void mark_wanted(srv_engine *e)
{
    uint32_t n_look = 0;

    for (uint32_t i = 0; i < n_all(e); i++)
        e->slot[i].wanted = NULL;
    for (srv_gen *g = e->queue; g && n_look < LOOK_MAX; g = g->next, n_look++) {
        srv_slot *best = NULL;
        uint32_t  most = WANTED_MIN - 1;

        for (uint32_t i = 0; i < n_all(e); i++) {
            const uint32_t n = common(e, &e->slot[i], g);

            if (n > most) {
                most = n;
                best = &e->slot[i];
            }
        }
        if (best && !best->wanted)
            best->wanted = g;
    }
}

/* What giving up n tokens of a sequence costs, in tokens to evaluate: half of them, less with age,
 * and in full where another than g waits for them. */
static double loss_of(const srv_slot *s, const srv_gen *g, uint32_t n, uint64_t now)
{
    const double age    = (double)(now - s->used_ns) / AGE_NS;
    const double weight = s->wanted && s->wanted != g ? 1.0 : 0.5 / (1.0 + age);

    return weight * (double)n;
}

/* Whether sequence a should be given up rather than b; both are idle. */
static bool less_worth(const srv_slot *a, const srv_slot *b)
{
    if (!a->wanted != !b->wanted)
        return !a->wanted;
    return a->used_ns < b->used_ns;
}

/* The idle sequence among slots, or among all, that holds something and is worth least; NULL: none
 * is. */
static srv_slot *least_worth(srv_engine *e, uint32_t first, uint32_t end, const srv_slot *keep)
{
    srv_slot *least = NULL;

    for (uint32_t i = first; i < end; i++) {
        srv_slot *s = &e->slot[i];

        if (!s->gen && s != keep && s->n > 0 && (!least || less_worth(s, least)))
            least = s;
    }
    return least;
}

/* A slot that no generation has, empty if there is such a one; NULL: none. */
static srv_slot *free_slot(srv_engine *e)
{
    for (uint32_t i = 0; i < e->p.n_seq; i++)
        if (!e->slot[i].gen && e->slot[i].n == 0)
            return &e->slot[i];
    return least_worth(e, 0, e->p.n_seq, NULL);
}

static void move(srv_engine *e, srv_slot *from, srv_slot *to)
{
    kvd_err err = { 0 };

    if (kvd_seq_move(e->p.session, number_of(e, from), number_of(e, to), &err) != KVD_OK)
        kvd_log(KVD_LOG_WARN, "sequence %u: %s", number_of(e, from), err.msg);
    to->n       = kvd_seq_len(e->p.session, number_of(e, to));
    from->n     = kvd_seq_len(e->p.session, number_of(e, from));
    to->used_ns = from->used_ns;
    to->wanted  = from->wanted;
    to->n_salt  = from->n_salt;
    memcpy(to->salt, from->salt, from->n_salt);
}

/* An empty place for a parked sequence; where all are taken the one worth least is dropped, but not
 * `keep`.  NULL: there are no places. */
static srv_slot *free_place(srv_engine *e, const srv_slot *keep)
{
    srv_slot *least;

    for (uint32_t i = e->p.n_seq; i < n_all(e); i++)
        if (e->slot[i].n == 0)
            return &e->slot[i];
    least = least_worth(e, e->p.n_seq, n_all(e), keep);
    if (least)
        cut(e, least, 0);
    return least;
}

/* ---- where a generation goes ----------------------------------------------------------------- */

typedef struct spot {
    srv_slot *slot; /* it runs there */
    srv_slot *from; /* and goes on with what this sequence holds: the slot, or a parked one; NULL:
                       with nothing */
    double cost;    /* in tokens to evaluate */
} spot;

/* Blocks that it needs beyond what a sequence has; from NULL: it has none. */
static uint64_t need_of(const srv_gen *g, const srv_slot *from)
{
    const uint64_t need = blocks_of(g->n_token + 1), have = from ? claim_of(from) : 0;

    return need > have ? need - have : 0;
}

static uint64_t claimed(const srv_engine *e)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < n_all(e); i++)
        n += claim_of(&e->slot[i]);
    return n;
}

/* What idle sequences lose that give up memory for it, about. */
static double loss_of_room(srv_engine *e, const srv_gen *g, const srv_slot *from, uint64_t now)
{
    const uint64_t need = claimed(e) + need_of(g, from);
    srv_slot      *old  = need > e->p.n_block ? least_worth(e, 0, n_all(e), from) : NULL;

    return old ? loss_of(old, g, (uint32_t)(need - e->p.n_block) * SRV_BLOCK_TOKENS, now) : 0.0;
}

/* There is a slot that no generation has. */
static spot choose(srv_engine *e, const srv_gen *g)
{
    const uint64_t now  = kvd_now_ns();
    srv_slot      *free = free_slot(e);
    spot           best = { .slot = free, .cost = g->n_token + loss_of_room(e, g, NULL, now) };

    if (e->p.n_parked == 0) { /* what the slot holds is given up */
        best.from = free;
        best.cost = (double)g->n_token + loss_of(free, g, free->n, now);
    }
    for (uint32_t i = 0; i < n_all(e); i++) {
        srv_slot      *s = &e->slot[i];
        const uint32_t n = s->gen ? 0 : common(e, s, g);
        double         cost;

        if (n == 0)
            continue;
        cost = (double)(g->n_token - n) + loss_of(s, g, s->n - n, now) + loss_of_room(e, g, s, now);
        if (cost < best.cost)
            best = (spot){ .slot = is_parked(e, s) ? free : s, .from = s, .cost = cost };
    }
    return best;
}

/* The slot comes to hold what the generation goes on with: what it held is parked. */
static void prepare(srv_engine *e, const spot *at)
{
    srv_slot *place;

    if (at->from == at->slot)
        return;
    place = at->slot->n ? free_place(e, at->from) : NULL;
    if (place)
        move(e, at->slot, place);
    cut(e, at->slot, 0);
    if (at->from)
        move(e, at->from, at->slot);
}

/* ---- memory ------------------------------------------------------------------------------- */

/* Idle sequences give up what they hold until `need` blocks are free; false: that is not enough. */
static bool evict_idle(srv_engine *e, uint64_t need, const srv_slot *keep)
{
    while (claimed(e) + need > e->p.n_block) {
        srv_slot *least = least_worth(e, 0, n_all(e), keep);

        if (!least)
            return false;
        cut(e, least, 0);
    }
    return true;
}

static void preempt(srv_engine *e, srv_slot *s)
{
    srv_gen *g = s->gen;

    kvd_log(KVD_LOG_INFO, "%s: preempted after %u tokens, another needs its memory", g->job->id,
            s->n);
    e->counts.n_preempted++;
    give_up(e, s, true);
    cut(e, s, 0);
    srv_sched_enqueue(e, g, true);
    srv_sched_count_open(e);
}

void srv_sched_make_room(srv_engine *e)
{
    look_at_parked(e);
    while (!evict_idle(e, 0, NULL)) {
        srv_slot *young = NULL;
        uint32_t  n     = 0;

        for (uint32_t i = 0; i < e->p.n_seq; i++) {
            srv_slot *s = &e->slot[i];

            n += s->gen != NULL;
            if (s->gen && (!young || s->gen->order > young->gen->order))
                young = s;
        }
        if (n == 0)
            return;
        if (n > 1)
            preempt(e, young);
        else /* alone, and it has all there is */
            srv_step_finish(e, young, SRV_FINISH_LENGTH, -1);
    }
}

/* ---- admission ----------------------------------------------------------------------------------
 */

/* Where the first input of a request leaves what was known, and what it says there. */
static void explain(srv_engine *e, srv_gen *g, uint32_t at)
{
    srv_usage *u    = &g->job->usage;
    size_t     have = 0;

    u->miss_at = at;
    for (uint32_t i = at > 8 ? at - 8 : 0; i < g->n_prompt && i < at + 16; i++) {
        size_t      len;
        const char *text = kvd_token_bytes(e->p.model, g->token[i], &len);

        if (have + len >= sizeof(u->miss_text))
            break;
        memcpy(u->miss_text + have, text, len);
        have += len;
    }
    u->miss_text[have] = 0;
}

static void count_cached(srv_engine *e, srv_gen *g, uint32_t kept, uint32_t known)
{
    const srv_tier tier = e->p.resident ? SRV_TIER_DEVICE : SRV_TIER_HOST;

    if (g->counted) { /* and preempted since */
        e->counts.n_recomputed += g->n_token - known;
        return;
    }
    g->counted = true;
    if (g->turn == 0) { /* a prompt counts once, whatever the number of its choices */
        g->job->usage.n_cached[tier] += kept;
        g->job->usage.n_cached[SRV_TIER_DISK] += known - kept;
        g->job->usage.n_prompt += g->n_prompt;
    }
    g->job->usage.n_evaluated += g->n_prompt - known;
    e->counts.n_cached[tier] += kept;
    e->counts.n_cached[SRV_TIER_DISK] += known - kept;
    e->counts.n_prompt += g->n_prompt;
}

static uint32_t n_answering(const srv_engine *e)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < e->p.n_seq; i++)
        n += e->slot[i].gen && e->slot[i].gen->state == SRV_GEN_ANSWER;
    return n;
}

kvd_status srv_sched_begin(srv_engine *e, srv_slot *s, bool skip, kvd_err *err)
{
    const srv_request *r  = &s->gen->job->req;
    const uint64_t     t0 = kvd_now_ns();
    kvd_prompt         p  = KVD_PROMPT_INIT;
    kvd_status         st;

    p.token      = s->gen->token;
    p.n_token    = s->gen->n_token;
    p.salt       = r->salt;
    p.salt_bytes = r->n_salt;
    p.skip_cache = skip;
    p.slice_ns   = srv_pace_slice(&e->pace, n_answering(e));
    st           = kvd_prompt_begin(e->p.session, number_of(e, s), &p, err);
    e->counts.prefix_ns += e->p.cached ? kvd_now_ns() - t0 : 0;
    return st;
}

/* The first note of how far a prompt is: as far as it was cached. */
static void tell_cached(srv_engine *e, srv_gen *g)
{
    srv_event *ev = srv_event_new(SRV_EVENT_PROGRESS, g->choice, NULL, 0, 0);

    if (ev) {
        ev->n_done = ev->n_cached = g->n_kept;
        ev->n_total               = g->n_prompt;
        ev->ns                    = kvd_now_ns() - g->start_ns;
    }
    srv_tell(e, g->job, ev);
}

/* What is known of the prompt is there. */
/* Its first event says how much of the prompt is cached, which is known here. */
static void begin_evaluation(srv_engine *e, srv_slot *s, srv_gen *g)
{
    const uint32_t kept = s->n;
    const bool new      = !g->counted;

    s->n       = kvd_seq_len(e->p.session, number_of(e, s));
    g->loading = false;
    g->n_kept  = s->n;
    count_cached(e, g, kept < s->n ? kept : s->n, s->n);
    if (g->job->req.debug_cache && g->choice == 0 && g->n_token == g->n_prompt)
        explain(e, g, s->n);
    if (new) {
        srv_event *ev = srv_event_new(SRV_EVENT_START, g->choice, NULL, 0, 0);

        if (ev)
            ev->n_cached = s->n;
        srv_tell(e, g->job, ev);
        if (g->job->req.progress)
            tell_cached(e, g);
    }
    if (new && g->job->req.echo && !g->echo)
        srv_gen_tell_echo(g, e);
}

/* The slot whose prompt is being read for longest; NULL: none is. */
static srv_slot *oldest_loading(srv_engine *e)
{
    srv_slot *old = NULL;

    for (uint32_t i = 0; i < e->p.n_seq; i++) {
        srv_slot *s = &e->slot[i];

        if (s->gen && s->gen->loading && (!old || s->gen->order < old->gen->order))
            old = s;
    }
    return old;
}

/* The slot holds the first tokens of the prompt, or none.  The store may know more of them.  It
 * reads one prompt until that is done, whoever asks: others wait, unless they hold most of theirs.
 */
static kvd_status begin_prompt(srv_engine *e, srv_slot *s, srv_gen *g, kvd_err *err)
{
    const srv_request *r     = &g->job->req;
    const bool         reads = oldest_loading(e) != NULL;
    const bool         waits = reads && s->n <= g->n_token / 2;
    kvd_status         st    = KVD_OK;

    g->n_target = g->n_token;
    g->loading  = false;
    memcpy(s->salt, r->salt, r->n_salt);
    s->n_salt = r->n_salt;
    if (!g->echo) /* it wants the logits of all of it */
        st = waits ? KVD_E_BUSY : srv_sched_begin(e, s, reads, err);
    if (st == KVD_OK)
        begin_evaluation(e, s, g);
    g->loading = st == KVD_E_BUSY;
    return g->loading ? KVD_OK : st;
}

bool srv_sched_load(srv_engine *e)
{
    srv_slot  *old = oldest_loading(e);
    kvd_err    err = { 0 };
    kvd_status st;

    if (!old)
        return false;
    st = srv_sched_begin(e, old, false, &err);
    if (st == KVD_OK)
        begin_evaluation(e, old, old->gen);
    else if (st != KVD_E_BUSY)
        srv_step_fail(e, old->gen->job, st == KVD_E_NOMEM ? 503 : 500, err.msg);
    return true;
}

/* What a slot goes on with of what it holds; the prefix cache adds what it knows beyond that. */
static uint32_t kept_of(const srv_engine *e, const srv_slot *s, const srv_gen *g)
{
    const uint32_t n = g->echo ? 0 : common(e, s, g);

    return n < g->n_token ? n : g->n_token - 1;
}

static void start(srv_engine *e, srv_gen *g, const spot *at)
{
    srv_slot  *s     = at->slot;
    const bool first = g->job->usage.queue_ns == 0;
    kvd_err    err   = { 0 };
    kvd_status st    = srv_gen_open(g, e->p.model, e->p.n_ctx, &err);

    e->counts.n_started += first;
    unlink_gen(e, g);
    prepare(e, at);
    g->state    = SRV_GEN_PROMPT;
    g->order    = e->n_order++;
    g->start_ns = kvd_now_ns();
    s->gen      = g;
    g->job->n_running[g->input]++;
    if (first) {
        srv_sched_stop_waiting(e, g->job); /* in the moment that its slot is taken */
        srv_hist_add(&e->counts.queue, g->job->usage.queue_ns);
    } else {
        srv_sched_count_open(e);
    }
    cut(e, s, kept_of(e, s, g));
    if (st == KVD_OK)
        st = begin_prompt(e, s, g, &err);
    if (st != KVD_OK) {
        srv_step_fail_err(e, g->job, &err);
        return;
    }
    kvd_hold_close(g->hold);
    g->hold  = NULL;
    g->asked = false;
}

static bool has_idle(const srv_engine *e)
{
    for (uint32_t i = 0; i < e->p.n_seq; i++)
        if (!e->slot[i].gen)
            return true;
    return false;
}

/* Nobody waits but choices of inputs that others answer already.  One of them runs beside those
 * once they have taken as long as its slot costs: evaluating its prompt another time then makes the
 * request at most so much slower, and where answers are long, faster by whole answers.  It takes no
 * memory from others that run. */
static bool admit_beside(srv_engine *e, srv_gen *g)
{
    const uint64_t since = g->job->answer_ns[g->input], now = kvd_now_ns();
    const double   token_ns = srv_pace_token_ns(&e->pace);
    spot           at;

    if (!since || token_ns == 0.0 || now < g->beside_ns)
        return false;
    at           = choose(e, g);
    g->beside_ns = since + (uint64_t)(at.cost * token_ns);
    if (now < g->beside_ns || !evict_idle(e, need_of(g, at.from), at.from))
        return false;
    start(e, g, &at);
    return true;
}

/* A sequence that loses tokens when g runs there, if any. */
static srv_slot *victim_of(srv_engine *e, const srv_gen *g, const spot *at)
{
    if (at->from)
        return at->from;
    return claimed(e) + need_of(g, NULL) > e->p.n_block ? least_worth(e, 0, n_all(e), NULL) : NULL;
}

/* Who runs in place of g: one behind it that waits for what g would have given up, if that has more
 * use for it, and it is nowhere else. */
static srv_gen *goes_first(const srv_engine *e, srv_gen *g, const srv_slot *victim)
{
    srv_gen *w = victim ? victim->wanted : NULL;

    if (!w || w == g || e->p.cached || g->n_passed == PASSED_MAX || !may_run(w) ||
        w->job->req.echo || common(e, victim, g) >= common(e, victim, w))
        return g;
    return w;
}

/* The first that may run gets a slot, if there is one and memory for it. */
static bool admit_one(srv_engine *e)
{
    srv_gen *g = e->queue, *first;
    spot     at;

    if (!g || !has_idle(e))
        return false;
    while (g && !may_run(g))
        g = g->next;
    look_at_parked(e);
    mark_wanted(e);
    if (!g)
        return admit_beside(e, e->queue);
    at    = choose(e, g);
    first = goes_first(e, g, victim_of(e, g, &at));
    if (first != g)
        at = choose(e, first);
    if (!evict_idle(e, need_of(first, at.from), at.from))
        return false;
    g->n_passed += first != g;
    start(e, first, &at);
    return true;
}

void srv_sched_drop_holds(srv_engine *e)
{
    for (srv_gen *g = e->queue; g; g = g->next) {
        kvd_hold_close(g->hold);
        g->hold  = NULL;
        g->asked = false;
    }
}

/* What the prefix cache knows of prompts that wait stays until they run: others that store much
 * would have it given up.  One that ran before has what it needs in there, too.  One look-up
 * between two steps, since answers wait for it. */
static void hold_waiting(srv_engine *e)
{
    for (srv_gen *g = e->queue; e->p.cached && g; g = g->next) {
        const srv_request *r   = &g->job->req;
        const srv_input   *in  = &r->input[g->input];
        const uint64_t     t0  = kvd_now_ns();
        kvd_prompt         p   = KVD_PROMPT_INIT;
        kvd_err            err = { 0 };

        if (g->asked || r->echo || g->turn > 0)
            continue;
        g->asked     = true;
        p.token      = g->token ? g->token : in->token;
        p.n_token    = g->token ? g->n_token : in->n;
        p.salt       = r->salt;
        p.salt_bytes = r->n_salt;
        if (kvd_hold_open(&g->hold, e->p.session, &p, &err) != KVD_OK)
            kvd_log(KVD_LOG_WARN, "%s: %s", g->job->id, err.msg);
        e->counts.prefix_ns += kvd_now_ns() - t0;
        return;
    }
}

void srv_sched_admit(srv_engine *e)
{
    while (admit_one(e))
        srv_sched_drop_canceled(e); /* if it could not even begin */
    hold_waiting(e);
}
