# SPDX-License-Identifier: Apache-2.0
# expect.sh - sourced by tests of the program: n checks so far, `failed` of them.
n=0
failed=0

# expect NAME CODE PATTERN COMMAND...: exit code and an extended regular expression in the output.
# A program that takes longer than PATIENCE seconds has failed, far beyond what a busy
# machine needs; a function bounds itself.
PATIENCE=600
expect() {
    local name=$1 code=$2 pattern=$3 out got
    shift 3
    n=$((n + 1))
    [ "$(type -t "$1")" = function ] || set -- timeout "$PATIENCE" "$@"
    out=$("$@" 2>&1 </dev/null)
    got=$?
    if [ "$got" != "$code" ] || ! grep -qE -- "$pattern" <<<"$out"; then
        echo "FAILED: $name: exit $got (expected $code), output (expected /$pattern/):"
        head -c 1000 <<<"$out"
        failed=$((failed + 1))
    fi
}
