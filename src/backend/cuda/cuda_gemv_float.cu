/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_float.cu - products of few tokens with unquantised weights. */
#include "backend/cuda/cuda_gemv.cuh"

void cuda_gemv_float(kvd_dtype type, const gemv_args &a, uint32_t n_sm, bool wa, bool xa,
                     cudaStream_t s)
{
    if (type == KVD_DTYPE_F32)
        gemv_float_choose<KVD_DTYPE_F32>(a, n_sm, wa, xa, s);
    else if (type == KVD_DTYPE_F16)
        gemv_float_choose<KVD_DTYPE_F16>(a, n_sm, wa, xa, s);
    else
        gemv_float_choose<KVD_DTYPE_BF16>(a, n_sm, wa, xa, s);
}
