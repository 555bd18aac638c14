/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_int.h - what the files of the block store share.
 *
 *      kv_disk.c        open, close, the I/O slots and what happens when one is done
 *      kv_disk_name.c   keys, checksums, layout of a unit
 *      kv_disk_cat.c    the catalogue (SQLite)
 *      kv_disk_log.c    its log, and when it may be written
 *      kv_disk_space.c  data files, free ranges, limits, eviction
 *      kv_disk_put.c    writing units
 *      kv_disk_find.c   units in memory, search
 *      kv_disk_read.c   batches of reads
 *      kv_disk_gone.c   a directory that was removed
 *      kv_disk_tend.c   ls, verify, clear, gc, check */
#ifndef KVD_KV_DISK_INT_H
#define KVD_KV_DISK_INT_H

#include "kv/kv_disk.h"

#define DISK_LOG_PAGES       256u
#define DISK_COMMIT_TIMEOUTS 12u /* of the time limit: a sync may have gigabytes before it */
#define DISK_SLOT_BYTES      (256u * 1024u) /* one read or write at most */
#define DISK_HELD_MAX        64u            /* reads that go to the queue in one call */
#define DISK_FORMAT          2
#define DISK_FORMAT_FIRST    1 /* is read, and gets what is missing */
#define DISK_PATH_BYTES      4096
#define DISK_LANE_MAX        65536u
#define DISK_OPEN_RECORD_MAX (1u << 24) /* bytes of a raw record */
#define DISK_RECORD_MAX      65536u     /* records of one lane of a unit: places are 16 bits */
#define DISK_TICKET_LOAD     KV_DISK_TICKET_MAX /* the store's own ticket */

/* ---- layout (kv_disk_name.c) ------------------------------------------------------ */

/* A unit in its file: rec_slot bytes for each lane, then aux_slot bytes for each lane, then the
 * table of page checksums.  Every slot begins on a page. */
typedef struct disk_layout {
    uint32_t n_lane, n_block;  /* n_block 0: a tail */
    uint32_t n_rec, rec_bytes; /* of a lane */
    uint32_t aux_bytes;        /* of a block of a lane */
    bool     ordered;          /* an order of n_rec u16 follows the aux of each lane */
    uint64_t rec_slot, aux_slot;
    uint64_t n_valid;          /* leading pages of a record slot that have been written */
    bool     grows;            /* an open block: other pages, and aux, are not there yet */
    uint64_t sums_off, n_page; /* pages before the table; the table has 8 bytes for each */
    uint64_t bytes;
} disk_layout;

bool kv_disk_geometry_ok(const kv_disk_geometry *g);
/* Tokens by which an open block grows; 0: it has no open blocks. */
uint32_t kv_disk_open_step(const kv_disk_geometry *g);
/* false: no such unit. */
bool kv_disk_layout_of(const kv_disk_geometry *g, kv_disk_kind kind, uint32_t n_token, bool ordered,
                       disk_layout *out);

/* ---- names and checksums (kv_disk_name.c) ----------------------------------------- */

/* false: libcrypto refused. */
bool kv_disk_sha256(kv_disk *d, const kv_disk_bytes *part, uint32_t n_part, kv_disk_key *out);
bool kv_disk_model_name(kv_disk *d, const uint8_t *fingerprint, const kv_disk_geometry *g,
                        kv_disk_key *out);
/* HMAC-SHA-256 under the directory's key; all zero without a salt. */
bool kv_disk_salt_id(kv_disk *d, kv_disk_bytes salt, kv_disk_key *out);
bool kv_disk_root(kv_disk *d, const kv_disk_key *salt_id, kv_disk_key *out);
bool kv_disk_chain(kv_disk *d, const kv_disk_key *parent, const kv_disk_key *salt_id,
                   kv_disk_bytes provenance, bool tail, const int32_t *token, uint32_t n_token,
                   kv_disk_key *out);
bool kv_disk_key_is_zero(const kv_disk_key *k);

/* What the checksums of a unit's pages are seeded with: its own seed, or where it has none (0) its
 * key's hash. */
uint64_t kv_disk_key_seed(uint64_t own, const kv_disk_key *key);
/* Of one page: page of the slot of a lane; the aux slots count as lanes n_lane, n_lane + 1, ... */
uint64_t kv_disk_page_sum(uint64_t key_seed, uint32_t lane, uint32_t page, const void *p);
uint64_t kv_disk_table_sum(uint64_t key_seed, const uint64_t *sum, uint64_t n);
bool     kv_disk_is_permutation(const uint16_t *order, uint32_t n);

/* ---- catalogue (kv_disk_cat.c) ---------------------------------------------------- */

typedef struct disk_row {
    int64_t          id;
    kv_disk_key      key, parent, salt_id, model;
    kv_disk_geometry geometry;
    kv_disk_kind     kind;
    int              counted_kind; /* as the column says, valid or not */
    bool             bad, ordered, salted;
    uint32_t         n_token, file;
    uint64_t         first_token, off, bytes, sums_hash, used;
    uint64_t         seed; /* of the page checksums; 0: they are seeded with the key */
    int64_t          created;
    const int32_t   *token; /* borrowed: until the statement moves on */
    kv_disk_bytes    provenance;
    disk_layout      layout; /* derived */
} disk_row;

typedef struct disk_cat disk_cat;

/* Where the catalogue's log is on its way into its database (kv_disk_log.c). */
typedef enum log_state { LOG_IDLE, LOG_FULL, LOG_DATABASE, LOG_EMPTY } log_state;

typedef struct disk_log {
    log_state state;
    uint32_t  pages; /* in it, after the last commit; 0: SQLite sees to it */
    int       fd, db_fd;
    uint32_t  turn; /* of the sync under way */
    bool      synced;
    uint64_t  deadline;
} disk_log;

bool kv_disk_log_idle(const kv_disk *d); /* whether the catalogue may be written */
void kv_disk_log_wait(kv_disk *d);       /* until then */
void kv_disk_log_begin(kv_disk *d);      /* it has just been emptied */
void kv_disk_log_advance(kv_disk *d);
void kv_disk_log_synced(kv_disk *d, uint32_t turn, int error);
/* Copies the log's pages into the database; empty: all are, the log becomes empty. */
bool kv_disk_cat_checkpoint(kv_disk *d, bool empty);
void kv_disk_cat_alone(kv_disk *d); /* SQLite sees to its log by itself */
/* SQLite forgets what it has copied, and does it once more.  No row is in use. */
void kv_disk_cat_again(kv_disk *d);

kvd_status kv_disk_cat_open(kv_disk *d, kvd_err *err);
/* SQLite looks at its whole file.  KVD_E_CORRUPT: the next open starts with an empty one. */
kvd_status kv_disk_cat_verify(kv_disk *d, kvd_err *err);
void       kv_disk_cat_close(kv_disk *d);
/* Its files are no longer those of their names: nothing is written to those when it is closed. */
void kv_disk_cat_lose(kv_disk *d);
/* false: not there, damaged (quarantined then) or an error (counted; a miss). */
bool kv_disk_cat_row(kv_disk *d, int64_t id, disk_row *out);
void kv_disk_cat_row_done(kv_disk *d);
/* Up to max units that hold the block of this key, and which block of them it is. */
uint32_t kv_disk_cat_names(kv_disk *d, const kv_disk_key *key, int64_t *id, uint32_t *block,
                           uint32_t max);
int64_t  kv_disk_cat_unit(kv_disk *d, const kv_disk_key *key, kv_disk_kind kind); /* 0: none */
/* Units behind a key, the last used first: tails; or open blocks and blocks that were open once. */
typedef enum cat_look { LOOK_TAILS, LOOK_OPENS } cat_look;
uint32_t kv_disk_cat_behind(kv_disk *d, cat_look look, const kv_disk_key *parent, int64_t *id,
                            uint32_t max);
/* name: [n_name] keys of its blocks.  r->id > 0: the row of that id has grown to this. */
kvd_status kv_disk_cat_publish(kv_disk *d, disk_row *r, const kv_disk_key *name, uint32_t n_name,
                               kvd_err *err);
bool       kv_disk_cat_remove(kv_disk *d, int64_t id);
bool       kv_disk_cat_full(const kv_disk *d); /* its last failure was a filesystem without room */
void       kv_disk_cat_set_bad(kv_disk *d, int64_t id);
void       kv_disk_cat_touch(kv_disk *d, const int64_t *id, uint32_t n, uint64_t used);
/* Units in the order in which they should go; fn returns false to stop. salted_only: of those. */
kvd_status kv_disk_cat_oldest(kv_disk *d, bool                                salted_only,
                              bool (*fn)(void *ctx, const disk_row *r), void *ctx, kvd_err *err);

/* ---- space (kv_disk_space.c) ------------------------------------------------------ */

typedef struct disk_file {
    uint32_t id;
    uint32_t n_unit; /* published, or being written */
    uint32_t n_open; /* units in memory and puts that use fd */
    bool     named;  /* its name is synced */
    int      fd;
    uint64_t end; /* allocated up to here */
} disk_file;

typedef struct disk_range {
    uint32_t file;
    uint64_t off, bytes;
} disk_range;

typedef struct disk_space {
    disk_file  *file; /* sorted by id */
    uint32_t    n_file, cap_file;
    disk_range *free; /* sorted by file and offset, never adjacent */
    uint32_t    n_free, cap_free;
    bool        direct;
    bool        punch_later; /* a tidy follows */
} disk_space;

typedef enum evict_which { EVICT_ANY, EVICT_SALTED, EVICT_BAD } evict_which;

void kv_disk_file_path(const kv_disk *d, uint32_t file, char out[DISK_PATH_BYTES]);
/* The file's descriptor, kept open until as many releases. */
kvd_status kv_disk_file_use(kv_disk *d, uint32_t file, int *fd, kvd_err *err);
void       kv_disk_file_release(kv_disk *d, uint32_t file);
bool       kv_disk_file_is_named(kv_disk *d, uint32_t file);
void       kv_disk_file_set_named(kv_disk *d, uint32_t file);
/* Removes from the directory what neither a row nor a put names. */
kvd_status kv_disk_space_tidy(kv_disk *d, kvd_err *err);
/* At load: tells of one unit's range, in ascending order.  KVD_E_CORRUPT: it cannot be. */
kvd_status kv_disk_space_seen(kv_disk *d, uint32_t file, uint64_t off, uint64_t bytes,
                              kvd_err *err);
void       kv_disk_space_reset(kv_disk *d); /* forgets all, closes all */
/* The file is in use then, as by kv_disk_file_use(). */
kvd_status kv_disk_space_alloc(kv_disk *d, uint64_t bytes, uint32_t *file, uint64_t *off, int *fd,
                               kvd_err *err);
void       kv_disk_space_free(kv_disk *d, uint32_t file, uint64_t off, uint64_t bytes);
/* A unit of `bytes` more, of which `written` are written now: within every limit after evicting;
 * else a pause that says which does not allow it. */
kvd_status kv_disk_space_admit(kv_disk *d, uint64_t bytes, uint64_t written, bool salted,
                               kvd_err *err);
bool       kv_disk_evict(kv_disk *d, const disk_row *r); /* false: in use */
/* The first in the order of eviction that nobody uses.  *gone: false: there is none. */
kvd_status kv_disk_evict_oldest(kv_disk *d, evict_which which, bool *gone, kvd_err *err);
/* Stops the stores for a while after an error of the disk. */
void       kv_disk_pause_error(kv_disk *d, int sys, const char *text);
kvd_status kv_disk_refuse(kv_disk *d, kv_disk_pause why, const char *text, kvd_err *err);

/* ---- units in memory (kv_disk_find.c) --------------------------------------------- */

typedef struct disk_unit {
    int64_t      id; /* of its row, or of the put that is to get one; 0: free */
    uint32_t     n_ref;
    uint16_t     gen;
    bool         bad, has_fd;
    kv_disk_kind kind;
    kv_disk_key  key, parent;
    uint64_t     seed, sums_hash;
    disk_layout  layout;
    uint32_t     file;
    uint64_t     off;
    int          fd;
    uint32_t     n_token;
    int32_t     *token;
    uint64_t    *sum;   /* [n_page]; NULL until the unit is read.  Pages without bytes have 0 */
    uint16_t    *place; /* [n_lane][n_rec]: where a chunk lies; NULL: token order */
} disk_unit;

/* NULL: not there, damaged, no memory or too many (the last two fill err). */
disk_unit   *kv_disk_unit_acquire(kv_disk *d, int64_t id, kvd_err *err);
void         kv_disk_unit_release(kv_disk *d, disk_unit *u);
disk_unit   *kv_disk_unit_of(kv_disk *d, kv_disk_unit handle); /* NULL: stale */
kv_disk_unit kv_disk_unit_handle(const kv_disk *d, const disk_unit *u);
bool         kv_disk_unit_in_use(const kv_disk *d, int64_t id);
void         kv_disk_unit_renamed(kv_disk *d, int64_t from, int64_t to); /* a put has got its row */
void         kv_disk_quarantine(kv_disk *d, disk_unit *u, const char *why);

/* ---- writing (kv_disk_put.c) ------------------------------------------------------ */

typedef enum put_state { PUT_FREE, PUT_OPEN, PUT_WRITING, PUT_SYNCING, PUT_DROPPED } put_state;

typedef struct disk_put_unit {
    put_state   state;
    uint16_t    gen;
    int         error;    /* errno of the first write that failed */
    uint32_t    n_flight; /* writes and the sync */
    uint32_t    n_lane;   /* put so far */
    uint64_t    deadline; /* of the commit */
    uint64_t    seed;
    disk_row    row;
    kv_disk_key name[KV_DISK_SEGMENT_BLOCKS];
    uint32_t    n_name;
    uint8_t     prov[KV_DISK_PROV_BYTES];
    int         fd;
    disk_unit  *base;  /* referenced: the open block that grows; NULL: a unit of its own */
    uint64_t    n_had; /* leading pages of a record slot that the base has */
    uint8_t     takes[KV_DISK_TAKES_MAX][KV_DISK_PROV_BYTES];
    uint32_t    takes_bytes[KV_DISK_TAKES_MAX], n_takes;
    int32_t    *token;
    uint8_t    *lane_put; /* [n_lane] */
    uint64_t   *sum;      /* [n_page, padded to whole pages] */
} disk_put_unit;

/* In place of the id of a row that there is not yet: below 0. */
static inline int64_t kv_disk_put_id(uint32_t put)
{
    return -1 - (int64_t)put;
}
static inline uint32_t kv_disk_put_of_id(int64_t id)
{
    return (uint32_t)(-1 - id);
}
/* Puts of written bytes that have the block of this key, likewise kv_disk_cat_names(). */
uint32_t kv_disk_put_names(const kv_disk *d, const kv_disk_key *key, int64_t *id, uint32_t *block,
                           uint32_t max);
void     kv_disk_put_written(kv_disk *d, disk_put_unit *p, int error); /* a request has ended */
void     kv_disk_put_advance(kv_disk *d);                              /* what can go on, goes on */
void     kv_disk_put_drop(kv_disk *d, disk_put_unit *p);

/* ---- reading (kv_disk_read.c) ----------------------------------------------------- */

typedef struct disk_piece { /* contiguous bytes of a unit that go to one place */
    uint64_t     off;       /* in the unit */
    void        *dst;       /* NULL: checked only */
    uint32_t     bytes;
    kv_disk_unit unit;
} disk_piece;

typedef struct disk_ticket {
    uint16_t    gen;
    bool        used, urgent, raw; /* raw: without checksums, for the table of checksums itself */
    uint64_t    seq, deadline;
    disk_piece *piece; /* [n_piece_max] */
    uint32_t    n_piece, n_piece_max, next;
    uint32_t    n_flight;
    kvd_status  status;
    kvd_err     err;
} disk_ticket;

typedef struct disk_slot { /* of the stage: one request in flight, or free */
    uint8_t *buf;          /* DISK_SLOT_BYTES */
    bool     busy;
    /* of a write */
    uint32_t put;
    /* of a read */
    uint32_t   ticket, first_piece, n_piece;
    uint64_t   ticket_seq;
    disk_unit *unit; /* referenced */
    uint64_t   off;  /* in the unit */
    uint32_t   bytes;
    uint64_t   n_valid; /* of the unit's layout when the read began: later pages are not checked */
    bool       grows;
} disk_slot;

void kv_disk_read_issue(kv_disk *d); /* fills free slots from waiting tickets */
void kv_disk_read_done(kv_disk *d, disk_slot *s, const os_io_done *done);
/* Checksums and order of a unit, if they are not loaded; waits. */
kvd_status kv_disk_unit_load(kv_disk *d, disk_unit *u, kvd_err *err);
/* Reads and checks every byte of the unit. */
kvd_status kv_disk_unit_verify(kv_disk *d, disk_unit *u, kvd_err *err);

/* ---- the store (kv_disk.c) -------------------------------------------------------- */

struct kv_disk {
    kv_disk_params p;   /* defaults filled in */
    char          *dir; /* owned; p.dir points to it */
    int            dir_fd;
    char           mode[96];
    int            lock_fd;
    void          *sha; /* EVP_MD_CTX */
    void          *sha_type;
    uint8_t        salt_key[KV_DISK_KEY_BYTES];
    kv_disk_key    model; /* name of this model */
    int64_t        model_id;
    uint16_t      *identity; /* the order of a segment's lane: token order */
    disk_cat      *cat;
    bool           cat_broken;
    bool           cat_sound; /* it was read through since it was opened */
    bool           gone;      /* the directory was removed; cat_broken is set, too */
    uint64_t       look_ns;   /* when to look next */
    disk_log       log;
    disk_space     space;
    uint64_t       clock; /* the next `used` */
    int64_t        day;
    uint64_t       reserved_bytes, reserved_salted; /* of puts under way */
    int64_t        rate_left;                       /* bytes that may be stored at rate_ns */
    uint64_t       rate_ns;
    uint64_t       pause_until;

    os_io     *io;
    uint8_t   *stage;
    uint64_t   stage_bytes;
    disk_slot *slot; /* [n_slot]: reads first, then writes */
    uint32_t   n_read_slot, n_slot;
    os_io_req  held[DISK_HELD_MAX]; /* begun, to be submitted together */
    uint32_t   n_held;

    disk_unit    *unit; /* [p.max_units] */
    uint32_t      n_unit_used;
    disk_put_unit put[KV_DISK_PUT_MAX];
    kvd_status    put_status; /* the first failure since the last flush */
    kvd_err       put_err;
    disk_ticket *ticket; /* [n_ticket]: KV_DISK_TICKET_MAX, the store's own, those for late reads */
    uint32_t     n_ticket;
    uint64_t     seq;

    kv_disk_stats stats;
};

/* Adds the time since t0, and hands on how that went. */
static inline kvd_status kv_disk_spent(uint64_t *ns, uint64_t t0, kvd_status st)
{
    *ns += kvd_now_ns() - t0;
    return st;
}

/* Reaps what is done, waiting up to timeout_ns, and KVD_RAN_WAIT_NS at most, for the first; lets
 * everything go on.  Limits of time are of kvd_ran_ns(). */
void kv_disk_pump(kv_disk *d, uint64_t timeout_ns);
/* Reaps alone. */
void kv_disk_reap(kv_disk *d, uint64_t timeout_ns);
/* A free slot of the stage, or NULL. */
disk_slot *kv_disk_slot_take(kv_disk *d, bool for_write);
/* A write at once; a read with those behind it, when kv_disk_submit_held() says that there are no
 * more. */
void kv_disk_slot_submit(kv_disk *d, disk_slot *s, os_io_op op, int fd, uint64_t off,
                         uint32_t bytes);
void kv_disk_submit_held(kv_disk *d);
void kv_disk_sync_submit(kv_disk *d, uint32_t put, int fd);
void kv_disk_sync_dir_submit(kv_disk *d, uint32_t put);
void kv_disk_sync_log_submit(kv_disk *d, uint32_t turn, int fd);
void kv_disk_at(const kv_disk *d, const char *point);
/* Directory, lock, catalogue and files; and what undoes it, whatever of it is open. */
kvd_status kv_disk_attach(kv_disk *d, kvd_err *err);
void       kv_disk_detach(kv_disk *d);
/* Looks from time to time whether the directory is still there.  To be called where nothing of a
 * unit is in the caller's hands. */
void kv_disk_watch(kv_disk *d);

#endif
