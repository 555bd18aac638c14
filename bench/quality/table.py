#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/quality.md from rows of `kvdrive eval ruler -o`.

usage: table.py ROWS.csv [--tasks NAME,...] [--seeds FIRST-LAST] [--configs NAME,...] [--by-task]
Rows of several runs may stand in one file.  Differences are paired by prompt (task, seed, index);
an interval is the middle 95 % of the mean over 10,000 resamples of the prompts.
"""
import argparse
import collections
import csv
import random
import sys

N_RESAMPLE = 10000


def read(args):
    def among(given, value):  # heads between the files that were put together are no rows
        return value in given.split(",") if given else value != "config"

    rows = collections.OrderedDict()  # configuration -> prompt -> row
    first, last = (int(x) for x in args.seeds.split("-"))
    with open(args.rows, newline="") as f:
        for r in csv.DictReader(f):
            if (r["config"] != "config" and among(args.tasks, r["task"]) and
                    among(args.configs, r["config"]) and first <= int(r["seed"]) <= last):
                rows.setdefault(r["config"], {})[r["task"], r["seed"], r["index"]] = r
    return rows


def interval(x):
    rng = random.Random(42)
    means = sorted(sum(rng.choices(x, k=len(x))) / len(x) for _ in range(N_RESAMPLE))
    return means[N_RESAMPLE * 25 // 1000], means[N_RESAMPLE - 1 - N_RESAMPLE * 25 // 1000]


def score(r):
    return 100 * float(r["score"])


def weighted(rows, field, tokens):
    """Mean of the means of answers, each by its number of tokens."""
    pairs = [(float(r[field]), int(tokens[p]["answer_tokens"])) for p, r in rows.items()
             if r[field] and p in tokens]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


def line(name, rows, dense):
    pairs = [(score(r), score(dense[p])) for p, r in rows.items() if p in dense]
    x = [a - b for a, b in pairs]
    low, high = interval(x)
    all_rows = list(rows.values())
    selected = sum(int(r["selected"]) for r in all_rows)
    kl = weighted(rows, "kl", dense)  # over what dense said
    mass = weighted(rows, "mass", rows)

    def share(field):
        return "%.1f" % (100 * sum(int(r[field]) for r in all_rows) / selected) if selected else "-"

    return [name, "%.1f" % (sum(a for a, _ in pairs) / len(pairs)),
            "%+.1f" % (sum(x) / len(x)), "%+.1f, %+.1f" % (low, high),
            "%d / %d" % (sum(d > 0 for d in x), sum(d < 0 for d in x)), str(len(x)),
            "%.3f" % mass if mass else "-", share("missed"), share("urgent"),
            "%.4f" % kl if kl is not None else "-"]


def show(head, lines):
    print("| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head))
    for x in lines:
        print("| " + " | ".join(x) + " |")


def by_task(rows, tasks):
    def mean(c, t):
        x = [score(r) for p, r in rows[c].items() if p[0] == t]
        return "%.0f" % (sum(x) / len(x)) if x else "-"

    show(["configuration"] + tasks, [[c] + [mean(c, t) for t in tasks] for c in rows])


def main():
    p = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].splitlines()[0])
    p.add_argument("rows")
    p.add_argument("--tasks")
    p.add_argument("--seeds", default="0-999999999")
    p.add_argument("--configs")
    p.add_argument("--by-task", action="store_true")
    args = p.parse_args()
    rows = read(args)
    if "dense" not in rows:
        sys.exit("table.py: no rows of 'dense' to compare with")
    if args.by_task:
        by_task(rows, sorted({p[0] for p in rows["dense"]}))
        return
    show(["configuration", "score", "difference", "95 % interval", "better / worse", "n", "mass",
          "missed %", "waited for %", "KL"],
         [line(c, rows[c], rows["dense"]) for c in rows])


if __name__ == "__main__":
    main()
