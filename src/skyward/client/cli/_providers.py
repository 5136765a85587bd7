"""Providers, as commands name them: by name, region and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from skyward.providers.registry import OWN, PROVIDERS

__all__ = ["RENTED", "place_options", "settings_of"]

C = TypeVar("C", bound=Callable[..., Any])

RENTED = click.Choice([name for name in PROVIDERS if name not in OWN])
"""Those that rent machines."""

_WORDS = {"true": True, "false": False, "none": None}


def place_options(command: C) -> C:
    """Give a command what :func:`settings_of` takes: ``region`` and ``options``."""
    each = click.option(
        "--set",
        "options",
        metavar="NAME=VALUE",
        multiple=True,
        help="A parameter of the provider, such as profile=work; may be repeated.",
    )
    return click.option("--region", help="The provider's region; by default its own default.")(each(command))


def settings_of(region: str | None, options: Sequence[str]) -> Mapping[str, Any]:
    """The provider's parameters; one that it does not know is its own to refuse."""
    settings: dict[str, Any] = {} if region is None else {"region": region}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="--set")
        settings[name] = _WORDS.get(value.lower(), value)
    return settings
