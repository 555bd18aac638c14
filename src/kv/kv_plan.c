/* SPDX-License-Identifier: Apache-2.0 */
/* kv_plan.c - how many bytes a store takes, where, and whether everything can be resident.
 *
 * Pure: parameters in, sizes out.  Owns nothing; any thread. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kv/kv_cache.h"

static uint64_t elem_bytes(const kv_params *p)
{
    return p->type == KVD_DTYPE_F32 ? 4 : 2;
}

static uint64_t chunks_max(const kv_params *p)
{
    return kvd_div_up(p->n_ctx, KV_BLOCK_TOKENS) * (KV_BLOCK_TOKENS / p->chunk_tokens);
}

/* Blocks of one sequence that can be raw at a time: what is not sealed and a batch; or, around a
 * prompt that goes layer by layer, what was not sealed before it and what is not after it. */
static uint64_t raw_blocks(const kv_params *p)
{
    const uint64_t rest  = (uint64_t)KV_BLOCK_TOKENS - 1 + p->n_local;
    const uint64_t batch = kvd_div_up(kvd_min_u64(rest + p->n_batch, p->n_ctx), KV_BLOCK_TOKENS);

    return kvd_max_u64(batch, 2 * kvd_div_up(kvd_min_u64(rest, p->n_ctx), KV_BLOCK_TOKENS));
}

static uint64_t index_block_bytes(const kv_params *p)
{
    return p->sparse ? (uint64_t)p->n_layer * p->n_kv_head * kv_aux_bytes(p) : 0;
}

/* Blocks of a layer, packed; where all is resident they are made and unpacked one at a time. */
static uint64_t packed_bytes(const kv_params *p, bool resident)
{
    const kvd_record_format f = kv_record_format(p);
    const uint64_t          n = p->n_kv_head * (KV_BLOCK_TOKENS / p->chunk_tokens);

    if (p->record == KVD_RECORD_RAW)
        return 0;
    return (resident ? 1 : KV_PACK_BLOCKS) * n * kvd_record_bytes(&f);
}

static uint64_t blocks_of(const kv_params *p)
{
    return kvd_div_up(p->n_ctx, KV_BLOCK_TOKENS);
}

/* ---- maps and lists ----------------------------------------------------------------- */

/* A step's misses at most. */
static uint64_t step_copies(const kv_params *p)
{
    return p->sparse ? (uint64_t)p->n_seq * p->n_kv_head * (p->window_tokens / p->chunk_tokens) : 0;
}

/* A region of no bytes is none, and has no tables. */
static void *table_at(const kvd_mem *region, uint64_t at)
{
    return region->ptr ? (uint8_t *)region->ptr + at : NULL;
}

void kv_place_map(const kv_params *p, bool resident, kv_store *s, const kvd_mem *base,
                  uint64_t *bytes)
{
    const uint64_t lanes = kv_n_lane(p), chunks = chunks_max(p);
    const uint64_t slots = p->sparse ? p->window_tokens / p->chunk_tokens : 0;
    const uint64_t index = p->sparse ? lanes * chunks : 0;
    const uint64_t seqs = p->sparse ? p->n_seq : 0, row = seqs * p->n_kv_head;
    const uint64_t block  = (uint64_t)p->n_kv_head * (KV_BLOCK_TOKENS / p->chunk_tokens);
    const uint64_t packed = p->record != KVD_RECORD_RAW, blocks = blocks_of(p);
    const uint64_t copies = resident ? packed * block : kv_copies_max(p);
    const uint64_t late   = resident ? 0 : kv_leaves_early(p) ? copies : step_copies(p);
    const uint32_t group  = p->n_head / p->n_kv_head;
    const uint64_t zone   = p->zone_tokens ? p->n_seq : 0;
    const uint64_t times  = p->device_steps ? p->n_layer : 1;
    kv_step       *t      = &s->step;
    const struct {
        void    **at;
        uint64_t  bytes;
        kv_region where;
    } part[] = {
        { (void **)&s->lists, 16 * p->n_seq * blocks, KV_ARGS },
        { (void **)&s->stage_block, 8 * blocks, KV_LISTS },
        { (void **)&s->packed, packed_bytes(p, resident), KV_WORK },
        { (void **)&s->ema, 2 * index, KV_WORK },
        { (void **)&s->slot_of, 2 * index, KV_MAP },
        { (void **)&s->chunk_of, 4 * lanes * slots, KV_MAP },
        { (void **)&s->stamp, 4 * lanes * slots, KV_MAP },
        { (void **)&s->host_of, resident ? 0 : 4 * lanes * chunks, KV_LISTS },
        { (void **)&s->lane_slots, 4 * lanes / p->n_seq, KV_LISTS },
        { (void **)&s->cap, 4 * lanes, KV_ARGS },
        { (void **)&s->lane_at, resident ? 0 : 8 * lanes, KV_ARGS },
        { (void **)&t->place, p->device_steps ? times * seqs * sizeof(*t->place) : 0, KV_ARGS },
        { (void **)&t->kept_span, times * row * sizeof(*t->kept_span), KV_ARGS },
        { (void **)&t->near_span, row * sizeof(*t->near_span), KV_MAP },
        { (void **)&t->urgent_span, row * sizeof(*t->urgent_span), KV_MAP },
        { (void **)&t->select, times * seqs * sizeof(*t->select), KV_ARGS },
        { (void **)&t->chosen, times * row * sizeof(*t->chosen), KV_FOUND },
        { (void **)&t->window, times * seqs * sizeof(*t->window), KV_ARGS },
        { (void **)&t->change, times * row * sizeof(*t->change), KV_FOUND },
        { (void **)&t->k, 4 * times * row, KV_ARGS },
        { (void **)&t->part, 4 * row * kvd_attn_part_floats(group, p->head_dim), KV_WORK },
        { (void **)&t->lse, p->sparse ? 4 * (uint64_t)p->n_batch * p->n_head : 0, KV_MAP },
        { (void **)&t->no_lse, p->sparse ? 4ull * p->n_head : 0, KV_LISTS },
        { (void **)&t->zone_lse, zone ? 4 * (uint64_t)p->n_batch * p->n_head : 0, KV_MAP },
        { (void **)&t->zone, zone * sizeof(*t->zone), KV_LISTS },
        { (void **)&t->left, zone ? 2 * row * (chunks * p->chunk_tokens / p->zone_tokens) : 0,
          KV_LISTS },
        { (void **)&t->score, 4 * row * chunks, KV_WORK },
        { (void **)&t->ema, p->host_lookup ? 2 * row * chunks : 0, KV_LISTS },
        { (void **)&t->sel, 4 * row * slots, KV_MAP },
        { (void **)&t->fetch, 4 * times * row * slots, KV_MAP },
        { (void **)&t->into, 4 * times * row * slots, KV_MAP },
        { (void **)&t->stay, 4 * row * slots, KV_MAP },
        { (void **)&t->sink, 8 * times * row * (p->n_sink / p->chunk_tokens), KV_ARGS },
        { (void **)&t->near, 8 * row * slots, KV_MAP },
        { (void **)&t->urgent, 8 * row * slots, KV_MAP },
        { (void **)&t->list[0].param, 8 * packed * copies, KV_LISTS },
        { (void **)&t->list[0].number, 4 * packed * copies, KV_LISTS },
        { (void **)&t->list[0].src, 8 * copies, KV_LISTS },
        { (void **)&t->list[0].dst, 8 * copies, KV_LISTS },
        { (void **)&t->list[1].param, 8 * packed * late, KV_LISTS },
        { (void **)&t->list[1].number, 4 * packed * late, KV_LISTS },
        { (void **)&t->list[1].src, 8 * late, KV_LISTS },
        { (void **)&t->list[1].dst, 8 * late, KV_LISTS },
        { (void **)&t->pack, packed * 3 * 8 * p->n_kv_head * (resident ? 1 : blocks), KV_LISTS },
    };

    memset(bytes, 0, KV_N_REGION * sizeof(*bytes));
    for (size_t i = 0; i < KVD_COUNTOF(part); i++) {
        if (base)
            *part[i].at = table_at(&base[part[i].where], bytes[part[i].where]);
        bytes[part[i].where] += kvd_align_up(part[i].bytes, KVD_CACHE_LINE);
    }
}

bool kv_region_mirrored(const kv_params *p, kv_region r)
{
    return p->apart && p->device_steps && (r == KV_ARGS || r == KV_FOUND);
}

bool kv_region_on_device(const kv_params *p, kv_region r)
{
    return (r == KV_MAP && (p->device_steps || !p->apart)) ||
           (r == KV_WORK && (p->device_steps || p->host_lookup || !p->apart));
}

static void map_bytes(const kv_params *p, bool resident, kv_sizes *z)
{
    kv_store unused;
    uint64_t bytes[KV_N_REGION];

    kv_place_map(p, resident, &unused, NULL, bytes);
    z->bytes[KV_BUF_MAP] = z->bytes[KV_BUF_LISTS] = 0;
    for (uint32_t i = 0; i < KV_N_REGION; i++) {
        const bool device = !p->apart || kv_region_on_device(p, i);

        z->bytes[device ? KV_BUF_MAP : KV_BUF_LISTS] += bytes[i];
        if (kv_region_mirrored(p, i))
            z->bytes[KV_BUF_MAP] += bytes[i];
    }
    z->bytes[KV_BUF_LISTS] += kv_ferry_bytes(p);
}

/* Records that one call copies at most: a step's misses, or one layer of a sequence. */
uint64_t kv_copies_max(const kv_params *p)
{
    return kvd_max_u64(step_copies(p), p->n_kv_head * chunks_max(p));
}

/* ---- sizes -------------------------------------------------------------------------- */

static uint64_t table_bytes(const kv_params *p, const kv_sizes *z)
{
    const uint64_t          lanes  = (uint64_t)p->n_layer * p->n_kv_head;
    const kvd_record_format f      = kv_record_format(p);
    const uint64_t          record = kvd_record_bytes(&f);
    const uint64_t          host   = z->bytes[KV_BUF_HOST];

    return sizeof(kv_store) + p->n_seq * sizeof(kv_seq) + 8 * z->n_raw + 8 * z->n_block +
           4 * host / record + 32 * lanes + kv_cache_bytes(p) + kv_parked_bytes(p, z) +
           (z->spills ? kv_tier_bytes(p, host, record) : 0);
}

/* Too little room on the device: says for what, and what would do. */
static kvd_status refuse_device(const kv_params *p, const kv_sizes *z, kvd_err *err)
{
    return kvd_fail(err, KVD_E_INVAL, 0,
                    "KV cache: device tier of %" PRIu64 " MiB (kv_device) is too small, %" PRIu64
                    " MiB are needed (raw blocks %" PRIu64 ", windows %" PRIu64 ", stage %" PRIu64
                    ", index %" PRIu64 ", zone %" PRIu64 ", maps %" PRIu64
                    "); less is needed by a smaller batch (n_batch), budget (budget), window (cap) "
                    "or context (n_ctx) and by fewer sequences (n_seq)",
                    p->device_bytes >> 20, (z->device_bytes >> 20) + 1, z->bytes[KV_BUF_RAW] >> 20,
                    z->bytes[KV_BUF_WINDOW] >> 20, z->bytes[KV_BUF_STAGE] >> 20,
                    (z->bytes[KV_BUF_INDEX] - z->zone_bytes) >> 20, z->zone_bytes >> 20,
                    z->bytes[KV_BUF_MAP] >> 20);
}

/* Too little room on the host, and no disk to take the rest. */
static kvd_status refuse_host(const kv_params *p, const kv_sizes *z, kvd_err *err)
{
    return kvd_fail(
        err, KVD_E_INVAL, 0,
        "KV cache: host tier of %" PRIu64 " MiB (kv_host) is too small, %" PRIu64
        " MiB are needed for records; with a cache directory (cache_dir) the rest is on "
        "disk, and a smaller context (n_ctx) or smaller records (kv_record) need less",
        p->host_bytes >> 20, (z->bytes[KV_BUF_HOST] >> 20) + 1);
}

uint32_t kv_lane_slots(const kv_params *p, uint64_t lane)
{
    const uint32_t tokens = p->lane_tokens ? p->lane_tokens[lane] : p->window_tokens;

    kvd_assert(tokens <= p->window_tokens);
    return p->sparse ? tokens / p->chunk_tokens : 0;
}

/* Sinks and slots of all lanes of a sequence. */
static uint64_t window_records(const kv_params *p, uint64_t lanes)
{
    uint64_t n = lanes * (p->n_sink / p->chunk_tokens);

    if (!p->lane_tokens)
        return n + lanes * kv_lane_slots(p, 0);
    for (uint64_t i = 0; i < lanes; i++)
        n += kv_lane_slots(p, i);
    return n;
}

static void fill_tiered(const kv_params *p, kv_sizes *z, uint64_t lanes)
{
    const uint64_t          records = window_records(p, lanes);
    const kvd_record_format f       = kv_record_format(p);
    const uint64_t          record = kvd_record_raw_bytes(&f), packed = kvd_record_bytes(&f);

    z->resident             = false;
    z->n_raw                = kvd_min_u64(z->n_block, p->n_seq * raw_blocks(p));
    z->bytes[KV_BUF_RAW]    = z->n_raw * z->block_bytes;
    z->bytes[KV_BUF_WINDOW] = p->n_seq * records * record;
    z->bytes[KV_BUF_STAGE]  = kvd_div_up(p->n_ctx, KV_BLOCK_TOKENS) * (z->block_bytes / p->n_layer);
    z->bytes[KV_BUF_HOST]   = z->n_block * lanes * (KV_BLOCK_TOKENS / p->chunk_tokens) * packed;
    map_bytes(p, false, z);
    z->spills =
        p->cache_dir && (p->lazy || (p->host_bytes && z->bytes[KV_BUF_HOST] > p->host_bytes));
    if (z->spills && p->host_bytes)
        z->bytes[KV_BUF_HOST] = kvd_min_u64(p->host_bytes, z->bytes[KV_BUF_HOST]) / packed * packed;
    z->n_host = z->bytes[KV_BUF_HOST] / packed;
}

/* What lanes may have is there. */
static kvd_status check_shares(const kv_params *p, const kv_sizes *z, kvd_err *err)
{
    const uint64_t lanes = (uint64_t)p->n_layer * p->n_kv_head;
    uint64_t       n     = 0;

    for (uint64_t i = 0; z->spills && p->lane_host && i < lanes; i++)
        n += p->lane_host[i];
    if (n > z->n_host / p->n_seq)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "KV cache: layers and KV heads share out %" PRIu64
                        " host records for each of %u sequence(s), the host tier has %" PRIu64,
                        n, p->n_seq, z->n_host);
    return KVD_OK;
}

static void sum(const kv_params *p, kv_sizes *z)
{
    z->device_bytes = z->host_bytes = 0;
    for (int i = 0; i < KV_BUF_COUNT; i++)
        *(i >= KV_BUF_HOST ? &z->host_bytes : &z->device_bytes) += z->bytes[i];
    z->pinned_bytes = p->apart ? z->bytes[KV_BUF_HOST] + z->bytes[KV_BUF_LISTS] : 0;
    z->pinned_bytes += z->spills ? kv_land_bytes(p) : 0; /* which are among KV_BUF_TABLE */
}

kvd_status kv_plan(const kv_params *p, kv_sizes *z, kvd_err *err)
{
    uint64_t lanes, most;
    bool     ok;

    kvd_assert(p->type == KVD_DTYPE_F32 || p->type == KVD_DTYPE_BF16);
    kvd_assert(KV_BLOCK_TOKENS % p->chunk_tokens == 0 && p->n_sink % p->chunk_tokens == 0 &&
               p->n_sink <= KV_BLOCK_TOKENS && p->n_local >= 1 &&
               p->window_tokens / p->chunk_tokens < KVD_SLOT_NONE);
    kvd_assert(p->zone_tokens == 0 || (p->sparse && KV_BLOCK_TOKENS % p->zone_tokens == 0 &&
                                       p->zone_tokens % p->chunk_tokens == 0));
    *z         = (kv_sizes){ .resident = true };
    z->n_block = kvd_div_up(p->n_token, KV_BLOCK_TOKENS);
    z->n_raw   = z->n_block;
    ok         = kvd_mul(p->n_layer, p->n_kv_head, &lanes) &&
         kvd_mul(lanes, 2 * elem_bytes(p) * p->head_dim, &z->bytes_per_token) &&
         kvd_mul(z->bytes_per_token, KV_BLOCK_TOKENS, &z->block_bytes) &&
         kvd_mul(z->block_bytes, z->n_block, &z->bytes[KV_BUF_RAW]) &&
         kvd_mul(lanes * 64, chunks_max(p), &most) && kvd_mul(most, p->n_seq, &most) &&
         kvd_mul(index_block_bytes(p), z->n_block, &z->bytes[KV_BUF_INDEX]);
    z->zone_bytes = p->sparse && ok ? lanes * kv_zone_bytes(p) * z->n_block : 0;
    if (!ok || z->bytes[KV_BUF_RAW] > INT64_MAX || most > INT64_MAX)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "KV cache: %" PRIu64 " tokens of %u layers, %u KV heads, head size %u "
                        "are more bytes than can be addressed",
                        p->n_token, p->n_layer, p->n_kv_head, p->head_dim);
    map_bytes(p, true, z);
    sum(p, z);
    if (p->tiered || (p->lazy && p->cache_dir) ||
        (p->device_bytes && z->device_bytes > p->device_bytes))
        fill_tiered(p, z, lanes);
    z->n_parked = z->spills ? 0 : (uint32_t)kvd_min_u64(p->n_parked, z->n_block);

    z->bytes[KV_BUF_TABLE] = table_bytes(p, z);
    sum(p, z);
    if (p->device_bytes && z->device_bytes > p->device_bytes)
        return refuse_device(p, z, err);
    if (p->host_bytes && z->bytes[KV_BUF_HOST] > p->host_bytes)
        return refuse_host(p, z, err);
    return check_shares(p, z, err);
}
