"""Record of a kept fleet, which follows its nodes while a client has it, and what the client leaves behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from skyward.base.waiting import wait_until
from skyward.errors import PoolStateError, SkywardError, UnreachableError
from skyward.events import Error, SkywardEvent
from skyward.fleet.control_client import ControlClient
from skyward.fleet.node import Node
from skyward.ledger.fleet_record import FleetFolder, FleetRecord, KeptNode, no_such_fleet
from skyward.ledger.keeper import MARGIN_S, start_keeper
from skyward.ledger.ledger import Ledger
from skyward.ledger.ownership import Moment, Owner
from skyward.request.request import PoolRequest
from skyward.wire.control import Keep, Message, UnfinishedJobs

_ANSWER_S = 30.0
_LOOK_S = 0.2


class FleetKeeping:
    """Record of the fleet that this client has, in its folder. Belongs to the event loop.

    Args:
        folder: the fleet's folder, which this process holds.
        record: the record as it was found, or as it is to begin with.
        ledger: the record of the machines.
        timeout_s: hard cap on the life of a machine.
        publish: receives an error if the record cannot be written; must not block.

    Attributes:
        record: the present record.
    """

    def __init__(
        self,
        folder: FleetFolder,
        record: FleetRecord,
        ledger: Ledger,
        *,
        timeout_s: float,
        publish: Callable[[SkywardEvent], None],
    ) -> None:
        self.record = record
        self._folder = folder
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._publish = publish
        self._writing: asyncio.Task[None] | None = None
        self._is_current = True

    async def begin(self) -> None:
        """Write the record, and start the fleet's keeper; this process owns the machines from now on."""
        self.record = replace(self.record, left=None)
        await asyncio.to_thread(self._write, self.record, Owner.this_process())
        await asyncio.to_thread(start_keeper, self._folder)

    def follow(self, nodes: Sequence[Node], *, spent: Mapping[str, float]) -> None:
        """Write the record again soon, with these nodes, and the cost of former ones."""
        self._write_soon(replace(self.record, nodes=_kept(nodes), spent=spent))

    def asked_for(self, request: PoolRequest, *, machines: Mapping[str, str], applied: Mapping[str, str]) -> None:
        """Write soon what the present client asks for, which its nodes have been given."""
        record = replace(self.record, request=request, keep_s=request.keep_s, machines=machines, applied=applied)
        self._write_soon(replace(record, restarting=False))

    async def begin_restart(self) -> None:
        """Write that the supervisors are restarted from now on; :meth:`end_restart` or :meth:`asked_for` ends that."""
        self._write_soon(replace(self.record, restarting=True))
        await self.settle()

    def end_restart(self) -> None:
        """Write soon that the restart is over."""
        if self.record.restarting:
            self._write_soon(replace(self.record, restarting=False))

    def keep_for(self, seconds: float) -> None:
        """Write soon that the fleet waits so many seconds for its next client."""
        self._write_soon(replace(self.record, keep_s=seconds))

    async def settle(self) -> None:
        """Wait until the record is written."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    async def leave(self, nodes: Sequence[Node], *, spent: Mapping[str, float]) -> bool:
        """Write what another client finds: without a node, nothing. Return False if it finds nothing.

        Raises nothing: an error is published.
        """
        await self.settle()
        self.record = replace(self.record, nodes=_kept(nodes), spent=spent, left=Moment.after())
        try:
            if nodes:
                await asyncio.to_thread(self._write, self.record, None)
            else:
                await asyncio.to_thread(self._folder.forget)
        except (OSError, SkywardError) as error:
            self._publish(Error(f"the record of the kept fleet {self.record.name!r} cannot be written: {error}"))
            return bool(nodes) and bool(self._folder.written_at())  # on a full disk the former one is still true
        return bool(nodes)

    def _write_soon(self, record: FleetRecord) -> None:
        self.record = record
        self._is_current = False
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._catch_up())

    async def _catch_up(self) -> None:
        while not self._is_current:
            self._is_current = True
            try:
                await asyncio.to_thread(self._write, self.record, None)
            except (OSError, SkywardError) as error:
                self._publish(Error(f"the record of the kept fleet {self.record.name!r} cannot be written: {error}"))

    def _write(self, record: FleetRecord, owner: Owner | None) -> None:
        self._folder.write(record)
        # A client may be killed at any time: until that is noticed, its machines are kept as long as they may live.
        left_s = record.keep_s if record.left is not None else self._timeout_s
        self._ledger.keep_pool(record.pool_id, Moment.after(left_s + MARGIN_S), keys=record.keys, owner=owner)


async def keep_for(folder: FleetFolder, ledger: Ledger, seconds: float) -> None:
    """Have a kept fleet wait so many seconds for its next client: from now on, or from the end of its present one.

    Raises:
        PoolStateError: there is no such fleet.
        UnreachableError: a node or the present client does not answer; others may have been told.
    """
    try:
        await folder.hold()
    except PoolStateError:  # it has a client, which does it
        folder.request("keep", seconds)

        async def is_written() -> bool | None:
            record = folder.read()
            return True if record is None or record.keep_s == seconds else None

        what = f"the client of the kept fleet {folder.name!r} to keep it longer"
        await wait_until(is_written, deadline_s=_ANSWER_S, interval_s=_LOOK_S, what=what)
        return
    try:
        record = folder.read()
        if record is None or not record.nodes:
            raise no_such_fleet(folder.name)
        await asyncio.gather(*(_tell(node, seconds) for node in record.nodes))
        nodes = tuple(replace(node, config=replace(node.config, keep_s=seconds)) for node in record.nodes)
        record = replace(record, keep_s=seconds, left=Moment.after(), nodes=nodes)
        folder.write(record)
        ledger.keep_pool(record.pool_id, Moment.after(seconds + MARGIN_S), keys=record.keys)
    finally:
        folder.release()


async def _tell(node: KeptNode, seconds: float) -> None:
    """Tell a node without a client how long it is kept, and wait for its answer."""
    answers: asyncio.Queue[Message] = asyncio.Queue()
    assert node.instance.access is not None  # it had a client
    transport = node.instance.access.open()
    host, _, port = node.ready.control.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            address = "{}:{}".format(*await transport.forward(host, int(port)))
            control = ControlClient(address, node.config.identity, on_message=answers.put_nowait, on_lost=lambda: None)
            try:
                await control.connect(_ANSWER_S)
                await control.send(Keep(seconds=seconds))
                for _ in range(2):  # the first is what every connection begins with
                    while not isinstance(await answers.get(), UnfinishedJobs):
                        pass
            finally:
                await control.close()
    except TimeoutError as error:
        raise UnreachableError(f"node {node.rank} of the kept fleet does not answer within {_ANSWER_S:g} s") from error
    finally:
        await transport.close()


def words_on_leaving(record: FleetRecord) -> str:
    """Return what a client that leaves its fleet says: until when it is kept, at what price, and how to end it."""
    until = record.kept_until
    assert until is not None
    price = record.price_per_hour
    costs = "free" if price == 0 else "at an unknown price" if price is None else f"${price:.2f}/h"
    return (
        f"the fleet {record.name!r} is kept until {time.strftime('%H:%M', time.localtime(until.unix))} "
        f"({len(record.nodes)} node{'s' * (len(record.nodes) > 1)}, {costs}): open it again by its name, or end it "
        f"with `skyward down {record.name}`"
    )


def _kept(nodes: Iterable[Node]) -> tuple[KeptNode, ...]:
    return tuple(kept for node in nodes if (kept := node.kept) is not None)
