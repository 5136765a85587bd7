"""Imports that a module's source shows, read without running it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["SourceImports", "imports_in"]

_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceImports:
    """Full names of modules in import statements; for ``from a import b`` both ``a`` and ``a.b``.

    Attributes:
        first: imported while the module itself is imported.
        later: imported in functions, when these run.
        conditional: imported under a condition, such as ``if sys.platform == "win32"``, which may never hold.
        optional: imported only where a missing module is expected: within ``try`` with ``except ImportError``.
    """

    first: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    conditional: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()

    @property
    def required(self) -> frozenset[str]:
        """Modules whose lack raises an error at some time."""
        return self.first | self.later | self.conditional


@functools.lru_cache(maxsize=1024)
def imports_in(source: str, package: str = "") -> SourceImports:
    """Return the imports in ``source``; none if it is no Python, or within ``if TYPE_CHECKING``.

    Args:
        source: the module's text.
        package: the package that relative imports refer to; empty for a script.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # its import fails later, with the better message
        return SourceImports()
    reader = _Reader(package)
    reader.visit(tree)
    certain = frozenset((*reader.first, *reader.later))
    return SourceImports(
        first=frozenset(reader.first),
        later=frozenset(reader.later),
        conditional=frozenset(reader.conditional) - certain,
        optional=frozenset(reader.optional) - certain - reader.conditional,
    )


class _Reader(ast.NodeVisitor):
    def __init__(self, package: str) -> None:
        self.first: set[str] = set()
        self.later: set[str] = set()
        self.conditional: set[str] = set()
        self.optional: set[str] = set()
        self._package = package
        self._found = self.first

    def visit_Import(self, node: ast.Import) -> None:
        self._found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._found.update(_from(node, self._package))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for outside in (*node.decorator_list, node.args):
            self.visit(outside)
        self._within(node.body, self.later if self._found is self.first else self._found)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_If(self, node: ast.If) -> None:
        if _is_for_type_checkers(node.test):
            self._within(node.orelse, self._found)
            return
        found = self.optional if self._found is self.optional else self.conditional
        self._within(node.body, found)
        self._within(node.orelse, found)

    def visit_With(self, node: ast.With) -> None:
        lenient = any(_suppresses(item.context_expr) for item in node.items)
        self._within(node.body, self.optional if lenient else self._found)

    def visit_Try(self, node: ast.Try) -> None:
        lenient = any(_catches(handler.type) for handler in node.handlers)
        found = self.optional if lenient else self._found
        for part in (node.body, node.handlers, node.orelse):  # a handler imports the substitute
            self._within(part, found)
        self._within(node.finalbody, self._found)

    def _within(self, nodes: Sequence[ast.AST], found: set[str]) -> None:
        outside, self._found = self._found, found
        for node in nodes:
            self.visit(node)
        self._found = outside


def _from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    name = node.module or ""
    if node.level:
        outer = package.rsplit(".", node.level - 1)
        if not package or len(outer) < node.level:
            return  # it fails where it runs
        name = f"{outer[0]}.{name}" if name else outer[0]
    yield name
    yield from (f"{name}.{alias.name}" for alias in node.names if alias.name != "*")


def _is_for_type_checkers(test: ast.expr) -> bool:
    return _last_name(test) == "TYPE_CHECKING"


def _suppresses(context: ast.expr) -> bool:
    return (
        isinstance(context, ast.Call)
        and _last_name(context.func) == "suppress"
        and any(_last_name(each) in _CAUGHT for each in context.args)
    )


def _catches(kinds: ast.expr | None) -> bool:
    if kinds is None:
        return True
    each = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    return any(_last_name(kind) in _CAUGHT for kind in each)


def _last_name(expression: ast.expr) -> str:
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
