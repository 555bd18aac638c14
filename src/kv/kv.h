/* SPDX-License-Identifier: Apache-2.0 */
/* kv.h - the door to kv/: the KV store.
 *
 * A store holds the K and V of up to n_seq sequences for all layers, in blocks of block_tokens
 * tokens taken from one pool of fixed size.  It knows shapes and bytes, never the model: K and V
 * come in, views (block lists and a layout) go out to the kernels.
 *
 * Life of a token: kv_seq_reserve() makes room, kernels write, kv_seq_commit() makes it part of the
 * sequence; kv_seq_release() gives the room back instead.  Nothing else changes a sequence but
 * kv_seq_truncate().
 *
 * Thread: the thread that owns the session.  Lengths in tokens, offsets in bytes. */
#ifndef KVD_KV_H
#define KVD_KV_H

#include "backend/backend.h"
#include "base/base.h"

#define KV_BLOCK_TOKENS 256u
#define KV_CHUNK_TOKENS 4u

typedef struct kv_params {
    uint32_t  n_layer, n_kv_head, head_dim;
    uint32_t  n_seq;   /* sequences */
    uint32_t  n_ctx;   /* most tokens of one sequence */
    uint64_t  n_token; /* capacity shared by all sequences; rounded up to whole blocks */
    kvd_dtype type;    /* F32 or BF16 */
} kv_params;

typedef struct kv_sizes {
    uint64_t bytes_per_token; /* K and V over all layers and heads */
    uint64_t block_bytes;
    uint64_t n_block;
    uint64_t pool_bytes; /* device */
    uint64_t host_bytes; /* metadata on the heap */
} kv_sizes;

typedef struct kv_store kv_store;

/* KVD_E_INVAL when a product leaves 64 bits. */
kvd_status kv_plan(const kv_params *p, kv_sizes *out, kvd_err *err);

kvd_status kv_store_open(kv_store **out, kvd_backend *be, const kv_params *p, kvd_err *err);
void       kv_store_close(kv_store *s); /* NULL is a no-op */

uint32_t kv_seq_len(const kv_store *s, uint32_t seq);
uint64_t kv_used_tokens(const kv_store *s); /* committed, over all sequences */
uint64_t kv_capacity_tokens(const kv_store *s);

/* Room for n_new tokens behind the committed ones.  KVD_E_FULL names the limit that was hit; the
 * sequence is then as it was. */
kvd_status kv_seq_reserve(kv_store *s, uint32_t seq, uint32_t n_new, kvd_err *err);
void       kv_seq_commit(kv_store *s, uint32_t seq, uint32_t n_new);    /* n_new were reserved */
void       kv_seq_release(kv_store *s, uint32_t seq);                   /* unused room goes back */
void       kv_seq_truncate(kv_store *s, uint32_t seq, uint32_t n_keep); /* n_keep <= length */

/* For the kernels: where a layer's lanes lie, and the blocks of a sequence (committed and reserved;
 * valid until the sequence changes). */
kvd_kv_layout   kv_layout(const kv_store *s, uint32_t layer);
const uint64_t *kv_seq_blocks(const kv_store *s, uint32_t seq);

/* Recounts everything; asserts on the first invariant that does not hold. */
void kv_check(const kv_store *s);

#endif
