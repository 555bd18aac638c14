/* SPDX-License-Identifier: Apache-2.0 */
/* cli_tty.h - private to kvdrive chat: the terminal's modes, its size, and what is typed while the
 * program works.
 *
 * One terminal a process: standard input and output.  Between cli_tty_open() and cli_tty_close()
 * the terminal echoes nothing.  However the process ends or stops, it gets its own modes back;
 * SIGKILL alone leaves it as it is.  Calls belong to the main thread. */
#ifndef KVD_CLI_TTY_H
#define KVD_CLI_TTY_H

#include "base/base.h"

enum { /* bits of cli_tty_wait() */
       CLI_TTY_INPUT   = 1,
       CLI_TTY_RESIZED = 2
};

/* false: standard input or output is no terminal, or one that cannot move its cursor. */
bool cli_tty_open(void);
void cli_tty_close(void);
/* Stops the process as Ctrl-Z does; returns when it goes on. */
void cli_tty_suspend(void);
/* Waits for input or another size; 0: neither came within timeout_ms (-1: no limit). */
int cli_tty_wait(int timeout_ms);
/* Appends what was typed, at most a few KiB; false: the terminal is gone. */
bool cli_tty_read(kvd_buf *to);
void cli_tty_size(uint32_t *columns, uint32_t *rows);

/* Until cli_tty_collect_end() a thread reads what is typed, so that the terminal's queue never
 * fills up: Ctrl-C becomes SIGINT and drops what was typed before it, Ctrl-Z stops the process. The
 * caller leaves `to` alone meanwhile. */
void cli_tty_collect(kvd_buf *to);
void cli_tty_collect_end(void);

#endif
