# SPDX-License-Identifier: Apache-2.0
"""Golden logits: the byte layout that tests/data/tiny/README.md describes, read and written."""
import dataclasses
import struct

import numpy as np

MAGIC = b"KDGL"
VERSION = 1
AUTO, NONE, LINEAR, YARN = range(4)
GROWTH = 1  # flag: these tokens are the previous case's and one more (decode one step at a time)


@dataclasses.dataclass
class Case:
    tokens: list
    pos: list
    kind: int = AUTO
    factor: float = 1.0
    orig_ctx: int = 0
    flags: int = 0
    logits: np.ndarray = None  # float32 [len(pos)][n_vocab]


def write(path, n_vocab, cases):
    with open(path, "wb") as f:
        f.write(struct.pack("<4sIII", MAGIC, VERSION, n_vocab, len(cases)))
        for c in cases:
            f.write(struct.pack("<IfIII", c.kind, c.factor, c.orig_ctx, c.flags, len(c.tokens)))
            f.write(np.asarray(c.tokens, "<u4").tobytes())
            f.write(struct.pack("<I", len(c.pos)))
            f.write(np.asarray(c.pos, "<u4").tobytes())
            assert c.logits.shape == (len(c.pos), n_vocab)
            f.write(np.asarray(c.logits, "<f4").tobytes())


def read(path):
    data = open(path, "rb").read()
    magic, version, n_vocab, n_case = struct.unpack_from("<4sIII", data)
    assert magic == MAGIC and version == VERSION
    at = 16
    cases = []

    def take(n, kind):
        nonlocal at
        v = np.frombuffer(data, kind, n, at)
        at += 4 * n
        return v

    for _ in range(n_case):
        kind, factor, orig_ctx, flags, n_token = struct.unpack_from("<IfIII", data, at)
        at += 20
        tokens = take(n_token, "<u4").tolist()
        n_pos = int(take(1, "<u4")[0])
        pos = take(n_pos, "<u4").tolist()
        logits = take(n_pos * n_vocab, "<f4").reshape(n_pos, n_vocab)
        cases.append(Case(tokens, pos, kind, factor, orig_ctx, flags, logits))
    assert at == len(data)
    return n_vocab, cases


def write_windows(path, windows):
    """Token windows for bench/peers/llama_logits: [(tokens, positions)]."""
    with open(path, "wb") as f:
        f.write(struct.pack("<I", len(windows)))
        for tokens, pos in windows:
            f.write(struct.pack("<II", len(tokens), len(pos)))
            f.write(np.asarray(list(tokens) + list(pos), "<u4").tobytes())
