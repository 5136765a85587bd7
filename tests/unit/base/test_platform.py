"""What only some systems have, on Linux; tests/e2e/laptops has the substitutes, and as_on_windows.py lacks it all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from skyward.base import platform


@pytest.fixture(scope="module")
def ended() -> int:
    """Number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_end_of_any_process_is_awaited(ended: int) -> None:
    assert platform.wait_for_end(ended, within_s=60)
    assert not platform.wait_for_end(os.getpid(), within_s=0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert not platform.wait_for_end(process.pid, within_s=0)
        process.kill()
        assert platform.wait_for_end(process.pid, within_s=60)


def test_a_process_is_known_by_the_time_of_its_start(ended: int) -> None:
    started = platform.start_ticks(os.getpid())

    assert started == platform.start_ticks(os.getpid())
    assert started is not None
    assert int(started) >= int(platform.start_ticks(os.getppid()) or 0) > 0
    with pytest.raises(ProcessLookupError, match=str(ended)):
        platform.start_ticks(ended)


def test_ports_of_outgoing_connections_are_those_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        first, last = platform.ephemeral_ports()
        assert first <= client.getsockname()[1] <= last < 65_536
    assert Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split() == [str(first), str(last)]


@pytest.mark.parametrize("depth", [1, 120])
def test_a_socket_lies_in_its_folder_however_deep_that_is(tmp_path: Path, depth: int) -> None:
    (folder := tmp_path / ("d" * depth)).mkdir()
    before = set(platform.open_descriptors())
    with socket.socket(socket.AF_UNIX) as server, platform.socket_path(folder, "name") as address:
        server.bind(address)
    assert (folder / "name").is_socket()
    assert set(platform.open_descriptors()) <= before


def test_a_text_is_read_from_its_path_and_leaves_no_descriptor() -> None:
    before = set(platform.open_descriptors())
    with platform.readable_path("key") as path:
        assert Path(path).read_text() == "key"
        child = subprocess.run([sys.executable, "-c", f"open({path!r})"], capture_output=True, check=False)
        assert child.returncode, "a child inherits no key"
    assert set(platform.open_descriptors()) <= before


def test_the_client_needs_no_more_of_python_than_windows_has_and_refuses_nodes_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("as_on_windows.py")],
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    modules, _, refusal = done.stdout.partition(" ")
    assert done.returncode == 0, done.stderr
    assert int(modules) > 150
    assert "Local() runs nodes on Linux and macOS" in refusal


def test_a_locked_file_is_not_locked_a_second_time(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("wb") as first, (tmp_path / "lock").open("wb") as second:
        assert platform.try_lock(first.fileno())
        assert not platform.try_lock(second.fileno())
        first.close()
        assert platform.try_lock(second.fileno())


_FREED = """
import psutil
from skyward.base import platform
platform.keep_freed_memory(16 << 20)
resident = lambda: psutil.Process().memory_info().rss >> 20
before = resident()
block = bytearray(12 << 20)
del block
kept = resident() - before
platform.return_freed_memory()
print(kept, resident() - before)
"""


@pytest.mark.skipif("not sys.platform.startswith('linux')", reason="a C library that keeps memory by its own rules")
def test_freed_memory_is_kept_until_it_is_returned() -> None:
    output = subprocess.run([sys.executable, "-c", _FREED], check=True, capture_output=True, text=True, timeout=60)
    kept, left = map(int, output.stdout.split())
    assert kept >= 11
    assert left <= 2
