#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A GPU that the CUDA module has no code for: -ngl goes on with the CPU and says why, --backend cuda
# ends with what the module has code for.  The module beside the program is fake_cuda.c.
# usage: odd_gpu.sh KVDRIVE MODULE   (run in the source root)
set -u
export XDG_CONFIG_HOME=/nonexistent
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cp "$1" "$tmp/kvdrive"
cp "$2" "$tmp/libkvdrive-cuda.so"
failed=0

# expect CODE PATTERN OPTION...
expect() {
    local code=$1 pattern=$2 out got
    shift 2
    out=$(timeout 60 "$tmp/kvdrive" run -m tests/data/tiny/llama.gguf --raw -p x -n 1 "$@" 2>&1 \
        </dev/null)
    got=$?
    if [ "$got" != "$code" ] || ! grep -qE -- "$pattern" <<<"$out"; then
        echo "FAILED: $*: exit $got (expected $code), output (expected /$pattern/):"
        head -c 1000 <<<"$out"
        failed=1
    fi
}

no_code='no code for Odd GPU \(compute capability 8.7\), but for sm_80, sm_90 and later'
expect 3 "$no_code .*--backend cpu" --backend cuda
expect 3 'Old GPU has compute capability 7.5; 8.0 or later .*--backend cpu' --backend cuda:1
expect 0 "$no_code.*going on with the CPU" -ngl 99
[ "$failed" -eq 0 ] && echo "says what it has, and goes on without"
exit "$failed"
