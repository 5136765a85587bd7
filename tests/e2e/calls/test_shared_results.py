"""Large results on this machine: one copy of them, whose memory goes back when the last array on it is gone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import skyward as sky
from skyward.base.platform import SHARED_MEMORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no folder in memory")

SIZE = 8 << 20


@sky.compute
def filled(value: int, nbytes: int = SIZE) -> NDArray[np.uint8]:
    return np.full(nbytes, value, np.uint8)


@sky.compute
def nested(value: int) -> tuple[bytes, dict[str, NDArray[np.uint8]]]:
    """A large pickle, with large arrays in it."""
    return bytes([value]) * SIZE, {name: np.full(SIZE, value, np.uint8) for name in ("a", "b")}


@sky.compute
def unevenly_sized() -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    return np.ones(SIZE + 1, np.uint8), np.arange(SIZE / 8)


@sky.compute
def folder() -> str:
    return os.environ["SKYWARD_BLOB_DIRS"].split(os.pathsep)[0]


@sky.compute
def end() -> None:
    os._exit(1)


def values(array: NDArray[np.uint8]) -> set[int]:
    """The different values in an array; a set of its elements would take a second."""
    return {*np.unique(array).tolist()}


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        yield pool


def segments(pool: sky.ComputePool) -> set[str]:
    return {file.name for file in Path(folder() >> pool).glob("result-*")}


def test_results_are_the_callers_own(pool: sky.ComputePool) -> None:
    first, second = filled(1) >> pool, filled(1) >> pool
    first[:] = 7
    assert (second == 1).all()
    text, arrays = nested(3) >> pool
    assert text == bytes([3]) * SIZE
    assert all((array == 3).all() for array in arrays.values())
    (odd, numbers) = unevenly_sized() >> pool
    assert values(odd) == {1}
    assert numbers.flags.aligned
    assert (numbers == np.arange(SIZE // 8)).all()
    together = sky.gather(*[filled(value) for value in range(8)]) >> pool
    assert [values(array) for array in together] == [{value} for value in range(8)]


def test_memory_is_used_again_once_the_last_view_is_gone(pool: sky.ComputePool) -> None:
    gc.collect()
    array = filled(1) >> pool
    part = array[10:]
    held = segments(pool)
    del array
    gc.collect()
    assert values(filled(2) >> pool) == {2}
    assert values(part) == {1}
    del part
    gc.collect()
    for value in range(5):
        assert values(filled(value) >> pool) == {value}
    assert len(segments(pool)) <= len(held) + 1


def test_a_forked_child_keeps_its_result_although_the_parent_lets_go(pool: sky.ComputePool) -> None:
    array = filled(1) >> pool
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.read(ours, 1)
        os._exit(0 if (array == 1).all() else 1)
    del array
    gc.collect()
    for _ in range(3):
        filled(2) >> pool
    os.write(theirs, b"!")
    os.close(ours)
    os.close(theirs)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_result_outlives_its_worker_and_its_pool() -> None:
    with sky.ComputePool(provider=sky.Local(), concurrency=1, display="quiet") as pool:
        first = filled(1) >> pool
        with pytest.raises(sky.WorkerLostError):
            end().options(retries=0) >> pool
        second = filled(2) >> pool
        assert len(segments(pool)) == 1  # those of the lost worker are gone
    assert values(first) == {1}
    assert values(second) == {2}


def test_a_result_for_which_the_folder_has_no_room_is_sent() -> None:
    with sky.ComputePool(provider=sky.Local(), display="quiet") as crowded:
        no_room() @ crowded
        assert values(filled(5) >> crowded) == {5}
        assert not segments(crowded)


@sky.compute
def no_room() -> None:
    """Let no file grow beyond a megabyte, as if its folder were full."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


CLIENT = """
import sys, skyward as sky
@sky.compute
def large():
    import os
    return os.environ["SKYWARD_INSTANCE"], b"x" * (8 << 20)

with sky.ComputePool(provider=sky.Local(), lease=1, display="quiet") as pool:
    instance, data = large() >> pool
    print(instance, flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_of_a_client_that_was_killed_with_a_result_in_its_hands() -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        instance = client.stdout.readline().decode().strip()
        folders = [*SHARED_MEMORY.glob(f"*{instance}*")]
        assert [*folders[0].glob("result-*")]
        client.send_signal(signal.SIGKILL)
    ends_s = time.monotonic() + 60
    while any(folder.exists() for folder in folders) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not [folder for folder in folders if folder.exists()]
