"""Program that makes volumes available on a node, by a mount or a copy, and writes changes back.

``python -m skyward.node.storage.volume_program`` reads one :class:`VolumeOrder` from standard input, where no other
user sees its keys, and prints a list of notes for the user. A failure: exit status 1, and the reason on standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from skyward.base.waiting import SYSTEM_CLOCK
from skyward.errors import SkywardError
from skyward.node.storage.mirror import Mirror
from skyward.node.storage.mount_registry import MountPath, claimed, held
from skyward.providers.storage import MountWay, store_kind
from skyward.request.volume import GrantedVolume
from skyward.wire.node_config import RELEASE_S, NodeConfig

log = logging.getLogger("skyward.node.storage.volume_program")

LOG_FILE = "volumes.log"
"""Name of the log in the node's folder."""
_QUIET_S = 5.0
"""Seconds without a write after which a file counts as complete."""
_MOUNT_S = 60.0
_INSTALL_S = 240.0
_LOOK_S = 30.0
_UNMOUNT_S = 300.0
WRITE_BACK_S = 60.0
"""Seconds between two times that changes are written back while the node lives."""
_PAUSE_S = 1.0
"""Seconds between two times once the machine is about to be lost."""
_INSTANCE_VARIABLE = "SKYWARD_INSTANCE"
_PRIVATE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeOrder:
    """Order for a node's volumes. Secret: it holds keys.

    Attributes:
        verb: ``"fetch"`` makes them available; ``"push"`` writes changes back; ``"release"`` does so for the last time,
            and removes them once no node uses them. All are idempotent.
        instance_id: the node's id.
        workdir: the node's own folder.
        volumes: the volumes.
    """

    verb: Literal["fetch", "push", "release"]
    instance_id: str
    workdir: str
    volumes: tuple[GrantedVolume, ...] = field(repr=False)

    def to_json(self) -> str:
        """Return the text for standard input."""
        return json.dumps(
            {
                "verb": self.verb,
                "instance_id": self.instance_id,
                "workdir": self.workdir,
                "volumes": [granted.to_dict() for granted in self.volumes],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> VolumeOrder:
        """Return the order in the text of standard input."""
        values = json.loads(text)
        return cls(**values | {"volumes": tuple(map(GrantedVolume.from_dict, values["volumes"]))})


def perform(order: VolumeOrder) -> list[str]:
    """Carry out an order, for every volume even if one fails; return notes for the user.

    A fetch that fails leaves nothing behind.

    Raises the first of Skyward's errors, or OSError.
    """
    notes: list[str] = []
    errors: list[Exception] = []
    for number, granted in enumerate(order.volumes):
        key_file = Path(order.workdir, f"volume-{number}.key")
        try:
            match order.verb:
                case "fetch":
                    notes += _fetch(granted, order, key_file)
                case "push":
                    _push(granted)
                case "release":
                    _release(granted, order)
                    key_file.unlink(missing_ok=True)
        except (SkywardError, OSError) as error:
            log.error("%s (%s): %s", granted.volume.mount_path, granted.volume.location, error)
            error.add_note(f"volume {granted.volume.mount_path} ({granted.volume.location})")
            errors.append(error)
            if order.verb == "fetch":  # the node will not start: the other volumes are of no use
                break
    if errors:
        if order.verb == "fetch":
            perform(replace(order, verb="release"))
        raise errors[0]
    return notes


def _fetch(granted: GrantedVolume, order: VolumeOrder, key_file: Path) -> Sequence[str]:
    kind, folder = store_kind(granted.volume), Path(granted.volume.mount_path)
    with claimed(granted, order.instance_id, order.workdir) as mount_path:
        if mount_path.head.mounted and os.path.ismount(folder):  # by another node on this machine
            return ()
        if granted.access.mountable and can_mount():
            mount_path.head.mounted = mount(kind.mount_ways(granted, os.uname().machine), folder, key_file)
        if mount_path.head.mounted:
            return ()
        return [f"{folder}: {note}" for note in _mirror(mount_path, granted).fetch()]


def _push(granted: GrantedVolume) -> None:
    if granted.volume.read_only:
        return
    with held(granted) as mount_path:
        if mount_path is not None and not mount_path.head.mounted:
            _mirror(mount_path, granted).push(quiet_s=_QUIET_S)


def _release(granted: GrantedVolume, order: VolumeOrder) -> None:
    with held(granted) as mount_path:
        if mount_path is None or order.instance_id not in mount_path.head.holders:
            return
        del mount_path.head.holders[order.instance_id]
        in_use = mount_path.used_by_others()
        mount_path.save()
        if not (mount_path.read_only or mount_path.head.mounted):
            _mirror(mount_path, granted).push(quiet_s=0.0)
        if in_use:
            return
        if mount_path.head.mounted:
            unmount(mount_path.folder)
        elif left := mount_path.empty():
            log.warning("%s keeps files that are not in the store: %s", mount_path.folder, ", ".join(left[:20]))
        mount_path.close()


def _mirror(mount_path: MountPath, granted: GrantedVolume) -> Mirror:
    return Mirror(mount_path, lambda: store_kind(granted.volume).open_store(granted))


def can_mount() -> bool:
    """Return True if programs can serve file systems on this machine; most containers refuse it."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        log.info("nothing can be mounted here: %s", error)
        return False
    return True


def mount(ways: Sequence[MountWay], folder: Path, key_file: Path) -> str:
    """Mount in the first way that works; return its program, or nothing if none does.

    Args:
        ways: programs and arguments, the best first.
        folder: the mount path.
        key_file: file for a key that the program may need.
    """
    for way in ways:
        if shutil.which(way.program) is None and not _install(way):
            continue
        if way.key_text:
            _write_private(key_file, way.key_text)
        # A mount counts only if the folder can be listed: a program may mount, and fail at the first access.
        done = _run(way.argv, env=_environment(way, key_file), timeout_s=_MOUNT_S)
        if done and os.path.ismount(folder) and _run(["ls", str(folder)], timeout_s=_LOOK_S):
            log.info("%s: mounted with %s", folder, way.program)
            return way.program
        if os.path.ismount(folder):  # mounted, but unusable: the next way needs the folder free
            unmount(folder)
        key_file.unlink(missing_ok=True)
    return ""


def unmount(folder: Path) -> None:
    """Unmount, once all writes are stored.

    Raises :class:`~skyward.errors.SkywardError`.
    """
    # fusermount is setuid: it unmounts a user's own mount without root, which umount refuses.
    for argv in (["fusermount3", "-u", str(folder)], ["fusermount", "-u", str(folder)], ["umount", str(folder)]):
        if not os.path.ismount(folder):
            return
        if shutil.which(argv[0]) is not None:
            _run(argv, timeout_s=_UNMOUNT_S)
    if os.path.ismount(folder):
        raise SkywardError(f"{folder} cannot be unmounted: end the programs that use it, then run `umount {folder}`")


def _install(way: MountWay) -> bool:
    for installer, commands in way.install.items():
        if shutil.which(installer) is not None:
            sudo = [] if os.getuid() == 0 else ["sudo", "-n"]
            done = all(_run([*sudo, *command], timeout_s=_INSTALL_S) for command in commands)
            return done and shutil.which(way.program) is not None
    return False


def _environment(way: MountWay, key_file: Path) -> Mapping[str, str]:
    # Without the instance's id, or the mount would be killed with the node's processes instead of unmounted.
    inherited = {name: value for name, value in os.environ.items() if name != _INSTANCE_VARIABLE}
    return inherited | {name: value.replace("{key_file}", str(key_file)) for name, value in way.env.items()}


def _run(argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> bool:
    """Run a command; return True if it succeeded. Its output is logged; a daemon of it has a session of its own."""
    log.info("running %s", argv)
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout_s,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s: %s", argv[0], error)
        return False
    if done.returncode:
        log.warning("%s exited with status %d: %s", argv[0], done.returncode, done.stdout.strip()[-2000:])
    return done.returncode == 0


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # O_EXCL, a fresh file: an existing one might be open to other users, or a link.
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w", encoding="utf-8") as file:
        file.write(text)


class VolumeKeeper:
    """Keeper of the volumes of one node.

    Args:
        config: the node's configuration.
        on_trouble: called with the reason when changes cannot be written back.

    Attributes:
        writable: True if there may be anything to write back.
    """

    def __init__(self, config: NodeConfig, on_trouble: Callable[[str], None]) -> None:
        self._config = config
        self._on_trouble = on_trouble
        self.writable = any(not granted.volume.read_only for granted in config.volumes)
        self._process: asyncio.subprocess.Process | None = None
        self._reported = ""
        self._due = asyncio.Event()
        self._hurries = False

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the programs that run at the moment."""
        return () if self._process is None else (self._process.pid,)

    async def keep(self) -> None:
        """Write changes back every minute; sooner after :meth:`write_soon`, without a pause after :meth:`hurry`."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_BACK_S):
                    await self._due.wait()
            is_soon = self._due.is_set() and not self._hurries
            if is_soon:
                self._due.clear()
            await SYSTEM_CLOCK.sleep(_PAUSE_S + (_QUIET_S if is_soon else 0.0))
            self._report(await self._run("push"))

    def hurry(self) -> None:
        """Write back without a pause from now on: the machine will be gone soon. Idempotent."""
        self._hurries = True
        self._due.set()

    def write_soon(self) -> None:
        """Write back what is there now, as soon as it is old enough."""
        self._due.set()

    async def release(self) -> None:
        """Write back everything, and remove the volumes from the machine. Call once no user code runs."""
        if not self._config.volumes:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                self._report(await self._run("release"))
        except TimeoutError:
            self._report(f"it took longer than {RELEASE_S:g} s")

    def _report(self, trouble: str) -> None:
        if trouble and trouble != self._reported:  # every minute the same: once is enough
            log.error("%s", trouble)
            self._on_trouble(trouble)
        self._reported = trouble

    async def _run(self, verb: Literal["push", "release"]) -> str:
        """Run the program for all volumes; return the reason of a failure, if any. Cancelled, kill the program."""
        # The order goes to standard input: it holds keys, and other users can read a command line.
        config = self._config
        order = VolumeOrder(verb=verb, instance_id=config.instance_id, workdir=config.workdir, volumes=config.volumes)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "skyward.node.storage.volume_program"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            return str(error)
        try:
            _, said = await process.communicate(order.to_json().encode())
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                # Shielded: a second cancellation must not leave a zombie.
                await asyncio.shield(process.wait())
            self._process = None
        lines = said.decode(errors="replace").strip().splitlines()
        return (lines[-1] if lines else f"exit status {process.returncode}") if process.returncode else ""


def main() -> None:
    """Carry out the order in standard input."""
    order = VolumeOrder.from_json(sys.stdin.read())
    Path(order.workdir).mkdir(mode=0o700, parents=True, exist_ok=True)
    file = logging.FileHandler(Path(order.workdir, LOG_FILE), encoding="utf-8")
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[file, logging.StreamHandler()],
    )
    logging.getLogger("skyward").setLevel(logging.INFO)
    try:
        notes = perform(order)
    except (SkywardError, OSError) as error:
        where = "".join(f"{note}: " for note in error.__notes__[:1])
        raise SystemExit(f"{where}{error}") from None
    sys.stdout.write(json.dumps(notes) + "\n")


if __name__ == "__main__":
    main()
