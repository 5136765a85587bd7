"""Providers by name, so that another process can recreate the one that launched a machine; optional capabilities."""

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
    "Paced",
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
"""Class of each provider, by its name in the ledger. A provider is a dataclass of its settings."""

OWN = ("local", "ssh")
"""Providers of machines that the user already has; the others rent machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check of a provider.

    Attributes:
        what: name of the item.
        state: ``"ok"``; ``"warn"`` if something optional will not work; ``"fail"``.
        found: the item's present value, or the error.
        fix: remedy; empty if it is ok.
    """

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


@runtime_checkable
class Checkable(Protocol):
    """Provider that can check its own configuration."""

    async def check(self) -> Sequence[Finding]:
        """Check credentials, permissions, quotas and the like. Creates nothing; raises none of Skyward's errors."""
        ...


@runtime_checkable
class Zoned(Protocol):
    """Provider whose regions have zones."""

    async def zones(self, machines: Sequence[str]) -> Mapping[str, Mapping[str, float | None]]:
        """Return the zones that offer each machine type, with the USD an hour on spot; None is unknown. Idempotent."""
        ...


@runtime_checkable
class Sweepable(Protocol):
    """Provider that can list Skyward's machines without their ids, which a crash may have lost."""

    async def tagged(self) -> Sequence[Instance]:
        """Return every machine that Skyward launched with these settings and that is not gone, of any pool. Idempotent.

        The list is complete: where a machine is listed only some time after its launch, this waits that long.

        Raises:
            UnreachableError: a host or service that may have such machines did not answer.
        """
        ...


@runtime_checkable
class Admits(Protocol):
    """Provider whose machines admit only the client's own address."""

    async def admit(self, pool_id: str) -> str:
        """Admit this machine's present address to the pool's machines, and remove its former ones. Idempotent.

        Returns the address if it was not admitted before, else an empty text. Raises
        :class:`~skyward.errors.SkywardError` when the address or the rules cannot be read.
        """
        ...


@runtime_checkable
class Paced(Protocol):
    """Provider that limits how often its machines may be listed."""

    @property
    def look_interval_s(self) -> float:
        """Least number of seconds between two calls of ``describe``."""
        ...


@runtime_checkable
class Tidies(Protocol):
    """Provider that creates more for a pool than machines, such as a security group."""

    async def tidy(self, pool_id: str) -> None:
        """Remove everything created for the pool, unless it has machines. Failures are logged. Idempotent."""
        ...


def provider_settings(provider: Provider) -> dict[str, Any]:
    """Return the settings from which :func:`make_provider` recreates ``provider``, as JSON values.

    A field that is not in the dataclass's ``repr`` is secret and left out.
    """
    if not is_dataclass(provider):
        return {}
    values = {each.name: getattr(provider, each.name) for each in fields(provider) if each.init and each.repr}
    return cast("dict[str, Any]", json.loads(json.dumps(values, default=str)))


def make_provider(name: str, settings: Mapping[str, Any]) -> Provider:
    """Return the provider of that name with those settings.

    Raises:
        ConfigurationError: there is none of that name, or it refuses the settings.
    """
    if name not in PROVIDERS:
        known = ", ".join(PROVIDERS)
        raise ConfigurationError(f"this version of Skyward has no provider {name!r}; it has {known}")
    module, _, kind = PROVIDERS[name].partition(":")
    try:
        return cast("Provider", getattr(importlib.import_module(module), kind)(**settings))
    except TypeError as error:
        raise ConfigurationError(f"provider {name!r} refuses the settings {dict(settings)}: {error}") from error
