/* SPDX-License-Identifier: Apache-2.0 */
/* gram_sets.c - ascending lists of numbers, each kept once, in memory that is taken at open.
 *
 * Owns: items one list behind the other, and a hash table of list numbers (slot: number + 1). */
#include <string.h>

#include "text/gram_impl.h"

bool gram_sets_open(gram_sets *s, uint32_t cap, uint32_t cap_items)
{
    uint32_t slots = 16;

    while (slots < cap * 2)
        slots *= 2;
    *s      = (gram_sets){ .cap = cap, .cap_items = cap_items, .mask = slots - 1 };
    s->item = kvd_calloc(cap_items, sizeof(*s->item));
    s->off  = kvd_calloc((size_t)cap + 1, sizeof(*s->off));
    s->slot = kvd_calloc(slots, sizeof(*s->slot));
    return s->item && s->off && s->slot;
}

void gram_sets_close(gram_sets *s)
{
    kvd_free(s->item);
    kvd_free(s->off);
    kvd_free(s->slot);
}

uint64_t gram_sets_bytes(const gram_sets *s)
{
    return ((uint64_t)s->cap_items + s->cap + 1 + s->mask + 1) * sizeof(uint32_t);
}

static uint32_t hash(const uint32_t *item, uint32_t n)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325) ^ n;

    for (uint32_t i = 0; i < n; i++)
        h = (h ^ item[i]) * UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)(h >> 32 ^ h >> 11);
}

uint32_t gram_sets_add(gram_sets *s, const uint32_t *item, uint32_t n)
{
    uint32_t i = hash(item, n) & s->mask;

    for (; s->slot[i]; i = (i + 1) & s->mask) {
        const uint32_t have = s->slot[i] - 1;

        if (s->off[have + 1] - s->off[have] == n &&
            memcmp(s->item + s->off[have], item, n * sizeof(*item)) == 0)
            return have;
    }
    if (s->n == s->cap || n > s->cap_items - s->off[s->n])
        return GRAM_NONE;
    if (n)
        memcpy(s->item + s->off[s->n], item, n * sizeof(*item));
    s->off[s->n + 1] = s->off[s->n] + n;
    s->slot[i]       = ++s->n;
    return s->n - 1;
}
