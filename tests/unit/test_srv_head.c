/* SPDX-License-Identifier: Apache-2.0 */
/* test_srv_head.c - heads of requests and bodies in chunks: what is read, what is refused and with
 * which status, however the bytes come in pieces, and without memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "server/srv_head.h"

/* A head between a usual first line and the empty one. */
#define HEAD(lines) "GET / HTTP/1.1\r\nHost: a\r\n" lines "\r\n"
#define BYTES(text) text, sizeof(text) - 1
#define HAS_NONE    "absent"

/* What the server does with bytes that come in pieces of `piece`: the status of the first head, 0
 * if it is good, -1 if more would have to come.  The caller frees *h. */
static int status_of(srv_head *h, const char *p, size_t n, size_t piece, size_t *len)
{
    srv_scan scan = SRV_SCAN_MORE;

    memset(h, 0, sizeof(*h));
    *len = 0;
    for (size_t come = piece; scan == SRV_SCAN_MORE && *len < n; come += piece)
        scan = srv_head_scan(p, come < n ? come : n, len);
    if (scan == SRV_SCAN_MORE && n < SRV_HEAD_BYTES)
        return -1;
    assert_true(srv_head_read(h, p, *len, scan));
    return h->status;
}

static void expect(const char *p, size_t n, int want)
{
    for (size_t piece = 1; piece <= n; piece += piece < 4 ? 1 : n) {
        srv_head  h;
        size_t    len;
        const int got = status_of(&h, p, n, piece, &len);

        if (got != want)
            fail_msg("\"%.*s\": %d (%s), not %d", (int)n, p, got, h.why ? h.why : "", want);
        assert_true((h.status == 0) == (h.why == NULL));
        srv_head_free(&h);
    }
}

static const struct {
    const char *text;
    size_t      n;
    int         status;
} heads[] = {
    { BYTES(HEAD("")), 0 },
    { BYTES("GET / HTTP/1.0\r\n\r\n"), 0 },
    { BYTES(HEAD("X: \t a b\t \r\nEmpty:\r\n")), 0 },
    { BYTES(HEAD("!#$%&'*+-.^_`|~09azAZ: \x80\xff\r\n")), 0 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\n"), -1 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\n\r"), -1 },
    /* names */
    { BYTES(HEAD(": x\r\n")), 400 },
    { BYTES(HEAD(":\r\n")), 400 },
    { BYTES("GET / HTTP/1.1\r\n: x\r\nHost: a\r\n\r\n"), 400 },
    { BYTES(HEAD("X : y\r\n")), 400 },
    { BYTES(HEAD("X\t: y\r\n")), 400 },
    { BYTES(HEAD("X Y: z\r\n")), 400 },
    { BYTES(HEAD("X\xe4: z\r\n")), 400 },
    { BYTES(HEAD("X(: z\r\n")), 400 },
    { BYTES(HEAD("no colon\r\n")), 400 },
    { BYTES(HEAD("nocolon\r\n")), 400 },
    /* a header that goes on */
    { BYTES(HEAD("X: y\r\n z\r\n")), 400 },
    { BYTES(HEAD("X: y\r\n\tz: 1\r\n")), 400 },
    { BYTES("GET / HTTP/1.1\r\n Host: a\r\n\r\n"), 400 },
    /* bytes that no head has, wherever they are; and at once, not when the head ends */
    { BYTES(HEAD("\0: x\r\n")), 400 },
    { BYTES(HEAD("\0\r\n")), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\nX: \0"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\nX: \x01"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\nX: \x0b"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\nX: \x7f"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\nX: \x1b[31m"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\nX: y\rZ"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\nX: y\r\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\nX: y\n"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: a\r\n\n"), 400 },
    { BYTES("GET / HTTP/1.1\nHost: a\n\n"), 400 },
    { BYTES("GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("\x16\x03\x01"), 400 }, /* TLS */
    { BYTES("\0"), 400 },
    /* the request line */
    { BYTES("\r\n"), 400 },
    { BYTES("GET\r\n\r\n"), 400 },
    { BYTES("GET /\r\n\r\n"), 400 },
    { BYTES("GET  / HTTP/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET /  HTTP/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1.1 \r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET /\tx HTTP/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES(" GET / HTTP/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("G\xe4T / HTTP/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET / http/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1.10\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/0.9\r\nHost: a\r\n\r\n"), 505 },
    { BYTES("PRI * HTTP/2.0\r\n\r\n"), 505 },
    { BYTES("GET /a%00b HTTP/1.1\r\nHost: a\r\n\r\n"), 400 },
    { BYTES("GET /a?%00b HTTP/1.1\r\nHost: a\r\n\r\n"), 0 }, /* of a query nothing is read */
    /* Host */
    { BYTES("GET / HTTP/1.1\r\n\r\n"), 400 },
    { BYTES(HEAD("host: a\r\n")), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n"), 0 },
    { BYTES("GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n"), 0 },
    { BYTES("GET / HTTP/1.1\r\nHost: my_host-1.example.\r\n\r\n"), 0 },
    { BYTES("GET / HTTP/1.1\r\nHost: 127.0.0.1/.evil.example\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: 127.0.0.1:80@evil.example\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: 127.0.0.1 evil.example\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: [::1]evil.example\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: [::1\r\n\r\n"), 400 },
    { BYTES("GET / HTTP/1.1\r\nHost: 127.0.0.1\0.evil.example\r\n\r\n"), 400 },
    /* where the body ends */
    { BYTES(HEAD("Content-Length: 15\r\n")), 0 },
    { BYTES(HEAD("Content-Length: 99999999999999999999999\r\n")), 0 },
    { BYTES(HEAD("Content-Length: 15\0 99\r\n")), 400 },
    { BYTES(HEAD("Content-Length: 15\r\nContent-Length: 15\r\n")), 400 },
    { BYTES(HEAD("Content-Length: 15, 15\r\n")), 400 },
    { BYTES(HEAD("Content-Length: +15\r\n")), 400 },
    { BYTES(HEAD("Content-Length: 0x10\r\n")), 400 },
    { BYTES(HEAD("Content-Length: 1 5\r\n")), 400 },
    { BYTES(HEAD("Content-Length:\r\n")), 400 },
    { BYTES(HEAD("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n")), 400 },
    { BYTES(HEAD("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n")), 400 },
    { BYTES(HEAD("Transfer-Encoding: Chunked\r\n")), 0 },
    { BYTES(HEAD("Transfer-Encoding: chunked\0x\r\n")), 400 },
    { BYTES(HEAD("Transfer-Encoding: chunked, chunked\r\n")), 501 },
    { BYTES(HEAD("Transfer-Encoding: gzip, chunked\r\n")), 501 },
    { BYTES(HEAD("Transfer-Encoding: \"chunked\"\r\n")), 501 },
    { BYTES(HEAD("Transfer-Encoding:\r\n")), 501 },
    { BYTES(HEAD("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n")), 400 },
    { BYTES("POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"), 400 },
    /* who asks */
    { BYTES(HEAD("Origin: http://a\r\nOrigin: http://b\r\n")), 400 },
    { BYTES(HEAD("Authorization: Bearer a\r\nauthorization: Bearer b\r\n")), 400 },
    { BYTES(HEAD("x-api-key: a\r\nX-API-Key: b\r\n")), 400 },
    { BYTES(HEAD("Origin: http://127.0.0.1\0.evil.example\r\n")), 400 },
};

static void statuses(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(heads) / sizeof(*heads); i++)
        expect(heads[i].text, heads[i].n, heads[i].status);
}

/* Each byte in each place of a good head that is a control is refused; of the others none changes
 * where the head ends. */
static void every_byte_everywhere(void **state)
{
    static const char good[] = HEAD("X: y z\r\n");
    const size_t      n      = sizeof(good) - 1;
    char              text[sizeof(good)];

    (void)state;
    for (size_t at = 0; at < n; at++)
        for (int b = 0; b < 256; b++) {
            srv_head h;
            size_t   len;
            int      got;

            memcpy(text, good, sizeof(good));
            text[at] = (char)b;
            got      = status_of(&h, text, n, n, &len);
            if (text[at] == good[at])
                assert_int_equal(got, 0);
            else if (b < 32 && b != '\t')
                assert_int_equal(got, 400);
            assert_true(got != 0 || len == n);
            assert_true(got == 0 || got == 400 || got == 505);
            srv_head_free(&h);
        }
}

static void check_path(const char *target, const char *want)
{
    char     text[200];
    srv_head h;
    size_t   len;

    snprintf(text, sizeof(text), "GET %s HTTP/1.1\r\nHost: a\r\n\r\n", target);
    assert_int_equal(status_of(&h, text, strlen(text), 1, &len), 0);
    assert_string_equal(h.path, want);
    srv_head_free(&h);
}

static void paths(void **state)
{
    (void)state;
    check_path("/a/b", "/a/b");
    check_path("/a%2fb%20c?d=%31", "/a/b c");
    check_path("/a%3Fb?c", "/a?b");
    check_path("/%", "/%");
    check_path("/%4", "/%4");
    check_path("/%zz%4g%g4", "/%zz%4g%g4");
    check_path("/%2500", "/%00"); /* decoded once */
    check_path("/%c3%a9\xc3\xa9", "/\xc3\xa9\xc3\xa9");
    check_path("http://evil/", "http://evil/");
    check_path("/?", "/");
}

static void check_header(const srv_head *h, const char *name, const char *want)
{
    const char *got = srv_head_get(h, name);

    if (strcmp(want, HAS_NONE) == 0)
        assert_null(got);
    else
        assert_string_equal(got, want);
}

static void headers(void **state)
{
    static const char text[] = "POST /x HTTP/1.1\r\nHost: a\r\nX-One:1\r\nEmpty: \t \r\n"
                               "x-two: \t2 : b \t\r\nX-One: again\r\nContent-Length: 007\r\n"
                               "Expect: 100-Continue\r\n\r\nGET / HTTP/1.1\r\n";
    srv_head          h;
    size_t            len;

    (void)state;
    assert_int_equal(status_of(&h, text, sizeof(text) - 1, 7, &len), 0);
    assert_int_equal(len, strlen(text) - strlen("GET / HTTP/1.1\r\n"));
    assert_string_equal(h.method, "POST");
    check_header(&h, "host", "a");
    check_header(&h, "x-one", "1");
    check_header(&h, "EMPTY", "");
    check_header(&h, "X-Two", "2 : b");
    check_header(&h, "X", HAS_NONE);
    check_header(&h, "1", HAS_NONE);
    check_header(&h, "", HAS_NONE);
    assert_true(h.keep && h.expects && !h.chunked && h.length == 7 && h.minor == 1);
    srv_head_free(&h);
}

/* Whether the connection goes on. */
static bool keeps(const char *version, const char *lines)
{
    char     text[200];
    srv_head h;
    size_t   len;
    bool     keep;

    snprintf(text, sizeof(text), "GET / HTTP/%s\r\nHost: a\r\n%s\r\n", version, lines);
    assert_int_equal(status_of(&h, text, strlen(text), 1, &len), 0);
    keep = h.keep;
    srv_head_free(&h);
    return keep;
}

static void connections(void **state)
{
    (void)state;
    assert_true(keeps("1.1", ""));
    assert_true(keeps("1.2", ""));
    assert_false(keeps("1.0", ""));
    assert_false(keeps("1.1", "Connection: Close\r\n"));
    assert_false(keeps("1.1", "Connection: TE, close\r\n"));
    assert_false(keeps("1.1", "Connection: TE\r\nConnection: ,close ,x\r\n"));
    assert_true(keeps("1.1", "Connection: closed, not-close\r\n"));
    assert_true(keeps("1.0", "Connection: Keep-Alive\r\n"));
    assert_false(keeps("1.0", "Connection: keep-alive, close\r\n"));
}

/* Larger than a head may be: the path, or what follows it. */
static void too_large(void **state)
{
    static char text[SRV_HEAD_BYTES];
    srv_head    h;
    size_t      len;

    (void)state;
    memset(text, 'a', sizeof(text));
    assert_int_equal(status_of(&h, text, sizeof(text), 1000, &len), 414);
    srv_head_free(&h);
    memcpy(text, "GET /x HTTP/1.1\r\nX: ", 20);
    assert_int_equal(status_of(&h, text, sizeof(text), 1000, &len), 431);
    assert_string_equal(h.path, "/x"); /* for the log, and the shape of the error */
    srv_head_free(&h);
    memcpy(text + sizeof(text) - 13, "\r\nHost: a\r\n\r\n", 13);
    assert_int_equal(status_of(&h, text, sizeof(text), 1000, &len), 0);
    srv_head_free(&h);
}

static void no_memory(void **state)
{
    srv_head h;

    (void)state;
    kvd_alloc_fault(0, false);
    assert_false(srv_head_read(&h, HEAD(""), sizeof(HEAD("")) - 1, SRV_SCAN_WHOLE));
    srv_head_free(&h);
    kvd_alloc_fault(-1, false);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

static const struct {
    const char *text;
    size_t      n;
    const char *body; /* NULL: refused */
    size_t      rest; /* of another request */
} bodies[] = {
    { BYTES("0\r\n\r\n"), "", 0 },
    { BYTES("5\r\nhello\r\n0\r\n\r\n"), "hello", 0 },
    { BYTES("00005\r\nhello\r\n000\r\n\r\nGET"), "hello", 3 },
    { BYTES("a\r\n0123456789\r\nB\r\nabcdefghijk\r\n0\r\n\r\n"), "0123456789abcdefghijk", 0 },
    { BYTES("5;a=b;c=\"d\"\r\nhello\r\n0;x\r\n\r\n"), "hello", 0 },
    { BYTES("2\r\n\r\n\r\n0\r\n\r\n"), "\r\n", 0 },
    { BYTES("0\r\nX: y\r\nZ:\r\n\r\nrest"), "", 4 },
    { BYTES("5\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("5;a\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("5;a\rhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("5;a\0\r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("5 \r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES(" 5\r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("0x5\r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("+5\r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("-1\r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("\r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES(";a\r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("5\r\nhelloo\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("5\r\nhello0\r\n\r\n"), NULL, 0 },
    { BYTES("5\r\nhello\n0\r\n\r\n"), NULL, 0 },
    { BYTES("fffffffffffffffff\r\n"), NULL, 0 },
    { BYTES("0000000000000005\r\nhello\r\n0\r\n\r\n"), NULL, 0 },
    { BYTES("0\r\n: y\r\n\r\n"), NULL, 0 },
    { BYTES("0\r\n y\r\n\r\n"), NULL, 0 },
    { BYTES("0\r\nX : y\r\n\r\n"), NULL, 0 },
    { BYTES("0\r\nX: y\n\r\n"), NULL, 0 },
    { BYTES("0\r\nX: \0\r\n\r\n"), NULL, 0 },
    { BYTES("0\r\n\n"), NULL, 0 },
    { BYTES("0\r\nnocolon\r\n\r\n"), NULL, 0 },
};

/* Takes bytes as they come in pieces; *n: how many were taken. */
static srv_chunk take_all(const char *p, size_t len, size_t piece, kvd_buf *body, size_t *n)
{
    srv_chunks c  = { 0 };
    srv_chunk  is = SRV_CHUNK_MORE;

    for (*n = 0; *n < len && (is == SRV_CHUNK_MORE || is == SRV_CHUNK_DATA);) {
        const size_t come = len - *n < piece ? len - *n : piece;
        size_t       used, n_data;

        is = srv_chunks_take(&c, p + *n, come, &used, &n_data);
        assert_true(used <= come && n_data <= used && (used > 0 || is != SRV_CHUNK_MORE));
        kvd_buf_put(body, p + *n + used - n_data, n_data);
        *n += used;
    }
    return is;
}

static void chunks(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(bodies) / sizeof(*bodies); i++)
        for (size_t piece = 1; piece < 30; piece += 3) {
            kvd_buf         body = { 0 };
            size_t          n;
            const srv_chunk is = take_all(bodies[i].text, bodies[i].n, piece, &body, &n);

            if (is != (bodies[i].body ? SRV_CHUNK_END : SRV_CHUNK_BAD))
                fail_msg("\"%s\": %d", bodies[i].text, (int)is);
            if (bodies[i].body) {
                assert_int_equal(body.len, strlen(bodies[i].body));
                assert_memory_equal(body.data ? body.data : "", bodies[i].body, body.len);
                assert_int_equal(bodies[i].n - n, bodies[i].rest);
            }
            kvd_buf_free(&body);
        }
}

/* Lines that carry nothing are bounded: an extension, and all trailers together. */
static void long_lines(void **state)
{
    kvd_buf text = { 0 }, body = { 0 };
    size_t  n;

    (void)state;
    kvd_buf_puts(&text, "1;");
    for (uint32_t i = 0; i < SRV_CHUNK_LINE; i++)
        kvd_buf_putc(&text, 'x');
    assert_int_equal(take_all(text.data, text.len, 64, &body, &n), SRV_CHUNK_BAD);
    text.len = 0;
    kvd_buf_puts(&text, "0\r\n");
    for (uint32_t i = 0; i < SRV_HEAD_BYTES / 64; i++)
        kvd_buf_puts(&text, "trailer: ------------------------------------------------------\r\n");
    assert_int_equal(take_all(text.data, text.len, 999, &body, &n), SRV_CHUNK_BAD);
    kvd_buf_free(&text);
    kvd_buf_free(&body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(statuses),    cmocka_unit_test(every_byte_everywhere),
        cmocka_unit_test(paths),       cmocka_unit_test(headers),
        cmocka_unit_test(connections), cmocka_unit_test(too_large),
        cmocka_unit_test(no_memory),   cmocka_unit_test(chunks),
        cmocka_unit_test(long_lines)
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
