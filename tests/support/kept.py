"""Kept fleets of tests: their end, and the process that looks after one."""

from __future__ import annotations

import asyncio
import os
from typing import Final

import psutil

from skyward.ledger.fleet_record import FleetFolder
from skyward.ledger.keeper import end_fleet
from skyward.ledger.ledger import Ledger
from support.eventually import eventually

__all__ = ["KEEPER_S", "end_kept_fleet", "keeper_process"]

KEEPER_S: Final = 30.0
"""Longest time that a keeper takes to see that its fleet has ended, on a busy machine."""


def end_kept_fleet(name: str) -> None:
    """End a fleet's machines, and wait for the end of its keeper."""
    asyncio.run(end_fleet(FleetFolder(name), Ledger.of_user()))
    for attempt in eventually(KEEPER_S):
        with attempt:
            assert not FleetFolder(name).has_keeper()


def keeper_process(name: str) -> psutil.Process:
    """Return the keeper of a fleet in this test's state folder; tests beside it may have fleets of the same name."""
    (keeper,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[-2:] == ["skyward.ledger.keeper", name]
        and process.environ().get("XDG_STATE_HOME") == os.environ["XDG_STATE_HOME"]
    ]
    return keeper
