# SPDX-License-Identifier: Apache-2.0
"""A model that says what a test wants: a GGUF file whose next token follows from the last alone.

Attention and feed-forward weights are zero, so the last token's embedding decides.  Each token of a
script has a random one, which the output row of its successor repeats.  A script begins behind a
control token, which the chat template writes."""
import array
import random
import struct

WIDTH = 64        # of embeddings: random signs of two tokens agree by far less
HEAD = 16
FF = 32
CONTEXT = 1 << 18
U32, F32, STR, ARR, I32 = 4, 6, 8, 9, 5
NORMAL, CONTROL = 1, 3
END = "<|im_end|>"


def byte_letters():
    """The letters that GPT-2's vocabularies write bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


LETTERS = byte_letters()


def written(text):
    return "".join(LETTERS[b] for b in text.encode())


def string(s):
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, value):
    forms = {U32: lambda: struct.pack("<I", value), F32: lambda: struct.pack("<f", value),
             STR: lambda: string(value)}
    return string(key) + struct.pack("<I", kind) + forms[kind]()


def entries(key, kind, items):
    data = b"".join(map(string, items)) if kind == STR else struct.pack(f"<{len(items)}i", *items)
    return string(key) + struct.pack("<IIQ", ARR, kind, len(items)) + data


def vocabulary(scripts):
    """Texts and types of tokens, and by token its successor."""
    texts, types, follows = [LETTERS[b] for b in range(256)], [NORMAL] * 256, {}
    for text in ("<|im_start|>", END, *scripts):
        texts.append(text)
        types.append(CONTROL)
    end = texts.index(END)
    for mark, pieces in scripts.items():
        last = texts.index(mark)
        for piece in pieces:
            assert written(piece) not in texts, piece  # a token has one successor
            texts.append(written(piece))
            types.append(NORMAL)
            follows[last] = last = len(texts) - 1
        follows[last] = end
    return texts, types, follows


def matrices(n, follows, end):
    """Embeddings and output rows, as floats."""
    draw = random.Random(1)
    rows = [[draw.choice((-1.0, 1.0)) for _ in range(WIDTH)] for _ in range(n)]
    out = [[0.0] * WIDTH for _ in range(n)]
    for token, successor in follows.items():
        out[successor] = [a + b for a, b in zip(out[successor], rows[token])]
    flat = lambda m: array.array("f", [x for row in m for x in row]).tobytes()
    return flat(rows), flat(out)


def write(path, scripts, template):
    """scripts: by control token, the texts that follow it, each a token of its own."""
    texts, types, follows = vocabulary(scripts)
    n, end = len(texts), texts.index(END)
    embedding, output = matrices(n, follows, end)
    keys = [entry("general.architecture", STR, "llama"), entry("general.name", STR, "scripted"),
            entry("llama.context_length", U32, CONTEXT),
            entry("llama.embedding_length", U32, WIDTH),
            entry("llama.block_count", U32, 1), entry("llama.feed_forward_length", U32, FF),
            entry("llama.attention.head_count", U32, 1),
            entry("llama.attention.head_count_kv", U32, 1),
            entry("llama.attention.key_length", U32, HEAD),
            entry("llama.attention.value_length", U32, HEAD),
            entry("llama.rope.dimension_count", U32, HEAD),
            entry("llama.rope.freq_base", F32, 1e6),
            entry("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
            entry("tokenizer.ggml.model", STR, "gpt2"), entry("tokenizer.ggml.pre", STR, "gpt-2"),
            entries("tokenizer.ggml.tokens", STR, texts),
            entries("tokenizer.ggml.token_type", I32, types),
            entries("tokenizer.ggml.merges", STR, ["Ġ Ġ"]),
            entry("tokenizer.ggml.bos_token_id", U32, end),
            entry("tokenizer.ggml.eos_token_id", U32, end),
            entry("tokenizer.chat_template", STR, template)]
    zeros = lambda *dims: (dims, bytes(4 * dims[0] * (dims[1] if len(dims) > 1 else 1)))
    ones = ((WIDTH,), array.array("f", [1.0] * WIDTH).tobytes())
    tensors = {"token_embd.weight": ((WIDTH, n), embedding), "output.weight": ((WIDTH, n), output),
               "output_norm.weight": ones, "blk.0.attn_norm.weight": ones,
               "blk.0.ffn_norm.weight": ones, "blk.0.attn_q.weight": zeros(WIDTH, HEAD),
               "blk.0.attn_k.weight": zeros(WIDTH, HEAD), "blk.0.attn_v.weight": zeros(WIDTH, HEAD),
               "blk.0.attn_output.weight": zeros(HEAD, WIDTH),
               "blk.0.ffn_gate.weight": zeros(WIDTH, FF), "blk.0.ffn_up.weight": zeros(WIDTH, FF),
               "blk.0.ffn_down.weight": zeros(FF, WIDTH)}
    head, data = b"", b""
    for name, (dims, values) in tensors.items():
        head += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, len(data))
        data += values + bytes(-len(values) % 32)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)) + b"".join(keys) + head
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % 32) + data)


def call(name, arguments):
    """Pieces of a script that is a call in Hermes' form; arguments: JSON."""
    return [f'<tool_call>\n{{"name": "{name}"', f', "arguments": {arguments}}}\n</tool_call>']


def template(starts, done="<|done|>"):
    """Hermes' form; the answer begins with the mark of the first tool that has one, and behind a
    result, or without such a tool, with `done`."""
    by_tool = "".join(f"{{% if t.function.name == '{name}' and ns.mark == '{done}' %}}"
                      f"{{% set ns.mark = '{mark}' %}}{{% endif %}}"
                      for name, mark in starts.items())
    return (f"{{% set ns = namespace(mark='{done}') %}}"
            "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n"
            "{% if messages[-1].role != 'tool' %}" + by_tool + "{% endif %}{% endfor %}"
            "A call is <tool_call>{\"name\": <name>, \"arguments\": <object>}</tool_call>"
            "<|im_end|>\n{% endif %}"
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
            "{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{{ ns.mark }}{% endif %}")
