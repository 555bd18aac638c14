/* SPDX-License-Identifier: Apache-2.0 */
/* backend_load.c - opening a backend by name; those that need a vendor's libraries are modules,
 * shared libraries that are loaded when they are asked for.  A module stays loaded.
 * Thread: any, for different backends. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/cpu/cpu.h"
#include "os/os.h"

#define MODULE_FILE "libkvdrive-cuda.so"
#define MODULE_PATH 1024
#define TEXT_2(x)   #x
#define TEXT(x)     TEXT_2(x)
#define VERSION     TEXT(KVD_VERSION_MAJOR) "." TEXT(KVD_VERSION_MINOR) "." TEXT(KVD_VERSION_PATCH)

/* From the directory of the program to that of libraries, as they are installed. */
#ifndef KVD_LIBDIR_FROM_BINDIR
#define KVD_LIBDIR_FROM_BINDIR "../lib"
#endif

/* Beside the program or the library that this code is in, or where it would be installed. */
static bool find_module(char *path, size_t cap, char *dir, size_t dir_cap)
{
    static const char *const below[] = { "", KVD_LIBDIR_FROM_BINDIR "/" };

    if (!os_module_own_dir(dir, dir_cap))
        return false;
    for (uint32_t i = 0; i < KVD_COUNTOF(below); i++) {
        const int n = snprintf(path, cap, "%s/%s" MODULE_FILE, dir, below[i]);

        if (n > 0 && (size_t)n < cap && os_file_exists(path))
            return true;
    }
    return false;
}

/* There is no such backend here; the caller may try another one. */
static kvd_status absent(kvd_err *err)
{
    if (err)
        err->sys = ENODEV;
    return KVD_E_UNSUPPORTED;
}

static kvd_status open_module(kvd_backend **out, const kvd_backend_params *p, const char *path,
                              kvd_err *err)
{
    char                           why[512];
    os_module                     *m = os_module_open(path, why, sizeof(why));
    kvd_backend_module_fn          get;
    const kvd_backend_module_info *info;
    void                          *symbol;

    if (!m) {
        (void)!kvd_fail(err, KVD_E_UNSUPPORTED, 0, "backend cuda: cannot load %s: %s", path, why);
        return absent(err);
    }
    symbol = os_module_symbol(m, KVD_BACKEND_MODULE_SYMBOL);
    if (!symbol)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "backend cuda: %s is no backend module", path);
    memcpy(&get, &symbol, sizeof(get)); /* ISO C has no cast from object to function */
    info = get();
    if (info->abi != KVD_BACKEND_ABI || strcmp(info->version, VERSION) != 0)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "backend cuda: %s is of version %s, ABI %" PRIu32
                        "; this is version " VERSION ", ABI %d",
                        path, info->version, info->abi, KVD_BACKEND_ABI);
    return info->open(out, p, err);
}

static kvd_status open_cuda(kvd_backend **out, const kvd_backend_params *p, kvd_err *err)
{
    char path[MODULE_PATH], dir[MODULE_PATH / 2] = "?";

    if (p->module)
        return open_module(out, p, p->module, err);
    if (!find_module(path, sizeof(path), dir, sizeof(dir))) {
        (void)!kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "backend cuda: no " MODULE_FILE " in %s or its " KVD_LIBDIR_FROM_BINDIR,
                        dir);
        return absent(err);
    }
    return open_module(out, p, path, err);
}

kvd_status kvd_backend_open(kvd_backend **out, const kvd_backend_params *p, kvd_err *err)
{
    const char *name = p->name ? p->name : "cpu";

    *out = NULL;
    if (strcmp(name, "cpu") == 0 || strcmp(name, "ref") == 0)
        return cpu_backend_open(out, p, err);
    if (strncmp(name, "cuda", 4) == 0 && (name[4] == 0 || name[4] == ':'))
        return open_cuda(out, p, err);
    return kvd_fail(err, KVD_E_INVAL, 0,
                    "backend (backend) \"%s\" is unknown; there are cpu, ref and cuda (cuda:N)",
                    name);
}

void kvd_backend_close(kvd_backend *b)
{
    if (b)
        b->ops->close(b);
}

kvd_status kvd_backend_open_beside(kvd_backend **out, kvd_stream **st,
                                   const kvd_backend_limits *lim, kvd_err *err)
{
    const kvd_backend_params p = { .name = "cpu" };
    kvd_status               rc;

    *st = NULL;
    KVD_TRY(kvd_backend_open(out, &p, err));
    rc = (*out)->ops->reserve(*out, lim, err);
    if (rc == KVD_OK)
        rc = (*out)->ops->stream_open(*out, st, err);
    if (rc != KVD_OK) {
        kvd_backend_close(*out);
        *out = NULL;
    }
    return rc;
}

void kvd_backend_close_beside(kvd_backend *b, kvd_stream *st)
{
    if (b)
        b->ops->stream_close(st);
    kvd_backend_close(b);
}
