"""Execution of joblib's batches on a node: initializers, thread limits, nested loops."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import repeat
from typing import Any, Self

import cloudpickle
from joblib import cpu_count, parallel_config
from joblib.parallel import LokyBackend

from skyward.distributed.runtime import instance_info
from skyward.errors import ConfigurationError, NotInPoolError


@dataclass(frozen=True, slots=True, kw_only=True)
class Initializer:
    """Function that a worker runs before its first batch; equal to another with the same pickle."""

    digest: bytes
    function: Callable[..., object] = field(compare=False)
    arguments: tuple[Any, ...] = field(compare=False)

    @classmethod
    def of(cls, function: Callable[..., object] | None, arguments: tuple[Any, ...]) -> Self | None:
        """Return the initializer for ``function``; None without one."""
        if function is None:
            return None
        digest = hashlib.blake2b(cloudpickle.dumps((function, arguments)), digest_size=16).digest()
        return cls(digest=digest, function=function, arguments=arguments)


class NodeBackend(LokyBackend):
    """loky for parallel loops inside a batch, within the worker's share of its node's cores.

    It counts the cores of the node.
    """

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of processes, as loky does; negative numbers count the worker's share of the cores."""
        if n_jobs is not None and n_jobs < 0:
            n_jobs = max(_worker_cores() + 1 + n_jobs, 1)
        return super().effective_n_jobs(n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **settings: Any) -> int:
        """Configure loky; by default, each process's native libraries get their part of the worker's cores."""
        asked = self.inner_max_num_threads
        self.inner_max_num_threads = asked or max(_worker_cores() // self.effective_n_jobs(n_jobs), 1)
        try:
            return super().configure(n_jobs=n_jobs, parallel=parallel, **settings)
        finally:
            self.inner_max_num_threads = asked


def batch_runner(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return :func:`run_batch` for tasks of one function, which is then sent once, and not with every batch."""

    def run(*tasks: Any) -> list[Any]:
        return run_batch(repeat(function), *tasks)

    run.__qualname__ = function.__qualname__  # in messages
    return run


def run_batch(
    functions: Iterable[Callable[..., Any]],
    arguments: Sequence[tuple[Any, ...]],
    keywords: Sequence[dict[str, Any]],
    max_num_threads: int | None,
    initializer: Initializer | None,
) -> list[Any]:
    """Run the tasks of one of joblib's batches.

    Args:
        functions: the function of each task.
        arguments: its positional arguments.
        keywords: its keyword arguments; empty if no task has any.
        max_num_threads: number of threads of native libraries; None leaves that to the node.
        initializer: runs before the tasks, once in a worker's life unless it fails.

    Raises:
        ConfigurationError: ``max_num_threads`` is given and the node lacks threadpoolctl.
    """
    if initializer is not None:
        _initialize_once(initializer)
    nested = NodeBackend(nesting_level=0, inner_max_num_threads=max_num_threads)
    tasks = zip(functions, arguments, keywords or repeat({}), strict=False)
    with _limited_threads(max_num_threads), parallel_config(backend=nested, n_jobs=None):
        return [function(*args, **kwargs) for function, args, kwargs in tasks]


@cache
def _initialize_once(initializer: Initializer) -> None:
    initializer.function(*initializer.arguments)


def _limited_threads(max_num_threads: int | None) -> AbstractContextManager[Any]:
    if max_num_threads is None:
        return nullcontext()
    try:
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ConfigurationError(
            "inner_max_num_threads needs threadpoolctl on the nodes: add it to the pool, pip=['threadpoolctl']"
        ) from error
    return threadpool_limits(max_num_threads)


def _worker_cores() -> int:
    try:
        workers = instance_info().workers_per_node
    except NotInPoolError:
        workers = 1
    return max(cpu_count() // workers, 1)
