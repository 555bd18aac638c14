/* SPDX-License-Identifier: Apache-2.0 */
/* tok_special.c - control and user-defined tokens found by their text.
 *
 * Sorted by bytes with an index by first byte.  A search narrows the sorted range byte by byte,
 * so that it stops at the first byte no special continues with.
 * Immutable after tok_special_build(), any thread. */
#include "text/tok_impl.h"

static int compare_text(const char *a, size_t a_len, const char *b, size_t b_len)
{
    const int c = memcmp(a, b, a_len < b_len ? a_len : b_len);

    return c != 0 ? c : (a_len > b_len) - (a_len < b_len);
}

static int compare_special(const tok *t, uint32_t a, uint32_t b)
{
    size_t      a_len, b_len;
    const char *a_text = tok_text(t, a, &a_len);
    const char *b_text = tok_text(t, b, &b_len);
    const int   c      = compare_text(a_text, a_len, b_text, b_len);

    return c != 0 ? c : (a > b) - (a < b);
}

/* Heap sort: no recursion, no allocation, O(n log n) on any order a file may hold. */
static void sift_down(const tok *t, uint32_t *id, size_t i, size_t n)
{
    for (size_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && compare_special(t, id[c], id[c + 1]) < 0)
            c++;
        if (compare_special(t, id[i], id[c]) >= 0)
            break;
        const uint32_t swap = id[i];
        id[i]               = id[c];
        id[c]               = swap;
    }
}

static void sort_specials(const tok *t)
{
    uint32_t *id = t->special;

    for (size_t i = t->n_special / 2; i-- > 0;)
        sift_down(t, id, i, t->n_special);
    for (size_t n = t->n_special; n > 1; n--) {
        const uint32_t swap = id[0];
        id[0]               = id[n - 1];
        id[n - 1]           = swap;
        sift_down(t, id, 0, n - 1);
    }
}

static bool can_match(const tok *t, uint32_t id)
{
    size_t len;

    (void)tok_text(t, id, &len);
    return (t->flag[id] & FLAG_MATCH) && len > 0 && len <= TOK_MAX_SPECIAL;
}

kvd_status tok_special_build(tok *t, kvd_err *err)
{
    uint32_t n = 0, i = 0;

    for (uint32_t id = 0; id < t->n_token; id++)
        n += can_match(t, id);
    t->special = tok_alloc(t, n, sizeof(*t->special));
    if (!t->special)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tokenizer: no memory for %u specials", n);
    for (uint32_t id = 0; id < t->n_token; id++) {
        if (can_match(t, id))
            t->special[t->n_special++] = id;
    }
    sort_specials(t);
    for (uint32_t b = 0; b < 257; b++) {
        while (i < n && (uint8_t)t->bytes[t->off[t->special[i]]] < b)
            i++;
        t->first[b] = i;
    }
    return KVD_OK;
}

/* First index in [lo, hi) whose byte at `at` is >= b (all share the bytes before; a text that ends
 * there counts as lowest). */
static uint32_t lower_bound(const tok *t, uint32_t lo, uint32_t hi, size_t at, unsigned b)
{
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        size_t         len;
        const char    *text = tok_text(t, t->special[mid], &len);

        if (len <= at || (uint8_t)text[at] < b)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

tok_special tok_special_at(const tok *t, const char *s, size_t len, bool trusted)
{
    tok_special found = { .id = TOK_NONE, .len = 1 };

    if (len == 0)
        return found;
    uint32_t lo = t->first[(uint8_t)s[0]], hi = t->first[(uint8_t)s[0] + 1];
    for (size_t at = 1; lo < hi; at++) {
        const uint32_t id = t->special[lo]; /* of equal texts the lowest id */
        size_t         first_len;

        (void)tok_text(t, id, &first_len);
        if (first_len == at)
            found = (tok_special){
                .id  = trusted || !(t->flag[id] & FLAG_HIDDEN) ? id : TOK_NONE,
                .len = at,
            };
        if (at >= len)
            break;
        lo = lower_bound(t, lo, hi, at, (uint8_t)s[at]);
        hi = lower_bound(t, lo, hi, at, (uint8_t)s[at] + 1u);
    }
    return found;
}

int32_t tok_find_special(const tok *t, const char *text, size_t len)
{
    const tok_special found = tok_special_at(t, text, len, true);

    return found.id != TOK_NONE && found.len == len ? (int32_t)found.id : -1;
}
