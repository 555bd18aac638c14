/* SPDX-License-Identifier: Apache-2.0 */
/* fault.c - linked into kvdrive_fault: a device that goes wrong.  SIGUSR1: the next evaluation
 * fails for good, or one that hangs; SIGUSR2: the next one hangs; SIGWINCH: an allocation fails,
 * the first, and with each further signal one later.  The linker puts this in kvd_eval()'s place.
 */
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/base.h"

static atomic_int fault;

kvd_status __real_kvd_eval(kvd_session *s, const kvd_batch *b, kvd_err *err);
kvd_status __wrap_kvd_eval(kvd_session *s, const kvd_batch *b, kvd_err *err);

static void on_signal(int sig)
{
    static int64_t n;

    if (sig == SIGWINCH)
        kvd_alloc_fault(n++, false);
    else
        fault = sig;
}

__attribute__((constructor)) static void arm(void)
{
    signal(SIGUSR1, on_signal);
    signal(SIGUSR2, on_signal);
    signal(SIGWINCH, on_signal);
}

kvd_status __wrap_kvd_eval(kvd_session *s, const kvd_batch *b, kvd_err *err)
{
    usleep(2000); /* steps of a tiny model are too short for anything to come in between */
    while (fault == SIGUSR2)
        usleep(10000);
    if (fault == SIGUSR1)
        return kvd_fail(err, KVD_E_DEVICE, 0, "the device has failed, as the test asked for");
    return __real_kvd_eval(s, b, err);
}
