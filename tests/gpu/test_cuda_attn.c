/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_attn.c - append and attention of the CUDA backend against "ref": head sizes, groups,
 * several sequences, decode and prefill, offsets beyond 2^31 bytes.
 * usage: test_cuda_attn MODULE [quick]
 *
 * Error bounds, |got - want| / |want|: 5e-6 where all is float ("precise", float keys), 2e-5 where
 * queries and probabilities have 16 bits (decode, "deterministic"), 6e-3 where they round to bf16
 * (prefill over bf16 keys). */
#include "gpu/gpu_world.h"

#define SEQ_MAX 4
#define N_CTX   4096u
#define BLOCK   256u
#define EXACT   5e-6
#define CLOSE   2e-5
#define ROUNDED 6e-3
#define POISON  7.0f

static const char *module_file;
static bool        quick;
static gpu_world   W;

typedef struct at_case {
    uint32_t  n_kv_head, group, dim, chunk;
    kvd_dtype type;
    uint32_t  n_seq, n_past[SEQ_MAX], n_row[SEQ_MAX];
    uint64_t  pool_off; /* bytes before the first block */
} at_case;

typedef struct at_data {
    kvd_kv_layout kv; /* pool: the host's */
    gpu_buf       pool, seq, table, q, k, v, out;
    kvd_kv_seq    host[SEQ_MAX];
    uint32_t      n_row;
    uint64_t      block_bytes, n_block;
} at_data;

/* Blocks of all sequences, shuffled; each holds some bytes, two layers' lanes, some bytes. */
static void at_place(gpu_world *w, const at_case *c, at_data *d)
{
    const uint64_t elem = c->type == KVD_DTYPE_F32 ? 4 : 2;
    const uint64_t rec  = 2ull * c->chunk * c->dim * elem;
    kvd_kv_layout *kv   = &d->kv;
    uint64_t       n = 0, at = 0;
    uint64_t      *off;

    *kv = (kvd_kv_layout){ c->type, c->n_kv_head, c->dim, c->chunk, BLOCK, rec, 0, 0, NULL };
    kv->head_stride = kvd_align_up(BLOCK / c->chunk * rec, 64) + 64;
    kv->lane_off    = 64 + c->n_kv_head * kv->head_stride;
    d->block_bytes  = kvd_align_up(kv->lane_off + c->n_kv_head * kv->head_stride + 64, 64);
    for (uint32_t s = 0; s < c->n_seq; s++) {
        n += (c->n_past[s] + c->n_row[s] + BLOCK - 1) / BLOCK;
        d->n_row += c->n_row[s];
    }
    d->n_block = n;
    d->pool    = gpu_alloc(w, c->pool_off + n * d->block_bytes);
    kv->pool   = d->pool.host;
    d->table   = gpu_alloc(w, (n + 1) * sizeof(uint64_t));
    d->seq     = gpu_alloc(w, sizeof(d->host));
    off        = d->table.host;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t j = kvd_rng_below(&w->rng, i + 1);

        off[i] = off[j];
        off[j] = c->pool_off + i * d->block_bytes;
    }
    for (uint32_t s = 0, row = 0; s < c->n_seq; s++) {
        kvd_kv_seq *dev = (kvd_kv_seq *)d->seq.host + s;

        d->host[s] = (kvd_kv_seq){ row, c->n_row[s], c->n_past[s], off + at };
        *dev       = d->host[s];
        dev->block = (uint64_t *)d->table.dev.ptr + at;
        at += (c->n_past[s] + c->n_row[s] + BLOCK - 1) / BLOCK;
        row += c->n_row[s];
    }
    gpu_up(w, &d->table);
    gpu_up(w, &d->seq);
}

/* Behind a sequence's last token lies anything, up to its last block's end: here NaN. */
static void at_spoil(const at_case *c, at_data *d)
{
    const kvd_kv_layout *kv  = &d->kv;
    const uint64_t       row = kv->record_bytes / 2 / kv->chunk_tokens;

    for (uint32_t s = 0; s < c->n_seq; s++) {
        for (uint32_t t = c->n_past[s] + c->n_row[s]; t % BLOCK != 0; t++) {
            for (uint32_t h = 0; h < c->n_kv_head; h++) {
                uint8_t *k = (uint8_t *)kv->pool + d->host[s].block[t / BLOCK] + kv->lane_off +
                             h * kv->head_stride + t % BLOCK / c->chunk * kv->record_bytes +
                             t % c->chunk * row;

                memset(k, 0xff, row);
                memset(k + kv->record_bytes / 2, 0xff, row);
            }
        }
    }
}

static void at_fill(gpu_world *w, const at_case *c, at_data *d)
{
    uint8_t       *p    = (uint8_t *)d->pool.host + c->pool_off;
    const uint64_t n    = d->n_block * d->block_bytes;
    kvd_mem        host = { p, n, KVD_MEM_HOST };
    kvd_err        err  = { 0 };

    for (uint64_t i = 0; i < n / (c->type == KVD_DTYPE_F32 ? 4 : 2); i++) {
        if (c->type == KVD_DTYPE_F32)
            ((float *)(void *)p)[i] = gpu_normal(w);
        else
            ((uint16_t *)(void *)p)[i] = kvd_f32_to_bf16(gpu_normal(w));
    }
    at_spoil(c, d);
    gpu_check(w->dev->ops->copy(w->st, d->pool.dev, c->pool_off, host, 0, n, &err), &err);
    gpu_sync(w);
}

static void at_open(gpu_world *w, const at_case *c, at_data *d)
{
    const uint64_t kv_row = (uint64_t)c->n_kv_head * c->dim, q_row = kv_row * c->group;

    memset(d, 0, sizeof(*d));
    at_place(w, c, d);
    at_fill(w, c, d);
    d->k   = gpu_floats(w, d->n_row * kv_row);
    d->v   = gpu_floats(w, d->n_row * kv_row);
    d->q   = gpu_floats(w, d->n_row * (q_row + 3));
    d->out = gpu_alloc(w, d->n_row * (q_row + 1) * sizeof(float));
    for (uint64_t i = 0; i < d->n_row * (q_row + 1); i++)
        ((float *)d->out.host)[i] = POISON;
    gpu_up(w, &d->out);
}

static void at_close(gpu_world *w, at_data *d)
{
    gpu_buf *b[] = { &d->pool, &d->seq, &d->table, &d->q, &d->k, &d->v, &d->out };

    for (uint32_t i = 0; i < KVD_COUNTOF(b); i++)
        gpu_free(w, b[i]);
}

/* The same bytes as the reference's, everywhere in the blocks. */
static void at_append(gpu_world *w, const at_case *c, at_data *d)
{
    const uint64_t     kv_row = (uint64_t)c->n_kv_head * c->dim;
    const uint64_t     n      = d->n_block * d->block_bytes;
    uint8_t           *got    = malloc(n ? n : 1);
    kvd_mem            host   = { got, n, KVD_MEM_HOST };
    kvd_kv_append_args a      = { c->n_seq, d->n_row, d->host,   d->kv,
                                  kv_row,   kv_row,   d->k.host, d->v.host };

    assert_int_equal(w->ref->ops->kv_append(w->ref_st, &a, NULL), KVD_OK);
    a.seq     = d->seq.dev.ptr;
    a.kv.pool = d->pool.dev.ptr;
    a.k       = d->k.dev.ptr;
    a.v       = d->v.dev.ptr;
    assert_int_equal(w->dev->ops->kv_append(w->st, &a, NULL), KVD_OK);
    assert_int_equal(w->dev->ops->copy(w->st, host, 0, d->pool.dev, c->pool_off, n, NULL), KVD_OK);
    gpu_sync(w);
    assert_memory_equal(got, (uint8_t *)d->pool.host + c->pool_off, n);
    free(got);
}

/* The blocks as the device has them: the caller frees. */
static uint8_t *at_blocks(gpu_world *w, const at_case *c, const at_data *d)
{
    const uint64_t n    = d->n_block * d->block_bytes;
    uint8_t       *got  = malloc(n ? n : 1);
    kvd_mem        host = { got, n, KVD_MEM_HOST };

    assert_int_equal(w->dev->ops->copy(w->st, host, 0, d->pool.dev, c->pool_off, n, NULL), KVD_OK);
    gpu_sync(w);
    return got;
}

static gpu_buf at_copy(gpu_world *w, const gpu_buf *b)
{
    gpu_buf o = gpu_alloc(w, b->dev.bytes);

    memcpy(o.host, b->host, b->dev.bytes);
    gpu_up(w, &o);
    return o;
}

static kvd_qkv_finish_args at_finish_args(const at_case *c, const at_data *d, const gpu_buf *q,
                                          const gpu_buf *k, const gpu_buf *norm, const gpu_buf *cs)
{
    const uint64_t      kv_row = (uint64_t)c->n_kv_head * c->dim;
    kvd_qkv_finish_args f      = { .n_token   = d->n_row,
                                   .n_head    = c->n_kv_head * c->group,
                                   .n_kv_head = c->n_kv_head,
                                   .head_dim  = c->dim,
                                   .n_rot     = c->dim / (c->group % 2 ? 2 : 4) * 2,
                                   .neox      = c->group % 3 != 0,
                                   .eps       = 1e-6f,
                                   .q_stride  = kv_row * c->group + 3,
                                   .q         = q->dev.ptr,
                                   .k         = k->dev.ptr,
                                   .q_norm    = c->dim % 3 ? norm->dev.ptr : NULL,
                                   .cos_sin   = cs->dev.ptr };

    f.k_norm        = f.q_norm;
    f.store         = (kvd_kv_append_args){ c->n_seq, d->n_row, d->seq.dev.ptr, d->kv,
                                            kv_row,   kv_row,   k->dev.ptr,     d->v.dev.ptr };
    f.store.kv.pool = d->pool.dev.ptr;
    return f;
}

/* The same by the ops that it is made of. */
static void at_finish_parts(gpu_world *w, const kvd_qkv_finish_args *f)
{
    float         *x[]      = { f->q, f->k };
    const uint32_t n_head[] = { f->n_head, f->n_kv_head };
    const uint64_t stride[] = { f->q_stride, f->store.k_stride };

    for (int i = 0; i < 2; i++) {
        kvd_head_norm_args n = { f->n_token, n_head[i], f->head_dim, stride[i],
                                 x[i],       f->q_norm, f->eps };
        kvd_rope_args      r = { f->n_token, n_head[i], f->head_dim, f->n_rot,
                                 f->neox,    stride[i], x[i],        f->cos_sin };

        if (f->q_norm)
            assert_int_equal(w->dev->ops->head_norm(w->st, &n, NULL), KVD_OK);
        assert_int_equal(w->dev->ops->rope(w->st, &r, NULL), KVD_OK);
    }
    assert_int_equal(w->dev->ops->kv_append(w->st, &f->store, NULL), KVD_OK);
}

/* One op, the bits of its parts: in q, in k and in the pool, which is left as at_append() did. */
static void at_finish(gpu_world *w, const at_case *c, at_data *d)
{
    gpu_buf             q[2], k[2], norm = gpu_floats(w, c->dim);
    gpu_buf             cs = gpu_floats(w, (uint64_t)d->n_row * c->dim);
    uint8_t            *got[2];
    kvd_qkv_finish_args f;

    for (int i = 0; i < 2; i++) {
        q[i] = at_copy(w, &d->q);
        k[i] = at_copy(w, &d->k);
        f    = at_finish_args(c, d, &q[i], &k[i], &norm, &cs);
        if (i == 0)
            assert_int_equal(w->dev->ops->qkv_finish(w->st, &f, NULL), KVD_OK);
        else
            at_finish_parts(w, &f);
        gpu_down(w, &q[i]);
        gpu_down(w, &k[i]);
        got[i] = at_blocks(w, c, d);
        at_append(w, c, d);
    }
    assert_memory_equal(q[0].host, q[1].host, q[0].dev.bytes);
    assert_memory_equal(k[0].host, k[1].host, k[0].dev.bytes);
    assert_memory_equal(got[0], got[1], d->n_block * d->block_bytes);
    if (d->n_row) {
        assert_memory_not_equal(k[0].host, d->k.host, k[0].dev.bytes);
        assert_memory_not_equal(got[0], (uint8_t *)d->pool.host + c->pool_off,
                                d->n_block * d->block_bytes);
    }
    for (int i = 0; i < 2; i++) {
        gpu_free(w, &q[i]);
        gpu_free(w, &k[i]);
        free(got[i]);
    }
    gpu_free(w, &norm);
    gpu_free(w, &cs);
}

/* Attention of all rows as one batch; *want is the caller's. */
static void at_attend(gpu_world *w, const at_case *c, at_data *d, float **want)
{
    const uint64_t q_row = (uint64_t)c->n_kv_head * c->group * c->dim;
    kvd_attn_args  a     = { .n_seq      = c->n_seq,
                             .n_head     = c->n_kv_head * c->group,
                             .n_token    = d->n_row,
                             .seq        = d->host,
                             .kv         = d->kv,
                             .q_stride   = q_row + 3,
                             .out_stride = q_row + 1,
                             .q          = d->q.host,
                             .scale      = 1.0f / sqrtf((float)c->dim) };

    *want = malloc((size_t)(d->n_row * (q_row + 1) + 1) * sizeof(float));
    memcpy(*want, d->out.host, (size_t)(d->n_row * (q_row + 1)) * sizeof(float));
    a.out = *want;
    assert_int_equal(w->ref->ops->attn(w->ref_st, &a, NULL), KVD_OK);
    a.seq     = d->seq.dev.ptr;
    a.kv.pool = d->pool.dev.ptr;
    a.q       = d->q.dev.ptr;
    a.out     = d->out.dev.ptr;
    assert_int_equal(w->dev->ops->attn(w->st, &a, NULL), KVD_OK);
    gpu_down(w, &d->out);
}

static double at_run(gpu_world *w, const at_case *c, double bound)
{
    const uint64_t q_row = (uint64_t)c->n_kv_head * c->group * c->dim;
    at_data        d;
    float         *want;
    double         e;

    at_open(w, c, &d);
    at_append(w, c, &d);
    at_finish(w, c, &d);
    at_attend(w, c, &d, &want);
    e = gpu_error(d.out.host, want, d.n_row * (q_row + 1));
    if (!(e <= bound))
        fail_msg("dim %u group %u chunk %u type %d rows %u: error %.3g, at most %.3g", c->dim,
                 c->group, c->chunk, (int)c->type, d.n_row, e, bound);
    free(want);
    at_close(w, &d);
    return e;
}

static void test_decode(void **state)
{
    static const uint32_t dim[] = { 64, 80, 96, 128, 256, 8, 36, 512 };
    double                worst = 0.0;

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(dim); i++) {
        for (uint32_t g = 1; g <= 8; g++) {
            const at_case c = { 2,
                                g,
                                dim[i],
                                g % 3 == 0 ? 4 : 8 << (g % 2),
                                g == 2 || g == 5 ? KVD_DTYPE_F32 : KVD_DTYPE_BF16,
                                4,
                                { 0, 1500, 255, quick ? 300 : 3000 },
                                { 1, 1, 1, 1 },
                                0 };
            worst           = fmax(worst, at_run(&W, &c, CLOSE));
        }
    }
    printf("decode: error at most %.2g\n", worst);
}

static void test_prefill(void **state)
{
    static const uint32_t dim[] = { 64, 80, 96, 128, 256 };
    double                worst = 0.0;

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(dim); i++) {
        for (uint32_t g = 1; g <= 8; g += 3) {
            const at_case c = {
                2, g, dim[i], 8, KVD_DTYPE_BF16, 4, { 0, 777, 64, 1000 }, { 200, 1, 0, 65 }, 0
            };
            worst = fmax(worst, at_run(&W, &c, ROUNDED));
        }
    }
    printf("prefill in bf16: error at most %.2g\n", worst);
}

/* Many rows at once: tails, offsets that fall between tiles, groups and chunks of every size. */
static void test_prefill_wide(void **state)
{
    static const at_case c[] = {
        { 1, 1, 128, 4, KVD_DTYPE_BF16, 1, { 0 }, { 65 }, 0 },
        { 2, 4, 128, 4, KVD_DTYPE_BF16, 1, { 0 }, { 128 }, 0 },
        { 2, 4, 128, 4, KVD_DTYPE_BF16, 1, { 0 }, { 512 }, 0 },
        { 2, 4, 128, 4, KVD_DTYPE_BF16, 1, { 1 }, { 300 }, 0 },
        { 2, 8, 128, 8, KVD_DTYPE_BF16, 1, { 1000 }, { 511 }, 0 },
        { 2, 4, 128, 16, KVD_DTYPE_BF16, 1, { 3571 }, { 257 }, 0 },
        { 2, 7, 64, 4, KVD_DTYPE_BF16, 1, { 127 }, { 385 }, 0 },
        { 2, 8, 64, 1, KVD_DTYPE_BF16, 1, { 0 }, { 129 }, 0 },
        { 2, 7, 64, 32, KVD_DTYPE_BF16, 1, { 2048 }, { 512 }, 0 },
        { 2, 4, 128, 2, KVD_DTYPE_BF16, 3, { 900, 0, 64 }, { 130, 200, 182 }, 0 },
        { 1, 7, 64, 4, KVD_DTYPE_BF16, 4, { 0, 0, 255, 700 }, { 0, 400, 1, 100 }, 0 },
    };
    double worst = 0.0;

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(c); i++)
        worst = fmax(worst, at_run(&W, &c[i], ROUNDED));
    printf("prefill of many rows: error at most %.2g\n", worst);
}

/* Recorded with short sequences, run with longer ones: lengths are read on the device. */
static void test_graph(void **state)
{
    const at_case  c   = { 2, 4, 128, 8, KVD_DTYPE_BF16, 2, { 1500, 700 }, { 1, 1 }, 0 };
    const uint64_t row = 2ull * 4 * 128 + 1, bytes = 2 * row * sizeof(float);
    at_data        d;
    float         *want;
    kvd_graph     *g;
    kvd_kv_seq    *seq;
    kvd_attn_args  a;

    (void)state;
    at_open(&W, &c, &d);
    at_append(&W, &c, &d);
    seq           = d.seq.host;
    a             = (kvd_attn_args){ .n_seq      = 2,
                                     .n_head     = 8,
                                     .n_token    = 2,
                                     .seq        = d.seq.dev.ptr,
                                     .kv         = d.kv,
                                     .q_stride   = row + 2,
                                     .out_stride = row,
                                     .q          = d.q.dev.ptr,
                                     .out        = d.out.dev.ptr,
                                     .scale      = 1.0f / sqrtf(128.0f) };
    a.kv.pool     = d.pool.dev.ptr;
    seq[0].n_past = 3;
    seq[1].n_past = 0;
    gpu_up(&W, &d.seq);
    assert_int_equal(W.dev->ops->graph_begin(W.st, NULL), KVD_OK);
    assert_int_equal(W.dev->ops->attn(W.st, &a, NULL), KVD_OK);
    assert_int_equal(W.dev->ops->graph_end(W.st, &g, NULL), KVD_OK);
    seq[0].n_past = 1500;
    seq[1].n_past = 700;
    gpu_up(&W, &d.seq);
    at_attend(&W, &c, &d, &want);
    free(want);
    want = malloc(bytes);
    memcpy(want, d.out.host, bytes);
    memset(d.out.host, 0, bytes);
    for (uint64_t i = row - 1; i < 2 * row; i += row)
        ((float *)d.out.host)[i] = POISON;
    gpu_up(&W, &d.out);
    assert_int_equal(W.dev->ops->graph_run(g, W.st, NULL), KVD_OK);
    gpu_down(&W, &d.out);
    assert_memory_equal(want, d.out.host, bytes);
    W.dev->ops->graph_close(g);
    free(want);
    at_close(&W, &d);
}

static void test_precise(void **state)
{
    const kvd_backend_limits lim   = { .n_token   = 256,
                                       .n_seq     = 4,
                                       .n_col     = 512,
                                       .n_head    = 16,
                                       .n_kv_head = 2,
                                       .head_dim  = 256,
                                       .n_ctx     = N_CTX };
    static const uint32_t    dim[] = { 64, 80, 128, 256 };
    gpu_world                p;

    (void)state;
    assert_true(gpu_open_with(&p, module_file, true, false));
    gpu_reserve(&p, &lim);
    for (uint32_t i = 0; i < KVD_COUNTOF(dim) * 8; i++) {
        const at_case c = { 2, i % 8 + 1,       dim[i / 8],   8, KVD_DTYPE_BF16,
                            3, { 0, 500, 255 }, { 1, 1, 20 }, 0 };

        at_run(&p, &c, EXACT);
    }
    gpu_close(&p);
}

/* Many rows where tensor cores do not serve: float keys, odd heads. */
static void test_prefill_float(void **state)
{
    const at_case c[] = {
        { 2, 3, 64, 8, KVD_DTYPE_F32, 2, { 300, 0 }, { 70, 30 }, 0 },
        { 1, 2, 36, 4, KVD_DTYPE_BF16, 2, { 0, 5 }, { 64, 65 }, 0 },
        { 1, 1, 512, 16, KVD_DTYPE_BF16, 1, { 100 }, { 20 }, 0 },
        { 1, 1, 64, 16, KVD_DTYPE_BF16, 2, { 0, 0 }, { 0, 0 }, 0 },
    };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(c); i++)
        at_run(&W, &c[i], EXACT);
}

static void test_far_pool(void **state)
{
    const at_case decode = { 2, 4, 128, 8, KVD_DTYPE_BF16, 2, { 700, 1200 }, { 1, 1 }, 5ull << 30 };
    const at_case prefill = { 2, 4, 128, 8, KVD_DTYPE_BF16, 2, { 700, 0 }, { 90, 70 }, 5ull << 30 };

    (void)state;
    if (quick)
        skip();
    at_run(&W, &decode, CLOSE);
    at_run(&W, &prefill, ROUNDED);
}

/* "deterministic": a row's bits are the same alone, in a batch, and however a prompt is cut. */
static void test_deterministic(void **state)
{
    const kvd_backend_limits lim = { .n_token   = 256,
                                     .n_seq     = 4,
                                     .n_col     = 512,
                                     .n_head    = 16,
                                     .n_kv_head = 2,
                                     .head_dim  = 128,
                                     .n_ctx     = N_CTX };
    const at_case  c   = { 2, 4, 128, 8, KVD_DTYPE_BF16, 3, { 900, 10, 0 }, { 40, 1, 3 }, 0 };
    const uint64_t row = 2ull * 4 * 128 + 1;
    gpu_world      p;
    at_data        d;
    float         *want, *all;

    (void)state;
    assert_true(gpu_open_with(&p, module_file, false, true));
    gpu_reserve(&p, &lim);
    at_open(&p, &c, &d);
    at_append(&p, &c, &d);
    at_attend(&p, &c, &d, &want);
    assert_true(gpu_error(d.out.host, want, d.n_row * row) <= CLOSE);
    free(want);
    all = malloc((size_t)(d.n_row * row) * sizeof(float));
    memcpy(all, d.out.host, (size_t)(d.n_row * row) * sizeof(float));
    for (uint32_t r = 0; r < d.n_row; r++) { /* each row as a batch of its own */
        kvd_kv_seq *one = d.seq.host;
        uint32_t    s = r < 40 ? 0 : r < 41 ? 1 : 2, in = r - d.host[s].first_row;

        one[0]       = d.host[s];
        one[0].block = (uint64_t *)d.table.dev.ptr + (d.host[s].block - d.host[0].block);
        one[0].n_past += in;
        one[0].first_row = r;
        one[0].n_row     = 1;
        gpu_up(&p, &d.seq);
        kvd_attn_args a = { .n_seq      = 1,
                            .n_head     = 8,
                            .n_token    = 1,
                            .seq        = d.seq.dev.ptr,
                            .kv         = d.kv,
                            .q_stride   = row + 2,
                            .out_stride = row,
                            .q          = d.q.dev.ptr,
                            .out        = d.out.dev.ptr,
                            .scale      = 1.0f / sqrtf(128.0f) };
        a.kv.pool       = d.pool.dev.ptr;
        assert_int_equal(p.dev->ops->attn(p.st, &a, NULL), KVD_OK);
    }
    gpu_down(&p, &d.out);
    assert_memory_equal(all, d.out.host, d.n_row * row * sizeof(float));
    free(all);
    at_close(&p, &d);
    gpu_close(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode),        cmocka_unit_test(test_prefill),
        cmocka_unit_test(test_prefill_float), cmocka_unit_test(test_deterministic),
        cmocka_unit_test(test_precise),       cmocka_unit_test(test_graph),
        cmocka_unit_test(test_prefill_wide),  cmocka_unit_test(test_far_pool),
    };
    const kvd_backend_limits lim = { .n_token   = 512,
                                     .n_seq     = SEQ_MAX,
                                     .n_col     = 512,
                                     .n_head    = 16,
                                     .n_kv_head = 2,
                                     .head_dim  = 512,
                                     .n_ctx     = N_CTX };
    int                      failed;

    module_file = argc > 1 ? argv[1] : NULL;
    quick       = argc > 2 && strcmp(argv[2], "quick") == 0;
    if (!gpu_open(&W, argc, argv))
        return GPU_SKIP;
    gpu_reserve(&W, &lim);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&W);
    return failed;
}
