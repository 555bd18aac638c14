/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_tile.cuh - up to 8 tokens by quantised weights, on tensor cores in integers.
 *
 * A block takes 16 rows.  Pieces of them, 2048 columns, are brought to shared memory by
 * asynchronous copies, several pieces ahead and the first before the wait for the kernel ahead;
 * each warp takes 256 of the columns.  Sums of 32 products are exact, in integers, and so are those
 * of 256 where scales are integers.
 *
 * Activations are the integers of cuda_gemv_ints.cuh.  An instruction has eight columns: both
 * planes of four tokens. */
#ifndef KVD_CUDA_GEMV_TILE_CUH
#define KVD_CUDA_GEMV_TILE_CUH

#include "backend/cuda/cuda_gemv_ints.cuh"
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
#pragma unroll 1
        for (uint32_t o = 2 * k; o < bytes; o += 32)
            *(uint16_t *)(to + o) = __ldg((const uint16_t *)(row + o));
    } else {
#pragma unroll 1
        for (uint32_t o = k; o < bytes; o += 16)
            to[o] = __ldg(row + o);
    }
    tile_commit();
}

/* ---- the products ------------------------------------------------------------------------- */

/* d += a b.  Lane c of four has bytes 8 c to 8 c + 7 of a row's and of a column's 32; rows as in
 * mma_tf32(). */
template <tile_byte B>
static __device__ __forceinline__ void tile_mma32(int d[4], const uint32_t a0[2],
                                                  const uint32_t a1[2], const uint2 &b)
{
    if (B == TILE_U8)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0[0]), "r"(a1[0]), "r"(a0[1]), "r"(a1[1]), "r"(b.x), "r"(b.y));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0[0]), "r"(a1[0]), "r"(a0[1]), "r"(a1[1]), "r"(b.x), "r"(b.y));
}
/* Both planes of a row's sum. */
static __device__ __forceinline__ float tile_both(const int v[2])
{
    return fmaf((float)v[0], 256.0f, (float)v[1]);
}

/* Where a lane takes a unit's activations: of the column of products that it feeds, and scales of
 * the token that comes out to it; lanes without a token take another's, so that nothing depends on
 * that. */
struct tile_x {
    const uint2      *q[2];
    const gemv_scale *scale[2];
    uint32_t          step; /* of q between blocks of 32 */
};
template <uint32_t GROUPS>
static __device__ __forceinline__ void tile_at(tile_x *x, const uint4 *q, const gemv_scale *scale,
                                               uint32_t n_token)
{
    const uint32_t lane = threadIdx.x % 32;

    x->step = 8 * n_token;
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++) {
        x->q[g] =
            (const uint2 *)(q + min(4 * g + lane / 8, n_token - 1) * 4 + lane % 4) + lane / 4 % 2;
        x->scale[g] = scale + min(4 * g + lane % 4, n_token - 1);
    }
}

/* The warp's unit of a piece at p (the lane's first row): blocks of 256. */
template <kvd_dtype T, uint32_t GROUPS>
static __device__ __forceinline__ void tile_super(const uint8_t *p, const tile_x &x,
                                                  float sum[GROUPS][2])
{
    typedef tile_type<T>   D;
    const uint32_t         c = threadIdx.x % 4, next = 8 * tile_pitch<T>();
    const typename D::unit u[2] = { typename D::unit(p), typename D::unit(p + next) };
    int                    acc[GROUPS][D::SHIFT ? 2 : 1][4] = {}, min[GROUPS][4] = {};

#pragma unroll
    for (uint32_t b = 0; b < TILE_UNIT / 32; b++) {
        uint32_t w[2][2], m[2][2];

        D::codes(u[0], b, c, w[0]);
        D::codes(u[1], b, c, w[1]);
        if constexpr (D::MIN == 2) {
            D::mins(u[0], b, c, m[0]);
            D::mins(u[1], b, c, m[1]);
        }
#pragma unroll
        for (uint32_t g = 0; g < GROUPS; g++) {
            const uint2 q  = x.q[g][b * x.step];
            int        *to = acc[g][D::SHIFT ? b % 2 : 0];
#pragma unroll
            for (uint32_t k = 0; k < D::SUBS; k++) {
                const uint32_t at   = D::SUBS * b + k;
                int            d[4] = {};

                tile_mma32<D::BYTE>(d, w[0], w[1],
                                    D::SUBS == 1 || c / 2 == k ? q : make_uint2(0, 0));
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    to[i] += D::scale(u[i / 2], at / 4, at % 4) * d[i];
            }
            if constexpr (D::MIN == 1) {
                min[g][0] += D::min(u[0], b / 4, b % 4) * x.scale[g]->sum[b];
                min[g][1] += D::min(u[1], b / 4, b % 4) * x.scale[g]->sum[b];
            }
            if constexpr (D::MIN == 2)
                tile_mma32<D::BYTE>(min[g], m[0], m[1], q);
        }
    }
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++) {
        const float scale = x.scale[g]->scale;
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
            int *v = acc[g][0] + 2 * h;

            if (D::SHIFT) {
                const int *odd = acc[g][D::SHIFT ? 1 : 0] + 2 * h;
                v[0]           = (v[0] << D::SHIFT) + odd[0];
                v[1]           = (v[1] << D::SHIFT) + odd[1];
            }
            sum[g][h] = fmaf(u[h].d * scale, tile_both(v), sum[g][h]);
            if constexpr (D::MIN == 1)
                sum[g][h] = fmaf(u[h].dmin * scale, (float)min[g][h], sum[g][h]);
            if constexpr (D::MIN == 2)
                sum[g][h] = fmaf(u[h].dmin * scale, tile_both(min[g] + 2 * h), sum[g][h]);
        }
    }
}

/* The same of blocks of 32.  FULL: the row has all of the unit's columns; else `left` of them. */
template <kvd_dtype T, uint32_t GROUPS, bool FULL>
static __device__ __forceinline__ void tile_small(const uint8_t *p, const tile_x &x, uint32_t left,
                                                  float sum[GROUPS][2])
{
    typedef tile_type<T>   D;
    const uint32_t         c = threadIdx.x % 4, next = 8 * tile_pitch<T>();
    const typename D::unit u[2]            = { typename D::unit(p), typename D::unit(p + next) };
    float                  part[GROUPS][2] = {};

#pragma unroll
    for (uint32_t b = 0; b < TILE_UNIT / 32; b++) {
        uint32_t w[2][2];

        if (!FULL && 32 * b >= left)
            break;
        D::codes(u[0], b, c, w[0]);
        D::codes(u[1], b, c, w[1]);
#pragma unroll
        for (uint32_t g = 0; g < GROUPS; g++) {
            int d[4] = {};

            tile_mma32<D::BYTE>(d, w[0], w[1], x.q[g][b * x.step]);
#pragma unroll
            for (uint32_t h = 0; h < 2; h++) {
                part[g][h] =
                    fmaf(D::factor(u[h], b), (float)(256 * d[2 * h] + d[2 * h + 1]), part[g][h]);
                if constexpr (D::MIN == 1)
                    part[g][h] = fmaf(D::min(u[h], b), (float)x.scale[g]->sum[b], part[g][h]);
            }
        }
    }
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++) {
        sum[g][0] = fmaf(x.scale[g]->scale, part[g][0], sum[g][0]);
        sum[g][1] = fmaf(x.scale[g]->scale, part[g][1], sum[g][1]);
    }
}

/* The warp's unit of a piece at p (the lane's first row), of which the row has `left` columns. */
template <kvd_dtype T, uint32_t GROUPS>
static __device__ __forceinline__ void tile_unit(const uint8_t *p, const tile_x &x, uint32_t left,
                                                 float sum[GROUPS][2])
{
    if constexpr (tile_type<T>::COLS == TILE_UNIT)
        tile_super<T, GROUPS>(p, x, sum);
    else if (left >= TILE_UNIT)
        tile_small<T, GROUPS, true>(p, x, left, sum);
    else
        tile_small<T, GROUPS, false>(p, x, left, sum);
}

/* ---- the kernel --------------------------------------------------------------------------- */

/* GROUPS of four tokens. */
template <kvd_dtype T, uint32_t GROUPS>
static __global__ void __launch_bounds__(GEMV_THREADS, TILE_BLOCKS)
    tile_kernel(const __grid_constant__ gemv_args a, uint32_t n_stage)
{
    extern __shared__ __align__(128) uint8_t smem[];
    __shared__ float                         part[GEMV_WARPS][TILE_ROWS][GEMV_TOKENS];
    constexpr uint32_t                       PIECE = TILE_ROWS * tile_pitch<T>();
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = threadIdx.x / 16;
    const uint8_t *row  = gemv_row(a, gemv_block_row<TILE_ROWS>(a, blockIdx.x, r));
    const uint8_t *from = smem + lane / 4 * tile_pitch<T>() + warp * tile_bytes<T>(TILE_UNIT);
    float          sum[GROUPS][2] = {};
    tile_x         x;

    for (uint32_t i = 0; i < n_stage; i++)
        tile_fill<T>(a, smem + i * PIECE + r * tile_pitch<T>(), row, i);
    cuda_pdl_go();
    cuda_pdl_wait();
    const float before = gemv_ahead<TILE_ROWS>(a, blockIdx.x);
    for (uint32_t i = 0, stage = 0; i * TILE_COLS < a.n_col; i++) {
        const uint32_t unit = i * GEMV_WARPS + warp, at = unit * TILE_UNIT;

        tile_at<GROUPS>(&x, a.xq + (uint64_t)at / 32 * a.n_token * 4, a.xd + unit * GEMV_TOKENS,
                        a.n_token);
        tile_await(n_stage - 1);
        __syncthreads();
        if (at < a.n_col)
            tile_unit<T, GROUPS>(from + stage * PIECE, x, a.n_col - at, sum);
        __syncthreads();
        tile_fill<T>(a, smem + stage * PIECE + r * tile_pitch<T>(), row, i + n_stage);
        stage = stage + 1 == n_stage ? 0 : stage + 1;
    }
#pragma unroll
    for (uint32_t g = 0; g < GROUPS; g++) {
        part[warp][lane / 4][4 * g + lane % 4]     = sum[g][0];
        part[warp][lane / 4 + 8][4 * g + lane % 4] = sum[g][1];
    }
    __syncthreads();
    gemv_finish<TILE_ROWS>(a, blockIdx.x, part, 1.0f, before);
}

template <kvd_dtype T, uint32_t GROUPS>
static inline kvd_status tile_launch(const cuda_backend *be, const gemv_args &a, cudaStream_t s,
                                     kvd_err *err)
{
    const uint32_t piece = TILE_ROWS * tile_pitch<T>(), n = cuda_div_up(a.n_col, TILE_COLS);
    const uint32_t fit   = TILE_SMEM / piece < TILE_AHEAD ? TILE_SMEM / piece : TILE_AHEAD;
    const uint32_t stage = n < fit ? n : be->smem_block < TILE_SMEM ? 2 : fit;

    CUDA_TRY(cudaFuncSetAttribute(tile_kernel<T, GROUPS>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)(stage * piece)),
             "shared memory of a product", err);
    cuda_launch(be, tile_kernel<T, GROUPS>, gemv_blocks<TILE_ROWS>(a), GEMV_THREADS, stage * piece,
                s, a, stage);
    return KVD_OK;
}

#endif
