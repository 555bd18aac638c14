/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_sparse.cuh - what the sparse ops share on the device: binary16 and bfloat16 with the bits of
 * base/half.h, sums over a block, the digits of a radix selection, clusters of blocks.
 *
 * Where backend.h asks for the same bits on every backend, arithmetic is written with the __f*_rn
 * intrinsics, which the compiler never contracts. */
#ifndef KVD_CUDA_SPARSE_CUH
#define KVD_CUDA_SPARSE_CUH

#include "backend/cuda/cuda_launch.cuh"

#define WARP      32u
#define ALL_LANES 0xffffffffu
#define RADIX     256u /* bins of a digit at most */

/* ---- numbers ----------------------------------------------------------------------- */

static __device__ __forceinline__ float sp_from_bf16(uint16_t h)
{
    return __uint_as_float((uint32_t)h << 16);
}

static __device__ __forceinline__ uint16_t sp_to_bf16(float f)
{
    const uint32_t u = __float_as_uint(f);

    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static __device__ __forceinline__ float sp_from_f16(uint16_t h)
{
    return __half2float(__ushort_as_half(h));
}

static __device__ __forceinline__ uint16_t sp_to_f16(float f)
{
    const uint32_t u = __float_as_uint(f);

    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(((u >> 16) & 0x8000u) | 0x7e00u);
    return __half_as_ushort(__float2half_rn(f));
}

/* Element i of a row of K or V. */
static __device__ __forceinline__ float sp_row_at(kvd_dtype type, const uint8_t *row, uint32_t i)
{
    return type == KVD_DTYPE_F32 ? ((const float *)row)[i]
                                 : sp_from_bf16(((const uint16_t *)row)[i]);
}

static __device__ __forceinline__ void sp_row_put(kvd_dtype type, uint8_t *row, uint32_t i, float x)
{
    if (type == KVD_DTYPE_F32)
        ((float *)row)[i] = x;
    else
        ((uint16_t *)row)[i] = sp_to_bf16(x);
}

/* Asks for a line of memory ahead, into the second-level cache. */
static __device__ __forceinline__ void sp_prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* ---- blocks ------------------------------------------------------------------------ */

/* Sum of x over the threads before this one; *total: over all of the block.  mem: [33], free again
 * after the next barrier. */
template <typename T> static __device__ __forceinline__ T sp_block_scan(T x, T *total, T *mem)
{
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, n = blockDim.x / WARP;
    T              incl = x, before;

    for (uint32_t d = 1; d < WARP; d *= 2) {
        const T y = __shfl_up_sync(ALL_LANES, incl, d);

        incl += lane >= d ? y : 0;
    }
    __syncthreads();
    if (lane == WARP - 1)
        mem[warp] = incl;
    __syncthreads();
    if (warp == 0) {
        const T mine = lane < n ? mem[lane] : 0;
        T       s    = mine;

        for (uint32_t d = 1; d < WARP; d *= 2) {
            const T y = __shfl_up_sync(ALL_LANES, s, d);

            s += lane >= d ? y : 0;
        }
        mem[lane] = s - mine;
        if (lane == WARP - 1)
            mem[WARP] = s;
    }
    __syncthreads();
    before = mem[warp];
    *total = mem[WARP];
    return before + incl - x;
}

/* ---- digits of a radix selection --------------------------------------------------- */

/* Where a running sum over bins first reaches `want`. */
typedef struct sp_pick {
    uint32_t bin, before, count; /* of the bins before it; in it */
    uint64_t mass;               /* of the bins before it */
} sp_pick;

/* For warp 0.  Bins are taken upwards, or downwards from the last; mass (NULL: none) may reach
 * `target` earlier.  Each lane sums eight bins. */
static __device__ __forceinline__ void sp_pick_bin(const uint32_t *hist, const uint64_t *mass,
                                                   bool down, uint32_t want, uint64_t target,
                                                   sp_pick *out)
{
    const uint32_t lane = threadIdx.x % WARP, per = RADIX / WARP;
    uint32_t       n = 0, incl;
    uint64_t       m = 0, incl_m;

    for (uint32_t i = 0; i < per; i++) {
        const uint32_t b = lane * per + i, at = down ? RADIX - 1 - b : b;

        n += hist[at];
        m += mass ? mass[at] : 0;
    }
    incl   = n;
    incl_m = m;
    for (uint32_t d = 1; d < WARP; d *= 2) {
        const uint32_t y = __shfl_up_sync(ALL_LANES, incl, d);

        incl += lane >= d ? y : 0;
    }
    for (uint32_t d = 1; mass && d < WARP; d *= 2) {
        const uint64_t y = __shfl_up_sync(ALL_LANES, incl_m, d);

        incl_m += lane >= d ? y : 0;
    }
    if ((incl >= want || (mass && incl_m >= target)) &&
        !(incl - n >= want || (mass && incl_m - m >= target))) {
        uint32_t before = incl - n, i = 0;
        uint64_t before_m = incl_m - m;

        for (;; i++) {
            const uint32_t b = lane * per + i, at = down ? RADIX - 1 - b : b;
            const uint64_t here = mass ? mass[at] : 0;

            if (before + hist[at] >= want || (mass && before_m + here >= target) || i + 1 == per) {
                out->bin    = at;
                out->before = before;
                out->count  = hist[at];
                out->mass   = before_m;
                break;
            }
            before += hist[at];
            before_m += here;
        }
    }
}

/* ---- launches that overlap ---------------------------------------------------------- */

/* First statement of a kernel launched by sp_launch: waits until the launches before it have ended
 * and their writes are seen.  Then lets the next one be set up beside this one. */
static __device__ __forceinline__ void sp_begin(void)
{
    cuda_pdl_wait();
    cuda_pdl_go();
}

/* Launches a kernel that calls sp_begin(); cluster: blocks of a cluster along x, 1: no clusters,
 * SP_ALONE: each block is one, so that it may send to itself as to another. */
#define SP_ALONE 0u

template <typename... P, typename... A>
static cudaError_t sp_launch(const cuda_backend *be, cudaStream_t s, dim3 grid, uint32_t block,
                             uint32_t smem, uint32_t cluster, void (*kernel)(P...), A... args)
{
    cudaLaunchAttribute at[2] = {};
    cudaLaunchConfig_t  c     = {};

    at[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    at[0].val.programmaticStreamSerializationAllowed = 1;
    at[1].id                                         = cudaLaunchAttributeClusterDimension;
    at[1].val.clusterDim                             = { cluster == SP_ALONE ? 1 : cluster, 1, 1 };
    c.gridDim                                        = grid;
    c.blockDim                                       = dim3(block);
    c.dynamicSmemBytes                               = smem;
    c.stream                                         = s;
    c.attrs                                          = at;
    c.numAttrs                                       = be->cc < 90 ? 0 : cluster != 1 ? 2 : 1;
    return cudaLaunchKernelEx(&c, kernel, args...);
}

/* ---- clusters ---------------------------------------------------------------------- */

/* Blocks that see each other's shared memory; one block before compute capability 9.0. */
static __device__ __forceinline__ uint32_t sp_cluster_rank(void)
{
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
    return r;
}

static __device__ __forceinline__ uint32_t sp_cluster_size(void)
{
    uint32_t n = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
    return n;
}

static __device__ __forceinline__ void sp_cluster_sync(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/* The two halves of sp_cluster_sync(): what was written before the first is seen behind the second.
 */
static __device__ __forceinline__ void sp_cluster_arrive(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}

static __device__ __forceinline__ void sp_cluster_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/* p, in the shared memory of this block, as another of the cluster has it. */
template <typename T> static __device__ __forceinline__ T *sp_peer(T *p, uint32_t rank)
{
#if __CUDA_ARCH__ >= 900
    uint64_t at;

    asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"((uint64_t)p), "r"(rank));
    return (T *)at;
#else
    (void)rank;
    return p;
#endif
}

#endif
