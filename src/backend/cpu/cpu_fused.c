/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_fused.c - ops that a GPU wants in one, made of others; and the largest of a row.
 *
 * Owns: nothing.  Thread: the backend's caller. */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_ref.h"

/* ---- what follows the projections ------------------------------------------------- */

static kvd_status fused_heads(const kvd_backend_ops *ops, kvd_stream *st,
                              const kvd_qkv_finish_args *a, float *x, uint32_t n_head,
                              uint64_t stride, const float *norm, kvd_err *err)
{
    const kvd_head_norm_args n = { .n_token  = a->n_token,
                                   .n_head   = n_head,
                                   .head_dim = a->head_dim,
                                   .x_stride = stride,
                                   .x        = x,
                                   .w        = norm,
                                   .eps      = a->eps };
    const kvd_rope_args      r = { .n_token  = a->n_token,
                                   .n_head   = n_head,
                                   .head_dim = a->head_dim,
                                   .n_rot    = a->n_rot,
                                   .neox     = a->neox,
                                   .x_stride = stride,
                                   .x        = x,
                                   .cos_sin  = a->cos_sin };

    if (norm)
        KVD_TRY(ops->head_norm(st, &n, err));
    return ops->rope(st, &r, err);
}

static kvd_status fused_finish(const kvd_backend_ops *ops, kvd_stream *st,
                               const kvd_qkv_finish_args *a, kvd_err *err)
{
    kvd_assert(a->k == a->store.k);
    KVD_TRY(fused_heads(ops, st, a, a->q, a->n_head, a->q_stride, a->q_norm, err));
    KVD_TRY(fused_heads(ops, st, a, a->k, a->n_kv_head, a->store.k_stride, a->k_norm, err));
    return ops->kv_append(st, &a->store, err);
}

kvd_status cpu_qkv_finish(kvd_stream *st, const kvd_qkv_finish_args *a, kvd_err *err)
{
    return fused_finish(&cpu_ops, st, a, err);
}

kvd_status cpu_ref_qkv_finish(kvd_stream *st, const kvd_qkv_finish_args *a, kvd_err *err)
{
    return fused_finish(&cpu_ref_ops, st, a, err);
}

/* ---- the largest ------------------------------------------------------------------ */

static bool best_before(kvd_best_item a, kvd_best_item b)
{
    return a.value > b.value || (a.value == b.value && a.at < b.at);
}

/* h is a heap, the worst on top, but for h[0]. */
static void best_sink(kvd_best_item *h, uint32_t n)
{
    const kvd_best_item x = h[0];
    uint32_t            i = 0;

    for (uint32_t c = 1; c < n; c = 2 * i + 1) {
        if (c + 1 < n && best_before(h[c], h[c + 1]))
            c++;
        if (!best_before(x, h[c]))
            break;
        h[i] = h[c];
        i    = c;
    }
    h[i] = x;
}

static void best_row(const float *x, uint32_t n, kvd_best_item *h, uint32_t k)
{
    for (uint32_t i = 0; i < k; i++) /* worse than any number */
        h[i] = (kvd_best_item){ -INFINITY, INT32_MAX };
    for (uint32_t i = 0; i < n; i++) {
        const kvd_best_item b = { x[i] + 0.0f, (int32_t)i };

        if (best_before(b, h[0])) { /* no NaN is */
            h[0] = b;
            best_sink(h, k);
        }
    }
    for (uint32_t m = k; m > 1; m--) { /* the worst of m goes behind the others */
        const kvd_best_item worst = h[0];

        h[0] = h[m - 1];
        best_sink(h, m - 1);
        h[m - 1] = worst;
    }
    for (uint32_t i = 0; i < k; i++) {
        if (h[i].at == INT32_MAX)
            h[i] = (kvd_best_item){ 0.0f, -1 };
    }
}

kvd_status cpu_best(kvd_stream *st, const kvd_best_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    kvd_assert(a->k >= 1 && a->k <= KVD_BEST_MAX);
    for (uint32_t r = 0; r < a->n_row; r++)
        best_row(a->x + r * a->x_stride, a->n_col, a->out + r * a->out_stride, a->k);
    return KVD_OK;
}
