/* SPDX-License-Identifier: Apache-2.0 */
/* cli_line_draw.c - lays a text out in rows and draws it.
 *
 * A row ends where the next character does not fit; a row that is full is followed by another, so
 * the cursor always has a place.  Rows are drawn one by one and ended explicitly: nothing depends
 * on how a terminal wraps.  A text of more rows than the terminal shows those around the cursor. */
#include <stdio.h>
#include <string.h>

#include "cli_line.h"
#include "text/text.h"

#define TAB_COLUMNS 8u

typedef struct cell { /* one cluster */
    const char *s;
    size_t      n;
    uint32_t    row, column, width;
} cell;

typedef struct layout {
    const char *text;
    size_t      len, at;
    uint32_t    columns, row, column; /* of what comes next */
} layout;

static layout begin(const char *text, size_t len, uint32_t columns)
{
    return (layout){ .text = text,
                     .len  = len,
                     .columns =
                         columns > LINE_PROMPT_COLUMNS + 2 ? columns : LINE_PROMPT_COLUMNS + 2,
                     .column = LINE_PROMPT_COLUMNS };
}

/* ^A and the like stand for control characters. */
static bool is_control(const cell *c)
{
    return c->n == 1 && ((unsigned char)c->s[0] < 0x20 || c->s[0] == 0x7f);
}

static uint32_t width_of(const cell *c, uint32_t column)
{
    uint32_t w = 0;

    if (c->s[0] == '\t')
        return TAB_COLUMNS - column % TAB_COLUMNS;
    if (is_control(c))
        return 2;
    for (size_t i = 0; i < c->n;) {
        uint32_t cp;

        i += utf8_decode(c->s + i, c->n - i, &cp);
        w += utf8_columns(cp);
    }
    return w;
}

/* The next cluster and its place; false at the end.  A line's end has no width. */
static bool next(layout *l, cell *c)
{
    if (l->at == l->len)
        return false;
    c->s     = l->text + l->at;
    c->n     = utf8_cluster(c->s, l->len - l->at);
    c->width = c->s[0] == '\n' ? 0 : width_of(c, l->column);
    if (c->width > l->columns)
        c->width = l->columns;
    if (c->s[0] == '\t' && l->column + c->width > l->columns)
        c->width = l->columns - l->column;
    if (l->column + c->width > l->columns) {
        l->row++;
        l->column = 0;
    }
    c->row    = l->row;
    c->column = l->column;
    l->at += c->n;
    l->column += c->width;
    if (c->s[0] == '\n') {
        l->row++;
        l->column = LINE_PROMPT_COLUMNS;
    } else if (l->column >= l->columns) {
        l->row++;
        l->column = 0;
    }
    return true;
}

/* Where the cursor stands at byte `at`; gives the number of rows. */
static uint32_t place(const line_screen *s, const char *text, size_t len, size_t at, uint32_t *row,
                      uint32_t *column)
{
    layout l = begin(text, len, s->columns);
    cell   c;

    *row    = 0;
    *column = LINE_PROMPT_COLUMNS;
    while (next(&l, &c)) {
        if (c.s == text + at) {
            *row    = c.row;
            *column = c.column;
        }
    }
    if (at == len) {
        *row    = l.row;
        *column = l.column;
    }
    return l.row + 1;
}

size_t line_vertical(const line_screen *s, const char *text, size_t len, size_t at, bool up)
{
    layout   l    = begin(text, len, s->columns);
    size_t   best = SIZE_MAX;
    uint32_t row, column, rows;
    cell     c;

    rows = place(s, text, len, at, &row, &column);
    if (up ? row == 0 : row + 1 == rows)
        return SIZE_MAX;
    row = up ? row - 1 : row + 1;
    while (next(&l, &c))
        if (c.row == row && (best == SIZE_MAX || c.column <= column))
            best = (size_t)(c.s - text);
    if (l.row == row && (best == SIZE_MAX || l.column <= column))
        best = len;
    return best;
}

/* ---- drawing ------------------------------------------------------------------------------ */

static void put_cell(kvd_buf *out, const cell *c)
{
    uint32_t cp;

    (void)utf8_decode(c->s, c->n, &cp);
    if (c->s[0] == '\t')
        kvd_buf_printf(out, "%*s", (int)c->width, "");
    else if (is_control(c))
        kvd_buf_printf(out, "^%c", c->s[0] ^ 0x40);
    else if (cp >= 0x80 && cp < 0xa0) /* control characters of eight bits: not for the terminal */
        kvd_buf_printf(out, "%*s", (int)c->width, "");
    else
        kvd_buf_put(out, c->s, c->n);
}

static void begin_row(kvd_buf *out, const line_screen *s, uint32_t row, bool of_line)
{
    if (row > s->top)
        kvd_buf_puts(out, "\r\n");
    if (of_line)
        kvd_buf_puts(out, row == 0 ? "> " : ". ");
}

static void put_rows(kvd_buf *out, const line_screen *s, const char *text, size_t len,
                     uint32_t bottom)
{
    layout   l    = begin(text, len, s->columns);
    uint32_t row  = 0; /* begun */
    bool     line = false;
    cell     c;

    if (s->top == 0)
        begin_row(out, s, 0, true);
    while (next(&l, &c)) {
        for (; row < c.row && row < bottom; line = false)
            if (++row >= s->top)
                begin_row(out, s, row, line);
        if (c.s[0] == '\n')
            line = true;
        else if (c.row >= s->top && c.row <= bottom)
            put_cell(out, &c);
    }
    for (; row < l.row && row < bottom; line = false)
        if (++row >= s->top)
            begin_row(out, s, row, line);
}

void line_draw(line_screen *s, const char *text, size_t len, size_t at)
{
    kvd_buf        out = { 0 };
    uint32_t       row, column, bottom;
    const uint32_t above = s->drawn ? s->row - s->top : 0;
    const uint32_t rows  = place(s, text, len, at, &row, &column);

    if (above > 0)
        kvd_buf_printf(&out, "\033[%uA", above);
    kvd_buf_puts(&out, "\r\033[J");
    s->top = rows <= s->rows ? 0 : s->top;
    s->top = row < s->top ? row : row >= s->top + s->rows ? row - s->rows + 1 : s->top;
    bottom = s->top + s->rows < rows ? s->top + s->rows - 1 : rows - 1;
    put_rows(&out, s, text, len, bottom);
    if (bottom > row)
        kvd_buf_printf(&out, "\033[%uA", bottom - row);
    kvd_buf_puts(&out, "\r");
    if (column > 0)
        kvd_buf_printf(&out, "\033[%uC", column);
    if (!out.oom)
        fwrite(out.data, 1, out.len, stdout);
    fflush(stdout);
    kvd_buf_free(&out);
    s->row    = row;
    s->column = column;
    s->drawn  = true;
}

/* Rows that a drawn row has become. */
static uint32_t parts(uint32_t width, uint32_t columns)
{
    return width > columns ? (width + columns - 1) / columns : 1;
}

/* Terminals as a rule break rows that have become too long, and keep the cursor on its character.
 */
void line_draw_resized(line_screen *s, const char *text, size_t len, uint32_t columns,
                       uint32_t rows)
{
    layout   l     = begin(text, len, s->columns);
    uint32_t above = 0, width = 0, row = s->top;
    cell     c;

    while (s->drawn && next(&l, &c) && c.row < s->row) {
        for (; row < c.row; row++, width = 0)
            above += parts(width, columns);
        width = c.row >= s->top ? c.column + c.width : 0;
    }
    for (; s->drawn && row < s->row; row++, width = 0)
        above += parts(width, columns);
    if (s->drawn) {
        s->top = 0;
        s->row = above + s->column / columns;
    }
    s->columns = columns;
    s->rows    = rows;
}
