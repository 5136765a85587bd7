"""What a command answers: one JSON document, or the same for people, and an exit code."""

from __future__ import annotations

import datetime as dt
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from skyward.errors import SkywardError

__all__ = ["FAILED", "Answer", "Say", "answers", "moment", "money"]

FAILED = 1
"""Exit code of a command that could not do what it was asked to, or left something undone."""


class Say:
    """Writes to standard output for people."""

    def __init__(self) -> None:
        from rich.console import Console

        wide = None if sys.stdout.isatty() else 10_000  # what reads a pipe has no use for wrapped rows
        self._console = Console(width=wide, markup=False, emoji=False, highlight=False)

    def line(self, text: str = "") -> None:
        """One line, whole."""
        self._console.print(text, soft_wrap=True)

    def table(self, *columns: str, rows: Sequence[Sequence[str]]) -> None:
        """A table with a header."""
        from rich import box
        from rich.table import Table

        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command found or did.

    Attributes:
        document: JSON values.
        show: says the same to people.
        exit_code: 0, or :data:`FAILED`.
    """

    document: Any
    show: Callable[[Say], None]
    exit_code: int = field(default=0)


def answers(command: Callable[..., Answer]) -> Callable[..., None]:
    """Give a command the option ``--json``, show its answer, and make Skyward's errors plain messages."""

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
    """A time as ISO 8601 in the local zone, to the second."""
    if unix_time is None:
        return None
    return dt.datetime.fromtimestamp(unix_time, tz=dt.UTC).astimezone().isoformat(timespec="seconds")


def money(usd: float | None) -> str:
    """An amount for people; nothing is known of None."""
    return "?" if usd is None else f"${usd:.2f}"
