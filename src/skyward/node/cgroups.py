"""Control groups of this process: their limits of memory and of processor time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_MEMORY, _CPU = "memory", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCgroup:
    """The control group that limits this process's memory.

    Attributes:
        limit_bytes: how much its processes may have together.
    """

    limit_bytes: int
    usage_file: Path
    stat_file: Path
    reclaimable_key: str

    def used_bytes(self) -> int:
        """Return the memory of its processes, without file pages that the kernel would drop first."""
        stat = dict(line.split() for line in self.stat_file.read_text().splitlines())
        return max(0, int(self.usage_file.read_text()) - int(stat.get(self.reclaimable_key, 0)))


@dataclass(frozen=True, slots=True)
class _Group:
    """Folder of a control group.

    Attributes:
        path: the folder.
        unified: True in version 2, where all controllers have one hierarchy.
    """

    path: Path
    unified: bool

    def read(self, name: str) -> str:
        """Return a file's text; empty if the group has no such file."""
        file = self.path / name
        return file.read_text().strip() if file.exists() else ""


def find_memory_cgroup(root: Path = _ROOT) -> MemoryCgroup | None:
    """Return the group with the smallest limit among this process's own and all above it; None if none has a limit.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    limited = [found for group in _groups(root, _MEMORY) if (found := _memory_limit(group)) is not None]
    return min(limited, key=lambda group: group.limit_bytes, default=None)


def find_cpu_limit(root: Path = _ROOT) -> float | None:
    """Return the least processor time that this process's groups allow, in cores; None without a limit.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return min((cores for group in _groups(root, _CPU) if (cores := _cpu_limit(group)) is not None), default=None)


def _groups(root: Path, controller: str) -> list[_Group]:
    """Return this process's group for a controller, and all above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    mount = root / "sys/fs/cgroup"
    groups: list[_Group] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        unified = number == "0"
        if unified or controller in controllers.split(","):
            own = Path(path.lstrip("/"))
            top = mount if unified else mount / controller
            groups += [_Group(top / folder, unified) for folder in (own, *own.parents)]
    return groups


def _memory_limit(group: _Group) -> MemoryCgroup | None:
    text = group.read("memory.max" if group.unified else "memory.limit_in_bytes")
    if text in ("", "max"):
        return None
    return MemoryCgroup(
        limit_bytes=int(text),
        usage_file=group.path / ("memory.current" if group.unified else "memory.usage_in_bytes"),
        stat_file=group.path / "memory.stat",
        reclaimable_key="inactive_file" if group.unified else "total_inactive_file",
    )


def _cpu_limit(group: _Group) -> float | None:
    """Return the group's quota of processor time by its period: ``150000 100000`` is 1.5 cores."""
    if group.unified:
        quota, _, period = group.read("cpu.max").partition(" ")
    else:
        quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
    if not period or quota in ("", "max", "-1"):
        return None
    return int(quota) / int(period)
