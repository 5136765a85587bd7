"""The ``skyward`` command: what runs, what is left, and what is wrong."""

from __future__ import annotations

import click

from skyward.client.cli._clean import clean
from skyward.client.cli._doctor import doctor
from skyward.client.cli._logs import logs
from skyward.client.cli._offers import offers
from skyward.client.cli._pool_commands import down, ls, sweep
from skyward.provision.preparing.distribution import DISTRIBUTION

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION, prog_name="skyward")
def main() -> None:
    """Machines of Skyward's pools, seen from outside.

    Exit codes: 0, all is well; 1, something failed or is left; 2, the command was not understood.
    """


for command in (clean, doctor, down, logs, ls, offers, sweep):
    main.add_command(command)
