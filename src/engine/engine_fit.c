/* SPDX-License-Identifier: Apache-2.0 */
/* engine_fit.c - a session beside the weights in the memory of a device that has its own: what the
 * KV cache may take, everything resident if it fits, else in tiers.
 *
 * Pure but for asking the backend what is there.  Owns nothing.  Thread: the session's. */
#include <inttypes.h>

#include "engine/engine.h"

/* What a session takes there besides its KV, scratch that is held already included. */
static uint64_t fixed_bytes(const kvd_model *m, const kvd_session_params *p,
                            const kvd_backend_limits *lim, bool resident)
{
    uint64_t device, shared;

    engine_buffers_bytes(m, p, lim->n_token, resident, &device, &shared);
    return device + m->be->ops->reserve_bytes(m->be, lim);
}

static bool fits(const kvd_model *m, const kvd_session_params *p, const kvd_backend_limits *lim,
                 const kv_sizes *kv)
{
    return kv->device_bytes + fixed_bytes(m, p, lim, kv->resident) <= engine_model_room(m);
}

/* Says what would do. */
static kvd_status refuse(const kvd_model *m, const kvd_session_params *p,
                         const kvd_backend_limits *lim, const kv_sizes *kv, kvd_err *err)
{
    const uint64_t    fixed = fixed_bytes(m, p, lim, kv->resident);
    kvd_device_memory d;
    uint64_t          limit;

    m->be->ops->memory(m->be, &d);
    limit = m->device_memory ? m->device_memory : d.total;
    return kvd_fail(err, KVD_E_NOMEM, 0,
                    "the device's memory of %" PRIu64 " MiB (device_memory) is too small, %" PRIu64
                    " MiB of it free: %" PRIu64 " MiB are needed (context %" PRIu64
                    ", weights and other sessions %" PRIu64 ", KV cache %" PRIu64
                    ", buffers and scratch %" PRIu64
                    "); less is needed by a smaller batch (n_batch), budget (budget), window (cap) "
                    "or context (n_ctx) and by fewer sequences (n_seq)",
                    limit >> 20, d.free >> 20,
                    ((d.context + d.held + kv->device_bytes + fixed) >> 20) + 1, d.context >> 20,
                    d.held >> 20, kv->device_bytes >> 20, fixed >> 20);
}

kvd_status engine_fit(const kvd_model *m, const kvd_session_params *p,
                      const kvd_backend_limits *lim, kv_params *kv, kv_sizes *out, kvd_err *err)
{
    uint64_t   room, fixed;
    kvd_status st;

    if (m->be->unified || kv->device_bytes) {
        KVD_TRY(kv_plan(kv, out, err));
        return m->be->unified || fits(m, p, lim, out) ? KVD_OK : refuse(m, p, lim, out, err);
    }
    KVD_TRY(kv_plan(kv, out, err));
    if (fits(m, p, lim, out))
        return KVD_OK;
    room             = engine_model_room(m);
    fixed            = fixed_bytes(m, p, lim, false);
    kv->device_bytes = room > fixed ? room - fixed : 1; /* 0 would be no limit */
    st               = kv_plan(kv, out, err);
    return st != KVD_OK && out->device_bytes > kv->device_bytes ? refuse(m, p, lim, out, err) : st;
}
