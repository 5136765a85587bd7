# Verbs on a machine reached over SSH, run as `sh -c SCRIPT sh VERB ARGUMENT...`; POSIX sh, Linux, no Python.
# shellcheck shell=sh
set -u

# carriers ID: processes that carry the instance's id in their environment, whatever process is their parent.
carriers() {
    grep -lzx "SKYWARD_INSTANCE=$1" /proc/[0-9]*/environ 2>/dev/null | sed 's,^/proc/,,; s,/environ$,,'
}

# lacking: the programs that these verbs need, and that are not in the PATH.
lacking() {
    for tool in cat chmod cut date dirname grep head id ls mkdir mv readlink rm rmdir sed sleep tail tr uname wc; do
        command -v "$tool" >/dev/null 2>&1 || printf '%s ' "$tool"
    done
}

# fault FOLDER: what keeps nodes from being made below the folder, in words; nothing if they can.
fault() {
    umask 077
    export LC_ALL=C
    trial=$1/.trial-$(cat /proc/sys/kernel/random/uuid)
    trap 'rm -f "$trial"' EXIT
    # A MiB, because a full disk may have room for a few bytes.
    if ! why=$({ mkdir -p "$1" && head -c 1048576 /dev/zero >"$trial"; } 2>&1); then
        echo "$1 cannot be written to: $(echo "$why" | tail -n 1)$(home_fault)"
        return
    fi
    for folder in "$1" "$1/nodes" "$1/envs" "$1/sent" "$1/locks" "$1/logs"; do
        [ ! -d "$folder" ] || [ -w "$folder" ] || echo "$folder cannot be written to: Permission denied"
    done
    if ! why=$({ printf '#!/bin/sh\n' >"$trial" && chmod 700 "$trial" && "$trial"; } 2>&1); then
        echo "programs in $1 do not run, since it is mounted with noexec: $(echo "$why" | tail -n 1)"
    fi
}

# home_fault: what is wrong with the home folder itself, if anything is.
home_fault() {
    # shellcheck disable=SC2012
    if [ ! -d "${HOME:-}" ]; then
        echo "; there is no home folder ${HOME:-(HOME is not set)}"
    elif [ "$(ls -nd "$HOME" | tr -s ' ' | cut -d' ' -f3)" != "$(id -u)" ]; then
        echo "; the home folder $HOME belongs to another user"
    fi
}

# survey: facts about the machine, one NAME=VALUE a line.
survey() {
    if [ -n "$(lacking)" ]; then
        echo "lacking=$(lacking)"
        echo "path=$PATH"
        return
    fi
    # shellcheck disable=SC2086
    set -- ${SSH_CONNECTION:-}
    echo "address=${3:-}"
    echo "port=${4:-}"
    cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/skyward
    echo "cache=$cache"
    echo "system=$(uname -s)"
    echo "bits=$(getconf LONG_BIT 2>/dev/null)"
    echo "machine=$(uname -m)"
    echo "time=$(date +%s)"
    (fault "$cache") | sed 's/^/fault=/'
    echo "cpu=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    echo "memory_kib=$(sed -n 's/^MemTotal: *\([0-9]*\) kB$/\1/p' /proc/meminfo 2>/dev/null)"
    if command -v nvidia-smi >/dev/null 2>&1; then
        nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null | sed 's/^/gpu=/'
    fi
}

# life: the kernel and the processes that are visible here. It differs after a restart, and in every container.
life() { echo "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null) $(readlink /proc/self/ns/pid 2>/dev/null)"; }

# machine: what stays the same when a machine restarts, and differs from those that share its home or its image.
machine() {
    # shellcheck disable=SC2086
    set -- ${SSH_CONNECTION:-}
    echo "$(cat /etc/machine-id 2>/dev/null) $(uname -n) ${3:-} ${4:-}"
}

# since: when the first of the processes that are visible here began, in seconds since 1970; 0 if that is hidden.
since() {
    ticks=$(sed 's/.*) //' /proc/1/stat 2>/dev/null | cut -d' ' -f20)
    boot=$(sed -n 's/^btime //p' /proc/stat 2>/dev/null)
    if [ -n "$ticks" ] && [ -n "$boot" ]; then
        echo $((boot + ticks / $(getconf CLK_TCK 2>/dev/null || echo 100)))
    else
        echo 0
    fi
}

# prepare FOLDER [FILE TEXT]: an empty folder for a node, this user's own, with a note of the host on which its processes
# will be, and then with a file, whole or not at all.
prepare() {
    umask 077
    mkdir -p "$1" && {
        life
        machine
        date +%s
    } >"$1/host" || return
    [ $# -eq 1 ] || { printf '%s\n' "$3" >"$1/.$2.part" && mv -f "$1/.$2.part" "$1/$2"; }
}

# place FOLDER: where the processes of a node are. "here"; "over" if they ended when this machine restarted; else the
# name of another host, which shares this folder. A folder without a note is taken to be of this host.
place() {
    {
        IFS= read -r lives && IFS= read -r runs_on && IFS= read -r made
    } 2>/dev/null <"$1/host" || lives=$(life)
    if [ "$lives" = "$(life)" ]; then
        echo here
    elif [ "$runs_on" = "$(machine)" ] && [ "$(since)" -gt "$made" ]; then
        echo over
    else
        # shellcheck disable=SC2086
        set -- $runs_on
        shift
        echo "$1${2:+($2:$3)}"
    fi
}

# tagged FOLDER: the name, the place and the tags of every node below it, one a line.
tagged() {
    for tags in "$1"/*/instance.json; do
        if [ -f "$tags" ]; then
            folder=${tags%/*}
            printf '%s %s ' "${folder##*/}" "$(place "$folder")"
            tr -d '\n' <"$tags"
            echo
        fi
    done
}

# end ID FOLDER: kill the node's processes until none is left, then remove its folders.
end() {
    at=$(place "$2")
    case $at in
    here | over) ;;
    *)
        echo "its processes are on another host, $at, with which this one shares $2:" \
            "name that host in hosts=, too; if it is gone for good, remove the folder" >&2
        return 1
        ;;
    esac
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
    rm -rf "/dev/shm/skyward-$(id -u)-$1"-*
    # A call may have made a folder read-only.
    if ! rm -rf "$2" 2>/dev/null; then
        chmod -R u+rwx "$2"
        rm -rf "$2"
    fi
    rmdir "$(dirname "$2")" 2>/dev/null || :
}

"$@"
