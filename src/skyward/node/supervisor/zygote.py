"""The program of the process that a node's others are forked from: what they all need is imported once, here.

It runs nothing itself: no thread, no event loop, no connection but the one to its supervisor.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn

from skyward.node.processes import end_all, has_ended, name_process

__all__ = ["main"]

log = logging.getLogger("skyward.node.supervisor.zygote")

_DEATH_S = 1.0
"""A process that is killed closes its connections first, and has ended a moment later."""


def main(*modules: str) -> None:
    """Fork processes as ordered over standard input, a socket, until its other end closes.

    An order is any byte with two connected sockets. From one the new process reads on its standard input: first the
    name of the module whose ``main()`` it runs. The other is its standard output, and ends with its exit code in a line
    of its own.

    Args:
        modules: what is imported beforehand.
    """
    name_process("zygote")
    supervisor = os.getppid()
    orders = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # collecting would write to memory that is shared with every fork
    _Zygote(orders).serve()
    if has_ended(supervisor, within_s=_DEATH_S):  # it was killed: what calls have started would live on
        asyncio.run(end_all(os.environ["SKYWARD_INSTANCE"]))


class _Zygote:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._ended, self._waker = socket.socketpair()
        self._children: dict[int, socket.socket] = {}

    def serve(self) -> None:
        for wakes in (self._ended, self._waker):
            os.set_blocking(wakes.fileno(), False)
        signal.signal(signal.SIGCHLD, _nothing)  # not ignored: a handler is what wakes
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select((self._orders, self._ended), (), ())
            if self._ended in ready:
                self._ended.recv(4096)
                self._report_ends()
            if self._orders in ready:
                order, descriptors, _, _ = socket.recv_fds(self._orders, 1, 2)
                if not order:
                    return
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
            os.dup2(commands.fileno(), 0)
            os.dup2(reports.fileno(), 1)
            for mine in (self._orders, self._ended, self._waker, *self._children.values(), commands, reports):
                mine.close()
            gc.enable()
            module = sys.stdin.readline().strip()
            name_process(module.rpartition(".")[2])
            importlib.import_module(module).main()
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
            log.info("nobody listens any more to a process that ended")
