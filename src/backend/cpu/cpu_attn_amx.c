/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_attn_amx.c - the tile kernel on AMX, for KV in bf16.
 *
 * The shape of cpu_attn_tile_impl.h: columns are queries, 16 to a group.
 *   S[16 keys][16 columns]  += K[16 keys][32 d]   x Q[32 d][16 columns]
 *   O[16 d][16 columns]     += V^T[16 d][32 keys] x P[32 keys][16 columns]
 * K rows are the left operand as they are; V is transposed once per tile of keys; Q and P are
 * right operands and hold pairs of rows interleaved.  Q is split into two bf16 parts, so scores are
 * as good as in float; P is rounded to bf16, V is bf16 as stored, sums are float.
 * Weights are powers of two: Q carries scale * log2(e).
 *
 * Owns: the tile registers of its thread while it runs. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu_attn.h"
#include "backend/cpu/cpu_attn_walk.h"

#define AMX_KEYS 256u /* keys of a tile: K and V^T take 64 KB of the L2 cache at head_dim 64 */
#define AMX_COLS 16u

typedef struct amx_work {
    const cpu_attn_tile *a;
    uint32_t             n_col, n_group;
    uint32_t             dim, dim32; /* dim32: head_dim rounded up to 32 */
    uint16_t            *q;          /* [n_group][2: high, low][dim32/2][16 columns][2] */
    float               *o;          /* [n_group][dim][16] */
    float               *m, *l;      /* [n_group][16] */
    uint16_t            *k;          /* [AMX_KEYS][dim32] */
    uint16_t            *vt;         /* [dim][AMX_KEYS] */
    float               *s;          /* [AMX_KEYS][16] */
    uint16_t            *p;          /* [AMX_KEYS/2][16][2] */
} amx_work;

/* What LDTILECFG reads: every tile has 16 rows of 64 bytes. */
typedef struct amx_config {
    uint8_t  palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t  n_row[16];
} amx_config;

_Static_assert(sizeof(amx_config) == 64, "the processor's format");

static void amx_configure(void)
{
    amx_config c = { .palette = 1 };

    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = 64;
        c.n_row[i]     = 16;
    }
    _tile_loadconfig(&c);
}

static uint64_t amx_tile_scratch_bytes(uint32_t n_col, uint32_t dim)
{
    const uint64_t n_group = kvd_div_up(n_col, AMX_COLS), dim32 = kvd_align_up(dim, 32);

    return n_group * AMX_COLS * (dim32 * 4 + dim * 4ull + 8) +
           AMX_KEYS * (dim32 * 2 + dim * 2ull + AMX_COLS * 6);
}

static void *amx_take(uint8_t **at, uint64_t bytes)
{
    void *p = *at;

    *at += bytes; /* every piece is a multiple of 64 bytes */
    return p;
}

static amx_work amx_open(const cpu_attn_tile *a)
{
    amx_work w  = { .a = a, .n_col = a->group * a->n_row, .dim = a->kv->head_dim };
    uint8_t *at = a->scratch;
    uint64_t n;

    w.n_group = (uint32_t)kvd_div_up(w.n_col, AMX_COLS);
    w.dim32   = (uint32_t)kvd_align_up(w.dim, 32);
    n         = (uint64_t)w.n_group * AMX_COLS;
    w.q       = amx_take(&at, n * w.dim32 * 4);
    w.o       = amx_take(&at, n * w.dim * 4);
    w.m       = amx_take(&at, n * 4);
    w.l       = amx_take(&at, n * 4);
    w.k       = amx_take(&at, (uint64_t)AMX_KEYS * w.dim32 * 2);
    w.vt      = amx_take(&at, (uint64_t)AMX_KEYS * w.dim * 2);
    w.s       = amx_take(&at, AMX_KEYS * AMX_COLS * 4);
    w.p       = amx_take(&at, AMX_KEYS * AMX_COLS * 2);
    memset(w.q, 0, (size_t)(n * w.dim32 * 4));
    memset(w.o, 0, (size_t)(n * w.dim * 4));
    memset(w.k, 0, (size_t)AMX_KEYS * w.dim32 * 2); /* the columns past head_dim stay zero */
    for (uint64_t i = 0; i < n; i++) {
        w.m[i] = -1e30f;
        w.l[i] = 0.0f;
    }
    return w;
}

/* Columns past the last one repeat it. */
static void amx_load_queries(amx_work *w)
{
    const cpu_attn_tile *a     = w->a;
    const float          scale = a->scale * 1.44269504f;

    for (uint32_t c = 0; c < w->n_group * AMX_COLS; c++) {
        const uint32_t real = c < w->n_col ? c : w->n_col - 1;
        const float   *src =
            a->q + (real / a->group) * a->q_stride + (uint64_t)(real % a->group) * w->dim;
        uint16_t *high = w->q + (uint64_t)(c / AMX_COLS) * 2 * w->dim32 * AMX_COLS;
        uint16_t *low  = high + w->dim32 * AMX_COLS;

        for (uint32_t d = 0; d < w->dim; d++) {
            const uint32_t i = (d / 2) * 2 * AMX_COLS + (c % AMX_COLS) * 2 + d % 2;
            const float    x = src[d] * scale;

            high[i] = kvd_f32_to_bf16(x);
            low[i]  = kvd_f32_to_bf16(x - kvd_bf16_to_f32(high[i]));
        }
    }
}

/* ---- unpacking a tile of keys ---------------------------------------------------- */

/* r[i] dword j becomes r[j] dword i. */
static inline void amx_transpose16(__m512i r[16])
{
    __m512i t[16];

    for (int i = 0; i < 16; i += 2) {
        t[i]     = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* r[i + j]: in each quarter, dword j of rows i .. i + 3 */
        r[i]     = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xee);
        const __m512i c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x44);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xee);

        t[j]      = _mm512_shuffle_i32x4(a, c, 0x88);
        t[4 + j]  = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[8 + j]  = _mm512_shuffle_i32x4(b, d, 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}

/* V^T of 16 dimensions and 32 keys; rows that are NULL count as zero. */
static void amx_transpose_v(const uint8_t *const *row, uint32_t d, uint16_t *vt)
{
    __m512i r[16];

    for (int i = 0; i < 16; i++) {
        __m512i even = _mm512_setzero_si512(), odd = even;

        if (row[2 * i])
            even = _mm512_cvtepu16_epi32(
                _mm256_loadu_si256((const __m256i *)(const void *)(row[2 * i] + 2 * d)));
        if (row[2 * i + 1])
            odd = _mm512_cvtepu16_epi32(
                _mm256_loadu_si256((const __m256i *)(const void *)(row[2 * i + 1] + 2 * d)));
        r[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
    amx_transpose16(r);
    for (int i = 0; i < 16; i++)
        _mm512_storeu_si512(vt + (d + (uint32_t)i) * AMX_KEYS, r[i]);
}

static void amx_load_keys(amx_work *w, attn_walk *walk, uint32_t n)
{
    const uint64_t v_off = cpu_kv_v_off(w->a->kv);
    const uint8_t *row[32];

    for (uint32_t k = 0; k < n; k += 32) {
        for (uint32_t i = 0; i < 32; i++) {
            uint16_t *dst = w->k + (k + i) * w->dim32;

            row[i] = NULL;
            if (k + i < n) {
                const uint8_t *src = attn_walk_next(walk);

                memcpy(dst, src, w->dim * sizeof(uint16_t));
                row[i] = src + v_off;
            } else {
                memset(dst, 0, w->dim * sizeof(uint16_t));
            }
        }
        for (uint32_t d = 0; d < w->dim; d += 16)
            amx_transpose_v(row, d, w->vt + k);
    }
}

/* ---- a group of columns over a tile of keys -------------------------------------- */

/* Scores of n keys, rounded up to 32. */
static void amx_scores(const amx_work *w, uint32_t g, uint32_t n)
{
    const uint16_t *high     = w->q + (uint64_t)g * 2 * w->dim32 * AMX_COLS;
    const uint16_t *low      = high + w->dim32 * AMX_COLS;
    const size_t    k_stride = w->dim32 * sizeof(uint16_t);

    for (uint32_t k = 0; k < n; k += 32) {
        const uint16_t *kr = w->k + k * w->dim32;
        float          *s  = w->s + k * AMX_COLS;

        _tile_zero(0);
        _tile_zero(1);
        for (uint32_t d = 0; d < w->dim32; d += 32) {
            _tile_loadd(4, high + d * AMX_COLS, 64);
            _tile_loadd(2, kr + d, k_stride);
            _tile_dpbf16ps(0, 2, 4);
            _tile_loadd(3, kr + 16 * w->dim32 + d, k_stride);
            _tile_dpbf16ps(1, 3, 4);
            _tile_loadd(5, low + d * AMX_COLS, 64);
            _tile_dpbf16ps(0, 2, 5);
            _tile_dpbf16ps(1, 3, 5);
        }
        _tile_stored(0, s, 64);
        _tile_stored(1, s + 16 * AMX_COLS, 64);
    }
}

static void amx_mask(const amx_work *w, uint32_t col, uint32_t key, uint32_t n)
{
    const cpu_attn_tile *a = w->a;

    for (uint32_t j = 0; j < AMX_COLS; j++) {
        const uint32_t real = col + j < w->n_col ? col + j : w->n_col - 1;
        const uint32_t see  = a->n_past + real / a->group + 1;

        for (uint32_t k = see > key ? see - key : 0; k < n; k++)
            w->s[k * AMX_COLS + j] = -INFINITY;
    }
}

/* 2^x for x <= 0, relative error 2.8e-6 (far below the rounding to bf16), exactly 1 at 0. */
static inline __m512 amx_exp2(__m512 x)
{
    __m512 n, r, p;

    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);
    n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    r = x - n;
    p = _mm512_fmadd_ps(_mm512_set1_ps(0.009582850681f), r, _mm512_set1_ps(0.055906428246f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240240986829f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693124192759f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Rows of two keys, rounded to bf16 (halves upwards) and interleaved; weights are not negative. */
static inline __m512i amx_pair(__m512 even, __m512 odd)
{
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i lo   = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i hi   = _mm512_add_epi32(_mm512_castps_si512(odd), half);

    return _mm512_mask_blend_epi16(0xaaaaaaaau, lo, hi);
}

/* Scores of n keys, a multiple of 32 with -inf for those not seen, to weights p.  Returns what the
 * sums so far are to be multiplied with. */
static __m512 amx_softmax(const amx_work *w, float *m, float *l, uint32_t n)
{
    const __m512 old = _mm512_load_ps(m);
    __m512       max = old, max1 = old, sum = _mm512_setzero_ps(), sum1 = sum, alpha;

    for (uint32_t k = 0; k < n; k += 2) {
        max  = _mm512_max_ps(max, _mm512_load_ps(w->s + k * AMX_COLS));
        max1 = _mm512_max_ps(max1, _mm512_load_ps(w->s + (k + 1) * AMX_COLS));
    }
    max = _mm512_max_ps(max, max1);
    for (uint32_t k = 0; k < n; k += 2) {
        const __m512 x = amx_exp2(_mm512_load_ps(w->s + k * AMX_COLS) - max);
        const __m512 y = amx_exp2(_mm512_load_ps(w->s + (k + 1) * AMX_COLS) - max);

        sum  = sum + x;
        sum1 = sum1 + y;
        _mm512_store_si512(w->p + k * AMX_COLS, amx_pair(x, y));
    }
    alpha = amx_exp2(old - max);
    _mm512_store_ps(m, max);
    _mm512_store_ps(l, _mm512_fmadd_ps(_mm512_load_ps(l), alpha, sum + sum1));
    return alpha;
}

/* O of four blocks of 16 dimensions from d on, or of one. */
static void amx_values4(const amx_work *w, float *o, uint32_t d, uint32_t n)
{
    const uint16_t *vt = w->vt + d * AMX_KEYS;

    o += d * AMX_COLS;
    _tile_loadd(0, o, 64);
    _tile_loadd(1, o + 256, 64);
    _tile_loadd(2, o + 512, 64);
    _tile_loadd(3, o + 768, 64);
    for (uint32_t k = 0; k < n; k += 32) {
        _tile_loadd(6, w->p + k * AMX_COLS, 64);
        _tile_loadd(4, vt + k, AMX_KEYS * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, vt + 16 * AMX_KEYS + k, AMX_KEYS * 2);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(4, vt + 32 * AMX_KEYS + k, AMX_KEYS * 2);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, vt + 48 * AMX_KEYS + k, AMX_KEYS * 2);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, o, 64);
    _tile_stored(1, o + 256, 64);
    _tile_stored(2, o + 512, 64);
    _tile_stored(3, o + 768, 64);
}

static void amx_values1(const amx_work *w, float *o, uint32_t d, uint32_t n)
{
    const uint16_t *vt = w->vt + d * AMX_KEYS;

    o += d * AMX_COLS;
    _tile_loadd(0, o, 64);
    for (uint32_t k = 0; k < n; k += 32) {
        _tile_loadd(6, w->p + k * AMX_COLS, 64);
        _tile_loadd(4, vt + k, AMX_KEYS * 2);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, o, 64);
}

static void amx_values(const amx_work *w, float *o, __m512 alpha, uint32_t n)
{
    uint32_t d = 0;

    if (_mm512_cmp_ps_mask(alpha, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ)) {
        for (uint32_t i = 0; i < w->dim * AMX_COLS; i += AMX_COLS)
            _mm512_store_ps(o + i, _mm512_load_ps(o + i) * alpha);
    }
    for (; d + 64 <= w->dim; d += 64)
        amx_values4(w, o, d, n);
    for (; d < w->dim; d += 16)
        amx_values1(w, o, d, n);
}

static void amx_group(const amx_work *w, uint32_t g, uint32_t key, uint32_t n)
{
    const cpu_attn_tile *a    = w->a;
    const uint32_t       col  = g * AMX_COLS;
    const uint32_t       last = col + AMX_COLS < w->n_col ? col + AMX_COLS - 1 : w->n_col - 1;
    const uint32_t see = a->n_past + last / a->group + 1, least = a->n_past + col / a->group + 1;
    uint32_t       n32;
    __m512         alpha;

    if (see <= key)
        return;
    n   = see - key < n ? see - key : n;
    n32 = (uint32_t)kvd_align_up(n, 32);
    amx_scores(w, g, n);
    if (least < key + n32) /* also what lies between n and n32 */
        amx_mask(w, col, key, n32);
    alpha = amx_softmax(w, w->m + col, w->l + col, n32);
    amx_values(w, w->o + (uint64_t)g * w->dim * AMX_COLS, alpha, n);
}

static void amx_store(const amx_work *w)
{
    const cpu_attn_tile *a = w->a;

    for (uint32_t c = 0; c < w->n_col; c++) {
        const float  inv = 1.0f / w->l[c];
        const float *src = w->o + (uint64_t)(c / AMX_COLS) * w->dim * AMX_COLS + c % AMX_COLS;
        float *dst = a->out + (c / a->group) * a->out_stride + (uint64_t)(c % a->group) * w->dim;

        for (uint32_t d = 0; d < w->dim; d++)
            dst[d] = src[d * AMX_COLS] * inv;
    }
}

static void amx_tile(const cpu_attn_tile *a)
{
    const uint32_t n_key = a->n_past + a->n_row;
    amx_work       w     = amx_open(a);
    attn_walk      walk  = attn_walk_from(a->kv, a->block, a->kv_head, 0);

    amx_configure();
    amx_load_queries(&w);
    for (uint32_t key = 0; key < n_key; key += AMX_KEYS) {
        const uint32_t n = n_key - key < AMX_KEYS ? n_key - key : AMX_KEYS;

        amx_load_keys(&w, &walk, n);
        for (uint32_t g = 0; g < w.n_group; g++)
            amx_group(&w, g, key, n);
    }
    _tile_release();
    amx_store(&w);
}

const cpu_attn_tile_kernel cpu_attn_tile_amx = { .min_cols      = 12,
                                                 .scratch_bytes = amx_tile_scratch_bytes,
                                                 .run           = amx_tile };
