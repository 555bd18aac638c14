/* SPDX-License-Identifier: Apache-2.0 */
/* test_io.c - file helpers and the I/O queue: every backend moves the same bytes, reports the end
 * of a file and errors, keeps its depth; the simulated disk injects what it was asked for. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "os/os.h"

#define WAIT_NS 5000000000u
#define N_REQ   300u
#define BYTES   8192u

static char dir_[256];

static void path_of(char out[512], const char *name)
{
    snprintf(out, 512, "%s/%s", dir_, name);
}

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir_, sizeof(dir_), "%s/kvd-io-XXXXXX",
             access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
    return mkdtemp(dir_) ? 0 : -1;
}

static void remove_name(void *ctx, const char *name)
{
    char path[512];

    (void)ctx;
    path_of(path, name);
    os_file_remove(path);
}

static int remove_dir(void **state)
{
    (void)state;
    if (os_dir_list(dir_, remove_name, NULL, NULL) != KVD_OK)
        return -1;
    return rmdir(dir_);
}

static uint8_t byte_at(uint64_t off)
{
    return (uint8_t)(off * 2654435761u >> 13);
}

static void fill(uint8_t *p, uint64_t off, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        p[i] = byte_at(off + i);
}

static void reap_all(os_io *io, uint32_t n, os_io_done *done)
{
    uint32_t n_done = 0;

    while (n_done < n) {
        const uint32_t got = os_io_reap(io, done + n_done, n - n_done, WAIT_NS);

        assert_int_not_equal(got, 0);
        n_done += got;
    }
    assert_int_equal(os_io_reap(io, done, 1, 0), 0);
}

/* Writes N_REQ ranges in descending order, syncs, reads them back, beyond the end too. */
static void round_trip(os_io *io, int fd, uint8_t *buf)
{
    static os_io_done done[N_REQ];
    uint32_t          n_left = N_REQ, n_flight = 0;

    while (n_left > 0 || n_flight > 0) {
        while (n_left > 0 && os_io_room(io) > 0) {
            os_io_req r = { OS_IO_WRITE, fd, NULL, 0, BYTES, --n_left };

            r.off = (uint64_t)n_left * BYTES;
            r.buf = buf + r.off;
            fill(r.buf, r.off, BYTES);
            os_io_submit(io, &r, 1);
            n_flight++;
        }
        const uint32_t n = os_io_reap(io, done, N_REQ, WAIT_NS);

        assert_true(n > 0 && n <= n_flight);
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(done[i].error, 0);
            assert_int_equal(done[i].bytes, BYTES);
        }
        n_flight -= n;
    }
    const os_io_req sync = { OS_IO_SYNC, fd, NULL, 0, 0, 99 };

    os_io_submit(io, &sync, 1);
    reap_all(io, 1, done);
    assert_int_equal(done[0].user, 99);
    assert_int_equal(done[0].error, 0);
    memset(buf, 0, (size_t)N_REQ * BYTES);
    for (uint32_t i = 0; i < 16; i++) { /* the last one meets the end of the file */
        const uint64_t  off = (uint64_t)(N_REQ - 16 + i) * BYTES + 4096;
        const os_io_req r   = { OS_IO_READ, fd, buf + (uint64_t)i * BYTES, off, BYTES, i };

        os_io_submit(io, &r, 1);
    }
    reap_all(io, 16, done);
    for (uint32_t i = 0; i < 16; i++) {
        const uint64_t off = (N_REQ - 16 + done[i].user) * BYTES + 4096;

        assert_int_equal(done[i].error, 0);
        assert_int_equal(done[i].bytes, done[i].user == 15 ? 4096 : BYTES);
        for (uint32_t j = 0; j < done[i].bytes; j++)
            assert_int_equal(buf[done[i].user * BYTES + j], byte_at(off + j));
    }
}

static void each_backend_moves_bytes(void **state)
{
    static const os_io_kind kind[] = { OS_IO_AUTO, OS_IO_URING, OS_IO_POOL, OS_IO_MAP, OS_IO_SIM };
    static os_io_sim        sim    = { .seed = 5, .delay = 20000, .read_short = 20000 };
    const uint64_t          buf_size = (uint64_t)N_REQ * BYTES;

    (void)state;
    for (uint32_t k = 0; k < KVD_COUNTOF(kind); k++) {
        for (uint32_t direct = 0; direct < 2; direct++) {
            uint8_t           *buf = kvd_pages_alloc(buf_size);
            const os_io_params p   = { .kind      = kind[k],
                                       .depth     = 16,
                                       .n_thread  = 3,
                                       .buf       = direct ? buf : NULL,
                                       .buf_bytes = buf_size,
                                       .sim       = &sim };
            os_io             *io;
            kvd_err            err;
            char               path[512];
            int                fd;
            kvd_status         st = os_io_open(&io, &p, &err);

            assert_non_null(buf);
            if (st == KVD_E_UNSUPPORTED && kind[k] == OS_IO_URING) {
                print_message("skipped: %s\n", err.msg);
                kvd_pages_free(buf, buf_size);
                continue;
            }
            assert_int_equal(st, KVD_OK);
            path_of(path, "data");
            sim.read_short = direct ? 0 : 20000; /* continuing short would break the alignment */
            if (direct && !os_direct_io(dir_))
                direct = 2;
            assert_int_equal(
                os_file_open(&fd, path, OS_OPEN_CREATE | (direct == 1 ? OS_OPEN_DIRECT : 0), &err),
                KVD_OK);
            round_trip(io, fd, buf);
            print_message("%s%s\n", os_io_name(io), direct == 1 ? ", direct" : "");
            assert_true(os_io_close(io));
            os_file_close(fd);
            os_file_remove(path);
            kvd_pages_free(buf, buf_size);
        }
    }
    assert_true(sim.n_fault > 0);
}

static void errors_come_back(void **state)
{
    static const os_io_kind kind[] = { OS_IO_AUTO, OS_IO_POOL, OS_IO_MAP, OS_IO_SIM };
    static os_io_sim        sim    = { .seed = 1 };

    (void)state;
    for (uint32_t k = 0; k < KVD_COUNTOF(kind); k++) {
        const os_io_params p    = { .kind = kind[k], .depth = 4, .sim = &sim };
        char               b[8] = "1234567";
        os_io_req  r[2] = { { OS_IO_READ, -1, b, 0, 8, 1 }, { OS_IO_WRITE, -1, b, 0, 8, 2 } };
        os_io_done done[2];
        os_io     *io;
        char       path[512];
        int        fd;

        path_of(path, "readonly");
        assert_int_equal(os_file_replace(path, b, 8, NULL), KVD_OK);
        assert_int_equal(os_file_open(&fd, path, OS_OPEN_READ, NULL), KVD_OK);
        r[1].fd = fd;
        assert_int_equal(os_io_open(&io, &p, NULL), KVD_OK);
        os_io_submit(io, r, 2);
        reap_all(io, 2, done);
        for (uint32_t i = 0; i < 2; i++)
            assert_int_equal(done[i].error, EBADF);
        os_file_close(fd);
        assert_true(os_io_close(io));
    }
}

/* Requests in flight at close are waited for: their buffers may be freed after it. */
static void close_waits(void **state)
{
    static const os_io_kind kind[] = { OS_IO_AUTO, OS_IO_POOL, OS_IO_MAP, OS_IO_SIM };
    static os_io_sim        sim    = { .seed = 3, .lost = 30000 };

    (void)state;
    for (uint32_t k = 0; k < KVD_COUNTOF(kind); k++) {
        const os_io_params p = { .kind = kind[k], .depth = 32, .sim = &sim };
        uint8_t           *b = kvd_calloc(32, BYTES);
        os_io             *io;
        char               path[512];
        int                fd;

        path_of(path, "inflight");
        assert_int_equal(os_file_open(&fd, path, OS_OPEN_CREATE, NULL), KVD_OK);
        assert_int_equal(os_io_open(&io, &p, NULL), KVD_OK);
        for (uint32_t i = 0; i < 32; i++) {
            const os_io_req r = { OS_IO_WRITE,         fd,    b + (size_t)i * BYTES,
                                  (uint64_t)i * BYTES, BYTES, i };

            os_io_submit(io, &r, 1);
        }
        assert_int_equal(os_io_room(io), 0);
        assert_true(os_io_close(io));
        kvd_free(b);
        os_file_close(fd);
    }
    assert_true(sim.n_fault > 0);
}

static void sim_injects(void **state)
{
    os_io_sim          sim = { .seed = 9, .fail_nth = 2, .crash_nth = 4 };
    const os_io_params p   = { .kind = OS_IO_SIM, .depth = 4, .sim = &sim };
    static char        page[2 * OS_PAGE_BYTES], back[2 * OS_PAGE_BYTES];
    os_io             *io;
    os_io_done         done[4];
    char               path[512];
    uint64_t           bytes;
    int                fd;

    (void)state;
    memset(page, 7, sizeof(page));
    path_of(path, "sim");
    assert_int_equal(os_file_open(&fd, path, OS_OPEN_CREATE, NULL), KVD_OK);
    assert_int_equal(os_io_open(&io, &p, NULL), KVD_OK);
    for (uint32_t i = 0; i < 6; i++) {
        const os_io_req w = { OS_IO_WRITE, fd, page, i * sizeof(page), sizeof(page), i };

        os_io_submit(io, &w, 1);
        reap_all(io, 1, done);
        assert_int_equal(done[0].error, i == 1 ? EIO : 0);
    }
    /* Request 2 failed before it was a write; of the writes three arrived, the fourth is torn, the
     * fifth is lost. */
    assert_int_equal(os_file_size(fd, &bytes), KVD_OK);
    assert_int_equal(bytes, 4 * sizeof(page) + OS_PAGE_BYTES);
    sim.read_flip     = 65536;
    const os_io_req r = { OS_IO_READ, fd, back, 0, sizeof(back), 0 };

    os_io_submit(io, &r, 1);
    reap_all(io, 1, done);
    uint32_t n_bit = 0;

    for (uint32_t i = 0; i < sizeof(back); i++)
        n_bit += (uint32_t)__builtin_popcount((unsigned char)(page[i] ^ back[i]));
    assert_int_equal(n_bit, 1);
    assert_true(os_io_close(io));
    os_file_close(fd);
}

static void open_survives_failed_allocations(void **state)
{
    static const os_io_kind kind[] = { OS_IO_AUTO, OS_IO_POOL, OS_IO_MAP, OS_IO_SIM };
    static os_io_sim        sim;
    const uint64_t          live = kvd_alloc_live();

    (void)state;
    for (uint32_t k = 0; k < KVD_COUNTOF(kind); k++) {
        for (int64_t n = 0;; n++) {
            const os_io_params p = { .kind = kind[k], .sim = &sim };
            os_io             *io;
            kvd_status         st;

            assert_true(n < 10);
            kvd_alloc_fault(n, false);
            st = os_io_open(&io, &p, NULL);
            kvd_alloc_fault(-1, false);
            if (st == KVD_OK) {
                os_io_close(io);
                assert_true(n >= 2);
                break;
            }
            assert_int_equal(st, KVD_E_NOMEM);
            assert_null(io);
            assert_int_equal(kvd_alloc_live(), live);
        }
    }
}

static void files(void **state)
{
    char     path[512], other[1024], text[8];
    uint64_t bytes;
    int      fd, fd2, dir;
    kvd_err  err;

    (void)state;
    path_of(path, "replaced");
    assert_int_equal(os_file_replace(path, "one", 3, &err), KVD_OK);
    assert_int_equal(os_file_replace(path, "second", 6, &err), KVD_OK);
    assert_int_equal(os_file_open(&fd, path, OS_OPEN_WRITE, &err), KVD_OK);
    assert_int_equal(os_file_size(fd, &bytes), KVD_OK);
    assert_int_equal(bytes, 6);
    assert_int_equal(pread(fd, text, sizeof(text), 0), 6);
    assert_memory_equal(text, "second", 6);
    assert_int_equal(os_file_reserve(fd, 8192, 4096, path, &err), KVD_OK);
    assert_int_equal(os_file_reserve(fd, 0, UINT64_C(1) << 60, path, &err), KVD_E_IO);
    assert_non_null(strstr(err.msg, path));
    os_file_punch(fd, 0, 4096);
    os_file_close(fd);
    os_file_close(-1);

    snprintf(other, sizeof(other), "%s/none/none", path);
    assert_int_equal(os_file_open(&fd, other, OS_OPEN_READ, &err), KVD_E_IO);
    assert_int_equal(fd, -1);
    assert_int_equal(os_file_replace(other, "x", 1, &err), KVD_E_IO);
    assert_int_equal(os_dir_make(other, &err), KVD_E_IO); /* a file is in the way */
    assert_int_equal(os_dir_sync(other, &err), KVD_E_IO);
    assert_int_equal(os_dir_list(other, remove_name, NULL, &err), KVD_E_IO);
    assert_true(os_dir_free(dir_) > 0);
    assert_true(os_dir_free(other) == UINT64_MAX);
    path_of(other, "a/b/c");
    assert_int_equal(os_dir_make(other, &err), KVD_OK);
    assert_int_equal(os_dir_make(other, &err), KVD_OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(rmdir(other), 0);
        *strrchr(other, '/') = 0;
    }

    path_of(path, "lock");
    assert_int_equal(os_dir_open(&dir, dir_, &err), KVD_OK);
    assert_int_equal(os_lock_open(&fd, dir, path, &err), KVD_OK);
    assert_int_equal(os_lock_open(&fd2, dir, path, &err), KVD_E_BUSY);
    assert_non_null(strstr(err.msg, "in use by another process"));
    os_file_close(fd);
    assert_int_equal(os_lock_open(&fd, dir, path, &err), KVD_OK);
    os_file_close(fd);
    os_file_close(dir);

    uint8_t key[2][16] = { { 0 } };

    assert_true(os_random(key[0], 16) && os_random(key[1], 16));
    assert_memory_not_equal(key[0], key[1], 16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files),
        cmocka_unit_test(each_backend_moves_bytes),
        cmocka_unit_test(errors_come_back),
        cmocka_unit_test(close_waits),
        cmocka_unit_test(sim_injects),
        cmocka_unit_test(open_survives_failed_allocations),
    };

    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
