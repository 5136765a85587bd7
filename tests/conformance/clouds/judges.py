"""Let vendors' own clients judge the providers on the fake clouds; write the page's part about it.

usage: PYTHONPATH=tests:tests/conformance python tests/conformance/clouds/judges.py [CLIENT...]    all, if none is named

Each client is installed in a throw-away environment, in which nothing of Skyward is. Outcomes are kept in
``build/conformance``: a client that is not named keeps those of its last run.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from suite import write_part

from skyward.base.waiting import NotYet, wait_until
from skyward.errors import UnreachableError
from skyward.machine.ssh import SSHAccess
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Provider
from skyward.request.request import parse_request
from support.clouds.booted_machine import SSH_PORT
from support.clouds.fake_cloud import FakeCloud
from support.clouds.rest_service import SPECS
from support.clouds.vendors import VENDORS, Vendor, opened

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
OUTCOMES = ROOT / "build/conformance/judges.json"
CLIENTS = {
    "pydo": "digitalocean",
    "apache-libcloud": "digitalocean",
    "verda": "verda",
    "vastai": "vastai",
    "openapi-python-client": "runpod",
}
"""The provider that each client judges."""
GENERATED = {"openapi-python-client": "runpod-rest-v2-openapi.json"}
"""Clients that are generated from a vendor's description."""

NODES = 3
POOL = "judged"

CHECKS = {
    "shows": "its list shows exactly the machines launched, with their addresses",
    "gone": "a machine that it deletes is gone for `describe`, no other is",
    "stranger": "a machine that it creates is in no list of the provider's, and outlives the pool",
    "nothing": "once the provider has ended its machines, it lists only its own",
}
"""Rows of the table."""

REMARKS = {
    "vastai": "VastAI's client sorts by one column: its `order` has one pair, the description asks for two.",
    "apache-libcloud": "Libcloud sends `user_data: null` where none is given; the description allows text only.",
}
"""Explanations of requests outside of a description."""

TEXT = """\
## Vendors' own clients

Skyward's tests of clouds run on fake vendors, which check every exchange against the vendor's description of its API.
So that a provider and its fake agree with more than each other, the vendor's own client, or one that many use, looks
at the same account. Each is installed in a throw-away environment. No run on the real thing has been made;
`tools/probe-cloud` is for users with an account.

RunPod's own client, `runpod` 1.12.0, is no judge: it makes calls of the vendor's GraphQL API only, and none of REST v2,
which Skyward uses. In its place is a client that openapi-python-client generates from RunPod's description of REST v2.
It refuses an answer that lacks a member or has an unknown word; it has no opinion of its own on what RunPod does.

| | {names} |
|---|{rules}
{rows}

{remarks}
"""


class Judge:
    """A vendor's client in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, verb: str, *arguments: str) -> Any:
        """Make one call of ``vendor_clients.py`` and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the client ended at {verb} {' '.join(arguments)}; see its traceback above")
        return json.loads(answer)

    def machines(self) -> dict[str, dict[str, Any]]:
        """Return the machines in its list."""
        return self.ask("list")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of one client's run.

    Attributes:
        version: the client's.
        checks: by key of :data:`CHECKS`: empty for agreement, else the difference.
        outside: requests of the client that break the vendor's description.
    """

    version: str
    checks: dict[str, str]
    outside: list[str]


@contextmanager
def judging(client: str, cloud: FakeCloud) -> Iterator[tuple[Judge, str]]:
    """Install a client and start it; gives it and its version."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "env")
        subprocess.run([ROOT / "tools/install", sys.executable, place, client], check=True)
        python = place / "bin/python"
        lookup = f"from importlib.metadata import version; print(version({client!r}))"
        version = subprocess.run([python, "-c", lookup], check=True, capture_output=True, text=True).stdout.strip()
        argv = [python, HERE / "vendor_clients.py", client, cloud.endpoint_url, *cloud.environment.values()]
        argv += [SPECS / GENERATED[client]] if client in GENERATED else []
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Judge(process), version
            finally:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()
                process.wait(60)


async def running(provider: Provider, vendor: Vendor) -> Sequence[Instance]:
    """Launch machines and return their records once all run."""
    offers = await provider.offers(parse_request(machine=vendor.machine, nodes=NODES))
    keys = tuple(f"judged-{number}" for number in range(NODES))
    made = await provider.launch(offers, LaunchOrder(pool_id=POOL, keys=keys, timeout_s=600.0))
    ids = [each.id for each in made]

    async def up() -> Sequence[Instance] | NotYet:
        seen = await provider.describe(ids)
        slow = [each.id for each in seen if each.state is not InstanceState.RUNNING]
        return NotYet(", ".join(slow)) if slow else seen

    return await wait_until(up, deadline_s=60.0, interval_s=0.1, what="machines to run")


async def judge(provider: Provider, vendor: Vendor, client: Judge) -> dict[str, str]:
    """Return the differences between a provider and a vendor's client, by key of :data:`CHECKS`."""
    ours = await running(provider, vendor)
    ids = [each.id for each in ours]
    checks: dict[str, str] = {}
    listed = {name: (row["address"], row.get("port", SSH_PORT)) for name, row in client.machines().items()}
    targets = {each.id: cast("SSHAccess", each.access).target for each in ours}
    launched = {name: (target.host, target.port) for name, target in targets.items()}
    checks["shows"] = "" if listed == launched else f"{listed}, launched {launched}"

    client.ask("delete", ids[0])
    checks["gone"] = await difference_in_states(provider, ids)

    stranger = client.ask("create", "stranger")
    tagged = [each.id for each in await provider.tagged()]
    await provider.terminate(ids)
    await provider.tidy(POOL)
    left = client.machines()
    checks["stranger"] = "" if stranger not in tagged and stranger in left else f"listed {tagged}, left {[*left]}"
    checks["nothing"] = "" if [*left] == [stranger] else f"{[*left]}"
    client.ask("delete", stranger)
    await provider.close()
    return checks


async def difference_in_states(provider: Provider, ids: Sequence[str]) -> str:
    """Return empty once the first machine is gone and the others run, else their last states.

    A machine that is not listed counts as pending for the first half minute, when vendors' lists may lag behind.
    """
    expected = [InstanceState.GONE, *[InstanceState.RUNNING] * (len(ids) - 1)]

    async def settled() -> bool | NotYet:
        seen = [each.state for each in await provider.describe(ids)]
        return seen == expected or NotYet(", ".join(each.value for each in seen))

    try:
        await wait_until(settled, deadline_s=90.0, interval_s=1.0, what="the deleted machine to be gone")
    except UnreachableError as error:
        return str(error)
    return ""


def run(client: str) -> Verdict:
    """Judge a client's vendor on its fake."""
    (vendor,) = [each for each in VENDORS if each.name == CLIENTS[client]]
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        opened(vendor, patch, Path(folder)) as cloud,
        judging(client, cloud) as (judge_, version),
    ):
        checks = asyncio.run(judge(vendor.provider(cloud), vendor, judge_))
        outside, cloud.service.violations[:] = [*cloud.service.violations], []
    return Verdict(version=version, checks=checks, outside=outside)


def page(verdicts: dict[str, dict[str, Any]]) -> str:
    """Return the part of the page."""
    names = [client for client in CLIENTS if client in verdicts]
    rows = [
        f"| {text} | {' | '.join('no' if verdicts[name]['checks'][key] else 'yes' for name in names)} |"
        for key, text in CHECKS.items()
    ]
    outside = " | ".join(str(len(verdicts[name]["outside"])) for name in names)
    rows.append(f"| of its requests, outside of the vendor's description | {outside} |")
    heads = [f"{name} {verdicts[name]['version']}, `{CLIENTS[name]}`" for name in names]
    remarks = " ".join(REMARKS.get(name, f"{name}'s are printed.") for name in names if verdicts[name]["outside"])
    return TEXT.format(names=" | ".join(heads), rules="---|" * len(names), rows="\n".join(rows), remarks=remarks)


def main() -> int:
    """Do what the arguments say; return the exit status."""
    verdicts = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}
    described = [each for each in CLIENTS if each not in GENERATED or (SPECS / GENERATED[each]).exists()]
    named = sys.argv[1:] or described
    for client in named:
        verdict = run(client)
        verdicts[client] = {"version": verdict.version, "checks": verdict.checks, "outside": verdict.outside}
        for breach in verdict.outside:
            print(f"{client}: {breach[:300]}")
    OUTCOMES.parent.mkdir(parents=True, exist_ok=True)
    OUTCOMES.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    write_part(page(verdicts), part="clouds/judges")
    wrong = [
        f"{client}: {CHECKS[key]}: {found}"
        for client in named
        for key, found in verdicts[client]["checks"].items()
        if found
    ]
    print("\n".join(["conformance: " + ("differences:" if wrong else "providers and clients agree"), *wrong]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
