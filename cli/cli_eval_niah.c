/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval_niah.c - RULER's needles in a haystack, and its chain of variables in noise.
 *
 * niah: needles "One of the special magic numbers for KEY is: VALUE." in an essay (after sentences,
 * at depths drawn from 40 equal steps), in a repeated noise line, or among needles of other keys.
 */
#include <inttypes.h>
#include <string.h>

#include "cli_eval.h"

#define N_DEPTH    40u
#define MAX_NEEDLE 32u

static const char *const key_name[] = { "words", "numbers", "uuids" };

static void random_text(eval_maker *m, eval_key kind, kvd_buf *out)
{
    kvd_rng *r = &m->rng;

    if (kind == EVAL_WORDS) {
        kvd_buf_puts(out, m->d->adjective.word[kvd_rng_below(r, m->d->adjective.n)]);
        kvd_buf_putc(out, '-');
        kvd_buf_puts(out, m->d->noun.word[kvd_rng_below(r, m->d->noun.n)]);
    } else if (kind == EVAL_NUMBERS) {
        kvd_buf_printf(out, "%" PRIu64, 1000000 + kvd_rng_below(r, 9000000));
    } else { /* RFC 9562, version 4 */
        const uint64_t a = kvd_rng_u64(r), b = kvd_rng_u64(r);

        kvd_buf_printf(out, "%08x-%04x-4%03x-%04x-%012" PRIx64, (unsigned)(a >> 32),
                       (unsigned)(a >> 16 & 0xffff), (unsigned)(a & 0xfff),
                       (unsigned)(0x8000 | (b >> 48 & 0x3fff)), b & 0xffffffffffffu);
    }
}

/* A needle with a key (or a random one) and a random value, which is appended to *value. */
static void put_needle(eval_maker *m, kvd_buf *out, const char *key, kvd_buf *value)
{
    const eval_task *t    = m->s->task;
    kvd_buf          k    = { 0 };
    const size_t     from = value->len;

    if (!key)
        random_text(m, t->key, &k);
    random_text(m, t->value, value);
    if (!k.oom && !value->oom) {
        const char *const pairs[] = {
            "type_needle_v", key_name[t->value], "key", key ? key : k.data,
            "value",         value->data + from, NULL
        };

        eval_fill(out, m->d->needle, pairs);
    }
    m->failed = m->failed || k.oom || value->oom || out->oom;
    kvd_buf_free(&k);
}

/* ---- haystacks ------------------------------------------------------------------- */

typedef struct needles {
    kvd_buf  text[MAX_NEEDLE];
    uint32_t n;
    uint32_t order[MAX_NEEDLE];
} needles;

static bool ends_sentence(const char *word)
{
    static const char *const title[] = { "Mr.", "Mrs.", "Dr.", "St." };
    size_t                   n       = strlen(word);

    for (size_t i = 0; i < KVD_COUNTOF(title); i++) {
        if (strcmp(word, title[i]) == 0)
            return false;
    }
    while (n > 0 && strchr("\"')_]", word[n - 1]))
        n--;
    return n > 0 && strchr(".!?", word[n - 1]);
}

static const char *essay_word(const eval_maker *m, uint64_t i)
{
    return m->d->essay.word[i % m->d->essay.n];
}

static void put_needles_at(const needles *x, const uint64_t *at, uint64_t here, uint32_t *next,
                           kvd_buf *out)
{
    while (*next < x->n && at[*next] <= here) {
        const kvd_buf *b = &x->text[x->order[(*next)++]];

        if (out->len)
            kvd_buf_putc(out, ' ');
        kvd_buf_put(out, b->data, b->len);
    }
}

static void essay(eval_maker *m, const needles *x, uint64_t n_word, kvd_buf *out)
{
    uint64_t at[MAX_NEEDLE], n_sentence = 0, sentence = 0;
    uint32_t next = 0;

    for (uint64_t i = 0; i < n_word; i++)
        n_sentence += ends_sentence(essay_word(m, i)) || i + 1 == n_word;
    eval_pick(&m->rng, N_DEPTH, x->n, at);
    for (uint32_t i = 0; i < x->n; i++) { /* depth in percent, rounded, as RULER has it */
        const uint64_t percent = (at[i] * 200 + N_DEPTH - 1) / (2 * (N_DEPTH - 1));

        at[i] = n_sentence * percent / 100;
    }
    put_needles_at(x, at, 0, &next, out);
    for (uint64_t i = 0; i < n_word; i++) {
        if (out->len)
            kvd_buf_putc(out, ' ');
        kvd_buf_puts(out, essay_word(m, i));
        if (ends_sentence(essay_word(m, i)) || i + 1 == n_word)
            put_needles_at(x, at, ++sentence, &next, out);
    }
}

static void lines(eval_maker *m, const needles *x, uint64_t n_line, kvd_buf *out)
{
    const eval_task *t = m->s->task;
    uint64_t         at[MAX_NEEDLE];
    uint32_t         next  = 0;
    kvd_buf          value = { 0 };

    eval_pick(&m->rng, n_line, x->n, at);
    for (uint64_t i = 0; i < n_line && !m->failed; i++) {
        if (next < x->n && at[next] == i) {
            const kvd_buf *b = &x->text[x->order[next++]];

            kvd_buf_put(out, b->data, b->len);
            kvd_buf_putc(out, '\n');
        }
        value.len = 0;
        if (t->hay == EVAL_NOISE)
            kvd_buf_puts(out, m->d->noise);
        else
            put_needle(m, out, NULL, &value);
        if (i + 1 < n_line)
            kvd_buf_putc(out, '\n');
    }
    kvd_buf_free(&value);
}

/* ---- the question ---------------------------------------------------------------- */

/* Replaces every `from`; the result may be shorter or longer. */
static void replace_all(kvd_buf *b, const char *from, const char *to)
{
    kvd_buf      out = { 0 };
    const size_t n   = strlen(from);

    for (const char *s = b->data ? b->data : ""; *s;) {
        if (strncmp(s, from, n) == 0) {
            kvd_buf_puts(&out, to);
            s += n;
        } else {
            kvd_buf_putc(&out, *s++);
        }
    }
    out.oom = out.oom || b->oom;
    kvd_buf_free(b);
    *b = out;
}

/* One needle is asked for in the singular. */
static void put_template(eval_maker *m, const char *template, const char *context,
                         const char *query, kvd_buf *out)
{
    const eval_task *t   = m->s->task;
    const bool       one = t->n_query * t->n_value == 1;
    char             what[16];
    kvd_buf          b = { 0 };

    snprintf(what, sizeof(what), "%s", key_name[t->value]);
    kvd_buf_puts(&b, template);
    if (one) {
        what[strlen(what) - 1] = 0;
        replace_all(&b, "Some", "A");
        replace_all(&b, "are all", "is");
        replace_all(&b, "are", "is");
    }
    if (!b.oom) {
        const char *const pairs[] = { "type_needle_v", what,  "context", context,
                                      "query",         query, NULL };

        eval_fill(out, b.data, pairs);
    }
    m->failed = m->failed || b.oom || out->oom;
    kvd_buf_free(&b);
}

/* "a", "a, and b", "a, b, and c" */
static void put_query(const char *const *key, const uint64_t *asked, uint32_t n, kvd_buf *out)
{
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0)
            kvd_buf_puts(out, i + 1 == n ? ", and " : ", ");
        kvd_buf_puts(out, key[asked[i]]);
    }
}

void eval_make_niah(eval_maker *m, uint64_t size)
{
    const eval_task *t                = m->s->task;
    needles          x                = { .n = t->n_key * t->n_value };
    kvd_buf          keys[MAX_NEEDLE] = { 0 }, values[MAX_NEEDLE] = { 0 };
    const char      *key[MAX_NEEDLE];
    uint64_t         asked[MAX_NEEDLE];
    kvd_buf          context = { 0 }, query = { 0 };

    for (uint32_t i = 0; i < t->n_key; i++) {
        random_text(m, t->key, &keys[i]);
        m->failed = m->failed || keys[i].oom;
        key[i]    = keys[i].data;
        for (uint32_t v = i * t->n_value; v < (i + 1) * t->n_value && !m->failed; v++)
            put_needle(m, &x.text[v], key[i], &values[v]);
    }
    for (uint32_t i = 0; i < x.n; i++)
        x.order[i] = i;
    eval_shuffle(&m->rng, x.order, x.n);
    eval_pick(&m->rng, t->n_key, t->n_query, asked);
    if (!m->failed) {
        put_query(key, asked, t->n_query, &query);
        if (t->hay == EVAL_ESSAY)
            essay(m, &x, size, &context);
        else
            lines(m, &x, size, &context);
    }
    m->failed = m->failed || context.oom || query.oom;
    if (!m->failed) {
        put_template(m, t->template, context.data, query.data, &m->s->user);
        put_template(m, t->prefix, "", query.data, &m->s->prefix);
    }
    for (uint32_t q = 0; q < t->n_query && !m->failed; q++) {
        for (uint32_t v = 0; v < t->n_value; v++)
            eval_add_answer(m, values[asked[q] * t->n_value + v].data);
    }
    for (uint32_t i = 0; i < MAX_NEEDLE; i++) {
        kvd_buf_free(&keys[i]);
        kvd_buf_free(&values[i]);
        kvd_buf_free(&x.text[i]);
    }
    kvd_buf_free(&context);
    kvd_buf_free(&query);
}

/* ---- variable tracking ----------------------------------------------------------- */

#define MAX_VAR      11u
#define EXAMPLE_SIZE 12u /* noise lines of the worked example: about 400 tokens, as RULER's */

typedef struct chain {
    char     name[MAX_VAR][8];
    uint32_t n, value;
} chain;

static void make_chain(eval_maker *m, chain *c, uint32_t n_letter)
{
    c->n     = m->s->task->n_hop + 1;
    c->value = 10000 + (uint32_t)kvd_rng_below(&m->rng, 89999);
    for (uint32_t i = 0; i < c->n;) {
        bool taken = false;

        for (uint32_t k = 0; k < n_letter; k++)
            c->name[i][k] = (char)('A' + kvd_rng_below(&m->rng, 26));
        c->name[i][n_letter] = 0;
        for (uint32_t k = 0; k < i; k++)
            taken = taken || strcmp(c->name[k], c->name[i]) == 0;
        i += !taken;
    }
}

/* The question with its haystack; the answer's beginning goes to prefix. */
static void put_tracking(eval_maker *m, const chain *c, uint64_t n_line, kvd_buf *out,
                         kvd_buf *prefix)
{
    uint64_t at[MAX_VAR];
    char     value[16], n_var[16];
    kvd_buf  context = { 0 };
    uint32_t next    = 0;

    eval_pick(&m->rng, n_line, c->n, at);
    for (uint64_t i = 0; i < n_line; i++) {
        if (next < c->n && at[next] == i && next == 0)
            kvd_buf_printf(&context, "VAR %s = %u\n", c->name[0], c->value);
        else if (next < c->n && at[next] == i)
            kvd_buf_printf(&context, "VAR %s = VAR %s \n", c->name[next], c->name[next - 1]);
        next += next < c->n && at[next] == i;
        kvd_buf_puts(&context, m->d->noise);
        if (i + 1 < n_line)
            kvd_buf_putc(&context, '\n');
    }
    snprintf(value, sizeof(value), "%u", c->value);
    snprintf(n_var, sizeof(n_var), "%u", c->n);
    m->failed = m->failed || context.oom;
    if (!m->failed) {
        const char *const pairs[] = {
            "context", context.data, "query", value, "num_v", n_var, NULL
        };

        eval_fill(out, m->s->task->template, pairs);
        eval_fill(prefix, m->s->task->prefix, pairs);
    }
    kvd_buf_free(&context);
}

/* A worked example first, with shorter names, then the question. */
void eval_make_vt(eval_maker *m, uint64_t size)
{
    kvd_buf *user = &m->s->user;
    chain    example, asked;

    make_chain(m, &example, 3);
    make_chain(m, &asked, 5);
    put_tracking(m, &example, EXAMPLE_SIZE, user, user);
    for (uint32_t i = 0; i < example.n; i++)
        kvd_buf_printf(user, "%s%s", i ? " " : "", example.name[i]);
    kvd_buf_puts(user, "\n\n");
    put_tracking(m, &asked, size, user, &m->s->prefix);
    for (uint32_t i = 0; i < asked.n; i++)
        eval_add_answer(m, asked.name[i]);
}
