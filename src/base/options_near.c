/* SPDX-License-Identifier: Apache-2.0 */
/* options_near.c - what a mistyped name was probably meant to be. */
#include <limits.h>
#include <string.h>

#include "base/options_impl.h"

#define EDITS_MAX     2u /* that a mistyped name is away from what was meant */
#define BEGINNING_MIN 3u /* letters of a name that stand for it */

/* Edits that make b of a: a letter put in, left out or replaced, or two neighbours that change
 * places.  Names are short; a longer word is far from all. */
static uint32_t edits(const char *a, const char *b)
{
    uint32_t     table[3][OPT_NAME_MAX + 1];
    uint32_t    *row = table[0], *last = table[1], *before = table[2];
    const size_t na = strlen(a), nb = strlen(b);

    if (na > OPT_NAME_MAX || nb > OPT_NAME_MAX)
        return UINT32_MAX;
    for (size_t j = 0; j <= nb; j++)
        row[j] = (uint32_t)j;
    for (size_t i = 1; i <= na; i++) {
        uint32_t *const oldest = before;

        before = last;
        last   = row;
        row    = oldest;
        row[0] = (uint32_t)i;
        for (size_t j = 1; j <= nb; j++) {
            const uint32_t subst = last[j - 1] + (a[i - 1] != b[j - 1]);
            const uint32_t step  = (last[j] < row[j - 1] ? last[j] : row[j - 1]) + 1;

            row[j] = subst < step ? subst : step;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                before[j - 2] + 1 < row[j])
                row[j] = before[j - 2] + 1;
        }
    }
    return row[nb];
}

/* Letters of a word that a name has, too, wherever they stand. */
static uint32_t letters_kept(const char *word, const char *name)
{
    uint32_t count[UCHAR_MAX + 1] = { 0 }, n = 0;

    for (; *name; name++)
        count[(unsigned char)*name]++;
    for (; *word; word++) {
        if (count[(unsigned char)*word] > 0) {
            count[(unsigned char)*word]--;
            n++;
        }
    }
    return n;
}

static uint32_t same_beginning(const char *a, const char *b)
{
    uint32_t n = 0;

    while (a[n] && a[n] == b[n])
        n++;
    return n;
}

/* One edit for each three letters: with more a word is nearer to some name by chance than to what
 * was meant; and two with the first letter right.  Of names equally near the one that has most of
 * the word's letters, since they are rather left out or change places than replaced; then the one
 * that begins alike.  name: what the spelling stands for. */
void opt_look_at(opt_nearest *r, const char *spelling, const char *name)
{
    const size_t   n_word = strlen(r->word), n_name = strlen(spelling);
    const uint32_t d = edits(r->word, spelling), same = same_beginning(r->word, spelling);
    const uint32_t most  = same ? EDITS_MAX : 1;
    const uint32_t limit = (uint32_t)kvd_min_u64(kvd_min_u64(n_word, n_name) / 3, most);
    const uint32_t kept  = d <= limit ? letters_kept(r->word, spelling) : 0;
    const bool     tie   = r->name && d == r->n_edit;

    if (d <= limit && (!r->name || d < r->n_edit || (tie && kept > r->n_kept) ||
                       (tie && kept == r->n_kept && same > r->n_same))) {
        r->name   = name;
        r->n_edit = d;
        r->n_kept = kept;
        r->n_same = same;
    }
    if (same == n_word && n_word >= BEGINNING_MIN) {
        r->n_whole += r->whole != name;
        r->whole = name;
    }
}

/* A beginning that names share says nothing. */
const char *opt_found(const opt_nearest *r)
{
    return r->name ? r->name : r->n_whole == 1 ? r->whole : NULL;
}

const char *kvd_nearest(const char *word, const char *const *name, uint32_t n)
{
    opt_nearest r = { .word = word };

    for (uint32_t i = 0; i < n; i++)
        opt_look_at(&r, name[i], name[i]);
    return opt_found(&r);
}
