/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm.h - private to backend/cpu: matrix products for many tokens (prefill).
 *
 * Weights are expanded block by block into panels that stay in the cache and are used for all
 * tokens at once.  cpu_matmul() chooses between this and dot products on the stored types.
 *
 * A token's result depends on its own activations and the weights only: neither the number of
 * tokens, nor its place among them, nor the number of threads changes a bit. */
#ifndef KVD_CPU_GEMM_H
#define KVD_CPU_GEMM_H

#include "backend/cpu/cpu.h"

/* Bytes of be->mm_scratch that cpu_gemm() needs for calls within these limits. */
uint64_t cpu_gemm_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim);

/* All of kvd_matmul_args for any n_token and n_row; runs on be->pool, uses be->mm_scratch. */
void cpu_gemm(cpu_backend *be, const kvd_matmul_args *a);

/* From this many tokens on cpu_gemm() is the faster way. */
uint32_t cpu_gemm_min_tokens(const cpu_backend *be);

#endif
