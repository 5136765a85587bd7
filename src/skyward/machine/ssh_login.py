"""Connecting to an SSH target: dial, verify the machine, authenticate the user, retry."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast
from weakref import WeakKeyDictionary

import paramiko
import psutil
from paramiko import AuthenticationException, BadAuthenticationType, ssh_exception
from paramiko.ssh_exception import IncompatiblePeer, ProxyCommandFailure
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential, wait_random

from skyward.base.descriptors import keep_from_forks
from skyward.base.platform import kill_group, receive_socket
from skyward.errors import AuthenticationError, ConfigurationError, SkywardError, UnreachableError
from skyward.machine.paramiko_parts import (
    RSA_SIGNATURES,
    Client,
    LiveSocket,
    RefusedSessionError,
    StaleConnectionError,
    end_handshake,
    new_client,
    packetizer_class,
    renews_keys,
    request_answer,
)
from skyward.machine.ssh_config import Settings, SSHTarget, settings
from skyward.machine.ssh_host_keys import HostKey, KnownKeys, known_keys, unknown, verify
from skyward.machine.ssh_user_keys import Identities, Identity, identities

_ADDRESS_TIMEOUT_S: Final = 10.0
_LEAST_S = 1.0
_COMPLAINT_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """A connected socket and its proxy command, if it has one.

    Attributes:
        socket: the socket.
        hang_up: ends the proxy command; to be called after the socket was closed.
        complaint: returns the end of the proxy command's standard error, after ``hang_up``.
        address: the machine's address, where it was dialled directly.
    """

    socket: socket.socket
    hang_up: Callable[[], None] | None = None
    complaint: Callable[[], str] = str
    address: str = ""


def resolve(host: str, port: int, family: int = socket.AF_UNSPEC) -> Sequence[tuple[Any, ...]]:
    """Return the addresses of a name, of that family, as ``socket.getaddrinfo`` does.

    Raises:
        OSError: the name has none, or no resolver answers.
    """
    try:
        return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no valid host name") from error


async def dial_tcp(
    host: str,
    port: int,
    *,
    family: int = socket.AF_UNSPEC,
    bind: tuple[str, str] = ("", ""),
    address_s: float = _ADDRESS_TIMEOUT_S,
    deadline: float = math.inf,
) -> Dialled:
    """Connect to the first address that answers; IPv4 comes first.

    Args:
        host: name or address.
        port: TCP port.
        family: family of addresses; all by default.
        bind: own address and interface to connect from; empty for any.
        address_s: time for one address.
        deadline: time on the monotonic clock at which to give up; an address has a second all the same.

    Raises:
        OSError: no address answered; the failure of the last one.
    """
    addresses = await asyncio.to_thread(resolve, host, port, family)
    failure: OSError = TimeoutError("the host has no address")
    # One at a time: an address that does not answer costs up to ten seconds.
    for own_family, kind, protocol, _, address in sorted(addresses, key=lambda info: info[0] != socket.AF_INET):
        sock = keep_from_forks(socket.socket(own_family, kind, protocol))
        try:
            sock.settimeout(0)
            if own := await asyncio.to_thread(_own_address, own_family, *bind) if any(bind) else None:
                sock.bind(own)
            await _connect(sock, address, max(_LEAST_S, min(deadline - time.monotonic(), address_s)))
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return Dialled(socket=sock, address=str(address[0]))
    raise failure


async def _connect(sock: socket.socket, address: Any, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.get_running_loop().sock_connect(sock, address)
    except OSError as error:  # asyncio's has other words than the system's
        raise OSError(error.errno, os.strerror(error.errno)) if error.errno else TimeoutError("no answer") from error


def _own_address(family: int, address: str, interface: str) -> Any:
    """Return the socket address of an own address, or of the first one of an interface."""
    own = [each.address for each in psutil.net_if_addrs().get(interface, ()) if each.family == family]
    if interface and not own and not address:
        raise OSError(errno.EADDRNOTAVAIL, f"the interface {interface} (BindInterface) has no address to connect from")
    return socket.getaddrinfo(address or own[0], None, family, socket.SOCK_STREAM)[0][4]


def dial_command(command: str, *, shell: str = "/bin/sh") -> Dialled:
    """Start a proxy command in a shell; its input and output carry the connection.

    Raises:
        OSError: the process cannot be started.
    """
    ours, theirs = map(keep_from_forks, socket.socketpair())
    # A file, as a pipe that nobody reads would block a talkative command.
    complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `hang_up`
    with theirs:
        try:
            process = subprocess.Popen(
                [shell, "-c", f"exec {command}"],  # exec: a kill must reach the command, not a shell above it
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=complaints,
                start_new_session=True,  # Ctrl-C in the terminal must not end the connection before the pool is closed
            )
        except BaseException:
            ours.close()
            complaints.close()
            raise

    printed = ""

    def hang_up() -> None:
        nonlocal printed
        with contextlib.suppress(ProcessLookupError):
            kill_group(process.pid)  # what the command has started holds the connection, too
        process.wait()
        complaints.seek(0)
        printed = complaints.read().decode(errors="replace").strip()[-_COMPLAINT_CHARACTERS:]
        complaints.close()

    return Dialled(socket=ours, hang_up=hang_up, complaint=lambda: printed)


async def _receive_socket(command: Dialled) -> Dialled:
    """Return the connected socket that a proxy command passes through its output (ProxyUseFdpass).

    Raises:
        OSError: it passes none.
    """
    assert command.hang_up is not None
    command.socket.settimeout(_ADDRESS_TIMEOUT_S)
    try:
        with command.socket:
            passed = await asyncio.to_thread(receive_socket, command.socket)
    except BaseException as error:
        await _in_thread(command.hang_up)
        if not isinstance(error, OSError):
            raise
        raise ConnectionAbortedError(
            errno.ECONNABORTED, f"the proxy command passes no socket: {command.complaint()}"
        ) from error
    return replace(command, socket=keep_from_forks(passed))


async def _in_thread(clean_up: Callable[[], object]) -> None:
    """Run a clean-up that waits for a process; in the loop if the interpreter starts no thread any more."""
    try:
        await asyncio.to_thread(clean_up)
    except RuntimeError:
        clean_up()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Meaning of an exception for a connection.

    Attributes:
        transient: True if a retry may succeed.
        advice: next steps for the user.
        error: type of the error for the caller.
    """

    transient: bool
    advice: str
    error: type[SkywardError] = UnreachableError


_NOT_THERE = Meaning(
    transient=True,
    advice="check that the machine runs, that sshd listens on that port, and that no firewall is in between",
)
_NO_ROUTE = Meaning(transient=True, advice="check this machine's network, VPN and routes")
_UNKNOWN_NAME = Meaning(transient=False, advice="check the spelling, and HostName in the SSH configuration")
_REFUSED_USER = Meaning(
    error=AuthenticationError,
    transient=False,
    advice="check the user's name, and that one of these public keys is in ~/.ssh/authorized_keys there",
)
_BROKE_OFF = Meaning(
    transient=True, advice="check that an SSH server listens there, and its log (it may have too many connections)"
)

# A test fails when paramiko has an exception without a row, or when a row hides a later one.
MEANINGS: Final[Sequence[tuple[tuple[type[BaseException], ...], Meaning]]] = (
    ((AuthenticationException, ssh_exception.BadHostKeyException), _REFUSED_USER),
    ((IncompatiblePeer,), Meaning(transient=False, advice="`ssh -v` shows what both sides offer")),
    (
        (ssh_exception.ChannelException,),
        Meaning(transient=False, advice="check AllowTcpForwarding and PermitOpen in the machine's sshd_config"),
    ),
    ((ProxyCommandFailure,), Meaning(transient=True, advice="check ProxyCommand in the SSH configuration")),
    (
        (ssh_exception.CouldNotCanonicalize, ssh_exception.ConfigParseError),
        Meaning(error=ConfigurationError, transient=False, advice="correct the SSH configuration"),
    ),
    (
        (RefusedSessionError,),
        Meaning(transient=True, advice="check MaxSessions in the machine's sshd_config: ten or more are needed"),
    ),
    ((ssh_exception.NoValidConnectionsError, ConnectionRefusedError, TimeoutError), _NOT_THERE),
    ((paramiko.SSHException, StaleConnectionError, EOFError, ConnectionError), _BROKE_OFF),
    ((OSError,), _NO_ROUTE),
)
"""From the particular to the general: the first match counts."""

_UNKNOWN_NAMES = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_CONNECT_FAILED = 2  # RFC 4254: the machine could not connect to the forwarded port
# The system itself refuses with these, so that a retry gets the same answer.
_PERMANENT = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EAFNOSUPPORT}


def meaning(error: BaseException) -> Meaning | None:
    """Return the meaning of an exception; None for Skyward's own errors and for bugs."""
    if isinstance(error, SkywardError):
        return None
    if isinstance(error, socket.gaierror):  # EAI_AGAIN, a resolver that is down, may pass
        return _UNKNOWN_NAME if error.errno in _UNKNOWN_NAMES else _NO_ROUTE
    if isinstance(error, ssh_exception.ChannelException) and error.code == _CONNECT_FAILED:
        return _NOT_THERE
    found = next((known for kinds, known in MEANINGS if isinstance(error, kinds)), None)
    if found is _NO_ROUTE and isinstance(error, OSError) and error.errno in _PERMANENT:
        return replace(_NO_ROUTE, transient=False)
    return found


def translated(error: BaseException, what: str) -> BaseException:
    """Return the error for the caller; ``what`` is the failure: ``"gpu1 port 22 cannot be reached"``."""
    found = meaning(error)
    if found is None:
        return error
    text = str(error) or type(error).__name__
    return found.error(f"{what}: {text}; {found.advice}")


def is_transient(error: BaseException) -> bool:
    """Return True if a retry may succeed."""
    found = meaning(error)
    return found is not None and found.transient


_HOST_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
_CERTIFICATE = "-cert-v01@openssh.com"
_NO_ALGORITHMS = {"ext-info-s", "kex-strict-s-v00@openssh.com"}
_OLD = ("sha1", "md5", "-cbc", "arcfour", "ssh-dss", "ssh-rsa", "group1-", "group14-sha1")
_LISTS = (
    ("kex_algo_list", "KexAlgorithms", "kex"),
    ("server_key_algo_list", "HostKeyAlgorithms", "key_types"),
    ("server_encrypt_algo_list", "Ciphers", "ciphers"),
    ("server_mac_algo_list", "MACs", "digests"),
)


def agree(client: Any, allowed: Mapping[str, Sequence[str]], known: KnownKeys) -> None:
    """Have a connection offer what the SSH configuration allows, and prefer host keys that are on file.

    Raises:
        ConfigurationError: the configuration allows nothing that paramiko has.
    """
    options = client.get_security_options()
    macs = _modern(options.digests, first="etm")
    options.kex = _allowed(options.kex, allowed, "KexAlgorithms")
    options.ciphers = _allowed(_modern(options.ciphers, first="gcm"), allowed, "Ciphers")
    options.digests = macs if all("gcm" in cipher for cipher in options.ciphers) else _allowed(macs, allowed, "MACs")
    options.key_types = _allowed(_preferred(known), allowed, "HostKeyAlgorithms")


def _modern(names: Iterable[str], *, first: str) -> tuple[str, ...]:
    """Return the algorithms that are not outdated; before the others those whose name contains ``first``."""
    return tuple(sorted((name for name in names if not _is_outdated(name)), key=lambda name: first not in name))


def _is_outdated(name: str) -> bool:
    return any(part in name for part in _OLD)


def disabled(allowed: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the algorithms of the user's keys that the configuration excludes."""
    names = allowed.get("PubkeyAcceptedAlgorithms", ())
    return [name for name in _HOST_KEY_TYPES if names and name not in names and name + _CERTIFICATE not in names]


def disagreement(client: Any) -> str:
    """Return both sides' lists where they have nothing in common; empty if that is not the reason."""
    options = client.get_security_options()
    for field, option, ours in _LISTS:
        offered = [name for name in client.offered.get(field, ()) if name not in _NO_ALGORITHMS]
        mine: Sequence[str] = getattr(options, ours)
        if offered and not {*mine} & {*offered}:
            return (
                f"no {option} in common: the machine offers {', '.join(offered)}; this client {', '.join(mine)}. "
                f"{_reason(offered, option)}"
            )
    return ""


def _reason(offered: Iterable[str], option: str) -> str:
    if all(map(_is_outdated, offered)):
        return "All that the machine offers is outdated: update its SSH server"
    return (
        f"The machine is stricter than this client, or your SSH configuration is: allow one of this client's in the "
        f"machine's sshd_config ({option}), or update paramiko and cryptography here"
    )


def _allowed(ours: Sequence[str], allowed: Mapping[str, Sequence[str]], option: str) -> tuple[str, ...]:
    chosen = tuple(name for name in ours if name in allowed.get(option, ours))
    if not chosen:
        raise ConfigurationError(
            f"{option} of the SSH configuration allows only {', '.join(allowed[option])}; Skyward's client has only "
            f"{', '.join(ours)}: allow one of these"
        )
    return chosen


def _preferred(known: KnownKeys) -> tuple[str, ...]:
    """Return the types of host keys, those on file first."""
    # A machine shows the first of these types that it has: with another order it could show a key that is not on file.
    on_file = {name for key in known.accepted for name in (RSA_SIGNATURES if key.type == "ssh-rsa" else [key.type])}
    plain = sorted(_HOST_KEY_TYPES, key=lambda name: name not in on_file)
    certified = [name + _CERTIFICATE for name in _HOST_KEY_TYPES] if known.authorities else []
    return (*certified, *plain)


_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_MOST_KEYS = 6
_STEP_TIMEOUT_S = 15.0
_PERSON_S = 50.0
"""Time for an answer that needs the agent, which may ask a person to touch a key or to unlock it."""
_LOGINS: Final = 16
"""Most logins at a time. Each holds a thread, and the other half of them must stay free for machines that answer."""
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
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

    @property
    def may_send(self) -> bool:
        """True if a chunk can be sent without waiting for the machine."""
        return self.socket.is_writable and not renews_keys(self.client)

    def ask(self) -> bool:
        """Request an answer of the machine, in paramiko's thread, where nothing may wait; False if that would."""
        if not self.may_send:
            return False
        request_answer(self.client, _KEEPALIVE)
        return True

    def close(self) -> None:
        """End the connection, and wait for its thread."""
        self.client.close()
        self.socket.close()
        self.client.join(_STEP_TIMEOUT_S)


Dial: TypeAlias = Callable[[str, int], Awaitable[socket.socket]]


async def connect(
    target: SSHTarget, by_jump: Dial | None, report: Callable[[str], None], gate: threading.Lock
) -> SSHSession:
    """Connect and log in; retry transient failures for the target's ``patience_s``. A cancellation ends the attempt.

    Args:
        target: the machine.
        by_jump: opens a connection to a host and port through the last jump host, if there is one.
        report: called with the reason of each failure before a retry.
        gate: see :class:`~skyward.machine.ssh_connection.SSHConnection`.

    Raises:
        AuthenticationError: the user was refused, or has no key to log in with.
        ConfigurationError: the SSH configuration cannot be used.
        HostKeyError: the machine is unknown, or shows another key than the one on file.
        UnreachableError: the machine did not answer.
    """
    # Outside of the retries: a broken configuration does not mend itself.
    own = await asyncio.to_thread(settings, target)
    started = time.monotonic()
    patience_s = max(target.patience_s, own.dial_s or 0.0)
    retrying = AsyncRetrying(
        retry=retry_if_exception(is_transient),
        stop=stop_after_delay(patience_s),
        wait=wait_exponential(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        + wait_random(0, _FIRST_PAUSE_S),  # many nodes must not retry in step
        before_sleep=lambda state: report(str(state.outcome and state.outcome.exception())),
        reraise=True,
    )
    try:
        return await retrying(_connect_once, own, by_jump, gate, deadline=started + patience_s)
    except Exception as error:
        waited = f"tried for {time.monotonic() - started:.0f} s" if is_transient(error) else "not tried again"
        named = "" if own.host == target.host else f"{target.host}: "
        raise translated(error, f"{named}{own} cannot be reached ({waited})") from error


async def _connect_once(own: Settings, by_jump: Dial | None, gate: threading.Lock, *, deadline: float) -> SSHSession:
    known = await asyncio.to_thread(known_keys, own)
    if known.empty and not own.known_hosts_command:  # before dialling: nothing is sent to an unknown machine
        if by_jump is None and not own.proxy_command:
            await asyncio.to_thread(resolve, own.host, own.port)  # without an address it has no key to be added
        raise unknown(known, own)
    dialled = await _dial(own, by_jump, deadline=deadline)
    sock = LiveSocket(dialled.socket, silence_s=own.silence_s, gate=gate, on_close=dialled.hang_up)
    left_s = deadline - time.monotonic()
    try:
        async with _logins():
            deadline = time.monotonic() + left_s  # the wait for a turn is not the machine's fault
            return await asyncio.to_thread(_log_in, sock, own, known, address=dialled.address, deadline=deadline)
    except BaseException as error:
        # Ends the thread of a cancelled attempt, too.
        await _in_thread(sock.close) if dialled.hang_up else sock.close()
        explained = isinstance(error, SkywardError) or not isinstance(error, Exception)
        if not explained and (complaint := dialled.complaint()):  # explains more than the broken connection does
            raise ProxyCommandFailure(str(own.proxy_command), complaint) from error
        raise


def _logins() -> asyncio.Semaphore:
    """Return the limit on the logins at a time in this event loop."""
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_LOGINS))


async def _dial(own: Settings, by_jump: Dial | None, *, deadline: float) -> Dialled:
    if by_jump is not None:
        return Dialled(socket=await by_jump(own.host, own.port))
    if own.proxy_command:
        command = dial_command(own.proxy_command, shell=own.proxy_shell)
        return await _receive_socket(command) if own.proxy_passes_socket else command
    return await dial_tcp(
        own.host,
        own.port,
        family=own.family,
        bind=own.bind,
        address_s=own.dial_s or _ADDRESS_TIMEOUT_S,
        deadline=deadline,
    )


def _log_in(sock: LiveSocket, settings: Settings, known: KnownKeys, *, address: str, deadline: float) -> SSHSession:
    """Agree on session keys, verify the machine's host key, and authenticate the user. Blocks.

    Args:
        sock: the connection; the caller closes it after a failure.
        settings: user, keys and limits.
        known: the machine's keys on file.
        address: its address, where it was dialled directly.
        deadline: time on the monotonic clock at which to give up.

    Raises:
        AuthenticationError: the user was refused.
        HostKeyError: the machine shows another key than the one on file.
        Exception: the failure of the connection; paramiko's own exceptions.
    """
    step_s = max(_LEAST_S, min(_STEP_TIMEOUT_S, deadline - time.monotonic()))
    client = new_client(
        sock,
        settings.host,
        timeout_s=step_s,
        packetizer_class=packetizer_class(),
        disabled_algorithms={"pubkeys": disabled(settings.algorithms)},
    )
    client.packetizer.renew_keys_after(*settings.rekey)
    agree(client, settings.algorithms, known)
    try:
        try:
            client.start_client(timeout=max(_LEAST_S, deadline - time.monotonic()))
        except IncompatiblePeer as error:
            raise IncompatiblePeer(disagreement(client) or str(error)) from error
        shown = client.get_remote_server_key()
        key = HostKey(type=shown.get_name(), blob=shown.asbytes())
        if settings.known_hosts_command or settings.check_address:
            known = known_keys(settings, shown=key, address=address)
        verify(key, known, settings, certificate=shown.public_blob.key_blob if shown.public_blob else b"")
        # Only after the machine has proved its identity: another one must not learn which keys the user has.
        with identities(settings) as found:
            _authenticate(client, settings, found)
    except BaseException:
        end_handshake(client)
        client.close()
        raise
    return SSHSession(client=cast("Client", client), socket=sock)


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
