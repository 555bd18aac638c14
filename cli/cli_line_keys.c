/* SPDX-License-Identifier: Apache-2.0 */
/* cli_line_keys.c - bytes of a terminal as keys.  Sequences are those of xterm, which all terminals
 * of today send; what is not known of them is skipped as a whole. */
#include <stdlib.h>
#include <string.h>

#include "cli_line.h"
#include "text/text.h"

#define ESC            0x1b
#define CONTROL(c)     ((c)&0x1f)
#define SEQUENCE_MAX   32u
#define PASTE_PART_MAX (1u << 20) /* a longer paste comes as several texts */

static const char paste_end[] = "\033[201~";

bool line_input_pending(const line_input *in)
{
    return in->at < in->bytes.len;
}

void line_input_free(line_input *in)
{
    kvd_buf_free(&in->bytes);
    kvd_buf_free(&in->text);
    *in = (line_input){ 0 };
}

static void consume(line_input *in, size_t n)
{
    in->at += n;
    if (in->at == in->bytes.len)
        in->at = in->bytes.len = 0;
}

/* Sets the text: what is not UTF-8 becomes U+FFFD, CR and CR LF become LF, NUL is left out. */
static void set_text(line_input *in, const char *s, size_t len)
{
    in->text.len = 0;
    for (size_t i = 0; i < len;) {
        uint32_t cp;
        char     out[4];

        i += utf8_decode(s + i, len - i, &cp);
        if (cp == '\r') {
            cp = '\n';
            i += i < len && s[i] == '\n';
        }
        if (cp)
            kvd_buf_put(&in->text, out, utf8_encode(cp, out));
    }
}

/* ---- paste ------------------------------------------------------------------------------ */

/* First byte at or behind `from` where the end of a paste, or a part of it, may begin. */
static size_t find_end(const char *s, size_t len, size_t from)
{
    const char *e = memchr(s + from, ESC, len - from);

    while (e) {
        const size_t left = len - (size_t)(e - s), n = sizeof(paste_end) - 1;

        if (memcmp(e, paste_end, left < n ? left : n) == 0)
            return (size_t)(e - s);
        e = memchr(e + 1, ESC, left - 1);
    }
    return len;
}

/* Terminals leave control characters out of a paste, so a Ctrl-C in it was typed: its end is lost.
 */
static bool paste_next(line_input *in, line_key *key)
{
    const char  *s   = in->bytes.data + in->at;
    const size_t len = in->bytes.len - in->at, n = sizeof(paste_end) - 1;
    const char  *ctrl_c;
    size_t       end;

    ctrl_c = memchr(s + in->scanned, CONTROL('C'), len - in->scanned);
    if (ctrl_c) {
        in->pasting = false;
        in->scanned = 0;
        consume(in, (size_t)(ctrl_c - s) + 1);
        *key = KEY_INTERRUPT;
        return true;
    }
    end = find_end(s, len, in->scanned);
    if (len - end < n && end < PASTE_PART_MAX) { /* the end is not there yet */
        in->scanned = end;
        return false;
    }
    in->pasting = len - end < n;
    in->scanned = 0;
    end         = in->pasting ? utf8_complete_prefix(s, end) : end;
    set_text(in, s, end);
    consume(in, in->pasting ? end : end + n);
    *key = KEY_TEXT;
    return true;
}

/* ---- sequences -------------------------------------------------------------------------- */

static line_key moving(char final, bool modified)
{
    switch (final) {
    case 'A':
        return KEY_UP;
    case 'B':
        return KEY_DOWN;
    case 'C':
        return modified ? KEY_WORD_RIGHT : KEY_RIGHT;
    case 'D':
        return modified ? KEY_WORD_LEFT : KEY_LEFT;
    case 'H':
        return KEY_HOME;
    case 'F':
        return KEY_END;
    default:
        return KEY_NONE;
    }
}

/* ESC [ number ; modifier final */
static line_key control_sequence(line_input *in, const char *s, size_t n)
{
    const char final = s[n - 1];
    char       word[SEQUENCE_MAX];
    long       number[3] = { 0 };
    char      *p         = word;

    memcpy(word, s + 2, n - 2);
    word[n - 3] = 0; /* in place of the final byte */
    for (size_t i = 0; i < KVD_COUNTOF(number) && *p >= '0' && *p <= '9'; i++) {
        number[i] = strtol(p, &p, 10);
        p += *p == ';';
    }
    if (final == 'u' || (final == '~' && number[0] == 27)) { /* keys with modifiers */
        const long key = final == 'u' ? number[0] : number[2];

        return key == '\r' && number[1] > 1 ? KEY_NEWLINE : key == '\r' ? KEY_ENTER : KEY_NONE;
    }
    if (final != '~')
        return moving(final, number[1] > 1);
    switch (number[0]) {
    case 1:
    case 7:
        return KEY_HOME;
    case 3:
        return KEY_ERASE_RIGHT;
    case 4:
    case 8:
        return KEY_END;
    case 200:
        in->pasting = true;
        return KEY_NONE;
    default:
        return KEY_NONE;
    }
}

static line_key with_alt(char c)
{
    switch (c) {
    case '\r':
    case '\n':
        return KEY_NEWLINE;
    case 'b':
        return KEY_WORD_LEFT;
    case 'f':
        return KEY_WORD_RIGHT;
    case 'd':
        return KEY_KILL_WORD_RIGHT;
    case 0x7f:
    case CONTROL('H'):
        return KEY_KILL_WORD_LEFT;
    default:
        return KEY_NONE;
    }
}

/* Bytes of the sequence that begins with ESC; 0: more are missing. */
static size_t sequence_length(const char *s, size_t len)
{
    if (len < 2)
        return 0;
    if (s[1] != '[' && s[1] != 'O')
        return (unsigned char)s[1] >= 0x80 || s[1] == ESC ? 1 : 2;
    if (s[1] == 'O')
        return len < 3 ? 0 : 3;
    for (size_t i = 2; i < len && i < SEQUENCE_MAX; i++) {
        if (s[i] == '[' && i == 2) /* the Linux console's function keys */
            return len < 4 ? 0 : 4;
        if (s[i] >= 0x40 && s[i] <= 0x7e)
            return i + 1;
        if (s[i] < 0x20 || s[i] > 0x3f) /* broken off */
            return i;
    }
    return len < SEQUENCE_MAX ? 0 : SEQUENCE_MAX;
}

static bool escape_next(line_input *in, bool settled, line_key *key)
{
    const char  *s     = in->bytes.data + in->at;
    const size_t len   = in->bytes.len - in->at;
    const size_t n     = sequence_length(s, len);
    const char   final = n ? s[n - 1] : 0;

    if (n == 0 && !settled)
        return false;
    *key = KEY_NONE;
    if (n >= 3 && s[1] == '[' && final >= 0x40)
        *key = control_sequence(in, s, n);
    else if (n == 3 && s[1] == 'O')
        *key = moving(final, false);
    else if (n == 2)
        *key = with_alt(final);
    consume(in, n ? n : len);
    return true;
}

/* ---- single bytes ------------------------------------------------------------------------ */

static line_key control(char c)
{
    static const line_key keys[32] = {
        [CONTROL('A')] = KEY_HOME,
        [CONTROL('B')] = KEY_LEFT,
        [CONTROL('C')] = KEY_INTERRUPT,
        [CONTROL('D')] = KEY_EOF,
        [CONTROL('E')] = KEY_END,
        [CONTROL('F')] = KEY_RIGHT,
        [CONTROL('H')] = KEY_ERASE_LEFT,
        [CONTROL('J')] = KEY_ENTER,
        [CONTROL('K')] = KEY_KILL_RIGHT,
        [CONTROL('L')] = KEY_REDRAW,
        [CONTROL('M')] = KEY_ENTER,
        [CONTROL('N')] = KEY_NEWER,
        [CONTROL('P')] = KEY_OLDER,
        [CONTROL('U')] = KEY_KILL_LEFT,
        [CONTROL('W')] = KEY_KILL_WORD_LEFT,
        [CONTROL('Y')] = KEY_YANK,
        [CONTROL('Z')] = KEY_SUSPEND,
    };

    return c == 0x7f ? KEY_ERASE_LEFT : keys[(unsigned char)c];
}

static bool is_text(char c)
{
    return (unsigned char)c >= 0x20 && c != 0x7f;
}

bool line_input_next(line_input *in, bool settled, line_key *key)
{
    const size_t len = in->bytes.len - in->at;
    const char  *s;
    size_t       n = 0;

    if (len == 0)
        return false;
    s = in->bytes.data + in->at;
    if (in->pasting)
        return paste_next(in, key);
    if (s[0] == ESC)
        return escape_next(in, settled, key);
    while (n < len && (is_text(s[n]) || s[n] == '\t'))
        n++;
    if (n == 0) {
        *key = control(s[0]);
        consume(in, 1);
        return true;
    }
    if (n == len && !settled)
        n = utf8_complete_prefix(s, n);
    if (n == 0)
        return false;
    set_text(in, s, n);
    consume(in, n);
    *key = KEY_TEXT;
    return true;
}
