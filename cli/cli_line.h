/* SPDX-License-Identifier: Apache-2.0 */
/* cli_line.h - private to kvdrive chat: the line editor.
 *
 * A message is one text of any number of lines, edited as a whole.  The editor takes the terminal
 * for one of UTF-8, whatever the locale says; moves and erases by grapheme cluster; and knows the
 * width of wide and combining characters.  A paste is text, never keys. */
#ifndef KVD_CLI_LINE_H
#define KVD_CLI_LINE_H

#include "base/base.h"

/* ---- cli_line_keys.c: from bytes to keys --------------------------------------------- */

typedef enum line_key {
    KEY_NONE, /* one that means nothing here */
    KEY_TEXT, /* typed or pasted */
    KEY_ENTER,
    KEY_NEWLINE, /* Alt-Enter: another line of the same message */
    KEY_INTERRUPT,
    KEY_EOF, /* Ctrl-D: the end, or erase to the right */
    KEY_SUSPEND,
    KEY_REDRAW,
    KEY_LEFT,
    KEY_RIGHT,
    KEY_UP,
    KEY_DOWN,
    KEY_HOME,
    KEY_END,
    KEY_WORD_LEFT,
    KEY_WORD_RIGHT,
    KEY_ERASE_LEFT,
    KEY_ERASE_RIGHT,
    KEY_KILL_WORD_LEFT,
    KEY_KILL_WORD_RIGHT,
    KEY_KILL_LEFT,
    KEY_KILL_RIGHT,
    KEY_YANK,
    KEY_OLDER,
    KEY_NEWER
} line_key;

typedef struct line_input {
    kvd_buf bytes; /* read, from `at` on not looked at */
    size_t  at;
    size_t  scanned; /* of a paste, bytes behind `at` without its end */
    bool    pasting;
    kvd_buf text; /* of the last KEY_TEXT: valid UTF-8, lines end in \n */
} line_input;

/* The next key of the bytes that are there; false: there is none, or only the beginning of one.
 * settled: nothing more came in time, so a beginning is all there is of a key. */
bool line_input_next(line_input *in, bool settled, line_key *key);
/* Bytes that no key was made of yet. */
bool line_input_pending(const line_input *in);
void line_input_free(line_input *in);

/* ---- cli_line_draw.c: where text stands ---------------------------------------------- */

#define LINE_PROMPT_COLUMNS 2u

typedef struct line_screen {
    uint32_t columns, rows; /* of the terminal */
    uint32_t top;           /* first row of the text that is shown */
    uint32_t row, column;   /* of the cursor, in rows of the text; valid once drawn */
    bool     drawn;
} line_screen;

/* Draws the text with the cursor at byte `at`, over what was drawn before. */
void line_draw(line_screen *s, const char *text, size_t len, size_t at);
/* The terminal has another size: the next drawing begins where this text now begins. */
void line_draw_resized(line_screen *s, const char *text, size_t len, uint32_t columns,
                       uint32_t rows);
/* Byte of the text that is nearest above (up) or below the cursor; SIZE_MAX: there is no row. */
size_t line_vertical(const line_screen *s, const char *text, size_t len, size_t at, bool up);

/* ---- cli_line_history.c --------------------------------------------------------------- */

#define LINE_HISTORY_MAX 1000u

typedef struct line_history {
    char    *entry[LINE_HISTORY_MAX]; /* owned; the oldest first */
    uint32_t n;
    char     path[600]; /* "": it is not kept */
} line_history;

/* Reads the file, of libedit's form, too; and keeps it within its limit. */
void line_history_open(line_history *h, const char *path);
/* Adds a message, and appends it to the file; not one that is the last already. */
void line_history_add(line_history *h, const char *text);
void line_history_close(line_history *h);

/* ---- cli_line.c: the editor ------------------------------------------------------------ */

typedef enum line_end {
    LINE_DONE,
    LINE_DROPPED, /* by Ctrl-C */
    LINE_CLOSED   /* Ctrl-D on an empty line, or the terminal is gone */
} line_end;

typedef struct line_editor {
    line_input   in; /* what was typed ahead stays here from one message to the next */
    line_screen  screen;
    line_history history;
    kvd_buf      text;  /* edited */
    size_t       at;    /* the cursor, between clusters of it */
    kvd_buf      cut;   /* last killed */
    kvd_buf      draft; /* what was being written when older messages were looked at */
    uint32_t     shown; /* entry of the history; history.n: the draft */
} line_editor;

/* Reads a message on the terminal of cli_tty.h into e->text.  more: whether Enter leaves a message
 * open; it may change the text, and the editor goes on at its end. */
line_end line_edit(line_editor *e, bool (*more)(kvd_buf *text));
/* Between the two, what is typed is read by a thread and kept for the next message; a Ctrl-C in it
 * is SIGINT, which drops what was typed before it. */
void line_typing_begin(line_editor *e);
void line_typing_end(line_editor *e, bool interrupted);
void line_close(line_editor *e);

#endif
