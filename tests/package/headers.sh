#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every header compiles alone as C11; those a .cu file may include also as C++17.
# usage: headers.sh CC CXX   (run in the source root)
set -euo pipefail
cc=$1
cxx=$2
flags=(-Iinclude -Isrc -Itests -Wall -Wextra -Wshadow -Wundef -Werror -Wno-unused-function)
isa=(-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
     -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16)
n=0
fail=0

# check COMPILER STANDARD HEADER
check() {
    local extra=()
    [[ $3 =~ _(avx2|avx512[a-z0-9]*|amx)\.h$ ]] && extra=("${isa[@]}")
    # Through an including file, as it is used: twice, so that the guard is seen to work.
    if ! printf '#include "%s"\n#include "%s"\n' "$3" "$3" |
        "$1" -x "$4" -std="$2" -march=x86-64-v2 "${flags[@]}" "${extra[@]}" -I. -fsyntax-only -
    then
        echo "FAILED: $3 as $2" >&2
        fail=1
    fi
    n=$((n + 1))
}

while read -r header; do
    # Parts of kernels, included with the macros of one instruction-set level.
    [[ $header =~ ^src/backend/cpu/.*(_impl|_w[0-9]+|_gemm_f32)\.h$ ]] && continue
    [[ $header == src/backend/cuda/* ]] && continue # of nvcc's own language
    check "$cc" gnu11 "$header" c
done < <(find include src cli server tests -name '*.h' 2>/dev/null | sort)
for header in include/kvdrive.h src/base/*.h src/backend/backend.h; do
    check "$cxx" c++17 "$header" c++
done
[ "$fail" -eq 0 ] && echo "$n header compilations passed"
exit "$fail"
