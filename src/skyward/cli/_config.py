"""``skyward config``: the named settings of pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from skyward.cli._base import FAILED, Answer, answers
from skyward.errors import ConfigurationError

if TYPE_CHECKING:
    from skyward.api.named_pools import SettingsFile


@click.group()
def config() -> None:
    """Look after named settings: the pools of skyward.toml and pyproject.toml."""


@config.command()
@answers
def check() -> Answer:
    """Check the named settings of this project and this user. Opens no pool and asks no provider."""
    pools = list(_checked())
    failed = any(pool["state"] == "fail" for pool in pools)
    text = [f"{pool['state']:<5}{pool['at']}: {pool['pool']}: {pool['found']}" for pool in pools]
    return Answer(
        document={"pools": pools}, text=text or ["There are no named settings here"], exit_code=FAILED if failed else 0
    )


def _checked() -> Iterator[dict[str, Any]]:
    from skyward.api.named_pools import settings_files  # pools would slow the start of every command

    places: dict[str, str] = {}
    for file in settings_files():
        for name in file.pools:
            at = file.at("pools", name)
            state, found = _verdict(file, name)
            if name in places:
                state, found = "warn", f"not used: {places[name]} has a pool of that name, which counts"
            places.setdefault(name, at)
            yield {"pool": name, "at": at, "state": state, "found": found}


def _verdict(file: SettingsFile, name: str) -> tuple[str, str]:
    from skyward.api.named_pools import make_of
    from skyward.api.pool import ComputePool
    from skyward.providers.local import Local

    has_provider = "provider" in file.pools[name]
    try:
        pool = make_of(ComputePool, file, name, {} if has_provider else {"provider": Local()})
    except ConfigurationError as error:
        return "fail", str(error)
    return "ok", repr(pool) if has_provider else "sound; a program has to pass its provider"
