/* SPDX-License-Identifier: Apache-2.0 */
/* os_map.c - files mapped read-only.
 *
 * A mapping lies at a multiple of a huge page and takes whole huge pages of address space, so that
 * os_map_copy() can put huge pages in its place.
 *
 * Owns: the mapping; the descriptor is closed as soon as the mapping stands.
 * Any thread; one os_map belongs to one thread at a time until it is only read. */
#define _GNU_SOURCE /* mremap */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/os.h"

#define HUGE_PAGE  (2u << 20)
#define COPY_BYTES (16u << 20) /* copied at a time: all that is resident twice */

/* Address space of at least this many bytes at a multiple of a huge page, for MAP_FIXED; what is
 * left around it is given back.  NULL: there is none. */
static void *reserve(uint64_t bytes)
{
    const uint64_t len = kvd_align_up(bytes, HUGE_PAGE);
    uint8_t       *p   = mmap(NULL, (size_t)(len + HUGE_PAGE), PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    uint8_t       *at;

    if (p == MAP_FAILED)
        return NULL;
    at = (uint8_t *)(uintptr_t)kvd_align_up((uintptr_t)p, HUGE_PAGE);
    if (at > p)
        munmap(p, (size_t)(at - p));
    munmap(at + len, (size_t)(p + HUGE_PAGE - at));
    return at;
}

static kvd_status map_fd(os_map *out, int fd, const char *path, kvd_err *err)
{
    struct stat st;
    char        name[KVD_SHORT_PATH_BYTES];
    void       *p;

    if (fstat(fd, &st) != 0)
        return kvd_fail(err, KVD_E_IO, errno, "%s: stat", kvd_short_path(path, name));
    if (S_ISDIR(st.st_mode))
        return kvd_fail(err, KVD_E_IO, EISDIR, "%s", kvd_short_path(path, name));
    if (!S_ISREG(st.st_mode))
        return kvd_fail(err, KVD_E_IO, 0, "%s: not a regular file", kvd_short_path(path, name));
    if (st.st_size == 0)
        return KVD_OK; /* nothing to map */
    p = reserve((uint64_t)st.st_size);
    if (p)
        p = mmap(p, (size_t)st.st_size, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
    if (!p || p == MAP_FAILED)
        return kvd_fail(err, KVD_E_IO, errno, "%s: map %" PRIu64 " bytes",
                        kvd_short_path(path, name), (uint64_t)st.st_size);
    *out = (os_map){ p, (uint64_t)st.st_size };
    return KVD_OK;
}

kvd_status os_map_open(os_map *out, const char *path, kvd_err *err)
{
    char       name[KVD_SHORT_PATH_BYTES];
    kvd_status st;
    int        fd;

    *out = (os_map){ 0 };
    /* NONBLOCK: a FIFO without a writer must be an error here, not a hang. */
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return kvd_fail(err, KVD_E_IO, errno, "%s", kvd_short_path(path, name));
    st = map_fd(out, fd, path, err);
    close(fd);
    return st;
}

void os_map_close(os_map *m)
{
    if (m->data)
        munmap((void *)(uintptr_t)m->data, (size_t)kvd_align_up(m->bytes, HUGE_PAGE));
    *m = (os_map){ 0 };
}

bool os_map_copy(os_map *m)
{
    const uint64_t len  = kvd_align_up(m->bytes, HUGE_PAGE);
    uint8_t       *file = (uint8_t *)(uintptr_t)m->data;
    uint8_t       *copy = m->data ? reserve(m->bytes) : NULL;

    if (!copy)
        return false;
    if (mprotect(copy, (size_t)len, PROT_READ | PROT_WRITE) != 0)
        goto fail;
    (void)madvise(copy, (size_t)len, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
    if (madvise(copy, (size_t)len, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
        goto fail; /* no memory: the mapping stays what it is */
#endif
    for (uint64_t off = 0; off < m->bytes; off += COPY_BYTES) {
        const size_t n = (size_t)kvd_min_u64(COPY_BYTES, m->bytes - off);

        memcpy(copy + off, file + off, n);
        (void)madvise(file + off, n, MADV_DONTNEED);
    }
    if (mprotect(copy, (size_t)len, PROT_READ) != 0 ||
        mremap(copy, (size_t)len, (size_t)len, MREMAP_MAYMOVE | MREMAP_FIXED, file) == MAP_FAILED)
        goto fail;
    return true;
fail:
    munmap(copy, (size_t)len);
    return false;
}

void os_map_will_need(const os_map *m)
{
    if (m->data)
        (void)madvise((void *)(uintptr_t)m->data, (size_t)m->bytes, MADV_WILLNEED);
}

uint64_t os_map_resident(const os_map *m)
{
    unsigned char  vec[4096];
    const uint64_t page     = (uint64_t)sysconf(_SC_PAGESIZE);
    const uint64_t step     = page * sizeof(vec);
    uint64_t       resident = 0;

    for (uint64_t off = 0; m->data && off < m->bytes; off += step) {
        const uint64_t len = kvd_min_u64(step, m->bytes - off);

        if (mincore((void *)(uintptr_t)(m->data + off), (size_t)len, vec) != 0)
            return 0;
        for (uint64_t i = 0; i < kvd_div_up(len, page); i++)
            resident += vec[i] & 1 ? kvd_min_u64(page, len - i * page) : 0;
    }
    return resident;
}
