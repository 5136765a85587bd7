"""Frames of the control connection and the blob port: a length, then one msgpack map. TLS of all connections."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast
from weakref import WeakValueDictionary

import msgpack

from skyward.base.platform import readable_path
from skyward.wire.messages import TEXTS

MAX_FRAME_BYTES = 1 << 20
"""Size limit of a frame in bytes; a peer that announces more is no part of the pool."""

LENGTH = struct.Struct("!I")
"""What precedes a frame, and a message of a lane: its length in bytes."""


class FrameError(ValueError):
    """Bytes from the peer that are no frame; the connection is of no further use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsIdentity:
    """Certificates and key of one end of a mutual TLS connection, as PEM text.

    Attributes:
        ca: the only certificate that peers may chain to.
        cert: this end's certificate.
        key: its private key.
    """

    ca: str = field(repr=False)
    cert: str = field(repr=False)
    key: str = field(repr=False)


def server_context(identity: TlsIdentity) -> ssl.SSLContext:
    """Return a context for the listening end: TLS 1.3, every client must show a certificate of the pool's CA."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    # Two tickets are two fifths of a handshake here, and resuming with one spares the client nothing: Python copies the
    # session, with the peer's certificate, for as long as a handshake saves (docs/scale.md).
    context.num_tickets = 0
    return context


_client_contexts: WeakValueDictionary[TlsIdentity, ssl.SSLContext] = WeakValueDictionary()


def client_context(identity: TlsIdentity) -> ssl.SSLContext:
    """Return a context for the dialling end: TLS 1.3, the server must show a certificate of the pool's CA.

    Those who dial with the same certificates at a time share it: it takes 80 KiB and 2 ms to make.
    """
    context = _client_contexts.get(identity)
    if context is None:
        context = _client_contexts[identity] = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    return context


def _context(protocol: int, identity: TlsIdentity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No host names: the CA signs for one pool only, so every certificate of it belongs to that pool.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.ca)
    # The ssl module reads a certificate chain from files only: https://github.com/python/cpython/issues/60691
    # A file would outlive a process that is killed at this point, and it holds the pool's key.
    with readable_path(identity.cert) as cert, readable_path(identity.key) as key:
        context.load_cert_chain(cert, key)
    return context


def forget_tls_errors() -> None:
    """Empty OpenSSL's queue of this thread's errors, in a few microseconds.

    With releases of Python since 2025 and OpenSSL 3.4 or newer (seen with 3.14.8 and 3.6.5), a write that fails leaves
    its error there, and the next read that finds no data, of whatever connection, raises it
    (https://github.com/python/cpython/issues/148594): after a write to a worker that was killed, a scheduler lost every
    other worker, and all clients.
    """
    with suppress(ssl.SSLError):  # after an error of its own the ssl module empties the queue
        _without_certificates().load_verify_locations(cadata="no certificate")


@cache
def _without_certificates() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read one frame.

    Raises:
        asyncio.IncompleteReadError: the peer closed the connection.
        FrameError: the frame is too large, or no map.
    """
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if size > MAX_FRAME_BYTES:  # before it is read: the length could have the reader allocate 4 GiB
        raise FrameError(f"the peer announces a frame of {size} bytes; {MAX_FRAME_BYTES} are allowed")
    body = await reader.readexactly(size)
    try:
        frame = cast("object", msgpack.unpackb(body, unicode_errors=TEXTS))
    except ValueError as error:
        raise FrameError(f"the peer sent a frame that is not msgpack: {error}") from error
    if not isinstance(frame, dict):
        raise FrameError(f"the peer sent a {type(frame).__name__} instead of a map")
    return cast("dict[str, Any]", frame)


def write_frame(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    """Put one frame into the writer's buffer; ``await writer.drain()`` sends it.

    Raises:
        FrameError: the frame is larger than the peer accepts.
    """
    body = cast("bytes", msgpack.packb(frame, unicode_errors=TEXTS))
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is larger than the {MAX_FRAME_BYTES} allowed")
    writer.write(LENGTH.pack(len(body)) + body)


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record from msgpack or JSON, which both return lists for tuples."""
    return {
        name: tuple(cast("Any", value)) if isinstance(value, list) else value for name, value in dict(values).items()
    }
