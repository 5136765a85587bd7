"""What a link to a worker sends ahead of calls."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.scheduling.calls import LiveCall
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.scheduling.worker_link import AttachedNode, WorkerLink
from skyward.shipping.blobs import Exchange
from skyward.shipping.function_cache import PackedFunction
from skyward.shipping.project_modules import SourceSet
from skyward.wire.messages import ModuleSource, Payload, StoreSources, ToWorker

MIB = 1 << 20


class FarSide(WorkerLink):
    """Link that keeps what is pushed."""

    def __init__(self) -> None:
        node: Any = None
        owner: Any = SimpleNamespace(lane_items=print)
        tls: Any = None
        super().__init__(WorkerId(0, 0), "", tls, owner, node)
        self.pushed: list[ToWorker] = []

    def push(self, item: ToWorker) -> None:
        self.pushed.append(item)


def source(name: str) -> ModuleSource:
    files = (("data", bytes(8 * MIB)),) if "." not in name else ()
    return ModuleSource(name=name, text="", is_package=True, origin=f"/{name}", edition_ns=1, files=files)


async def test_sources_of_many_projects_are_sent_in_items_that_a_message_can_carry_and_each_once() -> None:
    names = [f"project{number}{part}" for number in range(10, 20) for part in ("", ".a", ".b")]
    sources = SourceSet(sources=tuple(map(source, names)))
    function = PackedFunction(id="f", label="f", payload=Payload(data=b"f"), sources=sources)
    link = FarSide()
    for number in (1, 2):
        link.send_calls([LiveCall(id=number, kind="f", label="f", function=function, data=b"x")])
    items = [item for item in link.pushed if isinstance(item, StoreSources)]
    assert [each.name for item in items for each in item.sources] == names
    assert max(item.nbytes for item in items) < 16 * MIB


@pytest.mark.parametrize(
    ("here", "folder", "shared"),
    [(True, "/dev/shm/it", "/dev/shm/it"), (True, "/work/blobs", ""), (False, "/dev/shm/it", "")],
    ids=["in memory", "on disk", "elsewhere"],
)
def test_results_are_shared_where_the_nodes_folder_is_in_the_memory_of_this_machine(
    here: bool, folder: str, shared: str
) -> None:
    access = SimpleNamespace(on_this_machine=here)
    ready = SimpleNamespace(blob_dir=folder, blob_dir_disk="/work/blobs", call_ports=[1])
    node: Any = SimpleNamespace(access=access, ready=ready, instance=SimpleNamespace(network=""))
    assert AttachedNode(node, defaultdict(Exchange)).shared_folder == shared
