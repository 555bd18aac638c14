/* SPDX-License-Identifier: Apache-2.0 */
/* test_os.c - file maps, processor and memory facts, control groups, the thread pool.
 * usage: test_os [--seed N] */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/os.h"
#include "os/os_cgroup.h"

static uint64_t seed_ = 1;
static char     dir_[64];

static const char *in_dir(const char *name)
{
    static char path[512];

    snprintf(path, sizeof(path), "%s/%s", dir_, name);
    return path;
}

static void put_file(const char *name, const void *data, size_t len)
{
    FILE *f = fopen(in_dir(name), "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    fclose(f);
}

static void put_text(const char *name, const char *text)
{
    put_file(name, text, strlen(text));
}

/* ---- maps ------------------------------------------------------------------------ */

/* Lengths around a page, a huge page and the copy's piece; pointers into the mapping stay good. */
static void test_map_copy_keeps_pointers(void **state)
{
    static const size_t len[] = { 1, 4096, 4097, 2 << 20, (2 << 20) + 1, (16 << 20) + 4099 };

    (void)state;
    for (size_t k = 0; k < KVD_COUNTOF(len); k++) {
        uint8_t       *data = malloc(len[k]);
        const uint8_t *last;
        os_map         m;

        for (size_t i = 0; i < len[k]; i++)
            data[i] = (uint8_t)(i * 13 + i / 4096);
        put_file("copied", data, len[k]);
        assert_int_equal(os_map_open(&m, in_dir("copied"), NULL), KVD_OK);
        last = m.data + len[k] - 1;
        assert_true(os_map_copy(&m));
        assert_true(last == m.data + len[k] - 1);
        put_file("copied", "gone", 4); /* what the file becomes is no longer our concern */
        assert_memory_equal(m.data, data, len[k]);
        os_map_close(&m);
        free(data);
    }
}

static void test_map_reads_a_file(void **state)
{
    static uint8_t data[100001];
    os_map         m;
    kvd_err        err;

    (void)state;
    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)(i * 7 + i / 256);
    put_file("data", data, sizeof(data));
    assert_int_equal(os_map_open(&m, in_dir("data"), &err), KVD_OK);
    assert_int_equal(m.bytes, sizeof(data));
    assert_memory_equal(m.data, data, sizeof(data));
    os_map_will_need(&m);
    assert_int_equal(os_map_resident(&m), sizeof(data)); /* just written, just read */
    os_map_close(&m);
    assert_null(m.data);
    assert_int_equal(m.bytes, 0);
    os_map_close(&m); /* again: nothing to do */
}

static void test_map_of_an_empty_file(void **state)
{
    os_map  m;
    kvd_err err;

    (void)state;
    put_file("empty", "", 0);
    assert_int_equal(os_map_open(&m, in_dir("empty"), &err), KVD_OK);
    assert_null(m.data);
    assert_int_equal(m.bytes, 0);
    os_map_will_need(&m);
    assert_int_equal(os_map_resident(&m), 0);
    os_map_close(&m);
}

static void test_map_refuses_what_is_no_file(void **state)
{
    os_map  m;
    kvd_err err;

    (void)state;
    assert_int_equal(os_map_open(&m, in_dir("none"), &err), KVD_E_IO);
    assert_int_equal(err.sys, ENOENT);
    assert_non_null(strstr(err.msg, "none"));
    assert_null(m.data);
    assert_int_equal(os_map_open(&m, dir_, &err), KVD_E_IO);
    assert_int_equal(err.sys, EISDIR);
    assert_int_equal(mkfifo(in_dir("fifo"), 0600), 0);
    assert_int_equal(os_map_open(&m, in_dir("fifo"), &err), KVD_E_IO); /* and does not hang */
    assert_non_null(strstr(err.msg, "not a regular file"));
    assert_int_equal(os_map_open(&m, "/dev/null", NULL), KVD_E_IO);
}

/* ---- processor and memory -------------------------------------------------------- */

static void test_cpu_levels_follow_features(void **state)
{
    const os_cpu *c = os_cpu_get();

    (void)state;
    assert_ptr_equal(c, os_cpu_get());
    assert_true(c->model[0] != 0);
    assert_true(c->n_cpu >= 1 && c->n_cpu <= (uint32_t)sysconf(_SC_NPROCESSORS_CONF));
    assert_true(c->l1d_bytes >= 8192 && c->l2_bytes >= c->l1d_bytes);
    if (c->isa >= OS_ISA_AVX2)
        assert_true(c->avx2 && c->fma && c->f16c);
    if (c->isa >= OS_ISA_AVX512)
        assert_true(c->avx512);
    if (c->isa == OS_ISA_AMX)
        assert_true(c->avx512_vnni && c->avx512_bf16 && c->amx_int8 && c->amx_bf16);
#if defined(__x86_64__)
    __builtin_cpu_init();
    assert_int_equal(c->avx2 && c->fma, __builtin_cpu_supports("avx2") &&
                                            __builtin_cpu_supports("fma") &&
                                            __builtin_cpu_supports("bmi2"));
    assert_int_equal(c->avx512, __builtin_cpu_supports("avx512f") &&
                                    __builtin_cpu_supports("avx512bw") &&
                                    __builtin_cpu_supports("avx512dq") &&
                                    __builtin_cpu_supports("avx512vl") && c->avx2);
#endif
}

static void test_isa_names(void **state)
{
    os_isa isa;

    (void)state;
    for (os_isa i = OS_ISA_PORTABLE; i <= OS_ISA_AMX; i++) {
        assert_true(os_isa_parse(os_isa_name(i), &isa));
        assert_int_equal(isa, i);
    }
    assert_false(os_isa_parse("avx1024", &isa));
    assert_false(os_isa_parse("", &isa));
}

static void test_memory_figures(void **state)
{
    const size_t bytes  = 64u << 20;
    const size_t slack  = 8u << 20;
    uint64_t     before = os_rss_anon(), rss;
    char        *p;

    (void)state;
    assert_true(os_mem_total() > 0);
    assert_true(os_mem_available() > 0 && os_mem_available() <= os_mem_total());
    p = kvd_pages_alloc(bytes);
    assert_non_null(p);
    memset(p, 1, bytes);
    rss = os_rss_anon();
    assert_true(rss + slack >= before + bytes);
    assert_true(os_rss() >= rss);
    kvd_pages_free(p, bytes);
    assert_true(os_rss_anon() <= rss - bytes + slack);
}

/* ---- control groups -------------------------------------------------------------- */

static void make_dirs(const char *const *name)
{
    for (; *name; name++)
        assert_int_equal(mkdir(in_dir(*name), 0700), 0);
}

static os_cgroup read_group(const char *root)
{
    char file[256], sys[256];

    snprintf(file, sizeof(file), "%s/%s/cgroup", dir_, root);
    snprintf(sys, sizeof(sys), "%s/%s", dir_, root);
    return os_cgroup_read(file, sys);
}

static void test_cgroup_v2_takes_the_tightest_level(void **state)
{
    static const char *const dirs[] = { "v2", "v2/a", "v2/a/b", NULL };
    os_cgroup                cg;

    (void)state;
    make_dirs(dirs);
    put_text("v2/cgroup", "0::/a/b\n");
    put_text("v2/a/b/cpu.max", "max 100000\n");
    put_text("v2/a/cpu.max", "250000 100000\n");
    put_text("v2/a/b/memory.max", "4000\n");
    put_text("v2/a/b/memory.current", "1500\n");
    put_text("v2/a/b/memory.stat", "anon 500\ninactive_file 700\nactive_file 100\n");
    put_text("v2/a/memory.max", "max\n");
    cg = read_group("v2");
    assert_int_equal(cg.n_cpu, 3);
    assert_int_equal(cg.mem_limit, 4000);
    assert_int_equal(cg.mem_available, 4000 - (1500 - 800));
}

static void test_cgroup_v1(void **state)
{
    static const char *const dirs[] = { "v1",        "v1/cpu,cpuacct", "v1/cpu,cpuacct/x",
                                        "v1/memory", "v1/memory/x",    NULL };
    os_cgroup                cg;

    (void)state;
    make_dirs(dirs);
    put_text("v1/cgroup", "3:cpu,cpuacct:/x\n2:memory:/x\n1:cpuset:/\n");
    put_text("v1/cpu,cpuacct/x/cpu.cfs_quota_us", "150000\n");
    put_text("v1/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n");
    put_text("v1/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    put_text("v1/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    put_text("v1/memory/x/memory.limit_in_bytes", "9000\n");
    put_text("v1/memory/x/memory.usage_in_bytes", "10000\n");
    put_text("v1/memory/x/memory.stat", "total_inactive_file 0\n");
    put_text("v1/memory/memory.limit_in_bytes", "9223372036854771712\n");
    cg = read_group("v1");
    assert_int_equal(cg.n_cpu, 2);
    assert_int_equal(cg.mem_limit, 9000);
    assert_int_equal(cg.mem_available, 0); /* over its limit: nothing is left */
}

static void test_cgroup_of_odd_files_is_no_limit(void **state)
{
    static const char *const dirs[]  = { "odd", NULL };
    static const char *const texts[] = { "",
                                         "\n\n",
                                         "0",
                                         "0:",
                                         "0::",
                                         "0::/",
                                         "::::::\n0::/..//",
                                         "0::/no/such/group\n1:cpu,memory:/none\n" };
    os_cgroup                cg;

    (void)state;
    make_dirs(dirs);
    put_text("odd/cpu.max", "0 0\n");
    put_text("odd/memory.max", "-\n");
    for (size_t i = 0; i < KVD_COUNTOF(texts); i++) {
        put_text("odd/cgroup", texts[i]);
        cg = read_group("odd");
        assert_int_equal(cg.n_cpu, UINT32_MAX);
        assert_int_equal(cg.mem_limit, UINT64_MAX);
        assert_int_equal(cg.mem_available, UINT64_MAX);
    }
    cg = read_group("missing");
    assert_int_equal(cg.n_cpu, UINT32_MAX);
}

static void test_field(void **state)
{
    const char *text = "MemTotal:  12 kB\nMemFree:\t7 kB\nFree: 1\n";

    (void)state;
    assert_int_equal(os_field(text, "MemTotal:"), 12);
    assert_int_equal(os_field(text, "MemFree:"), 7);
    assert_int_equal(os_field(text, "Free:"), 1);
    assert_int_equal(os_field(text, "Mem"), 0);
    assert_int_equal(os_field("", "Mem"), 0);
}

/* ---- pool ------------------------------------------------------------------------ */

#define ITEM_MAX 4096

typedef struct job {
    os_pool         *pool;
    uint32_t         n_item, salt;
    uint32_t         out[ITEM_MAX]; /* plain: the pool alone makes it visible */
    uint32_t         n_run[ITEM_MAX];
    _Atomic uint32_t thread_seen[16];
} job;

static void job_item(void *ctx, uint32_t item, uint32_t thread)
{
    job *j = ctx;

    assert_true(item < j->n_item);
    assert_true(thread < os_pool_n_thread(j->pool));
    j->out[item] = item * 31 + j->salt;
    j->n_run[item]++;
    atomic_fetch_add(&j->thread_seen[thread], 1);
}

static void run_and_check(job *j, os_pool *p, uint32_t n_item, uint32_t salt)
{
    j->pool   = p;
    j->n_item = n_item;
    j->salt   = salt;
    memset(j->n_run, 0, sizeof(*j->n_run) * n_item);
    os_pool_run(p, n_item, job_item, j);
    for (uint32_t i = 0; i < n_item; i++) {
        if (j->n_run[i] != 1 || j->out[i] != i * 31 + salt)
            fail_msg("item %u of %u ran %u times", i, n_item, j->n_run[i]);
    }
}

static os_pool *open_pool(uint32_t n_thread)
{
    os_pool *p;
    kvd_err  err;

    if (os_pool_open(&p, n_thread, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    assert_int_equal(os_pool_n_thread(p), n_thread);
    return p;
}

static void test_pool_runs_each_item_once(void **state)
{
    static job j;

    (void)state;
    for (uint32_t n_thread = 1; n_thread <= 8; n_thread++) {
        os_pool *p = open_pool(n_thread);

        for (uint32_t n_item = 0; n_item < 40; n_item++)
            run_and_check(&j, p, n_item, n_thread * 1000 + n_item);
        run_and_check(&j, p, ITEM_MAX, n_thread);
        os_pool_close(p);
    }
}

/* Keeps its thread until every thread has an item, however busy the machine is. */
static void slow_item(void *ctx, uint32_t item, uint32_t thread)
{
    job *j = ctx;

    job_item(ctx, item, thread);
    for (int wait = 0; wait < 30000; wait++) {
        uint32_t n_seen = 0;

        for (uint32_t t = 0; t < 3; t++)
            n_seen += atomic_load(&j->thread_seen[t]) > 0;
        if (n_seen == 3)
            break;
        usleep(1000);
    }
}

static void test_pool_shares_the_work(void **state)
{
    static job j;
    os_pool   *p = open_pool(3);

    (void)state;
    memset(&j, 0, sizeof(j));
    j.pool   = p;
    j.n_item = 60;
    os_pool_run(p, j.n_item, slow_item, &j); /* every thread gets some */
    for (uint32_t t = 0; t < 3; t++)
        assert_true(atomic_load(&j.thread_seen[t]) > 0);
    os_pool_close(p);
}

/* Jobs back to back and jobs after pauses in which the workers fall asleep, in random order and
 * sizes: a lost wake-up hangs here, a stale item shows as a wrong count. */
static void test_pool_reuse_stress(void **state)
{
    static job j;
    kvd_rng    rng;

    (void)state;
    kvd_rng_seed(&rng, seed_);
    for (uint32_t n_thread = 2; n_thread <= 5; n_thread++) {
        os_pool *p = open_pool(n_thread);

        for (uint32_t k = 0; k < 5000; k++) {
            const uint64_t r = kvd_rng_below(&rng, 100);

            if (r < 3)
                usleep((useconds_t)kvd_rng_below(&rng, 200));
            run_and_check(&j, p, (uint32_t)kvd_rng_below(&rng, r < 90 ? 12 : 300), k);
        }
        os_pool_close(p);
    }
}

/* A late thread must not wait for items nor disturb the next job: items of very unlike cost. */
static void uneven_item(void *ctx, uint32_t item, uint32_t thread)
{
    if (item == 0)
        usleep(150); /* longer than the spin: whoever waits falls asleep */
    job_item(ctx, item, thread);
}

static void test_pool_with_uneven_items(void **state)
{
    static job j;
    os_pool   *p = open_pool(2);

    (void)state;
    j.pool   = p;
    j.n_item = 2;
    for (uint32_t k = 0; k < 1500; k++) {
        memset(j.n_run, 0, 2 * sizeof(*j.n_run));
        os_pool_run(p, 2, uneven_item, &j);
        assert_int_equal(j.n_run[0], 1);
        assert_int_equal(j.n_run[1], 1);
    }
    os_pool_close(p);
}

static void test_pool_opens_and_closes(void **state)
{
    static job j;

    (void)state;
    for (uint32_t k = 0; k < 200; k++) {
        os_pool *p = open_pool(1 + k % 6);

        if (k % 3 == 0)
            run_and_check(&j, p, k, k);
        os_pool_close(p);
    }
    os_pool_close(NULL);
}

static void test_pool_refuses_bad_sizes(void **state)
{
    os_pool *p;
    kvd_err  err;

    (void)state;
    assert_int_equal(os_pool_open(&p, 0, &err), KVD_E_INVAL);
    assert_null(p);
    assert_int_equal(os_pool_open(&p, 100000, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "100000"));
}

static void test_pool_without_memory(void **state)
{
    const uint64_t live = kvd_alloc_live();
    os_pool       *p;
    kvd_err        err;
    int            n = 0;

    (void)state;
    for (;; n++) {
        kvd_status st;

        kvd_alloc_fault(n, false);
        st = os_pool_open(&p, 4, &err);
        kvd_alloc_fault(-1, false);
        if (st == KVD_OK)
            break;
        assert_int_equal(st, KVD_E_NOMEM);
        assert_null(p);
        assert_int_equal(kvd_alloc_live(), live);
    }
    assert_int_equal(n, 2);
    os_pool_close(p);
    assert_int_equal(kvd_alloc_live(), live);
}

static void test_pool_run_allocates_nothing(void **state)
{
    static job j;
    os_pool   *p = open_pool(3);

    (void)state;
    kvd_alloc_guard(true);
    run_and_check(&j, p, 100, 1);
    kvd_alloc_guard(false);
    os_pool_close(p);
}

/* ---- modules ------------------------------------------------------------------------------ */

/* This program as far as its first n bytes; 0: all of it. */
static size_t put_program(const char *name, size_t n)
{
    FILE  *f     = fopen("/proc/self/exe", "rb");
    long   bytes = 0;
    size_t len;
    void  *data;

    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    bytes = ftell(f);
    rewind(f);
    len  = n ? n : (size_t)bytes;
    data = malloc(len);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, len, f), len);
    fclose(f);
    put_file(name, data, len);
    free(data);
    return len;
}

static void assert_refused(const char *name, const char *text)
{
    char why[512] = "";

    assert_null(os_module_open(in_dir(name), why, sizeof(why)));
    if (!strstr(why, text))
        fail_msg("%s: '%s' in place of '%s'", name, why, text);
}

/* dlopen() would map what is missing, and touching that is SIGBUS. */
static void test_module_that_is_cut_off(void **state)
{
    (void)state;
    (void)put_program("whole.so", 0);
    assert_refused("whole.so", "executable"); /* the loader's word: nothing of it is missing */
    (void)put_program("cut.so", 4000);        /* half of a file may be what debuggers read */
    assert_refused("cut.so", "cut off");
    (void)put_program("cut.so", 70); /* within the table of segments */
    assert_refused("cut.so", "cut off");
    put_file("cut.so", "", 0);
    assert_refused("cut.so", "short");
    put_file("cut.so", "no library, but long enough for a header of 64 bytes, as one would have",
             71);
    assert_refused("cut.so", "ELF");
}

/* A pipe would be waited for. */
static void test_module_that_is_no_file(void **state)
{
    (void)state;
    assert_int_equal(mkfifo(in_dir("pipe.so"), 0600), 0);
    assert_refused("pipe.so", "no file");
    assert_int_equal(mkdir(in_dir("folder.so"), 0700), 0);
    assert_refused("folder.so", "no file");
    assert_refused("missing.so", "No such file");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_map_reads_a_file),
        cmocka_unit_test(test_map_copy_keeps_pointers),
        cmocka_unit_test(test_map_of_an_empty_file),
        cmocka_unit_test(test_map_refuses_what_is_no_file),
        cmocka_unit_test(test_cpu_levels_follow_features),
        cmocka_unit_test(test_isa_names),
        cmocka_unit_test(test_memory_figures),
        cmocka_unit_test(test_cgroup_v2_takes_the_tightest_level),
        cmocka_unit_test(test_cgroup_v1),
        cmocka_unit_test(test_cgroup_of_odd_files_is_no_limit),
        cmocka_unit_test(test_field),
        cmocka_unit_test(test_pool_runs_each_item_once),
        cmocka_unit_test(test_pool_shares_the_work),
        cmocka_unit_test(test_pool_reuse_stress),
        cmocka_unit_test(test_pool_with_uneven_items),
        cmocka_unit_test(test_pool_opens_and_closes),
        cmocka_unit_test(test_pool_refuses_bad_sizes),
        cmocka_unit_test(test_pool_without_memory),
        cmocka_unit_test(test_pool_run_allocates_nothing),
        cmocka_unit_test(test_module_that_is_cut_off),
        cmocka_unit_test(test_module_that_is_no_file),
    };
    char command[128];
    int  rc;

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        seed_ = strtoull(argv[2], NULL, 10);
    else
        seed_ = kvd_now_ns();
    printf("seed %llu\n", (unsigned long long)seed_);
    snprintf(dir_, sizeof(dir_), "/tmp/kvdrive-test-os-XXXXXX");
    if (!mkdtemp(dir_))
        return 1;
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(command, sizeof(command), "rm -rf '%s'", dir_);
    return system(command) != 0 || rc;
}
