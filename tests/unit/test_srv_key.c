/* SPDX-License-Identifier: Apache-2.0 */
/* test_srv_key.c - a key is right or wrong, and finding that out takes the same instructions
 * wherever a guess is wrong: a child process is stepped through them one by one. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/srv_key.h"
#include "support/sanitized.h"

static const char key[] = "sk-0123456789abcdefghijklmnopqrstuvwxyz";

typedef bool (*compare)(const char *a, const char *b);

static void right_or_wrong(void **state)
{
    char guess[sizeof(key) + 8];

    (void)state;
    assert_true(srv_same_key(key, key));
    assert_true(srv_same_key("a", "a"));
    assert_false(srv_same_key("", key));
    for (size_t n = 1; n < sizeof(key); n++) { /* shorter; then each byte wrong; then longer */
        memcpy(guess, key, sizeof(key));
        guess[n - 1] ^= 1;
        assert_false(srv_same_key(guess, key));
        guess[n - 1] = 0;
        assert_false(srv_same_key(guess, key));
        assert_false(srv_same_key(key, guess[0] ? guess : "x"));
    }
    snprintf(guess, sizeof(guess), "%sx", key);
    assert_false(srv_same_key(guess, key));
    assert_false(srv_same_key("aa", "a")); /* the key again and again */
    assert_false(srv_same_key("abab", "ab"));
}

static void child(compare same, const char *guess)
{
    volatile bool is;

    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
        syscall(SYS_exit_group, 77);
    syscall(SYS_kill, getpid(), SIGSTOP);
    is = same(guess, key);
    syscall(SYS_exit_group, is ? 1 : 0);
}

/* Instructions from the stop to the end; -1: processes cannot be traced here. */
static int64_t steps_of(compare same, const char *guess)
{
    int     status;
    int64_t n   = 0;
    pid_t   pid = fork();

    assert_true(pid >= 0);
    if (pid == 0)
        child(same, guess);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFEXITED(status))
        return -1;
    for (; WIFSTOPPED(status); n++) {
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(n < 10000000);
    }
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), strcmp(guess, key) == 0);
    return n;
}

/* What a comparison that stops at the first difference looks like. */
static bool leaks(const char *a, const char *b)
{
    for (; *a && *a == *b; a++)
        b++;
    return *a == *b;
}

/* The difference of the most and the fewest instructions for guesses of a length, wrong at one
 * place or, at the end, none. */
static int64_t spread(compare same, size_t len)
{
    char    guess[2 * sizeof(key)];
    int64_t least = INT64_MAX, most = 0;

    for (size_t wrong = 0; wrong <= len; wrong += len > 5 ? len / 5 : 1) {
        int64_t n;

        for (size_t i = 0; i < len; i++)
            guess[i] = i < strlen(key) ? key[i] : '.';
        guess[len] = 0;
        if (wrong < len)
            guess[wrong] ^= 0x15;
        n     = steps_of(same, guess);
        least = n < least ? n : least;
        most  = n > most ? n : most;
    }
    return least < 0 ? -1 : most - least;
}

static void same_work(void **state)
{
    static const size_t len[] = { sizeof(key) - 1, 5, 60 };

    (void)state;
    if (SANITIZED || steps_of(srv_same_key, key) < 0) /* a sanitizer's own steps vary */
        skip();
    for (size_t i = 0; i < sizeof(len) / sizeof(*len); i++)
        assert_int_equal(spread(srv_same_key, len[i]), 0);
    assert_true(spread(leaks, sizeof(key) - 1) > (int64_t)sizeof(key)); /* it would be seen */
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(right_or_wrong),
                                        cmocka_unit_test(same_work) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
