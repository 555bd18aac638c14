/* SPDX-License-Identifier: Apache-2.0 */
/* sparse.h - the door to sparse/: a decode step's sparse attention as data.
 *
 * A *step program* lists the stages of one layer's sparse attention: what each does, for which
 * rows, on which stream, and what it waits for.  sparse_program_build() makes it from a description
 * of the policy and the machine; sparse_program_run() walks it.  Who runs a stage is the caller's:
 * kv/ has one function a kind for steps that the host drives and one for steps that the device
 * drives.
 *
 * Order follows from data.  Each kind of stage names the buffers of a step that it reads and
 * writes; a stage waits for the stages on other streams that wrote what it reads.  Two stages on
 * one stream run in the order of the list.  Waits are computed when the program is built, never in
 * a step.
 *
 * Nothing here allocates.  Thread: the caller's. */
#ifndef KVD_SPARSE_H
#define KVD_SPARSE_H

#include "backend/backend.h"
#include "base/base.h"

/* ---- policies (sparse_policy.c) -------------------------------------------------------- */

/* One system.  Zeros of attention are the engine's defaults, as in the public struct. */
typedef struct sparse_policy {
    const char          *name, *title, *source;
    kvd_attention_params attention; /* struct_size is not set */
    uint32_t             chunk_tokens, n_sink, n_local;
    kvd_kv_record        kv_record;
    kvd_lookup           lookup;
    kvd_tiers            tiers;
} sparse_policy;

const sparse_policy *sparse_policy_at(uint32_t i); /* NULL behind the last */
const sparse_policy *sparse_policy_find(const char *name);
void                 sparse_policy_print(kvd_buf *out); /* the table, for people */

/* ---- stages --------------------------------------------------------------------------- */

typedef enum sparse_kind {
    SPARSE_JOIN,          /* records read from disk since the last step enter their slots */
    SPARSE_LIST,          /* the host writes what the layer's ops read */
    SPARSE_SELECT,        /* attend(kept), score, pick, change and lists as one device op */
    SPARSE_ATTEND_KEPT,   /* attention over sinks and recent tail */
    SPARSE_SCORE,         /* the index scores all chunks and picks the selection */
    SPARSE_TAP,           /* an observer sees scores and selection */
    SPARSE_AVERAGES,      /* score averages go to the host, which changes windows by them */
    SPARSE_CHANGE,        /* the window changes: hits, misses, victims */
    SPARSE_SETTLE,        /* slots whose records are still being read are waited for or left out */
    SPARSE_COUNT,         /* counters */
    SPARSE_POST,          /* the device requests records that are on disk alone */
    SPARSE_REUSE,         /* the host waits until the list of late misses may be rewritten */
    SPARSE_FETCH_URGENT,  /* misses that the step waits for enter their slots */
    SPARSE_FETCH_LATE,    /* the other misses */
    SPARSE_LIST_WINDOW,   /* the host lists records of the window */
    SPARSE_LIST_URGENT,   /* the host lists records of urgent misses */
    SPARSE_ATTEND,        /* attention over window and urgent misses as one op */
    SPARSE_ATTEND_WINDOW, /* attention over the window without its victims */
    SPARSE_ATTEND_URGENT, /* attention over urgent misses, merged with what was attended before */
    SPARSE_ESTIMATE,      /* cells stand for tokens that were not attended */
    SPARSE_SERVE,         /* the host answers the device's requests until the stream is done */
    SPARSE_MARK_SELECT,   /* a measurement takes the time here: select has ended */
    SPARSE_MARK_FETCH,    /* likewise fetch */
    SPARSE_N_KIND
} sparse_kind;

typedef enum sparse_stream {
    SPARSE_HOST,   /* a function of the host, which has ended when the next stage is given out */
    SPARSE_MAIN,   /* the stream of the batch */
    SPARSE_URGENT, /* fetches that the step waits for */
    SPARSE_LATE,   /* fetches that it does not wait for */
    SPARSE_N_STREAM
} sparse_stream;

/* Phases that a step's time is counted by. */
typedef enum sparse_phase {
    SPARSE_PHASE_SELECT,
    SPARSE_PHASE_FETCH,
    SPARSE_PHASE_ATTEND,
    SPARSE_PHASE_FETCH_LATE,
    SPARSE_PHASE_NONE, /* not counted */
    SPARSE_N_PHASE
} sparse_phase;

#define SPARSE_ALL_ROWS   UINT8_MAX  /* in place of a micro-batch's number */
#define SPARSE_NO_EVENT   UINT16_MAX /* of a stage: nobody waits for it; of a wait: the stream */
#define SPARSE_STAGES_MAX (7u * KVD_MICRO_BATCHES_MAX + 16u)
#define SPARSE_EVENTS(n)  (2u * (n) + 8u) /* at most, of n micro-batches */
#define SPARSE_EVENTS_MAX SPARSE_EVENTS(KVD_MICRO_BATCHES_MAX)

typedef struct sparse_wait {
    uint16_t stage; /* number of the stage that must have ended */
    uint16_t event; /* recorded behind it; SPARSE_NO_EVENT: the host waits for its whole stream */
} sparse_wait;

typedef struct sparse_stage {
    uint8_t     kind, stream;
    uint8_t     part; /* number of its micro-batch, or SPARSE_ALL_ROWS */
    uint8_t     n_wait;
    uint16_t    event; /* to record behind it, or SPARSE_NO_EVENT */
    sparse_wait wait[SPARSE_N_STREAM - 1];
} sparse_stage;

/* ---- programs ------------------------------------------------------------------------- */

/* What a program is built from: the policy's part in the order of work, and the machine.  No
 * padding: programs are compared and hashed by its bytes. */
typedef struct sparse_step_desc {
    uint32_t n_row;         /* of the step, at least 1 */
    uint32_t micro_rows;    /* rows of a micro-batch; at most KVD_MICRO_BATCHES_MAX of them */
    uint8_t  device_driven; /* ops alone; the host only gives them out */
    uint8_t  unified;       /* one memory: ops have run when their call returns */
    uint8_t  host_window;   /* the CPU changes windows on maps of its own */
    uint8_t  resident;      /* records are attended in place, so nothing is fetched */
    uint8_t  disk;          /* records may be on disk alone */
    uint8_t  strict;        /* all misses are urgent */
    uint8_t  elastic;       /* micro-batches; urgent misses travel beside selection */
    uint8_t  averages;      /* eviction goes by averages, which a host's change needs to see */
    uint8_t  estimate;      /* cells stand for what is not attended */
    uint8_t  tap;           /* an observer looks at selections */
    uint8_t  no_fetch;      /* a measurement: windows change, no record moves */
    uint8_t  marks;         /* a measurement: stages go one after the other, times between them */
    uint8_t  pad[4];        /* 0 */
} sparse_step_desc;

typedef struct sparse_program {
    sparse_step_desc desc;
    uint64_t         hash; /* of all below and of desc */
    uint32_t         n_stage, n_event, n_part;
    sparse_stage     stage[SPARSE_STAGES_MAX];
} sparse_program;

void sparse_program_build(sparse_program *p, const sparse_step_desc *d);
/* Rows [*first, *first + *n) of the step that stage number i is for. */
void         sparse_stage_rows(const sparse_program *p, uint32_t i, uint32_t *first, uint32_t *n);
const char  *sparse_stage_name(sparse_kind kind);
sparse_phase sparse_stage_phase(sparse_kind kind);
/* A table for people, a line a stage.  bytes [SPARSE_N_KIND]: what a stage of all rows moves at
 * most, 0: not told; NULL: no such column. */
void sparse_program_print(const sparse_program *p, const uint64_t *bytes, kvd_buf *out);

/* ---- running one ---------------------------------------------------------------------- */

/* What a program runs on.  All is borrowed. */
typedef struct sparse_machine {
    const kvd_backend_ops *ops;
    kvd_stream            *stream[SPARSE_N_STREAM]; /* [SPARSE_HOST] is not used */
    kvd_event            **event;                   /* [program.n_event]; unified: NULL */
    /* Does a stage for rows [first, first + n).  st: its stream, of a host stage the main one. */
    kvd_status (*run)(void *ctx, sparse_kind kind, kvd_stream *st, uint32_t first, uint32_t n,
                      kvd_err *err);
    /* Time t0 to t1 of the host went to a phase; NULL: nobody counts. */
    void (*spent)(void *ctx, sparse_phase phase, uint64_t t0, uint64_t t1);
    void    *ctx;
    uint32_t used; /* bits by sparse_stream: something was given to it */
} sparse_machine;

/* Gives all stages out, in order.  After a failure streams may still run what was given to them. */
kvd_status sparse_program_run(const sparse_program *p, sparse_machine *m, kvd_err *err);

#endif
