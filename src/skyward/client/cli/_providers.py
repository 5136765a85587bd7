"""Options by which commands select a provider: name, region and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from skyward.providers.registry import OWN, PROVIDERS

__all__ = ["RENTED", "place_options", "settings_of"]

C = TypeVar("C", bound=Callable[..., Any])

RENTED = click.Choice([name for name in PROVIDERS if name not in OWN])
"""Providers that rent out machines."""

_WORDS = {"true": True, "false": False, "none": None}


def place_options(command: C) -> C:
    """Add the parameters of :func:`settings_of` to a command: ``region`` and ``options``."""
    each = click.option(
        "--set",
        "options",
        metavar="NAME=VALUE",
        multiple=True,
        help="A parameter of the provider, such as profile=work; may be repeated.",
    )
    return click.option("--region", help="The provider's region; without it, the provider's default.")(each(command))


def settings_of(region: str | None, options: Sequence[str]) -> Mapping[str, Any]:
    """Return the provider's parameters from options; the provider itself refuses unknown ones."""
    settings: dict[str, Any] = {} if region is None else {"region": region}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="--set")
        settings[name] = _WORDS.get(value.lower(), value)
    return settings
