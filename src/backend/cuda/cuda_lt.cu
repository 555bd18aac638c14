/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_lt.cu - matrix products by cuBLASLt, which is looked for at run time: without it products of
 * many tokens are slower, nothing else.
 * Thread: one at a time per handle. */
#include <cublasLt.h>

#include "backend/cuda/cuda_impl.h"

extern "C" {
#include "os/os.h"
}

#define LT_CACHE 64 /* shapes whose algorithm is remembered */

#define LT_FUNCTIONS(X)                      \
    X(cublasLtCreate)                        \
    X(cublasLtDestroy)                       \
    X(cublasLtMatmul)                        \
    X(cublasLtMatmulAlgoGetHeuristic)        \
    X(cublasLtMatmulDescInit_internal)       \
    X(cublasLtMatmulDescSetAttribute)        \
    X(cublasLtMatrixLayoutInit_internal)     \
    X(cublasLtMatmulPreferenceInit_internal) \
    X(cublasLtMatmulPreferenceSetAttribute)

typedef struct lt_shape {
    uint32_t n_token, n_row, n_col;
    uint64_t y_stride;
    uint32_t y_align; /* bytes */
    bool     add;
} lt_shape;

struct cuda_lt {
#define LT_FIELD(name) decltype(&::name) name;
    LT_FUNCTIONS(LT_FIELD)
#undef LT_FIELD
    cublasLtHandle_t     handle;
    uint32_t             n_known;
    lt_shape             shape[LT_CACHE];
    cublasLtMatmulAlgo_t algo[LT_CACHE];
};

static kvd_status lt_fail(kvd_err *err, const char *what, cublasStatus_t st)
{
    const bool memory = st == CUBLAS_STATUS_ALLOC_FAILED;

    return kvd_fail(err, memory ? KVD_E_NOMEM : KVD_E_DEVICE, 0, "cuda: cuBLASLt: %s: status %d",
                    what, (int)st);
}

static os_module *lt_library(void)
{
    static const char *const name[] = { "libcublasLt.so.13", "libcublasLt.so.12" };
    char                     why[256];
    os_module               *m = NULL;

    for (uint32_t i = 0; !m && i < KVD_COUNTOF(name); i++)
        m = os_module_open(name[i], why, sizeof(why));
    return m;
}

kvd_status cuda_lt_open(cuda_lt **out, kvd_err *err)
{
    os_module     *m = lt_library();
    cuda_lt       *lt;
    cublasStatus_t st;

    *out = NULL;
    if (!m)
        return KVD_OK;
    lt = (cuda_lt *)kvd_calloc(1, sizeof(*lt));
    if (!lt)
        return kvd_fail(err, KVD_E_NOMEM, 0, "cuda: cuBLASLt");
#define LT_LOAD(name)                                                            \
    lt->name = reinterpret_cast<decltype(lt->name)>(os_module_symbol(m, #name)); \
    if (!lt->name) {                                                             \
        kvd_free(lt);                                                            \
        return KVD_OK;                                                           \
    }
    LT_FUNCTIONS(LT_LOAD)
#undef LT_LOAD
    st = lt->cublasLtCreate(&lt->handle);
    if (st != CUBLAS_STATUS_SUCCESS) {
        kvd_free(lt);
        return lt_fail(err, "cublasLtCreate", st);
    }
    *out = lt;
    return KVD_OK;
}

void cuda_lt_close(cuda_lt *lt)
{
    if (!lt)
        return;
    lt->cublasLtDestroy(lt->handle);
    kvd_free(lt);
}

/* Column-major as the library sees it: y^T [n_row][n_token] = w^T' x^T. */
typedef struct lt_problem {
    cublasLtMatmulDescOpaque_t   op;
    cublasLtMatrixLayoutOpaque_t w, x, y;
} lt_problem;

static cublasStatus_t lt_describe(const cuda_lt *lt, const lt_shape *s, lt_problem *p)
{
    const cublasOperation_t t = CUBLAS_OP_T;
    cublasStatus_t          st;

    st = lt->cublasLtMatmulDescInit_internal(&p->op, sizeof(p->op), CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt->cublasLtMatmulDescSetAttribute(&p->op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof(t));
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt->cublasLtMatrixLayoutInit_internal(&p->w, sizeof(p->w), CUDA_R_16BF, s->n_col,
                                                   s->n_row, s->n_col);
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt->cublasLtMatrixLayoutInit_internal(&p->x, sizeof(p->x), CUDA_R_16BF, s->n_col,
                                                   s->n_token, s->n_col);
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt->cublasLtMatrixLayoutInit_internal(&p->y, sizeof(p->y), CUDA_R_32F, s->n_row,
                                                   s->n_token, (int64_t)s->y_stride);
    return st;
}

static cublasStatus_t lt_choose(const cuda_lt *lt, lt_problem *p, uint32_t y_align,
                                uint64_t work_bytes, cublasLtMatmulAlgo_t *algo)
{
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t  best;
    const size_t                     bytes = work_bytes;
    int                              n     = 0;
    cublasStatus_t                   st;

    st = lt->cublasLtMatmulPreferenceInit_internal(&pref, sizeof(pref));
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt->cublasLtMatmulPreferenceSetAttribute(&pref,
                                                      CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &bytes, sizeof(bytes));
    for (uint32_t a = 0; st == CUBLAS_STATUS_SUCCESS && a < 4; a++) {
        static const cublasLtMatmulPreferenceAttributes_t attr[] = {
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
        };
        const uint32_t align = a < 2 ? 16 : y_align;
        st = lt->cublasLtMatmulPreferenceSetAttribute(&pref, attr[a], &align, sizeof(align));
    }
    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt->cublasLtMatmulAlgoGetHeuristic(lt->handle, &p->op, &p->w, &p->x, &p->y, &p->y,
                                                &pref, 1, &best, &n);
    if (st == CUBLAS_STATUS_SUCCESS && n == 0)
        st = CUBLAS_STATUS_NOT_SUPPORTED;
    if (st == CUBLAS_STATUS_SUCCESS)
        *algo = best.algo;
    return st;
}

/* The algorithm of a shape, from memory or asked for. */
static cublasStatus_t lt_algo(cuda_lt *lt, const lt_shape *s, lt_problem *p, uint64_t work_bytes,
                              const cublasLtMatmulAlgo_t **out)
{
    uint32_t i;

    for (i = 0; i < lt->n_known && i < LT_CACHE; i++) {
        const lt_shape *k = &lt->shape[i];

        if (k->n_token == s->n_token && k->n_row == s->n_row && k->n_col == s->n_col &&
            k->y_stride == s->y_stride && k->y_align == s->y_align && k->add == s->add) {
            *out = &lt->algo[i];
            return CUBLAS_STATUS_SUCCESS;
        }
    }
    i                       = lt->n_known++ % LT_CACHE; /* the oldest goes */
    lt->shape[i]            = lt_shape{};
    *out                    = &lt->algo[i];
    const cublasStatus_t st = lt_choose(lt, p, s->y_align, work_bytes, &lt->algo[i]);
    if (st == CUBLAS_STATUS_SUCCESS)
        lt->shape[i] = *s;
    return st;
}

kvd_status cuda_lt_gemm(cuda_lt *lt, cudaStream_t s, uint32_t n_token, uint32_t n_row,
                        uint32_t n_col, const void *x, const void *w, float beta, float *y,
                        uint64_t y_stride, void *work, uint64_t work_bytes, kvd_err *err)
{
    const uint32_t              align = ((uintptr_t)y | y_stride * 4) % 16 == 0 ? 16 : 4;
    const lt_shape              shape = { n_token, n_row, n_col, y_stride, align, beta != 0.0f };
    const float                 one   = 1.0f;
    lt_problem                  p;
    const cublasLtMatmulAlgo_t *algo = NULL;
    cublasStatus_t              st   = lt_describe(lt, &shape, &p);

    if (st == CUBLAS_STATUS_SUCCESS)
        st = lt_algo(lt, &shape, &p, work_bytes, &algo);
    if (st != CUBLAS_STATUS_SUCCESS)
        return lt_fail(err, "no algorithm", st);
    st = lt->cublasLtMatmul(lt->handle, &p.op, &one, w, &p.w, x, &p.x, &beta, y, &p.y, y, &p.y,
                            algo, work, work_bytes, s);
    return st == CUBLAS_STATUS_SUCCESS ? KVD_OK : lt_fail(err, "matmul", st);
}
