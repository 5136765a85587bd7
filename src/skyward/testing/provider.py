"""Provider in memory that fails on command, and the contract suite of every provider."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer, Provider, first_to_be_had
from skyward.providers.registry import Sweepable
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest, parse_request
from skyward.transport.access import LocalAccess

__all__ = ["FakeProvider", "ProviderContract", "Verb", "running"]

Verb = Literal["offers", "launch", "describe", "terminate", "tagged"]
"""Verb that a :class:`FakeProvider` can fail at."""


class FakeProvider:
    """Provider in memory; implements :class:`~skyward.providers.base.Provider`.

    Attributes:
        instances: every machine ever launched, by id.
        calls: the verbs called, in order.
        launch_limit: largest number of machines launched of an order, without an error; None launches all.
        pending_looks: number of times that a new machine is described as pending before it runs.
        networks: networks of the machines, in the order of their launch; the last one is that of all further ones.
        prices: USD an hour as charged, by machine type; a machine's record states it once it runs.
        ends_itself: True if the machines can stop their own bill.
    """

    def __init__(
        self, offers: Sequence[Offer] = (), *, pending_looks: int = 0, networks: Sequence[str] = ("fake",)
    ) -> None:
        self.instances: dict[str, Instance] = {}
        self.calls: list[Verb] = []
        self.launch_limit: int | None = None
        self.pending_looks = pending_looks
        self.networks = networks
        self.prices: dict[str, float] = {}
        self.ends_itself = True
        self._offers = offers or (Offer(spec=InstanceSpec(name="fake", cpu=2, memory_gib=4), price_per_hour=1.0),)
        self._faults: dict[Verb, deque[BaseException]] = defaultdict(deque)
        self._numbers = itertools.count()
        self._looks: dict[str, int] = {}

    @property
    def name(self) -> str:
        """``"fake"``."""
        return "fake"

    @property
    def alive(self) -> Sequence[str]:
        """Ids of the machines that are not gone."""
        return [each.id for each in self.instances.values() if each.state is not InstanceState.GONE]

    def fail(self, verb: Verb, error: BaseException, *, times: int = 1) -> None:
        """Let the next ``times`` calls of ``verb`` raise ``error`` and do nothing else."""
        self._faults[verb].extend([error] * times)

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:  # noqa: ARG002 - the seam takes it
        """See :meth:`Provider.offers`."""
        self._enter("offers")
        return self._offers

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """See :meth:`Provider.launch`."""
        return await first_to_be_had(self.name, offers, lambda offer: self._launch(offer, order))

    async def _launch(self, offer: Offer, order: LaunchOrder) -> Sequence[Instance]:
        self._enter("launch")
        made = [self._make(key, offer) for key in order.keys[: self.launch_limit]]
        self.instances.update({instance.id: instance for instance in made})
        return made

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """See :meth:`Provider.describe`."""
        self._enter("describe")
        return [self._look(instance_id) for instance_id in instance_ids]

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """See :meth:`Provider.terminate`."""
        self._enter("terminate")
        for instance_id in self.instances.keys() & set(instance_ids):
            self.set_state(instance_id, InstanceState.GONE)

    async def tagged(self) -> Sequence[Instance]:
        """See :meth:`skyward.providers.registry.Sweepable.tagged`."""
        self._enter("tagged")
        return [each for each in self.instances.values() if each.state is not InstanceState.GONE]

    async def close(self) -> None:
        """See :meth:`Provider.close`."""

    def set_state(self, instance_id: str, state: InstanceState) -> None:
        """Change a machine's state from outside Skyward."""
        self.instances[instance_id] = replace(self.instances[instance_id], state=state)

    def _enter(self, verb: Verb) -> None:
        self.calls.append(verb)
        if self._faults[verb]:
            raise self._faults[verb].popleft()

    def _make(self, key: str, offer: Offer) -> Instance:
        number = next(self._numbers)
        instance_id = f"fake-{number}"
        self._looks[instance_id] = self.pending_looks
        network = self.networks[min(number, len(self.networks) - 1)]
        pending = Instance(
            id=instance_id,
            key=key,
            state=InstanceState.PENDING,
            offer=offer,
            network=network,
            ends_itself=self.ends_itself,
        )
        return pending if self.pending_looks else self._run(pending)

    def _run(self, instance: Instance) -> Instance:
        return replace(running(instance), price_per_hour=self.prices.get(instance.offer.spec.name))

    def _look(self, instance_id: str) -> Instance:
        if instance_id not in self.instances:
            return Instance(id=instance_id, key="", state=InstanceState.GONE, offer=self._offers[0])
        instance = self.instances[instance_id]
        if instance.state is InstanceState.PENDING:
            self._looks[instance_id] -= 1
            if self._looks[instance_id] < 0:
                instance = self.instances[instance_id] = self._run(instance)
        return instance


def running(instance: Instance) -> Instance:
    """Return the instance in state running, with access."""
    access = LocalAccess(address="127.0.0.1", workdir=f"/nonexistent/{instance.id}")
    return replace(instance, state=InstanceState.RUNNING, access=access)


class ProviderContract:
    """Contract suite of providers: subclass it as ``Test...`` and implement :meth:`make_provider`.

    Attributes:
        request: arguments of a pool that the provider can satisfy.
    """

    request: ClassVar[dict[str, Any]] = {"nodes": 2}

    def make_provider(self) -> Provider:
        """Return the provider under test, with nothing launched."""
        raise NotImplementedError

    def test_offers_create_nothing(self) -> None:
        """Get the same offers twice for a request that can be satisfied."""
        provider = self.make_provider()

        async def scenario() -> None:
            offers = await provider.offers(parse_request(**self.request))
            again = await provider.offers(parse_request(**self.request))
            assert offers
            assert list(offers) == list(again)

        _run(provider, scenario())

    def test_launch_answers_every_key_with_an_instance_of_its_own(self) -> None:
        """Launch one instance per ledger key, each with a different id."""
        provider = self.make_provider()

        async def scenario() -> None:
            launched = await self._launch(provider)
            assert sorted(each.key for each in launched) == ["key-0", "key-1"]
            assert len({each.id for each in launched}) == len(launched)
            await provider.terminate([each.id for each in launched])

        _run(provider, scenario())

    def test_describe_keeps_the_order_and_knows_what_is_not_there(self) -> None:
        """Return instances in the requested order; an unknown id is gone, not an error."""
        provider = self.make_provider()

        async def scenario() -> None:
            ids = [each.id for each in await self._launch(provider)]
            seen = await provider.describe([ids[1], "never-was", ids[0]])
            assert [each.id for each in seen] == [ids[1], "never-was", ids[0]]
            assert seen[1].state is InstanceState.GONE
            assert InstanceState.GONE not in (seen[0].state, seen[2].state)
            await provider.terminate(ids)

        _run(provider, scenario())

    def test_terminated_instances_are_gone_and_the_others_are_not(self) -> None:
        """Confirm that a terminated instance is gone, and that its neighbour is not."""
        provider = self.make_provider()

        async def scenario() -> None:
            first, second = [each.id for each in await self._launch(provider)]
            await provider.terminate([first])
            seen = await provider.describe([first, second])
            assert seen[0].state is InstanceState.GONE
            assert seen[1].state is not InstanceState.GONE
            await provider.terminate([second])

        _run(provider, scenario())

    def test_terminate_is_idempotent_and_silent_when_gone(self) -> None:
        """Terminate twice, and an unknown id, without an error."""
        provider = self.make_provider()

        async def scenario() -> None:
            ids = [each.id for each in await self._launch(provider)]
            await provider.terminate(ids)
            await provider.terminate([*ids, "never-was"])

        _run(provider, scenario())

    def test_close_ends_no_machine_and_may_be_repeated(self) -> None:
        """Keep instances alive after the provider's sessions; terminate them in new ones."""
        provider = self.make_provider()

        async def scenario() -> None:
            ids = [each.id for each in await self._launch(provider)]
            await provider.close()
            await provider.close()
            assert all(each.state is not InstanceState.GONE for each in await provider.describe(ids))
            await provider.terminate(ids)

        _run(provider, scenario())

    def test_what_can_be_listed_is_what_was_launched_and_has_not_ended(self) -> None:
        """List a machine with its tag until it is gone, if the provider can list machines."""
        provider = self.make_provider()
        if not isinstance(provider, Sweepable):
            return

        async def scenario() -> None:
            first, second = await self._launch(provider)
            listed = {each.id: each.key for each in await provider.tagged()}
            assert listed.items() >= {(first.id, first.key), (second.id, second.key)}
            await provider.terminate([first.id])
            assert {first.id, second.id} & {each.id for each in await provider.tagged()} == {second.id}
            await provider.terminate([second.id])

        _run(provider, scenario())

    async def _launch(self, provider: Provider) -> Sequence[Instance]:
        offers = await provider.offers(parse_request(**self.request))
        order = LaunchOrder(pool_id="contract", keys=("key-0", "key-1"), timeout_s=60.0)
        return await provider.launch(offers, order)


def _run(provider: Provider, scenario: Coroutine[Any, Any, None]) -> None:
    async def closing() -> None:
        try:
            await scenario
        finally:
            await provider.close()

    asyncio.run(closing())
