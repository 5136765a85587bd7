"""Gangs, the workers of one training: the common part of all frameworks' decorators.

Under ``@`` the workers of such a call form a gang. Before the user's function runs, each worker sends its address to
the others, through the client, and the framework is initialized with all addresses. A gang begins and fails as a
whole: see :mod:`skyward.scheduling.calls`.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import ParamSpec, Protocol, TypeVar

from skyward.distributed.runtime import CallContext, FreshProcessNeeded, current_call, node_address, node_rank
from skyward.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")

GANG_MARK = "skyward_gang"
"""Attribute of functions that all workers run together."""
_UNASSIGNED_PORTS = 20_000, 32_767
_PORT_TRIES = 100
# Contexts of failed gangs. Garbage collection would exit them and wait for stuck workers: docs/decisions/013.
_left_up: list[ExitStack] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Worker of a gang, as described to the others.

    Attributes:
        node: rank of its node.
        local_rank: its position among the gang's workers on that node, 0-based.
        address: its node's address for the other workers.
        port: its listening port there; 0 if it does not listen.
        gpus: UUIDs of the GPUs that its framework may use; empty if the others do not need them.
    """

    node: int
    local_rank: int
    address: str
    port: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """Workers of a call, and the position of this one.

    Attributes:
        rank: this worker's position, 0-based.
        peers: all workers, by rank.
    """

    rank: int
    peers: tuple[Peer, ...]

    @property
    def world(self) -> int:
        """Number of workers."""
        return len(self.peers)

    @property
    def mine(self) -> Peer:
        """This worker."""
        return self.peers[self.rank]

    @property
    def first(self) -> Peer:
        """The worker of rank 0, which coordinates."""
        return self.peers[0]

    @property
    def local_world(self) -> int:
        """Number of workers on this worker's node, itself included."""
        return sum(peer.node == self.mine.node for peer in self.peers)


class GangSession(Protocol):
    """Training of one framework on one worker, for one call.

    Attributes:
        port: port on which this worker will listen for the others of its gang; 0 for none.
        gpus: UUIDs of the GPUs that the framework may use here; empty if the others do not need them.
    """

    port: int
    gpus: tuple[str, ...]

    def join(self, gang: Gang) -> AbstractContextManager[object]:
        """Initialize the framework with the other workers, and shut it down on exit.

        The context exits when the function has returned, and in a gang of one also when it has failed. A larger gang
        that fails is not shut down, which would wait for stuck workers: its processes end.
        """
        ...


class Decorator(Protocol):
    """Decorator that keeps a function's signature."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]:
        """Return the decorated function."""
        ...


def decorator(open_session: Callable[[], GangSession]) -> Decorator:
    """Return a decorator that runs a function with a framework initialized, inside or outside of ``@compute``.

    Args:
        open_session: checks that the framework can be used in this process, and chooses a port; called for every call,
            in its thread on the worker. Raises :class:`ConfigurationError` if the framework is not installed, and
            :class:`FreshProcessNeeded` if this process cannot initialize it again.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        around = getattr(fn, "decorated_inside", None)
        if around is not None:  # ``@compute`` was applied first
            return around(decorate)
        if not callable(fn):
            raise ConfigurationError(f"skyward.distributed decorates functions, got {type(fn).__name__}")
        if is_gang(fn):
            raise ConfigurationError("one decorator of skyward.distributed is enough: only one framework can be set up")

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return _run(open_session, functools.partial(fn, *args, **kwargs))

        setattr(run, GANG_MARK, True)
        return run

    return decorate


def is_gang(fn: object) -> bool:
    """Return True if all workers that run ``fn`` must run it together."""
    return getattr(fn, GANG_MARK, False) is True


def _run(open_session: Callable[[], GangSession], fn: Callable[[], R]) -> R:
    session = open_session()
    gang = _meet(session)
    with ExitStack() as stack:
        stack.enter_context(environment({"NODE_RANK": str(gang.mine.node)}))  # Lightning reads it
        stack.enter_context(session.join(gang))
        try:
            return _begun(fn)
        except BaseException:
            # Shutting down a larger gang would report the failure to the others before the client receives it.
            if gang.world > 1:
                _left_up.append(stack.pop_all())
            raise


def _begun(fn: Callable[[], R]) -> R:
    """Return the result of the user's function, which has begun and is not run again in another process."""
    try:
        return fn()
    except FreshProcessNeeded as needed:
        raise ConfigurationError(
            f"a function decorated with skyward.distributed was called inside another one: {needed}"
        ) from needed


def _meet(session: GangSession) -> Gang:
    call = _gang_call()
    mine = Peer(
        node=node_rank(),
        local_rank=call.local_rank,
        address=node_address(),
        port=session.port,
        gpus=session.gpus,
    )
    peers = (mine,) if call.meet is None else tuple(map(_peer, call.meet(json.dumps(asdict(mine)))))
    return Gang(rank=call.rank, peers=peers)


def _gang_call() -> CallContext:
    """Return the call if its workers form a gang, else a call of one worker."""
    call = current_call()
    return call if call is not None and call.meet is not None else CallContext()


def own_rank() -> int:
    """Return this worker's position in the gang that is about to meet; 0 for a single worker."""
    return _gang_call().rank


def _peer(text: str) -> Peer:
    values = json.loads(text)
    return Peer(**(values | {"gpus": tuple(values["gpus"])}))


@contextmanager
def environment(values: Mapping[str, str]) -> Generator[None]:
    """Set environment variables of this process for the duration of the block, then restore their former values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def imported(module: str, *, pip: str) -> ModuleType:
    """Return a module of a framework.

    Args:
        module: its name.
        pip: name of the package that contains it.

    Raises:
        ConfigurationError: it is not installed; the message names the line to add to the image.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if missing.name is None or missing.name.partition(".")[0] != package:
            raise  # it is installed, but one of its own imports is not
        raise ConfigurationError(
            f'{package} is not installed on node {node_rank()}: add it to the image, image=sky.Image(pip=["{pip}"])'
        ) from missing


def checked_backend(value: str | None, allowed: tuple[str, ...], framework: str) -> str | None:
    """Return ``value`` if it is None or one of ``allowed``.

    Raises:
        ConfigurationError: it is another value, or the decorated function because the parentheses are missing.
    """
    if callable(value):
        raise ConfigurationError(f"distributed.{framework} needs parentheses: write @sky.distributed.{framework}()")
    if value is not None and value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ConfigurationError(f"backend of distributed.{framework} must be None or one of {names}, got {value!r}")
    return value


def unused_port(address: str) -> int:
    """Return an unused TCP port of ``address``, below the range that systems assign automatically.

    For frameworks that take a port number and bind it themselves: until then only a program that asks for this very
    port could take it. The choice is random, so that two pools on one machine rarely collide.
    """
    draw = random.SystemRandom()  # trainings seed the default generator alike on all ranks
    for _ in range(_PORT_TRIES):
        port = draw.randint(*_UNASSIGNED_PORTS)
        # Without SO_REUSEADDR, as frameworks bind: to them a port in TIME_WAIT is not free.
        with suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            return port
    raise OSError(f"none of {_PORT_TRIES} ports of {address} was free")
