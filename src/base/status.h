/* SPDX-License-Identifier: Apache-2.0 */
/* status.h - the one error convention of the tree: kvd_status returned, kvd_err filled. */
#ifndef KVD_BASE_STATUS_H
#define KVD_BASE_STATUS_H

#include "kvdrive.h"

#if defined(__GNUC__)
#define KVD_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define KVD_PRINTF(fmt, args)
#endif

/* Fills err (may be NULL) once, where the failure is found, and returns code. */
kvd_status kvd_fail(kvd_err *err, kvd_status code, int sys, const char *fmt, ...) KVD_PRINTF(4, 5);

#define KVD_SHORT_PATH_BYTES 256
/* A path for a message: all of it, or "..." and its last 200 bytes.  Returns buf. */
const char *kvd_short_path(const char *path, char buf[KVD_SHORT_PATH_BYTES]);
/* Puts "PATH: " before the message of err (may be NULL) unless it begins with that. */
void kvd_err_name_path(kvd_err *err, const char *path);

/* Forwards a failure unchanged. */
#define KVD_TRY(expr)                    \
    do {                                 \
        kvd_status kvd_try_st_ = (expr); \
        if (kvd_try_st_ != KVD_OK)       \
            return kvd_try_st_;          \
    } while (0)

#endif
