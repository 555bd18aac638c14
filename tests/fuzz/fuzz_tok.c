/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_tok.c - a small vocabulary and a text made of the input's bytes.
 *
 *   u8 pre-tokenizer (5: SPM, 6: none), u8 flags, u8 n_token, n_token x { u8 attribute, u8 length,
 * bytes }, u8 n_merge, n_merge x { u8 length, bytes }, u16 trusted start, u16 trusted length, the
 * text
 *
 * With flag 1 the 256 bytes of the alphabet (or SPM's byte tokens) come first, so that the text
 * must come back.  What ever the input: no special outside the span, ids in range, valid UTF-8 out.
 */
#include "text/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOKEN (256 + 255)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct input {
    const uint8_t *p, *end;
} input;

static unsigned take_u8(input *in)
{
    return in->p < in->end ? *in->p++ : 0;
}

static size_t take_u16(input *in)
{
    const size_t low = take_u8(in);

    return low | (size_t)take_u8(in) << 8;
}

static tok_str take_str(input *in)
{
    const size_t want = take_u8(in), left = (size_t)(in->end - in->p);
    tok_str      s = { (const char *)in->p, want < left ? want : left };

    in->p += s.len;
    return s;
}

static void check(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "fuzz_tok: %s\n", what);
        abort();
    }
}

/* GPT-2's alphabet, or <0xXX>. */
static void byte_tokens(char text[256][8], tok_str token[256], bool spm)
{
    uint32_t next = 0x100;

    for (uint32_t b = 0; b < 256; b++) {
        const bool itself = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);

        token[b].data = text[b];
        token[b].len  = spm ? (size_t)snprintf(text[b], 8, "<0x%02X>", b)
                            : utf8_encode(itself ? b : next++, text[b]);
    }
}

static void stream_back(const tok *t, const tok_ids *ids, bool show)
{
    tok_stream *s = NULL;

    check(tok_stream_open(&s, t, NULL) == KVD_OK, "stream");
    for (size_t i = 0; i <= ids->len; i++) {
        const char *out =
            i < ids->len ? tok_stream_feed(s, ids->data[i], show) : tok_stream_flush(s);
        const size_t len = tok_stream_len(s);

        check(utf8_complete_prefix(out, len) == len, "a character was cut");
        for (size_t k = 0; k < len;) {
            uint32_t     cp;
            const size_t n = utf8_decode(out + k, len - k, &cp);

            check(cp != 0xfffd || n == 3, "invalid UTF-8 came out");
            k += n;
        }
    }
    tok_stream_close(s);
}

static void check_bytes(const tok *t, const tok_ids *ids, const char *text, size_t len)
{
    size_t at = 0;

    for (size_t i = 0; i < ids->len; i++) {
        size_t      n;
        const char *bytes = tok_bytes(t, ids->data[i], &n);

        check(at + n <= len && memcmp(text + at, bytes, n) == 0, "the text does not come back");
        at += n;
    }
    check(at == len, "the text does not come back whole");
}

static void encode(const tok *t, const char *text, size_t len, kvd_span span, bool lossless)
{
    tok_ids ids = { 0 };

    check(tok_encode(t, text, len, NULL, 0, true, &ids, NULL) == KVD_OK, "encode");
    for (size_t i = 0; i < ids.len; i++) {
        check(ids.data[i] >= 0 && (uint32_t)ids.data[i] < tok_n_token(t), "id out of range");
        check(!tok_is_special(t, ids.data[i]) || !lossless, "text became a special");
    }
    if (lossless)
        check_bytes(t, &ids, text, len);
    stream_back(t, &ids, false);
    ids.len = 0;
    check(tok_encode(t, text, len, &span, 1, false, &ids, NULL) == KVD_OK, "encode with a span");
    stream_back(t, &ids, true);
    tok_ids_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const pre[] = { "gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o" };
    char                     byte_text[256][8];
    tok_str                  token[MAX_TOKEN], merge[255];
    int32_t                  attr[MAX_TOKEN];
    float                    score[MAX_TOKEN];
    input                    in   = { data, data + size };
    const unsigned           kind = take_u8(&in) % 7, flags = take_u8(&in);
    const bool               spm = kind == 5, bytes = flags & 1;
    uint32_t                 n = bytes ? 256 : 0;
    tok_vocab v = { .model = spm ? TOK_SPM : TOK_BPE, .bos = -1, .eos = -1, .eot = -1, .unk = -1 };
    tok      *t = NULL;

    if (kind < 5)
        v.pre = (tok_str){ pre[kind], strlen(pre[kind]) };
    if (bytes)
        byte_tokens(byte_text, token, spm);
    for (uint32_t i = 0; i < n; i++) {
        attr[i]  = spm ? TOK_BYTE : TOK_NORMAL;
        score[i] = 0;
    }
    for (unsigned more = take_u8(&in); more > 0; more--, n++) {
        attr[n]  = (int32_t)take_u8(&in) % 8;
        token[n] = take_str(&in);
        score[n] = (float)(token[n].len % 5);
    }
    for (unsigned more = take_u8(&in); more > 0; more--)
        merge[v.n_merge++] = take_str(&in);
    v.n_token          = n;
    v.token            = token;
    v.attr             = flags & 2 ? NULL : attr;
    v.score            = flags & 4 ? NULL : score;
    v.merge            = merge;
    v.unk              = flags & 8 ? 0 : -1;
    v.add_space_prefix = flags & 16;

    if (tok_open(&t, &v, NULL) == KVD_OK) {
        const size_t start = take_u16(&in), want = take_u16(&in);
        const size_t len  = (size_t)(in.end - in.p);
        kvd_span     span = { start < len ? start : len, 0 };

        span.end = len - span.start < want ? len : span.start + want;
        encode(t, (const char *)in.p, len, span, bytes && !(flags & 2) && kind < 5 && kind != 3);
        tok_close(t);
    }
    return 0;
}
