/* SPDX-License-Identifier: Apache-2.0 */
/* engine.h - the door to engine/: opened models, sessions, samplers; where model meets kv.
 *
 * The public header's functions are thin shells around these (api.c): the shells check struct_size
 * and fill in defaults, so here every params struct is complete.
 *
 * Threads: one thread owns a session; evaluations over one model run one at a time.  The cancel
 * flag is the only thing another thread touches. */
#ifndef KVD_ENGINE_H
#define KVD_ENGINE_H

#include <stdatomic.h>

#include "backend/backend.h"
#include "base/base.h"
#include "format/format.h"
#include "kv/kv.h"
#include "model/model.h"
#include "os/os.h"
#include "text/text.h"

/* ---- opened model (engine_model.c) ------------------------------------------------ */

struct kvd_model {
    gguf_file            *file; /* NULL, as tok: the model is only a shape */
    model                *net;
    kvd_backend          *be;
    kvd_stream           *stream;
    tok                  *tok;
    tmpl                 *tmpl;      /* NULL: the model has none */
    char                 *tmpl_text; /* zero-terminated source of tmpl */
    kvd_tool_format       tools;     /* told from it */
    kvd_reasoning         reasoning; /* likewise */
    _Atomic(gram_vocab *) trie;      /* of tok; made when the first grammar is opened */
    char                  name[128], file_type[16];
    bool                  precise;
    uint32_t              n_reserve; /* times that the backend's scratch may have moved */
    char                  device_error[KVD_ERR_MSG_BYTES]; /* "" until the device has failed */
    bool watched; /* sessions opened from now on let engine_profile look in: steps take the host */
    uint64_t device_memory; /* cap of what a device of its own may hold for us; 0: none */
};

kvd_status engine_model_open(kvd_model **out, const kvd_model_params *p, kvd_err *err);
/* The backend's scratch for one more user of it. */
kvd_status engine_model_reserve(kvd_model *m, const kvd_backend_limits *lim, kvd_err *err);
void       engine_model_close(kvd_model *m);
/* A device that has failed (KVD_E_DEVICE) is lost for good.  note: hands st on, and remembers such
 * a failure; alive: refuses, once there was one, with its message. */
kvd_status engine_model_note(kvd_model *m, kvd_status st, const kvd_err *err);
kvd_status engine_model_alive(const kvd_model *m, kvd_err *err);
/* Where the device has memory of its own: what may be taken there from now on, scratch included
 * that is held already. */
uint64_t engine_model_room(const kvd_model *m);
uint64_t engine_model_heap_bytes(const kvd_model *m);
uint64_t engine_model_weight_bytes(const kvd_model *m);
/* Makes the trie of the vocabulary, which all grammars share, if this is the first. */
kvd_status engine_grammar_open(gram **out, kvd_model *m, const kvd_grammar_params *p, kvd_err *err);
kvd_status engine_chat_render(const kvd_model *m, const kvd_chat_request *r, kvd_buf *out,
                              kvd_span **spans, size_t *n_span, kvd_err *err);

/* ---- attention (engine_attention.c) ------------------------------------------------- */

/* kvd_attention_params made complete, and what it means to the store. */
typedef struct engine_attention {
    kvd_attention_params params; /* without its texts */
    kvd_index_desc       index;
    kv_policy            policy;
} engine_attention;

/* Borrows in->caps, unless they are all equal: then there is only cap. */
kvd_status engine_policy_apply(const char *name, kvd_session_params *p, kvd_attention_params *a,
                               kvd_err *err);
kvd_status engine_attention_complete(const kvd_attention_params *in, const kvd_session_params *sp,
                                     const model_hparams *hp, engine_attention *out, kvd_err *err);
bool       engine_attention_sparse(const engine_attention *a, uint32_t n_ctx); /* ever */
uint32_t   engine_attention_budget(const engine_attention *a, uint32_t n);     /* after n tokens */
/* Tokens of the window of a lane, a (layer, KV head); without caps all are the same. */
uint32_t engine_attention_window(const engine_attention *a, uint32_t n_ctx, uint32_t chunk_tokens,
                                 uint32_t lane);
uint32_t engine_attention_largest(const engine_attention *a, uint32_t n_ctx, uint32_t chunk_tokens);
/* Makes it the session's; the session has its own copy of caps. */
void engine_attention_keep(kvd_session *s, const engine_attention *a);
void engine_attention_apply(kvd_session *s); /* hands it to the store */
/* After a prompt: in which mode the sequence goes on. */
void engine_attention_admit(kvd_session *s, uint32_t seq);
/* After a sparse step: falls back where the attended mass stays below min_mass. */
void       engine_attention_watch(kvd_session *s, uint32_t seq);
kvd_status engine_session_set_attention(kvd_session *s, const kvd_attention_params *p,
                                        kvd_err *err);

/* ---- session (engine_session.c, engine_eval.c, engine_pipeline.c) --------------------------- */

/* What a batch works on.  n_all is a segment's tokens where prompts can go layer by layer, else 0.
 */
typedef struct engine_buffers {
    kvd_mem  mem;    /* DEVICE: activations */
    kvd_mem  shared; /* PINNED: what the host writes or reads beside the device */
    bool     unified;
    uint64_t listed_at, listed_bytes, mirror_at; /* in shared; and where in mem its copy lies */

    float *x, *xn, *q, *k, *v, *att, *gate, *up; /* [n_row] rows */
    float *all_x;                                /* [n_all] rows between layers */
    float *cos_sin;                              /* [max(n_row, n_all)][n_rot] */
    float *out;                                  /* [n_logits][n_vocab] */

    float *cos_sin_host;       /* the same; cos_sin itself where memory is unified, as is logits */
    float *logits;             /* [n_logits][n_vocab] */
    kvd_best_item *best;       /* [n_logits][KVD_BEST_MAX] */
    int32_t       *token;      /* [max(n_row, n_all)] */
    kvd_kv_seq    *part;       /* [n_batch] contiguous rows per sequence */
    kvd_kv_seq    *out_part;   /* [n_batch] rows that want logits as parts, for the last layer */
    kvd_kv_seq    *view_part;  /* [2][n_batch] part, out_part over a layer that was brought up */
    kvd_kv_seq    *all_part;   /* [n_all / n_row + 2] batches of a prompt, then its last row */
    uint32_t      *sparse_row; /* [n_seq] rows that attend sparsely */
    uint64_t *row_from, *row_to; /* [2][n_batch] offsets of rows that move: of x, of q or att */
} engine_buffers;

/* What one sequence has beside its KV. */
typedef struct engine_seq {
    int32_t *token; /* [n_ctx] */
    uint32_t n_token;
    uint32_t prompt_end; /* tokens it will hold when the prompt begun is done; 0: none is */
    uint32_t budget;     /* tokens selected a step; 0: dense */
    uint32_t n_fallback; /* times that it was raised or given up since the prompt */
    bool     rope_long;  /* its K was rotated with the long factors (LongRoPE) */
    bool     synth;      /* its first tokens are made up */
} engine_seq;

/* What kvd_session_measure() asked for; zero: nothing. */
typedef struct engine_measuring {
    kvd_measure_params params;
    kvd_mem            at, seen; /* DEVICE, PINNED: when stages ended; none without stages */
    kvd_stages         sum;
    uint64_t           moved, attended; /* of the store's counts, what is in sum already */
} engine_measuring;
/* Sizes of micro-batches as they are tried for one number of rows (engine_schedule.c). */
#define ENGINE_MICRO_MAX   13u
#define ENGINE_MICRO_STEPS 5u /* timed, of each */
typedef struct engine_trials {
    uint32_t rows; /* of a micro-batch in the step under way and the last one; 0: none */
    uint32_t n_size, size, step; /* sizes; which one is tried, n_size: all were; its steps so far */
    uint32_t best;               /* rows, when all were */
    float    ms[ENGINE_MICRO_MAX][ENGINE_MICRO_STEPS];
} engine_trials;

/* Rows of cosines and sines of positions 0 .. n - 1. */
typedef struct engine_rope {
    float   *row; /* [n_ctx][n_rot]; NULL: none are kept */
    uint32_t n;
    bool     longs; /* by the long factors */
} engine_rope;

struct kvd_session {
    kvd_model         *model;
    kvd_session_params params;    /* complete: no zeros left but kv_device and kv_host */
    uint32_t           n_row;     /* of a prompt in one batch; at least params.n_batch */
    uint32_t           n_segment; /* tokens of a prompt that are sealed together: whole batches */
    engine_attention   attention;
    float         *caps;   /* [n_layer][n_kv_head] where attention.params.caps points, if it does */
    bool           sparse; /* whether sequences can be sparse at all */
    uint32_t       zone;   /* tokens of a cell in the store; 0: no cells are made */
    bool           cached; /* there is a prefix cache */
    kv_store      *kv;
    engine_buffers buf;
    engine_rope    rope;
    engine_seq    *seq;    /* [n_seq] */
    int32_t       *tokens; /* [n_seq][n_ctx], where seq[i].token points */

    /* of the batch under way, [n_batch] each */
    uint32_t *part_seq; /* which sequence buf.part[i] belongs to */
    uint32_t *out_row;  /* rows that want logits, in the order of the batch */
    uint32_t *out_seq;  /* which sequence buf.out_part[i] belongs to */
    uint32_t  n_part, n_out;
    bool     *part_exact; /* [n_batch] the part is of a prompt, however small */
    bool      in_order;   /* row number i of the batch is the i-th that wants logits, all of them */
    uint32_t *sparse_seq; /* [n_seq] whose rows attend sparsely: buf.sparse_row */
    uint32_t  n_sparse;
    bool      exact;    /* the batch is a prompt: even a single row attends to everything */
    uint32_t *seq_rows; /* [n_seq] rows of each sequence in the batch */
    uint32_t *seq_new;  /* [n_seq] the same, kept while sequences are made current */

    struct engine_graph {
        kvd_graph *ops;  /* NULL: not recorded */
        uint64_t   hash; /* of what it was recorded for: engine_graph.c */
    } * graph; /* [2][3][n_seq] recorded steps: dense and sparse, by what rows keep of their logits,
                  by rows; NULL: none are recorded */

    engine_trials *trials; /* [n_seq] by number of rows; NULL: sizes are not tried */
    uint64_t       trial_ns, trial_refill;

    uint32_t best;        /* of the batch under way or the last: what its rows keep, 1 or
                             KVD_BEST_MAX of their logits; 0: all */
    uint32_t    n_logits; /* valid rows in buf.logits */
    uint32_t    n_picks;  /* valid rows in buf.best */
    atomic_bool cancel;
    kvd_stats   stats;

    engine_measuring measure;

    kvd_trace  *trace; /* NULL: none; written to trace_path at the end */
    char       *trace_path;
    kvd_stamps *stamps; /* NULL: no trace, or memory is unified: the host's times tell it all */
};

kvd_status engine_session_steps(const kvd_model *m, const kvd_session_params *in, uint32_t n_row,
                                char **text, kvd_err *err);
kvd_status engine_session_plan(const kvd_model *m, const kvd_session_params *p, kvd_plan *out,
                               kvd_err *err);
kvd_status engine_session_open(kvd_session **out, kvd_model *m, const kvd_session_params *p,
                               kvd_err *err);
void       engine_session_close(kvd_session *s);
kvd_status engine_eval(kvd_session *s, const kvd_batch *b, kvd_err *err);
kvd_status engine_prompt_begin(kvd_session *s, uint32_t seq, const kvd_prompt *p, kvd_err *err);
kvd_status engine_hold_open(kvd_hold **out, kvd_session *s, const kvd_prompt *p, kvd_err *err);
void       engine_hold_close(kvd_hold *h); /* NULL is allowed */
kvd_status engine_prefill(kvd_session *s, uint32_t seq, const int32_t *token, size_t n_token,
                          kvd_progress_fn fn, void *ctx, kvd_err *err);
/* engine_fit.c: kv_plan() of a store that fits the device beside all else, if it is one with memory
 * of its own; completes kv->device_bytes. */
kvd_status engine_fit(const kvd_model *m, const kvd_session_params *p,
                      const kvd_backend_limits *lim, kv_params *kv, kv_sizes *out, kvd_err *err);
/* engine_buffers.c.  segment: most tokens of a prompt whose hidden states are kept between layers,
 * a multiple of n_row.  By what device and context are, not by what is free just then: where a
 * prompt is cut decides about bits. */
uint32_t   engine_segment_tokens(const kvd_model *m, uint32_t n_row, uint32_t n_ctx);
void       engine_buffers_bytes(const kvd_model *m, const kvd_session_params *p, uint32_t n_row,
                                bool resident, uint64_t *device, uint64_t *shared);
kvd_status engine_buffers_open(engine_buffers *b, const kvd_model *m, const kvd_session_params *p,
                               uint32_t n_row, bool resident, kvd_err *err);
void       engine_buffers_close(engine_buffers *b, kvd_backend *be);
/* Where ops read part, token or sparse_row, as of the upload; other lists are read where they are.
 */
void *engine_dev(const engine_buffers *b, const void *listed);
/* n rows of cos_sin_host and what the host has listed for the batch or the prompt under way go up.
 */
kvd_status engine_buffers_upload(kvd_session *s, uint32_t n, kvd_err *err);
/* n rows of out become logits', once the stream has come so far. */
kvd_status engine_buffers_download(kvd_session *s, uint32_t n, kvd_err *err);
/* engine_rope.c: rows of positions [first, first + n), by the long factors or not. */
uint64_t   engine_rope_bytes(const kvd_model *m, uint32_t n_ctx);
kvd_status engine_rope_open(kvd_session *s, kvd_err *err);
void       engine_rope_close(kvd_session *s);
void       engine_rope_rows(kvd_session *s, uint32_t first, uint32_t n, bool longs, float *to);
/* engine_graph.c.  fits: whether the batch laid out is a step that can be recorded.  step: runs it
 * so; fn gives its ops to the stream. */
typedef kvd_status (*engine_enqueue_fn)(kvd_session *s, uint32_t n_token, kvd_err *err);
kvd_status engine_graphs_open(kvd_session *s, kvd_err *err);
void       engine_graphs_close(kvd_session *s);
bool       engine_graph_fits(const kvd_session *s, uint32_t n_token);
kvd_status engine_graph_step(kvd_session *s, uint32_t n_token, engine_enqueue_fn fn, kvd_err *err);
/* engine_schedule.c: apply hands the schedule to the store; begin and end go round a batch. */
kvd_status engine_schedule_open(kvd_session *s, kvd_err *err);
void       engine_schedule_close(kvd_session *s);
void       engine_schedule_apply(kvd_session *s);
void       engine_schedule_begin(kvd_session *s, uint32_t n_token);
void       engine_schedule_end(kvd_session *s, uint32_t n_token);
void       engine_schedule_stats(const kvd_session *s, kvd_stats *out);
/* engine_fingerprint.c */
kvd_status engine_fingerprint(const kvd_model *m, const kv_params *p, uint8_t out[32],
                              kvd_err *err);
/* engine_measure.c: the setting; marks around stages, without it no-ops; the step's end. */
kvd_status engine_measure(kvd_session *s, const kvd_measure_params *p, kvd_err *err);
void       engine_measure_close(kvd_session *s);
kvd_status engine_mark_begin(kvd_session *s, kvd_err *err);
kvd_status engine_mark(kvd_session *s, uint32_t layer, kvd_stage stage, kvd_err *err);
kvd_status engine_mark_end(kvd_session *s, kvd_err *err);
void       engine_measure_step(kvd_session *s, uint32_t n_token);
/* Made-up rows in place of a run's q (NULL: not wanted) and of the K and V that it has stored:
 * those of the stream of `seq`, and of the streams behind it for further parts.  batch: if the
 * setting has them. */
kvd_status engine_synth(kvd_session *s, uint32_t layer, const model_run *r,
                        const kvd_kv_layout *layout, const kvd_kv_seq *part, uint32_t n_part,
                        uint32_t seq, float *q, kvd_err *err);
kvd_status engine_synth_batch(kvd_session *s, uint32_t layer, const model_run *r,
                              const kvd_kv_layout *layout, const kvd_kv_seq *part, uint32_t n_part,
                              uint32_t seq, kvd_err *err);
/* engine_synth.c */
kvd_status engine_seq_synthesize(kvd_session *s, uint32_t seq, uint32_t n_token, kvd_err *err);
kvd_status engine_seq_truncate(kvd_session *s, uint32_t seq, uint32_t n_keep, kvd_err *err);
/* engine_parked.c: sequence numbers from n_seq on are parked ones.  store_tails: when a session is
 * closed and all its other sequences have stored theirs. */
uint32_t   engine_seq_len(const kvd_session *s, uint32_t seq); /* 0: there is no such sequence */
uint32_t   engine_seq_common(const kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n);
kvd_status engine_seq_move(kvd_session *s, uint32_t from, uint32_t to, kvd_err *err);
kvd_status engine_parked_truncate(kvd_session *s, uint32_t seq, uint32_t n_keep, kvd_err *err);
bool       engine_seq_where(const kvd_session *s, uint32_t seq, kv_where *out);
void       engine_parked_store_tails(kvd_session *s);

/* engine_trace.c: path NULL opens none. */
kvd_status engine_trace_open(kvd_session *s, const char *path, kvd_err *err);
uint64_t   engine_trace_bytes(const kvd_model *m);
void       engine_trace_close(kvd_session *s);

/* engine_pipeline.c: the batch laid out in s->part and s->buf.token goes through all layers; KV has
 * been reserved.  Fills buf.logits for the n_out wanted rows.  Commits nothing. */
kvd_status engine_pipeline_run(kvd_session *s, uint32_t n_token, kvd_err *err);
/* Its pieces: the session's buffers as a run of n_token rows; where its K and V are stored; exact
 * attention. */
model_run          engine_run_of(kvd_session *s, uint32_t n_token);
kvd_kv_append_args engine_store_of(const kvd_session *s, const model_run *r,
                                   const kvd_kv_layout *layout, const kvd_kv_seq *part,
                                   uint32_t n_part);
kvd_status         engine_attn(kvd_session *s, const model_run *r, uint32_t layer,
                               const kvd_kv_layout *layout, const kvd_kv_seq *part, uint32_t n_part,
                               kvd_err *err);

/* Whom kvd_prefill() tells how far it is. */
typedef struct engine_progress {
    kvd_progress_fn fn; /* or NULL */
    void           *ctx;
    uint32_t        done;    /* tokens before the part that is evaluated, restored ones included */
    uint32_t        n_token; /* of the whole prompt */
    uint32_t       *told;    /* the most that was told: what is evaluated again counts once */
} engine_progress;
/* Calls fn, if there is one; KVD_E_CANCELED where it says so. */
kvd_status engine_tell_progress(const engine_progress *to, uint32_t done, kvd_err *err);

/* engine_prompt.c: n_token tokens, a segment at most, appended to a sequence whose KV is current,
 * one layer after the other, each in batches of n_row; for stores that are not resident.  Fills
 * logits of the last token.  On failure the store holds what it held. */
kvd_status engine_prompt_run(kvd_session *s, uint32_t seq, const int32_t *token, uint32_t n_token,
                             const engine_progress *to, kvd_err *err);

/* ---- profile (engine_profile.c, _trace.c, _host.c) ------------------------------- */

/* What steps select, and what windows would have held of it; counted in chunks per lane, a lane
 * being a (layer, KV head), over all steps but the first of each text. */
#define ENGINE_PROFILE_CAPS 9u
#define ENGINE_PROFILE_POLICIES \
    6u /* those of kvd_evict, then the optimum, which knows what comes */
#define ENGINE_PROFILE_OPTIMUM 5u
#define ENGINE_PROFILE_UNIONS  6u
#define ENGINE_PROFILE_TOPS    6u
#define ENGINE_PROFILE_SIZES   7u
extern const float    engine_profile_cap[ENGINE_PROFILE_CAPS];     /* windows, in budgets */
extern const uint32_t engine_profile_union[ENGINE_PROFILE_UNIONS]; /* selections */
extern const float    engine_profile_top[ENGINE_PROFILE_TOPS];     /* ranks, in budgets */
/* Host tiers, in sixteenths of a lane's records */
extern const uint32_t engine_profile_size[ENGINE_PROFILE_SIZES];

typedef struct engine_lane_profile {
    uint64_t n_select;                                          /* selected */
    uint64_t hit[ENGINE_PROFILE_POLICIES][ENGINE_PROFILE_CAPS]; /* of them in the window */
    uint64_t union_hit[ENGINE_PROFILE_UNIONS];  /* in the union of the last selections */
    uint64_t union_size[ENGINE_PROFILE_UNIONS]; /* of those unions, summed over steps */
    uint64_t top_hit[ENGINE_PROFILE_TOPS];      /* ranked so high by the step before */
    /* Misses of the session's policy that a host tier would have had to read from disk: those that
     * a step waits for, first steps included, and those that travel beside it. */
    uint64_t urgent_read[ENGINE_PROFILE_CAPS][ENGINE_PROFILE_SIZES];
    uint64_t late_read[ENGINE_PROFILE_CAPS][ENGINE_PROFILE_SIZES];
} engine_lane_profile;

typedef struct engine_profile engine_profile;

/* Watches sequence 0 of a session from now on, texts of at most n_step steps.  The session was
 * opened while kvd_model.watched, or its device has no memory of its own. */
kvd_status engine_profile_open(engine_profile **out, kvd_session *s, uint32_t n_step, kvd_err *err);
void       engine_profile_close(engine_profile *p); /* before the session; NULL is a no-op */
/* After a text's steps: adds what the whole of it tells. */
kvd_status                 engine_profile_end(engine_profile *p, kvd_err *err);
const engine_lane_profile *engine_profile_lanes(const engine_profile *p);  /* [layer][KV head] */
uint32_t                   engine_profile_budget(const engine_profile *p); /* chunks, last text */
/* Of a lane of the session's context, in the host tier of a size. */
uint32_t engine_profile_records(const engine_profile *p, uint32_t size);

/* ---- sampler (engine_sampler.c) --------------------------------------------------- */

/* Borrows t where p has DRY; NULL: no token breaks a sequence. */
kvd_status engine_sampler_open(kvd_sampler **out, uint32_t n_vocab, const tok *t,
                               const kvd_sampler_params *p, kvd_err *err);
void       engine_sampler_close(kvd_sampler *sm);
void       engine_sampler_accept(kvd_sampler *sm, int32_t token);
/* With a grammar it may fail: then nothing was accepted.  sample: -1 then. */
kvd_status engine_sampler_take(kvd_sampler *sm, const float *logits, int32_t *token, kvd_err *err);
int32_t    engine_sampler_sample(kvd_sampler *sm, const float *logits);
/* How many of the best logits decide; 0: all do.  choose: the same token from n of them. */
uint32_t engine_sampler_n_best(const kvd_sampler *sm);
int32_t  engine_sampler_choose(kvd_sampler *sm, const kvd_best_item *best, uint32_t n);
/* Only what g allows from now on, NULL: everything.  Borrows g. */
kvd_status engine_sampler_set_grammar(kvd_sampler *sm, gram *g, kvd_err *err);
kvd_status engine_sampler_force(kvd_sampler *sm, int32_t token, kvd_err *err);
bool       engine_sampler_may_end(const kvd_sampler *sm);
gram_at   *engine_sampler_at(kvd_sampler *sm); /* where it is in its grammar */

/* ---- DRY (engine_dry.c) ------------------------------------------------------------- */

typedef struct engine_dry engine_dry;

/* Looks back at n_max tokens at most.  Borrows t; NULL: no token has a text. */
kvd_status engine_dry_open(engine_dry **out, uint32_t n_vocab, const tok *t,
                           const kvd_sampler_params *p, uint32_t n_max, kvd_err *err);
void       engine_dry_close(engine_dry *d); /* NULL is a no-op */
void       engine_dry_accept(engine_dry *d, int32_t token);
void       engine_dry_apply(engine_dry *d, float *logit); /* [n_vocab] */

#endif
