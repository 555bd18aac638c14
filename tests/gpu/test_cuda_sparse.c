/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_sparse.c - the CUDA backend's window, attention over spans, records and zones against
 * "ref".
 * usage: test_cuda_sparse MODULE [quick]   (quick: small shapes alone, for memory checkers)
 *
 * All must have ref's bits but attention, which has a bound. */
#include "gpu/gpu_sides.h"

#include <stddef.h>

static const char *module_file;
static bool        quick;
static gpu_world   W;

/* ---- window ------------------------------------------------------------------------------ */

#define WINDOW_LANES 6u

typedef struct window_case {
    uint32_t n_seq, n_kv, n_chunk, slots, sels;
    gpu_buf  seq, cap, sel, ema, slot_of, chunk_of, stamp, stay, fetch, into, select, result;
} window_case;

static window_case window_open(uint32_t n_seq, uint32_t n_chunk, uint32_t slots)
{
    window_case    c           = { .n_seq   = n_seq,
                                   .n_kv    = WINDOW_LANES / n_seq,
                                   .n_chunk = n_chunk,
                                   .slots   = slots,
                                   .sels    = slots };
    const uint64_t lane_chunks = (uint64_t)WINDOW_LANES * n_chunk,
                   lane_slots  = WINDOW_LANES * slots;

    c.seq      = gpu_alloc(&W, n_seq * sizeof(kvd_window_seq));
    c.cap      = gpu_alloc(&W, WINDOW_LANES * 4);
    c.sel      = gpu_alloc(&W, lane_slots * 4);
    c.ema      = gpu_alloc(&W, lane_chunks * 2);
    c.slot_of  = gpu_alloc(&W, lane_chunks * 2);
    c.chunk_of = gpu_alloc(&W, lane_slots * 4);
    c.stamp    = gpu_alloc(&W, lane_slots * 4);
    c.stay     = gpu_alloc(&W, lane_slots * 4);
    c.fetch    = gpu_alloc(&W, lane_slots * 4);
    c.into     = gpu_alloc(&W, lane_slots * 4);
    c.select   = gpu_alloc(&W, WINDOW_LANES * sizeof(kvd_select_result));
    c.result   = gpu_alloc(&W, WINDOW_LANES * sizeof(kvd_window_result));
    memset(c.slot_of.host, 0xff, lane_chunks * 2);
    memset(c.chunk_of.host, 0xff, lane_slots * 4);
    for (uint32_t l = 0; l < WINDOW_LANES; l++)
        ((uint32_t *)c.cap.host)[l] = slots - l * (slots / 10);
    return c;
}

static void window_close(window_case *c)
{
    gpu_buf *all[] = { &c->seq,      &c->cap,   &c->sel,  &c->ema,   &c->slot_of, &c->select,
                       &c->chunk_of, &c->stamp, &c->stay, &c->fetch, &c->into,    &c->result };

    for (size_t i = 0; i < KVD_COUNTOF(all); i++)
        gpu_free(&W, all[i]);
}

static void window_run(window_case *c, uint32_t step, bool refill, kvd_evict_policy policy,
                       bool strict, bool dev)
{
    kvd_window_args a   = { .n_seq       = c->n_seq,
                            .n_kv_head   = c->n_kv,
                            .seq         = gpu_side(&c->seq, dev, 0),
                            .select      = gpu_side(&c->select, dev, 0),
                            .result      = gpu_side(&c->result, dev, 0),
                            .lane_stride = c->n_chunk,
                            .slot_stride = c->slots,
                            .sel_stride  = c->sels,
                            .policy      = policy,
                            .strict      = strict };
    kvd_err         err = { 0 };

    for (uint32_t s = 0; s < c->n_seq; s++) {
        const uint64_t l = (uint64_t)s * c->n_kv, chunks = l * c->n_chunk, slots = l * c->slots * 4;

        ((kvd_window_seq *)c->seq.host)[s] = (kvd_window_seq){
            .step     = step + s,
            .refill   = refill && s == 0,
            .cap      = gpu_side(&c->cap, dev, l * 4),
            .sel      = gpu_side(&c->sel, dev, slots),
            .ema      = gpu_side(&c->ema, dev, chunks * 2),
            .slot_of  = gpu_side(&c->slot_of, dev, chunks * 2),
            .chunk_of = gpu_side(&c->chunk_of, dev, slots),
            .stamp    = gpu_side(&c->stamp, dev, slots),
            .stay     = gpu_side(&c->stay, dev, slots),
            .fetch    = gpu_side(&c->fetch, dev, slots),
            .into     = gpu_side(&c->into, dev, slots),
        };
    }
    if (!dev) {
        assert_int_equal(W.ref->ops->window(W.ref_st, &a, NULL), KVD_OK);
        return;
    }
    gpu_up(&W, &c->seq);
    gpu_check(W.dev->ops->window(W.st, &a, &err), &err);
    gpu_sync(&W);
}

/* Ascending chunks, about one in eight urgent. */
static void window_choose(window_case *c)
{
    for (uint32_t l = 0; l < WINDOW_LANES; l++) {
        uint32_t *sel = (uint32_t *)c->sel.host + (uint64_t)l * c->sels, n = 0;
        uint32_t  want = (uint32_t)kvd_rng_below(&W.rng, ((uint32_t *)c->cap.host)[l] + 1);

        for (uint32_t i = 0; i < c->n_chunk && n < want; i++) {
            if (kvd_rng_below(&W.rng, c->n_chunk - i) < want - n)
                sel[n++] = i | (kvd_rng_below(&W.rng, 8) == 0 ? KVD_SELECT_URGENT : 0);
        }
        ((kvd_select_result *)c->select.host)[l].n_sel = n;
    }
    for (uint64_t i = 0; i < (uint64_t)WINDOW_LANES * c->n_chunk; i++)
        ((uint16_t *)c->ema.host)[i] = (uint16_t)kvd_rng_below(&W.rng, 300);
}

static void same_list(gpu_buf *b, const char *what, uint64_t lane, uint64_t stride, uint32_t n)
{
    const uint32_t *want = (const uint32_t *)b->host + lane * stride;
    uint32_t       *got  = gpu_fetched(&W, b);

    for (uint32_t i = 0; i < n; i++) {
        if (got[lane * stride + i] != want[i])
            fail_msg("%s of lane %u: number %u is %u, not %u", what, (unsigned)lane, i,
                     got[lane * stride + i], want[i]);
    }
    kvd_pages_free(got, (size_t)b->dev.bytes);
}

/* The device starts from what ref left, which it has been shown to share. */
static void window_step(window_case *c, uint32_t step, bool refill, kvd_evict_policy policy,
                        bool strict)
{
    gpu_buf *in[] = { &c->cap, &c->sel, &c->ema, &c->slot_of, &c->chunk_of, &c->stamp, &c->select };

    for (size_t i = 0; i < KVD_COUNTOF(in); i++)
        gpu_up(&W, in[i]);
    window_run(c, step, refill, policy, strict, true);
    window_run(c, step, refill, policy, strict, false);
    gpu_same(&W, &c->result, "results");
    gpu_same(&W, &c->slot_of, "slots of chunks");
    gpu_same(&W, &c->chunk_of, "chunks of slots");
    gpu_same(&W, &c->stamp, "stamps");
    for (uint32_t l = 0; l < WINDOW_LANES; l++) {
        const kvd_window_result *r = (const kvd_window_result *)c->result.host + l;

        same_list(&c->stay, "stay", l, c->slots, r->n_stay);
        same_list(&c->fetch, "fetch", l, c->sels, r->n_miss);
        same_list(&c->into, "into", l, c->sels, r->n_miss);
    }
}

static void test_window(void **state)
{
    static const struct {
        uint32_t n_chunk, slots, steps;
    } size[] = { { 40, 7, 12 }, { 900, 200, 10 }, { 9000, 2500, 5 }, { 40000, 9000, 4 } };

    (void)state;
    for (size_t i = 0; i < (quick ? 2 : KVD_COUNTOF(size)); i++) {
        const kvd_backend_limits lim = { .n_token   = 1,
                                         .n_seq     = WINDOW_LANES,
                                         .n_col     = 1,
                                         .n_head    = 1,
                                         .n_kv_head = WINDOW_LANES,
                                         .head_dim  = 16,
                                         .n_ctx     = 16,
                                         .n_slot    = size[i].slots };

        gpu_reserve(&W, &lim);
        for (int policy = 0; policy < KVD_EVICT_POLICY_COUNT; policy++) {
            window_case c = window_open(1 + (uint32_t)policy % 3, size[i].n_chunk, size[i].slots);

            for (uint32_t step = 1; step <= size[i].steps; step++) {
                window_choose(&c);
                window_step(&c, step, step == 4, (kvd_evict_policy)policy, step % 3 == 0);
            }
            window_close(&c);
        }
    }
}

/* ---- attention over spans ------------------------------------------------------------------ */

typedef struct span_shape {
    uint32_t  n_head, n_kv, dim, chunk;
    kvd_dtype type;
    uint32_t  n_row, n_key[3]; /* n_key: of each row */
} span_shape;

static const span_shape spans[] = {
    { 4, 1, 128, 4, KVD_DTYPE_BF16, 1, { 300 } },
    { 8, 2, 128, 4, KVD_DTYPE_BF16, 3, { 4000, 77, 1 } },
    { 32, 8, 128, 4, KVD_DTYPE_BF16, 1, { 20000 } },
    { 14, 2, 64, 4, KVD_DTYPE_BF16, 2, { 3000, 63 } },
    { 22, 2, 64, 8, KVD_DTYPE_BF16, 1, { 1500 } },
    { 8, 1, 128, 16, KVD_DTYPE_BF16, 1, { 9000 } },
    { 4, 2, 256, 4, KVD_DTYPE_BF16, 1, { 700 } },
    { 3, 3, 96, 4, KVD_DTYPE_BF16, 2, { 1000, 513 } },
    { 6, 2, 128, 8, KVD_DTYPE_F32, 1, { 333 } },
    { 6, 2, 10, 8, KVD_DTYPE_F32, 1, { 333 } },
    { 2, 1, 512, 4, KVD_DTYPE_BF16, 1, { 130 } },
    { 40, 20, 64, 4, KVD_DTYPE_BF16, 3, { 900, 77, 1500 } }, /* H200: 3 blocks a lane */
};

#define SPAN_CALLS 3u /* kept, window, urgent */

typedef struct span_case {
    span_shape    sh;
    kvd_kv_layout kv;
    uint64_t      n_block, far;
    gpu_buf       pool, block, record, row, span[SPAN_CALLS], q, part, lse, out;
} span_case;

/* Chunks dealt at random to the calls, a few left out; the last tokens stay in blocks. */
static void span_deal(span_case *c, uint32_t row, uint32_t h, uint64_t block0, uint64_t *at)
{
    const uint32_t n = c->sh.n_key[row], per = 256 / c->sh.chunk;
    const uint32_t sealed = n > 80 ? (n - 61) / c->sh.chunk : 0;
    const uint64_t lane   = (uint64_t)row * c->sh.n_kv + h;
    uint64_t      *record = c->record.host, *block = (uint64_t *)c->block.host + block0;

    for (uint32_t k = 0; k < SPAN_CALLS; k++) {
        kvd_attn_span *s = (kvd_attn_span *)c->span[k].host + lane;

        *s = (kvd_attn_span){ .record = record + *at, .block = block };
        if (k == 0) {
            s->first_key = sealed * c->sh.chunk;
            s->end_key   = n;
        }
        for (uint32_t i = 0; i < sealed; i++) {
            if ((i < 2 ? 0 : (i * 2654435761u + (uint32_t)lane) >> 7) % 4 != k)
                continue;
            record[(*at)++] = block[i / per] + c->kv.lane_off + h * c->kv.head_stride +
                              i % per * c->kv.record_bytes;
            s->n_record++;
        }
    }
}

static void span_fill(span_case *c)
{
    const uint64_t n = c->pool.dev.bytes / (c->sh.type == KVD_DTYPE_F32 ? 4 : 2);

    for (uint64_t i = 0; i < n; i++) {
        const float x = gpu_normal(&W);

        if (c->sh.type == KVD_DTYPE_F32)
            ((float *)c->pool.host)[i] = x;
        else
            ((uint16_t *)c->pool.host)[i] = kvd_f32_to_bf16(x);
    }
    for (uint64_t i = 0; i < c->n_block; i++)
        ((uint64_t *)c->block.host)[i] =
            (i % 2 ? c->n_block - 1 - i / 2 : i / 2) * (c->pool.dev.bytes / c->n_block);
}

static span_case span_open(const span_shape *sh)
{
    const uint32_t elem = sh->type == KVD_DTYPE_F32 ? 4 : 2, group = sh->n_head / sh->n_kv;
    const uint64_t lanes = (uint64_t)sh->n_row * sh->n_kv;
    span_case      c     = { .sh = *sh };
    uint64_t       at = 0, block = 0, n_record = 0;

    c.kv = (kvd_kv_layout){ .type         = sh->type,
                            .n_kv_head    = sh->n_kv,
                            .head_dim     = sh->dim,
                            .chunk_tokens = sh->chunk,
                            .block_tokens = 256,
                            .record_bytes = 2ull * sh->chunk * sh->dim * elem,
                            .lane_off     = 256,
                            .head_stride  = 512ull * sh->dim * elem };
    for (uint32_t r = 0; r < sh->n_row; r++) {
        c.n_block += kvd_div_up(sh->n_key[r], 256);
        n_record += (uint64_t)sh->n_kv * kvd_div_up(sh->n_key[r], sh->chunk);
    }
    c.pool   = gpu_alloc(&W, c.n_block * (c.kv.lane_off + sh->n_kv * c.kv.head_stride));
    c.block  = gpu_alloc(&W, c.n_block * 8);
    c.record = gpu_alloc(&W, n_record * 8);
    c.row    = gpu_alloc(&W, sh->n_row * 4);
    c.q      = gpu_floats(&W, (uint64_t)sh->n_row * (sh->n_head * sh->dim + 3));
    c.part   = gpu_alloc(&W, lanes * kvd_attn_part_floats(group, sh->dim) * 4);
    c.lse    = gpu_alloc(&W, sh->n_row * (sh->n_head + 1) * 4);
    c.out    = gpu_alloc(&W, (uint64_t)sh->n_row * (sh->n_head * sh->dim + 1) * 4);
    for (uint32_t k = 0; k < SPAN_CALLS; k++)
        c.span[k] = gpu_alloc(&W, lanes * sizeof(kvd_attn_span));
    span_fill(&c);
    for (uint32_t r = 0; r < sh->n_row; r++) {
        ((uint32_t *)c.row.host)[r] = sh->n_row - 1 - r;
        for (uint32_t h = 0; h < sh->n_kv; h++)
            span_deal(&c, r, h, block, &at);
        block += kvd_div_up(sh->n_key[r], 256);
    }
    return c;
}

static void span_close(span_case *c)
{
    gpu_buf *all[] = { &c->pool, &c->block, &c->record,  &c->row,     &c->q,      &c->part,
                       &c->lse,  &c->out,   &c->span[0], &c->span[1], &c->span[2] };

    for (size_t i = 0; i < KVD_COUNTOF(all); i++)
        gpu_free(&W, all[i]);
}

/* both: span k + 1 in the same call. */
static void span_call(span_case *c, uint32_t k, bool both, bool dev, void *pool)
{
    const kvd_attn_span_args a   = { .n_row      = c->sh.n_row,
                                     .n_head     = c->sh.n_head,
                                     .kv         = c->kv,
                                     .row        = gpu_side(&c->row, dev, 0),
                                     .span       = gpu_side(&c->span[k], dev, 0),
                                     .q_stride   = (uint64_t)c->sh.n_head * c->sh.dim + 3,
                                     .out_stride = (uint64_t)c->sh.n_head * c->sh.dim + 1,
                                     .lse_stride = c->sh.n_head + 1,
                                     .q          = gpu_side(&c->q, dev, 0),
                                     .part       = gpu_side(&c->part, dev, 0),
                                     .lse        = k == 0 ? gpu_side(&c->lse, dev, 0) : NULL,
                                     .scale      = 1.0f / sqrtf((float)c->sh.dim),
                                     .first      = k == 0 };
    kvd_attn_span_args       b   = a;
    kvd_err                  err = { 0 };

    b.kv.pool = pool;
    b.out     = k + 1 + both == SPAN_CALLS ? gpu_side(&c->out, dev, 0) : NULL;
    b.then    = both ? gpu_side(&c->span[k + 1], dev, 0) : NULL;
    if (dev)
        gpu_check(W.dev->ops->attn_span(W.st, &b, &err), &err);
    else
        assert_int_equal(W.ref->ops->attn_span(W.ref_st, &b, NULL), KVD_OK);
}

/* Spans as the device sees them: their lists lie in its memory. */
static void span_up(span_case *c, uint32_t k)
{
    const uint64_t n   = c->span[k].dev.bytes / sizeof(kvd_attn_span);
    gpu_buf        b   = c->span[k];
    kvd_attn_span *own = kvd_calloc(n, sizeof(*own));

    memcpy(own, b.host, n * sizeof(*own));
    for (uint64_t i = 0; i < n; i++) {
        if (own[i].record)
            own[i].record = gpu_at(&c->record, own[i].record);
        if (own[i].block)
            own[i].block = gpu_at(&c->block, own[i].block);
    }
    b.host = own;
    gpu_up(&W, &b);
    kvd_free(own);
}

static double span_gap(gpu_buf *b)
{
    float *got = gpu_fetched(&W, b);
    double err = 0.0, top = 0.0;

    for (uint64_t i = 0; i < b->dev.bytes / 4; i++) {
        const float want = ((const float *)b->host)[i];

        if (isinf(want)) {
            assert_true(got[i] == want);
            continue;
        }
        assert_false(isnan(got[i]));
        err = fmax(err, fabs((double)got[i] - (double)want));
        top = fmax(top, fabs((double)want));
    }
    kvd_pages_free(got, (size_t)b->dev.bytes);
    return top > 0.0 ? err / top : err;
}

/* Two spans in one call have the bits of two calls, which are on the device. */
static void span_twice(span_case *c, void *pool)
{
    gpu_buf *all[] = { &c->out, &c->lse, &c->part };
    void    *was[KVD_COUNTOF(all)];

    for (size_t i = 0; i < KVD_COUNTOF(all); i++)
        was[i] = gpu_fetched(&W, all[i]);
    for (uint32_t first = 0; first < 2; first++) {
        if (first)
            span_call(c, 0, false, true, pool);
        span_call(c, first, true, true, pool);
        if (!first)
            span_call(c, 2, false, true, pool);
        gpu_sync(&W);
        for (size_t i = 0; i < KVD_COUNTOF(all); i++) {
            void *got = gpu_fetched(&W, all[i]);

            if ((i != 1 || first) && memcmp(got, was[i], all[i]->dev.bytes) != 0)
                fail_msg("two spans at once, the first %u: output %zu differs", first, i);
            kvd_pages_free(got, (size_t)all[i]->dev.bytes);
        }
    }
    for (size_t i = 0; i < KVD_COUNTOF(all); i++)
        kvd_pages_free(was[i], (size_t)all[i]->dev.bytes);
}

/* Of the largest output: bfloat16 pairs lose 2^-17 of queries and weights. */
#define SPAN_BOUND 5e-5

static double check_span(size_t i, uint64_t far, bool empty)
{
    span_case                c   = span_open(&spans[i]);
    const kvd_backend_limits lim = { .n_token   = 1,
                                     .n_seq     = c.sh.n_row,
                                     .n_col     = 1,
                                     .n_head    = c.sh.n_head,
                                     .n_kv_head = c.sh.n_kv,
                                     .head_dim  = c.sh.dim,
                                     .n_ctx     = 20000 };
    kvd_mem                  big = { 0 };
    kvd_err                  err = { 0 };
    double                   e_out, e_lse;

    gpu_reserve(&W, &lim);
    memset(c.part.host, 0x7f, c.part.dev.bytes);
    gpu_up(&W, &c.part);
    if (empty)
        memset(c.span[0].host, 0, sizeof(kvd_attn_span) * c.sh.n_kv);
    gpu_check(W.dev->ops->mem_alloc(W.dev, KVD_MEM_DEVICE, far + c.pool.dev.bytes, &big, &err),
              &err);
    gpu_check(W.dev->ops->copy(W.st, big, far,
                               (kvd_mem){ c.pool.host, c.pool.dev.bytes, KVD_MEM_HOST }, 0,
                               c.pool.dev.bytes, &err),
              &err);
    for (uint32_t k = 0; k < SPAN_CALLS; k++) {
        span_call(&c, k, false, false, c.pool.host);
        span_up(&c, k);
    }
    gpu_up_far(&W, &c.record, c.record.dev.bytes / 8, far);
    gpu_up_far(&W, &c.block, c.n_block, far);
    gpu_up(&W, &c.row);
    for (uint32_t k = 0; k < SPAN_CALLS; k++)
        span_call(&c, k, false, true, big.ptr);
    gpu_sync(&W);
    span_twice(&c, big.ptr);
    e_out = span_gap(&c.out);
    e_lse = span_gap(&c.lse);
    if (!(e_out <= SPAN_BOUND && e_lse <= SPAN_BOUND))
        fail_msg("span shape %zu: output differs by %.3g, lse by %.3g", i, e_out, e_lse);
    W.dev->ops->mem_free(W.dev, &big);
    span_close(&c);
    return e_out;
}

static void test_span(void **state)
{
    double worst = 0.0;

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(spans); i++) {
        if (!quick || spans[i].n_key[0] < 1000)
            worst = fmax(worst, check_span(i, 0, false));
    }
    worst = fmax(worst, check_span(0, 0, true));
    if (!quick)
        worst = fmax(worst, check_span(3, GPU_FAR, false));
    printf("attn_span: %.3g of the largest output\n", worst);
}

/* ---- records -------------------------------------------------------------------------------- */

#define N_LANE 3u

typedef struct record_case {
    kvd_record_format f;
    uint32_t          per; /* records of a lane */
    uint64_t          raw, packed, param;
    gpu_buf           src, pack, par, back, lane_off[3], off[3], chunk;
} record_case;

static void record_offsets(record_case *c)
{
    for (uint32_t i = 0; i < N_LANE; i++) {
        ((uint64_t *)c->lane_off[0].host)[i] = (N_LANE - 1 - i) * c->per * c->raw;
        ((uint64_t *)c->lane_off[1].host)[i] = i * c->param;
        ((uint64_t *)c->lane_off[2].host)[i] = i * c->per * c->packed;
    }
    for (uint32_t i = 0; i < N_LANE * c->per; i++) {
        const uint32_t l = i / c->per, chunk = (i * 7 + 3) % c->per;

        ((uint32_t *)c->chunk.host)[i]  = chunk;
        ((uint64_t *)c->off[0].host)[i] = l * c->per * c->packed + chunk * c->packed;
        ((uint64_t *)c->off[1].host)[i] = l * c->param;
        ((uint64_t *)c->off[2].host)[i] = (N_LANE - 1 - l) * c->per * c->raw + chunk * c->raw;
    }
}

static record_case record_open(kvd_record_type type, kvd_dtype raw, uint32_t chunk, uint32_t dim)
{
    record_case c = { .f   = { .type         = type,
                               .raw          = raw,
                               .chunk_tokens = chunk,
                               .block_tokens = 256,
                               .head_dim     = dim },
                      .per = 256 / chunk };
    uint64_t    n;

    c.raw    = kvd_record_raw_bytes(&c.f);
    c.packed = kvd_record_bytes(&c.f);
    c.param  = kvd_record_param_bytes(&c.f);
    n        = N_LANE * (uint64_t)c.per;
    c.src    = gpu_alloc(&W, n * c.raw);
    c.back   = gpu_alloc(&W, n * c.raw);
    c.pack   = gpu_alloc(&W, n * c.packed);
    c.par    = gpu_alloc(&W, N_LANE * c.param);
    c.chunk  = gpu_alloc(&W, n * 4);
    for (int i = 0; i < 3; i++) {
        c.lane_off[i] = gpu_alloc(&W, N_LANE * 8);
        c.off[i]      = gpu_alloc(&W, n * 8);
    }
    record_offsets(&c);
    for (uint64_t i = 0; i < n * c.raw / (raw == KVD_DTYPE_F32 ? 4 : 2); i++) {
        const uint32_t ch = (uint32_t)(i % dim);
        float          x  = gpu_normal(&W) * (float)(1 + ch % 5) + (ch % 16 == 3 ? 60.0f : 0.0f);

        if (i / dim % 9 == 4 && ch % 3 == 0)
            x = ch % 2 ? 0.0f : -0.0f; /* which of two zeros is the least is part of the bits */
        if (raw == KVD_DTYPE_F32)
            ((float *)c.src.host)[i] = x;
        else
            ((uint16_t *)c.src.host)[i] = kvd_f32_to_bf16(x);
    }
    return c;
}

static void record_run(record_case *c, bool dev)
{
    kvd_backend                 *be  = dev ? W.dev : W.ref;
    kvd_stream                  *st  = dev ? W.st : W.ref_st;
    const kvd_record_pack_args   a   = { .format    = c->f,
                                         .n         = N_LANE,
                                         .src       = gpu_side(&c->src, dev, 0),
                                         .param     = gpu_side(&c->par, dev, 0),
                                         .dst       = gpu_side(&c->pack, dev, 0),
                                         .src_off   = gpu_side(&c->lane_off[0], dev, 0),
                                         .param_off = gpu_side(&c->lane_off[1], dev, 0),
                                         .dst_off   = gpu_side(&c->lane_off[2], dev, 0) };
    const kvd_record_unpack_args u   = { .format    = c->f,
                                         .n         = N_LANE * (uint64_t)c->per,
                                         .src       = gpu_side(&c->pack, dev, 0),
                                         .param     = gpu_side(&c->par, dev, 0),
                                         .dst       = gpu_side(&c->back, dev, 0),
                                         .src_off   = gpu_side(&c->off[0], dev, 0),
                                         .param_off = gpu_side(&c->off[1], dev, 0),
                                         .dst_off   = gpu_side(&c->off[2], dev, 0),
                                         .chunk     = gpu_side(&c->chunk, dev, 0) };
    kvd_err                      err = { 0 };

    gpu_check(be->ops->record_pack(st, &a, &err), &err);
    gpu_check(be->ops->record_unpack(st, &u, &err), &err);
}

static void check_record(kvd_record_type type, kvd_dtype raw, uint32_t chunk, uint32_t dim)
{
    record_case c     = record_open(type, raw, chunk, dim);
    gpu_buf    *in[]  = { &c.src,    &c.lane_off[0], &c.lane_off[1], &c.lane_off[2],
                          &c.off[0], &c.off[1],      &c.off[2],      &c.chunk };
    gpu_buf    *all[] = { &c.src,         &c.pack,        &c.par,        &c.back,
                          &c.chunk,       &c.off[0],      &c.off[1],     &c.off[2],
                          &c.lane_off[0], &c.lane_off[1], &c.lane_off[2] };

    for (size_t i = 0; i < KVD_COUNTOF(in); i++)
        gpu_up(&W, in[i]);
    record_run(&c, true);
    gpu_sync(&W);
    record_run(&c, false);
    gpu_same(&W, &c.par, "parameters");
    gpu_same(&W, &c.pack, "packed records");
    gpu_same(&W, &c.back, "records unpacked");
    for (size_t i = 0; i < KVD_COUNTOF(all); i++)
        gpu_free(&W, all[i]);
}

static void test_records(void **state)
{
    (void)state;
    for (int type = KVD_RECORD_INT8; type <= KVD_RECORD_INT4; type++) {
        check_record((kvd_record_type)type, KVD_DTYPE_BF16, 4, 64);
        check_record((kvd_record_type)type, KVD_DTYPE_BF16, 4, 128);
        check_record((kvd_record_type)type, KVD_DTYPE_BF16, 16, 80);
        check_record((kvd_record_type)type, KVD_DTYPE_F32, 4, 10);
        if (!quick)
            check_record((kvd_record_type)type, KVD_DTYPE_BF16, 16, 512);
    }
}

/* Between memory kinds, from and to the far end of a pool, at any length and alignment of 4. */
static void check_copy(kvd_mem_kind kind, uint64_t n, uint64_t bytes, uint64_t far, uint64_t skew)
{
    gpu_buf src = gpu_alloc(&W, n * bytes + 16), off[2], out = gpu_alloc(&W, n * bytes + 16);
    kvd_mem from = { 0 }, to = { 0 }, host = { 0 };
    kvd_err err = { 0 };

    for (int i = 0; i < 2; i++)
        off[i] = gpu_alloc(&W, n * 8);
    for (uint64_t i = 0; i < n * bytes; i++)
        ((uint8_t *)src.host)[i] = (uint8_t)kvd_rng_u64(&W.rng);
    for (uint64_t i = 0; i < n; i++) {
        ((uint64_t *)off[0].host)[i] = kvd_rng_below(&W.rng, n) * bytes + skew;
        ((uint64_t *)off[1].host)[i] = (n - 1 - i) * bytes + skew + far;
    }
    gpu_check(W.dev->ops->mem_alloc(W.dev, kind, src.dev.bytes, &from, &err), &err);
    gpu_check(W.dev->ops->mem_alloc(W.dev, KVD_MEM_DEVICE, far + out.dev.bytes, &to, &err), &err);
    host = (kvd_mem){ src.host, src.dev.bytes, KVD_MEM_HOST };
    gpu_check(W.dev->ops->copy(W.st, from, 0, host, 0, src.dev.bytes, &err), &err);
    gpu_up(&W, &off[0]);
    gpu_up(&W, &off[1]);
    gpu_check(W.dev->ops->record_copy(W.st,
                                      &(kvd_record_copy_args){ n, bytes, off[0].dev.ptr,
                                                               off[1].dev.ptr, from.ptr, to.ptr },
                                      &err),
              &err);
    host = (kvd_mem){ out.host, out.dev.bytes, KVD_MEM_HOST };
    gpu_check(W.dev->ops->copy(W.st, host, 0, to, far, out.dev.bytes, &err), &err);
    gpu_sync(&W);
    for (uint64_t i = 0; i < n; i++)
        assert_memory_equal((uint8_t *)out.host + ((uint64_t *)off[1].host)[i] - far,
                            (uint8_t *)src.host + ((uint64_t *)off[0].host)[i], bytes);
    W.dev->ops->mem_free(W.dev, &from);
    W.dev->ops->mem_free(W.dev, &to);
    gpu_free(&W, &src);
    gpu_free(&W, &out);
    gpu_free(&W, &off[0]);
    gpu_free(&W, &off[1]);
}

static void test_record_copy(void **state)
{
    (void)state;
    check_copy(KVD_MEM_DEVICE, 1, 16, 0, 0);
    check_copy(KVD_MEM_DEVICE, 333, 2048, 0, 0);
    check_copy(KVD_MEM_PINNED, 100, 1040, 0, 0);
    check_copy(KVD_MEM_PINNED, 100, 1040, 0, 4);
    if (!quick)
        check_copy(KVD_MEM_PINNED, 5000, 4096, GPU_FAR, 0);
}

/* ---- zone ------------------------------------------------------------------------------------ */

static void test_zone(void **state)
{
    static const uint64_t at[2] = { 0, 6000 * 4 };

    (void)state;
    for (int t = 0; t < 2; t++) {
        const uint32_t      e    = t ? 4 : 2;
        kvd_kv_layout       kv   = { .type         = t ? KVD_DTYPE_F32 : KVD_DTYPE_BF16,
                                     .n_kv_head    = 2,
                                     .head_dim     = 40,
                                     .chunk_tokens = 4,
                                     .block_tokens = 64,
                                     .record_bytes = 8 * 40 * e,
                                     .head_stride  = 64 * 2 * 40 * e };
        kvd_kv_layout       z    = { .type         = t ? KVD_DTYPE_BF16 : KVD_DTYPE_F32,
                                     .n_kv_head    = 2,
                                     .head_dim     = 40,
                                     .chunk_tokens = 1,
                                     .block_tokens = 4,
                                     .record_bytes = 2 * 40 * (6 - e),
                                     .head_stride  = 8 * 40 * (6 - e) };
        gpu_buf             pool = gpu_floats(&W, 2 * 2 * 64 * 2 * 40), zone = gpu_alloc(&W, 60000);
        gpu_buf             off = gpu_alloc(&W, 32);
        kvd_zone_build_args a;
        kvd_err             err = { 0 };

        if (!t) {
            for (uint32_t i = 0; i < 2 * 2 * 2 * 64 * 2 * 40; i++)
                ((uint16_t *)pool.host)[i] = kvd_f32_to_bf16(gpu_normal(&W));
            gpu_up(&W, &pool);
        }
        ((uint64_t *)off.host)[1] = 2 * kv.head_stride;
        memcpy((uint64_t *)off.host + 2, at, sizeof(at));
        gpu_up(&W, &off);
        for (int dev = 1; dev >= 0; dev--) {
            kv.pool = gpu_side(&pool, dev, 0);
            z.pool  = gpu_side(&zone, dev, 0);
            a = (kvd_zone_build_args){ 2, kv, z, gpu_side(&off, dev, 0), gpu_side(&off, dev, 16) };
            gpu_check((dev ? W.dev : W.ref)->ops->zone_build(dev ? W.st : W.ref_st, &a, &err),
                      &err);
        }
        gpu_same(&W, &zone, "zones");
        gpu_free(&W, &pool);
        gpu_free(&W, &zone);
        gpu_free(&W, &off);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records), cmocka_unit_test(test_record_copy),
        cmocka_unit_test(test_zone),    cmocka_unit_test(test_window),
        cmocka_unit_test(test_span),
    };
    int failed;

    module_file = argc > 1 ? argv[1] : NULL;
    quick       = argc > 2 && strcmp(argv[2], "quick") == 0;
    if (!gpu_open_with(&W, module_file, false, false))
        return GPU_SKIP;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&W);
    return failed;
}
