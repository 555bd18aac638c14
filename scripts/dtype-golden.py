#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/dtype: blocks of every element type and what they dequantise to.

The values come from the gguf package (pip install gguf numpy), which is MIT-licensed; the blocks
are our own random and extreme bytes, so the data carries no foreign content.  Fixed seed: running
it again reproduces the files.  Usage: scripts/dtype-golden.py [OUT_DIR]"""
import os
import sys

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T

TYPES = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1,
         T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K]
# Byte positions of f16 fields, so that random blocks carry finite scales.
F16_AT = {T.Q8_0: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2],
          T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}
# zero, -0, least and greatest subnormal, least normal, 1, greatest, -greatest, inf, -inf, NaN
EXTREME_F16 = [0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x3c00, 0x7bff, 0xfbff, 0x7c00, 0xfc00,
               0x7e00]


def quant_blocks(rng, t):
    size = GGML_QUANT_SIZES[t][1]
    n_random = 12
    rows = rng.integers(0, 256, (n_random + len(EXTREME_F16) + 4, size), dtype=np.uint8)
    for i, row in enumerate(rows):
        for j, at in enumerate(F16_AT[t]):
            if n_random <= i < n_random + len(EXTREME_F16):
                h = EXTREME_F16[(i - n_random + 3 * j) % len(EXTREME_F16)]
            else:
                h = int(np.float16(rng.normal() * 0.05).view(np.uint16))
            row[at:at + 2] = [h & 255, h >> 8]
    for i, fill in enumerate([0x00, 0xff, 0x80, 0x7f]):  # all quants and scales at their ends
        keep = {a: rows[-1 - i][a:a + 2].copy() for a in F16_AT[t]}
        rows[-1 - i][:] = fill
        for a, v in keep.items():
            rows[-1 - i][a:a + 2] = v
    return rows


def plain_blocks(rng, t):
    if t == T.F32:
        bits = rng.integers(0, 2**32, 500, dtype=np.uint32)
        bits[:8] = [0, 0x80000000, 1, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x00800000]
        return bits.view(np.uint8)
    # every 16-bit pattern once: 64 Ki values
    return np.arange(65536, dtype=np.uint16).view(np.uint8)


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "..", "tests", "data", "dtype")
    os.makedirs(out, exist_ok=True)
    for t in TYPES:
        rng = np.random.default_rng(1000 + int(t))
        with np.errstate(all="ignore"):
            if t in F16_AT:
                data = quant_blocks(rng, t)
                value = quants.dequantize(data, t)
            else:
                data = plain_blocks(rng, t)
                value = quants.dequantize(data.view({T.F32: np.float32, T.F16: np.float16,
                                                     T.BF16: np.uint8}[t]), t)
        name = os.path.join(out, t.name.lower())
        # The 16-bit types would store 256 KB of floats for nothing: keep every 97th value.
        if t in (T.F16, T.BF16):
            data = data.view(np.uint16)[::97].copy().view(np.uint8)
            value = value.reshape(-1)[::97].copy()
        data.tofile(name + ".blocks")
        value.astype("<f4").tofile(name + ".f32")
        print(f"{t.name}: {data.size} bytes -> {value.size} values")


if __name__ == "__main__":
    main()
