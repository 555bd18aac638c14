/* SPDX-License-Identifier: Apache-2.0 */
/* index_layout.h - how the index of one lane of one block lies in memory, and the arithmetic
 * that every backend must share bit for bit.
 *
 * A lane is a sequence of sections, each on a multiple of 64 bytes:
 *   plane 0, plane 1 (landmarks), radius, key plane, cluster header and assignment
 * as the kind has them.  A *plane* holds one vector per *unit* (chunk, centroid or token) in tiles
 * of 16 units:
 *   BF16  [n_unit / 16][head_dim][16]
 *   INTn  parameters [n_unit / group][2][dim_pad] binary16: scales, then minima
 *         codes      [n_unit / 16][dim_pad / per_row][16][4]: a row of 64 bytes holds 16 units
 * times per_row = 4 (8 / n) channels; byte [u][r] holds channels 4 s + r of unit u in its bits [n
 * s, n s + n), s = 0 .. 8 / n - 1. So 64 bytes after one shift and mask are the operand of a
 * 4-channel dot product of 16 units. A value is code * scale + minimum.  Channels past head_dim
 * have scale, minimum and code 0. radius: [n_chunk] binary16.  Cluster: one byte, which block of
 * its segment this is; then after 64 bytes [n_chunk] bytes, the chunk's centroid counted from the
 * segment's first block. */
#ifndef KVD_INDEX_LAYOUT_H
#define KVD_INDEX_LAYOUT_H

#include "backend/backend.h"

#define CPU_INDEX_TILE     16u  /* units of a tile */
#define CPU_INDEX_BLOCK    256u /* tokens of a block */
#define CPU_INDEX_GROUP    32u  /* chunks that share channel parameters */
#define CPU_INDEX_KGROUP   64u  /* tokens likewise */
#define CPU_INDEX_CENTROID 16u  /* centroids of a block */
#define CPU_INDEX_SEGMENT  16u  /* blocks clustered together at most */
#define CPU_INDEX_STD      0.4f /* weight of MEAN_STD's deviation */

typedef struct cpu_index_plane {
    kvd_index_elem elem;
    uint32_t       bits;    /* of a code; 16 for BF16 */
    uint32_t       n_unit;  /* a multiple of 16 */
    uint32_t       group;   /* units that share parameters, a multiple of 16 */
    uint32_t       dim;     /* channels */
    uint32_t       dim_pad; /* to whole rows; dim for BF16 */
    uint64_t       tile_bytes;
    uint64_t       param_off, code_off; /* from the lane's start; multiples of 64 */
} cpu_index_plane;

typedef struct cpu_index_shape {
    kvd_index_kind  kind;
    uint32_t        n_chunk; /* of a block */
    uint32_t        chunk_tokens;
    uint32_t        dim;
    uint32_t        n_mark; /* landmark planes, 0 to 2 */
    cpu_index_plane mark[2];
    bool            radius, has_key;
    cpu_index_plane key;
    uint64_t        radius_off, cluster_off;
    uint64_t        bytes; /* of the lane */
} cpu_index_shape;

/* d is valid. */
void cpu_index_shape_of(cpu_index_shape *s, const kvd_index_desc *d);

static inline const uint8_t *cpu_index_lane(const kvd_index_layout *ix, uint64_t iblock,
                                            uint32_t kv_head)
{
    return (const uint8_t *)ix->pool + iblock + ix->lane_off + kv_head * ix->head_stride;
}

/* Channels of one row of 64 bytes. */
static inline uint32_t cpu_index_per_row(const cpu_index_plane *p)
{
    return 32u / p->bits;
}

/* The clustered chunk's centroid, as block * 16 + unit.  An assignment that points outside the
 * sequence (a prefix cut inside a segment) falls back to the chunk's own block. */
static inline uint32_t cpu_index_centroid(uint32_t block, uint32_t n_block, uint8_t in_segment,
                                          uint8_t assigned)
{
    const uint32_t first = block >= in_segment ? block - in_segment : block;
    const uint32_t c     = first * CPU_INDEX_CENTROID + assigned;

    if (block < in_segment || c >= n_block * CPU_INDEX_CENTROID)
        return block * CPU_INDEX_CENTROID + assigned % CPU_INDEX_CENTROID;
    return c;
}

/* A score as the whole number of 2^-40 in it: sums of these do not depend on their order. */
static inline uint64_t cpu_select_mass(float score)
{
    return (uint64_t)(score * 0x1p40f);
}

/* The sum that top_p asks for, of all; more than none. */
static inline uint64_t cpu_select_target(uint64_t all, float top_p)
{
    const uint64_t target = (uint64_t)((double)all * (double)top_p);

    return target ? target : 1;
}

static inline float cpu_select_share(uint64_t mass)
{
    return (float)((double)mass * 0x1p-40);
}

static inline uint32_t cpu_select_n_urgent(uint32_t n_sel)
{
    return n_sel < 16 ? (n_sel > 0) : n_sel / 8;
}

/* [0, 1], NaN as 0. */
static inline float cpu_select_clamp(float x)
{
    x = x > 0.0f ? x : 0.0f;
    return x < 1.0f ? x : 1.0f;
}

static inline uint16_t cpu_select_ema(uint16_t ema, float score, float alpha)
{
    const float old = kvd_f16_to_f32(ema) * (1.0f - alpha);
    const float add = score * (alpha * KVD_EMA_SCALE);

    return kvd_f32_to_f16(old + add);
}

#endif
