/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_dot_flt_impl.h - dot products on float activations, compiled once per level: F32, F16 and
 * BF16 weights as stored, any other type through the dequantiser, four rows at a time.
 *
 * The including file defines dot_flt_level(job) as its kernel by this text.  See cpu_dot.h. */
#include "backend/cpu/cpu_dot_tile.h"
#include "backend/cpu/cpu_vec.h"

typedef vf (*flt_load)(const uint8_t *row, uint32_t i);

/* Elements i .. i + CPU_VEC_W of a row. */
DOT_INLINE vf flt_load_f32(const uint8_t *row, uint32_t i)
{
    float v[CPU_VEC_W];

    memcpy(v, row + (uint64_t)4 * i, sizeof(v));
    return vf_load(v);
}

DOT_INLINE vf flt_load_f16(const uint8_t *row, uint32_t i)
{
    const uint8_t *p = row + (uint64_t)2 * i;

#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
#else
    float v[CPU_VEC_W];

    kvd_dequantize(KVD_DTYPE_F16, p, v, CPU_VEC_W);
    return vf_load(v);
#endif
}

DOT_INLINE vf flt_load_bf16(const uint8_t *row, uint32_t i)
{
    uint16_t v[CPU_VEC_W];

    memcpy(v, row + (uint64_t)2 * i, sizeof(v));
    return vf_load_bf16(v);
}

/* The last n_col % CPU_VEC_W elements. */
DOT_INLINE void flt_tail(kvd_dtype type, uint32_t element_bytes, const cpu_dot_job *job,
                         const uint8_t *const *row, const float *const *x, uint32_t n_token,
                         vf (*acc)[CPU_DOT_ROWS])
{
    const uint32_t n = job->n_col % CPU_VEC_W, i = job->n_col - n;

    for (uint32_t r = 0; r < CPU_DOT_ROWS; r++) {
        float w[CPU_VEC_W] = { 0 };

        kvd_dequantize(type, row[r] + (uint64_t)element_bytes * i, w, n);
        for (uint32_t t = 0; t < n_token; t++)
            acc[t][r] = vf_fma(vf_load(w), vf_loadn(x[t] + i, n), acc[t][r]);
    }
}

DOT_INLINE void flt_tokens(kvd_dtype type, flt_load load, const cpu_dot_job *job,
                           const uint8_t *const *row, uint32_t first, uint32_t token,
                           uint32_t n_token)
{
    const uint32_t end = job->n_col - job->n_col % CPU_VEC_W;
    const float   *x[CPU_DOT_TOKENS];
    vf             acc[CPU_DOT_TOKENS][CPU_DOT_ROWS];
    float          sum[CPU_DOT_TOKENS][CPU_DOT_ROWS];

    for (uint32_t t = 0; t < n_token; t++) {
        x[t] = (const float *)job->x + (token + t) * job->x_stride;
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++)
            acc[t][r] = vf_set1(0.0F);
    }
    for (uint32_t i = 0; i < end; i += CPU_VEC_W)
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++) {
            const vf w = load(row[r], i);

            for (uint32_t t = 0; t < n_token; t++)
                acc[t][r] = vf_fma(w, vf_load(x[t] + i), acc[t][r]);
        }
    if (end < job->n_col)
        flt_tail(type, type == KVD_DTYPE_F32 ? 4 : 2, job, row, x, n_token, acc);
    for (uint32_t t = 0; t < n_token; t++) {
        for (uint32_t r = 0; r < CPU_DOT_ROWS; r++) {
            float lane[CPU_VEC_W];

            vf_store(lane, vf_group_add(acc[t][r], CPU_VEC_W));
            sum[t][r] = lane[0];
        }
        cpu_dot_store(job, first, job->n_row - first, token + t, sum[t]);
    }
}

/* Four rows of one type meet all tokens. */
DOT_INLINE void flt_rows(kvd_dtype type, flt_load load, const cpu_dot_job *job,
                         const uint8_t *const *row, uint32_t first)
{
    uint32_t token = 0;

    for (; CPU_VEC_W == 16 && token + 4 <= job->n_token; token += 4)
        flt_tokens(type, load, job, row, first, token, 4);
    for (; token + 2 <= job->n_token; token += 2)
        flt_tokens(type, load, job, row, first, token, 2);
    if (token < job->n_token)
        flt_tokens(type, load, job, row, first, token, 1);
}

static void flt_rows_f32(const cpu_dot_job *job, const uint8_t *const *row, uint32_t first)
{
    flt_rows(KVD_DTYPE_F32, flt_load_f32, job, row, first);
}

static void flt_rows_f16(const cpu_dot_job *job, const uint8_t *const *row, uint32_t first)
{
    flt_rows(KVD_DTYPE_F16, flt_load_f16, job, row, first);
}

static void flt_rows_bf16(const cpu_dot_job *job, const uint8_t *const *row, uint32_t first)
{
    flt_rows(KVD_DTYPE_BF16, flt_load_bf16, job, row, first);
}

static void flt_rows_dequantized(const cpu_dot_job *job, const uint8_t *const *row, uint32_t first)
{
    const uint64_t stride = kvd_align_up(job->n_col, 16);
    const uint8_t *flt[CPU_DOT_ROWS];

    for (uint32_t r = 0; r < CPU_DOT_ROWS; r++) {
        const bool repeats = r > 0 && row[r] == row[r - 1];

        flt[r] = repeats ? flt[r - 1] : (const uint8_t *)(job->rows + r * stride);
        if (!repeats)
            kvd_dequantize(job->type, row[r], job->rows + r * stride, job->n_col);
    }
    flt_rows_f32(job, flt, first);
}

static void dot_flt_level(const cpu_dot_job *job)
{
    for (uint32_t first = 0; first < job->n_row; first += CPU_DOT_ROWS) {
        dot_tile tile;

        dot_tile_rows(job, first, &tile);
        if (job->type == KVD_DTYPE_F32)
            flt_rows_f32(job, tile.row, first);
        else if (job->type == KVD_DTYPE_F16)
            flt_rows_f16(job, tile.row, first);
        else if (job->type == KVD_DTYPE_BF16)
            flt_rows_bf16(job, tile.row, first);
        else
            flt_rows_dequantized(job, tile.row, first);
    }
}
