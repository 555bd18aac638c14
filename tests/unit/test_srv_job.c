/* SPDX-License-Identifier: Apache-2.0 */
/* test_srv_job.c - the list of a job's events: its order, when it is full and no more, its end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <pthread.h>
#include <sched.h>

#include "server/srv_job.h"

/* srv_job_unref() frees what shapes have collected; nothing is, here. */
void srv_answer_free(srv_answer *a)
{
    assert_null(a->said.data);
}

static void add(srv_job *j, srv_event_kind kind, uint32_t choice)
{
    static const char text[1000];
    srv_event        *e = srv_event_new(kind, choice, text, sizeof(text), 0);

    assert_non_null(e);
    srv_job_add(j, e);
}

static void take(srv_job *j, uint32_t choice)
{
    srv_event *e = srv_job_take(j);

    assert_non_null(e);
    assert_int_equal(e->choice, choice);
    srv_event_free(e);
}

/* It is told once that there is room again, and only where the other side has waited for it. */
static void full_and_no_more(void **state)
{
    const uint64_t live = kvd_alloc_live();
    srv_job       *j    = srv_job_new();
    uint32_t       n = 0, taken = 0;

    (void)state;
    j->req.stream = true;
    while (!srv_job_full(j))
        add(j, SRV_EVENT_TEXT, n++);
    assert_in_range(n, 100, SRV_EVENT_BYTES / 1000 + 1);
    assert_false(srv_job_resumes(j));
    take(j, taken++);
    assert_true(srv_job_resumes(j));
    assert_false(srv_job_resumes(j));
    add(j, SRV_EVENT_TEXT, n++); /* full, but nobody has looked */
    take(j, taken++);
    assert_false(srv_job_resumes(j));
    add(j, SRV_EVENT_TEXT, n++);
    assert_true(srv_job_full(j));
    j->req.stream = false; /* who takes all at the end is never behind */
    assert_false(srv_job_full(j));
    while (taken < n)
        take(j, taken++);
    assert_null(srv_job_take(j));
    srv_job_unref(j);
    assert_int_equal(kvd_alloc_live(), live);
}

static void ends(void **state)
{
    srv_job *j = srv_job_new();

    (void)state;
    add(j, SRV_EVENT_TEXT, 1);
    assert_false(srv_job_ended(j));
    srv_job_lose(j); /* what comes behind is dropped */
    add(j, SRV_EVENT_END, 2);
    assert_true(srv_job_ended(j));
    assert_false(srv_job_lost(j));
    take(j, 1);
    assert_true(srv_job_lost(j));
    assert_null(srv_job_take(j));
    srv_job_unref(j);

    j = srv_job_new();
    add(j, SRV_EVENT_END, 1);
    assert_true(srv_job_ended(j));
    srv_job_ref(j);
    srv_job_unref(j);
    take(j, 1);
    assert_false(srv_job_lost(j));
    srv_job_unref(j);
}

static void *count_and_end(void *arg)
{
    srv_job *j = arg;

    for (uint32_t i = 1; i <= 1000; i++) {
        j->usage.n_generated = i;
        if (i % 100 == 0)
            add(j, SRV_EVENT_TEXT, 0);
    }
    add(j, SRV_EVENT_END, 0);
    return NULL;
}

/* Behind END usage may be read without the lock: whoever sees it finished sees all of it.  A
 * thread sanitizer finds it if that orders nothing. */
static void finishes(void **state)
{
    srv_job  *j = srv_job_new();
    pthread_t thread;

    (void)state;
    assert_false(srv_job_finished(j));
    assert_int_equal(pthread_create(&thread, NULL, count_and_end, j), 0);
    while (!srv_job_finished(j))
        sched_yield();
    assert_int_equal(j->usage.n_generated, 1000);
    pthread_join(thread, NULL);
    for (srv_event *e; (e = srv_job_take(j));)
        srv_event_free(e);
    assert_true(srv_job_finished(j));
    srv_job_unref(j);

    j = srv_job_new(); /* an error is an end, but nothing has finished */
    add(j, SRV_EVENT_ERROR, 0);
    assert_true(srv_job_ended(j) && !srv_job_finished(j));
    take(j, 0);
    srv_job_unref(j);
    j = srv_job_new(); /* nor has what was lost */
    srv_job_lose(j);
    add(j, SRV_EVENT_END, 0);
    assert_true(srv_job_ended(j) && !srv_job_finished(j));
    srv_job_unref(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_and_no_more),
        cmocka_unit_test(ends),
        cmocka_unit_test(finishes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
