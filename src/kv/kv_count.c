/* SPDX-License-Identifier: Apache-2.0 */
/* kv_count.c - what a sparse step tells: counters, observers, and checks of the windows' maps.
 *
 * Thread: the session's. */
#include "kv/kv_cache.h"

/* ---- counters ------------------------------------------------------------------------- */

static void count_lane(kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
                       const kvd_select_result *chosen, const kvd_window_result *r)
{
    const size_t in_layer = (size_t)layer * s->params.n_kv_head + head;
    kv_counts   *c        = &s->counts;

    c->mass += (double)chosen->mass;
    c->n_mass++;
    s->seq[seq].mass += (double)chosen->mass;
    s->seq[seq].n_mass++;
    s->lane_mass[in_layer] += (double)chosen->mass;
    s->lane_n_mass[in_layer]++;
    if (kv_refills(&s->seq[seq])) {
        c->n_refill += r->n_miss;
        return;
    }
    c->n_select += r->n_hit + r->n_miss;
    c->n_hit += r->n_hit;
    c->n_miss += r->n_miss;
    c->n_urgent += r->n_urgent;
    c->n_evict += r->n_evict;
    c->n_attend +=
        s->policy.selected ? chosen->n_sel - (r->n_miss - r->n_urgent) : r->n_stay + r->n_urgent;
    s->lane_select[in_layer] += r->n_hit + r->n_miss;
    s->lane_hit[in_layer] += r->n_hit;
}

void kv_count_rows(kv_store *s, const kv_query *q)
{
    const uint32_t n_h = s->params.n_kv_head;

    for (uint32_t i = 0; i < q->n_row * n_h; i++) {
        const size_t at = kv_query_lane(s, q) + i;

        count_lane(s, q->seq[i / n_h], q->layer, i % n_h, &s->step.chosen[at], &s->step.change[at]);
    }
}

/* After a step that the device drove: all layers. */
void kv_count_step(kv_store *s)
{
    const uint32_t n_h = s->params.n_kv_head;

    for (uint32_t k = 0; k < s->step.n_row * s->params.n_layer * n_h; k++) {
        const uint32_t i = k / (s->params.n_layer * n_h), layer = k / n_h % s->params.n_layer;
        const size_t   at          = kv_lane_at(s, layer) + i * n_h + k % n_h;
        const kvd_window_result *r = &s->step.change[at];

        count_lane(s, s->step.rows_seq[i], layer, k % n_h, &s->step.chosen[at], r);
        if (!s->sizes.resident && !s->exec.measure.no_fetch)
            s->counts.bytes_up += r->n_miss * s->packed_bytes;
    }
}

void kv_count_late(kv_store *s, uint32_t layer, uint32_t head, uint32_t n)
{
    s->counts.n_disk_late += n;
    s->counts.n_select += n;
    s->lane_select[layer * s->params.n_kv_head + head] += n;
}

uint64_t kv_select_bytes(const kv_store *s, uint32_t seq)
{
    const kv_seq  *q     = &s->seq[seq];
    const uint64_t lanes = (uint64_t)s->params.n_layer * s->params.n_kv_head;
    const uint64_t kept  = s->sinks + kvd_div_up(q->len - q->n_sealed, s->params.chunk_tokens);

    return lanes * (q->n_sealed / KV_BLOCK_TOKENS * kvd_index_lane_bytes(&s->index.desc) +
                    kept * s->layout.record_bytes);
}

uint64_t kv_record_raw(const kv_store *s)
{
    return s->layout.record_bytes;
}

uint64_t kv_dense_bytes(const kv_store *s, uint32_t seq)
{
    return s->seq[seq].len * s->sizes.bytes_per_token;
}

/* ---- observers ------------------------------------------------------------------------ */

void kv_tap_rows(const kv_store *s, const kv_query *q)
{
    for (uint32_t at = 0; at < q->n_row * s->params.n_kv_head; at++) {
        const uint32_t        i = at / s->params.n_kv_head, h = at % s->params.n_kv_head;
        const kv_seq         *seq = &s->seq[q->seq[i]];
        const kvd_select_seq *c   = &s->step.select[i];

        s->tap(s->tap_ctx, &(kv_tap_lane){ .seq         = q->seq[i],
                                           .layer       = q->layer,
                                           .kv_head     = h,
                                           .step        = seq->step,
                                           .first_chunk = c->first_chunk,
                                           .n_chunk     = c->n_chunk,
                                           .budget      = seq->budget,
                                           .n_sel       = s->step.chosen[at].n_sel,
                                           .sel         = c->sel + (uint64_t)h * s->slots_max,
                                           .score       = c->score + (uint64_t)h * s->n_chunk_max,
                                           .ema         = c->ema + (uint64_t)h * s->n_chunk_max });
    }
}

bool kv_set_tap(kv_store *s, kv_tap_fn fn, void *ctx)
{
    if (fn && (s->mirror[KV_ARGS].ptr || s->exec.cpu))
        return false;
    s->tap     = fn;
    s->tap_ctx = ctx;
    return true;
}

/* ---- checks --------------------------------------------------------------------------- */

static void check_lane(const kv_store *s, const kv_seq *q, uint64_t lane)
{
    const uint16_t *slot_of  = s->slot_of + lane * s->n_chunk_max;
    const uint32_t *chunk_of = s->chunk_of + lane * s->slots_max;
    const uint32_t  n_chunk  = q->n_sealed / s->params.chunk_tokens;

    for (uint32_t c = 0; c < n_chunk; c++)
        kvd_assert(slot_of[c] == KVD_SLOT_NONE ||
                   (slot_of[c] < s->cap[lane] && chunk_of[slot_of[c]] == c && c >= s->sinks));
    for (uint32_t i = 0; i < s->slots_max; i++)
        kvd_assert(chunk_of[i] == KVD_CHUNK_NONE ||
                   (i < s->cap[lane] && chunk_of[i] < n_chunk && slot_of[chunk_of[i]] == i));
}

void kv_check_windows(const kv_store *s)
{
    for (uint32_t i = 0; i < s->params.n_seq && !s->mirror[KV_ARGS].ptr; i++) {
        if (!kv_seq_sparse(s, i) || kv_refills(&s->seq[i]))
            continue;
        for (uint32_t l = 0; l < s->params.n_layer * s->params.n_kv_head; l++)
            check_lane(s, &s->seq[i], kv_lane(s, i, 0) + l);
    }
    kv_tier_check(s);
}
