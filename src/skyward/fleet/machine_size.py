"""Size of a machine: cores and memory that its kernel and its cgroups grant, and the verdict against the offer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from skyward.machine.access import Transport
from skyward.request.instance import InstanceSpec

CORES_SHARE = 1.0
"""Least share of the offered cores."""
MEMORY_SHARE = 0.875
"""Least share of the offered memory. Firmware and kernel keep some: Karpenter, which plans for every machine type of a
large cloud, subtracts 7.5 % by default (https://karpenter.sh/docs/reference/settings, VM_MEMORY_OVERHEAD_PERCENT)."""
_KERNEL_GIB = 0.25
"""Additional memory that a kernel may reserve on a machine of any size, mostly for crash dumps."""
_GIB = 1 << 30
_KIB = 1 << 10
_TIMEOUT_S = 60.0

# Files only, since nproc obeys OMP_NUM_THREADS and is not everywhere. A group is limited by all groups above it too.
_MEASURE = b"""
set -u
sed -n 's/^Cpus_allowed_list:[[:space:]]*/allowed /p' /proc/self/status
echo "online $(cat /sys/devices/system/cpu/online 2>/dev/null)"
sed -n 's/^MemTotal: *\\([0-9]*\\) kB$/memory_kib \\1/p' /proc/meminfo
while IFS=: read -r _ controllers group; do
    case ",$controllers," in
    ,,) root=/sys/fs/cgroup ;;
    *,memory,*) root=/sys/fs/cgroup/memory ;;
    *,cpu,*) root=/sys/fs/cgroup/cpu ;;
    *) continue ;;
    esac
    while :; do
        folder=$root${group%/}
        for file in cpu.max memory.max memory.limit_in_bytes; do
            if [ -r "$folder/$file" ]; then echo "$file $(cat "$folder/$file")"; fi
        done
        if [ -r "$folder/cpu.cfs_quota_us" ]; then
            echo "cpu.max $(cat "$folder/cpu.cfs_quota_us") $(cat "$folder/cpu.cfs_period_us")"
        fi
        case $group in ''|/) break ;; esac
        group=${group%/*}
    done
done </proc/self/cgroup
"""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSize:
    """Cores and memory that processes on a machine may use.

    Attributes:
        cpu: cores; a begun one counts.
        memory_bytes: main memory.
    """

    cpu: int
    memory_bytes: int

    def shortfall(self, spec: InstanceSpec) -> str:
        """Return the fault of a machine that was bought as ``spec``, in words; empty if it is as large.

        Cores count exactly, memory within the share that firmware and kernel keep.
        """
        least_gib = spec.memory_gib * MEMORY_SHARE - _KERNEL_GIB
        short: list[str] = []
        if self.cpu < spec.cpu * CORES_SHARE:
            short.append(f"{self.cpu} of {spec.cpu} cores")
        if self.memory_bytes < least_gib * _GIB:
            short.append(f"{self.memory_bytes / _GIB:.1f} of {spec.memory_gib:g} GiB of memory")
        return f"is smaller than bought: it has {' and '.join(short)}" if short else ""


async def measure_machine(transport: Transport) -> MachineSize | None:
    """Return the size of a machine; None if it reports none.

    Raises:
        UnreachableError: it does not answer.
    """
    completed = await transport.run(["sh", "-s"], stdin=_MEASURE, timeout_s=_TIMEOUT_S)
    return parse_size(completed.stdout)


def parse_size(text: str) -> MachineSize | None:
    """Return the size from the output of the measuring script; None if cores or memory are missing there."""
    facts = [(name, value) for name, _, value in (line.partition(" ") for line in text.splitlines())]
    cores = [count for name, value in facts if name in ("allowed", "online") and (count := _counted(value))]
    cores += [_quota(value) for name, value in facts if name == "cpu.max"]
    memory = [int(value) * _KIB for name, value in facts if name == "memory_kib"]
    memory += _numbers(value for name, value in facts if name in ("memory.max", "memory.limit_in_bytes"))
    cores = [count for count in cores if count]
    return MachineSize(cpu=min(cores), memory_bytes=min(memory)) if cores and memory else None


def _counted(ranges: str) -> int:
    """Return the number of members of a list such as ``0-3,8``."""
    return sum(int(last or first) - int(first) + 1 for first, last in _RANGE.findall(ranges))


def _quota(text: str) -> int:
    """Return the cores of ``QUOTA PERIOD``, rounded up; 0 without a limit."""
    quota, _, period = text.partition(" ")
    return math.ceil(int(quota) / int(period)) if quota.isdecimal() and period.strip().isdecimal() else 0


def _numbers(texts: Iterable[str]) -> list[int]:
    return [int(text) for text in texts if text.strip().isdecimal()]
