#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""KL divergence of a file of raw logits from the stored float32 reference of SmolLM2.

    python scripts/golden/kl.py LOGITS [--ref logprobs.bin] [--full MODEL.gguf]
    python scripts/golden/kl.py --windows FILE [--ref logprobs.bin]

LOGITS: float32 [n_window * n_pos][n_vocab], the scored positions of each window in order, as
`kvdrive perplexity persuasion.txt -c 1024 --logits-out LOGITS` or bench/peers/llama_logits write
them (rows beyond the reference's are ignored). Needs numpy only. The reference holds the 64 most
likely tokens of a position and one bucket for the rest, so the figure is the KL over these 65
outcomes: a lower bound of the full KL. --full runs the reference model (torch, transformers) for
the full KL as well. --windows writes the token windows that llama_logits reads.
"""
import argparse
import os
import struct

import numpy as np


def read_reference(path):
    data = open(path, "rb").read()
    magic, version, n_vocab, top, n_window, window, first, n_pos = struct.unpack_from("<4s7I", data)
    assert magic == b"KDLP" and version == 1
    tokens = np.frombuffer(data, "<u4", n_window * window, 32).reshape(n_window, window)
    row = np.dtype([("id", "<u2", top), ("logp", "<f4", top), ("rest", "<f4"), ("target", "<f4")])
    rows = np.frombuffer(data, row, n_window * n_pos, 32 + tokens.nbytes)
    return n_vocab, first, n_pos, tokens, rows


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def full_kl(gguf_path, tokens, first, logits, n_pos):
    import torch

    import ref64
    import smollm2
    model = smollm2.load(ref64.Gguf(gguf_path))
    out = []
    for w, part in enumerate(tokens.tolist()):
        with torch.no_grad():
            logits_p = model(torch.tensor([part]), use_cache=False).logits
        p = log_softmax(logits_p[0, first:-1].numpy())
        q = log_softmax(logits[w * n_pos:(w + 1) * n_pos])
        out.append((np.exp(p) * (p - q)).sum(-1))
    return np.concatenate(out)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    ap = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    ap.add_argument("logits", nargs="?")
    ap.add_argument("--ref", default=os.path.join(here, "../../tests/golden/smollm2/logprobs.bin"))
    ap.add_argument("--full", metavar="MODEL")
    ap.add_argument("--windows", metavar="FILE")
    a = ap.parse_args()
    n_vocab, first, n_pos, tokens, rows = read_reference(a.ref)
    if a.windows:
        from goldenfile import write_windows
        window = tokens.shape[1]
        write_windows(a.windows, [(t.tolist(), range(first, window - 1)) for t in tokens])
    if not a.logits:
        return
    logits = np.memmap(a.logits, "<f4", "r").reshape(-1, n_vocab)
    assert len(logits) >= len(rows), f"{len(logits)} rows, the reference has {len(rows)}"
    target = tokens[:, first + 1:].reshape(-1)
    kl, nll, same = [], [], 0
    for i, r in enumerate(rows):
        q = log_softmax(logits[i])
        q_top = q[r["id"]]
        q_rest = np.log(max(1.0 - np.exp(q_top).sum(), 1e-12))
        kl.append((np.exp(r["logp"]) * (r["logp"] - q_top)).sum()
                  + np.exp(r["rest"]) * (r["rest"] - q_rest))
        nll.append(-q[target[i]])
        same += int(q.argmax() == r["id"][0])
    kl = np.asarray(kl)
    print(f"positions {len(kl)}  mean KL {kl.mean():.6f}  median {np.median(kl):.6f}  "
          f"99 % {np.quantile(kl, 0.99):.6f}  max {kl.max():.6f}")
    print(f"same first token {100 * same / len(kl):.2f} %  perplexity {np.exp(np.mean(nll)):.4f}  "
          f"reference {np.exp(-rows['target'].astype(np.float64).mean()):.4f}")
    if a.full:
        full = full_kl(a.full, tokens, first, logits, n_pos)
        print(f"full mean KL {full.mean():.6f}  max {full.max():.6f}")


if __name__ == "__main__":
    main()
