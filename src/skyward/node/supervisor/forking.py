"""Processes of a node are forked from one that has imported their modules, the zygote: its program, and its keeper.

A zygote imports modules, once, and forks on order. Each node has one, a child of its supervisor; a client's template
forks supervisors in the same way (docs/decisions/010, 016, 036). Neither runs a thread, an event loop or user code, or
has a connection except the one over which its orders come.
"""

from __future__ import annotations

import asyncio
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
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib.metadata import MetadataPathFinder
from types import FrameType
from typing import Any, NoReturn

from tenacity import AsyncRetrying, retry_if_result, wait_exponential, wait_random

from skyward.base.descriptors import keep_from_forks
from skyward.base.platform import wait_for_end
from skyward.node.plan import NodePlan, package_versions
from skyward.node.processes import close_all_but, end_all, exit_reason, fits_arguments, name_process, show_arguments
from skyward.node.supervisor.start_order import PROGRAM
from skyward.request.front_ends import COUNTERPARTS

log = logging.getLogger("skyward.node.supervisor.forking")

_LINE_BYTES = 1 << 24  # the ports of 1,500 workers are more than asyncio's default of 64 KiB
_UNKNOWN = 255
"""Exit code of a process that something else has waited for; multiprocessing's number for it."""
_DEATH_S = 1.0
"""A process that is killed closes its connections first, and has ended a moment later."""
_LOOK_S = 1.0
"""Seconds between two looks at whether a template's client lives, should some other process hold its socket open."""


async def keep_process(name: str, live: Callable[[], Awaitable[str]], on_exit: Callable[[str], None]) -> None:
    """Run a process until cancelled: start it again whenever it has ended.

    Args:
        name: its name, for the log.
        live: starts the process and returns the reason of its end.
        on_exit: called with that reason, before the next start.
    """

    async def live_once() -> str:
        try:
            reason = await live()
        except Exception as error:
            log.exception("%s cannot be kept", name)
            reason = f"cannot be kept: {error}"
        on_exit(reason)
        return reason

    await AsyncRetrying(retry=retry_if_result(bool), wait=wait_exponential(0.1, 2.0) + wait_random(0, 1))(live_once)


class Fork:
    """Connections to a forked process: commands to it, and reports from it.

    Attributes:
        exit_code: its exit code, once its reports have ended; None if it is lost, as when the zygote has ended.
    """

    def __init__(self, commands: asyncio.StreamWriter, lines: asyncio.StreamReader) -> None:
        self.exit_code: int | None = None
        self.commands = commands
        self.lines = lines

    def send(self, *commands: object) -> None:
        """Send commands, as pickles."""
        self.commands.write(b"".join(map(pickle.dumps, commands)))

    async def reports(self) -> AsyncGenerator[Any]:
        """Yield its reports to its end: messages of the control connection, texts, and None."""
        from skyward.wire.control import from_frame  # a client forks supervisors before it has need of messages

        async for line in self.lines:
            report: Any = json.loads(line)
            if isinstance(report, int):
                self.exit_code = report
                return
            yield report if report is None or isinstance(report, str) else from_frame(report)


@asynccontextmanager
async def fork_from(orders: socket.socket, module: str) -> AsyncGenerator[Fork]:
    """Have ``main()`` of the module run in a fork of the zygote that takes ``orders``.

    Its reports end with its exit code, or without one if the zygote has ended.
    """
    commands, its_commands = map(keep_from_forks, socket.socketpair())
    reports, its_reports = map(keep_from_forks, socket.socketpair())
    with its_commands, its_reports, suppress(OSError):  # it has just ended: then the reports do, too
        socket.send_fds(orders, [b"!"], [its_commands.fileno(), its_reports.fileno()])
    with ExitStack() as unconnected:  # a cancellation in between must leave no socket open
        unconnected.enter_context(commands)
        unconnected.enter_context(reports)
        _, commands_writer = await asyncio.open_connection(sock=commands)
        unconnected.callback(commands_writer.close)
        reports_reader, reports_writer = await asyncio.open_connection(sock=reports, limit=_LINE_BYTES)
        unconnected.pop_all()
    try:
        fork = Fork(commands_writer, reports_reader)
        fork.send(module)
        yield fork
    finally:
        commands_writer.close()
        reports_writer.close()


async def _ended(pid: int, orders: socket.socket) -> int:
    """Wait for the end of a child, which closes ``orders`` a moment before; return its exit code."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(orders, closed.set)  # it never writes there
    try:
        await closed.wait()
    finally:
        loop.remove_reader(orders)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # noqa: ASYNC222 - it has ended
    except ChildProcessError:
        return _UNKNOWN


class Zygote:
    """Process that has imported the modules of the node's others and forks them; restarted whenever it ends.

    Attributes:
        pid: the present process; None between two of them.

    Args:
        modules: modules to import; these may be forked.
        plan: for the environment of all of them.
        on_exit: called with the reason of its end, before it is started again; has to end its forks, which live on.
        forked: pid of the first such process and the connection to it, where it was forked beforehand.
    """

    def __init__(
        self,
        modules: Sequence[str],
        plan: NodePlan,
        *,
        on_exit: Callable[[str], None],
        forked: tuple[int, socket.socket] | None = None,
    ) -> None:
        # Not "-m": multiprocessing would import the module again, as __mp_main__, in processes that calls start.
        start = "import gc; gc.disable(); from skyward.node.supervisor.forking import run_zygote as run"
        self._argv = (sys.executable, "-c", f"{start}; run(*{tuple(modules)!r})")
        self._plan = plan
        self._on_exit = on_exit
        self._forked = forked
        self._orders: socket.socket | None = None
        self._started = asyncio.Event()
        self.pid: int | None = None if forked is None else forked[0]

    async def keep(self) -> None:
        """Start the process, and again whenever it ends, until cancelled."""
        await keep_process("the zygote", self._live, self._on_exit)

    async def _live(self) -> str:
        self.pid, orders = self._forked or self._start_program()
        self._forked = None
        with orders:
            self._orders = orders
            self._started.set()
            exit_code = await _ended(self.pid, orders)
        self.pid = None
        self._started.clear()
        return exit_reason(exit_code)

    def _start_program(self) -> tuple[int, socket.socket]:
        orders, its_orders = socket.socketpair()
        with its_orders:
            process = subprocess.Popen(self._argv, stdin=its_orders.fileno(), env=os.environ | self._plan.process_env())
        process.returncode = 0  # _ended() waits for it
        return process.pid, orders

    @asynccontextmanager
    async def fork(self, module: str) -> AsyncGenerator[Fork]:
        """Have ``main()`` of the module run in a process of its own, once there is a zygote.

        Its reports end with its exit code, or without one if the zygote has ended.
        """
        await self._started.wait()
        assert self._orders is not None
        async with fork_from(self._orders, module) as fork:
            yield fork


# --- the program ---------------------------------------------------------------------------------------------------


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
    if not fits_arguments(PROGRAM):  # some kernels, such as gVisor's, do not report where arguments lie
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
    package_versions(COUNTERPARTS)  # the first look at metadata imports parsers of e-mail, for 6 ms
    # These caches hold archives on the path open, whose descriptors a fork closes.
    importlib.invalidate_caches()  # of the backport that Dask uses
    MetadataPathFinder().invalidate_caches()  # Python 3.12 and before do not count it among them
    gc.freeze()  # collecting would write to memory that is shared with every fork


def _take_orders() -> socket.socket:
    """Return the socket that is standard input, which is the null device from now on."""
    orders = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return orders


def fork_zygote(env: Mapping[str, str]) -> tuple[int, socket.socket]:
    """Fork a node's zygote from its supervisor, which has imported everything and has one thread.

    Args:
        env: its variables, and those of the node's other processes.

    Return its process id, and the connection for its orders, which closes when it ends.
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
            os.environ.update(env)
            _serve_node(orders, supervisor)
            status = 0
        except BaseException:  # past the fork nobody else would report it
            log.exception("the zygote failed")
        finally:
            os._exit(status)
    orders.close()
    return pid, here


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
