/* SPDX-License-Identifier: Apache-2.0 */
/* split.h - a CPU backend whose DEVICE memory only ops can touch: host code that reads or writes it
 * ends with a signal, as it would with a GPU's. */
#ifndef KVD_TEST_SPLIT_H
#define KVD_TEST_SPLIT_H

#include "backend/backend.h"

/* From now on; one backend at a time, opened with "cpu" or "ref".  What it has allocated before
 * stays as it was. */
void split_begin(kvd_backend *be);
void split_end(kvd_backend *be); /* all that was allocated in between has been freed */

#endif
