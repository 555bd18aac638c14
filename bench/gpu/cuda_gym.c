/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gym.c - times the CUDA backend's ops by themselves, as CSV: what, type, shape, time, rate.
 * usage: cuda_gym MODULE [quick | full [prefill | decode] | products [TYPE]]
 * prefill, decode: attention of many rows, of one row a sequence alone; products: those of few
 * tokens alone.
 *
 * A figure is the median of several runs of a graph of many calls; data rotates among enough copies
 * that caches do not hold it.  Rates: bytes that must move (weights; K and V; what is
 * copied), or operations for products and attention of many rows. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"

#define N_RUN     7
#define MIN_BYTES (768ull << 20) /* of rotating data */
#define N_CTX     131072u

static kvd_backend *be;
static kvd_stream  *st;
static bool         quick;
static const char  *only_type; /* of weights in products; NULL: all */

static void check(kvd_status s, const kvd_err *err)
{
    if (s != KVD_OK) {
        fprintf(stderr, "cuda_gym: %s\n", err->msg);
        exit(1);
    }
}

static kvd_mem take(kvd_mem_kind kind, uint64_t bytes)
{
    kvd_err err = { 0 };
    kvd_mem m;

    check(be->ops->mem_alloc(be, kind, bytes, &m, &err), &err);
    return m;
}

static void put(kvd_mem to, uint64_t off, const void *from, uint64_t bytes)
{
    kvd_err err = { 0 };
    kvd_mem src = { (void *)(uintptr_t)from, bytes, KVD_MEM_HOST };

    check(be->ops->copy(st, to, off, src, 0, bytes, &err), &err);
    check(be->ops->stream_sync(st, &err), &err);
}

/* Random bits in device memory, with finite values as half floats: 0x2c to 0x2f on top. */
static kvd_mem noise(uint64_t bytes)
{
    const uint64_t chunk = 16 << 20;
    kvd_mem        m     = take(KVD_MEM_DEVICE, bytes);
    uint8_t       *p     = kvd_malloc(chunk);
    kvd_rng        rng;

    kvd_rng_seed(&rng, bytes);
    for (uint64_t i = 0; i < chunk; i += 8) {
        const uint64_t v = (kvd_rng_u64(&rng) & 0x83ff83ff83ff83ffull) | 0x2c002c002c002c00ull;
        memcpy(p + i, &v, 8);
    }
    for (uint64_t at = 0; at < bytes; at += chunk)
        put(m, at, p, kvd_min_u64(chunk, bytes - at));
    kvd_free(p);
    return m;
}

typedef void (*call_fn)(void *ctx, uint32_t i);

static int by_time(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

/* Median seconds of one call: n_call of them are recorded and run as one, as a step would be. */
static double time_calls(call_fn fn, void *ctx, uint32_t n_call)
{
    kvd_err    err = { 0 };
    double     s[N_RUN];
    kvd_graph *g;

    check(be->ops->graph_begin(st, &err), &err);
    for (uint32_t i = 0; i < n_call; i++)
        fn(ctx, i);
    check(be->ops->graph_end(st, &g, &err), &err);
    for (int r = -1; r < N_RUN; r++) { /* the first warms up */
        const uint64_t t0 = kvd_now_ns();

        check(be->ops->graph_run(g, st, &err), &err);
        check(be->ops->stream_sync(st, &err), &err);
        if (r >= 0)
            s[r] = (double)(kvd_now_ns() - t0) * 1e-9 / n_call;
    }
    be->ops->graph_close(g);
    qsort(s, N_RUN, sizeof(s[0]), by_time);
    return s[N_RUN / 2];
}

static void row(const char *what, const char *type, const char *shape, double s, double bytes,
                double flop)
{
    printf("%s,%s,%s,%.2f,%.1f,%.1f\n", what, type, shape, s * 1e6, bytes / s * 1e-9,
           flop / s * 1e-12);
    fflush(stdout);
}

/* ---- products -------------------------------------------------------------------------- */

typedef struct mm_ctx {
    kvd_matmul_args a;
    const uint8_t  *w;
    uint64_t        bytes; /* of one copy of the weights */
    uint32_t        n_copy;
} mm_ctx;

static void mm_call(void *ctx, uint32_t i)
{
    mm_ctx *c   = ctx;
    kvd_err err = { 0 };

    c->a.out[0].w.data = c->w + i % c->n_copy * c->bytes;
    check(be->ops->matmul(st, &c->a, &err), &err);
}

static void time_matmul(kvd_dtype type, uint32_t n_row, uint32_t n_col, uint32_t n_token, kvd_mem w,
                        kvd_mem x, kvd_mem y)
{
    mm_ctx c = { .w = w.ptr };
    char   shape[64];
    double s;

    c.a.n_token  = n_token;
    c.a.n_col    = n_col;
    c.a.n_out    = 1;
    c.a.x_stride = n_col;
    c.a.x        = x.ptr;
    c.a.out[0]   = (kvd_matmul_out){
          { type, n_row, n_col, kvd_dtype_row_bytes(type, n_col), NULL }, NULL, y.ptr, n_row, false
    };
    c.bytes  = kvd_align_up(c.a.out[0].w.row_bytes * n_row, 256);
    c.n_copy = (uint32_t)(w.bytes / c.bytes);
    snprintf(shape, sizeof(shape), "%ux%u n=%u", n_row, n_col, n_token);
    s = time_calls(mm_call, &c, n_token > 8 ? 5 : 40);
    row("matmul", kvd_dtype_name((uint32_t)type), shape, s, (double)c.bytes,
        2.0 * n_row * n_col * n_token);
}

/* The products of a step of an 8B model of Llama's third shape, one by one as a step has them. */
typedef struct step_ctx {
    kvd_dtype type;
    uint32_t  n_token;
    kvd_mem   w, x, y;
    uint64_t  at, bytes; /* of weights: the next ones, and all so far */
} step_ctx;

static void step_product(step_ctx *c, uint32_t n_row, uint32_t n_col, uint32_t n_out, bool add)
{
    const uint64_t  row = kvd_dtype_row_bytes(c->type, n_col), bytes = row * n_row;
    kvd_matmul_args a = {
        .n_token = c->n_token, .n_col = n_col, .n_out = n_out, .x_stride = n_col, .x = c->x.ptr
    };
    kvd_err err = { 0 };

    for (uint32_t i = 0; i < n_out; i++) {
        if (c->at + bytes > c->w.bytes)
            c->at = 0;
        a.out[i].w        = (kvd_weight){ c->type, n_row, n_col, row, (uint8_t *)c->w.ptr + c->at };
        a.out[i].y        = (float *)c->y.ptr + (uint64_t)i * c->n_token * n_row;
        a.out[i].y_stride = n_row;
        a.out[i].add      = add;
        c->at += kvd_align_up(bytes, 256);
        c->bytes += bytes;
    }
    check(be->ops->matmul(st, &a, &err), &err);
}

static void step_call(void *ctx, uint32_t i)
{
    (void)i;
    for (uint32_t layer = 0; layer < 32; layer++) {
        step_product(ctx, 6144, 4096, 1, false);
        step_product(ctx, 4096, 4096, 1, true);
        step_product(ctx, 14336, 4096, 2, false);
        step_product(ctx, 4096, 14336, 1, true);
    }
    step_product(ctx, 128256, 4096, 1, false);
}

static void time_step(kvd_dtype type, uint32_t n_token, kvd_mem w, kvd_mem x, kvd_mem y)
{
    step_ctx c = { .type = type, .n_token = n_token, .w = w, .x = x, .y = y };
    char     shape[64];
    double   s;

    s = time_calls(step_call, &c, 1);
    snprintf(shape, sizeof(shape), "8B step n=%u", n_token);
    row("matmul", kvd_dtype_name((uint32_t)type), shape, s, (double)c.bytes,
        (double)c.bytes / kvd_dtype_get(type)->block_bytes * kvd_dtype_get(type)->block_len * 2.0 *
            n_token);
}

static void time_products(void)
{
    static const kvd_dtype type[]     = { KVD_DTYPE_BF16, KVD_DTYPE_F16,  KVD_DTYPE_F32,
                                          KVD_DTYPE_Q8_0, KVD_DTYPE_Q4_0, KVD_DTYPE_Q4_1,
                                          KVD_DTYPE_Q5_0, KVD_DTYPE_Q5_1, KVD_DTYPE_Q2_K,
                                          KVD_DTYPE_Q3_K, KVD_DTYPE_Q4_K, KVD_DTYPE_Q5_K,
                                          KVD_DTYPE_Q6_K };
    static const uint32_t  shape[][2] = { { 14336, 4096 }, { 4096, 14336 }, { 4096, 4096 },
                                          { 6144, 4096 },  { 1024, 4096 },  { 128256, 4096 } };
    kvd_mem                w = noise(2 * MIN_BYTES), x = noise(8192ull * 14336 * 4);
    kvd_mem                y = take(KVD_MEM_DEVICE, 8192ull * 14336 * 4);

    for (uint32_t t = 0; t < KVD_COUNTOF(type); t++) {
        const bool main_type = type[t] == KVD_DTYPE_BF16 || type[t] == KVD_DTYPE_Q4_K;

        if (only_type && strcmp(only_type, kvd_dtype_name((uint32_t)type[t])) != 0)
            continue;
        for (uint32_t i = 0; i < (main_type ? KVD_COUNTOF(shape) : 2); i++)
            for (uint32_t n = 1; n <= 8; n *= 2)
                time_matmul(type[t], shape[i][0], shape[i][1], n, w, x, y);
        for (uint32_t n = 1; n <= (main_type || type[t] == KVD_DTYPE_Q8_0 ? 8 : 0); n *= 2)
            time_step(type[t], n, w, x, y);
    }
    for (uint32_t n = 16; n <= (only_type ? 0u : quick ? 128u : 8192u); n *= 8) {
        time_matmul(KVD_DTYPE_BF16, 14336, 4096, n, w, x, y);
        time_matmul(KVD_DTYPE_Q4_K, 14336, 4096, n, w, x, y);
    }
    be->ops->mem_free(be, &w);
    be->ops->mem_free(be, &x);
    be->ops->mem_free(be, &y);
}

/* ---- attention ------------------------------------------------------------------------- */

typedef struct at_ctx {
    kvd_attn_args a;
} at_ctx;

static void at_call(void *ctx, uint32_t i)
{
    at_ctx *c   = ctx;
    kvd_err err = { 0 };

    (void)i;
    check(be->ops->attn(st, &c->a, &err), &err);
}

/* n_seq sequences of n_past tokens with n_row more, over one layer's lanes in blocks of 256. */
static void time_attn(uint32_t dim, uint32_t n_kv, uint32_t group, uint32_t n_seq, uint32_t n_past,
                      uint32_t n_row, kvd_mem pool, kvd_mem q, kvd_mem out)
{
    const uint32_t chunk = 8, n_key = n_past + n_row, n_block = (n_key + 255) / 256;
    const uint64_t lane = 256ull * dim * 4, block = n_kv * lane;
    const double   bytes = (double)n_seq * n_key * n_kv * dim * 4;
    kvd_mem        table = take(KVD_MEM_DEVICE, (uint64_t)n_seq * n_block * 8);
    kvd_mem        seqs  = take(KVD_MEM_DEVICE, n_seq * sizeof(kvd_kv_seq));
    at_ctx         c     = { .a = { .n_seq      = n_seq,
                                    .n_head     = n_kv * group,
                                    .n_token    = n_seq * n_row,
                                    .q_stride   = (uint64_t)n_kv * group * dim,
                                    .out_stride = (uint64_t)n_kv * group * dim,
                                    .scale      = 0.1f } };
    char           shape[96];
    double         s, pairs;

    for (uint32_t i = 0; i < n_seq; i++) {
        kvd_kv_seq one = { i * n_row, n_row, n_past, (uint64_t *)table.ptr + i * n_block };

        put(seqs, i * sizeof(one), &one, sizeof(one));
        for (uint32_t b = 0; b < n_block; b++) {
            const uint64_t off = ((uint64_t)(b * 7919u % n_block) * n_seq + i) * block;
            put(table, (i * n_block + b) * 8ull, &off, 8);
        }
    }
    c.a.seq = seqs.ptr;
    c.a.q   = q.ptr;
    c.a.out = out.ptr;
    c.a.kv  = (kvd_kv_layout){ KVD_DTYPE_BF16,     n_kv, dim,  chunk,   256,
                               4ull * chunk * dim, 0,    lane, pool.ptr };
    s       = time_calls(at_call, &c, n_row > 1 ? 3 : 30);
    pairs   = (double)n_seq * n_row * (n_past + (n_row + 1) / 2.0);
    snprintf(shape, sizeof(shape), "dim=%u kv=%u group=%u seq=%u past=%u rows=%u", dim, n_kv, group,
             n_seq, n_past, n_row);
    row(n_row > 1 ? "prefill-attn" : "decode-attn", "BF16", shape, s, bytes,
        4.0 * pairs * dim * n_kv * group);
    be->ops->mem_free(be, &table);
    be->ops->mem_free(be, &seqs);
}

static void time_prefill(void)
{
    kvd_mem pool = noise(5ull << 30), q = noise(8192ull * 4096 * 4);
    kvd_mem out = take(KVD_MEM_DEVICE, 8192ull * 4096 * 4);

    time_attn(128, 8, 4, 1, 0, 512, pool, q, out);
    time_attn(128, 8, 4, 1, 0, 8192, pool, q, out);
    time_attn(128, 8, 4, 1, 32768 - 512, 512, pool, q, out);
    time_attn(128, 8, 4, 1, 32768 - 4096, 4096, pool, q, out);
    time_attn(64, 8, 4, 1, 0, 8192, pool, q, out);
    time_attn(64, 2, 7, 1, 32768 - 4096, 4096, pool, q, out);
    if (!quick) {
        time_attn(128, 8, 4, 1, 122880 - 8192, 8192, pool, q, out);
        time_attn(96, 8, 4, 1, 0, 8192, pool, q, out);
        time_attn(256, 4, 4, 1, 0, 4096, pool, q, out);
    }
    be->ops->mem_free(be, &pool);
    be->ops->mem_free(be, &q);
    be->ops->mem_free(be, &out);
}

static void time_attention(void)
{
    kvd_mem pool = noise(5ull << 30), q = noise(8192ull * 4096 * 4);
    kvd_mem out = take(KVD_MEM_DEVICE, 8192ull * 4096 * 4);

    time_attn(128, 8, 4, 1, 122879, 1, pool, q, out);
    time_attn(128, 8, 4, 8, 61439, 1, pool, q, out);
    time_attn(128, 8, 4, 1, 8191, 1, pool, q, out);
    time_attn(128, 8, 4, 32, 8191, 1, pool, q, out);
    time_attn(128, 8, 1, 4, 32767, 1, pool, q, out);
    time_attn(128, 8, 8, 4, 32767, 1, pool, q, out);
    time_attn(128, 8, 5, 4, 32767, 1, pool, q, out);
    time_attn(64, 2, 7, 4, 32767, 1, pool, q, out);
    time_attn(80, 8, 4, 4, 32767, 1, pool, q, out);
    time_attn(256, 4, 2, 4, 32767, 1, pool, q, out);
    be->ops->mem_free(be, &pool);
    be->ops->mem_free(be, &q);
    be->ops->mem_free(be, &out);
}

/* ---- copies ---------------------------------------------------------------------------- */

typedef struct cp_ctx {
    kvd_mem  a, b;
    uint64_t bytes;
} cp_ctx;

static void cp_call(void *ctx, uint32_t i)
{
    cp_ctx *c   = ctx;
    kvd_err err = { 0 };

    (void)i;
    check(be->ops->copy(st, c->b, 0, c->a, 0, c->bytes, &err), &err);
}

static void time_copies(void)
{
    const uint64_t bytes = 512ull << 20;
    kvd_mem        dev = noise(bytes), dev2 = take(KVD_MEM_DEVICE, bytes);
    kvd_mem        pin = take(KVD_MEM_PINNED, bytes);
    cp_ctx         up = { pin, dev2, bytes }, down = { dev, pin, bytes }, in = { dev, dev2, bytes };

    row("copy", "pinned-to-device", "512M", time_calls(cp_call, &up, 3), (double)bytes, 0);
    row("copy", "device-to-pinned", "512M", time_calls(cp_call, &down, 3), (double)bytes, 0);
    row("copy", "device (read + write)", "512M", time_calls(cp_call, &in, 10), 2.0 * (double)bytes,
        0);
    be->ops->mem_free(be, &dev);
    be->ops->mem_free(be, &dev2);
    be->ops->mem_free(be, &pin);
}

int main(int argc, char **argv)
{
    const kvd_backend_params p        = { .name = "cuda", .module = argc > 1 ? argv[1] : NULL };
    const kvd_backend_limits lim      = { .n_token   = 8192,
                                          .n_seq     = 32,
                                          .n_col     = 14336,
                                          .n_head    = 64,
                                          .n_kv_head = 8,
                                          .head_dim  = 256,
                                          .n_ctx     = N_CTX };
    const bool               products = argc > 2 && strcmp(argv[2], "products") == 0;
    const bool               decode   = argc > 3 && strcmp(argv[3], "decode") == 0;
    kvd_err                  err      = { 0 };

    only_type = products && argc > 3 ? argv[3] : NULL;
    quick     = products || (argc > 2 && strcmp(argv[2], "quick") == 0);
    check(kvd_backend_open(&be, &p, &err), &err);
    check(be->ops->stream_open(be, &st, &err), &err);
    check(be->ops->reserve(be, &lim, &err), &err);
    fprintf(stderr, "cuda_gym: %s\n", be->isa);
    printf("what,type,shape,us,GB/s,TFLOP/s\n");
    if (products || argc <= 3)
        time_products();
    if (!products && argc <= 3)
        time_copies();
    if (!products && (decode || argc <= 3))
        time_attention();
    if (!products && !decode)
        time_prefill();
    be->ops->stream_close(st);
    kvd_backend_close(be);
    return 0;
}
