/* SPDX-License-Identifier: Apache-2.0 */
/* cli_bench_row.c - the table of kvdrive bench --shape: settings as text, then numbers.  The table
 * for people has what a glance wants, CSV and JSON have every column. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* Options that make a case, besides those that --sweep names. */
static const char *const settings[] = { "shape",         "shape-type", "reuse",     "attention",
                                        "budget",        "cap",        "chunk",     "index",
                                        "fetch",         "attend",     "kv-record", "kv-device",
                                        "device-memory", "kv-host",    "schedule",  "micro-batch",
                                        "lookup" };

typedef struct column {
    const char *name; /* of CSV and JSON */
    const char *head; /* of the table for people; NULL: not there */
    int         digits;
} column;

static const column columns[BENCH_N_NUMBER] = {
    [BENCH_CONTEXT]      = { "context", "context", 0 },
    [BENCH_BATCH]        = { "batch", "batch", 0 },
    [BENCH_TOK_S]        = { "tok_s", "t/s", 1 },
    [BENCH_MS]           = { "ms", "ms/step", 3 },
    [BENCH_MS_P10]       = { "ms_p10", "p10", 3 },
    [BENCH_MS_P90]       = { "ms_p90", "p90", 3 },
    [BENCH_N]            = { "n", "n", 0 },
    [BENCH_HITS]         = { "hit_pct", "hits %", 1 },
    [BENCH_STAGE_MS]     = { "qkv_ms", "qkv", 3 },
    [BENCH_STAGE_MS + 1] = { "select_ms", "select", 3 },
    [BENCH_STAGE_MS + 2] = { "fetch_ms", "fetch", 3 },
    [BENCH_STAGE_MS + 3] = { "attend_ms", "attend", 3 },
    [BENCH_STAGE_MS + 4] = { "ffn_ms", "ffn", 3 },
    [BENCH_STAGE_MS + 5] = { "logits_ms", "logits", 3 },
    [BENCH_STAGE_MB]     = { "qkv_mb", NULL, 2 },
    [BENCH_STAGE_MB + 1] = { "select_mb", NULL, 2 },
    [BENCH_STAGE_MB + 2] = { "fetch_mb", "MB fetched", 2 },
    [BENCH_STAGE_MB + 3] = { "attend_mb", NULL, 2 },
    [BENCH_STAGE_MB + 4] = { "ffn_mb", NULL, 2 },
    [BENCH_STAGE_MB + 5] = { "logits_mb", NULL, 2 },
    [BENCH_SUM_MS]       = { "sum_ms", NULL, 3 },
    [BENCH_OF_SUM]       = { "step_over_sum", "step/sum", 3 },
    [BENCH_OFF_MS]       = { "no_fetch_ms", NULL, 3 },
    [BENCH_EXPOSED]      = { "exposed_pct", "exposed %", 1 },
    [BENCH_PCIE]         = { "pcie_gbs", "PCIe GB/s", 1 },
    [BENCH_HBM]          = { "hbm_gbs", "HBM GB/s", 0 },
    [BENCH_PCIE_RATE]    = { "pcie_rate_gbs", "of", 1 },
    [BENCH_ROOF_MS]      = { "roof_ms", NULL, 3 },
    [BENCH_ROOF]         = { "roof_pct", "roof %", 1 },
    [BENCH_DEVICE_MIB]   = { "kv_device_mib", NULL, 0 },
    [BENCH_HOST_MIB]     = { "kv_host_mib", NULL, 0 },
    [BENCH_FILL_S]       = { "fill_s", NULL, 2 },
    [BENCH_DISK_RECORDS] = { "disk_records", NULL, 1 },
    [BENCH_DISK_MB]      = { "disk_mb", NULL, 2 },
    [BENCH_DISK_WAIT]    = { "disk_wait_ms", NULL, 3 },
};

/* Settings that the table for people shows: those that --sweep names. */
static bool is_swept(const kvd_opts *o, const char *name)
{
    const char  *s = kvd_opts_text(o, "sweep");
    const size_t n = strlen(name);

    while (s && *s) {
        if (strncmp(s, name, n) == 0 && s[n] == '=')
            return true;
        s = strchr(s, ';');
        s = s ? s + 1 : NULL;
    }
    return false;
}

/* The options that are columns, in the order of the table; people are shown what changes. */
static bool is_column(const kvd_opts *o, uint32_t i, bool all)
{
    const char *name = o->table[i].name;

    if (!(o->table[i].commands & o->command))
        return false;
    for (size_t k = 0; all && k < KVD_COUNTOF(settings); k++) {
        if (strcmp(settings[k], name) == 0)
            return true;
    }
    return is_swept(o, name);
}

static const char *setting(const kvd_opts *o, uint32_t i)
{
    return o->value[i].text ? o->value[i].text : "";
}

static void print_number(const char *none, double x, int digits)
{
    if (isfinite(x))
        printf("%.*f", digits, x);
    else
        printf("%s", none);
}

static void table_row(bool first, const kvd_opts *o, const double *number)
{
    for (int head = first ? 0 : 2; head < 3; head++) {
        for (uint32_t i = 0; i < o->n; i++) {
            if (is_column(o, i, false))
                printf("| %s ", head == 0 ? o->table[i].name : head == 1 ? "---" : setting(o, i));
        }
        for (int i = 0; i < BENCH_N_NUMBER; i++) {
            if (!columns[i].head)
                continue;
            printf("| ");
            if (head == 2)
                print_number("-", number[i], columns[i].digits);
            else
                printf("%s", head ? "---:" : columns[i].head);
            printf(" ");
        }
        printf("|\n");
    }
}

static void csv_row(bool first, const kvd_opts *o, const double *number)
{
    for (int head = first ? 0 : 1; head < 2; head++) {
        for (uint32_t i = 0; i < o->n; i++) {
            if (is_column(o, i, true))
                printf("%s,", head ? setting(o, i) : o->table[i].name);
        }
        for (int i = 0; i < BENCH_N_NUMBER; i++) {
            printf("%s", i ? "," : "");
            if (head)
                print_number("", number[i], columns[i].digits + 2);
            else
                printf("%s", columns[i].name);
        }
        printf("\n");
    }
}

static void json_row(bool first, const kvd_opts *o, const double *number)
{
    printf("%s{", first ? "[" : ",\n ");
    for (uint32_t i = 0; i < o->n; i++) {
        json_t *text = is_column(o, i, true) ? json_string(setting(o, i)) : NULL;
        char   *dump = text ? json_dumps(text, JSON_ENCODE_ANY) : NULL;

        if (dump)
            printf("\"%s\":%s,", o->table[i].name, dump);
        free(dump);
        json_decref(text);
    }
    for (int i = 0; i < BENCH_N_NUMBER; i++) {
        printf("%s\"%s\":", i ? "," : "", columns[i].name);
        print_number("null", number[i], columns[i].digits + 2);
    }
    printf("}");
}

void cli_bench_row(const char *form, bool first, const kvd_opts *o, const double *number)
{
    if (strcmp(form, "md") == 0)
        table_row(first, o, number);
    else if (strcmp(form, "csv") == 0)
        csv_row(first, o, number);
    else
        json_row(first, o, number);
    fflush(stdout);
}

void cli_bench_head(const char *form, const kvd_model *m, const kvd_opts *o)
{
    kvd_model_info i = { .struct_size = sizeof(i) };

    kvd_model_get_info(m, &i);
    if (strcmp(form, "md") == 0)
        printf(
            "%s: %.2fB parameters, %s, %.2f GiB; %s %s.  q, K and V are made up, reuse %s.\n"
            "Stages in ms, from a run of their own in which fetches wait in their place; exposed: "
            "(step - step without fetches) / fetch.\n\n",
            i.name, (double)i.n_param * 1e-9, i.file_type,
            (double)i.weight_bytes / (1024.0 * 1024.0 * 1024.0), i.backend, i.isa,
            is_swept(o, "reuse") ? "as listed" : kvd_opts_text(o, "reuse"));
}

void cli_bench_foot(const char *form, bool any)
{
    if (any && strcmp(form, "json") == 0)
        puts("]");
}
