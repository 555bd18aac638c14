/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.h - tensor element types as GGUF stores them, and their reference conversions.
 *
 * A quantised row is a sequence of blocks of block_len elements in block_bytes bytes.  The ids
 * are those of the GGUF tensor directory.  A new type breaks the build of every table until it
 * is filled in (static assert on KVD_DTYPE_COUNT entries). */
#ifndef KVD_BASE_DTYPE_H
#define KVD_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum kvd_dtype {
    KVD_DTYPE_F32  = 0,
    KVD_DTYPE_F16  = 1,
    KVD_DTYPE_Q4_0 = 2,
    KVD_DTYPE_Q4_1 = 3,
    KVD_DTYPE_Q5_0 = 6,
    KVD_DTYPE_Q5_1 = 7,
    KVD_DTYPE_Q8_0 = 8,
    KVD_DTYPE_Q2_K = 10,
    KVD_DTYPE_Q3_K = 11,
    KVD_DTYPE_Q4_K = 12,
    KVD_DTYPE_Q5_K = 13,
    KVD_DTYPE_Q6_K = 14,
    KVD_DTYPE_BF16 = 30
} kvd_dtype;
#define KVD_DTYPE_COUNT 13

typedef struct kvd_dtype_info {
    kvd_dtype   type;
    const char *name;      /* "Q4_K" */
    uint32_t    block_len; /* elements: 1, 32 or 256 */
    uint32_t    block_bytes;
} kvd_dtype_info;

/* NULL for an id we do not read. */
const kvd_dtype_info *kvd_dtype_get(uint32_t gguf_type_id);
/* The format's own name even for ids we do not read ("IQ4_XS"), or NULL if it never had one. */
const char *kvd_dtype_name(uint32_t gguf_type_id);
/* n must be a multiple of block_len. */
uint64_t kvd_dtype_row_bytes(kvd_dtype t, uint64_t n);
/* Reference dequantiser: n elements (a multiple of block_len) of src into dst.  src needs no
 * alignment.  Plain C, no contraction: this is the oracle. */
void kvd_dequantize(kvd_dtype t, const void *src, float *dst, uint64_t n);

#endif
