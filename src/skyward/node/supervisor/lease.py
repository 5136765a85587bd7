"""Life of a node: pure, the clocks are the caller's."""

from __future__ import annotations

from skyward.wire.node_config import SILENCE_S

_WARNING_SHARE = 0.1


class Lease:
    """Decision when a node has to end, from two readings of the caller's clock.

    ``now`` is a ``monotonic`` reading: a machine that has slept has received nothing meanwhile, and must not take
    that for silence of its client. ``age_s`` is the node's age by ``elapsed`` readings: the cap counts time asleep too.

    Three limits run: ``timeout_s`` from its start in any case; ``lease_s`` while no client is connected (its end of
    the connection was closed, so it is gone); ``away_s`` while one is silent (asleep, or no network). A connection that
    is closed after it had been silent was closed by the network, not by the client: the client is away.

    A node that is kept (``keep_s`` above 0) has one limit in place of the last two: without a client and without an
    unfinished job it ends ``keep_s`` after the later of their ends.

    Attributes:
        keep_s: seconds for which a kept node waits for the next client; 0 for a node that ends with its client.
    """

    def __init__(self, *, timeout_s: float, lease_s: float, away_s: float, now: float, keep_s: float = 0.0) -> None:
        self.keep_s = keep_s
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._away_s = away_s
        self._heard = now
        self._worked = now
        self._clients = 0
        self._given_up = False
        self._warned = False

    def joined(self, now: float) -> None:
        """Note that a client has connected."""
        self._clients += 1
        self._given_up = False
        self._heard = now

    def heard(self, now: float) -> None:
        """Note a message of a client."""
        self._heard = now

    def left(self, now: float) -> None:
        """Note that a client's connection was closed."""
        self._clients -= 1
        self._given_up = now - self._heard > SILENCE_S
        if not self._given_up:
            self._heard = now

    def worked(self, now: float) -> None:
        """Note that the node has an unfinished job."""
        self._worked = now

    def end_reason(self, now: float, age_s: float) -> str | None:
        """Return the reason for which the node has to end now, or None."""
        if self.timed_out(age_s):
            return f"its timeout of {self._timeout_s:g} s is over"
        if self.keep_s:
            unused_s = now - max(self._heard, self._worked)
            return f"no client has come for {self.keep_s:g} s (keep)" if unused_s >= self.keep_s else None
        silence_s = now - self._heard
        is_away = self._clients > 0 or self._given_up
        if not is_away and silence_s >= self._lease_s:
            return f"no client has been connected for {self._lease_s:g} s (lease)"
        if is_away and silence_s >= self._away_s:
            return f"the client has been silent for {self._away_s:g} s (away)"
        return None

    def timed_out(self, age_s: float) -> bool:
        """Return whether the node's hard cap is reached."""
        return age_s >= self._timeout_s

    def due_warning_s(self, age_s: float) -> float | None:
        """Return the seconds left of the timeout, once: when a tenth of it is left. Else return None."""
        left_s = self._timeout_s - age_s
        if self._warned or left_s > self._timeout_s * _WARNING_SHARE:
            return None
        self._warned = True
        return max(0.0, left_s)
