#!/bin/sh
# Prepares this machine for Skyward. Running it again changes nothing. Rendered from an Image; do not edit.
#   sh SCRIPT                everything, in order
#   sh SCRIPT survey         reports the state of the machine, and makes nothing but the root folder
#   sh SCRIPT STEP SECONDS   one step, within so many seconds
set -u

has() { command -v "$1" >/dev/null 2>&1; }
say() { printf '@skyward %s\n' "$*"; }

settings() {
    unset IFS
    root=@@root
    python=@@python
    # By the system, too: hosts that share a home may have different ones, with other Pythons and libraries.
    # shellcheck disable=SC1091
    key=@@key-$(uname -m)-$(. /etc/os-release 2>/dev/null && echo "${ID:-}${VERSION_ID:-}")
    environment=$root/envs/$key
    packages=$environment/.skyward-packages
    code=$environment/.skyward-code
    finished=$environment/.skyward-finished
    wheel=@@wheel
    sent_uv=$root/sent/uv
    uv_platform=@@uv_platform
    if [ "$(id -u)" -eq 0 ]; then sudo=; else sudo=yes; fi
    # The installers' caches are below the root folder, so that they go with it.
    export PIP_CACHE_DIR="$root/cache/pip" UV_CACHE_DIR="$root/cache/uv" UV_PYTHON_INSTALL_DIR="$root/python"
}

# limited COMMAND...: runs it within the rest of the step's deadline.
limited() {
    left=$((deadline - $(date +%s)))
    [ "$left" -gt 0 ] || return 124
    # Without --foreground it gets a process group of its own, and outlives this script when the link drops.
    if timeout --foreground 1 true 2>/dev/null; then
        timeout --foreground -k 10 "$left" "$@"
    else
        "$@"
    fi
}

# lasting_root COMMAND...: as root, within the rest of the deadline; it goes on when this script is killed.
lasting_root() {
    left=$((deadline - $(date +%s)))
    [ "$left" -gt 0 ] || return 124
    [ -z "$sudo" ] || set -- sudo -n "$@"
    if has timeout; then timeout -k 10 "$left" "$@"; else "$@"; fi
}

# failed STEP CODE LOG: ends the script, with the end of the log on standard error.
failed() {
    say "step $1 failed $2 $3"
    tail -n 30 "$3" >&2
    if grep -qi 'no space left\|quota exceeded' "$3"; then
        df -h "$root" >&2
    elif full; then
        echo "No space left on device: neither the step nor its log had room" >&2
        df -h "$root" >&2
    fi
    exit "$2"
}

# full: is the disk full? The log then lacks its end.
full() {
    # shellcheck disable=SC2046
    set -- $(df -Pk "$root" 2>/dev/null | tail -n 1)
    [ "${4:-x}" -lt 1024 ] 2>/dev/null
}

# lock NAME: until this script ends or locks another name; waits until the step's deadline.
lock() {
    has flock || return 0
    exec 9>"$root/locks/$1"
    flock -n 9 && return
    left=$((deadline - $(date +%s)))
    [ "$left" -gt 0 ] && flock -w "$left" 9
}

# step NAME SECONDS: runs step_NAME, unless has_NAME, with its own deadline and log; reports its start and end.
step() {
    deadline=$(($(date +%s) + $2))
    log=$root/logs/$key/$1.log
    mkdir -p "$root/envs" "$root/locks" "$root/logs/$key" || exit
    case $1 in
    uv | apt) name=$1 ;;
    *) name=$key ;;
    esac
    lock "$name" || {
        echo "another process holds $root/locks/$name; its log: $log" >"$log.lock"
        failed "$1" 124 "$log.lock"
    }
    if "has_$1"; then
        say "step $1 cached"
        return
    fi
    say "step $1 start"
    (
        set -e
        "step_$1"
    ) >"$log" 2>&1 </dev/null 9>&-
    ended=$?
    [ "$ended" -eq 0 ] || failed "$1" "$ended" "$log"
    say "step $1 done"
}

# Once per boot: a second run must not postpone the shutdown.
arm_shutdown() {
    armed=$root/armed-$(cat /proc/sys/kernel/random/boot_id) || exit
    [ -e "$armed" ] && return
    deadline=$(($(date +%s) + 60))
    lasting_root shutdown -h "+$1" >"$root/logs/ttl.log" 2>&1 </dev/null || failed ttl "$?" "$root/logs/ttl.log"
    : >"$armed"
}

# usable_uv COMMAND: does it run, and support the settings used here?
usable_uv() {
    case $("$1" --version 2>/dev/null </dev/null) in
    "" | "uv 0."[0-4].*) return 1 ;;
    esac
}

find_uv() {
    for candidate in "$(command -v uv)" "${HOME:-}/.local/bin/uv" "${HOME:-}/.cargo/bin/uv" "$root/uv/bin/uv" "$sent_uv"; do
        if [ -x "$candidate" ] && usable_uv "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

has_uv() { has_deps || find_uv >/dev/null; }

# pip_brings_uv: installs uv with the machine's own pip, else with that of a new virtual environment, which is slower.
pip_brings_uv() {
    has python3 || return 1
    set -- --disable-pip-version-check --no-input --retries 1 --timeout 15 uv
    rm -rf "$root/uv"
    limited python3 -m pip install --target "$root/uv" "$@" && return
    rm -rf "$root/uv"
    limited python3 -m venv "$root/uv" && limited "$root/uv/bin/python" -m pip install "$@" && return
    rm -rf "$root/uv"
    return 1
}

# Exit code 90: the client's own uv would run here.
step_uv() {
    if [ ! -e "$sent_uv" ]; then
        if pip_brings_uv; then return; fi
        [ "$(uname -s) $(uname -m)" != "$uv_platform" ] || return 90
    fi
    if has curl; then
        limited curl -fsSL --connect-timeout 15 -o "$root/uv-install.sh" https://astral.sh/uv/install.sh &&
            UV_UNMANAGED_INSTALL=$root/uv/bin limited sh "$root/uv-install.sh" && return
    fi
    lacking_uv
    return 1
}

lacking_uv() {
    echo "This machine has no uv, and no way to get it."
    echo "Install uv there (https://docs.astral.sh/uv); curl, or a python3 with pip or venv, is enough where the machine"
    echo "has a network."
}

has_apt() {
    set -- @@apt
    [ $# -gt 0 ] || return 0
    has dpkg-query || return 1
    for package; do
        # shellcheck disable=SC2016
        there=$(dpkg-query -W -f='${db:Status-Abbrev}${Version}' -- "${package%%=*}" 2>/dev/null) || return 1
        case $package in
        *=*) [ "$there" = "ii ${package#*=}" ] || return 1 ;;
        *) [ "${there%% *}" = ii ] || return 1 ;;
        esac
    done
}

# may_apt: can packages be installed here? If not, prints the reason.
may_apt() {
    has apt-get || {
        echo "apt packages are asked for, and this machine has no apt-get: leave apt= out, and install them by hand"
        return 1
    }
    [ -z "$sudo" ] || sudo -n true </dev/null >/dev/null 2>&1 || {
        echo "apt packages are asked for, and $(id -un) is neither root nor may use sudo without a password here:"
        echo "have somebody run: sudo apt-get install" @@apt
        return 1
    }
}

step_apt() {
    may_apt
    set -- @@apt
    # A fresh machine updates itself at its first boot and holds apt's locks meanwhile. Apt is never interrupted: that
    # would leave the machine half configured.
    until lasting_root env LC_ALL=C apt-get update >"$log.update" 2>&1; do
        cat "$log.update"
        grep -qi 'lock' "$log.update" || break
        [ "$(date +%s)" -lt "$deadline" ] || return 124
        sleep 5
    done
    lasting_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 \
        install -y --no-install-recommends -- "$@"
}

# find_python: this machine's own Python of the requested version, if it is complete.
find_python() {
    for candidate in @@command python3; do
        has "$candidate" || continue
        case $(limited "$candidate" -I -c "import platform, ssl, ctypes, venv; print(platform.python_version())" 2>/dev/null).x in
        "$python".*)
            command -v "$candidate"
            return
            ;;
        esac
    done
    return 1
}

make_environment() {
    rm -rf "$environment"
    if own=$(find_python); then
        limited "$uv" venv --python "$own" "$environment"
        return
    fi
    limited "$uv" venv --python-preference only-managed --python "$python" "$environment" && return
    echo "This machine has no Python $python, and uv could not bring one."
    echo "Install python$python, or give a mirror that the machine reaches: Image(env={'UV_PYTHON_INSTALL_MIRROR': …})"
    return 1
}

has_deps() { [ -e "$packages" ] && [ -x "$environment/bin/python" ]; }

install_packages() {
    limited "$uv" pip install --python "$environment/bin/python" @@index_options -- "$@"
}

# without_torch_index PACKAGE...: once more, where PyTorch's own index was only the better choice and is out of reach;
# else fails as the command before it.
without_torch_index() {
    ended=$?
    [ "${UV_TORCH_BACKEND:-}" = auto ] || return "$ended"
    echo "Once more, from the other package indexes alone."
    unset UV_TORCH_BACKEND
    install_packages "$@"
}

step_deps() {
    uv=$(find_uv) || {
        lacking_uv
        return 1
    }
    make_environment
    set -- @@requirements
    [ $# -eq 0 ] || install_packages "$@" || without_torch_index "$@"
    : >"$packages"
}

has_skyward() { has_deps && [ -e "$code" ]; }

# Unpacks the client's own code, if it was sent.
step_skyward() {
    [ -e "$wheel" ] || return 0
    limited "$environment/bin/python" -I -c '
import sys
import sysconfig
import zipfile

zipfile.ZipFile(sys.argv[1]).extractall(sysconfig.get_path("purelib"))
' "$wheel"
    : >"$code"
}

has_server() { has_skyward && [ -e "$finished" ]; }

# Imports the node's programs, to see that they start, and to compile them.
step_server() {
    modules=
    [ ! -e "$code" ] || modules="skyward.node.supervisor.supervisor skyward.node.supervisor.service_process skyward.node.worker.worker"
    limited "$environment/bin/python" -I -c '
import importlib
import sys
from importlib.metadata import version

wrong = [pin for pin in sys.argv[2:] if version(pin.partition("==")[0]) != pin.partition("==")[2]]
if wrong:
    sys.exit(f"the image replaced packages of the engine, which needs {wrong}")
for module in sys.argv[1].split():
    importlib.import_module(module)
' "$modules" @@pins
    [ ! -e "$code" ] || : >"$finished"
}

# Nothing to mount yet.
has_volumes() { :; }
step_volumes() { :; }

# config_file PATH: prints a file of pip's configuration.
config_file() {
    [ -r "$1" ] || return 0
    say "file $1"
    cat "$1"
    echo
}

survey() {
    # A machine that is ready needs no step, and no further report.
    has_apt && has_server && return
    say "machine $(uname -s) $(uname -m)"
    if ! has_apt; then
        why=$(may_apt) || {
            say "step apt failed 77"
            echo "$why" >&2
            exit 77
        }
    fi
    for name in @@steps; do
        if "has_$name"; then say "step $name cached"; else say "step $name needed"; fi
    done
    [ ! -e "$wheel" ] || say "sent $wheel"
    for file in @@wheels/*.whl; do
        [ ! -e "$file" ] || say "sent $file"
    done
    for file in /etc/xdg/pip/pip.conf /etc/pip.conf "${HOME:-}/.pip/pip.conf" \
        "${XDG_CONFIG_HOME:-${HOME:-}/.config}/pip/pip.conf" "${PIP_CONFIG_FILE:-}"; do
        config_file "$file"
    done
    env | sed -n -e 's/^\(UV_[A-Z_]*\)=.*/@skyward variable \1/p' -e 's/^\(SSL_CERT_FILE\)=.*/@skyward variable \1/p'
    say "file environment"
    echo "[:env:]"
    env | sed -n 's/^PIP_\([A-Z_]*=\)/\1/p'
}

# ready: prints the environment, if it is finished, and the search path for programs.
ready() {
    has_server || return 0
    say "ready $environment"
    say "path $PATH"
}

settings
# By a random name: machines that share the folder have equal process ids.
trial=$root/.new-$(cat /proc/sys/kernel/random/uuid)
if ! (mkdir -p "$root" && chmod 700 "$root" && echo >"$trial" && rm "$trial"); then
    df -h "$root" >&2
    say "step uv failed 73"
    exit 73
fi

case ${1:-} in
survey)
    survey
    ready
    exit
    ;;
?*)
    step "$1" "$2"
    ready
    exit
    ;;
esac

mkdir -p "$root/logs" || exit
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

step uv 300
step apt 900
step deps 1800
step skyward 120
step server 120
step volumes 300
say "ready $environment"
