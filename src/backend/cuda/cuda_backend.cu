/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_backend.cu - the module's door: opening a GPU, its memory, streams, events and scratch.
 *
 * Owns: the backend object, its scratch, its handle of cuBLASLt.  The primary context of the device
 * is shared with whoever else in the process uses it.
 * Thread: one at a time per backend; backends of different devices may be used side by side. */
#include <inttypes.h>

#include "backend/cuda/cuda_impl.h"
#include "backend/cuda/cuda_refuse.h"

#define CUDA_DEVICE_MAX 1024
#define CUDA_TEXT_2(x)  #x
#define CUDA_TEXT(x)    CUDA_TEXT_2(x)
#define CUDA_KVD_VERSION \
    CUDA_TEXT(KVD_VERSION_MAJOR) "." CUDA_TEXT(KVD_VERSION_MINOR) "." CUDA_TEXT(KVD_VERSION_PATCH)

struct kvd_event {
    cuda_backend *be;
    cudaEvent_t   e;
};

struct kvd_graph {
    cuda_backend   *be;
    cudaGraphExec_t g;
};

kvd_status cuda_fail(kvd_err *err, cudaError_t e, const char *what)
{
    kvd_status code = KVD_E_DEVICE;

    cudaGetLastError(); /* or the next launch would report it again */
    if (e == cudaErrorMemoryAllocation)
        code = KVD_E_NOMEM;
    else if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInsufficientDriver ||
             e == cudaErrorNoDevice || e == cudaErrorInvalidDeviceFunction ||
             e == cudaErrorStubLibrary)
        code = KVD_E_UNSUPPORTED;
    return kvd_fail(err, code, 0, "cuda: %s: %s (%s)", what, cudaGetErrorName(e),
                    cudaGetErrorString(e));
}

/* ---- scratch --------------------------------------------------------------------- */

/* Zeroed. */
static kvd_status cuda_alloc_device(uint64_t bytes, void **ptr, kvd_err *err)
{
    cudaError_t e;

    CUDA_TRY(cudaMalloc(ptr, bytes), "device memory", err);
    e = cudaMemset(*ptr, 0, bytes);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(cudaStreamLegacy); /* which our streams do not wait for */
    if (e == cudaSuccess)
        return KVD_OK;
    cudaFree(*ptr);
    *ptr = NULL;
    return cuda_fail(err, e, "device memory");
}

typedef uint64_t (*cuda_bytes_fn)(const cuda_backend *be, const kvd_backend_limits *lim);

static const cuda_bytes_fn cuda_bytes_of[CUDA_SCRATCH_COUNT] = {
    cuda_matmul_scratch_bytes, cuda_attn_scratch_bytes,   cuda_span_scratch_bytes,
    cuda_build_scratch_bytes,  cuda_select_scratch_bytes, cuda_window_scratch_bytes,
    cuda_best_scratch_bytes,
};

static uint32_t cuda_max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static kvd_backend_limits cuda_limits_max(const kvd_backend_limits *a, const kvd_backend_limits *b)
{
    kvd_backend_limits m = *a;

    m.n_token   = cuda_max_u32(a->n_token, b->n_token);
    m.n_seq     = cuda_max_u32(a->n_seq, b->n_seq);
    m.n_col     = cuda_max_u32(a->n_col, b->n_col);
    m.n_head    = cuda_max_u32(a->n_head, b->n_head);
    m.n_kv_head = cuda_max_u32(a->n_kv_head, b->n_kv_head);
    m.head_dim  = cuda_max_u32(a->head_dim, b->head_dim);
    m.n_ctx     = cuda_max_u32(a->n_ctx, b->n_ctx);
    m.n_chunk   = cuda_max_u32(a->n_chunk, b->n_chunk);
    m.n_slot    = cuda_max_u32(a->n_slot, b->n_slot);
    m.n_vocab   = cuda_max_u32(a->n_vocab, b->n_vocab);
    return m;
}

static uint64_t cuda_reserve_bytes(const kvd_backend *b, const kvd_backend_limits *lim)
{
    const cuda_backend      *be  = (const cuda_backend *)b;
    const kvd_backend_limits all = cuda_limits_max(&be->lim, lim);
    uint64_t                 sum = 0;

    for (int i = 0; i < CUDA_SCRATCH_COUNT; i++)
        sum += kvd_max_u64(be->scratch[i].bytes, cuda_bytes_of[i](be, &all));
    return sum;
}

/* All that grows, or nothing: where ops' counters lie goes by the limits. */
static kvd_status cuda_grow_scratch(cuda_backend *be, const kvd_backend_limits *all, kvd_err *err)
{
    cuda_scratch fresh[CUDA_SCRATCH_COUNT] = {};
    kvd_status   st                        = KVD_OK;

    for (int i = 0; i < CUDA_SCRATCH_COUNT && st == KVD_OK; i++) {
        fresh[i].bytes = cuda_bytes_of[i](be, all);
        if (fresh[i].bytes > be->scratch[i].bytes)
            st = cuda_alloc_device(fresh[i].bytes, &fresh[i].ptr, err); /* counters begin at 0 */
    }
    for (int i = 0; i < CUDA_SCRATCH_COUNT; i++) {
        if (!fresh[i].ptr)
            continue;
        cudaFree(st == KVD_OK ? be->scratch[i].ptr : fresh[i].ptr); /* waits for who uses it */
        if (st == KVD_OK)
            be->scratch[i] = fresh[i];
    }
    return st;
}

static kvd_status cuda_reserve(kvd_backend *b, const kvd_backend_limits *lim, kvd_err *err)
{
    cuda_backend            *be  = (cuda_backend *)b;
    const kvd_backend_limits all = cuda_limits_max(&be->lim, lim);

    if (lim->head_dim > KVD_HEAD_DIM_MAX)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "cuda: heads of %" PRIu32 " elements; the limit is %u", lim->head_dim,
                        KVD_HEAD_DIM_MAX);
    if (lim->n_chunk && lim->n_head > CUDA_GROUP_MAX * (uint64_t)lim->n_kv_head)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "cuda: %" PRIu32 " query heads share %" PRIu32
                        " KV heads; sparse attention takes %u each",
                        lim->n_head, lim->n_kv_head, CUDA_GROUP_MAX);
    if (lim->n_chunk && (uint64_t)lim->n_seq * lim->n_kv_head > CUDA_LANES_MAX)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "cuda: %" PRIu32 " sequences of %" PRIu32
                        " KV heads; sparse attention takes %u lanes a layer",
                        lim->n_seq, lim->n_kv_head, CUDA_LANES_MAX);
    cudaSetDevice(be->device);
    KVD_TRY(cuda_grow_scratch(be, &all, err));
    be->lim = all;
    return KVD_OK;
}

/* ---- memory ---------------------------------------------------------------------- */

static kvd_status cuda_alloc_pages(uint64_t bytes, void **ptr, kvd_err *err)
{
    *ptr = kvd_pages_alloc((size_t)bytes);
    return *ptr ? KVD_OK
                : kvd_fail(err, KVD_E_NOMEM, 0, "cuda: %" PRIu64 " bytes of host memory", bytes);
}

static uint64_t *count_of(cuda_backend *be, kvd_mem_kind kind)
{
    return kind == KVD_MEM_DEVICE   ? &be->held_bytes
           : kind == KVD_MEM_PINNED ? &be->pinned_bytes
                                    : &be->host_bytes;
}

static kvd_status cuda_mem_alloc(kvd_backend *b, kvd_mem_kind kind, uint64_t bytes, kvd_mem *out,
                                 kvd_err *err)
{
    void *ptr = NULL;

    *out = kvd_mem{};
    if (kind != KVD_MEM_HOST && kind != KVD_MEM_PINNED && kind != KVD_MEM_DEVICE)
        return kvd_fail(err, KVD_E_INVAL, 0, "cuda: memory kind %d cannot be allocated", (int)kind);
    if (bytes > SIZE_MAX / 2)
        return kvd_fail(err, KVD_E_NOMEM, 0, "cuda: %" PRIu64 " bytes", bytes);
    cudaSetDevice(((cuda_backend *)b)->device);
    if (bytes && kind == KVD_MEM_HOST) {
        KVD_TRY(cuda_alloc_pages(bytes, &ptr, err));
    } else if (bytes && kind == KVD_MEM_DEVICE) {
        KVD_TRY(cuda_alloc_device(bytes, &ptr, err));
    } else if (bytes) {
        KVD_TRY(cuda_pinned_alloc((cuda_backend *)b, bytes, &ptr, err));
    }
    *count_of((cuda_backend *)b, kind) += bytes;
    out->ptr   = ptr;
    out->bytes = bytes;
    out->kind  = kind;
    return KVD_OK;
}

static void cuda_mem_free(kvd_backend *b, kvd_mem *m)
{
    cudaSetDevice(((cuda_backend *)b)->device);
    if (m->kind == KVD_MEM_HOST && m->ptr)
        kvd_pages_free(m->ptr, (size_t)m->bytes);
    else if (m->kind == KVD_MEM_DEVICE)
        cudaFree(m->ptr);
    else if (m->kind == KVD_MEM_PINNED)
        cuda_pinned_free((cuda_backend *)b, m->ptr);
    if (m->kind != KVD_MEM_NONE && m->kind != KVD_MEM_MAP)
        *count_of((cuda_backend *)b, m->kind) -= m->bytes;
    *m = kvd_mem{};
}

static kvd_status cuda_copy(kvd_stream *st, kvd_mem dst, uint64_t dst_off, kvd_mem src,
                            uint64_t src_off, uint64_t bytes, kvd_err *err)
{
    kvd_assert(dst.kind != KVD_MEM_MAP);
    kvd_assert(dst_off <= dst.bytes && bytes <= dst.bytes - dst_off);
    kvd_assert(src_off <= src.bytes && bytes <= src.bytes - src_off);
    const cuda_backend *be   = cuda_enter(st);
    uint8_t            *to   = (uint8_t *)dst.ptr + dst_off;
    const uint8_t      *from = (const uint8_t *)src.ptr + src_off;

    for (uint64_t n; bytes > 0; bytes -= n, to += n, from += n) {
        n = cuda_pinned_run(be, to, cuda_pinned_run(be, from, bytes));
        CUDA_TRY(cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, st->s), "copy", err);
    }
    return KVD_OK;
}

static kvd_status cuda_fill(kvd_stream *st, kvd_mem mem, uint64_t off, uint64_t pitch,
                            uint64_t row_bytes, uint64_t n_row, uint8_t value, kvd_err *err)
{
    if (n_row == 0 || row_bytes == 0)
        return KVD_OK;
    kvd_assert(off + (n_row - 1) * pitch + row_bytes <= mem.bytes);
    cuda_enter(st);
    CUDA_TRY(cudaMemset2DAsync((uint8_t *)mem.ptr + off, n_row > 1 ? pitch : row_bytes, value,
                               row_bytes, n_row, st->s),
             "fill", err);
    return KVD_OK;
}

/* A plain launch: everything ahead has ended. */
static __global__ void cuda_write_time(uint64_t *at)
{
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(*at));
}

static kvd_status cuda_stamp(kvd_stream *st, uint64_t *at, kvd_err *err)
{
    cuda_enter(st);
    cuda_write_time<<<1, 1, 0, st->s>>>(at);
    return cuda_launched("stamp", err);
}

/* ---- streams and events ---------------------------------------------------------- */

static kvd_status cuda_stream_open(kvd_backend *b, kvd_stream **out, kvd_err *err)
{
    kvd_stream *st = (kvd_stream *)kvd_malloc(sizeof(*st));
    int         least, most;
    cudaError_t e;

    *out = NULL;
    if (!st)
        return kvd_fail(err, KVD_E_NOMEM, 0, "cuda: stream");
    st->be = (cuda_backend *)b;
    cuda_enter(st);
    e = cudaDeviceGetStreamPriorityRange(&least, &most);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&st->s, cudaStreamNonBlocking,
                                         st->be->streamed ? most : least);
    st->be->streamed = true;
    if (e != cudaSuccess) {
        kvd_free(st);
        return cuda_fail(err, e, "stream");
    }
    *out = st;
    return KVD_OK;
}

static void cuda_stream_close(kvd_stream *st)
{
    if (!st)
        return;
    cuda_enter(st);
    cudaStreamDestroy(st->s);
    kvd_free(st);
}

static kvd_status cuda_stream_sync(kvd_stream *st, kvd_err *err)
{
    cuda_enter(st);
    CUDA_TRY(cudaStreamSynchronize(st->s), "stream", err);
    return KVD_OK;
}

static kvd_status cuda_event_open(kvd_backend *b, kvd_event **out, kvd_err *err)
{
    kvd_event  *ev = (kvd_event *)kvd_malloc(sizeof(*ev));
    cudaError_t e;

    *out = NULL;
    if (!ev)
        return kvd_fail(err, KVD_E_NOMEM, 0, "cuda: event");
    ev->be = (cuda_backend *)b;
    cudaSetDevice(ev->be->device);
    e = cudaEventCreateWithFlags(&ev->e, cudaEventDisableTiming);
    if (e != cudaSuccess) {
        kvd_free(ev);
        return cuda_fail(err, e, "event");
    }
    *out = ev;
    return KVD_OK;
}

static void cuda_event_close(kvd_event *ev)
{
    if (!ev)
        return;
    cudaSetDevice(ev->be->device);
    cudaEventDestroy(ev->e);
    kvd_free(ev);
}

static kvd_status cuda_event_record(kvd_event *ev, kvd_stream *st, kvd_err *err)
{
    kvd_assert(ev->be == st->be);
    cuda_enter(st);
    CUDA_TRY(cudaEventRecord(ev->e, st->s), "event", err);
    return KVD_OK;
}

static kvd_status cuda_event_wait(kvd_event *ev, kvd_stream *st, kvd_err *err)
{
    kvd_assert(ev->be == st->be);
    cuda_enter(st);
    CUDA_TRY(cudaStreamWaitEvent(st->s, ev->e, 0), "event", err);
    return KVD_OK;
}

static kvd_status cuda_event_poll(const kvd_event *ev, kvd_err *err)
{
    cudaSetDevice(ev->be->device);
    const cudaError_t e = cudaEventQuery(ev->e);

    if (e == cudaErrorNotReady) {
        cudaGetLastError();
        return kvd_fail(err, KVD_E_BUSY, 0, "cuda: the event has not come yet");
    }
    return e == cudaSuccess ? KVD_OK : cuda_fail(err, e, "event");
}

/* ---- graphs ------------------------------------------------------------------------ */

static kvd_status cuda_graph_begin(kvd_stream *st, kvd_err *err)
{
    cuda_enter(st);
    CUDA_TRY(cudaStreamBeginCapture(st->s, cudaStreamCaptureModeThreadLocal), "recording", err);
    return KVD_OK;
}

static kvd_status cuda_graph_end(kvd_stream *st, kvd_graph **out, kvd_err *err)
{
    kvd_graph  *g     = (kvd_graph *)kvd_malloc(sizeof(*g));
    cudaGraph_t graph = NULL;
    cudaError_t e;

    *out = NULL;
    cuda_enter(st);
    e = cudaStreamEndCapture(st->s, &graph); /* whatever else fails, the stream is usable again */
    if (g && e == cudaSuccess)
        e = cudaGraphInstantiate(&g->g, graph, 0);
    if (graph)
        cudaGraphDestroy(graph);
    if (!g || e != cudaSuccess) {
        const bool memory = !g;

        kvd_free(g);
        return memory ? kvd_fail(err, KVD_E_NOMEM, 0, "cuda: graph")
                      : cuda_fail(err, e, "recording");
    }
    g->be = st->be;
    *out  = g;
    return KVD_OK;
}

static kvd_status cuda_graph_run(kvd_graph *g, kvd_stream *st, kvd_err *err)
{
    kvd_assert(g->be == st->be);
    cuda_enter(st);
    CUDA_TRY(cudaGraphLaunch(g->g, st->s), "graph", err);
    return KVD_OK;
}

static void cuda_graph_close(kvd_graph *g)
{
    if (!g)
        return;
    cudaSetDevice(g->be->device);
    cudaGraphExecDestroy(g->g);
    kvd_free(g);
}

/* ---- open and close -------------------------------------------------------------- */

static void cuda_close(kvd_backend *b)
{
    cuda_backend *be = (cuda_backend *)b;

    cudaSetDevice(be->device);
    for (int i = 0; i < CUDA_SCRATCH_COUNT; i++)
        cudaFree(be->scratch[i].ptr);
    cuda_lt_close(be->lt);
    kvd_free(be);
}

static kvd_backend_ops cuda_make_ops(void)
{
    kvd_backend_ops t = {};

    t.abi           = KVD_BACKEND_ABI;
    t.name          = "cuda";
    t.close         = cuda_close;
    t.reserve_bytes = cuda_reserve_bytes;
    t.reserve       = cuda_reserve;
    t.mem_alloc     = cuda_mem_alloc;
    t.mem_free      = cuda_mem_free;
    t.stream_open   = cuda_stream_open;
    t.stream_close  = cuda_stream_close;
    t.stream_sync   = cuda_stream_sync;
    t.event_open    = cuda_event_open;
    t.event_close   = cuda_event_close;
    t.event_record  = cuda_event_record;
    t.event_wait    = cuda_event_wait;
    t.event_poll    = cuda_event_poll;
    t.memory        = cuda_memory;
    t.copy          = cuda_copy;
    t.fill          = cuda_fill;
    t.stamp         = cuda_stamp;
    t.graph_begin   = cuda_graph_begin;
    t.graph_end     = cuda_graph_end;
    t.graph_run     = cuda_graph_run;
    t.graph_close   = cuda_graph_close;
    t.embed         = cuda_embed;
    t.rms_norm      = cuda_rms_norm;
    t.head_norm     = cuda_head_norm;
    t.matmul        = cuda_matmul;
    t.rope          = cuda_rope;
    t.swiglu        = cuda_swiglu;
    t.kv_append     = cuda_kv_append;
    t.qkv_finish    = cuda_qkv_finish;
    t.attn          = cuda_attn;
    t.index_build   = cuda_index_build;
    t.zone_build    = cuda_zone_build;
    t.select        = cuda_select;
    t.attn_span     = cuda_attn_span;
    t.attn_zone     = cuda_attn_zone;
    t.window        = cuda_window;
    t.window_spans  = cuda_window_spans;
    t.choose        = cuda_choose;
    t.window_post   = cuda_window_post;
    t.window_fetch  = cuda_window_fetch;
    t.record_copy   = cuda_record_copy;
    t.record_pack   = cuda_record_pack;
    t.record_unpack = cuda_record_unpack;
    t.best          = cuda_best;
    t.synth         = cuda_synth;
    return t;
}

static const kvd_backend_ops cuda_ops = cuda_make_ops();

/* "cuda" is device 0, "cuda:N" device N. */
static kvd_status cuda_parse_name(const char *name, int *device, kvd_err *err)
{
    int n = 0;

    *device = 0;
    if (strcmp(name, "cuda") == 0)
        return KVD_OK;
    for (const char *s = name + strlen("cuda:"); *s && n < CUDA_DEVICE_MAX; s++) {
        if (*s < '0' || *s > '9')
            return kvd_fail(err, KVD_E_INVAL, 0, "backend \"%s\": cuda:N, N a number", name);
        n = n * 10 + (*s - '0');
    }
    if (strlen(name) <= strlen("cuda:"))
        return kvd_fail(err, KVD_E_INVAL, 0, "backend \"%s\": cuda:N, N a number", name);
    *device = n;
    return KVD_OK;
}

static kvd_status cuda_check_driver(int device, kvd_err *err)
{
    int               n = 0, driver = 0;
    const cudaError_t e = cudaGetDeviceCount(&n);

    if (e == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess &&
        driver) {
        (void)!kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "cuda: the driver is for CUDA %d.%d, this build needs %d.%d", driver / 1000,
                        driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        return cuda_absent(err);
    }
    if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice || e == cudaErrorStubLibrary ||
        (e == cudaSuccess && !n)) {
        (void)!kvd_fail(err, KVD_E_UNSUPPORTED, 0, "cuda: no NVIDIA GPU or driver here");
        return cuda_absent(err);
    }
    CUDA_TRY(e, "looking for devices", err);
    if (device >= n)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "cuda: no device %d, there are %d", device, n);
    return KVD_OK;
}

/* Whether this build has code for the device: asks for any kernel. */
static __global__ void cuda_probe_kernel(void)
{
}

static kvd_status cuda_open_device(cuda_backend *be, kvd_err *err)
{
    cudaDeviceProp     prop;
    cudaFuncAttributes attr;
    cudaError_t        e;
    uint64_t           free_before;
    int                same = 0;

    CUDA_TRY(cudaGetDeviceProperties(&prop, be->device), "device", err);
    be->cc         = prop.major * 10 + prop.minor;
    be->n_sm       = (uint32_t)prop.multiProcessorCount;
    be->smem_block = (uint32_t)prop.sharedMemPerBlockOptin;
    be->smem_sm    = (uint32_t)prop.sharedMemPerMultiprocessor;
    snprintf(be->base.isa, sizeof(be->base.isa), "%.22s sm_%d", prop.name, be->cc);
    if (be->cc < CUDA_CC_MIN)
        return cuda_refuse(err, prop.name, prop.major, prop.minor, KVD_CUDA_CODE);
    free_before = cuda_free_before(be->device);
    CUDA_TRY(cudaSetDevice(be->device), "device", err);
    CUDA_TRY(cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                    be->device),
             "device", err);
    be->can_register = same != 0;
    e                = cudaFuncGetAttributes(&attr, cuda_probe_kernel);
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction)
        return cuda_refuse(err, prop.name, prop.major, prop.minor, KVD_CUDA_CODE);
    CUDA_TRY(e, "device", err);
    if (attr.ptxVersion < be->cc) /* launches go by what kernels were compiled for */
        be->cc = attr.ptxVersion;
    cuda_select_clusters(be);
    KVD_TRY(cuda_lt_open(&be->lt, err));
    return cuda_measure_context(be, free_before, err);
}

static kvd_status cuda_backend_open(kvd_backend **out, const kvd_backend_params *p, kvd_err *err)
{
    cuda_backend *be;
    int           device = 0;
    kvd_status    st;

    *out = NULL;
    KVD_TRY(cuda_parse_name(p->name, &device, err));
    KVD_TRY(cuda_check_driver(device, err));
    be = (cuda_backend *)kvd_calloc(1, sizeof(*be));
    if (!be)
        return kvd_fail(err, KVD_E_NOMEM, 0, "backend %s", p->name);
    be->base.ops      = &cuda_ops;
    be->base.n_thread = 1;
    be->device        = device;
    be->precise       = p->precise;
    be->deterministic = p->deterministic;
    st                = cuda_open_device(be, err);
    if (st != KVD_OK) {
        cuda_close(&be->base);
        return st;
    }
    *out = &be->base;
    return KVD_OK;
}

extern "C" __attribute__((visibility("default"))) const kvd_backend_module_info *kvd_backend_module(
    void)
{
    static const kvd_backend_module_info info = { KVD_BACKEND_ABI, CUDA_KVD_VERSION,
                                                  cuda_backend_open };
    return &info;
}
