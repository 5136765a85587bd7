"""Providers by name: how another process makes again the one that has a machine."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, cast, runtime_checkable

from skyward.errors import ConfigurationError
from skyward.providers.base import Instance, Provider

__all__ = ["PROVIDERS", "Sweepable", "make_provider", "provider_settings"]

PROVIDERS: Mapping[str, str] = {
    "aws": "skyward.providers.aws.provider:AWS",
    "local": "skyward.providers.local:Local",
    "ssh": "skyward.providers.ssh:SSH",
}
"""The class of each provider, by its name in the ledger; a class is a dataclass of its settings."""


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
