/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_best.cu - the largest of rows: blocks pick those of a slice, then of what slices have left,
 * until one block is enough.
 *
 * A key orders as its item does, value first, then the lower index; it is 0 for none, so no two are
 * equal that are something.  Scratch: keys of BEST_ROWS rows, twice. */
#include "backend/cuda/cuda_launch.cuh"

#define BEST_THREADS 1024u
#define BEST_OWN     4u
#define BEST_SLICE   (BEST_THREADS * BEST_OWN)
#define BEST_ROWS    32u /* of one launch */

typedef struct best_args {
    uint32_t        n, k, n_sort; /* n_sort: a power of two, at least k and what a slice has */
    uint64_t        x_stride, key_stride, out_stride;
    const float    *x; /* NULL: the input is keys */
    const uint64_t *from;
    uint64_t       *to;
    kvd_best_item  *out; /* NULL: the output is keys */
} best_args;

static __device__ __forceinline__ uint64_t best_key(float x, uint32_t at)
{
    const uint32_t u = __float_as_uint(x + 0.0f);

    if (isnan(x))
        return 0;
    return (uint64_t)(u & 0x80000000u ? ~u : u | 0x80000000u) << 32 | (uint32_t)~at;
}

static __device__ __forceinline__ kvd_best_item best_item(uint64_t key)
{
    const uint32_t u = (uint32_t)(key >> 32);
    kvd_best_item  b = { 0.0f, -1 };

    if (key) {
        b.value = __uint_as_float(u & 0x80000000u ? u ^ 0x80000000u : ~u);
        b.at    = (int32_t) ~(uint32_t)key;
    }
    return b;
}

static __device__ __forceinline__ uint64_t best_load(const best_args &a, uint32_t i)
{
    if (i >= a.n)
        return 0;
    if (a.x)
        return best_key(a.x[blockIdx.y * a.x_stride + i], i);
    return a.from[blockIdx.y * a.key_stride + i];
}

static __device__ __forceinline__ void best_store(const best_args &a, uint32_t i, uint64_t key)
{
    if (a.out)
        a.out[blockIdx.y * a.out_stride + i] = best_item(key);
    else
        a.to[blockIdx.y * a.key_stride + (uint64_t)blockIdx.x * a.k + i] = key;
}

/* Descending. */
static __device__ void best_sort(uint64_t *key, uint32_t n)
{
    for (uint32_t size = 2; size <= n; size *= 2) {
        for (uint32_t step = size / 2; step; step /= 2) {
            __syncthreads();
            for (uint32_t i = threadIdx.x; i < n / 2; i += BEST_THREADS) {
                const uint32_t lo = 2 * i - (i & (step - 1)), hi = lo + step;
                const uint64_t x = key[lo], y = key[hi];

                if ((x < y) == ((lo & size) == 0)) {
                    key[lo] = y;
                    key[hi] = x;
                }
            }
        }
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(BEST_THREADS)
    best_sort_kernel(const __grid_constant__ best_args a)
{
    __shared__ uint64_t key[BEST_SLICE];

    cuda_pdl_go();
    cuda_pdl_wait();
    for (uint32_t i = threadIdx.x; i < a.n_sort; i += BEST_THREADS)
        key[i] = best_load(a, blockIdx.x * BEST_SLICE + i);
    best_sort(key, a.n_sort);
    if (threadIdx.x < a.k)
        best_store(a, threadIdx.x, key[threadIdx.x]);
}

static __device__ __forceinline__ uint64_t best_warp_max(uint64_t x)
{
    for (int d = 16; d; d >>= 1)
        x = max(x, (uint64_t)__shfl_xor_sync(0xffffffffu, (unsigned long long)x, d));
    return x;
}

/* The one best: k is 1. */
static __global__ void __launch_bounds__(BEST_THREADS)
    best_max_kernel(const __grid_constant__ best_args a)
{
    __shared__ uint64_t part[BEST_THREADS / 32];
    uint64_t            own[BEST_OWN], best = 0;

    cuda_pdl_go();
    cuda_pdl_wait();
#pragma unroll
    for (uint32_t i = 0; i < BEST_OWN; i++)
        own[i] = best_load(a, blockIdx.x * BEST_SLICE + i * BEST_THREADS + threadIdx.x);
#pragma unroll
    for (uint32_t i = 0; i < BEST_OWN; i++)
        best = max(best, own[i]);
    best = best_warp_max(best);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    best = best_warp_max(part[threadIdx.x]);
    if (threadIdx.x == 0)
        best_store(a, 0, best);
}

static uint64_t best_slices(uint64_t n)
{
    return kvd_max_u64(1, kvd_div_up(n, BEST_SLICE));
}

uint64_t cuda_best_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    (void)be;
    return lim->n_vocab
               ? 2 * BEST_ROWS * best_slices(lim->n_vocab) * KVD_BEST_MAX * sizeof(uint64_t)
               : 0;
}

static uint32_t best_sort_size(uint32_t n, uint32_t k)
{
    const uint64_t least = kvd_max_u64(k, kvd_min_u64(n, BEST_SLICE));
    uint32_t       size  = 1;

    while (size < least)
        size *= 2;
    return size;
}

static void best_rows(const cuda_backend *be, const kvd_best_args *a, uint32_t first,
                      uint32_t n_row, uint64_t *room, cudaStream_t s)
{
    const uint64_t key_stride = best_slices(a->n_col) * a->k;
    best_args      r          = {};

    r.n          = a->n_col;
    r.k          = a->k;
    r.x_stride   = a->x_stride;
    r.key_stride = key_stride;
    r.out_stride = a->out_stride;
    r.x          = a->x + first * a->x_stride;
    r.from       = room;
    r.to         = room + BEST_ROWS * key_stride;
    for (;;) {
        const uint32_t  n_slice = (uint32_t)best_slices(r.n);
        uint64_t *const from    = r.to;

        r.out    = n_slice == 1 ? a->out + first * a->out_stride : NULL;
        r.n_sort = best_sort_size(r.n, r.k);
        cuda_launch(be, r.k == 1 ? best_max_kernel : best_sort_kernel, dim3(n_slice, n_row),
                    dim3(BEST_THREADS), 0, s, r);
        if (n_slice == 1)
            return;
        r.n    = n_slice * r.k;
        r.x    = NULL;
        r.to   = (uint64_t *)r.from;
        r.from = from;
    }
}

kvd_status cuda_best(kvd_stream *st, const kvd_best_args *a, kvd_err *err)
{
    const cuda_backend *be    = cuda_enter(st);
    const uint64_t      bytes = 2 * BEST_ROWS * best_slices(a->n_col) * a->k * sizeof(uint64_t);
    uint64_t           *room;

    kvd_assert(a->k >= 1 && a->k <= KVD_BEST_MAX);
    if (a->n_row == 0)
        return KVD_OK;
    room = (uint64_t *)cuda_scratch_of(be, CUDA_SCRATCH_BEST, bytes);
    for (uint32_t row = 0; row < a->n_row; row += BEST_ROWS)
        best_rows(be, a, row, (uint32_t)kvd_min_u64(BEST_ROWS, a->n_row - row), room, st->s);
    return cuda_launched("best", err);
}
