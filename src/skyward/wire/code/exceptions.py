"""Exceptions as values: raised, in arguments and results, in groups, with constructors of any kind.

By default a pickle calls the class with ``args``, which an own ``__init__`` may not take, and drops what is neither in
``args`` nor in ``__dict__``. Here an exception is made by the constructor of its nearest builtin class, without its own
``__init__``, and gets its attributes, slots, notes, cause and context.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, Final, cast

__all__ = ["RaisedException", "add_note", "reduced_exception", "set_cause"]

_HEAP_TYPE: Final = 1 << 9
_LEFT_BEHIND: Final = frozenset({"exceptions", "message", "obj"})
"""Fields that a constructor has set for good; and the object of an AttributeError, which may be of any size."""
_Reduced = tuple[Any, ...]


# Past a `__setattr__` of the class: those of frozen dataclasses refuse everything.
_set: Final = cast("Callable[[BaseException, str, Any], None]", object.__setattr__)


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Set the cause of an exception, be its class frozen or not."""
    _set(error, "__cause__", cause)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, be its class frozen or not."""
    _set(error, "__notes__", [*getattr(error, "__notes__", ()), note])


class RaisedException:
    """Pickle of an exception that a call raised, without its cause: that will be the traceback on the worker.

    Args:
        error: the exception.
        own_way: whether its class's own ``__reduce__`` is used if it has one.
    """

    def __init__(self, error: BaseException, *, own_way: bool) -> None:
        self._error = error
        self._own_way = own_way

    def __reduce__(self) -> str | _Reduced:
        own = _own_reduction(self._error) if self._own_way else None
        return own or _reduced(self._error, None, None)


def reduced_exception(error: BaseException, is_obstacle: Callable[[object], object]) -> str | _Reduced:
    """Return the reduction of an exception.

    Args:
        error: the exception.
        is_obstacle: returns a true value for an object that cannot be pickled; such a cause or context is left out.
    """
    if (own := _own_reduction(error)) is not None:
        return own
    cause, context = error.__cause__, error.__context__
    return _reduced(error, None if is_obstacle(cause) else cause, None if is_obstacle(context) else context)


def _own_reduction(error: BaseException) -> str | _Reduced | None:
    """Return the reduction that the author of the class has written; None if there is none."""
    cls = type(error)
    registered = cast("dict[type, Any]", copyreg.dispatch_table).get(cls)
    # tblib, which Dask installs, registers all classes: it calls them with `args`, and loses other attributes.
    if registered is not None and not registered.__module__.startswith("tblib"):
        return registered(error)
    own = cls.__mro__[: cls.__mro__.index(_builtin_base(cls))]
    if any({"__reduce__", "__reduce_ex__"} & vars(each).keys() for each in own):
        return error.__reduce_ex__(5)
    return None


def _reduced(error: BaseException, cause: BaseException | None, context: BaseException | None) -> _Reduced:
    cls = type(error)
    base = _builtin_base(cls)
    _, args, *rest = cast("_Reduced", base.__reduce__(error))
    if isinstance(error, BaseExceptionGroup):  # an own `__new__` may take more than its base's
        args = (error.message, cast("Any", error).exceptions)
    state = cast("dict[str, Any]", rest[0] if rest else None) or {}
    chain = cause, context, error.__suppress_context__
    slots = _slots_of(cast("BaseException", error))
    return _make, (cls, base, args, error.args), (state, slots, chain), None, None, _complete


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    return next(each for each in cls.__mro__ if not each.__flags__ & _HEAP_TYPE)


def _slots_of(error: BaseException) -> dict[str, Any]:
    """Return the values of slots, and of the fields of builtin classes, such as ``name`` of an AttributeError."""
    names = [
        name
        for each in type(error).__mro__
        for name, value in vars(each).items()
        if isinstance(value, MemberDescriptorType) and not name.startswith("__") and name not in _LEFT_BEHIND
    ]
    return {name: value for name in names if (value := getattr(error, name, None)) is not None}


def _make(
    cls: type[BaseException], base: type[BaseException], args: tuple[Any, ...], shown: tuple[Any, ...]
) -> BaseException:
    try:
        error = base.__new__(cls, *args)
        base.__init__(error, *args)
    except (TypeError, ValueError):  # `args` were set by hand
        error = base.__new__(cls)
    if error.args != shown:
        _set(error, "args", shown)
    return error


def _complete(error: BaseException, state: tuple[dict[str, Any], dict[str, Any], tuple[Any, Any, bool]]) -> None:
    own, slots, (cause, context, suppressed) = state
    if type(error).__setstate__ is BaseException.__setstate__:
        for name, value in own.items():
            try:
                _set(error, name, value)
            except (AttributeError, TypeError):  # a property of that name
                error.__dict__[name] = value
    else:
        cast("Any", error).__setstate__(own)
    for name, value in slots.items():
        with suppress(AttributeError, TypeError):
            _set(error, name, value)
    set_cause(error, cause)
    _set(error, "__context__", context)
    _set(error, "__suppress_context__", suppressed)
