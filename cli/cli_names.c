/* SPDX-License-Identifier: Apache-2.0 */
/* cli_names.c - options in place of the library's fields.  Its messages have the name of a field
 * alone in parentheses, as in "batch of 0 tokens (n_batch)". */
#include <string.h>

#include "cli.h"

/* A field has several options where commands differ; the first that the command takes counts. */
static const struct {
    const char *field, *option;
} names[] = {
    /* kvd_model_params */
    { "path", "model" },
    { "backend", "backend" },
    { "cpu_isa", "cpu-isa" },
    { "chat_template", "chat-template" },
    { "pre_tokenizer", "pre-tokenizer" },
    { "n_thread", "threads" },
    { "rope_scaling", "rope-scaling" },
    { "rope_factor", "rope-scale" },
    { "rope_base", "rope-freq-base" },
    { "device_memory", "device-memory" },
    /* kvd_session_params */
    { "n_ctx", "ctx-size" },
    { "n_seq", "parallel" },
    { "n_seq", "n-parallel" },
    { "n_batch", "batch-size" },
    { "kv_type", "cache-type-k" },
    { "kv_device", "kv-device" },
    { "kv_host", "kv-host" },
    { "kv_record", "kv-record" },
    { "chunk_tokens", "chunk" },
    { "n_sink", "sink" },
    { "cache_dir", "cache-dir" },
    { "cache_bytes", "kv-disk" },
    { "cache_min_free", "kv-disk-free" },
    { "disk_lag", "disk-lag" },
    { "lookup", "lookup" },
    { "host_records", "plan" },
    /* kvd_attention_params */
    { "budget", "budget" },
    { "budget_share", "budget" },
    { "cap", "cap" },
    { "caps", "plan" },
    { "evict", "evict" },
    { "min_mass", "min-mass" },
    { "kvd_attention_params.top_p", "select-top-p" },
    { "index", "index" },
    { "group_rule", "group-rule" },
    { "zone", "zone" },
    /* kvd_sampler_params */
    { "temperature", "temp" },
    { "top_p", "top-p" },
    { "min_p", "min-p" },
    { "typical_p", "typical" },
    { "top_n_sigma", "top-nsigma" },
    { "xtc_probability", "xtc-probability" },
    { "xtc_threshold", "xtc-threshold" },
    { "dry_multiplier", "dry-multiplier" },
    { "dry_base", "dry-base" },
    { "dry_allowed_length", "dry-allowed-length" },
    { "dry_breaker", "dry-sequence-breaker" },
    { "repeat_penalty", "repeat-penalty" },
    { "presence_penalty", "presence-penalty" },
    { "frequency_penalty", "frequency-penalty" },
    { "bias", "logit-bias" },
    /* others, and arguments of functions */
    { "reuse", "reuse" },
    { "dir", "cache-dir" },
    { "kvd_tokenize", "raw" },
};

_Static_assert(CLI_NAMES_BYTES >= 2 * KVD_ERR_MSG_BYTES, "options are longer than fields");

static uint32_t command; /* bit of the one that runs */

void cli_names_begin(uint32_t bit)
{
    command = bit;
}

/* "--kv-device", or "-c" where there is a letter for it; NULL: the command has no such option. */
static const char *spelling_of(const char *option, char out[64])
{
    for (uint32_t i = 0; i < cli_n_option; i++) {
        const kvd_opt *o = &cli_options[i];

        if (!(o->commands & command) || strcmp(o->name, option) != 0)
            continue;
        if (o->alias[0] == '-' && o->alias[1] && (o->alias[2] == 0 || o->alias[2] == ' '))
            snprintf(out, 64, "%.2s", o->alias);
        else
            snprintf(out, 64, "--%s", o->name);
        return out;
    }
    return NULL;
}

static const char *option_of(const char *field, size_t len, char out[64])
{
    const char *found = NULL;

    for (size_t i = 0; i < KVD_COUNTOF(names) && !found; i++)
        if (strlen(names[i].field) == len && memcmp(names[i].field, field, len) == 0)
            found = spelling_of(names[i].option, out);
    return found;
}

const char *cli_name_options(const char *msg, char *out)
{
    size_t n = 0;

    for (const char *s = msg; *s && n + 64 < CLI_NAMES_BYTES;) {
        const char  *end = *s == '(' ? strchr(s, ')') : NULL;
        char         spelling[64];
        const size_t len    = end ? (size_t)(end - s) - 1 : 0;
        const char  *option = end ? option_of(s + 1, len, spelling) : NULL;

        if (!option) {
            out[n++] = *s++;
            continue;
        }
        n += (size_t)snprintf(out + n, CLI_NAMES_BYTES - n, "(%s)", option);
        s = end + 1;
    }
    out[n] = 0;
    return out;
}
