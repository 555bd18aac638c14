/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_sides.h - structs with pointers in them, and outputs, as host and device see them.
 * Header-only help of the tests of the sparse ops. */
#ifndef KVD_TEST_GPU_SIDES_H
#define KVD_TEST_GPU_SIDES_H

#include "gpu/gpu_world.h"

#define GPU_FAR (5ull << 30) /* bytes before a pool's first use: past what 32 bits count */

/* A buffer's memory on either side. */
static inline void *gpu_side(const gpu_buf *b, bool dev, uint64_t off)
{
    return (uint8_t *)(dev ? b->dev.ptr : b->host) + off;
}

/* What lies in a buffer at a host address, as the device sees it. */
static inline void *gpu_at(const gpu_buf *b, const void *host)
{
    return gpu_side(b, true, (uint64_t)((const uint8_t *)host - (const uint8_t *)b->host));
}

/* Shows the device n offsets that are `far` further. */
static inline void gpu_up_far(gpu_world *w, const gpu_buf *b, uint64_t n, uint64_t far)
{
    gpu_buf   up  = *b;
    uint64_t *own = kvd_calloc(n, sizeof(*own));

    for (uint64_t i = 0; i < n; i++)
        own[i] = ((const uint64_t *)b->host)[i] + far;
    up.host = own;
    gpu_up(w, &up);
    kvd_free(own);
}

/* A buffer over memory that somebody else owns on the host. */
static inline gpu_buf gpu_over(gpu_world *w, void *host, uint64_t bytes)
{
    gpu_buf b   = { .host = host };
    kvd_err err = { 0 };

    gpu_check(w->dev->ops->mem_alloc(w->dev, KVD_MEM_DEVICE, bytes, &b.dev, &err), &err);
    gpu_up(w, &b);
    return b;
}

static inline void gpu_over_free(gpu_world *w, gpu_buf *b)
{
    w->dev->ops->mem_free(w->dev, &b->dev);
}

/* What the device has of a buffer, in memory of its own: kvd_pages_free() it. */
static inline void *gpu_fetched(gpu_world *w, const gpu_buf *b)
{
    gpu_buf down = *b;

    down.host = kvd_pages_alloc((size_t)b->dev.bytes);
    assert_non_null(down.host);
    gpu_down(w, &down);
    return down.host;
}

static inline void gpu_same(gpu_world *w, const gpu_buf *b, const char *what)
{
    void *got = gpu_fetched(w, b);

    if (memcmp(got, b->host, b->dev.bytes) != 0)
        fail_msg("%s differ", what);
    kvd_pages_free(got, (size_t)b->dev.bytes);
}

#endif
