"""Settings for a host: its SSH configuration, overridden by the fields of the target."""

from __future__ import annotations

import glob
import hashlib
import ipaddress
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

import psutil

from skyward.errors import ConfigurationError

__all__ = [
    "IGNORED",
    "OBEYED",
    "Algorithms",
    "Options",
    "SSHTarget",
    "Settings",
    "default_options",
    "expanded",
    "look_up",
    "read_configuration",
    "route",
    "settings",
]


# ---- access:SSHTarget
@dataclass(frozen=True, slots=True, kw_only=True)
class SSHTarget:
    """SSH server and credentials for it. Equal targets share one connection.

    Attributes:
        host: name, address, or an alias of the SSH configuration.
        port: None means the SSH configuration's, or 22.
        user: None means the SSH configuration's, or this user's own name.
        key_path: the one private key to offer; None means the agent's, the SSH configuration's, and the usual files.
        known_hosts: file of host keys; None means the user's and the system's.
        host_keys: public keys (``"ssh-ed25519 AAAA…"``), one of which the machine must show instead of one on file.
        config_path: the SSH configuration; None means the user's.
        proxy: command whose input and output are the connection. It replaces ProxyJump and ProxyCommand of the SSH
            configuration; empty means none.
        direct: True for a host that is dialled from a jump host: ProxyJump and ProxyCommand do not count for it.
        patience_s: seconds of retries for a machine that does not answer, before that is an error.
        silence_s: seconds without an answer of the machine, after which its connection is given up.
    """

    host: str
    port: int | None = None
    user: str | None = None
    key_path: str | None = None
    known_hosts: str | None = None
    host_keys: tuple[str, ...] = ()
    config_path: str | None = None
    proxy: tuple[str, ...] = ()
    direct: bool = False
    patience_s: float = 30.0
    silence_s: float = 15.0

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        return f"{user}{self.host}{f':{self.port}' if self.port else ''}"


# ---- _ssh_options
OBEYED: Final = frozenset(
    {
        "addressfamily",
        "bindaddress",
        "bindinterface",
        "canonicaldomains",
        "canonicalizefallbacklocal",
        "canonicalizehostname",
        "canonicalizemaxdots",
        "canonicalizepermittedcnames",
        "casignaturealgorithms",
        "certificatefile",
        "checkhostip",
        "ciphers",
        "connecttimeout",
        "globalknownhostsfile",
        "host",
        "hostkeyalgorithms",
        "hostkeyalias",
        "hostname",
        "identitiesonly",
        "identityagent",
        "identityfile",
        "ignoreunknown",
        "kexalgorithms",
        "knownhostscommand",
        "macs",
        "nohostauthenticationforlocalhost",
        "pkcs11provider",
        "port",
        "preferredauthentications",
        "proxycommand",
        "proxyjump",
        "proxyusefdpass",
        "pubkeyacceptedalgorithms",
        "pubkeyauthentication",
        "refuseconnection",
        "rekeylimit",
        "requiredrsasize",
        "revokedhostkeys",
        "stricthostkeychecking",
        "tag",
        "user",
        "userknownhostsfile",
        "verifyhostkeydns",
    }
)
"""Options that count: they are obeyed, or the error names them."""

IGNORED: Final = frozenset(
    {
        # other ways to log in than with keys
        "batchmode",
        "challengeresponseauthentication",
        "enablesshkeysign",
        "gssapiauthentication",
        "gssapiclientidentity",
        "gssapidelegatecredentials",
        "gssapikexalgorithms",
        "gssapikeyexchange",
        "gssapirenewalforcesrekey",
        "gssapiserveridentity",
        "gssapitrustdns",
        "hostbasedacceptedalgorithms",
        "hostbasedauthentication",
        "hostbasedkeytypes",
        "kbdinteractiveauthentication",
        "kbdinteractivedevices",
        "numberofpasswordprompts",
        "passwordauthentication",
        "securitykeyprovider",
        # what ssh writes down
        "addkeystoagent",
        "hashknownhosts",
        "updatehostkeys",
        # the session of a person at a terminal
        "enableescapecommandline",
        "escapechar",
        "fingerprinthash",
        "forkafterauthentication",
        "localcommand",
        "loglevel",
        "logverbose",
        "obscurekeystroketiming",
        "permitlocalcommand",
        "remotecommand",
        "requesttty",
        "sendenv",
        "sessiontype",
        "setenv",
        "stdinnull",
        "syslogfacility",
        "usekeychain",
        "versionaddendum",
        "visualhostkey",
        "warnweakcrypto",
        # forwards, which Skyward makes itself, and shared connections
        "clearallforwardings",
        "controlmaster",
        "controlpath",
        "controlpersist",
        "dynamicforward",
        "exitonforwardfailure",
        "forwardagent",
        "forwardx11",
        "forwardx11timeout",
        "forwardx11trusted",
        "gatewayports",
        "localforward",
        "permitremoteopen",
        "remoteforward",
        "streamlocalbindmask",
        "streamlocalbindunlink",
        "tunnel",
        "tunneldevice",
        "xauthlocation",
        # speed, and when a silent machine counts as lost, which Skyward decides
        "channeltimeout",
        "compression",
        "connectionattempts",
        "ipqos",
        "serveralivecountmax",
        "serveraliveinterval",
        "tcpkeepalive",
    }
)
"""Options that are ignored, by the reason."""


# ---- _openssh
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


# ---- _ssh_config_reader
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


# ---- _ssh_config
_PORT = 22
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>.+)@)?(?P<host>\[[^]]+\]|[^:/@]+)(?::(?P<port>\d+))?/?")
_TOKEN = re.compile(r"%(?P<token>.?)")
_TOKEN_OR_VARIABLE = re.compile(_TOKEN.pattern + r"|\$\{(?P<variable>[^}]*)\}")
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_DEFAULT_RSA_BITS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithms:
    """Algorithms that the configuration allows; empty means that it does not say.

    Attributes:
        kex: KexAlgorithms.
        ciphers: Ciphers.
        macs: MACs.
        host_keys: HostKeyAlgorithms.
        user_keys: PubkeyAcceptedAlgorithms.
        authorities: CASignatureAlgorithms.
    """

    kex: tuple[str, ...] = ()
    ciphers: tuple[str, ...] = ()
    macs: tuple[str, ...] = ()
    host_keys: tuple[str, ...] = ()
    user_keys: tuple[str, ...] = ()
    authorities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the connection to one machine.

    Attributes:
        host: name or address to connect to.
        port: port to connect to.
        user: name of the user on the machine.
        names: names of the machine in files of host keys.
        known_hosts: these files.
        named_known_hosts: True if the target names the file, which must exist then.
        host_keys: keys that are accepted instead; files are not read then.
        known_hosts_command: arguments of a program that prints further host keys, with tokens.
        revoked_keys: files of host keys that are never accepted.
        host_key_notes: options that would have ``ssh`` accept further host keys, and that are not obeyed, in words.
        check_address: True if keys on file for the machine's address must not contradict those for its name.
        key_path: the one private key to use, if the target names one.
        identities: files of keys to try otherwise.
        identities_only: True to leave the agent's other keys unused.
        certificates: files of certificates for these keys.
        agent: socket of the agent; None without one.
        token_provider: library with further keys, which are not used.
        algorithms: the allowed algorithms.
        rsa_bits: least size of RSA keys.
        rekey: bytes and seconds after which session keys are renewed; 0 for the usual ones.
        proxy_command: command that carries the connection, if there is one.
        proxy_shell: shell that runs it.
        proxy_passes_socket: True if it hands over a connected socket, and ends.
        jumps: jump hosts, in the words of the configuration.
        family: family of addresses to connect to.
        bind: own address and interface to connect from; empty for any.
        dial_s: time to connect to one address; None for the usual one.
        tokens: values of the tokens in the configuration's texts.
        silence_s: seconds without an answer after which the machine counts as lost.
    """

    host: str
    port: int
    user: str
    names: tuple[str, ...]
    known_hosts: tuple[str, ...]
    named_known_hosts: bool
    host_keys: tuple[str, ...]
    known_hosts_command: tuple[str, ...] = ()
    revoked_keys: tuple[str, ...] = ()
    host_key_notes: tuple[str, ...] = ()
    check_address: bool = False
    key_path: str | None = None
    identities: tuple[str, ...] = ()
    identities_only: bool = False
    certificates: tuple[str, ...] = ()
    agent: str | None = None
    token_provider: str | None = None
    algorithms: Algorithms = Algorithms()
    rsa_bits: int = _DEFAULT_RSA_BITS
    rekey: tuple[int, int] = (0, 0)
    proxy_command: str | None = None
    proxy_shell: str = "/bin/sh"
    proxy_passes_socket: bool = False
    jumps: tuple[str, ...] = ()
    family: int = socket.AF_UNSPEC
    bind: tuple[str, str] = ("", "")
    dial_s: float | None = None
    tokens: Mapping[str, str]
    silence_s: float

    def __str__(self) -> str:
        return f"{self.user}@{self.host} port {self.port}"


def settings(target: SSHTarget) -> Settings:
    """Return the settings for a target.

    Raises:
        ConfigurationError: the configuration cannot be read, or demands what Skyward cannot do.
    """
    options = look_up(target)
    _refuse(options, target)
    host, port, user = _one(options, "hostname") or target.host, _port(options, target), _user(options, target)
    alias = _one(options, "hostkeyalias")
    jump = "none" if target.proxy else _one(options, "proxyjump") or "none"
    tokens = _tokens(target, host=host, port=port, user=user, alias=alias, jump="" if jump == "none" else jump)
    command = None if target.proxy else _one(options, "proxycommand")
    return Settings(
        host=host,
        port=port,
        user=user,
        names=_filed_under((alias or host).lower(), port, alias=alias is not None),
        known_hosts=_known_hosts(options, target),
        named_known_hosts=target.known_hosts is not None,
        host_keys=target.host_keys,
        known_hosts_command=_known_hosts_command(options, target),
        revoked_keys=tuple(expanded(path, tokens, "RevokedHostKeys") for path in _files(options, "revokedhostkeys")),
        host_key_notes=_host_key_notes(options),
        check_address=_is_on(options, "checkhostip"),
        key_path=os.path.expanduser(target.key_path) if target.key_path else None,
        identities=_paths(options, "identityfile", tokens),
        identities_only=_is_on(options, "identitiesonly"),
        certificates=_paths(options, "certificatefile", tokens),
        agent=_agent(options, tokens),
        token_provider=_one(options, "pkcs11provider"),
        algorithms=_algorithms(options),
        rsa_bits=int(_one(options, "requiredrsasize") or _DEFAULT_RSA_BITS),
        rekey=_rekey(options),
        proxy_command=shlex.join(target.proxy)
        if target.proxy
        else command and expanded(command, tokens, "ProxyCommand", for_shell=True),
        proxy_shell="/bin/sh" if target.proxy else os.environ.get("SHELL") or "/bin/sh",
        proxy_passes_socket=command is not None and _is_on(options, "proxyusefdpass"),
        jumps=() if jump == "none" else tuple(expanded(part.strip(), tokens, "ProxyJump") for part in jump.split(",")),
        family=_FAMILIES.get(_one(options, "addressfamily") or "any", socket.AF_UNSPEC),
        bind=(_one(options, "bindaddress") or "", _one(options, "bindinterface") or ""),
        dial_s=float(_one(options, "connecttimeout") or 0) or None,
        tokens=tokens,
        silence_s=target.silence_s,
    )


def route(target: SSHTarget) -> tuple[SSHTarget, ...]:
    """Return the jump hosts of a target, first to last; those of the first one come before it.

    Raises:
        ConfigurationError: the configuration cannot be read, or leads in a circle.
    """
    hops: list[SSHTarget] = []
    first = target
    for _ in range(_DEEPEST):
        nearer = [_hop(jump, target, direct=n > 0) for n, jump in enumerate(settings(first).jumps)]
        if not nearer:
            return tuple(hops)
        hops[:0] = nearer
        first = nearer[0]
    raise ConfigurationError(f"the SSH configuration's ProxyJump for {target.host} leads in a circle: correct it")


def expanded(text: str, tokens: Mapping[str, str], option: str, *, for_shell: bool = False) -> str:
    """Return a text of the configuration with its tokens and variables replaced, and the home folder for ``~``.

    Args:
        text: the option's value.
        tokens: values of its tokens.
        option: its name, for messages.
        for_shell: True for a command that a shell runs: the shell replaces variables and ``~``, so they stay.

    Raises:
        ConfigurationError: there is no such token or variable.
    """

    def value(match: re.Match[str]) -> str:
        known = os.environ if match.lastgroup == "variable" else tokens
        if (name := str(match[str(match.lastgroup)])) in known:
            return known[name]
        raise ConfigurationError(f"the SSH configuration's {option} has {match[0]}, which has no value here: {text!r}")

    if for_shell:
        return _TOKEN.sub(value, text)
    return os.path.expanduser(_TOKEN_OR_VARIABLE.sub(value, text))


def _refuse(options: Options, target: SSHTarget) -> None:
    """Raise an error for what cannot be obeyed."""
    where = f"the SSH configuration for {target.host}"
    if message := _one(options, "refuseconnection"):
        raise ConfigurationError(f"{where} refuses the connection (RefuseConnection): {message}")
    if (_one(options, "pubkeyauthentication") or "yes") in {"no", "false"}:
        raise ConfigurationError(
            f"{where} says PubkeyAuthentication no, and Skyward logs in with keys only: allow them"
        )
    methods = _one(options, "preferredauthentications")
    if methods is not None and "publickey" not in methods.split(","):
        raise ConfigurationError(
            f"{where} says PreferredAuthentications {methods}, and Skyward logs in with keys only: add publickey"
        )
    if unknown := options.keys() - OBEYED - IGNORED:
        usual = default_options()
        for name in sorted(unknown):
            if options[name] != usual.get(name):
                raise ConfigurationError(
                    f"{where} sets {name} to {', '.join(options[name])!r}, an option that Skyward does not know: leave "
                    f"it out for this host"
                )


def _one(options: Options, name: str) -> str | None:
    """Return the value of an option, None without one; ``none`` is none."""
    value = options.get(name, ("none",))[0]
    return None if value.lower() == "none" else value


def _is_on(options: Options, name: str) -> bool:
    return (_one(options, name) or "no").lower() in {"yes", "true"}


def _port(options: Options, target: SSHTarget) -> int:
    value = options.get("port", (str(_PORT),))[0]
    if not value.isdecimal() or not 0 < int(value) < 1 << 16:
        raise ConfigurationError(f"the SSH configuration's Port for {target.host} is no port: {value!r}; correct it")
    return int(value)


def _user(options: Options, target: SSHTarget) -> str:
    if not (user := options.get("user", ("",))[0]):  # a container may run under a user id without a name
        raise ConfigurationError(f"no user name for {target.host}, as this user has none: pass user=")
    return user


def _tokens(target: SSHTarget, *, host: str, port: int, user: str, alias: str | None, jump: str) -> Mapping[str, str]:
    name = socket.gethostname()
    try:
        own = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        own = os.environ.get("USER", "")
    values = {
        "%": "%",
        "d": os.path.expanduser("~"),
        "h": host,
        "i": str(os.getuid()),
        "j": jump,
        "k": alias or target.host,
        "L": name.partition(".")[0],
        "l": name,
        "n": target.host,
        "p": str(port),
        "r": user,
        "u": own,
    }
    return {**values, "C": hashlib.sha1(f"{name}{host}{port}{user}{jump}".encode(), usedforsecurity=False).hexdigest()}


def _known_hosts(options: Options, target: SSHTarget) -> tuple[str, ...]:
    if target.known_hosts:
        return (os.path.expanduser(target.known_hosts),)
    own = map(os.path.expanduser, _files(options, "userknownhostsfile"))
    return (*own, *_files(options, "globalknownhostsfile"))


def _known_hosts_command(options: Options, target: SSHTarget) -> tuple[str, ...]:
    command = None if target.known_hosts or target.host_keys else _one(options, "knownhostscommand")
    return tuple(shlex.split(command)) if command else ()


def _host_key_notes(options: Options) -> tuple[str, ...]:
    """Return the options that would have ``ssh`` accept a key that is not on file."""
    checking = (_one(options, "stricthostkeychecking") or "ask").lower()
    loose = [f"StrictHostKeyChecking {checking}"] if checking in {"accept-new", "no", "off", "false"} else []
    dns = ["VerifyHostKeyDNS"] if _is_on(options, "verifyhostkeydns") else []
    local = ["NoHostAuthenticationForLocalhost"] if _is_on(options, "nohostauthenticationforlocalhost") else []
    return (*loose, *dns, *local)


def _paths(options: Options, name: str, tokens: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(expanded(path, tokens, name) for path in options.get(name, ()) if path.lower() != "none")


def _files(options: Options, name: str) -> tuple[str, ...]:
    """Return the files of an option that names several, which ``ssh -G`` prints without quotes."""
    words = [word for word in (_one(options, name) or "").split(" ") if word]
    files: list[str] = []
    while words:
        sizes = [size for size in range(len(words), 1, -1) if os.path.exists(" ".join(words[:size]))]
        size = sizes[0] if sizes else 1
        files.append(" ".join(words[:size]))
        words = words[size:]
    return tuple(files)


def _agent(options: Options, tokens: Mapping[str, str]) -> str | None:
    agent = options.get("identityagent", ("SSH_AUTH_SOCK",))[0]
    if agent.lower() == "none":
        return None
    if agent == "SSH_AUTH_SOCK" or (agent.startswith("$") and not agent.startswith("${")):
        return os.environ.get(agent.removeprefix("$")) or None
    return expanded(agent, tokens, "IdentityAgent")


def _algorithms(options: Options) -> Algorithms:
    usual = default_options()  # this ssh's own choice is no restriction: it may be older than paramiko

    def listed(name: str) -> tuple[str, ...]:
        values = options.get(name, ())
        return tuple(values[0].split(",")) if values and values != usual.get(name) else ()

    return Algorithms(
        kex=listed("kexalgorithms"),
        ciphers=listed("ciphers"),
        macs=listed("macs"),
        host_keys=listed("hostkeyalgorithms"),
        user_keys=listed("pubkeyacceptedalgorithms"),
        authorities=listed("casignaturealgorithms"),
    )


def _rekey(options: Options) -> tuple[int, int]:
    words = (_one(options, "rekeylimit") or "0 0").split()
    return int(words[0]), int(words[1]) if len(words) > 1 else 0


def _hop(jump: str, target: SSHTarget, *, direct: bool) -> SSHTarget:
    parts = _JUMP.fullmatch(jump)
    if parts is None:
        raise ConfigurationError(f"the SSH configuration's ProxyJump for {target.host} names no host: {jump!r}")
    user, host, port = parts["user"], parts["host"], parts["port"]
    return SSHTarget(
        host=host.strip("[]"),
        port=int(port) if port else None,
        user=user,
        known_hosts=target.known_hosts,
        config_path=target.config_path,
        direct=direct,
        patience_s=target.patience_s,
        silence_s=target.silence_s,
    )


def _filed_under(name: str, port: int, *, alias: bool) -> tuple[str, ...]:
    """Return the names to look up: with the port and without, or without only if it is 22 or there is an alias."""
    return (name,) if alias or port == _PORT else (f"[{name}]:{port}", name)
