/* SPDX-License-Identifier: Apache-2.0 */
/* check.h - asserts that guard our own mistakes, and arithmetic that cannot wrap.
 *
 * Nothing that comes from a user, a file, a socket or a device may reach an assert. */
#ifndef KVD_BASE_CHECK_H
#define KVD_BASE_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef KVD_DEBUG_LEVEL
#define KVD_DEBUG_LEVEL 1 /* 2: also kvd_assert_dbg; 3: also whole-structure recounts */
#endif

#if defined(__cplusplus)
[[noreturn]]
#else
__attribute__((noreturn))
#endif
void kvd_assert_failed(const char *expr, const char *file, int line);

/* Always on, O(1), no side effects inside. */
#define kvd_assert(e) ((e) ? (void)0 : kvd_assert_failed(#e, __FILE__, __LINE__))
#if KVD_DEBUG_LEVEL >= 2
#define kvd_assert_dbg(e) kvd_assert(e)
#else
#define kvd_assert_dbg(e) ((void)sizeof(!(e)))
#endif

/* false on overflow, and then *out is unspecified. */
static inline bool kvd_mul(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool kvd_add(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline uint64_t kvd_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}
static inline uint64_t kvd_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}
/* b > 0; exact for every a. */
static inline uint64_t kvd_div_up(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}
/* Next multiple of align (a power of two); the caller has bounded a. */
static inline uint64_t kvd_align_up(uint64_t a, uint64_t align)
{
    return (a + align - 1) & ~(align - 1);
}

#define KVD_COUNTOF(a) (sizeof(a) / sizeof((a)[0]))

#endif
