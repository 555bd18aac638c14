/* SPDX-License-Identifier: Apache-2.0 */
/* fake_cuda.c - a module in the CUDA backend's place: what it says where the GPU is one that it has
 * no code for. */
#include "backend/backend.h"
#include "backend/cuda/cuda_refuse.h"

static kvd_status fake_open(kvd_backend **out, const kvd_backend_params *p, kvd_err *err)
{
    *out = NULL;
    return strcmp(p->name, "cuda:1") == 0
               ? cuda_refuse(err, "Old GPU", 7, 5, "sm_80, sm_90 and later")
               : cuda_refuse(err, "Odd GPU", 8, 7, "sm_80, sm_90 and later");
}

__attribute__((visibility("default"))) const kvd_backend_module_info *kvd_backend_module(void)
{
    static const kvd_backend_module_info info = { KVD_BACKEND_ABI, FAKE_VERSION, fake_open };

    return &info;
}
