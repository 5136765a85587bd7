"""``skyward plan``: what a script's first pool would get and cost, without opening it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from skyward.cli._base import FAILED, Answer, answers


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@answers
def plan(*, script: Path, arguments: Sequence[str]) -> Answer:
    """Show what opening a script's first pool would do: offers, costs, packages, files, and what is wrong.

    The script runs up to there, with its arguments, and ends: nothing is requested or bought. The exit code is 1 if the
    pool would not open. All that follows SCRIPT belongs to the script.
    """
    from skyward.api.planned_script import plan_script  # would lengthen the start of every command by a third

    planned = plan_script(script, arguments)
    plan = planned.plan
    line = f", in line {planned.line}" if planned.line else ""
    return Answer(
        document=plan.document() | {"line": planned.line},
        text=[
            f"The first pool that {script} opens{line} (not those that it opens at the same time, or later):",
            repr(plan),
        ],
        exit_code=FAILED if plan.problems else 0,
    )
