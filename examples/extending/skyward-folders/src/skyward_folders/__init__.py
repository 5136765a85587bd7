"""Example of a provider in a package of its own: its machines are folders of this computer, rented for play money.

It imports public names of Skyward only: docs/extending/writing-a-provider.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from skyward.errors import AuthenticationError, ConfigurationError, TerminationError
from skyward.providers import (
    INSTANCE_VARIABLE,
    Finding,
    Instance,
    InstanceSpec,
    InstanceState,
    LaunchOrder,
    LocalAccess,
    MachineCalls,
    Offer,
    PoolRequest,
    Provider,
    create_once,
)

__all__ = ["Folders"]

_GIB = 1 << 30
_KILLED_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Folders(Provider):
    """Machines that are folders below ``root``, each with a file that is its vendor's record.

    Args:
        root: folder of the machines; it stands for the vendor's region.
        limit: largest number of machines.
        token: password of the account; by default that of the environment variable ``FOLDERS_TOKEN``.
    """

    root: str
    limit: int = 8
    token: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """``"folders"``."""
        return "folders"

    async def offers(self, request: PoolRequest) -> Sequence[Offer]:
        """Return the only kind of machine."""
        offer = self._offer()
        if request.wish.shortfall(offer.spec):
            raise ConfigurationError(f"a folder has {offer.spec}, which does not satisfy {request.wish}: ask for less")
        return [offer]

    async def launch(self, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        """Make the folders."""
        self._authorise()
        calls = MachineCalls(create=self._create, find=self._find, destroy=self._destroy)
        return await create_once(self.name, calls, offers, order, listing_s=0.0)

    async def describe(self, instance_ids: Sequence[str]) -> Sequence[Instance]:
        """Return the records; a machine without one is gone."""
        known = {each.id: each for each in await self.tagged()}
        return [known.get(each) or self._instance(each, "", InstanceState.GONE) for each in instance_ids]

    async def terminate(self, instance_ids: Sequence[str]) -> None:
        """Kill the machines' processes, and remove their folders and records."""
        for instance_id in instance_ids:
            await self._destroy(instance_id)

    async def close(self) -> None:
        """Do nothing: no resource is held."""

    async def tagged(self) -> Sequence[Instance]:
        """Return every machine that has a record: what a crash has lost is found so."""
        self._authorise()
        records = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in Path(self.root).glob("*.json")]
        return [self._instance(path.stem, record["key"], InstanceState.RUNNING) for path, record in records]

    async def check(self) -> Sequence[Finding]:
        """Check the folder and the password: ``skyward doctor`` shows it."""
        writable = os.access(self.root, os.W_OK)
        fix = "" if writable else f"make {self.root} writable for this user"
        return [Finding(what="folders", state="ok" if writable else "fail", found=self.root, fix=fix)]

    async def _create(self, offer: Offer, key: str) -> Instance:
        instance_id = f"folder-{uuid.uuid4().hex[:12]}"
        if len(await self.tagged()) >= self.limit:
            raise ConfigurationError(f"limit={self.limit} machines exist in {self.root}: end some, or raise limit")
        self._workdir(instance_id).mkdir(mode=0o700)
        record = Path(self.root, f"{instance_id}.json")
        record.with_suffix(".new").write_text(json.dumps({"key": key}), encoding="utf-8")
        record.with_suffix(".new").rename(record)  # no reader sees half of it
        return self._instance(instance_id, key, InstanceState.RUNNING)

    async def _find(self, key: str) -> Instance | None:
        return next((each for each in await self.tagged() if each.key == key), None)

    async def _destroy(self, instance_id: str) -> None:
        self._authorise()
        killed = await asyncio.to_thread(_kill, instance_id)
        if killed:
            raise TerminationError(f"processes {killed} do not end", instance_ids=(instance_id,))
        shutil.rmtree(self._workdir(instance_id), ignore_errors=True)
        Path(self.root, f"{instance_id}.json").unlink(missing_ok=True)

    def _instance(self, instance_id: str, key: str, state: InstanceState) -> Instance:
        access = LocalAccess(address="127.0.0.1", workdir=str(self._workdir(instance_id)))
        return Instance(id=instance_id, key=key, state=state, offer=self._offer(), access=access, network=self.root)

    def _offer(self) -> Offer:
        memory_gib = psutil.virtual_memory().total // _GIB
        spec = InstanceSpec(name="folder", cpu=os.cpu_count() or 1, memory_gib=memory_gib)
        return Offer(spec=spec, region=self.root, price_per_hour=0.02)

    def _workdir(self, instance_id: str) -> Path:
        return Path(self.root, instance_id)

    def _authorise(self) -> None:
        if (self.token or os.environ.get("FOLDERS_TOKEN")) != "open sesame":
            raise AuthenticationError("no or a wrong token: pass token=, or set FOLDERS_TOKEN")


def _kill(instance_id: str) -> Sequence[int]:
    """SIGKILL every process of a machine, and return the ids of those that live on."""
    mine: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(INSTANCE_VARIABLE) == instance_id and process.pid != os.getpid():
                process.kill()
                mine.append(process)
    return [each.pid for each in psutil.wait_procs(mine, timeout=_KILLED_S)[1]]
