"""Limit of open files of this process.

A pool needs some ten descriptors for each SSH machine, and most systems start a login with a soft limit of 1,024, which
about a hundred machines use up. The hard limit is far above it.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Generator

__all__ = ["raise_descriptor_limit", "raised_descriptor_limit"]

_MOST = 1 << 16
_MOST_OF_MACOS = 10_240
"""Highest limit that setrlimit(2) accepts there, where the limit shown is infinite: OPEN_MAX of sys/syslimits.h."""


class _Raised:
    """Users of the raised limit in this process, and the soft limit from before the first of them."""

    lock = threading.Lock()
    users = 0
    before = 0


def raise_descriptor_limit() -> None:
    """Raise the limit of open files, for this process and its later children, to the system's, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    for limit in (most, _MOST_OF_MACOS):
        if soft == resource.RLIM_INFINITY or soft >= limit:
            return
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than the limit that it shows
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


@contextlib.contextmanager
def raised_descriptor_limit() -> Generator[None]:
    """Raise the limit of open files inside the block; the last of several blocks restores it.

    Descriptors that are open by then stay open. A limit that the program has set meanwhile is kept.
    """
    with _Raised.lock:
        if _Raised.users == 0:
            _Raised.before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise_descriptor_limit()
        _Raised.users += 1
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        yield
    finally:
        with _Raised.lock:
            _Raised.users -= 1
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if _Raised.users == 0 and soft == raised:
                with contextlib.suppress(ValueError, OSError):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (_Raised.before, hard))
