/* SPDX-License-Identifier: Apache-2.0 */
/* trace.h - what happened when: spans of time in a ring of fixed size, shown as Chrome trace events
 * (which Perfetto opens).
 *
 * Adding allocates nothing; when the ring is full the oldest spans go.  The host's spans nest: one
 * that begins within another ends within it; reads of the disk, which run beside, are apart, and so
 * are a device's streams.
 * Every function takes a NULL trace, and then does nothing.  One thread at a time. */
#ifndef KVD_BASE_TRACE_H
#define KVD_BASE_TRACE_H

#include <stddef.h>

#include "base/buf.h"
#include "base/misc.h"

#define KVD_TRACE_EVENTS  (1u << 18) /* of one trace: about 1,500 decode steps of 24 layers */
#define KVD_TRACE_NOWHERE UINT32_MAX /* in place of a layer */

typedef enum kvd_trace_kind {
    KVD_TRACE_STEP,       /* a decode step; n: its tokens */
    KVD_TRACE_PREFILL,    /* a batch through all layers, or a prompt layer by layer */
    KVD_TRACE_BATCH,      /* of a prompt that goes layer by layer */
    KVD_TRACE_RESTORE,    /* a prefix from the cache; n: its tokens */
    KVD_TRACE_LAYER,      /* n: tokens */
    KVD_TRACE_QKV,        /* norm, projections, RoPE, K and V stored */
    KVD_TRACE_ATTENTION,  /* to everything */
    KVD_TRACE_STAGE,      /* a layer's records brought up for that */
    KVD_TRACE_SELECT,     /* n: rows */
    KVD_TRACE_FETCH,      /* urgent misses; n: rows */
    KVD_TRACE_ATTEND,     /* to window and urgent misses */
    KVD_TRACE_ZONE,       /* of that: to the estimation zone */
    KVD_TRACE_FETCH_LATE, /* what the next step will attend to */
    KVD_TRACE_FFN,
    KVD_TRACE_LOGITS,
    KVD_TRACE_SEAL,    /* n: blocks */
    KVD_TRACE_TAIL,    /* a sequence's tail goes to the cache */
    KVD_TRACE_IO_WAIT, /* for reads of the disk */
    KVD_TRACE_READ     /* a batch of reads in flight; n: records */
} kvd_trace_kind;

typedef struct kvd_trace kvd_trace;

kvd_trace *kvd_trace_open(void); /* NULL: no memory */
void       kvd_trace_close(kvd_trace *t);
size_t     kvd_trace_bytes(void); /* what an open one takes */

/* The time, or 0 where nothing is traced. */
static inline uint64_t kvd_trace_now(const kvd_trace *t)
{
    return t ? kvd_now_ns() : 0;
}

/* A span from t0 to t1, as kvd_trace_now() or kvd_now_ns() told them. */
void kvd_trace_add(kvd_trace *t, kvd_trace_kind kind, uint64_t t0, uint64_t t1, uint32_t layer,
                   uint32_t n);
/* The same on a track beside the host's, KVD_TRACE_TRACKS of them: what a device does.  Times come
 * from another clock, so they may be somewhat off; what begins before the trace begins with it. */
#define KVD_TRACE_MAIN   0u /* streams: the main one */
#define KVD_TRACE_URGENT 1u /* records that a step waits for */
#define KVD_TRACE_LATE   2u /* records that it does not wait for */
#define KVD_TRACE_TRACKS 3u
void kvd_trace_add_track(kvd_trace *t, uint32_t track, kvd_trace_kind kind, uint64_t t0,
                         uint64_t t1, uint32_t layer, uint32_t n);
/* All spans as a JSON object, "traceEvents" in it. */
void kvd_trace_to_json(const kvd_trace *t, kvd_buf *b);

#endif
