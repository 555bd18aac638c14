/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_read.c - batches of reads: ranges sorted, merged, checked page by page, handed out.
 *
 * A batch becomes *pieces* (contiguous bytes of a unit that go to one place), sorted by where they
 * lie.  A *run* is as many of them as one slot of the stage takes, with gaps up to gap_bytes.
 *
 * Invariants
 *  (1) bytes reach a destination only after their page's checksum fitted, and only while the
 *      batch's ticket is the one they were read for;
 *  (2) a slot is reused only after its request was reaped, however late: what nobody waits for any
 *      more is dropped then;
 *  (3) a unit in flight is referenced. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kv/kv_disk_int.h"

/* ---- pieces ----------------------------------------------------------------------- */

static bool piece_before(const disk_piece *a, const disk_piece *b)
{
    return a->unit != b->unit ? a->unit < b->unit : a->off < b->off;
}

static void sift(disk_piece *p, uint32_t i, uint32_t n)
{
    for (;;) {
        uint32_t   big = 2 * i + 1;
        disk_piece t;

        if (big >= n)
            return;
        if (big + 1 < n && piece_before(&p[big], &p[big + 1]))
            big++;
        if (!piece_before(&p[i], &p[big]))
            return;
        t      = p[i];
        p[i]   = p[big];
        p[big] = t;
        i      = big;
    }
}

/* In place (qsort may allocate); most batches come sorted, then it costs one look. */
static void sort_pieces(disk_piece *p, uint32_t n)
{
    uint32_t i = 1;

    while (i < n && !piece_before(&p[i], &p[i - 1]))
        i++;
    if (i >= n)
        return;
    for (i = n / 2; i-- > 0;)
        sift(p, i, n);
    for (i = n; i-- > 1;) {
        const disk_piece t = p[0];

        p[0] = p[i];
        p[i] = t;
        sift(p, 0, i);
    }
}

/* Cut so that each part, with its pages, fits into a slot. */
static bool add_piece(disk_ticket *t, kv_disk_unit unit, uint64_t off, uint64_t bytes, uint8_t *dst)
{
    while (bytes > 0) {
        const uint64_t in_page = off % KV_DISK_PAGE_BYTES;
        const uint64_t n       = kvd_min_u64(bytes, DISK_SLOT_BYTES - in_page);

        if (t->n_piece == t->n_piece_max)
            return false;
        t->piece[t->n_piece++] = (disk_piece){ off, dst, (uint32_t)n, unit };
        off += n;
        bytes -= n;
        dst = dst ? dst + n : NULL;
    }
    return true;
}

static kvd_status add_read(kv_disk *d, disk_ticket *t, const kv_disk_read *r, kvd_err *err)
{
    disk_unit         *u     = kv_disk_unit_of(d, r->unit);
    const disk_layout *l     = u ? &u->layout : NULL;
    const bool         aux   = r->what == KV_DISK_AUX;
    const uint32_t     n_max = u ? (aux ? l->n_block : l->n_rec) : 0;
    uint8_t           *dst   = r->dst;
    uint64_t           base;
    bool               ok = true;

    if (!u || r->lane >= l->n_lane || r->first > n_max || r->n > n_max - r->first)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: a read outside its unit");
    if (u->bad)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s: unit %" PRId64 " is damaged", d->dir, u->id);
    KVD_TRY(kv_disk_unit_load(d, u, err));
    base = aux ? l->n_lane * l->rec_slot + r->lane * l->aux_slot : r->lane * l->rec_slot;
    if (aux || !u->place) {
        const uint32_t bytes = aux ? l->aux_bytes : l->rec_bytes;

        ok = add_piece(t, r->unit, base + (uint64_t)r->first * bytes, (uint64_t)r->n * bytes, dst);
    } else {
        const uint16_t *place = u->place + (size_t)r->lane * l->n_rec;

        for (uint32_t i = 0; ok && i < r->n; i++)
            ok = add_piece(t, r->unit, base + (uint64_t)place[r->first + i] * l->rec_bytes,
                           l->rec_bytes, dst + (size_t)i * l->rec_bytes);
    }
    return ok ? KVD_OK
              : kvd_fail(err, KVD_E_INVAL, 0,
                         "block store: a batch of more than %" PRIu32 " ranges", t->n_piece_max);
}

/* ---- tickets ---------------------------------------------------------------------- */

static void ticket_begin(kv_disk *d, disk_ticket *t, bool urgent, bool raw)
{
    t->used     = true;
    t->urgent   = urgent;
    t->raw      = raw;
    t->seq      = d->seq++;
    t->deadline = kvd_ran_ns() + d->p.timeout_ns;
    t->n_piece = t->next = t->n_flight = 0;
    t->status                          = KVD_OK;
}

static void ticket_end(disk_ticket *t)
{
    t->used = false;
    t->gen++;
}

/* The first failure is the batch's; nothing more is issued for it. */
static void ticket_fail(kv_disk *d, disk_ticket *t, kvd_status st, int sys, const disk_unit *u,
                        uint64_t off, const char *what)
{
    char path[DISK_PATH_BYTES] = "?";

    if (u)
        kv_disk_file_path(d, u->file, path);
    t->next = t->n_piece;
    if (t->status != KVD_OK)
        return;
    t->status = st;
    d->stats.n_read_failed++;
    d->stats.n_read_late += sys == ETIMEDOUT;
    d->stats.n_read_corrupt += st == KVD_E_CORRUPT;
    kvd_fail(&t->err, st, sys, "%s at %" PRIu64 ": %s", path, u ? u->off + off : 0, what);
}

static bool ticket_over(const disk_ticket *t)
{
    return t->next == t->n_piece && t->n_flight == 0;
}

/* What the batch waits for longest, for the message. */
static void ticket_late(kv_disk *d, disk_ticket *t)
{
    const uint32_t no = (uint32_t)(t - d->ticket);
    char           text[80];

    d->stats.n_timeout++;
    snprintf(text, sizeof(text), "no answer within the time limit of %.3g s",
             (double)d->p.timeout_ns / 1e9);
    for (uint32_t i = 0; i < d->n_read_slot; i++) {
        const disk_slot *s = &d->slot[i];

        if (s->busy && s->ticket == no && s->ticket_seq == t->seq) {
            ticket_fail(d, t, KVD_E_IO, ETIMEDOUT, s->unit, s->off, text);
            return;
        }
    }
    ticket_fail(d, t, KVD_E_IO, ETIMEDOUT, NULL, 0, text);
}

static kvd_status ticket_result(kv_disk *d, disk_ticket *t, kvd_err *err)
{
    if (!ticket_over(t)) {
        if (kvd_ran_ns() < t->deadline)
            return KVD_E_BUSY;
        ticket_late(d, t);
    }
    if (t->status != KVD_OK && err)
        *err = t->err;
    ticket_end(t);
    return t->status;
}

static kvd_status ticket_wait(kv_disk *d, disk_ticket *t, kvd_err *err)
{
    kvd_status st;

    kv_disk_pump(d, 0);
    while ((st = ticket_result(d, t, err)) == KVD_E_BUSY) {
        const uint64_t now = kvd_ran_ns();

        kv_disk_pump(d, t->deadline > now ? t->deadline - now : 0);
    }
    return st;
}

/* ---- runs ------------------------------------------------------------------------- */

static disk_ticket *ticket_next(kv_disk *d)
{
    disk_ticket *best = NULL;

    for (uint32_t i = 0; i < d->n_ticket; i++) {
        disk_ticket *t = &d->ticket[i];

        if (!t->used || t->next == t->n_piece)
            continue;
        if (!best || (t->urgent && !best->urgent) ||
            (t->urgent == best->urgent && t->seq < best->seq))
            best = t;
    }
    return best;
}

/* One run of the ticket into the slot. */
static void issue_run(kv_disk *d, disk_ticket *t, disk_slot *s)
{
    const disk_piece *p     = &t->piece[t->next];
    disk_unit        *u     = kv_disk_unit_of(d, p->unit);
    const uint64_t    start = p->off & ~(uint64_t)(KV_DISK_PAGE_BYTES - 1);
    uint64_t          end   = kvd_align_up(p->off + p->bytes, KV_DISK_PAGE_BYTES);
    uint32_t          n     = 1;

    for (; t->next + n < t->n_piece; n++) {
        const disk_piece *q       = p + n;
        const uint64_t    q_start = q->off & ~(uint64_t)(KV_DISK_PAGE_BYTES - 1);
        const uint64_t    q_end =
            kvd_max_u64(end, kvd_align_up(q->off + q->bytes, KV_DISK_PAGE_BYTES));

        if (q->unit != p->unit || q_start > end + d->p.gap_bytes || q_end - start > DISK_SLOT_BYTES)
            break;
        end = q_end;
    }
    u->n_ref++;
    s->unit        = u;
    s->ticket      = (uint32_t)(t - d->ticket);
    s->ticket_seq  = t->seq;
    s->first_piece = t->next;
    s->n_piece     = n;
    s->off         = start;
    s->bytes       = (uint32_t)(end - start);
    s->n_valid     = u->layout.n_valid;
    s->grows       = u->layout.grows;
    t->next += n;
    t->n_flight++;
    d->stats.n_read++;
    d->stats.read_bytes += s->bytes;
    kv_disk_slot_submit(d, s, OS_IO_READ, u->fd, u->off + start, s->bytes);
}

static void issue_runs(kv_disk *d)
{
    disk_ticket *t;

    while ((t = ticket_next(d)) != NULL) {
        disk_unit *u = kv_disk_unit_of(d, t->piece[t->next].unit);
        disk_slot *s;

        if (!u || u->bad) {
            ticket_fail(d, t, u ? KVD_E_CORRUPT : KVD_E_INVAL, 0, u, t->piece[t->next].off,
                        u ? "the unit is damaged" : "the unit is not referenced any more");
            continue;
        }
        s = kv_disk_slot_take(d, false);
        if (!s)
            return;
        issue_run(d, t, s);
    }
}

void kv_disk_read_issue(kv_disk *d)
{
    issue_runs(d);
    kv_disk_submit_held(d);
}

/* The first page of the run that is not what was written, or UINT64_MAX. */
static uint64_t first_bad_page(const disk_slot *s)
{
    const disk_unit   *u       = s->unit;
    const disk_layout *l       = &u->layout;
    const uint64_t     records = l->n_lane * l->rec_slot;

    /* a gap between pieces may have pages that nothing has been written to */
    for (uint64_t at = 0; at < s->bytes; at += KV_DISK_PAGE_BYTES) {
        const uint64_t off  = s->off + at;
        const bool     aux  = off >= records;
        const uint64_t slot = aux ? l->aux_slot : l->rec_slot;
        const uint64_t in   = aux ? off - records : off;
        const uint32_t lane = (uint32_t)(in / slot) + (aux ? l->n_lane : 0);
        const uint32_t page = (uint32_t)(in % slot / KV_DISK_PAGE_BYTES);

        if (s->grows && (aux || page >= s->n_valid))
            continue;
        if (u->sum[off / KV_DISK_PAGE_BYTES] != kv_disk_page_sum(u->seed, lane, page, s->buf + at))
            return off;
    }
    return UINT64_MAX;
}

void kv_disk_read_done(kv_disk *d, disk_slot *s, const os_io_done *done)
{
    disk_ticket *t    = &d->ticket[s->ticket];
    disk_unit   *u    = s->unit;
    const bool   ours = t->used && t->seq == s->ticket_seq;
    uint64_t     bad;

    if (ours && done->error) {
        ticket_fail(d, t, KVD_E_IO, done->error, u, s->off, "read");
        kv_disk_quarantine(d, u, t->err.msg); /* or it would fail again, and again */
    } else if (ours && done->bytes < s->bytes) {
        ticket_fail(d, t, KVD_E_CORRUPT, 0, u, s->off + done->bytes, "the file ends here");
        kv_disk_quarantine(d, u, t->err.msg);
    } else if (ours && t->status == KVD_OK) {
        bad = t->raw || d->p.unchecked ? UINT64_MAX : first_bad_page(s);
        if (bad != UINT64_MAX) {
            ticket_fail(d, t, KVD_E_CORRUPT, 0, u, bad, "a page is not what was written");
            kv_disk_quarantine(d, u, t->err.msg);
        }
        for (uint32_t i = 0; bad == UINT64_MAX && i < s->n_piece; i++) {
            const disk_piece *p = &t->piece[s->first_piece + i];

            if (p->dst)
                memcpy(p->dst, s->buf + (p->off - s->off), p->bytes);
        }
    }
    if (ours)
        t->n_flight--;
    s->unit = NULL;
    kv_disk_unit_release(d, u);
}

/* ---- what a unit needs before its first read --------------------------------------- */

/* Reads ranges of one unit on the store's own ticket. */
static kvd_status load_range(kv_disk *d, disk_unit *u, bool raw, uint64_t off, uint64_t bytes,
                             void *dst, kvd_err *err)
{
    disk_ticket       *t = &d->ticket[DISK_TICKET_LOAD];
    const kv_disk_unit h = kv_disk_unit_handle(d, u);

    kvd_assert(!t->used);
    while (bytes > 0) { /* in steps that fit into a ticket */
        const uint64_t n = kvd_min_u64(bytes, (uint64_t)(d->p.max_pieces - 1) * DISK_SLOT_BYTES);

        ticket_begin(d, t, true, raw);
        (void)add_piece(t, h, off, n, dst);
        KVD_TRY(ticket_wait(d, t, err));
        off += n;
        bytes -= n;
        dst = dst ? (uint8_t *)dst + n : NULL;
    }
    return KVD_OK;
}

/* The orders of all lanes [n_lane][n_rec], as many reads at a time as a ticket takes. */
static kvd_status load_orders(kv_disk *d, disk_unit *u, uint16_t *order, kvd_err *err)
{
    const disk_layout *l    = &u->layout;
    const uint64_t     base = l->n_lane * l->rec_slot + (uint64_t)l->n_block * l->aux_bytes;
    disk_ticket       *t    = &d->ticket[DISK_TICKET_LOAD];

    for (uint32_t lane = 0; lane < l->n_lane;) {
        ticket_begin(d, t, true, false);
        for (; lane < l->n_lane && t->n_piece + 2 < d->p.max_pieces; lane++)
            (void)add_piece(t, kv_disk_unit_handle(d, u), base + lane * l->aux_slot,
                            (uint64_t)l->n_rec * 2, (uint8_t *)(order + (size_t)lane * l->n_rec));
        KVD_TRY(ticket_wait(d, t, err));
    }
    return KVD_OK;
}

/* The orders, inverted; none is kept where all lanes are in token order. */
static kvd_status load_places(kv_disk *d, disk_unit *u, kvd_err *err)
{
    const disk_layout *l     = &u->layout;
    const size_t       bytes = (size_t)l->n_lane * l->n_rec * 2;
    uint16_t          *order = kvd_malloc(bytes), *place = kvd_malloc(bytes);
    bool               plain = true;
    kvd_status         st;

    st = order && place ? load_orders(d, u, order, err)
                        : kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory for an order");
    for (size_t at = 0; st == KVD_OK && at < (size_t)l->n_lane * l->n_rec; at += l->n_rec) {
        if (!kv_disk_is_permutation(order + at, l->n_rec)) {
            kv_disk_quarantine(d, u, "its order is none");
            st = kvd_fail(err, KVD_E_CORRUPT, 0, "%s: unit %" PRId64 ": its order is none", d->dir,
                          u->id);
            break;
        }
        for (uint32_t i = 0; i < l->n_rec; i++) {
            place[at + order[at + i]] = (uint16_t)i;
            plain                     = plain && order[at + i] == i;
        }
    }
    kvd_free(order);
    if (st != KVD_OK || plain)
        kvd_free(place);
    else
        u->place = place;
    return st;
}

/* Sums of pages that an open block does not have: a put that failed may have left some. */
static void forget_unwritten(const disk_layout *l, uint64_t *sum)
{
    const uint64_t per_slot = l->rec_slot / KV_DISK_PAGE_BYTES;

    for (uint64_t i = 0; l->grows && i < l->n_page; i++)
        if (i >= l->n_lane * per_slot || i % per_slot >= l->n_valid)
            sum[i] = 0;
}

kvd_status kv_disk_unit_load(kv_disk *d, disk_unit *u, kvd_err *err)
{
    const disk_layout *l = &u->layout;
    kvd_status         st;

    if (u->sum)
        return KVD_OK;
    u->n_ref++;
    u->sum = kvd_malloc(l->n_page * 8);
    st     = u->sum ? load_range(d, u, true, l->sums_off, l->n_page * 8, u->sum, err)
                    : kvd_fail(err, KVD_E_NOMEM, 0, "block store: no memory for checksums");
    if (st == KVD_OK)
        forget_unwritten(l, u->sum);
    if (st == KVD_OK && !d->p.unchecked &&
        kv_disk_table_sum(u->seed, u->sum, l->n_page) != u->sums_hash) {
        kv_disk_quarantine(d, u, "its table of checksums is damaged");
        st = kvd_fail(err, KVD_E_CORRUPT, 0,
                      "%s: unit %" PRId64 ": its table of checksums is damaged", d->dir, u->id);
    }
    if (st == KVD_OK && l->ordered)
        st = load_places(d, u, err);
    if (st != KVD_OK) {
        kvd_free(u->sum);
        u->sum = NULL;
    }
    kv_disk_unit_release(d, u);
    return st;
}

kvd_status kv_disk_prepare(kv_disk *d, kv_disk_unit unit, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    disk_unit     *u  = kv_disk_unit_of(d, unit);

    if (!u)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: no such unit");
    return kv_disk_spent(&d->stats.read_ns, t0, kv_disk_unit_load(d, u, err));
}

kvd_status kv_disk_unit_verify(kv_disk *d, disk_unit *u, kvd_err *err)
{
    KVD_TRY(kv_disk_unit_load(d, u, err));
    return load_range(d, u, false, 0, u->layout.sums_off, NULL, err);
}

/* ---- the batch -------------------------------------------------------------------- */

static disk_ticket *ticket_of(kv_disk *d, kv_disk_ticket h)
{
    const uint32_t i = (h & 0xffff) - 1;

    if (i >= d->n_ticket || i == DISK_TICKET_LOAD || !d->ticket[i].used ||
        d->ticket[i].gen != h >> 16)
        return NULL;
    return &d->ticket[i];
}

/* A free ticket for a batch of about n ranges: late ones first, where it may take them. */
static disk_ticket *ticket_take(kv_disk *d, uint32_t n, bool urgent)
{
    for (uint32_t i = d->n_ticket; i-- > 0;) {
        disk_ticket *t = &d->ticket[i];

        if (!t->used && i != DISK_TICKET_LOAD &&
            (i < KV_DISK_TICKET_MAX || (!urgent && n <= t->n_piece_max)))
            return t;
    }
    return NULL;
}

static kvd_status start_batch(kv_disk *d, const kv_disk_read *r, uint32_t n, bool urgent,
                              kv_disk_ticket *out, kvd_err *err)
{
    disk_ticket *t  = ticket_take(d, n, urgent);
    kvd_status   st = KVD_OK;

    *out = KV_DISK_NONE;
    if (!t)
        return kvd_fail(err, KVD_E_BUSY, 0, "block store: %u batches of reads are in flight",
                        KV_DISK_TICKET_MAX);
    ticket_begin(d, t, urgent, false);
    t->used = false; /* nothing is issued for it while units are loaded */
    for (uint32_t k = 0; k < n && st == KVD_OK; k++)
        st = add_read(d, t, &r[k], err);
    if (st != KVD_OK)
        return st;
    for (uint32_t k = 0; k < t->n_piece; k++)
        d->stats.useful_bytes += t->piece[k].bytes;
    t->used = true;
    sort_pieces(t->piece, t->n_piece);
    kv_disk_read_issue(d);
    *out = (uint32_t)(t - d->ticket + 1) | (uint32_t)t->gen << 16;
    return KVD_OK;
}

kvd_status kv_disk_read_start(kv_disk *d, const kv_disk_read *r, uint32_t n, bool urgent,
                              kv_disk_ticket *out, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();

    return kv_disk_spent(&d->stats.read_ns, t0, start_batch(d, r, n, urgent, out, err));
}

kvd_status kv_disk_read_poll(kv_disk *d, kv_disk_ticket h, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    disk_ticket   *t  = ticket_of(d, h);

    if (!t)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: no such batch of reads");
    kv_disk_pump(d, 0);
    return kv_disk_spent(&d->stats.read_ns, t0, ticket_result(d, t, err));
}

kvd_status kv_disk_read_wait(kv_disk *d, kv_disk_ticket h, kvd_err *err)
{
    const uint64_t t0 = kvd_now_ns();
    disk_ticket   *t  = ticket_of(d, h);

    if (!t)
        return kvd_fail(err, KVD_E_INVAL, 0, "block store: no such batch of reads");
    return kv_disk_spent(&d->stats.read_ns, t0, ticket_wait(d, t, err));
}

kvd_status kv_disk_read_now(kv_disk *d, const kv_disk_read *r, uint32_t n, kvd_err *err)
{
    kv_disk_ticket t;

    KVD_TRY(kv_disk_read_start(d, r, n, true, &t, err));
    return kv_disk_read_wait(d, t, err);
}
