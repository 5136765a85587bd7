"""The ``skyward`` command: machines that run, machines that a crash left, and problems of the installation."""

from __future__ import annotations

import click

from skyward.client.cli._clean import clean
from skyward.client.cli._doctor import doctor
from skyward.client.cli._logs import logs
from skyward.client.cli._mirror_table import env
from skyward.client.cli._offers import offers
from skyward.client.cli._pool_commands import down, ls, sweep
from skyward.client.cli._top import top
from skyward.provision.preparing.distribution import DISTRIBUTION

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION, prog_name="skyward")
def main() -> None:
    """List, inspect and end the machines of Skyward's pools.

    Exit codes: 0, success; 1, something failed or is left over; 2, wrong usage.
    """


for command in (clean, doctor, down, env, logs, ls, offers, sweep, top):
    main.add_command(command)
