"""``tools/probe-cloud`` on the fake clouds: it asks before it spends, spends little, and leaves nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from skyward.ledger.ledger import Ledger
from skyward.testing.hosts import require_sshd
from support.clouds.fake_cloud import FakeCloud
from support.clouds.vendors import BOOTED, PROMPT, Vendor, opened

FEW = {"user": "id -un", "cores": "nproc"}
"""Facts that cost no time and ask no network."""


def load() -> ModuleType:
    loader = SourceFileLoader("probe_cloud", str(Path(__file__).parents[3] / "tools/probe-cloud"))
    spec = importlib.util.spec_from_loader("probe_cloud", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["probe_cloud"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


Run = Callable[..., int]


@pytest.fixture(params=BOOTED)
def vendor(request: pytest.FixtureRequest) -> Vendor:
    return request.param


@pytest.fixture
def cloud(vendor: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    require_sshd()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with opened(vendor, monkeypatch, tmp_path, machines=True, provider=PROMPT) as cloud:
        yield cloud


@pytest.fixture
def run(vendor: Vendor, cloud: FakeCloud) -> Run:
    """Runs the tool with an answer to its question; its arguments come besides."""
    tool = load()

    def run(*arguments: str, answer: bool, limit_usd: float = 0.9, boot_s: float = 30.0) -> int:
        place = [f"--set=endpoint_url={cloud.endpoint_url}"]
        place += [f"--set={name}={value}" for name, value in vendor.settings.items()]
        return tool.main(
            [vendor.name, *place, *arguments],
            confirm=lambda question: answer,
            plan=tool.Plan(facts=FEW, limit_usd=limit_usd, boot_s=boot_s, watched_s=1.0),
        )

    return run


def created(cloud: FakeCloud) -> Sequence[str]:
    return [*cloud.machines]


def test_facts_are_printed_for_less_than_a_dollar_and_nothing_is_left(
    vendor: Vendor, cloud: FakeCloud, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    power_off = ["--power-off"] if os.getuid() == 0 else []  # else it asks sudo, which leads out of the fake machine

    status = run("--machine", vendor.machine, *power_off, answer=True)

    printed = capsys.readouterr().out
    facts = dict(line.split(": ", 1) for line in printed.splitlines())
    assert status == 0, printed
    assert facts["cores"] == str(os.cpu_count())
    assert "the ordered ssh-ed25519 after" in facts["host keys shown until then"]
    assert facts["left"].startswith("nothing")
    assert ("states once it powered itself off" in facts) == bool(power_off)
    assert facts.get("may end its own bill") == ("yes" if vendor.containers else None)
    assert cloud.alive == []
    assert cloud.left() == {}
    assert Ledger.of_user().open_entries() == ()
    assert 0 < cloud.service.bill.usd() < 1
    hidden = [*cloud.secrets, *(each.address for each in cloud.machines.values())]
    assert [each for each in hidden if each in printed] == []


def test_nothing_is_rented_without_a_yes(vendor: Vendor, cloud: FakeCloud, run: Run) -> None:
    assert run("--machine", vendor.machine, answer=False) == 0

    assert created(cloud) == []
    assert cloud.left() == {}


def test_a_dear_machine_is_refused_before_the_question(
    cloud: FakeCloud, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(answer=True, limit_usd=0.0001) == 1

    assert "name a cheaper one" in capsys.readouterr().err
    assert created(cloud) == []


def test_a_probe_that_fails_on_its_way_leaves_nothing(vendor: Vendor, cloud: FakeCloud, run: Run) -> None:
    cloud.room.impostors = True

    run("--machine", vendor.machine, answer=True, boot_s=4.0)

    assert len(created(cloud)) == 1
    assert cloud.alive == []
    assert cloud.left() == {}
    assert Ledger.of_user().open_entries() == ()
