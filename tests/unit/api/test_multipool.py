"""Several pools at once: opened and closed in parallel, each closed exactly once whatever happens."""

from __future__ import annotations

import os
import signal
import threading
from contextvars import ContextVar
from typing import Any, Self

import pytest

from skyward.api.multipool import MultiPool
from skyward.errors import PoolStateError

flavour: ContextVar[str] = ContextVar("flavour", default="plain")


class FakePool:
    """Opens, or fails to, when it may; remembers what was done to it."""

    def __init__(
        self,
        name: str = "pool",
        *,
        opens: threading.Event | None = None,
        closes: threading.Event | None = None,
        barrier: threading.Barrier | None = None,
        enter_error: BaseException | None = None,
        exit_error: BaseException | None = None,
    ) -> None:
        self.name = name
        self.opens = opens
        self.closes = closes
        self.barrier = barrier
        self.enter_error = enter_error
        self.exit_error = exit_error
        self.log: list[str] = []
        self.closed_with: BaseException | None = None
        self.opening = threading.Event()
        self.closing = threading.Event()
        self.closed = threading.Event()
        self.seen_flavours: list[str] = []

    def __enter__(self) -> Self:
        self.seen_flavours.append(flavour.get())
        self.token = flavour.set(self.name)
        if self.barrier is not None:
            self.barrier.wait(timeout=30)
        self.opening.set()
        if self.opens is not None:
            assert self.opens.wait(timeout=30)
        if self.enter_error is not None:
            raise self.enter_error
        self.log.append("open")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.closed_with = error
        self.seen_flavours.append(flavour.get())
        flavour.reset(self.token)
        self.closing.set()
        if self.closes is not None:
            assert self.closes.wait(timeout=30)
        self.log.append("close")
        if self.barrier is not None:
            self.barrier.wait(timeout=30)
        self.closed.set()
        if self.exit_error is not None:
            raise self.exit_error


def enter(*pools: FakePool) -> None:
    with MultiPool(*pools):
        pytest.fail("it opened")


def test_gives_the_pools_in_order_and_closes_each_once() -> None:
    pools = [FakePool(), FakePool(), FakePool()]
    with MultiPool(*pools) as opened:
        assert opened == tuple(pools)
        assert [pool.log for pool in pools] == [["open"]] * 3
    assert [pool.log for pool in pools] == [["open", "close"]] * 3


def test_of_nothing_gives_nothing() -> None:
    with MultiPool[FakePool]() as opened:
        assert opened == ()


def test_opens_and_closes_in_parallel() -> None:
    barrier = threading.Barrier(3)  # broken, and so an error, unless all three are there at the same time
    with MultiPool(*(FakePool(barrier=barrier) for _ in range(3))) as opened:
        assert len(opened) == 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_failure_closes_all_others_and_is_raised(failing: int) -> None:
    error = OSError("no capacity")
    pools = [FakePool(enter_error=error if index == failing else None) for index in range(3)]
    with pytest.raises(OSError, match="no capacity") as raised:
        enter(*pools)
    assert raised.value is error
    assert [pool.log for pool in pools] == [[] if index == failing else ["open", "close"] for index in range(3)]


def test_a_failure_closes_open_pools_before_slow_ones_are_open() -> None:
    slow = FakePool(opens=threading.Event())
    quick = FakePool()
    assert slow.opens is not None

    def let_slow_open_once_quick_is_closed() -> None:
        if quick.closed.wait(timeout=30):
            slow.opens.set()

    watcher = threading.Thread(target=let_slow_open_once_quick_is_closed)
    watcher.start()
    with pytest.raises(OSError, match="failed"):
        enter(slow, quick, FakePool(enter_error=OSError("failed")))
    watcher.join()
    assert slow.log == quick.log == ["open", "close"]


def test_several_failures_come_as_a_group() -> None:
    errors = [OSError("one"), ValueError("two")]
    good = FakePool()
    with pytest.raises(ExceptionGroup, match="several pools failed") as raised:
        enter(FakePool(enter_error=errors[0]), good, FakePool(enter_error=errors[1]))
    assert raised.value.exceptions == tuple(errors)
    assert good.log == ["open", "close"]


def test_an_error_while_cleaning_up_is_not_swallowed() -> None:
    errors = [OSError("no capacity"), RuntimeError("still there")]
    with pytest.raises(ExceptionGroup) as raised:
        enter(FakePool(enter_error=errors[0]), FakePool(exit_error=errors[1]))
    assert raised.value.exceptions == tuple(errors)


def test_a_pool_that_raises_an_interrupt_closes_the_others() -> None:
    good = FakePool()
    with pytest.raises(KeyboardInterrupt):
        enter(good, FakePool(enter_error=KeyboardInterrupt()))
    assert good.log == ["open", "close"]


def test_ctrl_c_while_opening_closes_every_pool() -> None:
    quick = FakePool()
    slow = FakePool(opens=threading.Event(), exit_error=OSError("still there"))
    assert slow.opens is not None

    def press() -> None:
        assert slow.opening.wait(timeout=30)
        for _ in range(6):  # Python may miss the one that comes as the main thread falls asleep
            os.kill(os.getpid(), signal.SIGINT)
            if quick.closed.wait(timeout=5):
                break
        slow.opens.set()

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt) as raised:
        enter(quick, slow)
    finger.join()
    assert quick.log == slow.log == ["open", "close"]
    assert raised.value.__cause__ is slow.exit_error


def test_a_second_ctrl_c_while_closing_is_heard_after_every_pool_is_closed() -> None:
    pools = [FakePool(closes=threading.Event()) for _ in range(2)]

    def press() -> None:
        for pool in pools:
            assert pool.closing.wait(timeout=30)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        for pool in pools:
            assert pool.closes is not None
            pool.closes.set()

    finger = threading.Thread(target=press)
    finger.start()
    with pytest.raises(KeyboardInterrupt), MultiPool(*pools):
        pass
    finger.join()
    assert [pool.log for pool in pools] == [["open", "close"]] * 2


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_every_pool_is_closed_whatever_the_others_raise(failing: int) -> None:
    pools = [FakePool(exit_error=OSError("stuck") if index == failing else None) for index in range(3)]
    with pytest.raises(OSError, match="stuck"), MultiPool(*pools):
        pass
    assert [pool.log for pool in pools] == [["open", "close"]] * 3


def test_pools_hear_of_the_error_in_the_block() -> None:
    pools = [FakePool(), FakePool()]
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"), MultiPool(*pools):
        raise error
    assert [pool.closed_with for pool in pools] == [error, error]


def test_an_error_while_closing_keeps_the_block_s_as_its_context() -> None:
    mine = ValueError("mine")
    with pytest.raises(OSError, match="stuck") as raised, MultiPool(FakePool(exit_error=OSError("stuck"))):
        raise mine
    assert raised.value.__context__ is mine


def test_pools_see_the_caller_s_context_and_keep_their_own() -> None:
    token = flavour.set("vanilla")
    pools = [FakePool("a"), FakePool("b")]
    with MultiPool(*pools):
        assert flavour.get() == "vanilla"
    flavour.reset(token)
    assert [pool.seen_flavours for pool in pools] == [["vanilla", "a"], ["vanilla", "b"]]


def test_is_not_opened_twice_at_a_time() -> None:
    multi = MultiPool(FakePool())
    with multi, pytest.raises(PoolStateError, match="this MultiPool is already open"):
        multi.__enter__()


@pytest.mark.parametrize("first", [None, OSError("no capacity")])
def test_can_be_opened_again_once_it_is_closed(first: Any) -> None:
    pool = FakePool(enter_error=first)
    multi = MultiPool(pool)
    if first is None:
        with multi:
            pass
    else:
        with pytest.raises(OSError, match="no capacity"):
            multi.__enter__()
    pool.enter_error = None
    with multi as opened:
        assert opened == (pool,)
