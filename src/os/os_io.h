/* SPDX-License-Identifier: Apache-2.0 */
/* os_io.h - between the queue (os_io.c) and the ways to do I/O.  Private to os/. */
#ifndef KVD_OS_IO_H
#define KVD_OS_IO_H

#include "os/os.h"

#define IO_OPS_VERSION 1u

/* One request in flight; owned by os_io.c, lent to the backend from submit until reap. */
typedef struct io_slot {
    os_io_req       req;  /* as the user gave it */
    uint32_t        done; /* bytes of it that are transferred */
    uint32_t        n_try;
    int64_t         result; /* set by the backend: bytes, or -errno */
    struct io_slot *next;
} io_slot;

typedef struct io_backend io_backend;

typedef struct io_ops {
    uint32_t version;
    /* Takes the rest of each request, [done, bytes).  There is room: never more than depth. */
    void (*submit)(io_backend *b, io_slot *const *slot, uint32_t n);
    /* Finished slots with their result; waits up to timeout_ns for the first. */
    uint32_t (*reap)(io_backend *b, io_slot **slot, uint32_t max, uint64_t timeout_ns);
    void (*close)(io_backend *b);
} io_ops;

struct io_backend {
    const io_ops *ops;
    const char   *name;
    bool          closing; /* only what is in flight matters now */
};

kvd_status os_io_uring_open(io_backend **out, const os_io_params *p, kvd_err *err);
kvd_status os_io_pool_open(io_backend **out, const os_io_params *p, kvd_err *err);
kvd_status os_io_map_open(io_backend **out, kvd_err *err);
kvd_status os_io_sim_open(io_backend **out, const os_io_params *p, kvd_err *err);

/* The transfer itself, on the calling thread: bytes, or -errno. */
int64_t os_io_slot_run(const io_slot *s);

#endif
