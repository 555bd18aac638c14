/* SPDX-License-Identifier: Apache-2.0 */
/* cli_eval_config.c - the configurations that are compared: a name and key=value pairs each.
 *
 * options[] knows every key and its values; a configuration with any other is refused before
 * anything runs, so that no score is ever of something else than its name says. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "cli_eval.h"

#define FILE_MAX_BYTES (1u << 20)
#define BLANK          " \t\r\n"

typedef enum kind { CHOICE, NUMBER, COUNT, NAME, BUDGET } kind;

static const struct option { /* named as on the command line */
    const char *key;
    kind        kind;
    const char *values;   /* CHOICE: "a|b|c" in the order of the enum; else for the message */
    size_t      at;       /* of the field, in kvd_attention_params */
    double      min, max; /* NUMBER, COUNT */
} options[] = {
#define AT(field) offsetof(kvd_attention_params, field)
    { "attention", CHOICE, KVD_ATTENTION_NAMES, AT(mode), 0, 0 },
    { "budget", BUDGET, "tokens, or percent such as 6.25%", AT(budget), 0, 0 },
    { "cap", NUMBER, "a number of 1 to 1024", AT(cap), 1, 1024 },
    { "fetch", CHOICE, KVD_FETCH_NAMES, AT(fetch), 0, 0 },
    { "attend", CHOICE, KVD_ATTEND_NAMES, AT(attend), 0, 0 },
    { "evict", CHOICE, KVD_EVICT_NAMES, AT(evict), 0, 0 },
    { "ema-alpha", NUMBER, "a number of 0.001 to 1", AT(ema_alpha), 0.001, 1 },
    { "min-mass", NUMBER, "a number of -1 (never) to 1", AT(min_mass), -1, 1 },
    { "select-top-p", NUMBER, "a number of 0 to 0.999999", AT(top_p), 0, 0.999999 },
    { "index", NAME, "an index kind", AT(index), 0, 0 },
    { "zone", COUNT, "0 (none) to 256 tokens", AT(zone), 0, 256 },
    { "group-rule", NAME, "mean, max, mean-chunks or logits", AT(group_rule), 0, 0 },
#undef AT
};

static char *trim(char *s)
{
    size_t n;

    s += strspn(s, BLANK);
    n = strlen(s);
    while (n > 0 && strchr(BLANK, s[n - 1]))
        s[--n] = 0;
    return s;
}

/* Cuts at the first `mark`; returns what follows it, NULL if there is none. */
static char *cut(char *s, char mark)
{
    char *at = strchr(s, mark);

    if (at)
        *at++ = 0;
    return at;
}

static bool set_option(kvd_attention_params *a, const struct option *o, const char *value)
{
    char    *field = (char *)a + o->at, *end;
    float    number;
    int      choice;
    uint32_t count;

    switch (o->kind) {
    case CHOICE: /* all of these enums are as wide as an int */
        choice = cli_choice(o->values, value);
        if (choice >= 0)
            memcpy(field, &choice, sizeof(choice));
        return choice >= 0;
    case NUMBER:
        number = strtof(value, &end);
        if (end == value || *end || !((double)number >= o->min && (double)number <= o->max))
            return false;
        memcpy(field, &number, sizeof(number));
        return true;
    case COUNT:
        number = strtof(value, &end);
        if (end == value || *end || !((double)number >= o->min && (double)number <= o->max) ||
            number != (float)(uint32_t)number)
            return false;
        count = (uint32_t)number;
        memcpy(field, &count, sizeof(count));
        return true;
    case NAME: /* which names there are the engine says */
        memcpy(field, &value, sizeof(value));
        return *value != 0;
    case BUDGET:
        return cli_parse_budget(value, a) && (a->budget > 0 || a->budget_share > 0.0f);
    }
    return false;
}

_Static_assert(sizeof(kvd_attention) == sizeof(int) && sizeof(kvd_fetch) == sizeof(int) &&
                   sizeof(kvd_attend) == sizeof(int) && sizeof(kvd_evict) == sizeof(int),
               "set_option() writes enums as int");

static kvd_status set_pair(eval_config *c, const char *key, const char *value, kvd_err *err)
{
    kvd_buf    known = { 0 };
    kvd_status st;

    if (strcmp(key, "policy") == 0 && value) {
        kvd_session_params p =
            KVD_SESSION_PARAMS_INIT; /* what it says of sessions: the run's own */

        return kvd_policy_apply(value, &p, &c->attention, err);
    }
    for (size_t i = 0; i < KVD_COUNTOF(options); i++) {
        if (strcmp(options[i].key, key) != 0)
            continue;
        if (value && set_option(&c->attention, &options[i], value)) {
            if (strcmp(key, "cap") == 0)
                c->attention.caps = NULL; /* in place of a plan's */
            return KVD_OK;
        }
        return kvd_fail(err, KVD_E_INVAL, 0, "configuration '%s': %s is '%s', expected %s", c->name,
                        key, value ? value : "", options[i].values);
    }
    for (size_t i = 0; i < KVD_COUNTOF(options); i++)
        kvd_buf_printf(&known, "%s, ", options[i].key);
    kvd_buf_puts(&known, "policy");
    st = kvd_fail(err, KVD_E_INVAL, 0, "configuration '%s': unknown option '%s'; there are %s",
                  c->name, key, known.data ? known.data : "");
    kvd_buf_free(&known);
    return st;
}

/* "name: key=value, key=value" */
static kvd_status add_config(eval_configs *all, const kvd_attention_params *base, const char *line,
                             size_t len, kvd_err *err)
{
    eval_config *c = &all->config[all->n];
    char        *next;

    if (all->n == EVAL_MAX_CONFIG)
        return kvd_fail(err, KVD_E_INVAL, 0, "more than %u configurations", EVAL_MAX_CONFIG);
    *c = (eval_config){ .line = kvd_strndup(line, len), .attention = *base };
    if (!c->line)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for a configuration");
    all->n++;
    next    = cut(c->line, ':');
    c->name = trim(c->line);
    if (!next || !*c->name || strpbrk(c->name, "\",="))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "configuration '%.60s': expected name: key=value, key=value", line);
    for (uint32_t i = 0; i + 1 < all->n; i++) {
        if (strcmp(all->config[i].name, c->name) == 0)
            return kvd_fail(err, KVD_E_INVAL, 0, "two configurations are named '%s'", c->name);
    }
    while (next && *trim(next)) {
        char *pair = next, *value;

        next  = cut(pair, ',');
        value = cut(pair, '=');
        pair  = trim(pair);
        value = value ? trim(value) : NULL;
        KVD_TRY(set_pair(c, pair, value, err));
    }
    return KVD_OK;
}

/* One configuration between marks; what # begins is left out, and so is what is blank. */
static kvd_status add_all(eval_configs *all, const kvd_attention_params *base, const char *text,
                          char mark, kvd_err *err)
{
    for (const char *s = text; *s;) {
        const size_t n = strcspn(s, (char[]){ mark, 0 });
        const size_t used =
            mark == '\n' && memchr(s, '#', n) ? (size_t)((const char *)memchr(s, '#', n) - s) : n;

        if (strspn(s, BLANK) < used)
            KVD_TRY(add_config(all, base, s, used, err));
        s += n + (s[n] != 0);
    }
    return KVD_OK;
}

/* The first dense one; without any, one is put in front. */
static kvd_status find_dense(eval_configs *c, const kvd_attention_params *base, kvd_err *err)
{
    static const char line[] = "dense: attention=dense";
    eval_config       last;

    for (c->dense = 0; c->dense < c->n; c->dense++) {
        if (c->config[c->dense].attention.mode == KVD_ATTENTION_DENSE)
            return KVD_OK;
    }
    KVD_TRY(add_config(c, base, line, strlen(line), err));
    last = c->config[c->n - 1];
    memmove(&c->config[1], &c->config[0], (c->n - 1) * sizeof(last));
    c->config[0] = last;
    c->dense     = 0;
    return KVD_OK;
}

kvd_status eval_configs_open(eval_configs *c, const kvd_attention_params *base, const kvd_opts *o,
                             kvd_err *err)
{
    static const char alone[] = "options:";
    const char       *file = kvd_opts_text(o, "configs"), *with = kvd_opts_text(o, "with");
    kvd_buf           b  = { 0 };
    kvd_status        st = KVD_OK;

    *c = (eval_configs){ 0 };
    if (file)
        st = cli_read_file(file, FILE_MAX_BYTES, &b, err);
    if (st == KVD_OK && b.data)
        st = add_all(c, base, b.data, '\n', err);
    if (st == KVD_OK && with)
        st = add_all(c, base, with, ';', err);
    if (st == KVD_OK && c->n == 0 && kvd_opts_given(o, "attention") &&
        base->mode != KVD_ATTENTION_DENSE)
        st = add_config(c, base, alone, strlen(alone), err);
    kvd_buf_free(&b);
    return st == KVD_OK ? find_dense(c, base, err) : st;
}

void eval_configs_close(eval_configs *c)
{
    for (uint32_t i = 0; i < c->n; i++)
        kvd_free(c->config[i].line);
    *c = (eval_configs){ 0 };
}

static float largest_cap(const kvd_attention_params *a)
{
    float most = a->caps ? a->caps[0] : a->cap;

    for (uint32_t i = 1; a->caps && i < a->n_caps; i++)
        most = a->caps[i] > most ? a->caps[i] : most;
    return most;
}

kvd_status eval_configs_widest(const eval_configs *c, const kvd_model *m, kvd_session_params p,
                               kvd_attention_params *out, kvd_err *err)
{
    uint64_t index_bytes = 0;
    uint32_t window = 0, zone = 0;

    *out      = c->config[c->dense].attention;
    out->caps = NULL; /* room for the largest of a plan's windows in every lane */
    for (uint32_t i = 0; i < c->n; i++) {
        const kvd_attention_params *a    = &c->config[i].attention;
        kvd_plan                    plan = { .struct_size = sizeof(plan) };

        p.attention = a;
        KVD_TRY(kvd_session_plan(m, &p, &plan, err));
        if (plan.window_tokens > window) {
            out->mode         = KVD_ATTENTION_SPARSE;
            out->budget       = a->budget;
            out->budget_share = a->budget_share;
            out->cap          = largest_cap(a);
            window            = plan.window_tokens;
        }
        if (plan.kv_index_bytes - plan.kv_zone_bytes > index_bytes) {
            out->index  = a->index;
            index_bytes = plan.kv_index_bytes - plan.kv_zone_bytes;
        }
        if (a->zone > 0 && zone > 0 && a->zone != zone)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "configurations with estimation zones of %u and of %u tokens a cell: "
                            "one run has cells of one size",
                            zone, a->zone);
        zone = a->zone > 0 ? a->zone : zone;
    }
    out->zone = zone;
    return KVD_OK;
}

kvd_status eval_config_apply(const eval_config *c, kvd_session *s, kvd_err *err)
{
    return kvd_session_set_attention(s, &c->attention, err);
}
