"""The machine's own end: when it comes, however often the machine is rebooted, as the rendered script has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from skyward.providers._common.logins import KeyPair
from skyward.providers._common.machine_boot import cloud_config, time_to_live, time_to_live_unit

FIRST_BOOT = 1_800_000_000
LIFE_S = 3720
"""An hour, and two minutes for the node to end by itself."""
KEPT = "/var/lib/cloud/instance"


def config(*, root: bool = False) -> dict[str, Any]:
    keys = KeyPair(public="ssh-ed25519 AAAA", private="-----BEGIN")
    text = cloud_config(host_key=keys, user_key="ssh-ed25519 BBBB", time_to_live_s=3600.0, root=root)
    return cast("dict[str, Any]", json.loads(text.removeprefix("#cloud-config\n")))


def script() -> str:
    ((shell, option, command),) = config()["bootcmd"]
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
        (self.root / "calls").unlink(missing_ok=True)
        self.run(script().replace(KEPT, str(self.root / "instance")), now)
        return self.calls()

    def calls(self) -> list[str]:
        """The calls so far."""
        calls = self.root / "calls"
        return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []

    def run(self, command: str, now: int) -> None:
        """Run a script at that time."""
        assert "/var/lib" not in command
        env = {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "NOW": str(now), "CALLS": str(self.root / "calls")}
        subprocess.run(["sh", "-c", command], env=env, check=False, capture_output=True)

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


def test_a_script_of_the_first_boot_arms_the_same_end_at_every_boot(machine: Booting) -> None:
    machine.add("systemctl", 'echo "systemctl $*" >>"$CALLS"')
    own, unit = machine.root / "own", machine.root / "skyward-boot.service"
    own.mkdir()
    (own / "skyward-ends-at").write_text("1\n", encoding="utf-8")  # of the machine whose disk this was
    places = {"/var/lib/skyward": str(own), "/etc/systemd/system/skyward-boot.service": str(unit)}
    first = time_to_live_unit(3600.0)
    for place, here in places.items():
        first = first.replace(place, here)

    machine.run(first, FIRST_BOOT)
    assert machine.calls() == ["systemctl enable skyward-boot.service", *timer(LIFE_S)]

    command = unit.read_text(encoding="utf-8").partition("ExecStart=/bin/sh ")[2].splitlines()[0]
    machine.run(Path(command).read_text(encoding="utf-8"), FIRST_BOOT + 3000)
    assert machine.calls()[2:] == timer(720)


def test_another_end_than_the_switch_is_quoted(machine: Booting) -> None:
    end = ("sh", "-c", "curl -X DELETE 'https://cloud.example/machines/1' || shutdown -h now")
    machine.run(time_to_live(3600.0, end=end, folder=str(machine.root / "instance")), FIRST_BOOT)

    assert machine.calls() == [timer(LIFE_S)[0].replace("shutdown -h now", " ".join(end))]


def test_the_key_is_admitted_as_root_only_where_that_is_asked_for() -> None:
    assert [config(root=root)["disable_root"] for root in (True, False)] == [False, True]
    assert config()["ssh_authorized_keys"] == ["ssh-ed25519 BBBB"]
    assert config()["ssh_keys"] == {"ed25519_private": "-----BEGIN", "ed25519_public": "ssh-ed25519 AAAA"}
    assert next(iter(config())) == "bootcmd"  # armed before everything else


@pytest.mark.parametrize("text", [script(), time_to_live_unit(60.0)])
def test_shellcheck_finds_nothing(text: str) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    arguments = [shellcheck, "--shell=sh", "--severity=style", "-"]
    checked = subprocess.run(arguments, input=text, capture_output=True, encoding="utf-8", check=False)

    assert checked.stdout + checked.stderr == ""
