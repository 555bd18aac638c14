/* SPDX-License-Identifier: Apache-2.0 */
/* split.h - a CPU backend that works like a GPU's as far as host code can tell: its DEVICE memory
 * only ops can touch (anything else ends with a signal), what ops are given has to lie there or in
 * PINNED memory (split_reach.h; weights apart), and ops run as late as they may: what they
 * read has to be as it was meant until then.  Streams are ordered by events alone: when one is
 * waited for, its ops run, and of other streams what its events ask for, or, after split_order(),
 * first all that others have.  Steps are recorded. */
#ifndef KVD_TEST_SPLIT_H
#define KVD_TEST_SPLIT_H

#include "backend/backend.h"

/* From now on; one backend at a time, opened with "cpu" or "ref".  What it has allocated before
 * stays as it was. */
void split_begin(kvd_backend *be);
void split_end(kvd_backend *be); /* all that was allocated in between has been freed */

uint64_t split_graph_runs(void); /* since split_begin() */
void     split_order(bool others_first);
uint64_t split_waits(void); /* for a stream, likewise */
/* From the n-th op on (counted from now, 1 is the next) the device has failed for good: no op runs,
 * and whatever gives, waits for or asks for one is KVD_E_DEVICE.  down: of copies from its memory
 * to pinned memory, the n-th. */
void     split_fail_at(uint64_t n, bool down);
uint64_t split_ops_run(bool down); /* since split_begin() */
/* What its device has in all, of which `context` is nobody's; without it, more than anybody asks
 * for.  Not enforced: what is held can be more. */
void split_set_memory(uint64_t total, uint64_t context);

#endif
