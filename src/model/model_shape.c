/* SPDX-License-Identifier: Apache-2.0 */
/* model_shape.c - models that are only a shape: hyper-parameters of a known one and random weights,
 * for measuring speed where the model itself is not at hand.  What they answer means nothing.
 *
 * The hyper-parameters are public facts.  Contexts are not limited by what the model was trained
 * for.  Weights are blocks of random bits with scales that keep values near 1/64, so that
 * activations stay finite: NOISE_BYTES of them for each element type, from which every matrix takes
 * its own stretch, round and round.
 *
 * Owns: nothing but what model_open() would.  Thread: the one that opens the model. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/half.h"
#include "model/model_impl.h"

#define SHAPE_CTX   (1u << 22) /* tokens */
#define NOISE_BYTES (32ull << 20)
#define NOISE_SIZE  (1.0f / 64.0f) /* of a weight, about */

typedef struct shape {
    const char *name, *arch;
    uint32_t    n_layer, n_embd, n_head, n_kv_head, head_dim, n_ff, n_vocab, n_rot;
    float       rope_base, rms_eps;
    bool        neox, qk_norm, tied;
} shape;

static const shape shapes[] = {
    { "llama-3-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 128, 500000.0f, 1e-5f, false,
      false, false },
    { "qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 128, 1e6f, 1e-6f, true, true,
      false },
    { "qwen3-14b", "qwen3", 40, 5120, 40, 8, 128, 17408, 151936, 128, 1e6f, 1e-6f, true, true,
      false },
    { "phi-4-mini", "phi3", 32, 3072, 24, 8, 128, 8192, 200064, 96, 10000.0f, 1e-5f, true, false,
      true },
    { "tiny", "llama", 8, 256, 16, 4, 64, 512, 1024, 64, 10000.0f, 1e-5f, false, false, false },
};

/* ---- the model -------------------------------------------------------------------------- */

static const shape *find_shape(const char *name, kvd_err *err)
{
    for (size_t i = 0; i < KVD_COUNTOF(shapes); i++) {
        if (strcmp(shapes[i].name, name) == 0)
            return &shapes[i];
    }
    (void)kvd_fail(err, KVD_E_INVAL, 0,
                   "no shape '%s' (llama-3-8b, qwen3-8b, qwen3-14b, phi-4-mini, tiny)", name);
    return NULL;
}

typedef enum mix { MIX_BF16, MIX_Q8_0, MIX_Q4_K } mix;

static kvd_status find_mix(const char *name, mix *out, kvd_err *err)
{
    static const char *const names[] = { "bf16", "q8_0", "q4_k" };

    *out = MIX_BF16;
    for (size_t i = 0; name && i < KVD_COUNTOF(names); i++) {
        *out = (mix)i;
        if (strcmp(names[i], name) == 0)
            return KVD_OK;
    }
    return name ? kvd_fail(err, KVD_E_INVAL, 0, "no weights of type '%s' (bf16, q8_0, q4_k)", name)
                : KVD_OK;
}

/* Of a matrix; more: it is one of those for which Q4_K_M files take 6 bits. */
static kvd_dtype type_of(mix m, bool more)
{
    switch (m) {
    case MIX_BF16:
        return KVD_DTYPE_BF16;
    case MIX_Q8_0:
        return KVD_DTYPE_Q8_0;
    case MIX_Q4_K:
        break;
    }
    return more ? KVD_DTYPE_Q6_K : KVD_DTYPE_Q4_K;
}

/* The layers whose V and down projections take 6 bits in Q4_K_M files. */
static bool takes_more(uint32_t il, uint32_t n)
{
    return il < n / 8 || il >= 7 * n / 8 || (il - n / 8) % 3 == 2;
}

static kvd_weight matrix(model *m, kvd_dtype type, uint32_t n_col, uint32_t n_row)
{
    m->n_param += (uint64_t)n_col * n_row;
    return (kvd_weight){ .type      = type,
                         .n_row     = n_row,
                         .n_col     = n_col,
                         .row_bytes = kvd_dtype_row_bytes(type, n_col),
                         .data      = m }; /* until it is placed: not NULL, and never read */
}

static void set_layer(model *m, uint32_t il, mix x, const float *ones)
{
    const model_hparams *hp   = &m->hp;
    const uint32_t       n_q  = hp->n_head * hp->head_dim;
    const uint32_t       n_kv = hp->n_kv_head * hp->head_dim;
    const kvd_dtype      type = type_of(x, false);
    const kvd_dtype      more = type_of(x, takes_more(il, hp->n_layer));

    m->layer[il] = (model_layer){ .attn_norm = ones,
                                  .ffn_norm  = ones,
                                  .q_norm    = hp->qk_norm ? ones : NULL,
                                  .k_norm    = hp->qk_norm ? ones : NULL,
                                  .q         = matrix(m, type, hp->n_embd, n_q),
                                  .k         = matrix(m, type, hp->n_embd, n_kv),
                                  .v         = matrix(m, more, hp->n_embd, n_kv),
                                  .o         = matrix(m, type, n_q, hp->n_embd),
                                  .gate      = matrix(m, type, hp->n_embd, hp->n_ff),
                                  .up        = matrix(m, type, hp->n_embd, hp->n_ff),
                                  .down      = matrix(m, more, hp->n_ff, hp->n_embd) };
}

static model_hparams hparams_of(const shape *s)
{
    model_hparams hp = { .n_layer     = s->n_layer,
                         .n_embd      = s->n_embd,
                         .n_head      = s->n_head,
                         .n_kv_head   = s->n_kv_head,
                         .head_dim    = s->head_dim,
                         .n_ff        = s->n_ff,
                         .n_vocab     = s->n_vocab,
                         .n_ctx_train = SHAPE_CTX,
                         .rms_eps     = s->rms_eps,
                         .attn_scale  = 1.0f / sqrtf((float)s->head_dim),
                         .qk_norm     = s->qk_norm,
                         .rope_neox   = s->neox,
                         .n_rot       = s->n_rot,
                         .rope_kind   = MODEL_ROPE_PLAIN,
                         .rope_base   = s->rope_base,
                         .rope_factor = 1.0f,
                         .rope_mscale = 1.0f };

    snprintf(hp.arch, sizeof(hp.arch), "%s", s->arch);
    return hp;
}

static void fill_model(model *m, const shape *s, mix x)
{
    const uint32_t n_half = s->n_rot / 2;

    for (uint32_t i = 0; i < s->n_embd; i++)
        m->vectors[i] = 1.0f;
    for (uint32_t i = 0; i < n_half; i++)
        m->inv_freq[i] = powf(s->rope_base, -(float)(2 * i) / (float)s->n_rot);
    m->made        = true;
    m->tied        = s->tied;
    m->embd        = matrix(m, type_of(x, s->tied), s->n_embd, s->n_vocab);
    m->output      = s->tied ? m->embd : matrix(m, type_of(x, true), s->n_embd, s->n_vocab);
    m->output_norm = m->vectors;
    for (uint32_t il = 0; il < s->n_layer; il++)
        set_layer(m, il, x, m->vectors);
}

kvd_status model_open_shape(model **out, const char *name, const char *weights, kvd_err *err)
{
    const shape *s = find_shape(name, err);
    model       *m;
    mix          x;

    *out = NULL;
    if (!s)
        return KVD_E_INVAL;
    KVD_TRY(find_mix(weights, &x, err));
    m = kvd_calloc(1, sizeof(*m));
    if (!m)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the model");
    m->hp       = hparams_of(s);
    m->layer    = kvd_calloc(s->n_layer, sizeof(*m->layer));
    m->vectors  = kvd_calloc(s->n_embd, sizeof(*m->vectors));
    m->inv_freq = kvd_calloc(s->n_rot / 2, sizeof(*m->inv_freq));
    if (!m->layer || !m->vectors || !m->inv_freq) {
        model_close(m);
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %u layers", s->n_layer);
    }
    m->heap_bytes =
        sizeof(*m) + s->n_layer * sizeof(*m->layer) + (s->n_embd + s->n_rot / 2) * sizeof(float);
    fill_model(m, s, x);
    *out = m;
    return KVD_OK;
}

/* ---- bytes ------------------------------------------------------------------------------ */

static uint64_t bytes_of(const kvd_weight *w)
{
    return w->n_row * w->row_bytes;
}

model_bytes model_get_bytes(const model *m)
{
    model_bytes b = { .logits = bytes_of(&m->output), .embed = bytes_of(&m->embd) };

    for (uint32_t il = 0; il < m->hp.n_layer; il++) {
        const model_layer *l = &m->layer[il];

        b.qkv += bytes_of(&l->q) + bytes_of(&l->k) + bytes_of(&l->v);
        b.ffn += bytes_of(&l->o) + bytes_of(&l->gate) + bytes_of(&l->up) + bytes_of(&l->down);
    }
    b.all = b.qkv + b.ffn + b.logits + (m->output.data == m->embd.data ? 0 : b.embed);
    return b;
}

/* ---- noise ------------------------------------------------------------------------------ */

static void put_half(uint8_t *at, float x)
{
    const uint16_t h = kvd_f32_to_f16(x);

    memcpy(at, &h, sizeof(h));
}

/* Magnitudes from 1/64 to 1/32, random signs and mantissas. */
static void noise_bf16(uint8_t *b, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += 2) {
        b[i] |= 0x80; /* the exponent's last bit */
        b[i + 1] = (uint8_t)((b[i + 1] & 0x80) | 0x3c);
    }
}

/* One block of random bytes gets scales that fit: codes of n bits around their middle. */
static void noise_scales(kvd_dtype type, uint8_t *b)
{
    if (type == KVD_DTYPE_Q8_0) {
        put_half(b, NOISE_SIZE / 74.0f);
    } else if (type == KVD_DTYPE_Q6_K) { /* 8-bit scales of either sign, 6-bit codes */
        put_half(b + 208, NOISE_SIZE / (74.0f * 18.5f));
    } else { /* Q4_K: 6-bit scales and minima, 4-bit codes */
        put_half(b, NOISE_SIZE / (31.5f * 4.6f));
        put_half(b + 2, NOISE_SIZE / (31.5f * 4.6f) * 7.5f);
    }
}

static void fill_tile(model_tile *t, kvd_dtype type)
{
    const uint64_t block = kvd_dtype_get(type)->block_bytes;
    uint8_t       *b     = t->mem.ptr;
    kvd_rng        r;

    kvd_rng_seed(&r, (uint64_t)type + 1);
    t->type  = type;
    t->bytes = NOISE_BYTES / block * block;
    for (uint64_t i = 0; i + 8 <= t->mem.bytes; i += 8) {
        const uint64_t x = kvd_rng_u64(&r);

        memcpy(b + i, &x, sizeof(x));
    }
    if (type == KVD_DTYPE_BF16)
        noise_bf16(b, t->bytes);
    for (uint64_t i = 0; type != KVD_DTYPE_BF16 && i < t->bytes; i += block)
        noise_scales(type, b + i);
}

static kvd_status tile_of(model_noise *n, kvd_dtype type, model_tile **out, kvd_err *err)
{
    model_tile *t = n->tile;

    while (t->mem.ptr && t->type != type)
        t++;
    kvd_assert(t < n->tile + KVD_COUNTOF(n->tile));
    *out = t;
    if (t->mem.ptr)
        return KVD_OK;
    KVD_TRY(n->be->ops->mem_alloc(n->be, KVD_MEM_PINNED, NOISE_BYTES, &t->mem, err));
    fill_tile(t, type);
    return KVD_OK;
}

void model_noise_close(model_noise *n)
{
    for (size_t i = 0; i < KVD_COUNTOF(n->tile); i++)
        n->be->ops->mem_free(n->be, &n->tile[i].mem);
}

kvd_status model_noise_copy(model_noise *n, kvd_stream *st, kvd_dtype type, kvd_mem dst,
                            uint64_t off, uint64_t bytes, kvd_err *err)
{
    const uint64_t block = kvd_dtype_get(type)->block_bytes;
    model_tile    *t;
    uint64_t       at;

    KVD_TRY(tile_of(n, type, &t, err));
    n->n_block += 10007;
    at = n->n_block * block % t->bytes;
    for (uint64_t done = 0; done < bytes;) {
        const uint64_t part = kvd_min_u64(bytes - done, t->bytes - at);

        KVD_TRY(n->be->ops->copy(st, dst, off + done, t->mem, at, part, err));
        at = (at + part) % t->bytes;
        done += part;
    }
    return KVD_OK;
}
