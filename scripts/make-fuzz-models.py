#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes seeds for tests/fuzz/fuzz_model.c: small valid models with odd geometries.

    python scripts/make-fuzz-models.py OUT_DIR      (needs the gguf and numpy packages)

Each file is what fuzz_model.c reads: 8 bytes of options, then a GGUF file.  The weights are random
from a fixed seed; quantised tensors the gguf package cannot make are random blocks with a small
scale.  The output is deterministic."""
import os
import sys
import tempfile

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants

# offsets of the float16 scales in a block of types the package only reads
SCALES = {T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,)}

# name: (arch, embd, heads, kv heads, head dim, n_rot, ff, types (embd, q, k, v, o, gate, up, down,
#        norm), option bytes, extras)
F, H, B = T.F32, T.F16, T.BF16
CASES = {
    "llama-f32": ("llama", 32, 4, 2, 8, 8, 48, [F] * 9, "0000070f0000", {}),
    "llama-odd": ("llama", 30, 3, 1, 10, 6, 17, [F] * 9, "010000071f0001", {}),
    "llama-oddhead": ("llama", 21, 3, 3, 7, 2, 5, [F] * 9, "010004001f0100", {}),
    "llama-q4": ("llama", 32, 2, 1, 16, 16, 64, [T.Q4_0] * 8 + [F], "0100001f200000", {}),
    "llama-q8": ("llama", 64, 4, 4, 16, 8, 32, [T.Q8_0] * 8 + [H], "0101041f200001", {}),
    "llama-mixed": ("llama", 32, 1, 1, 32, 32, 32,
                    [T.Q8_0, T.Q4_1, T.Q5_0, T.Q5_1, H, B, T.Q4_0, T.Q8_0, B],
                    "0100021f200200", {"output": T.Q4_1}),
    "llama-k4": ("llama", 32, 2, 1, 16, 16, 256,
                 [T.Q8_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_K, F],
                 "0100001f200000", {}),
    "llama-k6": ("llama", 32, 2, 1, 16, 16, 256,
                 [T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q6_K, F],
                 "0102001f200001", {}),
    "llama-k2": ("llama", 32, 2, 1, 16, 16, 256,
                 [T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q4_0, T.Q2_K, F],
                 "0101001f200001", {}),
    "llama-k3": ("llama", 16, 1, 1, 16, 16, 256, [F] * 7 + [T.Q3_K, F], "0100041f200001", {}),
    "llama-k5": ("llama", 16, 1, 1, 16, 16, 256, [F] * 7 + [T.Q5_K, F], "0100001f200001", {}),
    "llama-spm": ("llama", 16, 2, 2, 8, 8, 8, [F] * 9, "0100001f200001", {"spm": True}),
    "llama-freqs": ("llama", 16, 2, 1, 8, 8, 8, [H] * 9, "0100001f200001", {"freqs": True}),
    "qwen2-linear": ("qwen2", 24, 2, 1, 12, 12, 20, [F] * 9, "0100001f200001",
                     {"scaling": ("linear", 2.0)}),
    "qwen3-yarn": ("qwen3", 16, 3, 1, 18, 18, 12, [B] * 9, "0100041f200001",
                   {"scaling": ("yarn", 4.0)}),
    "phi3-long": ("phi3", 24, 2, 2, 12, 8, 10, [F] * 9, "010004073f0001", {"long": True}),
}
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}")


def tokens_of(spm):
    """A vocabulary far smaller than real ones: not every byte has a token."""
    if spm:
        words = ["<unk>", "<s>", "</s>", "\u2581", "h", "e", "l", "o", "he", "\u2581t", "t", "ll"]
        return words + ["<0x0A>", "<0x31>", "<0xFF>", "<|im_end|>"]
    return list("abehilotd12<|>_/ms") + ["\u0120", "\u010a", "he", "ll", "th", "in"] + SPECIAL


def add_vocab(w, spm, rng):
    tokens = tokens_of(spm)
    control = {"<s>", "</s>", *SPECIAL}
    w.add_tokenizer_model("llama" if spm else "gpt2")
    w.add_tokenizer_pre("default" if spm else "gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([3 if t in control else 2 if t == "<unk>" else 6 if t.startswith("<0x") else 1
                       for t in tokens])
    if spm:
        w.add_token_scores([float(-i) for i in range(len(tokens))])
        w.add_unk_token_id(0)
    else:
        w.add_token_merges(["h e", "l l", "t h", "i n", "no where"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(len(tokens) - 1)
    w.add_chat_template(TEMPLATE)
    return len(tokens)


def add_matrix(w, name, shape, dtype, rng):
    x = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    if dtype in SCALES:
        block, size = gguf.constants.GGML_QUANT_SIZES[dtype]
        raw = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
        for at in SCALES[dtype]:
            raw[:, at:at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        w.add_tensor(name, raw.reshape(shape[0], -1), raw_dtype=dtype)
    else:
        w.add_tensor(name, quants.quantize(x, dtype), raw_dtype=dtype)


def add_layer(w, arch, c, rng):
    _, embd, heads, kv, dim, _, ff, types, _, _ = c
    q, k = heads * dim, kv * dim

    def add(name, rows, cols, dtype):
        add_matrix(w, f"blk.0.{name}.weight", (rows, cols), dtype, rng)

    def vector(name, n):
        x = (1 + 0.1 * rng.standard_normal((1, n))).astype(np.float32)
        w.add_tensor(f"blk.0.{name}", quants.quantize(x, types[8])[0], raw_dtype=types[8])

    vector("attn_norm.weight", embd)
    vector("ffn_norm.weight", embd)
    if arch == "phi3":
        add("attn_qkv", q + 2 * k, embd, types[1])
        add("ffn_up", 2 * ff, embd, types[6])
    else:
        for i, (name, n) in enumerate((("attn_q", q), ("attn_k", k), ("attn_v", k))):
            add(name, n, embd, types[1 + i])
            if arch == "qwen2":
                vector(name + ".bias", n)
        add("ffn_gate", ff, embd, types[5])
        add("ffn_up", ff, embd, types[6])
    if arch == "qwen3":
        vector("attn_q_norm.weight", dim)
        vector("attn_k_norm.weight", dim)
    add("attn_output", embd, q, types[4])
    add("ffn_down", embd, ff, types[7])


def add_rope(w, arch, n_rot, extra):
    if "scaling" in extra:
        w.add_string(f"{arch}.rope.scaling.type", extra["scaling"][0])
        w.add_rope_scaling_factor(extra["scaling"][1])
        w.add_rope_scaling_orig_ctx_len(16)
    if "long" in extra:
        w.add_rope_scaling_orig_ctx_len(8)
        w.add_rope_scaling_attn_factors(1.2)
        w.add_tensor("rope_factors_long.weight", np.linspace(1, 4, n_rot // 2, dtype=np.float32))
        w.add_tensor("rope_factors_short.weight", np.ones(n_rot // 2, np.float32))
    if "freqs" in extra:
        w.add_tensor("rope_freqs.weight", np.linspace(1, 8, n_rot // 2, dtype=np.float32))


def write(path, name, c, rng):
    arch, embd, heads, kv, dim, n_rot, ff, types, option, extra = c
    w = gguf.GGUFWriter(path, arch)
    w.add_name(name)
    w.add_block_count(1)
    w.add_context_length(64)
    w.add_embedding_length(embd)
    w.add_feed_forward_length(ff)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_key_length(dim)
    w.add_value_length(dim)
    w.add_rope_dimension_count(n_rot)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    n_vocab = add_vocab(w, extra.get("spm", False), rng)
    add_rope(w, arch, n_rot, extra)
    add_matrix(w, "token_embd.weight", (n_vocab, embd), types[0], rng)
    if "output" in extra:
        add_matrix(w, "output.weight", (n_vocab, embd), extra["output"], rng)
    w.add_tensor("output_norm.weight", np.ones(embd, np.float32))
    add_layer(w, arch, c, rng)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return bytes.fromhex(option).ljust(8, b"\0")


def main():
    out = sys.argv[1]
    os.makedirs(out, exist_ok=True)
    for i, (name, c) in enumerate(CASES.items()):
        with tempfile.TemporaryDirectory() as tmp:
            path = os.path.join(tmp, "m.gguf")
            option = write(path, name, c, np.random.default_rng(i))
            with open(path, "rb") as f, open(os.path.join(out, name), "wb") as g:
                g.write(option + f.read())


if __name__ == "__main__":
    main()
