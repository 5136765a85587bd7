"""Spot strategies: the share of machines that the provider may take back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from skyward.request.checks import refusal, whole_number

__all__ = ["Spot", "SpotLike", "SpotNever", "SpotStrategy", "parse_spot"]


@dataclass(frozen=True, slots=True)
class SpotNever:
    """On demand only. ``Spot.Never`` is its value; calling that gives the same."""

    def __call__(self) -> SpotNever:
        """Return itself, so that ``Spot.Never()`` works too."""
        return self

    def __repr__(self) -> str:
        return "Spot.Never"


class Spot:
    """The strategies of ``ComputePool(spot=...)``.

    The short forms are ``"always"``, ``"if-available"``, ``"never"`` and a share such as ``0.8``.
    """

    @dataclass(frozen=True, slots=True)
    class Always:
        """Spot wherever the provider has a spot market; fails if that market refuses.

        Attributes:
            retries: number of retries of a refused request.
            interval: seconds between two attempts.
        """

        retries: int = 10
        interval: float = 1.0

        def __post_init__(self) -> None:
            whole_number("retries", self.retries, minimum=0)
            _number_within("interval", self.interval, "a number of seconds ≥ 0", upper=float("inf"))

    @dataclass(frozen=True, slots=True)
    class IfAvailable:
        """Spot where available, else on demand."""

    @dataclass(frozen=True, slots=True)
    class Percent:
        """At least this share of the nodes on spot, the others on demand.

        Attributes:
            share: from 0 to 1.
        """

        share: float

        def __post_init__(self) -> None:
            _number_within("share", self.share, "a number from 0 to 1", upper=1.0)

    Never: Final = SpotNever()


SpotStrategy: TypeAlias = Spot.Always | Spot.IfAvailable | Spot.Percent | SpotNever
"""A parsed strategy."""

SpotLike: TypeAlias = SpotStrategy | str | float
"""Values that ``spot=`` takes: a strategy, its short form, or a share from 0 to 1."""


def parse_spot(value: SpotLike) -> SpotStrategy:
    """Return the strategy that ``value`` names. Raises ConfigurationError, which lists them all."""
    match value:
        case Spot.Always() | Spot.IfAvailable() | Spot.Percent() | SpotNever():
            return value
        case "always":
            return Spot.Always()
        case "if-available":
            return Spot.IfAvailable()
        case "never":
            return Spot.Never
        case int() | float() if not isinstance(value, bool) and 0 <= value <= 1:
            return Spot.Percent(float(value))
        case _:
            raise refusal("spot", '"always", "if-available", "never", a share from 0 to 1 or one of Spot.*', value)


def _number_within(parameter: str, value: object, allowed: str, *, upper: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= upper:
        raise refusal(parameter, allowed, value)
