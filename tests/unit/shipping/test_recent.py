"""What is kept of functions is bounded by bytes, on both sides; the least recently used goes first."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyward.node.worker.call_runner import SentFunction
from skyward.scheduling.calls import LiveCall
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.scheduling.worker_link import WorkerLink
from skyward.shipping.blobs import Blob, NodeBlobs
from skyward.shipping.function_cache import PackedFunction, Recent
from skyward.wire.messages import ForgetFunctions, Payload, RunCalls, SetLevels, StoreFunction, ToWorker

MIB = 1 << 20


def test_the_least_recently_used_go_when_there_are_too_many_bytes() -> None:
    recent: Recent[str, int] = Recent(10)
    assert recent.put("a", 1, 4) == recent.put("b", 2, 4) == []
    assert recent.get("a") == 1
    assert recent.put("c", 3, 4) == ["b"]
    assert recent.get("b") is None
    assert recent.put("a", 4, 8) == ["c"]
    assert recent.put("huge", 5, 100) == ["a"]
    assert recent.get("huge") == 5, "the newest stays"
    recent.clear()
    assert recent.put("d", 6, 10) == []


class FarSide(WorkerLink):
    """Link whose worker takes what is pushed, and keeps functions as workers do."""

    def __init__(self) -> None:
        node: Any = None
        owner: Any = SimpleNamespace(lane_items=print)
        tls: Any = None
        super().__init__(WorkerId(0, 0), "", tls, owner, node)
        self.known: dict[str, SentFunction] = {}
        self.bytes: dict[str, int] = {}
        self.most = self.sent = 0

    def push(self, item: ToWorker) -> None:
        match item:
            case StoreFunction():
                self.known[item.function_id] = SentFunction(item.label, item.payload)
                self.bytes[item.function_id] = item.nbytes
                self.sent += 1
            case ForgetFunctions():
                for function_id in item.function_ids:
                    del self.bytes[function_id], self.known[function_id]
            case RunCalls():
                assert self.known[item.function_id].label == item.function_id, "a call came before its function"
            case SetLevels():  # of this process's logging, which other tests' imports have set
                pass
            case _:
                pytest.fail(f"unexpected {item}")
        self.most = max(self.most, sum(self.bytes.values()))


def function(name: str, nbytes: int) -> PackedFunction:
    return PackedFunction(id=name, label=name, payload=Payload(data=bytes(nbytes)))


def call(number: int, of: PackedFunction) -> LiveCall:
    return LiveCall(id=number, kind=of.id, label=of.label, function=of, data=b"x")


async def test_a_worker_keeps_a_bounded_number_of_functions_and_gets_one_again_that_it_was_made_to_forget() -> None:
    link = FarSide()
    functions = [function(f"f{number}", 800 << 10) for number in range(300)]
    for number, each in enumerate([*functions, functions[0], functions[0], functions[299]], start=1):
        link.send_calls([call(number, each)])
    assert link.most < 65 * MIB
    assert link.sent == 301


def test_a_call_that_waits_keeps_a_function_that_was_forgotten_and_a_forgotten_one_is_freed() -> None:
    known = {"f": SentFunction("f", Payload(data=b"f"))}
    waiting = known.pop("f")

    def loaded() -> int:
        return 1

    load: Callable[[Payload], Any] = lambda _, it=loaded: (it, None)  # noqa: E731
    assert waiting.load(load)() == 1
    gone = weakref.ref(loaded)
    del waiting, loaded, load
    gc.collect()
    assert gone() is None


class Files:
    """The way to a node, and the bytes that lie there."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    async def put(self, data: memoryview, path: str, *, mode: int = 0o600) -> None:
        del mode
        self.sizes[path] = data.nbytes

    async def run(self, argv: Sequence[str], **_: Any) -> None:
        for path in argv[2:]:
            del self.sizes[path]


async def test_blobs_of_functions_on_a_node_are_bounded_and_those_that_calls_hold_stay() -> None:
    from blake3 import blake3

    place = SimpleNamespace(blob_dir="/memory", blob_dir_disk="/disk", blob_budget_bytes=1 << 40)
    files: Any = Files()
    node = NodeBlobs(cast("Any", SimpleNamespace(ready=place, transport=files)))
    held: list[Any] = []
    for number in range(20):
        data = number.to_bytes(4, "little") * (2 * MIB)
        blob = Blob(id=blake3(data).hexdigest(), view=memoryview(data), of_function=True)
        holding = await node.hold([blob])
        held += holding if number == 0 else node.release(holding) or []
    assert sum(files.sizes.values()) <= 64 * MIB
    assert held[0].path in files.sizes
    await node.close()
