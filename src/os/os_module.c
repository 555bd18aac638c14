/* SPDX-License-Identifier: Apache-2.0 */
/* os_module.c - shared libraries that are opened at run time.  Any thread. */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "os/os.h"

os_module *os_module_open(const char *path, char *why, size_t cap)
{
    void *m = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);

    if (!m) {
        const char *text = dlerror();
        snprintf(why, cap, "%s", text ? text : "unknown error");
    }
    return m;
}

void *os_module_symbol(os_module *m, const char *name)
{
    return dlsym(m, name);
}

bool os_module_own_dir(char *out, size_t cap)
{
    static const char here = 0;
    Dl_info           info;
    ssize_t           n;
    char             *slash;

    if (!dladdr(&here, &info) || !info.dli_fname)
        return false;
    /* A program's name is what it was called by: without a slash it says nothing. */
    if (strchr(info.dli_fname, '/'))
        n = snprintf(out, cap, "%s", info.dli_fname);
    else
        n = readlink("/proc/self/exe", out, cap);
    if (n <= 0 || (size_t)n >= cap)
        return false;
    out[n] = 0;
    slash  = strrchr(out, '/');
    if (!slash)
        return false;
    *slash = 0;
    return true;
}

bool os_file_exists(const char *path)
{
    return access(path, F_OK) == 0;
}
