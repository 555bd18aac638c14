/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_types.cuh - quantised rows in shared memory, taken apart for tensor cores.
 *
 * A warp works on units of 256 columns.  Four lanes share a row; of each 32 columns lane c gets
 * columns 8 c to 8 c + 7, as two words of bytes q, with factors that bring their offsets and shifts
 * to where bytes are taken apart with the fewest instructions.  Scales of blocks of 256 are
 * integers, so that sums of several scales' columns can be; those of blocks of 32 are floats. COLS
 * columns of a block, BYTES of it BYTE   of q: signed or not SUBS   scales in 32 columns: 1, or 2,
 * the second of lanes 2 and 3 SHIFT  q of odd blocks of 32 is 2^SHIFT times that of the even ones
 *   MIN    0: none; 1: one for the 32; 2: one for each 16, as bytes
 * Type::unit is what a unit needs before its columns; of 256 columns with d and dmin, factors of q
 * (of odd blocks) and of minima.  codes() is block b of it (known at compile time, as are offsets);
 * scale() is number 4 j + i of scales, factor() and min() of block b or 4 j + i.  A unit begins on
 * a multiple of 16 bytes, or of 2 where a block of 256 has no better: those go by `odd`.  Formats:
 * base/dtype_blocks.h. */
#ifndef KVD_CUDA_GEMV_TYPES_CUH
#define KVD_CUDA_GEMV_TYPES_CUH

#include "backend/cuda/cuda_dequant.cuh"

#define TILE_UNIT 256u

enum tile_byte { TILE_S8, TILE_U8 };

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

/* Byte i of a word, signed. */
static __device__ __forceinline__ int tile_s8(uint32_t w, uint32_t i)
{
    return (int)(int8_t)(w >> (8 * i));
}

template <> struct tile_type<KVD_DTYPE_Q8_0> {
    static constexpr uint32_t  COLS = 32, BYTES = sizeof(kvd_block_q8_0), SUBS = 1, MIN = 0;
    static constexpr tile_byte BYTE = TILE_S8;
    struct unit {
        const uint8_t *p;
        __device__     __forceinline__ explicit unit(const uint8_t *at) : p(at)
        {
        }
    };
    static __device__ __forceinline__ void codes(const unit &u, uint32_t b, uint32_t c,
                                                 uint32_t q[2])
    {
        q[0] = tile_word(u.p, b * BYTES + 2, 2 * c);
        q[1] = tile_word(u.p, b * BYTES + 2, 2 * c + 1);
    }
    static __device__ __forceinline__ float factor(const unit &u, uint32_t b)
    {
        return dq_f16(tile_u16(u.p + b * BYTES));
    }
};

/* Q4_0, Q4_1, Q5_0, Q5_1: SIZE of block, M: has a minimum, H: has fifth bits.  Without a minimum
 * the largest bit stands at the top: turned over, it is a sign. */
template <uint32_t SIZE, bool M, bool H> struct tile_nibble {
    static constexpr uint32_t               COLS = 32, BYTES = SIZE, SUBS = 1, MIN = M ? 1 : 0;
    static constexpr tile_byte              BYTE = TILE_S8;
    typedef tile_type<KVD_DTYPE_Q8_0>::unit unit;
    static __device__ __forceinline__ void  codes(const unit &u, uint32_t b, uint32_t c,
                                                  uint32_t q[2])
    {
        const uint32_t at = b * BYTES;
        const uint32_t h  = H ? tile_word(u.p, at + (M ? 4 : 2), 0) >> (8 * c) : 0;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t w = tile_word(u.p, at + (M ? 4 : 2) + (H ? 4 : 0), c % 2 * 2 + i);
            const uint32_t f = H ? dq_spread4(h >> (4 * i)) : 0;

            if (M)
                q[i] = (w >> (c / 2 * 4) & 0x0f0f0f0fu) | f;
            else if (H)
                q[i] = (((c < 2 ? w << 3 : w >> 1) & 0x78787878u) | f << 3) ^ 0x80808080u;
            else
                q[i] = (w << (4 - c / 2 * 4) & 0xf0f0f0f0u) ^ 0x80808080u;
        }
    }
    static __device__ __forceinline__ float factor(const unit &u, uint32_t b)
    {
        return dq_f16(tile_u16(u.p + b * BYTES)) * (M ? 1.0f : H ? 0.125f : 0.0625f);
    }
    static __device__ __forceinline__ float min(const unit &u, uint32_t b)
    {
        return dq_f16(tile_u16(u.p + b * BYTES + 2));
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

/* Q4_K, Q5_K (H: has fifth bits).  Of the former the high nibbles stay where they are. */
template <bool H> struct tile_k45 {
    static constexpr uint32_t  COLS = 256, SUBS = 1, MIN = 1, SHIFT = H ? 0 : 4;
    static constexpr uint32_t  BYTES = H ? sizeof(kvd_block_q5_k) : sizeof(kvd_block_q4_k);
    static constexpr tile_byte BYTE  = TILE_U8;
    struct unit {
        const uint8_t *p;
        uint32_t       scales[2], mins[2]; /* eight bytes of each: see kvd_q4_k_scales() */
        float          d, dmin;
        __device__     __forceinline__ explicit unit(const uint8_t *at) : p(at)
        {
            const uint4 head = *(const uint4 *)at;
            scales[0]        = head.y & 0x3f3f3f3fu;
            mins[0]          = head.z & 0x3f3f3f3fu;
            scales[1]        = (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
            mins[1]          = (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
            d                = dq_f16(head.x & 0xffffu) / (float)(1u << SHIFT);
            dmin             = -dq_f16(head.x >> 16);
        }
    };
    static __device__ __forceinline__ void codes(const unit &u, uint32_t b, uint32_t c,
                                                 uint32_t q[2])
    {
        const uint2    w    = *(const uint2 *)(u.p + (H ? 48 : 16) + b / 2 * 32 + 8 * c);
        const uint32_t v[2] = { w.x, w.y };

        if (!H) {
            q[0] = v[0] & (b % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
            q[1] = v[1] & (b % 2 ? 0xf0f0f0f0u : 0x0f0f0f0fu);
            return;
        }
        const uint2    more = *(const uint2 *)(u.p + 16 + 8 * c);
        const uint32_t h[2] = { more.x, more.y };
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            q[i] = (v[i] >> (b % 2 * 4) & 0x0f0f0f0fu) |
                   ((b < 4 ? h[i] << (4 - b % 4) : h[i] >> (b % 4)) & 0x10101010u);
    }
    static __device__ __forceinline__ int scale(const unit &u, uint32_t j, uint32_t i)
    {
        return (int)(u.scales[j] >> (8 * i) & 0xffu);
    }
    static __device__ __forceinline__ int min(const unit &u, uint32_t j, uint32_t i)
    {
        return (int)(u.mins[j] >> (8 * i) & 0xffu);
    }
};
template <> struct tile_type<KVD_DTYPE_Q4_K> : tile_k45<false> {
};
template <> struct tile_type<KVD_DTYPE_Q5_K> : tile_k45<true> {
};

/* Six bits at the top of a byte, the largest turned over. */
template <> struct tile_type<KVD_DTYPE_Q6_K> {
    static constexpr uint32_t  COLS = 256, BYTES = sizeof(kvd_block_q6_k), SUBS = 2, MIN = 0;
    static constexpr uint32_t  SHIFT = 0;
    static constexpr tile_byte BYTE  = TILE_S8;
    struct unit {
        tile_odd   w;
        float      d;
        __device__ __forceinline__ explicit unit(const uint8_t *at) : w(at)
        {
            d = dq_f16(tile_u16(at + 208)) * 0.25f;
        }
    };
    static __device__ __forceinline__ void codes(const unit &u, uint32_t b, uint32_t c,
                                                 uint32_t q[2])
    {
        const uint32_t h = b / 4, j = b % 4;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t ql = u.w.at(16 * h + 8 * (j % 2) + 2 * c + i);
            const uint32_t qh = u.w.at(32 + 8 * h + 2 * c + i);

            q[i] = ((j < 2 ? ql << 2 : ql >> 2) & 0x3c3c3c3cu) |
                   ((qh << (6 - 2 * j) & 0xc0c0c0c0u) ^ 0x80808080u);
        }
    }
    static __device__ __forceinline__ int scale(const unit &u, uint32_t j, uint32_t i)
    {
        return tile_s8(u.w.at(48 + j), i);
    }
};

template <> struct tile_type<KVD_DTYPE_Q2_K> {
    static constexpr uint32_t  COLS = 256, BYTES = sizeof(kvd_block_q2_k), SUBS = 2, MIN = 2;
    static constexpr uint32_t  SHIFT = 0;
    static constexpr tile_byte BYTE  = TILE_S8;
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
    static __device__ __forceinline__ void codes(const unit &u, uint32_t b, uint32_t c,
                                                 uint32_t q[2])
    {
        q[0] = tile_word(u.p, 16 + 32 * (b / 4), 2 * c) >> (2 * (b % 4)) & 0x03030303u;
        q[1] = tile_word(u.p, 16 + 32 * (b / 4), 2 * c + 1) >> (2 * (b % 4)) & 0x03030303u;
    }
    static __device__ __forceinline__ int scale(const unit &u, uint32_t j, uint32_t i)
    {
        return (int)(tile_word(u.p, 4 * j, 0) >> (8 * i) & 15u);
    }
    static __device__ __forceinline__ void mins(const unit &u, uint32_t b, uint32_t c,
                                                uint32_t m[2])
    {
        const uint32_t s = tile_word(u.p, b / 2 * 4, 0) >> (16 * (b % 2) + c / 2 * 8 + 4);

        m[0] = m[1] = (s & 15u) * 0x01010101u;
    }
};

/* Three bits at the top of a byte, the largest turned over; so are scales, of six bits. */
template <> struct tile_type<KVD_DTYPE_Q3_K> {
    static constexpr uint32_t  COLS = 256, BYTES = sizeof(kvd_block_q3_k), SUBS = 2, MIN = 0;
    static constexpr uint32_t  SHIFT = 0;
    static constexpr tile_byte BYTE  = TILE_S8;
    struct unit {
        tile_odd   w;
        float      d;
        uint32_t   scales[4]; /* sixteen bytes: see kvd_q3_k_scales() */
        __device__ __forceinline__ explicit unit(const uint8_t *at) : w(at)
        {
            const uint32_t top = w.at(26);
            d                  = dq_f16(tile_u16(at + 108)) / (32.0f * 4.0f);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t low = w.at(24 + i % 2);
                scales[i]          = ((i < 2 ? low << 2 : low >> 2) & 0x3c3c3c3cu) |
                            ((top << (6 - 2 * i) & 0xc0c0c0c0u) ^ 0x80808080u);
            }
        }
    };
    static __device__ __forceinline__ void codes(const unit &u, uint32_t b, uint32_t c,
                                                 uint32_t q[2])
    {
        const uint32_t j = b % 4;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t low = u.w.at(8 + 8 * (b / 4) + 2 * c + i), h = u.w.at(2 * c + i);

            q[i] = ((j < 3 ? low << (5 - 2 * j) : low >> 1) & 0x60606060u) |
                   ((h << (7 - b) & 0x80808080u) ^ 0x80808080u);
        }
    }
    static __device__ __forceinline__ int scale(const unit &u, uint32_t j, uint32_t i)
    {
        return tile_s8(u.scales[j], i);
    }
};

#endif
