"""Delivery of an image's files and a pool's volumes to a prepared node."""

from __future__ import annotations

import asyncio
import json
import mmap
import tempfile
from collections.abc import Sequence
from typing import Final
from weakref import WeakValueDictionary

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.environment.bootstrap import Environment, failed_step, masked, persist
from skyward.errors import BootstrapError, ConfigurationError
from skyward.machine.access import Access, Completed, Transport
from skyward.node.storage.volume_program import LOG_FILE, VolumeOrder
from skyward.providers.base import Provider
from skyward.providers.storage import grant_volumes
from skyward.request.image import ImageSettings
from skyward.request.includes import included_files, pack_files
from skyward.request.request import PoolRequest
from skyward.request.volume import GrantedVolume

_VOLUMES_STEP = "volumes"
_VOLUMES_TIMEOUT_S = 3600.0
_UNDO_S = 60.0
_MARGIN_S = 900.0
_FRESH_S = 300.0
_FILES_TIMEOUT_S = 1800.0
_FILES_STEP = "skyward"
# No filter: the archive is the client's own, and tarfile's filters would make read-only files writable. A former
# attempt may have left such a file, which a user cannot open for writing.
_UNPACK = """
import os, sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
    archive.extraction_filter = lambda member, path: member
    for member in archive:
        path = os.path.join(sys.argv[1], member.name)
        if os.path.lexists(path) and not member.isdir():
            os.unlink(path)
        archive.extract(member, sys.argv[1])
"""


class Grants:
    """Access of a pool's machines to its volumes, valid for a machine's longest life.

    Args:
        provider: the provider of the machines.
        request: the pool's parameters.
    """

    def __init__(self, provider: Provider, request: PoolRequest) -> None:
        self._provider = provider
        self._request = request
        self._granted: tuple[GrantedVolume, ...] = ()
        self._granted_at = -_FRESH_S
        self._here = False

    async def check(self) -> None:
        """Raise errors of the volumes before any machine is created; see :func:`grant_volumes`."""
        await self._ask(here=True)

    async def to(self, access: Access) -> Sequence[GrantedVolume]:
        """Return the granted volumes for a machine. Raises as :func:`grant_volumes` does."""
        here = access.on_this_machine
        fresh = SYSTEM_CLOCK.elapsed() - self._granted_at < _FRESH_S
        if not fresh or here is not self._here:
            await self._ask(here=here)
        return self._granted

    async def _ask(self, *, here: bool) -> None:
        request = self._request
        self._granted = await grant_volumes(
            self._provider, request.volumes, lifetime_s=request.timeout_s + _MARGIN_S, here=here
        )
        self._granted_at, self._here = SYSTEM_CLOCK.elapsed(), here


# In memory an archive for six nodes took six times its size. The mapped file is gone once no node refers to it.
_packings: Final[WeakValueDictionary[tuple[str, ...], asyncio.Task[mmap.mmap]]] = WeakValueDictionary()


def _packing_of(includes: tuple[str, ...]) -> asyncio.Task[mmap.mmap]:
    """Return the archive of the includes that a node in preparation uses, else have one packed."""
    packing = _packings.get(includes)
    if packing is None or packing.get_loop() is not asyncio.get_running_loop():
        packing = _packings[includes] = asyncio.create_task(asyncio.to_thread(_pack, includes))
    return packing


def _pack(includes: Sequence[str]) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        pack_files(included_files(includes), file)
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


async def deliver_includes(image: ImageSettings, transport: Transport, *, folder: str, python: str, node: int) -> None:
    """Put the image's files into ``folder`` of the machine, with its interpreter ``python``. Idempotent.

    Raises :class:`~skyward.errors.BootstrapError`.
    """
    if not image.includes:
        return
    try:
        packing = _packing_of(image.includes)
        archive = await asyncio.shield(packing)
    except (ConfigurationError, OSError) as error:
        raise BootstrapError(
            f"the image's files cannot be sent to node {node}: {error}", node=node, step=_FILES_STEP
        ) from error

    async def unpack(left_s: float) -> Completed:
        argv = [python, "-I", "-X", "utf8", "-c", _UNPACK, folder]
        return await transport.run(argv, stdin=memoryview(archive), timeout_s=left_s)

    done = await persist(unpack, deadline_s=_FILES_TIMEOUT_S, node=node, step=_FILES_STEP)
    if done.exit_code:
        tail = done.stderr.strip()
        raise BootstrapError(
            f"the image's files cannot be unpacked into {folder} of node {node} (exit code {done.exit_code}). "
            f"Check the space there\n{tail}",
            node=node,
            step=_FILES_STEP,
            log_tail=tail,
        )


async def deliver_volumes(
    volumes: Sequence[GrantedVolume],
    transport: Transport,
    *,
    environment: Environment,
    workdir: str,
    instance_id: str,
    node: int,
) -> Sequence[str]:
    """Make volumes available on a machine with its prepared environment; return notes for the user.

    On failure nothing of them is left there. Idempotent. Raises :class:`~skyward.errors.BootstrapError`.
    """

    async def run(order: VolumeOrder, timeout_s: float) -> Completed:
        argv = environment.command("-m", "skyward.node.storage.volume_program")
        env = {**environment.env, "SKYWARD_INSTANCE": order.instance_id}
        return await transport.run(argv, env=env, stdin=order.to_json().encode(), timeout_s=timeout_s)

    fetch = VolumeOrder(verb="fetch", instance_id=instance_id, workdir=workdir, volumes=tuple(volumes))
    release = VolumeOrder(verb="release", instance_id=instance_id, workdir=workdir, volumes=tuple(volumes))
    try:
        done = await persist(
            lambda left_s: run(fetch, left_s), deadline_s=_VOLUMES_TIMEOUT_S, node=node, step=_VOLUMES_STEP
        )
    except BaseException:  # an interruption leaves mounts behind
        await asyncio.shield(asyncio.gather(run(release, _UNDO_S), return_exceptions=True))
        raise
    if done.exit_code:
        tail = masked(done.stderr.strip(), _secrets(volumes))
        *_, why = tail.splitlines() or [f"exit code {done.exit_code}"]
        log_path = f"{workdir}/{LOG_FILE}"
        why = f"{why}; the whole log is {log_path} there"
        raise failed_step(node, _VOLUMES_STEP, why, tail=tail, log_path=log_path)
    return json.loads(done.stdout)


def _secrets(volumes: Sequence[GrantedVolume]) -> Sequence[str]:
    keys = [granted.access.key for granted in volumes if granted.access.key is not None]
    return [secret for key in keys for secret in (key.secret, key.token)]
