"""Client's end of its templates: processes that supervisors of ``Local()`` are forked from."""

from __future__ import annotations

import asyncio
import logging
import os
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from skyward.base.descriptors import keep_from_forks
from skyward.base.exits import at_exit
from skyward.base.platform import process_limits, run_in_forks
from skyward.environment.installed import is_satisfied
from skyward.node.plan import HASH_SEED, cpu_count, node_cpu_count, share_of, thread_variables
from skyward.node.supervisor.forking import Fork, fork_from
from skyward.node.supervisor.start_order import (
    TEMPLATE_ID,
    TEMPLATE_VARIABLE,
    VOLUMES_REQUEST,
    StartOrder,
    node_programs,
    start_variables,
)
from skyward.request.request import PoolRequest
from skyward.request.volume import GrantedVolume
from skyward.shipping.project_modules import added_package_folders
from skyward.wire.node_config import NodeConfig

log = logging.getLogger("skyward.fleet.template_process")

_PROGRAM = "import gc; gc.disable(); from skyward.node.supervisor.forking import run_template as run; run({}, *{})"
_SUPERVISOR = "skyward.node.supervisor.start"
_MOST = 3
"""Templates kept at a time; each holds 30 MiB."""
_END_S = 5.0
_CLOSE_S = 1.0  # killing it harms nothing: its forks live on
_IDLE_S = 3.0
"""A process that has used no processor for so long is stopped, or waits for something that does not come."""
_LAST_WORDS = 500
_INHERITED = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
"""Beginnings of the lines in ``/proc/self/status`` with attributes that a new program inherits."""


class _TemplateProcess:
    """One template process, which ends when this process closes its socket or ends.

    Args:
        variables: environment variables that count only when a program starts.
        programs: modules to import.

    Attributes:
        origin: properties of the present process with which it was started.
        limits: its :func:`process_limits`, which are among them.
        failed: whether it has ended by itself, or could not fork.
        served: whether it has ever forked a supervisor.
    """

    def __init__(
        self, variables: Mapping[str, str], programs: tuple[str, ...], origin: tuple[object, ...], limits: str
    ) -> None:
        self.origin = origin
        self.limits = limits
        self.failed = False
        self.served = False
        self._closed = False
        here, orders = socket.socketpair()
        self._orders = keep_from_forks(here)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        code = _PROGRAM.format(os.getpid(), (_SUPERVISOR, *programs))
        environment = {name: value for name, value in os.environ.items() if name != "SKYWARD_INSTANCE"}
        with orders:
            # In the root folder no file of the user's can pass for a module that is imported.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=orders.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",
                env=environment | dict(variables) | {TEMPLATE_VARIABLE: TEMPLATE_ID},
                start_new_session=True,
            )

    async def fork(self, order: StartOrder, volumes: tuple[GrantedVolume, ...]) -> str:
        """Fork a supervisor and return its answer; empty if none came up."""
        async with fork_from(self._orders, _SUPERVISOR) as fork:
            fork.send(order)
            try:
                lines = [line async for line in self._answers(fork, volumes)]
            except TimeoutError:
                self.failed = True
                self._process.kill()  # else it would take the order once it goes on
                return self._given_up("the process that nodes are forked from does not go on")
        if lines and lines[-1].startswith(b"{"):
            self.served = True
            return lines[-1].decode()
        if not lines:
            self.failed = True
            # It may have made room for another one just before it had the order.
            return "" if self._closed else self._given_up("the process that nodes are forked from has ended")
        if VOLUMES_REQUEST in lines:
            return self._given_up("a forked node did not come up")
        self.failed = True  # its limits were changed, or its memory is spent: another one may do better
        return self._given_up("no process could be forked for a node")

    async def _answers(self, fork: Fork, volumes: tuple[GrantedVolume, ...]) -> AsyncGenerator[bytes]:
        """Yield the lines of the fork up to the supervisor's answer, and send the volumes when it asks for them.

        Raises:
            TimeoutError: the template does nothing, and has forked no supervisor.
        """
        shown = False  # before that no process carries the instance's id, by which a provider ends it
        try:
            while line := await (fork.lines.readline() if shown else self._first_lines(fork)):
                if line == VOLUMES_REQUEST:
                    shown = True
                    fork.send(volumes)
                yield line
                if line.startswith(b"{"):  # a template that is stopped now would keep the connection open
                    return
        except ConnectionError:
            return
        except asyncio.CancelledError:
            if not shown:  # else its provider would find nothing to end: wait until it is, or ends without volumes
                fork.commands.close()
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_END_S):
                        while (line := await fork.lines.readline()) and line != VOLUMES_REQUEST:
                            pass
            raise

    async def _first_lines(self, fork: Fork) -> bytes:
        before_s, used_s = -1.0, self._cpu_s()
        while used_s != before_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    return await fork.lines.readline()
            before_s, used_s = used_s, self._cpu_s()
        raise TimeoutError

    def _cpu_s(self) -> float:
        """Return the time on processors that the process and its ended forks have used."""
        with suppress(psutil.Error):
            return sum(psutil.Process(self._process.pid).cpu_times()[:4])
        return 0.0

    def _given_up(self, what: str) -> str:
        log.warning("%s, so a node starts from its program, which takes longer: %s", what, self._last_words())
        return ""

    def _last_words(self) -> str:
        if self._closed:
            return "it was closed"
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        return said.splitlines()[-1][-_LAST_WORDS:] if said else "it said nothing"

    def close(self) -> None:
        """End the process, and wait for it. Its forks live on."""
        self._closed = True
        self._orders.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the process is the parent's."""
        self._process.returncode = 0


class _Templates:
    """This process's templates, the last used one at the end. Its methods block: not for an event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates: list[_TemplateProcess] = []
        self._usable = sys.platform == "linux"

    def find(self, variables: Mapping[str, str], programs: tuple[str, ...]) -> _TemplateProcess | None:
        """Return a template that is as a program would be that starts now; it is started if need be."""
        with self._lock:
            if not self._usable:
                return None
            limits = process_limits()
            origin = (dict(variables), programs, limits, *_inherited(), *_package_changes())
            for template in [template for template in self._templates if template.failed]:
                self._drop(template)
            template = next((template for template in self._templates if template.origin == origin), None)
            if template is None:
                while len(self._templates) >= _MOST:
                    self._drop(self._templates[0])
                template = _TemplateProcess(variables, programs, origin, limits)
            else:
                self._templates.remove(template)
            self._templates.append(template)
            return template

    def give_up(self) -> None:
        """Start no template any more: one failed before it had forked anything, and the next one would, too."""
        self._usable = False

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            while self._templates:
                self._drop(self._templates[0])

    def leave_to_parent(self) -> None:
        """In a forked child: these are the parent's. Another one is started here when one is needed."""
        self._lock = threading.Lock()
        for template in self._templates:
            template.leave_to_parent()
        self._templates = []

    def _drop(self, template: _TemplateProcess) -> None:
        self._templates.remove(template)
        template.close()


_templates = _Templates()


def start_template(request: PoolRequest) -> None:
    """Start the process that a pool's nodes will be forked from, ahead of :func:`fork_supervisor`. Blocks briefly.

    Nothing is started where its nodes have another interpreter.
    """
    if not is_satisfied(request.image.pip):
        return
    cores = share_of(cpu_count(), sharers=request.nodes, least=request.wish.cpu or 0)
    threads = thread_variables(request.env, workers=request.workers_per_node, cpu_count=cores)
    with suppress(OSError):  # it is met again when the node is ordered
        _templates.find(_program_variables(added_packages({})) | threads, node_programs(request.service))


def added_packages(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which a node on this machine finds the packages that this program finds."""
    added = added_package_folders()
    given = env.get("PYTHONPATH") or os.environ.get("PYTHONPATH") or ""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (given, *added)))} if added else {}


def _program_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that count when a program starts, of this process's and those."""
    return start_variables(os.environ | dict(variables) | HASH_SEED)


async def fork_supervisor(config: NodeConfig, variables: Mapping[str, str]) -> str | None:
    """Start a node of this machine's supervisor as a fork, with ``variables`` besides those of this process.

    Return its :class:`NodeReady` as text; empty if one was ordered and did not come up, which the log explains; None if
    none was ordered.
    """
    if len(config.instance_id) != len(TEMPLATE_ID):
        return None
    env = os.environ | dict(variables)
    threads = thread_variables(config.env, workers=config.workers, cpu_count=node_cpu_count(config))
    started_with = _program_variables(variables) | threads
    try:
        template = await asyncio.to_thread(_templates.find, started_with, node_programs(config.service))
        if template is None:
            return None
        # Every process of the node is a fork of the one that gets this order, which must not hold the volumes' keys.
        own = replace(config, volumes=())
        order = StartOrder(config=own, env=env, started_with=started_with, limits=template.limits)
        answer = await template.fork(order, config.volumes)
    except OSError as error:  # no descriptor or process is left, or this kernel's /proc lacks a file
        log.warning(
            "no process could be started that nodes are forked from, so a node starts from its program, which takes "
            "longer: %s",
            error,
        )
        return None
    if template.failed and not template.served:
        _templates.give_up()
    return answer


def _inherited() -> Iterable[str]:
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    yield from (line for line in status.splitlines() if line.startswith(_INHERITED))
    yield Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    for namespace in sorted(Path("/proc/self/ns").iterdir()):
        yield os.readlink(namespace)
    yield os.readlink("/proc/self/root")
    yield str(psutil.Process().nice())


def _package_changes() -> Iterable[tuple[str, int]]:
    """Yield the folders of packages, with the times of their last changes."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}:
        try:
            yield folder, os.stat(folder).st_mtime_ns
        except OSError:  # not there, or not readable
            yield folder, 0


run_in_forks(_templates.leave_to_parent)
at_exit(_templates.close)
