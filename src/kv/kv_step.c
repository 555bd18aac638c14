/* SPDX-License-Identifier: Apache-2.0 */
/* kv_step.c - a sparse decode step from its beginning to its end: which step program it follows,
 * and what goes before the first layer and after the last.
 *
 *   begin   the program for this many rows; windows that a refill starts from are emptied.  Where
 *           the device drives, all that its ops read in any layer is written now.
 *   layers  kv_attend_sparse() runs the program once a layer (sparse_run.c, kv_stages.c).
 *   end     what the device found is counted, sequences move on by a step.
 *
 * A victim's slot may be written in the step in which it leaves, so it is not read in that step.
 * Everything resident: the same window and the same order, only that records are read in place.
 *
 * Owns: the streams and events beside the main stream, and with --lookup host a CPU backend whose
 * window op changes the windows.  Nothing allocates after open.
 * Thread: the session's. */
#include <string.h>

#include <xxhash.h>

#include "kv/kv_cache.h"

/* ---- open and close ------------------------------------------------------------------ */

/* The CPU that changes windows where the host does and cannot read the device's maps. */
static kvd_status open_cpu(kv_store *s, kvd_err *err)
{
    const kvd_backend_limits lim = { .n_token   = 1,
                                     .n_seq     = s->params.n_seq,
                                     .n_kv_head = s->params.n_kv_head,
                                     .n_slot    = s->slots_max };

    if (!s->params.host_lookup || s->be->unified || s->slots_max == 0)
        return KVD_OK;
    return kvd_backend_open_beside(&s->exec.cpu, &s->exec.cpu_stream, &lim, err);
}

kvd_status kv_exec_open(kv_store *s, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;
    const uint32_t         parts =
        s->params.n_seq < KVD_MICRO_BATCHES_MAX ? s->params.n_seq : KVD_MICRO_BATCHES_MAX;
    kv_exec *x = &s->exec;

    x->machine.ops   = ops;
    x->machine.event = x->event;
    KVD_TRY(open_cpu(s, err));
    if ((!s->params.device_steps && !s->params.host_lookup) || s->slots_max == 0)
        return KVD_OK;
    for (uint32_t i = 0; !s->be->unified && i < SPARSE_EVENTS(parts); i++)
        KVD_TRY(ops->event_open(s->be, &x->event[i], err));
    if (s->sizes.resident)
        return KVD_OK;
    KVD_TRY(ops->stream_open(s->be, &x->machine.stream[SPARSE_LATE], err));
    KVD_TRY(ops->stream_open(s->be, &x->machine.stream[SPARSE_URGENT], err));
    return ops->event_open(s->be, &x->joined, err);
}

void kv_exec_close(kv_store *s)
{
    const kvd_backend_ops *ops = s->be->ops;
    kv_exec               *x   = &s->exec;

    ops->stream_close(x->machine.stream[SPARSE_LATE]);
    ops->stream_close(x->machine.stream[SPARSE_URGENT]);
    for (uint32_t i = 0; i < SPARSE_EVENTS_MAX && x->event[i]; i++)
        ops->event_close(x->event[i]);
    if (x->joined)
        ops->event_close(x->joined);
    kvd_backend_close_beside(x->cpu, x->cpu_stream);
}

void kv_set_schedule(kv_store *s, const kv_schedule *p)
{
    s->exec.schedule = *p;
}

bool kv_micro_batch_fits(uint32_t n_row, uint32_t rows)
{
    return kvd_div_up(n_row, rows) <= KVD_MICRO_BATCHES_MAX;
}

void kv_set_measure(kv_store *s, const kv_measure *m)
{
    s->exec.measure = *m;
}

/* ---- admission ---------------------------------------------------------------------- */

void kv_set_policy(kv_store *s, const kv_policy *p)
{
    s->policy = *p;
}

void kv_seq_admit(kv_store *s, uint32_t seq, uint32_t budget, float cap)
{
    const uint64_t chunks = kvd_div_up(budget, s->params.chunk_tokens);
    uint64_t       least = chunks, n_slot = 0;

    kvd_assert(seq < s->params.n_seq && (budget == 0 || (s->params.sparse && cap >= 1.0f)));
    for (uint32_t i = 0; i < s->params.n_layer * s->params.n_kv_head; i++) {
        const double   c     = (double)(s->policy.caps ? s->policy.caps[i] : cap);
        const uint64_t slots = kvd_min_u64((uint64_t)((double)chunks * c), s->lane_slots[i]);

        s->cap[kv_lane(s, seq, 0) + i] = (uint32_t)slots;
        least                          = kvd_min_u64(least, slots);
        n_slot += slots;
    }
    s->seq[seq].n_slot = n_slot;
    s->seq[seq].budget = (uint32_t)least;
    s->seq[seq].step   = 0;
    s->seq[seq].mass   = 0.0;
    s->seq[seq].n_mass = 0;
    kv_tier_settle(s);
}

uint32_t kv_lane_window(const kv_store *s, uint32_t layer, uint32_t kv_head)
{
    return s->lane_slots[(uint64_t)layer * s->params.n_kv_head + kv_head] * s->params.chunk_tokens;
}

bool kv_seq_take_mass(kv_store *s, uint32_t seq, uint32_t n_step, double *mean)
{
    kv_seq        *q     = &s->seq[seq];
    const uint64_t lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;

    if (q->n_mass < n_step * lanes)
        return false;
    *mean     = q->mass / (double)q->n_mass;
    q->mass   = 0.0;
    q->n_mass = 0;
    return true;
}

bool kv_seq_sparse(const kv_store *s, uint32_t seq)
{
    const kv_seq *q = &s->seq[seq];

    return q->budget > 0 && q->n_sealed > s->params.n_sink;
}

void kv_seq_restart(kv_store *s, uint32_t seq)
{
    kv_tier_settle(s);
    s->seq[seq].step = 0;
}

/* ---- the program --------------------------------------------------------------------- */

static uint32_t micro_rows(const kv_schedule *p, uint32_t n_row)
{
    const uint32_t least = (uint32_t)kvd_div_up(n_row, KVD_MICRO_BATCHES_MAX);

    if (p->micro_batch == 0 || p->micro_batch > n_row)
        return n_row;
    return p->micro_batch < least ? least : p->micro_batch;
}

/* Of a step that nobody observes or measures. */
static sparse_step_desc describe(const kv_params *p, const kv_sizes *z, const kv_policy *policy,
                                 const kv_schedule *schedule, uint32_t n_row)
{
    const bool estimate = policy->zone && p->zone_tokens > 0;
    const bool serves   = !z->spills || p->apart; /* records on disk, to ops that ask for them */

    return (sparse_step_desc){ .n_row         = n_row,
                               .micro_rows    = micro_rows(schedule, n_row),
                               .device_driven = p->device_steps && serves && !estimate,
                               .unified       = !p->apart,
                               .host_window   = p->host_lookup,
                               .resident      = z->resident,
                               .disk          = z->spills,
                               .strict        = policy->strict,
                               .elastic       = schedule->elastic,
                               .averages      = policy->evict == KVD_EVICT_EMA,
                               .estimate      = estimate };
}

/* Where ops of the step read what the host has written, and leave what it reads. */
static void point_lists(kv_store *s, bool device_driven)
{
    const kvd_mem *args = &s->region[KV_ARGS], *found = &s->region[KV_FOUND];
    const kvd_mem *a = &s->mirror[KV_ARGS], *f = &s->mirror[KV_FOUND];

    s->step.seq_stride  = device_driven ? s->params.n_seq : 0;
    s->step.args_shift  = device_driven && a->ptr ? (uint8_t *)a->ptr - (uint8_t *)args->ptr : 0;
    s->step.found_shift = device_driven && f->ptr ? (uint8_t *)f->ptr - (uint8_t *)found->ptr : 0;
}

static void set_program(kv_store *s, uint32_t n_row)
{
    kv_exec         *x = &s->exec;
    sparse_step_desc d = describe(&s->params, &s->sizes, &s->policy, &x->schedule, n_row);

    d.tap      = s->tap != NULL;
    d.marks    = x->measure.mark != NULL;
    d.no_fetch = x->measure.no_fetch;
    d.device_driven &= !d.tap;
    if (memcmp(&d, &x->program.desc, sizeof(d)) == 0)
        return;
    sparse_program_build(&x->program, &d);
    kv_stages_of(&x->program, x->stage);
    point_lists(s, d.device_driven);
}

/* What a stage of all rows moves at most, by kind: with sequences of n_ctx tokens, and windows that
 * are filled anew. */
static void stage_bytes(const kv_params *p, const kv_sizes *z, uint32_t n_row, uint64_t *bytes)
{
    const uint64_t lanes  = (uint64_t)n_row * p->n_kv_head;
    const uint64_t token  = z->bytes_per_token / ((uint64_t)p->n_layer * p->n_kv_head);
    const uint64_t kept   = lanes * token * (p->n_sink + p->n_local + KV_BLOCK_TOKENS);
    const uint64_t index  = lanes * kv_blocks_for(p->n_ctx) * kvd_index_lane_bytes(&p->index);
    const uint64_t window = lanes * token * p->window_tokens;

    bytes[SPARSE_ATTEND_KEPT] = kept;
    bytes[SPARSE_SCORE]       = index;
    bytes[SPARSE_SELECT]      = kept + index;
    bytes[SPARSE_FETCH_LATE] = bytes[SPARSE_FETCH_URGENT] = window;
    bytes[SPARSE_ATTEND_WINDOW] = bytes[SPARSE_ATTEND_URGENT] = bytes[SPARSE_ATTEND] = window;
}

void kv_print_steps(const kv_params *p, const kv_sizes *z, const kv_policy *policy,
                    const kv_schedule *schedule, uint32_t n_row, kvd_buf *out)
{
    const sparse_step_desc d                    = describe(p, z, policy, schedule, n_row);
    uint64_t               bytes[SPARSE_N_KIND] = { 0 };
    sparse_program         program;

    sparse_program_build(&program, &d);
    stage_bytes(p, z, n_row, bytes);
    sparse_program_print(&program, bytes, out);
}

uint64_t kv_step_hash(const kv_store *s)
{
    const struct {
        uint64_t program, index;
        float    alpha, top_p;
        uint32_t evict, rule, selected, pad;
    } all = { s->exec.program.hash,      XXH3_64bits(&s->index, sizeof(s->index)),
              s->policy.alpha,           s->policy.top_p,
              (uint32_t)s->policy.evict, (uint32_t)s->policy.rule,
              s->policy.selected,        0 };

    return s->step.n_row == 0 ? 0 : XXH3_64bits(&all, sizeof(all));
}

/* ---- a layer ------------------------------------------------------------------------- */

typedef struct kv_layer_run {
    kv_store       *s;
    const kv_query *q;
} kv_layer_run;

static const kvd_trace_kind trace_of[SPARSE_N_PHASE] = {
    [SPARSE_PHASE_SELECT]     = KVD_TRACE_SELECT,
    [SPARSE_PHASE_FETCH]      = KVD_TRACE_FETCH,
    [SPARSE_PHASE_ATTEND]     = KVD_TRACE_ATTEND,
    [SPARSE_PHASE_FETCH_LATE] = KVD_TRACE_FETCH_LATE,
};

static kv_query rows_of(const kv_query *q, uint32_t first, uint32_t n)
{
    kv_query part = *q;

    part.first = first;
    part.seq += first;
    part.row += first;
    part.n_row = n;
    return part;
}

static uint32_t track_of(const kv_store *s, const kvd_stream *st)
{
    if (st == s->exec.machine.stream[SPARSE_LATE])
        return KVD_TRACE_LATE;
    return st == s->exec.machine.stream[SPARSE_URGENT] ? KVD_TRACE_URGENT : KVD_TRACE_MAIN;
}

static kvd_status run_stage(void *ctx, sparse_kind kind, kvd_stream *st, uint32_t first, uint32_t n,
                            kvd_err *err)
{
    const kv_layer_run *l      = ctx;
    const sparse_phase  phase  = sparse_stage_phase(kind);
    const kv_query      part   = rows_of(l->q, first, n);
    kvd_stamps         *stamps = phase == SPARSE_PHASE_NONE ? NULL : l->s->params.stamps;
    uint32_t            span;

    KVD_TRY(kvd_stamp_begin(stamps, st, trace_of[phase], track_of(l->s, st), part.layer, n, &span,
                            err));
    KVD_TRY(l->s->exec.stage[kind](l->s, st, &part, err));
    return kvd_stamp_end(stamps, st, span, err);
}

static void spent(void *ctx, sparse_phase phase, uint64_t t0, uint64_t t1)
{
    const kv_layer_run *l                  = ctx;
    kv_counts          *c                  = &l->s->counts;
    uint64_t           *ns[SPARSE_N_PHASE] = { [SPARSE_PHASE_SELECT]     = &c->select_ns,
                                               [SPARSE_PHASE_FETCH]      = &c->fetch_ns,
                                               [SPARSE_PHASE_ATTEND]     = &c->attend_ns,
                                               [SPARSE_PHASE_FETCH_LATE] = &c->fetch_ns };

    if (phase == SPARSE_PHASE_NONE)
        return;
    *ns[phase] += t1 - t0;
    kvd_trace_add(l->s->params.trace, trace_of[phase], t0, t1, l->q->layer, l->q->n_row);
}

kvd_status kv_attend_sparse(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err)
{
    kv_layer_run    l = { .s = s, .q = q };
    sparse_machine *m = &s->exec.machine;

    kvd_assert(q->first == 0 && q->n_row == s->exec.program.desc.n_row);
    m->stream[SPARSE_MAIN] = st;
    m->run                 = run_stage;
    m->spent               = s->exec.program.desc.device_driven ? NULL : spent;
    m->ctx                 = &l;
    return sparse_program_run(&s->exec.program, m, err);
}

/* ---- before the layers ---------------------------------------------------------------- */

/* Forgets windows and averages of all layers: what a refill starts from. */
kvd_status kv_clear_windows(kv_store *s, kvd_stream *st, uint32_t seq, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;
    const kvd_mem         *map = &s->region[KV_MAP], *work = &s->region[KV_WORK];
    const uint64_t         lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;
    const uint64_t         pitch = s->n_chunk_max * sizeof(*s->ema);
    const uint64_t         lane  = kv_lane(s, seq, 0);
    /* on the host what is sealed later is cleared then; see kv_map_block() */
    const uint64_t width = s->mirror[KV_ARGS].ptr
                               ? pitch
                               : s->seq[seq].n_sealed / s->params.chunk_tokens * sizeof(*s->ema);
    const uint8_t *base  = map->ptr;

    KVD_TRY(ops->fill(
        st, *work, (uint64_t)((uint8_t *)(s->ema + lane * s->n_chunk_max) - (uint8_t *)work->ptr),
        pitch, s->exec.cpu ? pitch : width, lanes, 0, err));
    KVD_TRY(ops->fill(st, *map, (uint64_t)((uint8_t *)(s->slot_of + lane * s->n_chunk_max) - base),
                      pitch, width, lanes, 0xff, err));
    return ops->fill(st, *map, (uint64_t)((uint8_t *)(s->chunk_of + lane * s->slots_max) - base), 0,
                     lanes * s->slots_max * sizeof(*s->chunk_of), 1, 0xff, err);
}

kvd_status kv_step_begin(kv_store *s, kvd_stream *st, const uint32_t *seq, const uint32_t *row,
                         uint32_t n_row, kvd_err *err)
{
    s->exec.machine.used = 0;
    s->step.n_row        = n_row;
    s->step.rows_seq     = seq;
    if (n_row == 0)
        return KVD_OK;
    set_program(s, n_row);
    if (kv_step_device_driven(s))
        KVD_TRY(kv_serve_begin(s, st, err));
    for (uint32_t i = 0; i < n_row; i++) {
        if (kv_refills(&s->seq[seq[i]]))
            KVD_TRY(kv_clear_windows(s, st, seq[i], err));
        if (kv_step_device_driven(s))
            kv_list_all_layers(s, i, seq[i], row[i]);
        s->counts.n_step++;
    }
    return KVD_OK;
}

kvd_status kv_step_upload(kv_store *s, kvd_stream *st, kvd_err *err)
{
    const kvd_mem *host = &s->region[KV_ARGS], *dev = &s->mirror[KV_ARGS];

    return dev->ptr ? s->be->ops->copy(st, *dev, 0, *host, 0, host->bytes, err) : KVD_OK;
}

bool kv_step_device_driven(const kv_store *s)
{
    return s->step.n_row > 0 && s->exec.program.desc.device_driven;
}

void kv_step_recording(kv_store *s, bool on)
{
    s->step.recording = on;
}

/* ---- after them ----------------------------------------------------------------------- */

/* Has the main stream go on behind all that was given to another. */
static kvd_status join_stream(kv_store *s, sparse_stream which, kvd_stream *st, kvd_err *err)
{
    const sparse_machine *m = &s->exec.machine;

    if (!(m->used >> which & 1u) || s->be->unified)
        return KVD_OK;
    KVD_TRY(s->be->ops->event_record(s->exec.joined, m->stream[which], err));
    return s->be->ops->event_wait(s->exec.joined, st, err);
}

kvd_status kv_step_join(kv_store *s, kvd_stream *st, kvd_err *err)
{
    const kvd_mem *host = &s->region[KV_FOUND], *dev = &s->mirror[KV_FOUND];

    KVD_TRY(join_stream(s, SPARSE_LATE, st, err));
    KVD_TRY(join_stream(s, SPARSE_URGENT, st, err));
    return kv_step_device_driven(s) && dev->ptr
               ? s->be->ops->copy(st, *host, 0, *dev, 0, host->bytes, err)
               : KVD_OK;
}

kvd_status kv_step_wait(kv_store *s, kvd_stream *st, kvd_err *err)
{
    const kvd_backend_ops *ops = s->be->ops;

    if (!kv_step_device_driven(s) || !s->tier)
        return ops->stream_sync(st, err);
    KVD_TRY(ops->event_record(s->exec.joined, st, err));
    while (ops->event_poll(s->exec.joined, NULL) == KVD_E_BUSY)
        kv_serve_poll(s);
    return ops->stream_sync(st, err);
}

kvd_status kv_wait_streams(kv_store *s, kvd_stream *st, kvd_err *err)
{
    const sparse_machine *m = &s->exec.machine;

    for (uint32_t i = SPARSE_URGENT; i < SPARSE_N_STREAM && !kv_step_device_driven(s); i++) {
        if (m->used >> i & 1u)
            KVD_TRY(s->be->ops->stream_sync(m->stream[i], err));
    }
    return kv_step_wait(s, st, err);
}

kvd_status kv_step_end(kv_store *s, kvd_err *err)
{
    if (kv_step_device_driven(s)) {
        KVD_TRY(kv_serve_end(s, err));
        kv_count_step(s);
    }
    for (uint32_t i = 0; i < s->step.n_row; i++)
        s->seq[s->step.rows_seq[i]].step++;
    s->step.n_row = 0;
    return KVD_OK;
}

void kv_step_abort(kv_store *s, kvd_stream *st)
{
    kvd_err err = { 0 };

    kv_serve_give_up(s);
    (void)!kv_step_join(s, st, &err);
    (void)!s->be->ops->stream_sync(st, &err);
    (void)!kv_serve_end(s, &err);
    s->step.n_row = 0;
}
