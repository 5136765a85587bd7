"""Every error of Skyward, grouped by the caller's next step.

::

    SkywardError
    ├── fix the input
    │   ├── ConfigurationError        a parameter is wrong; the message names it (also a ValueError)
    │   ├── SerializationError        something cannot be pickled (also a PicklingError and a TypeError)
    │   ├── PoolStateError            the pool is not open, already closed, or not usable here (also a RuntimeError)
    │   ├── NotInPoolError            a fact of a node was requested on the client (also a RuntimeError)
    │   ├── BudgetError               the pool has cost, or would cost, more than its max_cost; carries both sums
    │   ├── FetchError                files of nodes could not be fetched; the message names them (also an OSError)
    │   ├── LedgerError               the file of purchases cannot be used; no machine is requested without it
    │   └── AuthenticationError       credentials or keys were refused
    │       └── HostKeyError          a machine is unknown, or not the one it should be
    ├── try elsewhere
    │   ├── CapacityError             the provider has none of it now, or none that starts
    │   └── QuotaError                the account may not have more of it
    ├── wait
    │   ├── RateLimitError            the provider asks for patience
    │   └── UnreachableError          a node or an API did not answer within its deadline
    └── report
        ├── BootstrapError            preparing a node failed; carries the step and the log's tail
        ├── WorkerLostError           a call lost its worker more often than its retries allow
        ├── CallTimeoutError          a call ran longer than its timeout (also a TimeoutError)
        ├── RemoteError               a call failed with an exception that could not be rebuilt here
        └── TerminationError          machines could not be confirmed gone; carries their ids

:class:`TimeLimit` is raised in calls only, and is no ``Exception``.
A call that raises on a worker raises the same exception here, with :class:`RemoteTraceback` as its ``__cause__``.
A call that is never sent is no error; an :class:`UnsentCallWarning` names it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

__all__ = [
    "AuthenticationError",
    "BootstrapError",
    "BudgetError",
    "CallTimeoutError",
    "CapacityError",
    "ConfigurationError",
    "FetchError",
    "HostKeyError",
    "LedgerError",
    "NotInPoolError",
    "PoolStateError",
    "QuotaError",
    "RateLimitError",
    "RemoteError",
    "RemoteTraceback",
    "SerializationError",
    "SkywardError",
    "TerminationError",
    "TimeLimit",
    "UnreachableError",
    "UnsentCallWarning",
    "WorkerLostError",
]


class SkywardError(Exception):
    """Base of every error that Skyward itself raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default a pickle calls the class with `args`, which lack the keywords that some classes require.
        return _rebuilt, (type(self), self.args), {**vars(self)}


def _rebuilt(cls: type[SkywardError], args: tuple[Any, ...]) -> SkywardError:
    error = cls.__new__(cls, *args)
    error.args = args  # OSError's own `__new__` leaves them to an `__init__`
    return error


class ConfigurationError(SkywardError, ValueError):
    """A parameter has a value or a type that is not allowed; the message names it and lists the allowed values."""


class SerializationError(SkywardError, pickle.PicklingError, TypeError):
    """A function, an argument or a result cannot be pickled; the message names the offending part."""


class PoolStateError(SkywardError, RuntimeError):
    """The pool is not open, already closed, or was used inside one of its own calls."""


class NotInPoolError(SkywardError, RuntimeError):
    """A fact that only a call on a node has was requested elsewhere."""


class AuthenticationError(SkywardError):
    """Credentials, a key or a certificate were refused. Trying again with the same ones does not help."""


class BudgetError(SkywardError):
    """The pool was ended, or gets no machine, so that it does not cost more than its limit.

    Attributes:
        max_cost: USD that it may cost, by its ``max_cost`` or by ``SKYWARD_CONFIRM_ABOVE``.
        cost: USD that it has cost by then, or could cost if it were not refused.
    """

    def __init__(self, message: str, *, max_cost: float, cost: float) -> None:
        super().__init__(message)
        self.max_cost = max_cost
        self.cost = cost


class LedgerError(SkywardError):
    """The ledger, which records machines before they are requested, cannot be used; the message gives the reason."""


class HostKeyError(AuthenticationError):
    """A machine does not show the host key that is on file for it, or none is on file. It received no credentials.

    Attributes:
        on_file: False if no key of it is on file: then it was not contacted.
    """

    def __init__(self, message: str, *, on_file: bool = True) -> None:
        super().__init__(message)
        self.on_file = on_file


class CapacityError(SkywardError):
    """The provider has no machine of this kind to give now. Another type, zone, region or provider may.

    Attributes:
        attempts: machines that were bought for one node and ended again, since they did not start or were smaller than
            bought: id, type, place, reason and cost of each, in words. Empty for a refused purchase.
    """

    def __init__(self, message: str, *, attempts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.attempts = tuple(attempts)


class QuotaError(SkywardError):
    """The account may not have more machines of this kind. Ask the provider, or choose another kind."""


class RateLimitError(SkywardError):
    """The provider refused a request because too many came before it."""


class UnreachableError(SkywardError):
    """A node or a provider's API did not answer within its deadline."""


class FetchError(SkywardError, OSError):
    """Files of nodes could not be fetched; the message names them and the reason. Those that could be are here."""


class BootstrapError(SkywardError):
    """Preparing a node failed.

    Attributes:
        node: rank of the node.
        step: the bootstrap step that failed (``uv``, ``apt``, ``deps``, ``skyward``, ``server``, ``volumes``).
        log_tail: last lines of the step's log.
        log_path: where the whole log lies, on the node.
    """

    def __init__(self, message: str, *, node: int, step: str, log_tail: str = "", log_path: str = "") -> None:
        super().__init__(message)
        self.node = node
        self.step = step
        self.log_tail = log_tail
        self.log_path = log_path


class WorkerLostError(SkywardError):
    """A call's worker died more often than the call's ``retries`` allow, or can never come back.

    Attributes:
        node: rank of the node of the last loss.
        worker: index of the worker on that node.
        reason: exit code, signal or memory limit, as the node's supervisor reported it.
        log_path: the worker's log, on its node.
    """

    def __init__(self, message: str, *, node: int, worker: int, reason: str, log_path: str = "") -> None:
        super().__init__(message)
        self.node = node
        self.worker = worker
        self.reason = reason
        self.log_path = log_path


class CallTimeoutError(SkywardError, TimeoutError):
    """A call ran longer than its ``timeout`` and was ended, with its worker. It is not run again.

    Attributes:
        timeout_s: the limit, in seconds from the call's beginning on its worker.
        node: rank of the node.
        worker: index of the worker on that node.
        log_path: the worker's log, on its node.
    """

    def __init__(self, message: str, *, timeout_s: float, node: int, worker: int, log_path: str = "") -> None:
        super().__init__(message)
        self.timeout_s = timeout_s
        self.node = node
        self.worker = worker
        self.log_path = log_path


class TimeLimit(BaseException):
    """Raised in a call with ``grace``, that many seconds before its ``timeout`` ends it with its worker.

    ``finally`` blocks run and checkpoints can be written meanwhile. A call that catches it may return a result.
    It is raised in the thread that runs the call, also out of a sleep or a wait, but not out of code in C that holds
    the interpreter. A call that lets it pass fails with :class:`CallTimeoutError`, and is not run again.

    Like ``KeyboardInterrupt`` it may be raised anywhere, and is no ``Exception``: a library that tries again after an
    error, or counts it, does not take it for one of its own.

    Attributes:
        timeout_s: the call's ``timeout``, in seconds from its beginning on its worker.
    """

    def __init__(self, message: str, *, timeout_s: float = 0.0) -> None:
        super().__init__(message)
        self.timeout_s = timeout_s


class RemoteError(SkywardError):
    """A call failed on its worker with an exception that could not be rebuilt on this side.

    Attributes:
        type_name: qualified name of the original exception's class.
        remote_traceback: the formatted traceback from the worker.
    """

    def __init__(self, message: str, *, type_name: str, remote_traceback: str) -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback


class RemoteTraceback(Exception):
    """Not raised: the ``__cause__`` of a remote exception; its text is the traceback as the worker formatted it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text.rstrip()}"


class TerminationError(SkywardError):
    """Machines could not be confirmed gone and may still cost money.

    Attributes:
        instance_ids: the provider's ids of those machines; ``skyward sweep`` tries again.
        keys: ledger keys of machines that the provider was asked for without an answer, and does not list: they may
            exist, and their ids are unknown.
    """

    def __init__(self, message: str, *, instance_ids: Sequence[str], keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.instance_ids = tuple(instance_ids)
        self.keys = tuple(keys)


class UnsentCallWarning(UserWarning):
    """A pending call was dropped before any pool received it; given once for each function and line."""
