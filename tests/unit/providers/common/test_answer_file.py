"""Answers on disk: how long they count, and what a damaged file is worth."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from skyward.providers._common.cached_answers import AnswerFile, forget


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnswerFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return AnswerFile(vendor="cloud", name="spot", place="east-1", endpoint_url=None, longest_s=60)


def test_what_was_kept_is_there_until_it_is_too_old(kept: AnswerFile) -> None:
    kept.add({"a": 1.0})
    kept.add({"b": {"zone": 2.0}})
    assert kept.read() == {"a": 1.0, "b": {"zone": 2.0}}

    entries = json.loads(kept.path.read_text())
    entries["a"]["at"] = time.time() - 61
    kept.path.write_text(json.dumps(entries))
    assert kept.read() == {"b": {"zone": 2.0}}

    entries["b"]["at"] = time.time() - 30
    kept.path.write_text(json.dumps(entries))
    assert kept.ages_s() == {"b": pytest.approx(30, abs=5)}


@pytest.mark.parametrize(
    "damaged", ["", "{", "[]", '{"a": 3}', '{"a": {"at": "x", "value": 1}}', '{"a": {"value": 1}}']
)
def test_a_damaged_file_is_as_good_as_none(kept: AnswerFile, damaged: str) -> None:
    kept.path.parent.mkdir(parents=True)
    kept.path.write_text(damaged)
    assert kept.read() == {}
    kept.add({"b": 1})
    assert kept.read() == {"b": 1}


def test_a_file_that_cannot_be_written_is_no_error(kept: AnswerFile) -> None:
    kept.path.parent.parent.mkdir(parents=True)
    kept.path.parent.write_text("in the way")
    kept.add({"a": 1})
    assert kept.read() == {}


def test_another_endpoints_answers_are_its_own(kept: AnswerFile) -> None:
    other = AnswerFile(vendor="cloud", name="spot", place="east-1", endpoint_url="http://127.71.0.2:1", longest_s=60)
    kept.add({"a": 1})
    assert other.read() == {}


def test_what_is_forgotten_is_that_endpoints_only(kept: AnswerFile) -> None:
    other = AnswerFile(vendor="cloud", name="spot", place="east-1", endpoint_url="http://127.71.0.2:1", longest_s=60)
    for each in (kept, other):
        each.add({"a": 1})
    forget("cloud", other.endpoint_url)
    forget("cloud", other.endpoint_url)
    assert (kept.read(), other.read()) == ({"a": 1}, {})


def test_what_is_forgotten_is_that_vendors_only(kept: AnswerFile) -> None:
    kept.add({"a": 1})
    forget("fog", kept.endpoint_url)
    assert kept.read() == {"a": 1}
    forget("cloud", kept.endpoint_url)
    assert kept.read() == {}


async def test_what_is_not_kept_is_fetched_once(kept: AnswerFile) -> None:
    fetched: list[str] = []

    async def fetch(names: Sequence[str]) -> dict[str, int]:
        fetched.extend(names)
        return {name: len(name) for name in names if name != "unknown"}

    assert await kept.completed(["a", "bb"], fetch) == {"a": 1, "bb": 2}
    assert await kept.completed(["bb", "ccc", "unknown"], fetch) == {"bb": 2, "ccc": 3}
    assert await kept.completed(["a"], fetch) == {"a": 1}
    assert fetched == ["a", "bb", "ccc", "unknown"]
