"""Random configurations of OpenSSH's client."""

from __future__ import annotations

import random
from pathlib import Path

__all__ = ["HOSTS", "random_configuration"]

HOSTS = ("gpu1", "gpu2", "Login", "gpu1.lab.example", "10.1.2.3")

_PATTERNS = ("gpu1", "gpu*", "gpu? login", "* !gpu2", "*.lab.example", "!gpu1 *", "10.1.*", "Login", "*", "nobody")
_CRITERIA = (
    "all",
    "host gpu1",
    "host=gpu*",
    "host *.inner.example",
    "originalhost gpu1,Login",
    "!host gpu2",
    "user ann",
    "!user ann,bob",
    'host "gpu*,!gpu2" user ann',
    "localuser nobody",
    "final host *.inner.example",
    "final all",
    "!final host gpu2",
    'exec "true"',
    'exec "test %h = gpu1"',
    'host nobody exec "false"',
)
_OPTIONS = (
    "HostName %h.inner.example",
    "HostName 127.0.0.9 # in the lab",
    "hostname=BOX.inner.example",
    "Port 2222",
    "PORT = 2022",
    'Port "22"',
    "User ann",
    "user   bob   # me",
    'User "with blank"',
    "IdentityFile ~/.ssh/%r-%n",
    'IdentityFile "/keys/a b"',
    "IdentityFile none",
    "IdentityFile /keys/100%%",
    "IdentitiesOnly yes",
    "IdentityAgent none",
    "IdentityAgent ~/agent-%u.sock",
    "IdentityAgent $LAB_SOCK",
    "IdentityAgent SSH_AUTH_SOCK",
    "CertificateFile ~/.ssh/%h-cert.pub",
    "ProxyJump gate",
    "ProxyJump me@gate:7,ssh://inner",
    "ProxyJump none",
    "ProxyCommand nc -X 5 %h %p # not a comment",
    "ProxyCommand none",
    "ProxyCommand=connect --to '%n' %r",
    "HostKeyAlias Lab",
    "UserKnownHostsFile /files/a /files/b",
    "UserKnownHostsFile none",
    "GlobalKnownHostsFile /files/global",
    "StrictHostKeyChecking accept-new",
    "RevokedHostKeys /files/revoked",
    "KnownHostsCommand /usr/bin/keys %H",
    "AddressFamily inet",
    "BindAddress 127.0.0.1",
    "ConnectTimeout 7",
    "PreferredAuthentications publickey",
    "Ciphers aes256-ctr,aes128-gcm@openssh.com",
    "HostKeyAlgorithms ssh-ed25519",
    "ServerAliveInterval 30",
    "ForwardAgent yes",
    "LocalForward 8080 localhost:80",
    "SetEnv A=b",
    "ControlMaster auto",
    "IgnoreUnknown Use*",
    "Compression yes",
    "RequestTTY no",
)
_BLANKS = ("  ", "\t", "", "    ")


def random_configuration(seed: int, folder: Path) -> Path:
    """Write a configuration, with files that it includes, and return its path."""
    rng = random.Random(seed)
    included = [folder / f"included-{n}" for n in range(2)]
    for path in included:
        path.write_text(_text(rng, [], blocks=1))
    path = folder / "config"
    path.write_text(_text(rng, included, blocks=rng.randint(1, 6)))
    return path


def _text(rng: random.Random, included: list[Path], *, blocks: int) -> str:
    lines = _lines(rng, included, rng.randint(0, 2))
    for _ in range(blocks):
        match = rng.random() < 0.4
        lines.append(f"Match {rng.choice(_CRITERIA)}" if match else f"Host {rng.choice(_PATTERNS)}")
        lines += _lines(rng, included, rng.randint(1, 5))
    return rng.choice(("\n", "\r\n")).join([*lines, ""])


def _lines(rng: random.Random, included: list[Path], count: int) -> list[str]:
    lines = [rng.choice(_BLANKS) + rng.choice(_OPTIONS) for _ in range(count)]
    if included and rng.random() < 0.2:
        lines.append(f"Include {rng.choice(included)}")
    if rng.random() < 0.2:
        lines.append(rng.choice(("# a comment", "", "   # another")))
    return lines
