/* SPDX-License-Identifier: Apache-2.0 */
/* kvdrive.h - the public interface of libkvdrive, and its only installed header.
 *
 * Two nouns: a *model* is an opened GGUF file with its tokenizer, chat template and
 * backend; a *session* is a fixed amount of KV cache and scratch over one model, holding
 * up to n_seq independent sequences.  Around them: sampler, detokenizer, plan.
 *
 * Ownership   what kvd_x_open() returns is released by kvd_x_close(); close accepts NULL.
 *             Text the library allocates (char **out) is released by kvd_free().
 * Threads     a model may be shared by threads once opened, except that evaluations over
 *             one model, and the opening of sessions, run one at a time (the caller's duty).  A
 *             session, a sampler and a detokenizer belong to one thread at a time.
 *             kvd_session_cancel() may be called from any thread and from a signal handler.
 * Errors      kvd_status decides, kvd_err explains.  err may be NULL.  On failure an out
 *             pointer is NULL and no state has changed, unless a function says otherwise.
 * ABI         every struct that begins with struct_size = sizeof(the struct) is begun with its
 *             KVD_*_INIT initialiser, whether it goes in or comes out; without a size it is an
 *             error (KVD_E_INVAL).  Fields are only ever appended.
 */
#ifndef KVDRIVE_H
#define KVDRIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
/* Zeros and the size, for the KVD_*_INIT initialisers: C++ has designated ones from C++20 on.  The
 * header may be included where linkage is C's. */
extern "C++" {
template <class T> inline T kvd_sized()
{
    T x = T();

    x.struct_size = sizeof(T);
    return x;
}
}
extern "C" {
#endif

#define KVD_VERSION_MAJOR 0
#define KVD_VERSION_MINOR 1
#define KVD_VERSION_PATCH 0

#ifdef __cplusplus
#define KVD_SIZED(type) kvd_sized<type>()
#else
#define KVD_SIZED(type)             \
    {                               \
        .struct_size = sizeof(type) \
    }
#endif

#if defined(__GNUC__)
#define KVD_API      __attribute__((visibility("default")))
#define KVD_MUST_USE __attribute__((warn_unused_result))
#else
#define KVD_API
#define KVD_MUST_USE
#endif

/* ---- status ---------------------------------------------------------------------- */

typedef enum kvd_status { /* values are ABI: append only */
                          KVD_OK = 0,
                          KVD_E_INVAL =
                              -1, /* an argument or option is wrong; the message names it */
                          KVD_E_NOMEM =
                              -2,        /* memory could not be had; the message names what for */
                          KVD_E_IO = -3, /* the system refused a file operation; err.sys is errno */
                          KVD_E_CORRUPT = -4, /* a file's content contradicts its format */
                          KVD_E_BUSY =
                              -5, /* a limit is reached now; the same call may succeed later */
                          KVD_E_CANCELED = -6, /* kvd_session_cancel() or a callback asked for it */
                          KVD_E_UNSUPPORTED =
                              -7,            /* well-formed, but not something this build can do */
                          KVD_E_DEVICE = -8, /* the device failed; sticky: close and reopen */
                          KVD_E_FULL =
                              -9 /* the context or the KV cache has no room for the tokens */
} kvd_status;

#define KVD_ERR_MSG_BYTES 512
typedef struct kvd_err {
    kvd_status code;
    int        sys;                    /* errno where code is KVD_E_IO, else 0 */
    char       msg[KVD_ERR_MSG_BYTES]; /* one line, no newline */
} kvd_err;

KVD_API const char *kvd_version(void);                /* "0.1.0" */
KVD_API const char *kvd_status_name(kvd_status code); /* "KVD_E_INVAL", or "?" */
KVD_API void        kvd_free(void *p);                /* text handed out by the library */

typedef enum kvd_log_level {
    KVD_LOG_DEBUG,
    KVD_LOG_INFO,
    KVD_LOG_WARN,
    KVD_LOG_ERROR
} kvd_log_level;
typedef void (*kvd_log_fn)(void *ctx, kvd_log_level level, const char *msg);
/* Process-wide; NULL silences (the default).  Set it before other threads use the library. */
KVD_API void kvd_set_log(kvd_log_fn fn, void *ctx);

/* Called between pieces of a long operation; returning false cancels it. */
typedef bool (*kvd_progress_fn)(void *ctx, uint64_t done, uint64_t total);

/* ---- model ----------------------------------------------------------------------- */

typedef struct kvd_model   kvd_model;
typedef struct kvd_session kvd_session;
typedef struct kvd_sampler kvd_sampler;
typedef struct kvd_detok   kvd_detok;

typedef enum kvd_rope_scaling {
    KVD_ROPE_AUTO, /* what the file says */
    KVD_ROPE_NONE,
    KVD_ROPE_LINEAR, /* positions divided by rope_factor */
    KVD_ROPE_YARN    /* arXiv 2309.00071, rope_factor over the original context */
} kvd_rope_scaling;

typedef enum kvd_weights {
    KVD_WEIGHTS_AUTO, /* COPY while the file takes at most half of the available memory */
    KVD_WEIGHTS_MAP,  /* the file's mapping: shared with other processes, read on demand */
    KVD_WEIGHTS_COPY  /* a read-only copy in huge pages: faster to stream through */
} kvd_weights;

typedef struct kvd_model_params {
    size_t      struct_size;
    const char *path; /* GGUF file; of a split set, its first file */
    /* "cpu", "ref", "cuda" or "cuda:N" (GPU number N); NULL: "cpu".  Where there is no GPU, driver
     * or module that fits, open fails with KVD_E_UNSUPPORTED and kvd_err.sys ENODEV */
    const char      *backend;
    const char      *cpu_isa;       /* "portable", "avx2", "avx512", "amx"; NULL: best there is */
    const char      *chat_template; /* Jinja text in place of the file's; NULL: the file's */
    const char      *pre_tokenizer; /* name in place of a missing one; NULL: the file's */
    uint32_t         n_thread;      /* 0: as many as processors may be used */
    bool             precise;       /* float activations and KV: slower, closest to the reference */
    bool             deterministic; /* results do not depend on batch composition; slower */
    kvd_rope_scaling rope_scaling;
    float            rope_factor;   /* > 1 with LINEAR or YARN; else ignored */
    uint32_t         rope_orig_ctx; /* YARN: 0 means the file's context length */
    float            rope_base;     /* 0: the file's */
    kvd_weights      weights;
    /* Bytes that model and sessions may take of the memory of a device that has its own (a GPU),
     * all together; 0: what is free there.  Others: KVD_E_UNSUPPORTED if set */
    uint64_t device_memory;
    /* For measuring speed, in place of a file: the shape of a known model ("llama-3-8b",
     * "qwen3-8b", "qwen3-14b", "phi-4-mini", "tiny") with random weights of a type ("bf16", "q8_0",
     * "q4_k"; NULL: bf16), without tokenizer or template.  RoPE options do not apply */
    const char *shape, *shape_weights;
} kvd_model_params;
#define KVD_MODEL_PARAMS_INIT KVD_SIZED(kvd_model_params)

/* Maps the file read-only, checks everything in it, builds the tokenizer and compiles the
 * chat template.  A template or tokenizer that cannot be served is an error here, not later. */
KVD_API KVD_MUST_USE kvd_status kvd_model_open(kvd_model **out, const kvd_model_params *p,
                                               kvd_err *err);
KVD_API void                    kvd_model_close(kvd_model *m);

typedef struct kvd_model_info {
    size_t      struct_size;
    const char *arch, *name, *file_type; /* borrowed until kvd_model_close() */
    const char *backend, *isa;           /* what will run: "cpu", "avx512+amx" */
    const char *chat_template;           /* NULL: the file has none and none was given */
    uint64_t    n_param, weight_bytes;
    uint32_t    n_layer, n_embd, n_head, n_kv_head, head_dim, n_ff, n_vocab, n_thread;
    uint32_t    n_ctx_train; /* with the chosen RoPE scaling applied */
    uint64_t    kv_bytes_per_token;
    int32_t     bos_token, eos_token; /* the vocabulary's; -1: it has none */
} kvd_model_info;
#define KVD_MODEL_INFO_INIT KVD_SIZED(kvd_model_info)
/* KVD_E_INVAL: out does not say its size. */
KVD_API kvd_status kvd_model_get_info(const kvd_model *m, kvd_model_info *out);

/* What a file holds, as one JSON object (metadata, tensors, geometry), without opening it for
 * use: works for architectures that kvd_model_open() refuses.  *json is the caller's. */
KVD_API KVD_MUST_USE kvd_status kvd_inspect(const char *path, char **json, kvd_err *err);
/* What this machine offers, as one JSON object: CPU features, memory, limits, backends. */
KVD_API KVD_MUST_USE kvd_status kvd_doctor(char **json, kvd_err *err);

/* ---- text ------------------------------------------------------------------------ */

typedef struct kvd_span {
    size_t start, end;
} kvd_span; /* bytes, half open */

/* Encodes text to token ids.  Control tokens are recognised only inside the trusted spans
 * (ascending, disjoint); n_trusted = 0 means nowhere, so user text stays text.  Tokens that the
 * vocabulary calls user-defined (Qwen's <tool_call>) are one token everywhere.
 * Bytes that the vocabulary has no token for are left out, as its tokenizer does.
 * *n_token receives the number needed; if that exceeds cap, nothing beyond cap is written and
 * the result is KVD_E_FULL.  Linear in len. */
KVD_API KVD_MUST_USE kvd_status kvd_tokenize(const kvd_model *m, const char *text, size_t len,
                                             const kvd_span *trusted, size_t n_trusted,
                                             bool add_bos, int32_t *token, size_t cap,
                                             size_t *n_token, kvd_err *err);
/* The bytes a token stands for, not zero-terminated; special tokens give their text.
 * Borrowed from the model.  An id outside the vocabulary gives length 0. */
KVD_API const char *kvd_token_bytes(const kvd_model *m, int32_t token, size_t *len);
KVD_API bool        kvd_token_is_end(const kvd_model *m, int32_t token); /* ends generation */
KVD_API bool        kvd_token_is_special(const kvd_model *m, int32_t token);

/* Streaming detokenizer: holds back bytes of an unfinished UTF-8 sequence. */
KVD_API KVD_MUST_USE kvd_status kvd_detok_open(kvd_detok **out, const kvd_model *m, kvd_err *err);
/* Text made complete by this token, zero-terminated, valid UTF-8 (invalid bytes become U+FFFD);
 * borrowed until the next call.  *len (NULL: not wanted) is its length: a model may say a zero
 * byte.  Special tokens give "" unless show_special. */
KVD_API const char *kvd_detok_feed(kvd_detok *d, int32_t token, bool show_special, size_t *len);
/* What was held back; resets. */
KVD_API const char *kvd_detok_flush(kvd_detok *d, size_t *len);
KVD_API void        kvd_detok_close(kvd_detok *d);

typedef struct kvd_chat_request {
    size_t      struct_size;
    const char *messages_json; /* array of {"role","content",...} */
    const char *tools_json;    /* array of OpenAI function tools, or NULL */
    const char *vars_json;     /* object of further template variables, or NULL */
    bool        add_generation_prompt;
} kvd_chat_request;
#ifdef __cplusplus
static inline kvd_chat_request kvd_chat_request_init(void)
{
    kvd_chat_request r = KVD_SIZED(kvd_chat_request);

    r.add_generation_prompt = true;
    return r;
}
#define KVD_CHAT_REQUEST_INIT kvd_chat_request_init()
#else
#define KVD_CHAT_REQUEST_INIT                                                  \
    {                                                                          \
        .struct_size = sizeof(kvd_chat_request), .add_generation_prompt = true \
    }
#endif

/* Renders the chat template; *text is the caller's, *len (NULL: not wanted) its length: messages
 * may hold zero bytes.  spans (may be NULL) receives a caller-owned array of the bytes that come
 * from the template and not from the messages. */
KVD_API KVD_MUST_USE kvd_status kvd_chat_render(const kvd_model *m, const kvd_chat_request *r,
                                                char **text, size_t *len, kvd_span **spans,
                                                size_t *n_span, kvd_err *err);

/* ---- session --------------------------------------------------------------------- */

typedef enum kvd_kv_type { KVD_KV_AUTO, KVD_KV_F32, KVD_KV_BF16 } kvd_kv_type;

typedef enum kvd_kv_record { /* records below the device, and in the prefix cache */
                             KVD_KV_RECORD_SAME,  /* as on the device */
                             KVD_KV_RECORD_INT8,  /* half of bf16; nearly no loss */
                             KVD_KV_RECORD_INT4,  /* a quarter; some loss */
                             KVD_KV_RECORD_VALUES /* V as on the device; K is what the index keeps
                                                     of it there ("quant-k", "cascade") and never
                                                     moves: half of the bytes */
} kvd_kv_record;
#define KVD_KV_RECORD_NAMES "same|int8|int4|values" /* in that order, as options spell them */

typedef enum kvd_attention {
    KVD_ATTENTION_AUTO,  /* DENSE for prompts below dense_below tokens, else SPARSE */
    KVD_ATTENTION_DENSE, /* every token attends to all before it */
    KVD_ATTENTION_SPARSE /* a generated token attends to what an index selects; prompts are exact */
} kvd_attention;
#define KVD_ATTENTION_NAMES "auto|dense|sparse" /* in that order, as options spell them */

typedef enum kvd_fetch {
    KVD_FETCH_DEFERRED, /* a step waits for the most important of what it misses; the rest is
                           attended from the next step on */
    KVD_FETCH_STRICT    /* a step waits for all of it */
} kvd_fetch;
#define KVD_FETCH_NAMES "deferred|strict" /* in that order, as options spell them */

typedef enum kvd_attend {
    KVD_ATTEND_WINDOW,  /* to everything that is held as recently critical */
    KVD_ATTEND_SELECTED /* to this step's selection alone */
} kvd_attend;
#define KVD_ATTEND_NAMES "window|selected" /* in that order, as options spell them */

typedef enum kvd_evict {                         /* what leaves the window first */
                         KVD_EVICT_BY_EMA,       /* lowest moving average of scores */
                         KVD_EVICT_BY_LOOKAHEAD, /* lowest score of this step (arXiv 2605.18071) */
                         KVD_EVICT_BY_LRU,
                         KVD_EVICT_BY_LFU,
                         KVD_EVICT_BY_RANDOM
} kvd_evict;
#define KVD_EVICT_NAMES "ema|lookahead|lru|lfu|random" /* in that order, as options spell them */

typedef enum kvd_resume {                   /* what follows a prefix that the cache knows */
                          KVD_RESUME_EXACT, /* the rest of the prompt attends to everything */
                          KVD_RESUME_SPARSE /* a rest of at most 256 tokens attends sparsely, one by
                                               one: only the index is read at once, records as they
                                               are selected.  Then nothing is kept resident */
} kvd_resume;
#define KVD_RESUME_NAMES "exact|sparse" /* in that order, as options spell them */

/* How the work of sparse steps is ordered where the device works beside the host (CUDA).  It moves
 * bytes; text depends on it only as on a batch's composition, so not at all with `deterministic`.
 */
typedef enum kvd_schedule {
    KVD_SCHEDULE_SEQUENTIAL, /* in a layer all rows select, what they wait for comes up, all attend
                                (deferred fetches: to what they hold meanwhile) */
    KVD_SCHEDULE_ELASTIC /* in micro-batches: one selects while misses of others come up, and each
                            attends as soon as its own are there */
} kvd_schedule;
#define KVD_SCHEDULE_NAMES "sequential|elastic" /* in that order, as options spell them */

#define KVD_MICRO_BATCHES_MAX 32 /* of a step */

typedef enum kvd_lookup { /* who compares selections with windows */
                          KVD_LOOKUP_DEVICE,
                          KVD_LOOKUP_HOST /* the CPU, as arXiv 2605.18071 does; slower */
} kvd_lookup;
#define KVD_LOOKUP_NAMES "device|host" /* in that order, as options spell them */

typedef enum kvd_tiers {
    KVD_TIERS_AUTO,  /* everything is resident where the device has room for it */
    KVD_TIERS_ALWAYS /* K and V stay below the device, which brings up what it attends to */
} kvd_tiers;
#define KVD_TIERS_NAMES "auto|always" /* in that order, as options spell them */

/* How generated tokens attend.  Zeros are the defaults.  Per layer and KV head a step selects
 * `budget` tokens in chunks; a window of `cap` budgets holds what was selected recently. */
typedef struct kvd_attention_params {
    size_t        struct_size;
    kvd_attention mode;
    uint32_t      dense_below;  /* AUTO; 0: 16,384 */
    uint32_t      budget;       /* tokens; 0: by budget_share */
    float         budget_share; /* of the prompt; 0: a sixteenth, but 1,024 to 4,096 tokens */
    float         cap;          /* window in budgets, at least 1; 0: 2 */
    kvd_fetch     fetch;
    kvd_attend    attend;
    kvd_evict     evict;
    float         ema_alpha; /* weight of the newest score; 0: 0.5 */
    float         min_mass;  /* attended share of the softmax, by the index's estimate, mean of 32
                                steps: below it a sequence goes on with twice the budget, then with
                                exact attention.  0: 0.7; negative: never */
    float top_p;             /* select only until this share of the index's mass; 0: off */
    /* "mean", "mean-std", "box", "cluster", "quant-k", "cascade"; after a dash "bf16", "int8",
     * "int4" or (quant-k) "int2"; mean and cascade with "+radius".  NULL: "mean-int4+radius", or
     * "quant-k" with records of KVD_KV_RECORD_VALUES, which need an index that keeps keys */
    const char *index;
    /* How query heads share a KV head's selection: "mean", "max", "mean-chunks", "logits".
     * NULL: "mean" */
    const char *group_rule;
    /* Windows in budgets per layer and KV head, [layer][KV head], at least 1 each, in place of cap;
     * NULL: cap for all.  Read during the call */
    const float *caps;
    uint32_t     n_caps; /* layers times KV heads */
    /* Tokens of a cell of the estimation zone: what a sparse step does not attend to counts by the
     * mean K and V of each cell.  A multiple of chunk_tokens that divides 256; 0: none.  Cells are
     * made as the session was opened for; later it may be that, or 0 */
    uint32_t     zone;
    kvd_schedule schedule;
    uint32_t     micro_batch; /* ELASTIC: rows of one; 0: what is quickest in the first steps with a
                                 number of rows, as they try sizes of 1, 2, 4 ...  Where rows would
                                 make more than KVD_MICRO_BATCHES_MAX of them, each has more rows */
} kvd_attention_params;
#define KVD_ATTENTION_PARAMS_INIT KVD_SIZED(kvd_attention_params)

typedef struct kvd_session_params {
    size_t      struct_size;
    uint32_t    n_ctx;     /* most tokens of one sequence; 0: the model's context */
    uint32_t    n_seq;     /* sequences; 0: 1 */
    uint64_t    kv_tokens; /* KV capacity shared by all sequences; 0: n_ctx * n_seq */
    uint32_t    n_batch;   /* most tokens of one kvd_eval(); 0: 512, a GPU's prompts 4,096 */
    uint32_t    n_logits;  /* most rows of logits of one kvd_eval(); 0: n_seq */
    kvd_kv_type kv_type;   /* AUTO: bf16, or f32 in a precise model and in backend "ref" */

    /* Tiers.  What does not fit the device's budget lies in the host's. */
    uint64_t kv_device; /* bytes of KV, index and maps on the device; 0: no limit, or what a device
                           with memory of its own has left */
    uint64_t kv_host;   /* bytes of records in host memory; 0: no limit.  Less than all tokens
                           take needs cache_dir, where the rest lies */
    kvd_kv_record               kv_record;
    uint32_t                    chunk_tokens; /* unit of selection and transfer: 4, 8 or 16; 0: 4 */
    uint32_t                    n_sink; /* first tokens, always attended; 0: 16; UINT32_MAX: none */
    uint32_t                    n_local;   /* last tokens, always attended; 0: 64 */
    const kvd_attention_params *attention; /* NULL: all defaults.  Read during the call */

    /* Prefix cache: sealed blocks of 256 tokens are kept in a directory, beyond the process, and
     * kvd_prefill() of an empty sequence takes the longest known prefix from there. */
    const char *cache_dir;      /* NULL: none.  Made if missing; one process at a time */
    uint64_t    cache_bytes;    /* it may hold, the least recently used go; 0: no limit */
    uint64_t    cache_min_free; /* bytes that stay free on its filesystem */
    kvd_resume  resume;

    const char *trace_path; /* NULL: none.  When the session is closed, what it did when is written
                               here: Chrome trace events (JSON), the last 262,144 of them */
    /* Steps after which a record that is read from disk and that its step does not wait for is
     * attended at the latest; 0: 1; at most 64.  With 1 the text does not depend on where records
     * lie; with more it depends on the disk's speed. */
    uint32_t disk_lag;
    /* Records that each layer and KV head, [layer][KV head], of a sequence may have in a host tier
     * that has no room for all: for all sequences together at most kvd_plan.kv_host_records; NULL:
     * all have the same.  Moves bytes, never changes text.  Read during the call */
    const uint32_t *host_records;
    uint32_t        n_host_records; /* layers times KV heads */
    kvd_lookup      lookup;
    /* Most sequences parked by kvd_seq_move(); kvd_plan.n_parked says how many places there are:
     * not more than kv_tokens has blocks of 256, and none where kv_spills or the device has memory
     * of its own. */
    uint32_t  n_parked;
    kvd_tiers tiers;
} kvd_session_params;
#define KVD_SESSION_PARAMS_INIT KVD_SIZED(kvd_session_params)

typedef struct kvd_plan {
    size_t   struct_size;
    uint64_t weight_bytes;  /* mapped from the file, shared, read-only */
    uint64_t kv_bytes;      /* KV cache */
    uint64_t scratch_bytes; /* activations, logits, kernel scratch */
    uint64_t host_bytes;    /* tokenizer, tables, everything else on the heap */
    uint64_t total_bytes;
    uint64_t kv_bytes_per_token;
    uint64_t available_bytes; /* memory the machine offers now */
    uint32_t n_ctx, n_seq, n_batch;
    uint32_t n_ctx_fits; /* the longest single-sequence context that would fit available_bytes */
    /* kv_bytes by tier and use */
    uint64_t kv_device_bytes, kv_host_bytes; /* kv_bytes is their sum */
    uint64_t kv_raw_bytes;    /* device: K and V that are not sealed; all where resident */
    uint64_t kv_window_bytes; /* device: windows and first tokens */
    uint64_t kv_stage_bytes;  /* device: a layer brought up for exact attention */
    uint64_t kv_index_bytes;  /* device: what selection scans, and cells */
    uint64_t kv_map_bytes;    /* device: where chunks lie, averages, lists of a step */
    uint32_t window_tokens;   /* of a layer and KV head; 0: no sparse attention */
    bool     kv_spills; /* the host tier is smaller than what its tokens take: disk has the rest */
    bool     kv_resident;     /* everything fits the device: a lower tier would add nothing */
    uint64_t kv_zone_bytes;   /* of kv_index_bytes: the estimation zone */
    uint64_t kv_host_records; /* that the host tier has room for; 0: there is none */
    uint32_t kv_lane_records; /* that a layer and KV head of a sequence has at n_ctx */
    /* Where the device has memory of its own; else 0: what it will hold in all, of it the driver's
     * context and code, and what it may hold; of host memory, what the device reads there. */
    uint64_t device_bytes, device_context_bytes, device_limit_bytes;
    uint64_t pinned_bytes;
    uint32_t n_parked; /* places for parked sequences; their tables are in host_bytes */
} kvd_plan;
#define KVD_PLAN_INIT KVD_SIZED(kvd_plan)
/* A named policy of the engine: "kvdrive" (the default), "kvdrive-paper", "full", "stream".  apply
 * sets the fields that make it up in both structs, which the caller has initialised, and leaves
 * others; KVD_E_INVAL names those there are.  name: of number i, NULL behind the last.  list: the
 * table for people, released by kvd_free(). */
KVD_API KVD_MUST_USE kvd_status kvd_policy_apply(const char *name, kvd_session_params *p,
                                                 kvd_attention_params *a, kvd_err *err);
KVD_API const char             *kvd_policy_name(uint32_t i);
KVD_API KVD_MUST_USE kvd_status kvd_policy_list(char **text, kvd_err *err);

/* What kvd_session_open() would take, without allocating it. */
KVD_API KVD_MUST_USE kvd_status kvd_session_plan(const kvd_model *m, const kvd_session_params *p,
                                                 kvd_plan *out, kvd_err *err);

/* How such a session's sparse decode steps would go, for people: the stages of a layer for n_row
 * rows (1 to n_seq), the stream of each, what it waits for, and the bytes it moves at most.  *text
 * is released by kvd_free(); NULL on failure. */
KVD_API KVD_MUST_USE kvd_status kvd_session_steps(const kvd_model *m, const kvd_session_params *p,
                                                  uint32_t n_row, char **text, kvd_err *err);

/* Allocates everything the session will ever use.  Borrows the model, which must outlive it. */
KVD_API KVD_MUST_USE kvd_status kvd_session_open(kvd_session **out, kvd_model *m,
                                                 const kvd_session_params *p, kvd_err *err);
KVD_API void                    kvd_session_close(kvd_session *s);

typedef struct kvd_batch {
    size_t          struct_size;
    uint32_t        n_token;
    const int32_t  *token;      /* [n_token] */
    const uint32_t *seq;        /* [n_token], or NULL: all of sequence 0.  Each sequence's
                                   tokens are appended to it in the order given */
    const uint8_t *want_logits; /* [n_token], or NULL: the last token only */
    /* 0: those rows keep all their logits.  Else only so many of the largest, at most 128, for
       kvd_sampler_pick(): kvd_sampler_n_best() says how many.  A GPU then sends no logits. */
    uint32_t n_best;
} kvd_batch;
#define KVD_BATCH_INIT KVD_SIZED(kvd_batch)

/* Runs the tokens through the model and appends them to their sequences.  On failure the
 * sequences hold what they held before. */
KVD_API KVD_MUST_USE kvd_status kvd_eval(kvd_session *s, const kvd_batch *b, kvd_err *err);
/* Logits [n_vocab] of the row-th token that wanted them in the last kvd_eval() or kvd_prefill();
 * NULL if there is no such row, or only its best were kept.  Borrowed until the next evaluation. */
KVD_API const float *kvd_logits(const kvd_session *s, uint32_t row);
/* Appends any number of tokens to a sequence in batches of n_batch; logits row 0 is the last
 * token's.  On failure or cancellation the sequence is cut back to what it was.
 * fn is told how many of the n_token tokens are done, evaluated or from the prefix cache: first 0,
 * never fewer than before, at last all.  The last call cannot cancel. */
KVD_API KVD_MUST_USE kvd_status kvd_prefill(kvd_session *s, uint32_t seq, const int32_t *token,
                                            size_t n_token, kvd_progress_fn fn, void *ctx,
                                            kvd_err *err);
KVD_API uint32_t                kvd_seq_len(const kvd_session *s, uint32_t seq); /* tokens held */

#define KVD_SALT_BYTES_MAX 256
/* A prompt that goes through kvd_eval() in pieces, beside tokens of other sequences. */
typedef struct kvd_prompt {
    size_t         struct_size;
    const int32_t *token; /* [n_token] all that the sequence holds when the prompt is done: what
                             it holds already comes first.  Read during the call */
    uint32_t n_token;
    /* Whose the prompt is: the prefix cache gives it, and what follows, only to prompts of the same
     * salt.  Of an empty sequence; on a sequence that holds tokens it must be theirs.  0 bytes:
     * everybody's */
    const void *salt;
    size_t      salt_bytes; /* at most KVD_SALT_BYTES_MAX */
    uint64_t    slice_ns;   /* about how long the call may read from the prefix cache; 0: as long as
                               it takes */
    bool skip_cache; /* the sequence goes on with what it holds; the prefix cache is not asked */
} kvd_prompt;
#define KVD_PROMPT_INIT KVD_SIZED(kvd_prompt)
/* Begins it: the sequence takes the longest prefix that the prefix cache knows, all but the last
 * token at most, if that is more than it holds; kvd_seq_len() tells how far that came.  A prefix
 * that would take longer to read than to evaluate is left there, and where reading fails the
 * sequence keeps what it held.  KVD_E_BUSY: slice_ns were not enough; more calls with the same
 * prompt go on, and until one has said KVD_OK the sequence takes no tokens.  Others may be
 * evaluated meanwhile; of several whose prompts are begun, one is read at a time.  Until the
 * sequence holds n_token tokens, tokens that kvd_eval() appends to it are the prompt's, and attend
 * to everything; a batch holds none beyond them (KVD_E_INVAL).  The prompt also ends by
 * kvd_prefill() of the rest, and by kvd_seq_truncate(). */
KVD_API KVD_MUST_USE kvd_status kvd_prompt_begin(kvd_session *s, uint32_t seq, const kvd_prompt *p,
                                                 kvd_err *err);
/* Keeps what the prefix cache knows of a prompt (token, n_token, salt) from being given up for what
 * is stored meanwhile, and by kvd_session_clear_cache(); for one that waits until it can begin.
 * *out is NULL where nothing is known, where all holds would take more than half of cache_bytes
 * (an eighth: of salted prompts), and with disk as a tier, whose room sequences need; what is known
 * then still counts as used just now.  To be closed before its session; NULL is allowed.  Both are
 * calls of the session's thread. */
typedef struct kvd_hold         kvd_hold;
KVD_API KVD_MUST_USE kvd_status kvd_hold_open(kvd_hold **out, kvd_session *s, const kvd_prompt *p,
                                              kvd_err *err);
KVD_API void                    kvd_hold_close(kvd_hold *h);
/* How tokens are attended to from now on.  All sequences start over with an empty window, in the
 * mode that their length asks for.  A window larger than the session was opened for is KVD_E_INVAL;
 * so is an index that takes more room. */
KVD_API KVD_MUST_USE kvd_status kvd_session_set_attention(kvd_session                *s,
                                                          const kvd_attention_params *p,
                                                          kvd_err                    *err);
/* Forgets all tokens from n_keep on; more than it holds is KVD_E_INVAL. */
KVD_API KVD_MUST_USE kvd_status kvd_seq_truncate(kvd_session *s, uint32_t seq, uint32_t n_keep,
                                                 kvd_err *err);
/* Parks a sequence, or brings a parked one back.  Numbers from n_seq to n_seq + kvd_plan.n_parked -
 * 1 are parked sequences: they take no tokens, but keep the K and V of theirs, which count in
 * kv_tokens, and what the prefix cache has to know of them.  One of `from` and `to` is such a
 * number, the other is below n_seq; `to` must be empty, `from` is empty afterwards.  A prompt that
 * is under way ends.  No K and V are copied, so a move takes microseconds to some milliseconds.
 * kvd_seq_len(), kvd_seq_common() and kvd_seq_placement() take these numbers, too, and
 * kvd_seq_truncate() to 0 drops a parked sequence.  Where not all is resident, tokens of a parked
 * sequence that are not sealed may be given up when others need their room: kvd_seq_len() tells.
 * kvd_session_set_attention() with another index drops all parked sequences. */
KVD_API KVD_MUST_USE kvd_status kvd_seq_move(kvd_session *s, uint32_t from, uint32_t to,
                                             kvd_err *err);
/* How many tokens a sequence has in common with the beginning of token[0 .. n_token). */
KVD_API uint32_t kvd_seq_common(const kvd_session *s, uint32_t seq, const int32_t *token,
                                uint32_t n_token);
/* Appends n_token tokens with made-up K and V, without evaluating anything: for measuring speed at
 * depth.  What follows is not text. */
KVD_API KVD_MUST_USE kvd_status kvd_seq_synthesize(kvd_session *s, uint32_t seq, uint32_t n_token,
                                                   kvd_err *err);
/* How evaluations run from now on, for measuring alone: what they answer means nothing. */
typedef struct kvd_measure_params {
    size_t struct_size;
    /* Of every token q, K and V are made up in place of what the model computed, by a generator
     * whose queries keep this share of their variance from step to step: KVD_MEASURE_REUSE gives
     * hit rates as of real text; 0: they are the model's.  kvd_seq_synthesize() makes fitting keys
     */
    float reuse;
    /* Time and bytes of stages, for kvd_session_get_stages(): what a step does beside itself is
     * done in its place, steps are not the same speed */
    bool stages;
    bool no_fetch; /* misses are counted and attended, but their records are not moved */
} kvd_measure_params;
#define KVD_MEASURE_PARAMS_INIT KVD_SIZED(kvd_measure_params)
#define KVD_MEASURE_REUSE       0.925f
/* NULL: evaluations are as they were.  What was measured starts from zero. */
KVD_API KVD_MUST_USE kvd_status kvd_session_measure(kvd_session *s, const kvd_measure_params *p,
                                                    kvd_err *err);

typedef enum kvd_stage {
    KVD_STAGE_QKV,    /* embedding, norm, projections, rotation, append */
    KVD_STAGE_SELECT, /* kept tokens, scores, top k, the window's change */
    KVD_STAGE_FETCH,  /* records from lower tiers, those of later use included */
    KVD_STAGE_ATTEND,
    KVD_STAGE_FFN, /* output projection, feed-forward part */
    KVD_STAGE_LOGITS
} kvd_stage;
#define KVD_STAGE_COUNT 6

/* Of decode steps since kvd_session_measure(): every row one new token with logits wanted. */
typedef struct kvd_stages {
    size_t   struct_size;
    uint64_t n_step;
    uint64_t ns[KVD_STAGE_COUNT];
    uint64_t bytes[KVD_STAGE_COUNT]; /* that it must read, once: weights, index, records; FETCH:
                                        from the host */
} kvd_stages;
#define KVD_STAGES_INIT KVD_SIZED(kvd_stages)
/* KVD_E_INVAL: out does not say its size. */
KVD_API kvd_status kvd_session_get_stages(const kvd_session *s, kvd_stages *out);

/* Makes the evaluation under way, or else the next one, return KVD_E_CANCELED at a layer edge; the
 * request is consumed by that return.  Any thread; async-signal-safe. */
KVD_API void kvd_session_cancel(kvd_session *s);
/* Forgets a request that no evaluation has consumed (it came too late for the last one); whether
 * there was one. */
KVD_API bool kvd_session_uncancel(kvd_session *s);

typedef struct kvd_stats {
    size_t   struct_size;
    uint64_t n_prefill, n_decode;   /* tokens that came in batches of > 1 per sequence, and of 1 */
    uint64_t prefill_ns, decode_ns; /* time inside evaluations */
    uint64_t kv_used_tokens, kv_capacity_tokens;
    uint64_t n_cached; /* tokens that came from the prefix cache; not in n_prefill */

    /* Sparse steps; chunks are counted over all layers and KV heads, a prompt's first step apart.
     */
    uint64_t n_sparse;                  /* of n_decode: tokens that attended sparsely */
    uint64_t n_selected, n_hit, n_miss; /* selected = hit + miss */
    uint64_t n_urgent;                  /* misses that a step waited for */
    uint64_t n_fallback; /* times that a budget was doubled, or sparse attention given up */
    uint64_t n_evicted, n_refilled;             /* refilled: fetched by first steps */
    uint64_t n_sealed_blocks, n_grown_blocks;   /* of 256 tokens; grown: of generated tokens */
    uint64_t bytes_up, bytes_down, bytes_dense; /* records: to windows, to the host, to the stage */
    uint64_t select_ns, fetch_ns, attend_ns, seal_ns;
    /* Disk: records that misses read, and of them those a step waited for; reads and their bytes,
     * of which useful ones were asked for; bytes stored: records, and index with tails; units that
     * were not stored (a limit, a full or broken disk). */
    uint64_t n_disk, n_disk_urgent, disk_wait_ns;
    uint64_t n_disk_read, disk_read_bytes, disk_useful_bytes;
    uint64_t disk_put_bytes, disk_aux_bytes, n_disk_refused;
    double   mass; /* mean share of the softmax that was attended, as the index estimates it; what
                      the estimation zone stands for is not attended */
    uint64_t disk_tail_bytes; /* of disk_aux_bytes: tails, what is not sealed yet */
    uint64_t n_disk_stall; /* batches of reads that a step found not yet done when it needed them */
    uint64_t n_disk_late; /* of n_selected, with disk_lag: still on the way, neither hit nor miss */
    double   zone_share;  /* mean share of the softmax, as it was used, that the zone's cells had */
    uint64_t zone_ns;     /* of attend_ns */
    /* A device with memory of its own, now: by how much its free memory has sunk since before the
     * model was opened, and what was asked for of it; of host memory, what the device reads there
     */
    uint64_t device_used_bytes, device_held_bytes, pinned_bytes;
    /* With KVD_SCHEDULE_ELASTIC: rows of a micro-batch, 0: all.  Where sizes were tried, of the
     * largest number of rows that it was done for: what was taken, what was tried, and the median
     * step. */
    uint32_t micro_batch;
    uint32_t n_micro, micro_rows[16];
    double   micro_ms[16];
    /* Bytes in use now: of kvd_plan's kv_device_bytes and kv_host_bytes what tokens hold and what
     * steps work in; what the prefix cache has on disk, and what it may have (0: no limit) */
    uint64_t kv_device_used_bytes, kv_host_used_bytes, kv_disk_used_bytes, kv_disk_limit_bytes;
    /* Time of evaluations, as the thread that evaluates spends it: on the device these stages take
     * other time, and where it runs a recorded step none is counted.  dense_ns: exact attention */
    uint64_t qkv_ns, dense_ns, ffn_ns, logits_ns;
    /* Batches of reads from disk that failed; of them out of time, and with damaged bytes; tokens
     * that were evaluated again for it */
    uint64_t n_disk_failed, n_disk_timeout, n_disk_corrupt, n_disk_again;
    uint64_t n_slow_prefix; /* known prefixes that were evaluated: reading them takes longer */
    /* Time that the session's thread spends on what moves between tiers: copying bytes_up,
     * bytes_dense and bytes_down (0 where the device has memory of its own and copies them
     * itself); reading from disk and storing there, each with the waits for it.  disk_put_wait_ns:
     * of disk_put_ns, evaluations' waits for writes */
    uint64_t up_ns, up_dense_ns, down_ns, disk_read_ns, disk_put_ns, disk_put_wait_ns;
    uint64_t cached_ns; /* that finding and reading n_cached took; not in prefill_ns */
    /* Why the prefix cache stores nothing because of its disk: it is full or fails, or the
     * directory was removed, which is tried again from time to time.  "": it stores */
    char cache_pause[160];
} kvd_stats;
#define KVD_STATS_INIT KVD_SIZED(kvd_stats)
/* KVD_E_INVAL: out does not say its size. */
KVD_API kvd_status kvd_session_get_stats(const kvd_session *s, kvd_stats *out);
/* Waits until all that was stored in cache_dir is on the disk and can be found (at most about 10
 * s); an error: some of it is not.  Counts of what was stored are complete then. */
KVD_API KVD_MUST_USE kvd_status kvd_session_flush(kvd_session *s, kvd_err *err);
/* Empties the session's prefix cache; what sequences hold stays theirs, and what they need of it
 * on disk stays there.  *json is the caller's: {"removed_units", "removed_bytes", "units",
 * "bytes"}, all 0 without a cache. */
KVD_API KVD_MUST_USE kvd_status kvd_session_clear_cache(kvd_session *s, char **json, kvd_err *err);
/* n_selected and n_hit of one layer and KV head; false: there is none. */
KVD_API bool kvd_session_get_lane(const kvd_session *s, uint32_t layer, uint32_t kv_head,
                                  uint64_t *n_selected, uint64_t *n_hit);
/* kvd_stats.mass of one layer and KV head; 0: there is none, or no sparse step has been. */
KVD_API double kvd_session_get_lane_mass(const kvd_session *s, uint32_t layer, uint32_t kv_head);

/* Where the K and V of a sequence's tokens lie: each in the first tier that has all of it, as means
 * over layers and KV heads, which make kvd_seq_len() together.  Sealed tokens that a window has a
 * place for on the device are counted by window_tokens as well. */
typedef struct kvd_placement {
    size_t   struct_size;
    uint32_t device_tokens, host_tokens, disk_tokens, window_tokens;
} kvd_placement;
#define KVD_PLACEMENT_INIT KVD_SIZED(kvd_placement)
/* false: there is no such sequence, or out does not say its size, which the log then tells.  Takes
 * some microseconds; the session's thread. */
KVD_API bool kvd_seq_placement(const kvd_session *s, uint32_t seq, kvd_placement *out);

/* ---- prefix cache ---------------------------------------------------------------- */

typedef enum kvd_cache_verb {
    KVD_CACHE_STATS,  /* {"units", "blocks", "segments", "tails", "quarantined", "files", "bytes",
                         "salted_bytes", "written_today_bytes", "free_bytes"} */
    KVD_CACHE_LS,     /* the units, the least recently used first: an array of {"key", "kind",
                         "first_token", "tokens", "bytes", "created", "quarantined", "salted",
                         "file", "offset"} */
    KVD_CACHE_VERIFY, /* reads all of it: {"ok", "bad"}; what is damaged is quarantined */
    KVD_CACHE_CLEAR,  /* removes everything: {"removed_units", "removed_bytes", "units", "bytes"} */
    KVD_CACHE_GC      /* removes what is quarantined, then the least recently used units until at
                         most max_bytes are left (0: no limit); answers like CLEAR */
} kvd_cache_verb;

/* Looks into or after the directory of a prefix cache (kvd_session_params.cache_dir) that no
 * session has open: KVD_E_BUSY if one has, KVD_E_IO if there is no such directory, KVD_E_INVAL if
 * it is not a cache, KVD_E_CORRUPT if its catalogue is damaged.  *json is the caller's. */
KVD_API KVD_MUST_USE kvd_status kvd_cache_command(const char *dir, kvd_cache_verb verb,
                                                  uint64_t max_bytes, char **json, kvd_err *err);

/* ---- sampler --------------------------------------------------------------------- */

typedef struct kvd_logit_bias {
    int32_t token;
    float   bias; /* added to its logit; -INFINITY: never this token */
} kvd_logit_bias;

typedef struct kvd_sampler_params {
    size_t                struct_size;
    float                 temperature;       /* <= 0: greedy */
    int32_t               top_k;             /* <= 0: off */
    float                 top_p;             /* >= 1: off */
    float                 min_p;             /* <= 0: off */
    float                 repeat_penalty;    /* 1: off; divides positive, multiplies negative */
    float                 presence_penalty;  /* 0: off */
    float                 frequency_penalty; /* 0: off */
    int32_t               penalty_last_n;    /* tokens looked back at; 0: none, -1: 2^20 */
    uint64_t              seed;
    const kvd_logit_bias *bias; /* copied */
    size_t                n_bias;
    float                 typical_p;       /* <= 0 or >= 1: off */
    float                 top_n_sigma;     /* standard deviations below the best; <= 0: off */
    float                 xtc_probability; /* <= 0: off */
    float                 xtc_threshold;   /* > 0.5: off */
    float                 dry_multiplier;  /* 0: off; else the sampler borrows the model */
    float                 dry_base;        /* >= 1 */
    int32_t               dry_allowed_length;
    int32_t               dry_penalty_last_n; /* tokens looked back at; 0: off, -1: 2^20 */
    const char *const    *dry_breaker; /* copied, up to 64 of 1 to 64 bytes; NULL: \n : " * */
    size_t                n_dry_breaker;
} kvd_sampler_params;
#ifdef __cplusplus
static inline kvd_sampler_params kvd_sampler_params_init(void)
{
    kvd_sampler_params p = KVD_SIZED(kvd_sampler_params);

    p.temperature    = 0.8f;
    p.top_k          = 40;
    p.top_p          = 0.95f;
    p.min_p          = 0.05f;
    p.repeat_penalty = 1.0f;
    p.penalty_last_n = 64;
    p.typical_p      = 1.0f;
    p.xtc_threshold  = 0.1f;
    p.dry_base       = 1.75f;

    p.dry_allowed_length = 2;
    p.dry_penalty_last_n = -1;
    return p;
}
#define KVD_SAMPLER_PARAMS_INIT kvd_sampler_params_init()
#else
#define KVD_SAMPLER_PARAMS_INIT                                                               \
    {                                                                                         \
        .struct_size = sizeof(kvd_sampler_params), .temperature = 0.8f, .top_k = 40,          \
        .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1.0f, .penalty_last_n = 64,         \
        .typical_p = 1.0f, .xtc_threshold = 0.1f, .dry_base = 1.75f, .dry_allowed_length = 2, \
        .dry_penalty_last_n = -1                                                              \
    }
#endif

KVD_API KVD_MUST_USE kvd_status kvd_sampler_open(kvd_sampler **out, const kvd_model *m,
                                                 const kvd_sampler_params *p, kvd_err *err);
KVD_API void                    kvd_sampler_close(kvd_sampler *sm);
/* Remembers a token for the penalties, without sampling (the prompt, say). */
KVD_API void kvd_sampler_accept(kvd_sampler *sm, int32_t token);
/* Picks the next token from logits [n_vocab] (not changed) and accepts it.  Greedy takes the
 * lowest id of equals.  -1: with a grammar alone, where kvd_sampler_pick() fails.  Allocates
 * nothing. */
KVD_API int32_t kvd_sampler_sample(kvd_sampler *sm, const float *logits);
/* How many of a row's largest logits decide what this sampler picks; 0: all of them, as with
 * penalties, biases, DRY, top_n_sigma, a grammar, or a top_k that is off or above 128. */
KVD_API uint32_t kvd_sampler_n_best(const kvd_sampler *sm);
/* kvd_sampler_sample() of the row-th token that wanted logits, from whichever the last evaluation
 * kept of them; KVD_E_INVAL where that is no such row or too few.  The token is the same.  With a
 * grammar, KVD_E_FULL or KVD_E_UNSUPPORTED where it cannot go on: the sampler is as it was. */
KVD_API KVD_MUST_USE kvd_status kvd_sampler_pick(kvd_sampler *sm, const kvd_session *s,
                                                 uint32_t row, int32_t *token, kvd_err *err);

/* ---- constrained generation ------------------------------------------------------- */

typedef struct kvd_grammar     kvd_grammar;
typedef struct kvd_tool_stream kvd_tool_stream;

/* How a model writes tool calls; docs/structured.md shows each form. */
typedef enum kvd_tool_format {
    KVD_TOOLS_NONE,     /* in none of these ways, as far as its template tells */
    KVD_TOOLS_HERMES,   /* <tool_call>{"name","arguments"}</tool_call> */
    KVD_TOOLS_LLAMA3,   /* {"name","parameters"}, also behind <|python_tag|> */
    KVD_TOOLS_PHI4,     /* <|tool_call|>{"name","arguments"}<|/tool_call|> */
    KVD_TOOLS_GRANITE,  /* <|tool_call|>[{"name","arguments"}, ..] */
    KVD_TOOLS_MISTRAL,  /* [TOOL_CALLS][{"name","arguments","id"}, ..] */
    KVD_TOOLS_DEEPSEEK, /* a name and a fenced block of JSON between marks of their own */
    KVD_TOOLS_HARMONY,  /* gpt-oss: <|channel|>commentary to=functions.NAME .. */
    KVD_TOOLS_SEED,     /* <seed:tool_call><function=NAME><parameter=P>VALUE</parameter>.. */
    KVD_TOOLS_QWEN_XML  /* the same within <tool_call> */
} kvd_tool_format;
KVD_API kvd_tool_format kvd_model_tool_format(const kvd_model *m); /* told from the chat template */
/* A special token whose text belongs to a form of calls or of reasoning: show it to kvd_tool_feed()
 * (kvd_detok_feed() with show_special). */
KVD_API bool kvd_token_is_tool_mark(const kvd_model *m, int32_t token);

/* How a model writes what it thinks before it answers. */
typedef enum kvd_reasoning {
    KVD_REASONING_NONE,   /* not at all, as far as its template tells */
    KVD_REASONING_THINK,  /* <think>..</think> */
    KVD_REASONING_SEED,   /* <seed:think>..</seed:think> */
    KVD_REASONING_HARMONY /* gpt-oss: messages of the channel "analysis" */
} kvd_reasoning;

/* Where an answer begins. */
typedef enum kvd_reasoning_state {
    KVD_REASONING_MAY,   /* it may reason first */
    KVD_REASONING_OPEN,  /* inside of reasoning: the prompt ends with its opening mark */
    KVD_REASONING_CANNOT /* behind reasoning, or there is none */
} kvd_reasoning_state;
/* The form, told from the chat template; *state (may be NULL) for an answer to this prompt, as
 * kvd_chat_render() wrote it. */
KVD_API kvd_reasoning kvd_chat_reasoning(const kvd_model *m, const char *prompt, size_t len,
                                         kvd_reasoning_state *state);

typedef enum kvd_tool_choice {
    KVD_TOOL_CHOICE_AUTO,    /* text, or calls: constrained from a call's mark on */
    KVD_TOOL_CHOICE_REQUIRED /* a call from the first token on */
} kvd_tool_choice;

/* What the text must be: exactly one of schema_json, json_object, tools_json. */
typedef struct kvd_grammar_params {
    size_t          struct_size;
    const char     *schema_json; /* a JSON schema; docs/structured.md says which keywords */
    bool            json_object; /* any JSON object */
    const char     *tools_json;  /* array of OpenAI function tools */
    kvd_tool_choice tool_choice;
    const char     *tool_name;   /* the one function that may be called, once; NULL: any */
    bool            single_call; /* at most one call */

    uint32_t        max_calls;   /* 0: 16 */
    kvd_tool_format tool_format; /* NONE: the model's own */
    /* Reasoning comes first, unconstrained, where it may or has begun; NONE: no reasoning. */
    kvd_reasoning       reasoning;
    kvd_reasoning_state reasoning_state;
} kvd_grammar_params;
#define KVD_GRAMMAR_PARAMS_INIT KVD_SIZED(kvd_grammar_params)

/* A keyword that cannot be applied, a limit, a schema that no value fits: KVD_E_INVAL or
 * KVD_E_UNSUPPORTED, and the message names it and where.  Nothing is left out silently, except that
 * a function without "strict": true whose schema cannot be applied takes any object, which
 * kvd_grammar_notes() tells.  Borrows the model.  A grammar and the samplers that use it belong to
 * one thread at a time; several samplers may use one. */
KVD_API KVD_MUST_USE kvd_status kvd_grammar_open(kvd_grammar **out, const kvd_model *m,
                                                 const kvd_grammar_params *p, kvd_err *err);
KVD_API void                    kvd_grammar_close(kvd_grammar *g);
KVD_API const char             *kvd_grammar_notes(const kvd_grammar *g); /* "": none; borrowed */

/* From now on the sampler picks only what the grammar allows, from its beginning; NULL: everything
 * again.  Borrows the grammar.  Such a sampler needs all logits: kvd_sampler_n_best() is 0.
 * kvd_sampler_accept() is for the penalties alone and does not move it on. */
KVD_API KVD_MUST_USE kvd_status kvd_sampler_set_grammar(kvd_sampler *sm, kvd_grammar *g,
                                                        kvd_err *err);
/* Moves on as if the token had been picked (a text that is taken up again), penalties included;
 * KVD_E_INVAL if it may not come.  Without a grammar the same as kvd_sampler_accept(). */
KVD_API KVD_MUST_USE kvd_status kvd_sampler_force(kvd_sampler *sm, int32_t token, kvd_err *err);
KVD_API bool kvd_sampler_may_end(const kvd_sampler *sm); /* the text is complete as it is */
/* Where the sampler is in its grammar, to go back to: kvd_sampler_place_bytes() of plain data. */
KVD_API size_t kvd_sampler_place_bytes(void);
KVD_API void   kvd_sampler_save_place(const kvd_sampler *sm, void *place);
KVD_API void   kvd_sampler_load_place(kvd_sampler *sm, const void *place);

typedef enum kvd_tool_event_kind {
    KVD_TOOL_EVENT_TEXT,     /* text: what is no call */
    KVD_TOOL_EVENT_BEGIN,    /* a call; text: the function's name */
    KVD_TOOL_EVENT_DELTA,    /* text: more of the JSON of its arguments */
    KVD_TOOL_EVENT_END,      /* of the call; complete says whether its JSON was */
    KVD_TOOL_EVENT_REASONING /* text: reasoning, without its marks */
} kvd_tool_event_kind;

typedef struct kvd_tool_event {
    size_t              struct_size;
    kvd_tool_event_kind kind;
    uint32_t            call; /* number of the call, from 0 */
    const char         *text; /* borrowed until the next feed or flush; zero-terminated */
    size_t              len;
    bool                complete;
} kvd_tool_event;
#define KVD_TOOL_EVENT_INIT KVD_SIZED(kvd_tool_event)

/* Takes generated text apart, held back only where a call may have begun.  The events, deltas
 * joined, do not depend on how the text is cut.  What begins like a call and is none is text. */
KVD_API KVD_MUST_USE kvd_status kvd_tool_open(kvd_tool_stream **out, kvd_tool_format format,
                                              kvd_err *err);
typedef struct kvd_answer_params {
    size_t          struct_size;
    kvd_tool_format tools;         /* NONE: there are no calls */
    const char     *tools_json;    /* array of OpenAI function tools, or NULL: forms that do not
                                      show the types of arguments take them from here */
    kvd_reasoning       reasoning; /* NONE: none is told apart */
    kvd_reasoning_state reasoning_state;
} kvd_answer_params;
#define KVD_ANSWER_PARAMS_INIT KVD_SIZED(kvd_answer_params)
/* The same, with reasoning told apart, too. */
KVD_API KVD_MUST_USE kvd_status kvd_answer_open(kvd_tool_stream **out, const kvd_answer_params *p,
                                                kvd_err *err);
KVD_API void                    kvd_tool_close(kvd_tool_stream *s);
KVD_API KVD_MUST_USE kvd_status kvd_tool_feed(kvd_tool_stream *s, const char *text, size_t len,
                                              kvd_err *err);
/* At the end of the text. */
KVD_API KVD_MUST_USE kvd_status kvd_tool_flush(kvd_tool_stream *s, kvd_err *err);
/* Instead, where a grammar held the calls and the text was cut: a call that has begun but has no
 * name yet is neither a call nor text, and after calls there is no text.  more: the text would have
 * gone on, so what may be the beginning of a mark is dropped, too. */
KVD_API KVD_MUST_USE kvd_status kvd_tool_cut(kvd_tool_stream *s, bool more, kvd_err *err);
/* The next event of what was fed; false: there is none, or out does not say its size, which the
 * next feed, flush or cut then fails for. */
KVD_API bool kvd_tool_next(kvd_tool_stream *s, kvd_tool_event *out);
KVD_API bool kvd_tool_reasons(const kvd_tool_stream *s); /* what was fed ends in reasoning */

#ifdef __cplusplus
}
#endif
#endif
