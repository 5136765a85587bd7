"""State of a pool, as values."""

from __future__ import annotations

import json

import pytest

from skyward.events import GpuMetrics, Metrics, Progress
from skyward.events.snapshot import NodeSnapshot, PoolSnapshot, WorkerSnapshot

GPU = GpuMetrics(0, "H100", 75.0, 1024.0, 81920.0)
SNAPSHOT = PoolSnapshot(
    pool_id="sky-1",
    provider="aws",
    taken_at=1e9,
    open_s=12.5,
    nodes=(
        NodeSnapshot(
            node=0,
            state="ready",
            price_per_hour=1.5,
            workers=(WorkerSnapshot(worker=0, state="running", call="train#3", seconds=4.0, waiting=2),),
            metrics=Metrics("i-1", 0, 50.0, 25.0, 1000.0, 4000.0, 75.0, gpus=(GPU,)),
        ),
        NodeSnapshot(node=1, state="launching"),
    ),
    works=(Progress("train", 4, 12, failed=1, running=2),),
)


def test_a_snapshot_survives_json() -> None:
    assert PoolSnapshot.from_dict(json.loads(json.dumps(SNAPSHOT.to_dict()))) == SNAPSHOT


def test_names_of_a_later_version_are_left_out_and_missing_ones_are_named() -> None:
    assert PoolSnapshot.from_dict(SNAPSHOT.to_dict() | {"moon": 1}) == SNAPSHOT
    with pytest.raises(TypeError, match="pool_id"):
        PoolSnapshot.from_dict({})


@pytest.mark.parametrize(
    ("event", "over"),
    [
        (Progress("f", 3, 5, failed=1, running=1), False),
        (Progress("f", 3, 5, failed=1, cancelled=1), True),
        (Progress("f", 5), False),
    ],
)
def test_work_is_over_when_every_call_is_accounted_for(event: Progress, over: bool) -> None:
    assert event.over is over
