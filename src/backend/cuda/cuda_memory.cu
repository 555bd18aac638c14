/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_memory.cu - how much memory the device has, and what this backend has of it.
 *
 * What a context takes cannot be asked for: making it changes what is free, and what is free before
 * can only be asked without one, by the driver's management library (NVML).
 * Owns nothing.  Thread: the backend's. */
#include "backend/cuda/cuda_impl.h"
extern "C" {
#include "os/os.h"
}

/* Kernels' code comes to the device when it is first called, and so does cuBLASLt's; with what
 * allocations are rounded up by: 7 MiB beyond open (SmolLM2, dense), 16 (Llama 3 8B, sparse). */
#define CUDA_LATER_BYTES (16ull << 20)
/* Not more, whatever the difference says: others may take memory of the device meanwhile, and NVML
 * speaks of all of a GPU where this process has a part of it (MIG). */
#define CUDA_CONTEXT_MAX (1ull << 30)

/* The little of nvml.h that is needed; names are those of its ABI. */
typedef int (*nvml_init_fn)(void);
typedef int (*nvml_find_fn)(const char *bus_id, void **device);
typedef int (*nvml_memory_fn)(void *device, unsigned long long out[3]); /* total, free, used */

uint64_t cuda_free_before(int device)
{
    char               why[256], bus[32];
    unsigned long long bytes[3] = { 0, 0, 0 };
    void              *handle   = NULL;
    os_module         *m        = os_module_open("libnvidia-ml.so.1", why, sizeof(why));

    if (!m)
        return 0;
    if (cudaDeviceGetPCIBusId(bus, sizeof(bus), device) != cudaSuccess) {
        cudaGetLastError(); /* or an op would be blamed for it */
        return 0;
    }
    const nvml_init_fn init = (nvml_init_fn)os_module_symbol(m, "nvmlInit_v2");
    const nvml_init_fn end  = (nvml_init_fn)os_module_symbol(m, "nvmlShutdown");
    const nvml_find_fn find = (nvml_find_fn)os_module_symbol(m, "nvmlDeviceGetHandleByPciBusId_v2");
    const nvml_memory_fn memory = (nvml_memory_fn)os_module_symbol(m, "nvmlDeviceGetMemoryInfo");

    if (!init || !end || !find || !memory || init() != 0)
        return 0;
    if (find(bus, &handle) != 0 || memory(handle, bytes) != 0)
        bytes[1] = 0;
    end();
    return bytes[1];
}

kvd_status cuda_measure_context(cuda_backend *be, uint64_t free_before, kvd_err *err)
{
    size_t free_now = 0, total = 0;

    CUDA_TRY(cudaMemGetInfo(&free_now, &total), "device", err);
    be->free_at_open = free_now;
    if (free_before == 0)
        free_before = total;
    be->context_bytes = free_before > free_now ? free_before - free_now : 0;
    be->context_bytes = kvd_min_u64(be->context_bytes, CUDA_CONTEXT_MAX) + CUDA_LATER_BYTES;
    return KVD_OK;
}

void cuda_memory(const kvd_backend *b, kvd_device_memory *out)
{
    const cuda_backend *be       = (const cuda_backend *)b;
    size_t              free_now = 0, total = 0;

    *out = kvd_device_memory{};
    cudaSetDevice(be->device);
    if (cudaMemGetInfo(&free_now, &total) != cudaSuccess)
        cudaGetLastError(); /* a failed device: what ops do next will say so */
    for (int i = 0; i < CUDA_SCRATCH_COUNT; i++)
        out->scratch += be->scratch[i].bytes;
    out->total   = total;
    out->free    = free_now;
    out->context = be->context_bytes;
    out->held    = be->held_bytes;
    out->pinned  = be->pinned_bytes;
    out->used    = be->context_bytes - CUDA_LATER_BYTES +
                (be->free_at_open > free_now ? be->free_at_open - free_now : 0);
}
