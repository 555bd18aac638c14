/* SPDX-License-Identifier: Apache-2.0 */
/* srv_head.c - reads the heads of requests and the chunks of bodies: RFC 9112 without its
 * concessions to old senders. */
#include "srv_head.h"

#include <string.h>
#include <strings.h>

/* ---- characters ---------------------------------------------------------------------------- */

/* What method and header names are made of. */
static bool is_token_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c && strchr("!#$%&'*+-.^_`|~", c));
}

static bool is_token(const char *s, size_t len)
{
    size_t n = 0;

    while (n < len && is_token_char(s[n]))
        n++;
    return n > 0 && n == len;
}

/* A byte that no line of a head or of trailers has: a control, but for the tab. */
static bool is_control(char c)
{
    return ((uint8_t)c < 0x20 && c != '\t') || c == 0x7f;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t';
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* ---- the end of a head ---------------------------------------------------------------------- */

srv_scan srv_head_scan(const char *p, size_t n, size_t *at)
{
    size_t i = *at;

    for (; i < n; i++) {
        const bool after_cr = i > 0 && p[i - 1] == '\r';

        if (after_cr != (p[i] == '\n') || (is_control(p[i]) && p[i] != '\r' && p[i] != '\n')) {
            *at = i;
            return SRV_SCAN_BAD;
        }
        if (p[i] == '\n' && (i == 1 || (i >= 3 && p[i - 2] == '\n'))) {
            *at = i + 1;
            return SRV_SCAN_WHOLE;
        }
    }
    *at = n;
    return SRV_SCAN_MORE;
}

/* ---- the request line ------------------------------------------------------------------------ */

/* false, for callers that return it. */
static bool refuse(srv_head *h, int status, const char *why)
{
    h->status = status;
    h->why    = why;
    return false;
}

/* Cuts off the query and decodes %xx in place.  false: there is %00, which would end the text. */
static bool decode_path(char *path)
{
    char *out = path;

    path[strcspn(path, "?")] = 0;
    for (const char *p = path; *p; p++) {
        const int high = *p == '%' ? hex_value(p[1]) : -1, low = high >= 0 ? hex_value(p[2]) : -1;

        if (low < 0) {
            *out++ = *p;
            continue;
        }
        if (high == 0 && low == 0)
            return false;
        *out++ = (char)(high * 16 + low);
        p += 2;
    }
    *out = 0;
    return true;
}

/* "HTTP/1.1" */
static bool read_version(srv_head *h, const char *s)
{
    if (strncmp(s, "HTTP/", 5) != 0 || s[5] < '0' || s[5] > '9' || s[6] != '.' || s[7] < '0' ||
        s[7] > '9' || s[8])
        return refuse(h, 400, "the request line does not end with a version of HTTP");
    if (s[5] != '1')
        return refuse(h, 505, "this server speaks HTTP/1.1 and HTTP/1.0");
    h->minor = (uint32_t)(s[7] - '0');
    return true;
}

/* METHOD SP TARGET SP VERSION, zero-terminated. */
static bool read_request_line(srv_head *h, char *line)
{
    char *target = strchr(line, ' '), *version = target ? strchr(target + 1, ' ') : NULL;

    if (!version || !is_token(line, (size_t)(target - line)) || version == target + 1 ||
        strchr(line, '\t'))
        return refuse(h, 400,
                      "the request line is not: method, one space, path, one space, "
                      "HTTP/1.1");
    *target++  = 0;
    *version++ = 0;
    h->method  = line;
    if (!decode_path(target))
        return refuse(h, 400, "the path has a zero byte (%00)");
    h->path = target;
    return read_version(h, version);
}

/* ---- headers --------------------------------------------------------------------------------- */

/* Makes "name: value" two strings in place; `line` is zero-terminated.  Returns the value's end;
 * NULL: refused. */
static char *split_header(srv_head *h, char *line, char **value)
{
    const size_t n_name = strcspn(line, ":");
    char        *end    = line + strlen(line);

    if (is_blank(*line)) {
        refuse(h, 400, "a header's name is missing: its line begins with a blank");
        return NULL;
    }
    if (!line[n_name] || !is_token(line, n_name)) {
        refuse(h, 400,
               "a header has no name before a colon, or a character in it that no name has");
        return NULL;
    }
    line[n_name] = 0;
    *value       = line + n_name + 1;
    while (is_blank(**value))
        ++*value;
    while (end > *value && is_blank(end[-1]))
        end--;
    *end = 0;
    return end;
}

/* Splits all lines from p on and moves the strings together.  The last line is the empty one. */
static bool read_headers(srv_head *h, char *p)
{
    char *out = p, *value;

    h->headers = h->end = p;
    for (char *next; *p; p = next) {
        char  *eol = strstr(p, "\r\n"), *end;
        size_t n;

        kvd_assert(eol); /* the scan has seen the end */
        *eol = 0;
        next = eol + 2;
        end  = split_header(h, p, &value);
        if (!end)
            return false;
        n = strlen(p) + 1;
        memmove(out, p, n);
        out += n;
        n = (size_t)(end - value) + 1;
        memmove(out, value, n);
        out += n;
        h->end = out;
        if (strncmp(next, "\r\n", 2) == 0)
            break;
    }
    return true;
}

/* The header after this one; NULL at the end.  name NULL: the first. */
static const char *next_header(const srv_head *h, const char *name)
{
    const char *p = h->headers;

    if (name) {
        p = name + strlen(name) + 1;
        p += strlen(p) + 1;
    }
    return p < h->end ? p : NULL;
}

static const char *value_of(const char *name)
{
    return name + strlen(name) + 1;
}

const char *srv_head_get(const srv_head *h, const char *name)
{
    for (const char *p = next_header(h, NULL); p; p = next_header(h, p))
        if (strcasecmp(p, name) == 0)
            return value_of(p);
    return NULL;
}

static uint32_t count(const srv_head *h, const char *name)
{
    uint32_t n = 0;

    for (const char *p = next_header(h, NULL); p; p = next_header(h, p))
        n += strcasecmp(p, name) == 0;
    return n;
}

/* Whether a list of tokens, in one or more headers, has this one. */
static bool lists(const srv_head *h, const char *name, const char *token)
{
    const size_t len = strlen(token);

    for (const char *p = next_header(h, NULL); p; p = next_header(h, p)) {
        if (strcasecmp(p, name) != 0)
            continue;
        for (const char *v = value_of(p); *v; v += strcspn(v, ", \t")) {
            v += strspn(v, ", \t");
            if (strcspn(v, ", \t") == len && strncasecmp(v, token, len) == 0)
                return true;
        }
    }
    return false;
}

/* ---- what headers mean ----------------------------------------------------------------------- */

/* Decimal digits alone; values beyond 64 bits become UINT64_MAX.  false: anything else. */
static bool read_length(const char *s, uint64_t *n)
{
    bool fits = *s != 0;

    if (!*s || s[strspn(s, "0123456789")])
        return false;
    *n = 0;
    for (; *s && fits; s++)
        fits = kvd_mul(*n, 10, n) && kvd_add(*n, (uint64_t)(*s - '0'), n);
    *n = fits ? *n : UINT64_MAX;
    return true;
}

/* "name", "1.2.3.4" or "[::1]", and a port or none. */
static bool is_host(const char *s)
{
    static const char digits[] = "0123456789", six[] = "0123456789abcdefABCDEF:.",
                      name[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                               "-._~%!$&'()*+,;=";

    if (*s == '[') {
        s += 1 + strspn(s + 1, six);
        if (*s++ != ']')
            return false;
    } else {
        s += strspn(s, name);
    }
    if (*s == ':')
        s += 1 + strspn(s + 1, digits);
    return *s == 0;
}

/* Programs differ in which of several they take. */
static bool check_single(srv_head *h)
{
    if (count(h, "Content-Length") + count(h, "Transfer-Encoding") > 1 || count(h, "Host") > 1)
        return refuse(h, 400, "Host, or the body's length, is given twice");
    if (count(h, "Origin") > 1 || count(h, "Authorization") > 1 || count(h, "x-api-key") > 1)
        return refuse(h, 400, "Origin, or a key, is given twice");
    return true;
}

static bool read_framing(srv_head *h)
{
    const char *length = srv_head_get(h, "Content-Length");
    const char *coding = srv_head_get(h, "Transfer-Encoding");

    if (coding && strcasecmp(coding, "chunked") != 0)
        return refuse(h, 501, "Transfer-Encoding: chunked is the only one there is here");
    if (coding && h->minor == 0)
        return refuse(h, 400, "HTTP/1.0 has no Transfer-Encoding");
    if (length && !read_length(length, &h->length))
        return refuse(h, 400, "Content-Length is no number of bytes");
    h->chunked = coding != NULL;
    return true;
}

static bool read_meaning(srv_head *h)
{
    const char *host = srv_head_get(h, "Host"), *expect = srv_head_get(h, "Expect");

    if (!check_single(h) || !read_framing(h))
        return false;
    if (!host && h->minor > 0)
        return refuse(h, 400, "the Host header is missing");
    if (host && !is_host(host))
        return refuse(h, 400, "Host is not a name or an address, with a port or without");
    h->expects = expect && h->minor > 0 && strcasecmp(expect, "100-continue") == 0;
    h->keep =
        !lists(h, "Connection", "close") && (h->minor > 0 || lists(h, "Connection", "keep-alive"));
    return true;
}

/* ---- a head ---------------------------------------------------------------------------------- */

/* The length that text in front of a bad byte has without its last, cut line. */
static size_t whole_lines(const char *p, size_t len)
{
    while (len > 0 && !(len >= 2 && p[len - 2] == '\r' && p[len - 1] == '\n'))
        len--;
    return len;
}

/* What a head is refused for before it is read: it did not end, or has a byte that none has. */
static void refuse_scanned(srv_head *h, srv_scan scan, bool has_line)
{
    if (scan == SRV_SCAN_BAD)
        refuse(h, 400,
               "the head has a control character, or a CR or LF that is not the end of a line");
    else if (has_line)
        refuse(h, 431, "the headers are too large");
    else
        refuse(h, 414, "the path is too long");
}

bool srv_head_read(srv_head *h, const char *p, size_t len, srv_scan scan)
{
    const size_t n = scan == SRV_SCAN_WHOLE ? len : whole_lines(p, len);
    char        *eol;

    memset(h, 0, sizeof(*h));
    h->method = h->path = "";
    h->text             = kvd_strndup(p, n);
    if (!h->text)
        return false;
    h->headers = h->end = h->text;
    eol                 = strstr(h->text, "\r\n");
    if (eol) {
        *eol = 0;
        if (read_request_line(h, h->text) && scan == SRV_SCAN_WHOLE &&
            (strncmp(eol + 2, "\r\n", 2) == 0 || read_headers(h, eol + 2)))
            read_meaning(h);
    }
    if (scan != SRV_SCAN_WHOLE)
        refuse_scanned(h, scan, eol != NULL);
    return true;
}

void srv_head_free(srv_head *h)
{
    kvd_free(h->text);
    memset(h, 0, sizeof(*h));
}

/* ---- chunks ---------------------------------------------------------------------------------- */

typedef enum state {
    SIZE,      /* digits of a chunk's size */
    EXTENSION, /* behind the size, up to CR; has no effect */
    SIZE_LF,
    DATA,
    DATA_CR,
    DATA_LF,
    TRAILER,      /* the first byte of a line behind the last chunk */
    TRAILER_NAME, /* up to the colon */
    TRAILER_VALUE,
    TRAILER_LF,
    LAST_LF,
    WHOLE,
    BAD
} state;

static state after_size(srv_chunks *c, char b)
{
    const int digit = hex_value(b);

    if (digit >= 0) {
        c->left = c->left * 16 + (uint64_t)digit;
        return ++c->n_digit <= SRV_CHUNK_DIGIT ? SIZE : BAD;
    }
    if (c->n_digit == 0)
        return BAD;
    if (b == '\r')
        return SIZE_LF;
    return b == ';' ? EXTENSION : BAD;
}

static state after_size_line(srv_chunks *c)
{
    const bool last = c->left == 0;

    c->n_line = c->n_digit = 0;
    return last ? TRAILER : DATA;
}

/* A byte of a line's text, or the CR behind it. */
static state after_text(char b, state same, state end)
{
    if (b == '\r')
        return end;
    return is_control(b) ? BAD : same;
}

static state after_name(char b)
{
    if (b == ':')
        return TRAILER_VALUE;
    return is_token_char(b) ? TRAILER_NAME : BAD;
}

static state after_trailer(char b)
{
    if (b == '\r')
        return LAST_LF;
    return is_token_char(b) ? TRAILER_NAME : BAD;
}

/* One byte that is none of a chunk's data. */
static state after(srv_chunks *c, char b)
{
    switch ((state)c->state) {
    case SIZE:
        return after_size(c, b);
    case EXTENSION:
        return after_text(b, EXTENSION, SIZE_LF);
    case SIZE_LF:
        return b == '\n' ? after_size_line(c) : BAD;
    case DATA_CR:
        return b == '\r' ? DATA_LF : BAD;
    case DATA_LF:
        c->n_line = 0;
        return b == '\n' ? SIZE : BAD;
    case TRAILER:
        return after_trailer(b);
    case TRAILER_NAME:
        return after_name(b);
    case TRAILER_VALUE:
        return after_text(b, TRAILER_VALUE, TRAILER_LF);
    case TRAILER_LF:
        return b == '\n' ? TRAILER : BAD;
    case LAST_LF:
        return b == '\n' ? WHOLE : BAD;
    default:
        return BAD;
    }
}

static bool is_too_long(const srv_chunks *c)
{
    return c->n_line > (c->state < TRAILER ? SRV_CHUNK_LINE : SRV_HEAD_BYTES);
}

srv_chunk srv_chunks_take(srv_chunks *c, const char *p, size_t n, size_t *used, size_t *n_data)
{
    size_t i = 0;

    *n_data = 0;
    while (i < n && c->state != DATA && c->state < WHOLE) {
        c->n_line++;
        c->state = (uint8_t)after(c, p[i++]);
        if (is_too_long(c))
            c->state = BAD;
    }
    if (c->state == DATA && i < n) {
        *n_data = c->left < n - i ? (size_t)c->left : n - i;
        c->left -= *n_data;
        i += *n_data;
        if (c->left == 0)
            c->state = DATA_CR;
    }
    *used = i;
    if (*n_data > 0)
        return SRV_CHUNK_DATA;
    if (c->state == WHOLE)
        return SRV_CHUNK_END;
    return c->state == BAD ? SRV_CHUNK_BAD : SRV_CHUNK_MORE;
}
