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

/* ---- files that are written, directories ------------------------------------------ */

#define OS_PATH_BYTES 4096  /* of a path, as the system has it */
#define OS_PAGE_BYTES 4096u /* alignment of buffers, offsets and lengths of direct I/O */

typedef enum os_open {
    OS_OPEN_READ   = 0,
    OS_OPEN_WRITE  = 1,                 /* read and write */
    OS_OPEN_CREATE = 2 | OS_OPEN_WRITE, /* if it is not there; mode 0600 */
    OS_OPEN_DIRECT = 4                  /* past the page cache */
} os_open;

kvd_status os_file_open(int *fd, const char *path, uint32_t flags, kvd_err *err);
void       os_file_close(int fd); /* negative: nothing */
kvd_status os_file_size(int fd, uint64_t *bytes);
/* Takes disk space for a range, so that a full disk is an error now and not at a later write.  OK
 * where the filesystem cannot say. */
kvd_status os_file_reserve(int fd, uint64_t off, uint64_t bytes, const char *path, kvd_err *err);
void       os_file_punch(int fd, uint64_t off, uint64_t bytes); /* gives space back, if it can */
void       os_file_remove(const char *path);
kvd_status os_file_rename(const char *from, const char *to, kvd_err *err);
/* The whole new content or the whole old one, whatever happens: temporary file, sync, rename. */
kvd_status os_file_replace(const char *path, const void *data, size_t bytes, kvd_err *err);

kvd_status os_dir_make(const char *path, kvd_err *err); /* with its parents, mode 0700 */
/* Makes it if it is not there, and opens it.  KVD_E_INVAL: it is another user's, or others may
 * write to it. */
kvd_status os_dir_open(int *fd, const char *path, kvd_err *err);
/* Its name without symbolic links; KVD_E_IO: the path has come to mean another directory. */
kvd_status os_dir_real(int fd, const char *path, char out[OS_PATH_BYTES], kvd_err *err);
bool       os_dir_is(int fd, const char *path); /* the path means the directory that is open */
bool       os_file_is_named(int fd);            /* an open file has a name; true: unknown */
/* Of files in an opened directory; of `path` only the last part counts, the rest is for messages.
 * Opens nothing but a regular file of our own, which becomes mode 0600: a symbolic link is ELOOP.
 */
kvd_status os_file_open_in(int *fd, int dir, const char *path, uint32_t flags, kvd_err *err);
void       os_file_remove_in(int dir, const char *path);
kvd_status os_file_rename_in(int dir, const char *from, const char *to, kvd_err *err);
kvd_status os_dir_sync(const char *path, kvd_err *err); /* makes new names durable */
uint64_t   os_dir_free(const char *path); /* bytes a user may write; UINT64_MAX: unknown */
/* Calls fn with the name of whatever is in it, but for directories. */
kvd_status os_dir_list(const char *path, void (*fn)(void *ctx, const char *name), void *ctx,
                       kvd_err *err);
/* Exclusive among processes, until the file is closed or the process ends.  KVD_E_BUSY names the
 * process that holds it. */
kvd_status os_lock_open(int *fd, int dir, const char *path, kvd_err *err);
bool       os_random(void *p, size_t bytes); /* from the system, for keys */

/* ---- asynchronous I/O ------------------------------------------------------------- */

/* A queue of file requests of fixed depth.  One thread submits and reaps.  Short transfers and
 * interruptions are continued inside; a read that meets the end of the file ends short. */
typedef struct os_io os_io;

typedef enum os_io_kind {
    OS_IO_AUTO,  /* io_uring, or the pool where the system refuses it */
    OS_IO_URING, /* an error where the system refuses it */
    OS_IO_POOL,  /* threads that call pread and pwrite */
    OS_IO_MAP,   /* copies out of read-only mappings: for comparison only */
    OS_IO_SIM    /* deterministic, on the calling thread, with the faults of os_io_sim */
} os_io_kind;

typedef enum os_io_op { OS_IO_READ, OS_IO_WRITE, OS_IO_SYNC } os_io_op;

/* Chances are in 1 of 65,536 requests.  Zero everything for a disk without faults. */
typedef struct os_io_sim {
    uint64_t seed;
    uint32_t read_eio, write_eio, sync_eio, enospc;
    uint32_t read_short, read_flip; /* end early; one bit of what was read turns */
    uint32_t write_flip;            /* one bit of what is written turns */
    uint32_t read_misdirect;        /* another page of the file comes */
    uint32_t lost;                  /* never completes */
    uint32_t delay;                 /* completes only after others, by more than reordering does */
    uint64_t fail_nth;              /* the n-th request (from 1) fails with EIO; 0: none */
    uint64_t crash_nth;             /* the n-th write is torn, all later writes and syncs are lost
                                       though they succeed; 0: none */
    bool     hold_syncs;         /* none is answered until this is cleared, or the queue closes */
    uint64_t n_request, n_fault; /* out: requests seen, faults injected */
} os_io_sim;

typedef struct os_io_params {
    os_io_kind kind;
    uint32_t   depth;     /* most requests in flight; 0: 64; at most 4,096 */
    uint32_t   n_thread;  /* of the pool; 0: 8 */
    void      *buf;       /* memory most requests use, registered where that helps; or NULL */
    uint64_t   buf_bytes; /* until close */
    os_io_sim *sim;       /* OS_IO_SIM; borrowed until close */
} os_io_params;

typedef struct os_io_req {
    os_io_op op;
    int      fd;
    void    *buf; /* alive and untouched until the request is reaped */
    uint64_t off;
    uint32_t bytes;
    uint64_t user; /* comes back */
} os_io_req;

typedef struct os_io_done {
    uint64_t user;
    uint32_t bytes; /* transferred; fewer than asked only at the end of a file */
    int      error; /* errno, or 0 */
} os_io_done;

kvd_status  os_io_open(os_io **out, const os_io_params *p, kvd_err *err);
const char *os_io_name(const os_io *io); /* "io_uring, registered buffers" */
uint32_t    os_io_room(const os_io *io); /* requests that can be submitted now */
void        os_io_submit(os_io *io, const os_io_req *req, uint32_t n); /* n <= room */
/* Up to max finished requests; waits up to timeout_ns for the first.  0: none finished. */
uint32_t os_io_reap(os_io *io, os_io_done *done, uint32_t max, uint64_t timeout_ns);
/* Waits for what is in flight, up to a limit.  false: requests are left that may still write into
 * their buffers, which must stay then. */
bool os_io_close(os_io *io);

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

/* ---- modules --------------------------------------------------------------------- */

/* A shared library opened at run time; it stays in memory until the process ends. */
typedef struct os_module os_module;
/* NULL, and why in why, where it cannot be opened. */
os_module *os_module_open(const char *path, char *why, size_t cap);
/* The address of a function it exports, or NULL. */
void *os_module_symbol(os_module *m, const char *name);
/* The directory of the program or library that holds this code; false: unknown or out too small. */
bool os_module_own_dir(char *out, size_t cap);
bool os_file_exists(const char *path);

/* Lets others have the processor for a moment: in loops that wait. */
void os_yield(void);

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
