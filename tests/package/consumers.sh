#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs to a temporary prefix and builds a consumer four ways: through the CMake package and
# through pkg-config, each against the shared and the static library.
# usage: consumers.sh BUILD_DIR CC   (run in the source root)
set -euo pipefail
build=$1
cc=$2
src=$PWD/tests/package/consumer
model=tests/data/tiny/qwen2.gguf
text="Hello, the cat in the hat"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
prefix=$tmp/prefix

# make install builds what is installed and nothing else.
grep -q -- '--target kvdrive_product$' <<<"$(make -n install PREFIX=/nowhere)"
made=$(ninja -C "$build" -t commands kvdrive_product)
if grep -oE 'tests/CMakeFiles|cmocka' <<<"$made"; then
    echo "kvdrive_product builds tests" >&2
    exit 1
fi
grep -q -- ' -o kvdrive ' <<<"$made"
grep -q -- ' -o libkvdrive\.so' <<<"$made"
grep -q -- '/dist/libkvdrive\.a' <<<"$made"

cmake --install "$build" --prefix "$prefix" >"$tmp/install.log"
libdir=$(dirname "$(find "$prefix" -name 'libkvdrive.a')")
test -f "$prefix/include/kvdrive.h"
test -L "$libdir/libkvdrive.so.0"
# The unit and the container start what is installed.
programs=$(grep -ohE '/usr/local/[a-z/]+/kvdrive' packaging/kvdrive.service \
    packaging/Containerfile | sort -u)
for program in $programs; do
    "$prefix${program#/usr/local}" --version
done
# No name of ours but kvd_* may meet those of the program that links the archive.
foreign=$(nm -g --defined-only "$libdir/libkvdrive.a" | awk 'NF == 3 && $3 !~ /^kvd_/ { print $3 }')
if [ -n "$foreign" ]; then
    echo "libkvdrive.a defines:" $foreign >&2
    exit 1
fi

cmake -S "$src" -B "$tmp/cmake" -G Ninja -DCMAKE_C_COMPILER="$cc" \
    -DCMAKE_PREFIX_PATH="$prefix" >"$tmp/configure.log"
cmake --build "$tmp/cmake"
"$tmp/cmake/consumer_shared"
"$tmp/cmake/consumer_static"
readelf -d "$tmp/cmake/consumer_shared" | grep -q 'NEEDED.*libkvdrive\.so\.0'
! readelf -d "$tmp/cmake/consumer_static" | grep -q 'NEEDED.*libkvdrive'

pc() {
    PKG_CONFIG_PATH="$1/pkgconfig" pkg-config "${@:2}" kvdrive
}
# shellcheck disable=SC2046 # the words of pkg-config are meant to be split
"$cc" -o "$tmp/pc_shared" "$src/consumer.c" $(pc "$libdir" --cflags --libs) -Wl,-rpath,"$libdir"
"$tmp/pc_shared"
python=$(KVDRIVE_LIBRARY=$libdir/libkvdrive.so.0 python3 examples/greedy.py "$model" "$text")
python3 - "$libdir/libkvdrive.so.0" <<'EOF'
# Fields of the Python example lie where the header has them.
import ctypes, re, sys
sys.path.insert(0, "examples")
import greedy
abi = open("tests/golden/abi.txt").read()
names = {"ModelParams": "kvd_model_params", "ModelInfo": "kvd_model_info", "Batch": "kvd_batch",
         "SessionParams": "kvd_session_params", "SamplerParams": "kvd_sampler_params",
         "Error": "kvd_err"}
n = 0
for python, c in names.items():
    struct = getattr(greedy, python)
    for i, (field, kind) in enumerate(struct._fields_):
        line = f"field {c} {i} {field} at {getattr(struct, field).offset} of {ctypes.sizeof(kind)} "
        assert line in abi, line
        n += 1
print(f"{n} fields of the Python example are where the header has them")
EOF
rm "$libdir"/libkvdrive.so*
# shellcheck disable=SC2046
"$cc" -o "$tmp/pc_static" "$src/consumer.c" $(pc "$libdir" --cflags --libs --static)
"$tmp/pc_static"
for example in examples/*.c; do
    # shellcheck disable=SC2046
    "$cc" -std=c11 -Wall -Wextra -Wpedantic -Werror -o "$tmp/$(basename "$example" .c)" "$example" \
        $(pc "$libdir" --cflags --libs --static)
done

# What the examples say is what the program says, whatever language and however many at a time.
said() { # TEXT
    "$prefix/bin/kvdrive" run -m "$model" --raw --temp 0 -n 64 --deterministic -p "$1" 2>/dev/null
}
same() { # WHAT GOT WANTED
    [ "$2" = "$3" ] && return
    printf '%s says:\n%s\nand not:\n%s\n' "$1" "$2" "$3" >&2
    exit 1
}
want=$(said "$text")
[ "${#want}" -ge 20 ] || { echo "the program says next to nothing: $want" >&2; exit 1; }
same greedy.c "$("$tmp/greedy" "$model" "$text")" "$want"
same greedy.py "$python" "$want"
several=("$text" "in a hat" "the thin lid" "$text")
all=
for i in "${!several[@]}"; do
    all+="$i: $(said "${several[i]}")"$'\n'
done
same sequences.c "$("$tmp/sequences" "$model" "${several[@]}")" "${all%$'\n'}"
! "$tmp/sequences" "$model" 2>"$tmp/err"
grep -q '^usage: sequences MODEL TEXT' "$tmp/err"
! "$tmp/sequences" "$tmp/none" x 2>"$tmp/err"
grep -q "^sequences: $tmp/none: No such file" "$tmp/err"
echo "4 consumers and the examples built and run"
