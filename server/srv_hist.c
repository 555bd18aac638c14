/* SPDX-License-Identifier: Apache-2.0 */
/* srv_hist.c - how long things took, counted by bounds. */
#include "srv_engine.h"

const uint64_t srv_hist_bound_us[SRV_HIST_BOUNDS] = {
    1000,   2500,    5000,    10000,   25000,    50000,    75000,    100000,    250000,
    500000, 1000000, 2500000, 5000000, 10000000, 30000000, 60000000, 120000000, 300000000,
};

void srv_hist_add(srv_hist *h, uint64_t ns)
{
    uint32_t i = 0;

    while (i < SRV_HIST_BOUNDS && ns > srv_hist_bound_us[i] * 1000u)
        i++;
    h->n[i]++;
    h->sum_ns += ns;
}
