"""Repeat a check until it holds."""

from __future__ import annotations

from collections.abc import Iterator

from tenacity import AttemptManager, Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

__all__ = ["eventually"]


def eventually(
    timeout_s: float,
    on: type[BaseException] | tuple[type[BaseException], ...] = AssertionError,
    *,
    first_pause_s: float = 0.02,
    longest_pause_s: float = 0.2,
) -> Iterator[AttemptManager]:
    """Yield attempts for ``with`` until one does not raise ``on``; the error of the last one is raised.

    Args:
        timeout_s: no attempt begins later than this. There is at least one.
        on: the errors after which there is another attempt.
        first_pause_s: pause after the first attempt; it doubles with each.
        longest_pause_s: limit of the pauses.
    """
    return iter(
        Retrying(
            retry=retry_if_exception_type(on),
            stop=stop_after_delay(timeout_s),
            wait=wait_exponential(multiplier=first_pause_s, max=longest_pause_s),
            reraise=True,
        )
    )
