# SPDX-License-Identifier: Apache-2.0
"""A model that says what it is told to: a GGUF file whose next token depends on the last one alone.

Each piece of the text is a token of its own that leads to the next; the last leads to the end.
What a prompt ends with leads to the first piece.  Grammars may make the model go other ways.
"""
import struct

PRE = "gpt-2"
N = 32  # of a head; all sizes are multiples of it


def byte_alphabet():
    """Text of every byte as GPT-2's vocabularies spell it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(odd)}}


def text_of(s):
    letters = byte_alphabet()
    return "".join(letters[b] for b in s.encode())


def put_string(s):
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def put_value(v):
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + put_string(v)
    kind = 8 if isinstance(v[0], str) else 5
    items = b"".join(put_string(x) if kind == 8 else struct.pack("<i", x) for x in v)
    return struct.pack("<IIQ", 9, kind, len(v)) + items


def vocabulary(pieces, marks):
    """(tokens, types, number of the end, numbers of the pieces).  marks: control tokens; a piece
    may be one."""
    tokens = [text_of(chr(b)) if b < 128 else byte_alphabet()[b] for b in range(256)]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *marks]
    tokens += control
    types = [1] * 256 + [3] * len(control)
    chain = []
    for p in pieces:
        if p in control:
            chain.append(256 + control.index(p))
            continue
        assert text_of(p) not in tokens and p, f"a piece has to be there once: {p!r}"
        chain.append(len(tokens))
        tokens.append(text_of(p))
        types.append(1)
    assert len(set(chain)) == len(chain), "a mark is a piece once"
    while len(tokens) % N:
        tokens.append(f"<|unused{len(tokens)}|>")
        types.append(5)
    return tokens, types, 258, chain


def tensors(n, ends, chain, after, end):
    """Name, shape, rows of numbers: a row has one that is not 0.  What ends a prompt leads to
    chain[0]; the last of
    it to `after`, all others to the end."""
    follow = [end] * n
    for token in ends:
        follow[token] = chain[0]
    for a, b in zip(chain, [*chain[1:], after]):
        follow[a] = b
    eye = [[(i, 1.0)] for i in range(n)]
    out = [[] for _ in range(n)]
    for token, to in enumerate(follow):
        out[to].append((token, 1.0))
    none = [[] for _ in range(n)]
    ones = [[(i, 1.0) for i in range(n)]]
    yield "token_embd.weight", (n, n), eye
    yield "output.weight", (n, n), out
    yield "output_norm.weight", (n,), ones
    for name in ("attn_norm", "ffn_norm"):
        yield f"blk.0.{name}.weight", (n,), ones
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        yield f"blk.0.{name}.weight", (n, n), none


def write(path, pieces, marks=(), ends="\n", again=False):
    """The model's file.  ends: characters, or a mark, that a prompt may end with; again: the last
    piece leads to the first."""
    tokens, types, end, chain = vocabulary(pieces, marks)
    n = len(tokens)
    last = [tokens.index(ends)] if ends in marks else [b for c in ends for b in c.encode()]
    meta = {
        "general.architecture": "llama", "general.name": "parrot", "general.alignment": 32,
        "llama.block_count": 1, "llama.context_length": 4096, "llama.embedding_length": n,
        "llama.feed_forward_length": n, "llama.attention.head_count": n // N,
        "llama.attention.head_count_kv": n // N, "llama.rope.dimension_count": N,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": n,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": PRE, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": end, "tokenizer.ggml.bos_token_id": 256}
    head, data, at, count = b"", b"", 0, 0
    for name, shape, rows in tensors(n, last, chain, chain[0] if again else end, end):
        flat = bytearray(4 * n * len(rows))
        for i, row in enumerate(rows):
            for k, x in row:
                struct.pack_into("<f", flat, 4 * (i * n + k), x)
        head += put_string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", d) for d in shape) + struct.pack("<IQ", 0, at)
        data += bytes(flat) + b"\0" * (-len(flat) % 32)
        at = len(data)
        count += 1
    top = struct.pack("<IIQQ", 0x46554747, 3, count, len(meta))
    top += b"".join(put_string(k) + put_value(v) for k, v in meta.items()) + head
    with open(path, "wb") as f:
        f.write(top + b"\0" * (-len(top) % 32) + data)
