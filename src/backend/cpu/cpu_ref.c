/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ref.c - backend "ref": every op written for reading, as the oracle.
 *
 * Sums run in double over float inputs, so results carry one rounding per output and do not depend
 * on order.  Matmul takes a weight row apart once and uses it for all tokens.
 * Owns: nothing; scratch comes from the backend object.  Thread: the caller's. */
#include "backend/cpu/cpu_ref.h"

#include <math.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/cpu_kv.h"

uint64_t cpu_ref_mm_scratch_bytes(const kvd_backend_limits *lim)
{
    return (uint64_t)lim->n_col * sizeof(float); /* one weight row */
}

uint64_t cpu_ref_at_scratch_bytes(const kvd_backend_limits *lim)
{
    return ((uint64_t)lim->n_ctx + lim->head_dim) * sizeof(double); /* scores, one output row */
}

/* Four sums side by side: the compiler may keep them in vectors, the result stays fixed. */
static double ref_dot(const float *x, const float *y, uint32_t n)
{
    double   s[4] = { 0 };
    uint32_t i    = 0;

    for (; i + 4 <= n; i += 4) {
        for (uint32_t j = 0; j < 4; j++)
            s[j] += (double)x[i + j] * (double)y[i + j];
    }
    for (; i < n; i++)
        s[0] += (double)x[i] * (double)y[i];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

static void ref_norm_row(const float *x, const float *w, float *out, uint32_t n, float eps)
{
    const double scale = 1.0 / sqrt(ref_dot(x, x, n) / (double)n + (double)eps);

    for (uint32_t i = 0; i < n; i++)
        out[i] = (float)((double)x[i] * scale * (double)w[i]);
}

kvd_status cpu_ref_embed(kvd_stream *st, const kvd_embed_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint32_t t = 0; t < a->n_token; t++) {
        kvd_assert(a->token[t] >= 0 && (uint32_t)a->token[t] < a->table.n_row);
        kvd_dequantize(a->table.type,
                       (const uint8_t *)a->table.data + (uint64_t)a->token[t] * a->table.row_bytes,
                       a->out + (uint64_t)t * a->table.n_col, a->table.n_col);
    }
    return KVD_OK;
}

kvd_status cpu_ref_rms_norm(kvd_stream *st, const kvd_rms_norm_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint32_t r = 0; r < a->n_row; r++)
        ref_norm_row(a->x + r * a->x_stride, a->w, a->out + r * a->out_stride, a->n_col, a->eps);
    return KVD_OK;
}

kvd_status cpu_ref_head_norm(kvd_stream *st, const kvd_head_norm_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint32_t t = 0; t < a->n_token; t++) {
        for (uint32_t h = 0; h < a->n_head; h++) {
            float *x = a->x + t * a->x_stride + (uint64_t)h * a->head_dim;
            ref_norm_row(x, a->w, x, a->head_dim, a->eps);
        }
    }
    return KVD_OK;
}

static void ref_matmul_out(const kvd_matmul_args *a, const kvd_matmul_out *o, float *row)
{
    kvd_assert(o->w.n_col == a->n_col);
    for (uint32_t r = 0; r < o->w.n_row; r++) {
        const float bias = o->bias ? o->bias[r] : 0.0f;

        kvd_dequantize(o->w.type, (const uint8_t *)o->w.data + r * o->w.row_bytes, row, a->n_col);
        for (uint32_t t = 0; t < a->n_token; t++) {
            float       *y = o->y + t * o->y_stride + r;
            const double s = ref_dot(row, a->x + t * a->x_stride, a->n_col) + (double)bias;

            *y = o->add ? (float)((double)*y + s) : (float)s;
        }
    }
}

kvd_status cpu_ref_matmul(kvd_stream *st, const kvd_matmul_args *a, kvd_err *err)
{
    kvd_matmul_args b = *a;

    kvd_assert(a->n_out <= KVD_MATMUL_OUT_MAX);
    kvd_assert((uint64_t)a->n_col * sizeof(float) <= st->be->mm_scratch_bytes);
    if (a->norm) {
        const kvd_rms_norm_args n = kvd_matmul_norm(a);

        KVD_TRY(cpu_ref_rms_norm(st, &n, err));
        b.x        = a->xn;
        b.x_stride = a->n_col;
    }
    for (uint32_t i = 0; i < a->n_out; i++)
        ref_matmul_out(&b, &a->out[i], st->be->mm_scratch);
    if (a->swiglu) {
        const kvd_swiglu_args s = kvd_matmul_swiglu(a);

        KVD_TRY(cpu_ref_swiglu(st, &s, err));
    }
    return KVD_OK;
}

static void ref_rope_head(const kvd_rope_args *a, float *x, const float *cs)
{
    const uint32_t half = a->n_rot / 2;

    for (uint32_t i = 0; i < half; i++) {
        float       *x0 = a->neox ? x + i : x + 2 * i;
        float       *x1 = a->neox ? x + i + half : x + 2 * i + 1;
        const double c = cs[i], s = cs[half + i], u = *x0, v = *x1;

        *x0 = (float)(u * c - v * s);
        *x1 = (float)(u * s + v * c);
    }
}

kvd_status cpu_ref_rope(kvd_stream *st, const kvd_rope_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    kvd_assert(a->n_rot % 2 == 0 && a->n_rot <= a->head_dim);
    for (uint32_t t = 0; t < a->n_token; t++) {
        for (uint32_t h = 0; h < a->n_head; h++)
            ref_rope_head(a, a->x + t * a->x_stride + (uint64_t)h * a->head_dim,
                          a->cos_sin + (uint64_t)t * a->n_rot);
    }
    return KVD_OK;
}

kvd_status cpu_ref_swiglu(kvd_stream *st, const kvd_swiglu_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint32_t t = 0; t < a->n_token; t++) {
        const float *g = a->gate + t * a->gate_stride, *u = a->up + t * a->up_stride;
        float       *o = a->out + t * a->out_stride;

        for (uint32_t i = 0; i < a->n_col; i++)
            o[i] = (float)((double)g[i] / (1.0 + exp(-(double)g[i])) * (double)u[i]);
    }
    return KVD_OK;
}

static void ref_store_row(const kvd_kv_layout *kv, const float *x, uint8_t *dst)
{
    for (uint32_t i = 0; i < kv->head_dim; i++) {
        if (kv->type == KVD_DTYPE_F32)
            ((float *)(void *)dst)[i] = x[i];
        else
            ((uint16_t *)(void *)dst)[i] = kvd_f32_to_bf16(x[i]);
    }
}

static double ref_load(const kvd_kv_layout *kv, const uint8_t *row, uint32_t i)
{
    if (kv->type == KVD_DTYPE_F32)
        return (double)((const float *)(const void *)row)[i];
    return (double)kvd_bf16_to_f32(((const uint16_t *)(const void *)row)[i]);
}

kvd_status cpu_ref_kv_append(kvd_stream *st, const kvd_kv_append_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    cpu_kv_check(&a->kv);
    for (uint32_t s = 0; s < a->n_seq; s++) {
        const kvd_kv_seq *q = &a->seq[s];

        for (uint32_t r = 0; r < q->n_row; r++) {
            for (uint32_t h = 0; h < a->kv.n_kv_head; h++) {
                const uint64_t t   = q->first_row + r;
                const uint64_t off = (uint64_t)h * a->kv.head_dim;
                uint8_t       *row = cpu_kv_row(&a->kv, q->block, h, q->n_past + r);

                ref_store_row(&a->kv, a->k + t * a->k_stride + off, row);
                ref_store_row(&a->kv, a->v + t * a->v_stride + off, row + cpu_kv_v_off(&a->kv));
            }
        }
    }
    return KVD_OK;
}

/* One query head of one token over its first n_key tokens. */
static void ref_attn_head(const kvd_attn_args *a, const kvd_kv_seq *q, uint32_t head,
                          uint32_t n_key, const float *query, float *out, double *score)
{
    const uint32_t dim     = a->kv.head_dim;
    const uint32_t kv_head = head / (a->n_head / a->kv.n_kv_head);
    double         max = -HUGE_VAL, sum = 0.0;
    double        *acc = score + n_key;

    for (uint32_t t = 0; t < n_key; t++) {
        const uint8_t *k = cpu_kv_row(&a->kv, q->block, kv_head, t);
        double         s = 0.0;

        for (uint32_t i = 0; i < dim; i++)
            s += (double)query[i] * ref_load(&a->kv, k, i);
        score[t] = s * (double)a->scale;
        max      = score[t] > max ? score[t] : max;
    }
    for (uint32_t i = 0; i < dim; i++)
        acc[i] = 0.0;
    for (uint32_t t = 0; t < n_key; t++) {
        const uint8_t *v = cpu_kv_row(&a->kv, q->block, kv_head, t) + cpu_kv_v_off(&a->kv);
        const double   p = exp(score[t] - max);

        sum += p;
        for (uint32_t i = 0; i < dim; i++)
            acc[i] += p * ref_load(&a->kv, v, i);
    }
    for (uint32_t i = 0; i < dim; i++)
        out[i] = (float)(acc[i] / sum);
}

kvd_status cpu_ref_attn(kvd_stream *st, const kvd_attn_args *a, kvd_err *err)
{
    (void)err;
    cpu_kv_check(&a->kv);
    kvd_assert(a->n_head % a->kv.n_kv_head == 0);
    for (uint32_t s = 0; s < a->n_seq; s++) {
        const kvd_kv_seq *q = &a->seq[s];

        kvd_assert(((uint64_t)q->n_past + q->n_row + a->kv.head_dim) * sizeof(double) <=
                   st->be->at_scratch_bytes);
        for (uint32_t r = 0; r < q->n_row; r++) {
            for (uint32_t h = 0; h < a->n_head; h++) {
                const uint64_t t = q->first_row + r, off = (uint64_t)h * a->kv.head_dim;

                ref_attn_head(a, q, h, q->n_past + r + 1, a->q + t * a->q_stride + off,
                              a->out + t * a->out_stride + off, st->be->at_scratch);
            }
        }
    }
    return KVD_OK;
}

/* ---- spans ------------------------------------------------------------------------- */

typedef struct ref_head {
    const kvd_kv_layout *kv;
    const float         *q;
    float               *o; /* weighted sum of V */
    double               max, sum;
    double               scale;
} ref_head;

/* A key and value that count n times: sums so far are rescaled when the maximum rises. */
static void ref_head_add(ref_head *h, const uint8_t *k, double n)
{
    const uint8_t *v = k + cpu_kv_v_off(h->kv);
    double         s = 0.0, alpha, p, max;

    for (uint32_t i = 0; i < h->kv->head_dim; i++)
        s += (double)h->q[i] * ref_load(h->kv, k, i);
    s *= h->scale;
    max    = s > h->max ? s : h->max;
    alpha  = exp(h->max - max);
    p      = n * exp(s - max);
    h->sum = h->sum * alpha + p;
    h->max = max;
    for (uint32_t i = 0; i < h->kv->head_dim; i++)
        h->o[i] = (float)((double)h->o[i] * alpha + p * ref_load(h->kv, v, i));
}

static void ref_span_head(const kvd_attn_span_args *a, const kvd_attn_span *s, uint32_t kv_head,
                          ref_head *h)
{
    for (uint32_t r = 0; r < s->n_record; r++) {
        const uint8_t *at = (const uint8_t *)a->kv.pool + s->record[r];

        for (uint32_t t = 0; t < a->kv.chunk_tokens; t++)
            ref_head_add(h, at + (uint64_t)t * a->kv.head_dim * cpu_kv_elem_bytes(&a->kv), 1.0);
    }
    for (uint32_t t = s->first_key; t < s->end_key; t++)
        ref_head_add(h, cpu_kv_row(&a->kv, s->block, kv_head, t), 1.0);
}

static void ref_zone_head(const kvd_attn_zone_args *a, const kvd_zone_seq *s, uint32_t kv_head,
                          ref_head *h)
{
    const uint16_t *left = s->left + kv_head * a->left_stride;

    for (uint32_t c = 0; c < s->n_cell; c++) {
        if (left[c] > 0)
            ref_head_add(h, cpu_kv_row(&a->zone, s->zblock, kv_head, c), left[c]);
    }
}

/* Query head number i of a lane, over a span, or over cells of z. */
static void ref_span_lane(const kvd_attn_span_args *a, const kvd_attn_zone_args *z, uint32_t lane,
                          uint32_t i)
{
    const uint32_t dim = a->kv.head_dim, group = a->n_head / a->kv.n_kv_head;
    const uint32_t kv_head = lane % a->kv.n_kv_head;
    const uint64_t row = a->row[lane / a->kv.n_kv_head], head = (uint64_t)kv_head * group + i;
    float         *part = a->part + lane * kvd_attn_part_floats(group, dim);
    float         *max = part + (uint64_t)group * dim + i, *sum = max + group;
    ref_head       h = { .kv    = &a->kv,
                         .q     = a->q + row * a->q_stride + head * dim,
                         .o     = part + (uint64_t)i * dim,
                         .max   = a->first ? -1e30 : (double)*max,
                         .sum   = a->first ? 0.0 : (double)*sum,
                         .scale = a->scale };

    if (a->first)
        memset(h.o, 0, dim * sizeof(float));
    if (z)
        ref_zone_head(z, &z->seq[lane / a->kv.n_kv_head], kv_head, &h);
    else
        ref_span_head(a, &a->span[lane], kv_head, &h);
    *max = (float)h.max;
    *sum = (float)h.sum;
    if (a->lse)
        a->lse[row * a->lse_stride + head] = h.sum > 0.0 ? (float)(h.max + log(h.sum)) : -INFINITY;
    for (uint32_t d = 0; a->out && d < dim; d++)
        a->out[row * a->out_stride + head * dim + d] = (float)((double)h.o[d] / h.sum);
}

static void ref_span_lanes(const kvd_attn_span_args *a, const kvd_attn_zone_args *z)
{
    cpu_kv_check(&a->kv);
    for (uint32_t l = 0; l < a->n_row * a->kv.n_kv_head; l++) {
        for (uint32_t i = 0; i < a->n_head / a->kv.n_kv_head; i++)
            ref_span_lane(a, z, l, i);
    }
}

kvd_status cpu_ref_attn_span(kvd_stream *st, const kvd_attn_span_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    ref_span_lanes(a, NULL);
    return KVD_OK;
}

kvd_status cpu_ref_attn_zone(kvd_stream *st, const kvd_attn_zone_args *a, kvd_err *err)
{
    const kvd_attn_span_args s = cpu_zone_as_span(a);

    (void)st;
    (void)err;
    ref_span_lanes(&s, a);
    return KVD_OK;
}

kvd_status cpu_ref_record_copy(kvd_stream *st, const kvd_record_copy_args *a, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint64_t i = 0; i < a->n; i++)
        memcpy((uint8_t *)a->dst + a->dst_off[i], (const uint8_t *)a->src + a->src_off[i],
               (size_t)a->bytes);
    return KVD_OK;
}
