/* SPDX-License-Identifier: Apache-2.0 */
/* kv_disk_name.c - keys and checksums, and where things lie in a unit.  The bytes that are hashed
 * are part of the format: docs/format-kv.md.  Integers go in as little-endian. */
#include <openssl/evp.h>
#include <string.h>
#include <xxhash.h>

#include "kv/kv_disk_int.h"

#define HMAC_BLOCK_BYTES 64u

static void put_le(uint8_t *p, uint64_t v, uint32_t bytes)
{
    for (uint32_t i = 0; i < bytes; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}

/* ---- layout ----------------------------------------------------------------------- */

bool kv_disk_geometry_ok(const kv_disk_geometry *g)
{
    return g->n_lane > 0 && g->n_lane <= DISK_LANE_MAX && g->chunk_tokens > 0 &&
           g->block_tokens >= g->chunk_tokens && g->block_tokens <= 4096 &&
           g->block_tokens % g->chunk_tokens == 0 && g->record_bytes > 0 &&
           g->record_bytes <= (1u << 20) && g->aux_bytes <= (1u << 20) &&
           g->tail_token_bytes <= (1u << 20);
}

uint32_t kv_disk_open_step(const kv_disk_geometry *g)
{
    const uint64_t record = (uint64_t)g->chunk_tokens * g->tail_token_bytes;
    uint32_t       n      = g->chunk_tokens;

    if (record == 0 || record > DISK_OPEN_RECORD_MAX)
        return 0;
    while (n < g->block_tokens && n / g->chunk_tokens * record % KV_DISK_PAGE_BYTES != 0)
        n += g->chunk_tokens;
    return n;
}

/* Records of an open block: its slots have room for all of the block's. */
static bool layout_open(const kv_disk_geometry *g, uint32_t n_token, disk_layout *l)
{
    const uint32_t step = kv_disk_open_step(g);

    if (step == 0 || n_token == 0 || n_token > g->block_tokens ||
        (n_token % step != 0 && n_token != g->block_tokens))
        return false;
    l->rec_bytes = g->chunk_tokens * g->tail_token_bytes;
    l->n_rec     = n_token / g->chunk_tokens;
    l->rec_slot  = kvd_align_up((uint64_t)(g->block_tokens / g->chunk_tokens) * l->rec_bytes,
                                KV_DISK_PAGE_BYTES);
    l->grows     = true;
    return true;
}

bool kv_disk_layout_of(const kv_disk_geometry *g, kv_disk_kind kind, uint32_t n_token, bool ordered,
                       disk_layout *out)
{
    disk_layout l = { .n_lane = g->n_lane, .aux_bytes = g->aux_bytes, .ordered = ordered };
    uint64_t    aux, body, slots;

    if (kind == KV_DISK_OPEN) {
        if (ordered || !layout_open(g, n_token, &l))
            return false;
    } else if (kind == KV_DISK_TAIL) {
        if (ordered || n_token == 0 || n_token >= 2 * g->block_tokens || !g->tail_token_bytes)
            return false;
        l.n_rec     = n_token;
        l.rec_bytes = g->tail_token_bytes;
    } else {
        l.n_block = kind == KV_DISK_SEGMENT ? KV_DISK_SEGMENT_BLOCKS : 1;
        if (n_token != l.n_block * g->block_tokens || (ordered && kind != KV_DISK_SEGMENT))
            return false;
        l.n_rec     = n_token / g->chunk_tokens;
        l.rec_bytes = g->record_bytes;
    }
    if (l.n_rec > DISK_RECORD_MAX)
        return false;
    l.n_valid = kvd_div_up((uint64_t)l.n_rec * l.rec_bytes, KV_DISK_PAGE_BYTES);
    if (!l.grows)
        l.rec_slot = l.n_valid * KV_DISK_PAGE_BYTES;
    /* an open block has room for its aux, too */
    aux = (uint64_t)(l.n_block + l.grows) * l.aux_bytes + (ordered ? (uint64_t)l.n_rec * 2 : 0);
    l.aux_slot = kvd_align_up(aux, KV_DISK_PAGE_BYTES);
    slots      = l.rec_slot + l.aux_slot; /* < 2^37, lanes <= 2^16: body < 2^53 */
    body       = slots * l.n_lane;
    l.sums_off = body;
    l.n_page   = body / KV_DISK_PAGE_BYTES;
    l.bytes    = body + kvd_align_up(l.n_page * 8, KV_DISK_PAGE_BYTES);
    *out       = l;
    return true;
}

bool kv_disk_is_permutation(const uint16_t *order, uint32_t n)
{
    uint8_t seen[DISK_RECORD_MAX / 8] = { 0 };

    for (uint32_t i = 0; i < n; i++) {
        if (order[i] >= n || (seen[order[i] / 8] >> order[i] % 8 & 1))
            return false;
        seen[order[i] / 8] |= (uint8_t)(1u << order[i] % 8);
    }
    return true;
}

/* ---- keys ------------------------------------------------------------------------- */

bool kv_disk_sha256(kv_disk *d, const kv_disk_bytes *part, uint32_t n_part, kv_disk_key *out)
{
    unsigned n  = 0;
    bool     ok = EVP_DigestInit_ex(d->sha, d->sha_type, NULL) == 1;

    for (uint32_t i = 0; ok && i < n_part; i++)
        ok = part[i].bytes == 0 || EVP_DigestUpdate(d->sha, part[i].data, part[i].bytes) == 1;
    return ok && EVP_DigestFinal_ex(d->sha, out->byte, &n) == 1 && n == KV_DISK_KEY_BYTES;
}

bool kv_disk_key_is_zero(const kv_disk_key *k)
{
    static const kv_disk_key zero;

    return memcmp(k, &zero, sizeof(zero)) == 0;
}

bool kv_disk_model_name(kv_disk *d, const uint8_t *fingerprint, const kv_disk_geometry *g,
                        kv_disk_key *out)
{
    const uint32_t      field[] = { g->n_lane,       g->block_tokens, g->chunk_tokens,
                                    g->record_bytes, g->aux_bytes,    g->tail_token_bytes };
    uint8_t             shape[sizeof(field)];
    const kv_disk_bytes part[] = { { "kvd1 model", 10 },
                                   { fingerprint, KV_DISK_KEY_BYTES },
                                   { shape, sizeof(shape) } };

    for (uint32_t i = 0; i < KVD_COUNTOF(field); i++)
        put_le(shape + 4 * i, field[i], 4);
    return kv_disk_sha256(d, part, 3, out);
}

bool kv_disk_salt_id(kv_disk *d, kv_disk_bytes salt, kv_disk_key *out)
{
    uint8_t     inner_pad[HMAC_BLOCK_BYTES], outer_pad[HMAC_BLOCK_BYTES];
    kv_disk_key inner;

    memset(out, 0, sizeof(*out));
    if (salt.bytes == 0)
        return true;
    for (uint32_t i = 0; i < HMAC_BLOCK_BYTES; i++) {
        const uint8_t k = i < KV_DISK_KEY_BYTES ? d->salt_key[i] : 0;

        inner_pad[i] = k ^ 0x36;
        outer_pad[i] = k ^ 0x5c;
    }
    const kv_disk_bytes in[] = { { inner_pad, HMAC_BLOCK_BYTES }, salt };

    if (!kv_disk_sha256(d, in, 2, &inner))
        return false;
    const kv_disk_bytes outer[] = { { outer_pad, HMAC_BLOCK_BYTES },
                                    { inner.byte, sizeof(inner) } };

    return kv_disk_sha256(d, outer, 2, out);
}

bool kv_disk_root(kv_disk *d, const kv_disk_key *salt_id, kv_disk_key *out)
{
    const kv_disk_bytes part[] = { { "kvd1 root", 9 },
                                   { d->model.byte, KV_DISK_KEY_BYTES },
                                   { salt_id->byte, KV_DISK_KEY_BYTES } };

    return kv_disk_sha256(d, part, 3, out);
}

bool kv_disk_chain(kv_disk *d, const kv_disk_key *parent, const kv_disk_key *salt_id,
                   kv_disk_bytes provenance, bool tail, const int32_t *token, uint32_t n_token,
                   kv_disk_key *out)
{
    uint8_t             head[12];
    const kv_disk_bytes part[] = { { "kvd1 block", 10 },
                                   { d->model.byte, KV_DISK_KEY_BYTES },
                                   { salt_id->byte, KV_DISK_KEY_BYTES },
                                   { parent->byte, KV_DISK_KEY_BYTES },
                                   { head, sizeof(head) },
                                   provenance,
                                   { token, n_token * 4 } };

    put_le(head, provenance.bytes, 4);
    put_le(head + 4, tail, 4);
    put_le(head + 8, n_token, 4);
    return kv_disk_sha256(d, part, 7, out);
}

/* ---- checksums -------------------------------------------------------------------- */

uint64_t kv_disk_key_seed(uint64_t own, const kv_disk_key *key)
{
    return own ? own : XXH3_64bits(key->byte, KV_DISK_KEY_BYTES);
}

uint64_t kv_disk_page_sum(uint64_t key_seed, uint32_t lane, uint32_t page, const void *p)
{
    uint8_t at[8];

    put_le(at, lane, 4);
    put_le(at + 4, page, 4);
    return XXH3_64bits_withSeed(p, KV_DISK_PAGE_BYTES,
                                XXH3_64bits_withSeed(at, sizeof(at), key_seed));
}

uint64_t kv_disk_table_sum(uint64_t key_seed, const uint64_t *sum, uint64_t n)
{
    return XXH3_64bits_withSeed(sum, (size_t)n * 8, key_seed);
}
