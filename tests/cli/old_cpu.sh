#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The program on an emulated processor of x86-64-v2, which knows no AVX, and on one with AVX2: it
# runs, says what it uses, and writes what it writes here with portable code.  Skipped without
# qemu-x86_64.
# usage: old_cpu.sh KVDRIVE   (run in the source root)
set -u
kvd=$1
tiny=tests/data/tiny
export XDG_CONFIG_HOME=/nonexistent
command -v qemu-x86_64 >/dev/null || {
    echo "skipped: no qemu-x86_64 (Debian's qemu-user)"
    exit 77
}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
. "$(dirname "$0")/expect.sh"

# The emulator warns of what it lacks itself.
on() {
    local cpu=$1
    shift
    timeout "$PATIENCE" qemu-x86_64 -cpu "$cpu" "$@" 2> >(grep -v '^qemu-x86_64: warning' >&2)
}

for level in Nehalem:portable Haswell:avx2; do
    cpu=${level%:*} isa=${level#*:}
    expect "version on $cpu" 0 '^kvdrive [0-9]' on "$cpu" "$kvd" --version
    expect "what $cpu has" 0 "isa +\"$isa\"" on "$cpu" "$kvd" doctor
    for model in llama qwen3; do
        run=(run -m "$tiny/$model.gguf" --raw -p "hello there" -n 12 --temp 1 --seed 5 -t 1
             --ignore-eos --json)
        want=$("$kvd" "${run[@]}" --cpu-isa "$isa" 2>/dev/null | grep -o '"tokens":[^]]*')
        got=$(on "$cpu" "$kvd" "${run[@]}" 2>/dev/null |
            grep -o '"tokens":[^]]*')
        if [ -z "$want" ] || [ "$got" != "$want" ]; then
            echo "FAILED: $model on $cpu: $got"
            echo "expected: $want"
            failed=$((failed + 1))
        fi
    done
done
expect "a cache directory" 0 '.' on Nehalem "$kvd" run -m "$tiny/llama.gguf" --raw \
    -p "$(printf 'said before %.0s' {1..40})" -n 2 -t 1 --rope-scaling linear --rope-scale 8 \
    --cache-dir "$tmp/cache"
expect "more than there is" 3 'avx2.*portable' on Nehalem "$kvd" run -m $tiny/llama.gguf --raw \
    -p x -n 1 --cpu-isa avx2

[ "$failed" -eq 0 ] && echo "runs on processors of x86-64-v2 and v3"
exit "$failed"
