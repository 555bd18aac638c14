/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_ref.h - the ops of backend "ref": the oracle that every other kernel is tested against.
 *
 * Plain C, one thread, every sum in double, libm's exp, built with -ffp-contract=off.  They use no
 * scratch but what cpu_ref_scratch_bytes() plans, and hold no state. */
#ifndef KVD_CPU_REF_H
#define KVD_CPU_REF_H

#include "backend/backend.h"

uint64_t cpu_ref_mm_scratch_bytes(const kvd_backend_limits *lim);
uint64_t cpu_ref_at_scratch_bytes(const kvd_backend_limits *lim);

kvd_status cpu_ref_embed(kvd_stream *st, const kvd_embed_args *a, kvd_err *err);
kvd_status cpu_ref_rms_norm(kvd_stream *st, const kvd_rms_norm_args *a, kvd_err *err);
kvd_status cpu_ref_head_norm(kvd_stream *st, const kvd_head_norm_args *a, kvd_err *err);
kvd_status cpu_ref_matmul(kvd_stream *st, const kvd_matmul_args *a, kvd_err *err);
kvd_status cpu_ref_rope(kvd_stream *st, const kvd_rope_args *a, kvd_err *err);
kvd_status cpu_ref_swiglu(kvd_stream *st, const kvd_swiglu_args *a, kvd_err *err);
kvd_status cpu_ref_kv_append(kvd_stream *st, const kvd_kv_append_args *a, kvd_err *err);
kvd_status cpu_ref_qkv_finish(kvd_stream *st, const kvd_qkv_finish_args *a, kvd_err *err);
kvd_status cpu_ref_attn(kvd_stream *st, const kvd_attn_args *a, kvd_err *err);
kvd_status cpu_ref_attn_span(kvd_stream *st, const kvd_attn_span_args *a, kvd_err *err);
kvd_status cpu_ref_attn_zone(kvd_stream *st, const kvd_attn_zone_args *a, kvd_err *err);
kvd_status cpu_ref_record_pack(kvd_stream *st, const kvd_record_pack_args *a, kvd_err *err);
kvd_status cpu_ref_record_unpack(kvd_stream *st, const kvd_record_unpack_args *a, kvd_err *err);
kvd_status cpu_ref_record_copy(kvd_stream *st, const kvd_record_copy_args *a, kvd_err *err);

#endif
