"""Loopback services of test doubles: WSGI applications on threads, planned faults, networks of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from skyward.errors import ConfigurationError

__all__ = ["Faults", "drop_connection", "reserve_network", "serving"]

_NETWORKS: Final = 250

_Fault = TypeVar("_Fault")


@contextlib.contextmanager
def serving(application: Any, name: str, address: str = "127.0.0.1") -> Generator[str]:
    """Serve a WSGI ``application`` at a free port of ``address``, in threads named ``name``, and yield its URL."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - werkzeug's name
            """Log nothing: the application records its requests."""

    server = make_server(address, 0, application, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True, args=(0.05,))
    thread.start()
    try:
        yield f"http://{address}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def drop_connection(environ: Mapping[str, Any]) -> None:
    """Close the connection of the WSGI request ``environ`` without an answer.

    Raises:
        ConnectionResetError: always; it ends the request's thread.
    """
    sock: socket.socket = environ["werkzeug.socket"]
    sock.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("planned fault: no answer")


@contextlib.contextmanager
def reserve_network(block: int, port: int) -> Generator[str]:
    """Reserve a network of 254 addresses that no other test run uses, by binding ``port`` at its first address.

    Yields its first three numbers, such as ``"127.72.0"``: the second is ``block``.
    """
    for number in range(_NETWORKS):
        with socket.socket() as held:
            try:
                held.bind((f"127.{block}.{number}.1", port))
            except OSError:
                continue
            yield f"127.{block}.{number}"
            return
    raise ConfigurationError(f"all networks of 127.{block}.0.0/16 are in use: end other test runs, or pass block=")


@dataclass(slots=True)
class _Planned(Generic[_Fault]):
    fault: _Fault
    action: str
    after: int
    times: int


class Faults(Generic[_Fault]):
    """Plan of failing calls. Thread-safe."""

    def __init__(self) -> None:
        self._planned: list[_Planned[_Fault]] = []
        self._lock = threading.Lock()

    def add(self, fault: _Fault, *, action: str = "", nth: int = 1, times: int = 1) -> None:
        """Plan a fault: ``times`` calls fail, from the ``nth`` on, counted from now.

        Args:
            fault: the failure.
            action: action of the calls that count and fail; empty means every call.
            nth: 1 is the next one.
            times: number of consecutive failures.

        Raises:
            ConfigurationError: a number is not positive.
        """
        if nth < 1 or times < 1:
            raise ConfigurationError(f"nth and times count from 1, got {nth} and {times}")
        with self._lock:
            self._planned.append(_Planned(fault, action, nth - 1, times))

    def clear(self) -> None:
        """Remove every plan."""
        with self._lock:
            self._planned.clear()

    def met(self, action: str) -> _Fault | None:
        """Count a call of ``action`` in every plan; return the fault of the oldest plan that it triggers, or None."""
        with self._lock:
            found: _Fault | None = None
            for planned in self._planned:
                if planned.action not in ("", action):
                    continue
                if planned.after:
                    planned.after -= 1
                elif found is None:
                    found = planned.fault
                    planned.times -= 1
            self._planned = [planned for planned in self._planned if planned.times]
            return found
