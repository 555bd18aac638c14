/* SPDX-License-Identifier: Apache-2.0 */
/* srv_head.h - private to server/: the head of an HTTP request and the framing of its body.
 *
 * Nothing is repaired.  A head that two programs could read in two ways is refused, and its
 * connection ends: a proxy in front must see the same requests as this server (RFC 9112, 11.2).
 * So lines end with CR LF, names are tokens, a header is one line, and a control byte is an error
 * wherever it stands.  No sockets here: tests/unit/test_srv_head.c and the fuzzer call it. */
#ifndef KVD_SRV_HEAD_H
#define KVD_SRV_HEAD_H

#include "base/base.h"

#define SRV_HEAD_BYTES  (16u << 10) /* most of a head, and of the trailers of a body */
#define SRV_CHUNK_LINE  256u        /* most of the line before a chunk, with its extensions */
#define SRV_CHUNK_DIGIT 15u         /* most digits of a chunk's size: below 2^60 */

typedef enum srv_scan { SRV_SCAN_MORE, SRV_SCAN_WHOLE, SRV_SCAN_BAD } srv_scan;

typedef struct srv_head {
    char       *text; /* owned; all strings below point into it */
    const char *method;
    const char *path;    /* decoded, without its query; "" where the request line is bad */
    const char *headers; /* name, 0, value, 0, ...; up to the end */
    const char *end;
    uint32_t    minor;   /* of HTTP/1.x */
    bool        chunked; /* else the body has `length` bytes */
    bool        keep;    /* the connection may have another request */
    bool        expects; /* the client waits for 100 Continue before it sends the body */
    uint64_t    length;  /* UINT64_MAX: that many or more */
    int         status;  /* 0, or the answer to a head that is refused */
    const char *why;     /* static; the message of that answer */
} srv_head;

/* Looks for the end of a head from byte *at on and moves *at on: to the head's length (WHOLE), to
 * the byte that no head has (BAD), or to where the next call goes on (MORE). */
srv_scan srv_head_scan(const char *p, size_t n, size_t *at);

/* Reads a head.  `len` bytes came and `scan` is what srv_head_scan() said of them; MORE here means
 * that the head is too large.  false: no memory.  A refused head has a status, and of method and
 * path what was read until then.  srv_head_free() is due in each case. */
bool srv_head_read(srv_head *h, const char *p, size_t len, srv_scan scan);
void srv_head_free(srv_head *h);

/* The value of the first header of that name, without blanks around it; NULL: there is none. */
const char *srv_head_get(const srv_head *h, const char *name);

/* ---- a body in chunks -------------------------------------------------------------------- */

typedef struct srv_chunks { /* zeroed at the body's start */
    uint8_t  state;
    uint32_t n_line; /* bytes of the present line; of all trailers */
    uint32_t n_digit;
    uint64_t left; /* of the present chunk */
} srv_chunks;

typedef enum srv_chunk { SRV_CHUNK_MORE, SRV_CHUNK_DATA, SRV_CHUNK_END, SRV_CHUNK_BAD } srv_chunk;

/* Takes *used of n bytes.  DATA: the last *n_data of them are of the body, and there may be more in
 * the rest.  MORE: all were taken.  END: the body is whole, what follows is the next request. */
srv_chunk srv_chunks_take(srv_chunks *c, const char *p, size_t n, size_t *used, size_t *n_data);

#endif
