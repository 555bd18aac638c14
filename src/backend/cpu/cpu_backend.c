/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_backend.c - opening the backends "cpu" and "ref"; their memory, streams and events.
 *
 * Owns: the backend object, its thread pool and its scratch.  Scratch only grows, and only in
 * reserve; ops assert that what they need was reserved.
 * Ops have run when they return, so streams and events carry no state.
 * Thread: one at a time per backend. */
#include "backend/cpu/cpu.h"

#include <inttypes.h>
#include <stdio.h>

#include "backend/cpu/cpu_attn.h"
#include "backend/cpu/cpu_index.h"
#include "backend/cpu/cpu_ref.h"

#define CPU_N_THREAD_MAX 1024

struct kvd_event {
    cpu_backend *be;
};

/* ---- scratch --------------------------------------------------------------------- */

static uint64_t cpu_reserve_bytes_mm(const cpu_backend *be, const kvd_backend_limits *lim)
{
    return be->base.ops == &cpu_ref_ops ? cpu_ref_mm_scratch_bytes(lim)
                                        : cpu_matmul_scratch_bytes(be, lim);
}

static uint64_t cpu_reserve_bytes_at(const cpu_backend *be, const kvd_backend_limits *lim)
{
    const uint64_t window = cpu_window_scratch_bytes(&be->base, lim);

    if (be->base.ops == &cpu_ref_ops)
        return kvd_max_u64(cpu_ref_at_scratch_bytes(lim), window);
    return kvd_max_u64(cpu_attn_scratch_bytes(be, lim),
                       kvd_max_u64(window, cpu_span_scratch_bytes(be, lim)));
}

static uint64_t cpu_reserve_bytes_ix(const cpu_backend *be, const kvd_backend_limits *lim)
{
    const uint64_t select = be->base.ops == &cpu_ref_ops ? cpu_ref_select_scratch_bytes(lim)
                                                         : cpu_select_scratch_bytes(be, lim);

    return kvd_max_u64(cpu_index_build_scratch_bytes(be, lim), select);
}

static uint64_t cpu_reserve_bytes(const kvd_backend *b, const kvd_backend_limits *lim)
{
    const cpu_backend *be = (const cpu_backend *)(const void *)b;

    return cpu_reserve_bytes_mm(be, lim) + cpu_reserve_bytes_at(be, lim) +
           cpu_reserve_bytes_ix(be, lim);
}

/* The old scratch stays on failure: nothing in it outlives an op, but it may still be needed. */
static kvd_status cpu_grow(void **ptr, uint64_t *have, uint64_t want, const char *what,
                           kvd_err *err)
{
    void *fresh;

    if (want <= *have)
        return KVD_OK;
    fresh = kvd_pages_alloc((size_t)want);
    if (!fresh)
        return kvd_fail(err, KVD_E_NOMEM, 0, "cpu backend: %" PRIu64 " bytes of %s scratch", want,
                        what);
    if (*ptr)
        kvd_pages_free(*ptr, (size_t)*have);
    *ptr  = fresh;
    *have = want;
    return KVD_OK;
}

static kvd_status cpu_reserve(kvd_backend *b, const kvd_backend_limits *lim, kvd_err *err)
{
    cpu_backend *be = (cpu_backend *)(void *)b;

    if (lim->head_dim > CPU_ATTN_HEAD_DIM_MAX)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "cpu backend: heads of %" PRIu32 " elements; the limit is %u",
                        lim->head_dim, CPU_ATTN_HEAD_DIM_MAX);
    KVD_TRY(cpu_grow(&be->mm_scratch, &be->mm_scratch_bytes, cpu_reserve_bytes_mm(be, lim),
                     "matmul", err));
    KVD_TRY(cpu_grow(&be->at_scratch, &be->at_scratch_bytes, cpu_reserve_bytes_at(be, lim),
                     "attention", err));
    return cpu_grow(&be->ix_scratch, &be->ix_scratch_bytes, cpu_reserve_bytes_ix(be, lim), "index",
                    err);
}

/* ---- memory ---------------------------------------------------------------------- */

/* On a CPU all kinds that can be allocated are the same anonymous pages. */
static kvd_status cpu_mem_alloc(kvd_backend *b, kvd_mem_kind kind, uint64_t bytes, kvd_mem *out,
                                kvd_err *err)
{
    (void)b;
    *out = (kvd_mem){ 0 };
    if (kind != KVD_MEM_HOST && kind != KVD_MEM_PINNED && kind != KVD_MEM_DEVICE)
        return kvd_fail(err, KVD_E_INVAL, 0, "cpu backend: memory kind %d cannot be allocated",
                        (int)kind);
    if (bytes > SIZE_MAX / 2)
        return kvd_fail(err, KVD_E_NOMEM, 0, "cpu backend: %" PRIu64 " bytes", bytes);
    if (bytes) {
        out->ptr = kvd_pages_alloc((size_t)bytes);
        if (!out->ptr)
            return kvd_fail(err, KVD_E_NOMEM, 0, "cpu backend: %" PRIu64 " bytes", bytes);
    }
    out->bytes = bytes;
    out->kind  = kind;
    return KVD_OK;
}

static void cpu_mem_free(kvd_backend *b, kvd_mem *m)
{
    (void)b;
    if (m->kind != KVD_MEM_NONE && m->kind != KVD_MEM_MAP && m->ptr)
        kvd_pages_free(m->ptr, (size_t)m->bytes);
    *m = (kvd_mem){ 0 };
}

/* None of its own. */
static void cpu_memory(const kvd_backend *b, kvd_device_memory *out)
{
    (void)b;
    *out = (kvd_device_memory){ 0 };
}

static kvd_status cpu_copy(kvd_stream *st, kvd_mem dst, uint64_t dst_off, kvd_mem src,
                           uint64_t src_off, uint64_t bytes, kvd_err *err)
{
    (void)st;
    (void)err;
    kvd_assert(dst.kind != KVD_MEM_MAP);
    kvd_assert(dst_off <= dst.bytes && bytes <= dst.bytes - dst_off);
    kvd_assert(src_off <= src.bytes && bytes <= src.bytes - src_off);
    if (bytes)
        memmove((uint8_t *)dst.ptr + dst_off, (const uint8_t *)src.ptr + src_off, (size_t)bytes);
    return KVD_OK;
}

static kvd_status cpu_fill(kvd_stream *st, kvd_mem mem, uint64_t off, uint64_t pitch,
                           uint64_t row_bytes, uint64_t n_row, uint8_t value, kvd_err *err)
{
    (void)st;
    (void)err;
    for (uint64_t i = 0; i < n_row; i++) {
        kvd_assert(off + i * pitch + row_bytes <= mem.bytes);
        memset((uint8_t *)mem.ptr + off + i * pitch, value, (size_t)row_bytes);
    }
    return KVD_OK;
}

/* ---- streams and events ---------------------------------------------------------- */

static kvd_status cpu_stream_open(kvd_backend *b, kvd_stream **out, kvd_err *err)
{
    kvd_stream *st = kvd_malloc(sizeof(*st));

    *out = NULL;
    if (!st)
        return kvd_fail(err, KVD_E_NOMEM, 0, "cpu backend: stream");
    st->be = (cpu_backend *)(void *)b;
    *out   = st;
    return KVD_OK;
}

static void cpu_stream_close(kvd_stream *st)
{
    kvd_free(st);
}

static kvd_status cpu_stream_sync(kvd_stream *st, kvd_err *err)
{
    (void)st;
    (void)err;
    return KVD_OK;
}

static kvd_status cpu_event_open(kvd_backend *b, kvd_event **out, kvd_err *err)
{
    kvd_event *ev = kvd_malloc(sizeof(*ev));

    *out = NULL;
    if (!ev)
        return kvd_fail(err, KVD_E_NOMEM, 0, "cpu backend: event");
    ev->be = (cpu_backend *)(void *)b;
    *out   = ev;
    return KVD_OK;
}

static void cpu_event_close(kvd_event *ev)
{
    kvd_free(ev);
}

/* Recording and waiting: what came before on the stream has already run. */
static kvd_status cpu_event_pass(kvd_event *ev, kvd_stream *st, kvd_err *err)
{
    (void)err;
    kvd_assert(ev->be == st->be);
    return KVD_OK;
}

static kvd_status cpu_event_poll(const kvd_event *ev, kvd_err *err)
{
    (void)ev;
    (void)err;
    return KVD_OK;
}

static kvd_status cpu_stamp(kvd_stream *st, uint64_t *at, kvd_err *err)
{
    (void)st;
    (void)err;
    *at = kvd_now_ns();
    return KVD_OK;
}

/* ---- graphs: none ---------------------------------------------------------------- */

static kvd_status cpu_graph_begin(kvd_stream *st, kvd_err *err)
{
    return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "backend %s: no graphs", st->be->base.ops->name);
}

static kvd_status cpu_graph_end(kvd_stream *st, kvd_graph **out, kvd_err *err)
{
    *out = NULL;
    return cpu_graph_begin(st, err);
}

static kvd_status cpu_graph_run(kvd_graph *g, kvd_stream *st, kvd_err *err)
{
    (void)g;
    return cpu_graph_begin(st, err);
}

static void cpu_graph_close(kvd_graph *g)
{
    (void)g;
}

/* ---- open and close -------------------------------------------------------------- */

static void cpu_close(kvd_backend *b)
{
    cpu_backend *be = (cpu_backend *)(void *)b;

    if (be->pool)
        os_pool_close(be->pool);
    if (be->mm_scratch)
        kvd_pages_free(be->mm_scratch, (size_t)be->mm_scratch_bytes);
    if (be->at_scratch)
        kvd_pages_free(be->at_scratch, (size_t)be->at_scratch_bytes);
    if (be->ix_scratch)
        kvd_pages_free(be->ix_scratch, (size_t)be->ix_scratch_bytes);
    kvd_free(be);
}

/* ---- several ops as one ------------------------------------------------------------ */

static kvd_status cpu_choose(kvd_stream *st, const kvd_choose_args *a, kvd_err *err)
{
    KVD_TRY(cpu_attn_span(st, &a->kept, err));
    KVD_TRY(cpu_select(st, &a->select, err));
    KVD_TRY(cpu_window(st, &a->window, err));
    return cpu_window_spans(st, &a->spans, err);
}

static kvd_status cpu_ref_choose(kvd_stream *st, const kvd_choose_args *a, kvd_err *err)
{
    KVD_TRY(cpu_ref_attn_span(st, &a->kept, err));
    KVD_TRY(cpu_ref_select(st, &a->select, err));
    KVD_TRY(cpu_window(st, &a->window, err));
    return cpu_window_spans(st, &a->spans, err);
}

#define CPU_COMMON_OPS                                                                            \
    .abi = KVD_BACKEND_ABI, .close = cpu_close, .reserve_bytes = cpu_reserve_bytes,               \
    .reserve = cpu_reserve, .mem_alloc = cpu_mem_alloc, .mem_free = cpu_mem_free,                 \
    .stream_open = cpu_stream_open, .stream_close = cpu_stream_close,                             \
    .stream_sync = cpu_stream_sync, .event_open = cpu_event_open, .event_close = cpu_event_close, \
    .event_record = cpu_event_pass, .event_wait = cpu_event_pass, .event_poll = cpu_event_poll,   \
    .memory = cpu_memory, .copy = cpu_copy, .fill = cpu_fill, .stamp = cpu_stamp,                 \
    .graph_begin = cpu_graph_begin, .graph_end = cpu_graph_end, .graph_run = cpu_graph_run,       \
    .graph_close = cpu_graph_close, .synth = cpu_synth

const kvd_backend_ops cpu_ops = {
    CPU_COMMON_OPS,
    .name          = "cpu",
    .embed         = cpu_embed,
    .rms_norm      = cpu_rms_norm,
    .head_norm     = cpu_head_norm,
    .matmul        = cpu_matmul,
    .rope          = cpu_rope,
    .swiglu        = cpu_swiglu,
    .kv_append     = cpu_kv_append,
    .qkv_finish    = cpu_qkv_finish,
    .attn          = cpu_attn,
    .attn_span     = cpu_attn_span,
    .attn_zone     = cpu_attn_zone,
    .window        = cpu_window,
    .window_spans  = cpu_window_spans,
    .window_post   = cpu_window_post,
    .window_fetch  = cpu_window_fetch,
    .record_copy   = cpu_record_copy,
    .record_pack   = cpu_record_pack,
    .record_unpack = cpu_record_unpack,
    .best          = cpu_best,
    .index_build   = cpu_index_build,
    .zone_build    = cpu_zone_build,
    .select        = cpu_select,
    .choose        = cpu_choose,
};

const kvd_backend_ops cpu_ref_ops = {
    CPU_COMMON_OPS,
    .name          = "ref",
    .embed         = cpu_ref_embed,
    .rms_norm      = cpu_ref_rms_norm,
    .head_norm     = cpu_ref_head_norm,
    .matmul        = cpu_ref_matmul,
    .rope          = cpu_ref_rope,
    .swiglu        = cpu_ref_swiglu,
    .kv_append     = cpu_ref_kv_append,
    .qkv_finish    = cpu_ref_qkv_finish,
    .attn          = cpu_ref_attn,
    .attn_span     = cpu_ref_attn_span,
    .attn_zone     = cpu_ref_attn_zone,
    .window        = cpu_window,
    .window_spans  = cpu_window_spans,
    .window_post   = cpu_window_post,
    .window_fetch  = cpu_window_fetch,
    .record_copy   = cpu_ref_record_copy,
    .record_pack   = cpu_ref_record_pack,
    .record_unpack = cpu_ref_record_unpack,
    .best          = cpu_best,
    .index_build   = cpu_index_build,
    .zone_build    = cpu_zone_build,
    .select        = cpu_ref_select,
    .choose        = cpu_ref_choose,
};

static kvd_status cpu_choose_isa(cpu_backend *be, const char *name, kvd_err *err)
{
    const os_cpu *cpu = os_cpu_get();

    be->isa = cpu->isa;
    if (name && !os_isa_parse(name, &be->isa))
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "cpu isa (cpu_isa) \"%s\" is unknown; there are portable, avx2, avx512 and amx", name);
    if (be->isa > cpu->isa)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "cpu isa (cpu_isa) %s: this machine runs at most %s", name,
                        os_isa_name(cpu->isa));
    be->vnni = be->isa >= OS_ISA_AVX512 && cpu->avx512_vnni;
    be->bf16 = be->isa >= OS_ISA_AVX512 && cpu->avx512_bf16;
    snprintf(be->base.isa, sizeof(be->base.isa), "%s%s%s%s",
             os_isa_name(be->isa < OS_ISA_AVX512 ? be->isa : OS_ISA_AVX512),
             be->vnni ? "+vnni" : "", be->bf16 ? "+bf16" : "", be->isa == OS_ISA_AMX ? "+amx" : "");
    return KVD_OK;
}

static kvd_status cpu_open_fast(cpu_backend *be, const kvd_backend_params *p, kvd_err *err)
{
    be->base.ops      = &cpu_ops;
    be->base.n_thread = p->n_thread ? p->n_thread : os_cpu_get()->n_cpu;
    if (be->base.n_thread > CPU_N_THREAD_MAX) {
        if (p->n_thread)
            return kvd_fail(err, KVD_E_INVAL, 0, "%" PRIu32 " threads (n_thread): the limit is %d",
                            p->n_thread, CPU_N_THREAD_MAX);
        be->base.n_thread = CPU_N_THREAD_MAX;
    }
    KVD_TRY(cpu_choose_isa(be, p->cpu_isa, err));
    return os_pool_open(&be->pool, be->base.n_thread, err);
}

static kvd_status cpu_open_ref(cpu_backend *be)
{
    be->base.ops      = &cpu_ref_ops;
    be->base.n_thread = 1;
    be->isa           = OS_ISA_PORTABLE;
    snprintf(be->base.isa, sizeof(be->base.isa), "reference");
    return KVD_OK;
}

kvd_status cpu_backend_open(kvd_backend **out, const kvd_backend_params *p, kvd_err *err)
{
    const bool   ref = p->name && strcmp(p->name, "ref") == 0;
    cpu_backend *be  = kvd_calloc(1, sizeof(*be));
    kvd_status   st;

    *out = NULL;
    if (!be)
        return kvd_fail(err, KVD_E_NOMEM, 0, "backend %s", ref ? "ref" : "cpu");
    be->base.unified  = true;
    be->precise       = p->precise;
    be->deterministic = p->deterministic;
    st                = ref ? cpu_open_ref(be) : cpu_open_fast(be, p, err);
    if (st != KVD_OK) {
        cpu_close(&be->base);
        return st;
    }
    *out = &be->base;
    return KVD_OK;
}
