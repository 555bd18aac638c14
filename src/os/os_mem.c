/* SPDX-License-Identifier: Apache-2.0 */
/* os_mem.c - how much memory there is, and how much this process holds.
 * Reads /proc each time; allocates nothing.  Any thread. */
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "os/os.h"
#include "os/os_cgroup.h"

static os_cgroup cgroup_now(void)
{
    return os_cgroup_read("/proc/self/cgroup", "/sys/fs/cgroup");
}

static uint64_t meminfo(const char *key)
{
    char buf[8192];

    return os_read_small("/proc/meminfo", buf, sizeof(buf)) ? os_field(buf, key) * 1024 : 0;
}

uint64_t os_mem_total(void)
{
    return kvd_min_u64(meminfo("MemTotal:"), cgroup_now().mem_limit);
}

uint64_t os_mem_available(void)
{
    return kvd_min_u64(meminfo("MemAvailable:"), cgroup_now().mem_available);
}

/* Resident pages of this process, and those of them that files or shared memory back. */
static void statm(uint64_t *resident, uint64_t *shared)
{
    char buf[256];

    if (!os_read_small("/proc/self/statm", buf, sizeof(buf)) ||
        sscanf(buf, "%*s %" SCNu64 " %" SCNu64, resident, shared) != 2)
        *resident = *shared = 0;
}

uint64_t os_rss(void)
{
    uint64_t resident, shared;

    statm(&resident, &shared);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

uint64_t os_rss_anon(void)
{
    uint64_t resident, shared;

    statm(&resident, &shared);
    return (resident > shared ? resident - shared : 0) * (uint64_t)sysconf(_SC_PAGESIZE);
}
