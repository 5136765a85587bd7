"""Errors of misuse that name the right use, and notes that name a failed call."""

from __future__ import annotations

import functools
import inspect
import reprlib
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, Future
from contextlib import suppress
from itertools import islice
from types import CodeType, GeneratorType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar, cast

from skyward.distributed.runtime import is_on_node
from skyward.errors import ConfigurationError, UnsentCallWarning
from skyward.hidden_frames import from_callers_line, hide_frames
from skyward.request.checks import refuse_unknown
from skyward.shipping.pickling import add_note
from skyward.submission import OPERATIONS, refuse_operations
from skyward.wire.terminal import harmless

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
        """Suppress the warning for this call."""
        raise NotImplementedError


C = TypeVar("C", bound=type[Any])
P = ParamSpec("P")
T = TypeVar("T")

_USES = {**OPERATIONS, "__bool__": "no truth value", "__iter__": "nothing to iterate over", "__len__": "no length"}
_OF_FUTURES = frozenset({"add_done_callback", "cancel", "cancelled", "done", "exception", "get", "result", "wait"})
_SIDES = {"__rrshift__": ">>", "__rmatmul__": "@"}

_BATCH_RUNS_ONCE = (
    "each call of a batch runs once, on any worker: write gather(...) >> pool; to run one call on every worker, write "
    "f(1) @ pool"
)

_NOT_SENT = "the calls have not run: write gather(..., stream=True) >> pool, and iterate over that"

_warned: set[tuple[str, str, int]] = set()


def refuses_uses(cls: C) -> C:
    """Give a class of pending calls all operators of results, each of which raises a TypeError with a hint.

    ``==`` and ``hash`` stay those of objects: calls may be in lists, sets and dictionaries.
    """
    refuse_operations(cls, _USES, _used(_no_result))
    refuse_operations(cls, {"__await__": ""}, _used(_awaited))
    return refuse_operations(cls, _SIDES, _used(_wrong_side))


def refuses_uses_of_batch(cls: C) -> C:
    """Give a class of batches the operators that are easily taken for theirs, each of which raises a TypeError."""
    refuse_operations(cls, {"__rrshift__": ">>"}, _used(_wrong_side))
    return refuse_operations(cls, {"__matmul__": _BATCH_RUNS_ONCE}, _used(lambda _, text: text))


def refuses_uses_of_results(cls: C) -> C:
    """Give a class of streams that are not sent the operators of a batch, and that of the stream: each raises."""
    refuse_operations(cls, {"__iter__": _NOT_SENT, "__aiter__": _NOT_SENT}, _used(lambda _, text: text))
    return refuses_uses_of_batch(cls)


def refuses_uses_of_function(cls: C) -> C:
    """Give a class of compute functions the operators of pending calls and of results, each of which raises."""
    uses = {**OPERATIONS, **dict.fromkeys(("__rshift__", "__rrshift__", "__and__", "__rand__"), ">>")}
    uses |= dict.fromkeys(("__matmul__", "__rmatmul__"), "@")
    return refuse_operations(cls, uses, lambda function, use: _not_called(function.__name__, use))


def refuses_operands(cls: C) -> C:
    """Give a class of pools the operators of calls, for operands that are no calls: each raises a TypeError.

    A number, a list or a plain function has neither operator, so Python tries that of the pool on the right.
    """
    for name, operator in _SIDES.items():
        setattr(cls, name, _refusal(_no_call, operator))
        setattr(cls, name.replace("__r", "__", 1), _refusal(_pool_on_the_left, operator))
    cls.__array_ufunc__ = None  # or numpy would take the pool for an element
    return cls


def _refusal(error: Callable[[object, str], TypeError], operator: str) -> Callable[..., NoReturn]:
    @from_callers_line
    def refuse(_: object, other: object) -> NoReturn:
        raise error(other, operator)

    return refuse


def _pool_on_the_left(right: object, operator: str) -> TypeError:
    if isinstance(right, Unsent):
        right.mark_used()
        return TypeError(_wrong_side(right.label, operator))
    return TypeError(_wrong_side(getattr(right, "__name__", "f"), operator))


def _no_call(left: Any, operator: str) -> TypeError:
    """Return the error of a left operand of a pool that is no pending call."""
    kind, several = type(left).__name__, "gather(*calls)"
    match left:
        case Mapping():
            mark_all_used(cast("Mapping[Any, object]", left).values())
            several = "gather(*calls.values())"
        case list() | tuple() | AbstractSet() | deque():
            mark_all_used(cast("Iterable[object]", left))
        case GeneratorType() | map() | filter() | zip():
            pass
        case Unsent():
            return TypeError(
                f"{left.label} ran and its result is NotImplemented, for which Python tries another operator: write "
                "pool.submit(...).result()"
            )
        case Future():
            return TypeError(f"the call of this {kind} was sent already: write future.result()")
        case _ if callable(left):
            name = getattr(left, "__name__", kind)
            return TypeError(
                f"{name} was not called, and is no compute function: decorate it with @skyward.compute and write "
                f"{name}(...) {operator} pool, or write pool.submit({name}, ...).result()"
            )
        case _:
            return TypeError(
                f"a pending call must stand to the left of {operator}, got {kind}: if a function returned it, that ran "
                f"here. Decorate the function with @skyward.compute and write f(...) {operator} pool, or write "
                "pool.submit(f, ...).result()"
            )
    note = "" if operator == ">>" else "; for one call on every worker, write f(...) @ pool"
    return TypeError(f"{operator} takes a pending call, got {kind}: for several calls, write {several} >> pool{note}")


def _used(message: Callable[[str, str], str]) -> Callable[[Unsent, str], TypeError]:
    def error(call: Unsent, lacks: str) -> TypeError:
        call.mark_used()
        return TypeError(message(call.label, lacks))

    return error


def _awaited(label: str, _: str) -> str:
    return f"{label}(...) is a pending call, which has not run; write await pool.submit({label}, ...)"


def _not_called(name: str, use: str) -> TypeError:
    operator = use if use in _SIDES.values() else ">>"
    return TypeError(f"{name} was not called: write {name}(...) {operator} pool")


def _no_result(label: str, lacks: str) -> str:
    return f"{label}(...) is a pending call, which has not run and has {lacks}; {_run_it(label)} for its result"


def _run_it(label: str) -> str:
    """Return how to run a pending call here: in a program by a pool, in a call as a plain function."""
    if is_on_node():
        return f"calls cannot submit calls: write {label}.local(...) inside a call"
    return f"write {label}(...) >> pool"


def _wrong_side(label: str, operator: str) -> str:
    return f"the pool stands to the right of {operator}, not to the left: write {label}(...) {operator} pool"


def misplaced_call(where: str, label: str) -> ConfigurationError:
    """Return the error of a pending call, of the function ``label``, among the arguments of another one."""
    step = f"{label}.local(...)" if is_on_node() else f"{label}(...) >> pool"
    return ConfigurationError(
        f"an argument of {where} is the pending call {label}(...), which has not run; run it first, and pass its "
        f"result: x = {step}"
    )


def unsent_result(label: str) -> ConfigurationError:
    """Return the error of a pending call, of the function ``label``, in the result of a call."""
    return ConfigurationError(
        f"the result of a call contains the pending call {label}(...), which has not run: calls cannot submit calls. "
        f"Inside a call, write {label}.local(...) to run the plain function"
    )


def mark_all_used(values: Iterable[object]) -> None:
    """Mark all unsent calls among ``values`` as used."""
    for value in values:
        if isinstance(value, Unsent):
            value.mark_used()


def no_pool(value: object, operator: str, label: str) -> TypeError:
    """Return the error of a right operand of ``>>`` or ``@`` that is no pool; ``label`` names the left one."""
    if is_on_node():
        return TypeError(_run_it(label))
    operand = _described(value, f"{label}(...) {operator} pool")
    return TypeError(f"a pool must stand to the right of {operator}, got {operand}")


def _described(value: object, right: str) -> str:
    """Describe an operand that is no pool, with the next step; ``right`` is how the line should end."""
    name = type(value).__name__
    match value:
        case type():
            return f"the class {value.__name__}: open one, as in `with {value.__name__}(...) as pool:`, then {right}"
        case None:
            return f"None: open one, as in `with skyward.ComputePool(...) as pool:`, then {right}"
        case Executor():
            return f"{name}: write executor.submit(f, ...).result(), or give the pool itself: {right}"
        case Iterable():
            return f"{name}: write {right} for one of them at a time"
        case _ if hasattr(value, "launch"):
            return f"a provider: open a pool of it, as in `with skyward.ComputePool(provider={name}(...)) as pool:`"
        case _:
            return f"{name}: open one, as in `with skyward.ComputePool(...) as pool:`, then {right}"


def _is_pool(value: object) -> bool:
    """Return True if calls can be sent to ``value``."""
    # Cheaper than isinstance with a Protocol, which would run for every argument.
    return hasattr(type(value), "run_batch")


def refused_argument(name: str, value: Any) -> ConfigurationError | None:
    """Return the error of a pool, a pending call or a future as an argument of ``name``; None for all other values."""
    if isinstance(value, Unsent):
        value.mark_used()
        return misplaced_call(f"{name}()", value.label)
    if isinstance(value, Future):
        return ConfigurationError(f"an argument of {name}() is a future; pass its result: {name}(future.result())")
    if _is_pool(value):
        return ConfigurationError(
            f"an argument of {name}() is a pool, which cannot be passed to a call; "
            f"leave it out and write {name}(...) >> pool"
        )
    return None


def no_attribute(label: str, name: str) -> AttributeError:
    """Return the error of an attribute that a pending call does not have, with a hint if its result may have it."""
    if name.startswith("_"):  # a protocol that some library looks for
        return AttributeError(f"'PendingCompute' object has no attribute {name!r}")
    if name in _OF_FUTURES and not is_on_node():
        return AttributeError(
            f"{label}(...) is a pending call, which has not run and has no attribute {name!r}; {label}(...) >> pool "
            f"waits for its result, pool.submit({label}, ...) returns a future"
        )
    run = f"{label}.local(...)" if is_on_node() else f"({label}(...) >> pool)"
    return AttributeError(
        f"{label}(...) is a pending call, which has not run and has no attribute {name!r}; write {run}.{name} for that "
        "of its result"
    )


LONGEST_OUTLINE: Final = 200
"""Length of the longest outline of a call, in characters."""
_SHORT_TEXT: Final = 40


class _Outline(reprlib.Repr):
    """Representation of bounded length and cost: arrays by their shape, large bytes by their length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxother, self.maxstring = 3, _SHORT_TEXT, _SHORT_TEXT
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 4

    def repr1(self, x: Any, level: int) -> str:
        """Return the outline of ``x``; its type where it has no representation."""
        kind = type(x).__name__
        try:
            if isinstance(x, type):
                return x.__name__
            if isinstance(x, bytes | bytearray) and len(x) > _SHORT_TEXT:
                return f"<{kind}, {len(x):,} bytes>"
            shape: Any = getattr(x, "shape", None)
            if isinstance(shape, tuple):
                return f"<{kind} {super().repr1(shape, level)}>"
            return super().repr1(x, level)
        except (Exception, SystemExit):  # a class of the user's may raise anything
            return f"<{kind}>"

    def repr_int(self, x: int, level: int) -> str:
        """Raise ValueError for more digits than Python shows: reprlib of 3.14 returns a text with an address."""
        str(x)
        return super().repr_int(x, level)


_OUTLINE: Final = _Outline()


def outline(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a call as text in one line of at most 200 characters: ``train(3, lr=0.1)``. Never raises."""
    arguments = [_OUTLINE.repr(value) for value in args]
    arguments += [f"{key}={_OUTLINE.repr(value)}" for key, value in kwargs.items()]
    text = harmless(f"{name}({', '.join(arguments)})")
    return text if len(text) <= LONGEST_OUTLINE else f"{text[: LONGEST_OUTLINE - 2]}…)"


class _Elided:
    """Stand-in for an argument that is not kept."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind}>"


def kept(args: tuple[object, ...]) -> tuple[object, ...]:
    """Return arguments for a later outline: small numbers and texts, other ones without their memory."""
    return tuple(value if _is_small(value) else _Elided(type(value).__name__) for value in args)


def _is_small(value: object) -> bool:
    return isinstance(value, int | float | complex | None) or (isinstance(value, str) and len(value) <= LONGEST_OUTLINE)


def note_chunk(error: BaseException, name: str, first: int, last: int) -> None:
    """Add a note to an exception of a call of several items.

    Args:
        error: the exception.
        name: name of the call.
        first: index of its first item.
        last: index of its last one.
    """
    with suppress(Exception):  # as in note_call
        add_note(error, f"in {harmless(name)}, one of the items with index {first} to {last}")


def note_call(error: BaseException, call: str, index: int, of: int | None, text: str = "") -> None:
    """Add a note to an exception that names its call: ``in train#2, index 2 of 5 calls: train(2)``.

    Args:
        error: the exception; its class and its text stay.
        call: name of the call.
        index: its index in the batch, from 0.
        of: number of calls in the batch; None if that is unknown.
        text: the call with its arguments; empty if they are unknown.
    """
    with suppress(Exception):  # a class of the user's may forbid notes
        count = "" if of is None else f" of {of} calls"
        add_note(error, f"in {harmless(call)}, index {index}{count}" + (f": {text}" if text else ""))


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
    message = f"{label}(...) was never sent to a pool, and has not run; {_run_it(label)}"
    warnings.warn_explicit(message, UnsentCallWarning, code.co_filename, line)


def not_pending(*operands: object) -> TypeError:
    """Return the error of an ``&`` with something else than pending calls."""
    mark_all_used(operands)
    if callable(operands[-1]):
        name = getattr(operands[-1], "__name__", type(operands[-1]).__name__)
        return TypeError(f"& joins pending calls, and {name} was not called: write ({name}(...) & g()) >> pool")
    return TypeError(
        f"& joins pending calls, got {type(operands[-1]).__name__}: >> and @ bind tighter than &, so that side has "
        "already run; write (f() & g()) >> pool"
    )


def by_name_only(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Decorate a constructor of keywords: for others it names the right ones; its errors show the caller's line."""
    parameters = list(inspect.signature(init).parameters.values())[1:]
    allowed = [parameter.name for parameter in parameters]
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]

    @functools.wraps(init)
    def construct(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
        owner = type(self).__name__
        try:
            if args:
                kind = args[0] if isinstance(args[0], type) else type(args[0])
                provider = f"{kind.__name__}(...)" if hasattr(kind, "offers") else "skyward.Local()"
                raise TypeError(f"{owner} takes its options by name: write {owner}({required[0]}={provider}, ...)")
            refuse_unknown(owner, kwargs, allowed)
            if missing := [name for name in required if name not in kwargs]:
                raise TypeError(f"{owner} needs {', '.join(missing)}, as in {owner}({required[0]}=skyward.Local())")
            init(self, *args, **kwargs)
        except (TypeError, ConfigurationError) as error:
            hide_frames(error)
            raise

    return construct


def options_by_name(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of a provider and keywords: the errors of wrong ones name the right ones."""
    first, *options = inspect.signature(function).parameters
    name = function.__name__

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            refuse_unknown(name, kwargs, (first, *options))
            if len(args) > 1:
                raise TypeError(f"{name} takes its options by name: write {name}(skyward.Local(), {options[0]}=...)")
            return function(*args, **kwargs)
        except (TypeError, ConfigurationError) as error:
            hide_frames(error)
            raise

    return called
