"""Transfer of large arguments between nodes: a supervisor sends its node's blobs to other nodes, and fetches theirs.

A connection serves one blob: its name in a frame, its size in another, then the bytes. The port is not that of the
control connection, so that no message waits behind bytes. Only threads read and write files (docs/decisions/011).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from skyward.base.waiting import to_its_end
from skyward.wire.control import Fetch, Fetched
from skyward.wire.frames import FrameError, TlsIdentity, client_context, read_frame, server_context, write_frame
from skyward.wire.listening import StreamPort, Streams, dial

log = logging.getLogger("skyward.node.storage.blob_port")

_NAME = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
# Nodes of different islands do not reach each other: the client sends the blob instead, after this time at most.
_CONNECT_S = 3.0


class _SourceError(Exception):
    """Failure of one source; another one may have the blob."""


class _UnreachedError(_SourceError):
    """Failure to connect to a source."""


class BlobPort:
    """Node's end of every transfer between nodes. Belongs to the event loop.

    Args:
        identity: the pool's certificates.
        patience_s: seconds that the other side may take for the next piece.

    Attributes:
        folders: folders of the node's blobs; no file is read or written elsewhere.
    """

    def __init__(self, identity: TlsIdentity, *, patience_s: float = 10.0) -> None:
        self.folders: Sequence[str] = ()
        self._patience_s = patience_s
        self._server_tls = server_context(identity)
        self._client_tls = client_context(identity)
        self._port: StreamPort | None = None
        self._getting: set[asyncio.Task[None]] = set()
        self._giving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._on_their_way: set[str] = set()
        self._closed = False

    async def listen(self, address: str) -> int:
        """Bind a free port of ``address`` and return it. Peers without a certificate of the pool are refused."""
        self._port = StreamPort(address, self._server_tls, self._serve, admission_s=self._patience_s)
        return self._port.number

    def fetch(self, order: Fetch, report: Callable[[Fetched], None]) -> None:
        """Begin to fetch a blob, and pass ``report`` the outcome. Ignore an order for a blob that is being fetched."""
        if self._closed or order.path in self._on_their_way:
            return
        self._on_their_way.add(order.path)
        task = asyncio.create_task(self._fetch(order, report))
        self._getting.add(task)
        task.add_done_callback(self._getting.discard)

    async def close(self) -> None:
        """Abort the transfers in both directions. Idempotent."""
        self._closed = True
        if self._port is not None:
            await self._port.close()
        for task in self._getting:
            task.cancel()
        for writer in self._giving.values():  # not cancelled: asyncio's streams log a cancelled handler as an error
            writer.transport.abort()
        await asyncio.gather(*self._getting, *self._giving, return_exceptions=True)

    # --- getting ----------------------------------------------------------------------------------------------------

    async def _fetch(self, order: Fetch, report: Callable[[Fetched], None]) -> None:
        try:
            answer = await self._get(order)
        except OSError as error:
            answer = _failed(order, str(error), errno=error.errno or 0)
        except Exception as error:  # the client waits for an answer
            log.exception("blob %s could not be fetched", order.blob_id)
            answer = _failed(order, repr(error))
        finally:
            self._on_their_way.discard(order.path)
        report(answer)

    async def _get(self, order: Fetch) -> Fetched:
        """Fetch from the first source that has it. Raises OSError where this node's own disk or memory fails."""
        # Both come from outside, and must not lead to a file that is no blob of this node's.
        places = [f"{folder}/{order.blob_id}" for folder in self.folders]
        if _NAME.fullmatch(order.blob_id) is None or order.path not in places:
            return _failed(order, f"no blob may lie at {order.path}")
        with suppress(FileNotFoundError):  # its size is enough: no file has its final name before it is whole
            if (await asyncio.to_thread(os.stat, order.path)).st_size == order.nbytes:
                return Fetched(blob_id=order.blob_id, path=order.path)
        complaints: list[str] = []
        unreached: list[str] = []
        for source in order.sources:
            try:
                await self._copy(source, order)
            except _SourceError as error:
                complaints.append(f"{source}: {error}")
                unreached += [source] if isinstance(error, _UnreachedError) else []
            else:
                return Fetched(blob_id=order.blob_id, path=order.path, unreached=tuple(unreached))
        return _failed(order, "; ".join(complaints) or "no source was named", unreached=unreached)

    async def _copy(self, source: str, order: Fetch) -> None:
        streams = await self._dial(source)
        folder, _, name = order.path.rpartition("/")
        part = f"{folder}/.{name}.{secrets.token_hex(4)}"
        digest = blake3()

        def store(chunk: bytes) -> None:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
                file.write(chunk)
            digest.update(chunk)

        try:
            write_frame(streams.writer, {"blob": order.blob_id})
            await self._expect(streams.reader, order)
            left = order.nbytes
            while left:
                chunk = await self._read(streams.reader, min(left, _CHUNK_BYTES))
                await to_its_end(asyncio.to_thread(store, chunk))
                left -= len(chunk)
            if digest.hexdigest() != order.blob_id:
                raise _SourceError("its content is not what was asked for")
            await to_its_end(asyncio.to_thread(os.rename, part, order.path))
        finally:
            streams.writer.transport.abort()
            await to_its_end(asyncio.to_thread(Path(part).unlink, missing_ok=True))

    async def _dial(self, source: str) -> Streams:
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await dial(source, self._client_tls, limit=_CHUNK_BYTES)
        except TimeoutError as error:
            raise _UnreachedError(f"no answer within {_CONNECT_S:g} s") from error
        except (OSError, ValueError) as error:
            raise _UnreachedError(str(error)) from error

    async def _expect(self, reader: asyncio.StreamReader, order: Fetch) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                answer = await read_frame(reader)
        except (OSError, asyncio.IncompleteReadError, FrameError) as error:
            raise _SourceError(f"it did not answer: {error!r}") from error
        if answer.get("nbytes") != order.nbytes:
            raise _SourceError(str(answer.get("error") or f"it has {answer.get('nbytes')} bytes, not {order.nbytes}"))

    async def _read(self, reader: asyncio.StreamReader, nbytes: int) -> bytes:
        try:
            async with asyncio.timeout(self._patience_s):
                return await reader.readexactly(nbytes)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise _SourceError(f"it stopped in the middle: {error!r}") from error

    # --- giving -----------------------------------------------------------------------------------------------------

    async def _serve(self, streams: Streams) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._giving[task] = streams.writer
        try:
            await self._give(streams.reader, streams.writer)
        except (OSError, asyncio.IncompleteReadError, FrameError) as error:
            log.info("a blob could not be sent to a node: %r", error)
        finally:
            del self._giving[task]
            streams.writer.transport.abort()

    async def _give(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._patience_s):
            name = str((await read_frame(reader)).get("blob"))
        file = await asyncio.to_thread(_open, self.folders, name)
        if file is None:
            write_frame(writer, {"error": "it does not have the blob"})
        else:
            with file:
                write_frame(writer, {"nbytes": os.fstat(file.fileno()).st_size})
                while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    writer.write(chunk)
                    async with asyncio.timeout(self._patience_s):
                        await writer.drain()
        async with asyncio.timeout(self._patience_s):
            await reader.read(1)  # the other side hangs up once it has everything


def _failed(order: Fetch, error: str, *, errno: int = 0, unreached: Sequence[str] = ()) -> Fetched:
    return Fetched(blob_id=order.blob_id, path=order.path, error=error, errno=errno, unreached=tuple(unreached))


def _open(folders: Sequence[str], name: str) -> BinaryIO | None:
    if _NAME.fullmatch(name) is None:  # "../…" would lead to any file of the user's
        return None
    for folder in folders:
        with suppress(FileNotFoundError):
            return Path(folder, name).open("rb", buffering=0)
    return None
