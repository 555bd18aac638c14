/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_model.c - any bytes as a model file, all the way to logits through the public interface.
 *
 * Input: 8 bytes of options, then a GGUF file.  What opens is planned, tokenized with, rendered
 * with, and evaluated for ten tokens; then once more with the tokens cut into other batches.
 * Checked beyond what the sanitizers see: failures are clean; memory stays in proportion to the
 * file, and is as planned; every id is one of the vocabulary; with the backend "ref" or the option
 * deterministic, both cuts give the same bits, whatever the weights are.
 *
 * corpus/model is what -merge=1 leaves of scripts/make-fuzz-models.py (small valid models of every
 * architecture, with odd geometries and mixed element types) and a long run. */
#include "engine/engine.h"
#include "fuzz/gguf_mutator.h"
#include "fuzz/memory_files.h"

int    LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

#define PATH      "fuzz.gguf"
#define N_OPTION  8
#define N_TOKEN   10 /* evaluated; the context may be shorter */
#define CTX_MAX   64
#define IDS_MAX   512
#define HEAP_BASE (1u << 20)  /* thread pool, template, backend */
#define PLAN_BASE (64u << 20) /* kernel scratch */

/* The option bytes. */
enum { O_BACKEND, O_ISA, O_FLAGS, O_BATCH, O_CTX, O_KV_TYPE, O_THREADS, O_UNUSED };

static const char text[] = "hello <|im_end|>\n\t the 12 \xc3\xa4\xff </s>";

static kvd_status open_model(kvd_model **out, const uint8_t *option, kvd_err *err)
{
    static const char *const isa[] = { NULL, "portable", "avx2", "avx512" };
    kvd_model_params         p     = KVD_MODEL_PARAMS_INIT;

    p.path          = PATH;
    p.backend       = option[O_BACKEND] & 1 ? "cpu" : "ref";
    p.cpu_isa       = option[O_BACKEND] & 1 ? isa[option[O_ISA] & 3] : NULL;
    p.pre_tokenizer = option[O_FLAGS] & 1 ? "gpt-2" : NULL;
    p.precise       = option[O_FLAGS] & 2;
    p.deterministic = option[O_FLAGS] & 4;
    p.n_thread      = option[O_THREADS] ? 1 : 2;
    return kvd_model_open(out, &p, err);
}

static void must_be_clean(const kvd_err *err)
{
    must(err->msg[0] && !strchr(err->msg, '\n'));
    must(err->code == KVD_E_CORRUPT || err->code == KVD_E_UNSUPPORTED || err->code == KVD_E_INVAL);
}

/* ---- text ------------------------------------------------------------------------- */

static void speak(const kvd_model *m, const int32_t *id, size_t n)
{
    kvd_detok *d = NULL;
    size_t     len;

    must(kvd_detok_open(&d, m, NULL) == KVD_OK);
    for (size_t i = 0; i < n; i++) {
        const char *s = kvd_detok_feed(d, id[i], (i & 1) != 0, &len);

        must(s && s[len] == 0);
    }
    must(kvd_detok_flush(d, &len) != NULL);
    kvd_detok_close(d);
}

static void try_text(const kvd_model *m, uint32_t n_vocab)
{
    const kvd_span all = { 0, sizeof(text) - 1 };
    int32_t        id[IDS_MAX];
    size_t         n;

    for (size_t trusted = 0; trusted < 2; trusted++) {
        const kvd_status st =
            kvd_tokenize(m, text, sizeof(text) - 1, &all, trusted, true, id, IDS_MAX, &n, NULL);

        must(st == KVD_OK || st == KVD_E_UNSUPPORTED || st == KVD_E_INVAL || st == KVD_E_CORRUPT);
        must(n <= sizeof(text) * 4 && (st == KVD_OK || n == 0));
        for (size_t i = 0; i < n; i++)
            must(id[i] >= 0 && (uint32_t)id[i] < n_vocab);
        speak(m, id, n);
    }
}

/* Below the public function, for the text's length: a message may hold a zero byte. */
static void try_chat(const kvd_model *m)
{
    kvd_chat_request r    = KVD_CHAT_REQUEST_INIT;
    kvd_span        *span = NULL;
    kvd_buf          out  = { 0 };
    kvd_err          err  = { 0 };
    int32_t          id[IDS_MAX];
    size_t           n = 0, n_id;

    r.messages_json = "[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":"
                      "\"<|im_end|> \\u0000\\u00e4\"}]";
    if (engine_chat_render(m, &r, &out, &span, &n, &err) != KVD_OK) {
        must(!span && !out.len);
        must_be_clean(&err);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        must(span[i].start < span[i].end && span[i].end <= out.len);
        must(i == 0 || span[i - 1].end <= span[i].start);
    }
    if (out.len)
        must(kvd_tokenize(m, out.data, out.len, span, n, true, id, IDS_MAX, &n_id, &err) !=
             KVD_E_INVAL);
    kvd_buf_free(&out);
    kvd_free(span);
}

/* ---- evaluation ------------------------------------------------------------------- */

typedef struct work {
    uint32_t n_vocab, n_token; /* evaluated */
} work;

static void fill_tokens(int32_t *id, const work *p)
{
    for (uint32_t i = 0; i < N_TOKEN; i++)
        id[i] = (int32_t)((i * 2654435761u >> 7) % p->n_vocab);
}

/* Evaluates all but the last two in batches of the session, then one by one. */
static void decode(kvd_session *s, const work *p, float *logits)
{
    int32_t        id[N_TOKEN];
    const uint32_t n_first = p->n_token > 2 ? p->n_token - 2 : 1;
    kvd_batch      b       = KVD_BATCH_INIT;

    fill_tokens(id, p);
    must(kvd_prefill(s, 0, id, n_first, NULL, NULL, NULL) == KVD_OK);
    b.n_token = 1;
    for (uint32_t i = n_first; i < p->n_token; i++) {
        b.token = &id[i];
        must(kvd_eval(s, &b, NULL) == KVD_OK);
    }
    must(kvd_seq_len(s, 0) == p->n_token && kvd_logits(s, 0) && !kvd_logits(s, 1));
    memcpy(logits, kvd_logits(s, 0), p->n_vocab * sizeof(*logits));
}

/* Again: two tokens by themselves, the rest in one batch, behind a detour that is cut off. */
static void decode_otherwise(kvd_session *s, const work *p, float *logits)
{
    int32_t        id[N_TOKEN];
    const uint32_t n_first = p->n_token > 3 ? 2 : 1;

    fill_tokens(id, p);
    must(kvd_seq_truncate(s, 0, 0, NULL) == KVD_OK);
    for (uint32_t i = 0; i < n_first; i++)
        must(kvd_prefill(s, 0, id + i, 1, NULL, NULL, NULL) == KVD_OK);
    if (p->n_token > n_first) {
        must(kvd_prefill(s, 0, id, p->n_token - n_first, NULL, NULL, NULL) == KVD_OK);
        must(kvd_seq_truncate(s, 0, n_first, NULL) == KVD_OK);
        must(kvd_prefill(s, 0, id + n_first, p->n_token - n_first, NULL, NULL, NULL) == KVD_OK);
    }
    must(kvd_logits(s, 0));
    memcpy(logits, kvd_logits(s, 0), p->n_vocab * sizeof(*logits));
}

static bool same_bits(const float *x, const float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (memcmp(&x[i], &y[i], sizeof(*x)) != 0 && (x[i] == x[i] || y[i] == y[i]))
            return false;
    return true;
}

static void try_sampler(const kvd_model *m, const float *logits, uint32_t n_vocab)
{
    kvd_sampler_params p  = KVD_SAMPLER_PARAMS_INIT;
    kvd_sampler       *sm = NULL;

    must(kvd_sampler_open(&sm, m, &p, NULL) == KVD_OK);
    for (int i = 0; i < 3; i++) {
        const int32_t id = kvd_sampler_sample(sm, logits);

        must(id >= 0 && (uint32_t)id < n_vocab);
    }
    kvd_sampler_close(sm);
}

static void try_session(kvd_model *m, const uint8_t *option, const kvd_model_info *info,
                        size_t size)
{
    const bool         exact = !(option[O_BACKEND] & 1) || (option[O_FLAGS] & 4);
    kvd_session_params p     = KVD_SESSION_PARAMS_INIT;
    kvd_plan           plan  = { .struct_size = sizeof(plan) };
    work               what  = { .n_vocab = info->n_vocab };
    kvd_session       *s     = NULL;
    kvd_err            err   = { 0 };
    float             *x, *y;

    if (kvd_session_plan(m, &p, &plan, &err) != KVD_OK) /* at the model's own context */
        must_be_clean(&err);
    p.n_ctx      = 1 + option[O_CTX] % CTX_MAX;
    p.n_ctx      = p.n_ctx < info->n_ctx_train ? p.n_ctx : info->n_ctx_train;
    p.n_batch    = 1 + option[O_BATCH] % 32;
    p.kv_type    = (kvd_kv_type)(option[O_KV_TYPE] % 3);
    what.n_token = p.n_ctx < N_TOKEN ? p.n_ctx : N_TOKEN;
    must(kvd_session_plan(m, &p, &plan, &err) == KVD_OK);
    must(plan.kv_bytes + plan.scratch_bytes <= PLAN_BASE + 4096 * (uint64_t)size);
    if (kvd_session_open(&s, m, &p, &err) != KVD_OK) {
        must(!s);
        must_be_clean(&err);
        return;
    }
    x = malloc(2 * sizeof(*x) * info->n_vocab);
    must(x);
    y = x + info->n_vocab;
    decode(s, &what, x);
    decode_otherwise(s, &what, y);
    must(!exact || same_bits(x, y, info->n_vocab));
    try_sampler(m, x, info->n_vocab);
    free(x);
    kvd_session_close(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint64_t live = kvd_alloc_live(), before = kvd_alloc_bytes();
    kvd_model_info info = { .struct_size = sizeof(info) };
    kvd_model     *m    = NULL;
    kvd_err        err  = { 0 };

    if (size < N_OPTION)
        return 0;
    memory_file[0].path  = PATH;
    memory_file[0].data  = data + N_OPTION;
    memory_file[0].bytes = size - N_OPTION;
    (void)kvd_alloc_peak(true);
    if (open_model(&m, data, &err) == KVD_OK) {
        must(m && kvd_alloc_peak(false) - before <= HEAP_BASE + 64 * (uint64_t)size);
        kvd_model_get_info(m, &info);
        try_text(m, info.n_vocab);
        try_chat(m);
        try_session(m, data, &info, size);
        kvd_model_close(m);
    } else {
        must(!m && strncmp(err.msg, PATH ": ", sizeof(PATH) + 1) == 0);
        must_be_clean(&err);
        must(kvd_alloc_peak(false) - before <= HEAP_BASE + 64 * (uint64_t)size);
    }
    must(kvd_alloc_live() == live);
    return 0;
}

/* ---- mutator ---------------------------------------------------------------------- */

/* Puts a value that arithmetic trips over somewhere behind the header. */
static size_t bend_data(uint8_t *d, size_t size)
{
    static const uint32_t f32[] = { 0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                                    0x7f7fffff, 0x00000001, 0x3f800000, 0x5f000000, 0x2f000000 };
    static const uint16_t f16[] = { 0, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0x7bff, 1, 0x3c00, 0x7f80 };
    size_t                at;

    map_input(d, size);
    if (size - map.stop < 8)
        return size;
    at = map.stop + below(size - map.stop - 4);
    if (below(2)) {
        at &= ~(size_t)3;
        memcpy(d + at, &f32[below(KVD_COUNTOF(f32))], 4);
    } else {
        at &= ~(size_t)1;
        memcpy(d + at, &f16[below(KVD_COUNTOF(f16))], 2);
    }
    return size;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    static const char *const words[] = { "llama",
                                         "qwen2",
                                         "qwen3",
                                         "phi3",
                                         "gpt2",
                                         "yarn",
                                         "linear",
                                         "longrope",
                                         "none",
                                         "smollm",
                                         "llama-bpe",
                                         "blk.0.attn_q.bias",
                                         "output.weight",
                                         "rope_freqs.weight",
                                         "rope_factors_long.weight",
                                         "rope_factors_short.weight",
                                         "llama.attention.key_length",
                                         "llama.attention.value_length",
                                         "llama.rope.dimension_count",
                                         "llama.rope.scaling.factor",
                                         "llama.rope.scaling.type",
                                         "llama.rope.freq_base",
                                         "llama.attention.sliding_window",
                                         "tokenizer.chat_template",
                                         "tokenizer.ggml.pre",
                                         "tokenizer.ggml.bos_token_id",
                                         "tokenizer.ggml.add_bos_token",
                                         "tokenizer.ggml.add_space_prefix",
                                         "general.alignment",
                                         "{{ messages[0]['content'] }}",
                                         "{% for m in messages %}{{ m.role }}{% endfor %}",
                                         "<0x00>",
                                         "\xe2\x96\x81",
                                         "\xc4\xa0 a",
                                         "" };

    if (!LLVMFuzzerMutate)
        return size;
    kvd_rng_seed(&rng, seed);
    mutator_words  = words;
    mutator_n_word = KVD_COUNTOF(words);
    if (size <= N_OPTION || max_size <= N_OPTION)
        return LLVMFuzzerMutate(data, size, max_size);
    if (below(6) == 0) {
        data[below(N_OPTION)] = (uint8_t)kvd_rng_u64(&rng);
        return size;
    }
    if (below(3) == 0)
        return N_OPTION + bend_data(data + N_OPTION, size - N_OPTION);
    return N_OPTION + mutate_file(data + N_OPTION, size - N_OPTION, max_size - N_OPTION);
}
