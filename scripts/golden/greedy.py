#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where greedy texts part from the float32 reference of SmolLM2, and at which gap.

    python scripts/golden/greedy.py --windows FILE     the 20 prompts, for llama_logits -g 64
    python scripts/golden/greedy.py IDS                u32 [20][64], what it wrote
"""
import os
import sys

import numpy as np

from goldenfile import write_windows


def read_cases(path):
    cases = []
    with open(path, encoding="utf-8") as f:
        for line in f:
            key, *rest = line.split()
            if key == "case":
                cases.append({"name": rest[0]})
            elif key != "#":
                cast = float if key == "gap" else int
                cases[-1][key] = [cast(v) for v in rest[1:]]
    return cases


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    cases = read_cases(os.path.join(here, "../../tests/golden/smollm2/greedy.txt"))
    if sys.argv[1] == "--windows":
        write_windows(sys.argv[2], [(c["prompt"], []) for c in cases])
        return
    got = np.fromfile(sys.argv[1], "<u4").reshape(len(cases), -1)
    equal, worst = 0, 0.0
    for c, ids in zip(cases, got.tolist()):
        at = next((i for i, (a, b) in enumerate(zip(ids, c["gen"])) if a != b), None)
        equal += at is None
        if at is not None:
            worst = max(worst, c["gap"][at])
            print(f"{c['name']:18} parts at {at:2}, gap {c['gap'][at]:.4f}")
    print(f"{equal} of {len(cases)} equal, largest gap where one parts {worst:.4f}")


if __name__ == "__main__":
    main()
