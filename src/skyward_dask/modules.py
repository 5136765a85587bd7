"""Sources of the user's modules that a Dask graph refers to, on their way from the client to scheduler and workers.

Dask pickles functions of modules by name, in the client and again in the scheduler. So the sources go ahead of the
graph, on the same ordered streams: to the scheduler, which keeps them for workers to come, and on to every worker.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from skyward.shipping.project_modules import SentSources, loaded_by_the_user, report_assigned, source_set
from skyward.shipping.received_modules import take_sources
from skyward.wire.messages import ModuleSource

MODULES = "skyward_modules"
"""Name of the operation on Dask's streams that carries sources."""


def missing_modules(sent: SentSources, frames: Iterable[Any]) -> bytes | None:
    """Return the message to send before a graph that is pickled in ``frames``; None if nothing is missing."""
    sources = source_set(named_in(frames))
    report_assigned(sources)
    missing = sent.missing(sources) if sources is not None else []
    return pickle.dumps(missing, protocol=5) if missing else None


class KeptModules:
    """Newest edition of every source that came to a scheduler."""

    def __init__(self) -> None:
        self._sources: dict[str, ModuleSource] = {}

    def take(self, modules: bytes) -> None:
        """Take sources, for this process as well as for workers to come."""
        for source in take_modules(modules):
            kept = self._sources.get(source.name)
            if kept is None or kept.edition_ns < source.edition_ns:
                self._sources[source.name] = source

    def all(self) -> bytes | None:
        """Return the message for a worker that has none of them; None if there are no sources."""
        return pickle.dumps(list(self._sources.values()), protocol=5) if self._sources else None


def take_modules(modules: bytes) -> Sequence[ModuleSource]:
    """Make the sources in a message importable in this process; return them."""
    sources: list[ModuleSource] = pickle.loads(modules)
    take_sources(sources)
    return sources


def named_in(frames: Iterable[Any]) -> set[str]:
    """Return names of the user's loaded modules that occur in pickles; other words may look like one of them."""
    pickles = [frame for frame in frames if isinstance(frame, bytes)]
    found: set[str] = set()
    for package, modules in loaded_by_the_user().items():
        naming = [each for each in pickles if package.encode() in each]
        found |= {name for name in modules if any(name.encode() in each for each in naming)}
    return found
