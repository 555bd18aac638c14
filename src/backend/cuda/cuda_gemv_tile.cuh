/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_tile.cuh - up to 8 tokens by quantised weights, on tensor cores in integers.
 *
 * A block takes 16 rows.  Pieces of them, 2048 columns, are brought to shared memory by bulk
 * copies, several pieces ahead and the first before the wait for the kernel ahead; each warp takes
 * 256 of the columns.  Sums of 32 (or 16) products are exact, in integers, and scaled in floats.
 *
 * Activations are 16-bit integers with a scale per 32, as two planes of bytes (as in backend
 * "cpu"): x = scale * (256 high + low).  They are laid out as the lanes take them
 * (cuda_gemv_types.cuh): xq[block of 32][token][lane of 4]   high bytes of its two quads, low bytes
 * of both xd[block of 32][8 tokens]           scale, scale * sum of the integers */
#ifndef KVD_CUDA_GEMV_TILE_CUH
#define KVD_CUDA_GEMV_TILE_CUH

#include "backend/cuda/cuda_gemv.cuh"
#include "backend/cuda/cuda_gemv_types.cuh"

#define TILE_ROWS   16u
#define TILE_COLS   (TILE_UNIT * GEMV_WARPS)
#define TILE_AHEAD  4u           /* pieces at most */
#define TILE_SMEM   (108u << 10) /* of pieces: two blocks on a multiprocessor at least */
#define TILE_BLOCKS 3            /* on a multiprocessor, as far as registers go */

template <kvd_dtype T> static __host__ __device__ constexpr uint32_t tile_bytes(uint32_t n_col)
{
    return n_col / tile_type<T>::COLS * tile_type<T>::BYTES;
}
/* Between rows of a piece: an odd multiple of 16, so that 8 rows lie in different banks, and room
 * for a word past the last. */
template <kvd_dtype T> static __host__ __device__ constexpr uint32_t tile_pitch()
{
    return (tile_bytes<T>(TILE_COLS) + 16) / 32 * 32 + 16;
}

/* ---- pieces --------------------------------------------------------------------------- */

/* 16 bytes, some time before the group that they are committed with is waited for. */
static __device__ __forceinline__ void tile_copy16(uint8_t *to, const uint8_t *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}
static __device__ __forceinline__ void tile_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until all but the last n groups are there. */
static __device__ __forceinline__ void tile_await(uint32_t n)
{
    if (n == 0)
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    else if (n == 1)
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    else if (n == 2)
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    else
        asm volatile("cp.async.wait_group 3;" ::: "memory");
}

/* Piece i of a row, by 16 threads; a group of its own, even where there is none. */
template <kvd_dtype T>
static __device__ __forceinline__ void tile_fill(const gemv_args &a, uint8_t *to,
                                                 const uint8_t *row, uint32_t i)
{
    const uint32_t at = i * TILE_COLS, k = threadIdx.x % 16;
    const uint32_t bytes = at < a.n_col ? tile_bytes<T>(min(TILE_COLS, a.n_col - at)) : 0;

    row += (uint64_t)i * tile_bytes<T>(TILE_COLS);
    if (a.wide) {
        for (uint32_t o = 16 * k; o < bytes; o += 256)
            tile_copy16(to + o, row + o);
    } else if (a.aligned) {
        for (uint32_t o = 2 * k; o < bytes; o += 32)
            *(uint16_t *)(to + o) = __ldg((const uint16_t *)(row + o));
    } else {
        for (uint32_t o = k; o < bytes; o += 16)
            to[o] = __ldg(row + o);
    }
    tile_commit();
}

/* ---- the products ------------------------------------------------------------------------- */

/* Columns: a[0], b[0] at 4 (lane % 4), a[2], b[1] at 16 further; rows as in mma_tf32(). */
static __device__ __forceinline__ void tile_mma32(int d[4], const uint32_t a0[2],
                                                  const uint32_t a1[2], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0[0]), "r"(a1[0]), "r"(a0[1]), "r"(a1[1]), "r"(b0), "r"(b1), "r"(0));
}
static __device__ __forceinline__ void tile_mma16(int d[4], uint32_t a0, uint32_t a1, uint32_t b0)
{
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%7,%7,%7,%7};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(0));
}

/* Sums of both planes as floats. */
static __device__ __forceinline__ void tile_dot32(float v[4], const uint32_t a0[2],
                                                  const uint32_t a1[2], const uint4 &x)
{
    int high[4], low[4];

    tile_mma32(high, a0, a1, x.x, x.y);
    tile_mma32(low, a0, a1, x.z, x.w);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        v[i] = (float)(high[i] * 256 + low[i]);
}
static __device__ __forceinline__ void tile_dot16(float v[4], uint32_t a0, uint32_t a1, uint32_t xh,
                                                  uint32_t xl)
{
    int high[4], low[4];

    tile_mma16(high, a0, a1, xh);
    tile_mma16(low, a0, a1, xl);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        v[i] = (float)(high[i] * 256 + low[i]);
}

/* 32 columns: w[h] is row 8 h further; sum[2 h + t] of it and token t of the lane's two. */
template <typename D>
static __device__ __forceinline__ void tile_add(const tile_block w[2], const uint4 &x,
                                                const float4 &d, float sum[4])
{
    const float dx[2] = { d.x, d.z }, total[2] = { d.y, d.w };
    float       v[4], more[4];

    if (D::SUBS == 1) {
        tile_dot32(v, w[0].q, w[1].q, x);
    } else {
        tile_dot16(v, w[0].q[0], w[1].q[0], x.x, x.z);
        tile_dot16(more, w[0].q[1], w[1].q[1], x.y, x.w);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const tile_block &r = w[i / 2];

        if (D::SUBS == 1)
            sum[i] = fmaf(r.scale[0], v[i] * dx[i % 2], sum[i]);
        else
            sum[i] = fmaf(fmaf(r.scale[1], more[i], r.scale[0] * v[i]), dx[i % 2], sum[i]);
        if (D::MIN == 1)
            sum[i] = fmaf(r.min, total[i % 2], sum[i]);
    }
    if (D::MIN == 2) {
        tile_dot32(v, w[0].m, w[1].m, x);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            sum[i] = fmaf(w[i / 2].min, v[i] * dx[i % 2], sum[i]);
    }
}

/* The warp's unit of a piece at p (the lane's first row), column `at` of the row.  FULL: the row
 * has all of its columns.  Lanes without a token compute another's, so that nothing depends on
 * that. */
template <kvd_dtype T, bool FULL>
static __device__ __forceinline__ void tile_unit(const gemv_args &a, const uint8_t *p, uint32_t at,
                                                 float sum[4])
{
    typedef tile_type<T>   D;
    const uint32_t         lane = threadIdx.x % 32, c = lane % 4, last = a.n_token - 1;
    const typename D::unit u0(p), u1(p + 8 * tile_pitch<T>());
    const uint4  *xq = a.xq + ((uint64_t)(at / 32) * a.n_token + min(lane / 4, last)) * 4 + c;
    const float2 *xd = a.xd + at / 32 * GEMV_TOKENS + min(2 * c, last & ~1u);

#pragma unroll
    for (uint32_t b = 0; b < TILE_UNIT / 32; b++) {
        tile_block w[2];

        if (!FULL && at + 32 * b >= a.n_col)
            break;
        const uint4  x = xq[b * 4 * a.n_token];
        const float4 d = *(const float4 *)(xd + b * GEMV_TOKENS);
        D::get(u0, b, c, w[0]);
        D::get(u1, b, c, w[1]);
        tile_add<D>(w, x, d, sum);
    }
}

template <kvd_dtype T>
static __global__ void __launch_bounds__(GEMV_THREADS, TILE_BLOCKS)
    tile_kernel(const __grid_constant__ gemv_args a, uint32_t n_stage)
{
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ float                         part[GEMV_WARPS][TILE_ROWS][GEMV_TOKENS];
    constexpr uint32_t                       PIECE = TILE_ROWS * tile_pitch<T>();
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = threadIdx.x / 16;
    const uint8_t *row    = gemv_row(a, gemv_block_row<TILE_ROWS>(a, r));
    const uint8_t *from   = smem + lane / 4 * tile_pitch<T>() + warp * tile_bytes<T>(TILE_UNIT);
    float          sum[4] = {};

    for (uint32_t i = 0; i < n_stage; i++)
        tile_fill<T>(a, smem + i * PIECE + r * tile_pitch<T>(), row, i);
    cuda_pdl_go();
    cuda_pdl_wait();
    for (uint32_t i = 0, stage = 0; i * TILE_COLS < a.n_col; i++) {
        const uint32_t at = i * TILE_COLS + warp * TILE_UNIT;

        tile_await(n_stage - 1);
        __syncthreads();
        if (at + TILE_UNIT <= a.n_col)
            tile_unit<T, true>(a, from + stage * PIECE, at, sum);
        else if (tile_type<T>::COLS < TILE_UNIT && at < a.n_col)
            tile_unit<T, false>(a, from + stage * PIECE, at, sum);
        __syncthreads();
        tile_fill<T>(a, smem + stage * PIECE + r * tile_pitch<T>(), row, i + n_stage);
        stage = stage + 1 == n_stage ? 0 : stage + 1;
    }
    *(float2 *)&part[warp][lane / 4][lane % 4 * 2]     = make_float2(sum[0], sum[1]);
    *(float2 *)&part[warp][lane / 4 + 8][lane % 4 * 2] = make_float2(sum[2], sum[3]);
    __syncthreads();
    gemv_finish<TILE_ROWS>(a, part);
}

template <kvd_dtype T>
static inline kvd_status tile_launch(const cuda_backend *be, const gemv_args &a, cudaStream_t s,
                                     kvd_err *err)
{
    const uint32_t piece = TILE_ROWS * tile_pitch<T>(), n = cuda_div_up(a.n_col, TILE_COLS);
    const uint32_t fit   = TILE_SMEM / piece < TILE_AHEAD ? TILE_SMEM / piece : TILE_AHEAD;
    const uint32_t stage = n < fit ? n : be->smem_block < TILE_SMEM ? 2 : fit;

    CUDA_TRY(cudaFuncSetAttribute(tile_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)(stage * piece)),
             "shared memory of a product", err);
    cuda_launch(be, tile_kernel<T>, gemv_blocks<TILE_ROWS>(a), GEMV_THREADS, stage * piece, s, a,
                stage);
    return KVD_OK;
}

/* Floats, one by one, where those are asked for. */
template <kvd_dtype T>
static inline kvd_status tile_choose(const cuda_backend *be, const gemv_args &a, cudaStream_t s,
                                     kvd_err *err)
{
    if (a.xq)
        return tile_launch<T>(be, a, s, err);
    gemv_launch<T, false>(be, a, s);
    return KVD_OK;
}

#endif
