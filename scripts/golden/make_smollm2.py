#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/smollm2: what the dequantised float32 model says.

    python scripts/golden/make_smollm2.py MODEL.gguf TEXT.txt [OUT]

TEXT is a novel of the austen set (persuasion.txt); an excerpt is copied to OUT. Layouts are in
tests/golden/smollm2/README.md. Takes some minutes on two cores.
"""
import math
import os
import struct
import sys

import numpy as np
import torch

import ref64
import smollm2
from goldenfile import Case
from smollm2_prompts import PROMPTS

N_GREEDY = 64
TOP = 64
KL_WINDOW, KL_N_WINDOW = 1024, 4
PPL_WINDOW, PPL_N_WINDOW = 2048, 10


def excerpt(text, tok):
    """From the first chapter on, whole lines, just enough for the perplexity windows."""
    need = PPL_WINDOW * PPL_N_WINDOW
    lines = text[text.index("Chapter 1"):].splitlines(keepends=True)
    low, high = 0, len(lines)
    while low < high:
        mid = (low + high) // 2
        if len(tok.encode("".join(lines[:mid])).ids) < need + 16:
            low = mid + 1
        else:
            high = mid
    return "".join(lines[:low])


def logits_of(model, tokens, **more):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False, **more).logits[0]


def check_exact(g, model, tokens):
    """float32 transformers against the float64 pass; returns the largest difference in logits."""
    exact = ref64.forward(g, Case(tokens, []))
    return float(np.abs(logits_of(model, tokens).numpy() - exact).max())


def greedy(model, tokens):
    ids, second, gaps = list(tokens), [], []
    cache, feed = None, tokens
    for _ in range(N_GREEDY):
        with torch.no_grad():
            out = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        top = out.logits[0, -1].topk(2)
        ids.append(int(top.indices[0]))
        second.append(int(top.indices[1]))
        gaps.append(float(top.values[0] - top.values[1]))
        feed = ids[-1:]
    return ids[len(tokens):], second, gaps


def write_greedy(path, g, model, tok):
    with open(path, "w", encoding="utf-8") as f:
        f.write("# SmolLM2-135M-Instruct Q4_1 dequantised to float32; see README.md\n")
        for name, prompt in PROMPTS:
            text = prompt if isinstance(prompt, str) else smollm2.render(g, prompt)
            tokens = tok.encode(text).ids
            ids, second, gaps = greedy(model, tokens)
            f.write(f"case {name}\n")
            for key, values in (("prompt", tokens), ("gen", ids), ("second", second),
                                ("gap", [f"{v:.4f}" for v in gaps])):
                f.write(f"{key} {len(values)} {' '.join(map(str, values))}\n")
            print(f"{name:18} {len(tokens):4} tokens, smallest gap {min(gaps):.4f}  "
                  f"{tok.decode(ids)[:60]!r}")


def perplexity(model, ids, window, n_window):
    nll, n = 0.0, 0
    for i in range(n_window):
        part = ids[i * window:(i + 1) * window]
        logp = torch.log_softmax(logits_of(model, part)[window // 2:-1].double(), -1)
        target = torch.tensor(part[window // 2 + 1:])
        nll -= float(logp.gather(1, target[:, None]).sum())
        n += len(target)
    return math.exp(nll / n), n


def write_logprobs(path, model, ids):
    """The KL_N_WINDOW windows; the TOP largest log-probabilities of each scored position."""
    first, n_vocab = KL_WINDOW // 2, model.config.vocab_size
    n_pos = KL_WINDOW - 1 - first
    with open(path, "wb") as f:
        f.write(struct.pack("<4s7I", b"KDLP", 1, n_vocab, TOP, KL_N_WINDOW, KL_WINDOW, first,
                            n_pos))
        f.write(np.asarray(ids[:KL_WINDOW * KL_N_WINDOW], "<u4").tobytes())
        for w in range(KL_N_WINDOW):
            part = ids[w * KL_WINDOW:(w + 1) * KL_WINDOW]
            logp = torch.log_softmax(logits_of(model, part)[first:-1].double(), -1)
            for i in range(n_pos):
                top = logp[i].topk(TOP)
                rest = max(1.0 - float(top.values.exp().sum()), 1e-12)
                f.write(top.indices.numpy().astype("<u2").tobytes())
                f.write(top.values.numpy().astype("<f4").tobytes())
                f.write(struct.pack("<ff", math.log(rest), float(logp[i, part[first + i + 1]])))


def main():
    g, text = ref64.Gguf(sys.argv[1]), open(sys.argv[2], encoding="utf-8").read()
    here = os.path.dirname(os.path.abspath(__file__))
    out = sys.argv[3] if len(sys.argv) > 3 else os.path.join(here, "../../tests/golden/smollm2")
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(2)
    tok, model = smollm2.tokenizer(g), smollm2.load(g)
    text = excerpt(text, tok)
    open(os.path.join(out, "persuasion.txt"), "w", encoding="utf-8").write(text)
    ids = tok.encode(text).ids
    print(f"excerpt: {len(text.encode())} bytes, {len(ids)} tokens")
    worst = check_exact(g, model, ids[:24])
    print(f"largest difference from float64 over 24 positions: {worst:.1e}")
    write_greedy(os.path.join(out, "greedy.txt"), g, model, tok)
    write_logprobs(os.path.join(out, "logprobs.bin"), model, ids)
    for window, n in ((KL_WINDOW, KL_N_WINDOW), (PPL_WINDOW, PPL_N_WINDOW)):
        ppl, count = perplexity(model, ids, window, n)
        print(f"perplexity, {n} windows of {window}: {ppl:.4f} over {count} positions")


if __name__ == "__main__":
    main()
