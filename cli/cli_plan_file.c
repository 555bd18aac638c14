/* SPDX-License-Identifier: Apache-2.0 */
/* cli_plan_file.c - what a plan file belongs to, and --plan FILE: the caps of a profile, and how
 * lanes share a host tier that spills. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli.h"
#include "plan/plan.h"

/* Name, type and size of the model: what people tell models apart by. */
static void name_model(const kvd_model_info *info, char *out, size_t bytes)
{
    snprintf(out, bytes, "%.100s:%.20s:%" PRIu64, info->name, info->file_type, info->n_param);
    for (char *s = out; *s; s++) {
        if (*s <= ' ' || *s > '~' || *s == '"' || *s == '\\')
            *s = '-';
    }
}

void cli_plan_key(plan_key *k, const kvd_model *m, const kvd_session_params *p, const char *index,
                  uint64_t budget)
{
    kvd_model_info info = { .struct_size = sizeof(info) };

    kvd_model_get_info(m, &info);
    *k = (plan_key){ .n_layer      = info.n_layer,
                     .n_kv_head    = info.n_kv_head,
                     .head_dim     = info.head_dim,
                     .chunk_tokens = p->chunk_tokens,
                     .budget       = budget };
    name_model(&info, k->fingerprint, sizeof(k->fingerprint));
    snprintf(k->index, sizeof(k->index), "%s", index);
}

/* A budget in percent fits any plan, since caps are counted in budgets; without --budget it is the
 * plan's own. */
static kvd_status check_budget(kvd_attention_params *a, const plan_file *f, const kvd_opts *o,
                               const char *path, kvd_err *err)
{
    if (!kvd_opts_given(o, "budget"))
        a->budget = (uint32_t)kvd_min_u64(f->key.budget, UINT32_MAX);
    else if (a->budget && a->budget != f->key.budget)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "%s is a plan for a budget of %" PRIu64 " tokens, --budget is %u", path,
                        f->key.budget, a->budget);
    return KVD_OK;
}

/* Reads the file as a plan for this model, and no other. */
static kvd_status read_plan(plan_file *f, const kvd_attention_params *a,
                            const kvd_session_params *p, const kvd_model *m, const kvd_opts *o,
                            kvd_err *err)
{
    const char *path = kvd_opts_text(o, "plan");
    kvd_buf     text = { 0 };
    kvd_err     why  = { 0 };
    plan_key    key;
    kvd_status  st = cli_read_option(o, "plan", PLAN_FILE_MAX_BYTES, &text, err);

    if (st == KVD_OK) {
        st = plan_file_read(f, text.data ? text.data : "", text.len, NULL, &why);
        if (st == KVD_OK) { /* whole; and again, since its budget is known now */
            cli_plan_key(&key, m, p, a->index, f->key.budget);
            plan_file_free(f);
            st = plan_file_read(f, text.data, text.len, &key, &why);
        }
        if (st != KVD_OK)
            st = kvd_fail(err, st, 0, "--plan %.100s: %.380s", path, why.msg);
    }
    kvd_buf_free(&text);
    return st;
}

static kvd_status take_caps(cli_plan_use *out, kvd_attention_params *a, const plan_file *f,
                            kvd_err *err)
{
    const uint32_t n = f->key.n_layer * f->key.n_kv_head; /* at most PLAN_MAX_GROUP */

    out->caps = kvd_calloc(n, sizeof(*out->caps));
    if (!out->caps)
        return kvd_fail(err, KVD_E_NOMEM, 0, "--plan: no memory for %u caps", n);
    for (uint32_t i = 0; i < n; i++)
        out->caps[i] = (float)f->caps[i];
    a->caps   = out->caps;
    a->n_caps = n;
    return KVD_OK;
}

/* Where the host tier has not room for all: shares by the profile's stalls.  A session that cannot
 * be planned says why when it is opened. */
static kvd_status share_host(cli_plan_use *out, const kvd_attention_params *a,
                             kvd_session_params *p, const kvd_model *m, const plan_file *f,
                             const char *path, kvd_err *err)
{
    const uint32_t     n    = f->key.n_layer * f->key.n_kv_head;
    kvd_session_params q    = *p;
    kvd_plan           plan = { .struct_size = sizeof(plan) };
    kvd_err            why  = { 0 };
    kvd_status         st;

    q.attention = a;
    if (f->n_size == 0 || kvd_session_plan(m, &q, &plan, &why) != KVD_OK || !plan.kv_spills)
        return KVD_OK;
    out->records = kvd_calloc(n, sizeof(*out->records));
    if (!out->records)
        return kvd_fail(err, KVD_E_NOMEM, 0, "--plan: no memory for %u shares", n);
    st = plan_file_share_host(f, plan.kv_host_records / plan.n_seq, plan.kv_lane_records,
                              out->records, &out->shares, &why);
    if (st != KVD_OK)
        return kvd_fail(err, st, 0, "--plan %.100s: %.380s", path, why.msg);
    out->has_shares   = true;
    p->host_records   = out->shares.by_stalls ? out->records : NULL;
    p->n_host_records = n;
    return KVD_OK;
}

kvd_status cli_plan_apply(cli_plan_use *out, kvd_attention_params *a, kvd_session_params *p,
                          const kvd_model *m, const kvd_opts *o, kvd_err *err)
{
    const char *path = kvd_opts_text(o, "plan");
    plan_file   f    = { 0 };
    kvd_status  st;

    *out = (cli_plan_use){ 0 };
    if (!path)
        return KVD_OK;
    st = read_plan(&f, a, p, m, o, err);
    if (st == KVD_OK)
        st = check_budget(a, &f, o, path, err);
    if (st == KVD_OK)
        st = take_caps(out, a, &f, err);
    if (st == KVD_OK)
        st = share_host(out, a, p, m, &f, path, err);
    plan_file_free(&f);
    return st;
}

void cli_plan_release(cli_plan_use *plan)
{
    kvd_free(plan->caps);
    kvd_free(plan->records);
    plan->caps    = NULL;
    plan->records = NULL;
}

kvd_status cli_session_or_uncached(kvd_session **out, kvd_plan *plan, kvd_model *m,
                                   kvd_session_params *p, const kvd_opts *o, kvd_err *err)
{
    const kvd_status   st       = kvd_session_open(out, m, p, err);
    kvd_session_params uncached = *p;
    kvd_err            why      = { 0 };
    const char *const  dir      = p->cache_dir;

    uncached.cache_dir = NULL;
    if (st == KVD_E_BUSY && dir && plan && kvd_session_plan(m, &uncached, plan, &why) != KVD_OK)
        return cli_of_option(st, o, "cache-dir", err);
    if (st != KVD_E_BUSY || !dir || kvd_session_open(out, m, &uncached, &why) != KVD_OK)
        return cli_of_option(st, o, "cache-dir", err);
    fprintf(stderr, "kvdrive: %s: going on without the prefix cache\n", err->msg);
    *p = uncached;
    return KVD_OK;
}

static kvd_status open_with_plan(kvd_session **out, kvd_plan *plan, kvd_model *m,
                                 kvd_session_params *p, kvd_attention_params *a, const kvd_opts *o,
                                 bool uncached, kvd_err *err)
{
    cli_plan_use use;
    kvd_status   st = cli_plan_apply(&use, a, p, m, o, err);

    if (st == KVD_OK && plan) /* while the memory is free */
        st = kvd_session_plan(m, p, plan, err);
    if (st == KVD_OK)
        st = uncached ? cli_session_or_uncached(out, plan, m, p, o, err)
                      : cli_of_option(kvd_session_open(out, m, p, err), o, "cache-dir", err);
    a->caps         = NULL;
    p->host_records = NULL;
    cli_plan_release(&use);
    return st;
}

kvd_status cli_session_open(kvd_session **out, kvd_plan *plan, kvd_model *m, kvd_session_params *p,
                            kvd_attention_params *a, const kvd_opts *o, kvd_err *err)
{
    return open_with_plan(out, plan, m, p, a, o, true, err);
}

kvd_status cli_session_open_cached(kvd_session **out, kvd_plan *plan, kvd_model *m,
                                   kvd_session_params *p, kvd_attention_params *a,
                                   const kvd_opts *o, kvd_err *err)
{
    return open_with_plan(out, plan, m, p, a, o, false, err);
}
