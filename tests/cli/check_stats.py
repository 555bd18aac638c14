#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The statistics of `kvdrive run --json` (standard input) have every field of kvd_stats, and their
sums agree.

usage: check_stats.py include/kvdrive.h
"""
import json
import re
import sys


def fields(header, struct):
    body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (struct, struct), header, re.S).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    names = re.findall(r"(\w+)(?=\s*[,;])", body)
    return set(names) - {"struct_size"}


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        header = f.read()
    stats = json.load(sys.stdin)["stats"]
    counts, layers, memory = stats["counts"], stats["layers"], stats["memory"]
    missing = fields(header, "kvd_stats") - set(counts)
    assert not missing and len(counts) > 30, missing
    assert counts["n_selected"] == counts["n_hit"] + counts["n_miss"] > 0
    assert counts["n_selected"] == sum(x["n_selected"] for x in layers)
    assert counts["n_hit"] == sum(x["n_hit"] for x in layers) > 0
    assert abs(counts["hit_rate"] - counts["n_hit"] / counts["n_selected"]) < 1e-9
    assert all(0 <= r <= 1 for x in layers for r in x["heads"]) and len(layers[0]["heads"]) > 1
    assert memory["kv_device_bytes"] == sum(memory[f"kv_{x}_bytes"] for x in (
        "raw", "window", "stage", "index", "map")) and memory["kv_index_bytes"] > 0
    assert 0 < counts["zone_share"] < 1 and 0 < counts["zone_ns"] < counts["attend_ns"]
    assert 0 < memory["kv_zone_bytes"] < memory["kv_index_bytes"]
    assert counts["disk_aux_bytes"] > counts["disk_tail_bytes"] > 0 < counts["disk_put_bytes"]


if __name__ == "__main__":
    main()
