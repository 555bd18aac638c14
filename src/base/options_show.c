/* SPDX-License-Identifier: Apache-2.0 */
/* options_show.c - options as text for people. */
#include <stdio.h>
#include <string.h>

#include "base/options_impl.h"

static void put_value(kvd_buf *b, const kvd_opt *opt, const kvd_opt_value *v)
{
    kvd_buf text = { 0 };

    if (opt->kind == KVD_OPT_SECRET && v->text)
        kvd_buf_puts(&text, "(not shown)");
    else if (opt->kind != KVD_OPT_LIST)
        kvd_buf_puts(&text, v->text ? v->text : "");
    for (uint32_t k = 0; k < v->n_list; k++)
        kvd_buf_printf(&text, "%s%s", k ? ", " : "", v->list[k]);
    kvd_buf_printf(b, "%-20s = %-24s", opt->name, text.data ? text.data : "");
    b->oom = b->oom || text.oom;
    kvd_buf_free(&text);
}

void kvd_opts_print(const kvd_opts *o, kvd_buf *b)
{
    static const char *const origin[] = { "not set", "default", "file", "environment",
                                          "command line" };

    for (uint32_t i = 0; i < o->n; i++) {
        if (!(o->table[i].commands & o->command) || opt_is_foreign(&o->table[i]))
            continue;
        put_value(b, &o->table[i], &o->value[i]);
        kvd_buf_printf(b, " # %s\n", origin[o->value[i].origin]);
    }
    kvd_buf_printf(b, "# configuration file: %s\n", o->config_path[0] ? o->config_path : "none");
}

/* Help text wrapped at 80 columns behind an indent. */
static void put_wrapped(kvd_buf *b, const char *text, int indent)
{
    int col = indent;

    while (*text) {
        const int n = (int)strcspn(text, " ");

        if (col > indent && col + 1 + n > 80) {
            kvd_buf_printf(b, "\n%*s", indent, "");
            col = indent;
        } else if (col > indent) {
            kvd_buf_putc(b, ' ');
            col++;
        }
        kvd_buf_put(b, text, (size_t)n);
        col += n;
        text += n;
        text += *text == ' ';
    }
    kvd_buf_putc(b, '\n');
}

static void put_option(const kvd_opt *opt, kvd_buf *b)
{
    char left[160], help[512];
    int  len = 2;

    snprintf(left, sizeof(left), "  ");
    for (const char *s = opt->alias; *s; s += strcspn(s, " "), s += *s == ' ')
        len += snprintf(left + len, sizeof(left) - (size_t)len, "%.*s, ", (int)strcspn(s, " "), s);
    len +=
        snprintf(left + len, sizeof(left) - (size_t)len, "--%s%s%s", opt->name,
                 opt->kind == KVD_OPT_FLAG ? "" : " ", opt->kind == KVD_OPT_FLAG ? "" : opt->arg);
    if (opt->def && opt->kind != KVD_OPT_FLAG)
        snprintf(help, sizeof(help), "%s (default: %s)", opt->help, opt->def);
    else
        snprintf(help, sizeof(help), "%s", opt->help);
    if (len > 28)
        kvd_buf_printf(b, "%s\n%*s", left, 30, "");
    else
        kvd_buf_printf(b, "%-30s", left);
    put_wrapped(b, help, 30);
}

static bool is_among(const char *name, const char *const *names)
{
    for (; *names; names++)
        if (strcmp(name, *names) == 0)
            return true;
    return false;
}

uint32_t kvd_opts_help(const kvd_opt *table, uint32_t n, uint32_t command, const char *const *first,
                       kvd_buf *b)
{
    uint32_t left_out = 0;

    for (uint32_t i = 0; i < n; i++) {
        const kvd_opt *opt = &table[i];

        if (!(opt->commands & command) || opt_is_foreign(opt) || opt->kind == KVD_OPT_SECRET)
            continue;
        if (!first || is_among(opt->name, first))
            put_option(opt, b);
        else
            left_out++;
    }
    return left_out;
}
