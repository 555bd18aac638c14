/* SPDX-License-Identifier: Apache-2.0 */
/* tool_stream.c - generated text to text, reasoning and tool calls, as it comes.
 *
 * What has come and is not told yet lies in `in`: white space that may stand before a mark, the
 * beginning of a mark, the head of a call up to its name and the beginning of its arguments, or a
 * parameter whose JSON is not whole.  JSON arguments pass through byte by byte, by a scanner that
 * knows strings and brackets.  Every decision depends on bytes seen alone, never on where the text
 * was cut.
 *
 * A call whose head is not that of its form, or longer than MAX_HEAD, was text: its first byte (its
 * mark, where it has one) is told as text, and the search goes on behind it. */
#include <string.h>

#include "base/json.h"
#include "text/tool_form.h"

#define MAX_HEAD  16384u
#define MAX_WHITE 256u /* dropped before a mark and behind a call */
#define MAX_MARKS 12

typedef enum mode {
    IN_TEXT,
    IN_THINK,
    IN_HEAD,
    IN_ARGS,  /* of the value of the arguments */
    IN_TAIL,  /* behind them, in the call's object */
    IN_PARAM, /* TOOL_PARAMS: between parameters */
    IN_VALUE, /* in a parameter */
    IN_CLOSE  /* behind the call: what ends it, what ends all */
} mode;

typedef enum mark_kind { MARK_NONE, MARK_OPEN, MARK_BEGIN, MARK_THINK, MARK_DROP } mark_kind;

typedef struct mark {
    mark_kind kind; /* OPEN: of a form whose calls have marks of their own behind it */
    tok_str   text;
} mark;

typedef struct event {
    kvd_tool_event_kind kind;
    uint32_t            call;
    size_t              off, len; /* in out; a zero is behind it */
    bool                complete;
} event;

struct tool_stream {
    const tool_form    *form;  /* NULL: there are no calls */
    const think_form   *think; /* NULL: no reasoning */
    kvd_reasoning_state state; /* of reasoning, at the beginning */
    mark                mark[MAX_MARKS];
    uint32_t            n_marks;
    json_t             *tools;  /* NULL: not given */
    const json_t       *params; /* schema of the arguments of the call that is read; NULL: none */

    mode      mode;
    kvd_buf   in, out, queue; /* queue: of event */
    size_t    next;           /* event */
    uint32_t  n_call, n_param;
    size_t    n_mark;   /* IN_HEAD: bytes before the call */
    mark_kind hit;      /* IN_HEAD: of which mark */
    bool      started;  /* text has been told, or a call */
    bool      behind;   /* only white space since a call */
    bool      fresh;    /* white space that comes next is dropped */
    bool      list;     /* the calls are a JSON array that is open */
    bool      ended;    /* IN_CLOSE: the call's own end has come */
    bool      is_text;  /* IN_VALUE: it is a string, and told as it comes */
    bool      begun;    /* IN_VALUE: a byte of the string has come */
    bool      finished; /* no more text comes: the beginning of a mark is none */
    tool_scan scan;
};

/* ---- open ------------------------------------------------------------------------------------ */

static void add_mark(tool_stream *s, mark_kind kind, const char *text)
{
    const tok_str t = tool_trim(text ? text : "");

    kvd_assert(s->n_marks < MAX_MARKS);
    if (t.len)
        s->mark[s->n_marks++] = (mark){ .kind = kind, .text = t };
}

static void find_marks(tool_stream *s)
{
    if (s->form) {
        add_mark(s, *s->form->begin ? MARK_OPEN : MARK_BEGIN, s->form->open);
        add_mark(s, MARK_BEGIN, s->form->begin);
        add_mark(s, MARK_BEGIN, s->form->also);
    }
    if (s->think && (s->state != KVD_REASONING_CANNOT || s->think->anywhere))
        add_mark(s, MARK_THINK, s->think->open);
    for (size_t i = 0; s->think && i < KVD_COUNTOF(s->think->drop); i++)
        add_mark(s, MARK_DROP, s->think->drop[i]);
}

/* As nothing had come; the prompt's end is the beginning of a mark where messages have heads. */
static void restart(tool_stream *s)
{
    s->mode    = s->think && s->state == KVD_REASONING_OPEN ? IN_THINK : IN_TEXT;
    s->fresh   = s->mode == IN_THINK;
    s->in.len  = 0;
    s->started = s->behind = s->list = s->ended = s->finished = false;
    if (s->think && s->think->anywhere && s->state == KVD_REASONING_MAY)
        kvd_buf_puts(&s->in, s->think->behind);
}

kvd_status tool_stream_open(tool_stream **out, const tool_desc *d, kvd_err *err)
{
    kvd_json_texts t = { 0 };
    tool_stream   *s;

    *out = NULL;
    if ((d->format != KVD_TOOLS_NONE && !tool_form_get(d->format)) ||
        (d->reasoning != KVD_REASONING_NONE && !think_form_get(d->reasoning)) ||
        (d->format == KVD_TOOLS_NONE && d->reasoning == KVD_REASONING_NONE))
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "tool calls: the format is not known");
    s = kvd_calloc(1, sizeof(*s));
    if (!s)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tool calls: no memory");
    s->form  = tool_form_get(d->format);
    s->think = think_form_get(d->reasoning);
    s->state = d->state;
    if (s->form && s->form->body == TOOL_PARAMS && d->tools_json &&
        !(s->tools = kvd_json_read(&t, d->tools_json, strlen(d->tools_json), KVD_JSON_NUL, NULL))) {
        kvd_json_texts_free(&t);
        tool_stream_close(s);
        return kvd_fail(err, KVD_E_INVAL, 0, "tool calls: the tools are not JSON");
    }
    kvd_json_texts_free(&t); /* of the tools' numbers, which nobody reads here */
    find_marks(s);
    restart(s);
    *out = s;
    return KVD_OK;
}

void tool_stream_close(tool_stream *s)
{
    if (!s)
        return;
    json_decref(s->tools);
    kvd_buf_free(&s->in);
    kvd_buf_free(&s->out);
    kvd_buf_free(&s->queue);
    kvd_free(s);
}

bool tool_stream_reasons(const tool_stream *s)
{
    return s->mode == IN_THINK;
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

/* The first n bytes of what is held are text. */
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

/* ---- marks in what is held --------------------------------------------------------------------
 */

/* Bytes of the text that s begins with. */
static size_t shared(const char *s, size_t len, tok_str text)
{
    size_t n = 0;

    while (n < len && n < text.len && s[n] == text.data[n])
        n++;
    return n;
}

/* Where the text is first, or its beginning at the end of what is held; in.len: nowhere. */
static size_t find_text(const tool_stream *s, tok_str text, bool *whole)
{
    for (size_t at = 0; at < s->in.len; at++) {
        const size_t n = shared(s->in.data + at, s->in.len - at, text);

        *whole = n == text.len;
        if (*whole || (at + n == s->in.len && !s->finished))
            return at;
    }
    *whole = false;
    return s->in.len;
}

/* Reasoning of most forms comes before everything else. */
static bool counts(const tool_stream *s, const mark *m, size_t at)
{
    return m->kind != MARK_THINK || s->think->anywhere ||
           (!s->started && tool_skip_white(s->in.data, at, 0) == at);
}

/* The longest mark at `at`; NULL: none.  *part: a longer one may begin here. */
static const mark *mark_at(const tool_stream *s, size_t at, bool *part)
{
    const char  *from = s->in.data + at;
    const size_t len  = s->in.len - at;
    const mark  *best = NULL;

    *part = false;
    for (uint32_t i = 0; i < s->n_marks; i++) {
        const mark  *m = &s->mark[i];
        const size_t n = shared(from, len, m->text);

        if (n == 0 || !counts(s, m, at))
            continue;
        if (n == m->text.len && (!best || n > best->text.len))
            best = m;
        *part = *part || (n == len && n < m->text.len && !s->finished);
    }
    return best;
}

/* Where in held text the first mark is, or the beginning of one at its end; in.len: nowhere.
 * *hit: the mark; NULL: it is not all there. */
static size_t find_mark(const tool_stream *s, const mark **hit)
{
    for (size_t at = 0; at < s->in.len; at++) {
        bool        part;
        const mark *m = mark_at(s, at, &part);

        *hit = part ? NULL : m;
        if (part || m)
            return at;
    }
    *hit = NULL;
    return s->in.len;
}

/* Held bytes before n that are white space at the end, at most MAX_WHITE. */
static size_t white_before(const tool_stream *s, size_t n)
{
    size_t k = 0;

    while (k < n && k < MAX_WHITE && tool_is_white(s->in.data[n - k - 1]))
        k++;
    return k;
}

/* ---- states: each returns false when it needs more text
 * ---------------------------------------------- */

/* Llama 3: whether the answer, or what follows a call, begins with an object; then where. */
static bool bare_call(const tool_stream *s, size_t *at, bool *unsure)
{
    *unsure = false;
    if (!s->form || !s->form->bare || (s->started && !s->behind))
        return false;
    *at = tool_skip_white(s->in.data, s->in.len, 0);
    if (s->behind && *at < s->in.len && s->in.data[*at] == ';')
        *at = tool_skip_white(s->in.data, s->in.len, *at + 1);
    *unsure = *at == s->in.len && *at < MAX_WHITE && !s->finished;
    return *at < s->in.len && *at < MAX_WHITE && s->in.data[*at] == '{';
}

static void begin_head(tool_stream *s, mark_kind hit, size_t n_mark)
{
    s->mode   = IN_HEAD;
    s->hit    = hit;
    s->n_mark = n_mark;
}

/* White space behind a mark of reasoning; false: there may be more. */
static bool drop_white(tool_stream *s)
{
    if (!s->fresh)
        return true;
    done(s, tool_skip_white(s->in.data, s->in.len, 0));
    s->fresh = s->in.len == 0;
    return !s->fresh;
}

static bool step_text(tool_stream *s)
{
    size_t      at, text, white;
    bool        unsure;
    const mark *m;

    if (!drop_white(s))
        return false;
    if (bare_call(s, &at, &unsure)) {
        done(s, at);
        begin_head(s, MARK_NONE, 0);
        return true;
    }
    if (unsure)
        return false;
    text  = find_mark(s, &m);
    white = white_before(s, text);
    tell_text(s, text - white);
    if (!m)
        return false;
    done(s, white);
    if (m->kind == MARK_OPEN || m->kind == MARK_BEGIN) {
        begin_head(s, m->kind, m->text.len);
        return true;
    }
    done(s, m->text.len);
    s->fresh = true;
    if (m->kind == MARK_THINK)
        s->mode = IN_THINK;
    return true;
}

static bool step_think(tool_stream *s)
{
    bool   whole;
    size_t text, white;

    if (!drop_white(s))
        return false;
    text  = find_text(s, tool_trim(s->think->close), &whole);
    white = white_before(s, text);
    if (text > white) {
        tell(s, KVD_TOOL_EVENT_REASONING, s->in.data, text - white, false);
        done(s, text - white);
    }
    if (!whole)
        return false;
    done(s, white + strlen(s->think->close));
    s->mode  = IN_TEXT;
    s->fresh = true;
    return true;
}

static void end_call(tool_stream *s, bool complete)
{
    tell(s, KVD_TOOL_EVENT_END, "", 0, complete);
    s->n_call++;
    s->started = true;
    s->behind  = true;
    s->ended   = false;
    s->mode    = IN_CLOSE;
}

/* It was no call. */
static void give_up(tool_stream *s)
{
    s->mode = IN_TEXT;
    s->list = false;
    tell_text(s, kvd_min_u64(s->n_mark ? s->n_mark : 1, s->in.len));
}

/* The head of a call whose first byte is held; *at: where it was read from. */
static tool_parse read_head(const tool_stream *s, size_t *at, bool *list, tool_head *h)
{
    const char  *in  = s->in.data;
    const size_t len = s->in.len;
    tool_parse   p   = TOOL_GOOD;

    *at   = s->n_mark;
    *list = false;
    if (s->hit == MARK_OPEN)
        p = tool_read_text(in, len, at, s->form->begin);
    if (p != TOOL_GOOD)
        return p;
    if (s->form->body == TOOL_OBJECT && s->hit != MARK_NONE) {
        const size_t k = tool_skip_white(in, len, *at);

        if (k == len)
            return TOOL_MORE;
        *list = in[k] == '[';
        *at   = *list ? k + 1 : *at;
    }
    switch (s->form->body) {
    case TOOL_OBJECT:
        return tool_read_object(in + *at, kvd_min_u64(len - *at, MAX_HEAD), h);
    case TOOL_NAMED:
        return tool_read_named(s->form, in + *at, kvd_min_u64(len - *at, MAX_HEAD), h);
    case TOOL_PARAMS:
        return tool_read_function(in + *at, kvd_min_u64(len - *at, MAX_HEAD), h);
    }
    return TOOL_BAD;
}

/* The schema of the function's arguments, where it was given. */
static const json_t *params_of(const tool_stream *s, const tool_head *h)
{
    size_t  i;
    json_t *tool;

    json_array_foreach(s->tools, i, tool)
    {
        json_t     *function = json_object_get(tool, "function");
        const char *name;

        function = function ? function : tool;
        name     = json_string_value(json_object_get(function, "name"));
        if (name && strlen(name) == h->n_name && memcmp(name, h->name, h->n_name) == 0)
            return json_object_get(function, "parameters");
    }
    return NULL;
}

static bool step_head(tool_stream *s)
{
    tool_head        h;
    size_t           at;
    bool             list;
    const tool_parse p = read_head(s, &at, &list, &h);

    if (p == TOOL_BAD || (p == TOOL_MORE && s->in.len - s->n_mark >= MAX_HEAD)) {
        give_up(s);
        return true;
    }
    if (p == TOOL_MORE)
        return false;
    s->list = s->list || list;
    tell(s, KVD_TOOL_EVENT_BEGIN, h.name, h.n_name, false);
    if (s->form->body == TOOL_PARAMS) {
        tell(s, KVD_TOOL_EVENT_DELTA, "{", 1, false);
        s->params  = params_of(s, &h);
        s->n_param = 0;
        s->mode    = IN_PARAM;
        done(s, at + h.args);
        return true;
    }
    if (!h.closed) {
        done(s, at + h.args);
        s->mode = IN_ARGS;
        s->scan = (tool_scan){ 0 };
        return true;
    }
    if (h.has_args)
        tell(s, KVD_TOOL_EVENT_DELTA, s->in.data + at + h.args, h.args_end - h.args, false);
    else
        tell(s, KVD_TOOL_EVENT_DELTA, "{}", 2, false);
    done(s, at + h.end);
    end_call(s, true);
    return true;
}

static bool step_args(tool_stream *s)
{
    size_t n = 0;
    int    k = 1;

    while (n < s->in.len && k == 1) {
        k = tool_scan_byte(&s->scan, s->in.data[n]);
        n += k != 0;
    }
    if (n)
        tell(s, KVD_TOOL_EVENT_DELTA, s->in.data, n, false);
    done(s, n);
    if (k == 1)
        return false;
    if (s->form->body == TOOL_NAMED) {
        end_call(s, true);
        return true;
    }
    s->mode = IN_TAIL;
    s->scan = (tool_scan){ .depth = 1, .begun = true };
    return true;
}

/* Up to the end of the object; what else it says is dropped. */
static bool step_tail(tool_stream *s)
{
    for (size_t n = 0; n < s->in.len; n++)
        if (tool_scan_byte(&s->scan, s->in.data[n]) == 2) {
            done(s, n + 1);
            end_call(s, true);
            return true;
        }
    done(s, s->in.len);
    return false;
}

/* ---- parameters ---------------------------------------------------------------------------------
 */

/* Bytes of a JSON string. */
static void put_escaped(const char *text, size_t len, kvd_buf *b)
{
    for (size_t i = 0; i < len; i++) {
        const unsigned char c = (unsigned char)text[i];

        if (c == '"' || c == '\\')
            kvd_buf_printf(b, "\\%c", c);
        else if (c == '\n')
            kvd_buf_puts(b, "\\n");
        else if (c < 0x20)
            kvd_buf_printf(b, "\\u%04x", c);
        else
            kvd_buf_putc(b, (char)c);
    }
}

/* More of the arguments: before, the text escaped, after. */
static void tell_string(tool_stream *s, const char *before, const char *text, size_t len,
                        const char *after)
{
    kvd_buf b = { 0 };

    kvd_buf_puts(&b, before);
    put_escaped(text, len, &b);
    kvd_buf_puts(&b, after);
    if (b.oom)
        s->out.oom = true;
    else if (b.len)
        tell(s, KVD_TOOL_EVENT_DELTA, b.data, b.len, false);
    kvd_buf_free(&b);
}

/* A parameter begins, its name ends at `end`. */
static void begin_value(tool_stream *s, size_t from, size_t end)
{
    const char   *name   = s->in.data + from;
    const json_t *schema = tool_param_schema(s->params, name, end - from);

    s->is_text = schema && tool_takes_text(schema);
    s->begun   = false;
    s->mode    = IN_VALUE;
    tell_string(s, s->n_param++ ? ", \"" : "\"", name, end - from, s->is_text ? "\": \"" : "\": ");
    done(s, end + 1);
}

static bool step_param(tool_stream *s)
{
    size_t           at = 0, end, close = 0;
    const tool_parse p = tool_read_text(s->in.data, s->in.len, &at, TOOL_PARAM_OPEN);
    const tool_parse q = tool_read_text(s->in.data, s->in.len, &close, TOOL_FUNCTION_CLOSE);

    if (q == TOOL_GOOD) {
        tell(s, KVD_TOOL_EVENT_DELTA, "}", 1, false);
        done(s, close);
        end_call(s, true);
        return true;
    }
    if (p == TOOL_GOOD) {
        for (end = at; end < s->in.len && s->in.data[end] != '>' && end - at <= TOOL_NAME_MAX;)
            end++;
        if (end == s->in.len)
            return false;
        if (s->in.data[end] == '>')
            begin_value(s, at, end);
        else
            done(s, at);
        return true;
    }
    if (p == TOOL_MORE || q == TOOL_MORE)
        return false;
    done(s, 1); /* nothing that belongs here */
    return true;
}

/* One newline at each end belongs to the form. */
static bool step_text_value(tool_stream *s)
{
    bool   whole;
    size_t text, n;

    if (!s->begun && s->in.data[0] == '\n')
        done(s, 1);
    s->begun = true;
    text     = find_text(s, tool_trim(TOOL_PARAM_CLOSE), &whole);
    n        = text && s->in.data[text - 1] == '\n' ? text - 1 : text;
    tell_string(s, "", s->in.data, n, whole ? "\"" : "");
    done(s, whole ? text + strlen(TOOL_PARAM_CLOSE) : n);
    s->mode = whole ? IN_PARAM : IN_VALUE;
    return whole;
}

static bool step_value(tool_stream *s)
{
    kvd_json_texts t = { 0 };
    bool           whole;
    size_t         from, end, text;
    json_t        *v;

    if (s->is_text)
        return step_text_value(s);
    text = find_text(s, tool_trim(TOOL_PARAM_CLOSE), &whole);
    if (!whole)
        return false;
    from = tool_skip_white(s->in.data, text, 0);
    for (end = text; end > from && tool_is_white(s->in.data[end - 1]);)
        end--;
    v = kvd_json_read(&t, s->in.data + from, end - from, KVD_JSON_NUL, NULL);
    if (v)
        tell(s, KVD_TOOL_EVENT_DELTA, s->in.data + from, end - from, false);
    else
        tell_string(s, "\"", s->in.data + from, end - from, "\"");
    json_decref(v);
    kvd_json_texts_free(&t);
    done(s, text + strlen(TOOL_PARAM_CLOSE));
    s->mode = IN_PARAM;
    return true;
}

/* ---- behind a call ------------------------------------------------------------------------------
 */

/* A text that may come here: TOOL_GOOD if it has come and is done, TOOL_BAD if it has not. */
static tool_parse read_end(tool_stream *s, const char *text)
{
    size_t     at = 0;
    tool_parse p  = TOOL_BAD;

    if (*text && tool_skip_white(s->in.data, s->in.len, 0) <= MAX_WHITE)
        p = tool_read_text(s->in.data, s->in.len, &at, text);
    if (p == TOOL_GOOD)
        done(s, at);
    return p;
}

static bool step_close(tool_stream *s)
{
    tool_parse p = s->ended ? TOOL_BAD : read_end(s, s->form->end);

    if (p == TOOL_MORE)
        return false;
    s->ended = true;
    if (s->list) {
        p = read_end(s, ",");
        if (p == TOOL_GOOD)
            begin_head(s, MARK_NONE, 0);
        if (p == TOOL_BAD)
            p = read_end(s, "]");
        if (p == TOOL_GOOD && s->mode == IN_CLOSE) {
            s->list  = false;
            s->ended = false; /* Hermes: the end behind the list */
            return true;
        }
        if (p != TOOL_BAD)
            return p == TOOL_GOOD;
        s->list = false;
    }
    p = *s->form->list ? TOOL_BAD : read_end(s, s->form->close);
    if (p == TOOL_MORE)
        return false;
    s->mode = IN_TEXT;
    return true;
}

static bool step(tool_stream *s)
{
    if (s->in.len == 0)
        return false;
    switch (s->mode) {
    case IN_TEXT:
        return step_text(s);
    case IN_THINK:
        return step_think(s);
    case IN_HEAD:
        return step_head(s);
    case IN_ARGS:
        return step_args(s);
    case IN_TAIL:
        return step_tail(s);
    case IN_PARAM:
        return step_param(s);
    case IN_VALUE:
        return step_value(s);
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

/* What is held is told as what it is. */
static void tell_rest(tool_stream *s)
{
    const size_t white = white_before(s, s->in.len);

    if (s->mode == IN_ARGS || s->mode == IN_TAIL || s->mode == IN_PARAM || s->mode == IN_VALUE)
        end_call(s, s->mode == IN_TAIL);
    else if (s->mode == IN_THINK && s->in.len > white)
        tell(s, KVD_TOOL_EVENT_REASONING, s->in.data, s->in.len - white, false);
    else if (s->mode != IN_THINK && !s->fresh &&
             !(s->behind && tool_skip_white(s->in.data, s->in.len, 0) == s->in.len))
        tell_text(s, s->in.len);
}

kvd_status tool_stream_flush(tool_stream *s, kvd_err *err)
{
    s->finished = true;
    KVD_TRY(tool_stream_feed(s, "", 0, err));
    while (s->mode == IN_HEAD) {
        give_up(s);
        KVD_TRY(run(s, err));
    }
    tell_rest(s);
    restart(s);
    if (s->in.oom || s->out.oom || s->queue.oom)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tool calls: no memory for the text");
    return KVD_OK;
}

/* What may be the beginning of a mark is none of the text that is left. */
static void drop_part(tool_stream *s)
{
    const mark *m;
    bool        whole;

    if (s->mode == IN_TEXT)
        s->in.len = find_mark(s, &m);
    else if (s->mode == IN_THINK)
        s->in.len = find_text(s, tool_trim(s->think->close), &whole);
}

kvd_status tool_stream_cut(tool_stream *s, bool more, kvd_err *err)
{
    KVD_TRY(tool_stream_feed(s, "", 0, err));
    if (s->mode == IN_HEAD || (s->behind && s->mode != IN_THINK))
        s->in.len = 0;
    else if (more)
        drop_part(s);
    if (s->mode == IN_HEAD)
        s->mode = IN_TEXT;
    return tool_stream_flush(s, err);
}
