/* SPDX-License-Identifier: Apache-2.0 */
/* test_backend.c - opening backends, their memory, copies, events and scratch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "os/os.h"

static const kvd_backend_limits some_limits = { .n_token   = 64,
                                                .n_seq     = 2,
                                                .n_col     = 512,
                                                .n_head    = 9,
                                                .n_kv_head = 3,
                                                .head_dim  = 64,
                                                .n_ctx     = 4096 };

static kvd_backend *backend_open(const char *name, uint32_t n_thread)
{
    const kvd_backend_params p = { .name = name, .n_thread = n_thread };
    kvd_backend             *b = NULL;

    assert_int_equal(kvd_backend_open(&b, &p, NULL), KVD_OK);
    assert_non_null(b);
    return b;
}

static void test_names(void **state)
{
    kvd_backend             *b = backend_open(NULL, 0);
    const kvd_backend_params p = { .name = "gpu" };
    kvd_err                  err;

    (void)state;
    assert_string_equal(b->ops->name, "cpu");
    assert_int_equal(b->ops->abi, KVD_BACKEND_ABI);
    assert_int_equal(b->n_thread, os_cpu_get()->n_cpu);
    kvd_backend_close(b);
    b = backend_open("ref", 7);
    assert_string_equal(b->ops->name, "ref");
    assert_int_equal(b->n_thread, 1);
    kvd_backend_close(b);
    kvd_backend_close(NULL);
    assert_int_equal(kvd_backend_open(&b, &p, &err), KVD_E_INVAL);
    assert_null(b);
    assert_non_null(strstr(err.msg, "\"gpu\""));
}

static void test_too_many_threads(void **state)
{
    const kvd_backend_params p = { .n_thread = 100000 };
    kvd_backend             *b;

    (void)state;
    assert_int_equal(kvd_backend_open(&b, &p, NULL), KVD_E_INVAL);
    assert_null(b);
}

static void test_isa_levels(void **state)
{
    const kvd_backend_params bad = { .cpu_isa = "avx1024" };
    kvd_backend             *b;
    kvd_err                  err;

    (void)state;
    assert_int_equal(kvd_backend_open(&b, &bad, &err), KVD_E_INVAL);
    assert_non_null(strstr(err.msg, "avx1024"));
    for (int isa = OS_ISA_PORTABLE; isa <= OS_ISA_AMX; isa++) {
        const char              *name = os_isa_name((os_isa)isa);
        const kvd_backend_params p    = { .cpu_isa = name, .n_thread = 1 };

        if (isa <= (int)os_cpu_get()->isa) {
            assert_int_equal(kvd_backend_open(&b, &p, NULL), KVD_OK);
            assert_non_null(strstr(b->isa, name));
            kvd_backend_close(b);
        } else {
            assert_int_equal(kvd_backend_open(&b, &p, &err), KVD_E_UNSUPPORTED);
            assert_null(b);
            assert_non_null(strstr(err.msg, name));
            assert_non_null(strstr(err.msg, os_isa_name(os_cpu_get()->isa)));
        }
    }
}

static void check_memory(kvd_backend *b)
{
    static const kvd_mem_kind kinds[] = { KVD_MEM_HOST, KVD_MEM_PINNED, KVD_MEM_DEVICE };
    kvd_mem                   m, map = { .ptr = &m, .bytes = 1, .kind = KVD_MEM_MAP };
    kvd_device_memory         dm;

    for (size_t i = 0; i < KVD_COUNTOF(kinds); i++) {
        assert_int_equal(b->ops->mem_alloc(b, kinds[i], 100000, &m, NULL), KVD_OK);
        assert_int_equal(m.bytes, 100000);
        assert_int_equal(m.kind, kinds[i]);
        assert_int_equal((uintptr_t)m.ptr % 64, 0);
        assert_int_equal(((uint8_t *)m.ptr)[99999], 0);
        b->ops->mem_free(b, &m);
        assert_null(m.ptr);
        assert_int_equal(m.kind, KVD_MEM_NONE);
        b->ops->mem_free(b, &m);
    }
    assert_int_equal(b->ops->mem_alloc(b, KVD_MEM_MAP, 1, &m, NULL), KVD_E_INVAL);
    assert_int_equal(b->ops->mem_alloc(b, KVD_MEM_DEVICE, UINT64_MAX, &m, NULL), KVD_E_NOMEM);
    assert_null(m.ptr);
    assert_int_equal(b->ops->mem_alloc(b, KVD_MEM_DEVICE, 0, &m, NULL), KVD_OK);
    b->ops->mem_free(b, &m);
    b->ops->mem_free(b, &map);
    b->ops->memory(b, &dm);
    assert_int_equal(dm.total + dm.free + dm.context + dm.held + dm.scratch + dm.used, 0);
}

static void check_copy_and_events(kvd_backend *b)
{
    kvd_stream *st;
    kvd_event  *ev;
    kvd_mem     x, y;

    assert_int_equal(b->ops->stream_open(b, &st, NULL), KVD_OK);
    assert_int_equal(b->ops->event_open(b, &ev, NULL), KVD_OK);
    assert_int_equal(b->ops->mem_alloc(b, KVD_MEM_HOST, 64, &x, NULL), KVD_OK);
    assert_int_equal(b->ops->mem_alloc(b, KVD_MEM_DEVICE, 64, &y, NULL), KVD_OK);
    memcpy(x.ptr, "0123456789", 10);
    assert_int_equal(b->ops->copy(st, y, 54, x, 2, 10, NULL), KVD_OK);
    assert_int_equal(b->ops->copy(st, y, 64, x, 0, 0, NULL), KVD_OK);
    assert_int_equal(b->ops->event_record(ev, st, NULL), KVD_OK);
    assert_int_equal(b->ops->event_wait(ev, st, NULL), KVD_OK);
    assert_int_equal(b->ops->event_poll(ev, NULL), KVD_OK);
    assert_int_equal(b->ops->stream_sync(st, NULL), KVD_OK);
    assert_memory_equal((uint8_t *)y.ptr + 54, "23456789\0\0", 10);
    b->ops->mem_free(b, &x);
    b->ops->mem_free(b, &y);
    b->ops->event_close(ev);
    b->ops->stream_close(st);
    b->ops->event_close(NULL);
    b->ops->stream_close(NULL);
}

/* Grows to the largest asked for; heads that no kernel takes are refused by name. */
static void check_reserve(kvd_backend *b)
{
    kvd_backend_limits lim = some_limits;
    const uint64_t     one = b->ops->reserve_bytes(b, &lim);
    kvd_err            err;

    assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
    lim.n_ctx *= 4;
    lim.n_col *= 2;
    assert_true(b->ops->reserve_bytes(b, &lim) > one);
    assert_int_equal(b->ops->reserve(b, &lim, NULL), KVD_OK);
    assert_int_equal(b->ops->reserve(b, &some_limits, NULL), KVD_OK);
    lim.head_dim = 100000;
    assert_int_equal(b->ops->reserve(b, &lim, &err), KVD_E_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "100000"));
}

static void test_memory_copies_scratch(void **state)
{
    static const char *const names[] = { "cpu", "ref" };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(names); i++) {
        kvd_backend *b = backend_open(names[i], 2);

        check_memory(b);
        check_copy_and_events(b);
        check_reserve(b);
        kvd_backend_close(b);
    }
}

/* Every allocation fails once: a clean error, nothing left behind. */
static void test_every_allocation_fails_once(void **state)
{
    const kvd_backend_params p    = { .n_thread = 2 };
    const uint64_t           live = kvd_alloc_live();
    bool                     done = false;

    (void)state;
    for (int64_t n = 0; n < 100 && !done; n++) {
        kvd_backend *b = NULL;
        kvd_status   st;

        kvd_alloc_fault(n, false);
        st = kvd_backend_open(&b, &p, NULL);
        if (st == KVD_OK)
            st = b->ops->reserve(b, &some_limits, NULL);
        done = !kvd_alloc_fault_hit();
        kvd_alloc_fault(-1, false);
        assert_int_equal(st, done ? KVD_OK : KVD_E_NOMEM);
        kvd_backend_close(b);
        assert_int_equal(kvd_alloc_live(), live);
    }
    assert_true(done);
}

static void test_beside(void **state)
{
    kvd_backend *b;
    kvd_stream  *st;
    uint64_t     live;
    bool         done = false;

    (void)state;
    assert_int_equal(kvd_backend_open_beside(&b, &st, &some_limits, NULL), KVD_OK);
    assert_string_equal(b->ops->name, "cpu");
    assert_int_equal(b->ops->stream_sync(st, NULL), KVD_OK);
    kvd_backend_close_beside(b, st);
    kvd_backend_close_beside(NULL, NULL);
    live = kvd_alloc_live();
    for (int64_t n = 0; n < 100 && !done; n++) {
        kvd_alloc_fault(n, false);
        if (kvd_backend_open_beside(&b, &st, &some_limits, NULL) == KVD_OK) {
            done = !kvd_alloc_fault_hit();
            kvd_backend_close_beside(b, st);
        } else {
            assert_null(b);
            assert_null(st);
        }
        kvd_alloc_fault(-1, false);
        assert_int_equal(kvd_alloc_live(), live);
    }
    assert_true(done);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_too_many_threads),
        cmocka_unit_test(test_isa_levels),
        cmocka_unit_test(test_memory_copies_scratch),
        cmocka_unit_test(test_every_allocation_fails_once),
        cmocka_unit_test(test_beside),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
