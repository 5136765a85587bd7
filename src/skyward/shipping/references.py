"""What code refers to: names, values and imports, read without running it.

Imports are read from source text (:func:`imports_in`), which shows the conditions that they are under, or from compiled
code (:func:`imports_of`), which exists for functions without a source, too.
"""

from __future__ import annotations

import ast
import dis
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any, Final, cast


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in ``code`` and in the functions inside it."""
    return chain(code.co_names, *map(names_in, inner_code(code)))


def global_values(function: FunctionType) -> list[Any]:
    """Return the values of the globals that a function, or one inside it, refers to, as far as they exist."""
    module = function.__globals__
    return [module[name] for name in global_names(function.__code__) if name in module]


def function_parts(function: FunctionType) -> list[Any]:
    """Return the values that a function holds besides globals: defaults, attributes, and its closure."""
    parts = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *function.__dict__.values()]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not filled yet, as in a function that refers to itself while it is defined
            continue
    return parts


def reached_from(root: object, is_end: Callable[[object], bool] = lambda _: False) -> Iterator[object]:
    """Yield ``root`` and what it refers to through functions, methods, ``partial`` and containers; see past no end."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) not in seen and not is_end(value):
            seen.add(id(value))
            yield value
            waiting += _parts_of(value)


def _parts_of(value: Any) -> Iterable[object]:
    # By their exact types, as a stand-in for what was left out may not be asked for its class.
    kind = cast("type[Any]", type(value))
    if kind is FunctionType:
        return *function_parts(value), *global_values(value)
    if kind is MethodType:
        return (value.__func__,)
    if kind is functools.partial:
        return value.func, value.args, value.keywords
    if issubclass(kind, tuple | list):
        return value
    return value.values() if issubclass(kind, dict) else ()


def imports_of(function: FunctionType) -> frozenset[str]:
    """Return the names that import statements in a function may refer to; for ``from a import b`` also ``a.b``."""
    return code_imports(function.__code__, function.__globals__.get("__package__") or "")


@functools.lru_cache(maxsize=4096)
def code_imports(code: CodeType, package: str) -> frozenset[str]:
    """Return the names that import statements in ``code`` may refer to, as :func:`imports_of` does."""
    return frozenset(_imported(code, package))


_GLOBAL_STEPS: Final = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_IMPORT_NAME: Final = dis.opmap["IMPORT_NAME"]


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> frozenset[str]:
    """Return the names of the globals that ``code``, and the functions inside it, refer to."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL_STEPS)
    return frozenset(chain(own, *map(global_names, inner_code(code))))


def inner_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of the functions and classes directly inside ``code``."""
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _imported(code: CodeType, package: str) -> Iterator[str]:
    before: list[Any] = [None, None]  # IMPORT_NAME follows two loads: the level and the imported members
    for step in dis.get_instructions(code) if _IMPORT_NAME in code.co_code[::2] else ():
        if step.opname == "IMPORT_NAME":
            yield from _meant(step.argval, before[0], before[1] or (), package)
        if step.opname != "EXTENDED_ARG":
            before = [before[1], step.argval]
    for inner in inner_code(code):
        yield from _imported(inner, package)


def _meant(name: str, level: int, members: Sequence[str], package: str) -> Iterator[str]:
    """Yield the full names of modules that an import statement may mean: a member may be a submodule."""
    if level:
        outer = package.rsplit(".", level - 1)
        if not package or len(outer) < level:
            return  # it fails where it runs, as it would here
        name = f"{outer[0]}.{name}" if name else outer[0]
    yield name
    yield from (f"{name}.{member}" for member in members if member != "*")


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
        members = [alias.name for alias in node.names]
        self._found.update(_meant(node.module or "", node.level, members, self._package))

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
        target = self.optional if self._found is self.optional else self.conditional
        self._within(node.body, target)
        self._within(node.orelse, target)

    def visit_With(self, node: ast.With) -> None:
        lenient = any(_suppresses(item.context_expr) for item in node.items)
        self._within(node.body, self.optional if lenient else self._found)

    def visit_Try(self, node: ast.Try) -> None:
        lenient = any(_catches(handler.type) for handler in node.handlers)
        target = self.optional if lenient else self._found
        for part in (node.body, node.handlers, node.orelse):  # a handler imports the substitute
            self._within(part, target)
        self._within(node.finalbody, self._found)

    def _within(self, nodes: Sequence[ast.AST], target: set[str]) -> None:
        outside, self._found = self._found, target
        for node in nodes:
            self.visit(node)
        self._found = outside


def _is_for_type_checkers(test: ast.expr) -> bool:
    return _last_name(test) == "TYPE_CHECKING"


def _suppresses(context: ast.expr) -> bool:
    return (
        isinstance(context, ast.Call)
        and _last_name(context.func) == "suppress"
        and any(_last_name(kind) in _CAUGHT for kind in context.args)
    )


def _catches(kinds: ast.expr | None) -> bool:
    if kinds is None:
        return True
    caught = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    return any(_last_name(kind) in _CAUGHT for kind in caught)


def _last_name(expression: ast.expr) -> str:
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
