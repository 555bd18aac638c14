/* SPDX-License-Identifier: Apache-2.0 */
/* engine_profile.h - private to engine/: what engine_profile.c records of a text, what
 * engine_profile_trace.c works out from it when the text is over, and the host tiers of
 * engine_profile_host.c that follow it. */
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

/* Host tiers of every size under every cap's windows, all lanes. */
typedef struct engine_host_tiers {
    uint32_t  n_chunk_max;
    uint32_t *n_chunk; /* [lane] placed so far */
    uint16_t *held;    /* [lane][cap][n_chunk_max] bit i: the tier of size i has a record */
    uint64_t *rank;    /* scratch [n_chunk_max] */
    uint32_t *read;    /* scratch [n_chunk_max] */
} engine_host_tiers;

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
/* Records of a lane in a host tier. */
uint32_t engine_host_records(uint32_t n_chunk_max, uint32_t size);
/* Before a lane's first step: order has the n chunks that can be selected, best first. */
void engine_host_start(engine_host_tiers *h, uint32_t lane, uint32_t n_chunk, const uint32_t *order,
                       uint32_t n);
/* A step of a lane under one cap: the first n_urgent of n_miss chunks are waited for.  ema
 * [n_chunk] is as the window's change had it. */
void engine_host_step(engine_host_tiers *h, uint32_t lane, uint32_t cap, const uint16_t *ema,
                      uint32_t n_chunk, const uint32_t *chunk, uint32_t n_urgent, uint32_t n_miss,
                      engine_lane_profile *out);
/* After a step under every cap. */
void engine_host_end_step(engine_host_tiers *h, uint32_t lane, uint32_t n_chunk);
/* Adds the unions of recent selections to a lane's counts. */
void engine_trace_unions(engine_trace *t, uint32_t lane, engine_lane_profile *out);

#endif
