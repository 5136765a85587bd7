"""The machine's own end: when it comes, however often the machine is rebooted, as the rendered script has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyward.providers.aws.boot import KeyPair, user_data

FIRST_BOOT = 1_800_000_000
LIFE_S = 3720
"""An hour, and two minutes for the node to end by itself."""
KEPT = "/var/lib/cloud/instance"


def script() -> str:
    text = user_data(host_key=KeyPair(public="", private=""), user_key="", time_to_live_s=3600.0)
    ((shell, option, command),) = json.loads(text.removeprefix("#cloud-config\n"))["bootcmd"]
    assert (shell, option) == ("sh", "-c")
    return str(command)


@dataclass(frozen=True)
class Booting:
    """A machine whose programs are fakes; its folder takes the place of cloud-init's.

    Attributes:
        root: where all of it is.
    """

    root: Path

    @property
    def kept(self) -> Path:
        """The file that outlives a reboot."""
        return self.root / "instance" / "skyward-ends-at"

    def boot(self, now: int) -> list[str]:
        """What one boot arms, as the words of each call."""
        calls = self.root / "calls"
        calls.unlink(missing_ok=True)
        command = script().replace(KEPT, str(self.root / "instance"))
        assert KEPT not in command
        env = {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "NOW": str(now), "CALLS": str(calls)}
        subprocess.run(["sh", "-c", command], env=env, check=False, capture_output=True)
        return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []

    def add(self, name: str, text: str) -> None:
        """Have a program of that name."""
        program = self.root / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        program.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Booting:
    (tmp_path / "bin").mkdir()
    (tmp_path / "instance").mkdir()
    machine = Booting(tmp_path)
    machine.add("date", 'echo "$NOW"')
    machine.add("systemd-run", 'echo "systemd-run $*" >>"$CALLS"')
    machine.add("shutdown", 'echo "shutdown $*" >>"$CALLS"')
    machine.add("sync", "")
    return machine


def timer(seconds: int) -> list[str]:
    unit = "--no-block --unit=skyward-time-to-live --timer-property=DefaultDependencies=no"
    return [f"systemd-run {unit} --on-active={seconds} shutdown -h now"]


def test_the_first_boot_arms_the_whole_time(machine: Booting) -> None:
    assert machine.boot(FIRST_BOOT) == timer(LIFE_S)
    assert machine.kept.read_text(encoding="utf-8") == f"{FIRST_BOOT + LIFE_S}\n"


@pytest.mark.parametrize(("after_s", "left_s"), [(1, 3719), (3000, 720), (3720, 1), (9000, 1)])
def test_a_reboot_arms_what_is_left(machine: Booting, after_s: int, left_s: int) -> None:
    machine.boot(FIRST_BOOT)
    machine.boot(FIRST_BOOT + after_s // 2)

    assert machine.boot(FIRST_BOOT + after_s) == timer(left_s)


def test_a_clock_that_was_set_back_puts_nothing_off_beyond_the_whole_time(machine: Booting) -> None:
    machine.boot(FIRST_BOOT)

    assert machine.boot(FIRST_BOOT - 10**6) == timer(LIFE_S)


@pytest.mark.parametrize("found", ["", "soon", "-5", "18e8"])
def test_a_damaged_file_is_as_good_as_none(machine: Booting, found: str) -> None:
    machine.kept.write_text(found, encoding="utf-8")

    assert machine.boot(FIRST_BOOT) == timer(LIFE_S)
    assert machine.boot(FIRST_BOOT + 20) == timer(LIFE_S - 20)


def test_a_machine_that_cannot_keep_the_moment_arms_its_end_all_the_same(machine: Booting) -> None:
    machine.kept.parent.rmdir()

    assert machine.boot(FIRST_BOOT) == timer(LIFE_S)


def test_without_systemd_shutdown_itself_takes_the_minutes_that_are_left(machine: Booting) -> None:
    machine.add("systemd-run", "exit 1")

    assert machine.boot(FIRST_BOOT) == ["shutdown -h +62"]
    assert machine.boot(FIRST_BOOT + 3601) == ["shutdown -h +2"]


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    arguments = [shellcheck, "--shell=sh", "--severity=style", "-"]
    checked = subprocess.run(arguments, input=script(), capture_output=True, encoding="utf-8", check=False)

    assert checked.stdout + checked.stderr == ""
