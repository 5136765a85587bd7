"""Jax on the workers of a call: one runtime of several processes with the devices of all of them."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from skyward.distributed._gang import Decorator, Gang, decorator, environment, imported, own_rank, unused_port
from skyward.distributed.runtime import FreshProcessNeeded, bind_address, current_call

_AS_LONG_AS_IT_TAKES_S = 365 * 24 * 3600


def jax() -> Decorator:
    """Run the function with ``jax.distributed`` initialised: ``jax.devices()`` lists the devices of all workers.

    On CPUs the workers communicate through gloo. Compiled functions and arrays on devices from before the call are not
    usable in it, and the reverse. A result can still be returned if all of it is on the worker that returns it.

    Raises:
        ConfigurationError: in the call: jax is not installed on the node.
    """
    return decorator(JaxSession)


class JaxSession:
    """Runtime of one training.

    Attributes:
        port: port of its coordinator; 0 for all ranks except the first.
        gpus: always empty.
    """

    def __init__(self) -> None:
        self._jax: Any = imported("jax", pip="jax")
        self._alone = current_call() is None
        if not self._alone and self._jax.distributed.is_initialized():
            raise FreshProcessNeeded("jax.distributed is already initialized in this process")
        self.gpus = ()
        self.port = 0 if self._alone or own_rank() else unused_port(bind_address())

    @contextmanager
    def join(self, gang: Gang) -> Generator[None]:
        """See :meth:`~skyward.distributed._gang.GangSession.join`."""
        if self._alone:  # outside a pool jax may already be in use, and one process needs no runtime
            yield
            return
        _forget_devices()
        _listen_at(bind_address())
        coordinator = f"{gang.first.address}:{gang.first.port}"
        with environment(variables(gang)):
            yield from self._initialized(gang, coordinator)

    def _initialized(self, gang: Gang, coordinator: str) -> Generator[None]:
        self._jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=gang.world,
            process_id=gang.rank,
            coordinator_bind_address=f"{bind_address()}:{gang.first.port}",
            cluster_detection_method="deactivate",
            **self._patience(),
        )
        try:
            yield
        finally:
            self._jax.distributed.shutdown()
            _forget_devices()

    def _patience(self) -> dict[str, int]:
        """Return options against jax's timeout of 5 minutes: some ranks may save for longer after others return."""
        name = "shutdown_timeout_seconds"  # missing in older versions
        return {name: _AS_LONG_AS_IT_TAKES_S} if name in signature(self._jax.distributed.initialize).parameters else {}


def variables(gang: Gang) -> dict[str, str]:
    """Return the environment from which ``jax.distributed.initialize()`` and launchers read a worker's position."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"{gang.first.address}:{gang.first.port}",
        "JAX_NUM_PROCESSES": str(gang.world),
        "JAX_PROCESS_ID": str(gang.rank),
    }


def _forget_devices() -> None:
    """Make jax detect its devices again. Existing arrays can be read, but not used in computations."""
    imported("jax.extend.backend", pip="jax").clear_backends()


def _listen_at(address: str) -> None:
    """Bind the CPU collectives of this process to ``address``.

    Jax itself resolves the machine's host name, which on many machines gives an address that no other one reaches.
    """
    inside: Any = importlib.import_module("jax._src.xla_bridge")
    collectives: Any = importlib.import_module("jaxlib._jax")

    def processors() -> Any:
        state = inside.distributed.global_state
        if state.client is None:
            # Their values before the first start, which jax's shutdown does not restore.
            state.process_id, state.num_processes = 0, 1
            return inside.make_cpu_client()
        together = collectives.make_gloo_tcp_collectives(distributed_client=state.client, hostname=address)
        return inside.make_cpu_client(together)

    imported("jax.extend.backend", pip="jax").register_backend_factory(
        "cpu", processors, priority=0, fail_quietly=False
    )
