"""What the commands share: an answer as text or JSON with an exit code, and the options that select providers."""

from __future__ import annotations

import datetime as dt
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import click

from skyward.errors import ConfigurationError, SkywardError
from skyward.providers.base import Provider
from skyward.providers.registry import make_provider, provider_names, provider_type, secret_parameters

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FAILED = 1
"""Exit code of a command that failed, or did only part of its work."""
_UNWRAPPED = 10_000
"""Columns of a console that wraps no row."""
_WORDS = {"true": True, "false": False, "none": None}
_CONVERSIONS: Mapping[Any, Callable[[str], Any]] = {int: int, float: float, Sequence: lambda text: text.split(",")}


class Rows(NamedTuple):
    """Table with a header.

    Attributes:
        columns: names of the columns.
        rows: cells.
        folded: columns whose cells are folded in a narrow terminal; without any, rows go on in the next line.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a command.

    Attributes:
        document: JSON values.
        text: the same as lines, tables and views; read only if it is written.
        exit_code: 0, or :data:`FAILED`.
    """

    document: Any
    text: Iterable[str | Rows | RenderableType] = ()
    exit_code: int = 0


def answers(command: Callable[..., Answer]) -> Callable[..., None]:
    """Add the option ``--json`` to a command, show its answer, and print Skyward's errors as plain messages."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
    @click.pass_context
    @functools.wraps(command)
    def run(context: click.Context, /, *, as_json: bool, **parameters: Any) -> None:
        try:
            answer = command(**parameters)
        except SkywardError as error:
            answer = Answer(document={"error": str(error)}, exit_code=FAILED)
            click.echo(f"Error: {error}", err=True)
        if as_json:
            click.echo(json.dumps(answer.document, indent=1))
        else:
            for part in answer.text:
                write(part)
        context.exit(answer.exit_code)

    return run


def write(part: str | Rows | RenderableType) -> None:
    """Write a line, unwrapped; a table, whose cells are folded, or rows go on, in a narrow terminal; or a view."""
    if isinstance(part, str):
        click.echo(part)
        return
    console = _console(None if sys.stdout.isatty() else _UNWRAPPED)  # programs that read a pipe need rows
    if not isinstance(part, Rows):
        console.print(part)
        return
    from rich import box
    from rich.table import Table

    style: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)} if part.folded else {"box": box.SIMPLE_HEAD}
    table = Table(**style, pad_edge=False, header_style="bold")
    for name in part.columns:
        table.add_column(name, no_wrap=name not in part.folded, overflow="fold")
    for row in part.rows:
        table.add_row(*row)
    if part.folded:
        console.print(table)
        return
    needed = console.measure(table, options=console.options.update(max_width=_UNWRAPPED)).maximum
    _console(max(needed, console.width)).print(table, soft_wrap=True)  # no id is cut


def _console(width: int | None) -> Console:
    from rich.console import Console

    return Console(width=width, markup=False, emoji=False, highlight=False)


def moment(unix_time: float | None) -> str | None:
    """Return a time in ISO 8601, in the local time zone, to the second."""
    if unix_time is None:
        return None
    return dt.datetime.fromtimestamp(unix_time, tz=dt.UTC).astimezone().isoformat(timespec="seconds")


def money(usd: float | None) -> str:
    """Return an amount of money as text; ``?`` for None, which means unknown."""
    return "?" if usd is None else f"${usd:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Providers:
    """Providers that a command's options name, and their parameters.

    Attributes:
        names: names of the providers.
        parameters: their parameters as text, by name.
    """

    names: Sequence[str]
    parameters: Mapping[str, str]

    def make(self, name: str) -> Provider:
        """Return the provider of that name with these parameters.

        Raises:
            ConfigurationError: it cannot be loaded, has no such parameter, or refuses a value; or the value is secret.
        """
        kind = provider_type(name)
        for parameter in secret_parameters(kind):
            if parameter in self.parameters:
                raise ConfigurationError(
                    f"--set {parameter}=: it is secret, and other users of this machine can read command lines; put it "
                    f"where {name!r} finds it by itself, such as an environment variable (see the provider's page)"
                )
        hints = get_type_hints(kind) if self.parameters else {}
        values = {parameter: _typed(text, hints.get(parameter, str)) for parameter, text in self.parameters.items()}
        return make_provider(name, values)


def provider_options(use: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add ``--provider``, with the help text ``use``, ``--region`` and ``--set``: the parameter ``providers``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @click.option(
            "--provider", "names", metavar="NAME", multiple=True, callback=_known, help=f"{use}; may be repeated."
        )
        @click.option("--region", help="The provider's region; without it, the provider's default.")
        @click.option(
            "--set",
            "settings",
            metavar="NAME=VALUE",
            multiple=True,
            callback=_parsed,
            help="A parameter of the provider, such as profile=work; may be repeated.",
        )
        @functools.wraps(command)
        def run(*, names: Sequence[str], region: str | None, settings: Mapping[str, str], **parameters: Any) -> None:
            values = settings if region is None else {**settings, "region": region}
            command(providers=Providers(names=names, parameters=values), **parameters)

        return run

    return decorate


def _known(context: click.Context, option: click.Parameter, names: Sequence[str]) -> Sequence[str]:
    """Return the names if they are those of providers, Skyward's own or those of installed packages."""
    known = provider_names()
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}", context, option)
    return names


def _parsed(context: click.Context, _: click.Parameter, settings: Sequence[str]) -> Mapping[str, str]:
    parts = [setting.partition("=") for setting in settings]
    for name, equals, value in parts:
        if not (name and equals):
            raise click.BadParameter(f"{name + equals + value!r} is not NAME=VALUE", context, param_hint="--set")
    return {name: value for name, _, value in parts}


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
