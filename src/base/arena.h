/* SPDX-License-Identifier: Apache-2.0 */
/* arena.h - memory that is given back all at once, with an upper limit.
 *
 * Blocks come from the heap and grow with use.  What was handed out stays where it is until
 * kvd_arena_free(); nothing is released alone, but the block handed out last can be extended in
 * place, which makes a chain of appends linear.
 * One thread at a time. */
#ifndef KVD_BASE_ARENA_H
#define KVD_BASE_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct kvd_arena_block kvd_arena_block;

typedef struct kvd_arena {
    kvd_arena_block *block; /* newest first */
    char            *top, *end;
    size_t           held, limit; /* heap bytes taken, and how many may be */
    bool             full;        /* the limit, not the heap, refused the last request */
} kvd_arena;

/* Takes nothing from the heap yet. */
void kvd_arena_init(kvd_arena *a, size_t limit);
/* Aligned for any object, not zeroed; NULL when the limit or the heap is exhausted. */
void *kvd_arena_alloc(kvd_arena *a, size_t bytes);
void *kvd_arena_calloc(kvd_arena *a, size_t n, size_t bytes); /* overflow-checked, zeroed */
/* Unaligned, for bytes. */
char *kvd_arena_bytes(kvd_arena *a, size_t bytes);
/* Makes [p, p + old) reach p + old + more if nothing lies behind it; false: left as it was. */
bool kvd_arena_extend(kvd_arena *a, const void *p, size_t old, size_t more);
void kvd_arena_free(kvd_arena *a); /* a can be used again, with the same limit */

#endif
