/* SPDX-License-Identifier: Apache-2.0 */
/* gram_names.c - propertyNames: which keys an object may have. */
#include <string.h>

#include "text/gram_impl.h"

static bool says_nothing_of_names(gram_build *b, json_t *plain)
{
    static const char *const key[] = { "enum",      "const",     "pattern",    "format",
                                       "minLength", "maxLength", GRAM_PATTERNS };

    for (size_t i = 0; i < KVD_COUNTOF(key); i++)
        if (gram_has(plain, key[i]))
            return false;
    return gram_types(b, plain) & GRAM_T_STRING;
}

json_t *gram_names_of(gram_build *b, json_t *object)
{
    json_t *names = json_object_get(object, "propertyNames");
    json_t *list = names ? gram_expand(b, names) : NULL, *plain, *found = NULL;
    size_t  i, n = 0;

    if (!list)
        return NULL;
    json_array_foreach(list, i, plain)
    {
        if (says_nothing_of_names(b, plain))
            return NULL;
        if (!(gram_types(b, plain) & GRAM_T_STRING))
            continue;
        found = plain;
        n++;
    }
    if (n > 1)
        gram_refuse(b, "propertyNames is supported with one alternative for strings, not %zu", n);
    return found ? found : gram_own(b, json_pack("{s:[]}", "enum"));
}

/* The strings of enum and const of a schema of names; n: how many.  The caller frees it. */
static json_t **words_of(gram_build *b, json_t *names, size_t *n)
{
    json_t  *list = json_object_get(names, "enum"), *only = json_object_get(names, "const"), *v;
    json_t **word = kvd_calloc(json_array_size(list) + 1, sizeof(*word));
    size_t   i;

    *n = 0;
    if (!word) {
        gram_no_memory(b);
        return NULL;
    }
    if (only && json_is_string(only) && !list)
        word[(*n)++] = only;
    json_array_foreach(list, i, v)
    {
        if (json_is_string(v) && gram_tick(b, 4) && (!only || json_equal(v, only)))
            word[(*n)++] = v;
    }
    return word;
}

static bool is_listed(json_t *const *word, size_t n, const char *key, size_t len)
{
    for (size_t i = 0; i < n; i++)
        if (json_string_length(word[i]) == len && memcmp(json_string_value(word[i]), key, len) == 0)
            return true;
    return false;
}

json_t *gram_names_that_fit(gram_build *b, json_t *names, json_t *object)
{
    const bool  listed = gram_has(names, "enum") || gram_has(names, "const");
    json_t    **word = kvd_calloc(json_object_size(object) + 1, sizeof(*word)), **some = NULL;
    json_t     *fit = gram_own(b, json_object()), *v;
    const char *key;
    size_t      len, n = 0, n_some = 0;

    if (listed)
        some = words_of(b, names, &n_some);
    if (!word)
        gram_no_memory(b);
    json_object_keylen_foreach(object, key, len, v)
    {
        if (b->st == KVD_OK && gram_tick(b, n_some + 1) &&
            (!listed || is_listed(some, n_some, key, len)))
            word[n++] = gram_own(b, json_stringn(key, len));
    }
    if (b->st == KVD_OK)
        n = gram_words_that_fit(b, names, word, n);
    for (size_t i = 0; i < n && b->st == KVD_OK; i++)
        if (json_object_setn_new(fit, json_string_value(word[i]), json_string_length(word[i]),
                                 json_true()) != 0)
            gram_no_memory(b);
    kvd_free(word);
    kvd_free(some);
    return fit;
}

uint32_t gram_names_rule(gram_build *b, json_t *names, json_t *taken)
{
    json_t **word;
    size_t   n, kept = 0;
    uint32_t rule = 0;

    if (!gram_has(names, "enum") && !gram_has(names, "const"))
        return gram_string_rule(b, names, taken);
    word = words_of(b, names, &n);
    if (b->st == KVD_OK)
        n = gram_words_that_fit(b, names, word, n);
    for (size_t i = 0; i < n && b->st == KVD_OK; i++)
        if (!json_object_getn(taken, json_string_value(word[i]), json_string_length(word[i])))
            word[kept++] = word[i];
    if (b->st == KVD_OK)
        rule = gram_words(b, word, kept);
    kvd_free(word);
    return rule;
}
