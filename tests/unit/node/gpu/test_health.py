"""When a GPU is of no use any more, and when only a program is to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.node.gpu.health import GpuWatch, is_doubtful, open_watch
from support.gpus import FakeGpu, FakeGpus, Machine

Watched = Callable[..., tuple[FakeGpus, GpuWatch]]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """GPUs, and a watch over the first of them."""
    watches: list[GpuWatch] = []

    def make(*gpus: FakeGpu) -> tuple[FakeGpus, GpuWatch]:
        there = FakeGpus(tmp_path / "gpus.json", Machine(gpus=list(gpus)))
        watch = open_watch([gpus[0].uuid], there.nvml)
        assert watch is not None
        watches.append(watch)
        return there, watch

    yield make
    for watch in watches:
        watch.close()


def suffer(gpus: FakeGpus, gpu: int = 0, **changes: Any) -> None:
    with gpus.change() as machine:
        for name, value in changes.items():
            setattr(machine.gpus[gpu], name, value)


def test_a_gpu_that_works_is_no_trouble(watched: Watched) -> None:
    _, watch = watched(FakeGpu())

    assert watch.trouble() == ""


@pytest.mark.parametrize(
    ("xid", "why"),
    [(79, "it has fallen off the bus"), (48, "its memory has an error"), (95, "has spread"), (119, "does not answer")],
)
def test_an_error_that_only_a_reset_helps_against_is_the_gpus(watched: Watched, xid: int, why: str) -> None:
    gpus, watch = watched(FakeGpu())
    uuid = gpus.machine.gpus[0].uuid

    suffer(gpus, xids=[xid])

    trouble = watch.trouble()
    assert trouble.startswith(f"GPU 0 ({uuid}) failed: ")
    assert trouble.endswith(f"(Xid {xid})")
    assert why in trouble


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 94])
def test_an_error_of_a_program_is_not(watched: Watched, xid: int) -> None:
    gpus, watch = watched(FakeGpu())

    suffer(gpus, xids=[xid])

    assert watch.trouble() == ""


def test_a_gpus_error_is_found_behind_those_of_programs(watched: Watched) -> None:
    gpus, watch = watched(FakeGpu())

    suffer(gpus, xids=[31, 13, 79])

    assert "Xid 79" in watch.trouble()


def test_a_gpu_that_is_gone_is_lost_even_if_nobody_reports_it(watched: Watched) -> None:
    gpus, watch = watched(FakeGpu())

    suffer(gpus, lost=True)

    assert (
        watch.trouble()
        == f"the GPU {gpus.machine.gpus[0].uuid} is lost: it has fallen off the bus, or cannot be reached any more"
    )


def test_gpus_that_are_not_the_nodes_are_not_its_trouble(watched: Watched) -> None:
    gpus, watch = watched(FakeGpu(), FakeGpu())

    suffer(gpus, 1, lost=True, xids=[79])

    assert watch.trouble() == ""


def test_a_gpu_that_reports_nothing_is_watched_all_the_same(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.gpu_parts import _gpu_nvml

    def refuse(*_: object) -> int:
        raise _gpu_nvml.NVMLError

    monkeypatch.setattr(_gpu_nvml.FakeNvml, "nvmlDeviceGetSupportedEventTypes", refuse)
    gpus, watch = watched(FakeGpu())

    suffer(gpus, xids=[79])
    assert watch.trouble() == ""
    suffer(gpus, lost=True)
    assert "is lost" in watch.trouble()


def test_closing_lets_go_of_the_driver(tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path / "gpus.json", Machine(gpus=[FakeGpu()]))
    nvml = gpus.nvml()
    watch = open_watch([gpus.machine.gpus[0].uuid], lambda: nvml)
    assert watch is not None
    assert nvml.users == 1

    watch.close()

    assert nvml.users == 0


def test_there_is_nothing_to_watch_without_gpus_or_without_a_driver() -> None:
    def fails() -> None:
        raise ImportError("pynvml")

    assert open_watch([]) is None
    assert open_watch(["GPU-1"], fails) is None


@pytest.mark.parametrize(
    ("error", "doubtful"),
    [
        (("torch.AcceleratorError", "CUDA error: unspecified launch failure"), True),
        (("RuntimeError", "CUDA error: uncorrectable ECC error encountered"), True),
        (("jaxlib._jax.XlaRuntimeError", "INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"), True),
        (("cupy_backends.cuda.api.runtime.CUDARuntimeError", "cudaErrorLaunchFailure"), True),
        (("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB"), False),
        (("RuntimeError", "CUDA error: out of memory"), False),
        (("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory: CUDA_ERROR_OUT_OF_MEMORY"), False),
        (("ValueError", "no such file"), False),
    ],
)
def test_which_exceptions_may_be_a_gpus(error: tuple[str, str], *, doubtful: bool) -> None:
    assert is_doubtful(*error) is doubtful
