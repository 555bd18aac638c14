/* SPDX-License-Identifier: Apache-2.0 */
/* sparse_program.c - which stages a layer's sparse attention has, in which order, and what each
 * waits for.
 *
 * Order of work:
 *   sequential  all rows select, urgent misses are fetched, all rows attend.
 *   elastic     rows go in micro-batches (arXiv 2605.18071): each selects on the main stream, and
 *               its urgent misses are fetched on a stream of their own while the next ones select.
 *               Then all rows attend to their windows, and each micro-batch to its urgent misses.
 * A device-driven step with deferred fetch always fetches beside: with sequential order it has one
 * micro-batch.  Late misses start once the urgent ones have arrived, so the link serves those
 * first.
 *
 * Waits: every stage knows, per stream, up to which stage it is ordered behind.  A stage on stream
 * A that depends on stage W of stream B waits for W's event, unless it is ordered behind W already.
 * The host is a stream that others never wait for: a host stage has ended when the next is given
 * out. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <xxhash.h>

#include "sparse/sparse.h"

/* What the stages of a layer hand on to each other. */
enum {
    BUF_ARGS    = 1u << 0, /* lists that the host has written */
    BUF_KEPT    = 1u << 1, /* attention's partial result over the kept set */
    BUF_SEL     = 1u << 2, /* scores and selection */
    BUF_AVG     = 1u << 3, /* averages as the host sees them */
    BUF_CHANGE  = 1u << 4, /* what the window's change found */
    BUF_REQUEST = 1u << 5, /* requests for records on disk */
    BUF_UP      = 1u << 6, /* urgent misses in their slots */
    BUF_WINDOW  = 1u << 7, /* lists of the window's records */
    BUF_URGENT  = 1u << 8, /* lists of urgent misses' records */
    BUF_PART    = 1u << 9, /* attention's partial result over kept set and window */
    BUF_OUT     = 1u << 10,
    N_BUF       = 11
};

typedef struct stage_info {
    const char *name;
    uint16_t    reads, writes;
    uint16_t    after; /* written earlier: waited for, though not read */
    uint8_t     phase;
} stage_info;

static const stage_info info[SPARSE_N_KIND] = {
    [SPARSE_JOIN]        = { "join(disk)", 0, 0, 0, SPARSE_PHASE_SELECT },
    [SPARSE_LIST]        = { "list(rows)", 0, BUF_ARGS, 0, SPARSE_PHASE_SELECT },
    [SPARSE_SELECT]      = { "select(fused)", BUF_ARGS,
                             BUF_KEPT | BUF_SEL | BUF_CHANGE | BUF_WINDOW | BUF_URGENT, 0,
                             SPARSE_PHASE_SELECT },
    [SPARSE_ATTEND_KEPT] = { "attend(kept)", BUF_ARGS, BUF_KEPT, 0, SPARSE_PHASE_SELECT },
    [SPARSE_SCORE]       = { "score+pick", BUF_ARGS | BUF_KEPT, BUF_SEL, 0, SPARSE_PHASE_SELECT },
    [SPARSE_TAP]         = { "tap", BUF_SEL, 0, 0, SPARSE_PHASE_SELECT },
    [SPARSE_AVERAGES]    = { "copy(averages)", BUF_SEL, BUF_AVG, 0, SPARSE_PHASE_SELECT },
    [SPARSE_CHANGE] = { "change(window)", BUF_SEL | BUF_AVG, BUF_CHANGE, 0, SPARSE_PHASE_SELECT },
    [SPARSE_SETTLE] = { "settle(late)", BUF_SEL | BUF_CHANGE, BUF_CHANGE, 0, SPARSE_PHASE_SELECT },
    [SPARSE_COUNT]  = { "count", BUF_CHANGE, 0, 0, SPARSE_PHASE_SELECT },
    [SPARSE_POST]   = { "post(disk)", BUF_CHANGE, BUF_REQUEST, 0, SPARSE_PHASE_SELECT },
    [SPARSE_REUSE]  = { "reuse(late list)", 0, 0, 0, SPARSE_PHASE_FETCH_LATE },
    [SPARSE_FETCH_URGENT]  = { "fetch(urgent)", BUF_CHANGE | BUF_REQUEST, BUF_UP, 0,
                               SPARSE_PHASE_FETCH },
    [SPARSE_FETCH_LATE]    = { "fetch(late)", BUF_CHANGE | BUF_REQUEST, 0, BUF_UP,
                               SPARSE_PHASE_FETCH_LATE },
    [SPARSE_LIST_WINDOW]   = { "list(window)", BUF_CHANGE, BUF_WINDOW, 0, SPARSE_PHASE_ATTEND },
    [SPARSE_LIST_URGENT]   = { "list(urgent)", BUF_CHANGE, BUF_URGENT, 0, SPARSE_PHASE_ATTEND },
    [SPARSE_ATTEND]        = { "attend(window+urgent)", BUF_KEPT | BUF_WINDOW | BUF_URGENT | BUF_UP,
                               BUF_OUT, 0, SPARSE_PHASE_ATTEND },
    [SPARSE_ATTEND_WINDOW] = { "attend(window)", BUF_KEPT | BUF_WINDOW, BUF_PART, 0,
                               SPARSE_PHASE_ATTEND },
    [SPARSE_ATTEND_URGENT] = { "attend(urgent)", BUF_PART | BUF_URGENT | BUF_UP, BUF_OUT, 0,
                               SPARSE_PHASE_ATTEND },
    [SPARSE_ESTIMATE]      = { "estimate(cells)", BUF_CHANGE | BUF_OUT, BUF_OUT, 0,
                               SPARSE_PHASE_ATTEND },
    [SPARSE_SERVE]         = { "serve(disk)", 0, 0, 0, SPARSE_PHASE_NONE },
    [SPARSE_MARK_SELECT]   = { "mark(select)", 0, 0, 0, SPARSE_PHASE_NONE },
    [SPARSE_MARK_FETCH]    = { "mark(fetch)", 0, 0, 0, SPARSE_PHASE_NONE },
};

static const char *const stream_name[SPARSE_N_STREAM] = { "host", "main", "urgent", "late" };

const char *sparse_stage_name(sparse_kind kind)
{
    return info[kind].name;
}

sparse_phase sparse_stage_phase(sparse_kind kind)
{
    return (sparse_phase)info[kind].phase;
}

/* ---- what a stage waits for ------------------------------------------------------------ */

/* Stages are counted from 1 here; 0: none. */
typedef uint16_t stage_no;

typedef struct builder {
    sparse_program *p;
    stage_no        writer[N_BUF][KVD_MICRO_BATCHES_MAX];
    stage_no        last[SPARSE_N_STREAM];                         /* stage of a stream */
    stage_no        known[SPARSE_N_STREAM][SPARSE_N_STREAM];       /* [by whom][of which stream] */
    stage_no        clock[SPARSE_STAGES_MAX + 1][SPARSE_N_STREAM]; /* known when a stage ends */
} builder;

static void learn(stage_no *known, const stage_no *clock)
{
    for (uint32_t s = 0; s < SPARSE_N_STREAM; s++)
        known[s] = clock[s] > known[s] ? clock[s] : known[s];
}

/* Per stream, the last stage that wrote what a stage of this kind depends on. */
static void find_needs(const builder *b, const sparse_stage *g, stage_no *need)
{
    const uint32_t mask  = info[g->kind].reads | info[g->kind].after | info[g->kind].writes;
    const uint32_t first = g->part == SPARSE_ALL_ROWS ? 0 : g->part;
    const uint32_t end   = g->part == SPARSE_ALL_ROWS ? b->p->n_part : first + 1u;

    for (uint32_t i = 0; i < N_BUF; i++) {
        for (uint32_t k = first; mask >> i & 1u && k < end; k++) {
            const stage_no w = b->writer[i][k];

            if (w != 0) {
                stage_no *n = &need[b->p->stage[w - 1].stream];

                *n = w > *n ? w : *n;
            }
        }
    }
}

/* Whether what is needed of stream s is known once what is needed of another stream is. */
static bool is_implied(const builder *b, const stage_no *need, uint32_t s)
{
    for (uint32_t t = SPARSE_MAIN; t < SPARSE_N_STREAM; t++) {
        if (t != s && need[t] != 0 && b->clock[need[t]][s] >= need[s])
            return true;
    }
    return false;
}

/* The host waits for a whole stream where that is no more than the stage: one call, and no event.
 */
static sparse_wait wait_for(builder *b, const sparse_stage *g, stage_no w)
{
    sparse_stage *of    = &b->p->stage[w - 1];
    const bool    whole = g->stream == SPARSE_HOST && b->p->n_part == 1 && b->last[of->stream] == w;

    if (!whole && of->event == SPARSE_NO_EVENT) {
        kvd_assert(b->p->n_event < SPARSE_EVENTS(b->p->n_part));
        of->event = (uint16_t)b->p->n_event++;
    }
    return (sparse_wait){ .stage = (uint16_t)(w - 1),
                          .event = whole ? SPARSE_NO_EVENT : of->event };
}

static void add_waits(builder *b, sparse_stage *g)
{
    stage_no  need[SPARSE_N_STREAM] = { 0 };
    stage_no *known                 = b->known[g->stream];

    if (b->p->desc.unified)
        return;
    learn(known, b->known[SPARSE_HOST]); /* it is given out after all that the host waited for */
    find_needs(b, g, need);
    need[SPARSE_HOST] = 0;
    for (uint32_t s = SPARSE_MAIN; s < SPARSE_N_STREAM; s++) {
        if (s == g->stream || need[s] <= known[s])
            need[s] = 0;
    }
    for (uint32_t s = SPARSE_MAIN; s < SPARSE_N_STREAM; s++) {
        if (need[s] != 0 && !is_implied(b, need, s))
            g->wait[g->n_wait++] = wait_for(b, g, need[s]);
    }
    for (uint32_t s = SPARSE_MAIN; s < SPARSE_N_STREAM; s++) {
        if (need[s] != 0)
            learn(known, b->clock[need[s]]);
    }
}

static void add(builder *b, sparse_kind kind, sparse_stream stream, uint32_t part)
{
    sparse_program *p = b->p;
    sparse_stage   *g = &p->stage[p->n_stage];
    const stage_no  n = (stage_no)(p->n_stage + 1);

    kvd_assert(p->n_stage < SPARSE_STAGES_MAX);
    *g = (sparse_stage){ .kind   = (uint8_t)kind,
                         .stream = (uint8_t)stream,
                         .part   = (uint8_t)part,
                         .event  = SPARSE_NO_EVENT };
    add_waits(b, g);
    for (uint32_t i = 0; i < N_BUF; i++) {
        for (uint32_t k = 0; info[kind].writes >> i & 1u && k < p->n_part; k++) {
            if (part == SPARSE_ALL_ROWS || k == part)
                b->writer[i][k] = n;
        }
    }
    b->last[stream]          = n;
    b->known[stream][stream] = n;
    memcpy(b->clock[n], b->known[stream], sizeof(b->clock[n]));
    p->n_stage++;
}

static void add_all(builder *b, sparse_kind kind, sparse_stream stream)
{
    add(b, kind, stream, SPARSE_ALL_ROWS);
}

static uint32_t part_of(const builder *b, uint32_t i)
{
    return b->p->n_part == 1 ? SPARSE_ALL_ROWS : i;
}

/* ---- steps that the device drives ------------------------------------------------------ */

/* Whether urgent misses are fetched on a stream of their own. */
static bool fetches_beside(const sparse_step_desc *d)
{
    return !d->marks && !d->disk && (d->elastic || (!d->strict && !d->resident));
}

/* Urgent records from disk take longer than the window's attention, so that goes first. */
static void add_device_disk(builder *b, bool fetches)
{
    add_all(b, SPARSE_ATTEND_WINDOW, SPARSE_MAIN);
    if (fetches)
        add_all(b, SPARSE_FETCH_URGENT, SPARSE_MAIN);
    add_all(b, SPARSE_ATTEND_URGENT, SPARSE_MAIN);
    add_all(b, SPARSE_SERVE, SPARSE_HOST);
}

static void build_device(builder *b)
{
    const sparse_step_desc *d       = &b->p->desc;
    const bool              fetches = !d->resident && !d->no_fetch;
    const bool              beside  = fetches_beside(d);

    for (uint32_t i = 0; i < b->p->n_part; i++) {
        add(b, SPARSE_SELECT, SPARSE_MAIN, part_of(b, i));
        if (d->disk && fetches)
            add(b, SPARSE_POST, SPARSE_MAIN, part_of(b, i));
        if (beside && fetches)
            add(b, SPARSE_FETCH_URGENT, SPARSE_URGENT, part_of(b, i));
    }
    if (fetches && !d->strict && !d->marks)
        add_all(b, SPARSE_FETCH_LATE, SPARSE_LATE);
    if (d->marks)
        add_all(b, SPARSE_MARK_SELECT, SPARSE_MAIN);
    if (fetches && !beside && !d->disk)
        add_all(b, SPARSE_FETCH_URGENT, SPARSE_MAIN);
    if (fetches && d->marks)
        add_all(b, SPARSE_FETCH_LATE, SPARSE_MAIN);
    if (d->marks)
        add_all(b, SPARSE_MARK_FETCH, SPARSE_MAIN);
    if (d->disk) {
        add_device_disk(b, fetches);
        return;
    }
    if (!beside) {
        add_all(b, SPARSE_ATTEND, SPARSE_MAIN);
        return;
    }
    add_all(b, SPARSE_ATTEND_WINDOW, SPARSE_MAIN);
    for (uint32_t i = 0; i < b->p->n_part; i++)
        add(b, SPARSE_ATTEND_URGENT, SPARSE_MAIN, part_of(b, i));
}

/* ---- steps that the host drives -------------------------------------------------------- */

/* Whether fetches have streams of their own: where memory is not one and the host changes windows,
 * it knows misses as early as the device could. */
static bool host_has_streams(const sparse_step_desc *d)
{
    return d->host_window && !d->unified && !d->estimate && !d->tap && !d->marks;
}

static void add_host_change(builder *b, sparse_stream urgent)
{
    const sparse_step_desc *d = &b->p->desc;

    for (uint32_t i = 0; i < b->p->n_part; i++) {
        add(b, SPARSE_CHANGE, d->host_window ? SPARSE_HOST : SPARSE_MAIN, part_of(b, i));
        if (d->disk)
            add(b, SPARSE_SETTLE, SPARSE_HOST, part_of(b, i));
        add(b, SPARSE_COUNT, SPARSE_HOST, part_of(b, i));
        if (d->marks)
            add_all(b, SPARSE_MARK_SELECT, SPARSE_MAIN);
        if (!d->resident && !d->no_fetch)
            add(b, SPARSE_FETCH_URGENT, urgent, part_of(b, i));
    }
}

static void build_host(builder *b)
{
    const sparse_step_desc *d       = &b->p->desc;
    const bool              streams = host_has_streams(d);
    const bool              late    = !d->resident && !d->no_fetch && (d->disk || !d->strict);

    if (d->disk)
        add_all(b, SPARSE_JOIN, SPARSE_HOST);
    add_all(b, SPARSE_LIST, SPARSE_HOST);
    for (uint32_t i = 0; i < b->p->n_part; i++) {
        add(b, SPARSE_ATTEND_KEPT, SPARSE_MAIN, part_of(b, i));
        add(b, SPARSE_SCORE, SPARSE_MAIN, part_of(b, i));
        if (d->host_window && !d->unified && d->averages)
            add(b, SPARSE_AVERAGES, SPARSE_MAIN, part_of(b, i));
    }
    if (d->tap)
        add_all(b, SPARSE_TAP, SPARSE_HOST);
    add_host_change(b, streams && d->elastic ? SPARSE_URGENT : SPARSE_MAIN);
    if (late && streams) {
        add_all(b, SPARSE_REUSE, SPARSE_HOST);
        add_all(b, SPARSE_FETCH_LATE, SPARSE_LATE);
    }
    if (late && !streams && d->marks)
        add_all(b, SPARSE_FETCH_LATE, SPARSE_MAIN);
    if (d->marks)
        add_all(b, SPARSE_MARK_FETCH, SPARSE_MAIN);
    add_all(b, SPARSE_LIST_WINDOW, SPARSE_HOST);
    add_all(b, SPARSE_ATTEND_WINDOW, SPARSE_MAIN);
    add_all(b, SPARSE_LIST_URGENT, SPARSE_HOST);
    for (uint32_t i = 0; i < b->p->n_part; i++)
        add(b, SPARSE_ATTEND_URGENT, SPARSE_MAIN, part_of(b, i));
    if (d->estimate)
        add_all(b, SPARSE_ESTIMATE, SPARSE_MAIN);
    if (late && !streams && !d->marks)
        add_all(b, SPARSE_FETCH_LATE, SPARSE_MAIN);
}

/* ---- programs -------------------------------------------------------------------------- */

/* Micro-batches only where something can be overlapped. */
static uint32_t count_parts(const sparse_step_desc *d)
{
    const bool cut = d->elastic && !d->marks && d->micro_rows < d->n_row &&
                     (d->device_driven ? !d->disk : host_has_streams(d));

    return cut ? (uint32_t)kvd_div_up(d->n_row, d->micro_rows) : 1;
}

void sparse_program_build(sparse_program *p, const sparse_step_desc *d)
{
    builder b = { .p = p };

    kvd_assert(d->n_row > 0 && d->micro_rows > 0);
    kvd_assert(!d->device_driven || (!d->tap && !d->estimate && !d->host_window));
    memset(p, 0, sizeof(*p));
    p->desc   = *d;
    p->n_part = count_parts(d);
    kvd_assert(p->n_part <= KVD_MICRO_BATCHES_MAX);
    if (d->device_driven)
        build_device(&b);
    else
        build_host(&b);
    p->hash = XXH3_64bits(p->stage, p->n_stage * sizeof(*p->stage)) ^
              XXH3_64bits(&p->desc, sizeof(p->desc));
}

void sparse_stage_rows(const sparse_program *p, uint32_t i, uint32_t *first, uint32_t *n)
{
    const uint32_t part = p->stage[i].part;

    *first = part == SPARSE_ALL_ROWS ? 0 : part * p->desc.micro_rows;
    *n     = part == SPARSE_ALL_ROWS
                 ? p->desc.n_row
                 : (uint32_t)kvd_min_u64(p->desc.micro_rows, p->desc.n_row - *first);
}

/* ---- for people ------------------------------------------------------------------------ */

static void print_waits(const sparse_stage *g, kvd_buf *out)
{
    if (g->n_wait == 0)
        kvd_buf_printf(out, "-");
    for (uint32_t i = 0; i < g->n_wait; i++)
        kvd_buf_printf(out, "%s%u", i > 0 ? ", " : "", g->wait[i].stage + 1u);
}

void sparse_program_print(const sparse_program *p, const uint64_t *bytes, kvd_buf *out)
{
    const sparse_step_desc *d = &p->desc;

    kvd_buf_printf(out, "%s-driven, %u row%s in %u micro-batch%s; hash %016" PRIx64 "\n",
                   d->device_driven ? "device" : "host", d->n_row, d->n_row == 1 ? "" : "s",
                   p->n_part, p->n_part == 1 ? "" : "es", p->hash);
    kvd_buf_printf(out, "%4s  %-22s %-9s %-7s %s\n", "", "stage", "rows", "stream",
                   bytes ? "waits for  at most" : "waits for");
    for (uint32_t i = 0; i < p->n_stage; i++) {
        const sparse_stage *g = &p->stage[i];
        char                rows[24];
        kvd_buf             waits = { 0 };
        uint32_t            first, n;

        sparse_stage_rows(p, i, &first, &n);
        (void)snprintf(rows, sizeof(rows), n == 1 ? "%u" : "%u-%u", first, first + n - 1);
        print_waits(g, &waits);
        kvd_buf_printf(out, "%4u  %-22s %-9s %-7s %s", i + 1, info[g->kind].name, rows,
                       stream_name[g->stream], waits.data ? waits.data : "");
        if (bytes && bytes[g->kind])
            kvd_buf_printf(out, "%*s %.1f KiB", waits.len < 10 ? (int)(10 - waits.len) : 0, "",
                           (double)bytes[g->kind] / 1024.0 * (double)n / (double)d->n_row);
        kvd_buf_printf(out, "\n");
        kvd_buf_free(&waits);
    }
}
