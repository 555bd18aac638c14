/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_index.c - names in sorted order, for look-up and to find duplicates.
 *
 * Sorted rather than hashed: nobody can craft names that make it slow.  Merged bottom up, which
 * reads the names of a file nearly in the file's order.  Immutable once built; any thread. */
#include <string.h>

#include "format/gguf_impl.h"

static gguf_str name_of(const void *item, size_t stride, uint32_t i)
{
    gguf_str s;

    memcpy(&s, (const uint8_t *)item + (size_t)i * stride, sizeof(s));
    return s;
}

static int name_cmp(gguf_str a, gguf_str b)
{
    const int c = memcmp(a.data, b.data, (size_t)kvd_min_u64(a.len, b.len));

    if (c)
        return c;
    return a.len < b.len ? -1 : a.len > b.len;
}

/* Merges the sorted runs from[begin, mid) and from[mid, end) into to[begin, end). */
static void merge(const void *item, size_t stride, const uint32_t *from, uint32_t *to,
                  uint32_t begin, uint32_t mid, uint32_t end)
{
    uint32_t a = begin, b = mid;

    for (uint32_t k = begin; k < end; k++) {
        const bool take_a = b == end || (a < mid && name_cmp(name_of(item, stride, from[a]),
                                                             name_of(item, stride, from[b])) <= 0);

        to[k] = take_a ? from[a++] : from[b++];
    }
}

bool gguf_index_build(const void *item, size_t stride, uint32_t n, uint32_t *order, uint32_t *dup)
{
    uint32_t *from = order, *to = order + n;

    for (uint32_t i = 0; i < n; i++)
        from[i] = i;
    for (uint64_t run = 1; run < n; run *= 2) {
        uint32_t *const swap = from;

        for (uint64_t i = 0; i < n; i += 2 * run)
            merge(item, stride, from, to, (uint32_t)i, (uint32_t)kvd_min_u64(i + run, n),
                  (uint32_t)kvd_min_u64(i + 2 * run, n));
        from = to;
        to   = swap;
    }
    if (from != order && n)
        memcpy(order, from, n * sizeof(*order));
    for (uint32_t i = 1; i < n; i++) {
        if (name_cmp(name_of(item, stride, order[i - 1]), name_of(item, stride, order[i])) == 0) {
            *dup = order[i];
            return false;
        }
    }
    return true;
}

const void *gguf_index_find(const void *item, size_t stride, uint32_t n, const uint32_t *order,
                            const char *name)
{
    const gguf_str want = { name, strlen(name) };
    uint32_t       low = 0, high = n;

    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        const int      c   = name_cmp(name_of(item, stride, order[mid]), want);

        if (c == 0)
            return (const uint8_t *)item + (size_t)order[mid] * stride;
        if (c < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return NULL;
}
