/* SPDX-License-Identifier: Apache-2.0 */
/* tok_vocab.c - the tables of a tokenizer, built from what the file says.
 *
 * Token bytes: BPE files store ordinary tokens in GPT-2's byte alphabet, SPM files store U+2581
 * for a space and <0xXX> for bytes; here all become the bytes they stand for, and text is matched
 * in that form.
 * Merges: pairs of ids.  BPE files list them; of SPM every way to cut a piece in two pieces is one,
 * ranked by falling score (equal scores share a rank).
 *
 * Invariants
 *  (1) word[] and merge[] never lead to a control, unknown or unused token, in SPM neither to a
 *      user-defined one: ordinary text cannot become one;
 *  (2) all tables are sized before they are filled, from counts bounded by the file's bytes.
 *
 * Thread: the opener's. */
#include "text/tok_impl.h"

static kvd_status no_memory(kvd_err *err, const char *what)
{
    return kvd_fail(err, KVD_E_NOMEM, 0, "tokenizer: no memory for %s", what);
}

void *tok_alloc(tok *t, uint64_t n, size_t size)
{
    uint64_t bytes;

    if (!kvd_mul(n, size, &bytes) || bytes > SIZE_MAX)
        return NULL;
    void *p = kvd_calloc((size_t)n, size);
    if (p)
        t->heap_bytes += bytes;
    return p;
}

/* ---- token bytes ---- */

/* GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 on. */
static void make_alphabet(int16_t byte_of[0x144])
{
    int16_t next = 0x100;

    memset(byte_of, 0xff, 0x144 * sizeof(*byte_of));
    for (int16_t b = 0; b < 256; b++) {
        const bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);

        byte_of[itself ? b : next++] = b;
    }
}

/* Never longer than src; a character outside the alphabet stays as it is. */
static size_t decode_alphabet(const int16_t byte_of[0x144], tok_str src, char *dst)
{
    size_t n = 0;

    for (size_t i = 0; i < src.len;) {
        uint32_t     cp;
        const size_t used = utf8_decode(src.data + i, src.len - i, &cp);

        if (cp < 0x144 && byte_of[cp] >= 0) {
            dst[n++] = (char)byte_of[cp];
        } else {
            memcpy(dst + n, src.data + i, used);
            n += used;
        }
        i += used;
    }
    return n;
}

size_t tok_undo_meta(const char *s, size_t len, char *dst)
{
    size_t n = 0;

    for (size_t i = 0; i < len; n++) {
        const bool meta = len - i >= 3 && memcmp(s + i, TOK_META_SPACE, 3) == 0;

        dst[n] = meta ? ' ' : s[i];
        i += meta ? 3 : 1;
    }
    return n;
}

static bool has_inner_space(const char *s, size_t len)
{
    for (size_t i = 1; i < len; i++) {
        if (s[i] == ' ' && s[i - 1] != ' ')
            return true;
    }
    return false;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The value of "<0xXX>", or -1. */
static int byte_token(tok_str s)
{
    if (s.len != 6 || memcmp(s.data, "<0x", 3) != 0 || s.data[5] != '>')
        return -1;
    const int high = hex_digit(s.data[3]), low = hex_digit(s.data[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

static int32_t attr_of(const tok_vocab *v, uint32_t id)
{
    return v->attr ? v->attr[id] : TOK_NORMAL;
}

static uint8_t flags_of(int32_t attr)
{
    switch (attr) {
    case TOK_CONTROL:
        return FLAG_HIDDEN | FLAG_MATCH;
    case TOK_USER_DEFINED:
        return FLAG_MATCH;
    case TOK_UNKNOWN:
    case TOK_UNUSED:
        return FLAG_HIDDEN;
    case TOK_BYTE:
        return 0;
    default: /* 0 and values of other writers are ordinary */
        return FLAG_ORDINARY;
    }
}

/* Writes token i at the end of bytes[]. */
static size_t put_token(tok *t, const tok_vocab *v, uint32_t i, const int16_t byte_of[0x144])
{
    const tok_str s   = v->token[i];
    char         *dst = t->bytes + t->off[i];
    const int     b   = byte_token(s);

    t->flag[i] = flags_of(attr_of(v, i));
    if (v->model == TOK_SPM && attr_of(v, i) == TOK_BYTE && b >= 0) {
        *dst          = (char)b;
        t->byte_id[b] = i;
        return 1;
    }
    if (s.len == 0)
        return 0;
    if (!(t->flag[i] & FLAG_ORDINARY)) {
        memcpy(dst, s.data, s.len);
        return s.len;
    }
    if (v->model == TOK_BPE)
        return decode_alphabet(byte_of, s, dst);
    const size_t n = tok_undo_meta(s.data, s.len, dst);
    t->inner_space |= has_inner_space(dst, n);
    return n;
}

static kvd_status build_bytes(tok *t, const tok_vocab *v, kvd_err *err)
{
    int16_t  byte_of[0x144];
    uint64_t total = 0;

    make_alphabet(byte_of);
    for (uint32_t i = 0; i < t->n_token; i++)
        total += v->token[i].len;
    if (total >= UINT32_MAX)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "tokenizer: tokens of %zu bytes", (size_t)total);
    t->off   = tok_alloc(t, (uint64_t)t->n_token + 1, sizeof(*t->off));
    t->bytes = tok_alloc(t, total + 1, 1);
    t->flag  = tok_alloc(t, t->n_token, 1);
    if (!t->off || !t->bytes || !t->flag)
        return no_memory(err, "token texts");
    for (uint32_t i = 0; i < t->n_token; i++) {
        const uint32_t n = (uint32_t)put_token(t, v, i, byte_of);

        t->off[i + 1] = t->off[i] + n;
        t->max_bytes  = n > t->max_bytes ? n : t->max_bytes;
    }
    return KVD_OK;
}

/* ---- byte string -> id ---- */

static uint64_t hash_bytes(const char *s, size_t len)
{
    uint64_t h = len * UINT64_C(0x9e3779b97f4a7c15);

    for (; len >= 8; s += 8, len -= 8) {
        uint64_t w;

        memcpy(&w, s, 8);
        h = (h ^ w) * UINT64_C(0xff51afd7ed558ccd);
        h ^= h >> 32;
    }
    uint64_t w = 0;
    if (len > 0)
        memcpy(&w, s, len);
    h = (h ^ w) * UINT64_C(0xff51afd7ed558ccd);
    return h ^ h >> 29;
}

/* The slot that holds these bytes, or the free one where they would go. */
static uint32_t *word_slot(const tok *t, const char *s, size_t len)
{
    for (uint64_t i = hash_bytes(s, len) & t->word_mask;; i = (i + 1) & t->word_mask) {
        size_t have_len;

        if (t->word[i] == TOK_NONE)
            return &t->word[i];
        const char *have = tok_text(t, t->word[i], &have_len);
        if (have_len == len && memcmp(have, s, len) == 0)
            return &t->word[i];
    }
}

uint32_t tok_word_find(const tok *t, const char *s, size_t len)
{
    return *word_slot(t, s, len);
}

static uint64_t slots_for(uint64_t n)
{
    uint64_t slots = 16;

    while (slots < 2 * n)
        slots *= 2;
    return slots;
}

static bool is_word(const tok *t, uint32_t id)
{
    if (t->off[id + 1] == t->off[id])
        return false;
    if (t->flag[id] & FLAG_ORDINARY)
        return true;
    /* User-defined tokens may be part of a BPE vocabulary and named by its merges. */
    return t->model == TOK_BPE && (t->flag[id] & (FLAG_MATCH | FLAG_HIDDEN)) == FLAG_MATCH;
}

static kvd_status build_words(tok *t, kvd_err *err)
{
    const uint64_t slots = slots_for(t->n_token);

    t->word = tok_alloc(t, slots, sizeof(*t->word));
    if (!t->word)
        return no_memory(err, "the token index");
    memset(t->word, 0xff, (size_t)slots * sizeof(*t->word));
    t->word_mask = slots - 1;
    for (uint32_t id = 0; id < t->n_token; id++) {
        size_t      len;
        const char *s = tok_text(t, id, &len);

        if (!is_word(t, id))
            continue;
        uint32_t *slot = word_slot(t, s, len);
        if (*slot == TOK_NONE) /* of equal texts the lowest id */
            *slot = id;
    }
    return KVD_OK;
}

/* ---- merges ---- */

static kvd_status merge_table(tok *t, uint64_t n, kvd_err *err)
{
    const uint64_t slots = slots_for(n);

    t->merge = tok_alloc(t, slots, sizeof(*t->merge));
    if (!t->merge)
        return no_memory(err, "the merge table");
    memset(t->merge, 0xff, (size_t)slots * sizeof(*t->merge));
    t->merge_shift = 64;
    for (uint64_t s = slots; s > 1; s /= 2)
        t->merge_shift--;
    return KVD_OK;
}

/* Of two entries for one pair the first counts. */
static void merge_add(tok *t, tok_merge m)
{
    const uint64_t mask = (UINT64_C(1) << (64 - t->merge_shift)) - 1;
    uint64_t       i =
        ((uint64_t)m.left << 32 | m.right) * UINT64_C(0x9e3779b97f4a7c15) >> t->merge_shift;

    while (t->merge[i].left != TOK_NONE) {
        if (t->merge[i].left == m.left && t->merge[i].right == m.right)
            return;
        i = (i + 1) & mask;
    }
    t->merge[i] = m;
}

/* A merge that names a token the vocabulary lacks can never apply and is left out. */
static void add_bpe_merge(tok *t, const int16_t byte_of[0x144], tok_str s, uint32_t rank, char *buf)
{
    const char *space = s.len > 1 ? memchr(s.data + 1, ' ', s.len - 1) : NULL;

    if (!space)
        return;
    const size_t   cut   = (size_t)(space - s.data);
    const size_t   a     = decode_alphabet(byte_of, (tok_str){ s.data, cut }, buf);
    const tok_str  tail  = { space + 1, s.len - cut - 1 };
    const size_t   b     = decode_alphabet(byte_of, tail, buf + a);
    const uint32_t left  = tok_word_find(t, buf, a);
    const uint32_t right = tok_word_find(t, buf + a, b);
    const uint32_t both  = tok_word_find(t, buf, a + b);

    if (left != TOK_NONE && right != TOK_NONE && both != TOK_NONE)
        merge_add(t, (tok_merge){ left, right, rank, both });
}

static kvd_status build_bpe_merges(tok *t, const tok_vocab *v, kvd_err *err)
{
    int16_t byte_of[0x144];
    size_t  longest = 0;

    KVD_TRY(merge_table(t, v->n_merge, err));
    for (uint32_t i = 0; i < v->n_merge; i++)
        longest = v->merge[i].len > longest ? v->merge[i].len : longest;
    char *buf = kvd_malloc(longest + 1);
    if (!buf)
        return no_memory(err, "a merge");
    make_alphabet(byte_of);
    for (uint32_t i = 0; i < v->n_merge; i++)
        add_bpe_merge(t, byte_of, v->merge[i], i, buf);
    kvd_free(buf);
    for (int b = 0; b < 256; b++) {
        const char c = (char)b;

        t->byte_id[b] = tok_word_find(t, &c, 1);
    }
    return KVD_OK;
}

/* Calls for every cut of a piece into two pieces: counts them, or adds them with their rank. */
static uint64_t spm_cuts(tok *t, uint32_t id, bool add, uint32_t rank)
{
    size_t      len;
    const char *s = tok_text(t, id, &len);
    uint64_t    n = 0;

    if (!(t->flag[id] & FLAG_ORDINARY) || len > TOK_MAX_PIECE || tok_word_find(t, s, len) != id)
        return 0;
    for (size_t cut = 1; cut < len; cut++) {
        if (((uint8_t)s[cut] & 0xc0) == 0x80)
            continue;
        const uint32_t left  = tok_word_find(t, s, cut);
        const uint32_t right = left == TOK_NONE ? TOK_NONE : tok_word_find(t, s + cut, len - cut);
        if (right == TOK_NONE)
            continue;
        n++;
        if (add)
            merge_add(t, (tok_merge){ left, right, rank, id });
    }
    return n;
}

/* Sorts (falling score, id) packed into 64 bits, by bytes of the score: stable, linear. */
static void sort_by_score(uint64_t *key, uint64_t *tmp, uint32_t n)
{
    for (unsigned shift = 32; shift < 64; shift += 8) {
        size_t start[257] = { 0 };

        for (uint32_t i = 0; i < n; i++)
            start[(key[i] >> shift & 255) + 1]++;
        for (size_t c = 1; c < 257; c++)
            start[c] += start[c - 1];
        for (uint32_t i = 0; i < n; i++)
            tmp[start[key[i] >> shift & 255]++] = key[i];
        memcpy(key, tmp, n * sizeof(*key));
    }
}

/* Ascending in this = falling in score; -0 equals 0, NaN is last. */
static uint32_t score_key(float score)
{
    if (score != score)
        return UINT32_MAX;
    const uint32_t u = kvd_f32_to_bits(score + 0.0f);
    return u & 0x80000000u ? u : 0x7fffffffu - u;
}

static kvd_status build_spm_merges(tok *t, const tok_vocab *v, kvd_err *err)
{
    uint64_t n = 0;

    for (uint32_t id = 0; id < t->n_token; id++)
        n += spm_cuts(t, id, false, 0);
    KVD_TRY(merge_table(t, n, err));
    uint64_t *key = kvd_calloc((size_t)t->n_token * 2, sizeof(*key));
    if (!key)
        return no_memory(err, "scores");
    for (uint32_t id = 0; id < t->n_token; id++)
        key[id] = (uint64_t)score_key(v->score ? v->score[id] : 0.0f) << 32 | id;
    sort_by_score(key, key + t->n_token, t->n_token);
    uint32_t rank = 0;
    for (uint32_t i = 0; i < t->n_token; i++) {
        if (i > 0 && key[i] >> 32 != key[i - 1] >> 32)
            rank = i;
        spm_cuts(t, (uint32_t)key[i], true, rank);
    }
    kvd_free(key);
    return KVD_OK;
}

kvd_status tok_vocab_build(tok *t, const tok_vocab *v, kvd_err *err)
{
    memset(t->byte_id, 0xff, sizeof(t->byte_id));
    KVD_TRY(build_bytes(t, v, err));
    KVD_TRY(build_words(t, err));
    KVD_TRY(v->model == TOK_BPE ? build_bpe_merges(t, v, err) : build_spm_merges(t, v, err));
    return tok_special_build(t, err);
}
