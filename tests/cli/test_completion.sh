#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The bash completion offers what the program itself says.
# usage: KVDRIVE=program test_completion.sh   (run in the source root)
set -euo pipefail
source packaging/completion/kvdrive.bash
n=0

# offers EXPECTED WORD...: completing the last WORD gives the EXPECTED replies, among others
offers() {
    local expected=$1 word
    shift
    COMP_WORDS=(kvdrive "$@")
    COMP_CWORD=$#
    _kvdrive "$KVDRIVE" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    for word in $expected; do
        # no pipe: grep -q stops reading, and printf's SIGPIPE would count as a miss
        if ! grep -qx -e "$word" < <(printf '%s\n' "${COMPREPLY[@]}"); then
            echo "FAILED: kvdrive $* lacks $word: ${COMPREPLY[*]}" >&2
            exit 1
        fi
    done
    n=$((n + 1))
}

offers "run chat inspect cache doctor" ""
offers "perplexity plan" p
offers "--model -m --temp --stats" run -
offers "--json" inspect --js
offers "--cache-dir --kv-disk" cache --
offers "cpu ref" run --backend ""
offers "avx512 avx2" run --cpu-isa a
offers "md csv json" bench -o ""
offers "" run -m ""
[ ${#COMPREPLY[@]} -eq 0 ] # left to bash: file names
KVDRIVE=/nonexistent
_kvdrive_help=()
offers "" run -
echo "$n completions as expected"
