#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""Writes vocabularies (.ktv) and vectors (.vec) as the compact files the tokenizer tests read.

    tok_fixture.py INPUT OUTPUT.ktv [--pre NAME]
    tok_fixture.py INPUT OUTPUT.vec [--encoding NAME]

INPUT of a vocabulary: a GGUF file (its tokenizer metadata), a Hugging Face tokenizer.json, or a
.tiktoken file (specials of o200k_base are added); of vectors: .jsonl lines {"text","ids"}, or the
"EncodingName/Sample/Encoded" blocks of gpt-tokenizer.  Either may be compressed with xz.

A .vec holds records "LENGTH COUNT HASH\n", the text, "\n": bytes of the text, number of ids, FNV-1a
(64 bit) of the ids as little-endian 32-bit integers.

Layout, little-endian: "KTV1", u8 model (0 BPE, 1 SPM), u8 flags (1 add_bos, 2 add_eos,
4 add_space_prefix, 8 scores follow), u16 length and bytes of the pre-tokenizer's name,
i32 bos eos eot unk, u32 n_token, u32 n_merge; per token u8 attribute (bit 7: its text is the two
sides of the next merge not yet used so), else varint length and the text as GGUF stores it, then
with flag 8 an f32 score; per merge varint left and right id.  Only the standard library is needed.
"""

import argparse
import base64
import json
import lzma
import re
import struct

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def byte_alphabet():
    """GPT-2's printable character of every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table, extra = {}, 0
    for b in range(256):
        if b in printable:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def read_bytes(path):
    with (lzma.open if path.endswith(".xz") else open)(path, "rb") as f:
        return f.read()


class Vocab:
    def __init__(self):
        self.model, self.pre = "gpt2", ""
        self.tokens, self.attrs, self.scores, self.merges = [], [], None, []
        self.bos = self.eos = self.eot = self.unk = -1
        self.add_bos = self.add_eos = self.add_space_prefix = False


class GGUFMetadata:
    """The key-value part of a GGUF v2/v3 file."""

    SCALARS = {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }

    def __init__(self, path):
        self.data = read_bytes(path)
        magic, version, _, n_kv = struct.unpack_from("<4sIQQ", self.data)
        if magic != b"GGUF" or version not in (2, 3):
            raise SystemExit(f"{path}: not a GGUF v2/v3 file")
        self.pos, self.kv = 24, {}
        for _ in range(n_kv):
            key = self.string()
            self.kv[key] = self.value(self.scalar("I"))

    def scalar(self, fmt):
        (v,) = struct.unpack_from("<" + fmt, self.data, self.pos)
        self.pos += struct.calcsize("<" + fmt)
        return v

    def string(self):
        n = self.scalar("Q")
        self.pos += n
        return self.data[self.pos - n : self.pos].decode("utf-8", "surrogateescape")

    def value(self, kind):
        if kind == 8:
            return self.string()
        if kind == 9:
            elem, n = self.scalar("I"), self.scalar("Q")
            if elem in (8, 9):
                return [self.value(elem) for _ in range(n)]
            out = list(struct.unpack_from(f"<{n}{self.SCALARS[elem]}", self.data, self.pos))
            self.pos += struct.calcsize(f"<{n}{self.SCALARS[elem]}")
            return out
        return self.scalar(self.SCALARS[kind])


def from_gguf(path):
    kv = {k.removeprefix("tokenizer.ggml."): x for k, x in GGUFMetadata(path).kv.items()}
    v = Vocab()
    v.model, v.pre, v.tokens = kv["model"], kv.get("pre", ""), kv["tokens"]
    v.attrs = kv.get("token_type", [NORMAL] * len(v.tokens))
    v.scores = kv.get("scores") if v.model == "llama" else None
    index = {t: i for i, t in reversed(list(enumerate(v.tokens)))}
    v.merges = [tuple(index[s] for s in m.split(" ", 1)) for m in kv.get("merges", [])]
    v.bos, v.eos = kv.get("bos_token_id", -1), kv.get("eos_token_id", -1)
    v.eot, v.unk = kv.get("eot_token_id", -1), kv.get("unknown_token_id", -1)
    default_bos = v.model == "llama" or v.pre in ("llama-bpe", "llama3", "llama-v3")
    v.add_bos = kv.get("add_bos_token", default_bos)
    v.add_eos = kv.get("add_eos_token", False)
    v.add_space_prefix = kv.get("add_space_prefix", v.model == "llama")
    return v


def from_tokenizer_json(path):
    j = json.loads(read_bytes(path))
    v = Vocab()
    vocab = dict(j["model"]["vocab"])
    for t in j["added_tokens"]:
        vocab[t["content"]] = t["id"]
    v.tokens = [""] * (max(vocab.values()) + 1)
    for text, i in vocab.items():
        v.tokens[i] = text
    v.attrs = [NORMAL] * len(v.tokens)
    for t in j["added_tokens"]:
        v.attrs[t["id"]] = CONTROL if t["special"] else USER_DEFINED
    pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in j["model"]["merges"]]
    v.merges = [(vocab[a], vocab[b]) for a, b in pairs]
    return v


def from_tiktoken(path):
    """Ranks only: the merge that makes a token is found by merging its bytes with lower ranks."""
    ranks = {}
    for line in read_bytes(path).splitlines():
        text, rank = line.split()
        ranks[base64.b64decode(text)] = int(rank)
    alphabet = byte_alphabet()
    v = Vocab()
    v.tokens = [""] * (max(ranks.values()) + 1)
    v.attrs = [NORMAL] * len(v.tokens)
    for text, rank in sorted(ranks.items(), key=lambda x: x[1]):
        v.tokens[rank] = "".join(alphabet[b] for b in text)
        parts = [bytes([b]) for b in text]
        while len(parts) > 2:
            best = min(
                range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 30)
            )
            if ranks.get(parts[best] + parts[best + 1], 1 << 30) >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            v.merges.append((ranks[parts[0]], ranks[parts[1]]))
    if "o200k" in path:
        add_specials(v, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018})
        v.eos = 199999
    return v


def add_specials(v, specials, attr=CONTROL):
    """specials: {text: id}; fills gaps with unused tokens."""
    for text, i in specials.items():
        while len(v.tokens) <= i:
            v.attrs.append(5)
            v.tokens.append(f"[PAD{len(v.tokens)}]")
        v.tokens[i], v.attrs[i] = text, attr


def varint(n):
    out = bytearray()
    while n >= 0x80:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def write(v, path):
    flags = v.add_bos | v.add_eos << 1 | v.add_space_prefix << 2 | (v.scores is not None) << 3
    pre = v.pre.encode()
    out = bytearray(b"KTV1" + struct.pack("<BBH", v.model == "llama", flags, len(pre)) + pre)
    out += struct.pack("<iiiiII", v.bos, v.eos, v.eot, v.unk, len(v.tokens), len(v.merges))
    used = 0
    for i, (text, attr) in enumerate(zip(v.tokens, v.attrs)):
        if used < len(v.merges) and text == "".join(v.tokens[s] for s in v.merges[used]):
            used += 1
            out.append(attr | 0x80)
        else:
            raw = text.encode("utf-8", "surrogateescape")
            out += bytes([attr]) + varint(len(raw)) + raw
        if v.scores is not None:
            out += struct.pack("<f", v.scores[i])
    for left, right in v.merges:
        out += varint(left) + varint(right)
    with open(path, "wb") as f:
        f.write(out)


def read_any(path):
    name = path.removesuffix(".xz")
    if name.endswith(".json"):
        return from_tokenizer_json(path)
    return from_tiktoken(path) if name.endswith(".tiktoken") else from_gguf(path)


def read_vectors(path, encoding):
    text = read_bytes(path).decode("utf-8")
    if path.removesuffix(".xz").endswith(".jsonl"):
        return [(j["text"], j["ids"]) for j in map(json.loads, text.splitlines())]
    block = re.compile(r"EncodingName: (.*)\nSample: (.*)\nEncoded: \[(.*)\]")
    return [
        (s, [int(i) for i in ids.split(",") if i.strip()])
        for name, s, ids in block.findall(text)
        if name == encoding
    ]


def write_vectors(vectors, path):
    with open(path, "wb") as f:
        for text, ids in vectors:
            h = 0xCBF29CE484222325
            for b in struct.pack(f"<{len(ids)}i", *ids):
                h = (h ^ b) * 0x100000001B3 & (1 << 64) - 1
            raw = text.encode("utf-8")
            f.write(b"%d %d %016x\n%s\n" % (len(raw), len(ids), h, raw))


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("input")
    ap.add_argument("output")
    ap.add_argument("--pre")
    ap.add_argument("--encoding", default="o200k_base")
    a = ap.parse_args()
    if a.output.endswith(".vec"):
        write_vectors(read_vectors(a.input, a.encoding), a.output)
        return
    v = read_any(a.input)
    if a.pre is not None:
        v.pre = a.pre
    write(v, a.output)


if __name__ == "__main__":
    main()
