"""The thread that runs a worker's calls outlives every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from skyward.node.worker.call_runner import CallRunner, ReceivedCall
from skyward.node.worker.output import CallOutput
from skyward.wire.messages import Kind, Outcome, Payload
from skyward.wire.pickling import LARGE_BYTES, pack
from skyward.wire.session import Item

NO_ARGUMENTS = pack(((), {}), what="no arguments").data


class Outlet:
    """Keeps what is sent; runs ``fail`` for chunks. Closes its runner when nothing is left to do."""

    kept_bytes = 0

    def __init__(self, fail: Callable[[], None] = lambda: None) -> None:
        self.items: list[Item] = []
        self.fail = fail
        self.runner = CallRunner(self, CallOutput(lambda *_: None), (), [0])

    def push(self, item: Item, nbytes: int = 64, *, bulk: bool = False) -> None:
        del nbytes, bulk
        if item[0] == Kind.CHUNK:
            self.fail()
        self.items.append(item)

    def flush(self) -> None: ...

    def flush_soon(self) -> None: ...

    def wait(self, timeout_s: float | None, *, eager: bool = False) -> None:
        del timeout_s, eager
        self.runner.close()

    def wake(self) -> None: ...

    def run(self, *functions: Callable[[], Any]) -> None:
        for number, function in enumerate(functions, start=1):
            self.runner.functions.know(str(number), Payload(data=pack(function, what="it").data), "it")
            self.runner.add([ReceivedCall(number, self.runner.functions.get(str(number)), number, False, NO_ARGUMENTS)])
        self.runner.work()

    def error(self, call_id: int) -> Any:
        (wire,) = [item[2] for item in self.items if item[0] == Kind.RESULT and item[1] == call_id]
        return Outcome.from_wire(wire).error

    @property
    def succeeded(self) -> list[int]:
        return [call_id for item in self.items if item[0] == Kind.RESULTS for call_id in item[1]]


def large() -> bytes:
    return bytes(LARGE_BYTES)


def small() -> int:
    return 1


class DeadlyError(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(1)

    def __str__(self) -> str:
        raise SystemExit(2)


def deadly() -> None:
    raise DeadlyError


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError("no room"), SystemExit("no room")], ids=repr)
def test_a_result_that_cannot_be_sent_fails_its_call_only(error: BaseException) -> None:
    def fail() -> None:
        raise error

    outlet = Outlet(fail)
    outlet.run(large, small)
    type_name, message, *_ = outlet.error(1)
    assert type_name == f"builtins.{type(error).__name__}"
    assert message.endswith("no room")
    assert outlet.succeeded == [2]


def test_an_exception_that_exits_when_it_is_pickled_fails_its_call_only() -> None:
    outlet = Outlet()
    outlet.run(deadly, small)
    assert outlet.error(1)[0].endswith("DeadlyError")
    assert outlet.succeeded == [2]


def test_a_call_of_a_client_that_is_gone_answers_nobody() -> None:
    outlet = Outlet()
    outlet.fail = outlet.runner.reset  # a new client comes while a piece is sent
    outlet.run(large)
    assert [item[0] for item in outlet.items] == [Kind.CHUNK]
