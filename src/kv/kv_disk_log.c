/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_log.c - the catalogue's log (SQLite's WAL) goes into its database, and nobody waits for
 * the disk meanwhile.
 *
 * SQLite would sync three times in one commit out of many.  Here it syncs nothing while the store
 * is open; the queue does:
 *
 *      IDLE --the log is long--> LOG --synced; its pages are copied--> DATABASE --synced; the log
 * is emptied--> EMPTY --synced--> IDLE
 *
 * Invariants
 *  (1) pages are copied only when the log that has them is synced;
 *  (2) the log is emptied only when the database is synced;
 *  (3) a log is begun only when it is synced that it is empty: after a power cut it has the
 *      beginning of the new one, or nothing.
 * Between IDLE and IDLE the catalogue is read and not written: rows wait in their puts, hints are
 * left out, and who has to write (evictions) waits.  After a failure, as on a full filesystem,
 * SQLite syncs and copies again by itself, in commits; what it has copied and takes for synced,
 * though that has failed, it copies once more, as it opens its files anew. */
#include <errno.h>

#include "kv/kv_disk_int.h"

bool kv_disk_log_idle(const kv_disk *d)
{
    return d->log.state == LOG_IDLE;
}

static void start(kv_disk *d, log_state state, int fd)
{
    d->log.state    = state;
    d->log.deadline = kvd_ran_ns() + DISK_COMMIT_TIMEOUTS * d->p.timeout_ns;
    d->log.synced   = false;
    d->log.turn++;
    kv_disk_sync_log_submit(d, d->log.turn, fd);
}

static void give_up(kv_disk *d, int sys, const char *text)
{
    d->log.state = LOG_IDLE;
    kv_disk_cat_alone(d);
    kv_disk_pause_error(d, sys, text);
    if (d->put_status == KVD_OK)
        d->put_status = kvd_fail(&d->put_err, KVD_E_IO, sys, "%s: %s", d->dir, text);
}

static void sync_failed(kv_disk *d, int sys, const char *text)
{
    if (d->log.state == LOG_DATABASE)
        kv_disk_cat_again(d);
    give_up(d, sys, text);
}

void kv_disk_log_begin(kv_disk *d)
{
    start(d, LOG_EMPTY, d->log.fd);
}

void kv_disk_log_synced(kv_disk *d, uint32_t turn, int error)
{
    if (d->log.state == LOG_IDLE || turn != d->log.turn)
        return; /* it came too late */
    d->log.synced = true;
    if (error)
        sync_failed(d, error, "the catalogue cannot be synced");
}

void kv_disk_log_advance(kv_disk *d)
{
    disk_log *l = &d->log;

    if (l->state == LOG_IDLE) {
        if (l->pages >= DISK_LOG_PAGES)
            start(d, LOG_FULL, l->fd);
        return;
    }
    if (!l->synced) {
        if (kvd_ran_ns() > l->deadline)
            sync_failed(d, ETIMEDOUT, "syncs of the catalogue take longer than their time limit");
        return;
    }
    if (l->state == LOG_EMPTY)
        l->state = LOG_IDLE;
    else if (!kv_disk_cat_checkpoint(d, l->state == LOG_DATABASE))
        give_up(d, kv_disk_cat_full(d) ? ENOSPC : EIO, "the catalogue's log cannot be copied");
    else if (l->state == LOG_FULL)
        start(d, LOG_DATABASE, l->db_fd);
    else
        start(d, LOG_EMPTY, l->fd);
}

/* Each state has a deadline, so this ends. */
void kv_disk_log_wait(kv_disk *d)
{
    while (d->log.state != LOG_IDLE) {
        kv_disk_reap(d, 10000000);
        kv_disk_log_advance(d);
    }
}
