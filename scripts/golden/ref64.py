# SPDX-License-Identifier: Apache-2.0
"""An own forward pass in numpy float64, straight from a GGUF file.

It shares no code with transformers or with KVDrive, so it checks the golden files from a second
side (names, permutation, RoPE variants), and it tells how much of a tolerance float32 noise takes.
"""
import math

import gguf
import numpy as np

from goldenfile import AUTO, LINEAR, YARN


class Gguf:
    """Metadata as plain values and tensors dequantised to float64 on demand."""

    def __init__(self, path):
        self.reader = gguf.GGUFReader(path)
        self.meta = {k: f.contents() for k, f in self.reader.fields.items()}
        self.arch = self.meta["general.architecture"]
        self.tensors = {t.name: t for t in self.reader.tensors}

    def key(self, name, default=None):
        return self.meta.get(f"{self.arch}.{name}", default)

    def has(self, name):
        return name in self.tensors

    def f32(self, name):
        t = self.tensors[name]
        shape = tuple(int(n) for n in reversed(t.shape))
        return gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(shape)

    def f64(self, name):
        return self.f32(name).astype(np.float64)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def yarn(freq, base, n_rot, factor, orig, fast=32.0, slow=1.0):
    def dim(turns):
        return n_rot * math.log(orig / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dim(fast)), 0)
    high = min(math.ceil(dim(slow)), n_rot - 1)
    ramp = np.clip((np.arange(n_rot // 2) - low) / max(high - low, 0.001), 0, 1)
    return freq / factor * ramp + freq * (1 - ramp), 0.1 * math.log(factor) + 1.0


def rope_table(g, n_token, n_rot, case):
    """Angles' cos and sin [n_token][n_rot / 2], scaled, for a whole sequence of n_token."""
    base = g.key("rope.freq_base", 10000.0)
    freq = base ** (-np.arange(0, n_rot, 2, dtype=np.float64) / n_rot)
    scale = 1.0
    kind, factor, orig = case.kind, case.factor, case.orig_ctx
    context = g.key("context_length")
    if kind == AUTO:
        kind = {"linear": LINEAR, "yarn": YARN}.get(g.key("rope.scaling.type"))
        factor = g.key("rope.scaling.factor", 1.0)
        orig = g.key("rope.scaling.original_context_length", context)
    if kind == LINEAR:
        freq = freq / factor
    elif kind == YARN:
        freq, scale = yarn(freq, base, n_rot, factor, orig or context)
    if g.has("rope_freqs.weight"):
        freq = freq / g.f64("rope_freqs.weight")
    if g.has("rope_factors_long.weight"):
        switch = g.key("rope.scaling.original_context_length")
        name = "long" if n_token > switch else "short"
        freq = freq / g.f64(f"rope_factors_{name}.weight")
        scale = g.key("rope.scaling.attn_factor", 1.0)
    angle = np.arange(n_token)[:, None] * freq[None, :]
    return np.cos(angle) * scale, np.sin(angle) * scale


def rotate(x, cos, sin, interleaved):
    """x [n_token][n_head][head]; turns the first 2 * cos.shape[1] entries of every head."""
    half = cos.shape[1]
    y = x.copy()
    if interleaved:
        a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        a, b = slice(0, half), slice(half, 2 * half)
    c, s = cos[:, None, :], sin[:, None, :]
    y[..., a] = x[..., a] * c - x[..., b] * s
    y[..., b] = x[..., a] * s + x[..., b] * c
    return y


def split_qkv(g, p, h, width_q, width_kv):
    if g.has(p + "attn_qkv.weight"):
        qkv = h @ g.f64(p + "attn_qkv.weight").T
        return np.split(qkv, [width_q, width_q + width_kv], axis=-1)
    out = []
    for n in "qkv":
        y = h @ g.f64(f"{p}attn_{n}.weight").T
        if g.has(f"{p}attn_{n}.bias"):
            y = y + g.f64(f"{p}attn_{n}.bias")
        out.append(y)
    return out


def attention(q, k, v):
    """q [n][n_head][head], k and v [n][n_kv_head][head], causal."""
    n, n_head, head = q.shape
    group = n_head // k.shape[1]
    hide = np.triu(np.full((n, n), -np.inf), 1)
    out = np.empty_like(q)
    for i in range(n_head):
        s = q[:, i] @ k[:, i // group].T / math.sqrt(head) + hide
        out[:, i] = softmax(s) @ v[:, i // group]
    return out.reshape(n, n_head * head)


def feed_forward(g, p, h):
    up = h @ g.f64(p + "ffn_up.weight").T
    if g.has(p + "ffn_gate.weight"):
        gate = h @ g.f64(p + "ffn_gate.weight").T
    else:
        gate, up = np.split(up, 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ g.f64(p + "ffn_down.weight").T


def forward(g, case):
    """Logits of all positions, float64 [n_token][n_vocab]."""
    n = len(case.tokens)
    n_head, n_kv = g.key("attention.head_count"), g.key("attention.head_count_kv")
    head = g.key("attention.key_length", g.key("embedding_length") // n_head)
    eps = g.key("attention.layer_norm_rms_epsilon")
    cos, sin = rope_table(g, n, g.key("rope.dimension_count", head), case)
    interleaved = g.arch == "llama"
    x = g.f64("token_embd.weight")[np.asarray(case.tokens)]
    for i in range(g.key("block_count")):
        p = f"blk.{i}."
        h = rms_norm(x, g.f64(p + "attn_norm.weight"), eps)
        q, k, v = split_qkv(g, p, h, n_head * head, n_kv * head)
        q, k, v = q.reshape(n, n_head, head), k.reshape(n, n_kv, head), v.reshape(n, n_kv, head)
        if g.has(p + "attn_q_norm.weight"):
            q = rms_norm(q, g.f64(p + "attn_q_norm.weight"), eps)
            k = rms_norm(k, g.f64(p + "attn_k_norm.weight"), eps)
        q, k = rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
        x = x + attention(q, k, v) @ g.f64(p + "attn_output.weight").T
        x = x + feed_forward(g, p, rms_norm(x, g.f64(p + "ffn_norm.weight"), eps))
    x = rms_norm(x, g.f64("output_norm.weight"), eps)
    head_name = "output.weight" if g.has("output.weight") else "token_embd.weight"
    return x @ g.f64(head_name).T
