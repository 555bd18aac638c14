/* SPDX-License-Identifier: Apache-2.0 */
/* kv.h - the door to kv/: the KV store.
 *
 * A store holds the K and V of up to n_seq sequences for all layers on up to three tiers.
 * It knows shapes and bytes, never the model: q, K and V come in; views (block lists and a layout)
 * and attention's results come out.
 *
 * New tokens lie in *raw* blocks of 256 tokens on the device.  Once 256 + n_local tokens are not
 * sealed, the oldest 256 are: they are indexed, and where not everything is resident their records
 * move down to the host tier.  What is sealed is therefore a function of the length alone.
 *
 * Life of a token: kv_seq_reserve() makes room, kernels write, kv_seq_commit() makes it part of the
 * sequence; kv_seq_release() gives the room back instead.  After a commit kv_seq_seal() seals what
 * is due.  Nothing else changes a sequence but kv_seq_truncate().
 *
 * Sparse attention of a decode step: kv_step_begin(), then kv_attend_sparse() once a layer, then
 * kv_step_end().  The window that it keeps is a function of tokens and policy alone: placement
 * moves bytes, never the window.
 *
 * Thread: the thread that owns the session.  Lengths in tokens, offsets in bytes. */
#ifndef KVD_KV_H
#define KVD_KV_H

#include "backend/backend.h"
#include "base/base.h"
#include "sparse/sparse.h"

#define KV_BLOCK_TOKENS 256u
#define KV_CHUNK_TOKENS 4u  /* default of chunk_tokens */
#define KV_SINK_TOKENS  16u /* default of n_sink */
#define KV_LOCAL_TOKENS 64u /* default of n_local */

typedef struct kv_params {
    uint32_t        n_layer, n_head, n_kv_head, head_dim;
    uint32_t        n_seq;        /* sequences */
    uint32_t        n_ctx;        /* most tokens of one sequence */
    uint64_t        n_token;      /* capacity shared by all sequences; rounded up to whole blocks */
    uint32_t        n_batch;      /* most tokens of one sequence between two commits */
    kvd_dtype       type;         /* F32 or BF16 */
    kvd_record_type record;       /* of records below the device; not RAW asks for sparse, too */
    uint32_t        chunk_tokens; /* 4, 8 or 16 */
    uint32_t n_sink, n_local;     /* kept besides what is not sealed; n_sink <= 256, whole chunks */

    uint64_t device_bytes; /* of pool and index; 0: no limit, everything is resident */
    uint64_t host_bytes;   /* of records; 0: what n_token takes.  Less spills to cache_dir */

    bool           sparse;      /* sealed blocks are indexed; the rest is read only then */
    kvd_index_desc index;       /* chunk_tokens, block_tokens and head_dim are filled in */
    uint32_t       zone_tokens; /* of a cell of the estimation zone: a multiple of chunk_tokens
                                   that divides 256; 0: there is none.  With sparse only */
    uint32_t window_tokens;     /* of the largest window of a lane */
    /* [n_layer][n_kv_head] of each lane's window, at most window_tokens; NULL: all are of that
     * size. Read during plan and open */
    const uint32_t *lane_tokens;

    /* [n_layer][n_kv_head] records that a lane of each sequence may have in the host tier where it
     * spills: together, over all sequences, not more than it has room for (KVD_E_INVAL); NULL: all
     * the same.  Read during plan and open */
    const uint32_t *lane_host;

    /* A directory where blocks are kept beyond the process (sparse is then asked for, too). */
    const char *cache_dir;       /* NULL: none.  Read during open */
    uint8_t     fingerprint[32]; /* of everything that K and V and the index depend on */
    uint64_t    cache_bytes;     /* it may hold; 0: no limit */
    uint64_t    cache_min_free;  /* that stay free on its filesystem */

    kvd_trace  *trace;  /* NULL: none.  Outlives the store */
    kvd_stamps *stamps; /* likewise: of what the device does in a step */
    bool
        device_steps; /* sparse steps go through without the host where they can: kv_step_begin() */
    bool host_lookup; /* selections come down, and the CPU changes windows on maps of its own */
    bool apart;       /* the device's memory is not the host's; set by open as the backend is */
    bool tiered;      /* never resident, though there may be room */
    bool lazy;        /* restore an index without its records: never resident, host tier a cache */
    /* Steps after which a miss on disk that is not urgent belongs to the window at the latest; 0:
     * 1.  With more the window depends on the disk's speed. */
    uint32_t                   disk_lag;
    const struct os_io_params *disk_io;         /* NULL: as fits the machine; tests simulate one */
    uint64_t                   disk_timeout_ns; /* of a batch of reads; 0: the block store's own */
    /* Records on their way from disk to a device with memory of its own, at least 256 tokens'; 0:
     * as many as are useful; tests ask for few. */
    uint32_t land_records;
    uint32_t n_parked; /* most parked sequences */
} kv_params;

typedef enum kv_buffer {                /* what a store allocates */
                         KV_BUF_RAW,    /* device: raw blocks; all blocks where resident */
                         KV_BUF_WINDOW, /* device: sinks and slots of all lanes */
                         KV_BUF_STAGE,  /* device: one layer of one sequence, for dense attention */
                         KV_BUF_INDEX,  /* device: landmarks, parameters of records, cells */
                         KV_BUF_MAP,    /* device: slot maps, averages, lists of a step */
                         KV_BUF_HOST,   /* host: records */
                         KV_BUF_LISTS,  /* pinned host memory: lists of a step, where apart */
                         KV_BUF_TABLE   /* host: sequences, free lists */
} kv_buffer;
#define KV_BUF_COUNT 8

typedef struct kv_sizes {
    bool     resident;        /* everything stays on the device; no window, stage or host buffer */
    bool     spills;          /* the host tier has no room for all; the rest is on disk */
    uint64_t bytes_per_token; /* K and V over all layers and heads */
    uint64_t block_bytes;
    uint64_t n_block;  /* of 256 tokens, of all sequences together */
    uint64_t n_raw;    /* of them raw at a time */
    uint64_t n_host;   /* host records, of all sequences together */
    uint32_t n_parked; /* places for parked sequences: none where the store spills */
    uint64_t bytes[KV_BUF_COUNT];
    uint64_t zone_bytes;               /* of KV_BUF_INDEX: the estimation zone */
    uint64_t device_bytes, host_bytes; /* sums */
    uint64_t pinned_bytes;             /* of host_bytes: what a device of its own reads there */
} kv_sizes;

/* How decode steps attend; of the whole store. */
typedef struct kv_policy {
    kvd_evict_policy evict;
    kvd_gqa_rule     rule;
    float            alpha;    /* of the moving average of scores: 0.5 */
    float            top_p;    /* 0: the whole budget */
    bool             strict;   /* all misses are waited for */
    bool             selected; /* attend to the selection alone, not to the whole window */
    bool             zone;     /* estimate the rest from cells, where the store has them */
    /* [n_layer][n_kv_head] windows in budgets, at least 1, in place of what kv_seq_admit() is
     * given; NULL: that one.  Borrowed as long as the policy holds; read by kv_seq_admit() */
    const float *caps;
} kv_policy;

/* Counted since open or the last reset. */
typedef struct kv_counts {
    uint64_t n_step;   /* sparse rows x 1, not times layers */
    uint64_t n_select; /* chunks selected in all lanes, first steps excluded */
    uint64_t n_hit;    /* of them in the window */
    uint64_t n_miss;   /* of them fetched */
    uint64_t n_urgent; /* misses that a step waited for */
    uint64_t n_evict;
    uint64_t n_attend;   /* chunks of windows, misses that were waited for among them, attended */
    uint64_t n_refill;   /* chunks fetched by first steps */
    uint64_t n_restored; /* tokens that came from the block store */
    uint64_t restore_ns; /* that finding and reading them took, given up ones included */
    uint64_t n_slow;     /* prefixes left there, since evaluating them took less */
    uint64_t n_sealed;   /* blocks; n_grown: of those not in a prompt's batch */
    uint64_t n_grown;
    uint64_t bytes_up;    /* records host -> device, windows */
    uint64_t bytes_down;  /* records device -> host */
    uint64_t bytes_dense; /* records host -> device for dense attention */
    /* disk tier: records of misses read from disk, of them waited for; bytes as the block store
     * counts them, since it was opened */
    uint64_t n_disk, n_disk_urgent, disk_wait_ns;
    uint64_t n_disk_stall; /* batches that a step found not yet read when it needed them */
    uint64_t n_disk_late;  /* selected, but still on the way (disk_lag): neither hit nor miss */
    uint64_t n_disk_read, disk_read_bytes, disk_useful_bytes;
    uint64_t disk_put_bytes, disk_aux_bytes;                /* records; index and tails */
    uint64_t disk_tail_bytes;                               /* the tails alone */
    uint64_t n_disk_refused;                                /* units that were not stored */
    uint64_t n_disk_bad;                                    /* units found damaged */
    uint64_t n_disk_failed, n_disk_timeout, n_disk_corrupt; /* batches of reads; of them late ones,
                                                               and those with damaged pages */
    double   mass; /* sum over lanes and steps of the estimated mass; n_mass of them */
    double   zone; /* the same of the weight that cells had among all that was attended */
    uint64_t n_mass;
    uint64_t select_ns, fetch_ns, attend_ns, seal_ns;
    uint64_t zone_ns; /* of attend_ns */
    /* What moves of bytes_up, bytes_dense and bytes_down take: not of a device with memory of its
     * own, which does them beside itself */
    uint64_t up_ns, up_dense_ns, down_ns;
    /* In calls of the block store: to read, waits included; to store, likewise, and of that what
     * prompts and steps waited */
    uint64_t disk_read_ns, disk_put_ns, disk_put_wait_ns;
    char     disk_pause[160]; /* why the disk keeps the block store from storing; "": it does not */
} kv_counts;

typedef enum kv_made { KV_MADE_PROMPT, KV_MADE_DENSE, KV_MADE_SPARSE } kv_made;

typedef struct kv_store kv_store;

/* KVD_E_INVAL when a product leaves 64 bits, or when device_bytes or host_bytes are too small: the
 * message names the least that would do.  Fills *out as far as it got. */
kvd_status kv_plan(const kv_params *p, kv_sizes *out, kvd_err *err);

kvd_status kv_store_open(kv_store **out, kvd_backend *be, const kv_params *p, kvd_err *err);
void       kv_store_close(kv_store *s); /* NULL is a no-op */

uint32_t kv_seq_len(const kv_store *s, uint32_t seq);
uint64_t kv_used_tokens(const kv_store *s); /* committed, over all sequences */
uint64_t kv_capacity_tokens(const kv_store *s);
bool     kv_resident(const kv_store *s);

/* Room for n_new tokens behind the committed ones.  KVD_E_FULL names the limit that was hit; the
 * sequence is then as it was. */
kvd_status kv_seq_reserve(kv_store *s, uint32_t seq, uint32_t n_new, kvd_err *err);
/* n_new were reserved.  made: by a decode step, sparse or dense, and not in a prompt. */
void kv_seq_commit(kv_store *s, uint32_t seq, uint32_t n_new, kv_made made);
void kv_seq_release(kv_store *s, uint32_t seq); /* unused room goes back */
/* Seals what is due.  grown: the tokens were generated, which is only counted. */
kvd_status kv_seq_seal(kv_store *s, kvd_stream *st, uint32_t seq, bool grown, kvd_err *err);
/* n_keep <= length.  Blocks that would not be sealed at that length become raw again; where that
 * fails the sequence is cut further, as kv_seq_len() tells. */
void kv_seq_truncate(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t n_keep);

/* A sequence that takes no tokens for now can be parked (kv_parked.c): its K and V stay where they
 * are, and another one gets its number, lists and windows.  Places are numbered from 0 to
 * kv_sizes.n_parked - 1.  Blocks of parked sequences count like all others.  Tokens that are not
 * sealed are given up where a sequence needs their raw blocks, as kv_parked_len() tells.
 *
 * park: a sequence that holds tokens and no reserved room goes to an empty place; token: its ids,
 * which are copied; variant: of the caller, see kv_seq_source().  unpark: back to an empty
 * sequence, whose ids are written to token; a failure leaves both empty.  common: how many of the
 * given tokens a place's begin with. */
void kv_park(kv_store *s, uint32_t seq, uint32_t place, const int32_t *token, uint8_t variant);
kvd_status kv_unpark(kv_store *s, kvd_stream *st, uint32_t place, uint32_t seq, int32_t *token,
                     kvd_err *err);
void       kv_parked_drop(kv_store *s, uint32_t place);
uint32_t   kv_parked_places(const kv_store *s);
uint32_t   kv_parked_len(const kv_store *s, uint32_t place); /* 0: empty, or no such place */
uint8_t    kv_parked_variant(const kv_store *s, uint32_t place);
uint32_t   kv_parked_common(const kv_store *s, uint32_t place, const int32_t *token,
                            uint32_t n_token);

/* A prompt that goes through the layers one by one, where not everything is resident: its K and V
 * of one layer lie on the stage, in place for exact attention, until the layer is done; then they
 * are indexed and move down.  In place of reserve, commit and seal: begin; per layer, in order,
 * open, the kernels' work with written after what stores K and V, close; end or abort.  One prompt
 * at a time, and nothing else in between.  reads: the new tokens attend to what the sequence holds,
 * which comes up to the stage, too. */
kvd_status kv_prompt_begin(kv_store *s, uint32_t seq, uint32_t n_new, bool reads, kvd_err *err);
kvd_status kv_prompt_open(kv_store *s, kvd_stream *st, uint32_t layer, kvd_kv_layout *layout,
                          const uint64_t **block, kvd_err *err);
/* K and V of the first n_token new tokens are stored, as far as the stream has come. */
kvd_status kv_prompt_written(kv_store *s, kvd_stream *st, uint32_t layer, uint32_t n_token,
                             kvd_err *err);
/* The layer's queries of some of the prompt's last tokens, after RoPE; n_row 0: none are known. */
typedef struct kv_prompt_query {
    uint32_t     n_row;
    uint64_t     q_stride;
    const float *q; /* [row][n_head][head_dim] */
    float        scale;
} kv_prompt_query;
/* last: what they attend to is likely to be asked for soon, so where the host tier has no room for
 * all records it gets those.  That moves bytes only. */
kvd_status kv_prompt_close(kv_store *s, kvd_stream *st, uint32_t layer, const kv_prompt_query *last,
                           kvd_err *err);
kvd_status kv_prompt_end(kv_store *s, kvd_err *err); /* abort is left after a failure */
void       kv_prompt_abort(kv_store *s);

/* For the kernels: where a layer's lanes lie, and the blocks of a sequence (committed and reserved,
 * as of kv_step_upload(); valid until the sequence changes; what is not raw has no block). */
kvd_kv_layout   kv_layout(const kv_store *s, uint32_t layer);
const uint64_t *kv_seq_blocks(const kv_store *s, uint32_t seq);
/* For attention over all tokens: brings a layer's sealed records up where they are not resident.
 * Valid until the next call. */
kvd_status kv_dense_view(kv_store *s, kvd_stream *st, uint32_t layer, uint32_t seq,
                         kvd_kv_layout *layout, const uint64_t **block, kvd_err *err);

/* ---- the block store ----------------------------------------------------------------- */

/* Without a cache_dir these do nothing. */

/* Where the sequence's token ids are, for as long as the store lives (a token's id is there before
 * the token is committed or its prompt begun); and what else its K and V depend on.  The variant
 * changes only while the sequence is empty. */
void kv_seq_source(kv_store *s, uint32_t seq, const int32_t *token, uint8_t variant);
/* Whose an empty sequence's blocks are (copied, at most KVD_SALT_BYTES_MAX bytes; 0: everybody's).
 */
void kv_seq_salt(kv_store *s, uint32_t seq, const void *salt, uint32_t bytes);
/* What sparse steps depend on: at most 62 bytes. */
void kv_set_provenance(kv_store *s, const void *options, uint32_t bytes);
typedef struct kv_restore_ask {
    uint32_t n_token;   /* of the sequence's ids */
    uint32_t final_len; /* of the sequence with the rest of its prompt; 0: with one more token */
    uint64_t until_ns;  /* when the call should end; 0: when all is there */
} kv_restore_ask;
/* Fills a sequence with the longest known prefix of its first n_token ids, if that is more than it
 * holds, which are the first of them; kv_seq_len() tells how many tokens there are then.  A prefix
 * that would take longer to read than to evaluate is left, and whatever fails leaves the sequence
 * what it held.  false: the time is over; the sequence is to be left alone until more calls with
 * the same ids have said true, or kv_restore_stop() has given up, while others may be stepped.  One
 * sequence at a time is restored in parts: those that come meanwhile get false, too. */
bool kv_seq_restore(kv_store *s, kvd_stream *st, uint32_t seq, const kv_restore_ask *ask);
typedef struct kv_prefix { /* of a prompt, wherever its ids are */
    const int32_t *token;
    uint32_t       n_token;
    const void    *salt;
    uint32_t       n_salt;
    uint8_t        variant; /* as kv_seq_source() */
} kv_prefix;
/* References to what is known of it, so that it stays.  NULL: nothing is known, it would be more
 * than half of the cache with all that is held, or sequences have their own records there. */
typedef struct kv_hold kv_hold;
kvd_status             kv_hold_open(kv_hold **out, kv_store *s, const kv_prefix *p, kvd_err *err);
void                   kv_hold_close(kv_hold *h);
bool                   kv_restoring(const kv_store *s, uint32_t seq);              /* in parts */
void                   kv_restore_stop(kv_store *s, kvd_stream *st, uint32_t seq); /* as it was */
void                   kv_evaluated(kv_store *s, uint32_t n_token, uint64_t ns);   /* of prompts */
/* Stores what is not sealed, as it is now. */
void kv_seq_store_tail(kv_store *s, kvd_stream *st, uint32_t seq);
/* From which token on a failed read has left the sequence's records missing; UINT32_MAX: none are.
 * The caller cuts the sequence there and evaluates the rest again. */
uint32_t kv_seq_lost(const kv_store *s, uint32_t seq);
/* Lets what is being stored go on, without waiting; of use in every step. */
void kv_poll(kv_store *s);
/* Waits until all that was stored can be found by others. */
kvd_status kv_flush(kv_store *s, kvd_err *err);

/* Removes all that no sequence holds; the answer as of KVD_CACHE_CLEAR. */
kvd_status kv_clear(kv_store *s, kvd_buf *json, kvd_err *err);

/* What kvd_cache_command() does: the answer goes to json. */
kvd_status kv_tend(const char *dir, kvd_cache_verb verb, uint64_t max_bytes, kvd_buf *json,
                   kvd_err *err);

/* ---- sparse attention -------------------------------------------------------------- */

void kv_set_policy(kv_store *s, const kv_policy *p);
/* How the work of a sparse step is ordered: moves bytes, and changes results only as the
 * composition of a batch does. */
typedef struct kv_schedule {
    bool     elastic;     /* rows go in micro-batches: misses of one come up while others select */
    uint32_t micro_batch; /* rows of one; 0: all */
} kv_schedule;
void kv_set_schedule(kv_store *s, const kv_schedule *p);
/* Whether n_row rows may go in micro-batches of so many; where not, they go in larger ones. */
bool kv_micro_batch_fits(uint32_t n_row, uint32_t rows);
/* Another index over all that is sealed, no larger than the one the store was opened for
 * (KVD_E_INVAL).  Other failures leave a store to be closed. */
kvd_status kv_set_index(kv_store *s, kvd_stream *st, const kvd_index_desc *desc, kvd_err *err);
/* After a prompt: from the next step on the sequence attends to budget tokens a lane, out of a
 * window of cap times as many (at most what the lane has room for).  budget 0: to everything. */
void kv_seq_admit(kv_store *s, uint32_t seq, uint32_t budget, float cap);
/* Tokens that a lane's window has room for. */
uint32_t kv_lane_window(const kv_store *s, uint32_t layer, uint32_t kv_head);
bool     kv_seq_sparse(const kv_store *s, uint32_t seq); /* whether its steps are sparse now */
/* Whether n_step sparse steps were made since the last time (or the admission), and the mean share
 * of attention that they reached in all lanes, as the index estimates it. */
bool kv_seq_take_mass(kv_store *s, uint32_t seq, uint32_t n_step, double *mean);
/* The next step fills the window anew: after a step that was not finished. */
void kv_seq_restart(kv_store *s, uint32_t seq);

/* One new token each, K and V stored but not committed. */
typedef struct kv_query {
    uint32_t        layer, n_row;
    uint32_t        first; /* number of its first row among the step's; 0 outside kv/ */
    const uint32_t *seq;   /* [n_row], no two equal */
    const uint32_t *row;   /* [n_row] of q and out */
    uint64_t        q_stride, out_stride;
    const float    *q;   /* [row][n_head][head_dim] after RoPE */
    float          *out; /* [row][n_head][head_dim] */
    float           scale;
} kv_query;

/* The step program of a store that is not open, for steps of n_row rows, as a table for people.
 * p->apart says whether the device has memory of its own; z as kv_plan() fills it. */
void kv_print_steps(const kv_params *p, const kv_sizes *z, const kv_policy *policy,
                    const kv_schedule *schedule, uint32_t n_row, kvd_buf *out);

/* Around the layers of a batch in which rows attend sparsely: before the first, and after the
 * stream has passed the last.  begin chooses the step program for n_row rows; seq and row [n_row]
 * stay as they are until the end.  Where the device drives the step (device_steps, and neither the
 * estimation zone nor a tap needs the host), begin writes all that the batch's ops read, and the
 * layers only give ops to the stream.  Ops may wait for records on disk, though, which the host
 * reads in kv_step_wait(): nobody may wait for the stream otherwise.  end: the step has failed
 * where such records could not be had. */
kvd_status kv_step_begin(kv_store *s, kvd_stream *st, const uint32_t *seq, const uint32_t *row,
                         uint32_t n_row, kvd_err *err);
kvd_status kv_step_end(kv_store *s, kvd_err *err);
/* First in what a batch gives to the stream: block lists, and what begin has written, as ops will
 * read them. */
kvd_status kv_step_upload(kv_store *s, kvd_stream *st, kvd_err *err);
bool       kv_step_device_driven(const kv_store *s); /* whether the step begun is */
/* What a recorded step depends on besides the memory that its ops read; 0: no sparse step. */
uint64_t              kv_step_hash(const kv_store *s);
const sparse_program *kv_step_program(const kv_store *s);           /* of the step begun last */
kvd_status kv_step_wait(kv_store *s, kvd_stream *st, kvd_err *err); /* until the stream is done */
/* Instead of end, after a failure: waits for the streams, and for nothing else. */
void kv_step_abort(kv_store *s, kvd_stream *st);
/* Whether ops are recorded now, so that nothing may be waited for; else they are waited for layer
 * by layer where they may wait for the host. */
void kv_step_recording(kv_store *s, bool on);
/* Behind the last layer: the stream goes on after what was given to other streams. */
kvd_status kv_step_join(kv_store *s, kvd_stream *st, kvd_err *err);
/* A layer's sparse attention for the step's rows, by the step program. */
kvd_status kv_attend_sparse(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err);

/* ---- measuring ---------------------------------------------------------------------- */

/* From the next step on.  no_fetch: windows change as ever, but no record moves. */
typedef struct kv_measure {
    /* Called behind select (KVD_STAGE_SELECT) and behind all fetches (KVD_STAGE_FETCH) of a layer,
     * which then go one after the other on the main stream.  NULL: nobody measures stages. */
    kvd_status (*mark)(void *ctx, uint32_t layer, uint32_t stage, kvd_err *err);
    void *ctx;
    bool  no_fetch;
} kv_measure;
void kv_set_measure(kv_store *s, const kv_measure *m);
/* What a sparse step of the sequence reads at least over all layers: of index and kept tokens. */
uint64_t kv_select_bytes(const kv_store *s, uint32_t seq);
uint64_t kv_dense_bytes(const kv_store *s, uint32_t seq); /* the same of one to all tokens */
uint64_t kv_record_raw(const kv_store *s);                /* bytes of a record on the device */

/* ---- looking in -------------------------------------------------------------------- */

void kv_get_counts(const kv_store *s, kv_counts *out);
void kv_reset_counts(kv_store *s);
/* Selected and hit chunks of one lane over all sequences, as in kv_counts. */
void kv_lane_counts(const kv_store *s, uint32_t layer, uint32_t kv_head, uint64_t *n_select,
                    uint64_t *n_hit);

/* Mean share of attention that the lane's steps reached, as the index estimates it; 0: none yet. */
double kv_lane_mass(const kv_store *s, uint32_t layer, uint32_t kv_head);

/* Bytes in use: of kv_sizes.device_bytes and host_bytes (without KV_BUF_TABLE) what tokens hold and
 * all that steps work in; of units in the block store, and how many it may hold (0: no limit). */
typedef struct kv_used {
    uint64_t device_bytes, host_bytes, disk_bytes, disk_limit_bytes;
} kv_used;
void kv_used_bytes(const kv_store *s, kv_used *out);

/* Which tier a sequence's tokens lie in, as means over lanes, rounded so that the three make its
 * length: on the device as they are, in host records, on disk alone.  window: of sealed tokens,
 * those for which its windows have a place on the device, too.  With a disk tier it visits each
 * lane. */
typedef struct kv_where {
    uint32_t device, host, disk, window;
} kv_where;
void kv_seq_where(const kv_store *s, uint32_t seq, kv_where *out);
void kv_parked_where(const kv_store *s, uint32_t place, kv_where *out);

/* One lane of a step between selection and the window's change; valid during the call.  score is
 * the step's, sel what came of it (of a step that refills: the window's new content). */
typedef struct kv_tap_lane {
    uint32_t        seq, layer, kv_head, step; /* step 0 refills */
    uint32_t        first_chunk, n_chunk;      /* those that could be selected */
    uint32_t        budget, n_sel;             /* chunks */
    const uint32_t *sel;                       /* as select leaves it: with KVD_SELECT_URGENT */
    const float    *score;                     /* [n_chunk] */
    const uint16_t *ema;                       /* [n_chunk] */
} kv_tap_lane;
typedef void (*kv_tap_fn)(void *ctx, const kv_tap_lane *lane);
/* Shows every lane of every sparse step, in order; it must not call the store.  NULL: no more.
 * False: the device keeps its maps to itself. */
bool kv_set_tap(kv_store *s, kv_tap_fn fn, void *ctx);

/* Recounts everything; asserts on the first invariant that does not hold. */
void kv_check(const kv_store *s);

#endif
