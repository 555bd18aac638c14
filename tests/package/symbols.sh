#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What kvdrive.h declares, what the golden list says and what the shared library exports are the
# same names, and the library carries its SONAME.
# usage: symbols.sh LIBKVDRIVE.SO   (run in the source root)
set -euo pipefail
lib=$1
golden=tests/golden/symbols.txt
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
fail=0

# Comments out, then each declaration that carries KVD_API: the name before its first parenthesis.
sed -z 's:/\*[^*]*\*\+\([^/*][^*]*\*\+\)*/: :g' include/kvdrive.h | tr '\n' ' ' |
    grep -oE 'KVD_API [^;(]*\(' | grep -v 'attribute' | sed -E 's/.*[ *]([a-z0-9_]+)\($/\1/' |
    LC_ALL=C sort >"$tmp/header"
nm -D --defined-only "$lib" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
    LC_ALL=C sort >"$tmp/library"

compare() {
    if ! diff -u "$golden" "$tmp/$1"; then
        echo "FAILED: $golden and the names of the $1 differ" >&2
        fail=1
    fi
}
compare header
compare library
if ! readelf -d "$lib" | grep -q 'SONAME.*\[libkvdrive\.so\.[0-9]*\]'; then
    echo "FAILED: no SONAME libkvdrive.so.N" >&2
    fail=1
fi
[ "$fail" -eq 0 ] && echo "$(wc -l <"$golden") symbols as declared"
exit "$fail"
