/* SPDX-License-Identifier: Apache-2.0 */
/* tok_split.c - the pre-tokenizers: where ordinary text is cut into words before merging.
 *
 * Each is published as a regular expression with backtracking; here each alternative is written
 * out with the result its backtracking leads to, so that any text is split in linear time:
 *
 *   gpt-2      's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *   smollm     every \p{N} on its own, then gpt-2 on each piece between
 *   llama-bpe  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}
 *              | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 *   qwen2      the same with \p{N} for \p{N}{1,3}
 *   gpt-4o     as llama-bpe with words in two shapes of case, a contraction as their suffix, and
 *              [\r\n/]* behind punctuation (see match_cased_word)
 *
 * \s is White_Space, \p{..} are general categories (Unicode version of utf8proc).  An invalid
 * byte counts as one U+FFFD, a symbol.
 * Stateless but for the splitter, any thread. */
#include "text/tok_impl.h"

#include <utf8proc.h>

enum char_class {
    C_LETTER  = 1,  /* L */
    C_NUMBER  = 2,  /* N */
    C_SPACE   = 4,  /* White_Space */
    C_NEWLINE = 8,  /* \r \n */
    C_UPPER   = 16, /* Lu Lt Lm Lo M: may stand in the first half of a cased word */
    C_LOWER   = 32  /* Ll Lm Lo M: in its second half */
};
#define C_WORD (C_LETTER | C_NUMBER | C_SPACE)

static const uint8_t ascii_class[128] = {
    ['\t'] = C_SPACE,
    ['\n'] = C_SPACE | C_NEWLINE,
    ['\v'] = C_SPACE,
    ['\f'] = C_SPACE,
    ['\r'] = C_SPACE | C_NEWLINE,
    [' ']  = C_SPACE,

    ['0' ... '9'] = C_NUMBER,
    ['A' ... 'Z'] = C_LETTER | C_UPPER,
    ['a' ... 'z'] = C_LETTER | C_LOWER,
};

static unsigned class_of(uint32_t cp)
{
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LT:
        return C_LETTER | C_UPPER;
    case UTF8PROC_CATEGORY_LL:
        return C_LETTER | C_LOWER;
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
        return C_LETTER | C_UPPER | C_LOWER;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
        return C_UPPER | C_LOWER;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        return C_NUMBER;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return C_SPACE;
    default:
        return cp == 0x85 ? C_SPACE : 0;
    }
}

/* Class and length of the character at pos; at the end class 0 and length 0. */
static inline unsigned class_at(const char *s, size_t pos, size_t end, size_t *len)
{
    uint32_t cp;

    if (pos >= end) {
        *len = 0;
        return 0;
    }
    if ((uint8_t)s[pos] < 0x80) {
        *len = 1;
        return ascii_class[(uint8_t)s[pos]];
    }
    *len = utf8_decode(s + pos, end - pos, &cp);
    return class_of(cp);
}

/* End of the run of characters of any of these classes. */
static size_t run_of(const char *s, size_t pos, size_t end, unsigned classes)
{
    size_t len;

    while (pos < end && (class_at(s, pos, end, &len) & classes))
        pos += len;
    return pos;
}

/* End of the run of characters of none of these classes. */
static size_t run_of_others(const char *s, size_t pos, size_t end, unsigned classes)
{
    size_t len;

    while (pos < end && !(class_at(s, pos, end, &len) & classes))
        pos += len;
    return pos;
}

/* 's|'t|'re|'ve|'m|'ll|'d: its end, or pos.  Without regard to case, U+017F is an s as well. */
static size_t match_contraction(const char *s, size_t pos, size_t end, bool any_case)
{
    static const char two[][3] = { "re", "ve", "ll" };
    const size_t      left     = end - pos;
    const uint8_t     fold     = any_case ? 0x20 : 0;

    if (left < 2 || s[pos] != '\'')
        return pos;
    const char a = (char)(s[pos + 1] | fold);
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return pos + 2;
    if (left < 3)
        return pos;
    const char b = (char)(s[pos + 2] | fold);
    for (size_t i = 0; i < KVD_COUNTOF(two); i++) {
        if (a == two[i][0] && b == two[i][1])
            return pos + 3;
    }
    if (any_case && s[pos + 1] == '\xc5' && s[pos + 2] == '\xbf')
        return pos + 3;
    return pos;
}

/* \s*[\r\n]+|\s+(?!\S)|\s+ at a white-space character: up to the last newline of the run if there
 * is one; else the run without its last character, which goes to the word behind; else all. */
static size_t match_space(const char *s, size_t pos, size_t end, bool newlines_apart)
{
    size_t p = pos, last = pos, newline_end = 0, len;

    for (;;) {
        const unsigned c = class_at(s, p, end, &len);

        if (!(c & C_SPACE))
            break;
        last = p;
        p += len;
        if (c & C_NEWLINE)
            newline_end = p;
    }
    if (newlines_apart && newline_end)
        return newline_end;
    return p == end || last == pos ? p : last;
}

static size_t next_gpt2(const char *s, size_t pos, size_t end)
{
    size_t   q = match_contraction(s, pos, end, false), len;
    unsigned c;

    if (q > pos)
        return q;
    q = pos + (s[pos] == ' ');
    c = class_at(s, q, end, &len);
    if (q == end || (c & C_SPACE))
        return match_space(s, pos, end, false);
    if (c & C_LETTER)
        return run_of(s, q, end, C_LETTER);
    if (c & C_NUMBER)
        return run_of(s, q, end, C_NUMBER);
    return run_of_others(s, q, end, C_WORD);
}

/* \p{N}{1,max} at a number. */
static size_t match_number(const char *s, size_t pos, size_t end, int max)
{
    size_t len;

    for (int i = 0; i < max && (class_at(s, pos, end, &len) & C_NUMBER); i++)
        pos += len;
    return pos;
}

/* ` ?[^\s\p{L}\p{N}]+[\r\n]*`, else white space. */
static size_t match_symbols(const char *s, size_t pos, size_t end, bool slashes)
{
    const size_t q = pos + (s[pos] == ' ');
    size_t       p, len;

    if (q == end || (class_at(s, q, end, &len) & C_WORD))
        return match_space(s, pos, end, true);
    p = run_of_others(s, q, end, C_WORD);
    while (p < end && (s[p] == '\r' || s[p] == '\n' || (slashes && s[p] == '/')))
        p++;
    return p;
}

static size_t next_llama3(const char *s, size_t pos, size_t end, int digits)
{
    size_t   q = match_contraction(s, pos, end, true), len, next_len;
    unsigned c;

    if (q > pos)
        return q;
    c = class_at(s, pos, end, &len);
    if (c & C_LETTER)
        return run_of(s, pos, end, C_LETTER);
    if (c & C_NUMBER)
        return match_number(s, pos, end, digits);
    if (!(c & C_NEWLINE) && (class_at(s, pos + len, end, &next_len) & C_LETTER))
        return run_of(s, pos + len, end, C_LETTER);
    return match_symbols(s, pos, end, false);
}

/* [upper]*[lower]+ from pos, its end or pos.  The greedy run of `upper` gives back characters
 * until one of them can be `lower`: that is the last caseless one in it, and nothing behind it. */
static size_t match_lower_word(const char *s, size_t pos, size_t end, size_t *upper_end)
{
    size_t p = pos, caseless_end = pos, len;

    for (;;) {
        const unsigned c = class_at(s, p, end, &len);

        if (!(c & C_UPPER))
            break;
        p += len;
        if (c & C_LOWER)
            caseless_end = p;
    }
    *upper_end = p;
    if (class_at(s, p, end, &len) & C_LOWER)
        return run_of(s, p, end, C_LOWER);
    return caseless_end;
}

/* With P = [^\r\n\p{L}\p{N}]?, U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}], W = [\p{Ll}\p{Lm}\p{Lo}\p{M}]
 * and S the contraction: PU*W+S?|PU+W*S?.  Its end, or pos. */
static size_t match_cased_word(const char *s, size_t pos, size_t end)
{
    size_t         len, upper_end;
    const unsigned c      = class_at(s, pos, end, &len);
    const bool     prefix = !(c & (C_NEWLINE | C_LETTER | C_NUMBER));
    const size_t   q      = pos + (prefix ? len : 0);
    size_t         p      = match_lower_word(s, q, end, &upper_end);

    if (p == q) {
        /* A mark is prefix and word: alone it still matches the first shape, which goes first. */
        if (prefix && (c & C_LOWER))
            return match_contraction(s, q, end, true);
        if (upper_end == q)
            return pos;
        p = upper_end; /* the second shape: nothing lower in sight */
    }
    return match_contraction(s, p, end, true);
}

static size_t next_gpt4o(const char *s, size_t pos, size_t end)
{
    const size_t p = match_cased_word(s, pos, end);
    size_t       len;

    if (p > pos)
        return p;
    if (class_at(s, pos, end, &len) & C_NUMBER)
        return match_number(s, pos, end, 3);
    return match_symbols(s, pos, end, true);
}

void tok_splitter_init(tok_splitter *sp, tok_split kind, const char *s, size_t len)
{
    *sp = (tok_splitter){ .kind = kind, .s = s, .end = len };
}

static size_t next_smollm(tok_splitter *sp)
{
    if (sp->pos >= sp->piece_end) {
        size_t len;

        if (class_at(sp->s, sp->pos, sp->end, &len) & C_NUMBER)
            return sp->pos + len;
        sp->piece_end = run_of_others(sp->s, sp->pos, sp->end, C_NUMBER);
    }
    return next_gpt2(sp->s, sp->pos, sp->piece_end);
}

size_t tok_splitter_next(tok_splitter *sp)
{
    size_t p = sp->pos;

    switch (sp->kind) {
    case SPLIT_GPT2:
        p = next_gpt2(sp->s, p, sp->end);
        break;
    case SPLIT_SMOLLM:
        p = next_smollm(sp);
        break;
    case SPLIT_LLAMA3:
        p = next_llama3(sp->s, p, sp->end, 3);
        break;
    case SPLIT_QWEN2:
        p = next_llama3(sp->s, p, sp->end, 1);
        break;
    case SPLIT_GPT4O:
        p = next_gpt4o(sp->s, p, sp->end);
        break;
    }
    sp->pos = p;
    return p;
}
