/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_refuse.h - what is said of a GPU that is there and cannot be used.  Plain C, so that tests
 * can say it without one. */
#ifndef CUDA_REFUSE_H
#define CUDA_REFUSE_H

#include <errno.h>

#include "base/base.h"

#define CUDA_CC_MIN 80 /* compute capability times ten: bfloat16 and asynchronous copies */

/* There is no GPU that this build can use; the caller may try another backend. */
static inline kvd_status cuda_absent(kvd_err *err)
{
    if (err)
        err->sys = ENODEV;
    return KVD_E_UNSUPPORTED;
}

/* code: the architectures that the build has code for, as text. */
static inline kvd_status cuda_refuse(kvd_err *err, const char *gpu, int major, int minor,
                                     const char *code)
{
    if (major * 10 + minor < CUDA_CC_MIN)
        (void)!kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "cuda: %s has compute capability %d.%d; %d.%d or later is needed, or "
                        "another backend (backend), as \"cpu\"",
                        gpu, major, minor, CUDA_CC_MIN / 10, CUDA_CC_MIN % 10);
    else
        (void)!kvd_fail(
            err, KVD_E_UNSUPPORTED, 0,
            "cuda: this build has no code for %s (compute capability %d.%d), but for %s; "
            "there are other backends (backend), as \"cpu\"",
            gpu, major, minor, code);
    return cuda_absent(err);
}

#endif
