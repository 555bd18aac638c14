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
lore                    -
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

# ---- llama-server's options: served, told and left out, or refused with what there is instead.
# The model is not there, so what is served or left out ends with that.
while IFS='|' read -r fate words pattern; do
    read -ra words <<<"$words"
    case $fate in
    served) code=1 pattern='^kvdrive: none: No such file' ;;
    left) code=1 pattern="^kvdrive: ${words[0]%=*} is llama.cpp's and changes nothing.*$pattern" ;;
    refused) code=2 pattern="^kvdrive serve: ${words[0]}: .*$pattern" ;;
    esac
    expect "llama-server's ${words[*]}, $fate" $code "$pattern" "$kvd" serve "${words[@]}" -m none
    if [ "$fate" = left ]; then # and nothing of it is taken for something else
        expect "llama-server's ${words[*]}" $code 'kvdrive: none: No such' \
            "$kvd" serve "${words[@]}" -m none
    fi
done <<EOF
served|--parallel 2
served|-np 2
served|--alias name
served|-a name
served|--timeout 600
served|-to 600
served|--rope-freq-base 10000
served|--chat-template-file tests/server/data/chatml.jinja
left|--metrics|GET /metrics
left|--slots|GET /slots
left|--no-slots|GET /slots
left|--props|GET /props
left|--webui|page at /
left|--no-webui|page at /
left|--jinja|always Jinja
left|--no-jinja|always Jinja
left|-cb|share a batch
left|--cont-batching|share a batch
left|--cache-reuse 256|--cache-dir
left|--keep 64|nothing is shifted
left|--draft 16|not drafted
left|--draft-max 16|not drafted
left|--reasoning-format none|stays in its text
left|--reasoning-format=none|stays in its text
left|--no-mmproj|text alone
left|--threads-http 4|one thread
left|--kv-unified|--kv-tokens
refused|--reasoning-format deepseek|stays in its text
refused|--reasoning-format|stays in its text
refused|-hf org/name|-m
refused|--hf-repo org/name|-m
refused|--embedding|embeddings
refused|--embeddings|embeddings
refused|--slot-save-path dir|--cache-dir
refused|--ssl-key-file file|proxy
refused|--ssl-cert-file file|proxy
refused|--lora file|merge
refused|--mmproj file|text alone
refused|-md file|drafts
EOF
expect "refused in a variable" 2 'KVDRIVE_LORA: .*merge' env KVDRIVE_LORA=x "$kvd" serve -m none
printf 'ssl-key-file = x\n' >"$tmp/config"
expect "refused in a configuration file" 2 'config:1: ssl-key-file: .*proxy' \
    "$kvd" serve -m none --config "$tmp/config"
expect "not in the help" 1 '^$' sh -c "$kvd serve --help | grep -E -- '--(lora|metrics|ssl)'"
expect "not in the configuration" 1 '^$' \
    sh -c "$kvd serve --print-config | grep -E '^(lora|metric)'"

echo "$n cases, $failed failed"
[ $failed = 0 ]
