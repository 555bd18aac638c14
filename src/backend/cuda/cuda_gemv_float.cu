/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_gemv_float.cu - products of few tokens with unquantised weights. */
#include "backend/cuda/cuda_gemv_mma.cuh"
#include "backend/cuda/cuda_gemv_once.cuh"

template <kvd_dtype T>
static void float_product(const cuda_backend *be, const gemv_args &a, cudaStream_t s)
{
    switch (gemv_float_choose(be, a)) {
    case GEMV_WAY_ONCE:
        once_choose<T>(be, a, s);
        break;
    case GEMV_WAY_MMA:
        mma_choose<T>(be, a, s);
        break;
    default:
        if (a.aligned)
            gemv_launch<T, true>(be, a, s);
        else
            gemv_launch<T, false>(be, a, s);
    }
}

void cuda_gemv_float(const cuda_backend *be, kvd_dtype type, const gemv_args &a, cudaStream_t s)
{
    if (type == KVD_DTYPE_F32)
        float_product<KVD_DTYPE_F32>(be, a, s);
    else if (type == KVD_DTYPE_F16)
        float_product<KVD_DTYPE_F16>(be, a, s);
    else
        float_product<KVD_DTYPE_BF16>(be, a, s);
}
