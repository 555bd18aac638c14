#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A trace is valid: spans nest, children have the parents they should, every span is within the
process's time.  Prints the names that were found.

usage: check_trace.py FILE NAME...   exits 1 when it is not valid or lacks a name
"""
import collections
import json
import sys

# The parents that a span may have; None: it may stand alone.
PARENTS = {
    "decode step": {None}, "prefill": {None}, "restore": {None}, "store tail": {None},
    "batch": {"layer"}, "layer": {"decode step", "prefill"}, "qkv": {"layer", "batch"},
    "attention": {"layer", "batch"}, "stage": {"layer"}, "select": {"layer"}, "fetch": {"layer"},
    "attend": {"layer"}, "zone": {"attend"}, "fetch late": {"layer"},
    "ffn": {"layer", "batch"},
    "logits": {"decode step", "prefill", "batch"}, "seal": {"decode step", "prefill", "layer"},
    "I/O wait": {"select", "fetch", "fetch late", "stage", "seal", "layer", "decode step",
                 "prefill", "restore", None},
}


def check(path):
    with open(path, encoding="utf-8") as f:
        trace = json.load(f)
    assert trace["otherData"]["dropped"] == 0
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for e in spans:  # in whole nanoseconds
        e["ts"], e["dur"] = round(e["ts"] * 1000), round(e["dur"] * 1000)
    spans.sort(key=lambda e: (e["ts"], -e["dur"]))
    stack, found = [], collections.Counter()
    for e in spans:
        end = e["ts"] + e["dur"]
        while stack and stack[-1][1] <= e["ts"]:
            stack.pop()
        assert not stack or end <= stack[-1][1], f"{e} ends after {stack[-1]}"
        parent = stack[-1][0]["name"] if stack else None
        assert parent in PARENTS[e["name"]], f"{e} is within {parent}"
        if stack and "layer" in e["args"] and "layer" in stack[-1][0]["args"]:
            assert e["args"]["layer"] == stack[-1][0]["args"]["layer"] or e["name"] == "I/O wait"
        found[e["name"]] += 1
        stack.append((e, end))
    flights = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "b":
            assert e["id"] not in flights
            flights[e["id"]] = e
        elif e["ph"] == "e":
            assert flights.pop(e["id"])["ts"] <= e["ts"]
            found["disk read"] += 1
    assert not flights
    return found


def main():
    found = check(sys.argv[1])
    print(dict(found))
    missing = [n for n in sys.argv[2:] if not found[n]]
    if missing:
        sys.exit(f"{sys.argv[1]}: no {', '.join(missing)} in it")


if __name__ == "__main__":
    main()
