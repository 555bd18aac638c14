/* SPDX-License-Identifier: Apache-2.0 */
/* test_gram_random.c - random schemas, and tokens drawn from what the grammar allows: the text is
 * JSON that fits the schema, by a checker of its own; masks say of every token what it says alone;
 * a place that was kept is a place to go back to. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support/sanitized.h"
#include "support/schema_check.h"
#include "support/tok_vectors.h"

#define N_SCHEMA  (SANITIZED ? 120 : 400)
#define MAX_STEPS 4000

static const char *const vocab_name[] = { "qwen3", "smollm2", "phi-3" };
static ktv               files[3];
static tok              *toks[3];
static gram_vocab       *tries[3];
static uint64_t          seed_ = 1;

static int open_all(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        char    path[512];
        kvd_err err;

        snprintf(path, sizeof(path), KVD_TEST_DATA "/tok/%s.ktv", vocab_name[i]);
        toks[i] = tok_must_open(&files[i], path);
        if (gram_vocab_open(&tries[i], toks[i], &err) != KVD_OK) {
            fprintf(stderr, "%s\n", err.msg);
            return -1;
        }
    }
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        gram_vocab_close(tries[i]);
        tok_close(toks[i]);
        ktv_free(&files[i]);
    }
    return kvd_alloc_live() == 0 ? 0 : -1;
}

/* ---- random schemas ------------------------------------------------------------------------ */

static uint32_t below(kvd_rng *r, uint32_t n)
{
    return (uint32_t)kvd_rng_below(r, n);
}

static json_t *random_schema(kvd_rng *r, int depth);

static json_t *random_string(kvd_rng *r)
{
    static const char *const pattern[] = {
        "^[a-z]{2,5}-[0-9]+$", "^(ab|cd)*$",       "[0-9]{3}",   "^x.*y$",
        "^[^a-z]+$",           "^a?b{2}(c|\"d)+$", "^\\\\[A-F]$"
    };
    static const char *const format[] = { "date", "time", "date-time", "uuid", "email", "ipv4" };
    json_t                  *s        = json_pack("{s:s}", "type", "string");
    const uint32_t           k = below(r, 8), n = below(r, 6);

    if (k == 0 || k == 1)
        json_object_set_new(s, "minLength", json_integer(n));
    if (k == 1 || k == 2)
        json_object_set_new(s, "maxLength", json_integer(n + below(r, 30)));
    if (k == 3 || k == 4)
        json_object_set_new(s, "pattern", json_string(pattern[below(r, 7)]));
    if (k == 4) {
        json_object_set_new(s, "minLength", json_integer(below(r, 4)));
        json_object_set_new(s, "maxLength", json_integer(8 + below(r, 30)));
    }
    if (k == 5)
        json_object_set_new(s, "format", json_string(format[below(r, 6)]));
    return s;
}

static json_t *random_number(kvd_rng *r)
{
    json_t      *s  = json_pack("{s:s}", "type", below(r, 2) ? "integer" : "number");
    const double lo = (double)below(r, 4000) / (below(r, 2) ? 1 : 8) - 1000;
    const double hi = lo + 1 + (double)below(r, 100000) / (below(r, 2) ? 1 : 3);

    if (below(r, 2))
        json_object_set_new(s, below(r, 2) ? "minimum" : "exclusiveMinimum", json_real(lo));
    if (below(r, 2))
        json_object_set_new(s, below(r, 2) ? "maximum" : "exclusiveMaximum", json_real(hi));
    return s;
}

static json_t *random_enum(kvd_rng *r)
{
    json_t *all  = json_pack("[s, s, s, i, f, b, n, [i], {s:i}, s]", "red", "re", "a\"b\\\n", 17,
                             -2.5, 1, 3, "k", 4, "\xc3\xa9t\xc3\xa9");
    json_t *some = json_array(), *s;

    for (size_t i = 0; i < json_array_size(all); i++)
        if (below(r, 2) || json_array_size(some) == 0)
            json_array_append(some, json_array_get(all, i));
    json_decref(all);
    s = below(r, 3) ? json_pack("{s:O}", "enum", some)
                    : json_pack("{s:O, s:s}", "const", json_array_get(some, 0), "title", "x");
    json_decref(some);
    return s;
}

static json_t *random_array(kvd_rng *r, int depth)
{
    json_t *s = json_pack("{s:s, s:o}", "type", "array", "items", random_schema(r, depth - 1));
    const uint32_t n = below(r, 3);

    if (below(r, 2))
        json_object_set_new(s, "minItems", json_integer(n));
    if (below(r, 2))
        json_object_set_new(s, "maxItems", json_integer(n + 1 + below(r, 3)));
    if (below(r, 4) == 0)
        json_object_set_new(s, "prefixItems",
                            json_pack("[o, o]", random_schema(r, depth - 1), random_schema(r, 0)));
    return s;
}

static json_t *random_object(kvd_rng *r, int depth)
{
    static const char *const name[] = { "name", "na", "x", "k\"ey", "\xc3\xa9", "id" };
    json_t                  *props = json_object(), *required = json_array(), *s;
    const uint32_t           n = below(r, 5);

    for (uint32_t i = 0; i < n; i++) {
        const char *key = name[below(r, 6)];

        if (json_object_get(props, key))
            continue;
        json_object_set_new(props, key, random_schema(r, depth - 1));
        if (below(r, 2))
            json_array_append_new(required, json_string(key));
    }
    s = json_pack("{s:s, s:o, s:o}", "type", "object", "properties", props, "required", required);
    switch (below(r, 4)) {
    case 0:
        json_object_set_new(s, "additionalProperties", random_schema(r, depth - 1));
        break;
    case 1:
        json_object_set_new(s, "additionalProperties", json_boolean(below(r, 2)));
        break;
    default:
        break;
    }
    return s;
}

static json_t *random_union(kvd_rng *r, int depth)
{
    switch (below(r, 4)) {
    case 0:
        return json_pack("{s:[o, o]}", "anyOf", random_schema(r, depth - 1),
                         random_schema(r, depth - 1));
    case 1:
        return json_pack("{s:[{s:s}, {s:s, s:o}]}", "oneOf", "type", "null", "type", "array",
                         "items", random_schema(r, depth - 1));
    case 2:
        return json_pack("{s:[o, {s:[s]}]}", "allOf", random_object(r, depth - 1), "required",
                         "id");
    default:
        return json_pack("{s:[s, s, s]}", "type", "string", "integer", "boolean");
    }
}

static json_t *random_schema(kvd_rng *r, int depth)
{
    const uint32_t k = below(r, depth > 0 ? 10 : 5);

    switch (k) {
    case 0:
    case 1:
        return random_string(r);
    case 2:
        return random_number(r);
    case 3:
        return random_enum(r);
    case 4:
        return below(r, 2) ? json_pack("{s:s}", "type", "boolean") : json_pack("{}");
    case 5:
        return random_array(r, depth);
    case 6:
    case 7:
        return random_object(r, depth);
    case 8:
        return random_union(r, depth);
    default:
        return below(r, 2) ? json_pack("{s:s}", "$ref", "#/$defs/node")
                           : json_pack("{s:s, s:s}", "$ref", "#/$defs/node", "description", "d");
    }
}

static json_t *random_root(kvd_rng *r)
{
    json_t *s = random_schema(r, 3);

    json_object_set_new(s, "$defs",
                        json_pack("{s:{s:s, s:{s:{s:s}, s:{s:s, s:{s:s}, s:i}}, s:[s], s:b}}",
                                  "node", "type", "object", "properties", "v", "type", "integer",
                                  "kids", "type", "array", "items", "$ref", "#/$defs/node",
                                  "maxItems", 3, "required", "v", "additionalProperties", 0));
    return s;
}

/* ---- random texts --------------------------------------------------------------------------- */

static bool bit(const uint64_t *bits, uint32_t i)
{
    return bits[i / 64] >> (i % 64) & 1;
}

/* One of the tokens in the mask; late in a text rather one that leads to its end. */
static int32_t pick(kvd_rng *r, const tok *t, const uint64_t *bits, int step)
{
    static const char closing[] = "\"]}";
    const uint32_t    n         = tok_n_token(t);
    uint32_t          count     = 0, k;

    for (uint32_t i = 0; i < n; i++)
        count += bit(bits, i);
    for (uint32_t i = 0; i < n && step > 150; i++) {
        size_t      len;
        const char *s = tok_bytes(t, (int32_t)i, &len);

        if (bit(bits, i) &&
            (tok_is_end(t, (int32_t)i) || (len == 1 && strchr(closing, s[0]) && s[0])) &&
            below(r, 3))
            return (int32_t)i;
    }
    k = below(r, count);
    for (uint32_t i = 0;; i++)
        if (bit(bits, i) && k-- == 0)
            return (int32_t)i;
}

static void check_mask(kvd_rng *r, gram *g, const gram_at *at, const uint64_t *bits, uint32_t n)
{
    for (int k = 0; k < 64; k++) {
        const uint32_t i = below(r, n);

        if (gram_allows(g, at, (int32_t)i) != bit(bits, i))
            fail_msg("token %u: the mask says %d", i, bit(bits, i));
    }
}

/* A text of the grammar, to its end; false: it did not end in time. */
static bool random_text(kvd_rng *r, gram *g, const tok *t, kvd_buf *text)
{
    uint64_t *bits = calloc(tok_n_token(t) / 64 + 1, 8);
    gram_at   at, kept;
    kvd_err   err;
    int       step = 0;

    gram_begin(g, &at);
    for (; step < MAX_STEPS && !at.ended; step++) {
        size_t      len;
        const char *s;
        int32_t     id;

        if (gram_mask(g, &at, bits, &err) != KVD_OK)
            fail_msg("step %d of '%s': %s", step, text->data, err.msg);
        if (below(r, 8) == 0)
            check_mask(r, g, &at, bits, tok_n_token(t));
        id   = pick(r, t, bits, step);
        kept = at;
        if (gram_accept(g, &at, id, &err) != KVD_OK)
            fail_msg("%s", err.msg);
        if (below(r, 50) == 0) { /* go back, and the same way again */
            at = kept;
            assert_int_equal(gram_accept(g, &at, id, &err), KVD_OK);
        }
        s = tok_bytes(t, id, &len);
        if (!at.ended)
            kvd_buf_put(text, s, len);
    }
    free(bits);
    return step < MAX_STEPS;
}

static void run_schema(uint64_t seed, int which, int *n_refused, int *n_long)
{
    kvd_rng     r;
    json_t     *schema, *value;
    char       *json;
    gram_desc   d = { 0 };
    kvd_err     err;
    gram       *g;
    const char *why;

    kvd_rng_seed(&r, seed);
    schema        = random_root(&r);
    json          = json_dumps(schema, JSON_COMPACT);
    d.schema_json = json;
    if (gram_open(&g, tries[which], &d, &err) != KVD_OK) {
        if (!strstr(err.msg, "no value fits") && !strstr(err.msg, "prefixItems in one part"))
            fail_msg("seed %lu: %s\n%s", (unsigned long)seed, err.msg, json);
        ++*n_refused;
    } else {
        for (int k = 0; k < 3; k++) {
            kvd_buf text = { 0 };

            if (!random_text(&r, g, toks[which], &text)) {
                ++*n_long;
            } else {
                value = json_loadb(text.data, text.len, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
                if (!value || !schema_check(schema, schema, value, &why))
                    fail_msg("seed %lu: %s: %s\n%s", (unsigned long)seed, value ? why : "not JSON",
                             text.data, json);
                json_decref(value);
            }
            kvd_buf_free(&text);
        }
        gram_close(g);
    }
    free(json);
    json_decref(schema);
}

static void random_schemas(void **state)
{
    int n_refused = 0, n_long = 0;

    (void)state;
    for (uint32_t i = 0; i < N_SCHEMA; i++)
        run_schema(seed_ * 1000003 + i, i % 3 == 0 ? (int)(i / 3 % 2) + 1 : 0, &n_refused, &n_long);
    printf("%d schemas, %d refused, %d texts cut\n", N_SCHEMA, n_refused, n_long);
    assert_true(n_refused < N_SCHEMA / 10);
    assert_true(n_long < N_SCHEMA / 10);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(random_schemas) };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        seed_ = strtoull(argv[2], NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed_);
    return cmocka_run_group_tests(tests, open_all, close_all);
}
