/* SPDX-License-Identifier: Apache-2.0 */
/* fault.c - linked into kvdrive_fault: a device that goes wrong.  SIGUSR1: the next evaluation
 * fails for good, or one that hangs; SIGUSR2: the next one hangs, and says so; SIGWINCH: an
 * allocation fails, the first, and with each further signal one later.  SIGRTMIN + n: the disk
 * gives n / 2 MB/s (0: what it can, 9: 50), SIGRTMIN + 10 + n: a prompt's token takes n tenths of a
 * millisecond, so that which of them is faster does not depend on the machine.  The linker puts
 * this in the place of what it slows. */
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "model/model.h"
#include "os/os.h"

#define RATES 10 /* and times */
#define HANGS "fault: a step hangs\n"

static atomic_int fault, disk_speed, token_us;

kvd_status __real_kvd_eval(kvd_session *s, const kvd_batch *b, kvd_err *err);
kvd_status __wrap_kvd_eval(kvd_session *s, const kvd_batch *b, kvd_err *err);
void       __real_os_io_submit(os_io *io, const os_io_req *r, uint32_t n);
void       __wrap_os_io_submit(os_io *io, const os_io_req *r, uint32_t n);
kvd_status __real_model_embed(const model *m, const model_run *r, const int32_t *token,
                              kvd_err *err);
kvd_status __wrap_model_embed(const model *m, const model_run *r, const int32_t *token,
                              kvd_err *err);

static void on_signal(int sig)
{
    static int64_t n;

    if (sig == SIGWINCH)
        kvd_alloc_fault(n++, false);
    else if (sig >= SIGRTMIN + RATES)
        token_us = 100 * (sig - SIGRTMIN - RATES);
    else if (sig >= SIGRTMIN)
        disk_speed = sig == SIGRTMIN + 9 ? 100 : sig - SIGRTMIN;
    else
        fault = sig;
}

__attribute__((constructor)) static void arm(void)
{
    signal(SIGUSR1, on_signal);
    signal(SIGUSR2, on_signal);
    signal(SIGWINCH, on_signal);
    for (int i = 0; i < 2 * RATES; i++)
        signal(SIGRTMIN + i, on_signal);
}

void __wrap_os_io_submit(os_io *io, const os_io_req *r, uint32_t n)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < n; i++)
        bytes += r[i].op == OS_IO_READ ? r[i].bytes : 0;
    if (disk_speed > 0 && bytes > 0)
        usleep((useconds_t)(2 * bytes / (uint64_t)disk_speed));
    __real_os_io_submit(io, r, n);
}

kvd_status __wrap_model_embed(const model *m, const model_run *r, const int32_t *token,
                              kvd_err *err)
{
    if (token_us > 0 && r->n_token > 1)
        usleep((useconds_t)token_us * r->n_token);
    return __real_model_embed(m, r, token, err);
}

kvd_status __wrap_kvd_eval(kvd_session *s, const kvd_batch *b, kvd_err *err)
{
    usleep(2000); /* steps of a tiny model are too short for anything to come in between */
    if (fault == SIGUSR2)
        (void)!write(STDERR_FILENO, HANGS, sizeof(HANGS) - 1);
    while (fault == SIGUSR2)
        usleep(10000);
    if (fault == SIGUSR1)
        return kvd_fail(err, KVD_E_DEVICE, 0, "the device has failed, as the test asked for");
    return __real_kvd_eval(s, b, err);
}
