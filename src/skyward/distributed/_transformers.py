"""Transformers on the workers of a call: torch's process group, and the state that its Trainer keeps."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from skyward.distributed._gang import Decorator, Gang, checked_backend, decorator, imported
from skyward.distributed._torch import BACKENDS, TorchSession

_TRAINER_PREFIXES = ("ACCELERATE_", "FSDP_")


def transformers(backend: str | None = None) -> Decorator:
    """Run the function with ``torch.distributed`` initialised, for ``transformers.Trainer``.

    Sets the variables that :func:`~skyward.distributed.torch` sets. A Trainer detects the process group, divides the
    data among the workers, and averages gradients. On CPUs it needs ``use_cpu=True`` and ``ddp_backend="gloo"``. Every
    call starts without state of earlier ones.

    Args:
        backend: as in :func:`~skyward.distributed.torch`.

    Raises:
        ConfigurationError: the backend does not exist; in the call: torch, transformers, or accelerate, which the
            Trainer needs, is not installed on the node.
    """
    return decorator(partial(TransformersSession, checked_backend(backend, BACKENDS, "transformers")))


class TransformersSession:
    """Process group of one training; state that Trainers leave behind is removed before and after.

    Attributes:
        port: port of the process group's store.
        gpus: UUIDs of the process group's GPUs.
    """

    def __init__(self, backend: str | None) -> None:
        imported("transformers", pip="transformers")
        self._inner = inner = TorchSession(backend)
        imported("accelerate", pip="accelerate")
        self.port, self.gpus = inner.port, inner.gpus

    @contextmanager
    def join(self, gang: Gang) -> Generator[None]:
        """See :meth:`~skyward.distributed._gang.GangSession.join`."""
        with self._inner.join(gang), _as_before():
            yield


@contextmanager
def _as_before() -> Generator[None]:
    """Remove the state of other trainings before the block, and its own state after it."""
    before = _trainer_variables()
    _forget()
    try:
        yield
    finally:
        _forget()
        for name in _trainer_variables().keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _trainer_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_TRAINER_PREFIXES)}


def _forget() -> None:
    """Reset accelerate, which keeps rank, world and device for the process's life and has no public reset."""
    state: Any = imported("accelerate.state", pip="accelerate")
    state.AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    state.GradientState._reset_state()  # noqa: SLF001
