#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# --trace and --stats.  A trace is valid JSON with nesting spans of the names that belong there, all
# resident, over three tiers, resumed; an unwritable path is an error before the work.
# KVDRIVE is the program; runs in the source root.
set -euo pipefail
kvd=${KVDRIVE:?}
export XDG_CONFIG_HOME=/nonexistent
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
model=(-m tests/data/tiny/llama.gguf --rope-scaling linear --rope-scale 64 --attention sparse
    --budget 96 -c 3072)
printf 'words %d of a prompt that is long enough for some blocks of tokens\n' {1..30} >"$tmp/text"

# check NAMES OPTION...: the trace of a run has the names (separated by commas)
check() {
    local names
    IFS=, read -ra names <<<"$1"
    shift
    "$kvd" run "${model[@]}" --raw -f "$tmp/text" -n 300 --temp 0 --ignore-eos \
        --trace "$tmp/trace.json" "$@" >/dev/null
    python3 tests/cli/check_trace.py "$tmp/trace.json" "${names[@]}"
}

sparse="decode step,prefill,layer,qkv,attention,select,attend,ffn,logits,seal"
check "$sparse"
device=$("$kvd" plan "${model[@]}" --json | python3 -c 'import json, sys
print(json.load(sys.stdin)["kv_device_bytes"] - 1)')
tiers=(--kv-device "$device" --kv-host 60000 --cache-dir "$tmp/cache" --kv-disk-free 0)
check "$sparse,fetch,fetch late,batch,stage,store tail,I/O wait,disk read" "${tiers[@]}"
check "${sparse/,prefill/},fetch,fetch late,restore,I/O wait,disk read" "${tiers[@]}"
check "${sparse/attend,/attend,zone,}" --zone 16
check "decode step,prefill,layer,qkv,attention,ffn,logits" --attention dense
"$kvd" bench -m tests/data/tiny/qwen2.gguf -p 16 -n 4 -r 2 --trace "$tmp/bench.json" >/dev/null
python3 tests/cli/check_trace.py "$tmp/bench.json" "decode step" layer ffn
if "$kvd" run "${model[@]}" --raw -p x --trace "$tmp/none/trace.json" 2>"$tmp/err"; then
    echo "FAILED: no error for a directory that is not there" >&2
    exit 1
fi
grep -q "none/trace.json" "$tmp/err"

# The counts of a run, as JSON and for people.
"$kvd" run "${model[@]}" --raw -f "$tmp/text" -n 300 --temp 0 --ignore-eos --json --stats \
    --zone 16 --cache-dir "$tmp/other" --kv-disk-free 0 2>"$tmp/err" |
    python3 tests/cli/check_stats.py include/kvdrive.h
for pattern in 'hits per layer, % +[0-9.]+, [0-9.]+$' 'stored on disk .* index, .* tails' \
    'of it index' 'estimated by cells +[0-9.]+ % of' 'of it cells'; do
    grep -qE "$pattern" "$tmp/err"
done

# The zone of 3,072 tokens: 192 cells of a K and a V row for each lane, in bf16.
plan() { "$kvd" plan "${model[@]}" --json "$@"; }
{ plan; plan --zone 16; plan --zone 4; } | python3 -c 'import json, sys
none, some, more = (json.loads(line) for line in sys.stdin)
assert none["kv_zone_bytes"] == 0
assert some["kv_zone_bytes"] * 16 == more["kv_zone_bytes"] * 4 == none["kv_raw_bytes"]
assert some["kv_index_bytes"] == none["kv_index_bytes"] + some["kv_zone_bytes"]'
plan --zone 16 | python3 -m json.tool >/dev/null
"$kvd" plan "${model[@]}" --zone 16 | grep -q '^  cells '
for zone in 6 2 24 512; do
    if "$kvd" plan "${model[@]}" --zone "$zone" >/dev/null 2>"$tmp/err"; then
        echo "FAILED: --zone $zone was taken" >&2
        exit 1
    fi
    grep -q zone "$tmp/err"
done
