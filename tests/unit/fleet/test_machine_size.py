"""A machine is as large as its kernel and every control group above a process of it allow."""

from __future__ import annotations

import os

import pytest

from skyward.fleet.machine_size import MachineSize, measure_machine, parse_size
from skyward.machine.local import LocalAccess
from skyward.node.plan import memory_bytes
from skyward.request.instance import InstanceSpec

GIB = 1 << 30
BARE = "allowed 0-7\nonline 0-3\nmemory_kib 8388608\n"


@pytest.mark.parametrize(
    ("text", "cpu", "memory_gib"),
    [
        (BARE, 4, 8),
        (BARE + "cpu.max max 100000\nmemory.max max\n", 4, 8),
        (BARE + "cpu.max 150000 100000\nmemory.max 2147483648\n", 2, 2),
        (BARE + "memory.max 4294967296\nmemory.max 2147483648\nmemory.max max\n", 4, 2),
        (BARE + "cpu.max -1 100000\nmemory.limit_in_bytes 9223372036854771712\n", 4, 8),
        (BARE + "cpu.max 100000 100000\nmemory.limit_in_bytes 1073741824\n", 1, 1),
        ("allowed 0,2-3\nonline \nmemory_kib 1048576\n", 3, 1),
    ],
)
def test_the_least_limit_counts(text: str, cpu: int, memory_gib: int) -> None:
    assert parse_size(text) == MachineSize(cpu=cpu, memory_bytes=memory_gib * GIB)


@pytest.mark.parametrize("text", ["", "online \nmemory_kib 1\n", "allowed 0-1\n", "Welcome to the machine"])
def test_a_machine_that_reports_nothing_has_no_size(text: str) -> None:
    assert parse_size(text) is None


@pytest.mark.parametrize(
    ("cpu", "memory_gib", "fits"),
    [
        (4, 16.0, True),
        (8, 64.0, True),
        (4, 15.2, True),  # what firmware and kernel keep
        (4, 13.8, True),
        (4, 13.7, False),
        (3, 16.0, False),
        (2, 8.0, False),
    ],
)
def test_cores_count_exactly_and_memory_within_an_eighth(cpu: int, memory_gib: float, fits: bool) -> None:
    size = MachineSize(cpu=cpu, memory_bytes=int(memory_gib * GIB))

    assert (size.shortfall(InstanceSpec(name="big", cpu=4, memory_gib=16)) == "") is fits


def test_a_small_machine_may_lack_what_a_kernel_keeps_for_a_crash() -> None:
    assert MachineSize(cpu=1, memory_bytes=300 << 20).shortfall(InstanceSpec(name="nano", cpu=1, memory_gib=0.5)) == ""


async def test_this_machine_measures_what_its_supervisor_would() -> None:
    transport = LocalAccess(address="127.0.0.1", workdir="/nonexistent").open()
    size = await measure_machine(transport)

    assert size is not None
    assert size.cpu <= len(os.sched_getaffinity(0))
    assert size.memory_bytes == memory_bytes()


@pytest.mark.parametrize(
    ("cpu", "memory_gib", "words"),
    [
        (2, 23.5, "it has 2 of 4 cores"),
        (4, 8.0, "it has 8.0 of 16 GiB of memory"),
        (2, 8.0, "it has 2 of 4 cores and 8.0 of 16 GiB of memory"),
    ],
)
def test_a_machine_that_is_too_small_is_described_by_what_it_lacks(cpu: int, memory_gib: float, words: str) -> None:
    size = MachineSize(cpu=cpu, memory_bytes=int(memory_gib * (1 << 30)))
    bought = InstanceSpec(name="big", cpu=4, memory_gib=16)
    assert size.shortfall(bought) == f"is smaller than bought: {words}"
