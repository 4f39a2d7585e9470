#!/bin/sh
# Step 1 of 4: makes an environment from the first Python that can, then hands over to prepare.py, which fills it.
# `--into FOLDER` first names another one than .venv.
# Knows: where interpreters hide, and how each distribution installs one. POSIX sh, so that Alpine and macOS run it.
# Must not know: packages, extras, pins.
set -u
cd "$(dirname "$0")/.." || exit 1

venv=.venv room=3
[ "${1:-}" = --into ] && venv=$2 room=5 && shift 2

fail() {
    printf 'make: %s\n' "$1" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

version() {
    "$1" -c 'import sys; print(sys.version)' 2>/dev/null
}

# A virtual environment breaks when its checkout moves (scripts and the editable install name it) or its interpreter goes.
reusable() {
    [ -x "$venv/bin/python" ] && new_enough "$venv/bin/python" || return 1
    [ -f "$venv/reef-home" ] && [ "$(cat "$venv/reef-home")" = "$(pwd -P)" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version "$PYTHON")" = "$(version "$venv/bin/python")" ]
}

# Only the attempt tells: distributions ship `venv` without `ensurepip`, and version managers ship names without a Python.
create() {
    rm -rf "$venv"
    "$1" -m venv "$venv" >/dev/null 2>&1 && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return 0
    rm -rf "$venv"
    return 1
}

free_kib() {
    df -Pk . | awk 'NR == 2 { print $4 }'
}

install_line() {
    sudo='sudo '
    [ "$(id -u)" = 0 ] && sudo=''
    ID=unknown ID_LIKE='' VERSION_ID=''
    # shellcheck disable=SC1091
    [ -r /etc/os-release ] && . /etc/os-release
    [ "$(uname -s)" = Darwin ] && ID=macos
    case " $ID $ID_LIKE " in
        *" macos "*) echo "brew install python@3.13" ;;
        *" ubuntu "*)
            case "$VERSION_ID" in
                22.04) echo "${sudo}apt update && ${sudo}apt install python3.11-venv" ;;
                *) echo "${sudo}apt update && ${sudo}apt install python3-venv" ;;
            esac ;;
        *" debian "*) echo "${sudo}apt update && ${sudo}apt install python3-venv" ;;
        *" rhel "*) echo "${sudo}dnf install python3.12" ;;
        *" fedora "*) echo "${sudo}dnf install python3" ;;
        *" alpine "*) echo "${sudo}apk add python3" ;;
        *) echo "your system's package manager: Python 3.11 or newer, with its venv module" ;;
    esac
}

interpreter() {
    found=''
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if ! new_enough "$candidate"; then
            short=$(version "$candidate") || short=broken
            found="$found $candidate (${short%% *}),"
            continue
        fi
        create "$candidate" && return 0
        [ "$(free_kib)" -gt 102400 ] || fail "the disk that holds $(pwd -P) is full: free about $room GiB, then call make again"
        found="$found $candidate (makes no virtual environment),"
    done
    fail "needs Python 3.11 or newer that can make a virtual environment; found:${found:- none,} so install one: $(install_line)"
}

if ! reusable; then
    echo "step 1 of 4: python, usually 3–10 s"
    interpreter
    pwd -P >"$venv/reef-home" || fail "the disk that holds $(pwd -P) is full: free about $room GiB, then call make again"
fi
exec "$venv/bin/python" deploy/prepare.py "$@"
