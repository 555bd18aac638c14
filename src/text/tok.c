/* SPDX-License-Identifier: Apache-2.0 */
/* tok.c - the tokenizer: opening, the names of pre-tokenizers, and what can be asked of it.
 *
 * A vocabulary tells what its tokens are, but not how text is cut before merging: that is the
 * pre-tokenizer's name in the file.  Without a name only vocabularies that are unmistakably one
 * family's are served.
 * Immutable once opened, any thread. */
#include "text/tok_impl.h"

typedef struct pre_info {
    const char *name; /* as in GGUF's tokenizer.ggml.pre */
    tok_split   split;
    bool        nfc, whole_word, bos;
} pre_info;

/* Aliases are names other writers give to exactly the same splitting. */
static const pre_info pre_table[] = {
    { "gpt-2", SPLIT_GPT2, false, false, false },
    { "gpt2", SPLIT_GPT2, false, false, false },
    { "phi-2", SPLIT_GPT2, false, false, false },
    { "smollm", SPLIT_SMOLLM, false, false, false },
    { "starcoder", SPLIT_SMOLLM, false, false, false },
    { "refact", SPLIT_SMOLLM, false, false, false },
    { "llama-bpe", SPLIT_LLAMA3, false, true, true },
    { "llama3", SPLIT_LLAMA3, false, true, true },
    { "llama-v3", SPLIT_LLAMA3, false, true, true },
    { "qwen2", SPLIT_QWEN2, true, false, false },
    { "deepseek-r1-qwen", SPLIT_QWEN2, true, false, false },
    { "gpt-4o", SPLIT_GPT4O, false, true, false },
    { "llama4", SPLIT_GPT4O, false, true, false },
};

static const pre_info *pre_find(tok_str name)
{
    for (size_t i = 0; i < KVD_COUNTOF(pre_table); i++) {
        if (strlen(pre_table[i].name) == name.len &&
            memcmp(pre_table[i].name, name.data, name.len) == 0)
            return &pre_table[i];
    }
    return NULL;
}

static bool token_is(const tok_vocab *v, uint32_t id, const char *text)
{
    return id < v->n_token && v->token[id].len == strlen(text) &&
           memcmp(v->token[id].data, text, v->token[id].len) == 0;
}

/* Tokens at the places where only one family has them. */
static const char *pre_by_signature(const tok_vocab *v)
{
    static const struct {
        const char *pre;
        struct {
            uint32_t    id;
            const char *text;
        } token[3];
    } family[] = {
        { "gpt-2", { { 0, "!" }, { 50255, "\xc4\xa0gazed" }, { 50256, "<|endoftext|>" } } },
        { "smollm", { { 1, "<|im_start|>" }, { 3, "<repo_name>" }, { 16, "<empty_output>" } } },
        { "llama-bpe",
          { { 128000, "<|begin_of_text|>" },
            { 128006, "<|start_header_id|>" },
            { 128009, "<|eot_id|>" } } },
        { "qwen2",
          { { 151643, "<|endoftext|>" }, { 151644, "<|im_start|>" }, { 151645, "<|im_end|>" } } },
        { "gpt-4o",
          { { 199999, "<|endoftext|>" }, { 200018, "<|endofprompt|>" }, { 200020, "<|end|>" } } },
    };

    for (size_t i = 0; i < KVD_COUNTOF(family); i++) {
        bool all = true;

        for (size_t j = 0; j < 3; j++)
            all &= token_is(v, family[i].token[j].id, family[i].token[j].text);
        if (all)
            return family[i].pre;
    }
    return NULL;
}

static bool is_default(tok_str name)
{
    return name.len == 0 || (name.len == 7 && memcmp(name.data, "default", 7) == 0);
}

static kvd_status choose_pre(tok *t, const tok_vocab *v, kvd_err *err)
{
    const pre_info *p = NULL;

    if (v->model == TOK_SPM) {
        t->pre_name = "spm";
        return KVD_OK;
    }
    if (!is_default(v->pre)) {
        p = pre_find(v->pre);
        if (!p)
            return kvd_fail(err, KVD_E_UNSUPPORTED, 0, "pre-tokenizer '%.*s' is not supported",
                            (int)(v->pre.len < 64 ? v->pre.len : 64), v->pre.data);
    } else {
        const char *name = pre_by_signature(v);

        if (!name)
            return kvd_fail(
                err, KVD_E_UNSUPPORTED, 0,
                "the file does not name its pre-tokenizer and its vocabulary is of no "
                "known family; name it (pre_tokenizer): gpt-2, smollm, llama-bpe, qwen2, "
                "gpt-4o");
        p = pre_find((tok_str){ name, strlen(name) });
    }
    t->split      = p->split;
    t->nfc        = p->nfc;
    t->whole_word = p->whole_word;
    t->pre_name   = p->name;
    return KVD_OK;
}

bool tok_default_add_bos(tok_model model, tok_str pre)
{
    const pre_info *p = model == TOK_BPE ? pre_find(pre) : NULL;

    return model == TOK_SPM || (p && p->bos);
}

static kvd_status check_vocab(const tok_vocab *v, kvd_err *err)
{
    const struct {
        const char *name;
        int32_t     id;
    } named[] = { { "bos", v->bos }, { "eos", v->eos }, { "eot", v->eot }, { "unknown", v->unk } };

    if (v->n_token == 0 || v->n_token >= INT32_MAX)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "a vocabulary of %u tokens", v->n_token);
    for (size_t i = 0; i < KVD_COUNTOF(named); i++) {
        if (named[i].id < -1 || named[i].id >= (int64_t)v->n_token)
            return kvd_fail(err, KVD_E_CORRUPT, 0, "the %s token is %d, the vocabulary has %u",
                            named[i].name, named[i].id, v->n_token);
    }
    if (v->add_bos && v->bos < 0)
        return kvd_fail(err, KVD_E_CORRUPT, 0, "a BOS token is asked for and none is named");
    return KVD_OK;
}

/* Turn ends by name: files often name only one of several in their metadata. */
static void mark_ends(tok *t, const tok_vocab *v)
{
    static const char *const name[]    = { "<|im_end|>",        "<|eot_id|>",    "<|eom_id|>",
                                           "<|end|>",           "<|endoftext|>", "<|end_of_text|>",
                                           "<end_of_turn>",     "<|eot|>",       "<|eom|>",
                                           "<end_of_utterance>" };
    static const char *const harmony[] = { "<|return|>", "<|call|>" };
    int32_t                  end[KVD_COUNTOF(harmony)];

    for (size_t i = 0; i < KVD_COUNTOF(name); i++) {
        const int32_t id = tok_find_special(t, name[i], strlen(name[i]));

        if (id >= 0 && (t->flag[id] & FLAG_HIDDEN))
            t->flag[id] |= FLAG_END;
    }
    for (size_t i = 0; i < KVD_COUNTOF(harmony); i++)
        end[i] = tok_find_special(t, harmony[i], strlen(harmony[i]));
    if (end[0] >= 0 && end[1] >= 0) { /* there <|end|> ends a message, and others follow */
        const int32_t message = tok_find_special(t, "<|end|>", strlen("<|end|>"));

        t->flag[end[0]] |= FLAG_END;
        t->flag[end[1]] |= FLAG_END;
        if (message >= 0)
            t->flag[message] &= (uint8_t)~FLAG_END;
    }
    if (v->eos >= 0)
        t->flag[v->eos] |= FLAG_END;
    if (v->eot >= 0)
        t->flag[v->eot] |= FLAG_END;
}

/* Phi-3's specials own the white space behind them (but <s>, <unk> and <|endoftext|> do not). */
static void mark_rstrip(tok *t)
{
    static const char *const bare[] = { "<s>", "<unk>", "<|endoftext|>" };

    if (t->model != TOK_SPM || tok_find_special(t, "<|placeholder1|>", 16) < 0 ||
        tok_find_special(t, "<|assistant|>", 13) < 0)
        return;
    for (uint32_t i = 0; i < t->n_special; i++)
        t->flag[t->special[i]] |= FLAG_RSTRIP;
    for (size_t i = 0; i < KVD_COUNTOF(bare); i++) {
        const int32_t id = tok_find_special(t, bare[i], strlen(bare[i]));

        if (id >= 0)
            t->flag[id] &= (uint8_t)~FLAG_RSTRIP;
    }
}

kvd_status tok_open(tok **out, const tok_vocab *v, kvd_err *err)
{
    *out   = NULL;
    tok *t = kvd_calloc(1, sizeof(*t));
    if (!t)
        return kvd_fail(err, KVD_E_NOMEM, 0, "tokenizer: no memory");
    t->heap_bytes       = sizeof(*t);
    t->model            = v->model;
    t->n_token          = v->n_token;
    t->bos              = v->bos;
    t->eos              = v->eos;
    t->unk              = v->unk;
    t->add_bos          = v->add_bos;
    t->add_space_prefix = v->add_space_prefix;

    kvd_status st = check_vocab(v, err);
    if (st == KVD_OK)
        st = choose_pre(t, v, err);
    if (st == KVD_OK)
        st = tok_vocab_build(t, v, err);
    if (st != KVD_OK) {
        tok_close(t);
        return st;
    }
    mark_ends(t, v);
    mark_rstrip(t);
    *out = t;
    return KVD_OK;
}

void tok_close(tok *t)
{
    if (!t)
        return;
    kvd_free(t->bytes);
    kvd_free(t->off);
    kvd_free(t->flag);
    kvd_free(t->word);
    kvd_free(t->merge);
    kvd_free(t->special);
    kvd_free(t);
}

static bool in_vocab(const tok *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->n_token;
}

uint32_t tok_n_token(const tok *t)
{
    return t->n_token;
}

const char *tok_bytes(const tok *t, int32_t id, size_t *len)
{
    if (in_vocab(t, id))
        return tok_text(t, (uint32_t)id, len);
    *len = 0;
    return "";
}

bool tok_is_special(const tok *t, int32_t id)
{
    return in_vocab(t, id) && (t->flag[id] & FLAG_HIDDEN);
}

bool tok_is_end(const tok *t, int32_t id)
{
    return in_vocab(t, id) && (t->flag[id] & FLAG_END);
}

int32_t tok_bos(const tok *t)
{
    return t->bos;
}

int32_t tok_eos(const tok *t)
{
    return t->eos;
}

bool tok_adds_bos(const tok *t)
{
    return t->add_bos;
}

uint64_t tok_heap_bytes(const tok *t)
{
    return t->heap_bytes;
}

const char *tok_pre_name(const tok *t)
{
    return t->pre_name;
}
