#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs to a temporary prefix and builds a consumer four ways: through the CMake package and
# through pkg-config, each against the shared and the static library.
# usage: consumers.sh BUILD_DIR CC   (run in the source root)
set -euo pipefail
build=$1
cc=$2
src=$PWD/tests/package/consumer
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
prefix=$tmp/prefix

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
rm "$libdir"/libkvdrive.so*
# shellcheck disable=SC2046
"$cc" -o "$tmp/pc_static" "$src/consumer.c" $(pc "$libdir" --cflags --libs --static)
"$tmp/pc_static"
for example in examples/*.c; do
    # shellcheck disable=SC2046
    "$cc" -Wall -Wextra -Werror -o "$tmp/example" "$example" \
        $(pc "$libdir" --cflags --libs --static)
done
echo "4 consumers built and run"
