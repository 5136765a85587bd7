"""This machine as a provider: every node is a folder, ports of its own and the processes that carry its id."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import platformdirs

from skyward.base.platform import SHARED_MEMORY, usable_cores, user_id
from skyward.base.waiting import NotYet, wait_until
from skyward.errors import ConfigurationError, TerminationError, UnreachableError
from skyward.machine.access import TAGS_FILE
from skyward.machine.local import LocalAccess
from skyward.providers.base import Instance, InstanceState, LaunchOrder, Offer, Provider
from skyward.request.accelerators import model_name
from skyward.request.checks import explain_options
from skyward.request.instance import InstanceSpec
from skyward.request.request import PoolRequest

INSTANCE_VARIABLE = "SKYWARD_INSTANCE"
"""Environment variable that every process of a node carries; its value is the instance's id."""

_KILL_DEADLINE_S = 15.0
_KEPT_POOLS = 50
_GIB = 1 << 30
_PRIVATE = 0o700

_ADDRESS = "127.0.0.1"
"""Address of every node: the only loopback address that interfaces list. LightGBM, for one, uses no other."""

_NETWORK = "this machine"


@explain_options
@dataclass(frozen=True, slots=True)
class Local(Provider):
    """Nodes on this machine, for nothing: processes of yours, apart from each other and ended with the pool.

    A pool's nodes divide the machine's cores and memory equally, but each has at least its ``cpu=`` and ``memory=``;
    accelerators are shared. A node keeps the share it started with when the pool grows or shrinks. Nothing is
    mounted or installed system-wide. Each node has a folder below this user's state folder; when the node has ended
    only its logs are left there.
    """

    own_machines: ClassVar[bool] = True
    this_machine: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if sys.platform == "win32":
            raise ConfigurationError(
                "Local() runs nodes on Linux and macOS: on Windows, use another provider, or run this program in WSL 2"
            )

    @property
    def name(self) -> str:
        """``"local"``."""
        return "local"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return this machine as the only offer: free, without a spot market.

        Raises:
            ConfigurationError: the request needs something that this machine or ``Local`` does not have.
        """
        return [await asyncio.to_thread(_check, request)]

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Make a folder (0700) for each node."""
        return await asyncio.to_thread(_launch, offers[0], order)

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """Return instances as running while their folders are tagged, and as gone otherwise; processes do not count.

        An instance that is gone still has an access while its logs are there.
        """
        return await asyncio.to_thread(lambda: [_describe(instance_id) for instance_id in instance_ids])

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """Kill every process of the nodes until none is left, and empty their folders down to the logs.

        The logs of the newest 50 pools are kept.
        """
        left = tuple(instance_ids)

        async def killed() -> bool | NotYet:
            nonlocal left
            left = await asyncio.to_thread(_kill, instance_ids)
            return NotYet(f"processes of {', '.join(left)}") if left else True

        try:
            await wait_until(killed, deadline_s=_KILL_DEADLINE_S, interval_s=0.02, what="killed processes to end")
        except UnreachableError as error:
            raise TerminationError(f"processes on this machine do not end: {error}", instance_ids=left) from error
        await asyncio.to_thread(_remove_all, instance_ids)

    async def tagged(self) -> Sequence[Instance]:
        """Return every node on this machine that has a tagged folder of this user."""
        return await asyncio.to_thread(_tagged)


def _root() -> Path:
    return platformdirs.user_state_path("skyward") / "local"


def _check(request: PoolRequest) -> Offer:
    machine = _this_machine()
    if request.machine is not None:
        raise ConfigurationError(f"machine={request.machine!r}: Local() has one machine, this one; leave it out")
    if missing := _missing_apt(request.image.apt):
        raise ConfigurationError(
            f"image: Local() installs nothing on your machine; first run `apt install {' '.join(missing)}`"
        )
    if request.accelerator is not None and request.accelerator.mig and request.nodes > 1:
        raise ConfigurationError(
            f"nodes={request.nodes}: Local() has one machine, and mig partitions its GPUs for one node; "
            "ask for nodes=1, which has a worker for each partition"
        )
    if request.wish.shortfall(machine):
        lack = ", which has no accelerator" if request.accelerator is not None and machine.accelerator is None else ""
        raise ConfigurationError(
            f"a node of {request.wish} does not fit on {machine}{lack}; ask for less, or use a provider that has it"
        )
    return _offer(machine)


def _offer(machine: InstanceSpec) -> Offer:
    return Offer(spec=machine, price_per_hour=0.0, on_demand_price_per_hour=0.0)


def _this_machine() -> InstanceSpec:
    import psutil

    gpus = _gpus()
    model, memory_gib = gpus[0] if gpus else (None, None)
    return InstanceSpec(
        name="this machine",
        cpu=usable_cores(),
        memory_gib=round(psutil.virtual_memory().total / _GIB, 1),
        accelerator=model,
        accelerator_count=gpus.count((model, memory_gib)),
        accelerator_memory_gib=memory_gib,
    )


def _gpus() -> Sequence[tuple[str, float | None]]:
    """Return the model and the memory in GiB of each GPU; None for memory that the driver does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, no GPU
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [(model_name(pynvml.nvmlDeviceGetName(handle)), _gpu_memory_gib(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _gpu_memory_gib(handle: Any) -> float | None:
    import pynvml

    try:
        return round(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / _GIB, 1)
    except pynvml.NVMLError:  # in MIG mode only root may read it
        return None


def _missing_apt(packages: Sequence[str]) -> Sequence[str]:
    if not packages:
        return ()
    query = shutil.which("dpkg-query")
    return tuple(package for package in packages if query is None or not _is_installed(query, package))


def _is_installed(query: str, package: str) -> bool:
    asked = subprocess.run(
        [query, "--show", "--showformat=${db:Status-Status}", "--", package],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return asked.stdout == "installed"


def _launch(offer: Offer, order: LaunchOrder) -> Sequence[Instance]:
    made: list[Instance] = []
    try:
        for key in order.keys:
            made.append(_instance(_make(key, order), key, offer))  # noqa: PERF401 - what was made is undone below
    except OSError:
        for instance in made:
            _remove(instance.id)
        raise
    return made


def _make(key: str, order: LaunchOrder) -> Path:
    """Make the folder of a node; the file of its tags turns it into an instance."""
    instance_id = f"local-{uuid.uuid4().hex[:12]}"
    folder = _root() / order.pool_id / instance_id
    folder.mkdir(mode=0o700, parents=True)
    tags = {
        "instance_id": instance_id,
        "pool_id": order.pool_id,
        "key": key,
        "address": _ADDRESS,
        "created_at": time.time(),
        "timeout_s": order.timeout_s,
    }
    (folder / TAGS_FILE).write_text(json.dumps(tags), encoding="utf-8")
    return folder


def _find(instance_id: str) -> Path | None:
    """Return the instance's folder, tagged or not."""
    return next(iter(_root().glob(f"*/{instance_id}")), None)


def _read_key(folder: Path) -> str | None:
    """Return the ledger key in an instance's tags; None for a folder that is no instance any more."""
    try:
        return str(json.loads((folder / TAGS_FILE).read_text(encoding="utf-8"))["key"])
    except FileNotFoundError:
        return None


def _instance(folder: Path, key: str, offer: Offer) -> Instance:
    return Instance(
        id=folder.name,
        key=key,
        state=InstanceState.RUNNING,
        offer=offer,
        access=LocalAccess(address=_ADDRESS, workdir=str(folder)),
        network=_NETWORK,
        ends_itself=True,
    )


def _describe(instance_id: str) -> Instance:
    folder = _find(instance_id)
    offer = _offer(_this_machine())
    if folder is not None and (key := _read_key(folder)) is not None:
        return _instance(folder, key, offer)
    access = None if folder is None else LocalAccess(address=_ADDRESS, workdir=str(folder))
    return Instance(id=instance_id, key="", state=InstanceState.GONE, offer=offer, access=access)


def _tagged() -> Sequence[Instance]:
    described = [_describe(path.parent.name) for path in _root().glob(f"*/*/{TAGS_FILE}")]
    return [instance for instance in described if instance.state is not InstanceState.GONE]


def _kill(instance_ids: Sequence[str]) -> tuple[str, ...]:
    """SIGKILL all processes of the instances, and return the ids of the instances that had any."""
    import psutil

    alive: set[str] = set()
    for process in psutil.process_iter():
        try:
            instance_id = process.environ().get(INSTANCE_VARIABLE, "")
            if instance_id in instance_ids and process.pid != os.getpid():
                alive.add(instance_id)
                process.kill()
        except psutil.Error:  # another user's, or gone meanwhile
            continue
    return tuple(sorted(alive))


def _remove_all(instance_ids: Sequence[str]) -> None:
    for instance_id in instance_ids:
        _remove(instance_id)
    with suppress(OSError):  # such as a folder that another process is deleting
        pools = sorted(_root().iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for pool in pools[_KEPT_POOLS:]:
            if not any(pool.glob(f"*/{TAGS_FILE}")):
                shutil.rmtree(pool, ignore_errors=True)


def _remove(instance_id: str) -> None:
    """Empty the folder down to its logs; without its tags it is no instance any more, so they go last."""
    folder = _find(instance_id)
    if folder is None:
        return
    tags = folder / TAGS_FILE
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            remove_folder(entry)
        elif entry != tags and entry.suffix != ".log":
            entry.unlink()
    # The supervisor removes its blobs itself, unless it had to be killed.
    remove_blobs(instance_id)
    with suppress(FileNotFoundError):  # removed by another process meanwhile, as one of an old pool
        os.utime(folder.parent)  # the pools that ended last are kept
    tags.unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        if not any(folder.iterdir()):
            folder.rmdir()


def remove_folder(folder: Path) -> None:
    """Remove a folder with everything in it, also folders that a call has made read-only. Follows no links."""
    try:
        shutil.rmtree(folder)
    except PermissionError:
        folder.chmod(_PRIVATE)
        for here, names, _ in os.walk(folder):  # a folder is entered after its name was here
            for path in (Path(here, name) for name in names):
                if not path.is_symlink():
                    path.chmod(_PRIVATE)
        shutil.rmtree(folder)


def remove_blobs(instance_id: str, memory: Path = SHARED_MEMORY) -> None:
    """Remove the blobs of an instance of this user from memory; links are not followed, others' folders stay."""
    for left in memory.glob(f"skyward-{user_id()}-{instance_id}-*"):
        shutil.rmtree(left, ignore_errors=True)
