"""A program of several modules on hosts that have nothing but Python: its packages are mirrored, or named at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from skyward.testing.hosts import require_sshd, write_known_hosts
from support.ssh_hosts import bare_host, cached_host

require_sshd()
pytestmark = pytest.mark.timeout(400)  # an environment is built

PROGRAM = {
    "main.py": """\
import os
import sys

import skyward as sky
from steps import describe

if "BESIDE" in os.environ:

    @sky.compute
    def alone():
        return 1


image = eval(sys.argv[1])
hosts, key_path, known_hosts = sys.argv[2].split(","), sys.argv[3], sys.argv[4]
provider = sky.SSH(hosts=hosts, key_path=key_path, known_hosts=known_hosts)
if __name__ == "__main__":
    with sky.ComputePool(provider=provider, nodes=2, image=image, display="quiet") as pool:
        print(describe(2) @ pool)
""",
    "steps.py": """\
import skyward as sky
from shared import numbers


@sky.compute
def describe(number):
    import late
    return sky.instance_info().node, numbers.doubled(number), late.greeting(), late.place()
""",
    "shared/__init__.py": "",
    "shared/numbers.py": """\
import sky_tiny

try:
    import sky_nowhere
except ImportError:
    sky_nowhere = None


def doubled(number):
    {extra}
    return sky_tiny.double(number)
""",
    "late.py": """\
from importlib.metadata import version
from pathlib import Path

import sky_private


def greeting():
    return sky_private.text() + " " + version("sky-private")


def place():
    import sky_tiny
    return "site-packages" in Path(sky_tiny.__file__).parts
""",
}
PRIVATE = {
    "pyproject.toml": """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "sky-private"
version = "0.3"
""",
    "backend.py": """\
import zipfile


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "sky_private-0.3-py3-none-any.whl"
    info = "sky_private-0.3.dist-info"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        def add(name, text):  # without the time, so that hosts build their environment once for all runs
            wheel.writestr(zipfile.ZipInfo(name), text)

        add("sky_private/__init__.py", open("src/sky_private/__init__.py").read())
        add("sky_private/text.txt", open("src/sky_private/text.txt").read())
        add(info + "/METADATA", "Metadata-Version: 2.1\\nName: sky-private\\nVersion: 0.3\\n")
        add(info + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        add(info + "/RECORD", "")
    return name
""",
    "src/sky_private/__init__.py": """\
import importlib.resources


def text():
    return importlib.resources.files("sky_private").joinpath("text.txt").read_text().strip()
""",
    "src/sky_private/text.txt": "hello from",
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


class Program:
    """The program, its environment, and two hosts."""

    def __init__(self, folder: Path, cache: Path, stack: ExitStack, *, bare: bool = False) -> None:
        self.folder = write(folder / "program", PROGRAM)
        self._private = write(folder / "private", PRIVATE)
        self._base = folder / "base"
        self._wheels = folder / "wheels"
        self._wheels.mkdir()
        self._install()
        host = bare_host if bare else cached_host
        self._hosts = [stack.enter_context(host(folder / f"host-{n}", f"127.0.0.{n}", cache)) for n in (2, 3)]
        self._known_hosts = write_known_hosts(folder / "known_hosts", *self._hosts)

    @property
    def installed(self) -> Path:
        """Where this user's packages lie, which count as installed."""
        return Path(sysconfig.get_path("purelib", "posix_user", vars={"userbase": str(self._base)}))

    def uses(self, code: str) -> None:
        """Have a module of the program run ``code``."""
        write(self.folder, {"shared/numbers.py": PROGRAM["shared/numbers.py"].format(extra=code)})

    def run(self, image: str = "None", **env: str) -> subprocess.CompletedProcess[str]:
        """Run it with this image; ``env`` overrides the variables."""
        path = os.pathsep.join(map(str, [self.installed, self._private / "src"]))
        variables = {name: value for name, value in os.environ.items() if name != "SKYWARD_MIRROR"}
        own = {"PYTHONUSERBASE": str(self._base), "PYTHONPATH": path, "PIP_FIND_LINKS": str(self._wheels)}
        places = [f"{host.address}:{host.port}" for host in self._hosts]
        arguments = [image, ",".join(places), str(self._hosts[0].key_path), str(self._known_hosts)]
        return subprocess.run(
            [sys.executable, str(self.folder / "main.py"), *arguments],
            env={**variables, **own, **env},
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )

    def _install(self) -> None:
        tiny = {
            "sky_tiny.py": "def double(number):\n    return 2 * number\n",
            "sky_tiny-1.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: sky-tiny\nVersion: 1.5\n",
            "sky_tiny-1.5.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "sky_tiny-1.5.dist-info/RECORD": "sky_tiny.py,,\n",
        }
        write(self.installed, tiny)
        with zipfile.ZipFile(self._wheels / "sky_tiny-1.5-py3-none-any.whl", "w") as wheel:
            for name, text in tiny.items():
                wheel.writestr(zipfile.ZipInfo(name), text)
        private = self._private.as_uri()
        editable = {
            "_sky_private.pth": f"{self._private}/src\n",
            "sky_private-0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: sky-private\nVersion: 0.3\n",
            "sky_private-0.3.dist-info/RECORD": "_sky_private.pth,,\n",
            "sky_private-0.3.dist-info/direct_url.json": json.dumps({"url": private, "dir_info": {"editable": True}}),
        }
        write(self.installed, editable)


@pytest.fixture
def program(tmp_path: Path, ssh_cache: Path) -> Iterator[Program]:
    with ExitStack() as stack:
        yield Program(tmp_path, ssh_cache, stack)


def test_a_program_without_an_image_runs_first_try(program: Program) -> None:
    program.uses("pass")

    assert_ran(program.run(PIP_NO_INDEX="1"))


@pytest.mark.full
def test_a_program_with_numpy_and_pandas_runs_first_try_on_hosts_that_have_only_python(
    tmp_path: Path, ssh_cache: Path
) -> None:
    with ExitStack() as stack:
        program = Program(tmp_path, ssh_cache, stack, bare=True)
        program.uses("import numpy, pandas; number = int(pandas.Series(numpy.full(2, number)).mean())")

        assert_ran(program.run())


def assert_ran(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == "((0, 4, 'hello from 0.3', True), (1, 4, 'hello from 0.3', True))\n"


def test_without_a_mirror_all_missing_packages_are_in_one_error_before_a_machine_is_used(program: Program) -> None:
    program.uses("import pandas")

    ran = program.run("sky.Image(mirror=False)")

    last = ran.stderr.strip().splitlines()[-1]
    assert "ConfigurationError: no machine was requested: describe needs packages that the image lacks:" in last
    assert "pip=['pandas', 'sky-tiny']" in last


@pytest.mark.full
def test_a_call_that_fails_for_a_module_names_all_missing_packages(program: Program) -> None:
    """Beside a function that could run, the other one is no reason to refuse the pool."""
    program.uses("import pandas")

    ran = program.run("sky.Image(mirror=False)", BESIDE="1")

    *_, error = [line for line in ran.stderr.splitlines() if line.startswith("ModuleNotFoundError")]
    assert "No module named 'sky_tiny'; the call needs 2 packages that its nodes lack:" in error
    assert "pip=['pandas', 'sky-tiny']" in error
