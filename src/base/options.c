/* SPDX-License-Identifier: Apache-2.0 */
/* options.c - see options.h.  Sources are read from the weakest to the strongest, each overwriting
 * the values before it; an error therefore always names the source that is wrong, even when a
 * stronger one would have hidden it. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/options_impl.h"

extern char **environ;

#define PREFIX          "KVDRIVE_"
#define VARIABLE_BYTES  (OPT_NAME_MAX + 16)
#define LINE_MAX_LEN    4096
#define CONFIG_MAX_LINE 10000

/* ---- small parsers ---------------------------------------------------------------- */

bool kvd_parse_size(const char *text, uint64_t *out)
{
    static const char units[] = "KMGT";
    char             *end;
    double            x;
    int               shift = 0;

    errno = 0;
    x     = strtod(text, &end);
    if (end == text || errno || !(x >= 0.0))
        return false;
    if (*end) {
        const char *u = strchr(units, toupper((unsigned char)*end));

        if (!u)
            return false;
        shift = 10 * (int)(u - units + 1);
        end++;
        if (end[0] == 'i' && end[1] == 'B')
            end += 2;
        else if (end[0] == 'B')
            end++;
    }
    x = ldexp(x, shift);
    if (*end || !(x < 0x1p63))
        return false;
    *out = (uint64_t)x;
    return true;
}

bool kvd_parse_count(const char *text, double *out)
{
    char  *end;
    double x;

    errno = 0;
    x     = strtod(text, &end);
    if (end == text || errno || !isfinite(x))
        return false;
    if (toupper((unsigned char)*end) == 'K' || toupper((unsigned char)*end) == 'M') {
        x = ldexp(x, toupper((unsigned char)*end) == 'K' ? 10 : 20);
        end++;
    }
    *out = x;
    return !*end && x == floor(x);
}

static bool parse_flag(const char *text, bool *out)
{
    static const char *const yes[] = { "1", "true", "on", "yes" };
    static const char *const no[]  = { "0", "false", "off", "no" };

    for (size_t i = 0; i < KVD_COUNTOF(yes); i++) {
        if (strcmp(text, yes[i]) == 0 || strcmp(text, no[i]) == 0) {
            *out = strcmp(text, yes[i]) == 0;
            return true;
        }
    }
    return false;
}

static bool is_choice(const char *choices, const char *text)
{
    const size_t len = strlen(text);

    for (const char *s = choices; s;) {
        const char  *bar = strchr(s, '|');
        const size_t n   = bar ? (size_t)(bar - s) : strlen(s);

        if (n == len && memcmp(s, text, n) == 0)
            return true;
        s = bar ? bar + 1 : NULL;
    }
    return false;
}

bool kvd_user_dir(const char *variable, const char *home_sub, char *out, size_t cap)
{
    const char *dir  = getenv(variable);
    const char *home = getenv("HOME");
    int         n;

    if (dir && *dir)
        n = snprintf(out, cap, "%s", dir);
    else if (home && *home)
        n = snprintf(out, cap, "%s/%s", home, home_sub);
    else
        return false;
    return n > 0 && (size_t)n < cap;
}

kvd_status kvd_expand_path(const char *path, char **out, kvd_err *err)
{
    const char *home = getenv("HOME");
    kvd_buf     b    = { 0 };

    *out = NULL;
    if (path[0] == '~' && path[1] && path[1] != '/')
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s: only ~/ is known as a home directory; give the whole path, or ./%s",
                        path, path);
    if (path[0] == '~' && !(home && *home))
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: HOME is not set; give the whole path", path);
    if (path[0] == '~')
        kvd_buf_puts(&b, home);
    kvd_buf_puts(&b, path + (path[0] == '~'));
    *out = kvd_buf_take(&b);
    return *out ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "options: no memory");
}

bool kvd_terminal_is_dumb(void)
{
    const char *term = getenv("TERM");

    return !term || !*term || strcmp(term, "dumb") == 0;
}

/* ---- setting values --------------------------------------------------------------- */

/* Whether the word behind a foreign option is its value. */
static bool foreign_takes(const kvd_opt *opt, const char *next)
{
    return next && (strcmp(opt->arg, "*") == 0 || (*opt->arg && is_choice(opt->arg, next)));
}

/* These are never empty: an empty text comes from a shell's variable that is not set. */
static bool is_path(const kvd_opt *opt)
{
    return opt->kind == KVD_OPT_TEXT &&
           (strcmp(opt->arg, "FILE") == 0 || strcmp(opt->arg, "DIR") == 0);
}

/* Whether ~ at the beginning of a value is a home directory. */
static bool may_be_path(const kvd_opt *opt)
{
    return is_path(opt) || (opt->kind == KVD_OPT_TEXT && strncmp(opt->arg, "FILE|", 5) == 0);
}

/* Commands may give one name to different options, so this command's comes first. */
static int find_name(const kvd_opts *o, const char *name)
{
    int other = -1;

    for (uint32_t i = 0; i < o->n; i++) {
        if (strcmp(o->table[i].name, name) != 0)
            continue;
        if (o->table[i].commands & o->command)
            return (int)i;
        other = other < 0 ? (int)i : other;
    }
    return other;
}

static kvd_status bad_value(const kvd_opt *opt, const char *text, const char *where, kvd_err *err)
{
    if (opt->kind == KVD_OPT_TEXT)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: %s is an empty text, not the name of a %s", where,
                        opt->name, strcmp(opt->arg, "DIR") == 0 ? "directory" : "file");
    if (opt->kind == KVD_OPT_CHOICE)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: %s '%s' is none of %s: %s", where, opt->name,
                        text, opt->arg, opt->help);
    if (opt->kind == KVD_OPT_FLAG)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: %s '%s' is neither true nor false", where,
                        opt->name, text);
    if (opt->min < opt->max && (opt->kind == KVD_OPT_INT || opt->kind == KVD_OPT_COUNT))
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: %s '%s' is not a whole number from %.0f to %.0f",
                        where, opt->name, text, opt->min, opt->max);
    if (opt->min < opt->max)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: %s '%s' is not a number from %.10g to %.10g",
                        where, opt->name, text, opt->min, opt->max);
    return kvd_fail(err, KVD_E_INVAL, 0, "%s: %s '%s' is not %s", where, opt->name, text,
                    opt->kind == KVD_OPT_SIZE ? "a size such as 512M or 8G" : "a number");
}

static bool parse_value(const kvd_opt *opt, const char *text, kvd_opt_value *v)
{
    char *end;

    switch (opt->kind) {
    case KVD_OPT_FLAG:
        return parse_flag(text, &v->flag);
    case KVD_OPT_COUNT:
        return kvd_parse_count(text, &v->num) &&
               !(opt->min < opt->max && (v->num < opt->min || v->num > opt->max));
    case KVD_OPT_INT:
    case KVD_OPT_NUM:
        errno  = 0;
        v->num = strtod(text, &end);
        return end != text && !*end && !errno && isfinite(v->num) &&
               (opt->kind == KVD_OPT_NUM || v->num == floor(v->num)) &&
               !(opt->min < opt->max && (v->num < opt->min || v->num > opt->max));
    case KVD_OPT_SIZE:
        return kvd_parse_size(text, &v->size);
    case KVD_OPT_CHOICE:
        return is_choice(opt->arg, text);
    case KVD_OPT_TEXT:
        return *text || !is_path(opt);
    case KVD_OPT_LIST:
    case KVD_OPT_FOREIGN:
    case KVD_OPT_REFUSED:
    case KVD_OPT_SECRET:
        return true;
    }
    return false;
}

static void drop_list(kvd_opt_value *v)
{
    for (uint32_t k = 0; k < v->n_list; k++)
        kvd_free(v->list[k]);
    kvd_free(v->list);
    v->list   = NULL;
    v->n_list = 0;
}

static kvd_status add_to_list(kvd_opt_value *v, const char *text, kvd_err *err)
{
    char **list = kvd_realloc(v->list, (v->n_list + 1) * sizeof(*list));

    if (list)
        v->list = list;
    if (!list || !(list[v->n_list] = kvd_strndup(text, strlen(text))))
        return kvd_fail(err, KVD_E_NOMEM, 0, "options: no memory");
    v->n_list++;
    return KVD_OK;
}

static kvd_status set(kvd_opts *o, int i, const char *text, kvd_opt_origin origin,
                      const char *where, kvd_err *err)
{
    const kvd_opt *opt = &o->table[i];
    kvd_opt_value *v   = &o->value[i];
    char          *copy;

    if (opt->kind == KVD_OPT_REFUSED && origin != KVD_OPT_ARGV && !foreign_takes(opt, text))
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: %s: %s", where, opt->name, opt->help);
    if (!parse_value(opt, text, v))
        return bad_value(opt, text, where, err);
    if (may_be_path(opt)) {
        kvd_err why;

        if (kvd_expand_path(text, &copy, &why) != KVD_OK)
            return kvd_fail(err, why.code, 0, "%s: %s", where, why.msg);
    } else if (!(copy = kvd_strndup(text, strlen(text)))) {
        return kvd_fail(err, KVD_E_NOMEM, 0, "options: no memory");
    }
    kvd_free(v->text);
    v->text = copy;
    if (v->origin != origin)
        drop_list(v);
    v->origin = origin;
    return opt->kind == KVD_OPT_LIST ? add_to_list(v, text, err) : KVD_OK;
}

/* ---- sources ---------------------------------------------------------------------- */

static kvd_status read_defaults(kvd_opts *o, kvd_err *err)
{
    for (uint32_t i = 0; i < o->n; i++)
        if (o->table[i].def)
            KVD_TRY(set(o, (int)i, o->table[i].def, KVD_OPT_DEFAULT, "default", err));
    return KVD_OK;
}

static void look_at_option(opt_nearest *r, const kvd_opt *opt)
{
    char word[OPT_NAME_MAX + 1];

    opt_look_at(r, opt->name, opt->name);
    for (const char *s = opt->alias; *s; s += strcspn(s, " "), s += *s == ' ') {
        snprintf(word, sizeof(word), "%.*s", (int)strcspn(s, " "), s);
        if (strncmp(word, "--", 2) == 0)
            opt_look_at(r, word + 2, opt->name);
    }
}

/* The option of this command that takes several of what a word means elsewhere: n-depth for depth;
 * or NULL. */
static const char *plural_of(const kvd_opts *o, const char *word)
{
    for (uint32_t i = 0; i < o->n; i++)
        if (o->table[i].commands & o->command && strncmp(o->table[i].name, "n-", 2) == 0 &&
            strcmp(o->table[i].name + 2, word) == 0)
            return o->table[i].name;
    return NULL;
}

/* The option that a word was probably meant to be, or NULL.  any: of every command. */
static const char *nearest_option(const kvd_opts *o, const char *word, bool any)
{
    opt_nearest r = { .word = word };

    for (uint32_t i = 0; i < o->n; i++)
        if (!opt_is_foreign(&o->table[i]) && (any || (o->table[i].commands & o->command)))
            look_at_option(&r, &o->table[i]);
    return opt_found(&r);
}

/* where: the line of a configuration file, which may name options of every command; NULL: the
 * command line, which may not. */
static kvd_status unknown_key(const kvd_opts *o, const char *where, const char *key, kvd_err *err)
{
    const char *word = key + strspn(key, "-"), *dash = where ? "" : "--";
    const char *near = where ? NULL : plural_of(o, word);

    near = near ? near : nearest_option(o, word, where != NULL);
    return kvd_fail(err, KVD_E_INVAL, 0, "%s%sunknown option '%s'%s%s%s%s", where ? where : "",
                    where ? ": " : "", key, near ? "; did you mean '" : "", near ? dash : "",
                    near ? near : "", near ? "'?" : "");
}

static char *trim(char *s)
{
    char *end;

    while (isspace((unsigned char)*s))
        s++;
    end = s + strlen(s);
    while (end > s && isspace((unsigned char)end[-1]))
        end--;
    *end = 0;
    return s;
}

static bool is_quoted(const char *s)
{
    const size_t n = strlen(s);

    return n >= 2 && (*s == '"' || *s == '\'') && s[n - 1] == *s;
}

static kvd_status config_line(kvd_opts *o, char *line, const char *where, kvd_err *err)
{
    char *key = trim(line), *value, *eq;
    int   i;

    if (*key == 0 || *key == '#' || *key == ';')
        return KVD_OK;
    eq = strchr(key, '=');
    if (!eq)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: expected 'name = value', found '%.60s'", where,
                        key);
    *eq = 0;
    key = trim(key);
    i   = find_name(o, key);
    if (i < 0)
        return unknown_key(o, where, key, err);
    if (strcmp(key, "config") == 0)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s: a configuration file names no other one: config belongs on the "
                        "command line, or to KVDRIVE_CONFIG",
                        where);
    value = trim(eq + 1);
    if (is_quoted(value)) /* not shown: it may be a key */
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s: the value of %s is in quotes, which would be part of it: values stand "
                        "without quotes",
                        where, key);
    return set(o, i, value, KVD_OPT_FILE, where, err);
}

static kvd_status read_config(kvd_opts *o, const char *path, bool must_exist, kvd_err *err)
{
    char       line[LINE_MAX_LEN], where[600];
    kvd_status st = KVD_OK;
    FILE      *f  = fopen(path, "re");

    if (!f && errno == ENOENT && !must_exist)
        return KVD_OK;
    if (!f)
        return kvd_fail(err, KVD_E_IO, errno, "configuration file %s", path);
    snprintf(o->config_path, sizeof(o->config_path), "%s", path);
    for (int n = 1; st == KVD_OK && fgets(line, sizeof(line), f); n++) {
        snprintf(where, sizeof(where), "%s:%d", path, n);
        if (!strchr(line, '\n') && strlen(line) + 1 == sizeof(line))
            st = kvd_fail(err, KVD_E_INVAL, 0, "%s: line of more than %d bytes", where,
                          LINE_MAX_LEN);
        else if (n > CONFIG_MAX_LINE)
            st = kvd_fail(err, KVD_E_INVAL, 0, "%s: more than %d lines", where, CONFIG_MAX_LINE);
        else
            st = config_line(o, line, where, err);
    }
    if (st == KVD_OK && ferror(f))
        st = kvd_fail(err, KVD_E_IO, errno, "reading %s", path);
    fclose(f);
    return st;
}

static void variable_of(const char *option, char name[VARIABLE_BYTES])
{
    size_t at = (size_t)snprintf(name, VARIABLE_BYTES, PREFIX);

    for (const char *s = option; *s && at + 1 < VARIABLE_BYTES; s++)
        name[at++] = *s == '-' ? '_' : (char)toupper((unsigned char)*s);
    name[at] = 0;
}

/* entry: "KVDRIVE_NAME=VALUE".  The value is not shown: it may be a key. */
static kvd_status read_variable(kvd_opts *o, const char *entry, kvd_err *err)
{
    const size_t len = strcspn(entry, "="), n = sizeof(PREFIX) - 1;
    char         option[VARIABLE_BYTES], name[VARIABLE_BYTES], near_name[VARIABLE_BYTES];
    const char  *near;
    int          i;

    snprintf(name, sizeof(name), "%.*s", (int)kvd_min_u64(len, sizeof(name) - 1), entry);
    for (i = 0; name[n + (size_t)i]; i++)
        option[i] = name[n + (size_t)i] == '_' ? '-' : (char)tolower(name[n + (size_t)i]);
    option[i] = 0;
    i         = find_name(o, option);
    if (i >= 0)
        variable_of(o->table[i].name, near_name);
    if (i >= 0 && entry[len] && strcmp(name, near_name) == 0)
        return set(o, i, entry + len + 1, KVD_OPT_ENV, name, err);
    if (i < 0 && strcmp(option, "config") == 0) /* read by config_argument() */
        return KVD_OK;
    near = nearest_option(o, option, true);
    if (near)
        variable_of(near, near_name);
    return kvd_fail(err, KVD_E_INVAL, 0, "%s: no option has this variable%s%s%s", name,
                    near ? "; did you mean '" : "", near ? near_name : "", near ? "'?" : "");
}

static kvd_status read_environment(kvd_opts *o, kvd_err *err)
{
    for (char *const *e = environ; e && *e; e++)
        if (strncmp(*e, PREFIX, sizeof(PREFIX) - 1) == 0)
            KVD_TRY(read_variable(o, *e, err));
    return KVD_OK;
}

/* Whether word is the option's long name or one of its aliases. */
static bool spelled(const kvd_opt *opt, const char *word, size_t len)
{
    if (len > 2 && word[0] == '-' && word[1] == '-' && strlen(opt->name) == len - 2 &&
        memcmp(opt->name, word + 2, len - 2) == 0)
        return true;
    for (const char *s = opt->alias; *s;) {
        const size_t n = strcspn(s, " ");

        if (n == len && memcmp(s, word, n) == 0)
            return true;
        s += n;
        s += *s == ' ';
    }
    return false;
}

/* --no-NAME of a flag. */
static bool negates(const kvd_opt *opt, const char *word, size_t len)
{
    return opt->kind == KVD_OPT_FLAG && len > 5 && memcmp(word, "--no-", 5) == 0 &&
           strlen(opt->name) == len - 5 && memcmp(opt->name, word + 5, len - 5) == 0;
}

/* Index of the option that an argument names; *negated for --no-NAME of a flag.  Commands may give
 * one short name to different options, so those of this command come first. */
static int find_argument(const kvd_opts *o, const char *arg, size_t len, bool *negated)
{
    int other = -1;

    *negated = false;
    for (uint32_t i = 0; i < o->n; i++) {
        const bool no = negates(&o->table[i], arg, len);

        if (!no && !spelled(&o->table[i], arg, len))
            continue;
        *negated = no;
        if (o->table[i].commands & o->command)
            return (int)i;
        other = (int)i;
    }
    return other;
}

/* value: behind the = or in the next word; NULL: there is none. */
static kvd_status read_foreign(kvd_opts *o, int i, const char *word, const char *value,
                               kvd_err *err)
{
    const kvd_opt *opt = &o->table[i];

    if (opt->kind == KVD_OPT_REFUSED && !foreign_takes(opt, value))
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: %s", word, opt->help);
    return set(o, i, word, KVD_OPT_ARGV, word, err);
}

/* Reads one option at argv[*at]; moves *at to its last word. */
static kvd_status read_argument(kvd_opts *o, int argc, const char *const *argv, int *at,
                                kvd_err *err)
{
    const char    *arg = argv[*at];
    const char    *eq  = strncmp(arg, "--", 2) == 0 ? strchr(arg, '=') : NULL;
    const size_t   len = eq ? (size_t)(eq - arg) : strlen(arg);
    bool           negated;
    const int      i = find_argument(o, arg, len, &negated);
    const kvd_opt *opt;
    const char    *next;
    char           word[OPT_NAME_MAX + 1];

    snprintf(word, sizeof(word), "%.*s", (int)(len < OPT_NAME_MAX ? len : OPT_NAME_MAX), arg);
    if (i < 0)
        return unknown_key(o, NULL, word, err);
    opt = &o->table[i];
    if (!(opt->commands & o->command)) {
        next = plural_of(o, opt->name);
        return kvd_fail(err, KVD_E_INVAL, 0, "option %s does not belong to this command%s%s%s",
                        word, next ? "; did you mean '--" : "", next ? next : "", next ? "'?" : "");
    }
    if (opt_is_foreign(opt)) {
        next = eq ? eq + 1 : *at + 1 < argc ? argv[*at + 1] : NULL;
        *at += !eq && foreign_takes(opt, next);
        return read_foreign(o, i, word, next, err);
    }
    if (opt->kind == KVD_OPT_SECRET)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: everybody can read a command line; %s", word,
                        opt->help);
    if (opt->kind == KVD_OPT_FLAG && !eq)
        return set(o, i, negated ? "false" : "true", KVD_OPT_ARGV, word, err);
    if (negated)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s takes no value", word);
    if (eq)
        return set(o, i, eq + 1, KVD_OPT_ARGV, word, err);
    if (*at + 1 >= argc)
        return kvd_fail(err, KVD_E_INVAL, 0, "option %s needs a value (%s)", word, opt->arg);
    return set(o, i, argv[++*at], KVD_OPT_ARGV, word, err);
}

static kvd_status read_arguments(kvd_opts *o, int argc, const char *const *argv, kvd_err *err)
{
    bool only_rest = false;

    for (int at = 0; at < argc; at++) {
        if (only_rest || argv[at][0] != '-' || argv[at][1] == 0) {
            KVD_TRY(kvd_expand_path(argv[at], &o->rest[o->n_rest], err));
            o->n_rest++;
        } else if (strcmp(argv[at], "--") == 0) {
            only_rest = true;
        } else {
            KVD_TRY(read_argument(o, argc, argv, &at, err));
        }
    }
    return KVD_OK;
}

/* --config must be known before the file is read, though flags are read last. */
static const char *config_argument(int argc, const char *const *argv)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strncmp(argv[i], "--config=", 9) == 0)
            return argv[i] + 9;
        if (strcmp(argv[i], "--config") == 0 && i + 1 < argc)
            return argv[i + 1];
    }
    return getenv("KVDRIVE_CONFIG");
}

kvd_status kvd_opts_open(kvd_opts *o, const kvd_opt *table, uint32_t n, uint32_t command, int argc,
                         const char *const *argv, kvd_err *err)
{
    const char *config = config_argument(argc, argv);
    char        dir[400], path[512];

    *o       = (kvd_opts){ .table = table, .n = n, .command = command };
    o->value = kvd_calloc(n, sizeof(*o->value));
    o->rest  = kvd_calloc((size_t)argc + 1, sizeof(*o->rest));
    if (!o->value || !o->rest)
        return kvd_fail(err, KVD_E_NOMEM, 0, "options: no memory");
    KVD_TRY(read_defaults(o, err));
    if (config) {
        char      *expanded;
        kvd_status st = kvd_expand_path(config, &expanded, err);

        if (st == KVD_OK)
            st = read_config(o, expanded, true, err);
        kvd_free(expanded);
        KVD_TRY(st);
    } else if (kvd_user_dir("XDG_CONFIG_HOME", ".config", dir, sizeof(dir))) {
        snprintf(path, sizeof(path), "%s/kvdrive/config", dir);
        KVD_TRY(read_config(o, path, false, err));
    }
    KVD_TRY(read_environment(o, err));
    return read_arguments(o, argc, argv, err);
}

void kvd_opts_close(kvd_opts *o)
{
    for (uint32_t i = 0; o->value && i < o->n; i++) {
        kvd_free(o->value[i].text);
        drop_list(&o->value[i]);
    }
    for (int i = 0; i < o->n_rest; i++)
        kvd_free(o->rest[i]);
    kvd_free(o->value);
    kvd_free(o->rest);
    *o = (kvd_opts){ 0 };
}

/* ---- looking at values ------------------------------------------------------------ */

kvd_status kvd_opts_set(kvd_opts *o, const char *name, const char *text, kvd_err *err)
{
    const int i = find_name(o, name);

    if (i < 0 || !(o->table[i].commands & o->command) || opt_is_foreign(&o->table[i]))
        return unknown_key(o, NULL, name, err);
    return set(o, i, text, KVD_OPT_ARGV, "option", err);
}

const kvd_opt_value *kvd_opts_get(const kvd_opts *o, const char *name)
{
    const int i = find_name(o, name);

    kvd_assert(i >= 0);
    return &o->value[i];
}

const char *kvd_opts_text(const kvd_opts *o, const char *name)
{
    return kvd_opts_get(o, name)->text;
}

int64_t kvd_opts_int(const kvd_opts *o, const char *name)
{
    return (int64_t)kvd_opts_get(o, name)->num;
}

double kvd_opts_num(const kvd_opts *o, const char *name)
{
    return kvd_opts_get(o, name)->num;
}

uint64_t kvd_opts_size(const kvd_opts *o, const char *name)
{
    return kvd_opts_get(o, name)->size;
}

bool kvd_opts_flag(const kvd_opts *o, const char *name)
{
    return kvd_opts_get(o, name)->flag;
}

bool kvd_opts_given(const kvd_opts *o, const char *name)
{
    return kvd_opts_get(o, name)->origin > KVD_OPT_DEFAULT;
}

const char *kvd_opts_where(const kvd_opts *o, const char *name, char out[KVD_OPT_WHERE_BYTES])
{
    const int i = find_name(o, name);

    kvd_assert(i >= 0);
    if (o->value[i].origin == KVD_OPT_ENV)
        variable_of(o->table[i].name, out);
    else if (o->value[i].origin == KVD_OPT_FILE)
        snprintf(out, KVD_OPT_WHERE_BYTES, "%.180s: %s", o->config_path, name);
    else
        snprintf(out, KVD_OPT_WHERE_BYTES, "--%s", name);
    return out;
}
