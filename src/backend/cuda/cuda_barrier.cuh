/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_barrier.cuh - barriers in shared memory that count arrivals and bytes, and bulk copies that
 * they wait for (compute capability 9.0 and later). */
#ifndef KVD_CUDA_BARRIER_CUH
#define KVD_CUDA_BARRIER_CUH

#include <stdint.h>

/* An address in shared memory as instructions have it. */
static __device__ __forceinline__ uint32_t bar_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void bar_init(uint64_t *bar, uint32_t n)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar_addr(bar)), "r"(n) : "memory");
}

/* Behind bar_init(), before the first copy. */
static __device__ __forceinline__ void bar_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void bar_arrive(uint64_t *bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar_addr(bar)) : "memory");
}

/* Arrives, and has the phase wait for so many bytes as well. */
static __device__ __forceinline__ void bar_expect(uint64_t *bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar_addr(bar)),
                 "r"(bytes)
                 : "memory");
}

/* Until the phase of this parity is over. */
static __device__ __forceinline__ void bar_wait(uint64_t *bar, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "wait:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\n"
                 "bra wait;\n"
                 "done:\n"
                 "}" ::"r"(bar_addr(bar)),
                 "r"(parity)
                 : "memory");
}

/* From memory to shared memory, both on multiples of 16 bytes, as is their number. */
static __device__ __forceinline__ void bar_copy(void *to, const void *from, uint32_t bytes,
                                                uint64_t *bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(bar_addr(to)),
                 "l"(from), "r"(bytes), "r"(bar_addr(bar))
                 : "memory");
}

/* ---- between blocks of a cluster --------------------------------------------------------- */

/* An address in the shared memory of this block, as that of another. */
static __device__ __forceinline__ uint32_t bar_peer(const void *p, uint32_t rank)
{
    uint32_t at;

    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(bar_addr(p)), "r"(rank));
    return at;
}

/* Sends words to another block, whose barrier counts their bytes; both addresses by bar_peer(). */
static __device__ __forceinline__ void bar_send2(uint32_t to, uint32_t bar, uint32_t a, uint32_t b)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], "
                 "{%1, %2}, [%3];" ::"r"(to),
                 "r"(a), "r"(b), "r"(bar)
                 : "memory");
}

static __device__ __forceinline__ void bar_send4(uint32_t to, uint32_t bar, uint4 v)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], "
                 "{%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
                 : "memory");
}

/* Until a barrier's first phase is over, with all that other blocks did before they sent. */
static __device__ __forceinline__ void bar_come(uint64_t *bar)
{
    uint32_t done = 0;

    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(bar_addr(bar))
                     : "memory");
}

#endif
