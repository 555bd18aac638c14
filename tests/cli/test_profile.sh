#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kvdrive profile on a tiny model whose tokens are bytes: counts that must hold of any trace, the
# plan file, the picture, messages.  KVDRIVE is the program; runs in the source root.
set -u
PATIENCE=600 # seconds that no program takes, however busy the machine is
kvd=${KVDRIVE:?}
export XDG_CONFIG_HOME=/nonexistent
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
failed=0
n=0
# 128 positions of context, stretched: the text is nonsense either way
model=(-m tests/data/tiny/qwen3.gguf --rope-scaling linear --rope-scale 100 -t 2)
text=examples/long-text.txt
long=(--length 2400 --steps 30 --budget 96)

fail() {
    echo "FAILED: $*"
    failed=$((failed + 1))
}

# expect NAME CODE PATTERN ARGUMENT...: exit code and an extended regular expression in the output
expect() {
    local name=$1 code=$2 pattern=$3 out got
    shift 3
    n=$((n + 1))
    out=$(timeout "$PATIENCE" "$kvd" "$@" 2>&1 </dev/null)
    got=$?
    if [ "$got" != "$code" ] || ! grep -qE -- "$pattern" <<<"$out"; then
        fail "$name: exit $got (expected $code), output (expected /$pattern/):"
        head -c 1000 <<<"$out"
    fi
}

# Two texts: everything counted, and the same counts again.
tail -c +6000 "$text" >"$tmp/other.txt"
for i in 1 2; do
    n=$((n + 1))
    PATH=/nonexistent:$PATH "$kvd" profile "${model[@]}" "${long[@]}" --cap 4 -o "$tmp/plan$i" \
        --counts "$tmp/counts$i" --json "$text" "$tmp/other.txt" >"$tmp/json$i" || fail "profile"
done
cmp -s "$tmp/plan1" "$tmp/plan2" || fail "two runs, two plans"
cmp -s "$tmp/counts1" "$tmp/counts2" || fail "two runs, two tables"
python3 - "$tmp" <<'PY' || fail "counts"
import collections, csv, json, sys
tmp = sys.argv[1]
rows = list(csv.DictReader(line for line in open(tmp + "/counts1") if line[0] != "#"))
out = json.load(open(tmp + "/json1"))
plan = json.load(open(tmp + "/plan1"))
lanes = collections.defaultdict(dict)
for r in rows:
    lanes[r["layer"], r["kv_head"]][r["what"], r["policy"], float(r["size"])] = r
geometry = plan["geometry"]
assert len(lanes) == geometry["n_layer"] * geometry["n_kv_head"], len(lanes)
assert out["texts"] == 2 and out["steps"] == 2 * 29 == plan["n_step"], out
budget = out["budget_tokens"] // 4
assert budget == 24, budget
policies = ["ema", "lookahead", "lru", "lfu", "random"]
caps = [1, 1.5, 2, 3, 4, 6, 8, 12, 16]
total = collections.Counter()
for lane in lanes.values():
    selected = int(lane["window", "ema", 1]["selected"])
    assert selected == 58 * budget, selected
    for cap in caps:
        best = int(lane["window", "optimum", cap]["hit"])
        total["optimum", cap] += best
        for p in policies:
            hit = int(lane["window", p, cap]["hit"])
            total[p, cap] += hit
            # a window of one budget is the last selection, whatever the policy
            assert hit <= best <= selected, (p, cap, hit, best)
            assert cap > 1 or hit == int(lane["union", "", 1]["hit"]) == best
        assert int(lane["window", "ema", cap]["hit"]) > 0
    # LRU with room for it holds the last two selections
    assert int(lane["union", "", 2]["hit"]) <= int(lane["window", "lru", 2]["hit"])
    # ranks of the step before: the first `budget` were its selection
    assert int(lane["top", "", 1]["hit"]) == int(lane["union", "", 1]["hit"])
    for what, sizes in ("union", [1, 2, 4, 8, 16, 32]), ("top", [.25, .5, 1, 2, 4, 8]):
        hits = [int(lane[what, "", s]["hit"]) for s in sizes]
        assert hits == sorted(hits) and hits[-1] <= selected, hits
    assert float(lane["union", "", 1]["chunks"]) == budget
selected = out["selected"]
for (p, cap), hit in total.items():
    assert abs(out["hit_percent"][p][f"{cap:g}"] - 100 * hit / selected) < 1e-3, (p, cap)
    assert cap == 1 or hit > total[p, 1]
# some policy differs from another somewhere, and the optimum from all
assert len({total[p, 2] for p in policies}) > 1
assert all(total[p, 2] < total["optimum", 2] for p in policies)

# the session's own windows, of 4 budgets, are the same as those that follow
assert abs(out["session_percent"] - out["hit_percent"]["ema"]["4"]) < 1e-3, out

# the plan: tables of the counts, caps within the memory, not worse than one cap for all
record = plan["cost"][0][0][0] // budget
chosen = cost = 0
for l in range(geometry["n_layer"]):
    for h in range(geometry["n_kv_head"]):
        k = plan["profiled_caps"].index(plan["caps"][l][h])
        for i, cap in enumerate(plan["profiled_caps"]):
            hit = int(lanes[str(l), str(h)]["window", "ema", cap]["hit"])
            assert plan["benefit"][l][h][i] == hit * record
            assert plan["cost"][l][h][i] == cap * budget * record
        chosen += plan["benefit"][l][h][k]
        cost += plan["cost"][l][h][k]
assert cost <= plan["capacity_bytes"] == 4 * budget * record * len(lanes)
assert chosen // record >= total["ema", 4], (chosen // record, total["ema", 4])
PY

# Selections do not depend on where records lie, nor do profiles.
for tier in 0 2000K; do
    "$kvd" profile "${model[@]}" -b 64 --length 9000 --steps 12 --budget 96 --kv-device $tier \
        --counts "$tmp/counts-$tier" "$text" >/dev/null || fail "profile with --kv-device $tier"
done
n=$((n + 1))
cmp -s "$tmp/counts-0" "$tmp/counts-2000K" || fail "other counts on tiers"

# The picture's program is written whether gnuplot is there or not.
mkdir "$tmp/empty"
n=$((n + 1))
abs=$(realpath "$(command -v "$kvd")")
PATH=$tmp/empty "$abs" profile "${model[@]}" "${long[@]}" --heatmap "$tmp/it's.svg" "$text" \
    >/dev/null 2>"$tmp/err" || fail "picture without gnuplot"
grep -q "no gnuplot here" "$tmp/err" || fail "picture without gnuplot says nothing"
grep -q "it''s.svg'" "$tmp/it's.svg.gp" || fail "the picture's program"
if command -v gnuplot >/dev/null; then
    expect "picture" 0 'planned caps' \
        profile "${model[@]}" "${long[@]}" --heatmap "$tmp/m.svg" "$text"
    grep -q "<svg" "$tmp/m.svg" || fail "no picture"
fi

# No length asked for: as much as there is.  The model's context is 256.
fits=(-m tests/data/tiny/qwen3.gguf --rope-scaling linear -t 2 --steps 20 --budget 96)
expect "the default length" 0 'budget 96 of 8192 tokens' \
    profile "${fits[@]}" --rope-scale 100 "$text"
head -c 3000 "$text" >"$tmp/3000.txt"
expect "a text's length" 0 '2 text.*budget 96 of 2831 tokens' \
    profile "${fits[@]}" --rope-scale 100 -f "$text" "$tmp/3000.txt"
expect "a model's length" 0 'budget 96 of 5120 tokens' profile "${fits[@]}" --rope-scale 20 "$text"
expect "no text" 2 'no text: kvdrive profile' profile "${model[@]}"
expect "short text" 2 'has [0-9]+ tokens, a prompt and its 128 steps take 60000' \
    profile "${model[@]}" --length 60000 --rope-scale 1000 "$text"
expect "no prompt" 2 'has to leave a prompt' profile "${model[@]}" --length 300 --steps 300 "$text"
expect "never sealed" 2 'no sparse steps' profile "${model[@]}" --length 300 --steps 8 "$text"
expect "no average" 2 'keeps no average' \
    profile "${model[@]}" "${long[@]}" --evict lookahead "$text"
expect "too little" 4 'exceed|at least|capacity' \
    profile "${model[@]}" "${long[@]}" --kv-window 1K -o "$tmp/none" "$text"
[ ! -e "$tmp/none" ] || fail "a plan that does not fit was written"
expect "no such directory" 1 'none/plan' \
    profile "${model[@]}" "${long[@]}" -o "$tmp/none/plan" "$text"

# The plan in use: every command takes it, the same text on every tier, less memory than its
# largest window for all.
use=("${model[@]}" -c 9000 -b 64 --attention sparse --plan "$tmp/plan1")
n=$((n + 1))
head -c 2000 "$text" >"$tmp/prompt"
say=("$kvd" run "${use[@]}" --raw -f "$tmp/prompt" -n 24 --temp 0)
"${say[@]}" >"$tmp/resident" 2>/dev/null || fail "run with a plan"
"${say[@]}" --kv-device 2000K >"$tmp/tiers" 2>"$tmp/err" || fail "run on tiers: $(cat "$tmp/err")"
cmp -s "$tmp/resident" "$tmp/tiers" || fail "a plan's text depends on where records lie"
n=$((n + 1))
windows() {
    "$kvd" plan "${model[@]}" -c 9000 -b 64 --attention sparse --kv-device 2000K --json "$@" |
        python3 -c 'import json,sys; p = json.load(sys.stdin); print(p["kv_window_bytes"])'
}
python3 - "$tmp/plan1" "$(windows --plan "$tmp/plan1")" "$(windows --budget 96 --cap 1)" <<'PY' ||
import json, sys
plan = json.load(open(sys.argv[1]))
caps = [c for layer in plan["caps"] for c in layer]
assert len(set(caps)) > 1, caps
slot = plan["cost"][0][0][0] * len(caps) # of all lanes, one budget
assert int(sys.argv[2]) - int(sys.argv[3]) == slot // len(caps) * sum(c - 1 for c in caps), sys.argv
PY
    fail "the memory of a plan"
expect "bench" 0 'tg4' bench "${model[@]}" -b 128 --attention sparse --plan "$tmp/plan1" -p 0 -n 4 \
    -d 2000 --synthetic -r 1
printf '{%% for m in messages %%}{{ m.content }}{%% endfor %%}' >"$tmp/t.jinja"
expect "chat" 0 '' chat "${use[@]}" --chat-template "$tmp/t.jinja"
expect "eval" 0 'planned' eval ruler "${use[@]}" --data eval/data --raw --length 2048 \
    --tasks niah_single_1 --samples 1 --with 'planned: budget=96; same: budget=96, cap=3'

# and hold what the plan expects, on its own text; attending to more or less moves it a little
n=$((n + 1))
"$kvd" profile "${model[@]}" "${long[@]}" --plan "$tmp/plan1" --json "$text" "$tmp/other.txt" |
    python3 -c '
import json, sys
out, want = json.load(sys.stdin), json.load(open(sys.argv[1]))["planned_percent"]
assert abs(out["session_percent"] - want) < 2, (out["session_percent"], want)
' "$tmp/json1" || fail "hits under a plan"

# The host tier: tables in the plan, shares where it spills, the same text; without tables all lanes
# have the same.
n=$((n + 1))
python3 - "$tmp" <<'PY' || fail "the tables of a host tier"
import json, sys
tmp = sys.argv[1]
plan, out = json.load(open(tmp + "/plan1")), json.load(open(tmp + "/json1"))
host = plan["host"]
lane = host["lane_records"]
assert lane == 2560 // 4, host
assert host["sizes"] == [lane * k // 16 for k in (0, 1, 2, 4, 8, 12, 16)], host
for table in host["urgent"], host["late"]:
    for row in table:
        for reads in row:
            assert reads[0] > reads[3] >= reads[-1] == 0, reads
# without a host tier all misses are read: those that are not hits, and the windows' first content
misses = sum(r[0] for t in ("urgent", "late") for row in host[t] for r in row)
hits = sum(plan["benefit"][l][h][plan["profiled_caps"].index(c)]
           for l, row in enumerate(plan["caps"]) for h, c in enumerate(row))
record = plan["cost"][0][0][0] // 24
fill = 2 * 24 * sum(c for row in plan["caps"] for c in row)
assert misses == out["selected"] - hits // record + fill, (misses, out["selected"], hits, fill)
assert [h["records"] for h in out["host"]] == host["sizes"][1:-1]
for h in out["host"]:
    assert h["least_records"] <= h["records"] <= h["most_records"]
    cost = lambda w: h[w + "urgent_reads"] * host["urgent_read_ns"] + \
        h[w + "late_reads"] * host["late_read_ns"]
    assert cost("") <= cost("equal_"), h
assert any(h["by_stalls"] for h in out["host"])
del plan["host"]
json.dump(plan, open(tmp + "/equal", "w"))
PY
spill=(--kv-device 2000K --kv-host 400K)
shares() {
    "$kvd" plan "${model[@]}" -c 9000 -b 64 --attention sparse "$@" --json |
        python3 -c '
import json, sys
print(json.load(sys.stdin).get("host_shares", {}).get("by_stalls"))'
}
[ "$(shares --plan "$tmp/plan1" "${spill[@]}" --cache-dir "$tmp/d")" = True ] || fail "no shares"
[ "$(shares --plan "$tmp/plan1" --kv-device 2000K)" = None ] || fail "shares without a disk tier"
[ "$(shares --plan "$tmp/equal" "${spill[@]}" --cache-dir "$tmp/d")" = None ] || fail "no tables"
expect "shares" 0 'shared +[0-9]+ to [0-9]+ records .* ms if all had the same' plan "${model[@]}" \
    -c 9000 -b 64 --attention sparse --plan "$tmp/plan1" "${spill[@]}" --cache-dir "$tmp/d"
say=("$kvd" run "${model[@]}" -c 9000 -b 64 --attention sparse --raw -f "$tmp/prompt" -n 24)
for plan in plan1 equal; do
    n=$((n + 1))
    rm -rf "$tmp/d"
    "${say[@]}" --temp 0 --plan "$tmp/$plan" "${spill[@]}" --cache-dir "$tmp/d" >"$tmp/text" \
        2>"$tmp/err" ||
        fail "run with a disk tier: $(cat "$tmp/err")"
    cmp -s "$tmp/resident" "$tmp/text" || fail "shares of the host tier change the text"
done
sed 's/"lane_records": [0-9]*/"lane_records": 5/' "$tmp/plan1" >"$tmp/bad"
expect "sizes beyond the context" 3 'bad: .*sizes' plan "${model[@]}" --plan "$tmp/bad"
# Times that leave 64 bits show when the tier is shared out; the message says whose they are.
python3 - "$tmp/plan1" >"$tmp/bad" <<'PY'
import json, sys
plan = json.load(open(sys.argv[1]))
plan["host"]["urgent"][0][0][0] = 2**63 - 1
print(json.dumps(plan))
PY
expect "times that overflow" 2 'plan .*bad: .*64 bits' plan "${model[@]}" -c 9000 -b 64 \
    --attention sparse --plan "$tmp/bad" "${spill[@]}" --cache-dir "$tmp/d"

other=(plan -m tests/data/tiny/llama.gguf --attention sparse --plan)
expect "another model" 2 "plan1: .*(qwen|llama).*(qwen|llama)" "${other[@]}" "$tmp/plan1"
expect "another budget" 2 'a budget of 96 tokens, --budget is 100' plan "${use[@]}" --budget 100
expect "its budget" 0 'This fits' plan "${use[@]}" --budget 96
expect "a share" 0 'This fits' plan "${use[@]}" --budget 4%
expect "another index" 2 'mean-int4\+radius' plan "${use[@]}" --index box
expect "another chunk" 2 'chunk' plan "${use[@]}" --chunk 8
sed 's/"n_layer": [0-9]*/"n_layer": 9/' "$tmp/plan1" >"$tmp/bad"
expect "contradictory" 3 'bad: ' plan "${model[@]}" --plan "$tmp/bad"
expect "empty" 3 'null: ' plan "${model[@]}" --plan /dev/null
expect "missing" 1 'nowhere' plan "${model[@]}" --plan "$tmp/nowhere"

echo "$n checks, $failed failed"
[ "$failed" -eq 0 ]
