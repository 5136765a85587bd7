"""What the commands share: an answer as text or JSON with an exit code, and the options that select a provider."""

from __future__ import annotations

import datetime as dt
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from skyward.errors import ConfigurationError, SkywardError
from skyward.providers.base import Provider
from skyward.providers.registry import make_provider, provider_names, provider_parameters, provider_type

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = [
    "FAILED",
    "PROVIDER",
    "Answer",
    "Say",
    "answers",
    "chosen_provider",
    "moment",
    "money",
    "place_options",
    "rented_providers",
    "settings_of",
]

FAILED = 1
"""Exit code of a command that failed, or did only part of its work."""

_UNWRAPPED = 10_000
"""Columns of a console that wraps no row."""


class Say:
    """Writer of text to standard output."""

    def __init__(self) -> None:
        self._console = _console(None if sys.stdout.isatty() else _UNWRAPPED)  # programs that read a pipe need rows

    def line(self, text: str = "") -> None:
        """Write one line, unwrapped."""
        self._console.print(text, soft_wrap=True)

    def rich(self, view: RenderableType) -> None:
        """Write a view."""
        self._console.print(view)

    def table(self, *columns: str, rows: Sequence[Sequence[str]]) -> None:
        """Write a table with a header; on a narrower terminal its rows go on in the next line, and no id is cut."""
        from rich import box
        from rich.table import Table

        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*row)
        needed = self._console.measure(table, options=self._console.options.update(max_width=_UNWRAPPED)).maximum
        _console(max(needed, self._console.width)).print(table, soft_wrap=True)


def _console(width: int | None) -> Console:
    from rich.console import Console

    return Console(width=width, markup=False, emoji=False, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a command.

    Attributes:
        document: JSON values.
        show: writes the same as text.
        exit_code: 0, or :data:`FAILED`.
    """

    document: Any
    show: Callable[[Say], None]
    exit_code: int = field(default=0)


def answers(command: Callable[..., Answer]) -> Callable[..., None]:
    """Add the option ``--json`` to a command, show its answer, and print Skyward's errors as plain messages."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
    @click.pass_context
    @functools.wraps(command)
    def run(context: click.Context, /, *, as_json: bool, **parameters: Any) -> None:
        try:
            answer = command(**parameters)
        except SkywardError as error:
            answer = Answer(document={"error": str(error)}, show=lambda _: None, exit_code=FAILED)
            click.echo(f"Error: {error}", err=True)
        if as_json:
            click.echo(json.dumps(answer.document, indent=1))
        else:
            answer.show(Say())
        context.exit(answer.exit_code)

    return run


def moment(unix_time: float | None) -> str | None:
    """Return a time in ISO 8601, in the local time zone, to the second."""
    if unix_time is None:
        return None
    return dt.datetime.fromtimestamp(unix_time, tz=dt.UTC).astimezone().isoformat(timespec="seconds")


def money(usd: float | None) -> str:
    """Return an amount of money as text; ``?`` for None, which means unknown."""
    return "?" if usd is None else f"${usd:.2f}"


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


def chosen_provider(name: str, values: Mapping[str, str]) -> Provider:
    """Return the provider of that name with these parameters, of :func:`settings_of`.

    Raises:
        ConfigurationError: it cannot be loaded, has no such parameter, or refuses a value; or the value is secret.
    """
    kind = provider_type(name)
    parameters = provider_parameters(kind)
    hidden = [each for each in values if each in parameters and not parameters[each].repr]
    if hidden:
        raise ConfigurationError(
            f"--set {hidden[0]}=: it is secret, and other users of this machine can read command lines; put it "
            f"where {name!r} finds it by itself, such as an environment variable (see the provider's page)"
        )
    hints = get_type_hints(kind) if values else {}
    return make_provider(name, {each: _typed(text, hints.get(each, str)) for each, text in values.items()})


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


def settings_of(region: str | None, options: Sequence[str]) -> Mapping[str, str]:
    """Return the parameters of providers that options give, as text by name."""
    values: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="--set")
        values[name] = value
    return values if region is None else values | {"region": region}


def rented_providers() -> Sequence[str]:
    """Return the names of the providers that rent machines, and of those that cannot be loaded and show an error."""
    return [name for name in provider_names() if _may_rent(name)]


def _may_rent(name: str) -> bool:
    try:
        return not getattr(provider_type(name), "own_machines", False)  # a registered object may be no provider
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
