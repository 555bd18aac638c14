/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_one.cuh - one token by quantised weights, from compute capability 9.0 on.
 *
 * A block takes tiles of 16 rows, in pieces of 2048 columns.  One warp has the copy engine bring
 * pieces to a ring in shared memory, the first before the wait for the kernel ahead; eight warps
 * take 256 columns of a piece each; another adds up a tile's sums while they go on.  They wait for
 * each other by barriers in shared memory alone.
 *
 * Activations are the integers of cuda_gemv_ints.cuh; every block makes its own, each warp those of
 * its columns.  An instruction's eight columns are both planes of four scales' columns: it has
 * zeros where its weights have another scale, so that after four (or two) instructions each lane
 * has sums of a scale of its own. */
#ifndef KVD_CUDA_GEMV_ONE_CUH
#define KVD_CUDA_GEMV_ONE_CUH

#include "backend/cuda/cuda_barrier.cuh"
#include "backend/cuda/cuda_gemv_tile.cuh"

#define ONE_THREADS (GEMV_THREADS + 64u) /* those that bring, and that add up, come last */
#define ONE_SMEM    (105u << 10)         /* of a block; what two pieces need at least */
#define ONE_AHEAD   6u

struct one_mem {
    uint64_t full[ONE_AHEAD], empty[ONE_AHEAD], done[2], free[2];
    float    part[2][GEMV_WARPS][TILE_ROWS];
    float    square[32]; /* of a norm */
};

/* Where a warp is: stage of the ring and the parity of its phase; tile and piece. */
struct one_at {
    uint32_t tile, piece, stage, parity;

    __device__ __forceinline__ explicit one_at() : tile(blockIdx.x), piece(0), stage(0), parity(0)
    {
    }
    __device__ __forceinline__ void step(uint32_t n_piece, uint32_t n_stage)
    {
        if (++piece == n_piece) {
            piece = 0;
            tile += gridDim.x;
        }
        if (++stage == n_stage) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* ---- bringing ------------------------------------------------------------------------------ */

/* One warp; each of 16 lanes has a row. */
template <kvd_dtype T>
static __device__ __forceinline__ void one_bring(const gemv_args &a, uint8_t *ring, one_mem *m,
                                                 uint32_t n_piece, uint32_t n_stage,
                                                 uint32_t n_tile)
{
    const uint32_t lane = threadIdx.x % 32, last = a.n_col - (n_piece - 1) * TILE_COLS;
    const uint8_t *row = NULL;

    for (one_at t; t.tile < n_tile; t.step(n_piece, n_stage)) {
        const uint32_t bytes = tile_bytes<T>(t.piece + 1 == n_piece ? last : TILE_COLS);
        uint64_t      *full  = &m->full[t.stage];

        if (t.piece == 0 && lane < TILE_ROWS)
            row = gemv_row(a, gemv_block_row<TILE_ROWS>(a, t.tile, lane));
        bar_wait(&m->empty[t.stage], t.parity ^ 1);
        if (lane == 0)
            bar_expect(full, TILE_ROWS * bytes);
        __syncwarp();
        if (lane < TILE_ROWS)
            bar_copy(ring + (t.stage * TILE_ROWS + lane) * tile_pitch<T>(),
                     row + (uint64_t)t.piece * tile_bytes<T>(TILE_COLS), bytes, full);
    }
}

/* ---- adding up ----------------------------------------------------------------------------- */

static __device__ __forceinline__ float one_total(const float (*part)[TILE_ROWS], uint32_t row)
{
    float s = 0.0f;

#pragma unroll
    for (uint32_t w = 0; w < GEMV_WARPS; w++)
        s += part[w][row];
    return s;
}

/* One warp; each of 16 lanes has a row, or of 8 a pair of a swiglu's. */
static __device__ __forceinline__ void one_add_up(const gemv_args &a, one_mem *m, uint32_t n_tile)
{
    const uint32_t lane = threadIdx.x % 32, rows = a.swiglu ? TILE_ROWS / 2 : TILE_ROWS;
    uint32_t       buf = 0, parity = 0;

    for (uint32_t tile = blockIdx.x; tile < n_tile; tile += gridDim.x) {
        const uint32_t row    = tile * rows + lane;
        const bool     mine   = lane < rows && row < (a.swiglu ? a.n_row / 2 : a.n_row);
        const float    before = mine && !a.swiglu ? gemv_before(a, row, 0) : 0.0f;

        bar_wait(&m->done[buf], parity);
        if (mine && a.swiglu)
            gemv_put_swiglu(a, row, 0, one_total(m->part[buf], lane),
                            one_total(m->part[buf], lane + TILE_ROWS / 2));
        else if (mine)
            gemv_put(a, row, 0, one_total(m->part[buf], lane), before);
        __syncwarp();
        if (lane == 0)
            bar_arrive(&m->free[buf]);
        buf ^= 1;
        parity ^= buf == 0;
    }
}

/* ---- the products -------------------------------------------------------------------------- */

/* The lane's activations of one instruction: SUBS scales in its 32 columns, of which number r of
 * those in a group of four scales. */
template <uint32_t SUBS>
static __device__ __forceinline__ uint2 one_pick(const uint2 &x, uint32_t r)
{
    const uint32_t lane = threadIdx.x % 32, col = lane / 8; /* of four scales */
    const bool     mine = SUBS == 1 ? col == r : col == 2 * r + lane % 4 / 2;

    return mine ? x : make_uint2(0, 0);
}

/* Scales 4 j to 4 j + 3 of a unit: both planes of row lane / 4 of the lane's scale, and of 8 rows
 * further. */
template <kvd_dtype T>
static __device__ __forceinline__ void one_group(const typename tile_type<T>::unit &u0,
                                                 const typename tile_type<T>::unit &u1,
                                                 const uint2 *q, uint32_t j, int d[4])
{
    typedef tile_type<T> D;
    const uint32_t       lane = threadIdx.x % 32, n = 4 / D::SUBS; /* blocks */
    const uint2          x = q[(n * j + lane / 8 / D::SUBS) * 8 + lane % 4 * 2 + lane / 4 % 2];

#pragma unroll
    for (uint32_t r = 0; r < n; r++) {
        uint32_t w[2][2];

        D::codes(u0, n * j + r, lane % 4, w[0]);
        D::codes(u1, n * j + r, lane % 4, w[1]);
        tile_mma32<D::BYTE>(d, w[0], w[1], one_pick<D::SUBS>(x, r));
    }
}

/* A unit of blocks of 256 at p (the lane's first row). */
template <kvd_dtype T>
static __device__ __forceinline__ void one_super(const uint8_t *p, const uint2 *q,
                                                 const gemv_scale *scale, float sum[2])
{
    typedef tile_type<T>   D;
    const typename D::unit u[2] = { typename D::unit(p),
                                    typename D::unit(p + 8 * tile_pitch<T>()) };
    const uint32_t         c    = threadIdx.x % 4;
    const float            by   = scale->scale * (D::SHIFT && c % 2 == 0 ? 1 << D::SHIFT : 1);
    int                    v[4] = {}, min[4] = {};

#pragma unroll
    for (uint32_t j = 0; j < 2 * D::SUBS; j++) {
        const int x    = D::MIN == 1 ? scale->sum[4 * j + c] : 0;
        int       d[4] = {};

        one_group<T>(u[0], u[1], q, j, d);
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            const int s = D::scale(u[h], j, c);
            v[2 * h] += s * d[2 * h];
            v[2 * h + 1] += s * d[2 * h + 1];
            if constexpr (D::MIN == 1)
                min[h] += D::min(u[h], j, c) * x;
        }
    }
#pragma unroll
    for (uint32_t b = 0; D::MIN == 2 && b < TILE_UNIT / 32; b++) {
        if constexpr (D::MIN == 2) {
            uint32_t m[2][2];

            D::mins(u[0], b, c, m[0]);
            D::mins(u[1], b, c, m[1]);
            tile_mma32<D::BYTE>(min, m[0], m[1], q[b * 8 + 2 * c + threadIdx.x / 4 % 2]);
        }
    }
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        sum[h] = fmaf(u[h].d * by, tile_both(v + 2 * h), sum[h]);
        if constexpr (D::MIN == 1)
            sum[h] = fmaf(u[h].dmin * scale->scale, (float)min[h], sum[h]);
        if constexpr (D::MIN == 2) /* every lane has it */
            sum[h] =
                c == 0 ? fmaf(u[h].dmin * scale->scale, tile_both(min + 2 * h), sum[h]) : sum[h];
    }
}

/* Of blocks of 32; left: columns that the row has. */
template <kvd_dtype T>
static __device__ __forceinline__ void one_small(const uint8_t *p, const uint2 *q,
                                                 const gemv_scale *scale, uint32_t left,
                                                 float sum[2])
{
    typedef tile_type<T>   D;
    const typename D::unit u[2] = { typename D::unit(p),
                                    typename D::unit(p + 8 * tile_pitch<T>()) };
    const uint32_t         c    = threadIdx.x % 4;

#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
        const bool has  = 32 * (4 * j + c) < left;
        int        d[4] = {};

        one_group<T>(u[0], u[1], q, j, d);
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            float v = D::factor(u[h], 4 * j + c) * (float)(256 * d[2 * h] + d[2 * h + 1]);

            if constexpr (D::MIN == 1)
                v = fmaf(D::min(u[h], 4 * j + c), (float)scale->sum[4 * j + c], v);
            sum[h] = has ? fmaf(scale->scale, v, sum[h]) : sum[h];
        }
    }
}

/* ---- activations --------------------------------------------------------------------------- */

static __host__ __device__ __forceinline__ uint32_t one_units(uint32_t n_col)
{
    return (n_col + TILE_UNIT - 1) / TILE_UNIT;
}

/* Among the warps that multiply. */
static __device__ __forceinline__ void one_sync(void)
{
    asm volatile("bar.sync 1, %0;" ::"r"(GEMV_THREADS) : "memory");
}

/* What a norm scales all columns by; at most 32 units. */
static __device__ __forceinline__ float one_norm(const gemv_args &a, float *square)
{
    float v[32 / GEMV_WARPS][8];

#pragma unroll
    for (uint32_t i = 0; i < 32 / GEMV_WARPS; i++)
        ints_load(a.x, a.x_wide, a.n_col, i * GEMV_WARPS + threadIdx.x / 32, v[i]);
#pragma unroll
    for (uint32_t i = 0; i < 32 / GEMV_WARPS; i++) {
        const float s = ints_square(v[i]);

        if (threadIdx.x % 32 == 0)
            square[i * GEMV_WARPS + threadIdx.x / 32] = s;
    }
    one_sync();
    return ints_norm(square, 32, a.n_col, a.norm_eps);
}

/* A warp makes the integers of the units that it takes. */
static __device__ __forceinline__ void one_make(const gemv_args &a, uint4 *q, gemv_scale *scale,
                                                one_mem *m)
{
    const uint32_t warp = threadIdx.x / 32, n_unit = one_units(a.n_col);
    const bool     wide = (uintptr_t)a.norm % 16 == 0;
    const float    by   = a.norm ? one_norm(a, m->square) : 1.0f;
    float          v[8], next[8], w[8];

    ints_load(a.x, a.x_wide, a.n_col, warp, v);
    for (uint32_t unit = warp; unit < n_unit; unit += GEMV_WARPS) {
        if (a.norm)
            ints_load(a.norm, wide, a.n_col, unit, w);
        ints_load(a.x, a.x_wide, a.n_col, unit + GEMV_WARPS, next);
#pragma unroll
        for (uint32_t k = 0; k < 8; k++)
            v[k] = a.norm ? v[k] * by * w[k] : v[k];
        q[unit * 32 + threadIdx.x % 32] = ints_make(v, scale + unit);
#pragma unroll
        for (uint32_t k = 0; k < 8; k++)
            v[k] = next[k];
    }
    __syncwarp();
}

/* ---- the kernel --------------------------------------------------------------------------- */

template <kvd_dtype T>
static __device__ __forceinline__ void one_multiply(const gemv_args &a, uint8_t *ring, one_mem *m,
                                                    const uint4 *q, const gemv_scale *scale,
                                                    uint32_t n_piece, uint32_t n_stage,
                                                    uint32_t n_tile)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint8_t *from   = ring + lane / 4 * tile_pitch<T>() + warp * tile_bytes<T>(TILE_UNIT);
    float          sum[2] = {};
    uint32_t       buf = 0, parity = 1; /* of free[]: both are, at first */

    for (one_at t; t.tile < n_tile; t.step(n_piece, n_stage)) {
        const uint32_t unit = t.piece * GEMV_WARPS + warp, at = unit * TILE_UNIT;
        const uint8_t *p = from + t.stage * (TILE_ROWS * tile_pitch<T>());

        bar_wait(&m->full[t.stage], t.parity);
        if (at < a.n_col) {
            if constexpr (tile_type<T>::COLS == TILE_UNIT)
                one_super<T>(p, (const uint2 *)(q + unit * 32), scale + unit, sum);
            else
                one_small<T>(p, (const uint2 *)(q + unit * 32), scale + unit, a.n_col - at, sum);
        }
        __syncwarp();
        if (lane == 0)
            bar_arrive(&m->empty[t.stage]);
        if (t.piece + 1 < n_piece)
            continue;
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
            sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        }
        bar_wait(&m->free[buf], parity);
        if (lane % 4 == 0) {
            m->part[buf][warp][lane / 4]     = sum[0];
            m->part[buf][warp][lane / 4 + 8] = sum[1];
        }
        sum[0] = sum[1] = 0.0f;
        __syncwarp();
        if (lane == 0)
            bar_arrive(&m->done[buf]);
        buf ^= 1;
        parity ^= buf == 0;
    }
}

template <kvd_dtype T>
static __global__ void __launch_bounds__(ONE_THREADS, 3)
    one_kernel(const __grid_constant__ gemv_args a, uint32_t n_stage, uint32_t n_tile)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ one_mem                       m;
    const uint32_t n_piece = (a.n_col + TILE_COLS - 1) / TILE_COLS, warp = threadIdx.x / 32;
    uint4         *q     = (uint4 *)(smem + n_stage * TILE_ROWS * tile_pitch<T>());
    gemv_scale    *scale = (gemv_scale *)(q + one_units(a.n_col) * 32);

    if (threadIdx.x < ONE_AHEAD) {
        bar_init(&m.full[threadIdx.x], 1);
        bar_init(&m.empty[threadIdx.x], GEMV_WARPS);
    }
    if (threadIdx.x < 2) {
        bar_init(&m.done[threadIdx.x], GEMV_WARPS);
        bar_init(&m.free[threadIdx.x], 1);
    }
    bar_fence();
    __syncthreads();
    cuda_pdl_go();
    if (warp == GEMV_WARPS) { /* of weights alone */
        one_bring<T>(a, smem, &m, n_piece, n_stage, n_tile);
        return;
    }
    cuda_pdl_wait();
    if (warp > GEMV_WARPS) {
        one_add_up(a, &m, n_tile);
        return;
    }
    one_make(a, q, scale, &m);
    one_multiply<T>(a, smem, &m, q, scale, n_piece, n_stage, n_tile);
#endif
}

/* Bytes of shared memory with so many stages. */
template <kvd_dtype T> static inline uint32_t one_bytes(const gemv_args &a, uint32_t n_stage)
{
    return n_stage * TILE_ROWS * tile_pitch<T>() +
           one_units(a.n_col) * (uint32_t)(2 * TILE_UNIT + sizeof(gemv_scale));
}

/* How many on a multiprocessor: one where there is little to do, so that the next kernel's come up
 * beside it, else two (measured from 1024 to 128256 rows, 4096 and 14336 columns, on an H200). */
static inline uint32_t one_blocks(const gemv_args &a, uint32_t tiles, uint32_t n_sm)
{
    return a.n_col <= 2 * TILE_COLS && tiles <= 7 * n_sm ? 1 : 2;
}

template <kvd_dtype T>
static inline kvd_status one_launch(const cuda_backend *be, const gemv_args &a, cudaStream_t s,
                                    kvd_err *err)
{
    const uint32_t tiles = gemv_blocks<TILE_ROWS>(a);
    const uint32_t grid  = (uint32_t)kvd_min_u64(tiles, one_blocks(a, tiles, be->n_sm) * be->n_sm);
    uint32_t       stage = 2;

    while (stage < ONE_AHEAD && one_bytes<T>(a, stage + 1) <= ONE_SMEM)
        stage++;
    CUDA_TRY(cudaFuncSetAttribute(one_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)one_bytes<T>(a, stage)),
             "shared memory of a product", err);
    cuda_launch(be, one_kernel<T>, grid, ONE_THREADS, one_bytes<T>(a, stage), s, a, stage, tiles);
    return KVD_OK;
}

/* By quantised weights; floats, one by one, where those are asked for. */
template <kvd_dtype T>
static inline kvd_status quant_product(const cuda_backend *be, const gemv_args &a, cudaStream_t s,
                                       kvd_err *err)
{
    if (!a.ints) {
        gemv_launch<T, false>(be, a, s);
        return KVD_OK;
    }
    if (!a.xq)
        return one_launch<T>(be, a, s, err);
    return a.n_token <= 4 ? tile_launch<T, 1>(be, a, s, err) : tile_launch<T, 2>(be, a, s, err);
}

#endif
