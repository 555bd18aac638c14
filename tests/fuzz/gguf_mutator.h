/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_mutator.h - mutations of GGUF bytes for fuzz targets.
 *
 * Finds the fields of a file and bends one (or copies, drops, grows an entry), keeping counts and
 * padding right more often than not, so that mutations reach past the first length check.
 * Include it in one file of a program.  One thread. */
#ifndef KVD_TEST_GGUF_MUTATOR_H
#define KVD_TEST_GGUF_MUTATOR_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/format.h"

/* libFuzzer's own; absent in the replay program. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size) __attribute__((weak));

/* A claim of the target that the sanitizers cannot see. */
#define must(e)                                                     \
    do {                                                            \
        if (!(e)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #e); \
            abort();                                                \
        }                                                           \
    } while (0)

typedef enum field_kind { F_COUNT, F_LEN, F_TYPE, F_DIM, F_OFFSET, F_VALUE, F_BYTES } field_kind;

typedef struct field {
    size_t     at, bytes;
    field_kind kind;
} field;

typedef struct entry { /* one key with its value, or one tensor */
    size_t at, bytes;
    bool   tensor;
} entry;

#define FIELD_MAX 4096
#define ENTRY_MAX 512

/* The input as far as it can be read; everything after stop is padding and data, or unreadable. */
static struct {
    field  field[FIELD_MAX];
    entry  entry[ENTRY_MAX];
    size_t n_field, n_entry, stop;
} map;

static kvd_rng rng;

static const char *const *mutator_words; /* strings worth putting in; the target sets them */
static size_t             mutator_n_word;

static uint64_t below(uint64_t n)
{
    return n ? kvd_rng_below(&rng, n) : 0;
}

static uint64_t get(const uint8_t *p, size_t bytes)
{
    uint64_t v = 0;

    memcpy(&v, p, bytes < 8 ? bytes : 8);
    return v;
}

/* Notes a field at *at and moves on; false at the end of the input. */
static bool note(size_t size, size_t *at, uint64_t bytes, field_kind kind)
{
    if (bytes > size - *at || map.n_field == FIELD_MAX)
        return false;
    map.field[map.n_field++] = (field){ *at, (size_t)bytes, kind };
    *at += (size_t)bytes;
    return true;
}

static bool note_str(const uint8_t *d, size_t size, size_t *at)
{
    return note(size, at, 8, F_LEN) && note(size, at, get(d + *at - 8, 8), F_BYTES);
}

static bool note_value(const uint8_t *d, size_t size, size_t *at, uint64_t type)
{
    static const uint8_t bytes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

    if (type == GGUF_STRING)
        return note_str(d, size, at);
    return type < sizeof(bytes) && note(size, at, bytes[type], F_VALUE);
}

static bool note_kv(const uint8_t *d, size_t size, size_t *at)
{
    uint64_t type, n;

    if (!note_str(d, size, at) || !note(size, at, 4, F_TYPE))
        return false;
    type = get(d + *at - 4, 4);
    if (type != GGUF_ARRAY)
        return note_value(d, size, at, type);
    if (!note(size, at, 4, F_TYPE) || !note(size, at, 8, F_COUNT))
        return false;
    type = get(d + *at - 12, 4);
    n    = get(d + *at - 8, 8);
    for (uint64_t i = 0; i < n; i++) {
        if (!note_value(d, size, at, type))
            return false;
    }
    return true;
}

static bool note_tensor(const uint8_t *d, size_t size, size_t *at)
{
    uint64_t n;

    if (!note_str(d, size, at) || !note(size, at, 4, F_COUNT))
        return false;
    n = get(d + *at - 4, 4);
    for (uint64_t i = 0; i < n; i++) {
        if (!note(size, at, 8, F_DIM))
            return false;
    }
    return note(size, at, 4, F_TYPE) && note(size, at, 8, F_OFFSET);
}

static void map_input(const uint8_t *d, size_t size)
{
    size_t at = 4;
    bool   ok = size >= 24;

    map.n_field = map.n_entry = 0;
    if (ok) {
        const uint64_t n_tensor = get(d + 8, 8), n_kv = get(d + 16, 8);

        ok = note(size, &at, 4, F_VALUE) && note(size, &at, 8, F_COUNT) &&
             note(size, &at, 8, F_COUNT);
        for (uint64_t i = 0; ok && map.n_entry < ENTRY_MAX && i < n_kv + n_tensor; i++) {
            const size_t begin = at;

            ok = i < n_kv ? note_kv(d, size, &at) : note_tensor(d, size, &at);
            if (ok)
                map.entry[map.n_entry++] = (entry){ begin, at - begin, i >= n_kv };
        }
    }
    map.stop = at < size ? at : size;
}

/* Replaces old bytes at at by fresh ones (which may lie in d itself); 0 if there is no room. */
static size_t splice(uint8_t *d, size_t size, size_t max, size_t at, size_t old,
                     const uint8_t *fresh, size_t bytes)
{
    uint8_t *copy;

    if (size - old + bytes > max)
        return 0;
    copy = malloc(bytes + 1);
    must(copy);
    if (bytes)
        memcpy(copy, fresh, bytes);
    memmove(d + at + bytes, d + at + old, size - at - old);
    if (bytes)
        memcpy(d + at, copy, bytes);
    free(copy);
    return size - old + bytes;
}

static uint64_t interesting(uint64_t now, size_t size)
{
    static const uint64_t k[] = {
        0,          1,          2,          3,          4,          5,         7,
        8,          12,         13,         30,         31,         32,        33,
        64,         255,        256,        65535,      65536,      65537,     1u << 20,
        0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 61, INT64_MAX, 1ull << 63,
    };

    /* Divisors: sizes of metadata types and of blocks, whose multiples wrap to small sums. */
    static const uint8_t unit[] = { 2, 4, 8, 18, 20, 22, 24, 34, 84, 110, 144, 176, 210 };

    switch (below(10)) {
    case 0:
        return now + 1;
    case 1:
        return now - 1;
    case 2:
        return now ^ 1ull << below(64);
    case 3:
        return size - below(64);
    case 4:
        return now * 2;
    case 5:
        return UINT64_MAX - below(64);
    case 6:
        return 0 - 32 * below(64);
    case 7:
        return UINT64_MAX / unit[below(sizeof(unit))] + below(64);
    default:
        return k[below(KVD_COUNTOF(k))];
    }
}

static size_t bend_field(uint8_t *d, size_t size, size_t max)
{
    const field f = map.field[below(map.n_field)];
    uint64_t    v = get(d + f.at, f.bytes);
    uint8_t     fresh[64];
    size_t      n, r;

    switch (f.kind) {
    case F_TYPE:
        v = below(4) ? below(42) : interesting(v, size);
        break;
    case F_BYTES: /* another string, with its length */
        if (f.at < 8)
            return 0;
        if (below(2)) {
            const char *key = mutator_words[below(mutator_n_word)];

            n = strlen(key);
            memcpy(fresh, key, n);
        } else {
            n = below(sizeof(fresh));
            for (size_t i = 0; i < n; i++)
                fresh[i] = (uint8_t)kvd_rng_u64(&rng);
        }
        r = splice(d, size, max, f.at, f.bytes, fresh, n);
        if (r) {
            v = n;
            memcpy(d + f.at - 8, &v, 8);
        }
        return r;
    case F_DIM:
        v = below(2)   ? 32 * below(40)
            : below(4) ? interesting(v, size)
                       : (1ull << 62) + below(64); /* times 4 bytes wraps to little */
        break;
    case F_OFFSET:
        v = below(2) ? 32 * below(size / 32 + 2) : interesting(v, size);
        break;
    default:
        v = interesting(v, size);
        break;
    }
    memcpy(d + f.at, &v, f.bytes < 8 ? f.bytes : 8);
    return size;
}

/* Copies or drops an entry; mostly keeps the count right. */
static size_t bend_entries(uint8_t *d, size_t size, size_t max)
{
    const entry  e    = map.entry[below(map.n_entry)];
    const entry  to   = map.entry[below(map.n_entry)];
    const size_t n_at = e.tensor ? 8 : 16;
    const bool   copy = below(2) != 0;
    uint64_t     n    = get(d + n_at, 8);
    size_t       r;

    if (copy)
        r = splice(d, size, max, e.tensor == to.tensor ? to.at : e.at, 0, d + e.at, e.bytes);
    else
        r = splice(d, size, max, e.at, e.bytes, NULL, 0);
    n += copy ? 1 : UINT64_MAX;
    if (r && below(8))
        memcpy(d + n_at, &n, 8);
    return r;
}

/* Makes the data begin at a multiple of 32 again, as it did before the header grew by delta. */
static size_t repad(uint8_t *d, size_t size, size_t max, size_t delta)
{
    static const uint8_t zero[32];
    const size_t         wrong = delta & 31;

    map_input(d, size);
    if (!wrong || !map.n_entry || below(4) == 0)
        return size;
    delta = splice(d, size, max, map.stop, 0, zero, 32 - wrong);
    return delta ? delta : size;
}

static size_t mutate_file(uint8_t *d, size_t size, size_t max)
{
    size_t r = 0;

    map_input(d, size);
    switch (below(8)) {
    case 0:
        return LLVMFuzzerMutate(d, size, max);
    case 1: /* cut, mostly at a field's edge */
        if (map.n_field && below(2))
            r = map.field[below(map.n_field)].at + below(2);
        else
            r = 1 + below(size);
        return r < size ? r : size;
    case 2:
    case 3:
        r = map.n_entry ? bend_entries(d, size, max) : 0;
        break;
    default:
        r = map.n_field ? bend_field(d, size, max) : 0;
        break;
    }
    if (!r)
        return LLVMFuzzerMutate(d, size, max);
    return repad(d, r, max, r - size);
}

#endif
