#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The program as a user meets it, on tiny models: outputs, messages, exit codes.  KVDRIVE is the
# program; runs in the source root.
set -u
kvd=${KVDRIVE:?}
tiny=tests/data/tiny
export XDG_CONFIG_HOME=/nonexistent
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
. "$(dirname "$0")/expect.sh"


expect "overview" 0 'kvdrive COMMAND --help' "$kvd" --help
expect "no command" 2 'usage' "$kvd"
expect "help of a command" 0 'usage: kvdrive plan -m' "$kvd" help plan
expect "an option before the command" 2 'comes before its options' "$kvd" -m x
expect "wrong command" 2 "did you mean 'perplexity'" "$kvd" perplexiti
expect "wrong option" 2 "unknown option '--thread'; did you mean '--threads'" "$kvd" run --thread 2
expect "wrong option, like another command's" 2 \
    "unknown option '--samplez'$" "$kvd" run --samplez x
expect "a model in place of an option" 2 'behind -m' "$kvd" plan model.gguf
expect "option of another command" 2 'does not belong' "$kvd" doctor -c 4
expect "bad number" 2 'whole number' "$kvd" run -c many
expect "print-config" 0 'ctx-size .*= 77 .*# environment' env KVDRIVE_CTX_SIZE=77 \
    "$kvd" run --print-config
expect "no model" 2 'no model given' "$kvd" run -p x
expect "no such file" 1 'No such file' "$kvd" run -m "$tmp/none.gguf" --raw -p x
expect "no prompt" 2 'no prompt' "$kvd" run -m $tiny/llama.gguf --raw
expect "a text where a file belongs" 1 'hello .*-p TEXT' "$kvd" run -m $tiny/llama.gguf --raw hello
expect "tokens and a text" 2 'not both' "$kvd" run -m $tiny/llama.gguf --tokens /dev/null -p x
expect "no tokens" 2 'no token ids' "$kvd" run -m $tiny/llama.gguf --tokens /dev/null
expect "answer cut by the context" 0 'the context of 16 tokens is full' \
    "$kvd" run -m $tiny/llama.gguf --raw -p x -c 16 --ignore-eos
expect "no template" 2 'use --raw' "$kvd" run -m $tiny/llama.gguf -p x
expect "context too long" 2 '129.*128' "$kvd" run -m $tiny/llama.gguf --raw -p x -c 129
expect "prompt too long" 4 'has 200 tokens, the context 128' "$kvd" run -m $tiny/llama.gguf --raw \
    -p "$(printf 'a.%.0s' {1..100})"
expect "unequal cache types" 2 'different types' \
    "$kvd" run -m $tiny/llama.gguf --raw -p x -ctk f32 -ctv bf16
expect "bad bias" 2 'ID\+B' "$kvd" run -m $tiny/llama.gguf --raw -p x -l 5
expect "greedy repeats" 0 '"finish_reason":"length".*"prompt_tokens":4' \
    "$kvd" run -m $tiny/llama.gguf \
    --raw -p hello -n 8 --temp 0 --json
expect "answer by a schema" 0 '"text":"\[1, ?2\]".*"finish_reason":"stop"' \
    "$kvd" run -m $tiny/qwen2.gguf --raw -p hello -n 30 --temp 1 --seed 5 --json \
    --json-schema '{"enum":[[1,2]]}' -l 9-100,10-100,13-100,32-100
dense=9-100,10-100,13-100,32-100
for number in 9007199254740993 -9007199254740993 9223372036854775807 -9223372036854775808 \
    18446744073709551615 123456789012345678901234567890; do
    expect "exactly $number" 0 "\"text\":\"$number\".*\"finish_reason\":\"stop\"" \
        "$kvd" run -m $tiny/qwen2.gguf --raw -p hello -n 60 --temp 1 --seed 5 --json \
        --json-schema "{\"type\":\"integer\",\"minimum\":$number,\"maximum\":$number}" -l $dense
done
expect "as the schema spells it" 0 '"text":"0.[17]".*"finish_reason":"stop"' \
    "$kvd" run -m $tiny/qwen2.gguf --raw -p hello -n 60 --temp 1 --seed 5 --json \
    --json-schema '{"enum":[0.1,0.7]}' -l $dense
expect "a bound that is too long" 2 'schema: maximum: a number of more than 400 digits' \
    "$kvd" run -m $tiny/qwen2.gguf --raw -p x --json-schema '{"maximum":1e999}'
printf '{"type":"object","properties":{"a":{"not":{}}}}' >"$tmp/schema.json"
expect "a schema that cannot be applied" 2 'not is not supported \(at /a\)' \
    "$kvd" run -m $tiny/qwen2.gguf --raw -p x --json-schema "$tmp/schema.json"
expect "two forms" 2 'one of schema_json, json_object' \
    "$kvd" run -m $tiny/qwen2.gguf --raw -p x --json-schema '{}' --json-object
expect "a schema and no end" 2 'ignore-eos does not go' \
    "$kvd" run -m $tiny/qwen2.gguf --raw -p x --json-schema '{}' --ignore-eos
expect "llama.cpp's options" 0 '-fa is another program.s and changes nothing here' \
    "$kvd" run -m $tiny/llama.gguf --raw -p x -n 1 -fa on --no-mmap -mg 0 -sm none
expect "not in the help" 1 '' sh -c "$kvd run --help-all | grep -q flash-attn"
expect "no memory of its own" 3 'has no memory of its own.*--kv-device' \
    "$kvd" run -m $tiny/llama.gguf --raw -p x -n 1 --device-memory 1G
expect "unknown backend" 2 'there are cpu, ref and cuda' \
    "$kvd" run -m $tiny/llama.gguf --raw -p x -n 1 --backend cudo
expect "no GPU" 0 'going on with the CPU' "$kvd" run -m $tiny/llama.gguf --raw -p x -n 1 -ngl 99
expect "bench" 0 'pp16 .*\|' "$kvd" bench -m $tiny/qwen2.gguf -p 16 -n 4 -r 2
expect "bench at depth, parallel" 0 '^qwen2,.*,0,4,8,3,' \
    "$kvd" bench -m $tiny/qwen2.gguf -p 0 -n 4 -d 8 \
    -np 3 -r 2 -o csv
expect "bench of nothing" 2 'nothing to measure' "$kvd" bench -m $tiny/qwen2.gguf -p 0 -n 0
expect "bench of a shape" 0 '^sparse,.*,int8,tiny,q4_k,0.925,4096.00,2.00,' \
    "$kvd" bench --shape tiny --shape-type q4_k -d 4096 -np 1,2 -n 4 --attention sparse \
    --budget 64 --kv-device 32M -b 128 --sweep 'cap=1,2;kv-record=same,int8' -o csv
expect "bench of a shape, dense" 0 '"hit_pct":null' \
    "$kvd" bench --shape tiny -d 300 -n 4 --attention dense -o json
expect "bench of a shape, its first run alone" 0 '"sum_ms":null' \
    "$kvd" bench --shape tiny -d 300 -n 4 --brief -o json
expect "bench of a shape as it grows" 0 ',4096.00,3.00,' \
    "$kvd" bench --shape tiny -d 4096 -n 2 --attention sparse --budget 64 --kv-device 48M \
    --grow -o csv
expect "bench of a shape with a disk tier" 0 '"disk_records":[1-9]' \
    "$kvd" bench --shape tiny -d 4096 -n 2 --attention sparse --budget 64 --kv-device 20M \
    --kv-host 2M --cache-dir "$tmp/made-up" --brief -o json
expect "bench with a cache of what is measured" 2 'made-up rows alone' \
    "$kvd" bench --shape tiny -p 16 --cache-dir "$tmp/made-up"
expect "bench of a shape's prompts" 0 'pp16 .*\|' "$kvd" bench --shape tiny -p 16 -n 0 -r 1
expect "bench of no shape" 2 "no shape 'big'" "$kvd" bench --shape big
expect "bench of nothing to sweep" 2 'expected NAME=A,B' \
    "$kvd" bench --shape tiny -d 300 --sweep cap
expect "bench of an unknown sweep" 2 "did you mean '--cap'" \
    "$kvd" bench --shape tiny -d 300 --sweep cab=1
expect "bench of a shape without context" 2 'and a context' "$kvd" bench --shape tiny -n 4
expect "bench list" 2 'expected numbers' "$kvd" bench -m $tiny/qwen2.gguf -p 1,x
expect "tokenize" 0 '104 +"h"' "$kvd" tokenize -m $tiny/llama.gguf -p h
expect "inspect" 0 'token_embd.weight +F32 +\[[0-9]+, 264\]' "$kvd" inspect $tiny/llama.gguf
expect "inspect json" 0 '"n_ctx_train": 128' "$kvd" inspect $tiny/llama.gguf --json
expect "plan" 0 'longest context is 128 tokens .*the model' "$kvd" plan -m $tiny/llama.gguf -c 64
expect "plan of a sparse step" 0 'score.pick +0-1 +main' \
    "$kvd" plan -m $tiny/llama.gguf -c 64 -np 2 --attention sparse --budget 16 --steps
expect "plan of a dense step" 0 'no step program' "$kvd" plan -m $tiny/llama.gguf -c 64 \
    --attention dense --steps
expect "plan of a step as JSON" 0 '"steps":."host-driven' "$kvd" plan -m $tiny/llama.gguf -c 64 \
    --attention sparse --budget 16 --steps --json
expect "policies" 0 '^kvdrive-paper +clusters' "$kvd" run --policy list
expect "an unknown policy" 2 '"quesst" is unknown; there are kvdrive, kvdrive-paper, full, stream' \
    "$kvd" plan -m $tiny/llama.gguf --policy quesst
expect "a policy" 0 'change.window. +0 +host' "$kvd" plan -m $tiny/llama.gguf -c 128 \
    --policy kvdrive-paper --budget 16 --steps
expect "an option over a policy" 0 'no step program' "$kvd" plan -m $tiny/llama.gguf -c 128 \
    --policy kvdrive-paper --attention dense --steps
expect "a policy that streams" 0 '"kv_resident":false' "$kvd" plan -m $tiny/llama.gguf -c 128 \
    --policy stream --json
# The default policy is what the options' own defaults say.
planned() { "$kvd" plan -m $tiny/llama.gguf -c 128 --json --attention sparse --budget 16 "$@" |
    sed -E 's/"(available_bytes|n_ctx_fits)":[0-9]+//g'; }
[ "$(planned)" = "$(planned --policy kvdrive --fetch deferred --attend window --evict ema \
    --lookup device --schedule sequential --index mean-int4+radius --chunk 4 --sink 16 --local 64 \
    --kv-record same --kv-tiers auto)" ] || {
    echo "FAILED: the default policy is not what options say"
    failed=$((failed + 1))
}
expect "plan of a server" 0 'for each of 3 sequences, 192 together,' \
    "$kvd" plan -m $tiny/llama.gguf -c 64 -np 3
expect "plan of a server, and its tokens" 0 'for each of 4 sequences, 300 together' \
    "$kvd" plan -m $tiny/llama.gguf -c 64 --kv-tokens 300
expect "plan of a server that does not fit" 4 'does not fit: fewer sequences' \
    "$kvd" plan -m $tiny/llama.gguf -c 64 --parallel 2 --kv-tokens 1000000000
long="-m $tiny/llama.gguf -c 4000 --rope-scaling linear --rope-scale 64"
long="$long --attention sparse --budget 96 -b 96"
expect "plan, resident" 0 'everything fits: a lower tier adds nothing' "$kvd" plan $long
expect "plan, host" 0 'KV host tier .* all records$' "$kvd" plan $long --kv-device 1100K
expect "plan, host and cache" 0 'all records: the disk adds only their reuse' \
    "$kvd" plan $long --kv-device 1100K --cache-dir /nonexistent/kvd
expect "plan, disk" 0 'records; the rest lies in --cache-dir' \
    "$kvd" plan $long --kv-device 1100K --kv-host 100K --cache-dir /nonexistent/kvd
expect "plan, too small" 2 'device tier .*are needed' "$kvd" plan $long --kv-device 1K
n=$((n + 1))
named=$("$kvd" plan $long --kv-device 1K 2>&1 | grep -oE -- '\(--?[a-z]+(-[a-z]+)*\)' | tr -d '()')
if [ "$(wc -w <<<"$named")" -ne 6 ]; then
    echo "FAILED: plan, too small: it names" $named
    failed=$((failed + 1))
fi
for option in $named; do
    if ! "$kvd" plan --help-all | grep -qE -- "(^|[ ,])$option( |,|$)"; then
        echo "FAILED: plan, too small: it names $option, which is no option"
        failed=$((failed + 1))
    fi
done
expect "plan json" 0 '"n_ctx":64' "$kvd" plan -m $tiny/llama.gguf -c 64 --json
expect "doctor" 0 'n_cpu' "$kvd" doctor
expect "unusable isa" 2 'cpu-isa' "$kvd" bench -m $tiny/llama.gguf --cpu-isa sse9

printf 'ctx-size = 12\nbogus = 1\n' >"$tmp/config"
expect "unknown key" 2 'config:2: unknown option .bogus' "$kvd" run --config "$tmp/config" -p x
head -c 2000 $tiny/llama.gguf >"$tmp/cut.gguf"
expect "truncated file" 3 'cut.gguf.*2000' "$kvd" run -m "$tmp/cut.gguf" --raw -p x
printf 'not a model' >"$tmp/text.gguf"
expect "not a model" 3 'text.gguf' "$kvd" run -m "$tmp/text.gguf" --raw -p x
python3 - "$tiny/llama.gguf" "$tmp" <<'PY'
import sys
b = open(sys.argv[1], "rb").read()
open(sys.argv[2] + "/arch.gguf", "wb").write(b.replace(b"llama", b"blama"))
open(sys.argv[2] + "/pre.gguf", "wb").write(b.replace(b"gpt-2", b"gpt-9"))
renamed = b.replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight")
open(sys.argv[2] + "/tensor.gguf", "wb").write(renamed)
PY
python3 - $tiny/qwen3-yarn.gguf "$tmp/yarn.gguf" <<'PY'
import struct, sys
b = open(sys.argv[1], "rb").read()
key = b"qwen3.rope.scaling.yarn_beta_fast"
new = struct.pack("<Q", len(key)) + key + struct.pack("<If", 6, 16.0)
pad = -(len(new) + 8 + 3 + 4 + 8) % 32  # a second entry keeps the tensors where they are aligned
new += struct.pack("<Q3sIQ", 3, b"pad", 8, pad) + b"x" * pad
n_kv = struct.unpack_from("<Q", b, 16)[0] + 2
open(sys.argv[2], "wb").write(b[:16] + struct.pack("<Q", n_kv) + new + b[24:])
PY
expect "other YaRN constants" 3 'yarn_beta_fast is 16' "$kvd" run -m "$tmp/yarn.gguf" --raw -p x
expect "unknown architecture" 3 "architecture 'blama'" "$kvd" run -m "$tmp/arch.gguf" --raw -p x
expect "unknown pre-tokenizer" 3 'gpt-9' "$kvd" run -m "$tmp/pre.gguf" --raw -p x
expect "wrong tensor" 3 'attn_[qz].weight' "$kvd" run -m "$tmp/tensor.gguf" --raw -p x
expect "wrong architecture can be inspected" 0 'cannot run it: .*blama' \
    "$kvd" inspect "$tmp/arch.gguf"

printf '{%% for m in messages %%}[{{ m.role }}]{{ m.content }}{%% endfor %%}' >"$tmp/ok.jinja"
expect "template by flag" 0 '"prompt_tokens":' \
    "$kvd" run -m $tiny/llama.gguf --chat-template "$tmp/ok.jinja" \
    -p hi -n 2 --json
printf '{{ messages | frobnicate }}' >"$tmp/bad.jinja"
expect "template refused by name" 3 'frobnicate.*--chat-template' "$kvd" run -m $tiny/llama.gguf \
    --chat-template "$tmp/bad.jinja" -p hi

printf 'some text to score, long enough to fill a window or two\n%.0s' {1..20} >"$tmp/text"
expect "stray argument" 2 "unexpected argument 'b'" "$kvd" perplexity -m $tiny/llama.gguf a b
expect "stray argument where none belongs" 2 "unexpected argument 'x'" "$kvd" doctor x
expect "an argument beats the environment" 0 'token_embd' env KVDRIVE_MODEL=/nonexistent \
    "$kvd" inspect $tiny/llama.gguf
expect "a system text that is no UTF-8" 2 'the system text cannot' "$kvd" run -m $tiny/llama.gguf \
    --chat-template "$tmp/ok.jinja" -p hi --system $'\xff'
expect "an empty message" 2 'the prompt is empty' "$kvd" run -m $tiny/llama.gguf \
    --chat-template "$tmp/ok.jinja" -p ""
expect "a prompt that is no UTF-8" 2 'byte 3 \(0xe9\)' "$kvd" run -m $tiny/llama.gguf \
    --chat-template "$tmp/ok.jinja" -p $'caf\xe9'
printf 'a\0b' >"$tmp/zero"
expect "a zero byte in a message" 0 '"prompt_tokens":9' "$kvd" run -m $tiny/llama.gguf \
    --chat-template "$tmp/ok.jinja" -f "$tmp/zero" -n 1 --json
expect "what is no UTF-8 is escaped" 0 '"\\xff"' bash -c "printf '\xff' |
    '$kvd' tokenize -m $tiny/llama.gguf -"
expect "no answer asked for" 0 '"decode_tokens":0' "$kvd" run -m $tiny/llama.gguf --tokens \
    <(seq 1 127) -n 0 --json
expect "bench takes no context" 2 'does not belong' "$kvd" bench -m $tiny/qwen2.gguf -c 64

# Metadata added in front of a file's own; a filler keeps the tensor data aligned.
python3 - "$tiny/llama.gguf" "$tmp" <<'PY'
import struct, sys
data = open(sys.argv[1], "rb").read()
def text(s):
    return struct.pack("<Q", len(s)) + s
def save(name, *keys):
    new = b"".join(text(k) + {int: lambda v: struct.pack("<II", 4, v),
                              float: lambda v: struct.pack("<If", 6, v),
                              bytes: lambda v: struct.pack("<I", 8) + text(v)}[type(v)](v)
                   for k, v in keys)
    new += text(b"filler") + struct.pack("<I", 8) + text(b"x" * (-(len(new) + 26) % 32))
    n = struct.unpack_from("<Q", data, 16)[0] + len(keys) + 1
    open(f"{sys.argv[2]}/{name}.gguf", "wb").write(
        data[:16] + struct.pack("<Q", n) + new + data[24:])
save("wide", (b"llama.attention.key_length", 1024))
save("scaled", (b"llama.rope.scaling.factor", 2.0))
save("scaled_old", (b"llama.rope.scale_linear", 2.0))
save("unscaled", (b"llama.rope.scaling.type", b"linear"), (b"llama.rope.scaling.factor", 1.0))
save("window", (b"llama.attention.sliding_window", 64))
save("zero", (b"general.description", b"a\0b"))
PY
expect "heads too wide" 3 'key_length is 1024, expected 1 to 512' \
    "$kvd" run -m "$tmp/wide.gguf" --raw -p x
expect "a zero byte in metadata" 0 'u0000' "$kvd" inspect "$tmp/zero.gguf"
expect "scaling beyond a sliding window" 3 'sliding window of 64' "$kvd" run -m "$tmp/window.gguf" \
    --raw -p x --rope-scaling yarn --rope-scale 2
logits() {
    "$kvd" perplexity -m "$@" "$tmp/text" -c 64 --chunks 1 --logits-out "$tmp/logits" >/dev/null &&
        sha256sum <"$tmp/logits"
}
plain=$(logits $tiny/llama.gguf)
linear=$(logits $tiny/llama.gguf --rope-scaling linear --rope-scale 2)
n=$((n + 1))
[ "$plain" != "$linear" ] && [ "$(logits "$tmp/scaled.gguf")" = "$linear" ] &&
    [ "$(logits "$tmp/scaled_old.gguf")" = "$linear" ] &&
    [ "$(logits "$tmp/unscaled.gguf")" = "$plain" ] || {
    echo "FAILED: RoPE scaling without a type in the file"
    failed=$((failed + 1))
}

expect "perplexity" 0 'perplexity [0-9.]+ \+/- [0-9.]+ over 496' \
    "$kvd" perplexity -m $tiny/llama.gguf \
    "$tmp/text" -c 64 --chunks 16
"$kvd" perplexity -m $tiny/llama.gguf "$tmp/text" -c 64 --chunks 2 --logits-out "$tmp/logits" \
    >/dev/null
[ "$(stat -c %s "$tmp/logits")" = $((2 * 31 * 264 * 4)) ] || {
    echo "FAILED: logits-out has $(stat -c %s "$tmp/logits") bytes"
    failed=$((failed + 1))
}
expect "full output device" 1 'writing to standard output failed' bash \
    -c "'$kvd' inspect $tiny/llama.gguf >/dev/full"

out=$(printf 'hello\n/undo\n/nosuch\n/stats\n/quit\nnever\n' |
    timeout "$PATIENCE" "$kvd" chat -m $tiny/llama.gguf --chat-template "$tmp/ok.jinja" -n 3 \
        --temp 0 2>&1)
grep -q 'unknown command /nosuch' <<<"$out" && grep -q 'KV cache in use' <<<"$out" || {
    echo "FAILED: chat: $out"
    failed=$((failed + 1))
}

# ---- what chat and run share
run=("$kvd" run -m $tiny/llama.gguf --raw -n 12 --temp 0 -p hello --json)
answer() { "${run[@]}" --ignore-eos "$@" |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["text"])'; }
text=$(answer)
stop=${text:3:2} # of the answer, whatever that is
expect "an answer that a text stops" 0 '"finish_reason":"stop"' "${run[@]}" --ignore-eos \
    --stop nothing-like-it -r "$stop"
n=$((n + 1))
got=$(answer -r "$stop" --stop nothing-like-it)
[ "$got" = "${text%%"$stop"*}" ] && [ "$(answer --stop "${text: -1}$")" = "$text" ] || {
    echo "FAILED: --stop: '$got', not '${text%%"$stop"*}'"
    failed=$((failed + 1))
}
expect "an empty stop text" 2 '--stop is an empty text' "${run[@]}" --stop ""
tokens() { "$kvd" run -m $tiny/llama.gguf --raw -n 0 --json "$@" |
    grep -o '"prompt_tokens":[0-9]*'; }
n=$((n + 1))
[ "$(tokens -e -p 'a\n\t\\\x41\q')" = "$(tokens -p $'a\n\t\\A\\q')" ] &&
    [ "$(tokens -p 'a\n')" = "$(tokens -e -p 'a\\n')" ] || {
    echo "FAILED: --escape"
    failed=$((failed + 1))
}
expect "top-k -1, several biases, one turn" 0 'finish_reason' "${run[@]}" --top-k -1 -st \
    -l 5+1 -l 6-1,7+1 --temp -1 -t -1
expect "a bad bias among several" 2 "ID-B at 'x'" "${run[@]}" -l 5+1 -l x
expect "a context in K" 2 '1024.*128' "$kvd" run -m $tiny/llama.gguf --raw -p x -c 1K
expect "a depth in K" 0 ',1024.00,' "$kvd" bench --shape tiny -n 4 -d 1K --brief -o csv
for layers in all auto -1 -2 1 99; do
    expect "-ngl $layers without a GPU" 0 'going on with the CPU' "${run[@]}" -ngl $layers
done
expect "-ngl 0" 0 '^.{1,4}text' "${run[@]}" -ngl 0
expect "-ngl of nothing" 2 "gpu-layers: 'some' is none of all, auto, or a number" \
    "${run[@]}" -ngl some
for command in run chat bench serve eval plan profile; do
    n=$((n + 1))
    short=$("$kvd" $command --help | grep -c '^  -')
    all=$("$kvd" $command --help-all | grep -c '^  -')
    [ "$short" -ge 8 ] && [ "$short" -le 24 ] && [ $((short + 12)) -le "$all" ] || {
        echo "FAILED: $command --help shows $short of $all options"
        failed=$((failed + 1))
    }
done
expect "twenty options, --config and the two of help" 0 '^23$' \
    sh -c "$kvd run --help | grep -c '^  -'"
expect "a home directory in a path" 1 "model $tmp/none: No such file" env HOME="$tmp" \
    "$kvd" run -m '~/none' -p x
expect "of another user" 2 'only ~/ is known as a home directory' "$kvd" run -m '~bob/none' -p x

out=$(printf '"""one\n\ntwo"""\nthree\\\nfour\n/save it\n' |
    XDG_DATA_HOME=$tmp timeout 60 "$kvd" chat -m $tiny/llama.gguf --chat-template "$tmp/ok.jinja" \
        -n 1 --temp 0 2>&1)
n=$((n + 1))
grep -q 'saved as it$' <<<"$out" && python3 - "$tmp/kvdrive/chats/it.json" <<'PY' || {
import json, sys
asked = [m["content"] for m in json.load(open(sys.argv[1]))["messages"] if m["role"] == "user"]
assert asked == ["one\n\ntwo", "three\nfour"], asked
PY
    echo "FAILED: chat, messages of several lines: $out"
    failed=$((failed + 1))
}

echo "$n cases, $failed failed"
[ $failed = 0 ]
