#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/tidy must find what it is there to find: a tree with one of each sin.
# usage: tidy_canary.sh   (run in the source root)
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp"/src/{base,os,kv,model,text,engine} "$tmp/cli"
head='/* SPDX-License-Identifier: Apache-2.0 */'

put() { # PATH LINE...: a source file with a licence line
    printf '%s\n' "$head" "${@:2}" >"$tmp/$1"
}
put src/base/base.h 'int base;'
put src/kv/kv.h '#include "base/base.h"'
put src/kv/kv_private.h 'int private;'
put src/kv/ok.c '#include "kv/kv_private.h"' '/* malloc( in a comment */' \
    'char *s = "exit(1) T''ODO";' 'void f(struct x *o)' '{' '    o->free(o);' '    kvd_free(o);' '}'
printf 'int x;\n' >"$tmp/src/base/no_head.c"
put src/kv/law.c '#include "model/model.h"'
put src/model/model.h '#include "base/base.h"'
put src/model/law2.c '#include "kv/kv.h"' '#include "engine/engine.h"'
put src/engine/door.c '#include "kv/kv_private.h"' '#include "kv/kv.h"'
put src/engine/engine.h '#include "base/base.h"'
put src/base/up.c '#include "os/os.h"'
put src/os/os.h '#include <unistd.h>'
put src/text/system.c '#include <unistd.h>'
put src/text/heap.c 'void *p(void)' '{' '    return malloc(1);' '}'
put src/text/env.c 'char *e(void)' '{' '    return getenv("X");' '}'
put src/text/print.c 'void q(void)' '{' '    printf("x");' '    exit(1);' '}'
put src/text/option.c 'char *o = "too small (--kv-host)";'
put cli/copy.c 'void c(char *d)' '{' '    strcpy(d, "x");' '    sprintf(d, "x");' '}'
put src/text/left.c '/* FIX''ME later */'
put src/text/wide.c "/* $(printf 'x%.0s' {1..100}) */"
put cli/ok.c 'int twin;'
put src/base/unused.h 'int unused;'
{
    printf '%s\n' "$head" 'void long_one(void)' '{'
    for _ in {1..71}; do echo '    x();'; done
    echo '}'
} >"$tmp/src/text/longfn.c"
{ echo "$head"; for _ in {1..1000}; do echo 'int x;'; done; } >"$tmp/src/text/longfile.c"

if scripts/tidy "$tmp" >"$tmp/out"; then
    echo "FAILED: tidy found nothing" >&2
    exit 1
fi
n=0
expect() {
    if ! grep -qF "$1" "$tmp/out"; then
        echo "FAILED: tidy did not say: $1" >&2
        cat "$tmp/out" >&2
        exit 1
    fi
    n=$((n + 1))
}
expect 'src/text/option.c:2: --kv-host in a message of the library'
expect 'src/base/no_head.c:1: no SPDX'
expect 'src/kv/law.c:2: kv/ must not include model/'
expect 'src/model/law2.c:2: model/ must not include kv/'
expect 'src/model/law2.c:3: model/ must not include engine/'
expect 'src/engine/door.c:2: "kv/kv_private.h" is private'
expect 'src/base/up.c:2: base/ must not include os/'
expect 'src/text/system.c:2: <unistd.h>: system headers belong to os/'
expect 'src/text/heap.c:4: malloc() is banned'
expect 'src/text/env.c:4: getenv() is banned'
expect 'src/text/print.c:4: printf() is banned'
expect 'src/text/print.c:5: exit() is banned'
expect 'cli/copy.c:4: strcpy() is banned'
expect 'cli/copy.c:5: sprintf() is banned'
expect 'src/text/left.c:2: leftover'
expect 'src/text/wide.c:2: 106 columns'
expect 'src/kv/ok.c:1: the name is taken by cli/ok.c'
expect 'src/base/unused.h:1: no file includes this header'
expect 'src/text/longfn.c:3: long_one() has 71 lines'
expect 'src/text/longfile.c:1: 1001 lines'
if [ "$(wc -l <"$tmp/out")" -ne $((n + 2)) ]; then # the string's leftover, and the closing line
    echo "FAILED: tidy said more than $n things" >&2
    cat "$tmp/out" >&2
    exit 1
fi
echo "$n sins found"
