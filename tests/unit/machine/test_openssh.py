"""The SSH configuration means here what it means to OpenSSH."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyward.errors import ConfigurationError
from skyward.machine.ssh_config import (
    IGNORED,
    OBEYED,
    SSHTarget,
    default_options,
    read_configuration,
    route,
    settings,
)
from skyward.testing.hosts import require_sshd
from support.ssh_configs import HOSTS, random_configuration

require_sshd()

READ = (
    "addressfamily",
    "bindaddress",
    "certificatefile",
    "connecttimeout",
    "globalknownhostsfile",
    "hostkeyalias",
    "hostname",
    "identitiesonly",
    "identityagent",
    "knownhostscommand",
    "port",
    "preferredauthentications",
    "proxycommand",
    "revokedhostkeys",
    "user",
)
DEFAULTS = {
    "addressfamily": ["any"],
    "connecttimeout": ["none"],
    "identitiesonly": ["no"],
    "globalknownhostsfile": None,
}


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> str:
    """The home folder of the account, the only one that ssh knows."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("LAB_SOCK", "/lab.sock")
    return home


def printed(path: Path, host: str, *arguments: str) -> dict[str, list[str]] | None:
    """Return what `ssh -G` prints; None if it refuses the configuration."""
    argv = ["ssh", "-G", "-T", "-F", path, *arguments, host]
    completed = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if completed.returncode:
        return None
    options: dict[str, list[str]] = {}
    for line in completed.stdout.splitlines():
        name, _, value = line.partition(" ")
        options.setdefault(name, []).append(value)
    return options


def with_values(text: str, options: dict[str, list[str]], host: str, home: str) -> str:
    tokens = {"h": options["hostname"][0], "n": host, "p": options["port"][0], "r": options["user"][0]}
    tokens |= {"u": pwd.getpwuid(os.getuid()).pw_name, "%": "%"}
    for token, value in tokens.items():
        text = text.replace(f"%{token}", value)
    return text.replace("~", home)


def agent_of(options: dict[str, list[str]], host: str, home: str) -> str | None:
    named = options.get("identityagent", ["SSH_AUTH_SOCK"])[0]
    sockets = {"none": None, "SSH_AUTH_SOCK": os.environ.get("SSH_AUTH_SOCK"), "$LAB_SOCK": "/lab.sock"}
    return sockets[named] if named in sockets else with_values(named, options, host, home)


def check(path: Path, host: str, home: str, arguments: Sequence[str], target: SSHTarget) -> bool:
    """Compare the settings with what ssh prints; return False if ssh refuses, as Skyward must."""
    options = printed(path, host, *arguments)
    if options is None:
        with pytest.raises(ConfigurationError):
            settings(target)
        return False
    own = settings(target)
    keys = [with_values(key, options, host, home) for key in options["identityfile"] if key != "none"]
    aliases = options.get("hostkeyalias")
    bracketed = [f"[{own.host}]:{own.port}"] if own.port != 22 else []
    command = options.get("proxycommand")
    jumps = options.get("proxyjump")

    assert (own.host, str(own.port), own.user) == tuple(options[name][0] for name in ("hostname", "port", "user"))
    assert list(own.identities) == keys
    assert own.identities_only == (options["identitiesonly"][0] == "yes")
    assert own.agent == agent_of(options, host, home)
    assert own.proxy_command == (command and with_values(command[0], options, host, home))
    assert ",".join(own.jumps) == (jumps[0] if jumps else "")
    nearest = printed(path, "gate", *(["-p", "7", "-l", "me"] if jumps and ":7" in jumps[0] else []))
    if nearest and "proxyjump" not in nearest:
        assert [hop.host for hop in route(target)] == (
            {"gate": ["gate"]}.get(jumps[0], ["gate", "inner"]) if jumps else []
        )
    assert list(own.names) == ([aliases[0].lower()] if aliases else [*bracketed, own.host])
    files = [options[name][0] for name in ("userknownhostsfile", "globalknownhostsfile")]
    assert [*own.known_hosts] == [file for several in files for file in several.split() if file != "none"]
    assert [*own.revoked_keys] == options.get("revokedhostkeys", [])
    assert [*own.known_hosts_command] == shlex.split(options.get("knownhostscommand", [""])[0])
    allowed = options["ciphers"][0]
    assert ",".join(own.algorithms.get("Ciphers", ())) == (allowed if allowed.startswith("aes256-ctr") else "")
    assert own.dial_s == {"none": None}.get(options["connecttimeout"][0], 7.0)
    return True


def hops(jumps: Sequence[str]) -> list[str]:
    return [jump.removeprefix("ssh://") for several in jumps for jump in several.split(",")]


def check_reader(path: Path, host: str, home: str) -> bool:
    """Compare the reader for machines without ssh; return False if it refuses."""
    options = printed(path, host)
    try:
        read = read_configuration(host, asked_for={}, path=str(path), system="/etc/ssh/ssh_config")
    except ConfigurationError:
        return False
    assert options is not None
    values = {name: [with_values(value, options, host, home) for value in values] for name, values in read.items()}
    ours = {**read, "identityagent": values.get("identityagent", ()), "proxyjump": hops(read.get("proxyjump", ()))}
    assert hops(options.get("proxyjump", ())) == ours.pop("proxyjump")
    for name in READ:
        assert [*ours.get(name, ())] == options.get(name, []) or options.get(name) == DEFAULTS.get(name), name
    if read["identityfile"][0].startswith("~/.ssh/id_"):
        assert [*read["identityfile"]] == [
            key for key in options["identityfile"] if key.rpartition("_")[2] not in {"xmss", "dsa"}
        ]
    else:
        assert [*read["identityfile"]] == options["identityfile"]
    assert read["userknownhostsfile"][0].replace("~", home) == options["userknownhostsfile"][0]
    return True


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(n, marks=pytest.mark.full) for n in range(60, 400))])
def test_random_configurations_mean_what_openssh_says(seed: int, tmp_path: Path, account: str) -> None:
    path = random_configuration(seed, tmp_path)
    host = HOSTS[seed % len(HOSTS)]
    asked = SSHTarget(host=host, port=7, user="ann", config_path=str(path))

    check(path, host, account, [], SSHTarget(host=host, config_path=str(path)))
    check(path, host, account, ["-p", "7", "-l", "ann"], asked)


def test_without_openssh_configurations_mean_the_same_or_are_refused(tmp_path: Path, account: str) -> None:
    read = [
        check_reader(random_configuration(seed, tmp_path), HOSTS[seed % len(HOSTS)], account)
        for seed in range(1000, 1080)
    ]

    assert sum(read) > 5  # most have a Match


def test_every_option_of_this_openssh_is_obeyed_or_known_not_to_matter() -> None:
    assert not default_options().keys() - OBEYED - IGNORED


def test_docs_list_the_ignored_options() -> None:
    page = (Path(__file__).parents[3] / "docs/machines-of-your-own.md").read_text()
    table = page.partition("**Ignored**")[2].partition("An option in none")[0]

    assert {name.lower() for name in re.findall(r"`(\w+)`", table)} == IGNORED


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("PubkeyAuthentication no", "PubkeyAuthentication no"),
        ("PreferredAuthentications password", "PreferredAuthentications password"),
        ("IdentityFile ~/%q", "identityfile has %q"),
        ("IdentityFile ${NO_SUCH_VARIABLE_HERE}", "NO_SUCH_VARIABLE_HERE"),
        ("ProxyJump gate\nHost gate\nProxyJump gate", "jumphost loop"),
        ("Nonsense yes", "Bad configuration option: nonsense"),
        ("Port many", "Bad port"),
    ],
)
def test_what_cannot_be_obeyed_is_named(tmp_path: Path, account: str, line: str, words: str) -> None:
    (tmp_path / "config").write_text(f"Host box\n{line}\n")

    with pytest.raises(ConfigurationError, match=words):
        route(SSHTarget(host="box", config_path=str(tmp_path / "config")))


def test_option_that_nobody_here_knows_is_named_where_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later OpenSSH prints more options."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\n{shutil.which("ssh")} "$@" || exit\n'
        'case "$*" in *config*) echo quantumonly yes;; *) echo quantumonly no;; esac; echo harmless yes\n'
    )
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    (tmp_path / "config").write_text("")

    with pytest.raises(ConfigurationError, match="sets quantumonly to 'yes'"):
        settings(SSHTarget(host="box", config_path=str(tmp_path / "config")))


def test_conditions_run_their_programs_once_an_opening(tmp_path: Path, account: str) -> None:
    config, runs = tmp_path / "config", tmp_path / "runs"
    config.write_text(f'Match host box exec "echo once >> {runs}"\nUser ann\n')
    target = SSHTarget(host="box", config_path=str(config))

    with ThreadPoolExecutor(8) as threads:
        users = {each.user for each in threads.map(settings, [target] * 20)}
    route(target)

    assert users == {"ann"}
    assert runs.read_text() == "once\n"
    config.write_text("User bob\n")
    os.utime(config, (0, 0))
    assert settings(target).user == "bob"


def test_a_corrected_included_file_counts_at_once(tmp_path: Path, account: str) -> None:
    config, more = tmp_path / "config", tmp_path / "more"
    config.write_text(f"Include {more}\n")
    more.write_text("Nonsense here\n")
    target = SSHTarget(host="box", config_path=str(config))

    with pytest.raises(ConfigurationError, match=r"(?i)nonsense"):
        settings(target)
    more.write_text("User ann\n")

    assert settings(target).user == "ann"


def test_host_that_looks_like_an_option_is_none(tmp_path: Path, account: str) -> None:
    (tmp_path / "config").write_text("")
    with pytest.raises(ConfigurationError, match="invalid characters"):
        settings(SSHTarget(host=f"-oProxyCommand=touch {tmp_path}/ran", config_path=str(tmp_path / "config")))


@pytest.mark.parametrize(
    "line",
    [
        'Match exec "true"',
        "Match host box",
        "User a\\ b",
        "Ciphers +aes128-ctr",
        "Include ${X}",
        "CanonicalizeHostname yes",
    ],
)
def test_without_openssh_what_only_it_can_read_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "config").write_text(f"{line}\n  User ann\n")

    with pytest.raises(ConfigurationError, match="only OpenSSH itself can read"):
        read_configuration("box", asked_for={}, path=str(tmp_path / "config"), system="/nothing")
