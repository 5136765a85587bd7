"""``skyward top``: the state of open pools, from their clients' sockets, and the ledger's facts where none answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, chdir
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from skyward.api.live_views import read_snapshot, serve_snapshots
from skyward.base.loop import LoopThread, acquire_loop
from skyward.cli import main
from skyward.events.snapshot import NodeSnapshot, PoolSnapshot, WorkerSnapshot
from skyward.ledger.fleet_record import new_pool_id
from skyward.ledger.ledger import Ledger, Purchase
from skyward.ledger.ownership import PoolFolder

BUSY = WorkerSnapshot(worker=0, state="running", call="train#3", seconds=4.25)
SNAPSHOT = PoolSnapshot(
    pool_id="sky-1",
    provider="local",
    taken_at=1e9,
    open_s=12.0,
    nodes=(NodeSnapshot(node=0, state="ready", workers=(BUSY,)),),
    running=1,
    cost=3.2,
    cost_by_provider={"aws": 1.2, "verda": 2.0},
)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = acquire_loop()
    yield loop
    loop.release()


async def take() -> PoolSnapshot:
    return SNAPSHOT


@pytest.fixture
def pool(loop: LoopThread) -> Iterator[PoolFolder]:
    """A folder of an open pool whose client answers."""
    with ExitStack() as closing:
        folder = PoolFolder("sky-1")
        closing.callback(folder.close)
        serve_snapshots(folder.path, loop, take, closing)
        yield folder


def top(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["top", *arguments])


@pytest.mark.parametrize("arguments", [(), ("sky",), ("sky-1", "--once")])
def test_an_open_pool_shows_what_it_runs(pool: PoolFolder, arguments: tuple[str, ...]) -> None:
    shown = top(*arguments)
    assert shown.exit_code == 0
    assert "sky-1 · local · open for 12 s · 1 node, 1 worker" in shown.output
    assert "train#3   4.2 s" in shown.output
    assert "$3.20 (aws $1.20, verda $2.00) so far" in shown.output


def test_the_same_as_json(pool: PoolFolder) -> None:
    (document,) = json.loads(top("--json").output)["pools"]
    assert PoolSnapshot.from_dict(document) == SNAPSHOT


def test_without_open_pools_it_says_so() -> None:
    assert top().output == "No pools are open here; `skyward ls` lists machines.\n"


def test_of_a_dead_client_the_ledger_is_shown(tmp_path: Path) -> None:
    PoolFolder("sky-2").close()
    ledger = Ledger(tmp_path / "state" / "skyward" / "ledger.db")
    ledger.reserve({"key": 0}, Purchase(pool_id="sky-2", provider="local", price_per_hour=0.0))
    shown = top("sky-2")
    assert shown.exit_code == 1
    assert "sky-2: it is closed, or its client has ended; 1 machine may still run, $0.00 so far" in shown.output
    assert "`skyward down sky-2` ends them" in shown.output
    assert "error" in json.loads(top("sky-2", "--json").output)["pools"][0]


@pytest.mark.parametrize("command", ["top", "logs"])
def test_a_kept_fleet_is_named_by_its_own_name(command: str) -> None:
    for pool_id in (new_pool_id("other"), latest := new_pool_id("llm")):
        PoolFolder(pool_id).close()

    shown = CliRunner().invoke(main, [command, "llm"])
    assert shown.exit_code == (0 if command == "logs" else 1)
    assert latest in CliRunner().invoke(main, [command, "llm", "--json"]).output


def test_an_unknown_pool_is_wrong_usage() -> None:
    shown = top("sky-3")
    assert shown.exit_code == 2
    assert "no pool sky-3" in shown.output


def test_a_folder_too_deep_for_the_address_of_a_socket_is_served_too(loop: LoopThread, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with ExitStack() as closing:
        serve_snapshots(deep, loop, take, closing)
        assert read_snapshot(deep) == SNAPSHOT
    assert list(deep.iterdir()) == []
    with pytest.raises(OSError, match="No such file"):
        read_snapshot(deep)


def test_a_folder_that_takes_no_socket_is_no_failure(loop: LoopThread, tmp_path: Path) -> None:
    with ExitStack() as closing:
        serve_snapshots(tmp_path / "absent", loop, take, closing)


def test_an_answer_that_is_cut_off_is_that_of_a_client_that_ends() -> None:
    folder = PoolFolder("sky-1")
    with socket.socket(socket.AF_UNIX) as listening, ExitStack() as closing:
        closing.callback(folder.close)
        closing.enter_context(chdir(folder.path))  # the address of a socket is short
        listening.bind("snapshot")
        listening.listen()

        def hang_up() -> None:
            listening.accept()[0].close()

        answering = threading.Thread(target=hang_up)
        answering.start()
        assert "sky-1: its client does not answer; " in top("sky-1").output
        answering.join()
