/* SPDX-License-Identifier: Apache-2.0 */
/* model_rope.c - frequencies of the rotary embedding (arXiv 2104.09864) under every scaling we run.
 *
 * Plain: inv_freq[i] = base^(-2i / n_rot).  Linear: positions divided by the factor.  Factors: each
 * inv_freq divided by rope_freqs[i] (Llama-3.1 stores its smooth interpolation so).  LongRoPE
 * (arXiv 2402.13753): short or long divisors by the sequence's length, attention factor
 * sqrt(1 + ln(ctx/orig) / ln(orig)).  YaRN (arXiv 2309.00071): interpolated below beta_slow turns
 * over the original context, untouched above beta_fast, a ramp between, attention factor
 * 0.1 ln(factor) + 1.
 *
 * Angles are formed in float from float frequencies, as the training frameworks do: at position
 * 100,000 a double would part from them in the fourth digit of the angle. */
#include <math.h>
#include <stdio.h>

#include "model/model_impl.h"

#define YARN_BETA_FAST 32.0
#define YARN_BETA_SLOW 1.0
#define PI             3.14159265358979323846

static void plain_freqs(const model_hparams *hp, float *inv_freq)
{
    for (uint32_t i = 0; i < hp->n_rot / 2; i++) {
        const float e = (float)(2 * i) / (float)hp->n_rot;

        inv_freq[i] = 1.0f / powf(hp->rope_base, e);
    }
}

/* The (fractional) index of the frequency that makes n_turn turns over the original context. */
static double yarn_dim(const model_hparams *hp, double n_turn)
{
    return (double)hp->n_rot * log((double)hp->rope_orig_ctx / (n_turn * 2.0 * PI)) /
           (2.0 * log((double)hp->rope_base));
}

static void yarn_freqs(const model_hparams *hp, float *inv_freq)
{
    const double last = (double)hp->n_rot - 1.0;
    double       lo   = fmax(floor(yarn_dim(hp, YARN_BETA_FAST)), 0.0);
    double       hi   = fmin(ceil(yarn_dim(hp, YARN_BETA_SLOW)), last);

    if (lo == hi)
        hi += 0.001; /* no division by zero: a step instead of a ramp */
    for (uint32_t i = 0; i < hp->n_rot / 2; i++) {
        const double ramp  = fmin(fmax(((double)i - lo) / (hi - lo), 0.0), 1.0);
        const double plain = (double)inv_freq[i];

        inv_freq[i] = (float)(plain / (double)hp->rope_factor * ramp + plain * (1.0 - ramp));
    }
}

/* Divides inv_freq by the tensor's elements. */
static kvd_status divide_by_tensor(const gguf_file *g, const char *name, uint32_t n,
                                   float *inv_freq, kvd_err *err)
{
    const gguf_tensor *t = gguf_tensor_find(g, name);
    float              d;

    kvd_assert(t);
    if (t->type_id != KVD_DTYPE_F32 || t->n_elem != n)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "tensor %s: expected %u F32 elements, found %llu",
                        name, n, (unsigned long long)t->n_elem);
    for (uint32_t i = 0; i < n; i++) {
        kvd_dequantize(KVD_DTYPE_F32, (const uint8_t *)t->data + 4 * (size_t)i, &d, 1);
        if (!(d > 0.0f))
            return kvd_fail(err, KVD_E_CORRUPT, 0, "tensor %s: element %u is %g", name, i,
                            (double)d);
        inv_freq[i] /= d;
    }
    return KVD_OK;
}

static kvd_status longrope_init(model *m, const gguf_file *g, kvd_err *err)
{
    model_hparams *hp = &m->hp;
    const uint32_t n  = hp->n_rot / 2;
    char           key[96];

    if (!gguf_tensor_find(g, "rope_factors_short.weight"))
        return kvd_fail(err, KVD_E_CORRUPT, 0,
                        "rope_factors_long.weight without rope_factors_short.weight");
    snprintf(key, sizeof(key), "%s.rope.scaling.original_context_length", hp->arch);
    KVD_TRY(gguf_get_u32(g, key, true, &hp->rope_orig_ctx, err));
    snprintf(key, sizeof(key), "%s.rope.scaling.attn_factor", hp->arch);
    KVD_TRY(gguf_get_f32(g, key, true, &hp->rope_mscale, err));
    m->inv_freq_long = kvd_calloc(n, sizeof(float));
    if (!m->inv_freq_long)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for RoPE frequencies");
    m->heap_bytes += n * sizeof(float);
    plain_freqs(hp, m->inv_freq_long);
    KVD_TRY(divide_by_tensor(g, "rope_factors_short.weight", n, m->inv_freq, err));
    KVD_TRY(divide_by_tensor(g, "rope_factors_long.weight", n, m->inv_freq_long, err));
    return KVD_OK;
}

/* YaRN as we compute it; a file that asks for other constants is refused, not half obeyed. */
static kvd_status file_yarn(const gguf_file *g, const model_hparams *hp, model_rope_request *r,
                            kvd_err *err)
{
    static const struct {
        const char *key;
        float       served;
    } constants[] = {
        { "attn_factor", 1.0f },         { "yarn_attn_factor", 1.0f },
        { "yarn_ext_factor", 1.0f },     { "yarn_beta_fast", (float)YARN_BETA_FAST },
        { "yarn_log_multiplier", 0.0f }, { "yarn_beta_slow", (float)YARN_BETA_SLOW },
    };

    for (size_t i = 0; i < KVD_COUNTOF(constants); i++) {
        float x = constants[i].served;
        char  key[96];

        snprintf(key, sizeof(key), "%s.rope.scaling.%s", hp->arch, constants[i].key);
        KVD_TRY(gguf_get_f32(g, key, false, &x, err));
        if (x != constants[i].served)
            return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "%s is %g, this build runs YaRN with %g",
                            key, (double)x, (double)constants[i].served);
    }
    r->scaling = KVD_ROPE_YARN;
    return KVD_OK;
}

/* What the file asks for, in the user's terms.  Old files name no type, or have the factor of
 * linear scaling under the key rope.scale_linear. */
static kvd_status file_scaling(const gguf_file *g, const model_hparams *hp, model_rope_request *r,
                               kvd_err *err)
{
    gguf_str type = { 0 };
    char     key[96];

    snprintf(key, sizeof(key), "%s.rope.scaling.type", hp->arch);
    KVD_TRY(gguf_get_str(g, key, false, &type, err));
    snprintf(key, sizeof(key), "%s.rope.scale_linear", hp->arch);
    KVD_TRY(gguf_get_f32(g, key, false, &r->factor, err));
    snprintf(key, sizeof(key), "%s.rope.scaling.factor", hp->arch);
    KVD_TRY(gguf_get_f32(g, key, false, &r->factor, err));
    snprintf(key, sizeof(key), "%s.rope.scaling.original_context_length", hp->arch);
    KVD_TRY(gguf_get_u32(g, key, false, &r->orig_ctx, err));
    if (gguf_str_eq(type, "linear") || (type.len == 0 && r->factor != 0.0f))
        r->scaling = r->factor == 1.0f ? KVD_ROPE_NONE : KVD_ROPE_LINEAR;
    else if (gguf_str_eq(type, "yarn"))
        return file_yarn(g, hp, r, err);
    else if (type.len == 0 || gguf_str_eq(type, "none") || gguf_str_eq(type, "longrope"))
        r->scaling = KVD_ROPE_NONE; /* longrope is recognised by its tensors */
    else
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "%s.rope.scaling.type '%.*s'", hp->arch,
                        (int)kvd_min_u64(type.len, 64), type.data);
    return KVD_OK;
}

/* Applies linear or YaRN scaling to frequencies that are plain so far. */
static kvd_status scale_freqs(model *m, const model_rope_request *r, bool from_file, kvd_err *err)
{
    model_hparams *hp = &m->hp;
    const uint32_t n  = hp->n_rot / 2;

    if (!(r->factor > 1.0f && r->factor <= 1024.0f))
        return kvd_fail(err, from_file ? KVD_E_CORRUPT : KVD_E_INVAL, 0,
                        "RoPE scaling factor (rope_factor) %g: expected more than 1, at most 1024",
                        (double)r->factor);
    if (!from_file && hp->n_window)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                        "RoPE scaling of a model that attends to a sliding window of %u tokens",
                        hp->n_window);
    hp->rope_factor   = r->factor;
    hp->rope_orig_ctx = r->orig_ctx ? r->orig_ctx : hp->n_ctx_train;
    if (r->scaling == KVD_ROPE_LINEAR) {
        hp->rope_kind = MODEL_ROPE_LINEAR;
        for (uint32_t i = 0; i < n; i++)
            m->inv_freq[i] /= r->factor;
    } else {
        hp->rope_kind   = MODEL_ROPE_YARN;
        hp->rope_mscale = 0.1f * logf(r->factor) + 1.0f;
        yarn_freqs(hp, m->inv_freq);
    }
    if (!from_file) /* a file's own scaling is already in its context length */
        hp->n_ctx_train = (uint32_t)fminf((float)hp->rope_orig_ctx * r->factor, 0x1p30f);
    return KVD_OK;
}

kvd_status model_rope_init(model *m, const gguf_file *g, const model_rope_request *r, kvd_err *err)
{
    model_hparams     *hp        = &m->hp;
    model_rope_request q         = *r;
    const bool         from_file = r->scaling == KVD_ROPE_AUTO;
    char               key[96];

    hp->n_rot       = hp->head_dim;
    hp->rope_base   = 10000.0f;
    hp->rope_mscale = 1.0f;
    hp->rope_factor = 1.0f;
    if (r->scaling > KVD_ROPE_YARN)
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "RoPE scaling (rope_scaling) %d is none of kvd_rope_scaling",
                        (int)r->scaling);
    snprintf(key, sizeof(key), "%s.rope.dimension_count", hp->arch);
    KVD_TRY(gguf_get_u32(g, key, false, &hp->n_rot, err));
    snprintf(key, sizeof(key), "%s.rope.freq_base", hp->arch);
    KVD_TRY(gguf_get_f32(g, key, false, &hp->rope_base, err));
    if (r->base != 0.0f && !(r->base > 1.0f && isfinite(r->base)))
        return kvd_fail(err, KVD_E_INVAL, 0,
                        "RoPE base (rope_base) %g: expected a number above 1, or 0",
                        (double)r->base);
    if (r->base != 0.0f)
        hp->rope_base = r->base;
    if (hp->n_rot == 0 || hp->n_rot % 2 || hp->n_rot > hp->head_dim ||
        !(hp->rope_base > 1.0f && isfinite(hp->rope_base)))
        return kvd_fail(err, KVD_E_CORRUPT, 0, "RoPE over %u of %u dimensions, base %g", hp->n_rot,
                        hp->head_dim, (double)hp->rope_base);
    m->inv_freq = kvd_calloc(hp->n_rot / 2, sizeof(float));
    if (!m->inv_freq)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for RoPE frequencies");
    m->heap_bytes += hp->n_rot / 2 * sizeof(float);
    plain_freqs(hp, m->inv_freq);

    if (from_file)
        KVD_TRY(file_scaling(g, hp, &q, err));
    if (q.scaling == KVD_ROPE_LINEAR || q.scaling == KVD_ROPE_YARN)
        return scale_freqs(m, &q, from_file, err);
    if (from_file && gguf_tensor_find(g, "rope_factors_long.weight")) {
        hp->rope_kind = MODEL_ROPE_LONG;
        return longrope_init(m, g, err);
    }
    if (from_file && gguf_tensor_find(g, "rope_freqs.weight")) {
        hp->rope_kind = MODEL_ROPE_FACTORS;
        return divide_by_tensor(g, "rope_freqs.weight", hp->n_rot / 2, m->inv_freq, err);
    }
    return KVD_OK;
}

void model_rope_row(const model *m, uint32_t pos, bool long_factors, float *cos_sin)
{
    const uint32_t n = m->hp.n_rot / 2;
    const float   *f = long_factors && m->inv_freq_long ? m->inv_freq_long : m->inv_freq;

    for (uint32_t i = 0; i < n; i++) {
        const float angle = (float)pos * f[i];

        cos_sin[i]     = cosf(angle) * m->hp.rope_mscale;
        cos_sin[n + i] = sinf(angle) * m->hp.rope_mscale;
    }
}
