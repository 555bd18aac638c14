/* SPDX-License-Identifier: Apache-2.0 */
/* cli_options.c - every option of every command: one row each.  Names that llama.cpp's users know
 * keep their meaning. */
#include "cli.h"

#define MODEL (CMD_RUN | CMD_CHAT | CMD_BENCH | CMD_PERPLEXITY | CMD_TOKENIZE | CMD_PLAN)
#define EVAL  (CMD_RUN | CMD_CHAT | CMD_BENCH | CMD_PERPLEXITY | CMD_PLAN)
#define GEN   (CMD_RUN | CMD_CHAT)
#define ALL   (MODEL | CMD_INSPECT | CMD_DOCTOR)
#define NOLIM 0, 0
#define MILL  1000000000

const kvd_opt cli_options[] = {
    /* model */
    { "model", "-m", KVD_OPT_TEXT, "FILE", NULL, NOLIM, MODEL | CMD_INSPECT,
      "model file (GGUF); of a split set, its first file" },
    { "threads", "-t", KVD_OPT_INT, "N", "0", 0, 1024, EVAL,
      "threads; 0: one per usable processor" },
    { "backend", "", KVD_OPT_CHOICE, "cpu|ref", "cpu", NOLIM, EVAL,
      "where to compute; ref is plain C, slow, and the yardstick of all others" },
    { "cpu-isa", "", KVD_OPT_CHOICE, "auto|portable|avx2|avx512|amx", "auto", NOLIM, EVAL,
      "level of CPU kernels" },
    { "precise", "", KVD_OPT_FLAG, "", "false", NOLIM, EVAL,
      "float activations and KV cache: slower, closest to the reference" },
    { "deterministic", "", KVD_OPT_FLAG, "", "false", NOLIM, EVAL,
      "the same bits however a prompt is cut or sequences are batched; slower" },
    { "gpu-layers", "-ngl --n-gpu-layers", KVD_OPT_INT, "N", "0", 0, 100000, EVAL,
      "layers on a GPU; this build has no GPU backend, anything above 0 is said and ignored" },
    { "weights", "", KVD_OPT_CHOICE, "auto|map|copy", "auto", NOLIM, EVAL,
      "map: shared with other processes; copy: huge pages, faster; auto: copy if it takes at most "
      "half of the free memory" },
    { "rope-scaling", "", KVD_OPT_CHOICE, "auto|none|linear|yarn", "auto", NOLIM, EVAL,
      "how positions beyond the trained context are served" },
    { "rope-scale", "", KVD_OPT_NUM, "F", "1", 1, 1024, EVAL, "factor of linear or yarn scaling" },
    { "rope-freq-base", "", KVD_OPT_NUM, "F", "0", 0, 1e12, EVAL, "RoPE base; 0: the model's" },
    { "yarn-orig-ctx", "", KVD_OPT_INT, "N", "0", 0, MILL, EVAL,
      "context yarn scales from; 0: the model's" },
    { "pre-tokenizer", "--pre", KVD_OPT_TEXT, "NAME", NULL, NOLIM, MODEL,
      "pre-tokenizer, for files that do not name one" },
    { "chat-template", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, MODEL,
      "file with a Jinja chat template in place of the model's" },

    /* context and cache */
    { "ctx-size", "-c", KVD_OPT_INT, "N", "0", 0, MILL, EVAL & ~(uint32_t)CMD_BENCH,
      "context in tokens; 0: what prompt and answer need (run; 1,024 for an open answer), 512 "
      "(perplexity), the model's (chat, plan)" },
    { "batch-size", "-b", KVD_OPT_INT, "N", "512", 1, 16384, EVAL,
      "tokens that go through the layers together in prefill" },
    { "ubatch-size", "-ub", KVD_OPT_INT, "N", "512", 1, 16384, EVAL,
      "upper bound of the batch size (llama.cpp's name)" },
    { "cache-type-k", "-ctk", KVD_OPT_CHOICE, "auto|f32|bf16", "auto", NOLIM, EVAL,
      "element type of the KV cache; K and V are always the same" },
    { "cache-type-v", "-ctv", KVD_OPT_CHOICE, "auto|f32|bf16", "auto", NOLIM, EVAL,
      "element type of the KV cache; K and V are always the same" },

    /* prompt */
    { "prompt", "-p", KVD_OPT_TEXT, "TEXT", NULL, NOLIM, CMD_RUN | CMD_TOKENIZE,
      "prompt; behind the file's text when there is a file, too" },
    { "file", "-f", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_RUN | CMD_TOKENIZE | CMD_PERPLEXITY,
      "text file; - is standard input" },
    { "system", "-sys", KVD_OPT_TEXT, "TEXT", NULL, NOLIM, GEN, "system message" },
    { "raw", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_RUN,
      "no chat template: the model continues the text" },
    { "special", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_RUN | CMD_TOKENIZE,
      "recognise special tokens in raw text, and show them in the answer" },
    { "template-vars", "", KVD_OPT_TEXT, "JSON", NULL, NOLIM, GEN,
      "object of further template variables, such as {\"enable_thinking\":false}" },

    /* generation */
    { "predict", "-n --n-predict", KVD_OPT_INT, "N", "-1", -1, MILL, GEN,
      "most tokens to generate; -1: until the model ends or the context is full" },
    { "seed", "-s", KVD_OPT_INT, "N", "-1", -1, 9007199254740992.0, GEN,
      "seed of the sampler; -1: a new one each time" },
    { "temp", "--temperature", KVD_OPT_NUM, "F", "0.8", 0, 1000, GEN, "temperature; 0: greedy" },
    { "top-k", "", KVD_OPT_INT, "N", "40", 0, MILL, GEN, "sample among the N most likely; 0: off" },
    { "top-p", "", KVD_OPT_NUM, "F", "0.95", 0, 1, GEN, "smallest set with this mass; 1: off" },
    { "min-p", "", KVD_OPT_NUM, "F", "0.05", 0, 1, GEN, "at least F times the best; 0: off" },
    { "repeat-penalty", "", KVD_OPT_NUM, "F", "1", 0.01, 100, GEN,
      "how much less likely tokens become that have occurred; 1: off" },
    { "presence-penalty", "", KVD_OPT_NUM, "F", "0", -100, 100, GEN,
      "taken off the logit of a token that has occurred; 0: off" },
    { "frequency-penalty", "", KVD_OPT_NUM, "F", "0", -100, 100, GEN,
      "the same, for each time it has occurred; 0: off" },
    { "repeat-last-n", "", KVD_OPT_INT, "N", "64", -1, MILL, GEN,
      "tokens the penalties look back at; 0: none, -1: as many as can be (1,048,576)" },
    { "logit-bias", "-l", KVD_OPT_TEXT, "ID+B,...", NULL, NOLIM, GEN,
      "add B to the logit of token ID: 15043+1,2-100" },
    { "ignore-eos", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_RUN, "go on past the model's end" },

    /* output */
    { "json", "", KVD_OPT_FLAG, "", "false", NOLIM,
      CMD_RUN | CMD_PERPLEXITY | CMD_TOKENIZE | CMD_INSPECT | CMD_PLAN | CMD_DOCTOR,
      "one JSON object on standard output" },
    { "stats", "", KVD_OPT_FLAG, "", "false", NOLIM, GEN | CMD_PERPLEXITY,
      "rates and memory by kind, at the end" },
    { "verbose", "-v", KVD_OPT_FLAG, "", "false", NOLIM, ALL, "what the library says as it goes" },

    /* bench */
    { "n-prompt", "-p", KVD_OPT_TEXT, "N,...", "512", NOLIM, CMD_BENCH, "prompt lengths; 0: none" },
    { "n-gen", "-n", KVD_OPT_TEXT, "N,...", "128", NOLIM, CMD_BENCH, "answer lengths; 0: none" },
    { "n-depth", "-d", KVD_OPT_TEXT, "N,...", "0", NOLIM, CMD_BENCH,
      "tokens held before the measured ones" },
    { "n-parallel", "-np", KVD_OPT_TEXT, "N,...", "1", NOLIM, CMD_BENCH,
      "sequences decoded together" },
    { "repetitions", "-r", KVD_OPT_INT, "N", "5", 1, 1000, CMD_BENCH, "runs of each case" },
    { "output", "-o", KVD_OPT_CHOICE, "md|csv|json", "md", NOLIM, CMD_BENCH, "form of the table" },

    /* perplexity */
    { "chunks", "", KVD_OPT_INT, "N", "-1", -1, MILL, CMD_PERPLEXITY, "windows to score; -1: all" },
    { "score-all", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_PERPLEXITY,
      "score every position of a window but the first, not the second half only" },
    { "logits-out", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_PERPLEXITY,
      "write the logits of scored positions as raw float32" },
    { "tokens", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_PERPLEXITY | CMD_RUN,
      "token ids, separated by white space, in place of a text" },

    /* everywhere */
    { "config", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, ALL,
      "configuration file (name = value lines)" },
    { "print-config", "", KVD_OPT_FLAG, "", "false", NOLIM, ALL,
      "show every option with its origin" },
    { "help", "-h", KVD_OPT_FLAG, "", "false", NOLIM, ALL, "this text" },
};
const uint32_t cli_n_option = KVD_COUNTOF(cli_options);
