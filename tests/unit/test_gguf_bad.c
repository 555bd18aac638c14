/* SPDX-License-Identifier: Apache-2.0 */
/* test_gguf_bad.c - what damaged files must say, the limit on memory, failing allocations.  Files
 * lie in exact heap copies, so that a sanitizer sees any read beyond their end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/format.h"
#include "fuzz/memory_files.h"

#ifndef KVD_TEST_DATA
#define KVD_TEST_DATA "tests/data"
#endif

#define MIB (1024u * 1024u)

static const struct {
    const char *name;
    kvd_status  code;
    const char *says; /* after the path; of a set's other file, with its name */
} bad[] = {
    { "empty", KVD_E_CORRUPT,
      "offset 0: not a GGUF file: expected \"GGUF\", found \"\" (the file has 0" },
    { "magic", KVD_E_CORRUPT, "offset 0: not a GGUF file: expected \"GGUF\", found \"GGML\"" },
    { "magic-short", KVD_E_CORRUPT, "found \"GGU\" (the file has 3 bytes)" },
    { "version-0", KVD_E_UNSUPPORTED, "offset 4: GGUF version 0; expected 2 or 3" },
    { "version-1", KVD_E_UNSUPPORTED, "offset 4: GGUF version 1 is not supported" },
    { "version-4", KVD_E_UNSUPPORTED, "GGUF version 4; expected 2 or 3" },
    { "big-endian", KVD_E_UNSUPPORTED, "a big-endian GGUF file (version 3)" },
    { "header-short", KVD_E_CORRUPT,
      "inside the header: at least 16 bytes expected, the file has 12" },
    { "n-kv-huge", KVD_E_CORRUPT, "18446744073709551615 metadata keys; at most 65536" },
    { "n-kv-file", KVD_E_CORRUPT,
      "60000 metadata keys need at least 840024 bytes, the file has 69" },
    { "n-tensor-huge", KVD_E_CORRUPT, "9223372036854775808 tensors; at most 1048576" },
    { "n-tensor-file", KVD_E_CORRUPT,
      "1000000 tensors need at least 33000024 bytes, the file has 69" },
    { "key-empty", KVD_E_CORRUPT, "offset 24: a metadata key of 0 bytes; expected 1 to 65535" },
    { "key-long", KVD_E_CORRUPT, "a metadata key of 65536 bytes" },
    { "key-zero", KVD_E_CORRUPT, "offset 32: a metadata key holds a zero byte" },
    { "key-beyond", KVD_E_CORRUPT,
      "inside a metadata key: at least 1032 bytes expected, the file has 44" },
    { "key-wraps", KVD_E_CORRUPT, "inside a metadata key: at least 18446744073709551615" },
    { "kv-type", KVD_E_CORRUPT, "offset 33: key \"k\": unknown metadata type 13" },
    { "kv-short", KVD_E_CORRUPT,
      "inside a metadata value: at least 97 bytes expected, the file has 94" },
    { "elem-type", KVD_E_CORRUPT, "key \"k\": unknown element type 99" },
    { "array-nested", KVD_E_UNSUPPORTED, "key \"k\": an array of arrays is not supported" },
    { "array-huge", KVD_E_CORRUPT, "inside an array: at least 18446744073709551615" },
    { "array-beyond", KVD_E_CORRUPT,
      "inside an array: at least 61 bytes expected, the file has 57" },
    { "strings-beyond", KVD_E_CORRUPT, "the file has 81" },
    { "strings-huge", KVD_E_CORRUPT, "inside an array: at least 8796093022257 bytes" },
    { "string-wraps", KVD_E_CORRUPT, "inside a metadata string" },
    { "bool-2", KVD_E_CORRUPT, "offset 37: key \"k\": a bool is 2; expected 0 or 1" },
    { "bools-3", KVD_E_CORRUPT, "offset 51: key \"k\": a bool is 3; expected 0 or 1" },
    { "key-twice", KVD_E_CORRUPT, "key \"a\" occurs twice" },
    { "align-0", KVD_E_CORRUPT, "alignment 0; expected a power of two from 8 to 16777216" },
    { "align-3", KVD_E_CORRUPT, "alignment 3;" },
    { "align-4", KVD_E_CORRUPT, "alignment 4;" },
    { "align-huge", KVD_E_CORRUPT, "alignment 2147483648;" },
    { "align-type", KVD_E_CORRUPT, "key \"general.alignment\" is of type u64; expected u32" },
    { "name-empty", KVD_E_CORRUPT, "a tensor name of 0 bytes; expected 1 to 256" },
    { "name-long", KVD_E_CORRUPT, "a tensor name of 257 bytes" },
    { "name-zero", KVD_E_CORRUPT, "a tensor name holds a zero byte" },
    { "n-dim-0", KVD_E_CORRUPT, "tensor \"w\" has 0 dimensions; expected 1 to 4" },
    { "n-dim-5", KVD_E_CORRUPT, "tensor \"w\" has 5 dimensions" },
    { "dim-0", KVD_E_CORRUPT, "offset 90: tensor \"w\": dimension 1 is 0" },
    { "dims-wrap", KVD_E_CORRUPT, "tensor \"w\": its dimensions overflow" },
    { "dims-sign", KVD_E_CORRUPT, "tensor \"w\": its dimensions overflow" },
    { "size-wraps", KVD_E_CORRUPT, "tensor \"w\": its size overflows" },
    { "row-partial", KVD_E_CORRUPT, "rows of 48 elements; Q4_0 needs a multiple of 32" },
    { "tensor-type", KVD_E_UNSUPPORTED, "tensor \"w\": unknown type 1000" },
    { "offset-unaligned", KVD_E_CORRUPT, "tensor \"w\": data offset 8; expected a multiple of 32" },
    { "offset-wraps", KVD_E_CORRUPT, "tensor \"w\" lies beyond the end of the file" },
    { "offset-beyond", KVD_E_CORRUPT, "4352 bytes expected, the file has 256 (truncated?)" },
    { "truncated", KVD_E_CORRUPT, "256 bytes expected, the file has 255 (truncated?)" },
    { "truncated-unread", KVD_E_CORRUPT, "4224 bytes expected, the file has 256" },
    { "tensor-twice", KVD_E_CORRUPT, "tensor \"w\" occurs twice" },
    { "overlap", KVD_E_CORRUPT, "tensors overlap: up to \"b\" they take more than the 128 bytes" },
    { "directory-short", KVD_E_CORRUPT,
      "inside a tensor name: at least 117 bytes expected, the file has 110" },
    { "missing-00001-of-00002", KVD_E_IO, "file 2 of 2 of the split set: " },
    { "missing-00001-of-00002", KVD_E_IO, "bad-missing-00002-of-00002.gguf: No such file" },
    { "split-name", KVD_E_INVAL, "must be named NAME-00001-of-00002.gguf" },
    { "split-huge-00001-of-65535", KVD_E_CORRUPT, "\"split.count\" is 65535; at most 1000" },
    { "split-type-00001-of-00002", KVD_E_CORRUPT,
      "key \"split.count\" is not an unsigned integer" },
    { "split-total-00001-of-00002", KVD_E_CORRUPT, "2 tensors in 2 files; expected 3" },
    { "split-total-00002-of-00002", KVD_E_INVAL, "file 2 of a split set of 2; open the first one" },
    { "split-no-00001-of-00002", KVD_E_CORRUPT,
      "split-no-00002-of-00002.gguf: offset 0: expected split.no 1" },
    { "split-none-00001-of-00002", KVD_E_CORRUPT,
      "split-none-00002-of-00002.gguf: offset 0: not part of a" },
    { "split-dup-00001-of-00002", KVD_E_CORRUPT, "tensor \"w0\" occurs twice" },
    { "split-cut-00001-of-00002", KVD_E_CORRUPT,
      "split-cut-00002-of-00002.gguf: offset 128: tensor \"w1\"" },
};

static void each_defect_is_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(bad); i++) {
        char       path[512];
        gguf_file *g   = (gguf_file *)path;
        kvd_err    err = { 0 };
        kvd_status st;

        snprintf(path, sizeof(path), "%s/gguf/bad-%s.gguf", KVD_TEST_DATA, bad[i].name);
        st = gguf_open(&g, path, &err);
        if (st != bad[i].code || err.code != st || !strstr(err.msg, bad[i].says) ||
            !strstr(err.msg, "gguf/bad-"))
            fail_msg("%s: expected \"%s\", got %s: %s", bad[i].name, bad[i].says,
                     kvd_status_name(st), err.msg);
        assert_null(g);
        assert_null(strchr(err.msg, '\n'));
        assert_int_equal(gguf_open(&g, path, NULL), st); /* err may be NULL */
        assert_int_equal(kvd_alloc_live(), 0);
    }
}

static void other_failures(void **state)
{
    char       path[700];
    gguf_file *g;
    kvd_err    err;

    (void)state;
    assert_int_equal(gguf_open(&g, "/nonexistent/m.gguf", &err), KVD_E_IO);
    assert_non_null(strstr(err.msg, "/nonexistent/m.gguf"));
    assert_int_equal(err.sys, ENOENT);
    /* The cause survives a path that would fill the message; unprintable bytes do not. */
    memset(path, 'p', sizeof(path));
    path[sizeof(path) - 1] = 0;
    memory_file[0].path    = path;
    memory_file[0].data    = (const uint8_t *)"\n\1\xff?";
    memory_file[0].bytes   = 4;
    assert_int_equal(gguf_open(&g, path, &err), KVD_E_CORRUPT);
    assert_non_null(
        strstr(err.msg, "ppp: offset 0: not a GGUF file: expected \"GGUF\", found \"????\""));
    memory_file[0].path = NULL;
}

/* Opens bytes as a file and looks at all of it. */
static kvd_status try_bytes(const uint8_t *data, size_t bytes, kvd_err *err)
{
    gguf_file *g;
    kvd_buf    b = { 0 };
    kvd_status st;

    memory_file[0].path  = "memory.gguf";
    memory_file[0].data  = data;
    memory_file[0].bytes = bytes;
    st                   = gguf_open(&g, "memory.gguf", err);
    if (st == KVD_OK) {
        for (uint64_t i = 0; i < gguf_n_tensor(g); i++) {
            const gguf_tensor *t = gguf_tensor_at(g, i);

            if (t->data)
                assert_true((((const uint8_t *)t->data)[t->bytes - 1] & 0x100) == 0);
        }
        gguf_to_json(g, &b);
        kvd_buf_free(&b);
        gguf_close(g);
    }
    memory_file[0].path = NULL;
    assert_int_equal(kvd_alloc_live(), 0);
    return st;
}

static uint8_t *load_all(size_t *bytes)
{
    os_map m;

    assert_int_equal(os_map_open(&m, KVD_TEST_DATA "/gguf/good-all.gguf", NULL), KVD_OK);
    *bytes = (size_t)m.bytes;
    return (uint8_t *)(uintptr_t)m.data;
}

static void every_cut_is_an_error_with_both_sizes(void **state)
{
    size_t   n, end;
    uint8_t *d = load_all(&n);
    char     has[64];

    (void)state;
    for (end = n; end && d[end - 1] == 0; end--)
        ; /* the writer pads the last tensor */
    assert_int_equal(try_bytes(d, n, NULL), KVD_OK);
    for (size_t cut = 0; cut < end; cut += cut < 3000 ? 1 : 37) {
        kvd_err err = { 0 };

        if (try_bytes(d, cut, &err) != KVD_E_CORRUPT)
            fail_msg("cut at %zu: %s", cut, err.msg);
        snprintf(has, sizeof(has), "the file has %zu", cut);
        if (cut < n && !strstr(err.msg, has))
            fail_msg("cut at %zu: %s", cut, err.msg);
    }
    free(d);
}

static void random_damage_is_survived(void **state)
{
    const uint64_t seed = kvd_now_ns();
    size_t         n;
    uint8_t       *good = load_all(&n), *d = malloc(n);
    kvd_rng        r;
    int            n_ok = 0;

    (void)state;
    assert_non_null(d);
    print_message("seed %llu\n", (unsigned long long)seed);
    kvd_rng_seed(&r, seed);
    for (int round = 0; round < 3000; round++) {
        memcpy(d, good, n);
        for (uint64_t k = 1 + kvd_rng_below(&r, 3); k; k--) {
            const uint64_t at = 8 + kvd_rng_below(&r, 2712); /* the header, behind its version */

            d[at] = kvd_rng_below(&r, 2) ? (uint8_t)kvd_rng_u64(&r)
                                         : (uint8_t)(d[at] ^ 1u << kvd_rng_below(&r, 8));
        }
        n_ok += try_bytes(d, n, NULL) == KVD_OK;
    }
    assert_true(n_ok > 0 && n_ok < 3000);
    free(d);
    free(good);
}

/* ---- memory ---------------------------------------------------------------------- */

static void put(kvd_buf *b, uint64_t v, size_t bytes)
{
    kvd_buf_put(b, &v, bytes);
}

static void begin(kvd_buf *b, uint64_t n_tensor, uint64_t n_kv)
{
    *b = (kvd_buf){ 0 };
    kvd_buf_puts(b, "GGUF");
    put(b, 3, 4);
    put(b, n_tensor, 8);
    put(b, n_kv, 8);
}

/* The shortest names there are: digits of i in base 200, without zero bytes. */
static void put_name(kvd_buf *b, uint64_t i)
{
    char     c[8];
    uint64_t n = 0;

    do {
        c[n++] = (char)(1 + i % 200);
        i /= 200;
    } while (i);
    put(b, n, 8);
    kvd_buf_put(b, c, n);
}

/* Opens what b holds (all of it header); the most memory taken must be in the limit. */
static void check_peak(const char *what, kvd_buf *b, kvd_status want)
{
    const uint64_t bytes = b->len, before = kvd_alloc_bytes();
    gguf_file     *g;
    kvd_err        err = { 0 };
    uint64_t       peak;
    kvd_status     st;

    assert_false(b->oom);
    memory_file[0].path  = "memory.gguf";
    memory_file[0].data  = (const uint8_t *)b->data;
    memory_file[0].bytes = b->len;
    (void)kvd_alloc_peak(true);
    st   = gguf_open(&g, "memory.gguf", &err);
    peak = kvd_alloc_peak(false) - before;
    if (st != want)
        fail_msg("%s: %s", what, err.msg);
    print_message("%s: header %.1f MiB, peak %.1f MiB\n", what, (double)bytes / MIB,
                  (double)peak / MIB);
    assert_true(peak <= 4 * bytes + 16 * MIB);
    if (g) {
        assert_true(gguf_heap_bytes(g) <= peak && gguf_heap_bytes(g) >= peak / 2);
        assert_int_equal(gguf_header_bytes(g), bytes);
    }
    gguf_close(g);
    memory_file[0].path = NULL;
    kvd_buf_free(b);
    assert_int_equal(kvd_alloc_live(), 0);
}

static void memory_stays_in_proportion(void **state)
{
    kvd_buf b;

    (void)state;
    begin(&b, 0, 65536);
    for (uint64_t i = 0; i < 65536; i++) {
        put_name(&b, i);
        put(&b, GGUF_BOOL, 4);
        put(&b, 1, 1);
    }
    check_peak("65536 shortest keys", &b, KVD_OK);

    begin(&b, 0, 65536);
    for (uint64_t i = 0; i < 65536; i++) { /* each with an index on the heap */
        put_name(&b, i);
        put(&b, GGUF_ARRAY, 4);
        put(&b, GGUF_STRING, 4);
        put(&b, 1, 8);
        put(&b, 0, 8);
    }
    check_peak("65536 shortest arrays of strings", &b, KVD_OK);

    begin(&b, 0, 1);
    put_name(&b, 0);
    put(&b, GGUF_ARRAY, 4);
    put(&b, GGUF_STRING, 4);
    put(&b, 4000000, 8);
    for (uint64_t i = 0; i < 4000000; i++)
        put(&b, 0, 8);
    check_peak("4000000 empty strings", &b, KVD_OK);

    for (uint64_t n = 1u << 18; n <= 1u << 20; n *= 4) {
        begin(&b, n, 0);
        for (uint64_t i = 0; i < n; i++) {
            put_name(&b, i);
            put(&b, 1, 4);
            put(&b, 1, 8);
            put(&b, 24, 4); /* I8: not read, so it needs no data */
            put(&b, i + 1 == 1u << 18 && i + 1 == n ? 8 : 0, 8); /* the first file's last: wrong */
        }
        while (b.len % 32)
            kvd_buf_putc(&b, 0);
        check_peak("2^18 or 2^20 shortest tensors", &b, n == 1u << 18 ? KVD_E_CORRUPT : KVD_OK);
    }
}

static void claims_take_no_memory(void **state)
{
    kvd_buf b;

    (void)state;
    /* A small header in front of 64 MiB that could hold what it claims. */
    begin(&b, 1u << 20, 0);
    kvd_buf_reserve(&b, 64 * MIB);
    memset(b.data + b.len, 0xff, 64 * MIB - b.len);
    b.len = 64 * MIB;
    {
        const uint64_t before = kvd_alloc_bytes();
        gguf_file     *g;

        memory_file[0].path  = "memory.gguf";
        memory_file[0].data  = (const uint8_t *)b.data;
        memory_file[0].bytes = b.len;
        (void)kvd_alloc_peak(true);
        assert_int_equal(gguf_open(&g, "memory.gguf", NULL), KVD_E_CORRUPT);
        assert_true(kvd_alloc_peak(false) - before < 4096);
    }
    memory_file[0].path = NULL;
    kvd_buf_free(&b);
}

/* ---- failing allocations --------------------------------------------------------- */

static void each_failed_allocation_is_clean(void **state)
{
    static const char *const names[] = { "good-all", "good-00001-of-00003", "good-bare" };

    (void)state;
    for (size_t k = 0; k < KVD_COUNTOF(names); k++) {
        char path[512];
        int  n_failed = 0;

        snprintf(path, sizeof(path), "%s/gguf/%s.gguf", KVD_TEST_DATA, names[k]);
        for (int64_t n = 0;; n++) {
            gguf_file *g   = (gguf_file *)path;
            kvd_err    err = { 0 };
            kvd_buf    b   = { 0 };
            kvd_status st;
            bool       hit;

            assert_true(n < 1000);
            kvd_alloc_fault(n, n % 2 == 1);
            st = gguf_open(&g, path, &err);
            if (st == KVD_OK)
                gguf_to_json(g, &b);
            hit = kvd_alloc_fault_hit();
            kvd_alloc_fault(-1, false);
            if (st != KVD_OK) {
                assert_int_equal(st, KVD_E_NOMEM);
                assert_true(hit && g == NULL && strstr(err.msg, "no memory"));
                n_failed++;
            }
            assert_true(hit == (st != KVD_OK || b.oom));
            kvd_buf_free(&b);
            gguf_close(g);
            assert_int_equal(kvd_alloc_live(), 0);
            if (!hit)
                break;
        }
        assert_true(n_failed >= 7);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_defect_is_named),
        cmocka_unit_test(other_failures),
        cmocka_unit_test(every_cut_is_an_error_with_both_sizes),
        cmocka_unit_test(random_damage_is_survived),
        cmocka_unit_test(memory_stays_in_proportion),
        cmocka_unit_test(claims_take_no_memory),
        cmocka_unit_test(each_failed_allocation_is_clean),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
