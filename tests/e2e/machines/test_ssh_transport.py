"""The transport against real servers: who may log in, what a lost connection does, and what travels through it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import random
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from skyward.base.waiting import wait_until
from skyward.errors import AuthenticationError, HostKeyError, UnreachableError
from skyward.machine.ssh import SshTransport
from skyward.machine.ssh_config import SSHTarget
from skyward.machine.ssh_probes import PortState
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from support.chaos import ChaosProxy

DEADLINE_S = 30.0
AT_ONCE_S = 5.0

GENERATE: dict[str, Callable[[], object]] = {
    "ed25519": Ed25519PrivateKey.generate,
    "ecdsa": lambda: ec.generate_private_key(ec.SECP256R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHost]:
    require_sshd()
    with SshHost(tmp_path_factory.mktemp("hosts") / "one") as host:
        yield host


@pytest.fixture(scope="module")
def other(host: SshHost) -> Iterator[SshHost]:
    with SshHost(host.home.parents[1] / "two", address="127.0.0.3") as other:
        yield other


@pytest.fixture
def proxy(host: SshHost) -> Iterator[ChaosProxy]:
    with ChaosProxy("127.0.0.9", (host.address, host.port)) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@asynccontextmanager
async def reaching(target: SSHTarget) -> AsyncIterator[SshTransport]:
    transport = SshTransport(target)
    try:
        yield transport
    finally:
        await transport.close()


async def says_hello(target: SSHTarget) -> bool:
    async with reaching(target) as transport:
        return (await transport.run(["echo", "hello"], timeout_s=DEADLINE_S)).stdout == "hello\n"


async def refusal(target: SSHTarget, kind: type[Exception]) -> str:
    """What a machine's refusal says; it must come at once."""
    started = time.monotonic()
    async with reaching(target) as transport:
        with pytest.raises(kind) as raised:
            await transport.run(["true"], timeout_s=DEADLINE_S)
        assert transport.last_error == str(raised.value)
        assert not transport.connected
    assert time.monotonic() - started < AT_ONCE_S
    return str(raised.value)


def new_key(path: Path, kind: str = "ed25519", *, passphrase: bytes = b"") -> str:
    """Write a private key; returns the public one."""
    key = GENERATE[kind]()
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, hidden))
    path.chmod(0o600)
    public = key.public_key()
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


@contextlib.contextmanager
def letting_in(host: SshHost, public: str) -> Iterator[None]:
    before = host.authorized_keys.read_text()
    host.authorized_keys.write_text(f"{before}{public}\n")
    try:
        yield
    finally:
        host.authorized_keys.write_text(before)


@asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    """Sends back what it gets, and ends when that ends."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), serving(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async with await asyncio.start_server(echo, "127.0.0.1", 0, backlog=200) as server:
        yield server.sockets[0].getsockname()[1]


@contextlib.contextmanager
def serving(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Closed when all is said, broken off when the test is over."""
    try:
        yield
    except BaseException:
        writer.transport.abort()
        raise
    writer.close()


async def echoed(place: tuple[str, int], data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*place)
    try:
        sending = asyncio.create_task(send_all(writer, data))
        received = await reader.read()
        await sending
        return received
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def send_all(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()


async def eventually(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    async def probe() -> bool | None:
        return True if condition() else None

    await wait_until(probe, deadline_s=deadline_s, interval_s=0.02, what=what)


# --- who may log in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ecdsa", pytest.param("rsa", marks=pytest.mark.full)])
async def test_every_usual_kind_of_key_logs_in(host: SshHost, tmp_path: Path, kind: str) -> None:
    with letting_in(host, new_key(tmp_path / "key", kind)):
        assert await says_hello(replace(host.target(), key_path=str(tmp_path / "key")))


async def test_wrong_key_is_refused_at_once_and_named(host: SshHost, tmp_path: Path) -> None:
    new_key(tmp_path / "stranger")

    said = await refusal(replace(host.target(), key_path=str(tmp_path / "stranger")), AuthenticationError)

    assert f"refused {host.user}" in said
    assert f"tried ({tmp_path / 'stranger'})" in said
    assert "authorized_keys" in said


async def test_wrong_user_is_refused_at_once(host: SshHost) -> None:
    said = await refusal(replace(host.target(), user="nobody-of-that-name"), AuthenticationError)

    assert "refused nobody-of-that-name" in said


async def test_encrypted_key_is_refused_with_advice(host: SshHost, tmp_path: Path) -> None:
    new_key(tmp_path / "locked", passphrase=b"secret")

    said = await refusal(replace(host.target(), key_path=str(tmp_path / "locked")), AuthenticationError)

    assert f"{tmp_path / 'locked'} is encrypted" in said
    assert "ssh-add" in said


@pytest.mark.parametrize(("content", "said"), [(None, "does not exist"), ("nonsense", "is malformed")])
async def test_key_file_that_is_none_is_named(host: SshHost, tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)

    assert f"the private key {path} {said}" in await refusal(
        replace(host.target(), key_path=str(path)), AuthenticationError
    )


async def test_agent_signs_for_a_key_that_is_encrypted(
    host: SshHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = new_key(tmp_path / "plain")
    locked = tmp_path / "locked"
    key = serialization.load_ssh_private_key((tmp_path / "plain").read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with agent_holding(tmp_path / "plain", tmp_path / "agent", monkeypatch), letting_in(host, public):
        (tmp_path / "plain").unlink()
        assert await says_hello(replace(host.target(), key_path=str(locked)))
        assert await says_hello(replace(host.target(), key_path=None))


@contextlib.contextmanager
def agent_holding(key: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.PIPE)
    try:
        assert agent.stdout is not None
        agent.stdout.readline()  # it listens
        monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
        subprocess.run(["ssh-add", "-q", str(key)], check=True)
        yield
    finally:
        agent.terminate()
        agent.communicate()


# --- who the machine must be --------------------------------------------------------------------------------------


async def test_another_machine_in_its_place_is_refused_at_once(host: SshHost, other: SshHost, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"[{host.address}]:{host.port} {other.host_key}\n")

    said = await refusal(replace(host.target(), host_keys=(), known_hosts=str(known)), HostKeyError)

    shown, expected = fingerprint(host.host_key), fingerprint(other.host_key)
    assert f"another host key than it should: ssh-ed25519 {shown}; expected: ssh-ed25519 {expected}" in said
    assert f"ssh-keygen -R '[{host.address}]:{host.port}' -f {known}" in said


async def test_key_of_another_kind_than_the_one_on_file_is_refused(host: SshHost, tmp_path: Path) -> None:
    rsa_key = new_key(tmp_path / "key", "rsa")

    said = await refusal(replace(host.target(), host_keys=(rsa_key,)), HostKeyError)

    assert fingerprint(host.host_key) in said


async def test_unknown_machine_is_not_contacted(host: SshHost, proxy: ChaosProxy, tmp_path: Path) -> None:
    known = write_known_hosts(tmp_path / "known_hosts", host)

    said = await refusal(replace(host.target(proxy.place), host_keys=(), known_hosts=str(known)), HostKeyError)

    assert "not a known host" in said
    assert f"`ssh-keyscan -p {proxy.place[1]} 127.0.0.9` prints to {known} after" in said
    assert proxy.connections == 0


def fingerprint(public: str) -> str:
    listed = subprocess.run(["ssh-keygen", "-lf", "-"], input=public, capture_output=True, text=True, check=True)
    return listed.stdout.split()[1]


# --- the way there ------------------------------------------------------------------------------------------------


async def test_machines_behind_others_share_the_way(host: SshHost, other: SshHost, tmp_path: Path) -> None:
    config = tmp_path / "config"
    with SshHost(tmp_path / "three", address="127.0.0.4", client_key=host.key_path) as third:
        known = write_known_hosts(tmp_path / "known_hosts", host, other, third)
        places = zip(("gate", "inner", "innermost"), (host, other, third), strict=True)
        config.write_text(
            "".join(f"Host {name}\n  HostName {at.address}\n  Port {at.port}\n" for name, at in places)
            + f"Host inner\n  ProxyJump gate\nHost innermost\n  ProxyJump gate,{host.user}@inner\n"
            + f"Host *\n  UserKnownHostsFile {known}\n  IdentityFile {host.key_path}\n  User {host.user}\n"
        )
        near, far = (SSHTarget(host=name, config_path=str(config)) for name in ("inner", "innermost"))

        async with reaching(near) as one, reaching(far) as two:
            for transport, at in ((one, other), (two, third)):
                done = await transport.run(["sh", "-c", "echo $SSH_CONNECTION $HOME"], timeout_s=DEADLINE_S)
                assert done.stdout.split()[2:] == [at.address, str(at.port), str(at.home)]
            assert [at.connections() for at in (host, other, third)] == [1, 2, 1]
        await eventually(lambda: not any(at.connections() for at in (host, other, third)), "the way to be given up")


async def test_closed_port_is_tried_for_as_long_as_the_patience_lasts(proxy: ChaosProxy, host: SshHost) -> None:
    proxy.cut()
    started = time.monotonic()
    async with reaching(replace(host.target(proxy.place), patience_s=1)) as transport:
        with pytest.raises(UnreachableError, match=rf"{proxy.place[1]} cannot be reached .*refused.*sshd listens"):
            await transport.run(["true"], timeout_s=DEADLINE_S)
    assert 1 <= time.monotonic() - started < AT_ONCE_S


async def test_ports_that_refuse_at_the_same_moment_all_answer(host: SshHost) -> None:
    with socket.create_server(("127.0.0.3", 0)) as server:
        port = server.getsockname()[1]
    async with reaching(host.target()) as transport:
        for _ in range(10):
            asked = (transport.probe_port("127.0.0.3", port, timeout_s=DEADLINE_S) for _ in range(8))
            assert await asyncio.gather(*asked) == [PortState.CLOSED] * 8


async def test_machine_that_comes_up_meanwhile_is_waited_for(proxy: ChaosProxy, host: SshHost) -> None:
    proxy.cut()
    async with reaching(host.target(proxy.place)) as transport:
        running = asyncio.create_task(transport.run(["echo", "hello"], timeout_s=DEADLINE_S))
        await eventually(lambda: not running.done(), "the first attempt")
        proxy.heal()
        assert (await running).stdout == "hello\n"


async def test_name_that_cannot_exist_is_refused_at_once() -> None:
    target = SSHTarget(host="x" * 70 + ".example", host_keys=(KEY,))

    assert "check the spelling" in await refusal(target, UnreachableError)


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPJpH3A0UCxVGiT9X3jKnoGNX3u9oKfvVp0R2QkI+m0q"


# --- one connection, kept -----------------------------------------------------------------------------------------


async def test_transports_and_forwards_share_one_connection(host: SshHost) -> None:
    async with echo_server() as port, reaching(host.target()) as one, reaching(host.target()) as two:
        places = [await one.forward("127.0.0.1", port), await two.forward("127.0.0.1", port)]
        answers = await asyncio.gather(*(echoed(place, b"hello") for place in places * 4))
        commands = await asyncio.gather(*(two.run(["echo", "hi"], timeout_s=DEADLINE_S) for _ in range(12)))

        assert answers == [b"hello"] * 8
        assert [done.stdout for done in commands] == ["hi\n"] * 12
        assert host.connections() == 1
        await one.close()
        assert (await two.run(["echo", "hi"], timeout_s=DEADLINE_S)).stdout == "hi\n"
    await eventually(lambda: host.connections() == 0, "the connection to be given up")


async def test_forwards_stay_where_they_are_when_the_server_starts_anew(tmp_path: Path) -> None:
    with SshHost(tmp_path / "host", address="127.0.0.4") as host:
        async with echo_server() as port, reaching(host.target()) as transport:
            place = await transport.forward("127.0.0.1", port)
            assert await echoed(place, b"before") == b"before"

            host.restart()

            await eventually(lambda: not transport.connected, "the loss to be noticed", AT_ONCE_S)
            assert transport.last_error
            assert await echoed(place, b"after") == b"after"
            assert transport.connected
            assert await transport.forward("127.0.0.1", port) == place


async def test_more_commands_than_a_server_allows_wait_for_their_turn(tmp_path: Path) -> None:
    with SshHost(tmp_path / "host", address="127.0.0.4", sshd_options=["MaxSessions 10"]) as host:
        async with reaching(host.target()) as one, reaching(host.target()) as two:
            commands = (transport.run(["sleep", "0.1"], timeout_s=DEADLINE_S) for transport in (one, two) * 12)
            assert [done.exit_code for done in await asyncio.gather(*commands)] == [0] * 24


async def test_command_goes_over_a_new_connection_when_the_old_one_is_gone(tmp_path: Path) -> None:
    with (
        SshHost(tmp_path / "host", address="127.0.0.4") as host,
        SshHost(tmp_path / "gate", address="127.0.0.5") as gate,
    ):
        known = write_known_hosts(tmp_path / "known_hosts", host, gate)
        config = tmp_path / "config"
        config.write_text(
            f"Host gate\n  HostName {gate.address}\n  Port {gate.port}\n"
            f"Host inner\n  HostName {host.address}\n  Port {host.port}\n  ProxyJump gate\n"
            f"Host *\n  UserKnownHostsFile {known}\n  IdentityFile {host.key_path}\n"
        )
        async with reaching(SSHTarget(host="inner", config_path=str(config))) as transport:
            for machine in (host, gate, host):
                assert (await transport.run(["echo", "hello"], timeout_s=DEADLINE_S)).stdout == "hello\n"
                machine.restart()
            assert (await transport.run(["echo", "hello"], timeout_s=DEADLINE_S)).stdout == "hello\n"


async def test_silent_connection_is_given_up_and_made_again(host: SshHost, proxy: ChaosProxy) -> None:
    target = replace(host.target(proxy.place), silence_s=1.5)
    async with echo_server() as port, reaching(target) as transport:
        place = await transport.forward("127.0.0.1", port)
        reader, writer = await asyncio.open_connection(*place)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        running = asyncio.create_task(transport.run(["sleep", "60"], timeout_s=DEADLINE_S))
        await eventually(lambda: "sleep" in names(host), "the command to run")

        proxy.freeze()
        started = time.monotonic()
        with pytest.raises(UnreachableError, match=r"lost during sleep: the peer did not answer for 1\.5 s"):
            await running
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)
        assert time.monotonic() - started < AT_ONCE_S

        proxy.heal()
        assert await echoed(place, b"two") == b"two"
        writer.close()


async def test_idle_connection_is_kept_while_it_answers(host: SshHost) -> None:
    async with reaching(replace(host.target(), silence_s=2)) as transport:
        await transport.run(["sleep", "3"], timeout_s=DEADLINE_S)
        assert transport.connected
        assert host.connections() == 1


def waiting_for(place: tuple[str, int]) -> int:
    """How many connections to ``place`` have had no answer yet."""
    return sum(each.raddr == place and each.status == psutil.CONN_SYN_SENT for each in psutil.net_connections("tcp4"))


async def test_connection_is_kept_while_many_ports_keep_their_callers_waiting(host: SshHost) -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind((host.address, 0))
        full.listen(0)
        async with reaching(replace(host.target(), silence_s=1.5)) as transport:
            running = asyncio.create_task(transport.run(["sleep", "4"], timeout_s=DEADLINE_S))
            await eventually(lambda: "sleep" in names(host), "the command to run")
            for _ in range(2):  # one is taken into the queue, which makes it full
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(full.getsockname())
            place = await transport.forward(*full.getsockname())
            for _ in range(6):
                stack.enter_context(socket.create_connection(place))

            await eventually(lambda: waiting_for(full.getsockname()) > 2, "the server to try in vain")

            async with asyncio.timeout(AT_ONCE_S):
                for _ in range(3):
                    assert (await transport.run(["true"], timeout_s=DEADLINE_S)).exit_code == 0
            assert (await running).exit_code == 0
            assert transport.connected


async def test_forwards_end_with_the_last_transport_that_has_them(host: SshHost) -> None:
    async with echo_server() as port, reaching(host.target()) as one, reaching(host.target()) as two:
        place = await one.forward("127.0.0.1", port)
        assert await two.forward("127.0.0.1", port) == place

        await one.close()
        assert await echoed(place, b"still") == b"still"
        async with reaching(host.target()) as three:
            await two.close()
            await three.run(["true"], timeout_s=DEADLINE_S)
            with pytest.raises(ConnectionRefusedError):
                await echoed(place, b"gone")


async def test_command_ends_with_the_connection(host: SshHost, proxy: ChaosProxy) -> None:
    async with reaching(host.target(proxy.place)) as transport:
        script = "sleep 61 & setsid sleep 62 & exec sleep 63"
        running = asyncio.create_task(transport.run(["sh", "-c", script], timeout_s=DEADLINE_S))
        await eventually(lambda: names(host).count("sleep") == 3, "the commands to run")

        proxy.cut()

        with pytest.raises(UnreachableError, match="lost during sh"):
            await running
        await eventually(lambda: names(host) == ["sleep"], "all but the daemon to end", AT_ONCE_S)
    for process in host.processes():
        process.kill()


async def test_what_a_command_leaves_behind_goes_on(host: SshHost) -> None:
    async with reaching(host.target()) as transport:
        done = await transport.run(["sh", "-c", "sleep 64 & echo $!"], timeout_s=DEADLINE_S)
        left = psutil.Process(int(done.stdout))
        await transport.run(["true"], timeout_s=DEADLINE_S)
        await transport.close()
        await eventually(lambda: host.connections() == 0, "the connection to be given up")
    assert left.is_running()
    left.kill()


def names(host: SshHost) -> list[str]:
    """Of what runs there, but for shells."""
    found: list[str] = []
    for process in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            found.append(process.name())
    return [name for name in found if name not in {"sh", "bash", "dash"}]


# --- what may be seen ---------------------------------------------------------------------------------------------


async def test_values_of_variables_are_in_no_list_of_processes(host: SshHost, tmp_path: Path) -> None:
    secret = "s3cret-" + hashlib.sha256(os.urandom(8)).hexdigest()
    gate = tmp_path / "gate"
    async with reaching(host.target()) as transport:
        seen = {secret_in_a_command_line(secret)}
        running = asyncio.create_task(
            transport.run(
                ["sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.01; done; echo $TOKEN"],
                env={"TOKEN": secret},
                timeout_s=DEADLINE_S,
            )
        )
        while not running.done():
            seen.add(secret_in_a_command_line(secret))
            if "sleep" in names(host):
                gate.touch()
            await asyncio.wait([running], timeout=0.001)
        assert (await running).stdout == f"{secret}\n"
    assert seen == {False}


def secret_in_a_command_line(secret: str) -> bool:
    found = False
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                found = found or secret.encode() in Path(entry.path, "cmdline").read_bytes()
    return found


# --- files --------------------------------------------------------------------------------------------------------


async def test_cut_file_leaves_nothing_behind(host: SshHost, proxy: ChaosProxy, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    async with reaching(host.target(proxy.place)) as transport:
        proxy.link.bytes_per_s = 4 << 20
        writing = asyncio.create_task(transport.put(bytes(64 << 20), str(folder / "file")))
        await eventually(lambda: folder.exists() and any(folder.iterdir()), "the file to be begun")

        proxy.cut()

        with pytest.raises(UnreachableError, match="lost during writing"):
            await writing
        await eventually(lambda: not list(folder.iterdir()), "the half of the file to go", AT_ONCE_S)


@pytest.mark.parametrize(("name", "kind"), [("file/below", NotADirectoryError), ("folder", IsADirectoryError)])
async def test_file_that_cannot_be_is_an_error(host: SshHost, tmp_path: Path, name: str, kind: type[OSError]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    async with reaching(host.target()) as transport:
        with pytest.raises(kind, match=f"writing {tmp_path / name} on"):
            await transport.put(b"x", str(tmp_path / name))
    assert not list((tmp_path / "folder").iterdir())


async def test_full_disk_is_an_error_that_says_so(host: SshHost, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "cat").write_text("#!/bin/sh\nhead -c 10\necho 'cat: write error: No space left on device' >&2\nexit 1\n")
    (tools / "cat").chmod(0o755)
    folder = tmp_path / "full"
    with SshHost(
        tmp_path / "host", address="127.0.0.4", client_key=host.key_path, path=f"{tools}:/usr/bin:/bin"
    ) as full:
        async with reaching(full.target()) as transport:
            with pytest.raises(OSError, match=r"No space left on device, writing .*full/file"):
                await transport.put(bytes(8 << 20), str(folder / "file"))
            assert (await transport.run(["ls", "-A", str(folder)], timeout_s=DEADLINE_S)).stdout == ""


# --- what travels through forwards --------------------------------------------------------------------------------


async def test_a_thousand_connections_arrive_whole(host: SshHost) -> None:
    chance = random.Random(5)
    payloads = [chance.randbytes(chance.choice((0, 1, 1000, 40_000))) for _ in range(1000)]
    async with echo_server() as port, reaching(host.target()) as transport:
        place = await transport.forward("127.0.0.1", port)
        threads = psutil.Process().num_threads()
        for start in range(0, len(payloads), 100):
            wave = payloads[start : start + 100]
            assert await asyncio.gather(*(echoed(place, data) for data in wave)) == wave
        assert psutil.Process().num_threads() <= threads + 6  # paramiko's, the loop's, and four that wait
        assert host.connections() == 1


async def test_bytes_arrive_whole_while_new_keys_are_agreed_on(host: SshHost, tmp_path: Path) -> None:
    payload = random.Random(6).randbytes(12 << 20)
    options = ["RekeyLimit 1M"]
    with SshHost(tmp_path / "host", address="127.0.0.4", client_key=host.key_path, sshd_options=options) as often:
        async with echo_server() as port, reaching(often.target()) as transport:
            place = await transport.forward("127.0.0.1", port)
            answers = await asyncio.gather(echoed(place, payload), echoed(place, payload[: 4 << 20]))
            assert [len(answer) for answer in answers] == [12 << 20, 4 << 20]
            assert answers[0] == payload


async def test_peer_that_does_not_read_holds_no_other_back(host: SshHost) -> None:
    async with (
        stuck_server() as stuck,
        flood_server() as flood,
        echo_server() as port,
        reaching(host.target()) as transport,
    ):
        _, deaf = await asyncio.open_connection(*await transport.forward("127.0.0.1", stuck))
        _, unread = await asyncio.open_connection(*await transport.forward("127.0.0.1", flood), limit=1)
        deaf.write(bytes(64 << 20))
        place = await transport.forward("127.0.0.1", port)

        assert await echoed(place, bytes(1 << 20)) == bytes(1 << 20)
        assert deaf.transport.get_write_buffer_size()
        deaf.transport.abort()
        unread.transport.abort()


async def test_peer_that_breaks_off_takes_nobody_with_it(host: SshHost) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.transport.abort()

    async def push(place: tuple[str, int]) -> None:
        _, writer = await asyncio.open_connection(*place)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()
        writer.transport.abort()

    async with await asyncio.start_server(break_off, "127.0.0.1", 0) as server, reaching(host.target()) as transport:
        place = await transport.forward("127.0.0.1", server.sockets[0].getsockname()[1])
        await transport.run(["true"], timeout_s=DEADLINE_S)
        running = asyncio.create_task(transport.run(["sleep", "60"], timeout_s=60))
        for _ in range(5):
            await asyncio.gather(*(push(place) for _ in range(20)))
        assert not running.done()
        assert host.connections() == 1
        running.cancel()


@asynccontextmanager
async def stuck_server() -> AsyncIterator[int]:
    """Never reads."""
    held: list[asyncio.StreamWriter] = []

    def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        held.append(writer)

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        for writer in held:
            writer.transport.abort()


@asynccontextmanager
async def flood_server() -> AsyncIterator[int]:
    """Sends without end."""

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), serving(writer):
            while True:
                writer.write(bytes(1 << 18))
                await writer.drain()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_each_end_is_passed_on_by_itself(host: SshHost) -> None:
    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = len(await reader.read())
        gc.collect()  # who waits for the answer is referred to by nobody else
        writer.write(str(count).encode())
        writer.close()

    async with await asyncio.start_server(answer_at_the_end, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with reaching(host.target()) as transport:
            assert await echoed(await transport.forward("127.0.0.1", port), bytes(3 << 20)) == b"3145728"


async def test_port_that_nobody_listens_on_resets_the_connection(host: SshHost, proxy: ChaosProxy) -> None:
    proxy.cut()
    async with reaching(host.target()) as transport:
        reader, writer = await asyncio.open_connection(*await transport.forward(*proxy.place))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
