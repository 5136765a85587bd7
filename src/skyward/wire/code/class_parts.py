"""Parts of classes that travel by value: everything that a class says itself, its slots, and members of enums.

cloudpickle 3.1.3 leaves out what a base says too, which changes the method resolution of diamonds; it makes classes
without their ``__slots__``, and enums without aliases, composites and attributes of members. This module and
:mod:`skyward.wire.code.origins` alone rely on the form of its reductions.
"""

from __future__ import annotations

import copyreg
import enum
import hashlib
import itertools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import cloudpickle.cloudpickle as _cloudpickle

__all__ = ["as_said", "is_code", "stamps_of"]

_Reduced = tuple[Any, ...]
_make_skeleton: Final = cast("Any", _cloudpickle)._make_skeleton_class  # noqa: SLF001 - it has no public way
_track: Final = cast("Any", _cloudpickle)._lookup_class_or_track  # noqa: SLF001 - as above
_MADE_ANEW: Final = frozenset({"__dict__", "__doc__", "__module__", "__slots__", "__weakref__"})
_ENUMS_OWN: Final = frozenset({"_member_map_", "_member_names_", "_member_type_", "_value2member_map_"})
_MEMBERS_OWN: Final = frozenset({"__objclass__", "_inverted_", "_name_", "_sort_order_", "_value_"})


def as_said(cls: type[Any], reduced: _Reduced) -> _Reduced:
    """Return cloudpickle's reduction of a class with all that the class says itself, in its order."""
    make, arguments, state, listed, items, set_state = reduced
    names = _own_names(cls, state[0])
    if issubclass(cls, enum.Enum):
        arguments = (cls.__bases__, cls.__name__, cls.__qualname__, *_enum_parts(cls), *arguments[-2:])
        return _make_enum, arguments, (names, _attributes_of_members(cls)), listed, items, set_state
    if (slots := vars(cls).get("__slots__")) is not None and make is _make_skeleton and not issubclass(cls, tuple):
        head, body, tail = arguments[:3], arguments[3], arguments[4:]  # a NamedTuple refuses slots
        arguments = (*head, body | {"__slots__": slots}, *tail)
    return make, arguments, (names, state[1]), listed, items, set_state


def _own_names(cls: type[Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    bases = [vars(base) for base in cls.__bases__]
    hidden = set(_MADE_ANEW)
    if issubclass(cls, enum.Enum):
        hidden |= _ENUMS_OWN | cls.__members__.keys()
    own: dict[str, Any] = {}
    for name, value in vars(cls).items():
        copied = "".join(name)  # not interned, as cloudpickle's names: equal pickles for equal classes
        if name in sent and name not in hidden - _MADE_ANEW:
            own[copied] = sent[name]
        elif name not in hidden and name != "_abc_impl" and any(base.get(name, base) is value for base in bases):
            own[copied] = value
    return own | {name: value for name, value in sent.items() if name not in own and name not in hidden}


@dataclass(frozen=True, slots=True)
class _Given:
    """What a member of an enum is made from.

    Attributes:
        payload: arguments for the data type that the enum is mixed with.
        value: the member's value.
    """

    payload: tuple[Any, ...]
    value: Any


def _enum_parts(cls: type[enum.Enum]) -> tuple[Any, ...]:
    mixin = cast("Any", cls)._member_type_
    members = {name: (_payload(each, mixin), each._value_) for name, each in cls.__members__.items()}
    return cls.__module__, type(cls), vars(cls).get("_boundary_"), mixin, members


def _payload(member: Any, mixin: Any) -> tuple[Any, ...]:
    """Return the arguments with which the data type of an enum makes the data of a member."""
    if mixin is object:
        return ()
    if hasattr(mixin, "__getnewargs__"):
        return mixin.__getnewargs__(member)
    make, arguments, *_ = mixin.__reduce_ex__(member, 2)
    if make is cast("Any", copyreg).__newobj__:
        return arguments[1:]
    return arguments if make is type(member) else ()


def _make_enum(  # noqa: PLR0917 - arguments of a reduction
    bases: tuple[type, ...],
    name: str,
    qualified: str,
    module: str,
    metaclass: Any,
    boundary: Any,
    mixin: Any,
    members: Mapping[str, tuple[tuple[Any, ...], Any]],
    class_id: str,
    _: object,
) -> type:
    def __new__(cls: Any, given: _Given) -> Any:  # noqa: N807
        made = mixin.__new__(cls, *given.payload)
        made._value_ = given.value
        return made

    options = {} if boundary is None else {"boundary": boundary}
    body = metaclass.__prepare__(name, bases, **options)
    body["__module__"], body["__qualname__"] = module, qualified
    body["__new__"], body["__init__"] = __new__, _no_init
    for each, (payload, value) in members.items():
        body[each] = _Given(payload, value)
    made = metaclass.__new__(metaclass, name, bases, body, **options)
    for own in ("__init__", "__new_member__"):
        if own in vars(made):
            delattr(made, own)
    return _track(class_id, made)


def _no_init(*_: object) -> None:
    """Leave a member as it is: its attributes come with the class's."""


def _attributes_of_members(cls: type[enum.Enum]) -> dict[str, dict[str, Any]]:
    own = {
        name: {each: value for each, value in vars(member).items() if each not in _MEMBERS_OWN}
        for name, member in cls.__members__.items()
    }
    return {name: attributes for name, attributes in own.items() if attributes}


def is_code(value: object) -> bool:
    """Return True for a function or another part of a class that is no data."""
    return isinstance(value, FunctionType | type) or hasattr(type(value), "__get__")


# By class: of each attribute what tells its state, and the stamp of that state.
_stamped: WeakKeyDictionary[type, dict[str, tuple[object, int]]] = WeakKeyDictionary()
_stamps = itertools.count(1)


def stamps_of(cls: type, names: Mapping[str, Any]) -> dict[str, int]:
    """Return a number for each attribute of a class, which changes when the attribute has changed here."""
    known = _stamped.setdefault(cls, {})
    for name, value in names.items():
        state = _state_of(value)
        if name not in known or known[name][0] != state:
            known[name] = state, next(_stamps)
    return {name: known[name][1] for name in names}


_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def _state_of(value: Any) -> object:
    """Return what tells one state of an attribute from another: its identity, and its content if that may change."""
    kind = cast("type[Any]", type(value))
    if kind in _PLAIN:
        return kind, value
    if is_code(value):
        return id(value)
    content = hashlib.blake2b(digest_size=16)

    def add(buffer: pickle.PickleBuffer) -> bool:
        content.update(buffer.raw())
        return False

    try:
        content.update(pickle.dumps(value, protocol=5, buffer_callback=cast("Callable[[Any], Any]", add)))
    except Exception:  # the user's classes may raise anything
        return id(value), tuple(map(id, cast("Any", value))) if isinstance(value, list | tuple | set | dict) else ()
    return content.digest()
