"""What a notebook shows."""

from __future__ import annotations

import re

from skyward.submission import FleetStatus, NodeStatus
from skyward_dask.cluster import fleet_rows, scaling_table

H100 = NodeStatus(
    rank=0, state="ready", workers=("node0-worker0",), accelerators=("H100",) * 8, spot=True, price_per_hour=10.0
)
COMING = NodeStatus(rank=1, state="starting", workers=("node1-worker0",), accelerators=("<i>L4</i>",))
GOING = NodeStatus(rank=2, state="ending", workers=("node2-worker0",), spot=True, price_per_hour=5.0)


def text(html):
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_a_fleet_in_words():
    status = FleetStatus(wanted=2, workers_per_node=1, nodes=(H100, COMING, GOING), cost=1.234)
    shown = text(fleet_rows(status))
    assert "Nodes: 1 of 2 " in shown
    assert "Accelerators: H100 x 8, &lt;i&gt;L4&lt;/i&gt; x 1" in shown
    assert "Bought: 1 spot, 1 on demand" in shown
    assert "Cost so far: 1.23 USD, 10.00 USD per hour" in shown


def test_a_fleet_that_is_all_there():
    shown = text(fleet_rows(FleetStatus(wanted=1, workers_per_node=1, nodes=(H100,))))
    assert "Nodes: 1 Accelerators: H100 x 8" in shown


def test_scaling_in_words():
    status = FleetStatus(wanted=2, workers_per_node=3)
    assert text(scaling_table(mode="Manual", observed=3, wanted=6, status=status)) == (
        "Scaling mode: Manual Workers: 3 / 6 Nodes: 2, of 3 workers each"
    )
    assert (
        text(scaling_table(mode="Adaptive", observed=6, wanted=6, status=None)) == "Scaling mode: Adaptive Workers: 6"
    )


def test_a_cluster_shows_its_fleet(cluster):
    shown = text(cluster._repr_html_())
    assert "Nodes: 2 Accelerators: none" in shown
    assert "Cost so far: 0.50 USD, 2.00 USD per hour" in shown
    assert "node1-worker1" in shown
    assert "Scaling mode: Manual Workers: 4 Nodes: 2, of 2 workers each" in text(cluster._scaling_status())
    cluster.adapt(minimum=2, maximum=4)
    assert "Scaling mode: Adaptive" in text(cluster._scaling_status())


def test_a_closed_cluster_can_still_be_shown(cluster):
    cluster.close()
    assert "Nodes" not in text(cluster._repr_html_())
