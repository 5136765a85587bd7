"""A front-end in a package of its own, as users install one, on the fake that docs/extending shows."""

from __future__ import annotations

import ast
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from skyward.errors import ConfigurationError, PoolStateError
from skyward.submission import ArgumentMemo, Invocation
from skyward.testing.in_process import InProcessSubmitter

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "examples/extending/skyward-streams"
Stream = Callable[..., Generator[tuple[Any, Any]]]

taken: list[int] = []


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stream]:
    """The front-end, from a folder in which its package is installed."""
    folder = tmp_path_factory.mktemp("site")
    argv = [find_uv_bin(), "pip", "install", "--quiet", "--offline", "--no-deps", "--python", sys.executable]
    subprocess.run([*argv, "--no-cache", "--target", str(folder), str(PACKAGE)], check=True, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("skyward_streams").stream
    del sys.modules["skyward_streams"]


def numbers() -> Iterator[int]:
    for number in itertools.count():
        taken.append(number)
        yield number


def double(number: int) -> int:
    return 2 * number


def test_every_item_comes_with_its_result(stream: Stream) -> None:
    with InProcessSubmitter(workers=3) as fleet:
        assert sorted(stream(fleet, double, range(10), chunk=3)) == [(each, 2 * each) for each in range(10)]


def test_an_endless_iterable_is_read_as_far_as_workers_need_it(stream: Stream) -> None:
    taken.clear()
    with InProcessSubmitter(workers=2) as fleet:
        results = stream(fleet, double, numbers(), ahead=2)
        assert taken == []
        first = next(results)
        results.close()

    assert first[1] == 2 * first[0]
    assert taken == [0, 1, 2, 3]


def test_no_memo_outlives_a_submission_as_an_iterable_may_fill_the_same_array_again(stream: Stream) -> None:
    memos: list[object] = []

    class Recording(InProcessSubmitter):
        def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> Any:
            memos.append(memo)
            return super().submit_calls(calls, memo=memo)

    with Recording(workers=1) as fleet:
        assert len(list(stream(fleet, double, range(8)))) == 8
    kept = [memo for memo in memos if memo is not None]
    assert len(memos) > 2
    assert len(kept) == len({id(memo) for memo in kept})


def test_the_exception_of_a_call_ends_the_stream(stream: Stream) -> None:
    with InProcessSubmitter(workers=1) as fleet:
        results = stream(fleet, int, ["1", "two", "3"], ahead=1)
        assert next(results) == ("1", 1)
        with pytest.raises(ValueError, match="two"):
            next(results)


def test_wrong_parameters_and_a_closed_fleet_are_refused(stream: Stream) -> None:
    fleet = InProcessSubmitter()
    fleet.close()

    with pytest.raises(ConfigurationError, match="chunk must be a whole number ≥ 1, got 0"):
        stream(fleet, double, [1], chunk=0)
    with pytest.raises(PoolStateError):
        next(stream(fleet, double, [1]))


def test_the_page_shows_the_package_and_it_imports_public_names_only() -> None:
    text = (PACKAGE / "src/skyward_streams/__init__.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/extending/writing-a-front-end.md").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    ours = {each.module: each.names for each in imports if (each.module or "").startswith("skyward")}

    assert text[text.index("from collections.abc") :].strip() in page
    assert ours.keys() == {"skyward.errors", "skyward.submission"}
    assert all(
        name.name in importlib.import_module(home).__all__ for home, names in ours.items() for name in names if home
    )
