#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tiny models through llama.cpp and compares with the golden logits.

    python scripts/golden/check_llama_cpp.py LLAMA_LOGITS [FOLDER]

LLAMA_LOGITS is the program that bench/peers/build-llama-cpp builds. A growth series is skipped.
llama.cpp picks LongRoPE's factors by the context size, not by the length, and pads the context to
256; for a LongRoPE model the original context is overridden to get the set that a case needs.
Its CPU kernels round some operands to 16 bits, so it agrees to about 5e-3 of the largest logit; a
wrong RoPE variant differs by 0.1 to 1.7.
"""
import os
import subprocess
import sys
import tempfile

import numpy as np

import goldenfile
from goldenfile import AUTO, GROWTH

LIMIT = 1e-2


def run(program, model, case, n_vocab, tmp, switch):
    windows, out = os.path.join(tmp, "w"), os.path.join(tmp, "o")
    goldenfile.write_windows(windows, [(case.tokens, case.pos)])
    cmd = [program, "-m", model, "-i", windows, "-o", out, "-k", "f32"]
    if case.kind != AUTO:
        cmd += ["-s", ["", "none", "linear", "yarn"][case.kind], "-f", str(case.factor),
                "-c", str(case.orig_ctx)]
    if switch:
        orig = 1 if len(case.tokens) > switch else 1 << 20
        cmd += ["-O", f"phi3.rope.scaling.original_context_length={orig}"]
    subprocess.run(cmd, check=True, stderr=subprocess.DEVNULL)
    return np.fromfile(out, "<f4").reshape(len(case.pos), n_vocab)


def main():
    program = sys.argv[1]
    here = os.path.dirname(os.path.abspath(__file__))
    folder = sys.argv[2] if len(sys.argv) > 2 else os.path.join(here, "../../tests/data/tiny")
    bad = 0
    with tempfile.TemporaryDirectory() as tmp:
        for name in sorted(f[:-7] for f in os.listdir(folder) if f.endswith(".golden")):
            base = os.path.join(folder, name)
            n_vocab, cases = goldenfile.read(base + ".golden")
            for c in cases:
                if c.flags & GROWTH:
                    continue
                got = run(program, base + ".gguf", c, n_vocab, tmp,
                          64 if name == "phi3-longrope" else 0)
                rel = float((np.abs(got - c.logits).max(1) / np.abs(c.logits).max(1)).max())
                bad += rel > LIMIT
                print(f"{name:14} n={len(c.tokens):3} kind={c.kind} factor={c.factor:g} "
                      f"orig={c.orig_ctx:3}  {rel:.1e}{'  DIFFERS' if rel > LIMIT else ''}")
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()
