"""Scripts as jobs: what goes along, their metadata, and how they run on a node."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from skyward.api.script import Script, project_of, read_script, run_script, script_header
from skyward.errors import ConfigurationError
from skyward.shipping.remote_exceptions import pack_error, unpack_error

HEADER = """\
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "rich",
# ]
# ///
"""


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("print(1)\n", None),
        (HEADER, {"requires-python": ">=3.11", "dependencies": ["rich"]}),
        (f"#!/usr/bin/env python\n\n{HEADER}\nprint(1)\n", {"requires-python": ">=3.11", "dependencies": ["rich"]}),
        ("# /// script\n#\n# ///\n", {}),
        ("# /// other\n# a = 1\n# ///\n", None),
        ("# /// script\n# dependencies = []\n", None),  # without an end
        ("x = 1\n  # /// script\n  # a = 1\n  # ///\n", None),
    ],
)
def test_headers(text: str, header: object) -> None:
    assert script_header(text, "train.py") == header


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEADER + "\n" + HEADER, "has 2 blocks"),
        ("# /// script\n# dependencies = [\n# ///\n", "is no TOML"),
        ('# /// script\n# dependencies = "rich"\n# ///\n', "must be a list"),
    ],
)
def test_wrong_headers_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        script_header(text, "train.py")


def exit_code(script: Script, job: str = "job") -> int:
    try:
        return run_script(script, job)
    except CalledProcessError as error:
        again = unpack_error(pack_error(error), where="a node")
        assert isinstance(again, CalledProcessError)
        assert again.cmd[1:] == [*script.arguments]
        return again.returncode


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    for name, text in {
        "pyproject.toml": "",
        ".gitignore": "data/\n",
        "src/models/__init__.py": "from models.net import size\n",
        "src/models/net.py": "size = 3\n",
        "scripts/train.py": "import sys, helpers, models\nprint(models.size, helpers.x, *sys.argv[1:])\nsys.exit(4)\n",
        "scripts/helpers.py": "x = 7\n",
        "settings.ini": "[a]\n",
        "data/big.bin": "0" * 1000,
        ".venv/pyvenv.cfg": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    return folder


def test_a_project_goes_without_what_git_ignores(project: Path) -> None:
    script = read_script(Path("scripts/train.py"), ["--lr", "1"])

    with tarfile.open(fileobj=io.BytesIO(script.archive)) as archive:
        names = sorted(member.name for member in archive if member.isfile())
    assert names == [
        "project/.gitignore",
        "project/pyproject.toml",
        "project/scripts/helpers.py",
        "project/scripts/train.py",
        "project/settings.ini",
        "project/src/models/__init__.py",
        "project/src/models/net.py",
    ]
    assert (script.name, script.folder, script.arguments) == ("project/scripts/train.py", "project", ("--lr", "1"))


def test_a_script_runs_in_its_project_and_its_exit_code_is_the_result(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = read_script(Path("scripts/train.py"), ["--lr", "1"])
    (tmp_path / "node").mkdir()
    monkeypatch.chdir(tmp_path / "node")

    assert exit_code(script, "run-7") == 4

    assert capfd.readouterr().out == "3 7 --lr 1\n"
    assert (tmp_path / "node/run-7/project/settings.ini").exists()


@pytest.mark.parametrize(("ends", "code"), [("0", 0), ("3", 3), ("'no'", 1)])
def test_exit_codes(ends: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "end.py").write_text(f"import sys\nsys.exit({ends})\n")
    monkeypatch.chdir(tmp_path)

    assert exit_code(read_script(tmp_path / "end.py")) == code


def test_a_signal_is_a_negative_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "end.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.chdir(tmp_path)

    assert exit_code(read_script(tmp_path / "end.py")) == -9


def test_a_header_is_the_scripts_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import sys, importlib.util\nprint(importlib.util.find_spec('msgpack'), sys.argv[1:])\nsys.exit(5)\n"
    (tmp_path / "train.py").write_text(f"# /// script\n# dependencies = []\n# ///\n{text}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # uv leaves its lock there
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_PYTHON", str(Path(sys.executable).resolve()))

    assert exit_code(read_script(tmp_path / "train.py", ["--n", "1"])) == 5

    assert capfd.readouterr().out == "None ['--n', '1']\n"


def test_a_script_without_a_project_takes_its_folder_along(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/train.py").write_text("")

    assert project_of(tmp_path / "a/train.py") == tmp_path / "a"


def test_the_home_folder_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".git").mkdir()
    (tmp_path / "a").mkdir()

    assert project_of(tmp_path / "a/train.py") == tmp_path / "a"


@pytest.mark.parametrize("script", ["train.py", "state/train.py"])
def test_a_script_takes_neither_the_home_folder_nor_the_state_folder_along(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    (tmp_path / script).write_text("")

    with pytest.raises(ConfigurationError, match=r"would go along .*: put the script into a folder of its own"):
        read_script(tmp_path / script)


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_script(tmp_path / "none.py")
