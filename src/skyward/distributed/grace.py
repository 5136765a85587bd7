"""Ends that are coming for a running call, the exception before its timeout, and the folder of its checkpoints.

A worker process has one :class:`CallGrace`, which the functions for user code ask. Processes that a call starts have
none: notices reach the process that runs the call.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from skyward.distributed.runtime import instance_info, is_on_node
from skyward.errors import CallTimeoutError, NotInPoolError, TimeLimit
from skyward.wire.control import EndKind

__all__ = ["CallGrace", "EndNotice", "checkpoint_folder", "limit_passed", "notice", "on_notice"]

_LEAD_SHARE = 0.1
"""Part of a call's timeout that is left when its notice is given, unless the call has a ``grace``."""
_LOOK_S = 0.5
_LOOKS_SHARE = 20
"""Times that a look may have taken before the next: a folder of many files costs a twentieth of the time."""
_LONGEST_LOOKS = 4
"""Looks at a folder that never rests after which its content is reported all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNotice:
    """End that is coming for the running call.

    Attributes:
        kind: ``"preemption"``: the provider takes the machine back. ``"call_timeout"``: the ``timeout`` of the call.
            ``"pool_timeout"``, ``"max_cost"``: the parameter of the pool that ends the node. ``"down"``: the node ends
            now, because its pool was closed, by ``skyward down``, or because its client is gone.
        at: time of the end, by ``time.monotonic()`` on its node.
    """

    kind: EndKind
    at: float

    @property
    def seconds_left(self) -> float:
        """Seconds until the end, as of now; at least 0."""
        return max(0.0, self.at - time.monotonic())


_Content = list[tuple[str, int, int, int]]
NoticeHandler = Callable[[EndNotice], object]
H = TypeVar("H", bound=NoticeHandler)


@dataclass(slots=True, eq=False)
class _GracedCall:
    """Running call that has a limit in time, a handler, or a checkpoint.

    Attributes:
        id: its id.
        timeout_s: its limit; 0 is none.
        grace_s: seconds before its end at which :class:`~skyward.errors.TimeLimit` is raised in it; 0 raises none.
        checkpoint: name of its folder of checkpoints; empty for one that has none yet.
        began: time of its beginning.
        handlers: its handlers.
        folder: its folder of checkpoints; None if this run has not asked for it.
        timer: timer of the notice of its timeout; None while nothing needs it.
        limit_told: True once that notice was given.
        entered: True once its function runs: an exception raised while it is unpickled may be swallowed there.
        within: the frame of a generator, outside which nothing is raised; None for other functions.
        interruption: the exception to raise in it.
        over: set once it is over.
    """

    id: int
    timeout_s: float = 0.0
    grace_s: float = 0.0
    checkpoint: str = ""
    began: float = field(default_factory=time.monotonic)
    handlers: list[NoticeHandler] = field(default_factory=list[NoticeHandler])
    folder: Path | None = None
    timer: threading.Timer | None = None
    limit_told: bool = False
    entered: bool = False
    within: FrameType | None = None
    interruption: TimeLimit | None = None
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def limit(self) -> EndNotice:
        """Notice of its timeout."""
        return EndNotice(kind="call_timeout", at=self.began + self.timeout_s)

    @property
    def lead_s(self) -> float:
        """Seconds before its timeout at which the notice of it is due."""
        return self.grace_s or _LEAD_SHARE * self.timeout_s


class CallGrace:
    """What a worker process knows of the ends that are coming for its calls. Context of the thread that runs them.

    Args:
        checkpoints: folder of the calls' checkpoints, on the node's disk.
        running: returns the id of the running call; 0 while none runs.
        report: called with the id of a call and the name of its checkpoint folder, when that is made, and whenever its
            content has changed and is at rest, or does not rest.
        heed: called with True while the running call has handlers that a node which ends waits for, else with False.

    Attributes:
        in_use: True if the running call has a limit in time, a handler, or a checkpoint.
        left: folder of checkpoints of a call that is over; None without one.
    """

    def __init__(
        self,
        checkpoints: Path,
        *,
        running: Callable[[], int],
        report: Callable[[int, str], None],
        heed: Callable[[bool], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._running = running
        self._report = report
        self._heed = heed
        self._lock = threading.Lock()
        self._ends: dict[EndKind, EndNotice] = {}
        self.in_use = False  # attributes, as they are read for every call
        self.left: Path | None = None
        self._call: _GracedCall | None = None
        self._thread = self._pid = 0
        self._handler: Any = None

    def __enter__(self) -> Self:
        global _grace
        self._pid, _grace = os.getpid(), self
        if threading.current_thread() is threading.main_thread():
            assert sys.platform != "win32"  # nodes run elsewhere
            # SIGURG: no system sends it unasked, and by default it does nothing. It ends a sleep or a wait, too.
            self._handler = signal.signal(signal.SIGURG, self._interrupt)
            self._thread = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        global _grace  # noqa: PLW0603 - as above
        _grace = None
        if self._thread:
            assert sys.platform != "win32"
            signal.signal(signal.SIGURG, self._handler)

    @property
    def is_here(self) -> bool:
        """True in the worker's process, False in one forked from it."""
        return self._pid == os.getpid()

    def begin(self, *, timeout_s: float, grace_s: float, checkpoint: str) -> None:
        """Take note of the limit and the checkpoint of the call that begins."""
        self._call = call = _GracedCall(self._running(), timeout_s, grace_s, checkpoint)
        self.in_use = True
        if grace_s:
            self._set_timer(call)

    def enter(self, within: FrameType | None = None) -> None:
        """Take note that the call's function begins, or goes on. Raises TimeLimit if that is due already.

        From now on it is raised in the function; with a frame, only while that runs, or what it calls. Between two
        items of a generator it would reach the generator as its end.
        """
        if self._call is not None:
            self._call.entered, self._call.within = True, within
            self._interrupt()

    def leave(self) -> None:
        """Take note that the call's function is over, or waits, as a generator does between two items.

        Nothing is raised meanwhile.
        """
        if self._call is not None:
            self._call.entered = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave the call's limit in time out of force inside the block, whose time is not the call's."""
        call, began = self._call, time.monotonic()
        if call is not None and call.timer is not None:
            call.timer.cancel()
        try:
            yield
        finally:
            if call is not None:
                call.began += time.monotonic() - began
                if call.timer is not None and not call.limit_told:
                    self._set_timer(call)

    def end(self) -> None:
        """Forget the call, which is over. Nothing is raised in it any more."""
        call, self._call, self.in_use = self._call, None, False
        if call is None:
            return
        call.over.set()
        if call.timer is not None:
            call.timer.cancel()
        if call.handlers:
            self._heed(False)  # noqa: FBT003 - a value
        self.left = call.folder

    def remove_checkpoint(self) -> None:
        """Remove the folder of the last call, whose answer is on its way: it does not run again."""
        left, self.left = self.left, None
        if left is not None:
            shutil.rmtree(left, ignore_errors=True)

    def announce(self, end: EndNotice) -> None:
        """Tell the running call, and those after it, of an end of the node. Thread-safe."""
        with self._lock:
            is_new, self._ends[end.kind] = end.kind not in self._ends, end
            call = self._call
            handlers = [*call.handlers] if call is not None else []
        if is_new and call is not None and handlers:
            self._tell(call, end, handlers)

    # --- for user code ------------------------------------------------------------------------------------------------

    def notice(self) -> EndNotice | None:
        """See :func:`notice`."""
        with self._lock:
            ends = [*self._ends.values()]
        call = self._call
        if call is not None and call.timeout_s and call.limit.seconds_left <= call.lead_s:
            ends.append(call.limit)
        return min(ends, key=lambda end: end.at, default=None)

    def on_notice(self, handler: NoticeHandler) -> None:
        """See :func:`on_notice`."""
        call = self._current("on_notice()")
        with self._lock:
            call.handlers.append(handler)
            ends = [*self._ends.values(), *([call.limit] if call.limit_told else [])]
            if call.timeout_s and call.timer is None:
                self._set_timer(call)
        self._heed(True)  # noqa: FBT003 - a value
        for end in ends:
            self._tell(call, end, [handler])

    def checkpoint_folder(self) -> Path:
        """See :func:`checkpoint_folder`."""
        call = self._current("checkpoint_folder()")
        with self._lock:
            if call.folder is not None:
                return call.folder
            call.checkpoint = call.checkpoint or uuid.uuid4().hex
            folder = self._checkpoints / call.checkpoint
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            call.folder = folder
        self._report(call.id, call.checkpoint)
        threading.Thread(
            target=self._watch, args=(call, folder, _content(folder)), name="skyward-checkpoint", daemon=True
        ).start()
        return folder

    # --- inside -------------------------------------------------------------------------------------------------------

    def _current(self, what: str) -> _GracedCall:
        running = self._running()
        if not running:
            raise NotInPoolError(f"{what} belongs into a call: no call runs in this process now")
        call = self._call
        if call is None or call.id != running:
            self._call = call = _GracedCall(running)
            self.in_use = True
        return call

    def _set_timer(self, call: _GracedCall) -> None:
        if call.timer is not None:
            call.timer.cancel()
        call.timer = timer = threading.Timer(max(0.0, call.limit.seconds_left - call.lead_s), self._near_limit, [call])
        timer.daemon = True
        timer.start()

    def _near_limit(self, call: _GracedCall) -> None:
        with self._lock:
            call.limit_told = True
            handlers = [*call.handlers]
        if handlers:
            self._tell(call, call.limit, handlers)
        if call.grace_s and call is self._call and self._thread:
            assert sys.platform != "win32"
            call.interruption = _time_limit(call)
            signal.pthread_kill(self._thread, signal.SIGURG)

    def _interrupt(self, number: int = 0, frame: FrameType | None = None) -> None:
        call = self._call
        if call is None or not call.entered or (error := call.interruption) is None or not self.is_here:
            return
        while number and call.within is not None and frame is not call.within:
            if frame is None:
                return  # it is raised at the next item
            frame = frame.f_back
        call.interruption = None
        raise error

    def _tell(self, call: _GracedCall, end: EndNotice, handlers: Iterable[NoticeHandler]) -> None:
        """Call handlers in a thread: the one that runs the call may be in the middle of anything."""
        threading.Thread(
            target=self._call_handlers, args=(call, end, handlers), name="skyward-notice", daemon=True
        ).start()

    def _call_handlers(self, call: _GracedCall, end: EndNotice, handlers: Iterable[NoticeHandler]) -> None:
        for handler in handlers:
            if call.over.is_set():
                return
            try:
                handler(end)
            except BaseException:  # user code; the next handler may be the one that saves the work
                traceback.print_exc()
        if end.kind == "down" and call is self._call:
            self._heed(False)  # noqa: FBT003 - a value

    def _watch(self, call: _GracedCall, folder: Path, reported: _Content) -> None:
        """Report the folder's content each time that it has changed and is at rest, until the call is over."""
        seen, looks = reported, 0
        pause_s = _LOOK_S
        while not call.over.wait(pause_s):
            began = time.monotonic()
            content = _content(folder)
            pause_s = max(_LOOK_S, _LOOKS_SHARE * (time.monotonic() - began))
            looks = looks + 1 if content != reported else 0
            if looks and (content == seen or looks >= _LONGEST_LOOKS):
                reported, looks = content, 0
                self._report(call.id, call.checkpoint)
            seen = content


_grace: CallGrace | None = None
"""That of this process, a worker, or of the worker that it was forked from."""


def notice() -> EndNotice | None:
    """Return the next end that is coming for the running call; None if none is known, and outside a pool.

    Cheap enough for every step of a training. The notice of a preemption comes as soon as the provider announces it;
    that of the call's timeout when its ``grace`` begins, or without one when a tenth of it is left; that of the pool's
    ``timeout`` or ``max_cost`` when a tenth of the node's time is left; that of ``down`` up to 5 s before the end, and
    only to calls with a handler.

    Raises:
        NotInPoolError: this process was started by a call; notices reach the process that runs the call.
    """
    grace = _of_this_process("notice()")
    return grace.notice() if grace is not None else None


def on_notice(handler: H, /) -> H:
    """Call ``handler`` with an :class:`EndNotice` for every end that is coming for the running call, until it is over.

    The handler runs in a thread of its own, while the call goes on; it is called at once for an end that is known. A
    node that ends waits up to 5 s for it. An exception that it raises is printed. Returns the handler, so that it works
    as a decorator. Outside a pool nothing calls it.

    Raises:
        NotInPoolError: no call runs in this process.
    """
    grace = _of_this_process("on_notice()")
    if grace is not None:
        grace.on_notice(handler)
    return handler


def checkpoint_folder() -> Path:
    """Return a folder of the running call whose content follows the call to the node on which it is run again.

    It is empty in the first run, and removed once the call has returned or raised. Each call has one, and so has each
    worker of a call with ``@``. What a call has written there is copied to the client about a second after it is at
    rest; when the call's worker or node is lost and the call has a retry left, the content is put onto the node of the
    next run before that begins. Write a checkpoint under another name and rename it, so that every copy is whole.

    Raises:
        NotInPoolError: no call runs in this process.
    """
    grace = _of_this_process("checkpoint_folder()")
    if grace is None:
        raise NotInPoolError(
            "checkpoint_folder() works only in a call on a node: to run here, pass a folder as an argument"
        )
    return grace.checkpoint_folder()


def _of_this_process(what: str) -> CallGrace | None:
    if _grace is not None and _grace.is_here:
        return _grace
    if is_on_node():
        raise NotInPoolError(
            f"{what} works in the process that runs the call, not in one that the call has started: use it there, and "
            "pass on what it returns"
        )
    return None


def _time_limit(call: _GracedCall) -> TimeLimit:
    return TimeLimit(
        f"{call.grace_s:g} s are left of the call's timeout of {call.timeout_s:g} s: save what has to stay, and return "
        "or let this exception pass; then the call is ended with its worker",
        timeout_s=call.timeout_s,
    )


def limit_passed(limit: TimeLimit, label: str) -> CallTimeoutError:
    """Return the error of a call that has let its time limit pass."""
    place = instance_info()
    error = CallTimeoutError(
        f"{label} stopped before its timeout of {limit.timeout_s:g} s on node {place.node}, worker {place.worker}, by "
        "its TimeLimit. It is not run again; raise timeout= if it may take longer",
        timeout_s=limit.timeout_s,
        node=place.node,
        worker=place.worker,
    )
    error.__cause__ = limit
    return error


def _content(folder: Path) -> _Content:
    """Return path, size, time of change and inode of everything in a folder; what vanishes meanwhile is left out."""
    content: _Content = []
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(place, name)
            try:
                seen = os.lstat(path)
            except OSError:
                continue
            content.append((path, seen.st_size, seen.st_mtime_ns, seen.st_ino))
    return sorted(content)
