"""Functions that the client has sent to a worker. The client decides how many there are, and which go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from skyward.wire.messages import Payload

__all__ = ["KnownFunction", "KnownFunctions"]


@dataclass(slots=True, eq=False)
class KnownFunction:
    """Function that calls name by its id. Each call that waits holds it, whether or not it was forgotten meanwhile.

    Attributes:
        label: its name, for messages.
        payload: its pickle; empty once it was loaded.
        loaded: the function; None until its first call.
    """

    label: str
    payload: Payload
    loaded: Callable[..., Any] | None = None

    def load(self, load: Callable[[Payload], Any]) -> Callable[..., Any]:
        """Return the function, unpickled by ``load`` at the first use."""
        loaded = self.loaded
        if loaded is None:
            loaded = self.loaded = load(self.payload)
            self.payload = Payload()
        return loaded


class KnownFunctions:
    """All functions of a worker, by id."""

    def __init__(self) -> None:
        self._functions: dict[str, KnownFunction] = {}

    def know(self, function_id: str, payload: Payload, label: str) -> None:
        """Add a function."""
        self._functions[function_id] = KnownFunction(label, payload)

    def forget(self, function_ids: Iterable[str]) -> None:
        """Drop functions, for all calls to come."""
        for function_id in function_ids:
            self._functions.pop(function_id, None)

    def get(self, function_id: str) -> KnownFunction:
        """Return a function.

        Raises:
            KeyError: the client has not sent it.
        """
        return self._functions[function_id]

    def clear(self) -> None:
        """Drop all."""
        self._functions.clear()
