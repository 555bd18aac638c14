/* SPDX-License-Identifier: Apache-2.0 */
/* os_io.c - the queue of file requests in front of io_uring, the thread pool or the simulation.
 *
 * Owns: depth slots.  A slot is free, or with the backend; it returns to the user once, after its
 * last part was transferred, so that short transfers are nobody else's concern.
 * Thread: the one that opened the queue. */
#include "os/os_io.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define DEPTH_DEFAULT 64u
#define DEPTH_MAX     4096u
#define TRY_MAX       64u          /* continuations of one request */
#define CLOSE_WAIT_NS 30000000000u /* for requests in flight at close */
#define REAP_BATCH    64u

struct os_io {
    io_backend *backend;
    io_slot    *slot; /* [depth] */
    io_slot    *free;
    uint32_t    depth, n_flight;
};

int64_t os_io_slot_run(const io_slot *s)
{
    const off_t  off  = (off_t)(s->req.off + s->done);
    const size_t left = s->req.bytes - s->done;
    ssize_t      n;

    if (s->req.op == OS_IO_SYNC)
        n = fdatasync(s->req.fd);
    else if (s->req.op == OS_IO_READ)
        n = pread(s->req.fd, (char *)s->req.buf + s->done, left, off);
    else
        n = pwrite(s->req.fd, (const char *)s->req.buf + s->done, left, off);
    return n < 0 ? -errno : n;
}

static kvd_status open_backend(os_io *io, const os_io_params *p, kvd_err *err)
{
    kvd_status st;

    switch (p->kind) {
    case OS_IO_SIM:
        return os_io_sim_open(&io->backend, p, err);
    case OS_IO_MAP:
        return os_io_map_open(&io->backend, err);
    case OS_IO_URING:
        return os_io_uring_open(&io->backend, p, err);
    case OS_IO_AUTO:
        st = os_io_uring_open(&io->backend, p, err);
        if (st != KVD_E_UNSUPPORTED)
            return st;
        return os_io_pool_open(&io->backend, p, err);
    case OS_IO_POOL:
    default:
        return os_io_pool_open(&io->backend, p, err);
    }
}

kvd_status os_io_open(os_io **out, const os_io_params *p, kvd_err *err)
{
    os_io_params q  = *p;
    os_io       *io = kvd_calloc(1, sizeof(*io));
    kvd_status   st;

    *out = NULL;
    if (!io)
        return kvd_fail(err, KVD_E_NOMEM, 0, "I/O queue: no memory");
    q.depth   = p->depth ? (uint32_t)kvd_min_u64(p->depth, DEPTH_MAX) : DEPTH_DEFAULT;
    io->depth = q.depth;
    io->slot  = kvd_calloc(q.depth, sizeof(*io->slot));
    st        = io->slot ? open_backend(io, &q, err)
                         : kvd_fail(err, KVD_E_NOMEM, 0, "I/O queue: no memory for its slots");
    if (st != KVD_OK) {
        os_io_close(io);
        return st;
    }
    kvd_assert(io->backend->ops->version == IO_OPS_VERSION);
    for (uint32_t i = 0; i < io->depth; i++) {
        io->slot[i].next = io->free;
        io->free         = &io->slot[i];
    }
    *out = io;
    return KVD_OK;
}

const char *os_io_name(const os_io *io)
{
    return io->backend->name;
}

uint32_t os_io_room(const os_io *io)
{
    return io->depth - io->n_flight;
}

void os_io_submit(os_io *io, const os_io_req *req, uint32_t n)
{
    io_slot *batch[REAP_BATCH];
    uint32_t n_batch = 0;

    kvd_assert(n <= os_io_room(io));
    for (uint32_t i = 0; i < n; i++) {
        io_slot *s = io->free;

        io->free = s->next;
        io->n_flight++;
        s->req           = req[i];
        s->done          = 0;
        s->n_try         = 0;
        batch[n_batch++] = s;
        if (n_batch == REAP_BATCH || i + 1 == n) {
            io->backend->ops->submit(io->backend, batch, n_batch);
            n_batch = 0;
        }
    }
}

/* Whether the request has to go on; else *done tells how it ended. */
static bool slot_goes_on(io_slot *s, os_io_done *done)
{
    const bool again = s->result == -EINTR || s->result == -EAGAIN;
    const bool part =
        s->result > 0 && s->req.op != OS_IO_SYNC && s->done + (uint64_t)s->result < s->req.bytes;

    if (s->result > 0)
        s->done += (uint32_t)s->result;
    if ((again || part) && ++s->n_try < TRY_MAX)
        return true;
    done->user  = s->req.user;
    done->bytes = s->done;
    done->error = s->result < 0 ? (int)-s->result : 0;
    if (s->req.op == OS_IO_WRITE && !done->error && s->done < s->req.bytes)
        done->error = EIO; /* a write that gets nowhere */
    return false;
}

uint32_t os_io_reap(os_io *io, os_io_done *done, uint32_t max, uint64_t timeout_ns)
{
    const uint64_t start = kvd_now_ns();
    uint64_t       left  = timeout_ns;
    uint32_t       n     = 0;

    while (n == 0 && max > 0 && io->n_flight > 0) {
        io_slot       *slot[REAP_BATCH];
        const uint32_t want  = (uint32_t)kvd_min_u64(max, REAP_BATCH);
        const uint32_t n_got = io->backend->ops->reap(io->backend, slot, want, left);
        uint64_t       spent;

        for (uint32_t i = 0; i < n_got; i++) {
            if (slot_goes_on(slot[i], &done[n])) {
                io->backend->ops->submit(io->backend, &slot[i], 1);
                continue;
            }
            n++;
            slot[i]->next = io->free;
            io->free      = slot[i];
            io->n_flight--;
        }
        spent = kvd_now_ns() - start;
        if (spent >= timeout_ns)
            break;
        left = timeout_ns - spent;
    }
    return n;
}

bool os_io_close(os_io *io)
{
    const uint64_t end = kvd_ran_ns() + CLOSE_WAIT_NS;
    bool           idle;

    if (!io)
        return true;
    if (io->backend)
        io->backend->closing = true;
    while (io->backend && io->n_flight > 0 && kvd_ran_ns() < end) {
        os_io_done done[REAP_BATCH];

        (void)os_io_reap(io, done, REAP_BATCH, KVD_RAN_WAIT_NS);
    }
    idle = io->n_flight == 0;
    if (io->backend)
        io->backend->ops->close(io->backend);
    kvd_free(io->slot);
    kvd_free(io);
    return idle;
}
