#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kvdrive eval ruler on a tiny model whose tokens are bytes: prompts (golden, and solved by a
# program that did not make them), answers, rows, messages.  KVDRIVE is the program; runs in the
# source root.
set -u
PATIENCE=600 # seconds that no program takes, however busy the machine is
kvd=${KVDRIVE:?}
export XDG_CONFIG_HOME=/nonexistent
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failed=0
n=0
# 128 positions of context, stretched: the text is nonsense either way
model=(-m tests/data/tiny/llama.gguf --rope-scaling linear --rope-scale 100 --data eval/data -t 2)

fail() {
    echo "FAILED: $*"
    failed=$((failed + 1))
}

# expect NAME CODE PATTERN ARGUMENT...: exit code and an extended regular expression in the output
expect() {
    local name=$1 code=$2 pattern=$3 out got
    shift 3
    n=$((n + 1))
    out=$(timeout "$PATIENCE" "$kvd" eval "$@" 2>&1 </dev/null)
    got=$?
    if [ "$got" != "$code" ] || ! grep -qE -- "$pattern" <<<"$out"; then
        fail "$name: exit $got (expected $code), output (expected /$pattern/):"
        head -c 1000 <<<"$out"
    fi
}

# Prompts: the same bytes everywhere; answers found again from the text alone.
n=$((n + 1))
"$kvd" eval ruler "${model[@]}" --raw --length 12000 --samples 1 --generate-only >"$tmp/prompts" ||
    fail "prompts"
[ "$(sha256sum <"$tmp/prompts")" = "$(cat tests/golden/ruler.sha256)" ] ||
    fail "prompts differ from tests/golden/ruler.sha256: $(sha256sum <"$tmp/prompts")"
python3 tests/cli/check_ruler.py "$tmp/prompts" 12000 eval/data || fail "prompts solved"

# A sample does not depend on which others are made.
n=$((n + 1))
"$kvd" eval ruler "${model[@]}" --raw --length 12000 --samples 1 --tasks fwe --generate-only |
    cmp -s - <(grep '"task":"fwe"' "$tmp/prompts") || fail "one task alone"
n=$((n + 1))
"$kvd" eval ruler "${model[@]}" --raw --length 12000 --samples 1 --seed 1 --generate-only |
    cmp -s - "$tmp/prompts" && fail "another seed, the same prompts"

# Answers: equal configurations give equal rows, the template is part of the length.
printf '{%% for m in messages %%}<<{{ m.content }}>>{%% endfor %%}' >"$tmp/t.jinja"
printf '# compared\n a: attention=dense\n\nb : attention = dense # the same\n' >"$tmp/configs"
n=$((n + 1))
"$kvd" eval ruler "${model[@]}" --chat-template "$tmp/t.jinja" --length 2048 --samples 2 \
    --tasks niah_single_1,qa_1 --configs "$tmp/configs" -o "$tmp/rows.csv" --json \
    >"$tmp/out.json" || fail "answers"
python3 - "$tmp" <<'PY' || fail "rows"
import csv, json, sys
rows = list(csv.DictReader(open(sys.argv[1] + "/rows.csv", encoding="utf-8", newline="")))
out = json.load(open(sys.argv[1] + "/out.json", encoding="utf-8"))
assert len(rows) == 8, len(rows)
assert [c["name"] for c in out] == ["a", "b"]
for a, b in zip(rows[::2], rows[1::2]):
    assert (a["config"], b["config"]) == ("a", "b")
    for k in a:
        assert k in ("config", "answer_seconds") or a[k] == b[k], (k, a, b)
for r in rows:
    refs = r["expected"].split("|")
    hits = [ref.lower() in r["answer"].lower() for ref in refs]
    want = float(any(hits)) if r["task"] == "qa_1" else sum(hits) / len(hits)
    assert float(r["score"]) == want, r
    new = 128 if r["task"] == "niah_single_1" else 32
    assert 0 < int(r["answer_tokens"]) <= new and int(r["prompt_tokens"]) <= 2048 - new
assert out[1]["difference"]["n"] == 4 and out[1]["difference"]["high"] == 0
PY
# Sparse configurations of one session: counted, and never better informed than dense.
n=$((n + 1))
"$kvd" eval ruler "${model[@]}" --raw --length 2048 --samples 1 --tasks niah_single_1 --kl --json \
    --attention sparse --with "all: budget=4096; few: budget=64, cap=1, fetch=strict;
    box: budget=32, index=box-bf16, evict=lru, attend=selected, group-rule=max; q: budget=6.25%,
    index=quant-k-int4, cap=4, select-top-p=0.9, ema-alpha=0.3; cells: budget=64,
    cap=1, fetch=strict, zone=8" -o "$tmp/rows.csv" \
    >"$tmp/out.json" || fail "sparse configurations"
python3 - "$tmp" <<'PY' || fail "sparse rows"
import csv, json, sys
rows = list(csv.DictReader(open(sys.argv[1] + "/rows.csv", encoding="utf-8", newline="")))
out = {c["name"]: c for c in json.load(open(sys.argv[1] + "/out.json", encoding="utf-8"))}
assert list(out) == ["dense", "all", "few", "box", "q", "cells"], list(out)
dense = rows[0]
assert dense["selected"] == "0" and dense["mass"] == dense["kl"] == "", dense
for r in rows[1:]:
    assert int(r["selected"]) > 0 and 0 < float(r["mass"]) <= 1.0001, r
    assert float(r["kl"]) >= 0, r
    assert int(r["missed"]) >= int(r["urgent"])
assert out["all"]["kl"] < 1e-3 and out["all"]["mass"] > 0.999, out["all"]
assert out["few"]["kl"] > out["all"]["kl"] and out["few"]["mass"] < 1, out["few"]
assert out["cells"]["kl"] < out["few"]["kl"], out["cells"] # of one prefix, made once
assert out["few"]["urgent_share"] == out["few"]["miss_share"] > 0, out["few"] # strict waits for all
PY
expect "every kind of index" 0 'cap4 6 .*\+0.0' ruler "${model[@]}" --raw --length 700 \
    --samples 1 --tasks niah_single_1 --attention sparse --configs eval/configs/indexes.txt
expect "a table" 0 '^score +single_1 +mean$' ruler "${model[@]}" --raw --length 700 --samples 1 \
    --tasks niah_single_1 --with "x: attention=dense"
expect "dense is put in front" 0 '^dense +[0-9.]+ +[0-9.]+$' ruler "${model[@]}" --raw \
    --length 700 --samples 1 --tasks niah_single_1

expect "no benchmark" 2 'eval ruler' "${model[@]}"
expect "another benchmark" 2 'eval ruler' longbench "${model[@]}"
expect "unknown task" 2 "'niah_single_4'; did you mean niah_single" ruler "${model[@]}" --raw \
    --tasks niah_single_4
expect "the task without data" 2 'HotpotQA' ruler "${model[@]}" --raw --tasks qa_2
expect "a task twice" 2 'vt twice' ruler "${model[@]}" --raw --tasks vt,vt
expect "no task" 2 'none given' ruler "${model[@]}" --raw --tasks ''
expect "no template" 2 'no chat template: use --raw' ruler "${model[@]}" --length 700
expect "too short" 2 'smallest vt takes [0-9]+ tokens' ruler "${model[@]}" --raw --length 700 \
    --samples 1 --tasks vt --generate-only
expect "more than the context" 2 'length 700 is more than the context' ruler "${model[@]}" --raw \
    --length 700 -c 600
expect "longer than the model" 2 '12800' ruler "${model[@]}" --raw --length 20000 --tasks fwe
expect "unknown option" 2 "'colour'; there are attention, budget" ruler "${model[@]}" --raw \
    --with "a: colour=red"
expect "unknown value" 2 'attention' ruler "${model[@]}" --raw --with "a: attention=red"
expect "half a token" 2 "zone is '5.5', expected 0" ruler "${model[@]}" --raw --with "a: zone=5.5"
expect "cells that no chunks fill" 2 'cells of 6 tokens' ruler "${model[@]}" --raw --length 700 \
    --tasks vt --attention sparse --with "a: zone=6"
expect "cells of two sizes" 2 'zones of 8 and of 16 tokens' ruler "${model[@]}" --raw --length 700 \
    --tasks fwe --attention sparse --with "a: zone=8; b: zone=0; c: zone=16"
expect "no value" 2 'attention' ruler "${model[@]}" --raw --with "a: attention"
expect "no name" 2 'expected name: key=value' ruler "${model[@]}" --raw --with "attention=dense"
expect "one name twice" 2 "two configurations are named 'a'" ruler "${model[@]}" --raw \
    --with "a: attention=dense; a: attention=dense"
expect "no such file" 1 'No such file' ruler "${model[@]}" --raw --configs "$tmp/none"
expect "rows cannot be written" 1 'No such file' ruler "${model[@]}" --raw --length 700 \
    --tasks niah_single_1 -o "$tmp/none/rows.csv"
expect "no data" 1 'none/ruler/tasks.json.*No such file' ruler "${model[@]}" --raw \
    --data "$tmp/none"

# Data of other shapes are refused by name, not used.
broken() {
    local name=$1 file=$2 content=$3
    rm -rf "$tmp/data"
    cp -r eval/data "$tmp/data"
    printf '%s' "$content" >"$tmp/data/$file"
    expect "$name" 3 "$file" ruler "${model[@]}" --data "$tmp/data" --raw
}
broken "tasks that are no JSON" ruler/tasks.json '{'
broken "tasks that are none" ruler/tasks.json '[]'
broken "a task of another kind" ruler/tasks.json \
    '{"needle":"","noise":"","base_tasks":{},"tasks":{"x":{"task":"y"}}}'
broken "few words" ruler/nounlist.txt $'one\ntwo\n'
broken "questions of another form" xquad/xquad.en.json '{"data":[{"paragraphs":[{}]}]}'

# As installed: bin/kvdrive finds share/kvdrive/eval.
n=$((n + 1))
mkdir -p "$tmp/bin" "$tmp/share/kvdrive"
cp "$kvd" "$tmp/bin/kvdrive"
cp -r eval/data "$tmp/share/kvdrive/eval"
sed -i 's/"noise": "The grass/"noise": "The turf/' "$tmp/share/kvdrive/eval/ruler/tasks.json"
"$tmp/bin/kvdrive" eval ruler -m tests/data/tiny/llama.gguf --raw --length 1024 --samples 1 \
    --tasks niah_single_1 --generate-only | grep -q 'The turf is green' || fail "installed data"

echo "$n cases, $failed failed"
[ $failed = 0 ]
