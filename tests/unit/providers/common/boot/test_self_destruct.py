"""Programs by which machines end their own bill, run by a real shell with stand-ins for curl and systemd."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from skyward.providers._common.logins import make_key_pair
from skyward.providers._common.machine_boot import SelfDestruct, boot_script, delete_script, first_delivery

TOKEN, URL = 'tok"en$HOME', "https://api.cloud.example/v2/things/12?a=b c"


@pytest.fixture
def destruct(tmp_path: Path) -> SelfDestruct:
    return SelfDestruct(path=f"{tmp_path}/a folder/end-key")


def run(tmp_path: Path, *command: str, stdin: str = "") -> None:
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(command, input=stdin, text=True, env=env, check=True, timeout=60)


def stand_in(tmp_path: Path, name: str, script: str) -> None:
    (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tmp_path / name).chmod(0o755)


def test_a_newer_program_replaces_the_former_one_and_its_owner_alone_can_read_it(
    destruct: SelfDestruct, tmp_path: Path
) -> None:
    for token in ("old", TOKEN):
        secret = destruct.delivery(delete_script(URL, token))
        run(tmp_path, *secret.command, stdin=secret.value)

    assert Path(destruct.path).read_text(encoding="utf-8") == secret.value
    assert Path(destruct.path).stat().st_mode & 0o777 == 0o600
    assert TOKEN not in f"{secret.command} {secret!r}"


def test_a_delivery_schedules_the_end_for_the_case_that_no_newer_one_follows(
    destruct: SelfDestruct, tmp_path: Path
) -> None:
    stand_in(tmp_path, "systemd-run", f'echo "$@" >>{tmp_path}/runs')
    for renewal in ("first", "second"):
        run(tmp_path, *destruct.delivery("exit", renewal=renewal, stale_s=3000).command, stdin="exit")

    runs = (tmp_path / "runs").read_text(encoding="utf-8").splitlines()
    assert runs == [f"--no-block --on-active=3000 sh {destruct.path} {name}" for name in ("first", "second")]


def test_the_token_is_in_no_argument_of_a_process(destruct: SelfDestruct, tmp_path: Path) -> None:
    stand_in(tmp_path, "curl", f'echo "$@" >{tmp_path}/argv; cat >{tmp_path}/config')
    secret = destruct.delivery(delete_script(URL, TOKEN))
    run(tmp_path, *secret.command, stdin=secret.value)
    run(tmp_path, *destruct.end)

    config = (tmp_path / "config").read_text(encoding="utf-8").splitlines()
    assert config == ['header = "Authorization: Bearer tok\\"en$HOME"', f'url = "{URL}"']
    argv = (tmp_path / "argv").read_text(encoding="utf-8")
    assert (TOKEN in argv, "--request DELETE" in argv) == (False, True)


@pytest.mark.parametrize("delivered", [True, False])
def test_a_machine_that_cannot_delete_itself_is_switched_off(
    destruct: SelfDestruct, tmp_path: Path, delivered: bool
) -> None:
    stand_in(tmp_path, "curl", f"echo tried >>{tmp_path}/tried; cat >/dev/null; exit 22")
    stand_in(tmp_path, "sleep", "exit 0")
    stand_in(tmp_path, "shutdown", f'echo "$@" >{tmp_path}/off')
    (tmp_path / "tried").touch()
    if delivered:
        secret = destruct.delivery(delete_script(URL, TOKEN))
        run(tmp_path, *secret.command, stdin=secret.value)
    run(tmp_path, *destruct.end)

    assert (tmp_path / "tried").read_text(encoding="utf-8").count("tried") == (20 if delivered else 0)
    assert (tmp_path / "off").read_text(encoding="utf-8") == "-h now\n"


def test_a_first_boot_script_is_valid_shell_and_delivers_before_everything_else(
    destruct: SelfDestruct, tmp_path: Path
) -> None:
    delivery = destruct.delivery("echo it's\n")
    first = first_delivery(delivery)
    script = boot_script(host_key=make_key_pair(), time_to_live_s=60.0, end=destruct.end, first=first)
    run(tmp_path, "sh", "-n", stdin=script)
    run(tmp_path, "sh", stdin=first)
    assert script.index("END_OF_SECRET") < script.index("life=180") < script.index("ssh_host_ed25519_key")
    assert Path(destruct.path).read_text(encoding="utf-8") == delivery.value
