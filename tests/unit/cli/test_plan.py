"""``skyward plan``: a script runs up to its first pool's opening, which is planned instead."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
}


def plan(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "skyward", "plan", "--json", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=folder)


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
def test_a_script_ends_where_its_first_pool_would_open(opening: str, tmp_path: Path) -> None:
    done = plan(tmp_path, HEAD + opening, "--epochs", "3")

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["provider"], document["nodes"], document["problems"]) == ("local", 2, [])
    assert done.stderr.splitlines() == ["before --epochs 3"]


def test_a_script_with_its_own_modules_cleans_up(tmp_path: Path) -> None:
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
    done = plan(tmp_path, textwrap.dedent(text))

    assert json.loads(done.stdout)["nodes"] == 3
    assert done.stderr == "cleaned\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [("print('nothing')", "with exit code 0"), ("raise SystemExit(3)", "with exit code 3"), (None, "there is no file")],
)
def test_a_script_without_a_pool_is_an_error(text: str | None, why: str, tmp_path: Path) -> None:
    done = (
        plan(tmp_path, text)
        if text
        else subprocess.run(
            [sys.executable, "-m", "skyward", "plan", str(tmp_path / "none.py")],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    )

    assert done.returncode == 1
    assert why in done.stderr


def test_a_pool_that_would_not_open_ends_with_1(tmp_path: Path) -> None:
    done = plan(tmp_path, "import skyward as sky\nsky.ComputePool(provider=sky.Local(), machine='gpu9').open()")

    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"]
