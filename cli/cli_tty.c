/* SPDX-License-Identifier: Apache-2.0 */
/* cli_tty.c - see cli_tty.h. */
#define _DEFAULT_SOURCE
#include "cli_tty.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "cli.h"

#define READ_BYTES 4096
#define TYPE_AHEAD_BYTES                                                    \
    (1u << 20) /* when more is typed while the program works, it is dropped \
                */
#define CTRL_C          3
#define CTRL_Z          26
#define DEFAULT_COLUMNS 80
#define DEFAULT_ROWS    24

static const char paste_on[] = "\033[?2004h", paste_off[] = "\033[?2004l";
static const int  ending[] = { SIGTERM, SIGHUP, SIGQUIT, SIGINT };

/* Handlers read all of it.  The modes change only while none is installed. */
static struct {
    struct termios        saved, keys, signals; /* signals: Ctrl-C is one */
    volatile sig_atomic_t open, use_signals;
    int                   wake[2]; /* a byte comes when the size has changed */
} tty;

static struct {
    pthread_t thread;
    int       stop[2]; /* closed at [1] when the thread is to end */
    bool      on;
} collector;

static void write_all(const char *s, size_t len)
{
    while (len > 0) {
        const ssize_t n = write(STDOUT_FILENO, s, len);

        if (n < 0 && errno != EINTR)
            return;
        s += n > 0 ? n : 0;
        len -= n > 0 ? (size_t)n : 0;
    }
}

void cli_tty_restore(void)
{
    const int was = errno;

    if (tty.open) {
        tcsetattr(STDIN_FILENO, TCSANOW, &tty.saved);
        write_all(paste_off, sizeof(paste_off) - 1);
    }
    errno = was;
}

static void enter(void)
{
    tcsetattr(STDIN_FILENO, TCSANOW, tty.use_signals ? &tty.signals : &tty.keys);
    write_all(paste_on, sizeof(paste_on) - 1);
}

static void handle(int sig, void (*fn)(int))
{
    struct sigaction sa;

    memset(&sa, 0, sizeof(sa));
    sa.sa_handler = fn;
    sigemptyset(&sa.sa_mask);
    sigaction(sig, &sa, NULL);
}

void cli_tty_die(int sig)
{
    sigset_t set;

    cli_tty_restore();
    handle(sig, SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, sig);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    raise(sig);
}

static void on_stop(int sig)
{
    const int was = errno;
    sigset_t  set, before;

    cli_tty_restore();
    handle(sig, SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, sig);
    sigprocmask(SIG_UNBLOCK, &set, &before);
    raise(sig); /* the process stops here, and goes on here */
    sigprocmask(SIG_SETMASK, &before, NULL);
    handle(sig, on_stop);
    enter();
    (void)!write(tty.wake[1], "", 1); /* what was drawn has moved, too */
    errno = was;
}

static void on_resize(int sig)
{
    const int was = errno;

    (void)sig;
    (void)!write(tty.wake[1], "", 1);
    errno = was;
}

static bool open_pipe(int fd[2])
{
    if (pipe(fd) != 0)
        return false;
    for (int i = 0; i < 2; i++) {
        fcntl(fd[i], F_SETFD, FD_CLOEXEC);
        fcntl(fd[i], F_SETFL, O_NONBLOCK);
    }
    return true;
}

bool cli_tty_open(void)
{
    struct termios m;

    if (!cli_is_tty(stdin) || !cli_is_tty(stdout) || kvd_terminal_is_dumb() ||
        tcgetattr(STDIN_FILENO, &tty.saved) != 0 || !open_pipe(tty.wake))
        return false;
    m = tty.saved;
    m.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ECHONL | IEXTEN);
    m.c_iflag &= ~(tcflag_t)(ICRNL | INLCR | IGNCR | IXON | ISTRIP);
    m.c_cc[VMIN]  = 1;
    m.c_cc[VTIME] = 0;
    m.c_lflag |= ISIG;
    tty.signals = m;
    m.c_lflag &= ~(tcflag_t)ISIG;
    tty.keys        = m;
    tty.use_signals = 0;
    tty.open        = 1;
    for (size_t i = 0; i < KVD_COUNTOF(ending); i++)
        handle(ending[i], cli_tty_die);
    handle(SIGTSTP, on_stop);
    handle(SIGWINCH, on_resize);
    enter();
    return true;
}

void cli_tty_close(void)
{
    if (!tty.open)
        return;
    cli_tty_restore();
    tty.open = 0;
    for (size_t i = 0; i < KVD_COUNTOF(ending); i++)
        handle(ending[i], SIG_DFL);
    handle(SIGTSTP, SIG_DFL);
    handle(SIGWINCH, SIG_DFL);
    close(tty.wake[0]);
    close(tty.wake[1]);
}

void cli_tty_suspend(void)
{
    kill(0, SIGTSTP); /* all of a shell's job, as the terminal would */
}

int cli_tty_wait(int timeout_ms)
{
    struct pollfd fd[2] = { { .fd = STDIN_FILENO, .events = POLLIN },
                            { .fd = tty.wake[0], .events = POLLIN } };
    char          drop[64];
    int           n, what = 0;

    do
        n = poll(fd, 2, timeout_ms);
    while (n < 0 && errno == EINTR);
    if (fd[0].revents)
        what |= CLI_TTY_INPUT;
    if (fd[1].revents) {
        while (read(tty.wake[0], drop, sizeof(drop)) > 0)
            what |= CLI_TTY_RESIZED;
    }
    return what;
}

bool cli_tty_read(kvd_buf *to)
{
    char    block[READ_BYTES];
    ssize_t n;

    do
        n = read(STDIN_FILENO, block, sizeof(block));
    while (n < 0 && errno == EINTR);
    if (n <= 0)
        return false;
    kvd_buf_put(to, block, (size_t)n);
    return true;
}

void cli_tty_size(uint32_t *columns, uint32_t *rows)
{
    struct winsize w;
    const bool     known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0;

    *columns = known && w.ws_col ? w.ws_col : DEFAULT_COLUMNS;
    *rows    = known && w.ws_row ? w.ws_row : DEFAULT_ROWS;
}

/* ---- what is typed while the program works ------------------------------------------ */

/* Follows Ctrl-C and Ctrl-Z among the bytes from `from` on; what was typed before is dropped. */
static void follow_signals(kvd_buf *b, size_t from)
{
    for (size_t i = from; i < b->len;) {
        const char c = b->data[i++];

        if (c != CTRL_C && c != CTRL_Z)
            continue;
        b->len -= i;
        memmove(b->data, b->data + i, b->len);
        i = 0;
        if (c == CTRL_C)
            kill(getpid(), SIGINT);
        else
            cli_tty_suspend();
    }
}

static void *collect(void *ctx)
{
    kvd_buf *to = ctx; /* has its memory already */

    for (;;) {
        struct pollfd fd[2] = { { .fd = STDIN_FILENO, .events = POLLIN },
                                { .fd = collector.stop[0], .events = POLLIN } };
        char          block[READ_BYTES];
        ssize_t       n;

        if (poll(fd, 2, -1) < 0 && errno != EINTR)
            break;
        if (fd[1].revents)
            break;
        if (!fd[0].revents)
            continue;
        n = read(STDIN_FILENO, block, sizeof(block));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break; /* the terminal is gone: the next read says so */
        if (to->cap <= to->len + (size_t)n) {
            to->len = 0;
            write_all("\a", 1);
        }
        kvd_buf_put(to, block, (size_t)n);
        follow_signals(to, to->len - (size_t)n);
    }
    return NULL;
}

/* Without the thread Ctrl-C works until the terminal's queue is full. */
static void use_signals(bool on)
{
    tty.use_signals = on;
    enter();
}

void cli_tty_collect(kvd_buf *to)
{
    sigset_t all, before;

    kvd_buf_reserve(to, TYPE_AHEAD_BYTES);
    if (to->oom || !open_pipe(collector.stop)) {
        use_signals(true);
        return;
    }
    follow_signals(to, 0); /* typed behind the message that is answered now */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals go to the main thread */
    collector.on = pthread_create(&collector.thread, NULL, collect, to) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!collector.on) {
        close(collector.stop[0]);
        close(collector.stop[1]);
        use_signals(true);
    }
}

void cli_tty_collect_end(void)
{
    if (tty.use_signals)
        use_signals(false);
    if (!collector.on)
        return;
    close(collector.stop[1]);
    pthread_join(collector.thread, NULL);
    close(collector.stop[0]);
    collector.on = false;
}
