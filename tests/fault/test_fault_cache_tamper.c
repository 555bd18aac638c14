/* SPDX-License-Identifier: Apache-2.0 */
/* test_fault_cache_tamper.c - a cache directory whose files were tampered with: bits flipped, pages
 * swapped, zeroed, data files cut, the catalogue overwritten.  Every session opens, and its logits
 * are those of a run without a cache, or a prompt that has no other place than the disk is refused.
 * Damage that shows behind the first token is another matter: what was generated sparsely is then
 * evaluated again, exactly.
 * usage: test_fault_cache_tamper [--loads N] [--seed N] */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "support/disk_model.h"
#include "support/tiny.h"

#define N_TEXT 3u
#define N_GEN  60u
#define PAGE   4096

enum { FLIP, SWAP, ZERO, CUT, CATALOG, N_WAY };

static uint32_t   n_load_ = 25;
static uint64_t   seed_   = 1;
static char       clean_[256], dir_[256];
static kvd_model *model_;
static uint64_t   want_[N_TEXT];
/* Loads that were served from the cache, those cut short, those refused, and those whose damage
 * showed behind the first token. */
static uint64_t n_found_, n_lost_, n_refused_, n_late_;

static uint32_t length_of(uint32_t text)
{
    return 1200 + text * 1700; /* the last one has a segment */
}

static uint64_t evaluated_again(kvd_session *s)
{
    kvd_stats st = { .struct_size = sizeof(st) };

    kvd_session_get_stats(s, &st);
    return st.n_disk_again;
}

/* Whether damage shows behind the first token, which fills the windows. */
static kvd_status generate(kvd_session *s, uint64_t *hash, bool *late, kvd_err *err)
{
    uint64_t first = 0, again;

    *late = false;
    KVD_TRY(tiny_generate(s, 1, &first, NULL, err));
    again = evaluated_again(s);
    KVD_TRY(tiny_generate(s, N_GEN - 1, hash, NULL, err));
    *hash ^= first * 3;
    *late = evaluated_again(s) > again;
    return KVD_OK;
}

/* 0: refused.  That may be where the disk is the only place for records, and the catalogue turns
 * out to be damaged behind the open: the next open puts it aside. */
static uint64_t answer(const tiny_options *o, uint32_t text, kvd_stats *st, bool *late)
{
    kvd_err      err  = { 0 };
    uint64_t     hash = 0;
    kvd_session *s;

    if (tiny_session(&s, model_, o, &err) != KVD_OK)
        fail_msg("open: %s", err.msg);
    if (tiny_prefill(s, text, length_of(text), &err) != KVD_OK ||
        generate(s, &hash, late, &err) != KVD_OK) {
        if (err.code != KVD_E_FULL || o->kv_host == 0 ||
            !strstr(err.msg, "has not taken the blocks"))
            fail_msg("text %u: %s", text, err.msg);
        hash = 0;
    }
    kv_check(s->kv);
    *st = (kvd_stats){ .struct_size = sizeof(*st) };
    kvd_session_get_stats(s, st);
    kvd_session_close(s);
    return hash;
}

static void read_page(FILE *f, long at, uint8_t page[PAGE])
{
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    assert_int_equal(fread(page, 1, PAGE, f), PAGE);
}

static void write_page(FILE *f, long at, const uint8_t page[PAGE])
{
    assert_int_equal(fseek(f, at, SEEK_SET), 0);
    assert_int_equal(fwrite(page, 1, PAGE, f), PAGE);
}

static void tamper_pages(FILE *f, long n_page, int way, kvd_rng *rng)
{
    for (uint64_t n = 1 + kvd_rng_below(rng, 4); n > 0; n--) {
        const long a = (long)kvd_rng_below(rng, (uint64_t)n_page) * PAGE;
        const long b = (long)kvd_rng_below(rng, (uint64_t)n_page) * PAGE;
        uint8_t    one[PAGE], other[PAGE];

        read_page(f, a, one);
        read_page(f, b, other);
        if (way == SWAP) {
            write_page(f, b, one);
            write_page(f, a, other);
        } else if (way == ZERO) {
            memset(one, 0, sizeof(one));
            write_page(f, a, one);
        } else {
            one[kvd_rng_below(rng, PAGE)] ^= (uint8_t)(1u << kvd_rng_below(rng, 8));
            write_page(f, a, one);
        }
    }
}

static void tamper(int way, kvd_rng *rng)
{
    char  path[300];
    FILE *f;
    long  n_page;

    snprintf(path, sizeof(path), "%s/%s", dir_, way == CATALOG ? "catalog.db" : "00000001.kvd");
    f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    n_page = ftell(f) / PAGE;
    if (way == CUT)
        assert_int_equal(ftruncate(fileno(f), (off_t)kvd_rng_below(rng, (uint64_t)n_page * PAGE)),
                         0);
    else
        tamper_pages(f, n_page, way == CATALOG ? (int)kvd_rng_below(rng, CUT) : way, rng);
    assert_int_equal(fclose(f), 0);
}

static void load_tampered(kvd_rng *rng, uint32_t load)
{
    const uint32_t     text = (uint32_t)kvd_rng_below(rng, N_TEXT);
    const int          way  = (int)kvd_rng_below(rng, N_WAY);
    const tiny_options o    = { .dir     = dir_,
                                .tiers   = kvd_rng_below(rng, 2),
                                .kv_host = kvd_rng_below(rng, 2) ? 0 : 60000,
                                .mode    = KVD_ATTENTION_SPARSE };
    kvd_stats          st;
    uint64_t           hash = 0;
    bool               late = false;

    dm_dir_empty(dir_);
    dm_dir_copy(clean_, dir_);
    tamper(way, rng);
    hash = answer(&o, text, &st, &late);
    n_refused_ += hash == 0;
    assert_true(hash != 0 || way == CATALOG);
    n_late_ += late;
    if (hash != 0 && hash != want_[text] && !late)
        fail_msg("load %u: text %u differs (way %d, %s, host %llu)", load, text, way,
                 o.tiers ? "tiers" : "resident", (unsigned long long)o.kv_host);
    n_found_ += st.n_cached > 0;
    n_lost_ += st.n_cached + 1 < length_of(text);
    if (answer(&o, text, &st, &late) != want_[text] && !late) /* over what the first has left */
        fail_msg("load %u: text %u differs the second time (way %d)", load, text, way);
}

static void tampered_loads(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, seed_);
    for (uint32_t i = 0; i < n_load_; i++)
        load_tampered(&rng, i);
    print_message("%u loads: %llu found something, %llu not all of it, %llu refused, %llu late\n",
                  n_load_, (unsigned long long)n_found_, (unsigned long long)n_lost_,
                  (unsigned long long)n_refused_, (unsigned long long)n_late_);
    assert_true(n_found_ > 0 && n_lost_ > 0 && n_late_ <= n_load_ / 20);
}

static int setup(void **state)
{
    tiny_options o = { .mode = KVD_ATTENTION_SPARSE };
    kvd_stats    st;
    bool         late;

    (void)state;
    dm_dir_make(clean_);
    dm_dir_make(dir_);
    model_ = tiny_model("llama");
    for (uint32_t i = 0; i < N_TEXT; i++)
        want_[i] = answer(&o, i, &st, &late);
    o.dir = clean_;
    for (uint32_t i = 0; i < N_TEXT; i++)
        assert_true(answer(&o, i, &st, &late) == want_[i]);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kvd_model_close(model_);
    dm_dir_remove(clean_);
    dm_dir_remove(dir_);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(tampered_loads, setup, teardown),
    };

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--loads") == 0)
            n_load_ = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seed") == 0)
            seed_ = strtoull(argv[i + 1], NULL, 10);
    }
    print_message("seed %llu\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
