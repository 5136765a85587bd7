"""Limits of control groups, read as the kernel writes them; those of memory are in supervisor/test_metrics.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.node.cgroups import find_cpu_limit
from skyward.node.plan import usable


def unified(limit: str, above: str = "max 100000") -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/pod/job\n",
        "sys/fs/cgroup/pod/cpu.max": f"{above}\n",
        "sys/fs/cgroup/pod/job/cpu.max": f"{limit}\n",
    }


def first_version(quota: str, folder: str = "docker/abc") -> dict[str, str]:
    return {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n2:memory:/x\n0::/\n",
        f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_period_us": "100000\n",
    }


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param(unified("150000 100000"), 1.5, id="a-quota"),
        pytest.param(unified("50000 200000"), 0.25, id="another-period"),
        pytest.param(unified("800000 100000", above="200000 100000"), 2.0, id="the-group-above-allows-less"),
        pytest.param(unified("max 100000"), None, id="no-quota"),
        pytest.param(first_version("300000"), 3.0, id="first-version"),
        pytest.param(first_version("300000", "."), 3.0, id="first-version-in-a-container"),
        pytest.param(first_version("-1"), None, id="first-version-without-a-quota"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, None, id="no-files"),
        pytest.param({}, None, id="not-linux"),
    ],
)
def test_the_least_processor_time_of_all_groups_counts(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert find_cpu_limit(tmp_path) == cores


@pytest.mark.parametrize(
    ("seen", "limits", "size"),
    [
        pytest.param(64, (None, 0), 64, id="no-limit"),
        pytest.param(64, (None, 8), 8, id="less-bought-than-seen"),
        pytest.param(4, (None, 8), 4, id="less-seen-than-bought"),
        pytest.param(64, (2.0, 8), 2, id="the-group-allows-least"),
        pytest.param(64, (1.5, 0), 2, id="a-part-of-a-core-is-a-core"),
        pytest.param(64, (0.1, 0), 1, id="never-none"),
    ],
)
def test_a_node_has_the_least_of_what_it_sees_and_what_was_bought(
    seen: int, limits: tuple[float | None, ...], size: int
) -> None:
    assert usable(seen, *limits) == size
