/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_attn.cu - exact causal attention: which kernel, how many splits, and their scratch. */
#include "backend/cuda/cuda_attn.cuh"

#define ATTN_SPLIT_KEYS 128u /* a split of fewer is not worth its merge */
#define ATTN_BLOCKS     4u   /* blocks per multiprocessor that splits aim at, at most */
#define ATTN_ROWS       64u  /* rows of one launch */
#define ATTN_FIXED      16u  /* splits where the batch must not change a result */
#define ATTN_DECODE     4u   /* rows a sequence, up to which rows go one by one */
#define ATTN_WIDE       64u  /* rows a sequence, from which blocks of 128 rows pay */

/* Splits of a row's keys: enough to fill the machine with n_row rows, from scalars and limits.  The
 * blocks that it holds at once are the best number, unless that leaves many places empty. */
static uint32_t attn_n_split(const cuda_backend *be, const kvd_kv_layout *kv, bool decode,
                             uint32_t n_row)
{
    const uint64_t lanes = (uint64_t)kv->n_kv_head * n_row;
    uint64_t       place = ATTN_BLOCKS * be->n_sm;
    const uint64_t most =
        kvd_max_u64(1, kvd_min_u64(ATTN_SPLIT_MAX, be->lim.n_ctx / ATTN_SPLIT_KEYS));

    if (be->deterministic)
        return (uint32_t)kvd_min_u64(ATTN_FIXED, most);
    if (decode) {
        const uint64_t once = (uint64_t)cuda_attn_decode_blocks(kv) * be->n_sm;

        if (once % lanes <= once / 16)
            place = once;
    }
    return (uint32_t)kvd_max_u64(1, kvd_min_u64(most, place / lanes));
}

/* The most that n_row * n_split comes to, with room for a KV head count unknown here. */
uint64_t cuda_attn_scratch_bytes(const cuda_backend *be, const kvd_backend_limits *lim)
{
    const uint64_t fixed = (uint64_t)ATTN_ROWS * ATTN_FIXED;
    const uint64_t full  = (uint64_t)ATTN_BLOCKS * be->n_sm + ATTN_ROWS;
    const uint64_t rows  = be->deterministic ? fixed : full;

    return rows * lim->n_head * ((uint64_t)lim->head_dim + 2) * sizeof(float);
}

/* Many rows of bf16 keys; *done: they were. */
static kvd_status attn_flash(const cuda_backend *be, const kvd_attn_args *a, cudaStream_t s,
                             bool *done, kvd_err *err)
{
    *done = false;
    if (be->cc == 90 && a->n_token > ATTN_WIDE * a->n_seq)
        KVD_TRY(cuda_attn_hopper(a, s, done, err));
    if (*done || !cuda_attn_flash_can(&a->kv))
        return KVD_OK;
    *done = true;
    return cuda_attn_flash(a, s, err);
}

kvd_status cuda_attn(kvd_stream *st, const kvd_attn_args *a, kvd_err *err)
{
    const cuda_backend *be     = cuda_enter(st);
    const bool          exact  = be->precise || be->deterministic;
    const bool          decode = !be->precise && cuda_attn_decode_can(&a->kv);
    bool                done   = false;
    uint32_t            n_split;

    kvd_assert(a->n_head % a->kv.n_kv_head == 0 && a->kv.head_dim <= KVD_HEAD_DIM_MAX);
    kvd_assert(a->n_token <= be->lim.n_token);
    if (a->n_seq == 0 || a->n_token == 0)
        return KVD_OK;
    if (!exact && a->n_token > ATTN_DECODE * a->n_seq)
        KVD_TRY(attn_flash(be, a, st->s, &done, err));
    if (done)
        return KVD_OK;
    n_split = attn_n_split(be, &a->kv, decode, (uint32_t)kvd_min_u64(a->n_token, ATTN_ROWS));
    for (uint32_t row = 0; row < a->n_token; row += ATTN_ROWS) {
        const uint32_t n     = (uint32_t)kvd_min_u64(ATTN_ROWS, a->n_token - row);
        const uint64_t bytes = (uint64_t)n * a->n_head * n_split * (a->kv.head_dim + 2ull) * 4;
        float         *part  = (float *)cuda_scratch_of(be, CUDA_SCRATCH_ATTN, bytes);

        if (decode)
            cuda_attn_decode(be, a, row, n, n_split, part, st->s);
        else
            cuda_attn_rows(be, a, row, n, n_split, part, st->s);
        if (n_split > 1)
            cuda_attn_merge(be, a, row, n, n_split, part, st->s);
    }
    return cuda_launched("attn", err);
}
