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
prt                     port
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
rpc                     -
seed-mode               -
lore                    -
ssl-key-fil             -
no-host                 -
log-file                -
threds                  threads
api-prefix              -
x                       -
EOF
expect "another command's name of an option" 2 \
    "option --parallel does not belong to this command; did you mean '--n-parallel'" \
    "$kvd" bench --parallel 2
expect "the end of an option's name" 2 "unknown option '--depth'; did you mean '--n-depth'" \
    "$kvd" bench --depth 2
expect "bounds of a whole number" 2 "seed 'x' is not a whole number from -1 to 9007199254740992$" \
    "$kvd" run --seed x
expect "a mistyped command" 2 "did you mean 'chat'" "$kvd" chta
expect "the beginning of a command" 2 "did you mean 'perplexity'" "$kvd" perp
expect "no command at all" 2 "unknown command 'download'; kvdrive --help" "$kvd" download

# ---- llama-server's options, and some of vLLM's: served, told and left out, or refused with what
# there is instead.  The model is not there, so what is served or left out ends with that.
while IFS='|' read -r fate words pattern; do
    read -ra words <<<"$words"
    case $fate in
    served) code=1 pattern='^kvdrive: --model none: No such file' ;;
    left) code=1 pattern="${words[0]%=*} is another program's and changes nothing.*$pattern" ;;
    refused) code=2 pattern="^kvdrive serve: ${words[0]}: .*$pattern" ;;
    esac
    expect "llama-server's ${words[*]}, $fate" $code "$pattern" "$kvd" serve "${words[@]}" -m none
    if [ "$fate" = left ]; then # and nothing of it is taken for something else
        expect "llama-server's ${words[*]}" $code '--model none: No such' \
            "$kvd" serve "${words[@]}" -m none
    fi
done <<EOF
served|--parallel 2
served|-np 2
served|--alias name
served|--reasoning-format none
served|--reasoning-format=auto
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
left|--no-ui|page at /
left|--swa-full|nothing of a sequence
left|--spec-type ngram-mod|tokens are not drafted
left|--no-cache-idle-slots|idle sequences keep
left|--jinja|always Jinja
left|--no-jinja|always Jinja
left|-cb|share a batch
left|--cont-batching|share a batch
left|--cache-reuse 256|--cache-dir
left|--keep 64|nothing is shifted
left|--draft 16|not drafted
left|--draft-max 16|not drafted
left|--no-mmproj|text alone
left|--threads-http 4|one thread
left|--kv-unified|--kv-tokens
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
left|--cache-ram 2048|--cache-dir
left|-cram 2048|--cache-dir
left|--cache-prompt|cache_prompt: false
left|--no-cache-prompt|cache_prompt: false
left|--ctx-checkpoints 3|dropped
left|-sps 0.5|holds most
left|-ot exps=CPU|one device
left|--n-cpu-moe 3|one device
left|--cpu-moe|one device
left|--log-disable|standard error
left|--offline|downloaded
left|--enable-prefix-caching|--cache-dir
left|--enable-chunked-prefill|--max-gap
left|--enable-auto-tool-choice|tools
left|--tool-call-parser hermes|template
left|--dtype bfloat16|file
left|--block-size 16|256
left|--trust-remote-code|no code
left|--enforce-eager|recorded
left|--disable-log-requests|never
left|--kv-cache-dtype auto|--kv-record
left|--reasoning-budget -1|chat_template_kwargs
refused|--reasoning-budget 0|chat_template_kwargs
refused|--chat-template-kwargs {"a":1}|chat_template_kwargs
refused|--grammar x|response_format
refused|--samplers top_k|--top-k
refused|--kv-cache-dtype fp8|--kv-record
refused|--swap-space 4|--kv-host
refused|--max-num-batched-tokens 8192|-b N
refused|-ctk q8_0|none of auto.f32.bf16: .*--kv-record
refused|--max-model-len 8192|-c N
refused|--max-num-seqs 8|--parallel N
refused|--served-model-name name|--alias NAME
refused|--gpu-memory-utilization 0.9|--device-memory SIZE
refused|--tensor-parallel-size 2|one GPU
EOF
# Every other command with a model says the same of them.
while IFS='|' read -r code words pattern; do
    read -ra words <<<"$words"
    for command in run chat bench; do
        expect "${words[*]} of kvdrive $command" "$code" "${words[0]}.*$pattern" \
            "$kvd" $command "${words[@]}" -m none
    done
done <<EOF
1|--metrics|GET /metrics
1|--cache-ram 2048|--cache-dir
1|--kv-unified|--kv-tokens
1|--threads-http 4|one thread
1|--block-size 16|256
2|--slot-save-path dir|--cache-dir
2|--ssl-key-file file|proxy
2|--max-num-seqs 8|--parallel N
2|--served-model-name name|--alias NAME
EOF
expect "llama.cpp's name of template variables" 1 '^kvdrive: --model none: No such' \
    "$kvd" run --chat-template-kwargs '{"a":1}' -m none -p x
expect "a mistyped variable" 2 \
    "^kvdrive serve: KVDRIVE_PROT: no option has this variable; did you mean 'KVDRIVE_PORT'" \
    env KVDRIVE_PROT=1 "$kvd" serve -m none

expect "a template that is a name" 1 '--chat-template chatml: No such file.*takes a file' \
    "$kvd" serve -m none --chat-template chatml
expect "refused in a variable" 2 'KVDRIVE_LORA: .*merge' env KVDRIVE_LORA=x "$kvd" serve -m none
printf 'ssl-key-file = x\n' >"$tmp/config"
expect "refused in a configuration file" 2 'config:1: ssl-key-file: .*proxy' \
    "$kvd" serve -m none --config "$tmp/config"
expect "not in the help" 1 '^$' sh -c "$kvd serve --help-all | grep -E -- '--(lora|metrics|ssl)'"
expect "not in the configuration" 1 '^$' \
    sh -c "$kvd serve --print-config | grep -E '^(lora|metric)'"

# ---- files and directories: the option (or who else named it), the path, the reason
serve=("$kvd" serve -m $tiny/llama.gguf --port 0 --rope-scaling linear --rope-scale 64 -c 400)
none=$tmp/none
: >"$tmp/empty"
printf ' \n' >"$tmp/blank"
printf 'a\nb\n' >"$tmp/lines"
printf 'key\n' >"$tmp/key"
chmod 600 "$tmp"/{empty,blank,lines,key}
printf 'not a model' >"$tmp/text.gguf"
printf 'version https://git-lfs.github.com/spec/v1\n' >"$tmp/lfs.gguf"
cp $tiny/llama.gguf "$tmp/shut.gguf"
expect "no key file" 1 "^kvdrive: --api-key-file $none: No such file or directory$" \
    "${serve[@]}" --api-key-file "$none"
expect "a directory in place of a key file" 1 "^kvdrive: --api-key-file $tmp: Is a directory$" \
    "${serve[@]}" --api-key-file "$tmp"
for file in empty blank; do
    expect "a key file, $file" 2 "^kvdrive: --api-key-file $tmp/$file: there is no key.*one line" \
        "${serve[@]}" --api-key-file "$tmp/$file"
done
expect "a key of two lines" 2 "^kvdrive: --api-key-file $tmp/lines: .*several lines" \
    "${serve[@]}" --api-key-file "$tmp/lines"
expect "an empty key" 2 '^kvdrive: KVDRIVE_API_KEY: the key is empty: leave it out' \
    env KVDRIVE_API_KEY= "${serve[@]}"
expect "an empty name of a key file" 2 'KVDRIVE_API_KEY_FILE: .*empty text, not .* file$' \
    env KVDRIVE_API_KEY_FILE= "${serve[@]}"
expect "no key file, by a variable" 1 "^kvdrive: KVDRIVE_API_KEY_FILE $none: No such file" \
    env KVDRIVE_API_KEY_FILE="$none" "${serve[@]}"
expect "no model" 1 "^kvdrive: --model $none: No such file or directory$" "$kvd" serve -m "$none"
printf 'model = %s\n' "$none" >"$tmp/config"
expect "no model, by a configuration file" 1 "^kvdrive: $tmp/config: model $none: No such file" \
    "$kvd" run --config "$tmp/config" -p x

# ---- errors of the library name its fields; here they name options of the command
says='tokens asked for \(-c\), the model has 128; RoPE scaling \(--rope-scaling\) by a'
expect "an option for a field" 2 \
    "^kvdrive: context of 9999 $says factor \(--rope-scale\) extends it$" \
    "$kvd" run -m $tiny/llama.gguf --raw -p x -c 9999
small=(-m $tiny/llama.gguf --rope-scaling linear --rope-scale 64 --kv-device 4K)
says='batch \(-b\), budget \(--budget\), window \(--cap\) or context \(-c\) and by'
expect "an option for several sequences" 2 \
    "of 0 MiB \(--kv-device\) .* $says fewer sequences \(--parallel\)$" \
    "$kvd" serve "${small[@]}"
expect "a field that the command has no option for" 2 'sequences \(n_seq\)$' \
    "$kvd" run "${small[@]}" --raw -p x
cp $tiny/llama.gguf "$tmp/p"
expect "an error that begins as the model's name does" 3 \
    "^kvdrive: --model p: pre-tokenizer 'x' is not" \
    sh -c "cd $tmp && $kvd run -m p --pre x -p x"
expect "an empty name of a model" 2 'model is an empty text, not the name of a file' \
    "$kvd" run -m "" -p x
expect "a directory in place of a model" 1 "^kvdrive: --model $tmp: Is a directory; name the" \
    "$kvd" run -m "$tmp" -p x
expect "not a model" 3 "^kvdrive: --model $tmp/text.gguf: .*not a GGUF file.*converted" \
    "$kvd" run -m "$tmp/text.gguf" -p x
expect "a pointer in place of a model" 3 "^kvdrive: --model $tmp/lfs.gguf: .*git lfs pull" \
    "$kvd" run -m "$tmp/lfs.gguf" -p x
expect "a file in place of the cache" 1 \
    "^kvdrive: --cache-dir $tmp/empty: .*Not a directory; a file is in its place" \
    "${serve[@]}" --cache-dir "$tmp/empty"
expect "a file above the cache" 1 \
    "^kvdrive: --cache-dir $tmp/empty/a/b: $tmp/empty/a: .*Not a directory; a file is in" \
    "${serve[@]}" --cache-dir "$tmp/empty/a/b"
expect "an empty name of a cache" 2 '--cache-dir: .*empty text, not the name of a directory' \
    "${serve[@]}" --cache-dir ""
expect "a cache to look into that is none" 1 "^kvdrive: --cache-dir $none: .*No such file" \
    "$kvd" cache stats --cache-dir "$none"
expect "a cache whose parents are missing is made" 0 '' \
    "$kvd" run -m $tiny/llama.gguf --raw -p x -n 1 --cache-dir "$tmp/a/b/c"

for limit in --kv-disk --kv-disk-free; do
    expect "$limit without a cache" 2 "^kvdrive: $limit: .*--cache-dir DIR.* leave $limit out$" \
        "$kvd" serve -m none $limit 5G
done
expect "the same, by a variable: it goes on" 1 '^kvdrive: KVDRIVE_KV_DISK has no .*--cache-dir' \
    env KVDRIVE_KV_DISK=5G "$kvd" serve -m none
expect "by a variable, to its end" 1 '^kvdrive: --model none: No such' \
    env KVDRIVE_KV_DISK=5G "$kvd" serve -m none
expect "a limit of a cache, without a word" 1 '^$' sh -c \
    "$kvd serve -m none --kv-disk 5G --cache-dir $tmp/c 2>&1 | grep kv-disk"

# Permissions say nothing to root, but to root without its capabilities.
bound=()
[ "$(id -u)" != 0 ] || bound=(setpriv --bounding-set=-all --inh-caps=-all)
if "${bound[@]}" true 2>/dev/null; then
    mkdir -m 555 "$tmp/readonly"
    mkdir -m 000 "$tmp/closed"
    chmod 000 "$tmp/key" "$tmp/shut.gguf"
    expect "a cache that may not be made" 1 \
        "^kvdrive: --cache-dir $tmp/readonly/a: .*Permission denied; name a directory" \
        "${bound[@]}" "${serve[@]}" --cache-dir "$tmp/readonly/a"
    expect "a cache that may not be opened" 1 \
        "^kvdrive: --cache-dir $tmp/closed: .*Permission denied; name a directory" \
        "${bound[@]}" "${serve[@]}" --cache-dir "$tmp/closed"
    expect "a key file that may not be read" 1 "^kvdrive: --api-key-file $tmp/key: Permission den" \
        "${bound[@]}" "${serve[@]}" --api-key-file "$tmp/key"
    expect "a model that may not be read" 1 "^kvdrive: --model $tmp/shut.gguf: Permission denied$" \
        "${bound[@]}" "$kvd" serve -m "$tmp/shut.gguf"
fi

# ---- who else can read the key: a line, and it goes on
for mode in 644 640 604 444 660 606 666; do
    chmod $mode "$tmp/key"
    expect "a key file of mode $mode" 1 "^kvdrive: --api-key-file $tmp/key: mode 0$mode .*chmod" \
        "$kvd" serve -m none --api-key-file "$tmp/key"
done
for mode in 600 400; do
    chmod $mode "$tmp/key"
    expect "a key file of mode $mode" 1 '^kvdrive: --model none: ' \
        "$kvd" serve -m none --api-key-file "$tmp/key"
    expect "a key file of mode $mode, without a word" 1 '^$' sh -c \
        "$kvd serve -m none --api-key-file $tmp/key 2>&1 | grep 'mode 0'"
done
printf 'api-key = secret\n' >"$tmp/config"
chmod 644 "$tmp/config"
expect "a key in a configuration file of mode 644" 1 \
    "^kvdrive: $tmp/config: api-key: mode 0644 lets .*at the key: chmod 600 $tmp/config$" \
    "$kvd" serve -m none --config "$tmp/config"
expect "the key itself is not shown" 1 '^$' sh -c \
    "$kvd serve -m none --config $tmp/config --print-config 2>&1 | grep secret"
chmod 600 "$tmp/config"
expect "a key in a configuration file of mode 600, without a word" 1 '^$' sh -c \
    "$kvd serve -m none --config $tmp/config 2>&1 | grep 'mode 0'"
chmod 644 "$tmp/config"
expect "a key of the environment before it" 1 '^$' sh -c \
    "KVDRIVE_API_KEY=k $kvd serve -m none --config $tmp/config 2>&1 | grep 'mode 0'"
for value in '"a b"' "'secret'" '""'; do
    printf 'api-key = %s\n' "$value" >"$tmp/config"
    expect "a value in quotes: $value" 2 'config:1: the value of api-key is in quotes.*without' \
        "$kvd" serve -m none --config "$tmp/config"
done
printf 'system = say "hi"\nmodel = "\n' >"$tmp/config"
expect "quotes within a value" 1 '^kvdrive: .*config: model ": No such file' \
    "$kvd" run -p x --config "$tmp/config"
printf '# here\nconfig = other\n' >"$tmp/config"
expect "a configuration file in another" 2 'config:2: a configuration file names no other' \
    "$kvd" serve -m none --config "$tmp/config"

if [ "$(id -u)" = 0 ]; then # of another user: one that our group may read was made so for us
    chown 12345 "$tmp/key"
    chmod 644 "$tmp/key"
    expect "another user's key file of mode 644" 1 \
        "^kvdrive: --api-key-file $tmp/key: mode 0644 lets everybody at the key$" \
        "$kvd" serve -m none --api-key-file "$tmp/key"
    chmod 640 "$tmp/key"
    expect "another user's key file of mode 640" 1 '^$' sh -c \
        "$kvd serve -m none --api-key-file $tmp/key 2>&1 | grep 'mode 0'"
fi

echo "$n cases, $failed failed"
[ $failed = 0 ]
