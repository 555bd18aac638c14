/* SPDX-License-Identifier: Apache-2.0 */
/* srv_fields.c - bodies of requests: JSON with limits; fields by type and range. */
#include "srv_fields.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Values of a request, and lists and objects among them: the parser makes 50 to 250 bytes of each,
 * of which some have two in the text. */
#define VALUES_MAX (1u << 21)
#define LISTS_MAX  (1u << 18)

/* Counts the values of a text that is JSON, or its beginning that is; false: they are too many. */
static bool add_values(srv_fields *f, const char *s, size_t len)
{
    bool text = false;

    for (size_t i = 0; i < len; i++) {
        if (text && s[i] == '\\')
            i++;
        else if (s[i] == '"')
            text = !text;
        else if (!text) {
            f->n_value += s[i] == ',';
            f->n_list += s[i] == '[' || s[i] == '{';
        }
    }
    return f->n_value < VALUES_MAX && f->n_list <= LISTS_MAX;
}

/* The parser recurses: what is nested deeper than our limit never gets there.  Nor do zero bytes,
 * which it takes for ends. */
json_t *srv_parse_json(srv_fields *f, const char *text, size_t len)
{
    if (memchr(text, 0, len) || kvd_json_deeper(text, len, SRV_JSON_DEPTH) ||
        !add_values(f, text, len))
        return NULL;
    return kvd_json_read(&f->texts, text, len, KVD_JSON_NUL, NULL);
}

bool srv_fields_open(srv_fields *f, srv *s, srv_call *c)
{
    const kvd_buf *b = &c->body;
    kvd_json_error e;

    *f = (srv_fields){ .s = s, .reply = &c->reply };
    if (b->len == 0)
        return srv_fields_bad(f, NULL, "the body is empty: expected a JSON object");
    if (memchr(b->data, 0, b->len))
        return srv_fields_bad(f, NULL, "the body is not JSON: it has a zero byte");
    if (kvd_json_deeper(b->data, b->len, SRV_JSON_DEPTH))
        return srv_fields_bad(f, NULL, "the body is nested more than %u deep", SRV_JSON_DEPTH);
    if (!add_values(f, b->data, b->len))
        return srv_fields_bad(f, NULL, "the body has more than %u values, or %u lists and objects",
                              VALUES_MAX, LISTS_MAX);
    f->root = kvd_json_read(&f->texts, b->data, b->len, KVD_JSON_NUL, &e);
    if (!f->root && e.no_memory)
        return srv_fields_full(f, "no memory for what is in the request");
    if (!f->root)
        return srv_fields_bad(f, NULL, "the body is not JSON: %s (byte %zu)", e.text, e.byte);
    if (!json_is_object(f->root))
        return srv_fields_bad(f, NULL, "the body is not a JSON object");
    return true;
}

void srv_fields_close(srv_fields *f)
{
    json_decref(f->root);
    json_decref(f->offered);
    kvd_buf_free(&f->grammar_text);
    f->root = f->offered = NULL;
    kvd_json_texts_free(&f->texts);
}

/* The first mistake counts. */
static void fail(srv_fields *f, int status, const char *name, const char *fmt, va_list ap)
{
    char msg[400];

    if (f->bad)
        return;
    vsnprintf(msg, sizeof(msg), fmt, ap);
    f->bad = true;
    srv_reply_error(f->reply, status, name, NULL, "%s%s%s", name ? name : "", name ? ": " : "",
                    msg);
}

bool srv_fields_bad(srv_fields *f, const char *name, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    fail(f, 400, name, fmt, ap);
    va_end(ap);
    return false;
}

bool srv_fields_word(srv_fields *f, const char *name, const json_t *word, const char *known)
{
    if (!word)
        return srv_fields_bad(f, name, "is missing; supported here: %s", known);
    if (!json_is_string(word))
        return srv_fields_bad(f, name, "expected a string; supported here: %s", known);
    return srv_fields_bad(f, name, "\"%.40s\" is not supported here, only %s",
                          json_string_value(word), known);
}

srv_where srv_at(const char *fmt, ...)
{
    srv_where out;
    va_list   ap;

    va_start(ap, fmt);
    vsnprintf(out.s, sizeof(out.s), fmt, ap);
    va_end(ap);
    return out;
}

bool srv_fields_full(srv_fields *f, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    fail(f, 503, NULL, fmt, ap);
    va_end(ap);
    return false;
}

bool srv_fields_status(srv_fields *f, const char *name, kvd_status st, const kvd_err *err)
{
    const size_t n   = name ? strlen(name) : 0;
    const char  *msg = err->msg;

    if (st == KVD_E_NOMEM)
        return srv_fields_full(f, "%s", msg);
    if (n && strncmp(msg, name, n) == 0 && strncmp(msg + n, ": ", 2) == 0)
        msg += n + 2; /* the library's word for it is the field's name */
    return st == KVD_OK || srv_fields_bad(f, name, "%s", msg);
}

bool srv_put_json(srv_fields *f, const json_t *v, kvd_buf *b)
{
    kvd_json_put(&f->texts, v, b);
    return !b->oom || srv_fields_full(f, "no memory for what is in the request");
}

json_t *srv_get(const json_t *o, const char *name)
{
    json_t *v = json_object_get(o, name);

    return json_is_null(v) ? NULL : v;
}

json_t *srv_get_object(srv_fields *f, const json_t *o, const char *name)
{
    json_t *v = srv_get(o, name);

    if (v && !json_is_object(v))
        srv_fields_bad(f, name, "expected an object");
    return json_is_object(v) ? v : NULL;
}

void srv_get_bool(srv_fields *f, const json_t *o, const char *name, bool *out)
{
    const json_t *v = srv_get(o, name);

    if (v && !json_is_boolean(v))
        srv_fields_bad(f, name, "expected true or false");
    else if (v)
        *out = json_is_true(v);
}

void srv_get_int(srv_fields *f, const json_t *o, const char *name, int64_t min, int64_t max,
                 int64_t *out)
{
    const json_t *v = srv_get(o, name);
    char          text[KVD_JSON_NUMBER_BYTES];
    kvd_decimal   d;
    int64_t       x = 0;
    bool          read, fits;

    if (!v)
        return;
    read = json_is_number(v) && kvd_json_decimal(&f->texts, v, &d);
    fits = read && kvd_decimal_int64(&d, &x) && x >= min && x <= max;
    if (fits)
        *out = x;
    else if (!json_is_number(v) || (read && d.n_frac > 0))
        srv_fields_bad(f, name, "expected an integer");
    else /* also one that a client writes as 16.0 */
        srv_fields_bad(f, name, "%.40s is not in [%lld, %lld]", kvd_json_number(&f->texts, v, text),
                       (long long)min, (long long)max);
}

void srv_get_u32(srv_fields *f, const json_t *o, const char *name, uint32_t min, uint32_t max,
                 uint32_t *out)
{
    int64_t x = *out;

    srv_get_int(f, o, name, min, max, &x);
    *out = (uint32_t)x;
}

void srv_get_float(srv_fields *f, const json_t *o, const char *name, double min, double max,
                   float *out)
{
    const json_t *v = srv_get(o, name);
    const double  x = json_number_value(v);
    char          text[KVD_JSON_NUMBER_BYTES];

    if (!v)
        return;
    if (!json_is_number(v))
        srv_fields_bad(f, name, "expected a number");
    else if (!(x >= min && x <= max))
        srv_fields_bad(f, name, "%.40s is not in [%g, %g]", kvd_json_number(&f->texts, v, text),
                       min, max);
    else
        *out = (float)x;
}

/* ---- names ---------------------------------------------------------------------------------- */

/* A value is one of those in a list, by its compact JSON, or as the same number. */
static bool is_harmless(srv_fields *f, const json_t *v, const char *values)
{
    kvd_buf word = { 0 };
    bool    same = json_is_null(v) || strcmp(values, "*") == 0;
    bool    read = same || srv_put_json(f, v, &word);

    for (const char *s = values; read && *s && !same; s += strspn(s, " ")) {
        const size_t len = strcspn(s, " ");
        char        *end;

        same = len == word.len && memcmp(s, word.data, len) == 0;
        if (json_is_number(v) && strtod(s, &end) == json_number_value(v) && end == s + len)
            same = true;
        s += len;
    }
    kvd_buf_free(&word);
    return same;
}

static const srv_refused *find_refused(const srv_refused *list, uint32_t n, const char *name)
{
    for (uint32_t i = 0; i < n; i++)
        if (strcmp(list[i].name, name) == 0)
            return &list[i];
    return NULL;
}

void srv_check_names(srv_fields *f, const char *const *ok, uint32_t n_ok,
                     const srv_refused *refused, uint32_t n_refused)
{
    const char *name;
    json_t     *v;

    json_object_foreach(f->root, name, v)
    {
        const srv_refused *r;
        uint32_t           i = 0;

        while (i < n_ok && strcmp(ok[i], name) != 0)
            i++;
        if (i < n_ok)
            continue;
        r = find_refused(refused, n_refused, name);
        if (!r && f->asks)
            r = srv_find_other(name);
        if (!r)
            srv_log_unknown(f->s, name);
        else if (!is_harmless(f, v, r->harmless))
            srv_fields_bad(f, r->name, "is not supported here; %s", r->instead);
    }
}
