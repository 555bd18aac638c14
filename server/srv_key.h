/* SPDX-License-Identifier: Apache-2.0 */
/* srv_key.h - private to server/: comparing keys. */
#ifndef KVD_SRV_KEY_H
#define KVD_SRV_KEY_H

#include <stdbool.h>

/* Does the same work for every guess of the same length: how long it takes tells nothing of where a
 * guess is wrong.  key is not empty. */
bool srv_same_key(const char *guess, const char *key);

#endif
