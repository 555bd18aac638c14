/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_dense.c - the CUDA backend's memory, and its dense ops against "ref".
 * usage: test_cuda_dense MODULE [quick]   (quick: small shapes alone, for memory checkers)
 *
 * Errors are |got - want| / |want| over all outputs of a case; the bound of each op is beside it.
 */
#include "gpu/gpu_world.h"

#include <stddef.h>

#define FENCE 123456.0f /* between rows, where nothing may be written */

static const char *module_file;
static bool        quick;
static gpu_world   W;

static const kvd_dtype TYPES[] = { KVD_DTYPE_F32,  KVD_DTYPE_F16,  KVD_DTYPE_BF16, KVD_DTYPE_Q8_0,
                                   KVD_DTYPE_Q4_0, KVD_DTYPE_Q4_1, KVD_DTYPE_Q5_0, KVD_DTYPE_Q5_1,
                                   KVD_DTYPE_Q2_K, KVD_DTYPE_Q3_K, KVD_DTYPE_Q4_K, KVD_DTYPE_Q5_K,
                                   KVD_DTYPE_Q6_K };

static void check(const char *what, const float *got, const float *want, uint64_t n, double bound)
{
    const double e = gpu_error(got, want, n);

    if (!(e <= bound))
        fail_msg("%s: error %.3g, at most %.3g", what, e, bound);
}

/* The largest error of a group of cases, for the log. */
static double worst;
static void   check_worst(const char *what, const float *got, const float *want, uint64_t n,
                          double bound)
{
    worst = fmax(worst, gpu_error(got, want, n));
    check(what, got, want, n, bound);
}

/* ---- memory -------------------------------------------------------------------------- */

static void test_memory(void **state)
{
    static const kvd_mem_kind kind[] = { KVD_MEM_HOST, KVD_MEM_PINNED, KVD_MEM_DEVICE };
    const uint64_t            bytes  = 1000003;
    const kvd_backend_ops    *ops    = W.dev->ops;
    kvd_mem                   m[3], bad;
    kvd_event                *ev;
    kvd_stream               *other;

    (void)state;
    for (int i = 0; i < 3; i++)
        assert_int_equal(ops->mem_alloc(W.dev, kind[i], bytes, &m[i], NULL), KVD_OK);
    assert_int_equal(ops->mem_alloc(W.dev, KVD_MEM_MAP, 1, &bad, NULL), KVD_E_INVAL);
    assert_int_equal(ops->mem_alloc(W.dev, KVD_MEM_DEVICE, 1ull << 50, &bad, NULL), KVD_E_NOMEM);
    assert_int_equal(ops->stream_open(W.dev, &other, NULL), KVD_OK);
    assert_int_equal(ops->event_open(W.dev, &ev, NULL), KVD_OK);
    for (uint64_t i = 0; i < bytes; i++) {
        assert_int_equal(((uint8_t *)m[0].ptr)[i], 0);
        ((uint8_t *)m[0].ptr)[i] = (uint8_t)(i * 7 + i / 251);
    }
    /* pageable -> device -> pinned (on another stream) -> device, shifted -> pageable */
    assert_int_equal(ops->copy(W.st, m[2], 0, m[0], 0, bytes, NULL), KVD_OK);
    assert_int_equal(ops->event_record(ev, W.st, NULL), KVD_OK);
    assert_int_equal(ops->event_wait(ev, other, NULL), KVD_OK);
    assert_int_equal(ops->copy(other, m[1], 0, m[2], 0, bytes, NULL), KVD_OK);
    assert_int_equal(ops->copy(other, m[2], 5, m[1], 1, bytes - 5, NULL), KVD_OK);
    assert_int_equal(ops->stream_sync(other, NULL), KVD_OK);
    assert_int_equal(ops->event_poll(ev, NULL), KVD_OK);
    memset(m[0].ptr, 0, bytes);
    assert_int_equal(ops->copy(W.st, m[0], 0, m[2], 0, bytes, NULL), KVD_OK);
    assert_int_equal(ops->copy(W.st, m[0], 0, m[2], 0, 0, NULL), KVD_OK);
    gpu_sync(&W);
    for (uint64_t i = 5; i < bytes; i++)
        assert_int_equal(((uint8_t *)m[0].ptr)[i], (uint8_t)((i - 4) * 7 + (i - 4) / 251));
    ops->event_close(ev);
    ops->stream_close(other);
    for (int i = 0; i < 3; i++) {
        ops->mem_free(W.dev, &m[i]);
        assert_null(m[i].ptr);
    }
}

/* What no op could do is refused before there is a session. */
static void test_limits(void **state)
{
    kvd_backend_limits lim = { .n_token = 1, .n_head = 514, .n_kv_head = 2, .head_dim = 64 };

    (void)state;
    assert_int_equal(W.dev->ops->reserve(W.dev, &lim, NULL), KVD_OK);
    lim.n_chunk = 1;
    assert_int_equal(W.dev->ops->reserve(W.dev, &lim, NULL), KVD_E_UNSUPPORTED);
    lim.n_head = 512;
    assert_int_equal(W.dev->ops->reserve(W.dev, &lim, NULL), KVD_OK);
    lim.head_dim = KVD_HEAD_DIM_MAX + 1;
    assert_int_equal(W.dev->ops->reserve(W.dev, &lim, NULL), KVD_E_UNSUPPORTED);
}

static void test_names(void **state)
{
    static const char *const bad[] = { "cuda:", "cuda:x", "cuda:999", "cuda:1x" };
    kvd_backend             *b;

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(bad); i++) {
        const kvd_backend_params p   = { .name = bad[i], .module = module_file };
        kvd_err                  err = { 0 };

        assert_int_not_equal(kvd_backend_open(&b, &p, &err), KVD_OK);
        assert_null(b);
        assert_non_null(strstr(err.msg, "cuda"));
    }
}

/* ---- weights ---------------------------------------------------------------------------- */

static void put_f16(uint8_t *at, float lo, float hi)
{
    const float    v = lo + (hi - lo) * kvd_rng_f32(&W.rng);
    const uint16_t h = kvd_f32_to_f16(v);

    memcpy(at, &h, sizeof(h));
}

/* Random bytes, then scales that are finite and moderate. */
static void random_block(kvd_dtype type, uint8_t *b)
{
    const float    v  = gpu_normal(&W);
    const uint16_t bf = kvd_f32_to_bf16(v);

    for (uint32_t i = 0; i < kvd_dtype_get(type)->block_bytes; i++)
        b[i] = (uint8_t)kvd_rng_u64(&W.rng);
    if (type == KVD_DTYPE_F32)
        memcpy(b, &v, 4);
    else if (type == KVD_DTYPE_BF16)
        memcpy(b, &bf, 2);
    else if (type == KVD_DTYPE_Q2_K)
        put_f16(b + offsetof(kvd_block_q2_k, d), 0.001f, 0.01f),
            put_f16(b + offsetof(kvd_block_q2_k, dmin), 0.001f, 0.01f);
    else if (type == KVD_DTYPE_Q3_K)
        put_f16(b + offsetof(kvd_block_q3_k, d), -0.001f, 0.001f);
    else if (type == KVD_DTYPE_Q6_K)
        put_f16(b + offsetof(kvd_block_q6_k, d), -0.001f, 0.001f);
    else
        put_f16(b, 0.001f, type == KVD_DTYPE_F16 ? 1.0f : 0.01f);
    if (type == KVD_DTYPE_Q4_1 || type == KVD_DTYPE_Q5_1 || type == KVD_DTYPE_Q4_K ||
        type == KVD_DTYPE_Q5_K)
        put_f16(b + 2, 0.001f, 0.05f);
}

/* shift: bytes from the start of the allocation, so from any alignment. */
static gpu_buf random_weight(kvd_dtype type, uint32_t n_row, uint32_t n_col, uint32_t shift,
                             kvd_weight *host, kvd_weight *dev)
{
    const uint64_t row_bytes = kvd_dtype_row_bytes(type, n_col);
    const uint32_t step      = kvd_dtype_get(type)->block_bytes;
    gpu_buf        b         = gpu_alloc(&W, row_bytes * n_row + shift);

    for (uint64_t i = 0; i < row_bytes * n_row; i += step)
        random_block(type, (uint8_t *)b.host + shift + i);
    gpu_up(&W, &b);
    *host = (kvd_weight){ type, n_row, n_col, row_bytes, (uint8_t *)b.host + shift };
    *dev  = (kvd_weight){ type, n_row, n_col, row_bytes, (uint8_t *)b.dev.ptr + shift };
    return b;
}

static uint32_t odd_col(kvd_dtype type, uint32_t n)
{
    const uint32_t len = kvd_dtype_get(type)->block_len;

    return len == 1 ? n : (n + len - 1) / len * len;
}

/* ---- embedding, norms, RoPE, SwiGLU ------------------------------------------------------ */

/* Dequantised weights: one rounding more or less, 1e-6. */
static void test_embed(void **state)
{
    static const int32_t token[] = { 3, 0, 16, 16, 7 };
    const uint32_t       n       = KVD_COUNTOF(token);

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(TYPES) * 2; i++) {
        const uint32_t n_col = odd_col(TYPES[i / 2], i % 2 ? 1023 : 1024);
        kvd_weight     host, dev;
        gpu_buf        t   = random_weight(TYPES[i / 2], 17, n_col, i % 2, &host, &dev);
        gpu_buf        out = gpu_floats(&W, (uint64_t)n * n_col), id = gpu_alloc(&W, sizeof(token));
        float         *want = calloc((size_t)n * n_col, sizeof(*want));
        kvd_embed_args a    = { .n_token = n, .table = host, .token = token, .out = want };

        memcpy(id.host, token, sizeof(token));
        gpu_up(&W, &id);
        assert_int_equal(W.ref->ops->embed(W.ref_st, &a, NULL), KVD_OK);
        a.table = dev;
        a.token = id.dev.ptr;
        a.out   = out.dev.ptr;
        assert_int_equal(W.dev->ops->embed(W.st, &a, NULL), KVD_OK);
        a.n_token = 0;
        assert_int_equal(W.dev->ops->embed(W.st, &a, NULL), KVD_OK);
        gpu_down(&W, &out);
        check(kvd_dtype_name(TYPES[i / 2]), out.host, want, (uint64_t)n * n_col, 1e-6);
        free(want);
        gpu_free(&W, &t);
        gpu_free(&W, &out);
        gpu_free(&W, &id);
    }
}

/* Sums of squares in float: 2e-6. */
static void test_rms_norm(void **state)
{
    static const uint32_t n_col[] = { 1, 33, 576, 4096, 14337 };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(n_col); i++) {
        const uint64_t    stride = n_col[i] + 3, n = 5 * stride;
        gpu_buf           x = gpu_floats(&W, n), w = gpu_floats(&W, n_col[i]);
        float            *want = malloc((size_t)n * sizeof(*want));
        kvd_rms_norm_args a    = { .n_row      = 5,
                                   .n_col      = n_col[i],
                                   .x_stride   = stride,
                                   .out_stride = stride,
                                   .x          = x.host,
                                   .w          = w.host,
                                   .out        = want,
                                   .eps        = 1e-5f };

        memcpy(want, x.host, (size_t)n * sizeof(*want));
        assert_int_equal(W.ref->ops->rms_norm(W.ref_st, &a, NULL), KVD_OK);
        a.x   = x.dev.ptr;
        a.w   = w.dev.ptr;
        a.out = x.dev.ptr; /* in place */
        assert_int_equal(W.dev->ops->rms_norm(W.st, &a, NULL), KVD_OK);
        gpu_down(&W, &x);
        check("rms_norm", x.host, want, n, 2e-6);
        free(want);
        gpu_free(&W, &x);
        gpu_free(&W, &w);
    }
}

/* Both in place over [token][head][dim] with room between tokens: 2e-6. */
static void test_heads(void **state)
{
    static const uint32_t dim[] = { 64, 80, 96, 128, 256, 6 };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(dim) * 2; i++) {
        const uint32_t     d = dim[i / 2], n_rot = i % 2 ? d : d / 4 * 2, n_head = 7, n_token = 9;
        const uint64_t     stride = (uint64_t)n_head * d + 5, n = n_token * stride;
        gpu_buf            x = gpu_floats(&W, n), w = gpu_floats(&W, d);
        gpu_buf            cs   = gpu_floats(&W, (uint64_t)n_token * n_rot);
        float             *want = malloc((size_t)n * sizeof(*want));
        kvd_head_norm_args a    = { n_token, n_head, d, stride, want, w.host, 1e-6f };
        kvd_rope_args      r    = { n_token, n_head, d, n_rot, i % 2 == 0, stride, want, cs.host };

        memcpy(want, x.host, (size_t)n * sizeof(*want));
        assert_int_equal(W.ref->ops->head_norm(W.ref_st, &a, NULL), KVD_OK);
        assert_int_equal(W.ref->ops->rope(W.ref_st, &r, NULL), KVD_OK);
        a.x       = x.dev.ptr;
        a.w       = w.dev.ptr;
        r.x       = x.dev.ptr;
        r.cos_sin = cs.dev.ptr;
        assert_int_equal(W.dev->ops->head_norm(W.st, &a, NULL), KVD_OK);
        assert_int_equal(W.dev->ops->rope(W.st, &r, NULL), KVD_OK);
        gpu_down(&W, &x);
        check("head_norm and rope", x.host, want, n, 2e-6);
        free(want);
        gpu_free(&W, &x);
        gpu_free(&W, &w);
        gpu_free(&W, &cs);
    }
}

/* 1e-6. */
static void test_swiglu(void **state)
{
    const uint32_t  n_token = 3, n_col = 1111;
    const uint64_t  stride = n_col + 1, n = n_token * stride;
    gpu_buf         g = gpu_floats(&W, n), u = gpu_floats(&W, n);
    float          *want = malloc((size_t)n * sizeof(*want));
    kvd_swiglu_args a    = { n_token, n_col, stride, stride, stride, g.host, u.host, want };

    (void)state;
    ((float *)g.host)[0] = -200.0f; /* exp overflows: 0, not NaN */
    ((float *)g.host)[1] = 90.0f;
    gpu_up(&W, &g);
    memcpy(want, g.host, (size_t)n * sizeof(*want));
    assert_int_equal(W.ref->ops->swiglu(W.ref_st, &a, NULL), KVD_OK);
    a.gate = g.dev.ptr;
    a.up   = u.dev.ptr;
    a.out  = g.dev.ptr; /* in place */
    assert_int_equal(W.dev->ops->swiglu(W.st, &a, NULL), KVD_OK);
    gpu_down(&W, &g);
    check("swiglu", g.host, want, n, 1e-6);
    free(want);
    gpu_free(&W, &g);
    gpu_free(&W, &u);
}

/* ---- matrix products ---------------------------------------------------------------------- */

typedef struct mm_case {
    uint32_t n_token, n_col, n_out, shift;
    uint32_t n_row[KVD_MATMUL_OUT_MAX];
    bool     bias, add;
} mm_case;

/* Floats by floats: 3e-6, where tensor cores add them up (from three tokens on) 1e-5.  Up to 16
 * tokens, quantised weights take activations in 16 bits: 2e-4; more tokens, nine or more of
 * unquantised weights, take both in bf16: 4e-3. */
static double mm_bound(const mm_case *c, kvd_dtype type)
{
    if (kvd_dtype_get(type)->block_len > 1)
        return c->n_token <= 16 ? 2e-4 : 4e-3;
    return c->n_token > 8 ? 4e-3 : c->n_token > 2 ? 1e-5 : 3e-6;
}

/* A case with its outputs of types t, t + 1, ...: of the same type where mixed is false.
 * bound 0: mm_bound(). */
static void check_matmul(gpu_world *w, const mm_case *c, uint32_t t, bool mixed, double bound)
{
    const kvd_dtype first    = TYPES[t % KVD_COUNTOF(TYPES)];
    const uint32_t  n_col    = odd_col(mixed ? KVD_DTYPE_Q4_K : first, c->n_col);
    const uint64_t  x_stride = n_col + c->shift;
    gpu_buf         x        = gpu_floats(w, c->n_token * x_stride), wt[4], bias[4], y[4];
    kvd_matmul_args h        = { .n_token = c->n_token, .n_col = n_col, .n_out = c->n_out };
    kvd_matmul_args d;

    h.x_stride = x_stride;
    h.x        = x.host;
    d          = h;
    d.x        = x.dev.ptr;
    for (uint32_t i = 0; i < c->n_out; i++) {
        const kvd_dtype type     = TYPES[(t + (mixed ? i : 0)) % KVD_COUNTOF(TYPES)];
        const uint64_t  y_stride = c->n_row[i] + 2, n = c->n_token * y_stride;

        wt[i]   = random_weight(type, c->n_row[i], n_col, c->shift, &h.out[i].w, &d.out[i].w);
        bias[i] = gpu_floats(w, c->n_row[i]);
        y[i]    = gpu_floats(w, n);
        h.out[i] =
            (kvd_matmul_out){ h.out[i].w, c->bias ? bias[i].host : NULL,
                              malloc((size_t)(n ? n : 1) * sizeof(float)), y_stride, c->add };
        d.out[i] = (kvd_matmul_out){ d.out[i].w, c->bias ? bias[i].dev.ptr : NULL, y[i].dev.ptr,
                                     y_stride, c->add };
        memcpy(h.out[i].y, y[i].host, (size_t)n * sizeof(float));
    }
    assert_int_equal(w->ref->ops->matmul(w->ref_st, &h, NULL), KVD_OK);
    assert_int_equal(w->dev->ops->matmul(w->st, &d, NULL), KVD_OK);
    for (uint32_t i = 0; i < c->n_out; i++) {
        gpu_down(w, &y[i]);
        check_worst(kvd_dtype_name(h.out[i].w.type), y[i].host, h.out[i].y,
                    c->n_token * h.out[i].y_stride,
                    bound > 0.0 ? bound : mm_bound(c, h.out[i].w.type));
        free(h.out[i].y);
        gpu_free(w, &wt[i]);
        gpu_free(w, &bias[i]);
        gpu_free(w, &y[i]);
    }
    gpu_free(w, &x);
}

static const mm_case FEW[] = {
    { 1, 1024, 1, 0, { 33 }, false, false },       { 1, 4096, 1, 0, { 9001 }, false, false },
    { 2, 512, 3, 0, { 5, 1, 17 }, true, false },   { 3, 1999, 1, 1, { 7 }, true, true },
    { 4, 2304, 2, 4, { 40, 8 }, false, true },     { 5, 768, 4, 0, { 1, 2, 3, 100 }, true, true },
    { 8, 1536, 1, 0, { 65 }, false, false },       { 7, 31, 2, 3, { 16, 0 }, true, false },
    { 0, 256, 1, 0, { 4 }, false, false },         { 2, 1032, 1, 0, { 9001 }, true, true },
    { 6, 1032, 2, 0, { 5003, 4001 }, true, true },
};

static void test_matmul_few(void **state)
{
    (void)state;
    worst = 0.0;
    for (uint32_t i = 0; i < KVD_COUNTOF(FEW); i++) {
        for (uint32_t t = 0; t < KVD_COUNTOF(TYPES); t++) {
            if (!quick || FEW[i].n_row[0] < 1000)
                check_matmul(&W, &FEW[i], t, i % 2, 0.0);
        }
    }
    printf("matmul, few tokens: error at most %.2g\n", worst);
}

static void test_matmul_many(void **state)
{
    static const mm_case many[] = {
        { 9, 1024, 1, 0, { 64 }, false, false }, { 70, 768, 2, 0, { 130, 33 }, true, false },
        { 33, 1999, 1, 1, { 77 }, true, true },  { 130, 2304, 3, 4, { 40, 8, 1 }, false, true },
        { 16, 31, 1, 0, { 5 }, false, false },   { 300, 4096, 1, 0, { 20000 }, false, true },
    };

    (void)state;
    worst = 0.0;
    for (uint32_t i = 0; i < KVD_COUNTOF(many); i++) {
        const bool large = many[i].n_row[0] > 1000;

        for (uint32_t t = 0; t < KVD_COUNTOF(TYPES); t++) {
            if (!large || (!quick && (TYPES[t] == KVD_DTYPE_BF16 || TYPES[t] == KVD_DTYPE_Q4_0)))
                check_matmul(&W, &many[i], t, i % 2, 0.0);
        }
    }
    printf("matmul, many tokens: error at most %.2g\n", worst);
}

/* Every number of tokens, rows of one block's and more, columns of one piece's and more. */
static void test_matmul_each(void **state)
{
    static const uint32_t n_col[] = { 544, 1312, 2048, 4384, 10240 };

    (void)state;
    worst = 0.0;
    for (uint32_t n = 1; n <= 17; n++) {
        for (uint32_t t = 0; t < KVD_COUNTOF(TYPES); t++) {
            const mm_case c = {
                n, n_col[(n + t) % KVD_COUNTOF(n_col)], 2, 0, { 37, 16 * n }, n % 2 == 0, n % 3 == 0
            };
            check_matmul(&W, &c, t, false, 0.0);
        }
    }
    printf("matmul, each number of tokens: error at most %.2g\n", worst);
}

/* A norm and a swiglu around a product, both with biases: errors of it pass through the latter. */
static void check_around(kvd_dtype type, kvd_dtype second, uint32_t n, uint32_t n_row,
                         uint32_t n_col, bool swiglu)
{
    const uint32_t  n_out = swiglu ? 2 : 3, stride = n_row + 1;
    const mm_case   c = { .n_token = n };
    gpu_buf         x = gpu_floats(&W, (uint64_t)n * (n_col + 4)), norm = gpu_floats(&W, n_col);
    gpu_buf         xn = gpu_floats(&W, (uint64_t)n * n_col), wt[3], bias[3], y[3];
    kvd_matmul_args h  = { .n_token  = n,
                           .n_col    = n_col,
                           .n_out    = n_out,
                           .x_stride = n_col + 4,
                           .x        = x.host,
                           .norm     = norm.host,
                           .xn       = xn.host,
                           .norm_eps = 1e-5f,
                           .swiglu   = swiglu };
    kvd_matmul_args d  = h;
    float          *want[3];

    d.x    = x.dev.ptr;
    d.norm = norm.dev.ptr;
    d.xn   = xn.dev.ptr;
    for (uint32_t i = 0; i < n_out; i++) {
        wt[i]   = random_weight(i == 1 ? second : type, n_row, n_col, 0, &h.out[i].w, &d.out[i].w);
        bias[i] = gpu_floats(&W, n_row);
        y[i]    = gpu_floats(&W, (uint64_t)n * stride);
        want[i] = malloc((size_t)n * stride * sizeof(float));
        memcpy(want[i], y[i].host, (size_t)n * stride * sizeof(float));
        h.out[i].bias     = bias[i].host;
        d.out[i].bias     = bias[i].dev.ptr;
        h.out[i].y        = want[i];
        d.out[i].y        = y[i].dev.ptr;
        h.out[i].y_stride = d.out[i].y_stride = stride;
        h.out[i].add = d.out[i].add = !swiglu && i == 2;
    }
    assert_int_equal(W.ref->ops->matmul(W.ref_st, &h, NULL), KVD_OK);
    assert_int_equal(W.dev->ops->matmul(W.st, &d, NULL), KVD_OK);
    for (uint32_t i = 0; i < n_out; i++) {
        gpu_down(&W, &y[i]);
        if (!swiglu || i == 0)
            check_worst(kvd_dtype_name((uint32_t)type), y[i].host, want[i], (uint64_t)n * stride,
                        3.0 * fmax(mm_bound(&c, type), mm_bound(&c, second)));
        free(want[i]);
        gpu_free(&W, &wt[i]);
        gpu_free(&W, &bias[i]);
        gpu_free(&W, &y[i]);
    }
    gpu_free(&W, &x);
    gpu_free(&W, &norm);
    gpu_free(&W, &xn);
}

static void test_matmul_around(void **state)
{
    static const uint32_t n[] = { 1, 2, 3, 7, 8, 9, 17 };

    (void)state;
    worst = 0.0;
    for (uint32_t i = 0; i < KVD_COUNTOF(n); i++) {
        for (uint32_t t = 0; t < KVD_COUNTOF(TYPES); t++) {
            const kvd_dtype next = TYPES[(t + 1) % KVD_COUNTOF(TYPES)];

            check_around(TYPES[t], TYPES[t], n[i], 43, i % 2 ? 768 : 2560, true);
            check_around(TYPES[t], TYPES[t], n[i], 43, odd_col(TYPES[t], 500), i % 2 == 0);
            check_around(TYPES[t], next, n[i], 43, 2304, t % 2 == 0);
        }
    }
    check_around(KVD_DTYPE_Q4_K, KVD_DTYPE_Q4_K, 3, 43, 10240, false);
    for (uint32_t i = 0; i < 2; i++) /* more blocks than are at work at once */
        check_around(KVD_DTYPE_BF16, KVD_DTYPE_BF16, 4 + i, 3001, 520, i);
    printf("matmul with norm, swiglu and biases: error at most %.2g\n", worst);
}

/* "deterministic": a token's bits do not depend on the tokens beside it. */
static void check_alone(gpu_world *p, kvd_dtype type, uint32_t n_row, uint32_t n_col)
{
    static const uint32_t cut[] = { 1, 1, 3, 8, 2, 4 };
    const uint32_t        n     = 19;
    kvd_weight            host, dev;
    gpu_buf               w   = random_weight(type, n_row, n_col, 0, &host, &dev);
    gpu_buf               x   = gpu_floats(p, (uint64_t)n * n_col);
    gpu_buf               all = gpu_floats(p, (uint64_t)n * n_row);
    gpu_buf               one = gpu_floats(p, (uint64_t)n * n_row);
    kvd_matmul_args       a   = { .n_token  = n,
                                  .n_col    = n_col,
                                  .n_out    = 1,
                                  .x_stride = n_col,
                                  .x        = x.dev.ptr,
                                  .out      = { { dev, NULL, all.dev.ptr, n_row, false } } };

    assert_int_equal(p->dev->ops->matmul(p->st, &a, NULL), KVD_OK);
    a.out[0].y = one.dev.ptr;
    for (uint32_t i = 0; i < KVD_COUNTOF(cut); i++) {
        a.n_token = cut[i];
        assert_int_equal(p->dev->ops->matmul(p->st, &a, NULL), KVD_OK);
        a.x += (uint64_t)cut[i] * n_col;
        a.out[0].y += (uint64_t)cut[i] * n_row;
    }
    gpu_down(p, &all);
    gpu_down(p, &one);
    if (memcmp(all.host, one.host, (size_t)n * n_row * sizeof(float)) != 0)
        fail_msg("%s: bits depend on the batch", kvd_dtype_name((uint32_t)type));
    gpu_free(p, &w);
    gpu_free(p, &x);
    gpu_free(p, &all);
    gpu_free(p, &one);
}

static void test_matmul_alone(void **state)
{
    const kvd_backend_limits lim = { .n_token = 32, .n_seq = 1, .n_col = 4096 };
    gpu_world                p;

    (void)state;
    assert_true(gpu_open_with(&p, module_file, false, true));
    gpu_reserve(&p, &lim);
    for (uint32_t t = 0; t < KVD_COUNTOF(TYPES); t++) {
        check_alone(&p, TYPES[t], 50, odd_col(TYPES[t], 2500));
        check_alone(&p, TYPES[t], 9000, 512);
    }
    gpu_close(&p);
}

/* "precise" keeps floats however many tokens there are. */
static void test_matmul_precise(void **state)
{
    const mm_case            c   = { 19, 768, 1, 0, { 50 }, true, true };
    const kvd_backend_limits lim = { .n_token = 32, .n_seq = 1, .n_col = 4096 };
    gpu_world                p;

    (void)state;
    assert_true(gpu_open_with(&p, module_file, true, false));
    gpu_reserve(&p, &lim);
    for (uint32_t t = 0; t < KVD_COUNTOF(TYPES); t++) {
        check_matmul(&p, &c, t, false, 3e-6);
        for (uint32_t i = 0; i < KVD_COUNTOF(FEW); i++) {
            if (FEW[i].n_row[0] < 1000)
                check_matmul(&p, &FEW[i], t, i % 2, 3e-6);
        }
    }
    gpu_close(&p);
}

/* ---- norm and swiglu in a product ---------------------------------------------------------- */

/* The bound of a product, of which sums of squares and exp are the smaller part. */
static void check_fused(gpu_world *w, uint32_t n_token, kvd_dtype first, kvd_dtype second,
                        uint32_t shift, double bound)
{
    const uint32_t  n_row = 129, n_col = 768;
    const uint64_t  x_stride = n_col + shift, y_stride = n_row + 1, n = n_token * y_stride;
    gpu_buf         x = gpu_floats(w, n_token * x_stride), norm = gpu_floats(w, n_col);
    gpu_buf         xn = gpu_floats(w, (uint64_t)n_token * n_col), wt[2], y[2];
    kvd_matmul_args h  = { .n_token  = n_token,
                           .n_col    = n_col,
                           .n_out    = 2,
                           .x_stride = x_stride,
                           .x        = x.host,
                           .norm     = norm.host,
                           .xn       = xn.host,
                           .norm_eps = 1e-5f,
                           .swiglu   = true };
    kvd_matmul_args d  = h;

    d.x    = x.dev.ptr;
    d.norm = norm.dev.ptr;
    d.xn   = xn.dev.ptr;
    for (uint32_t i = 0; i < 2; i++) {
        wt[i] = random_weight(i ? second : first, n_row, n_col, shift, &h.out[i].w, &d.out[i].w);
        y[i]  = gpu_floats(w, n);
        h.out[i].y        = malloc((size_t)(n ? n : 1) * sizeof(float));
        h.out[i].y_stride = d.out[i].y_stride = y_stride;
        d.out[i].y                            = y[i].dev.ptr;
        memcpy(h.out[i].y, y[i].host, (size_t)n * sizeof(float));
    }
    for (int swiglu = 1; swiglu >= 0; swiglu--) { /* then without: both outputs */
        h.swiglu = d.swiglu = swiglu;
        assert_int_equal(w->ref->ops->matmul(w->ref_st, &h, NULL), KVD_OK);
        assert_int_equal(w->dev->ops->matmul(w->st, &d, NULL), KVD_OK);
        for (uint32_t i = 0; i < (swiglu ? 1u : 2u); i++) {
            gpu_down(w, &y[i]);
            check_worst(kvd_dtype_name(h.out[i].w.type), y[i].host, h.out[i].y, n, bound);
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        free(h.out[i].y);
        gpu_free(w, &wt[i]);
        gpu_free(w, &y[i]);
    }
    gpu_free(w, &x);
    gpu_free(w, &norm);
    gpu_free(w, &xn);
}

static void test_matmul_fused(void **state)
{
    static const uint32_t few[] = { 1, 2, 3, 8, 0 };

    (void)state;
    worst = 0.0;
    for (uint32_t t = 0; t < KVD_COUNTOF(TYPES); t++) {
        const kvd_dtype other = TYPES[(t + 1) % KVD_COUNTOF(TYPES)];

        for (uint32_t i = 0; i < KVD_COUNTOF(few); i++) {
            const mm_case c     = { .n_token = few[i] };
            const double  bound = 2.0 * fmax(mm_bound(&c, TYPES[t]), mm_bound(&c, other));

            check_fused(&W, few[i], TYPES[t], TYPES[t], i % 2, bound);
            check_fused(&W, few[i], TYPES[t], other, 0, bound);
        }
        check_fused(&W, 33, TYPES[t], TYPES[t], 0, 8e-3);
    }
    printf("matmul with norm and swiglu: error at most %.2g\n", worst);
}

/* ---- the best of a row ---------------------------------------------------------------------- */

static float best_value(uint32_t kind)
{
    const float v = gpu_normal(&W);

    if (kind == 0)
        return v;
    if (kind == 1) /* ties, -0 and 0 among them */
        return floorf(2.0f * v) * 0.5f * (kvd_rng_f32(&W.rng) < 0.5f ? -1.0f : 1.0f);
    if (kind == 2)
        return kvd_rng_f32(&W.rng) < 0.3f ? NAN : kvd_rng_f32(&W.rng) < 0.3f ? -INFINITY : v;
    return kind == 3 ? NAN : -INFINITY;
}

static void check_best(uint32_t n_row, uint32_t n_col, uint32_t k, uint32_t kind)
{
    const uint64_t stride = n_col + 1, out_stride = k + 2;
    const uint64_t bytes = n_row * out_stride * sizeof(kvd_best_item);
    gpu_buf        x = gpu_alloc(&W, n_row * stride * sizeof(float)), out = gpu_alloc(&W, bytes);
    kvd_best_item *want = calloc(1, bytes);
    kvd_best_args  a    = { .n_row      = n_row,
                            .n_col      = n_col,
                            .k          = k,
                            .x_stride   = stride,
                            .out_stride = out_stride,
                            .x          = x.host,
                            .out        = want };

    for (uint64_t i = 0; i < n_row * stride; i++)
        ((float *)x.host)[i] = best_value(kind);
    gpu_up(&W, &x);
    assert_int_equal(W.ref->ops->best(W.ref_st, &a, NULL), KVD_OK);
    a.x   = x.dev.ptr;
    a.out = out.dev.ptr;
    assert_int_equal(W.dev->ops->best(W.st, &a, NULL), KVD_OK);
    gpu_down(&W, &out);
    if (memcmp(out.host, want, bytes) != 0)
        fail_msg("best %u of %u, kind %u", k, n_col, kind);
    free(want);
    gpu_free(&W, &x);
    gpu_free(&W, &out);
}

static void test_best(void **state)
{
    static const uint32_t n_col[] = { 1, 2, 7, 100, 4096, 4097, 9000, 49152, 128256 };
    static const uint32_t k[]     = { 1, 2, 40, KVD_BEST_MAX };

    (void)state;
    for (uint32_t i = 0; i < KVD_COUNTOF(n_col); i++) {
        for (uint32_t j = 0; j < KVD_COUNTOF(k); j++) {
            for (uint32_t kind = 0; kind < 5; kind++) {
                if (!quick || n_col[i] < 10000)
                    check_best(n_col[i] < 200 ? 35 : 2, n_col[i], k[j], kind);
            }
        }
    }
}

/* ---- graphs --------------------------------------------------------------------------------- */

/* What is recorded runs over what is there when it runs, and gives the bits of plain calls. */
static void test_graph(void **state)
{
    const uint32_t    n = 4, n_col = 512, n_row = 96;
    const uint64_t    bytes = (uint64_t)n * n_row * sizeof(float);
    gpu_buf           x = gpu_floats(&W, (uint64_t)n * n_col), w = gpu_floats(&W, n_col);
    gpu_buf           y = gpu_floats(&W, (uint64_t)n * n_row);
    kvd_weight        host, dev;
    gpu_buf           wt   = random_weight(KVD_DTYPE_Q4_K, n_row, n_col, 0, &host, &dev);
    float            *want = malloc(bytes);
    kvd_graph        *g;
    kvd_rms_norm_args norm = { n, n_col, n_col, n_col, x.dev.ptr, w.dev.ptr, x.dev.ptr, 1e-5f };
    kvd_matmul_args   mm   = { .n_token  = n,
                               .n_col    = n_col,
                               .n_out    = 1,
                               .x_stride = n_col,
                               .x        = x.dev.ptr,
                               .out      = { { dev, NULL, y.dev.ptr, n_row, false } } };

    (void)state;
    assert_int_equal(W.dev->ops->graph_begin(W.st, NULL), KVD_OK);
    assert_int_equal(W.dev->ops->rms_norm(W.st, &norm, NULL), KVD_OK);
    assert_int_equal(W.dev->ops->matmul(W.st, &mm, NULL), KVD_OK);
    assert_int_equal(W.dev->ops->graph_end(W.st, &g, NULL), KVD_OK);
    for (int i = 0; i < 2; i++) {
        for (uint64_t k = 0; k < (uint64_t)n * n_col; k++)
            ((float *)x.host)[k] = gpu_normal(&W);
        gpu_up(&W, &x);
        assert_int_equal(W.dev->ops->rms_norm(W.st, &norm, NULL), KVD_OK);
        assert_int_equal(W.dev->ops->matmul(W.st, &mm, NULL), KVD_OK);
        gpu_down(&W, &y);
        memcpy(want, y.host, bytes);
        memset(y.host, 0, bytes);
        gpu_up(&W, &x);
        gpu_up(&W, &y);
        assert_int_equal(W.dev->ops->graph_run(g, W.st, NULL), KVD_OK);
        gpu_down(&W, &y);
        assert_memory_equal(want, y.host, bytes);
    }
    W.dev->ops->graph_close(g);
    W.dev->ops->graph_close(NULL);
    assert_int_equal(W.ref->ops->graph_begin(W.ref_st, NULL), KVD_E_UNSUPPORTED);
    free(want);
    gpu_free(&W, &x);
    gpu_free(&W, &w);
    gpu_free(&W, &y);
    gpu_free(&W, &wt);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),        cmocka_unit_test(test_names),
        cmocka_unit_test(test_limits),        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_rms_norm),      cmocka_unit_test(test_heads),
        cmocka_unit_test(test_swiglu),        cmocka_unit_test(test_matmul_few),
        cmocka_unit_test(test_matmul_many),   cmocka_unit_test(test_matmul_each),
        cmocka_unit_test(test_matmul_alone),  cmocka_unit_test(test_matmul_precise),
        cmocka_unit_test(test_graph),         cmocka_unit_test(test_matmul_fused),
        cmocka_unit_test(test_matmul_around), cmocka_unit_test(test_best),
    };
    const kvd_backend_limits lim = {
        .n_token = 300, .n_seq = 1, .n_col = 10240, .n_vocab = 128256
    };
    int failed;

    module_file = argc > 1 ? argv[1] : NULL;
    quick       = argc > 2 && strcmp(argv[2], "quick") == 0;
    if (!gpu_open(&W, argc, argv))
        return GPU_SKIP;
    printf("%s\n", W.dev->isa);
    gpu_reserve(&W, &lim);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&W);
    return failed;
}
