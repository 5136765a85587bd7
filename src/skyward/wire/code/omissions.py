"""Parts of modules and classes that cannot be pickled stay behind, so that the rest can travel by value.

A module or a class takes everything along that is in it, a lock or a connection included, which the call may never
use. A stand-in that raises on its first use replaces it. References of the call's own function, directly or through
other functions, are no such part: they are needed, and the error is raised before anything is sent.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NoReturn, cast

from skyward.errors import SerializationError
from skyward.wire.code.origins import Definition, Reduced

__all__ = ["LeftOut", "Omissions", "looking", "names_in"]


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in ``code`` and in the functions inside it."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return chain(code.co_names, *inner)


class LeftOut:
    """Stand-in for an object that could not be pickled: all but ``repr`` raises SerializationError with ``text``."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "_text", text)

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftOut, (object.__getattribute__(self, "_text"),)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_text')}>"

    def __getattribute__(self, name: str) -> Any:
        if looking.on or name in _OF_COPIES:
            return object.__getattribute__(self, name)
        if name in _ABSENT:
            raise AttributeError(name)
        raise SerializationError(object.__getattribute__(self, "_text"))


_OF_COPIES: Final = frozenset({"__reduce__", "__reduce_ex__"})
_ABSENT: Final = frozenset({"__copy__", "__deepcopy__", "__isabstractmethod__", "__wrapped__"})
"""Names that copies of an object with a stand-in, subclasses of a class with one, and signatures look for."""


class _Looking(threading.local):
    """Whether this thread pickles: picklers ask each value for its class and its module."""

    on: bool = False


looking: Final = _Looking()


def _raise(self: Any, *_: object, **__: object) -> NoReturn:
    raise SerializationError(object.__getattribute__(self, "_text"))


_BINARY: Final = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()  # noqa: SIM905
_OPERATIONS: Final = """
    eq ne lt le gt ge hash bool str format bytes len length_hint contains getitem setitem delitem iter next reversed
    call enter exit aenter aexit await aiter anext int float complex index round trunc floor ceil neg pos abs invert
    get setattr delattr fspath dir instancecheck subclasscheck mro_entries
"""
for _operation in (*_OPERATIONS.split(), *(f"{side}{each}" for each in _BINARY for side in ("", "r", "i"))):
    setattr(LeftOut, f"__{_operation}__", _raise)


class Omissions:
    """Choice of the parts that are left out of one pickle.

    Args:
        root: the object that is pickled.
        probe: pickles a value and discards the result, without the parts that this object lists as left out or as
            picklable; returns the parts that it has pickled.
    """

    def __init__(self, root: object, probe: Callable[[object, Omissions], Sequence[object]]) -> None:
        self._probe = probe
        # By id, as values need not be hashable, and may define equality in any way.
        self._picklable: set[int] = set()
        self._obstacles: dict[int, str] = {}
        self._kept_alive: list[object] = []  # ids are compared
        self._needed = {id(function) for function in _functions_of(root)}

    def is_picklable(self, value: object) -> bool:
        """Return True if a probe has pickled ``value``."""
        # Without this, a value would be probed again for every other one around it.
        return id(value) in self._picklable

    def is_obstacle(self, value: object) -> bool:
        """Return True if ``value`` cannot be pickled."""
        return bool(self._obstacle(value))

    def applied(self, value: Definition, reduced: Reduced) -> Reduced:
        """Return cloudpickle's reduction of a definition with stand-ins for the parts that cannot be pickled."""
        match value:
            case ModuleType():
                make, (name, names) = reduced
                return make, (name, self._without(names, f"module {name}"))
            case type():
                names, slots = reduced[2]
                state = self._without(names, f"class {value.__qualname__}"), slots
            case _ if id(value) in self._needed:
                return reduced
            case _:
                own, slots = reduced[2]
                names = self._without(slots["__globals__"], f"module {value.__module__}")
                state = own, slots | {"__globals__": names}
        return (*reduced[:2], state, *reduced[3:])

    def _without(self, names: Mapping[str, Any], where: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in names.items():
            if not (why := self._obstacle(value)):
                kept[name] = value
            elif not name.startswith("__"):  # such as __spec__
                kept[name] = LeftOut(
                    f"{name!r} of {where} was left out when it was sent to this process: it cannot be pickled ({why}). "
                    "Create it inside the function that uses it, or install the module on the nodes as a package: "
                    "Image(pip=[…])"
                )
        return kept

    def _obstacle(self, value: object) -> str:
        """Return why ``value`` cannot be pickled; empty if it can."""
        if id(value) in self._obstacles:
            return self._obstacles[id(value)]
        if self.is_picklable(value):
            return ""
        self._kept_alive.append(value)
        self._obstacles[id(value)] = ""  # it may refer to itself
        if isinstance(value, FunctionType):
            why = next((why for part in _parts_of(value) if (why := self._obstacle(part))), "")
        elif isinstance(value, type | ModuleType):
            why = ""  # parts of these are left out in their turn
        else:
            why = self._failure(value)
        self._obstacles[id(value)] = why
        return why

    def _failure(self, value: object) -> str:
        try:
            parts = self._probe(value, self)
        except Exception as error:  # any class may do anything here
            return str(error) or type(error).__name__
        self._kept_alive += parts
        self._picklable.update(map(id, parts))
        return ""


def _parts_of(function: FunctionType) -> Iterator[object]:
    """Yield the objects that a function takes along besides globals."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not filled yet


def _functions_of(root: object) -> Iterator[FunctionType]:
    """Yield the functions that ``root`` is, holds, or refers to through functions alone."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value: Any = waiting.pop()
        if id(value) in seen:
            continue
        match value:
            case FunctionType():
                yield value
                waiting += _parts_of(value)
                waiting += (value.__globals__.get(name) for name in names_in(value.__code__))
            case MethodType():
                waiting.append(value.__func__)
            case functools.partial():
                waiting += [value.func, value.args, value.keywords]
            case tuple() | list():
                waiting += cast("Sequence[object]", value)
            case dict():
                waiting += cast("dict[object, object]", value).values()
            case _:
                continue
        seen.add(id(cast("object", value)))
