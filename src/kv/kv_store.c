/* SPDX-License-Identifier: Apache-2.0 */
/* kv_store.c - sequences as lists of blocks out of one pool.
 *
 * Owns: the pool (device memory of the backend), a stack of free blocks, and per sequence a list of
 * block offsets long enough for n_ctx tokens.
 *
 *      free --reserve--> reserved --commit--> held --truncate--> free
 *                            \----release----> free
 *
 * Invariants
 *  (1) a block is on the free stack or in exactly one sequence's list, once;
 *  (2) a sequence's list covers its length, and between calls of reserve and commit or release, its
 *      reserved tokens; after release or truncate it covers the length and no block more;
 *  (3) n_used is the sum of lengths.
 *
 * Free blocks are taken lowest offset first after open, so a lone sequence lies contiguously. */
#include "kv/kv.h"

#include <inttypes.h>

typedef struct kv_seq {
    uint32_t  len;     /* committed tokens */
    uint32_t  n_block; /* blocks in the list */
    uint64_t *block;   /* [blocks_max] byte offsets into the pool */
} kv_seq;

struct kv_store {
    kvd_backend  *be;
    kv_params     params;
    kv_sizes      sizes;
    kvd_kv_layout layout; /* with layer 0's lane_off */
    kvd_mem       pool;
    uint32_t      blocks_max; /* of one sequence */
    uint64_t      n_free, n_used;
    uint64_t     *free_stack; /* [n_block] offsets; the top is taken next */
    kv_seq       *seq;        /* [n_seq] */
    uint64_t     *lists;      /* [n_seq][blocks_max], where seq[i].block points */
};

static uint32_t blocks_for(uint64_t n_token)
{
    return (uint32_t)kvd_div_up(n_token, KV_BLOCK_TOKENS);
}

kvd_status kv_plan(const kv_params *p, kv_sizes *out, kvd_err *err)
{
    const uint64_t elem = p->type == KVD_DTYPE_F32 ? 4 : 2;
    uint64_t       lanes, lists;
    bool           ok;

    kvd_assert(p->type == KVD_DTYPE_F32 || p->type == KVD_DTYPE_BF16);
    *out         = (kv_sizes){ 0 };
    out->n_block = kvd_div_up(p->n_token, KV_BLOCK_TOKENS);
    ok           = kvd_mul(p->n_layer, p->n_kv_head, &lanes) &&
         kvd_mul(lanes, 2 * elem * p->head_dim, &out->bytes_per_token) &&
         kvd_mul(out->bytes_per_token, KV_BLOCK_TOKENS, &out->block_bytes) &&
         kvd_mul(out->block_bytes, out->n_block, &out->pool_bytes) &&
         kvd_mul(p->n_seq, 8 * (uint64_t)blocks_for(p->n_ctx) + sizeof(kv_seq), &lists) &&
         kvd_add(lists, 8 * out->n_block + sizeof(kv_store), &out->host_bytes);
    if (!ok || out->pool_bytes > INT64_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "KV cache: %" PRIu64 " tokens of %u layers, %u KV heads, head size %u "
                        "are more bytes than can be addressed",
                        p->n_token, p->n_layer, p->n_kv_head, p->head_dim);
    return KVD_OK;
}

static void layout_init(kv_store *s)
{
    const kv_params *p    = &s->params;
    const uint64_t   elem = p->type == KVD_DTYPE_F32 ? 4 : 2;

    s->layout = (kvd_kv_layout){
        .type         = p->type,
        .n_kv_head    = p->n_kv_head,
        .head_dim     = p->head_dim,
        .chunk_tokens = KV_CHUNK_TOKENS,
        .block_tokens = KV_BLOCK_TOKENS,
        .record_bytes = 2 * KV_CHUNK_TOKENS * elem * p->head_dim,
        .head_stride  = 2 * KV_BLOCK_TOKENS * elem * p->head_dim,
        .pool         = s->pool.ptr,
    };
}

kvd_status kv_store_open(kv_store **out, kvd_backend *be, const kv_params *p, kvd_err *err)
{
    kvd_status st;
    kv_store  *s;
    kv_sizes   sizes;

    *out = NULL;
    KVD_TRY(kv_plan(p, &sizes, err));
    s = kvd_calloc(1, sizeof(*s));
    if (!s)
        return kvd_fail(err, KVD_E_NOMEM, 0, "KV cache: no memory for its metadata");
    s->be         = be;
    s->params     = *p;
    s->sizes      = sizes;
    s->blocks_max = blocks_for(p->n_ctx);
    s->seq        = kvd_calloc(p->n_seq, sizeof(*s->seq));
    s->lists      = kvd_calloc((size_t)p->n_seq * s->blocks_max, sizeof(*s->lists));
    s->free_stack = kvd_calloc(sizes.n_block, sizeof(*s->free_stack));
    if (!s->seq || !s->lists || !s->free_stack) {
        st = kvd_fail(err, KVD_E_NOMEM, 0,
                      "KV cache: no memory for its metadata (%" PRIu64 " bytes)", sizes.host_bytes);
        goto fail;
    }
    for (uint32_t i = 0; i < p->n_seq; i++)
        s->seq[i].block = s->lists + (size_t)i * s->blocks_max;
    for (uint64_t i = 0; i < sizes.n_block; i++)
        s->free_stack[i] = (sizes.n_block - 1 - i) * sizes.block_bytes;
    s->n_free = sizes.n_block;

    st = be->ops->mem_alloc(be, KVD_MEM_DEVICE, sizes.pool_bytes, &s->pool, err);
    if (st != KVD_OK)
        goto fail;
    layout_init(s);
    *out = s;
    return KVD_OK;
fail:
    kv_store_close(s);
    return st;
}

void kv_store_close(kv_store *s)
{
    if (!s)
        return;
    s->be->ops->mem_free(s->be, &s->pool);
    kvd_free(s->free_stack);
    kvd_free(s->lists);
    kvd_free(s->seq);
    kvd_free(s);
}

uint32_t kv_seq_len(const kv_store *s, uint32_t seq)
{
    kvd_assert(seq < s->params.n_seq);
    return s->seq[seq].len;
}

uint64_t kv_used_tokens(const kv_store *s)
{
    return s->n_used;
}

uint64_t kv_capacity_tokens(const kv_store *s)
{
    return s->sizes.n_block * KV_BLOCK_TOKENS;
}

/* Gives back the blocks beyond the first n_keep, latest first, so that they are taken again in the
 * order they had. */
static void drop_blocks(kv_store *s, kv_seq *q, uint32_t n_keep)
{
    while (q->n_block > n_keep)
        s->free_stack[s->n_free++] = q->block[--q->n_block];
    kvd_assert_dbg(s->n_free <= s->sizes.n_block);
}

kvd_status kv_seq_reserve(kv_store *s, uint32_t seq, uint32_t n_new, kvd_err *err)
{
    kv_seq        *q;
    const uint32_t n_ctx = s->params.n_ctx;
    uint32_t       need;

    kvd_assert(seq < s->params.n_seq);
    q = &s->seq[seq];
    if (n_new > n_ctx - q->len)
        return kvd_fail(err, KVD_E_FULL, 0,
                        "sequence %u holds %u tokens and cannot take %u more: its context is %u "
                        "tokens (-c)",
                        seq, q->len, n_new, n_ctx);
    need = blocks_for((uint64_t)q->len + n_new);
    if (need > q->n_block && need - q->n_block > s->n_free)
        return kvd_fail(err, KVD_E_FULL, 0,
                        "KV cache is full: sequence %u needs %u more blocks of %u tokens, %" PRIu64
                        " of %" PRIu64 " are free",
                        seq, need - q->n_block, KV_BLOCK_TOKENS, s->n_free, s->sizes.n_block);
    while (q->n_block < need)
        q->block[q->n_block++] = s->free_stack[--s->n_free];
    return KVD_OK;
}

void kv_seq_commit(kv_store *s, uint32_t seq, uint32_t n_new)
{
    kv_seq *q;

    kvd_assert(seq < s->params.n_seq);
    q = &s->seq[seq];
    kvd_assert(blocks_for((uint64_t)q->len + n_new) <= q->n_block);
    q->len += n_new;
    s->n_used += n_new;
}

void kv_seq_release(kv_store *s, uint32_t seq)
{
    kvd_assert(seq < s->params.n_seq);
    drop_blocks(s, &s->seq[seq], blocks_for(s->seq[seq].len));
}

void kv_seq_truncate(kv_store *s, uint32_t seq, uint32_t n_keep)
{
    kv_seq *q;

    kvd_assert(seq < s->params.n_seq);
    q = &s->seq[seq];
    kvd_assert(n_keep <= q->len);
    s->n_used -= q->len - n_keep;
    q->len = n_keep;
    drop_blocks(s, q, blocks_for(n_keep));
}

kvd_kv_layout kv_layout(const kv_store *s, uint32_t layer)
{
    kvd_kv_layout l = s->layout;

    kvd_assert(layer < s->params.n_layer);
    l.lane_off = (uint64_t)layer * s->params.n_kv_head * l.head_stride;
    return l;
}

const uint64_t *kv_seq_blocks(const kv_store *s, uint32_t seq)
{
    kvd_assert(seq < s->params.n_seq);
    return s->seq[seq].block;
}

/* How often the block at this offset is held; invariant (1) wants one. */
static uint32_t holders(const kv_store *s, uint64_t off)
{
    uint32_t n = 0;

    for (uint64_t i = 0; i < s->n_free; i++)
        n += s->free_stack[i] == off;
    for (uint32_t i = 0; i < s->params.n_seq; i++)
        for (uint32_t j = 0; j < s->seq[i].n_block; j++)
            n += s->seq[i].block[j] == off;
    return n;
}

void kv_check(const kv_store *s)
{
    uint64_t used = 0, held = 0;

    for (uint64_t i = 0; i < s->sizes.n_block; i++)
        kvd_assert(holders(s, i * s->sizes.block_bytes) == 1); /* (1) */
    for (uint32_t i = 0; i < s->params.n_seq; i++) {
        kvd_assert(blocks_for(s->seq[i].len) <= s->seq[i].n_block); /* (2) */
        used += s->seq[i].len;
        held += s->seq[i].n_block;
    }
    kvd_assert(used == s->n_used); /* (3) */
    kvd_assert(held + s->n_free == s->sizes.n_block);
}
