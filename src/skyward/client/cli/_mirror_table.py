"""``skyward env``: this environment's distributions, as nodes get them."""

from __future__ import annotations

from collections.abc import Sequence

import click

from skyward.client.cli._answer import Answer, Say, answers
from skyward.provision.mirroring.image_mirror import mirror_environment

__all__ = ["env"]

_COLUMNS = ("name", "version", "source")


@click.command()
@click.option("--only", multiple=True, metavar="NAME", help="Take this one and its requirements; may be repeated.")
@click.option("--exclude", multiple=True, metavar="NAME", help="Leave this distribution out; may be repeated.")
@answers
def env(*, only: Sequence[str], exclude: Sequence[str]) -> Answer:
    """List the distributions of this environment, and where nodes get each from: Image.mirror()."""
    mirror = mirror_environment(only=only or None, exclude=exclude, report=lambda text: click.echo(text, err=True))

    def show(say: Say) -> None:
        rows = [(each.name, each.version, each.source or f"left out: {each.left_out}") for each in mirror.packages]
        say.table(*_COLUMNS, rows=rows)
        say.line(f"{len(mirror.requirements)} of {len(rows)} distributions; nothing was requested or bought")
        if mirror.unchecked:
            say.line(f"The indexes were not asked: {mirror.unchecked}")

    rows = [
        {
            "name": each.name,
            "version": each.version,
            "source": each.source,
            "left_out": each.left_out,
            "requirement": each.requirement,
            "wheel": None if each.wheel is None else str(each.wheel),
        }
        for each in mirror.packages
    ]
    return Answer(document={"distributions": rows, "unchecked": mirror.unchecked}, show=show)
