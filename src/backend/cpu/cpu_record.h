/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_record.h - kernels that pack and unpack records, one table per level; see kvd_record_format.
 * All levels give the same bits: no contraction, and the same operations in the same order. */
#ifndef KVD_CPU_RECORD_H
#define KVD_CPU_RECORD_H

#include "backend/index_layout.h"

typedef struct cpu_record_kernels {
    /* One lane of a block; not VALUES. */
    void (*pack)(const kvd_record_format *f, const uint8_t *src, uint8_t *param, uint8_t *dst);
    /* One record: chunk number `chunk` of its block. */
    void (*unpack)(const kvd_record_format *f, uint32_t chunk, const uint8_t *src,
                   const uint8_t *param, uint8_t *dst);
    /* The same of VALUES, with the lane of an index of this shape in place of parameters. */
    void (*unpack_values)(const kvd_record_format *f, const cpu_index_shape *ix, uint32_t chunk,
                          const uint8_t *src, const uint8_t *index, uint8_t *dst);
} cpu_record_kernels;

extern const cpu_record_kernels cpu_record_portable, cpu_record_avx2;

struct cpu_backend;
const cpu_record_kernels *cpu_record_kernels_of(const struct cpu_backend *be);

#endif
