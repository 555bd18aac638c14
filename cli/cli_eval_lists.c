/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval_lists.c - RULER's tasks of counting (common words, frequent words) and of questions over
 * documents. */
#include <inttypes.h>
#include <string.h>

#include "cli_eval.h"

/* ---- common words ---------------------------------------------------------------- */

typedef struct word_counts {
    uint32_t n_word, n_common, freq_common, freq_other;
} word_counts;

/* "1. able 2. baker ..." of n_word words drawn from the list; the common ones go to common. */
static void put_list(eval_maker *m, word_counts w, kvd_buf *out, const char **common)
{
    const size_t n =
        (size_t)w.n_common * w.freq_common + (size_t)(w.n_word - w.n_common) * w.freq_other;
    uint32_t *word = eval_permutation(m, m->d->n_word);
    uint32_t *item = kvd_calloc(n, sizeof(*item));
    size_t    at   = 0;

    m->failed = m->failed || !item;
    if (!m->failed) {
        for (uint32_t i = 0; i < w.n_word; i++) {
            const uint32_t times = i < w.n_common ? w.freq_common : w.freq_other;

            for (uint32_t k = 0; k < times; k++)
                item[at++] = word[i];
        }
        eval_shuffle(&m->rng, item, n);
        for (size_t i = 0; i < n; i++)
            kvd_buf_printf(out, "%s%zu. %s", i ? " " : "", i + 1, m->d->word[item[i]]);
        for (uint32_t i = 0; i < w.n_common; i++)
            common[i] = m->d->word[word[i]];
    }
    m->failed = m->failed || out->oom;
    kvd_free(item);
    kvd_free(word);
}

static void put_counting(eval_maker *m, word_counts w, kvd_buf *out, kvd_buf *prefix,
                         const char **common)
{
    kvd_buf context = { 0 };

    put_list(m, w, &context, common);
    if (!m->failed) {
        const char *const pairs[] = { "context", context.data, "query", "", NULL };

        eval_fill(out, m->s->task->template, pairs);
        eval_fill(prefix, m->s->task->prefix, pairs);
    }
    kvd_buf_free(&context);
}

/* A worked example of 40 words (20 below 4,096 tokens), then the question. */
void eval_make_cwe(eval_maker *m, uint64_t size)
{
    const eval_task  *t       = m->s->task;
    const bool        brief   = m->s->length < 4096;
    const word_counts example = { brief ? 20 : 40, t->n_common, brief ? 3 : 10, brief ? 1 : 3 };
    const word_counts asked   = { (uint32_t)size, t->n_common, brief ? 6 : t->freq_common,
                                brief ? 1 : t->freq_other };
    const char       *common[32];
    kvd_buf          *user = &m->s->user;

    put_counting(m, example, user, user, common);
    for (uint32_t i = 0; i < t->n_common && !m->failed; i++)
        kvd_buf_printf(user, " %u. %s", i + 1, common[i]);
    kvd_buf_putc(user, '\n');
    put_counting(m, asked, user, &m->s->prefix, common);
    for (uint32_t i = 0; i < t->n_common && !m->failed; i++)
        eval_add_answer(m, common[i]);
}

/* ---- frequent words -------------------------------------------------------------- */

#define CODE_LETTERS 6u
#define CODE_RANGE   308915776u /* 26^6 */
#define ZETA_2       1.6449340668482264

static void code_text(uint32_t code, char out[CODE_LETTERS + 1])
{
    for (uint32_t i = 0; i < CODE_LETTERS; i++, code /= 26)
        out[i] = (char)('a' + code % 26);
    out[CODE_LETTERS] = 0;
}

/* n different codes; NULL: no memory. */
static uint32_t *make_codes(eval_maker *m, uint32_t n)
{
    uint32_t *code = kvd_calloc(n, sizeof(*code));

    m->failed = m->failed || !code;
    for (uint32_t i = 0; code && i < n;) {
        bool taken = false;

        code[i] = (uint32_t)kvd_rng_below(&m->rng, CODE_RANGE);
        for (uint32_t k = 0; k < i && !taken; k++)
            taken = code[k] == code[i];
        i += !taken;
    }
    return code;
}

/* Words of a Zipf law with exponent 2; the most frequent one is noise, "...". */
void eval_make_fwe(eval_maker *m, uint64_t size)
{
    const uint32_t n_code = m->s->length / 50 > 4 ? m->s->length / 50 : 4;
    uint32_t      *code = make_codes(m, n_code), *item = kvd_calloc(size, sizeof(*item));
    kvd_buf        context = { 0 };
    char           text[CODE_LETTERS + 1];
    size_t         n = 0;

    m->failed = m->failed || !item;
    for (uint32_t rank = 1; rank <= n_code && !m->failed; rank++) {
        const double times = (double)size / ((double)rank * rank) / ZETA_2;

        for (uint64_t k = 0; k < (uint64_t)times && n < size; k++)
            item[n++] = rank - 1;
    }
    if (!m->failed)
        eval_shuffle(&m->rng, item, n);
    for (size_t i = 0; i < n && !m->failed; i++) {
        code_text(code[item[i]], text);
        kvd_buf_printf(&context, "%s%s", i ? " " : "", item[i] ? text : "...");
    }
    m->failed = m->failed || context.oom;
    if (!m->failed) {
        const char *const pairs[] = { "context", context.data, "query", "", NULL };

        eval_fill(&m->s->user, m->s->task->template, pairs);
        eval_fill(&m->s->prefix, m->s->task->prefix, pairs);
    }
    for (uint32_t i = 1; i <= 3 && !m->failed; i++) {
        code_text(code[i], text);
        eval_add_answer(m, text);
    }
    kvd_buf_free(&context);
    kvd_free(item);
    kvd_free(code);
}

/* ---- questions ------------------------------------------------------------------- */

/* The question's document, then the others of its article, then the rest, each group in random
 * order; the first `size` of them (again from the start where there are fewer) are shuffled. */
static uint32_t *choose_docs(eval_maker *m, uint32_t own, uint64_t size)
{
    uint32_t *all = eval_permutation(m, m->d->n_doc);
    uint32_t *out = kvd_calloc(size, sizeof(*out));
    uint64_t  n   = 0;

    m->failed = m->failed || !out;
    if (!m->failed) {
        out[n++] = own;
        for (int same = 1; same >= 0; same--) {
            for (uint32_t i = 0; i < m->d->n_doc && n < size; i++) {
                if (all[i] != own && (m->d->article[all[i]] == m->d->article[own]) == same)
                    out[n++] = all[i];
            }
        }
        for (uint64_t i = 0; n < size; i++)
            out[n++] = out[i];
        eval_shuffle(&m->rng, out, size);
    }
    kvd_free(all);
    return out;
}

void eval_make_qa(eval_maker *m, uint64_t size)
{
    const eval_question *q       = &m->d->question[kvd_rng_below(&m->rng, m->d->n_question)];
    uint32_t            *doc     = choose_docs(m, q->doc, size);
    kvd_buf              context = { 0 };

    for (uint64_t i = 0; i < size && !m->failed; i++)
        kvd_buf_printf(&context, "%sDocument %" PRIu64 ":\n%s", i ? "\n\n" : "", i + 1,
                       m->d->doc[doc[i]]);
    m->failed = m->failed || context.oom;
    if (!m->failed) {
        const char *const pairs[] = { "context", context.data, "query", q->text, NULL };

        eval_fill(&m->s->user, m->s->task->template, pairs);
        eval_fill(&m->s->prefix, m->s->task->prefix, pairs);
    }
    for (size_t i = 0; i < json_array_size(q->answers) && !m->failed; i++) {
        const char *text =
            json_string_value(json_object_get(json_array_get(q->answers, i), "text"));

        if (text)
            eval_add_answer(m, text);
    }
    kvd_buf_free(&context);
    kvd_free(doc);
}
