/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_launch.cuh - launches that begin before the kernel ahead of them has ended (programmatic
 * dependent launch; compute capability 9.0 and later, elsewhere plain launches).
 *
 * Rules, for every kernel launched by cuda_launch():
 *   - All threads call cuda_pdl_wait() before they read or write anything that another kernel
 * writes or reads.  Before it they may touch weights and arguments alone.  A kernel that leaves it
 * out breaks the ones behind it, too: their wait covers the kernel just ahead only.
 *   - cuda_pdl_go() where it is worth that the next kernel comes up; without it that begins when
 *     this one ends. */
#ifndef KVD_CUDA_LAUNCH_CUH
#define KVD_CUDA_LAUNCH_CUH

#include "backend/cuda/cuda_impl.h"

static __device__ __forceinline__ void cuda_pdl_wait()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void cuda_pdl_go()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* A failed launch is found by cuda_launched(). */
template <typename... P, typename... A>
static inline void cuda_launch(const cuda_backend *be, void (*kernel)(P...), dim3 grid, dim3 block,
                               size_t smem, cudaStream_t s, const A &...arg)
{
    cudaLaunchAttribute attr = {};
    cudaLaunchConfig_t  c    = {};

    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    c.gridDim                                       = grid;
    c.blockDim                                      = block;
    c.dynamicSmemBytes                              = smem;
    c.stream                                        = s;
    c.attrs                                         = &attr;
    c.numAttrs                                      = be->cc >= 90 ? 1 : 0;
    (void)cudaLaunchKernelEx(&c, kernel, arg...);
}

#endif
