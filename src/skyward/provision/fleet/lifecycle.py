"""Life of a fleet's nodes as a state machine: observations in, actions out; no I/O and no clock.

::

    Add→ LAUNCHING ─Launched→ PREPARING ─Prepared→ STARTING ─Started→ JOINING ─Joined→ READY
       any state but ENDING and GONE ─End→ ENDING ─Ended→ GONE ─Add→ LAUNCHING …
       any state but ENDING and GONE ─Lost→ GONE

A node that reaches the head (:mod:`skyward.provision.fleet.topology`) joins once both have started, since it needs the
head's scheduler; any other node joins its own. A rank that is gone may be launched again, on another machine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from skyward.provision.fleet.topology import HEAD, joins

__all__ = [
    "Action",
    "Add",
    "Discard",
    "End",
    "EndNodes",
    "Ended",
    "Event",
    "HeadGivenUp",
    "Join",
    "Joined",
    "Launch",
    "Launched",
    "Lifecycle",
    "Lost",
    "NodeState",
    "Prepare",
    "Prepared",
    "StartSupervisor",
    "Started",
]


class NodeState(enum.Enum):
    """State of a node; the module's docstring lists the events that change it."""

    LAUNCHING = "launching"
    """Its machine is being requested from the provider."""
    PREPARING = "preparing"
    """Its machine exists and is being started, reached and given its environment."""
    STARTING = "starting"
    """Its supervisor is being started; its ports are not chosen yet."""
    JOINING = "joining"
    """Its supervisor runs; its workers wait for, or connect to, their scheduler."""
    READY = "ready"
    """Its supervisor has the order to start its workers: the engine uses the node."""
    ENDING = "ending"
    """Its machine is being terminated and may still bill."""
    GONE = "gone"
    """Its machine was confirmed gone, or was lost and is ended independently of the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Nodes of these ranks are requested."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The provider has created the nodes' machines."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The node was reached and has its environment; its machine is on this network, or on none if that is empty."""

    rank: int
    network: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The node's supervisor has chosen its ports."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The node's supervisor has received the scheduler's address."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGivenUp:
    """The head is gone and will not be replaced: every node joins its own scheduler, until there is a head again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The node is certainly dead, or was when it came up, without an order to end."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """These nodes have to end; with None all of them, and the fleet takes no more."""

    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The nodes' machines are confirmed gone, or could not be ended now."""

    ranks: tuple[int, ...]


Event = Add | Launched | Prepared | Started | Joined | HeadGivenUp | Lost | End | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Ask the provider for machines for these ranks; answer with :class:`Launched`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Wait for the machine, reach it, give it its environment; answer with :class:`Prepared`."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSupervisor:
    """StartSupervisor the node's supervisor; answer with :class:`Started`."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Send the scheduler's address to the node's supervisor, unless it has it; answer with :class:`Joined`."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """End the lost node's machine in the background; another may take its rank at once."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNodes:
    """Stop these nodes' supervisors, terminate their machines and confirm it; answer with :class:`Ended`."""

    ranks: tuple[int, ...]


Action = Launch | Prepare | StartSupervisor | Join | Discard | EndNodes
_UP = (NodeState.JOINING, NodeState.READY)
_ON_ITS_WAY_OUT = (NodeState.ENDING, NodeState.GONE)


class Lifecycle:
    """States of one fleet's nodes, by rank."""

    def __init__(self) -> None:
        self._states: dict[int, NodeState] = {}
        self._networks: dict[int, str] = {}
        # Outlives the head, so that nodes wait for the next one only where it was in reach.
        self._head_network: str | None = None
        self._over = False

    @property
    def states(self) -> Mapping[int, NodeState]:
        """State of each node by rank; includes every rank that ever existed."""
        return self._states

    @property
    def over(self) -> bool:
        """True once the whole fleet has to end and takes no more nodes."""
        return self._over

    def head_of(self, rank: int) -> int | None:
        """Return the rank whose scheduler a prepared node joins; None until the head's network is known."""
        return joins(rank, self._networks[rank], self._head_network)

    def handle(self, event: Event) -> Sequence[Action]:
        """Apply an event and return the actions that follow.

        An event that comes too late, when its node is ending already, changes nothing.
        """
        match event:
            case Add(ranks=ranks):
                return self._add(ranks)
            case Launched(ranks=ranks):
                moved = self._move(ranks, NodeState.LAUNCHING, NodeState.PREPARING)
                return tuple(Prepare(rank=rank) for rank in moved)
            case Prepared(rank=rank, network=network):
                return self._prepared(rank, network)
            case Started(rank=rank):
                moved = self._move((rank,), NodeState.STARTING, NodeState.JOINING)
                return self._joins(tuple(self._states) if HEAD in moved else moved)
            case Joined(rank=rank):
                self._move((rank,), NodeState.JOINING, NodeState.READY)
                return ()
            case HeadGivenUp():
                self._head_network = ""
                return self._joins(tuple(self._states))
            case Lost(rank=rank):
                return self._lose(rank)
            case End(ranks=ranks):
                self._over = self._over or ranks is None
                return self._end(tuple(self._states) if ranks is None else ranks)
            case Ended(ranks=ranks):
                self._move(ranks, NodeState.ENDING, NodeState.GONE)
                return ()
            case _:
                assert_never(event)

    def _move(self, ranks: Sequence[int], source: NodeState, target: NodeState) -> tuple[int, ...]:
        moved = tuple(rank for rank in ranks if self._states[rank] is source)
        self._states.update(dict.fromkeys(moved, target))
        return moved

    def _add(self, ranks: Sequence[int]) -> Sequence[Action]:
        new = tuple(rank for rank in ranks if self._states.get(rank, NodeState.GONE) is NodeState.GONE)
        if self._over or not new:
            return ()
        self._states.update(dict.fromkeys(new, NodeState.LAUNCHING))
        return (Launch(ranks=new),)

    def _prepared(self, rank: int, network: str) -> Sequence[Action]:
        if not self._move((rank,), NodeState.PREPARING, NodeState.STARTING):
            return ()
        self._networks[rank] = network
        starting: Sequence[Action] = (StartSupervisor(rank=rank),)
        if rank != HEAD:
            return starting
        self._head_network = network
        return (*starting, *self._joins(tuple(self._states)))  # nodes that turn out not to reach it

    def _joins(self, ranks: Sequence[int]) -> Sequence[Action]:
        """Return the joining of those of the ranks that wait for it, and whose scheduler's node has started."""
        waiting = [rank for rank in ranks if self._states[rank] is NodeState.JOINING]
        heads = {rank: self.head_of(rank) for rank in waiting}
        return tuple(Join(rank=rank) for rank, head in heads.items() if head is not None and self._states[head] in _UP)

    def _lose(self, rank: int) -> Sequence[Action]:
        if self._states[rank] in _ON_ITS_WAY_OUT:
            return ()
        self._states[rank] = NodeState.GONE
        return (Discard(rank=rank),)

    def _end(self, ranks: Sequence[int]) -> Sequence[Action]:
        """End every rank that is not gone; those already ending too, so that a failed end is retried."""
        left = tuple(rank for rank in ranks if self._states[rank] is not NodeState.GONE)
        self._states.update(dict.fromkeys(left, NodeState.ENDING))
        return (EndNodes(ranks=left),) if left else ()
