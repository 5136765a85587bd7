"""Removal of caches that outlive pools, on this machine and on hosts reached over SSH."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import platformdirs

from skyward.errors import ConfigurationError, SkywardError
from skyward.ledger.ledger import LedgerEntry
from skyward.machine.ssh import SshTransport
from skyward.machine.ssh_config import SSHTarget

_TIMEOUT_S = 600.0
_KIB = 1024
_IN_USE = 3
# With a trailing slash, because the folder itself may be a link.
_SCRIPT = """
root=${XDG_CACHE_HOME:-$HOME/.cache}/skyward
echo "$root"
[ -d "$root" ] || { echo 0; exit 0; }
for tags in "$root"/nodes/*/instance.json; do
    [ -f "$tags" ] && exit 3
done
du -sk "$root/" | cut -f1
[ "$1" = look ] && exit 0
chmod -R u+w "$root/" && rm -rf "$root"/* "$root"/.[!.]*
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """A cache that was removed, or would be.

    Attributes:
        where: ``"here"``, or the host.
        path: the folder.
        freed_bytes: size of its content.
        kept_because: reason for keeping it; empty if it is removed.
    """

    where: str
    path: str
    freed_bytes: int = 0
    kept_because: str = ""


def clean_here(entries: Iterable[LedgerEntry], *, look_only: bool) -> Cleaned:
    """Remove this user's cache on this machine, unless nodes run from it.

    Args:
        entries: the open entries of the ledger.
        look_only: report sizes, remove nothing.

    Raises:
        OSError: something cannot be removed.
    """
    root = platformdirs.user_cache_path("skyward")
    users = dict.fromkeys(entry.purchase.pool_id for entry in entries if entry.purchase.provider == "local")
    if users:
        why = f"nodes may run from it, of {', '.join(users)}; see `skyward ls`"
        return Cleaned(where="here", path=str(root), kept_because=why)
    if next(root.glob("nodes/*/instance.json"), None) is not None:
        return Cleaned(where="here", path=str(root), kept_because="nodes run from it, here or on hosts that share it")
    freed_bytes = sum(path.lstat().st_size for path in root.rglob("*")) if root.exists() else 0
    if root.exists() and not look_only:
        shutil.rmtree(root)
    return Cleaned(where="here", path=str(root), freed_bytes=freed_bytes)


async def clean_host(target: SSHTarget, *, look_only: bool) -> Cleaned:
    """Remove this user's cache on a host, unless any nodes are there.

    Raises :class:`~skyward.errors.SkywardError` when the host does not answer, or something cannot be removed.
    """
    transport = SshTransport(target)
    try:
        done = await transport.run(["sh", "-c", _SCRIPT, "sh", "look" if look_only else "remove"], timeout_s=_TIMEOUT_S)
    finally:
        await transport.close()
    path, *rest = done.stdout.split("\n")
    if done.exit_code == _IN_USE:
        return Cleaned(where=str(target), path=path, kept_because="nodes run from it")
    if done.exit_code:
        raise SkywardError(f"{target}: {path} cannot be removed: {done.stderr.strip()}")
    return Cleaned(where=str(target), path=path, freed_bytes=int(rest[0]) * _KIB)


def used_hosts(entries: Iterable[LedgerEntry]) -> tuple[Sequence[SSHTarget], Sequence[Cleaned]]:
    """Return the hosts of the ledger's SSH pools, and an outcome for each whose settings are not valid any more.

    Its key file may be gone by now, for example.
    """
    from skyward.providers.ssh import SSH

    found: dict[SSHTarget, None] = {}
    kept: dict[str, Cleaned] = {}
    valid: set[str] = set()
    for entry in entries:
        if entry.purchase.provider != "ssh":
            continue
        try:
            provider = SSH(**entry.purchase.settings)
        except (ConfigurationError, TypeError) as error:
            why = f"{error} (settings of pool {entry.purchase.pool_id})"
            hosts = map(str, entry.purchase.settings.get("hosts", ()))
            kept |= {host: Cleaned(where=host, path="", kept_because=why) for host in hosts}
        else:
            valid.update(provider.hosts)
            found.update(dict.fromkeys(provider.target(index) for index in range(len(provider.hosts))))
    return list(found), [each for host, each in kept.items() if host not in valid]
