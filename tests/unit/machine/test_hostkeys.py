from __future__ import annotations

import base64
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError, ConfigurationError, HostKeyError
from skyward.machine.ssh_config import Settings, SSHTarget, settings
from skyward.machine.ssh_host_keys import HostKey, known_keys, objection, unknown, verify


def public(filler: int, kind: str = "ssh-ed25519", bits: int = 256) -> str:
    fields = [kind.encode(), *([b"\1\0\1"] if kind == "ssh-rsa" else []), bytes([filler + 127]) * (bits // 8)]
    blob = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    return f"{kind} {base64.b64encode(blob).decode()}"


ONE, TWO, RSA = public(1), public(2), public(3, "ssh-rsa", bits=2048)


def shown(text: str) -> HostKey:
    kind, key = text.split()
    return HostKey(type=kind, blob=base64.b64decode(key))


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


def reaching(known: Path, host: str = "box.example", port: int = 22) -> Settings:
    return settings(SSHTarget(host=host, port=port, known_hosts=str(known), config_path="/dev/null"))


@pytest.mark.parametrize(
    ("hosts", "port", "found"),
    [
        ("box.example", 22, True),
        ("BOX.example", 22, True),
        ("other,box.example", 22, True),
        ("*.example", 22, True),
        ("b?x.example", 22, True),
        ("*.example,!box.example", 22, False),
        ("box", 22, False),
        ("[box.example]:22", 22, False),
        ("[box.example]:2222", 2222, True),
        ("box.example", 2222, True),
        ("[box.example]:2223", 2222, False),
        ("[*.example]:2222", 2222, True),
    ],
)
def test_lines_are_matched_as_openssh_does(known: Path, hosts: str, port: int, found: bool) -> None:
    known.write_text(f"# a comment\n\n{hosts} {ONE} a comment\n")

    assert known_keys(reaching(known, port=port)).accepted == ((shown(ONE),) if found else ())


def test_hashed_names_are_matched(known: Path) -> None:
    known.write_text(f"box.example {ONE}\n[box.example]:2222 {TWO}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert "box" not in known.read_text()

    assert known_keys(reaching(known)).accepted == (shown(ONE),)
    assert known_keys(reaching(known, port=2222)).accepted == (shown(ONE), shown(TWO))
    assert known_keys(reaching(known, host="other")).accepted == ()


def test_key_on_file_is_accepted_and_any_other_refused(known: Path) -> None:
    known.write_text(f"box.example {ONE}\nbox.example {RSA}\n")
    own = reaching(known)

    verify(shown(ONE), known_keys(own), own)
    verify(shown(RSA), known_keys(own), own)
    with pytest.raises(HostKeyError, match="another host key than it should") as raised:
        verify(shown(TWO), known_keys(own), own)
    said = str(raised.value)
    for key in (ONE, TWO, RSA):
        assert shown(key).fingerprint in said
    assert f"ssh-keygen -R 'box.example' -f {known}" in said


def test_small_rsa_key_is_refused(known: Path) -> None:
    known.write_text(f"box.example {RSA}\n")
    own = replace(reaching(known), rsa_bits=3072)

    with pytest.raises(HostKeyError, match="of 2048 bits, and RequiredRSASize is 3072"):
        verify(shown(RSA), known_keys(own), own)


def test_revoked_key_is_refused_though_it_is_on_file(known: Path) -> None:
    known.write_text(f"box.example {ONE}\n@revoked * {ONE}\n")
    own = reaching(known)

    with pytest.raises(HostKeyError, match=f"is revoked in {known}:2"):
        verify(shown(ONE), known_keys(own), own)


@pytest.mark.parametrize("rest", ["ssh-ed25519 !!!", "ssh-ed25519", f"ssh-rsa {ONE.split()[1]}", "1024 35 1234"])
def test_malformed_line_of_the_machine_does_not_count_and_is_named(
    known: Path, caplog: pytest.LogCaptureFixture, rest: str
) -> None:
    known.write_text(f"other.example nonsense\nbox.example {rest}\nbox.example {TWO}\n")
    own = reaching(known)

    found = known_keys(own)

    assert found.accepted == (shown(TWO),)
    assert f"{known}:2 is malformed" in caplog.text
    assert "other" not in caplog.text
    with pytest.raises(HostKeyError, match=f"{known}:2 is malformed"):
        verify(shown(ONE), found, own)


def test_malformed_line_of_a_revoked_key_is_refused(known: Path) -> None:
    known.write_text(f"box.example {ONE}\n@revoked box.example ssh-ed25519 !!!\n")

    with pytest.raises(AuthenticationError, match=f"{known}:2 is malformed"):
        known_keys(reaching(known))


def test_malformed_line_of_another_machine_does_no_harm(known: Path) -> None:
    known.write_text(f"other.example nonsense\nword\n@\nbox.example {ONE}\n")

    assert known_keys(reaching(known)).accepted == (shown(ONE),)


@pytest.mark.parametrize("ignored", [b"\xff\xfe\x00", b"# M\xfcnchen", b"# \x85 \x0c \x1c", b"# \xe2\x80\xa8"])
def test_bytes_that_are_no_text_and_other_line_ends_do_no_harm(known: Path, ignored: bytes) -> None:
    known.write_bytes(ignored + f"\nbox.example {ONE}\r\n".encode())

    assert known_keys(reaching(known)).accepted == (shown(ONE),)


def test_options_that_would_accept_other_keys_are_named(known: Path) -> None:
    known.write_text("")
    own = replace(reaching(known), host_key_notes=("StrictHostKeyChecking accept-new",))

    assert "StrictHostKeyChecking accept-new is not obeyed" in str(unknown(known_keys(own), own))


def test_key_that_contradicts_the_one_for_its_address_is_refused(known: Path) -> None:
    known.write_text(f"box.example {ONE}\n10.0.0.5 {TWO}\n10.0.0.6 {RSA}\n10.0.0.7 {ONE}\n")
    own = replace(reaching(known), check_address=True)

    for address in ("", "10.0.0.6", "10.0.0.7", "10.0.0.8"):
        verify(shown(ONE), known_keys(own, address=address), own)
    with pytest.raises(HostKeyError, match=f"{known}:2 has another key for its address"):
        verify(shown(ONE), known_keys(own, address="10.0.0.5"), own)


def test_given_keys_can_be_revoked(known: Path) -> None:
    known.write_text(f"# lost\n{ONE} comment\n")
    own = replace(reaching(known), host_keys=(ONE,), revoked_keys=(str(known),))

    with pytest.raises(HostKeyError, match=f"is revoked in {known}"):
        verify(shown(ONE), known_keys(own), own)


def certified(folder: Path, *signing: str) -> tuple[bytes, bytes]:
    """Return a host certificate for ``box.example``, and its key; ``ca.pub`` in the folder is the authority."""

    def keygen(*arguments: object) -> None:
        subprocess.run(["ssh-keygen", "-q", *map(str, arguments)], check=True, capture_output=True)

    keygen("-t", "rsa", "-b", "2048", "-N", "", "-f", folder / "ca")
    keygen("-t", "ed25519", "-N", "", "-f", folder / "host")
    keygen(*signing, "-s", folder / "ca", "-I", "box", "-h", folder / "host.pub")
    blobs = [base64.b64decode((folder / name).read_text().split()[1]) for name in ("host-cert.pub", "host.pub")]
    return blobs[0], blobs[1]


@pytest.mark.parametrize(
    ("signing", "allowed", "refusal"),
    [
        pytest.param(("-n", "box.example"), (), "", id="good"),
        pytest.param(("-n", "box.example"), ("ssh-ed25519",), "excludes its signature, rsa-sha2-512", id="restricted"),
        pytest.param(("-n", "box.example", "-t", "ssh-rsa"), (), "excludes its signature, ssh-rsa", id="SHA-1"),
        pytest.param(("-n", "box.example", "-t", "ssh-rsa"), ("ssh-rsa",), "", id="SHA-1 allowed by name"),
        pytest.param(("-n", "other.example"), (), "not for box.example", id="another machine's"),
        pytest.param(("-n", "*.example"), (), "not for box.example", id="a pattern is no name"),
        pytest.param(("-n", "box.example", "-V", "-2d:-1d"), (), "has expired", id="expired"),
        pytest.param(("-n", "box.example", "-V", "+1d:+2d"), (), "not valid yet", id="not valid yet"),
    ],
)
def test_certificates_are_refused_as_openssh_does(
    tmp_path: Path, signing: tuple[str, ...], allowed: tuple[str, ...], refusal: str
) -> None:
    certificate, key = certified(tmp_path, *signing)

    found = objection(certificate, key, "box.example", allowed)

    assert refusal in found
    assert bool(found) == bool(refusal)


def test_file_that_was_named_must_exist(known: Path) -> None:
    with pytest.raises(AuthenticationError, match=f"does not exist: {known}"):
        known_keys(reaching(known))


def test_usual_files_need_not_exist(known: Path) -> None:
    assert known_keys(replace(reaching(known), named_known_hosts=False)).accepted == ()


def test_given_keys_count_alone(known: Path) -> None:
    known.write_text(f"box.example {ONE}\n")

    assert known_keys(replace(reaching(known), host_keys=(f"{TWO} comment",))).accepted == (shown(TWO),)


@pytest.mark.parametrize("text", ["", "ssh-ed25519", "ssh-ed25519 AAAA", "AAAA"])
def test_given_key_that_is_none_is_refused(known: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match="host_keys"):
        known_keys(replace(reaching(known), host_keys=(text,)))
