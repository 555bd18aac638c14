/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c - see trace.h.  Spans are kept in the order in which they ended. */
#include "base/trace.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/check.h"

typedef struct span {
    uint64_t t0, t1;
    uint32_t layer, n;
    uint16_t kind, thread; /* 1: the host; 2 and more: tracks */
} span;

struct kvd_trace {
    uint64_t start_ns, n; /* n: added so far */
    span     ring[KVD_TRACE_EVENTS];
};

size_t kvd_trace_bytes(void)
{
    return sizeof(kvd_trace);
}

kvd_trace *kvd_trace_open(void)
{
    kvd_trace *t = kvd_malloc(sizeof(*t));

    if (!t)
        return NULL;
    t->start_ns = kvd_now_ns();
    t->n        = 0;
    return t;
}

void kvd_trace_close(kvd_trace *t)
{
    kvd_free(t);
}

void kvd_trace_add(kvd_trace *t, kvd_trace_kind kind, uint64_t t0, uint64_t t1, uint32_t layer,
                   uint32_t n)
{
    if (!t)
        return;
    kvd_assert(t0 >= t->start_ns && t1 >= t0);
    t->ring[t->n++ % KVD_TRACE_EVENTS] = (span){ t0, t1, layer, n, (uint16_t)kind, 1 };
}

void kvd_trace_add_track(kvd_trace *t, uint32_t track, kvd_trace_kind kind, uint64_t t0,
                         uint64_t t1, uint32_t layer, uint32_t n)
{
    if (!t)
        return;
    t0 = t0 < t->start_ns ? t->start_ns : t0;
    t1 = t1 < t0 ? t0 : t1;

    t->ring[t->n++ % KVD_TRACE_EVENTS] =
        (span){ t0, t1, layer, n, (uint16_t)kind, (uint16_t)(2 + track) };
}

/* Microseconds with the digits of nanoseconds. */
static void put_time(kvd_buf *b, const char *name, uint64_t ns)
{
    kvd_buf_printf(b, ",\"%s\":%" PRIu64 ".%03u", name, ns / 1000, (unsigned)(ns % 1000));
}

static void put_args(kvd_buf *b, const span *s)
{
    if (s->layer == KVD_TRACE_NOWHERE)
        kvd_buf_printf(b, ",\"args\":{\"n\":%u}}", s->n);
    else
        kvd_buf_printf(b, ",\"args\":{\"layer\":%u,\"n\":%u}}", s->layer, s->n);
}

static void put_head(kvd_buf *b, const char *name, const char *group, char phase, uint32_t thread)
{
    kvd_buf_printf(b, ",\n{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"%c\",\"pid\":1,\"tid\":%u", name,
                   group, phase, thread);
}

/* Names of the threads there are. */
static void put_threads(kvd_buf *b, const kvd_trace *t)
{
    static const char *const name[] = { "host", "device: main", "device: urgent misses",
                                        "device: late misses" };
    bool                     has[KVD_TRACE_TRACKS + 2] = { false };

    for (uint64_t i = 0; t && i < t->n && i < KVD_TRACE_EVENTS; i++)
        has[t->ring[i].thread] = true;
    for (uint32_t i = 1; i < KVD_COUNTOF(has); i++) {
        if (has[i])
            kvd_buf_printf(b,
                           ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":%u,"
                           "\"args\":{\"name\":\"%s\"}}",
                           i, name[i - 1]);
    }
}

static void put_span(kvd_buf *b, const kvd_trace *t, uint64_t i)
{
    static const char *const name[] = { "decode step", "prefill",  "batch",     "restore",
                                        "layer",       "qkv",      "attention", "stage",
                                        "select",      "fetch",    "attend",    "zone",
                                        "fetch late",  "ffn",      "logits",    "seal",
                                        "store tail",  "I/O wait", "disk read" };
    const span              *s      = &t->ring[i % KVD_TRACE_EVENTS];

    if (s->kind == KVD_TRACE_READ) { /* beside the others: begin and end with an id */
        put_head(b, name[s->kind], "disk", 'b', s->thread);
        put_time(b, "ts", s->t0 - t->start_ns);
        kvd_buf_printf(b, ",\"id\":%" PRIu64, i);
        put_args(b, s);
        put_head(b, name[s->kind], "disk", 'e', s->thread);
        put_time(b, "ts", s->t1 - t->start_ns);
        kvd_buf_printf(b, ",\"id\":%" PRIu64 "}", i);
        return;
    }
    put_head(b, name[s->kind], s->thread > 1 ? "device" : "engine", 'X', s->thread);
    put_time(b, "ts", s->t0 - t->start_ns);
    put_time(b, "dur", s->t1 - s->t0);
    put_args(b, s);
}

void kvd_trace_to_json(const kvd_trace *t, kvd_buf *b)
{
    const uint64_t n       = t ? t->n : 0;
    const uint64_t dropped = n > KVD_TRACE_EVENTS ? n - KVD_TRACE_EVENTS : 0;

    kvd_buf_printf(b,
                   "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"dropped\":%" PRIu64
                   "},\"traceEvents\":[\n"
                   "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"tid\":1,"
                   "\"args\":{\"name\":\"kvdrive\"}}",
                   dropped);
    put_threads(b, t);
    for (uint64_t i = dropped; i < n && !b->oom; i++)
        put_span(b, t, i);
    kvd_buf_puts(b, "\n]}\n");
}
