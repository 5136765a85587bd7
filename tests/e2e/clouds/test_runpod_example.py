"""The example for RunPod, as it is, with RunPod in containers of this machine."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import gallery
from skyward.testing.hosts import require_sshd
from support.clouds.vendors import PATH, VENDORS, opened

require_sshd()
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

EXAMPLE = "providers/runpod_pods.py"


def test_pods_are_found_where_they_are_in_stock_and_nothing_is_left(
    tmp_path: Path, ssh_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (vendor,) = [each for each in VENDORS if each.name == "runpod"]
    env = {"PATH": PATH, "PIP_CONFIG_FILE": str(ssh_cache / "pip.conf")}
    with opened(vendor, monkeypatch, tmp_path, machines=True, cache=ssh_cache, env=env) as cloud:
        monkeypatch.setattr("skyward.providers.runpod.API_URL", cloud.endpoint_url)
        monkeypatch.setattr(sys, "argv", [EXAMPLE, vendor.machine])
        runpy.run_path(str(gallery.EXAMPLES / EXAMPLE), run_name="__main__")
        assert cloud.left() == {}
    said = capsys.readouterr().out
    assert "node 2 of 2, no GPU" in said
    assert "sum of squares: 328350" in said
    gallery.compare(EXAMPLE, said, exactly=False)
