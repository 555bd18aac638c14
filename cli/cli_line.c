/* SPDX-License-Identifier: Apache-2.0 */
/* cli_line.c - edits a message, key by key.  It is drawn when all keys that are there have been
 * followed. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "cli_line.h"
#include "cli_tty.h"
#include "text/text.h"

#define ESCAPE_MS 50 /* an ESC that nothing follows for so long is a key of its own */
#define TEXT_MAX  (64u << 20)

/* ---- places -------------------------------------------------------------------------- */

static size_t line_start(const line_editor *e, size_t at)
{
    while (at > 0 && e->text.data[at - 1] != '\n')
        at--;
    return at;
}

static size_t line_stop(const line_editor *e, size_t at)
{
    while (at < e->text.len && e->text.data[at] != '\n')
        at++;
    return at;
}

static size_t right_of(const line_editor *e, size_t at)
{
    return at < e->text.len ? at + utf8_cluster(e->text.data + at, e->text.len - at) : at;
}

static size_t left_of(const line_editor *e, size_t at)
{
    size_t p, last;

    if (at == 0)
        return 0;
    last = p = line_start(e, at - 1);
    while (p < at) {
        last = p;
        p    = right_of(e, p);
    }
    return last;
}

/* at, or the end of the cluster that it is in. */
static size_t whole(const line_editor *e, size_t at)
{
    size_t p = line_start(e, at);

    while (p < at)
        p = right_of(e, p);
    return p;
}

static bool is_word(const line_editor *e, size_t at)
{
    const unsigned char c = (unsigned char)e->text.data[at];

    return c >= 0x80 || isalnum(c) || c == '_';
}

static size_t word_left(const line_editor *e, size_t at)
{
    while (at > 0 && !is_word(e, at - 1))
        at--;
    while (at > 0 && is_word(e, at - 1))
        at--;
    return at;
}

static size_t word_right(const line_editor *e, size_t at)
{
    while (at < e->text.len && !is_word(e, at))
        at++;
    while (at < e->text.len && is_word(e, at))
        at++;
    return at;
}

/* ---- changes ------------------------------------------------------------------------- */

static void insert(line_editor *e, const char *s, size_t len)
{
    kvd_buf *t = &e->text;

    if (len > TEXT_MAX - t->len) {
        fputc('\a', stdout);
        return;
    }
    kvd_buf_reserve(t, len);
    if (t->oom || len == 0)
        return;
    memmove(t->data + e->at + len, t->data + e->at, t->len - e->at);
    memcpy(t->data + e->at, s, len);
    t->len += len;
    t->data[t->len] = 0;
    e->at           = whole(e, e->at + len);
}

static void erase(line_editor *e, size_t from, size_t to)
{
    kvd_buf *t = &e->text;

    if (from >= to)
        return;
    memmove(t->data + from, t->data + to, t->len - to);
    t->len -= to - from;
    t->data[t->len] = 0;
    e->at           = whole(e, from);
}

static void kill_text(line_editor *e, size_t from, size_t to)
{
    if (from >= to)
        return;
    e->cut.len = 0;
    kvd_buf_put(&e->cut, e->text.data + from, to - from);
    erase(e, from, to);
}

static void replace(line_editor *e, const char *s)
{
    e->text.len = e->at = 0;
    insert(e, s, strlen(s));
}

/* Entry `to` of the history takes the place of what is shown. */
static void show(line_editor *e, uint32_t to)
{
    line_history *h = &e->history;

    if (e->shown == h->n) {
        e->draft.len = 0;
        kvd_buf_put(&e->draft, e->text.data, e->text.len);
    }
    replace(e, to < h->n ? h->entry[to] : e->draft.len > 0 ? e->draft.data : "");
    e->shown = to;
}

static void older(line_editor *e)
{
    if (e->shown > 0)
        show(e, e->shown - 1);
}

static void newer(line_editor *e)
{
    if (e->shown < e->history.n)
        show(e, e->shown + 1);
}

static void vertical(line_editor *e, bool up)
{
    const size_t to = line_vertical(&e->screen, e->text.data, e->text.len, e->at, up);

    if (to != SIZE_MAX)
        e->at = to;
    else if (up)
        older(e);
    else
        newer(e);
}

/* ---- keys ---------------------------------------------------------------------------- */

static void move(line_editor *e, line_key key)
{
    switch (key) {
    case KEY_LEFT:
        e->at = left_of(e, e->at);
        break;
    case KEY_RIGHT:
        e->at = right_of(e, e->at);
        break;
    case KEY_HOME:
        e->at = line_start(e, e->at);
        break;
    case KEY_END:
        e->at = line_stop(e, e->at);
        break;
    case KEY_WORD_LEFT:
        e->at = word_left(e, e->at);
        break;
    case KEY_WORD_RIGHT:
        e->at = word_right(e, e->at);
        break;
    case KEY_UP:
    case KEY_DOWN:
        vertical(e, key == KEY_UP);
        break;
    case KEY_OLDER:
        older(e);
        break;
    default:
        newer(e);
        break;
    }
}

static void change(line_editor *e, line_key key)
{
    switch (key) {
    case KEY_TEXT:
        insert(e, e->in.text.data, e->in.text.len);
        break;
    case KEY_NEWLINE:
        insert(e, "\n", 1);
        break;
    case KEY_ERASE_LEFT:
        erase(e, left_of(e, e->at), e->at);
        break;
    case KEY_ERASE_RIGHT:
    case KEY_EOF:
        erase(e, e->at, right_of(e, e->at));
        break;
    case KEY_KILL_WORD_LEFT:
        kill_text(e, word_left(e, e->at), e->at);
        break;
    case KEY_KILL_WORD_RIGHT:
        kill_text(e, e->at, word_right(e, e->at));
        break;
    case KEY_KILL_LEFT:
        kill_text(e, line_start(e, e->at), e->at);
        break;
    case KEY_KILL_RIGHT:
        kill_text(e, e->at, line_stop(e, e->at));
        break;
    case KEY_YANK:
        insert(e, e->cut.data, e->cut.len);
        break;
    default:
        move(e, key);
        break;
    }
}

static void draw(line_editor *e)
{
    line_draw(&e->screen, e->text.data, e->text.len, e->at);
}

static void resized(line_editor *e)
{
    uint32_t columns, rows;

    cli_tty_size(&columns, &rows);
    line_draw_resized(&e->screen, e->text.data, e->text.len, columns, rows);
}

/* The next key; false: the terminal is gone. */
static bool next_key(line_editor *e, line_key *key)
{
    bool settled = false;

    while (!line_input_next(&e->in, settled, key)) {
        int what;

        draw(e);
        what    = cli_tty_wait(line_input_pending(&e->in) && !e->in.pasting ? ESCAPE_MS : -1);
        settled = what == 0;
        if (what & CLI_TTY_RESIZED)
            resized(e);
        if ((what & CLI_TTY_INPUT) && !cli_tty_read(&e->in.bytes))
            return false;
    }
    return true;
}

/* The text stays on the terminal, with the cursor below it. */
static line_end leave(line_editor *e, line_end how)
{
    e->at = e->text.len;
    draw(e);
    fputs(how == LINE_DROPPED ? "^C\n" : "\n", stdout);
    fflush(stdout);
    e->screen.drawn = false;
    return how;
}

line_end line_edit(line_editor *e, bool (*more)(kvd_buf *text))
{
    line_key key;

    e->text.len = e->at = 0;
    e->draft.len        = 0;
    e->shown            = e->history.n;
    e->screen           = (line_screen){ 0 };
    resized(e);
    while (next_key(e, &key)) {
        if (key == KEY_INTERRUPT)
            return leave(e, LINE_DROPPED);
        if (e->in.text.oom || e->in.bytes.oom || e->text.oom)
            break;
        if (key == KEY_EOF && e->text.len == 0)
            return leave(e, LINE_CLOSED);
        if (key == KEY_ENTER && !more(&e->text))
            return leave(e, LINE_DONE);
        if (key == KEY_ENTER) {
            e->at = e->text.len;
        } else if (key == KEY_SUSPEND) {
            cli_tty_suspend();
            e->screen.drawn = false;
        } else if (key == KEY_REDRAW) {
            fputs("\033[H\033[2J", stdout);
            e->screen.drawn = false;
        } else if (key != KEY_NONE) {
            change(e, key);
        }
    }
    return leave(e, LINE_CLOSED);
}

void line_typing_begin(line_editor *e)
{
    line_input *in = &e->in;

    if (in->at > 0)
        memmove(in->bytes.data, in->bytes.data + in->at, in->bytes.len - in->at);
    in->bytes.len -= in->at;
    in->at = 0;
    cli_tty_collect(&in->bytes);
}

void line_typing_end(line_editor *e, bool interrupted)
{
    cli_tty_collect_end();
    if (interrupted) { /* the beginning of a paste may be gone */
        e->in.pasting = false;
        e->in.scanned = 0;
    }
}

void line_close(line_editor *e)
{
    line_input_free(&e->in);
    line_history_close(&e->history);
    kvd_buf_free(&e->text);
    kvd_buf_free(&e->cut);
    kvd_buf_free(&e->draft);
}
