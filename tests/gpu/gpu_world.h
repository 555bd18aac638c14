/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_world.h - the backend of a GPU beside the reference, and data that lies on both sides.
 * Header-only help of the tests of this directory, each of which is called with the module's file.
 * A program whose gpu_open() says false has said why and should return GPU_SKIP. */
#ifndef KVD_TEST_GPU_WORLD_H
#define KVD_TEST_GPU_WORLD_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"

#define GPU_SKIP 77 /* of ctest */

typedef struct gpu_world {
    kvd_backend *dev, *ref;
    kvd_stream  *st, *ref_st;
    kvd_rng      rng;
} gpu_world;

/* Memory of both sides with the same content, once gpu_up() has been called. */
typedef struct gpu_buf {
    void   *host;
    kvd_mem dev;
} gpu_buf;

static inline bool gpu_open_with(gpu_world *w, const char *module, bool precise, bool deterministic)
{
    const kvd_backend_params p = {
        .name = "cuda", .module = module, .precise = precise, .deterministic = deterministic
    };
    const kvd_backend_params r   = { .name = "ref" };
    kvd_err                  err = { 0 };

    memset(w, 0, sizeof(*w));
    kvd_rng_seed(&w->rng, 1);
    if (kvd_backend_open(&w->dev, &p, &err) != KVD_OK) {
        printf("skipped: %s\n", err.msg);
        return false;
    }
    assert_int_equal(kvd_backend_open(&w->ref, &r, NULL), KVD_OK);
    assert_int_equal(w->dev->ops->stream_open(w->dev, &w->st, NULL), KVD_OK);
    assert_int_equal(w->ref->ops->stream_open(w->ref, &w->ref_st, NULL), KVD_OK);
    return true;
}

static inline bool gpu_open(gpu_world *w, int argc, char **argv)
{
    return gpu_open_with(w, argc > 1 ? argv[1] : NULL, false, false);
}

static inline void gpu_close(gpu_world *w)
{
    w->dev->ops->stream_close(w->st);
    w->ref->ops->stream_close(w->ref_st);
    kvd_backend_close(w->dev);
    kvd_backend_close(w->ref);
}

static inline void gpu_reserve(gpu_world *w, const kvd_backend_limits *lim)
{
    assert_int_equal(w->dev->ops->reserve(w->dev, lim, NULL), KVD_OK);
    assert_int_equal(w->ref->ops->reserve(w->ref, lim, NULL), KVD_OK);
}

/* Waits; a failure of the device ends the test with its text. */
static inline void gpu_sync(gpu_world *w)
{
    kvd_err err = { 0 };

    if (w->dev->ops->stream_sync(w->st, &err) != KVD_OK)
        fail_msg("%s", err.msg);
}

static inline void gpu_check(kvd_status st, const kvd_err *err)
{
    if (st != KVD_OK)
        fail_msg("%s", err->msg);
}

static inline void gpu_copy(gpu_world *w, gpu_buf *b, bool up)
{
    kvd_mem host = { .ptr = b->host, .bytes = b->dev.bytes, .kind = KVD_MEM_HOST };
    kvd_err err  = { 0 };

    gpu_check(w->dev->ops->copy(w->st, up ? b->dev : host, 0, up ? host : b->dev, 0, b->dev.bytes,
                                &err),
              &err);
    gpu_sync(w);
}
static inline void gpu_up(gpu_world *w, gpu_buf *b)
{
    gpu_copy(w, b, true);
}
static inline void gpu_down(gpu_world *w, gpu_buf *b)
{
    gpu_copy(w, b, false);
}

/* Both zeroed. */
static inline gpu_buf gpu_alloc(gpu_world *w, uint64_t bytes)
{
    gpu_buf b   = { 0 };
    kvd_err err = { 0 };

    b.host = kvd_pages_alloc((size_t)(bytes ? bytes : 1));
    assert_non_null(b.host);
    gpu_check(w->dev->ops->mem_alloc(w->dev, KVD_MEM_DEVICE, bytes ? bytes : 1, &b.dev, &err),
              &err);
    return b;
}

static inline void gpu_free(gpu_world *w, gpu_buf *b)
{
    kvd_pages_free(b->host, (size_t)b->dev.bytes);
    w->dev->ops->mem_free(w->dev, &b->dev);
    b->host = NULL;
}

/* About normal: the sum of four uniforms, scaled to variance 1. */
static inline float gpu_normal(gpu_world *w)
{
    return (kvd_rng_f32(&w->rng) + kvd_rng_f32(&w->rng) + kvd_rng_f32(&w->rng) +
            kvd_rng_f32(&w->rng) - 2.0f) *
           1.7320508f;
}

/* n floats of about normal distribution on both sides. */
static inline gpu_buf gpu_floats(gpu_world *w, uint64_t n)
{
    gpu_buf b = gpu_alloc(w, n * sizeof(float));

    for (uint64_t i = 0; i < n; i++)
        ((float *)b.host)[i] = gpu_normal(w);
    gpu_up(w, &b);
    return b;
}

/* |got - want| / |want| as vectors; infinite where got has a NaN. */
static inline double gpu_error(const float *got, const float *want, uint64_t n)
{
    double diff = 0.0, ref = 0.0;

    for (uint64_t i = 0; i < n; i++) {
        const double d = (double)got[i] - (double)want[i];

        if (isnan(d))
            return HUGE_VAL;
        diff += d * d;
        ref += (double)want[i] * (double)want[i];
    }
    return ref > 0.0 ? sqrt(diff / ref) : diff > 0.0 ? HUGE_VAL : 0.0;
}

#endif
