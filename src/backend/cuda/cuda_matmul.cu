/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_matmul.cu - matrix products: few tokens 8 by 8 by cuda_gemv.cuh; more by cuBLASLt in bf16
 * with float sums, over weights that are dequantised a tile of rows at a time.
 *
 * Few are up to 8, or 48 by quantised weights.  The norm before a product and the swiglu behind it
 * are part of the former's kernels where those allow (mm_fuses_norm(), mm_fuses_swiglu()).  Where
 * cuBLASLt is missing, or float activations or a fixed order of sums are asked for, many tokens go
 * 8 by 8 through the first.
 *
 * Scratch: activations in integers | work space of the library | activations in bf16 | a tile of
 * weights in bf16. */
#include "backend/cuda/cuda_gemv_ints.cuh"

#define MM_WORK_BYTES (32ull << 20)
#define MM_TILE_BYTES (128ull << 20) /* of weights; at least MM_TILE_ROWS rows */
#define MM_TILE_ROWS  256u
#define MM_PAD        8u /* elements: rows of bf16 begin on 16 bytes */

/* Of up to 8 tokens in integers (cuda_gemv_ints.cuh); of those, what is not scales. */
static uint64_t mm_int_planes(uint32_t n_token, uint32_t n_col)
{
    return (uint64_t)cuda_div_up(n_col, 32) * n_token * 64;
}
static uint64_t mm_int_bytes(uint32_t n_col)
{
    const uint64_t scales =
        (uint64_t)cuda_div_up(n_col, GEMV_UNIT) * GEMV_TOKENS * sizeof(gemv_scale);

    return kvd_align_up(mm_int_planes(GEMV_TOKENS, n_col) + scales, 256);
}

static uint64_t mm_pad_cols(uint32_t n_col)
{
    return kvd_align_up(n_col, MM_PAD);
}

static uint64_t mm_x_bytes(uint32_t n_token, uint32_t n_col)
{
    return kvd_align_up((uint64_t)n_token * mm_pad_cols(n_col) * 2, 256);
}

static uint32_t mm_tile_rows(uint32_t n_col)
{
    const uint64_t rows = MM_TILE_BYTES / (2 * mm_pad_cols(n_col)) / MM_TILE_ROWS * MM_TILE_ROWS;

    return (uint32_t)kvd_max_u64(rows, MM_TILE_ROWS);
}

uint64_t cuda_matmul_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    const uint64_t tile = (uint64_t)MM_TILE_ROWS * mm_pad_cols(lim->n_col) * 2;

    if (!be->lt || be->precise || be->deterministic || lim->n_token <= GEMV_TOKENS)
        return mm_int_bytes(lim->n_col);
    return mm_int_bytes(lim->n_col) + MM_WORK_BYTES + mm_x_bytes(lim->n_token, lim->n_col) +
           kvd_max_u64(MM_TILE_BYTES, tile);
}

/* ---- few tokens ----------------------------------------------------------------------- */

#define MM_INT_WARPS    4u
#define MM_NORM_THREADS 1024u
#define MM_NORM_COLS    (MM_NORM_THREADS / 32 * GEMV_UNIT)

/* g's tokens to its xq and xd, a warp a unit of one. */
static __device__ __forceinline__ void mm_int_store(const gemv_args &g, uint32_t unit,
                                                    uint32_t token, const float v[8])
{
    const uint32_t lane = threadIdx.x % 32, block = unit * (GEMV_UNIT / 32) + lane / 4;
    const uint4    q = ints_make(v, g.xd + (uint64_t)unit * GEMV_TOKENS + token);

    if (block * 32 < g.n_col)
        g.xq[((uint64_t)block * g.n_token + token) * 4 + lane % 4] = q;
}

static __global__ void __launch_bounds__(32 * MM_INT_WARPS)
    mm_int_kernel(const __grid_constant__ gemv_args g)
{
    const uint32_t unit = blockIdx.x * MM_INT_WARPS + threadIdx.x / 32, token = blockIdx.y;
    float          v[8];

    cuda_pdl_go();
    cuda_pdl_wait();
    if (unit * GEMV_UNIT >= g.n_col)
        return;
    ints_load(g.x + token * g.x_stride, g.x_wide, g.n_col, unit, v);
    mm_int_store(g, unit, token, v);
}

/* A block a token, of at most MM_NORM_COLS columns: normalised first, as by cuda_rms_norm(). */
static __global__ void __launch_bounds__(MM_NORM_THREADS)
    mm_int_norm_kernel(const __grid_constant__ gemv_args g)
{
    __shared__ float part[MM_NORM_THREADS / 32];
    const uint32_t   unit = threadIdx.x / 32, token = blockIdx.x;
    float            v[8], w[8];

    cuda_pdl_go();
    ints_load(g.norm, false, g.n_col, unit, w);
    cuda_pdl_wait();
    ints_load(g.x + token * g.x_stride, g.x_wide, g.n_col, unit, v);
    const float square = ints_square(v);
    if (threadIdx.x % 32 == 0)
        part[unit] = square;
    __syncthreads();
    const float scale = ints_norm(part, blockDim.x / 32, g.n_col, g.norm_eps);
#pragma unroll
    for (uint32_t k = 0; k < 8; k++)
        v[k] = v[k] * scale * w[k];
    mm_int_store(g, unit, token, v);
}

/* Fills in the integers of g's activations; quantised weights of any type use the same. */
static void mm_ints(const cuda_backend *be, gemv_args *g, cudaStream_t s)
{
    uint8_t       *p = (uint8_t *)cuda_scratch_of(be, CUDA_SCRATCH_MATMUL, mm_int_bytes(g->n_col));
    const uint32_t n_unit = cuda_div_up(g->n_col, GEMV_UNIT);

    g->xq = (uint4 *)p;
    g->xd = (gemv_scale *)(p + mm_int_planes(GEMV_TOKENS, g->n_col));
    if (g->norm)
        cuda_launch(be, mm_int_norm_kernel, g->n_token, 32 * n_unit, 0, s, *g);
    else
        cuda_launch(be, mm_int_kernel, dim3(cuda_div_up(n_unit, MM_INT_WARPS), g->n_token),
                    32 * MM_INT_WARPS, 0, s, *g);
}

static bool mm_is_float(kvd_dtype type)
{
    return type == KVD_DTYPE_F32 || type == KVD_DTYPE_F16 || type == KVD_DTYPE_BF16;
}

static kvd_status mm_gemv_type(const cuda_backend *be, const gemv_args &g, cudaStream_t s,
                               kvd_err *err)
{
    const kvd_dtype type = g.out[0].w.type;

    if (!mm_is_float(type))
        return kvd_dtype_get(type)->block_len == KVD_BLOCK_SMALL
                   ? cuda_gemv_small(be, type, g, s, err)
                   : cuda_gemv_super(be, type, g, s, err);
    cuda_gemv_float(be, type, g, s);
    return KVD_OK;
}

static bool mm_wide(const kvd_weight *w)
{
    const uint64_t packed = kvd_dtype_row_bytes(w->type, w->n_col);

    return ((uintptr_t)w->data | w->row_bytes | packed) % 16 == 0;
}

/* Moves output i of a and those that can share its launch to g. */
static void mm_gather(const kvd_matmul_args *a, uint32_t first, uint32_t i, bool *done,
                      gemv_args *g)
{
    const kvd_weight *w = &a->out[i].w;

    g->aligned = cuda_dq_aligned(w);
    g->wide    = mm_wide(w);
    for (uint32_t j = i; j < a->n_out; j++) {
        kvd_matmul_out o = a->out[j];

        if (done[j] || o.w.type != w->type || cuda_dq_aligned(&o.w) != g->aligned ||
            mm_wide(&o.w) != g->wide)
            continue;
        done[j] = true;
        if (o.w.n_row == 0)
            continue;
        o.y += first * o.y_stride;
        g->out[g->n_out++] = o;
        g->n_row += o.w.n_row;
    }
}

/* Tokens [first, first + n), n <= 8; outputs of equal type in one launch. */
static kvd_status mm_gemv(const cuda_backend *be, const kvd_matmul_args *a, uint32_t first,
                          uint32_t n, cudaStream_t s, kvd_err *err)
{
    bool      done[KVD_MATMUL_OUT_MAX] = {};
    gemv_args all                      = {};

    all.n_token  = n;
    all.n_col    = a->n_col;
    all.x_stride = a->x_stride;
    all.x        = a->x + first * a->x_stride;
    all.x_wide   = (uintptr_t)all.x % 16 == 0 && all.x_stride % 4 == 0;
    all.norm     = a->norm;
    all.norm_eps = a->norm_eps;
    all.swiglu   = a->swiglu;
    for (uint32_t i = 0; i < a->n_out; i++) {
        gemv_args g;

        if (done[i])
            continue;
        g = all;
        mm_gather(a, first, i, done, &g);
        if (g.n_row == 0)
            continue;
        g.ints = !be->precise && !mm_is_float(g.out[0].w.type);
        if (g.ints && !all.xq && !gemv_own_ints(be, g)) {
            mm_ints(be, &all, s);
            g.xq = all.xq;
            g.xd = all.xd;
        }
        KVD_TRY(mm_gemv_type(be, g, s, err));
    }
    return KVD_OK;
}

/* ---- many tokens ---------------------------------------------------------------------- */

/* A block a row, 8 elements a thread; wide: they begin on 16 bytes. */
static __global__ void mm_round_x_kernel(const float *x, uint64_t x_stride, uint32_t n_col,
                                         uint32_t n_pad, bool wide, __nv_bfloat16 *to)
{
    const float   *row = x + blockIdx.x * x_stride;
    __nv_bfloat16 *out = to + (uint64_t)blockIdx.x * n_pad;

    for (uint32_t i = 8 * threadIdx.x; i < n_pad; i += 8 * blockDim.x) {
        __nv_bfloat162 pair[4];
        float          v[8];

        if (wide && i + 8 <= n_col) {
            *(float4 *)v       = *(const float4 *)(row + i);
            *(float4 *)(v + 4) = *(const float4 *)(row + i + 4);
        } else {
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
                v[j] = i + j < n_col ? row[i + j] : 0.0f;
        }
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            pair[j] = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
        *(uint4 *)(out + i) = *(const uint4 *)pair;
    }
}

static void mm_round_x(const kvd_matmul_args *a, uint32_t pad, __nv_bfloat16 *to, cudaStream_t s)
{
    const bool     wide     = (uintptr_t)a->x % 16 == 0 && a->x_stride % 4 == 0;
    const uint32_t n_thread = (uint32_t)kvd_min_u64(cuda_div_up(pad / MM_PAD, 32) * 32ull, 512);

    mm_round_x_kernel<<<a->n_token, n_thread, 0, s>>>(a->x, a->x_stride, a->n_col, pad, wide, to);
}

/* A warp a row. */
template <kvd_dtype T, bool A>
static __global__ void mm_tile_kernel(kvd_weight w, uint32_t n_pad, __nv_bfloat16 *to)
{
    const uint32_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;

    if (row >= w.n_row)
        return;
    const uint8_t *from = (const uint8_t *)w.data + row * w.row_bytes;
    __nv_bfloat16 *out  = to + (uint64_t)row * n_pad;

    for (uint32_t step = 0; step * CUDA_DQ_STEP < w.n_col; step++) {
        float v[16];

        cuda_dq_get<T, A>(from, w.n_col, step, lane, v);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t e = cuda_dq_at<T>(step, lane, j); /* a multiple of 4, as n_pad */
            if (e >= n_pad)
                continue;
            __nv_bfloat162 pair[2] = { __floats2bfloat162_rn(v[4 * j], v[4 * j + 1]),
                                       __floats2bfloat162_rn(v[4 * j + 2], v[4 * j + 3]) };
            *(uint2 *)(out + e)    = *(const uint2 *)pair;
        }
    }
}

struct mm_tile_launch {
    kvd_weight     w;
    uint32_t       n_pad;
    __nv_bfloat16 *to;
    cudaStream_t   s;

    template <kvd_dtype T> void operator()() const
    {
        const uint32_t grid = cuda_div_up(w.n_row, GEMV_WARPS);

        if (cuda_dq_aligned(&w))
            mm_tile_kernel<T, true><<<grid, GEMV_THREADS, 0, s>>>(w, n_pad, to);
        else
            mm_tile_kernel<T, false><<<grid, GEMV_THREADS, 0, s>>>(w, n_pad, to);
    }
};

/* y = bias, or y += bias, before the product is added. */
static __global__ void mm_bias_kernel(kvd_matmul_out o)
{
    float *y = o.y + blockIdx.x * o.y_stride;

    for (uint32_t i = threadIdx.x; i < o.w.n_row; i += blockDim.x)
        y[i] = o.add ? y[i] + o.bias[i] : o.bias[i];
}

typedef struct mm_scratch {
    uint8_t       *work;
    __nv_bfloat16 *x, *tile;
} mm_scratch;

static kvd_status mm_gemm_out(const cuda_backend *be, const kvd_matmul_args *a,
                              const kvd_matmul_out *o, const mm_scratch *m, cudaStream_t s,
                              kvd_err *err)
{
    const uint32_t pad = (uint32_t)mm_pad_cols(a->n_col);
    const bool     direct =
        o->w.type == KVD_DTYPE_BF16 && cuda_dq_aligned(&o->w) && o->w.row_bytes == 2ull * pad;
    const uint32_t step = direct ? o->w.n_row : mm_tile_rows(a->n_col);

    if (o->bias && o->w.n_row)
        mm_bias_kernel<<<a->n_token, GEMV_THREADS, 0, s>>>(*o);
    for (uint32_t row = 0; row < o->w.n_row; row += step) {
        const uint32_t   n = (uint32_t)kvd_min_u64(step, o->w.n_row - row);
        const kvd_weight w = kvd_weight_rows(o->w, row, n);

        if (!direct)
            cuda_dq_visit(w.type, mm_tile_launch{ w, pad, m->tile, s });
        KVD_TRY(cuda_lt_gemm(be->lt, s, a->n_token, n, pad, m->x, direct ? w.data : m->tile,
                             o->add || o->bias ? 1.0f : 0.0f, o->y + row, o->y_stride, m->work,
                             MM_WORK_BYTES, err));
    }
    return KVD_OK;
}

static kvd_status mm_gemm(const cuda_backend *be, const kvd_matmul_args *a, cudaStream_t s,
                          kvd_err *err)
{
    const uint64_t x_bytes = mm_x_bytes(a->n_token, a->n_col);
    const uint32_t pad     = (uint32_t)mm_pad_cols(a->n_col);
    const uint64_t tile    = (uint64_t)mm_tile_rows(a->n_col) * pad * 2;
    mm_scratch     m;

    m.work = (uint8_t *)cuda_scratch_of(be, CUDA_SCRATCH_MATMUL,
                                        mm_int_bytes(a->n_col) + MM_WORK_BYTES + x_bytes + tile) +
             mm_int_bytes(a->n_col);
    m.x    = (__nv_bfloat16 *)(m.work + MM_WORK_BYTES);
    m.tile = (__nv_bfloat16 *)(m.work + MM_WORK_BYTES + x_bytes);
    mm_round_x(a, pad, m.x, s);
    for (uint32_t i = 0; i < a->n_out; i++)
        KVD_TRY(mm_gemm_out(be, a, &a->out[i], &m, s, err));
    return cuda_launched("matmul", err);
}

/* Up to how many tokens weights are read once for each 8 of them: quantised ones are a sixth of the
 * time of a dequantised tile (measured at 14336 x 4096). */
static uint32_t mm_gemv_tokens(const kvd_matmul_args *a)
{
    for (uint32_t i = 0; i < a->n_out; i++) {
        if (mm_is_float(a->out[i].w.type))
            return GEMV_TOKENS;
    }
    return 6 * GEMV_TOKENS;
}

static bool mm_few(const cuda_backend *be, const kvd_matmul_args *a)
{
    return !be->lt || be->precise || be->deterministic || a->n_token <= mm_gemv_tokens(a);
}

/* How the last of a's tokens go through the product by floats that outputs i and those like it
 * make; where there are more than 8, those before go by mma_kernel if these do so. */
static gemv_float_way mm_float_way(const cuda_backend *be, const kvd_matmul_args *a, uint32_t i,
                                   bool *done, gemv_args *g)
{
    mm_gather(a, 0, i, done, g);
    g->n_token  = (a->n_token - 1) % GEMV_TOKENS + 1;
    g->n_col    = a->n_col;
    g->x        = a->x;
    g->x_stride = a->x_stride;
    g->norm     = a->norm;
    return gemv_float_choose(be, *g);
}

/* Whether the norm can be a part of all products by floats: then it saves a launch. */
static bool mm_fuses_float_norm(const cuda_backend *be, const kvd_matmul_args *a)
{
    bool done[KVD_MATMUL_OUT_MAX] = {};

    for (uint32_t i = 0; i < a->n_out; i++) {
        gemv_args g = {};

        if (!mm_is_float(a->out[i].w.type))
            return false;
        if (!done[i] && mm_float_way(be, a, i, done, &g) != GEMV_WAY_MMA)
            return false;
    }
    return true;
}

/* Whether the norm can be a part: of products by floats, or of making integers. */
static bool mm_fuses_norm(const cuda_backend *be, const kvd_matmul_args *a)
{
    if (!mm_few(be, a) || a->n_token == 0)
        return false;
    if (mm_fuses_float_norm(be, a))
        return true;
    for (uint32_t i = 0; i < a->n_out; i++) {
        if (mm_is_float(a->out[i].w.type))
            return false;
    }
    return !be->precise && a->n_col <= MM_NORM_COLS;
}

/* Whether both outputs are of one launch, of kernels that know of it. */
static bool mm_fuses_swiglu(const cuda_backend *be, const kvd_matmul_args *a)
{
    bool           done[KVD_MATMUL_OUT_MAX] = {};
    gemv_args      g                        = {};
    gemv_float_way way;

    if (!mm_few(be, a) || a->n_token == 0)
        return false;
    way = mm_float_way(be, a, 0, done, &g);
    if (g.n_out != 2)
        return false;
    return mm_is_float(a->out[0].w.type) ? way != GEMV_WAY_ROWS : !be->precise;
}

/* norm and swiglu of a are those that are part of it. */
static kvd_status mm_product(const cuda_backend *be, const kvd_matmul_args *a, cudaStream_t s,
                             kvd_err *err)
{
    if (!mm_few(be, a))
        return mm_gemm(be, a, s, err);
    for (uint32_t t = 0; t < a->n_token; t += GEMV_TOKENS)
        KVD_TRY(mm_gemv(be, a, t, (uint32_t)kvd_min_u64(GEMV_TOKENS, a->n_token - t), s, err));
    return cuda_launched("matmul", err);
}

kvd_status cuda_matmul(kvd_stream *st, const kvd_matmul_args *a, kvd_err *err)
{
    const cuda_backend *be = cuda_enter(st);
    kvd_matmul_args     b  = *a;

    kvd_assert(a->n_out <= KVD_MATMUL_OUT_MAX);
    kvd_assert(a->n_token <= be->lim.n_token && a->n_col <= be->lim.n_col);
    if (a->norm && !mm_fuses_norm(be, a)) {
        const kvd_rms_norm_args n = kvd_matmul_norm(a);

        KVD_TRY(cuda_rms_norm(st, &n, err));
        b.norm     = NULL;
        b.x        = a->xn;
        b.x_stride = a->n_col;
    }
    b.swiglu = a->swiglu && mm_fuses_swiglu(be, &b);
    KVD_TRY(mm_product(be, &b, st->s, err));
    if (a->swiglu && !b.swiglu) {
        const kvd_swiglu_args g = kvd_matmul_swiglu(a);

        KVD_TRY(cuda_swiglu(st, &g, err));
    }
    return KVD_OK;
}
