"""Folders of kept fleets in the user's state folder: the record from which another process takes a fleet over."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import pickle
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import Any, Final, Self

import platformdirs

from skyward.base.descriptors import keep_from_forks
from skyward.base.platform import kill_process, sync_folder, try_lock, user_id
from skyward.base.waiting import wait_until
from skyward.environment.bootstrap import Environment
from skyward.errors import ConfigurationError, PoolStateError, UnreachableError
from skyward.ledger.ledger import Ledger, LedgerEntry
from skyward.ledger.ownership import Moment, Owner
from skyward.market.cost import Usage
from skyward.providers.base import Instance, Provider
from skyward.providers.registry import provider_settings
from skyward.providers.several import labelled_members
from skyward.request.accelerators import Accelerator
from skyward.request.distribution_names import DISTRIBUTION
from skyward.request.includes import included_files
from skyward.request.request import PoolRequest
from skyward.wire.frames import TlsIdentity
from skyward.wire.node_config import NodeConfig, NodeReady

_RECORD: Final = "fleet.json"
_LOCK: Final = "lock"
KEEPER_LOCK: Final = "keeper"
_JOBS: Final = "jobs"
_KEPT_FILES: Final = (_LOCK, KEEPER_LOCK, _JOBS)
_REQUESTS: Final = "requests"
_PROVIDER: Final = "provider."
_UNIQUE: Final = 6
"""Letters of a pool's id after the digest of its fleet's name."""
_POLL_S: Final = 0.05
_PATIENCE_S: Final = 1.0
"""Seconds for which a holder is waited for: another process may only have looked whether there is one."""
_ENDING_S: Final = 120.0
_ANSWER_S: Final = 8.0
"""Seconds in which a client that is asked to leave its fleet begins to do so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptNode:
    """One node of a kept fleet, as its next client finds it.

    Attributes:
        rank: its rank.
        instance: the provider's record of its machine.
        launched: time of its create call.
        started: time of its supervisor's start.
        environment: interpreter and variables of its programs.
        config: its configuration.
        ready: its ports.
    """

    rank: int
    instance: Instance
    launched: Moment
    started: Moment
    environment: Environment
    config: NodeConfig
    ready: NodeReady

    def to_values(self) -> dict[str, Any]:
        """Return the node as JSON values, without the fleet's certificates. Secret."""
        config = replace(self.config, tls_ca="", tls_cert="", tls_key="")
        return {
            "rank": self.rank,
            "instance": _pickled(self.instance),
            "launched": asdict(self.launched),
            "started": asdict(self.started),
            "environment": {**asdict(self.environment), "env": dict(self.environment.env)},
            "config": config.to_json(),
            "ready": self.ready.to_json(),
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any], tls: TlsIdentity) -> Self:
        """Return the node of JSON values, with its certificates."""
        config = NodeConfig.from_json(values["config"])
        return cls(
            rank=values["rank"],
            instance=_unpickled(values["instance"]),
            launched=Moment(**values["launched"]),
            started=Moment(**values["started"]),
            environment=Environment(**values["environment"]),
            config=replace(config, tls_ca=tls.ca, tls_cert=tls.cert, tls_key=tls.key),
            ready=NodeReady.from_json(values["ready"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """A kept fleet. It holds the fleet's keys: in a file of mode 0600 only, as long as the fleet lives.

    Attributes:
        pool_id: id of the pool, the same for all of its clients.
        name: its name.
        keep_s: seconds for which it waits for the next client.
        provider: the provider's name.
        settings: the provider's settings.
        machines: what the pool asked for that decides which machines it has, as text by parameter.
        applied: what it asked for that its machines can be given again, in the same way; digests of what is secret.
        request: all that it asked for. Secret.
        project: folder of the program that opened it.
        tls: its certificates, with the key.
        left: time at which its last client left; None while it has one, or if it was killed.
        restarting: True from before a client restarts its nodes' supervisors until it has recorded the last one: a
            machine may have no supervisor now, or one whose ports are not recorded.
        spent: cost of machines that are gone, in USD by provider. Those that are no nodes are in the ledger until the
            keeper has ended them.
        python: Python's version.
        skyward: Skyward's version.
        nodes: its nodes.
    """

    pool_id: str
    name: str
    keep_s: float
    provider: str
    settings: Mapping[str, Any]
    machines: Mapping[str, str]
    applied: Mapping[str, str]
    request: PoolRequest = field(repr=False)
    project: str
    tls: TlsIdentity = field(repr=False)
    left: Moment | None = None
    restarting: bool = False
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    python: str = field(default_factory=platform.python_version)
    skyward: str = field(default_factory=lambda: version(DISTRIBUTION))
    nodes: tuple[KeptNode, ...] = field(default=(), repr=False)

    @property
    def kept_until(self) -> Moment | None:
        """Time until which it waits for the next client, if it has no jobs; None while it has one."""
        if self.left is None:
            return None
        ends = [node.started.later(node.config.timeout_s) for node in self.nodes]
        return min([self.left.later(self.keep_s), *ends], key=lambda moment: moment.left_s)

    def cost(self, ahead_s: float = 0.0) -> float:
        """Return what its machines will have cost in so many seconds, in USD; unknown prices count as nothing."""
        usages = [Usage.of(node.instance.offer, node.launched.left_s) for node in self.nodes]
        charged = [node.instance.price_per_hour for node in self.nodes]
        present = (usage.charged(usd).cost(ahead_s) for usage, usd in zip(usages, charged, strict=True))
        return sum(self.spent.values()) + sum(present)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of its machines in the ledger."""
        return tuple(node.instance.key for node in self.nodes)

    @property
    def price_per_hour(self) -> float | None:
        """USD an hour of all of its machines; None if the price of one is unknown."""
        prices = [each.instance.price_per_hour for each in self.nodes]
        offered = [each.instance.offer.price_per_hour for each in self.nodes]
        known = [price if price is not None else offer for price, offer in zip(prices, offered, strict=True)]
        return None if any(price is None for price in known) else sum(price or 0.0 for price in known)

    def to_json(self) -> str:
        """Return the record as text. Secret."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values |= {"tls": asdict(self.tls), "left": self.left and asdict(self.left), "request": _pickled(self.request)}
        return json.dumps(values | {"nodes": [node.to_values() for node in self.nodes]}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, any_version: bool = False) -> Self:
        """Return the record of a text.

        Raises :class:`PoolStateError` if Skyward or Python had another version, unless ``any_version``.
        """
        values = json.loads(text)
        values["tls"] = tls = TlsIdentity(**values["tls"])
        values["left"] = values["left"] and Moment(**values["left"])
        theirs, ours = _versions(values["skyward"], values["python"]), _versions()
        if theirs != ours and not any_version:
            raise PoolStateError(
                f"the kept fleet {values['name']!r} is of {theirs}, and this is {ours}: its nodes run those. Run this "
                f"program with them, or end the fleet with `skyward down {values['name']}` and open it again"
            )
        values["request"] = _unpickled(values["request"])
        values["nodes"] = tuple(KeptNode.from_values(each, tls) for each in values["nodes"])
        return cls(**values)


def _pickled(value: object) -> str:
    # Records of any provider, with their kinds of access: only the same version reads them, in this user's own file.
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpickled(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def _versions(skyward: str = "", python: str = "") -> str:
    minor = ".".join((python or platform.python_version()).split(".")[:2])
    return f"Skyward {skyward or version(DISTRIBUTION)} and Python {minor}"


# --- what a pool asks for -------------------------------------------------------------------------------------------


def parts_for_machines(request: PoolRequest, provider: Provider) -> dict[str, str]:
    """Return the parameters that decide which machines a pool has, and how long they may live, as text."""
    members = sorted(labelled_members(provider))  # the order of a list matters to prices and prefer= only
    labels = ", ".join(label for label, _ in members)
    several = len(members) > 1
    of_providers = {
        f"{_PROVIDER}{label}.{name}" if several else f"{_PROVIDER}{name}": repr(value)
        for label, member in members
        for name, value in provider_settings(member).items()
    }
    return {
        "provider": f"[{labels}]" if several else labels,
        **of_providers,
        "machine": repr(request.machine),
        "accelerator": " or ".join(map(_accelerator_words, request.accelerators)) or "None",
        "cpu": repr(request.cpu),
        "memory": repr(request.memory_gib),
        "spot": repr(request.spot),
        "timeout": f"{request.timeout_s:g}",
        "max_cost": repr(request.max_cost),
    }


def _accelerator_words(accelerator: Accelerator) -> str:
    mig = f" as {' + '.join(accelerator.mig)}" if accelerator.mig else ""
    return f"{accelerator} of {accelerator.memory_gib:g} GiB{mig}"


def parts_for_nodes(request: PoolRequest) -> dict[str, str]:
    """Return the parameters that a pool can change on the machines it has, as text; digests of what is secret."""
    files = [
        (str(file.path), file.path.stat().st_size, file.path.stat().st_mtime_ns)
        for file in included_files(request.image.includes)
        if not file.link
    ]
    return {
        "image": repr(replace(request.image, env=None)),
        "env": _digest(sorted(request.env.items())),
        "includes": _digest(sorted(files)),
        "concurrency": repr(request.concurrency),
        "volume": repr(request.volumes),
        "results": request.results,
        "collect_metrics": repr(request.collect_metrics),
        "service": repr((request.service, request.service_name, request.packages, request.one_network)),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def differences(kept: Mapping[str, str], asked: Mapping[str, str]) -> list[str]:
    """Return how the parts of a request differ from those of a kept fleet, in words."""
    names = sorted({*kept, *asked})
    if kept.get("provider") != asked.get("provider"):  # all settings differ then
        names = [name for name in names if not name.startswith(_PROVIDER)]
    return [
        f"{name}: {kept.get(name, 'none')} there, {asked.get(name, 'none')} here"
        for name in names
        if kept.get(name) != asked.get(name)
    ]


def changes_to(record: FleetRecord | None, request: PoolRequest, provider: Provider) -> str:
    """Return what a request changes on the machines of a kept fleet, in words; empty for nothing.

    Raises :class:`ConfigurationError` if it needs other machines.
    """
    if record is None or not record.nodes:
        return ""
    if others := differences(record.machines, parts_for_machines(request, provider)):
        raise ConfigurationError(
            f"the kept fleet {record.name!r} has other machines than this pool asks for ({'; '.join(others)}). End it "
            f"first with `skyward down {record.name}`, or choose another name"
        )
    changed = [name for name, value in parts_for_nodes(request).items() if record.applied.get(name) != value]
    return ", ".join(changed)


# --- its name in the tags of its machines ---------------------------------------------------------------------------


def new_pool_id(fleet: str = "") -> str:
    """Return the id of a new pool; that of a kept fleet begins with a digest of its name, to be found from anywhere."""
    return f"{_prefix_of(fleet)}{uuid.uuid4().hex[:_UNIQUE]}" if fleet else f"sky-{uuid.uuid4().hex[:10]}"


def belongs_to(fleet: str, pool_id: str) -> bool:
    """Return True if a pool is, or was, that of the kept fleet of this name."""
    prefix = _prefix_of(fleet)
    return pool_id.startswith(prefix) and len(pool_id) == len(prefix) + _UNIQUE


def _prefix_of(fleet: str) -> str:
    # A digest, as a provider's tags do not allow every letter of a name.
    return f"sky-{hashlib.sha256(fleet.encode()).hexdigest()[:10]}"


def refuse_second(fleet: str, ledger: Ledger) -> None:
    """Raise :class:`PoolStateError` if machines of a kept fleet cost money whose folder was deleted."""
    pools = {entry.purchase.pool_id for entry in ledger.open_entries() if _is_kept(entry)}
    if lost := sorted(pool_id for pool_id in pools if belongs_to(fleet, pool_id)):
        raise PoolStateError(
            f"there is a kept fleet {fleet!r} (pool {', '.join(lost)}) whose folder {fleets_home() / fleet} "
            f"was deleted, with its keys: it cannot be taken over. End it with `skyward down {fleet}`, or choose "
            "another name"
        )


def _is_kept(entry: LedgerEntry) -> bool:
    return entry.kept_until is not None and entry.kept_until.left_s > 0


def no_such_fleet(name: str) -> PoolStateError:
    """Return the error for the name of a fleet that is not kept."""
    known = ", ".join(folder.name for folder in kept_fleets()) or "none"
    return PoolStateError(f"this user has no kept fleet {name!r} in {fleets_home()}; there are: {known}")


# --- the folder -----------------------------------------------------------------------------------------------------


def fleets_home() -> Path:
    """Return the folder with those of all kept fleets of this user."""
    return platformdirs.user_state_path("skyward") / "fleets"


def kept_fleets() -> Sequence[FleetFolder]:
    """Return the folders of the kept fleets, by name."""
    with suppress(FileNotFoundError):
        return [FleetFolder(each.parent.name) for each in sorted(fleets_home().glob(f"*/{_RECORD}"))]
    return ()


def kept_pools() -> frozenset[str]:
    """Return the ids of the pools whose fleets have a record; without damaged records."""
    ids: set[str] = set()
    for folder in kept_fleets():
        with suppress(PoolStateError):
            if (record := folder.read(any_version=True)) is not None:
                ids.add(record.pool_id)
    return frozenset(ids)


class FleetFolder:
    """Folder of one kept fleet, for its user only.

    Attributes:
        name: the fleet's name.
        path: the folder.
        jobs: its folder of jobs; it outlives the fleet.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = fleets_home() / name
        self.jobs = self.path / _JOBS
        self._lock: FileIO | None = None

    # --- the record -------------------------------------------------------------------------------------------------

    def read(self, *, any_version: bool = False) -> FleetRecord | None:
        """Return the record; None if there is no such fleet. Needs no lock.

        Raises :class:`PoolStateError` if it is another user's, is damaged, or, unless ``any_version``, of another one.
        """
        return self._read(partial(FleetRecord.from_json, any_version=any_version))

    def written_at(self) -> float:
        """Return the Unix time at which the record was written; 0 without one."""
        try:
            return (self.path / _RECORD).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def pool_id(self) -> str:
        """Return the pool's id by the record, of whatever version; empty if there is no such fleet."""
        return self._read(lambda text: str(json.loads(text)["pool_id"])) or ""

    def _read(self, parse: Callable[[str], Any]) -> Any:
        try:
            if sys.platform != "win32" and (owner := self.path.stat().st_uid) != user_id():
                raise PoolStateError(f"{self.path} is of another user ({owner}), whose fleets are not yours to use")
            return parse((self.path / _RECORD).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except PoolStateError:
            raise
        except OSError as error:
            raise PoolStateError(f"the record of the kept fleet {self.name!r} cannot be read: {error}") from error
        except Exception as error:
            raise PoolStateError(
                f"{self.path / _RECORD} is damaged ({type(error).__name__}: {error}): end the fleet's machines with "
                "`skyward sweep --all`, and delete the file"
            ) from error

    def write(self, record: FleetRecord) -> None:
        """Replace the record, whole or not at all, on disk when this returns. Only for who holds the folder."""
        new = self.path / f".{_RECORD}.{os.getpid()}"
        with open(new, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(record.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path / _RECORD)
        sync_folder(self.path)

    def forget(self) -> None:
        """Delete everything of a fleet that has ended, its keys first; fetched results of jobs stay. Idempotent."""
        (self.path / _RECORD).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            for entry in self.path.iterdir():
                if entry.name in _KEPT_FILES:
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)

    # --- who has it -------------------------------------------------------------------------------------------------

    async def hold(self, *, takeover: bool = False) -> None:
        """Be the client that has the fleet, until :meth:`release` or the process's end.

        With ``takeover`` another client is asked to leave; one of this machine that does not is killed.

        Raises:
            PoolStateError: another process has it; the message says which, and since when.
        """
        patience_s = _PATIENCE_S
        while True:
            try:
                await self._wait_for_it(patience_s)
            except UnreachableError:
                holder = self._holder()
                if holder.get("keeper") and patience_s < _ENDING_S:
                    patience_s = _ENDING_S
                elif takeover:
                    await self._have_leave(holder)
                    takeover = False
                else:
                    raise PoolStateError(self._held_words(holder)) from None
            else:
                self.take_requests()  # those to the last client
                return

    async def _wait_for_it(self, patience_s: float) -> None:
        async def look() -> bool | None:
            return self.try_hold() or None

        what = f"the kept fleet {self.name!r} to be free"
        await wait_until(look, deadline_s=patience_s, interval_s=_POLL_S, what=what)

    def try_hold(self, *, as_keeper: bool = False) -> bool:
        """Be the process that has the fleet, unless there is another one."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = FileIO(self.path / _LOCK, "a+", opener=lambda path, flags: os.open(path, flags, 0o600))
        except (FileNotFoundError, FileExistsError):  # the last holder is deleting the folder
            return False
        lock = keep_from_forks(file)  # a forked child would hold it as long as it lives
        try:
            if not (try_lock(lock.fileno()) and self._is_present(lock)):
                lock.close()
                return False
            lock.truncate(0)
            says = {"owner": asdict(Owner.this_process()), "since": time.time(), "keeper": as_keeper}
            lock.write(json.dumps(says).encode())
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        return True

    def _is_present(self, lock: FileIO) -> bool:
        """Return False if the last holder deleted the lock's file after it was opened here."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(lock.fileno()), (self.path / _LOCK).stat())
        return False

    def release(self) -> None:
        """Leave the fleet to others; delete a folder without a fleet and without jobs. Idempotent."""
        if self._lock is not None:
            with suppress(OSError):  # it has jobs, or this is Windows, which deletes no open file
                if not (self.written_at() or self.has_keeper()):
                    self._delete_if_empty()
            self._lock.close()
            self._lock = None

    def _delete_if_empty(self) -> None:
        with suppress(FileNotFoundError):
            self.jobs.rmdir()
        self.forget()
        for name in (KEEPER_LOCK, _LOCK):
            (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()

    def is_held(self) -> bool:
        """Return True while a process uses the fleet, this one too."""
        return _is_locked(self.path / _LOCK)

    def client(self) -> str:
        """Return which process, other than a keeper, uses the fleet, in words; empty if none does."""
        if not self.is_held() or (holder := self._holder()).get("keeper"):
            return ""
        return self._held_words(holder)

    def has_keeper(self) -> bool:
        """Return True while a process of its own looks after the fleet."""
        return _is_locked(self.path / KEEPER_LOCK)

    def _holder(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / _LOCK).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # just being written
            return {}

    def _held_words(self, holder: Mapping[str, Any]) -> str:
        if not holder:
            return f"another process has the kept fleet {self.name!r}"
        owner, since = Owner(**holder["owner"]), time.strftime("%H:%M:%S", time.localtime(holder["since"]))
        if owner == Owner.this_process():
            return f"this process has the kept fleet {self.name!r} open already, since {since}: use that pool"
        return (
            f"process {owner.pid} on {owner.host} has the kept fleet {self.name!r}, since {since}: wait for its end, "
            "or take the fleet over with takeover=True"
        )

    async def _have_leave(self, holder: Mapping[str, Any]) -> None:
        """Ask the fleet's client to leave, and end it if it lives on here and does not answer."""
        owner = Owner(**holder["owner"]) if holder else None
        if owner == Owner.this_process():
            raise PoolStateError(self._held_words(holder))

        try:
            asked = self.request("leave")
        except (FileNotFoundError, FileExistsError):  # it has left, and deletes the folder
            return

        async def has_left() -> bool | None:
            return True if not self.is_held() or self._holder() != holder else None

        async def has_answered() -> bool | None:
            return True if not asked.exists() else await has_left()

        try:
            await wait_until(has_answered, deadline_s=_ANSWER_S, interval_s=_POLL_S, what="its client to answer")
        except UnreachableError:
            if owner is None or owner.lives() is not True:
                words = f"{self._held_words(holder)}. It does not answer, and cannot be ended from here"
                raise PoolStateError(words) from None
            kill_process(owner.pid)
        try:  # it may have machines to end, and outputs to fetch
            await wait_until(has_left, deadline_s=_ENDING_S, interval_s=_POLL_S, what="its client to leave it")
        except UnreachableError:
            raise PoolStateError(f"{self._held_words(holder)}. It is leaving; try again later") from None

    # --- requests to who has it -------------------------------------------------------------------------------------

    def request(self, verb: str, value: object = None) -> Path:
        """Ask the process that uses the fleet for something; it looks every second, and removes the returned file."""
        folder = self.path / _REQUESTS
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f".{verb}.{os.getpid()}"
        new.write_text(json.dumps(value), encoding="utf-8")
        return new.replace(folder / verb)

    def take_requests(self) -> dict[str, Any]:
        """Return what this process is asked for, by verb, and forget it."""
        asked: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            for entry in (self.path / _REQUESTS).iterdir():
                if entry.name.startswith("."):
                    continue
                with suppress(FileNotFoundError, ValueError):
                    asked[entry.name] = json.loads(entry.read_text(encoding="utf-8"))
                entry.unlink(missing_ok=True)
        return asked


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES):
            return False
        raise
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
