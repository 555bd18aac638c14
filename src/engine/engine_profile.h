/* SPDX-License-Identifier: Apache-2.0 */
/* engine_profile.h - private to engine/: what engine_profile.c records of a text and
 * engine_profile_trace.c works out from it when the text is over. */
#ifndef KVD_ENGINE_PROFILE_H
#define KVD_ENGINE_PROFILE_H

#include "engine/engine.h"

/* Of one text, all lanes; a lane is a (layer, KV head). */
typedef struct engine_trace {
    uint32_t  n_lane, n_step_max, budget_max, slots_max, n_chunk_max;
    uint32_t *n_step;  /* [lane] of them the first one refilled */
    uint32_t *n_chunk; /* [lane] at the last step */
    uint32_t *n_sel;   /* [lane][n_step_max] */
    uint32_t *sel;     /* [lane][n_step_max][budget_max] */
    uint32_t *n_start; /* [lane] */
    uint32_t *start;   /* [lane][slots_max] the first step's chunks, best first */

    /* scratch of one lane */
    uint32_t *next_use; /* [n_step_max][budget_max] step in which a selected chunk is so again */
    uint32_t *next;     /* [n_chunk_max] the same of a chunk, as of now; n_step: never */
    uint32_t *seen;     /* [n_chunk_max] last step that selected it, plus 1 */
    uint8_t  *held;     /* [n_chunk_max] */
    uint32_t *window;   /* [slots_max] */
    uint32_t *n_at;     /* [n_step_max + 1] chunks of the window by next use */
} engine_trace;

static inline const uint32_t *engine_trace_sel(const engine_trace *t, uint32_t lane, uint32_t step)
{
    return t->sel + ((uint64_t)lane * t->n_step_max + step) * t->budget_max;
}

/* Slots that a cap gives a lane. */
static inline uint32_t engine_profile_slots(uint32_t budget, uint32_t cap)
{
    return (uint32_t)((float)budget * engine_profile_cap[cap]);
}

/* Hits that the optimum would have had with a window of `slots`: what is needed last leaves. */
uint64_t engine_trace_optimum(engine_trace *t, uint32_t lane, uint32_t slots);
/* Adds the unions of recent selections to a lane's counts. */
void engine_trace_unions(engine_trace *t, uint32_t lane, engine_lane_profile *out);

#endif
