/* SPDX-License-Identifier: Apache-2.0 */
/* os_module.c - shared libraries that are opened at run time.  Any thread. */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/os.h"

/* Whether a file of that size has every segment that is to be loaded: of a library that was cut off
 * dlopen() maps the rest, and the process ends with SIGBUS.  What is no ELF file of this machine's
 * kind is whole; dlopen() refuses it. */
static bool is_whole(int fd, uint64_t bytes)
{
    Elf64_Ehdr h;
    Elf64_Phdr p;

    if (pread(fd, &h, sizeof(h), 0) != sizeof(h) || memcmp(h.e_ident, ELFMAG, SELFMAG) != 0 ||
        h.e_ident[EI_CLASS] != ELFCLASS64 || h.e_phentsize != sizeof(p))
        return true;
    for (uint64_t i = 0; i < h.e_phnum; i++) {
        const uint64_t at = h.e_phoff + i * sizeof(p);

        if (at < h.e_phoff || at > bytes || pread(fd, &p, sizeof(p), (off_t)at) != sizeof(p))
            return false;
        if (p.p_type == PT_LOAD && (p.p_offset > bytes || p.p_filesz > bytes - p.p_offset))
            return false;
    }
    return true;
}

/* Of a file that is there, why it had better not be given to dlopen(); NULL: nothing. */
static const char *why_not(const char *path)
{
    const int   fd   = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe has no writer */
    const char *what = NULL;
    struct stat st;

    if (fd < 0 || fstat(fd, &st) != 0)
        what = NULL; /* dlopen() will say it */
    else if (!S_ISREG(st.st_mode))
        what = "it is no file";
    else if (!is_whole(fd, (uint64_t)st.st_size))
        what = "the file is cut off";
    if (fd >= 0)
        (void)close(fd);
    return what;
}

os_module *os_module_open(const char *path, char *why, size_t cap)
{
    /* A name without a slash is looked for where the system keeps its libraries. */
    const char *what = strchr(path, '/') ? why_not(path) : NULL;
    void       *m    = NULL;

    if (what) {
        snprintf(why, cap, "%s", what);
        return NULL;
    }
    m = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
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
