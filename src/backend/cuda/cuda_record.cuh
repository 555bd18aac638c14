/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_record.cuh - one warp copies or unpacks one record. */
#ifndef KVD_CUDA_RECORD_CUH
#define KVD_CUDA_RECORD_CUH

#include "backend/cuda/cuda_sparse.cuh"
extern "C" {
#include "backend/index_layout.h"
}

#define COPY_AT_ONCE 4u /* loads of 16 bytes in flight per thread */

/* A format with its sizes in bytes. */
typedef struct record_shape {
    kvd_record_format f;
    uint32_t          raw, packed; /* of a record */
    uint32_t          raw_row;
    cpu_index_plane   key; /* of VALUES */
} record_shape;

record_shape cuda_record_shape(const kvd_record_format *f); /* not of RAW */

/* One warp, one record; 16 bytes at a time where both lie so. */
static __device__ __forceinline__ void copy_record(const uint8_t *src, uint8_t *dst, uint64_t bytes)
{
    const uint32_t lane = threadIdx.x % WARP;
    const uint64_t n    = bytes / 16;

    if ((((uint64_t)src | (uint64_t)dst) & 15u) != 0) {
        for (uint64_t i = lane; i < bytes; i += WARP)
            dst[i] = src[i];
        return;
    }
    for (uint64_t first = lane; first < n; first += (uint64_t)COPY_AT_ONCE * WARP) {
        uint4 x[COPY_AT_ONCE];

#pragma unroll
        for (uint32_t i = 0; i < COPY_AT_ONCE; i++) {
            if (first + i * WARP < n)
                x[i] = ((const uint4 *)src)[first + i * WARP];
        }
#pragma unroll
        for (uint32_t i = 0; i < COPY_AT_ONCE; i++) {
            if (first + i * WARP < n)
                ((uint4 *)dst)[first + i * WARP] = x[i];
        }
    }
}

static __device__ __forceinline__ float unpack_code(const kvd_record_format &f, const uint8_t *rec,
                                                    uint32_t row, uint32_t i)
{
    if (f.type == KVD_RECORD_INT8)
        return (float)rec[row * f.head_dim + i];
    return (float)(rec[row * (f.head_dim / 2) + i / 2] >> (i % 2 * 4) & 15);
}

/* Codes and parameters are finite: a NaN needs no care. */
static __device__ __forceinline__ void unpack_put(kvd_dtype raw, uint8_t *row, uint32_t i, float x)
{
    const uint32_t u = __float_as_uint(x);

    if (raw == KVD_DTYPE_F32)
        ((float *)row)[i] = x;
    else
        ((uint16_t *)row)[i] = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* Channel i of token t's key, from its lane's index. */
static __device__ __forceinline__ float unpack_key(const cpu_index_plane &p, const uint8_t *lane,
                                                   uint32_t t, uint32_t i)
{
    const uint8_t  *tile = lane + p.code_off + (uint64_t)(t / CPU_INDEX_TILE) * p.tile_bytes;
    const uint32_t  u = t % CPU_INDEX_TILE, per_row = 32u / p.bits;
    const uint16_t *param = (const uint16_t *)(lane + p.param_off) + t / p.group * 2 * p.dim_pad;
    uint32_t        code;

    if (p.elem == KVD_INDEX_BF16)
        return sp_from_bf16(((const uint16_t *)tile)[i * CPU_INDEX_TILE + u]);
    code = tile[i / per_row * 64 + 4 * u + i % 4] >> (p.bits * (i % per_row / 4)) &
           ((1u << p.bits) - 1u);
    return __fadd_rn(__fmul_rn((float)code, sp_from_f16(param[i])),
                     sp_from_f16(param[p.dim_pad + i]));
}

/* One warp, one record: the packed one is taken whole before anything is written over it. */
static __device__ __forceinline__ void unpack_record(const record_shape &s, uint32_t chunk,
                                                     const uint8_t *src, const uint8_t *param,
                                                     uint8_t *dst, uint8_t *packed)
{
    const kvd_record_format &f = s.f;

    const uint32_t  d = f.head_dim, ct = f.chunk_tokens, first = chunk * ct;
    const uint32_t  lane = threadIdx.x % WARP, bytes = s.packed;
    const uint16_t *pk = (const uint16_t *)(param + 4ull * (first / KVD_RECORD_GROUP) * d);
    const uint16_t *pv =
        (const uint16_t *)(param + 4ull * (f.block_tokens / KVD_RECORD_GROUP) * d) + first;

    if (((uint64_t)src & 15u) == 0 && bytes % 16 == 0) {
        for (uint32_t i = lane; i < bytes / 16; i += WARP)
            ((uint4 *)packed)[i] = ((const uint4 *)src)[i];
    } else {
        for (uint32_t i = lane; i < bytes; i += WARP)
            packed[i] = src[i];
    }
    __syncwarp();
    if (f.type == KVD_RECORD_VALUES) {
        for (uint32_t k = lane; k < ct * d; k += WARP)
            unpack_put(f.raw, dst + (uint64_t)(k / d) * s.raw_row, k % d,
                       unpack_key(s.key, param, first + k / d, k % d));
        for (uint32_t k = lane; k < bytes / 2; k += WARP)
            ((uint16_t *)(dst + bytes))[k] = ((const uint16_t *)packed)[k];
        __syncwarp();
        return;
    }
    for (uint32_t k = lane; k < 2 * ct * d; k += WARP) {
        const uint32_t t = k / d, i = k % d;
        const float    scale = sp_from_f16(t < ct ? pk[i] : pv[t - ct]);
        const float    min   = sp_from_f16(t < ct ? pk[d + i] : pv[f.block_tokens + t - ct]);

        unpack_put(f.raw, dst + (uint64_t)t * s.raw_row, i,
                   __fadd_rn(__fmul_rn(unpack_code(f, packed, t, i), scale), min));
    }
    __syncwarp();
}

#endif
