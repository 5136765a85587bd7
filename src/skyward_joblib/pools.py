"""Pools that are joblib's backend for as long as they are open."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from joblib import parallel_config

from skyward.hidden_frames import from_callers_line
from skyward.request.checks import option_names, refuse_unknown
from skyward.submission import TaskSubmitter

if TYPE_CHECKING:
    from skyward.api.plan import Plan
    from skyward.api.pool import ComputePool


@contextmanager
def joblib_backend(pool: TaskSubmitter) -> Generator[None]:
    """Send joblib's parallel loops in this thread to ``pool``, which is open and stays open.

    As with every joblib configuration, other threads are not affected.
    """
    with parallel_config("skyward", pool=pool):
        yield


@contextmanager
def sklearn_backend(pool: TaskSubmitter) -> Generator[None]:
    """Send scikit-learn's parallel loops in this thread to ``pool``, which is open and stays open.

    Raises:
        ImportError: scikit-learn is missing here.
    """
    _require_sklearn()
    with joblib_backend(pool):
        yield


class JoblibPool:
    """:class:`~skyward.ComputePool` that runs joblib's parallel loops while it is open.

    The nodes get this process's versions of joblib and NumPy. Batches are pickled here and unpickled there: a version
    asked for that differs from this process's is installed as asked, with a warning.

    Args:
        joblib_version: the nodes' joblib; None is this process's.
        **pool_params: :class:`~skyward.ComputePool`'s parameters.
    """

    def __init__(self, *, joblib_version: str | None = None, **pool_params: Any) -> None:
        self._prepare(pool_params, _pinned("joblib", joblib_version))

    @classmethod
    @from_callers_line
    def named(cls, name: str, /, **changes: Any) -> Self:
        """Return the pool of that ``name`` in the settings, with ``changes``; see :meth:`skyward.ComputePool.named`."""
        from skyward.api.named_pools import make_named

        return make_named(cls, name, changes)

    def _prepare(self, pool_params: dict[str, Any], asked: list[str]) -> None:
        from skyward.api.pool import ComputePool  # the client's side: nodes import this module too

        refuse_unknown(type(self).__name__, pool_params, option_names(type(self), ComputePool))
        pip = [*(pool_params.pop("pip", None) or ()), *asked, *_pinned("numpy"), *_pinned("threadpoolctl")]
        self._pool = ComputePool(**pool_params, pip=pip)
        self._opened = ExitStack()

    def plan(self) -> Plan:
        """Return what opening the pool would do; see :meth:`skyward.ComputePool.plan`."""
        return self._pool.plan()

    def __enter__(self) -> ComputePool:
        """Open the pool and make it joblib's backend in this thread."""
        with ExitStack() as opening:
            pool = opening.enter_context(self._pool)
            opening.enter_context(joblib_backend(pool))
            self._opened = opening.pop_all()
        return pool

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Restore joblib's backend and close the pool; to be called in the thread that opened it."""
        return self._opened.__exit__(exc_type, exc, traceback)


class ScikitLearnPool(JoblibPool):
    """:class:`JoblibPool` whose nodes have scikit-learn too.

    Args:
        sklearn_version: the nodes' scikit-learn; None is this process's.
        **pool_params: :class:`~skyward.ComputePool`'s parameters.

    Raises:
        ImportError: scikit-learn is missing here.
    """

    def __init__(self, *, sklearn_version: str | None = None, **pool_params: Any) -> None:
        _require_sklearn()
        asked = _pinned("scikit-learn", sklearn_version)
        self._prepare(pool_params, [*asked, *_pinned("scipy"), *_pinned("joblib")])


def _pinned(package: str, asked: str | None = None) -> list[str]:
    """Return the requirement for the version asked for, else for the one installed here; none without either."""
    try:
        here = version(package)
    except PackageNotFoundError:
        here = None
    if asked is not None and asked != here:
        warnings.warn(
            f"the nodes get {package} {asked}, this process has {here}: "
            "what one of them pickles the other may not be able to load",
            stacklevel=3,
        )
    wanted = asked or here
    return [f"{package}=={wanted}"] if wanted else []


def _require_sklearn() -> None:
    try:
        importlib.import_module("sklearn")
    except ImportError as error:
        raise ImportError("scikit-learn is missing here: pip install 'skyward-fleet[sklearn]'") from error
