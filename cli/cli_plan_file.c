/* SPDX-License-Identifier: Apache-2.0 */
/* cli_plan_file.c - what a plan file belongs to. */
#include <inttypes.h>
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
