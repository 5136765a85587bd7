"""``ComputePool``, the object that users open: lifecycle, size, and submission of calls."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from operator import methodcaller
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast
from weakref import ref

from skyward.api.calls import PendingBatch, PendingCompute, PendingResults, PendingStream, Ts, not_a_call
from skyward.api.executor import CallsByFunction, PoolExecutor, result_of
from skyward.api.live_views import PoolOutput, serve_snapshots
from skyward.api.misuse import by_name_only, refuses_operands
from skyward.api.named_pools import make_named
from skyward.api.node_packages import PLAN_FILE, callers_names, refuse_spread_gangs, with_environment
from skyward.api.node_template import start_template
from skyward.api.telemetry import open_telemetry
from skyward.base.descriptors import raised_descriptor_limit
from skyward.base.exits import arm, at_exit, disarm, hold, refuse_at_exit, release, uninterrupted, wait_for
from skyward.base.loop import acquire_loop
from skyward.base.platform import run_in_forks
from skyward.base.waiting import to_its_end
from skyward.display import Display, PoolTag, parse_display
from skyward.display.notebook import running_notebook
from skyward.display.tables import PoolView
from skyward.distributed.runtime import refuse_inside_call
from skyward.environment.image import Image
from skyward.errors import ConfigurationError, PoolStateError
from skyward.events import Callback, E, Notice, SkywardEvent, current_callbacks, forward_emitted
from skyward.events.bus import EventBus
from skyward.events.log_files import KeptLines
from skyward.events.snapshot import PoolSnapshot
from skyward.hidden_frames import from_callers_line, hide_frames, is_explained, without_frames
from skyward.ledger.ownership import PoolFolder
from skyward.providers.several import ProviderLike, parse_provider, recorded_provider
from skyward.request.accelerators import Accelerator
from skyward.request.checks import checked_patterns, flag
from skyward.request.front_ends import FRONT_ENDS, load_front_end
from skyward.request.request import Preference, SpotLike, checked_ranks, fleet_name, parse_request
from skyward.request.volume import Volume
from skyward.scheduling.calls import CallBatch, RemoteFuture
from skyward.submission import (
    ArgumentMemo,
    CallFuture,
    FleetStatus,
    Invocation,
    NodeService,
    SchedulerInfo,
    ServiceAccess,
)

if TYPE_CHECKING:
    from skyward.api.jobs import Job
    from skyward.api.plan import Plan
    from skyward.api.streams import Stream
    from skyward.ledger.fleet_record import FleetFolder
    from skyward.scheduling.running_pool import PoolParts, RunningPool

__all__ = ["ComputePool", "attach", "current_pool"]

R = TypeVar("R")
T = TypeVar("T")

_logger = logging.getLogger("skyward")
_pools_made = itertools.count()
_current: ContextVar[ComputePool | None] = ContextVar("skyward_pool", default=None)
# In threads, which start with an empty context, the pool opened last is the current one.
_open_pools: list[ComputePool] = []


@refuses_operands
class ComputePool(CallsByFunction):
    """Machines that exist for the duration of a ``with`` block, or from ``open()`` to ``close()``.

    Entering creates and prepares them. Leaving, by an exception too, terminates them and confirms it. A pool may be
    entered again later; it gets new machines then. Methods are thread-safe.

    Args:
        provider: source of the machines, such as ``sky.Local()``, or a list of sources: what one of them refuses, or
            does not have, is bought from the next.
        image: the environment of the workers, added to the distributions that this program imports, which nodes get in
            the versions installed here; ``Image(mirror=False)`` leaves those out.
        nodes: number of machines, or the minimum and the maximum of an elastic pool, such as ``(0, 8)``. That opens
            with the minimum, grows when the calls that wait are worth the boot of more, and gives idle ones back.
        idle: time after which a machine of an elastic pool that has no work is given back, such as ``"10m"``, or in
            seconds; five minutes by default.
        machine: the provider's name of an instance type; by default the cheapest that satisfies the request.
        accelerator: accelerator of each machine, such as ``"A100"`` or ``Accelerator.NVIDIA.H100(count=8)``; or several
            of which any will do, such as ``["H100", "A100:2"]`` or ``Accelerator.any(memory=">=40GB")``.
        cpu: minimum number of cores for each worker.
        memory: minimum main memory for each worker, such as ``"32GB"``.
        volume: storage to mount on every node.
        spot: use of the spot market: ``"always"``, ``"if-available"``, ``"never"``, or the fraction of machines that
            must be spot machines, such as ``0.8``. Where there is no spot market, machines are on demand.
        timeout: hard limit on a node's lifetime, such as ``"8h"`` or seconds, since the launch of a rented machine, or
            since the node's start on a machine of yours.
        env: environment variables of the workers; they override those of the image.
        concurrency: worker processes per node (per MIG partition if there are any).
        display: ``"log"``, ``"spinner"`` or ``"quiet"``.
        on_event: callback for every event.
        collect_metrics: whether nodes report :class:`~skyward.events.Metrics`.
        pip: shorthand for ``image=Image(pip=…)``, added to the packages of the image.
        lease: lifetime of a node after the end of this process, such as ``"5m"`` or seconds; it limits the cost of a
            crash or SIGKILL.
        away: lifetime of a node, which continues to work, while this process exists but is unreachable, such as
            ``"1h"`` or seconds: a laptop that sleeps, a network that is down.
        max_cost: limit on the total cost of the pool, in USD. The pool ends before it exceeds the limit; calls that
            are unfinished then fail with :class:`~skyward.errors.BudgetError`.
        max_price_per_hour: limit on the price of each machine, in USD an hour. Dearer offers are left out, and a
            machine that turns out dearer is ended.
        prefer: which of several providers comes first: ``"price"``, the cheapest, or ``"order"``, as they are listed,
            such as machines of your own before rented ones.
        spread: whether the nodes may be of several providers and regions. They do not all reach each other then, which
            calls with :mod:`skyward.distributed` and Dask need.
        wait_for_capacity: longest wait for machines that no provider has now, such as ``"2h"``, or in seconds.
        name: name of a fleet that is kept, for this user. If there is one, the pool takes it over, in whatever process:
            nothing is bought or set up again. What can be changed on its machines is; a request for other machines is
            an error.
        keep: length of time for which the fleet waits for its next client when this one leaves or dies, such as
            ``"20m"``, ``"1h 30m"`` or seconds; within ``timeout`` and ``max_cost``. It takes the place of ``lease`` and
            ``away``. Without it nothing outlives its program.
        results: folder in a volume of the pool with ``read_only=False``, such as ``"/mnt/checkpoints/results"``, where
            nodes keep copies of the outcomes of jobs: they are read from the bucket if a node is lost, or the fleet has
            ended, before they were fetched.
        takeover: whether another process that has the fleet has to leave it.

    Raises:
        ConfigurationError: a parameter is wrong; nothing was created.
    """

    _output: PoolOutput

    @by_name_only
    def __init__(
        self,
        *,
        provider: ProviderLike,
        image: Image | None = None,
        nodes: int | tuple[int, int] = 1,
        idle: str | float | None = None,
        machine: str | None = None,
        accelerator: str | Accelerator | Sequence[str | Accelerator] | None = None,
        cpu: int | None = None,
        memory: str | None = None,
        volume: Sequence[Volume] | None = None,
        spot: SpotLike = "always",
        timeout: str | float = 3600,
        env: Mapping[str, str] | None = None,
        concurrency: int = 1,
        display: str = "log",
        on_event: Callback | None = None,
        collect_metrics: bool = True,
        pip: Sequence[str] | None = None,
        lease: str | float = 120,
        away: str | float = 1800,
        max_cost: float | None = None,
        max_price_per_hour: float | None = None,
        prefer: Preference = "price",
        spread: bool = False,
        wait_for_capacity: str | float | None = None,
        name: str | None = None,
        keep: str | float | None = None,
        results: str | None = None,
        takeover: bool = False,
    ) -> None:
        self._provider = parse_provider(provider)
        self._takeover, self._as_found = flag("takeover", takeover), False
        self._request = parse_request(
            image=image,
            nodes=nodes,
            idle=idle,
            machine=machine,
            accelerator=accelerator,
            cpu=cpu,
            memory=memory,
            volume=volume,
            spot=spot,
            timeout=timeout,
            env=env,
            concurrency=concurrency,
            collect_metrics=collect_metrics,
            pip=pip,
            lease=lease,
            away=away,
            max_cost=max_cost,
            max_price_per_hour=max_price_per_hour,
            prefer=prefer,
            spread=spread,
            wait_for_capacity=wait_for_capacity,
            name=name,
            keep=keep,
            results=results,
        )
        self._show(display, on_event)

    @classmethod
    @from_callers_line
    def named(cls, name: str, /, **changes: Any) -> Self:
        """Return the pool of that name in the settings: ``with sky.ComputePool.named("big", nodes=8) as pool:``.

        They are a table ``[pools.big]`` of a ``skyward.toml`` or ``[tool.skyward.pools.big]`` of a ``pyproject.toml``,
        in the current folder or the first above it that has such a file, else in the user's own ``skyward.toml``.

        Args:
            name: the table's name.
            **changes: parameters of the pool that count instead of the table's.

        Raises:
            ConfigurationError: there is no such table, or a value in it is wrong; the message has file and line.
        """
        return make_named(cls, name, changes)

    @classmethod
    def of_kept(cls, name: str, *, display: str, on_event: Callback | None, takeover: bool) -> Self:
        """See :func:`attach`."""
        from skyward.ledger.fleet_record import FleetFolder, no_such_fleet

        record = FleetFolder(name).read()
        if record is None or not record.nodes:
            raise no_such_fleet(name)
        self = cls.__new__(cls)
        self._provider = recorded_provider(record.provider, record.settings)
        nodes = len(record.nodes) if record.request.elastic is None else record.request.nodes
        self._request = replace(record.request, keep_s=record.keep_s, nodes=nodes)
        self._takeover, self._as_found = flag("takeover", takeover), True
        self._show(display, on_event)
        return self

    def _show(self, display: str, on_event: Callback | None) -> None:
        """Set what the pool shows, and to whom; nothing is open yet."""
        self._names = callers_names()
        self._display = parse_display(display)
        if on_event is not None and not callable(on_event):
            raise ConfigurationError(f"on_event must be a function of one event, got {type(on_event).__name__}")
        self._subscriptions: list[tuple[type[Any] | None, Callback]] = [(None, on_event)] if on_event else []
        self._tag = PoolTag(provider=self._provider.name, made=next(_pools_made))
        self._opener = threading.current_thread()
        self._outer: ComputePool | None = None
        self._reset()

    def __repr__(self) -> str:
        state = "open" if self.is_active else "opening or closing" if self._entered else "not open"
        nodes = self.instance_count if self.is_active else self._request.nodes
        return f"<{type(self).__name__} of {nodes} node{'s' * (nodes != 1)} of {self._provider.name}: {state}>"

    def __enter__(self) -> Self:
        refuse_inside_call()
        refuse_at_exit()
        if PLAN_FILE in os.environ:
            from skyward.api.planned_script import end_with_plan

            end_with_plan(self.plan)
        claimed = False
        try:
            arm()  # so that the block delays SIGTERM, too
            kept = self._hold_fleet()
            # Ctrl-C between the start of a part and the call that notes its end would leave that part.
            with uninterrupted():
                self._claim()
                claimed = True
                base = self._begin(self._closing, kept)
            running = self._make_running(base, self._closing)
            base.loop.call(running.open())
            self._running = running
            base.bus.delivery()()  # the next cell of a notebook would get the last lines
            self._make_current()
        except BaseException as error:
            if claimed:
                self.__exit__(type(error), error, None)
            disarm()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with uninterrupted(), self._shutting:
            if exc is not None and is_explained(exc):
                hide_frames(exc)
            if _current.get() is self:
                _current.set(self._outer)
            self._running = None
            try:
                self._closing.close()
            finally:
                self._entered = False
                if self in _open_pools:  # a forked child has an empty list, and nothing to close
                    _open_pools.remove(self)

    @without_frames
    def open(self) -> Self:
        """Open the pool without a ``with`` block, for notebooks and consoles; return it.

        The machines end with :meth:`close`, and as those of a ``with`` block do: at the end of the interpreter or the
        notebook's kernel, on SIGTERM, and on Ctrl-C while the pool opens.

        Raises:
            PoolStateError: it is open already.
        """
        return self.__enter__()

    @without_frames
    def plan(self) -> Plan:
        """Return what opening this pool would do at this moment. Creates nothing.

        The plan has the offers in the order in which they would be tried, the most that they can cost, the packages
        and files that nodes would get, what the nodes could not do, and why the pool would not open, if so. It is shown
        as a table::

            print(sky.ComputePool(provider=sky.Local(), nodes=4).plan())

        It is found by the code that opens pools: the provider is asked for its offers, and wheels of the distributions
        that no package index has are built here.
        """
        refuse_inside_call()
        from skyward.api.plan import make_plan

        loop = acquire_loop()
        try:
            return make_plan(
                self._request,
                self._provider,
                names=self._names,
                loop=loop,
                as_found=self._as_found,
                takeover=self._takeover,
            )
        finally:
            loop.release()

    def close(self) -> None:
        """Terminate the machines and confirm it, as at the end of a ``with`` block. Idempotent."""
        self.__exit__(None, None, None)

    def detach(self) -> None:
        """Leave the fleet of a pool with ``name=`` and ``keep=`` now, as the end of its block does. Idempotent.

        Unfinished calls fail; jobs go on.

        Raises:
            ConfigurationError: the pool's fleet is not kept.
        """
        if not self._request.name:
            raise ConfigurationError("only a pool with name= and keep= can be left: another one ends with its block")
        self.close()

    async def __aenter__(self) -> Self:
        arm()
        opening = asyncio.ensure_future(asyncio.to_thread(self.__enter__))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: let the pool open, then close it at once.
            await to_its_end(self._close_once_open(opening))
            raise
        finally:
            disarm()
        self._make_current()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await to_its_end(asyncio.to_thread(self.__exit__, exc_type, exc, traceback))
        finally:
            disarm()

    async def _close_once_open(self, opening: asyncio.Future[Self]) -> None:
        await asyncio.gather(opening, return_exceptions=True)
        if opening.exception() is None:
            await asyncio.to_thread(self.close)

    def _make_current(self) -> None:
        self._outer = _current.get()
        _current.set(self)

    def leave_to_parent(self) -> None:
        """Drop the pool in a forked child: the parent owns it, and a fork does not copy the pool's threads."""
        self._reset()

    def _reset(self) -> None:
        self._running: RunningPool | None = None
        self._bus: EventBus | None = None
        self._lock = threading.Lock()
        self._entered = False
        self._closing = ExitStack()
        self._shutting = threading.RLock()

    def close_at_exit(self) -> None:
        """Terminate the machines at the interpreter's exit, unless the thread that opened the pool does so first."""
        wait_for(self._opener)
        self.close_logged("the interpreter exits")

    def close_logged(self, why: str) -> None:
        """Terminate the machines, from any thread; log an error instead of raising it."""
        try:
            self.close()
        except Exception:
            _logger.exception("could not close a pool when %s", why)

    def _claim(self) -> None:
        with self._lock:
            if self._entered:
                raise PoolStateError(
                    "the pool is already open; use it as it is, or leave its `with` block, or call close() first"
                )
            self._entered = True
            self._opener = threading.current_thread()

    def _hold_fleet(self) -> FleetFolder | None:
        """Return the folder of the kept fleet, which this process holds from now on; None without a name."""
        if not self._request.name:
            return None
        from skyward.ledger.fleet_record import FleetFolder

        folder, loop = FleetFolder(self._request.name), acquire_loop()
        try:
            loop.call(folder.hold(takeover=self._takeover))
        finally:
            loop.release()
        return folder

    def _begin(self, stack: ExitStack, kept: FleetFolder | None) -> PoolParts:
        """Start everything that needs no machine."""
        if kept is not None:
            stack.callback(kept.release)
        _open_pools.append(self)  # before anything is created: any failure or exit from here on closes the pool
        _register_with_joblib()
        hold(_close_all_now)
        stack.callback(release)
        stack.enter_context(raised_descriptor_limit())
        start_template(self._provider, self._request)
        from skyward.ledger.fleet_record import new_pool_id, no_such_fleet, refuse_second
        from skyward.ledger.ledger import Ledger
        from skyward.scheduling.running_pool import PoolParts

        loop = acquire_loop()
        stack.callback(loop.release)
        bus = self._bus = EventBus()
        record = kept.read() if kept is not None else None
        if self._as_found and (record is None or not record.nodes):  # it has ended since it was looked for
            raise no_such_fleet(self._request.name)
        if record is not None and record.nodes:
            pool_id = record.pool_id
        else:
            pool_id = new_pool_id(self._request.name)
            if kept is not None and record is None:
                refuse_second(kept.name, Ledger.of_user())
        folder = _keep_output(pool_id, bus, loop.loop, stack)
        stack.callback(self._forget)
        telemetry = open_telemetry(pool_id, self._provider.name, self._request, bus, stack)
        stack.callback(bus.close)
        display = Display(self._display, bus, tag=replace(self._tag, pool_id=pool_id))
        stack.callback(display.close)
        stack.callback(bus.close)  # delivers all events before the display closes; closing twice is harmless
        outer = current_callbacks()
        for event_type, callback in [*self._subscriptions, *((None, callback) for callback in outer)]:
            bus.subscribe(cast("type[SkywardEvent]", event_type), callback)
        stack.callback(forward_emitted(bus.publish_emitted))
        return PoolParts(pool_id, loop, bus, outer, folder, telemetry, kept, record)

    def _make_running(self, base: PoolParts, stack: ExitStack) -> RunningPool:
        request, restart = self._request, ""
        if not self._as_found:
            refuse_spread_gangs(request, self._names)
            request = with_environment(
                request, self._provider, names=self._names, report=lambda text: base.bus.publish(Notice(text))
            )
            from skyward.ledger.fleet_record import changes_to

            restart = changes_to(base.record, request, self._provider)
        from skyward.scheduling.running_pool import RunningPool

        running = RunningPool(base, self._provider, request, restart=restart, as_found=self._as_found)
        stack.callback(running.close)
        if base.folder is not None:
            serve_snapshots(base.folder, base.loop, running.take_snapshot, stack)
        self._output = PoolOutput(base.loop, running.take_snapshot)
        stack.callback(self._output.close)
        return running

    def _forget(self) -> None:
        self._running = self._bus = None

    @property
    def is_active(self) -> bool:
        """True from the end of provisioning until the pool begins to close."""
        return self._running is not None

    @property
    def instance_count(self) -> int:
        """Number of existing machines; 0 while the pool is not open."""
        return len(self._running.fleet.nodes) if self._running else 0

    def on(self, event_type: type[E], callback: Callable[[E], SkywardEvent | None]) -> None:
        """Call ``callback`` with every event of ``event_type``, in the pool's event thread, until the pool closes."""
        if not (isinstance(event_type, type) and callable(callback)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError("pool.on takes an event class and a function, such as pool.on(Metrics, print)")
        self._subscriptions.append((event_type, cast("Callback", callback)))
        if self._bus is not None:
            self._bus.subscribe(event_type, callback)

    def run(self, pending: PendingCompute[R]) -> R:
        """Run one call on any worker and return its result: ``pending >> pool``."""
        if not isinstance(pending, PendingCompute):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise not_a_call(pending)
        call = pending.invocation()
        return (self._running or self._ready).scheduler.run([call]).result(0)

    def run_batch(self, batch: PendingBatch[*Ts]) -> tuple[*Ts]:
        """Run calls in parallel and return their results in order: ``batch >> pool``.

        The first failure is raised at once: queued calls are dropped, running calls finish. A batch with
        ``return_exceptions`` returns exceptions as values instead.
        """
        calls = map(methodcaller("invocation"), batch.calls)  # one at a time: thousands at once wake the collector
        ended = self._ready.scheduler.run(calls, all_of_them=batch.return_exceptions)
        return cast("tuple[*Ts]", _results(ended, batch.calls, return_exceptions=batch.return_exceptions))

    def broadcast(self, pending: PendingCompute[R]) -> tuple[R, ...]:
        """Run one call once on every worker and return the results by (node, worker): ``pending @ pool``."""
        if not isinstance(pending, PendingCompute):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise not_a_call(pending)
        call = pending.invocation()
        ended = self._ready.scheduler.run([call], everywhere=True)
        return _results(ended, (pending,) * len(ended), return_exceptions=False)

    def spawn(self, call: PendingCompute[Any] | PendingBatch[*tuple[Any, ...]], *, name: str | None = None) -> Job:
        """Have a call, or a gather, run as a job: it goes on when this program ends. Return at once.

        Each call of it runs on one worker, which takes no other calls meanwhile. The pool stays until its jobs are
        over, and for its ``keep`` after that.

        Args:
            call: the call, or ``gather(...)``.
            name: the job's id, unique in the pool: up to 64 letters, digits, ``.``, ``_`` and ``-``. None makes one of
                the function's name.

        Raises:
            ConfigurationError: the pool is not kept, the name is odd or taken, or the workers run a call together.
            PoolStateError: the pool is not open.
            SerializationError: a call cannot be pickled.
        """
        running = self._ready
        if not isinstance(call, PendingCompute | PendingBatch):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                "spawn takes a call of a function that returns, such as spawn(f(x)), or a gather without stream=True; "
                f"got {type(call).__name__}"
            )
        if running.jobs is None:
            call.mark_used()
            raise ConfigurationError(
                "spawn needs a pool that outlives this program: ComputePool(name='llm', keep='1h', ...)"
            )
        from skyward.api.jobs import spawn_calls

        single = isinstance(call, PendingCompute)
        calls = [each.invocation() for each in ((call,) if single else call.calls)]
        if self.total_slots > 1 and any(each.gang for each in calls):
            raise ConfigurationError(
                f"a job runs on one worker, and {calls[0].label} is decorated with skyward.distributed, to run on all; "
                "use @, or a pool of one worker"
            )
        running.have_a_node()  # the program may end before the next look at the work
        return spawn_calls(
            calls,
            fleet=running.jobs.fleet,
            pool_id=running.jobs.pool_id,
            name=name,
            single=single,
            return_exceptions=not single and call.return_exceptions,
            results=self._request.results_location,
        )

    def run_generator(self, pending: PendingStream[T], *, everywhere: bool = False) -> tuple[Stream[T], ...]:
        """Run a generator on any worker, or on every worker, and return at once: ``pending >> pool``.

        Returns the stream of its items; with ``everywhere`` one for each worker, by (node, worker).
        """
        from skyward.api.streams import open_streams

        return open_streams(self._ready.scheduler, pending.generator_invocation(), everywhere=everywhere)

    def run_as_read(self, batch: PendingResults[R]) -> Stream[R]:
        """Run the calls of ``batch`` while their results are read: ``gather(..., stream=True) >> pool``."""
        from skyward.api.streams import ResultStream

        return ResultStream(
            batch.invocations(),
            self._ready.scheduler,
            ordered=batch.ordered,
            workers=self.capacity,
            return_exceptions=batch.return_exceptions,
        )

    def executor(self) -> PoolExecutor:
        """Return the pool as a :class:`concurrent.futures.Executor`; its shutdown leaves the pool open."""
        return PoolExecutor(self)

    @property
    def status(self) -> FleetStatus:
        """The pool's nodes, their target number, and their cost so far.

        Raises:
            PoolStateError: the pool is not open.
        """
        return self._ready.fleet.status()

    def scale(self, nodes: int, *, drop: Collection[int] = ()) -> Future[None]:
        """Grow or shrink to ``nodes`` nodes, while calls run.

        Returns at once; ``pool.scale(4).result()`` waits. New nodes start in parallel and take calls once they are
        ready; ``@`` includes them from now on. Removed nodes finish running calls and calls that are bound to them;
        their other calls move. A later call overrides an earlier one.

        An elastic pool goes on from there, with the work that it has then.

        Args:
            nodes: target number, at least 1: node 0 stays, because the scheduler runs there. Of an elastic pool, a
                number between its minimum and its maximum.
            drop: ranks of the nodes to remove first; by default the highest ranks.

        Returns:
            A future that is done when the pool has that size. It raises the reason if a node cannot be created; the
            pool then stays smaller. A later call of ``scale`` cancels it.

        Raises:
            ConfigurationError: ``nodes`` or ``drop`` is wrong.
            PoolStateError: the pool is not open.
        """
        running = self._ready
        return running.scale(self._request.checked_size(nodes), checked_ranks("drop", drop))

    @without_frames
    def fetch(
        self, patterns: str | Sequence[str], *, to: str | os.PathLike[str], node: int | None = None
    ) -> list[Path]:
        """Fetch files from the working folder of calls, such as ``pool.fetch("*.bin", to="results")``.

        Files keep their paths below ``to``; on a pool of several nodes, below ``to/0``, ``to/1`` and so on, unless
        ``node`` names one. Files that exist are replaced. Large files are streamed. Permissions, empty folders, and
        links to what is fetched come as they are on the node; another link in the folder brings what it leads to.
        Sockets, devices and links out of the folder are left out, and a :class:`~skyward.Notice` names them.

        Args:
            patterns: one pattern or several, relative to that folder: ``"*.bin"``, ``"**/*.csv"``, ``"models/"`` with
                everything in it.
            to: the folder here; made if there is none.
            node: rank of the only node to fetch from; None means all.

        Returns:
            The paths of the files and links here, by node and name.

        Raises:
            ConfigurationError: a pattern leads out of the folder, or there is no such node.
            FetchError: nothing matches, there is no room here, a file changed twice while it was read, or two names are
                one to the disk here.
            PoolStateError: the pool is not open.
        """
        running, checked = self._ready, checked_patterns("patterns", patterns)
        return running.loop.call(running.fleet.fetch(checked, Path(to).absolute(), node))

    @property
    def total_slots(self) -> int:
        """Number of calls that run at once on the target number of nodes: nodes times workers per node.

        Raises:
            PoolStateError: the pool is not open.
        """
        status = self.status
        return status.wanted * status.workers_per_node

    @property
    def scheduler(self) -> SchedulerInfo:
        """The address and the certificates of the pool's Dask scheduler, for Dask clients.

        They change when the head node, which runs the scheduler, is replaced.

        Raises:
            ConfigurationError: Dask is not installed here, or Dask or Python differ between this process and a node.
            PoolStateError: the pool is not open, or its head node is being replaced.
        """
        return load_front_end("dask", "a Dask client of a pool").scheduler_of(self)

    def dask_client(self, **options: Any) -> Any:
        """Return a Dask client of this pool, which closes it at the latest.

        Args:
            **options: options of :class:`distributed.Client`, such as ``set_as_default`` or ``asynchronous``.

        Raises:
            ConfigurationError: Dask is not installed here; Dask or Python differ between this process and a node; or
                ``direct_to_workers`` is set although workers cannot be reached.
            PoolStateError: the pool is not open, or its head node is being replaced.
        """
        dask = load_front_end("dask", "a Dask client of a pool")
        client = dask.client_of(self, options)
        self._closing.callback(dask.close_client, ref(client))
        return client

    def service(self, service: NodeService) -> ServiceAccess:
        """See :meth:`skyward.submission.ElasticFleet.service`."""
        running = self._ready
        running.have_a_node()
        return running.loop.call(running.services.use(service))

    def forward(self, address: str) -> str:
        """See :meth:`skyward.submission.ElasticFleet.forward`."""
        running = self._ready
        return running.loop.call(running.fleet.forward(address))

    @property
    def capacity(self) -> int:
        """See :attr:`skyward.submission.TaskSubmitter.capacity`."""
        request = self._request
        nodes = len(self._running.fleet.wanted) if self._running and not request.elastic else request.nodes
        return nodes * request.workers_per_node

    def submit_calls(self, calls: Sequence[Invocation], *, memo: ArgumentMemo | None = None) -> list[CallFuture[Any]]:
        """See :meth:`skyward.submission.TaskSubmitter.submit_calls`."""
        return list(self._ready.scheduler.submit(calls, memo or ArgumentMemo()))

    def _submit_all(self, calls: Sequence[Invocation]) -> list[CallFuture[Any]]:
        return self.submit_calls(calls)

    def _map_ahead(self, calls: Iterator[Invocation], deadline_s: float | None, chunksize: int) -> Iterator[Any] | None:
        from skyward.api.streams import map_ahead

        scheduler = self._ready.scheduler
        return map_ahead(calls, scheduler, workers=self.capacity, deadline_s=deadline_s, chunksize=chunksize)

    def broadcast_call(self, call: Invocation) -> list[CallFuture[Any]]:
        """See :meth:`skyward.submission.TaskSubmitter.broadcast_call`."""
        return list(self._ready.scheduler.broadcast(call))

    def cancel_calls(self, futures: Iterable[Future[Any]]) -> None:
        """See :meth:`skyward.submission.TaskSubmitter.cancel_calls`."""
        remote = (future for future in futures if isinstance(future, RemoteFuture))
        calls = [call for future in remote if (call := future.call) is not None]
        self._ready.scheduler.cancel(calls)

    def publish(self, event: SkywardEvent) -> None:
        """See :meth:`skyward.submission.TaskSubmitter.publish`."""
        if self._running is not None:
            self._running.publish(event)

    def snapshot(self) -> PoolSnapshot:
        """Return the present state of the nodes, their workers, the calls and the costs.

        Raises:
            PoolStateError: the pool is not open.
        """
        running = self._ready
        return running.loop.call(running.take_snapshot())

    def _repr_html_(self) -> str:
        """Return the present state as a table, for notebooks."""
        return PoolView.of(self.snapshot()).html() if self.is_active else "<div>a pool that is not open</div>"

    def _ipython_display_(self) -> None:
        """Show the state in a notebook, where it changes in place; elsewhere leave that to the representations."""
        if not self.is_active or running_notebook() is None:
            raise NotImplementedError
        self._output.show()

    @property
    def _ready(self) -> RunningPool:
        if self._running is None:
            refuse_inside_call()
            raise PoolStateError(
                "the pool is not open; use it inside `with ComputePool(...) as pool:` or after pool.open()"
            )
        return self._running

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a pool cannot be sent to a worker, as an argument or from an enclosing scope: calls cannot submit calls"
        )


def _results(batch: CallBatch, calls: Sequence[PendingCompute[Any]], *, return_exceptions: bool) -> tuple[Any, ...]:
    if return_exceptions:
        return tuple(_outcome_of(batch, index, calls) for index in range(len(batch)))
    if batch.failed is not None:
        result_of(batch, batch.failed, calls)
    return tuple([batch.result(index) for index in range(len(batch))])  # a StopIteration would end an iterator early


def _outcome_of(batch: CallBatch, index: int, calls: Sequence[PendingCompute[Any]]) -> Any:
    try:
        return result_of(batch, index, calls)
    except Exception as error:
        return error


@cache
def _register_with_joblib() -> None:
    """Register joblib's backend ``"skyward"``, now or on the import of joblib; without joblib, load nothing."""
    import wrapt

    (joblib,) = FRONT_ENDS["joblib"].requires
    wrapt.register_post_import_hook(_import_backend, joblib)


def _import_backend(_: ModuleType) -> None:
    try:
        importlib.import_module(FRONT_ENDS["joblib"].package)
    except ImportError as error:  # an older joblib; the program may not use the backend
        _logger.debug("joblib's backend is not registered: %s", error)


def attach(name: str, *, display: str = "log", on_event: Callback | None = None, takeover: bool = False) -> ComputePool:
    """Return a pool that takes the kept fleet of that name as it is: ``with sky.attach("llm") as pool:``.

    Args:
        name: the fleet's name.
        display: see :class:`ComputePool`.
        on_event: see there.
        takeover: see there.

    Raises:
        PoolStateError: this user has no kept fleet of that name, or its nodes run another version of Skyward or Python.
    """
    return ComputePool.of_kept(fleet_name(name), display=display, on_event=on_event, takeover=takeover)


def current_pool() -> ComputePool | None:
    """Return the innermost pool whose ``with`` block is active here; in other threads, the pool opened last."""
    pool = _current.get()
    if pool is not None and pool.is_active:
        return pool
    return next((pool for pool in reversed(_open_pools) if pool.is_active), None)


def _leave_all_to_parent() -> None:
    for pool in _open_pools:
        pool.leave_to_parent()
    _open_pools.clear()


def _close_all() -> None:
    for pool in list(reversed(_open_pools)):
        pool.close_at_exit()


def _close_all_now() -> None:
    for pool in list(reversed(_open_pools)):
        pool.close_logged("a signal ends the process")


run_in_forks(_leave_all_to_parent)
at_exit(_close_all)


# A write for each line doubles its cost (7 µs). A killed process loses the lines of this time, except those of calls
# whose results it has.
_WRITE_EVERY_S: Final = 0.05


def _keep_output(pool_id: str, bus: EventBus, loop: asyncio.AbstractEventLoop, closing: ExitStack) -> Path | None:
    """Keep the lines on ``bus`` in the pool's folder until ``closing``; return the folder.

    Without room or rights for it, publish a notice and return None: the pool works without.
    """

    def later(write: Callable[[], object]) -> None:
        # The event thread writes: the loop must not wait for a disk.
        loop.call_soon_threadsafe(loop.call_later, _WRITE_EVERY_S, bus.run, write)

    try:
        folder = PoolFolder(pool_id)
        closing.callback(folder.close)
        kept = KeptLines(folder.logs, later)
    except OSError as error:
        bus.publish(Notice(f"output of calls is not kept for `skyward logs`: {error}"))
        return None
    closing.callback(kept.close)
    bus.recorder = kept
    return folder.path
