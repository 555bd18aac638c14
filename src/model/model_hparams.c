/* SPDX-License-Identifier: Apache-2.0 */
/* model_hparams.c - geometry from metadata, checked before anything is computed from it. */
#include <math.h>
#include <stdio.h>

#include "model/model_impl.h"

static const model_arch archs[] = {
    { .name = "llama", .neox = false },
    { .name = "qwen2", .neox = true, .qkv_bias = true },
    { .name = "qwen3", .neox = true, .qk_norm = true },
    { .name = "phi3", .neox = true, .fused = true },
};

/* Far above any model there is; keeps every later product inside 64 bits. */
enum {
    LAYERS_MAX = 1024,
    EMBD_MAX   = 1 << 20,
    HEADS_MAX  = 4096,
    FF_MAX     = 1 << 22,
    VOCAB_MAX  = 1 << 24
};

static kvd_status get_u32(const gguf_file *g, const char *arch, const char *suffix, bool required,
                          uint32_t *out, kvd_err *err)
{
    char key[96];

    snprintf(key, sizeof(key), "%s.%s", arch, suffix);
    return gguf_get_u32(g, key, required, out, err);
}

/* Some files give an array with one number per layer; we run models whose layers agree. */
static kvd_status get_head_count(const gguf_file *g, const model_hparams *hp, const char *suffix,
                                 bool required, uint32_t *out, kvd_err *err)
{
    char           key[96];
    const gguf_kv *kv;
    uint64_t       first = 0, x = 0;

    snprintf(key, sizeof(key), "%s.%s", hp->arch, suffix);
    kv = gguf_find(g, key);
    if (!kv || gguf_kv_type(kv) != GGUF_ARRAY)
        return gguf_get_u32(g, key, required, out, err);
    if (gguf_kv_count(kv) == 0 || gguf_kv_count(kv) != hp->n_layer)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s: %llu head counts for %u layers", key,
                        (unsigned long long)gguf_kv_count(kv), hp->n_layer);
    for (uint64_t i = 0; i < hp->n_layer; i++) {
        if (gguf_kv_elem_type(kv) >= GGUF_STRING || !gguf_kv_u64(kv, i, &x) || x > HEADS_MAX)
            return kvd_fail(err, KVD_E_CORRUPT, 0, "%s: element %llu is not a head count", key,
                            (unsigned long long)i);
        if (i == 0)
            first = x;
        if (x != first)
            return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                            "%s: layers with different head counts (%llu and %llu)", key,
                            (unsigned long long)first, (unsigned long long)x);
    }
    *out = (uint32_t)first;
    return KVD_OK;
}

static kvd_status find_arch(const model_arch **out, const gguf_file *g, kvd_err *err)
{
    gguf_str name = { 0 };

    KVD_TRY(gguf_get_str(g, "general.architecture", true, &name, err));
    for (size_t i = 0; i < KVD_COUNTOF(archs); i++) {
        if (gguf_str_eq(name, archs[i].name)) {
            *out = &archs[i];
            return KVD_OK;
        }
    }
    return kvd_fail(err, KVD_E_UNSUPPORTED, 0,
                    "architecture '%.*s' is not one this build runs (llama, qwen2, qwen3, phi3)",
                    (int)kvd_min_u64(name.len, 64), name.data);
}

static kvd_status check_range(const char *what, uint64_t x, uint64_t lo, uint64_t hi, kvd_err *err)
{
    if (x >= lo && x <= hi)
        return KVD_OK;
    return kvd_fail(err, KVD_E_CORRUPT, 0, "%s is %llu, expected %llu to %llu", what,
                    (unsigned long long)x, (unsigned long long)lo, (unsigned long long)hi);
}

static kvd_status check_geometry(const model_hparams *hp, kvd_err *err)
{
    KVD_TRY(check_range("block_count", hp->n_layer, 1, LAYERS_MAX, err));
    KVD_TRY(check_range("embedding_length", hp->n_embd, 1, EMBD_MAX, err));
    KVD_TRY(check_range("feed_forward_length", hp->n_ff, 1, FF_MAX, err));
    KVD_TRY(check_range("attention.head_count", hp->n_head, 1, HEADS_MAX, err));
    KVD_TRY(check_range("attention.head_count_kv", hp->n_kv_head, 1, hp->n_head, err));
    KVD_TRY(check_range("attention.key_length", hp->head_dim, 1, KVD_HEAD_DIM_MAX, err));
    KVD_TRY(check_range("context_length", hp->n_ctx_train, 1, 1u << 30, err));
    KVD_TRY(check_range("vocabulary size", hp->n_vocab, 1, VOCAB_MAX, err));
    if (hp->n_head % hp->n_kv_head != 0)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%u heads do not share %u KV heads evenly",
                        hp->n_head, hp->n_kv_head);
    if (!(hp->rms_eps >= 0.0f && hp->rms_eps < 1.0f))
        return kvd_fail(err, KVD_E_CORRUPT, 0, "attention.layer_norm_rms_epsilon is %g",
                        (double)hp->rms_eps);
    return KVD_OK;
}

/* Features that change the result and that we do not have: refused, never ignored. */
static kvd_status check_features(const gguf_file *g, model_hparams *hp, kvd_err *err)
{
    uint32_t n_expert = 0, window = 0, v_len = hp->head_dim;

    KVD_TRY(get_u32(g, hp->arch, "expert_count", false, &n_expert, err));
    if (n_expert > 0)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "%s with %u experts (mixture of experts)",
                        hp->arch, n_expert);
    KVD_TRY(get_u32(g, hp->arch, "attention.value_length", false, &v_len, err));
    if (v_len != hp->head_dim)
        return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "value heads of %u, key heads of %u", v_len,
                        hp->head_dim);
    KVD_TRY(get_u32(g, hp->arch, "attention.sliding_window", false, &window, err));
    if (window > 0 && window < hp->n_ctx_train) {
        kvd_log(KVD_LOG_WARN,
                "the model attends to a sliding window of %u tokens; its context is cut from %u to "
                "that, where full attention is the same",
                window, hp->n_ctx_train);
        hp->n_ctx_train = hp->n_window = window;
    }
    return KVD_OK;
}

kvd_status model_hparams_read(model_hparams *hp, const model_arch **arch, const gguf_file *g,
                              kvd_err *err)
{
    const gguf_tensor *embd;
    const char        *a;
    char               key[96];

    KVD_TRY(find_arch(arch, g, err));
    a   = (*arch)->name;
    *hp = (model_hparams){ .rope_neox = (*arch)->neox, .qk_norm = (*arch)->qk_norm };
    snprintf(hp->arch, sizeof(hp->arch), "%s", a);
    KVD_TRY(get_u32(g, a, "block_count", true, &hp->n_layer, err));
    KVD_TRY(get_u32(g, a, "embedding_length", true, &hp->n_embd, err));
    KVD_TRY(get_u32(g, a, "feed_forward_length", true, &hp->n_ff, err));
    KVD_TRY(get_u32(g, a, "context_length", true, &hp->n_ctx_train, err));
    KVD_TRY(get_head_count(g, hp, "attention.head_count", true, &hp->n_head, err));
    if (hp->n_head == 0)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "%s.attention.head_count is 0", a);
    hp->n_kv_head = hp->n_head;
    KVD_TRY(get_head_count(g, hp, "attention.head_count_kv", false, &hp->n_kv_head, err));
    hp->head_dim = hp->n_embd / hp->n_head;
    KVD_TRY(get_u32(g, a, "attention.key_length", false, &hp->head_dim, err));
    snprintf(key, sizeof(key), "%s.attention.layer_norm_rms_epsilon", a);
    KVD_TRY(gguf_get_f32(g, key, true, &hp->rms_eps, err));
    embd = gguf_tensor_find(g, "token_embd.weight");
    if (!embd)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "tensor token_embd.weight is missing");
    hp->n_vocab = embd->dim[1] <= VOCAB_MAX ? (uint32_t)embd->dim[1] : 0;
    KVD_TRY(check_geometry(hp, err));
    hp->attn_scale = 1.0f / sqrtf((float)hp->head_dim);
    return check_features(g, hp, err);
}
