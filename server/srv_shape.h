/* SPDX-License-Identifier: Apache-2.0 */
/* srv_shape.h - private to server/: how a job's events look to a client.  A shape is a file: what
 * it makes of a request's body, of each event of a stream, and of all of them at once. */
#ifndef KVD_SRV_SHAPE_H
#define KVD_SRV_SHAPE_H

#include "srv_fields.h"

struct srv_shape {
    const char *prefix;                             /* of ids */
    const char *prompt;                             /* the field that it comes in */
    bool (*request)(srv_fields *f, srv_request *r); /* false: it is wrong, as the reply says */
    const char *keepalive; /* that a stream says while there is nothing else; NULL: a comment */
                           /* Server-sent events of one event; END and ERROR end the stream. */
    void (*event)(srv *s, srv_job *j, const srv_event *e, kvd_buf *b);
    void (*whole)(srv *s, const srv_job *j, const srv_answer *a, kvd_buf *b);
};

/* All events of a job that has ended, as its shape says it, or as an error. */
void srv_shape_whole(srv *s, srv_job *j, srv_reply *r);

/* Streams whose answer comes piece by piece: each is opened, told and closed before the next. */
typedef struct srv_piece_shape {
    void (*open)(srv_job *j, const srv_event *e, kvd_buf *b); /* by the event that begins it */
    void (*more)(srv_job *j, const srv_event *e, kvd_buf *b); /* it has text */
    void (*close)(srv_job *j, kvd_buf *b);
} srv_piece_shape;
/* TEXT, REASONING, events of calls, FINISH: of the last piece of j->answer, which they are
 * collected in. */
void srv_piece_event(const srv_piece_shape *p, srv_job *j, const srv_event *e, kvd_buf *b);
/* An event of a stream whose events have types, up to what is its own; and its end. */
void srv_typed_begin(const char *type, kvd_buf *b);
void srv_typed_end(kvd_buf *b);

/* Parts that shapes share. */
void      srv_collect(srv_answer *a, const srv_event *e);
uint32_t  srv_n_piece(const srv_answer *a);
srv_piece srv_piece_at(const srv_answer *a, uint32_t i);
/* All text of an answer, or all reasoning, as a JSON string; whether there is any. */
void srv_put_answer_text(const srv_answer *a, bool reasoning, kvd_buf *b);
bool srv_answer_has(const srv_answer *a, bool reasoning);
void srv_put_call_id(const srv_job *j, uint32_t choice, uint32_t call, kvd_buf *b);
/* Tokens of prompts that were not evaluated; the field "cached_by_tier" with where they were. */
uint64_t srv_n_cached(const srv_usage *u);
void     srv_put_tiers(const srv_usage *u, kvd_buf *b);
/* ,"timings":...  and what debug_cache asked for, behind usage */
void srv_put_extras(const srv_job *j, kvd_buf *b);
/* The latter alone, for a shape that has no timings. */
void srv_put_debug(const srv_job *j, kvd_buf *b);
/* A token's text as a JSON string; its bytes as an array. */
void srv_put_token(const srv *s, int32_t id, kvd_buf *b);
void srv_put_token_bytes(const srv *s, int32_t id, kvd_buf *b);
/* The text as a JSON string, or its bytes where it is none. */
void srv_put_piece(const srv *s, int32_t id, kvd_buf *b);
void srv_put_logprob(float x, kvd_buf *b);
/* ,"name":... of a function, by the name that the template was shown (srv_namespace.c); behind its
 * "namespace" where it has one */
void        srv_put_function(const srv_request *r, const char *flat, size_t len, kvd_buf *b);
const char *srv_finish_name(srv_finish f);
/* {"id":...,"object":OBJECT,"created":...,"model":... */
void srv_put_head(const srv *s, const srv_job *j, const char *object, kvd_buf *b);
/* ],"usage":...,"timings":... and what debug_cache asked for, to the end of a whole answer */
void srv_put_tail(const srv_job *j, kvd_buf *b);

/* Streams whose chunks have choices, as both completions do.  begin: srv_put_head() of an event;
 * end: its usage, which is null; progress, last (usage, if asked for, and the mark of the end):
 * whole ones. */
void srv_chunk_begin(const srv *s, const srv_job *j, const char *object, kvd_buf *b);
void srv_chunk_end(const srv_job *j, kvd_buf *b);
void srv_chunk_progress(const srv *s, const srv_job *j, const char *object, const srv_event *e,
                        kvd_buf *b);
void srv_chunk_last(const srv *s, const srv_job *j, const char *object, kvd_buf *b);
void srv_stream_error(const srv_event *e, kvd_buf *b);

/* srv_submit.c: the call's request goes to the engine's queue; or an error in its reply. */
void srv_submit(srv *s, srv_call *c, const srv_shape *shape);
/* The request alone, owned by the caller; NULL: it is wrong, as the reply says. */
srv_job *srv_read_job(srv *s, srv_call *c, bool (*request)(srv_fields *f, srv_request *r));

#endif
