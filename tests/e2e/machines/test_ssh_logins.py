"""Who can log in with `ssh` can with Skyward, and who cannot is refused by both: one configuration after another."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import os
import pwd
import random
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from skyward.errors import SkywardError, UnreachableError
from skyward.machine.ssh import SshTransport
from skyward.machine.ssh_config import SSHTarget
from skyward.testing.hosts import SshHost, require_sshd

pytestmark = pytest.mark.timeout(300)

AT_ONCE = 4


def keygen(*arguments: object) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", *map(str, arguments)], check=True, capture_output=True, stdin=subprocess.DEVNULL
    )


def new_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    keygen("-t", kind, "-N", passphrase, "-C", path.name, "-f", path)
    return path


def public(path: Path) -> str:
    return " ".join(path.with_name(f"{path.name}.pub").read_text().split()[:2])


class Lab:
    """One server, with a host certificate, that admits a key and the certificates of an authority; keys and agents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "host").mkdir()
        self.keys = {
            name: new_key(folder / name) for name in ("user", "other", "certified", "user_ca", "host_ca", "stranger")
        }
        self.keys["rsa"] = new_key(folder / "rsa", "rsa")
        self.keys["locked"] = new_key(folder / "locked", passphrase="secret")
        host_key = new_key(folder / "host/host_key")
        user = pwd.getpwuid(os.getuid()).pw_name
        keygen("-s", self.keys["user_ca"], "-I", "a user", "-n", user, f"{self.keys['certified']}.pub")
        keygen("-s", self.keys["host_ca"], "-I", "a host", "-h", "-n", "lab,*.lab.example", f"{host_key}.pub")
        self.server = SshHost(
            folder / "host",
            address="127.0.0.31",
            client_key=self.keys["user"],
            sshd_options=[
                f"HostCertificate {host_key}-cert.pub",
                f"TrustedUserCAKeys {self.keys['user_ca']}.pub",
                "MaxAuthTries 6",
            ],
        )
        admitted = [public(self.keys[name]) for name in ("user", "rsa", "locked")]
        self.server.authorized_keys.write_text("\n".join([*admitted, ""]))
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.server.start()
        self.full_agent = self.agent(*(new_key(self.folder / f"extra{n}") for n in range(6)), self.keys["user"])
        self.empty_agent = self.agent()
        self.locked_agent = self.agent(self.keys["locked"])
        self.refusing_agent = self.agent("-c", self.keys["user"])
        self.wary_agent = self.agent("-c", self.keys["user"], "", self.keys["rsa"])
        name = f"[{self.server.address}]:{self.server.port}"
        self.line = f"{name} {self.server.host_key}\n"
        key = self.server.host_key
        wrong = f"{name} {public(self.keys['stranger'])}\n"
        authority = f"@cert-authority {name},lab,box.lab.example {public(self.keys['host_ca'])}\n"
        files = {
            "good": self.line,
            "wrong": wrong,
            "both": wrong + self.line,
            "empty": "",
            "alias": f"lab {key}\nbox.lab.example {key}\n",
            "authority": authority,
            "foreign_authority": authority.replace(public(self.keys["host_ca"]), public(self.keys["user_ca"])),
            "revoked": f"{self.line}@revoked * {key}\n",
            "revoked_authority": f"{authority}@revoked * {public(self.keys['host_ca'])}\n",
            "bad_line": f"{name} ssh-ed25519 AAAA\n{self.line}",
            "only_bad_line": f"{name} ssh-ed25519 AAAA\n",
            "keys": key + "\n",
            "other_keys": public(self.keys["stranger"]) + "\n",
            "authorities": public(self.keys["host_ca"]) + "\n",
        }
        for file, text in files.items():
            (self.folder / file).write_text(text)
        (self.folder / "relay.py").write_text(RELAY)
        (self.folder / "latin").write_bytes(b"# M\xfcnchen \x85\n" + self.line.encode())
        (self.folder / "with blank").write_text(self.line)
        (self.folder / "hashed").write_text(self.line)
        keygen("-H", "-f", self.folder / "hashed")
        keygen("-k", "-f", self.folder / "krl", self.folder / "keys")
        keygen("-k", "-f", self.folder / "other_krl", self.folder / "other_keys")

    def agent(self, *keys: Path | str) -> str:
        path = str(self.folder / f"agent{len(self.agents)}")
        wary = os.environ | {"SSH_ASKPASS": "/bin/false", "DISPLAY": ":9"}  # asked for its consent, nobody gives it
        self.agents.append(subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL, env=wary))
        askpass = self.folder / "askpass"
        askpass.write_text("#!/bin/sh\necho secret\n")
        askpass.chmod(0o700)
        env = os.environ | {"SSH_AUTH_SOCK": path, "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
        while not os.path.exists(path):
            os.sched_yield()
        for part in [list(part) for given, part in itertools.groupby(keys, bool) if given]:
            subprocess.run(["ssh-add", "-q", *part], env=env, check=True, capture_output=True)
        return path

    def stop(self) -> None:
        for agent in self.agents:
            agent.terminate()
            agent.wait()
        self.server.stop()

    def text(self, *lines: str, host: str = "box") -> str:
        """Return a configuration: these lines first, then where the server is."""
        values = {"dir": self.folder, "line": self.line.strip(), "python": sys.executable, "full": self.full_agent}
        values |= {"none": self.empty_agent, "locked": self.locked_agent, "address": self.server.address}
        values |= {"wary": self.wary_agent, "refusing": self.refusing_agent}
        values |= {"port": self.server.port}
        own = [f"Host {host}", *lines, "Host *", f"HostName {self.server.address}", f"Port {self.server.port}"]
        return (
            "\n".join(own)
            .replace("{{", "\0")
            .replace("}}", "\1")
            .format(**values)
            .replace("\0", "{")
            .replace("\1", "}")
            + "\n"
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    require_sshd()
    lab = Lab(tmp_path_factory.mktemp("lab"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", pwd.getpwuid(os.getuid()).pw_dir)  # ssh knows no other
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()


KNOWN = "UserKnownHostsFile {dir}/good"
KEY = "IdentityFile {dir}/user"
RELAY = """\
import os, select, socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
ways = {0: peer.fileno(), peer.fileno(): 1}
while ready := select.select([*ways], [], [])[0]:
    for source in ready:
        if not (data := os.read(source, 1 << 16)):
            raise SystemExit
        while data:
            data = data[os.write(ways[source], data) :]
"""
PASS = (
    "import socket,sys; s=socket.create_connection((sys.argv[1],int(sys.argv[2]))); "
    "socket.send_fds(socket.socket(fileno=1),[b'.'],[s.fileno()])"
)

CASES: dict[str, tuple[str, ...]] = {
    "the usual": (KNOWN, KEY),
    "RSA key": (KNOWN, "IdentityFile {dir}/rsa"),
    "missing key, then another": (KNOWN, "IdentityFile {dir}/missing", KEY),
    "missing key": (KNOWN, "IdentityFile {dir}/missing"),
    "public half, key in the agent": (KNOWN, "IdentityFile {dir}/user.pub", "IdentityAgent {full}"),
    "public half beside a missing key": (KNOWN, "IdentityFile {dir}/half", "IdentityAgent {full}"),
    "public half without the agent": (KNOWN, "IdentityFile {dir}/user.pub"),
    "many keys in the agent, the right one named": (KNOWN, KEY, "IdentityAgent {full}"),
    "many keys in the agent": (KNOWN, "IdentityFile none", "IdentityAgent {full}"),
    "only the named keys": (KNOWN, "IdentityFile {dir}/other", "IdentitiesOnly yes", "IdentityAgent {full}"),
    "encrypted key, unlocked in the agent": (KNOWN, "IdentityFile {dir}/locked", "IdentityAgent {locked}"),
    "agent that does not answer": (KNOWN, KEY, "IdentityAgent {dir}/nothing"),
    "agent without keys": (KNOWN, KEY, "IdentityAgent {none}"),
    "agent that refuses to sign with one of two": (KNOWN, "IdentityFile none", "IdentityAgent {wary}"),
    "agent that refuses to sign": (KNOWN, "IdentityFile none", "IdentityAgent {refusing}"),
    "no agent": (KNOWN, "IdentityFile none", "IdentityAgent none"),
    "certificate beside the key": (KNOWN, "IdentityFile {dir}/certified"),
    "certificate elsewhere": (KNOWN, "IdentityFile {dir}/copy", "CertificateFile {dir}/certified-cert.pub"),
    "certificate of another key": (KNOWN, KEY, "CertificateFile {dir}/certified-cert.pub"),
    "certificate that does not exist": (KNOWN, KEY, "CertificateFile {dir}/missing"),
    "key types that are not accepted": (KNOWN, KEY, "PubkeyAcceptedAlgorithms rsa-sha2-256"),
    "RSA alone accepted": (KNOWN, KEY, "IdentityFile {dir}/rsa", "PubkeyAcceptedAlgorithms rsa-sha2-256"),
    "RSA key that is too small": (KNOWN, "IdentityFile {dir}/rsa", "RequiredRSASize 8192"),
    "unknown machine": ("UserKnownHostsFile {dir}/empty", KEY),
    "no files of host keys": ("UserKnownHostsFile none", "GlobalKnownHostsFile none", KEY),
    "wrong key": ("UserKnownHostsFile {dir}/wrong", KEY),
    "two keys on file": ("UserKnownHostsFile {dir}/both", KEY),
    "second file": ("UserKnownHostsFile {dir}/empty {dir}/good", KEY),
    "global file": ("UserKnownHostsFile none", "GlobalKnownHostsFile {dir}/good", KEY),
    "file with a blank": ('UserKnownHostsFile "{dir}/with blank"', KEY),
    "hashed names": ("UserKnownHostsFile {dir}/hashed", KEY),
    "Latin-1": ("UserKnownHostsFile {dir}/latin", KEY),
    "alias": ("UserKnownHostsFile {dir}/alias", "HostKeyAlias LAB", KEY),
    "alias that is not on file": ("UserKnownHostsFile {dir}/good", "HostKeyAlias lab", KEY),
    "bad line, good line": ("UserKnownHostsFile {dir}/bad_line", KEY),
    "bad line alone": ("UserKnownHostsFile {dir}/only_bad_line", KEY),
    "revoked on file": ("UserKnownHostsFile {dir}/revoked", KEY),
    "RevokedHostKeys": (KNOWN, KEY, "RevokedHostKeys {dir}/keys"),
    "RevokedHostKeys of others": (KNOWN, KEY, "RevokedHostKeys {dir}/other_keys"),
    "RevokedHostKeys that does not exist": (KNOWN, KEY, "RevokedHostKeys {dir}/missing"),
    "revoked by a KRL": (KNOWN, KEY, "RevokedHostKeys {dir}/krl"),
    "KRL of others": (KNOWN, KEY, "RevokedHostKeys {dir}/other_krl"),
    "KnownHostsCommand": ("UserKnownHostsFile none", "KnownHostsCommand /bin/cat {dir}/good", KEY),
    "KnownHostsCommand with tokens": (
        "UserKnownHostsFile none",
        'KnownHostsCommand /bin/echo "%H %t %K"',
        "HostKeyAlgorithms ssh-ed25519",  # otherwise ssh asks for the certificate
        KEY,
    ),
    "KnownHostsCommand of the wrong key": ("UserKnownHostsFile none", "KnownHostsCommand /bin/cat {dir}/wrong", KEY),
    "KnownHostsCommand that fails": (KNOWN, "KnownHostsCommand /bin/false", KEY),
    "authority": ("UserKnownHostsFile {dir}/authority", "HostKeyAlias lab", KEY),
    "authority, name by a pattern": ("UserKnownHostsFile {dir}/authority", "HostKeyAlias box.lab.example", KEY),
    "authority, another name": ("UserKnownHostsFile {dir}/authority", KEY),
    "another authority": ("UserKnownHostsFile {dir}/foreign_authority", "HostKeyAlias lab", KEY),
    "revoked authority": ("UserKnownHostsFile {dir}/revoked_authority", "HostKeyAlias lab", KEY),
    "authority revoked by RevokedHostKeys": (
        "UserKnownHostsFile {dir}/authority",
        "HostKeyAlias lab",
        "RevokedHostKeys {dir}/authorities",
        KEY,
    ),
    "authority with an excluded signature": (
        "UserKnownHostsFile {dir}/authority",
        "HostKeyAlias lab",
        "CASignatureAlgorithms rsa-sha2-512",
        KEY,
    ),
    "ciphers": (KNOWN, KEY, "Ciphers aes256-ctr"),
    "key exchange by its name": (KNOWN, KEY, "KexAlgorithms curve25519-sha256"),
    "host key of another type": (KNOWN, KEY, "HostKeyAlgorithms ecdsa-sha2-nistp256"),
    "other methods": (KNOWN, KEY, "PreferredAuthentications password"),
    "no keys": (KNOWN, KEY, "PubkeyAuthentication no"),
    "proxy command": (KNOWN, KEY, "ProxyCommand {python} -I -S {dir}/relay.py %h %p"),
    "proxy command that fails": (KNOWN, KEY, "ProxyCommand false"),
    "proxy that passes a socket": (
        KNOWN,
        KEY,
        f'ProxyCommand {{python}} -I -S -c "{PASS}" %h %p',
        "ProxyUseFdpass yes",
    ),
    "jump": (KNOWN, KEY, "ProxyJump gate", "Host gate", KNOWN, KEY),
    "two jumps": (KNOWN, KEY, "ProxyJump gate,inner", "Host gate inner", KNOWN, KEY),
    "jump host that is unknown": (KNOWN, KEY, "ProxyJump gate", "Host gate", "UserKnownHostsFile none", KEY),
    "no jump": (KNOWN, KEY, "ProxyJump none", "Host *", "ProxyJump nowhere.invalid"),
    "IPv6 alone": (KNOWN, KEY, "AddressFamily inet6"),
    "own address": (KNOWN, KEY, "BindAddress 127.0.0.1"),
    "own interface": (KNOWN, KEY, "BindInterface lo"),
    "other interface": (KNOWN, KEY, "BindInterface nothing0"),
    "condition that holds": (KNOWN, 'Match exec "true"', KEY),
    "condition that does not": (KNOWN, KEY, 'Match exec "false"', "HostName 127.0.0.99"),
    "renewed keys": (KNOWN, KEY, "RekeyLimit 1M 1h"),
}

STRICTER: dict[str, tuple[tuple[str, ...], str]] = {
    "accept-new": (
        ("UserKnownHostsFile {dir}/empty", KEY, "StrictHostKeyChecking accept-new"),
        "accept-new is not obeyed",
    ),
    "unchecked": (("UserKnownHostsFile {dir}/empty", KEY, "StrictHostKeyChecking no"), "is not a known host"),
    "changed, unchecked": (("UserKnownHostsFile {dir}/wrong", KEY, "StrictHostKeyChecking no"), "another host key"),
    "unsupported ciphers": ((KNOWN, KEY, "Ciphers chacha20-poly1305@openssh.com"), "Ciphers of the SSH configuration"),
    "unsupported key exchange": ((KNOWN, KEY, "KexAlgorithms sntrup761x25519-sha512"), "KexAlgorithms of the SSH"),
}


@dataclass(frozen=True)
class Outcome:
    ssh: bool
    ssh_says: str
    skyward: bool
    skyward_says: str


async def outcome(path: Path) -> Outcome:
    """Log in to `box` with ssh and with Skyward."""
    argv = ["ssh", "-T", "-F", path, "-oBatchMode=yes", "-oConnectTimeout=10", "box", "true"]
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(30):
            text, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise TimeoutError(path.read_text()) from None
    transport = SshTransport(SSHTarget(host="box", config_path=str(path), patience_s=6.0))
    try:
        completed = await transport.run(["true"], timeout_s=60)
        says, opened = completed.stderr, not completed.exit_code
    except SkywardError as error:
        says, opened = str(error), False
    finally:
        await transport.close()
    return Outcome(not process.returncode, text.decode(), opened, says)


async def outcomes(texts: dict[str, str], folder: Path) -> dict[str, Outcome]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, text: str) -> Outcome:
        path = folder / f"config-{number}"
        path.write_text(text)
        async with limit:
            return await outcome(path)

    found = await asyncio.gather(*(one(number, text) for number, text in enumerate(texts.values())))
    return dict(zip(texts, found, strict=True))


def differences(found: dict[str, Outcome]) -> str:
    different = {name: each for name, each in found.items() if each.ssh != each.skyward}
    return "\n".join(
        f"{name}: ssh {each.ssh}: {each.ssh_says}; Skyward: {each.skyward_says}" for name, each in different.items()
    )


async def test_who_can_log_in_with_ssh_can_with_skyward(lab: Lab, tmp_path: Path) -> None:
    (lab.folder / "half.pub").write_text((lab.folder / "user.pub").read_text())
    (lab.folder / "copy").write_text(lab.keys["certified"].read_text())
    (lab.folder / "copy").chmod(0o600)

    found = await outcomes({name: lab.text(*lines) for name, lines in CASES.items()}, tmp_path)
    assert not differences(found)
    assert sum(each.ssh for each in found.values()) > 30
    assert "which the agent did not sign with" in found["agent that refuses to sign"].skyward_says


@pytest.mark.parametrize("name", STRICTER)
async def test_what_skyward_does_not_do_is_named(lab: Lab, tmp_path: Path, name: str) -> None:
    lines, words = STRICTER[name]
    path = tmp_path / "config"
    path.write_text(lab.text(*lines))

    with pytest.raises(SkywardError, match=words):
        await log_in(SSHTarget(host="box", config_path=str(path)))


PARTS = [
    [
        "the usual",
        "RSA key",
        "missing key, then another",
        "many keys in the agent, the right one named",
        "certificate beside the key",
    ],
    [
        "the usual",
        "global file",
        "hashed names",
        "alias",
        "authority",
        "revoked on file",
        "wrong key",
        "KnownHostsCommand",
    ],
    ["the usual", "RevokedHostKeys of others", "RevokedHostKeys", "KRL of others", "revoked by a KRL"],
    ["the usual", "proxy command", "own address", "renewed keys", "IPv6 alone"],
    ["the usual", "ciphers", "key exchange by its name", "condition that holds"],
]


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.full) for n in range(2, 6))])
async def test_random_combinations_log_in_where_ssh_does(lab: Lab, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    texts: dict[str, str] = {}
    while len(texts) < 30:
        names = [rng.choice(part) for part in PARTS]
        lines = [line for name in rng.sample(names, len(names)) for line in CASES[name]]
        texts[", ".join(names)] = lab.text(*dict.fromkeys(lines))

    found = await outcomes(texts, tmp_path)

    assert not differences(found)
    assert any(each.ssh for each in found.values())


async def test_server_that_allows_only_what_we_lack_is_said_with_both_lists(tmp_path: Path) -> None:
    require_sshd()
    options = ["KexAlgorithms sntrup761x25519-sha512@openssh.com"]
    host = SshHost(tmp_path / "host", address="127.0.0.32", sshd_options=options)
    with host as server, pytest.raises(UnreachableError) as raised:
        await log_in(server.target())

    said = str(raised.value)
    assert "the machine offers sntrup761x25519-sha512@openssh.com; this client mlkem768x25519-sha256" in said
    assert "stricter" in said
    assert "too old" not in said


@pytest.mark.parametrize("option", ["MACs umac-128-etm@openssh.com", "KexAlgorithms curve25519-sha256"])
async def test_server_that_allows_little_is_logged_in_to(tmp_path: Path, option: str) -> None:
    require_sshd()
    with SshHost(tmp_path / "host", address="127.0.0.32", sshd_options=[option]) as server:
        await log_in(server.target())


async def test_security_key_in_the_agent_logs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_sshd()
    with SecurityKeyAgent(tmp_path / "agent") as agent, SshHost(tmp_path / "host", address="127.0.0.32") as server:
        server.authorized_keys.write_text(f"{agent.public}\n")
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent.path))
        await log_in(replace(server.target(), key_path=None))

    assert agent.signed == 1


async def log_in(target: SSHTarget) -> None:
    transport = SshTransport(replace(target, patience_s=6.0))
    try:
        assert not (await transport.run(["true"], timeout_s=60)).exit_code
    finally:
        await transport.close()


class SecurityKeyAgent:
    """Agent with one FIDO key, which always counts as touched (PROTOCOL.u2f)."""

    KIND = b"sk-ssh-ed25519@openssh.com"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.signed = 0
        self._key = Ed25519PrivateKey.generate()
        raw = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._blob = b"".join(map(string, (self.KIND, raw, b"ssh:")))
        self.public = f"{self.KIND.decode()} {base64.b64encode(self._blob).decode()}"
        self._server = socketserver.ThreadingUnixStreamServer(str(path), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: bytes) -> bytes:
        if request[0] == 11:
            return b"\x0c" + (1).to_bytes(4, "big") + string(self._blob) + string(b"touch me")
        assert request[1:].startswith(string(self._blob))
        data = request[1 + len(string(self._blob)) + 4 : -4]
        state = b"\x01" + self.signed.to_bytes(4, "big")
        signed = hashlib.sha256(b"ssh:").digest() + state + hashlib.sha256(data).digest()
        self.signed += 1
        return b"\x0e" + string(string(self.KIND) + string(self._key.sign(signed)) + state)

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        agent = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while length := self.rfile.read(4):
                    self.wfile.write(string(agent.answer(self.rfile.read(int.from_bytes(length, "big")))))

        return Handler


def string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
