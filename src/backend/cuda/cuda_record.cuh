/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_record.cuh - one warp copies or unpacks one record, or two at once.
 *
 * Records in codes are unpacked by words: lane i takes words i, i + 32, ..., whose channels are the
 * same in all of them, asks for all it needs before it uses any, and can ask for one record while
 * it has another.  Shapes where that does not come out even, and VALUES, go through shared memory.
 */
#ifndef KVD_CUDA_RECORD_CUH
#define KVD_CUDA_RECORD_CUH

#include "backend/cuda/cuda_sparse.cuh"
extern "C" {
#include "backend/index_layout.h"
}

#define COPY_AT_ONCE 4u /* loads of 16 bytes in flight per thread */
#define UNPACK_WORDS 8u /* words of a record that a lane takes at once */

/* A format with its sizes in bytes. */
typedef struct record_shape {
    kvd_record_format f;
    uint32_t          raw, packed; /* of a record */
    uint32_t          raw_row;
    uint32_t          lanes; /* lanes that share a row of codes by words; 0: not by words */
    cpu_index_plane   key;   /* of VALUES */
} record_shape;

record_shape cuda_record_shape(const kvd_record_format *f); /* not of RAW */

/* One warp, N records; 16 bytes at a time where all lie so, all records' asked for before any is
 * written. */
template <uint32_t N>
static __device__ __forceinline__ void copy_all(const uint8_t *const (&src)[N],
                                                uint8_t *const (&dst)[N], uint64_t bytes)
{
    const uint32_t lane = threadIdx.x % WARP;
    const uint64_t n    = bytes / 16;
    uint64_t       bits = 0;

#pragma unroll
    for (uint32_t k = 0; k < N; k++)
        bits |= (uint64_t)src[k] | (uint64_t)dst[k];
    if ((bits & 15u) != 0) {
#pragma unroll
        for (uint32_t k = 0; k < N; k++) {
            for (uint64_t i = lane; i < bytes; i += WARP)
                dst[k][i] = src[k][i];
        }
        return;
    }
    for (uint64_t first = lane; first < n; first += (uint64_t)COPY_AT_ONCE * WARP) {
        uint4 x[N][COPY_AT_ONCE];

#pragma unroll
        for (uint32_t i = 0; i < N * COPY_AT_ONCE; i++) {
            const uint32_t k = i / COPY_AT_ONCE, at = i % COPY_AT_ONCE;
            if (first + at * WARP < n)
                x[k][at] = ((const uint4 *)src[k])[first + at * WARP];
        }
#pragma unroll
        for (uint32_t i = 0; i < N * COPY_AT_ONCE; i++) {
            const uint32_t k = i / COPY_AT_ONCE, at = i % COPY_AT_ONCE;
            if (first + at * WARP < n)
                ((uint4 *)dst[k])[first + at * WARP] = x[k][at];
        }
    }
}

static __device__ __forceinline__ void copy_record(const uint8_t *src, uint8_t *dst, uint64_t bytes)
{
    copy_all<1>({ src }, { dst }, bytes);
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

/* ---- by words ------------------------------------------------------------------------- */

/* Where a record is, whose parameters it has, and where it goes. */
typedef struct unpack_place {
    const uint8_t *src, *param;
    uint8_t       *dst;
    uint32_t       chunk;
} unpack_place;

/* A lane's words of a record, and what they need: parameters of its channels, and those of V of
 * the token that has the lane's number. */
template <bool INT8> struct unpack_words {
    static constexpr uint32_t CODES = INT8 ? 4 : 8; /* in a word */
    uint32_t                  word[UNPACK_WORDS];
    uint32_t                  scale[CODES / 2], min[CODES / 2];
    uint32_t                  v_scale, v_min;
};

static __device__ __forceinline__ bool unpack_by_words(const record_shape &s, const unpack_place &p)
{
    return s.lanes > 0 && (((uint64_t)p.src | (uint64_t)p.param | (uint64_t)p.dst) & 15u) == 0;
}

/* Words [first, first + UNPACK_WORDS) of each lane. */
template <bool INT8>
static __device__ __forceinline__ void unpack_load(const record_shape &s, const unpack_place &p,
                                                   uint32_t first, unpack_words<INT8> *w)
{
    const kvd_record_format &f    = s.f;
    const uint32_t           lane = threadIdx.x % WARP, token = p.chunk * f.chunk_tokens;
    const uint32_t           n = s.packed / (4 * WARP) - first;
    const uint8_t           *k = p.param + 4ull * (token / KVD_RECORD_GROUP) * f.head_dim +
                       lane % s.lanes * sizeof(w->scale);
    const uint16_t *v =
        (const uint16_t *)(p.param + 4ull * (f.block_tokens / KVD_RECORD_GROUP) * f.head_dim) +
        token;

#pragma unroll
    for (uint32_t i = 0; i < UNPACK_WORDS; i++) {
        if (i < n)
            w->word[i] = ((const uint32_t *)p.src)[lane + WARP * (first + i)];
    }
#pragma unroll
    for (uint32_t i = 0; i < unpack_words<INT8>::CODES / 2; i += 2) {
        *(uint2 *)&w->scale[i] = *(const uint2 *)(k + 4 * i);
        *(uint2 *)&w->min[i]   = *(const uint2 *)(k + 2ull * f.head_dim + 4 * i);
    }
    w->v_scale = lane < f.chunk_tokens ? v[lane] : 0;
    w->v_min   = lane < f.chunk_tokens ? v[f.block_tokens + lane] : 0;
}

/* Two values, rounded to bf16. */
static __device__ __forceinline__ uint32_t unpack_pair(uint32_t code, uint32_t bits,
                                                       const float scale[2], const float min[2])
{
    const uint32_t mask = (1u << bits) - 1u;
    const float    x    = __fadd_rn(__fmul_rn((float)(code & mask), scale[0]), min[0]);
    const float    y    = __fadd_rn(__fmul_rn((float)(code >> bits & mask), scale[1]), min[1]);
    uint32_t       out;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(y), "f"(x));
#else
    out = sp_to_bf16(x) | (uint32_t)sp_to_bf16(y) << 16;
#endif
    return out;
}

/* Channels' parameters as floats. */
template <uint32_t N>
static __device__ __forceinline__ void unpack_halves(const uint32_t h[N / 2], float x[N])
{
#pragma unroll
    for (uint32_t i = 0; i < N / 2; i++) {
        x[2 * i]     = sp_from_f16((uint16_t)h[i]);
        x[2 * i + 1] = sp_from_f16((uint16_t)(h[i] >> 16));
    }
}

template <bool INT8>
static __device__ __forceinline__ void unpack_store(const record_shape &s, const unpack_place &p,
                                                    uint32_t first, const unpack_words<INT8> &w)
{
    constexpr uint32_t CODES = unpack_words<INT8>::CODES, BITS = 32 / CODES;
    const uint32_t     lane = threadIdx.x % WARP, rows = WARP / s.lanes;
    const uint32_t     n = s.packed / (4 * WARP) - first, ct = s.f.chunk_tokens;
    const float        v_scale = sp_from_f16((uint16_t)w.v_scale);
    const float        v_min   = sp_from_f16((uint16_t)w.v_min);
    float              scale[CODES], min[CODES];

    unpack_halves<CODES>(w.scale, scale);
    unpack_halves<CODES>(w.min, min);
#pragma unroll
    for (uint32_t i = 0; i < UNPACK_WORDS; i++) {
        const uint32_t row = (first + i) * rows + lane / s.lanes;
        const float    vs  = __shfl_sync(ALL_LANES, v_scale, (row - ct) % WARP);
        const float    vm  = __shfl_sync(ALL_LANES, v_min, (row - ct) % WARP);
        uint32_t       out[CODES / 2];

        if (i >= n)
            break;
#pragma unroll
        for (uint32_t c = 0; c < CODES; c += 2) {
            const float by[2] = { row < ct ? scale[c] : vs, row < ct ? scale[c + 1] : vs };
            const float on[2] = { row < ct ? min[c] : vm, row < ct ? min[c + 1] : vm };

            out[c / 2] = unpack_pair(w.word[i] >> (BITS * c), BITS, by, on);
        }
        uint8_t *to = p.dst + (uint64_t)row * s.raw_row + lane % s.lanes * (2 * CODES);
#pragma unroll
        for (uint32_t c = 0; c < CODES / 2; c += 2)
            *(uint2 *)(to + 4 * c) = make_uint2(out[c], out[c + 1]);
    }
}

/* One record; with more words than are taken at once it is not taken whole before it is written. */
template <bool INT8>
static __device__ __forceinline__ void unpack_one(const record_shape &s, const unpack_place &p)
{
    for (uint32_t first = 0; first < s.packed / (4 * WARP); first += UNPACK_WORDS) {
        unpack_words<INT8> w;

        unpack_load(s, p, first, &w);
        __syncwarp();
        unpack_store(s, p, first, w);
    }
}

/* Two records; what the second needs is asked for before the first is written. */
template <bool INT8>
static __device__ __forceinline__ void unpack_two(const record_shape &s, const unpack_place &p,
                                                  const unpack_place &q)
{
    for (uint32_t first = 0; first < s.packed / (4 * WARP); first += UNPACK_WORDS) {
        unpack_words<INT8> v, w;

        unpack_load(s, p, first, &v);
        unpack_load(s, q, first, &w);
        unpack_store(s, p, first, v);
        unpack_store(s, q, first, w);
    }
}

/* One warp, any record; packed: s.packed bytes of shared memory. */
static __device__ __forceinline__ void unpack_place_one(const record_shape &s,
                                                        const unpack_place &p, uint8_t *packed)
{
    if (!unpack_by_words(s, p))
        unpack_record(s, p.chunk, p.src, p.param, p.dst, packed);
    else if (s.f.type == KVD_RECORD_INT8)
        unpack_one<true>(s, p);
    else
        unpack_one<false>(s, p);
}
static __device__ __forceinline__ void unpack_place_two(const record_shape &s,
                                                        const unpack_place &p,
                                                        const unpack_place &q, uint8_t *packed)
{
    if (!unpack_by_words(s, p) || !unpack_by_words(s, q)) {
        unpack_record(s, p.chunk, p.src, p.param, p.dst, packed);
        unpack_record(s, q.chunk, q.src, q.param, q.dst, packed);
    } else if (s.f.type == KVD_RECORD_INT8) {
        unpack_two<true>(s, p, q);
    } else {
        unpack_two<false>(s, p, q);
    }
}

#endif
