"""The SSH configuration for a host, as OpenSSH itself reads it: ``ssh -G``."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

from skyward.errors import ConfigurationError
from skyward.transport._ssh_config_reader import read_configuration
from skyward.transport.access import SSHTarget

__all__ = ["Options", "default_options", "look_up"]

Options: TypeAlias = Mapping[str, tuple[str, ...]]
"""Values by the option's name in lower case, several of the options that may be given several times."""

_SYSTEM_CONFIGURATION = "/etc/ssh/ssh_config"
_TIMEOUT_S = 30.0
_FRESH_S = 10.0
_FORMER_NAMES = {"pubkeyacceptedkeytypes": "pubkeyacceptedalgorithms"}
# Before 6.8 there was no -G, and later versions have further criteria.
_TOO_OLD = ("option -- G", "Unsupported Match attribute")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What the configuration is asked for.

    Attributes:
        host: the host, as the user writes it.
        port: the port that is asked for, if any.
        user: the user that is asked for, if any.
        path: the configuration; None means the user's and the system's.
        direct: True if ProxyJump and ProxyCommand do not count.
        home: the user's home folder.
        changed: when the files were changed last.
    """

    host: str
    port: int | None
    user: str | None
    path: str | None
    direct: bool
    home: str
    changed: tuple[int, ...]


@dataclass(slots=True)
class _Answers:
    """Answers of the last seconds: one opening asks for a host several times, and `Match exec` runs programs."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    given: dict[_Question, tuple[float, Future[Options]]] = field(
        default_factory=dict[_Question, tuple[float, "Future[Options]"]]
    )


_ANSWERS = _Answers()


def look_up(target: SSHTarget) -> Options:
    """Return the options for a host; asked again within ten seconds, the same ones, unless the file was changed.

    Raises:
        ConfigurationError: the configuration cannot be read.
    """
    home = os.path.expanduser("~")
    path = os.path.expanduser(target.config_path) if target.config_path else None
    files = (path,) if path else (f"{home}/.ssh/config", _SYSTEM_CONFIGURATION)
    question = _Question(
        host=target.host,
        port=target.port,
        user=target.user,
        path=path,
        direct=target.direct or bool(target.proxy),
        home=home,
        changed=tuple(map(_changed, files)),
    )
    now = time.monotonic()
    with _ANSWERS.lock:
        _ANSWERS.given = {each: kept for each, kept in _ANSWERS.given.items() if now - kept[0] < _FRESH_S}
        asked = question not in _ANSWERS.given
        _, answer = _ANSWERS.given.setdefault(question, (now, Future()))
    if asked:
        try:
            answer.set_result(_ask(question))
        except BaseException as error:
            with _ANSWERS.lock:  # a failure is no answer: an included file may be corrected at once
                _ANSWERS.given.pop(question, None)
            answer.set_exception(error)
            raise
    return answer.result()


def default_options() -> Options:
    """Return the options of a host that no configuration names; empty without OpenSSH."""
    ssh = shutil.which("ssh")
    return _defaults(ssh) if ssh else {}


@cache
def _defaults(ssh: str) -> Options:
    completed = _run([ssh, "-G", "-T", "-F", "none", "--", "localhost"], "localhost")
    return {} if completed.returncode else _parsed(completed.stdout)


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _ask(question: _Question) -> Options:
    ssh = shutil.which("ssh")
    asked_for = {"port": question.port, "user": question.user, "proxycommand": "none" if question.direct else None}
    first = {name: str(value) for name, value in asked_for.items() if value is not None}
    if ssh is not None and _has_own_home(question.home):  # ssh reads that one, whatever $HOME says
        file = ["-F", question.path] if question.path is not None else []
        argv = [ssh, "-G", "-T", *file, *(f"-o{name}={value}" for name, value in first.items()), "--", question.host]
        completed = _run(argv, question.host)
        if not completed.returncode:
            return _parsed(completed.stdout)
        complaint = "; ".join(line.strip() for line in os.fsdecode(completed.stderr).splitlines() if line.strip())
        if not any(text in complaint for text in _TOO_OLD):
            raise ConfigurationError(
                f"ssh cannot use the SSH configuration {question.path or '~/.ssh/config'} for {question.host}: "
                f"{complaint}; correct it until `ssh -G {shlex.quote(question.host)}` works"
            )
    return read_configuration(question.host, asked_for=first, path=question.path, system=_SYSTEM_CONFIGURATION)


def _run(argv: list[str], host: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"`ssh -G {host}` does not end within {_TIMEOUT_S:g} s: check Match exec and CanonicalizeHostname in the "
            f"SSH configuration"
        ) from error


def _has_own_home(home: str) -> bool:
    """Return True if ``home`` is the account's folder."""
    try:
        return os.path.realpath(home) == os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container may run under a user id without an account; ssh refuses to
        return False


def _parsed(output: bytes) -> Options:
    options: dict[str, tuple[str, ...]] = {}
    for line in os.fsdecode(output).split("\n"):
        name, _, value = line.partition(" ")
        name = _FORMER_NAMES.get(name.lower(), name.lower())
        if name:
            options[name] = (*options.get(name, ()), value)
    return options
