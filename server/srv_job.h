/* SPDX-License-Identifier: Apache-2.0 */
/* srv_job.h - private to server/: a request for text as the engine thread sees it, and the stream
 * of events that comes back.  No shape of an API is known here.
 *
 * A job has inputs (prompts) and n choices of each; a choice is one sequence while it runs.  Events
 * of a choice: START, PROGRESS any number of times (if asked for), REASONING, TEXT and calls of
 * tools any number of times, FINISH.  A call is CALL (its function's name), ARGUMENTS (more of
 * their JSON) any number of times, CALL_END.  The job's last event is END or ERROR.  The reader
 * takes them in order.
 *
 * Threads: who parses fills in the request, then nobody changes it; the engine thread adds events,
 * the net thread takes them, the lock is between.  References are counted. */
#ifndef KVD_SRV_JOB_H
#define KVD_SRV_JOB_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"

#define SRV_STOP_MAX      16u  /* stop strings of a request */
#define SRV_STOP_BYTES    256u /* of one */
#define SRV_TOP_MAX       20u  /* logprobs beside each token */
#define SRV_BIAS_MAX      1024u
#define SRV_BREAKER_MAX   64u /* sequence breakers of DRY, as the library has it */
#define SRV_BREAKER_BYTES 64u
#define SRV_CHOICE_MAX    64u          /* inputs times n */
#define SRV_EVENT_BYTES   (256u << 10) /* that wait for a reader before its choices pause */

typedef enum srv_tier { SRV_TIER_DEVICE, SRV_TIER_HOST, SRV_TIER_DISK, SRV_N_TIER } srv_tier;

/* ---- the request ------------------------------------------------------------------- */

typedef struct srv_input {
    int32_t *token; /* owned */
    uint32_t n;
} srv_input;

typedef struct srv_request {
    srv_input *input; /* [n_input] owned */
    uint32_t   n_input, n;
    uint32_t   n_max;      /* tokens of a choice */
    bool       n_max_told; /* by the client, else by the server */

    kvd_sampler_params
                 sampling; /* bias is owned; seed is the first choice's, the next has one more */
    const char **breaker;  /* owned; of sampling, texts included; NULL: the server's */
    char        *stop[SRV_STOP_MAX]; /* owned */
    size_t       stop_len[SRV_STOP_MAX];
    uint32_t     n_stop;
    bool         ignore_eos;

    kvd_grammar        *grammar; /* owned; NULL: any text */
    kvd_tool_format     tools;   /* in which calls are told apart from text; NONE: there are none */
    char               *tools_json; /* owned; what may be called, in the form of OpenAI's chats */
    kvd_reasoning       reasoning;  /* in which it is told apart from text; NONE: it is not */
    kvd_reasoning_state reasoning_state; /* where the answer begins */

    bool     logprobs; /* of every token, with n_top others */
    uint32_t n_top;
    bool     echo; /* the prompt comes back as text, with logprobs if those are asked for */
    bool     return_tokens; /* the ids of an answer's tokens */
    bool     stream, include_usage, progress, debug_cache;
    uint8_t  salt[KVD_SALT_BYTES_MAX];
    uint32_t n_salt;

    /* of the shape: what its answer says of the request, as members of a JSON object without the
     * brackets; of that what only the last event of a stream says */
    kvd_buf again, again_last;
    kvd_buf spaces; /* of functions with a namespace, each ended by a zero: the one name that the
                       template is shown, the namespace, the name in it */
} srv_request;

/* ---- events ------------------------------------------------------------------------ */

typedef struct srv_top {
    int32_t id;
    float   logprob;
} srv_top;

typedef struct srv_token { /* of TEXT, where logprobs are asked for */
    int32_t  id;
    float    logprob; /* NAN: the first of a prompt, which has none */
    uint32_t n_top;
    srv_top  top[SRV_TOP_MAX];
} srv_token;

typedef enum srv_event_kind {
    SRV_EVENT_START,
    SRV_EVENT_PROGRESS,
    SRV_EVENT_TEXT,
    SRV_EVENT_REASONING,
    SRV_EVENT_CALL,
    SRV_EVENT_ARGUMENTS,
    SRV_EVENT_CALL_END,
    SRV_EVENT_FINISH,
    SRV_EVENT_END,
    SRV_EVENT_ERROR
} srv_event_kind;

typedef enum srv_finish { SRV_FINISH_STOP, SRV_FINISH_LENGTH, SRV_FINISH_CALLS } srv_finish;

typedef struct srv_event {
    struct srv_event *next;
    srv_event_kind    kind;
    uint32_t          choice;
    uint32_t          call;     /* number of the call of its choice */
    bool              complete; /* CALL_END: the arguments are whole */
    srv_finish        finish;
    int32_t           stop;            /* FINISH: number of the stop string; -1: none */
    uint32_t          n_done, n_total; /* PROGRESS: tokens of the prompt */
    uint32_t          n_cached;        /* START, PROGRESS: tokens of the prompt that were cached */
    uint64_t          ns;              /* since the prompt was begun */
    int               status;          /* ERROR: of HTTP, and the text */
    uint32_t          n_token;         /* TEXT: logprobs */
    srv_token        *token;
    size_t            len;
    char             *text; /* zero-terminated */
} srv_event;

/* A choice's events, collected. */
typedef struct srv_piece { /* of an answer: text, reasoning, a call; places in `said` */
    bool     is_call, is_reasoning, complete;
    uint32_t call;
    size_t   name, n_name; /* CALL: of the function */
    size_t   at, len;      /* text, reasoning, or arguments */
} srv_piece;

typedef struct srv_answer {
    kvd_buf    said, pieces; /* pieces: srv_piece, one behind the other */
    kvd_buf    tokens;       /* srv_token, likewise */
    srv_finish finish;
    int32_t    stop;
} srv_answer;

void srv_answer_free(srv_answer *a);
bool srv_answer_oom(const srv_answer *a);

/* What a finished job has taken, of all its choices. */
typedef struct srv_usage {
    uint64_t n_prompt, n_generated;
    uint64_t n_reasoning;          /* of n_generated */
    uint64_t n_cached[SRV_N_TIER]; /* of n_prompt: where their K and V came from */
    uint64_t n_evaluated;          /* prompt tokens that were evaluated */
    uint64_t queue_ns, prompt_ns, generate_ns;
    /* debug_cache: where the first input left what was known */
    uint32_t miss_at;
    char     miss_text[256];
} srv_usage;

typedef struct srv_shape srv_shape;

typedef struct srv_job {
    atomic_uint refs;
    atomic_bool canceled; /* by the net thread: the reader has gone */
    srv_request req;

    /* of the shape */
    const srv_shape *shape;
    const char      *route; /* its path, for the log */
    char             id[48];
    int64_t          created;
    bool             has_role[SRV_CHOICE_MAX]; /* net thread: the stream has begun the choice */
    uint64_t         offset[SRV_CHOICE_MAX];   /* bytes of text that a stream has told so far */
    srv_answer       answer;                   /* of a stream, where its shape looks back */
    bool             piece_open;               /* the last piece of it is */
    uint32_t         n_said;                   /* events of a stream, where its shape counts them */
    pthread_mutex_t  lock;
    srv_event       *first, *last;
    size_t           bytes;    /* of events in the list */
    bool             ended;    /* END or ERROR was added, or would have been */
    bool             finished; /* END was added: usage changes no more */
    bool             lost;     /* there was no memory for an event: nothing more comes */
    bool             paused;   /* the engine thread has found the list full */
    bool             told;     /* in the net thread's list */
    struct srv_job  *next_told;
    struct srv_job  *next_in;                     /* in the engine's inbox */
    struct srv_job  *next_waiting, *prev_waiting; /* under the engine's lock */

    /* engine thread */
    uint32_t  n_left;                    /* choices that have not finished */
    uint32_t  n_running[SRV_CHOICE_MAX]; /* by input: choices that have a slot */
    uint64_t  counted[SRV_CHOICE_MAX];   /* by input: the last count of open slots it was in */
    uint64_t  answer_ns[SRV_CHOICE_MAX]; /* by input: when its first answer began; 0: not yet */
    uint64_t  submit_ns;
    bool      over;
    srv_usage usage; /* the net thread reads it behind END, which the lock lets it see */

    void *conn; /* net thread: whose it is; NULL: nobody waits any more */
} srv_job;

srv_job *srv_job_new(void); /* one reference; NULL: no memory */
void     srv_job_ref(srv_job *j);
void     srv_job_unref(srv_job *j);

/* Adds an event with `len` bytes of text and room for n_token logprobs; NULL: no memory. */
srv_event *srv_event_new(srv_event_kind kind, uint32_t choice, const char *text, size_t len,
                         uint32_t n_token);
void       srv_event_free(srv_event *e);
void       srv_job_add(srv_job *j, srv_event *e);
void       srv_job_lose(srv_job *j);
/* The next event, or NULL; the caller frees it. */
srv_event *srv_job_take(srv_job *j);
bool       srv_job_ended(srv_job *j);    /* all its events are there */
bool       srv_job_finished(srv_job *j); /* the last is, or was, END */
bool       srv_job_lost(srv_job *j); /* all there are have been taken, and the end is not there */
/* Engine thread: its reader is behind.  Net thread: it was, as the engine thread has found, and is
 * no more; says so once. */
bool srv_job_full(srv_job *j);
bool srv_job_resumes(srv_job *j);

#endif
