from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from skyward.errors import ConfigurationError
from skyward.machine.ssh_config import SSHTarget, route, settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    return tmp_path


def configure(home: Path, text: str, name: str = "config") -> None:
    (home / ".ssh" / name).write_text(text)


def test_without_a_configuration_the_usual_is_meant(home: Path) -> None:
    own = settings(SSHTarget(host="Box.Example"))

    assert (own.host, own.port, own.user, own.names) == ("box.example", 22, getpass.getuser(), ("box.example",))
    assert own.known_hosts[0] == str(home / ".ssh/known_hosts")
    usual = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
    assert own.identities == tuple(str(home / ".ssh" / name) for name in usual)
    assert not own.named_known_hosts


def test_what_is_asked_for_wins_over_the_configuration(home: Path) -> None:
    configure(home, "Host box\n  Port 2\n  User configured\n  UserKnownHostsFile /configured\n  IdentityFile ~/own\n")
    asked = SSHTarget(host="box", port=3, user="asked", known_hosts="~/asked", key_path="~/key")

    configured, own = settings(SSHTarget(host="box")), settings(asked)

    assert (configured.port, configured.user, configured.known_hosts[0]) == (2, "configured", "/configured")
    assert configured.identities == (str(home / "own"),)
    assert (own.port, own.user, own.known_hosts, own.key_path) == (3, "asked", (f"{home}/asked",), f"{home}/key")
    assert own.named_known_hosts


def test_what_is_asked_for_reaches_the_proxy_command(home: Path) -> None:
    configure(home, "Host box\n  HostName 10.0.0.1\n  ProxyCommand relay %r@%h:%p\n")

    assert settings(SSHTarget(host="box", port=3, user="me")).proxy_command == "relay me@10.0.0.1:3"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Host box\n  HostName 10.0.0.1\n", ("10.0.0.1",)),
        ("Host box\n  HostName 10.0.0.1\n  Port 2222\n", ("[10.0.0.1]:2222", "10.0.0.1")),
        ("Host box\n  HostName 10.0.0.1\n  Port 2222\n  HostKeyAlias Name\n", ("name",)),
    ],
)
def test_machines_are_filed_under_the_name_that_openssh_uses(home: Path, text: str, names: tuple[str, ...]) -> None:
    configure(home, text)

    assert settings(SSHTarget(host="box")).names == names


def test_included_files_count_where_they_are_included(home: Path) -> None:
    (home / ".ssh" / "more").mkdir()
    configure(home, "Host box\n  HostName 10.0.0.1\n", "more/a")
    configure(home, "Include more/*\nHost box\n  HostName 10.0.0.2\nHost other\n  Include b\n  Port 5\n")
    configure(home, "User included\nHost elsewhere\n  Port 9\n", "b")

    assert settings(SSHTarget(host="box")).host == "10.0.0.1"
    other = settings(SSHTarget(host="other"))
    assert (other.user, other.port) == ("included", 5)


def test_file_that_includes_itself_is_refused(home: Path) -> None:
    configure(home, "Include config\n")

    with pytest.raises(ConfigurationError, match="includes itself"):
        settings(SSHTarget(host="box"))


@pytest.mark.parametrize("text", ["nonsense", "Host box\n  Port many\n", "Match exec\n"])
def test_configuration_that_cannot_be_used_is_named(home: Path, text: str) -> None:
    configure(home, text)

    with pytest.raises(ConfigurationError, match="the SSH configuration"):
        settings(SSHTarget(host="box"))


def test_configuration_that_was_named_must_exist(home: Path) -> None:
    with pytest.raises(ConfigurationError, match="no/config cannot be read"):
        settings(SSHTarget(host="box", config_path=str(home / "no/config")))


def test_way_leads_over_every_hop_in_order(home: Path) -> None:
    configure(home, "Host box\n  ProxyJump me@gate:7,ssh://inner\nHost gate\n  ProxyJump outer\n")

    hops = route(SSHTarget(host="box", key_path="key", known_hosts="known"))

    assert [(hop.user, hop.host, hop.port) for hop in hops] == [
        (None, "outer", None),
        ("me", "gate", 7),
        (None, "inner", None),
    ]
    assert {hop.known_hosts for hop in hops} == {"known"}
    assert {hop.key_path for hop in hops} == {None}


@pytest.mark.parametrize("text", ["Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n", "Host *\n  ProxyJump gate\n"])
def test_circle_is_refused(home: Path, text: str) -> None:
    configure(home, text)

    with pytest.raises(ConfigurationError, match="circle"):
        route(SSHTarget(host="a"))


def test_jump_of_none_is_none(home: Path) -> None:
    configure(home, "Host box\n  ProxyJump none\nHost *\n  ProxyJump gate\n")

    assert route(SSHTarget(host="box")) == ()


def test_jump_without_a_host_is_refused(home: Path) -> None:
    configure(home, "Host box\n  ProxyJump me@:7\n")

    with pytest.raises(ConfigurationError, match="names no host: 'me@:7'"):
        route(SSHTarget(host="box"))


def test_command_that_carries_the_connection_is_the_whole_way(home: Path) -> None:
    configure(home, "Host *\n  ProxyJump gate\n  ProxyCommand relay %h\n")
    target = SSHTarget(host="box", proxy=("carry", "two words", "100%"))

    assert settings(target).proxy_command == "carry 'two words' 100%"
    assert route(target) == ()


@pytest.mark.parametrize(
    "command",
    ["nc ${GATE:-gate} 22", "nc ${GATE%%.*} 22", "sh -c '${MISSING}'", "~/bin/relay", 'nc "${HOME}" 22'],
)
def test_variables_of_a_proxy_command_are_its_shells(home: Path, command: str) -> None:
    configure(home, f"Host box\n  ProxyCommand {command.replace('%', '%%')} %h\n")

    assert settings(SSHTarget(host="box")).proxy_command == f"{command} box"


@pytest.mark.parametrize(
    ("agent", "socket"),
    [
        ("$LAB_SOCK", "/lab.sock"),
        ("${LAB_SOCK}", "/lab.sock"),
        ("${LAB}/agent.sock", "/lab/agent.sock"),
        ("SSH_AUTH_SOCK", "/usual.sock"),
        ("$MISSING", None),
        ("none", None),
    ],
)
def test_variables_of_the_agents_socket_are_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch, agent: str, socket: str | None
) -> None:
    for name, value in {"LAB_SOCK": "/lab.sock", "LAB": "/lab", "SSH_AUTH_SOCK": "/usual.sock"}.items():
        monkeypatch.setenv(name, value)
    configure(home, f"IdentityAgent {agent}\n")

    assert settings(SSHTarget(host="box")).agent == socket
