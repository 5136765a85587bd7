"""Containers of fake vendors: their namespaces, their environment, their port, and their end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.clouds.container_room import Container, ContainerOrders, ContainerRoom
from support.clouds.rest_service import RestAnswer, RestService
from support.eventually import eventually
from support.ssh_islands import require_namespaces

pytestmark = pytest.mark.usefixtures("namespaces")

PORT = 2222
MAIN = f"""sh -c 'tr "\\0" "\\n" </proc/1/environ >/root/environ; echo "$PACKED" >>/var/lib/starts; cd /root
exec /usr/bin/python3 -m http.server {PORT} --bind 127.0.0.1'"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    require_namespaces()


@pytest.fixture(scope="module")
def api() -> Iterator[RestService]:
    with RestService("api", errors=lambda status, message: RestAnswer(status=status, body=message)) as service:
        service.route("GET /hello", lambda call: RestAnswer(body={"hello": "container"}))
        yield service


@pytest.fixture
def room(api: RestService, tmp_path: Path) -> Iterator[ContainerRoom]:
    with ContainerRoom(tmp_path / "containers", api=lambda: api.url, block=84) as room:
        yield room


def started(room: ContainerRoom, name: str = "one", *, args: str = MAIN) -> Container:
    room.add(name, ContainerOrders(args=args, env={"PACKED": "a 'quoted' value"}, port=PORT))
    return room.machine(name)


def fetch(container: Container, path: str) -> str:
    for attempt in eventually(20, (AssertionError, OSError)):
        with (
            attempt,
            urllib.request.urlopen(f"http://{container.address}:{container.port}{path}", timeout=10) as answer,
        ):
            return str(answer.read().decode())
    raise AssertionError


def test_a_container_has_exactly_its_environment_and_folders_of_its_own(room: ContainerRoom) -> None:
    container = started(room)
    variables = dict(line.split("=", 1) for line in fetch(container, "/environ").splitlines())

    assert variables == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "PACKED": "a 'quoted' value",
    }
    assert (container.own_root / "var/lib/starts").read_text(encoding="utf-8") == "a 'quoted' value\n"
    assert not Path("/root/environ").exists()


def test_a_container_reaches_the_vendors_api_and_nothing_else(room: ContainerRoom, api: RestService) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        container = started(
            room,
            args=f"sh -c 'curl -sS {api.url}/hello; curl -sS http://127.0.0.1:{port}/; curl -sS http://192.0.2.1/;"
            "exec sleep 1000'",
        )
        for attempt in eventually(20, (AssertionError, OSError)):
            with attempt:
                assert '{"hello": "container"}' in container.log
                assert container.log.count("curl: (7)") == 2, container.log


def test_a_restarted_container_keeps_its_files_and_gets_another_port(room: ContainerRoom) -> None:
    container = started(room)
    fetch(container, "/environ")
    port = container.port
    room.restart("one")
    room.settle()
    fetch(container, "/environ")

    assert container.port != port
    assert (container.own_root / "var/lib/starts").read_text(encoding="utf-8").count("\n") == 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((container.address, port), 5)


def test_a_moved_port_leads_to_the_same_processes(room: ContainerRoom) -> None:
    container = started(room)
    fetch(container, "/environ")
    before, port = container.processes(), container.port
    container.move_port()
    fetch(container, "/environ")

    assert container.processes() == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((container.address, port), 5)


def test_a_main_process_that_ends_is_reported_and_a_deleted_container_is_not(room: ContainerRoom) -> None:
    ended: list[str] = []
    orders = ContainerOrders(args="sh -c 'echo over'", env={}, port=PORT)
    room.add("short", orders, powered_off=lambda: ended.append("short"))
    room.add("long", ContainerOrders(args="sleep 1000", env={}, port=PORT), powered_off=lambda: ended.append("long"))
    for attempt in eventually(20, (AssertionError, OSError)):
        with attempt:
            assert ended == ["short"]
            assert room.booted("long")
    room.end("long")
    room.settle()

    assert ended == ["short"]
    assert list(room.failures()) == ["over\n"]


def test_the_clock_of_a_container_can_be_set_forward(room: ContainerRoom) -> None:
    script = "sh -c 'while :; do date +%s >/root/date; sleep 0.05; done'"
    container = started(room, args=script)
    date, first = container.own_root / "root/date", 0
    for attempt in eventually(20, (AssertionError, OSError)):
        with attempt:
            first = int(date.read_text(encoding="utf-8") or 0)  # the script empties it before each time
            assert first
    room.elapse()
    for attempt in eventually(20, (AssertionError, OSError)):
        with attempt:
            assert int(date.read_text(encoding="utf-8") or 0) > first + 1_000_000


KILLED = """
import json, os, signal, sys
from pathlib import Path
import psutil
from support.clouds.container_room import ContainerOrders, ContainerRoom

with ContainerRoom(Path(sys.argv[1]), api=lambda: "http://127.0.0.1:9", block=84) as room:
    room.add("one", ContainerOrders(args="sh -c 'setsid sleep 1000 & exec sleep 1000'", env={}, port=1))
    while len(room.machine("one").processes()) < 2:
        pass
    print(json.dumps([each.pid for each in psutil.Process().children(recursive=True)]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_everything_in_a_container_ends_with_a_killed_test(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "containers"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = json.loads(done.stdout)
    assert len(pids) >= 6  # guard, two relays, unshare, and two inside
    for attempt in eventually(20, (AssertionError, OSError)):
        with attempt:
            assert [pid for pid in pids if psutil.pid_exists(pid)] == []
