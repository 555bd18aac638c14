/* SPDX-License-Identifier: Apache-2.0 */
/* test_split.c - the backend with memory of its own that other tests use ends them where an op is
 * given what a device could not reach. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/split.h"

#define N 64u

typedef enum mistake { NONE, HOST_INPUT, PAST_THE_END, HOST_LIST } mistake;

/* Whether ops with this mistake end the process. */
static bool ends(mistake m)
{
    static float    host[N];
    static uint64_t host_off[1];
    const pid_t     pid    = fork();
    int             status = 0;

    if (pid == 0) {
        const kvd_backend_params p = { .name = "ref" };
        kvd_backend             *be;
        kvd_stream              *st;
        kvd_mem                  dev, list;

        if (!freopen("/dev/null", "w", stderr) || kvd_backend_open(&be, &p, NULL) != KVD_OK)
            _exit(1);
        split_begin(be);
        if (be->ops->stream_open(be, &st, NULL) != KVD_OK ||
            be->ops->mem_alloc(be, KVD_MEM_DEVICE, 3 * N * sizeof(float), &dev, NULL) != KVD_OK ||
            be->ops->mem_alloc(be, KVD_MEM_PINNED, sizeof(uint64_t), &list, NULL) != KVD_OK)
            _exit(1);
        float *const x = (float *)dev.ptr + (m == PAST_THE_END ? 1 : 0);

        (void)!be->ops->swiglu(st,
                               &(kvd_swiglu_args){ .n_token     = 1,
                                                   .n_col       = N,
                                                   .gate_stride = N,
                                                   .up_stride   = N,
                                                   .out_stride  = N,
                                                   .gate        = m == HOST_INPUT ? host : x,
                                                   .up          = x + N,
                                                   .out         = x + 2 * N },
                               NULL);
        (void)!be->ops->record_copy(st,
                                    &(kvd_record_copy_args){ .n       = 1,
                                                             .bytes   = 16,
                                                             .src_off = m == HOST_LIST ? host_off
                                                                                       : list.ptr,
                                                             .dst_off = list.ptr,
                                                             .src     = dev.ptr,
                                                             .dst     = (float *)dev.ptr + N },
                                    NULL);
        (void)!be->ops->stream_sync(st, NULL);
        _exit(0);
    }
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status))
        assert_int_equal(WEXITSTATUS(status), 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void test_reach(void **state)
{
    (void)state;
    assert_false(ends(NONE));
    assert_true(ends(HOST_INPUT));
    assert_true(ends(PAST_THE_END));
    assert_true(ends(HOST_LIST));
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_reach) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
