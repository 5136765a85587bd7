from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.scale import growth

from skyward.testing.hosts import require_sshd

ROOT = Path(__file__).parents[3]


def test_growth_is_that_of_the_processor_time_of_a_call_from_the_fewest_workers_to_the_most() -> None:
    lanes = {
        workers: {"no_op_cpu_s": cpu_s, "no_op_collector_s": 1.0, "nap_cpu_s": 1.0, "nap_collector_s": 0.0}
        for workers, cpu_s in ((10, 2.0), (1000, 5.0), (100, 9.0))
    }

    assert "| no-op | 2.5 | < 1.3 | 4 |" in growth(lanes)


@pytest.mark.full
def test_every_figure_is_measured() -> None:
    require_sshd()
    sizes = ["--workers", "2", "3", "--hosts", "2", "--machines", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--quick", *sizes],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )

    for title in ("2 workers | 3 workers", "2 hosts", "2 machines", "Calculated from these"):
        assert title in done.stdout
