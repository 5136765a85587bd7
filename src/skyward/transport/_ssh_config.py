"""Settings for a host: its SSH configuration, overridden by the fields of the target."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from skyward.errors import ConfigurationError
from skyward.transport._openssh import Options, default_options, look_up
from skyward.transport._ssh_options import IGNORED, OBEYED
from skyward.transport.access import SSHTarget

__all__ = ["Algorithms", "Settings", "expanded", "route", "settings"]

_PORT = 22
_DEEPEST = 16
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
