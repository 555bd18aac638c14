/* SPDX-License-Identifier: Apache-2.0 */
/* server.h - the door to server/: one process, one model, many clients over HTTP.
 *
 * The caller opens model and session and lends them; while server_run() runs, they are the
 * server's.  What clients may do and what limits them is in docs/server.md. */
#ifndef KVD_SERVER_H
#define KVD_SERVER_H

#include "base/base.h"

typedef struct server_params {
    const char *host;   /* address to listen on */
    uint16_t    port;   /* 0: any free one; the log says which */
    const char *key;    /* that requests must carry; NULL: none */
    bool        open;   /* beyond loopback without a key, as was asked for */
    const char *origin; /* of web pages that may call: one, or "*"; NULL: none */
    const char *path;   /* of the model's file, as it was given */
    const char *name;   /* of the model in answers; NULL: the file's */

    kvd_sampler_params sampling;  /* of requests that do not say */
    int64_t            n_predict; /* the same for the most tokens of an answer; -1: no limit */

    uint32_t n_queue;      /* requests that may wait */
    uint32_t n_connection; /* at a time */
    uint64_t body_bytes;   /* most of a request */
    double   keepalive_s;  /* a stream is never silent for longer */
    double   gap_ms;  /* steps beside a prompt take no longer; 0: three times as long as without */
    double   read_s;  /* that a request may take to arrive, and a reader to read something */
    double   idle_s;  /* that a connection may be without a request */
    double   stall_s; /* a step that takes longer has failed */
    double   grace_s; /* that requests have when the server is told to stop */
    bool     cached;  /* the session has a prefix cache */
    bool     reasoning; /* is told apart from the answer's text, where the template has a form */
    int      thinking;  /* of requests that do not say: 1: yes, -1: no, 0: as the template has it */
    bool     parse_special; /* requests may ask for special tokens in raw text */
    bool     log_json;
    /* A message of the library in the log's words, in out[SERVER_WORDS_BYTES]; NULL: as it is */
    const char *(*words)(const char *msg, char *out);
} server_params;
#define SERVER_WORDS_BYTES (2 * KVD_ERR_MSG_BYTES)

/* Serves until SIGTERM, SIGINT or SIGHUP, then stops taking requests, lets those under way finish
 * or cancels them after the grace period, and returns KVD_OK; a second signal ends the process.
 * KVD_E_INVAL: the address, or no key beyond loopback.  Other errors: the device has failed.  Where
 * a step hangs the process ends with code 1, since nothing else can. */
kvd_status server_run(kvd_model *m, kvd_session *s, const kvd_plan *plan, const server_params *p,
                      kvd_err *err);

/* Idle sequences that a session should be able to park (kvd_session_params.n_parked). */
#define SERVER_PARKED_MAX 256u
/* Rows of logits that a session should have beside one a sequence (kvd_session_params.n_logits):
 * for prompts whose probabilities are asked for. */
#define SERVER_ECHO_ROWS 32u
/* Tokens of such a prompt that a step has room for, whatever the batch is. */
#define SERVER_ECHO_MIN 3u

#endif
