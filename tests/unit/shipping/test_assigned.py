"""Values that a program assigns to its own modules are not those of calls, and are named."""

from __future__ import annotations

import textwrap
from types import ModuleType
from typing import Any

import pytest

from skyward.shipping.project_modules import assigned_from_outside

SOURCE = textwrap.dedent(
    '''
    """Settings."""
    LR = 0.1
    NAME: str = "a"
    DEBUG = False
    COUNT = 0
    TWICE = 1
    TWICE = 2
    COMPUTED = len("ab")
    LIST = []
    if DEBUG:
        LEVEL = 1

    def count():
        global COUNT
        COUNT = COUNT + 1
    '''
)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"LR": 0.5}, [("LR", 0.1, 0.5)]),
        ({"LR": float("nan")}, [("LR", 0.1, float("nan"))]),
        ({"NAME": "b", "DEBUG": True}, [("NAME", "a", "b"), ("DEBUG", False, True)]),
        ({"DEBUG": 0}, [("DEBUG", False, 0)]),
        ({"NAME": object()}, []),  # what it would do in a call is not known
        ({"COUNT": 3, "TWICE": 1, "COMPUTED": 4, "LIST": [1], "NEW": 1}, []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_constants_that_another_module_has_assigned_are_found(changes: dict[str, Any], found: list[Any]) -> None:
    code, module = compile(SOURCE, "settings.py", "exec"), ModuleType("settings")
    exec(code, vars(module))
    vars(module).update(changes)

    assert repr([*assigned_from_outside(module, code)]) == repr(found)
