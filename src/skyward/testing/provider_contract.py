"""Contract suite of every provider."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Literal

from skyward.base.waiting import SYSTEM_CLOCK, NotYet, wait_until
from skyward.errors import CapacityError
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Provider
from skyward.providers.registry import make_provider, provider_settings
from skyward.request.request import parse_request
from skyward.testing.provider import NotedOrder

__all__ = ["Promise", "ProviderContract"]

Promise = Literal["lose_answer", "fail_create", "vendor_calls", "outlive_client", "reaches", "avoid", "made_again"]
"""Promise that only some providers can break: the names of hooks, ``avoid`` for :attr:`LaunchOrder.avoid`, and
``made_again`` for providers that no name registers."""

_RUNNING_S = 30.0


_Scenario = Callable[["ProviderContract", Provider], Coroutine[Any, Any, None]]


def _scenario(promise: Promise | None = None) -> Callable[[_Scenario], Callable[[ProviderContract], None]]:
    """Make a test of a coroutine that is given the provider, which is closed after it; skip one that does not apply."""

    def decorate(scenario: _Scenario) -> Callable[[ProviderContract], None]:
        async def run(contract: ProviderContract, provider: Provider) -> None:
            try:
                await scenario(contract, provider)
            finally:
                await provider.close()

        def test(self: ProviderContract) -> None:
            if promise not in self.does_not_apply:
                asyncio.run(run(self, self.make_provider()))

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return decorate


class ProviderContract:
    """Contract suite of providers: subclass it as ``Test...`` and implement :meth:`make_provider` and the hooks.

    Attributes:
        request: arguments of a pool that the provider can satisfy.
        polls: number of times that the machines are described in a row.
        calls_per_look: largest number of calls to the vendor for one ``describe`` of any number of machines.
        does_not_apply: promises that the provider cannot break, with the reason; their hooks are not called.
    """

    request: ClassVar[dict[str, Any]] = {"nodes": 2}
    polls: ClassVar[int] = 100
    calls_per_look: ClassVar[int] = 1
    does_not_apply: ClassVar[Mapping[Promise, str]] = {}

    def make_provider(self) -> Provider:
        """Return the provider under test, with nothing launched."""
        raise NotImplementedError

    def lose_answer(self, provider: Provider) -> None:
        """Let the next create call make its machine, and its answer get lost."""
        raise NotImplementedError

    def fail_create(self, provider: Provider) -> None:
        """Let the next create call fail with an error of the vendor's server, such as status 500, without effect."""
        raise NotImplementedError

    def vendor_calls(self, provider: Provider) -> int:
        """Return the number of calls to the vendor so far."""
        raise NotImplementedError

    async def outlive_client(self, provider: Provider, instances: Sequence[Instance]) -> None:
        """Let the client die and the time-to-live of the machines pass, without their client."""
        raise NotImplementedError

    async def passes_end_check(self, instance: Instance) -> bool:
        """Run the machine's end check, if it has one, and return whether it passed."""
        if not instance.end_check:
            return True
        assert instance.access is not None
        transport = instance.access.open()
        try:
            return (await transport.run(instance.end_check, timeout_s=_RUNNING_S)).exit_code == 0
        finally:
            await transport.close()

    async def reaches(self, provider: Provider, one: Instance, other: Instance) -> bool:
        """Try to reach a machine from another one, and return whether that works."""
        raise NotImplementedError

    @_scenario("made_again")
    async def test_another_process_makes_the_provider_again_from_its_name_and_settings(
        self, provider: Provider
    ) -> None:
        """Make the provider as a sweep does, from the ledger: by name, with the settings that are no secrets."""
        settings = provider_settings(provider)
        again = make_provider(provider.name, settings)
        assert (again.name, provider_settings(again)) == (provider.name, settings)

    @_scenario()
    async def test_offers_create_nothing(self, provider: Provider) -> None:
        """Get the same offers twice for a request that can be satisfied."""
        offers = await provider.offers(parse_request(**self.request))
        again = await provider.offers(parse_request(**self.request))
        assert offers
        assert list(offers) == list(again)

    @_scenario()
    async def test_launch_answers_every_key_with_an_instance_of_its_own(self, provider: Provider) -> None:
        """Launch one instance per ledger key, each with a different id."""
        launched = await self._launch(provider)
        assert sorted(each.key for each in launched) == ["key-0", "key-1"]
        assert len({each.id for each in launched}) == len(launched)
        await provider.terminate([each.id for each in launched])

    @_scenario()
    async def test_describe_keeps_the_order_and_knows_what_is_not_there(self, provider: Provider) -> None:
        """Return instances in the requested order; an unknown id is gone, not an error."""
        ids = [each.id for each in await self._launch(provider)]
        seen = await provider.describe([ids[1], "never-was", ids[0]])
        assert [each.id for each in seen] == [ids[1], "never-was", ids[0]]
        assert seen[1].state is InstanceState.GONE
        assert InstanceState.GONE not in (seen[0].state, seen[2].state)
        await provider.terminate(ids)

    @_scenario()
    async def test_terminated_instances_are_gone_and_the_others_are_not(self, provider: Provider) -> None:
        """Confirm that a terminated instance is gone, and that its neighbour is not."""
        first, second = [each.id for each in await self._launch(provider)]
        await provider.terminate([first])
        seen = await provider.describe([first, second])
        assert seen[0].state is InstanceState.GONE
        assert seen[1].state is not InstanceState.GONE
        await provider.terminate([second])

    @_scenario()
    async def test_terminate_is_idempotent_and_silent_when_gone(self, provider: Provider) -> None:
        """Terminate twice, and an unknown id, without an error."""
        ids = [each.id for each in await self._launch(provider)]
        await provider.terminate(ids)
        await provider.terminate([*ids, "never-was"])

    @_scenario()
    async def test_close_ends_no_machine_and_may_be_repeated(self, provider: Provider) -> None:
        """Keep instances alive after the provider's sessions; terminate them in new ones."""
        ids = [each.id for each in await self._launch(provider)]
        await provider.close()
        await provider.close()
        assert all(each.state is not InstanceState.GONE for each in await provider.describe(ids))
        await provider.terminate(ids)

    @_scenario()
    async def test_what_can_be_listed_is_what_was_launched_and_has_not_ended(self, provider: Provider) -> None:
        """List a machine with its tag until it is gone, if the provider can list machines."""
        if not provider.supports("tagged"):
            return
        first, second = await self._launch(provider)
        assert (await _listed(provider)).items() >= {(first.id, first.key), (second.id, second.key)}
        await provider.terminate([first.id])
        assert {first.id, second.id} & (await _listed(provider)).keys() == {second.id}
        await provider.terminate([second.id])

    @_scenario("lose_answer")
    async def test_a_create_without_an_answer_makes_one_machine_which_is_adopted(self, provider: Provider) -> None:
        """Launch an order in which the answer to one create call is lost: each key has one machine, a returned one."""
        assert provider.supports("tagged"), "a provider that rents machines can list them"
        self.lose_answer(provider)
        launched = {each.id: each.key for each in await self._launch(provider)}
        assert sorted(launched.values()) == ["key-0", "key-1"]
        assert await _listed(provider) == launched
        await provider.terminate([*launched])
        assert not await _listed(provider)

    @_scenario("fail_create")
    async def test_a_create_that_failed_without_effect_is_made_again_and_its_key_is_not_forgotten(
        self, provider: Provider
    ) -> None:
        """Launch an order in which the vendor's server fails once: every machine is there.

        A vendor that takes a create call twice as one gets the same key again; any other one gets another key, once the
        machine of the first is not listed in time. That key is reported, since its machine may appear still later.
        """
        assert provider.supports("tagged"), "a provider that rents machines can list them"
        order = NotedOrder(pool_id="contract", keys=("key-0", "key-1"), timeout_s=60.0)
        self.fail_create(provider)
        offers = await provider.offers(parse_request(**self.request))
        launched = {each.id: each.key for each in await provider.launch(offers, order)}
        assert sorted(launched.values()) == sorted(f"{key}{'-again' * (key in order.unseen)}" for key in order.keys)
        assert len(order.unseen) == len(order.reasons) <= 1
        assert all(provider.name.lower() in reason.lower() for reason in order.reasons)
        assert await _listed(provider) == launched
        await provider.terminate([*launched])

    @_scenario("vendor_calls")
    async def test_polling_costs_few_calls_however_many_machines_there_are(self, provider: Provider) -> None:
        """Describe all machines many times, with at most :attr:`calls_per_look` calls to the vendor each time."""
        ids = [each.id for each in await self._running(provider)]
        before = self.vendor_calls(provider)
        for _ in range(self.polls):
            await provider.describe(ids)
        assert self.vendor_calls(provider) - before <= self.polls * self.calls_per_look
        await provider.terminate(ids)

    @_scenario("outlive_client")
    async def test_a_machine_that_claims_to_end_itself_does(self, provider: Provider) -> None:
        """Let the client die: exactly the machines that claim it, and pass their end check, are gone.

        Machines that cost nothing claim it.
        """
        instances = await self._running(provider)
        ids = [each.id for each in instances]
        if all(each.offer.price_per_hour == 0 for each in instances):
            assert all(each.ends_itself for each in instances)
        else:
            ending = [each.ends_itself and await self.passes_end_check(each) for each in instances]
            await self.outlive_client(provider, instances)

            async def ended_as_claimed() -> bool | NotYet:
                gone = [each.state is InstanceState.GONE for each in await provider.describe(ids)]
                return gone == ending or NotYet(f"gone: {gone}; claimed: {ending}")

            # Not at once: a provider that lists machines at the vendor's pace may answer with its last list.
            await wait_until(ended_as_claimed, deadline_s=30, interval_s=0.2, what="the machines that end themselves")
        await provider.terminate(ids)

    @_scenario("reaches")
    async def test_machines_of_one_network_reach_each_other_and_no_others(self, provider: Provider) -> None:
        """Try every pair of machines: those of the same network, which has a name, reach each other."""
        instances = await self._running(provider)
        for one, other in itertools.permutations(instances, 2):
            expected = one.network == other.network != ""
            assert await self.reaches(provider, one, other) == expected, f"{one} to {other}"
        await provider.terminate([each.id for each in instances])

    @_scenario("avoid")
    async def test_an_avoided_host_gets_no_machine(self, provider: Provider) -> None:
        """Launch where a host is to be avoided: the machine is elsewhere, or there is no capacity."""
        (first,) = await self._running(provider, keys=("key-0",))
        await provider.terminate([first.id])
        assert first.host, "a machine whose host is not known cannot be avoided: say so in does_not_apply"
        try:
            (second,) = await self._running(provider, keys=("key-1",), avoid=frozenset({first.host}))
        except CapacityError:
            return
        assert second.host != first.host
        await provider.terminate([second.id])

    async def _launch(
        self,
        provider: Provider,
        keys: tuple[str, ...] = ("key-0", "key-1"),
        **order: Any,
    ) -> Sequence[Instance]:
        offers = await provider.offers(parse_request(**self.request))
        return await provider.launch(offers, LaunchOrder(pool_id="contract", keys=keys, timeout_s=60.0, **order))

    async def _running(
        self,
        provider: Provider,
        keys: tuple[str, ...] = ("key-0", "key-1"),
        avoid: frozenset[str] = frozenset(),
    ) -> Sequence[Instance]:
        """Launch machines and return their records once all run."""
        ids = [each.id for each in await self._launch(provider, keys, avoid=avoid)]

        async def up() -> Sequence[Instance] | NotYet:
            seen = await provider.describe(ids)
            waiting = [each.state.value for each in seen if each.state is not InstanceState.RUNNING]
            return NotYet(", ".join(waiting)) if waiting else seen

        return await wait_until(up, deadline_s=_RUNNING_S, interval_s=0.01, what="machines to run")


async def _listed(provider: Provider) -> Mapping[str, str]:
    """Return the keys of the listed machines by id, once a machine launched just now is listed."""
    await SYSTEM_CLOCK.sleep(provider.listing_s)
    return {each.id: each.key for each in await provider.tagged()}
