/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_whole.cu - select, and the window's change and spans behind it, in one launch.
 *
 * A lane is the work of a cluster of blocks of threads, each with a run of its chunks: their
 * weights (cuda_select_fast.cuh makes their logits), scores and keys never leave shared memory.
 * The blocks tell each other four times what they have; it goes straight into the others' shared
 * memory, and barriers there count the bytes that have come:
 *
 * 1. their weights' scales and sums, for each head;
 *
 * 2. how many scores' keys have which coarse digit, so all come to the digit of the k-th;
 *
 * 3. their keys with that digit: the k-th of all is one of these.  Where they are too many the
 * digit is divided further before, as often as needed;
 *
 * 4. what they have of the selection, of hits and misses, and the first block learns each slot's
 *    fate.
 *
 * They meet when all have begun, when slots' fates are known, and when the selection and the misses
 * are listed; the first block, which has found the victims meanwhile, admits the misses.
 *
 * A chunk's key is its score's bits + 1 (0: cannot be selected); with its number behind it, lower
 * numbers first, it is unlike all others, so there are no ties.
 *
 * Sums are merged in the order of warps and blocks, so they depend on the number of blocks, which
 * depends on the number of lanes (deterministic: of those that are reserved).
 *
 * The kernel behind comes only when this one is through: set up earlier, its blocks take processors
 * from this one's (8 sequences, 60K tokens: 9.8 to 10.4 ms a step in place of 8.1).
 *
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_select_window.cuh"

#define WHOLE_RESERVED 1024u /* bytes of a processor's shared memory that each block costs */

/* For choosing a number of blocks; H200, heads of 128, groups of 4. */
#define WHOLE_FIXED_US 22.0f
#define WHOLE_BLOCK_US 0.13f

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

/* ---- the kernel ------------------------------------------------------------------------ */

static __device__ __forceinline__ void whole_words(void *to, const void *from, uint32_t bytes,
                                                   uint32_t warp)
{
    const uint32_t i = threadIdx.x - warp * WARP;

    if (i < bytes / 4)
        ((uint32_t *)to)[i] = ((const uint32_t *)from)[i];
}

/* What the lane is, for all threads at hand; returns what whole_late() is to keep. */
static __device__ uint64_t whole_meet(const whole_job &f, whole_mem *m)
{
    const uint32_t seq  = blockIdx.y / f.j.a.index.n_kv_head;
    const uint32_t head = blockIdx.y % f.j.a.index.n_kv_head;

    whole_words(&m->seq, f.j.a.seq + seq, sizeof(m->seq), 0);
    if (f.window) {
        whole_words(&m->window, f.change.seq + seq, sizeof(m->window), 1);
        whole_words(&m->place, f.spans.place + seq, sizeof(m->place), 2);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        return m->seq.k[head];
    if (threadIdx.x == WARP && f.window)
        return m->window.cap[head];
    if (threadIdx.x == 2 * WARP && f.window && !f.spans.in_place)
        return m->place.at[head] + f.spans.slot_off;
    return 0;
}

static __device__ whole_lane whole_open(const whole_job &f, const whole_mem *m, uint8_t *mem)
{
    const select_job &j = f.j;
    whole_lane        l;
    uint32_t          n_block, per;

    l.index     = blockIdx.y;
    l.head      = blockIdx.y % j.a.index.n_kv_head;
    l.rank      = sp_cluster_rank();
    l.n_rank    = sp_cluster_size();
    l.first     = m->seq.first_chunk;
    l.block     = l.first >> f.shift;
    n_block     = (m->seq.n_chunk + j.s.n_chunk - 1) >> f.shift;
    per         = n_block > l.block ? (n_block - l.block + l.n_rank - 1) / l.n_rank : 0;
    l.base0     = l.block * j.s.n_chunk;
    l.each      = max(per, 1) * j.s.n_chunk;
    l.block     = min(l.block + l.rank * per, n_block);
    l.end_block = min(l.block + per, n_block);
    l.base      = l.block * j.s.n_chunk;
    l.n         = min(l.end_block * j.s.n_chunk, m->seq.n_chunk);
    l.n         = l.n > l.base ? l.n - l.base : 0;
    l.wide      = j.group > FAST_NARROW;
    l.mem       = mem + f.front;
    l.scale     = (float *)(l.mem + (uint64_t)(f.each / WHOLE_EACH) * whole_quad_bytes(l.wide));
    l.slot      = (uint64_t *)(mem + sizeof(whole_over));
    l.miss      = (uint32_t *)(l.slot + f.slots);
    l.near_     = (uint16_t *)(l.miss + f.slots);
    return l;
}

/* Before anything is known: no key is counted. */
static __device__ void whole_clear(whole_mem *m)
{
    for (uint32_t b = threadIdx.x; b < 2 * WHOLE_BINS; b += blockDim.x)
        m->count[0][b] = 0;
    for (uint32_t b = threadIdx.x; b < WHOLE_BINS; b += blockDim.x)
        m->out[b] = 0;
}

/* The first block, when index blocks are no longer needed: no slot is in use. */
static __device__ void whole_empty(const whole_job &f, const whole_lane &l)
{
    for (uint32_t s = threadIdx.x; f.window && l.rank == 0 && s < f.slots; s += blockDim.x)
        l.slot[s] = WHOLE_EMPTY;
}

/* What a thread has read of the lane, when it has come. */
static __device__ __forceinline__ void whole_late(const whole_lane &l, whole_mem *m, uint64_t late)
{
    const uint32_t n = m->seq.n_chunk > l.first ? m->seq.n_chunk - l.first : 0;
    uint32_t       k = min((uint32_t)__shfl_sync(ALL_LANES, late, 0), n);

    if (threadIdx.x < 2) {
        const whole_goal g = { 1, 0, threadIdx.x ? select_n_urgent(k) : k, 0, UINT64_MAX };

        m->goal[threadIdx.x]  = g;
        m->n_few[threadIdx.x] = 0;
    }
    if (threadIdx.x == WARP)
        m->cap = (uint32_t)late;
    if (threadIdx.x == 2 * WARP)
        m->at = late;
}

/* What will be wanted of this block's chunks: their averages and slots. */
static __device__ __noinline__ void whole_prefetch(const uint16_t *p, uint32_t n)
{
    const uint32_t line = 64;

    for (uint32_t i = line * threadIdx.x; i < n; i += line * blockDim.x)
        sp_prefetch(p + i);
}

static __device__ __forceinline__ void whole_want(const whole_job &f, const whole_lane &l,
                                                  const whole_mem *m)
{
    if (m->seq.ema)
        whole_prefetch(m->seq.ema + l.head * f.j.a.lane_stride + l.base, l.n);
    if (f.window)
        whole_prefetch(m->window.slot_of + l.head * f.change.lane_stride + l.base, l.n);
}

template <int ROWS, bool WIDE>
static __global__ void __launch_bounds__(WHOLE_WARPS *WARP, 1)
    whole(const __grid_constant__ whole_job f)
{
    extern __shared__ uint4 whole_dynamic[];
    __shared__ whole_mem    m;
    whole_over             *o = (whole_over *)whole_dynamic;
    whole_lane              l;
    whole_count             all, before;
    whole_slot              slot;
    whole_far               far;
    whole_had               had;
    uint16_t               *near_;
    uint32_t                n_near;
    uint64_t                late;
    float                   lse;

    if (!f.beside)
        cuda_pdl_wait();
    late = whole_meet(f, &m);
    l    = whole_open(f, &m, (uint8_t *)whole_dynamic);
    whole_await(f.j, l, &m);
    sp_cluster_arrive();
    whole_want(f, l, &m);
    whole_clear(&m);
    whole_scan<ROWS, WIDE>(f, l, &m, (uint8_t *)whole_dynamic);
    whole_late(l, &m, late);
    far = whole_memory(f, l, &m);
    had = whole_known(far, WHOLE_EACH * threadIdx.x, l.n);
    sp_cluster_wait(); /* peers have begun */
    __syncthreads();
    whole_tell(f.j, l, &m);
    whole_empty(f, l);
    if (f.beside)
        cuda_pdl_wait();
    lse  = whole_kept(f.j, l, &m);
    slot = whole_slot_at(f, l, &m, threadIdx.x);
    whole_factors(f.j, l, &m, f.share, lse); /* 1 */
    __syncthreads();
    whole_score<WIDE>(f, l, &m, far, had);
    __syncthreads();
    whole_give(l, &m, o);
    whole_counted(l, &m, o); /* 2 */
    whole_slot_look(f, l, &m, &slot);
    n_near = whole_find(l, &m, o, &near_); /* 3 */
    whole_counts(f, l, &m, near_, n_near, slot);
    __syncthreads();
    if (f.window)
        sp_cluster_arrive();
    if (threadIdx.x < WARP)
        whole_share(l, &m);
    all = whole_blocks(l, &m, &before); /* 4 */
    whole_lists(f, l, &m, near_, n_near, whole_begin(&m, before, all));
    if (l.rank == 0 && threadIdx.x == 0)
        whole_result(f.j, l, &m, all);
    if (!f.window)
        return;
    sp_cluster_wait(); /* slots' fates are known */
    sp_cluster_arrive();
    if (l.rank == 0)
        whole_change(f, l, &m, o, all);
}

#else

template <int ROWS, bool WIDE>
static __global__ void __launch_bounds__(WHOLE_WARPS *WARP, 1)
    whole(const __grid_constant__ whole_job f)
{
    (void)f;
}

#endif

/* ---- for cuda_select.cu ------------------------------------------------------------------- */

/* Bytes of shared memory that a block may have where so many share a processor. */
static uint64_t whole_room(const cuda_backend *be, uint32_t n)
{
    return kvd_min_u64(be->smem_block, be->smem_sm / n - WHOLE_RESERVED) - sizeof(whole_mem);
}

/* Fills in what depends on how many blocks make a lane; returns their shared memory. */
static uint64_t whole_shape(const cuda_backend *be, const select_job &j, bool window, uint32_t n,
                            uint32_t depth, whole_job *f)
{
    const uint64_t blocks = kvd_div_up(kvd_div_up(be->lim.n_chunk, j.s.n_chunk), n);
    const bool     wide   = j.group > FAST_NARROW;
    uint64_t       over;

    cuda_select_fast_shape(&j.s, depth, &f->s);
    f->each  = (uint32_t)(blocks * j.s.n_chunk);
    f->slots = window ? be->lim.n_slot : 0;
    over     = sizeof(whole_over) + f->slots * (sizeof(uint64_t) + sizeof(uint32_t)) +
           f->each / WHOLE_EACH * sizeof(uint16_t);
    f->front = (uint32_t)kvd_align_up(
        kvd_max_u64(over, (uint64_t)(f->threads / WARP) * depth * f->s.stage), 128);
    return f->front + (uint64_t)(f->each / WHOLE_EACH) * whole_quad_bytes(wide) +
           (uint64_t)(f->each / WHOLE_RUN) * (wide ? FAST_HEADS : FAST_NARROW) * sizeof(float);
}

/* Microseconds until all lanes are through, roughly: a block's steps that wait for each other, and
 * its index blocks.  Two that share a processor take about as long for both as one with all of its
 * threads would for twice as much. */
static float whole_time(const cuda_backend *be, uint64_t n_lane, uint64_t n_held, uint32_t n,
                        uint32_t share, uint64_t n_block)
{
    const float each = WHOLE_BLOCK_US * (float)n_block / (float)n;
    float       t    = 0.0f;

    while (n_lane > 0) {
        const uint64_t now  = kvd_min_u64(n_lane, n_held);
        const float    busy = share == 1 || now * n > be->n_sm ? (float)share : 1.5f;

        t += WHOLE_FIXED_US * (share == 1 ? 1.0f : 1.25f) + each * busy;
        n_lane -= now;
    }
    return t;
}

/* Where n blocks make a lane, with the deepest reading ahead that has room; returns their shared
 * memory, 0: there is none. */
static uint32_t whole_try(const cuda_backend *be, const select_job &j, bool window, uint32_t n,
                          uint32_t share, whole_job *f)
{
    f->threads = WHOLE_WARPS * WARP / share;
    for (uint32_t depth = 2; depth > 0; depth--) {
        const uint64_t need = whole_shape(be, j, window, n, depth, f);

        if (need <= whole_room(be, share) && f->each <= WHOLE_MOST)
            return (uint32_t)need;
    }
    return 0;
}

/* How many blocks make a lane, the fastest by whole_time(); 0: none whose shared memory suffices.
 */
static uint32_t whole_ranks(const cuda_backend *be, const select_job &j, bool window, whole_job *f,
                            uint32_t *bytes)
{
    const uint64_t lanes =
        be->deterministic ? (uint64_t)be->lim.n_seq * j.a.index.n_kv_head : j.n_lane;
    const uint64_t blocks = kvd_div_up(be->lim.n_chunk, j.s.n_chunk);
    uint32_t       best   = 0;
    float          least  = 0.0f;

    for (uint32_t i = 2 * WHOLE_RANKS; i > 0; i--) {
        const uint32_t n = (i - 1) / 2 + 1, share = (i - 1) % 2 + 1;
        const uint32_t held = be->n_cluster[share - 1][n - 1];
        whole_job      a    = *f;
        const uint32_t need = held ? whole_try(be, j, window, n, share, &a) : 0;
        const float    t    = need ? whole_time(be, lanes, held, n, share, blocks) : 0.0f;

        if (need && (best == 0 || t < least)) {
            best   = n;
            least  = t;
            *f     = a;
            *bytes = need;
        }
    }
    return best;
}

/* Which sizes are held at once depends on how the device's processors are grouped. */
static uint32_t whole_held(const cuda_backend *be, uint32_t n, uint32_t share)
{
    const uint32_t      bytes = (uint32_t)whole_room(be, share);
    cudaLaunchAttribute at    = {};
    cudaLaunchConfig_t  c     = {};
    int                 held  = 0;

    at.id              = cudaLaunchAttributeClusterDimension;
    at.val.clusterDim  = { n, 1, 1 };
    c.gridDim          = dim3(n);
    c.blockDim         = dim3(WHOLE_WARPS * WARP / share);
    c.dynamicSmemBytes = bytes;
    c.attrs            = &at;
    c.numAttrs         = 1;
    if (cudaFuncSetAttribute(whole<4, false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)bytes) != cudaSuccess ||
        cudaFuncSetAttribute(whole<4, false>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
            cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&held, whole<4, false>, &c) != cudaSuccess) {
        (void)cudaGetLastError(); /* not an error: other sizes will do */
        return 0;
    }
    return (uint32_t)held;
}

void cuda_select_clusters(cuda_backend *be)
{
    for (uint32_t i = 0; be->cc >= 90 && i < 2 * WHOLE_RANKS; i++)
        be->n_cluster[i / WHOLE_RANKS][i % WHOLE_RANKS] =
            (uint16_t)whole_held(be, i % WHOLE_RANKS + 1, i / WHOLE_RANKS + 1);
}

template <int ROWS, bool WIDE>
static cudaError_t whole_launch(const cuda_backend *be, const whole_job &f, uint32_t n,
                                uint32_t bytes, cudaStream_t s)
{
    cudaError_t e = cudaFuncSetAttribute(whole<ROWS, WIDE>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);

    if (e == cudaSuccess && n > 8)
        e = cudaFuncSetAttribute(whole<ROWS, WIDE>, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                 1);
    return e != cudaSuccess ? e
                            : sp_launch(be, s, dim3(n, f.j.n_lane), f.threads, bytes,
                                        n > 1 ? n : SP_ALONE, whole<ROWS, WIDE>, f);
}

cudaError_t cuda_select_whole(const cuda_backend *be, const select_job &j,
                              const kvd_choose_args *window, bool beside, cudaStream_t s,
                              bool *done)
{
    const bool serves = j.fast && j.s.kind == KVD_INDEX_MEAN && j.a.top_p <= 0.0f &&
                        j.a.rule != KVD_GQA_MEAN_LOGITS;
    whole_job      f     = {};
    uint32_t       bytes = 0;
    const uint32_t n     = serves ? whole_ranks(be, j, window != NULL, &f, &bytes) : 0;

    *done = n > 0;
    if (n == 0)
        return cudaSuccess;
    f.j      = j;
    f.share  = 1.0f / (float)j.group;
    f.shift  = (uint32_t)__builtin_ctz(j.s.n_chunk);
    f.beside = beside;
    if (window) {
        f.window = true;
        f.change = window->window;
        f.spans  = window->spans;
    }
    if (j.s.dim == 64)
        return j.group <= FAST_NARROW ? whole_launch<2, false>(be, f, n, bytes, s)
                                      : whole_launch<2, true>(be, f, n, bytes, s);
    return j.group <= FAST_NARROW ? whole_launch<4, false>(be, f, n, bytes, s)
                                  : whole_launch<4, true>(be, f, n, bytes, s);
}
