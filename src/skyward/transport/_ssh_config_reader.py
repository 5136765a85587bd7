"""The part of SSH configurations that is read where ``ssh`` cannot read them; the rest is refused by name.

It cannot where it is not installed, where it is too old for the configuration, and where ``$HOME`` is not the account's
folder, as ``ssh`` looks only there.
"""

from __future__ import annotations

import glob
import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import psutil

from skyward.errors import ConfigurationError
from skyward.transport._ssh_options import IGNORED

__all__ = ["read_configuration"]

_DEEPEST = 16
_LINE = re.compile(r'\s*(?:"([^"]*)"|([^\s="]+))\s*=?\s*(.*?)\s*')
# One argument: quoted parts and others, with backslashes before quotes, backslashes and blanks.
_ARGUMENT = re.compile(r"""\s*((?:"(?:\\["\\]|[^"])*"|'(?:\\['\\]|[^'])*'|\\["'\\ ]|[^\s"'])+)""")
_PART = re.compile(r""""((?:\\["\\]|[^"])*)"|'((?:\\['\\]|[^'])*)'|\\(["'\\ ])|([^\s"'])""")
_ESCAPE = re.compile(r"""\\(["'\\])""")

_WHOLE_LINE = {"proxycommand", "knownhostscommand"}
_LISTS = {"userknownhostsfile", "globalknownhostsfile"}
_REPEATED = {"identityfile", "certificatefile"}
_WORDS = {
    "addressfamily",
    "bindaddress",
    "bindinterface",
    "connecttimeout",
    "hostkeyalias",
    "hostname",
    "identitiesonly",
    "identityagent",
    "pkcs11provider",
    "port",
    "preferredauthentications",
    "proxyjump",
    "pubkeyauthentication",
    "revokedhostkeys",
    "stricthostkeychecking",
    "tag",
    "user",
}
_LOWER = {"addressfamily", "hostkeyalias", "identitiesonly", "pubkeyauthentication", "stricthostkeychecking"}
_ALGORITHMS = {
    "casignaturealgorithms",
    "ciphers",
    "hostkeyalgorithms",
    "kexalgorithms",
    "macs",
    "pubkeyacceptedalgorithms",
}
_DEFAULTS = {
    "port": ("22",),
    "identityfile": tuple(f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk")),
    "userknownhostsfile": ("~/.ssh/known_hosts ~/.ssh/known_hosts2",),
    "globalknownhostsfile": ("/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2",),
}


@dataclass(slots=True)
class _Reading:
    """State of a reading: the first value of an option counts.

    Attributes:
        original: the host, as the user writes it.
        host: the host that ``Host`` means: the same, in the last of two readings the name to connect to.
        final: None until a block asks for a second reading, True while it goes on.
        options: the values so far.
        ignored: patterns of IgnoreUnknown.
    """

    original: str
    host: str
    final: bool | None = None
    options: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    ignored: list[str] = field(default_factory=list[str])

    @property
    def hostname(self) -> str:
        """Name to connect to, as far as it is known."""
        return self.options.get("hostname", (self.original,))[0].replace("%h", self.original).replace("%%", "%")


def read_configuration(
    host: str, *, asked_for: Mapping[str, str], path: str | None, system: str
) -> dict[str, tuple[str, ...]]:
    """Return the options for a host, as ``ssh -G`` prints them.

    Args:
        host: the host, as the user writes it.
        asked_for: values that count before the configuration's.
        path: the only file to read, which must exist; None means the user's, then ``system``.
        system: the system's configuration.

    Raises:
        ConfigurationError: it cannot be read, or uses what only OpenSSH itself can read.
    """
    reading = _Reading(host, host)
    reading.options.update({name: (value,) for name, value in asked_for.items()})
    _read_all(reading, path, system)
    if reading.final is not None:
        reading.host, reading.final = reading.hostname.lower(), True
        reading.options["hostname"] = (reading.host,)
        _read_all(reading, path, system)
    for name in ("proxyjump", "proxycommand"):
        if reading.options.get(name, ("none",))[0].lower() == "none":
            reading.options.pop(name, None)
    return {**_DEFAULTS, "user": (_own_name(),), **reading.options, "hostname": (reading.hostname.lower(),)}


def _read_all(reading: _Reading, path: str | None, system: str) -> None:
    usual = [file for file in ("~/.ssh/config", system) if os.path.exists(os.path.expanduser(file))]
    for file in usual if path is None else [path]:
        base = os.path.dirname(system) if file == system else "~/.ssh"
        _read(reading, file, base=base, active=True, never=False, depth=0)


def _read(reading: _Reading, path: str, *, base: str, active: bool, never: bool, depth: int) -> None:
    """Read a file.

    Args:
        reading: the state, which is updated.
        path: the file.
        base: folder of relative paths in Include.
        active: True if the lines before the first block count.
        never: True if no block can count, since the file is included in one that does not.
        depth: number of files that include this one.
    """
    if depth > _DEEPEST:
        raise ConfigurationError(f"the SSH configuration {path} includes itself")
    for name, rest, where in _lines(path):
        if name == "host":
            active = not never and _matches_any(reading.host, _arguments(rest, where))
        elif name == "match":
            criteria = _criteria(_arguments(rest, where), where)
            if any(criterion == "final" for _, criterion, _ in criteria):
                reading.final = bool(reading.final)
            active = not never and _applies(reading, criteria, where)
        elif name == "include":
            for file in _included(_arguments(rest, where), base, where):
                _read(reading, file, base=base, active=active, never=never or not active, depth=depth + 1)
        elif active:
            _set(reading, name, rest, where)


def _lines(path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of a file: the name in lower case, the rest, and where the line is."""
    try:
        text = Path(os.path.expanduser(path)).read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise ConfigurationError(f"the SSH configuration {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if (found := _LINE.fullmatch(line.rstrip("\r"))) is None:
            raise ConfigurationError(f"{where} of the SSH configuration cannot be read: {line.strip()}")
        yield (found[1] or found[2]).lower(), found[3], where


def _set(reading: _Reading, name: str, rest: str, where: str) -> None:
    options = reading.options
    words = [rest] if name in _WHOLE_LINE else _arguments(rest, where)
    if name == "ignoreunknown":
        reading.ignored += [pattern.lower() for word in words for pattern in word.split(",")]
    elif name in IGNORED:
        return
    elif name in _REPEATED and len(words) == 1:
        if words[0] not in options.get(name, ()):
            options[name] = (*options.get(name, ()), words[0])
    elif name in _LISTS and not any(sign in rest for sign in "%$"):
        options.setdefault(name, (" ".join(words),))
    elif name in {"proxyjump", "proxycommand"} and len(words) == 1:
        _set_proxy(options, name, words[0])
    elif name in _ALGORITHMS and len(words) == 1 and words[0][:1] not in "+-^":
        options.setdefault(name, (words[0],))
    elif (name in _WORDS and len(words) == 1) or name in _WHOLE_LINE:
        options.setdefault(name, (words[0].lower() if name in _LOWER else words[0],))
    elif not any(fnmatchcase(name, pattern) for pattern in reading.ignored):
        raise _unreadable(f"{name} {rest}", where)


def _set_proxy(options: dict[str, tuple[str, ...]], name: str, value: str) -> None:
    """Keep the first of ProxyCommand and ProxyJump; a first ``ProxyJump none`` leaves ProxyCommand open."""
    jump = options.get("proxyjump", ("none",))[0].lower()
    if jump == "none" and not {name, "proxycommand"} & options.keys():
        options[name] = (value,)


def _applies(reading: _Reading, criteria: Sequence[tuple[bool, str, str]], where: str) -> bool:
    """Return True if the criteria of a Match line hold."""
    met: list[bool] = []
    unreadable: list[str] = []
    for negated, name, pattern in criteria:
        holds = _holds(reading, name, pattern, where)
        if holds is None:
            unreadable.append(name)
        else:
            met.append(negated != holds)
    if unreadable and all(met):
        raise _unreadable(f"Match {unreadable[0]}", where)
    return all(met)


def _holds(reading: _Reading, name: str, pattern: str, where: str) -> bool | None:
    """Return True if a criterion holds; None if only OpenSSH can tell."""
    patterns = pattern.split(",")
    match name:
        case "all":
            return True
        case "final":
            return bool(reading.final)
        case "host":
            return _matches_any(reading.hostname.lower(), pattern.lower().split(","))
        case "originalhost":
            return _matches_any(reading.original.lower(), pattern.lower().split(","))
        case "user":
            return _matches_any(reading.options.get("user", (_own_name(),))[0], patterns)
        case "localuser":
            return _matches_any(_own_name(), patterns)
        case "tagged":
            return _matches_any(reading.options.get("tag", ("",))[0], patterns)
        case "localnetwork":
            return _is_in_any(patterns, where)
        case _:
            return None


def _is_in_any(patterns: Sequence[str], where: str) -> bool:
    """Return True if an address of this machine is in one of the networks, and in none that is negated."""
    own = [
        ipaddress.ip_address(each.address.partition("%")[0])
        for several in psutil.net_if_addrs().values()
        for each in several
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    try:
        networks = {pattern: ipaddress.ip_network(pattern.removeprefix("!")) for pattern in patterns}
    except ValueError as error:
        raise ConfigurationError(f"{where} of the SSH configuration: Match localnetwork: {error}") from error
    hits = [pattern for pattern, network in networks.items() if any(address in network for address in own)]
    return bool(hits) and not any(pattern.startswith("!") for pattern in hits)


def _criteria(words: Sequence[str], where: str) -> list[tuple[bool, str, str]]:
    """Return whether each criterion is negated, its name, and its patterns."""
    criteria: list[tuple[bool, str, str]] = []
    left = list(words)
    while left:
        name, equals, pattern = left.pop(0).partition("=")
        negated, name = name.startswith("!"), name.removeprefix("!").lower()
        if name not in {"all", "canonical", "final"} and not equals:
            if not left:
                raise ConfigurationError(f"{where} of the SSH configuration: Match {name} has no value")
            pattern = left.pop(0)
        criteria.append((negated, name, pattern))
    if not criteria:
        raise ConfigurationError(f"{where} of the SSH configuration: Match has no criterion")
    return criteria


def _included(words: Sequence[str], base: str, where: str) -> Iterator[str]:
    for word in words:
        if "$" in word or "%" in word:
            raise _unreadable(f"Include {word}", where)
        pattern = os.path.join(os.path.expanduser(base), os.path.expanduser(word))
        yield from sorted(file for file in glob.glob(pattern) if os.path.isfile(file))


def _matches_any(value: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches and no negated one does."""
    hits = [pattern for pattern in patterns if fnmatchcase(value, pattern.removeprefix("!").replace("[", "[[]"))]
    return bool(hits) and not any(pattern.startswith("!") for pattern in hits)


def _arguments(rest: str, where: str) -> list[str]:
    """Split the rest of a line as OpenSSH does: quotes, backslashes, and a comment after the values."""
    words: list[str] = []
    position = 0
    while rest[position:].strip() and not rest[position:].lstrip().startswith("#"):
        found = _ARGUMENT.match(rest, position)
        if found is None:
            raise ConfigurationError(f"{where} of the SSH configuration has an unpaired quote: {rest}")
        position = found.end()
        parts = (
            part[3] or part[4] or _ESCAPE.sub(r"\1", part[1] or part[2] or "") for part in _PART.finditer(found[1])
        )
        words.append("".join(parts))
    if not words:
        raise ConfigurationError(f"{where} of the SSH configuration has no value")
    return words


def _unreadable(what: str, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} of the SSH configuration: only OpenSSH itself can read `{what}`, and no `ssh` here can read this "
        f"configuration: install or update its client, and leave $HOME the account's folder"
    )


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name  # not $USER: ssh does not read that
    except KeyError:  # a container may run under a user id without a name
        return os.environ.get("USER", "")
