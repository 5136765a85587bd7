"""Service for tests of nodes: its guests run functions that are sent to them, in plain text and without any guard."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from skyward.events import Progress
from skyward.node.services import ServiceProgram, WorkerHost
from skyward.wire.control import ServiceRunning

__all__ = ["FOLDER", "MODULE", "NAME", "guests_at", "join", "run_task", "serve"]

MODULE = __name__
NAME = "tasks"
FOLDER = str(Path(__file__).parents[1])
"""Folder from which the module is imported."""

R = TypeVar("R")


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def serve(program: ServiceProgram) -> None:
    """Know which guests there are."""
    guests: set[str] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).decode().strip()
        if name:
            guests.add(name)
            await reader.read()
            guests.discard(name)
        else:
            writer.write(json.dumps(sorted(guests)).encode())
        writer.close()

    _, port = _split(program.plan.ready.service)
    async with await asyncio.start_server(converse, program.plan.config.binds_to, port) as server:
        program.report(ServiceRunning(name=NAME, address=program.plan.ready.service))
        program.report(Progress(label="serving", done=0, total=1))
        await server.serve_forever()


async def join(host: WorkerHost, address: str) -> None:
    """Run functions until the service ends."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        function, args = pickle.loads(await reader.readexactly(int(await reader.readline())))
        result = await asyncio.to_thread(host.run_task, lambda: function.__name__, function, args, {})
        if isinstance(result, Ending):
            host.end_process(str(result))
        writer.write(pickle.dumps(result))
        writer.close()

    reader, writer = await asyncio.open_connection(*_split(address))
    try:
        _, port = _split(host.address)
        async with await asyncio.start_server(answer, host.bind, port):
            writer.write(f"{host.name}\n".encode())
            await reader.read()
    finally:
        writer.close()


class Ending(str):
    """Result with which the guest ends its worker: the reason."""

    __slots__ = ()


async def run_task(guest: str, function: Callable[..., R], *args: Any) -> R:
    """Run a function in the worker whose guest has this address, once that answers."""
    data = cloudpickle.dumps((function, args))
    while True:
        with suppress(ConnectionRefusedError):
            reader, writer = await asyncio.open_connection(*_split(guest))
            break
        await asyncio.sleep(0.02)
    writer.write(f"{len(data)}\n".encode() + data)
    try:
        return pickle.loads(await reader.read())
    finally:
        writer.close()


async def guests_at(service: str) -> list[str]:
    """Return the names of the guests of the service at this address."""
    reader, writer = await asyncio.open_connection(*_split(service))
    writer.write(b"\n")
    try:
        return json.loads(await reader.read())
    finally:
        writer.close()
