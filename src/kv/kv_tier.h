/* SPDX-License-Identifier: Apache-2.0 */
/* kv_tier.h - private to the disk tier: kv_tier.c, kv_serve.c. */
#ifndef KVD_KV_TIER_H
#define KVD_KV_TIER_H

#include "kv/kv_cache.h"

#define KV_TIER_READS_MAX 8192u /* of one batch; more go in several */

typedef struct kv_tier_lane {
    uint32_t *list;  /* [quota] chunks that have a host record */
    uint32_t  quota; /* host records at most */
    uint32_t  n;     /* of list */
    uint32_t  hand;  /* of list: where a place is looked for next (kv_serve.c) */
} kv_tier_lane;

typedef struct kv_serve kv_serve;

struct kv_tier {
    kv_tier_lane *lane;
    uint32_t     *list; /* where lanes' lists lie, one behind the other */
    kv_disk_unit *unit; /* [n_seq][blocks_max] where a sealed block is; 0: not bound */
    uint8_t      *in_unit;
    kvd_stream   *st;   /* of the step whose records are on their way */
    kv_arrival   *run;  /* [KV_TIER_READS_MAX] what a batch reads */
    kv_disk_read *read; /* [KV_TIER_READS_MAX] */
    uint64_t     *rank; /* [n_chunk_max]; no quota is more */
    uint32_t      lag;
    uint64_t      n_start; /* flights so far */
    uint32_t     *turn;    /* [n_layer] steps so far */
    kv_flight    *flight;  /* [n_layer][lag], by turn */
    kv_arrival   *arrival; /* [n_layer][lag][arrivals_max] */
    uint64_t      arrivals_max;
    uint8_t      *late; /* [lane][slots_max] what its slots wait for; NULL: lag 1 */
    uint32_t     *lost; /* [n_seq] first block that cannot be read */
    kv_land       land;
    kv_serve     *serve; /* NULL: no step goes through without the host */
    uint16_t     *ema;   /* averages as the host last saw them: the store's, or seen */
    kvd_mem       seen;
};

/* The read that brings an arrival to where it is to lie packed. */
kv_disk_read kv_tier_read_of(kv_store *s, const kv_arrival *a);
/* After a batch has failed: from which block on its sequences can no longer be had. */
void kv_tier_lose(kv_store *s, const kv_arrival *a, uint32_t n);
/* The chunk gets a host record: this one, or, of an arrival that has a place of its own, the place,
 * which becomes that record. */
void kv_tier_keep(kv_store *s, uint64_t lane, uint32_t chunk, const uint8_t *packed, uint32_t land,
                  uint32_t record);

/* kv_serve.c */
uint64_t   kv_serve_bytes(const kv_params *p);
kvd_status kv_serve_open(kv_store *s, kvd_err *err);
void       kv_serve_close(kv_store *s);

#endif
