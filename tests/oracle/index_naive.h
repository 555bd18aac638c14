/* SPDX-License-Identifier: Apache-2.0 */
/* index_naive.h - scores of one lane from its keys, by the formulas of backend.h in double, without
 * the index's layout: landmarks are made and quantised here.  CASCADE takes its reranked chunks
 * from its own landmark scores; CLUSTER takes the assignment as stored, and BF16 only.
 * Header-only help of test_index.c. */
#ifndef KVD_TEST_INDEX_NAIVE_H
#define KVD_TEST_INDEX_NAIVE_H

#include "backend/index_layout.h"
#include "index_case.h"

typedef struct naive_lane {
    const index_case *c;
    uint32_t          s, head, n_unit, dim; /* units: chunks or tokens of whole blocks */
    float            *value;                /* [n_unit][dim] as the index holds them */
} naive_lane;

static float naive_key(const naive_lane *l, uint32_t token, uint32_t i)
{
    return case_key(l->c, l->c->first_block[l->s] + token / 256, l->head, token % 256, i);
}

static float naive_half(float x)
{
    return kvd_f16_to_f32(kvd_f32_to_f16(x));
}

/* Values as stored: rounded, or in codes per channel over a group of units. */
static void naive_store(naive_lane *l, kvd_index_elem elem, uint32_t group)
{
    const uint32_t levels = elem == KVD_INDEX_INT8 ? 255 : elem == KVD_INDEX_INT4 ? 15 : 3;

    for (uint32_t i = 0; i < l->dim; i++) {
        for (uint32_t g = 0; g < l->n_unit; g += group) {
            float *v   = l->value + (uint64_t)g * l->dim + i;
            float  min = v[0], max = v[0], scale;

            for (uint32_t u = 0; u < group; u++) {
                min = fminf(min, v[u * l->dim]);
                max = fmaxf(max, v[u * l->dim]);
            }
            scale = naive_half((max - min) / (float)levels);
            min   = naive_half(min);
            for (uint32_t u = 0; u < group; u++) {
                float *x = v + u * l->dim, code;

                if (elem == KVD_INDEX_BF16) {
                    *x = kvd_bf16_to_f32(kvd_f32_to_bf16(*x));
                    continue;
                }
                code = floorf((*x - min) / scale + 0.5f);
                code = fminf(fmaxf(code, 0.0f), (float)levels);
                *x   = (float)((double)code * (double)scale + (double)min);
            }
        }
    }
}

typedef enum naive_mark { NAIVE_MEAN, NAIVE_STD, NAIVE_MIN, NAIVE_MAX } naive_mark;

static float naive_chunk(const naive_lane *l, uint32_t chunk, uint32_t i, naive_mark mark)
{
    const uint32_t ct = l->c->sh.desc.chunk_tokens, t0 = chunk * ct;
    float          sum = 0.0f, min = naive_key(l, t0, i), max = min, var = 0.0f;

    for (uint32_t t = 0; t < ct; t++) {
        const float x = naive_key(l, t0 + t, i);

        sum = t ? sum + x : x;
        min = fminf(min, x);
        max = fmaxf(max, x);
    }
    sum /= (float)ct;
    for (uint32_t t = 0; t < ct; t++)
        var += (naive_key(l, t0 + t, i) - sum) * (naive_key(l, t0 + t, i) - sum);
    switch (mark) {
    case NAIVE_MEAN:
        return sum;
    case NAIVE_STD:
        return sqrtf(var / (float)ct);
    case NAIVE_MIN:
        return min;
    case NAIVE_MAX:
        break;
    }
    return max;
}

/* The cluster of a chunk, numbered through the sequence: segments have up to 16 blocks. */
static uint32_t naive_cluster(const index_case *c, uint32_t s, uint32_t head, uint32_t chunk)
{
    const uint32_t  per = 256 / c->sh.desc.chunk_tokens, block = chunk / per;
    cpu_index_shape shape;
    const uint8_t  *at;

    cpu_index_shape_of(&shape, &c->sh.desc);
    at = cpu_index_lane(&c->ix, c->iblock[c->first_block[s] + block], head) + shape.cluster_off;
    if (at[0] != block % 16)
        return UINT32_MAX;
    return block / 16 * 256 + at[64 + chunk % per];
}

/* Chunks take the mean of their cluster's means for their own. */
static void naive_cluster_means(naive_lane *l)
{
    const uint32_t n = l->n_unit, dim = l->dim;
    float         *mean = case_mem((uint64_t)n * dim * sizeof(*mean));
    uint32_t      *of = case_mem(n * sizeof(*of)), *count = case_mem(n * sizeof(*count));

    for (uint32_t u = 0; u < n; u++) {
        of[u] = naive_cluster(l->c, l->s, l->head, u);
        if (of[u] >= n)
            exit(1);
        count[of[u]]++;
        for (uint32_t i = 0; i < dim; i++)
            mean[(uint64_t)of[u] * dim + i] += l->value[(uint64_t)u * dim + i];
    }
    for (uint32_t u = 0; u < n; u++) {
        for (uint32_t i = 0; i < dim; i++)
            l->value[(uint64_t)u * dim + i] = mean[(uint64_t)of[u] * dim + i] / (float)count[of[u]];
    }
    kvd_pages_free(mean, (uint64_t)n * dim * sizeof(*mean) + 64);
    kvd_pages_free(of, n * sizeof(*of) + 64);
    kvd_pages_free(count, n * sizeof(*count) + 64);
}

static naive_lane naive_marks(const index_case *c, uint32_t s, uint32_t head, naive_mark mark)
{
    const uint32_t per = 256 / c->sh.desc.chunk_tokens;
    naive_lane     l   = { c, s, head, c->n_block[s] * per, c->sh.desc.head_dim, NULL };

    l.value = case_mem((uint64_t)l.n_unit * l.dim * sizeof(float));
    for (uint32_t u = 0; u < l.n_unit; u++) {
        for (uint32_t i = 0; i < l.dim; i++)
            l.value[(uint64_t)u * l.dim + i] = naive_chunk(&l, u, i, mark);
    }
    if (c->sh.desc.kind == KVD_INDEX_CLUSTER)
        naive_cluster_means(&l);
    naive_store(&l, c->sh.desc.elem, per < 32 ? per : 32);
    return l;
}

static naive_lane naive_keys(const index_case *c, uint32_t s, uint32_t head)
{
    naive_lane l = { c, s, head, c->n_block[s] * 256, c->sh.desc.head_dim, NULL };

    l.value = case_mem((uint64_t)l.n_unit * l.dim * sizeof(float));
    for (uint32_t u = 0; u < l.n_unit; u++) {
        for (uint32_t i = 0; i < l.dim; i++)
            l.value[(uint64_t)u * l.dim + i] = naive_key(&l, u, i);
    }
    naive_store(&l, c->sh.desc.key_elem, 64);
    return l;
}

static void naive_free(naive_lane *l)
{
    kvd_pages_free(l->value, (uint64_t)l->n_unit * l->dim * sizeof(float) + 64);
}

static double naive_q(const naive_lane *l, uint32_t h, uint32_t i)
{
    const kvd_select_args *a     = &l->c->args;
    const uint32_t         group = l->c->sh.n_head / l->c->sh.n_kv_head;

    return (double)
               a->q[a->seq[l->s].row * a->q_stride + (uint64_t)(l->head * group + h) * l->dim + i] *
           (double)a->scale;
}

static double naive_dot(const naive_lane *l, uint32_t h, uint32_t unit)
{
    double sum = 0.0;

    for (uint32_t i = 0; i < l->dim; i++)
        sum += naive_q(l, h, i) * (double)l->value[(uint64_t)unit * l->dim + i];
    return sum;
}

/* r as the index rounds it: sums of 16 channels side by side, then across. */
static double naive_radius(const naive_lane *l, uint32_t h, uint32_t chunk)
{
    const uint32_t ct      = l->c->sh.desc.chunk_tokens;
    float          sum[16] = { 0 };
    double         qq      = 0.0;

    for (uint32_t i = 0; i < l->dim; i++) {
        const float m = naive_chunk(l, chunk, i, NAIVE_MEAN);

        for (uint32_t t = 0; t < ct; t++) {
            const float x = naive_key(l, chunk * ct + t, i) - m;

            sum[i % 16] += x * x;
        }
        qq += naive_q(l, h, i) * naive_q(l, h, i);
    }
    for (uint32_t i = 1; i < 16; i++)
        sum[0] += sum[i];
    return sqrt(qq / l->dim) * (double)naive_half(sqrtf(sum[0] / (float)ct));
}

/* Weights of all chunks for query head h by the landmarks. */
static void naive_mark_weights(const index_case *c, uint32_t s, uint32_t head, double *w)
{
    const kvd_index_kind kind = c->sh.desc.kind;
    const uint32_t       n = c->sh.n_chunk[s], group = c->sh.n_head / c->sh.n_kv_head;
    naive_lane a = naive_marks(c, s, head, kind == KVD_INDEX_BOX ? NAIVE_MIN : NAIVE_MEAN);
    naive_lane b = naive_marks(c, s, head, kind == KVD_INDEX_BOX ? NAIVE_MAX : NAIVE_STD);

    for (uint32_t h = 0; h < group; h++) {
        for (uint32_t u = c->sh.first[s]; u < n; u++) {
            double x = kind == KVD_INDEX_BOX ? 0.0 : naive_dot(&a, h, u);

            for (uint32_t i = 0; i < a.dim && kind == KVD_INDEX_BOX; i++) {
                const double     q  = naive_q(&a, h, i);
                const naive_lane up = q > 0.0 ? b : a;

                x += q * (double)up.value[(uint64_t)u * a.dim + i];
            }
            for (uint32_t i = 0; i < a.dim && kind == KVD_INDEX_MEAN_STD; i++)
                x += (double)0.4f * fabs(naive_q(&a, h, i)) *
                     (double)b.value[(uint64_t)u * a.dim + i];
            if (c->sh.desc.radius)
                x += naive_radius(&a, h, u);
            w[(uint64_t)h * n + u] = x + log((double)c->sh.desc.chunk_tokens);
        }
    }
    naive_free(&a);
    naive_free(&b);
}

static void naive_key_weights(const index_case *c, uint32_t s, uint32_t head, const uint8_t *only,
                              double *w)
{
    const uint32_t n = c->sh.n_chunk[s], group = c->sh.n_head / c->sh.n_kv_head;
    const uint32_t ct = c->sh.desc.chunk_tokens;
    naive_lane     l  = naive_keys(c, s, head);

    for (uint32_t h = 0; h < group; h++) {
        for (uint32_t u = c->sh.first[s]; u < n; u++) {
            double sum = 0.0;

            if (only && !only[u])
                continue;
            for (uint32_t t = 0; t < ct; t++)
                sum += exp(naive_dot(&l, h, u * ct + t));
            w[(uint64_t)h * n + u] = log(sum);
        }
    }
    naive_free(&l);
}

/* Scores by the rule from logits; the softmax may overflow nothing here: logits stay below 100. */
static void naive_rule(const index_case *c, uint32_t s, uint32_t head, const double *w,
                       double *score)
{
    const uint32_t     n = c->sh.n_chunk[s], group = c->sh.n_head / c->sh.n_kv_head;
    const kvd_gqa_rule rule  = c->args.rule;
    const bool         kept  = rule == KVD_GQA_MEAN_KEPT || rule == KVD_GQA_MAX_KEPT;
    const uint32_t     heads = rule == KVD_GQA_MEAN_LOGITS ? 1 : group;
    const float       *lse   = c->lse + c->seq[s].row * c->args.lse_stride + head * group;

    for (uint32_t u = 0; u < n; u++)
        score[u] = 0.0;
    for (uint32_t h = 0; h < heads; h++) {
        double sum = kept ? exp((double)lse[h]) : 0.0;

        for (int pass = 0; pass < 2; pass++) {
            for (uint32_t u = c->sh.first[s]; u < n; u++) {
                double x = w[(uint64_t)h * n + u];

                for (uint32_t g = 1; g < group && rule == KVD_GQA_MEAN_LOGITS; g++)
                    x += w[(uint64_t)g * n + u];
                x = exp(rule == KVD_GQA_MEAN_LOGITS ? x / group : x);
                if (pass == 0)
                    sum += x;
                else if (rule == KVD_GQA_MAX_KEPT)
                    score[u] = fmax(score[u], x / sum);
                else
                    score[u] += x / sum / heads;
            }
        }
    }
}

/* The best 4 k by score, ties to the lower chunk. */
static void naive_best(const index_case *c, uint32_t s, uint32_t head, const double *score,
                       uint8_t *only)
{
    const uint32_t n = c->sh.n_chunk[s];

    for (uint32_t left = 4 * case_k(&c->sh, s, head); left > 0; left--) {
        uint32_t best = n;

        for (uint32_t u = c->sh.first[s]; u < n; u++) {
            if (!only[u] && (best == n || (float)score[u] > (float)score[best]))
                best = u;
        }
        if (best == n)
            return;
        only[best] = 1;
    }
}

/* [n_chunk]; to be freed with kvd_pages_free(.., n * 8 + 64). */
static double *naive_scores(const index_case *c, uint32_t s, uint32_t head)
{
    const uint32_t n = c->sh.n_chunk[s], group = c->sh.n_head / c->sh.n_kv_head;
    double        *w     = case_mem((uint64_t)group * n * sizeof(double));
    double        *score = case_mem(n * sizeof(double));
    uint8_t       *only  = case_mem(n);

    if (c->sh.desc.kind == KVD_INDEX_QUANT_K)
        naive_key_weights(c, s, head, NULL, w);
    else
        naive_mark_weights(c, s, head, w);
    naive_rule(c, s, head, w, score);
    if (c->sh.desc.kind == KVD_INDEX_CASCADE) {
        naive_best(c, s, head, score, only);
        naive_key_weights(c, s, head, only, w);
        naive_rule(c, s, head, w, score);
    }
    kvd_pages_free(only, n + 64);
    kvd_pages_free(w, (uint64_t)group * n * sizeof(double) + 64);
    return score;
}

#endif
