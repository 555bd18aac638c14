/* SPDX-License-Identifier: Apache-2.0 */
/* kv_order.c - in which order a lane's chunks lie in a segment on disk: chunks whose keys are alike
 * side by side, since what is attended together is alike, and reads of neighbours become one.
 *
 * k-means of the chunks' mean keys, a fixed number of rounds from evenly spaced starts: the same
 * keys give the same order.  Inside a cluster chunks stay in token order. Owns: nothing; work comes
 * from the caller.  Thread: any. */
#include <string.h>

#include "kv/kv_cache.h"

#define ROUNDS     4u
#define PER_CENTER 16u /* chunks, on the average */

static float element(const kv_store *s, const uint8_t *row, uint32_t i)
{
    uint16_t h;
    float    f;

    if (s->params.type == KVD_DTYPE_F32) {
        memcpy(&f, row + 4 * (size_t)i, sizeof(f));
        return f;
    }
    memcpy(&h, row + 2 * (size_t)i, sizeof(h));
    return kvd_bf16_to_f32(h);
}

/* Mean key of the chunk whose record lies at rec. */
static void mean_key(const kv_store *s, const uint8_t *rec, float *out)
{
    const uint32_t d = s->params.head_dim, ct = s->params.chunk_tokens;
    const uint64_t row = s->layout.record_bytes / (2ull * ct);

    for (uint32_t i = 0; i < d; i++)
        out[i] = 0.0f;
    for (uint32_t t = 0; t < ct; t++) {
        for (uint32_t i = 0; i < d; i++)
            out[i] += element(s, rec + t * row, i) / (float)ct;
    }
}

static uint32_t nearest(const float *x, const float *center, uint32_t n_center, uint32_t d)
{
    uint32_t best  = 0;
    float    least = 0.0f;

    for (uint32_t c = 0; c < n_center; c++) {
        float sum = 0.0f;

        for (uint32_t i = 0; i < d; i++) {
            const float e = x[i] - center[(size_t)c * d + i];

            sum += e * e;
        }
        if (c == 0 || sum < least) {
            least = sum;
            best  = c;
        }
    }
    return best;
}

/* Centers become the means of their members; one without members stays. */
static void recenter(kv_order_work *w, uint32_t n, uint32_t n_center, uint32_t d)
{
    for (uint32_t c = 0; c < n_center; c++) {
        float   *center = w->center + (size_t)c * d;
        uint32_t m      = 0;

        for (uint32_t k = 0; k < n; k++)
            m += w->member[k] == c;
        if (m == 0)
            continue;
        memset(center, 0, d * sizeof(*center));
        for (uint32_t k = 0; k < n; k++) {
            for (uint32_t i = 0; i < d && w->member[k] == c; i++)
                center[i] += w->mean[(size_t)k * d + i] / (float)m;
        }
    }
}

void kv_order_lane(const kv_store *s, const uint64_t *block_at, uint32_t n_block, kv_order_work *w,
                   uint16_t *order)
{
    const uint32_t d = s->params.head_dim, n = n_block * s->block_chunks;
    const uint32_t n_center = n / PER_CENTER;
    uint32_t       at       = 0;

    for (uint32_t k = 0; k < n; k++)
        mean_key(s,
                 (const uint8_t *)s->pool.ptr + block_at[k / s->block_chunks] +
                     k % s->block_chunks * s->layout.record_bytes,
                 w->mean + (size_t)k * d);
    for (uint32_t c = 0; c < n_center; c++)
        memcpy(w->center + (size_t)c * d, w->mean + (size_t)c * PER_CENTER * d, d * sizeof(float));
    for (uint32_t r = 0; r < ROUNDS; r++) {
        for (uint32_t k = 0; k < n; k++)
            w->member[k] = (uint16_t)nearest(w->mean + (size_t)k * d, w->center, n_center, d);
        if (r + 1 < ROUNDS)
            recenter(w, n, n_center, d);
    }
    for (uint32_t c = 0; c < n_center; c++) {
        for (uint32_t k = 0; k < n; k++) {
            if (w->member[k] == c)
                order[at++] = (uint16_t)k;
        }
    }
}
