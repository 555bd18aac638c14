/* SPDX-License-Identifier: Apache-2.0 */
/* srv_pace.c - how large a piece of a prompt a step takes, so that answers keep their pace.
 *
 * A step without prompts takes quiet_ns; one with n tokens of prompts beside it about n * token_ns
 * more.  Both are learned from steps as they run.  The aim is below the bound of three times the
 * quiet step, since single steps spread around it. */
#include "srv_engine.h"

#define AIM             2.2 /* quiet steps that a step beside a prompt should take */
#define SMOOTH          0.25
#define PIECE_MIN       8u    /* a prompt always gets on */
#define PIECE_FIRST     32u   /* while nothing is known */
#define ALONE_NS        250e6 /* of a step with prompts alone: how long a cancellation may wait */
#define ALONE_FIRST     128u
#define PIECE_MIN_ALONE 32u

static double smooth(double was, double is)
{
    return was == 0.0 ? is : was + SMOOTH * (is - was);
}

/* Of a step of n answers; of fewer where that is not known. */
static double quiet(const srv_pace *p, uint32_t n)
{
    for (n = n < SRV_PACE_ROWS ? n : SRV_PACE_ROWS; n > 0; n--)
        if (p->quiet_ns[n] > 0.0)
            return p->quiet_ns[n];
    return 0.0;
}

static uint32_t clamp(double n, uint32_t least, uint32_t most)
{
    if (!(n > (double)least))
        return least < most ? least : most;
    return n < (double)most ? (uint32_t)n : most;
}

uint32_t srv_pace_budget(const srv_pace *p, uint32_t n_row, uint32_t most)
{
    const double q    = quiet(p, n_row);
    const double room = p->gap_ns > 0.0 ? p->gap_ns - q : (AIM - 1.0) * q;

    if (n_row == 0)
        return p->token_ns == 0.0 ? clamp(ALONE_FIRST, 0, most)
                                  : clamp(ALONE_NS / p->token_ns, PIECE_MIN_ALONE, most);
    if (q == 0.0 || p->token_ns == 0.0)
        return clamp(PIECE_FIRST, 0, most);
    return clamp(room / p->token_ns, PIECE_MIN, most);
}

void srv_pace_learn(srv_pace *p, uint32_t n_row, uint32_t n_prompt, double ns)
{
    const double q = quiet(p, n_row);

    if (n_prompt == 0)
        p->quiet_ns[n_row < SRV_PACE_ROWS ? n_row : SRV_PACE_ROWS] =
            smooth(p->quiet_ns[n_row < SRV_PACE_ROWS ? n_row : SRV_PACE_ROWS], ns);
    else if (n_prompt >= PIECE_MIN && (n_row == 0 || q > 0.0))
        p->token_ns = smooth(p->token_ns, ns > q ? (ns - q) / n_prompt : 0.1 * ns / n_prompt);
}
