#!/bin/sh
# First process of a rented container: its sshd, its deadline, its lease, its end. Running it again changes nothing,
# since its provider may restart it at any time. container_boot.py puts the facts in front: variables, and one function
# for each call of the provider's API.
# On a full disk it goes on: calls use no file, and the order to end the container is the removal of a file. A special
# builtin such as ":" must not be redirected, or a POSIX shell ends when the file cannot be made.
# shellcheck disable=SC2154 # the facts are assigned in front of this text
set -u
umask 077
# Images set these for their own programs; dpkg and sshd fail with them.
unset LD_LIBRARY_PATH LD_PRELOAD
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

has() { command -v "$1" >/dev/null 2>&1; }
report() { echo "skyward: $*"; }

# pause SECONDS: in the background, so that a signal ends the script at once.
pause() {
    sleep "$1" &
    wait "$!"
}

# keep FILE: stores the standard input in the folder, at once or not at all.
keep() { cat >"$folder/$1.new" && mv "$folder/$1.new" "$folder/$1"; }

prepare() {
    [ -d "$folder/begun" ] ||
        { echo yes | keep wanted && echo "rm -f '$folder/wanted'" | keep end && mkdir "$folder/begun"; } ||
        end "its disk takes no file"
    echo "$host_key" | keep host_key
    echo "$user_key" | keep authorized_keys
    keep may-end.sh <<EOF
tries=0
while [ "\$tries" -lt "$answer_s" ]; do
    case \$(cat '$folder/may-end' 2>/dev/null) in
    yes) exit 0 ;;
    "no: "* | "unsure: "*) break ;;
    esac
    tries=\$((tries + 1))
    sleep 1
done
cat '$folder/may-end' 2>/dev/null || echo "the provider has not answered its call yet"
exit 1
EOF
    keep sshd_config <<EOF
$sshd_options
Port $port
HostKey $folder/host_key
AuthorizedKeysFile $folder/authorized_keys
KbdInteractiveAuthentication no
LoginGraceTime 30
MaxAuthTries 20
MaxSessions 500
MaxStartups 500
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
PrintMotd no
StrictModes no
Subsystem sftp internal-sftp
UseDNS no
UsePAM no
EOF
}

# --- software -----------------------------------------------------------------------------------------------------

find_sshd() {
    for sshd in $sshd_paths; do
        [ ! -x "$sshd" ] || return 0
    done
    return 1
}

has_gnu_wget() { case $(wget --version 2>/dev/null) in "GNU Wget"*) ;; *) return 1 ;; esac }

can_send() { has curl || has python3 || has_gnu_wget || has openssl; }

knows_authorities() {
    for each in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
        [ ! -e "$each" ] || return 0
    done
    return 1
}

# install: until sshd and a program that can send a request are there.
install() {
    umask 022 # for what packages make
    while :; do
        set --
        find_sshd || set -- openssh-server
        can_send || set -- "$@" curl
        knows_authorities || set -- "$@" ca-certificates
        [ "$#" -gt 0 ] || return
        report "installing $*"
        add "$@" || report "could not install $*"
        pause "$every_s"
    done
}

add() {
    PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
    if has apt-get; then
        # The package starts a server of its own on the same port, unless a policy forbids that.
        [ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"; }
        apt-get update -q # fails for one broken source of many
        apt-get install -qy --no-install-recommends "$@"
    elif has apk; then
        apk add --no-cache "$@"
    else
        for manager in dnf microdnf yum; do
            ! has "$manager" || { "$manager" install -y "$@"; return; }
        done
        report "the image has no package manager, and lacks $*"
        # Nobody can ever log in without sshd: that must not cost money until the deadline.
        find_sshd || rm -f "$folder/wanted"
        return 1
    fi
}

serve() {
    if [ -n "$server" ] && kill -0 "$server" 2>/dev/null; then return; fi
    find_sshd || return
    mkdir -p "$empty_folder" && chmod 755 "$empty_folder"
    # Without PAM, which fails in many containers, sshd refuses an account that is locked by an exclamation mark.
    sed -i 's/^root:![^:]*:/root:*:/' "$shadow" 2>/dev/null
    (
        umask 022
        exec "$sshd" -D -e -f "$folder/sshd_config" </dev/null
    ) &
    server=$!
}

# --- calls of the provider's API ----------------------------------------------------------------------------------

# try CALL: makes the call; without success, the reason is in $why.
try() {
    # shellcheck disable=SC2034 # calls name it
    SKYWARD_SECRET=$(cat "$folder/secret" 2>/dev/null)
    "$1"
    for each in $needs; do
        eval "value=\${$each-}"
        [ -n "$value" ] || { status=000 why="the container has no $each" && return 1; }
    done
    for program in curl python wget openssl; do
        status=000 answer=
        "send_by_$program"
        case $status in
        2??)
            # Some refusals have a status of success, and are recognised by their text.
            case $(echo "$answer" | tr -d ' \r\n') in *"${refusal:-$newline}"*) ;; *) return 0 ;; esac
            why="refused by $method $url: $(echo "$answer" | tail -c 300 | tr -d '\r\n')" && return 1
            ;;
        [13-5]??) why="status $status for $method $url: $(echo "$answer" | tail -c 300 | tr -d '\r\n')" && return 1 ;;
        esac
    done
    status=000 why="no answer from $url" && return 1
}

# Every process can read the arguments of all others: the key is in a header, which no argument holds.
send_by_curl() {
    has curl || return
    answer=$({
        printf 'request = "%s"\nurl = "%s"\n' "$method" "$url"
        echo "$headers" | sed 's/.*/header = "&"/'
        [ -z "$body" ] || echo "$body" | sed 's/[\\"]/\\&/g; s/.*/data-binary = "&"/'
    } | curl --disable --config - --silent --max-time 20 --write-out '\n%{http_code}' 2>/dev/null)
    status=${answer##*"$newline"}
    answer=${answer%"$newline"*}
}

send_by_python() {
    for python in python3 "${HOME:-/root}"/.cache/skyward/python/*/bin/python3; do
        has "$python" || continue
        answer=$(printf '%s\n' "$method" "$url" "$body" "$headers" | "$python" -I -c "$python_program" 2>/dev/null)
        status=${answer%%"$newline"*}
        answer=${answer#*"$newline"}
        [ -z "$status" ] || return
    done
}

python_program='
import sys, urllib.error, urllib.request
method, url, body, *headers = sys.stdin.read().splitlines()
fields = dict(each.split(": ", 1) for each in headers)
try:
    order = urllib.request.Request(url, body.encode() or None, fields, method=method)
    answer = urllib.request.urlopen(order, timeout=20)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status)
print(answer.read(4096).decode(errors="replace"))
'

send_by_wget() {
    has_gnu_wget || return
    set --
    [ -z "$body" ] || set -- --body-data="$body"
    # It reads headers from files only. The memory below /dev/shm is there for a full disk.
    for settings in "$folder/wgetrc" /dev/shm/skyward-wgetrc; do
        echo "$headers" | sed 's/^/header = /' 2>/dev/null >"$settings" && break
    done
    answer=$(wget --config="$settings" --no-verbose --server-response --content-on-error --tries=1 --timeout=20 \
        --max-redirect=0 --method="$method" "$@" --output-document=- "$url" 2>&1)
    rm -f "$settings"
    status=$(echo "$answer" | sed -n 's,^ *HTTP/[0-9.]* \([0-9][0-9][0-9]\).*,\1,p' | head -n 1)
}

send_by_openssl() {
    has openssl || return
    case $url in https://*) ;; *) return ;; esac
    rest=${url#https://}
    place=${rest%%/*}
    host=${place%:*}
    [ "$host" != "$place" ] || place=$place:443
    set --
    ! has timeout || set -- timeout 30
    answer=$({
        printf '%s %s HTTP/1.0\r\nHost: %s\r\n' "$method" "/${rest#*/}" "$host"
        echo "$headers" | sed "s/\$/$(printf '\r')/"
        printf 'Content-Length: %s\r\n\r\n%s' "${#body}" "$body"
    } | "$@" openssl s_client -quiet -connect "$place" -servername "$host" -verify_hostname "$host" \
        -verify_return_error 2>/dev/null)
    status=$(echo "$answer" | sed -n '1s,^HTTP/[0-9.]* \([0-9][0-9][0-9]\).*,\1,p')
}

# may_end: is the check accepted? A key that is refused it may be allowed the end all the same. It is if it is told that
# another machine, which does not exist, cannot be found to be ended, and is refused that one's check: permissions are
# judged before existence then. A key that can at least read this machine is unsure, and not refused.
may_end() {
    verdict=no
    try call_check && return 0
    [ -n "$probed" ] && [ "$status" = 403 ] || return 1
    refusal_text=$why
    try call_absent_check
    checked=$status
    try call_absent_end
    case $checked$status in
    403404 | 4032??) return 0 ;;
    *000* | *429* | 5??* | ???5??) status=000 && return 1 ;;
    esac
    try call_read && verdict=unsure
    status=403 why=$refusal_text
    return 1
}

# judge: may this container end its own bill? A key that was made just now may be refused at first. After a refusal
# that stays it is asked seldom, since all containers of an account may share one quota.
judge() {
    refused=0
    until may_end; do
        case $status in 000 | 429 | 5??) ;; *) refused=$((refused + 1)) ;; esac
        if [ "$refused" -lt 2 ]; then
            echo "not known: $why" | keep may-end
            pause "$every_s"
        else
            echo "$verdict: $why" | keep may-end
            pause "$accepted_s"
        fi
    done
    echo yes | keep may-end
}

# --- the end ------------------------------------------------------------------------------------------------------

# end REASON: for ever, since nothing else ends the bill; the provider ends this script.
end() {
    report "the end: $1"
    rm -f "$folder/wanted"
    while :; do
        wait_s=$again_s
        for each_call in $end_calls; do
            if try "$each_call"; then
                report "the provider accepts the end"
                wait_s=$accepted_s
                break
            fi
            report "$why"
        done
        pause "$wait_s"
    done
}

# is_supervised: by its arguments, which no process has that it leaves behind. The pattern does not match its own text.
is_supervised() { cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\000' '\n' | grep -qx "$supervisor"; }

# is_attended: its client is connected, or that cannot be seen here.
is_attended() {
    [ ! -r "$connections" ] || grep -qs "$(printf ':%04X [0-9A-F]*:[0-9A-F]* 01 ' "$port")" "$connections" "${connections}6"
}

# is_over: a machine out of memory may fail to run the clock; that ends nothing.
is_over() { [ "$(date +%s)" -ge "$ends_at" ] 2>/dev/null; }

# set_deadline: a host's clock may be behind, and would then postpone the end. So it is measured from the first start.
set_deadline() {
    now=$(date +%s) || return
    late=$((made_at - now))
    [ "$late" -le "$skew_s" ] || [ -e "$folder/late" ] || echo "$late" | keep late
    kept=$(cat "$folder/late" 2>/dev/null)
    case $kept in "" | *[!0-9]*) ;; *) ends_at=$((ends_at - kept)) ;; esac
}

# watch: the disk may have been emptied before a restart, and the client may die before it starts the supervisor. So
# a container without either ends as well, after a longer time.
watch() {
    server=
    absences=0
    while :; do
        serve
        [ -e "$folder/wanted" ] || end "its node has ended, or cannot begin"
        is_over && end "its time is over"
        absences=$((absences + 1))
        if is_supervised; then
            absences=0
            [ -d "$folder/supervised" ] || mkdir "$folder/supervised"
        elif [ -d "$folder/supervised" ]; then
            [ "$absences" -le "$most_absences" ] || end "its supervisor is gone"
        elif is_attended; then
            absences=0
        else
            [ "$absences" -le "$most_unattended" ] || end "nobody has used it"
        fi
        pause "$every_s"
    done
}

newline='
'
trap 'exit 0' TERM INT
unset SKYWARD_BOOT
prepare
set_deadline
install &
judge &
watch
