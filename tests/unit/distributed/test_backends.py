"""What the frameworks' decorators decide, without any framework."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyward import distributed
from skyward.distributed._gang import Gang, Peer
from skyward.distributed._jax import variables as jax_variables
from skyward.distributed._tensorflow import cluster
from skyward.distributed._torch import chosen_backend, device_index, usable_gpus, variables
from skyward.errors import ConfigurationError

PARTS = ("MIG-c7384736-a75d-5afc-978f-d2f1294409fd", "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d")


def peer(node: int, local_rank: int, *gpus: str, port: int = 0) -> Peer:
    return Peer(node=node, local_rank=local_rank, address=f"10.0.0.{node + 1}", port=port, gpus=gpus)


@pytest.mark.parametrize(
    "peers, backend",
    [
        ([peer(0, 0)], "gloo"),
        ([peer(0, 0, "0")], "nccl"),
        ([peer(0, 0, "0", "1")], "nccl"),
        ([peer(0, 0, "0"), peer(0, 1, "1")], "nccl"),
        ([peer(0, 0, "0"), peer(1, 0, "1")], "nccl"),
        ([peer(0, 0, "0"), peer(1, 0, "0")], "gloo"),
        ([peer(0, 0, "GPU-1"), peer(0, 1, "GPU-2")], "nccl"),
        ([peer(0, 0, "0"), peer(0, 1, "0")], "gloo"),
        ([peer(0, 0, "0", "1"), peer(0, 1, "1", "2")], "gloo"),
        ([peer(0, 0, "0"), peer(1, 0)], "gloo"),
        ([peer(0, 0), peer(1, 0, "0")], "gloo"),
        ([peer(0, 0, PARTS[0])], "gloo"),
        ([peer(0, 0, PARTS[0]), peer(0, 1, PARTS[1])], "gloo"),
        ([peer(0, 0, "0"), peer(1, 0, PARTS[1])], "gloo"),
    ],
)
def test_nccl_is_chosen_where_every_rank_has_a_whole_gpu_of_its_own(peers: list[Peer], backend: str) -> None:
    assert chosen_backend(peers) == backend


@pytest.mark.parametrize(
    "visible, names",
    [("", ("GPU-a", "GPU-b")), ("0,1", ("GPU-a", "GPU-b")), (PARTS[0], (PARTS[0],))],
    ids=["all", "some", "a part"],
)
def test_gpus_are_told_apart_whatever_number_a_node_gives_them(
    monkeypatch: pytest.MonkeyPatch, visible: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    properties = [SimpleNamespace(uuid=uuid) for uuid in ("GPU-a", "GPU-b")]
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: len(properties), get_device_properties=properties.__getitem__
    )
    torch = SimpleNamespace(cuda=cuda, distributed=SimpleNamespace(is_nccl_available=lambda: True))

    assert usable_gpus(torch) == names


@pytest.mark.parametrize(
    "local_rank, devices, index",
    [(0, 0, 0), (3, 0, 3), (0, 1, 0), (1, 1, 0), (7, 1, 0), (1, 2, 1), (2, 2, 0), (3, 8, 3)],
)
def test_the_local_rank_is_an_index_of_a_device_that_the_worker_sees(local_rank: int, devices: int, index: int) -> None:
    assert device_index(local_rank, devices) == index


GANG = Gang(rank=2, peers=(peer(0, 0, port=21), peer(0, 1, port=22), peer(1, 0, port=23)))


def test_torchs_variables_are_those_of_torchrun() -> None:
    assert variables(GANG, 0) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "21",
    }


def test_jaxs_variables_are_those_that_it_reads_itself() -> None:
    assert jax_variables(GANG) == {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:21",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
    }


def test_tensorflows_cluster_has_every_worker() -> None:
    assert json.loads(cluster(GANG)) == {
        "cluster": {"worker": ["10.0.0.1:21", "10.0.0.1:22", "10.0.0.2:23"]},
        "task": {"type": "worker", "index": 2},
    }


@pytest.mark.parametrize(
    "decorate, allowed",
    [
        (distributed.torch, r"'nccl', 'gloo', 'cpu:gloo,cuda:nccl'"),
        (distributed.transformers, r"'nccl', 'gloo', 'cpu:gloo,cuda:nccl'"),
        (distributed.keras, r"'jax', 'tensorflow', 'torch'"),
    ],
)
def test_an_unknown_backend_is_refused_when_the_function_is_decorated(
    decorate: Callable[[Any], Any], allowed: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"None or one of {allowed}, got 'mpi'"):
        decorate("mpi")


def test_an_unknown_backend_in_the_environment_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    with pytest.raises(ConfigurationError, match="got 'theano'"):
        distributed.keras()(lambda: None)()


@pytest.mark.parametrize("name", ["jax", "keras", "tensorflow", "torch", "transformers"])
def test_a_framework_that_is_not_installed_is_named_with_the_images_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("jax", "tensorflow", "torch", "transformers", "keras"):
        monkeypatch.setitem(sys.modules, module, None)
    run = getattr(distributed, name)()(lambda: None)
    missing = "jax" if name == "keras" else name  # its default backend
    with pytest.raises(ConfigurationError, match=rf'{missing} is not installed .*sky\.Image\(pip=\["{missing}"\]\)'):
        run()
