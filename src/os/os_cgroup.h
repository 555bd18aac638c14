/* SPDX-License-Identifier: Apache-2.0 */
/* os_cgroup.h - private to os/: what control groups (v1 and v2) leave to this process. */
#ifndef KVD_OS_CGROUP_H
#define KVD_OS_CGROUP_H

#include "os/os.h"

typedef struct os_cgroup {
    uint32_t n_cpu;         /* CPU quota rounded up to whole processors; UINT32_MAX: none */
    uint64_t mem_limit;     /* bytes; UINT64_MAX: none */
    uint64_t mem_available; /* limit less what cannot be reclaimed; UINT64_MAX: no limit */
} os_cgroup;

/* cgroup_file: "/proc/self/cgroup"; sys_root: "/sys/fs/cgroup".  A file that is missing or reads
 * oddly counts as no limit. */
os_cgroup os_cgroup_read(const char *cgroup_file, const char *sys_root);

/* The start of a small file, zero-terminated, into buf; false when it cannot be read. */
bool os_read_small(const char *path, char *buf, size_t cap);
/* The number after "key" at a line's start, or 0: "MemTotal:  123 kB", "inactive_file 123". */
uint64_t os_field(const char *text, const char *key);

#endif
