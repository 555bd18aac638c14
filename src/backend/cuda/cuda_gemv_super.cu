/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_super.cu - products of few tokens with weights in blocks of 256. */
#include "backend/cuda/cuda_gemv_one.cuh"

kvd_status cuda_gemv_super(const cuda_backend *be, kvd_dtype type, const gemv_args &a,
                           cudaStream_t s, kvd_err *err)
{
    if (type == KVD_DTYPE_Q2_K)
        return quant_product<KVD_DTYPE_Q2_K>(be, a, s, err);
    if (type == KVD_DTYPE_Q3_K)
        return quant_product<KVD_DTYPE_Q3_K>(be, a, s, err);
    if (type == KVD_DTYPE_Q4_K)
        return quant_product<KVD_DTYPE_Q4_K>(be, a, s, err);
    if (type == KVD_DTYPE_Q5_K)
        return quant_product<KVD_DTYPE_Q5_K>(be, a, s, err);
    return quant_product<KVD_DTYPE_Q6_K>(be, a, s, err);
}
