"""From an SSH target to a connection on which the user is logged in: dial, verify the machine, authenticate, retry."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import paramiko
from paramiko import AuthenticationException, BadAuthenticationType
from paramiko.ssh_exception import ProxyCommandFailure
from tenacity import (
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
    wait_random,
)

from skyward.errors import AuthenticationError, SkywardError
from skyward.transport._errors import is_transient, translated
from skyward.transport._hostkeys import HostKey, KnownKeys, known_keys, unknown, verify
from skyward.transport._identities import Identities, Identity, identities
from skyward.transport._paramiko import Client, end_handshake, packetizer_class
from skyward.transport._socket import Dialled, LiveSocket, dial_command, dial_tcp
from skyward.transport._ssh_config import Settings, settings
from skyward.transport.access import SSHTarget

__all__ = ["SSHSession", "connect"]

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
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
class SSHSession:
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


def connect(
    target: SSHTarget,
    by_jump: Callable[[str, int], socket.socket] | None,
    stopped: threading.Event,
    report: Callable[[str], None],
    gate: threading.Lock,
) -> SSHSession:
    """Connect and log in; try again, for as long as the target's patience lasts, where that may help. Blocks.

    Args:
        target: the machine.
        by_jump: makes a connection to a host and port through the machine before it, if there is one.
        stopped: ends the attempt when set.
        report: told why it has not succeeded yet, each time it is going to be tried again.
        gate: see :class:`~skyward.transport._pump.Pump`.

    Raises:
        AuthenticationError: the user was refused, or has no key to log in with.
        ConfigurationError: the SSH configuration cannot be used.
        HostKeyError: the machine is unknown, or another one.
        UnreachableError: it did not answer.
    """
    own = settings(target)
    started = time.monotonic()
    deadline = started + target.patience_s
    retrying = Retrying(
        retry=retry_if_exception(is_transient),
        stop=stop_after_delay(target.patience_s) | stop_when_event_set(stopped),
        wait=wait_exponential(_FIRST_PAUSE_S, _LONGEST_PAUSE_S) + wait_random(0, _FIRST_PAUSE_S),
        sleep=sleep_using_event(stopped),
        before_sleep=lambda state: report(str(state.outcome and state.outcome.exception())),
        reraise=True,
    )
    try:
        return retrying(_connect_once, own, by_jump, stopped, deadline=deadline, gate=gate)
    except Exception as error:
        waited = f"tried for {time.monotonic() - started:.0f} s" if is_transient(error) else "not tried again"
        named = "" if own.host == target.host else f"{target.host}: "
        raise translated(error, f"{named}{own} cannot be reached ({waited})") from error


def _connect_once(
    own: Settings,
    by_jump: Callable[[str, int], socket.socket] | None,
    stopped: threading.Event,
    *,
    deadline: float,
    gate: threading.Lock,
) -> SSHSession:
    known = known_keys(own)
    if not known.accepted:
        raise unknown(known, own)
    if by_jump is not None:
        dialled = Dialled(socket=by_jump(own.host, own.port))
    elif own.proxy_command:
        dialled = dial_command(own.proxy_command)
    else:
        dialled = dial_tcp(own.host, own.port, deadline=deadline, stopped=stopped)
    try:
        return _log_in(dialled, own, known, deadline=deadline, gate=gate)
    except SkywardError:
        raise
    except Exception as error:
        if complaint := dialled.complaint():
            raise ProxyCommandFailure(str(own.proxy_command), complaint) from error
        raise


def _log_in(
    dialled: Dialled, settings: Settings, known: KnownKeys, *, deadline: float, gate: threading.Lock
) -> SSHSession:
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
        client = _new_client(sock, known, name=settings.host, timeout_s=step_s)
        client.start_client(timeout=max(1.0, deadline - time.monotonic()))
        shown = client.get_remote_server_key()
        verify(HostKey(type=shown.get_name(), blob=shown.asbytes()), known, settings)
        with identities(settings) as found:
            _authenticate(client, settings, found)
    except BaseException:
        if client is not None:
            end_handshake(client)
            client.close()
        sock.close()
        raise
    return SSHSession(client=cast("Client", client), socket=sock)


def _new_client(sock: LiveSocket, known: KnownKeys, *, name: str, timeout_s: float) -> Any:
    quiet = logging.getLogger(_LOGGER)
    if quiet.level == logging.NOTSET:
        quiet.setLevel(logging.CRITICAL)  # what fails is raised, and said there
    client: Any = paramiko.Transport(cast("Any", sock), packetizer_class=packetizer_class())
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
