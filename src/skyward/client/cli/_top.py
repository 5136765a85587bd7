"""``skyward top``: live view of open pools: workers, calls, queue, load and cost."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyward._concurrency.waiting import SYSTEM_CLOCK
from skyward.client.cli._answer import FAILED, Answer, Say, answers, money
from skyward.client.cli._pool_commands import known_pool
from skyward.client.display.pool_view import PoolView
from skyward.client.display.words import plural
from skyward.client.watching.snapshot_server import read_snapshot
from skyward.events.snapshot import PoolSnapshot
from skyward.provision.buying.ledger import Ledger
from skyward.provision.buying.pool_folder import is_in_use, known_folders

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["top"]

_REFRESH_S = 1.0


@click.command()
@click.argument("pool", required=False)
@click.option("--once", is_flag=True, help="Print the present state once, as --json does and as into a pipe.")
@answers
def top(*, pool: str | None, once: bool) -> Answer:
    """Show nodes, workers and their calls, queue, failures, load and cost of POOL, or of all open pools, live."""
    as_json: bool = click.get_current_context().params["as_json"]
    looks = _look(pool)
    if not (once or as_json) and sys.stdout.isatty() and any(each.snapshot for each in looks):
        looks = _live(pool, looks)
    document = {"pools": [each.document() for each in looks]}
    failed = pool is not None and not any(each.snapshot for each in looks)
    return Answer(document=document, show=lambda say: _show(say, looks), exit_code=FAILED if failed else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolState:
    """State of one pool; without a snapshot, the reason and the ledger's facts."""

    pool_id: str
    snapshot: PoolSnapshot | None = None
    reason: str = ""

    def document(self) -> dict[str, Any]:
        return self.snapshot.to_dict() if self.snapshot else {"pool_id": self.pool_id, "error": self.reason}

    def rich(self) -> RenderableType:
        from rich.text import Text

        return PoolView.of(self.snapshot).rich() if self.snapshot else Text(f"{self.pool_id}: {self.reason}")


def _look(asked: str | None) -> Sequence[_PoolState]:
    folders = known_folders()
    if asked is None:
        return [_look_at(folder) for folder in folders if is_in_use(folder)]
    found = [folder for folder in folders if folder.name == asked or folder.name.startswith(asked)]
    if len(found) == 1:
        return [_look_at(found[0])]
    pool_id = known_pool(Ledger.of_user(), asked)  # else the error that names the known pools
    return [_look_at(next((folder for folder in folders if folder.name == pool_id), Path(pool_id)))]


def _look_at(folder: Path) -> _PoolState:
    try:
        return _PoolState(pool_id=folder.name, snapshot=read_snapshot(folder))
    except OSError:
        living = is_in_use(folder)
        why = "its client does not answer" if living else "it is closed, or its client has ended"
        return _PoolState(pool_id=folder.name, reason=f"{why}; {_ledger_words(folder.name)}")
    except ValueError as error:
        return _PoolState(pool_id=folder.name, reason=f"its client has another version of Skyward: {error}")


def _ledger_words(pool_id: str) -> str:
    """Return the ledger's facts about a pool."""
    now = time.time()
    entries = Ledger.of_user().entries(pool_id=pool_id)
    left = sum(entry.closed_at is None for entry in entries)
    cost = money(sum(entry.cost(now) for entry in entries))
    if left:
        return f"{plural(left, 'machine')} may still run, {cost} so far: `skyward sweep` ends those of dead clients"
    return f"by the ledger none of its machines is left, {cost} in all"


def _live(asked: str | None, looks: Sequence[_PoolState]) -> Sequence[_PoolState]:
    """Redraw every second until Ctrl-C, or until no pool answers; return the last state."""
    from rich.console import Group
    from rich.live import Live

    async def redraw() -> None:
        nonlocal looks
        while any(each.snapshot for each in looks):
            await SYSTEM_CLOCK.sleep(_REFRESH_S)
            looks = await asyncio.to_thread(_look, asked)
            live.update(Group(*(each.rich() for each in looks)), refresh=True)

    first = Group(*(each.rich() for each in looks))
    with suppress(KeyboardInterrupt), Live(first, auto_refresh=False, screen=True) as live:
        asyncio.run(redraw())
    return looks


def _show(say: Say, looks: Sequence[_PoolState]) -> None:
    for each in looks:
        say.rich(each.rich())
    if not looks:
        say.line("No pools are open here; `skyward ls` lists machines.")
