/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm_amx.c - bf16 tiles: 32 tokens x 32 rows a time, 2 x 2 tiles of sums.
 *
 * Tokens are the left operand, so a tile of sums is [token][row] as y wants it and goes there
 * without a transpose.  Edges compute whole tiles over zero padding; only the store is cut.
 *
 * Tile registers: 0..3 sums (token tile, row tile), 4 5 tokens, 6 7 weights.  They are configured
 * at the start of an item and released at its end, so no other code meets them. */
#include "backend/cpu/cpu_gemm_epilogue_avx512.h"

#define AMX_INLINE static inline __attribute__((always_inline))

typedef struct amx_config { /* the processor's format */
    uint8_t  palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t  n_row[16];
} amx_config;
_Static_assert(sizeof(amx_config) == 64, "amx_config is the operand of ldtilecfg");

/* All eight tiles whole.  A constant in memory: gcc 12 tells its optimiser that ldtilecfg reads
 * eight bytes only, and would drop the other stores to a local. */
static const _Alignas(64) amx_config amx_whole_tiles = {
    .palette   = 1,
    .row_bytes = { 64, 64, 64, 64, 64, 64, 64, 64 },
    .n_row     = { 16, 16, 16, 16, 16, 16, 16, 16 },
};

static void amx_begin(void)
{
    _tile_loadconfig(&amx_whole_tiles);
}

static void amx_end(void)
{
    _tile_release();
}

/* One group of tiles: where its operands and its sums are. */
typedef struct amx_group {
    const uint8_t *x0, *x1, *w0, *w1;
    float         *acc;
    uint64_t       acc_stride; /* elements */
} amx_group;

/* Loads or clears the sums of n_token x n_row tiles. */
AMX_INLINE void amx_load(const amx_group *g, bool clear, int n_token, int n_row)
{
    const uint64_t stride = g->acc_stride * sizeof(float);

    if (clear) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, g->acc, stride);
    if (n_row == 2)
        _tile_loadd(1, g->acc + 16, stride);
    if (n_token == 2)
        _tile_loadd(2, g->acc + 16 * g->acc_stride, stride);
    if (n_token == 2 && n_row == 2)
        _tile_loadd(3, g->acc + 16 * g->acc_stride + 16, stride);
}

AMX_INLINE void amx_store(float *c, uint64_t c_stride, int n_token, int n_row)
{
    const uint64_t stride = c_stride * sizeof(float);

    _tile_stored(0, c, stride);
    if (n_row == 2)
        _tile_stored(1, c + 16, stride);
    if (n_token == 2)
        _tile_stored(2, c + 16 * c_stride, stride);
    if (n_token == 2 && n_row == 2)
        _tile_stored(3, c + 16 * c_stride + 16, stride);
}

AMX_INLINE void amx_steps(const amx_group *g, uint32_t n_step, int n_token, int n_row)
{
    for (uint64_t s = 0; s < n_step; s++) {
        const uint64_t at = s * GEMM_STEP_BYTES;

        _tile_loadd(6, g->w0 + at, 64);
        _tile_loadd(4, g->x0 + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (n_row == 2) {
            _tile_loadd(7, g->w1 + at, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (n_token == 2) {
            _tile_loadd(5, g->x1 + at, 64);
            _tile_dpbf16ps(2, 5, 6);
            if (n_row == 2)
                _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* n_token, n_row: tiles (constants); first_token: of the group. */
AMX_INLINE void amx_run(const gemm_block *b, uint32_t first_token, int n_token, int n_row)
{
    _Alignas(64) float buf[32][32];
    const uint8_t     *x      = (const uint8_t *)b->x + first_token / GEMM_TOKEN_TILE * b->x_stride;
    const uint8_t     *w      = b->panel;
    const uint32_t     n_left = b->n_token - first_token;
    const amx_group    g      = { x,
                                  x + b->x_stride,
                                  w,
                                  w + b->panel_stride,
                                  b->acc + first_token * b->acc_stride,
                                  b->acc_stride };

    amx_load(&g, b->first, n_token, n_row);
    amx_steps(&g, (b->n_k + GEMM_STEP - 1) / GEMM_STEP, n_token, n_row);
    if (!b->last) {
        amx_store(g.acc, g.acc_stride, n_token, n_row);
    } else if (!b->bias && !b->add && n_left >= 16 * (uint32_t)n_token &&
               b->n_row == 16 * (uint32_t)n_row) {
        amx_store(b->y + first_token * b->y_stride, b->y_stride, n_token, n_row);
    } else {
        amx_store(buf[0], 32, n_token, n_row);
        for (uint32_t t = 0; t < 16 * (uint32_t)n_token && t < n_left; t++)
            for (uint32_t r = 0; r < 16 * (uint32_t)n_row; r += 16)
                gemm_finish(b, first_token + t, r, _mm512_load_ps(&buf[t][r]));
    }
}

static void amx_block(const gemm_block *b)
{
    const uint32_t n_tile = (b->n_token + GEMM_TOKEN_TILE - 1) / GEMM_TOKEN_TILE;
    uint32_t       t      = 0;

    if (b->n_row > GEMM_ROW_TILE) {
        for (; t + 2 <= n_tile; t += 2)
            amx_run(b, t * GEMM_TOKEN_TILE, 2, 2);
        if (t < n_tile)
            amx_run(b, t * GEMM_TOKEN_TILE, 1, 2);
    } else {
        for (; t + 2 <= n_tile; t += 2)
            amx_run(b, t * GEMM_TOKEN_TILE, 2, 1);
        if (t < n_tile)
            amx_run(b, t * GEMM_TOKEN_TILE, 1, 1);
    }
}

const gemm_kernel cpu_gemm_amx = { .packed    = true,
                                   .k_block   = 320,
                                   .min_token = 15,
                                   .pack      = cpu_pack_bf16,
                                   .unpack    = cpu_unpack_bf16,
                                   .begin     = amx_begin,
                                   .end       = amx_end,
                                   .block     = amx_block };
