/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_memory.c - pinned memory of the CUDA backend: large areas are several pieces for the
 * driver and one range for everybody else.
 * usage: test_cuda_memory MODULE [quick | BYTES]   (BYTES: also the time that so much takes) */
#include "gpu/gpu_world.h"

#include <sys/resource.h>
#include <sys/time.h>

#define PIECE (1ull << 30) /* of cuda_pinned.cu */

static bool      quick;
static gpu_world W;

static kvd_mem pinned(uint64_t bytes)
{
    kvd_mem m;
    kvd_err err = { 0 };

    gpu_check(W.dev->ops->mem_alloc(W.dev, KVD_MEM_PINNED, bytes, &m, &err), &err);
    assert_int_equal(m.bytes, bytes);
    return m;
}

static void test_sizes(void **state)
{
    static const uint64_t size[] = {
        0, 1, 4097, (64ull << 20) - 1, 64ull << 20, (65ull << 20) + 3
    };

    (void)state;
    for (size_t i = 0; i < sizeof(size) / sizeof(size[0]); i++) {
        kvd_mem        m = pinned(size[i]);
        const uint8_t *p = m.ptr;

        for (uint64_t k = 0; k < size[i]; k++)
            if (p[k])
                fail_msg("%llu bytes: not zero at %llu", (unsigned long long)size[i],
                         (unsigned long long)k);
        if (size[i])
            memset(m.ptr, 1, size[i]);
        W.dev->ops->mem_free(W.dev, &m);
        assert_null(m.ptr);
    }
}

/* Records that lie across every seam: a kernel reads and writes them, a copy moves them. */
static void test_seams(void **state)
{
    const uint64_t         bytes = quick ? PIECE + 8192 : 2 * PIECE + PIECE / 2 + 4096;
    const uint64_t         run   = 4096;
    const kvd_backend_ops *ops   = W.dev->ops;
    kvd_mem                host = pinned(bytes), list = pinned(64), dev;
    uint64_t              *off = list.ptr;
    uint8_t               *p   = host.ptr;

    (void)state;
    assert_int_equal(ops->mem_alloc(W.dev, KVD_MEM_DEVICE, 2 * run, &dev, NULL), KVD_OK);
    for (uint64_t seam = PIECE; seam < bytes; seam += PIECE) {
        kvd_record_copy_args a   = { .n       = 1,
                                     .bytes   = run,
                                     .src_off = off,
                                     .dst_off = off + 1,
                                     .src     = host.ptr,
                                     .dst     = dev.ptr };
        kvd_err              err = { 0 };

        for (uint64_t i = 0; i < run; i++)
            p[seam - run / 2 + i] = (uint8_t)(i * 7 + seam / PIECE);
        off[0] = seam - run / 2;
        off[1] = 0;
        gpu_check(ops->record_copy(W.st, &a, &err), &err); /* up by a kernel */
        gpu_check(ops->copy(W.st, dev, run, host, seam - run / 2, run, &err), &err);
        gpu_sync(&W);
        memset(p + seam - run / 2, 0, run);
        gpu_check(ops->copy(W.st, host, seam - run / 2 - 1, dev, run - 1, run + 1, &err), &err);
        gpu_sync(&W);
        for (uint64_t i = 0; i < run; i++)
            if (p[seam - run / 2 + i] != (uint8_t)(i * 7 + seam / PIECE))
                fail_msg("copied: byte %llu at seam %llu", (unsigned long long)i,
                         (unsigned long long)seam);
        memset(p + seam - run / 2, 0, run);
        a.src     = dev.ptr;
        a.dst     = host.ptr;
        a.src_off = off + 1;
        a.dst_off = off;
        gpu_check(ops->record_copy(W.st, &a, &err), &err); /* down by a kernel */
        gpu_sync(&W);
        for (uint64_t i = 0; i < run; i++)
            if (p[seam - run / 2 + i] != (uint8_t)(i * 7 + seam / PIECE))
                fail_msg("by a kernel: byte %llu at seam %llu", (unsigned long long)i,
                         (unsigned long long)seam);
    }
    ops->mem_free(W.dev, &host);
    ops->mem_free(W.dev, &list);
    ops->mem_free(W.dev, &dev);
}

/* Too much, and where the system may refuse: it works, or an error says what to do. */
static void test_refused(void **state)
{
    const kvd_backend_ops *ops = W.dev->ops;
    struct rlimit          was, little = { 65536, 0 };
    kvd_err                err  = { 0 };
    kvd_mem                host = { 0 };

    (void)state;
    assert_int_equal(ops->mem_alloc(W.dev, KVD_MEM_PINNED, 1ull << 46, &host, &err), KVD_E_NOMEM);
    assert_non_null(strstr(err.msg, "67108864 MiB"));
    assert_non_null(strstr(err.msg, "ulimit -l"));
    assert_null(host.ptr);

    assert_int_equal(getrlimit(RLIMIT_MEMLOCK, &was), 0);
    little.rlim_max = was.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &little), 0);
    err.code = ops->mem_alloc(W.dev, KVD_MEM_PINNED, 256ull << 20, &host, &err);
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &was), 0);
    if (err.code != KVD_OK)
        assert_non_null(strstr(err.msg, "limit of locked memory is 64 KiB"));
    ops->mem_free(W.dev, &host);
    host = pinned(256ull << 20);
    ops->mem_free(W.dev, &host);
}

static void show_time(uint64_t bytes)
{
    const uint64_t t0 = kvd_now_ns();
    kvd_mem        m  = pinned(bytes);
    const uint64_t t1 = kvd_now_ns();
    double         s, gib = (double)bytes / (1ull << 30);

    W.dev->ops->mem_free(W.dev, &m);
    s = (double)(t1 - t0) * 1e-9;
    printf("pinned %.1f GiB: %.2f s, %.3f s a GiB; freed in %.2f s\n", gib, s, s / gib,
           (double)(kvd_now_ns() - t1) * 1e-9);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_seams),
        cmocka_unit_test(test_refused),
    };
    int failed;

    quick = argc > 2 && strcmp(argv[2], "quick") == 0;
    if (!gpu_open(&W, argc, argv))
        return GPU_SKIP;
    printf("%s\n", W.dev->isa);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (argc > 2 && !quick)
        show_time(strtoull(argv[2], NULL, 10));
    gpu_close(&W);
    return failed;
}
