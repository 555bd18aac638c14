/* SPDX-License-Identifier: Apache-2.0 */
/* kv_impl.h - private to kv/: the store's insides.
 *
 * kv_plan.c     sizes
 * kv_store.c    open, blocks: who has which
 * kv_parked.c   sequences that take no tokens for now
 * kv_seal.c     raw blocks to records and back
 * kv_prompt.c   a prompt that goes through the layers one by one; kv_leave.c: what leaves meanwhile
 * kv_pack.c     records in the form of lower tiers
 * kv_step.c     a sparse step: its program (sparse/), what goes before and after the layers
 * kv_stages.c   what each stage of a program does
 * kv_args.c     arguments of the stages' ops
 * kv_count.c    counters, observers, checks of windows
 * kv_tier.c     the disk as a tier; kv_land.c: where its records arrive; kv_serve.c: requests of
 *               steps that the device drives
 * kv_zone.c     the estimation zone: what stands for the tokens that a step does not attend to
 * kv_cache.c    what is sealed goes to the block store (kv_disk.h); kv_restore.c: and back;
 *               kv_ferry.c, kv_restore_up.c: the same for a device with memory of its own
 *
 * A *lane index* counts lanes of all sequences: (seq * n_layer + layer) * n_kv_head + head.  Arrays
 * per chunk have n_chunk_max elements a lane and are written first when a chunk is sealed. */
#ifndef KVD_KV_IMPL_H
#define KVD_KV_IMPL_H

#include "kv/kv.h"
#include "sparse/sparse.h"

#define KV_NO_BLOCK UINT64_MAX
#define KV_NO_HOST  KVD_HOST_NONE

typedef struct kv_seq {
    uint32_t  len;      /* committed tokens */
    uint32_t  n_block;  /* entries of the lists in use */
    uint32_t  n_sealed; /* tokens; a multiple of the block */
    uint64_t *block;    /* [blocks_max] byte offsets into the pool, or KV_NO_BLOCK */
    uint64_t *iblock;   /* [blocks_max] byte offsets into the index; of sealed blocks */
    uint32_t  budget;   /* chunks; 0: dense */
    uint32_t  step;     /* sparse steps since the last refill began; 0: the next one refills */
    double    mass;     /* of sparse steps' lanes, n_mass of them, since they were last taken */
    uint64_t  n_mass;
    uint64_t  n_slot; /* slots in use over all lanes: the sum of their cap */
} kv_seq;

#define KV_PACK_BLOCKS 2u /* that are packed before they are copied: 1 MiB at 8 heads of 128 */

/* Records to copy or unpack, kv_copies_max() of them at most. */
typedef struct kv_copies {
    uint64_t *src, *dst;
    uint64_t *param;  /* of what is unpacked */
    uint32_t *number; /* likewise: chunk in its block */
} kv_copies;

enum { KV_COPIES, KV_COPIES_LATE }; /* of kv_step.list */

/* Arrays of one step, written by select and read by fetch and attend.  Those marked * exist once a
 * layer with device_steps. */
typedef struct kv_step {
    bool              recording;
    uint32_t          n_row;      /* of the step under way; 0: none is */
    const uint32_t   *rows_seq;   /* [n_row] */
    uint64_t          n_up;       /* urgent misses of the layer that the host has listed */
    uint32_t          seq_stride; /* between layers of what is marked *; 0: layers share it */
    ptrdiff_t         args_shift, found_shift; /* from ARGS and FOUND to what ops use of them */
    kvd_window_place *place;                   /* *[n_seq] */
    /* kept_span, select, chosen, window, change, k, fetch, into, sink: * */
    kvd_attn_span     *kept_span, *near_span, *urgent_span; /* [n_seq][n_kv_head] */
    kvd_select_seq    *select;                              /* [n_seq] */
    kvd_select_result *chosen;                              /* [n_seq][n_kv_head] */
    kvd_window_seq    *window;                              /* [n_seq] */
    kvd_window_result *change;                              /* [n_seq][n_kv_head] */
    uint32_t          *k;                                   /* [n_seq][n_kv_head] */
    float             *part;                                /* [n_seq][n_kv_head][part] */
    float             *lse;                                 /* [n_batch][n_head] */
    float             *no_lse;                              /* [n_head] of nothing */
    float             *zone_lse;                            /* [n_batch][n_head]; zone */
    kvd_zone_seq      *zone;                                /* [n_seq]; zone */
    uint16_t          *left;                                /* [n_seq][n_kv_head][cells]; zone */
    float             *score;                               /* [n_seq][n_kv_head][n_chunk_max] */
    uint16_t          *ema;                                 /* likewise; as the CPU sees them */
    uint32_t          *sel, *fetch, *into, *stay;           /* [n_seq][n_kv_head][slots_max] */
    uint64_t          *sink;                                /* [n_seq][n_kv_head][sinks] records */
    uint64_t          *near, *urgent; /* [n_seq][n_kv_head][slots_max] records */
    kv_copies          list[2];       /* records to copy; what nobody waits for apart */
    uint64_t          *pack; /* lanes to pack of a sequence's layer: from, parameters, to */
} kv_step;

typedef struct kv_prompt {
    uint32_t        seq, n_new;
    bool            reads;
    uint32_t        first, end; /* blocks that become sealed */
    uint32_t        left;       /* of them and the layer under way, up to here on their way down */
    kv_prompt_query last;       /* of the layer that is closing */
} kv_prompt;

/* What a sparse step runs on (kv_step.c). */
typedef kvd_status (*kv_stage_fn)(kv_store *s, kvd_stream *st, const kv_query *rows, kvd_err *err);

typedef struct kv_exec {
    sparse_program program;
    sparse_machine machine;              /* its streams and events: NULL where none are needed */
    kv_stage_fn    stage[SPARSE_N_KIND]; /* of the program */
    kvd_event     *event[SPARSE_EVENTS_MAX];
    kvd_event     *joined; /* the main stream waits for another, or the host for it */
    kvd_backend   *cpu;    /* changes windows with host_lookup, where memory is not unified */
    kvd_stream    *cpu_stream;
    kv_schedule    schedule;
    kv_measure     measure;
} kv_exec;

/* Where maps and lists lie.  Where memory is not unified and steps go without the host, MAP is the
 * device's alone, ARGS lie in pinned memory and are mirrored on the device, and FOUND is the
 * device's and is mirrored in pinned memory. */
typedef enum kv_region {
    KV_MAP,   /* what ops keep and hand on */
    KV_WORK,  /* of that, what the host has no part in; the device's with host_lookup, too */
    KV_ARGS,  /* what the host writes for a step, and block lists */
    KV_FOUND, /* what it reads after one */
    KV_LISTS, /* what it writes for other ops, once they have been read */
    KV_N_REGION
} kv_region;

typedef struct kv_tier   kv_tier;
typedef struct kv_parked kv_parked;

struct kv_store {
    kvd_backend     *be;
    kv_params        params;
    kv_sizes         sizes;
    kv_policy        policy;
    kvd_kv_layout    layout;      /* with layer 0's lane_off */
    kvd_index_layout index;       /* likewise */
    kvd_kv_layout    zone;        /* likewise; of cells, in the lanes of the index */
    uint32_t         blocks_max;  /* of one sequence */
    uint32_t         n_chunk_max; /* of one sequence */
    uint32_t         block_chunks, sinks, slots_max;
    uint32_t         zone_shift; /* chunks of a cell, as a power of two */

    kvd_mem           pool;   /* raw blocks, then windows, then the stage */
    kvd_record_format record; /* below the device */
    uint64_t          packed_bytes;
    uint64_t          param_off; /* in a lane's aux: behind the index parameters, then cells */
    uint8_t          *packed;    /* KV_PACK_BLOCKS blocks of a layer, packed */
    uint64_t          window_off, stage_off;
    kvd_mem           landmarks;
    kvd_mem           region[KV_N_REGION];
    kvd_mem           mirror[KV_N_REGION]; /* of ARGS and FOUND, where there are such */
    kvd_mem           host;

    uint16_t *ema, *slot_of;    /* [lane][n_chunk_max] */
    uint32_t *chunk_of, *stamp; /* [lane][slots_max] */
    uint32_t *host_of;          /* [lane][n_chunk_max]; host tier */
    uint32_t *lane_slots;       /* [n_layer][n_kv_head] room of a window, at most slots_max */
    uint32_t *cap;              /* [lane] slots in use, as admitted */
    uint64_t *lane_at;          /* [lane] offset of its sinks and slots into the pool; tiers */
    kv_step   step;

    uint64_t  n_free, n_used; /* raw blocks free; committed tokens */
    uint64_t *free_stack;     /* [n_raw] offsets; the top is taken next */
    uint64_t  n_ifree;
    uint64_t *ifree_stack; /* [n_block] */
    uint64_t  n_hfree, n_hrecord;
    uint32_t *hfree_stack; /* [n_hrecord] */
    uint64_t  n_held;      /* blocks in lists, raw or sealed */
    kv_seq   *seq;         /* [n_seq] */
    uint64_t *lists;       /* [n_seq][2][blocks_max], where block and iblock point */
    uint64_t *stage_block; /* [blocks_max] */
    kv_prompt prompt;      /* under way, or n_new 0 */

    kvd_stream *down; /* beside a prompt, what leaves; NULL: it does not leave early */
    kvd_event  *written, *left;
    kv_exec     exec;

    struct kv_tier  *tier;  /* the disk as a tier; NULL: the host has room for all */
    struct kv_cache *cache; /* the block store and what belongs to it; NULL: none */

    kv_parked *parked; /* NULL: the store has no places for parked sequences */

    kv_tap_fn tap; /* or NULL */
    void     *tap_ctx;
    kv_counts counts;
    uint64_t *lane_select, *lane_hit; /* [n_layer][n_kv_head] */
    double   *lane_mass;              /* likewise: sums, of lane_n_mass steps */
    uint64_t *lane_n_mass;
};

static inline uint64_t kv_lane(const kv_store *s, uint32_t seq, uint32_t layer)
{
    return ((uint64_t)seq * s->params.n_layer + layer) * s->params.n_kv_head;
}

/* Where it need not be resident: whether a prompt's records go down beside the work on it. */
static inline bool kv_leaves_early(const kv_params *p)
{
    return p->device_steps && p->record == KVD_RECORD_RAW;
}

/* Whether the device alone has the score averages. */
static inline bool kv_averages_apart(const kv_params *p)
{
    return p->apart && p->sparse && (p->device_steps || p->host_lookup);
}

static inline uint64_t kv_n_lane(const kv_params *p)
{
    return (uint64_t)p->n_seq * p->n_layer * p->n_kv_head;
}

static inline uint32_t kv_blocks_for(uint64_t n_token)
{
    return (uint32_t)kvd_div_up(n_token, KV_BLOCK_TOKENS);
}

/* kv_store.c.  Whether the sequence may grow by n_new tokens, by context and blocks held; how many
 * blocks it has then.  What a pending restore has set aside goes before. */
kvd_status kv_check_growth(kv_store *s, uint32_t seq, uint32_t n_new, uint32_t *need, kvd_err *err);
void       kv_drop_blocks(kv_store *s, uint32_t seq, uint32_t n_keep); /* those beyond the first */
/* Of failures to seal, when there are no free blocks. */
kvd_status kv_refuse_unsealed(uint32_t seq, kvd_err *err);

/* Tokens sealed at this length. */
static inline uint32_t kv_sealed_at(const kv_params *p, uint32_t len)
{
    return len < KV_BLOCK_TOKENS + p->n_local
               ? 0
               : (len - p->n_local) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
}

/* Where a lane's record lies on the device: in place, or in sink or slot number i. */
static inline uint64_t kv_record_in_block(const kv_store *s, uint64_t block, uint32_t layer,
                                          uint32_t head, uint32_t chunk)
{
    return block + ((uint64_t)layer * s->params.n_kv_head + head) * s->layout.head_stride +
           (uint64_t)(chunk % s->block_chunks) * s->layout.record_bytes;
}

static inline uint64_t kv_record_in_window(const kv_store *s, uint64_t lane, uint32_t i)
{
    return s->lane_at[lane] + i * s->layout.record_bytes;
}

/* kv_plan.c.  Lays out the regions and points the store into base [KV_N_REGION]; base NULL only
 * measures.  bytes [KV_N_REGION]. */
void kv_place_map(const kv_params *p, bool resident, kv_store *s, const kvd_mem *base,
                  uint64_t *bytes);
/* Whether a region lies in the device's memory, and whether it has a copy where it does not. */
bool     kv_region_on_device(const kv_params *p, kv_region r);
bool     kv_region_mirrored(const kv_params *p, kv_region r);
uint64_t kv_copies_max(const kv_params *p);
uint32_t kv_lane_slots(const kv_params *p, uint64_t lane); /* lane: of a sequence */

/* Where a raw block has a layer's lanes; where the stage has block number b of its layer. */
static inline uint64_t kv_layer_of(const kv_store *s, uint64_t block, uint32_t layer)
{
    return block + (uint64_t)layer * s->params.n_kv_head * s->layout.head_stride;
}

static inline uint64_t kv_stage_block(const kv_store *s, uint32_t b)
{
    return s->stage_off + (uint64_t)b * s->params.n_kv_head * s->layout.head_stride;
}

static inline uint64_t kv_packed_block_bytes(const kv_store *s)
{
    return s->block_chunks * s->packed_bytes * s->params.n_layer * s->params.n_kv_head;
}

/* Where what a lane's records are unpacked with lies, of block b, in the landmarks' memory: their
 * parameters, or the index that has their keys. */
static inline uint64_t kv_params_of_block(const kv_store *s, uint32_t seq, uint32_t lane,
                                          uint32_t b)
{
    return s->seq[seq].iblock[b] + lane * s->index.head_stride +
           (s->record.type == KVD_RECORD_VALUES ? 0 : s->param_off);
}

static inline kvd_record_format kv_record_format(const kv_params *p)
{
    return (kvd_record_format){ .type         = p->record,
                                .raw          = p->type,
                                .chunk_tokens = p->chunk_tokens,
                                .block_tokens = KV_BLOCK_TOKENS,
                                .head_dim     = p->head_dim,
                                .keys         = p->index };
}

/* Bytes of a lane's cells of one block. */
static inline uint64_t kv_zone_bytes(const kv_params *p)
{
    const uint64_t elem = p->type == KVD_DTYPE_F32 ? 4 : 2;

    return p->zone_tokens == 0
               ? 0
               : kvd_align_up(KV_BLOCK_TOKENS / p->zone_tokens * 2 * elem * p->head_dim, 64);
}

/* Bytes of a lane's index, parameters and cells of one block. */
static inline uint64_t kv_aux_bytes(const kv_params *p)
{
    const kvd_record_format f = kv_record_format(p);

    return kvd_index_lane_bytes(&p->index) + kvd_record_param_bytes(&f) + kv_zone_bytes(p);
}

/* Where n records lie packed in the pool before they are unpacked at `at`. */
static inline uint64_t kv_packed_at(const kv_store *s, uint64_t at, uint32_t n)
{
    return at + n * (s->layout.record_bytes - s->packed_bytes);
}

/* Where an op reads what the host has written in ARGS. */
static inline void *kv_dev(const kv_store *s, const void *args)
{
    const kvd_mem *host = &s->region[KV_ARGS], *dev = &s->mirror[KV_ARGS];
    const uint64_t off = (uint64_t)((const uint8_t *)args - (const uint8_t *)host->ptr);

    if (!dev->ptr)
        return (void *)(uintptr_t)args;
    kvd_assert_dbg(off <= host->bytes); /* an empty list may lie at the end */
    return (uint8_t *)dev->ptr + off;
}

/* Where ops of the step read what the host has written in ARGS: a mirror where the device drives.
 */
static inline void *kv_step_dev(const kv_store *s, const void *args)
{
    return (uint8_t *)(uintptr_t)args + s->step.args_shift;
}

/* Where they leave what the host reads in FOUND. */
static inline void *kv_found(const kv_store *s, void *host)
{
    return (uint8_t *)host + s->step.found_shift;
}

/* Number of the first sequence in a layer's arrays of a step, and of the first lane. */
static inline size_t kv_seq_at(const kv_store *s, uint32_t layer)
{
    return (size_t)layer * s->step.seq_stride;
}

static inline size_t kv_lane_at(const kv_store *s, uint32_t layer)
{
    return kv_seq_at(s, layer) * s->params.n_kv_head;
}

/* Of a query's first row: its number, and its first lane's, in those arrays; and in arrays that all
 * layers share. */
static inline size_t kv_query_seq(const kv_store *s, const kv_query *q)
{
    return kv_seq_at(s, q->layer) + q->first;
}

static inline size_t kv_query_lane(const kv_store *s, const kv_query *q)
{
    return kv_query_seq(s, q) * s->params.n_kv_head;
}

static inline size_t kv_query_shared(const kv_store *s, const kv_query *q)
{
    return (size_t)q->first * s->params.n_kv_head;
}

/* Before lists are written anew, or host records, that ops may not have read yet: of this stream,
 * and of the others that a step driven by the host uses (kv_step.c). */
kvd_status kv_wait_streams(kv_store *s, kvd_stream *st, kvd_err *err);

static inline kvd_status kv_wait_lists(kv_store *s, kvd_stream *st, kvd_err *err)
{
    return s->be->unified ? KVD_OK : kv_wait_streams(s, st, err);
}

/* kv_pack.c.  list_up: one record that comes up, from src (in the host tier) to dst (in the pool);
 * lane counts inside the sequence; returns n + 1.  copy_up: n listed records; bring: the same from
 * other memory.  pack_layer: all
 * lanes of a layer of blocks [b, b + n), n <= KV_PACK_BLOCKS, which are raw at pool offsets `at`,
 * to s->packed, by lists in the places of blocks [list, list + n) of a layer; pack_lane: one of
 * block b's to dst; with their parameters.  unpack_run: n records of a block from number `chunk`
 * on, which lie packed at the end of their room in the pool (kv_packed_at()). settle_raw: what the
 * device goes on with is what the records say. */
uint64_t   kv_list_up(const kv_store *s, const kv_copies *list, uint32_t seq, uint32_t lane,
                      uint32_t chunk, uint64_t src, uint64_t dst, uint64_t n);
kvd_status kv_copy_up(kv_store *s, kvd_stream *st, const kv_copies *list, uint64_t n, kvd_err *err);
kvd_status kv_bring(kv_store *s, kvd_stream *st, const kv_copies *list, const void *from,
                    uint64_t n, kvd_err *err);
kvd_status kv_pack_layer(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t b,
                         uint32_t n, const uint64_t *at, uint32_t list, kvd_err *err);
kvd_status kv_pack_lane(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t lane, uint32_t b,
                        uint64_t at, uint8_t *dst, kvd_err *err);
kvd_status kv_unpack_run(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t lane, uint32_t chunk,
                         uint32_t n, uint64_t at, kvd_err *err);
kvd_status kv_settle_raw(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t b,
                         uint64_t at, kvd_err *err);

/* kv_leave.c.  leave_layer: the stage is written anew behind what leaves.  leave_end: all is down.
 */
kvd_status kv_leave_open(kv_store *s, kvd_err *err);
void       kv_leave_close(kv_store *s);
kvd_status kv_leave_layer(kv_store *s, kvd_stream *st, kvd_err *err);
kvd_status kv_leave_end(kv_store *s, kvd_err *err);

/* Adds the time since t0 to what moves take, where they have ended when their op returns. */
static inline void kv_count_move(kv_store *s, uint64_t *ns, uint64_t t0)
{
    if (!s->params.apart)
        *ns += kvd_now_ns() - t0;
}

/* kv_parked.c.  bytes: of host memory, by z as far as it is filled.  yield: parked sequences give
 * up what is not sealed, the one parked first before others, until n_raw raw blocks are free or
 * there are no more.  count: adds the descriptors that name raw block `raw` and index block
 * `index`. check: asserts the invariants; adds tokens, blocks and host records that are parked. */
uint64_t   kv_parked_bytes(const kv_params *p, const kv_sizes *z);
kvd_status kv_parked_open(kv_store *s, kvd_err *err); /* nothing without places */
void       kv_parked_close(kv_store *s);
void       kv_parked_yield(kv_store *s, uint64_t n_raw);
void       kv_parked_drop_all(kv_store *s);
void       kv_parked_count(const kv_store *s, uint64_t raw, uint64_t index, uint32_t *n_raw,
                           uint32_t *n_index);
void       kv_parked_check(const kv_store *s, uint64_t *used, uint64_t *held, uint64_t *records);

/* kv_seal.c (map: host records where there is room for them, if `host`).
 * forget_window: sealed block b has no places in windows.
 * map, unmap: takes and gives back what sealed block number b holds besides its raw block.
 * index_layer: landmarks of n blocks that lie anywhere.
 * move_down: a layer's lanes of blocks [first, end), at layer_at[b], go to their host records.
 * list_down: lists what of a layer's block b has host records: lanes that lie at `at` in steps of
 *   lane_bytes, records in steps of record_bytes; returns how long the list is then.
 * copy_listed: n listed records, one op.
 * keep_packed: the same for lanes that lie packed already (kv_packed_at()); all have places.
 * seal_layer: blocks [first, end) of a layer, at layer_at[b] (block[] and l say so to kernels), are
 *   indexed, stored and packed.
 * keep_sinks: the first chunks of a sequence get a place on the device for good.
 * fill_stage: all sealed records of a layer to the stage, block by block as if they were raw.
 * unseal: back to n_sealed tokens; what a failure leaves is sealed and whole. */
void       kv_forget_window(kv_store *s, uint32_t seq, uint32_t b);
void       kv_map_block(kv_store *s, uint32_t seq, uint32_t b, bool host);
void       kv_unmap_block(kv_store *s, uint32_t seq, uint32_t b);
kvd_status kv_index_layer(kv_store *s, kvd_stream *st, uint32_t layer, const kvd_kv_layout *kv,
                          const uint64_t *block, const uint64_t *iblock, uint32_t n, kvd_err *err);
kvd_status kv_move_down(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t first,
                        uint32_t end, const uint64_t *layer_at, kvd_err *err);
uint64_t   kv_list_down(const kv_store *s, const kv_copies *list, uint32_t seq, uint32_t layer,
                        uint32_t b, uint64_t at, uint64_t lane_bytes, uint64_t record_bytes,
                        uint64_t n);
kvd_status kv_copy_listed(kv_store *s, kvd_stream *st, const kv_copies *list, const void *src,
                          void *dst, uint64_t bytes, uint64_t n, kvd_err *err);
kvd_status kv_keep_packed(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t b,
                          uint64_t at, kvd_err *err);
kvd_status kv_seal_layer(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint32_t first,
                         uint32_t end, const kvd_kv_layout *l, const uint64_t *block,
                         const uint64_t *layer_at, kvd_err *err);
kvd_status kv_keep_sinks(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t layer, uint64_t at,
                         kvd_err *err);
kvd_status kv_fill_stage(kv_store *s, kvd_stream *st, uint32_t layer, uint32_t seq, kvd_err *err);
kvd_status kv_unseal(kv_store *s, kvd_stream *st, uint32_t seq, uint32_t n_sealed, kvd_err *err);

/* kv_prompt.c: chooses which records of a closing layer the host tier gets. */
kvd_status kv_prompt_place(kv_store *s, kvd_stream *st, uint32_t layer, kvd_err *err);

/* kv_zone.c.  layout, build: nothing without a zone; build makes cells of a layer's n blocks, which
 * lie as kv says, in their index blocks.  used: whether steps attend to cells.  attend: after all
 * else of a step, whose log-sum-exp is in step.lse; fills q->out. */
void       kv_zone_layout(kv_store *s);
kvd_status kv_zone_build(kv_store *s, kvd_stream *st, uint32_t layer, const kvd_kv_layout *kv,
                         const uint64_t *block, const uint64_t *iblock, uint32_t n, kvd_err *err);
bool       kv_zone_used(const kv_store *s);
kvd_status kv_zone_attend(kv_store *s, kvd_stream *st, const kv_query *q, kvd_err *err);

/* kv_step.c.  open: streams and events.  clear_windows: windows and averages of all layers of a
 * sequence are emptied, on the stream; a refill starts from that. */
kvd_status         kv_exec_open(kv_store *s, kvd_err *err);
void               kv_exec_close(kv_store *s);
kvd_status         kv_clear_windows(kv_store *s, kvd_stream *st, uint32_t seq, kvd_err *err);
static inline bool kv_refills(const kv_seq *q)
{
    return q->step == 0;
}

/* kv_stages.c: the functions of a program's stages, to stage [SPARSE_N_KIND]. */
void kv_stages_of(const sparse_program *p, kv_stage_fn *stage);

/* kv_args.c.  list_row: what ops of a layer read of row number i of the step, which is row `row` of
 * q and belongs to sequence seq; list_all_layers: of every layer.  The others: arguments of ops for
 * the rows of a query.  span_args leaves open what is merged and what comes out. */
void kv_list_row(kv_store *s, uint32_t i, uint32_t seq, uint32_t row, uint32_t layer);
void kv_list_all_layers(kv_store *s, uint32_t i, uint32_t seq, uint32_t row);
/* Offset of a slot's record in the pool; resident: of the chunk in its block. */
uint64_t           kv_record_of_slot(const kv_store *s, uint32_t seq, uint32_t layer, uint32_t head,
                                     uint32_t slot);
kvd_attn_span_args kv_span_args(const kv_store *s, const kv_query *q, const kvd_attn_span *span);
kvd_attn_span_args kv_kept_args(const kv_store *s, const kv_query *q);
kvd_select_args    kv_select_args(const kv_store *s, const kv_query *q);
kvd_window_args    kv_window_args(const kv_store *s, const kv_query *q);
kvd_window_spans_args kv_spans_args(const kv_store *s, const kv_query *q);
kvd_window_post_args  kv_post_args(const kv_store *s, const kv_query *q);
kvd_window_fetch_args kv_fetch_args(const kv_store *s, const kv_query *q, bool urgent);

/* kv_count.c.  rows: of a layer, once their windows have changed; step: of all layers, after a step
 * that the device drove; late: n selected chunks of a lane whose records are still being read.
 * tap_rows: shows a layer's lanes to the observer. */
void kv_count_rows(kv_store *s, const kv_query *q);
void kv_count_step(kv_store *s);
void kv_count_late(kv_store *s, uint32_t layer, uint32_t head, uint32_t n);
void kv_tap_rows(const kv_store *s, const kv_query *q);

/* kv_count.c: asserts that slot maps and slots agree. */
void kv_check_windows(const kv_store *s);

#endif
