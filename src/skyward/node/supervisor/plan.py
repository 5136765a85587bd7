"""Plan of a node by its supervisor, as the node's processes receive it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from skyward.node.gpu.driver import Device
from skyward.wire.control import Start
from skyward.wire.node_config import NodeConfig, NodeReady, WorkerPlace

__all__ = ["DASK_ENV", "NodePlan", "thread_variables"]

# Dask's nannies put variables into a worker's environment just before they start it, but ours fork workers from a
# process that is older. The hash seed makes the workers of all nodes hash alike; any number does. Dask's
# MALLOC_TRIM_THRESHOLD_ is left out: it keeps glibc from adapting to large arrays, which would be mapped, zeroed and
# unmapped every time.
DASK_ENV = {"PYTHONHASHSEED": "6640"}
_THREAD_CAPS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def thread_variables(config: NodeConfig, cpu_count: int) -> dict[str, str]:
    """Return the caps on threads of numerical libraries in a worker; those that the user has set come first."""
    threads = str(max(1, cpu_count // config.workers))
    return {name: config.env.get(name, threads) for name in _THREAD_CAPS}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node: the client's configuration and the supervisor's choices.

    Attributes:
        config: the client's configuration.
        ready: ports, folders and sizes.
        nanny_ports: port of each worker's nanny, by index.
        devices: devices of the workers, in the order in which they are dealt out.
    """

    config: NodeConfig
    ready: NodeReady
    nanny_ports: tuple[int, ...]
    devices: tuple[Device, ...] = ()

    @property
    def memory_limit_bytes(self) -> int:
        """Each worker's share of the node's memory."""
        return self.ready.memory_bytes // self.config.workers

    def here(self, address: str) -> str:
        """Return ``tls://host:port`` of one of this node's servers as its own processes reach it."""
        return f"tls://{self.config.binds_to}:{address.rpartition(':')[2]}"

    @property
    def worker_folder(self) -> str:
        """Folder of the workers' own directories; it goes when the node ends."""
        return str(Path(self.config.workdir, "workers"))

    def worker_log(self, worker: int) -> str:
        """Log file of worker number ``worker``."""
        return str(Path(self.config.workdir, f"worker-{worker}.log"))

    def worker_mark(self, worker: int) -> str:
        """File of the offset up to which the worker's log has arrived; see :mod:`~skyward.node.worker.capture`."""
        return str(Path(self.ready.blob_dir, f"worker-{worker}.mark"))

    def process_env(self) -> dict[str, str]:
        """Return the variables of every process of the node, besides those that the supervisor has."""
        ours = thread_variables(self.config, self.ready.cpu_count)
        if not all(device.shown_as.isdecimal() for device in self.devices):
            # Dask's monitor takes CUDA_VISIBLE_DEVICES apart, and its process ends where a part of a GPU has fewer
            # properties than a whole one.
            ours |= {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"}
        # A loop inside a call counts the machine's cores otherwise.
        if self.config.sharers > 1 or self.config.bought_cpu:
            ours |= {"LOKY_MAX_CPU_COUNT": str(self.ready.cpu_count)}
        return DASK_ENV | ours | dict(self.config.env) | {"SKYWARD_INSTANCE": self.config.instance_id}

    def devices_of(self, worker: int) -> tuple[Device, ...]:
        """Return the devices of worker number ``worker``.

        Devices are dealt round-robin; where there are fewer than workers, several workers share one.
        """
        if not self.devices:
            return ()
        return self.devices[worker :: self.config.workers] or (self.devices[worker % len(self.devices)],)

    def resources(self, worker: int) -> dict[str, float]:
        """Return the worker's resources for Dask: ``{"GPU": n}``, a fraction where an accelerator is shared."""
        devices = self.devices_of(worker)
        if not devices:
            return {}
        sharing = sum(self.devices_of(other) == devices for other in range(self.config.workers))
        return {"GPU": len(devices) / sharing}

    def place(self, worker: int, order: Start) -> WorkerPlace:
        """Return the place of worker number ``worker`` in its pool."""
        config = self.config
        return WorkerPlace(
            pool_id=config.pool_id,
            instance_id=config.instance_id,
            node=config.node,
            total_nodes=order.total_nodes,
            worker=worker,
            workers_per_node=config.workers,
            head_addr=order.head_addr,
            address=config.address,
            accelerators=tuple(device.name for device in self.devices_of(worker)),
            memory_limit_bytes=self.memory_limit_bytes,
            node_accelerators=len(self.devices),
            bind=config.bind,
        )

    def worker_env(self, worker: int, order: Start) -> dict[str, str]:
        """Return the variables that worker number ``worker`` has besides those of :meth:`process_env`."""
        return (
            self._visible_devices(worker)
            | self._files()
            | {
                "SKYWARD_WORKER": self.place(worker, order).to_json(),
                "SKYWARD_LANE": self.ready.lanes[worker],
                "SKYWARD_WORKER_LOG": self.worker_log(worker),
                "SKYWARD_WORKER_MARK": self.worker_mark(worker),
                "SKYWARD_BLOB_DIRS": os.pathsep.join((self.ready.blob_dir, self.ready.blob_dir_disk)),
            }
        )

    def _files(self) -> dict[str, str]:
        files = self.config.files
        if not self.config.imports_files:
            return {"SKYWARD_FILES": files} if files else {}
        others = self.config.env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")
        return {"SKYWARD_FILES": files, "PYTHONPATH": os.pathsep.join((files, others)) if others else files}

    def _visible_devices(self, worker: int) -> dict[str, str]:
        devices = self.devices_of(worker)
        nobody_asked = not self.config.accelerators and self.config.workers == 1
        if not devices or nobody_asked or "CUDA_VISIBLE_DEVICES" in self.config.env:  # the user has chosen
            return {}
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(device.shown_as for device in devices)}
        if "CUDA_VISIBLE_DEVICES" in os.environ:  # its devices and their order stay
            return visible
        # By default CUDA numbers GPUs by speed, and the driver by their place on the bus.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | visible

    def to_json(self) -> str:
        """Return the plan as one line. It holds the node's private key: never in a log, an argument or a variable."""
        config, ready = json.loads(self.config.to_json()), json.loads(self.ready.to_json())
        return json.dumps([config, ready, self.nanny_ports, [asdict(device) for device in self.devices]])

    @classmethod
    def from_json(cls, text: str) -> NodePlan:
        """Read the line."""
        config, ready, nanny_ports, devices = json.loads(text)
        return cls(
            config=NodeConfig.from_json(json.dumps(config)),
            ready=NodeReady.from_json(json.dumps(ready)),
            nanny_ports=tuple(nanny_ports),
            devices=tuple(Device(**device) for device in devices),
        )
