# SPDX-License-Identifier: Apache-2.0
# Bash completion for kvdrive.  Commands, options and their choices are read from the program's own
# --help-all, once per command and shell, so that this file knows none of them.

declare -gA _kvdrive_help

# _kvdrive_read PROGRAM COMMAND: fills the cache; a program that cannot run leaves it empty
_kvdrive_read() {
    [[ -v _kvdrive_help[_$2] ]] && return
    _kvdrive_help[_$2]=$("$1" ${2:+"$2"} --help${2:+-all} 2>/dev/null </dev/null) || true
}

# The lines of the help that name options: "-m, --model FILE", without what follows two blanks.
_kvdrive_option_lines() {
    sed -nE 's/^  (-[^ ].*)$/\1/p' <<<"${_kvdrive_help[_$1]}" | sed -E 's/  +.*//'
}

_kvdrive() {
    local program=$1 cur=$2 prev=$3 cmd="" line word
    COMPREPLY=()
    if [ "$COMP_CWORD" -le 1 ]; then
        _kvdrive_read "$program" ""
        mapfile -t COMPREPLY < <(compgen -W "$(sed -nE 's/^  ([a-z]+)  +.*/\1/p' \
            <<<"${_kvdrive_help[_]}") --help --version" -- "$cur")
        return
    fi
    cmd=${COMP_WORDS[1]}
    _kvdrive_read "$program" "$cmd"
    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_kvdrive_option_lines "$cmd" |
            grep -oE '(^|[ ,])--?[A-Za-z][A-Za-z0-9-]*')" -- "$cur")
        return
    fi
    # After an option: the choices it names; files (by -o default) where it names none.
    while IFS= read -r line; do
        for word in ${line//,/ }; do
            if [ "$word" = "$prev" ] && [[ ${line##* } == *'|'* ]]; then
                word=${line##* }
                mapfile -t COMPREPLY < <(compgen -W "${word//|/ }" -- "$cur")
                return
            fi
        done
    done < <(_kvdrive_option_lines "$cmd")
}

complete -o default -F _kvdrive kvdrive
