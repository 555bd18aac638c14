/* SPDX-License-Identifier: Apache-2.0 */
/* tool_stream.c - generated text to text and tool calls, as it comes.
 *
 * What has come and is not told yet lies in `in`.  It is more than nothing in three cases only:
 * white space that may stand before a mark, the beginning of a mark, and the head of a call up to
 * its name and the beginning of its arguments.  From there on arguments pass through byte by byte,
 * by a scanner that knows strings and brackets.  Every decision depends on bytes seen alone, never
 * on where the text was cut.
 *
 * A call whose head is no JSON with a name, or longer than MAX_HEAD, was text: its first byte (its
 * mark, where it has one) is told as text, and the search goes on behind it. */
#include <string.h>

#include "text/text.h"

#define MAX_HEAD  16384u
#define MAX_WHITE 256u /* dropped before a mark and behind a call */
#define MAX_NAME  256u

static const char hermes_open[] = "<tool_call>", hermes_close[] = "</tool_call>";
static const char llama_open[] = "<|python_tag|>";

typedef enum mode {
    IN_TEXT,
    IN_HEAD,
    IN_ARGS,  /* of the value of the arguments */
    IN_TAIL,  /* behind them, in the call's object */
    IN_CLOSE, /* behind the object: the closing mark */
} mode;

typedef struct event {
    kvd_tool_event_kind kind;
    uint32_t            call;
    size_t              off, len; /* in out; a zero is behind it */
    bool                complete;
} event;

typedef struct scan { /* through one JSON value */
    uint32_t depth;
    bool     begun, string, escape;
} scan;

struct tool_stream {
    kvd_tool_format format;
    mode            mode;
    kvd_buf         in, out, queue; /* queue: of event */
    size_t          next;           /* event */
    uint32_t        n_call;
    size_t          n_mark;  /* IN_HEAD: bytes before the object */
    bool            started; /* text has been told, or a call */
    bool            behind;  /* only white space since a call */
    scan            scan;
};

/* ---- formats ----------------------------------------------------------------------------- */

/* Where `what` is first in s; NULL: nowhere. */
static const char *find(const char *s, size_t len, const char *what)
{
    const size_t n   = strlen(what);
    const char  *end = s + len, *at = s;

    while (len >= n && (at = memchr(at, what[0], (size_t)(end - at))) != NULL) {
        if ((size_t)(end - at) < n)
            return NULL;
        if (memcmp(at, what, n) == 0)
            return at;
        at++;
    }
    return NULL;
}

static bool holds(const char *s, size_t len, const char *what)
{
    return find(s, len, what) != NULL;
}

kvd_tool_format tool_format_of(const char *s, size_t len)
{
    if (!s)
        return KVD_TOOLS_NONE;
    if (holds(s, len, hermes_open) && holds(s, len, "\"name\"") && holds(s, len, "\"arguments\"") &&
        !holds(s, len, "<function="))
        return KVD_TOOLS_HERMES;
    if (holds(s, len, "\"name\"") && holds(s, len, "\"parameters\"") &&
        (holds(s, len, llama_open) || holds(s, len, "ipython")))
        return KVD_TOOLS_LLAMA3;
    return KVD_TOOLS_NONE;
}

const char *tool_open_mark(kvd_tool_format f)
{
    return f == KVD_TOOLS_LLAMA3 ? llama_open : hermes_open;
}

const char *tool_close_mark(kvd_tool_format f)
{
    return f == KVD_TOOLS_LLAMA3 ? "" : hermes_close;
}

kvd_status tool_stream_open(tool_stream **out, kvd_tool_format f, kvd_err *err)
{
    *out = NULL;
    if (f != KVD_TOOLS_HERMES && f != KVD_TOOLS_LLAMA3)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "tool calls: the format is not known");
    *out = kvd_calloc(1, sizeof(**out));
    if (!*out)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tool calls: no memory");
    (*out)->format = f;
    return KVD_OK;
}

void tool_stream_close(tool_stream *s)
{
    if (!s)
        return;
    kvd_buf_free(&s->in);
    kvd_buf_free(&s->out);
    kvd_buf_free(&s->queue);
    kvd_free(s);
}

/* ---- events -------------------------------------------------------------------------------- */

static void tell(tool_stream *s, kvd_tool_event_kind kind, const char *text, size_t len,
                 bool complete)
{
    const event e = {
        .kind = kind, .call = s->n_call, .off = s->out.len, .len = len, .complete = complete
    };

    kvd_buf_put(&s->out, text, len);
    kvd_buf_putc(&s->out, 0);
    if (!s->out.oom) /* else its text is not all there */
        kvd_buf_put(&s->queue, &e, sizeof(e));
}

/* The first n bytes of what is held are done. */
static void done(tool_stream *s, size_t n)
{
    if (n == 0)
        return;
    memmove(s->in.data, s->in.data + n, s->in.len - n);
    s->in.len -= n;
}

static void tell_text(tool_stream *s, size_t n)
{
    if (n == 0)
        return;
    tell(s, KVD_TOOL_EVENT_TEXT, s->in.data, n, false);
    s->started = true;
    s->behind  = false;
    done(s, n);
}

bool tool_stream_next(tool_stream *s, kvd_tool_event *out)
{
    event e;

    if (s->next == s->queue.len / sizeof(e))
        return false;
    memcpy(&e, s->queue.data + s->next++ * sizeof(e), sizeof(e));
    *out = (kvd_tool_event){ .struct_size = sizeof(*out),
                             .kind        = e.kind,
                             .call        = e.call,
                             .text        = s->out.data + e.off,
                             .len         = e.len,
                             .complete    = e.complete };
    return true;
}

/* ---- JSON, as far as it is here ----------------------------------------------------------------
 */

static bool is_white(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static size_t skip_white(const char *s, size_t len, size_t at)
{
    while (at < len && is_white(s[at]))
        at++;
    return at;
}

/* One byte of a value.  Returns 1: it belongs to it; 2: it is its last; 0: it is behind it. */
static int scan_byte(scan *v, char c)
{
    if (v->string) {
        const bool quote = c == '"' && !v->escape;

        v->escape = c == '\\' && !v->escape;
        v->string = !quote;
        return quote && v->depth == 0 ? 2 : 1;
    }
    if (v->depth == 0 && (is_white(c) || c == ',' || c == '}' || c == ']'))
        return 0;
    v->begun = true;
    if (c == '"')
        v->string = true;
    else if (c == '{' || c == '[')
        v->depth++;
    else if ((c == '}' || c == ']') && v->depth)
        return --v->depth == 0 ? 2 : 1;
    return 1;
}

typedef enum parse { MORE, BAD, GOOD } parse; /* MORE: it is not all there */

/* The end of the value at *at. */
static parse skip_value(const char *s, size_t len, size_t *at)
{
    scan v = { 0 };

    while (*at < len) {
        const int k = scan_byte(&v, s[*at]);

        if (k == 0)
            return v.begun ? GOOD : BAD;
        ++*at;
        if (k == 2)
            return GOOD;
    }
    return MORE;
}

static int hex_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* One escape behind a backslash: its code point; false: it is none. */
static bool escape_of(const char *s, size_t len, size_t *at, uint32_t *cp)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char        c     = s[(*at)++];
    const char       *found = c ? strchr(from, c) : NULL;

    if (found) {
        *cp = (unsigned char)to[found - from];
        return true;
    }
    *cp = 0;
    for (int i = 0; c == 'u' && i < 4; i++) {
        const int d = *at < len ? hex_of(s[*at]) : -1;

        if (d < 0)
            return false;
        *cp = *cp * 16 + (uint32_t)d;
        ++*at;
    }
    return c == 'u';
}

/* The string whose quote is at *at, decoded, at most MAX_NAME bytes of it. */
static parse read_string(const char *s, size_t len, size_t *at, char out[MAX_NAME + 8], size_t *n)
{
    size_t end = *at;
    parse  p   = end < len && s[end] != '"' ? BAD : skip_value(s, len, &end);

    *n = 0;
    if (p != GOOD)
        return p;
    for (++*at; *at + 1 < end;) {
        uint32_t cp = 0;

        if (*n > MAX_NAME)
            return BAD;
        if (s[*at] != '\\') {
            out[(*n)++] = s[(*at)++];
            continue;
        }
        ++*at;
        if (!escape_of(s, end - 1, at, &cp))
            return BAD;
        *n += utf8_encode(cp, out + *n);
    }
    *at = end;
    return GOOD;
}

typedef struct head {
    char   name[MAX_NAME + 8];
    size_t n_name;
    bool   named, has_args, closed; /* closed: the object has ended; then end is behind it */
    size_t args, args_end;          /* the value; args_end 0: it is where reading stopped */
    size_t end;
} head;

static bool is_key(const char *key, size_t n, const char *name)
{
    return n == strlen(name) && memcmp(key, name, n) == 0;
}

/* One member of the call's object; *stop: arguments begin at h->args and the name is known. */
static parse read_member(const char *s, size_t len, size_t *at, head *h, bool *stop)
{
    char   key[MAX_NAME + 8];
    size_t n;
    parse  p = read_string(s, len, at, key, &n);

    if (p != GOOD)
        return p;
    *at = skip_white(s, len, *at);
    if (*at < len && s[*at] != ':')
        return BAD;
    *at = skip_white(s, len, *at + 1);
    if (*at >= len)
        return MORE;
    if (s[*at] == ',' || s[*at] == '}' || s[*at] == ']')
        return BAD;
    if (is_key(key, n, "name") && !h->named) {
        p        = read_string(s, len, at, h->name, &h->n_name);
        h->named = p == GOOD;
        return p == GOOD && (h->n_name == 0 || h->n_name > MAX_NAME) ? BAD : p;
    }
    if (!h->has_args && (is_key(key, n, "arguments") || is_key(key, n, "parameters"))) {
        h->has_args = true;
        h->args     = *at;
        if (h->named) {
            *stop = true;
            return GOOD;
        }
        p           = skip_value(s, len, at);
        h->args_end = *at;
        return p;
    }
    return skip_value(s, len, at);
}

/* The object of a call from s on, up to its arguments if the name stands before them. */
static parse read_head(const char *s, size_t len, head *h)
{
    size_t at   = skip_white(s, len, 0);
    bool   stop = false;

    *h = (head){ 0 };
    if (at < len && s[at] != '{')
        return BAD;
    for (at++;;) {
        parse p;

        at = skip_white(s, len, at);
        if (at >= len)
            return MORE;
        if (s[at] == '}' && !h->named && !h->has_args)
            return BAD;
        if (s[at] != '}') {
            p = read_member(s, len, &at, h, &stop);
            if (p != GOOD || stop)
                return p;
            at = skip_white(s, len, at);
            if (at >= len)
                return MORE;
        }
        if (s[at] == '}') {
            h->closed = true;
            h->end    = at + 1;
            return h->named ? GOOD : BAD;
        }
        if (s[at++] != ',')
            return BAD;
    }
}

/* ---- states: each returns false when it needs more text
 * ---------------------------------------------- */

/* Where in held text the mark is, or the beginning of one at its end; in.len: nowhere. */
static size_t find_mark(const tool_stream *s, bool *whole)
{
    const char  *mark = tool_open_mark(s->format);
    const size_t len  = strlen(mark);
    const char  *hit  = s->in.len ? find(s->in.data, s->in.len, mark) : NULL;

    *whole = hit != NULL;
    if (hit)
        return (size_t)(hit - s->in.data);
    for (size_t n = kvd_min_u64(len - 1, s->in.len); n > 0; n--)
        if (memcmp(s->in.data + s->in.len - n, mark, n) == 0)
            return s->in.len - n;
    return s->in.len;
}

/* Llama 3: whether the answer, or what follows a call, begins with an object; then where. */
static bool bare_call(const tool_stream *s, size_t *at, bool *unsure)
{
    *unsure = false;
    if (s->format != KVD_TOOLS_LLAMA3 || (s->started && !s->behind))
        return false;
    *at = skip_white(s->in.data, s->in.len, 0);
    if (s->behind && *at < s->in.len && s->in.data[*at] == ';')
        *at = skip_white(s->in.data, s->in.len, *at + 1);
    *unsure = *at == s->in.len && *at < MAX_WHITE;
    return *at < s->in.len && *at < MAX_WHITE && s->in.data[*at] == '{';
}

static bool step_text(tool_stream *s)
{
    size_t at, text, white;
    bool   whole, unsure;

    if (bare_call(s, &at, &unsure)) {
        done(s, at);
        s->mode   = IN_HEAD;
        s->n_mark = 0;
        return true;
    }
    if (unsure)
        return false;
    text = find_mark(s, &whole);
    for (white = text; white && text - white < MAX_WHITE && is_white(s->in.data[white - 1]);)
        white--;
    tell_text(s, white);
    if (!whole)
        return false;
    done(s, text - white);
    s->mode   = IN_HEAD;
    s->n_mark = strlen(tool_open_mark(s->format));
    return true;
}

static void end_call(tool_stream *s, bool complete)
{
    tell(s, KVD_TOOL_EVENT_END, "", 0, complete);
    s->n_call++;
    s->started = true;
    s->behind  = true;
}

/* It was no call. */
static void give_up(tool_stream *s)
{
    s->mode = IN_TEXT;
    tell_text(s, s->n_mark ? s->n_mark : 1);
}

static bool step_head(tool_stream *s)
{
    head         h;
    const char  *from = s->in.data + s->n_mark;
    const size_t len  = kvd_min_u64(s->in.len - s->n_mark, MAX_HEAD);
    const parse  p    = read_head(from, len, &h);

    if (p == BAD || (p == MORE && len == MAX_HEAD)) {
        give_up(s);
        return true;
    }
    if (p == MORE)
        return false;
    tell(s, KVD_TOOL_EVENT_BEGIN, h.name, h.n_name, false);
    if (!h.closed) {
        done(s, s->n_mark + h.args);
        s->mode = IN_ARGS;
        s->scan = (scan){ 0 };
        return true;
    }
    if (h.has_args)
        tell(s, KVD_TOOL_EVENT_DELTA, from + h.args, h.args_end - h.args, false);
    else
        tell(s, KVD_TOOL_EVENT_DELTA, "{}", 2, false);
    done(s, s->n_mark + h.end);
    end_call(s, true);
    s->mode = IN_CLOSE;
    return true;
}

static bool step_args(tool_stream *s)
{
    size_t n = 0;
    int    k = 1;

    while (n < s->in.len && k == 1) {
        k = scan_byte(&s->scan, s->in.data[n]);
        n += k != 0;
    }
    if (n)
        tell(s, KVD_TOOL_EVENT_DELTA, s->in.data, n, false);
    done(s, n);
    if (k == 1)
        return false;
    s->mode = IN_TAIL;
    s->scan = (scan){ .depth = 1, .begun = true };
    return true;
}

/* Up to the end of the object; what else it says is dropped. */
static bool step_tail(tool_stream *s)
{
    for (size_t n = 0; n < s->in.len; n++)
        if (scan_byte(&s->scan, s->in.data[n]) == 2) {
            done(s, n + 1);
            end_call(s, true);
            s->mode = IN_CLOSE;
            return true;
        }
    done(s, s->in.len);
    return false;
}

static bool step_close(tool_stream *s)
{
    const char  *mark = tool_close_mark(s->format);
    const size_t len = strlen(mark), at = skip_white(s->in.data, s->in.len, 0);
    const size_t n = kvd_min_u64(s->in.len - at, len);

    s->mode = IN_TEXT;
    if (len == 0 || at > MAX_WHITE || memcmp(s->in.data + at, mark, n) != 0)
        return true;
    if (n < len) {
        s->mode = IN_CLOSE;
        return false;
    }
    done(s, at + len);
    return true;
}

static bool step(tool_stream *s)
{
    if (s->in.len == 0)
        return false;
    switch (s->mode) {
    case IN_TEXT:
        return step_text(s);
    case IN_HEAD:
        return step_head(s);
    case IN_ARGS:
        return step_args(s);
    case IN_TAIL:
        return step_tail(s);
    case IN_CLOSE:
        return step_close(s);
    }
    return false;
}

static kvd_status run(tool_stream *s, kvd_err *err)
{
    while (!s->in.oom && !s->out.oom && !s->queue.oom && step(s))
        continue;
    if (s->in.oom || s->out.oom || s->queue.oom)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tool calls: no memory for the text");
    return KVD_OK;
}

kvd_status tool_stream_feed(tool_stream *s, const char *text, size_t len, kvd_err *err)
{
    if (s->next == s->queue.len / sizeof(event))
        s->next = s->queue.len = s->out.len = 0;
    kvd_buf_put(&s->in, text, len);
    return run(s, err);
}

kvd_status tool_stream_flush(tool_stream *s, kvd_err *err)
{
    KVD_TRY(tool_stream_feed(s, "", 0, err));
    while (s->mode == IN_HEAD) {
        give_up(s);
        KVD_TRY(run(s, err));
    }
    if (s->mode == IN_ARGS || s->mode == IN_TAIL)
        end_call(s, s->mode == IN_TAIL);
    else if (!(s->behind && skip_white(s->in.data, s->in.len, 0) == s->in.len))
        tell_text(s, s->in.len);
    s->in.len  = 0;
    s->mode    = IN_TEXT;
    s->started = s->behind = false;
    if (s->out.oom || s->queue.oom)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tool calls: no memory for the text");
    return KVD_OK;
}

kvd_status tool_stream_cut(tool_stream *s, bool more, kvd_err *err)
{
    bool whole;

    KVD_TRY(tool_stream_feed(s, "", 0, err));
    if (s->mode == IN_HEAD || s->behind)
        s->in.len = 0;
    else if (s->mode == IN_TEXT && more)
        s->in.len = find_mark(s, &whole);
    if (s->mode == IN_HEAD)
        s->mode = IN_TEXT;
    return tool_stream_flush(s, err);
}
