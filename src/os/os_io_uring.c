/* SPDX-License-Identifier: Apache-2.0 */
/* os_io_uring.c - file requests through io_uring.
 *
 * The ring holds depth entries and os_io.c never has more in flight, so an entry is always there
 * and completions cannot overflow.  A slot's address travels as user data.
 * Thread: the one that opened the queue. */
#include "os/os_io.h"

#include <errno.h>
#include <liburing.h>
#include <string.h>
#include <sys/uio.h>

typedef struct uring {
    io_backend      base;
    struct io_uring ring;
    const char     *buf; /* registered, or NULL */
    uint64_t        buf_bytes;
} uring;

static void prepare(const uring *u, struct io_uring_sqe *e, io_slot *s)
{
    const unsigned left = s->req.bytes - s->done;
    const uint64_t off  = s->req.off + s->done;

    if (s->req.op == OS_IO_SYNC) {
        io_uring_prep_fsync(e, s->req.fd, IORING_FSYNC_DATASYNC);
    } else {
        char      *p     = (char *)s->req.buf + s->done;
        const bool fixed = u->buf && p >= u->buf && p + left <= u->buf + u->buf_bytes;

        if (s->req.op == OS_IO_READ && fixed)
            io_uring_prep_read_fixed(e, s->req.fd, p, left, off, 0);
        else if (s->req.op == OS_IO_READ)
            io_uring_prep_read(e, s->req.fd, p, left, off);
        else if (fixed)
            io_uring_prep_write_fixed(e, s->req.fd, p, left, off, 0);
        else
            io_uring_prep_write(e, s->req.fd, p, left, off);
    }
    io_uring_sqe_set_data(e, s);
}

static void uring_submit(io_backend *b, io_slot *const *slot, uint32_t n)
{
    uring *u = (uring *)b;

    for (uint32_t i = 0; i < n; i++) {
        struct io_uring_sqe *e = io_uring_get_sqe(&u->ring);

        if (!e) { /* entries that the kernel has not taken yet fill the ring: let it take them */
            (void)io_uring_submit(&u->ring);
            e = io_uring_get_sqe(&u->ring);
        }
        kvd_assert(e != NULL);
        prepare(u, e, slot[i]);
    }
    /* What the kernel does not take now stays in the ring; uring_reap() submits again. */
    (void)io_uring_submit(&u->ring);
}

static uint32_t uring_reap(io_backend *b, io_slot **slot, uint32_t max, uint64_t timeout_ns)
{
    uring                   *u  = (uring *)b;
    struct __kernel_timespec ts = { .tv_sec  = (int64_t)(timeout_ns / 1000000000u),
                                    .tv_nsec = (long long)(timeout_ns % 1000000000u) };
    struct io_uring_cqe     *cqe;
    uint32_t                 n = 0;

    if (io_uring_sq_ready(&u->ring) > 0)
        (void)io_uring_submit(&u->ring);
    if (io_uring_peek_cqe(&u->ring, &cqe) != 0 &&
        (timeout_ns == 0 || io_uring_wait_cqe_timeout(&u->ring, &cqe, &ts) != 0))
        return 0;
    while (n < max && io_uring_peek_cqe(&u->ring, &cqe) == 0) {
        io_slot *s = io_uring_cqe_get_data(cqe);

        s->result = cqe->res;
        slot[n++] = s;
        io_uring_cqe_seen(&u->ring, cqe);
    }
    return n;
}

static void uring_close(io_backend *b)
{
    uring *u = (uring *)b;

    io_uring_queue_exit(&u->ring);
    kvd_free(u);
}

static const io_ops uring_ops = { IO_OPS_VERSION, uring_submit, uring_reap, uring_close };

kvd_status os_io_uring_open(io_backend **out, const os_io_params *p, kvd_err *err)
{
    const struct iovec     iov  = { p->buf, (size_t)p->buf_bytes };
    struct io_uring_params ring = { 0 };
    uring                 *u    = kvd_calloc(1, sizeof(*u));
    int                    r;

    *out = NULL;
    if (!u)
        return kvd_fail(err, KVD_E_NOMEM, 0, "io_uring: no memory");
    r = io_uring_queue_init_params(p->depth, &u->ring, &ring);
    /* EXT_ARG: waiting with a time limit costs no entry of the ring. */
    if (r == 0 && !(ring.features & IORING_FEAT_EXT_ARG)) {
        io_uring_queue_exit(&u->ring);
        r = -ENOSYS;
    }
    if (r < 0) { /* also ENOMEM, which may mean the limit on locked memory */
        kvd_free(u);
        return kvd_fail(err, KVD_E_UNSUPPORTED, -r, "io_uring: refused by the system");
    }
    u->base = (io_backend){ .ops = &uring_ops, .name = "io_uring" };
    /* Pinning saves the kernel work per request; a limit on locked memory may forbid it. */
    if (p->buf && io_uring_register_buffers(&u->ring, &iov, 1) == 0) {
        u->buf       = p->buf;
        u->buf_bytes = p->buf_bytes;
        u->base.name = "io_uring, registered buffers";
    }
    *out = &u->base;
    return KVD_OK;
}
