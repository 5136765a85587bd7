"""``skyward offers`` for a newcomer, without an account and without a network; its filters and its width."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from skyward.api import offers as prices
from skyward.cli import main
from skyward.providers.base import Provider
from skyward.request.request import parse_request
from support.clouds.all_clouds import CLOUDS, AllClouds, all_clouds

NOBODY_LISTENS = "http://127.0.0.1:9"


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """Return the environment of a user without credentials and without a network."""
    for name in os.environ:
        if name.startswith(("AWS_", "DIGITALOCEAN_", "RUNPOD_", "VAST_", "VERDA_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, NOBODY_LISTENS)
        monkeypatch.delenv(name.upper(), raising=False)
    return dict(os.environ)


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, ["offers", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def rows(*arguments: str) -> list[dict[str, Any]]:
    return json.loads(run(*arguments, "--json").stdout)["offers"]


@pytest.mark.usefixtures("newcomer")
def test_what_four_h100s_cost_needs_no_account_and_no_network() -> None:
    done = run("--accelerator", "H100:4")

    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["provider", "type", "accelerators", "spot", "$/h", "rests", "on"]
    assert any("p5.48xlarge" in line and "8x H100" in line and " list " in line for line in lines)
    assert any("4x H100-SXM" in line for line in lines)
    assert "Credentials make it live" in lines[-1]
    assert done.stderr.startswith("runpod, vastai, verda: no public prices now: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments,providers",
    [
        (("--accelerator", "L40S", "--max-price", "1.7"), {"digitalocean", "verda"}),
        (("--accelerator", "L40S", "--region", "US-East"), {"aws"}),
        (("--accelerator", "L40S", "--spot"), {"verda"}),
        (("--accelerator", "L40S", "--provider", "aws"), {"aws"}),
        (("--cpu", "8", "--memory", "64GB"), {"aws"}),
    ],
)
@pytest.mark.usefixtures("newcomer")
def test_rows_are_filtered(arguments: tuple[str, ...], providers: set[str]) -> None:
    found = rows(*arguments)

    assert {row["provider"] for row in found} == providers
    assert {row["rests_on"] for row in found} == {"list"}
    assert all(row["price_age_s"] > 86400 for row in found)


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("--accelerator", "H100", "--max-price", "0.5"), "types would do without --max-price:\n  the cheapest: "),
        (
            ("--accelerator", "A100:8", "--spot"),
            "would do without --spot:\n  no price on spot is known of them\nOf aws",
        ),
        (
            ("--accelerator", "A100:8", "--region", "eu-west-1", "--spot"),
            "would do without --region and --spot:\n  their regions: us-east-1\n",
        ),
        (
            ("--accelerator", "L4", "--region", "eu-west-1", "--provider", "aws"),
            "would do without --region:\n  their regions: us-east-1\nOf aws only a list that is shipped with Skyward",
        ),
        (("--provider", "aws", "--set", "foo=1"), "Error: provider 'aws' has no parameter 'foo'; it has region, "),
        (("--provider", "runpod", "--set", "api_key=1"), "Error: --set api_key=: it is secret"),
        (("--set", "foo=1"), "Error: no provider takes these parameters:\nprovider 'aws' has no parameter 'foo'"),
        (("--accelerator", "GH200"), "no provider sells GH200; closest: H200"),
        (("--accelerator", "H100:16"), "the most on a machine is 8"),
        (("--accelerator", "H10"), "closest: H100"),
        (("--max-price", "-1"), "--max-price must be"),
    ],
)
@pytest.mark.usefixtures("newcomer")
def test_nothing_to_list_is_said_with_the_reason(arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)

    assert done.exit_code == 1
    assert words in done.output


@pytest.mark.usefixtures("newcomer")
def test_the_doctor_to_whom_offers_send_says_where_credentials_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "k" * 20)

    lines = CliRunner().invoke(main, ["doctor"]).stdout.splitlines()

    found = {line.split()[2].strip(":"): "no credentials found" in line for line in lines if " provider " in line}
    assert found == {"aws": True, "digitalocean": True, "runpod": False, "vastai": True, "verda": True}


@pytest.mark.usefixtures("newcomer")
def test_providers_without_a_parameter_are_named_beside_the_others() -> None:
    done = run("--accelerator", "L4", "--set", "profile=none")

    assert "provider 'verda' has no parameter 'profile'; it has" in done.stderr
    assert "provider 'aws'" not in done.stderr


def seconds_of(environment: Mapping[str, str], *arguments: str) -> float:
    began = time.monotonic()
    command = [sys.executable, "-m", "skyward", *arguments]
    subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    return time.monotonic() - began


@pytest.mark.parametrize("fault", ["vendors are silent", "names are not looked up"])
def test_a_network_that_hangs_delays_the_command_by_two_seconds(
    fault: str, newcomer: Mapping[str, str], tmp_path: Path
) -> None:
    asking = "offers", "--accelerator", "H100:4"
    without_network = seconds_of(newcomer, *asking)  # refused at once
    assert without_network < 1 + 3 * seconds_of(newcomer, "--help")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        if fault == "vendors are silent":
            proxy = f"http://127.0.0.1:{silent.getsockname()[1]}"
            environment = {**newcomer, "http_proxy": proxy, "https_proxy": proxy, "all_proxy": proxy}
        else:
            text = "import socket, time\nsocket.getaddrinfo = lambda *_, **__: time.sleep(50)\n"
            (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
            environment = {name: value for name, value in newcomer.items() if not name.endswith("_proxy")}
            environment["PYTHONPATH"] = str(tmp_path)
        took = seconds_of(environment, *asking)

    assert prices.LIMIT_S < took < prices.LIMIT_S + 1 + 2 * without_network


def test_boto3_is_not_imported_without_credentials(newcomer: Mapping[str, str]) -> None:
    program = (
        "import sys; from skyward.cli import main; main(['offers', '--accelerator', 'L4'], standalone_mode=False);"
        "print('boto3' in sys.modules, 'botocore' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], env=newcomer, capture_output=True, text=True, timeout=60, check=True
    )

    assert "g6.xlarge" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


def test_the_table_fits_80_columns(newcomer: Mapping[str, str]) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    command = [sys.executable, "-m", "skyward", "offers", "--accelerator", "H100:4"]
    with subprocess.Popen(command, env=newcomer, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65536):
                shown += chunk
        except OSError:  # the terminal's other end is closed
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    lines = [line.replace("\x1b[1m", "").replace("\x1b[0m", "").rstrip() for line in shown.decode().splitlines()]
    table = lines[: next(number for number, line in enumerate(lines) if line.startswith("no 4 H100"))]

    assert len(table) > 3
    assert max(map(len, table)) <= 80
    assert all(line[0] != " " for line in table)  # no cell is folded


@pytest.fixture
def clouds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh_cache: Path) -> Any:
    with all_clouds(monkeypatch, tmp_path, cache=ssh_cache) as opened:
        yield opened


async def test_five_clouds_with_accounts_are_live_and_sorted(clouds: AllClouds) -> None:
    def source(name: str) -> prices.PriceSource:
        def make() -> Provider:
            return clouds.provider(name)

        return prices.price_source(name, make)

    survey = await prices.survey_prices(
        map(source, CLOUDS), parse_request(cpu=2, memory="2GB", spot="if-available"), limit_s=30.0
    )

    assert survey.errors == {}
    assert {row.basis for row in survey.rows} == {prices.PriceBasis.LIVE}
    assert {row.provider for row in survey.rows} == set(CLOUDS)
    assert [row.cheapest for row in survey.rows] == sorted(row.cheapest for row in survey.rows)
    assert clouds.alive() == {}
