/* SPDX-License-Identifier: Apache-2.0 */
/* cli_options.c - every option of every command: one row each.  Names that llama.cpp's users know
 * keep their meaning. */
#include "cli.h"

#define MODEL (EVAL | CMD_TOKENIZE)
#define EVAL                                                                               \
    (CMD_RUN | CMD_CHAT | CMD_BENCH | CMD_PERPLEXITY | CMD_PLAN | CMD_EVAL | CMD_PROFILE | \
     CMD_SERVE)
#define GEN    (CMD_RUN | CMD_CHAT)
#define SAMPLE (GEN | CMD_SERVE)
#define ALL    (MODEL | CMD_INSPECT | CMD_DOCTOR | CMD_CACHE)
#define STORE  (EVAL | CMD_CACHE)
#define NOLIM  0, 0
#define MILL   1000000000

const kvd_opt cli_options[] = {
    /* model */
    { "model", "-m", KVD_OPT_TEXT, "FILE", NULL, NOLIM, MODEL | CMD_INSPECT,
      "model file (GGUF); of a split set, its first file" },
    { "threads", "-t", KVD_OPT_INT, "N", "0", -1, 1024, EVAL,
      "threads; 0 or -1: one per usable processor" },
    { "backend", "", KVD_OPT_TEXT, "cpu|ref|cuda|cuda:N", "cpu", NOLIM, EVAL,
      "where to compute: cuda is the first GPU, cuda:N GPU number N; ref is plain C, slow, and the "
      "yardstick of all others" },
    { "cpu-isa", "", KVD_OPT_CHOICE, "auto|portable|avx2|avx512|amx", "auto", NOLIM, EVAL,
      "level of CPU kernels" },
    { "precise", "", KVD_OPT_FLAG, "", "false", NOLIM, EVAL,
      "float activations and KV cache: slower, closest to the reference" },
    { "deterministic", "", KVD_OPT_FLAG, "", "false", NOLIM, EVAL,
      "the same bits however a prompt is cut or sequences are batched; slower" },
    { "gpu-layers", "-ngl --n-gpu-layers", KVD_OPT_TEXT, "N|all|auto", "0", NOLIM, EVAL,
      "0: the model on the CPU; all, auto or a number: on the GPU (as --backend cuda), or on the "
      "CPU "
      "where there is none.  A model is not split: a number below its layers stands for all" },
    { "weights", "", KVD_OPT_CHOICE, "auto|map|copy", "auto", NOLIM, EVAL,
      "map: shared with other processes; copy: huge pages, faster; auto: copy if it takes at most "
      "half of the free memory" },
    { "rope-scaling", "", KVD_OPT_CHOICE, "auto|none|linear|yarn", "auto", NOLIM, EVAL,
      "how positions beyond the trained context are served" },
    { "rope-scale", "", KVD_OPT_NUM, "F", "1", 1, 1024, EVAL, "factor of linear or yarn scaling" },
    { "rope-freq-base", "", KVD_OPT_NUM, "F", "0", 0, 1e12, EVAL, "RoPE base; 0: the model's" },
    { "yarn-orig-ctx", "", KVD_OPT_COUNT, "N", "0", 0, MILL, EVAL,
      "context yarn scales from; 0: the model's" },
    { "pre-tokenizer", "--pre", KVD_OPT_TEXT, "NAME", NULL, NOLIM, MODEL,
      "pre-tokenizer, for files that do not name one" },
    { "chat-template", "--chat-template-file", KVD_OPT_TEXT, "FILE", NULL, NOLIM, MODEL,
      "file with a Jinja chat template in place of the model's" },

    /* context and cache */
    { "ctx-size", "-c", KVD_OPT_COUNT, "N", "0", 0, MILL,
      EVAL & ~(uint32_t)(CMD_BENCH | CMD_PROFILE),
      "context in tokens (8K: 8,192); 0: what prompt and answer need (run; 1,024 for an open "
      "answer; eval), "
      "512 (perplexity), the model's (chat, plan, serve); serve: of each sequence, where "
      "llama.cpp's is "
      "of all together" },
    { "batch-size", "-b", KVD_OPT_COUNT, "N", "0", 0, 16384, EVAL,
      "tokens that go through the layers together in prefill; 0: 512, on a GPU up to 4,096, as "
      "many as 1 GiB of activations hold" },
    { "ubatch-size", "-ub", KVD_OPT_COUNT, "N", "0", 0, 16384, EVAL,
      "upper bound of the batch size (llama.cpp's name)" },
    { "cache-type-k", "-ctk", KVD_OPT_CHOICE, "auto|f32|bf16", "auto", NOLIM, EVAL,
      "element type of the KV cache on the device, K and V alike; --kv-record packs it below" },
    { "cache-type-v", "-ctv", KVD_OPT_CHOICE, "auto|f32|bf16", "auto", NOLIM, EVAL,
      "element type of the KV cache on the device, K and V alike; --kv-record packs it below" },

    /* attention and tiers */
    { "policy", "", KVD_OPT_TEXT, "NAME", "kvdrive", NOLIM, EVAL,
      "a system of the policy table: what is indexed, selected, kept, fetched and attended; "
      "options that "
      "are given go over it; list shows the table" },
    { "attention", "", KVD_OPT_CHOICE, KVD_ATTENTION_NAMES, "auto", NOLIM, EVAL,
      "how generated tokens attend: dense to all, sparse to what an index selects; auto: sparse "
      "after prompts of --dense-below tokens or more" },
    { "dense-below", "", KVD_OPT_COUNT, "N", "16384", 1, MILL, EVAL,
      "prompts shorter than this stay dense with --attention auto" },
    { "budget", "", KVD_OPT_TEXT, "N|P%", "0", NOLIM, EVAL,
      "tokens selected per layer, KV head and step, or percent of the prompt; 0: a sixteenth of "
      "it, but 1,024 to 4,096" },
    { "cap", "", KVD_OPT_NUM, "F", "2", 1, 1024, EVAL,
      "window of recently selected tokens, in budgets" },
    { "steps", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_PLAN,
      "print the step program, too: the stages of a layer's sparse attention in a decode step, "
      "their "
      "streams, what each waits for, and the bytes it moves at most" },
    { "plan", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM,
      CMD_RUN | CMD_CHAT | CMD_BENCH | CMD_PLAN | CMD_EVAL | CMD_PROFILE | CMD_SERVE,
      "a window for each layer and KV head, as kvdrive profile chose them for this model, in place "
      "of --cap, and its share of a host tier that spills; its budget, too, without --budget" },
    { "fetch", "", KVD_OPT_CHOICE, KVD_FETCH_NAMES, "deferred", NOLIM, EVAL,
      "deferred: a step waits for its most important misses only; strict: for all" },
    { "schedule", "", KVD_OPT_CHOICE, KVD_SCHEDULE_NAMES, "sequential", NOLIM, EVAL,
      "sparse steps on the GPU: a layer's rows select, fetch and attend together, or in "
      "micro-batches, so that misses of one come up while others select" },
    { "micro-batch", "", KVD_OPT_TEXT, "N|auto", "auto", NOLIM, EVAL,
      "rows of a micro-batch with --schedule elastic; auto: the first steps with a number of rows "
      "try 1, 2, 4 ... and the quickest stays; a step has at most 32, so more rows make them "
      "larger" },
    { "lookup", "", KVD_OPT_CHOICE, KVD_LOOKUP_NAMES, "device", NOLIM, EVAL,
      "who compares selections with windows: the GPU, or the CPU as arXiv 2605.18071 does "
      "(slower)" },
    { "attend", "", KVD_OPT_CHOICE, KVD_ATTEND_NAMES, "window", NOLIM, EVAL,
      "to the whole window, or to a step's selection alone" },
    { "evict", "", KVD_OPT_CHOICE, KVD_EVICT_NAMES, "ema", NOLIM, EVAL,
      "what leaves the window first" },
    { "index", "", KVD_OPT_TEXT, "KIND", "mean-int4+radius", NOLIM, EVAL,
      "what is kept of a chunk to select by: mean, mean-std, box, cluster, quant-k, cascade; "
      "-bf16, -int8, -int4, -int2 and +radius behind (quant-k with --kv-record values)" },
    { "zone", "", KVD_OPT_INT, "N", "0", 0, 256, EVAL,
      "sparse attention: what is not attended to counts by the mean K and V of every N tokens "
      "(a multiple of --chunk that divides 256; 16 costs a sixteenth of the cache's bytes on the "
      "device); 0: not at all" },
    { "group-rule", "", KVD_OPT_CHOICE, "mean|max|mean-chunks|logits", "mean", NOLIM, EVAL,
      "how the query heads of a KV head share a selection" },
    { "select-top-p", "", KVD_OPT_NUM, "F", "0", 0, 0.999999, EVAL,
      "select only until this share of the estimated mass; 0: the whole budget" },
    { "min-mass", "", KVD_OPT_NUM, "F", "0.7", 0, 1, EVAL & ~(uint32_t)CMD_PROFILE,
      "least share of attention that sparse steps may reach, by the index's estimate: below it the "
      "budget is doubled, then attention is exact; 0: never" },
    { "chunk", "", KVD_OPT_INT, "N", "4", 4, 16, EVAL,
      "tokens selected and moved together: 4, 8 or 16" },
    { "sink", "", KVD_OPT_INT, "N", "16", 0, 256, EVAL, "first tokens that are always attended" },
    { "local", "", KVD_OPT_INT, "N", "64", 1, 65536, EVAL, "last tokens that are always attended" },
    { "device-memory", "", KVD_OPT_SIZE, "SIZE", "0", NOLIM, EVAL,
      "what weights, KV cache, buffers and the driver's context may take of a GPU's memory "
      "together; "
      "0: what is free there" },
    { "kv-tiers", "", KVD_OPT_CHOICE, KVD_TIERS_NAMES, "auto", NOLIM, EVAL,
      "auto: K and V are resident on the device where they fit; always: they stay in host memory "
      "or on "
      "disk, and the device brings up what it attends to" },
    { "kv-device", "", KVD_OPT_SIZE, "SIZE", "0", NOLIM, EVAL,
      "memory of the device tier of the KV cache; 0: as much as there is, everything resident if "
      "it "
      "fits" },
    { "kv-host", "", KVD_OPT_SIZE, "SIZE", "0", NOLIM, EVAL,
      "memory of the host tier; 0: what the context takes" },
    { "kv-record", "", KVD_OPT_CHOICE, KVD_KV_RECORD_NAMES, "same", NOLIM, EVAL,
      "K and V below the device and in --cache-dir: as on it, in 8 or 4 bits, or V alone, K being "
      "what an index that keeps keys (quant-k, cascade) says" },
    { "cache-dir", "", KVD_OPT_TEXT, "DIR", NULL, NOLIM, STORE,
      "keep KV blocks in this directory: the longest known prefix of a prompt is not evaluated "
      "again, in later runs either (bench: with --shape, for a disk tier below --kv-host)" },
    { "kv-disk", "", KVD_OPT_SIZE, "SIZE", "0", NOLIM, STORE,
      "what --cache-dir may hold, the least recently used goes; 0: no limit" },
    { "kv-disk-free", "", KVD_OPT_SIZE, "SIZE", "1G", NOLIM, EVAL & ~(uint32_t)CMD_BENCH,
      "what stays free on the filesystem of --cache-dir" },
    { "disk-lag", "", KVD_OPT_INT, "N", "1", 1, 64, EVAL & ~(uint32_t)CMD_BENCH,
      "steps after which a record from disk that its step does not wait for is attended at the "
      "latest; with more than 1 the text depends on the disk's speed" },
    { "resume", "", KVD_OPT_CHOICE, KVD_RESUME_NAMES, "exact", NOLIM,
      EVAL & ~(uint32_t)(CMD_BENCH | CMD_SERVE),
      "how a prompt goes on behind a prefix that --cache-dir knows: exact reads all of it; sparse "
      "takes up to 256 tokens as steps that read what they select" },

    /* prompt */
    { "prompt", "-p", KVD_OPT_TEXT, "TEXT", NULL, NOLIM, GEN | CMD_TOKENIZE,
      "prompt; behind the file's text when there is a file, too (chat: the first message)" },
    { "file", "-f", KVD_OPT_TEXT, "FILE", NULL, NOLIM,
      CMD_RUN | CMD_TOKENIZE | CMD_PERPLEXITY | CMD_PROFILE, "text file; - is standard input" },
    { "system", "-sys --system-prompt", KVD_OPT_TEXT, "TEXT", NULL, NOLIM, GEN, "system message" },
    { "raw", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_RUN | CMD_EVAL,
      "no chat template: the model continues the text" },
    { "special", "-sp", KVD_OPT_FLAG, "", "false", NOLIM, CMD_RUN | CMD_TOKENIZE,
      "recognise special tokens in raw text, and show them in the answer" },
    { "template-vars", "--chat-template-kwargs", KVD_OPT_TEXT, "JSON", NULL, NOLIM, GEN | CMD_EVAL,
      "object of further template variables, such as {\"enable_thinking\":false}" },

    { "escape", "-e", KVD_OPT_FLAG, "", "false", NOLIM, GEN,
      "\\n, \\r, \\t, \\\\, \\', \\\" and \\xHH in --prompt, --system and --stop stand for the "
      "characters" },
    { "single-turn", "-st", KVD_OPT_FLAG, "", "false", NOLIM, GEN,
      "chat: end after one answer, as run always does" },

    /* generation */
    { "predict", "-n --n-predict", KVD_OPT_COUNT, "N", "-1", -1, MILL, SAMPLE,
      "most tokens to generate; -1: until the model ends or the context is full" },
    { "seed", "-s", KVD_OPT_INT, "N", "-1", -1, 9007199254740992.0, GEN | CMD_EVAL,
      "seed of the sampler; -1: a new one each time (eval: of the prompts; 42)" },
    { "temp", "--temperature", KVD_OPT_NUM, "F", "0.8", -1000, 1000, SAMPLE,
      "temperature; 0 or less: greedy" },
    { "top-k", "", KVD_OPT_INT, "N", "40", -1, MILL, SAMPLE,
      "sample among the N most likely; 0 or -1: off" },
    { "top-p", "", KVD_OPT_NUM, "F", "0.95", 0, 1, SAMPLE, "smallest set with this mass; 1: off" },
    { "min-p", "", KVD_OPT_NUM, "F", "0.05", 0, 1, SAMPLE, "at least F times the best; 0: off" },
    { "typical", "--typical-p", KVD_OPT_NUM, "F", "1", 0, 1, SAMPLE,
      "set of this mass whose surprise is nearest to the entropy; 0 or 1: off" },
    { "top-nsigma", "--top-n-sigma", KVD_OPT_NUM, "F", "-1", -1, 1000, SAMPLE,
      "logits at most F standard deviations below the best; 0 or -1: off" },
    { "xtc-probability", "", KVD_OPT_NUM, "F", "0", 0, 1, SAMPLE,
      "how often XTC leaves out the best tokens; 0: off" },
    { "xtc-threshold", "", KVD_OPT_NUM, "F", "0.1", 0, 1, SAMPLE,
      "XTC keeps the last token with at least this probability, and those behind it" },
    { "dry-multiplier", "", KVD_OPT_NUM, "F", "0", 0, 1000, SAMPLE,
      "DRY: taken off the logit of a token that repeats a sequence; 0: off" },
    { "dry-base", "", KVD_OPT_NUM, "F", "1.75", 1, 1000, SAMPLE,
      "DRY: factor for each token beyond the allowed length" },
    { "dry-allowed-length", "", KVD_OPT_COUNT, "N", "2", 0, MILL, SAMPLE,
      "DRY: shortest repeated sequence that costs something" },
    { "dry-penalty-last-n", "", KVD_OPT_COUNT, "N", "-1", -1, MILL, SAMPLE,
      "DRY: tokens looked back at; 0: off, -1: as many as can be (1,048,576)" },
    { "dry-sequence-breaker", "", KVD_OPT_LIST, "TEXT", NULL, NOLIM, SAMPLE,
      "DRY: no sequence reaches across this text, in place of line feed, : \" and *; none: no "
      "such text; may be given several times" },
    { "repeat-penalty", "", KVD_OPT_NUM, "F", "1", 0.01, 100, SAMPLE,
      "how much less likely tokens become that have occurred; 1: off" },
    { "presence-penalty", "", KVD_OPT_NUM, "F", "0", -100, 100, SAMPLE,
      "taken off the logit of a token that has occurred; 0: off" },
    { "frequency-penalty", "", KVD_OPT_NUM, "F", "0", -100, 100, SAMPLE,
      "the same, for each time it has occurred; 0: off" },
    { "repeat-last-n", "", KVD_OPT_COUNT, "N", "64", -1, MILL, SAMPLE,
      "tokens the penalties look back at; 0: none, -1: as many as can be (1,048,576)" },
    { "logit-bias", "-l", KVD_OPT_LIST, "ID+B,...", NULL, NOLIM, GEN,
      "add B to the logit of token ID: 15043+1,2-100; may be given several times" },
    { "stop", "-r --reverse-prompt", KVD_OPT_LIST, "TEXT", NULL, NOLIM, GEN,
      "end an answer before this text; may be given several times" },
    { "json-schema", "-j -jf --json-schema-file", KVD_OPT_TEXT, "FILE|TEXT", NULL, NOLIM, CMD_RUN,
      "the answer is JSON that fits this schema (a file, or the schema itself)" },
    { "json-object", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_RUN, "the answer is a JSON object" },
    { "ignore-eos", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_RUN, "go on past the model's end" },

    /* serve */
    { "host", "", KVD_OPT_TEXT, "ADDR", "127.0.0.1", NOLIM, CMD_SERVE,
      "address to listen on; other machines reach only what is not loopback, and then a key is "
      "asked for" },
    { "port", "", KVD_OPT_INT, "N", "8080", 0, 65535, CMD_SERVE,
      "port to listen on; 0: a free one, which the log names" },
    { "api-key-file", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_SERVE,
      "file with the key that every request but /health must carry; KVDRIVE_API_KEY in the "
      "environment, or api-key in a configuration file, is the key itself" },
    { "api-key", "", KVD_OPT_SECRET, "KEY", NULL, NOLIM, CMD_SERVE,
      "give the key as KVDRIVE_API_KEY in the environment, or in a file (--api-key-file, or "
      "api-key in a configuration file)" },
    { "without-key", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_SERVE,
      "serve beyond loopback although there is no key: whoever reaches the port may use it" },
    { "cors-origin", "", KVD_OPT_TEXT, "ORIGIN", NULL, NOLIM, CMD_SERVE,
      "origin of web pages that may call, such as https://chat.example, or *; else none may" },
    { "alias", "-a", KVD_OPT_TEXT, "NAME", NULL, NOLIM, CMD_SERVE,
      "the model's name in answers; else the file's" },
    { "parallel", "-np", KVD_OPT_INT, "N", "4", 1, 256, CMD_SERVE | CMD_PLAN,
      "sequences that are evaluated together; others wait (plan: of a server; without it and "
      "--kv-tokens, one sequence of run or chat)" },
    { "kv-tokens", "", KVD_OPT_COUNT, "N", "0", 0, MILL, CMD_SERVE | CMD_PLAN,
      "tokens that all sequences together may hold; 0: -c times --parallel" },
    { "reasoning-format", "", KVD_OPT_CHOICE, "auto|none", "auto", NOLIM, CMD_SERVE,
      "auto: what a model thinks before it answers, as its chat template marks it, is a field of "
      "its own; none: it stays in the text" },
    { "reasoning", "-rea", KVD_OPT_CHOICE, "auto|on|off", "auto", NOLIM, CMD_SERVE,
      "whether models think before they answer where a request does not say; auto: as the chat "
      "template has it" },
    { "parse-special", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_SERVE,
      "requests may have special tokens in the text of a raw completion (parse_special)" },
    { "queue", "", KVD_OPT_INT, "N", "64", 1, 100000, CMD_SERVE,
      "requests that may wait; more are told to come back (429)" },
    { "connections", "", KVD_OPT_INT, "N", "2048", 1, 60000, CMD_SERVE, "connections at a time" },
    { "body-limit", "", KVD_OPT_SIZE, "SIZE", "32M", NOLIM, CMD_SERVE,
      "largest body of a request" },
    { "max-gap", "", KVD_OPT_NUM, "MS", "0", 0, 1e6, CMD_SERVE,
      "time that a step of answers may take while prompts are evaluated beside them; 0: three "
      "times as long as without" },
    { "keepalive", "", KVD_OPT_NUM, "S", "5", 0.05, 3600, CMD_SERVE,
      "a stream that has nothing to say sends a comment this often" },
    { "read-timeout", "-to --timeout", KVD_OPT_NUM, "S", "60", 0.1, 86400, CMD_SERVE,
      "time a request may take to arrive, and a client to read some of its answer" },
    { "idle-timeout", "", KVD_OPT_NUM, "S", "600", 0.1, 86400, CMD_SERVE,
      "time a connection may be open without a request" },
    { "stall-timeout", "", KVD_OPT_NUM, "S", "120", 0.1, 86400, CMD_SERVE,
      "a step that takes longer has failed, and ends the server" },
    { "grace", "", KVD_OPT_NUM, "S", "30", 0, 86400, CMD_SERVE,
      "time that requests have to finish when the server is stopped" },
    { "log-format", "", KVD_OPT_CHOICE, "text|json", "text", NOLIM, CMD_SERVE,
      "form of the log on standard error" },

    /* output */
    { "json", "", KVD_OPT_FLAG, "", "false", NOLIM,
      CMD_RUN | CMD_PERPLEXITY | CMD_TOKENIZE | CMD_INSPECT | CMD_PLAN | CMD_DOCTOR | CMD_EVAL |
          CMD_CACHE | CMD_PROFILE,
      "one JSON object on standard output" },
    { "stats", "", KVD_OPT_FLAG, "", "false", NOLIM, GEN | CMD_PERPLEXITY,
      "rates and memory by kind, at the end" },
    { "trace", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, GEN | CMD_BENCH | CMD_EVAL,
      "write what happened when, as Chrome trace events (Perfetto opens them); bench: of its last "
      "case" },
    { "verbose", "-v", KVD_OPT_FLAG, "", "false", NOLIM, ALL, "what the library says as it goes" },

    /* bench */
    { "n-prompt", "-p", KVD_OPT_TEXT, "N,...", "512", NOLIM, CMD_BENCH, "prompt lengths; 0: none" },
    { "n-gen", "-n", KVD_OPT_TEXT, "N,...", "128", NOLIM, CMD_BENCH, "answer lengths; 0: none" },
    { "n-depth", "-d", KVD_OPT_TEXT, "N,...", "0", NOLIM, CMD_BENCH,
      "tokens held before the measured ones" },
    { "synthetic", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_BENCH,
      "made-up K and V for --n-depth in place of a prompt: speed only" },
    { "schedules", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_BENCH,
      "sparse steps at --n-depth for each --n-parallel under every --lookup, --fetch and "
      "--schedule "
      "in turn, with sizes of micro-batches" },
    { "n-parallel", "-np", KVD_OPT_TEXT, "N,...", "1", NOLIM, CMD_BENCH,
      "sequences decoded together" },
    { "repetitions", "-r", KVD_OPT_INT, "N", "5", 1, 1000, CMD_BENCH, "runs of each case" },
    { "shape", "", KVD_OPT_TEXT, "NAME", NULL, NOLIM, CMD_BENCH,
      "no file: random weights of the shape of llama-3-8b, qwen3-8b, qwen3-14b, phi-4-mini or "
      "tiny; "
      "without -p, steps over made-up q, K and V, with times and bytes of their stages" },
    { "shape-type", "", KVD_OPT_CHOICE, "bf16|q8_0|q4_k", "bf16", NOLIM, CMD_BENCH,
      "--shape: element type of its weights; q4_k: with 6 bits where such files have them" },
    { "reuse", "", KVD_OPT_NUM, "F", "0.925", 0.01, 1, CMD_BENCH,
      "--shape: share of a query's variance that stays from step to step; the default gives hit "
      "rates as of real text" },
    { "sweep", "", KVD_OPT_TEXT, "NAME=A,B;...", NULL, NOLIM, CMD_BENCH,
      "--shape: a row for each value of these options, and of --n-depth and --n-parallel: "
      "'cap=1,2,4;kv-record=same,int8'" },
    { "brief", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_BENCH,
      "--shape: steps as they are alone, without the runs that tell stages apart" },
    { "grow", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_BENCH,
      "--shape: as --brief, for sequences doubled from --n-parallel on as long as memory holds "
      "them, then for the most that it holds" },
    { "hbm-rate", "", KVD_OPT_NUM, "GB/S", "4200", 1, 1000000, CMD_BENCH,
      "--shape: what the roofline takes the device's memory for" },
    { "pcie-rate", "", KVD_OPT_NUM, "GB/S", "0", 0, 1000000, CMD_BENCH,
      "--shape: likewise the host's; 0: as the step that fills the windows moves such records" },
    { "output", "-o", KVD_OPT_CHOICE, "md|csv|json", "md", NOLIM, CMD_BENCH, "form of the table" },

    /* perplexity */
    { "chunks", "", KVD_OPT_INT, "N", "-1", -1, MILL, CMD_PERPLEXITY, "windows to score; -1: all" },
    { "score-all", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_PERPLEXITY,
      "score every position of a window but the first, not the second half only" },
    { "logits-out", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_PERPLEXITY,
      "write the logits of scored positions as raw float32" },
    { "tokens", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_PERPLEXITY | CMD_RUN,
      "token ids, separated by white space, in place of a text" },

    /* eval */
    { "length", "-L", KVD_OPT_COUNT, "N", "8192", 256, MILL, CMD_EVAL | CMD_PROFILE,
      "tokens of a prompt and its answer (profile: its steps) together; profile without it: at "
      "most "
      "so many, fewer where the shortest text or the model has fewer" },
    { "tasks", "", KVD_OPT_TEXT, "NAME,...", "all", NOLIM, CMD_EVAL,
      "RULER tasks: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery, "
      "vt, cwe, fwe, qa_1" },
    { "samples", "", KVD_OPT_INT, "N", "8", 1, 10000, CMD_EVAL, "prompts of each task" },
    { "configs", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_EVAL,
      "configurations to compare, one a line: name: key=value, key=value" },
    { "with", "", KVD_OPT_TEXT, "NAME:K=V,...;...", NULL, NOLIM, CMD_EVAL,
      "configurations to compare, here" },
    { "kl", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_EVAL,
      "also make each configuration say what dense said, for the divergence of its logits" },
    { "csv", "-o", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_EVAL,
      "write a row for every answer to this file" },
    { "generate-only", "", KVD_OPT_FLAG, "", "false", NOLIM, CMD_EVAL,
      "print the prompts and expected answers as lines of JSON, answer none" },
    { "data", "", KVD_OPT_TEXT, "DIR", NULL, NOLIM, CMD_EVAL,
      "word lists, essay and questions; without it, what was installed or the source tree's" },

    /* profile */
    { "steps", "", KVD_OPT_INT, "N", "128", 2, 1000000, CMD_PROFILE,
      "tokens of each text that are decoded, the first one to fill the window" },
    { "write-plan", "-o", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_PROFILE,
      "write the plan to this file: what was measured, and the caps chosen" },
    { "kv-window", "", KVD_OPT_SIZE, "SIZE", "0", NOLIM, CMD_PROFILE,
      "memory that the planned windows may take; 0: what --cap for every lane would" },
    { "counts", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_PROFILE,
      "write every count of every layer and KV head to this file (CSV)" },
    { "heatmap", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, CMD_PROFILE,
      "draw hit rates by layer and KV head (SVG, or PNG by its name; gnuplot does it)" },

    /* llama.cpp's, where there is nothing to choose */
    { "flash-attn", "-fa", KVD_OPT_FOREIGN, "on|off|auto|0|1", NULL, NOLIM, EVAL,
      "attention never holds a matrix of scores: there is nothing to switch" },
    { "mmap", "--no-mmap", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "--weights map|copy says whether the file stays mapped" },
    { "mlock", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "--weights copy keeps weights in memory of our own" },
    { "kv-offload", "-kvo -nkvo --no-kv-offload", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "--kv-device SIZE says how much of the KV cache lies on the device" },
    { "main-gpu", "-mg", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "--backend cuda:N chooses the GPU" },
    { "device", "-dev", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "--backend cuda:N chooses the GPU" },
    { "split-mode", "-sm", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "a model runs on one GPU (--backend cuda:N)" },
    { "tensor-split", "-ts", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "a model runs on one GPU (--backend cuda:N)" },
    { "threads-batch", "-tb", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "-t is for prompts and answers" },
    { "cont-batching", "-cb -nocb --no-cont-batching", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "sequences always share a batch" },
    { "prompt-cache", "", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "--cache-dir DIR keeps the KV cache of prompts" },
    { "prompt-cache-all", "--prompt-cache-ro", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "--cache-dir DIR keeps the KV cache of prompts" },
    { "cache-reuse", "", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "--cache-dir DIR keeps the KV cache of prompts" },
    { "keep", "", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "a full context ends the answer, nothing is shifted out" },
    { "context-shift", "--no-context-shift", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "a full context ends the answer, nothing is shifted out" },
    { "defrag-thold", "-dt", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "the KV cache lies in blocks, which do not scatter" },
    { "jinja", "--no-jinja", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "chat templates are always Jinja" },
    { "conversation", "-cnv -no-cnv --no-conversation", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "kvdrive chat holds a conversation, kvdrive run answers once" },
    { "warmup", "--no-warmup", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL, "nothing is warmed up" },
    { "display-prompt", "--no-display-prompt --simple-io", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "standard output has the answer alone" },
    { "prio", "--prio-batch --poll --poll-batch", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "threads sleep when there is no work" },
    { "numa", "", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL, "numactl places the process" },
    { "metrics", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "kvdrive serve always has GET /metrics" },
    { "slots", "--no-slots", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "kvdrive serve always has GET /slots: it counts tokens and shows no text" },
    { "props", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "kvdrive serve always has GET /props, and no request changes what it shows" },
    { "webui", "--no-webui --ui --no-ui", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "kvdrive serve always has its page at /; where there is a key it can do nothing without it" },
    { "threads-http", "", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "one thread has all connections" },
    { "kv-unified", "-kvu -no-kvu --no-kv-unified", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "sequences always share the KV cache; --kv-tokens is its size" },
    { "draft", "--draft-max --draft-n --draft-min --draft-n-min --draft-p-min", KVD_OPT_FOREIGN,
      "*", NULL, NOLIM, EVAL, "tokens are not drafted; the text is the same without" },
    { "no-mmproj", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL, "models are served for text alone" },

    { "cache-ram", "-cram", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "idle sequences keep their prompts, and --cache-dir DIR those of all" },
    { "cache-prompt", "--no-cache-prompt", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "what is known of a prompt is used unless a request says cache_prompt: false" },
    { "cache-idle-slots", "--no-cache-idle-slots", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "idle sequences keep their prompts until memory is asked for" },
    { "swa-full", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "nothing of a sequence's KV cache is dropped" },
    { "spec-type", "", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "tokens are not drafted; the text is the same without" },
    { "ctx-checkpoints", "-ctxcp --swa-checkpoints", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "nothing of a sequence's KV cache is dropped" },
    { "slot-prompt-similarity", "-sps", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "a prompt goes to the sequence that holds most of it" },
    { "override-tensor", "-ot --n-cpu-moe -ncmoe", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "all weights lie on one device (--backend)" },
    { "cpu-moe", "-cmoe", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "all weights lie on one device (--backend)" },
    { "log-disable", "--log-prefix --log-timestamps --log-colors", KVD_OPT_FOREIGN, "", NULL, NOLIM,
      EVAL, "the log goes to standard error" },
    { "offline", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL, "nothing is ever downloaded" },

    /* vLLM's, likewise */
    { "enable-prefix-caching", "--no-enable-prefix-caching", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "what is known of a prompt is always used; --cache-dir DIR keeps it" },
    { "enable-chunked-prefill", "--no-enable-chunked-prefill", KVD_OPT_FOREIGN, "", NULL, NOLIM,
      EVAL, "prompts always go in pieces beside answers; --max-gap says how large" },
    { "enable-auto-tool-choice", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "requests with tools may always call them" },
    { "tool-call-parser", "", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "the chat template says how calls are written" },
    { "dtype", "--quantization --load-format", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "the model's file says how its weights are stored" },
    { "block-size", "", KVD_OPT_FOREIGN, "*", NULL, NOLIM, EVAL,
      "a block of the KV cache has 256 tokens" },
    { "trust-remote-code", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "no code comes with a model's file" },
    { "enforce-eager", "", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "a GPU's steps are recorded when they first run" },
    { "disable-log-requests", "--no-enable-log-requests", KVD_OPT_FOREIGN, "", NULL, NOLIM, EVAL,
      "the log never has prompts or answers" },

    /* llama.cpp's, without which something would be missing */
    { "hf-repo", "-hf -hfr -hff --hf-file -hft --hf-token -mu --model-url -dr --docker-repo",
      KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "nothing is downloaded; fetch the GGUF file and name it behind -m" },
    { "lora", "--lora-scaled --lora-init-without-apply", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "adapters are not applied; merge it into the model's file (llama-export-lora does)" },
    { "mmproj", "-mm --mmproj-url -mmu", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "models are served for text alone; leave it out" },
    { "model-draft", "-md --hf-repo-draft -hfd -hfrd", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "no second model drafts tokens; leave it out, the text is the same without" },
    { "reasoning-budget", "", KVD_OPT_REFUSED, "-1", NULL, NOLIM, EVAL,
      "what a model thinks has no limit of its own; requests say so to templates that know it "
      "(chat_template_kwargs)" },
    { "chat-template-kwargs", "", KVD_OPT_REFUSED, "{}", NULL, NOLIM,
      EVAL & ~(uint32_t)(GEN | CMD_EVAL), "each request brings its chat_template_kwargs" },
    { "grammar", "--grammar-file", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "answers are held to a JSON schema: --json-schema of kvdrive run, response_format of "
      "requests" },
    { "samplers", "--sampling-seq", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "samplers have one order; --temp, --top-k, --typical, --top-p, --min-p set them" },
    { "mirostat", "", KVD_OPT_REFUSED, "0", NULL, NOLIM, EVAL,
      "there is no Mirostat; --typical, --top-p or --min-p bound what is sampled" },
    { "embedding", "--embeddings --rerank --reranking --pooling", KVD_OPT_REFUSED, "", NULL, NOLIM,
      EVAL, "there are no embeddings and no ranks here, only text; another server has to do it" },
    { "slot-save-path", "", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "slots are not saved by name; --cache-dir DIR keeps the KV cache of all prompts, found again "
      "by content" },
    { "ssl-key-file", "--ssl-cert-file", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "the server speaks plain HTTP; put a proxy in front of it that speaks TLS" },

    /* vLLM's */
    { "max-model-len", "", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "that is -c N here, for each sequence" },
    { "max-num-seqs", "", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "that is --parallel N of kvdrive serve" },
    { "max-num-batched-tokens", "", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL, "that is -b N here" },
    { "kv-cache-dtype", "", KVD_OPT_REFUSED, "auto", NULL, NOLIM, EVAL,
      "that is --kv-record int8 or int4 here, for what lies below the device" },
    { "swap-space", "--kv-offloading-size", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "that is --kv-host SIZE here, such as 8G" },
    { "served-model-name", "", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "that is --alias NAME of kvdrive serve" },
    { "gpu-memory-utilization", "", KVD_OPT_REFUSED, "", NULL, NOLIM, EVAL,
      "--device-memory SIZE says in bytes what a GPU may hold; without it, what is free there" },
    { "tensor-parallel-size", "-tp --pipeline-parallel-size -pp", KVD_OPT_REFUSED, "", NULL, NOLIM,
      EVAL, "a model runs on one GPU (--backend cuda:N); leave it out" },

    /* everywhere */
    { "config", "", KVD_OPT_TEXT, "FILE", NULL, NOLIM, ALL,
      "configuration file (name = value lines)" },
    { "print-config", "", KVD_OPT_FLAG, "", "false", NOLIM, ALL,
      "show every option with its origin" },
    { "help", "-h", KVD_OPT_FLAG, "", "false", NOLIM, ALL, "the options that are used most" },
    { "help-all", "", KVD_OPT_FLAG, "", "false", NOLIM, ALL, "all options" },
};
const uint32_t cli_n_option = KVD_COUNTOF(cli_options);

const char *const cli_first_options[] = {
    /* run: twenty */
    "model", "threads", "backend", "gpu-layers", "ctx-size", "attention", "kv-device", "kv-host",
    "cache-dir", "prompt", "file", "system", "raw", "predict", "seed", "temp", "stop",
    "json-schema", "json", "stats",
    /* chat, serve */
    "host", "port", "api-key-file", "alias", "parallel", "kv-tokens",
    /* bench */
    "n-prompt", "n-gen", "n-depth", "n-parallel", "repetitions", "shape", "sweep", "output",
    /* perplexity, eval, profile */
    "chunks", "length", "tasks", "samples", "configs", "with", "csv", "steps", "write-plan",
    "kv-window", "heatmap",
    /* all */
    "config", "help", "help-all", NULL
};
