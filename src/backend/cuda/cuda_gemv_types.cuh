/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_types.cuh - quantised rows in shared memory, taken apart for tensor cores.
 *
 * A warp works on units of 256 columns.  Four lanes share a row; of each 32 columns lane c gets two
 * quads, columns 4 c and 16 + 4 c onwards.  The value of a column is scale * q + min.
 *   COLS  columns of a block, BYTES of it
 *   SUBS  scales in 32 columns: 1, or 2, of which the first is the first quads'
 *   MIN   0: none; 1: one for the 32, a float; 2: one for each 16, as a byte in all of m, times min
 * Type::unit is what a unit needs before its columns, get() is block b of it (known at compile
 * time, as are offsets).  A unit begins on a multiple of 16 bytes, or of 2 where a block of 256 has
 * no better: those go by `odd`.  Formats: base/dtype_blocks.h. */
#ifndef KVD_CUDA_GEMV_TYPES_CUH
#define KVD_CUDA_GEMV_TYPES_CUH

#include "backend/cuda/cuda_dequant.cuh"

#define TILE_UNIT 256u

struct tile_block {
    uint32_t q[2], m[2]; /* signed bytes */
    float    scale[2], min;
};

/* A word at a multiple of 2: off, which is known at compile time, decides how. */
static __device__ __forceinline__ uint32_t tile_word(const uint8_t *p, uint32_t off, uint32_t c)
{
    const uint32_t *w = (const uint32_t *)(p + off / 4 * 4) + c;

    return off % 4 ? __byte_perm(w[0], w[1], 0x5432) : w[0];
}
static __device__ __forceinline__ uint32_t tile_u16(const uint8_t *p)
{
    return *(const uint16_t *)p;
}

/* The same where p itself may lie 2 past a multiple of 4. */
struct tile_odd {
    const uint32_t *w;
    uint32_t        shift;

    __device__ __forceinline__ explicit tile_odd(const uint8_t *p)
    {
        const uint32_t odd = (uint32_t)(uintptr_t)p & 2u;

        w     = (const uint32_t *)(p - odd);
        shift = 8 * odd;
    }
    __device__ __forceinline__ uint32_t at(uint32_t i) const
    {
        return __funnelshift_r(w[i], w[i + 1], shift);
    }
};

template <kvd_dtype T> struct tile_type;

template <> struct tile_type<KVD_DTYPE_Q8_0> {
    static constexpr uint32_t COLS = 32, BYTES = sizeof(kvd_block_q8_0), SUBS = 1, MIN = 0;
    struct unit {
        const uint8_t *p;
        __device__     __forceinline__ explicit unit(const uint8_t *at) : p(at)
        {
        }
    };
    static __device__ __forceinline__ void get(const unit &u, uint32_t b, uint32_t c, tile_block &v)
    {
        const uint32_t at = b * BYTES;

        v.scale[0] = dq_f16(tile_u16(u.p + at));
        v.q[0]     = tile_word(u.p, at + 2, c);
        v.q[1]     = tile_word(u.p, at + 18, c);
    }
};

/* Q4_0, Q4_1, Q5_0, Q5_1: SIZE of block, M: has a minimum, H: has fifth bits.  Where a minimum is
 * not in the block it is taken off the integers. */
template <uint32_t SIZE, bool M, bool H> struct tile_nibble {
    static constexpr uint32_t               COLS = 32, BYTES = SIZE, SUBS = 1, MIN = M ? 1 : 0;
    typedef tile_type<KVD_DTYPE_Q8_0>::unit unit;
    static __device__ __forceinline__ void get(const unit &u, uint32_t b, uint32_t c, tile_block &v)
    {
        const uint32_t at = b * BYTES, q = tile_word(u.p, at + (M ? 4 : 2) + (H ? 4 : 0), c);

        v.q[0] = q & 0x0f0f0f0fu;
        v.q[1] = q >> 4 & 0x0f0f0f0fu;
        if (H) {
            const uint32_t h = tile_word(u.p, at + (M ? 4 : 2), 0) >> (4 * c);
            v.q[0] |= dq_spread4(h);
            v.q[1] |= dq_spread4(h >> 16);
        }
        if (!M) {
            v.q[0] = __vsub4(v.q[0], H ? 0x10101010u : 0x08080808u);
            v.q[1] = __vsub4(v.q[1], H ? 0x10101010u : 0x08080808u);
        }
        v.scale[0] = dq_f16(tile_u16(u.p + at));
        if (M)
            v.min = dq_f16(tile_u16(u.p + at + 2));
    }
};
template <> struct tile_type<KVD_DTYPE_Q4_0> : tile_nibble<18, false, false> {
};
template <> struct tile_type<KVD_DTYPE_Q4_1> : tile_nibble<20, true, false> {
};
template <> struct tile_type<KVD_DTYPE_Q5_0> : tile_nibble<22, false, true> {
};
template <> struct tile_type<KVD_DTYPE_Q5_1> : tile_nibble<24, true, true> {
};

/* Q4_K, Q5_K (H: has fifth bits). */
template <bool H> struct tile_k45 {
    static constexpr uint32_t COLS = 256, SUBS = 1, MIN = 1;
    static constexpr uint32_t BYTES = H ? sizeof(kvd_block_q5_k) : sizeof(kvd_block_q4_k);
    struct unit {
        const uint8_t *p;
        uint32_t       sc[3];
        float          d, dmin;
        __device__     __forceinline__ explicit unit(const uint8_t *at) : p(at)
        {
            const uint4 head = *(const uint4 *)at;
            sc[0]            = head.y;
            sc[1]            = head.z;
            sc[2]            = head.w;
            d                = dq_f16(head.x & 0xffffu);
            dmin             = -dq_f16(head.x >> 16);
        }
    };
    static __device__ __forceinline__ void get(const unit &u, uint32_t b, uint32_t c, tile_block &v)
    {
        const uint8_t *q  = u.p + (H ? 48 : 16) + b / 2 * 32;
        const uint32_t sh = b % 2 * 4;
        uint32_t       scale, min;

        dq_k4_scales(u.sc, b / 2, &scale, &min);
        v.q[0] = tile_word(q, 0, c) >> sh & 0x0f0f0f0fu;
        v.q[1] = tile_word(q, 16, c) >> sh & 0x0f0f0f0fu;
        if (H) {
            v.q[0] |= (tile_word(u.p, 16, c) >> b & 0x01010101u) << 4;
            v.q[1] |= (tile_word(u.p, 32, c) >> b & 0x01010101u) << 4;
        }
        v.scale[0] = u.d * (float)(scale >> (b % 2 * 8) & 0xffu);
        v.min      = u.dmin * (float)(min >> (b % 2 * 8) & 0xffu);
    }
};
template <> struct tile_type<KVD_DTYPE_Q4_K> : tile_k45<false> {
};
template <> struct tile_type<KVD_DTYPE_Q5_K> : tile_k45<true> {
};

template <> struct tile_type<KVD_DTYPE_Q6_K> {
    static constexpr uint32_t COLS = 256, BYTES = sizeof(kvd_block_q6_k), SUBS = 2, MIN = 0;
    struct unit {
        tile_odd   w;
        float      d;
        __device__ __forceinline__ explicit unit(const uint8_t *at) : w(at)
        {
            d = dq_f16(tile_u16(at + 208));
        }
    };
    static __device__ __forceinline__ void get(const unit &u, uint32_t b, uint32_t c, tile_block &v)
    {
        const uint32_t h = b / 4, j = b % 4, low = 16 * h + 8 * (j % 2) + c, high = 32 + 8 * h + c;
        const uint32_t sc = u.w.at(48 + b / 2) >> (16 * (b % 2));
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t ql = u.w.at(low + 4 * i) >> (4 * (j / 2));
            const uint32_t qh = u.w.at(high + 4 * i) >> (2 * j);

            v.q[i]     = __vsub4((ql & 0x0f0f0f0fu) | (qh & 0x03030303u) << 4, 0x20202020u);
            v.scale[i] = u.d * (float)(int)(int8_t)(sc >> (8 * i));
        }
    }
};

/* Scales and minima have 4 bits: the former go into the integers. */
template <> struct tile_type<KVD_DTYPE_Q2_K> {
    static constexpr uint32_t COLS = 256, BYTES = sizeof(kvd_block_q2_k), SUBS = 1, MIN = 2;
    struct unit {
        const uint8_t *p;
        float          d, dmin;
        __device__     __forceinline__ explicit unit(const uint8_t *at) : p(at)
        {
            const uint32_t dm = tile_word(at, 80, 0);
            d                 = dq_f16(dm & 0xffffu);
            dmin              = -dq_f16(dm >> 16);
        }
    };
    static __device__ __forceinline__ void get(const unit &u, uint32_t b, uint32_t c, tile_block &v)
    {
        const uint32_t s = tile_word(u.p, b / 2 * 4, 0) >> (16 * (b % 2));
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t q = tile_word(u.p, 16 + 32 * (b / 4) + 16 * i, c) >> (2 * (b % 4));

            v.q[i] = (q & 0x03030303u) * (s >> (8 * i) & 15u);
            v.m[i] = (s >> (8 * i + 4) & 15u) * 0x01010101u;
        }
        v.scale[0] = u.d;
        v.min      = u.dmin;
    }
};

template <> struct tile_type<KVD_DTYPE_Q3_K> {
    static constexpr uint32_t COLS = 256, BYTES = sizeof(kvd_block_q3_k), SUBS = 2, MIN = 0;
    struct unit {
        tile_odd   w;
        float      d;
        uint32_t   sc[3];
        __device__ __forceinline__ explicit unit(const uint8_t *at) : w(at)
        {
            d = dq_f16(tile_u16(at + 108));
#pragma unroll
            for (uint32_t i = 0; i < 3; i++)
                sc[i] = w.at(24 + i);
        }
    };
    /* See kvd_q3_k_scales(). */
    static __device__ __forceinline__ int scale(const unit &u, uint32_t i)
    {
        const uint32_t low  = u.sc[i / 4 % 2] >> (8 * (i % 4) + 4 * (i / 8)) & 15u;
        const uint32_t high = u.sc[2] >> (8 * (i % 4) + 2 * (i / 4)) & 3u;

        return (int)(low | high << 4) - 32;
    }
    static __device__ __forceinline__ void get(const unit &u, uint32_t b, uint32_t c, tile_block &v)
    {
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t q = u.w.at(8 + 8 * (b / 4) + 4 * i + c) >> (2 * (b % 4)) & 0x03030303u;
            const uint32_t m = ~u.w.at(4 * i + c) >> b & 0x01010101u; /* set: subtract 4 */

            v.q[i]     = __vsub4(q, m << 2);
            v.scale[i] = u.d * (float)scale(u, 2 * b + i);
        }
    }
};

#endif
