/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_index.h - index_build and select of the backends "cpu" and "ref". */
#ifndef KVD_CPU_INDEX_H
#define KVD_CPU_INDEX_H

#include "backend/cpu/cpu.h"

/* cpu_index_build.c: one text for both backends, so that the bytes are the same. */
uint64_t   cpu_index_build_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim);
kvd_status cpu_index_build(kvd_stream *st, const kvd_index_build_args *a, kvd_err *err);

/* cpu_index_zone.c: likewise */
kvd_status cpu_zone_build(kvd_stream *st, const kvd_zone_build_args *a, kvd_err *err);

/* cpu_index.c */
uint64_t   cpu_select_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim);
kvd_status cpu_select(kvd_stream *st, const kvd_select_args *a, kvd_err *err);

/* cpu_index_ref.c */
uint64_t   cpu_ref_select_scratch_bytes(const kvd_backend_limits *lim);
kvd_status cpu_ref_select(kvd_stream *st, const kvd_select_args *a, kvd_err *err);

#endif
