"""A process that stands for a worker: it runs calls one after the other, each from its pickle."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

from skyward.shipping.pickling import pack, unpack
from skyward.shipping.remote_exceptions import unpack_error

PROGRAM = """
import gc, pickle, sys
from skyward.shipping.pickling import pack_result, unpack_call
from skyward.shipping.remote_exceptions import pack_error
calls, results = sys.stdin.buffer, sys.stdout.buffer
while True:
    fn, args = unpack_call(pickle.load(calls))
    try:
        answer = pack_result(fn(*args), what="the result").data
    except Exception as error:
        answer = pack_error(error)
    del fn, args
    gc.collect()
    pickle.dump(answer, results)
    results.flush()
"""


class WorkerProcess:
    """The process; a context manager that ends it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        self.call(int)  # before its first answer it may still have no command line, by which leaks are told
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def send(self, fn: Callable[..., Any], *args: object) -> bytes:
        """Run a call; return the pickle of its result, or raise its error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(pack((fn, args), what="the call").data, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, bytes):
            return answer
        raise unpack_error(answer, where="the worker")

    def call(self, fn: Callable[..., Any], *args: object) -> Any:
        """Run a call; return its result, or raise its error."""
        return unpack(self.send(fn, *args))
