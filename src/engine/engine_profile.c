/* SPDX-License-Identifier: Apache-2.0 */
/* engine_profile.c - watches what decode steps select, and lets windows of many sizes and policies
 * follow the same selections, to say what each would have held.
 *
 * These windows are changed by the op that changes a session's, the CPU's wherever that one
 * computes (all backends' leave the same bits), over state kept here; no record moves.  A session's
 * own window does have a part in what it attends to, and so in later selections: all others are
 * judged by the trace that came of that one.
 *
 * Owns: the state of all windows and the trace.  After open nothing here allocates.
 * Thread: the session's. */
#include <string.h>

#include "base/half.h"
#include "engine/engine_profile.h"

const float    engine_profile_cap[ENGINE_PROFILE_CAPS] = { 1.0f, 1.5f, 2.0f,  3.0f, 4.0f,
                                                           6.0f, 8.0f, 12.0f, 16.0f };
const float    engine_profile_top[ENGINE_PROFILE_TOPS] = { 0.25f, 0.5f, 1.0f, 2.0f, 4.0f, 8.0f };
const uint32_t engine_profile_union[ENGINE_PROFILE_UNIONS] = { 1, 2, 4, 8, 16, 32 };

/* Window numbers of a lane: policy * ENGINE_PROFILE_CAPS + cap. */
#define N_ONLINE 5u /* policies; the optimum needs the whole trace */
#define N_WINDOW (N_ONLINE * ENGINE_PROFILE_CAPS)
#define LARGEST  16u /* cap */

struct engine_profile {
    kvd_session         *s;
    kvd_backend         *be; /* the CPU's: all state here is in pageable memory */
    kvd_stream          *stream;
    engine_lane_profile *lane;
    engine_trace         trace;
    engine_host_tiers    host;
    kvd_err              err; /* of a step; the first one stays */
    bool                 failed;

    uint16_t *slot_of;          /* [lane][window][n_chunk_max] */
    uint32_t *chunk_of, *stamp; /* [lane][window][slots_max] */
    uint32_t *place;            /* [lane][n_chunk_max] rank by score in the step before */

    /* of the lane at hand */
    uint32_t *order, *spare;              /* [n_chunk_max] chunks by score, best first */
    uint16_t *score;                      /* [n_chunk_max] as a moving average with alpha 1 */
    uint8_t  *mark;                       /* [n_chunk_max] */
    uint32_t *sel, *stay, *fetch, *into;  /* [cap][slots_max] */
    uint32_t  slots[ENGINE_PROFILE_CAPS]; /* of each cap */
};

/* ---- ranking ------------------------------------------------------------------------ */

/* Chunks by score, descending; of equals the lower one first.  Scores are in [0, 1], so their bits
 * order them. */
static uint32_t rank(engine_profile *p, const kv_tap_lane *l)
{
    const uint32_t n = l->n_chunk - l->first_chunk;

    for (uint32_t i = 0; i < n; i++)
        p->order[i] = l->first_chunk + i;
    for (uint32_t shift = 0; shift < 32; shift += 8) {
        uint32_t count[256] = { 0 }, bits, *other;

        for (uint32_t i = 0; i < n; i++) {
            memcpy(&bits, &l->score[p->order[i]], sizeof(bits));
            count[~bits >> shift & 255]++;
        }
        for (uint32_t b = 0, sum = 0; b < 256; b++) {
            const uint32_t k = count[b];

            count[b] = sum;
            sum += k;
        }
        for (uint32_t i = 0; i < n; i++) {
            memcpy(&bits, &l->score[p->order[i]], sizeof(bits));
            p->spare[count[~bits >> shift & 255]++] = p->order[i];
        }
        other    = p->order;
        p->order = p->spare;
        p->spare = other;
    }
    return n;
}

/* The first k of the order as select would give them: ascending. */
static uint32_t best(engine_profile *p, const kv_tap_lane *l, uint32_t n, uint32_t k, uint32_t *out)
{
    uint32_t m = 0;

    k = k < n ? k : n;
    memset(p->mark, 0, l->n_chunk);
    for (uint32_t i = 0; i < k; i++)
        p->mark[p->order[i]] = 1;
    for (uint32_t c = l->first_chunk; c < l->n_chunk; c++) {
        if (p->mark[c])
            out[m++] = c;
    }
    return m;
}

/* ---- windows ------------------------------------------------------------------------- */

static const uint16_t *average_for(const engine_profile *p, const kv_tap_lane *l, uint32_t policy)
{
    return policy == KVD_EVICT_BY_LOOKAHEAD ? p->score : l->ema;
}

static kvd_evict_policy policy_of(uint32_t policy)
{
    static const kvd_evict_policy of[N_ONLINE] = { KVD_EVICT_EMA, KVD_EVICT_EMA, KVD_EVICT_LRU,
                                                   KVD_EVICT_LFU, KVD_EVICT_RANDOM };

    return of[policy];
}

/* All windows of one policy follow a step of a lane. */
static kvd_status follow(engine_profile *p, const kv_tap_lane *l, uint32_t lane, uint32_t policy,
                         const kvd_select_result *chosen, kvd_err *err)
{
    const engine_trace *t = &p->trace;
    kvd_window_seq      seq[ENGINE_PROFILE_CAPS];
    kvd_window_result   result[ENGINE_PROFILE_CAPS];
    kvd_window_args     a = { .n_seq       = ENGINE_PROFILE_CAPS,
                              .n_kv_head   = 1,
                              .seq         = seq,
                              .select      = chosen,
                              .result      = result,
                              .lane_stride = t->n_chunk_max,
                              .slot_stride = t->slots_max,
                              .sel_stride  = t->slots_max,
                              .policy      = policy_of(policy) };

    for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++) {
        const uint64_t w    = (uint64_t)lane * N_WINDOW + policy * ENGINE_PROFILE_CAPS + c;
        const uint64_t list = (uint64_t)c * t->slots_max;

        seq[c] = (kvd_window_seq){ .step     = l->step,
                                   .refill   = l->step == 0,
                                   .cap      = &p->slots[c],
                                   .sel      = p->sel + list,
                                   .ema      = average_for(p, l, policy),
                                   .slot_of  = p->slot_of + w * t->n_chunk_max,
                                   .chunk_of = p->chunk_of + w * t->slots_max,
                                   .stamp    = p->stamp + w * t->slots_max,
                                   .stay     = p->stay + list,
                                   .fetch    = p->fetch + list,
                                   .into     = p->into + list };
    }
    KVD_TRY(p->be->ops->window(p->stream, &a, err));
    KVD_TRY(p->be->ops->stream_sync(p->stream, err));
    for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++) {
        p->lane[lane].hit[policy][c] += l->step > 0 ? result[c].n_hit : 0;
        if (policy == (uint32_t)p->s->attention.params.evict)
            engine_host_step(&p->host, lane, c, l->ema, l->n_chunk,
                             p->fetch + (uint64_t)c * t->slots_max,
                             p->s->attention.policy.strict ? result[c].n_miss : result[c].n_urgent,
                             result[c].n_miss, &p->lane[lane]);
    }
    return KVD_OK;
}

/* What each cap's windows are to hold: the selection, or at first the best there is. */
static void give_selections(engine_profile *p, const kv_tap_lane *l, uint32_t n,
                            kvd_select_result chosen[ENGINE_PROFILE_CAPS])
{
    for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++) {
        uint32_t *sel = p->sel + (uint64_t)c * p->trace.slots_max;

        chosen[c] = (kvd_select_result){ .n_sel = l->n_sel };
        if (l->step == 0)
            chosen[c].n_sel = best(p, l, n, p->slots[c], sel);
        else
            memcpy(sel, l->sel, l->n_sel * sizeof(*sel));
    }
}

/* ---- recording ----------------------------------------------------------------------- */

static void start_lane(engine_profile *p, const kv_tap_lane *l, uint32_t lane, uint32_t n)
{
    engine_trace  *t = &p->trace;
    const uint64_t w = (uint64_t)lane * N_WINDOW;

    memset(p->slot_of + w * t->n_chunk_max, 0xff, N_WINDOW * t->n_chunk_max * sizeof(*p->slot_of));
    memset(p->chunk_of + w * t->slots_max, 0xff, N_WINDOW * t->slots_max * sizeof(*p->chunk_of));
    t->n_step[lane]  = 0;
    t->n_start[lane] = n < t->slots_max ? n : t->slots_max;
    memcpy(t->start + (uint64_t)lane * t->slots_max, p->order,
           t->n_start[lane] * sizeof(*t->start));
    for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++)
        p->slots[c] = engine_profile_slots(l->budget, c);
    engine_host_start(&p->host, lane, l->n_chunk, p->order, n);
}

static void record(engine_profile *p, const kv_tap_lane *l, uint32_t lane, uint32_t n)
{
    engine_trace  *t    = &p->trace;
    const uint64_t step = (uint64_t)lane * t->n_step_max + t->n_step[lane];
    uint32_t      *sel  = t->sel + step * t->budget_max;

    t->n_chunk[lane] = l->n_chunk;
    if (l->step == 0) {
        t->n_sel[step] = best(p, l, n, l->budget, sel);
    } else {
        t->n_sel[step] = l->n_sel;
        for (uint32_t i = 0; i < l->n_sel; i++)
            sel[i] = l->sel[i] & ~KVD_SELECT_URGENT;
    }
    t->n_step[lane]++;
}

/* How much of this selection was ranked high in the step before; then this step's ranks. */
static void compare_ranks(engine_profile *p, const kv_tap_lane *l, uint32_t lane, uint32_t n)
{
    engine_lane_profile *out   = &p->lane[lane];
    uint32_t            *place = p->place + (uint64_t)lane * p->trace.n_chunk_max;

    for (uint32_t i = 0; i < l->n_sel && l->step > 0; i++) {
        for (uint32_t m = 0; m < ENGINE_PROFILE_TOPS; m++)
            out->top_hit[m] += (float)place[l->sel[i] & ~KVD_SELECT_URGENT] <
                               (float)l->budget * engine_profile_top[m];
    }
    memset(place, 0xff, p->trace.n_chunk_max * sizeof(*place));
    for (uint32_t i = 0; i < n; i++)
        place[p->order[i]] = i;
}

static void on_lane(void *ctx, const kv_tap_lane *l)
{
    engine_profile   *p    = ctx;
    const uint32_t    lane = l->layer * model_get_hparams(p->s->model->net)->n_kv_head + l->kv_head;
    kvd_select_result chosen[ENGINE_PROFILE_CAPS];
    kvd_status        st = KVD_OK;
    uint32_t          n;

    if (l->seq != 0 || p->failed || l->budget > p->trace.budget_max ||
        (l->step > 0 &&
         (p->trace.n_step[lane] == 0 || p->trace.n_step[lane] >= p->trace.n_step_max)))
        return;
    n = rank(p, l);
    if (l->step == 0)
        start_lane(p, l, lane, n);
    compare_ranks(p, l, lane, n);
    record(p, l, lane, n);
    give_selections(p, l, n, chosen);
    for (uint32_t c = l->first_chunk; c < l->n_chunk; c++)
        p->score[c] = kvd_f32_to_f16(l->score[c] * KVD_EMA_SCALE);
    for (uint32_t policy = 0; policy < N_ONLINE && st == KVD_OK; policy++)
        st = follow(p, l, lane, policy, chosen, &p->err);
    engine_host_end_step(&p->host, lane, l->n_chunk);
    p->failed = st != KVD_OK;
    if (l->step > 0)
        p->lane[lane].n_select += l->n_sel;
}

/* ---- open and close ------------------------------------------------------------------ */

/* All arrays: allocated, or with `release` given back. */
static bool arrays(engine_profile *p, bool release)
{
    engine_trace  *t     = &p->trace;
    const uint64_t lanes = t->n_lane, steps = t->n_step_max, chunks = t->n_chunk_max;
    const uint64_t windows = lanes * N_WINDOW, lists = ENGINE_PROFILE_CAPS;
    bool           ok = true;
    const struct {
        void   **at;
        uint64_t n, bytes;
    } part[] = {
        { (void **)&p->lane, lanes, sizeof(*p->lane) },
        { (void **)&t->n_step, lanes, 4 },
        { (void **)&t->n_chunk, lanes, 4 },
        { (void **)&t->n_sel, lanes * steps, 4 },
        { (void **)&t->sel, lanes * steps * t->budget_max, 4 },
        { (void **)&t->n_start, lanes, 4 },
        { (void **)&t->start, lanes * t->slots_max, 4 },
        { (void **)&t->next_use, steps * t->budget_max, 4 },
        { (void **)&t->next, chunks, 4 },
        { (void **)&t->seen, chunks, 4 },
        { (void **)&t->held, chunks, 1 },
        { (void **)&t->window, t->slots_max, 4 },
        { (void **)&t->n_at, steps + 1, 4 },
        { (void **)&p->slot_of, windows * chunks, 2 },
        { (void **)&p->chunk_of, windows * t->slots_max, 4 },
        { (void **)&p->stamp, windows * t->slots_max, 4 },
        { (void **)&p->place, lanes * chunks, 4 },
        { (void **)&p->host.n_chunk, lanes, 4 },
        { (void **)&p->host.held, lanes * ENGINE_PROFILE_CAPS * chunks, 2 },
        { (void **)&p->host.rank, chunks, 8 },
        { (void **)&p->host.read, chunks, 4 },
        { (void **)&p->order, chunks, 4 },
        { (void **)&p->spare, chunks, 4 },
        { (void **)&p->score, chunks, 2 },
        { (void **)&p->mark, chunks, 1 },
        { (void **)&p->sel, lists * t->slots_max, 4 },
        { (void **)&p->stay, lists * t->slots_max, 4 },
        { (void **)&p->fetch, lists * t->slots_max, 4 },
        { (void **)&p->into, lists * t->slots_max, 4 },
    };

    for (size_t i = 0; i < KVD_COUNTOF(part); i++) {
        if (release)
            kvd_free(*part[i].at);
        else
            ok = (*part[i].at = kvd_calloc(part[i].n, part[i].bytes)) && ok;
    }
    return ok;
}

static kvd_status allocate(engine_profile *p, kvd_err *err)
{
    return arrays(p, false)
               ? KVD_OK
               : kvd_fail(err, KVD_E_NOMEM, 0,
                          "profile: no memory for %u windows of %u chunks and %u steps",
                          p->trace.n_lane * N_WINDOW, p->trace.slots_max, p->trace.n_step_max);
}

static kvd_status open_backend(engine_profile *p, kvd_err *err)
{
    const kvd_backend_limits lim = {
        .n_token = 1, .n_seq = ENGINE_PROFILE_CAPS, .n_kv_head = 1, .n_slot = p->trace.slots_max
    };

    return kvd_backend_open_beside(&p->be, &p->stream, &lim, err);
}

kvd_status engine_profile_open(engine_profile **out, kvd_session *s, uint32_t n_step, kvd_err *err)
{
    const model_hparams *hp    = model_get_hparams(s->model->net);
    const uint32_t       chunk = s->params.chunk_tokens;
    engine_profile      *p     = NULL;
    engine_trace        *t;
    kvd_status           st;

    *out = NULL;
    if (!s->sparse || n_step < 2)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "profile: at least 2 steps of a session with sparse attention");
    if (s->attention.params.evict == KVD_EVICT_BY_LOOKAHEAD)
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "profile: eviction by lookahead (evict) keeps no average of scores to compare "
            "with");
    if (s->attention.params.min_mass > 0.0f)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "profile: a least mass (min_mass) would change the budget within a text");
    p = kvd_calloc(1, sizeof(*p));
    if (!p)
        return kvd_fail(err, KVD_E_NOMEM, 0, "profile: no memory");
    p->s          = s;
    t             = &p->trace;
    t->n_lane     = hp->n_layer * hp->n_kv_head;
    t->n_step_max = n_step;
    t->budget_max =
        (uint32_t)kvd_div_up(engine_attention_budget(&s->attention, s->params.n_ctx), chunk);
    t->n_chunk_max      = (uint32_t)kvd_align_up(s->params.n_ctx, KV_BLOCK_TOKENS) / chunk;
    t->slots_max        = engine_profile_slots(t->budget_max, ENGINE_PROFILE_CAPS - 1);
    p->host.n_chunk_max = t->n_chunk_max;
    if (t->slots_max >= KVD_SLOT_NONE)
        st = kvd_fail(err, KVD_E_INVAL, 0, "profile: a budget of %u chunks, at most %u",
                      t->budget_max, (KVD_SLOT_NONE - 1) / LARGEST);
    else
        st = allocate(p, err);
    if (st == KVD_OK)
        st = open_backend(p, err);
    if (st == KVD_OK && !kv_set_tap(s->kv, on_lane, p))
        st = kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                      "profile: this session's steps stay on the device of backend \"%s\"",
                      s->model->be->ops->name);
    if (st != KVD_OK) {
        engine_profile_close(p);
        return st;
    }
    *out = p;
    return KVD_OK;
}

void engine_profile_close(engine_profile *p)
{
    if (!p)
        return;
    (void)kv_set_tap(p->s->kv, NULL, NULL);
    kvd_backend_close_beside(p->be, p->stream);
    arrays(p, true);
    kvd_free(p);
}

kvd_status engine_profile_end(engine_profile *p, kvd_err *err)
{
    engine_trace *t = &p->trace;

    if (p->failed) {
        *err = p->err;
        return p->err.code;
    }
    for (uint32_t lane = 0; lane < t->n_lane; lane++) {
        if (t->n_step[lane] < 2)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "profile: no sparse steps; the text is too short to be sealed");
        for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++)
            p->lane[lane].hit[ENGINE_PROFILE_OPTIMUM][c] +=
                engine_trace_optimum(t, lane, p->slots[c]);
        engine_trace_unions(t, lane, &p->lane[lane]);
        t->n_step[lane] = 0;
    }
    return KVD_OK;
}

const engine_lane_profile *engine_profile_lanes(const engine_profile *p)
{
    return p->lane;
}

uint32_t engine_profile_budget(const engine_profile *p)
{
    return p->slots[0];
}

uint32_t engine_profile_records(const engine_profile *p, uint32_t size)
{
    return engine_host_records(p->host.n_chunk_max, size);
}
