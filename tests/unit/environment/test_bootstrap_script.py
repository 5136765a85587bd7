from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from skyward.environment.bootstrap import STEPS, quote, render_bootstrap, render_env_file
from skyward.environment.image import Image
from skyward.errors import ConfigurationError

HOSTILE = [
    "torch>=2",
    "x[y]",
    "a b",
    "it's",
    'say "hi"',
    "two\nlines",
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a&&b|c>d<e",
    "${HOME}",
    "back\\slash\\",
    "*?~#!",
    "@@root @@@@ $root",
    "naïve-пакет-包",
    "EOF",
    "x\n@skyward step deps done",
]


def unchecked(words: Sequence[str], **parameters: Any) -> Image:
    """An image that asks for what no image takes: the script does not rely on it."""
    image = Image(**parameters)
    object.__setattr__(image, "pip", tuple(words))
    object.__setattr__(image, "apt", tuple(words))
    return image


@dataclass
class Machine:
    """A folder with stand-ins for the programs that the script calls, which note their arguments."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "sky ward"

    @property
    def notes(self) -> str:
        return quote(str(self.home / "calls"))

    def add(self, name: str, body: str = "") -> None:
        """A program that notes its arguments, then does ``body``."""
        path = self.home / "bin" / name
        note = f"printf '%s\\0' {name} \"$@\" >>{self.notes}; printf '\\1' >>{self.notes}"
        path.write_text(f"#!/bin/sh\n{note}\n{body}\n", encoding="utf-8")
        path.chmod(0o755)

    def calls(self) -> list[list[str]]:
        """Every call of a stand-in: its name and arguments."""
        path = self.home / "calls"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        calls = [call.split("\0")[:-1] for call in text.split("\1")[:-1]]
        return [call for call in calls if call != ["uv", "--version"] and call[0] != "dpkg-query"]

    def environment(self, image: Image, *, pins: Sequence[str] = ()) -> Path:
        """Where the image's environment lies."""
        system = platform.freedesktop_os_release()
        name = f"{os.uname().machine}-{system['ID']}{system.get('VERSION_ID', '')}"
        return self.root / "envs" / f"{image.content_hash(pins=pins)}-{name}"

    def run(
        self, image: Image, *, pins: Sequence[str] = (), ttl_s: int = 0, code: str = ""
    ) -> subprocess.CompletedProcess[str]:
        script = render_bootstrap(image, root=str(self.root), engine_pins=pins, ttl_s=ttl_s, code=code)
        return subprocess.run(
            ["sh", "-s"],
            input=script,
            cwd=self.home,
            env={"PATH": f"{self.home / 'bin'}:/usr/bin:/bin", "HOME": str(self.home), "LC_ALL": "C.UTF-8"},
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=60,
        )


MAKE_ENVIRONMENT = f"""
for last; do :; done
case $1 in
--version) echo uv 0.9.0 ;;
venv)
    mkdir -p "$last/bin" && ln -s {quote(sys.executable)} "$last/bin/python"
    printf 'home = %s\\ninclude-system-site-packages = true\\n' {quote(f"{sys.base_prefix}/bin")} >"$last/pyvenv.cfg"
    installed="$last/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/engine-2.dist-info"
    mkdir -p "$installed" && printf 'Metadata-Version: 2.1\\nName: engine\\nVersion: 2\\n' >"$installed/METADATA"
    ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "bin").mkdir()
    machine = Machine(tmp_path)
    machine.add("uv", MAKE_ENVIRONMENT)
    installed = quote(str(tmp_path / "installed"))
    machine.add("apt-get", f'case "$*" in *install*) >{installed} ;; esac')
    machine.add("dpkg-query", f"[ -e {installed} ] && echo 'ii 1.0'")
    machine.add("shutdown")
    machine.add("curl", "exit 7")
    (tmp_path / "bin" / "sudo").write_text('#!/bin/sh\nshift\nexec "$@"\n', encoding="utf-8")
    (tmp_path / "bin" / "sudo").chmod(0o755)
    return machine


def hostile_images() -> list[Image]:
    images = [unchecked([word], find_links=[word], env={"A": word}) for word in HOSTILE]
    return [Image(), *images, unchecked(HOSTILE, pip_index_url="https://example.org/a b'$(x)")]


def test_every_script_is_sound_shell(subtests: pytest.Subtests):
    for image in hostile_images():
        with subtests.test(image=image):
            script = render_bootstrap(image, root="/opt/it's here", engine_pins=["distributed==1"], ttl_s=61)

            assert subprocess.run(["sh", "-n"], input=script, encoding="utf-8", check=False).returncode == 0


@pytest.mark.parametrize(
    ("image", "severity"),
    [
        (Image(pip=["a"], apt=["b"]), "style"),
        (unchecked(HOSTILE), "warning"),  # below that, any value that looks like an expansion is found
    ],
)
def test_shellcheck_finds_nothing(image: Image, severity: str):
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    script = render_bootstrap(image, root="/opt/it's here", engine_pins=["distributed==1"], ttl_s=61)

    arguments = [shellcheck, "--shell=sh", f"--severity={severity}", "-"]
    checked = subprocess.run(arguments, input=script, capture_output=True, encoding="utf-8", check=False)

    assert checked.stdout + checked.stderr == ""


@pytest.mark.parametrize("value", [*HOSTILE, "", "-n"])
def test_a_quoted_value_reaches_a_command_as_it_is(value: str, tmp_path: Path):
    printed = subprocess.run(
        ["sh", "-c", f"printf '%s.' {quote(value)}"], cwd=tmp_path, capture_output=True, encoding="utf-8", check=True
    )

    assert printed.stdout == f"{value}."
    assert list(tmp_path.iterdir()) == []


def test_nul_cannot_be_quoted():
    with pytest.raises(ConfigurationError, match="NUL"):
        quote("a\0b")


def test_the_root_is_absolute():
    with pytest.raises(ConfigurationError, match="root must be an absolute path, got 'here'"):
        render_bootstrap(Image(), root="here", engine_pins=[], ttl_s=0)


def test_the_environment_file_reads_back_as_it_was(tmp_path: Path):
    path = tmp_path / "env"
    path.write_text(render_env_file({f"V{i}": value for i, value in enumerate(HOSTILE)}), encoding="utf-8")
    names = " ".join(f'"$V{i}"' for i in range(len(HOSTILE)))

    printed = subprocess.run(
        ["sh", "-c", f". {quote(str(path))}; printf '%s\\0' {names}"],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )

    assert printed.stdout.split("\0")[:-1] == HOSTILE


def test_every_step_reports_its_start_and_its_end(machine: Machine):
    ran = machine.run(Image())

    ends = {step: ("cached",) if step in ("uv", "apt", "volumes") else ("start", "done") for step in STEPS}
    steps = [f"@skyward step {step} {end}" for step in STEPS for end in ends[step]]
    assert ran.stdout.splitlines() == [*steps, f"@skyward ready {machine.environment(Image())}"]
    assert (ran.returncode, ran.stderr) == (0, "")


def test_hostile_values_reach_the_installers_as_they_are(machine: Machine):
    image = unchecked(
        HOSTILE,
        pip_index_url="https://example.org/a'b",
        pip_extra_index_url="https://example.org/$(x)",
        find_links=["/wheels here"],
    )

    assert machine.run(image).returncode == 0

    apt = next(call for call in machine.calls() if call[0] == "apt-get" and "install" in call)
    pip = next(call for call in machine.calls() if call[:3] == ["uv", "pip", "install"])
    assert apt[apt.index("--") + 1 :] == HOSTILE
    assert pip[pip.index("--") + 1 :] == HOSTILE
    assert pip[5 : pip.index("--")] == [
        *("--index-url", "https://example.org/a'b"),
        *("--extra-index-url", "https://example.org/$(x)"),
        *("--find-links", "/wheels here"),
    ]
    assert not list(machine.home.rglob("pwned"))


def test_the_engine_is_installed_and_checked(machine: Machine):
    ran = machine.run(Image(pip=["a"]), pins=["engine==1"])

    pip = next(call for call in machine.calls() if call[:3] == ["uv", "pip", "install"])
    assert pip[pip.index("--") + 1 :] == ["engine==1", "a"]
    assert "@skyward step server failed 1" in ran.stdout
    assert "the engine, which needs ['engine==1']" in ran.stderr


def test_the_second_run_changes_nothing(machine: Machine):
    image = Image(pip=["a"], apt=["b"])
    machine.run(image)
    calls = machine.calls()

    again = machine.run(image)

    assert machine.calls() == calls
    assert again.returncode == 0
    assert again.stdout.splitlines()[:3] == [f"@skyward step {step} cached" for step in ("uv", "apt", "deps")]


def test_another_image_gets_another_environment(machine: Machine):
    machine.run(Image(pip=["a"]))
    machine.run(Image(pip=["b"]))

    assert len(list((machine.root / "envs").iterdir())) == 2


def test_a_failed_step_says_where_and_why_and_the_next_run_starts_it_anew(machine: Machine):
    machine.add("uv", MAKE_ENVIRONMENT + 'if [ "$1" = pip ]; then echo no such package; exit 3; fi')
    image = Image(pip=["a"])

    failed = machine.run(image)
    machine.add("uv", MAKE_ENVIRONMENT)
    again = machine.run(image)

    log = machine.root / "logs" / machine.environment(image).name / "deps.log"
    assert failed.returncode == 3
    assert failed.stdout.splitlines()[-1] == f"@skyward step deps failed 3 {log}"
    assert failed.stderr == "no such package\n"
    assert again.returncode == 0
    assert "@skyward step deps done" in again.stdout


def test_a_step_past_its_deadline_fails_with_124(machine: Machine):
    now = quote(str(machine.home / "now"))
    machine.add("date", f"echo $(($(cat {now}) + 10000)) | tee {now}.next && mv {now}.next {now}")
    (machine.home / "now").write_text("0", encoding="utf-8")

    ran = machine.run(Image(apt=["a"]))

    assert ran.returncode == 124
    assert "@skyward step apt failed 124" in ran.stdout


def test_a_held_apt_lock_is_waited_for(machine: Machine):
    tries = quote(str(machine.home / "tries"))
    machine.add("sleep")
    machine.add("apt-get", f'echo >>{tries}; echo E: Could not get lock; [ "$(wc -l <{tries})" -gt 2 ]')

    assert machine.run(Image(apt=["a"])).returncode == 0

    names = [call[:2] for call in machine.calls() if call[0] in ("apt-get", "sleep")]
    assert names == [["apt-get", "update"], ["sleep", "5"]] * 2 + [["apt-get", "update"], ["apt-get", "-o"]]


def test_the_shutdown_is_armed_first_and_once_a_boot(machine: Machine):
    machine.run(Image(), ttl_s=61)
    machine.run(Image(), ttl_s=61)

    assert machine.calls()[0] == ["shutdown", "-h", "+2"]
    assert [call[0] for call in machine.calls()].count("shutdown") == 1


def test_nothing_is_done_on_a_machine_that_cannot_end_itself(machine: Machine):
    machine.add("shutdown", "exit 5")

    ran = machine.run(Image(), ttl_s=60)

    assert ran.returncode == 5
    assert [call[0] for call in machine.calls()] == ["shutdown"]


def test_the_environment_file_reaches_the_installers(machine: Machine):
    machine.root.mkdir()
    (machine.root / "env").write_text(
        render_env_file({"UV_INDEX_URL": "https://me:pw@x/", "root": "/nowhere"}), encoding="utf-8"
    )
    machine.add("uv", MAKE_ENVIRONMENT + 'test "$UV_INDEX_URL" = https://me:pw@x/')

    assert machine.run(Image(pip=["a"])).returncode == 0


def test_each_clients_code_gets_an_environment_of_its_own(machine: Machine):
    (machine.root / "sent").mkdir(parents=True)
    for code in ("old", "new"):
        with zipfile.ZipFile(machine.root / "sent" / f"skyward-{code}.whl", "w") as wheel:
            wheel.writestr("skyward/__init__.py", "")
            for folder in ("", "supervisor/", "worker/"):
                wheel.writestr(f"skyward/node/{folder}__init__.py", "")
            for program in ("supervisor/supervisor", "supervisor/service_process", "worker/worker"):
                wheel.writestr(f"skyward/node/{program}.py", f"# {code}")
        assert machine.run(Image(), code=code).returncode == 0

    programs = (machine.root / "envs").rglob("supervisor.py")
    assert sorted(path.read_text(encoding="utf-8") for path in programs) == ["# new", "# old"]


def test_code_that_does_not_start_is_found_out(machine: Machine):
    (machine.root / "sent").mkdir(parents=True)
    with zipfile.ZipFile(machine.root / "sent" / "skyward-x.whl", "w") as wheel:
        wheel.writestr("skyward/__init__.py", "import no_such_module")

    ran = machine.run(Image(), code="x")

    assert "@skyward step server failed 1" in ran.stdout
    assert "No module named 'no_such_module'" in ran.stderr
    assert "@skyward step server start" in machine.run(Image(), code="x").stdout


def test_without_uv_and_a_way_to_get_it_the_error_says_so(machine: Machine):
    (machine.home / "bin" / "uv").unlink()
    for name in ("python3", f"python3.{sys.version_info.minor}"):
        machine.add(name, "exit 1")

    ran = machine.run(Image())

    assert ran.returncode == 1
    assert "@skyward step uv failed 1" in ran.stdout
    assert "Install uv there (https://docs.astral.sh/uv)" in ran.stderr
    assert not machine.environment(Image()).exists()
