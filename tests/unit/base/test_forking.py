"""Sockets and locks that forked children let go of."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from skyward.api.live_views import read_snapshot, serve_snapshots
from skyward.base.descriptors import keep_from_forks
from skyward.base.loop import acquire_loop
from skyward.events.snapshot import PoolSnapshot
from skyward.ledger.ownership import PoolFolder, is_in_use
from skyward.machine.ssh_config import SSHTarget
from skyward.machine.ssh_connection import SSHConnections
from skyward.machine.ssh_login import dial_command, dial_tcp


@contextmanager
def forked() -> Iterator[None]:
    """A child that does nothing and holds what it inherited, for as long as the block lasts."""
    over, end = os.pipe()
    begun, begin = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.write(begin, b"!")
        os.read(over, 1)
        os._exit(0)
    os.read(begun, 1)
    for descriptor in (over, begun, begin):
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_the_peer_sees_the_end_although_a_forked_child_lives() -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    keep_from_forks(ours)
    with theirs, forked():
        ours.close()
        assert theirs.recv(1) == b""


def test_the_parents_connection_goes_on() -> None:
    ours, theirs = socket.socketpair()
    keep_from_forks(ours)
    with ours, theirs, forked():
        ours.sendall(b"!")
        assert theirs.recv(1) == b"!"


def test_in_the_child_its_number_is_free_for_nobody_else() -> None:
    ours, theirs = socket.socketpair()
    keep_from_forks(ours)
    with ours, theirs:
        child = os.fork()
        if not child:
            os._exit(int(os.open(os.devnull, os.O_RDONLY) == ours.fileno()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def tcp(closing: ExitStack) -> tuple[Callable[[], object], socket.socket]:
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    dialled = asyncio.run(dial_tcp(*listener.getsockname()))
    peer, _ = listener.accept()
    return dialled.socket.close, closing.enter_context(peer)


def command(closing: ExitStack) -> tuple[Callable[[], object], socket.socket]:
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    host, port = listener.getsockname()
    dialled = dial_command(f"bash -c 'exec 3<>/dev/tcp/{host}/{port}; cat >&3'")
    if dialled.hang_up is not None:
        closing.callback(dialled.hang_up)
    peer, _ = listener.accept()
    return dialled.socket.close, closing.enter_context(peer)


@pytest.mark.parametrize("dial", [tcp, command])
def test_what_an_ssh_connection_runs_over_ends_with_the_parent(
    dial: Callable[[ExitStack], tuple[Callable[[], object], socket.socket]],
) -> None:
    with ExitStack() as closing:
        close, peer = dial(closing)
        peer.settimeout(10)
        with forked():
            close()
            assert peer.recv(1) == b""


def test_the_port_of_a_forward_closes_with_the_parent() -> None:
    link = SSHConnections().acquire((SSHTarget(host="127.0.0.1"),))
    address = link.listen("127.0.0.1", 22)
    with forked():
        link.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=10)


def test_the_folder_of_a_pool_is_free_although_a_forked_child_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder, closed = PoolFolder("sky-1"), PoolFolder("sky-2")
    closed.close()
    with forked():
        assert is_in_use(folder.path), "a child's end of it is not the parent's"
        folder.close()
        assert not is_in_use(folder.path)


def test_snapshots_are_refused_once_the_parent_has_ended(tmp_path: Path) -> None:
    async def take() -> PoolSnapshot:
        return PoolSnapshot(pool_id="sky-1", provider="local", taken_at=0.0, open_s=0.0)

    loop = acquire_loop()
    with ExitStack() as closing:
        closing.callback(loop.release)
        serving = closing.enter_context(ExitStack())
        served = tmp_path / "served"
        served.mkdir()
        serve_snapshots(served, loop, take, serving)
        assert read_snapshot(served).pool_id == "sky-1"
        os.link(served / "snapshot", tmp_path / "snapshot")  # its own name goes as the pool closes
        with forked():
            serving.close()
            with pytest.raises(ConnectionRefusedError):
                read_snapshot(tmp_path)
