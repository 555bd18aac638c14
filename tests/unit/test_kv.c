/* SPDX-License-Identifier: Apache-2.0 */
/* test_kv.c - the KV store against a flat array, and tiers against no tiers.
 *
 * Random operations on several sequences; the model keeps for each sequence the stamps of its
 * tokens.  Rows are written through the backend's append with the stamp in every element and read
 * back through the layout, so blocks and records that were handed out twice, lost or mixed up show
 * as a wrong stamp.  The same walk runs over several stores side by side: everything resident, and
 * with small device tiers.  Sparse steps must give the same bits in all of them.  kv_check()
 * recounts after every step. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kv/kv_impl.h"
#include "support/sanitized.h"

enum {
    N_LAYER = 6,
    N_KV    = 3,
    N_HEAD  = 6,
    HEAD    = 16,
    N_SEQ   = 4,
    N_CTX   = 3000,
    N_TOKEN = 6144,
    N_BATCH = 300,
    N_STEP  = SANITIZED ? 500 : 700,
    N_STORE = 5,
    N_PLACE = 3 /* for parked sequences */
};

#define SEED 1u /* with it the walks are known to reach every case */

static uint64_t        seed;
static uint32_t        zone_tokens; /* of a cell; 0: no zone */
static kvd_record_type record;      /* of all stores */
static bool            parks;       /* walks park sequences, too */

/* Windows by lane, for walks in which they differ. */
static float    lane_caps[N_LAYER * N_KV];
static uint32_t lane_tokens[N_LAYER * N_KV];

typedef struct flat {
    uint32_t len[N_SEQ];
    float    stamp[N_SEQ][N_CTX];
    uint32_t parked_len[N_PLACE];
    float    parked[N_PLACE][N_CTX];
} flat;

typedef struct world {
    kvd_backend *be;
    kvd_stream  *st;
    kv_store    *store[N_STORE];
    uint32_t     n_store;
    bool         sparse, lanes; /* lanes: their windows differ */
    kvd_rng      rng;
    flat         f;
    uint32_t     next;
} world;

static float element(const kvd_kv_layout *l, const uint8_t *row)
{
    uint16_t h;
    float    f;

    if (l->type == KVD_DTYPE_F32) {
        memcpy(&f, row, 4);
        return f;
    }
    memcpy(&h, row, 2);
    return kvd_bf16_to_f32(h);
}

static float row_value(const kvd_kv_layout *l, const uint64_t *block, uint32_t head, uint32_t t,
                       bool v_row)
{
    const uint8_t *rec = (const uint8_t *)l->pool + block[t / l->block_tokens] + l->lane_off +
                         head * l->head_stride +
                         (t % l->block_tokens) / l->chunk_tokens * l->record_bytes;
    const uint32_t row = t % l->chunk_tokens + (v_row ? l->chunk_tokens : 0);

    return element(l, rec + (size_t)row * l->head_dim * (l->type == KVD_DTYPE_F32 ? 4 : 2));
}

/* Elements differ inside a row, so that scores and sums mean something; the first is the stamp. */
static float spread(float stamp, uint32_t i, uint32_t head, bool v)
{
    if (i == 0)
        return v ? -stamp : stamp;
    return (float)((int)((uint32_t)stamp * 7 + i * 13 + head * 5 + (v ? 3 : 0)) % 17 - 8) / 8.0f;
}

/* Writes n rows for a sequence in all layers. */
static void write_rows(world *w, kv_store *s, uint32_t seq, const float *stamp, uint32_t n)
{
    const kvd_kv_seq part = { .n_row  = n,
                              .n_past = kv_seq_len(s, seq),
                              .block  = kv_seq_blocks(s, seq) };
    const size_t     row  = (size_t)N_KV * HEAD;
    float           *k = calloc(n * row, sizeof(*k)), *v = calloc(n * row, sizeof(*v));

    for (uint32_t i = 0; i < n * row; i++) {
        const uint32_t h = i / HEAD % N_KV;

        k[i] = spread(stamp[i / row], i % HEAD, h, false);
        v[i] = spread(stamp[i / row], i % HEAD, h, true);
    }
    assert_int_equal(kv_step_upload(s, w->st, NULL), KVD_OK);
    for (uint32_t il = 0; il < N_LAYER; il++) {
        kvd_kv_append_args a = { .n_seq    = 1,
                                 .n_token  = n,
                                 .seq      = &part,
                                 .kv       = kv_layout(s, il),
                                 .k_stride = row,
                                 .v_stride = row,
                                 .k        = k,
                                 .v        = v };

        assert_int_equal(w->be->ops->kv_append(w->st, &a, NULL), KVD_OK);
    }
    free(k);
    free(v);
}

static void compare_seq(world *w, kv_store *s, uint32_t q)
{
    assert_int_equal(kv_seq_len(s, q), w->f.len[q]);
    for (uint32_t il = 0; il < N_LAYER && w->f.len[q] > 0; il++) {
        const uint64_t *block;
        kvd_kv_layout   l;

        assert_int_equal(kv_dense_view(s, w->st, il, q, &l, &block, NULL), KVD_OK);
        for (uint32_t t = il; t < w->f.len[q]; t += 1 + t % 7) {
            assert_true(row_value(&l, block, t % N_KV, t, false) == w->f.stamp[q][t]);
            assert_true(row_value(&l, block, t % N_KV, t, true) == -w->f.stamp[q][t]);
        }
    }
}

static void compare(world *w)
{
    uint64_t used = 0;

    for (uint32_t q = 0; q < N_SEQ; q++)
        used += w->f.len[q];
    for (uint32_t i = 0; i < N_PLACE; i++)
        used += w->f.parked_len[i];
    for (uint32_t i = 0; i < w->n_store; i++) {
        assert_int_equal(kv_used_tokens(w->store[i]), used);
        for (uint32_t q = 0; q < N_SEQ; q++)
            compare_seq(w, w->store[i], q);
    }
}

/* ---- operations -------------------------------------------------------------------- */

static void new_stamps(world *w, float *stamp, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        stamp[i] = (float)(w->next++ % 256); /* exact in bf16 */
}

/* A prompt, or a failed one.  Returns whether there was room, the same in all stores. */
static bool op_prompt(world *w, uint32_t q, uint32_t n)
{
    const bool       fails = kvd_rng_below(&w->rng, 5) == 0;
    float            stamp[N_BATCH];
    const kvd_status st = kv_seq_reserve(w->store[0], q, n, NULL);

    new_stamps(w, stamp, n);
    for (uint32_t i = 0; i < w->n_store; i++) {
        kv_store *s = w->store[i];

        assert_int_equal(i == 0 ? st : kv_seq_reserve(s, q, n, NULL), st);
        if (st != KVD_OK)
            continue;
        write_rows(w, s, q, stamp, n);
        if (fails) {
            kv_seq_release(s, q);
            continue;
        }
        kv_seq_commit(s, q, n, KV_MADE_PROMPT);
        assert_int_equal(kv_seq_seal(s, w->st, q, false, NULL), KVD_OK);
        if (w->sparse)
            kv_seq_admit(s, q, 64 + q * 16, 2.0f);
    }
    if (st == KVD_OK && !fails) {
        assert_true(w->f.len[q] + n <= N_CTX);
        memcpy(w->f.stamp[q] + w->f.len[q], stamp, n * sizeof(float));
        w->f.len[q] += n;
    }
    return st == KVD_OK;
}

static void op_truncate(world *w, uint32_t q)
{
    const uint32_t keep = (uint32_t)kvd_rng_below(&w->rng, w->f.len[q] + 1);

    for (uint32_t i = 0; i < w->n_store; i++)
        kv_seq_truncate(w->store[i], w->st, q, keep);
    w->f.len[q] = keep;
}

/* Stamps are ids here. */
static int32_t id_of(float stamp)
{
    return (int32_t)stamp;
}

static void park(world *w, uint32_t q, uint32_t place)
{
    static int32_t token[N_CTX];
    const uint32_t n = w->f.len[q];

    for (uint32_t t = 0; t < n; t++)
        token[t] = id_of(w->f.stamp[q][t]);
    for (uint32_t i = 0; i < w->n_store; i++)
        kv_park(w->store[i], q, place, token, (uint8_t)q);
    memcpy(w->f.parked[place], w->f.stamp[q], n * sizeof(float));
    w->f.parked_len[place] = n;
    w->f.len[q]            = 0;
}

static void unpark(world *w, uint32_t q, uint32_t place)
{
    static int32_t token[N_CTX];
    const uint32_t n = w->f.parked_len[place];

    for (uint32_t i = 0; i < w->n_store; i++) {
        kv_store *s = w->store[i];

        assert_int_equal(kv_unpark(s, w->st, place, q, token, NULL), KVD_OK);
        assert_int_equal(kv_seq_len(s, q), n);
        for (uint32_t t = 0; t < n; t++)
            assert_int_equal(token[t], id_of(w->f.parked[place][t]));
        if (w->sparse)
            kv_seq_admit(s, q, 64 + q * 16, 2.0f);
    }
    memcpy(w->f.stamp[q], w->f.parked[place], n * sizeof(float));
    w->f.len[q]            = n;
    w->f.parked_len[place] = 0;
}

static void drop(world *w, uint32_t place)
{
    for (uint32_t i = 0; i < w->n_store; i++)
        kv_parked_drop(w->store[i], place);
    w->f.parked_len[place] = 0;
}

/* What one store has given up none keeps, so that all have the same room. */
static void drop_shorter(world *w)
{
    for (uint32_t place = 0; place < N_PLACE; place++)
        for (uint32_t i = 0; i < w->n_store; i++)
            if (kv_parked_len(w->store[i], place) != w->f.parked_len[place])
                drop(w, place);
}

/* A sequence and a place change what they hold, as far as one of them is empty. */
static bool op_park(world *w, uint32_t q)
{
    const uint32_t place = (uint32_t)kvd_rng_below(&w->rng, N_PLACE);

    if (w->f.len[q] > 0 && w->f.parked_len[place] == 0)
        park(w, q, place);
    else if (w->f.len[q] == 0 && w->f.parked_len[place] > 0)
        unpark(w, q, place);
    else if (w->f.parked_len[place] > 0 && kvd_rng_below(&w->rng, 4) == 0)
        drop(w, place);
    else
        return false;
    return true;
}

/* The three stages in all layers over the rows in seq; out: [N_LAYER][row][N_HEAD * HEAD]. */
static void run_step(world *w, kv_store *s, const uint32_t *seq, uint32_t n, const float *query,
                     float *out)
{
    const uint32_t row[N_SEQ] = { 0, 1, 2, 3 };

    assert_int_equal(kv_step_begin(s, w->st, seq, row, n, NULL), KVD_OK);
    assert_int_equal(kv_step_upload(s, w->st, NULL), KVD_OK);
    for (uint32_t il = 0; il < N_LAYER; il++) {
        const kv_query q = { .layer      = il,
                             .n_row      = n,
                             .seq        = seq,
                             .row        = row,
                             .q_stride   = N_HEAD * HEAD,
                             .out_stride = N_HEAD * HEAD,
                             .q          = query + il,
                             .out        = out + (size_t)il * N_SEQ * N_HEAD * HEAD,
                             .scale      = 0.25f };

        assert_int_equal(kv_attend_sparse(s, w->st, &q, NULL), KVD_OK);
    }
    assert_int_equal(kv_step_join(s, w->st, NULL), KVD_OK);
    assert_int_equal(kv_step_end(s, NULL), KVD_OK);
}

/* Of the last layer's lanes: what was not attended is left to the cells. */
static void check_left(const kv_store *s, const uint32_t *seq, uint32_t n)
{
    const uint32_t cells = s->blocks_max * s->zone.block_tokens;

    for (uint32_t at = 0; at < n * N_KV; at++) {
        const kvd_window_result *r    = &s->step.change[at];
        uint32_t                 left = 0, most = 0;

        for (uint32_t c = 0; c < s->seq[seq[at / N_KV]].n_sealed / zone_tokens; c++) {
            left += s->step.left[(size_t)at * cells + c];
            most = s->step.left[(size_t)at * cells + c] > most
                       ? s->step.left[(size_t)at * cells + c]
                       : most;
        }
        assert_true(most <= zone_tokens);
        assert_int_equal(left + 4 * (s->sinks + r->n_urgent +
                                     (s->policy.selected ? r->n_hit : r->n_stay)),
                         s->seq[seq[at / N_KV]].n_sealed);
    }
}

/* One new token for every sequence that is sparse, in one batch. */
static uint32_t op_step(world *w)
{
    static float query[N_SEQ * N_HEAD * HEAD + N_LAYER], out[2][N_LAYER * N_SEQ * N_HEAD * HEAD];
    uint32_t     seq[N_SEQ], n = 0;
    float        stamp[N_SEQ];

    for (uint32_t q = 0; q < N_SEQ; q++) {
        if (kv_seq_sparse(w->store[0], q) && kv_seq_reserve(w->store[0], q, 1, NULL) == KVD_OK)
            seq[n++] = q;
    }
    new_stamps(w, stamp, n);
    for (uint32_t i = 0; i < KVD_COUNTOF(query); i++)
        query[i] = kvd_rng_f32(&w->rng) * 4.0f - 2.0f;
    for (uint32_t i = 0; i < w->n_store && n > 0; i++) {
        kv_store *s = w->store[i];

        for (uint32_t k = 0; k < n; k++) {
            assert_int_equal(kv_seq_reserve(s, seq[k], 1, NULL), KVD_OK);
            write_rows(w, s, seq[k], &stamp[k], 1);
        }
        run_step(w, s, seq, n, query, out[i > 0]);
        if (zone_tokens)
            check_left(s, seq, n);
        if (i > 0)
            assert_memory_equal(out[1], out[0], sizeof(out[0]));
        for (uint32_t k = 0; k < n; k++) {
            kv_seq_commit(s, seq[k], 1, KV_MADE_SPARSE);
            assert_int_equal(kv_seq_seal(s, w->st, seq[k], true, NULL), KVD_OK);
        }
    }
    for (uint32_t k = 0; k < n; k++)
        w->f.stamp[seq[k]][w->f.len[seq[k]]++] = stamp[k];
    return n;
}

/* ---- walks ------------------------------------------------------------------------- */

static kv_params walk_params(kvd_dtype type, bool sparse)
{
    return (kv_params){ .n_layer       = N_LAYER,
                        .n_head        = N_HEAD,
                        .n_kv_head     = N_KV,
                        .head_dim      = HEAD,
                        .n_seq         = N_SEQ,
                        .n_ctx         = N_CTX,
                        .n_token       = N_TOKEN,
                        .n_batch       = N_BATCH,
                        .type          = type,
                        .chunk_tokens  = 4,
                        .n_sink        = 16,
                        .n_local       = 64,
                        .sparse        = sparse,
                        .zone_tokens   = zone_tokens,
                        .record        = record,
                        .n_parked      = N_PLACE,
                        .index         = { .kind         = KVD_INDEX_MEAN,
                                           .elem         = KVD_INDEX_INT4,
                                           .radius       = true,
                                           .chunk_tokens = 4,
                                           .block_tokens = KV_BLOCK_TOKENS,
                                           .head_dim     = HEAD },
                        .window_tokens = sparse ? 224 : 0 };
}

static void world_open(world *w, kvd_dtype type, bool sparse, bool lanes)
{
    const kvd_backend_params bp  = { .name = "cpu", .n_thread = 2 };
    const kvd_backend_limits lim = { .n_token   = N_BATCH,
                                     .n_seq     = N_SEQ,
                                     .n_col     = 64,
                                     .n_head    = N_HEAD,
                                     .n_kv_head = N_KV,
                                     .head_dim  = HEAD,
                                     .n_ctx     = N_CTX,
                                     .n_chunk   = N_CTX / 4 + 64,
                                     .n_slot    = 64 };
    kv_params                p   = walk_params(type, sparse);
    kv_sizes                 z, all;

    memset(w, 0, sizeof(*w));
    w->next   = 1;
    w->sparse = sparse;
    w->lanes  = lanes;
    if (lanes)
        p.lane_tokens = lane_tokens;
    kvd_rng_seed(&w->rng, seed);
    assert_int_equal(kvd_backend_open(&w->be, &bp, NULL), KVD_OK);
    assert_int_equal(w->be->ops->stream_open(w->be, &w->st, NULL), KVD_OK);
    assert_int_equal(w->be->ops->reserve(w->be, &lim, NULL), KVD_OK);
    for (w->n_store = 0; w->n_store < N_STORE; w->n_store++) {
        const bool resident = w->n_store == 0 || w->n_store == 4;

        p.n_batch      = N_BATCH + (w->n_store == 2 ? 100 : 0); /* other offsets everywhere */
        p.device_steps = w->n_store >= 3; /* the last two go through steps without the host */
        p.device_bytes = 0;
        assert_int_equal(kv_plan(&p, &all, NULL), KVD_OK);
        p.device_bytes = 1;
        assert_int_equal(kv_plan(&p, &z, NULL), KVD_E_INVAL);
        assert_true(z.device_bytes < all.device_bytes);
        if (w->n_store == 2)
            z.device_bytes += (all.device_bytes - z.device_bytes) / 2;
        p.device_bytes = resident ? 0 : z.device_bytes;
        w->be->unified = w->n_store < 3; /* they copy as if the device's memory were its own */
        assert_int_equal(kv_store_open(&w->store[w->n_store], w->be, &p, NULL), KVD_OK);
        w->be->unified = true;
        assert_int_equal(kv_resident(w->store[w->n_store]), resident);
    }
}

static void world_close(world *w)
{
    for (uint32_t i = 0; i < w->n_store; i++)
        kv_store_close(w->store[i]);
    w->be->ops->stream_close(w->st);
    kvd_backend_close(w->be);
}

/* Every window that has been filled is full, up to its lane's cap. */
static void check_filled(const kv_store *s)
{
    for (uint32_t q = 0; q < N_SEQ; q++) {
        if (!kv_seq_sparse(s, q) || s->seq[q].step == 0)
            continue;
        for (uint32_t i = 0; i < N_LAYER * N_KV; i++) {
            const uint64_t lane   = kv_lane(s, q, 0) + i;
            const uint32_t budget = (64 + q * 16) / 4, n_chunk = s->seq[q].n_sealed / 4 - s->sinks;
            const uint32_t cap = (uint32_t)((float)budget * lane_caps[i]);
            uint32_t       n   = 0;

            for (uint32_t k = 0; k < s->slots_max; k++)
                n += s->chunk_of[lane * s->slots_max + k] != KVD_CHUNK_NONE;
            assert_true(n <= cap && n >= (cap < n_chunk      ? cap
                                          : budget < n_chunk ? budget
                                                             : n_chunk));
        }
    }
}

/* lanes: windows differ by lane_caps; otherwise, with policy->caps, all stores but the first have
 * those, which should then make no difference. */
static void random_walk(kvd_dtype type, bool sparse, bool lanes, const kv_policy *policy)
{
    static world w;
    uint32_t     n_full = 0, n_step = 0, n_park = 0;
    kv_counts    c, c0;

    world_open(&w, type, sparse, lanes);
    for (uint32_t i = 0; i < w.n_store && policy; i++) {
        kv_policy p = *policy;

        if (i == 0 && !lanes)
            p.caps = NULL;
        kv_set_policy(w.store[i], &p);
    }
    for (int step = 0; step < N_STEP; step++) {
        const uint32_t q  = (uint32_t)kvd_rng_below(&w.rng, N_SEQ);
        const uint64_t op = kvd_rng_below(&w.rng, 10);

        if (op < 1)
            op_truncate(&w, q);
        else if (op < 4 || !sparse)
            n_full += !op_prompt(&w, q, (uint32_t)kvd_rng_below(&w.rng, op % 2 ? 40 : N_BATCH));
        else
            n_step += op_step(&w);
        if (parks && kvd_rng_below(&w.rng, 3) == 0)
            n_park += op_park(&w, q);
        drop_shorter(&w);
        for (uint32_t i = 0; i < w.n_store; i++)
            kv_check(w.store[i]);
        for (uint32_t i = 0; i < w.n_store && lanes; i++)
            check_filled(w.store[i]);
        if (step % 25 == 0 && record == KVD_RECORD_RAW)
            compare(&w);
    }
    if (record == KVD_RECORD_RAW)
        compare(&w);
    assert_true(seed != SEED || sparse || parks || n_full > 0); /* the walk reached the limits */
    assert_true(!parks || (n_park > 50 && (!sparse || n_step > 50)));
    kv_get_counts(w.store[0], &c0);
    kv_get_counts(w.store[3], &c);
    assert_true(c.bytes_down > 0 && c0.bytes_down == 0);
    if (sparse && seed == SEED &&
        !parks) { /* steps, misses, evictions and generated blocks all came to pass */
        assert_true(n_step > 100 && c.n_miss > 0 && c.n_evict > 0 && c.n_grown > 0);
        assert_true(c.n_hit == c0.n_hit && c.n_urgent == c0.n_urgent && c.bytes_up > 0);
    }
    world_close(&w);
}

static void test_random_walk_dense(void **state)
{
    (void)state;
    random_walk(KVD_DTYPE_BF16, false, false, NULL);
    random_walk(KVD_DTYPE_F32, false, false, NULL);
}

static void test_random_walk_sparse(void **state)
{
    (void)state;
    random_walk(KVD_DTYPE_BF16, true, false, NULL);
    random_walk(KVD_DTYPE_F32, true, false, NULL);
}

static void test_random_walk_policies(void **state)
{
    (void)state;
    for (int evict = 0; evict < KVD_EVICT_POLICY_COUNT; evict++) {
        const kv_policy p = { .evict    = (kvd_evict_policy)evict,
                              .alpha    = evict % 2 ? 1.0f : 0.5f,
                              .strict   = evict % 2,
                              .selected = evict / 2 % 2 };

        random_walk(KVD_DTYPE_BF16, true, false, &p);
    }
}

/* Sequences are parked, come back under other numbers and are dropped: nothing is lost, mixed up or
 * handed out twice, and steps give the same bits in all stores. */
static void test_random_walk_parked(void **state)
{
    (void)state;
    parks = true;
    random_walk(KVD_DTYPE_BF16, false, false, NULL);
    random_walk(KVD_DTYPE_BF16, true, false, NULL);
    record = KVD_RECORD_INT8;
    random_walk(KVD_DTYPE_BF16, true, false, NULL);
    record = KVD_RECORD_RAW;
    parks  = false;
}

/* Appends n tokens to a sequence of one store. */
static void append(world *w, kv_store *s, uint32_t q, uint32_t n, float first)
{
    float stamp[N_BATCH];

    for (uint32_t done = 0; done < n;) {
        const uint32_t k = n - done < N_BATCH ? n - done : N_BATCH;

        for (uint32_t i = 0; i < k; i++)
            stamp[i] = first + (float)((done + i) % 100);
        assert_int_equal(kv_seq_reserve(s, q, k, NULL), KVD_OK);
        write_rows(w, s, q, stamp, k);
        kv_seq_commit(s, q, k, KV_MADE_PROMPT);
        assert_int_equal(kv_seq_seal(s, w->st, q, false, NULL), KVD_OK);
        done += k;
    }
}

/* Where raw blocks are few, parked sequences give up what is not sealed, the one parked first
 * before others, and no more than is needed; what they keep is what they had. */
static void test_parked_give_up_raw_blocks(void **state)
{
    static world  w;
    int32_t       token[600] = { 0 };
    kv_store     *s;
    kvd_kv_layout l;
    uint32_t      n_left = 0;

    (void)state;
    world_open(&w, KVD_DTYPE_BF16, true, false);
    s = w.store[1];
    for (uint32_t i = 0; i < N_PLACE; i++) {
        append(&w, s, 0, 600, (float)i * 8.0f); /* 512 of them sealed, the rest in a raw block */
        assert_int_equal(s->seq[0].n_sealed, 512);
        kv_park(s, 0, i, token, 0);
        kv_check(s);
    }
    for (uint32_t q = 0; q < N_SEQ; q++) { /* all that can be raw at a time */
        append(&w, s, q, 300, 50.0f);
        assert_int_equal(kv_seq_reserve(s, q, 212, NULL), KVD_OK);
        kv_check(s);
    }
    for (uint32_t q = 0; q < N_SEQ && s->n_free > 0; q++) {
        kv_seq_release(s, q);
        assert_int_equal(kv_seq_reserve(s, q, N_BATCH, NULL), KVD_OK);
        kv_check(s);
    }
    for (uint32_t i = 0; i < N_PLACE; i++) {
        const uint32_t n = kv_parked_len(s, i);

        assert_true(n == 512 || n == 600);
        assert_true(n == 600 || n_left == 0); /* the first ones, if any */
        n_left += n == 600;
    }
    kv_parked_yield(s, s->sizes.n_raw);
    for (uint32_t q = 0; q < N_SEQ; q++) {
        kv_seq_release(s, q);
        kv_seq_truncate(s, w.st, q, 0);
    }
    for (uint32_t i = 0; i < N_PLACE; i++) {
        const uint64_t *block;

        assert_int_equal(kv_parked_len(s, i), 512);
        assert_int_equal(kv_unpark(s, w.st, i, 1, token, NULL), KVD_OK);
        assert_int_equal(s->seq[1].n_sealed, 256); /* as 512 tokens have it */
        kv_check(s);
        assert_int_equal(kv_dense_view(s, w.st, 2, 1, &l, &block, NULL), KVD_OK);
        for (uint32_t t = 0; t < 512; t += 3)
            assert_true(row_value(&l, block, 1, t, false) ==
                        (float)i * 8.0f + (float)(t % N_BATCH % 100));
        kv_seq_truncate(s, w.st, 1, 0);
    }
    world_close(&w);
}

/* The same with packed records: what is read back is not what was written, but the same everywhere.
 */
static void test_random_walk_packed(void **state)
{
    (void)state;
    for (record = KVD_RECORD_INT8; record <= KVD_RECORD_INT4; record++)
        random_walk(KVD_DTYPE_BF16, true, false, NULL);
    record = KVD_RECORD_RAW;
}

/* The same with cells for what is not attended. */
static void test_random_walk_zone(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        const kv_policy p = { .alpha = 0.5f, .selected = i == 1, .strict = i == 2, .zone = true };

        zone_tokens = 16u << 2 * i;
        random_walk(i == 1 ? KVD_DTYPE_F32 : KVD_DTYPE_BF16, true, false, &p);
    }
    zone_tokens = 0;
}

static void fill_caps(bool differ)
{
    static const float cap[] = { 1.0f, 2.0f, 1.5f, 1.25f };

    for (uint32_t i = 0; i < N_LAYER * N_KV; i++) {
        lane_caps[i]   = differ ? cap[(i + i / 4) % 4] : 2.0f;
        lane_tokens[i] = 4 * (uint32_t)(28.0f * lane_caps[i]);
    }
}

/* Windows of different sizes: within their lane's size, full, the same on every tier. */
static void test_random_walk_caps(void **state)
{
    const kv_policy p = { .alpha = 0.5f, .caps = lane_caps };

    (void)state;
    fill_caps(true);
    random_walk(KVD_DTYPE_BF16, true, true, &p);
}

/* The same cap in every lane is the cap for all: the same bits and counts. */
static void test_random_walk_equal_caps(void **state)
{
    const kv_policy p = { .alpha = 0.5f, .caps = lane_caps };

    (void)state;
    fill_caps(false);
    random_walk(KVD_DTYPE_BF16, true, false, &p);
}

/* A small window takes less room, by just what it is smaller. */
static void test_caps_save_memory(void **state)
{
    kv_params p     = walk_params(KVD_DTYPE_BF16, true);
    uint64_t  bytes = 2 * 2 * HEAD * 4, less = 0;
    kv_sizes  z, all;

    (void)state;
    fill_caps(true);
    p.device_bytes = 1;
    assert_int_equal(kv_plan(&p, &all, NULL), KVD_E_INVAL);
    p.lane_tokens = lane_tokens;
    assert_int_equal(kv_plan(&p, &z, NULL), KVD_E_INVAL);
    for (uint32_t i = 0; i < N_LAYER * N_KV; i++)
        less += (224 - lane_tokens[i]) / 4 * bytes * N_SEQ;
    assert_true(less > 0);
    assert_int_equal(z.bytes[KV_BUF_WINDOW], all.bytes[KV_BUF_WINDOW] - less);
    assert_int_equal(z.bytes[KV_BUF_MAP], all.bytes[KV_BUF_MAP]);
    assert_int_equal(z.device_bytes, all.device_bytes - less);
}

static void test_limits_are_named(void **state)
{
    const kv_params          p  = { .n_layer      = 1,
                                    .n_head       = 1,
                                    .n_kv_head    = 1,
                                    .head_dim     = 16,
                                    .n_seq        = 2,
                                    .n_ctx        = 1024,
                                    .n_token      = 1024,
                                    .n_batch      = 1024,
                                    .type         = KVD_DTYPE_BF16,
                                    .chunk_tokens = 4,
                                    .n_local      = 64 };
    const kvd_backend_params bp = { .name = "ref" };
    kvd_backend             *be;
    kvd_stream              *st;
    kv_store                *s;
    kvd_err                  err = { 0 };

    (void)state;
    assert_int_equal(kvd_backend_open(&be, &bp, NULL), KVD_OK);
    assert_int_equal(be->ops->stream_open(be, &st, NULL), KVD_OK);
    assert_int_equal(kv_store_open(&s, be, &p, NULL), KVD_OK);
    assert_int_equal(kv_seq_reserve(s, 0, 1025, &err), KVD_E_FULL);
    assert_non_null(strstr(err.msg, "1024"));
    assert_int_equal(kv_seq_reserve(s, 0, 600, &err), KVD_OK);
    kv_seq_commit(s, 0, 600, KV_MADE_PROMPT);
    assert_int_equal(kv_seq_reserve(s, 1, 300, &err), KVD_E_FULL); /* two blocks, one is free */
    assert_non_null(strstr(err.msg, "sequence 1"));
    kv_check(s);
    kv_seq_truncate(s, st, 0, 0);
    assert_int_equal(kv_seq_reserve(s, 1, 1024, &err), KVD_OK);
    kv_store_close(s);
    be->ops->stream_close(st);
    kvd_backend_close(be);
}

static void test_plan_refuses_what_wraps(void **state)
{
    const kv_params p = { .n_layer      = 1024,
                          .n_head       = 4096,
                          .n_kv_head    = 4096,
                          .head_dim     = 1024,
                          .n_seq        = 4096,
                          .n_ctx        = 1u << 30,
                          .n_token      = UINT64_MAX / 2,
                          .n_batch      = 1,
                          .type         = KVD_DTYPE_BF16,
                          .chunk_tokens = 4,
                          .n_local      = 64 };
    kv_sizes        sz;
    kvd_err         err = { 0 };

    (void)state;
    assert_int_equal(kv_plan(&p, &sz, &err), KVD_E_INVAL);
}

/* A tier that is too small is refused with the bytes that would do and what they are for. */
static void test_small_tiers_are_refused(void **state)
{
    kv_params p   = walk_params(KVD_DTYPE_BF16, true);
    kvd_err   err = { 0 };
    kv_sizes  z;

    (void)state;
    assert_int_equal(kv_plan(&p, &z, NULL), KVD_OK);
    p.device_bytes = 1000;
    assert_int_equal(kv_plan(&p, &z, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "(kv_device)"));
    assert_false(z.resident);
    p.device_bytes = z.device_bytes;
    assert_int_equal(kv_plan(&p, &z, &err), KVD_OK); /* what it asked for is enough */
    p.host_bytes = z.bytes[KV_BUF_HOST] - 1;
    assert_int_equal(kv_plan(&p, &z, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "(kv_host)"));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_walk_dense),
        cmocka_unit_test(test_random_walk_sparse),
        cmocka_unit_test(test_random_walk_parked),
        cmocka_unit_test(test_parked_give_up_raw_blocks),
        cmocka_unit_test(test_random_walk_packed),
        cmocka_unit_test(test_random_walk_zone),
        cmocka_unit_test(test_random_walk_caps),
        cmocka_unit_test(test_random_walk_equal_caps),
        cmocka_unit_test(test_caps_save_memory),
        cmocka_unit_test(test_random_walk_policies),
        cmocka_unit_test(test_small_tiers_are_refused),
        cmocka_unit_test(test_limits_are_named),
        cmocka_unit_test(test_plan_refuses_what_wraps),
    };

    seed = argc == 3 && strcmp(argv[1], "--seed") == 0 ? strtoull(argv[2], NULL, 0) : SEED;
    printf("seed %llu (--seed N repeats)\n", (unsigned long long)seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
