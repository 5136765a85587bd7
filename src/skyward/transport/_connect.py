"""Connecting to an SSH target: dial, verify the machine, authenticate the user, retry."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from paramiko import AuthenticationException, BadAuthenticationType
from paramiko.ssh_exception import IncompatiblePeer, ProxyCommandFailure
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
from skyward.transport._algorithms import agree, disabled, disagreement
from skyward.transport._errors import is_transient, translated
from skyward.transport._hostkeys import HostKey, KnownKeys, known_keys, unknown, verify
from skyward.transport._identities import Identities, Identity, identities
from skyward.transport._paramiko import Client, client_class, end_handshake, hush, packetizer_class
from skyward.transport._socket import Dialled, LiveSocket, dial_command, dial_tcp, resolve
from skyward.transport._ssh_config import Settings, settings
from skyward.transport.access import SSHTarget

__all__ = ["SSHSession", "connect"]

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_MOST_KEYS = 6
_STEP_TIMEOUT_S = 15.0
_PERSON_S = 50.0
"""Time for an answer that needs the agent, which may ask a person to touch a key or to unlock it."""
_KEEPALIVE = "keepalive@openssh.com"  # servers that do not support a request answer it, too, with a refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class SSHSession:
    """Connection on which the user is logged in.

    Attributes:
        client: paramiko's transport.
        socket: the socket below it.
    """

    client: Client
    socket: LiveSocket

    @property
    def alive(self) -> bool:
        """True while the connection lives, as far as is known."""
        return self.client.is_active()

    def ask(self) -> None:
        """Request an answer of the machine, and wait for it or for the end of the connection."""
        self.client.global_request(_KEEPALIVE, None, True)  # noqa: FBT003

    def close(self) -> None:
        """End the connection, and wait for its thread."""
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
    """Connect and log in; retry transient failures for the target's ``patience_s``. Blocks.

    Args:
        target: the machine.
        by_jump: opens a connection to a host and port through the last jump host, if there is one.
        stopped: ends the attempt when set.
        report: called with the reason of each failure before a retry.
        gate: see :class:`~skyward.transport._pump.Pump`.

    Raises:
        AuthenticationError: the user was refused, or has no key to log in with.
        ConfigurationError: the SSH configuration cannot be used.
        HostKeyError: the machine is unknown, or shows another key than the one on file.
        UnreachableError: the machine did not answer.
    """
    own = settings(target)  # outside of the retries: a broken configuration does not mend itself
    started = time.monotonic()
    patience_s = max(target.patience_s, own.dial_s or 0.0)
    retrying = Retrying(
        retry=retry_if_exception(is_transient),
        stop=stop_after_delay(patience_s) | stop_when_event_set(stopped),
        wait=wait_exponential(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        + wait_random(0, _FIRST_PAUSE_S),  # many nodes must not retry in step
        sleep=sleep_using_event(stopped),
        before_sleep=lambda state: report(str(state.outcome and state.outcome.exception())),
        reraise=True,
    )
    try:
        return retrying(_connect_once, own, by_jump, stopped, deadline=started + patience_s, gate=gate)
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
    if known.empty and not own.known_hosts_command:  # before dialling: nothing is sent to an unknown machine
        if by_jump is None and not own.proxy_command:
            resolve(own.host, own.port)  # a name without an address has no key that could be added
        raise unknown(known, own)
    dialled = _dial(own, by_jump, stopped, deadline=deadline)
    try:
        return _log_in(dialled, own, known, stopped, deadline=deadline, gate=gate)
    except SkywardError:
        raise
    except Exception as error:
        if complaint := dialled.complaint():  # explains more than the broken connection does
            raise ProxyCommandFailure(str(own.proxy_command), complaint) from error
        raise


def _dial(
    own: Settings, by_jump: Callable[[str, int], socket.socket] | None, stopped: threading.Event, *, deadline: float
) -> Dialled:
    if by_jump is not None:
        return Dialled(socket=by_jump(own.host, own.port))
    if own.proxy_command:
        return dial_command(own.proxy_command, shell=own.proxy_shell, passes_socket=own.proxy_passes_socket)
    return dial_tcp(
        own.host,
        own.port,
        deadline=deadline,
        stopped=stopped,
        family=own.family,
        bind=own.bind,
        address_s=own.dial_s,
    )


def _log_in(
    dialled: Dialled,
    settings: Settings,
    known: KnownKeys,
    stopped: threading.Event,
    *,
    deadline: float,
    gate: threading.Lock,
) -> SSHSession:
    """Agree on session keys, verify the machine's host key, and authenticate the user.

    Args:
        dialled: the connection; closed on failure.
        settings: user, keys and limits.
        known: the machine's keys on file.
        stopped: ends the attempt when set, also while the machine is silent.
        deadline: time on the monotonic clock at which to give up.
        gate: see :class:`~skyward.transport._pump.Pump`.

    Raises:
        AuthenticationError: the user was refused.
        HostKeyError: the machine shows another key than the one on file.
        Exception: the failure of the connection; paramiko's own exceptions.
    """
    sock = LiveSocket(dialled.socket, silence_s=settings.silence_s, gate=gate, on_close=dialled.hang_up)
    sock.stopped = stopped
    client: Any = None
    try:
        step_s = max(1.0, min(_STEP_TIMEOUT_S, deadline - time.monotonic()))
        client = _new_client(sock, known, settings, timeout_s=step_s)
        try:
            client.start_client(timeout=max(1.0, deadline - time.monotonic()))
        except IncompatiblePeer as error:
            raise IncompatiblePeer(disagreement(client) or str(error)) from error
        shown = client.get_remote_server_key()
        key = HostKey(type=shown.get_name(), blob=shown.asbytes())
        if settings.known_hosts_command or settings.check_address:
            known = known_keys(settings, shown=key, address=dialled.address)
        verify(key, known, settings, certificate=shown.public_blob.key_blob if shown.public_blob else b"")
        # Only after the machine has proved its identity: another one must not learn which keys the user has.
        with identities(settings) as found:
            _authenticate(client, settings, found)
        sock.stopped = None  # from here on, closing the session says goodbye to the machine
    except BaseException:
        if client is not None:
            end_handshake(client)
            client.close()
        sock.close()
        raise
    return SSHSession(client=cast("Client", client), socket=sock)


def _new_client(sock: LiveSocket, known: KnownKeys, settings: Settings, *, timeout_s: float) -> Any:
    client = client_class()(
        sock,
        packetizer_class=packetizer_class(),
        disabled_algorithms={"pubkeys": disabled(settings.algorithms)},
    )
    client.name = f"skyward-ssh {settings.host}"
    hush(client)
    client.banner_timeout = client.handshake_timeout = client.auth_timeout = timeout_s
    client.packetizer.renew_keys_after(*settings.rekey)
    agree(client, settings.algorithms, known)
    return client


def _authenticate(client: Any, settings: Settings, found: Identities) -> None:
    tried: list[str] = []
    # sshd disconnects after six failures (MaxAuthTries), and then the right key could not be tried any more.
    for identity in found.usable[:_MOST_KEYS]:
        if _accepted(client, settings, identity, first=not tried):
            return
        refusal = getattr(identity.key, "refusal", "")
        tried.append(f"{identity.name}, which the agent did not sign with: {refusal}" if refusal else identity.name)
        if not client.is_active():
            break
    raise AuthenticationError(_refusal(settings, found, tried))


def _accepted(client: Any, settings: Settings, identity: Identity, *, first: bool) -> bool:
    usual_s = client.auth_timeout
    if identity.in_agent:
        client.auth_timeout = _PERSON_S
    limit = time.monotonic() + client.auth_timeout
    try:
        further = client.auth_publickey(settings.user, identity.key)
    except BadAuthenticationType as error:
        raise AuthenticationError(
            f"{settings.user}@{settings.host} port {settings.port} does not accept keys, only {error.allowed_types}: "
            f"allow PubkeyAuthentication in the machine's sshd_config"
        ) from error
    except AuthenticationException:
        # paramiko raises this also when time is up or the connection is gone; a refused first key leaves it open.
        if time.monotonic() >= limit or (first and not client.is_active()):
            raise ConnectionResetError("the connection broke off during authentication") from None
        return False
    finally:
        client.auth_timeout = usual_s
    if further:
        raise AuthenticationError(
            f"{settings.user}@{settings.host} port {settings.port} requires more than a key ({', '.join(further)}): "
            f"Skyward can offer only keys; allow the key alone (AuthenticationMethods in its sshd_config)"
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
