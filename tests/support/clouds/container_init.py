"""First program of a test container, in namespaces of its own: mounts its folders, then becomes its main process.

Run as a script with the path of a JSON file: ``places`` (source and target of each bind mount), ``cores`` (0 for all),
``argv``, ``env``, and ``log``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

__all__: list[str] = []

_MS_BIND, _MS_REC = 0x1000, 0x4000


def _main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
        os.makedirs(target, exist_ok=True)
        if libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)

    orders = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    log = os.open(orders["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for source, target in orders["places"]:
        mount(source, target, None, _MS_BIND | _MS_REC)
    mount("proc", "/proc", "proc")
    mount("tmpfs", "/dev/shm", "tmpfs")  # semaphores of processes that are killed with the container end with it
    if orders["cores"]:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: orders["cores"]])
    os.umask(0o022)
    os.chdir("/")
    os.execvpe(orders["argv"][0], orders["argv"], orders["env"])


if __name__ == "__main__":
    _main()
