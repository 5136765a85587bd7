"""When the running interpreter will do, and how another environment is built when it will not."""

from __future__ import annotations

import asyncio
import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from skyward.environment import local_environment
from skyward.environment.image import Image
from skyward.environment.installed import is_satisfied
from skyward.environment.local_environment import prepare_environment
from skyward.errors import BootstrapError, UnreachableError
from skyward.machine.access import Completed
from skyward.machine.local import LocalAccess, LocalTransport


@pytest.mark.parametrize(
    "requirements",
    [
        [],
        ["packaging"],
        ["Packaging>=20", "pytest"],
        ["dask[distributed]"],
        ["packaging==1; python_version < '3'"],
        ["msgpack>=1.0,!=1.0.5"],
    ],
)
def test_the_running_interpreter_will_do(requirements: Sequence[str]) -> None:
    assert is_satisfied(requirements)


@pytest.mark.parametrize(
    "requirement",
    [
        "no-such-package-here",
        "packaging<1",
        "packaging @ https://example.invalid/packaging.whl",
        "./local.whl",
        "import-linter[ui]>=9999",
    ],
)
def test_the_running_interpreter_will_not_do(requirement: str) -> None:
    assert not is_satisfied(["pytest", requirement])


def test_an_extra_whose_packages_are_missing_is_not_satisfied() -> None:
    assert not is_satisfied(["coverage[toml]"])
    assert not is_satisfied(["httpx[http2]"])
    assert not is_satisfied(["psutil[dev]"])


class Recorder:
    """A transport that only writes down what it is asked to run, and makes the folder that venv would."""

    def __init__(self, *answers: Completed | Exception) -> None:
        self.ran: list[list[str]] = []
        self._answers = list(answers)

    async def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float
    ) -> Completed:
        self.ran.append(list(argv))
        if "venv" in argv:
            os.makedirs(f"{argv[-1]}/lib/python3.11/site-packages", exist_ok=True)
        answer = self._answers.pop(0) if self._answers else Completed(exit_code=0, stdout="", stderr="")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def put(self, data: Any, path: str, *, mode: int = 0o600) -> None:
        raise NotImplementedError

    async def forward(self, host: str, port: int) -> tuple[str, int]:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


OK = Completed(exit_code=0, stdout="", stderr="")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def prepare(image: Image, transport: Any, steps: list[str] | None = None) -> str:
    heard = [] if steps is None else steps
    return asyncio.run(prepare_environment(image, transport, node=1, progress=heard.append))


def test_a_satisfied_image_uses_the_running_interpreter_and_runs_nothing() -> None:
    recorder = Recorder()

    assert prepare(Image(pip=["pytest"]), recorder) == sys.executable
    assert recorder.ran == []


def test_an_environment_is_built_once_and_reused() -> None:
    steps: list[str] = []
    first, second = Recorder(), Recorder()
    image = Image(pip=["no-such-package-here"])

    python = prepare(image, first, steps)

    assert steps == ["uv", "deps", "skyward"]
    assert python in first.ran[-1]
    assert "no-such-package-here" in first.ran[-1]
    assert prepare(image, second) == python
    assert second.ran == []


def test_nodes_that_prepare_at_once_build_once() -> None:
    recorder = Recorder()
    image = Image(pip=["no-such-package-here"])

    async def scenario() -> None:
        await asyncio.gather(
            *(prepare_environment(image, recorder, node=rank, progress=lambda step: None) for rank in range(3))
        )

    asyncio.run(scenario())
    assert sum("install" in argv for argv in recorder.ran) == 1


def test_a_failed_install_says_so_with_the_logs_tail_and_is_tried_again() -> None:
    image = Image(pip=["no-such-package-here"])
    failed = Completed(exit_code=1, stdout="", stderr="No matching distribution")

    with pytest.raises(BootstrapError, match="node 1 on this machine failed at step 'deps': exit code 1") as raised:
        prepare(image, Recorder(OK, failed))

    assert raised.value.step == "deps"
    assert "No matching distribution" in raised.value.log_tail
    assert "No matching distribution" in Path(raised.value.log_path).read_text()
    again = Recorder()
    prepare(image, again)
    assert again.ran


def test_an_install_past_its_deadline_is_a_bootstrap_error() -> None:
    with pytest.raises(BootstrapError, match="too slow"):
        prepare(Image(pip=["no-such-package-here"]), Recorder(OK, UnreachableError("too slow")))


def test_the_uv_next_to_the_interpreter_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    recorder = Recorder()

    python = prepare(Image(pip=["no-such-package-here"]), recorder)

    assert recorder.ran[0][:2] == [find_uv_bin(), "venv"]
    assert recorder.ran[1][:5] == [find_uv_bin(), "pip", "install", "--python", python]


def test_without_the_package_the_uv_on_the_path_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "uv", None)
    recorder = Recorder()

    prepare(Image(pip=["no-such-package-here"]), recorder)

    assert recorder.ran[0][0] == str(uv)


def test_without_any_uv_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "uv", None)

    with pytest.raises(BootstrapError, match="there is no uv here; run `pip install uv`"):
        prepare(Image(pip=["no-such-package-here"]), Recorder())


def test_a_real_environment_has_the_package_and_the_clients_skyward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _make_wheel(wheels, "skyward_test_tiny")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(local_environment, "engine_pins", tuple)
    workdir = tmp_path / "node"
    transport = LocalTransport(LocalAccess(address="127.0.0.1", workdir=str(workdir)))

    python = prepare(Image(pip=["skyward-test-tiny==1.0"], find_links=[str(wheels)]), transport)
    probe = "import skyward_test_tiny, skyward.errors; print(skyward.errors.__file__)"
    ran = asyncio.run(transport.run([python, "-c", probe], timeout_s=60))

    assert ran.exit_code == 0, ran.stderr
    assert Path(ran.stdout.strip()).is_relative_to(Path(python).parents[1])


def _make_wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", tags)
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
