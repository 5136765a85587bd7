"""Mounting a volume with one of the programs that can, and unmounting it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from skyward.errors import SkywardError
from skyward.providers.storage import MountWay

__all__ = ["can_mount", "mount", "unmount"]

log = logging.getLogger("skyward.node.storage.mount")

_MOUNT_S = 60.0
_INSTALL_S = 240.0
_LOOK_S = 30.0
_UNMOUNT_S = 300.0
_INSTANCE_VARIABLE = "SKYWARD_INSTANCE"
_PRIVATE = 0o600


def can_mount() -> bool:
    """Whether this machine has file systems of programs at all; containers mostly do not."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        log.info("nothing can be mounted here: %s", error)
        return False
    return True


def mount(ways: Sequence[MountWay], folder: Path, key_file: Path) -> str:
    """Mount in the first way that works; returns its program, or nothing if none does.

    A mount outlives whoever asked for it: it carries no instance's id, so that it is there until it is unmounted.

    Args:
        ways: best first.
        folder: where.
        key_file: where a key may be kept that the program needs.
    """
    for way in ways:
        if shutil.which(way.program) is None and not _install(way):
            continue
        if way.key_text:
            _write_private(key_file, way.key_text)
        done = _run(way.argv, env=_environment(way, key_file), timeout_s=_MOUNT_S)
        if done and os.path.ismount(folder) and _run(["ls", str(folder)], timeout_s=_LOOK_S):
            log.info("%s: mounted with %s", folder, way.program)
            return way.program
        if os.path.ismount(folder):
            unmount(folder)
        key_file.unlink(missing_ok=True)
    return ""


def unmount(folder: Path) -> None:
    """Unmount, once what was written is stored.

    Raises :class:`~skyward.errors.SkywardError`.
    """
    for argv in (["fusermount3", "-u", str(folder)], ["fusermount", "-u", str(folder)], ["umount", str(folder)]):
        if not os.path.ismount(folder):
            return
        if shutil.which(argv[0]) is not None:
            _run(argv, timeout_s=_UNMOUNT_S)
    if os.path.ismount(folder):
        raise SkywardError(f"{folder} cannot be unmounted")


def _install(way: MountWay) -> bool:
    for installer, commands in way.install.items():
        if shutil.which(installer) is not None:
            sudo = [] if os.getuid() == 0 else ["sudo", "-n"]
            done = all(_run([*sudo, *command], timeout_s=_INSTALL_S) for command in commands)
            return done and shutil.which(way.program) is not None
    return False


def _environment(way: MountWay, key_file: Path) -> Mapping[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != _INSTANCE_VARIABLE}
    return inherited | {name: value.replace("{key_file}", str(key_file)) for name, value in way.env.items()}


def _run(argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> bool:
    """Whether it ended well; what it said is in the log. A daemon that it leaves is in a session of its own."""
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
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE), "w", encoding="utf-8") as file:
        file.write(text)
