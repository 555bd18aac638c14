/* SPDX-License-Identifier: Apache-2.0 */
/* os_io_map.c - reads by copying out of read-only mappings: for comparison with real requests
 * only.  Every miss of the page cache is a fault that stops the caller, and a file that is cut
 * short while it is mapped kills the process (SIGBUS).  Writes go through pwrite.
 *
 * Owns: a table of mappings, each of a whole file, known by device and inode.  Requests run when
 * they are reaped.  Thread: the one that opened the queue. */
#include "os/os_io.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define MAP_MAX 64u

typedef struct file_map {
    dev_t    dev;
    ino_t    ino;
    uint8_t *data; /* NULL: free */
    uint64_t bytes;
} file_map;

typedef struct io_map {
    io_backend base;
    file_map   map[MAP_MAX];
    uint32_t   next; /* the one to give up for another */
    io_slot   *first, *last;
} io_map;

static void map_drop(file_map *m)
{
    if (m->data)
        (void)munmap(m->data, m->bytes);
    memset(m, 0, sizeof(*m));
}

/* The file's mapping, at least end bytes long if the file is. */
static const file_map *map_of(io_map *io, int fd, uint64_t end)
{
    struct stat st;
    file_map   *m = NULL;
    void       *p;

    if (fstat(fd, &st) != 0)
        return NULL;
    for (uint32_t i = 0; i < MAP_MAX && !m; i++)
        if (io->map[i].data && io->map[i].dev == st.st_dev && io->map[i].ino == st.st_ino)
            m = &io->map[i];
    if (m && (end <= m->bytes || m->bytes == (uint64_t)st.st_size))
        return m;
    if (!m)
        m = &io->map[io->next++ % MAP_MAX];
    map_drop(m);
    p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return NULL;
    (void)madvise(p, (size_t)st.st_size, MADV_RANDOM); /* as rivals read: no read-ahead */
    *m = (file_map){ st.st_dev, st.st_ino, p, (uint64_t)st.st_size };
    return m;
}

static int64_t read_mapped(io_map *io, const io_slot *s)
{
    const uint64_t  off = s->req.off + s->done;
    const uint64_t  n   = s->req.bytes - s->done;
    const file_map *m   = map_of(io, s->req.fd, off + n);
    uint64_t        have;

    if (!m)
        return os_io_slot_run(s); /* an empty file, or no file: let the system say */
    have = off < m->bytes ? kvd_min_u64(n, m->bytes - off) : 0;
    memcpy((uint8_t *)s->req.buf + s->done, m->data + (have ? off : 0), (size_t)have);
    return (int64_t)have;
}

static void map_submit(io_backend *b, io_slot *const *slot, uint32_t n)
{
    io_map *io = (io_map *)b;

    for (uint32_t i = 0; i < n; i++) {
        slot[i]->next = NULL;
        if (io->last)
            io->last->next = slot[i];
        else
            io->first = slot[i];
        io->last = slot[i];
    }
}

static uint32_t map_reap(io_backend *b, io_slot **slot, uint32_t max, uint64_t timeout_ns)
{
    io_map  *io = (io_map *)b;
    uint32_t n  = 0;

    (void)timeout_ns;
    for (; n < max && io->first; n++) {
        io_slot *s = io->first;

        io->first = s->next;
        if (!io->first)
            io->last = NULL;
        s->result = s->req.op == OS_IO_READ ? read_mapped(io, s) : os_io_slot_run(s);
        slot[n]   = s;
    }
    return n;
}

static void map_close(io_backend *b)
{
    io_map *io = (io_map *)b;

    for (uint32_t i = 0; i < MAP_MAX; i++)
        map_drop(&io->map[i]);
    kvd_free(io);
}

static const io_ops map_ops = { IO_OPS_VERSION, map_submit, map_reap, map_close };

kvd_status os_io_map_open(io_backend **out, kvd_err *err)
{
    io_map *io = kvd_calloc(1, sizeof(*io));

    *out = NULL;
    if (!io)
        return kvd_fail(err, KVD_E_NOMEM, 0, "I/O by mappings: no memory");
    io->base = (io_backend){ .ops = &map_ops, .name = "memmap" };
    *out     = &io->base;
    return KVD_OK;
}
