/* SPDX-License-Identifier: Apache-2.0 */
/* srv_prefill.c - a last message of the assistant's: the answer goes on with it.
 *
 * Behind the prompt of the messages before it comes what the message says, as text of a client:
 * reasoning inside of its marks, then the text.  The marks are the server's. */
#include <string.h>

#include "srv_fields.h"
#include "text/text.h"

void srv_prompt_free(srv_prompt *p)
{
    kvd_free(p->text);
    kvd_free(p->spans);
    *p = (srv_prompt){ 0 };
}

static json_t *reasoning_of(const json_t *m)
{
    json_t *r = srv_get(m, "reasoning_content");

    return r ? r : srv_get(m, "reasoning");
}

json_t *srv_take_prefill(srv_fields *f, json_t *messages)
{
    const size_t n    = json_array_size(messages) - 1;
    json_t      *last = json_array_get(messages, n);
    const char  *role = json_string_value(srv_get(last, "role"));
    bool         anew = true, on;

    srv_get_bool(f, f->root, "add_generation_prompt", &anew);
    on = anew && !f->no_prefill;
    srv_get_bool(f, f->root, "continue_final_message", &on);
    if (f->bad || !on || strcmp(role, "assistant") != 0 || srv_get(last, "tool_calls") ||
        (!json_string_length(srv_get(last, "content")) && !json_string_length(reasoning_of(last))))
        return NULL;
    if (n == 0) {
        srv_fields_bad(f, "messages",
                       "the only one is the assistant's: a message that is to be continued needs "
                       "one before it");
        return NULL;
    }
    json_incref(last);
    json_array_remove(messages, n);
    return last;
}

typedef struct part {
    const char *s, *end;
} part;

static part part_of(const json_t *v)
{
    const char *s = json_is_string(v) ? json_string_value(v) : "";

    return (part){ .s = s, .end = s + (json_is_string(v) ? json_string_length(v) : 0) };
}

static bool is_white(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static part trim(part p)
{
    while (p.s < p.end && is_white(*p.s))
        p.s++;
    while (p.s < p.end && is_white(p.end[-1]))
        p.end--;
    return p;
}

/* Where `what` is first in p; NULL: nowhere. */
static const char *find(part p, const char *what)
{
    const size_t n = strlen(what);

    for (; (size_t)(p.end - p.s) >= n; p.s++)
        if (memcmp(p.s, what, n) == 0)
            return p.s;
    return NULL;
}

/* Reasoning that stands in the text with its marks, as models write it. */
static void split(part *reasoning, part *text, kvd_reasoning form)
{
    const char *open = tool_reasoning_text(form, TOOL_REASONING_BEGIN);
    const char *shut = tool_reasoning_text(form, TOOL_REASONING_END);
    const char *end  = text->end, *at;
    part        all  = trim(*text);

    if (!*open || reasoning->s < reasoning->end || find(all, open) != all.s)
        return;
    all.s += strlen(open);
    at         = find(all, shut);
    *reasoning = at ? trim((part){ all.s, at }) : (part){ trim(all).s, end };
    *text      = at ? (part){ trim((part){ at + strlen(shut), end }).s, end } : (part){ end, end };
}

typedef struct writer {
    kvd_buf text, spans; /* spans: of kvd_span */
} writer;

static void put_mark(writer *w, const char *s)
{
    const kvd_span span = { .start = w->text.len, .end = w->text.len + strlen(s) };

    kvd_buf_puts(&w->text, s);
    if (*s)
        kvd_buf_put(&w->spans, &span, sizeof(span));
}

bool srv_add_prefill(srv_fields *f, const json_t *message, srv_prompt *p)
{
    const kvd_reasoning form      = kvd_chat_reasoning(f->s->model, "", 0, NULL);
    const char         *gap       = form == KVD_REASONING_HARMONY ? "" : "\n";
    part                reasoning = part_of(reasoning_of(message));
    part                text      = part_of(srv_get(message, "content"));
    writer              w         = { 0 };

    split(&reasoning, &text, form);
    kvd_buf_put(&w.text, p->text, p->len);
    kvd_buf_put(&w.spans, p->spans, p->n_span * sizeof(*p->spans));
    if (form != KVD_REASONING_NONE &&
        (reasoning.s < reasoning.end || p->state == KVD_REASONING_OPEN)) {
        if (p->state != KVD_REASONING_OPEN) {
            put_mark(&w, tool_reasoning_text(form, TOOL_REASONING_BEGIN));
            put_mark(&w, gap);
        }
        kvd_buf_put(&w.text, reasoning.s, (size_t)(reasoning.end - reasoning.s));
        p->state = KVD_REASONING_OPEN;
    }
    if (text.s < text.end && p->state == KVD_REASONING_OPEN) {
        put_mark(&w, gap);
        put_mark(&w, tool_reasoning_text(form, TOOL_REASONING_END));
        put_mark(&w, tool_reasoning_text(form, TOOL_REASONING_BEHIND));
        put_mark(&w, *gap ? "\n\n" : "");
    }
    if (text.s < text.end) {
        put_mark(&w, tool_reasoning_text(form, TOOL_REASONING_ANSWER));
        kvd_buf_put(&w.text, text.s, (size_t)(text.end - text.s));
        p->state = KVD_REASONING_CANNOT;
    }
    kvd_free(p->text);
    kvd_free(p->spans);
    p->n_span = w.spans.len / sizeof(*p->spans);
    p->len    = w.text.len;
    p->spans  = w.spans.oom ? NULL : (kvd_span *)(void *)w.spans.data;
    p->text   = kvd_buf_take(&w.text);
    if (!p->text || w.spans.oom) {
        kvd_buf_free(&w.spans);
        return srv_fields_full(f, "no memory for the prompt");
    }
    return true;
}
