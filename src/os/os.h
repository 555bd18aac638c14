/* SPDX-License-Identifier: Apache-2.0 */
/* os.h - the door to os/: files, threads, processors, memory.  The only directory that includes
 * system headers beyond libc's. */
#ifndef KVD_OS_H
#define KVD_OS_H

#include "base/base.h"

/* ---- files ----------------------------------------------------------------------- */

/* A file mapped read-only.  A file that is truncated by somebody while it is mapped kills the
 * process with SIGBUS (documented in docs/HACKING.md); size is what it was at open. */
typedef struct os_map {
    const uint8_t *data; /* NULL when the file is empty */
    uint64_t       bytes;
} os_map;

kvd_status os_map_open(os_map *out, const char *path, kvd_err *err);
/* Replaces the mapping by a read-only copy in memory of our own, in huge pages where the system has
 * them: streams faster (fewer page walks), and nobody can truncate it.  Pointers into it stay
 * valid. false when there is no memory for it: then the mapping stays.  No other thread may read it
 * meanwhile. */
bool     os_map_copy(os_map *m);
void     os_map_close(os_map *m);           /* zeroes *m */
void     os_map_will_need(const os_map *m); /* read-ahead hint */
uint64_t os_map_resident(const os_map *m);  /* bytes in page cache now */

/* ---- processors and memory ------------------------------------------------------- */

typedef enum os_isa { /* levels of kernels, ascending; each includes those before it */
                      OS_ISA_PORTABLE, /* plain C as x86-64-v2 runs it */
                      OS_ISA_AVX2,     /* + AVX2, FMA, F16C */
                      OS_ISA_AVX512,   /* + AVX-512 F BW DQ VL; VNNI and BF16 are asked for apart */
                      OS_ISA_AMX /* + AVX-512 VNNI, BF16 and AMX tile, int8, bf16, permitted by the
                                    kernel */
} os_isa;

typedef struct os_cpu {
    char     model[64];
    os_isa   isa; /* the best level this machine can run */
    bool     avx2, f16c, fma, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx_int8, amx_bf16;
    uint32_t n_cpu; /* this process may use (affinity, cgroup quota) */
    uint32_t l1d_bytes, l2_bytes, l3_bytes;
} os_cpu;
/* Detected once, then constant.  Asks the kernel for AMX state when the CPU has it. */
const os_cpu *os_cpu_get(void);
const char   *os_isa_name(os_isa isa); /* "avx512" */
bool          os_isa_parse(const char *name, os_isa *out);

uint64_t os_mem_total(void);     /* bytes; cgroup limit if lower */
uint64_t os_mem_available(void); /* bytes that can be had now without swapping */
uint64_t os_rss(void);           /* resident bytes of this process, anonymous + file */
uint64_t os_rss_anon(void);      /* anonymous part only */

/* ---- limits and devices, for `kvdrive doctor` ------------------------------------- */

uint64_t    os_limit_memlock(void); /* bytes that may be pinned; UINT64_MAX: no limit */
uint64_t    os_limit_files(void);   /* open files; UINT64_MAX: no limit */
const char *os_huge_pages(char *out, size_t cap); /* "always", "madvise", "never", "unknown" */
/* Whether files of this directory can be read and written past the page cache; makes and removes
 * one file of 4 KiB. */
bool os_direct_io(const char *dir);
bool os_has_nvidia(void); /* an NVIDIA driver is loaded */

/* ---- thread pool ----------------------------------------------------------------- */

/* A fixed set of workers that run one job at a time together with the calling thread.  Workers
 * spin briefly for the next job, then sleep, so an idle or crowded machine pays little. */
typedef struct os_pool os_pool;

/* item: 0 <= item < n_item; thread: 0 is the caller, below os_pool_n_thread(). */
typedef void (*os_pool_fn)(void *ctx, uint32_t item, uint32_t thread);

/* n_thread counts the caller; 1 starts nothing. */
kvd_status os_pool_open(os_pool **out, uint32_t n_thread, kvd_err *err);
void       os_pool_close(os_pool *p);
uint32_t   os_pool_n_thread(const os_pool *p);
/* Runs fn once for each item, items handed out one by one as threads become free; returns when
 * all are done.  What fn wrote is visible to the caller.  One caller at a time; no nesting. */
void os_pool_run(os_pool *p, uint32_t n_item, os_pool_fn fn, void *ctx);

#endif
