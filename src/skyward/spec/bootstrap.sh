#!/bin/sh
# Prepares this machine for Skyward. Running it again changes nothing. Rendered from an Image; do not edit.
set -u

has() { command -v "$1" >/dev/null 2>&1; }
say() { printf '@skyward %s\n' "$*"; }

settings() {
    root=@@root
    python=@@python
    environment=$root/envs/@@key
    finished=$environment/.skyward-finished
    if [ "$(id -u)" -eq 0 ]; then sudo=; else sudo=yes; fi
}

# limited COMMAND...: within what is left of the step's deadline.
limited() {
    left=$((deadline - $(date +%s)))
    [ "$left" -gt 0 ] || return 124
    if has timeout; then timeout -k 10 "$left" "$@"; else "$@"; fi
}

# limited_root COMMAND...: the same, as root.
limited_root() {
    if [ -n "$sudo" ]; then limited sudo -n "$@"; else limited "$@"; fi
}

# step NAME SECONDS: runs step_NAME with a deadline and a log of its own, and reports both ends.
step() {
    log=$root/logs/$1.log
    deadline=$(($(date +%s) + $2))
    say "step $1 start"
    (
        set -e
        "step_$1"
    ) >"$log" 2>&1
    code=$?
    if [ "$code" -ne 0 ]; then
        say "step $1 failed $code $log"
        tail -n 20 "$log" >&2
        exit "$code"
    fi
    say "step $1 done"
}

# built NAME SECONDS: a step whose work lasts as long as the environment.
built() {
    if [ -e "$finished" ]; then say "step $1 cached"; else step "$@"; fi
}

# Once a boot: a second run must not put the shutdown off.
arm_shutdown() {
    armed=$root/armed-$(cat /proc/sys/kernel/random/boot_id) || exit
    [ -e "$armed" ] && return
    deadline=$(($(date +%s) + 60))
    limited_root shutdown -h "+$1" >"$root/logs/ttl.log" 2>&1 || {
        code=$?
        say "step ttl failed $code $root/logs/ttl.log"
        exit "$code"
    }
    : >"$armed"
}

step_uv() {
    if has uv || [ -x "$root/uv/bin/uv" ]; then return; fi
    if has python3 && limited python3 -m venv "$root/uv" && limited "$root/uv/bin/python" -m pip install uv; then return; fi
    if has curl; then
        limited curl -fsSL -o "$root/uv-install.sh" https://astral.sh/uv/install.sh &&
            UV_UNMANAGED_INSTALL=$root/uv/bin limited sh "$root/uv-install.sh" && return
    fi
    echo "uv cannot be had here: venv and pip will do its work"
}

step_apt() {
    set -- @@apt
    [ $# -gt 0 ] || return 0
    has apt-get || {
        echo "apt packages are asked for, and this machine has no apt-get"
        return 1
    }
    # A fresh machine updates itself at first boot and holds apt's locks meanwhile.
    until limited_root apt-get update; do
        [ "$(date +%s)" -lt "$deadline" ] || return 124
        sleep 5
    done
    limited_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 \
        install -y --no-install-recommends -- "$@"
}

find_uv() {
    if has uv; then command -v uv; elif [ -x "$root/uv/bin/uv" ]; then echo "$root/uv/bin/uv"; fi
}

# fits COMMAND: is it the Python that is asked for?
fits() {
    has "$1" || return 1
    case $(limited "$1" -c 'import platform; print(platform.python_version())').x in
    "$python".*) return 0 ;;
    *) return 1 ;;
    esac
}

make_environment() {
    if [ -n "$uv" ] && limited "$uv" venv --seed --python-preference only-managed --python "$python" "$environment"; then
        return
    fi
    for candidate in @@command python3; do
        if fits "$candidate"; then
            rm -rf "$environment"
            limited "$candidate" -m venv "$environment"
            return
        fi
    done
    echo "there is no Python $python here, and uv could not bring one"
    return 1
}

step_deps() {
    uv=$(find_uv)
    rm -rf "$environment"
    make_environment
    set -- @@requirements
    if [ $# -gt 0 ]; then
        if [ -n "$uv" ]; then
            limited "$uv" pip install --python "$environment/bin/python" @@index_options -- "$@"
        else
            limited "$environment/bin/python" -m pip install --disable-pip-version-check --no-input @@index_options -- "$@"
        fi
    fi
    : >"$finished"
}

step_skyward() {
    [ -e "$root/skyward.whl" ] || return 0
    rm -rf "$root/code.new"
    limited "$environment/bin/python" -m zipfile -e "$root/skyward.whl" "$root/code.new"
    rm -rf "$root/code"
    mv "$root/code.new" "$root/code"
}

step_server() {
    limited "$environment/bin/python" -c '
import sys
from importlib.metadata import version

wrong = [pin for pin in sys.argv[1:] if version(pin.partition("==")[0]) != pin.partition("==")[2]]
sys.exit(f"the image replaced packages of the engine, which needs {wrong}" if wrong else 0)
' @@pins
}

# Nothing to mount yet.
step_volumes() { :; }

settings
mkdir -p "$root/envs" "$root/logs" && chmod 700 "$root" || exit
ttl_minutes=@@ttl_minutes
[ "$ttl_minutes" -eq 0 ] || arm_shutdown "$ttl_minutes"

# The user's variables are for what the steps call; they must not change this script's own.
if [ -f "$root/env" ]; then
    set -a
    # shellcheck disable=SC1091
    . "$root/env"
    set +a
    settings
fi

# Two scripts on one machine take turns.
if has flock; then
    exec 9>"$root/lock"
    flock -w 1800 9 || exit 124
fi

built uv 300
built apt 900
built deps 1800
step skyward 120
step server 120
step volumes 300
say "ready $environment"
