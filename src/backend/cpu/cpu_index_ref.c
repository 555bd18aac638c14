/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index_ref.c - select of backend "ref": the formulas of backend.h over the stored index, in
 * double, one lane after another.
 *
 * Scratch of a lane: logits of all query heads over all chunks, then centroids' likewise, then the
 * ranking keys.  Owns: nothing (the backend owns the scratch).  Thread: the caller's. */
#include <math.h>

#include "backend/cpu/cpu_index.h"
#include "backend/index_layout.h"

typedef struct ref_lane {
    const kvd_select_args *a;
    const kvd_select_seq  *seq;
    const cpu_index_shape *s;
    uint32_t               kv_head, group, n_block;
    const float           *q;      /* [group][dim] */
    uint64_t               stride; /* n_chunk + 16: holds the last block's centroids too */
    double                *logit;  /* [group][stride]; then weights */
    double                *cent;   /* [group][stride] */
    uint64_t              *key;    /* [n_chunk] */
    float                 *score;  /* the caller's, of this KV head */
    uint32_t               n_sel;
} ref_lane;

uint64_t cpu_ref_select_scratch_bytes(const kvd_backend_limits *lim)
{
    const uint64_t group = kvd_div_up(lim->n_head, kvd_max_u64(1, lim->n_kv_head));

    return (2 * group + 1) * ((uint64_t)lim->n_chunk + CPU_INDEX_CENTROID) * sizeof(double);
}

/* ---- reading the index ----------------------------------------------------------- */

static double ref_value(const cpu_index_plane *p, const uint8_t *lane, uint32_t unit, uint32_t c)
{
    const uint32_t  u = unit % CPU_INDEX_TILE, per_row = cpu_index_per_row(p);
    const uint8_t  *tile = lane + p->code_off + unit / CPU_INDEX_TILE * p->tile_bytes;
    const uint16_t *par  = (const uint16_t *)(const void *)(lane + p->param_off) +
                          (uint64_t)(unit / p->group) * 2 * p->dim_pad;
    uint32_t byte, code;

    if (p->elem == KVD_INDEX_BF16)
        return (double)kvd_bf16_to_f32(
            ((const uint16_t *)(const void *)tile)[c * CPU_INDEX_TILE + u]);
    byte = tile[(uint64_t)(c / per_row) * 64 + 4 * u + c % 4];
    code = byte >> (p->bits * (c % per_row / 4)) & ((1u << p->bits) - 1u);
    return (double)code * (double)kvd_f16_to_f32(par[c]) +
           (double)kvd_f16_to_f32(par[p->dim_pad + c]);
}

static double ref_q(const ref_lane *l, uint32_t h, uint32_t c)
{
    return (double)l->q[(uint64_t)h * l->s->dim + c] * (double)l->a->scale;
}

/* q . unit of one plane, for every head; box and deviation take parts or sizes of q instead. */
typedef enum ref_part { REF_Q, REF_ABS, REF_POS, REF_NEG } ref_part;

static void ref_dot(const ref_lane *l, const cpu_index_plane *p, const uint8_t *lane, uint32_t unit,
                    ref_part part, double *out, uint64_t stride)
{
    double row[KVD_HEAD_DIM_MAX];

    for (uint32_t c = 0; c < p->dim; c++)
        row[c] = ref_value(p, lane, unit, c);
    for (uint32_t h = 0; h < l->group; h++) {
        double sum = 0.0;

        for (uint32_t c = 0; c < p->dim; c++) {
            double q = ref_q(l, h, c);

            if (part == REF_ABS)
                q = fabs(q);
            if ((part == REF_POS && q < 0.0) || (part == REF_NEG && q > 0.0))
                q = 0.0;
            sum += q * row[c];
        }
        out[h * stride] = sum;
    }
}

static double ref_norm(const ref_lane *l, uint32_t h)
{
    double sum = 0.0;

    for (uint32_t c = 0; c < l->s->dim; c++)
        sum += ref_q(l, h, c) * ref_q(l, h, c);
    return sqrt(sum);
}

/* ---- logits, with the logarithm of chunk_tokens in them -------------------------- */

static void ref_key_logit(const ref_lane *l, const uint8_t *lane, uint32_t chunk, uint32_t at)
{
    const cpu_index_shape *s = l->s;

    for (uint32_t h = 0; h < l->group; h++)
        l->logit[h * l->stride + chunk] = -HUGE_VAL;
    for (uint32_t t = 0; t < s->chunk_tokens; t++) {
        double x[256];

        for (uint32_t h0 = 0; h0 < l->group; h0 += 256) {
            ref_lane part = *l;

            part.q += (uint64_t)h0 * s->dim;
            part.group = l->group - h0 < 256 ? l->group - h0 : 256;
            ref_dot(&part, &s->key, lane, at * s->chunk_tokens + t, REF_Q, x, 1);
            for (uint32_t h = 0; h < part.group; h++) {
                double      *sum = &l->logit[(h0 + h) * l->stride + chunk];
                const double max = *sum > x[h] ? *sum : x[h];

                *sum = max + log(exp(*sum - max) + exp(x[h] - max));
            }
        }
    }
}

static void ref_mark_logit(const ref_lane *l, const uint8_t *lane, uint32_t chunk, uint32_t at)
{
    const cpu_index_shape *s      = l->s;
    const uint64_t         stride = l->stride;
    double                *out = l->logit + chunk, *second = l->cent + chunk;

    ref_dot(l, &s->mark[0], lane, at, s->kind == KVD_INDEX_BOX ? REF_NEG : REF_Q, out, stride);
    if (s->n_mark > 1)
        ref_dot(l, &s->mark[1], lane, at, s->kind == KVD_INDEX_BOX ? REF_POS : REF_ABS, second,
                stride);
    for (uint32_t h = 0; h < l->group; h++) {
        double x = out[h * stride] + log((double)s->chunk_tokens);

        if (s->n_mark > 1)
            x += second[h * stride] * (s->kind == KVD_INDEX_MEAN_STD ? (double)CPU_INDEX_STD : 1.0);
        if (s->radius)
            x += ref_norm(l, h) / sqrt((double)s->dim) *
                 (double)kvd_f16_to_f32(
                     ((const uint16_t *)(const void *)(lane + s->radius_off))[at]);
        out[h * stride] = x;
    }
}

static void ref_cluster_logits(const ref_lane *l)
{
    const cpu_index_shape *s = l->s;
    const uint64_t         n = l->seq->n_chunk;

    for (uint32_t c = 0; c < l->n_block * CPU_INDEX_CENTROID; c++)
        ref_dot(l, &s->mark[0],
                cpu_index_lane(&l->a->index, l->seq->iblock[c / CPU_INDEX_CENTROID], l->kv_head),
                c % CPU_INDEX_CENTROID, REF_Q, l->cent + c, l->stride);
    for (uint32_t c = l->seq->first_chunk; c < n; c++) {
        const uint8_t *cl =
            cpu_index_lane(&l->a->index, l->seq->iblock[c / s->n_chunk], l->kv_head) +
            s->cluster_off;
        const uint32_t k =
            cpu_index_centroid(c / s->n_chunk, l->n_block, cl[0], cl[64 + c % s->n_chunk]);

        for (uint32_t h = 0; h < l->group; h++)
            l->logit[h * l->stride + c] = l->cent[h * l->stride + k] + log((double)s->chunk_tokens);
    }
}

static void ref_logits(const ref_lane *l)
{
    if (l->s->kind == KVD_INDEX_CLUSTER) {
        ref_cluster_logits(l);
        return;
    }
    for (uint32_t c = l->seq->first_chunk; c < l->seq->n_chunk; c++) {
        const uint8_t *lane =
            cpu_index_lane(&l->a->index, l->seq->iblock[c / l->s->n_chunk], l->kv_head);

        if (l->s->kind == KVD_INDEX_QUANT_K)
            ref_key_logit(l, lane, c, c % l->s->n_chunk);
        else
            ref_mark_logit(l, lane, c, c % l->s->n_chunk);
    }
}

/* ---- scores ---------------------------------------------------------------------- */

/* cent <- exp(logit) / sum over chunks and `extra`; returns the kept tokens' part. */
static double ref_normalise(const ref_lane *l, uint32_t h, double kept_lse)
{
    const uint64_t n   = l->seq->n_chunk;
    const double  *x   = l->logit + h * l->stride;
    double        *p   = l->cent + h * l->stride;
    double         max = kept_lse, sum;

    for (uint64_t c = l->seq->first_chunk; c < n; c++)
        max = x[c] > max ? x[c] : max;
    if (!(max > -HUGE_VAL)) { /* nothing at all */
        for (uint64_t c = l->seq->first_chunk; c < n; c++)
            p[c] = 0.0;
        return 0.0;
    }
    sum = exp(kept_lse - max);
    for (uint64_t c = l->seq->first_chunk; c < n; c++)
        sum += p[c] = exp(x[c] - max);
    for (uint64_t c = l->seq->first_chunk; c < n; c++)
        p[c] /= sum;
    return exp(kept_lse - max) / sum;
}

static void ref_mean_logits(const ref_lane *l)
{
    const uint64_t n = l->seq->n_chunk;

    for (uint64_t c = l->seq->first_chunk; c < n; c++) {
        for (uint32_t h = 1; h < l->group; h++)
            l->logit[c] += l->logit[h * l->stride + c];
        l->logit[c] /= (double)l->group;
    }
}

/* Fills score; returns the kept tokens' share. */
static double ref_scores(const ref_lane *l)
{
    const kvd_gqa_rule rule  = l->a->rule;
    const uint64_t     n     = l->seq->n_chunk;
    const bool         whole = rule == KVD_GQA_MEAN_KEPT || rule == KVD_GQA_MAX_KEPT;
    const uint32_t     heads = rule == KVD_GQA_MEAN_LOGITS ? 1 : l->group;
    const float       *lse =
        l->a->kept_lse + l->seq->row * l->a->lse_stride + (uint64_t)l->kv_head * l->group;
    double kept = 0.0;

    if (rule == KVD_GQA_MEAN_LOGITS)
        ref_mean_logits(l);
    for (uint32_t h = 0; h < heads; h++)
        kept += ref_normalise(l, h, whole ? (double)lse[h] : -HUGE_VAL) / heads;
    for (uint64_t c = 0; c < n; c++) {
        double x = 0.0;

        for (uint32_t h = 0; h < heads && c >= l->seq->first_chunk; h++) {
            const double p = l->cent[h * l->stride + c];

            if (rule != KVD_GQA_MAX_KEPT)
                x += p / heads;
            else
                x = p > x ? p : x;
        }
        l->score[c] = cpu_select_clamp((float)x);
    }
    return kept;
}

/* ---- the best -------------------------------------------------------------------- */

/* Higher score first, then lower chunk: as one number that sorts downwards. */
static uint64_t ref_rank(const ref_lane *l, uint32_t chunk)
{
    return (uint64_t)kvd_f32_to_bits(l->score[chunk]) << 32 | (uint32_t)~chunk;
}

static void ref_sift(uint64_t *key, uint32_t i, uint32_t n)
{
    for (uint32_t child = 2 * i + 1; child < n; i = child, child = 2 * i + 1) {
        const uint64_t x = key[i];

        if (child + 1 < n && key[child + 1] < key[child])
            child++;
        if (key[child] >= x)
            return;
        key[i]     = key[child];
        key[child] = x;
    }
}

/* Heap sort: a min-heap gives the keys from high to low. */
static void ref_sort(uint64_t *key, uint32_t n)
{
    for (uint32_t i = n / 2; i-- > 0;)
        ref_sift(key, i, n);
    for (uint32_t end = n; end-- > 1;) {
        const uint64_t x = key[0];

        key[0]   = key[end];
        key[end] = x;
        ref_sift(key, 0, end);
    }
}

static uint32_t ref_top_p(const ref_lane *l, uint32_t n_sel)
{
    uint64_t all = 0, sum = 0, target;

    for (uint32_t c = 0; c < l->seq->n_chunk; c++)
        all += cpu_select_mass(l->score[c]);
    target = cpu_select_target(all, l->a->top_p);
    for (uint32_t i = 0; i < n_sel; i++) {
        sum += cpu_select_mass(l->score[(uint32_t)~l->key[i]]);
        if (sum >= target)
            return i + 1;
    }
    return n_sel;
}

/* The candidates are key[0 .. n); writes sel. */
static void ref_select_best(ref_lane *l, uint32_t n, uint32_t *sel, kvd_select_result *r)
{
    uint64_t mass = 0;

    ref_sort(l->key, n);
    l->n_sel = l->seq->k[l->kv_head] < n ? l->seq->k[l->kv_head] : n;
    if (l->a->top_p > 0.0f)
        l->n_sel = ref_top_p(l, l->n_sel);
    r->n_sel    = l->n_sel;
    r->n_urgent = cpu_select_n_urgent(l->n_sel);
    for (uint32_t i = 0; i < l->n_sel; i++) {
        const uint32_t c = (uint32_t)~l->key[i];

        mass += cpu_select_mass(l->score[c]);
        l->key[i] = (uint64_t)(uint32_t)~c << 1 | (i < r->n_urgent); /* sorts by chunk upwards */
    }
    r->mass = r->kept + cpu_select_share(mass);
    ref_sort(l->key, l->n_sel);
    for (uint32_t i = 0; i < l->n_sel; i++)
        sel[i] = (uint32_t) ~(l->key[i] >> 1) | (l->key[i] & 1 ? KVD_SELECT_URGENT : 0);
}

/* CASCADE: ranks by landmarks, then gives the best of them logits by keys.  The keys of the
 * reranked stay in key[]; returns how many. */
static uint32_t ref_cascade(ref_lane *l)
{
    const uint32_t first = l->seq->first_chunk, n = l->seq->n_chunk - first;
    const uint64_t most = (uint64_t)KVD_CASCADE_FACTOR * l->seq->k[l->kv_head];

    ref_scores(l);
    for (uint32_t i = 0; i < n; i++)
        l->key[i] = ref_rank(l, first + i);
    ref_sort(l->key, n);
    ref_logits(l); /* the rule may have overwritten them */
    for (uint32_t i = 0; i < n && i < most; i++) {
        const uint32_t c = (uint32_t)~l->key[i];

        ref_key_logit(l,
                      cpu_index_lane(&l->a->index, l->seq->iblock[c / l->s->n_chunk], l->kv_head),
                      c, c % l->s->n_chunk);
    }
    return n < most ? n : (uint32_t)most;
}

static void ref_lane_run(ref_lane *l, kvd_select_result *r)
{
    const uint32_t first = l->seq->first_chunk;
    uint32_t       n     = l->seq->n_chunk > first ? l->seq->n_chunk - first : 0;
    uint16_t      *ema   = l->seq->ema ? l->seq->ema + l->kv_head * l->a->lane_stride : NULL;

    ref_logits(l);
    for (uint32_t i = 0; i < n; i++)
        l->key[i] = (uint32_t) ~(first + i);
    if (l->s->kind == KVD_INDEX_CASCADE)
        n = ref_cascade(l);
    r->kept = (float)ref_scores(l);
    for (uint32_t i = 0; i < n; i++)
        l->key[i] = ref_rank(l, (uint32_t)~l->key[i]);
    for (uint32_t c = first; ema && c < l->seq->n_chunk; c++)
        ema[c] = cpu_select_ema(ema[c], l->score[c], l->a->alpha);
    ref_select_best(l, n, l->seq->sel + l->kv_head * l->a->sel_stride, r);
}

kvd_status cpu_ref_select(kvd_stream *st, const kvd_select_args *a, kvd_err *err)
{
    const uint32_t  group = a->n_head / a->index.n_kv_head;
    double         *mem   = st->be->ix_scratch;
    cpu_index_shape s;

    (void)err;
    kvd_assert(a->n_head % a->index.n_kv_head == 0);
    cpu_index_shape_of(&s, &a->index.desc);
    for (uint32_t i = 0; i < a->n_seq; i++) {
        const kvd_select_seq *seq = &a->seq[i];
        const uint64_t        n   = (uint64_t)seq->n_chunk + CPU_INDEX_CENTROID;

        kvd_assert((2 * (uint64_t)group + 1) * n * sizeof(double) <= st->be->ix_scratch_bytes);
        for (uint32_t h = 0; h < a->index.n_kv_head; h++) {
            ref_lane l = { .a       = a,
                           .seq     = seq,
                           .s       = &s,
                           .kv_head = h,
                           .group   = group,
                           .n_block = (uint32_t)kvd_div_up(seq->n_chunk, s.n_chunk),
                           .stride  = n,
                           .q       = a->q + seq->row * a->q_stride + (uint64_t)h * group * s.dim,
                           .logit   = mem,
                           .cent    = mem + group * n,
                           .key     = (uint64_t *)(void *)(mem + 2 * group * n),
                           .score   = seq->score + h * a->lane_stride };

            ref_lane_run(&l, &a->result[(uint64_t)i * a->index.n_kv_head + h]);
        }
    }
    return KVD_OK;
}
