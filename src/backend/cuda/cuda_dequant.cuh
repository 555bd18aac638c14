/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_dequant.cuh - one device function per weight type: a row taken apart by a warp.
 *
 * A warp walks a row in steps of CUDA_DQ_STEP elements; in each, a lane gets 16 elements as four
 * quads of neighbours: quad j begins at element base(lane) + off(j) of the step.  Which elements a
 * lane gets is chosen so that the warp's loads are contiguous.  get() loads and dequantises a
 * lane's elements of the step at p; left is how many elements the row has from there on, and those
 * past its end are 0.  Quantised types have ints() below instead, of which get() is made.
 * A: the alignment rule holds (see cuda_dq_aligned), so loads are as wide as the format allows;
 * otherwise they go byte by byte.  Formats: base/dtype_blocks.h. */
#ifndef KVD_CUDA_DEQUANT_CUH
#define KVD_CUDA_DEQUANT_CUH

#include "backend/cuda/cuda_impl.h"

#define CUDA_DQ_STEP 512u

/* Whether wide loads may be used: floats need whole quads (octets) of 16 bytes, blocks their
 * own natural alignment. */
static inline bool cuda_dq_aligned(const kvd_weight *w)
{
    const uintptr_t bits = (uintptr_t)w->data | (uintptr_t)w->row_bytes;

    switch (w->type) {
    case KVD_DTYPE_F32:
        return bits % 16 == 0 && w->n_col % 4 == 0;
    case KVD_DTYPE_F16:
    case KVD_DTYPE_BF16:
        return bits % 16 == 0 && w->n_col % 8 == 0;
    case KVD_DTYPE_Q4_K:
    case KVD_DTYPE_Q5_K:
        return bits % 16 == 0;
    case KVD_DTYPE_Q4_1:
    case KVD_DTYPE_Q5_1:
    case KVD_DTYPE_Q2_K:
        return bits % 4 == 0;
    default:
        return bits % 2 == 0;
    }
}

/* ---- loads that leave the first-level cache to the activations ------------------------- */

template <bool A> static __device__ __forceinline__ uint32_t dq_u8(const uint8_t *p)
{
    return __ldg(p);
}
template <bool A> static __device__ __forceinline__ uint32_t dq_u16(const uint8_t *p)
{
    if (A)
        return __ldg((const uint16_t *)p);
    return __ldg(p) | (uint32_t)__ldg(p + 1) << 8;
}
/* From an even address. */
template <bool A> static __device__ __forceinline__ uint32_t dq_u32_of_u16(const uint8_t *p)
{
    return dq_u16<A>(p) | dq_u16<A>(p + 2) << 16;
}
template <bool A> static __device__ __forceinline__ uint32_t dq_u32(const uint8_t *p)
{
    if (A)
        return __ldg((const uint32_t *)p);
    return dq_u32_of_u16<false>(p);
}
template <bool A> static __device__ __forceinline__ uint2 dq_u64(const uint8_t *p)
{
    if (A)
        return __ldg((const uint2 *)p);
    return make_uint2(dq_u32<false>(p), dq_u32<false>(p + 4));
}
static __device__ __forceinline__ uint4 dq_u128(const uint8_t *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

static __device__ __forceinline__ float dq_f16(uint32_t bits)
{
    return __half2float(__ushort_as_half((unsigned short)bits));
}
template <kvd_dtype T, bool A> struct cuda_dq;

/* ---- floats ------------------------------------------------------------------------ */

template <bool A> struct cuda_dq<KVD_DTYPE_F32, A> {
    static constexpr uint32_t                  step_bytes = 2048;
    static __device__ __forceinline__ uint32_t base(uint32_t lane)
    {
        return 4 * lane;
    }
    static __host__ __device__ constexpr uint32_t off(uint32_t j)
    {
        return 128 * j;
    }
    static __device__ __forceinline__ void get(const uint8_t *p, uint32_t left, uint32_t lane,
                                               float *w)
    {
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t e = base(lane) + off(j);
            if (A && e < left) {
                const uint4 v = dq_u128(p + 4ull * e);
                w[4 * j]      = __uint_as_float(v.x);
                w[4 * j + 1]  = __uint_as_float(v.y);
                w[4 * j + 2]  = __uint_as_float(v.z);
                w[4 * j + 3]  = __uint_as_float(v.w);
                continue;
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                w[4 * j + i] =
                    !A && e + i < left ? __uint_as_float(dq_u32<false>(p + 4ull * (e + i))) : 0.0f;
        }
    }
};

template <bool BF16> static __device__ __forceinline__ float dq_half(uint32_t bits)
{
    return BF16 ? __uint_as_float(bits << 16) : dq_f16(bits);
}
template <bool BF16> static __device__ __forceinline__ void dq_half2(uint32_t word, float *w)
{
    if (BF16) {
        w[0] = __uint_as_float(word << 16);
        w[1] = __uint_as_float(word & 0xffff0000u);
    } else {
        w[0] = dq_f16(word & 0xffffu);
        w[1] = dq_f16(word >> 16);
    }
}

template <bool BF16, bool A> struct cuda_dq_half {
    static constexpr uint32_t                  step_bytes = 1024;
    static __device__ __forceinline__ uint32_t base(uint32_t lane)
    {
        return 8 * lane;
    }
    static __host__ __device__ constexpr uint32_t off(uint32_t j)
    {
        return 256 * (j / 2) + 4 * (j % 2);
    }
    static __device__ __forceinline__ void get(const uint8_t *p, uint32_t left, uint32_t lane,
                                               float *w)
    {
#pragma unroll
        for (uint32_t j = 0; j < 2; j++) {
            const uint32_t e = base(lane) + off(2 * j);
            if (A && e < left) {
                const uint4 v = dq_u128(p + 2ull * e);
                dq_half2<BF16>(v.x, w + 8 * j);
                dq_half2<BF16>(v.y, w + 8 * j + 2);
                dq_half2<BF16>(v.z, w + 8 * j + 4);
                dq_half2<BF16>(v.w, w + 8 * j + 6);
                continue;
            }
#pragma unroll
            for (uint32_t i = 0; i < 8; i++)
                w[8 * j + i] =
                    !A && e + i < left ? dq_half<BF16>(dq_u16<false>(p + 2ull * (e + i))) : 0.0f;
        }
    }
};
template <bool A> struct cuda_dq<KVD_DTYPE_F16, A> : cuda_dq_half<false, A> {
};
template <bool A> struct cuda_dq<KVD_DTYPE_BF16, A> : cuda_dq_half<true, A> {
};

/* ---- quantised types: integers, and the line that makes values of them -------------------- */

/* Sixteen elements: byte i of q[j] is element i of quad j, whose value is scale[j] * q + min[j]. */
struct cuda_dq_ints {
    uint32_t q[4]; /* signed bytes */
    float    scale[4], min[4];
};

/* The function of a type is ints(); floats are made of its result. */
template <typename D> struct cuda_dq_floats {
    static __device__ __forceinline__ void get(const uint8_t *p, uint32_t left, uint32_t lane,
                                               float *w)
    {
        cuda_dq_ints v;

        D::ints(p, left, lane, v);
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[4 * j + i] = fmaf(v.scale[j], (float)(int)(int8_t)(v.q[j] >> (8 * i)), v.min[j]);
        }
    }
};

static __device__ __forceinline__ void dq_none(cuda_dq_ints &v, int first, int n)
{
#pragma unroll
    for (int j = first; j < first + n; j++) {
        v.q[j]     = 0;
        v.scale[j] = v.min[j] = 0.0f;
    }
}

/* ---- blocks of 32 -------------------------------------------------------------------- */

template <bool A> struct cuda_dq<KVD_DTYPE_Q8_0, A> : cuda_dq_floats<cuda_dq<KVD_DTYPE_Q8_0, A>> {
    static constexpr uint32_t                  step_bytes = 16 * sizeof(kvd_block_q8_0);
    static __device__ __forceinline__ uint32_t base(uint32_t lane)
    {
        return 8 * lane;
    }
    static __host__ __device__ constexpr uint32_t off(uint32_t j)
    {
        return 256 * (j / 2) + 4 * (j % 2);
    }
    static __device__ __forceinline__ void ints(const uint8_t *p, uint32_t left, uint32_t lane,
                                                cuda_dq_ints &v)
    {
        dq_none(v, 0, 4);
#pragma unroll
        for (uint32_t j = 0; j < 4; j += 2) {
            const uint32_t e = base(lane) + off(j);
            const uint8_t *b = p + e / 32 * sizeof(kvd_block_q8_0);

            if (e >= left)
                continue;
            v.scale[j] = v.scale[j + 1] = dq_f16(dq_u16<A>(b));
            v.q[j]                      = dq_u32_of_u16<A>(b + 2 + e % 32);
            v.q[j + 1]                  = dq_u32_of_u16<A>(b + 6 + e % 32);
        }
    }
};

/* Four bits of a word's bytes become bit 4 of them: bit i of n of byte i. */
static __device__ __forceinline__ uint32_t dq_spread4(uint32_t n)
{
    return ((n & 15u) * 0x00204081u & 0x01010101u) << 4;
}

/* Q4_0, Q4_1, Q5_0, Q5_1: BYTES of block, M: has a minimum, H: has fifth bits. */
template <uint32_t BYTES, bool M, bool H, bool A>
struct cuda_dq_nibble : cuda_dq_floats<cuda_dq_nibble<BYTES, M, H, A>> {
    static constexpr uint32_t                  step_bytes = 16 * BYTES;
    static __device__ __forceinline__ uint32_t base(uint32_t lane)
    {
        return lane / 4 * 32 + lane % 4 * 4;
    }
    static __host__ __device__ constexpr uint32_t off(uint32_t j)
    {
        return 256 * (j / 2) + 16 * (j % 2);
    }
    static __device__ __forceinline__ void ints(const uint8_t *p, uint32_t left, uint32_t lane,
                                                cuda_dq_ints &v)
    {
        const uint32_t qs = (M ? 4 : 2) + (H ? 4 : 0) + lane % 4 * 4;

        dq_none(v, 0, 4);
#pragma unroll
        for (uint32_t j = 0; j < 4; j += 2) {
            const uint32_t e = base(lane) + off(j);
            const uint8_t *b = p + e / 32 * BYTES;

            if (e >= left)
                continue;
            const float    d = dq_f16(dq_u16<A>(b));
            const uint32_t q = M ? dq_u32<A>(b + qs) : dq_u32_of_u16<A>(b + qs);
            v.q[j]           = q & 0x0f0f0f0fu;
            v.q[j + 1]       = q >> 4 & 0x0f0f0f0fu;
            if (H) {
                const uint32_t h = M ? dq_u32<A>(b + 4) : dq_u32_of_u16<A>(b + 2);
                v.q[j] |= dq_spread4(h >> (lane % 4 * 4));
                v.q[j + 1] |= dq_spread4(h >> (lane % 4 * 4 + 16));
            }
            v.scale[j] = v.scale[j + 1] = d;
            v.min[j] = v.min[j + 1] = M ? dq_f16(dq_u16<A>(b + 2)) : -(H ? 16.0f : 8.0f) * d;
        }
    }
};
template <bool A> struct cuda_dq<KVD_DTYPE_Q4_0, A> : cuda_dq_nibble<18, false, false, A> {
};
template <bool A> struct cuda_dq<KVD_DTYPE_Q4_1, A> : cuda_dq_nibble<20, true, false, A> {
};
template <bool A> struct cuda_dq<KVD_DTYPE_Q5_0, A> : cuda_dq_nibble<22, false, true, A> {
};
template <bool A> struct cuda_dq<KVD_DTYPE_Q5_1, A> : cuda_dq_nibble<24, true, true, A> {
};

/* ---- blocks of 256: sixteen lanes share one -------------------------------------------- */

/* Scale and minimum numbers 2 g and 2 g + 1 of a q4_k or q5_k block (see kvd_q4_k_scales()), g < 4:
 * bytes 0 and 1 of each word. */
static __device__ __forceinline__ void dq_k4_scales(const uint32_t sc[3], uint32_t g,
                                                    uint32_t *scale, uint32_t *min)
{
    const uint32_t sh = 16 * (g & 1), low = sc[0] >> sh, mid = sc[1] >> sh, top = sc[2] >> sh;

    if (g < 2) {
        *scale = low & 0x3f3fu;
        *min   = mid & 0x3f3fu;
    } else {
        *scale = (top & 0x0f0fu) | (low >> 2 & 0x3030u);
        *min   = (top >> 4 & 0x0f0fu) | (mid >> 2 & 0x3030u);
    }
}

template <bool H, bool A> struct cuda_dq_k45 : cuda_dq_floats<cuda_dq_k45<H, A>> {
    static constexpr uint32_t step_bytes =
        2 * (H ? sizeof(kvd_block_q5_k) : sizeof(kvd_block_q4_k));
    static __device__ __forceinline__ uint32_t base(uint32_t lane)
    {
        return lane / 16 * 256 + lane % 16 / 4 * 64 + lane % 4 * 8;
    }
    static __host__ __device__ constexpr uint32_t off(uint32_t j)
    {
        return 32 * (j / 2) + 4 * (j % 2);
    }
    static __device__ __forceinline__ void ints(const uint8_t *p, uint32_t left, uint32_t lane,
                                                cuda_dq_ints &v)
    {
        const uint32_t k = lane % 16, g = k / 4; /* eight bytes: eight low, eight high */
        const uint8_t *b = p + lane / 16 * (step_bytes / 2);
        uint32_t       scale, min;

        if (lane / 16 * 256 >= left) {
            dq_none(v, 0, 4);
            return;
        }
        const uint4 head =
            A ? __ldg((const uint4 *)b)
              : make_uint4(dq_u32<A>(b), dq_u32<A>(b + 4), dq_u32<A>(b + 8), dq_u32<A>(b + 12));
        const uint32_t sc[3] = { head.y, head.z, head.w };
        const uint2    q     = dq_u64<A>(b + (H ? 48 : 16) + 8 * k);
        const float    d = dq_f16(head.x & 0xffffu), dmin = -dq_f16(head.x >> 16);

        dq_k4_scales(sc, g, &scale, &min);
        v.q[0] = q.x & 0x0f0f0f0fu;
        v.q[1] = q.y & 0x0f0f0f0fu;
        v.q[2] = q.x >> 4 & 0x0f0f0f0fu;
        v.q[3] = q.y >> 4 & 0x0f0f0f0fu;
        if (H) {
            const uint2    h = dq_u64<A>(b + 16 + 8 * (k % 4));
            const uint32_t x = h.x >> (2 * g), y = h.y >> (2 * g);
            v.q[0] |= (x & 0x01010101u) << 4;
            v.q[1] |= (y & 0x01010101u) << 4;
            v.q[2] |= (x & 0x02020202u) << 3;
            v.q[3] |= (y & 0x02020202u) << 3;
        }
        v.scale[0] = v.scale[1] = d * (float)(scale & 0xffu);
        v.scale[2] = v.scale[3] = d * (float)(scale >> 8 & 0xffu);
        v.min[0] = v.min[1] = dmin * (float)(min & 0xffu);
        v.min[2] = v.min[3] = dmin * (float)(min >> 8 & 0xffu);
    }
};
template <bool A> struct cuda_dq<KVD_DTYPE_Q4_K, A> : cuda_dq_k45<false, A> {
};
template <bool A> struct cuda_dq<KVD_DTYPE_Q5_K, A> : cuda_dq_k45<true, A> {
};

template <bool A> struct cuda_dq<KVD_DTYPE_Q6_K, A> : cuda_dq_floats<cuda_dq<KVD_DTYPE_Q6_K, A>> {
    static constexpr uint32_t                  step_bytes = 2 * sizeof(kvd_block_q6_k);
    static __device__ __forceinline__ uint32_t base(uint32_t lane)
    {
        return lane / 16 * 256 + lane % 16 / 8 * 128 + lane % 8 * 8;
    }
    static __host__ __device__ constexpr uint32_t off(uint32_t j)
    {
        return 64 * (j / 2) + 4 * (j % 2);
    }
    static __device__ __forceinline__ void ints(const uint8_t *p, uint32_t left, uint32_t lane,
                                                cuda_dq_ints &v)
    {
        const uint32_t k = lane % 16, h = k / 8, q = k % 8;
        const uint8_t *b = p + lane / 16 * (step_bytes / 2);

        dq_none(v, 0, 4);
        if (lane / 16 * 256 >= left)
            return;
        const float d  = dq_f16(dq_u16<A>(b + 208));
        const float lo = d * (float)(int)(int8_t)dq_u8<A>(b + 192 + 8 * h + q / 2);
        const float hi = d * (float)(int)(int8_t)dq_u8<A>(b + 192 + 8 * h + 4 + q / 2);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t ql = dq_u32_of_u16<A>(b + 64 * h + 8 * q + 4 * i);
            const uint32_t qh =
                dq_u32_of_u16<A>(b + 128 + 32 * h + 8 * (q % 4) + 4 * i) >> (2 * (q / 4));

            v.q[i]         = __vsub4((ql & 0x0f0f0f0fu) | (qh & 0x03030303u) << 4, 0x20202020u);
            v.q[2 + i]     = __vsub4((ql >> 4 & 0x0f0f0f0fu) | (qh & 0x30303030u), 0x20202020u);
            v.scale[i]     = lo;
            v.scale[2 + i] = hi;
        }
    }
};

template <bool A> struct cuda_dq<KVD_DTYPE_Q2_K, A> : cuda_dq_floats<cuda_dq<KVD_DTYPE_Q2_K, A>> {
    static constexpr uint32_t                  step_bytes = 2 * sizeof(kvd_block_q2_k);
    static __device__ __forceinline__ uint32_t base(uint32_t lane)
    {
        return lane / 16 * 256 + lane % 16 / 8 * 128 + lane % 8 * 4;
    }
    static __host__ __device__ constexpr uint32_t off(uint32_t j)
    {
        return 32 * j;
    }
    static __device__ __forceinline__ void ints(const uint8_t *p, uint32_t left, uint32_t lane,
                                                cuda_dq_ints &v)
    {
        const uint32_t k = lane % 16, h = k / 8, l = k % 8 * 4;
        const uint8_t *b = p + lane / 16 * (step_bytes / 2);

        if (lane / 16 * 256 >= left) {
            dq_none(v, 0, 4);
            return;
        }
        const uint32_t q = dq_u32<A>(b + 16 + 4 * k), dm = dq_u32<A>(b + 80);
        const float    d = dq_f16(dm & 0xffffu), dmin = -dq_f16(dm >> 16);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t s = dq_u8<A>(b + 8 * h + 2 * j + l / 16);

            v.q[j]     = q >> (2 * j) & 0x03030303u;
            v.scale[j] = d * (float)(s & 15u);
            v.min[j]   = dmin * (float)(s >> 4);
        }
    }
};

/* Scale number i of a q3_k block: see kvd_q3_k_scales(). */
template <bool A> static __device__ __forceinline__ int dq_k3_scale(const uint8_t *sc, uint32_t i)
{
    const uint32_t low  = i < 8 ? dq_u8<A>(sc + i) & 15u : dq_u8<A>(sc + i - 8) >> 4;
    const uint32_t high = dq_u8<A>(sc + 8 + i % 4) >> (2 * (i / 4)) & 3u;

    return (int)(low | high << 4);
}

template <bool A> struct cuda_dq<KVD_DTYPE_Q3_K, A> : cuda_dq_floats<cuda_dq<KVD_DTYPE_Q3_K, A>> {
    static constexpr uint32_t                  step_bytes = 2 * sizeof(kvd_block_q3_k);
    static __device__ __forceinline__ uint32_t base(uint32_t lane)
    {
        return lane / 16 * 256 + lane % 16 / 8 * 128 + lane % 8 * 4;
    }
    static __host__ __device__ constexpr uint32_t off(uint32_t j)
    {
        return 32 * j;
    }
    static __device__ __forceinline__ void ints(const uint8_t *p, uint32_t left, uint32_t lane,
                                                cuda_dq_ints &v)
    {
        const uint32_t k = lane % 16, h = k / 8, l = k % 8 * 4;
        const uint8_t *b = p + lane / 16 * (step_bytes / 2);

        dq_none(v, 0, 4);
        if (lane / 16 * 256 >= left)
            return;
        const uint32_t q = dq_u32_of_u16<A>(b + 32 + 4 * k);
        const uint32_t m = ~dq_u32_of_u16<A>(b + l) >> (4 * h); /* set: subtract 4 */
        const float    d = dq_f16(dq_u16<A>(b + 108));
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            v.scale[j] = d * (float)(dq_k3_scale<A>(b + 96, 8 * h + 2 * j + l / 16) - 32);
            v.q[j]     = __vsub4(q >> (2 * j) & 0x03030303u, (m >> j & 0x01010101u) << 2);
        }
    }
};

/* The element of a row where quad j of a lane begins in a step. */
template <kvd_dtype T>
static __device__ __forceinline__ uint32_t cuda_dq_at(uint32_t step, uint32_t lane, uint32_t j)
{
    return step * CUDA_DQ_STEP + cuda_dq<T, true>::base(lane) + cuda_dq<T, true>::off(j);
}

/* Floats of a lane in a step of a row. */
template <kvd_dtype T, bool A>
static __device__ __forceinline__ void cuda_dq_get(const uint8_t *row, uint32_t n_col,
                                                   uint32_t step, uint32_t lane, float *w)
{
    cuda_dq<T, A>::get(row + (uint64_t)step * cuda_dq<T, A>::step_bytes,
                       n_col - step * CUDA_DQ_STEP, lane, w);
}

/* Calls f with the type as a template argument: f.template operator()<T>(). */
template <typename F> static inline void cuda_dq_visit(kvd_dtype type, F f)
{
    switch (type) {
#define CUDA_DQ_CASE(t)                         \
    case KVD_DTYPE_##t:                         \
        f.template operator()<KVD_DTYPE_##t>(); \
        break;
        CUDA_DQ_CASE(F32)
        CUDA_DQ_CASE(F16)
        CUDA_DQ_CASE(BF16)
        CUDA_DQ_CASE(Q4_0)
        CUDA_DQ_CASE(Q4_1)
        CUDA_DQ_CASE(Q5_0)
        CUDA_DQ_CASE(Q5_1)
        CUDA_DQ_CASE(Q8_0)
        CUDA_DQ_CASE(Q2_K)
        CUDA_DQ_CASE(Q3_K)
        CUDA_DQ_CASE(Q4_K)
        CUDA_DQ_CASE(Q5_K)
        CUDA_DQ_CASE(Q6_K)
#undef CUDA_DQ_CASE
    }
}

#endif
