/* SPDX-License-Identifier: Apache-2.0 */
/* os_facts.c - limits and devices that decide how well the engine can work here; for people. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "os/os.h"

uint64_t os_limit_memlock(void)
{
    struct rlimit r;

    return getrlimit(RLIMIT_MEMLOCK, &r) == 0 && r.rlim_cur != RLIM_INFINITY ? r.rlim_cur
                                                                             : UINT64_MAX;
}

uint64_t os_limit_files(void)
{
    struct rlimit r;

    return getrlimit(RLIMIT_NOFILE, &r) == 0 && r.rlim_cur != RLIM_INFINITY ? r.rlim_cur
                                                                            : UINT64_MAX;
}

/* The kernel marks the mode in force with brackets: "always [madvise] never". */
const char *os_huge_pages(char *out, size_t cap)
{
    char  line[128] = "";
    FILE *f         = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");
    char *open, *close;

    if (f) {
        if (!fgets(line, sizeof(line), f))
            line[0] = 0;
        fclose(f);
    }
    open  = strchr(line, '[');
    close = open ? strchr(open, ']') : NULL;
    if (close)
        snprintf(out, cap, "%.*s", (int)(close - open - 1), open + 1);
    else
        snprintf(out, cap, "unknown");
    return out;
}

bool os_direct_io(const char *dir)
{
    char  path[4096];
    void *page = NULL;
    bool  ok   = false;
    int   fd;

    if (snprintf(path, sizeof(path), "%s/.kvdrive-probe-XXXXXX", dir) >= (int)sizeof(path))
        return false;
    fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return false;
    close(fd);
    fd = open(path, O_RDWR | O_DIRECT | O_CLOEXEC | O_NOFOLLOW);
    unlink(path);
    if (fd < 0)
        return false;
    page = kvd_pages_alloc(4096); /* page-aligned, as O_DIRECT wants it */
    if (page)
        ok = write(fd, page, 4096) == 4096 && pread(fd, page, 4096, 0) == 4096;
    kvd_pages_free(page, 4096);
    close(fd);
    return ok;
}

bool os_has_nvidia(void)
{
    return access("/dev/nvidiactl", F_OK) == 0;
}
