/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_matmul.c - the matmul op: y_i = x W_i^T for up to four weights that share x.
 *
 * Many tokens go to cpu_gemm(), few to dot products on the stored types: x is quantised once for
 * all weights (cpu_dot.h), then one job of the pool covers the rows of all weights.  A
 * deterministic backend takes the second way always, since only there a token's bits do not depend
 * on how many others come along; a precise one keeps x as floats.
 *
 * Scratch: [groups of a slice of tokens][per thread: CPU_DOT_ROWS dequantised rows].
 * Thread: the backend's; items run on its pool. */
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_dot.h"
#include "backend/cpu/cpu_gemm.h"

#define SLICE_TOKENS     64         /* that are quantised at a time: bounds scratch, stays in L2 */
#define ITEM_BYTES_MIN   (16 << 10) /* of weights, times the work per byte */
#define ITEMS_PER_THREAD 6          /* at most, so that a thread that comes late costs little */
#define QUANT_PARALLEL   16384      /* elements of x from which quantising is worth a job */

typedef struct matmul_plan {
    const kvd_matmul_args *a;
    const cpu_dot_level   *level;
    bool                   precise;
    uint32_t               first_token, n_token; /* of this slice */
    uint64_t               n_group;              /* of one token */
    cpu_xgroup            *group;
    float                 *rows; /* [n_thread][CPU_DOT_ROWS * row_floats] */
    uint64_t               row_floats;
    uint32_t               item_rows[KVD_MATMUL_OUT_MAX];
    uint32_t               first_item[KVD_MATMUL_OUT_MAX + 1];
} matmul_plan;

static const cpu_dot_level *matmul_level(const cpu_backend *be)
{
    if (be->vnni)
        return &cpu_dot_avx512vnni;
    if (be->isa >= OS_ISA_AVX2) /* decode is bound by memory: AVX-512 without VNNI gains nothing */
        return &cpu_dot_avx2;
    return &cpu_dot_portable;
}

/* NULL: this weight meets float activations. */
static cpu_dot_fn matmul_quant_fn(const matmul_plan *p, const kvd_weight *w)
{
    return p->precise || p->a->n_col % 32 != 0 ? NULL : p->level->quant[w->type];
}

/* ---- scratch --------------------------------------------------------------------- */

static uint64_t matmul_group_bytes(uint32_t n_token, uint32_t n_col)
{
    return n_token * kvd_div_up(n_col, CPU_XGROUP) * sizeof(cpu_xgroup);
}

static uint64_t matmul_row_floats(uint32_t n_col)
{
    return kvd_align_up(n_col, 16);
}

static uint64_t matmul_dot_bytes(const cpu_backend *be, uint32_t n_token, uint32_t n_col)
{
    const uint32_t n_slice = n_token < SLICE_TOKENS ? n_token : SLICE_TOKENS;

    return matmul_group_bytes(n_slice, n_col) +
           be->base.n_thread * CPU_DOT_ROWS * matmul_row_floats(n_col) * sizeof(float);
}

uint64_t cpu_matmul_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim)
{
    return kvd_max_u64(matmul_dot_bytes(be, lim->n_token, lim->n_col),
                       cpu_gemm_scratch_bytes(be, lim));
}

/* ---- activations ----------------------------------------------------------------- */

static void matmul_quantize(void *ctx, uint32_t item, uint32_t thread)
{
    const matmul_plan *p = ctx;
    const uint64_t     t = (uint64_t)p->first_token + item;

    (void)thread;
    p->level->quantize(p->a->x + t * p->a->x_stride, p->a->n_col, p->group + item * p->n_group);
}

static void matmul_quantize_all(cpu_backend *be, matmul_plan *p)
{
    bool needed = false;

    for (uint32_t i = 0; i < p->a->n_out; i++)
        needed |= matmul_quant_fn(p, &p->a->out[i].w) != NULL;
    if (!needed)
        return;
    if (p->n_token > 1 && (uint64_t)p->n_token * p->a->n_col >= QUANT_PARALLEL) {
        os_pool_run(be->pool, p->n_token, matmul_quantize, p);
        return;
    }
    for (uint32_t t = 0; t < p->n_token; t++)
        matmul_quantize(p, t, 0);
}

/* ---- work split ------------------------------------------------------------------ */

/* Cuts the rows of all outputs into items of about equal cost; returns how many. */
static uint32_t matmul_split(const cpu_backend *be, matmul_plan *p)
{
    const kvd_matmul_args *a     = p->a;
    const uint64_t         work  = 1 + p->n_token / 4; /* tokens share loads and unpacking */
    uint64_t               bytes = 0, item_bytes;
    uint32_t               n     = 0;

    for (uint32_t i = 0; i < a->n_out; i++)
        bytes += a->out[i].w.n_row * a->out[i].w.row_bytes;
    item_bytes =
        be->base.n_thread == 1
            ? UINT64_MAX
            : kvd_max_u64(ITEM_BYTES_MIN / work, bytes / (be->base.n_thread * ITEMS_PER_THREAD));
    for (uint32_t i = 0; i < a->n_out; i++) {
        const kvd_weight *w = &a->out[i].w;
        const uint64_t    rows =
            kvd_min_u64(w->n_row, kvd_max_u64(1, item_bytes / kvd_max_u64(1, w->row_bytes)));
        const uint64_t step = kvd_align_up(kvd_max_u64(1, rows), CPU_DOT_ROWS);

        p->first_item[i] = n;
        p->item_rows[i]  = (uint32_t)step;
        n += (uint32_t)kvd_div_up(w->n_row, step);
    }
    p->first_item[a->n_out] = n;
    return n;
}

static void matmul_item(void *ctx, uint32_t item, uint32_t thread)
{
    const matmul_plan     *p = ctx;
    const kvd_matmul_args *a = p->a;
    cpu_dot_job            job;
    cpu_dot_fn             fn;
    uint32_t               i = 0, first;
    const kvd_matmul_out  *o;

    while (item >= p->first_item[i + 1])
        i++;
    o     = &a->out[i];
    first = (item - p->first_item[i]) * p->item_rows[i];
    fn    = matmul_quant_fn(p, &o->w);
    job   = (cpu_dot_job){
          .n_row     = (uint32_t)kvd_min_u64(p->item_rows[i], o->w.n_row - first),
          .n_col     = a->n_col,
          .n_token   = p->n_token,
          .row_bytes = o->w.row_bytes,
          .x_stride  = fn ? p->n_group : a->x_stride,
          .y_stride  = o->y_stride,
          .type      = o->w.type,
          .w         = (const uint8_t *)o->w.data + first * o->w.row_bytes,
          .x         = fn ? (const void *)p->group : a->x + p->first_token * a->x_stride,
          .bias      = o->bias ? o->bias + first : NULL,
          .y         = o->y + p->first_token * o->y_stride + first,
          .rows      = p->rows + thread * CPU_DOT_ROWS * p->row_floats,
          .add       = o->add,
    };
    if (fn)
        fn(&job);
    else
        p->level->flt(&job);
}

static void matmul_dot(cpu_backend *be, const kvd_matmul_args *a)
{
    const uint32_t n_slice = a->n_token < SLICE_TOKENS ? a->n_token : SLICE_TOKENS;
    matmul_plan    p       = { .a          = a,
                               .level      = matmul_level(be),
                               .precise    = be->precise,
                               .n_group    = kvd_div_up(a->n_col, CPU_XGROUP),
                               .group      = be->mm_scratch,
                               .row_floats = matmul_row_floats(a->n_col) };

    kvd_assert(matmul_dot_bytes(be, a->n_token, a->n_col) <= be->mm_scratch_bytes);
    p.rows = (float *)(void *)(p.group + n_slice * p.n_group);
    for (; p.first_token < a->n_token; p.first_token += p.n_token) {
        uint32_t n_item;

        p.n_token = (uint32_t)kvd_min_u64(SLICE_TOKENS, a->n_token - p.first_token);
        matmul_quantize_all(be, &p);
        n_item = matmul_split(be, &p);
        if (n_item <= a->n_out) { /* too little to share */
            for (uint32_t i = 0; i < n_item; i++)
                matmul_item(&p, i, 0);
        } else {
            os_pool_run(be->pool, n_item, matmul_item, &p);
        }
    }
}

kvd_status cpu_matmul(kvd_stream *st, const kvd_matmul_args *a, kvd_err *err)
{
    cpu_backend    *be = st->be;
    kvd_matmul_args b  = *a;

    kvd_assert(a->n_out >= 1 && a->n_out <= KVD_MATMUL_OUT_MAX);
    for (uint32_t i = 0; i < a->n_out; i++)
        kvd_assert(a->out[i].w.n_col == a->n_col);
    if (a->norm) {
        const kvd_rms_norm_args n = kvd_matmul_norm(a);

        KVD_TRY(cpu_rms_norm(st, &n, err));
        b.x        = a->xn;
        b.x_stride = a->n_col;
    }
    if (!be->deterministic && a->n_token >= cpu_gemm_min_tokens(be))
        cpu_gemm(be, &b);
    else
        matmul_dot(be, &b);
    if (a->swiglu) {
        const kvd_swiglu_args s = kvd_matmul_swiglu(a);

        KVD_TRY(cpu_swiglu(st, &s, err));
    }
    return KVD_OK;
}
