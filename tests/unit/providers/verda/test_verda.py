"""Verda's machines, from offers to their end, against a fake of its API."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    SkywardError,
    TerminationError,
)
from skyward.machine.ssh import SSHAccess
from skyward.providers import _verda_self_destruct as self_destruct
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer
from skyward.providers.registry import make_provider, provider_settings
from skyward.providers.verda import Verda
from skyward.request.request import parse_request
from skyward.testing.aws import Looks
from support.clouds.fake_cloud import FakeMachine
from support.clouds.rest_service import RestAnswer, RestCall, RestFault
from support.clouds.verda_api import CLIENT_SECRET, VerdaApi
from support.eventually import eventually

PROMPT = {"listing_s": 0.5, "unlisted_s": 0.5, "look_s": 0.02, "patience_s": 5.0}
POOL = "sky-pool"


@pytest.fixture
def verda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[VerdaApi]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with VerdaApi(looks=Looks(pending=0, ending=1)) as api:
        api.use(monkeypatch, Verda, **PROMPT)
        yield api


@asynccontextmanager
async def opened(api: VerdaApi, **settings: Any) -> AsyncGenerator[Verda]:
    provider = Verda(endpoint_url=api.endpoint_url, **settings)
    try:
        yield provider
    finally:
        await provider.close()


async def offered(provider: Verda, **asked: Any) -> Sequence[Offer]:
    return await provider.offers(parse_request(**asked))


async def launched(provider: Verda, *keys: str, **asked: Any) -> Sequence[Instance]:
    offers = await offered(provider, **(asked or {"machine": "CPU.4V.16G"}))
    return await provider.launch(offers, LaunchOrder(pool_id=POOL, keys=keys or ("key-0",), timeout_s=600.0))


# --- parameters and credentials -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"region": 3}, "region must be"),
        ({"region": ""}, "region must be"),
        ({"region": "FIN 01"}, "'FIN-03'"),
        ({"self_destruct": "yes"}, "self_destruct must be True or False"),
        ({"endpoint_url": 5}, "endpoint_url must be"),
        ({"endpoint_url": "api.verda.com"}, "a URL such as"),
    ],
)
def test_a_wrong_parameter_is_refused_with_its_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Verda(**settings)


def test_it_is_recreated_from_the_ledger_and_has_every_capability() -> None:
    provider = Verda(region="FIN-01", self_destruct=True)
    assert make_provider("verda", provider_settings(provider)) == provider
    for capability in ("check", "secret", "look_interval_s", "tagged", "tidy"):
        assert provider.supports(capability)


async def test_without_credentials_the_error_names_both_places(
    verda: VerdaApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VERDA_CLIENT_SECRET")
    monkeypatch.setenv("VERDA_HOME", str(tmp_path))
    async with opened(verda) as provider:
        with pytest.raises(AuthenticationError, match=r"VERDA_CLIENT_ID and VERDA_CLIENT_SECRET.*credentials"):
            await offered(provider)
        (tmp_path / "credentials").write_text(
            f"[default]\nverda_client_id = verda-test-client-id\nverda_client_secret = {CLIENT_SECRET}\n", "utf-8"
        )
        assert await offered(provider)


async def test_wrong_credentials_are_refused_once_and_never_repeated_in_the_message(
    verda: VerdaApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERDA_CLIENT_SECRET", "a-secret-that-is-wrong")
    async with opened(verda) as provider:
        with pytest.raises(AuthenticationError, match=r"console\.verda\.com") as raised:
            await offered(provider)
    assert "a-secret-that-is-wrong" not in repr(raised.value) + repr(raised.value.__cause__)
    assert verda.service.count("POST /oauth2/token") == 1


# --- offers -------------------------------------------------------------------------------------------------------


async def test_offers_are_wherever_it_is_available_on_each_market_the_cheapest_first(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        found = await offered(provider, machine="CPU.8V.32G")
        assert [(each.region, each.spot, each.price_per_hour) for each in found] == [
            ("FIN-02", True, 0.0168),
            ("ICE-01", True, 0.0168),
            ("FIN-01", False, 0.0558),
            ("FIN-02", False, 0.0558),
        ]
        assert all(each.island and each.on_demand_price_per_hour == 0.0558 for each in found)
        asked = [call.query for call in verda.service.calls if call.route == "GET /instance-availability"]
        assert asked == [{"is_spot": word, "isSpot": word} for word in ("true", "false")]
    async with opened(verda, region="ICE-01") as provider:
        assert {each.region for each in await offered(provider, machine="CPU.8V.32G")} == {"ICE-01"}


async def test_the_memory_of_eight_gpus_is_divided_and_one_gpu_is_not_bought_as_eight(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        (eight, *_) = await offered(provider, machine="8H100.80S.176V")
        assert (eight.spec.accelerator, eight.spec.accelerator_count) == ("H100-SXM", 8)
        assert eight.spec.accelerator_memory_gib == 80.0
        assert {each.spec.name for each in await offered(provider, accelerator="H100")} == {"1H100.80S.30V"}
        for held in (verda.market.available, verda.market.available_spot):
            for names in held.values():
                names[:] = [name for name in names if name != "1H100.80S.30V"]
        with pytest.raises(CapacityError, match=r"no 1H100.80S.30V .*machine=: 8H100.80S.176V in FIN-02"):
            await offered(provider, accelerator="H100")


@pytest.mark.parametrize(
    ("settings", "asked", "error", "words"),
    [
        ({"region": "us-east"}, {}, ConfigurationError, "region='us-east'.*FIN-01, FIN-02, ICE-01"),
        ({"region": "FIN-01"}, {"accelerator": "A100-40GB"}, CapacityError, "in FIN-01; it is in FIN-02"),
        ({}, {"accelerator": "MI300X"}, ConfigurationError, "MI300X.*nearest"),
        ({}, {"accelerator": "A100-80GB"}, ConfigurationError, "A100.*80 GiB.*A100-40GB"),
        ({}, {"machine": "1H100.80S.30"}, ConfigurationError, "closest: 1H100.80S.30V"),
    ],
)
async def test_a_request_that_cannot_be_met_names_what_can(
    verda: VerdaApi, settings: dict[str, Any], asked: dict[str, Any], error: type[SkywardError], words: str
) -> None:
    async with opened(verda, **settings) as provider:
        with pytest.raises(error, match=words):
            await offered(provider, **asked)


# --- launching ----------------------------------------------------------------------------------------------------


async def test_script_machine_volume_and_tags_are_made_in_that_order_with_a_fixed_price(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        await launched(provider, "key-0", machine="1V100.6V", spot="always")
        creates = [call for call in verda.service.calls if call.method == "POST"]
        assert [call.path for call in creates[1:]] == ["/sshkeys", "/scripts", "/instances"]
        script, order = creates[2].body, creates[3].body
        assert script["name"] == order["description"] == order["os_volume"]["name"] == f"skyward.{POOL}.key-0"
        assert order["startup_script_id"] in verda.scripts
        assert order["os_volume"]["on_spot_discontinue"] == "delete_permanently"
        assert (order["pricing"], order["contract"], order["hostname"]) == ("FIXED_PRICE", "SPOT", "key-0")
        assert order["image"] == "ubuntu-24.04-cuda-12.8-open-docker"
        assert {tag["key"]: tag["value"] for tag in order["tags"]} == {"skyward-pool": POOL, "skyward-key": "key-0"}
        await provider.terminate(verda.alive)


async def test_a_users_key_is_added_to_the_account_once_and_again_where_it_was_deleted(verda: VerdaApi) -> None:
    for added in (1, 1, 2):
        if added == 2:
            verda.keys.clear()
        async with opened(verda) as provider:
            await launched(provider)
            await provider.terminate(verda.alive)
        assert (verda.service.count("POST /sshkeys"), len(verda.keys)) == (added, 1)


async def test_machines_listen_on_the_loopback_address_and_show_the_derived_host_key(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        (made,) = await launched(provider)
        (seen,) = await provider.describe([made.id])
        assert isinstance(seen.access, SSHAccess)
        assert seen.access.bind == "127.0.0.1"
        assert (seen.network, seen.power_off, seen.ends_itself) == ("", (), False)
        (public,) = seen.access.target.host_keys
        (script,) = verda.scripts.values()
        assert f"echo '{public}' >/etc/ssh/ssh_host_ed25519_key.pub" in script["script"]
        await provider.terminate([made.id])


@pytest.mark.parametrize(
    ("tags", "fault"),
    [
        (True, RestFault(status=503, after=True, message="Service not available")),  # like a lack of capacity
        (False, RestFault(after=True)),
    ],
)
async def test_a_lost_answer_is_found_by_the_tags_else_by_the_description(
    verda: VerdaApi, tags: bool, fault: RestFault
) -> None:
    verda.tags_shown = tags
    verda.service.fail(fault, route="POST /instances")
    async with opened(verda) as provider:
        (made,) = await launched(provider)
        assert verda.alive == [made.id]
        assert verda.service.count("POST /instances") == 1
        await provider.terminate([made.id])
    assert verda.left() == {}


class TerseVerda(VerdaApi):
    """Answers to creations and deletions without content; records without volumes."""

    def _deploy(self, call: RestCall) -> RestAnswer:
        return replace(super()._deploy(call), body="")

    def _act(self, call: RestCall) -> RestAnswer:
        return replace(super()._act(call), body="Accepted")

    def _row(self, machine: FakeMachine) -> Mapping[str, Any]:
        return {**super()._row(machine), "os_volume_id": None, "volume_ids": []}


@pytest.fixture
def terse(monkeypatch: pytest.MonkeyPatch) -> Iterator[TerseVerda]:
    with TerseVerda(looks=Looks(pending=0, ending=1)) as api:
        api.use(monkeypatch, Verda, **PROMPT)
        yield api
        api.service.violations.clear()


async def test_a_creation_answered_without_an_id_is_found_by_its_key_and_deleted_with_its_volume(
    terse: TerseVerda,
) -> None:
    async with opened(terse) as provider:
        (made,) = await launched(provider)
        assert terse.alive == [made.id]
        await provider.describe([made.id])
        await provider.terminate([made.id])
        assert not any("volume_ids" in (call.body or {}) for call in terse.service.calls)
    assert terse.left() == {}


async def test_a_script_whose_answer_is_lost_is_taken_over_and_a_lost_one_is_made_again(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        for after in (True, False):
            verda.service.fail(RestFault(after=after), route="POST /scripts")
            (made,) = await launched(provider)
            assert len(verda.scripts) == 1
            await provider.terminate([made.id])
    assert verda.left() == {}


async def test_a_type_that_sells_out_after_the_offer_is_followed_by_the_next_and_leaves_no_script(
    verda: VerdaApi,
) -> None:
    async with opened(verda) as provider:
        offers = await offered(provider, cpu=4)
        verda.capacity["CPU.4V.16G"] = 0
        (made,) = await provider.launch(offers, LaunchOrder(pool_id=POOL, keys=("key-0",), timeout_s=60.0))
        assert made.offer.spec.name == "CPU.8V.32G"
        assert len(verda.scripts) == 1
        verda.capacity["CPU.8V.32G"] = 0
        with pytest.raises(CapacityError, match="No capacity available"):
            await provider.launch(offers, LaunchOrder(pool_id="sky-other", keys=("key-1",), timeout_s=60.0))
        assert len(verda.scripts) == 1
        await provider.terminate([made.id])
    assert verda.left() == {}


async def test_an_empty_balance_is_a_quota_error_that_names_the_console(verda: VerdaApi) -> None:
    verda.balance = 0.0
    async with opened(verda) as provider:
        with pytest.raises(QuotaError, match="Top up the balance"):
            await launched(provider)
    assert verda.left() == {}


# --- records ------------------------------------------------------------------------------------------------------


async def test_a_spot_machine_that_is_not_listed_any_more_was_preempted_and_its_volume_with_it(
    verda: VerdaApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(verda) as provider:
        made = await launched(provider, "key-0", machine="1V100.6V", spot="always")
        await provider.describe([made[0].id])
        verda.destroy(made[0].id)
        verda.machines[made[0].id].ending = 1
        (listed,) = await provider.describe([made[0].id])
        assert (listed.state, listed.preempted) == (InstanceState.GONE, True)
        monkeypatch.setattr(Verda, "unlisted_s", 0.0)
        (unlisted,) = await provider.describe([made[0].id])
        assert (unlisted.state, unlisted.preempted) == (InstanceState.GONE, True)
        await provider.terminate([made[0].id])
    assert verda.left() == {}


async def test_strangers_are_never_listed_nor_touched(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        (made,) = await launched(provider)
        order: dict[str, Any] = {**verda.machines[made.id].created, "description": "mine", "tags": []}
        stranger = verda.deploy(order)
        assert [each.id for each in await provider.tagged()] == [made.id]
        await provider.terminate([made.id])
        await provider.tidy(POOL)
        assert verda.alive == [stranger]
        verda.destroy(stranger)


# --- ending -------------------------------------------------------------------------------------------------------


async def test_a_machine_that_is_being_provisioned_is_deleted_once_verda_allows_it(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        verda.looks = Looks(pending=4, ending=0)
        (made,) = await launched(provider)
        await provider.terminate([made.id])
        deletions = [call for call in verda.service.calls if call.route == "PUT /instances"]
        assert [call.status for call in deletions] == [207, 207, 202] or deletions[-1].status == 202
        assert deletions[0].status == 207
    assert verda.left() == {}


async def test_each_item_of_an_answer_counts_and_a_refusal_names_its_machine(
    verda: VerdaApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verda, "termination_s", 3.0)
    async with opened(verda) as provider:
        good, bad = [each.id for each in await launched(provider, "key-0", "key-1")]
        await provider.describe([good, bad])
        verda.machines[bad].status, verda.machines[bad].pending = "provisioning", 10**6
        with pytest.raises(TerminationError, match="provisioning instance") as raised:
            await provider.terminate([good, bad])
        assert list(raised.value.instance_ids) == [bad]
        assert verda.alive == [bad]
        verda.machines[bad].pending = 0
        await provider.terminate([bad])
    assert verda.left() == {}


async def test_a_machine_deleted_by_somebody_else_is_gone_and_what_it_left_is_removed(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        (made,) = await launched(provider)
        await provider.describe([made.id])
        found = verda.machines[made.id]
        found.status = "discontinued"
        verda.end(found)  # without its volume, as the console does
        await provider.terminate([made.id])
        await provider.terminate([made.id, "never-was"])
    assert verda.left() == {}


async def test_a_machine_that_switched_itself_off_has_failed_and_is_deleted_all_the_same(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        (made,) = await launched(provider)
        await provider.describe([made.id])
        verda.machines[made.id].status = "offline"
        (seen,) = await provider.describe([made.id])
        assert (seen.state, seen.reason) == (InstanceState.FAILED, "offline")
        await provider.terminate([made.id])
    assert verda.left() == {}


async def test_cancelling_a_launch_leaves_nothing(verda: VerdaApi) -> None:
    loop = asyncio.get_running_loop()
    async with opened(verda) as provider:
        work = asyncio.ensure_future(launched(provider, "key-0", "key-1", "key-2"))

        def cancel(number: int, moment: str) -> None:
            if moment == "after" and verda.service.calls[number - 1].route == "POST /instances":
                verda.service.around = lambda number, moment: None
                loop.call_soon_threadsafe(work.cancel)

        verda.service.around = cancel
        with pytest.raises(asyncio.CancelledError):
            await work
        assert verda.machines
    assert verda.left() == {}


# --- self-destruct and checks -------------------------------------------------------------------------------------


async def test_a_machine_that_deletes_itself_gets_a_new_bearer_at_every_delivery(verda: VerdaApi) -> None:
    async with opened(verda, self_destruct=True) as provider:
        (made,) = await launched(provider)
        (seen,) = await provider.describe([made.id])
        assert seen.ends_itself
        assert "end-key-0.py" in seen.power_off[-1]
        first, second = [await provider.secret(seen) for _ in range(2)]
        assert first is not None
        assert second is not None
        bearers = [_facts(each.value)["secret"] for each in (first, second)]
        (script,) = verda.scripts.values()
        assert len({*bearers, _facts(script["script"])["secret"]}) == 3
        assert not {each for each in bearers if each in repr(first) + repr(second.command)}
        assert first.renewed_s == 1200.0
        await provider.terminate([made.id])
    async with opened(verda) as provider:
        assert await provider.secret(seen) is None


async def test_a_machine_deletes_itself_with_its_volume_even_if_its_script_is_gone(
    terse: TerseVerda, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(terse, self_destruct=True) as provider:
        (made,) = await launched(provider)
        (seen,) = await provider.describe([made.id])
        secret = await provider.secret(seen)
        assert secret is not None
        for name, value in _facts(secret.value).items():
            monkeypatch.setitem(self_destruct.FACTS, name, value)
        terse.service.fail(RestFault(), route="DELETE /scripts")
        with pytest.raises(ValueError, match="Expecting value"):  # the terse answer
            await asyncio.to_thread(self_destruct.delete)
        assert [*terse.left()] == ["scripts"]
        await provider.terminate([made.id])
    assert terse.left() == {}


async def test_the_run_for_a_former_delivery_ends_at_once_and_that_for_the_last_one_deletes_the_machine(
    verda: VerdaApi, tmp_path: Path
) -> None:
    async with opened(verda, self_destruct=True) as provider:
        (made,) = await launched(provider)
        (seen,) = await provider.describe([made.id])
        former, last = [await provider.secret(seen) for _ in range(2)]
        assert former is not None
        assert last is not None
        program = tmp_path / "end.py"
        program.write_text(last.value, encoding="utf-8")
        command = [sys.executable, str(program)]
        ended = await asyncio.to_thread(
            subprocess.run, [*command, _facts(former.value)["renewal"]], capture_output=True, timeout=60, check=True
        )
        assert (ended.stderr, [*verda.alive]) == (b"", [made.id])
        run = subprocess.Popen([*command, _facts(last.value)["renewal"]])
        try:
            for attempt in eventually(30):
                with attempt:
                    assert [*verda.alive] == []
        finally:
            run.kill()
            run.wait()
        await provider.terminate([made.id])
    assert verda.left() == {}


def _facts(program: str) -> dict[str, str]:
    (line,) = [each for each in program.splitlines() if each.startswith("FACTS = ")]
    found: dict[str, str] = json.loads(line.removeprefix("FACTS = "))
    return found


async def test_check_reports_credentials_balance_and_availability(verda: VerdaApi) -> None:
    async with opened(verda) as provider:
        assert [(each.what, each.state, each.fix) for each in await provider.check()] == [
            ("credentials", "ok", ""),
            ("balance", "ok", ""),
            ("availability", "ok", ""),
        ]
        verda.balance = 0.0
        assert [each.state for each in await provider.check()] == ["ok", "fail", "ok"]
        verda.clients.clear()
        verda.expire_bearers()
        (found,) = await provider.check()
        assert (found.what, found.state) == ("credentials", "fail")
    async with opened(verda, region="us-east") as provider:
        verda.clients["verda-test-client-id"] = CLIENT_SECRET
        *_, found = await provider.check()
        assert (found.what, found.state) == ("availability", "fail")
