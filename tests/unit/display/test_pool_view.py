"""The view of a pool: the same texts on terminals and in notebooks, harmless and bounded; and its updates."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from skyward.api.live_views import PoolOutput
from skyward.base.loop import LoopThread, acquire_loop
from skyward.display.tables import PoolView
from skyward.events import Metrics, Progress
from skyward.events.snapshot import NodeSnapshot, PoolSnapshot, WorkerSnapshot

LOAD = Metrics("i-1", 0, 50.0, 25.0, 6144.0, 24576.0, 93.0, 20480.0, 81920.0)
BUSY = WorkerSnapshot(worker=0, state="running", call="train#3", seconds=4.25, waiting=2)
SNAPSHOT = PoolSnapshot(
    pool_id="sky-1",
    provider="aws",
    taken_at=1e9,
    open_s=125.0,
    nodes=(
        NodeSnapshot(
            node=0,
            state="ready",
            price_per_hour=1.5,
            workers=(BUSY, WorkerSnapshot(worker=1, state="idle")),
            metrics=LOAD,
        ),
        NodeSnapshot(node=1, state="launching"),
    ),
    queued=5,
    running=1,
    done=4,
    failed=1,
    last_failure="train#2: ValueError: <b>\x1b[2J",
    works=(Progress("train", 4, 12, failed=1, running=2),),
    hourly_rate=1.5,
    cost=0.0521,
)


def drawn(view: PoolView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(view.rich())
    return [line.strip() for line in capture.get().splitlines() if line.strip()]


def test_a_terminal_shows_every_worker_and_what_it_runs() -> None:
    assert drawn(PoolView.of(SNAPSHOT), 120) == [
        "sky-1 · aws · open for 2 min 5 s · 2 nodes, 2 workers",
        "calls: 1 running · 5 queued · 4 done · 1 failed",
        "train 4/12 · 1 failed · 2 running",
        r"last failure: train#2: ValueError: <b>\x1b[2J",
        "$0.05 so far · $1.50/h",
        *drawn(PoolView.of(SNAPSHOT), 120)[5:7],
        "0               0        train#3   4.2 s   2        50 %   6.0/24.0 GiB   93 %   20.0/80.0 GiB   1.500",
        "1        idle",
        "1 (launching)",
    ]


def test_names_of_calls_are_harmless_in_both() -> None:
    busy = dataclasses.replace(BUSY, call="<i>\x1b[2J#0")
    view = PoolView.of(dataclasses.replace(SNAPSHOT, nodes=(NodeSnapshot(node=0, state="ready", workers=(busy,)),)))
    assert r"&lt;i&gt;\x1b[2J#0" in view.html()
    assert any(r"<i>\x1b[2J#0" in line for line in drawn(view, 120))


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_cuts_lines_and_wraps_none(width: int) -> None:
    lines = drawn(PoolView.of(SNAPSHOT), width)
    assert max(map(len, lines)) <= width
    assert len(lines) == len(drawn(PoolView.of(SNAPSHOT), 120))


def test_a_notebook_shows_the_same_escaped() -> None:
    html = PoolView.of(SNAPSHOT).html()
    assert all(text in html for text in ("train#3", "4.2 s", "train 4/12", "$1.50/h", "1 (launching)"))
    assert "&lt;b&gt;" in html
    assert "\x1b" not in html
    assert "<b>\\x1b" not in html
    assert not any(word in html for word in ("<script", "src=", "href=", "http"))


def test_columns_without_contents_are_left_out_and_rows_are_bounded() -> None:
    many = dataclasses.replace(
        SNAPSHOT,
        nodes=(NodeSnapshot(node=0, state="ready", workers=tuple(WorkerSnapshot(worker=n) for n in range(100))),),
    )
    view = PoolView.of(many)
    assert view.columns == ("node", "worker", "call")
    assert len(view.rows) == 40
    assert view.lines[-1] == "60 more workers are not shown"


class Handle:
    """Output of a notebook, as IPython would keep it."""

    def __init__(self) -> None:
        self.displayed = 0
        self.updates: list[str] = []
        self.changed = threading.Event()

    def display(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.displayed += 1

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.updates.append(data["text/html"])
        self.changed.set()


class HandClock:
    """Clock whose sleeps end when the test lets them."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self.awake = threading.Semaphore(0)
        self.asleep = threading.Semaphore(0)

    def monotonic(self) -> float:
        return 0.0

    def elapsed(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        import asyncio

        assert seconds >= 0.5
        self.asleep.release()
        await asyncio.to_thread(self.awake.acquire)

    def tick(self) -> None:
        self.awake.release()
        assert self.asleep.acquire(timeout=60)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = acquire_loop()
    yield loop
    loop.release()


def test_cells_share_an_output_that_is_redrawn_when_the_pool_has_changed(loop: LoopThread) -> None:
    present = [SNAPSHOT]

    async def take() -> PoolSnapshot:
        return present[0]

    handle, clock = Handle(), HandClock(loop)
    output = PoolOutput(loop, take, make_handle=lambda: handle, clock=clock)
    output.show()
    output.show()
    assert clock.asleep.acquire(timeout=60)
    assert (handle.displayed, handle.updates) == (2, [])
    clock.tick()
    assert handle.updates == [], "nothing has changed"
    present[0] = dataclasses.replace(SNAPSHOT, done=5, taken_at=SNAPSHOT.taken_at + 1, open_s=SNAPSHOT.open_s + 1)
    clock.tick()
    assert ["5 done" in html for html in handle.updates] == [True]
    output.close()
    output.close()
    assert ["closed after 2 min 6 s" in html for html in handle.updates] == [False, True]
    clock.awake.release()
