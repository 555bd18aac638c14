/* SPDX-License-Identifier: Apache-2.0 */
/* test_disk_serve.c - steps that the device goes through alone, with records on a simulated disk:
 * against a store with everything resident, bit for bit, with few places for what arrives; and what
 * becomes of them when the disk fails, is silent, or nobody serves.
 *
 * The device is a thread of its own (support/split.h), so the queues are tested as they are used;
 * --backend cuda takes a GPU in its place.
 * usage: test_disk_serve [--seed N] [--backend NAME] */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kv/kv_cache.h"
#include "support/disk_model.h"
#include "support/sanitized.h"
#include "support/split.h"

enum {
    N_LAYER  = 5,
    N_KV     = 2,
    N_HEAD   = 4,
    HEAD     = 16,
    N_SEQ    = 2,
    N_CTX    = 2048,
    N_BATCH  = 256,
    N_PROMPT = 1300,
    N_STEP   = SANITIZED ? 40 : 60, /* a multiple of 20 */
    ALWAYS   = 65536                /* of 65,536 requests */
};

#define TIMEOUT_NS UINT64_C(300000000)   /* of a disk that does not answer */
#define PATIENT_NS UINT64_C(60000000000) /* of one that does, on a busy machine */

static uint64_t timeout_ns = PATIENT_NS;

static uint64_t    seed_ = 1;
static const char *backend_; /* NULL: the CPU's, its memory hidden */

typedef struct store {
    kv_store *s;
    bool      spills;
} store;

typedef struct world {
    kvd_backend *be;
    kvd_stream  *st;
    store        one[2]; /* resident; on disk */
    os_io_sim    sim;
    kvd_rng      rng;
    char         dir[256];
    int32_t      token[N_SEQ][N_CTX];
    /* pinned: what ops read and write */
    kvd_mem     mem;
    float      *k, *v; /* [N_BATCH][N_KV][HEAD] */
    float      *query; /* [N_LAYER][N_SEQ][N_HEAD][HEAD] */
    float      *out[2];
    uint32_t   *row; /* [N_SEQ] */
    kvd_kv_seq *part;
} world;

static const size_t row_floats = (size_t)N_KV * HEAD, q_floats = (size_t)N_HEAD * HEAD;

/* What K and V of a token are made of: its id, its place, lane and element. */
static float value(int32_t token, uint32_t t, uint32_t lane, uint32_t i, bool v)
{
    return (float)(((uint32_t)token * 7 + t * 13 + lane * 5 + i * 3 + (v ? 11 : 0)) % 61) / 32.0f -
           1.0f;
}

static void sync(world *w)
{
    assert_int_equal(w->be->ops->stream_sync(w->st, NULL), KVD_OK);
}

/* ---- the world ------------------------------------------------------------------------ */

static void open_store(world *w, uint32_t i, kvd_record_type record, uint32_t land)
{
    const os_io_params io  = { .kind = OS_IO_SIM, .sim = &w->sim };
    kv_params          p   = { .n_layer         = N_LAYER,
                               .n_head          = N_HEAD,
                               .n_kv_head       = N_KV,
                               .head_dim        = HEAD,
                               .n_seq           = N_SEQ,
                               .n_ctx           = N_CTX,
                               .n_token         = N_SEQ * N_CTX,
                               .n_batch         = N_BATCH,
                               .type            = KVD_DTYPE_BF16,
                               .record          = record,
                               .chunk_tokens    = 4,
                               .n_sink          = 16,
                               .n_local         = 64,
                               .sparse          = true,
                               .index           = { .kind         = KVD_INDEX_MEAN,
                                                    .elem         = KVD_INDEX_INT4,
                                                    .radius       = true,
                                                    .chunk_tokens = 4,
                                                    .block_tokens = KV_BLOCK_TOKENS,
                                                    .head_dim     = HEAD },
                               .window_tokens   = 320,
                               .device_steps    = true,
                               .apart           = true,
                               .disk_io         = &io,
                               .disk_timeout_ns = timeout_ns,
                               .land_records    = land };
    kvd_err            err = { 0 };
    kv_sizes           z;

    if (i == 1) {
        p.cache_dir    = w->dir;
        p.host_bytes   = 60000;
        p.device_bytes = 1;
        assert_int_equal(kv_plan(&p, &z, NULL), KVD_E_INVAL);
        p.device_bytes = z.device_bytes;
    }
    if (kv_store_open(&w->one[i].s, w->be, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    w->one[i].spills = i == 1;
    assert_true((w->one[i].s->tier != NULL) == (i == 1) && kv_resident(w->one[i].s) == (i == 0));
    for (uint32_t q = 0; q < N_SEQ; q++)
        kv_seq_source(w->one[i].s, q, w->token[q], 0);
}

static void open_memory(world *w)
{
    float *f;

    assert_int_equal(w->be->ops->mem_alloc(w->be, KVD_MEM_PINNED, 1 << 20, &w->mem, NULL), KVD_OK);
    f         = w->mem.ptr;
    w->k      = f;
    w->v      = w->k + N_BATCH * row_floats;
    w->query  = w->v + N_BATCH * row_floats;
    w->out[0] = w->query + N_LAYER * N_SEQ * q_floats;
    w->out[1] = w->out[0] + N_LAYER * N_SEQ * q_floats;
    w->row    = (uint32_t *)(w->out[1] + N_LAYER * N_SEQ * q_floats);
    w->part   = (kvd_kv_seq *)(w->row + 2 * N_SEQ);
    for (uint32_t i = 0; i < N_SEQ; i++)
        w->row[i] = i;
}

static void world_open(world *w, kvd_record_type record, uint32_t land)
{
    const kvd_backend_params bp  = { .name          = backend_ ? backend_ : "cpu",
                                     .n_thread      = 1,
                                     .deterministic = true };
    const kvd_backend_limits lim = { .n_token   = N_BATCH,
                                     .n_seq     = N_SEQ,
                                     .n_col     = 64,
                                     .n_head    = N_HEAD,
                                     .n_kv_head = N_KV,
                                     .head_dim  = HEAD,
                                     .n_ctx     = N_CTX,
                                     .n_chunk   = N_CTX / 4,
                                     .n_slot    = 80 };
    kvd_err                  err = { 0 };

    memset(w, 0, sizeof(*w));
    w->sim.seed = seed_;
    kvd_rng_seed(&w->rng, seed_);
    dm_dir_make(w->dir);
    if (kvd_backend_open(&w->be, &bp, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    if (!backend_)
        split_begin(w->be);
    assert_int_equal(w->be->ops->stream_open(w->be, &w->st, NULL), KVD_OK);
    assert_int_equal(w->be->ops->reserve(w->be, &lim, NULL), KVD_OK);
    open_memory(w);
    for (uint32_t i = 0; i < 2; i++)
        open_store(w, i, record, land);
}

static void world_close(world *w)
{
    for (uint32_t i = 0; i < 2; i++)
        kv_store_close(w->one[i].s);
    w->be->ops->mem_free(w->be, &w->mem);
    w->be->ops->stream_close(w->st);
    if (!backend_)
        split_end(w->be);
    kvd_backend_close(w->be);
    dm_dir_remove(w->dir);
}

/* ---- prompts and steps ------------------------------------------------------------------ */

/* K and V of a sequence's next n tokens, of one layer. */
static void append(world *w, kv_store *s, uint32_t q, uint32_t n, uint32_t layer)
{
    const uint32_t     past = kv_seq_len(s, q);
    kvd_kv_append_args a    = { .n_seq    = 1,
                                .n_token  = n,
                                .seq      = w->part,
                                .kv       = kv_layout(s, layer),
                                .k_stride = row_floats,
                                .v_stride = row_floats,
                                .k        = w->k,
                                .v        = w->v };

    *w->part = (kvd_kv_seq){ .n_row = n, .n_past = past, .block = kv_seq_blocks(s, q) };
    for (uint32_t i = 0; i < n * row_floats; i++) {
        const uint32_t t    = past + (uint32_t)(i / row_floats);
        const uint32_t lane = layer * N_KV + i / HEAD % N_KV;

        w->k[i] = value(w->token[q][t], t, lane, i % HEAD, false);
        w->v[i] = value(w->token[q][t], t, lane, i % HEAD, true);
    }
    assert_int_equal(w->be->ops->kv_append(w->st, &a, NULL), KVD_OK);
    sync(w);
}

/* Tokens up to number n, batch by batch, as a prompt. */
static void prompt(world *w, kv_store *s, uint32_t q, uint32_t n)
{
    kvd_err err = { 0 };

    while (kv_seq_len(s, q) < n) {
        const uint32_t m = (uint32_t)kvd_min_u64(n - kv_seq_len(s, q), N_BATCH);

        assert_int_equal(kv_seq_reserve(s, q, m, NULL), KVD_OK);
        assert_int_equal(kv_step_upload(s, w->st, NULL), KVD_OK);
        for (uint32_t il = 0; il < N_LAYER; il++)
            append(w, s, q, m, il);
        kv_seq_commit(s, q, m, KV_MADE_PROMPT);
        if (kv_seq_seal(s, w->st, q, false, &err) != KVD_OK)
            fail_msg("%s", err.msg);
    }
    sync(w);
    kv_seq_admit(s, q, 96 + 32 * q, 2.0f);
    kv_check(s);
}

static void prompts(world *w)
{
    for (uint32_t q = 0; q < N_SEQ; q++) {
        for (uint32_t t = 0; t < N_CTX; t++)
            w->token[q][t] = (int32_t)kvd_rng_below(&w->rng, 50);
        for (uint32_t i = 0; i < 2; i++)
            prompt(w, w->one[i].s, q, N_PROMPT + 200 * q);
    }
}

static void next_queries(world *w)
{
    for (uint32_t i = 0; i < N_LAYER * N_SEQ * q_floats; i++) /* neighbouring steps are alike */
        w->query[i] = 0.9f * w->query[i] + kvd_rng_f32(&w->rng) - 0.5f;
}

enum { AS_RECORDED = 1, UNSERVED = 2, CANCELED = 4 };

static kvd_status layers(world *w, uint32_t i, const uint32_t *seq, uint32_t n, uint32_t how,
                         kvd_err *err)
{
    kv_store *s = w->one[i].s;

    for (uint32_t il = 0; il < N_LAYER; il++) {
        const kv_query q = { .layer      = il,
                             .n_row      = n,
                             .seq        = seq,
                             .row        = w->row,
                             .q_stride   = q_floats,
                             .out_stride = q_floats,
                             .q          = w->query + il * N_SEQ * q_floats,
                             .out        = w->out[i] + il * N_SEQ * q_floats,
                             .scale      = 0.25f };

        if (how & CANCELED && il == N_LAYER - 1)
            return KVD_E_CANCELED;
        KVD_TRY(kv_attend_sparse(s, w->st, &q, err));
    }
    return kv_step_join(s, w->st, err);
}

/* One token of each sequence.  A step that fails leaves the sequences as they were. */
static kvd_status step(world *w, uint32_t i, uint32_t how, kvd_err *err)
{
    static const uint32_t seq[N_SEQ] = { 0, 1 };
    kv_store             *s          = w->one[i].s;
    kvd_status            st;

    for (uint32_t q = 0; q < N_SEQ; q++)
        assert_int_equal(kv_seq_reserve(s, q, 1, NULL), KVD_OK);
    assert_int_equal(kv_step_upload(s, w->st, NULL), KVD_OK);
    for (uint32_t q = 0; q < N_SEQ; q++) {
        for (uint32_t il = 0; il < N_LAYER; il++)
            append(w, s, q, 1, il);
    }
    st = kv_step_begin(s, w->st, seq, w->row, N_SEQ, err);
    if (st == KVD_OK)
        st = kv_step_upload(s, w->st, err);
    assert_true(kv_step_device_driven(s));
    kv_step_recording(s, how != 0);
    if (st == KVD_OK)
        st = layers(w, i, seq, N_SEQ, how, err);
    kv_step_recording(s, false);
    if (st == KVD_OK)
        st = how & UNSERVED ? w->be->ops->stream_sync(w->st, err) : kv_step_wait(s, w->st, err);
    if (st == KVD_OK)
        st = kv_step_end(s, err);
    if (st != KVD_OK)
        kv_step_abort(s, w->st);
    for (uint32_t q = 0; q < N_SEQ; q++) {
        if (st != KVD_OK) {
            kv_seq_release(s, q);
            kv_seq_restart(s, q);
            continue;
        }
        kv_seq_commit(s, q, 1, KV_MADE_SPARSE);
        assert_int_equal(kv_seq_seal(s, w->st, q, true, NULL), KVD_OK);
    }
    kv_check(s);
    return st;
}

static void same_step(world *w, uint32_t how)
{
    kvd_err err = { 0 };

    next_queries(w);
    for (uint32_t i = 0; i < 2; i++) {
        if (step(w, i, how, &err) != KVD_OK)
            fail_msg("%s", err.msg);
    }
    assert_memory_equal(w->out[0], w->out[1], N_LAYER * N_SEQ * q_floats * sizeof(float));
}

/* What a caller does after a step has failed: what cannot be read any more is evaluated again; and
 * the other store's windows begin anew, too. */
static void recover(world *w)
{
    for (uint32_t q = 0; q < N_SEQ; q++) {
        kv_store      *d    = w->one[1].s;
        const uint32_t lost = kv_seq_lost(d, q), len = kv_seq_len(d, q);

        kv_seq_restart(w->one[0].s, q);
        kv_seq_restart(d, q);
        if (lost >= len)
            continue;
        for (uint32_t i = 0; i < 2; i++) { /* both: unpacking and packing again need not be exact */
            kv_seq_truncate(w->one[i].s, w->st, q, lost);
            assert_int_equal(kv_seq_lost(w->one[i].s, q), UINT32_MAX);
            prompt(w, w->one[i].s, q, len);
        }
    }
}

/* ---- tests -------------------------------------------------------------------------------- */

/* With few places a window that is filled anew takes several rounds. */
static void test_same_bits(void **state)
{
    static const uint32_t land[] = { 0, 64, 300 };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(land); i++) {
        for (uint32_t record = KVD_RECORD_RAW; record <= KVD_RECORD_INT4; record++) {
            static world w;
            kv_counts    c;

            if (SANITIZED && (i + record) % 3 == 1) /* each with two of the other */
                continue;
            world_open(&w, (kvd_record_type)record, land[i]);
            w.sim.delay = 20000 * i;
            prompts(&w);
            for (uint32_t k = 0; k < N_STEP; k++) {
                same_step(&w, k % 2 ? AS_RECORDED : 0);
                if (k % 20 == 19) {
                    kv_seq_restart(w.one[0].s, k / 20 % N_SEQ);
                    kv_seq_restart(w.one[1].s, k / 20 % N_SEQ);
                }
            }
            kv_get_counts(w.one[1].s, &c);
            print_message("%llu records from disk, %llu urgent, %llu hits\n",
                          (unsigned long long)c.n_disk, (unsigned long long)c.n_disk_urgent,
                          (unsigned long long)c.n_hit);
            assert_true(c.n_disk > c.n_disk_urgent && c.n_disk_urgent > 0 && c.n_hit > 0);
            world_close(&w);
        }
    }
}

/* A disk that does not answer: an error that names the limit and the file, then all is well. */
static void test_stalled(void **state)
{
    static world w;
    kvd_err      err = { 0 };

    (void)state;
    timeout_ns = TIMEOUT_NS;
    for (uint32_t k = 0; k < 2; k++) {
        uint64_t t0;

        world_open(&w, KVD_RECORD_RAW, 0);
        prompts(&w);
        same_step(&w, AS_RECORDED);
        w.sim.lost = ALWAYS;
        kv_seq_restart(w.one[1].s, 0); /* so that much is asked for */
        t0 = kvd_now_ns();
        assert_int_equal(step(&w, 1, k ? AS_RECORDED : 0, &err), KVD_E_IO);
        assert_true(kvd_now_ns() - t0 < PATIENT_NS);
        assert_non_null(strstr(err.msg, "within the time limit of 0.3 s"));
        assert_non_null(strstr(err.msg, ".kvd at "));
        w.sim.lost = 0;
        recover(&w);
        for (uint32_t i = 0; i < 10; i++)
            same_step(&w, AS_RECORDED);
        if (k == 1) { /* and it closes while reads are lost */
            w.sim.lost = ALWAYS;
            kv_seq_restart(w.one[1].s, 1);
            assert_int_equal(step(&w, 1, AS_RECORDED, &err), KVD_E_IO);
        }
        world_close(&w);
    }
    timeout_ns = PATIENT_NS;
}

/* Reads that fail, and pages that are not what was written. */
static void test_failing_reads(void **state)
{
    (void)state;
    for (uint32_t k = 0; k < 4; k++) {
        static world w;
        kvd_err      err      = { 0 };
        uint32_t     n_failed = 0;

        world_open(&w, KVD_RECORD_INT8, k % 2 ? 100 : 0);
        prompts(&w);
        for (uint32_t i = 0; i < 2 * N_STEP; i++) {
            *(k < 2 ? &w.sim.read_eio : &w.sim.read_flip) = i % 4 == 2 ? 3000 : 0;
            next_queries(&w);
            if (step(&w, 1, AS_RECORDED, &err) != KVD_OK) {
                n_failed++;
                assert_true(err.msg[0] != 0);
                w.sim.read_eio = w.sim.read_flip = 0;
                recover(&w);
                if (step(&w, 1, AS_RECORDED, &err) != KVD_OK)
                    fail_msg("%s", err.msg);
            }
            assert_int_equal(step(&w, 0, AS_RECORDED, &err), KVD_OK);
            assert_memory_equal(w.out[0], w.out[1], N_LAYER * N_SEQ * q_floats * sizeof(float));
        }
        print_message("%u steps failed\n", n_failed);
        assert_true(n_failed > 0);
        world_close(&w);
    }
}

/* Each request of a step fails once. */
static void test_each_request(void **state)
{
    static world w;
    kvd_err      err      = { 0 };
    uint32_t     n_failed = 0;

    (void)state;
    world_open(&w, KVD_RECORD_RAW, 100);
    prompts(&w);
    for (uint64_t n = 1; n < 400; n++) {
        const uint64_t before = w.sim.n_request;
        kvd_status     st;

        next_queries(&w);
        w.sim.fail_nth = before + n;
        st             = step(&w, 1, AS_RECORDED, &err);
        w.sim.fail_nth = 0;
        if (st == KVD_OK && w.sim.n_request < before + n)
            break;
        n_failed += st != KVD_OK;
        recover(&w);
        if (st != KVD_OK && step(&w, 1, AS_RECORDED, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        if (st == KVD_OK) /* it was a write, of what was sealed */
            kv_seq_restart(w.one[1].s, 0);
        if (kv_seq_len(w.one[1].s, 1) + 2 > N_CTX)
            break;
    }
    print_message("%u requests failed\n", n_failed);
    assert_true(n_failed > 5);
    world_close(&w);
}

/* A step that is canceled while the device waits for records. */
static void test_canceled(void **state)
{
    static world w;
    kvd_err      err = { 0 };

    (void)state;
    world_open(&w, KVD_RECORD_RAW, 64);
    prompts(&w);
    for (uint32_t i = 0; i < 20; i++) {
        same_step(&w, 0);
        w.sim.delay = i % 2 ? ALWAYS : 0;
        assert_int_equal(step(&w, 1, CANCELED, &err), KVD_E_CANCELED);
        w.sim.delay = 0;
        recover(&w);
    }
    world_close(&w);
}

/* Nobody serves: the device has a limit of its own. */
static void test_unserved(void **state)
{
    static world w;
    kvd_err      err = { 0 };

    (void)state;
    world_open(&w, KVD_RECORD_RAW, 0);
    prompts(&w);
    same_step(&w, 0);
    kv_seq_restart(w.one[1].s, 0);
    assert_int_equal(step(&w, 1, UNSERVED, &err), KVD_E_IO);
    assert_non_null(strstr(err.msg, "the device has waited"));
    recover(&w);
    for (uint32_t i = 0; i < 5; i++)
        same_step(&w, AS_RECORDED);
    world_close(&w);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),     cmocka_unit_test(test_stalled),
        cmocka_unit_test(test_failing_reads), cmocka_unit_test(test_each_request),
        cmocka_unit_test(test_canceled),      cmocka_unit_test(test_unserved),
    };

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0)
            seed_ = strtoull(argv[i + 1], NULL, 0);
        else if (strcmp(argv[i], "--backend") == 0)
            backend_ = argv[i + 1];
    }
    print_message("seed %llu (--seed N repeats)\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
