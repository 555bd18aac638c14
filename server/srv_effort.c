/* SPDX-License-Identifier: Apache-2.0 */
/* srv_effort.c - how long a model shall think before it answers, as each API asks for it.  Only a
 * chat template can tell a model, so what is asked for becomes variables of the template.  And how
 * long it shall answer, which no template knows. */
#include "srv_fields.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define EFFORTS "none, minimal, low, medium, high, xhigh, max"

/* The words of APIs, and what templates know for them (gpt-oss: three levels); NULL: no thinking.
 */
static const struct {
    const char *word, *level;
} efforts[] = { { "none", NULL },   { "minimal", "low" }, { "low", "low" }, { "medium", "medium" },
                { "high", "high" }, { "xhigh", "high" },  { "max", "high" } };

/* A variable, unless the request has given it: chat_template_kwargs come first. */
static bool set(srv_fields *f, json_t *vars, const char *name, json_t *value)
{
    if (json_object_get(vars, name)) {
        json_decref(value);
        return true;
    }
    return json_object_set_new(vars, name, value) == 0 ||
           srv_fields_full(f, "no memory for the template's variables");
}

/* Qwen3's name, and that of Granite and DeepSeek V3.1. */
static bool set_thinking(srv_fields *f, json_t *vars, bool on)
{
    return set(f, vars, "enable_thinking", json_boolean(on)) &&
           set(f, vars, "thinking", json_boolean(on));
}

/* where: the field's name with its place. */
static bool add_effort(srv_fields *f, json_t *vars, const json_t *word, const char *where)
{
    const char *s = json_string_value(word);

    if (!word)
        return true;
    for (size_t i = 0; s && i < KVD_COUNTOF(efforts); i++) {
        if (strcmp(s, efforts[i].word) != 0)
            continue;
        return efforts[i].level ? set(f, vars, "reasoning_effort", json_string(efforts[i].level))
                                : set_thinking(f, vars, false);
    }
    return srv_fields_word(f, where, word, EFFORTS);
}

/* Anthropic's.  The budget is Seed-OSS' variable: other templates have none.  "adaptive" leaves it
 * to the template, and so do types that are newer. */
static bool add_thinking(srv_fields *f, json_t *vars, const json_t *o)
{
    const json_t *word   = srv_get(o, "type");
    const char   *type   = json_string_value(word);
    int64_t       budget = -1;

    if (!o)
        return true;
    srv_get_int(f, o, "budget_tokens", 0, INT32_MAX, &budget);
    if (!type)
        return srv_fields_word(f, "thinking.type", word, "adaptive, enabled, disabled");
    if (strcmp(type, "disabled") == 0)
        return set_thinking(f, vars, false);
    if (strcmp(type, "enabled") != 0)
        return true;
    return set_thinking(f, vars, true) &&
           (budget < 0 || set(f, vars, "thinking_budget", json_integer(budget)));
}

/* What the server's owner has said, where the request says nothing. */
static bool add_default_thinking(srv_fields *f, json_t *vars)
{
    static const char *const said[] = { "enable_thinking", "thinking", "reasoning_effort",
                                        "thinking_budget" };

    for (size_t i = 0; i < KVD_COUNTOF(said); i++)
        if (json_object_get(vars, said[i]))
            return true;
    return f->s->p.thinking == 0 || set_thinking(f, vars, f->s->p.thinking > 0);
}

/* Today, as Llama 3's templates write it: 05 Mar 2026. */
static bool add_date(srv_fields *f, json_t *vars)
{
    static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    const time_t      now      = time(NULL);
    struct tm         tm;
    char              text[32];

    if (!localtime_r(&now, &tm))
        return true;
    snprintf(text, sizeof(text), "%02d %.3s %d", tm.tm_mday, months + 3 * (size_t)tm.tm_mon,
             tm.tm_year + 1900);
    return set(f, vars, "date_string", json_string(text));
}

json_t *srv_template_vars(srv_fields *f)
{
    const json_t *given = srv_get_object(f, f->root, "chat_template_kwargs");
    json_t       *vars  = given ? json_copy((json_t *)(uintptr_t)given) : json_object();

    if (!vars) {
        srv_fields_full(f, "no memory for the template's variables");
        return NULL;
    }
    if (f->asks) {
        add_effort(f, vars, srv_get(f->root, "reasoning_effort"), "reasoning_effort");
        add_effort(f, vars, srv_get(srv_get(f->root, "reasoning"), "effort"), "reasoning.effort");
        add_effort(f, vars, srv_get(srv_get(f->root, "output_config"), "effort"),
                   "output_config.effort");
        add_thinking(f, vars, srv_get_object(f, f->root, "thinking"));
    }
    add_default_thinking(f, vars);
    add_date(f, vars);
    if (f->bad) {
        json_decref(vars);
        return NULL;
    }
    return vars;
}

void srv_get_verbosity(srv_fields *f, const json_t *word, const char *where)
{
    const char *s = json_string_value(word);

    if (!word || (s && strcmp(s, "medium") == 0))
        return;
    if (s && (strcmp(s, "low") == 0 || strcmp(s, "high") == 0))
        srv_log_once(f->s, "requests ask for a verbosity, which has no effect: a message can");
    else
        srv_fields_word(f, where, word, "low, medium, high");
}
