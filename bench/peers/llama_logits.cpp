// SPDX-License-Identifier: Apache-2.0
// Writes the raw float32 logits, or the greedy continuations, that llama.cpp gives for token ids.
//
//   llama_logits -m MODEL -i WINDOWS -o OUT [-t THREADS] [-g N] [-k f16|f32]
//                [-x 0|1] [-s none|linear|yarn -f FACTOR [-c ORIG_CTX]] [-O KEY=N]
//
// WINDOWS (little-endian u32): n_window, then for each: n_token, n_pos, tokens[], positions[].
// OUT: for each window and position n_vocab floats; with -g N, N u32 token ids for each window.
// -x 0 turns off repacked weights (AMX and the like), as llama.cpp's --no-repack does.
// -O overrides an unsigned metadata value, such as the original context of a LongRoPE model,
// by which llama.cpp picks long or short factors for the whole context.
#include <llama.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct Window {
    std::vector<uint32_t> token, pos;
};

[[noreturn]] static void die(const char *what)
{
    std::fprintf(stderr, "llama_logits: %s\n", what);
    std::exit(1);
}

static std::vector<uint32_t> read_words(FILE *f, size_t n)
{
    std::vector<uint32_t> v(n);
    if (n != 0 && std::fread(v.data(), 4, n, f) != n) {
        die("the windows file is short");
    }
    return v;
}

static std::vector<Window> read_windows(const char *path)
{
    FILE *f = std::fopen(path, "rb");
    if (f == nullptr) {
        die("cannot open the windows file");
    }
    std::vector<Window> all(read_words(f, 1)[0]);
    for (Window &w : all) {
        const std::vector<uint32_t> n = read_words(f, 2);
        w.token = read_words(f, n[0]);
        w.pos = read_words(f, n[1]);
    }
    std::fclose(f);
    return all;
}

// Feeds tokens [from, to) of one sequence; `want` marks the positions whose logits are kept.
static void feed(llama_context *ctx, llama_batch &batch, const Window &w, size_t from, size_t to,
                 const std::vector<bool> &want)
{
    batch.n_tokens = static_cast<int32_t>(to - from);
    for (size_t i = from; i < to; i++) {
        batch.token[i - from] = static_cast<llama_token>(w.token[i]);
        batch.pos[i - from] = static_cast<llama_pos>(i);
        batch.n_seq_id[i - from] = 1;
        batch.seq_id[i - from][0] = 0;
        batch.logits[i - from] = want[i] ? 1 : 0;
    }
    if (llama_decode(ctx, batch) != 0) {
        die("llama_decode failed");
    }
}

int main(int argc, char **argv)
{
    const char *model_path = nullptr, *in = nullptr, *out = nullptr;
    int n_thread = 2, n_greedy = 0;
    std::string scaling, kv_type = "f16", over;
    float factor = 1.0F;
    uint32_t orig_ctx = 0;
    bool repack = true;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *v = argv[i + 1];
        switch (argv[i][0] == '-' ? argv[i][1] : 0) {
        case 'm': model_path = v; break;
        case 'i': in = v; break;
        case 'o': out = v; break;
        case 't': n_thread = std::atoi(v); break;
        case 'g': n_greedy = std::atoi(v); break;
        case 'k': kv_type = v; break;
        case 'x': repack = std::atoi(v) != 0; break;
        case 's': scaling = v; break;
        case 'f': factor = static_cast<float>(std::atof(v)); break;
        case 'c': orig_ctx = static_cast<uint32_t>(std::atoi(v)); break;
        case 'O': over = v; break;
        default: die("unknown option");
        }
    }
    if (model_path == nullptr || in == nullptr || out == nullptr) {
        die("needs -m, -i and -o");
    }
    const std::vector<Window> windows = read_windows(in);
    size_t longest = 0;
    for (const Window &w : windows) {
        longest = std::max(longest, w.token.size() + static_cast<size_t>(n_greedy));
    }

    llama_backend_init();
    llama_model_params mp = llama_model_default_params();
    mp.use_extra_bufts = repack;
    llama_model_kv_override kv[2] = {};
    const size_t eq = over.find('=');
    if (eq != std::string::npos) {
        kv[0].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
        std::snprintf(kv[0].key, sizeof kv[0].key, "%s", over.substr(0, eq).c_str());
        kv[0].val_i64 = std::atoll(over.c_str() + eq + 1);
        mp.kv_overrides = kv;
    }
    llama_model *model = llama_model_load_from_file(model_path, mp);
    if (model == nullptr) {
        die("cannot load the model");
    }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = static_cast<uint32_t>(longest);
    cp.n_threads = cp.n_threads_batch = n_thread;
    cp.type_k = cp.type_v = kv_type == "f32" ? GGML_TYPE_F32 : GGML_TYPE_F16;
    if (!scaling.empty()) {
        cp.rope_scaling_type = scaling == "yarn"     ? LLAMA_ROPE_SCALING_TYPE_YARN
                               : scaling == "linear" ? LLAMA_ROPE_SCALING_TYPE_LINEAR
                                                     : LLAMA_ROPE_SCALING_TYPE_NONE;
        cp.rope_freq_scale = 1.0F / factor;
        cp.yarn_orig_ctx = orig_ctx;
    }
    llama_context *ctx = llama_init_from_model(model, cp);
    if (ctx == nullptr) {
        die("cannot make a context");
    }
    const size_t n_vocab = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
    const size_t step = llama_n_batch(ctx);
    llama_batch batch = llama_batch_init(static_cast<int32_t>(step), 0, 1);
    FILE *f = std::fopen(out, "wb");
    if (f == nullptr) {
        die("cannot write the output");
    }
    for (Window w : windows) {
        const size_t n = w.token.size();
        std::vector<bool> want(n + static_cast<size_t>(n_greedy), n_greedy > 0);
        for (uint32_t p : w.pos) {
            want.at(p) = true;
        }
        llama_memory_clear(llama_get_memory(ctx), true);
        // Positions must be ascending: the logits are written as they come.
        for (size_t from = 0; from < n; from += step) {
            const size_t to = std::min(n, from + step);
            feed(ctx, batch, w, from, to, want);
            for (size_t i = from; n_greedy == 0 && i < to; i++) {
                if (want[i]) {
                    std::fwrite(llama_get_logits_ith(ctx, static_cast<int32_t>(i - from)), 4,
                                n_vocab, f);
                }
            }
        }
        for (int g = 0; g < n_greedy; g++) {
            const float *l = llama_get_logits_ith(ctx, -1);
            const uint32_t id = static_cast<uint32_t>(std::max_element(l, l + n_vocab) - l);
            std::fwrite(&id, 4, 1, f);
            w.token.push_back(id);
            feed(ctx, batch, w, w.token.size() - 1, w.token.size(), want);
        }
    }
    std::fclose(f);
    llama_batch_free(batch);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
