/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.c - the table of element types, and their reference dequantisers.
 *
 * These are the oracle of every faster kernel: each element is computed in float by exactly the
 * operations that dtype_blocks.h writes down, in that order, each rounded once (the file is built
 * with -ffp-contract=off).  Constant data only; any thread. */
#include "base/dtype.h"

#include <string.h>

#include "base/check.h"
#include "base/dtype_blocks.h"
#include "base/half.h"

typedef void (*dequant_fn)(const void *src, float *dst, uint64_t n_block);

/* ---- plain types ----------------------------------------------------------------- */

static void dequant_f32(const void *src, float *dst, uint64_t n_block)
{
    memcpy(dst, src, n_block * sizeof(float));
}

static void dequant_f16(const void *src, float *dst, uint64_t n_block)
{
    for (uint64_t i = 0; i < n_block; i++) {
        uint16_t h;

        memcpy(&h, (const uint8_t *)src + 2 * i, sizeof(h));
        dst[i] = kvd_f16_to_f32(h);
    }
}

static void dequant_bf16(const void *src, float *dst, uint64_t n_block)
{
    for (uint64_t i = 0; i < n_block; i++) {
        uint16_t h;

        memcpy(&h, (const uint8_t *)src + 2 * i, sizeof(h));
        dst[i] = kvd_bf16_to_f32(h);
    }
}

/* ---- blocks of 32 ---------------------------------------------------------------- */

static void dequant_q8_0(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q8_0 *b = src;

    for (; n_block; n_block--, b++) {
        const float d = kvd_f16_to_f32(b->d);

        for (int i = 0; i < 32; i++)
            *dst++ = d * (float)b->qs[i];
    }
}

static void dequant_q4_0(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q4_0 *b = src;

    for (; n_block; n_block--, b++, dst += 32) {
        const float d = kvd_f16_to_f32(b->d);

        for (int i = 0; i < 16; i++) {
            dst[i]      = d * (float)((b->qs[i] & 15) - 8);
            dst[i + 16] = d * (float)((b->qs[i] >> 4) - 8);
        }
    }
}

static void dequant_q4_1(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q4_1 *b = src;

    for (; n_block; n_block--, b++, dst += 32) {
        const float d = kvd_f16_to_f32(b->d), m = kvd_f16_to_f32(b->m);

        for (int i = 0; i < 16; i++) {
            dst[i]      = d * (float)(b->qs[i] & 15) + m;
            dst[i + 16] = d * (float)(b->qs[i] >> 4) + m;
        }
    }
}

/* The fifth bit of element i, in place. */
static int fifth_bit(const uint8_t qh[4], int i)
{
    return ((qh[i / 8] >> (i % 8)) & 1) << 4;
}

static void dequant_q5_0(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q5_0 *b = src;

    for (; n_block; n_block--, b++, dst += 32) {
        const float d = kvd_f16_to_f32(b->d);

        for (int i = 0; i < 16; i++) {
            dst[i]      = d * (float)(((b->qs[i] & 15) | fifth_bit(b->qh, i)) - 16);
            dst[i + 16] = d * (float)(((b->qs[i] >> 4) | fifth_bit(b->qh, i + 16)) - 16);
        }
    }
}

static void dequant_q5_1(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q5_1 *b = src;

    for (; n_block; n_block--, b++, dst += 32) {
        const float d = kvd_f16_to_f32(b->d), m = kvd_f16_to_f32(b->m);

        for (int i = 0; i < 16; i++) {
            dst[i]      = d * (float)((b->qs[i] & 15) | fifth_bit(b->qh, i)) + m;
            dst[i + 16] = d * (float)((b->qs[i] >> 4) | fifth_bit(b->qh, i + 16)) + m;
        }
    }
}

/* ---- super-blocks of 256 --------------------------------------------------------- */

static void dequant_q2_k(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q2_k *b = src;

    for (; n_block; n_block--, b++, dst += 256) {
        const float d = kvd_f16_to_f32(b->d), dmin = kvd_f16_to_f32(b->dmin);

        for (int i = 0; i < 256; i++) {
            const int   half = i / 128, j = i / 32 % 4, l = i % 32;
            const int   q     = (b->qs[32 * half + l] >> (2 * j)) & 3;
            const float scale = d * (float)(b->scales[i / 16] & 15);
            const float min   = dmin * (float)(b->scales[i / 16] >> 4);

            dst[i] = scale * (float)q - min;
        }
    }
}

static void dequant_q3_k(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q3_k *b = src;

    for (; n_block; n_block--, b++, dst += 256) {
        const float d = kvd_f16_to_f32(b->d);
        uint8_t     scale[16];

        kvd_q3_k_scales(b->scales, scale);
        for (int i = 0; i < 256; i++) {
            const int half = i / 128, j = i / 32 % 4, l = i % 32;
            const int low  = (b->qs[32 * half + l] >> (2 * j)) & 3;
            const int high = (b->hmask[l] >> (4 * half + j)) & 1;

            dst[i] = d * (float)(scale[i / 16] - 32) * (float)(low - (high ? 0 : 4));
        }
    }
}

static void dequant_q4_k(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q4_k *b = src;

    for (; n_block; n_block--, b++, dst += 256) {
        const float d = kvd_f16_to_f32(b->d), dmin = kvd_f16_to_f32(b->dmin);
        uint8_t     scale[8], min[8];

        kvd_q4_k_scales(b->scales, scale, min);
        for (int s = 0; s < 8; s++) {
            const float    ds = d * (float)scale[s], ms = dmin * (float)min[s];
            const uint8_t *q = b->qs + 32 * (s / 2);

            for (int l = 0; l < 32; l++)
                dst[32 * s + l] = ds * (float)((q[l] >> (4 * (s % 2))) & 15) - ms;
        }
    }
}

static void dequant_q5_k(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q5_k *b = src;

    for (; n_block; n_block--, b++, dst += 256) {
        const float d = kvd_f16_to_f32(b->d), dmin = kvd_f16_to_f32(b->dmin);
        uint8_t     scale[8], min[8];

        kvd_q4_k_scales(b->scales, scale, min);
        for (int s = 0; s < 8; s++) {
            const float    ds = d * (float)scale[s], ms = dmin * (float)min[s];
            const uint8_t *q = b->qs + 32 * (s / 2);

            for (int l = 0; l < 32; l++) {
                const int low  = (q[l] >> (4 * (s % 2))) & 15;
                const int high = (b->qh[l] >> s) & 1;

                dst[32 * s + l] = ds * (float)(low | high << 4) - ms;
            }
        }
    }
}

static void dequant_q6_k(const void *src, float *dst, uint64_t n_block)
{
    const kvd_block_q6_k *b = src;

    for (; n_block; n_block--, b++, dst += 256) {
        const float d = kvd_f16_to_f32(b->d);

        for (int i = 0; i < 256; i++) {
            const int half = i / 128, j = i / 32 % 4, l = i % 32;
            const int low  = (b->ql[64 * half + 32 * (j % 2) + l] >> (4 * (j / 2))) & 15;
            const int high = (b->qh[32 * half + l] >> (2 * j)) & 3;

            dst[i] = d * (float)b->scales[i / 16] * (float)((low | high << 4) - 32);
        }
    }
}

/* ---- tables ---------------------------------------------------------------------- */

typedef struct dtype_row {
    kvd_dtype_info info;
    dequant_fn     dequant;
} dtype_row;

static const dtype_row dtypes[] = {
    { { KVD_DTYPE_F32, "F32", 1, 4 }, dequant_f32 },
    { { KVD_DTYPE_F16, "F16", 1, 2 }, dequant_f16 },
    { { KVD_DTYPE_Q4_0, "Q4_0", 32, sizeof(kvd_block_q4_0) }, dequant_q4_0 },
    { { KVD_DTYPE_Q4_1, "Q4_1", 32, sizeof(kvd_block_q4_1) }, dequant_q4_1 },
    { { KVD_DTYPE_Q5_0, "Q5_0", 32, sizeof(kvd_block_q5_0) }, dequant_q5_0 },
    { { KVD_DTYPE_Q5_1, "Q5_1", 32, sizeof(kvd_block_q5_1) }, dequant_q5_1 },
    { { KVD_DTYPE_Q8_0, "Q8_0", 32, sizeof(kvd_block_q8_0) }, dequant_q8_0 },
    { { KVD_DTYPE_Q2_K, "Q2_K", 256, sizeof(kvd_block_q2_k) }, dequant_q2_k },
    { { KVD_DTYPE_Q3_K, "Q3_K", 256, sizeof(kvd_block_q3_k) }, dequant_q3_k },
    { { KVD_DTYPE_Q4_K, "Q4_K", 256, sizeof(kvd_block_q4_k) }, dequant_q4_k },
    { { KVD_DTYPE_Q5_K, "Q5_K", 256, sizeof(kvd_block_q5_k) }, dequant_q5_k },
    { { KVD_DTYPE_Q6_K, "Q6_K", 256, sizeof(kvd_block_q6_k) }, dequant_q6_k },
    { { KVD_DTYPE_BF16, "BF16", 1, 2 }, dequant_bf16 },
};
_Static_assert(KVD_COUNTOF(dtypes) == KVD_DTYPE_COUNT, "one row for each type");

/* Names by file id, also of types we do not read and of types the format has dropped. */
static const char *const dtype_names[] = {
    "F32",   "F16",        "Q4_0",       "Q4_1",       "Q4_2",     "Q4_3",     "Q5_0",
    "Q5_1",  "Q8_0",       "Q8_1",       "Q2_K",       "Q3_K",     "Q4_K",     "Q5_K",
    "Q6_K",  "Q8_K",       "IQ2_XXS",    "IQ2_XS",     "IQ3_XXS",  "IQ1_S",    "IQ4_NL",
    "IQ3_S", "IQ2_S",      "IQ4_XS",     "I8",         "I16",      "I32",      "I64",
    "F64",   "IQ1_M",      "BF16",       "Q4_0_4_4",   "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",
    "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",    "NVFP4",    "Q1_0",
    "Q2_0",
};

static const dtype_row *dtype_find(uint32_t id)
{
    for (size_t i = 0; i < KVD_COUNTOF(dtypes); i++) {
        if ((uint32_t)dtypes[i].info.type == id)
            return &dtypes[i];
    }
    return NULL;
}

const kvd_dtype_info *kvd_dtype_get(uint32_t gguf_type_id)
{
    const dtype_row *r = dtype_find(gguf_type_id);

    return r ? &r->info : NULL;
}

const char *kvd_dtype_name(uint32_t gguf_type_id)
{
    return gguf_type_id < KVD_COUNTOF(dtype_names) ? dtype_names[gguf_type_id] : NULL;
}

uint64_t kvd_dtype_row_bytes(kvd_dtype t, uint64_t n)
{
    const dtype_row *r = dtype_find((uint32_t)t);

    kvd_assert(r && n % r->info.block_len == 0);
    return n / r->info.block_len * r->info.block_bytes;
}

void kvd_dequantize(kvd_dtype t, const void *src, float *dst, uint64_t n)
{
    const dtype_row *r = dtype_find((uint32_t)t);

    kvd_assert(r && n % r->info.block_len == 0);
    if (n)
        r->dequant(src, dst, n / r->info.block_len);
}
