#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares our tokenizers with the reference implementations on generated strings.

    tok-diff.py --tool TOK_DUMP [--count 10000] [--seed 1] [--out tests/golden/tok-diff.txt]
                [NAME=VOCAB.ktv ...]

TOK_DUMP is the test program tests/tools/tok_dump.c; without --tool it is compiled to a temporary
folder with $CC.  NAME is one of smollm, gpt-2, llama-bpe, qwen2 (against Hugging Face
`tokenizers`), gpt-4o (against `tiktoken`) and spm, spm-llama (against `sentencepiece`); without
any, the vocabularies stored under tests/data/tok.  scripts/get-vocabs fetches those that are not.
Each string is encoded twice: with no byte trusted, against the reference where control tokens are
text, and wholly trusted, against the reference with them (not for sentencepiece, which has no such
mode).  User-defined tokens are tokens in both.
The ids must also stream back to the text where the reference loses nothing.
Needs: tokenizers, tiktoken, sentencepiece, protobuf.
"""

import argparse
import os
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata
from importlib.metadata import version

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import tok_fixture

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, "tests", "data", "tok")
STORED = {
    "smollm": "smollm2",
    "gpt-2": "gpt-2",
    "qwen2": "qwen3",
    "gpt-4o": "o200k",
    "spm": "phi-3",
}
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = {
    "llama-bpe": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

# ---- strings -----------------------------------------------------------------------

# fmt: off
CODE = """for while if else return int char * ( ) { } [ ] ; , . -> => == != <= >= += && || // /* */
#include <stdio.h> def self None True lambda import from class print( 0x1F 1e-9 3.14 "str" 'c' \\n
\\t %s {} $x @a snake_case camelCase CamelCase SCREAMING_CASE HTTPServer x86_64 std::vector<T> i++
a[i] ~/bin \\\\ ``` --- SELECT * FROM </div> <a href=""> &amp; http://example.org/a?b=c#d
user@example.org""".split()
WORDS = """the quick Brown FOX jumps over lazy dogs it's I'm you're we've they'll he'd IT'S DON'T
o'clock 'tis naïve façade Zürich straße Ärger Łódź İstanbul ıssız ǅungla ʼn ſo ﬁne Ελλάδα Привет
мир שלום مرحبا नमस्ते ไทย 日本語 テスト ｶﾀｶﾅ 한국어 中文字 漢字 𠮷野家 tiếng Việt résumé ½ ² Ⅷ ①
٣٤٥ ३४५ １２３ 10,000.50""".split()
EMOJI = "😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 ❤️ 🇫🇷 ☎ ✅ 1️⃣ 🫠 ™ © → ∑ √ ≈".split()
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", " \n", "\n ", " \n \n  ", "\u00a0",
          "\u3000", "\u2003", "\u2028", "\u0085", "\v", "\f", "\u200b", "\ufeff", "\u1680",
          "\u202f", " " * 17, "\t\t\t", "\u001c", "\u180e"]
BITS = ["'", "'s", "'S", "'ſ", "'LL", "'l", "'Re", "'r", "’s", "\u0301", "\u0323\u0301",
        "\u0301\u0323", "e\u0301", "a\u0328\u0301", "\u1100\u1161\u11a8", "\uac00\u11a8", "\u0344",
        "\u212b", "\u0958", "\ufb1d", "\u2126", "\u0b95\u0bbe", "/", "//", "!", "...", "?!", "-",
        "_", "\u2581", "\u2581a", "Ġ", "Ċ", "<0x0A>", "\x00", "\x7f", "\x1b", "\ufffd",
        "\U0010ffff", "\ue000", "A", "aB", "Ab", "ABc", "ǅ", "ʰ", "a\u0301B", "ªº", "ⅷ"]
# fmt: on


class Strings:
    def __init__(self, seed, specials):
        self.rng = random.Random(seed)
        self.specials = specials or ["<|im_end|>"]
        old = unicodedata.ucd_3_2_0
        # Characters of Unicode 3.2: every library knows them, categories have hardly changed since.
        self.any = [
            c
            for c in range(0x30000)
            if old.category(chr(c)) not in ("Cs", "Cn")
            and old.category(chr(c)) == unicodedata.category(chr(c))
        ]
        self.blocks = [
            [c for c in self.any if b <= c < b + 0x180] for b in range(0, 0x30000, 0x180)
        ]
        self.blocks = [b for b in self.blocks if b]

    def piece(self, kind):
        r = self.rng
        if kind == "code":
            return r.choice(CODE) + r.choice(["", " ", " ", "\n", "\n    ", "\n\t"])
        if kind == "words":
            return r.choice(WORDS) + r.choice(["", " ", " ", ", ", ". ", "'s ", "\n"])
        if kind == "cjk":
            return "".join(
                chr(
                    r.choice(
                        (
                            r.randrange(0x4E00, 0x9FA6),
                            r.randrange(0x3041, 0x3097),
                            r.randrange(0xAC00, 0xD7A4),
                        )
                    )
                )
                for _ in range(r.randint(1, 5))
            )
        if kind == "emoji":
            return r.choice(EMOJI)
        if kind == "digits":
            return "".join(r.choice("0123456789") for _ in range(r.randint(1, 9))) + r.choice(
                ["", ".", ",", " "]
            )
        if kind == "spaces":
            return r.choice(SPACES)
        if kind == "bits":
            return r.choice(BITS)
        if kind == "specials":
            s = r.choice(self.specials)
            return r.choice(
                [s, s, s[: r.randint(0, len(s))], s + s, s.upper(), s + "'s", " " + s]
            )
        if kind == "run":
            return r.choice([r.choice("aA !.=-\n0'"), "ab", chr(r.choice(self.any))]) * r.randint(
                2, 80
            )
        if kind == "block":
            b = r.choice(self.blocks)
            return "".join(chr(r.choice(b)) for _ in range(r.randint(1, 6)))
        return chr(r.choice(self.any))

    def make(self):
        r = self.rng
        kinds = [
            "code",
            "words",
            "cjk",
            "emoji",
            "digits",
            "spaces",
            "bits",
            "specials",
            "run",
            "block",
            "any",
        ]
        if r.random() < 0.5:  # of one kind, with a little white space
            kinds = [r.choice(kinds), r.choice(kinds), "spaces"]
        text = "".join(self.piece(r.choice(kinds)) for _ in range(r.randint(1, 24)))
        return unicodedata.normalize(r.choice(["NFC", "NFD"]), text) if r.random() < 0.2 else text


# ---- references --------------------------------------------------------------------


def read_ktv(path):
    """(pre, tokens, attrs, scores, merges) of a stored vocabulary."""
    with open(path, "rb") as f:
        d = f.read()
    flags, (n_pre,) = d[5], struct.unpack_from("<H", d, 6)
    pos = 8 + n_pre + 16
    n_token, n_merge = struct.unpack_from("<II", d, pos)
    pos += 8

    def varint():
        nonlocal pos
        v = shift = 0
        while True:
            b = d[pos]
            pos += 1
            v |= (b & 0x7F) << shift
            shift += 7
            if b < 0x80:
                return v

    tokens, attrs, scores = [], [], []
    for _ in range(n_token):
        a = d[pos]
        pos += 1
        attrs.append(a & 0x7F)
        if a & 0x80:
            tokens.append(None)
        else:
            n = varint()
            tokens.append(d[pos : pos + n].decode("utf-8", "surrogateescape"))
            pos += n
        if flags & 8:
            scores += struct.unpack_from("<f", d, pos)
            pos += 4
    merges = [(varint(), varint()) for _ in range(n_merge)]
    derived = iter(merges)
    for i, t in enumerate(tokens):
        if t is None:
            a, b = next(derived)
            tokens[i] = tokens[a] + tokens[b]
    return tokens, attrs, scores, merges


class HuggingFace:
    def __init__(self, name, ktv):
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            models,
            normalizers,
            pre_tokenizers as pt,
        )

        tokens, attrs, _, merges = read_ktv(ktv)
        self.specials = [t for t, a in zip(tokens, attrs) if a in (3, 4)]
        byte_level = pt.ByteLevel(add_prefix_space=False, use_regex=name in ("gpt-2", "smollm"))
        if name == "smollm":
            pre = pt.Sequence([pt.Digits(individual_digits=True), byte_level])
        elif name == "gpt-2":
            pre = byte_level
        else:
            pre = pt.Sequence([pt.Split(Regex(PUBLISHED[name]), "isolated"), byte_level])

        # Added tokens stay in the model's vocabulary so that their ids are the file's.
        self.t = Tokenizer(
            models.BPE(
                vocab={s: i for i, s in enumerate(tokens)},
                merges=[(tokens[a], tokens[b]) for a, b in merges],
                ignore_merges=name == "llama-bpe",
            )
        )
        self.t.pre_tokenizer = pre
        if name == "qwen2":
            self.t.normalizer = normalizers.NFC()
        for s, a in zip(tokens, attrs):
            if a in (3, 4):
                added = AddedToken(s, normalized=False, special=a == 3)
                (self.t.add_special_tokens if a == 3 else self.t.add_tokens)([added])
        self.what = f"tokenizers {version('tokenizers')}"

    def encode(self, text, trusted):
        self.t.encode_special_tokens = not trusted
        return self.t.encode(text, add_special_tokens=False).ids


class TikToken:
    def __init__(self, name, ktv):
        import tiktoken

        tokens, attrs, _, _ = read_ktv(ktv)
        byte_of = {c: b for b, c in tok_fixture.byte_alphabet().items()}
        ranks = {
            bytes(byte_of[c] for c in t): i
            for i, (t, a) in enumerate(zip(tokens, attrs))
            if a == 1
        }
        special = {t: i for i, (t, a) in enumerate(zip(tokens, attrs)) if a in (3, 4)}
        self.specials = list(special)
        self.enc = tiktoken.Encoding(
            name, pat_str=PUBLISHED[name], mergeable_ranks=ranks, special_tokens=special
        )
        self.what = f"tiktoken {version('tiktoken')}"

    def encode(self, text, trusted):
        return (
            self.enc.encode(text, allowed_special="all")
            if trusted
            else self.enc.encode_ordinary(text)
        )


class SentencePiece:
    def __init__(self, _, ktv):
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2 as pb

        tokens, attrs, scores, _ = read_ktv(ktv)
        m = pb.ModelProto()
        kind = {
            1: 1,
            2: 2,
            3: 3,
            4: 3,
            5: 5,
            6: 6,
        }  # user-defined as control: text never becomes one
        n = 32000  # beyond are the added tokens of the model's family
        for i, (t, a, s) in enumerate(list(zip(tokens, attrs, scores))[:n]):
            m.pieces.add(piece=t, score=s, type=2 if i == 0 else kind[a])
        m.trainer_spec.model_type = pb.TrainerSpec.BPE
        m.trainer_spec.byte_fallback = True
        m.trainer_spec.vocab_size = n
        m.normalizer_spec.name = "identity"
        m.normalizer_spec.add_dummy_prefix = True
        m.normalizer_spec.remove_extra_whitespaces = False
        m.normalizer_spec.escape_whitespaces = True
        self.sp = sentencepiece.SentencePieceProcessor(model_proto=m.SerializeToString())
        self.specials = [t for t, a in zip(tokens, attrs) if a == 3]
        self.user = [t for t, a in zip(tokens, attrs) if a == 4]
        self.what = f"sentencepiece {version('sentencepiece')}"

    def encode(self, text, trusted):
        # A space goes before every segment, as in Llama's reference; sentencepiece has no segments.
        return None if trusted or any(u in text for u in self.user) else self.sp.encode(text)


REFERENCE = {
    "smollm": HuggingFace,
    "gpt-2": HuggingFace,
    "llama-bpe": HuggingFace,
    "qwen2": HuggingFace,
    "gpt-4o": TikToken,
    "spm": SentencePiece,
    "spm-llama": SentencePiece,
}

# ---- comparison --------------------------------------------------------------------


def build_tool(folder):
    src = [
        os.path.join(ROOT, p)
        for p in ("tests/tools/tok_dump.c", "tests/support/ktv.c", "src/text/utf8.c")
    ]
    text, base = os.path.join(ROOT, "src/text"), os.path.join(ROOT, "src/base")
    src += sorted(
        os.path.join(text, f)
        for f in os.listdir(text)
        if f.startswith("tok") and f.endswith(".c")
    )
    src += [os.path.join(base, f + ".c") for f in ("alloc", "buf", "misc", "status")]
    tool = os.path.join(folder, "tok_dump")
    inc = ["-I" + os.path.join(ROOT, d) for d in ("src", "include", "tests")]
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            "-std=gnu11",
            "-O2",
            *inc,
            *src,
            "-lutf8proc",
            "-lm",
            "-pthread",
            "-o",
            tool,
        ],
        check=True,
    )
    return tool


def ours(tool, ktv, pre, texts, trusted):
    request = b"".join(struct.pack("<II", len(t), trusted) + t for t in texts)
    argv = [tool, ktv] + ([pre] if pre else [])
    out = subprocess.run(argv, input=request, stdout=subprocess.PIPE, check=True).stdout
    pos, result = 0, []
    for _ in texts:
        (n,) = struct.unpack_from("<I", out, pos)
        ids = list(struct.unpack_from(f"<{n}i", out, pos + 4))
        (n_text,) = struct.unpack_from("<I", out, pos + 4 + 4 * n)
        pos += 8 + 4 * n + n_text
        result.append((ids, out[pos - n_text : pos]))
    return result


def same_text(name, back, text, unsaid):
    """Whether ids stream back to their text, apart from what the tokenizer itself gives up."""
    if name == "qwen2":
        return unicodedata.normalize("NFC", back) == unicodedata.normalize("NFC", text)
    if name.startswith("spm"):
        return back.removeprefix(" ") == text.replace("\u2581", " ")
    return back == text or any(b in unsaid for b in text.encode("utf-8"))


def compare(tool, name, ktv, count, seed):
    ref = REFERENCE[name](name, ktv)
    gen = Strings(seed, ref.specials)
    texts = [gen.make() for _ in range(count)]
    raw = [t.encode("utf-8") for t in texts]
    known = set(read_ktv(ktv)[0])
    unsaid = {b for b, c in tok_fixture.byte_alphabet().items() if c not in known}
    n_compared = n_diff = n_back = n_token = 0
    for trusted in (False, True):
        for text, (ids, back) in zip(
            texts, ours(tool, ktv, "" if name.startswith("spm") else name, raw, trusted)
        ):
            want = ref.encode(text, trusted)
            if want is None:
                continue
            n_compared += 1
            n_token += len(want)
            if ids != want:
                n_diff += 1
                if n_diff <= 5:
                    print(f"{name}, trusted {trusted}: {text!r}", file=sys.stderr)
                    print(f"  ours {ids}\n  ref  {want}", file=sys.stderr)
            n_back += not same_text(name, back.decode("utf-8"), text, unsaid)
    line = (
        f"{name:10} {os.path.basename(ktv):14} {ref.what:22} strings {count} "
        f"encodings {n_compared} tokens {n_token} different {n_diff} "
        f"not decoding to the text {n_back}"
    )
    print(line, flush=True)
    return n_diff + n_back, line


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--tool")
    ap.add_argument("--count", type=int, default=10000)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out")
    ap.add_argument("vocab", nargs="*", metavar="NAME=VOCAB.ktv")
    a = ap.parse_args()
    vocabs = dict(v.split("=", 1) for v in a.vocab)
    if not vocabs:
        vocabs = {n: os.path.join(DATA, f + ".ktv") for n, f in STORED.items()}
    with tempfile.TemporaryDirectory() as folder:
        tool = a.tool or build_tool(folder)
        results = [compare(tool, n, p, a.count, a.seed) for n, p in vocabs.items()]
    if a.out:
        with open(a.out, "w", encoding="utf-8") as f:
            f.write(
                f"scripts/tok-diff.py --count {a.count} --seed {a.seed} "
                f"(Python {sys.version.split()[0]}, its Unicode {unicodedata.unidata_version})\n"
            )
            f.writelines(line + "\n" for _, line in results)
    return 1 if any(n for n, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
