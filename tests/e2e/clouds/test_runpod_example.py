"""The example for RunPod, as it is, with RunPod in containers of this machine."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import gallery
from skyward.testing.hosts import require_sshd
from support.clouds.vendors import VENDORS, opened_with_hosts

require_sshd()
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

EXAMPLE = "providers/runpod_pods.py"


def test_pods_are_found_where_they_are_in_stock_and_nothing_is_left(
    tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (vendor,) = [each for each in VENDORS if each.name == "runpod"]
    with opened_with_hosts(vendor, monkeypatch, tmp_path, ssh_cache, provider=None) as cloud:
        monkeypatch.setattr("skyward.providers.runpod.API_URL", cloud.endpoint_url)
        monkeypatch.setattr(sys, "argv", [EXAMPLE, vendor.machine])
        runpy.run_path(str(gallery.EXAMPLES / EXAMPLE), run_name="__main__")
        assert cloud.left() == {}
    said = capsys.readouterr().out
    assert "node 2 of 2, no GPU" in said
    assert "sum of squares: 328350" in said
    gallery.compare(EXAMPLE, said, exactly=False)
