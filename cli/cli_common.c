/* SPDX-License-Identifier: Apache-2.0 */
/* cli_common.c - opening things by the options, reading files, showing numbers. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define MICRO_BATCH_MAX    4096u
#define INPUT_MAX_BYTES    (1ull << 30)
#define IDS_MAX_BYTES      (1ull << 30)
#define TEMPLATE_MAX_BYTES (1ull << 20)
#define GPU_LAYERS_MAX     100000.0

int cli_fail(const kvd_err *err)
{
    char text[CLI_NAMES_BYTES];

    fprintf(stderr, "kvdrive: %s\n",
            err->code == KVD_E_CANCELED ? "interrupted" : cli_name_options(err->msg, text));
    switch (err->code) {
    case KVD_E_INVAL:
        return EXIT_USAGE;
    case KVD_E_CORRUPT:
    case KVD_E_UNSUPPORTED:
        return EXIT_MODEL;
    case KVD_E_NOMEM:
    case KVD_E_FULL:
        return EXIT_MEMORY;
    case KVD_E_CANCELED:
        return EXIT_INTERRUPTED;
    default:
        return EXIT_FAILED;
    }
}

int cli_usage(const char *fmt, ...)
{
    va_list ap;

    fprintf(stderr, "kvdrive: ");
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return EXIT_USAGE;
}

/* What to do about a file or directory of an option where the system's reason does not say it. */
static const char *hint_of(const char *option, int sys)
{
    static const char not_ours[] =
        "; name a directory that is this user's own, or that this user can make";
    static const struct {
        const char *option;
        int         sys;
        const char *text;
    } hint[] = {
        { "model", EISDIR, "; name the .gguf file in it, of a split set the first" },
        { "chat-template", ENOENT, "; it takes a file with a Jinja template" },
        { "cache-dir", ENOTDIR, "; a file is in its place, or in that of a directory above it" },
        { "cache-dir", EACCES, not_ours },
        { "cache-dir", EPERM, not_ours },
        { "cache-dir", EROFS, not_ours },
    };

    for (size_t i = 0; i < KVD_COUNTOF(hint); i++)
        if (sys == hint[i].sys && strcmp(option, hint[i].option) == 0)
            return hint[i].text;
    return "";
}

/* Length of the path that an error begins with, if it is this one or a directory above it; 0: it
 * begins with something else. */
static size_t path_in(const char *msg, const char *path)
{
    const size_t len = strlen(path), head = strcspn(msg, ":");

    if (len > 0 && strncmp(msg, path, len) == 0 &&
        (msg[len] == ':' || msg[len] == '/' || path[len - 1] == '/'))
        return len;
    if (head > 0 && head < len && strncmp(msg, path, head) == 0 &&
        (path[head] == '/' || path[head - 1] == '/'))
        return head;
    return 0;
}

kvd_status cli_of_option(kvd_status st, const kvd_opts *o, const char *option, kvd_err *err)
{
    const char  *path  = kvd_opts_text(o, option);
    const size_t named = st != KVD_OK && path ? path_in(err->msg, path) : 0;
    kvd_err      why;
    char         where[KVD_OPT_WHERE_BYTES];

    if (named == 0)
        return st;
    why = *err;
    kvd_opts_where(o, option, where);
    kvd_fail(err, st, 0, "%s %s%s%s%s", where, path[named] ? path : "", path[named] ? ": " : "",
             why.msg, hint_of(option, why.sys));
    err->sys = why.sys;
    return st;
}

const char *cli_input_file(const kvd_opts *o, const char *option)
{
    return o->n_rest == 1 ? o->rest[0] : kvd_opts_text(o, option);
}

int cli_choice(const char *list, const char *word)
{
    const size_t len = strlen(word);
    int          i   = 0;

    for (const char *s = list; s; s = strchr(s, '|') ? strchr(s, '|') + 1 : NULL, i++) {
        if (len > 0 && strncmp(s, word, len) == 0 && (s[len] == 0 || s[len] == '|'))
            return i;
    }
    return -1;
}

/* Of an option whose table has checked it; the public enums follow the same order. */
static int choice(const char *list, const char *word)
{
    const int i = cli_choice(list, word);

    kvd_assert(i >= 0);
    return i;
}

/* On the GPU, or where there is none, which is said, on the CPU. */
static kvd_status open_on_gpu(kvd_model **out, kvd_model_params *p, kvd_err *err)
{
    kvd_err    why = { 0 };
    kvd_status st;
    char       text[CLI_NAMES_BYTES];

    p->backend = "cuda";
    st         = kvd_model_open(out, p, &why);
    if (st != KVD_E_UNSUPPORTED || why.sys != ENODEV) {
        if (err && st != KVD_OK)
            *err = why;
        return st;
    }
    fprintf(stderr, "kvdrive: %s; going on with the CPU\n", cli_name_options(why.msg, text));
    p->backend       = "cpu";
    p->device_memory = 0;
    return kvd_model_open(out, p, err);
}

/* What limits a cache says nothing without one.  A configuration file or the environment may give
 * the limit for those commands that name a directory: it is no mistake there, but a server that was
 * to have a cache is told. */
static kvd_status check_cache(const kvd_opts *o, kvd_err *err)
{
    static const char *const limit[] = { "kv-disk", "kv-disk-free" };
    char                     where[KVD_OPT_WHERE_BYTES];

    for (size_t i = 0; i < KVD_COUNTOF(limit) && !kvd_opts_text(o, "cache-dir"); i++) {
        if (!kvd_opts_given(o, limit[i]))
            continue;
        kvd_opts_where(o, limit[i], where);
        if (kvd_opts_get(o, limit[i])->origin == KVD_OPT_ARGV)
            return kvd_fail(err, KVD_E_INVAL, 0,
                            "%s: there is no cache on disk without --cache-dir DIR: name its "
                            "directory, or leave %s out",
                            where, where);
        if (o->command == CMD_SERVE)
            kvd_log(KVD_LOG_WARN,
                    "%s has no effect: there is no cache on disk without --cache-dir DIR", where);
    }
    return KVD_OK;
}

/* --gpu-layers: *n is the number of layers, UINT32_MAX for all; 0: the CPU. */
static kvd_status gpu_layers(const kvd_opts *o, uint32_t *n, kvd_err *err)
{
    const char *text = kvd_opts_text(o, "gpu-layers");
    double      x    = -1.0;
    char        where[KVD_OPT_WHERE_BYTES];

    *n = UINT32_MAX;
    if (strcmp(text, "all") == 0 || strcmp(text, "auto") == 0 || strcmp(text, "-1") == 0 ||
        strcmp(text, "-2") == 0) /* llama.cpp's numbers for these */
        return KVD_OK;
    if (!kvd_parse_count(text, &x) || x < 0.0 || x > GPU_LAYERS_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0, "%s: '%s' is none of all, auto, or a number of layers",
                        kvd_opts_where(o, "gpu-layers", where), text);
    *n = (uint32_t)x;
    return KVD_OK;
}

/* Whoever asks for some layers is told that all are there. */
static void tell_unsplit(const kvd_model *m, uint32_t n)
{
    kvd_model_info info = { .struct_size = sizeof(info) };

    kvd_model_get_info(m, &info);
    if (n < info.n_layer && strncmp(info.backend, "cuda", 4) == 0)
        fprintf(stderr,
                "kvdrive: --gpu-layers %u of %u: models are not split yet, the whole model is on "
                "the GPU\n",
                n, info.n_layer);
}

kvd_status cli_model_open(kvd_model **out, const kvd_opts *o, kvd_err *err)
{
    const char      *isa      = kvd_opts_text(o, "cpu-isa");
    const char      *tmpl     = kvd_opts_text(o, "chat-template");
    const int64_t    threads  = kvd_opts_int(o, "threads");
    kvd_buf          tmpl_buf = { 0 };
    kvd_model_params p        = KVD_MODEL_PARAMS_INIT;
    uint32_t         n_gpu;
    kvd_status       st;

    KVD_TRY(gpu_layers(o, &n_gpu, err));
    p.path          = kvd_opts_text(o, "model");
    p.backend       = kvd_opts_text(o, "backend");
    p.cpu_isa       = strcmp(isa, "auto") == 0 ? NULL : isa;
    p.pre_tokenizer = kvd_opts_text(o, "pre-tokenizer");
    p.n_thread      = threads > 0 ? (uint32_t)threads : 0;
    p.precise       = kvd_opts_flag(o, "precise");
    p.deterministic = kvd_opts_flag(o, "deterministic");
    p.rope_scaling =
        (kvd_rope_scaling)choice("auto|none|linear|yarn", kvd_opts_text(o, "rope-scaling"));
    p.rope_factor   = (float)kvd_opts_num(o, "rope-scale");
    p.rope_orig_ctx = (uint32_t)kvd_opts_int(o, "yarn-orig-ctx");
    p.rope_base     = (float)kvd_opts_num(o, "rope-freq-base");
    p.device_memory = kvd_opts_size(o, "device-memory");
    p.weights       = (kvd_weights)choice("auto|map|copy", kvd_opts_text(o, "weights"));
    *out            = NULL;
    KVD_TRY(check_cache(o, err)); /* here, since reading a model takes time */
    if (o->command == CMD_BENCH && kvd_opts_text(o, "shape")) {
        p.shape         = kvd_opts_text(o, "shape");
        p.shape_weights = kvd_opts_text(o, "shape-type");
    }
    if (!p.path && !p.shape)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "no model given: -m FILE (scripts/get-model smollm2 fetches a small one)");
    st = tmpl ? cli_read_option(o, "chat-template", TEMPLATE_MAX_BYTES, &tmpl_buf, err) : KVD_OK;
    if (tmpl)
        p.chat_template = tmpl_buf.data;
    if (st == KVD_OK)
        st = n_gpu > 0 && !kvd_opts_given(o, "backend") ? open_on_gpu(out, &p, err)
                                                        : kvd_model_open(out, &p, err);
    if (st == KVD_OK && n_gpu > 0)
        tell_unsplit(*out, n_gpu);
    kvd_buf_free(&tmpl_buf);
    return cli_of_option(st, o, "model", err);
}

bool cli_parse_budget(const char *text, kvd_attention_params *a)
{
    char      *end;
    double     v       = strtod(text, &end);
    const bool percent = end != text && strcmp(end, "%") == 0;

    if (!percent && !kvd_parse_count(text, &v))
        return false;
    if (!(v >= 0.0 && v <= (percent ? 100.0 : 1e9)) || (percent && !(v > 0.0)))
        return false;
    a->budget       = percent ? 0 : (uint32_t)v;
    a->budget_share = percent ? (float)(v / 100.0) : 0.0f;
    return true;
}

/* "2", or "auto": 0. */
static bool parse_micro_batch(const char *text, uint32_t *rows)
{
    char                    *end;
    const unsigned long long n = strtoull(text, &end, 10);

    *rows = 0;
    if (strcmp(text, "auto") == 0)
        return true;
    *rows = n <= MICRO_BATCH_MAX ? (uint32_t)n : 0;
    return *text >= '0' && *text <= '9' && !*end && *rows > 0;
}

/* A choice that was given, else what the policy says. */
static int given_choice(const kvd_opts *o, const char *option, const char *words, int policy)
{
    return kvd_opts_given(o, option) ? choice(words, kvd_opts_text(o, option)) : policy;
}

/* Over the policy's fields. */
static kvd_status attention_params(kvd_attention_params *a, const kvd_opts *o, kvd_err *err)
{
    a->mode     = (kvd_attention)given_choice(o, "attention", KVD_ATTENTION_NAMES, (int)a->mode);
    a->fetch    = (kvd_fetch)given_choice(o, "fetch", KVD_FETCH_NAMES, (int)a->fetch);
    a->attend   = (kvd_attend)given_choice(o, "attend", KVD_ATTEND_NAMES, (int)a->attend);
    a->evict    = (kvd_evict)given_choice(o, "evict", KVD_EVICT_NAMES, (int)a->evict);
    a->schedule = (kvd_schedule)given_choice(o, "schedule", KVD_SCHEDULE_NAMES, (int)a->schedule);
    a->dense_below = (uint32_t)kvd_opts_int(o, "dense-below");
    a->cap         = (float)kvd_opts_num(o, "cap");
    a->top_p       = (float)kvd_opts_num(o, "select-top-p");
    if (kvd_opts_given(o, "min-mass"))
        a->min_mass =
            kvd_opts_num(o, "min-mass") > 0.0 ? (float)kvd_opts_num(o, "min-mass") : -1.0f;
    if (kvd_opts_given(o, "index") || !a->index)
        a->index = cli_index_name(o);
    a->zone       = (uint32_t)kvd_opts_int(o, "zone");
    a->group_rule = kvd_opts_text(o, "group-rule");
    if (!parse_micro_batch(kvd_opts_text(o, "micro-batch"), &a->micro_batch))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "--micro-batch %s: expected rows, 1 to %u, or \"auto\"",
                        kvd_opts_text(o, "micro-batch"), MICRO_BATCH_MAX);
    if (!cli_parse_budget(kvd_opts_text(o, "budget"), a))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "--budget %s: expected tokens, or percent such as 6.25%%",
                        kvd_opts_text(o, "budget"));
    return KVD_OK;
}

/* What a policy decides of a session: single options go over it. */
static void policy_params(kvd_session_params *p, const kvd_opts *o)
{
    p->kv_record =
        (kvd_kv_record)given_choice(o, "kv-record", KVD_KV_RECORD_NAMES, (int)p->kv_record);
    p->lookup = (kvd_lookup)given_choice(o, "lookup", KVD_LOOKUP_NAMES, (int)p->lookup);
    p->tiers  = (kvd_tiers)given_choice(o, "kv-tiers", KVD_TIERS_NAMES, (int)p->tiers);
    if (kvd_opts_given(o, "chunk"))
        p->chunk_tokens = (uint32_t)kvd_opts_int(o, "chunk");
    if (kvd_opts_given(o, "sink"))
        p->n_sink = kvd_opts_int(o, "sink") ? (uint32_t)kvd_opts_int(o, "sink") : UINT32_MAX;
    if (kvd_opts_given(o, "local"))
        p->n_local = (uint32_t)kvd_opts_int(o, "local");
}

kvd_status cli_session_params(kvd_session_params *p, kvd_attention_params *a, const kvd_opts *o,
                              kvd_err *err)
{
    const char   *k = kvd_opts_text(o, "cache-type-k"), *v = kvd_opts_text(o, "cache-type-v");
    const int64_t b = kvd_opts_int(o, "batch-size"), ub = kvd_opts_int(o, "ubatch-size");
    const bool    k_auto = strcmp(k, "auto") == 0, v_auto = strcmp(v, "auto") == 0;
    const char   *type = k_auto ? v : k;

    *p = (kvd_session_params)KVD_SESSION_PARAMS_INIT;
    *a = (kvd_attention_params)KVD_ATTENTION_PARAMS_INIT;
    KVD_TRY(
        cli_of_option(kvd_policy_apply(kvd_opts_text(o, "policy"), p, a, err), o, "policy", err));
    if (!k_auto && !v_auto && strcmp(k, v) != 0)
        return kvd_fail(err, KVD_E_INVAL, 0, "K and V of different types (-ctk %s -ctv %s)", k, v);
    p->kv_type     = strcmp(type, "f32") == 0    ? KVD_KV_F32
                     : strcmp(type, "bf16") == 0 ? KVD_KV_BF16
                                                 : KVD_KV_AUTO;
    p->n_ctx       = (uint32_t)kvd_opts_int(o, "ctx-size");
    p->n_batch     = (uint32_t)(ub == 0 || (b != 0 && b < ub) ? b : ub);
    p->kv_device   = kvd_opts_size(o, "kv-device");
    p->kv_host     = kvd_opts_size(o, "kv-host");
    p->attention   = a;
    p->trace_path  = kvd_opts_text(o, "trace");
    p->cache_dir   = kvd_opts_text(o, "cache-dir");
    p->cache_bytes = kvd_opts_size(o, "kv-disk");
    if (o->command != CMD_BENCH) {
        p->cache_min_free = kvd_opts_size(o, "kv-disk-free");
        p->disk_lag       = (uint32_t)kvd_opts_int(o, "disk-lag");
        p->resume         = (kvd_resume)choice(KVD_RESUME_NAMES, kvd_opts_text(o, "resume"));
    }
    policy_params(p, o);
    return attention_params(a, o, err);
}

/* "15043+1,2-100": appends to what is there. */
static kvd_status parse_bias(const char *text, kvd_buf *out, kvd_err *err)
{
    for (const char *s = text; *s;) {
        char          *end;
        const long     id = strtol(s, &end, 10);
        kvd_logit_bias b  = { .token = (int32_t)id };

        if (end == s || (*end != '+' && *end != '-') || id < 0 || id > INT32_MAX)
            return kvd_fail(err, KVD_E_INVAL, 0, "--logit-bias: expected ID+B or ID-B at '%.20s'",
                            s);
        s      = end;
        b.bias = strtof(s, &end);
        if (end == s || (*end && *end != ','))
            return kvd_fail(err, KVD_E_INVAL, 0, "--logit-bias: expected a number at '%.20s'", s);
        kvd_buf_put(out, &b, sizeof(b));
        s = *end ? end + 1 : end;
    }
    return out->oom ? kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the logit biases") : KVD_OK;
}

const char *cli_index_name(const kvd_opts *o)
{
    const bool values = strcmp(kvd_opts_text(o, "kv-record"), "values") == 0;

    return values && !kvd_opts_given(o, "index") ? "quant-k" : kvd_opts_text(o, "index");
}

static void take_dry(kvd_sampler_params *p, const kvd_opts *o)
{
    const kvd_opt_value *breaker = kvd_opts_get(o, "dry-sequence-breaker");

    p->dry_multiplier     = (float)kvd_opts_num(o, "dry-multiplier");
    p->dry_base           = (float)kvd_opts_num(o, "dry-base");
    p->dry_allowed_length = (int32_t)kvd_opts_int(o, "dry-allowed-length");
    p->dry_penalty_last_n = (int32_t)kvd_opts_int(o, "dry-penalty-last-n");
    if (breaker->n_list) {
        p->dry_breaker   = (const char *const *)breaker->list;
        p->n_dry_breaker = breaker->n_list;
        if (breaker->n_list == 1 && strcmp(breaker->list[0], "none") == 0)
            p->n_dry_breaker = 0;
    }
}

void cli_take_sampling(kvd_sampler_params *p, const kvd_opts *o)
{
    const float temp = (float)kvd_opts_num(o, "temp");

    *p                   = (kvd_sampler_params)KVD_SAMPLER_PARAMS_INIT;
    p->temperature       = temp > 0.0f ? temp : 0.0f;
    p->top_k             = (int32_t)kvd_opts_int(o, "top-k");
    p->top_p             = (float)kvd_opts_num(o, "top-p");
    p->min_p             = (float)kvd_opts_num(o, "min-p");
    p->typical_p         = (float)kvd_opts_num(o, "typical");
    p->top_n_sigma       = (float)kvd_opts_num(o, "top-nsigma");
    p->xtc_probability   = (float)kvd_opts_num(o, "xtc-probability");
    p->xtc_threshold     = (float)kvd_opts_num(o, "xtc-threshold");
    p->repeat_penalty    = (float)kvd_opts_num(o, "repeat-penalty");
    p->presence_penalty  = (float)kvd_opts_num(o, "presence-penalty");
    p->frequency_penalty = (float)kvd_opts_num(o, "frequency-penalty");
    p->penalty_last_n    = (int32_t)kvd_opts_int(o, "repeat-last-n");
    take_dry(p, o);
}

kvd_status cli_sampler_open(kvd_sampler **out, const kvd_model *m, const kvd_opts *o, kvd_err *err)
{
    kvd_sampler_params   p    = KVD_SAMPLER_PARAMS_INIT;
    kvd_buf              bias = { 0 };
    const kvd_opt_value *text = kvd_opts_get(o, "logit-bias");
    const int64_t        seed = kvd_opts_int(o, "seed");
    kvd_status           st   = KVD_OK;

    *out = NULL;
    cli_take_sampling(&p, o);
    p.seed = seed >= 0 ? (uint64_t)seed : kvd_now_ns();
    for (uint32_t i = 0; st == KVD_OK && i < text->n_list; i++)
        st = parse_bias(text->list[i], &bias, err);
    p.bias   = (const kvd_logit_bias *)(const void *)bias.data;
    p.n_bias = bias.len / sizeof(*p.bias);
    if (st == KVD_OK)
        st = kvd_sampler_open(out, m, &p, err);
    kvd_buf_free(&bias);
    return st;
}

kvd_status cli_read_file(const char *path, uint64_t max_bytes, kvd_buf *b, kvd_err *err)
{
    const bool is_stdin = strcmp(path, "-") == 0;
    FILE      *f        = is_stdin ? stdin : fopen(path, "rb");
    kvd_status st       = KVD_OK;
    char       block[16384];
    size_t     n;

    if (!f)
        return kvd_fail(err, KVD_E_IO, errno, "%s", path);
    errno = 0;
    while (st == KVD_OK && (n = fread(block, 1, sizeof(block), f)) > 0) {
        kvd_buf_put(b, block, n);
        if (b->oom)
            st = kvd_fail(err, KVD_E_NOMEM, 0, "%s: no memory for its text", path);
        else if (b->len > max_bytes)
            st = kvd_fail(err, KVD_E_INVAL, 0, "%s: more than %" PRIu64 " bytes", path, max_bytes);
    }
    if (st == KVD_OK && ferror(f))
        st = kvd_fail(err, KVD_E_IO, errno, "%s", path);
    kvd_buf_reserve(b, 0);
    if (!is_stdin)
        fclose(f);
    return st;
}

kvd_status cli_read_option(const kvd_opts *o, const char *option, uint64_t max_bytes, kvd_buf *b,
                           kvd_err *err)
{
    const kvd_status st = cli_read_file(kvd_opts_text(o, option), max_bytes, b, err);

    return cli_of_option(st, o, option, err);
}

kvd_status cli_read_input(const kvd_opts *o, const char *path, kvd_buf *b, kvd_err *err)
{
    const kvd_status st = cli_read_file(path, INPUT_MAX_BYTES, b, err);

    if (st == KVD_E_IO && err->sys == ENOENT && o->n_rest == 1) /* "run -m FILE hello" */
        return kvd_fail(err, st, ENOENT, "%s (if it is no file but the text: -p TEXT)", path);
    return st;
}

kvd_status cli_read_ids(const char *path, cli_tokens *out, kvd_err *err)
{
    kvd_buf     b  = { 0 };
    kvd_status  st = cli_read_file(path, IDS_MAX_BYTES, &b, err);
    const char *s  = b.data;

    out->data = st == KVD_OK ? kvd_calloc(b.len / 2 + 1, sizeof(*out->data)) : NULL;
    if (st == KVD_OK && !out->data)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "%s: no memory for its tokens", path);
    while (st == KVD_OK && s[strspn(s, " \t\r\n")]) {
        char      *end;
        const long id = strtol(s, &end, 10);

        if (end == s || id < 0 || id > INT32_MAX)
            st = kvd_fail(err, KVD_E_INVAL, 0, "%s: expected token ids, found '%.20s'", path, s);
        else
            out->data[out->n++] = (int32_t)id;
        s = end;
    }
    if (st == KVD_OK && out->n == 0)
        st = kvd_fail(err, KVD_E_INVAL, 0, "%s: no token ids in it", path);
    kvd_buf_free(&b);
    return st;
}

kvd_status cli_tokenize_text(const kvd_model *m, const char *text, size_t len,
                             const kvd_span *spans, size_t n_span, bool add_bos, cli_tokens *out,
                             kvd_err *err)
{
    /* A token takes at least a byte, but for what a normaliser or a BOS may add. */
    size_t     cap = len + 16, n = 0;
    kvd_status st;

    out->data = kvd_calloc(cap, sizeof(*out->data));
    if (!out->data)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the tokens of %zu bytes", len);
    st = kvd_tokenize(m, text, len, spans, n_span, add_bos, out->data, cap, &n, err);
    if (st == KVD_E_FULL) {
        kvd_free(out->data);
        out->data = kvd_calloc(n, sizeof(*out->data));
        if (!out->data)
            return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %zu tokens", n);
        st = kvd_tokenize(m, text, len, spans, n_span, add_bos, out->data, n, &n, err);
    }
    out->n = n;
    return st;
}

kvd_status cli_tokenize_chat(const kvd_model *m, const char *messages_json, const char *vars_json,
                             cli_tokens *out, kvd_err *err)
{
    kvd_chat_request r     = KVD_CHAT_REQUEST_INIT;
    char            *text  = NULL;
    kvd_span        *spans = NULL;
    size_t           len = 0, n = 0;
    kvd_status       st;

    r.messages_json = messages_json;
    r.vars_json     = vars_json;
    KVD_TRY(kvd_chat_render(m, &r, &text, &len, &spans, &n, err));
    st = cli_tokenize_text(m, text, len, spans, n, true, out, err);
    kvd_free(text);
    kvd_free(spans);
    return st;
}

const char *cli_grouped(uint64_t n, char out[32])
{
    char   digits[32];
    int    len = snprintf(digits, sizeof(digits), "%" PRIu64, n);
    size_t at  = 0;

    for (int i = 0; i < len; i++) {
        if (i > 0 && (len - i) % 3 == 0)
            out[at++] = ',';
        out[at++] = digits[i];
    }
    out[at] = 0;
    return out;
}

double cli_mib(uint64_t bytes)
{
    return (double)bytes / (1024.0 * 1024.0);
}
