"""Ports of a training are bound to loopback on this machine: frameworks do not authenticate their peers.

TensorFlow is the exception, and docs/training.md says so: its server listens on every address.
"""

from __future__ import annotations

from ipaddress import ip_address

import psutil
import pytest

import skyward as sky


def listening() -> list[tuple[str, int]]:
    """Places where this process listens."""
    connections = psutil.Process().net_connections("inet")
    return [(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN]


def of_torch() -> list[tuple[str, int]]:
    import torch
    from torch import distributed

    distributed.all_reduce(torch.ones(1))
    return listening()


def of_jax() -> list[tuple[str, int]]:
    from jax.experimental.multihost_utils import process_allgather

    process_allgather(1)
    return listening()


FRAMEWORKS = {
    "torch": (sky.distributed.torch(), of_torch),
    "jax": (sky.distributed.jax(), of_jax),
}
"""Keras and transformers are initialized as one of these is."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_trainings_listen_on_loopback(local_pool: sky.ComputePool, framework: str) -> None:
    decorate, listeners_of = FRAMEWORKS[framework]
    call = sky.compute(decorate(listeners_of))
    before = {place for places in sky.compute(listening)() @ local_pool for place in places}
    opened = {place for places in call() @ local_pool for place in places} - before
    assert len(opened) >= 4
    for address, _ in opened:
        assert ip_address(address.removeprefix("::ffff:")).is_loopback


def test_torch_closes_its_ports(local_pool: sky.ComputePool) -> None:
    look = sky.compute(listening)
    sky.compute(sky.distributed.torch()(of_torch))() @ local_pool
    before = look() @ local_pool
    sky.compute(sky.distributed.torch()(of_torch))() @ local_pool
    assert look() @ local_pool == before
