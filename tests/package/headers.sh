#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every header compiles alone as C11; those a .cu file may include also as C++17.  Every public
# struct that says its size has an initialiser, which strict C11 and C++17 take.
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

# Of a struct kvd_x: KVD_X_INIT, which is zeros and its size but for the defaults that it may have.
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
sized=$(grep -A1 -E '^typedef struct kvd_[a-z_]+ \{$' include/kvdrive.h |
    grep -B1 -E '^    size_t +struct_size;' | sed -nE 's/^typedef struct (kvd_[a-z_]+) \{$/\1/p')
{
    printf '#include <kvdrive.h>\nint main(void)\n{\n'
    for name in $sized; do
        init=${name^^}_INIT
        printf '    { %s x = %s; const %s y = %s;\n' "$name" "$init" "$name" "$init"
        printf '      if (x.struct_size != sizeof(x) || y.struct_size != sizeof(y)) return 1; }\n'
    done
    printf '    { kvd_sampler_params s = KVD_SAMPLER_PARAMS_INIT; kvd_chat_request r =\n'
    printf '      KVD_CHAT_REQUEST_INIT; kvd_session_params p = KVD_SESSION_PARAMS_INIT;\n'
    printf '      if (s.top_k != 40 || s.penalty_last_n != 64 || s.n_bias || s.seed) return 2;\n'
    printf '      if (s.temperature < 0.79f || s.temperature > 0.81f || s.bias) return 3;\n'
    printf '      if (!r.add_generation_prompt || r.messages_json || p.n_ctx) return 4; }\n'
    printf '    return 0;\n}\n'
} >"$tmp/init.c"
[ "$(wc -w <<<"$sized")" -ge 13 ] || { echo "only these structs were found: $sized" >&2; fail=1; }
strict=(-Iinclude -Wall -Wextra -Wpedantic -Wshadow -Wundef -Werror -pedantic-errors)
for with in "$cc -x c -std=c11" "$cxx -x c++ -std=c++17" "$cxx -x c++ -std=c++20"; do
    # shellcheck disable=SC2086 # a compiler and its options
    if ! $with "${strict[@]}" "$tmp/init.c" -o "$tmp/init" || ! "$tmp/init"; then
        echo "FAILED: initialisers, $with" >&2
        fail=1
    fi
    n=$((n + 1))
done
[ "$fail" -eq 0 ] && echo "$n header compilations passed"
exit "$fail"
