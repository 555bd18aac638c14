/* SPDX-License-Identifier: Apache-2.0 */
#include "base/misc.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/check.h"

static kvd_log_fn log_fn_;
static void      *log_ctx_;

uint64_t kvd_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t kvd_ran_look(kvd_ran_clock *c, uint64_t now_ns)
{
    const uint64_t gap = now_ns > c->seen_ns ? now_ns - c->seen_ns : 0; /* 0: another thread's */

    c->ran_ns += c->ran_ns ? kvd_min_u64(gap, KVD_RAN_LOOK_NS) : 1;
    c->seen_ns = kvd_max_u64(c->seen_ns, now_ns);
    return c->ran_ns;
}

/* The lock is held for some instructions: both numbers change together, or another thread would see
 * the time of a stop as time that ran. */
uint64_t kvd_ran_ns(void)
{
    static atomic_flag   busy = ATOMIC_FLAG_INIT;
    static kvd_ran_clock clock;
    uint64_t             ran;

    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire))
        continue;
    ran = kvd_ran_look(&clock, kvd_now_ns());
    atomic_flag_clear_explicit(&busy, memory_order_release);
    return ran;
}

void kvd_set_log(kvd_log_fn fn, void *ctx)
{
    log_fn_  = fn;
    log_ctx_ = ctx;
}

void kvd_log(kvd_log_level level, const char *fmt, ...)
{
    char    line[1024];
    va_list ap;

    if (!log_fn_)
        return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof(line), fmt, ap);
    va_end(ap);
    log_fn_(log_ctx_, level, line);
}

void kvd_rng_seed(kvd_rng *r, uint64_t seed)
{
    for (int i = 0; i < 4; i++) { /* splitmix64 */
        uint64_t z = seed += 0x9e3779b97f4a7c15u;

        z       = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z       = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        r->s[i] = z ^ (z >> 31);
    }
}

static uint64_t rotl(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

uint64_t kvd_rng_u64(kvd_rng *r)
{
    const uint64_t out = rotl(r->s[1] * 5, 7) * 9;
    const uint64_t t   = r->s[1] << 17;

    r->s[2] ^= r->s[0];
    r->s[3] ^= r->s[1];
    r->s[1] ^= r->s[2];
    r->s[0] ^= r->s[3];
    r->s[2] ^= t;
    r->s[3] = rotl(r->s[3], 45);
    return out;
}

uint64_t kvd_rng_below(kvd_rng *r, uint64_t n)
{
    uint64_t limit, x;

    kvd_assert(n > 0);
    limit = UINT64_MAX - UINT64_MAX % n; /* a multiple of n */
    do {
        x = kvd_rng_u64(r);
    } while (x >= limit);
    return x % n;
}

float kvd_rng_f32(kvd_rng *r)
{
    return (float)(kvd_rng_u64(r) >> 40) * 0x1p-24f;
}

void kvd_select_least(uint64_t *v, uint32_t n, uint32_t k)
{
    uint32_t lo = 0, hi = n;

    while (k > lo && k < hi) {
        const uint64_t pivot = v[lo + (hi - lo - 1) / 2];
        uint32_t       i = lo, j = hi - 1;

        for (;;) {
            uint64_t swap;

            while (v[i] < pivot)
                i++;
            while (v[j] > pivot)
                j--;
            if (i >= j)
                break;
            swap   = v[i];
            v[i++] = v[j];
            v[j--] = swap;
        }
        if (k > j) /* v[lo .. j] <= pivot <= v[j + 1 .. hi), and j + 1 < hi */
            lo = j + 1;
        else
            hi = j + 1;
    }
}

bool kvd_json_deeper(const char *s, size_t len, uint32_t most)
{
    uint32_t depth = 0;
    bool     text  = false;

    for (size_t i = 0; i < len; i++) {
        if (text && s[i] == '\\')
            i++;
        else if (s[i] == '"')
            text = !text;
        else if (!text && (s[i] == '[' || s[i] == '{') && ++depth > most)
            return true;
        else if (!text && (s[i] == ']' || s[i] == '}') && depth > 0)
            depth--;
    }
    return false;
}

uint32_t kvd_common_tokens(const int32_t *a, const int32_t *b, uint32_t n)
{
    enum { STEP = 64 }; /* compared at once while they are the same */
    uint32_t i = 0;

    while (i + STEP <= n && memcmp(a + i, b + i, STEP * sizeof(*a)) == 0)
        i += STEP;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}
