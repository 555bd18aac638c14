/* SPDX-License-Identifier: Apache-2.0 */
/* srv_http.h - private to server/: connections, calls and replies.
 *
 * A *connection* is a socket (srv_conn.c), a *call* is one exchange on it: a request and its reply
 * (srv_http.c).  The net thread owns both, except that a worker has a call between srv_work_give()
 * and the moment it comes back.
 *
 *   connection:  HEAD --whole--> BODY --whole--> CALL --reply out--> HEAD, LINGER or closed
 *                   '--refused, or no body------^
 *   call:        READ --whole--> WORK --parsed--> (reply is known) --> REPLY
 *                                    '---> WAIT (job, not streamed) --ended--> REPLY
 *                                    '---> STREAM --END, ERROR, reader gone--> gone
 *
 * In CALL nothing is read: what a client sends early stays in the socket.  In WORK, WAIT and while
 * a stream has nothing to say the call is suspended: its connection does nothing until
 * srv_http_resume(), or until the peer has closed its side. */
#ifndef KVD_SRV_HTTP_H
#define KVD_SRV_HTTP_H

#include "server.h"
#include "srv_engine.h"
#include "srv_head.h"
#include "srv_template.h"

typedef struct srv      srv;
typedef struct srv_call srv_call;
typedef struct srv_conn srv_conn;

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

typedef enum srv_conn_state {
    SRV_CONN_HEAD, /* between requests, or in a head */
    SRV_CONN_BODY,
    SRV_CONN_CALL,  /* the request is whole, or refused; its reply is not out */
    SRV_CONN_LINGER /* the last reply is out; what the client still sends is dropped */
} srv_conn_state;

struct srv_conn { /* one TCP connection */
    srv_conn      *prev, *next;
    srv_conn      *next_ready; /* in the list of those that may go on */
    int            fd;
    srv_conn_state state;
    srv_call      *call;               /* NULL in HEAD and LINGER */
    bool           is_ready;           /* in that list */
    bool           readable, writable; /* until the socket says EAGAIN */
    bool           ended;              /* the peer has closed, or will send no more */
    bool           expired;            /* a limit of time has passed: it is closed next */
    kvd_buf        in, out;            /* read and not taken; to be sent.  No memory while idle */
    size_t         in_at, out_at, body_at;
    size_t         scanned;  /* HEAD: bytes behind in_at that were looked at */
    bool           has_crlf; /* HEAD: an empty line came before it */
    srv_chunks     chunks;
    uint64_t       left; /* BODY: bytes to come, where they are not in chunks */
    uint64_t since_ns;   /* HEAD: of its first byte, else of the last reply; LINGER: its start */
};

struct srv_call {
    srv             *s;
    srv_conn        *conn;
    srv_head         head;
    const srv_route *route;
    const char      *at;           /* a route of the path, for the log; NULL: none */
    const char      *name;         /* behind the route's path, else ""; the head's */
    char             nowhere[100]; /* a path that is no route, for the log */
    srv_call        *prev, *next;  /* all that live */
    srv_call        *next_work;    /* for a worker, or back from one */
    uint64_t         born_ns;      /* on the system's clock */
    uint64_t         said_ns; /* output was made, or the socket took some; on the server's clock */
    kvd_buf          body;
    uint64_t         n_body; /* of it, as counted in the server's */
    srv_reply        reply;
    srv_job         *job;
    kvd_buf          out; /* of a stream: events' text, before it is framed */
    bool             suspended, at_work, worked, streams, ending, gone, waited, keepalive;
    bool             told;   /* the reply's head was made */
    bool             whole;  /* the reply was made to its end */
    const char      *broken; /* the engine has stopped: what to tell */
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
#define SRV_LISTEN   2u /* addresses: localhost is one of IPv4 and one of IPv6 */

struct srv {
    server_params     p;
    kvd_model        *model;
    kvd_plan          plan;
    kvd_model_info    info;
    srv_engine_params ep;
    srv_engine       *engine;
    srv_template      tmpl;
    char              name[128];
    int64_t           started; /* seconds since 1970 */

    int            epoll_fd, event_fd;
    int            listen_fd[SRV_LISTEN]; /* -1: none */
    bool           knocks;                /* somebody waits there */
    uint16_t       port;
    bool           loopback;
    srv_conn      *conns;
    srv_conn      *ready, *ready_last; /* connections that may go on */
    uint32_t       n_conn;
    srv_call      *calls;
    uint32_t       n_call;
    uint64_t       n_body;   /* bytes of large bodies that are in memory */
    srv_slot_view *slots;    /* [n_seq + n_parked] net thread's copy */
    srv_map       *map;      /* likewise */
    char           date[32]; /* of date_s, for replies */
    int64_t        date_s;

    /* These are of kvd_ran_ns(): limits of time count while the process runs. */
    uint64_t now_ns;           /* of this turn of the loop */
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
/* Any thread: a line of the log, said once. */
void srv_log_once(srv *s, const char *line);
/* Any thread: what of a grammar was relaxed, once for each such text. */
void srv_log_notes(srv *s, const char *notes);

/* ---- srv_conn.c -------------------------------------------------------------------- */

void srv_conn_accept(srv *s);                              /* who waits, while there is room */
void srv_conn_event(srv *s, srv_conn *c, uint32_t events); /* what epoll says */
void srv_conn_ready(srv *s, srv_conn *c);                  /* it may go on */
void srv_conn_run(srv *s); /* those that may; alone closes connections */
void srv_conn_stop_listening(srv *s);
void srv_conn_close_all(srv *s); /* the workers have ended */

/* ---- srv_http.c -------------------------------------------------------------------- */

/* A head has come: opens the connection's call.  The head belongs to it, or is freed.  NULL: there
 * is no memory, or the server closes. */
srv_call *srv_http_begin(srv *s, srv_conn *c, srv_head *h);
/* Part of the body; false: the reply is known, and no more of the body is to be read. */
bool srv_http_body(srv_call *c, const char *data, size_t len);
void srv_http_run(srv_call *c); /* the request is whole */
/* Makes more of the reply, into the connection's `out` and `reply.body`.  false: the connection is
 * to be closed.  Where nothing was made the reply is whole, or the call is suspended. */
bool srv_http_more(srv_call *c);
void srv_http_end(srv_call *c); /* not while it is at work */
void srv_http_resume(srv_call *c);
void srv_http_body_read(srv_call *c); /* it takes no memory any more */
void srv_http_ended(srv_conn *c);     /* its peer will send no more */
void srv_http_tick(srv *s);           /* limits of time */

/* ---- srv_reply_head.c -------------------------------------------------------------- */

/* Writes the reply's head to the connection's `out`.  len UINT64_MAX: a stream. */
void srv_reply_head(srv_call *c, const char *type, uint64_t len);

/* ---- srv_listen.c ------------------------------------------------------------------ */

kvd_status srv_listen(srv *s, kvd_err *err);
/* Whether the call may go on; else what is wrong with it was put into its reply. */
bool srv_guard(srv_call *c);

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
