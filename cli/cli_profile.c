/* SPDX-License-Identifier: Apache-2.0 */
/* cli_profile.c - kvdrive profile: how much of what decode steps select was selected recently, per
 * layer and KV head; what windows of many sizes and policies would have held; and the caps that
 * follow.
 *
 * A text's first --length less --steps tokens are prefilled; then the text's own next --steps
 * tokens are decoded, one by one, whatever the model would have said. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "cli_profile.h"
#include "os/os.h"

#define TEXT_MAX_BYTES (1ull << 30)

/* Caps that a plan may choose: those that are whole numbers. */
static const uint32_t plan_caps[] = { 1, 2, 3, 4, 6, 8, 12, 16 };

typedef struct job {
    const kvd_opts      *o;
    kvd_model           *m;
    kvd_session         *s;
    engine_profile      *profile;
    kvd_session_params   params;
    kvd_attention_params attention;
    kvd_plan             plan;
    profile_result       r;
    cli_tokens          *text; /* [n_text] tokens, of which `length` at most are kept */
    uint32_t             n_text;
    uint32_t             n_step; /* of a text, the first one included */
    plan_file            file;
    plan_result          planned;
    uint64_t             uniform; /* hits of the same cap everywhere, at no more memory */
    double               uniform_cap;
    plan_shares          shares[ENGINE_PROFILE_SIZES]; /* of host tiers but the least and largest */
} job;

static const char *text_path(const job *j, uint32_t i)
{
    const char *file = kvd_opts_text(j->o, "file");

    return !file ? j->o->rest[i] : i == 0 ? file : j->o->rest[i - 1];
}

/* ---- running ------------------------------------------------------------------------- */

static kvd_status decode(job *j, const int32_t *token, cli_progress *bar, kvd_err *err)
{
    for (uint32_t i = 0; i < j->n_step; i++) {
        kvd_batch b = KVD_BATCH_INIT;

        b.n_token = 1;
        b.token   = token + i;
        KVD_TRY(kvd_eval(j->s, &b, err));
        if (!cli_progress_step(bar, i + 1, j->n_step))
            return kvd_fail(err, KVD_E_CANCELED, 0, "stopped");
    }
    return KVD_OK;
}

static kvd_status profile_text(job *j, uint32_t i, kvd_err *err)
{
    const uint32_t    length = j->r.length, n_prompt = length - j->n_step;
    const cli_tokens *t = &j->text[i];
    cli_progress      bar;
    kvd_status        st;

    if (t->n < length)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s has %zu tokens, a prompt and its %u steps take %u (--length)",
                        text_path(j, i), t->n, j->n_step, length);
    KVD_TRY(kvd_seq_truncate(j->s, 0, 0, err));
    cli_progress_start(&bar, "prefill");
    st = kvd_prefill(j->s, 0, t->data, n_prompt, cli_progress_step, &bar, err);
    cli_progress_end(&bar);
    if (st != KVD_OK)
        return st;
    cli_progress_start(&bar, "steps");
    st = decode(j, t->data + n_prompt, &bar, err);
    cli_progress_end(&bar);
    if (st == KVD_OK)
        st = engine_profile_end(j->profile, err);
    j->r.n_step += j->n_step - 1;
    j->r.n_text++;
    return st;
}

static kvd_status profile_texts(job *j, kvd_err *err)
{
    for (uint32_t i = 0; i < j->n_text; i++)
        KVD_TRY(profile_text(j, i, err));
    return KVD_OK;
}

/* ---- opening ------------------------------------------------------------------------- */

/* Of its tokens only those that may be run are kept. */
static kvd_status read_text(job *j, uint32_t i, kvd_err *err)
{
    cli_tokens *t    = &j->text[i];
    kvd_buf     text = { 0 };
    int32_t    *part;
    kvd_status  st = cli_read_file(text_path(j, i), TEXT_MAX_BYTES, &text, err);

    if (st == KVD_OK)
        st = cli_tokenize_text(j->m, text.data, text.len, NULL, 0, true, t, err);
    kvd_buf_free(&text);
    if (st == KVD_OK && t->n > j->r.length) {
        part    = kvd_realloc(t->data, j->r.length * sizeof(*part));
        t->data = part ? part : t->data;
    }
    return st;
}

static kvd_status read_texts(job *j, kvd_err *err)
{
    j->n_text = (uint32_t)j->o->n_rest + (kvd_opts_text(j->o, "file") ? 1 : 0);
    if (j->n_text == 0)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "no text: kvdrive profile -m FILE -o PLAN TEXTFILE...");
    j->text = kvd_calloc(j->n_text, sizeof(*j->text));
    if (!j->text)
        return kvd_fail(err, KVD_E_NOMEM, 0, "profile: no memory for %u texts", j->n_text);
    for (uint32_t i = 0; i < j->n_text; i++)
        KVD_TRY(read_text(j, i, err));
    return KVD_OK;
}

/* Nobody has asked for a length: then it is no more than the shortest text and the model have. */
static void fit_length(job *j, uint32_t n_ctx_train)
{
    j->r.length = (uint32_t)kvd_min_u64(j->r.length, n_ctx_train);
    for (uint32_t i = 0; i < j->n_text; i++)
        j->r.length = (uint32_t)kvd_min_u64(j->r.length, j->text[i].n);
}

static kvd_status open_session(job *j, kvd_err *err)
{
    kvd_model_info info = { .struct_size = sizeof(info) };
    const char    *path = kvd_opts_text(j->o, "model");

    KVD_TRY(cli_session_params(&j->params, &j->attention, j->o, err));
    KVD_TRY(cli_model_open(&j->m, j->o, err));
    kvd_model_get_info(j->m, &info);
    j->r.length = (uint32_t)kvd_opts_int(j->o, "length");
    j->n_step   = (uint32_t)kvd_opts_int(j->o, "steps");
    KVD_TRY(read_texts(j, err));
    if (!kvd_opts_given(j->o, "length"))
        fit_length(j, info.n_ctx_train);
    if (j->n_step >= j->r.length)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "--steps %u: the length, %u (--length, else the shortest text's), has to "
                        "leave a prompt",
                        j->n_step, j->r.length);
    j->m->watched         = true;
    j->params.n_ctx       = j->r.length;
    j->attention.mode     = KVD_ATTENTION_SPARSE;
    j->attention.min_mass = -1.0f; /* whatever they reach, all texts are stepped through alike */
    KVD_TRY(cli_session_open(&j->s, &j->plan, j->m, &j->params, &j->attention, j->o, err));
    j->r.model        = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    j->r.n_layer      = info.n_layer;
    j->r.n_kv_head    = info.n_kv_head;
    j->r.chunk_tokens = j->params.chunk_tokens;
    j->r.policy       = (uint32_t)j->attention.evict;
    j->r.record_bytes = j->plan.kv_bytes_per_token / ((uint64_t)info.n_layer * info.n_kv_head) *
                        j->params.chunk_tokens;
    return engine_profile_open(&j->profile, j->s, j->n_step, err);
}

/* ---- planning ------------------------------------------------------------------------ */

/* Hits of all lanes with one cap. */
static uint64_t hits_of(const job *j, uint32_t policy, uint32_t cap)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < j->r.n_layer * j->r.n_kv_head; i++)
        sum += j->r.lane[i].hit[policy][cap];
    return sum;
}

static uint32_t index_of_cap(uint32_t cap)
{
    return profile_nearest_cap(cap);
}

static void fill_tables(job *j)
{
    const uint32_t n_lane = j->r.n_layer * j->r.n_kv_head, n_cap = KVD_COUNTOF(plan_caps);

    j->file.n_step = j->r.n_step;
    memcpy(j->file.cap, plan_caps, sizeof(plan_caps));
    for (uint32_t i = 0; i < n_lane * n_cap; i++) {
        const uint32_t cap = index_of_cap(plan_caps[i % n_cap]);

        j->file.benefit[i] = j->r.lane[i / n_cap].hit[j->r.policy][cap] * j->r.record_bytes;
        j->file.cost[i]    = profile_slots(&j->r, cap) * j->r.record_bytes;
    }
}

/* The most that the same cap for all lanes gives for the same memory. */
static void find_uniform(job *j, uint64_t capacity)
{
    const uint64_t n_lane = (uint64_t)j->r.n_layer * j->r.n_kv_head;

    for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++) {
        if (profile_slots(&j->r, c) * j->r.record_bytes * n_lane <= capacity) {
            j->uniform     = hits_of(j, j->r.policy, c);
            j->uniform_cap = (double)engine_profile_cap[c];
        }
    }
}

static kvd_status choose_caps(job *j, kvd_err *err)
{
    const uint64_t n_lane   = (uint64_t)j->r.n_layer * j->r.n_kv_head;
    const uint64_t slots    = (uint64_t)(j->r.budget * kvd_opts_num(j->o, "cap"));
    uint64_t       capacity = kvd_opts_size(j->o, "kv-window");
    plan_key       key;

    cli_plan_key(&key, j->m, &j->params, cli_index_name(j->o),
                 (uint64_t)j->r.budget * j->params.chunk_tokens);
    if (capacity == 0)
        capacity = slots * j->r.record_bytes * n_lane;
    KVD_TRY(plan_file_init(&j->file, &key, KVD_COUNTOF(plan_caps), err));
    fill_tables(j);
    find_uniform(j, capacity);
    return plan_file_choose(&j->file, capacity, &j->planned, err);
}

/* ---- host tier ----------------------------------------------------------------------- */

/* Reads from disk of the chosen caps. */
static kvd_status fill_host(job *j, kvd_err *err)
{
    plan_file *f = &j->file;

    KVD_TRY(plan_file_add_host(f, ENGINE_PROFILE_SIZES, err));
    f->lane_records = engine_profile_records(j->profile, ENGINE_PROFILE_SIZES - 1);
    for (uint32_t k = 0; k < ENGINE_PROFILE_SIZES; k++)
        f->size[k] = engine_profile_records(j->profile, k);
    for (uint32_t i = 0; i < j->r.n_layer * j->r.n_kv_head; i++) {
        const uint32_t cap = index_of_cap(f->caps[i]);

        for (uint32_t k = 0; k < f->n_size; k++) {
            f->urgent[i * f->n_size + k] = j->r.lane[i].urgent_read[cap][k];
            f->late[i * f->n_size + k]   = j->r.lane[i].late_read[cap][k];
        }
    }
    return KVD_OK;
}

/* How lanes would share host tiers of these parts of all records. */
static kvd_status share_hosts(job *j, kvd_err *err)
{
    const uint32_t n_lane = j->r.n_layer * j->r.n_kv_head;
    uint32_t      *record = kvd_calloc(n_lane, sizeof(*record));
    kvd_status     st     = KVD_OK;

    if (!record)
        return kvd_fail(err, KVD_E_NOMEM, 0, "profile: no memory for %u shares", n_lane);
    for (uint32_t k = 1; st == KVD_OK && k + 1 < j->file.n_size; k++)
        st = plan_file_share_host(&j->file, (uint64_t)j->file.size[k] * n_lane,
                                  j->file.lane_records, record, &j->shares[k], err);
    kvd_free(record);
    return st;
}

/* ---- saying so ----------------------------------------------------------------------- */

static uint64_t selected(const job *j)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < j->r.n_layer * j->r.n_kv_head; i++)
        sum += j->r.lane[i].n_select;
    return kvd_max_u64(1, sum);
}

static double percent(const job *j, uint64_t hits)
{
    return 100.0 * (double)hits / (double)selected(j);
}

/* Of the session's own windows, under --cap or --plan. */
static double session_percent(const job *j)
{
    kvd_stats st = { .struct_size = sizeof(st) };

    kvd_session_get_stats(j->s, &st);
    return 100.0 * (double)st.n_hit / (double)kvd_max_u64(1, st.n_selected);
}

static double planned_percent(const job *j)
{
    return percent(j, j->planned.benefit / j->r.record_bytes);
}

static void print_hosts(const job *j)
{
    printf("\ndisk reads a step that the planned windows would leave, waited for + beside steps\n"
           "%-10s %22s %22s %20s\n",
           "host tier", "the same for all", "shared by stalls", "records of a lane");
    for (uint32_t k = 1; k + 1 < j->file.n_size; k++) {
        const plan_shares *s = &j->shares[k];

        printf("%9.1f%% %10.2f + %9.2f %10.2f + %9.2f %11u to %u\n",
               100.0 * j->file.size[k] / j->file.lane_records, s->equal_urgent, s->equal_late,
               s->shared_urgent, s->shared_late, s->least, s->most);
    }
}

static void print_table(const job *j)
{
    printf("hits in %% of %" PRIu64 " selected chunks: %u text(s), %" PRIu64
           " steps, %u x %u lanes, budget %u of %u tokens\n\n%-10s",
           selected(j), j->r.n_text, j->r.n_step, j->r.n_layer, j->r.n_kv_head,
           j->r.budget * j->r.chunk_tokens, j->r.length, "window");
    for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++)
        printf(" %6g", (double)engine_profile_cap[c]);
    for (uint32_t p = 0; p < ENGINE_PROFILE_POLICIES; p++) {
        printf("\n%-10s", profile_policy_names[p]);
        for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++)
            printf(" %6.2f", percent(j, hits_of(j, p, c)));
    }
    printf("\n\n%-10s", "union of");
    for (uint32_t u = 0; u < ENGINE_PROFILE_UNIONS; u++)
        printf(" %6u", engine_profile_union[u]);
    printf("\n%-10s", "hits");
    for (uint32_t u = 0; u < ENGINE_PROFILE_UNIONS; u++) {
        uint64_t sum = 0;

        for (uint32_t i = 0; i < j->r.n_layer * j->r.n_kv_head; i++)
            sum += j->r.lane[i].union_hit[u];
        printf(" %6.2f", percent(j, sum));
    }
    printf("\n\nthe session's own windows (%s): %.2f %%",
           kvd_opts_text(j->o, "plan") ? "--plan" : "--cap", session_percent(j));
    printf("\nplanned caps in %.2f MiB: %.2f %% hits; the same cap everywhere (%g): %.2f %%\n",
           cli_mib(j->planned.cost), planned_percent(j), j->uniform_cap, percent(j, j->uniform));
    print_hosts(j);
}

static void print_json(const job *j)
{
    printf("{\"texts\":%u,\"steps\":%" PRIu64 ",\"selected\":%" PRIu64
           ",\"budget_tokens\":%u,\"hit_percent\":{",
           j->r.n_text, j->r.n_step, selected(j), j->r.budget * j->r.chunk_tokens);
    for (uint32_t p = 0; p < ENGINE_PROFILE_POLICIES; p++) {
        printf("%s\"%s\":{", p ? "," : "", profile_policy_names[p]);
        for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++)
            printf("%s\"%g\":%.4f", c ? "," : "", (double)engine_profile_cap[c],
                   percent(j, hits_of(j, p, c)));
        printf("}");
    }
    printf("},\"planned_percent\":%.4f,\"planned_bytes\":%" PRIu64
           ",\"uniform_percent\":%.4f,\"uniform_cap\":%g,\"session_percent\":%.4f,\"host\":[",
           planned_percent(j), j->planned.cost, percent(j, j->uniform), j->uniform_cap,
           session_percent(j));
    for (uint32_t k = 1; k + 1 < j->file.n_size; k++) {
        const plan_shares *s = &j->shares[k];

        printf("%s{\"records\":%u,\"by_stalls\":%s,\"least_records\":%u,\"most_records\":%u,"
               "\"urgent_reads\":%.4f,\"late_reads\":%.4f,\"equal_urgent_reads\":%.4f,"
               "\"equal_late_reads\":%.4f}",
               k > 1 ? "," : "", j->file.size[k], s->by_stalls ? "true" : "false", s->least,
               s->most, s->shared_urgent, s->shared_late, s->equal_urgent, s->equal_late);
    }
    printf("]}\n");
}

static kvd_status write_file(const char *path, const kvd_buf *b, kvd_err *err)
{
    return b->oom ? kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %s", path)
                  : os_file_replace(path, b->data, b->len, err);
}

static kvd_status write_results(job *j, kvd_err *err)
{
    const char *out = kvd_opts_text(j->o, "write-plan"), *counts = kvd_opts_text(j->o, "counts");
    const char *map  = kvd_opts_text(j->o, "heatmap");
    kvd_buf     text = { 0 }, rows = { 0 };
    kvd_status  st = KVD_OK;

    if (out)
        st = plan_file_write(&j->file, &text, err);
    if (st == KVD_OK && out)
        st = write_file(out, &text, err);
    if (st == KVD_OK && counts) {
        profile_write_csv(&j->r, &rows);
        st = write_file(counts, &rows, err);
    }
    if (st == KVD_OK && map)
        st = profile_draw(&j->r, map, err);
    kvd_buf_free(&text);
    kvd_buf_free(&rows);
    return st;
}

static kvd_status run(job *j, kvd_err *err)
{
    KVD_TRY(open_session(j, err));
    cli_interrupt_watch(j->s);
    KVD_TRY(profile_texts(j, err));
    cli_interrupt_watch(NULL);
    j->r.lane   = engine_profile_lanes(j->profile);
    j->r.budget = engine_profile_budget(j->profile);
    KVD_TRY(choose_caps(j, err));
    KVD_TRY(fill_host(j, err));
    KVD_TRY(share_hosts(j, err));
    return write_results(j, err);
}

int cli_profile(const kvd_opts *o)
{
    job        j   = { .o = o, .r = { .o = o }, .plan = { .struct_size = sizeof(kvd_plan) } };
    kvd_err    err = { 0 };
    kvd_status st  = run(&j, &err);

    cli_interrupt_watch(NULL);
    if (st == KVD_OK && kvd_opts_flag(o, "json"))
        print_json(&j);
    else if (st == KVD_OK)
        print_table(&j);
    engine_profile_close(j.profile);
    for (uint32_t i = 0; j.text && i < j.n_text; i++)
        kvd_free(j.text[i].data);
    kvd_free(j.text);
    plan_file_free(&j.file);
    kvd_session_close(j.s);
    kvd_model_close(j.m);
    return st == KVD_OK ? EXIT_OK : cli_fail(&err);
}
