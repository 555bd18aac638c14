/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_index.c - names in sorted order, for look-up and to find duplicates.
 *
 * Sorted rather than hashed: nobody can craft names that make it slow, and heapsort takes no
 * memory beyond the order itself.  Immutable once built; any thread. */
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

/* Restores the heap order[0..n) below root, whose children are heaps. */
static void sift(const void *item, size_t stride, uint32_t *order, uint32_t root, uint32_t n)
{
    const uint32_t x      = order[root];
    const gguf_str x_name = name_of(item, stride, x);
    uint64_t       hole   = root;

    for (;;) {
        uint64_t child = 2 * hole + 1;

        if (child >= n)
            break;
        if (child + 1 < n && name_cmp(name_of(item, stride, order[child]),
                                      name_of(item, stride, order[child + 1])) < 0)
            child++;
        if (name_cmp(name_of(item, stride, order[child]), x_name) <= 0)
            break;
        order[hole] = order[child];
        hole        = child;
    }
    order[hole] = x;
}

bool gguf_index_build(const void *item, size_t stride, uint32_t n, uint32_t *order, uint32_t *dup)
{
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    for (uint32_t i = n / 2; i-- > 0;)
        sift(item, stride, order, i, n);
    for (uint32_t end = n; end-- > 1;) {
        const uint32_t top = order[0];

        order[0]   = order[end];
        order[end] = top;
        sift(item, stride, order, 0, end);
    }
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
