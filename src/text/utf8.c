/* SPDX-License-Identifier: Apache-2.0 */
/* utf8.c - decoding with the maximal-subpart rule, encoding, and where a stream may be cut.
 *
 * A sequence is described by its lead byte: how many continuation bytes follow and the range of
 * the first of them (Unicode, table 3-7); all further ones are 80..BF.  An ill-formed sequence is
 * replaced up to, and without, the first byte that cannot continue it.
 * Stateless, any thread. */
#include "text/text.h"

typedef struct utf8_lead {
    uint32_t more;      /* continuation bytes; 0: ASCII or never a lead */
    uint32_t bits;      /* payload of the lead */
    uint8_t  low, high; /* range of the first continuation byte */
} utf8_lead;

static utf8_lead lead_of(uint8_t b)
{
    if (b >= 0xc2 && b <= 0xdf)
        return (utf8_lead){ 1, b & 0x1fu, 0x80, 0xbf };
    if (b >= 0xe0 && b <= 0xef)
        return (utf8_lead){ 2, b & 0x0fu, b == 0xe0 ? 0xa0 : 0x80, b == 0xed ? 0x9f : 0xbf };
    if (b >= 0xf0 && b <= 0xf4)
        return (utf8_lead){ 3, b & 0x07u, b == 0xf0 ? 0x90 : 0x80, b == 0xf4 ? 0x8f : 0xbf };
    return (utf8_lead){ 0, 0, 0, 0 };
}

/* Reads as much of one sequence as is there and valid; *missing: bytes it still wants, or
 * UINT32_MAX when what was read is ill-formed. */
static size_t read_sequence(const char *s, size_t len, uint32_t *cp, uint32_t *missing)
{
    const uint8_t  *u    = (const uint8_t *)s;
    const utf8_lead lead = lead_of(u[0]);
    uint32_t        v    = lead.bits;

    *cp = 0xfffd;
    if (lead.more == 0) {
        *missing = u[0] < 0x80 ? 0 : UINT32_MAX;
        if (u[0] < 0x80)
            *cp = u[0];
        return 1;
    }
    for (uint32_t i = 1; i <= lead.more; i++) {
        if (i >= len) {
            *missing = lead.more + 1 - i;
            return i;
        }
        if (u[i] < (i == 1 ? lead.low : 0x80) || u[i] > (i == 1 ? lead.high : 0xbf)) {
            *missing = UINT32_MAX;
            return i;
        }
        v = v << 6 | (u[i] & 0x3fu);
    }
    *missing = 0;
    *cp      = v;
    return lead.more + 1;
}

size_t utf8_decode(const char *s, size_t len, uint32_t *cp)
{
    uint32_t missing;

    return read_sequence(s, len, cp, &missing);
}

size_t utf8_encode(uint32_t cp, char out[4])
{
    if (cp > 0x10ffff || (cp >= 0xd800 && cp <= 0xdfff))
        cp = 0xfffd;
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

size_t utf8_complete_prefix(const char *s, size_t len)
{
    /* Only a sequence that began in the last three bytes can be unfinished. */
    for (size_t back = 1; back <= 3 && back <= len; back++) {
        uint32_t cp, missing;

        if (lead_of((uint8_t)s[len - back]).more == 0)
            continue;
        if (read_sequence(s + len - back, back, &cp, &missing) == back && missing != 0 &&
            missing != UINT32_MAX)
            return len - back;
        break;
    }
    return len;
}
