#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Starts a program of this folder with the interpreter, the libraries and the loader that lie beside it. Of the
# board it uses the kernel, this shell and what every coreutils and busybox have: readlink, uname, cut, xargs, ls
# and, for --check, sha256sum. The link by which it is called says which program: cecilia-server,
# cecilia-convert, python.
set -eu

fail() { # code, text, exit code
    echo "error: $1: $2" >&2
    exit "$3"
}

self=$(readlink -f "$0")
here=${self%/*}
name=${0##*/}
case $name in
    cecilia-convert) set -- -m tools.convert "$@" ;;
    python*) name=python ;;
    *) name=cecilia-server ;;
esac

case $here in
    *:*) fail bad_folder "$here has a colon in its name, which no library path can hold: move the folder" 1 ;;
esac

# CECILIA_RUNNER is put before the program, e.g. `taskset -c 4-7`; an emulator there runs another architecture.
machine=$(uname -m)
if [ "$machine" != @ARCH@ ] && [ -z "${CECILIA_RUNNER:-}" ]; then
    fail wrong_architecture "this bundle is for @ARCH@, and this machine is $machine" 6
fi

incomplete() {
    fail damaged_bundle "$here lacks $1: unpack the archive again" 1
}
[ -s "$here/SHA256SUMS" ] || incomplete SHA256SUMS
# One process looks for all files; only when one is missing are they asked for one by one. (64 digits, 2 blanks)
if ! (cd "$here" && cut -c67- SHA256SUMS | xargs ls -d) > /dev/null 2>&1; then
    while read -r digest file; do
        [ -e "$here/$file" ] || incomplete "$file"
    done < "$here/SHA256SUMS"
fi
[ -x "$here/lib/run/$name" ] || incomplete "lib/run/$name"

# Digests of some 80 MB take a slow card a second or two, so only --check compares them.
verify() {
    command -v sha256sum > /dev/null || fail command_missing "--check needs sha256sum, which is not installed" 1
    (cd "$here" && LC_ALL=C sha256sum -c SHA256SUMS 2> /dev/null) | {
        count=0 bad='' more=0
        while IFS= read -r line; do
            count=$((count + 1))
            case $line in
                *': OK') ;;
                *) if [ -z "$bad" ]; then bad=${line%: *}; else more=$((more + 1)); fi ;;
            esac
        done
        if [ -n "$bad" ]; then
            others=''
            [ "$more" = 0 ] || others=" and $more more"
            fail damaged_bundle "$bad$others of $here changed since it was built: unpack the archive again" 1
        fi
        echo "ok   bundle   $count files of @NAME@, every digest is right"
    }
}

# Without --model: the one model of the folder, which the user is asked to name when there are several.
find_model() {
    needed=yes
    for argument in "$@"; do
        case $argument in
            --model | --model=*) return ;;
            -h | --help | --version | --print-config | --check) needed=no ;;
        esac
    done
    models=${CECILIA_MODELS:-$here/models}
    set -- "$models"/*.l3r
    if [ $# = 1 ] && { [ -f "$1" ] || [ $needed = no ]; }; then
        export CECILIA_MODEL="$1" # where there is none, the pattern tells where it was looked for
    elif [ $needed = no ]; then
        return
    elif [ $# = 1 ]; then
        fail model_not_found "no .l3r file in $models: put one there, or name one with --model" 3
    else
        list=$(printf ', %s' "$@")
        fail several_models "$models holds $# models, name one with --model: ${list#, }" 2
    fi
}

if [ $name = cecilia-server ]; then
    case " $* " in
        *' --check '*) verify ;;
    esac
    [ -n "${CECILIA_MODEL:-}" ] || find_model "$@"
    set -- -m server "$@"
fi

# Read once by the thread libraries, when they are loaded; a value that is already set stays.
@OPENMP@

# The C locale of the bundle's own glibc: a locale or character set of the board's would be of another version.
export LC_ALL=C.UTF-8
export PYTHONHOME="$here/python" PYTHONPATH="$here/app:$here/site"

# The process bears the name of the link to the loader.
# shellcheck disable=SC2086 # the runner is a command with its arguments
exec ${CECILIA_RUNNER:-} "$here/lib/run/$name" --inhibit-cache --library-path "$here/lib" \
    --argv0 "$here/bin/python" "$here/python/bin/python@PYTHON@" -S -P "$@"
