"""Options by which commands select a provider: name, region and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from skyward.errors import ConfigurationError
from skyward.providers.base import Provider
from skyward.providers.registry import is_rented, make_provider, provider_names, provider_parameters, provider_type

__all__ = ["PROVIDER", "ProviderOptions", "place_options", "rented_providers", "settings_of"]

C = TypeVar("C", bound=Callable[..., Any])

_WORDS = {"true": True, "false": False, "none": None}
_CONVERSIONS: Mapping[Any, Callable[[str], Any]] = {int: int, float: float, Sequence: lambda text: text.split(",")}


class _ProviderName(click.ParamType[str]):
    """Name of a provider, Skyward's own or that of an installed package."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name if a provider has it."""
        known = provider_names()
        if value not in known:
            self.fail(f"{value!r} is not one of {', '.join(known)}", param, ctx)
        return value


PROVIDER = _ProviderName()
"""Type of the option ``--provider``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """Parameters of providers, as a command's options give them.

    Attributes:
        values: text by parameter.
    """

    values: Mapping[str, str]

    def provider(self, name: str) -> Provider:
        """Return the provider of that name with these parameters.

        Raises:
            ConfigurationError: it cannot be loaded, has no such parameter, or refuses a value; or the value is secret.
        """
        kind = provider_type(name)
        parameters = provider_parameters(kind)
        hidden = [each for each in self.values if each in parameters and not parameters[each].repr]
        if hidden:
            raise ConfigurationError(
                f"--set {hidden[0]}=: it is secret, and other users of this machine can read command lines; put it "
                f"where {name!r} finds it by itself, such as an environment variable (see the provider's page)"
            )
        hints = get_type_hints(kind) if self.values else {}
        return make_provider(name, {each: _typed(text, hints.get(each, str)) for each, text in self.values.items()})


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


def settings_of(region: str | None, options: Sequence[str]) -> ProviderOptions:
    """Return the parameters that options give."""
    values: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="--set")
        values[name] = value
    return ProviderOptions(values=values | ({} if region is None else {"region": region}))


def rented_providers() -> Sequence[str]:
    """Return the names of the providers that rent machines, and of those that cannot be loaded and show an error."""
    return [name for name in provider_names() if _may_rent(name)]


def _may_rent(name: str) -> bool:
    try:
        return is_rented(provider_type(name))
    except ConfigurationError:
        return True


def _typed(text: str, hint: Any) -> Any:
    """Return an option's value with its parameter's type; text that does not fit is left to the provider to refuse."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if (convert := _CONVERSIONS.get(get_origin(kind) or kind)) is not None:
            with suppress(ValueError):
                return convert(text)
    return text
