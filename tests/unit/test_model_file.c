/* SPDX-License-Identifier: Apache-2.0 */
/* test_model_file.c - what a model file may leave out, what it may not hold, and that every error
 * of opening one names the file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "format/format.h"
#include "kvdrive.h"
#include "support/gguf_edit.h"

#define TINY    KVD_TEST_DATA "/tiny/llama.gguf"
#define N_VOCAB 264

static char dir[256], path[300];

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "%s/kvd-file-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(dir))
        return 1;
    snprintf(path, sizeof(path), "%s/m.gguf", dir);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(dir);
}

static kvd_model_params params_of(const char *file)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;

    p.path     = file;
    p.n_thread = 1;
    return p;
}

/* The message is "PATH: ..." and says each of two parts. */
static void refuse(const kvd_model_params *p, kvd_status code, const char *key, const char *what)
{
    const size_t len = strlen(p->path);
    kvd_model   *m;
    kvd_err      err = { 0 };

    assert_int_equal(kvd_model_open(&m, p, NULL), code);
    if (kvd_model_open(&m, p, &err) != code || m || err.code != code)
        fail_msg("%s, %s: %s '%s'", key, what, kvd_status_name(err.code), err.msg);
    if (strncmp(err.msg, p->path, len) != 0 || err.msg[len] != ':' ||
        strstr(err.msg + len, p->path) || !strstr(err.msg + len, key) ||
        !strstr(err.msg + len, what))
        fail_msg("'%s' does not say '%s' and '%s'", err.msg, key, what);
}

static void refuse_as(gguf_edit e, kvd_status code, const char *key, const char *what)
{
    const kvd_model_params p = params_of(path);

    gguf_edit_copy(TINY, path, &e, 1);
    refuse(&p, code, key, what);
}

static void refuse_edit(gguf_edit e, kvd_status code, const char *what)
{
    refuse_as(e, code, e.key, what);
}

/* ---- the tokenizer's arrays --------------------------------------------------------------- */

#define MERGES "tokenizer.ggml.merges"
#define TYPES  "tokenizer.ggml.token_type"
#define TOKENS "tokenizer.ggml.tokens"
#define SCORES "tokenizer.ggml.scores"

static void test_arrays_of_bpe(void **state)
{
    static const char *const each[] = { MERGES, TYPES, TOKENS };

    (void)state;
    refuse_edit(gguf_edit_zeros(MERGES, GGUF_U32, 4), KVD_E_CORRUPT,
                "is an array of 4 u32; expected an array of string");
    refuse_edit(gguf_edit_zeros(TYPES, GGUF_U32, N_VOCAB), KVD_E_CORRUPT,
                "is an array of 264 u32; expected an array of i32");
    refuse_edit(gguf_edit_zeros(TYPES, GGUF_I64, N_VOCAB), KVD_E_CORRUPT, "264 i64");
    refuse_edit(gguf_edit_zeros(TYPES, GGUF_STRING, N_VOCAB), KVD_E_CORRUPT, "264 string");
    refuse_edit(gguf_edit_zeros(TYPES, GGUF_I32, N_VOCAB - 1), KVD_E_CORRUPT,
                "263 elements for 264 tokens");
    refuse_edit(gguf_edit_zeros(TOKENS, GGUF_I8, N_VOCAB), KVD_E_CORRUPT, "264 i8");
    refuse_edit(gguf_edit_zeros(SCORES, GGUF_F64, N_VOCAB), KVD_E_CORRUPT, "264 f64");
    refuse_edit(gguf_edit_zeros(SCORES, GGUF_F32, 3), KVD_E_CORRUPT, "3 elements for 264");
    for (size_t i = 0; i < sizeof(each) / sizeof(*each); i++) {
        refuse_edit(gguf_edit_drop(each[i]), KVD_E_CORRUPT, "has no key");
        refuse_edit(gguf_edit_int(each[i], GGUF_I32, 1), KVD_E_CORRUPT, "is i32 1");
        refuse_edit(gguf_edit_int(each[i], GGUF_U64, 1), KVD_E_CORRUPT, "is u64 1");
        refuse_edit(gguf_edit_str(each[i], "x"), KVD_E_CORRUPT, "is string");
        refuse_edit(gguf_edit_zeros(each[i], GGUF_BOOL, N_VOCAB), KVD_E_CORRUPT, "264 bool");
    }
}

/* SentencePiece merges by score: scores are required, merges are not. */
static void test_arrays_of_spm(void **state)
{
    gguf_edit e[] = { gguf_edit_str("tokenizer.ggml.model", "llama"), gguf_edit_drop(MERGES),
                      gguf_edit_zeros(SCORES, GGUF_F32, N_VOCAB) };
    const kvd_model_params p = params_of(path);
    kvd_model             *m;
    kvd_err                err = { 0 };

    (void)state;
    gguf_edit_copy(TINY, path, e, 3);
    if (kvd_model_open(&m, &p, &err) != KVD_OK)
        fail_msg("%s", err.msg);
    kvd_model_close(m);
    gguf_edit_copy(TINY, path, e, 2);
    refuse(&p, KVD_E_CORRUPT, SCORES, "has no key");
    e[2] = gguf_edit_zeros(SCORES, GGUF_F64, N_VOCAB);
    gguf_edit_copy(TINY, path, e, 3);
    refuse(&p, KVD_E_CORRUPT, SCORES, "array of 264 f64; expected an array of f32");
    e[2] = gguf_edit_int(SCORES, GGUF_F32, 0);
    gguf_edit_copy(TINY, path, e, 3);
    refuse(&p, KVD_E_CORRUPT, SCORES, "is f32; expected an array of f32");
}

/* ---- every other key that opening reads ----------------------------------------------------- */

static void test_scalars(void **state)
{
    static const struct {
        const char *key;
        bool        integer, required;
    } number[] = {
        { "llama.block_count", true, true },
        { "llama.embedding_length", true, true },
        { "llama.feed_forward_length", true, true },
        { "llama.context_length", true, true },
        { "llama.attention.head_count", true, true },
        { "llama.attention.layer_norm_rms_epsilon", false, true },
        { "llama.attention.head_count_kv", true, false },
        { "llama.attention.key_length", true, false },
        { "llama.attention.value_length", true, false },
        { "llama.attention.sliding_window", true, false },
        { "llama.expert_count", true, false },
        { "llama.rope.dimension_count", true, false },
        { "llama.rope.freq_base", false, false },
        { "llama.rope.scale_linear", false, false },
        { "llama.rope.scaling.factor", false, false },
        { "llama.rope.scaling.original_context_length", true, false },
        { "tokenizer.ggml.bos_token_id", true, false },
        { "tokenizer.ggml.eos_token_id", true, false },
        { "tokenizer.ggml.eot_token_id", true, false },
        { "tokenizer.ggml.unknown_token_id", true, false },
    };
    static const char *const text[] = { "general.architecture",    "tokenizer.ggml.model",
                                        "tokenizer.ggml.pre",      "general.name",
                                        "tokenizer.chat_template", "llama.rope.scaling.type" };
    static const char *const flag[] = { "tokenizer.ggml.add_bos_token",
                                        "tokenizer.ggml.add_eos_token",
                                        "tokenizer.ggml.add_space_prefix" };

    (void)state;
    for (size_t i = 0; i < sizeof(number) / sizeof(*number); i++) {
        refuse_edit(gguf_edit_str(number[i].key, "1"), KVD_E_CORRUPT, "string");
        refuse_edit(gguf_edit_int(number[i].key, GGUF_BOOL, 1), KVD_E_CORRUPT, "bool");
        refuse_edit(gguf_edit_zeros(number[i].key, GGUF_STRING, 0), KVD_E_CORRUPT, "0 ");
        if (number[i].integer)
            refuse_edit(gguf_edit_int(number[i].key, GGUF_F32, 0x3f800000), KVD_E_CORRUPT, "f32");
        if (number[i].required)
            refuse_edit(gguf_edit_drop(number[i].key), KVD_E_CORRUPT, "has no key");
    }
    for (size_t i = 0; i < sizeof(text) / sizeof(*text); i++) {
        refuse_edit(gguf_edit_int(text[i], GGUF_U32, 1), KVD_E_CORRUPT, "is u32 1");
        refuse_edit(gguf_edit_zeros(text[i], GGUF_STRING, 1), KVD_E_CORRUPT, "array of 1 string");
        if (i < 2)
            refuse_edit(gguf_edit_drop(text[i]), KVD_E_CORRUPT, "has no key");
    }
    for (size_t i = 0; i < sizeof(flag) / sizeof(*flag); i++) {
        refuse_edit(gguf_edit_int(flag[i], GGUF_U8, 1), KVD_E_CORRUPT, "is u8 1; expected a bool");
        refuse_edit(gguf_edit_str(flag[i], "true"), KVD_E_CORRUPT, "is string; expected a bool");
        refuse_edit(gguf_edit_zeros(flag[i], GGUF_BOOL, 1), KVD_E_CORRUPT, "array of 1 bool");
    }
    /* A number per layer. */
    refuse_edit(gguf_edit_zeros("llama.attention.head_count", GGUF_U32, 3), KVD_E_CORRUPT,
                "3 head counts for 2 layers");
    refuse_edit(gguf_edit_zeros("llama.attention.head_count_kv", GGUF_F32, 2), KVD_E_CORRUPT,
                "element 0 is not a head count");
    refuse_edit(gguf_edit_int("tokenizer.ggml.bos_token_id", GGUF_U32, N_VOCAB), KVD_E_CORRUPT,
                "is 264, the vocabulary has 264 tokens");
}

/* ---- every error names the file -------------------------------------------------------------- */

static void test_errors_name_the_file(void **state)
{
    kvd_model_params p = params_of(path);
    char             none[300];

    (void)state;
    refuse_as(gguf_edit_str("general.architecture", "mamba"), KVD_E_UNSUPPORTED, "architecture",
              "'mamba' is not one this build runs");
    refuse_as(gguf_edit_str("tokenizer.ggml.model", "bert"), KVD_E_UNSUPPORTED, "tokenizer model",
              "'bert'");
    refuse_as(gguf_edit_str("tokenizer.ggml.pre", "new"), KVD_E_UNSUPPORTED, "pre-tokenizer",
              "'new'");
    refuse_as(gguf_edit_str("tokenizer.chat_template", "{% if %}"), KVD_E_INVAL, "chat template",
              "cannot be run");
    refuse_as(gguf_edit_int("llama.attention.head_count", GGUF_U32, 0), KVD_E_CORRUPT,
              "llama.attention.head_count", "is 0");
    refuse_as(gguf_edit_int("llama.block_count", GGUF_U32, 3), KVD_E_CORRUPT, "tensor",
              "blk.2.attn_norm.weight is missing");
    refuse_as(gguf_edit_drop("tokenizer.ggml.pre"), KVD_E_UNSUPPORTED, "pre-tokenizer",
              "does not name");

    gguf_edit_copy(TINY, path, NULL, 0);
    p.pre_tokenizer = "none such";
    refuse(&p, KVD_E_UNSUPPORTED, "none such", "pre-tokenizer");
    p         = params_of(path);
    p.backend = "none such";
    refuse(&p, KVD_E_INVAL, "none such", "backend");
    p               = params_of(path);
    p.device_memory = 1;
    refuse(&p, KVD_E_UNSUPPORTED, "backend cpu", "no memory of its own");
    p           = params_of(path);
    p.rope_base = 0.5f;
    refuse(&p, KVD_E_INVAL, "RoPE base", "0.5");
    p = params_of(dir);
    refuse(&p, KVD_E_IO, "Is a directory", "");
    snprintf(none, sizeof(none), "%s/none", dir);
    p = params_of(none);
    refuse(&p, KVD_E_IO, "No such file", "");
}

/* Of a path too long for a message the end is told, once. */
static void test_long_path(void **state)
{
    kvd_model_params p;
    kvd_model       *m;
    kvd_err          err = { 0 };
    char             name[700], tail[204];
    size_t           len;

    (void)state;
    len = (size_t)snprintf(name, sizeof(name), "%s", dir);
    while (len < 600)
        len += (size_t)snprintf(name + len, sizeof(name) - len, "/.");
    snprintf(name + len, sizeof(name) - len, "/m.gguf");
    p = params_of(name);
    snprintf(tail, sizeof(tail), "...%s", name + strlen(name) - 200);
    unlink(path);
    assert_int_equal(kvd_model_open(&m, &p, &err), KVD_E_IO);
    assert_memory_equal(err.msg, tail, 203);
    assert_string_equal(err.msg + 203, ": No such file or directory");
    gguf_edit_copy(TINY, path, &(gguf_edit){ MERGES, NULL, 0 }, 1);
    assert_int_equal(kvd_model_open(&m, &p, &err), KVD_E_CORRUPT);
    assert_memory_equal(err.msg, tail, 203);
    assert_memory_equal(err.msg + 203, ": offset 0: the metadata has no key", 35);
    p.pre_tokenizer = "none such";
    gguf_edit_copy(TINY, path, NULL, 0);
    assert_int_equal(kvd_model_open(&m, &p, &err), KVD_E_UNSUPPORTED);
    assert_memory_equal(err.msg, tail, 203);
    assert_memory_equal(err.msg + 203, ": pre-tokenizer", 15);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arrays_of_bpe),
        cmocka_unit_test(test_arrays_of_spm),
        cmocka_unit_test(test_scalars),
        cmocka_unit_test(test_long_path),
        cmocka_unit_test(test_errors_name_the_file),
    };

    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
