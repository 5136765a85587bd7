from __future__ import annotations

import pytest
from tests.support.nodes import node_config

from skyward.node.supervisor.start_order import TEMPLATE_ID, TEMPLATE_VARIABLE, StartOrder, start_variables
from skyward.providers.local import INSTANCE_VARIABLE
from skyward.request.volume import GrantedVolume, S3Volume, StorageKey, VolumeAccess


def test_an_order_holds_no_keys_of_volumes() -> None:
    access = VolumeAccess(key=StorageKey(id="i", secret="s3cret"))
    volumes = (GrantedVolume(volume=S3Volume(bucket="bucket", mount_path="/data"), access=access),)
    with pytest.raises(ValueError, match="keys of its volumes"):
        StartOrder(config=node_config(volumes=volumes), env={}, started_with={}, limits="")


def test_variables_that_count_at_a_programs_start_are_told_apart() -> None:
    started = {"PYTHONHASHSEED": "0", "LD_PRELOAD": "x", "OMP_NUM_THREADS": "2", "DASK_CONFIG": "/", "LC_ALL": "C"}
    assert start_variables(started | {"HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}) == started


def test_a_template_can_show_the_variable_of_an_instance() -> None:
    assert len(TEMPLATE_VARIABLE) == len(INSTANCE_VARIABLE)
    assert len(TEMPLATE_ID) == len("local-") + 12
