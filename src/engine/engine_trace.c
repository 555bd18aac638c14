/* SPDX-License-Identifier: Apache-2.0 */
/* engine_trace.c - a session's trace: made with it, written when it is closed.
 * Thread: the session's. */
#include <string.h>

#include "engine/engine.h"

#define SPANS_OF_LAYER 128u

/* Of a batch: layers with all micro-batches there can be, and what is around them. */
static uint32_t spans_of(const kvd_model *m)
{
    return (model_get_hparams(m->net)->n_layer + 1) * SPANS_OF_LAYER;
}

uint64_t engine_trace_bytes(const kvd_model *m)
{
    return kvd_trace_bytes() + (m->be->unified ? 0 : 32ull * spans_of(m));
}

kvd_status engine_trace_open(kvd_session *s, const char *path, kvd_err *err)
{
    if (!path)
        return KVD_OK;
    /* So that a path that cannot be written to is an error now, and not at the end. */
    KVD_TRY(os_file_replace(path, "{}\n", 3, err));
    s->trace_path = kvd_strndup(path, strlen(path));
    s->trace      = kvd_trace_open();
    if (!s->trace || !s->trace_path)
        return kvd_fail(err, KVD_E_NOMEM, 0, "session: no memory for its trace");
    if (s->model->be->unified)
        return KVD_OK;
    return kvd_stamps_open(&s->stamps, s->model->be, spans_of(s->model), err);
}

void engine_trace_close(kvd_session *s)
{
    kvd_buf b   = { 0 };
    kvd_err err = { 0 };

    if (s->trace && s->trace_path) {
        kvd_trace_to_json(s->trace, &b);
        if (b.oom)
            kvd_log(KVD_LOG_WARN, "%s: no memory to write the trace", s->trace_path);
        else if (os_file_replace(s->trace_path, b.data, b.len, &err) != KVD_OK)
            kvd_log(KVD_LOG_WARN, "the trace is lost: %s", err.msg);
        kvd_buf_free(&b);
    }
    kvd_stamps_close(s->stamps);
    kvd_trace_close(s->trace);
    kvd_free(s->trace_path);
}
