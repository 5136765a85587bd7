"""The ``skyward`` command: machines that run, machines that a crash left, and problems of the installation."""

from __future__ import annotations

import click

from skyward.cli._config import config
from skyward.cli._jobs import cancel, list_jobs, result, run
from skyward.cli._logs import logs
from skyward.cli._machines import down, keep_longer, ls, sweep, top
from skyward.cli._offers import offers
from skyward.cli._plan import plan
from skyward.cli._setup import clean, doctor, env
from skyward.ledger.keeper import start_keepers
from skyward.request.distribution_names import DISTRIBUTION

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION, prog_name="skyward")
def main() -> None:
    """List, inspect and end the machines of Skyward's pools.

    Exit codes: 0, success; 1, something failed or is left over; 2, wrong usage.
    """
    start_keepers()


for command in (
    *(down, keep_longer, ls, sweep, top),  # machines
    *(cancel, list_jobs, logs, result, run),  # jobs and output
    *(config, offers, plan),  # before a purchase
    *(clean, doctor, env),  # this computer
):
    main.add_command(command)
