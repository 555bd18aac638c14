/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "support/tok_vectors.h"

#define TOK_DATA KVD_TEST_DATA "/tok/"

enum { GPT2, PHI3, QWEN3, SMOLLM2, O200K, N_VOCAB };

static const char *const vocab_name[N_VOCAB] = { "gpt-2", "phi-3", "qwen3", "smollm2", "o200k" };
static ktv               vocab[N_VOCAB];
static tok              *toks[N_VOCAB];

static int open_all(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_VOCAB; i++) {
        char path[512];

        snprintf(path, sizeof(path), TOK_DATA "%s.ktv", vocab_name[i]);
        toks[i] = tok_must_open(&vocab[i], path);
    }
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_VOCAB; i++) {
        tok_close(toks[i]);
        ktv_free(&vocab[i]);
    }
    return kvd_alloc_live() == 0 ? 0 : -1;
}

static tok_ids encode(const tok *t, const char *s, size_t len, const kvd_span *span, size_t n)
{
    tok_ids ids = { 0 };
    kvd_err err = { 0 };

    if (tok_encode(t, s, len, span, n, false, &ids, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    return ids;
}

/* Encodes with a span, or with none where start > end; compares with ids up to a -1. */
static void check_ids(const tok *t, const char *s, size_t start, size_t end, const int32_t *want)
{
    const kvd_span span = { start, end };
    tok_ids        ids  = encode(t, s, strlen(s), &span, start <= end);
    size_t         n    = 0;

    while (want[n] >= 0)
        n++;
    if (ids.len != n || (n > 0 && memcmp(ids.data, want, n * sizeof(*want)) != 0)) {
        print_error("'%s' gives", s);
        for (size_t i = 0; i < ids.len; i++)
            print_error(" %d", ids.data[i]);
        fail_msg("%s", "other ids than expected");
    }
    tok_ids_free(&ids);
}
#define IDS(...) ((const int32_t[]){ __VA_ARGS__, -1 })
#define NOWHERE  1, 0

/* The bytes of all ids, one after the other. */
static kvd_buf join(const tok *t, const tok_ids *ids)
{
    kvd_buf b = { 0 };

    kvd_buf_reserve(&b, 1);
    for (size_t i = 0; i < ids->len; i++) {
        size_t      len;
        const char *bytes = tok_bytes(t, ids->data[i], &len);

        kvd_buf_put(&b, bytes, len);
    }
    return b;
}

/* ---- vectors ---- */

static void test_llama_cpp_vectors(void **state)
{
    static const struct {
        int         vocab;
        const char *out;
    } set[] = { { GPT2, "gpt-2.out" }, { PHI3, "phi-3.out" }, { QWEN3, "qwen2.out" } };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(set); i++) {
        char   out[512];
        size_t n;

        snprintf(out, sizeof(out), TOK_DATA "%s", set[i].out);
        assert_int_equal(tok_check_llama_cpp(toks[set[i].vocab], TOK_DATA "llama-cpp.inp", out, &n),
                         0);
        assert_int_equal(n, 47);
    }
}

static void test_other_vectors(void **state)
{
    size_t n;

    (void)state;
    assert_int_equal(tok_check_vec(toks[QWEN3], TOK_DATA "qwen3-xquad.vec", &n), 0);
    assert_int_equal(n, 480);
    assert_int_equal(tok_check_vec(toks[O200K], TOK_DATA "o200k.vec", &n), 0);
    assert_int_equal(n, 57);
    assert_int_equal(tok_check_vec(toks[GPT2], TOK_DATA "r50k.vec", &n), 0);
    assert_int_equal(n, 64);
}

/* Digits of SmolLM2 stand alone and end the white space before them. */
static void test_smollm_digits(void **state)
{
    const tok *t = toks[SMOLLM2];

    (void)state;
    for (const char *c = "0123456789"; *c; c++) {
        char    s[8];
        int32_t id;

        snprintf(s, sizeof(s), "a  %c%c", *c, *c);
        tok_ids ids = encode(t, s, strlen(s), NULL, 0);
        assert_int_equal(ids.len, 4); /* a, two spaces, digit, digit */
        id = ids.data[2];
        assert_int_equal(ids.data[3], id);
        tok_ids_free(&ids);
    }
}

/* ---- opening ---- */

static void expect_open(const tok_vocab *v, kvd_status want, const char *in_message)
{
    tok    *t   = (tok *)1;
    kvd_err err = { 0 };

    assert_int_equal(tok_open(&t, v, &err), want);
    if (want == KVD_OK) {
        assert_string_equal(tok_pre_name(t), in_message);
        tok_close(t);
    } else {
        assert_null(t);
        assert_non_null(strstr(err.msg, in_message));
    }
}

static void test_pre_tokenizer_names(void **state)
{
    tok_vocab v = vocab[QWEN3].v;

    (void)state;
    v.pre = (tok_str){ "tekken", 6 };
    expect_open(&v, KVD_E_UNSUPPORTED, "tekken");
    v.pre = (tok_str){ "qwen", 4 }; /* a prefix is not a name */
    expect_open(&v, KVD_E_UNSUPPORTED, "qwen");
    v.pre.len = 0;
    expect_open(&v, KVD_OK, "qwen2"); /* by its signature */
    v.pre = (tok_str){ "default", 7 };
    expect_open(&v, KVD_OK, "qwen2");
    v     = vocab[GPT2].v;
    v.pre = (tok_str){ 0 };
    expect_open(&v, KVD_OK, "gpt-2");
    v.n_token--; /* no longer exactly GPT-2's */
    v.bos = v.eos = -1;
    expect_open(&v, KVD_E_UNSUPPORTED, "(pre_tokenizer)");
    v     = vocab[SMOLLM2].v;
    v.pre = (tok_str){ 0 };
    expect_open(&v, KVD_OK, "smollm");
    expect_open(&vocab[PHI3].v, KVD_OK, "spm");
    assert_true(tok_default_add_bos(TOK_SPM, (tok_str){ 0 }));
    assert_true(tok_default_add_bos(TOK_BPE, (tok_str){ "llama-bpe", 9 }));
    assert_false(tok_default_add_bos(TOK_BPE, (tok_str){ "qwen2", 5 }));
}

static void test_bad_vocabularies(void **state)
{
    tok_vocab v = vocab[GPT2].v;

    (void)state;
    v.eos = 50257;
    expect_open(&v, KVD_E_CORRUPT, "50257");
    v.eos = -2;
    expect_open(&v, KVD_E_CORRUPT, "-2");
    v         = vocab[GPT2].v;
    v.n_token = 0;
    expect_open(&v, KVD_E_CORRUPT, "0 tokens");
    v.n_token = INT32_MAX;
    expect_open(&v, KVD_E_CORRUPT, "tokens");
    v         = vocab[GPT2].v;
    v.bos     = -1;
    v.add_bos = true;
    expect_open(&v, KVD_E_CORRUPT, "BOS");
}

/* ---- specials ---- */

static void test_specials_only_where_trusted(void **state)
{
    const tok *t = toks[QWEN3];
    /* <|im_end|> as text, and as the token */
    static const char end[] = "<|im_end|>";
    tok_ids           plain = encode(t, end, 10, NULL, 0);

    (void)state;
    assert_true(plain.len > 1);
    for (size_t i = 0; i < plain.len; i++)
        assert_false(tok_is_special(t, plain.data[i]));
    tok_ids_free(&plain);
    check_ids(t, end, 0, 10, IDS(151645));
    for (size_t start = 0; start <= 10; start++) {
        for (size_t stop = start; stop <= 10; stop++) {
            const kvd_span span = { start, stop };
            tok_ids        ids  = encode(t, end, 10, &span, 1);

            assert_int_equal(ids.len == 1, start == 0 && stop == 10);
            tok_ids_free(&ids);
        }
    }
    for (size_t cut = 0; cut <= 10; cut++) { /* adjacent spans count as one */
        const kvd_span pair[3] = { { 0, cut }, { cut, cut }, { cut, 10 } };
        tok_ids        ids     = encode(t, end, 10, pair, 3);

        assert_int_equal(ids.len, 1);
        tok_ids_free(&ids);
    }
    const kvd_span gap[2] = { { 0, 4 }, { 5, 10 } };
    tok_ids        ids    = encode(t, end, 10, gap, 2);
    assert_true(ids.len > 1);
    tok_ids_free(&ids);
}

static void test_special_search(void **state)
{
    const tok *t = toks[QWEN3];

    (void)state;
    check_ids(t, "<<|im_start|>", 0, 13, IDS(27, 151644));
    check_ids(t, "<|im_start|><|im_end|>\n", 0, 23, IDS(151644, 151645, 198));
    check_ids(t, "<think>", 0, 7, IDS(151667));
    check_ids(t, "<|im_start", 0, 10, IDS(27, 91, 318, 4906));
    assert_int_equal(tok_find_special(t, "<|im_end|>", 10), 151645);
    assert_int_equal(tok_find_special(t, "<|im_end|", 9), -1);
    assert_int_equal(tok_find_special(t, "<|im_end|>x", 11), -1);
    assert_int_equal(tok_find_special(t, "hello", 5), -1);
    assert_int_equal(tok_find_special(t, "", 0), -1);
    /* NFC is of each segment: a mark behind a special stays, it does not reach over it */
    check_ids(t, "e\xcc\x81<|im_end|>\xcc\x81", 2 + 1, 13, IDS(963, 151645, 53839));
}

/* Expected ids are those of Hugging Face's tokenizers 0.23.3 for Qwen3's tokenizer.json, with
 * encode_special_tokens where nothing is trusted. */
static void test_user_defined_everywhere(void **state)
{
    static const char call[] = "a<tool_call>\n{}</tool_call><|im_end|>";
    const tok        *t      = toks[QWEN3];

    (void)state;
    check_ids(t, call, NOWHERE, IDS(64, 151657, 198, 6257, 151658, 27, 91, 318, 6213, 91, 29));
    check_ids(t, call, 0, sizeof(call) - 1, IDS(64, 151657, 198, 6257, 151658, 151645));
    check_ids(t, call, 27, sizeof(call) - 1, IDS(64, 151657, 198, 6257, 151658, 151645));
    check_ids(t, "<think>x</think>", NOWHERE, IDS(151667, 87, 151668));
    /* The beginning or the end of a trusted span is inside its text: it is no token. */
    for (size_t cut = 1; cut < 7; cut++) {
        const kvd_span half[2] = { { 0, cut }, { cut, 7 } };

        for (size_t i = 0; i < 2; i++) {
            tok_ids ids = encode(t, "<think>", 7, &half[i], 1);

            assert_true(ids.len > 1);
            tok_ids_free(&ids);
        }
    }
    const kvd_span empty = { 3, 3 }; /* no text is trusted */
    tok_ids        ids   = encode(t, "<think>", 7, &empty, 1);
    assert_int_equal(ids.len, 1);
    tok_ids_free(&ids);
}

/* In text that is not trusted a control token is skipped as a whole. */
static void test_user_defined_in_control(void **state)
{
    const tok_str token[] = { { "<", 1 },  { "a", 1 },   { ">", 1 },   { "<a", 2 },
                              { "a>", 2 }, { "<<a", 3 }, { "<a>>", 4 } };
    const int32_t attr[]  = {
         1, 1, 1, TOK_CONTROL, TOK_USER_DEFINED, TOK_CONTROL, TOK_USER_DEFINED
    };
    const tok_vocab v = { .model   = TOK_BPE,
                          .pre     = { "gpt-2", 5 },
                          .n_token = 7,
                          .token   = token,
                          .attr    = attr,
                          .bos     = -1,
                          .eos     = -1,
                          .eot     = -1,
                          .unk     = -1 };
    tok            *t = NULL;

    (void)state;
    assert_int_equal(tok_open(&t, &v, NULL), KVD_OK);
    check_ids(t, "<a>", NOWHERE, IDS(0, 1, 2));
    check_ids(t, "<a>", 0, 3, IDS(3, 2));
    check_ids(t, "a>", NOWHERE, IDS(4));
    check_ids(t, "<<a>", NOWHERE, IDS(0, 0, 1, 2));
    check_ids(t, "<a>>", NOWHERE, IDS(6));
    check_ids(t, "<a>>", 0, 2, IDS(3, 2, 2)); /* text behind a span does not change it */
    check_ids(t, "a>>", 1, 2, IDS(1, 2, 2));
    tok_close(t);
}

static void test_bad_spans(void **state)
{
    static const kvd_span bad[][2] = { { { 0, 4 }, { 3, 5 } },
                                       { { 2, 1 }, { 5, 5 } },
                                       { { 0, 1 }, { 2, 6 } } };
    kvd_err               err;
    tok_ids               ids = { 0 };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(bad); i++) {
        assert_int_equal(tok_encode(toks[GPT2], "hello", 5, bad[i], 2, false, &ids, &err),
                         KVD_E_INVAL);
    }
    assert_int_equal(tok_encode(toks[GPT2], "", (size_t)INT32_MAX + 1, NULL, 0, false, &ids, &err),
                     KVD_E_INVAL);
    assert_int_equal(ids.len, 0);
}

static void test_longest_special(void **state)
{
    const tok_str   token[] = { { "a", 1 }, { "b", 1 }, { "<ab", 3 }, { "<a", 2 }, { "<abba", 5 } };
    const int32_t   attr[]  = { 1, 1, TOK_CONTROL, TOK_USER_DEFINED, TOK_CONTROL };
    const tok_vocab v       = { .model   = TOK_BPE,
                                .pre     = { "gpt-2", 5 },
                                .n_token = 5,
                                .token   = token,
                                .attr    = attr,
                                .bos     = -1,
                                .eos     = -1,
                                .eot     = -1,
                                .unk     = -1 };
    tok            *t       = NULL;

    (void)state;
    assert_int_equal(tok_open(&t, &v, NULL), KVD_OK);
    check_ids(t, "<abba<abb<aa", 0, 12, IDS(4, 2, 1, 3, 0));
    check_ids(t, "<abba", 0, 4, IDS(2, 1, 0));       /* the longest inside the span */
    check_ids(t, "<abba", NOWHERE, IDS(0, 1, 1, 0)); /* no token for '<' */
    check_ids(t, "<aa<ab<a", NOWHERE, IDS(3, 0, 0, 1, 3));
    assert_true(tok_is_special(t, 2));
    assert_false(tok_is_special(t, 3));
    tok_close(t);
}

static void test_bos_and_ends(void **state)
{
    tok_ids ids = { 0 };

    (void)state;
    assert_int_equal(tok_encode(toks[PHI3], "x", 1, NULL, 0, true, &ids, NULL), KVD_OK);
    assert_int_equal(ids.data[0], tok_bos(toks[PHI3]));
    assert_int_equal(tok_encode(toks[SMOLLM2], "", 0, NULL, 0, true, &ids, NULL), KVD_OK);
    assert_int_equal(ids.len, 2); /* appended nothing: the model does not ask for a BOS */
    tok_ids_free(&ids);

    assert_true(tok_is_end(toks[SMOLLM2], 2));  /* eos = <|im_end|> */
    assert_true(tok_is_end(toks[SMOLLM2], 0));  /* <|endoftext|> */
    assert_false(tok_is_end(toks[SMOLLM2], 1)); /* <|im_start|> */
    assert_true(tok_is_end(toks[QWEN3], 151645));
    assert_true(tok_is_end(toks[QWEN3], 151643));
    assert_true(tok_is_end(toks[PHI3], 32000));
    assert_true(tok_is_end(toks[PHI3], 32007)); /* <|end|> */
    assert_false(tok_is_end(toks[PHI3], 32010));
    assert_false(tok_is_end(toks[PHI3], -1));
    assert_false(tok_is_end(toks[PHI3], 32064));
}

/* ---- SPM ---- */

static void test_spm(void **state)
{
    const tok *t = toks[PHI3];

    (void)state;
    check_ids(t, "Hello", NOWHERE, IDS(15043));
    check_ids(t, " Hello", NOWHERE, IDS(29871, 15043));
    /* a prefix for every segment; white space behind Phi-3's specials belongs to them */
    check_ids(t, "<|user|>\n \tHello<|end|>\n", 0, 23, IDS(32010, 15043, 32007));
    check_ids(t, "<s>\nHello", 0, 3, IDS(1, 29871, 13, 10994));
    /* byte fallback; U+2581 is a space */
    check_ids(t, "\xf0\x9f\xa7\xbf", NOWHERE, IDS(29871, 243, 162, 170, 194));
    check_ids(t, "\xff\n", NOWHERE, IDS(29871, 258, 13));
    check_ids(t, "\xe2\x96\x81Hello", NOWHERE, IDS(29871, 15043));
    /* what is typed never becomes a control or a byte token; Phi-3's </s> is user-defined */
    tok_ids ids = encode(t, "</s><s><unk><0x0A>", 18, NULL, 0);
    assert_int_equal(ids.data[0], 2);
    for (size_t i = 1; i < ids.len; i++)
        assert_true(ids.data[i] > 258);
    tok_ids_free(&ids);
}

/* ---- any bytes ---- */

static void random_text(kvd_rng *rng, char *s, size_t len)
{
    static const char *const piece[] = { "a",         "the",
                                         " ",         "  ",
                                         "\n",        "'s",
                                         "0",         "42",
                                         "\xc3\xa9",  "\xe4\xb8\xad",
                                         "e\xcc\x81", "<|im_end|>",
                                         "\xf0",      "\x9f\x98",
                                         "\xff",      "\xf0\x9f\x98\x80",
                                         "!",         "Ab" };
    size_t                   n       = 0;

    while (n < len) {
        const char *p = piece[kvd_rng_below(rng, KVD_COUNTOF(piece))];

        for (; *p && n < len; p++)
            s[n++] = kvd_rng_below(rng, 40) == 0 ? (char)kvd_rng_u64(rng) : *p;
    }
}

static void test_any_bytes_come_back(void **state)
{
    static const int lossless[] = { GPT2, O200K, PHI3 };
    kvd_rng          rng;
    char             s[300];

    (void)state;
    kvd_rng_seed(&rng, 11);
    for (int round = 0; round < 3000; round++) {
        const size_t len = kvd_rng_below(&rng, sizeof(s));

        random_text(&rng, s, len);
        for (size_t i = 0; i < KVD_COUNTOF(lossless); i++) {
            const bool spm  = lossless[i] == PHI3;
            tok_ids    ids  = encode(toks[lossless[i]], s, len, NULL, 0);
            kvd_buf    back = join(toks[lossless[i]], &ids);

            assert_int_equal(back.len, len + (spm && len > 0));
            assert_memory_equal(back.data + (spm && len > 0), s, len);
            kvd_buf_free(&back);
            tok_ids_free(&ids);
        }
        tok_ids ids = encode(toks[QWEN3], s, len, NULL, 0); /* NFC changes it, but it must run */
        tok_ids_free(&ids);
    }
}

/* Every order of ids gives the text that decoding all their bytes at once gives. */
static void test_stream(void **state)
{
    kvd_rng rng;

    (void)state;
    kvd_rng_seed(&rng, 12);
    for (int round = 0; round < 3000; round++) {
        const tok  *t = toks[round % N_VOCAB];
        int32_t     id[40];
        kvd_buf     whole = { 0 }, want = { 0 }, got = { 0 };
        tok_stream *s    = NULL;
        const bool  show = kvd_rng_below(&rng, 2);

        assert_int_equal(tok_stream_open(&s, t, NULL), KVD_OK);
        for (size_t i = 0; i < KVD_COUNTOF(id); i++) {
            size_t len;

            id[i]             = (int32_t)kvd_rng_below(&rng, i % 2 ? 300 : tok_n_token(t) + 2u) - 1;
            const char *bytes = tok_bytes(t, id[i], &len);
            if (show || !tok_is_special(t, id[i]))
                kvd_buf_put(&whole, bytes, len);
        }
        for (size_t i = 0; i < whole.len;) {
            uint32_t cp;
            char     u[4];

            i += utf8_decode(whole.data + i, whole.len - i, &cp);
            kvd_buf_put(&want, u, utf8_encode(cp, u));
        }
        for (size_t i = 0; i <= KVD_COUNTOF(id); i++) {
            kvd_alloc_guard(true);
            const char *text =
                i < KVD_COUNTOF(id) ? tok_stream_feed(s, id[i], show) : tok_stream_flush(s);
            kvd_alloc_guard(false);
            assert_int_equal(text[tok_stream_len(s)], 0);
            assert_int_equal(utf8_complete_prefix(text, tok_stream_len(s)), tok_stream_len(s));
            kvd_buf_put(&got, text, tok_stream_len(s));
        }
        assert_int_equal(got.len, want.len);
        if (want.len)
            assert_memory_equal(got.data, want.data, want.len);
        assert_string_equal(tok_stream_flush(s), "");
        tok_stream_close(s);
        kvd_buf_free(&whole);
        kvd_buf_free(&want);
        kvd_buf_free(&got);
    }
}

/* ---- normal form ---- */

static void check_same(const tok *t, const char *a, const char *b)
{
    tok_ids x = encode(t, a, strlen(a), NULL, 0), y = encode(t, b, strlen(b), NULL, 0);

    assert_int_equal(x.len, y.len);
    assert_memory_equal(x.data, y.data, x.len * sizeof(*x.data));
    tok_ids_free(&x);
    tok_ids_free(&y);
}

static void test_nfc(void **state)
{
    const tok *t = toks[QWEN3];

    (void)state;
    check_same(t, "caf\xc3\xa9", "cafe\xcc\x81");
    check_same(t, "\xea\xb0\x81", "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8"); /* Hangul */
    check_same(t, "\xe1\xbb\x87", "e\xcc\x82\xcc\xa3");                    /* marks reordered */
    check_same(t, "\xc3\x85", "\xe2\x84\xab");                             /* Angstrom sign */
    check_same(t, "\xff\xc3\xa9\xff",
               "\xff"
               "e\xcc\x81\xff"); /* between invalid bytes */
    /* 60 marks of falling class are sorted as 30 and 30 of rising class are */
    kvd_buf a = { 0 }, b = { 0 };
    kvd_buf_puts(&a, "x");
    kvd_buf_puts(&b, "x");
    for (int i = 0; i < 30; i++) {
        kvd_buf_puts(&a, "\xcc\x8d\xcc\xa4");
        kvd_buf_puts(&b, "\xcc\xa4");
    }
    for (int i = 0; i < 30; i++)
        kvd_buf_puts(&b, "\xcc\x8d");
    check_same(t, a.data, b.data);
    kvd_buf_free(&a);
    kvd_buf_free(&b);
}

/* ---- limits ---- */

static const struct {
    const char *name, *piece;
} long_text[] = {
    { "a run of a", "a" },
    { "a run of A", "A" },
    { "a run of spaces", " " },
    { "a run of newlines", "\n" },
    { "ab", "ab" },
    { "digits", "7" },
    { "punctuation", "!" },
    { "words", "It is a truth universally acknowledged, that a single man in possession of " },
    { "CJK", "\xe5\xa4\xa9\xe5\x9c\xb0\xe7\x8e\x84\xe9\xbb\x84" },
    { "marks", "\xcc\x81\xcc\xa3" },
    { "invalid", "\xff\xc3" },
    { "almost specials", "<|im_start|" },
    { "contractions", "'s'LL" },
    { "space and newline", " \n" },
    { "upper and marks", "A\xcc\x81" },
};

/* A quadratic step would take minutes; the limit leaves room for sanitizers and busy machines. */
static void test_a_megabyte_of_anything(void **state)
{
    static char    text[1u << 20];
    const kvd_span all = { 0, sizeof(text) };

    (void)state;
    for (size_t i = 0; i < KVD_COUNTOF(long_text); i++) {
        const size_t n = strlen(long_text[i].piece);

        for (size_t k = 0; k < sizeof(text); k++)
            text[k] = long_text[i].piece[k % n];
        print_message("%-20s", long_text[i].name);
        for (size_t v = 0; v < (i % 4 == 0 ? N_VOCAB : SMOLLM2); v++) {
            const clock_t before = clock();
            tok_ids       ids    = encode(toks[v], text, sizeof(text), &all, 1);
            const double  s      = (double)(clock() - before) / CLOCKS_PER_SEC;

            print_message(" %s %.2f s", vocab_name[v], s);
            assert_true(s < 5);
            tok_ids_free(&ids);
        }
        print_message("\n");
    }
}

/* One run of everything that allocates; KVD_E_NOMEM at any allocation must leave no trace. */
static kvd_status open_and_encode(const tok_vocab *v, size_t *n_id, kvd_err *err)
{
    static const char text[] =
        "caf\x65\xcc\x81 <|im_end|> and a word that is long: "
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const kvd_span span   = { 0, 18 };
    tok           *t      = NULL;
    tok_stream    *stream = NULL;
    tok_ids        ids    = { 0 };
    kvd_status     st     = tok_open(&t, v, err);

    if (st == KVD_OK)
        st = tok_stream_open(&stream, t, err);
    if (st == KVD_OK)
        st = tok_encode(t, text, sizeof(text) - 1, &span, 1, true, &ids, err);
    assert_true(st == KVD_OK || ids.len == 0);
    *n_id = ids.len;
    tok_ids_free(&ids);
    tok_stream_close(stream);
    tok_close(t);
    return st;
}

static void fail_each_allocation(const tok_vocab *v)
{
    const uint64_t live = kvd_alloc_live();
    size_t         want, n_id;

    assert_int_equal(open_and_encode(v, &want, NULL), KVD_OK);
    for (int64_t n = 0;; n++) {
        kvd_err err = { 0 };

        kvd_alloc_fault(n, false);
        const kvd_status st  = open_and_encode(v, &n_id, &err);
        const bool       hit = kvd_alloc_fault_hit();
        kvd_alloc_fault(-1, false);
        assert_int_equal(kvd_alloc_live(), live);
        if (!hit) {
            assert_int_equal(st, KVD_OK);
            assert_int_equal(n_id, want);
            assert_true(n > 10);
            break;
        }
        assert_int_equal(st, KVD_E_NOMEM);
        assert_int_equal(err.code, KVD_E_NOMEM);
        assert_true(n < 200);
    }
}

static void test_every_failed_allocation(void **state)
{
    tok_vocab with_nfc = vocab[SMOLLM2].v; /* a small one, so that the many openings are quick */

    (void)state;
    with_nfc.pre = (tok_str){ "qwen2", 5 };
    fail_each_allocation(&with_nfc);
    fail_each_allocation(&vocab[PHI3].v);
}

static void test_heap_bytes(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_VOCAB; i++) {
        const uint64_t before = kvd_alloc_bytes();
        tok           *t      = NULL;

        assert_int_equal(tok_open(&t, &vocab[i].v, NULL), KVD_OK);
        const uint64_t used = kvd_alloc_bytes() - before;
        assert_in_range(tok_heap_bytes(t), used - used / 50, used);
        print_message("%s: %llu bytes\n", vocab_name[i], (unsigned long long)tok_heap_bytes(t));
        tok_close(t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama_cpp_vectors),
        cmocka_unit_test(test_other_vectors),
        cmocka_unit_test(test_smollm_digits),
        cmocka_unit_test(test_pre_tokenizer_names),
        cmocka_unit_test(test_bad_vocabularies),
        cmocka_unit_test(test_specials_only_where_trusted),
        cmocka_unit_test(test_special_search),
        cmocka_unit_test(test_user_defined_everywhere),
        cmocka_unit_test(test_user_defined_in_control),
        cmocka_unit_test(test_bad_spans),
        cmocka_unit_test(test_longest_special),
        cmocka_unit_test(test_bos_and_ends),
        cmocka_unit_test(test_spm),
        cmocka_unit_test(test_any_bytes_come_back),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_nfc),
        cmocka_unit_test(test_a_megabyte_of_anything),
        cmocka_unit_test(test_every_failed_allocation),
        cmocka_unit_test(test_heap_bytes),
    };

    return cmocka_run_group_tests(tests, open_all, close_all);
}
