"""Use the client in an interpreter that lacks what Python lacks on Windows; print the number of its modules.

All of it is imported twice. What the standard library and other distributions have for Windows cannot run here, so
these stay as they are; the client's modules are imported again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import mmap
import os
import pkgutil
import re
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
CALLS = {
    faulthandler: "register|unregister",
    mmap: "MADV_.*|MAP_.*|PROT_.*",
    os: "fchmod|fchown|fork|forkpty|getuid|geteuid|getgid|getegid|getgroups|getloadavg|getpgid|getsid|killpg"
    "|memfd_create|mkfifo|nice|O_(CLOEXEC|DIRECTORY|NOFOLLOW|NONBLOCK|PATH)|P_.*|pidfd_open|pread|pwrite|register_at_fork|sched_.*"
    "|setsid|setpgid|statvfs|sysconf|uname|wait3|wait4|waitid|W(NOHANG|NOWAIT|EXITED|IF.*)",
    select: "e?poll|EPOLL.*|POLL.*",
    signal: "ITIMER_.*|pthread_.*|setitimer|sigwait.*|SIG(ALRM|CHLD|HUP|KILL|PIPE|QUIT|STOP|TSTP|USR[12])",
    socket: "AF_UNIX|recv_fds|send_fds|SO_PEERCRED|SOCK_(CLOEXEC|NONBLOCK)",
    time: "clock_gettime|CLOCK_.*|tzset",
}
"""Regular expressions for the names that these modules do not have on Windows."""
PACKAGES = ("skyward", "skyward_joblib", "skyward_dask")
OF_NODES = ("skyward.node", "skyward.testing")


def main() -> None:
    names = [name for package in PACKAGES for name in find_modules(package)]
    import_all(names)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    become_windows()
    import_all(names)
    use_substitutes()
    import skyward as sky

    try:
        sky.Local()
    except sky.ConfigurationError as error:
        print(len(names), error)


def use_substitutes() -> None:
    from skyward.base import exits, loop, platform
    from skyward.ledger.ownership import PoolFolder, is_in_use
    from skyward.scheduling.certificates import issue
    from skyward.wire.frames import client_context

    assert len(platform.allocate_memory(10)) == 10
    assert platform.elapsed_s() > 0
    client_context(issue())
    exits.hold()
    exits.release()
    thread = loop.acquire_loop()
    assert thread.call(asyncio.sleep(0, "run")) == "run"
    thread.release()
    folder = PoolFolder("sky-1")
    assert not is_in_use(folder.path)  # of this stand-in for msvcrt, which locks nothing
    folder.close()


def find_modules(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    yield package
    for module in pkgutil.iter_modules(spec.submodule_search_locations, f"{package}."):
        if module.name not in OF_NODES and not module.name.endswith("__main__"):
            yield from find_modules(module.name) if module.ispkg else (module.name,)


def import_all(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)


def become_windows() -> None:
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    msvcrt: Any = ModuleType("msvcrt")
    msvcrt.LK_NBLCK, msvcrt.locking = 2, lambda *_: None
    sys.modules["msvcrt"] = msvcrt
    socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)  # Windows' Python has pairs of other sockets
    for module, names in CALLS.items():
        for name in [name for name in vars(module) if re.fullmatch(names, name)]:
            delattr(module, name)
    os.supports_dir_fd.clear()
    for module in (selectors, shutil):  # they have chosen epoll and directories' descriptors
        importlib.reload(module)
    signal.SIGBREAK = signal.SIGTERM  # type: ignore[attr-defined]
    sys.platform = "win32"


if __name__ == "__main__":
    main()
