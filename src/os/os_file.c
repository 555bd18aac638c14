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

#define PATH_BYTES OS_PATH_BYTES
#define ALL_MODES  07777u

static kvd_status fail_errno(kvd_err *err, const char *what, const char *path)
{
    return kvd_fail(err, KVD_E_IO, errno, "%s: %s", path, what);
}

static int open_mode(uint32_t flags)
{
    int mode = flags & OS_OPEN_WRITE ? O_RDWR : O_RDONLY;

    if ((flags & OS_OPEN_CREATE) == OS_OPEN_CREATE)
        mode |= O_CREAT;
    if (flags & OS_OPEN_DIRECT)
        mode |= O_DIRECT;
    return mode | O_CLOEXEC;
}

kvd_status os_file_open(int *fd, const char *path, uint32_t flags, kvd_err *err)
{
    *fd = open(path, open_mode(flags), 0600);
    return *fd < 0 ? fail_errno(err, "cannot be opened", path) : KVD_OK;
}

static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

/* What was opened by its name is what it should be: a file of ours, and ours alone. */
static kvd_status check_file(int fd, const char *path, kvd_err *err)
{
    struct stat st;

    if (fstat(fd, &st) != 0)
        return fail_errno(err, "cannot be looked at", path);
    if (!S_ISREG(st.st_mode))
        return kvd_fail(err, KVD_E_IO, EINVAL, "%s: is no regular file, and refused", path);
    if (st.st_uid != geteuid())
        return kvd_fail(err, KVD_E_IO, EPERM, "%s: belongs to another user, and is refused", path);
    if ((st.st_mode & ALL_MODES) != 0600 && fchmod(fd, 0600) != 0)
        return fail_errno(err, "cannot be kept from others", path);
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) != 0) /* io_uring would not wait */
        return fail_errno(err, "cannot be set up", path);
    return KVD_OK;
}

kvd_status os_file_open_in(int *fd, int dir, const char *path, uint32_t flags, kvd_err *err)
{
    const int mode =
        open_mode(flags) | O_NOFOLLOW | O_NONBLOCK; /* of a pipe nothing is waited for */
    kvd_status st;

    *fd = openat(dir, name_of(path), mode, 0600);
    if (*fd < 0 && errno == ELOOP)
        return kvd_fail(err, KVD_E_IO, ELOOP, "%s: is a symbolic link, and refused", path);
    if (*fd < 0)
        return fail_errno(err, "cannot be opened", path);
    st = check_file(*fd, path, err);
    if (st == KVD_OK)
        return KVD_OK;
    os_file_close(*fd);
    *fd = -1;
    return st;
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

void os_file_remove_in(int dir, const char *path)
{
    (void)unlinkat(dir, name_of(path), 0);
}

kvd_status os_file_rename_in(int dir, const char *from, const char *to, kvd_err *err)
{
    return renameat(dir, name_of(from), dir, name_of(to)) != 0
               ? fail_errno(err, "cannot be renamed", from)
               : KVD_OK;
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

/* false: errno says why; what is there already is left as it is. */
static bool make_one(const char *path)
{
    if (mkdir(path, 0700) != 0)
        return errno == EEXIST;
    return chmod(path, 0700) == 0; /* a umask may have taken bits of it */
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
        if (!make_one(part))
            return fail_errno(err, "directory cannot be made", part);
        *p = '/';
    }
    if (!make_one(part))
        return fail_errno(err, "directory cannot be made", part);
    return KVD_OK;
}

static kvd_status check_dir(int fd, const char *path, kvd_err *err)
{
    struct stat st;

    if (fstat(fd, &st) != 0)
        return fail_errno(err, "cannot be looked at", path);
    if (st.st_uid != geteuid())
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s: belongs to user %u, this process runs as user %u: what others may "
                        "change is not used",
                        path, (unsigned)st.st_uid, (unsigned)geteuid());
    if (st.st_mode & (S_IWGRP | S_IWOTH))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s: others may write to it (mode %04o): what others may change is not "
                        "used; chmod go-w makes it yours alone",
                        path, (unsigned)(st.st_mode & ALL_MODES));
    return KVD_OK;
}

kvd_status os_dir_open(int *fd, const char *path, kvd_err *err)
{
    kvd_status st = os_dir_make(path, err);

    *fd = -1;
    if (st != KVD_OK)
        return st;
    *fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0)
        return fail_errno(err, "cannot be opened", path);
    st = check_dir(*fd, path, err);
    if (st != KVD_OK) {
        os_file_close(*fd);
        *fd = -1;
    }
    return st;
}

kvd_status os_dir_real(int fd, const char *path, char out[OS_PATH_BYTES], kvd_err *err)
{
    struct stat a, b;

    if (!realpath(path, out))
        return fail_errno(err, "cannot be resolved", path);
    if (stat(out, &a) != 0 || fstat(fd, &b) != 0 || a.st_dev != b.st_dev || a.st_ino != b.st_ino)
        return kvd_fail(err, KVD_E_IO, 0, "%s: is another directory now", path);
    return KVD_OK;
}

bool os_dir_is(int fd, const char *path)
{
    struct stat a, b;

    return stat(path, &a) == 0 && fstat(fd, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

bool os_file_is_named(int fd)
{
    struct stat st;

    return fstat(fd, &st) != 0 || st.st_nlink > 0;
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

        if (fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(st.st_mode))
            fn(ctx, e->d_name);
    }
    closedir(dir);
    return KVD_OK;
}

kvd_status os_lock_open(int *fd, int dir, const char *path, kvd_err *err)
{
    char    pid[32] = "";
    ssize_t n;

    KVD_TRY(os_file_open_in(fd, dir, path, OS_OPEN_CREATE, err));
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
