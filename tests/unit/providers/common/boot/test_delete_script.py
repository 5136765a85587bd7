"""The script by which a machine deletes itself, run by a real shell with a stand-in for curl."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from skyward.providers._common.machine_boot import DeleteScript

TOKEN, URL = 'tok"en$HOME', "https://api.cloud.example/v2/things/12?a=b c"


@pytest.fixture
def script(tmp_path: Path) -> DeleteScript:
    return DeleteScript(path=f"{tmp_path}/a folder/end-key")


def run(command: tuple[str, ...], tmp_path: Path, stdin: str = "") -> None:
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(command, input=stdin, text=True, env=env, timeout=60, check=True)


def stand_in(tmp_path: Path, name: str, script: str) -> None:
    (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tmp_path / name).chmod(0o755)


def test_the_secret_is_kept_for_its_owner_only(script: DeleteScript, tmp_path: Path) -> None:
    secret = script.secret(URL, TOKEN)
    for _ in range(2):  # a newer one replaces it
        run(secret.command, tmp_path, stdin=secret.value)

    assert Path(script.path).read_text(encoding="utf-8") == secret.value
    assert Path(script.path).stat().st_mode & 0o777 == 0o600
    assert TOKEN not in str(secret.command)
    assert TOKEN not in repr(secret)


def test_the_token_is_in_no_argument_of_a_process(script: DeleteScript, tmp_path: Path) -> None:
    stand_in(tmp_path, "curl", f'echo "$@" >{tmp_path}/argv; cat >{tmp_path}/config')
    secret = script.secret(URL, TOKEN)
    run(secret.command, tmp_path, stdin=secret.value)
    run(script.end, tmp_path)

    config = (tmp_path / "config").read_text(encoding="utf-8").splitlines()
    assert config == ['header = "Authorization: Bearer tok\\"en$HOME"', f'url = "{URL}"']
    argv = (tmp_path / "argv").read_text(encoding="utf-8")
    assert (TOKEN in argv, "--request DELETE" in argv) == (False, True)


def test_a_machine_that_cannot_delete_itself_is_switched_off(script: DeleteScript, tmp_path: Path) -> None:
    stand_in(tmp_path, "curl", f"echo tried >>{tmp_path}/tried; cat >/dev/null; exit 22")
    stand_in(tmp_path, "sleep", "exit 0")
    stand_in(tmp_path, "shutdown", f'echo "$@" >{tmp_path}/off')
    secret = script.secret(URL, TOKEN)
    run(secret.command, tmp_path, stdin=secret.value)
    run(script.end, tmp_path)

    assert (tmp_path / "tried").read_text(encoding="utf-8").count("tried") == 20
    assert (tmp_path / "off").read_text(encoding="utf-8") == "-h now\n"


def test_a_machine_that_never_got_the_secret_is_switched_off(script: DeleteScript, tmp_path: Path) -> None:
    stand_in(tmp_path, "shutdown", f'echo "$@" >{tmp_path}/off')
    run(script.end, tmp_path)

    assert (tmp_path / "off").read_text(encoding="utf-8") == "-h now\n"
