/* SPDX-License-Identifier: Apache-2.0 */
/* cpu.h - private to backend/cpu: the backend object, and the kernel tables one per ISA level.
 *
 * A kernel file is compiled for one level (its name ends in _portable, _avx2, _avx512 or _amx, and
 * the build adds the flags by that name).  Code outside those files never assumes a level.
 * The ops split work into items for the thread pool; kernels are single-threaded leaf functions.
 */
#ifndef KVD_CPU_H
#define KVD_CPU_H

#include "backend/backend.h"
#include "os/os.h"

typedef struct cpu_backend {
    kvd_backend base;
    os_isa      isa;
    bool        precise, deterministic, vnni, bf16; /* vnni, bf16: AVX-512 extensions usable */
    os_pool    *pool;

    /* matmul scratch (cpu_matmul.c): quantised or packed activations */
    void    *mm_scratch;
    uint64_t mm_scratch_bytes;
    /* attention scratch (cpu_attn.c): scores, partial results */
    void    *at_scratch;
    uint64_t at_scratch_bytes;
    /* index scratch (cpu_index*.c) */
    void    *ix_scratch;
    uint64_t ix_scratch_bytes;
} cpu_backend;

struct kvd_stream {
    cpu_backend *be;
};

/* cpu_backend.c: p->name is "cpu" (or NULL) or "ref" */
kvd_status cpu_backend_open(kvd_backend **out, const kvd_backend_params *p, kvd_err *err);

/* cpu_matmul.c: activation quantisation, work split, choice between dot products (few tokens) and
 * panels (many tokens). */
uint64_t   cpu_matmul_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim);
kvd_status cpu_matmul(kvd_stream *st, const kvd_matmul_args *a, kvd_err *err);

/* cpu_attn.c */
uint64_t   cpu_attn_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim);
kvd_status cpu_attn(kvd_stream *st, const kvd_attn_args *a, kvd_err *err);
kvd_status cpu_kv_append(kvd_stream *st, const kvd_kv_append_args *a, kvd_err *err);

/* cpu_span.c */
uint64_t   cpu_span_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim);
kvd_status cpu_attn_span(kvd_stream *st, const kvd_attn_span_args *a, kvd_err *err);
kvd_status cpu_attn_zone(kvd_stream *st, const kvd_attn_zone_args *a, kvd_err *err);
/* cpu_record.c */
kvd_status cpu_record_pack(kvd_stream *st, const kvd_record_pack_args *a, kvd_err *err);
kvd_status cpu_record_unpack(kvd_stream *st, const kvd_record_unpack_args *a, kvd_err *err);
kvd_status cpu_record_copy(kvd_stream *st, const kvd_record_copy_args *a, kvd_err *err);

/* cpu_window.c: serves "ref" as well, its results are exact */
uint64_t   cpu_window_scratch_bytes(const kvd_backend *b, const kvd_backend_limits *lim);
kvd_status cpu_window(kvd_stream *st, const kvd_window_args *a, kvd_err *err);

/* cpu_window_lists.c: likewise */
kvd_status cpu_window_spans(kvd_stream *st, const kvd_window_spans_args *a, kvd_err *err);
kvd_status cpu_window_post(kvd_stream *st, const kvd_window_post_args *a, kvd_err *err);
kvd_status cpu_window_fetch(kvd_stream *st, const kvd_window_fetch_args *a, kvd_err *err);

/* cpu_elem.c */
kvd_status cpu_embed(kvd_stream *st, const kvd_embed_args *a, kvd_err *err);
kvd_status cpu_rms_norm(kvd_stream *st, const kvd_rms_norm_args *a, kvd_err *err);
kvd_status cpu_head_norm(kvd_stream *st, const kvd_head_norm_args *a, kvd_err *err);
kvd_status cpu_rope(kvd_stream *st, const kvd_rope_args *a, kvd_err *err);
kvd_status cpu_swiglu(kvd_stream *st, const kvd_swiglu_args *a, kvd_err *err);

/* cpu_fused.c; best serves "ref" as well */
kvd_status cpu_qkv_finish(kvd_stream *st, const kvd_qkv_finish_args *a, kvd_err *err);
kvd_status cpu_best(kvd_stream *st, const kvd_best_args *a, kvd_err *err);
/* cpu_synth.c: serves "ref" as well */
kvd_status cpu_synth(kvd_stream *st, const kvd_synth_args *a, kvd_err *err);

/* cpu_ref.c: the oracle's ops; "ref" reuses memory, streams and events of cpu_backend.c */
extern const kvd_backend_ops cpu_ref_ops, cpu_ops;

#endif
