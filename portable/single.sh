#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Cecilia @VERSION@ for @ARCH@ in one file: this script, and behind it a .tar.gz of the bundle.
#
#   ./@NAME@.run [flags of cecilia-server]
#   ./@NAME@.run convert [flags of cecilia-convert]
#   ./@NAME@.run --extract FOLDER
#
# The first start unpacks into CECILIA_STORE (default: ~/.cache/cecilia), later ones find it there. Models are
# looked for in models/ beside this file. Uses the kernel, a shell, coreutils (or busybox), tar and gzip.
set -eu

fail() { # code, text, exit code
    echo "error: $1: $2" >&2
    exit "$3"
}

machine=$(uname -m)
if [ "$machine" != @ARCH@ ] && [ -z "${CECILIA_RUNNER:-}" ]; then
    fail wrong_architecture "this file is for @ARCH@, and this machine is $machine" 6
fi
self=$(readlink -f "$0")

payload() {
    tail -n +@LINE@ "$self"
}

unpack() { # into a folder that is there
    found=$(payload | sha256sum)
    [ "${found%% *}" = @DIGEST@ ] || fail damaged_file "$self is not as it was built: fetch it again" 1
    payload | gzip -dc | tar -xf - -C "$1" || fail unpack_failed "cannot unpack into $1: is there room?" 1
}

case ${1:-} in
    --extract)
        [ $# = 2 ] || fail usage "--extract takes one folder" 2
        mkdir -p "$2" && unpack "$2"
        echo "$2/@NAME@"
        exit
        ;;
    convert)
        program=cecilia-convert
        shift
        ;;
    *) program=cecilia-server ;;
esac

store=${CECILIA_STORE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/cecilia}
folder=$store/@NAME@-@SHORT@
if [ ! -d "$folder" ]; then
    mkdir -p "$store" 2> /dev/null && part=$(mktemp -d "$store/.unpack.XXXXXX" 2> /dev/null) ||
        fail cannot_unpack "$store cannot be written: name another folder in CECILIA_STORE" 1
    trap 'rm -rf "$part"' EXIT
    unpack "$part"
    # Of two first starts at once, one finds the folder made by the other.
    mv -T "$part/@NAME@" "$folder" 2> /dev/null || [ -d "$folder" ] ||
        fail cannot_unpack "cannot move the unpacked bundle to $folder" 1
    rm -rf "$part"
    trap - EXIT
fi
export CECILIA_MODELS="${CECILIA_MODELS:-${self%/*}/models}"
exec "$folder/$program" "$@"
