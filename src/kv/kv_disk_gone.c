/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_gone.c - a directory that is removed while it is open, or emptied, or replaced.
 *
 *      THERE --its path means another one, or the lock file has no name--> GONE
 *      GONE  --opened anew, when nothing of the old one is in use--> THERE
 *
 * While it is gone nothing is found, stored or counted.  Units in use are read to their end: their
 * files are open.  It is tried again every pause_ns, and at once by kv_disk_look().
 *
 * Nothing is made before the first pause is over: who removes a directory may not be done yet. */
#include <stdio.h>
#include <string.h>

#include "kv/kv_disk_int.h"

#define LOOK_NS UINT64_C(1000000000)

static bool is_there(const kv_disk *d)
{
    return os_dir_is(d->dir_fd, d->dir) && os_file_is_named(d->lock_fd) &&
           (d->log.db_fd < 0 || os_file_is_named(d->log.db_fd));
}

static void count_nothing(kv_disk *d)
{
    kv_disk_stats *s = &d->stats;

    s->n_unit = s->n_block = s->n_segment = s->n_bad = s->n_tail = 0;
    s->unit_bytes = s->salted_bytes = 0;
}

static void lose(kv_disk *d)
{
    kv_disk_stats *s = &d->stats;

    d->gone = true;
    kv_disk_cat_lose(d);
    count_nothing(d);
    s->pause = KV_DISK_PAUSE_GONE;
    s->n_pause++;
    snprintf(s->pause_text, sizeof(s->pause_text), "the cache directory was removed");
    d->pause_until = kvd_now_ns() + d->p.pause_ns;
    kvd_log(KVD_LOG_WARN,
            "%s: the cache directory was removed: nothing is stored or found; it is made anew in "
            "%.0f s",
            d->dir, (double)d->p.pause_ns * 1e-9);
}

static bool in_use(const kv_disk *d)
{
    bool used = d->n_unit_used > 0;

    for (uint32_t i = 0; i < KV_DISK_PUT_MAX; i++)
        used = used || d->put[i].state != PUT_FREE;
    for (uint32_t i = 0; i < d->n_ticket; i++)
        used = used || d->ticket[i].used;
    return used;
}

/* Still gone, for this reason, which is logged when it is new. */
static kvd_status stay_gone(kv_disk *d, const kvd_err *why, kvd_err *err)
{
    kv_disk_stats *s = &d->stats;
    char           text[sizeof(s->pause_text)];

    snprintf(text, sizeof(text), "the cache directory was removed, and is not back: %.100s",
             why->msg);
    if (strcmp(text, s->pause_text) != 0)
        kvd_log(KVD_LOG_WARN, "%s: %s; it is tried again every %.0f s", d->dir, text,
                (double)d->p.pause_ns * 1e-9);
    memcpy(s->pause_text, text, sizeof(text));
    s->pause       = KV_DISK_PAUSE_GONE;
    d->pause_until = kvd_now_ns() + d->p.pause_ns;
    return kvd_fail(err, why->code, why->sys, "%s", text);
}

static kvd_status try_again(kv_disk *d, kvd_err *err)
{
    kvd_err why = { 0 };

    if (in_use(d)) {
        kvd_fail(&why, KVD_E_BUSY, 0, "sequences still read what it had");
        return stay_gone(d, &why, err);
    }
    kv_disk_log_wait(d);
    kv_disk_detach(d);
    d->cat_broken = false;
    d->gone       = false;
    count_nothing(d);
    if (kv_disk_attach(d, &why) != KVD_OK) {
        kv_disk_detach(d);
        count_nothing(d);
        d->gone = d->cat_broken = true;
        return stay_gone(d, &why, err);
    }
    d->put_status          = KVD_OK; /* failures of what is gone */
    d->pause_until         = 0;
    d->stats.pause         = KV_DISK_RUNNING;
    d->stats.pause_text[0] = 0;
    kvd_log(KVD_LOG_WARN, "%s: the cache directory is back, with %llu units", d->dir,
            (unsigned long long)d->stats.n_unit);
    return KVD_OK;
}

void kv_disk_watch(kv_disk *d)
{
    const uint64_t now   = kvd_now_ns();
    const bool     guard = kvd_alloc_guard(false); /* rare, and no matter of a decode step */

    if (!d->gone && now >= d->look_ns) {
        d->look_ns = now + LOOK_NS;
        if (!is_there(d))
            lose(d);
    } else if (d->gone && now >= d->pause_until) {
        (void)try_again(d, NULL);
    }
    (void)kvd_alloc_guard(guard);
}

kvd_status kv_disk_look(kv_disk *d, kvd_err *err)
{
    if (!d->gone && !is_there(d))
        lose(d);
    return d->gone ? try_again(d, err) : KVD_OK;
}
