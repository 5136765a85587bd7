"""End of kept fleets: a process of the user's that outlives the client, and ends what the fleet's nodes leave.

Nodes end themselves, and power their machines off where that ends the bill. The keeper confirms it with the provider,
ends what cannot end itself, closes the ledger's entries, and deletes the fleet's keys.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from io import FileIO
from typing import Final

from skyward.base.platform import try_lock
from skyward.base.waiting import SYSTEM_CLOCK, Clock
from skyward.environment.supervisor_check import SUPERVISOR_GONE, supervisor_check
from skyward.errors import PoolStateError, SkywardError
from skyward.ledger.fleet_record import KEEPER_LOCK, FleetFolder, FleetRecord, KeptNode, fleets_home, kept_fleets
from skyward.ledger.job_folders import job_folders
from skyward.ledger.ledger import Ledger, LedgerEntry
from skyward.ledger.ownership import Moment
from skyward.ledger.sweep import Sweep, SweepReport
from skyward.providers.base import InstanceState, Provider
from skyward.providers.several import label_of, recorded_provider

MARGIN_S: Final = 300.0
"""Seconds after its time for which a kept machine is left to its keeper by the sweeps of other processes."""
_logger = logging.getLogger("skyward")
_LOG: Final = "keeper.log"
# Not in the folder of the program, whose files could take the place of modules.
_PROGRAM: Final = (sys.executable, "-P", "-m", "skyward.ledger.keeper")
# Forked, and adopted by init: the client does not wait for its end.
_DETACHED: Final = "import os, sys; os.fork() and os._exit(0); os.execv(sys.argv[1], sys.argv[1:])"
_TICK_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 60.0
_CHECK_S: Final = 60.0
_AGAIN_S: Final = 60.0
_FETCHES: Final = 0.3
"""Part of the time that a fleet is kept between two looks for results."""
_FETCH_S: Final = 600.0


def start_keeper(folder: FleetFolder) -> None:
    """Start a process that looks after the fleet, unless it has one. It outlives this process. Blocks."""
    if folder.has_keeper():
        return
    with open(folder.path / _LOG, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        subprocess.run(
            [sys.executable, "-I", "-c", _DETACHED, *_PROGRAM, folder.name],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder.path,
            start_new_session=True,
            check=True,
        )


def start_keepers() -> None:
    """Start the keepers of the fleets that have none, as after a restart of this machine."""
    try:
        for folder in kept_fleets():
            start_keeper(folder)
    except (OSError, subprocess.SubprocessError) as error:  # such as another user's folder, after sudo
        _logger.warning("no process looks after the kept fleets in %s: %s", fleets_home(), error)


async def end_fleet(folder: FleetFolder, ledger: Ledger) -> SweepReport:
    """End a fleet's machines, confirm it, and delete its keys; its record stays if one may be left. Repeatable."""
    report = SweepReport()
    if pool_id := folder.pool_id():
        report = await Sweep(ledger).end_pool(pool_id)
        if not report.left:
            folder.forget()
    return report


class Keeper:
    """The process that looks after one fleet, from its opening to its end.

    Args:
        folder: the fleet's folder.
        ledger: the record of the machines.
        clock: the time between two looks.
    """

    def __init__(self, folder: FleetFolder, ledger: Ledger, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._folder = folder
        self._ledger = ledger
        self._clock = clock
        self._fetch_at = -math.inf

    async def run(self) -> None:
        """Wait until the fleet has neither a client nor a living node, and end what is left of it."""
        while self._folder.written_at():
            try:
                pause_s = await self._look()
            except Exception as error:  # a full disk or a provider's refusal passes, and machines may cost money
                _say(f"{type(error).__name__}: {error}")
                pause_s = _AGAIN_S
            until, record = self._clock.elapsed() + pause_s, self._folder.written_at()
            # It may be ended from elsewhere, or kept for another time.
            while self._clock.elapsed() < until and record and self._folder.written_at() == record:
                await self._clock.sleep(min(_TICK_S, pause_s))

    async def _look(self) -> float:
        """Look at a fleet once; return the seconds until the next look."""
        if self._folder.is_held():
            return _TICK_S
        record = self._read()
        if record is not None and record.left is None and record.nodes:
            self._note_left(record)
            return _TICK_S
        if await self._lives(record):
            if record is None:
                return _LONGEST_PAUSE_S
            # Its jobs may go on for longer than it is kept.
            self._keep(record)
            await self._end_strays(record)
            await self._fetch_results(record)
            return min(max(record.keep_s / 10, _TICK_S), _LONGEST_PAUSE_S)
        if not self._folder.try_hold(as_keeper=True):
            return _TICK_S
        try:
            if await self._lives(self._read()):  # a client has come and gone meanwhile
                return _TICK_S
            report = await end_fleet(self._folder, self._ledger)
        finally:
            self._folder.release()
        for left in report.left:
            _say(f"{left.entry.instance_id or left.entry.key} may be left: {left.reason}")
        return _AGAIN_S if report.left else 0.0

    def _read(self) -> FleetRecord | None:
        """Return the record, of whatever version; None for one that cannot be read."""
        try:
            return self._folder.read(any_version=True)
        except PoolStateError as error:
            _say(str(error))
            return None

    async def _fetch_results(self, record: FleetRecord) -> None:
        """Copy results of jobs to this machine while their fleet lives: no program of the user's may ask in time."""
        jobs = (folder for folder in job_folders(record.name) if folder.record.pool_id == record.pool_id)
        now = self._clock.elapsed()
        if now < self._fetch_at or not any(folder.unfetched() for folder in jobs):
            return
        self._fetch_at = now + min(record.keep_s * _FETCHES, _LONGEST_PAUSE_S)
        argv = (sys.executable, "-P", "-m", "skyward", "jobs", record.name, "--fetch")
        process = await asyncio.create_subprocess_exec(*argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(_FETCH_S):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _note_left(self, record: FleetRecord) -> None:
        """Note the end of a client that was killed."""
        if self._folder.try_hold(as_keeper=True):
            try:
                if self._read() == record:
                    self._folder.write(replace(record, left=Moment.after()))
                    self._keep(record)
            finally:
                self._folder.release()

    def _keep(self, record: FleetRecord) -> None:
        self._ledger.keep_pool(record.pool_id, Moment.after(record.keep_s + MARGIN_S), keys=record.keys)

    async def _end_strays(self, record: FleetRecord) -> None:
        """End machines that a killed client bought or gave up and that are no nodes, and add their cost."""
        open_entries = self._ledger.open_entries(pool_id=record.pool_id)
        report = await Sweep(self._ledger).end_dead(open_entries)
        for left in report.left:
            _say(f"{left.entry.instance_id or left.entry.key} may be left: {left.reason}")
        # An entry without an id stands for a machine only if one with its tag was found.
        existed = {entry.key for entry in open_entries if entry.instance_id} | {
            swept.entry.key for swept in report.ended
        }
        entries = [entry for entry in self._ledger.entries(pool_id=record.pool_id) if entry.key in existed]
        await self._add_cost(record, [entry for entry in entries if entry.closed_at is not None])

    async def _add_cost(self, record: FleetRecord, ended: Sequence[LedgerEntry]) -> None:
        if not ended or not self._folder.try_hold(as_keeper=True):
            return
        provider = recorded_provider(record.provider, record.settings)
        try:
            if self._read() != record:
                return
            spent = defaultdict[str, float](float, record.spent)
            for entry in ended:
                purchase = entry.purchase
                spent[label_of(provider, purchase.provider, purchase.settings)] += entry.cost(time.time())
            self._folder.write(replace(record, spent=dict(spent)))
        finally:
            self._folder.release()
            await provider.close()

    async def _lives(self, record: FleetRecord | None) -> bool:
        """Return whether a node of the fleet lives, or may live, and may cost money until the next look."""
        if record is None:  # its nodes end themselves; by the ledger, no one may need them any more
            entries = self._ledger.open_entries(pool_id=self._folder.pool_id())
            return any(entry.kept_until is not None and entry.kept_until.left_s > 0 for entry in entries)
        if not record.nodes:
            return False
        if record.request.max_cost is not None and record.cost(_LONGEST_PAUSE_S) >= record.request.max_cost:
            _say(f"the fleet has cost {record.cost():.2f} USD, and max_cost is {record.request.max_cost:g}: it ends")
            return False
        if record.restarting and (until := record.kept_until) is not None and until.left_s > 0:
            return True  # its machines wait for the next client, without a supervisor
        provider = recorded_provider(record.provider, record.settings)
        try:
            looks = (_node_lives(provider.member_of(node.instance.offer), node) for node in record.nodes)
            return any(await asyncio.gather(*looks))
        finally:
            await provider.close()


async def _node_lives(provider: Provider, node: KeptNode) -> bool:
    """Return False for a node that is over: by its hard cap, by its provider, or by its machine."""
    if node.started.left_s + node.config.timeout_s + MARGIN_S < 0:
        return False
    return not (await _is_reported_over(provider, node) or await _is_seen_over(node))


async def _is_reported_over(provider: Provider, node: KeptNode) -> bool:
    """Return True if a rented machine has ended by its provider's record."""
    if provider.own_machines:  # they are asked themselves
        return False
    try:
        (seen,) = await provider.describe([node.instance.id])
    except Exception as error:
        _say(f"{provider.name} does not describe machine {node.instance.id}: {error}")
        return False
    return seen.state in (InstanceState.STOPPING, InstanceState.GONE, InstanceState.FAILED)


async def _is_seen_over(node: KeptNode) -> bool:
    """Return True if the machine answers, and has no supervisor any more."""
    access = node.instance.access
    assert access is not None  # it had a client
    check = supervisor_check(node.environment, node.ready.pid, node.instance.id, may_be_wiped=access.boot_s > 0)
    transport = access.open()
    try:
        done = await transport.run(check, timeout_s=_CHECK_S)
    except (SkywardError, OSError) as error:
        _say(f"node {node.rank} does not answer: {error}")
        return False
    finally:
        await transport.close()
    return done.exit_code == SUPERVISOR_GONE


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stderr.flush()


async def look_after(folder: FleetFolder, ledger: Ledger, *, clock: Clock = SYSTEM_CLOCK) -> None:
    """Look after the fleets in a folder, one after the other, until there is none; hold the folder then.

    A client that opens the next fleet holds the folder, and starts no keeper while this one runs.
    """
    while True:
        await Keeper(folder, ledger, clock=clock).run()
        if not folder.try_hold(as_keeper=True):
            await clock.sleep(_TICK_S)
        elif folder.written_at():
            folder.release()
        else:
            return


def main(name: str) -> None:
    """Look after the fleet of that name, unless another process does."""
    folder = FleetFolder(name)
    with FileIO(folder.path / KEEPER_LOCK, "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as lock:
        if not try_lock(lock.fileno()):
            return
        asyncio.run(look_after(folder, Ledger.of_user()))
    folder.release()  # deletes the folder if it is empty


if __name__ == "__main__":
    main(sys.argv[1])
