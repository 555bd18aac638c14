/* SPDX-License-Identifier: Apache-2.0 */
/* model_bind.c - finds every weight by name, checks its shape and type, and takes fused projections
 * apart into views.  A tensor that no layer asked for means that the file is not what the
 * architecture table says it is: refused, since ignoring it would give wrong text.
 *
 * Norms and biases are vectors: copied to one float allocation, so kernels need not care how the
 * file stores them. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "model/model_impl.h"

typedef struct binder {
    const gguf_file  *g;
    const model_arch *arch;
    model            *m;
    uint64_t          n_bound;           /* tensors used so far */
    uint64_t          vec_used, vec_cap; /* floats of m->vectors */
    kvd_err          *err;
} binder;

typedef struct tensor_name {
    char s[64];
} tensor_name;

static tensor_name layer_name(uint32_t layer, const char *suffix)
{
    tensor_name n;

    snprintf(n.s, sizeof(n.s), "blk.%u.%s", layer, suffix);
    return n;
}

/* Finds a tensor of the wanted shape (n_row 1 means a vector).  Missing and optional gives NULL. */
static kvd_status find(binder *b, const char *name, uint64_t n_col, uint64_t n_row, bool required,
                       const gguf_tensor **out)
{
    const gguf_tensor *t = gguf_tensor_find(b->g, name);

    *out = NULL;
    if (!t && !required)
        return KVD_OK;
    if (!t)
        return kvd_fail(b->err, KVD_E_CORRUPT, 0, "tensor %s is missing", name);
    if (!kvd_dtype_get(t->type_id)) {
        const char *type = kvd_dtype_name(t->type_id);

        return kvd_fail(b->err, KVD_E_UNSUPPORTED, 0, "tensor %s: element type %s (id %u)", name,
                        type ? type : "unknown", t->type_id);
    }
    if (t->dim[0] != n_col || t->dim[1] != n_row || t->n_elem != n_col * n_row)
        return kvd_fail(b->err, KVD_E_CORRUPT, 0,
                        "tensor %s: expected [%llu, %llu], found [%llu, %llu, %llu, %llu]", name,
                        (unsigned long long)n_col, (unsigned long long)n_row,
                        (unsigned long long)t->dim[0], (unsigned long long)t->dim[1],
                        (unsigned long long)t->dim[2], (unsigned long long)t->dim[3]);
    b->n_bound++;
    b->m->n_param += t->n_elem;
    *out = t;
    return KVD_OK;
}

static kvd_status bind_weight(binder *b, const char *name, uint32_t n_col, uint32_t n_row,
                              kvd_weight *out)
{
    const gguf_tensor *t;

    KVD_TRY(find(b, name, n_col, n_row, true, &t));
    *out = (kvd_weight){ .type      = (kvd_dtype)t->type_id,
                         .n_row     = n_row,
                         .n_col     = n_col,
                         .row_bytes = kvd_dtype_row_bytes((kvd_dtype)t->type_id, n_col),
                         .data      = t->data };
    return KVD_OK;
}

static kvd_status bind_vector(binder *b, const char *name, uint32_t n, bool required,
                              const float **out)
{
    const gguf_tensor *t;
    float             *v;

    *out = NULL;
    KVD_TRY(find(b, name, n, 1, required, &t));
    if (!t)
        return KVD_OK;
    kvd_assert(b->vec_used + n <= b->vec_cap);
    v = b->m->vectors + b->vec_used;
    b->vec_used += n;
    kvd_dequantize((kvd_dtype)t->type_id, t->data, v, n);
    *out = v;
    return KVD_OK;
}

static kvd_status bind_attention(binder *b, uint32_t il, model_layer *l)
{
    const model_hparams *hp   = &b->m->hp;
    const uint32_t       n_q  = hp->n_head * hp->head_dim;
    const uint32_t       n_kv = hp->n_kv_head * hp->head_dim;
    const bool           bias = b->arch->qkv_bias;

    if (b->arch->fused) {
        kvd_weight w;

        KVD_TRY(
            bind_weight(b, layer_name(il, "attn_qkv.weight").s, hp->n_embd, n_q + 2 * n_kv, &w));
        l->q = kvd_weight_rows(w, 0, n_q);
        l->k = kvd_weight_rows(w, n_q, n_kv);
        l->v = kvd_weight_rows(w, n_q + n_kv, n_kv);
    } else {
        KVD_TRY(bind_weight(b, layer_name(il, "attn_q.weight").s, hp->n_embd, n_q, &l->q));
        KVD_TRY(bind_weight(b, layer_name(il, "attn_k.weight").s, hp->n_embd, n_kv, &l->k));
        KVD_TRY(bind_weight(b, layer_name(il, "attn_v.weight").s, hp->n_embd, n_kv, &l->v));
        KVD_TRY(bind_vector(b, layer_name(il, "attn_q.bias").s, n_q, bias, &l->q_bias));
        KVD_TRY(bind_vector(b, layer_name(il, "attn_k.bias").s, n_kv, bias, &l->k_bias));
        KVD_TRY(bind_vector(b, layer_name(il, "attn_v.bias").s, n_kv, bias, &l->v_bias));
    }
    if (hp->qk_norm) {
        KVD_TRY(
            bind_vector(b, layer_name(il, "attn_q_norm.weight").s, hp->head_dim, true, &l->q_norm));
        KVD_TRY(
            bind_vector(b, layer_name(il, "attn_k_norm.weight").s, hp->head_dim, true, &l->k_norm));
    }
    return bind_weight(b, layer_name(il, "attn_output.weight").s, n_q, hp->n_embd, &l->o);
}

static kvd_status bind_layer(binder *b, uint32_t il, model_layer *l)
{
    const model_hparams *hp = &b->m->hp;

    KVD_TRY(bind_vector(b, layer_name(il, "attn_norm.weight").s, hp->n_embd, true, &l->attn_norm));
    KVD_TRY(bind_vector(b, layer_name(il, "ffn_norm.weight").s, hp->n_embd, true, &l->ffn_norm));
    KVD_TRY(bind_attention(b, il, l));
    if (b->arch->fused) { /* gate rows first, then up */
        kvd_weight w;

        KVD_TRY(bind_weight(b, layer_name(il, "ffn_up.weight").s, hp->n_embd, 2 * hp->n_ff, &w));
        l->gate = kvd_weight_rows(w, 0, hp->n_ff);
        l->up   = kvd_weight_rows(w, hp->n_ff, hp->n_ff);
    } else {
        KVD_TRY(
            bind_weight(b, layer_name(il, "ffn_gate.weight").s, hp->n_embd, hp->n_ff, &l->gate));
        KVD_TRY(bind_weight(b, layer_name(il, "ffn_up.weight").s, hp->n_embd, hp->n_ff, &l->up));
    }
    return bind_weight(b, layer_name(il, "ffn_down.weight").s, hp->n_ff, hp->n_embd, &l->down);
}

static bool is_rope_tensor(const gguf_tensor *t)
{
    return gguf_str_eq(t->name, "rope_freqs.weight") ||
           gguf_str_eq(t->name, "rope_factors_long.weight") ||
           gguf_str_eq(t->name, "rope_factors_short.weight");
}

/* Splits "blk.12.ffn_up.weight" into 12 and "ffn_up.weight". */
static bool split_layer_name(gguf_str name, uint64_t *layer, gguf_str *suffix)
{
    uint64_t i = 4;

    if (name.len < 7 || memcmp(name.data, "blk.", 4) != 0)
        return false;
    for (*layer = 0; i < name.len && name.data[i] >= '0' && name.data[i] <= '9' && i < 12; i++)
        *layer = *layer * 10 + (uint64_t)(name.data[i] - '0');
    if (i == 4 || i >= name.len || name.data[i] != '.')
        return false;
    *suffix = (gguf_str){ .data = name.data + i + 1, .len = name.len - i - 1 };
    return true;
}

/* Whether the tensor is one that some architecture's binding asks for. */
static bool is_known(const binder *b, const gguf_tensor *t)
{
    static const char *const per_layer[] = {
        "attn_norm.weight", "ffn_norm.weight",    "attn_q.weight",      "attn_k.weight",
        "attn_v.weight",    "attn_q.bias",        "attn_k.bias",        "attn_v.bias",
        "attn_qkv.weight",  "attn_q_norm.weight", "attn_k_norm.weight", "attn_output.weight",
        "ffn_gate.weight",  "ffn_up.weight",      "ffn_down.weight",
    };
    uint64_t layer;
    gguf_str suffix;

    if (is_rope_tensor(t) || gguf_str_eq(t->name, "token_embd.weight") ||
        gguf_str_eq(t->name, "output_norm.weight") || gguf_str_eq(t->name, "output.weight"))
        return true;
    if (!split_layer_name(t->name, &layer, &suffix) || layer >= b->m->hp.n_layer)
        return false;
    for (size_t i = 0; i < KVD_COUNTOF(per_layer); i++)
        if (gguf_str_eq(suffix, per_layer[i]))
            return true;
    return false;
}

static kvd_status refuse_unbound(binder *b)
{
    uint64_t n_rope = 0;

    for (uint64_t i = 0; i < gguf_n_tensor(b->g); i++)
        n_rope += is_rope_tensor(gguf_tensor_at(b->g, i));
    if (b->n_bound + n_rope == gguf_n_tensor(b->g))
        return KVD_OK;
    for (uint64_t i = 0; i < gguf_n_tensor(b->g); i++) {
        const gguf_tensor *t = gguf_tensor_at(b->g, i);

        if (!is_known(b, t))
            return kvd_fail(b->err, KVD_E_UNSUPPORTED, 0,
                            "tensor %.*s is not part of architecture %s as this build runs it",
                            (int)kvd_min_u64(t->name.len, 64), t->name.data, b->m->hp.arch);
    }
    return kvd_fail(b->err, KVD_E_UNSUPPORTED, 0,
                    "%llu of %llu tensors are not used by architecture %s",
                    (unsigned long long)(gguf_n_tensor(b->g) - n_rope - b->n_bound),
                    (unsigned long long)gguf_n_tensor(b->g), b->m->hp.arch);
}

/* Upper bound of the floats bind_vector() will hand out. */
static uint64_t vector_floats(const model_hparams *hp)
{
    const uint64_t per_layer = 2 * (uint64_t)hp->n_embd + 2 * (uint64_t)hp->head_dim +
                               ((uint64_t)hp->n_head + 2 * hp->n_kv_head) * hp->head_dim;

    return hp->n_embd + hp->n_layer * per_layer;
}

static kvd_status bind_all(binder *b)
{
    model               *m  = b->m;
    const model_hparams *hp = &m->hp;

    KVD_TRY(bind_weight(b, "token_embd.weight", hp->n_embd, hp->n_vocab, &m->embd));
    m->output = m->embd;
    if (gguf_tensor_find(b->g, "output.weight"))
        KVD_TRY(bind_weight(b, "output.weight", hp->n_embd, hp->n_vocab, &m->output));
    KVD_TRY(bind_vector(b, "output_norm.weight", hp->n_embd, true, &m->output_norm));
    for (uint32_t il = 0; il < hp->n_layer; il++)
        KVD_TRY(bind_layer(b, il, &m->layer[il]));
    return refuse_unbound(b);
}

kvd_status model_open(model **out, const gguf_file *g, const model_rope_request *rope, kvd_err *err)
{
    model            *m;
    const model_arch *arch = NULL;
    model_hparams     hp;
    uint64_t          n_vec;
    kvd_status        st;
    binder            b;

    *out = NULL;
    KVD_TRY(model_hparams_read(&hp, &arch, g, err));
    /* A file may claim any geometry: let its own size bound what is allocated for it. */
    n_vec = vector_floats(&hp);
    if (hp.n_layer > gguf_n_tensor(g) || n_vec > gguf_mapped_bytes(g))
        return kvd_fail(err, KVD_E_CORRUPT, 0,
                        "%u layers of width %u do not fit a file of %llu tensors, %llu bytes",
                        hp.n_layer, hp.n_embd, (unsigned long long)gguf_n_tensor(g),
                        (unsigned long long)gguf_mapped_bytes(g));
    m = kvd_calloc(1, sizeof(*m));
    if (!m)
        return kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the model");
    m->hp      = hp;
    m->layer   = kvd_calloc(hp.n_layer, sizeof(*m->layer));
    m->vectors = kvd_calloc(n_vec, sizeof(float));
    if (!m->layer || !m->vectors) {
        st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory for %u layers", hp.n_layer);
        goto fail;
    }
    m->heap_bytes = sizeof(*m) + hp.n_layer * sizeof(*m->layer) + n_vec * sizeof(float);
    b             = (binder){ .g = g, .arch = arch, .m = m, .vec_cap = n_vec, .err = err };
    st            = bind_all(&b);
    if (st == KVD_OK)
        st = model_rope_init(m, g, rope, err);
    if (st != KVD_OK)
        goto fail;
    *out = m;
    return KVD_OK;
fail:
    model_close(m);
    return st;
}

void model_close(model *m)
{
    if (!m)
        return;
    kvd_free(m->inv_freq);
    kvd_free(m->inv_freq_long);
    kvd_free(m->vectors);
    kvd_free(m->layer);
    kvd_free(m);
}

const model_hparams *model_get_hparams(const model *m)
{
    return &m->hp;
}

uint64_t model_n_param(const model *m)
{
    return m->n_param;
}

uint64_t model_heap_bytes(const model *m)
{
    return m->heap_bytes;
}

uint32_t model_max_cols(const model *m)
{
    const uint32_t n_q = m->hp.n_head * m->hp.head_dim;

    return (uint32_t)kvd_max_u64(kvd_max_u64(m->hp.n_embd, n_q), m->hp.n_ff);
}
