/* SPDX-License-Identifier: Apache-2.0 */
/* os_io_sim.c - a disk with faults, for tests: real files, a seeded order of completion, and the
 * faults that os_io_sim asks for.  The same seed and requests give the same run.
 *
 * Requests lie in `held` and run when they are reaped, in random order.  After the crash point
 * writes and syncs answer success and leave the file as it is: what a kill of the machine does to
 * writes that were not yet on the disk.  Thread: the one that opened the queue. */
#include "os/os_io.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define CHANCE_ONE 65536u

typedef struct io_disk {
    io_backend base;
    kvd_rng    rng;
    os_io_sim *sim;
    io_slot  **held; /* [depth] */
    io_slot   *lost; /* list: answered only when the queue closes */
    uint32_t   n_held;
    uint64_t   n_write;
} io_disk;

static bool chance(io_disk *d, uint32_t in_65536)
{
    if (in_65536 == 0 || kvd_rng_below(&d->rng, CHANCE_ONE) >= in_65536)
        return false;
    d->sim->n_fault++;
    return true;
}

static void flip(io_disk *d, void *p, uint64_t bytes)
{
    const uint64_t bit = kvd_rng_below(&d->rng, bytes * 8);

    ((uint8_t *)p)[bit / 8] ^= (uint8_t)(1u << bit % 8);
}

static int64_t run_read(io_disk *d, io_slot *s)
{
    int64_t n;

    if (chance(d, d->sim->read_eio))
        return -EIO;
    if (chance(d, d->sim->read_misdirect) && s->req.off >= OS_PAGE_BYTES) {
        io_slot other = *s;

        other.req.off -= OS_PAGE_BYTES;
        return os_io_slot_run(&other);
    }
    n = os_io_slot_run(s);
    if (n > 0 && chance(d, d->sim->read_short))
        return (int64_t)kvd_rng_below(&d->rng, (uint64_t)n);
    if (n > 0 && chance(d, d->sim->read_flip))
        flip(d, (char *)s->req.buf + s->done, (uint64_t)n);
    return n;
}

static int64_t run_write(io_disk *d, io_slot *s)
{
    const uint32_t left = s->req.bytes - s->done;
    char          *p    = (char *)s->req.buf + s->done;
    uint8_t        keep = 0;
    uint64_t       at;
    int64_t        n;

    d->n_write++;
    if (d->sim->crash_nth && d->n_write >= d->sim->crash_nth) {
        if (d->n_write == d->sim->crash_nth) /* torn: only its first pages arrive */
            (void)pwrite(s->req.fd, p, left / 2 & ~(OS_PAGE_BYTES - 1),
                         (off_t)(s->req.off + s->done));
        return left;
    }
    if (chance(d, d->sim->write_eio))
        return -EIO;
    if (chance(d, d->sim->enospc))
        return -ENOSPC;
    if (!chance(d, d->sim->write_flip))
        return os_io_slot_run(s);
    at   = kvd_rng_below(&d->rng, left);
    keep = (uint8_t)p[at];
    flip(d, p + at, 1);
    n     = os_io_slot_run(s);
    p[at] = (char)keep;
    return n;
}

static int64_t run(io_disk *d, io_slot *s)
{
    d->sim->n_request++;
    if (d->sim->fail_nth && d->sim->n_request == d->sim->fail_nth) {
        d->sim->n_fault++;
        return -EIO;
    }
    if (s->req.op == OS_IO_READ)
        return run_read(d, s);
    if (s->req.op == OS_IO_WRITE)
        return run_write(d, s);
    if (chance(d, d->sim->sync_eio))
        return -EIO;
    return d->sim->crash_nth && d->n_write >= d->sim->crash_nth ? 0 : os_io_slot_run(s);
}

static void disk_submit(io_backend *b, io_slot *const *slot, uint32_t n)
{
    io_disk *d = (io_disk *)b;

    for (uint32_t i = 0; i < n; i++) {
        if (slot[i]->n_try == 0 && chance(d, d->sim->lost)) {
            slot[i]->next = d->lost;
            d->lost       = slot[i];
        } else {
            d->held[d->n_held++] = slot[i];
        }
    }
}

/* How many of what is held may be answered: they lie first then. */
static uint32_t sort_ready(io_disk *d)
{
    uint32_t n = 0;

    if (!d->sim->hold_syncs || d->base.closing)
        return d->n_held;
    for (uint32_t i = 0; i < d->n_held; i++) {
        io_slot *s = d->held[i];

        if (s->req.op == OS_IO_SYNC)
            continue;
        d->held[i]   = d->held[n];
        d->held[n++] = s;
    }
    return n;
}

static uint32_t disk_reap(io_backend *b, io_slot **slot, uint32_t max, uint64_t timeout_ns)
{
    io_disk *d = (io_disk *)b;
    uint32_t n = 0, ready = sort_ready(d);

    while (b->closing && n < max && d->lost) {
        slot[n]           = d->lost;
        slot[n++]->result = -ECANCELED;
        d->lost           = d->lost->next;
    }
    while (n < max && ready > 0) {
        const uint32_t i = (uint32_t)kvd_rng_below(&d->rng, ready);

        if (n > 0 && kvd_rng_below(&d->rng, 4) == 0)
            break;
        if (timeout_ns == 0 && chance(d, d->sim->delay))
            break;
        slot[n]         = d->held[i];
        slot[n]->result = run(d, slot[n]);
        d->held[i]      = d->held[--ready];
        d->held[ready]  = d->held[--d->n_held];
        n++;
    }
    return n;
}

static void disk_close(io_backend *b)
{
    io_disk *d = (io_disk *)b;

    kvd_free(d->held);
    kvd_free(d);
}

static const io_ops disk_ops = { IO_OPS_VERSION, disk_submit, disk_reap, disk_close };

kvd_status os_io_sim_open(io_backend **out, const os_io_params *p, kvd_err *err)
{
    io_disk *d = kvd_calloc(1, sizeof(*d));

    *out = NULL;
    if (d)
        d->held = kvd_calloc(p->depth, sizeof(*d->held));
    if (!d || !d->held || !p->sim) {
        kvd_free(d ? d->held : NULL);
        kvd_free(d);
        return kvd_fail(err, p->sim ? KVD_E_NOMEM : KVD_E_INVAL, 0, "simulated disk: no %s",
                        p->sim ? "memory" : "faults given");
    }
    d->base = (io_backend){ .ops = &disk_ops, .name = "simulated" };
    d->sim  = p->sim;
    kvd_rng_seed(&d->rng, p->sim->seed);
    *out = &d->base;
    return KVD_OK;
}
