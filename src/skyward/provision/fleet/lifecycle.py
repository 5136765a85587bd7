"""Life of a fleet's nodes as a state machine: observations in, actions out; no I/O and no clock.

::

    Add→ LAUNCHING ─Launched→ PREPARING ─Prepared→ STARTING ─Started→ JOINING ─Joined→ READY
       any state but ENDING and GONE ─End→ ENDING ─Ended→ GONE ─Add→ LAUNCHING …
       any state but ENDING and GONE ─Lost→ GONE

A node joins once both it and the head have started, since it needs the head's scheduler. A rank that is gone may be
launched again, on another machine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

__all__ = [
    "HEAD",
    "Action",
    "Add",
    "Discard",
    "End",
    "EndNodes",
    "Ended",
    "Event",
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

HEAD = 0
"""Rank of the head node, where the scheduler runs."""


class NodeState(enum.Enum):
    """State of a node; the module's docstring lists the events that change it."""

    LAUNCHING = "launching"
    """Its machine is being requested from the provider."""
    PREPARING = "preparing"
    """Its machine exists and is being started, reached and given its environment."""
    STARTING = "starting"
    """Its supervisor is being started; its ports are not chosen yet."""
    JOINING = "joining"
    """Its supervisor runs; its workers wait for, or connect to, the head's scheduler."""
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
    """The node was reached and has its environment."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The node's supervisor has chosen its ports."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The node's supervisor has received the scheduler's address."""

    rank: int


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


Event = Add | Launched | Prepared | Started | Joined | Lost | End | Ended


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
    """Send the scheduler's address to the node's supervisor; answer with :class:`Joined`."""

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
_ON_ITS_WAY_OUT = (NodeState.ENDING, NodeState.GONE)


class Lifecycle:
    """States of one fleet's nodes, by rank."""

    def __init__(self) -> None:
        self._states: dict[int, NodeState] = {}
        self._over = False

    @property
    def states(self) -> Mapping[int, NodeState]:
        """State of each node by rank; includes every rank that ever existed."""
        return self._states

    @property
    def over(self) -> bool:
        """True once the whole fleet has to end and takes no more nodes."""
        return self._over

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
            case Prepared(rank=rank):
                moved = self._move((rank,), NodeState.PREPARING, NodeState.STARTING)
                return tuple(StartSupervisor(rank=rank) for rank in moved)
            case Started(rank=rank):
                return self._joins(self._move((rank,), NodeState.STARTING, NodeState.JOINING))
            case Joined(rank=rank):
                self._move((rank,), NodeState.JOINING, NodeState.READY)
                return ()
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

    def _joins(self, started: Sequence[int]) -> Sequence[Action]:
        if HEAD in started:
            started = [rank for rank, state in self._states.items() if state is NodeState.JOINING]
        elif self._states[HEAD] not in (NodeState.JOINING, NodeState.READY):
            return ()
        return tuple(Join(rank=rank) for rank in started)

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
