/* SPDX-License-Identifier: Apache-2.0 */
/* kv_cache.h - private to kv/: between the store and its block store on disk (kv_cache.c,
 * kv_restore.c). */
#ifndef KVD_KV_CACHE_H
#define KVD_KV_CACHE_H

#include "kv/kv_disk.h"
#include "kv/kv_impl.h"

enum {                  /* what a block holds besides tokens of prompts */
       MADE_DENSE  = 1, /* generated with dense attention */
       MADE_SPARSE = 2
};

#define KV_CACHE_ACCEPTED 3u                               /* provenances that a search takes */
extern const uint8_t kv_cache_accepted[KV_CACHE_ACCEPTED]; /* MADE_ bits, by index in the query */

typedef struct kv_cache_prov { /* a provenance as the block store takes it */
    uint8_t  byte[KV_DISK_PROV_BYTES];
    uint32_t bytes;
} kv_cache_prov;

typedef struct kv_cache_seq {
    const int32_t *token;   /* the caller's array of the sequence's ids */
    uint8_t        variant; /* what else K and V depend on, such as a choice of RoPE factors */
    kv_disk_key   *key;     /* [blocks_max] of sealed blocks */
    uint8_t        salt[KVD_SALT_BYTES_MAX];
    uint32_t       n_salt; /* bytes; 0: everybody's */
    uint8_t       *made;   /* [blocks_max] bits: generated tokens among the block's */
} kv_cache_seq;

typedef struct kv_cache_unit {
    kv_disk_put put;
    uint32_t    first, n; /* blocks */
} kv_cache_unit;

typedef struct kv_ferry kv_ferry;

/* A prefix on its way back (kv_restore.c): layer by layer, and where all is resident by parts of
 * lanes.  A sequence that holds tokens keeps its first `base` blocks, which are sealed.  Its raw
 * blocks behind those are set aside until what replaces them has been read. */
typedef struct kv_restore {
    kv_store      *s; /* NULL: none */
    kvd_stream    *st;
    kv_disk_match  match;
    kv_restore_ask ask;
    uint32_t       seq;
    uint32_t       old_len;     /* tokens that it held before */
    uint32_t       base;        /* blocks of them that stay */
    uint64_t      *aside;       /* [blocks_max] raw blocks of the others, n_aside of them */
    uint32_t       n_aside;     /* 0 as well where there was no room for both */
    bool           reads;       /* the sequence has been prepared for it */
    uint32_t       n_block;     /* whole blocks of the match that are taken */
    uint32_t       n_tail;      /* tokens behind them */
    uint32_t       n_seal;      /* blocks that are sealed; the others become raw */
    uint32_t       n_ready;     /* spans whose units can be read */
    uint32_t       layer, head; /* what comes next */
    uint32_t       block;
    bool           begun;               /* the layer: its index has been read */
    uint64_t       bytes, done;         /* to be read, and read */
    uint64_t       disk;                /* read of the disk for it */
    uint64_t       spent_ns;            /* in reads */
    uint64_t       ready_ns;            /* before them */
    uint64_t       slow_ns, slow_bytes; /* of the slowest read */
    uint32_t       n_read;
    bool           slow; /* given up: evaluating it takes less */
} kv_restore;

typedef struct kv_cache {
    kv_disk      *disk;
    uint8_t      *gather; /* one lane of a segment, or of a tail */
    uint8_t      *aux;    /* index of a lane of a segment */
    kv_disk_read *read;   /* [n_kv_head * (blocks_max + 2)] */
    kv_cache_seq *seq;    /* [n_seq] */
    kv_disk_key  *keys;
    uint8_t      *made;
    uint8_t       options[KV_DISK_PROV_BYTES]; /* of sparse steps */
    uint32_t      n_options;
    kv_cache_unit unit[KV_DISK_PUT_MAX];
    uint32_t      n_unit;
    kv_disk_put   tail;         /* being stored, or KV_DISK_NONE */
    kv_ferry     *ferry;        /* NULL: the device's memory is the host's */
    kv_restore    pending;      /* between two calls of kv_seq_restore() */
    uint64_t     *aside;        /* [2][blocks_max] of the pending restore, and of one at once */
    double        eval_ns;      /* that evaluating a token of a prompt takes; 0: not known */
    double        eval_weight;  /* tokens that it stands for */
    double        eval_ns_kept; /* as the catalogue has it */
    double        load_rate;    /* of restores: bytes in a nanosecond; 0: not known */
    uint32_t      n_skip;       /* prefixes that were not even tried, by it */
    uint64_t      held[2];      /* bytes of records in holds: of everybody's, of salted prefixes */
    uint32_t      n_held_unit;
    char          told[KVD_ERR_MSG_BYTES];
} kv_cache;

/* Bytes it takes besides the block store's own buffers. */
uint64_t      kv_cache_bytes(const kv_params *p);
kvd_status    kv_cache_open(kv_store *s, kvd_err *err); /* nothing without a directory */
void          kv_cache_close(kv_store *s);
kv_cache_prov kv_cache_prov_of(const kv_cache *c, uint8_t made, uint8_t variant);
/* Whether blocks of both makings have the same provenance. */
bool kv_cache_same_making(uint8_t a, uint8_t b);
/* n tokens from position first on were generated. */
void kv_cache_mark(kv_store *s, uint32_t seq, uint32_t first, uint32_t n, bool sparse);
void kv_cache_cut(kv_store *s, uint32_t seq, uint32_t n_keep);

/* Blocks [first, end) as they are sealed: begin; every layer once; end, ok or not.  Failures are
 * the cache's own. */
void kv_cache_put_begin(kv_store *s, uint32_t seq, uint32_t first, uint32_t end);
void kv_cache_put_layer(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer,
                        const uint64_t *layer_at);
void kv_cache_put_end(kv_store *s, bool ok);

/* The key of sealed block b, from its tokens, what it is made of, and the block before. */
kvd_status kv_cache_name_block(kv_store *s, uint32_t seq, uint32_t b, kvd_err *err);

/* The longest known prefix of the sequence's first n_token ids; unsynced: as kv_disk_query says. */
kvd_status kv_cache_find(kv_store *s, uint32_t seq, uint32_t n_token, bool unsynced,
                         kv_disk_match *out, kvd_err *err);

/* Between tokens [first, first + n) of a raw block's lane, which begins at raw, and rows packed as
 * K, V, K, V ... */
void kv_cache_copy_rows(const kv_store *s, uint8_t *raw, uint32_t first, uint32_t n,
                        uint8_t *packed, bool out);
/* Where a lane of raw block b begins; the device's memory is the host's. */
uint8_t *kv_cache_raw_lane(const kv_store *s, uint32_t seq, uint32_t b, uint32_t lane);
void     kv_cache_tell(kv_cache *c, const kvd_err *err); /* once per reason */
void     kv_cache_lost(kv_store *s, kv_disk_put put);    /* a unit under way cannot be completed */

/* ---- kv_ferry.c: places between a device with memory of its own and the block store ---- */

typedef struct kv_ferry_unit { /* blocks [first, first + n) of a sequence, or a tail in one */
    kv_disk_put put;
    uint32_t    seq, first, n;
    uint32_t    at, n_tail; /* of a tail: its first token in the block, and how many */
    bool        open;       /* it is an open block */
} kv_ferry_unit;

/* One lane of a tail or an open block; raw: where the block's lane begins. */
kvd_status kv_cache_put_tail_lane(kv_store *s, const kv_ferry_unit *u, uint32_t lane, uint8_t *raw,
                                  kvd_err *err);

uint64_t   kv_ferry_bytes(const kv_params *p); /* pinned memory */
kvd_status kv_ferry_open(kv_store *s, kvd_err *err);
void       kv_ferry_close(kv_store *s);
/* A layer of a unit is brought down by the stream and put later, in drain; only where there are not
 * enough places it is waited for.  layer_at as in kv_cache_put_layer(). */
kvd_status kv_ferry_bring(kv_store *s, kvd_stream *st, const kv_ferry_unit *u, uint32_t layer,
                          const uint64_t *layer_at, kvd_err *err);
/* Commits once all of it has been put; drop: aborts, and what is on its way is not put. */
kvd_status kv_ferry_commit(kv_store *s, kv_disk_put put, kvd_err *err);
void       kv_ferry_drop(kv_store *s, kv_disk_put put);
/* What has come, without waiting for device or disk; or all.  A failed device drops everything. */
kvd_status kv_ferry_drain(kv_store *s, bool wait, kvd_err *err);
/* Places for who has drained: their number, their memory, and where one's records or index lie. */
uint32_t kv_ferry_slots(const kv_store *s);
kvd_mem  kv_ferry_mem(const kv_store *s);
uint64_t kv_ferry_at(const kv_store *s, uint32_t slot, bool aux);

/* ---- kv_restore.c, kv_restore_up.c ------------------------------------------------------ */

/* Raw blocks set aside by the restore that is pending: they are freed for who needs them; those at
 * offset `raw`, and all of them, for kv_check(). */
void     kv_restore_yield(kv_store *s);
uint32_t kv_restore_aside(const kv_store *s, uint64_t raw);
uint32_t kv_restore_n_aside(const kv_store *s);
/* The span that holds block b, and the block's number in its unit. */
const kv_disk_span *kv_restore_span(const kv_restore *r, uint32_t b, uint32_t *in_unit);

typedef struct kv_tail_part { /* tokens of the tail in one raw block: a span, or a part of one */
    const kv_disk_span *span;
    uint32_t            block; /* behind the whole blocks of the match */
    uint32_t            at, n; /* tokens in the block */
    uint32_t            first; /* token of the span */
} kv_tail_part;

/* The part after this one; *p zeroed: the first.  false: there is none. */
bool kv_restore_part(const kv_restore *r, kv_tail_part *p);
/* Reads a part of a lane to where the block's lane begins. */
kvd_status kv_restore_read_part(kv_restore *r, const kv_tail_part *p, uint32_t lane, uint8_t *raw,
                                kvd_err *err);
/* Reads now, and looks whether that is as fast as evaluating: KVD_E_BUSY, r->slow set, if not. */
kvd_status kv_restore_read(kv_restore *r, const kv_disk_read *read, uint32_t n, kvd_err *err);
/* A layer, where the device has memory of its own. */
kvd_status kv_restore_up(kv_restore *r, uint32_t layer, kvd_err *err);

/* ---- kv_tier.c; all do nothing where the store does not spill to disk ---------------- */

typedef struct kv_arrival { /* records on their way from disk to a slot, or a run of them */
    uint64_t lane, at;      /* at: offset in the pool */
    uint32_t seq, chunk, n;
    uint32_t land;   /* in kv_land: number of the first */
    uint8_t *packed; /* where they lie when they have been read */
} kv_arrival;

typedef struct kv_flight { /* of one layer's step */
    kv_disk_ticket ticket;
    bool           started;
    uint64_t       start_ns, number; /* number: in the order of starting */
    uint32_t       n, turn;          /* arrivals listed; step of the layer */
    uint32_t       come;             /* the first so many have come already */
} kv_flight;

/* kv_land.c: where the device's memory is not the host's, records from disk lie in places behind
 * the host tier's until the device has taken them.  The first n_now serve batches that are waited
 * for, the others flights. */
typedef struct kv_land {
    kvd_mem   mem; /* the list, and record[] */
    uint32_t  n_now, n_late;
    uint32_t *record; /* [n_now + n_late] host record that is the place */
    uint32_t *free;   /* [n_late] stack of numbers */
    uint32_t  n_free;
    kv_copies list; /* of what goes up, n_now + n_late */
} kv_land;

uint64_t   kv_land_records(const kv_params *p); /* that the host tier's memory has behind its own */
uint64_t   kv_land_bytes(const kv_params *p);
kvd_status kv_land_open(kv_store *s, kv_land *l, kvd_err *err);
void       kv_land_close(kv_store *s, kv_land *l);
uint8_t   *kv_land_at(const kv_store *s, const kv_land *l, uint32_t place);
/* Places for n arrivals of one record each; false: there are not so many free. */
bool kv_land_take(const kv_store *s, kv_land *l, kv_arrival *a, uint32_t n);
void kv_land_give(kv_land *l, const kv_arrival *a, uint32_t n);
/* n runs to their places in the pool.  The stream has passed what was listed before. */
kvd_status kv_land_up(kv_store *s, kvd_stream *st, kv_land *l, const kv_arrival *a, uint32_t n,
                      kvd_err *err);

uint32_t   kv_tier_lag(const kv_params *p);        /* steps, at least 1 */
uint32_t   kv_tier_late_reads(const kv_params *p); /* of one flight */
uint64_t   kv_tier_bytes(const kv_params *p, uint64_t host_bytes, uint64_t record_bytes);
kvd_status kv_tier_open(kv_store *s, kvd_err *err);
void       kv_tier_close(kv_store *s);

/* A host record for a chunk, or KV_NO_HOST; chunks from first on leave the lane's list. */
uint32_t kv_tier_take(kv_store *s, uint64_t lane, uint32_t chunk);
void     kv_tier_forget(kv_store *s, uint64_t lane, uint32_t first);
/* Brings a layer's averages down for the host, where they are the device's: given to the stream. */
kvd_status kv_tier_see(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, kvd_err *err);
/* Chunks [first, end), new and on the stage, get host records where their averages are among the
 * lane's highest, of equals the later; older chunks may lose theirs.  newest: all that there is
 * room for, since what was attended until now is likely to be selected. */
void kv_tier_place(kv_store *s, uint64_t lane, uint32_t first, uint32_t end, bool newest);

/* Where sealed blocks are on disk.  bind: of all blocks below end, after they were put; KVD_E_FULL
 * where the block store has not taken them. */
kvd_status kv_tier_bind(kv_store *s, uint32_t seq, uint32_t end, kvd_err *err);
void       kv_tier_bind_match(kv_store *s, uint32_t seq, const kv_disk_match *m, uint32_t end);
void       kv_tier_unbind(kv_store *s, uint32_t seq, uint32_t b);

/* Records of blocks [first, end) of a layer that are not in the host tier, to layer_at[b]. */
kvd_status kv_tier_load(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t first,
                        uint32_t end, const uint64_t *layer_at, kvd_err *err);

/* A step of a layer.  begin: flights that are due, or all, or have arrived, join.  When the windows
 * have changed: want for each selected chunk's slot, where waits() says so; then claim waits for
 * what is urgent or was given away; what is_late() then is not attended.  Misses: list them, then
 * fetch.  settle before anything else changes the sequences. */
kvd_status kv_tier_begin(kv_store *s, kvd_stream *st, uint32_t layer, bool all, kvd_err *err);
bool       kv_tier_waits(const kv_store *s, uint32_t layer);
void       kv_tier_want(kv_store *s, uint64_t lane, uint32_t slot, bool urgent);
kvd_status kv_tier_claim(kv_store *s, uint32_t layer, kvd_err *err);
bool       kv_tier_is_late(const kv_store *s, uint64_t lane, uint32_t slot);
void       kv_tier_miss(kv_store *s, uint32_t layer, uint32_t seq, uint64_t lane, uint32_t chunk,
                        uint64_t at);
kvd_status kv_tier_fetch(kv_store *s, kvd_stream *st, uint32_t layer, bool urgent, kvd_err *err);
void       kv_tier_settle(kv_store *s);

/* kv_serve.c: a step that the device drives requests records on disk while it runs.  begin:
 * before it; link: the queue as ops see it, batch: a layer's in it; poll: starts reads and tells
 * what has come, without waiting, for as long as the step runs; give_up: nothing more will come;
 * end: the streams are done: what has come may stay in the host tier.  KVD_E_IO and its kin:
 * records are missing, the step has failed. */
bool          kv_serves(const kv_store *s); /* or there is no disk tier */
kvd_status    kv_serve_begin(kv_store *s, kvd_stream *st, kvd_err *err);
kvd_miss_link kv_serve_link(const kv_store *s, uint32_t layer, bool urgent);
bool          kv_serve_poll(kv_store *s); /* whether reads are under way */
void          kv_serve_give_up(kv_store *s);
kvd_status    kv_serve_end(kv_store *s, kvd_err *err);

void kv_tier_count(const kv_store *s, kv_counts *c);
/* Bytes of units in the block store, and how many it may hold; 0: no store, no limit. */
void kv_cache_used(const kv_store *s, uint64_t *bytes, uint64_t *limit);
/* Host records that a sequence's lanes have; there is a disk tier. */
uint64_t kv_tier_records(const kv_store *s, uint32_t seq);
void     kv_tier_check(const kv_store *s);

#endif
