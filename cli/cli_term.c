/* SPDX-License-Identifier: Apache-2.0 */
/* cli_term.c - progress bar, Ctrl-C, and what the process uses. */
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

#define BAR_WIDTH       30
#define BAR_INTERVAL_NS 100000000u

static kvd_session          *watched;
static volatile sig_atomic_t interrupted;

bool cli_is_tty(FILE *f)
{
    return isatty(fileno(f)) == 1;
}

void cli_progress_start(cli_progress *p, const char *what)
{
    *p = (cli_progress){ .what = what, .start_ns = kvd_now_ns(), .on = cli_is_tty(stderr) };
}

bool cli_progress_step(void *ctx, uint64_t done, uint64_t total)
{
    cli_progress  *p   = ctx;
    const uint64_t now = kvd_now_ns();
    const double   s   = (double)(now - p->start_ns) * 1e-9;
    const int      n   = total ? (int)(done * BAR_WIDTH / total) : 0;

    if (cli_interrupted(false))
        return false;
    if (!p->on || (done && done < total && now - p->shown_ns < BAR_INTERVAL_NS))
        return true;
    p->shown_ns = now;
    fprintf(stderr, "\r%s [%.*s%*s] %" PRIu64 "/%" PRIu64, p->what, n,
            "##############################", BAR_WIDTH - n, "", done, total);
    if (done && s > 0.0) {
        const double rate = (double)done / s;

        fprintf(stderr, "  %.0f tok/s, %.0f s left  ", rate, (double)(total - done) / rate);
    }
    fflush(stderr);
    return true;
}

void cli_progress_end(cli_progress *p)
{
    if (p->on)
        fprintf(stderr, "\r%*s\r", 79, "");
    p->on = false;
}

static void on_interrupt(int sig)
{
    (void)sig;
    if (interrupted) {
        cli_tty_restore();
        _exit(EXIT_INTERRUPTED);
    }
    interrupted = 1;
    if (watched)
        kvd_session_cancel(watched);
}

void cli_interrupt_watch(kvd_session *s)
{
    struct sigaction sa;

    memset(&sa, 0, sizeof(sa));
    sa.sa_handler = s ? on_interrupt : cli_tty_die; /* no SA_RESTART: a blocked read returns */
    sigemptyset(&sa.sa_mask);
    watched = s;
    sigaction(SIGINT, &sa, NULL);
}

bool cli_interrupted(bool reset)
{
    const bool was = interrupted != 0;

    if (reset)
        interrupted = 0;
    return was;
}

uint64_t cli_rss_bytes(bool anonymous_only)
{
    const char        *key = anonymous_only ? "RssAnon:" : "VmRSS:";
    char               line[256];
    unsigned long long kib = 0;
    FILE              *f   = fopen("/proc/self/status", "r");

    while (f && fgets(line, sizeof(line), f))
        if (strncmp(line, key, strlen(key)) == 0)
            sscanf(line + strlen(key), "%llu", &kib);
    if (f)
        fclose(f);
    return (uint64_t)kib * 1024;
}
