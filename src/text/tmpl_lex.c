/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_lex.c - template source to tokens, with Jinja's whitespace control as chat templates are
 * compiled: trim_blocks, lstrip_blocks, "-" and "+" markers, one trailing newline dropped.
 *
 * Invariant: src holds only "\n" as line end (the copy is normalised first) and is valid UTF-8. */
#include <string.h>

#include "text/tmpl_ast.h"

typedef struct lexer {
    tmpl       *t;
    kvd_err    *err;
    kvd_status  st;
    const char *src, *end, *p;
    uint32_t    line;
    bool        line_starting; /* what was consumed last ended a line */
    tmpl_token *tok;
    size_t      n, cap;
} lexer;

static void lex_fail(lexer *lx, const char *what)
{
    if (lx->st == KVD_OK)
        lx->st = kvd_fail(lx->err, KVD_E_INVAL, 0, "chat template line %u: %s", lx->line, what);
}

static void lex_oom(lexer *lx)
{
    if (lx->st == KVD_OK)
        lx->st = kvd_fail(lx->err, KVD_E_NOMEM, 0, "chat template: no memory to compile it");
}

static void lex_push(lexer *lx, tmpl_tok_kind kind, int op, const char *text, size_t len)
{
    if (lx->st != KVD_OK)
        return;
    if (lx->n == lx->cap) {
        const size_t cap   = lx->cap ? lx->cap * 2 : 256;
        tmpl_token  *grown = kvd_arena_calloc(&lx->t->mem, cap, sizeof(*grown));

        if (!grown) {
            lex_oom(lx);
            return;
        }
        if (lx->n)
            memcpy(grown, lx->tok, lx->n * sizeof(*grown));
        lx->tok = grown;
        lx->cap = cap;
    }
    lx->tok[lx->n++] =
        (tmpl_token){ .kind = kind, .op = op, .line = lx->line, .text = text, .len = len };
}

/* Moves on to q, counting lines. */
static void lex_advance(lexer *lx, const char *q)
{
    for (; lx->p < q; lx->p++)
        lx->line += *lx->p == '\n';
}

static const char *skip_space(const lexer *lx, const char *p)
{
    uint32_t cp;

    while (p < lx->end) {
        const size_t n = utf8_decode(p, (size_t)(lx->end - p), &cp);

        if (!tmpl_is_space(cp))
            break;
        p += n;
    }
    return p;
}

static bool starts(const lexer *lx, const char *p, const char *with)
{
    const size_t n = strlen(with);

    return (size_t)(lx->end - p) >= n && memcmp(p, with, n) == 0;
}

/* End of [p, q) without its trailing white space. */
static const char *strip_right(const char *p, const char *q)
{
    uint32_t cp;

    while (q > p) {
        const char *back = q - 1;

        while (back > p && ((unsigned char)*back & 0xc0) == 0x80)
            back--;
        utf8_decode(back, (size_t)(q - back), &cp);
        if (!tmpl_is_space(cp))
            break;
        q = back;
    }
    return q;
}

/* The text before a tag that begins at q with this sign: what of it is kept. */
static const char *text_end(const lexer *lx, const char *q, char sign, bool is_variable)
{
    const char *line = q, *bare;

    if (sign == '-')
        return strip_right(lx->p, q);
    if (sign == '+' || is_variable)
        return q;
    while (line > lx->p && line[-1] != '\n')
        line--;
    if (line == lx->p && !lx->line_starting)
        return q;
    bare = strip_right(line, q);
    return bare == line ? line : q;
}

/* After a closing delimiter of n bytes at q: where text goes on.  sign is what stood before. */
static const char *after_close(const lexer *lx, const char *q, size_t n, char sign, bool trim)
{
    q += n;
    if (sign == '-')
        return skip_space(lx, q);
    if (trim && sign != '+' && q < lx->end && *q == '\n')
        q++;
    return q;
}

static void close_at(lexer *lx, const char *q)
{
    lex_advance(lx, q);
    lx->line_starting = q > lx->src && q[-1] == '\n';
}

static char sign_at(const lexer *lx, const char *p)
{
    return p < lx->end && (*p == '-' || *p == '+') ? *p : 0;
}

/* {# ... #}: lx->p stands on it. */
static void lex_comment(lexer *lx)
{
    for (const char *q = lx->p + 2; q < lx->end; q++) {
        if (!starts(lx, q, "#}"))
            continue;
        close_at(lx, after_close(lx, q, 2, q > lx->p + 2 ? sign_at(lx, q - 1) : 0, true));
        return;
    }
    lex_fail(lx, "a comment is not closed");
}

/* {% raw %} at lx->p, whose tag ends at body. */
static void lex_raw(lexer *lx, const char *body)
{
    lex_advance(lx, body);
    lx->line_starting = false;
    for (const char *q = lx->p; q < lx->end; q++) {
        const char *c, sign = starts(lx, q, "{%") ? sign_at(lx, q + 2) : 0;
        char        close;

        if (!starts(lx, q, "{%"))
            continue;
        c = skip_space(lx, q + 2 + (sign != 0));
        if (!starts(lx, c, "endraw"))
            continue;
        c     = skip_space(lx, c + 6);
        close = sign_at(lx, c);
        c += close != 0;
        if (!starts(lx, c, "%}"))
            continue;
        lex_push(lx, TT_DATA, 0, lx->p, (size_t)(text_end(lx, q, sign, false) - lx->p));
        close_at(lx, after_close(lx, c, 2, close, true));
        return;
    }
    lex_fail(lx, "a raw block is not closed");
}

/* Whether the block tag at p opens a raw block; *body is where its text begins. */
static bool opens_raw(const lexer *lx, const char *p, const char **body)
{
    p = skip_space(lx, p + 2 + (sign_at(lx, p + 2) != 0));
    if (!starts(lx, p, "raw"))
        return false;
    p = skip_space(lx, p + 3);
    if (starts(lx, p, "-%}"))
        *body = skip_space(lx, p + 3);
    else if (starts(lx, p, "%}"))
        *body = p + 2;
    else
        return false;
    return true;
}

static bool is_name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           ((unsigned char)c & 0x80);
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* digit (_? digit)* of the base's digits; p itself if there is none. */
static const char *scan_digits(const lexer *lx, const char *p, const char *digits)
{
    const char *q = p;

    for (;;) {
        const char *d = q + (q > p && q < lx->end && *q == '_');

        if (d >= lx->end || *d == 0 || !strchr(digits, *d))
            return q;
        q = d + 1;
    }
}

static void lex_number(lexer *lx)
{
    static const char dec[]     = "0123456789";
    const char       *p         = lx->p, *q, *e;
    const bool        after_dot = p > lx->src && p[-1] == '.';

    if (*p == '0' && p + 1 < lx->end && strchr("bBoOxX", p[1]) && p[1]) {
        const char *digits = strchr("bB", p[1])   ? "01"
                             : strchr("oO", p[1]) ? "01234567"
                                                  : "0123456789abcdefABCDEF";
        const char *from   = p + 2 + (p + 2 < lx->end && p[2] == '_');

        q = scan_digits(lx, from, digits);
        if (q > from) {
            lex_push(lx, TT_INT, 0, p, (size_t)(q - p));
            lex_advance(lx, q);
            return;
        }
    }
    q = e = scan_digits(lx, p, dec);
    if (!after_dot && q + 1 < lx->end && *q == '.' && is_digit(q[1]))
        e = scan_digits(lx, q + 1, dec);
    if (!after_dot && e < lx->end && (*e == 'e' || *e == 'E')) {
        const char *x = e + 1;

        x += x < lx->end && (*x == '+' || *x == '-');
        if (x < lx->end && is_digit(*x))
            e = scan_digits(lx, x, dec);
    }
    if (e == q && *p == '0') /* a leading zero ends the number: 01 is two of them */
        e = q = scan_digits(lx, p, "0");
    lex_push(lx, e > q ? TT_FLOAT : TT_INT, 0, p, (size_t)(e - p));
    lex_advance(lx, e);
}

/* \ooo, \xhh, \uhhhh, \Uhhhhhhhh at p (after the backslash); 0: not one of them. */
static size_t number_escape(lexer *lx, const char *p, const char *end, uint32_t *cp)
{
    const size_t want = *p == 'x' ? 2 : *p == 'u' ? 4 : *p == 'U' ? 8 : 0;
    size_t       n    = 0;

    *cp = 0;
    if (*p >= '0' && *p <= '7') {
        for (; n < 3 && p + n < end && p[n] >= '0' && p[n] <= '7'; n++)
            *cp = *cp * 8 + (uint32_t)(p[n] - '0');
        return n;
    }
    if (!want)
        return 0;
    for (n = 1; n <= want; n++) {
        const char  c = p + n < end ? p[n] : 0;
        const char *d = c ? strchr("0123456789abcdef", c | 0x20) : NULL;

        if (!d || (c < '0')) {
            lex_fail(lx, "a string holds an unfinished escape");
            return 0;
        }
        *cp = *cp * 16 + (uint32_t)(d - "0123456789abcdef");
    }
    if (*cp > 0x10ffff || (*cp >= 0xd800 && *cp < 0xe000)) {
        lex_fail(lx, "a string holds an escape that is no character");
        return 0;
    }
    return want + 1;
}

/* The text of a string literal: Python's escapes undone. */
static void push_string(lexer *lx, const char *p, const char *end)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char             *out = kvd_arena_bytes(&lx->t->mem, (size_t)(end - p) + 1);
    size_t            n   = 0;

    if (!out) {
        lex_oom(lx);
        return;
    }
    while (p < end && lx->st == KVD_OK) {
        const char *known;
        uint32_t    cp;
        size_t      used;

        if (*p != '\\' || p + 1 >= end) {
            out[n++] = *p++;
            continue;
        }
        known = p[1] ? strchr(from, p[1]) : NULL;
        if (known) {
            out[n++] = to[known - from];
            p += 2;
        } else if (p[1] == '\n') {
            p += 2;
        } else if (p[1] == 'N') {
            lex_fail(lx, "\\N{...} in a string is not supported");
        } else if ((used = number_escape(lx, p + 1, end, &cp)) != 0) {
            n += utf8_encode(cp, out + n); /* never longer than its escape, \0 included */
            p += 1 + used;
        } else {
            out[n++] = *p++;
        }
    }
    lex_push(lx, TT_STR, 0, out, n);
}

static void lex_string(lexer *lx)
{
    const char quote = *lx->p;

    for (const char *q = lx->p + 1; q < lx->end; q++) {
        if (*q == '\\') {
            q++;
        } else if (*q == quote) {
            push_string(lx, lx->p + 1, q);
            lex_advance(lx, q + 1);
            return;
        }
    }
    lex_fail(lx, "a string is not closed");
}

static void lex_operator(lexer *lx, uint32_t *balance)
{
    static const char *const two[] = { "**", "//", "==", "!=", "<=", ">=" };
    const char               c     = *lx->p;

    for (size_t i = 0; i < KVD_COUNTOF(two); i++) {
        if (starts(lx, lx->p, two[i])) {
            lex_push(lx, TT_OP, TMPL_OP2(two[i][0], two[i][1]), lx->p, 2);
            lex_advance(lx, lx->p + 2);
            return;
        }
    }
    if (c == 0 || !strchr("+-/*%~[](){}><=.:|,;", c)) {
        lex_fail(lx, "an unexpected character in an expression");
        return;
    }
    if (strchr("([{", c))
        (*balance)++;
    else if (strchr(")]}", c) && (*balance)-- == 0)
        lex_fail(lx, "a bracket closes what was not opened");
    lex_push(lx, TT_OP, c, lx->p, 1);
    lex_advance(lx, lx->p + 1);
}

static void lex_name(lexer *lx)
{
    const char *q = lx->p;

    while (q < lx->end && is_name_char(*q))
        q++;
    lex_push(lx, TT_NAME, 0, lx->p, (size_t)(q - lx->p));
    lex_advance(lx, q);
}

/* If the tag closes at lx->p, moves past it. */
static bool lex_close(lexer *lx, bool is_variable)
{
    const char *delim = is_variable ? "}}" : "%}", *q = lx->p;
    const char  sign = sign_at(lx, q);

    if (sign == '+' && is_variable)
        return false;
    q += sign != 0;
    if (!starts(lx, q, delim))
        return false;
    lex_push(lx, is_variable ? TT_VAR_END : TT_BLOCK_END, 0, q, 2);
    close_at(lx, after_close(lx, q, 2, sign, !is_variable));
    return true;
}

/* The inside of a tag, up to and with its end. */
static void lex_tag(lexer *lx, bool is_variable)
{
    uint32_t balance = 0;

    while (lx->st == KVD_OK) {
        lex_advance(lx, skip_space(lx, lx->p));
        if (lx->p >= lx->end) {
            lex_fail(lx, "a tag is not closed");
            return;
        }
        if (balance == 0 && lex_close(lx, is_variable))
            return;
        if (is_digit(*lx->p))
            lex_number(lx);
        else if (is_name_char(*lx->p))
            lex_name(lx);
        else if (*lx->p == '"' || *lx->p == '\'')
            lex_string(lx);
        else
            lex_operator(lx, &balance);
    }
}

/* Text up to the next tag, and that tag. */
static void lex_piece(lexer *lx)
{
    const char *q = lx->p, *body, *keep;
    char        kind;

    while (q < lx->end &&
           !(*q == '{' && q + 1 < lx->end && (q[1] == '%' || q[1] == '{' || q[1] == '#')))
        q++;
    if (q >= lx->end) {
        lex_push(lx, TT_DATA, 0, lx->p, (size_t)(q - lx->p));
        lex_advance(lx, q);
        return;
    }
    kind = q[1];
    keep = text_end(lx, q, sign_at(lx, q + 2), kind == '{');
    if (keep > lx->p)
        lex_push(lx, TT_DATA, 0, lx->p, (size_t)(keep - lx->p));
    lex_advance(lx, q);
    if (kind == '#') {
        lex_comment(lx);
    } else if (kind == '%' && opens_raw(lx, q, &body)) {
        lex_raw(lx, body);
    } else {
        lex_push(lx, kind == '{' ? TT_VAR_BEGIN : TT_BLOCK_BEGIN, 0, q, 2);
        lex_advance(lx, q + 2 + (sign_at(lx, q + 2) != 0));
        lex_tag(lx, kind == '{');
    }
}

/* A copy of src with "\n" for every line end, the last of them dropped. */
static kvd_status normalise(lexer *lx, const char *src, size_t len)
{
    char  *out = kvd_arena_bytes(&lx->t->mem, len + 1);
    size_t n   = 0;

    if (!out) {
        lex_oom(lx);
        return lx->st;
    }
    for (size_t i = 0; i < len; i++) {
        out[n++] = src[i] == '\r' ? '\n' : src[i];
        if (src[i] == '\r' && i + 1 < len && src[i + 1] == '\n')
            i++;
    }
    if (n && out[n - 1] == '\n')
        n--;
    lx->src = lx->p = out;
    lx->end         = out + n;
    for (size_t i = 0; i < n;) {
        uint32_t     cp;
        const size_t used = utf8_decode(out + i, n - i, &cp);

        if (cp == 0xfffd && !(used == 3 && memcmp(out + i, "\xef\xbf\xbd", 3) == 0))
            return kvd_fail(lx->err, KVD_E_INVAL, 0, "chat template: byte %zu is not UTF-8", i);
        i += used;
    }
    return KVD_OK;
}

kvd_status tmpl_lex(tmpl *t, const char *src, size_t len, tmpl_token **out, kvd_err *err)
{
    lexer lx = { .t = t, .err = err, .line = 1, .line_starting = true };

    KVD_TRY(normalise(&lx, src, len));
    while (lx.st == KVD_OK && lx.p < lx.end)
        lex_piece(&lx);
    lex_push(&lx, TT_EOF, 0, lx.p, 0);
    *out = lx.tok;
    return lx.st;
}
