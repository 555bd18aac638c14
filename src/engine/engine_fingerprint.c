/* SPDX-License-Identifier: Apache-2.0 */
/* engine_fingerprint.c - one hash over everything that stored K, V and index depend on: the file's
 * directory (metadata, names and shapes of tensors), samples of every tensor's content, RoPE as it
 * is applied, the element type, how chunks and index are laid out, and the kernels that compute
 * (other kernels round otherwise).
 *
 * Samples, since reading a large model whole takes long: two files that differ only between the
 * samples of all tensors would be taken for one.  Thread: any. */
#include <openssl/evp.h>
#include <string.h>

#include "engine/engine.h"

#define NUMERIC_VERSION 1u   /* goes up when kernels or formats change stored bytes */
#define SAMPLE_BYTES    512u /* of a tensor, at each of N_SAMPLE places from its start to its end */
#define N_SAMPLE        16u

static bool add(EVP_MD_CTX *md, const void *data, size_t bytes)
{
    return EVP_DigestUpdate(md, data, bytes) == 1;
}

static bool add_tensor(EVP_MD_CTX *md, const gguf_tensor *t)
{
    const uint64_t bytes = t->data ? t->bytes : 0;
    const uint64_t last  = bytes > SAMPLE_BYTES ? bytes - SAMPLE_BYTES : 0;
    bool           ok    = true;

    for (uint64_t i = 0; i < N_SAMPLE && bytes > 0 && ok; i++)
        ok = add(md, (const uint8_t *)t->data + last * i / (N_SAMPLE - 1),
                 (size_t)kvd_min_u64(bytes, SAMPLE_BYTES));
    return ok;
}

/* Random weights are the same for one shape and type. */
static bool add_shape(EVP_MD_CTX *md, const kvd_model *m)
{
    const uint32_t n[] = { NUMERIC_VERSION, m->precise, m->be->ops->abi };

    return add(md, m->name, strlen(m->name)) && add(md, m->file_type, strlen(m->file_type)) &&
           add(md, n, sizeof(n)) && add(md, m->be->ops->name, strlen(m->be->ops->name)) &&
           add(md, m->be->isa, strlen(m->be->isa));
}

static bool add_file(EVP_MD_CTX *md, const kvd_model *m)
{
    const model_hparams *hp = model_get_hparams(m->net);
    const uint32_t n[] = { NUMERIC_VERSION, (uint32_t)hp->rope_kind, hp->rope_orig_ctx, m->precise,
                           m->be->ops->abi };
    const float    f[] = { hp->rope_base, hp->rope_factor, hp->rope_mscale };
    kvd_buf        dir = { 0 };
    bool           ok;

    for (uint64_t i = 0; i < gguf_n_kv(m->file); i++) {
        const gguf_kv *kv  = gguf_kv_at(m->file, i);
        const gguf_str key = gguf_kv_key(kv);
        gguf_str       text;
        double         v = 0.0;

        kvd_buf_put(&dir, key.data, key.len);
        for (uint64_t k = 0; k < gguf_kv_count(kv); k++) {
            if (gguf_kv_str(kv, k, &text))
                kvd_buf_put(&dir, text.data, text.len);
            else if (gguf_kv_f64(kv, k, &v))
                kvd_buf_put(&dir, (const char *)&v, sizeof(v));
        }
    }
    for (uint64_t i = 0; i < gguf_n_tensor(m->file); i++) {
        const gguf_tensor *t = gguf_tensor_at(m->file, i);

        kvd_buf_put(&dir, t->name.data, t->name.len);
        kvd_buf_put(&dir, (const char *)&t->type_id, sizeof(t->type_id));
        kvd_buf_put(&dir, (const char *)t->dim, sizeof(t->dim));
    }
    ok = !dir.oom && add(md, dir.data, dir.len) && add(md, n, sizeof(n)) && add(md, f, sizeof(f)) &&
         add(md, m->be->ops->name, strlen(m->be->ops->name)) &&
         add(md, m->be->isa, strlen(m->be->isa));
    kvd_buf_free(&dir);
    for (uint64_t i = 0; i < gguf_n_tensor(m->file) && ok; i++)
        ok = add_tensor(md, gguf_tensor_at(m->file, i));
    return ok;
}

kvd_status engine_fingerprint(const kvd_model *m, const kv_params *p, uint8_t out[32], kvd_err *err)
{
    const uint32_t n[]  = { p->n_layer,         p->n_kv_head,      p->head_dim,
                            (uint32_t)p->type,  p->chunk_tokens,   (uint32_t)p->index.kind,
                            p->index.elem,      p->index.key_elem, p->index.radius,
                            (uint32_t)p->record };
    unsigned       size = 0;
    EVP_MD_CTX    *md;
    bool           ok;

    md = EVP_MD_CTX_new();
    ok = md && EVP_DigestInit_ex(md, EVP_sha256(), NULL) == 1;
    ok = ok && (m->file ? add_file : add_shape)(md, m) && add(md, n, sizeof(n));
    if (p->zone_tokens > 0) /* without, directories are those of before there were zones */
        ok = ok && add(md, &p->zone_tokens, sizeof(p->zone_tokens));
    ok = ok && EVP_DigestFinal_ex(md, out, &size) == 1 && size == 32;
    EVP_MD_CTX_free(md);
    return ok ? KVD_OK : kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the model's fingerprint");
}
