/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_select_fast.cuh - logits by INT4 landmarks of one plane, for heads of 64 or 128 and blocks
 * of at least 32 chunks: what the kernels of cuda_select_fast.cu and cuda_select_whole.cu share.
 *
 * A lane of an index block lies in one piece, so a warp has it copied into shared memory by the
 * bulk copy engine and depends on no other warp until its sums are added up.  It takes all 64
 * chunks by tensor cores: rows are chunks, columns query heads.  Codes are operands as they are:
 * four bits that are masked out of a word are a binary16 of code x 2^-24 (or 16 times that, and
 * the query a 16th), exactly, which costs one instruction for two of them.  Their channels' scales,
 * which 32 chunks share, go to the other side: query x scale is made anew for each 32 chunks, as a
 * binary16, whose 2^-12 is little next to what the codes have lost.  Query x minimum is added up by
 * the same products, for codes of 1.  Where heads are 4 or fewer, columns 4 to 7 are for the second
 * 32 chunks, so that both are made at once (each product is then half for nothing). */
#ifndef KVD_CUDA_SELECT_FAST_CUH
#define KVD_CUDA_SELECT_FAST_CUH

#include "backend/cuda/cuda_barrier.cuh"
#include "backend/cuda/cuda_select.cuh"

#define FAST_WARPS  16u
#define FAST_HEADS  8u
#define FAST_NARROW 4u       /* heads at most where both halves of a block are made at once */
#define FAST_NONE   (-1e30f) /* the maximum of nothing */

/* How a lane of an index block is read. */
typedef struct fast_shape {
    uint32_t bytes, stage; /* what is read, and its room in shared memory */
    uint32_t n_group;      /* of 32 chunks in a block */
    uint32_t depth;        /* index blocks of a warp in shared memory: 1 or 2 */
} fast_shape;

void cuda_select_fast_shape(const cpu_index_shape *s, uint32_t depth, fast_shape *out);

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

/* ---- copies --------------------------------------------------------------------------- */

static __device__ __forceinline__ void fast_ask(uint64_t *bar, void *to, const void *from,
                                                uint32_t bytes)
{
    bar_expect(bar, bytes);
    bar_copy(to, from, bytes, bar);
}

/* bar_wait(), with a loop that the compiler sees. */
static __device__ __forceinline__ void fast_await(uint64_t *bar, uint32_t parity)
{
    uint32_t done = 0;

    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(bar_addr(bar)), "r"(parity)
                     : "memory");
}

/* ---- queries -------------------------------------------------------------------------- */

/* A thread's channels of the query head that its column g is of: 8 (4 j + t) .. + 7 of row j, the
 * second four a 16th.  The products that it gets are of two heads. */
template <int ROWS> struct fast_query {
    __half2 part[ROWS][4];
    float   unit[2], radius[2]; /* what products are to be multiplied by; |q| / sqrt(dim) */
};

static __device__ __forceinline__ float fast_quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

static __device__ __forceinline__ float fast_quad_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* The first of the two heads whose logits this thread gets, and of which half of the block. */
template <bool WIDE> static __device__ __forceinline__ uint32_t fast_head0()
{
    const uint32_t t = threadIdx.x % 4;

    return WIDE ? 2 * t : t % 2 * 2;
}

template <bool WIDE> static __device__ __forceinline__ uint32_t fast_half()
{
    return WIDE ? 0 : threadIdx.x % 4 / 2;
}

/* A thread's channels of its head; q: of the lane's first head. */
template <int ROWS, bool WIDE>
static __device__ __forceinline__ void fast_read(const float *q, uint32_t group,
                                                 float (&x)[ROWS][8])
{
    const uint32_t g = threadIdx.x % WARP / 4, h = WIDE ? g : g % FAST_NARROW;
    const bool     real = h < group;

    q += h * 32 * ROWS + 8 * (threadIdx.x % 4);
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
        const float4 a = real ? *(const float4 *)(q + 32 * i) : make_float4(0, 0, 0, 0);
        const float4 b = real ? *(const float4 *)(q + 32 * i + 4) : make_float4(0, 0, 0, 0);

        x[i][0] = a.x;
        x[i][1] = a.y;
        x[i][2] = a.z;
        x[i][3] = a.w;
        x[i][4] = b.x;
        x[i][5] = b.y;
        x[i][6] = b.z;
        x[i][7] = b.w;
    }
}

/* Square root as the hardware has it, to 2^-23 of it. */
static __device__ __forceinline__ float fast_root(float x)
{
    float y;

    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* x: what fast_read() has read; scale: of logits. */
template <int ROWS, bool WIDE>
static __device__ __forceinline__ void fast_open(float (&x)[ROWS][8], float scale,
                                                 fast_query<ROWS> &out)
{
    float    max = 0.0f, sum = 0.0f, unit, inverse, radius;
    uint32_t e;

#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
#pragma unroll
        for (uint32_t c = 0; c < 8; c++) {
            x[i][c] *= scale;
            max = fmaxf(max, fabsf(x[i][c]));
            sum += x[i][c] * x[i][c];
        }
    }
    max     = fast_quad_max(max);
    radius  = fast_root(fast_quad_sum(sum) * (1.0f / (32 * ROWS))); /* heads of 32 x ROWS */
    e       = __float_as_uint(max) >> 23;     /* biased; 0 and 255 stay unscaled */
    e       = e > 4 && e < 250 ? e - 2 : 127; /* the largest: 4 to 8 */
    unit    = __uint_as_float(e << 23);
    inverse = __uint_as_float((254 - e) << 23);
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
#pragma unroll
        for (uint32_t p = 0; p < 4; p++) {
            const float by = p < 2 ? inverse : inverse * 0.0625f;

            out.part[i][p] = __floats2half2_rn(x[i][2 * p] * by, x[i][2 * p + 1] * by);
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        out.unit[k]   = __shfl_sync(ALL_LANES, unit, 4 * (fast_head0<WIDE>() + k));
        out.radius[k] = __shfl_sync(ALL_LANES, radius, 4 * (fast_head0<WIDE>() + k));
    }
}

/* ---- products ------------------------------------------------------------------------- */

static __device__ __forceinline__ void fast_mma(float (&c)[4], uint32_t a0, uint32_t a1,
                                                uint32_t a2, uint32_t a3, __half2 b0, __half2 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(*(const uint32_t *)&b0),
          "r"(*(const uint32_t *)&b1));
}

static __device__ __forceinline__ __half2 fast_pair(uint32_t halves)
{
    return *(const __half2 *)&halves;
}

/* Of two times two neighbours the first ones, or the second ones. */
static __device__ __forceinline__ __half2 fast_mix(__half2 x, __half2 y, uint32_t second)
{
    return fast_pair(
        __byte_perm(*(const uint32_t *)&x, *(const uint32_t *)&y, second ? 0x7632 : 0x5410));
}

/* Query x scale, in the order of codes in a word; and query x minimum, added to sums. */
template <int ROWS>
static __device__ __forceinline__ void fast_scaled(const uint8_t *scale, const fast_query<ROWS> &q,
                                                   uint32_t i, __half2 (&b)[4], __half2 (&sum)[4])
{
    const uint4   s = *(const uint4 *)(scale + 64 * i);
    const uint4   m = *(const uint4 *)(scale + 2 * 32 * ROWS + 64 * i);
    const __half2 x = __hmul2_rn(q.part[i][0], fast_pair(s.x));
    const __half2 y = __hmul2_rn(q.part[i][1], fast_pair(s.y));
    const __half2 z = __hmul2_rn(q.part[i][2], fast_pair(s.z));
    const __half2 w = __hmul2_rn(q.part[i][3], fast_pair(s.w));

    b[0]   = fast_mix(x, y, 0);
    b[1]   = fast_mix(x, y, 1);
    b[2]   = fast_mix(z, w, 0);
    b[3]   = fast_mix(z, w, 1);
    sum[0] = i ? __hfma2(q.part[i][0], fast_pair(m.x), sum[0])
               : __hmul2_rn(q.part[i][0], fast_pair(m.x));
    sum[1] = i ? __hfma2(q.part[i][1], fast_pair(m.y), sum[1])
               : __hmul2_rn(q.part[i][1], fast_pair(m.y));
    sum[2] = i ? __hfma2(q.part[i][2], fast_pair(m.z), sum[2])
               : __hmul2_rn(q.part[i][2], fast_pair(m.z));
    sum[3] = i ? __hfma2(q.part[i][3], fast_pair(m.w), sum[3])
               : __hmul2_rn(q.part[i][3], fast_pair(m.w));
}

/* Sums of query x minimum, of this thread's two columns, in the same units as codes'. */
static __device__ __forceinline__ void fast_minima(const __half2 (&sum)[4], float (&c)[4])
{
    const uint32_t one = 0x00010001, sixteen = 0x00100010;

    fast_mma(c, one, 0, one, 0, sum[0], sum[1]);
    fast_mma(c, sixteen, 0, sixteen, 0, sum[2], sum[3]);
}

/* Of 32 chunks: 4 (lane / 4) .. + 3, two columns. */
typedef struct fast_sums {
    float x[4], y[4];
} fast_sums;

/* 32 channels of 32 chunks. */
static __device__ __forceinline__ void fast_codes(const uint8_t *code, const __half2 (&b)[4],
                                                  fast_sums     &s)
{
    const uint32_t m = 0x000f000f, n = 0x00f000f0;
    const uint4    w  = *(const uint4 *)code;
    const uint4    w8 = make_uint4(w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8);

    fast_mma(s.x, w.x & m, w.y & m, w8.x & m, w8.y & m, b[0], b[1]);
    fast_mma(s.y, w.z & m, w.w & m, w8.z & m, w8.w & m, b[0], b[1]);
    fast_mma(s.x, w.x & n, w.y & n, w8.x & n, w8.y & n, b[2], b[3]);
    fast_mma(s.y, w.z & n, w.w & n, w8.z & n, w8.w & n, b[2], b[3]);
}

/* ---- logits --------------------------------------------------------------------------- */

/* [head of two][chunk of four] */
typedef struct fast_four {
    float v[2][4];
} fast_four;

static __device__ __forceinline__ fast_four fast_take(const fast_sums &s)
{
    fast_four f;

#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        f.v[k][0] = s.x[k];
        f.v[k][1] = s.x[2 + k];
        f.v[k][2] = s.y[k];
        f.v[k][3] = s.y[2 + k];
    }
    return f;
}

/* Products to logits; radius: the chunks', if `has`; base: query x minimum; more: to be added. */
template <int ROWS>
static __device__ __forceinline__ void fast_logits(uint2 radius, bool has,
                                                   const fast_query<ROWS> &q,
                                                   const float (&base)[4], const float (&more)[2],
                                                   fast_four &f)
{
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        const float unit = q.unit[k] * 0x1p24f, offset = unit * base[k] + more[k];

#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            f.v[k][i] = f.v[k][i] * unit + offset;
    }
    if (!has)
        return;
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        f.v[k][0] += q.radius[k] * sp_from_f16((uint16_t)radius.x);
        f.v[k][1] += q.radius[k] * sp_from_f16((uint16_t)(radius.x >> 16));
        f.v[k][2] += q.radius[k] * sp_from_f16((uint16_t)radius.y);
        f.v[k][3] += q.radius[k] * sp_from_f16((uint16_t)(radius.y >> 16));
    }
}

/* Where in a block of the index a thread finds its part. */
typedef struct fast_spot {
    uint32_t code[2], scale[2], radius[2]; /* [half]; narrow: [0] is the thread's own half's */
    bool     has_radius;
} fast_spot;

template <int ROWS, bool WIDE>
static __device__ __forceinline__ fast_spot fast_find(const select_job &j, const fast_shape &f)
{
    const cpu_index_plane &p = j.s.mark[0];
    const uint32_t         g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    const uint32_t         two = f.n_group > 1, param = 4 * 32 * ROWS;
    fast_spot              s;

    s.code[0]    = (uint32_t)p.code_off + g / 4 * (ROWS * 256) + 16 * (g % 4) + 64 * t;
    s.code[1]    = s.code[0] + 2 * two * (uint32_t)p.tile_bytes;
    s.scale[0]   = 16 * t + (WIDE ? 0 : g / FAST_NARROW * two * param);
    s.scale[1]   = 16 * t + two * param;
    s.radius[0]  = (uint32_t)j.s.radius_off + 8 * g + fast_half<WIDE>() * two * 2 * CPU_INDEX_GROUP;
    s.radius[1]  = (uint32_t)j.s.radius_off + 8 * g + two * 2 * CPU_INDEX_GROUP;
    s.has_radius = j.s.radius;
    return s;
}

/* What is known of a block when it has been read. */
template <bool WIDE> struct fast_raw {
    fast_sums s[2];                 /* [half] */
    __half2   sum[WIDE ? 2 : 1][4]; /* of query x minimum */
    uint2     radius[WIDE ? 2 : 1];
};

/* One block of the index, as it lies in shared memory.  Where there is one half it is taken twice.
 */
template <int ROWS, bool WIDE>
static __device__ __forceinline__ void fast_block(const fast_spot &at, const uint8_t *stage,
                                                  const fast_query<ROWS> &q, fast_raw<WIDE> &r)
{
    r.s[0] = r.s[1] = fast_sums{};
    for (uint32_t u = 0; u < (WIDE ? 2 : 1); u++)
        r.radius[u] = at.has_radius ? *(const uint2 *)(stage + at.radius[u]) : make_uint2(0, 0);
#pragma unroll
    for (uint32_t i = 0; i < ROWS; i++) {
        __half2 b[4];

        fast_scaled<ROWS>(stage + at.scale[0], q, i, b, r.sum[0]);
        fast_codes(stage + at.code[0] + 256 * i, b, r.s[0]);
        if (WIDE)
            fast_scaled<ROWS>(stage + at.scale[1], q, i, b, r.sum[WIDE]);
        fast_codes(stage + at.code[1] + 256 * i, b, r.s[1]);
    }
}

/* Its logits, of the half that fast_half() says, for WIDE of both.  more: to be added to each
 * head's. */
template <int ROWS, bool WIDE>
static __device__ __forceinline__ void fast_close(const fast_spot &at, const fast_query<ROWS> &q,
                                                  const fast_raw<WIDE> &r, const float (&more)[2],
                                                  fast_four (&out)[WIDE ? 2 : 1])
{
    float base[2][4] = {};

    fast_minima(r.sum[0], base[0]);
    out[0] = fast_take(r.s[0]);
    if (WIDE) {
        fast_minima(r.sum[WIDE], base[1]);
        out[WIDE] = fast_take(r.s[1]);
        fast_logits<ROWS>(r.radius[WIDE], at.has_radius, q, base[1], more, out[WIDE]);
    } else {
        const fast_four o = fast_take(r.s[1]);

#pragma unroll
        for (uint32_t i = 0; i < 8; i++)
            out[0].v[i / 4][i % 4] = fast_half<WIDE>() ? o.v[i / 4][i % 4] : out[0].v[i / 4][i % 4];
    }
    fast_logits<ROWS>(r.radius[0], at.has_radius, q, base[0], more, out[0]);
}

/* Of four chunks from c on those outside [first, end) have no weight. */
static __device__ __forceinline__ void fast_ends(fast_four &f, uint32_t c, uint32_t first,
                                                 uint32_t end)
{
    if (c >= first && c + 4 <= end)
        return;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const bool in = c + i >= first && c + i < end;

        f.v[0][i] = in ? f.v[0][i] : -INFINITY;
        f.v[1][i] = in ? f.v[1][i] : -INFINITY;
    }
}

/* ---- walks --------------------------------------------------------------------------- */

/* A warp's blocks: every step-th from the first.  Lane i knows where the i-th of the next 32 lies.
 */
typedef struct fast_walk {
    const kvd_select_seq *seq;
    const uint8_t        *pool;
    uint8_t              *stage;   /* this warp's [depth] */
    uint64_t             *arrived; /* likewise */
    uint32_t              block, step, end;
    uint64_t              off;
} fast_walk;

static __device__ __forceinline__ void fast_look(fast_walk &w, uint32_t n)
{
    const uint64_t mine = w.block + (uint64_t)(threadIdx.x % WARP + n) * w.step;

    w.off = mine < w.end ? w.seq->iblock[mine] : 0;
}

/* Which of its places the n-th block has, and how often it has been filled before, modulo 2. */
static __device__ __forceinline__ uint32_t fast_place(const fast_shape &f, uint32_t n)
{
    return n & (f.depth - 1);
}

static __device__ __forceinline__ uint32_t fast_turn(const fast_shape &f, uint32_t n)
{
    return n >> (f.depth - 1) & 1;
}

/* Asks for the warp's n-th block, if there is one. */
static __device__ __forceinline__ void fast_next(const fast_shape &f, const fast_walk &w,
                                                 uint32_t n)
{
    const uint64_t off = __shfl_sync(ALL_LANES, (unsigned long long)w.off, n % WARP);

    if (threadIdx.x % WARP == 0 && w.block + (uint64_t)n * w.step < w.end)
        fast_ask(w.arrived + fast_place(f, n), w.stage + fast_place(f, n) * f.stage, w.pool + off,
                 f.bytes);
}

/* Finds out where the first ones lie; w.seq, block, step and end are there. */
static __device__ __forceinline__ void fast_aim(const select_job &j, fast_walk &w)
{
    w.pool = (const uint8_t *)j.a.index.pool + j.a.index.lane_off +
             blockIdx.y % j.a.index.n_kv_head * j.a.index.head_stride;
    fast_look(w, 0);
}

/* Asks for them; w.stage and arrived are there. */
static __device__ __forceinline__ void fast_begin(const fast_shape &f, const fast_walk &w)
{
    if (threadIdx.x % WARP == 0) {
        bar_init(w.arrived, 1);
        if (f.depth > 1)
            bar_init(w.arrived + 1, 1);
        bar_fence();
    }
    __syncwarp();
    fast_next(f, w, 0);
    if (f.depth > 1)
        fast_next(f, w, 1);
}

/* Its n-th block, when it is there. */
static __device__ __forceinline__ const uint8_t *fast_arrive(const fast_shape &f,
                                                             const fast_walk &w, uint32_t n)
{
    fast_await(w.arrived + fast_place(f, n), fast_turn(f, n));
    return w.stage + fast_place(f, n) * f.stage;
}

/* All lanes have read the n-th block: its place may be filled again. */
static __device__ __forceinline__ void fast_leave(const fast_shape &f, fast_walk &w, uint32_t n)
{
    __syncwarp();
    if ((n + f.depth) % WARP == 0)
        fast_look(w, n + f.depth);
    fast_next(f, w, n + f.depth);
}

#endif /* of compute capability 9.0 */

#endif
