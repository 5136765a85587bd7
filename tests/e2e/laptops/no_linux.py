"""Interpreter without Linux's own calls, files and addresses: ``python no_linux.py PROGRAM ARGUMENT...``.

The program runs as on macOS, as far as Linux can show that. Programs that it starts are not affected.
"""

from __future__ import annotations

import ctypes.util  # noqa: F401  # else it asks a module for macOS that Debian leaves out of its Python
import errno
import importlib
import mmap
import os
import platform
import re
import runpy
import select
import selectors
import signal
import socket
import sys
import sysconfig
import time
import urllib.request  # noqa: F401  # else it asks a module that only macOS has for proxies
from collections.abc import Callable
from types import ModuleType
from typing import Any

import psutil  # its module for macOS is not here: it stays Linux's, and may read /proc

CALLS: dict[ModuleType, str] = {
    os: "eventfd|memfd_create|O_PATH|P_PIDFD|copy_file_range|pidfd_open|pipe2|posix_fadvise|posix_fallocate|"
    "sched_[gs]etaffinity|setns|setxattr|splice|unshare|waitid",
    select: "epoll|EPOLL.*",
    signal: "pidfd_send_signal|sigtimedwait|sigwaitinfo",
    socket: "AF_NETLINK|AF_PACKET|SO_PEERCRED|SOCK_CLOEXEC|SOCK_NONBLOCK|TCP_KEEPIDLE|TCP_USER_TIMEOUT",
    time: "CLOCK_BOOTTIME",
    mmap: "MADV_HUGEPAGE|MAP_POPULATE",
}
"""Regular expressions for the names that these modules do not have on macOS."""
PATHS = re.compile(r"/(proc|sys)(/|$)")  # nodes of this machine have /dev/shm, where their client puts large arguments
OTHER_LOOPBACK = re.compile(r"127\.(?!0\.0\.1$)")
LONGEST_SOCKET_PATH = 103


def main() -> None:
    """Run the program that the arguments name."""
    remove_calls()
    sys.addaudithook(refuse)
    for name in ("stat", "lstat", "readlink", "access"):
        setattr(os, name, refusing(getattr(os, name)))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def remove_calls() -> None:
    for module, names in CALLS.items():
        for name in [name for name in vars(module) if re.fullmatch(names, name)]:
            delattr(module, name)
    importlib.reload(selectors)  # imported by socket, it has chosen epoll
    machine = os.uname().machine
    sysconfig.get_config_vars()  # kept from now on: they lie in a file that is named after the platform
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    platform.mac_ver = lambda *_: ("14.5", ("", "", ""), machine)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail as macOS does, before the interpreter does what this event announces."""
    match event, arguments:
        case (("open" | "os.listdir" | "os.scandir"), (path, *_)):
            refuse_path(path, sys._getframe(1).f_globals.get("__name__", ""))
        case (("socket.bind" | "socket.connect"), (_, (str(host), *_))) if OTHER_LOOPBACK.match(host):
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL), host)
        case (("socket.bind" | "socket.connect"), (_, str() | bytes() as path)):
            name = os.fsencode(path)
            if name.startswith(b"\0"):
                raise FileNotFoundError(errno.ENOENT, "there is no abstract socket")
            if len(name) > LONGEST_SOCKET_PATH:
                raise OSError("AF_UNIX path too long")
        case _:
            pass


def refuse_path(path: object, asking: str) -> None:
    if isinstance(path, str | bytes | os.PathLike) and PATHS.match(os.fsdecode(path)) and asking not in MAY_READ:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
    def instead(path: Any, *arguments: Any, **keywords: Any) -> Any:
        refuse_path(path, sys._getframe(1).f_globals.get("__name__", ""))
        return call(path, *arguments, **keywords)

    return instead


MAY_READ = {name for name in sys.modules if name.partition(".")[0] == psutil.__name__}

if __name__ == "__main__":
    main()
