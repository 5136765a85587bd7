"""Hints for calls whose operator was forgotten: uses of a pending call as if it were its result, or no use at all."""

from __future__ import annotations

import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import chain, islice
from types import CodeType
from typing import Any, NoReturn, TypeVar

from skyward.errors import ConfigurationError, UnsentCallWarning
from skyward.wire.code.pickling import PLAIN_TYPES
from skyward.wire.code.tracebacks import hide_frames, is_explained

__all__ = [
    "CallSite",
    "Unsent",
    "checked_pool",
    "leave_to_caller",
    "mark_all_used",
    "misplaced_call",
    "no_attribute",
    "not_pending",
    "refuse_misplaced",
    "refuses_uses",
    "refuses_uses_of_batch",
    "short_call",
    "warn_unsent",
]

CallSite = tuple[CodeType, int]
"""Code that made a call, and the offset of the instruction."""


class Unsent:
    """Call, or batch of calls, that no pool has received."""

    # No abstract base class, whose isinstance() takes three times as long, for every argument.
    __slots__ = ()

    @property
    def label(self) -> str:
        """Name of the function, for messages."""
        raise NotImplementedError

    def mark_used(self) -> None:
        """Expect no more of it: its end is no reason for a warning."""
        raise NotImplementedError


C = TypeVar("C", bound=type[Any])
P = TypeVar("P")

_COMPUTE = "no part in arithmetic"
_COMPARE = "no order"
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "or", "xor", "lshift")
_USES: dict[str, str] = {
    "__bool__": "no truth value",
    "__iter__": "nothing to iterate over",
    "__len__": "no length",
    "__getitem__": "no items",
    "__contains__": "no items",
    "__int__": "no number",
    "__float__": "no number",
    "__index__": "no number",
    "__round__": "no number",
    **dict.fromkeys(("__lt__", "__le__", "__gt__", "__ge__"), _COMPARE),
    **{f"__{side}{name}__": _COMPUTE for name in _BINARY for side in ("", "r")},
    **dict.fromkeys(("__neg__", "__pos__", "__abs__", "__invert__"), _COMPUTE),
}

_BATCH_RUNS_ONCE = (
    "each call of a batch runs once, on any worker: write gather(...) >> pool; to run one call on every worker, write "
    "f(1) @ pool"
)

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 24
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 3
_SHOWN_ARGUMENTS = 4
_warned: set[tuple[str, str, int]] = set()


def refuses_uses(cls: C) -> C:
    """Give a class of pending calls all operators of results, each of which raises a TypeError with a hint.

    ``==`` and ``hash`` stay those of objects: calls may be in lists, sets and dictionaries.
    """
    # Set at run time only: a type checker goes on to report these uses as errors.
    for name, lacks in _USES.items():
        setattr(cls, name, _refusal(lambda label, lacks=lacks: _no_result(label, lacks)))
    for name, operator in {"__rrshift__": ">>", "__rmatmul__": "@"}.items():
        setattr(cls, name, _refusal(lambda label, operator=operator: _wrong_side(label, operator)))
    return cls


def refuses_uses_of_batch(cls: C) -> C:
    """Give a class of batches the operators that are easily taken for theirs, each of which raises a TypeError."""
    setattr(cls, "__rrshift__", _refusal(lambda label: _wrong_side(label, ">>")))  # noqa: B010 - see above
    setattr(cls, "__matmul__", _refusal(lambda _: _BATCH_RUNS_ONCE))  # noqa: B010
    return cls


def _refusal(message: Callable[[str], str]) -> Callable[..., NoReturn]:
    def refuse(self: Unsent, *_: object) -> NoReturn:
        self.mark_used()
        error = TypeError(message(self.label))
        try:
            raise error
        except TypeError:
            hide_frames(error)
            raise

    return refuse


def _no_result(label: str, lacks: str) -> str:
    return (
        f"{label}(...) is a pending call, which has not run and has {lacks}; write {label}(...) >> pool for its result"
    )


def _wrong_side(label: str, operator: str) -> str:
    return f"the pool stands to the right of {operator}, not to the left: write {label}(...) {operator} pool"


def misplaced_call(where: str, label: str) -> ConfigurationError:
    """Return the error of a pending call, of the function ``label``, among the arguments of another one."""
    return ConfigurationError(
        f"an argument of {where} is the pending call {label}(...), which has not run; run it first, and pass its "
        f"result: x = {label}(...) >> pool"
    )


def mark_all_used(values: Iterable[object]) -> None:
    """Mark all unsent calls among ``values`` as used."""
    for value in values:
        if isinstance(value, Unsent):
            value.mark_used()


def checked_pool(value: P, operator: str) -> P:
    """Return the right operand of ``>>`` or ``@`` if it is a pool.

    Raises:
        TypeError: it is none.
    """
    if not _is_pool(value):
        if isinstance(value, type):
            given = f"the class {value.__name__}: open one, as in `with {value.__name__}(...) as pool:`"
        else:
            given = type(value).__name__
        raise TypeError(f"a pool must stand to the right of {operator}, got {given}")
    return value


def _is_pool(value: object) -> bool:
    """Return True if calls can be sent to ``value``."""
    # Cheaper than isinstance with a Protocol, which would run for every argument.
    return hasattr(type(value), "run_batch")


# Entries of a container that are looked at when a call is made. Pickling finds all others, when it is sent.
_ENTRIES = 8


def refuse_misplaced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse pools and pending calls among the arguments, and in lists and dictionaries among them."""
    value: Any
    for value in chain(args, kwargs.values()) if kwargs else args:
        kind = value.__class__
        if kind in PLAIN_TYPES:
            continue
        if kind is list or kind is tuple or kind is dict:
            for entry in islice(value.values() if kind is dict else value, _ENTRIES):
                if entry.__class__ not in PLAIN_TYPES:
                    _refuse_one(name, entry)
        else:
            _refuse_one(name, value)


def _refuse_one(name: str, value: Any) -> None:
    if isinstance(value, Unsent):
        value.mark_used()
        raise misplaced_call(f"{name}()", value.label)
    if isinstance(value, Future):
        raise ConfigurationError(f"an argument of {name}() is a future; pass its result: {name}(future.result())")
    if _is_pool(value):
        raise ConfigurationError(
            f"an argument of {name}() is a pool, and a pool does not travel to its workers; "
            f"leave it out and write {name}(...) >> pool"
        )


def no_attribute(label: str, kind: str, name: str) -> AttributeError:
    """Return the error of an attribute that a pending call does not have, with a hint if its result may have it."""
    if name.startswith("_"):  # a protocol that some library looks for
        return AttributeError(f"{kind!r} object has no attribute {name!r}")
    return AttributeError(
        f"{label}(...) is a pending call, which has not run and has no attribute {name!r}; write "
        f"({label}(...) >> pool).{name} for that of its result"
    )


def short_call(label: str, args: Iterable[object], kwargs: dict[str, Any]) -> str:
    """Return a call as one would write it, with short arguments: ``train(3, [1, 2, 3, ...], rate=0.1)``."""
    words = [_short.repr(value) for value in args]
    words += [f"{name}={_short.repr(value)}" for name, value in kwargs.items()]
    if len(words) > _SHOWN_ARGUMENTS:
        words = [*words[:_SHOWN_ARGUMENTS], "..."]
    return f"{label}({', '.join(words)})"


def warn_unsent(label: str, site: CallSite) -> None:
    """Warn of a call that was dropped unsent, once for its function and line; not while the interpreter ends."""
    if sys.is_finalizing():
        return
    code, offset = site
    line = next(islice(code.co_positions(), offset // 2, None))[0] or code.co_firstlineno
    key = label, code.co_filename, line
    if key in _warned:
        return
    _warned.add(key)
    message = f"{label}(...) was never sent to a pool, and has not run; write {label}(...) >> pool"
    warnings.warn_explicit(message, UnsentCallWarning, code.co_filename, line)


def leave_to_caller(pending: Unsent, error: BaseException, pool: object) -> None:
    """Let the caller's line be the last one of the traceback, unless the frames below it are of use."""
    pending.mark_used()
    if is_explained(error) or not _is_pool(pool):
        hide_frames(error)


def not_pending(*operands: object) -> TypeError:
    """Return the error of an ``&`` with something else than pending calls."""
    mark_all_used(operands)
    return TypeError(
        f"& joins pending calls, got {type(operands[-1]).__name__}: >> and @ bind tighter than &, so that side has "
        "already run; write (f() & g()) >> pool"
    )
