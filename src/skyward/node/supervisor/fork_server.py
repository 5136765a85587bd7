"""Program of a process that others are forked from: it imports their modules, once, and forks on order.

Each node has one, the zygote, a child of its supervisor; a client's template forks supervisors in the same way
(docs/decisions/010, 016, 036). Neither runs a thread, an event loop or user code, or has a connection except the one
over which its orders come.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import logging
import os
import pickle
import select
import signal
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from skyward.base.platform import wait_for_end
from skyward.node.processes import close_all_but, end_all, name_process
from skyward.node.supervisor.start_order import PROGRAM

log = logging.getLogger("skyward.node.supervisor.fork_server")

_DEATH_S = 1.0
"""A process that is killed closes its connections first, and has ended a moment later."""

_LOOK_S = 1.0
"""Seconds between two looks at whether a template's client lives, should some other process hold its socket open."""

_LENGTH_BYTES = 4

_FIRST_FIELD = 3
_ARG_START, _ENV_START = 48, 50
"""Numbers of fields of ``/proc/self/stat``, in proc(5); each is followed by the field of the area's end."""


def run_zygote(*modules: str) -> None:
    """Fork processes as ordered over standard input, a socket, until its other end closes.

    An order is any byte with two connected sockets. From one the new process reads pickles: the name of the module
    whose ``main(commands, reports)`` it runs, and then its commands. The other takes its reports, lines of JSON, and
    ends with its exit code. Neither is a standard stream: children of the process would inherit it.

    Args:
        modules: modules to import beforehand.
    """
    name_process("zygote")
    supervisor = os.getppid()
    orders = _take_orders()
    _import(modules)
    _serve_node(orders, supervisor)


def run_template(client: int, *modules: str) -> None:
    """Fork supervisors as ordered, in the manner of a zygote, until the client closes its socket or ends.

    Args:
        client: pid of the client, which is this process's parent.
        modules: modules to import beforehand: those of all processes of a node.
    """
    name_process("template")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a client that ignores it hands that down; no child could be awaited
    if not fits(PROGRAM):  # some kernels, such as gVisor's, do not report where arguments lie
        raise RuntimeError("this kernel does not let a process show other arguments: nodes could not be found")
    orders = _take_orders()
    _import(modules)
    # OpenBLAS has a thread per core once numpy is imported. It joins them before a fork, and starts them when used.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"{threads} threads run after the imports: a fork could inherit locks that nobody releases")
    _ForkServer(orders, parent=client).serve()


def _import(modules: Sequence[str]) -> None:
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    # OpenSSL looks its algorithms up for the first two contexts of a process, which takes 8 and 3 ms, 0.3 after that.
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        ssl.SSLContext(protocol)
    gc.freeze()  # collecting would write to memory that is shared with every fork


def _take_orders() -> socket.socket:
    """Return the socket that is standard input, which is the null device from now on."""
    orders = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return orders


def fork_zygote() -> tuple[int, socket.socket]:
    """Fork a node's zygote from its supervisor, which has imported everything and has one thread.

    Return its process id, and the connection for its environment and then its orders, which closes when it ends.
    """
    here, orders = socket.socketpair()
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            name_process("zygote")
            # Tools find a node's supervisor by its arguments, among the parents of any process.
            show_arguments([sys.executable, "-m", __name__], os.getcwd())
            close_all_but({0, 1, 2, orders.fileno()})
            os.environ.update(_receive_environment(orders))
            _serve_node(orders, supervisor)
            status = 0
        except BaseException:  # past the fork nobody else would report it
            log.exception("the zygote failed")
        finally:
            os._exit(status)
    orders.close()
    return pid, here


def send_environment(orders: socket.socket, variables: Mapping[str, str]) -> None:
    """Give a forked zygote the environment of the node's processes."""
    data = json.dumps(dict(variables)).encode()
    orders.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def _receive_environment(orders: socket.socket) -> dict[str, str]:
    length = orders.recv(_LENGTH_BYTES, socket.MSG_WAITALL)
    if not length:  # the supervisor has no use for this process, or is gone
        os._exit(0)
    return json.loads(orders.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))


def _serve_node(orders: socket.socket, supervisor: int) -> None:
    _ForkServer(orders).serve()
    if wait_for_end(supervisor, within_s=_DEATH_S):  # it was killed: processes that calls have started would live on
        asyncio.run(end_all(os.environ["SKYWARD_INSTANCE"]))


class _ForkServer:
    """Forks processes until the other end of ``orders`` closes, or ``parent`` is not the parent any more."""

    def __init__(self, orders: socket.socket, *, parent: int | None = None) -> None:
        self._orders = orders
        self._parent = parent
        self._ended, self._waker = socket.socketpair()
        self._children: dict[int, socket.socket] = {}

    def serve(self) -> None:
        for wakes in (self._ended, self._waker):
            os.set_blocking(wakes.fileno(), False)
        signal.signal(signal.SIGCHLD, _nothing)  # not ignored: only a handler wakes select()
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            self._follow_orders(None if self._parent is None else _LOOK_S)
        finally:
            signal.set_wakeup_fd(-1)  # a child that ends later would write to what has this number then

    def _follow_orders(self, look_s: float | None) -> None:
        while self._parent in (None, os.getppid()):
            ready, _, _ = select.select((self._orders, self._ended), (), (), look_s)
            if self._ended in ready:
                self._ended.recv(4096)
                self._report_ends()
            if self._orders in ready:
                order, descriptors, _, _ = socket.recv_fds(self._orders, 1, 2)
                if not order:
                    return
                for descriptor in descriptors:
                    os.set_inheritable(descriptor, False)  # noqa: FBT003 - a received one is inheritable
                self._fork(*(socket.socket(fileno=descriptor) for descriptor in descriptors))

    def _fork(self, commands: socket.socket, reports: socket.socket) -> None:
        with commands:
            try:
                pid = os.fork()
            except OSError:
                log.exception("the node has no room for another process")
                _tell_end(reports, 1)
                return
            if pid == 0:
                self._become(commands, reports)
        self._children[pid] = reports

    def _report_ends(self) -> None:
        for pid in tuple(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _tell_end(self._children.pop(pid), os.waitstatus_to_exitcode(status))

    def _become(self, commands: socket.socket, reports: socket.socket) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for mine in (self._orders, self._ended, self._waker, *self._children.values()):
                mine.close()
            gc.enable()
            received = open(commands.detach(), "rb")  # noqa: SIM115  # as long as the process
            module = pickle.load(received)
            name_process(module.rpartition(".")[2])
            stream = open(reports.detach(), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
            importlib.import_module(module).main(received, stream)
            status = 0
        except BaseException:  # past the fork nobody else would report it
            log.exception("a process of the node failed")
        finally:
            os._exit(status)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    return None


def _tell_end(reports: socket.socket, exit_code: int) -> None:
    with reports:
        try:
            reports.sendall(b"%d\n" % exit_code)
        except OSError:
            log.info("the report of a process's end was not delivered: its receiver is gone")


# --- the entry below /proc ------------------------------------------------------------------------------------------

# Other programs find arguments and variables there. A fork shows those of the program that it was forked from, which
# lie in memory at fixed places. They are overwritten there with text of the same length: prctl(PR_SET_MM_MAP) would
# allow any length, and is missing from many kernels.


def fits(arguments: Sequence[str | bytes]) -> bool:
    """Return whether this process and its forks can show ``arguments``."""
    return sys.platform == "linux" and len(_encoded(arguments)) < len(_read(_ARG_START))


def show_arguments(arguments: Sequence[str | bytes], path: str) -> None:
    """Show ``arguments`` and an absolute path from now on, in this process and its forks.

    The path has slashes put before it or loses its beginning, so that everything is as long as it was.

    Raises:
        ValueError: the arguments alone are longer.
    """
    old = _read(_ARG_START)
    new = _encoded(arguments)
    left = max(0, len(old) - len(new) - 1)
    encoded = os.fsencode(path)
    new += encoded[len(encoded) - left :] if len(encoded) > left else encoded.rjust(left, b"/")
    _overwrite(_ARG_START, 0, old, new + b"\0")


def show_variable(present: str, name: str, value: str) -> None:
    """Show ``name=value`` in the place of the environment variable called ``present``.

    Raises:
        ValueError: there is no such variable, or its text is not as long.
    """
    area = _read(_ENV_START)
    found = f"\0{present}=".encode()
    at = (b"\0" + area).find(found)
    if at < 0:
        raise ValueError(f"{present} was not in the environment when the program started")
    old = area[at : area.index(b"\0", at) + 1]
    _overwrite(_ENV_START, at, old, f"{name}={value}\0".encode())


def _encoded(arguments: Sequence[str | bytes]) -> bytes:
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


def _bounds(field: int) -> tuple[int, int]:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = fields[field - _FIRST_FIELD : field - _FIRST_FIELD + 2]
    return int(start), int(end)


def _read(field: int) -> bytes:
    start, end = _bounds(field)
    return ctypes.string_at(start, end - start)


def _overwrite(field: int, offset: int, old: bytes, new: bytes) -> None:
    if len(new) != len(old):
        raise ValueError(f"{len(new)} bytes do not replace {len(old)} in the memory of this process")
    ctypes.memmove(_bounds(field)[0] + offset, new, len(new))
