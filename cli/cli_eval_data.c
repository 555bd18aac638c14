/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval_data.c - reads the data directory of `kvdrive eval ruler`:
 *
 *   ruler/tasks.json, nounlist.txt, adjectivelist.txt, verblist.txt
 *   austen/prideprejudice.txt        the essay
 *   xquad/xquad.en.json              paragraphs and questions
 *
 * Everything borrowed by eval_task and eval_question lives as long as eval_data.  The directory is
 * the user's: what is missing or of another shape is KVD_E_CORRUPT with the file's name. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "cli_eval.h"

#define DATA_MAX_BYTES (64ull << 20)
#define PATH_BYTES     4096

static kvd_status read_data(const char *dir, const char *name, kvd_buf *b, kvd_err *err)
{
    char path[PATH_BYTES];

    if (snprintf(path, sizeof(path), "%s/%s", dir, name) >= (int)sizeof(path))
        return kvd_fail(err, KVD_E_INVAL, 0, "--data: the path is too long");
    return cli_read_file(path, DATA_MAX_BYTES, b, err);
}

static kvd_status read_json(const char *dir, const char *name, json_t **out, kvd_err *err)
{
    kvd_buf        b     = { 0 };
    kvd_json_texts texts = { 0 };
    kvd_json_error why;
    kvd_status     st = read_data(dir, name, &b, err);

    if (st == KVD_OK) {
        *out = kvd_json_read(&texts, b.data ? b.data : "", b.len, 0, &why);
        if (!*out)
            st = kvd_fail(err, why.no_memory ? KVD_E_NOMEM : KVD_E_CORRUPT, 0, "%s/%s: line %u: %s",
                          dir, name, why.line, why.text);
    }
    kvd_json_texts_free(&texts);
    kvd_buf_free(&b);
    return st;
}

/* Cuts the text at any of `cut`; empty words are left out. */
static kvd_status read_words(const char *dir, const char *name, const char *cut, eval_words *w,
                             kvd_err *err)
{
    size_t at = 0, most;

    KVD_TRY(read_data(dir, name, &w->text, err));
    most    = w->text.len / 2 + 1;
    w->word = kvd_calloc(most, sizeof(*w->word));
    if (!w->word)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the words of %s", name);
    while (at < w->text.len) {
        char        *s = w->text.data + at;
        const size_t n = strcspn(s, cut);

        if (n > 0)
            w->word[w->n++] = s;
        s[n] = 0; /* the text is zero-terminated, so this is within it */
        at += n + 1;
    }
    if (w->n < 100)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s/%s: %zu words, at least 100 expected", dir, name,
                        w->n);
    return KVD_OK;
}

static void free_words(eval_words *w)
{
    kvd_buf_free(&w->text);
    kvd_free(w->word);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static kvd_status merge_words(eval_data *d, kvd_err *err)
{
    const eval_words *list[] = { &d->noun, &d->adjective, &d->verb };
    size_t            n      = 0;

    d->word = kvd_calloc(d->noun.n + d->adjective.n + d->verb.n, sizeof(*d->word));
    if (!d->word)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the word list");
    for (size_t i = 0; i < KVD_COUNTOF(list); i++) {
        memcpy(d->word + n, list[i]->word, list[i]->n * sizeof(*d->word));
        n += list[i]->n;
    }
    qsort(d->word, n, sizeof(*d->word), by_text);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || strcmp(d->word[i], d->word[d->n_word - 1]) != 0)
            d->word[d->n_word++] = d->word[i];
    }
    return KVD_OK;
}

/* ---- tasks ----------------------------------------------------------------------- */

static int place(const char *const *list, size_t n, const char *word)
{
    for (size_t i = 0; i < n; i++) {
        if (word && strcmp(list[i], word) == 0)
            return (int)i;
    }
    return -1;
}

/* An argument of a task: a number of 0 to most, or -1. */
static int64_t number(const json_t *o, const char *name, int64_t most)
{
    const json_t *v = json_object_get(o, name);

    return json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) <= most
               ? (int64_t)json_integer_value(v)
               : -1;
}

static bool read_niah(eval_task *t, const json_t *args)
{
    static const char *const hay[] = { "noise", "essay", "needle" };
    static const char *const key[] = { "words", "numbers", "uuids" };
    const int h = place(hay, 3, json_string_value(json_object_get(args, "type_haystack")));
    const int k = place(key, 3, json_string_value(json_object_get(args, "type_needle_k")));
    const int v = place(key, 3, json_string_value(json_object_get(args, "type_needle_v")));

    t->n_key   = (uint32_t)number(args, "num_needle_k", 16);
    t->n_value = (uint32_t)number(args, "num_needle_v", 16);
    t->n_query = (uint32_t)number(args, "num_needle_q", 16);
    if (h < 0 || k < 0 || v < 0 || t->n_key - 1 > 15 || t->n_value - 1 > 15 || t->n_query - 1 > 15)
        return false;
    t->hay   = (eval_hay)h;
    t->key   = (eval_key)k;
    t->value = (eval_key)v;
    t->n_key = t->n_key > t->n_query ? t->n_key : t->n_query;
    return t->n_key * t->n_value <= 32; /* depths to put them at: 40 */
}

static bool read_args(eval_task *t, const json_t *args)
{
    switch (t->kind) {
    case EVAL_NIAH:
        return read_niah(t, args);
    case EVAL_VT:
        t->n_hop = (uint32_t)number(args, "num_hops", 10);
        return t->n_hop - 1 <= 9 && number(args, "num_chains", 1) == 1;
    case EVAL_CWE:
        t->n_common    = (uint32_t)number(args, "num_cw", 30);
        t->freq_common = (uint32_t)number(args, "freq_cw", 1000);
        t->freq_other  = (uint32_t)number(args, "freq_ucw", 1000);
        return t->n_common - 1 <= 29 && t->freq_other - 1 <= 999 &&
               t->freq_common > t->freq_other && t->freq_common <= 1000;
    case EVAL_FWE:
        return json_number_value(json_object_get(args, "alpha")) == 2.0;
    case EVAL_QA:
        return true;
    }
    return false;
}

/* false: of a shape we do not know. */
static bool read_task(eval_data *d, const char *name, const json_t *o, const json_t *base)
{
    static const char *const kind[]    = { "niah", "variable_tracking", "common_words_extraction",
                                           "freq_words_extraction", "qa" };
    const char              *kind_name = json_string_value(json_object_get(o, "task"));
    const json_t            *b         = kind_name ? json_object_get(base, kind_name) : NULL;
    const int                k         = place(kind, KVD_COUNTOF(kind), kind_name);
    const char              *metric    = json_string_value(json_object_get(b, "metric"));
    const json_t            *args      = json_object_get(o, "args");
    const int64_t            max_new   = number(b, "tokens_to_generate", 4096);
    eval_task               *t         = &d->task[d->n_task];

    if (k < 0 || !metric || max_new < 1 || d->n_task == EVAL_MAX_TASK)
        return false;
    if (strcmp(metric, "string_match_all") != 0 && strcmp(metric, "string_match_part") != 0)
        return false;
    *t = (eval_task){ .name     = name,
                      .kind     = (eval_kind)k,
                      .template = json_string_value(json_object_get(b, "template")),
                      .prefix   = json_string_value(json_object_get(b, "answer_prefix")),
                      .part     = strcmp(metric, "string_match_part") == 0,
                      .max_new  = (uint32_t)max_new };
    if (!t->template || !t->prefix || !read_args(t, args))
        return false;
    d->n_task++;
    return true;
}

static kvd_status read_tasks(eval_data *d, const char *dir, kvd_err *err)
{
    const json_t *base = json_object_get(d->tasks_json, "base_tasks");
    json_t       *list = json_object_get(d->tasks_json, "tasks");
    const char   *name;
    json_t       *o;

    d->needle = json_string_value(json_object_get(d->tasks_json, "needle"));
    d->noise  = json_string_value(json_object_get(d->tasks_json, "noise"));
    if (!d->needle || !d->noise)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s/ruler/tasks.json: no needle or no noise", dir);
    json_object_foreach(list, name, o)
    {
        const char *set = json_string_value(json_object_get(json_object_get(o, "args"), "dataset"));

        if (set && strcmp(set, "squad") != 0)
            continue; /* qa_2 asks HotpotQA, which is not here */
        if (!read_task(d, name, o, base))
            return kvd_fail(err, KVD_E_CORRUPT, 0,
                            "%s/ruler/tasks.json: task %.40s is of no kind that this build makes",
                            dir, name);
    }
    return d->n_task ? KVD_OK
                     : kvd_fail(err, KVD_E_CORRUPT, 0, "%s/ruler/tasks.json: no tasks", dir);
}

const eval_task *eval_task_find(const eval_data *d, const char *name)
{
    for (uint32_t i = 0; i < d->n_task; i++) {
        if (strcmp(d->task[i].name, name) == 0)
            return &d->task[i];
    }
    return NULL;
}

/* ---- questions ------------------------------------------------------------------- */

/* First pass (d->doc NULL) counts, second pass fills.  false: not SQuAD's shape. */
static bool walk_questions(eval_data *d, const json_t *articles)
{
    const bool fill = d->doc != NULL;

    d->n_doc = d->n_question = 0;
    for (size_t a = 0; a < json_array_size(articles); a++) {
        const json_t *paragraphs = json_object_get(json_array_get(articles, a), "paragraphs");

        for (size_t p = 0; p < json_array_size(paragraphs); p++) {
            const json_t *doc  = json_array_get(paragraphs, p);
            const json_t *qas  = json_object_get(doc, "qas");
            const char   *text = json_string_value(json_object_get(doc, "context"));

            if (!text)
                return false;
            for (size_t q = 0; q < json_array_size(qas); q++) {
                const json_t *o       = json_array_get(qas, q);
                const json_t *answers = json_object_get(o, "answers");
                const char   *ask     = json_string_value(json_object_get(o, "question"));

                if (!ask || json_array_size(answers) == 0 ||
                    !json_string_value(json_object_get(json_array_get(answers, 0), "text")))
                    return false;
                if (fill)
                    d->question[d->n_question] = (eval_question){ ask, answers, d->n_doc };
                d->n_question++;
            }
            if (fill) {
                d->doc[d->n_doc]     = text;
                d->article[d->n_doc] = (uint32_t)a;
            }
            d->n_doc++;
        }
    }
    return d->n_doc > 0 && d->n_question > 0;
}

static kvd_status read_questions(eval_data *d, const char *dir, kvd_err *err)
{
    const json_t *articles = json_object_get(d->questions_json, "data");

    if (!walk_questions(d, articles))
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s/xquad/xquad.en.json: not of SQuAD's form", dir);
    d->article  = kvd_calloc(d->n_doc, sizeof(*d->article));
    d->question = kvd_calloc(d->n_question, sizeof(*d->question));
    d->doc      = kvd_calloc(d->n_doc, sizeof(*d->doc));
    if (!d->doc || !d->article || !d->question)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the questions");
    walk_questions(d, articles);
    return KVD_OK;
}

kvd_status eval_data_open(eval_data *d, const char *dir, kvd_err *err)
{
    *d = (eval_data){ 0 };
    KVD_TRY(read_json(dir, "ruler/tasks.json", &d->tasks_json, err));
    KVD_TRY(read_tasks(d, dir, err));
    KVD_TRY(read_words(dir, "ruler/nounlist.txt", "\r\n", &d->noun, err));
    KVD_TRY(read_words(dir, "ruler/adjectivelist.txt", "\r\n", &d->adjective, err));
    KVD_TRY(read_words(dir, "ruler/verblist.txt", "\r\n", &d->verb, err));
    KVD_TRY(merge_words(d, err));
    KVD_TRY(read_words(dir, "austen/prideprejudice.txt", " \t\r\n", &d->essay, err));
    KVD_TRY(read_json(dir, "xquad/xquad.en.json", &d->questions_json, err));
    return read_questions(d, dir, err);
}

void eval_data_close(eval_data *d)
{
    free_words(&d->noun);
    free_words(&d->adjective);
    free_words(&d->verb);
    free_words(&d->essay);
    kvd_free(d->word);
    kvd_free(d->doc);
    kvd_free(d->article);
    kvd_free(d->question);
    json_decref(d->tasks_json);
    json_decref(d->questions_json);
    *d = (eval_data){ 0 };
}
