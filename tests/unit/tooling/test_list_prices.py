"""``tools/list-prices``: what it prints is a list of the catalogue."""

from __future__ import annotations

import datetime as dt
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from support.clouds.vendors import opened, vendor_named

TABLE = """p5.48xlarge,192,2048,H100-80GB,8,,55.04
1A6000.10V,10,60,RTX-A6000,1,0.41,0.82
t3.medium,2,4,,0,,0.0416
"""


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    loader = SourceFileLoader("list_prices", str(Path(__file__).parents[3] / "tools/list-prices"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)

    def run(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["list-prices", *arguments])
        assert module.main() == 0
        (prices,) = tomllib.loads(capsys.readouterr().out)["lists"]
        return prices

    return run


def test_a_copied_table_becomes_a_list(printed: Any, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLE)

    prices = printed(
        *("table", str(tmp_path / "table.csv"), "--provider", "aws", "--region", "us-east-1"),
        *("--as-of", "2026-11-01", "--source", 'a "page"'),
    )

    assert (prices["provider"], prices["region"], prices["source"]) == ("aws", "us-east-1", 'a "page"')
    assert prices["as_of"] == dt.date(2026, 11, 1)
    assert prices["machines"] == [
        ["t3.medium", 2, 4.0, "", 0, 0.0, 0.0416],
        ["p5.48xlarge", 192, 2048.0, "H100-80GB", 8, 0.0, 55.04],
        ["1A6000.10V", 10, 60.0, "RTX-A6000", 1, 0.41, 0.82],
    ]


def test_a_vendor_that_is_asked_becomes_a_list(printed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(vendor_named("verda"), monkeypatch, tmp_path) as cloud:
        prices = printed("live", "verda", "--set", f"endpoint_url={cloud.endpoint_url}")

    machines = {row[0]: row[1:] for row in prices["machines"]}
    assert machines["1H100.80S.30V"] == [30, 120.0, "H100-SXM", 1, 0.8, 2.29]
    assert machines["CPU.4V.16G"] == [4, 16.0, "", 0, 0.0, 0.0279]
    assert prices["as_of"] == dt.datetime.now(tz=dt.UTC).date()
