"""Patterns of files, and the names that they match."""

from __future__ import annotations

import pytest

from skyward.errors import ConfigurationError
from skyward.request.checks import checked_patterns, is_matched


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("*.bin", "a.bin", True),
        ("*.bin", "deep/a.bin", False),
        ("*.bin", ".a.bin", False),
        (".*", ".a", True),
        ("**/*.csv", "a.csv", True),
        ("**/*.csv", "x/y/a.csv", True),
        ("**/*.csv", "x/.y/a.csv", False),
        ("models/", "models/deep/.a", True),
        ("models", "models", True),
        ("models", "modelsx", False),
        ("**", "x/a", True),
        ("a[[]1].txt", "a[1].txt", True),
        ("./a", "a", True),
    ],
)
def test_a_pattern_matches_files_and_all_that_is_in_matched_folders(pattern: str, name: str, matched: bool) -> None:
    assert is_matched(name, [pattern]) is matched


@pytest.mark.parametrize("pattern", [".", "./", "..", "a/../b", "/etc"])
def test_a_pattern_names_something_in_the_folder(pattern: str) -> None:
    with pytest.raises(ConfigurationError, match="patterns must"):
        checked_patterns("patterns", pattern)
