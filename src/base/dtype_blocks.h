/* SPDX-License-Identifier: Apache-2.0 */
/* dtype_blocks.h - the layouts of quantised blocks, as GGUF files store them (little endian).
 *
 * Every struct is packed, so it may lie at any address and sizeof is the file's block size.
 * f16 fields are raw bits for kvd_f16_to_f32().  "lo | hi << 4" below means: element i of the
 * first half in the low nibble of byte i, element i of the second half in the high one.
 *
 * Value of an element with quant q in sub-block s:
 *   Q8_0  d * q                      Q2_K  (d * sc[s]) * q - (dmin * mn[s])    16 sub-blocks of 16
 *   Q4_0  d * (q - 8)                Q3_K  (d * (sc[s] - 32)) * q              16 of 16
 *   Q5_0  d * (q - 16)               Q4_K  (d * sc[s]) * q - (dmin * mn[s])     8 of 32
 *   Q4_1, Q5_1  d * q + m            Q5_K  as Q4_K with a fifth bit             8 of 32
 *                                    Q6_K  (d * sc[s]) * (q - 32)              16 of 16
 * Compiles as C11 and C++17. */
#ifndef KVD_BASE_DTYPE_BLOCKS_H
#define KVD_BASE_DTYPE_BLOCKS_H

#include <stdint.h>

#if defined(__cplusplus)
#define KVD_BLOCK_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), "a file format")
#else
#define KVD_BLOCK_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "a file format")
#endif
#define KVD_PACKED __attribute__((packed))

#define KVD_BLOCK_SMALL 32  /* elements of a Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 block */
#define KVD_BLOCK_SUPER 256 /* elements of a Q?_K block */

typedef struct KVD_PACKED kvd_block_q8_0 {
    uint16_t d; /* f16 */
    int8_t   qs[32];
} kvd_block_q8_0;
KVD_BLOCK_SIZE(kvd_block_q8_0, 34);

typedef struct KVD_PACKED kvd_block_q4_0 {
    uint16_t d;      /* f16 */
    uint8_t  qs[16]; /* lo | hi << 4 */
} kvd_block_q4_0;
KVD_BLOCK_SIZE(kvd_block_q4_0, 18);

typedef struct KVD_PACKED kvd_block_q4_1 {
    uint16_t d, m;   /* f16 */
    uint8_t  qs[16]; /* lo | hi << 4 */
} kvd_block_q4_1;
KVD_BLOCK_SIZE(kvd_block_q4_1, 20);

typedef struct KVD_PACKED kvd_block_q5_0 {
    uint16_t d;      /* f16 */
    uint8_t  qh[4];  /* bit i of the little-endian word: fifth bit of element i */
    uint8_t  qs[16]; /* lo | hi << 4 */
} kvd_block_q5_0;
KVD_BLOCK_SIZE(kvd_block_q5_0, 22);

typedef struct KVD_PACKED kvd_block_q5_1 {
    uint16_t d, m;   /* f16 */
    uint8_t  qh[4];  /* as in q5_0 */
    uint8_t  qs[16]; /* lo | hi << 4 */
} kvd_block_q5_1;
KVD_BLOCK_SIZE(kvd_block_q5_1, 24);

typedef struct KVD_PACKED kvd_block_q2_k {
    uint8_t  scales[16]; /* of sub-block s: scale | min << 4 */
    uint8_t  qs[64];     /* element 128h + 32j + l: bits 2j of byte 32h + l */
    uint16_t d, dmin;    /* f16 */
} kvd_block_q2_k;
KVD_BLOCK_SIZE(kvd_block_q2_k, 84);

typedef struct KVD_PACKED kvd_block_q3_k {
    uint8_t  hmask[32];  /* bit 4h + j of byte l: 0 means subtract 4 from element 128h + 32j + l */
    uint8_t  qs[64];     /* low two bits, as in q2_k */
    uint8_t  scales[12]; /* 16 x 6 bits: see kvd_q3_k_scales() */
    uint16_t d;          /* f16 */
} kvd_block_q3_k;
KVD_BLOCK_SIZE(kvd_block_q3_k, 110);

typedef struct KVD_PACKED kvd_block_q4_k {
    uint16_t d, dmin;    /* f16 */
    uint8_t  scales[12]; /* 8 x (6-bit scale, 6-bit min): see kvd_q4_k_scales() */
    uint8_t  qs[128];    /* 64 elements in 32 bytes: lo | hi << 4 */
} kvd_block_q4_k;
KVD_BLOCK_SIZE(kvd_block_q4_k, 144);

typedef struct KVD_PACKED kvd_block_q5_k {
    uint16_t d, dmin;    /* f16 */
    uint8_t  scales[12]; /* as in q4_k */
    uint8_t  qh[32];     /* bit j of byte l: fifth bit of element 32j + l */
    uint8_t  qs[128];    /* as in q4_k */
} kvd_block_q5_k;
KVD_BLOCK_SIZE(kvd_block_q5_k, 176);

typedef struct KVD_PACKED kvd_block_q6_k {
    uint8_t  ql[128]; /* low four bits: 128 elements in 64 bytes, lo | hi << 4 */
    uint8_t  qh[64];  /* high two bits: element 128h + 32j + l: bits 2j of byte 32h + l */
    int8_t   scales[16];
    uint16_t d; /* f16 */
} kvd_block_q6_k;
KVD_BLOCK_SIZE(kvd_block_q6_k, 210);

/* The 16 scales of a q3_k block, each 0..63 (the value is scale - 32).  Low nibbles of bytes 0..7
 * hold the low four bits of scales 0..7, high nibbles those of 8..15; byte 8 + i%4 holds the high
 * two bits of scale i at bit 2 * (i / 4). */
static inline void kvd_q3_k_scales(const uint8_t packed[12], uint8_t scale[16])
{
    for (int i = 0; i < 16; i++) {
        const int low  = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
        const int high = (packed[8 + i % 4] >> (2 * (i / 4))) & 3;

        scale[i] = (uint8_t)(low | high << 4);
    }
}

/* The 8 scales and mins of a q4_k or q5_k block, each 0..63.  Bytes 0..3 and 4..7 hold scales and
 * mins 0..3 in their low six bits; for 4..7 the low four bits are the nibbles of bytes 8..11 and
 * the high two bits are the spare top bits of bytes 0..3 and 4..7. */
static inline void kvd_q4_k_scales(const uint8_t packed[12], uint8_t scale[8], uint8_t min[8])
{
    for (int i = 0; i < 4; i++) {
        scale[i]     = packed[i] & 63;
        min[i]       = packed[4 + i] & 63;
        scale[4 + i] = (uint8_t)((packed[8 + i] & 15) | (packed[i] >> 6) << 4);
        min[4 + i]   = (uint8_t)((packed[8 + i] >> 4) | (packed[4 + i] >> 6) << 4);
    }
}

#endif
