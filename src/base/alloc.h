/* SPDX-License-Identifier: Apache-2.0 */
/* alloc.h - the only door to the heap, with exact accounting, faults for tests and a guard.
 *
 * The guard: between kvd_alloc_guard(true) and (false) on a thread, an allocation on that
 * thread is our own mistake (decode must not allocate) and asserts.
 * Any thread. */
#ifndef KVD_BASE_ALLOC_H
#define KVD_BASE_ALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVD_CACHE_LINE 64

/* NULL when there is no memory; zero bytes give a valid pointer.  kvd_free() is public. */
void *kvd_malloc(size_t bytes);
void *kvd_calloc(size_t n, size_t bytes);     /* overflow-checked, zeroed */
void *kvd_realloc(void *p, size_t bytes);     /* the old block stays on failure */
char *kvd_strndup(const char *s, size_t len); /* adds the terminator */

/* Anonymous pages for large pools: zeroed, 64-byte aligned at least (huge pages where the
 * system gives them).  Released by kvd_pages_free with the same size. */
void *kvd_pages_alloc(size_t bytes);
void  kvd_pages_free(void *p, size_t bytes);
/* The same in two steps: addresses alone, then the pages behind any part of them, which begins at a
 * page; several threads may touch parts at once.  false: there is no memory for it. */
void *kvd_pages_reserve(size_t bytes);
bool  kvd_pages_touch(void *p, size_t bytes);

uint64_t kvd_alloc_live(void);       /* heap blocks and page ranges alive, for leak checks */
uint64_t kvd_alloc_bytes(void);      /* usable heap bytes alive, without pages */
uint64_t kvd_alloc_peak(bool reset); /* most of them since the last reset (or ever) */
bool     kvd_alloc_guard(bool on);   /* returns the previous state of this thread */

/* Tests: let n allocations succeed, then fail one (forever: all after it).  n < 0: off.
 * Counts every thread's allocations. */
void kvd_alloc_fault(int64_t n, bool forever);
bool kvd_alloc_fault_hit(void); /* whether the fault set last has fired */

#endif
