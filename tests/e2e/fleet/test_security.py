"""Whoever is not of a pool gets no answer from it, and finds none of its secrets."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import cloudpickle
import msgpack
import numpy as np
import platformdirs
import psutil
import pytest

import skyward as sky
from skyward.fleet.fleet import Fleet
from skyward.providers.local import INSTANCE_VARIABLE
from skyward.scheduling.certificates import issue
from skyward.wire.control import Ping, to_frame
from skyward.wire.frames import TlsIdentity, client_context
from skyward_dask.security import PoolSecurity

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NODES, CONCURRENCY = 2, 2
SECRET = "hunter2-" + os.urandom(8).hex()
PATIENCE_S = 10.0
TLS_ALERT = 0x15

HANDSHAKE = {"compression": None, "python": tuple(sys.version_info)[:3], "pickle-protocol": 5}


def dask_message(content: object) -> bytes:
    """One message as ``distributed.comm.tcp`` frames it: its length, number and lengths of its frames, the frames."""
    frame = msgpack.packb(content)
    body = struct.pack("<QQ", 1, len(frame)) + frame
    return struct.pack("<Q", len(body)) + body


def control_message() -> bytes:
    return frame(to_frame(Ping(n=1)))


def blob_request() -> bytes:
    return frame({"blob": "none"})


def lane_greeting() -> bytes:
    return frame(["a session", 0, False])


def frame(message: object) -> bytes:
    body = msgpack.packb(message)
    return struct.pack("!I", len(body)) + body


PAYLOADS = {
    "nothing": b"",
    "an HTTP request": b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "Dask's handshake and a question": dask_message(HANDSHAKE) + dask_message({"op": "identity", "reply": True}),
    "a ping of the control connection": control_message(),
    "a lane's greeting": lane_greeting(),
    "noise": bytes(range(256)) * 64,
}


@dataclass(frozen=True, kw_only=True)
class Port:
    kind: str
    place: tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Answer:
    data: bytes
    ended: bool


@pytest.fixture(scope="module")
def own_sockets() -> set[tuple[object, ...]]:
    """What this process had bound before it opened a pool."""
    return set(bound_sockets(psutil.Process()))


@pytest.fixture(scope="module")
def pool(own_sockets: set[tuple[object, ...]]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(
        provider=sky.Local(), nodes=NODES, concurrency=CONCURRENCY, display="quiet", env={"TOKEN": SECRET}
    ) as pool:
        assert pool.scheduler.address  # from now on Dask listens, too
        yield pool


def fleet_of(pool: sky.ComputePool) -> Fleet:
    assert pool._running is not None
    return pool._running.fleet


@pytest.fixture(scope="module")
def identity(pool: sky.ComputePool) -> TlsIdentity:
    return fleet_of(pool)._setup._tls


@pytest.fixture(scope="module")
def ports(pool: sky.ComputePool) -> list[Port]:
    found = []
    for process in pool_processes(pool):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                place = connection.laddr
                found.append(Port(kind=kind_of(pool, process, place.port), place=(place.ip, place.port)))
    return sorted(found, key=lambda port: port.kind)


def instance_ids(pool: sky.ComputePool) -> list[str]:
    @sky.compute
    def which() -> str:
        return os.environ["SKYWARD_INSTANCE"]

    return sorted(set(which() @ pool))


def pool_processes(pool: sky.ComputePool) -> list[psutil.Process]:
    """All that carry an instance's id; the supervisor carries it as well."""
    ids = instance_ids(pool)
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(INSTANCE_VARIABLE) in ids and process.pid != os.getpid():
                found.append(process)
    return found


def kind_of(pool: sky.ComputePool, process: psutil.Process, port: int) -> str:
    ready = [node.ready for node in fleet_of(pool).nodes]
    if any(place.control.endswith(f":{port}") and place.pid == process.pid for place in ready):
        return "control"
    if any(place.blobs.endswith(f":{port}") and place.pid == process.pid for place in ready):
        return "blobs"
    if any(place.service.endswith(f":{port}") for place in ready):
        return "scheduler"
    if any(lane.endswith(f":{port}") for place in ready for lane in place.lanes):
        return "lane"
    if any(guest.endswith(f":{port}") for place in ready for guest in place.guests):
        return "worker"
    # What Dask takes for the worker's nanny: the third port of a worker.
    return "nanny" if process.name() == "sky-worker" else f"unknown: {process.name()} {process.cmdline()}"


def bound_sockets(process: psutil.Process) -> Iterator[tuple[object, ...]]:
    """Sockets that a stranger could send to: listening TCP, and UDP that is not tied to one peer."""
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and not connection.raddr):
            yield (connection.type, *connection.laddr)


async def hear(place: tuple[str, int], payload: bytes, context: ssl.SSLContext | None, patience_s: float) -> Answer:
    """All that comes back within the time, and whether the other side hung up."""
    heard = bytearray()
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(*place, ssl=context)
            try:
                writer.write(payload)
                while data := await reader.read(65536):
                    heard += data
            finally:
                writer.transport.abort()
    except OSError:  # refused, reset, or the TLS library's verdict
        return Answer(data=bytes(heard), ended=True)
    except TimeoutError:
        return Answer(data=bytes(heard), ended=False)
    return Answer(data=bytes(heard), ended=True)


def without_alerts(data: bytes) -> bytes:
    """What is left without TLS alerts, by which the library says that it did not understand."""
    while len(data) >= 5 and data[0] == TLS_ALERT:
        data = data[5 + int.from_bytes(data[3:5]) :]
    return data


def strangers(identity: TlsIdentity) -> dict[str, ssl.SSLContext]:
    """Peers that speak TLS. None of them minds who answers: it is the pool that has to mind."""
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    other = client_context(issue())
    posing = client_context(replace(issue(), ca=identity.ca))
    for context in (nobody, other):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return {"no certificate": nobody, "another pool's certificate": other, "another pool's, knowing this one's": posing}


def test_exactly_the_expected_ports_are_open_and_on_loopback(pool: sky.ComputePool, ports: list[Port]) -> None:
    workers = NODES * CONCURRENCY
    kinds = [port.kind for port in ports]
    each_worker = [kind for kind in ("lane", "nanny", "worker") for _ in range(workers)]
    assert kinds == sorted(["control", "blobs"] * NODES + ["scheduler"] + each_worker)
    assert all(port.place[0].startswith("127.") for port in ports)


def test_the_client_opens_no_port(pool: sky.ComputePool, own_sockets: set[tuple[object, ...]]) -> None:
    assert set(bound_sockets(psutil.Process())) == own_sockets


def test_no_process_of_the_pool_listens_to_datagrams(pool: sky.ComputePool) -> None:
    bound = [place for process in pool_processes(pool) for place in bound_sockets(process)]
    assert [place for place in bound if place[0] == socket.SOCK_DGRAM] == []


def test_no_socket_has_a_name(pool: sky.ComputePool) -> None:
    """One with an abstract name would take orders from every user of the machine."""
    sockets = [socket for process in pool_processes(pool) for socket in process.net_connections("unix")]
    assert sockets
    assert [socket.laddr for socket in sockets if socket.laddr] == []


async def test_a_peer_with_the_pools_certificate_is_answered_by_every_port(
    ports: list[Port], identity: TlsIdentity
) -> None:
    context = client_context(identity)
    dask = PAYLOADS["Dask's handshake and a question"]
    said = [
        {"control": control_message(), "blobs": blob_request(), "lane": lane_greeting()}.get(port.kind, dask)
        for port in ports
    ]
    answers = await asyncio.gather(
        *(hear(port.place, words, context, 2.0) for port, words in zip(ports, said, strict=True))
    )
    assert [port for port, answer in zip(ports, answers, strict=True) if not answer.data] == []


@pytest.mark.parametrize("words", [words for words in PAYLOADS if words != "nothing"])
async def test_a_peer_in_plain_text_is_hung_up_on_unanswered(ports: list[Port], words: str) -> None:
    answers = await asyncio.gather(*(hear(port.place, PAYLOADS[words], None, PATIENCE_S) for port in ports))
    for port, answer in zip(ports, answers, strict=True):
        assert without_alerts(answer.data) == b"", port
        assert answer.ended, port


async def test_a_silent_peer_hears_nothing(ports: list[Port]) -> None:
    answers = await asyncio.gather(*(hear(port.place, b"", None, 1.0) for port in ports))
    assert [answer.data for answer in answers] == [b""] * len(ports)


@pytest.mark.parametrize("words", PAYLOADS)
@pytest.mark.parametrize("who", ["no certificate", "another pool's certificate", "another pool's, knowing this one's"])
async def test_a_peer_with_the_wrong_certificate_is_hung_up_on_unanswered(
    ports: list[Port], identity: TlsIdentity, who: str, words: str
) -> None:
    context = strangers(identity)[who]
    answers = await asyncio.gather(*(hear(port.place, PAYLOADS[words], context, PATIENCE_S) for port in ports))
    for port, answer in zip(ports, answers, strict=True):
        assert answer == Answer(data=b"", ended=True), port


async def test_the_right_certificate_is_of_no_use_over_older_tls(ports: list[Port], identity: TlsIdentity) -> None:
    context = client_context(identity)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    words = PAYLOADS["Dask's handshake and a question"]
    answers = await asyncio.gather(*(hear(port.place, words, context, PATIENCE_S) for port in ports))
    assert answers == [Answer(data=b"", ended=True)] * len(ports)


def test_a_node_of_another_pool_is_refused(ports: list[Port]) -> None:
    """The other direction: who dials a port that shows another certificate hangs up before it says anything."""
    for port in ports:
        with socket.create_connection(port.place, timeout=PATIENCE_S) as plain, pytest.raises(ssl.SSLError):
            client_context(issue()).wrap_socket(plain)


async def test_the_pool_works_on_after_strangers_knocked(pool: sky.ComputePool, ports: list[Port]) -> None:
    await asyncio.gather(*(hear(port.place, b"GET / HTTP/1.0\r\n\r\n", None, PATIENCE_S) for port in ports * 20))
    assert [future.result() for future in [pool.submit(abs, -n) for n in range(20)]] == list(range(20))


# --- secrets ----------------------------------------------------------------------------------------------------------


def node_folders(pool: sky.ComputePool) -> list[Path]:
    return [Path(folder) for node in fleet_of(pool).nodes for folder in (node.access.workdir, node.ready.blob_dir)]


def files_below(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield path


def needles(identity: TlsIdentity) -> list[bytes]:
    """The environment's secret, and a line of the private key, in whatever form the key is written."""
    line = identity.key.splitlines()[1]
    return [SECRET.encode(), line.encode()]


def test_the_secret_is_where_it_belongs(pool: sky.ComputePool) -> None:
    @sky.compute
    def token() -> str:
        return os.environ["TOKEN"]

    assert set(token() @ pool) == {SECRET}


def test_folders_of_a_node_are_its_owners_only(pool: sky.ComputePool) -> None:
    sky.compute(np.sum)(np.ones(1_000_000)) >> pool  # a blob
    folders = node_folders(pool)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    private = [path for path in files_below(*folders) if path.suffix == ".log" or path.parent in folders[1::2]]
    assert len(private) >= NODES * (1 + CONCURRENCY) + 1
    assert {path: mode for path in private if (mode := stat.S_IMODE(path.stat().st_mode)) != 0o600} == {}


def test_no_file_holds_a_secret_while_the_pool_runs(
    pool: sky.ComputePool, identity: TlsIdentity, own_home: Path
) -> None:
    blobs = node_folders(pool)[1::2]
    read = [path for path in files_below(own_home, *blobs) if path.exists()]
    assert any(path.name == "supervisor.log" for path in read)
    assert not any(path.name == "node.json" for path in read)
    assert [path for path in read for secret in needles(identity) if secret in path.read_bytes()] == []


def test_no_command_line_shows_a_secret(pool: sky.ComputePool, identity: TlsIdentity) -> None:
    command_lines = [" ".join(process.cmdline()) for process in [psutil.Process(), *pool_processes(pool)]]
    assert len(command_lines) > NODES * (2 + CONCURRENCY)
    assert [line for line in command_lines for secret in needles(identity) if secret.decode() in line] == []


def test_the_key_is_in_no_environment(pool: sky.ComputePool, identity: TlsIdentity) -> None:
    line = identity.key.splitlines()[1]
    assert [process for process in pool_processes(pool) if line in str(process.environ())] == []


def test_no_repr_shows_a_secret(pool: sky.ComputePool, identity: TlsIdentity) -> None:
    shown = repr(
        [
            pool,
            pool._request,
            sky.Image(env={"TOKEN": SECRET}),
            identity,
            PoolSecurity(identity),
            client_context(identity),
            vars(pool._running),
        ]
    )
    assert "TOKEN" in shown
    assert SECRET not in shown
    assert identity.key.splitlines()[1] not in shown


def test_logs_that_stay_hold_no_secret() -> None:
    """Of a pool whose worker died and whose call failed, since that is when most is written down."""
    with sky.ComputePool(provider=sky.Local(), display="quiet", env={"TOKEN": SECRET}) as pool:
        secrets = needles(fleet_of(pool)._setup._tls)
        pool_id = fleet_of(pool)._pool_id
        with pytest.raises(KeyError):
            pool.submit({}.__getitem__, "missing").result()
        killed = pool.submit(os.getpid).result()
        psutil.Process(killed).kill()
        assert pool.submit(os.getpid).result() != killed
    logs = list(files_below(platformdirs.user_state_path("skyward") / "local" / pool_id))
    assert {path.name for path in logs} == {"supervisor.log", "worker-0.log"}
    assert [path for path in logs for secret in secrets if secret in path.read_bytes()] == []
