"""The worker's end of a lane: takes calls, runs them in order in one thread, keeps outcomes until they are seen.

The handler that serves the connection never awaits a call: a dropped link loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import platform
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from skyward._waiting import wait_until
from skyward.errors import UnreachableError
from skyward.events import SkywardEvent, use_callback
from skyward.node.logs import CallOutput, LogPiece
from skyward.runtime import CallContext, enter_call
from skyward.wire.link import Link
from skyward.wire.messages import CallHeader, Kind, Outcome, Payload
from skyward.wire.pickling import LARGE_BYTES, Packed, pack, pack_error, unpack
from skyward.wire.session import CHUNK_BYTES, BrokenSessionError, Item, Session

__all__ = ["LaneServer"]

log = logging.getLogger("skyward.node.lane")

_KEPT_BYTES_BOUND = 256 << 20
_KEPT_LINES_BOUND = 64 << 20
_PAUSE_S = 0.05
_FAREWELL_S = 0.5


class _Executor(Protocol):
    def submit(self, fn: Callable[[], None], /) -> Any: ...


class _MissingBlobsError(Exception):
    def __init__(self, blob_ids: Sequence[str]) -> None:
        super().__init__(*blob_ids)
        self.blob_ids = list(blob_ids)


class LaneServer:
    """Serves the one client of the pool, over as many connections as it takes.

    Args:
        incarnation: identity of this process; the client resumes only with the one it knew.
        blob_dirs: folders where large arguments lie, by their content id.
        executor: one thread, that calls run in.
    """

    def __init__(self, *, incarnation: str, blob_dirs: Sequence[Path], executor: _Executor) -> None:
        self._incarnation = incarnation
        self._blob_dirs = tuple(blob_dirs)
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._client = ""
        self._link = Link(Session(), self._handle)
        self._serving: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._functions: dict[str, Payload | Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._draining = False
        self._running = 0
        self._outbox: deque[tuple[Item, int, bool]] = deque()
        self._flush_due = False
        self._dropped_lines = 0
        self.output = CallOutput(self._send_printed)

    async def accept(self, comm: Any, client: str, seen: int) -> None:
        """Handle the op ``lane``: greet, then serve until the connection is lost."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._serving = asyncio.current_task()
        fresh = client != self._client
        if fresh:
            self._start_session(client)
        self._link.session.resume(seen)
        greeting = {
            "fresh": fresh,
            "incarnation": self._incarnation,
            "seen": self._link.session.seen,
            "python": platform.python_version(),
            "pid": os.getpid(),
        }
        try:
            await comm.write(greeting)
            await self._link.run(comm)
        except BrokenSessionError:
            log.exception("lane of client %s dropped", client)
            self._client = ""
        finally:
            self._serving = None if self._serving is asyncio.current_task() else self._serving

    def _start_session(self, client: str) -> None:
        self._client = client
        with self._lock:
            self._queue.clear()
        self._functions.clear()
        self._link = Link(Session(), self._handle)

    def _handle(self, item: Item) -> None:
        match item[0]:
            case Kind.CALL:
                with self._lock:
                    self._queue.append(item)
                self._keep_running()
            case Kind.FUNCTION:
                self._functions[item[1]] = Payload.from_wire(item[2])
            case Kind.CANCEL:
                self._give_back(item[1])
                if self._running in item[1]:
                    self._ending = self._loop.create_task(self._end_worker(self._running))
            case Kind.REVOKE:
                self._give_back(item[1])
            case unknown:
                log.error("unknown item %r on the lane", unknown)

    def _give_back(self, call_ids: Sequence[int]) -> None:
        unwanted = set(call_ids)
        with self._lock:
            dropped = [item[1] for item in self._queue if item[1] in unwanted]
            if dropped:
                self._queue = deque(item for item in self._queue if item[1] not in unwanted)
        if dropped:
            self._link.push([Kind.REVOKED, dropped])

    async def _end_worker(self, call_id: int) -> None:
        """End a running call the only way there is; what others are owed goes out first."""
        with suppress(UnreachableError):
            await wait_until(self._all_seen, deadline_s=_FAREWELL_S, interval_s=0.005, what="the client to catch up")
        if self._running == call_id:
            os.kill(os.getpid(), signal.SIGKILL)

    async def _all_seen(self) -> bool | None:
        return self._link.session.drained or None

    def _keep_running(self) -> None:
        with self._lock:
            if self._draining or not self._queue:
                return
            self._draining = True
        self._executor.submit(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                full = self._link.session.kept_bytes > _KEPT_BYTES_BOUND
                if full or not self._queue:
                    self._draining = False
                    self._running = 0
                    break
                item = self._queue.popleft()
                self._running = item[1]
            self._run(item)
        if full:
            self._loop.call_soon_threadsafe(self._loop.call_later, _PAUSE_S, self._keep_running)

    def _run(self, item: Item) -> None:
        _, call_id, function_id, payload, wire_header = item
        header = CallHeader.from_wire(wire_header)
        started = time.perf_counter()
        result: Packed | None = None
        error: tuple[str, str, str, bytes] | None = None
        with self._surroundings(call_id, header):
            try:
                result = self._execute(function_id, Payload.from_wire(payload), header.label)
            except _MissingBlobsError as missing:
                self._send([Kind.MISSING, call_id, missing.blob_ids])
                return
            except BaseException as raised:  # a call that exits or is interrupted must not end its worker
                packed = pack_error(raised)
                error = (packed.type_name, packed.message, packed.traceback, packed.pickled)
        seconds = time.perf_counter() - started
        if result is None:
            self._send([Kind.RESULT, call_id, Outcome(seconds=seconds, error=error).to_wire()])
        else:
            self._send_result(call_id, result, seconds)

    def _execute(self, function_id: str, payload: Payload, label: str) -> Packed:
        function = self._functions[function_id]
        if isinstance(function, Payload):
            function = self._functions[function_id] = self._load(function)
        args, kwargs = self._load(payload)
        return pack(function(*args, **kwargs), what=f"the result of {label}")

    def _load(self, payload: Payload) -> Any:
        missing = [blob_id for blob_id in payload.blobs if self._find(blob_id) is None]
        if missing:
            raise _MissingBlobsError(missing)
        data = self._map(payload.data_blob) if payload.data_blob else payload.data
        return unpack(data, [self._map(blob_id) for blob_id in payload.buffer_blobs])

    def _find(self, blob_id: str) -> Path | None:
        return next((path for folder in self._blob_dirs if (path := folder / blob_id).exists()), None)

    def _map(self, blob_id: str) -> memoryview:
        """The blob's memory, private to this call: writable, copied only where written."""
        path = self._find(blob_id)
        if path is None:
            raise _MissingBlobsError([blob_id])
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def _send_result(self, call_id: int, result: Packed, seconds: float) -> None:
        large = len(result.data) >= LARGE_BYTES
        parts = ([memoryview(result.data)] if large else []) + list(result.buffers)
        for index, part in enumerate(parts):
            for offset in range(0, part.nbytes, CHUNK_BYTES):
                # A copy: the memory may be the user's own, and the next call may write to it before this is sent.
                piece = bytes(part[offset : offset + CHUNK_BYTES])
                self._send([Kind.CHUNK, call_id, index, part.nbytes, offset, piece], len(piece), bulk=True)
        data = b"" if large else result.data
        outcome = Outcome(seconds=seconds, data=data, part_bytes=tuple(part.nbytes for part in parts))
        self._send([Kind.RESULT, call_id, outcome.to_wire()], len(data) + 64, bulk=bool(parts))

    @contextmanager
    def _surroundings(self, call_id: int, header: CallHeader) -> Generator[None]:
        def emit_to_client(event: SkywardEvent) -> None:
            self._send([Kind.EVENT, call_id, pack(event, what="the event").data])

        context = CallContext(world=header.world, rank=header.rank, seed=header.seed, head_port=header.head_port)
        with self.output.of_call(call_id), enter_call(context), use_callback(emit_to_client):
            yield

    def _send_printed(self, call_id: int, pieces: Sequence[LogPiece]) -> None:
        if self._serving is None and self._link.session.kept_bytes > _KEPT_LINES_BOUND:
            self._dropped_lines += len(pieces)
            return
        lines: list[list[Any]] = [
            [piece.stream, piece.text, piece.partial, piece.timestamp, piece.writer] for piece in pieces
        ]
        if self._dropped_lines:
            note = f"… {self._dropped_lines} lines were dropped while the client was away"
            lines.insert(0, ["stderr", note, False, time.time(), -1])
            self._dropped_lines = 0
        self._send([Kind.LINES, call_id, lines], sum(len(line[1]) for line in lines) + 64)

    def _send(self, item: Item, nbytes: int = 64, *, bulk: bool = False) -> None:
        """From any thread."""
        self._outbox.append((item, nbytes, bulk))
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        while self._outbox:
            item, nbytes, bulk = self._outbox.popleft()
            self._link.push(item, nbytes, bulk=bulk)
