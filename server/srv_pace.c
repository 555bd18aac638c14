/* SPDX-License-Identifier: Apache-2.0 */
/* srv_pace.c - how large a piece of a prompt a step takes, so that answers keep their pace.
 *
 * What a piece adds to a step is learned for sizes of 1, 2, 4 ... tokens, as steps run: it is no
 * straight line, since many rows go through other kernels than a few.  The largest size that keeps
 * the step below the aim is taken; now and then one above it is tried, since what it costs may be
 * unknown, or have been unlucky.  The aim is below the bound of three times the quiet step, since
 * single steps spread around it.  What a quiet step takes is kept up to date by steps without a
 * piece. */
#include "srv_engine.h"

#define AIM             2.0 /* quiet steps that a step beside a prompt should take */
#define SMOOTH          0.25
#define FIRST           3u    /* size 8, while nothing is known */
#define QUIET_EVERY     16u   /* steps beside a prompt, one of which is without */
#define TRY_EVERY       256u  /* one of which tries a size above: far less than one in a hundred */
#define TRY_ABOVE       3u    /* sizes above, in turn */
#define ALONE_NS        250e6 /* of a step with prompts alone: how long a cancellation may wait */
#define ALONE_FIRST     128u
#define SLICE_MIN_NS    1000000u
#define SLICE_ALONE_NS  50000000u /* for how long a cancellation may wait */
#define PART_NS         2e9
#define PART_MAX        16384u
#define PIECE_MIN_ALONE 32u

/* A single slow step says little: it counts at most as twice what was known. */
static double smooth(double was, double is)
{
    if (was == 0.0)
        return is;
    return was + SMOOTH * ((is < 2.0 * was ? is : 2.0 * was) - was);
}

static double *quiet_of(srv_pace *p, uint32_t n_row)
{
    return &p->quiet_ns[n_row < SRV_PACE_ROWS ? n_row : SRV_PACE_ROWS];
}

/* Of a step of n answers; of fewer where that is not known. */
static double quiet(const srv_pace *p, uint32_t n)
{
    for (n = n < SRV_PACE_ROWS ? n : SRV_PACE_ROWS; n > 0; n--)
        if (p->quiet_ns[n] > 0.0)
            return p->quiet_ns[n];
    return 0.0;
}

static uint32_t alone(const srv_pace *p, uint32_t most)
{
    const double n = p->token_ns > 0.0 ? ALONE_NS / p->token_ns : ALONE_FIRST;

    if (n < PIECE_MIN_ALONE)
        return PIECE_MIN_ALONE < most ? PIECE_MIN_ALONE : most;
    return n < (double)most ? (uint32_t)n : most;
}

/* What a piece of a size adds; where that is not known, twice as much as half of it.  Negative:
 * nothing is known that far down. */
static double extra(const srv_pace *p, uint32_t size)
{
    if (p->extra_ns[size] > 0.0)
        return p->extra_ns[size];
    return size > 0 && p->extra_ns[size - 1] > 0.0 ? 2.0 * p->extra_ns[size - 1] : -1.0;
}

/* The largest size that fits; none: the smallest. */
static uint32_t largest(const srv_pace *p, double room, uint32_t n_size)
{
    uint32_t best  = 0;
    bool     known = false;

    for (uint32_t i = 0; i < n_size; i++) {
        const double x = extra(p, i);

        known = known || x >= 0.0;
        if (x >= 0.0 && x <= room)
            best = i;
    }
    return known ? best : FIRST < n_size ? FIRST : n_size - 1;
}

uint32_t srv_pace_budget(srv_pace *p, uint32_t n_row, uint32_t most)
{
    const double q      = quiet(p, n_row);
    const double room   = p->gap_ns > 0.0 ? p->gap_ns - q : (AIM - 1.0) * q;
    uint32_t     n_size = 0, size;

    if (n_row == 0 || most == 0)
        return most == 0 ? 0 : alone(p, most);
    if (q == 0.0 || ++p->n_mixed % QUIET_EVERY == 0)
        return 0;
    while (n_size < SRV_PACE_SIZES && 1u << n_size <= most)
        n_size++;
    size = largest(p, room, n_size);
    if (p->n_mixed % TRY_EVERY == 1)
        size += 1 + p->n_mixed / TRY_EVERY % TRY_ABOVE;
    return 1u << (size < n_size ? size : n_size - 1);
}

double srv_pace_token_ns(const srv_pace *p)
{
    return p->token_ns > 0.0 ? p->token_ns : quiet(p, 1);
}

uint64_t srv_pace_slice(const srv_pace *p, uint32_t n_row)
{
    const double q    = quiet(p, n_row);
    const double room = p->gap_ns > 0.0 ? p->gap_ns - q : (AIM - 1.0) * q;

    return n_row == 0 ? SLICE_ALONE_NS : room > SLICE_MIN_NS ? (uint64_t)room : SLICE_MIN_NS;
}

uint32_t srv_pace_part(const srv_pace *p, uint32_t least)
{
    const double n = p->token_ns > 0.0 ? PART_NS / p->token_ns : least;

    if (n < least)
        return least;
    return n < (double)PART_MAX ? (uint32_t)n : PART_MAX;
}

void srv_pace_learn(srv_pace *p, uint32_t n_row, uint32_t n_prompt, double ns)
{
    const double q    = quiet(p, n_row);
    uint32_t     size = 0;

    while (size + 1 < SRV_PACE_SIZES && 1u << (size + 1) <= n_prompt)
        size++;
    if (n_prompt == 0)
        *quiet_of(p, n_row) = smooth(*quiet_of(p, n_row), ns);
    else if (n_row == 0 && n_prompt >= PIECE_MIN_ALONE)
        p->token_ns = smooth(p->token_ns, ns / n_prompt);
    else if (n_row > 0 && q > 0.0 && n_prompt == 1u << size)
        p->extra_ns[size] = smooth(p->extra_ns[size], ns > 1.01 * q ? ns - q : 0.01 * q);
}
