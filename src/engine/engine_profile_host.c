/* SPDX-License-Identifier: Apache-2.0 */
/* engine_profile_host.c - what host tiers of several sizes would have held of a lane's records
 * while its steps were profiled, and what would have been read from disk.
 *
 * The rule is the tier's (kv/kv_tier.c): at first the records that matter most to the prompt, of
 * which the first step's scores tell here; blocks that are sealed later are placed whole; and what
 * was read replaces what has a lower moving average.  Every lane is alone with its share.
 *
 * Pure but for the state it is given; nothing here allocates.  Thread: the profile's. */
#include <string.h>

#include "engine/engine_profile.h"

const uint32_t engine_profile_size[ENGINE_PROFILE_SIZES] = { 0, 1, 2, 4, 8, 12, 16 };

uint32_t engine_host_records(uint32_t n_chunk_max, uint32_t size)
{
    return (uint32_t)((uint64_t)n_chunk_max * engine_profile_size[size] / 16);
}

static uint16_t *held_by(const engine_host_tiers *h, uint32_t lane, uint32_t cap)
{
    return h->held + ((uint64_t)lane * ENGINE_PROFILE_CAPS + cap) * h->n_chunk_max;
}

void engine_host_start(engine_host_tiers *h, uint32_t lane, uint32_t n_chunk, const uint32_t *order,
                       uint32_t n)
{
    for (uint32_t cap = 0; cap < ENGINE_PROFILE_CAPS; cap++) {
        uint16_t *held = held_by(h, lane, cap);

        memset(held, 0, h->n_chunk_max * sizeof(*held));
        for (uint32_t size = 0; size < ENGINE_PROFILE_SIZES; size++) {
            for (uint32_t i = 0; i < n && i < engine_host_records(h->n_chunk_max, size); i++)
                held[order[i]] |= (uint16_t)(1u << size);
        }
    }
    h->n_chunk[lane] = n_chunk;
}

/* n chunks of h->read, none of them held, come in; the lowest averages leave, of equals those that
 * come in. */
static void place(engine_host_tiers *h, uint16_t *held, uint32_t size, const uint16_t *ema,
                  uint32_t n_chunk, uint32_t n, bool newest)
{
    const uint32_t room = engine_host_records(h->n_chunk_max, size);
    const uint16_t bit  = (uint16_t)(1u << size);
    uint32_t       m    = 0;

    if (n == 0 || room == 0)
        return;
    for (uint32_t c = 0; c < n_chunk; c++) {
        if (held[c] & bit)
            h->rank[m++] = ((uint64_t)ema[c] << 1 | 1) << 32 | c;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t c = h->read[i];

        h->rank[m++] = (newest ? (uint64_t)UINT16_MAX << 1 : (uint64_t)ema[c] << 1) << 32 | c;
        held[c] |= bit;
    }
    if (m <= room)
        return;
    kvd_select_least(h->rank, m, m - room);
    for (uint32_t i = 0; i < m - room; i++)
        held[(uint32_t)h->rank[i]] &= (uint16_t)~bit;
}

/* Of these misses those that are not held are read, and come in. */
static uint32_t miss(engine_host_tiers *h, uint16_t *held, uint32_t size, const uint16_t *ema,
                     uint32_t n_chunk, const uint32_t *chunk, uint32_t n)
{
    uint32_t n_read = 0;

    for (uint32_t i = 0; i < n; i++) {
        if (!(held[chunk[i]] >> size & 1))
            h->read[n_read++] = chunk[i];
    }
    place(h, held, size, ema, n_chunk, n_read, false);
    return n_read;
}

void engine_host_step(engine_host_tiers *h, uint32_t lane, uint32_t cap, const uint16_t *ema,
                      uint32_t n_chunk, const uint32_t *chunk, uint32_t n_urgent, uint32_t n_miss,
                      engine_lane_profile *out)
{
    uint16_t *held = held_by(h, lane, cap);

    for (uint32_t size = 0; size < ENGINE_PROFILE_SIZES; size++) {
        uint32_t n_new = 0;

        for (uint32_t c = h->n_chunk[lane]; c < n_chunk; c++)
            h->read[n_new++] = c;
        place(h, held, size, ema, n_chunk, n_new, true);
        out->urgent_read[cap][size] += miss(h, held, size, ema, n_chunk, chunk, n_urgent);
        out->late_read[cap][size] +=
            miss(h, held, size, ema, n_chunk, chunk + n_urgent, n_miss - n_urgent);
    }
}

void engine_host_end_step(engine_host_tiers *h, uint32_t lane, uint32_t n_chunk)
{
    h->n_chunk[lane] = n_chunk;
}
