"""From a connected socket to a connection on which the user is logged in, to a machine that is the one it should be."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, cast

import paramiko
from paramiko import AuthenticationException, BadAuthenticationType
from paramiko.common import MSG_CHANNEL_CLOSE
from paramiko.packet import Packetizer

from skyward.errors import AuthenticationError
from skyward.transport._dial import Dialled
from skyward.transport._hostkeys import HostKey, KnownKeys, verify
from skyward.transport._keys import Identities, Identity, identities
from skyward.transport._paramiko import Client
from skyward.transport._settings import Settings
from skyward.transport._socket import LiveSocket

__all__ = ["Session", "log_in"]

_LOGGER: Final = "skyward.transport.paramiko"
_CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "aes128-ctr",
    "aes192-ctr",
    "aes256-ctr",
)
_MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512")
_HOST_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")
_MOST_KEYS = 6
_STEP_TIMEOUT_S = 15.0
_KEEPALIVE = "keepalive@openssh.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A connection on which the user is logged in.

    Attributes:
        client: paramiko's.
        socket: what it runs over.
    """

    client: Client
    socket: LiveSocket

    @property
    def alive(self) -> bool:
        """Whether it is still there, as far as is known."""
        return self.client.is_active()

    def ask(self) -> None:
        """Have the machine say something; waits for it, or for the connection's end."""
        self.client.global_request(_KEEPALIVE, None, True)  # noqa: FBT003

    def close(self) -> None:
        """End it, and wait for its thread."""
        self.client.close()
        self.socket.close()
        self.client.join(_STEP_TIMEOUT_S)


class _Packets(Packetizer):
    """New keys as often as OpenSSH has them with these ciphers (RFC 4344), not every 512 MiB: traffic pauses for it.

    That a channel was closed is answered while nobody sends on one: paramiko's thread calls :meth:`read_message`,
    answers, and calls it again.
    """

    REKEY_BYTES = 1 << 35

    def __init__(self, sock: LiveSocket) -> None:
        super().__init__(cast("Any", sock))
        self._live_socket = sock

    def read_message(self) -> tuple[int, Any]:
        self._live_socket.open_gate()
        kind, message = super().read_message()
        if kind == MSG_CHANNEL_CLOSE:
            self._live_socket.shut_gate()
        return kind, message


def log_in(dialled: Dialled, settings: Settings, known: KnownKeys, *, deadline: float, gate: threading.Lock) -> Session:
    """Agree on keys, verify the machine's, and prove who the user is.

    Args:
        dialled: the connection; closed on failure.
        settings: who logs in, and how.
        known: the machine's keys.
        deadline: on the monotonic clock.
        gate: see :class:`~skyward.transport._pump.Pump`.

    Raises:
        AuthenticationError: the user was refused.
        HostKeyError: the machine is another one.
        Exception: whatever paramiko raises of, when the connection fails.
    """
    sock = LiveSocket(dialled.socket, silence_s=settings.silence_s, gate=gate, on_close=dialled.hang_up)
    client: Any = None
    try:
        step_s = max(1.0, min(_STEP_TIMEOUT_S, deadline - time.monotonic()))
        client = _client(sock, known, name=settings.host, timeout_s=step_s)
        client.start_client(timeout=max(1.0, deadline - time.monotonic()))
        shown = client.get_remote_server_key()
        verify(HostKey(type=shown.get_name(), blob=shown.asbytes()), known, settings)
        with identities(settings) as found:
            _authenticate(client, settings, found)
    except BaseException:
        if client is not None:
            client.packetizer.complete_handshake()  # else its timer waits on
            client.close()
        sock.close()
        raise
    return Session(client=cast("Client", client), socket=sock)


def _client(sock: LiveSocket, known: KnownKeys, *, name: str, timeout_s: float) -> Any:
    quiet = logging.getLogger(_LOGGER)
    if quiet.level == logging.NOTSET:
        quiet.setLevel(logging.CRITICAL)  # what fails is raised, and said there
    client: Any = paramiko.Transport(cast("Any", sock), packetizer_class=_Packets)
    client.name = f"skyward-ssh {name}"
    client.set_log_channel(_LOGGER)
    client.banner_timeout = client.handshake_timeout = client.auth_timeout = timeout_s
    options = client.get_security_options()
    options.ciphers = _CIPHERS
    options.digests = _MACS
    options.key_types = _preferred(known)
    return client


def _preferred(known: KnownKeys) -> tuple[str, ...]:
    """The kinds of keys that are on file first; a machine that has none of them shows another, which is refused."""
    on_file = {name for key in known.accepted for name in (_RSA_SIGNATURES if key.type == "ssh-rsa" else [key.type])}
    return tuple(sorted(_HOST_KEY_TYPES, key=lambda name: name not in on_file))


def _authenticate(client: Any, settings: Settings, found: Identities) -> None:
    tried: list[str] = []
    for identity in found.usable[:_MOST_KEYS]:
        if _accepted(client, settings, identity, first=not tried):
            return
        tried.append(identity.name)
        if not client.is_active():
            break
    raise AuthenticationError(_refusal(settings, found, tried))


def _accepted(client: Any, settings: Settings, identity: Identity, *, first: bool) -> bool:
    limit = time.monotonic() + client.auth_timeout
    try:
        further = client.auth_publickey(settings.user, identity.key)
    except BadAuthenticationType as error:
        raise AuthenticationError(
            f"{settings.user}@{settings.host} port {settings.port} does not accept keys, only {error.allowed_types}: "
            f"allow PubkeyAuthentication in the machine's sshd_config"
        ) from error
    except AuthenticationException:
        if time.monotonic() >= limit or (first and not client.is_active()):
            raise ConnectionResetError("the connection broke off during authentication") from None
        return False
    if further:
        raise AuthenticationError(
            f"{settings.user}@{settings.host} port {settings.port} wants more than a key ({', '.join(further)}): "
            f"that cannot be given here; allow the key alone (AuthenticationMethods in its sshd_config)"
        )
    return True


def _refusal(settings: Settings, found: Identities, tried: list[str]) -> str:
    place = f"{settings.host} port {settings.port}"
    if not tried:
        unusable = "; ".join(found.unusable) or "ssh-agent has none, and none of the usual files exists"
        return (
            f"there is no private key to log in with as {settings.user} on {place}: {unusable}. "
            f"Name one (key_path=, or IdentityFile in the SSH configuration), or start ssh-agent and `ssh-add` it."
        )
    left = f" Could not be tried: {'; '.join(found.unusable)}." if found.unusable else ""
    unasked = len(found.usable) - len(tried)
    more = f" {unasked} more were not tried; name the right one (key_path=, or IdentityFile)." if unasked else ""
    return (
        f"{place} refused {settings.user} with every key tried ({', '.join(tried)}). Check the user's name, and that "
        f"the public key is in ~/.ssh/authorized_keys there (`ssh-copy-id`), in files that only their owner can "
        f"write.{left}{more}"
    )
