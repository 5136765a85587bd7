"""SSH targets, and their settings: the SSH configuration, overridden by the fields of the target."""

from __future__ import annotations

import glob
import hashlib
import os
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

from skyward.base.platform import account_home, account_name, user_id
from skyward.errors import ConfigurationError


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


# Lower case, as `ssh -G` prints them. One in neither set is refused by name where it is set;
# `docs/machines-of-your-own.md` lists both.
_OBEYED = (
    "addressfamily bindaddress bindinterface canonicaldomains canonicalizefallbacklocal canonicalizehostname "
    "canonicalizemaxdots canonicalizepermittedcnames casignaturealgorithms certificatefile checkhostip ciphers "
    "connecttimeout globalknownhostsfile host hostkeyalgorithms hostkeyalias hostname identitiesonly identityagent "
    "identityfile ignoreunknown kexalgorithms knownhostscommand macs nohostauthenticationforlocalhost pkcs11provider "
    "port preferredauthentications proxycommand proxyjump proxyusefdpass pubkeyacceptedalgorithms "
    "pubkeyauthentication refuseconnection rekeylimit requiredrsasize revokedhostkeys stricthostkeychecking tag user "
    "userknownhostsfile verifyhostkeydns"
)
_IGNORED = {
    "other ways to log in than with keys": (
        "batchmode challengeresponseauthentication enablesshkeysign gssapiauthentication gssapiclientidentity "
        "gssapidelegatecredentials gssapikexalgorithms gssapikeyexchange gssapirenewalforcesrekey gssapiserveridentity "
        "gssapitrustdns hostbasedacceptedalgorithms hostbasedauthentication hostbasedkeytypes "
        "kbdinteractiveauthentication kbdinteractivedevices numberofpasswordprompts passwordauthentication "
        "securitykeyprovider"
    ),
    "what ssh writes down": "addkeystoagent hashknownhosts updatehostkeys",
    "the session of a person at a terminal": (
        "enableescapecommandline escapechar fingerprinthash forkafterauthentication localcommand loglevel logverbose "
        "obscurekeystroketiming permitlocalcommand remotecommand requesttty sendenv sessiontype setenv stdinnull "
        "syslogfacility usekeychain versionaddendum visualhostkey warnweakcrypto"
    ),
    "forwards, which Skyward makes itself, and shared connections": (
        "clearallforwardings controlmaster controlpath controlpersist dynamicforward exitonforwardfailure forwardagent "
        "forwardx11 forwardx11timeout forwardx11trusted gatewayports localforward permitremoteopen remoteforward "
        "streamlocalbindmask streamlocalbindunlink tunnel tunneldevice xauthlocation"
    ),
    "speed, and when a silent machine counts as lost, which Skyward decides": (
        "channeltimeout compression connectionattempts ipqos serveralivecountmax serveraliveinterval tcpkeepalive"
    ),
}
OBEYED: Final = frozenset(_OBEYED.split())
"""Options of OpenSSH's client that count: they are obeyed, or the error names them."""
IGNORED: Final = frozenset(name for names in _IGNORED.values() for name in names.split())
"""Options that cannot matter to Skyward."""

Options: TypeAlias = Mapping[str, tuple[str, ...]]
"""Values by the option's name in lower case, several of the options that may be given several times."""

_SYSTEM_CONFIGURATION = "/etc/ssh/ssh_config"
_TIMEOUT_S = 30.0
_FRESH_S = 10.0
_FORMER_NAMES = {"pubkeyacceptedkeytypes": "pubkeyacceptedalgorithms"}


_ANSWERS: Final[dict[tuple[object, ...], tuple[float, Future[Options]]]] = {}
"""Answers of the last seconds: one opening asks for a host several times, and `Match exec` runs programs."""
_ANSWERS_LOCK: Final = threading.Lock()


def look_up(target: SSHTarget) -> Options:
    """Return the options for a host; asked again within ten seconds, the same ones, unless the file was changed.

    Raises:
        ConfigurationError: the configuration cannot be read.
    """
    home = os.path.expanduser("~")
    path = os.path.expanduser(target.config_path) if target.config_path else None
    files = (path,) if path else (f"{home}/.ssh/config", _SYSTEM_CONFIGURATION)
    direct = target.direct or bool(target.proxy)
    asked_for = {"port": target.port, "user": target.user, "proxycommand": "none" if direct else None}
    first = {name: str(value) for name, value in asked_for.items() if value is not None}
    question = (target.host, path, home, *first.items(), *map(_changed, files))
    now = time.monotonic()
    with _ANSWERS_LOCK:
        for old in [key for key, (asked_at, _) in _ANSWERS.items() if now - asked_at >= _FRESH_S]:
            del _ANSWERS[old]
        asking = question not in _ANSWERS
        _, answer = _ANSWERS.setdefault(question, (now, Future()))
    if asking:
        try:
            answer.set_result(_ask(target.host, first, path, home))
        except BaseException as error:
            with _ANSWERS_LOCK:  # a failure is no answer: an included file may be corrected at once
                _ANSWERS.pop(question, None)
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


def _ask(host: str, first: Mapping[str, str], path: str | None, home: str) -> Options:
    ssh = shutil.which("ssh")
    if ssh is None or not _is_accounts(home):  # ssh looks in the account's folder only, whatever $HOME says
        return read_configuration(host, asked_for=first, path=path, system=_SYSTEM_CONFIGURATION)
    file = ["-F", path] if path is not None else []
    completed = _run(
        [ssh, "-G", "-T", *file, *(f"-o{name}={value}" for name, value in first.items()), "--", host], host
    )
    if completed.returncode:
        complaint = "; ".join(line.strip() for line in os.fsdecode(completed.stderr).splitlines() if line.strip())
        raise ConfigurationError(
            f"ssh cannot use the SSH configuration {path or '~/.ssh/config'} for {host}: "
            f"{complaint}; correct it until `ssh -G {shlex.quote(host)}` works"
        )
    return _parsed(completed.stdout)


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


def _is_accounts(home: str) -> bool:
    """Return True if ``home`` is the account's folder."""
    own = account_home()  # empty if a container runs under a user id without an account; ssh refuses to
    return bool(own) and os.path.realpath(home) == os.path.realpath(own)


def _parsed(output: bytes) -> Options:
    options: dict[str, tuple[str, ...]] = {}
    for line in os.fsdecode(output).split("\n"):
        name, _, value = line.partition(" ")
        name = _FORMER_NAMES.get(name.lower(), name.lower())
        if name:
            options[name] = (*options.get(name, ()), value)
    return options


# Where `ssh` is not installed, or $HOME is not the account's folder: blocks of Host, and Include. The rest is refused.

_DEEPEST = 16
_LINE = re.compile(r'\s*(?:"([^"]*)"|([^\s="]+))\s*=?\s*(.*?)\s*')
_WHOLE_LINE = {"proxycommand", "knownhostscommand"}
_LISTS = {"userknownhostsfile", "globalknownhostsfile"}
_REPEATED = {"identityfile", "certificatefile"}
_DEFAULTS = {
    "port": ("22",),
    "identityfile": tuple(f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk")),
    "userknownhostsfile": ("~/.ssh/known_hosts ~/.ssh/known_hosts2",),
    "globalknownhostsfile": ("/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2",),
}


def read_configuration(host: str, *, asked_for: Mapping[str, str], path: str | None, system: str) -> Options:
    """Return the options for a host, as ``ssh -G`` prints them, without ``ssh``.

    Args:
        host: the host, as the user writes it.
        asked_for: values that count before the configuration's.
        path: the only file to read, which must exist; None means the user's, then ``system``.
        system: the system's configuration.

    Raises:
        ConfigurationError: it cannot be read, or uses what only OpenSSH itself can read.
    """
    options = {name: (value,) for name, value in asked_for.items()}
    usual = [file for file in ("~/.ssh/config", system) if os.path.exists(os.path.expanduser(file))]
    for file in usual if path is None else [path]:
        _read(options, host, file, base=os.path.dirname(system) if file == system else "~/.ssh")
    for name in ("proxyjump", "proxycommand"):
        if options.get(name, ("none",))[0].lower() == "none":
            options.pop(name, None)
    hostname = options.get("hostname", (host,))[0].replace("%h", host).replace("%%", "%").lower()
    return {**_DEFAULTS, "user": (_own_name(),), **options, "hostname": (hostname,)}


def _read(options: dict[str, tuple[str, ...]], host: str, path: str, *, base: str, depth: int = 0) -> None:
    """Add the options of a file, of which the first value counts; ``base`` is the folder of relative Includes."""
    if depth > _DEEPEST:
        raise ConfigurationError(f"the SSH configuration {path} includes itself")
    active = True
    for name, rest, where in _lines(path):
        if name == "host":
            active = matches_any(host, _words(rest, where))
        elif name == "match":
            raise _unreadable(f"Match {rest}", where)
        elif active and name == "include":
            for file in _included(_words(rest, where), base, where):
                _read(options, host, file, base=base, depth=depth + 1)
        elif active:
            _set(options, name, rest, where)


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


def _set(options: dict[str, tuple[str, ...]], name: str, rest: str, where: str) -> None:
    words = [rest] if name in _WHOLE_LINE else _words(rest, where)
    proxies = {"proxyjump", "proxycommand"}
    if name in IGNORED:
        return
    if name == "ignoreunknown" or (name in _LISTS and not any(sign in rest for sign in "%$")):
        options.setdefault(name, (" ".join(words),))
    elif name not in OBEYED or name in _LISTS or name.startswith("canonical") or name == "rekeylimit":
        ignored = options.get("ignoreunknown", ("",))[0].lower().replace(",", " ").split()
        if name in OBEYED or not any(fnmatchcase(name, pattern) for pattern in ignored):
            raise _unreadable(f"{name} {rest}", where)
    elif len(words) != 1 or words[0][:1] in {"+", "-", "^"}:  # changes to OpenSSH's own lists of algorithms
        raise _unreadable(f"{name} {rest}", where)
    elif name in _REPEATED:
        options[name] = tuple(dict.fromkeys((*options.get(name, ()), words[0])))
    elif name in proxies:  # the first of both counts, but a first `ProxyJump none` leaves ProxyCommand open
        if not {name, "proxycommand"} & options.keys() and options.get("proxyjump", ("none",))[0].lower() == "none":
            options[name] = (words[0],)
    else:
        options.setdefault(name, (words[0].lower() if name == "hostkeyalias" else words[0],))


def _included(words: Sequence[str], base: str, where: str) -> Iterator[str]:
    for word in words:
        if "$" in word or "%" in word:
            raise _unreadable(f"Include {word}", where)
        pattern = os.path.join(os.path.expanduser(base), os.path.expanduser(word))
        yield from sorted(file for file in glob.glob(pattern) if os.path.isfile(file))


def matches_any(value: str, patterns: Sequence[str]) -> bool:
    """Return True if one of OpenSSH's patterns matches and no negated one (``!``) does."""
    # Only `*` and `?` are special there; brackets enclose a host that has a port.
    hits = [pattern for pattern in patterns if fnmatchcase(value, pattern.removeprefix("!").replace("[", "[[]"))]
    return bool(hits) and not any(pattern.startswith("!") for pattern in hits)


def _words(rest: str, where: str) -> list[str]:
    """Split the rest of a line, without a comment after the values."""
    if "\\" in rest or re.search(r"[^\s]#", rest):  # here OpenSSH's rules are not a shell's
        raise _unreadable(rest, where)
    try:
        words = shlex.split(rest, comments=True)
    except ValueError:
        raise ConfigurationError(f"{where} of the SSH configuration has an unpaired quote: {rest}") from None
    if not words:
        raise ConfigurationError(f"{where} of the SSH configuration has no value")
    return words


def _unreadable(what: str, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} of the SSH configuration: only OpenSSH itself can read `{what}`, and no `ssh` here can read this "
        f"configuration: install or update its client, and leave $HOME the account's folder"
    )


def _own_name() -> str:
    """Return this user's name; empty where a container runs under a user id without one."""
    return account_name() or os.environ.get("USER", "")  # ssh does not read $USER


_PORT = 22
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>.+)@)?(?P<host>\[[^]]+\]|[^:/@]+)(?::(?P<port>\d+))?/?")
_TOKEN = re.compile(r"%(?P<token>.?)")
_TOKEN_OR_VARIABLE = re.compile(_TOKEN.pattern + r"|\$\{(?P<variable>[^}]*)\}")
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_DEFAULT_RSA_BITS = 1024
_ALGORITHMS = [
    "KexAlgorithms",
    "HostKeyAlgorithms",
    "Ciphers",
    "MACs",
    "PubkeyAcceptedAlgorithms",
    "CASignatureAlgorithms",
]


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
        algorithms: the allowed algorithms, by option (``KexAlgorithms``); without those that it leaves as they are.
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
    algorithms: Mapping[str, Sequence[str]] = field(default_factory=dict[str, "Sequence[str]"])
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
        family=_FAMILIES.get((_one(options, "addressfamily") or "any").lower(), socket.AF_UNSPEC),
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
    if (_one(options, "pubkeyauthentication") or "yes").lower() in {"no", "false"}:
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
    values = {
        "%": "%",
        "d": os.path.expanduser("~"),
        "h": host,
        "i": str(user_id()),
        "j": jump,
        "k": alias or target.host,
        "L": name.partition(".")[0],
        "l": name,
        "n": target.host,
        "p": str(port),
        "r": user,
        "u": _own_name(),
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


def _algorithms(options: Options) -> Mapping[str, Sequence[str]]:
    usual = default_options()  # this ssh's own choice is no restriction: it may be older than paramiko
    values = {name: options.get(name.lower()) for name in _ALGORITHMS}
    return {name: value[0].split(",") for name, value in values.items() if value and value != usual.get(name.lower())}


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
