"""A fleet whose provider, nodes and clock are fakes, and what it published."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyward.events import SkywardEvent
from skyward.provision.buying.ledger import Ledger
from skyward.provision.fleet.fleet import Fleet
from skyward.request.request import parse_request
from skyward.testing.provider import FakeProvider
from skyward.wire.frames import TlsIdentity
from support.clock import FakeClock
from support.nodes import FakeNodes

__all__ = ["FleetStage"]


@dataclass(kw_only=True)
class FleetStage:
    """What a fleet stands on: fakes of everything but the ledger.

    Attributes:
        ledger: where its machines are written down.
        provider: who has them.
        nodes: opens them.
        clock: the time.
        events: what was published, in order.
    """

    ledger: Ledger
    provider: FakeProvider = field(default_factory=FakeProvider)
    nodes: FakeNodes = field(default_factory=FakeNodes)
    clock: FakeClock = field(default_factory=FakeClock)
    events: list[SkywardEvent] = field(default_factory=list[SkywardEvent])

    def fleet(self, **request: Any) -> Fleet:
        """A fleet of two nodes that is not started; ``request`` says otherwise, as ``ComputePool`` takes it."""
        asked: dict[str, Any] = {"nodes": 2} | request
        return Fleet(
            self.provider,
            parse_request(**asked),
            pool_id="pool",
            tls=TlsIdentity(ca="ca", cert="cert", key="key"),
            publish=self.events.append,
            on_node_message=lambda node, message: None,
            ledger=self.ledger,
            clock=self.clock,
            open_node=self.nodes,
        )
