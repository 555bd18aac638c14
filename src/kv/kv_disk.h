/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk.h - the persistent block store of one directory.  Private to kv/.
 *
 * A *unit* is written once and then only read or removed, but for open blocks, which get pages:
 *   block    block_tokens (256) tokens of every lane, records in token order;
 *   segment  16 blocks of every lane, likewise; the format has room for another order, which is
 *            read, but none is written: it brought nothing (docs/claims.md);
 *   tail     the last tokens of a sequence that are no records yet, raw, of every lane;
 *   open     the leading records of a block that is not complete yet, raw, of every lane.  It grows
 *            in place, and becomes the block where blocks have raw records.
 * Units are found by the tokens they stand for: the key of a block is a SHA-256 chain over its
 * parent's key, the model (fingerprint and geometry), the salt, the provenance and its token ids.
 * A segment has the keys of its 16 blocks, so that a prefix that ends inside it is found too.
 *
 * Writing    begin -> put_lane of every lane, any order -> commit (or abort).  Bytes go out while
 *            lanes come in; the unit can be found after its bytes are on the disk and its row is
 *            in the catalogue.  This process may read it sooner (kv_disk_query.unsynced): syncs are
 *            what takes long, and nobody waits for them but a flush, and who evicts or quarantines
 *            a unit while the catalogue's log is copied (kv_disk_log.c).
 * Reading    find -> a match holding references to units -> batches of reads -> match_close.
 *            Every 4 KiB page is checked against its checksum before a byte of it is used.
 * Failures   A damaged unit is quarantined: counted, never found again, its reads fail with
 *            KVD_E_CORRUPT.  A disk that is full or broken pauses the stores; reads go on.
 *
 *            A directory that is removed is noticed and made anew: kv_disk_gone.c.
 *
 * Thread: one at a time, the one that owns the store.  Work in flight advances in every call of
 * put, poll, wait, flush.  After open, reads allocate nothing but once per unit and match.
 * docs/format-kv.md has the format.  Sizes in bytes. */
#ifndef KVD_KV_DISK_H
#define KVD_KV_DISK_H

#include "base/base.h"
#include "os/os.h"

#define KV_DISK_KEY_BYTES      32u
#define KV_DISK_SEGMENT_BLOCKS 16u
#define KV_DISK_PAGE_BYTES     OS_PAGE_BYTES
#define KV_DISK_PROV_BYTES     64u /* most bytes of a provenance */
#define KV_DISK_PROV_MAX       8u  /* most provenances of one search */
#define KV_DISK_TAKES_MAX      2u
#define KV_DISK_PUT_MAX        128u /* units being written at once */
#define KV_DISK_TICKET_MAX     16u  /* batches of reads in flight */

typedef struct kv_disk kv_disk;

/* Shapes of one model's units.  Anything but equal is another model. */
typedef struct kv_disk_geometry {
    uint32_t n_lane;           /* n_layer * n_kv_head */
    uint32_t block_tokens;     /* 256 */
    uint32_t chunk_tokens;     /* divides block_tokens */
    uint32_t record_bytes;     /* of one chunk of one lane */
    uint32_t aux_bytes;        /* per lane and block: index and scales; may be 0 */
    uint32_t tail_token_bytes; /* raw K and V of one token of a lane; 0: no tails */
} kv_disk_geometry;

/* Where a test wants to look in, or to kill: "reserved", "written", "synced", "published",
 * "evicted".  NULL outside tests. */
typedef void (*kv_disk_point_fn)(void *ctx, const char *point);

typedef struct kv_disk_params {
    const char *dir; /* made if missing */
    uint8_t     fingerprint[KV_DISK_KEY_BYTES];
    /* n_lane 0: for ls, verify, gc and clear only. */
    kv_disk_geometry geometry;

    uint64_t max_bytes;         /* of units; the least recently used go.  0: no limit */
    uint64_t max_salted_bytes;  /* of units with a salt; 0: a quarter of max_bytes */
    uint64_t min_free_bytes;    /* stays free on the filesystem */
    uint64_t max_bytes_per_day; /* written; 0: no limit */
    uint64_t max_bytes_per_s;   /* written: what comes faster is not stored.  0: no limit */
    uint64_t file_bytes;        /* a data file takes units up to this size; 0: 256 MiB */
    uint64_t read_stage_bytes;  /* 0: 16 MiB */
    uint64_t write_stage_bytes; /* 0: 16 MiB */
    uint32_t gap_bytes;         /* reads no further apart become one; 0: 16 KiB */
    uint32_t max_units;         /* referenced at once; 0: 8,192 */
    uint32_t max_pieces;        /* contiguous ranges of one batch of reads; 0: 16,384 */
    /* Tickets beyond KV_DISK_TICKET_MAX, for batches that are not urgent and have no more ranges */
    uint32_t         late_tickets, late_pieces;
    uint64_t         timeout_ns;  /* of a batch of reads, and of a wait for writes; 0: 10 s */
    uint64_t         pause_ns;    /* of the stores after an error; 0: 30 s */
    os_io_params     io;          /* kind, depth, n_thread, sim; the buffer is the store's */
    bool             unchecked;   /* tests only: believe every page */
    bool             raw_records; /* records are raw tokens, chunk by chunk: open blocks' too */
    kv_disk_point_fn point;
    void            *point_ctx;
} kv_disk_params;

/* KVD_E_BUSY: another process has the directory.  KVD_E_UNSUPPORTED: its format is newer.  A
 * catalogue that is damaged is put aside, and the store starts empty. */
kvd_status kv_disk_open(kv_disk **out, const kv_disk_params *p, kvd_err *err);
/* Finishes commits within the time limit, drops puts that were not committed. */
void kv_disk_close(kv_disk *d); /* NULL is a no-op */
/* Memory of ours an open store takes, without units in use and SQLite's (some MiB). */
uint64_t kv_disk_host_bytes(const kv_disk_params *p);
uint64_t kv_disk_late_bytes(uint32_t n_ticket, uint32_t n_piece); /* of it, late tickets */
/* "io_uring, registered buffers, O_DIRECT" */
const char *kv_disk_mode(const kv_disk *d);

/* ---- names ------------------------------------------------------------------------ */

typedef struct kv_disk_key {
    uint8_t byte[KV_DISK_KEY_BYTES]; /* all zero: the parent of a sequence's first block */
} kv_disk_key;

typedef struct kv_disk_bytes {
    const void *data;
    uint32_t    bytes;
} kv_disk_bytes;

/* The numbers are part of the format. */
typedef enum kv_disk_kind {
    KV_DISK_BLOCK,
    KV_DISK_SEGMENT,
    KV_DISK_TAIL,
    KV_DISK_OPEN,
    KV_DISK_KINDS
} kv_disk_kind;

const char *kv_disk_kind_name(kv_disk_kind kind);

/* What a unit stands for. */
typedef struct kv_disk_name {
    kv_disk_kind   kind;
    kv_disk_key    parent;      /* key of the block before it; of a tail: or of an open block */
    uint64_t       first_token; /* its position in the sequence */
    const int32_t *token;       /* [n_token] */
    uint32_t       n_token; /* a block's, a segment's; a tail's: 1 to 2 * block_tokens - 1; an open
                               block's: a multiple of kv_disk_open_tokens(), or a block's */
    kv_disk_bytes provenance; /* how its K and V came about; at most KV_DISK_PROV_BYTES */
    /* [n_takes], at most KV_DISK_TAKES_MAX: provenances of open blocks and tails that this unit may
     * grow from or replace.  They get the provenance above. */
    const kv_disk_bytes *takes;
    uint32_t             n_takes;
    kv_disk_bytes        salt; /* whose it is; 0 bytes: everybody's.  Kept only as a keyed hash */
} kv_disk_name;

/* Tokens by which an open block grows: its records then end with a page.  0: there are none. */
uint32_t kv_disk_open_tokens(const kv_disk *d);
/* The key of the unit's last block: the parent of what follows it. */
kvd_status kv_disk_key_of(kv_disk *d, const kv_disk_name *name, kv_disk_key *out, kvd_err *err);

/* ---- writing ---------------------------------------------------------------------- */

typedef uint32_t kv_disk_put; /* a unit being written: index and generation */
#define KV_DISK_NONE 0u

/* Takes disk space for a unit.  *out is KV_DISK_NONE with KVD_OK when the store has that unit
 * already.  KVD_E_BUSY: it is not stored, because of a limit, a pause or too many open puts; the
 * message says which, and serving goes on. */
kvd_status kv_disk_put_begin(kv_disk *d, const kv_disk_name *name, kv_disk_put *out, kvd_err *err);
/* All of one lane, once: its records in token order, copied before return.  aux: [blocks of the
 * unit][aux_bytes].  Of a tail: n_token * tail_token_bytes raw bytes, no aux.  Of an open block:
 * raw records, no aux; what the disk has of them already is not written again.  Waits for writes in
 * flight when the stage is full.  After a failure only abort is left. */
kvd_status kv_disk_put_lane(kv_disk *d, kv_disk_put put, uint32_t lane, const void *records,
                            const void *aux, kvd_err *err);
/* Whether put_lane would have to wait for writes in flight. */
bool kv_disk_put_waits(const kv_disk *d, kv_disk_put put);
/* KVD_E_INVAL (and aborted) when a lane is missing; else the store goes on by itself: write, sync,
 * publish.  A failure there drops the unit and pauses the stores. */
kvd_status kv_disk_put_commit(kv_disk *d, kv_disk_put put, kvd_err *err);
void       kv_disk_put_abort(kv_disk *d, kv_disk_put put);
/* Lets what is under way go on, without waiting: for times in which nothing else is called. */
void kv_disk_poll(kv_disk *d);
/* Waits until the bytes of every commit are written, or it has failed; syncs and rows follow by
 * themselves.  An error: at least one failed since the last flush. */
kvd_status kv_disk_flush_writes(kv_disk *d, kvd_err *err);
/* Waits until every commit has ended, one way or the other.  An error: at least one failed since
 * the last flush (the first is told), or time ran out. */
kvd_status kv_disk_flush(kv_disk *d, kvd_err *err);

/* ---- finding ---------------------------------------------------------------------- */

typedef uint32_t kv_disk_unit; /* a referenced unit: index and generation */

typedef struct kv_disk_query {
    const int32_t       *token;
    uint64_t             n_token;
    kv_disk_bytes        salt;
    const kv_disk_bytes *provenance; /* [n_provenance] that are accepted, the best first */
    uint32_t             n_provenance;
    bool unsynced; /* also blocks whose bytes are written, but not synced: should that fail, a
                      reference keeps them as long as this process is there */
} kv_disk_query;

typedef struct kv_disk_span { /* consecutive blocks of one unit, or tokens of a tail */
    kv_disk_unit unit;
    kv_disk_kind kind;        /* KV_DISK_OPEN, too, where a block serves with some of its tokens */
    uint32_t     provenance;  /* index in the query */
    uint32_t     first_block; /* in the unit */
    uint32_t     n_block;
    uint32_t     n_token; /* of the sequence */
} kv_disk_span;

typedef struct kv_disk_match {
    kv_disk_span *span; /* [n_span] in the order of the tokens, from position 0 */
    uint32_t      n_span;
    uint64_t      n_token; /* in whole blocks */
    uint32_t n_tail_token; /* after them, in the last n_tail_span spans: open blocks and a tail,
                              fewer than 2 * block_tokens */
    uint32_t    n_tail_span;
    kv_disk_key key; /* of the last block: the parent of what follows */
} kv_disk_match;

/* The longest known prefix of the tokens.  Nothing known is KVD_OK with n_span 0. */
kvd_status kv_disk_find(kv_disk *d, const kv_disk_query *q, kv_disk_match *out, kvd_err *err);
void       kv_disk_match_close(kv_disk *d, kv_disk_match *m); /* zeroes it */
/* Reads a referenced unit's checksums, which its first read would do. */
kvd_status kv_disk_prepare(kv_disk *d, kv_disk_unit unit, kvd_err *err);
/* A reference to a published unit by its key, as a session wants for what it has just written.
 * KVD_E_BUSY: there is none (yet). */
kvd_status kv_disk_unit_open(kv_disk *d, const kv_disk_key *key, kv_disk_kind kind,
                             kv_disk_unit *out, kvd_err *err);
void       kv_disk_unit_ref(kv_disk *d, kv_disk_unit u); /* one more reference */
void       kv_disk_unit_unref(kv_disk *d, kv_disk_unit u);
bool       kv_disk_unit_bad(const kv_disk *d, kv_disk_unit u); /* quarantined: recompute it */

/* ---- reading ---------------------------------------------------------------------- */

typedef enum kv_disk_what {
    KV_DISK_RECORDS, /* first, n: chunks of the unit; of a tail: tokens; of an open block: chunks,
                        raw, the last of which may have more tokens than the span */
    KV_DISK_AUX      /* first, n: blocks of the unit */
} kv_disk_what;

typedef struct kv_disk_read {
    kv_disk_unit unit;
    kv_disk_what what;
    uint32_t     lane, first, n;
    void        *dst; /* in token order; written only until the batch has ended */
} kv_disk_read;

typedef uint32_t kv_disk_ticket;

/* Starts a batch, sorted and merged into sequential reads.  Urgent batches go before others.
 * KVD_E_BUSY: no ticket is free. */
kvd_status kv_disk_read_start(kv_disk *d, const kv_disk_read *r, uint32_t n, bool urgent,
                              kv_disk_ticket *out, kvd_err *err);
/* KVD_E_BUSY: not yet.  Else the batch has ended and its ticket is free: KVD_OK, KVD_E_CORRUPT (a
 * page that is not what was written: the unit is bad now) or KVD_E_IO (error or time limit), the
 * message with file and offset. */
kvd_status kv_disk_read_poll(kv_disk *d, kv_disk_ticket t, kvd_err *err);
/* The same, waiting: never longer than the batch's time limit. */
kvd_status kv_disk_read_wait(kv_disk *d, kv_disk_ticket t, kvd_err *err);
/* start and wait. */
kvd_status kv_disk_read_now(kv_disk *d, const kv_disk_read *r, uint32_t n, kvd_err *err);

/* ---- knowing and tending ---------------------------------------------------------- */

typedef enum kv_disk_pause {
    KV_DISK_RUNNING,
    KV_DISK_PAUSE_FULL,     /* ENOSPC */
    KV_DISK_PAUSE_ERROR,    /* EIO and its kin */
    KV_DISK_PAUSE_MAX,      /* max_bytes, and nothing can be evicted */
    KV_DISK_PAUSE_MIN_FREE, /* min_free_bytes, and nothing can be evicted */
    KV_DISK_PAUSE_DAY,      /* max_bytes_per_day */
    KV_DISK_PAUSE_RATE,     /* max_bytes_per_s */
    KV_DISK_PAUSE_GONE      /* the directory, or what is in it, was removed */
} kv_disk_pause;

typedef struct kv_disk_stats {
    /* what there is */
    uint64_t n_unit, n_block, n_segment, n_bad; /* bad: in quarantine */
    uint64_t n_tail;                            /* tails and open blocks */
    uint64_t n_file;
    uint64_t unit_bytes, salted_bytes;
    uint64_t day_bytes; /* written today */
    /* since open */
    uint64_t n_find, n_find_hit, found_tokens;
    uint64_t n_put, n_put_dup, n_put_done, n_put_refused, n_put_failed, n_put_aborted;
    uint64_t record_bytes_put, aux_bytes_put; /* published, as the caller counts */
    uint64_t tail_bytes_put;                  /* likewise; of open blocks what is new */
    uint64_t written_bytes;                   /* to data files, with padding */
    uint64_t n_evicted, n_quarantined, n_pause;
    uint64_t n_read, read_bytes, useful_bytes; /* reads issued; useful: what callers asked for */
    uint64_t n_read_failed, n_timeout;
    uint64_t n_read_late, n_read_corrupt; /* of n_read_failed: out of time; damaged */
    /* in calls that read, prepare included; in those that write, and of that in puts' waits */
    uint64_t      read_ns, put_ns, put_wait_ns;
    kv_disk_pause pause;
    char          pause_text[160]; /* why, or "" */
} kv_disk_stats;

/* Looks now whether the directory is there, and if it was removed tries to make it anew.  An error
 * says why it is still missing. */
kvd_status  kv_disk_look(kv_disk *d, kvd_err *err);
void        kv_disk_stats_get(const kv_disk *d, kv_disk_stats *out);
const char *kv_disk_pause_name(kv_disk_pause p);

typedef struct kv_disk_entry {
    kv_disk_key  key;
    kv_disk_kind kind;
    bool         bad, salted, ours; /* ours: of the model the store was opened for */
    uint32_t     n_token;
    uint64_t     first_token, bytes;
    int64_t      created; /* seconds since 1970 */
    uint64_t     used;    /* higher: later */
    char         file[64];
    uint64_t     off;
} kv_disk_entry;

/* Every unit, the least recently used first; fn returns false to stop, and calls nothing of the
 * store. */
kvd_status kv_disk_ls(kv_disk *d, bool (*fn)(void *ctx, const kv_disk_entry *e), void *ctx,
                      kvd_err *err);
/* Reads every unit of every model and quarantines the damaged.  KVD_E_CORRUPT: the catalogue is
 * damaged as a whole; the next open starts with an empty one. */
kvd_status kv_disk_verify(kv_disk *d, uint64_t *n_ok, uint64_t *n_bad, kvd_err *err);
/* Reads the catalogue alone: where it contradicts itself.  KVD_E_CORRUPT as above.  One that was
 * found sound is not read again until it is opened anew: what is written to it keeps it so. */
kvd_status kv_disk_verify_catalog(kv_disk *d, kvd_err *err);
/* Removes every unit that nobody references. */
kvd_status kv_disk_clear(kv_disk *d, kvd_err *err);
/* Removes quarantined units, and least recently used ones until max_bytes (0: no limit) and the
 * store's own limits hold. */
kvd_status kv_disk_gc(kv_disk *d, uint64_t max_bytes, kvd_err *err);
/* A number that the directory keeps for our model, under a name of at most 15 characters.  false:
 * there is none, or it could not be kept. */
bool kv_disk_note_get(kv_disk *d, const char *name, double *v);
bool kv_disk_note_put(kv_disk *d, const char *name, double v);
/* Recounts; asserts on the first invariant that does not hold. */
void kv_disk_check(kv_disk *d);

#endif
