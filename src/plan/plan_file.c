/* SPDX-License-Identifier: Apache-2.0 */
/* plan_file.c - a plan as JSON text: what it was made for, what was measured, what was chosen.
 *
 *   {"format": "kvdrive-plan", "version": 1, "model": FINGERPRINT,
 *    "geometry": {"n_layer", "n_kv_head", "head_dim", "chunk_tokens"},
 *    "index": KIND, "budget_tokens": N, "n_step": N,
 *    "profiled_caps": [CAP], "capacity_bytes": N,
 *    "caps":    [layer][head] chosen,
 *    "benefit": [layer][head][profiled cap] bytes not transferred,
 *    "cost":    [layer][head][profiled cap] device bytes,
 *    "host": {"lane_records": N, "sizes": [RECORDS], "urgent_read_ns": N, "late_read_ns": N,
 *             "urgent": [layer][head][size] reads, "late": likewise}}
 *
 * "host" may be missing.  The reader takes exactly these fields: a field it does not know would be
 * one it ignores.  The text is from outside: the reader bounds its depth, this file everything
 * else. Any thread. */
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "plan/plan.h"

#define FORMAT "kvdrive-plan"

/* Space, quote and backslash never need escaping because they are not allowed. */
static bool is_plain(const char *s, size_t cap)
{
    const size_t n = strnlen(s, cap);

    for (size_t i = 0; i < n; i++) {
        if (s[i] <= ' ' || s[i] > '~' || s[i] == '"' || s[i] == '\\')
            return false;
    }
    return n > 0 && n < cap;
}

static uint64_t n_pair(const plan_key *k)
{
    return (uint64_t)k->n_layer * k->n_kv_head;
}

static kvd_status check_key(const plan_key *k, uint32_t n_cap, kvd_err *err)
{
    const struct {
        const char *name;
        uint64_t    value, most;
    } field[] = {
        { "n_layer", k->n_layer, PLAN_MAX_DIM },
        { "n_kv_head", k->n_kv_head, PLAN_MAX_DIM },
        { "head_dim", k->head_dim, PLAN_MAX_DIM },
        { "chunk_tokens", k->chunk_tokens, PLAN_MAX_DIM },
        { "budget_tokens", k->budget, PLAN_MAX_TOKENS },
        { "n_layer x n_kv_head", n_pair(k), PLAN_MAX_GROUP },
        { "the number of profiled_caps", n_cap, PLAN_MAX_OPTION },
    };

    for (size_t i = 0; i < KVD_COUNTOF(field); i++) {
        if (field[i].value < 1 || field[i].value > field[i].most)
            return kvd_fail(err, KVD_E_INVAL, 0, "plan: %s is %" PRIu64 ", expected 1 to %" PRIu64,
                            field[i].name, field[i].value, field[i].most);
    }
    if (!is_plain(k->fingerprint, sizeof(k->fingerprint)))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "plan: the model's fingerprint must be 1 to %u printable characters",
                        PLAN_NAME_BYTES - 1);
    if (!is_plain(k->index, sizeof(k->index)))
        return kvd_fail(err, KVD_E_INVAL, 0, "plan: index must be a short printable name");
    return KVD_OK;
}

kvd_status plan_file_init(plan_file *f, const plan_key *key, uint32_t n_cap, kvd_err *err)
{
    uint64_t n;

    *f = (plan_file){ 0 };
    KVD_TRY(check_key(key, n_cap, err));
    n          = n_pair(key) * n_cap; /* at most 2^23 */
    f->key     = *key;
    f->n_cap   = n_cap;
    f->cap     = kvd_calloc(n_cap, sizeof(*f->cap));
    f->benefit = kvd_calloc(n, sizeof(*f->benefit));
    f->cost    = kvd_calloc(n, sizeof(*f->cost));
    f->caps    = kvd_calloc(n_pair(key), sizeof(*f->caps));
    if (f->cap && f->benefit && f->cost && f->caps)
        return KVD_OK;
    plan_file_free(f);
    return kvd_fail(err, KVD_E_NOMEM, 0, "plan: no memory for %" PRIu64 " table entries", n);
}

void plan_file_free(plan_file *f)
{
    kvd_free(f->cap);
    kvd_free(f->benefit);
    kvd_free(f->cost);
    kvd_free(f->caps);
    kvd_free(f->size);
    kvd_free(f->urgent);
    kvd_free(f->late);
    *f = (plan_file){ 0 };
}

kvd_status plan_file_add_host(plan_file *f, uint32_t n_size, kvd_err *err)
{
    const uint64_t n = n_pair(&f->key) * n_size;

    kvd_assert(n_size > 0 && n_size <= PLAN_MAX_OPTION && f->n_size == 0);
    f->n_size    = n_size;
    f->urgent_ns = PLAN_URGENT_NS;
    f->late_ns   = PLAN_LATE_NS;
    f->size      = kvd_calloc(n_size, sizeof(*f->size));
    f->urgent    = kvd_calloc(n, sizeof(*f->urgent));
    f->late      = kvd_calloc(n, sizeof(*f->late));
    return f->size && f->urgent && f->late
               ? KVD_OK
               : kvd_fail(err, KVD_E_NOMEM, 0, "plan: no memory for %" PRIu64 " table entries", n);
}

kvd_status plan_file_choose(plan_file *f, uint64_t capacity, plan_result *out, kvd_err *err)
{
    const uint32_t n      = (uint32_t)n_pair(&f->key);
    plan_option   *option = kvd_calloc((uint64_t)n * f->n_cap, sizeof(*option));
    plan_group    *group  = kvd_calloc(n, sizeof(*group));
    uint32_t      *choice = kvd_calloc(n, sizeof(*choice));
    plan_problem   p      = { .group = group, .n_group = n, .capacity = capacity };
    kvd_status     st     = KVD_OK;

    *out = (plan_result){ 0 };
    if (!option || !group || !choice)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "plan: no memory to choose caps");
    for (uint32_t g = 0; st == KVD_OK && g < n; g++) {
        const size_t at = (size_t)g * f->n_cap;

        group[g] = (plan_group){ option + at, f->n_cap };
        for (uint32_t k = 0; k < f->n_cap; k++)
            option[at + k] =
                (plan_option){ .cost = f->cost[at + k], .benefit = f->benefit[at + k] };
    }
    if (st == KVD_OK)
        st = plan_solve(&p, choice, out, err);
    for (uint32_t g = 0; st == KVD_OK && g < n; g++)
        f->caps[g] = f->cap[choice[g]];
    if (st == KVD_OK)
        f->capacity = capacity;
    kvd_free(option);
    kvd_free(group);
    kvd_free(choice);
    return st;
}

/* ---- writing --------------------------------------------------------------------- */

static void put_row(kvd_buf *b, const uint64_t *wide, const uint32_t *narrow, uint64_t n)
{
    kvd_buf_putc(b, '[');
    for (uint64_t i = 0; i < n; i++)
        kvd_buf_printf(b, "%s%" PRIu64, i ? ", " : "", wide ? wide[i] : narrow[i]);
    kvd_buf_putc(b, ']');
}

/* [n_layer][n_kv_head][n] */
static void put_table(kvd_buf *b, const char *name, const plan_file *f, const uint64_t *table,
                      uint32_t n)
{
    const uint32_t n_head = f->key.n_kv_head;

    kvd_buf_printf(b, " \"%s\": [\n", name);
    for (uint32_t l = 0; l < f->key.n_layer; l++) {
        kvd_buf_puts(b, "  [");
        for (uint32_t h = 0; h < n_head; h++) {
            kvd_buf_puts(b, h ? ", " : "");
            put_row(b, table + ((uint64_t)l * n_head + h) * n, NULL, n);
        }
        kvd_buf_puts(b, l + 1 < f->key.n_layer ? "],\n" : "]\n");
    }
    kvd_buf_puts(b, " ]");
}

static void put_host(kvd_buf *b, const plan_file *f)
{
    kvd_buf_printf(b, ",\n \"host\": {\"lane_records\": %u, \"sizes\": ", f->lane_records);
    put_row(b, NULL, f->size, f->n_size);
    kvd_buf_printf(b, ", \"urgent_read_ns\": %" PRIu64 ", \"late_read_ns\": %" PRIu64 ",\n",
                   f->urgent_ns, f->late_ns);
    put_table(b, "urgent", f, f->urgent, f->n_size);
    kvd_buf_puts(b, ",\n");
    put_table(b, "late", f, f->late, f->n_size);
    kvd_buf_putc(b, '}');
}

static kvd_status check_values(const plan_file *f, kvd_err *err);

kvd_status plan_file_write(const plan_file *f, kvd_buf *out, kvd_err *err)
{
    const plan_key *k = &f->key;

    KVD_TRY(check_values(f, err));
    kvd_buf_printf(out,
                   "{\n \"format\": \"" FORMAT "\",\n \"version\": %d,\n \"model\": \"%s\",\n"
                   " \"geometry\": {\"n_layer\": %u, \"n_kv_head\": %u, \"head_dim\": %u, "
                   "\"chunk_tokens\": %u},\n \"index\": \"%s\",\n \"budget_tokens\": %" PRIu64
                   ",\n \"n_step\": %" PRIu64 ",\n \"profiled_caps\": ",
                   PLAN_FILE_VERSION, k->fingerprint, k->n_layer, k->n_kv_head, k->head_dim,
                   k->chunk_tokens, k->index, k->budget, f->n_step);
    put_row(out, NULL, f->cap, f->n_cap);
    kvd_buf_printf(out, ",\n \"capacity_bytes\": %" PRIu64 ",\n \"caps\": [\n", f->capacity);
    for (uint32_t l = 0; l < k->n_layer; l++) {
        kvd_buf_puts(out, "  ");
        put_row(out, NULL, f->caps + (uint64_t)l * k->n_kv_head, k->n_kv_head);
        kvd_buf_puts(out, l + 1 < k->n_layer ? ",\n" : "\n ],\n");
    }
    put_table(out, "benefit", f, f->benefit, f->n_cap);
    kvd_buf_puts(out, ",\n");
    put_table(out, "cost", f, f->cost, f->n_cap);
    if (f->n_size > 0)
        put_host(out, f);
    kvd_buf_puts(out, "\n}\n");
    return out->oom ? kvd_fail(err, KVD_E_NOMEM, 0, "plan: no memory for its text") : KVD_OK;
}

/* ---- reading --------------------------------------------------------------------- */

static kvd_status bad(kvd_err *err, const char *field, const char *what)
{
    return kvd_fail(err, KVD_E_CORRUPT, 0, "plan file: %s %s", field, what);
}

/* An object holds exactly the named fields (the reader has refused repeated ones). */
static kvd_status check_fields(const json_t *o, const char *where, const char *const *name,
                               size_t n, kvd_err *err)
{
    const char *key;
    json_t     *value;

    if (!json_is_object(o))
        return bad(err, where, "is no object");
    for (size_t i = 0; i < n; i++) {
        if (!json_object_get(o, name[i]))
            return bad(err, name[i], "is missing");
    }
    json_object_foreach((json_t *)o, key, value)
    { /* the macro wants it so */
        size_t i = 0;

        while (i < n && strcmp(key, name[i]) != 0)
            i++;
        if (i == n)
            return kvd_fail(err, KVD_E_CORRUPT, 0, "plan file: unknown field '%.40s' in %s", key,
                            where);
    }
    return KVD_OK;
}

static kvd_status get_u64(const json_t *v, const char *field, uint64_t most, uint64_t *out,
                          kvd_err *err)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0 || (uint64_t)json_integer_value(v) > most)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "plan file: %s is no whole number of 0 to %" PRIu64,
                        field, most);
    *out = (uint64_t)json_integer_value(v);
    return KVD_OK;
}

static kvd_status get_u32(const json_t *o, const char *field, uint32_t most, uint32_t *out,
                          kvd_err *err)
{
    uint64_t n = 0;

    KVD_TRY(get_u64(json_object_get(o, field), field, most, &n, err));
    *out = (uint32_t)n;
    return KVD_OK;
}

static kvd_status get_text(const json_t *o, const char *field, char *out, size_t cap, kvd_err *err)
{
    const json_t *v = json_object_get(o, field);
    const char   *s = json_string_value(v);

    if (!s || json_string_length(v) >= cap || strlen(s) != json_string_length(v) ||
        !is_plain(s, cap))
        return bad(err, field, "is no short printable text");
    memcpy(out, s, strlen(s) + 1);
    return KVD_OK;
}

/* An array of exactly n elements, or NULL. */
static const json_t *array_of(const json_t *v, uint64_t n)
{
    return json_is_array(v) && json_array_size(v) == n ? v : NULL;
}

static kvd_status get_row(const json_t *v, const char *field, uint64_t n, uint64_t *out,
                          kvd_err *err)
{
    if (!array_of(v, n))
        return kvd_fail(err, KVD_E_CORRUPT, 0,
                        "plan file: %s is no array of %" PRIu64
                        " entries where there should be one",
                        field, n);
    for (uint64_t i = 0; i < n; i++)
        KVD_TRY(get_u64(json_array_get(v, i), field, INT64_MAX, &out[i], err));
    return KVD_OK;
}

static kvd_status get_narrow(const json_t *v, const char *field, uint64_t n, uint32_t most,
                             uint32_t *out, kvd_err *err)
{
    if (!array_of(v, n))
        return kvd_fail(err, KVD_E_CORRUPT, 0,
                        "plan file: %s is no array of %" PRIu64
                        " entries where there should be one",
                        field, n);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t x = 0;

        KVD_TRY(get_u64(json_array_get(v, i), field, most, &x, err));
        out[i] = (uint32_t)x;
    }
    return KVD_OK;
}

/* [n_layer][n_kv_head][n] */
static kvd_status get_table(const plan_file *f, const json_t *o, const char *field, uint32_t n,
                            uint64_t *out, kvd_err *err)
{
    const uint32_t n_head = f->key.n_kv_head;
    const json_t  *table  = array_of(json_object_get(o, field), f->key.n_layer);

    if (!table)
        return bad(err, field, "is no array of n_layer rows");
    for (uint32_t l = 0; l < f->key.n_layer; l++) {
        const json_t *row = array_of(json_array_get(table, l), n_head);

        if (!row)
            return bad(err, field, "has a row that is no array of n_kv_head entries");
        for (uint32_t h = 0; h < n_head; h++)
            KVD_TRY(get_row(json_array_get(row, h), field, n, out + ((uint64_t)l * n_head + h) * n,
                            err));
    }
    return KVD_OK;
}

static kvd_status get_tables(plan_file *f, const json_t *root, kvd_err *err)
{
    const uint32_t n_layer = f->key.n_layer, n_head = f->key.n_kv_head;
    const json_t  *caps = array_of(json_object_get(root, "caps"), n_layer);

    if (!caps)
        return bad(err, "caps", "is no array of n_layer rows");
    for (uint32_t l = 0; l < n_layer; l++)
        KVD_TRY(get_narrow(json_array_get(caps, l), "caps", n_head, PLAN_MAX_DIM,
                           f->caps + (uint64_t)l * n_head, err));
    KVD_TRY(get_table(f, root, "benefit", f->n_cap, f->benefit, err));
    return get_table(f, root, "cost", f->n_cap, f->cost, err);
}

static kvd_status get_host(plan_file *f, const json_t *o, size_t len, kvd_err *err)
{
    static const char *const name[] = { "lane_records", "sizes",  "urgent_read_ns",
                                        "late_read_ns", "urgent", "late" };
    const json_t            *size   = json_object_get(o, "sizes");
    uint32_t                 n;

    KVD_TRY(check_fields(o, "host", name, KVD_COUNTOF(name), err));
    if (json_array_size(size) < 1 || json_array_size(size) > PLAN_MAX_OPTION)
        return bad(err, "sizes", "is no array of 1 to 64 sizes");
    n = (uint32_t)json_array_size(size);
    if (n_pair(&f->key) * n > len / 4) /* as above */
        return bad(err, "urgent", "has fewer entries than geometry and sizes ask for");
    KVD_TRY(plan_file_add_host(f, n, err));
    KVD_TRY(get_u32(o, "lane_records", PLAN_MAX_RECORDS, &f->lane_records, err));
    KVD_TRY(get_narrow(size, "sizes", n, PLAN_MAX_RECORDS, f->size, err));
    KVD_TRY(get_u64(json_object_get(o, "urgent_read_ns"), "urgent_read_ns", PLAN_MAX_READ_NS,
                    &f->urgent_ns, err));
    KVD_TRY(get_u64(json_object_get(o, "late_read_ns"), "late_read_ns", PLAN_MAX_READ_NS,
                    &f->late_ns, err));
    KVD_TRY(get_table(f, o, "urgent", n, f->urgent, err));
    return get_table(f, o, "late", n, f->late, err);
}

static kvd_status check_host(const plan_file *f, kvd_err *err)
{
    if (f->n_size == 0)
        return KVD_OK;
    if (f->lane_records < 1 || f->lane_records > PLAN_MAX_RECORDS)
        return bad(err, "lane_records", "is not from 1 to 2^28");
    for (uint32_t k = 0; k < f->n_size; k++) {
        if (f->size[k] > f->lane_records || (k > 0 && f->size[k] <= f->size[k - 1]))
            return bad(err, "sizes", "do not ascend to lane_records at most");
    }
    if (f->urgent_ns > PLAN_MAX_READ_NS || f->late_ns > PLAN_MAX_READ_NS)
        return bad(err, "the time of a read", "is more than 1,000 seconds");
    for (uint64_t i = 0; i < n_pair(&f->key) * f->n_size; i++) {
        if (f->urgent[i] > INT64_MAX || f->late[i] > INT64_MAX)
            return bad(err, f->late[i] > INT64_MAX ? "late" : "urgent", "leaves 63 bits");
    }
    return KVD_OK;
}

/* What the tables must say of each other, read or about to be written. */
static kvd_status check_values(const plan_file *f, kvd_err *err)
{
    const uint64_t n    = n_pair(&f->key);
    uint64_t       cost = 0;

    for (uint32_t k = 0; k < f->n_cap; k++) {
        if (f->cap[k] < 1 || f->cap[k] > PLAN_MAX_DIM || (k > 0 && f->cap[k] <= f->cap[k - 1]))
            return bad(err, "profiled_caps", "do not ascend from 1");
    }
    for (uint64_t i = 0; i < n * f->n_cap; i++) {
        if (f->benefit[i] > INT64_MAX || f->cost[i] > INT64_MAX)
            return bad(err, f->cost[i] > INT64_MAX ? "cost" : "benefit", "leaves 63 bits");
    }
    if (f->capacity > INT64_MAX || f->n_step > INT64_MAX)
        return bad(err, f->n_step > INT64_MAX ? "n_step" : "capacity_bytes", "leaves 63 bits");
    for (uint64_t g = 0; g < n; g++) {
        uint32_t k = 0;

        while (k < f->n_cap && f->cap[k] != f->caps[g])
            k++;
        if (k == f->n_cap)
            return kvd_fail(err, KVD_E_CORRUPT, 0,
                            "plan file: caps has %u, which is not among profiled_caps", f->caps[g]);
        if (!kvd_add(cost, f->cost[g * f->n_cap + k], &cost) || cost > f->capacity)
            return bad(err, "caps", "cost more than capacity_bytes");
    }
    return check_host(f, err);
}

static kvd_status get_key(plan_key *k, const json_t *root, kvd_err *err)
{
    static const char *const part[] = { "n_layer", "n_kv_head", "head_dim", "chunk_tokens" };
    const json_t            *g      = json_object_get(root, "geometry");

    KVD_TRY(check_fields(g, "geometry", part, KVD_COUNTOF(part), err));
    KVD_TRY(get_u32(g, "n_layer", PLAN_MAX_DIM, &k->n_layer, err));
    KVD_TRY(get_u32(g, "n_kv_head", PLAN_MAX_DIM, &k->n_kv_head, err));
    KVD_TRY(get_u32(g, "head_dim", PLAN_MAX_DIM, &k->head_dim, err));
    KVD_TRY(get_u32(g, "chunk_tokens", PLAN_MAX_DIM, &k->chunk_tokens, err));
    KVD_TRY(get_u64(json_object_get(root, "budget_tokens"), "budget_tokens", PLAN_MAX_TOKENS,
                    &k->budget, err));
    KVD_TRY(get_text(root, "model", k->fingerprint, sizeof(k->fingerprint), err));
    return get_text(root, "index", k->index, sizeof(k->index), err);
}

static kvd_status compare_key(const plan_key *k, const plan_key *x, kvd_err *err)
{
    const struct {
        const char *name;
        uint64_t    got, want;
    } field[] = {
        { "n_layer", k->n_layer, x->n_layer },
        { "n_kv_head", k->n_kv_head, x->n_kv_head },
        { "head_dim", k->head_dim, x->head_dim },
        { "chunk_tokens", k->chunk_tokens, x->chunk_tokens },
        { "budget_tokens", k->budget, x->budget },
    };

    if (strcmp(k->fingerprint, x->fingerprint) != 0)
        return kvd_fail(err, KVD_E_INVAL, 0, "plan file: model is %s, this one is %s",
                        k->fingerprint, x->fingerprint);
    if (strcmp(k->index, x->index) != 0)
        return kvd_fail(err, KVD_E_INVAL, 0, "plan file: index is %s, expected %s", k->index,
                        x->index);
    for (size_t i = 0; i < KVD_COUNTOF(field); i++) {
        if (field[i].got != field[i].want)
            return kvd_fail(err, KVD_E_INVAL, 0, "plan file: %s is %" PRIu64 ", expected %" PRIu64,
                            field[i].name, field[i].got, field[i].want);
    }
    return KVD_OK;
}

/* Format and version come first: another version may have other fields. */
static kvd_status check_version(const json_t *root, kvd_err *err)
{
    const char *format  = json_string_value(json_object_get(root, "format"));
    uint64_t    version = 0;

    if (!format || strcmp(format, FORMAT) != 0)
        return bad(err, "format", "is not \"" FORMAT "\"");
    KVD_TRY(get_u64(json_object_get(root, "version"), "version", INT32_MAX, &version, err));
    if (version != PLAN_FILE_VERSION)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "plan file: version is %" PRIu64 ", this build reads %d", version,
                        PLAN_FILE_VERSION);
    return KVD_OK;
}

static kvd_status read_root(plan_file *f, const json_t *root, size_t len, const plan_key *expect,
                            kvd_err *err)
{
    static const char *const name[] = {
        "format",        "version",        "model", "geometry", "index", "budget_tokens", "n_step",
        "profiled_caps", "capacity_bytes", "caps",  "benefit",  "cost",  "host"
    }; /* optional */
    const json_t *cap  = json_object_get(root, "profiled_caps");
    const json_t *host = json_object_get(root, "host");
    plan_key      key  = { 0 };

    KVD_TRY(check_version(root, err));
    KVD_TRY(check_fields(root, "the file", name, KVD_COUNTOF(name) - (host ? 0 : 1), err));
    KVD_TRY(get_key(&key, root, err));
    if (expect)
        KVD_TRY(compare_key(&key, expect, err));
    if (json_array_size(cap) < 1 || json_array_size(cap) > PLAN_MAX_OPTION)
        return bad(err, "profiled_caps", "is no array of 1 to 64 caps");
    /* Memory is taken in proportion to the text: two tables, an entry takes two bytes at least. */
    if (n_pair(&key) * json_array_size(cap) > len / 4)
        return bad(err, "benefit", "has fewer entries than geometry and profiled_caps ask for");
    KVD_TRY(plan_file_init(f, &key, (uint32_t)json_array_size(cap), err));
    KVD_TRY(get_narrow(cap, "profiled_caps", f->n_cap, PLAN_MAX_DIM, f->cap, err));
    KVD_TRY(get_u64(json_object_get(root, "n_step"), "n_step", INT64_MAX, &f->n_step, err));
    KVD_TRY(get_u64(json_object_get(root, "capacity_bytes"), "capacity_bytes", INT64_MAX,
                    &f->capacity, err));
    KVD_TRY(get_tables(f, root, err));
    if (host)
        KVD_TRY(get_host(f, host, len, err));
    return check_values(f, err);
}

kvd_status plan_file_read(plan_file *f, const char *text, size_t len, const plan_key *expect,
                          kvd_err *err)
{
    kvd_json_texts texts = { 0 };
    kvd_json_error why;
    json_t        *root;
    kvd_status     st;

    *f = (plan_file){ 0 };
    if (len > PLAN_FILE_MAX_BYTES)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "plan file: %zu bytes, at most %u", len,
                        PLAN_FILE_MAX_BYTES);
    root = kvd_json_read(&texts, text, len, KVD_JSON_UNIQUE, &why);
    if (root)
        st = read_root(f, root, len, expect, err);
    else
        st = kvd_fail(err, why.no_memory ? KVD_E_NOMEM : KVD_E_CORRUPT, 0, "plan file: line %u: %s",
                      why.line, why.text);
    json_decref(root);
    kvd_json_texts_free(&texts);
    if (st != KVD_OK)
        plan_file_free(f);
    return st;
}
