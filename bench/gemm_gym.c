/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_gym.c - speed of cpu_gemm() by level, type and shape on one thread, next to oneDNN's bf16
 * and int8 products of ready-made operands (no unpacking, no conversion: a yardstick, not a rival).
 *
 * Not part of the default build.  From the root of the source, with libdnnl-dev and a build in B:
 *   cc -O2 -Iinclude -Isrc bench/gemm_gym.c B/libkvdrive.a -ldnnl -lm -lpthread \
 *      $(pkg-config --libs jansson libpcre2-8 libutf8proc) -o gemm_gym
 *   OMP_NUM_THREADS=1 ./gemm_gym [tokens] [level]
 * Prints GFLOP/s (2 x multiplications), best of several runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <oneapi/dnnl/dnnl.h>

#include "backend/cpu/cpu_gemm.h"

#define GYM_NS 60000000 /* of one measurement */

static const struct {
    const char *name;
    os_isa      isa;
    bool        bf16;
} levels[] = { { "portable", OS_ISA_PORTABLE, false },
               { "avx2", OS_ISA_AVX2, false },
               { "avx512", OS_ISA_AVX512, false },
               { "avx512+bf16", OS_ISA_AVX512, true },
               { "amx", OS_ISA_AMX, true } };

static const kvd_dtype types[] = { KVD_DTYPE_F32,  KVD_DTYPE_F16,  KVD_DTYPE_BF16, KVD_DTYPE_Q4_0,
                                   KVD_DTYPE_Q4_1, KVD_DTYPE_Q5_0, KVD_DTYPE_Q5_1, KVD_DTYPE_Q8_0,
                                   KVD_DTYPE_Q2_K, KVD_DTYPE_Q3_K, KVD_DTYPE_Q4_K, KVD_DTYPE_Q5_K,
                                   KVD_DTYPE_Q6_K };

static const struct {
    uint32_t n_col, n_row;
} shapes[] = { { 576, 576 },  { 576, 1536 }, { 1536, 576 }, { 896, 896 },
               { 896, 4864 }, { 4864, 896 }, { 4096, 4096 } };

/* Processor time of this thread: what neighbours take is not counted. */
static uint64_t gym_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static void gym_check(dnnl_status_t st)
{
    if (st != dnnl_success) {
        fprintf(stderr, "oneDNN: status %d\n", (int)st);
        exit(1);
    }
}

/* ---- ours ------------------------------------------------------------------------ */

/* Nanoseconds of the fastest call. */
static double gym_ours(size_t level, kvd_dtype type, uint32_t n_token, uint32_t n_col,
                       uint32_t n_row)
{
    const kvd_backend_limits lim  = { .n_token = n_token, .n_seq = 1, .n_col = n_col };
    const uint64_t           row  = kvd_dtype_row_bytes(type, n_col);
    cpu_backend              be   = { .isa = levels[level].isa, .bf16 = levels[level].bf16 };
    uint8_t                 *w    = kvd_pages_alloc(row * n_row);
    float                   *x    = kvd_pages_alloc(4ULL * n_token * n_col);
    float                   *y    = kvd_pages_alloc(4ULL * n_token * n_row);
    double                   best = 1e30;
    kvd_matmul_args          a    = { .n_token  = n_token,
                                      .n_col    = n_col,
                                      .n_out    = 1,
                                      .x_stride = n_col,
                                      .x        = x,
                                      .out      = { { .y = y, .y_stride = n_row } } };

    a.out[0].w       = (kvd_weight){ type, n_row, n_col, row, w };
    be.base.n_thread = 1;
    if (os_pool_open(&be.pool, 1, NULL) != KVD_OK)
        exit(1);
    be.mm_scratch_bytes = cpu_gemm_scratch_bytes(&be, &lim);
    be.mm_scratch       = kvd_pages_alloc(be.mm_scratch_bytes);
    for (uint64_t i = 0; i < row * n_row; i++)
        w[i] = (uint8_t)((i * 2654435761U) >> 24 & 0x3b); /* finite in every type */
    for (uint64_t start = gym_ns(); gym_ns() - start < GYM_NS;) {
        const uint64_t t0 = gym_ns();

        cpu_gemm(&be, &a);
        if ((double)(gym_ns() - t0) < best)
            best = (double)(gym_ns() - t0);
    }
    kvd_pages_free(be.mm_scratch, be.mm_scratch_bytes);
    os_pool_close(be.pool);
    kvd_pages_free(w, row * n_row);
    kvd_pages_free(x, 4ULL * n_token * n_col);
    kvd_pages_free(y, 4ULL * n_token * n_row);
    return best;
}

/* ---- oneDNN ---------------------------------------------------------------------- */

static dnnl_memory_t gym_memory(const_dnnl_primitive_desc_t pd, dnnl_query_t what,
                                dnnl_engine_t eng)
{
    dnnl_memory_t m;

    gym_check(dnnl_memory_create(&m, dnnl_primitive_desc_query_md(pd, what, 0), eng,
                                 DNNL_MEMORY_ALLOCATE));
    return m;
}

static double gym_dnnl(dnnl_data_type_t src, dnnl_data_type_t wei, dnnl_data_type_t dst,
                       uint32_t n_token, uint32_t n_col, uint32_t n_row)
{
    const dnnl_dims_t     xd = { n_token, n_col }, wd = { n_col, n_row }, yd = { n_token, n_row };
    dnnl_memory_desc_t    x, w, y;
    dnnl_matmul_desc_t    d;
    dnnl_primitive_desc_t pd;
    dnnl_primitive_t      p;
    dnnl_engine_t         eng;
    dnnl_stream_t         st;
    dnnl_exec_arg_t       arg[3];
    double                best = 1e30;

    gym_check(dnnl_engine_create(&eng, dnnl_cpu, 0));
    gym_check(dnnl_stream_create(&st, eng, dnnl_stream_default_flags));
    gym_check(dnnl_memory_desc_init_by_tag(&x, 2, xd, src, dnnl_ab));
    gym_check(dnnl_memory_desc_init_by_tag(&w, 2, wd, wei, dnnl_format_tag_any));
    gym_check(dnnl_memory_desc_init_by_tag(&y, 2, yd, dst, dnnl_ab));
    gym_check(dnnl_matmul_desc_init(&d, &x, &w, NULL, &y));
    gym_check(dnnl_primitive_desc_create(&pd, &d, NULL, eng, NULL));
    gym_check(dnnl_primitive_create(&p, pd));
    arg[0] = (dnnl_exec_arg_t){ DNNL_ARG_SRC, gym_memory(pd, dnnl_query_src_md, eng) };
    arg[1] = (dnnl_exec_arg_t){ DNNL_ARG_WEIGHTS, gym_memory(pd, dnnl_query_weights_md, eng) };
    arg[2] = (dnnl_exec_arg_t){ DNNL_ARG_DST, gym_memory(pd, dnnl_query_dst_md, eng) };
    for (int i = 0; i < 3; i++) { /* touched, and finite */
        const dnnl_memory_desc_t *md;
        void                     *ptr;

        gym_check(dnnl_memory_get_memory_desc(arg[i].memory, &md));
        gym_check(dnnl_memory_get_data_handle(arg[i].memory, &ptr));
        memset(ptr, 0, dnnl_memory_desc_get_size(md));
    }
    for (uint64_t start = gym_ns(); gym_ns() - start < GYM_NS;) {
        const uint64_t t0 = gym_ns();

        gym_check(dnnl_primitive_execute(p, st, 3, arg));
        gym_check(dnnl_stream_wait(st));
        if ((double)(gym_ns() - t0) < best)
            best = (double)(gym_ns() - t0);
    }
    for (int i = 0; i < 3; i++)
        dnnl_memory_destroy(arg[i].memory);
    dnnl_primitive_destroy(p);
    dnnl_primitive_desc_destroy(pd);
    dnnl_stream_destroy(st);
    dnnl_engine_destroy(eng);
    return best;
}

/* ---- tables ---------------------------------------------------------------------- */

static void gym_row(const char *name, const char *type, const double *ns, uint32_t n_token)
{
    printf("%-12s %-5s", name, type);
    for (size_t s = 0; s < KVD_COUNTOF(shapes); s++)
        if (ns[s] > 0)
            printf(" %10.0f", 2.0 * n_token * shapes[s].n_col * shapes[s].n_row / ns[s]);
        else
            printf(" %10s", "-");
    printf("\n");
    fflush(stdout);
}

static void gym_level(size_t level, uint32_t n_token, const char *only)
{
    double ns[KVD_COUNTOF(shapes)];

    for (size_t t = 0; t < KVD_COUNTOF(types); t++) {
        const char *name = kvd_dtype_get(types[t])->name;

        if (only && strcmp(only, name) != 0)
            continue;
        for (size_t s = 0; s < KVD_COUNTOF(shapes); s++)
            ns[s] = shapes[s].n_col % kvd_dtype_get(types[t])->block_len
                        ? 0
                        : gym_ours(level, types[t], n_token, shapes[s].n_col, shapes[s].n_row);
        gym_row(levels[level].name, name, ns, n_token);
    }
}

int main(int argc, char **argv)
{
    const uint32_t n_token = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 512;
    const char    *level = argc > 2 ? argv[2] : NULL, *type = argc > 3 ? argv[3] : NULL;
    double         bf16[KVD_COUNTOF(shapes)], int8[KVD_COUNTOF(shapes)];

    printf("%u tokens, GFLOP/s\n%-18s", n_token, "");
    for (size_t s = 0; s < KVD_COUNTOF(shapes); s++)
        printf(" %5ux%-4u", shapes[s].n_col, shapes[s].n_row);
    printf("\n");
    for (size_t s = 0; s < KVD_COUNTOF(shapes); s++) {
        const uint32_t k = shapes[s].n_col, n = shapes[s].n_row;

        bf16[s] = gym_dnnl(dnnl_bf16, dnnl_bf16, dnnl_f32, n_token, k, n);
        int8[s] = gym_dnnl(dnnl_s8, dnnl_s8, dnnl_s32, n_token, k, n);
    }
    gym_row("oneDNN", "bf16", bf16, n_token);
    gym_row("oneDNN", "int8", int8, n_token);
    for (size_t l = KVD_COUNTOF(levels); l-- > 0;)
        if (levels[l].isa <= os_cpu_get()->isa && (!level || strcmp(level, levels[l].name) == 0))
            gym_level(l, n_token, type);
    return 0;
}
