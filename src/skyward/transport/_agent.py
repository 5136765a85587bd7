"""Client of ssh-agent: lists its keys, and has it sign with them."""

from __future__ import annotations

import socket
import struct
from typing import Final

from paramiko import Message, PKey, SSHException
from paramiko.pkey import PublicBlob

from skyward._concurrency.descriptors import keep_from_forks

__all__ = ["Agent", "AgentKey"]

_LIST, _LISTED, _SIGN, _SIGNED = 11, 12, 13, 14  # draft-ietf-sshm-ssh-agent
_RSA_FLAGS = {"rsa-sha2-256": 2, "rsa-sha2-512": 4}
_CERTIFICATE: Final = "-cert-v01@openssh.com"
_ANSWER_S = 10.0
_SIGN_S = 45.0
"""Time for a person to touch a key or to unlock it."""
_LONGEST_ANSWER = 1 << 20
_SIGNATURE_BYTES = 64


class AgentKey(PKey):
    """Key that an agent holds. paramiko logs in with it as with a key of its own.

    Args:
        agent: the agent.
        blob: the public key, or the certificate.
        comment: the agent's comment.

    Attributes:
        blob: as given.
        comment: as given.
        public_blob: a certificate to show instead of the public key; None for the key itself.
        refusal: the reason for which the agent did not sign; empty if it did.
    """

    def __init__(self, agent: Agent, blob: bytes, comment: str) -> None:
        self._agent = agent
        self.blob = blob
        self.comment = comment
        self.name = Message(blob).get_text()
        self.public_blob: PublicBlob | None = None
        self.refusal = ""

    def asbytes(self) -> bytes:
        """Return the public key, or the certificate."""
        return self.blob

    def get_name(self) -> str:
        """Return the type of the key."""
        return self.name

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> Message:
        """Return the agent's signature; a wrong one if it does not sign."""
        # paramiko's thread signs: an exception would end the connection, and the other keys could not be tried.
        try:
            return Message(self._agent.sign(self.blob, data, (algorithm or "").removesuffix(_CERTIFICATE)))
        except (OSError, SSHException) as error:
            self.refusal = str(error)
        wrong = Message()
        wrong.add_string(algorithm or self.name)
        wrong.add_string(bytes(_SIGNATURE_BYTES))
        return wrong


class Agent:
    """Connection to an agent.

    Args:
        path: its socket.
        sign_s: time for one signature.

    Raises:
        OSError: no agent answers there.
        SSHException: another program than an agent answers.
    """

    def __init__(self, path: str, *, sign_s: float = _SIGN_S) -> None:
        self._path = path
        self._sign_s = sign_s
        self._socket = _connected(path)
        try:
            answer = self._ask(bytes([_LIST]), _LISTED)
            self.keys = [self._key(answer) for _ in range(answer.get_int())]
        except BaseException:
            self._socket.close()
            raise

    def sign(self, blob: bytes, data: bytes, algorithm: str) -> bytes:
        """Return a signature.

        Raises:
            SSHException: the agent refuses to sign.
            OSError: it does not answer.
        """
        request = Message()
        request.add_byte(bytes([_SIGN]))
        request.add_string(blob)
        request.add_string(data)
        request.add_int(_RSA_FLAGS.get(algorithm, 0))
        self._socket.settimeout(self._sign_s)
        try:
            return bytes(self._ask(request.asbytes(), _SIGNED).get_binary())
        except OSError:  # the answer may still come, and must not count for the next key
            self._socket.close()
            self._socket = _connected(self._path)
            raise

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _key(self, answer: Message) -> AgentKey:
        blob = answer.get_binary()
        return AgentKey(self, blob, answer.get_binary().decode(errors="replace"))

    def _ask(self, request: bytes, kind: int) -> Message:
        self._socket.sendall(struct.pack(">I", len(request)) + request)
        (length,) = struct.unpack(">I", self._received(4))
        if length > _LONGEST_ANSWER:
            raise SSHException("the answer of ssh-agent is too long")
        answer = Message(self._received(length))
        if answer.get_byte() != bytes([kind]):
            raise SSHException("ssh-agent refuses")
        return answer

    def _received(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            if not (part := self._socket.recv(length - len(data))):
                raise SSHException("ssh-agent has closed the connection")
            data += part
        return data


def _connected(path: str) -> socket.socket:
    sock = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.settimeout(_ANSWER_S)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
