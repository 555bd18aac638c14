/* SPDX-License-Identifier: Apache-2.0 */
/* os_cgroup.c - see os_cgroup.h.  A limit may stand at any level between the process's own group
 * and the root, so every level is read and the tightest counts.  Allocates nothing.
 * Any thread. */
#include "os/os_cgroup.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATH_CAP 4096

bool os_read_small(const char *path, char *buf, size_t cap)
{
    const int fd  = open(path, O_RDONLY | O_CLOEXEC);
    size_t    len = 0;
    ssize_t   n   = 0;

    if (fd < 0)
        return false;
    while (len < cap - 1 && (n = read(fd, buf + len, cap - 1 - len)) > 0)
        len += (size_t)n;
    close(fd);
    buf[len] = 0;
    return n >= 0;
}

uint64_t os_field(const char *text, const char *key)
{
    const size_t len = strlen(key);

    for (const char *p = text; p; p = strchr(p, '\n')) {
        p += *p == '\n';
        if (strncmp(p, key, len) == 0 && (p[len] == ' ' || p[len] == '\t'))
            return strtoull(p + len, NULL, 10);
        if (!*p)
            break;
    }
    return 0;
}

/* Reads "<root><dir>/<file>"; a path too long for us reads as missing. */
static bool read_in(const char *root, const char *dir, const char *file, char *buf, size_t cap)
{
    char      path[PATH_CAP];
    const int n = snprintf(path, sizeof(path), "%s%s/%s", root, dir, file);

    return n > 0 && (size_t)n < sizeof(path) && os_read_small(path, buf, cap);
}

/* Whole processors that quota microseconds of each period are worth; 0 or less: no limit. */
static uint32_t quota_cpus(int64_t quota, int64_t period)
{
    uint64_t n;

    if (quota <= 0 || period <= 0)
        return UINT32_MAX;
    n = kvd_div_up((uint64_t)quota, (uint64_t)period);
    return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}

static void add_memory(os_cgroup *cg, uint64_t limit, uint64_t used, uint64_t cache)
{
    const uint64_t held = used > cache ? used - cache : 0; /* cache is given back on demand */

    cg->mem_limit     = kvd_min_u64(cg->mem_limit, limit);
    cg->mem_available = kvd_min_u64(cg->mem_available, limit > held ? limit - held : 0);
}

static void level_v2(os_cgroup *cg, const char *root, const char *dir)
{
    char     buf[8192];
    int64_t  quota, period;
    uint64_t limit, used;

    if (read_in(root, dir, "cpu.max", buf, sizeof(buf)) &&
        sscanf(buf, "%" SCNd64 " %" SCNd64, &quota, &period) == 2)
        cg->n_cpu = (uint32_t)kvd_min_u64(cg->n_cpu, quota_cpus(quota, period));

    if (!read_in(root, dir, "memory.max", buf, sizeof(buf)) ||
        sscanf(buf, "%" SCNu64, &limit) != 1) /* "max" */
        return;
    used = read_in(root, dir, "memory.current", buf, sizeof(buf)) ? strtoull(buf, NULL, 10) : 0;
    if (!read_in(root, dir, "memory.stat", buf, sizeof(buf)))
        buf[0] = 0;
    add_memory(cg, limit, used, os_field(buf, "inactive_file") + os_field(buf, "active_file"));
}

static void level_v1_cpu(os_cgroup *cg, const char *root, const char *dir)
{
    char    buf[64];
    int64_t quota;

    if (!read_in(root, dir, "cpu.cfs_quota_us", buf, sizeof(buf)))
        return;
    quota = strtoll(buf, NULL, 10);
    if (!read_in(root, dir, "cpu.cfs_period_us", buf, sizeof(buf)))
        return;
    cg->n_cpu = (uint32_t)kvd_min_u64(cg->n_cpu, quota_cpus(quota, strtoll(buf, NULL, 10)));
}

static void level_v1_memory(os_cgroup *cg, const char *root, const char *dir)
{
    char     buf[8192];
    uint64_t limit, used;

    if (!read_in(root, dir, "memory.limit_in_bytes", buf, sizeof(buf)))
        return;
    limit = strtoull(buf, NULL, 10);
    if (limit >= (uint64_t)INT64_MAX / 2) /* v1 writes "no limit" as a huge number */
        return;
    used =
        read_in(root, dir, "memory.usage_in_bytes", buf, sizeof(buf)) ? strtoull(buf, NULL, 10) : 0;
    if (!read_in(root, dir, "memory.stat", buf, sizeof(buf)))
        buf[0] = 0;
    add_memory(cg, limit, used,
               os_field(buf, "total_inactive_file") + os_field(buf, "total_active_file"));
}

/* Calls level for dir and each of its parents up to and with the root (""). */
static void walk(os_cgroup *cg, const char *root, const char *dir,
                 void (*level)(os_cgroup *, const char *, const char *))
{
    char  path[PATH_CAP];
    char *slash;

    if (snprintf(path, sizeof(path), "%s", dir) >= (int)sizeof(path))
        path[0] = 0;
    for (;;) {
        size_t len = strlen(path);

        while (len > 0 && path[len - 1] == '/')
            path[--len] = 0;
        level(cg, root, path);
        slash = strrchr(path, '/');
        if (!slash)
            return;
        *slash = 0;
    }
}

static bool has_controller(const char *list, const char *name)
{
    const size_t len = strlen(name);

    for (const char *p = list; (p = strstr(p, name)) != NULL; p += len)
        if ((p == list || p[-1] == ',') && (p[len] == 0 || p[len] == ','))
            return true;
    return false;
}

/* One line of /proc/self/cgroup: "id:controllers:path"; v2 has an empty list. */
static void read_line(os_cgroup *cg, char *line, const char *sys_root)
{
    char *list = strchr(line, ':');
    char *dir  = list ? strchr(list + 1, ':') : NULL;
    char  root[PATH_CAP];

    if (!dir)
        return;
    *list++ = 0;
    *dir++  = 0;
    if (!*list) {
        walk(cg, sys_root, dir, level_v2);
        return;
    }
    if (snprintf(root, sizeof(root), "%s/%s", sys_root, list) >= (int)sizeof(root))
        return;
    if (has_controller(list, "cpu"))
        walk(cg, root, dir, level_v1_cpu);
    if (has_controller(list, "memory"))
        walk(cg, root, dir, level_v1_memory);
}

os_cgroup os_cgroup_read(const char *cgroup_file, const char *sys_root)
{
    os_cgroup cg = { UINT32_MAX, UINT64_MAX, UINT64_MAX };
    char      buf[8192];
    char     *save = NULL;

    if (!os_read_small(cgroup_file, buf, sizeof(buf)))
        return cg;
    for (char *line = strtok_r(buf, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        read_line(&cg, line, sys_root);
    return cg;
}
