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
. "$(dirname "$0")/expect.sh"

run() {
    timeout "$PATIENCE" "$tmp/kvdrive" run -m tests/data/tiny/llama.gguf --raw -p x -n 1 "$@"
}

no_code='no code for Odd GPU \(compute capability 8.7\), but for sm_80, sm_90 and later'
expect "no code" 3 "$no_code.*\(--backend\), as \"cpu\"" run --backend cuda
too_old='Old GPU has compute capability 7.5; 8.0 or later'
expect "too old" 3 "$too_old.*\(--backend\), as \"cpu\"" run --backend cuda:1
expect "-ngl" 0 "$no_code.*going on with the CPU" run -ngl 99
[ "$failed" -eq 0 ] && echo "says what it has, and goes on without"
exit $((failed > 0))
