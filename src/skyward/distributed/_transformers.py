"""Transformers on the workers of a call: torch's process group, and what its Trainer remembers of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from skyward.distributed._gang import Gang, checked_backend, decorator, imported
from skyward.distributed._torch import BACKENDS, TorchFramework, TorchSession

__all__ = ["TransformersFramework", "TransformersSession", "transformers"]

P = ParamSpec("P")
R = TypeVar("R")

_TOLD_BY_TRAINERS = ("ACCELERATE_", "FSDP_")


def transformers(backend: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the function with ``torch.distributed`` initialised as :func:`torch` does, for ``transformers.Trainer``.

    A Trainer finds the process group by itself, deals the data to the workers, and averages gradients. On processors
    its arguments need ``use_cpu=True`` and ``ddp_backend="gloo"``. It begins anew in every call.

    Args:
        backend: as in :func:`torch`.

    Raises:
        ConfigurationError: there is no such backend; in the call: torch, transformers or accelerate, which the Trainer
            needs, is not installed on the node.
    """
    return decorator(TransformersFramework(backend=checked_backend(backend, BACKENDS, "transformers")))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersFramework:
    """Opens sessions of transformers.

    Attributes:
        backend: see :func:`transformers`.
    """

    backend: str | None

    def session(self) -> TransformersSession:
        """See :meth:`~skyward.distributed._gang.Framework.session`."""
        imported("transformers", pip="transformers")
        return TransformersSession(TorchFramework(backend=self.backend).session())


class TransformersSession:
    """One process group, with what Trainers leave behind removed before and after.

    Attributes:
        port: the process group's.
        gpus: likewise.
    """

    def __init__(self, inner: TorchSession) -> None:
        imported("accelerate", pip="accelerate")
        self._inner = inner
        self.port, self.gpus = inner.port, inner.gpus

    @contextmanager
    def join(self, gang: Gang) -> Generator[None]:
        """See :meth:`~skyward.distributed._gang.GangSession.join`."""
        with self._inner.join(gang), _as_before():
            yield


@contextmanager
def _as_before() -> Generator[None]:
    """Let the function begin without the memory of other trainings, and take away what it leaves."""
    before = _told()
    _forget()
    try:
        yield
    finally:
        _forget()
        for name in _told().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _told() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_TOLD_BY_TRAINERS)}


def _forget() -> None:
    """Accelerate keeps rank, world and device of the process for its life, and has no other way to drop them."""
    state: Any = imported("accelerate.state", pip="accelerate")
    state.AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    state.GradientState._reset_state()  # noqa: SLF001
