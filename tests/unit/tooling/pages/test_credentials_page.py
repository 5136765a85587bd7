"""The steps of docs/getting-started.md end with the lines that `skyward doctor` prints on the tests' accounts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from skyward.cli import main
from skyward.providers.registry import BUILT_IN, provider_type
from skyward.testing.aws import LocalEC2, use_ec2
from support.clouds.vendors import PROMPT, VENDORS, Vendor, opened

PAGE = (Path(__file__).parents[4] / "docs/getting-started.md").read_text(encoding="utf-8")


def shown(provider: str) -> list[str]:
    """The lines that the page shows under the command."""
    block = PAGE.partition(f"$ skyward doctor --provider {provider}\n")[2].partition("```")[0]
    return block.splitlines()


def printed(provider: str, endpoint_url: str) -> Sequence[str]:
    """The lines that the command prints about the provider: the last ones, after those of the installation."""
    chosen = ["--provider", provider, "--set", f"endpoint_url={endpoint_url}"]
    done = CliRunner().invoke(main, ["doctor", *chosen])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output.splitlines()[-len(shown(provider)) :]


SAMPLED = [
    # DigitalOcean's description takes a second of processor time to load.
    pytest.param(each, marks=pytest.mark.full if each.name == "digitalocean" else (), id=each.name)
    for each in VENDORS
]


@pytest.mark.parametrize("vendor", SAMPLED)
def test_doctor_prints_what_the_page_shows(vendor: Vendor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with opened(vendor, monkeypatch, tmp_path, provider=PROMPT) as cloud:
        assert shown(vendor.name) == printed(vendor.name, cloud.endpoint_url)


@pytest.mark.full  # EC2's test server costs 3 s
def test_doctor_checks_on_aws_what_the_page_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with LocalEC2(tmp_path, block=71) as ec2:
        use_ec2(ec2, monkeypatch, {"listing_s": 0.0})
        lines = printed("aws", ec2.endpoint_url)

    assert len(shown("aws")) == len(lines)
    for pattern, line in zip(shown("aws"), lines, strict=True):
        assert re.fullmatch(re.escape(pattern).replace("…", ".*"), line), line


def test_every_cloud_has_its_steps() -> None:
    steps = re.findall(r"^### (\w+)$", PAGE.partition("## Credentials")[2], re.MULTILINE)

    assert set(steps) == {provider_type(name).__name__ for name in BUILT_IN} - {"Local", "SSH"}
