/* SPDX-License-Identifier: Apache-2.0 */
/* cli_stats.c - what a session did and holds: for people (--stats) and as JSON. */
#include <inttypes.h>

#include "cli.h"

#define PUT(o, st, x) json_object_set_new(o, #x, json_integer((json_int_t)(st)->x))
#define PLANNED(x)    #x, (json_int_t)p->x

static double rate(uint64_t n, uint64_t ns)
{
    return ns ? (double)n * 1e9 / (double)ns : 0.0;
}

static double share(uint64_t part, uint64_t whole)
{
    return whole ? 100.0 * (double)part / (double)whole : 0.0;
}

/* Sums over the KV heads of a layer; false: there is no such layer. */
static bool layer_counts(const kvd_session *s, uint32_t layer, uint64_t *n_selected,
                         uint64_t *n_hit)
{
    uint64_t n, hit;
    uint32_t h = 0;

    *n_selected = *n_hit = 0;
    for (; kvd_session_get_lane(s, layer, h, &n, &hit); h++) {
        *n_selected += n;
        *n_hit += hit;
    }
    return h > 0;
}

static void print_layers(const kvd_session *s, FILE *f)
{
    uint64_t n, hit;

    fprintf(f, "%-22s ", "hits per layer, %");
    for (uint32_t l = 0; layer_counts(s, l, &n, &hit); l++)
        fprintf(f, "%s%.1f", l ? ", " : "", share(hit, n));
    fputc('\n', f);
}

static void print_stored(const kvd_stats *st, FILE *f)
{
    char a[32];

    if (st->disk_put_bytes + st->disk_aux_bytes + st->n_disk_refused == 0)
        return;
    fprintf(f, "%-22s %14.1f MiB of records, %.1f index, %.1f tails; %s units refused\n",
            "stored on disk", cli_mib(st->disk_put_bytes),
            cli_mib(st->disk_aux_bytes - st->disk_tail_bytes), cli_mib(st->disk_tail_bytes),
            cli_grouped(st->n_disk_refused, a));
}

/* What sparse steps did, if there were any. */
static void print_sparse(const kvd_session *s, const kvd_stats *st, FILE *f)
{
    char a[32], b[32];

    if (st->n_sparse == 0)
        return;
    fprintf(f, "%-22s %14s of %s tokens, estimated mass %.3f\n", "attended sparsely",
            cli_grouped(st->n_sparse, a), cli_grouped(st->n_decode, b), st->mass);
    if (st->zone_ns > 0)
        fprintf(f, "%-22s %14.1f %% of attention's weight, %.2f ms of attend, per step\n",
                "estimated by cells", 100.0 * st->zone_share,
                (double)st->zone_ns * 1e-6 / (double)st->n_sparse);
    fprintf(f, "%-22s %14s chunks, %.1f %% of them hits, %.1f %% waited for\n", "selected",
            cli_grouped(st->n_selected, a), share(st->n_hit, st->n_selected),
            share(st->n_urgent, st->n_selected));
    fprintf(f, "%-22s %14s chunks, and %s by first steps; %s evicted\n", "fetched",
            cli_grouped(st->n_miss, a), cli_grouped(st->n_refilled, b),
            cli_grouped(st->n_evicted, (char[32]){ 0 }));
    fprintf(f, "%-22s %14s blocks, %s of them generated\n", "sealed",
            cli_grouped(st->n_sealed_blocks, a), cli_grouped(st->n_grown_blocks, b));
    fprintf(f, "%-22s %14.1f MiB up, %.1f down, %.1f up for exact attention\n", "records moved",
            cli_mib(st->bytes_up), cli_mib(st->bytes_down), cli_mib(st->bytes_dense));
    if (st->n_disk_read > 0)
        fprintf(f, "%-22s %14s records, %.1f MiB in %s reads, %.1f %% useful; %s stalls, %.2f ms\n",
                "read from disk", cli_grouped(st->n_disk, a), cli_mib(st->disk_read_bytes),
                cli_grouped(st->n_disk_read, b), share(st->disk_useful_bytes, st->disk_read_bytes),
                cli_grouped(st->n_disk_stall, (char[32]){ 0 }), (double)st->disk_wait_ns * 1e-6);
    fprintf(f, "%-22s %14.2f ms select, %.2f fetch, %.2f attend, per step\n", "stages",
            (double)st->select_ns * 1e-6 / (double)st->n_sparse,
            (double)st->fetch_ns * 1e-6 / (double)st->n_sparse,
            (double)st->attend_ns * 1e-6 / (double)st->n_sparse);
    print_layers(s, f);
}

void cli_print_device(const kvd_session *s, const kvd_plan *plan, FILE *f)
{
    kvd_stats counts = { .struct_size = sizeof(counts) }, *st = &counts;

    if (plan->device_bytes == 0)
        return;
    kvd_session_get_stats(s, st);
    fprintf(f, "%-22s %14.1f  (%.1f now, %.1f of it asked for; limit %.1f)\n", "device, planned",
            cli_mib(plan->device_bytes), cli_mib(st->device_used_bytes),
            cli_mib(st->device_held_bytes), cli_mib(plan->device_limit_bytes));
    fprintf(f, "%-22s %14.1f  (%.1f now)\n", "pinned, planned", cli_mib(plan->pinned_bytes),
            cli_mib(st->pinned_bytes));
}

void cli_print_stats(const kvd_session *s, const kvd_plan *plan, double load_seconds, FILE *f)
{
    kvd_stats st = { .struct_size = sizeof(st) };
    char      n[32], c[32];

    kvd_session_get_stats(s, &st);
    fprintf(f, "\n%-22s %14s %12s %12s\n", "", "tokens", "seconds", "tokens/s");
    if (load_seconds > 0.0)
        fprintf(f, "%-22s %14s %12.2f %12s\n", "load", "", load_seconds, "");
    fprintf(f, "%-22s %14s %12.2f %12.1f\n", "prefill", cli_grouped(st.n_prefill, n),
            (double)st.prefill_ns * 1e-9, rate(st.n_prefill, st.prefill_ns));
    if (st.n_cached > 0)
        fprintf(f, "%-22s %14s %12.2f %12.1f\n", "from the prefix cache",
                cli_grouped(st.n_cached, n), (double)st.cached_ns * 1e-9,
                rate(st.n_cached, st.cached_ns));
    fprintf(f, "%-22s %14s %12.2f %12.1f\n", "decode", cli_grouped(st.n_decode, n),
            (double)st.decode_ns * 1e-9, rate(st.n_decode, st.decode_ns));
    fprintf(f, "%-22s %14s of %s tokens\n", "KV cache in use", cli_grouped(st.kv_used_tokens, n),
            cli_grouped(st.kv_capacity_tokens, c));
    print_sparse(s, &st, f);
    print_stored(&st, f);
    fprintf(f, "\n%-22s %14s\n", "memory", "MiB");
    fprintf(f, "%-22s %14.1f  (%s)\n", "weights", cli_mib(plan->weight_bytes),
            plan->device_bytes ? "on the device" : "the model file, mapped or copied");
    fprintf(f, "%-22s %14.1f\n", "KV cache, device", cli_mib(plan->kv_device_bytes));
    if (plan->kv_index_bytes)
        fprintf(f, "%-22s %14.1f\n", "  of it index", cli_mib(plan->kv_index_bytes));
    if (plan->kv_zone_bytes)
        fprintf(f, "%-22s %14.1f\n", "    of it cells", cli_mib(plan->kv_zone_bytes));
    if (plan->kv_host_bytes)
        fprintf(f, "%-22s %14.1f\n", "KV cache, host", cli_mib(plan->kv_host_bytes));
    fprintf(f, "%-22s %14.1f\n", "scratch", cli_mib(plan->scratch_bytes));
    fprintf(f, "%-22s %14.1f\n", "tables", cli_mib(plan->host_bytes));
    fprintf(f, "%-22s %14.1f\n", "planned in all", cli_mib(plan->total_bytes));
    cli_print_device(s, plan, f);
    fprintf(f, "%-22s %14.1f  (%.1f without mapped files)\n", "resident now",
            cli_mib(cli_rss_bytes(false)), cli_mib(cli_rss_bytes(true)));
}

/* ---- JSON --------------------------------------------------------------------------- */

static double ratio(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : 0.0;
}

/* Sizes of micro-batches that were tried, and their median steps. */
static void put_trials(json_t *o, const kvd_stats *st)
{
    json_t *rows = json_array(), *ms = json_array();

    for (uint32_t i = 0; i < st->n_micro; i++) {
        json_array_append_new(rows, json_integer(st->micro_rows[i]));
        json_array_append_new(ms, json_real(st->micro_ms[i]));
    }
    json_object_set_new(o, "micro_rows", rows);
    json_object_set_new(o, "micro_ms", ms);
}

static json_t *counts_json(const kvd_stats *st)
{
    json_t *o = json_object();

    PUT(o, st, n_prefill);
    PUT(o, st, n_decode);
    PUT(o, st, prefill_ns);
    PUT(o, st, decode_ns);
    PUT(o, st, kv_used_tokens);
    PUT(o, st, kv_capacity_tokens);
    PUT(o, st, n_cached);
    PUT(o, st, cached_ns);
    PUT(o, st, n_slow_prefix);
    PUT(o, st, n_sparse);
    PUT(o, st, n_selected);
    PUT(o, st, n_hit);
    PUT(o, st, n_miss);
    PUT(o, st, n_urgent);
    PUT(o, st, n_evicted);
    PUT(o, st, n_refilled);
    PUT(o, st, n_fallback);
    PUT(o, st, n_sealed_blocks);
    PUT(o, st, n_grown_blocks);
    PUT(o, st, bytes_up);
    PUT(o, st, bytes_down);
    PUT(o, st, bytes_dense);
    PUT(o, st, select_ns);
    PUT(o, st, fetch_ns);
    PUT(o, st, attend_ns);
    PUT(o, st, seal_ns);
    PUT(o, st, zone_ns);
    PUT(o, st, qkv_ns);
    PUT(o, st, dense_ns);
    PUT(o, st, ffn_ns);
    PUT(o, st, logits_ns);
    PUT(o, st, micro_batch);
    PUT(o, st, n_micro);
    put_trials(o, st);
    PUT(o, st, n_disk);
    PUT(o, st, n_disk_urgent);
    PUT(o, st, n_disk_stall);
    PUT(o, st, n_disk_late);
    PUT(o, st, disk_wait_ns);
    PUT(o, st, n_disk_read);
    PUT(o, st, disk_read_bytes);
    PUT(o, st, disk_useful_bytes);
    PUT(o, st, disk_put_bytes);
    PUT(o, st, disk_aux_bytes);
    PUT(o, st, disk_tail_bytes);
    PUT(o, st, n_disk_refused);
    PUT(o, st, device_used_bytes);
    PUT(o, st, device_held_bytes);
    PUT(o, st, pinned_bytes);
    PUT(o, st, n_disk_failed);
    PUT(o, st, n_disk_timeout);
    PUT(o, st, n_disk_corrupt);
    PUT(o, st, n_disk_again);
    PUT(o, st, up_ns);
    PUT(o, st, up_dense_ns);
    PUT(o, st, down_ns);
    PUT(o, st, disk_read_ns);
    PUT(o, st, disk_put_ns);
    PUT(o, st, disk_put_wait_ns);
    PUT(o, st, kv_device_used_bytes);
    PUT(o, st, kv_host_used_bytes);
    PUT(o, st, kv_disk_used_bytes);
    PUT(o, st, kv_disk_limit_bytes);
    json_object_set_new(o, "mass", json_real(st->mass));
    json_object_set_new(o, "zone_share", json_real(st->zone_share));
    json_object_set_new(o, "hit_rate", json_real(ratio(st->n_hit, st->n_selected)));
    return o;
}

/* Per layer: selected and hit chunks, their ratio, and the same ratio for each KV head. */
static json_t *layers_json(const kvd_session *s)
{
    json_t  *list = json_array();
    uint64_t n, hit, n_lane, n_lane_hit;

    for (uint32_t l = 0; layer_counts(s, l, &n, &hit); l++) {
        json_t *heads = json_array();

        for (uint32_t h = 0; kvd_session_get_lane(s, l, h, &n_lane, &n_lane_hit); h++)
            json_array_append_new(heads, json_real(ratio(n_lane_hit, n_lane)));
        json_array_append_new(list, json_pack("{s:I, s:I, s:f, s:o}", "n_selected", (json_int_t)n,
                                              "n_hit", (json_int_t)hit, "hit_rate", ratio(hit, n),
                                              "heads", heads));
    }
    return list;
}

static json_t *memory_json(const kvd_plan *p)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, "
                     "s:I, s:I, s:I, s:b, s:b}",
                     PLANNED(weight_bytes), PLANNED(kv_bytes), PLANNED(scratch_bytes),
                     PLANNED(host_bytes), PLANNED(total_bytes), PLANNED(kv_device_bytes),
                     PLANNED(kv_host_bytes), PLANNED(kv_raw_bytes), PLANNED(kv_window_bytes),
                     PLANNED(kv_stage_bytes), PLANNED(kv_index_bytes), PLANNED(kv_map_bytes),
                     PLANNED(kv_zone_bytes), PLANNED(window_tokens), PLANNED(device_bytes),
                     PLANNED(device_context_bytes), PLANNED(device_limit_bytes),
                     PLANNED(pinned_bytes), "kv_spills", p->kv_spills, "kv_resident",
                     p->kv_resident);
}

json_t *cli_stats_json(const kvd_session *s, const kvd_plan *plan)
{
    kvd_stats st = { .struct_size = sizeof(st) };

    kvd_session_get_stats(s, &st);
    return json_pack("{s:o, s:o, s:o}", "counts", counts_json(&st), "layers", layers_json(s),
                     "memory", memory_json(plan));
}
