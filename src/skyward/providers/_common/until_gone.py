"""Termination of machines: requested until it is accepted, and looked at until the machines are gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from skyward._concurrency.waiting import SYSTEM_CLOCK, Clock, NotYet, wait_until
from skyward.errors import AuthenticationError, ConfigurationError, SkywardError, TerminationError
from skyward.providers.base import InstanceState

__all__ = ["Asked", "EndingCalls", "until_gone"]

_AGAIN_S: Final = 15.0
"""Time after which an accepted request is repeated, for a machine that does not show it."""
_STRIKES: Final = 3
"""Number of consecutive refusals for lack of permission, or as invalid, before the error is raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Answers to requests for the end of some machines. A machine in neither field has accepted its own.

    Attributes:
        refused: the error, by machine id.
        unknown: ids of which the vendor has no machine: gone, or not listed yet.
    """

    refused: Mapping[str, SkywardError] = field(default_factory=dict[str, SkywardError])
    unknown: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingCalls:
    """Calls of a provider's API that concern the end of machines.

    Attributes:
        look: returns the states of the machines with these ids, by id; without those that are not listed. Idempotent.
        ask: requests the end of the machines with these ids. Idempotent.
        age_s: returns the seconds since this process launched a machine; infinity if it did not.
    """

    look: Callable[[Sequence[str]], Awaitable[Mapping[str, InstanceState]]]
    ask: Callable[[Sequence[str]], Awaitable[Asked]]
    age_s: Callable[[str], float]


async def until_gone(
    where: str,
    calls: EndingCalls,
    instance_ids: Sequence[str],
    *,
    deadline_s: float,
    unlisted_s: float,
    lists_gone: bool = False,
    look_s: float = 2.0,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Terminate machines, and wait until they are gone.

    A machine that is not listed may be gone, or too new for the list. The answer to the request for its end decides; a
    machine unknown there counts as gone ``unlisted_s`` after its launch.

    Args:
        where: provider and place, for messages.
        calls: the provider's API.
        instance_ids: the machines.
        deadline_s: limit for all of them.
        unlisted_s: longest time that a new machine is missing from the provider's lists.
        lists_gone: True if the provider goes on listing machines that are gone, as gone. One that has accepted its end
            and is not listed may then be too new for the list; else it is gone.
        look_s: first pause between two looks; pauses grow to ten times that.
        clock: the time.

    Raises:
        TerminationError: some are not gone at the deadline, or termination is refused three times in a row; names
            them and the reason.
    """
    if not instance_ids:
        return
    ending = _Ending(calls, instance_ids, unlisted_s=unlisted_s, lists_gone=lists_gone, clock=clock)
    try:
        await wait_until(
            ending.ended, deadline_s=deadline_s, interval_s=look_s, what="machines to be gone", clock=clock
        )
    except (SkywardError, OSError) as error:
        why = "; ".join(dict.fromkeys(map(str, ending.refused.values()))) or str(error)
        raise TerminationError(
            f"{where} does not confirm that these machines are gone: {', '.join(ending.left)}: {why}",
            instance_ids=ending.left,
        ) from error


class _Ending:
    """Machines under termination.

    Attributes:
        left: ids of those that are not gone.
        refused: errors of refused terminations, by machine id.
    """

    def __init__(
        self, calls: EndingCalls, instance_ids: Sequence[str], *, unlisted_s: float, lists_gone: bool, clock: Clock
    ) -> None:
        self.left = list(instance_ids)
        self.refused: Mapping[str, SkywardError] = {}
        self._calls = calls
        self._unlisted_s = unlisted_s
        self._lists_gone = lists_gone
        self._clock = clock
        self._unknown: set[str] = set()
        self._accepted_at: dict[str, float] = {}
        self._strikes = 0

    async def ended(self) -> bool | NotYet:
        """Look once, request termination of machines not yet terminating, and return True when all are gone."""
        try:
            found = await self._calls.look(self.left)
            self.left = [each for each in self.left if self._may_live(each, found.get(each))]
            doomed = [each for each in self.left if self._is_due(each, found.get(each))]
            self._note(doomed, await self._calls.ask(doomed) if doomed else Asked())
        except SkywardError as error:
            return self._struck(error)
        for error in self.refused.values():
            return self._struck(error)
        self._strikes = 0
        return NotYet(f"{len(self.left)} are not gone") if self.left else True

    def _may_live(self, instance_id: str, state: InstanceState | None) -> bool:
        """Return whether the machine may exist."""
        if state is not None:
            return state is not InstanceState.GONE
        if instance_id in self._accepted_at:
            if not self._lists_gone:
                return False
            accepted_s = self._clock.monotonic() - self._accepted_at[instance_id]
            return min(accepted_s, self._calls.age_s(instance_id)) < self._unlisted_s
        return instance_id not in self._unknown or self._calls.age_s(instance_id) < self._unlisted_s

    def _is_due(self, instance_id: str, state: InstanceState | None) -> bool:
        """Return whether the machine's end is to be requested now."""
        if state is InstanceState.STOPPING:
            return False
        accepted_at = self._accepted_at.get(instance_id)
        return accepted_at is None or (state is not None and self._clock.monotonic() - accepted_at >= _AGAIN_S)

    def _note(self, instance_ids: Sequence[str], answer: Asked) -> None:
        self.refused = answer.refused
        self._unknown.update(answer.unknown)
        now = self._clock.monotonic()
        self._accepted_at |= {each: now for each in instance_ids if each not in {*answer.refused, *answer.unknown}}

    def _struck(self, error: SkywardError) -> NotYet:
        final = isinstance(error, AuthenticationError | ConfigurationError)
        self._strikes = self._strikes + 1 if final else 0
        if self._strikes >= _STRIKES:
            raise error
        return NotYet(str(error))
