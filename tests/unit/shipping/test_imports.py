"""Imports that a module's source shows."""

from __future__ import annotations

import pytest

from skyward.shipping.references import SourceImports, imports_in


@pytest.mark.parametrize(
    ("source", "first", "later", "optional"),
    [
        ("import a, b.c as d", {"a", "b.c"}, set(), set()),
        ("from a import b, c\nfrom d import *", {"a", "a.b", "a.c", "d"}, set(), set()),
        ("from . import b\nfrom ..e import f", {"p.q", "p.q.b", "p.e", "p.e.f"}, set(), set()),
        ("from ...... import b", set(), set(), set()),
        ("def f():\n    import a\n    def g():\n        import b", set(), {"a", "b"}, set()),
        ("async def f():\n    import a", set(), {"a"}, set()),
        ("class A:\n    import a\n    def f(self):\n        import b", {"a"}, {"b"}, set()),
        ("try:\n    import a\nexcept ImportError:\n    import b\nfinally:\n    import c", {"c"}, set(), {"a", "b"}),
        ("try:\n    import a\nexcept (KeyError, ModuleNotFoundError):\n    a = None", set(), set(), {"a"}),
        ("try:\n    import a\nexcept:\n    a = None", set(), set(), {"a"}),
        ("try:\n    import a\nexcept KeyError:\n    a = None", {"a"}, set(), set()),
        ("def f():\n    try:\n        import a\n    except ImportError:\n        pass", set(), set(), {"a"}),
        ("try:\n    import a\nexcept ImportError:\n    pass\nimport a", {"a"}, set(), set()),
        ("import contextlib\nwith contextlib.suppress(ImportError):\n    import a", {"contextlib"}, set(), {"a"}),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", {"b"}, set(), set()),
        ("if typing.TYPE_CHECKING:\n    import a", set(), set(), set()),
        ("this is no Python", set(), set(), set()),
        ("text = '''\nimport a\n'''", set(), set(), set()),
    ],
)
def test_imports_are_read_from_the_source(source: str, first: set[str], later: set[str], optional: set[str]) -> None:
    found = imports_in(source, "p.q")

    assert found == SourceImports(first=frozenset(first), later=frozenset(later), optional=frozenset(optional))
    assert found.required == first | later


@pytest.mark.parametrize(
    ("source", "conditional"),
    [
        ("if sys.platform == 'win32':\n    import a\nelse:\n    import b", {"a", "b"}),
        ("if __name__ == '__main__':\n    import a", {"a"}),
        ("def f(plot):\n    if plot:\n        import a", {"a"}),
        ("if x:\n    def f():\n        import a", {"a"}),
        ("if x:\n    import a\nimport a", set()),
        ("try:\n    if x:\n        import a\nexcept ImportError:\n    pass", set()),
    ],
)
def test_imports_under_a_condition_are_required_but_not_certain(source: str, conditional: set[str]) -> None:
    found = imports_in(source)

    assert found.conditional == conditional
    assert found.required >= conditional
    assert not (found.first | found.later) & conditional
