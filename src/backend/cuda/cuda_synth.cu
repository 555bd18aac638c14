/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_synth.cu - what measurements of speed need: made-up rows. */
#include "backend/cuda/cuda_impl.h"
#include "backend/cuda/cuda_launch.cuh"
#include "backend/synth.h"

#define SYNTH_THREADS 128u

/* The sequence of row i, and its number there. */
static __device__ bool find_row(const kvd_synth_args &a, uint32_t i, uint32_t *seq, uint32_t *r)
{
    for (uint32_t s = 0; s < a.n_seq; s++) {
        if (i < a.seq[s].n_row) {
            *seq = s;
            *r   = i;
            return true;
        }
        i -= a.seq[s].n_row;
    }
    return false;
}

static __device__ __forceinline__ void store(const kvd_kv_layout &kv, uint8_t *row, uint32_t d,
                                             float x)
{
    if (kv.type == KVD_DTYPE_F32)
        ((float *)row)[d] = x;
    else
        ((__nv_bfloat16 *)row)[d] = __float2bfloat16_rn(x);
}

/* A block for each row and head: query heads first, if they are wanted, then KV heads. */
static __global__ void synth_kernel(kvd_synth_args a, uint32_t n_q)
{
    const bool     is_q = blockIdx.y < n_q;
    const uint32_t head = is_q ? blockIdx.y : blockIdx.y - n_q, dim = a.kv.head_dim;
    uint32_t       s, r;

    cuda_pdl_wait();
    cuda_pdl_go();
    if (!find_row(a, blockIdx.x, &s, &r))
        return;
    const kvd_kv_seq seq    = a.seq[s];
    const uint32_t   stream = a.stream + s, pos = seq.n_past + r;
    if (is_q) {
        const uint32_t seed  = synth_seed(SYNTH_Q, stream, a.layer, head);
        const float    noise = synth_noise(a.reuse, a.layer, head / (a.n_head / a.kv.n_kv_head));
        float         *q     = a.q + (seq.first_row + r) * a.q_stride + (uint64_t)head * dim;

        for (uint32_t d = threadIdx.x; d < dim; d += blockDim.x)
            q[d] = synth_q_at(seed, d, pos, noise);
        return;
    }
    const uint32_t ks = synth_seed(SYNTH_K, stream, a.layer, head);
    const uint32_t vs = synth_seed(SYNTH_V, stream, a.layer, head);
    uint8_t       *k  = cuda_kv_row(a.kv, seq.block, head, pos);
    for (uint32_t d = threadIdx.x; d < dim; d += blockDim.x) {
        store(a.kv, k, d, synth_k_at(ks, d, pos));
        store(a.kv, k + a.kv.record_bytes / 2, d, synth_v_at(vs, d, pos));
    }
}

kvd_status cuda_synth(kvd_stream *st, const kvd_synth_args *a, kvd_err *err)
{
    const uint32_t n_q = a->q ? a->n_head : 0;

    if (a->n_token == 0)
        return KVD_OK;
    cuda_launch(cuda_enter(st), synth_kernel, dim3(a->n_token, n_q + a->kv.n_kv_head),
                dim3(SYNTH_THREADS), 0, st->s, *a, n_q);
    return cuda_launched("synth", err);
}
