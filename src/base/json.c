/* SPDX-License-Identifier: Apache-2.0 */
/* json.c - the reader and the writer of json.h.
 *
 * The reader is recursive descent over bytes.  It checks UTF-8 itself, so strings go to jansson
 * unchecked. */
#include "base/json.h"

#include <errno.h>
#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

/* ---- texts of numbers ------------------------------------------------------------------- */

static size_t slot_of(const kvd_json_texts *t, const json_t *v)
{
    size_t i = (size_t)((uint64_t)(uintptr_t)v * UINT64_C(0x9e3779b97f4a7c15) >> 20) & (t->cap - 1);

    while (t->slot[i].value && t->slot[i].value != v)
        i = (i + 1) & (t->cap - 1);
    return i;
}

static bool grow_texts(kvd_json_texts *t)
{
    const size_t   cap = t->cap ? 2 * t->cap : 16;
    kvd_json_texts all = { .slot = kvd_calloc(cap, sizeof(*all.slot)), .cap = cap };

    if (!all.slot)
        return false;
    for (size_t i = 0; i < t->cap; i++)
        if (t->slot[i].value)
            all.slot[slot_of(&all, t->slot[i].value)] = t->slot[i];
    kvd_free(t->slot);
    t->slot = all.slot;
    t->cap  = cap;
    return true;
}

static bool add_text(kvd_json_texts *t, json_t *v, const char *s, size_t len)
{
    const size_t offset = t->text.len;

    if (2 * t->n >= t->cap && !grow_texts(t))
        return false;
    kvd_buf_put(&t->text, s, len);
    kvd_buf_putc(&t->text, 0);
    if (t->text.oom)
        return false;
    t->slot[slot_of(t, v)] = (kvd_json_text){ .value = json_incref(v), .offset = offset };
    t->n++;
    return true;
}

void kvd_json_texts_free(kvd_json_texts *t)
{
    for (size_t i = 0; i < t->cap; i++)
        json_decref(t->slot[i].value);
    kvd_free(t->slot);
    kvd_buf_free(&t->text);
    *t = (kvd_json_texts){ 0 };
}

/* A double in the fewest digits that read back as it, with a point or an exponent. */
static void print_real(double x, char buf[KVD_JSON_NUMBER_BYTES])
{
    const char point = *localeconv()->decimal_point;
    char      *p;
    size_t     n;

    for (int digits = 15; digits <= 17; digits++) {
        snprintf(buf, KVD_JSON_NUMBER_BYTES, "%.*g", digits, x);
        if (strtod(buf, NULL) == x)
            break;
    }
    p = strchr(buf, point);
    if (p)
        *p = '.';
    n = strlen(buf);
    if (strspn(buf, "-0123456789") == n)
        memcpy(buf + n, ".0", 3);
}

const char *kvd_json_number(const kvd_json_texts *t, const json_t *v,
                            char buf[KVD_JSON_NUMBER_BYTES])
{
    const kvd_json_text *have = t && t->cap ? &t->slot[slot_of(t, v)] : NULL;

    if (have && have->value)
        return t->text.data + have->offset;
    if (json_is_integer(v))
        snprintf(buf, KVD_JSON_NUMBER_BYTES, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
    else
        print_real(json_real_value(v), buf);
    return buf;
}

bool kvd_json_decimal(const kvd_json_texts *t, const json_t *v, kvd_decimal *out)
{
    char buf[KVD_JSON_NUMBER_BYTES];

    return kvd_decimal_read(kvd_json_number(t, v, buf), out);
}

/* ---- reading ---------------------------------------------------------------------------- */

typedef struct reader {
    kvd_json_texts *t;
    const char     *s;
    size_t          len, pos;
    unsigned        flags;
    int             depth;
    kvd_buf         word; /* the string that is being read */
    kvd_json_error *e;
    bool            failed;
} reader;

static json_t *read_value(reader *r);

/* The first failure counts.  Always NULL. */
static void *fail(reader *r, const char *fmt, ...) KVD_PRINTF(2, 3);

static void *fail(reader *r, const char *fmt, ...)
{
    va_list ap;
    size_t  line = 0; /* where the last one begins */

    if (r->failed)
        return NULL;
    r->failed = true;
    *r->e     = (kvd_json_error){ .byte = r->pos, .line = 1 };
    for (size_t i = 0; i < r->pos; i++)
        if (r->s[i] == '\n') {
            line = i + 1;
            r->e->line++;
        }
    r->e->column = (uint32_t)(r->pos - line + 1);
    va_start(ap, fmt);
    vsnprintf(r->e->text, sizeof(r->e->text), fmt, ap);
    va_end(ap);
    return NULL;
}

static void *no_memory(reader *r)
{
    fail(r, "no memory for its values");
    r->e->no_memory = true;
    return NULL;
}

/* The byte at the place; 0 at the end, and for a zero byte, which is valid nowhere. */
static char here(const reader *r)
{
    return r->pos < r->len ? r->s[r->pos] : 0;
}

static char skip_blanks(reader *r)
{
    while (r->pos < r->len && r->s[r->pos] && strchr(" \t\n\r", r->s[r->pos]))
        r->pos++;
    return here(r);
}

static void *unexpected(reader *r, const char *wanted)
{
    const unsigned char c = (unsigned char)here(r);

    if (r->pos >= r->len)
        return fail(r, "it ends where %s is expected", wanted);
    if (c > ' ' && c < 127)
        return fail(r, "'%c' where %s is expected", c, wanted);
    return fail(r, "byte 0x%02x where %s is expected", c, wanted);
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool skip_digits(reader *r)
{
    if (!is_digit(here(r)))
        return unexpected(r, "a digit");
    while (is_digit(here(r)))
        r->pos++;
    return true;
}

/* The double next to a number's text, which may be of any length. */
static double to_double(reader *r, const char *s, size_t len)
{
    char  *end, *p;
    double x;

    r->word.len = 0;
    kvd_buf_put(&r->word, s, len);
    if (r->word.oom)
        return 0.0;
    p = strchr(r->word.data, '.');
    if (p)
        *p = *localeconv()->decimal_point; /* strtod() expects the locale's */
    x = strtod(r->word.data, &end);
    return x > DBL_MAX ? DBL_MAX : x < -DBL_MAX ? -DBL_MAX : x;
}

/* Goes behind a number; *whole: it has neither point nor exponent. */
static bool skip_number(reader *r, bool *whole)
{
    *whole = true;
    r->pos += here(r) == '-';
    if (here(r) == '0')
        r->pos++;
    else if (!skip_digits(r))
        return false;
    if (here(r) == '.') {
        *whole = false;
        r->pos++;
        if (!skip_digits(r))
            return false;
    }
    if (here(r) == 'e' || here(r) == 'E') {
        *whole = false;
        r->pos++;
        r->pos += here(r) == '+' || here(r) == '-';
        return skip_digits(r);
    }
    return true;
}

static json_t *read_number(reader *r)
{
    const char *s = r->s + r->pos;
    bool        whole;
    size_t      len;
    json_t     *v;

    if (!skip_number(r, &whole))
        return NULL;
    len = (size_t)(r->s + r->pos - s);
    if (whole && len < KVD_JSON_NUMBER_BYTES) {
        char      text[KVD_JSON_NUMBER_BYTES];
        long long n;

        memcpy(text, s, len);
        text[len] = 0;
        errno     = 0;
        n         = strtoll(text, NULL, 10);
        if (errno == 0 && !(n == 0 && *s == '-')) {
            v = json_integer(n);
            return v ? v : no_memory(r);
        }
    }
    v = json_real(to_double(r, s, len));
    if (r->word.oom || !v || !add_text(r->t, v, s, len)) {
        json_decref(v);
        return no_memory(r);
    }
    return v;
}

/* Bytes of the UTF-8 sequence at s, 2 or more; 0: it is none. */
static size_t sequence(const unsigned char *s, size_t len)
{
    const size_t n = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;

    if (s[0] < 0xc2 || s[0] > 0xf4 || len < n)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
        (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
        return 0; /* too long a form, a surrogate, beyond Unicode */
    return n;
}

/* Four hexadecimal digits. */
static bool read_hex(reader *r, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++, r->pos++) {
        const char c = here(r);

        if (is_digit(c))
            *out = *out * 16 + (uint32_t)(c - '0');
        else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))
            *out = *out * 16 + (uint32_t)((c | 32) - 'a' + 10);
        else
            return unexpected(r, "a hexadecimal digit");
    }
    return true;
}

static void put_utf8(kvd_buf *b, uint32_t cp)
{
    if (cp < 0x80) {
        kvd_buf_putc(b, (char)cp);
        return;
    }
    if (cp < 0x800) {
        kvd_buf_putc(b, (char)(0xc0 | cp >> 6));
    } else {
        if (cp < 0x10000) {
            kvd_buf_putc(b, (char)(0xe0 | cp >> 12));
        } else {
            kvd_buf_putc(b, (char)(0xf0 | cp >> 18));
            kvd_buf_putc(b, (char)(0x80 | (cp >> 12 & 0x3f)));
        }
        kvd_buf_putc(b, (char)(0x80 | (cp >> 6 & 0x3f)));
    }
    kvd_buf_putc(b, (char)(0x80 | (cp & 0x3f)));
}

/* Behind \u. */
static bool read_unicode(reader *r)
{
    uint32_t cp, low;

    if (!read_hex(r, &cp))
        return false;
    if (cp >= 0xdc00 && cp <= 0xdfff)
        return fail(r, "the second half of a surrogate pair alone");
    if (cp >= 0xd800 && cp <= 0xdbff) {
        if (here(r) != '\\' || r->pos + 1 >= r->len || r->s[r->pos + 1] != 'u')
            return fail(r, "the first half of a surrogate pair alone");
        r->pos += 2;
        if (!read_hex(r, &low))
            return false;
        if (low < 0xdc00 || low > 0xdfff)
            return fail(r, "the first half of a surrogate pair alone");
        cp = 0x10000 + ((cp & 0x3ff) << 10) + (low & 0x3ff);
    }
    if (cp == 0 && !(r->flags & KVD_JSON_NUL))
        return fail(r, "a zero byte in a string");
    put_utf8(&r->word, cp);
    return true;
}

/* Behind a backslash. */
static bool read_escape(reader *r)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char        c     = here(r);
    const char       *found = c ? strchr(from, c) : NULL;

    if (!found && c != 'u')
        return unexpected(r, "an escape");
    r->pos++;
    if (!found)
        return read_unicode(r);
    kvd_buf_putc(&r->word, to[found - from]);
    return true;
}

/* Goes behind bytes of a string that stand for themselves. */
static bool read_plain(reader *r)
{
    const unsigned char *s    = (const unsigned char *)r->s;
    const size_t         from = r->pos;

    while (r->pos < r->len && s[r->pos] >= ' ' && s[r->pos] != '"' && s[r->pos] != '\\') {
        const size_t n = s[r->pos] < 0x80 ? 1 : sequence(s + r->pos, r->len - r->pos);

        if (n == 0)
            return fail(r, "a string that is not UTF-8");
        r->pos += n;
    }
    kvd_buf_put(&r->word, s + from, r->pos - from);
    return true;
}

/* At a quote: the string is in r->word then. */
static bool read_string(reader *r)
{
    r->word.len = 0;
    r->pos++;
    while (read_plain(r)) {
        if (r->word.oom)
            return no_memory(r);
        if (here(r) == '"') {
            r->pos++;
            return true;
        }
        if (here(r) != '\\')
            return unexpected(r, "the rest of a string");
        r->pos++;
        if (!read_escape(r))
            return false;
    }
    return false;
}

static json_t *read_word(reader *r, const char *word, json_t *v)
{
    const size_t n = strlen(word);

    if (r->len - r->pos < n || memcmp(r->s + r->pos, word, n) != 0)
        return unexpected(r, "a value");
    r->pos += n;
    return v;
}

static json_t *read_array(reader *r)
{
    json_t *list = json_array(), *v;

    if (!list)
        return no_memory(r);
    r->pos++;
    if (skip_blanks(r) == ']') {
        r->pos++;
        return list;
    }
    for (;;) {
        v = read_value(r);
        if (!v || json_array_append_new(list, v) != 0) {
            json_decref(list);
            return v ? no_memory(r) : NULL;
        }
        if (skip_blanks(r) != ',')
            break;
        r->pos++;
    }
    if (here(r) == ']') {
        r->pos++;
        return list;
    }
    json_decref(list);
    return unexpected(r, "',' or ']'");
}

/* A key, its colon, its value. */
static bool read_member(reader *r, json_t *o)
{
    char   *key;
    size_t  len;
    json_t *v  = NULL;
    bool    ok = false;

    if (skip_blanks(r) != '"')
        return unexpected(r, "a key in quotes");
    if (!read_string(r))
        return false;
    len = r->word.len;
    if (len && memchr(r->word.data, 0, len))
        return fail(r, "a zero byte in a key");
    key = kvd_strndup(len ? r->word.data : "", len);
    if (!key)
        return no_memory(r);
    if (r->flags & KVD_JSON_UNIQUE && json_object_getn(o, key, len))
        fail(r, "duplicate key \"%.40s\"", key);
    else if (skip_blanks(r) != ':')
        unexpected(r, "':'");
    else {
        r->pos++;
        v  = read_value(r);
        ok = v && json_object_setn_new_nocheck(o, key, len, v) == 0;
        if (v && !ok)
            no_memory(r);
    }
    kvd_free(key);
    return ok;
}

static json_t *read_object(reader *r)
{
    json_t *o = json_object();

    if (!o)
        return no_memory(r);
    r->pos++;
    if (skip_blanks(r) == '}') {
        r->pos++;
        return o;
    }
    while (read_member(r, o)) {
        if (skip_blanks(r) == '}') {
            r->pos++;
            return o;
        }
        if (here(r) != ',') {
            unexpected(r, "',' or '}'");
            break;
        }
        r->pos++;
    }
    json_decref(o);
    return NULL;
}

static json_t *read_value(reader *r)
{
    const char c = skip_blanks(r);
    json_t    *v = NULL;

    if (++r->depth > KVD_JSON_MAX_DEPTH)
        return fail(r, "more than %d lists and objects in each other", KVD_JSON_MAX_DEPTH);
    if (c == '{')
        v = read_object(r);
    else if (c == '[')
        v = read_array(r);
    else if (c == '-' || is_digit(c))
        v = read_number(r);
    else if (c == 't')
        v = read_word(r, "true", json_true());
    else if (c == 'f')
        v = read_word(r, "false", json_false());
    else if (c == 'n')
        v = read_word(r, "null", json_null());
    else if (c != '"')
        unexpected(r, "a value");
    else if (read_string(r)) {
        v = json_stringn_nocheck(r->word.data ? r->word.data : "", r->word.len);
        if (!v)
            no_memory(r);
    }
    r->depth--;
    return v;
}

json_t *kvd_json_read(kvd_json_texts *t, const char *s, size_t len, unsigned flags,
                      kvd_json_error *e)
{
    kvd_json_error unused;
    reader         r = { .t = t, .s = s, .len = len, .flags = flags, .e = e ? e : &unused };
    json_t        *v = read_value(&r);

    if (v) {
        skip_blanks(&r);
        if (r.pos < len) {
            unexpected(&r, "the end");
            json_decref(v);
            v = NULL;
        }
    }
    kvd_buf_free(&r.word);
    return v;
}

/* ---- writing ---------------------------------------------------------------------------- */

static void put_string(const char *s, size_t len, kvd_buf *b)
{
    static const char name[] = "btn?fr"; /* of 8 .. 13 */
    size_t            from   = 0;

    kvd_buf_putc(b, '"');
    for (size_t i = 0; i < len; i++) {
        const unsigned char c = (unsigned char)s[i];

        if (c >= ' ' && c != '"' && c != '\\')
            continue;
        kvd_buf_put(b, s + from, i - from);
        from = i + 1;
        if (c == '"' || c == '\\')
            kvd_buf_printf(b, "\\%c", c);
        else if (c >= 8 && c <= 13 && c != 11)
            kvd_buf_printf(b, "\\%c", name[c - 8]);
        else
            kvd_buf_printf(b, "\\u%04X", c);
    }
    kvd_buf_put(b, s + from, len - from);
    kvd_buf_putc(b, '"');
}

static void put_object(const kvd_json_texts *t, const json_t *v, kvd_buf *b)
{
    json_t     *o = (json_t *)(uintptr_t)v; /* iterators want it so */
    const char *key;
    size_t      len;
    json_t     *one;
    char        before = '{';

    json_object_keylen_foreach(o, key, len, one)
    {
        kvd_buf_putc(b, before);
        put_string(key, len, b);
        kvd_buf_putc(b, ':');
        kvd_json_put(t, one, b);
        before = ',';
    }
    kvd_buf_puts(b, before == '{' ? "{}" : "}");
}

static void put_array(const kvd_json_texts *t, const json_t *v, kvd_buf *b)
{
    const size_t n = json_array_size(v);

    for (size_t i = 0; i < n; i++) {
        kvd_buf_putc(b, i ? ',' : '[');
        kvd_json_put(t, json_array_get(v, i), b);
    }
    kvd_buf_puts(b, n ? "]" : "[]");
}

void kvd_json_put(const kvd_json_texts *t, const json_t *v, kvd_buf *b)
{
    char number[KVD_JSON_NUMBER_BYTES];

    switch (json_typeof(v)) {
    case JSON_OBJECT:
        put_object(t, v, b);
        return;
    case JSON_ARRAY:
        put_array(t, v, b);
        return;
    case JSON_STRING:
        put_string(json_string_value(v), json_string_length(v), b);
        return;
    case JSON_TRUE:
    case JSON_FALSE:
        kvd_buf_puts(b, json_is_true(v) ? "true" : "false");
        return;
    case JSON_NULL:
        kvd_buf_puts(b, "null");
        return;
    default:
        kvd_buf_puts(b, kvd_json_number(t, v, number));
    }
}
