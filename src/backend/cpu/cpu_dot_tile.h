/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_tile.h - private to cpu_dot_*.c: how a kernel walks a job, at every level.
 *
 * A job is walked by tiles of four rows, and in each tile by tokens, so that a row is read from
 * memory once. */
#ifndef KVD_CPU_DOT_TILE_H
#define KVD_CPU_DOT_TILE_H

#include <string.h>

#include "backend/cpu/cpu_dot.h"

#define DOT_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define DOT_UNROLL _Pragma("clang loop unroll(full)")
#else
#define DOT_UNROLL _Pragma("GCC unroll 8")
#endif

/* Weights are fetched one tile ahead of use, or more where tiles are shorter than this. */
#define DOT_AHEAD_BYTES 1024

/* Four rows and up to four tokens.  Rows that do not exist repeat the last one. */
typedef struct dot_tile {
    const uint8_t    *row[CPU_DOT_ROWS];
    const cpu_xgroup *x[CPU_DOT_TOKENS];
    const uint8_t    *ahead; /* what to fetch while row[0] .. row[3] are read */
} dot_tile;

DOT_INLINE int32_t dot_load4(const uint8_t *p)
{
    int32_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

DOT_INLINE void dot_tile_rows(const cpu_dot_job *job, uint32_t row, dot_tile *tile)
{
    const uint64_t tile_bytes = CPU_DOT_ROWS * job->row_bytes;

    for (uint32_t r = 0; r < CPU_DOT_ROWS; r++)
        tile->row[r] = job->w + (row + r < job->n_row ? row + r : job->n_row - 1) * job->row_bytes;
    tile->ahead = tile->row[0] + kvd_div_up(DOT_AHEAD_BYTES, tile_bytes) * tile_bytes;
}

/* Fetches bytes (a constant) from offset off of the tile ahead on; past the end of the weights this
 * does nothing. */
DOT_INLINE void dot_fetch(const dot_tile *tile, uint64_t off, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i += KVD_CACHE_LINE)
        __builtin_prefetch(tile->ahead + off + i, 0, 3);
}

/* n tokens at a time, n a constant, from number token on. */
#define DOT_TOKENS(job, row, token, n, tile, fn, kind)                                    \
    for (; (token) + (n) <= (job)->n_token; (token) += (n)) {                             \
        float sum[n][CPU_DOT_ROWS];                                                       \
                                                                                          \
        for (uint32_t i = 0; i < (n); i++)                                                \
            (tile)->x[i] =                                                                \
                (const cpu_xgroup *)(job)->x + ((uint64_t)(token) + i) * (job)->x_stride; \
        fn(kind, job, tile, n, sum);                                                      \
        for (uint32_t i = 0; i < (n); i++)                                                \
            cpu_dot_store(job, row, (job)->n_row - (row), (token) + i, sum[i]);           \
    }

/* Tokens by most (4, or 2 where registers are few), then by twos, then one. */
#define DOT_KERNEL(name, fn, kind, most)                                \
    void name(const cpu_dot_job *job)                                   \
    {                                                                   \
        for (uint32_t row = 0; row < job->n_row; row += CPU_DOT_ROWS) { \
            dot_tile tile;                                              \
            uint32_t token = 0;                                         \
                                                                        \
            dot_tile_rows(job, row, &tile);                             \
            DOT_TOKENS(job, row, token, most, &tile, fn, kind)          \
            DOT_TOKENS(job, row, token, 2, &tile, fn, kind)             \
            DOT_TOKENS(job, row, token, 1, &tile, fn, kind)             \
        }                                                               \
    }

#endif
