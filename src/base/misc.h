/* SPDX-License-Identifier: Apache-2.0 */
/* misc.h - clock, log, random numbers, the depth of JSON: small services every directory needs. */
#ifndef KVD_BASE_MISC_H
#define KVD_BASE_MISC_H

#include "base/status.h"

/* Monotonic nanoseconds. */
uint64_t kvd_now_ns(void);

/* The clock for limits of time: nanoseconds in which the process ran.  While the process is stopped
 * (SIGSTOP, a paused container) it stands still: of the time between two looks, by whichever
 * threads, at most KVD_RAN_LOOK_NS counts.  Who waits by it wakes at least every KVD_RAN_WAIT_NS.
 * Never 0.  Any thread. */
#define KVD_RAN_LOOK_NS 500000000u
#define KVD_RAN_WAIT_NS 250000000u
uint64_t kvd_ran_ns(void);
/* The clock's rule: what it says of the system's clock `now_ns`, and keeps in c. */
typedef struct kvd_ran_clock {
    uint64_t ran_ns, seen_ns; /* zeroed at first */
} kvd_ran_clock;
uint64_t kvd_ran_look(kvd_ran_clock *c, uint64_t now_ns);

/* Formats and hands one line to the function of kvd_set_log().  Any thread. */
void kvd_log(kvd_log_level level, const char *fmt, ...) KVD_PRINTF(2, 3);

/* xoshiro256** (Blackman, Vigna 2018), seeded through splitmix64.  Not for secrets. */
typedef struct kvd_rng {
    uint64_t s[4];
} kvd_rng;
void     kvd_rng_seed(kvd_rng *r, uint64_t seed);
uint64_t kvd_rng_u64(kvd_rng *r);
uint64_t kvd_rng_below(kvd_rng *r, uint64_t n); /* 0 <= x < n, n > 0, unbiased */
float    kvd_rng_f32(kvd_rng *r);               /* 0 <= x < 1, 24 bits */

/* Whether brackets of JSON text stand more than `most` deep in each other: for parsers that
 * recurse.
 */
bool kvd_json_deeper(const char *s, size_t len, uint32_t most);

/* How many of the first n tokens of a and b are the same. */
uint32_t kvd_common_tokens(const int32_t *a, const int32_t *b, uint32_t n);

/* Brings the k least of n values to the front, in any order (Hoare's selection); no two are equal.
 */
void kvd_select_least(uint64_t *v, uint32_t n, uint32_t k);

#endif
