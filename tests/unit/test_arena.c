/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdalign.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

static void test_alignment_and_content(void **state)
{
    kvd_arena a;
    char     *piece[500];

    (void)state;
    kvd_arena_init(&a, 1u << 20);
    for (size_t i = 0; i < 500; i++) {
        piece[i] = i % 2 ? kvd_arena_bytes(&a, i) : kvd_arena_alloc(&a, i);
        assert_non_null(piece[i]);
        if (i % 2 == 0)
            assert_int_equal((uintptr_t)piece[i] % alignof(max_align_t), 0);
        memset(piece[i], (int)(i & 0xff), i);
    }
    for (size_t i = 0; i < 500; i++) {
        for (size_t k = 0; k < i; k++)
            assert_int_equal((unsigned char)piece[i][k], i & 0xff);
    }
    kvd_arena_free(&a);
    assert_int_equal(kvd_alloc_live(), 0);
}

static void test_limit(void **state)
{
    kvd_arena a;
    size_t    got = 0;

    (void)state;
    kvd_arena_init(&a, 100000);
    while (kvd_arena_alloc(&a, 1000))
        got += 1000;
    assert_true(a.full);
    assert_true(a.held <= 100000);
    assert_in_range(got, 80000, 100000);
    assert_null(kvd_arena_alloc(&a, SIZE_MAX));
    assert_null(kvd_arena_alloc(&a, SIZE_MAX - 8));
    assert_null(kvd_arena_calloc(&a, SIZE_MAX / 2, 4));
    kvd_arena_free(&a);
    assert_non_null(kvd_arena_alloc(&a, 1000)); /* usable again */
    kvd_arena_free(&a);
}

static void test_extend(void **state)
{
    kvd_arena a;
    char     *p, *q;

    (void)state;
    kvd_arena_init(&a, 1u << 20);
    p = kvd_arena_bytes(&a, 10);
    assert_non_null(p);
    assert_true(kvd_arena_extend(&a, p, 10, 20));
    q = kvd_arena_bytes(&a, 1);
    assert_ptr_equal(q, p + 30);
    assert_false(kvd_arena_extend(&a, p, 30, 1));      /* q lies behind it */
    assert_false(kvd_arena_extend(&a, q, 1, 1 << 20)); /* beyond the block */
    kvd_arena_free(&a);
    assert_false(kvd_arena_extend(&a, p, 0, 0));
}

static void test_heap_failure(void **state)
{
    kvd_arena a;

    (void)state;
    kvd_arena_init(&a, 1u << 20);
    kvd_alloc_fault(0, false);
    assert_null(kvd_arena_alloc(&a, 1));
    assert_false(a.full);
    assert_true(kvd_alloc_fault_hit());
    kvd_alloc_fault(-1, false);
    assert_non_null(kvd_arena_alloc(&a, 1));
    kvd_arena_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alignment_and_content),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_extend),
        cmocka_unit_test(test_heap_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
