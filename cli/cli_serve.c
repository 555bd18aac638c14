/* SPDX-License-Identifier: Apache-2.0 */
/* cli_serve.c - kvdrive serve: what the options say, for server/. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli.h"
#include "server/server.h"

#define KEY_MAX_BYTES 4096

/* A key goes into a header: visible characters, no blanks.  source: who gave it, for messages. */
static kvd_status check_key(const char *key, const char *source, const char *if_empty, kvd_err *err)
{
    for (const char *s = key; *s; s++)
        if (*s <= ' ' || *s > '~')
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "%s: the key has blanks, several lines, or characters that are not "
                            "ASCII in it",
                            source);
    return *key ? KVD_OK : kvd_fail(err, KVD_E_INVAL, 0, "%s: %s", source, if_empty);
}

/* Containers show their secrets to all, so it is no error.  What belongs to another user and is
 * shown to our group was made so for us: by systemd, whose credentials have such a mode.  With a
 * mode of 600 we could not read that one either. */
static void warn_of_readers(const char *path, const char *source)
{
    struct stat st;
    bool        ours;
    unsigned    mode;

    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode))
        return;
    ours = st.st_uid == geteuid();
    mode = st.st_mode & 07777u;
    if (mode & (ours ? S_IRWXG | S_IRWXO : S_IRWXO))
        kvd_log(KVD_LOG_WARN, "%s: mode %04o lets %s at the key%s%s", source, mode,
                ours ? "others than its owner" : "everybody", ours ? ": chmod 600 " : "",
                ours ? path : "");
}

static kvd_status read_key_file(const kvd_opts *o, const char *path, kvd_buf *b, const char **key,
                                kvd_err *err)
{
    char where[KVD_OPT_WHERE_BYTES], source[KVD_ERR_MSG_BYTES];

    snprintf(source, sizeof(source), "%s %.200s", kvd_opts_where(o, "api-key-file", where), path);
    KVD_TRY(cli_read_option(o, "api-key-file", KEY_MAX_BYTES, b, err));
    if (b->len && strlen(b->data) != b->len)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: a zero byte in the key", source);
    while (b->len && strchr(" \t\r\n", b->data[b->len - 1]))
        b->data[--b->len] = 0;
    *key = b->len ? b->data : "";
    KVD_TRY(check_key(*key, source,
                      "there is no key in it; it holds one line, as openssl rand -hex 24 "
                      "makes them",
                      err));
    warn_of_readers(path, source);
    return KVD_OK;
}

static kvd_status read_key(const kvd_opts *o, kvd_buf *b, const char **key, kvd_err *err)
{
    const char *path = kvd_opts_text(o, "api-key-file");
    char        where[KVD_OPT_WHERE_BYTES];

    *key = kvd_opts_text(o, "api-key");
    if (path)
        return read_key_file(o, path, b, key, err);
    if (!*key)
        return KVD_OK;
    kvd_opts_where(o, "api-key", where);
    KVD_TRY(check_key(*key, where, "the key is empty: leave it out altogether to serve without one",
                      err));
    if (kvd_opts_get(o, "api-key")->origin == KVD_OPT_FILE)
        warn_of_readers(o->config_path, where);
    return KVD_OK;
}

/* Length of "https://", in lower case as browsers write it; 0: there is no scheme. */
static size_t origin_scheme(const char *s)
{
    const size_t n = strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789+.-");

    return *s >= 'a' && *s <= 'z' && strncmp(s + n, "://", 3) == 0 ? n + 3 : 0;
}

static size_t origin_host(const char *s)
{
    const size_t n = *s == '[' ? strspn(s + 1, "0123456789abcdef:.") : 0;

    if (*s == '[')
        return n > 0 && s[n + 1] == ']' ? n + 2 : 0;
    return strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789-._");
}

/* Whether it is nothing, or ":" and a port. */
static bool is_origin_port(const char *s)
{
    const size_t n = *s == ':' ? strspn(s + 1, "0123456789") : 0;

    return *s == 0 ||
           (n >= 1 && n <= 5 && s[n + 1] == 0 && s[1] != '0' && strtol(s + 1, NULL, 10) <= 65535);
}

/* What it is compared with is an Origin as browsers send them: another one would allow nobody. */
static kvd_status check_origin(const kvd_opts *o, kvd_err *err)
{
    const char  *text   = kvd_opts_text(o, "cors-origin");
    const size_t scheme = text ? origin_scheme(text) : 0,
                 host   = scheme ? origin_host(text + scheme) : 0;
    const char *port    = host ? text + scheme + host : "";
    char        where[KVD_OPT_WHERE_BYTES];

    if (!text || strcmp(text, "*") == 0 || strcmp(text, "null") == 0)
        return KVD_OK;
    kvd_opts_where(o, "cors-origin", where);
    if (!host || !is_origin_port(port))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s '%.100s' is no origin: expected *, null, or SCHEME://HOST[:PORT] in "
                        "lower case, without a path, such as https://chat.example",
                        where, text);
    if ((strncmp(text, "http://", scheme) == 0 && strcmp(port, ":80") == 0) ||
        (strncmp(text, "https://", scheme) == 0 && strcmp(port, ":443") == 0))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s '%.100s': browsers leave a scheme's own port out: %.*s", where, text,
                        (int)(scheme + host), text);
    return KVD_OK;
}

static void take_params(server_params *p, const kvd_opts *o)
{
    *p               = (server_params){ 0 };
    p->host          = kvd_opts_text(o, "host");
    p->port          = (uint16_t)kvd_opts_int(o, "port");
    p->open          = kvd_opts_flag(o, "without-key");
    p->reasoning     = strcmp(kvd_opts_text(o, "reasoning-format"), "auto") == 0;
    p->thinking      = strcmp(kvd_opts_text(o, "reasoning"), "on") == 0    ? 1
                       : strcmp(kvd_opts_text(o, "reasoning"), "off") == 0 ? -1
                                                                           : 0;
    p->parse_special = kvd_opts_flag(o, "parse-special");
    p->origin        = kvd_opts_text(o, "cors-origin");
    p->path          = kvd_opts_text(o, "model");
    p->name          = kvd_opts_text(o, "alias");
    p->n_predict     = kvd_opts_int(o, "predict");
    p->n_queue       = (uint32_t)kvd_opts_int(o, "queue");
    p->n_connection  = (uint32_t)kvd_opts_int(o, "connections");
    p->body_bytes    = kvd_opts_size(o, "body-limit");
    p->keepalive_s   = kvd_opts_num(o, "keepalive");
    p->gap_ms        = kvd_opts_num(o, "max-gap");
    p->read_s        = kvd_opts_num(o, "read-timeout");
    p->idle_s        = kvd_opts_num(o, "idle-timeout");
    p->stall_s       = kvd_opts_num(o, "stall-timeout");
    p->grace_s       = kvd_opts_num(o, "grace");
    p->cached        = kvd_opts_text(o, "cache-dir") != NULL;
    p->words         = cli_name_options;
    p->log_json      = strcmp(kvd_opts_text(o, "log-format"), "json") == 0;
    cli_take_sampling(&p->sampling, o);
}

kvd_status cli_serve_params(kvd_session_params *p, kvd_attention_params *a, const kvd_opts *o,
                            kvd_err *err)
{
    KVD_TRY(cli_session_params(p, a, o, err));
    p->n_seq     = (uint32_t)kvd_opts_int(o, "parallel");
    p->kv_tokens = (uint64_t)kvd_opts_int(o, "kv-tokens");
    p->n_logits  = p->n_seq + SERVER_ECHO_ROWS;
    p->n_parked  = SERVER_PARKED_MAX;
    if (p->n_batch && p->n_batch < p->n_seq + SERVER_ECHO_MIN)
        p->n_batch = p->n_seq + SERVER_ECHO_MIN;
    return KVD_OK;
}

static kvd_status serve(kvd_model **m, kvd_session **s, const server_params *p, const kvd_opts *o,
                        kvd_err *err)
{
    kvd_plan             plan = { .struct_size = sizeof(plan) };
    kvd_session_params   sp;
    kvd_attention_params a;

    KVD_TRY(cli_model_open(m, o, err));
    KVD_TRY(cli_serve_params(&sp, &a, o, err));
    KVD_TRY(cli_session_open_cached(s, &plan, *m, &sp, &a, o, err));
    return server_run(*m, *s, &plan, p, err);
}

int cli_serve(const kvd_opts *o)
{
    server_params p;
    kvd_model    *m   = NULL;
    kvd_session  *s   = NULL;
    kvd_buf       key = { 0 };
    kvd_err       err = { 0 };
    kvd_status    st;

    take_params(&p, o);
    st = check_origin(o, &err);
    if (st == KVD_OK)
        st = read_key(o, &key, &p.key, &err);
    if (st == KVD_OK)
        st = serve(&m, &s, &p, o, &err);
    kvd_session_close(s);
    kvd_model_close(m);
    kvd_buf_free(&key);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
