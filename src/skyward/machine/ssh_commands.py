"""Commands on a machine: the script that runs one, the exchange of its input and output, the check of a login.

Every command starts with one fixed command line, and reads a script and its input from standard input. So the machine's
list of processes shows a command's own arguments only, and the login shell sees nothing that it could interpret.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Final

from skyward.errors import ConfigurationError
from skyward.machine.paramiko_parts import Channel, Client, open_channel, take_output
from skyward.machine.ssh_connection import ACKNOWLEDGE_BYTES, SSHConnection, send_all

log = logging.getLogger("skyward.machine")


LOGIN_COMMAND: Final = (
    "exec /bin/sh -c 'unset TMOUT BASH_ENV ENV CDPATH PYTHONHOME PYTHONPATH PYTHONSTARTUP; "
    'IFS= read -r _sky; eval "$_sky"\''
)
"""Command line for any login shell. ``read`` takes one line, the script, and not one byte more.

Variables of the login for interactive work are unset: ``TMOUT`` ends a ``read`` of bash after so many seconds, and the
others have shells and Python read other files.
"""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIGNAL_BASE = 128
_NAME_BYTES = 8

# Descriptors 3 and 4 keep the channel's input and second stream; messages of the shell itself must not mix with them.
_BEGIN = (
    "_sky_nl=$(printf '\\n.'); _sky_nl=${{_sky_nl%.}}; exec 3<&0 4>&2 2>/dev/null; "
    "printf %s {token}; printf %s {token} >&4; "
)
# The watcher feeds the command's input, then waits: for the token, which ends it, or for the end of its own input: the
# connection is gone, and everything that is still in the process group is killed if the command has not ended.
_WATCHER = (
    '{{ {{ {feed}exec >&-; while IFS= read -r _sky <&3; do [ "$_sky" = {token} ] && exit; done; '
    "kill -0 $$ && kill -9 0; }} 4>&- & }} | "
)
_END = (
    "( exec 2>&4 3<&- 4>&-; {exports}exec {command} ); "
    "set -- $?; printf '%s%s\\n' {token} $1; printf '%s%s\\n' {token} $1 >&4\n"
)

# LC_ALL=C: the errors of cat and mv are recognised by their English text. wc: a lost connection looks like the end of
# the input, so the bytes are counted before the rename.
PUT_COMMAND: Final = (
    "d=$1; t=$1/.$5.part; umask 077; LC_ALL=C; export LC_ALL; "
    '[ -d "$d" ] || mkdir -p -- "$d" || exit; '
    'if [ -d "$d/$2" ]; then echo "$d/$2: Is a directory" >&2; exit 1; fi; '
    "trap '' PIPE; trap 'rm -f -- \"$t\"' EXIT; "
    'cat >"$t" && s=$(wc -c <"$t") && if [ "$s" -ne "$3" ]; then echo "only $s of $3 bytes came" >&2; exit 1; fi && '
    '{ [ "$4" = 600 ] || chmod -- "$4" "$t"; } && mv -f -- "$t" "$d/$2" && trap - EXIT'
)
"""Script of ``sh -c`` that writes a file whole or not at all; :func:`put_arguments` gives its arguments."""


def script(argv: Sequence[str], env: Mapping[str, str], *, token: str, input_bytes: int | None) -> bytes:
    """Return the line that :data:`LOGIN_COMMAND` reads; the command's input follows it.

    Both streams carry ``token``, the command's output, ``token`` again, the exit code and a newline. Everything else on
    them is ignored, such as the greetings of a login shell.

    Args:
        argv: the command.
        env: variables set for the command, in addition to those of the login shell.
        token: text that no output contains; letters and digits only.
        input_bytes: number of input bytes that follow; the command is killed when the connection ends. None means that
            the command reads the connection itself to its end, and only that end can stop it.

    Raises:
        ConfigurationError: a shell cannot set such a variable, or an argument contains a null byte.
    """
    for name in env:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"env: {name!r} is no name of an environment variable that a shell can set: use letters, digits and _"
            )
    line = f"{_BEGIN}{'' if input_bytes is None else _WATCHER}{_END}".format(
        token=token,
        feed=f"head -c {input_bytes} <&3; " if input_bytes else "",
        exports="".join(f"export {name}={_quote(value)}; " for name, value in env.items()),
        command=" ".join(map(_quote, argv)),
    )
    if "\0" in line:
        raise ConfigurationError("a command's arguments and variables cannot contain null bytes")
    return os.fsencode(line)


def put_arguments(path: str, nbytes: int, mode: int) -> list[str]:
    """Return the arguments for :data:`PUT_COMMAND`."""
    target = PurePosixPath(path)
    # A random name, not one by process id: machines that share a folder have equal ids.
    return ["sh", str(target.parent), target.name, str(nbytes), f"{mode:o}", secrets.token_hex(_NAME_BYTES)]


def exit_code(status: int) -> int:
    """Return a shell's ``$?`` in the form of :class:`~skyward.machine.access.Completed`: negative for a signal."""
    number = status - _SIGNAL_BASE
    return -number if 0 < number < signal.NSIG else status


def _quote(text: str) -> str:
    """Return ``text`` as one word for a POSIX shell."""
    # `read` takes one line only, so newlines come from a variable.
    return "'" + text.replace("'", "'\\''").replace("\n", "'\"$_sky_nl\"'") + "'"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandExit:
    """End of a command.

    Attributes:
        status: the shell's ``$?``; None if the shell ended before it could report that.
        lost: True if the connection ended instead of the command.
        stdout: the collected standard output.
        stderr: the collected standard error.
    """

    status: int | None
    lost: bool
    stdout: bytes
    stderr: bytes


class Output:
    """Parser of one output stream: the content between two tokens, and the exit status after the second.

    Args:
        token: the script's token, which the content does not contain.
    """

    def __init__(self, token: bytes) -> None:
        self.status: int | None = None
        self._token = token
        # Without digits it is no command's end, but the script: the login runs `cat`, or something else that prints it.
        self._end = re.compile(re.escape(token) + rb"(\d+)\n")
        self._data = bytearray()
        self._start = 0

    @property
    def content(self) -> bytes:
        """Output of the command; all received bytes as long as no token has come."""
        return bytes(self._data[self._start :])

    def add(self, data: bytes) -> None:
        """Parse the next bytes of the stream."""
        if self.status is not None:
            return
        # The token may be cut by the bounds of packets. Searched bytes are not searched again: large outputs would
        # take quadratic time.
        searched = max(0, len(self._data) - len(self._token) - len("255"))
        self._data += data
        if not self._start and (found := self._data.find(self._token, searched)) >= 0:
            searched = self._start = found + len(self._token)
        if self._start and (end := self._end.search(self._data, max(searched, self._start))):
            self.status = int(end[1])
            del self._data[end.start() :]


async def run_script(
    connection: SSHConnection, parts: Sequence[bytes | memoryview], token: bytes, *, end_input: bool = False
) -> CommandExit:
    """Run one line of :func:`script` in the connection's loop. A cancellation kills the command.

    Args:
        connection: the connection.
        parts: the script, then the command's input; the memory must not change.
        token: the script's token.
        end_input: True to end the channel's input after the last part, for commands that read it to its end.

    Raises:
        Exception: the machine cannot be reached, or refuses the command; paramiko's own exceptions, too.
    """
    async with connection.commands:
        channel = await connection.start(_request_shell)
        return await CommandExchange(connection, channel, token).complete(parts, end_input=end_input)


def _request_shell(client: Client) -> Channel:
    channel = open_channel(client, "session")
    try:
        channel.exec_command(LOGIN_COMMAND)
    except BaseException:
        channel.close()
        raise
    channel.settimeout(0)
    return channel


class CommandExchange:
    """Input and output of one command, in the connection's loop.

    Args:
        connection: the connection.
        channel: the command's channel; owned from now on.
        token: the script's token.
    """

    def __init__(self, connection: SSHConnection, channel: Channel, token: bytes) -> None:
        self._connection = connection
        self._channel = channel
        self._token = token
        self._outputs = (Output(token), Output(token))
        self._taken_bytes = [0, 0]
        self._news = asyncio.Event()
        call = partial(connection.request, self._news.set)
        self._call = call
        self._buffers = tuple(
            take_output(channel, buffer, deliver=partial(self._arrive, stream), end=call, wake=call)
            for stream, buffer in enumerate(("in_buffer", "in_stderr_buffer"))
        )

    async def complete(self, parts: Sequence[bytes | memoryview], *, end_input: bool) -> CommandExit:
        """Send the input and return what the command printed; close the channel in any case."""
        sending = asyncio.ensure_future(self._send(parts, end_input=end_input))
        status: int | None = None
        try:
            status, lost = await self._wait_for_end()
        finally:
            sending.cancel()
            end = partial(self._end, status)
            ending = None if self._connection.act(end) else self._connection.spawn(self._connection.act_later(end))
        if ending is not None:
            await asyncio.wait([ending])
        out, errors = self._outputs
        return CommandExit(status=status, lost=lost, stdout=out.content, stderr=errors.content)

    def _end(self, status: int | None) -> None:
        with suppress(Exception):
            if status is not None:
                # Ends the watcher, which would kill the command's daemons, too, when the channel closes.
                self._channel.send(b"\n" + self._token + b"\n")
        with suppress(Exception):
            self._channel.close()

    def _arrive(self, stream: int, data: bytes) -> None:
        """Take output, in paramiko's thread."""
        output = self._outputs[stream]
        output.add(data)
        self._taken_bytes[stream] += len(data)
        if output.status is not None or self._taken_bytes[stream] >= ACKNOWLEDGE_BYTES:
            self._call()

    async def _wait_for_end(self) -> tuple[int | None, bool]:
        """Return the command's status, None without one, and True if the connection ended instead."""
        out, errors = self._outputs
        while True:
            try:
                await self._acknowledge()
            except Exception as error:  # after any exception the channel is of no further use
                log.debug("a command's channel broke off: %s", error)
                return None, True
            ended = self._channel.closed or self._channel.eof_received  # before the status, which comes first
            if out.status is not None and errors.status is not None:
                return out.status, False
            if ended:
                return None, not self._channel.eof_received
            await self._news.wait()
            self._news.clear()

    async def _acknowledge(self) -> None:
        receivers = (self._channel.recv, self._channel.recv_stderr)
        for stream, (buffer, receive) in enumerate(zip(self._buffers, receivers, strict=True)):
            buffer.drain()
            if self._taken_bytes[stream] >= ACKNOWLEDGE_BYTES:
                taken_bytes = self._taken_bytes[stream]
                self._taken_bytes[stream] -= taken_bytes
                await self._act(partial(receive, taken_bytes))

    async def _act(self, action: Callable[[], object]) -> None:
        if not self._connection.act(action):
            await self._connection.act_later(action)

    async def _send(self, parts: Sequence[bytes | memoryview], *, end_input: bool) -> None:
        try:
            for part in parts:
                await send_all(self._connection, self._channel, memoryview(part).cast("B"))
            if end_input:
                await self._act(self._channel.shutdown_write)
        except Exception as error:  # the end of the channel is handled where its output is read
            log.debug("a command's input was refused: %s", error)


_WAIT_S = 8.0
"""Time to reach the command. Each command of a pool takes as long again; startup files of a cluster need up to 5 s."""
_STATUS_S = 1.0
_SETTLE_S = 0.3
_LINGER_S = 1.0
_READ_BYTES = 1 << 16
_SHOWN_CHARS = 500
_TOKEN_BYTES = 8

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

    The shell of a login runs the user's startup files first, or is no shell at all, and the server may run another
    command instead. The command reports twice: before and after it reads a line from its input. Only that line is sent,
    so that whatever else reads it does no harm.

    Args:
        client: the connection.
        gate: see :class:`~skyward.machine.ssh_connection.SSHConnection`.
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
