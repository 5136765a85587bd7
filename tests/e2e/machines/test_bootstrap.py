"""An environment made over real SSH, whose link breaks on the way."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from skyward.base.waiting import wait_until
from skyward.environment.bootstrap import bootstrap, quote
from skyward.environment.image import Image
from skyward.machine.ssh import SshTransport
from skyward.testing.hosts import SshHost, require_sshd, write_known_hosts
from support.chaos import ChaosProxy

pytestmark = pytest.mark.timeout(300)  # environments are built

require_sshd()

SECRET = "s3cret-passw0rd"

UV = f"""\
#!/bin/sh
for last; do :; done
case $1 in
--version) echo uv 0.9.0 ;;
venv)
    mkdir -p "$last/bin" "$last/lib/python3.{sys.version_info.minor}/site-packages"
    ln -s {quote(sys.executable)} "$last/bin/python"
    echo 'home = {sys.base_prefix}/bin' >"$last/pyvenv.cfg"
    echo {quote(next(path for path in sys.path if path.endswith("site-packages")))} \\
        >"$last/lib/python3.{sys.version_info.minor}/site-packages/these.pth"
    ;;
pip)
    echo "$$ $UV_INDEX" >>"$HOME/installing"
    until [ -e "$HOME/go-on" ]; do sleep 0.05; done
    ;;
esac
"""
"""An uv whose environments have what these tests have, and which installs until it is told to go on."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SshHost]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "uv").write_text(UV, encoding="utf-8")
    (programs / "uv").chmod(0o755)
    with SshHost(tmp_path / "host", path=f"{programs}:/usr/bin:/bin") as host:
        yield host


async def test_a_step_whose_connection_is_cut_ends_and_is_run_again_without_showing_a_secret(
    host: SshHost, tmp_path: Path
) -> None:
    image = Image(pip=["a"], env={"PIP_EXTRA_INDEX_URL": f"https://me:{SECRET}@127.0.0.1:9/simple"})
    steps: list[str] = []
    with ChaosProxy("127.0.1.2", (host.address, host.port)) as proxy:
        known_hosts = write_known_hosts(tmp_path / "known_hosts", host, through={proxy.place: host})
        transport = SshTransport(replace(host.target(proxy.place), known_hosts=str(known_hosts)))
        preparing = asyncio.create_task(
            bootstrap(image, transport, cache=str(tmp_path / "cache"), node=0, progress=steps.append)
        )
        (first,) = await installers(host, 1)
        shown = command_lines(host)
        proxy.cut()
        await ended(first)
        proxy.heal()
        await installers(host, 2)
        (host.home / "go-on").touch()
        environment = await preparing
        ran = await transport.run(
            [environment.python, "-c", "import skyward; print(skyward.__file__)"], env=environment.env, timeout_s=30
        )
        await transport.close()

    assert steps == ["deps", "skyward"]
    assert ran.stdout.startswith(f"{tmp_path}/cache/envs/"), ran.stderr
    assert shown
    assert not [part for part in shown if SECRET in part]
    assert not [
        path for path in (tmp_path / "cache").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def command_lines(host: SshHost) -> list[str]:
    """Every word of the command line of every process of the host; some end meanwhile."""
    words: list[str] = []
    for process in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            words += process.cmdline()
    return words


async def installers(host: SshHost, count: int) -> list[int]:
    notes = host.home / "installing"

    async def started() -> list[int] | None:
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
        assert all(line.endswith(f"https://me:{SECRET}@127.0.0.1:9/simple") for line in lines)
        return [int(line.split()[0]) for line in lines] if len(lines) == count else None

    return await wait_until(started, deadline_s=60, interval_s=0.02, what=f"installer {count}")


async def ended(pid: int) -> None:
    async def gone() -> bool | None:
        return not psutil.pid_exists(pid) or None

    await wait_until(gone, deadline_s=30, interval_s=0.02, what="the installer to end")
