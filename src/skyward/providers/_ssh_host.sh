# Verbs on a machine reached over SSH, run as `sh -c SCRIPT sh VERB ARGUMENT...`; POSIX sh, Linux, no Python.
# shellcheck shell=sh
set -u

# carriers ID: processes that carry the instance's id in their environment, whatever process is their parent.
carriers() {
    grep -lzx "SKYWARD_INSTANCE=$1" /proc/[0-9]*/environ 2>/dev/null | sed 's,^/proc/,,; s,/environ$,,'
}

# survey: facts about the machine, one NAME=VALUE a line.
survey() {
    # shellcheck disable=SC2086
    set -- ${SSH_CONNECTION:-}
    echo "address=${3:-}"
    echo "port=${4:-}"
    echo "cache=${XDG_CACHE_HOME:-$HOME/.cache}/skyward"
    echo "system=$(uname -s)"
    echo "cpu=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    echo "memory_kib=$(sed -n 's/^MemTotal: *\([0-9]*\) kB$/\1/p' /proc/meminfo 2>/dev/null)"
    if command -v nvidia-smi >/dev/null 2>&1; then
        nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null | sed 's/^/gpu=/'
    fi
}

# prepare FOLDER: an empty folder for a node, this user's own.
prepare() {
    umask 077
    mkdir -p "$1"
}

# tagged FOLDER: the name and the tags of every node below it, one a line.
tagged() {
    for tags in "$1"/*/instance.json; do
        if [ -f "$tags" ]; then
            folder=${tags%/*}
            printf '%s ' "${folder##*/}"
            tr -d '\n' <"$tags"
            echo
        fi
    done
}

# end ID FOLDER: kill the node's processes until none is left, then remove its folders.
end() {
    tries=0
    while pids=$(carriers "$1") && [ -n "$pids" ]; do
        tries=$((tries + 1))
        if [ "$tries" -gt 100 ]; then
            echo "these processes do not end: $pids" >&2
            return 1
        fi
        # shellcheck disable=SC2086
        kill -9 $pids 2>/dev/null
        sleep 0.1
    done
    rm -rf "$2" "/dev/shm/skyward-$(id -u)-$1"-*
    rmdir "$(dirname "$2")" 2>/dev/null || :
}

"$@"
