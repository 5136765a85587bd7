"""Providers by name: how another process makes again the one that has a machine."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

from skyward.errors import ConfigurationError
from skyward.providers.base import Instance, Provider

__all__ = [
    "OWN",
    "PROVIDERS",
    "Admits",
    "Checkable",
    "Finding",
    "Sweepable",
    "Tidies",
    "Zoned",
    "make_provider",
    "provider_settings",
]

PROVIDERS: Mapping[str, str] = {
    "aws": "skyward.providers.aws.provider:AWS",
    "local": "skyward.providers.local:Local",
    "ssh": "skyward.providers.ssh:SSH",
}
"""The class of each provider, by its name in the ledger; a class is a dataclass of its settings."""

OWN = ("local", "ssh")
"""Those whose machines one has; the others rent machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: its name.
        state: ``"ok"``; ``"warn"``, if something will not work that may not be needed; ``"fail"``.
        found: what it is.
        fix: what to do; empty if it is ok.
    """

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


@runtime_checkable
class Checkable(Protocol):
    """A provider that can say whether it would work."""

    async def check(self) -> Sequence[Finding]:
        """Look at credentials, permissions, quotas and the like. Creates nothing; raises nothing of Skyward's."""
        ...


@runtime_checkable
class Zoned(Protocol):
    """A provider whose regions have zones."""

    async def zones(self, machines: Sequence[str]) -> Mapping[str, Mapping[str, float | None]]:
        """Where each machine type is offered: USD an hour on spot by zone; None is unknown. Idempotent."""
        ...


@runtime_checkable
class Sweepable(Protocol):
    """A provider that can say what of ours it has without being told ids, some of which may never have been known."""

    async def tagged(self) -> Sequence[Instance]:
        """Every machine that Skyward launched with these settings and that is not gone, whoever's it is. Idempotent.

        It must be complete: where a machine is listed only some time after it was asked for, this waits that long.

        Raises:
            UnreachableError: somebody who may have one did not answer.
        """
        ...


@runtime_checkable
class Admits(Protocol):
    """A provider whose machines admit the client's own address only."""

    async def admit(self, pool_id: str) -> str:
        """Admit this machine's present address to the pool's machines, and none of its former ones. Idempotent.

        Returns the address if it was not admitted before, else an empty text. Raises
        :class:`~skyward.errors.SkywardError` when the address or the rules cannot be had.
        """
        ...


@runtime_checkable
class Tidies(Protocol):
    """A provider that makes more for a pool than machines, such as a security group."""

    async def tidy(self, pool_id: str) -> None:
        """Remove what was made for the pool, unless it has machines. What cannot be removed is logged. Idempotent."""
        ...


def provider_settings(provider: Provider) -> dict[str, Any]:
    """What :func:`make_provider` needs to make ``provider`` again, as JSON values.

    A field that is not in the dataclass's ``repr`` is secret and left out.
    """
    if not is_dataclass(provider):
        return {}
    values = {each.name: getattr(provider, each.name) for each in fields(provider) if each.init and each.repr}
    return cast("dict[str, Any]", json.loads(json.dumps(values, default=str)))


def make_provider(name: str, settings: Mapping[str, Any]) -> Provider:
    """The provider of that name with those settings.

    Raises:
        ConfigurationError: there is none of that name, or it refuses the settings.
    """
    if name not in PROVIDERS:
        known = ", ".join(PROVIDERS)
        raise ConfigurationError(f"this version of Skyward knows no provider {name!r}; it knows {known}")
    module, _, kind = PROVIDERS[name].partition(":")
    try:
        return cast("Provider", getattr(importlib.import_module(module), kind)(**settings))
    except TypeError as error:
        raise ConfigurationError(f"provider {name!r} cannot be made of {dict(settings)}: {error}") from error
