/* SPDX-License-Identifier: Apache-2.0 */
/* synth.h - the numbers of op `synth`, for all backends.
 *
 * Everything is a function of where it stands: stream, layer, head, dimension and position; so a
 * recorded step makes the next position's numbers when the position in memory has moved on.  All
 * have mean 0 and variance 1, but queries a variance of SYNTH_Q_GAIN squared: that is the deviation
 * of their logits.
 *
 * A *drift* of period T has a new value every T positions and goes from one to the next in a
 * straight line, scaled to keep its variance.  Keys are a drift and noise: neighbours are alike, so
 * chunks differ and selections come in runs.  Queries are three drifts and noise.  The share of
 * noise is (1 - reuse) times a factor between 2^-s and 2^s that each layer and KV head has for
 * itself, as heads of models differ in how long they look at the same tokens.
 *
 * The constants are fitted: with a reuse of 0.925 windows of 1, 2, 4 and 8 budgets of 1.56 % hold
 * what they hold in a real model (docs/bench.md; test_synth compares). */
#ifndef KVD_SYNTH_H
#define KVD_SYNTH_H

#include <math.h>

#include "backend/backend.h"

#ifdef __CUDACC__
#define SYNTH_FN static __host__ __device__ inline
#else
#define SYNTH_FN static inline
#endif

#define SYNTH_K_PERIOD 12u   /* tokens */
#define SYNTH_K_SHARE  0.64f /* of a key's variance in its drift */
#define SYNTH_Q_GAIN   1.5f
#define SYNTH_Q_FAST   8u /* periods in steps, */
#define SYNTH_Q_MIDDLE 32u
#define SYNTH_Q_SLOW   256u
#define SYNTH_Q_SHARE  0.14f /* and shares of what is no noise: fast, twice that, the rest */
#define SYNTH_SPREAD   1.5f  /* s */
#define SYNTH_NOISE    0.9f  /* most of a query's variance */

typedef enum synth_what { SYNTH_Q = 1, SYNTH_K, SYNTH_V } synth_what;

SYNTH_FN uint32_t synth_hash(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

/* About normal: the sum of a hash's four bytes. */
SYNTH_FN float synth_normal(uint32_t seed, uint32_t i)
{
    const uint32_t h = synth_hash(seed + i * 0x9e3779b9u);

    return ((float)((h & 255u) + (h >> 8 & 255u) + (h >> 16 & 255u) + (h >> 24)) - 510.0f) *
           (1.0f / 147.8f);
}

SYNTH_FN float synth_drift(uint32_t seed, uint32_t pos, uint32_t period)
{
    const uint32_t cell = pos / period;
    const float    f = ((float)(pos % period) + 0.5f) / (float)period, g = 1.0f - f;

    return (g * synth_normal(seed, cell) + f * synth_normal(seed, cell + 1)) / sqrtf(f * f + g * g);
}

/* Of one head's rows. */
SYNTH_FN uint32_t synth_seed(synth_what what, uint32_t stream, uint32_t layer, uint32_t head)
{
    return synth_hash(synth_hash(stream * 1024u + layer) + head * 4u + (uint32_t)what);
}

/* The share of noise in queries of a layer and KV head. */
SYNTH_FN float synth_noise(float reuse, uint32_t layer, uint32_t kv_head)
{
    const uint32_t h = synth_hash(layer * 0x10001u + kv_head * 0x9e3779b9u + 1u);
    const float    u = (float)(h >> 8) * 0x1p-23f - 1.0f; /* [-1, 1) */
    const float    x = (1.0f - reuse) * exp2f(u * SYNTH_SPREAD);

    return x < SYNTH_NOISE ? x : SYNTH_NOISE;
}

/* seed of the head; noise of its layer and KV head. */
SYNTH_FN float synth_q_at(uint32_t seed, uint32_t dim, uint32_t pos, float noise)
{
    const uint32_t of    = synth_hash(seed + dim);
    const uint32_t at    = pos + (seed & 255u); /* heads turn at different times */
    const float    still = 1.0f - noise;

    return SYNTH_Q_GAIN *
           (sqrtf(noise) * synth_normal(of ^ 0x55555555u, pos) +
            sqrtf(still * SYNTH_Q_SHARE) * synth_drift(of ^ 0x33333333u, at, SYNTH_Q_FAST) +
            sqrtf(still * 2.0f * SYNTH_Q_SHARE) *
                synth_drift(of ^ 0x77777777u, at, SYNTH_Q_MIDDLE) +
            sqrtf(still * (1.0f - 3.0f * SYNTH_Q_SHARE)) * synth_drift(of, at, SYNTH_Q_SLOW));
}

SYNTH_FN float synth_k_at(uint32_t seed, uint32_t dim, uint32_t pos)
{
    const uint32_t of = synth_hash(seed + dim);

    return sqrtf(SYNTH_K_SHARE) * synth_drift(of, pos, SYNTH_K_PERIOD) +
           sqrtf(1.0f - SYNTH_K_SHARE) * synth_normal(of ^ 0x55555555u, pos);
}

SYNTH_FN float synth_v_at(uint32_t seed, uint32_t dim, uint32_t pos)
{
    return synth_normal(synth_hash(seed + dim), pos);
}

#endif
