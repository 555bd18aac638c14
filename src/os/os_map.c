/* SPDX-License-Identifier: Apache-2.0 */
/* os_map.c - files mapped read-only.
 *
 * Owns: the mapping; the descriptor is closed as soon as the mapping stands.
 * Any thread; one os_map belongs to one thread at a time until it is only read. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/os.h"

static kvd_status map_fd(os_map *out, int fd, const char *path, kvd_err *err)
{
    struct stat st;
    void       *p;

    if (fstat(fd, &st) != 0)
        return kvd_fail(err, KVD_E_IO, errno, "%s: stat", path);
    if (S_ISDIR(st.st_mode))
        return kvd_fail(err, KVD_E_IO, EISDIR, "%s", path);
    if (!S_ISREG(st.st_mode))
        return kvd_fail(err, KVD_E_IO, 0, "%s: not a regular file", path);
    if (st.st_size == 0)
        return KVD_OK; /* nothing to map */
    p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return kvd_fail(err, KVD_E_IO, errno, "%s: map %" PRIu64 " bytes", path,
                        (uint64_t)st.st_size);
    *out = (os_map){ p, (uint64_t)st.st_size };
    return KVD_OK;
}

kvd_status os_map_open(os_map *out, const char *path, kvd_err *err)
{
    kvd_status st;
    int        fd;

    *out = (os_map){ 0 };
    /* NONBLOCK: a FIFO without a writer must be an error here, not a hang. */
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return kvd_fail(err, KVD_E_IO, errno, "%s", path);
    st = map_fd(out, fd, path, err);
    close(fd);
    return st;
}

void os_map_close(os_map *m)
{
    if (m->data)
        munmap((void *)(uintptr_t)m->data, (size_t)m->bytes);
    *m = (os_map){ 0 };
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
