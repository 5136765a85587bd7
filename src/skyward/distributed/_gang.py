"""Calls whose workers work together: what the decorators of all frameworks share.

Under ``@`` the workers of such a call are a gang. Before the user's function runs each tells the others where it can
be reached, through the client, and the framework is brought up with what all of them have said. A gang begins and
fails as a whole: see :mod:`skyward.engine.calls`.
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

__all__ = [
    "Framework",
    "Gang",
    "GangSession",
    "Peer",
    "checked_backend",
    "decorator",
    "environment",
    "imported",
    "is_gang",
    "own_rank",
    "unused_port",
]

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "skyward_gang"
_UNASSIGNED_PORTS = 20_000, 32_767
_PORT_TRIES = 100
# Of gangs that failed. What is collected as garbage would be taken down on the way.
_left_up: list[ExitStack] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One worker of a gang, as the others see it.

    Attributes:
        node: rank of its node.
        local_rank: its position among the gang's workers on that node, 0-based.
        address: the address of its node that the others reach it at.
        port: where it will listen there; 0 if its framework has it listen nowhere.
        gpus: UUIDs of what its framework may use; empty where that matters to nobody.
    """

    node: int
    local_rank: int
    address: str
    port: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The workers of a call, and which of them this is.

    Attributes:
        rank: this worker's position, 0-based.
        peers: all of them, by rank.
    """

    rank: int
    peers: tuple[Peer, ...]

    @property
    def world(self) -> int:
        """How many there are."""
        return len(self.peers)

    @property
    def mine(self) -> Peer:
        """What this worker said of itself."""
        return self.peers[self.rank]

    @property
    def first(self) -> Peer:
        """The worker of rank 0, which coordinates."""
        return self.peers[0]

    @property
    def local_world(self) -> int:
        """How many of them share this worker's node."""
        return sum(peer.node == self.mine.node for peer in self.peers)


class GangSession(Protocol):
    """One training of one framework on one worker.

    Attributes:
        port: where this worker will listen for the others of its gang; 0 for nowhere.
        gpus: UUIDs of what the framework may use here, where that matters to the others.
    """

    port: int
    gpus: tuple[str, ...]

    def join(self, gang: Gang) -> AbstractContextManager[object]:
        """Bring the framework up with the others, and take it down at the end.

        The end is reached when the function has returned, and in a gang of one when it has failed. A larger gang that
        fails is not taken down, which would wait for those that are stuck: its processes end.
        """
        ...


class Framework(Protocol):
    """Knows one framework: opens a :class:`GangSession` for every call, on the worker, in the thread of the call."""

    def session(self) -> GangSession:
        """Look whether the framework can be used in this process, and choose a port.

        Raises:
            ConfigurationError: it is not installed.
            FreshProcessNeeded: it can be brought up no more in this process.
        """
        ...


def decorator(framework: Framework) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The decorator that has a function run with ``framework`` brought up, either way round with ``@compute``."""

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        around = getattr(fn, "decorated_inside", None)
        if around is not None:  # compute was applied first
            return around(decorate)
        if not callable(fn):
            raise ConfigurationError(f"skyward.distributed decorates functions, got {type(fn).__name__}")
        if is_gang(fn):
            raise ConfigurationError("one decorator of skyward.distributed is enough: only one framework can be set up")

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            return _run(framework, functools.partial(fn, *args, **kwargs))

        setattr(run, _MARK, True)
        return run

    return decorate


def is_gang(fn: object) -> bool:
    """Whether all workers that run ``fn`` must run it together."""
    return getattr(fn, _MARK, False) is True


def _run(framework: Framework, fn: Callable[[], R]) -> R:
    session = framework.session()
    gang = _meet(session)
    with ExitStack() as stack:
        stack.enter_context(environment({"NODE_RANK": str(gang.mine.node)}))  # Lightning reads it
        stack.enter_context(session.join(gang))
        try:
            return _begun(fn)
        except BaseException:
            if gang.world > 1:  # this process ends: the others must not hear of it before the client does
                _left_up.append(stack.pop_all())
            raise


def _begun(fn: Callable[[], R]) -> R:
    """What the user's function gives. It has begun now, and is not run again in another process."""
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
    """The call if its workers work together, else one that is alone: as inside a call that was sent without them."""
    call = current_call()
    return call if call is not None and call.meet is not None else CallContext()


def own_rank() -> int:
    """This worker's position in the gang that is about to meet; 0 if it is alone."""
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
    """A module of a framework.

    Args:
        module: its name.
        pip: what to install for it.

    Raises:
        ConfigurationError: it is not there, with the line of the image that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if missing.name is None or missing.name.partition(".")[0] != package:
            raise  # it is there, and lacks something itself
        raise ConfigurationError(
            f'{package} is not installed on node {node_rank()}: add it to the image, image=sky.Image(pip=["{pip}"])'
        ) from missing


def checked_backend(value: str | None, allowed: tuple[str, ...], framework: str) -> str | None:
    """``value``, if it is None or one of ``allowed``.

    Raises:
        ConfigurationError: it is another one, or the function that was to be decorated.
    """
    if callable(value):
        raise ConfigurationError(f"distributed.{framework} needs parentheses: write @sky.distributed.{framework}()")
    if value is not None and value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ConfigurationError(f"backend of distributed.{framework} must be None or one of {names}, got {value!r}")
    return value


def unused_port(address: str) -> int:
    """A TCP port of ``address`` that nobody uses, below those that systems hand out by themselves.

    For frameworks that must be told a port and bind it themselves: until then another one could only take it on
    purpose. The choice is random, so that two pools on one machine do not make the same one.
    """
    draw = random.SystemRandom()  # the usual one is seeded alike on all ranks where training begins
    for _ in range(_PORT_TRIES):
        port = draw.randint(*_UNASSIGNED_PORTS)
        # Without SO_REUSEADDR, as frameworks bind: a port whose last connection has just closed is not free to them.
        with suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            return port
    raise OSError(f"none of {_PORT_TRIES} ports of {address} was free")
