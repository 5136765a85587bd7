"""Threads for calls that may hang, such as the lookup of a name, which has no timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads(ThreadPoolExecutor):
    """Executor with a daemon thread for each call: neither its shutdown nor the interpreter's exit waits for them.

    The threads of asyncio's own executor are joined at both. There is no limit on the number of threads, as calls that
    hang would keep others from starting.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call the function in a new thread."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=call, name="skyward-call", daemon=True).start()
        return future
