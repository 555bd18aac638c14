/* SPDX-License-Identifier: Apache-2.0 */
/* half.h - IEEE binary16 and bfloat16 to and from float, exact, portable.
 * Rounding is to nearest even; NaN stays NaN. */
#ifndef KVD_BASE_HALF_H
#define KVD_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float kvd_bits_to_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof(f));
    return f;
}
static inline uint32_t kvd_f32_to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    return u;
}

static inline float kvd_bf16_to_f32(uint16_t h)
{
    return kvd_bits_to_f32((uint32_t)h << 16);
}
static inline uint16_t kvd_f32_to_bf16(float f)
{
    uint32_t u = kvd_f32_to_bits(f);

    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40u); /* keep NaN, make it quiet */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float kvd_f16_to_f32(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exp  = (uint32_t)(h >> 10) & 0x1fu;
    const uint32_t man  = (uint32_t)h & 0x3ffu;

    if (exp == 0) /* zero and subnormals: man * 2^-24, exact in float */
        return kvd_bits_to_f32(sign | kvd_f32_to_bits((float)man * 0x1p-24f));
    if (exp == 31)
        return kvd_bits_to_f32(sign | 0x7f800000u | (man << 13));
    return kvd_bits_to_f32(sign | ((exp + 112u) << 23) | (man << 13));
}
static inline uint16_t kvd_f32_to_f16(float f)
{
    const uint32_t u    = kvd_f32_to_bits(f);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t mag  = u & 0x7fffffffu;

    if (mag >= 0x7f800000u)
        return (uint16_t)(sign | (mag > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (mag >= 0x477ff000u) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7c00u);
    if (mag < 0x38800000u) { /* subnormal: let the float adder round at 2^-24 */
        const float r = kvd_bits_to_f32(mag) + 0.5f;
        return (uint16_t)(sign | (kvd_f32_to_bits(r) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13));
}

#endif
