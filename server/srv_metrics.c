/* SPDX-License-Identifier: Apache-2.0 */
/* srv_metrics.c - what is counted, in the text format of Prometheus (0.0.4).
 *
 * Every number is one that the engine thread or the session counts; docs/server.md says what each
 * means, and what is not counted. */
#include "srv_routes.h"

#include <inttypes.h>

#define NS_PER_S 1000000000u

/* ---- the format ------------------------------------------------------------------------- */

static void head(kvd_buf *b, const char *name, const char *type, const char *help)
{
    kvd_buf_printf(b, "# HELP kvdrive_%s %s\n# TYPE kvdrive_%s %s\n", name, help, name, type);
}

static void put_label(kvd_buf *b, const char *name, const char *value)
{
    kvd_buf_printf(b, "%s=\"", name);
    for (; *value; value++) {
        if (*value == '\n')
            kvd_buf_puts(b, "\\n");
        else if (*value == '"' || *value == '\\')
            kvd_buf_printf(b, "\\%c", *value);
        else
            kvd_buf_putc(b, *value);
    }
    kvd_buf_putc(b, '"');
}

static void put(kvd_buf *b, const char *name, const char *labels, uint64_t n)
{
    kvd_buf_printf(b, "kvdrive_%s%s %" PRIu64 "\n", name, labels, n);
}

static void put_ns(kvd_buf *b, const char *name, const char *labels, uint64_t ns)
{
    kvd_buf_printf(b, "kvdrive_%s%s %" PRIu64 ".%09" PRIu64 "\n", name, labels, ns / NS_PER_S,
                   ns % NS_PER_S);
}

static void counter(kvd_buf *b, const char *name, const char *help, uint64_t n)
{
    head(b, name, "counter", help);
    put(b, name, "", n);
}

static void gauge(kvd_buf *b, const char *name, const char *help, uint64_t n)
{
    head(b, name, "gauge", help);
    put(b, name, "", n);
}

static void histogram(kvd_buf *b, const char *name, const char *help, const srv_hist *h)
{
    uint64_t n = 0;

    head(b, name, "histogram", help);
    for (uint32_t i = 0; i < SRV_HIST_BOUNDS; i++) {
        n += h->n[i];
        kvd_buf_printf(b, "kvdrive_%s_bucket{le=\"%g\"} %" PRIu64 "\n", name,
                       (double)srv_hist_bound_us[i] / 1e6, n);
    }
    n += h->n[SRV_HIST_BOUNDS];
    kvd_buf_printf(b, "kvdrive_%s_bucket{le=\"+Inf\"} %" PRIu64 "\n", name, n);
    kvd_buf_printf(b, "kvdrive_%s_sum %" PRIu64 ".%09" PRIu64 "\n", name, h->sum_ns / NS_PER_S,
                   h->sum_ns % NS_PER_S);
    kvd_buf_printf(b, "kvdrive_%s_count %" PRIu64 "\n", name, n);
}

/* ---- groups ------------------------------------------------------------------------------ */

static void put_info(kvd_buf *b, const srv *s)
{
    head(b, "info", "gauge", "1, with what runs in its labels.");
    kvd_buf_puts(b, "kvdrive_info{");
    put_label(b, "version", kvd_version());
    kvd_buf_putc(b, ',');
    put_label(b, "model", s->name);
    kvd_buf_putc(b, ',');
    put_label(b, "backend", s->info.backend);
    kvd_buf_puts(b, "} 1\n");
    gauge(b, "start_time_seconds", "When the server started, in seconds since 1970.",
          (uint64_t)s->started);
}

static void put_requests(kvd_buf *b, const srv *s, const srv_view *v)
{
    const srv_counts *c        = &v->counts;
    const uint64_t    too_long = atomic_load_explicit(&s->n_too_long, memory_order_relaxed);

    gauge(b, "sequences_running", "Sequences that are evaluated now.", v->n_running);
    gauge(b, "sequences_limit", "Sequences that can be evaluated together.", s->plan.n_seq);
    gauge(b, "sequences_parked", "Idle sequences that are kept beside those.", v->n_parked);
    gauge(b, "requests_waiting", "Requests in the queue.", v->n_waiting);
    counter(b, "requests_started_total", "Requests that left the queue to run.", c->n_started);
    head(b, "requests_ended_total", "counter", "Requests that were accepted and have ended.");
    put(b, "requests_ended_total", "{outcome=\"finished\"}", c->n_finished);
    put(b, "requests_ended_total", "{outcome=\"canceled\"}", c->n_canceled);
    put(b, "requests_ended_total", "{outcome=\"failed\"}", c->n_failed);
    head(b, "requests_rejected_total", "counter", "Requests that were not accepted.");
    put(b, "requests_rejected_total", "{reason=\"queue_full\"}", c->n_rejected[SRV_REJECT_QUEUE]);
    put(b, "requests_rejected_total", "{reason=\"stopping\"}", c->n_rejected[SRV_REJECT_STOPPING]);
    put(b, "requests_rejected_total", "{reason=\"too_long\"}", too_long);
    counter(b, "preemptions_total", "Sequences that gave their memory up and went on later.",
            c->n_preempted);
    head(b, "recomputed_tokens_total", "counter", "Tokens that were evaluated again.");
    put(b, "recomputed_tokens_total", "{reason=\"preempted\"}", c->n_recomputed);
    put(b, "recomputed_tokens_total", "{reason=\"lost\"}", v->stats.n_disk_again);
    histogram(b, "queue_seconds", "From a request's arrival to its start.", &c->queue);
    histogram(b, "time_to_first_token_seconds", "From a request's arrival to its first token.",
              &c->first);
    histogram(b, "prefill_seconds", "From a sequence's start to its first token.", &c->prefill);
    histogram(b, "inter_token_seconds", "Between two tokens of a sequence.", &c->gap);
    histogram(b, "request_seconds", "From a request's arrival to its end, where it finished.",
              &c->whole);
}

static void put_tokens(kvd_buf *b, const srv_view *v)
{
    const srv_counts *c = &v->counts;

    counter(b, "prompt_tokens_total", "Tokens of prompts, cached ones too.", c->n_prompt);
    head(b, "cached_tokens_total", "counter", "Tokens of prompts that were not evaluated.");
    put(b, "cached_tokens_total", "{tier=\"device\"}", c->n_cached[SRV_TIER_DEVICE]);
    put(b, "cached_tokens_total", "{tier=\"host\"}", c->n_cached[SRV_TIER_HOST]);
    put(b, "cached_tokens_total", "{tier=\"disk\"}", c->n_cached[SRV_TIER_DISK]);
    counter(b, "generated_tokens_total", "Tokens of answers.", c->n_generated);
    counter(b, "steps_total", "Evaluations in batches.", c->n_step);
    counter(b, "mixed_steps_total", "Of them, with a piece of a prompt beside answers.",
            c->n_mixed);
    head(b, "evaluation_seconds_total", "counter", "Time inside evaluations.");
    put_ns(b, "evaluation_seconds_total", "{kind=\"prefill\"}", v->stats.prefill_ns);
    put_ns(b, "evaluation_seconds_total", "{kind=\"decode\"}", v->stats.decode_ns);
}

static void put_recomputes(kvd_buf *b, const kvd_stats *st)
{
    head(b, "recomputes_total", "counter", "Known prefixes that were evaluated all the same.");
    put(b, "recomputes_total", "{reason=\"bandwidth\"}", st->n_slow_prefix);
}

static void put_memory(kvd_buf *b, const srv *s, const kvd_stats *st)
{
    gauge(b, "kv_used_tokens", "Tokens that the KV cache holds.", st->kv_used_tokens);
    gauge(b, "kv_capacity_tokens", "Tokens that it has room for.", st->kv_capacity_tokens);
    head(b, "kv_capacity_bytes", "gauge", "Bytes that the KV cache may take; disk: if limited.");
    put(b, "kv_capacity_bytes", "{tier=\"device\"}", s->plan.kv_device_bytes);
    put(b, "kv_capacity_bytes", "{tier=\"host\"}", s->plan.kv_host_bytes);
    if (st->kv_disk_limit_bytes)
        put(b, "kv_capacity_bytes", "{tier=\"disk\"}", st->kv_disk_limit_bytes);
    head(b, "kv_used_bytes", "gauge", "Bytes of the KV cache that are in use.");
    put(b, "kv_used_bytes", "{tier=\"device\"}", st->kv_device_used_bytes);
    put(b, "kv_used_bytes", "{tier=\"host\"}", st->kv_host_used_bytes);
    put(b, "kv_used_bytes", "{tier=\"disk\"}", st->kv_disk_used_bytes);
    head(b, "device_memory_bytes", "gauge", "Memory of a device of its own; 0: it has none.");
    put(b, "device_memory_bytes", "{kind=\"used\"}", st->device_used_bytes);
    put(b, "device_memory_bytes", "{kind=\"held\"}", st->device_held_bytes);
    put(b, "device_memory_bytes", "{kind=\"limit\"}", s->plan.device_limit_bytes);
    gauge(b, "pinned_memory_bytes", "Host memory that the device reads.", st->pinned_bytes);
}

static void put_windows(kvd_buf *b, const kvd_stats *st)
{
    counter(b, "window_hits_total", "Selected chunks that windows had.", st->n_hit);
    counter(b, "window_misses_total", "Selected chunks that they had not.", st->n_miss);
    counter(b, "window_urgent_misses_total", "Misses that a step waited for.", st->n_urgent);
    counter(b, "sparse_tokens_total", "Tokens that attended sparsely.", st->n_sparse);
    counter(b, "dense_fallbacks_total",
            "Budgets that were doubled, and times that sparse attention was given up.",
            st->n_fallback);
    if (st->mass > 0.0) {
        head(b, "sampled_mass_ratio", "gauge",
             "Mean share of the softmax that was attended, as the index estimates it.");
        kvd_buf_printf(b, "kvdrive_sampled_mass_ratio %.6f\n", st->mass);
    }
}

#define UP_WINDOW "{from=\"host\",to=\"device\",use=\"window\"}"
#define UP_DENSE  "{from=\"host\",to=\"device\",use=\"dense\"}"
#define DOWN      "{from=\"device\",to=\"host\",use=\"seal\"}"
#define READ      "{from=\"disk\",to=\"host\",use=\"read\"}"
#define STORE     "{from=\"host\",to=\"disk\",use=\"store\"}"

/* A device with memory of its own moves while it does other things: nobody takes that time. */
static bool cpu_moves(const srv *s)
{
    return s->plan.device_bytes == 0;
}

static void put_moves(kvd_buf *b, const srv *s, const kvd_stats *st)
{
    head(b, "moved_bytes_total", "counter", "Bytes of the KV cache that went between tiers.");
    put(b, "moved_bytes_total", UP_WINDOW, st->bytes_up);
    put(b, "moved_bytes_total", UP_DENSE, st->bytes_dense);
    put(b, "moved_bytes_total", DOWN, st->bytes_down);
    put(b, "moved_bytes_total", READ, st->disk_read_bytes);
    put(b, "moved_bytes_total", STORE, st->disk_put_bytes + st->disk_aux_bytes);
    head(b, "moved_seconds_total", "counter",
         "Time that the engine thread spent on moving them, waits included.");
    if (cpu_moves(s)) {
        put_ns(b, "moved_seconds_total", UP_WINDOW, st->up_ns);
        put_ns(b, "moved_seconds_total", UP_DENSE, st->up_dense_ns);
        put_ns(b, "moved_seconds_total", DOWN, st->down_ns);
    }
    put_ns(b, "moved_seconds_total", READ, st->disk_read_ns);
    put_ns(b, "moved_seconds_total", STORE, st->disk_put_ns);
}

static void put_disk(kvd_buf *b, const kvd_stats *st)
{
    head(b, "disk_written_bytes_total", "counter", "Bytes stored on disk.");
    put(b, "disk_written_bytes_total", "{what=\"records\"}", st->disk_put_bytes);
    put(b, "disk_written_bytes_total", "{what=\"index\"}", st->disk_aux_bytes);
    counter(b, "disk_reads_total", "Reads from disk.", st->n_disk_read);
    counter(b, "disk_useful_bytes_total", "Of the bytes read from disk, those asked for.",
            st->disk_useful_bytes);
    counter(b, "disk_refused_total", "Units that were not stored.", st->n_disk_refused);
    head(b, "disk_load_failures_total", "counter", "Batches of reads from disk that failed.");
    put(b, "disk_load_failures_total", "{reason=\"damaged\"}", st->n_disk_corrupt);
    put(b, "disk_load_failures_total", "{reason=\"timeout\"}", st->n_disk_timeout);
    put(b, "disk_load_failures_total", "{reason=\"error\"}",
        st->n_disk_failed - st->n_disk_corrupt - st->n_disk_timeout);
    counter(b, "disk_stalls_total", "Batches of reads that a step had to wait for.",
            st->n_disk_stall);
}

static void put_stalls(kvd_buf *b, const srv *s, const srv_view *v)
{
    const kvd_stats *st = &v->stats;

    head(b, "stall_seconds_total", "counter", "Time that steps waited.");
    put_ns(b, "stall_seconds_total", "{stage=\"disk\"}", st->disk_wait_ns);
    put_ns(b, "stall_seconds_total", "{stage=\"store\"}", st->disk_put_wait_ns);
    put_ns(b, "stall_seconds_total", "{stage=\"prefix\"}", v->counts.prefix_ns);
    if (cpu_moves(s))
        put_ns(b, "stall_seconds_total", "{stage=\"fetch\"}", st->up_ns + st->up_dense_ns);
}

static void put_stages(kvd_buf *b, const kvd_stats *st)
{
    head(b, "stage_seconds_total", "counter", "Time in the stages of evaluations.");
    put_ns(b, "stage_seconds_total", "{stage=\"qkv\"}", st->qkv_ns);
    put_ns(b, "stage_seconds_total", "{stage=\"dense\"}", st->dense_ns);
    put_ns(b, "stage_seconds_total", "{stage=\"ffn\"}", st->ffn_ns);
    put_ns(b, "stage_seconds_total", "{stage=\"logits\"}", st->logits_ns);
    put_ns(b, "stage_seconds_total", "{stage=\"select\"}", st->select_ns);
    put_ns(b, "stage_seconds_total", "{stage=\"fetch\"}", st->fetch_ns);
    put_ns(b, "stage_seconds_total", "{stage=\"attend\"}", st->attend_ns);
    put_ns(b, "stage_seconds_total", "{stage=\"seal\"}", st->seal_ns);
}

void srv_route_metrics(srv *s, srv_call *c)
{
    kvd_buf *b = &c->reply.body;
    srv_view v;

    srv_engine_look(s->engine, &v, s->slots);
    c->reply.status = 200;
    c->reply.type   = "text/plain; version=0.0.4; charset=utf-8";
    put_info(b, s);
    put_requests(b, s, &v);
    put_tokens(b, &v);
    put_recomputes(b, &v.stats);
    put_memory(b, s, &v.stats);
    put_windows(b, &v.stats);
    put_moves(b, s, &v.stats);
    put_disk(b, &v.stats);
    put_stalls(b, s, &v);
    put_stages(b, &v.stats);
}
