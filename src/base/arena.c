/* SPDX-License-Identifier: Apache-2.0 */
#include "base/arena.h"

#include <stdalign.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "kvdrive.h"

#define ARENA_BLOCK_MIN 4096u
#define ARENA_BLOCK_MAX (1u << 20)

struct kvd_arena_block {
    kvd_arena_block *next;
    alignas(max_align_t) char data[];
};

void kvd_arena_init(kvd_arena *a, size_t limit)
{
    *a = (kvd_arena){ .limit = limit };
}

/* A new block with room for bytes; blocks double up to ARENA_BLOCK_MAX. */
static bool arena_grow(kvd_arena *a, size_t bytes)
{
    size_t           size = a->held < ARENA_BLOCK_MIN ? ARENA_BLOCK_MIN : a->held;
    uint64_t         need;
    kvd_arena_block *b;

    a->full = false;
    if (size > ARENA_BLOCK_MAX)
        size = ARENA_BLOCK_MAX;
    if (!kvd_add(bytes, sizeof(*b), &need) || need > a->limit - a->held) {
        a->full = true;
        return false;
    }
    size = kvd_max_u64(size, need);
    size = kvd_min_u64(size, a->limit - a->held);
    b    = kvd_malloc(size);
    if (!b)
        return false;
    b->next  = a->block;
    a->block = b;
    a->top   = b->data;
    a->end   = (char *)b + size;
    a->held += size;
    return true;
}

void *kvd_arena_alloc(kvd_arena *a, size_t bytes)
{
    const size_t align = alignof(max_align_t);
    size_t       pad   = (size_t)(-(uintptr_t)a->top & (align - 1));
    void        *p;

    if (!a->top || (size_t)(a->end - a->top) < pad || (size_t)(a->end - a->top) - pad < bytes) {
        if (!arena_grow(a, bytes))
            return NULL;
        pad = 0;
    }
    p      = a->top + pad;
    a->top = a->top + pad + bytes;
    return p;
}

void *kvd_arena_calloc(kvd_arena *a, size_t n, size_t bytes)
{
    uint64_t total;
    void    *p;

    if (!kvd_mul(n, bytes, &total)) {
        a->full = true;
        return NULL;
    }
    p = kvd_arena_alloc(a, total);
    if (p)
        memset(p, 0, total);
    return p;
}

char *kvd_arena_bytes(kvd_arena *a, size_t bytes)
{
    char *p;

    if ((!a->top || (size_t)(a->end - a->top) < bytes) && !arena_grow(a, bytes))
        return NULL;
    p = a->top;
    a->top += bytes;
    return p;
}

bool kvd_arena_extend(kvd_arena *a, const void *p, size_t old, size_t more)
{
    if (!a->top || (const char *)p + old != a->top || (size_t)(a->end - a->top) < more)
        return false;
    a->top += more;
    return true;
}

void kvd_arena_free(kvd_arena *a)
{
    kvd_arena_block *next;

    for (kvd_arena_block *b = a->block; b; b = next) {
        next = b->next;
        kvd_free(b);
    }
    kvd_arena_init(a, a->limit);
}
