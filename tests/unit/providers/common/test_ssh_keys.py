"""The user's key and the host keys derived from it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from skyward.errors import AuthenticationError
from skyward.providers._common.logins import host_key, make_key_pair, user_key


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_the_users_key_is_made_once_by_however_many_and_is_private(data_home: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(user_key) for _ in range(16)]
        keys = {future.result()[1].public for future in futures}

    path, pair = user_key()
    assert keys == {pair.public}
    assert path.is_relative_to(data_home)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["id_ed25519"]


def test_a_users_key_that_others_could_read_is_made_private_again(data_home: Path) -> None:
    path, _ = user_key()
    path.chmod(0o644)
    user_key()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_users_key_is_an_error_that_names_the_file(data_home: Path) -> None:
    path, _ = user_key()
    path.write_text("no key")
    with pytest.raises(AuthenticationError, match=str(path)):
        user_key()


def test_private_keys_are_not_shown() -> None:
    pair = make_key_pair()
    assert pair.private not in repr(pair)
    assert pair.public.startswith("ssh-ed25519 AAAA")


def test_a_host_key_is_the_same_in_every_process_and_another_for_every_machine(data_home: Path) -> None:
    program = "from skyward.providers._common.logins import host_key; print(host_key('pool-0').public)"
    elsewhere = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert elsewhere.stdout.strip() == host_key("pool-0").public
    assert len({host_key(f"pool-{rank}").public for rank in range(3)} | {user_key()[1].public}) == 4
    assert [each.name for each in data_home.rglob("*") if each.is_file()] == ["id_ed25519"]


def test_a_host_key_is_a_pair_and_depends_on_the_users_key(data_home: Path, tmp_path: Path) -> None:
    mine = host_key("pool-0")
    (tmp_path / "key").write_text(mine.private)
    (tmp_path / "key").chmod(0o600)
    shown = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(tmp_path / "key")], capture_output=True, text=True, timeout=60, check=True
    )
    user_key()[0].unlink()

    assert shown.stdout.split()[:2] == mine.public.split()
    assert host_key("pool-0").public != mine.public


def test_the_derivation_of_host_keys_stays_the_same(data_home: Path) -> None:
    """Another one would lock users out of machines that the version before has launched."""
    path = user_key()[0]
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    assert (
        host_key("pool-0").public == "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGfvgrmdm5BaF6G0oGqaqffRheYwpPV9Ez3ff1/KKymE"
    )
