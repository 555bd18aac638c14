/* SPDX-License-Identifier: Apache-2.0 */
/* engine_profile_trace.c - what only a whole trace can tell: the optimum, which knows what comes,
 * and windows that are the union of the last selections.
 *
 * Pure but for the trace's scratch; nothing here allocates.  Thread: the profile's. */
#include <string.h>

#include "engine/engine_profile.h"

/* Fills next_use, and next as of the step before 1. */
static void look_ahead(engine_trace *t, uint32_t lane)
{
    const uint32_t n_step = t->n_step[lane];

    for (uint32_t c = 0; c < t->n_chunk[lane]; c++)
        t->next[c] = n_step;
    for (uint32_t step = n_step; step-- > 1;) {
        const uint32_t *sel = engine_trace_sel(t, lane, step);
        uint32_t       *use = t->next_use + (uint64_t)step * t->budget_max;

        for (uint32_t i = 0; i < t->n_sel[(uint64_t)lane * t->n_step_max + step]; i++) {
            use[i]          = t->next[sel[i]];
            t->next[sel[i]] = step;
        }
    }
}

/* Of the window [0, n) drops n_drop chunks that this step did not select, those used last. */
static uint32_t drop_latest(engine_trace *t, uint32_t lane, uint32_t step, uint32_t n,
                            uint32_t n_drop)
{
    const uint32_t n_step = t->n_step[lane];
    uint32_t       least = n_step, above = 0, kept = 0, equal;

    memset(t->n_at, 0, (n_step + 1) * sizeof(*t->n_at));
    for (uint32_t i = 0; i < n; i++) {
        if (t->seen[t->window[i]] != step + 1)
            t->n_at[t->next[t->window[i]]]++;
    }
    while (least > 0 && above + t->n_at[least] < n_drop)
        above += t->n_at[least--];
    equal = n_drop - above;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t c     = t->window[i];
        const bool     spare = t->seen[c] != step + 1;
        bool           drop  = spare && t->next[c] > least;

        if (spare && t->next[c] == least && equal > 0) {
            equal--;
            drop = true;
        }
        if (drop)
            t->held[c] = 0;
        else
            t->window[kept++] = c;
    }
    return kept;
}

/* One step: its hits; misses join the window. */
static uint64_t optimum_step(engine_trace *t, uint32_t lane, uint32_t step, uint32_t slots,
                             uint32_t *n)
{
    const uint32_t *sel   = engine_trace_sel(t, lane, step);
    const uint32_t *use   = t->next_use + (uint64_t)step * t->budget_max;
    const uint32_t  n_sel = t->n_sel[(uint64_t)lane * t->n_step_max + step];
    uint32_t        n_hit = 0, n_miss;

    for (uint32_t i = 0; i < n_sel; i++) {
        n_hit += t->held[sel[i]];
        t->next[sel[i]] = use[i];
        t->seen[sel[i]] = step + 1;
    }
    n_miss = n_sel - n_hit;
    if (*n + n_miss > slots)
        *n = drop_latest(t, lane, step, *n, *n + n_miss - slots);
    for (uint32_t i = 0; i < n_sel; i++) {
        if (!t->held[sel[i]]) {
            t->held[sel[i]]   = 1;
            t->window[(*n)++] = sel[i];
        }
    }
    return n_hit;
}

uint64_t engine_trace_optimum(engine_trace *t, uint32_t lane, uint32_t slots)
{
    const uint32_t *start = t->start + (uint64_t)lane * t->slots_max;
    uint32_t        n     = slots < t->n_start[lane] ? slots : t->n_start[lane];
    uint64_t        hits  = 0;

    look_ahead(t, lane);
    memset(t->seen, 0, t->n_chunk[lane] * sizeof(*t->seen));
    memset(t->held, 0, t->n_chunk[lane]);
    for (uint32_t i = 0; i < n; i++) {
        t->window[i]      = start[i];
        t->held[start[i]] = 1;
    }
    for (uint32_t step = 1; step < t->n_step[lane]; step++)
        hits += optimum_step(t, lane, step, slots, &n);
    return hits;
}

void engine_trace_unions(engine_trace *t, uint32_t lane, engine_lane_profile *out)
{
    memset(t->seen, 0, t->n_chunk[lane] * sizeof(*t->seen));
    for (uint32_t step = 0; step < t->n_step[lane]; step++) {
        const uint32_t *sel   = engine_trace_sel(t, lane, step);
        const uint32_t  n_sel = t->n_sel[(uint64_t)lane * t->n_step_max + step];

        for (uint32_t w = 0; w < ENGINE_PROFILE_UNIONS && step > 0; w++) {
            const uint32_t back  = engine_profile_union[w];
            const uint32_t first = step > back ? step - back : 0;

            for (uint32_t c = 0; c < t->n_chunk[lane]; c++)
                out->union_size[w] += t->seen[c] > first;
            for (uint32_t i = 0; i < n_sel; i++)
                out->union_hit[w] += t->seen[sel[i]] > first;
        }
        for (uint32_t i = 0; i < n_sel; i++)
            t->seen[sel[i]] = step + 1;
    }
}
