/* SPDX-License-Identifier: Apache-2.0 */
/* utf8_columns.c - how text looks on a terminal: characters as readers count them, and their
 * width.  Stateless, any thread. */
#include <utf8proc.h>

#include "text/text.h"

uint32_t utf8_columns(uint32_t cp)
{
    return (uint32_t)utf8proc_charwidth((utf8proc_int32_t)cp);
}

size_t utf8_cluster(const char *s, size_t len)
{
    utf8proc_int32_t state = 0;
    uint32_t         left, right;
    size_t           n = utf8_decode(s, len, &left);

    while (n < len) {
        const size_t more = utf8_decode(s + n, len - n, &right);

        if (utf8proc_grapheme_break_stateful((utf8proc_int32_t)left, (utf8proc_int32_t)right,
                                             &state))
            break;
        left = right;
        n += more;
    }
    return n;
}
