/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_pinned.cu - host memory that the device reads and writes at the host's addresses.
 *
 * Small areas are the driver's (cudaHostAlloc).  It takes 0.48 s a GiB, so large ones are pages of
 * our own: touched by several threads, in huge pages where the system gives them, and registered
 * piece by piece (0.05 to 0.10 s a GiB).  The pieces lie one behind the other: kernels see one
 * range, and copies are cut at the seams (cuda_pinned_run()).  Where the system does not let us
 * register, the driver is asked for all of it.
 *
 * Owns: areas, in the backend's list.  Thread: the backend's. */
#include <inttypes.h>

#include "backend/cuda/cuda_impl.h"
extern "C" {
#include "os/os.h"
}

#define CUDA_AREA_MIN   (64ull << 20) /* from here on pages of our own */
#define CUDA_PIECE      (1ull << 30)  /* registered at once */
#define CUDA_TOUCH      (64ull << 20) /* touched at once */
#define CUDA_THREAD_MAX 16u
#define PINNED_SPARE    32u /* this share of what is available stays so: pages are listed, too */

struct cuda_area {
    cuda_area *next;
    uint8_t   *ptr;
    uint64_t   bytes;
};

/* ---- touching -------------------------------------------------------------------------- */

typedef struct touching {
    uint8_t *ptr;
    uint64_t bytes;
    bool     failed; /* any of them */
} touching;

static void touch_part(void *ctx, uint32_t item, uint32_t thread)
{
    touching      *t   = (touching *)ctx;
    const uint64_t at  = item * CUDA_TOUCH;
    const uint64_t n   = kvd_min_u64(CUDA_TOUCH, t->bytes - at);
    bool           yes = true;

    (void)thread;
    if (!kvd_pages_touch(t->ptr + at, (size_t)n))
        __atomic_store(&t->failed, &yes, __ATOMIC_RELAXED);
}

/* false: no memory for it. */
static bool touch_all(uint8_t *ptr, uint64_t bytes)
{
    const uint32_t n_cpu = os_cpu_get()->n_cpu;
    touching       t     = { ptr, bytes, false };
    os_pool       *pool  = NULL;

    if (os_pool_open(&pool, n_cpu < CUDA_THREAD_MAX ? n_cpu : CUDA_THREAD_MAX, NULL) != KVD_OK)
        return kvd_pages_touch(ptr, (size_t)bytes);
    os_pool_run(pool, cuda_div_up(bytes, CUDA_TOUCH), touch_part, &t);
    os_pool_close(pool);
    return !t.failed;
}

/* ---- areas ----------------------------------------------------------------------------- */

static void unregister(uint8_t *ptr, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += CUDA_PIECE)
        cudaHostUnregister(ptr + at);
}

static cudaError_t register_all(uint8_t *ptr, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += CUDA_PIECE) {
        const cudaError_t e = cudaHostRegister(ptr + at, kvd_min_u64(CUDA_PIECE, bytes - at),
                                               cudaHostRegisterPortable | cudaHostRegisterMapped);

        if (e != cudaSuccess) {
            unregister(ptr, at);
            return e;
        }
    }
    return cudaSuccess;
}

static bool area_open(cuda_backend *be, uint64_t bytes, void **ptr)
{
    cuda_area *a = (cuda_area *)kvd_malloc(sizeof(*a));

    if (!a)
        return false;
    a->bytes = bytes;
    a->ptr   = (uint8_t *)kvd_pages_reserve((size_t)bytes);
    if (a->ptr && touch_all(a->ptr, bytes) && register_all(a->ptr, bytes) == cudaSuccess) {
        a->next    = be->pinned;
        be->pinned = a;
        *ptr       = a->ptr;
        return true;
    }
    cudaGetLastError();
    kvd_pages_free(a->ptr, (size_t)bytes);
    kvd_free(a);
    return false;
}

static bool area_close(cuda_backend *be, const void *ptr)
{
    for (cuda_area **at = &be->pinned; *at; at = &(*at)->next) {
        cuda_area *a = *at;

        if (a->ptr != ptr)
            continue;
        *at = a->next;
        unregister(a->ptr, a->bytes);
        kvd_pages_free(a->ptr, (size_t)a->bytes);
        kvd_free(a);
        return true;
    }
    return false;
}

/* ---- the door -------------------------------------------------------------------------- */

static kvd_status refuse(uint64_t bytes, const char *why, kvd_err *err)
{
    const uint64_t limit    = os_limit_memlock();
    char           text[32] = "unlimited";

    if (limit != UINT64_MAX)
        snprintf(text, sizeof(text), "%" PRIu64 " KiB", limit >> 10);
    return kvd_fail(err, KVD_E_NOMEM, 0,
                    "cuda: %" PRIu64 " MiB of pinned memory: %s; %" PRIu64
                    " MiB are available, the limit of locked memory is %s (ulimit -l, or "
                    "LimitMEMLOCK= of a systemd unit)",
                    bytes >> 20, why, os_mem_available() >> 20, text);
}

kvd_status cuda_pinned_alloc(cuda_backend *be, uint64_t bytes, void **ptr, kvd_err *err)
{
    const uint64_t there = os_mem_available();
    cudaError_t    e;

    *ptr = NULL;
    if (bytes > there - there / PINNED_SPARE) /* touching it would have somebody killed */
        return refuse(bytes, "there is not so much memory, of which some must stay free", err);
    if (be->can_register && bytes >= CUDA_AREA_MIN && area_open(be, bytes, ptr))
        return KVD_OK;
    e = cudaHostAlloc(ptr, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (e != cudaSuccess) {
        *ptr = NULL;
        cudaGetLastError();
        return refuse(bytes, cudaGetErrorName(e), err);
    }
    memset(*ptr, 0, bytes);
    return KVD_OK;
}

void cuda_pinned_free(cuda_backend *be, void *ptr)
{
    if (ptr && !area_close(be, ptr))
        cudaFreeHost(ptr);
}

uint64_t cuda_pinned_run(const cuda_backend *be, const void *p, uint64_t n)
{
    for (const cuda_area *a = be->pinned; a; a = a->next) {
        const uint64_t off = (uint64_t)((const uint8_t *)p - a->ptr);

        if ((const uint8_t *)p >= a->ptr && off < a->bytes)
            return kvd_min_u64(n, CUDA_PIECE - off % CUDA_PIECE);
    }
    return n;
}
