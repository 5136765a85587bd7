"""Connecting: what is configured, on which way, for how long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

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

from skyward.errors import SkywardError
from skyward.transport._dial import Dialled, dial_command, dial_tcp
from skyward.transport._errors import is_transient, translated
from skyward.transport._hostkeys import known_keys, unknown
from skyward.transport._login import Session, log_in
from skyward.transport._settings import Settings, settings
from skyward.transport.access import SSHTarget

__all__ = ["connect"]

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0


def connect(
    target: SSHTarget,
    by_jump: Callable[[str, int], socket.socket] | None,
    stopped: threading.Event,
    report: Callable[[str], None],
    gate: threading.Lock,
) -> Session:
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
) -> Session:
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
        return log_in(dialled, own, known, deadline=deadline, gate=gate)
    except SkywardError:
        raise
    except Exception as error:
        if complaint := dialled.complaint():
            raise ProxyCommandFailure(str(own.proxy_command), complaint) from error
        raise
