"""Pool that a :class:`~skyward_dask.SkywardCluster` opens itself."""

from __future__ import annotations

from typing import Any

from skyward.api.pool import ComputePool
from skyward_dask.service import with_dask


class DaskPool(ComputePool):
    """Pool whose nodes load Dask from the start and reach each other; else it does not open, and no node is added."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self._request = with_dask(self._request)
