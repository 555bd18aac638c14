/* SPDX-License-Identifier: Apache-2.0 */
/* srv_engine.h - private to server/: the thread that owns the session.
 *
 * A *generation* is one choice of a job.  It waits in a queue, then gets a *slot*: one of the
 * session's sequences.  What a sequence holds when its generation is over stays for the next one
 * that begins with the same tokens: in the slot, or parked when the slot is needed.
 *
 *      WAIT --slot, memory--> PROMPT --all evaluated--> ANSWER --stop, length--> gone
 *        ^---- preempted: another needs its memory -------'
 *
 * Each step evaluates one token of every answer and a piece of the prompts, which is as large as
 * the pace of the answers allows (srv_pace.c).
 *
 * Invariants
 *  (1) slot[i].n is the length of sequence i, which has the tokens (kvd_seq_common()); parked
 *      sequences may be shorter, until they are looked at;
 *  (2) a generation in PROMPT or ANSWER has exactly one slot, and the slot's tokens are a prefix of
 *      the generation's; a parked sequence has no generation;
 *  (3) blocks of 256 tokens that all sequences hold are at most the session's capacity: room is
 * made before a step, by dropping idle sequences, then by preempting the youngest; (4) an idle
 * sequence is dropped only for memory, for a place where all are taken, by srv_engine_clear(), or
 * where a session that parks nothing needs its slot; it is cut only by the generation that goes on
 * with it.
 *
 * Threads: all but srv_engine_open() and what is marked "any thread" is the engine thread's. */
#ifndef KVD_SRV_ENGINE_H
#define KVD_SRV_ENGINE_H

#include "srv_job.h"

#define SRV_BLOCK_TOKENS 256u

typedef struct srv_engine srv_engine;

/* ---- times (srv_hist.c) ------------------------------------------------------------- */

#define SRV_HIST_BOUNDS 18u

typedef struct srv_hist {
    uint64_t n[SRV_HIST_BOUNDS + 1]; /* by the lowest bound that is not exceeded; last: none */
    uint64_t sum_ns;
} srv_hist;
extern const uint64_t srv_hist_bound_us[SRV_HIST_BOUNDS];
void                  srv_hist_add(srv_hist *h, uint64_t ns);

/* ---- a generation (srv_gen.c) ------------------------------------------------------- */

typedef enum srv_gen_state { SRV_GEN_WAIT, SRV_GEN_PROMPT, SRV_GEN_ANSWER } srv_gen_state;

typedef struct srv_held { /* a token whose text is held back */
    srv_token token;
    size_t    end; /* of its text in `text` */
} srv_held;

typedef struct srv_gen {
    struct srv_gen *next; /* in the queue */
    srv_job        *job;
    srv_gen_state   state;
    uint32_t        choice, input, turn;
    uint64_t        order;    /* of admission: the younger is preempted first */
    uint32_t        n_passed; /* WAIT: others that went before it */

    int32_t *token; /* [n_prompt + n_max] of the prompt, then generated; NULL until it first runs */
    uint32_t n_prompt, n_token, n_max;
    uint32_t n_target; /* PROMPT: tokens to evaluate before the answer goes on */

    kvd_sampler     *sampler;
    kvd_detok       *detok;
    kvd_tool_stream *tools;     /* NULL: text is text */
    bool             has_calls; /* have been told */
    kvd_buf          text;      /* not told yet: what may be the beginning of a stop string */
    srv_held        *held;      /* [n_held], where logprobs are asked for */
    uint32_t         n_held, cap_held;
    srv_token       *echo; /* [n_prompt] logprobs of the prompt */

    uint64_t  start_ns, told_ns, first_ns, last_ns; /* first, last: tokens of the answer */
    kvd_hold *hold;                                 /* WAIT: on what the prefix cache knows of it */
    bool      asked;                                /* WAIT: for that */
    uint64_t  beside_ns; /* WAIT: not beside others before; 0: not known */
    uint32_t  n_kept;    /* of the prompt, when it began */
    bool      loading;   /* PROMPT: what is known of it is being read */
    bool      counted;   /* what was cached of it */
} srv_gen;

srv_gen *srv_gen_new(srv_job *j, uint32_t choice);
void     srv_gen_free(srv_gen *g);
/* Memory for running; the sampler and the detokenizer. */
kvd_status srv_gen_open(srv_gen *g, const kvd_model *m, uint32_t n_ctx, kvd_err *err);
/* Logits that a step must keep for it: as kvd_batch.n_best. */
uint32_t srv_gen_n_best(const srv_gen *g);
/* The next token from a row of the last step.  *finish is set and true returned at the end. */
kvd_status srv_gen_next(srv_gen *g, srv_engine *e, uint32_t row, bool *over, srv_finish *finish,
                        int32_t *stop, kvd_err *err);
/* What is held back goes out; of text nothing where a stop string has ended it.  cut: there would
 * have been more. */
void srv_gen_end(srv_gen *g, srv_engine *e, bool stopped, bool cut);
/* Logits of prompt token `at`, for the next one. */
void srv_gen_echo(srv_gen *g, const srv_engine *e, uint32_t at, uint32_t row);
/* The prompt as text, before the answer. */
void srv_gen_tell_echo(srv_gen *g, srv_engine *e);

/* ---- the pace (srv_pace.c) ------------------------------------------------------------ */

#define SRV_PACE_ROWS  64u
#define SRV_PACE_SIZES 15u /* of pieces: 1 to 16,384 tokens */
typedef struct srv_pace {
    double   gap_ns;                      /* what a step beside a prompt may take; 0: by quiet */
    double   quiet_ns[SRV_PACE_ROWS + 1]; /* of a step without prompts, by its rows; 0: not known */
    double   extra_ns[SRV_PACE_SIZES];    /* that a piece of 2^i tokens adds; 0: not known */
    double   token_ns;                    /* of a prompt's token in a step of prompts alone */
    uint32_t n_mixed;                     /* steps beside prompts */
} srv_pace;
/* Tokens of prompts that the next step takes beside n_row answers; only to be asked where there are
 * prompts. */
uint32_t srv_pace_budget(srv_pace *p, uint32_t n_row, uint32_t most);
void     srv_pace_learn(srv_pace *p, uint32_t n_row, uint32_t n_prompt, double ns);
/* What a token of a prompt takes, about; 0: not known. */
double srv_pace_token_ns(const srv_pace *p);
/* For how long reading from the disk may hold up a step of n_row answers. */
uint64_t srv_pace_slice(const srv_pace *p, uint32_t n_row);
/* Tokens of the only prompt there is that go through the layers together, at least `least`; others
 * that come meanwhile wait for them. */
uint32_t srv_pace_part(const srv_pace *p, uint32_t least);

/* ---- the map (srv_map.c) -------------------------------------------------------------- */

#define SRV_MAP_STEPS 64u        /* the last so many */
#define SRV_MAP_NS    100000000u /* between two looks at sequences, layers and heads */

typedef enum srv_map_part { /* what a step's time goes to */
                            SRV_PART_QKV,
                            SRV_PART_SELECT,
                            SRV_PART_FETCH,
                            SRV_PART_ATTEND,
                            SRV_PART_FFN,
                            SRV_PART_LOGITS,
                            SRV_PART_SEAL,
                            SRV_PART_REST, /* sampling, telling; what a device does by itself */
                            SRV_N_PART
} srv_map_part;
extern const char *const srv_part_name[SRV_N_PART];

typedef struct srv_map_step {
    uint64_t number;             /* of all steps, from 1 */
    uint32_t n_answer, n_prompt; /* tokens */
    uint64_t ns[SRV_N_PART];
} srv_map_step;

typedef struct srv_map_lane {
    uint64_t n_selected, n_hit;
    double   mass; /* 0: not known */
} srv_map_lane;

/* Where the KV cache lies, how well windows do, what steps take: copied between steps. */
typedef struct srv_map {
    uint32_t       n_layer, n_kv_head, n_seq;
    srv_map_lane  *lane;                /* [n_layer][n_kv_head] */
    kvd_placement *place;               /* [n_seq] parked ones included */
    srv_map_step   step[SRV_MAP_STEPS]; /* step number n at n % SRV_MAP_STEPS */
    uint64_t       n_step, taken_ns;
} srv_map;

srv_map *srv_map_new(uint32_t n_layer, uint32_t n_kv_head, uint32_t n_seq); /* NULL: no memory */
void     srv_map_free(srv_map *m);
void     srv_map_copy(srv_map *to, const srv_map *from); /* of the same shape */
/* Adds a step, unless it has no tokens: all its time is rest so far, and is shared out by the
 * session's counts before and after it.  It has no tokens then. */
void srv_map_add(srv_map *m, srv_map_step *ended, const kvd_stats *before, const kvd_stats *after);
/* Looks at sequences, layers and heads, unless it just did; always: even then. */
void srv_map_take(srv_map *m, const kvd_session *s, bool always);

/* ---- engine (srv_engine.c) --------------------------------------------------------- */

typedef struct srv_slot {
    srv_gen *gen; /* NULL: idle; always, of a parked one */
    uint32_t n;   /* tokens */
    uint64_t used_ns;
    srv_gen *wanted; /* the first that waits for which what it holds is the best there is; while one
                        is admitted */
    uint8_t  salt[KVD_SALT_BYTES_MAX];
    uint32_t n_salt;
} srv_slot;

/* What others may see of a slot. */
typedef struct srv_slot_view {
    srv_gen_state state; /* WAIT: idle */
    char          id[48];
    uint32_t      n_token, n_prompt, n_generated, n_target;
} srv_slot_view;

typedef enum srv_reject { SRV_REJECT_QUEUE, SRV_REJECT_STOPPING, SRV_N_REJECT } srv_reject;

typedef struct srv_counts { /* since the start */
    uint64_t n_started, n_finished, n_canceled, n_failed, n_preempted;
    uint64_t n_rejected[SRV_N_REJECT]; /* under the lock; srv_engine_look() has them at once */
    uint64_t n_recomputed;             /* tokens that preempted generations evaluate again */
    uint64_t n_prompt, n_generated, n_cached[SRV_N_TIER];
    uint64_t n_step, n_mixed; /* mixed: with a piece of a prompt beside answers */
    uint64_t prefix_ns;       /* the thread has spent on finding and reading known prefixes */
    srv_hist queue, first, prefill, gap, whole;
} srv_counts;

typedef struct srv_view { /* a copy, made between steps */
    srv_counts     counts;
    kvd_stats      stats;
    uint32_t       n_waiting, n_running, n_parked; /* parked: that hold something */
    srv_slot_view *slot;                           /* [n_seq + n_parked] */
} srv_view;

typedef struct srv_engine_params {
    kvd_model   *model;
    kvd_session *session;
    uint32_t     n_seq, n_ctx, n_batch, n_logits, n_vocab;
    uint32_t     n_parked; /* places for parked sequences; may be 0 */
    uint64_t     n_block;  /* capacity */
    bool         resident;
    bool         parts;  /* prompts go faster in large parts than in batches: srv_pace_part() */
    bool         cached; /* there is a prefix cache */
    uint32_t     n_queue;
    double       gap_ms;
    void (*told)(void *ctx, srv_job *j); /* it has new events; engine thread */
    void *ctx;
} srv_engine_params;

typedef enum srv_stop { SRV_RUN, SRV_STOP_SOON, SRV_STOP_NOW } srv_stop;

struct srv_engine {
    srv_engine_params p;
    srv_slot         *slot;  /* [n_seq + n_parked]: slots, then parked sequences */
    srv_gen          *queue; /* FIFO, but for what was preempted: that comes first */
    uint64_t          n_order;
    uint64_t          n_count; /* of open slots */
    srv_pace          pace;
    srv_counts        counts;
    /* of the step under way, [n_batch] each */
    int32_t  *row_token;
    uint32_t *row_seq;
    uint8_t  *row_want;
    uint32_t  n_row, n_want, n_answer, n_piece; /* answers' rows, prompts' rows */
    uint32_t *slot_rows;                        /* [n_seq] of a slot in the step */
    bool      loads;                            /* the step waits for the disk as well */
    bool      stale;                            /* stored blocks may not be on the disk yet */
    bool      broken;                           /* the device has failed */
    kvd_err   why;

    srv_map_step ended; /* the last step, until it is in the map */

    pthread_t       thread;
    bool            has_thread;
    pthread_mutex_t lock;
    pthread_cond_t  wake, cleared;
    srv_job        *inbox, *inbox_last; /* under the lock from here on */
    srv_job *waiting, *waiting_last;    /* jobs that have not run, those of the inbox included */
    uint32_t n_waiting;                 /* of them */
    uint32_t n_open; /* slots that are free for those; not: jobs that run want them first */
    srv_stop stop;
    bool     nudged; /* something has changed outside */
    bool     clear_asked;
    uint64_t n_clear;      /* done */
    char    *cleared_json; /* of the last; NULL: failed */
    srv_view view;
    srv_map *map;

    _Atomic uint64_t step_ns;  /* by kvd_ran_ns(): when the step under way began; 0: none is */
    atomic_bool      failed;   /* the device has; jobs have been told */
    atomic_bool      finished; /* the thread has nothing more to do */
};

kvd_status srv_engine_open(srv_engine **out, const srv_engine_params *p, kvd_err *err);
/* The thread must have finished, or never have been started. */
void srv_engine_close(srv_engine *e);

/* Any thread.  KVD_E_BUSY: the queue is full; KVD_E_CANCELED: the server stops. */
kvd_status srv_engine_submit(srv_engine *e, srv_job *j, kvd_err *err);
void       srv_engine_nudge(srv_engine *e); /* a job was canceled, or its reader has caught up */
void       srv_engine_stop(srv_engine *e, srv_stop how);
/* Empties the prefix cache and all idle slots; *json is the caller's. */
kvd_status srv_engine_clear(srv_engine *e, char **json, kvd_err *err);
/* slot: room for n_seq + n_parked. */
void srv_engine_look(srv_engine *e, srv_view *out, srv_slot_view *slot);
/* kvd_stats.cache_pause as it was after the last step or rest. */
void srv_engine_cache_pause(srv_engine *e, char *out, size_t bytes);
void srv_engine_look_map(srv_engine *e, srv_map *out);

/* ---- srv_sched.c --------------------------------------------------------------------- */

void srv_sched_admit(srv_engine *e);
/* Whether there is room for what the step needs; makes it, or preempts. */
void srv_sched_make_room(srv_engine *e);
void srv_sched_release(srv_engine *e, srv_slot *s);
/* A slot's prompt goes on piece by piece.  KVD_E_BUSY: it does not yet, what is known of it is
 * still being read.  skip: the prefix cache is not asked. */
kvd_status srv_sched_begin(srv_engine *e, srv_slot *s, bool skip, kvd_err *err);
/* Prompts that are being read go on a little; false: there are none. */
bool srv_sched_load(srv_engine *e);
void srv_sched_enqueue(srv_engine *e, srv_gen *g, bool first);
void srv_sched_drop_canceled(srv_engine *e);
void srv_sched_drop_idle(srv_engine *e);
void srv_sched_drop_holds(srv_engine *e); /* of those that wait, on the prefix cache */
/* A job waits no more: it has run, or never will. */
void srv_sched_stop_waiting(srv_engine *e, srv_job *j);
/* Under the lock: a job begins to wait, unless too many did then that no free slot is for. */
bool srv_sched_may_wait(srv_engine *e, srv_job *j);
/* Slots were given up or taken: those that wait are counted anew. */
void srv_sched_count_open(srv_engine *e);

/* ---- srv_step.c ------------------------------------------------------------------------ */

bool srv_step_run(srv_engine *e); /* false: there was nothing to evaluate */
/* Ends of generations: their slot is released, and they are freed. */
void srv_step_finish(srv_engine *e, srv_slot *s, srv_finish why, int32_t stop);
/* The job gets an error; its generations go. */
void srv_step_fail(srv_engine *e, srv_job *j, int status, const char *msg);
void srv_step_fail_err(srv_engine *e, srv_job *j, const kvd_err *err); /* the library's */
void srv_step_fail_all(srv_engine *e, int status, const char *msg);
/* Adds an event and tells the net thread; e NULL: there was no memory for it. */
void srv_tell(srv_engine *e, srv_job *j, srv_event *ev);

#endif
