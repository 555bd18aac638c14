/* SPDX-License-Identifier: Apache-2.0 */
/* alloc.c - see alloc.h.  Accounting uses the allocator's own usable size, so no header is put in
 * front of blocks and pointers may be handed to the caller of the public kvd_free(). */
#include "base/alloc.h"

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/check.h"
#include "kvdrive.h"

static _Atomic uint64_t   alloc_live_, alloc_bytes_, alloc_peak_;
static _Atomic int64_t    fault_left_ = -1; /* < 0: off */
static _Atomic bool       fault_forever_, fault_hit_;
static _Thread_local bool guard_on_;

/* Whether this allocation is the one to fail. */
static bool fault_now(void)
{
    int64_t left = atomic_load_explicit(&fault_left_, memory_order_relaxed);

    if (left < 0)
        return false;
    left = atomic_fetch_sub_explicit(&fault_left_, 1, memory_order_relaxed);
    if (left > 0)
        return false;
    atomic_store(&fault_hit_, true);
    if (atomic_load(&fault_forever_))
        atomic_store(&fault_left_, 0);
    return left == 0 || atomic_load(&fault_forever_);
}

static void *count_in(void *p)
{
    if (p) {
        const uint64_t bytes = malloc_usable_size(p);
        const uint64_t now =
            atomic_fetch_add_explicit(&alloc_bytes_, bytes, memory_order_relaxed) + bytes;
        uint64_t peak = atomic_load_explicit(&alloc_peak_, memory_order_relaxed);

        atomic_fetch_add_explicit(&alloc_live_, 1, memory_order_relaxed);
        while (now > peak && !atomic_compare_exchange_weak(&alloc_peak_, &peak, now))
            ; /* peak now holds what another thread has stored */
    }
    return p;
}

static void count_out(void *p)
{
    atomic_fetch_sub_explicit(&alloc_live_, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&alloc_bytes_, malloc_usable_size(p), memory_order_relaxed);
}

void *kvd_malloc(size_t bytes)
{
    kvd_assert(!guard_on_);
    if (fault_now())
        return NULL;
    return count_in(malloc(bytes ? bytes : 1));
}

void *kvd_calloc(size_t n, size_t bytes)
{
    uint64_t total;

    kvd_assert(!guard_on_);
    if (fault_now() || !kvd_mul(n, bytes, &total))
        return NULL;
    return count_in(calloc(1, total ? total : 1));
}

void *kvd_realloc(void *p, size_t bytes)
{
    void *q;

    if (!p)
        return kvd_malloc(bytes);
    kvd_assert(!guard_on_);
    if (fault_now())
        return NULL;
    count_out(p);
    q = realloc(p, bytes ? bytes : 1);
    count_in(q ? q : p);
    return q;
}

char *kvd_strndup(const char *s, size_t len)
{
    char *p = len < SIZE_MAX ? kvd_malloc(len + 1) : NULL;

    if (p) {
        if (len)
            memcpy(p, s, len);
        p[len] = 0;
    }
    return p;
}

void kvd_free(void *p)
{
    if (!p)
        return;
    count_out(p);
    free(p);
}

void *kvd_pages_reserve(size_t bytes)
{
    void *p;

    kvd_assert(!guard_on_);
    if (fault_now())
        return NULL;
    p = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    (void)madvise(p, bytes, MADV_HUGEPAGE); /* a wish: the result does not matter */
    atomic_fetch_add_explicit(&alloc_live_, 1, memory_order_relaxed);
    return p;
}

bool kvd_pages_touch(void *p, size_t bytes)
{
#ifdef MADV_POPULATE_WRITE
    /* Have the pages now, so that running out is an error here and not a kill while decoding.
     * Kernels before 5.14 do not know the call: there the pages come on first touch. */
    return madvise(p, bytes, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
#else
    (void)p;
    (void)bytes;
    return true;
#endif
}

void *kvd_pages_alloc(size_t bytes)
{
    void *p = kvd_pages_reserve(bytes);

    if (p && !kvd_pages_touch(p, bytes)) {
        kvd_pages_free(p, bytes);
        return NULL;
    }
    return p;
}

void kvd_pages_free(void *p, size_t bytes)
{
    if (!p)
        return;
    atomic_fetch_sub_explicit(&alloc_live_, 1, memory_order_relaxed);
    munmap(p, bytes ? bytes : 1);
}

uint64_t kvd_alloc_live(void)
{
    return atomic_load(&alloc_live_);
}

uint64_t kvd_alloc_bytes(void)
{
    return atomic_load(&alloc_bytes_);
}

uint64_t kvd_alloc_peak(bool reset)
{
    return reset ? atomic_exchange(&alloc_peak_, kvd_alloc_bytes()) : atomic_load(&alloc_peak_);
}

bool kvd_alloc_guard(bool on)
{
    const bool was = guard_on_;

    guard_on_ = on;
    return was;
}

void kvd_alloc_fault(int64_t n, bool forever)
{
    atomic_store(&fault_hit_, false);
    atomic_store(&fault_forever_, forever);
    atomic_store(&fault_left_, n);
}

bool kvd_alloc_fault_hit(void)
{
    return atomic_load(&fault_hit_);
}
