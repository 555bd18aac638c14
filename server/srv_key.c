/* SPDX-License-Identifier: Apache-2.0 */
/* srv_key.c - comparing keys; tests/unit/test_srv_key.c counts its instructions. */
#include "srv_key.h"

#include <string.h>

bool srv_same_key(const char *guess, const char *key)
{
    const size_t n_guess = strlen(guess), n_key = strlen(key);
    unsigned     differ = n_guess != n_key;

    for (size_t i = 0; i < n_guess; i++)
        differ |= (unsigned)(unsigned char)guess[i] ^ (unsigned char)key[i % n_key];
    return differ == 0;
}
