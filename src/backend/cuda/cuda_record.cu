/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_record.cu - copying, packing and unpacking of records.
 *
 * Copies may read host memory through PCIe: a few blocks with many bytes in flight fill it (8
 * blocks of 512 threads: 51 of 55 GB/s on an H200), and more would only take processors from other
 * work.
 *
 * Packing and unpacking give the bits of cpu_record_impl.h.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_record.cuh"

#define COPY_THREADS   512u
#define COPY_HOST_GRID 8u
#define PACK_THREADS   256u
#define UNPACK_SMEM    32768u
#define F16_MAX        65504.0f

/* ---- copy -------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(COPY_THREADS) copy_records(const kvd_record_copy_args a)
{
    const uint64_t n_warp = (uint64_t)gridDim.x * COPY_THREADS / WARP;
    const uint64_t first  = ((uint64_t)blockIdx.x * COPY_THREADS + threadIdx.x) / WARP;

    for (uint64_t i = first; i < a.n; i += n_warp)
        copy_record((const uint8_t *)a.src + a.src_off[i], (uint8_t *)a.dst + a.dst_off[i],
                    a.bytes);
}

static bool on_host(const void *p)
{
    cudaPointerAttributes at;

    if (cudaPointerGetAttributes(&at, p) == cudaSuccess)
        return at.type == cudaMemoryTypeHost;
    cudaGetLastError(); /* or the launch would be blamed for it */
    return false;
}

kvd_status cuda_record_copy(kvd_stream *st, const kvd_record_copy_args *a, kvd_err *err)
{
    const cuda_backend *be   = cuda_enter(st);
    const uint32_t      most = on_host(a->src) || on_host(a->dst) ? COPY_HOST_GRID : 4 * be->n_sm;

    kvd_assert(a->bytes % 16 == 0);
    if (a->n == 0)
        return KVD_OK;
    copy_records<<<(uint32_t)kvd_min_u64(most, kvd_div_up(a->n, COPY_THREADS / WARP)), COPY_THREADS,
                   0, st->s>>>(*a);
    return cuda_launched("record_copy", err);
}

/* ---- formats ------------------------------------------------------------------------ */

record_shape cuda_record_shape(const kvd_record_format *f)
{
    kvd_assert(f->type != KVD_RECORD_RAW && f->head_dim % 2 == 0 &&
               f->head_dim <= KVD_HEAD_DIM_MAX && f->chunk_tokens <= 16 &&
               KVD_RECORD_GROUP % f->chunk_tokens == 0 && f->block_tokens % KVD_RECORD_GROUP == 0);
    record_shape s = { *f,
                       (uint32_t)kvd_record_raw_bytes(f),
                       (uint32_t)kvd_record_bytes(f),
                       (uint32_t)(kvd_record_raw_bytes(f) / (2ull * f->chunk_tokens)),
                       {} };

    if (f->type == KVD_RECORD_VALUES) {
        cpu_index_shape keys;

        cpu_index_shape_of(&keys, &f->keys);
        kvd_assert(keys.has_key && keys.dim == f->head_dim);
        s.key = keys.key;
    }
    return s;
}

/* ---- pack -------------------------------------------------------------------------- */

/* Rounds a range to parameters; *inv is what codes are made with. */
static __device__ void pack_param(float lo, float hi, float top, uint16_t *scale, uint16_t *min,
                                  float *inv, float *base)
{
    const float    l = lo < -F16_MAX ? -F16_MAX : lo > F16_MAX ? F16_MAX : lo;
    const uint16_t m = sp_to_f16(l);
    uint16_t       s;
    float          step;

    *base  = sp_from_f16(m);
    step   = __fdiv_rn(__fsub_rn(hi, *base), top);
    step   = step > 0.0f ? step : 0.0f; /* NaN too */
    s      = sp_to_f16(step < F16_MAX ? step : F16_MAX);
    step   = sp_from_f16(s);
    *inv   = step > 0.0f ? __fdiv_rn(1.0f, step) : 0.0f;
    *scale = s;
    *min   = m;
}

static __device__ __forceinline__ uint32_t pack_code(float x, float base, float inv, float top)
{
    const float v = __fadd_rn(__fmul_rn(__fsub_rn(x, base), inv), 0.5f);

    return (uint32_t)(v > 0.0f ? (v < top + 0.5f ? v : top) : 0.0f);
}

static __device__ const uint8_t *pack_raw_row(const record_shape &s, const uint8_t *lane,
                                              uint32_t t, bool v)
{
    const uint32_t ct = s.f.chunk_tokens;

    return lane + (uint64_t)(t / ct) * s.raw + (uint64_t)(t % ct + (v ? ct : 0)) * s.raw_row;
}

/* Codes of two neighbouring channels: two bytes, or the halves of one. */
static __device__ void pack_put(const record_shape &s, uint8_t *dst, uint32_t t, bool v,
                                uint32_t pair, uint32_t a, uint32_t b)
{
    const kvd_record_format &f   = s.f;
    const uint32_t           at  = t % f.chunk_tokens + (v ? f.chunk_tokens : 0);
    uint8_t                 *rec = dst + (uint64_t)(t / f.chunk_tokens) * s.packed;

    if (f.type == KVD_RECORD_INT8) {
        rec[(uint64_t)at * f.head_dim + 2 * pair]     = (uint8_t)a;
        rec[(uint64_t)at * f.head_dim + 2 * pair + 1] = (uint8_t)b;
    } else {
        rec[(uint64_t)at * (f.head_dim / 2) + pair] = (uint8_t)(a | b << 4);
    }
}

typedef struct pack_range {
    float inv[KVD_HEAD_DIM_MAX], base[KVD_HEAD_DIM_MAX];
} pack_range;

/* Keys of one group: parameters per channel, then codes. */
static __device__ void pack_k(const record_shape &s, const uint8_t *src, uint32_t group,
                              uint8_t *param, uint8_t *dst, float top, pack_range *r)
{
    const kvd_record_format &f = s.f;
    const uint32_t           d = f.head_dim, first = group * KVD_RECORD_GROUP;
    uint16_t                *par = (uint16_t *)(param + 4ull * group * d);

    for (uint32_t i = threadIdx.x; i < d; i += blockDim.x) {
        float lo = sp_row_at(f.raw, pack_raw_row(s, src, first, false), i), hi = lo;

        for (uint32_t t = 1; t < KVD_RECORD_GROUP; t++) {
            const float x = sp_row_at(f.raw, pack_raw_row(s, src, first + t, false), i);

            lo = x < lo ? x : lo;
            hi = x > hi ? x : hi;
        }
        pack_param(lo, hi, top, &par[i], &par[d + i], &r->inv[i], &r->base[i]);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < KVD_RECORD_GROUP * (d / 2); i += blockDim.x) {
        const uint32_t t = first + i / (d / 2), p = i % (d / 2);
        const uint8_t *row = pack_raw_row(s, src, t, false);
        uint32_t       c[2];

        for (uint32_t k = 0; k < 2; k++)
            c[k] = pack_code(sp_row_at(f.raw, row, 2 * p + k), r->base[2 * p + k],
                             r->inv[2 * p + k], top);
        pack_put(s, dst, t, false, p, c[0], c[1]);
    }
    __syncthreads();
}

/* Values of one token, by one thread: which of equal zeros is the least depends on the order. */
static __device__ void pack_v(const record_shape &s, const uint8_t *src, uint32_t t,
                              uint16_t *param, uint8_t *dst, float top)
{
    const kvd_record_format &f   = s.f;
    const uint8_t           *row = pack_raw_row(s, src, t, true);
    float                    lo = sp_row_at(f.raw, row, 0), hi = lo, inv, base;

    for (uint32_t i = 1; i < f.head_dim; i++) {
        const float x = sp_row_at(f.raw, row, i);

        lo = x < lo ? x : lo;
        hi = x > hi ? x : hi;
    }
    pack_param(lo, hi, top, &param[t], &param[f.block_tokens + t], &inv, &base);
    for (uint32_t p = 0; p < f.head_dim / 2; p++)
        pack_put(s, dst, t, true, p, pack_code(sp_row_at(f.raw, row, 2 * p), base, inv, top),
                 pack_code(sp_row_at(f.raw, row, 2 * p + 1), base, inv, top));
}

static __global__ void __launch_bounds__(PACK_THREADS)
    pack_lanes(const kvd_record_pack_args a, const record_shape s)
{
    __shared__ pack_range r;
    const uint8_t        *src     = (const uint8_t *)a.src + a.src_off[blockIdx.x];
    uint8_t              *param   = (uint8_t *)a.param + a.param_off[blockIdx.x];
    uint8_t              *dst     = (uint8_t *)a.dst + a.dst_off[blockIdx.x];
    const float           top     = a.format.type == KVD_RECORD_INT8 ? 255.0f : 15.0f;
    const uint32_t        n_group = a.format.block_tokens / KVD_RECORD_GROUP;

    if (a.format.type == KVD_RECORD_VALUES) {
        for (uint32_t c = threadIdx.x / WARP; c < a.format.block_tokens / a.format.chunk_tokens;
             c += PACK_THREADS / WARP)
            copy_record(src + (uint64_t)c * s.raw + s.packed, dst + (uint64_t)c * s.packed,
                        s.packed);
        return;
    }
    for (uint32_t g = 0; g < n_group; g++)
        pack_k(s, src, g, param, dst, top, &r);
    for (uint32_t t = threadIdx.x; t < a.format.block_tokens; t += blockDim.x)
        pack_v(s, src, t, (uint16_t *)(param + 4ull * n_group * a.format.head_dim), dst, top);
}

kvd_status cuda_record_pack(kvd_stream *st, const kvd_record_pack_args *a, kvd_err *err)
{
    cuda_enter(st);
    if (a->n == 0)
        return KVD_OK;
    pack_lanes<<<(uint32_t)a->n, PACK_THREADS, 0, st->s>>>(*a, cuda_record_shape(&a->format));
    return cuda_launched("record_pack", err);
}

/* ---- unpack ------------------------------------------------------------------------ */

static __global__ void unpack_records(const kvd_record_unpack_args a, const record_shape s,
                                      uint32_t each)
{
    extern __shared__ uint4 unpack_mem[];
    uint8_t                *packed = (uint8_t *)unpack_mem + threadIdx.x / WARP * each;
    const uint32_t          n_warp = blockDim.x / WARP;

    for (uint64_t i = (uint64_t)blockIdx.x * n_warp + threadIdx.x / WARP; i < a.n;
         i += (uint64_t)gridDim.x * n_warp)
        unpack_record(s, a.chunk[i], (const uint8_t *)a.src + a.src_off[i],
                      (const uint8_t *)a.param + a.param_off[i], (uint8_t *)a.dst + a.dst_off[i],
                      packed);
}

kvd_status cuda_record_unpack(kvd_stream *st, const kvd_record_unpack_args *a, kvd_err *err)
{
    const cuda_backend *be     = cuda_enter(st);
    const record_shape  s      = cuda_record_shape(&a->format);
    const uint32_t      each   = (uint32_t)kvd_align_up(s.packed, 16);
    const uint32_t      n_warp = (uint32_t)kvd_min_u64(16, UNPACK_SMEM / each);
    const uint32_t      most   = on_host(a->src) ? COPY_HOST_GRID : 8 * be->n_sm;

    if (a->n == 0)
        return KVD_OK;
    unpack_records<<<(uint32_t)kvd_min_u64(most, kvd_div_up(a->n, n_warp)), n_warp * WARP,
                     n_warp * each, st->s>>>(*a, s, each);
    return cuda_launched("record_unpack", err);
}
