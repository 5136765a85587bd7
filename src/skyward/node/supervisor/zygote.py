"""Program of a process that others are forked from: it imports their modules, once, and forks on order.

Each node has one, a child of its supervisor (docs/decisions/010). A client's template (docs/decisions/016) works in the
same way, for supervisors. Neither runs a thread, an event loop or user code, or has a
connection except the one over which its orders come.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from skyward._concurrency.linux_parts import wait_for_end
from skyward.node.processes import close_all_but, end_all, name_process
from skyward.node.supervisor.known_environment import NO_DASK_SETTINGS
from skyward.node.supervisor.proc_entry import show_arguments

__all__ = ["ForkedZygote", "fork_zygote", "main", "serve_forks", "take_orders"]

log = logging.getLogger("skyward.node.supervisor.zygote")

_DEATH_S = 1.0
"""A process that is killed closes its connections first, and has ended a moment later."""

_LOOK_S = 1.0
"""Seconds between two looks at whether a template's client lives, should some other process hold its socket open."""

_LENGTH_BYTES = 4


def main(*modules: str) -> None:
    """Fork processes as ordered over standard input, a socket, until its other end closes.

    An order is any byte with two connected sockets. From one the new process reads the name of the module whose
    ``main(commands, reports)`` it runs, and then its commands. The other takes its reports, and ends with its exit code
    in a separate line. Neither is a standard stream: children of the process would inherit it.

    Args:
        modules: modules to import beforehand.
    """
    name_process("zygote")
    supervisor = os.getppid()
    orders = take_orders()
    gc.disable()
    with _no_settings_of_the_host():
        for module in modules:
            importlib.import_module(module)
    gc.freeze()  # collecting would write to memory that is shared with every fork
    _serve_node(orders, supervisor)


@contextmanager
def _no_settings_of_the_host() -> Generator[None]:
    """Hide the home folder, in which Dask looks for settings while it is imported, if no file of the host counts."""
    home = os.environ.get("HOME")
    if home is None or not NO_DASK_SETTINGS.items() <= os.environ.items():
        yield
        return
    os.environ["HOME"] = NO_DASK_SETTINGS["DASK_ROOT_CONFIG"]
    try:
        yield
    finally:
        os.environ["HOME"] = home


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedZygote:
    """Zygote that is a fork of its supervisor.

    Attributes:
        pid: its process id.
        orders: the supervisor's end of the connection for orders; the other end closes when the zygote ends.
    """

    pid: int
    orders: socket.socket

    def start(self, variables: Mapping[str, str]) -> None:
        """Give it the environment of the node's processes, for which it waits."""
        data = json.dumps(dict(variables)).encode()
        self.orders.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def fork_zygote() -> ForkedZygote:
    """Fork a node's zygote from its supervisor, which has imported everything and has one thread."""
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
    return ForkedZygote(pid=pid, orders=here)


def _receive_environment(orders: socket.socket) -> dict[str, str]:
    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = orders.recv(count - len(data))
            if not part:  # the supervisor has no use for this process, or is gone
                os._exit(0)
            data += part
        return data

    return json.loads(read(int.from_bytes(read(_LENGTH_BYTES), "big")))


def take_orders() -> socket.socket:
    """Return the socket that is standard input, which is the null device from now on."""
    orders = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return orders


def serve_forks(orders: socket.socket, *, parent: int | None = None) -> None:
    """Fork processes until the other end of ``orders`` closes, or ``parent`` is not the parent any more."""
    _Zygote(orders, parent=parent).serve()


def _serve_node(orders: socket.socket, supervisor: int) -> None:
    serve_forks(orders)
    if wait_for_end(supervisor, within_s=_DEATH_S):  # it was killed: processes that calls have started would live on
        asyncio.run(end_all(os.environ["SKYWARD_INSTANCE"]))


class _Zygote:
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
            lines = open(commands.detach(), encoding="utf-8")  # noqa: SIM115  # as long as the process
            module = lines.readline().strip()
            name_process(module.rpartition(".")[2])
            stream = open(reports.detach(), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
            importlib.import_module(module).main(lines, stream)
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
