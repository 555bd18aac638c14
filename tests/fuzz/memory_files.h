/* SPDX-License-Identifier: Apache-2.0 */
/* memory_files.h - os_map_*() over exact heap copies instead of mappings, for tests of parsers: a
 * sanitizer then sees a read beyond the file's last byte, which a mapping hides up to the end of
 * its page, and a use after close.  Include it in one file of a test program: its definitions
 * keep the library's own from being linked.  Paths not in memory_file are read from disk.
 * One thread. */
#ifndef KVD_TEST_MEMORY_FILES_H
#define KVD_TEST_MEMORY_FILES_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "os/os.h"

static struct {
    const char    *path; /* NULL: unused */
    const uint8_t *data;
    size_t         bytes;
} memory_file[2];

static kvd_status map_disk_file(os_map *out, const char *path, kvd_err *err)
{
    FILE    *f = fopen(path, "rb");
    uint8_t *p = NULL;
    long     n = -1;

    if (!f)
        return kvd_fail(err, KVD_E_IO, errno, "%s", path);
    if (fseek(f, 0, SEEK_END) == 0 && (n = ftell(f)) > 0) {
        rewind(f);
        p = malloc((size_t)n);
        if (!p || fread(p, 1, (size_t)n, f) != (size_t)n)
            abort();
    }
    fclose(f);
    if (n < 0)
        return kvd_fail(err, KVD_E_IO, EISDIR, "%s", path);
    *out = (os_map){ p, (uint64_t)n };
    return KVD_OK;
}

kvd_status os_map_open(os_map *out, const char *path, kvd_err *err)
{
    *out = (os_map){ 0 };
    for (size_t i = 0; i < KVD_COUNTOF(memory_file); i++) {
        uint8_t *p = NULL;

        if (!memory_file[i].path || strcmp(memory_file[i].path, path) != 0)
            continue;
        if (memory_file[i].bytes) {
            p = malloc(memory_file[i].bytes);
            if (!p)
                abort();
            memcpy(p, memory_file[i].data, memory_file[i].bytes);
        }
        *out = (os_map){ p, memory_file[i].bytes };
        return KVD_OK;
    }
    return map_disk_file(out, path, err);
}

bool os_map_copy(os_map *m)
{
    (void)m; /* it is one */
    return true;
}

void os_map_close(os_map *m)
{
    free((void *)(uintptr_t)m->data);
    *m = (os_map){ 0 };
}

void os_map_will_need(const os_map *m)
{
    (void)m;
}

uint64_t os_map_resident(const os_map *m)
{
    return m->bytes;
}

#endif
