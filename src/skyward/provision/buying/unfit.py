"""Unfit machines: errors that are a machine's own fault, and the record of those that a pool bought in vain. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from skyward.errors import AuthenticationError, CapacityError, HostKeyError, UnreachableError
from skyward.providers.base import Instance

__all__ = ["Attempt", "UnfitMachineError", "UnfitMachines", "blamed"]

_CENT = 0.01
_MACHINES = 3
_WITH_PREEMPTED = 10
"""Most machines of one rank, those included that were taken back while they started, which do not count as unfit."""


class UnfitMachineError(CapacityError):
    """A machine cannot become a node, for a fault of its own. The fleet ends it and buys another.

    Args:
        reason: the fault, in words that follow the machine's name: ``"did not run within 900 s"``.
        preempted: True if the provider took it back: that is no fault, and does not count.
    """

    def __init__(self, reason: str, *, preempted: bool = False) -> None:
        super().__init__(f"the machine {reason}")
        self.reason = reason
        self.preempted = preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A machine that was bought in vain.

    Attributes:
        instance: the provider's record of it.
        reason: see :class:`UnfitMachineError`.
        cost: USD from its launch to the order to terminate it; None if its price is unknown.
        preempted: True if the provider took it back.
    """

    instance: Instance
    reason: str
    cost: float | None
    preempted: bool = False

    def __str__(self) -> str:
        offer = self.instance.offer
        host = f"host {self.instance.host}" if self.instance.host else ""
        place = ", ".join(filter(None, (offer.spec.name, offer.region, host)))
        return f"machine {self.instance.id} ({place}) {self.reason}{_cost_words(self.cost)}"


class UnfitMachines:
    """Record of the machines that a pool bought in vain.

    Attributes:
        hosts: hosts of unfit machines, to be avoided for the rest of the pool's life.
    """

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self._attempts: dict[int, list[Attempt]] = defaultdict(list)

    def add(self, rank: int, attempt: Attempt) -> None:
        """Record a machine that was launched for ``rank``."""
        self._attempts[rank].append(attempt)
        if attempt.instance.host and not attempt.preempted:
            self.hosts.add(attempt.instance.host)

    def forget(self, rank: int) -> None:
        """Drop the attempts for a rank that has a sound machine, or gets none."""
        self._attempts.pop(rank, None)

    def attempts(self, rank: int) -> tuple[Attempt, ...]:
        """Return the machines bought in vain for ``rank``, in order."""
        return tuple(self._attempts.get(rank, ()))

    def outcome(self, rank: int) -> str:
        """Return the next step for ``rank``, in words; empty if no further machine is to be bought."""
        attempts = self.attempts(rank)
        unfit = sum(not attempt.preempted for attempt in attempts)
        if unfit >= _MACHINES or len(attempts) >= _WITH_PREEMPTED:
            return ""
        return "another is bought" + (f" ({unfit + 1} of {_MACHINES})" if unfit else "")

    def exhausted(self, rank: int) -> CapacityError:
        """Return the error of a rank without a sound machine, with all of its attempts."""
        attempts = tuple(map(str, self.attempts(rank)))
        listed = "; ".join(f"({number}) {attempt}" for number, attempt in enumerate(attempts, 1))
        return CapacityError(
            f"node {rank} has no sound machine, and no further one is bought after {len(attempts)}: {listed}. "
            "Try another machine type, region or provider",
            attempts=attempts,
        )


def blamed(error: Exception, *, fresh: bool) -> UnfitMachineError | None:
    """Return the error of a machine whose first contact failed with ``error``, or None if that is not its fault.

    Args:
        error: the error of the contact.
        fresh: True for a machine that was made for the pool and got its keys at its launch: then a refused login is the
            fault of its first boot. On other machines the credentials are wrong.
    """
    match error:
        case UnreachableError():
            return UnfitMachineError(f"did not answer ({error})")
        case HostKeyError() if fresh:
            return UnfitMachineError(f"is not the one that was ordered ({error})")
        case AuthenticationError() if fresh:
            return UnfitMachineError(f"admitted no login ({error})")
        case _:
            return None


def _cost_words(cost: float | None) -> str:
    if cost is None:
        return "; its cost is not known"
    if not cost:
        return ""
    return f"; it cost about ${cost:.2f}" if cost >= _CENT else "; it cost less than $0.01"
