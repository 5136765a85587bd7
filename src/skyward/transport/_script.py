"""What a machine's shell is told: one fixed command line, then a script and input through the command's stdin.

Nothing of a command but its own arguments is ever in the machine's list of processes, and the user's login shell sees
nothing that it could read in its own way.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from skyward.errors import ConfigurationError

__all__ = ["LOGIN_COMMAND", "PUT_COMMAND", "exit_code", "put_arguments", "script"]

LOGIN_COMMAND: Final = "exec /bin/sh -c 'IFS= read -r _sky; eval \"$_sky\"'"
"""For any login shell. ``read`` takes the script, one line, and not one byte more."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIGNAL_BASE = 128

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

PUT_COMMAND: Final = (
    "d=$1; t=$1/.$2.$$; umask 077; LC_ALL=C; export LC_ALL; "
    '[ -d "$d" ] || mkdir -p -- "$d" || exit; '
    'if [ -d "$d/$2" ]; then echo "$d/$2: Is a directory" >&2; exit 1; fi; '
    "trap '' PIPE; trap 'rm -f -- \"$t\"' EXIT; "
    'cat >"$t" && s=$(wc -c <"$t") && if [ "$s" -ne "$3" ]; then echo "only $s of $3 bytes came" >&2; exit 1; fi && '
    '{ [ "$4" = 600 ] || chmod "$4" "$t"; } && mv -f -- "$t" "$d/$2" && trap - EXIT'
)
"""Whole or not at all: run by ``sh -c``, with :func:`put_arguments` behind it."""


def script(argv: Sequence[str], env: Mapping[str, str], *, token: str, input_bytes: int | None) -> bytes:
    """The line that :data:`LOGIN_COMMAND` reads; the command's input follows it.

    Both streams carry ``token``, the command's output, ``token`` again, the exit code and a newline; nothing else that
    may be on them counts.

    Args:
        argv: the command.
        env: set for the command beside what is there.
        token: what no output contains; only letters and digits.
        input_bytes: how much input follows; the command is killed when the connection ends. None means that it reads
            the connection itself, to its end, which alone can end it.

    Raises:
        ConfigurationError: a shell cannot set such a variable, or an argument contains a null byte.
    """
    for name in env:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(f"env: {name!r} is no name of an environment variable that a shell can set")
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
    """What :data:`PUT_COMMAND` needs to know."""
    target = PurePosixPath(path)
    return ["sh", str(target.parent), target.name, str(nbytes), f"{mode:o}"]


def exit_code(status: int) -> int:
    """A shell's ``$?`` as :class:`~skyward.transport.base.Completed` has it: negative for a signal."""
    number = status - _SIGNAL_BASE
    return -number if 0 < number < signal.NSIG else status


def _quote(text: str) -> str:
    """One word of a line for a POSIX shell."""
    return "'" + text.replace("'", "'\\''").replace("\n", "'\"$_sky_nl\"'") + "'"
