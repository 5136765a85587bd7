"""Lazy calls: ``@compute``, pending calls, their options, and the operators that send them to a pool.

::

    fn(x) >> pool                 # once, on any worker
    fn(x) @ pool                  # once on every worker
    (f(x) & g(y)) >> pool         # both, in parallel
    gather(*calls) >> pool        # any number, in parallel
    fn(x).options(timeout=60) >> pool
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from types import CodeType, EllipsisType, FrameType, FunctionType, MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    Never,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    TypeVarTuple,
    cast,
    overload,
)

from skyward.api import misuse
from skyward.distributed._gang import GANG_MARK, is_gang
from skyward.distributed.runtime import is_on_node
from skyward.errors import ConfigurationError
from skyward.hidden_frames import from_callers_line, hide_frames, is_explained
from skyward.request.checks import duration, flag, gibibytes, refusal, refuse_unknown, whole_number
from skyward.shipping.pickling import PLAIN_TYPES, pack, packing, unpack
from skyward.submission import CallLimits, Invocation

if TYPE_CHECKING:
    from skyward.api.streams import Stream

__all__ = ["ComputeFunction", "PendingBatch", "PendingCompute", "compute", "gather"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
R1 = TypeVar("R1")
R2 = TypeVar("R2")
R3 = TypeVar("R3")
R4 = TypeVar("R4")
R5 = TypeVar("R5")
U = TypeVar("U", bound=misuse.Unsent)
A = TypeVar("A")


def _runs_on_pool(operator: str) -> Callable[[Callable[[U, A], T]], Callable[[U, A], T]]:
    """Decorate the method of ``>>`` or ``@`` that has its right operand, a pool, run what stands to the left.

    Of an error, the caller's line is the last one of the traceback, unless the frames below it are of use.
    """

    def decorate(run: Callable[[U, A], T]) -> Callable[[U, A], T]:
        @functools.wraps(run)
        def called(pending: U, pool: A) -> T:
            try:
                if not hasattr(type(pool), "run_batch"):
                    raise misuse.no_pool(pool, operator, pending.label)
                return run(pending, pool)
            except BaseException as error:
                pending.mark_used()
                if is_explained(error) or not hasattr(type(pool), "run_batch"):
                    hide_frames(error)
                raise

        return called

    return decorate


class Runner(Protocol):
    """Right-hand operand of ``>>`` and ``@``: a pool."""

    def run(self, pending: PendingCompute[R], /) -> R:
        """Run one call on any worker and wait for its result."""
        ...

    def run_batch(self, batch: PendingBatch[*Ts], /) -> tuple[*Ts]:
        """Run the calls in parallel and wait for their results, in order."""
        ...

    def broadcast(self, pending: PendingCompute[R], /) -> tuple[R, ...]:
        """Run one call on every worker and wait for the results, ordered by (node, worker)."""
        ...

    def run_generator(self, pending: PendingStream[T], /, *, everywhere: bool = False) -> tuple[Stream[T], ...]:
        """Run a generator on any worker, or on every worker; return the streams of its items at once."""
        ...

    def run_as_read(self, batch: PendingResults[R], /) -> Stream[R]:
        """Run calls while their results are read; return the stream of the results at once."""
        ...


@misuse.refuses_uses
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PendingCompute(misuse.Unsent, Generic[R]):
    """Call that is not yet sent to a pool; its result is an ``R``. Immutable; picklable by any pickler.

    Attributes:
        fn: function to run on the worker.
        args: its positional arguments.
        kwargs: its keyword arguments.
        retries: maximum number of further runs after the loss of a worker; preemptions do not count.
        limits: limits of a run, in time and memory; None if there are none.
    """

    fn: Callable[..., R]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    retries: int = 3
    limits: CallLimits | None = None
    _site: misuse.CallSite | None = None
    """Place of a call that nothing has used yet, for the warning of a call that is dropped unsent."""

    @overload
    def __rshift__(self: PendingCompute[Never], pool: Runner, /) -> R: ...  # also what a type checker knows nothing of
    @overload
    def __rshift__(self: PendingCompute[Generator[T, Any, Any]], pool: Runner, /) -> Stream[T]: ...
    @overload
    def __rshift__(self: PendingCompute[Iterator[T]], pool: Runner, /) -> Stream[T]: ...
    @overload
    def __rshift__(self, pool: Runner, /) -> R: ...
    @_runs_on_pool(">>")
    def __rshift__(self, pool: Runner, /) -> Any:
        """Run the call on one worker and return its result: ``call >> pool``.

        The result of a generator is the :class:`~skyward.Stream` of its items, at once.
        """
        return pool.run(self)

    @overload
    def __matmul__(self: PendingCompute[Never], pool: Runner, /) -> tuple[R, ...]: ...
    @overload
    def __matmul__(self: PendingCompute[Generator[T, Any, Any]], pool: Runner, /) -> tuple[Stream[T], ...]: ...
    @overload
    def __matmul__(self: PendingCompute[Iterator[T]], pool: Runner, /) -> tuple[Stream[T], ...]: ...
    @overload
    def __matmul__(self, pool: Runner, /) -> tuple[R, ...]: ...
    @_runs_on_pool("@")
    def __matmul__(self, pool: Runner, /) -> tuple[Any, ...]:
        """Run the call once on every worker and return the results by (node, worker): ``call @ pool``."""
        return pool.broadcast(self)

    def options(
        self,
        *,
        retries: int | EllipsisType = ...,
        timeout: str | float | EllipsisType | None = ...,
        grace: str | float | EllipsisType | None = ...,
        memory: str | EllipsisType | None = ...,
        **unknown: Never,
    ) -> PendingCompute[R]:
        """Return the call with these options instead of those of its function; others stay as they are.

        Args:
            retries: as for :func:`compute`.
            timeout: as for :func:`compute`.
            grace: as for :func:`compute`.
            memory: as for :func:`compute`.
            **unknown: refused.

        Raises:
            ConfigurationError: an option is unknown, or has a wrong type or value.
        """
        site, limits = self._site, self.limits or _UNLIMITED
        self.mark_used()
        refuse_unknown(f"{self.label}(...).options", unknown, _OPTIONS)
        return replace(
            self,
            _site=site,
            retries=self.retries if retries is ... else _checked_retries(retries),
            limits=_checked_limits(timeout, memory, grace, limits),
        )

    @property
    def label(self) -> str:
        """Name of the function, for messages."""
        return _name_of(self.fn)

    def mark_used(self) -> None:
        """Suppress the warning for this call."""
        object.__setattr__(self, "_site", None)

    @overload
    def __and__(self, other: PendingCompute[S]) -> PendingBatch[R, S]: ...
    @overload
    def __and__(self, other: PendingBatch[*Ts]) -> PendingBatch[R, *Ts]: ...
    @from_callers_line
    def __and__(self, other: PendingCompute[Any] | PendingBatch[*Ts]) -> PendingBatch[*tuple[Any, ...]]:
        """Combine calls to run in parallel: ``call & call``."""
        alone: PendingBatch[*tuple[Any, ...]] = PendingBatch(calls=(self,))
        return alone & other

    @from_callers_line
    def __rand__(self, other: object) -> PendingBatch[*tuple[Any, ...]]:
        """Raise: the left operand is not a pending call."""
        raise misuse.not_pending(self, other)

    def __reduce__(self) -> tuple[Any, ...]:
        if packing.arguments_of:
            raise misuse.misplaced_call(packing.arguments_of, self.label)
        self.mark_used()
        if packing.of_result or is_on_node():
            raise misuse.unsent_result(self.label)
        parts = (self.fn, self.args, self.kwargs, self.retries, self.limits)
        packed = pack(parts, what=self.label)
        return _unpickled, (packed.data, [bytes(buffer) for buffer in packed.buffers], type(self))

    def __repr__(self) -> str:
        return f"<pending call {misuse.outline(self.label, self.args, self.kwargs)}: not sent, write ... >> pool>"

    def __del__(self) -> None:
        try:
            if self._site is not None:
                misuse.warn_unsent(self.label, self._site)
        except AttributeError:  # its creation failed
            pass

    if not TYPE_CHECKING:  # a type checker knows that results' attributes are not there

        @from_callers_line
        def __getattr__(self, name: str) -> NoReturn:
            raise misuse.no_attribute("" if name == "fn" else self.label, name)

    def invocation(self) -> Invocation:
        """Return the call in the form of the task-submission interface."""
        object.__setattr__(self, "_site", None)  # mark_used(), without the cost of a method
        fn = self.fn
        return Invocation(
            fn=fn,
            args=self.args,
            kwargs=self.kwargs,
            retries=self.retries,
            label=getattr(fn, "__name__", "") or _name_of(fn),
            gang=getattr(fn, GANG_MARK, False) is True,
            limits=self.limits,
        )


class PendingStream(PendingCompute[Iterator[T]]):
    """Call of a generator that is not yet sent to a pool. Immutable; picklable by any pickler."""

    __slots__ = ()

    @_runs_on_pool(">>")
    def __rshift__(self, pool: Runner, /) -> Stream[T]:
        """Run the generator on one worker; return the stream of its items at once: ``call >> pool``."""
        (stream,) = pool.run_generator(self)
        return stream

    @_runs_on_pool("@")
    def __matmul__(self, pool: Runner, /) -> tuple[Stream[T], ...]:
        """Run the generator on every worker; return the streams of their items by (node, worker): ``call @ pool``."""
        return pool.run_generator(self, everywhere=True)

    def invocation(self) -> Invocation:
        """Raise: a generator has items, and no result for a future or a batch."""
        self.mark_used()
        raise ConfigurationError(
            f"{self.label} is a generator: {self.label}(...) >> pool returns its items as they come, while it runs. "
            "For several of them at once, write that for each; for a single result, return a list instead"
        )

    def generator_invocation(self) -> Invocation:
        """Return the call in the form of the task-submission interface."""
        return PendingCompute.invocation(self)


@misuse.refuses_uses_of_batch
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingBatch(misuse.Unsent, Generic[*Ts]):
    """Calls to run in parallel; the results are a ``tuple[*Ts]``, in order. Immutable; picklable.

    Attributes:
        calls: the calls.
        return_exceptions: return the exception of a failed call in place of its result, instead of raising it.
    """

    calls: tuple[PendingCompute[Any], ...]
    return_exceptions: bool = False

    @_runs_on_pool(">>")
    def __rshift__(self, pool: Runner, /) -> tuple[*Ts]:
        """Run the calls in parallel: ``batch >> pool``; the first failure is raised at once."""
        return pool.run_batch(self)

    @property
    def label(self) -> str:
        """Name for messages."""
        return "gather"

    def mark_used(self) -> None:
        """Suppress the warning for these calls: see :meth:`PendingCompute.mark_used`."""
        for call in self.calls:
            call.mark_used()

    @overload
    def __and__(self, other: PendingCompute[S]) -> PendingBatch[*Ts, S]: ...
    @overload
    def __and__(self, other: PendingBatch[*tuple[Any, ...]]) -> PendingBatch[*tuple[Any, ...]]: ...
    @from_callers_line
    def __and__(self, other: object) -> PendingBatch[*tuple[Any, ...]]:
        """Add a call or a batch, to run in parallel with the others: ``batch & call``."""
        match other:
            case PendingCompute():
                return replace(self, calls=(*self.calls, other))
            case PendingBatch():
                either = self.return_exceptions or other.return_exceptions
                return replace(self, calls=self.calls + other.calls, return_exceptions=either)
            case _:
                raise misuse.not_pending(self, other)

    @from_callers_line
    def __rand__(self, other: object) -> PendingBatch[*tuple[Any, ...]]:
        """Raise: the left operand is not a pending call."""
        raise misuse.not_pending(self, other)

    def __iter__(self) -> Iterator[PendingCompute[Any]]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)


@misuse.refuses_uses_of_results
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingResults(misuse.Unsent, Generic[R]):
    """Calls, any number of them, whose results are read as they come: ``gather(..., stream=True)``.

    Attributes:
        calls: the calls.
        return_exceptions: return the exception of a failed call in place of its result, instead of raising it.
        ordered: whether results come in the order of the calls, or else as they arrive.
    """

    calls: Iterable[PendingCompute[Any]]
    return_exceptions: bool = False
    ordered: bool = True

    @_runs_on_pool(">>")
    def __rshift__(self, pool: Runner, /) -> Stream[R]:
        """Run the calls while their results are read; return the stream of the results at once."""
        return pool.run_as_read(self)

    @property
    def label(self) -> str:
        """Name for messages."""
        return "gather"

    def mark_used(self) -> None:
        """Suppress the warning for these calls: see :meth:`PendingCompute.mark_used`."""
        if isinstance(self.calls, tuple | list):
            misuse.mark_all_used(cast("Iterable[object]", self.calls))

    def invocations(self) -> Iterator[Invocation]:
        """Yield the calls in the form of the task-submission interface.

        Raises:
            ConfigurationError: one of them is no pending call.
        """
        for position, call in enumerate(self.calls, start=1):
            if not isinstance(call, PendingCompute):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(
                    f"gather takes pending calls, got {type(call).__name__} as number {position} of the iterable"
                )
            yield call.invocation()


@misuse.refuses_uses_of_function
class ComputeFunction(Generic[P, R]):
    """Function whose calls are lazy: calling it returns a :class:`PendingCompute`. Made by :func:`compute`.

    It has the name, documentation and signature of the original function. It works as a method too: the object is
    sent to the worker as the first argument, and the method's changes to it stay there.

    Args:
        fn: the original function.
        retries: maximum number of further runs of a call after the loss of its worker; preemptions do not count.
        retry: errors of the function after which it runs again, on the same worker, at most ``retries`` times.
        limits: limits of a run of a call, in time and memory; None if there are none.

    Attributes:
        retries: maximum number of further runs of a call after the loss of its worker; preemptions do not count.
        limits: limits of a run of a call, in time and memory; None if there are none.
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[P, R]

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        retries: int = 3,
        retry: tuple[type[Exception], ...] = (),
        limits: CallLimits | None = None,
    ) -> None:
        body = _body_of(fn, retries, retry)
        functools.update_wrapper(self, body)
        # Workers run the body. It can be imported under this name, so it is pickled like any function: by reference or
        # by value, as its module requires. The decorated function cannot: its name refers to this object.
        body.__qualname__ = f"{self.__qualname__}.__wrapped__"
        self.retries = retries
        self.limits = limits
        self._retry = retry

    @property
    def local(self) -> Callable[P, R]:
        """The original function, to call in this process."""
        return cast("Callable[P, R]", vars(self.__wrapped__)["__wrapped__"])

    if not TYPE_CHECKING:  # a type checker knows which attributes there are

        @from_callers_line
        def __getattr__(self, name: str) -> NoReturn:
            hint = ""
            if not name.startswith("_") and "__name__" in vars(self):
                own = self.__name__
                hint = f"; write {own}(...) >> pool to run it on a pool, {own}.local(...) to run it here"
                hint += f", {own}(...).options(...) for the options of a call" if name == "options" else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def decorated_inside(self, decorate: Callable[[Callable[P, R]], Callable[P, R]]) -> ComputeFunction[P, R]:
        """Return a compute function of the original function with ``decorate`` applied first."""
        return ComputeFunction(decorate(self.local), retries=self.retries, retry=self._retry, limits=self.limits)

    @functools.cached_property
    def _check(self) -> Callable[..., None]:
        return _parameter_check(self.local)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_check"}  # it has no name to pickle it by

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> PendingCompute[R]:
        """Return a pending call with these arguments.

        Raises:
            TypeError: the function does not take these arguments.
            ConfigurationError: an argument is a pool, or a call whose result is not there yet.
        """
        caller = sys._getframe(1)  # noqa: SLF001 - 0.1 µs; inspect reads files  # pyright: ignore[reportPrivateUsage]
        try:
            return self.pending(args, kwargs, caller)
        except (TypeError, ConfigurationError) as error:
            hide_frames(error)
            raise

    def pending(self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> PendingCompute[R]:
        """Return a pending call with these arguments, made in the frame ``caller``."""
        self._check(*args, **kwargs)
        _refuse_misplaced(self.__name__, args, kwargs)
        return PendingCompute(
            fn=self.__wrapped__,
            args=args,
            kwargs=kwargs,
            retries=self.retries,
            limits=self.limits,
            _site=(caller.f_code, caller.f_lasti),
        )

    @overload
    def __get__(self, instance: None, owner: type) -> ComputeFunction[P, R]: ...
    @overload
    def __get__(
        self: ComputeFunction[Concatenate[T, Q], S], instance: T, owner: type | None = None
    ) -> BoundComputeFunction[Q, S]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return itself on the class, a bound method on an object, as functions do."""
        return self if instance is None else BoundComputeFunction(self, instance)

    def __repr__(self) -> str:
        return f"<compute function {self.__module__}.{self.__qualname__}>"


class StreamFunction(ComputeFunction[P, Iterator[T]]):
    """Generator whose calls are lazy: calling it returns a :class:`PendingStream`. Made by :func:`compute`."""

    def pending(self, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> PendingStream[T]:
        """Return a pending call with these arguments, made in the frame ``caller``."""
        call, site = super().pending(args, kwargs, caller), (caller.f_code, caller.f_lasti)
        call.mark_used()
        return PendingStream(fn=call.fn, args=args, kwargs=kwargs, retries=call.retries, limits=call.limits, _site=site)

    def decorated_inside(self, decorate: object) -> NoReturn:  # noqa: ARG002 - the base's
        """Raise: workers that run a function together have one result each."""
        raise ConfigurationError(
            f"{self.__name__} is a generator, and the workers of skyward.distributed return a result each: return a "
            "list instead"
        )


@misuse.refuses_uses_of_function
class BoundComputeFunction(Generic[P, R]):
    """Compute function as a method of an object or a class, which is the first argument of its calls.

    Attributes:
        __func__: the compute function.
        __self__: the object or class.
    """

    def __init__(self, function: ComputeFunction[..., R], owner: object) -> None:
        self.__func__ = function
        self.__self__ = owner
        self.__module__, self.__doc__ = function.__module__, function.__doc__

    @property
    def local(self) -> Callable[P, R]:
        """The original method, to call in this process."""
        return MethodType(self.__func__.local, self.__self__)

    @property
    def __wrapped__(self) -> Callable[P, R]:
        return self.local

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> PendingCompute[R]:
        """Return a pending call: see :meth:`ComputeFunction.__call__`."""
        caller = sys._getframe(1)  # noqa: SLF001 - as above  # pyright: ignore[reportPrivateUsage]
        try:
            return self.__func__.pending((self.__self__, *args), kwargs, caller)
        except (TypeError, ConfigurationError) as error:
            hide_frames(error)
            raise

    @from_callers_line
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundComputeFunction):
            return NotImplemented
        return self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundComputeFunction, (self.__func__, self.__self__)

    def __repr__(self) -> str:
        return f"<compute method {self.__module__}.{self.__qualname__} of {self.__self__!r}>"


@overload
def compute(fn: Callable[P, R], /) -> ComputeFunction[P, R]: ...
@overload
def compute(
    *,
    retries: int = 3,
    retry: tuple[type[Exception], ...] = (),
    timeout: str | float | None = None,
    grace: str | float | None = None,
    memory: str | None = None,
) -> Callable[[Callable[P, R]], ComputeFunction[P, R]]: ...
def compute(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    retries: int = 3,
    retry: tuple[type[Exception], ...] = (),
    timeout: str | float | None = None,
    grace: str | float | None = None,
    memory: str | None = None,
    **unknown: Never,
) -> Any:
    """Make a function lazy: calling it gives a :class:`PendingCompute`. Used bare or with options.

    A call of a generator, ``call >> pool``, gives its items as they come: a :class:`~skyward.Stream`.

    In a class, write it above ``@classmethod``: below, ``local`` misses the class from Python 3.13 on.

    Args:
        fn: the function.
        retries: maximum number of further runs of a call, after the loss of its worker or one of ``retry``.
        retry: exception classes after which the function is called again, on the same worker, with exponential backoff.
            Other exceptions are raised at once.
        timeout: time that a run of a call may take, from its beginning on the worker, such as ``"5m"`` or seconds. A
            call that takes longer is ended, with its worker, and fails with
            :class:`~skyward.errors.CallTimeoutError`; it is not run again.
        grace: time before that end, such as ``"30s"`` or seconds, at which :class:`~skyward.errors.TimeLimit` is
            raised in the call, so that ``finally`` blocks run and a checkpoint is written. None raises nothing.
        memory: memory, such as ``"4GB"``, that a run of a call may add to its worker's. A call that takes more is
            ended, with its worker, and fails with :class:`~skyward.errors.WorkerLostError`; it is not run again.
        **unknown: refused.

    Raises:
        ConfigurationError: an option is unknown, or has a wrong type or value.
    """
    refuse_unknown("compute", unknown, (*_OPTIONS, "retry"))
    decorate = functools.partial(
        _decorated,
        retries=_checked_retries(retries),
        retry=_checked_retry(retry),
        limits=_checked_limits(timeout, memory, grace),
    )
    return decorate if fn is None else decorate(fn)


@overload
def gather(*, return_exceptions: bool = ...) -> PendingBatch[()]: ...
@overload
def gather(c1: PendingCompute[R1], /, *, return_exceptions: Literal[False] = ...) -> PendingBatch[R1]: ...
@overload
def gather(
    c1: PendingCompute[R1], c2: PendingCompute[R2], /, *, return_exceptions: Literal[False] = ...
) -> PendingBatch[R1, R2]: ...
@overload
def gather(
    c1: PendingCompute[R1],
    c2: PendingCompute[R2],
    c3: PendingCompute[R3],
    /,
    *,
    return_exceptions: Literal[False] = ...,
) -> PendingBatch[R1, R2, R3]: ...
@overload
def gather(
    c1: PendingCompute[R1],
    c2: PendingCompute[R2],
    c3: PendingCompute[R3],
    c4: PendingCompute[R4],
    /,
    *,
    return_exceptions: Literal[False] = ...,
) -> PendingBatch[R1, R2, R3, R4]: ...
@overload
def gather(
    c1: PendingCompute[R1],
    c2: PendingCompute[R2],
    c3: PendingCompute[R3],
    c4: PendingCompute[R4],
    c5: PendingCompute[R5],
    /,
    *,
    return_exceptions: Literal[False] = ...,
) -> PendingBatch[R1, R2, R3, R4, R5]: ...
@overload
def gather(
    *computations: PendingCompute[R], return_exceptions: Literal[False] = ...
) -> PendingBatch[*tuple[R, ...]]: ...
@overload
def gather(
    *computations: PendingCompute[R], return_exceptions: bool
) -> PendingBatch[*tuple[R | BaseException, ...]]: ...
@overload
def gather(
    *computations: PendingCompute[R],
    return_exceptions: Literal[False] = ...,
    stream: Literal[True],
    ordered: bool = ...,
) -> PendingResults[R]: ...
@overload
def gather(
    *computations: PendingCompute[R], return_exceptions: bool, stream: Literal[True], ordered: bool = ...
) -> PendingResults[R | BaseException]: ...
@overload
def gather(
    computations: Iterable[PendingCompute[R]],
    /,
    *,
    return_exceptions: Literal[False] = ...,
    stream: Literal[True],
    ordered: bool = ...,
) -> PendingResults[R]: ...
@overload
def gather(
    computations: Iterable[PendingCompute[R]],
    /,
    *,
    return_exceptions: bool,
    stream: Literal[True],
    ordered: bool = ...,
) -> PendingResults[R | BaseException]: ...
def gather(
    *computations: Any, return_exceptions: bool = False, stream: bool = False, ordered: bool = True
) -> PendingBatch[*tuple[Any, ...]] | PendingResults[Any]:
    """Group calls to run in parallel; ``gather(...) >> pool`` returns the tuple of their results, in order.

    With ``stream=True`` it returns at once a :class:`~skyward.Stream` of the results. The calls may then be given as
    one iterable, such as a generator, of any length: it is read on as results are read.

    Args:
        computations: the calls; without any, the result is ``()``.
        return_exceptions: return the exception of a failed call in place of its result. By default the first failure
            is raised at once: queued calls are dropped, running calls finish.
        stream: return the results one by one as they come. Leaving the stream early ends the calls that run.
        ordered: with ``stream=True``, whether results come in the order of the calls, or else as they arrive.

    Raises:
        ConfigurationError: an argument is not a pending call, or an option is neither True nor False.
    """
    try:
        return_exceptions = flag("return_exceptions", return_exceptions)
        stream, ordered = flag("stream", stream), flag("ordered", ordered)
    except ConfigurationError:
        misuse.mark_all_used(computations)
        raise
    if stream and len(computations) == 1 and not isinstance(computations[0], misuse.Unsent):
        (calls,) = computations
        if not isinstance(calls, Iterable):
            raise _not_pending(calls, 1)
        return PendingResults(calls=cast("Iterable[Any]", calls), return_exceptions=return_exceptions, ordered=ordered)
    for position, computation in enumerate(computations, start=1):
        if not isinstance(computation, PendingCompute):
            misuse.mark_all_used(computations)
            raise _not_pending(computation, position)
    if stream:
        return PendingResults(calls=computations, return_exceptions=return_exceptions, ordered=ordered)
    if not ordered:
        misuse.mark_all_used(computations)
        raise ConfigurationError("gather(ordered=False) needs stream=True, which returns results one by one")
    return PendingBatch(calls=computations, return_exceptions=return_exceptions)


def _not_pending(value: object, position: int) -> ConfigurationError:
    return ConfigurationError(
        f"gather takes pending calls, got {type(value).__name__} as argument {position}; write gather(fn(1), fn(2)), "
        "or gather(*calls) for a list or a generator, or gather(calls, stream=True) to take results as they come"
    )


def not_a_call(value: object) -> ConfigurationError:
    """Return the error of a value that is given to a pool in place of a pending call."""
    return ConfigurationError(
        f"a pool runs calls of functions decorated with @compute, got {type(value).__name__}; write "
        "f(...) >> pool, or pool.submit(f, ...) for a function that is not decorated"
    )


def invocation_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
    """Return the submission of a plain function, a :class:`ComputeFunction`, or a pending call without arguments.

    Raises:
        ConfigurationError: ``fn`` is not callable, async, or a generator, an argument is a pool, or a pending call was
            given arguments.
    """
    if isinstance(fn, PendingCompute):
        if args or kwargs:
            raise ConfigurationError(f"{_name_of(fn.fn)} has its arguments already: submit(f(1)) or submit(f, 1)")
        return fn.invocation()
    if isinstance(fn, PendingBatch):
        raise ConfigurationError("submit takes one call: write `batch >> pool`, or submit its calls one by one")
    if isinstance(getattr(fn, "__func__", fn), ComputeFunction):
        return fn(*args, **kwargs).invocation()
    if not callable(fn):
        raise ConfigurationError(_not_a_function(fn))
    _refuse_suspended(fn, "a pool runs")
    _refuse_misplaced(_name_of(fn), args, kwargs)
    return Invocation(fn=fn, args=args, kwargs=kwargs, label=_name_of(fn), gang=is_gang(fn))


def _not_a_function(value: object) -> str:
    if isinstance(value, Future):
        return "submit takes a function, got a future: its call was sent already; write future.result()"
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        kind = type(cast("object", value)).__name__
        return f"submit takes one function, got {kind}: write gather(*calls) >> pool, or submit each"
    return (
        f"submit takes a function and its arguments, got {type(value).__name__}: write pool.submit(f, ...); f(...) and "
        "f.local(...) run here"
    )


def _decorated(fn: Any, **options: Any) -> Any:
    if isinstance(fn, staticmethod | classmethod):
        method = cast("staticmethod[..., Any]", fn)
        return (_ComputeClassMethod if isinstance(fn, classmethod) else staticmethod)(
            _decorated(method.__func__, **options)
        )
    if not callable(fn):
        raise ConfigurationError(f"compute decorates a function, got {type(fn).__name__}")
    if _is_generator(fn):
        return StreamFunction(cast("Callable[..., Iterator[Any]]", fn), **options)
    _refuse_suspended(fn, "compute decorates")
    return ComputeFunction(fn, **options)


class _ComputeClassMethod(classmethod):  # pyright: ignore[reportMissingTypeArgument]  # not subscriptable at run time
    """Class method whose function is a compute function."""

    # A plain one binds its function as a method of the standard library's, whose `local` is that of the function.
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self.__func__.__get__(owner or type(instance))


def _body_of(fn: Callable[P, R], retries: int, retry: tuple[type[Exception], ...]) -> Callable[P, R]:
    if retry and is_gang(fn):
        raise ConfigurationError(
            f"retry must be empty for {_name_of(fn)}, which is decorated with skyward.distributed: its workers run it "
            "together, and none of them can run it again alone"
        )
    if retry and _is_generator(fn):
        raise ConfigurationError(
            f"retry must be empty for {_name_of(fn)}, a generator: run again, it would yield its first items twice"
        )
    run: Callable[..., R] = functools.partial(_run_with_retries, fn, retries, retry) if retry else fn

    @functools.wraps(fn)
    def body(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(*args, **kwargs)

    return body


def _run_with_retries(
    fn: Callable[..., R], retries: int, retry: tuple[type[Exception], ...], /, *args: Any, **kwargs: Any
) -> R:
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential, wait_random

    retrying = Retrying(
        retry=retry_if_exception_type(retry),
        stop=stop_after_attempt(retries + 1),
        wait=wait_exponential(0.1, 5.0) + wait_random(0, 1),
        reraise=True,
    )
    return retrying(functools.partial(fn, *args, **kwargs))  # its own parameters have names, too


def _unpickled(data: bytes, buffers: list[bytes], kind: type[PendingCompute[Any]]) -> PendingCompute[Any]:
    fn, args, kwargs, retries, limits = unpack(data, [bytearray(buffer) for buffer in buffers])
    return kind(fn=fn, args=args, kwargs=kwargs, retries=retries, limits=limits)


# Entries of a container that are looked at when a call is made. Pickling finds all others, when it is sent.
_ENTRIES = 8


def _refuse_misplaced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse pools and pending calls among the arguments, and in lists and dictionaries among them."""
    value: Any
    for value in chain(args, kwargs.values()) if kwargs else args:
        kind = value.__class__
        if kind in PLAIN_TYPES:
            continue
        if kind is list or kind is tuple or kind is dict:
            for entry in islice(value.values() if kind is dict else value, _ENTRIES):
                if entry.__class__ not in PLAIN_TYPES and (error := misuse.refused_argument(name, entry)):
                    raise error
        elif error := misuse.refused_argument(name, value):
            raise error


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


_OPTIONS: Final = ("grace", "memory", "retries", "timeout")
"""Options that a single call may have."""

_SUSPENDED = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_KINDS_OF_REST = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


_UNLIMITED: Final = CallLimits()


def _checked_retries(retries: object) -> int:
    return whole_number("retries", retries, minimum=0)


def _checked_limits(
    timeout: object, memory: object, grace: object, before: CallLimits = _UNLIMITED
) -> CallLimits | None:
    """Return the limits, None if there are none; ``...`` leaves one as it was before."""
    timeout_s, memory_gib, grace_s = before.timeout_s, before.memory_gib, before.grace_s
    if timeout is not ...:
        timeout_s = None if timeout is None else duration("timeout", timeout)
    if memory is not ...:
        memory_gib = None if memory is None else gibibytes("memory", memory)
    if grace is not ...:
        grace_s = None if grace is None else duration("grace", grace)
    if grace_s is not None and (timeout_s is None or grace_s >= timeout_s):
        raise ConfigurationError(
            f"grace must be less than the timeout, which is {'None' if timeout_s is None else f'{timeout_s:g} s'}, got "
            f"{grace_s:g}: it is the last part of that time, as in timeout=60, grace=10"
        )
    if timeout_s is memory_gib is None:
        return None
    return CallLimits(timeout_s=timeout_s, memory_gib=memory_gib, grace_s=grace_s)


def _checked_retry(retry: object) -> tuple[type[Exception], ...]:
    """Return ``retry`` if it is a tuple of exception classes."""
    entries = cast("tuple[object, ...]", retry) if isinstance(retry, tuple) else (None,)
    if not all(isinstance(entry, type) and issubclass(entry, Exception) for entry in entries):
        number = " (retries= is the number of retries)" if isinstance(retry, int) else ""
        raise refusal("retry", f"a tuple of exception classes such as (OSError,){number}", cast("object", retry))
    return cast("tuple[type[Exception], ...]", entries)


def _refuse_suspended(fn: Callable[..., Any], taker: str) -> None:
    """Refuse coroutine functions and generators: their return values have not run, and cannot be pickled."""
    code = _code_of(fn)
    if code is None or not code.co_flags & _SUSPENDED:
        return
    name, flags = code.co_name, code.co_flags
    if name == "__call__":
        name = type(fn).__name__
    if flags & inspect.CO_COROUTINE:
        raise ConfigurationError(
            f"{taker} plain functions; {name} is async: call it inside one, with asyncio.run({name}(...))"
        )
    if flags & inspect.CO_ASYNC_GENERATOR:
        raise ConfigurationError(f"{taker} plain functions; {name} is an async generator: write it with def and yield")
    raise ConfigurationError(
        f"{taker} plain functions; {name} is a generator: decorate it with @skyward.compute, and {name}(...) >> pool "
        "returns its items as they come; or return a list"
    )


def _code_of(fn: Callable[..., Any]) -> CodeType | None:
    """Return the code that a call of ``fn`` runs; None for builtins and the like."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    # A tenth of the time of `inspect`'s functions, for every call. Proxies show the code of their function.
    owner = fn if type(fn) in (FunctionType, MethodType) else type(fn).__call__
    code = getattr(owner, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_generator(fn: Callable[..., Any]) -> bool:
    code = _code_of(fn)
    return code is not None and bool(code.co_flags & inspect.CO_GENERATOR)


def _nothing() -> None: ...


def _parameter_check(fn: Callable[..., Any]) -> Callable[..., None]:
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
