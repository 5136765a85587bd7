"""``SkywardCluster``: a pool with the interface of Dask's cluster classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any, Self, TypedDict, Unpack, cast
from weakref import WeakSet

from distributed import Status
from tornado.ioloop import IOLoop

from skyward._concurrency.exits import at_exit
from skyward.errors import ConfigurationError
from skyward.events import Callback
from skyward.request.accelerators import Accelerator
from skyward.request.image import Image
from skyward.request.request import SpotLike
from skyward.request.volume import Volume
from skyward.submission import FleetStatus
from skyward.wire.dask_parts import add_client_extension
from skyward_dask.dashboard_link import DashboardLink, NotebookView, without_token
from skyward_dask.pool_handle import PoolLike, make_pool_handle
from skyward_dask.settings import seconds, setting
from skyward_dask.sizing import staying
from skyward_dask.worker_scaling import ElasticCluster

__all__ = ["PoolParams", "SkywardCluster", "close_clusters", "fleet_rows", "scaling_table"]

_clusters: WeakSet[SkywardCluster] = WeakSet()
_AT_EXIT_S = 10
_CELL = '<td style="text-align: left;"><strong>{}:</strong> {}</td>'


class PoolParams(TypedDict, total=False):
    """Parameters of :class:`~skyward.ComputePool`, which documents them."""

    provider: Any
    image: Image | None
    nodes: int
    machine: str | None
    accelerator: str | Accelerator | None
    cpu: int | None
    memory: str | None
    volume: Sequence[Volume] | None
    spot: SpotLike
    timeout: int
    env: Mapping[str, str] | None
    concurrency: int
    display: str
    on_event: Callback | None
    collect_metrics: bool
    pip: Sequence[str] | None
    lease: float
    away: float
    max_cost: float | None
    max_price_per_hour: float | None


class SkywardCluster(ElasticCluster):
    """Dask cluster on ephemeral machines: ``Client(SkywardCluster(provider=sky.Local(), nodes=2))``.

    With the parameters of a pool it opens its own pool now, and closes it at the end. With an open pool it uses that
    one, and leaves it open. :attr:`pool` is this pool; native and joblib calls run on it as well as Dask's tasks.

    Dask counts workers, and a pool consists of whole nodes: numbers of workers are rounded up. The scheduler runs on
    node 0, so that one node always stays.

    Args:
        pool: an open pool, instead of a pool's parameters.
        name: name for :meth:`from_name`; None selects the setting ``skyward.name``, else a random name.
        asynchronous: True for use in a running event loop: ``async with SkywardCluster(..., asynchronous=True)``.
            Nothing is created before the cluster is awaited or entered.
        scheduler_sync_interval: interval of updates from the scheduler: seconds, or text such as ``"500ms"``.
        loop: a running event loop to use instead of a new one.
        **pool_params: parameters of :class:`~skyward.ComputePool`.

    Raises:
        ConfigurationError: a parameter is wrong, and nothing was created; or this process and the nodes have different
            versions of Dask or Python.
        PoolStateError: the pool passed is not open.
        TypeError: there is no such parameter.
    """

    def __init__(
        self,
        pool: PoolLike | None = None,
        *,
        name: str | None = None,
        asynchronous: bool = False,
        scheduler_sync_interval: Any = 1,
        loop: IOLoop | None = None,
        **pool_params: Unpack[PoolParams],
    ) -> None:
        name = setting("name") if name is None else name
        if name is not None and not (isinstance(name, str) and name.strip()):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"name must be non-empty text, got {name!r}")
        super().__init__(
            make_pool_handle(pool, cast("dict[str, Any]", pool_params), type(self)),
            name=name,
            asynchronous=asynchronous,
            loop=loop,
            quiet=pool_params.get("display") == "quiet",
            scheduler_sync_interval=scheduler_sync_interval,
        )
        self._dashboard = DashboardLink(self.pool.forward)
        add_client_extension("skyward_view", NotebookView)
        _clusters.add(self)
        if not asynchronous:
            self._start_here()

    async def _ask_for_dashboard(self) -> object:
        return await self.scheduler_comm.skyward_dashboard()

    async def _leave(self) -> None:
        self._dashboard.forget()
        await super()._leave()

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Return the running cluster of that name in this process, with which all its clusters end.

        Raises:
            ConfigurationError: no such cluster is running; the message lists the running ones.
        """
        running = [cluster for cluster in _clusters if cluster.status == Status.running and isinstance(cluster, cls)]
        for cluster in running:
            if cluster.name == name:
                return cluster
        known = ", ".join(sorted(cluster.label for cluster in running)) or "none"
        raise ConfigurationError(f"name must be the name of a running cluster of this process ({known}), got {name!r}")

    @property
    def dashboard_link(self) -> str:
        """Link to Dask's dashboard for this machine's browser, with its token.

        The first access starts the dashboard, which costs the scheduler a second and some memory. The link is empty
        until it has started: on the event loop, which must not wait, and elsewhere after the setting
        ``skyward.dashboard-timeout``. Never raises; :meth:`get_dashboard_link` raises the reason for a missing link.
        """
        if self._dashboard.link or self.status != Status.running:
            return self._dashboard.link
        try:
            if self.asynchronous:
                self._dashboard.start(self._ask_for_dashboard)
            elif not self._dashboard.is_asking:
                limit_s = seconds("skyward.dashboard-timeout", setting("dashboard-timeout"))
                self.sync(self._dashboard.find, self._ask_for_dashboard, callback_timeout=limit_s)
        except Exception as error:
            self._log_once(f"no dashboard: {error}")
        return self._dashboard.link

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:  # noqa: FBT001, FBT002 - Dask's
        """Return logs by source: the cluster object, the scheduler, and each worker by its address.

        Args:
            cluster: True includes the cluster object's log.
            scheduler: True includes the scheduler's log.
            workers: True includes all workers, or a list of their addresses.

        Raises:
            PoolStateError: the cluster or its pool is closed.
        """
        self._open_status()
        return cast("Any", super().get_logs(cluster=cluster, scheduler=scheduler, workers=workers))

    def get_dashboard_link(self) -> Any:
        """Return :attr:`dashboard_link` once the dashboard has started; in asynchronous use, an awaitable of it.

        Raises:
            UnreachableError: the scheduler has no dashboard; the message gives the reason.
            PoolStateError: the cluster or its pool is closed.
        """
        self._open_status()
        return cast("Any", self.sync(self._dashboard.find, self._ask_for_dashboard))

    def _scaling_status(self) -> str:
        adapts = self._adaptive is not None and self._adaptive.periodic_callback is not None
        return scaling_table(
            mode="Adaptive" if adapts else "Manual",
            observed=len(self.observed),
            wanted=len(self.plan),
            status=self._status(),
        )

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        status = self._status()
        rows = fleet_rows(status) if status else ""
        return without_token(super()._repr_html_(cluster_status=rows + (cluster_status or "")))


def fleet_rows(status: FleetStatus) -> str:
    """Return nodes, accelerators, markets and cost as two rows of HTML."""
    nodes = staying(status)
    ready = sum(node.state == "ready" for node in nodes)
    spot = sum(node.spot for node in nodes)
    devices = Counter(name for node in nodes for name in node.accelerators)
    per_hour = sum(node.price_per_hour or 0.0 for node in nodes)
    return _row(
        ("Nodes", f"{ready}" if ready == status.wanted else f"{ready} of {status.wanted}"),
        ("Accelerators", ", ".join(f"{name} x {count}" for name, count in devices.items()) or "none"),
    ) + _row(
        ("Bought", f"{spot} spot, {len(nodes) - spot} on demand"),
        ("Cost so far", f"{status.cost:.2f} USD, {per_hour:.2f} USD per hour"),
    )


def scaling_table(*, mode: str, observed: int, wanted: int, status: FleetStatus | None) -> str:
    """Return the current and target numbers of workers and nodes as an HTML table."""
    workers = f"{observed}" if observed == wanted else f"{observed} / {wanted}"
    lines = [("Scaling mode", mode), ("Workers", workers)]
    if status is not None:
        lines.append(("Nodes", f"{status.wanted}, of {status.workers_per_node} workers each"))
    return "<table>" + "".join(map(_row, lines)) + "</table>"


def _row(*cells: tuple[str, str]) -> str:
    return "<tr>" + "".join(_CELL.format(escape(name), escape(value)) for name, value in cells) + "</tr>"


def close_clusters() -> None:
    """Close all clusters, and so their own pools, at the end of the process."""
    for cluster in list(_clusters):
        if cluster.status != Status.closed:
            with suppress(Exception):
                cluster.close(timeout=_AT_EXIT_S)


at_exit(close_clusters)
