/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_json.c - a file's whole content as one JSON object, for kvd_inspect() and diagnosis.
 *
 * {"files":[{"path","bytes"}], "version", "header_bytes", "tensor_bytes",
 *  "metadata":{KEY: value}, "tensors":[{"name","type","shape","file","offset","bytes"}]}
 * Arrays of more than 16 elements become {"array":TYPE,"count":N,"first":[16 of them]}.
 * Integers beyond INT64_MAX, infinities and NaN are strings.  Strings are bytes from outside: what
 * is not UTF-8 becomes U+FFFD.  Any thread. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/gguf_impl.h"

#define ARRAY_MAX 16u

/* Length of the UTF-8 sequence that begins at s, 0 if it is not one: no overlong forms, no
 * surrogates, nothing beyond U+10FFFF. */
static size_t utf8_len(const unsigned char *s, uint64_t len)
{
    unsigned char low = 0x80, high = 0xbf;
    size_t        n;

    if (s[0] < 0x80)
        return 1;
    if (s[0] < 0xc2 || s[0] > 0xf4)
        return 0;
    n = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (s[0] == 0xe0)
        low = 0xa0;
    if (s[0] == 0xed)
        high = 0x9f;
    if (s[0] == 0xf0)
        low = 0x90;
    if (s[0] == 0xf4)
        high = 0x8f;
    if (n > len || s[1] < low || s[1] > high)
        return 0;
    for (size_t i = 2; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    }
    return n;
}

static void put_str(kvd_buf *b, const char *data, uint64_t len)
{
    const unsigned char *s    = (const unsigned char *)data;
    uint64_t             done = 0; /* bytes before it are in b */

    kvd_buf_putc(b, '"');
    for (uint64_t i = 0; i < len && !b->oom;) {
        const size_t n = utf8_len(s + i, len - i);

        if (n && s[i] >= ' ' && s[i] != '"' && s[i] != '\\' && s[i] != 0x7f) {
            i += n;
            continue;
        }
        kvd_buf_put(b, s + done, i - done);
        if (n == 0)
            kvd_buf_puts(b, "\xef\xbf\xbd");
        else if (s[i] == '\n')
            kvd_buf_puts(b, "\\n");
        else if (s[i] == '"' || s[i] == '\\')
            kvd_buf_printf(b, "\\%c", s[i]);
        else
            kvd_buf_printf(b, "\\u%04x", s[i]);
        done = ++i;
    }
    kvd_buf_put(b, s + done, len - done);
    kvd_buf_putc(b, '"');
}

/* The shortest text that reads back as v, a float if single.  JSON has no infinities. */
static void put_f64(kvd_buf *b, double v, bool single)
{
    char  text[40];
    char *comma;

    if (!isfinite(v)) {
        kvd_buf_puts(b, isnan(v) ? "\"nan\"" : v > 0 ? "\"inf\"" : "\"-inf\"");
        return;
    }
    for (int digits = single ? 6 : 15; digits <= (single ? 9 : 17); digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, v);
        if (single ? strtof(text, NULL) == (float)v : strtod(text, NULL) == v)
            break;
    }
    comma = strchr(text, ','); /* the program's locale may write one */
    if (comma)
        *comma = '.';
    kvd_buf_puts(b, text);
}

static void put_value(kvd_buf *b, const gguf_kv *kv, uint64_t i)
{
    gguf_str s;
    uint64_t u;
    int64_t  n;
    double   f;
    bool     yes;

    if (gguf_kv_str(kv, i, &s))
        put_str(b, s.data, s.len);
    else if (gguf_kv_bool(kv, i, &yes))
        kvd_buf_puts(b, yes ? "true" : "false");
    else if (gguf_kv_i64(kv, i, &n))
        kvd_buf_printf(b, "%" PRId64, n);
    else if (gguf_kv_u64(kv, i, &u)) /* beyond what JSON readers take as an integer */
        kvd_buf_printf(b, "\"%" PRIu64 "\"", u);
    else if (gguf_kv_f64(kv, i, &f))
        put_f64(b, f, gguf_kv_elem_type(kv) == GGUF_F32);
}

static void put_kv(kvd_buf *b, const gguf_kv *kv)
{
    const uint64_t n    = gguf_kv_count(kv);
    const bool     many = n > ARRAY_MAX;

    if (gguf_kv_type(kv) != GGUF_ARRAY) {
        put_value(b, kv, 0);
        return;
    }
    if (many)
        kvd_buf_printf(b, "{\"array\":\"%s\",\"count\":%" PRIu64 ",\"first\":",
                       gguf_type_name(gguf_kv_elem_type(kv)), n);
    for (uint64_t i = 0; i < kvd_min_u64(n, ARRAY_MAX); i++) {
        kvd_buf_putc(b, i ? ',' : '[');
        put_value(b, kv, i);
    }
    kvd_buf_puts(b, n ? "]" : "[]");
    if (many)
        kvd_buf_putc(b, '}');
}

static void put_tensor(kvd_buf *b, const gguf_tensor *t)
{
    kvd_buf_puts(b, "{\"name\":");
    put_str(b, t->name.data, t->name.len);
    kvd_buf_printf(b, ",\"type\":\"%s\",\"shape\":", kvd_dtype_name(t->type_id));
    for (uint32_t i = 0; i < t->n_dim; i++)
        kvd_buf_printf(b, "%c%" PRIu64, i ? ',' : '[', t->dim[i]);
    kvd_buf_printf(b, "],\"file\":%" PRIu32 ",\"offset\":%" PRIu64, t->split, t->offset);
    if (t->data)
        kvd_buf_printf(b, ",\"bytes\":%" PRIu64 "}", t->bytes);
    else
        kvd_buf_puts(b, ",\"bytes\":null}");
}

void gguf_to_json(const gguf_file *g, kvd_buf *b)
{
    kvd_buf_puts(b, "{\"files\":[");
    for (uint32_t i = 0; i < g->n_part; i++) {
        kvd_buf_puts(b, i ? ",{\"path\":" : "{\"path\":");
        put_str(b, g->part[i].path, strlen(g->part[i].path));
        kvd_buf_printf(b, ",\"bytes\":%" PRIu64 "}", g->part[i].map.bytes);
    }
    kvd_buf_printf(b,
                   "],\"version\":%" PRIu32 ",\"header_bytes\":%" PRIu64
                   ",\"tensor_bytes\":%" PRIu64 ",\n\"metadata\":{",
                   gguf_version(g), gguf_header_bytes(g), gguf_tensor_bytes(g));
    for (uint64_t i = 0; i < gguf_n_kv(g); i++) {
        const gguf_kv *kv = gguf_kv_at(g, i);

        kvd_buf_puts(b, i ? ",\n" : "\n");
        put_str(b, kv->key.data, kv->key.len);
        kvd_buf_putc(b, ':');
        put_kv(b, kv);
    }
    kvd_buf_puts(b, "},\n\"tensors\":[");
    for (uint64_t i = 0; i < gguf_n_tensor(g); i++) {
        kvd_buf_puts(b, i ? ",\n" : "\n");
        put_tensor(b, gguf_tensor_at(g, i));
    }
    kvd_buf_puts(b, "]}\n");
}
