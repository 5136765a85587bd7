"""``skyward plan``: a script runs up to its first pool's opening, which is planned instead."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from skyward.cli import main


class Done(NamedTuple):
    """What the command answered."""

    exit_code: int
    document: dict[str, Any]
    stderr: str


HEAD = """\
import asyncio, sys
import skyward as sky

@sky.compute
def square(x):
    return x * x

pool = sky.ComputePool(provider=sky.Local(), nodes=2)
print("before", *sys.argv[1:])
"""
OPENINGS = {
    "a block": "with pool: print('inside')",
    "open": "pool.open(); print('inside')",
    "async": """\
async def main():
    async with pool: print('inside')
asyncio.run(main())
""",
    "several": "with sky.MultiPool(pool, sky.ComputePool(provider=sky.Local(), nodes=2)): print('inside')",
    "joblib": """\
from skyward.integrations import JoblibPool
with JoblibPool(provider=sky.Local(), nodes=2): print('inside')
""",
    "whatever happens": """\
try: pool.open()
except BaseException: raise ValueError('no pool')
""",
    "a child of multiprocessing": """\
import multiprocessing
def work():
    with pool: print('inside')
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    try: child.join()
    finally: print("cleaned")
    print("after")
""",
    "a worker of a process pool": """\
import multiprocessing
def work(_):
    with pool: print('inside')
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as workers:
        workers.map(work, [1])  # whose worker ends without an answer
    print("after")
""",
    "a launcher's child": """\
import subprocess
program = "import skyward as sky; sky.ComputePool(provider=sky.Local(), nodes=2).open(); print('inside')"
subprocess.run([sys.executable, "-c", program], check=True)
print("after")
""",
}


OFTEN = "a block", "several", "a launcher's child"


@pytest.fixture
def plan(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Plans a script with this text."""
    monkeypatch.chdir(tmp_path)

    def plan(text: str, *arguments: str) -> Done:
        script = tmp_path / "script.py"
        script.write_text(text, encoding="utf-8")
        done = CliRunner().invoke(main, ["plan", "--json", str(script), *arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return Done(done.exit_code, json.loads(done.stdout), done.stderr + capfd.readouterr().err)

    return plan


@pytest.mark.parametrize(
    "opening",
    [pytest.param(text, id=name, marks=() if name in OFTEN else pytest.mark.full) for name, text in OPENINGS.items()],
)
def test_a_script_ends_where_its_first_pool_would_open(opening: str, plan: Callable[..., Done]) -> None:
    done = plan(HEAD + opening, "--epochs", "3")

    assert done.exit_code == 0
    assert (done.document["provider"], done.document["nodes"], done.document["problems"]) == ("local", 2, [])
    lines = done.stderr.splitlines()
    assert lines[0] == "before --epochs 3"
    assert {*lines[1:]} <= {"before", "before --epochs 3", "cleaned"}  # of children, and of `finally`


def test_options_after_the_script_are_the_scripts(plan: Callable[..., Done]) -> None:
    done = plan(HEAD + OPENINGS["open"], "--json", "3", "-h", "--", "--help")

    assert done.stderr.splitlines() == ["before --json 3 -h -- --help"]


def test_a_script_with_its_own_modules_cleans_up(tmp_path: Path, plan: Callable[..., Done]) -> None:
    (tmp_path / "settings.py").write_text("nodes = 3", encoding="utf-8")
    text = """\
    import skyward as sky
    from settings import nodes

    try:
        with sky.ComputePool(provider=sky.Local(), nodes=nodes):
            pass
    finally:
        print("cleaned")
    """
    done = plan(textwrap.dedent(text))

    assert done.document["nodes"] == 3
    assert done.stderr == "cleaned\n"


def test_the_plan_names_the_line_that_opens_the_pool(tmp_path: Path, plan: Callable[..., Done]) -> None:
    done = plan("import skyward as sky\n\nwith sky.ComputePool(provider=sky.Local()): pass\nsky.ComputePool(")
    assert done.exit_code == 1  # it is no Python

    text = "import skyward as sky\n\nwith sky.ComputePool(provider=sky.Local()): pass\nraise OSError"
    assert plan(text).document["line"] == 3
    shown = CliRunner().invoke(main, ["plan", str(tmp_path / "script.py")]).stdout
    assert shown.startswith(f"The first pool that {tmp_path / 'script.py'} opens, in line 3 (not those ")


def test_a_crash_before_the_pool_begins_with_the_scripts_own_line(plan: Callable[..., Done]) -> None:
    done = plan("def read():\n    raise OSError('no data')\nread()")

    lines = done.stderr.splitlines()[1:]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('script.py", line 3, in <module>')
    assert lines[-1] == "OSError: no data"
    assert "with exit code 1, before it opened a pool" in done.document["error"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("print('nothing')", "script.py opens no pool", marks=pytest.mark.full),
        ("raise SystemExit(3)", "ended with exit code 3, before it opened a pool"),
    ],
)
def test_a_script_without_a_pool_is_an_error(text: str, why: str, plan: Callable[..., Done]) -> None:
    done = plan(text)

    assert done.exit_code == 1
    assert why in done.document["error"]


def test_a_script_that_does_not_exist_is_an_error() -> None:
    done = CliRunner().invoke(main, ["plan", "none.py"])

    assert (done.exit_code, done.stderr) == (1, "Error: script: there is no file none.py\n")


@pytest.mark.full
def test_a_pool_that_would_not_open_ends_with_1(plan: Callable[..., Done]) -> None:
    done = plan("import skyward as sky\nsky.ComputePool(provider=sky.Local(), machine='gpu9').open()")

    assert done.exit_code == 1
    assert done.document["problems"]
