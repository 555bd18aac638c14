/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_zone.cu - attention to the cells of an estimation zone, in place of what a step does not
 * attend to: one block per query head, plain and untuned, for any shape.
 * Owns: nothing.  Thread: the backend's caller. */
#include "backend/cuda/cuda_sparse.cuh"

#define ZONE_WARPS  8u
#define ZONE_EACH   (KVD_HEAD_DIM_MAX / WARP)
#define ZONE_NO_KEY -1e30f /* what partial maxima start from, see cuda_span.cu */

typedef struct zone_mem {
    float o[ZONE_WARPS][KVD_HEAD_DIM_MAX], max[ZONE_WARPS], sum[ZONE_WARPS];
} zone_mem;

/* Every ZONE_WARPS-th cell, in their order. */
static __device__ void zone_cells(const kvd_attn_zone_args &a, const kvd_zone_seq &z,
                                  uint32_t kv_head, const float *q, zone_mem *m)
{
    const uint32_t  dim = a.zone.head_dim, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const kvd_dtype type         = a.zone.type;
    const uint16_t *left         = z.left + kv_head * a.left_stride;
    float           o[ZONE_EACH] = { 0.0f }, max = ZONE_NO_KEY, sum = 0.0f;

    for (uint32_t i = warp; i < z.n_cell; i += ZONE_WARPS) {
        const uint8_t *row = cuda_kv_row(a.zone, z.zblock, kv_head, i);
        float          dot = 0.0f, most, shrink, p;

        if (left[i] == 0)
            continue;
        for (uint32_t d = lane; d < dim; d += WARP)
            dot += q[d] * sp_row_at(type, row, d);
        dot    = cuda_warp_sum(dot) * a.scale + logf((float)left[i]);
        most   = fmaxf(max, dot);
        shrink = expf(max - most);
        p      = expf(dot - most);
        max    = most;
        sum    = sum * shrink + p;
#pragma unroll
        for (uint32_t e = 0; e < ZONE_EACH; e++) {
            if (e * WARP + lane < dim)
                o[e] = o[e] * shrink +
                       p * sp_row_at(type, row + a.zone.record_bytes / 2, e * WARP + lane);
        }
    }
#pragma unroll
    for (uint32_t e = 0; e < ZONE_EACH; e++) {
        if (e * WARP + lane < dim)
            m->o[warp][e * WARP + lane] = o[e];
    }
    m->max[warp] = max;
    m->sum[warp] = sum;
    __syncthreads();
}

static __global__ void __launch_bounds__(ZONE_WARPS *WARP)
    zone_attend(const __grid_constant__ kvd_attn_zone_args a, uint64_t part_floats)
{
    __shared__ zone_mem m;
    const uint32_t      group = a.n_head / a.zone.n_kv_head, dim = a.zone.head_dim;
    const uint32_t      lane = blockIdx.y, h = blockIdx.x, kv_head = lane % a.zone.n_kv_head;
    const uint64_t      row = a.row[lane / a.zone.n_kv_head], n_o = (uint64_t)group * dim;
    const uint64_t      head = (uint64_t)kv_head * group + h;
    float              *part = a.part + lane * part_floats;
    const float         max0 = part[n_o + h], sum0 = part[n_o + group + h];
    float               max = max0, sum;

    zone_cells(a, a.seq[lane / a.zone.n_kv_head], kv_head, a.q + row * a.q_stride + head * dim, &m);
    for (uint32_t w = 0; w < ZONE_WARPS; w++)
        max = fmaxf(max, m.max[w]);
    sum = sum0 * expf(max0 - max);
    for (uint32_t w = 0; w < ZONE_WARPS; w++)
        sum += m.sum[w] * expf(m.max[w] - max);
    for (uint32_t d = threadIdx.x; d < dim; d += blockDim.x) {
        float o = part[(uint64_t)h * dim + d] * expf(max0 - max);

        for (uint32_t w = 0; w < ZONE_WARPS; w++)
            o += m.o[w][d] * expf(m.max[w] - max);
        part[(uint64_t)h * dim + d] = o;
        if (a.out)
            a.out[row * a.out_stride + head * dim + d] = o / sum;
    }
    __syncthreads(); /* all have read max0 and sum0 */
    if (threadIdx.x == 0) {
        part[n_o + h]         = max;
        part[n_o + group + h] = sum;
        if (a.lse)
            a.lse[row * a.lse_stride + head] = sum > 0.0f ? max + logf(sum) : -INFINITY;
    }
}

kvd_status cuda_attn_zone(kvd_stream *st, const kvd_attn_zone_args *a, kvd_err *err)
{
    cuda_enter(st);
    if (a->n_row == 0)
        return KVD_OK;
    kvd_assert(a->n_head % a->zone.n_kv_head == 0 && a->zone.head_dim <= KVD_HEAD_DIM_MAX);
    zone_attend<<<dim3(a->n_head / a->zone.n_kv_head, a->n_row * a->zone.n_kv_head),
                  ZONE_WARPS * WARP, 0, st->s>>>(
        *a, kvd_attn_part_floats(a->n_head / a->zone.n_kv_head, a->zone.head_dim));
    return cuda_launched("attn_zone", err);
}
