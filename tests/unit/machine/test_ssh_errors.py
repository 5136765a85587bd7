from __future__ import annotations

import errno
import socket
from inspect import getmembers, isclass

import pytest
from paramiko import ssh_exception

from skyward.errors import AuthenticationError, HostKeyError, SkywardError, UnreachableError
from skyward.machine.ssh_login import MEANINGS, is_transient, meaning, translated

EXCEPTIONS = [
    kind
    for _, kind in getmembers(ssh_exception, isclass)
    if issubclass(kind, Exception) and kind.__module__ == ssh_exception.__name__
]

BROKEN_OFF = {ssh_exception.MessageOrderError}
"""Those that mean no more than their base class."""


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_every_exception_of_paramikos_has_a_row_of_its_own(kind: type[Exception]) -> None:
    named = {each for kinds, _ in MEANINGS for each in kinds} - {ssh_exception.SSHException}

    assert kind is ssh_exception.SSHException or named & {*kind.__mro__} or kind in BROKEN_OFF


def test_no_row_is_hidden_by_one_before_it() -> None:
    kinds = [kind for several, _ in MEANINGS for kind in several]

    hidden = [(kind, before) for n, kind in enumerate(kinds) for before in kinds[:n] if issubclass(kind, before)]

    assert hidden == []


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        TimeoutError("no answer"),
        OSError(errno.EHOSTUNREACH, "no route"),
        OSError(errno.ENETUNREACH, "no network"),
        socket.gaierror(socket.EAI_AGAIN, "not now"),
        EOFError(),
        ssh_exception.SSHException("Error reading SSH protocol banner"),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    assert is_transient(error)
    assert isinstance(translated(error, "box"), UnreachableError)


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_NONAME, "unknown"),
        ssh_exception.AuthenticationException("refused"),
        ssh_exception.IncompatiblePeer("too old"),
        ssh_exception.ChannelException(1, "prohibited"),
        OSError(errno.EACCES, "forbidden"),
        HostKeyError("another machine"),
        ValueError("a mistake in the program"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(error: Exception) -> None:
    assert not is_transient(error)


def test_error_says_what_was_tried_what_happened_and_what_to_check() -> None:
    said = str(translated(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "box port 22 is away"))

    assert said.startswith("box port 22 is away: [Errno 111] Connection refused; check that")


def test_refused_login_is_an_authentication_error() -> None:
    assert isinstance(translated(ssh_exception.AuthenticationException(), "box"), AuthenticationError)


@pytest.mark.parametrize("error", [KeyError("a mistake"), SkywardError("explained")])
def test_other_exceptions_stay_as_they_are(error: Exception) -> None:
    assert meaning(error) is None
    assert translated(error, "box") is error
