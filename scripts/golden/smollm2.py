# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 as a dequantised float32 transformers model with its tokenizer, all from the GGUF."""
import jinja2
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from ref64 import Gguf


def unpermute(w, n_head):
    """Rows of q or k from the GGUF's interleaved pairs to transformers' rotate-half order."""
    return w.reshape(n_head, w.shape[0] // n_head // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(
        w.shape)


def load(g: Gguf):
    heads, kv = g.key("attention.head_count"), g.key("attention.head_count_kv")
    cfg = LlamaConfig(
        vocab_size=g.key("vocab_size"), hidden_size=g.key("embedding_length"),
        intermediate_size=g.key("feed_forward_length"), num_hidden_layers=g.key("block_count"),
        num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=True,
        max_position_embeddings=g.key("context_length"),
        rms_norm_eps=g.key("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": g.key("rope.freq_base")},
        attn_implementation="eager")
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
             "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    state = {"model.embed_tokens.weight": g.f32("token_embd.weight"),
             "model.norm.weight": g.f32("output_norm.weight")}
    for i in range(cfg.num_hidden_layers):
        for hf, gg in names.items():
            w = g.f32(f"blk.{i}.{gg}.weight")
            if gg in ("attn_q", "attn_k"):
                w = unpermute(w, heads if gg == "attn_q" else kv)
            state[f"model.layers.{i}.{hf}.weight"] = w
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(cfg)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb.__init__(cfg)  # its frequencies are no parameters
    model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()})
    model.tie_weights()
    return model.eval()


def tokenizer(g: Gguf):
    words = g.meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in g.meta["tokenizer.ggml.merges"]]
    t = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(w, special=True) for w, kind in
                          zip(words, g.meta["tokenizer.ggml.token_type"]) if kind == 3])
    return t


def render(g: Gguf, turns):
    """transformers renders with these two options as well."""
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = env.from_string(g.meta["tokenizer.chat_template"])
    return template.render(messages=turns, add_generation_prompt=True)
