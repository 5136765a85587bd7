"""``skyward clean``: removal of cached environments."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

import click

from skyward.client.cli._answer import FAILED, Answer, Say, answers
from skyward.errors import SkywardError
from skyward.providers.ssh import SSH
from skyward.provision.buying.cleaning import Cleaned, clean_here, clean_host, used_hosts
from skyward.provision.buying.ledger import Ledger
from skyward.transport.access import SSHTarget

__all__ = ["clean"]

_UNIT = 1024


@click.command()
@click.option(
    "--ssh", "hosts", metavar="HOST", multiple=True, help="Clean this host instead of this machine; may be repeated."
)
@click.option(
    "--hosts", "all_hosts", is_flag=True, help="Clean every host of the last month's pools instead of this machine."
)
@click.option("--dry-run", is_flag=True, help="Only report how much would be freed.")
@answers
def clean(*, hosts: Sequence[str], all_hosts: bool, dry_run: bool) -> Answer:
    """Remove cached environments. The next pool builds those that it needs again."""
    ledger = Ledger.of_user()
    targets = [SSH(hosts=[host]).target(0) for host in hosts]
    used, kept = used_hosts(ledger.entries()) if all_hosts else ((), ())
    if hosts or all_hosts:
        cleaned = [*asyncio.run(_clean_hosts([*targets, *used], look_only=dry_run))]
        cleaned += [each for each in kept if each.where not in hosts]
    else:
        cleaned = [clean_here(ledger.open_entries(), look_only=dry_run)]
    freed_bytes = sum(each.freed_bytes for each in cleaned)

    def show(say: Say) -> None:
        for each in cleaned:
            outcome = f"KEPT: {each.kept_because}" if each.kept_because else size(each.freed_bytes)
            say.line(f"{each.where}  {each.path}  {outcome}")
        say.line(f"{size(freed_bytes)} {'would be freed' if dry_run else 'freed'}")

    document = {"cleaned": [asdict(each) for each in cleaned], "freed_bytes": freed_bytes, "dry_run": dry_run}
    return Answer(document=document, show=show, exit_code=FAILED if any(each.kept_because for each in cleaned) else 0)


def size(count: float) -> str:
    """Return a number of bytes as text, with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < _UNIT:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= _UNIT
    return f"{count:.1f} TiB"


async def _clean_hosts(targets: Sequence[SSHTarget], *, look_only: bool) -> Sequence[Cleaned]:
    return await asyncio.gather(*(_clean_host(target, look_only=look_only) for target in targets))


async def _clean_host(target: SSHTarget, *, look_only: bool) -> Cleaned:
    try:
        return await clean_host(target, look_only=look_only)
    except (SkywardError, OSError) as error:
        return Cleaned(where=str(target), path="", kept_because=str(error))
