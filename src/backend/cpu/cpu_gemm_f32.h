/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm_f32.h - private: the float levels of cpu_gemm, written once with vector extensions.
 *
 * The including file says how wide it is:
 *   F32_BYTES   of a vector register (16, 32, 64)
 *   F32_TOKENS  tokens in one block of sums
 *   F32_TILES   row tiles in one block of sums (1 or 2)
 *   F32_MIN     tokens from which it is worth its while
 *   F32_NAME    the kernel's name
 * Sums live in F32_TOKENS x F32_TILES x (64 / F32_BYTES) registers.  Every sum adds its products in
 * the order of k, so a block's shape does not change a result. */
#include "backend/cpu/cpu_gemm_kernel.h"
#include "backend/cpu/cpu_unpack.h"

#define F32_LANES (F32_BYTES / 4)
#define F32_VECS  (GEMM_ROW_TILE / F32_LANES) /* of a row tile */

typedef float    f32_vec __attribute__((vector_size(F32_BYTES), aligned(4), may_alias));
typedef uint32_t u32x4 __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t  i32x4 __attribute__((vector_size(16), aligned(1), may_alias));
typedef float    f32x4 __attribute__((vector_size(16), aligned(4), may_alias));

/* ---- panels ---------------------------------------------------------------------- */

UNPACK_INLINE void f32_transpose(u32x4 v[4])
{
    const u32x4 a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
    const u32x4 b = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
    const u32x4 c = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
    const u32x4 d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);

    v[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
    v[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
    v[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
    v[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

/* 16 elements of 4 rows: the bytes are transposed as words, so that lanes are rows. */
UNPACK_INLINE void f32_expand_4(const unpack_unit *u, const unpack_affine *a, int half, int group,
                                float *panel)
{
    const f32x4 scale  = *(const f32x4 *)&a->scale[half][4 * group];
    const f32x4 offset = *(const f32x4 *)&a->offset[half][4 * group];
    u32x4       v[4];

    for (int i = 0; i < 4; i++)
        v[i] = *(const u32x4 *)(const void *)u->q[half][i][group];
    f32_transpose(v);
    for (int i = 0; i < 4; i++) {
        for (int byte = 0; byte < 4; byte++) {
            const i32x4 q = (i32x4)((v[i] >> (8 * byte)) & 255);

            *(f32x4 *)(panel + (4 * i + byte) * GEMM_ROW_TILE) =
                __builtin_convertvector(q, f32x4) * scale + offset;
        }
    }
}

UNPACK_INLINE void f32_expand(const unpack_unit *u, const unpack_affine *a, void *panel)
{
    for (int half = 0; half < 2; half++)
        for (int group = 0; group < 4; group++)
            f32_expand_4(u, a, half, group, (float *)panel + half * 16 * GEMM_ROW_TILE + 4 * group);
}

static void f32_unpack_floats(kvd_dtype type, const uint8_t *row, uint64_t row_bytes,
                              uint32_t n_row, uint32_t first, uint32_t n_k, float *panel)
{
    float f[GEMM_ROW_TILE][GEMM_STEP];

    memset(f, 0, sizeof(f));
    for (uint32_t k = 0; k < n_k; k += GEMM_STEP) {
        const uint32_t n = n_k - k < GEMM_STEP ? n_k - k : GEMM_STEP;

        for (uint32_t r = 0; r < n_row; r++)
            unpack_float_row(type, row + r * row_bytes, first + k, n, f[r]);
        for (uint32_t g = 0; g < GEMM_ROW_TILE; g += 4) {
            for (uint32_t j = 0; j < n; j += 4) {
                u32x4 v[4];

                for (uint32_t i = 0; i < 4; i++)
                    v[i] = *(const u32x4 *)(const void *)&f[g + i][j];
                f32_transpose(v);
                for (uint32_t i = 0; i < 4 && j + i < n; i++)
                    *(u32x4 *)(void *)&panel[(j + i) * GEMM_ROW_TILE + g] = v[i];
            }
        }
        panel += GEMM_STEP * GEMM_ROW_TILE;
    }
}

static void f32_unpack(kvd_dtype type, const uint8_t *row, uint64_t row_bytes, uint32_t n_row,
                       uint32_t first, uint32_t n_k, void *panel)
{
    switch (type) {
        UNPACK_QUANTISED_CASES(f32_expand, row, row_bytes, n_row, first, n_k, panel,
                               GEMM_STEP * GEMM_ROW_TILE * sizeof(float))
    case KVD_DTYPE_F32:
    case KVD_DTYPE_F16:
    case KVD_DTYPE_BF16:
        f32_unpack_floats(type, row, row_bytes, n_row, first, n_k, panel);
        break;
    }
}

/* ---- products -------------------------------------------------------------------- */

/* Sums of one row tile and token, finished, go to y; rows that do not exist are cut. */
UNPACK_INLINE void f32_finish(const gemm_block *b, uint32_t token, uint32_t row,
                              const f32_vec sum[F32_VECS])
{
    float         *y     = b->y + token * b->y_stride + row;
    const float   *bias  = b->bias ? b->bias + row : NULL;
    const uint32_t n_row = b->n_row - row;
    float          edge[GEMM_ROW_TILE];

    if (n_row >= GEMM_ROW_TILE) {
        for (uint32_t v = 0; v < F32_VECS; v++) {
            f32_vec s = sum[v];

            if (bias)
                s += *(const f32_vec *)(bias + v * F32_LANES);
            if (b->add)
                s += *(const f32_vec *)(y + v * F32_LANES);
            *(f32_vec *)(y + v * F32_LANES) = s;
        }
        return;
    }
    memcpy(edge, sum, sizeof(edge));
    for (uint32_t r = 0; r < n_row; r++) {
        const float s = bias ? edge[r] + bias[r] : edge[r];

        y[r] = b->add ? s + y[r] : s;
    }
}

/* n_token tokens (<= F32_TOKENS) from token on, n_tile row tiles from row on: constants. */
UNPACK_INLINE void f32_run(const gemm_block *b, uint32_t token, uint32_t row, uint32_t n_token,
                           uint32_t n_tile)
{
    const uint64_t tile_floats = b->panel_stride / sizeof(float);
    const float   *w           = (const float *)b->panel + row / GEMM_ROW_TILE * tile_floats;
    const uint8_t *x           = (const uint8_t *)b->x + token * b->x_stride;
    float         *acc         = b->acc + token * b->acc_stride + row;
    f32_vec        sum[F32_TOKENS][2][F32_VECS];

    for (uint32_t t = 0; t < n_token; t++)
        for (uint32_t i = 0; i < n_tile; i++)
            for (uint32_t v = 0; v < F32_VECS; v++)
                sum[t][i][v] = b->first ? (f32_vec){ 0 }
                                        : *(const f32_vec *)(acc + t * b->acc_stride +
                                                             i * GEMM_ROW_TILE + v * F32_LANES);
    for (uint32_t k = 0; k < b->n_k; k++) {
        f32_vec a[2][F32_VECS];

        for (uint32_t i = 0; i < n_tile; i++)
            for (uint32_t v = 0; v < F32_VECS; v++)
                a[i][v] = *(const f32_vec *)(w + i * tile_floats + v * F32_LANES);
        for (uint32_t t = 0; t < n_token; t++) {
            const float s = *(const float *)(const void *)(x + t * b->x_stride + 4 * (uint64_t)k);

            for (uint32_t i = 0; i < n_tile; i++)
                for (uint32_t v = 0; v < F32_VECS; v++)
                    sum[t][i][v] += a[i][v] * s;
        }
        w += GEMM_ROW_TILE;
    }
    for (uint32_t t = 0; t < n_token; t++) {
        for (uint32_t i = 0; i < n_tile; i++) {
            if (b->last) {
                f32_finish(b, token + t, row + i * GEMM_ROW_TILE, sum[t][i]);
                continue;
            }
            for (uint32_t v = 0; v < F32_VECS; v++)
                *(f32_vec *)(acc + t * b->acc_stride + i * GEMM_ROW_TILE + v * F32_LANES) =
                    sum[t][i][v];
        }
    }
}

UNPACK_INLINE void f32_tokens(const gemm_block *b, uint32_t row, uint32_t n_tile)
{
    uint32_t t = 0;

    for (; t + F32_TOKENS <= b->n_token; t += F32_TOKENS)
        f32_run(b, t, row, F32_TOKENS, n_tile);
    if (F32_TOKENS > 4 && t + 4 <= b->n_token) {
        f32_run(b, t, row, 4, n_tile);
        t += 4;
    }
    for (; t < b->n_token; t++)
        f32_run(b, t, row, 1, n_tile);
}

static void f32_block(const gemm_block *b)
{
    uint32_t row = 0;

    if (F32_TILES == 2 && b->n_row > GEMM_ROW_TILE) {
        f32_tokens(b, 0, 2);
        row = 2 * GEMM_ROW_TILE;
    }
    for (; row < b->n_row; row += GEMM_ROW_TILE)
        f32_tokens(b, row, 1);
}

static void f32_nothing(void)
{
}

const gemm_kernel F32_NAME = { .packed    = false,
                               .k_block   = 256,
                               .min_token = F32_MIN,
                               .pack      = NULL,
                               .unpack    = f32_unpack,
                               .begin     = f32_nothing,
                               .end       = f32_nothing,
                               .block     = f32_block };
