"""Check of a login: whether the machine runs a command as it is given, whether it forwards ports, and what prevents it.

The shell of a login runs the user's startup files first, or is no shell at all, and the server may run another command
instead. The check's command reports twice: before and after it reads a line from its input. Only that line is sent, so
that whatever else reads it does no harm.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from paramiko import ssh_exception

from skyward.transport._paramiko import Client, StaleConnectionError, open_channel

__all__ = ["Login", "forwards", "login_fault", "try_login"]

_WAIT_S = 8.0
"""Time to reach the command. Each command of a pool takes as long again; startup files of a cluster need up to 5 s."""
_STATUS_S = 1.0
_SETTLE_S = 0.3
_LINGER_S = 1.0
_READ_BYTES = 1 << 16
_SHOWN_CHARS = 500
_TOKEN_BYTES = 8
_PROHIBITED = 1  # RFC 4254: SSH_OPEN_ADMINISTRATIVELY_PROHIBITED
_ATTEMPTS = 3

_STARTUP_FILES = "~/.bashrc, ~/.profile, ~/.zshenv, ~/.config/fish/config.fish, ~/.ssh/rc, /etc/profile.d"
_REMEDY = "Let it do so in interactive shells only: in ~/.bashrc, put `case $- in *i*) ;; *) return ;; esac` at the top"
_CAUSES = {
    r"account is (currently )?not available|nologin": (
        "the account has no login shell (/sbin/nologin in /etc/passwd): log in as another user, or set a shell (chsh)"
    ),
    r"sftp connections only|fatal: unrecognized command|git-shell": (
        "the account may transfer files only (ForceCommand internal-sftp, git-shell, or the like): log in as another "
        "user, or lift that for this key in sshd_config or authorized_keys"
    ),
    r"password.*(expired|change required)|change your password": (
        "the account's password has expired: log in with ssh once, and change it"
    ),
    r"restricted": (
        "the login shell is a restricted one, which starts no programs (rbash): log in as another user, or set another "
        "shell (chsh)"
    ),
    r"/bin/sh: (No such file|not found|.*cannot execute)|can't find /bin/sh": (
        "there is no usable /bin/sh, which every step needs: install a POSIX shell there"
    ),
}
"""Causes by the text that programs print; the first that is found counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What became of the check's command.

    Attributes:
        began: the command was reached.
        answered: it also got its input.
        noise: output of other processes, when the command had ended. If there is none, all is well.
        ran_input: something else ran the line that was meant for the command, or printed it.
        ended: the channel ended, instead of the time.
        status: exit status of what the server ran; None for a signal, or without a report.
        output: everything that was printed.
    """

    began: bool = False
    answered: bool = False
    noise: str = ""
    ran_input: bool = False
    ended: bool = True
    status: int | None = None
    output: str = ""


def try_login(client: Client, gate: threading.Lock, *, wait_s: float = _WAIT_S) -> Login:
    """Run a command that reports whether it was reached, and whether it got its input. Blocks, for ``wait_s`` at most.

    Args:
        client: the connection.
        gate: see :class:`~skyward.transport._pump.Pump`.
        wait_s: time for the command to answer.

    Raises:
        RefusedSessionError: the machine allows no further command.
        StaleConnectionError: the connection has ended.
        Exception: paramiko's own exceptions: the machine refuses commands.
    """
    token, line = secrets.token_hex(_TOKEN_BYTES), secrets.token_hex(_TOKEN_BYTES)
    answer = f"{token}=echo {line}\n".encode()
    deadline = time.monotonic() + wait_s
    channel: Any = open_channel(client, "session")
    try:
        channel.set_combine_stderr(True)
        channel.exec_command(f"exec /bin/sh -c 'echo {token}; IFS= read -r _sky; echo \"{token}=$_sky\"'")
        with gate, suppress(OSError):  # it may have ended already
            # `echo`, for any shell that a startup file starts instead: it prints the word, and its input ends.
            channel.sendall(f"echo {line}\n".encode())
            channel.shutdown_write()
        output, ended = _read(channel, gate, until=answer, deadline=deadline)
        answered, noise = answer in output, b""
        if answered and not ended:  # errors of the startup files may come after the answer, which is in another stream
            late, ended = _read(channel, gate, deadline=time.monotonic() + _SETTLE_S)
            output += late
        if answered and not ended:  # a process that a startup file has left holds the output
            noise, ended = _read(channel, gate, deadline=time.monotonic() + _LINGER_S)
        if ended:
            channel.status_event.wait(_STATUS_S)  # the exit status follows the end of the output
        status = channel.exit_status if channel.exit_status_ready() and channel.exit_status >= 0 else None
    finally:
        with gate:
            channel.close()
    text = output.decode(errors="replace")
    began = f"{token}\n" in text
    return Login(
        began=began,
        answered=answered,
        noise=noise.decode(errors="replace").strip(),
        ran_input=not began and line in text,
        ended=ended,
        status=status,
        output=re.sub(rf"(echo )?{line}|{token}=?", "", text).strip(),
    )


def _read(channel: Any, gate: threading.Lock, *, until: bytes = b"", deadline: float) -> tuple[bytes, bool]:
    """Return the output up to ``until``, the end or the deadline, without the middle if long; True at the end."""
    output = bytearray()
    arrived = threading.Event()
    channel.in_buffer.set_event(arrived)
    channel.settimeout(0)
    while not (until and until in output) and arrived.wait(deadline - time.monotonic()):
        with gate:  # reading opens the window, by a message that must not follow the channel's end
            data = channel.recv(_READ_BYTES)
        if not data:
            return bytes(output), True
        output += data
        if len(output) > 4 * _READ_BYTES:
            del output[_READ_BYTES : -2 * _READ_BYTES]
    return bytes(output), False


def login_fault(login: Login, *, wait_s: float = _WAIT_S) -> str:
    """Return what keeps commands from running, and the next step; empty if nothing does. Pure."""
    if login.answered and not login.noise:
        return ""
    printed = f" It printed: {_shortened(login.output)}" if login.output else ""
    if login.answered:
        return (
            f"a startup file leaves a process in the background that prints into the output of commands "
            f"({_STARTUP_FILES}). {_REMEDY}, or send its output elsewhere. It printed: {_shortened(login.noise)}"
        )
    if login.began:
        return (
            f"a startup file reads the standard input, which belongs to the command ({_STARTUP_FILES}): "
            f"`read`, `cat`, `ssh` or the like. {_REMEDY}.{printed}"
        )
    if login.ran_input:
        return (
            f"a startup file starts another program in place of the command, which takes its input ({_STARTUP_FILES}): "
            f"`exec fish`, `exec zsh`, `tmux` or the like. {_REMEDY}, or set the login shell instead (chsh).{printed}"
        )
    if not login.ended:
        return (
            f"no command begins within {wait_s:g} s: a startup file waits for something, or takes as long "
            f"({_STARTUP_FILES}), or the server runs another command (ForceCommand, command= in authorized_keys). "
            f"{_REMEDY}.{printed}"
        )
    for pattern, cause in _CAUSES.items():
        if re.search(pattern, login.output, re.IGNORECASE):
            return f"{cause}.{printed}"
    end = "without an exit status" if login.status is None else f"with exit status {login.status}"
    return (
        f"the login ended {end} before the command began. Either a startup file exits or starts another program "
        f"({_STARTUP_FILES}), or the account has no login shell (/sbin/nologin, /bin/false in /etc/passwd), or the "
        f"server runs another command (ForceCommand in sshd_config, command= in authorized_keys). For a startup file: "
        f"let it do so in interactive shells only.{printed}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]} … {text[-_SHOWN_CHARS // 2 :]}"


def forwards(client: Client, host: str, port: int, *, timeout_s: float) -> bool:
    """Return False if the machine may not connect to its own ``host:port`` for this login. Blocks.

    A port on which nobody listens, or that does not answer in time, is no prohibition.

    Raises:
        StaleConnectionError: the connection has ended.
    """
    for _ in range(_ATTEMPTS):
        try:
            open_channel(client, "direct-tcpip", (host, port), timeout_s=timeout_s).close()
        except StaleConnectionError:
            raise
        except ssh_exception.ChannelException as error:
            return cast("Any", error).code != _PROHIBITED
        except ssh_exception.SSHException:
            # Of two channels refused at once on a connection, paramiko gives a reason for one only.
            continue
        return True
    return True
