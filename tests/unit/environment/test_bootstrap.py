"""How a machine gets its environment: what is done once, what again, and what is said when it fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward.base.waiting import wait_until
from skyward.environment import bootstrap as module
from skyward.environment import bootstrap as steps_module
from skyward.environment.bootstrap import quote
from skyward.environment.image import Image
from skyward.errors import BootstrapError, UnreachableError


async def test_each_step_is_told_as_it_begins_and_the_code_is_the_clients(machine: Any) -> None:
    steps: list[str] = []

    environment = await machine.prepare(steps=steps)

    assert steps == ["deps", "skyward"]
    assert environment.python.startswith(f"{machine.cache}/envs/")
    assert environment.env["PATH"] == f"{Path(environment.python).parent}:{machine.folder}/bin"
    ran = await machine.run([environment.python, "-c", "import skyward; print(skyward.__file__)"], timeout_s=30)
    assert ran.stdout.startswith(str(Path(environment.python).parents[1]))


async def test_a_prepared_machine_is_asked_once_and_sent_nothing(machine: Any) -> None:
    environment = await machine.prepare()
    machine.runs.clear()
    machine.puts.clear()
    steps: list[str] = []

    again = await machine.prepare(steps=steps)

    assert again == environment
    assert (len(machine.runs), machine.puts, steps) == (1, [], [])


async def test_nodes_that_prepare_at_once_build_once(machine: Any) -> None:
    environments = await asyncio.gather(*(machine.prepare(Image(pip=["a"])) for _ in range(3)))

    assert len({environment.python for environment in environments}) == 1
    assert machine.calls("uv venv") == 1
    assert machine.calls("uv pip install") == 1


async def test_another_clients_code_gets_another_environment(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await machine.prepare()
    other = replace(module.own_wheel(), digest="fedcba9876543210")
    monkeypatch.setattr(module, "own_wheel", lambda: other)

    assert (await machine.prepare()).python != first.python


async def test_an_environment_whose_interpreter_is_gone_is_built_again(machine: Any) -> None:
    environment = await machine.prepare()
    machine.unlink(environment.python)

    assert await machine.prepare() == environment
    assert machine.calls("uv venv") == 2


async def test_a_build_that_was_cut_short_leaves_no_process_and_is_not_used(machine: Any) -> None:
    pid = machine.folder / "pid"
    machine.stand_in_uv(f"echo $$ >{quote(str(pid))}; exec sleep 1000")
    building = asyncio.create_task(machine.prepare(Image(pip=["a"])))

    async def hangs() -> int | None:
        text = pid.read_text(encoding="utf-8") if pid.exists() else ""
        return int(text) if text.strip() else None

    installer = await wait_until(hangs, deadline_s=30, interval_s=0.02, what="the installer to hang")
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building

    async def ended() -> bool | None:
        return not psutil.pid_exists(installer) or None

    await wait_until(ended, deadline_s=10, interval_s=0.02, what="the installer to end")
    machine.stand_in_uv()
    await machine.prepare(Image(pip=["a"]))
    assert machine.calls("uv venv") == 2


async def test_a_step_that_hangs_is_ended_at_its_deadline_and_shows_its_log(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._DEADLINES_S, "deps", 2.0)  # type: ignore[index]
    machine.stand_in_uv("echo Resolving a; exec sleep 1000")

    error = await machine.failing(Image(pip=["a"]))

    assert error.step == "deps"
    assert "node 2 failed at step 'deps': its deadline of 2 s passed. Check the image's pip requirements" in str(error)
    assert error.log_tail == "Resolving a"
    assert machine.read(error.log_path) == "Resolving a\n"


async def test_a_step_whose_link_drops_is_run_again(machine: Any) -> None:
    machine.drops = ["deps", "skyward-0123456789abcdef.whl", "skyward", "server"]
    steps: list[str] = []

    await machine.prepare(Image(pip=["a"]), steps)

    assert machine.drops == []
    assert steps == ["deps", "skyward"]
    assert machine.calls("uv pip install") == 1


async def test_a_step_that_goes_on_without_the_link_is_waited_for(machine: Any) -> None:
    machine.cuts = ["deps"]

    await machine.prepare(Image(pip=["a"]))

    (cut,) = await asyncio.gather(*machine.going_on)
    assert [run[-2] for run in machine.runs].count("deps") == 2
    assert machine.calls("uv venv") == machine.calls("uv pip install") == 1
    assert cut.exit_code == 0


async def test_a_link_that_stays_down_is_an_error_at_the_deadline(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._DEADLINES_S, "deps", 0.5)  # type: ignore[index]
    monkeypatch.setattr(steps_module, "GRACE_S", 0.5)
    machine.drops = ["deps"] * 100

    error = await machine.failing()

    assert error.step == "deps"
    assert "its deadline of 0.5 s passed" in str(error)
    assert "the link is down" in str(error)


async def test_a_machine_that_cannot_be_reached_at_all_says_so_at_once(machine: Any) -> None:
    machine.drops = ["--"]

    with pytest.raises(UnreachableError, match="the link is down"):
        await machine.prepare()


async def test_a_folder_that_cannot_be_written_is_named_with_its_disk(machine: Any) -> None:
    machine.cache.touch()

    error = await machine.failing()

    assert error.step == "uv"
    assert f"{machine.cache}" in error.log_tail
    assert "Avail" in error.log_tail
    assert "Check that the machine's cache folder can be written" in str(error)


async def test_a_full_disk_is_shown(machine: Any) -> None:
    machine.stand_in_uv("echo 'No space left on device (os error 28)'; exit 2")

    error = await machine.failing(Image(pip=["a"]))

    assert "No space left on device" in error.log_tail
    assert "Avail" in error.log_tail


async def test_a_file_that_cannot_be_sent_is_an_error_of_its_step(machine: Any) -> None:
    machine.cache.mkdir()
    (machine.cache / "sent").touch()

    error = await machine.failing()

    assert error.step == "skyward"
    assert "Check the space and the permissions there" in str(error)


async def test_apt_packages_without_the_rights_fail_before_anything_is_done(machine: Any) -> None:
    machine.add("id", "case $1 in -u) echo 1000 ;; *) echo somebody ;; esac")
    machine.add("apt-get", "")

    error = await machine.failing(Image(apt=["libfoo"], pip=["a"]))

    assert error.step == "apt"
    assert "somebody is neither root nor may use sudo without a password here" in str(error)
    assert "sudo apt-get install libfoo" in str(error)
    assert (len(machine.runs), machine.calls("uv venv"), machine.calls("apt-get")) == (1, 0, 0)


async def test_apt_packages_where_there_is_no_apt_are_an_error(machine: Any) -> None:
    assert "this machine has no apt-get" in str(await machine.failing(Image(apt=["libfoo"])))


async def test_apt_packages_that_are_there_need_no_rights(machine: Any) -> None:
    machine.add("id", "case $1 in -u) echo 1000 ;; *) echo somebody ;; esac")
    machine.add("dpkg-query", "echo 'ii 1.0-2'")
    steps: list[str] = []

    await machine.prepare(Image(apt=["libfoo", "libbar=1.0-2"]), steps)

    assert "apt" not in steps
    with pytest.raises(BootstrapError, match="neither root"):
        machine.add("apt-get", "")
        await machine.prepare(Image(apt=["libbar=1.1"]))


async def test_apt_packages_are_installed_as_root(machine: Any) -> None:
    there = quote(str(machine.folder / "there"))
    machine.add("id", "case $1 in -u) echo 1000 ;; *) echo somebody ;; esac")
    machine.add("sudo", 'shift; exec "$@"')
    machine.add("apt-get", f'case "$*" in *install*) echo >{there} ;; esac')
    machine.add("dpkg-query", f"[ -e {there} ] && echo 'ii 1'")
    steps: list[str] = []

    await machine.prepare(Image(apt=["libfoo"]), steps)

    assert steps[0] == "apt"
    assert machine.calls("sudo -n env LC_ALL=C apt-get update") == 1
    assert machine.calls("apt-get -o DPkg::Lock::Timeout=600 install -y --no-install-recommends -- libfoo") == 1


async def test_variables_that_a_shell_keeps_to_itself_do_no_harm(machine: Any) -> None:
    await machine.prepare(Image(env={"UID": "7", "IFS": "/", "root": "/nowhere", "PPID": "x", "A": 'a"$b\nc'}))
