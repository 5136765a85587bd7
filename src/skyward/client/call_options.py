"""Options of calls, and the check of a call's arguments against its function's parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType, EllipsisType, FunctionType, MethodType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from skyward.errors import ConfigurationError
from skyward.request.checks import gibibytes, positive_number, refusal, whole_number
from skyward.request.option_names import refuse_unknown
from skyward.submission import CallLimits
from skyward.wire.code.tracebacks import hide_frames

__all__ = [
    "OPTIONS",
    "Unchanged",
    "by_name_only",
    "checked_memory",
    "checked_retries",
    "checked_retry",
    "checked_timeout",
    "limits_of",
    "options_by_name",
    "parameter_check",
    "refuse_suspended",
]

P = ParamSpec("P")
T = TypeVar("T")

OPTIONS: Final = ("memory", "retries", "timeout")
"""Options that a single call may have."""

Unchanged = EllipsisType
"""``...`` leaves an option as it is; None takes its limit away."""

_KINDS_OF_REST = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def checked_retries(retries: object) -> int:
    """Return ``retries`` if it is a whole number."""
    return whole_number("retries", retries, minimum=0)


def checked_timeout(timeout: object) -> float | None:
    """Return ``timeout`` in seconds; None is no limit."""
    return None if timeout is None else positive_number("timeout", timeout)


def checked_memory(memory: object) -> float | None:
    """Return ``memory``, a size such as ``"4GB"``, in GiB; None is no limit."""
    return None if memory is None else gibibytes("memory", memory)


def limits_of(timeout_s: float | None, memory_gib: float | None) -> CallLimits | None:
    """Return the limits; None if there are none."""
    return None if timeout_s is memory_gib is None else CallLimits(timeout_s=timeout_s, memory_gib=memory_gib)


def checked_retry(retry: object) -> tuple[type[Exception], ...]:
    """Return ``retry`` if it is a tuple of exception classes."""
    entries = cast("tuple[object, ...]", retry) if isinstance(retry, tuple) else (None,)
    if not all(isinstance(entry, type) and issubclass(entry, Exception) for entry in entries):
        number = " (retries= is the number of retries)" if isinstance(retry, int) else ""
        raise refusal("retry", f"a tuple of exception classes such as (OSError,){number}", cast("object", retry))
    return cast("tuple[type[Exception], ...]", entries)


def refuse_suspended(fn: Callable[..., Any], taker: str) -> None:
    """Refuse coroutine functions and generators: their return values have not run, and cannot be pickled."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    # A tenth of the time of `inspect`'s functions, for every call. Proxies show the code of their function.
    owner = fn if type(fn) in (FunctionType, MethodType) else type(fn).__call__
    code = getattr(owner, "__code__", None)
    if not isinstance(code, CodeType):
        return
    name, flags = code.co_name, code.co_flags
    if name == "__call__":
        name = type(fn).__name__
    if flags & inspect.CO_COROUTINE:
        raise ConfigurationError(
            f"{taker} plain functions; {name} is async: call it inside one, with asyncio.run({name}(...))"
        )
    if flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        raise ConfigurationError(f"{taker} plain functions; {name} is a generator: return a list instead")


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
                given = f"{kind.__name__}(...)" if hasattr(kind, "offers") else "skyward.Local()"
                raise TypeError(f"{owner} takes its options by name: write {owner}({required[0]}={given}, ...)")
            refuse_unknown(owner, kwargs, allowed)
            if missing := [name for name in required if name not in kwargs]:
                raise TypeError(f"{owner} needs {', '.join(missing)}, as in {owner}({required[0]}=skyward.Local())")
            init(self, *args, **kwargs)
        except (TypeError, ConfigurationError) as error:
            hide_frames(error)
            raise

    return construct


def options_by_name(example: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function of one argument and keywords: the errors of wrong ones name the right ones.

    Args:
        example: the first argument, in messages.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        first, *options = inspect.signature(function).parameters
        name = function.__name__

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                refuse_unknown(name, kwargs, (first, *options))
                if len(args) > 1:
                    raise TypeError(f"{name} takes its options by name: write {name}({example}, {options[0]}=...)")
                if not args and first not in kwargs:
                    given = "".join(f", {option}=..." for option in kwargs)
                    raise TypeError(f"{name} needs a {first}, as in {name}({example}{given})")
                return function(*args, **kwargs)
            except (TypeError, ConfigurationError) as error:
                hide_frames(error)
                raise

        return called

    return decorate


def _nothing() -> None: ...


def parameter_check(fn: Callable[..., Any]) -> Callable[..., None]:
    """Return a function with the parameters of ``fn`` that does nothing: wrong arguments raise Python's own TypeError.

    Only Python functions are checked. Other callables, such as builtins, get a function that accepts all arguments.
    """
    # 0.1 µs a call; `inspect.Signature.bind` takes 3 µs. The parameters are those of the function itself, not those of
    # one that it wraps: a decorator may add or remove some.
    if type(fn) is not FunctionType:
        return _accept_all
    code, empty = fn.__code__, _nothing.__code__
    rest = code.co_flags & _KINDS_OF_REST
    named = code.co_argcount + code.co_kwonlyargcount + rest.bit_count()
    same_parameters = empty.replace(
        co_argcount=code.co_argcount,
        co_posonlyargcount=code.co_posonlyargcount,
        co_kwonlyargcount=code.co_kwonlyargcount,
        co_varnames=code.co_varnames[:named],
        co_nlocals=named,
        co_flags=empty.co_flags & ~_KINDS_OF_REST | rest,
    )
    check = FunctionType(same_parameters, {}, fn.__name__, fn.__defaults__)
    check.__kwdefaults__, check.__qualname__ = fn.__kwdefaults__, fn.__name__  # pyright: ignore[reportAttributeAccessIssue]
    return check


def _accept_all(*_args: object, **_kwargs: object) -> None: ...
