/* SPDX-License-Identifier: Apache-2.0 */
/* cli_profile.h - private to cli_profile*.c: a profile's numbers and the files made of them. */
#ifndef KVD_CLI_PROFILE_H
#define KVD_CLI_PROFILE_H

#include "cli.h"
#include "engine/engine.h"
#include "plan/plan.h"

typedef struct profile_result {
    const kvd_opts            *o;
    const char                *model; /* file's name */
    const engine_lane_profile *lane;  /* [n_layer][n_kv_head] */
    uint32_t                   n_layer, n_kv_head;
    uint32_t                   length, n_text;
    uint64_t                   n_step;       /* counted steps, of all texts */
    uint32_t                   budget;       /* chunks */
    uint32_t                   chunk_tokens; /* of a chunk */
    uint64_t                   record_bytes;
    uint32_t                   policy; /* of the session, a kvd_evict */
} profile_result;

extern const char *const profile_policy_names[ENGINE_PROFILE_POLICIES];

/* Slots of a lane's window. */
uint32_t profile_slots(const profile_result *r, uint32_t cap);
/* Every count of every lane as rows, behind comment lines that say what was run. */
void profile_write_csv(const profile_result *r, kvd_buf *out);
/* Hit rate by layer and KV head, for the window nearest to --cap: a gnuplot program with its data
 * in path.gp, and what gnuplot makes of it, if it is there, in path (SVG, or PNG by its name). */
kvd_status profile_draw(const profile_result *r, const char *path, kvd_err *err);
/* Index of the profiled cap nearest to a wish. */
uint32_t profile_nearest_cap(double wish);

#endif
