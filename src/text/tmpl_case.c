/* SPDX-License-Identifier: Apache-2.0 */
/* tmpl_case.c - upper and lower case, and what kind of letters a string is made of.
 *
 * One code point maps to one, except sharp s and the dotted capital I; Python's other mappings to
 * several letters (ligatures) and its final sigma are not followed.  A byte's provenance is that of
 * the letter it was made from. */
#include <string.h>
#include <utf8proc.h>

#include "text/tmpl_builtin.h"

static uint32_t map_one(uint32_t cp, bool upper)
{
    if (cp < 0x80)
        return upper ? (cp >= 'a' && cp <= 'z' ? cp - 32 : cp)
                     : (cp >= 'A' && cp <= 'Z' ? cp + 32 : cp);
    return (uint32_t)(upper ? utf8proc_toupper((utf8proc_int32_t)cp)
                            : utf8proc_tolower((utf8proc_int32_t)cp));
}

/* Writes the mapped letter; at most two code points. */
static size_t map_letter(uint32_t cp, bool upper, bool title, char out[8])
{
    if (upper && cp == 0xdf) {
        memcpy(out, title ? "Ss" : "SS", 2);
        return 2;
    }
    if (!upper && cp == 0x130) {
        memcpy(out, "i\xcc\x87", 3);
        return 3;
    }
    if (title && cp >= 0x80)
        return utf8_encode((uint32_t)utf8proc_totitle((utf8proc_int32_t)cp), out);
    return utf8_encode(map_one(cp, upper), out);
}

static bool is_upper(uint32_t cp)
{
    const utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);

    return c == UTF8PROC_CATEGORY_LU;
}

static bool is_lower(uint32_t cp)
{
    return utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_LL || cp == 0xaa ||
           cp == 0xba;
}

static bool is_cased(uint32_t cp)
{
    return is_upper(cp) || is_lower(cp) ||
           utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_LT;
}

/* Whether a word begins after cp: for the filter after certain signs, for the method after
 * whatever is no letter. */
static bool ends_word(uint32_t cp, tmpl_case how)
{
    if (how == TMPL_TITLE)
        return !is_cased(cp);
    return how == TMPL_TITLE_FILTER &&
           (tmpl_is_space(cp) || (cp < 0x80 && strchr("-({[<", (int)cp) && cp));
}

tmpl_val tmpl_str_case(tmpl_run *r, const tmpl_str *s, tmpl_case how)
{
    bool    first = true;
    tmpl_sb sb;

    tmpl_sb_init(&sb, r);
    for (size_t i = 0; i < s->len && tmpl_step(r, i % 4 == 0);) {
        uint32_t     cp;
        const size_t n     = utf8_decode(s->data + i, s->len - i, &cp);
        const bool   title = how != TMPL_UPPER && how != TMPL_LOWER && first;
        char         out[8];
        const size_t m = map_letter(cp, how == TMPL_UPPER || title, title, out);

        tmpl_sb_put(&sb, out, m, tmpl_str_trusted(s, i, i + n));
        first = ends_word(cp, how);
        i += n;
    }
    return tmpl_sb_take(&sb);
}

typedef struct letter_kind {
    const char *what;
    bool (*is)(uint32_t cp);
} letter_kind;

static bool is_alpha(uint32_t cp)
{
    const utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);

    return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

static bool is_decimal(uint32_t cp)
{
    return utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_ND;
}

static bool is_digit(uint32_t cp)
{
    return is_decimal(cp) || cp == 0xb2 || cp == 0xb3 || cp == 0xb9 || cp == 0x2070 ||
           (cp >= 0x2074 && cp <= 0x2079) || (cp >= 0x2080 && cp <= 0x2089);
}

static bool is_alnum(uint32_t cp)
{
    const utf8proc_category_t c = utf8proc_category((utf8proc_int32_t)cp);

    return is_alpha(cp) || is_digit(cp) || c == UTF8PROC_CATEGORY_NL || c == UTF8PROC_CATEGORY_NO;
}

static bool is_ascii(uint32_t cp)
{
    return cp < 0x80;
}

/* islower() and isupper(): no letter of the other case, and one of this at least. */
static bool all_cased(tmpl_run *r, const tmpl_str *s, bool (*want)(uint32_t))
{
    bool any = false;

    for (size_t i = 0; i < s->len && tmpl_step(r, i % 4 == 0);) {
        uint32_t cp;

        i += utf8_decode(s->data + i, s->len - i, &cp);
        if (is_cased(cp) && !want(cp))
            return false;
        any = any || want(cp);
    }
    return any;
}

bool tmpl_str_all(tmpl_run *r, const tmpl_str *s, const char *what)
{
    static const letter_kind kind[] = {
        { "alpha", is_alpha }, { "alnum", is_alnum },      { "decimal", is_decimal },
        { "digit", is_digit }, { "space", tmpl_is_space }, { "ascii", is_ascii },
    };
    size_t k = 0;

    if (strcmp(what, "lower") == 0)
        return all_cased(r, s, is_lower);
    if (strcmp(what, "upper") == 0)
        return all_cased(r, s, is_upper);
    while (strcmp(kind[k].what, what) != 0)
        k++;
    for (size_t i = 0; i < s->len && tmpl_step(r, i % 4 == 0);) {
        uint32_t cp;

        i += utf8_decode(s->data + i, s->len - i, &cp);
        if (!kind[k].is(cp))
            return false;
    }
    return s->len != 0 || kind[k].is == is_ascii;
}
