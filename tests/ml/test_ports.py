"""Nobody outside reaches a training: frameworks have no secrets from who reaches their ports."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

import psutil
import pytest

import skyward as sky

PATIENCE_S = 2.0


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


def of_keras() -> list[tuple[str, int]]:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
    return listening()


FRAMEWORKS = {
    "torch": (sky.distributed.torch(), of_torch),
    "transformers": (sky.distributed.transformers(), of_torch),
    "jax": (sky.distributed.jax(), of_jax),
    "keras": (sky.distributed.keras(backend="jax"), of_keras),
}


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


def own_addresses() -> list[str]:
    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    addresses = []
    for text in found:
        with suppress(ValueError):  # of hardware
            addresses.append(ip_address(text.partition("%")[0]))
    return [str(address) for address in addresses if not address.is_loopback and not address.is_link_local]


@pytest.mark.skipif(not own_addresses(), reason="a machine without any network")
def test_tensorflow_is_not_reached_at_other_addresses_of_the_machine(local_pool: sky.ComputePool) -> None:
    """Its server takes every address: what comes to another one than the node's is dropped."""

    def can_connect(address: str, port: int) -> bool:
        try:
            socket.create_connection((address, port), PATIENCE_S).close()
        except OSError:
            return False
        return True

    @sky.compute
    @sky.distributed.tensorflow()
    def train() -> dict[str, bool]:
        import json

        import tensorflow as tf

        tf.distribute.MultiWorkerMirroredStrategy()
        config = json.loads(os.environ["TF_CONFIG"])
        own, port = config["cluster"]["worker"][config["task"]["index"]].split(":")
        assert own.startswith("127.")
        reached = {address: can_connect(address, int(port)) for address in [own, *own_addresses()]}
        return {"own": reached.pop(own), "others": any(reached.values())}

    assert train() @ local_pool == ({"own": True, "others": False},) * 4
