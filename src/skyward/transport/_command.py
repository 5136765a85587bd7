"""Commands on a machine: the shell script that runs one, and the exchange of its input and output.

Every command starts with one fixed command line, and reads a script and its input from standard input. So the machine's
list of processes shows a command's own arguments only, and the login shell sees nothing that it could interpret.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from skyward.errors import ConfigurationError
from skyward.transport._paramiko import (
    Channel,
    ChannelBuffer,
    Client,
    open_channel,
    take_errors,
    take_output,
)
from skyward.transport._pump import ACKNOWLEDGE_BYTES, CHUNK_BYTES, CHUNKS_IN_TURN, Pump, Step

__all__ = [
    "LOGIN_COMMAND",
    "PUT_COMMAND",
    "CommandExit",
    "Execution",
    "Output",
    "exit_code",
    "put_arguments",
    "script",
]

log = logging.getLogger("skyward.transport")

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
    """Return a shell's ``$?`` in the form of :class:`~skyward.transport.base.Completed`: negative for a signal."""
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
        self._data = bytearray()
        self._begun = False

    @property
    def content(self) -> bytes:
        """Output of the command; all received bytes as long as no token has come."""
        return bytes(self._data)

    def add(self, data: bytes) -> None:
        """Parse the next bytes of the stream."""
        if self.status is not None:
            return
        # The token may be cut by the bounds of packets. Searched bytes are not searched again: large outputs would
        # take quadratic time.
        searched = max(0, len(self._data) - len(self._token) - len("255"))
        self._data += data
        if not self._begun:
            start = self._data.find(self._token)
            if start < 0:
                return
            self._begun = True
            searched = 0
            del self._data[: start + len(self._token)]
        self._look_for_end(searched)

    def _look_for_end(self, searched: int) -> None:
        end = self._data.find(self._token, searched)
        number = end + len(self._token)
        line_end = self._data.find(b"\n", number)
        if end < 0 or line_end < 0:
            return
        status = bytes(self._data[number:line_end])
        # Else it is no command's output, but the script: the login runs `cat`, or something else that prints its input.
        if status.isdigit():
            self.status = int(status)
            del self._data[end:]


class Execution:
    """Run of one line of :func:`script`.

    Args:
        pump: the sending thread.
        parts: the script, then the command's input; the memory must not change.
        token: the script's token.
        end_input: True to end the channel's input after the last part, for commands that read it to its end.

    Attributes:
        ended: future that is done when the command, or the connection, has ended.
    """

    def __init__(
        self, pump: Pump, parts: Sequence[bytes | memoryview], token: bytes, *, end_input: bool = False
    ) -> None:
        self.ended: Future[CommandExit] = Future()
        self._pump = pump
        self._unsent = deque(view for part in parts if (view := memoryview(part).cast("B")))
        self._token = token
        self._end_input = end_input
        self._outputs = (Output(token), Output(token))
        self._channel: Channel | None = None
        self._buffers: tuple[ChannelBuffer, ...] = ()
        self._taken_bytes = [0, 0]
        self._called = False
        self._abandoned = False
        self._over = False

    def start(self, client: Client) -> None:
        """Request the command, and wait until the machine grants it.

        Raises:
            StaleConnectionError: the connection had ended before.
            Exception: a refusal by the machine, or the loss of the connection; paramiko's own exceptions.
        """
        channel = open_channel(client, "session")
        self._buffers = (
            take_output(channel, deliver=lambda data: self._arrive(0, data), end=self._call, wake=self._call),
            take_errors(channel, deliver=lambda data: self._arrive(1, data), end=self._call, wake=self._call),
        )
        try:
            channel.exec_command(LOGIN_COMMAND)
        except BaseException:
            channel.close()
            raise
        channel.settimeout(0)
        self._channel = channel
        self._pump.request(self._begin)

    def abandon(self) -> None:
        """End the command by closing its channel. From any thread, at any time. Idempotent."""
        self._abandoned = True
        self._call()

    def _arrive(self, stream: int, data: bytes) -> None:
        output = self._outputs[stream]
        output.add(data)
        self._taken_bytes[stream] += len(data)
        # An eighth of the window at a time: each acknowledgement costs a packet and a wake-up of the pump.
        if output.status is not None or self._taken_bytes[stream] >= ACKNOWLEDGE_BYTES:
            self._call()

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._pump.request(self._attend)

    # in the pump's thread

    def _begin(self) -> None:
        self._pump.keep_trying(self._send)
        self._attend()

    def _attend(self) -> None:
        self._called = False
        channel = self._channel
        if channel is None or self._over:
            return
        try:
            self._acknowledge(channel)
        except Exception as error:  # after any exception the channel is of no further use
            log.debug("a command's channel broke off: %s", error)
            self._end(channel, None, lost=True)
            return
        status = self._outputs[0].status
        if status is not None and self._outputs[1].status is not None:
            self._end(channel, status)
        elif channel.closed or channel.eof_received:
            self._end(channel, None, lost=not channel.eof_received)
        elif self._abandoned:
            self._end(channel, None)

    def _acknowledge(self, channel: Channel) -> None:
        for buffer, receive, stream in zip(self._buffers, (channel.recv, channel.recv_stderr), (0, 1), strict=True):
            buffer.drain()
            if self._taken_bytes[stream] >= ACKNOWLEDGE_BYTES:
                taken_bytes = self._taken_bytes[stream]
                self._taken_bytes[stream] -= taken_bytes
                with self._pump.gate:
                    receive(taken_bytes)

    def _send(self) -> Step:
        channel = self._channel
        for _ in range(CHUNKS_IN_TURN):
            if channel is None or self._over:
                return Step.DONE
            try:
                with self._pump.gate:
                    sent = self._send_some(channel)
            except TimeoutError:
                return Step.BLOCKED
            except Exception as error:  # the end of the channel is handled where its output is read
                log.debug("a command's input was refused: %s", error)
                return Step.DONE
            if not sent:
                return Step.DONE
        return Step.MOVED

    def _send_some(self, channel: Channel) -> int:
        """Send a chunk, or the end of the input; return the number of bytes."""
        if not self._unsent:
            if self._end_input:
                channel.shutdown_write()
            return 0
        view = self._unsent[0]
        sent = channel.send(view[:CHUNK_BYTES])
        if sent == len(view):
            self._unsent.popleft()
        else:
            self._unsent[0] = view[sent:]
        return sent

    def _end(self, channel: Channel, status: int | None, *, lost: bool = False) -> None:
        self._over = True
        self._unsent.clear()
        out, errors = self._outputs
        if self.ended.set_running_or_notify_cancel():
            self.ended.set_result(CommandExit(status=status, lost=lost, stdout=out.content, stderr=errors.content))
        with self._pump.gate:
            # Ends the watcher, which would kill the command's daemons, too, when the channel closes.
            with contextlib.suppress(Exception):
                if status is not None:
                    channel.send(b"\n" + self._token + b"\n")
            with contextlib.suppress(Exception):
                channel.close()
