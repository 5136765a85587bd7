"""No schedule of losses makes a call run more than ``1 + retries`` times: real dispatch, real sessions."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import pytest

from skyward.scheduling.dispatch_and_retries import Action, CallState, Cancel, Dispatch, GiveUp, Revoke, Send, WorkerId
from skyward.wire.lane import Session

EVENTS = 60
WORKERS = [WorkerId(node, worker) for node in range(2) for worker in range(2)]


class Process:
    """A worker's process and both ends of its lane. It lives on when its node is given up."""

    def __init__(self, executions: Counter[int]) -> None:
        self.executions = executions
        self.here, self.there = Session(), Session()
        self.queue: deque[tuple[int, int]] = deque()
        self.running = 0
        self.begun = 0
        self.results: list[int] = []
        self.revoked: set[int] = set()
        self.killed = False

    def step(self) -> None:
        """End the call that runs, or begin the next one."""
        if self.running:
            self.results.append(self.running)
            self.running = 0
        elif self.queue:
            self.running, self.begun = self.queue.popleft()
            self.executions[self.running] += 1

    def flush(self) -> None:
        self.there.push(["results", self.results])
        self.results = []

    def listen(self) -> None:
        """Take one message from the client."""
        for kind, content in self.there.receive(self.here.take() or [0, 0, []]):
            match kind:
                case "calls":
                    self.queue += content
                case "cancel" if self.running in content:
                    self.killed = True
                case _:
                    dropped = [call_id for call_id, _ in self.queue if call_id in content]
                    self.queue = deque(entry for entry in self.queue if entry[0] not in content)
                    self.revoked.update(dropped)
                    self.there.push(["revoked", dropped])

    def cut(self) -> None:
        """Lose what is on its way; both ends send it again."""
        self.here.take()
        self.there.take()
        self.here.resume(self.there.seen)
        self.there.resume(self.here.seen)


class Schedule:
    """Random calls on a few workers, and what befalls those."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.dispatch = Dispatch()
        self.executions: Counter[int] = Counter()
        self.calls: dict[int, CallState] = {}
        self.ended: Counter[int] = Counter()
        self.waiting: list[CallState] = []
        self.processes: dict[WorkerId, Process] = {}
        self.forgotten: list[Process] = []
        self.positions = itertools.count(1)
        self.now = 0.0
        for worker in WORKERS:
            self.come_up(worker)

    def run(self) -> None:
        for _ in range(EVENTS):
            self.now += self.chance.choice((0.0, 0.001, 0.2))
            self.befall(self.chance.choice(WORKERS))
        for _ in range(3000):
            if not self.dispatch.unfinished:
                break
            self.settle()
        assert not self.dispatch.unfinished, "calls never end"
        assert all(self.ended[call_id] == 1 for call_id in self.calls), "each call ends once"
        for call_id, call in self.calls.items():
            assert self.executions[call_id] <= 1 + call.retries, f"{call} ran {self.executions[call_id]} times"

    def befall(self, worker: WorkerId) -> None:
        process = self.processes[worker]
        match self.chance.randrange(20):
            case 0 | 1:
                self.submit(worker)
            case 2:
                self.lose(worker, process.begun)
            case 3:
                self.lose(worker, None)
            case 4:
                self.forgotten.append(process)  # cut off: it goes on, and nobody listens
                self.lose(worker, None)
            case 5:
                process.cut()
            case 6:
                ids = self.chance.sample(list(self.calls), k=min(2, len(self.calls)))
                self.ended += Counter(call_id for call_id in ids if not self.ended[call_id])
                self.apply(self.dispatch.cancel(ids, kill=self.chance.random() < 0.5))
            case 7:
                self.apply(self.dispatch.drain(worker, comes_back=self.chance.random() < 0.5))
            case 8:
                self.apply(self.dispatch.rebalance(self.now))
            case 9:
                self.ship()
            case _:
                self.work(worker)

    def submit(self, worker: WorkerId) -> None:
        calls = [
            CallState(
                id=len(self.calls) + offset,
                kind=self.chance.choice("fg"),
                retries=self.chance.choice((0, 0, 1, 3)),
                pinned=worker if self.chance.random() < 0.1 else None,
            )
            for offset in range(1, self.chance.randrange(2, 20))
        ]
        self.calls |= {call.id: call for call in calls}
        self.apply(self.dispatch.submit(calls, self.now))

    def work(self, worker: WorkerId) -> None:
        for process in self.forgotten:
            process.step()
        process = self.processes[worker]
        for act in self.chance.choices((process.listen, process.step, process.step, process.flush), k=4):
            act()
            if process.killed:
                self.lose(worker, process.begun)
                return
        if self.chance.random() < 0.5:
            self.hear(process)

    def hear(self, process: Process) -> None:
        for kind, ids in process.here.receive(process.there.take() or [0, 0, []]):
            if kind == "revoked":
                self.apply(self.dispatch.given_back(ids, self.now))
            else:
                self.ended += Counter(call_id for call_id in ids if not self.ended[call_id])
                self.apply(self.dispatch.finished([(call_id, 0.0001) for call_id in ids], self.now))

    def lose(self, worker: WorkerId, begun: int | None) -> None:
        """The process ends; what it sent last arrives, or does not."""
        if self.chance.random() < 0.5:
            self.hear(self.processes[worker])
        actions = self.dispatch.worker_lost(worker, "killed", self.now, begun=begun)
        if begun is not None:
            failed = {action.call.id for action in actions if isinstance(action, GiveUp)}
            unbegun = {call_id for call_id in failed if not self.executions[call_id]}
            assert unbegun <= self.processes[worker].revoked, "a call failed that had not begun, nor was given back"
        self.apply(actions)
        self.come_up(worker)

    def come_up(self, worker: WorkerId) -> None:
        self.processes[worker] = Process(self.executions)
        self.apply(self.dispatch.worker_up(worker, self.now))

    def settle(self) -> None:
        """Nothing befalls anybody any more."""
        self.now += 0.001
        self.ship()
        self.apply(self.dispatch.rebalance(self.now))
        for worker, process in list(self.processes.items()):
            if self.dispatch.drained(worker):
                self.apply(self.dispatch.worker_up(worker, self.now))
            process.listen()
            process.step()
            process.flush()
            self.hear(process)
            if process.killed:
                self.lose(worker, process.begun)

    def ship(self) -> None:
        """What calls need has arrived on their nodes."""
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            if call.worker is not None and not call.position:
                self.send(call.worker, [call])

    def send(self, worker: WorkerId, calls: Iterable[CallState]) -> None:
        for call in calls:
            call.position = next(self.positions)
            self.processes[worker].here.push(["calls", [(call.id, call.position)]])

    def apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    here = [call for call in action.calls if call.worker == action.worker and not call.position]
                    late = [call for call in here if self.chance.random() < 0.1]
                    self.waiting += late
                    self.send(action.worker, [call for call in here if call not in late])
                case GiveUp():
                    self.ended[action.call.id] += 1
                case Revoke() | Cancel():
                    self.take_back(action)

    def take_back(self, action: Revoke | Cancel) -> None:
        unsent = {call.id for call in self.waiting if call.worker == action.worker and not call.position}
        self.waiting = [call for call in self.waiting if call.id not in unsent.intersection(action.call_ids)]
        kind = "cancel" if isinstance(action, Cancel) else "revoke"
        sent = [call_id for call_id in action.call_ids if call_id not in unsent]
        self.processes[action.worker].here.push([kind, sent])
        if back := [call_id for call_id in action.call_ids if call_id in unsent]:
            self.apply(self.dispatch.given_back(back, self.now))


@pytest.mark.parametrize("seeds", [range(250), pytest.param(range(250, 1000), marks=pytest.mark.full)], ids=str)
def test_no_call_runs_more_often_than_its_retries_allow(seeds: range) -> None:
    for seed in seeds:
        try:
            Schedule(seed).run()
        except AssertionError as error:
            error.add_note(f"schedule {seed}")
            raise
