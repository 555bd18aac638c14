#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kvdrive cache over a directory that kvdrive run has filled: what it holds, damage, less of it, and
# the messages.  KVDRIVE is the program; runs in the source root.
set -u
kvd=${KVDRIVE:?}
export XDG_CONFIG_HOME=/nonexistent
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
dir=$tmp/cache
. "$(dirname "$0")/expect.sh"

# json NAME CONDITION COMMAND...: its output is JSON, of which the Python condition on `a` holds
json() {
    local name=$1 condition=$2 out
    shift 2
    n=$((n + 1))
    out=$("$@" 2>/dev/null </dev/null)
    if ! python3 -c 'import json, sys
a = json.loads(sys.stdin.read())
sys.exit(not eval("(" + sys.argv[1] + ")"))' "$condition" <<<"$out"; then
        echo "FAILED: $name: expected $condition of:"
        head -c 1000 <<<"$out"
        failed=$((failed + 1))
    fi
}
printf 'line %d of a text that fills a few blocks of two hundred and fifty-six tokens\n' \
    {1..64} >"$tmp/text"
generate() {
    timeout "$PATIENCE" "$kvd" run -m tests/data/tiny/llama.gguf --rope-scaling linear \
        --rope-scale 64 --deterministic --raw -f "$tmp/text" -n 4 --temp 0 --json --cache-dir "$dir"
}

expect "no verb" 2 'stats, ls, verify, clear or gc' "$kvd" cache --cache-dir "$dir"
expect "no verb of it" 2 "unknown verb 'foo': expected stats, ls" "$kvd" cache foo
expect "a wrong verb" 2 "did you mean 'verify'" "$kvd" cache verfy --cache-dir "$dir"
expect "no directory" 2 'no directory given' "$kvd" cache stats
expect "no such directory" 1 'there is no such cache directory' \
    "$kvd" cache stats --cache-dir "$tmp/none"
mkdir "$tmp/other"
expect "no cache" 2 'no cache: there is no catalog.db' "$kvd" cache clear --cache-dir "$tmp/other"
[ -z "$(ls -A "$tmp/other")" ] || { echo "FAILED: files were made in $tmp/other"; failed=1; }

json "a first run" "a['prompt_tokens'] > 4096 and a['stats']['counts']['n_cached'] == 0" generate
json "a second run" "a['stats']['counts']['n_cached'] == a['prompt_tokens'] - 1 and
0 < a['stats']['counts']['cached_ns'] < 6e10" generate
json "stats" "a['segments'] == 1 and a['blocks'] > 0 and a['tails'] > 0 and
a['quarantined'] == 0 and
a['units'] == a['segments'] + a['blocks'] + a['tails'] and a['bytes'] > 1e6 and
a['free_bytes'] > 0 and a['written_today_bytes'] >= a['bytes']" \
    "$kvd" cache stats --cache-dir "$dir" --json
expect "stats for people" 0 'segments +1$' "$kvd" cache stats --cache-dir "$dir"
json "ls" "sum(e['kind'] == 'segment' and e['tokens'] == 4096 for e in a) == 1 and
len({e['key'] + e['kind'] for e in a}) == len(a) and
not any(e['quarantined'] or e['salted'] for e in a)" "$kvd" cache ls --cache-dir "$dir" --json
expect "ls for people" 0 ' segment +0 +4096 ' "$kvd" cache ls --cache-dir "$dir"
json "verify" "a['ok'] > 2 and a['bad'] == 0" "$kvd" cache verify --cache-dir "$dir" --json
expect "verify for people" 0 'units are whole, 0 damaged$' "$kvd" cache verify --cache-dir "$dir"
expect "environment" 0 'units are whole' env KVDRIVE_CACHE_DIR="$dir" "$kvd" cache verify

expect "a limit beyond the filesystem" 0 \
    "^kvdrive: $dir: the cache may hold 1024000.0 GiB, .* room for [0-9.]+ GiB$" \
    "$kvd" run -m tests/data/tiny/llama.gguf --raw -p x -n 1 --cache-dir "$dir" --kv-disk 1000T
expect "a limit within the filesystem, without a word" 1 '^$' sh -c \
    "$kvd run -m tests/data/tiny/llama.gguf --raw -p x -n 1 --cache-dir $dir --kv-disk 8M \
    2>&1 | grep 'room for'"

# in use: by whoever has the lock
exec 9>>"$dir/lock"
flock -n 9
expect "in use" 1 'in use by another process' "$kvd" cache stats --cache-dir "$dir"
expect "in use, by a server" 1 'a server has it open, its GET /metrics' \
    "$kvd" cache stats --cache-dir "$dir"
tiny="-m tests/data/tiny/llama.gguf --cache-dir $dir -c 512"
tiny="$tiny --rope-scaling linear --rope-scale 64"
echo 1234 >"$dir/lock" # the number is what the message says
without='in use by another process, 1234: going on without the prefix cache$'
echo '{{ messages[0].content }}' >"$tmp/template"
expect "run goes on" 0 "$without" "$kvd" run $tiny --raw -p x -n 1
expect "chat goes on" 0 "$without" sh -c \
    "echo hello | $kvd chat $tiny -n 1 --chat-template $tmp/template"
expect "perplexity goes on" 0 "$without" "$kvd" perplexity $tiny "$tmp/text"
expect "a tier cannot be left out" 1 'in use by another process, 1234$' \
    "$kvd" run ${tiny/-c 512/-c 8192 -b 64 --budget 64} --raw -p x -n 1 --attention sparse \
    --kv-device 2M --kv-host 60K
expect "serve says who has it" 1 'in use by another process, 1234$' "$kvd" serve $tiny --port 0
exec 9>&-

json "gc without a limit" "a['removed_units'] == 0" "$kvd" cache gc --cache-dir "$dir" --json
python3 - "$dir/00000001.kvd" <<'PY'
import sys
f = open(sys.argv[1], "r+b")
f.seek(4096 + 100)
b = f.read(1)
f.seek(4096 + 100)
f.write(bytes([b[0] ^ 1]))
PY
expect "verify finds damage" 1 'whole, 1 damaged: .* cache gc' \
    "$kvd" cache verify --cache-dir "$dir"
json "damage is remembered" "a['quarantined'] == 1" "$kvd" cache stats --cache-dir "$dir" --json
json "gc removes what is damaged" "a['removed_units'] == 1 and a['units'] > 0" \
    "$kvd" cache gc --cache-dir "$dir" --json
generate >/dev/null
json "gc to a size" "a['removed_units'] > 0 and 0 < a['bytes'] <= 1290000" \
    "$kvd" cache gc --cache-dir "$dir" --kv-disk 1290000 --json
generate >/dev/null
expect "clear" 0 'removed, 0 of 0.0 MiB left' "$kvd" cache clear --cache-dir "$dir"
json "nothing is left" "a['units'] == 0 and a['bytes'] == 0 and a['files'] == 0" \
    "$kvd" cache stats --cache-dir "$dir" --json
[ -z "$(ls "$dir"/*.kvd 2>/dev/null)" ] || { echo "FAILED: data files are left"; failed=1; }

generate >/dev/null
python3 - "$dir/catalog.db" <<'PY'
import sys
f = open(sys.argv[1], "r+b")
f.seek(30)
f.write(b"\xff" * 4000)
PY
expect "a damaged catalogue" 1 'catalog.bad' "$kvd" cache verify --cache-dir "$dir"
expect "then an empty cache" 0 '0 units are whole, 0 damaged' "$kvd" cache verify --cache-dir "$dir"

echo "$n checks, $failed failed"
exit $((failed > 0))
