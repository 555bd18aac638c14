#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the program says of options that are mistyped, that are another program's, or whose files and
# directories are not there or cannot be used.  KVDRIVE is the program; runs in the source root.
set -u
kvd=${KVDRIVE:?}
tiny=tests/data/tiny
export XDG_CONFIG_HOME=/nonexistent
tmp=$(mktemp -d)
trap 'chmod -R u+rwx "$tmp"; rm -rf "$tmp"' EXIT
. "$(dirname "$0")/expect.sh"

# ---- mistyped: what was meant, or nothing (-) where nothing is near
while read -r word meant; do
    [ "$meant" = - ] && tail='$' || tail="; did you mean '--$meant'\?\$"
    expect "suggestion for --$word" 2 "unknown option '--$word'$tail" "$kvd" serve "--$word" 1
    printf '%s = 1\n' "$word" >"$tmp/config"
    [ "$meant" = - ] && tail='$' || tail="; did you mean '$meant'\?\$"
    expect "suggestion for $word" 2 "config:1: unknown option '$word'$tail" \
        "$kvd" serve --config "$tmp/config"
done <<'EOF'
prot                    port
hsot                    host
ctx-sise                ctx-size
cxt-size                ctx-size
pararell                parallel
paralel                 parallel
temprature              temp
n-predct                predict
keep-alive              keepalive
api-key-flie            api-key-file
cahce-dir               cache-dir
ctx                     ctx-size
budg                    budget
cors                    cors-origin
cache                   -
grammar                 -
mirostat                -
lora                    -
ssl-key-fil             -
no-host                 -
log-file                -
threds                  threads
api-prefix              -
x                       -
EOF
expect "a mistyped command" 2 "did you mean 'chat'" "$kvd" chta
expect "the beginning of a command" 2 "did you mean 'perplexity'" "$kvd" perp
expect "no command at all" 2 "unknown command 'download'; kvdrive --help" "$kvd" download

echo "$n cases, $failed failed"
[ $failed = 0 ]
