"""When a node writes back what was changed in its volumes, and what is said when it cannot."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal

import pytest

from skyward.node.storage.volume_program import VolumeKeeper
from skyward.request.volume import GrantedVolume, S3Volume, VolumeAccess
from skyward.wire.node_config import RELEASE_S
from support.nodes import node_config
from support.simulation import simulate


class Keeper(VolumeKeeper):
    """A keeper whose program is the test: it notes when it is run, and answers in turn.

    Attributes:
        ran: in which second, and what for.
        answers: of each run, why it failed; those that follow do not fail. None never comes.
        told: troubles.
    """

    def __init__(self, *answers: str | None) -> None:
        volume = S3Volume(mount_path="/mnt/data", bucket="bucket", read_only=False)
        config = node_config(volumes=(GrantedVolume(volume=volume, access=VolumeAccess()),))
        self.told: list[str] = []
        super().__init__(config, self.told.append)
        self.ran: list[tuple[float, str]] = []
        self.answers = deque(answers)

    async def _run(self, verb: Literal["push", "release"]) -> str:
        self.ran.append((asyncio.get_running_loop().time(), verb))
        answer = self.answers.popleft() if self.answers else ""
        if answer is None:
            await asyncio.Event().wait()
        return answer or ""

    async def keep_for(self, seconds: float, *, hurry_after: float = float("inf"), soon: Sequence[float] = ()) -> None:
        """Keep for so long; there is a hurry after so many seconds of it, and something to write soon at others."""
        keeping = asyncio.ensure_future(self.keep())
        if hurry_after < seconds:
            asyncio.get_running_loop().call_later(hurry_after, self.hurry)
        for after in soon:
            asyncio.get_running_loop().call_later(after, self.write_soon)
        await asyncio.wait((keeping,), timeout=seconds)
        assert not keeping.done()
        keeping.cancel()
        await asyncio.wait((keeping,))


def test_changes_are_written_back_every_minute_and_every_second_once_there_is_a_hurry() -> None:
    keeper = Keeper()

    simulate(lambda: keeper.keep_for(133.5, hurry_after=130))

    assert keeper.ran == [(second, "push") for second in (61, 122, 131, 132, 133)]
    assert keeper.told == []


def test_what_is_to_be_written_soon_waits_until_its_last_write_is_old_enough() -> None:
    keeper = Keeper()

    simulate(lambda: keeper.keep_for(100, soon=(10, 12, 30)))

    assert keeper.ran == [(second, "push") for second in (16, 22, 36, 97)]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (["no space", "no space"], ["no space"]),
        (["no space", "no network"], ["no space", "no network"]),
        (["no space", "", "no space"], ["no space", "no space"]),
    ],
)
def test_why_it_cannot_be_written_back_is_told_when_it_begins_or_changes(answers: list[str], told: list[str]) -> None:
    keeper = Keeper(*answers)

    simulate(lambda: keeper.keep_for(10.5, hurry_after=0))

    assert keeper.told == told
    assert len(keeper.ran) == 10, "it goes on"


def test_an_end_that_takes_too_long_is_given_up_and_told() -> None:
    keeper = Keeper(None)

    simulate(keeper.release)

    assert keeper.ran == [(0, "release")]
    assert keeper.told == [f"it took longer than {RELEASE_S:g} s"]
