/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_super.cu - products of few tokens with weights in blocks of 256. */
#include "backend/cuda/cuda_gemv.cuh"

void cuda_gemv_super(kvd_dtype type, const gemv_args &a, uint32_t n_sm, bool wa, cudaStream_t s)
{
    if (type == KVD_DTYPE_Q2_K)
        gemv_quant_choose<KVD_DTYPE_Q2_K>(a, n_sm, wa, s);
    else if (type == KVD_DTYPE_Q3_K)
        gemv_quant_choose<KVD_DTYPE_Q3_K>(a, n_sm, wa, s);
    else if (type == KVD_DTYPE_Q4_K)
        gemv_quant_choose<KVD_DTYPE_Q4_K>(a, n_sm, wa, s);
    else if (type == KVD_DTYPE_Q5_K)
        gemv_quant_choose<KVD_DTYPE_Q5_K>(a, n_sm, wa, s);
    else
        gemv_quant_choose<KVD_DTYPE_Q6_K>(a, n_sm, wa, s);
}
