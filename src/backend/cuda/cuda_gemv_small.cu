/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_small.cu - products of few tokens with weights in blocks of 32. */
#include "backend/cuda/cuda_gemv.cuh"

void cuda_gemv_small(kvd_dtype type, const gemv_args &a, uint32_t n_sm, bool wa, cudaStream_t s)
{
    if (type == KVD_DTYPE_Q8_0)
        gemv_quant_choose<KVD_DTYPE_Q8_0>(a, n_sm, wa, s);
    else if (type == KVD_DTYPE_Q4_0)
        gemv_quant_choose<KVD_DTYPE_Q4_0>(a, n_sm, wa, s);
    else if (type == KVD_DTYPE_Q4_1)
        gemv_quant_choose<KVD_DTYPE_Q4_1>(a, n_sm, wa, s);
    else if (type == KVD_DTYPE_Q5_0)
        gemv_quant_choose<KVD_DTYPE_Q5_0>(a, n_sm, wa, s);
    else
        gemv_quant_choose<KVD_DTYPE_Q5_1>(a, n_sm, wa, s);
}
