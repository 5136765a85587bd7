from __future__ import annotations

from tests.support.nodes import node_config

from skyward.node.supervisor.start_order import (
    TEMPLATE_ID,
    TEMPLATE_VARIABLE,
    StartOrder,
    read_volumes,
    start_variables,
    volumes_line,
)
from skyward.providers.local import INSTANCE_VARIABLE
from skyward.request.volume import GrantedVolume, S3Volume, StorageKey, VolumeAccess


def test_an_order_survives_its_line() -> None:
    order = StartOrder(
        config=node_config(env={"A": "ü\n"}), env={"B": "\udcff"}, started_with={"LANG": "C"}, limits="7"
    )
    line = order.to_json()
    assert "\n" not in line
    assert StartOrder.from_json(line) == order


def test_an_order_holds_no_keys_of_volumes_which_come_in_a_line_of_their_own() -> None:
    access = VolumeAccess(key=StorageKey(id="i", secret="s3cret-of-the-volume"))
    volumes = (GrantedVolume(volume=S3Volume(bucket="bucket", mount_path="/data"), access=access),)
    order = StartOrder(config=node_config(volumes=volumes), env={}, started_with={}, limits="")
    assert "s3cret" not in order.to_json()
    assert read_volumes(volumes_line(volumes)) == volumes


def test_variables_that_count_at_a_programs_start_are_told_apart() -> None:
    started = {"PYTHONHASHSEED": "0", "LD_PRELOAD": "x", "OMP_NUM_THREADS": "2", "DASK_CONFIG": "/", "LC_ALL": "C"}
    assert start_variables(started | {"HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}) == started


def test_a_template_can_show_the_variable_of_an_instance() -> None:
    assert len(TEMPLATE_VARIABLE) == len(INSTANCE_VARIABLE)
    assert len(TEMPLATE_ID) == len("local-") + 12
