/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval_make.c - one sample of a task at a length: random choices, templates, and the search for
 * the largest haystack whose prompt and answer fit. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli_eval.h"

#define SIZE_MAX_UNITS (1ull << 24) /* words, sentences or documents of a haystack */
#define SEARCH_PART    500          /* the search ends within one part of this many */

/* ---- random choices -------------------------------------------------------------- */

/* A sample's own generator: what is drawn for one does not move another. */
static uint64_t sample_seed(uint64_t seed, const char *task, uint32_t index)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a over the name, then the numbers */

    for (const char *s = task; *s; s++)
        h = (h ^ (uint8_t)*s) * 0x100000001b3u;
    for (int i = 0; i < 8; i++)
        h = (h ^ (uint8_t)(seed >> 8 * i)) * 0x100000001b3u;
    for (int i = 0; i < 4; i++)
        h = (h ^ (uint8_t)(index >> 8 * i)) * 0x100000001b3u;
    return h;
}

static int by_number(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

void eval_pick(kvd_rng *r, uint64_t n, uint32_t k, uint64_t *out)
{
    kvd_assert(k <= n);
    for (uint32_t i = 0; i < k; i++) { /* Floyd: each new one from a range one longer */
        const uint64_t top   = n - k + i;
        uint64_t       x     = kvd_rng_below(r, top + 1);
        bool           taken = false;

        for (uint32_t j = 0; j < i; j++)
            taken = taken || out[j] == x;
        out[i] = taken ? top : x;
    }
    qsort(out, k, sizeof(*out), by_number);
}

void eval_shuffle(kvd_rng *r, uint32_t *x, size_t n)
{
    for (size_t i = n; i > 1; i--) {
        const size_t   j = kvd_rng_below(r, i);
        const uint32_t t = x[i - 1];

        x[i - 1] = x[j];
        x[j]     = t;
    }
}

uint32_t *eval_permutation(eval_maker *m, size_t n)
{
    uint32_t *x = kvd_calloc(n, sizeof(*x));

    m->failed = m->failed || !x;
    if (!x)
        return NULL;
    for (size_t i = 0; i < n; i++)
        x[i] = (uint32_t)i;
    eval_shuffle(&m->rng, x, n);
    return x;
}

/* ---- text ------------------------------------------------------------------------ */

void eval_add_answer(eval_maker *m, const char *text)
{
    kvd_buf_put(&m->s->answers, text, strlen(text) + 1);
    m->s->n_answer++;
}

const char *eval_answer(const eval_sample *s, uint32_t n)
{
    const char *a = s->answers.data;

    kvd_assert(n < s->n_answer);
    while (n-- > 0)
        a += strlen(a) + 1;
    return a;
}

void eval_fill(kvd_buf *out, const char *template, const char *const *pairs)
{
    for (const char *s = template; *s;) {
        const char *value = NULL;
        size_t      len   = 0;

        for (size_t i = 0; *s == '{' && pairs[i] && !value; i += 2) {
            len = strlen(pairs[i]);
            if (strncmp(s + 1, pairs[i], len) == 0 && s[1 + len] == '}')
                value = pairs[i + 1];
        }
        if (value) {
            kvd_buf_puts(out, value);
            s += len + 2;
        } else {
            kvd_buf_putc(out, *s++);
        }
    }
}

/* ---- search ---------------------------------------------------------------------- */

typedef struct search {
    eval_maker    m;
    eval_make_fn  make;
    eval_count_fn count;
    void         *ctx;
    uint64_t      room; /* most tokens of the prompt */
} search;

/* Makes the sample anew at a size; *fits: whether prompt and answer do. */
static kvd_status try_size(search *s, uint64_t size, bool *fits, kvd_err *err)
{
    eval_sample *e = s->m.s;

    e->user.len = e->prefix.len = e->answers.len = 0;
    e->n_answer                                  = 0;
    s->m.failed                                  = false;
    kvd_rng_seed(&s->m.rng, sample_seed(e->seed, e->task->name, e->index));
    s->make(&s->m, size);
    if (s->m.failed || e->user.oom || e->prefix.oom || e->answers.oom)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for a prompt of %u tokens", e->length);
    KVD_TRY(s->count(s->ctx, &e->user, &e->prefix, &e->n_token, err));
    *fits = e->n_token <= s->room;
    return KVD_OK;
}

/* Sizes a task can have: the least that holds its needles, the most its data has. */
static void size_range(const eval_data *d, const eval_task *t, uint64_t *least, uint64_t *most)
{
    *least = 1;
    *most  = SIZE_MAX_UNITS;
    if (t->kind == EVAL_NIAH)
        *least = t->hay == EVAL_ESSAY ? 20 : t->n_key * t->n_value;
    if (t->kind == EVAL_VT)
        *least = t->n_hop + 2;
    if (t->kind == EVAL_CWE)
        *least = t->n_common + 1;
    if (t->kind == EVAL_CWE)
        *most = d->n_word; /* longer than what all words make it does not get */
    if (t->kind == EVAL_FWE)
        *least = 60; /* so that the third word occurs more often than the fourth */
}

/* Doubles until it does not fit, then halves the gap. */
static kvd_status find_size(search *s, uint64_t least, uint64_t most, kvd_err *err)
{
    uint64_t low = least, high = least;
    bool     fits = true;

    KVD_TRY(try_size(s, least, &fits, err));
    if (!fits)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "--length %u: the smallest %s takes %" PRIu64
                        " tokens and %u for the answer",
                        s->m.s->length, s->m.s->task->name, s->m.s->n_token, s->m.s->task->max_new);
    while (fits && high < most) {
        low  = high;
        high = kvd_min_u64(high * 2, most);
        KVD_TRY(try_size(s, high, &fits, err));
    }
    if (fits)
        return KVD_OK;
    while (high - low > 1 + low / SEARCH_PART) {
        const uint64_t mid = low + (high - low) / 2;

        KVD_TRY(try_size(s, mid, &fits, err));
        *(fits ? &low : &high) = mid;
    }
    for (fits = false; !fits; low--) { /* tokens do not quite grow with the size */
        KVD_TRY(try_size(s, low, &fits, err));
        if (low == least)
            break;
    }
    return KVD_OK;
}

kvd_status eval_sample_make(eval_sample *out, const eval_data *d, const eval_task *t, uint64_t seed,
                            uint32_t index, uint32_t length, eval_count_fn count, void *ctx,
                            kvd_err *err)
{
    static const eval_make_fn make[] = { eval_make_niah, eval_make_vt, eval_make_cwe, eval_make_fwe,
                                         eval_make_qa };
    search   s = { .m = { .d = d, .s = out }, .make = make[t->kind], .count = count, .ctx = ctx };
    uint64_t least, most;

    *out = (eval_sample){ .task = t, .seed = seed, .index = index, .length = length };
    if (length <= t->max_new)
        return kvd_fail(err, KVD_E_INVAL, 0, "--length %u: %s needs %u tokens for its answer alone",
                        length, t->name, t->max_new);
    s.room = length - t->max_new;
    size_range(d, t, &least, &most);
    return find_size(&s, least, most, err);
}

void eval_sample_free(eval_sample *s)
{
    kvd_buf_free(&s->user);
    kvd_buf_free(&s->prefix);
    kvd_buf_free(&s->answers);
    *s = (eval_sample){ 0 };
}

kvd_status eval_sample_print(const eval_sample *s, FILE *f, kvd_err *err)
{
    json_t *answers = json_array();
    json_t *o;
    bool    ok;

    for (uint32_t i = 0; i < s->n_answer; i++)
        json_array_append_new(answers, json_string(eval_answer(s, i)));
    o  = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:s, s:s%, s:s%, s:o}", "task", s->task->name,
                   "index", (json_int_t)s->index, "seed", (json_int_t)s->seed, "length",
                   (json_int_t)s->length, "prompt_tokens", (json_int_t)s->n_token, "max_tokens",
                   (json_int_t)s->task->max_new, "metric",
                  s->task->part ? "string_match_part" : "string_match_all", "prompt", s->user.data,
                   s->user.len, "answer_prefix", s->prefix.data, s->prefix.len, "answers", answers);
    ok = o && json_dumpf(o, f, JSON_COMPACT) == 0 && fputc('\n', f) != EOF;
    json_decref(o);
    return ok ? KVD_OK : kvd_fail(err, KVD_E_IO, 0, "a prompt cannot be written");
}
