/* SPDX-License-Identifier: Apache-2.0 */
/* srv_http.h - private to server/: connections, calls and replies.
 *
 * A *call* is one exchange on a connection: a request and its reply.  The net thread owns all of
 * it, except that a worker has it between srv_work_give() and the moment it comes back.
 *
 *   READ --whole--> WORK --parsed--> (reply is known) --> REPLY
 *                              '---> WAIT (job, not streamed) --ended--> REPLY
 *                              '---> STREAM --END, ERROR, reader gone--> gone
 *
 * In WORK, WAIT and while a stream has nothing to say the connection is suspended: the HTTP library
 * does not look at it.  Nor does it see an end that comes together with what was sent before.  So
 * the net thread watches every socket for the peer's end. */
#ifndef KVD_SRV_HTTP_H
#define KVD_SRV_HTTP_H

#include <microhttpd.h>
#include <stdarg.h>

#include "server.h"
#include "srv_engine.h"

typedef struct srv      srv;
typedef struct srv_call srv_call;

typedef struct srv_reply {
    int         status;    /* 0: not known yet */
    const char *type;      /* of the body; NULL: JSON */
    const char *policy;    /* what a browser may do with it; NULL: not told */
    uint32_t    retry_s;   /* 0: no Retry-After */
    char        allow[32]; /* with 405: methods of the path */
    char    may_send[512]; /* to a preflight: names of headers; "": those that are always told */
    char    why[64];       /* " (...)" of an error, for the log: its param, else its kind */
    bool    messages;      /* errors are in Anthropic's shape */
    bool    last;          /* of its connection */
    kvd_buf body;
} srv_reply;

typedef struct srv_route {
    const char *method, *path; /* one that ends with a slash (but "/") has a name behind it */
    bool        open;          /* without a key */
    bool        slow;          /* for a worker: it parses or waits */
    void (*run)(srv *s, srv_call *c);
} srv_route;
extern const srv_route srv_routes[];
extern const uint32_t  srv_n_route;
/* What to say of a path that is no route here but is one of other servers'; NULL: nothing. */
const char *srv_route_elsewhere(const char *path);

typedef struct srv_conn { /* one TCP connection */
    struct srv_conn       *prev, *next;
    int                    fd;
    struct MHD_Connection *c;
    srv_call              *call;     /* NULL: none */
    bool                   ended;    /* the peer has closed, or will send no more */
    bool                   drained;  /* what it had sent before has been read, if that was little */
    bool                   in_call;  /* its request has come whole, the reply is not out */
    bool                   reading;  /* of a request some has come */
    bool                   messages; /* its errors are in Anthropic's shape */
    bool                   refused;  /* for its headers; nothing more goes out */
    uint64_t               since_ns;
} srv_conn;

struct srv_call {
    srv                   *s;
    struct MHD_Connection *c;
    srv_conn              *conn;
    const srv_route       *route;
    const char            *at;               /* a route of the path, for the log; NULL: none */
    const char            *name;             /* behind the route's path, else ""; the library's */
    char                   nowhere[100];     /* a path that is no route, for the log */
    srv_call              *prev, *next;      /* all that live */
    srv_call              *next_work;        /* for a worker, or back from one */
    uint64_t               born_ns, said_ns; /* said: a stream has given bytes */
    uint64_t               woken_ns;         /* it was suspended until then */
    kvd_buf                body;
    uint64_t               n_body; /* of it, as counted in the server's */
    srv_reply              reply;
    srv_job               *job;
    kvd_buf                out; /* of a stream: made, not taken yet */
    size_t                 out_at;
    bool                   suspended, at_work, worked, streams, ending, gone, waited, keepalive;
    const char            *broken; /* the engine has stopped: what to tell */
};

/* ---- replies (srv_reply.c) ---------------------------------------------------------- */

/* An error in the shape of the route: OpenAI's or Anthropic's; param and code may be NULL. */
void srv_reply_error(srv_reply *r, int status, const char *param, const char *code, const char *fmt,
                     ...) KVD_PRINTF(5, 6);
/* {"error": ...} of it, without a reply, in either shape. */
void srv_put_error(kvd_buf *b, int status, const char *param, const char *code, const char *msg);
void srv_put_messages_error(kvd_buf *b, int status, const char *msg);
/* A JSON string of any bytes: what is not UTF-8 becomes U+FFFD. */
void srv_put_string(kvd_buf *b, const char *s, size_t len);
void srv_put_text(kvd_buf *b, const char *s);

/* ---- the server (srv_main.c) ------------------------------------------------------------- */

#define SRV_WORKERS  2u
#define SRV_LOG_ONCE 64u

struct srv {
    server_params     p;
    kvd_model        *model;
    kvd_plan          plan;
    kvd_model_info    info;
    srv_engine_params ep;
    srv_engine       *engine;
    char              name[128];
    int64_t           started; /* seconds since 1970 */

    struct MHD_Daemon *http;
    int                listen_fd, epoll_fd, event_fd;
    int                other_fd; /* listens, too, where the host has two addresses; else -1 */
    bool               knocks;   /* somebody waits there */
    uint16_t           port;
    bool               loopback;
    srv_conn          *conns;
    srv_call          *calls;
    uint32_t           n_call;
    uint64_t           n_body; /* bytes of large bodies that are in memory */
    srv_slot_view     *slots;  /* [n_seq + n_parked] net thread's copy */
    srv_map           *map;    /* likewise */

    uint64_t tick_ns, stop_ns; /* stop: when it was told to; 0: not */
    uint64_t sick_ns;          /* when the engine was found broken; 0: it is well */
    bool     stalled, hurried, closing;

    atomic_uint_fast64_t n_too_long; /* prompts that can never fit */

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t  work_wake;
    srv_call       *work, *work_last, *done; /* for workers, back from them */
    bool            work_ends;
    srv_job        *told;
    char            seen[SRV_LOG_ONCE][48]; /* unknown fields and notes that were logged */
    uint32_t        n_seen;
    pthread_t       worker[SRV_WORKERS];
    uint32_t        n_worker;
};

/* Any thread: the net thread looks at its lists. */
void srv_wake(srv *s);
/* Any thread: an unknown field, said once. */
void srv_log_unknown(srv *s, const char *name);
/* Any thread: what of a grammar was relaxed, once for each such text. */
void srv_log_notes(srv *s, const char *notes);

/* ---- srv_http.c -------------------------------------------------------------------- */

kvd_status srv_http_open(srv *s, kvd_err *err);
void       srv_http_stop_listening(srv *s);
void       srv_http_accept(srv *s); /* who waits at other_fd, while there is room */
void       srv_http_close(srv *s);  /* the workers have ended */
void       srv_http_resume(srv_call *c);
void       srv_http_body_read(srv_call *c);     /* it takes no memory any more */
void       srv_http_ended(srv_conn *c);         /* its peer will send no more */
void       srv_http_tick(srv *s, uint64_t now); /* limits of time */

/* ---- srv_refuse.c ------------------------------------------------------------------ */

/* The library's log: what it refuses by itself is answered here, once. */
void srv_refuse_logged(void *cls, const char *fmt, va_list ap);

/* ---- srv_listen.c ------------------------------------------------------------------ */

kvd_status srv_listen(srv *s, kvd_err *err);
/* NULL: the call may go on; else what is wrong with it was put into its reply. */
bool srv_guard(srv_call *c, const char *method, const char *path);

/* ---- srv_work.c ------------------------------------------------------------------------ */

kvd_status srv_work_open(srv *s, kvd_err *err);
void       srv_work_close(srv *s); /* waits for the workers */
void       srv_work_give(srv *s, srv_call *c);
srv_call  *srv_work_take_done(srv *s); /* a list */

/* ---- srv_log.c --------------------------------------------------------------------------- */

void srv_log_open(const server_params *p); /* borrowed until srv_log_close() */
void srv_log_close(void);
/* A client's text for a line: what is no plain character is escaped, what has no room cut off. */
void srv_log_quote(const char *s, size_t len, char *out, size_t cap);

#endif
