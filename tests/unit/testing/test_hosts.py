from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from skyward.errors import UnreachableError
from skyward.testing.hosts import SshHost, find_openssh, require_sshd, write_known_hosts
from support.eventually import eventually
from support.ssh_islands import IslandHost, require_namespaces

require_sshd()

TIMEOUT_S = 30

DAEMON = "setsid sleep 60 >/dev/null 2>&1 </dev/null & echo $!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[SshHost]:
    with SshHost(folder / "one", env={"COLOUR": 'a"$b c'}) as host:
        yield host


@pytest.fixture(scope="module")
def other(folder: Path) -> Iterator[SshHost]:
    with SshHost(folder / "two", address="127.0.0.3", path="/nowhere") as host:
        yield host


def command_line(
    host: SshHost, *command: str, known: SshHost | None = None, key: Path | None = None, program: str = "ssh"
) -> list[str | Path]:
    known_hosts = write_known_hosts(host.home.parent / "known", through={(host.address, host.port): known or host})
    options = [f"UserKnownHostsFile={known_hosts}", "StrictHostKeyChecking=yes", "BatchMode=yes", "IdentitiesOnly=yes"]
    port = ["-p", str(host.port)] if program == "ssh" else ["-S", find_openssh("ssh") or "ssh", "-P", str(host.port)]
    arguments = [argument for option in options for argument in ("-o", option)]
    return [
        find_openssh(program) or program,
        "-F",
        "none",
        *arguments,
        "-i",
        key or host.key_path,
        *port,
        f"{host.user}@{host.address}",
        *command,
    ]


def ssh(
    host: SshHost, command: str, *, known: SshHost | None = None, key: Path | None = None
) -> subprocess.CompletedProcess[str]:
    line = command_line(host, command, known=known, key=key)
    no_agent = {"PATH": os.environ["PATH"]}
    return subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=no_agent)


@contextmanager
def session(host: SshHost) -> Iterator[subprocess.Popen[bytes]]:
    """One that echoes until it is left."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command_line(host, "cat"), **pipes, bufsize=0) as process:
        process.stdin.write(b"?")
        assert process.stdout.read(1) == b"?"
        yield process


def test_sessions_have_the_hosts_own_home_and_start_in_it(host: SshHost) -> None:
    done = ssh(host, "pwd; echo ~; echo $HOME; touch here")

    assert done.stdout.split() == [str(host.home)] * 3, done.stderr
    assert (host.home / "here").exists()


def test_sftp_starts_in_the_hosts_home(host: SshHost) -> None:
    line = command_line(host, program="sftp")

    subprocess.run(line, input=b"mkdir by_sftp\n", stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)

    assert (host.home / "by_sftp").is_dir()


def test_exit_code_arguments_and_environment_arrive(host: SshHost) -> None:
    done = ssh(host, """printf '%s|' "$COLOUR" 'a  b' "${SSH_ORIGINAL_COMMAND-none}"; exit 7""")

    assert (done.stdout, done.returncode) == ('a"$b c|a  b|none|', 7)


def test_sessions_inherit_nothing_from_the_tests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAVOUR", "tests")
    with SshHost(folder / "fresh") as host:
        names = [line.partition("=")[0] for line in ssh(host, "env").stdout.splitlines()]

    assert "HOME" in names
    assert {"FLAVOUR", "PYTEST_CURRENT_TEST", "XDG_CACHE_HOME"} & set(names) == set()


def test_path_hides_what_is_not_in_it(other: SshHost) -> None:
    done = ssh(other, "command -v python3 || echo none")

    assert done.stdout == "none\n", done.stderr


def test_hosts_side_by_side_let_the_same_key_in_and_show_different_ones(host: SshHost, other: SshHost) -> None:
    assert host.key_path == other.key_path
    assert ssh(other, "echo in").stdout == "in\n"
    assert host.host_key != other.host_key
    assert host.home != other.home


def test_another_key_is_refused(host: SshHost, folder: Path) -> None:
    stranger = SshHost(folder / "stranger", client_key=folder / "strangers_key")

    done = ssh(host, "echo in", key=stranger.key_path)

    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_another_hosts_key_is_refused_by_the_client(host: SshHost, other: SshHost) -> None:
    done = ssh(host, "echo in", known=other)

    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


# In `make test`: the refused key above.
@pytest.mark.full
def test_password_login_is_not_offered(host: SshHost) -> None:
    done = ssh(host, "echo in", key=Path("/nowhere"))

    assert "Permission denied (publickey)." in done.stderr


def test_daemon_is_among_the_hosts_processes(host: SshHost) -> None:
    daemon = psutil.Process(int(ssh(host, DAEMON).stdout))

    assert daemon in host.processes()
    daemon.kill()
    daemon.wait(TIMEOUT_S)
    assert daemon not in host.processes()


# In `make test`: the contract of TestSSH, which counts them.
@pytest.mark.full
def test_connections_are_counted(host: SshHost) -> None:
    with session(host), session(host):
        assert host.connections() == 2
    for attempt in eventually(10):
        with attempt:
            assert host.connections() == 0


def test_restart_ends_connections_and_nothing_else(folder: Path) -> None:
    with SshHost(folder / "restarted", address="127.0.0.4") as host:
        pid, port = host.pid, host.port
        daemon = int(ssh(host, DAEMON).stdout)
        with session(host) as connected:
            host.restart()
            assert connected.wait(TIMEOUT_S) == 255

        assert (host.pid != pid, host.port) == (True, port)
        assert psutil.pid_exists(daemon)
        assert ssh(host, "echo back").stdout == "back\n"
    assert not psutil.pid_exists(daemon)


# In `make test`: the restart above.
@pytest.mark.full
def test_host_that_was_off_comes_back_as_itself(folder: Path) -> None:
    host = SshHost(folder / "off_and_on", address="127.0.0.4")
    host.start()
    as_it_was = host.port, host.host_key
    host.stop()
    host.stop()
    assert (host.pid, host.processes(), host.connections()) == (0, [], 0)
    with pytest.raises(UnreachableError, match="switched off"):
        host.restart()

    with host:
        assert (host.port, host.host_key) == as_it_was
        assert ssh(host, "echo on").stdout == "on\n"


def test_wrong_option_is_an_error_with_sshds_words(folder: Path) -> None:
    host = SshHost(folder / "wrong", sshd_options=["NoSuchOption yes"])

    with pytest.raises(UnreachableError, match="Bad configuration option: NoSuchOption"):
        host.start()


def test_given_options_win(folder: Path) -> None:
    with SshHost(folder / "refusing", sshd_options=["PubkeyAuthentication no"]) as host:
        assert "Permission denied" in ssh(host, "echo in").stderr


@pytest.fixture(scope="module")
def islands(folder: Path) -> Iterator[list[SshHost]]:
    """Two networks: one host in the first, two in the second."""
    require_namespaces()
    with (
        IslandHost(folder / "island", address="127.0.0.5", island="127.0.0.1") as alone,
        IslandHost(folder / "mainland", address="127.0.0.6", island="127.0.0.1") as first,
        IslandHost(folder / "its_port", address="127.0.0.7", island="127.0.0.3", neighbour=first) as second,
    ):
        yield [alone, first, second]


def banner(host: SshHost, address: str, port: int) -> str:
    """What answers there when the host dials it."""
    script = f"import socket; print(socket.create_connection(({address!r}, {port}), 5).recv(4).decode())"
    done = ssh(host, f'{sys.executable} -c "{script}" 2>&1')
    return done.stdout.strip().splitlines()[-1]


# In `make test`: unit/providers/test_ssh_networks.py, on islands as well.
@pytest.mark.full
def test_hosts_on_islands_believe_to_be_at_port_22_of_their_own_loopback_address(islands: list[SshHost]) -> None:
    seen = [ssh(host, "echo ${SSH_CONNECTION#* * }").stdout.strip() for host in islands]

    assert seen == ["127.0.0.1 22", "127.0.0.1 22", "127.0.0.3 22"]


# In `make test`: unit/providers/test_ssh_networks.py, on islands as well.
@pytest.mark.full
def test_hosts_on_islands_reach_their_neighbours_only(host: SshHost, islands: list[SshHost]) -> None:
    alone, first, second = islands

    assert banner(alone, "127.0.0.1", 22) == "SSH-"
    assert banner(first, "127.0.0.3", 22) == banner(second, "127.0.0.1", 22) == "SSH-"
    assert "Connection refused" in banner(alone, "127.0.0.3", 22)
    assert "Connection refused" in banner(alone, host.address, host.port)
    assert "Network is unreachable" in banner(alone, "192.0.2.1", 80)


# In `make test`: the check after every test on islands.
@pytest.mark.full
def test_nothing_of_an_island_is_left_when_it_stops_and_it_comes_back_at_its_port(folder: Path) -> None:
    require_namespaces()
    island = IslandHost(folder / "sinking", address="127.0.0.8", island="127.0.0.1")
    before = psutil.Process().children(recursive=True)
    with island:
        port = island.port
        daemon = psutil.Process(int(ssh(island, DAEMON).stdout))
        processes = set(psutil.Process().children(recursive=True)) - set(before)
        names = {each.info["name"] for each in psutil.process_iter(["name"]) if each in processes}  # some end just now
        assert "network-relay" in names
        assert island.processes() == [daemon]
    assert [process for process in processes if process.is_running()] == []
    with island:
        assert island.port == port
        assert ssh(island, "echo back").stdout == "back\n"


# In `make test`: the check after every test with hosts.
@pytest.mark.full
@pytest.mark.parametrize("island", ["", "127.0.0.1"])
def test_everything_on_the_host_ends_with_the_process_that_made_it(folder: Path, island: str) -> None:
    if island:
        require_namespaces()
    script = (
        "import sys, pathlib, subprocess, os, signal, psutil\n"
        "from skyward.testing.hosts import SshHost, find_openssh, write_known_hosts\n"
        "from support.ssh_islands import IslandHost\n"
        "folder, island = pathlib.Path(sys.argv[1]), sys.argv[3]\n"
        "host = IslandHost(folder, island=island) if island else SshHost(folder); host.start()\n"
        "known = write_known_hosts(pathlib.Path(sys.argv[1]) / 'known', host)\n"
        "pid = subprocess.check_output([find_openssh('ssh'), '-F', 'none', '-o', f'UserKnownHostsFile={known}', '-i',\n"
        "    host.key_path, '-p', str(host.port), f'{host.user}@{host.address}', sys.argv[2]], timeout=20).decode()\n"
        "print(host.pid, pid, *(each.pid for each in psutil.Process().children(recursive=True)), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, folder / f"orphan{island}", DAEMON, island],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 4, done.stderr
    for attempt in eventually(10):
        with attempt:
            assert [pid for pid in pids if psutil.pid_exists(pid)] == []
