/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_space.c - where units lie: data files, free ranges in them, limits, eviction.
 *
 * Invariants
 *  (1) the ranges of units, of puts under way and the free ranges of a file are disjoint and
 *      together make [0, end);
 *  (2) a file without units and puts is removed;
 *  (3) a range becomes free after its row is gone from the catalogue, and only when nobody reads
 *      or writes it.
 * What the catalogue does not name is free: that is all the recovery there is. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "kv/kv_disk_int.h"

#define DAY_SECONDS 86400

/* ---- files ------------------------------------------------------------------------ */

void kv_disk_file_path(const kv_disk *d, uint32_t file, char out[DISK_PATH_BYTES])
{
    snprintf(out, DISK_PATH_BYTES, "%s/%08" PRIx32 ".kvd", d->dir, file);
}

/* The first file whose id is at least this. */
static uint32_t file_at(const disk_space *s, uint32_t id)
{
    uint32_t lo = 0, hi = s->n_file;

    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;

        if (s->file[mid].id < id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static disk_file *file_of(disk_space *s, uint32_t id)
{
    const uint32_t i = file_at(s, id);

    return i < s->n_file && s->file[i].id == id ? &s->file[i] : NULL;
}

/* Rare, and due whenever a commit ends: the guard of a decode step that polls for reads meanwhile
 * does not mean us. */
static bool grow(void **p, uint32_t *cap, uint32_t n, size_t bytes)
{
    const uint32_t more = *cap ? *cap * 2 : 64;
    bool           guard;
    void          *q;

    if (n < *cap)
        return true;
    guard = kvd_alloc_guard(false);
    q     = kvd_realloc(*p, more * bytes);
    (void)kvd_alloc_guard(guard);
    if (!q)
        return false;
    *p   = q;
    *cap = more;
    return true;
}

/* Ids only ascend, so a new file goes to the end. */
static disk_file *file_add(disk_space *s, uint32_t id)
{
    if (!grow((void **)&s->file, &s->cap_file, s->n_file, sizeof(*s->file)))
        return NULL;
    s->file[s->n_file] = (disk_file){ .id = id, .fd = -1 };
    return &s->file[s->n_file++];
}

kvd_status kv_disk_file_use(kv_disk *d, uint32_t file, int *fd, kvd_err *err)
{
    disk_file     *f     = file_of(&d->space, file);
    const uint32_t flags = OS_OPEN_CREATE | (d->space.direct ? (uint32_t)OS_OPEN_DIRECT : 0);
    char           path[DISK_PATH_BYTES];

    *fd = -1;
    if (!f)
        return kvd_fail(err, KVD_E_CORRUPT, ENOENT, "%s: no data file %08" PRIx32, d->dir, file);
    if (f->fd < 0) {
        kv_disk_file_path(d, file, path);
        /* A file that units lie in is there, or they are lost. */
        KVD_TRY(os_file_open_in(
            &f->fd, d->dir_fd, path,
            f->end ? flags & ~(uint32_t)(OS_OPEN_CREATE ^ OS_OPEN_WRITE) : flags, err));
    }
    f->n_open++;
    *fd = f->fd;
    return KVD_OK;
}

void kv_disk_file_release(kv_disk *d, uint32_t file)
{
    disk_file *f = file_of(&d->space, file);

    kvd_assert(f && f->n_open > 0);
    if (--f->n_open == 0) {
        os_file_close(f->fd);
        f->fd = -1;
    }
}

bool kv_disk_file_is_named(kv_disk *d, uint32_t file)
{
    const disk_file *f = file_of(&d->space, file);

    return f && f->named;
}

void kv_disk_file_set_named(kv_disk *d, uint32_t file)
{
    disk_file *f = file_of(&d->space, file);

    kvd_assert(f != NULL);
    f->named = true;
}

static void file_drop(kv_disk *d, disk_file *f)
{
    disk_space *s = &d->space;
    uint32_t    n = 0;
    char        path[DISK_PATH_BYTES];

    kvd_assert(f->n_open == 0);
    for (uint32_t i = 0; i < s->n_free; i++)
        if (s->free[i].file != f->id)
            s->free[n++] = s->free[i];
    s->n_free = n;
    kv_disk_file_path(d, f->id, path);
    os_file_remove_in(d->dir_fd, path);
    memmove(f, f + 1, (size_t)(s->file + s->n_file - (f + 1)) * sizeof(*f));
    s->n_file--;
}

/* ---- ranges ----------------------------------------------------------------------- */

/* The first free range at or behind this place. */
static uint32_t range_at(const disk_space *s, uint32_t file, uint64_t off)
{
    uint32_t lo = 0, hi = s->n_free;

    while (lo < hi) {
        const uint32_t    mid = lo + (hi - lo) / 2;
        const disk_range *r   = &s->free[mid];

        if (r->file < file || (r->file == file && r->off < off))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Without memory for it a range is lost until the next open. */
static void range_add(disk_space *s, uint32_t file, uint64_t off, uint64_t bytes)
{
    uint32_t    i          = range_at(s, file, off);
    disk_range *prev       = i > 0 ? &s->free[i - 1] : NULL;
    disk_range *next       = i < s->n_free ? &s->free[i] : NULL;
    const bool  joins_prev = prev && prev->file == file && prev->off + prev->bytes == off;
    const bool  joins_next = next && next->file == file && off + bytes == next->off;

    if (joins_prev) {
        prev->bytes += bytes + (joins_next ? next->bytes : 0);
        if (joins_next) {
            memmove(next, next + 1, (size_t)(s->n_free - i - 1) * sizeof(*next));
            s->n_free--;
        }
    } else if (joins_next) {
        next->off = off;
        next->bytes += bytes;
    } else if (grow((void **)&s->free, &s->cap_free, s->n_free, sizeof(*s->free))) {
        memmove(&s->free[i + 1], &s->free[i], (size_t)(s->n_free - i) * sizeof(*s->free));
        s->free[i] = (disk_range){ file, off, bytes };
        s->n_free++;
    }
}

static bool range_take(disk_space *s, uint64_t bytes, disk_range *out)
{
    for (uint32_t i = 0; i < s->n_free; i++) {
        disk_range *r = &s->free[i];

        if (r->bytes < bytes)
            continue;
        *out = (disk_range){ r->file, r->off, bytes };
        r->off += bytes;
        r->bytes -= bytes;
        if (r->bytes == 0) {
            memmove(r, r + 1, (size_t)(s->n_free - i - 1) * sizeof(*r));
            s->n_free--;
        }
        return true;
    }
    return false;
}

kvd_status kv_disk_space_seen(kv_disk *d, uint32_t file, uint64_t off, uint64_t bytes, kvd_err *err)
{
    disk_space *s = &d->space;
    disk_file  *f = file_of(s, file);
    uint64_t    end;

    if (file == 0 || file == UINT32_MAX || bytes == 0 || !kvd_add(off, bytes, &end) ||
        end > INT64_MAX || (off | bytes) % KV_DISK_PAGE_BYTES || (f && off < f->end) ||
        (s->n_file && file < s->file[s->n_file - 1].id)) /* the catalogue's order is none */
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s: a unit lies at a place that cannot be", d->dir);
    if (!f)
        f = file_add(s, file);
    if (!f)
        return kvd_fail(err, KVD_E_NOMEM, 0, "%s: no memory for the list of files", d->dir);
    if (off > f->end)
        range_add(s, file, f->end, off - f->end);
    f->end   = end;
    f->named = true;
    f->n_unit++;
    return KVD_OK;
}

void kv_disk_space_reset(kv_disk *d)
{
    disk_space *s = &d->space;

    for (uint32_t i = 0; i < s->n_file; i++)
        os_file_close(s->file[i].fd);
    kvd_free(s->file);
    kvd_free(s->free);
    s->file   = NULL;
    s->free   = NULL;
    s->n_file = s->cap_file = s->n_free = s->cap_free = 0;
}

static void remove_unknown(void *ctx, const char *name)
{
    kv_disk *d = ctx;
    uint32_t id;
    char     path[DISK_PATH_BYTES], want[16];

    if (sscanf(name, "%8" SCNx32, &id) != 1)
        return;
    snprintf(want, sizeof(want), "%08" PRIx32 ".kvd", id);
    if (strcmp(name, want) != 0 || file_of(&d->space, id))
        return;
    kv_disk_file_path(d, id, path);
    os_file_remove_in(d->dir_fd, path);
}

/* What a killed process had reserved: holes in the file, and what lies behind its last unit. */
static void punch_unknown(const disk_space *s, const disk_file *f, int fd)
{
    uint64_t bytes = 0;

    for (uint32_t r = range_at(s, f->id, 0); r < s->n_free && s->free[r].file == f->id; r++)
        os_file_punch(fd, s->free[r].off, s->free[r].bytes);
    if (os_file_size(fd, &bytes) == KVD_OK && bytes > f->end)
        os_file_punch(fd, f->end, bytes - f->end);
}

typedef struct lost_file {
    uint32_t file;
    disk_row row;
    bool     found;
} lost_file;

static bool lies_in(void *ctx, const disk_row *r)
{
    lost_file *l = ctx;

    l->found = r->file == l->file;
    l->row   = *r;
    return !l->found;
}

/* The units of a file that somebody removed, or put something else in place of. */
static kvd_status forget_file(kv_disk *d, uint32_t file, kvd_err *err)
{
    lost_file l = { .file = file };

    kvd_log(KVD_LOG_WARN, "%s: data file %08" PRIx32 " is missing, or no file", d->dir, file);
    for (;;) {
        l.found = false;
        KVD_TRY(kv_disk_cat_oldest(d, false, lies_in, &l, err));
        if (!l.found || !kv_disk_evict(d, &l.row))
            return KVD_OK;
        d->stats.n_evicted--;
        d->stats.n_quarantined++;
    }
}

static bool is_no_file(int sys)
{
    return sys == ENOENT || sys == ELOOP || sys == EINVAL || sys == EISDIR;
}

kvd_status kv_disk_space_tidy(kv_disk *d, kvd_err *err)
{
    disk_space *s = &d->space;

    KVD_TRY(os_dir_list(d->dir, remove_unknown, d, err));
    for (uint32_t i = 0; i < s->n_file;) {
        const uint32_t id  = s->file[i].id;
        kvd_err        why = { 0 };
        char           path[DISK_PATH_BYTES];
        int            fd;

        kv_disk_file_path(d, id, path);
        if (os_file_open_in(&fd, d->dir_fd, path, OS_OPEN_WRITE, &why) == KVD_OK) {
            punch_unknown(s, &s->file[i], fd);
            os_file_close(fd);
        } else if (is_no_file(why.sys)) {
            KVD_TRY(forget_file(d, id, err));
        }
        i += i < s->n_file && s->file[i].id == id; /* a forgotten file has left the list */
    }
    return KVD_OK;
}

/* Behind the last unit of the last file, or in a new file. */
static kvd_status append(kv_disk *d, uint64_t bytes, disk_range *out, kvd_err *err)
{
    disk_space *s    = &d->space;
    disk_file  *last = s->n_file ? &s->file[s->n_file - 1] : NULL;

    if (!last || last->end + bytes > d->p.file_bytes) {
        const uint32_t id = last ? last->id + 1 : 1;

        if (id == UINT32_MAX)
            return kvd_fail(err, KVD_E_IO, 0, "%s: no numbers for files are left", d->dir);
        last = file_add(s, id);
        if (!last)
            return kvd_fail(err, KVD_E_NOMEM, 0, "%s: no memory for the list of files", d->dir);
    }
    *out = (disk_range){ last->id, last->end, bytes };
    return KVD_OK;
}

kvd_status kv_disk_space_alloc(kv_disk *d, uint64_t bytes, uint32_t *file, uint64_t *off, int *fd,
                               kvd_err *err)
{
    disk_range r = { 0 };
    disk_file *f;
    kvd_status st;
    char       path[DISK_PATH_BYTES];

    if (!range_take(&d->space, bytes, &r))
        KVD_TRY(append(d, bytes, &r, err));
    f = file_of(&d->space, r.file);
    kv_disk_file_path(d, r.file, path);
    st     = kv_disk_file_use(d, r.file, fd, err);
    f->end = kvd_max_u64(f->end, r.off + bytes);
    f->n_unit++;
    if (st == KVD_OK) {
        st = os_file_reserve(*fd, r.off, bytes, path, err);
        if (st == KVD_OK) {
            *file = r.file;
            *off  = r.off;
            return KVD_OK;
        }
    }
    if (*fd >= 0)
        kv_disk_file_release(d, r.file);
    kv_disk_space_free(d, r.file, r.off, bytes);
    return st;
}

void kv_disk_space_free(kv_disk *d, uint32_t file, uint64_t off, uint64_t bytes)
{
    disk_file *f = file_of(&d->space, file);
    int        fd;

    kvd_assert(f && f->n_unit > 0);
    if (--f->n_unit == 0) {
        file_drop(d, f);
        return;
    }
    range_add(&d->space, file, off, bytes);
    if (!d->space.punch_later && kv_disk_file_use(d, file, &fd, NULL) == KVD_OK) {
        os_file_punch(fd, off, bytes);
        kv_disk_file_release(d, file);
    }
}

/* ---- limits ----------------------------------------------------------------------- */

kvd_status kv_disk_refuse(kv_disk *d, kv_disk_pause why, const char *text, kvd_err *err)
{
    d->stats.n_put_refused++;
    d->stats.pause = why;
    if (text != d->stats.pause_text)
        snprintf(d->stats.pause_text, sizeof(d->stats.pause_text), "%s", text);
    return kvd_fail(err, KVD_E_BUSY, 0, "not stored: %s", d->stats.pause_text);
}

void kv_disk_pause_error(kv_disk *d, int sys, const char *text)
{
    const bool full = sys == ENOSPC || sys == EDQUOT;

    d->look_ns = 0; /* the next call looks whether the directory is there at all */
    if (d->gone)
        return;
    d->stats.pause = full ? KV_DISK_PAUSE_FULL : KV_DISK_PAUSE_ERROR;
    d->stats.n_pause++;
    snprintf(d->stats.pause_text, sizeof(d->stats.pause_text), "%s", text);
    d->pause_until = kvd_now_ns() + d->p.pause_ns;
    kvd_log(KVD_LOG_WARN, "%s: nothing is stored for a while: %s", d->dir, text);
}

/* Removing a row takes some room, too.  Where there is none, the unit's bytes go first; were we
 * killed in between, its checksums would tell. */
static bool remove_full(kv_disk *d, const disk_row *r)
{
    int fd;

    if (kv_disk_file_use(d, r->file, &fd, NULL) != KVD_OK)
        return false;
    os_file_punch(fd, r->off, r->bytes);
    kv_disk_file_release(d, r->file);
    return kv_disk_cat_remove(d, r->id);
}

bool kv_disk_evict(kv_disk *d, const disk_row *r)
{
    kv_disk_stats *s = &d->stats;

    if (kv_disk_unit_in_use(d, r->id))
        return false;
    if (!kv_disk_cat_remove(d, r->id) && !(kv_disk_cat_full(d) && remove_full(d, r)))
        return false;
    kv_disk_at(d, "evicted");
    kv_disk_space_free(d, r->file, r->off, r->bytes);
    s->n_unit--;
    s->n_block -= r->counted_kind == KV_DISK_BLOCK;
    s->n_segment -= r->counted_kind == KV_DISK_SEGMENT;
    s->n_tail -= r->counted_kind == KV_DISK_TAIL || r->counted_kind == KV_DISK_OPEN;
    s->n_bad -= r->bad;
    s->unit_bytes -= r->bytes;
    s->salted_bytes -= r->salted ? r->bytes : 0;
    s->n_evicted++;
    return true;
}

typedef struct victim {
    kv_disk *d;
    disk_row row;
    bool     only_bad, found;
} victim;

static bool victim_fits(void *ctx, const disk_row *r)
{
    victim *v = ctx;

    if (v->only_bad && !r->bad)
        return false; /* the bad come first */
    v->found = !kv_disk_unit_in_use(v->d, r->id);
    v->row   = *r; /* its borrowed pointers are not used */
    return !v->found;
}

kvd_status kv_disk_evict_oldest(kv_disk *d, evict_which which, bool *gone, kvd_err *err)
{
    victim v = { .d = d, .only_bad = which == EVICT_BAD };

    *gone = false;
    KVD_TRY(kv_disk_cat_oldest(d, which == EVICT_SALTED, victim_fits, &v, err));
    *gone = v.found && kv_disk_evict(d, &v.row);
    return *gone || !v.found ? KVD_OK
                             : kvd_fail(err, KVD_E_IO, 0,
                                        "%s: a unit cannot be removed from the "
                                        "catalogue",
                                        d->dir);
}

static bool evict_one(kv_disk *d, evict_which which)
{
    bool gone;

    return kv_disk_evict_oldest(d, which, &gone, NULL) == KVD_OK && gone;
}

/* By an option; `what` ends before its size. */
static kvd_status refuse_size(kv_disk *d, kv_disk_pause why, const char *what, uint64_t bytes,
                              kvd_err *err)
{
    char text[sizeof(d->stats.pause_text)];

    snprintf(text, sizeof(text), "%s %" PRIu64 " KiB", what, bytes >> 10);
    return kv_disk_refuse(d, why, text, err);
}

/* Whether this many bytes may be written today and now. */
static kvd_status admit_speed(kv_disk *d, uint64_t bytes, kvd_err *err)
{
    const int64_t  today = (int64_t)time(NULL) / DAY_SECONDS;
    const uint64_t now   = kvd_now_ns();
    const uint64_t rate  = d->p.max_bytes_per_s;

    if (today != d->day) {
        d->day             = today;
        d->stats.day_bytes = 0;
    }
    if (d->p.max_bytes_per_day && d->stats.day_bytes + bytes > d->p.max_bytes_per_day)
        return kv_disk_refuse(d, KV_DISK_PAUSE_DAY, "today's limit of bytes written is reached",
                              err);
    if (!rate)
        return KVD_OK;
    /* A second's worth at most is saved up; a unit larger than that overdraws, and the next ones
     * wait. */
    const double saved = (double)d->rate_left + (double)(now - d->rate_ns) * 1e-9 * (double)rate;

    d->rate_left = saved > (double)rate ? (int64_t)kvd_min_u64(rate, INT64_MAX) : (int64_t)saved;
    d->rate_ns   = now;
    if (d->rate_left < (int64_t)kvd_min_u64(bytes, rate))
        return kv_disk_refuse(d, KV_DISK_PAUSE_RATE, "the limit of bytes a second is reached", err);
    d->rate_left -= (int64_t)bytes;
    return KVD_OK;
}

kvd_status kv_disk_space_admit(kv_disk *d, uint64_t bytes, uint64_t written, bool salted,
                               kvd_err *err)
{
    const kv_disk_stats *s = &d->stats;

    if (d->gone)
        return kv_disk_refuse(d, KV_DISK_PAUSE_GONE, s->pause_text, err);
    if (d->cat_broken)
        return kv_disk_refuse(d, KV_DISK_PAUSE_ERROR, "the catalogue is damaged", err);
    if (d->pause_until > kvd_now_ns())
        return kv_disk_refuse(d, s->pause, s->pause_text, err);
    while (salted && d->p.max_salted_bytes &&
           s->salted_bytes + d->reserved_salted + bytes > d->p.max_salted_bytes)
        if (!evict_one(d, EVICT_SALTED))
            return kv_disk_refuse(d, KV_DISK_PAUSE_MAX, "salted units have reached their quota",
                                  err);
    while (d->p.max_bytes && s->unit_bytes + d->reserved_bytes + bytes > d->p.max_bytes)
        if (!evict_one(d, EVICT_ANY))
            return refuse_size(d, KV_DISK_PAUSE_MAX,
                               "the cache has reached its size (cache_bytes) of", d->p.max_bytes,
                               err);
    while (d->p.min_free_bytes && os_dir_free(d->dir) < d->p.min_free_bytes + bytes)
        if (!evict_one(d, EVICT_ANY))
            return refuse_size(d, KV_DISK_PAUSE_MIN_FREE,
                               "the filesystem has no more free than asked for (cache_min_free),",
                               d->p.min_free_bytes, err);
    KVD_TRY(admit_speed(d, written, err));
    d->stats.pause         = KV_DISK_RUNNING;
    d->stats.pause_text[0] = 0;
    return KVD_OK;
}
