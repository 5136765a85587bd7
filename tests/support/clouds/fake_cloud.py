"""A fake vendor as tests see it, whichever it is: its service, its machines, and what is left of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pytest

from skyward.fleet import machine_size
from skyward.testing.aws import Looks
from skyward.testing.bill import Tariff
from support.clouds.rest_service import RestService
from support.clouds.room import Room

__all__ = ["FakeCloud", "FakeMachine"]


@dataclass(slots=True, kw_only=True, eq=False)
class FakeMachine:
    """The vendor's record of a machine.

    Attributes:
        id: the vendor's id, as text.
        status: its state, in the vendor's words.
        created: the body of the call that created it.
        address: its address.
        price_per_hour: USD as charged.
        unseen: looks for which it is not listed yet.
        pending: looks for which it does not run yet, at least.
        ending: looks for which it is still listed once it is ended.
        ended: True from its deletion on; it costs nothing then.
    """

    id: str
    status: str
    created: Mapping[str, Any]
    price_per_hour: float
    address: str = ""
    unseen: int = 0
    pending: int = 0
    ending: int = 0
    ended: bool = False

    @property
    def host(self) -> str:
        """Name of the physical machine."""
        return self.address


class FakeCloud:
    """A vendor's account, on loopback addresses. A context manager.

    Args:
        service: its API.
        room: its machines.
        looks: delays of state changes, in looks.

    Attributes:
        service: as given.
        room: as given.
        looks: as given; may be changed at any time.
        capacity: number of machines left, by type; types that are not here have plenty.
        most_machines: machines that exist when no further one is sold, although they are listed.
        surcharge: price of the created record, as a multiple of the listed one.
        least_billed_s: shortest time that is billed, in place of the vendor's own least time and charge; None is those.
        machines: every machine ever created, by id.
        containers_may_end: False for containers whose own keys are refused.
    """

    def __init__(self, service: RestService, room: Room[Any, Any], looks: Looks | None = None) -> None:
        self.service = service
        self.room = room
        self.looks = looks or Looks(pending=0, ending=0)
        self.capacity: dict[str, int] = {}
        self.most_machines = math.inf
        self.surcharge = 1.0
        self.least_billed_s: float | None = None
        self.containers_may_end = True
        self.machines: dict[str, FakeMachine] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.room)
        self._stack.enter_context(self.service)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def endpoint_url(self) -> str:
        """URL of the API."""
        return self.service.url

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables by which the provider finds credentials for this account."""
        raise NotImplementedError

    @property
    def secrets(self) -> Sequence[str]:
        """Texts that must appear in no message, argv, file or log of the client's."""
        raise NotImplementedError

    def left(self) -> Mapping[str, Sequence[str]]:
        """Return the names of resources not removed, by kind; empty for none."""
        raise NotImplementedError

    def forget_user(self) -> None:
        """Remove what is meant to stay in the account, such as the user's key."""

    def reaches(self, one: str, other: str) -> bool:
        """Return whether the vendor lets a machine reach another one on any port."""
        del one, other
        return False

    @property
    def alive(self) -> Sequence[str]:
        """Ids of the machines that exist, in the order of their creation."""
        with self.service.lock:
            return [each.id for each in self.machines.values() if not each.ended]

    def use(self, patch: pytest.MonkeyPatch, provider: type[Any], **settings: Any) -> None:
        """Set this process's credentials for this account, and class variables of the provider for its machines.

        Its machines are as large as this one, and never smaller than bought.
        """
        for name, value in self.environment.items():
            patch.setenv(name, value)
        for name, value in {**self.room.settings, **settings}.items():
            patch.setattr(provider, name, value)
        for share in ("CORES_SHARE", "MEMORY_SHARE"):
            patch.setattr(machine_size, share, 0.0)

    def destroy(self, machine: str) -> None:
        """Take a machine back, without its client having asked."""
        with self.service.lock:
            self.end(self.machines[machine])

    def lose(self, machine: str) -> None:
        """Let a machine's host fail: its processes end, and its record shows that."""
        raise NotImplementedError

    def failures(self) -> Sequence[str]:
        """Return the errors of machines that did not boot, and first-boot orders that failed."""
        return self.room.failures()

    # For the vendors' services

    def begin(
        self,
        made: FakeMachine,
        orders: Any,
        *,
        keys: Sequence[str],
        powered_off: Callable[[FakeMachine], None],
        minimum_s: float,
        minimum_usd: float = 0.0,
    ) -> None:
        """Create a machine: it boots by the room's kind of orders, and costs money from now on."""
        made.unseen, made.pending, made.ending = self.looks.unseen, self.looks.pending, self.looks.ending
        self.machines[made.id] = made

        def off() -> None:
            with self.service.lock:
                if not made.ended:
                    powered_off(made)

        made.address = self.room.add(made.id, orders, keys=keys, powered_off=off)
        tariff = Tariff(usd_per_hour=made.price_per_hour, minimum_s=minimum_s, minimum_usd=minimum_usd)
        if self.least_billed_s is not None:
            tariff = Tariff(usd_per_hour=made.price_per_hour, minimum_s=self.least_billed_s)
        self.service.bill.begin(made.id, tariff)

    def end(self, machine: FakeMachine) -> None:
        """End a machine and its bill; again, it does nothing."""
        if not machine.ended:
            machine.ended = True
            self.service.bill.end(machine.id)
            self.room.end(machine.id)

    def look(self, machine: FakeMachine) -> bool:
        """Count a look at a machine and return whether it is listed."""
        if machine.ended:
            machine.ending -= 1
            return machine.ending >= 0
        if machine.unseen > 0:
            machine.unseen -= 1
            return False
        return True

    def runs(self, machine: FakeMachine) -> bool:
        """Count a look at a listed machine that is coming up and return whether it runs now."""
        machine.pending -= 1
        return machine.pending < 0 and self.room.booted(machine.id)

    def take_capacity(self, kind: str) -> bool:
        """Take a machine of that type from what is left, and return whether there was one."""
        left = self.capacity.get(kind) if len(self.alive) < self.most_machines else 0
        if left is not None and left > 0:
            self.capacity[kind] = left - 1
        return left is None or left > 0
