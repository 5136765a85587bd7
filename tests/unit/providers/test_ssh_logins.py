"""Hosts on which a node cannot run: the cause is named before anything is made, within seconds."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import pytest

from skyward.errors import ConfigurationError
from skyward.machine.ssh_commands import Login, login_fault, try_login
from skyward.machine.ssh_connection import SSHConnections
from skyward.providers._ssh_hosts import host_fault
from skyward.providers.ssh import SSH
from skyward.request.request import parse_request
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from support.ssh_islands import require_namespaces

require_sshd()

_NAMED_WITHIN_S = 20.0
"""A tenth of a second on an idle machine; without the check 42 s and more."""


async def refusal(host: SshHost, tmp_path: Path) -> str:
    """Return the error of the host's first use; empty if a node could run there."""
    provider = SSH(
        hosts=[f"{host.address}:{host.port}"],
        key_path=str(host.key_path),
        known_hosts=str(write_known_hosts(tmp_path / "known_hosts", host)),
    )
    try:
        await provider.offers(parse_request(nodes=1))
    except ConfigurationError as error:
        return str(error)
    finally:
        await provider.close()
    return ""


STARTUP_FILES: Sequence[tuple[str, str, str]] = [
    ("prints", "echo welcome; echo to stderr >&2; printf 'no newline'", ""),
    ("prints a lot", "head -c 3000000 /dev/zero | tr '\\0' 'x'", ""),
    ("traces", "set -x", ""),
    ("leaves a child", "echo to stderr >&2; (sleep 20 &)", ""),
    (
        "prints in the background",
        "(while sleep 0.1; do echo noise; done) &",
        "in the background .* noise",
    ),
    ("returns", "return 1", ""),
    ("sets -e and -u", "set -eu", ""),
    ("is slow", "sleep 1.5", ""),
    ("exits", "echo load the modules first; exit 3", "ended with exit status 3 .*startup file exits.*modules first"),
    ("exits silently", "exit 0", "ended with exit status 0 .*startup file exits"),
    ("fails under set -e", "set -e; false", "ended with exit status 1 .*startup file exits"),
    ("starts what is missing", "exec no-such-shell", "exit status 127 .*startup file exits.*no-such-shell"),
    ("starts another shell", "exec sh", "startup file starts another program in place of the command"),
    ("starts cat", "exec cat", "startup file starts another program in place of the command"),
    ("reads a line", "read -r answer", "startup file reads the standard input"),
    ("reads for a while", "read -t 2 -r answer", "startup file reads the standard input"),
    ("reads all", "cat >/dev/null", "startup file reads the standard input"),
    ("runs a shell", "sh", "startup file reads the standard input"),
    ("reads nothing of commands", "set -n", "startup file exits"),
    ("sends the output elsewhere", "exec >/dev/null 2>&1", "startup file exits"),
    ("has no PATH", "export PATH=/nowhere", "lacks programs, cat chmod .* its PATH, /nowhere"),
]


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in STARTUP_FILES], ids=[row[0] for row in STARTUP_FILES])
async def test_a_startup_file_that_takes_the_place_of_commands_is_named(
    text: str, message: str, tmp_path: Path
) -> None:
    # As sshd's shell, bash reads ~/.bashrc. The host's commands are forced ones: no other shell reads it again.
    with SshHost(tmp_path / "host", address="127.0.0.5") as host:
        (host.home / ".bashrc").write_text(f"{text}\n")
        began = time.monotonic()
        error = await refusal(host, tmp_path)
        assert time.monotonic() - began < _NAMED_WITHIN_S
    _assert_named(error, message)


def _assert_named(error: str, message: str) -> None:
    if message:
        with pytest.raises(ConfigurationError, match=f"(?s)^.*127.0.0.5.*{message}"):
            raise ConfigurationError(error)
    else:
        assert error == ""


SERVERS: Sequence[tuple[str, Sequence[str], str]] = [
    ("no forwarding", ["AllowTcpForwarding no"], "forwards no ports .*AllowTcpForwarding"),
    ("remote forwarding only", ["AllowTcpForwarding remote"], "forwards no ports .*AllowTcpForwarding"),
    ("forwarding disabled", ["DisableForwarding yes"], "forwards no ports .*DisableForwarding"),
    ("another port", ["PermitOpen 127.0.0.5:80"], "forwards no ports .*PermitOpen"),
    ("another host", ["PermitOpen 10.0.0.1:*"], "forwards no ports .*PermitOpen"),
    ("local forwarding", ["AllowTcpForwarding local", "PermitOpen any"], ""),
    ("files only", ["ForceCommand internal-sftp"], "may transfer files only"),
    ("another command", ["ForceCommand echo Welcome to the build server"], "ForceCommand.*It printed: Welcome"),
    ("a menu", ["ForceCommand cat"], "another program in place of the command"),
    ("no login", ["ForceCommand /usr/sbin/nologin"], "no login shell"),
    ("false", ["ForceCommand /bin/false"], "exit status 1 .*/bin/false"),
    ("restricted shell", ['ForceCommand /bin/bash -r -c "$SSH_ORIGINAL_COMMAND"'], "restricted"),
    ("a wrapper", ['ForceCommand /bin/sh -c "$SSH_ORIGINAL_COMMAND"'], ""),
    ("one session at a time", ["MaxSessions 1"], ""),
]


@pytest.mark.parametrize(("options", "message"), [row[1:] for row in SERVERS], ids=[row[0] for row in SERVERS])
async def test_a_server_that_restricts_the_login_is_named(options: Sequence[str], message: str, tmp_path: Path) -> None:
    with SshHost(tmp_path / "host", address="127.0.0.5", sshd_options=options) as host:
        began = time.monotonic()
        error = await refusal(host, tmp_path)
        assert time.monotonic() - began < _NAMED_WITHIN_S
    _assert_named(error, message)


HANGS = [("sleep 60", "no command begins within 1 s: a startup file waits"), ("exec sleep 60", "no command begins")]


@pytest.mark.parametrize(("text", "message"), HANGS)
async def test_a_startup_file_that_waits_is_named_after_the_limit(text: str, message: str, tmp_path: Path) -> None:
    with SshHost(tmp_path / "host", address="127.0.0.5") as host:
        (host.home / ".bashrc").write_text(f"{text}\n")
        connections = SSHConnections()
        connection = connections.acquire((host.target(),))
        try:
            login = await asyncio.wrap_future(
                connection.perform(lambda client: try_login(client, connection.gate, wait_s=1.0))
            )
        finally:
            connections.release(connection)
    assert not login.ended
    assert message in login_fault(login, wait_s=1.0)


@pytest.mark.parametrize(
    ("login", "message"),
    [
        (Login(began=True, answered=True, output="welcome"), ""),
        (Login(began=True, answered=True, noise="tick"), "in the background that prints"),
        (Login(status=1, output="This account is currently not available."), "no login shell"),
        (Login(status=1, output="This account is not available"), "no login shell"),
        (Login(status=1, output="This service allows sftp connections only."), "may transfer files only"),
        (Login(status=128, output="fatal: unrecognized command 'exec /bin/sh'"), "may transfer files only"),
        (Login(status=1, output="Password change required but no TTY available."), "password has expired"),
        (Login(status=1, output="bash: exec: restricted"), "restricted"),
        (Login(status=127, output="bash: line 1: /bin/sh: No such file or directory"), "no usable /bin/sh"),
        (Login(status=1), "with exit status 1 before the command began"),
        (Login(status=None), "without an exit status"),
        (Login(status=1, output="x" * 10_000), "x …"),
    ],
)
def test_the_end_of_a_login_says_its_cause(login: Login, message: str) -> None:
    fault = login_fault(login)

    assert message in fault
    assert bool(fault) is bool(message)
    assert len(fault) < 1500


SOUND: Mapping[str, Sequence[str]] = {"bits": ["64"], "machine": ["x86_64"], "time": ["1000000"], "system": ["Linux"]}


@pytest.mark.parametrize(
    ("facts", "forwards", "message"),
    [
        ({}, True, ""),
        ({"bits": [""]}, True, ""),
        ({"time": ["1050000"]}, True, ""),
        ({"time": ["1259200"]}, True, "its clock is 3.0 days ahead of this machine's"),
        ({"time": ["0"]}, True, "its clock is 11.6 days behind this machine's"),
        ({"bits": ["32"], "machine": ["armv7l"]}, True, r"its system (armv7l) has 32 bits"),
        ({}, False, "AllowTcpForwarding"),
        ({"fault": ["/home/u/.cache/skyward cannot be written to: No space left on device"]}, True, "Free space"),
        ({"fault": ["/home/u/.cache/skyward cannot be written to: Disk quota exceeded"]}, True, "quota -s"),
    ],
)
def test_what_keeps_nodes_from_running_is_named(
    facts: Mapping[str, Sequence[str]], forwards: bool, message: str
) -> None:
    fault = host_fault({**SOUND, **facts}, forwards=forwards, now=1_000_000.0)

    assert message in fault
    assert bool(fault) is bool(message)


MOUNTS = [
    ("", ""),
    ("-o size=100k", "cannot be written to: .*No space left on device"),
    ("-o nr_inodes=1", "cannot be written to: .*No space left on device"),
    ("-o ro", "cannot be written to: .*Read-only file system"),
    ("-o noexec", "mounted with noexec"),
]


@pytest.mark.parametrize(("options", "message"), MOUNTS)
def test_a_folder_that_cannot_hold_a_node_is_named_and_left_as_it_was(
    options: str, message: str, tmp_path: Path
) -> None:
    require_namespaces()
    script = str(files("skyward.providers").joinpath("_ssh_host.sh"))
    commands = 'mount -t tmpfs $1 none "$2" && sh "$3" fault "$2" && find "$2" -type f'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", commands, "sh", options, str(tmp_path), script],
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(f"(?s).*{message}.*" if message else "", done.stdout)
    assert ".trial" not in done.stdout.replace(done.stdout.splitlines()[0] if message else "", "")


@pytest.mark.parametrize(
    ("home", "message"),
    [("nothing/there", "there is no home folder"), ("root", "the home folder .*root belongs to another user")],
)
def test_a_home_that_is_missing_or_another_users_is_named(home: str, message: str) -> None:
    require_namespaces()
    script = str(files("skyward.providers").joinpath("_ssh_host.sh"))
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    # Not below pytest's folder, which its next session closes to other users.
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        Path(place, "root").mkdir(mode=0o755)
        shutil.copy(script, place)
        folder = Path(place, home)
        done = subprocess.run(
            [*nobody, "sh", Path(place, Path(script).name), "fault", f"{folder}/.cache/skyward"],
            env={"HOME": str(folder), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        )
    assert re.fullmatch(f"(?s).*cannot be written to: .*; {message}.*\n", done.stdout)
