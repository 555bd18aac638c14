/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk.c - the block store: open, close, and the stage its I/O goes through.
 *
 * Owns: the directory, open, and its lock, the queue, and the stage: slots of 256 KiB, some for
 * reads, some for writes, so that neither can starve the other.  A slot is busy from submit until
 * its request is reaped; nothing else writes into it meanwhile. Thread: one at a time. */
#include <errno.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>

#include "kv/kv_disk_int.h"

#define SYNC_USER  (UINT64_C(1) << 32)           /* + index of the put */
#define DIR_USER   (SYNC_USER + KV_DISK_PUT_MAX) /* likewise: of the directory */
#define LOG_USER   (DIR_USER + KV_DISK_PUT_MAX)  /* + turn: of the catalogue */
#define REAP_MAX   64u
#define SLOT_MIN   4u
#define SLOT_MAX   1024u
#define UNITS_MAX  65535u
#define PIECES_MIN 64u

#define FILE_BYTES_DEFAULT  (UINT64_C(256) << 20)
#define FILE_BYTES_MIN      (UINT64_C(64) << 20)
#define STAGE_BYTES_DEFAULT (UINT64_C(16) << 20)

void kv_disk_at(const kv_disk *d, const char *point)
{
    if (d->p.point)
        d->p.point(d->p.point_ctx, point);
}

/* ---- the stage -------------------------------------------------------------------- */

disk_slot *kv_disk_slot_take(kv_disk *d, bool for_write)
{
    const uint32_t first = for_write ? d->n_read_slot : 0;
    const uint32_t end   = for_write ? d->n_slot : d->n_read_slot;

    for (uint32_t i = first; i < end; i++)
        if (!d->slot[i].busy)
            return &d->slot[i];
    return NULL;
}

void kv_disk_slot_submit(kv_disk *d, disk_slot *s, os_io_op op, int fd, uint64_t off,
                         uint32_t bytes)
{
    const os_io_req r = { op, fd, s->buf, off, bytes, (uint64_t)(s - d->slot) };

    kvd_assert(!s->busy);
    s->busy              = true;
    s->bytes             = bytes;
    d->held[d->n_held++] = r;
    if (op != OS_IO_READ || d->n_held == DISK_HELD_MAX)
        kv_disk_submit_held(d);
}

/* The queue is as deep as there are slots, and syncs of puts and the catalogue. */
void kv_disk_submit_held(kv_disk *d)
{
    if (d->n_held > 0)
        os_io_submit(d->io, d->held, d->n_held);
    d->n_held = 0;
}

void kv_disk_sync_submit(kv_disk *d, uint32_t put, int fd)
{
    const os_io_req r = { OS_IO_SYNC, fd, NULL, 0, 0, SYNC_USER + put };

    os_io_submit(d->io, &r, 1);
}

void kv_disk_sync_dir_submit(kv_disk *d, uint32_t put)
{
    const os_io_req r = { OS_IO_SYNC, d->dir_fd, NULL, 0, 0, DIR_USER + put };

    os_io_submit(d->io, &r, 1);
}

void kv_disk_sync_log_submit(kv_disk *d, uint32_t turn, int fd)
{
    const os_io_req r = { OS_IO_SYNC, fd, NULL, 0, 0, LOG_USER + turn };

    os_io_submit(d->io, &r, 1);
}

static void slot_done(kv_disk *d, const os_io_done *done)
{
    disk_slot *s;

    if (done->user >= DIR_USER) { /* EINVAL: a filesystem without such a thing */
        kv_disk_put_written(d, &d->put[done->user - DIR_USER],
                            done->error == EINVAL ? 0 : done->error);
        return;
    }
    if (done->user >= SYNC_USER) {
        kv_disk_put_written(d, &d->put[done->user - SYNC_USER], done->error);
        return;
    }
    s = &d->slot[done->user];
    if ((uint32_t)done->user < d->n_read_slot)
        kv_disk_read_done(d, s, done);
    else
        kv_disk_put_written(d, &d->put[s->put], done->error);
    s->busy = false;
}

void kv_disk_reap(kv_disk *d, uint64_t timeout_ns)
{
    os_io_done done[REAP_MAX];
    uint32_t   n;

    n = os_io_reap(d->io, done, REAP_MAX, kvd_min_u64(timeout_ns, KVD_RAN_WAIT_NS));
    while (n > 0) {
        /* those of the catalogue first: a read that has failed waits for them (kv_disk_log_wait) */
        for (uint32_t i = 0; i < n; i++)
            if (done[i].user >= LOG_USER)
                kv_disk_log_synced(d, (uint32_t)(done[i].user - LOG_USER), done[i].error);
        for (uint32_t i = 0; i < n; i++)
            if (done[i].user < LOG_USER)
                slot_done(d, &done[i]);
        n = os_io_reap(d->io, done, REAP_MAX, 0);
    }
}

void kv_disk_pump(kv_disk *d, uint64_t timeout_ns)
{
    kv_disk_read_issue(d);
    kv_disk_reap(d, timeout_ns);
    kv_disk_log_advance(d);
    kv_disk_put_advance(d);
    kv_disk_read_issue(d);
}

static uint32_t slots_of(uint64_t bytes)
{
    const uint64_t n = kvd_div_up(bytes, DISK_SLOT_BYTES);

    return (uint32_t)kvd_min_u64(kvd_max_u64(n, SLOT_MIN), SLOT_MAX);
}

static kvd_status open_stage(kv_disk *d, kvd_err *err)
{
    os_io_params io = d->p.io;

    d->n_read_slot = slots_of(d->p.read_stage_bytes);
    d->n_slot      = d->n_read_slot + slots_of(d->p.write_stage_bytes);
    d->stage_bytes = (uint64_t)d->n_slot * DISK_SLOT_BYTES;
    d->slot        = kvd_calloc(d->n_slot, sizeof(*d->slot));
    d->stage       = d->slot ? kvd_pages_alloc(d->stage_bytes) : NULL;
    if (!d->stage)
        return kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory for a stage of %llu bytes",
                        (unsigned long long)d->stage_bytes);
    for (uint32_t i = 0; i < d->n_slot; i++)
        d->slot[i].buf = d->stage + (size_t)i * DISK_SLOT_BYTES;
    io.depth     = d->n_slot + 2 * KV_DISK_PUT_MAX + 1;
    io.buf       = d->stage;
    io.buf_bytes = d->stage_bytes;
    KVD_TRY(os_io_open(&d->io, &io, err));
    d->space.direct = d->p.io.kind != OS_IO_MAP && os_direct_io(d->dir);
    snprintf(d->mode, sizeof(d->mode), "%s%s", os_io_name(d->io),
             d->space.direct ? ", O_DIRECT" : ", page cache");
    return KVD_OK;
}

/* ---- open ------------------------------------------------------------------------- */

static void set_default(uint64_t *v, uint64_t def)
{
    if (*v == 0)
        *v = def;
}

static void fill_defaults(kv_disk_params *p)
{
    set_default(&p->file_bytes, FILE_BYTES_DEFAULT);
    set_default(&p->read_stage_bytes, STAGE_BYTES_DEFAULT);
    set_default(&p->write_stage_bytes, STAGE_BYTES_DEFAULT);
    set_default(&p->timeout_ns, UINT64_C(10000000000));
    set_default(&p->pause_ns, UINT64_C(30000000000));
    set_default(&p->max_salted_bytes, p->max_bytes / 4);
    p->file_bytes = kvd_max_u64(p->file_bytes, FILE_BYTES_MIN);
    p->gap_bytes  = p->gap_bytes ? p->gap_bytes : 16384;
    p->max_units  = p->max_units ? (uint32_t)kvd_min_u64(p->max_units, UNITS_MAX) : 8192;
    p->max_pieces = p->max_pieces ? (uint32_t)kvd_max_u64(p->max_pieces, PIECES_MIN) : 16384;
}

uint64_t kv_disk_late_bytes(uint32_t n_ticket, uint32_t n_piece)
{
    return n_ticket * (sizeof(disk_ticket) + (uint64_t)n_piece * sizeof(disk_piece));
}

uint64_t kv_disk_host_bytes(const kv_disk_params *p)
{
    kv_disk_params q = *p;
    uint64_t       n_slot;

    fill_defaults(&q);
    n_slot = slots_of(q.read_stage_bytes) + slots_of(q.write_stage_bytes);
    return sizeof(kv_disk) + n_slot * (DISK_SLOT_BYTES + sizeof(disk_slot)) +
           q.max_units * sizeof(disk_unit) +
           (KV_DISK_TICKET_MAX + 1) *
               (sizeof(disk_ticket) + (uint64_t)q.max_pieces * sizeof(disk_piece)) +
           kv_disk_late_bytes(q.late_tickets, q.late_pieces);
}

static bool open_tickets(kv_disk *d)
{
    bool ok = true;

    d->n_ticket = KV_DISK_TICKET_MAX + 1 + d->p.late_tickets;
    d->ticket   = kvd_calloc(d->n_ticket, sizeof(*d->ticket));
    for (uint32_t i = 0; d->ticket && i < d->n_ticket; i++) {
        disk_ticket *t = &d->ticket[i];

        t->n_piece_max = i > DISK_TICKET_LOAD ? d->p.late_pieces : d->p.max_pieces;
        t->piece       = kvd_malloc(t->n_piece_max * sizeof(disk_piece));
        ok             = ok && t->piece;
    }
    return ok && d->ticket;
}

static kvd_status open_memory(kv_disk *d, kvd_err *err)
{
    const kv_disk_geometry *g = &d->p.geometry;
    const uint32_t          n_rec =
        g->n_lane ? KV_DISK_SEGMENT_BLOCKS * g->block_tokens / g->chunk_tokens : 1;
    const bool ok = open_tickets(d);

    d->unit     = kvd_calloc(d->p.max_units, sizeof(*d->unit));
    d->identity = kvd_malloc((size_t)n_rec * 2);
    d->sha      = EVP_MD_CTX_new();
    if (!ok || !d->unit || !d->identity || !d->sha)
        return kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory");
    for (uint32_t i = 0; i < n_rec; i++)
        d->identity[i] = (uint16_t)i;
    d->sha_type = EVP_MD_fetch(NULL, "SHA256", NULL);
    if (!d->sha_type || !kv_disk_model_name(d, d->p.fingerprint, g, &d->model))
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "block store: libcrypto has no SHA-256");
    return KVD_OK;
}

static kvd_status lock_dir(kv_disk *d, kvd_err *err)
{
    char path[DISK_PATH_BYTES];

    KVD_TRY(os_dir_open(&d->dir_fd, d->dir, err));
    snprintf(path, sizeof(path), "%s/lock", d->dir);
    return os_lock_open(&d->lock_fd, d->dir_fd, path, err);
}

static kvd_status load_dir(kv_disk *d, kvd_err *err)
{
    KVD_TRY(kv_disk_cat_open(d, err));
    return kv_disk_space_tidy(d, err);
}

kvd_status kv_disk_attach(kv_disk *d, kvd_err *err)
{
    KVD_TRY(lock_dir(d, err));
    return load_dir(d, err);
}

void kv_disk_detach(kv_disk *d)
{
    kv_disk_cat_close(d);
    kv_disk_space_reset(d);
    os_file_close(d->lock_fd);
    os_file_close(d->dir_fd);
    d->lock_fd = d->dir_fd = -1;
}

static kvd_status open_steps(kv_disk *d, kvd_err *err)
{
    KVD_TRY(lock_dir(d, err));
    KVD_TRY(open_memory(d, err));
    KVD_TRY(open_stage(d, err));
    return load_dir(d, err);
}

/* A limit beyond what the filesystem has is none: min_free_bytes is what then holds. */
static void warn_of_room(const kv_disk *d)
{
    const uint64_t avail = os_dir_free(d->dir), keep = d->p.min_free_bytes;
    const uint64_t most = d->stats.unit_bytes + (avail > keep ? avail - keep : 0);

    if (d->p.max_bytes > most && avail != UINT64_MAX)
        kvd_log(KVD_LOG_WARN,
                "%s: the cache may hold %.1f GiB, but its filesystem has room for %.1f GiB", d->dir,
                ldexp((double)d->p.max_bytes, -30), ldexp((double)most, -30));
}

kvd_status kv_disk_open(kv_disk **out, const kv_disk_params *p, kvd_err *err)
{
    kv_disk   *d;
    kvd_status st;

    *out = NULL;
    if (!p->dir || !p->dir[0] || strlen(p->dir) > DISK_PATH_BYTES - 64)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: no directory, or too long a name");
    if (p->geometry.n_lane && !kv_disk_geometry_ok(&p->geometry))
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: the geometry makes no sense");
    d = kvd_calloc(1, sizeof(*d));
    if (!d)
        return kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory");
    d->p       = *p;
    d->lock_fd = -1;
    d->dir_fd  = -1;
    d->log     = (disk_log){ .fd = -1, .db_fd = -1 };
    fill_defaults(&d->p);
    d->rate_left = (int64_t)kvd_min_u64(d->p.max_bytes_per_s, INT64_MAX);
    d->rate_ns   = kvd_now_ns();
    d->dir       = kvd_strndup(p->dir, strlen(p->dir));
    d->p.dir     = d->dir;
    st = d->dir ? open_steps(d, err) : kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory");
    if (st != KVD_OK) {
        kv_disk_close(d);
        return st;
    }
    warn_of_room(d);
    *out = d;
    return KVD_OK;
}

/* Every put is free or waits for requests that were not answered. */
static void close_puts(kv_disk *d)
{
    (void)kv_disk_flush(d, NULL);
    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++)
        if (d->put[i].state == PUT_OPEN)
            kv_disk_put_drop(d, &d->put[i]);
}

void kv_disk_close(kv_disk *d)
{
    bool idle = true;

    if (!d)
        return;
    if (d->io) {
        close_puts(d);
        kv_disk_log_wait(d);
        idle = os_io_close(d->io);
    }
    kv_disk_detach(d);
    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++) {
        kvd_free(d->put[i].token);
        kvd_free(d->put[i].lane_put);
        kvd_free(d->put[i].sum);
    }
    for (uint32_t i = 0; d->unit && i < d->p.max_units; i++) {
        kvd_free(d->unit[i].token);
        kvd_free(d->unit[i].sum);
        kvd_free(d->unit[i].place);
    }
    for (uint32_t i = 0; d->ticket && i < d->n_ticket; i++)
        kvd_free(d->ticket[i].piece);
    kvd_free(d->ticket);
    if (idle) /* else the system may still write into it: better lost than reused */
        kvd_pages_free(d->stage, d->stage_bytes);
    EVP_MD_CTX_free(d->sha);
    EVP_MD_free(d->sha_type);
    kvd_free(d->slot);
    kvd_free(d->unit);
    kvd_free(d->identity);
    kvd_free(d->dir);
    kvd_free(d);
}

const char *kv_disk_mode(const kv_disk *d)
{
    return d->mode;
}

void kv_disk_stats_get(const kv_disk *d, kv_disk_stats *out)
{
    *out        = d->stats;
    out->n_file = d->space.n_file;
}

uint32_t kv_disk_open_tokens(const kv_disk *d)
{
    return kv_disk_open_step(&d->p.geometry);
}

const char *kv_disk_kind_name(kv_disk_kind kind)
{
    static const char *const name[KV_DISK_KINDS] = { "block", "segment", "tail", "open" };

    return (uint32_t)kind < KV_DISK_KINDS ? name[kind] : "?";
}

const char *kv_disk_pause_name(kv_disk_pause p)
{
    static const char *const name[] = { "running",  "full", "error", "max",
                                        "min-free", "day",  "rate",  "gone" };

    return (uint32_t)p < KVD_COUNTOF(name) ? name[p] : "?";
}
