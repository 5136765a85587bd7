"""One TLS connection that carries msgpack messages: the layer below a :class:`~skyward.wire.link.Link`.

TLS works in memory and the socket never blocks, so that any thread may write while another one reads. The event loop's
own TLS allows only its own thread, and each message would pay for the way there (docs/decisions/006).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack

from skyward.wire.frames import forget_tls_errors

__all__ = ["Connection", "MessageError"]

_LENGTH = struct.Struct("!I")
_LARGEST_BYTES = 64 << 20  # a session's messages have a few MiB: a larger length is no length
_READ_BYTES = 256 << 10
_PACKED_BYTES = 64 << 10
_RECORD_BYTES = 16 << 10  # the largest record of TLS


class MessageError(ConnectionError):
    """Bytes from the peer that are no message."""


class Connection:
    """A socket, its TLS, and the messages on it. Not thread-safe: its owner holds a lock."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        sock.settimeout(0)
        # A small message must not wait for the acknowledgement of the one before (Nagle).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._from_peer, self._to_peer = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._from_peer, self._to_peer, server_side=server_side)
        self._encrypted = memoryview(bytearray(_READ_BYTES))  # made once: see docs/decisions/007
        self._pack: Callable[[Any], bytes] = msgpack.Packer(
            buf_size=_PACKED_BYTES
        ).pack  # made once, for the same reason
        self._partial = bytearray()
        self._early: list[Any] = []
        self._unsent = memoryview(b"")

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # at once, although another thread may be polling it
        self._socket.close()

    async def connect(self, address: str) -> None:
        """Dial ``host:port``; the dialling end calls this first.

        Raises:
            OSError: there is no answer.
        """
        host, _, port = address.rpartition(":")
        await asyncio.get_running_loop().sock_connect(self._socket, (host, int(port)))

    async def handshake(self) -> None:
        """Perform the TLS handshake; nothing else may use the connection meanwhile.

        Raises:
            OSError: the peer is gone, or shows no certificate of the pool.
        """
        loop = asyncio.get_running_loop()
        agreed = False
        while not agreed:
            try:
                self._tls.do_handshake()
                agreed = True
            except ssl.SSLWantReadError:
                pass
            await loop.sock_sendall(
                self._socket, self._to_peer.read()
            )  # also at the end: the peer waits for the last part
            if not agreed:
                self._take_in(await loop.sock_recv_into(self._socket, self._encrypted))

    async def exchange(self, message: Any) -> None:
        """Send one whole message; nothing else may use the connection meanwhile."""
        self.write(message)
        await asyncio.get_running_loop().sock_sendall(self._socket, self._to_peer.read())

    async def first_message(self) -> Any:
        """Return the next message; nothing else may use the connection meanwhile."""
        loop = asyncio.get_running_loop()
        while not (messages := self._messages()):
            self._take_in(await loop.sock_recv_into(self._socket, self._encrypted))
        message, *self._early = messages  # the peer may send on before it has an answer to its greeting
        return message

    def write(self, message: Any) -> None:
        """Encrypt a message; :meth:`send` sends it."""
        body = self._pack(message)
        if len(body) < _RECORD_BYTES:  # one record: two would cost the peer another read
            self._tls.write(_LENGTH.pack(len(body)) + body)
            return
        self._tls.write(_LENGTH.pack(len(body)))
        rest = memoryview(body)
        while rest:
            rest = rest[self._tls.write(rest) :]

    def send(self) -> bool:
        """Send written messages as far as the socket accepts them; return True if that was all."""
        if not self._unsent:
            self._unsent = memoryview(self._to_peer.read())
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the messages that have come. To be called when the socket is readable, and once after the greeting.

        Raises:
            OSError: the connection is lost.
        """
        with suppress(BlockingIOError):
            self._take_in(self._socket.recv_into(self._encrypted))
        early, self._early = self._early, []
        return early + self._messages()

    def _take_in(self, nbytes: int) -> None:
        if not nbytes:
            raise ConnectionResetError("the peer hung up")
        self._from_peer.write(self._encrypted[:nbytes])

    def _messages(self) -> list[Any]:
        received = self._decrypt()
        messages: list[Any] = []
        start = 0
        while len(received) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(received, start)
            if size > _LARGEST_BYTES:
                raise MessageError(f"the peer announces a message of {size} bytes, more than {_LARGEST_BYTES}")
            begin, end = start + _LENGTH.size, start + _LENGTH.size + size
            if len(received) < end:
                break
            # Views are released at once: a bytearray cannot shrink while one is there.
            with memoryview(received) as whole, whole[begin:end] as body:
                messages.append(msgpack.unpackb(body))
            start = end
        if received is self._partial:
            del self._partial[:start]
        else:
            self._partial += received[start:]
        return messages

    def _decrypt(self) -> bytes | bytearray:
        """Return all decrypted bytes; a single record, as most messages are, is not copied."""
        alone = b""
        while data := self._record():
            if not (alone or self._partial):
                alone = data
                continue
            self._partial += alone
            self._partial += data
            alone = b""
        return alone or self._partial

    def _record(self) -> bytes:
        """Return the content of the next record; empty if it has not come."""
        # Checked first: a read that TLS refuses costs as much as a record (docs/decisions/007).
        if not (self._from_peer.pending or self._tls.pending()):
            return b""
        try:
            data = self._tls.read(_RECORD_BYTES)
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError:
            raise
        except OSError:  # of another connection: this one works in memory
            forget_tls_errors()
            return self._record()
        if not data:
            raise ConnectionResetError("the peer ended the connection")
        return data
