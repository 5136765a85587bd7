"""The examples for clouds that have a fake, as they are."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

import gallery
import skyward as sky
from skyward.ledger.ledger import Ledger
from skyward.testing.hosts import require_sshd
from support.clouds.vendors import VENDORS, opened_with_hosts

require_sshd()
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("vendor", "arguments"),
    [("digitalocean", ["providers/digitalocean_droplets.py"]), ("vastai", ["providers/vastai_bids.py", "CPU"])],
    ids=["digitalocean", "vastai"],
)
def test_an_example_prints_its_results_and_leaves_nothing(
    vendor: str, arguments: list[str], ssh_cache: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    capsys, tmp_path = request.getfixturevalue("capsys"), request.getfixturevalue("tmp_path")
    (found,) = [each for each in VENDORS if each.name == vendor]
    with opened_with_hosts(found, monkeypatch, tmp_path, ssh_cache, provider=None) as cloud:
        monkeypatch.setattr(sky, found.kind.__name__, partial(found.kind, endpoint_url=cloud.endpoint_url))
        monkeypatch.setattr(sys, "argv", arguments)

        runpy.run_path(str(gallery.EXAMPLES / arguments[0]), run_name="__main__")

        said = capsys.readouterr().out
        assert cloud.left() == {}
    assert "node 1 of 2: Linux" in said
    assert "sum of squares: 328350" in said
    assert "cost: $0." in said
    assert list(Ledger.of_user().open_entries()) == []
    gallery.compare(arguments[0], said, exactly=False)
