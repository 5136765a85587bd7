"""The life of a fleet's nodes as a state machine: observations in, actions out; no I/O and no clock.

::

    WANTED ─Begin→ LAUNCHING ─Launched→ PREPARING ─Prepared→ STARTING ─Started→ JOINING ─Joined→ READY
       any state but ENDING and GONE ─End→ ENDING ─Ended→ GONE

A node joins once it has started and the head has started, since it needs the head's scheduler.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

__all__ = [
    "Action",
    "Begin",
    "End",
    "EndNodes",
    "Ended",
    "Event",
    "Join",
    "Joined",
    "Launch",
    "Launched",
    "Lifecycle",
    "NodeState",
    "Prepare",
    "Prepared",
    "Start",
    "Started",
]

_HEAD = 0


class NodeState(enum.Enum):
    """Where a node is in its life; a rank goes through it again when its node is replaced."""

    WANTED = "wanted"
    """The fleet should have it; nothing was asked of the provider."""
    LAUNCHING = "launching"
    """The provider was asked; there may or may not be a machine, and it may bill."""
    PREPARING = "preparing"
    """There is a machine; it is being reached and given its environment."""
    STARTING = "starting"
    """Its supervisor is being started; its ports are not known yet."""
    JOINING = "joining"
    """Its supervisor runs; its workers wait for, or are connecting to, the head's scheduler."""
    READY = "ready"
    """Its supervisor was told to start its workers: the node is the engine's now."""
    ENDING = "ending"
    """It is being terminated; it may still bill."""
    GONE = "gone"
    """The provider confirmed that it no longer exists, or it was never asked for. Final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The fleet was asked to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The provider has the nodes' machines."""

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
    """The node's supervisor knows the scheduler."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The fleet has to end: it was told to, or a node failed on its way up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The nodes' machines are confirmed gone."""

    ranks: tuple[int, ...]


Event = Begin | Launched | Prepared | Started | Joined | End | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Ask the provider for machines for these ranks; answer with :class:`Launched`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Wait for the machine, reach it, give it its environment; answer with :class:`Prepared`."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the node's supervisor; answer with :class:`Started`."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Tell the node's supervisor where the scheduler is; answer with :class:`Joined`."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNodes:
    """Stop these nodes' supervisors, terminate their machines and confirm it; answer with :class:`Ended`."""

    ranks: tuple[int, ...]


Action = Launch | Prepare | Start | Join | EndNodes


class Lifecycle:
    """The states of one fleet's nodes, by rank."""

    def __init__(self, nodes: int) -> None:
        self._states = dict.fromkeys(range(nodes), NodeState.WANTED)

    @property
    def states(self) -> Sequence[NodeState]:
        """Each node's state, by rank."""
        return tuple(self._states.values())

    def handle(self, event: Event) -> Sequence[Action]:
        """Take in what happened and say what to do about it.

        An event that comes too late for its node, which is ending already, changes nothing.
        """
        match event:
            case Begin():
                ranks = self._move(tuple(self._states), NodeState.WANTED, NodeState.LAUNCHING)
                return (Launch(ranks=ranks),) if ranks else ()
            case Launched(ranks=ranks):
                moved = self._move(ranks, NodeState.LAUNCHING, NodeState.PREPARING)
                return tuple(Prepare(rank=rank) for rank in moved)
            case Prepared(rank=rank):
                moved = self._move((rank,), NodeState.PREPARING, NodeState.STARTING)
                return tuple(Start(rank=rank) for rank in moved)
            case Started(rank=rank):
                return self._joins(self._move((rank,), NodeState.STARTING, NodeState.JOINING))
            case Joined(rank=rank):
                self._move((rank,), NodeState.JOINING, NodeState.READY)
                return ()
            case End():
                return self._end()
            case Ended(ranks=ranks):
                self._move(ranks, NodeState.ENDING, NodeState.GONE)
                return ()
            case _:
                assert_never(event)

    def _move(self, ranks: Sequence[int], source: NodeState, target: NodeState) -> tuple[int, ...]:
        moved = tuple(rank for rank in ranks if self._states[rank] is source)
        self._states.update(dict.fromkeys(moved, target))
        return moved

    def _joins(self, started: Sequence[int]) -> Sequence[Action]:
        if _HEAD in started:
            started = [rank for rank, state in self._states.items() if state is NodeState.JOINING]
        elif self._states[_HEAD] not in (NodeState.JOINING, NodeState.READY):
            return ()
        return tuple(Join(rank=rank) for rank in started)

    def _end(self) -> Sequence[Action]:
        """Every rank that is not gone, those already ending too: an end that failed is tried again."""
        self._move(tuple(self._states), NodeState.WANTED, NodeState.GONE)
        ranks = tuple(rank for rank, state in self._states.items() if state is not NodeState.GONE)
        self._states.update(dict.fromkeys(ranks, NodeState.ENDING))
        return (EndNodes(ranks=ranks),) if ranks else ()
