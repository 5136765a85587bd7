"""Where a machine's Python and packages come from, with the real uv."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyward.environment import package_sources
from skyward.environment.bootstrap import quote
from skyward.environment.image import Image

SECRET = "s3cret-passw0rd"


def make_wheel(folder: Path, name: str = "skyward_test_tiny", text: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", text)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.mark.parametrize(
    ("requirement", "said"),
    [("no-such-package-here", "no-such-package-here was not found"), ("colorama==999.1", "999.1")],
)
async def test_a_requirement_that_cannot_be_had_shows_what_uv_says(machine: Any, requirement: str, said: str) -> None:
    machine.real_uv()

    error = await machine.failing(Image(pip=[requirement], env={"UV_NO_INDEX": "1"}))

    assert error.step == "deps"
    assert said in error.log_tail
    assert "exit code" in str(error)
    assert said in machine.read(error.log_path)


async def test_the_machines_own_pip_configuration_counts(machine: Any) -> None:
    machine.real_uv()
    make_wheel(machine.folder / "wheels")
    config = machine.folder / "home" / ".config" / "pip"
    config.mkdir(parents=True)
    (config / "pip.conf").write_text(f"[global]\nfind-links = {machine.folder}/wheels\nno-index = true\n")

    environment = await machine.prepare(Image(pip=["skyward-test-tiny==1.0"]))

    ran = await machine.run([environment.python, "-c", "import skyward_test_tiny"], timeout_s=30)
    assert ran.exit_code == 0, ran.stderr


async def test_a_folder_of_wheels_that_the_client_has_is_sent_once(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.real_uv()
    make_wheel(machine.folder / "client" / "wheels")
    (machine.folder / "client" / "wheels" / "notes.txt").touch()
    monkeypatch.chdir(machine.folder / "client")
    image = Image(pip=["skyward-test-tiny==1.0"], find_links=["wheels"], env={"UV_NO_INDEX": "1"})

    await machine.prepare(image)
    sent = [path for path in machine.puts if "wheels-" in path]
    await machine.prepare(image.merged(pip=["skyward-test-tiny"]))

    assert [Path(path).name for path in sent] == ["skyward_test_tiny-1.0-py3-none-any.whl"]
    assert [path for path in machine.puts if "wheels-" in path] == sent


async def test_torch_comes_from_the_other_indexes_where_its_own_is_out_of_reach(machine: Any) -> None:
    machine.stand_in_uv('echo "backend ${UV_TORCH_BACKEND-none}" >>"$HOME/tried"; [ -z "${UV_TORCH_BACKEND-}" ]')

    await machine.prepare(Image(pip=["torch==2.13.0"], env={"UV_TORCH_BACKEND": "auto"}))
    failed = await machine.failing(Image(pip=["torch==2.13.0", "a"], env={"UV_TORCH_BACKEND": "cu130"}))

    tried = machine.read(f"{machine.folder}/home/tried").splitlines()
    assert tried == ["backend auto", "backend none", "backend cu130"]
    assert failed.step == "deps"


async def test_equal_wheels_in_another_folder_are_the_same_environment(machine: Any) -> None:
    """A mirror's wheels lie in the cache folder of each user."""
    machine.real_uv()
    for folder in ("one", "other"):
        make_wheel(machine.folder / folder)
    (machine.folder / "other/skyward_test_tiny-1.0-py3-none-any.whl").write_bytes(
        (machine.folder / "one/skyward_test_tiny-1.0-py3-none-any.whl").read_bytes()
    )
    images = [
        Image(pip=["skyward-test-tiny==1.0"], find_links=[str(machine.folder / name)], env={"UV_NO_INDEX": "1"})
        for name in ("one", "other")
    ]

    first, second = [await machine.prepare(image) for image in images]

    assert first.python == second.python


async def test_changed_wheels_get_another_environment(machine: Any) -> None:
    machine.real_uv()
    wheels = machine.folder / "client"
    image = Image(pip=["skyward-test-tiny==1.0"], find_links=[str(wheels)], env={"UV_NO_INDEX": "1"})
    values: list[str] = []
    for text in ("x = 'old'", "x = 'new'"):
        make_wheel(wheels, text=text)
        environment = await machine.prepare(image)
        ran = await machine.run(
            [environment.python, "-c", "import skyward_test_tiny as tiny; print(tiny.x)"], timeout_s=30
        )
        values.append(ran.stdout.strip())

    assert values == ["old", "new"]


async def test_a_machine_with_nothing_gets_the_clients_uv_and_a_python_from_a_mirror(
    machine: Any, mirror: Mapping[str, str]
) -> None:
    (machine.folder / "bin" / "uv").unlink()
    steps: list[str] = []

    environment = await machine.prepare(Image(env=mirror), steps)

    assert steps == ["uv", "deps", "skyward"]
    assert f"{machine.cache}/sent/uv" in machine.puts
    ran = await machine.run([environment.python, "-c", "import sys; print(sys.base_prefix)"], timeout_s=30)
    assert ran.stdout.startswith(f"{machine.cache}/python/"), ran.stderr


async def test_where_nothing_can_be_had_the_error_says_what_is_missing(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.folder / "bin" / "uv").unlink()
    monkeypatch.setattr(package_sources, "client_uv", lambda: None)

    error = await machine.failing()

    assert error.step == "uv"
    assert "This machine has no uv, and no way to get it" in error.log_tail
    assert "https://docs.astral.sh/uv" in error.log_tail


async def test_a_python_that_uv_cannot_bring_is_named(machine: Any) -> None:
    machine.real_uv()
    (machine.folder / "bin" / f"python3.{sys.version_info.minor}").unlink()

    error = await machine.failing(Image(env={"UV_PYTHON_INSTALL_MIRROR": "file:///no/such/mirror"}))

    assert error.step == "deps"
    assert f"This machine has no Python 3.{sys.version_info.minor}, and uv could not bring one" in error.log_tail
    assert "UV_PYTHON_INSTALL_MIRROR" in error.log_tail


async def test_another_python_on_the_machine_is_left_alone(machine: Any) -> None:
    machine.add("python3", "echo 3.99.1")

    await machine.prepare()

    assert machine.calls(f"uv venv --python-preference only-managed --python 3.{sys.version_info.minor}") == 1


async def test_credentials_reach_the_installer_and_are_in_no_argument_file_or_error(machine: Any) -> None:
    machine.real_uv()
    index = f"http://me:{SECRET}@127.0.0.1:9/simple"
    uv, seen = machine.folder / "bin" / "real-uv", machine.folder.parent / f"{machine.folder.name}-seen"
    (machine.folder / "bin" / "uv").rename(uv)
    machine.add("uv", f'echo "$UV_INDEX $UV_DEFAULT_INDEX" >{quote(str(seen))}; exec {quote(str(uv))} "$@"')
    variables = {"PIP_EXTRA_INDEX_URL": index, "PIP_INDEX_URL": index, "UV_HTTP_RETRIES": "0"}

    error = await machine.failing(Image(pip=["no-such-package-here"], env=variables))

    assert machine.read(str(seen)) == f"{index} {index}\n"
    assert "http://127.0.0.1:9/simple" in error.log_tail or "***@127.0.0.1:9/simple" in error.log_tail
    assert SECRET not in str(error)
    assert SECRET not in str(machine.runs)
    assert SECRET.encode() not in machine.written()


async def test_credentials_in_a_machines_own_configuration_are_not_shown(machine: Any) -> None:
    machine.stand_in_uv('echo "at $UV_DEFAULT_INDEX"; exit 2')
    (machine.folder / "home" / ".pip").mkdir()
    (machine.folder / "home" / ".pip" / "pip.conf").write_text(f"[global]\nindex-url = https://me:{SECRET}@host/x\n")

    error = await machine.failing(Image(pip=["a"]))

    assert error.log_tail == "at https://***@host/x"
    assert SECRET not in str(error)
