#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/tiny: a tiny random model per architecture (GGUF) and its golden logits.

    python scripts/golden/make_tiny.py [OUT]      (needs scripts/golden/requirements.txt)

The models are transformers' own classes with random float32 weights from a fixed seed, run with
eager attention. The GGUF files follow what llama.cpp's converter writes for the real models:
tensor names, metadata keys, and the row order of q and k for interleaved RoPE (llama only).
Every case is computed a second time by ref64.py in float64 from the written file.
"""
import math
import os
import sys

import gguf
import numpy as np
import torch
from transformers import (LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import ref64
from goldenfile import AUTO, GROWTH, LINEAR, NONE, YARN, Case, write

SEED = 20240607
MERGES = ["h e", "t h", "i n", "Ġ a"]
SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
N_VOCAB = 256 + len(MERGES) + len(SPECIAL)
BOS, EOS = N_VOCAB - 4, N_VOCAB - 3


def byte_alphabet():
    """GPT-2's printable stand-in for every byte, in byte order."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(spare)) for b in range(256)]


def add_vocab(w):
    tokens = byte_alphabet() + [m.replace(" ", "") for m in MERGES] + SPECIAL
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([control if t in SPECIAL else normal for t in tokens])
    w.add_token_merges(MERGES)
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_add_bos_token(False)


def randomise(model, gen):
    """Weights that keep activations of order 1 and attention peaked, so that errors show."""
    for name, p in model.named_parameters():
        r = torch.randn(p.shape, generator=gen, dtype=torch.float32)
        if p.ndim == 1:
            r = 0.5 * r if name.endswith("bias") else 1.0 + 0.2 * r
        elif "embed_tokens" in name or "lm_head" in name:
            r = 0.3 * r
        else:
            gain = 1.8 if any(s in name for s in ("q_proj", "k_proj", "qkv_proj")) else 1.0
            r = r * gain / math.sqrt(p.shape[1])
        p.data.copy_(r)


def permute(w, n_head):
    """Rows of q or k from rotate-half order to interleaved pairs, as llama's GGUF has them."""
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(
        w.shape)


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def add_rope(w, arch, cfg):
    rope = cfg.rope_parameters
    head = getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads
    w.add_rope_freq_base(rope["rope_theta"])
    if arch == "llama":
        w.add_rope_dimension_count(head)
    if arch == "qwen3":
        w.add_key_length(head)
        w.add_value_length(head)
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "phi3":
        # No rope.scaling.type here: the converter writes none, the factor tensors tell.
        orig = rope.get("original_max_position_embeddings", cfg.original_max_position_embeddings)
        w.add_rope_scaling_orig_ctx_len(orig)
        w.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head))
        w.add_sliding_window(cfg.sliding_window or 0)
        if rope["rope_type"] == "longrope":
            scale = cfg.max_position_embeddings / orig
            w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(orig)))


def rope_tensors(cfg):
    """RoPE divisors that the converter stores as tensors: Llama-3's, and LongRoPE's two sets."""
    rope = cfg.rope_parameters
    if rope["rope_type"] == "longrope":
        yield "rope_factors_long.weight", np.asarray(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.asarray(rope["short_factor"], np.float32)
    if rope["rope_type"] != "llama3":
        return
    dim = cfg.hidden_size // cfg.num_attention_heads
    orig, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    out = []
    for wave in 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        smooth = np.clip((orig / wave - low) / (high - low), 0, 1)
        out.append(1 / ((1 - smooth) / factor + smooth))
    yield "rope_freqs.weight", np.asarray(out, np.float32)


def write_gguf(path, arch, name, model):
    cfg = model.config
    w = gguf.GGUFWriter(path, arch)
    w.add_type(gguf.GGUFType.MODEL)
    w.add_name(name)
    w.add_block_count(cfg.num_hidden_layers)
    w.add_context_length(cfg.max_position_embeddings)
    w.add_embedding_length(cfg.hidden_size)
    w.add_feed_forward_length(cfg.intermediate_size)
    w.add_head_count(cfg.num_attention_heads)
    w.add_head_count_kv(cfg.num_key_value_heads)
    w.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    w.add_file_type(gguf.LlamaFileType.ALL_F32)
    if arch == "llama":
        w.add_vocab_size(cfg.vocab_size)
    add_rope(w, arch, cfg)
    add_vocab(w)
    for tensor, values in rope_tensors(cfg):
        w.add_tensor(tensor, values)
    for pname, p in model.named_parameters():  # a tied lm_head is not listed twice
        v = p.detach().numpy()
        if arch == "llama" and ".q_proj." in pname:
            v = permute(v, cfg.num_attention_heads)
        if arch == "llama" and ".k_proj." in pname:
            v = permute(v, cfg.num_key_value_heads)
        w.add_tensor(gguf_name(pname), np.ascontiguousarray(v))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def common(hidden, ffn, heads, kv, context, rope, tied=True):
    return dict(vocab_size=N_VOCAB, hidden_size=hidden, intermediate_size=ffn,
                num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=kv,
                max_position_embeddings=context, rope_parameters=rope, tie_word_embeddings=tied,
                rms_norm_eps=1e-5, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=None,
                attn_implementation="eager")


def plain(theta=10000.0, **more):
    return {"rope_type": "default", "rope_theta": theta, **more}


LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.05, 1.1, 1.3, 1.6, 2.0],
        "long_factor": [1.0, 1.4, 2.2, 3.7, 6.1, 8.5]}
MODELS = {
    "llama": ("llama", LlamaForCausalLM, lambda: LlamaConfig(
        **common(64, 80, 4, 2, 128, plain()))),
    "llama3-rope": ("llama", LlamaForCausalLM, lambda: LlamaConfig(
        **common(32, 64, 2, 1, 256, {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, tied=False))),
    "qwen2": ("qwen2", Qwen2ForCausalLM, lambda: Qwen2Config(
        **common(64, 80, 4, 1, 256, plain(1e6)))),
    "qwen3": ("qwen3", Qwen3ForCausalLM, lambda: Qwen3Config(
        head_dim=16, **common(64, 48, 6, 2, 256, plain(1e6)))),
    "qwen3-yarn": ("qwen3", Qwen3ForCausalLM, lambda: Qwen3Config(
        head_dim=32, **common(32, 64, 2, 1, 256, {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 64}, tied=False))),
    "phi3-longrope": ("phi3", Phi3ForCausalLM, lambda: Phi3Config(
        original_max_position_embeddings=64, sliding_window=262144,
        **common(64, 80, 4, 2, 256, LONG))),
    "phi3": ("phi3", Phi3ForCausalLM, lambda: Phi3Config(
        original_max_position_embeddings=256,
        **common(32, 64, 2, 2, 256, plain(), tied=False))),
}


def cases_of(name, ids):
    """Lengths and positions on both sides of every switch that the model has."""
    def case(n, pos, *scaling):
        return Case(ids[:n], pos, *scaling)

    if name == "llama":
        return [case(1, [0]), case(128, [0, 1, 2, 15, 63, 64, 126, 127]),
                case(200, [1, 127, 128, 199], LINEAR, 2.0),
                case(200, [1, 127, 128, 199], YARN, 4.0, 0),
                case(200, [1, 63, 64, 199], YARN, 4.0, 64)]
    if name in ("qwen2", "qwen3"):
        return [case(1, [0]), case(200, [0, 1, 63, 64, 127, 128, 199]),
                case(200, [1, 199], LINEAR, 2.0), case(200, [1, 63, 64, 199], YARN, 4.0, 64)]
    if name == "qwen3-yarn":
        return [case(1, [0]), case(63, [0, 62]), case(65, [0, 62, 63, 64]),
                case(256, [0, 63, 64, 200, 255]), case(64, [0, 63], NONE)]
    if name == "phi3-longrope":
        growth = [Case(ids[:n], [n - 1], flags=GROWTH if n > 58 else 0) for n in range(58, 71)]
        return [case(1, [0])] + [case(n, sorted({0, 1, 31, 62, n - 2, n - 1}))
                                 for n in (63, 64, 65, 200)] + growth
    return [case(1, [0]), case(65, [0, 1, 63, 64]), case(256, [0, 63, 64, 200, 255])]


def scaled(config, case):
    rope = dict(config.rope_parameters)
    if case.kind == AUTO:
        return config
    rope = {"rope_theta": rope["rope_theta"], "rope_type": "default"}
    if case.kind == LINEAR:
        rope |= {"rope_type": "linear", "factor": case.factor}
    elif case.kind == YARN:
        rope |= {"rope_type": "yarn", "factor": case.factor, "original_max_position_embeddings":
                 case.orig_ctx or config.max_position_embeddings}
    new = type(config)(**(config.to_dict() | {"rope_parameters": rope}))
    new._attn_implementation = "eager"
    return new


def golden(cls, model, case):
    m = model
    if case.kind != AUTO:
        m = cls(scaled(model.config, case)).eval()
        m.load_state_dict(model.state_dict())
    with torch.no_grad():
        return m(torch.tensor([case.tokens]), use_cache=False).logits[0].float().numpy()


def check_growth(model, ids):
    """transformers' own generate drops its cache at the LongRoPE switch; so do the cases."""
    out = model.generate(torch.tensor([ids[:58]]), max_new_tokens=14, do_sample=False,
                         eos_token_id=None, pad_token_id=0)[0].tolist()
    for n in range(58, len(out)):
        with torch.no_grad():
            best = int(model(torch.tensor([out[:n]]), use_cache=False).logits[0, -1].argmax())
        assert best == out[n], (n, best, out[n])


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "../../tests/data/tiny")
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(2)
    print("model            bytes   golden  noise(f32 vs f64, max abs / max |logit|)")
    for index, (name, (arch, cls, config)) in enumerate(MODELS.items()):
        gen = torch.Generator().manual_seed(SEED + index)
        model = cls(config()).eval()
        randomise(model, gen)
        path = os.path.join(out, f"{name}.gguf")
        # llama.cpp looks for Phi-3's own special tokens when the model's name says "phi3".
        write_gguf(path, arch, f"tiny random {name.replace('phi3', 'phi')}", model)
        ids = torch.randint(0, N_VOCAB, (256,), generator=gen).tolist()
        if name == "phi3-longrope":
            check_growth(model, ids)
        cases = cases_of(name, ids)
        file = ref64.Gguf(path)
        worst = 0.0
        for c in cases:
            c.logits = golden(cls, model, c)[c.pos]
            exact = ref64.forward(file, c)[c.pos]
            worst = max(worst, float((np.abs(c.logits - exact).max(1) /
                                      np.abs(exact).max(1)).max()))
        write(os.path.join(out, f"{name}.golden"), N_VOCAB, cases)
        print(f"{name:14} {os.path.getsize(path):7} {os.path.getsize(path[:-4] + 'golden'):8}"
              f"  {worst:.2e}")
        assert worst < 2e-5, "transformers and ref64 disagree"


if __name__ == "__main__":
    main()
