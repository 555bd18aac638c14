/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_gram.c - any bytes as a JSON schema, or as a list of tools (by the first byte).  Beyond not
 * crashing: a grammar that was taken never comes to a place where nothing may follow, masks say
 * what gram_allows() says, and a schema's text that has ended is JSON.  The vocabulary is every
 * byte and some longer tokens. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "text/text.h"

#define N_TOKEN 272
#define N_STEP  160

static const char *const longer[] = { "{\"", "\":",   "\": \"", "\",\"", "\"}",         "}}",
                                      "[[",  "]]",    "true",   "null",  "<tool_call>", "\\u00",
                                      "10",  "\"}\n", "aaa",    "\n  " };

static tok        *toks;
static gram_vocab *trie;

static void open_vocabulary(void)
{
    static char     text[256][8];
    static tok_str  token[N_TOKEN + 1];
    static int32_t  attr[N_TOKEN + 1];
    static float    score[N_TOKEN + 1];
    const tok_vocab v = { .model   = TOK_SPM,
                          .n_token = N_TOKEN + 1,
                          .token   = token,
                          .attr    = attr,
                          .score   = score,
                          .bos     = -1,
                          .eos     = N_TOKEN,
                          .eot     = -1,
                          .unk     = -1 };
    kvd_err         err;

    for (int i = 0; i < N_TOKEN; i++) {
        if (i < 256)
            snprintf(text[i], sizeof(text[i]), "<0x%02X>", (unsigned)i);
        token[i].data = i < 256 ? text[i] : longer[i - 256];
        token[i].len  = strlen(token[i].data);
        attr[i]       = i < 256 ? TOK_BYTE : TOK_NORMAL;
    }
    token[N_TOKEN] = (tok_str){ "</s>", 4 };
    attr[N_TOKEN]  = TOK_CONTROL;
    kvd_assert(tok_open(&toks, &v, &err) == KVD_OK);
    kvd_assert(gram_vocab_open(&trie, toks, &err) == KVD_OK);
}

static bool bit(const uint64_t *bits, uint32_t i)
{
    return bits[i / 64] >> (i % 64) & 1;
}

/* A random text of the grammar, of at most N_STEP tokens. */
static void walk(gram *g, bool schema, uint64_t seed)
{
    uint64_t bits[N_TOKEN / 64 + 1];
    kvd_buf  text = { 0 };
    kvd_rng  r;
    gram_at  at;
    kvd_err  err;

    kvd_rng_seed(&r, seed);
    gram_begin(g, &at);
    for (int i = 0; i < N_STEP && !at.ended; i++) {
        const kvd_status st = gram_mask(g, &at, bits, &err);
        size_t           len;
        const char      *s;
        uint32_t         id = (uint32_t)kvd_rng_below(&r, N_TOKEN + 1);

        kvd_assert(st == KVD_OK || st == KVD_E_FULL);
        if (st != KVD_OK)
            break;
        for (uint32_t k = 0; k <= N_TOKEN && i % 16 == 0; k++)
            kvd_assert(gram_allows(g, &at, (int32_t)k) == bit(bits, k));
        if (i > N_STEP / 2) /* towards the end */
            for (const char *c = "\"}]0"; *c && !bit(bits, id); c++)
                id = (uint8_t)*c;
        while (!bit(bits, id))
            id = (id + 1) % (N_TOKEN + 1);
        kvd_assert(gram_accept(g, &at, (int32_t)id, &err) == KVD_OK);
        s = tok_bytes(toks, (int32_t)id, &len);
        if (!at.ended)
            kvd_buf_put(&text, s, len);
    }
    if (at.ended && schema) {
        json_t *j = json_loadb(text.data, text.len, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);

        kvd_assert(j != NULL);
        json_decref(j);
    }
    kvd_buf_free(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t mode = size ? data[0] : 0;
    char         *text = kvd_strndup(size ? (const char *)data + 1 : "", size ? size - 1 : 0);
    gram_desc     d    = { .format = KVD_TOOLS_NONE };
    kvd_err       err;
    gram         *g;

    if (!trie)
        open_vocabulary();
    if (mode & 1) {
        d.tools_json  = text;
        d.format      = mode & 2 ? KVD_TOOLS_HERMES : KVD_TOOLS_LLAMA3;
        d.choice      = mode & 4 ? KVD_TOOL_CHOICE_REQUIRED : KVD_TOOL_CHOICE_AUTO;
        d.single_call = mode & 8;
    } else {
        d.schema_json = text;
    }
    if (text && gram_open(&g, trie, &d, &err) == KVD_OK) {
        for (uint64_t k = 0; k < 3; k++)
            walk(g, !(mode & 1), size * 3 + k);
        gram_close(g);
    }
    kvd_free(text);
    return 0;
}
