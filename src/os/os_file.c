/* SPDX-License-Identifier: Apache-2.0 */
/* os_file.c - files that are written and directories, each call with its error in words.
 * Owns nothing.  Any thread. */
#define _GNU_SOURCE
#include "os/os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define PATH_BYTES 4096

static kvd_status fail_errno(kvd_err *err, const char *what, const char *path)
{
    return kvd_fail(err, KVD_E_IO, errno, "%s: %s", path, what);
}

kvd_status os_file_open(int *fd, const char *path, uint32_t flags, kvd_err *err)
{
    int mode = flags & OS_OPEN_WRITE ? O_RDWR : O_RDONLY;

    if ((flags & OS_OPEN_CREATE) == OS_OPEN_CREATE)
        mode |= O_CREAT;
    if (flags & OS_OPEN_DIRECT)
        mode |= O_DIRECT;
    *fd = open(path, mode | O_CLOEXEC, 0600);
    return *fd < 0 ? fail_errno(err, "cannot be opened", path) : KVD_OK;
}

void os_file_close(int fd)
{
    if (fd >= 0)
        (void)close(fd);
}

kvd_status os_file_size(int fd, uint64_t *bytes)
{
    struct stat st;

    *bytes = 0;
    if (fstat(fd, &st) != 0)
        return KVD_E_IO;
    *bytes = (uint64_t)st.st_size;
    return KVD_OK;
}

kvd_status os_file_reserve(int fd, uint64_t off, uint64_t bytes, const char *path, kvd_err *err)
{
    int r;

    do
        r = fallocate(fd, 0, (off_t)off, (off_t)bytes);
    while (r != 0 && errno == EINTR);
    if (r == 0 || errno == EOPNOTSUPP || errno == ENOSYS)
        return KVD_OK;
    return fail_errno(err, "no room", path);
}

void os_file_punch(int fd, uint64_t off, uint64_t bytes)
{
    (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)off, (off_t)bytes);
}

void os_file_remove(const char *path)
{
    (void)unlink(path);
}

kvd_status os_file_rename(const char *from, const char *to, kvd_err *err)
{
    return rename(from, to) != 0 ? fail_errno(err, "cannot be renamed", from) : KVD_OK;
}

static bool write_all(int fd, const char *p, size_t bytes)
{
    while (bytes > 0) {
        const ssize_t n = write(fd, p, bytes);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        p += n;
        bytes -= (size_t)n;
    }
    return fsync(fd) == 0;
}

kvd_status os_file_replace(const char *path, const void *data, size_t bytes, kvd_err *err)
{
    char        tmp[PATH_BYTES], dir[PATH_BYTES];
    const char *slash = strrchr(path, '/');
    kvd_status  st    = KVD_OK;
    int         fd;

    if (snprintf(tmp, sizeof(tmp), "%s.XXXXXX", path) >= PATH_BYTES)
        return kvd_fail(err, KVD_E_INVAL, 0, "path too long: %.64s", path);
    snprintf(dir, sizeof(dir), "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : ".");
    fd = mkostemp(tmp, O_CLOEXEC);
    if (fd < 0)
        return fail_errno(err, "cannot be created", path);
    if (!write_all(fd, data, bytes))
        st = fail_errno(err, "cannot be written", path);
    os_file_close(fd);
    if (st == KVD_OK)
        st = os_file_rename(tmp, path, err);
    if (st != KVD_OK) {
        os_file_remove(tmp);
        return st;
    }
    return os_dir_sync(dir, err);
}

kvd_status os_dir_make(const char *path, kvd_err *err)
{
    char part[PATH_BYTES];

    if (snprintf(part, sizeof(part), "%s", path) >= PATH_BYTES)
        return kvd_fail(err, KVD_E_INVAL, 0, "path too long: %.64s", path);
    for (char *p = part; *p; p++) {
        if (*p != '/' || p == part)
            continue;
        *p = 0;
        if (mkdir(part, 0700) != 0 && errno != EEXIST)
            return fail_errno(err, "directory cannot be made", part);
        *p = '/';
    }
    if (mkdir(part, 0700) != 0 && errno != EEXIST)
        return fail_errno(err, "directory cannot be made", part);
    return KVD_OK;
}

kvd_status os_dir_sync(const char *path, kvd_err *err)
{
    const int  fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    kvd_status st = KVD_OK;

    if (fd < 0)
        return fail_errno(err, "cannot be opened", path);
    if (fsync(fd) != 0 && errno != EINVAL) /* EINVAL: a filesystem without such a thing */
        st = fail_errno(err, "cannot be synced", path);
    os_file_close(fd);
    return st;
}

uint64_t os_dir_free(const char *path)
{
    struct statvfs st;

    return statvfs(path, &st) == 0 ? (uint64_t)st.f_bavail * st.f_frsize : UINT64_MAX;
}

kvd_status os_dir_list(const char *path, void (*fn)(void *ctx, const char *name), void *ctx,
                       kvd_err *err)
{
    DIR           *dir = opendir(path);
    struct dirent *e;

    if (!dir)
        return fail_errno(err, "cannot be listed", path);
    while ((e = readdir(dir)) != NULL) {
        struct stat st;

        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode))
            fn(ctx, e->d_name);
    }
    closedir(dir);
    return KVD_OK;
}

kvd_status os_lock_open(int *fd, const char *path, kvd_err *err)
{
    char    pid[32] = "";
    ssize_t n;

    KVD_TRY(os_file_open(fd, path, OS_OPEN_CREATE, err));
    if (flock(*fd, LOCK_EX | LOCK_NB) == 0) {
        const int len = snprintf(pid, sizeof(pid), "%ld\n", (long)getpid());

        if (ftruncate(*fd, 0) != 0 || pwrite(*fd, pid, (size_t)len, 0) != len)
            (void)ftruncate(*fd, 0); /* the number is for the message only */
        return KVD_OK;
    }
    if (errno != EWOULDBLOCK) {
        kvd_status st = fail_errno(err, "cannot be locked", path);

        os_file_close(*fd);
        *fd = -1;
        return st;
    }
    n                       = pread(*fd, pid, sizeof(pid) - 1, 0);
    pid[n > 0 ? n : 0]      = 0;
    pid[strcspn(pid, "\n")] = 0;
    os_file_close(*fd);
    *fd = -1;
    return kvd_fail(err, KVD_E_BUSY, 0, "%s: in use by another process%s%s", path,
                    pid[0] ? ", " : "", pid);
}

bool os_random(void *p, size_t bytes)
{
    return getrandom(p, bytes, 0) == (ssize_t)bytes;
}
