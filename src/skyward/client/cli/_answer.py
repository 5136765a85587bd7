"""Answer of a command: one JSON document, or the same as text, and an exit code."""

from __future__ import annotations

import datetime as dt
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from skyward.errors import SkywardError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["FAILED", "Answer", "Say", "answers", "moment", "money"]

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
