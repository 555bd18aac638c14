/* SPDX-License-Identifier: Apache-2.0 */
/* cli_cache.c - kvdrive cache: what a cache directory holds, whether it is whole, and less of it.
 */
#include <inttypes.h>
#include <jansson.h>
#include <string.h>
#include <time.h>

#include "cli.h"

static const char *const verb_name[] = { "stats", "ls", "verify", "clear", "gc" };

static uint64_t field(const json_t *o, const char *name)
{
    return (uint64_t)json_integer_value(json_object_get(o, name));
}

static void row(const char *what, const json_t *o, const char *name)
{
    char n[32];

    printf("%-22s %20s\n", what, cli_grouped(field(o, name), n));
}

static void size_row(const char *what, const json_t *o, const char *name)
{
    char n[32];

    printf("%-22s %20s bytes %10.1f MiB\n", what, cli_grouped(field(o, name), n),
           cli_mib(field(o, name)));
}

static void print_stats(const json_t *o)
{
    row("units", o, "units");
    row("  blocks", o, "blocks");
    row("  segments", o, "segments");
    row("  tails", o, "tails");
    row("quarantined", o, "quarantined");
    row("files", o, "files");
    size_row("size", o, "bytes");
    size_row("  salted", o, "salted_bytes");
    size_row("written today", o, "written_today_bytes");
    size_row("free on filesystem", o, "free_bytes");
}

static void print_list(const json_t *list)
{
    size_t  i;
    json_t *e;

    printf("%-16s %-8s %12s %8s %14s  %-16s %s\n", "key", "kind", "first token", "tokens", "bytes",
           "created", "state");
    json_array_foreach((json_t *)list, i, e)
    {
        const time_t t        = (time_t)field(e, "created");
        char         when[32] = "?";
        struct tm    tm;

        if (localtime_r(&t, &tm))
            strftime(when, sizeof(when), "%Y-%m-%d %H:%M", &tm);
        printf("%-16.16s %-8s %12" PRIu64 " %8" PRIu64 " %14" PRIu64 "  %-16s %s%s\n",
               json_string_value(json_object_get(e, "key")),
               json_string_value(json_object_get(e, "kind")), field(e, "first_token"),
               field(e, "tokens"), field(e, "bytes"), when,
               json_is_true(json_object_get(e, "quarantined")) ? "quarantined" : "ok",
               json_is_true(json_object_get(e, "salted")) ? ", salted" : "");
    }
}

static void print_verified(const json_t *o)
{
    printf("%" PRIu64 " units are whole, %" PRIu64 " damaged%s\n", field(o, "ok"), field(o, "bad"),
           field(o, "bad") ? ": they are not used any more; kvdrive cache gc removes them" : "");
}

static void print_removed(const json_t *o)
{
    printf("%" PRIu64 " units of %.1f MiB removed, %" PRIu64 " of %.1f MiB left\n",
           field(o, "removed_units"), cli_mib(field(o, "removed_bytes")), field(o, "units"),
           cli_mib(field(o, "bytes")));
}

/* Exit code: damage that verify has found is a failure. */
static int show(kvd_cache_verb verb, const char *text, bool as_json)
{
    static void (*const print[])(const json_t *) = { print_stats, print_list, print_verified,
                                                     print_removed, print_removed };
    json_error_t je;
    json_t      *root = json_loads(text, 0, &je);
    int          code = EXIT_OK;

    if (!root) {
        fprintf(stderr, "kvdrive: the answer cannot be read back: %s\n", je.text);
        return EXIT_FAILED;
    }
    if (as_json)
        puts(text);
    else
        print[verb](root);
    if (verb == KVD_CACHE_VERIFY && field(root, "bad") > 0)
        code = EXIT_FAILED;
    json_decref(root);
    return code;
}

int cli_cache(const kvd_opts *o)
{
    const char *dir  = kvd_opts_text(o, "cache-dir");
    const char *word = o->n_rest ? o->rest[0] : "";
    const char *near = kvd_nearest(word, verb_name, KVD_COUNTOF(verb_name));
    char       *text = NULL;
    kvd_err     err  = { 0 };
    uint32_t    verb = 0;
    kvd_status  st;
    int         code;

    while (verb < KVD_COUNTOF(verb_name) && strcmp(word, verb_name[verb]) != 0)
        verb++;
    if (verb == KVD_COUNTOF(verb_name) && *word && near)
        return cli_usage("cache: unknown verb '%s'; did you mean '%s'?", word, near);
    if (verb == KVD_COUNTOF(verb_name) && *word)
        return cli_usage("cache: unknown verb '%s': expected stats, ls, verify, clear or gc", word);
    if (verb == KVD_COUNTOF(verb_name))
        return cli_usage("cache: expected stats, ls, verify, clear or gc");
    if (!dir)
        return cli_usage("cache: no directory given: --cache-dir DIR");
    st = kvd_cache_command(dir, (kvd_cache_verb)verb, kvd_opts_size(o, "kv-disk"), &text, &err);
    if (cli_of_option(st, o, "cache-dir", &err) != KVD_OK) {
        code = cli_fail(&err);
        if (st == KVD_E_BUSY)
            fprintf(stderr, "kvdrive: if a server has it open, its GET /metrics counts what it "
                            "holds, and DELETE /cache empties it\n");
        return err.code == KVD_E_CORRUPT ? EXIT_FAILED : code; /* it is no model */
    }
    code = show((kvd_cache_verb)verb, text, kvd_opts_flag(o, "json"));
    kvd_free(text);
    return code;
}
