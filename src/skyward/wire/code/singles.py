"""Single objects inside code that travels by value: those that pickle by name, or need not fail to be pickled.

``NewType``, ``ParamSpec``, ``TypeVarTuple`` and sentinels pickle as a name, which a worker lacks for a script or a
notebook. Here they go with what they are made from. Those that are found under a name keep their identity: every call
of a process gets the same object for the same name, and a result refers to the client's own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any, Final, cast

import cloudpickle

from skyward.wire.code.mains import define_in_main
from skyward.wire.code.origins import process_id

__all__ = ["is_single_dispatch", "reduced_dispatch", "reduced_single"]

_Reduced = tuple[Any, ...]
_ABSENT: Final = object()
# Strongly: many of them allow no weak references, and there are as many as names in the programs of the clients. Each
# with its number there, which changes when the name gets another object, as in a cell of a notebook that runs again.
_sent: dict[tuple[str, str], tuple[Any, int]] = {}
_received: dict[tuple[str, str, str], tuple[Any, int]] = {}
_known: dict[int, tuple[Any, _Reduced]] = {}  # of received objects, by id, with their reductions
_numbers: Final = itertools.count(1)


def reduced_single(value: object, by_name: Callable[[Any], bool]) -> _Reduced | None:
    """Return a reduction of ``value`` that needs no name on the other side; None if the usual one will do.

    Args:
        value: any object that is no class, function or module.
        by_name: returns True for an object that the other side finds under its name.
    """
    if (known := _known.get(id(value))) is not None:
        return known[1]
    kind = cast("type[Any]", type(value))
    if kind in _DATACLASS_MARKS:
        return getattr, (dataclasses, _DATACLASS_MARKS[kind])
    if issubclass(kind, enum.Enum):
        return _reduced_member(value)
    if issubclass(kind, functools.cached_property):
        return _reduced_cached_property(value)
    if kind is object:
        found = _name_in_main(value)
        return _named(value, "__main__", found, object, ()) if found else None
    if kind in _TYPING or kind.__name__ == "TypeAliasType":
        parts = _parts_of_typing(value)
        return None if by_name(value) else _named(value, _module_of(value), cast("Any", value).__name__, *parts)
    return _reduced_sentinel(value, by_name)


_TYPING: Final = frozenset({typing.NewType, typing.ParamSpec, typing.TypeVarTuple})
_DATACLASS_MARKS: Final[dict[type[Any], str]] = {
    type(dataclasses.MISSING): "MISSING",
    type(dataclasses.KW_ONLY): "KW_ONLY",
}


def _named(value: object, module: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> _Reduced:
    if not name and module == "__main__":
        name = _name_in_main(value)
    if not name or _found(module, name) is not value:
        return make, arguments
    sent = _sent.get((module, name))
    if sent is None or sent[0] is not value:
        sent = _sent[module, name] = value, next(_numbers)
    return _made, (process_id(), module, name, sent[1], make, arguments)


def _made(  # noqa: PLR0917 - arguments of a reduction
    process: str, module: str, name: str, number: int, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    if process == process_id() and (own := _found(module, name)) is not _ABSENT:
        return own
    key = process, module, name
    received = _received.get(key)
    if received is None or received[1] != number:
        if received is not None:
            _known.pop(id(received[0]), None)
        received = _received[key] = make(*arguments), number
        _known[id(received[0])] = received[0], (_made, (*key, number, make, arguments))
    elif make is _bare:
        _set_state(received[0], arguments[1])  # it may have changed there
    if module == "__main__":
        define_in_main(name, received[0])
    return received[0]


def _found(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), cast("Any", sys.modules[module]))
    except (AttributeError, KeyError):
        return _ABSENT


def _module_of(value: object) -> str:
    return getattr(value, "__module__", None) or "__main__"


def _name_in_main(value: object) -> str:
    names = list(vars(sys.modules["__main__"]).items())
    return next((name for name, each in names if each is value), "")


def _parts_of_typing(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the maker of an object of :mod:`typing` that pickles by name, and its arguments."""
    module = value.__module__
    kind = cast("type[Any]", type(value))
    if kind is typing.NewType:
        return _new_type, (value.__name__, value.__supertype__, module, value.__qualname__)
    if kind is typing.ParamSpec:
        options = {name: getattr(value, f"__{name}__") for name in ("bound", "covariant", "contravariant")}
        return _in_module, (kind, (value.__name__,), options, module)
    if kind is typing.TypeVarTuple:
        return _in_module, (kind, (value.__name__,), {}, module)
    options = {"type_params": value.__type_params__}
    return _in_module, (kind, (value.__name__, value.__value__), options, module)


def _new_type(name: str, supertype: Any, module: str, qualified: str) -> Any:
    made: Any = typing.NewType(name, supertype)  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
    made.__module__, made.__qualname__ = module, qualified
    return made


def _in_module(kind: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any], module: str) -> Any:
    made = kind(*arguments, **options)
    with suppress(AttributeError):
        made.__module__ = module
    return made


def _reduced_member(member: Any) -> _Reduced | None:
    """Return the reduction of an enum's member by its name, or of a composite that has none by its value."""
    cls = cast("type[Any]", type(member))
    own = next(vars(each)["__reduce_ex__"] for each in cls.__mro__ if "__reduce_ex__" in vars(each))
    if getattr(own, "__module__", None) not in ("enum", None):
        return None  # its author's way
    name = getattr(member, "_name_", None)
    if name in cls.__members__ and cls.__members__[name] is member:
        return _member, (cls, name)
    return cls, (member._value_,)


def _member(cls: type[enum.Enum], name: str) -> enum.Enum:
    return cls.__members__[name]


def _reduced_cached_property(value: object) -> _Reduced:
    names: dict[str, Any] = vars(value)
    return (
        _cached_property,
        (cast("type[Any]", type(value)),),
        ({name: each for name, each in names.items() if name != "lock"}, "lock" in names),
        None,
        None,
        _fill_cached_property,
    )


def _cached_property(cls: type[functools.cached_property[Any]]) -> functools.cached_property[Any]:
    return cls.__new__(cls)


def _fill_cached_property(made: functools.cached_property[Any], state: tuple[dict[str, Any], bool]) -> None:
    names, locked = state
    vars(made).update(names, **({"lock": threading.RLock()} if locked else {}))  # until Python 3.12


def _reduced_sentinel(value: Any, by_name: Callable[[Any], bool]) -> _Reduced | None:
    """Return the reduction of an object whose class reduces it to a name; None for any other."""
    cls = cast("type[Any]", type(value))
    if cls in cloudpickle.Pickler.dispatch_table:
        return None
    own = cls.__reduce_ex__ if cls.__reduce_ex__ is not object.__reduce_ex__ else cls.__reduce__
    if not isinstance(own, FunctionType):
        return None
    reduced = value.__reduce_ex__(5)
    if not isinstance(reduced, str):
        return reduced
    return None if by_name(cls) else _named(value, _module_of(value), reduced, _bare, (cls, _state_of(value)))


def _state_of(value: Any) -> dict[str, Any]:
    slots = (name for each in type(value).__mro__ for name in vars(each).get("__slots__", ()))
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _bare(cls: Any, state: Mapping[str, Any]) -> Any:
    made: Any = cls.__new__(cls)
    _set_state(made, state)
    return made


def _set_state(made: Any, state: Mapping[str, Any]) -> None:
    for name, each in state.items():
        object.__setattr__(made, name, each)


def is_single_dispatch(function: FunctionType) -> bool:
    """Return True for a function that :func:`functools.singledispatch` has made."""
    return {"dispatch", "registry", "register", "_clear_cache", "__wrapped__"} <= vars(function).keys()


def reduced_dispatch(function: FunctionType) -> _Reduced:
    """Return the reduction of a function that dispatches by type: its cache and its registry cannot be pickled."""
    parts = vars(function)
    registry = dict(parts["registry"])
    hidden = ("dispatch", "registry", "register", "_clear_cache", "__wrapped__")
    others = {name: value for name, value in parts.items() if name not in hidden}
    return functools.singledispatch, (parts["__wrapped__"],), (registry, others), None, None, _fill_dispatch


def _fill_dispatch(function: Any, state: tuple[dict[type, Any], dict[str, Any]]) -> None:
    registry, others = state
    for kind, implementation in registry.items():
        function.register(kind, implementation)
    vars(function).update(others)
