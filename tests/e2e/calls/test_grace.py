"""A call that is about to end learns of it in time to save its work: of its timeout, and of its pool's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet", collect_metrics=False) as pool:
        yield pool


@sky.compute(timeout=60, grace=57)
def train(saved: Path, how: str) -> tuple[str, int]:
    step = 0
    try:
        while True:
            step += 1
            time.sleep(0.01)
    except sky.TimeLimit:
        end = sky.notice()
        assert end is not None
        assert end.kind == "call_timeout"
        if how == "returns":
            return "saved", step
        raise
    finally:
        saved.write_text(str(step))


@sky.compute(retry=(Exception,), timeout=60, grace=57)
def fail_at_its_limit(count: Path) -> None:
    with count.open("a") as file:
        file.write("x")
    threading.Event().wait(60)


@sky.compute
def wait_for_notice(saved: Path, begun: Path) -> str:
    told = threading.Event()

    @sky.on_notice
    def save(end: sky.EndNotice) -> None:
        saved.write_text(f"{end.kind} {end.seconds_left > 0}")
        told.set()

    begun.touch()
    assert told.wait(WITHIN_S)
    return saved.read_text()


def test_a_call_may_return_what_it_has_before_its_timeout(pool: sky.ComputePool, tmp_path: Path) -> None:
    word, step = train(tmp_path / "saved", "returns") >> pool
    assert word == "saved"
    assert step > 1
    assert int((tmp_path / "saved").read_text()) == step


def test_a_call_that_lets_its_time_limit_pass_fails_and_its_worker_lives(pool: sky.ComputePool, tmp_path: Path) -> None:
    with pytest.raises(sky.CallTimeoutError, match=r"train stopped before its timeout of 60 s on node 0") as caught:
        train(tmp_path / "saved", "raises") >> pool
    assert "57 s are left of the call's timeout of 60 s" in str(caught.value.__cause__)
    assert (caught.value.timeout_s, caught.value.node, caught.value.worker) == (60, 0, 0)
    assert (tmp_path / "saved").exists(), "its finally block has run"


def test_a_time_limit_is_no_error_after_which_a_call_is_repeated(pool: sky.ComputePool, tmp_path: Path) -> None:
    with pytest.raises(sky.CallTimeoutError):
        fail_at_its_limit(tmp_path / "count") >> pool
    assert (tmp_path / "count").read_text() == "x"


def test_a_time_limit_does_not_reach_the_pickling_of_the_result(pool: sky.ComputePool, tmp_path: Path) -> None:
    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            with (tmp_path / "pickled").open("a") as file:
                file.write("x")
            until = time.monotonic() + 1
            while time.monotonic() < until:
                pass
            return int, (7,)

    assert sky.compute(timeout=60, grace=59.5)(Slow)() >> pool == 7
    assert (tmp_path / "pickled").read_text() == "x"


@pytest.mark.parametrize("grace", [60, 61])
def test_a_grace_is_a_part_of_the_timeout(grace: float) -> None:
    with pytest.raises(sky.ConfigurationError, match=rf"less than the timeout, which is 60 s, got {grace}"):
        sky.compute(timeout=60, grace=grace)
    with pytest.raises(sky.ConfigurationError, match="which is None"):
        sky.compute(grace=grace)
    with pytest.raises(sky.ConfigurationError, match="less than the timeout, which is 5 s"):
        train(Path(), "").options(timeout=5)


def test_a_handler_saves_the_work_of_a_call_whose_pool_is_closed(tmp_path: Path) -> None:
    with sky.ComputePool(provider=sky.Local(), display="quiet", collect_metrics=False) as pool:
        future = pool.submit(wait_for_notice, tmp_path / "saved", tmp_path / "begun")
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
    with pytest.raises(sky.PoolStateError):
        future.result()
    assert (tmp_path / "saved").read_text() == "down True"
