"""Process of a service beside a node's workers: kept running by the supervisor, and the program in it."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
import threading
from collections.abc import Callable
from io import BufferedReader
from typing import TextIO, cast

from skyward.events import Progress
from skyward.node.plan import NodePlan
from skyward.node.processes import close_on_exec, end_with_supervisor, exit_reason, name_process
from skyward.node.services import Service, ServiceProgram
from skyward.node.supervisor.forking import Zygote, keep_process
from skyward.wire.control import Report, RunService, ServiceRunning, to_frame


class ServiceProcess:
    """Process that runs :meth:`Service.serve` of the ordered service; restarted whenever it ends.

    Args:
        plan: the node.
        zygote: process to fork it from.
        on_report: called with every message from it.
        on_exit: called with the reason of its end, before it is started again.
    """

    def __init__(
        self,
        plan: NodePlan,
        *,
        zygote: Zygote,
        on_report: Callable[[ServiceRunning | Progress], None],
        on_exit: Callable[[str, str], None],
    ) -> None:
        self._plan = plan
        self._zygote = zygote
        self._on_report = on_report
        self._on_exit = on_exit
        self._order: asyncio.Future[RunService] = asyncio.get_running_loop().create_future()

    def start(self, order: RunService) -> None:
        """Start the process; from then on it stays. Idempotent."""
        if not self._order.done():
            self._order.set_result(order)

    async def keep(self) -> None:
        """Run the process, once it is ordered, until cancelled."""
        order = await asyncio.shield(self._order)
        await keep_process(
            f"the service {order.name}", lambda: self._live(order), lambda reason: self._on_exit(order.name, reason)
        )

    async def _live(self, order: RunService) -> str:
        async with self._zygote.fork(__name__) as fork:
            fork.send((self._plan, order))
            async for report in fork.reports():
                self._on_report(cast("ServiceRunning | Progress", report))
            return exit_reason(fork.exit_code)


def main(commands: BufferedReader, reports: TextIO) -> None:
    """In a fork of the zygote: run the service in the first command until the supervisor closes ``commands``."""
    zygote = os.getppid()
    plan, order = pickle.load(commands)
    name_process(order.name)
    close_on_exec()
    service = cast("Service", importlib.import_module(order.module))

    def report(message: Report) -> None:
        reports.write(f"{json.dumps(to_frame(message))}\n")

    def follow() -> None:
        commands.read()
        end_with_supervisor(plan.ready.pid, zygote, instance_id=plan.config.instance_id, folder=plan.ready.blob_dir)

    threading.Thread(target=follow, name="skyward-orders", daemon=True).start()
    asyncio.run(service.serve(ServiceProgram(plan=plan, report=report)))
