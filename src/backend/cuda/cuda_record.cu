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
#define PACK_TOKENS    32u /* whose values a block packs */
#define PACK_PARTS     8u  /* of a group's tokens, seen side by side, at most */
#define UNPACK_THREADS 512u
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

/* Lanes that share a row by words, as cuda_record.cuh has it. */
static uint32_t shape_lanes(const kvd_record_format *f)
{
    const uint32_t codes = f->type == KVD_RECORD_INT8 ? 4 : 8, n = f->head_dim / codes;

    if (f->type == KVD_RECORD_VALUES || f->raw != KVD_DTYPE_BF16 || f->head_dim % codes != 0 ||
        WARP % n != 0 || kvd_record_bytes(f) % (4 * WARP) != 0)
        return 0;
    return n;
}

record_shape cuda_record_shape(const kvd_record_format *f)
{
    kvd_assert(f->type != KVD_RECORD_RAW && f->head_dim % 2 == 0 &&
               f->head_dim <= KVD_HEAD_DIM_MAX && f->chunk_tokens <= 16 &&
               KVD_RECORD_GROUP % f->chunk_tokens == 0 && f->block_tokens % KVD_RECORD_GROUP == 0);
    record_shape s = { *f,
                       (uint32_t)kvd_record_raw_bytes(f),
                       (uint32_t)kvd_record_bytes(f),
                       (uint32_t)(kvd_record_raw_bytes(f) / (2ull * f->chunk_tokens)),
                       shape_lanes(f),
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

/* The least and the largest of some numbers, of equal ones the first: which of two zeros that is
 * shows.  A NaN counts where it is the very first only. */
typedef struct pack_range {
    float lo, hi;
} pack_range;

static __device__ __forceinline__ pack_range pack_start(bool first, float x)
{
    return { first ? x : INFINITY, first ? x : -INFINITY };
}
static __device__ __forceinline__ void pack_see(pack_range *r, float lo, float hi)
{
    r->lo = lo < r->lo ? lo : r->lo;
    r->hi = hi > r->hi ? hi : r->hi;
}

typedef struct pack_mem {
    float lo[2 * PACK_THREADS], hi[2 * PACK_THREADS]; /* [part of the tokens][channel] */
    float inv[KVD_HEAD_DIM_MAX], base[KVD_HEAD_DIM_MAX];
} pack_mem;

/* Keys of one group: parameters per channel, then codes.  A thread has a pair of channels of some
 * tokens. */
static __device__ void pack_k(const record_shape &s, const uint8_t *src, uint32_t group,
                              uint8_t *param, uint8_t *dst, float top, pack_mem *m)
{
    const uint32_t d = s.f.head_dim, pairs = d / 2, n_part = min(PACK_THREADS / pairs, PACK_PARTS);
    const uint32_t first = group * KVD_RECORD_GROUP, end = first + KVD_RECORD_GROUP;
    const uint32_t part = threadIdx.x / pairs, pair = threadIdx.x % pairs;
    uint16_t      *par  = (uint16_t *)(param + 4ull * group * d);
    const uint32_t each = (KVD_RECORD_GROUP + n_part - 1) / n_part;
    const uint32_t t0 = first + part * each, t1 = part < n_part ? min(t0 + each, end) : 0;

    for (uint32_t k = 0; k < 2 && part < n_part; k++) {
        const uint32_t i = 2 * pair + k;
        pack_range     r =
            pack_start(part == 0, sp_row_at(s.f.raw, pack_raw_row(s, src, first, false), i));

#pragma unroll 8
        for (uint32_t t = t0; t < t1; t++) {
            const float x = sp_row_at(s.f.raw, pack_raw_row(s, src, t, false), i);
            pack_see(&r, x, x);
        }
        m->lo[part * d + i] = r.lo;
        m->hi[part * d + i] = r.hi;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < d; i += PACK_THREADS) {
        pack_range r = { m->lo[i], m->hi[i] };

        for (uint32_t k = 1; k < n_part; k++)
            pack_see(&r, m->lo[k * d + i], m->hi[k * d + i]);
        pack_param(r.lo, r.hi, top, &par[i], &par[d + i], &m->inv[i], &m->base[i]);
    }
    __syncthreads();
#pragma unroll 8
    for (uint32_t t = t0; t < t1; t++) {
        const uint8_t *row = pack_raw_row(s, src, t, false);
        uint32_t       c[2];

        for (uint32_t k = 0; k < 2; k++)
            c[k] = pack_code(sp_row_at(s.f.raw, row, 2 * pair + k), m->base[2 * pair + k],
                             m->inv[2 * pair + k], top);
        pack_put(s, dst, t, false, pair, c[0], c[1]);
    }
}

/* Values of one token, by a warp; a lane has neighbouring pairs. */
static __device__ void pack_v(const record_shape &s, const uint8_t *src, uint32_t t,
                              uint16_t *param, uint8_t *dst, float top)
{
    const uint32_t pairs = s.f.head_dim / 2, each = (pairs + WARP - 1) / WARP;
    const uint32_t lane = threadIdx.x % WARP, end = min((lane + 1) * each, pairs);
    const uint8_t *row = pack_raw_row(s, src, t, true);
    pack_range     r   = pack_start(lane == 0, sp_row_at(s.f.raw, row, 0));
    uint16_t       scale, least;
    float          inv, base;

    for (uint32_t i = 2 * lane * each; i < 2 * end; i++) {
        const float x = sp_row_at(s.f.raw, row, i);
        pack_see(&r, x, x);
    }
    for (uint32_t d = 1; d < WARP; d *= 2) { /* of a pair of lanes the lower one's are first */
        pack_range       before = { __shfl_xor_sync(ALL_LANES, r.lo, d),
                                    __shfl_xor_sync(ALL_LANES, r.hi, d) };
        const pack_range mine   = r;

        r = lane & d ? before : mine;
        pack_see(&r, lane & d ? mine.lo : before.lo, lane & d ? mine.hi : before.hi);
    }
    pack_param(r.lo, r.hi, top, &scale, &least, &inv, &base);
    if (lane == 0) {
        param[t]                    = scale;
        param[s.f.block_tokens + t] = least;
    }
    for (uint32_t p = lane * each; p < end; p++)
        pack_put(s, dst, t, true, p, pack_code(sp_row_at(s.f.raw, row, 2 * p), base, inv, top),
                 pack_code(sp_row_at(s.f.raw, row, 2 * p + 1), base, inv, top));
}

/* A lane's blocks along y: one for each group of keys, then one for PACK_TOKENS tokens' values. */
static __global__ void __launch_bounds__(PACK_THREADS)
    pack_lanes(const kvd_record_pack_args a, const record_shape s)
{
    __shared__ pack_mem m;
    const uint8_t      *src     = (const uint8_t *)a.src + a.src_off[blockIdx.x];
    uint8_t            *param   = (uint8_t *)a.param + a.param_off[blockIdx.x];
    uint8_t            *dst     = (uint8_t *)a.dst + a.dst_off[blockIdx.x];
    const float         top     = a.format.type == KVD_RECORD_INT8 ? 255.0f : 15.0f;
    const uint32_t      n_group = a.format.block_tokens / KVD_RECORD_GROUP;

    if (blockIdx.y < n_group) {
        pack_k(s, src, blockIdx.y, param, dst, top, &m);
        return;
    }
    const uint32_t first = (blockIdx.y - n_group) * PACK_TOKENS;
    for (uint32_t t = threadIdx.x / WARP; t < PACK_TOKENS; t += PACK_THREADS / WARP)
        pack_v(s, src, first + t, (uint16_t *)(param + 4ull * n_group * a.format.head_dim), dst,
               top);
}

/* Values as they are. */
static __global__ void __launch_bounds__(PACK_THREADS)
    pack_values(const kvd_record_pack_args a, const record_shape s)
{
    const uint8_t *src  = (const uint8_t *)a.src + a.src_off[blockIdx.x];
    uint8_t       *dst  = (uint8_t *)a.dst + a.dst_off[blockIdx.x];
    const uint32_t step = gridDim.y * (PACK_THREADS / WARP);

    for (uint32_t c = blockIdx.y * (PACK_THREADS / WARP) + threadIdx.x / WARP;
         c < a.format.block_tokens / a.format.chunk_tokens; c += step)
        copy_record(src + (uint64_t)c * s.raw + s.packed, dst + (uint64_t)c * s.packed, s.packed);
}

kvd_status cuda_record_pack(kvd_stream *st, const kvd_record_pack_args *a, kvd_err *err)
{
    const record_shape s       = cuda_record_shape(&a->format);
    const uint32_t     n_group = a->format.block_tokens / KVD_RECORD_GROUP;
    const uint32_t     n_value = a->format.block_tokens / PACK_TOKENS;

    cuda_enter(st);
    if (a->n == 0)
        return KVD_OK;
    if (a->format.type == KVD_RECORD_VALUES)
        pack_values<<<dim3((uint32_t)a->n, n_group), PACK_THREADS, 0, st->s>>>(*a, s);
    else
        pack_lanes<<<dim3((uint32_t)a->n, n_group + n_value), PACK_THREADS, 0, st->s>>>(*a, s);
    return cuda_launched("record_pack", err);
}

/* ---- unpack ------------------------------------------------------------------------ */

/* Where a record is not taken whole by words, it goes through shared memory: what it is read from
 * may be where it is written to. */
static __global__ void __launch_bounds__(UNPACK_THREADS)
    unpack_records(const kvd_record_unpack_args a, const record_shape s, uint32_t each)
{
    extern __shared__ uint4 unpack_mem[];
    uint8_t                *packed = (uint8_t *)unpack_mem + threadIdx.x / WARP * each;
    const uint32_t          n_warp = blockDim.x / WARP;
    const bool              whole  = s.packed <= UNPACK_WORDS * 4 * WARP;

    for (uint64_t i = (uint64_t)blockIdx.x * n_warp + threadIdx.x / WARP; i < a.n;
         i += (uint64_t)gridDim.x * n_warp) {
        const unpack_place p = { (const uint8_t *)a.src + a.src_off[i],
                                 (const uint8_t *)a.param + a.param_off[i],
                                 (uint8_t *)a.dst + a.dst_off[i], a.chunk[i] };

        if (whole)
            unpack_place_one(s, p, packed);
        else
            unpack_record(s, p.chunk, p.src, p.param, p.dst, packed);
    }
}

kvd_status cuda_record_unpack(kvd_stream *st, const kvd_record_unpack_args *a, kvd_err *err)
{
    const cuda_backend *be     = cuda_enter(st);
    const record_shape  s      = cuda_record_shape(&a->format);
    const uint32_t      each   = (uint32_t)kvd_align_up(s.packed, 16);
    const uint32_t      n_warp = (uint32_t)kvd_min_u64(UNPACK_THREADS / WARP, UNPACK_SMEM / each);
    const uint32_t      most   = on_host(a->src) ? COPY_HOST_GRID : 8 * be->n_sm;

    if (a->n == 0)
        return KVD_OK;
    unpack_records<<<(uint32_t)kvd_min_u64(most, kvd_div_up(a->n, n_warp)), n_warp * WARP,
                     n_warp * each, st->s>>>(*a, s, each);
    return cuda_launched("record_unpack", err);
}
