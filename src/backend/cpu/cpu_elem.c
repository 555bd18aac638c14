/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_elem.c - embed, norms, rope and swiglu: one row at a time by the level's kernels.
 *
 * A row is the unit whoever computes it, so results depend neither on the batch nor on the number
 * of threads.  Little work runs on the caller; waking the pool costs more than it saves.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cpu/cpu_elem.h"

#include "backend/cpu/cpu.h"

/* Elements below which the caller works alone, and elements of one item of the pool.  A vector
 * kernel does 8K elements in about as long as the pool takes to start and join. */
#define ELEM_ALONE 32768u
#define ELEM_ITEM  16384u

typedef struct elem_job {
    const cpu_elem_kernels *k;
    const void             *args;
    void (*rows)(const struct elem_job *, uint32_t first, uint32_t end);
    uint32_t n_row, item_rows;
} elem_job;

static const cpu_elem_kernels *elem_kernels(const cpu_backend *be)
{
    if (be->isa >= OS_ISA_AVX512)
        return &cpu_elem_avx512;
    return be->isa == OS_ISA_AVX2 ? &cpu_elem_avx2 : &cpu_elem_portable;
}

static void elem_item(void *ctx, uint32_t item, uint32_t thread)
{
    const elem_job *j     = ctx;
    const uint32_t  first = item * j->item_rows;

    (void)thread;
    j->rows(j, first, j->n_row - first < j->item_rows ? j->n_row : first + j->item_rows);
}

static void elem_run(cpu_backend *be, elem_job *j, uint64_t row_elems)
{
    j->k = elem_kernels(be);
    if (j->n_row * row_elems < ELEM_ALONE || j->n_row < 2 || be->base.n_thread < 2) {
        j->rows(j, 0, j->n_row);
        return;
    }
    j->item_rows = (uint32_t)kvd_max_u64(1, ELEM_ITEM / kvd_max_u64(1, row_elems));
    os_pool_run(be->pool, (uint32_t)kvd_div_up(j->n_row, j->item_rows), elem_item, j);
}

/* ---- embed ----------------------------------------------------------------------- */

static void elem_embed_rows(const elem_job *j, uint32_t first, uint32_t end)
{
    const kvd_embed_args *a = j->args;

    for (uint32_t t = first; t < end; t++) {
        kvd_assert(a->token[t] >= 0 && (uint32_t)a->token[t] < a->table.n_row);
        kvd_dequantize(a->table.type,
                       (const uint8_t *)a->table.data + (uint64_t)a->token[t] * a->table.row_bytes,
                       a->out + (uint64_t)t * a->table.n_col, a->table.n_col);
    }
}

kvd_status cpu_embed(kvd_stream *st, const kvd_embed_args *a, kvd_err *err)
{
    elem_job j = { .args = a, .rows = elem_embed_rows, .n_row = a->n_token };

    (void)err;
    elem_run(st->be, &j, a->table.n_col);
    return KVD_OK;
}

/* ---- norms ----------------------------------------------------------------------- */

static void elem_rms_norm_rows(const elem_job *j, uint32_t first, uint32_t end)
{
    const kvd_rms_norm_args *a = j->args;

    for (uint32_t r = first; r < end; r++)
        j->k->norm(a->x + r * a->x_stride, a->w, a->out + r * a->out_stride, a->n_col, a->eps);
}

kvd_status cpu_rms_norm(kvd_stream *st, const kvd_rms_norm_args *a, kvd_err *err)
{
    elem_job j = { .args = a, .rows = elem_rms_norm_rows, .n_row = a->n_row };

    (void)err;
    elem_run(st->be, &j, a->n_col);
    return KVD_OK;
}

static void elem_head_norm_rows(const elem_job *j, uint32_t first, uint32_t end)
{
    const kvd_head_norm_args *a = j->args;

    for (uint32_t t = first; t < end; t++) {
        float *x = a->x + t * a->x_stride;

        for (uint32_t h = 0; h < a->n_head; h++, x += a->head_dim)
            j->k->norm(x, a->w, x, a->head_dim, a->eps);
    }
}

kvd_status cpu_head_norm(kvd_stream *st, const kvd_head_norm_args *a, kvd_err *err)
{
    elem_job j = { .args = a, .rows = elem_head_norm_rows, .n_row = a->n_token };

    (void)err;
    elem_run(st->be, &j, (uint64_t)a->n_head * a->head_dim);
    return KVD_OK;
}

/* ---- rope ------------------------------------------------------------------------ */

static void elem_rope_rows(const elem_job *j, uint32_t first, uint32_t end)
{
    const kvd_rope_args *a = j->args;

    for (uint32_t t = first; t < end; t++) {
        float       *x  = a->x + t * a->x_stride;
        const float *cs = a->cos_sin + (uint64_t)t * a->n_rot;

        if (a->neox)
            j->k->rope_neox(x, a->n_head, a->head_dim, a->n_rot, cs);
        else
            j->k->rope_pairs(x, a->n_head, a->head_dim, a->n_rot, cs);
    }
}

kvd_status cpu_rope(kvd_stream *st, const kvd_rope_args *a, kvd_err *err)
{
    elem_job j = { .args = a, .rows = elem_rope_rows, .n_row = a->n_token };

    (void)err;
    kvd_assert(a->n_rot % 2 == 0 && a->n_rot <= a->head_dim);
    elem_run(st->be, &j, (uint64_t)a->n_head * a->n_rot);
    return KVD_OK;
}

/* ---- swiglu ---------------------------------------------------------------------- */

static void elem_swiglu_rows(const elem_job *j, uint32_t first, uint32_t end)
{
    const kvd_swiglu_args *a = j->args;

    for (uint32_t t = first; t < end; t++)
        j->k->swiglu(a->gate + t * a->gate_stride, a->up + t * a->up_stride,
                     a->out + t * a->out_stride, a->n_col);
}

kvd_status cpu_swiglu(kvd_stream *st, const kvd_swiglu_args *a, kvd_err *err)
{
    elem_job j = { .args = a, .rows = elem_swiglu_rows, .n_row = a->n_token };

    (void)err;
    elem_run(st->be, &j, 4 * (uint64_t)a->n_col); /* an exp weighs about four plain elements */
    return KVD_OK;
}
