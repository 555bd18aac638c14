/* SPDX-License-Identifier: Apache-2.0 */
/* cli_tokenize.c - kvdrive tokenize: ids and their bytes, one a line, or as JSON. */
#include <ctype.h>
#include <jansson.h>

#include "cli.h"
#include "text/text.h"

/* Bytes as a quoted string; control characters and what is not valid UTF-8 are escaped. */
static void print_quoted(const char *s, size_t len)
{
    putchar('"');
    for (size_t i = 0; i < len;) {
        const unsigned char c = (unsigned char)s[i];
        uint32_t            cp;
        const size_t        n = utf8_decode(s + i, len - i, &cp);

        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c == '\n')
            fputs("\\n", stdout);
        else if (c < ' ' || c == 127 || (cp == 0xfffd && n < 3) || (cp >= 0x80 && cp < 0xa0))
            for (size_t k = 0; k < n; k++)
                printf("\\x%02x", (unsigned char)s[i + k]);
        else
            fwrite(s + i, 1, n, stdout);
        i += n;
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
    const char *file = cli_input_file(o, "file"), *p = kvd_opts_text(o, "prompt");
    kvd_model  *m    = NULL;
    kvd_buf     text = { 0 };
    cli_tokens  t    = { 0 };
    kvd_err     err  = { 0 };
    kvd_span    all  = { 0 };
    kvd_status  st;

    if (!file == !p)
        return cli_usage("tokenize: give either -p TEXT or -f FILE (- is standard input)");
    st = cli_model_open(&m, o, &err);
    if (st == KVD_OK && file)
        st = cli_read_input(o, file, &text, &err);
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
