"""Meaning of the exceptions of paramiko and the system: error for the caller, retry or not, advice."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Final

import paramiko
from paramiko import ssh_exception

from skyward.errors import AuthenticationError, ConfigurationError, SkywardError, UnreachableError
from skyward.transport._paramiko import RefusedSessionError, StaleConnectionError

__all__ = ["MEANINGS", "Meaning", "meaning", "translated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Meaning of an exception for a connection.

    Attributes:
        error: type of the error for the caller.
        transient: True if a retry may succeed.
        advice: next steps for the user.
    """

    error: type[SkywardError]
    transient: bool
    advice: str


_NOT_THERE = Meaning(
    error=UnreachableError,
    transient=True,
    advice="check that the machine runs, that sshd listens on that port, and that no firewall is in between",
)
_NO_ROUTE = Meaning(error=UnreachableError, transient=True, advice="check this machine's network, VPN and routes")
_BROKE_OFF = Meaning(
    error=UnreachableError,
    transient=True,
    advice="check that an SSH server listens there, and its log (it may have too many connections)",
)
_UNKNOWN_NAME = Meaning(
    error=UnreachableError, transient=False, advice="check the spelling, and HostName in the SSH configuration"
)
_REFUSED_USER = Meaning(
    error=AuthenticationError,
    transient=False,
    advice="check the user's name, and that one of these public keys is in ~/.ssh/authorized_keys there",
)
_UNLIKE = Meaning(
    error=UnreachableError,
    transient=False,
    advice="`ssh -v` shows what both sides offer",
)
_PROXY = Meaning(error=UnreachableError, transient=True, advice="check ProxyCommand in the SSH configuration")
_REFUSED_CHANNEL = Meaning(
    error=UnreachableError,
    transient=False,
    advice="check AllowTcpForwarding and PermitOpen in the machine's sshd_config",
)
_REFUSED_SESSION = Meaning(
    error=UnreachableError,
    transient=True,
    advice="check MaxSessions in the machine's sshd_config: ten or more are needed",
)
_CONFIGURED = Meaning(error=ConfigurationError, transient=False, advice="correct the SSH configuration")

# A test fails when paramiko has an exception without a row, or when a row hides a later one.
MEANINGS: Final[dict[type[BaseException], Meaning]] = {
    ssh_exception.BadAuthenticationType: _REFUSED_USER,
    ssh_exception.PartialAuthentication: _REFUSED_USER,
    ssh_exception.PasswordRequiredException: _REFUSED_USER,
    ssh_exception.UnableToAuthenticate: _REFUSED_USER,
    ssh_exception.AuthenticationException: _REFUSED_USER,
    ssh_exception.BadHostKeyException: _REFUSED_USER,
    ssh_exception.IncompatiblePeer: _UNLIKE,
    ssh_exception.MessageOrderError: _BROKE_OFF,
    ssh_exception.ChannelException: _REFUSED_CHANNEL,
    ssh_exception.ProxyCommandFailure: _PROXY,
    ssh_exception.CouldNotCanonicalize: _CONFIGURED,
    ssh_exception.ConfigParseError: _CONFIGURED,
    ssh_exception.NoValidConnectionsError: _NOT_THERE,
    paramiko.SSHException: _BROKE_OFF,
    StaleConnectionError: _BROKE_OFF,
    RefusedSessionError: _REFUSED_SESSION,
    EOFError: _BROKE_OFF,
    ConnectionRefusedError: _NOT_THERE,
    ConnectionError: _BROKE_OFF,
    TimeoutError: _NOT_THERE,
    OSError: _NO_ROUTE,
}
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
    found = next((known for kind, known in MEANINGS.items() if isinstance(error, kind)), None)
    if found is _NO_ROUTE and isinstance(error, OSError) and error.errno in _PERMANENT:
        return Meaning(error=UnreachableError, transient=False, advice=_NO_ROUTE.advice)
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
