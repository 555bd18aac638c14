/* SPDX-License-Identifier: Apache-2.0 */
/* cli_tokenize.c - kvdrive tokenize: ids and their bytes, one a line, or as JSON. */
#include <ctype.h>
#include <jansson.h>

#include "cli.h"

/* Bytes as a quoted string; anything that is not printable ASCII or part of UTF-8 is escaped. */
static void print_quoted(const char *s, size_t len)
{
    putchar('"');
    for (size_t i = 0; i < len; i++) {
        const unsigned char c = (unsigned char)s[i];

        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c == '\n')
            fputs("\\n", stdout);
        else if (c < ' ' || c == 127)
            printf("\\x%02x", c);
        else
            putchar(c);
    }
    putchar('"');
}

static void print_tokens(const kvd_model *m, const cli_tokens *t, bool as_json)
{
    for (size_t i = 0; i < t->n && !as_json; i++) {
        size_t      len;
        const char *s = kvd_token_bytes(m, t->data[i], &len);

        printf("%8d  ", t->data[i]);
        print_quoted(s, len);
        putchar('\n');
    }
    if (as_json) {
        putchar('[');
        for (size_t i = 0; i < t->n; i++)
            printf("%s%d", i ? "," : "", t->data[i]);
        puts("]");
    }
}

int cli_tokenize(const kvd_opts *o)
{
    const char *file = kvd_opts_text(o, "file"), *p = kvd_opts_text(o, "prompt");
    kvd_model  *m    = NULL;
    kvd_buf     text = { 0 };
    cli_tokens  t    = { 0 };
    kvd_err     err  = { 0 };
    kvd_span    all  = { 0 };
    kvd_status  st;

    if (!file && o->n_rest == 1)
        file = o->rest[0];
    if (!file == !p)
        return cli_usage("tokenize: give either -p TEXT or -f FILE (- is standard input)");
    st = cli_model_open(&m, o, &err);
    if (st == KVD_OK && file)
        st = cli_read_file(file, 1u << 30, &text, &err);
    else if (st == KVD_OK)
        kvd_buf_puts(&text, p);
    all.end = text.len;
    if (st == KVD_OK)
        st = cli_tokenize_text(m, text.data ? text.data : "", text.len, &all,
                               kvd_opts_flag(o, "special"), true, &t, &err);
    if (st == KVD_OK)
        print_tokens(m, &t, kvd_opts_flag(o, "json"));
    kvd_free(t.data);
    kvd_buf_free(&text);
    kvd_model_close(m);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
