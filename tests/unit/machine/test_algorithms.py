from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyward.machine.ssh_login import disagreement

OURS = SimpleNamespace(
    kex=("curve25519-sha256",),
    key_types=("ssh-ed25519",),
    ciphers=("aes128-gcm@openssh.com", "aes256-ctr"),
    digests=("hmac-sha2-256",),
)


def client(**offered: str) -> Any:
    return SimpleNamespace(
        offered={name: names.split(",") for name, names in offered.items()}, get_security_options=lambda: OURS
    )


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        ({"kex_algo_list": "sntrup761x25519-sha512,kex-strict-s-v00@openssh.com"}, ["KexAlgorithms", "stricter"]),
        ({"kex_algo_list": "diffie-hellman-group1-sha1,diffie-hellman-group14-sha1"}, ["KexAlgorithms", "outdated"]),
        ({"server_key_algo_list": "ssh-rsa,ssh-dss"}, ["HostKeyAlgorithms", "outdated"]),
        ({"server_key_algo_list": "sk-ssh-ed25519@openssh.com"}, ["HostKeyAlgorithms", "stricter"]),
        ({"server_encrypt_algo_list": "chacha20-poly1305@openssh.com"}, ["Ciphers", "aes256-ctr", "stricter"]),
        ({"server_encrypt_algo_list": "aes128-cbc,3des-cbc,arcfour"}, ["Ciphers", "outdated"]),
        ({"server_mac_algo_list": "umac-128-etm@openssh.com"}, ["MACs", "hmac-sha2-256", "stricter"]),
    ],
)
def test_nothing_in_common_is_said_with_both_lists(offered: dict[str, str], words: list[str]) -> None:
    said = disagreement(client(**offered))

    theirs = [name for name in next(iter(offered.values())).split(",") if "kex-strict" not in name]
    assert f"the machine offers {', '.join(theirs)}; this client " in said
    assert all(word in said for word in words)


def test_something_in_common_is_no_disagreement() -> None:
    assert disagreement(client(kex_algo_list="sntrup761,curve25519-sha256")) == ""
    assert disagreement(client()) == ""
