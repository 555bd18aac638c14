/* SPDX-License-Identifier: Apache-2.0 */
/* cli_inspect.c - kvdrive inspect, plan and doctor: what there is and what would fit. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* A metadata value on one line, cut to what a terminal shows. */
static void print_value(const json_t *v)
{
    char *s = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(9));

    if (s)
        printf("%.100s%s", s, strlen(s) > 100 ? "..." : "");
    free(s);
}

/* A name out of the file, indented and padded; control characters are not for the terminal. */
static void print_name(const char *s, int width)
{
    const int n = (int)strlen(s);

    fputs("  ", stdout);
    for (; *s; s++)
        putchar((unsigned char)*s < ' ' || *s == 127 ? '?' : *s);
    printf("%*s ", n < width ? width - n : 0, "");
}

static void print_metadata(const json_t *root)
{
    const json_t *meta = json_object_get(root, "metadata");
    const char   *key;
    json_t       *value;

    printf("metadata (%zu)\n", json_object_size(meta));
    json_object_foreach((json_t *)meta, key, value)
    {
        print_name(key, 44);
        print_value(value);
        putchar('\n');
    }
}

static void print_tensors(const json_t *root)
{
    const json_t *list = json_object_get(root, "tensors");
    size_t        i, k;
    json_t       *t, *d;

    printf("tensors (%zu)\n", json_array_size(list));
    json_array_foreach((json_t *)list, i, t)
    {
        print_name(json_string_value(json_object_get(t, "name")), 28);
        printf("%-6s [", json_string_value(json_object_get(t, "type")));
        json_array_foreach(json_object_get(t, "shape"), k, d)
            printf("%s%" JSON_INTEGER_FORMAT, k ? ", " : "", json_integer_value(d));
        printf("]\n");
    }
}

/* Geometry and what fits, for models this build can open; says why when it cannot. */
static json_t *geometry(const char *path, kvd_err *err)
{
    kvd_model_params   p    = KVD_MODEL_PARAMS_INIT;
    kvd_session_params sp   = KVD_SESSION_PARAMS_INIT;
    kvd_model_info     i    = { .struct_size = sizeof(i) };
    kvd_plan           plan = { .struct_size = sizeof(plan) };
    kvd_model         *m    = NULL;
    json_t            *g    = NULL;

    p.path = path;
    if (kvd_model_open(&m, &p, err) == KVD_OK && kvd_session_plan(m, &sp, &plan, err) == KVD_OK) {
        kvd_model_get_info(m, &i);
        g = json_pack(
            "{s:s, s:s, s:I, s:I, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:i}",
            "arch", i.arch, "file_type", i.file_type, "n_param", (json_int_t)i.n_param,
            "weight_bytes", (json_int_t)i.weight_bytes, "n_layer", i.n_layer, "n_embd", i.n_embd,
            "n_head", i.n_head, "n_kv_head", i.n_kv_head, "head_dim", i.head_dim, "n_ff", i.n_ff,
            "n_vocab", i.n_vocab, "n_ctx_train", i.n_ctx_train, "kv_bytes_per_token",
            (json_int_t)i.kv_bytes_per_token, "kv_bytes_full_context", (json_int_t)plan.kv_bytes,
            "available_bytes", (json_int_t)plan.available_bytes, "n_ctx_fits", plan.n_ctx_fits);
    }
    kvd_model_close(m);
    return g;
}

static void print_geometry(const json_t *g, const char *why)
{
    const char *key;
    json_t     *value;

    if (!g) {
        printf("this build cannot run it: %s\n", why);
        return;
    }
    printf("geometry\n");
    json_object_foreach((json_t *)g, key, value)
    {
        printf("  %-44s ", key);
        print_value(value);
        putchar('\n');
    }
}

int cli_inspect(const kvd_opts *o)
{
    const char  *path = cli_input_file(o, "model");
    kvd_err      err = { 0 }, why = { 0 };
    char        *text = NULL;
    json_t      *root, *g;
    json_error_t je;

    if (!path)
        return cli_usage("inspect: give one model file");
    if (kvd_inspect(path, &text, &err) != KVD_OK)
        return cli_fail(&err);
    root = json_loads(text, JSON_ALLOW_NUL, &je);
    kvd_free(text);
    if (!root) {
        fprintf(stderr, "kvdrive: %s: description cannot be read back: %s\n", path, je.text);
        return EXIT_FAILED;
    }
    g = geometry(path, &why);
    if (kvd_opts_flag(o, "json")) {
        json_object_set_new(root, "geometry", g ? json_incref(g) : json_null());
        if (!g)
            json_object_set_new(root, "refused", json_string(why.msg));
        json_dumpf(root, stdout, JSON_INDENT(1));
        putchar('\n');
    } else {
        print_metadata(root);
        print_tensors(root);
        print_geometry(g, why.msg);
    }
    json_decref(g);
    json_decref(root);
    return EXIT_OK;
}

static void plan_row(const char *what, uint64_t bytes, const char *note)
{
    char n[32];

    printf("%-16s %20s bytes %10.1f MiB  %s\n", what, cli_grouped(bytes, n), cli_mib(bytes), note);
}

/* The KV cache by tier and use; tiers and parts that are not there are left out. */
static void plan_tiers(const kvd_plan *p, bool cached)
{
    const struct {
        const char *name;
        uint64_t    bytes;
        const char *note;
    } part[] = {
        { "  raw", p->kv_raw_bytes, p->kv_resident ? "all K and V" : "K and V not sealed yet" },
        { "  windows", p->kv_window_bytes, "recently critical records, first tokens" },
        { "  stage", p->kv_stage_bytes, "a layer brought up for exact attention" },
        { "  index", p->kv_index_bytes - p->kv_zone_bytes, "what selection scans" },
        { "  cells", p->kv_zone_bytes, "means that stand for what is not attended" },
        { "  maps", p->kv_map_bytes, "where chunks lie, scores, lists of a step" },
    };

    plan_row("KV device tier", p->kv_device_bytes,
             p->kv_resident ? "everything fits: a lower tier adds nothing" : "");
    for (size_t i = 0; i < sizeof(part) / sizeof(part[0]); i++) {
        if (part[i].bytes)
            plan_row(part[i].name, part[i].bytes, part[i].note);
    }
    if (!p->kv_resident)
        plan_row("KV host tier", p->kv_host_bytes,
                 p->kv_spills ? "records; the rest lies in --cache-dir"
                 : cached     ? "all records: the disk adds only their reuse later"
                              : "all records");
}

static void plan_shares_row(const plan_shares *s)
{
    if (s->by_stalls)
        printf(
            "  %-14s %u to %u records for a layer and KV head, by the plan's profile: %.2f ms of "
            "disk reads a step, %.2f ms if all had the same\n",
            "shared", s->least, s->most, s->shared_ns / 1e6, s->equal_ns / 1e6);
    else
        printf("  %-14s %u records for each layer and KV head: the plan's profile sees no better\n",
               "shared", s->least);
}

static void plan_shares_json(const plan_shares *s)
{
    printf(",\"host_shares\":{\"by_stalls\":%s,\"least_records\":%u,\"most_records\":%u,"
           "\"read_ns\":%.0f,\"equal_read_ns\":%.0f,\"urgent_reads\":%.4f,\"late_reads\":%.4f,"
           "\"equal_urgent_reads\":%.4f,\"equal_late_reads\":%.4f}",
           s->by_stalls ? "true" : "false", s->least, s->most, s->shared_ns, s->equal_ns,
           s->shared_urgent, s->shared_late, s->equal_urgent, s->equal_late);
}

/* Of the machine's memory. */
static uint64_t needed(const kvd_plan *p)
{
    return p->device_bytes ? p->pinned_bytes + p->host_bytes : p->total_bytes;
}

static void plan_device(const kvd_plan *p)
{
    if (p->device_bytes == 0)
        return;
    plan_row("device, context", p->device_context_bytes, "the driver's, and kernels' code");
    plan_row("device, in all", p->device_bytes, "weights, KV device tier, scratch, context");
    plan_row("device, limit", p->device_limit_bytes, "--device-memory, or what it has");
    plan_row("pinned", p->pinned_bytes, "host memory that the device reads: KV host tier, lists");
}

/* ASCII without quotes, in lines. */
static void plan_steps_json(const char *text)
{
    printf(",\"steps\":[\"");
    for (; *text; text++) {
        if (*text == '\n' && text[1])
            printf("\",\"");
        else if (*text != '\n')
            putchar(*text);
    }
    printf("\"]");
}

/* steps: the step program, or NULL. */
static void plan_json(const kvd_plan *p, const cli_plan_use *use, const char *steps)
{
    printf("{\"n_ctx\":%u,\"n_seq\":%u,\"n_batch\":%u,\"weight_bytes\":%" PRIu64
           ",\"kv_bytes\":%" PRIu64 ",\"scratch_bytes\":%" PRIu64 ",\"host_bytes\":%" PRIu64
           ",\"total_bytes\":%" PRIu64 ",\"kv_bytes_per_token\":%" PRIu64
           ",\"available_bytes\":%" PRIu64 ",\"n_ctx_fits\":%u",
           p->n_ctx, p->n_seq, p->n_batch, p->weight_bytes, p->kv_bytes, p->scratch_bytes,
           p->host_bytes, p->total_bytes, p->kv_bytes_per_token, p->available_bytes, p->n_ctx_fits);
    printf(",\"kv_resident\":%s,\"window_tokens\":%u,\"kv_device_bytes\":%" PRIu64
           ",\"kv_host_bytes\":%" PRIu64 ",\"kv_raw_bytes\":%" PRIu64
           ",\"kv_window_bytes\":%" PRIu64 ",\"kv_stage_bytes\":%" PRIu64
           ",\"kv_index_bytes\":%" PRIu64 ",\"kv_zone_bytes\":%" PRIu64
           ",\"kv_map_bytes\":%" PRIu64,
           p->kv_resident ? "true" : "false", p->window_tokens, p->kv_device_bytes,
           p->kv_host_bytes, p->kv_raw_bytes, p->kv_window_bytes, p->kv_stage_bytes,
           p->kv_index_bytes, p->kv_zone_bytes, p->kv_map_bytes);
    printf(",\"device_bytes\":%" PRIu64 ",\"device_context_bytes\":%" PRIu64
           ",\"device_limit_bytes\":%" PRIu64 ",\"pinned_bytes\":%" PRIu64,
           p->device_bytes, p->device_context_bytes, p->device_limit_bytes, p->pinned_bytes);
    if (use->has_shares)
        plan_shares_json(&use->shares);
    if (steps)
        plan_steps_json(steps);
    printf("}\n");
}

/* What is planned: one sequence, or those of a server. */
static void plan_head(const kvd_plan *p, const kvd_session_params *sp)
{
    const uint64_t all = sp->kv_tokens ? sp->kv_tokens : (uint64_t)p->n_ctx * p->n_seq;
    char           n[32];

    printf("context %s tokens", cli_grouped(p->n_ctx, n));
    if (sp->n_seq)
        printf(" for each of %u sequences, %s together", p->n_seq, cli_grouped(all, n));
    printf(", batches of %u\n\n", p->n_batch);
}

static void plan_verdict(const kvd_plan *p, bool serves, uint32_t n_ctx_train)
{
    const bool fits = needed(p) <= p->available_bytes;
    char       n[32];

    if (serves)
        printf("\nThis %s\n", fits
                                  ? "fits."
                                  : "does not fit: fewer sequences (--parallel), a shorter context "
                                    "(-c), or fewer tokens together (--kv-tokens) take less.");
    else if (!fits && p->n_ctx_fits)
        printf("\nThis does not fit: a context of %u tokens would (-c %u).\n", p->n_ctx_fits,
               p->n_ctx_fits);
    else if (!fits)
        printf("\nThis does not fit, whatever the context.\n");
    else
        printf("\nThis fits; the longest context is %s tokens (the limit is %s).\n",
               cli_grouped(p->n_ctx_fits, n),
               p->n_ctx_fits < n_ctx_train ? "memory" : "the model's");
}

static void plan_text(const kvd_plan *p, const kvd_session_params *sp, const cli_plan_use *use)
{
    plan_head(p, sp);
    plan_row("weights", p->weight_bytes,
             p->device_bytes ? "on the device" : "the model file, mapped or copied (--weights)");
    plan_tiers(p, sp->cache_dir != NULL);
    if (use->has_shares)
        plan_shares_row(&use->shares);
    plan_row("scratch", p->scratch_bytes, "activations, logits, kernel buffers");
    plan_row("tables", p->host_bytes, "tokenizer, metadata");
    plan_row("in all", p->total_bytes, "");
    plan_device(p);
    plan_row("available", p->available_bytes, "on this machine now");
}

int cli_plan(const kvd_opts *o)
{
    const bool           serves = kvd_opts_given(o, "parallel") || kvd_opts_given(o, "kv-tokens");
    kvd_plan             p      = { .struct_size = sizeof(p) };
    kvd_model_info       i      = { .struct_size = sizeof(i) };
    kvd_model           *m      = NULL;
    kvd_err              err    = { 0 };
    cli_plan_use         use    = { 0 };
    char                *steps  = NULL;
    kvd_session_params   sp;
    kvd_attention_params sa;
    kvd_status           st = cli_model_open(&m, o, &err);

    if (st == KVD_OK)
        st = (serves ? cli_serve_params : cli_session_params)(&sp, &sa, o, &err);
    if (st == KVD_OK)
        st = cli_plan_apply(&use, &sa, &sp, m, o, &err);
    if (st == KVD_OK)
        st = kvd_session_plan(m, &sp, &p, &err);
    if (st == KVD_OK && kvd_opts_flag(o, "steps"))
        st = kvd_session_steps(m, &sp, p.n_seq, &steps, &err);
    if (st == KVD_OK)
        kvd_model_get_info(m, &i);
    cli_plan_release(&use); /* but for the numbers of its shares */
    kvd_model_close(m);
    if (st != KVD_OK)
        return cli_fail(&err);
    if (kvd_opts_flag(o, "json")) {
        plan_json(&p, &use, steps);
    } else {
        plan_text(&p, &sp, &use);
        plan_verdict(&p, serves, i.n_ctx_train);
        if (steps)
            printf("\nA decode step's sparse attention, layer by layer:\n%s", steps);
    }
    kvd_free(steps);
    return needed(&p) > p.available_bytes ? EXIT_MEMORY : EXIT_OK;
}

int cli_doctor(const kvd_opts *o)
{
    kvd_err      err  = { 0 };
    char        *text = NULL;
    json_t      *root, *part, *value;
    const char  *name, *key;
    json_error_t je;

    if (kvd_doctor(&text, &err) != KVD_OK)
        return cli_fail(&err);
    if (kvd_opts_flag(o, "json")) {
        puts(text);
        kvd_free(text);
        return EXIT_OK;
    }
    root = json_loads(text, 0, &je);
    kvd_free(text);
    json_object_foreach(root, name, part)
    {
        printf("%s\n", name);
        if (!json_is_object(part)) {
            printf("  ");
            print_value(part);
            putchar('\n');
        }
        json_object_foreach(part, key, value)
        {
            printf("  %-20s ", key);
            print_value(value);
            putchar('\n');
        }
    }
    json_decref(root);
    return EXIT_OK;
}
