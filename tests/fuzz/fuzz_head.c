/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_head.c - any bytes as the head of a request, then as a body in chunks: what is found is the
 * same however the bytes come in pieces, and a head that is taken means the same when it is written
 * anew from what was read. */
#include <string.h>

#include "server/srv_head.h"

static srv_scan scan_in_pieces(const char *p, size_t n, size_t piece, size_t *at)
{
    srv_scan scan = SRV_SCAN_MORE;

    *at = 0;
    for (size_t come = 0; come < n && scan == SRV_SCAN_MORE;) {
        come += piece < n - come ? piece : n - come;
        scan = srv_head_scan(p, come, at);
    }
    return scan;
}

static void write_anew(const srv_head *h, kvd_buf *b)
{
    kvd_buf_printf(b, "%s /%s HTTP/1.%u\r\n", h->method, "x", h->minor);
    for (const char *p = h->headers; p < h->end; p += strlen(p) + 1) {
        const char *value = p + strlen(p) + 1;

        kvd_buf_printf(b, "%s:%s\r\n", p, value);
        p = value;
    }
    kvd_buf_puts(b, "\r\n");
}

static void check_same(const srv_head *h)
{
    kvd_buf  b = { 0 };
    srv_head again;
    size_t   at = 0;

    write_anew(h, &b);
    kvd_assert(srv_head_scan(b.data, b.len, &at) == SRV_SCAN_WHOLE && at == b.len);
    kvd_assert(srv_head_read(&again, b.data, b.len, SRV_SCAN_WHOLE) && again.status == 0);
    kvd_assert(again.end - again.headers == h->end - h->headers);
    kvd_assert(memcmp(again.headers, h->headers, (size_t)(h->end - h->headers)) == 0);
    kvd_assert(strcmp(again.method, h->method) == 0);
    kvd_assert(again.length == h->length && again.chunked == h->chunked && again.keep == h->keep);
    srv_head_free(&again);
    kvd_buf_free(&b);
}

static void try_head(const char *p, size_t n, size_t piece)
{
    size_t         at, whole_at;
    const srv_scan scan = scan_in_pieces(p, n, piece, &at);
    srv_head       h;

    kvd_assert(scan == scan_in_pieces(p, n, n, &whole_at) && at == whole_at && at <= n);
    if (!srv_head_read(&h, p, at, scan))
        return;
    kvd_assert((scan == SRV_SCAN_WHOLE) || h.status);
    kvd_assert((h.status == 0) == (h.why == NULL));
    if (!h.status)
        check_same(&h);
    srv_head_free(&h);
}

static srv_chunk try_chunks(const char *p, size_t n, size_t piece, kvd_buf *body, size_t *taken)
{
    srv_chunks c  = { 0 };
    srv_chunk  is = SRV_CHUNK_MORE;

    for (*taken = 0; *taken < n && is <= SRV_CHUNK_DATA;) {
        const size_t come = n - *taken < piece ? n - *taken : piece;
        size_t       used, n_data;

        is = srv_chunks_take(&c, p + *taken, come, &used, &n_data);
        kvd_assert(used <= come && n_data <= used && used > 0);
        kvd_buf_put(body, p + *taken + used - n_data, n_data);
        *taken += used;
    }
    return is <= SRV_CHUNK_DATA ? SRV_CHUNK_MORE : is;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char  *p = (const char *)data + 1;
    const size_t n = size > 0 ? size - 1 : 0;
    kvd_buf      a = { 0 }, b = { 0 };
    const size_t piece = size > 0 ? 1u + data[0] % 16u : 1u;
    size_t       n_a, n_b;

    if (n == 0)
        return 0;
    try_head(p, n, piece);
    kvd_assert(try_chunks(p, n, piece, &a, &n_a) == try_chunks(p, n, n, &b, &n_b) && n_a == n_b);
    kvd_assert(a.len == b.len && (a.len == 0 || memcmp(a.data, b.data, a.len) == 0));
    kvd_buf_free(&a);
    kvd_buf_free(&b);
    return 0;
}
