/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_small.cu - products of few tokens with weights in blocks of 32. */
#include "backend/cuda/cuda_gemv_one.cuh"

kvd_status cuda_gemv_small(const cuda_backend *be, kvd_dtype type, const gemv_args &a,
                           cudaStream_t s, kvd_err *err)
{
    if (type == KVD_DTYPE_Q8_0)
        return quant_product<KVD_DTYPE_Q8_0>(be, a, s, err);
    if (type == KVD_DTYPE_Q4_0)
        return quant_product<KVD_DTYPE_Q4_0>(be, a, s, err);
    if (type == KVD_DTYPE_Q4_1)
        return quant_product<KVD_DTYPE_Q4_1>(be, a, s, err);
    if (type == KVD_DTYPE_Q5_0)
        return quant_product<KVD_DTYPE_Q5_0>(be, a, s, err);
    return quant_product<KVD_DTYPE_Q5_1>(be, a, s, err);
}
