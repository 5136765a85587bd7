"""Providers by name, so that another process can recreate the one that launched a machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from importlib.metadata import Distribution, EntryPoint
from typing import Any, Final, cast

from skyward.errors import ConfigurationError
from skyward.providers.base import Provider, checked_provider

GROUP: Final = "skyward.providers"
"""Group of the entry points: ``name = "module:Class"``."""

_logger = logging.getLogger("skyward")


def registered() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points by name: more than one if several packages claim the name.

    A package whose metadata cannot be read is left out, with a warning in the log.
    """
    found: defaultdict[str, dict[str, EntryPoint]] = defaultdict(dict)
    for distribution in importlib.metadata.distributions():
        for entry in _entries(distribution):
            found[entry.name].setdefault(entry.value, entry)  # of two versions of a package, the first on the path
    return {name: tuple(entries.values()) for name, entries in sorted(found.items())}


def load_registered(name: str, entries: Sequence[EntryPoint]) -> Any:
    """Return the class that entry points register under a name.

    Raises:
        ConfigurationError: several packages claim the name, or the class cannot be imported.
    """
    if len(entries) > 1:
        claims = " and ".join(_described(entry) for entry in entries)
        raise ConfigurationError(f"provider {name!r} is registered by {claims}: uninstall all but one of them")
    (entry,) = entries
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"provider {name!r} cannot be loaded from {_described(entry)}: {type(error).__name__}: {error}; install a "
            "working version of that package, or uninstall it"
        ) from error


def _entries(distribution: Distribution) -> Sequence[EntryPoint]:
    try:
        return [entry for entry in distribution.entry_points if entry.group == GROUP]
    except Exception as error:
        metadata = distribution.read_text("METADATA") or ""
        name = next((line for line in metadata.splitlines() if line.startswith("Name:")), "an installed package")
        _logger.warning("cannot read the entry points of %s: %s", name.removeprefix("Name:").strip(), error)
        return ()


def _described(entry: EntryPoint) -> str:
    package = entry.dist
    return f"{entry.value!r}" + (f" of {package.name} {package.version}" if package is not None else "")


BUILT_IN: Mapping[str, str] = {
    "aws": "skyward.providers.aws.provider:AWS",
    "digitalocean": "skyward.providers.digitalocean:DigitalOcean",
    "local": "skyward.providers.local:Local",
    "runpod": "skyward.providers.runpod:RunPod",
    "ssh": "skyward.providers.ssh:SSH",
    "vastai": "skyward.providers.vastai:VastAI",
    "verda": "skyward.providers.verda:Verda",
}
"""Class of each of Skyward's own providers, by its name in the ledger. A provider is a dataclass of its settings."""


def provider_settings(provider: Provider) -> dict[str, Any]:
    """Return the settings from which :func:`make_provider` recreates ``provider``, as JSON values, without secrets."""
    secrets = secret_parameters(type(provider))
    values = {name: getattr(provider, name) for name in provider_parameters(type(provider)) if name not in secrets}
    return cast("dict[str, Any]", json.loads(json.dumps(values, default=str)))


def provider_names() -> Sequence[str]:
    """Return the names of all providers: Skyward's own, then those that installed packages register."""
    return (*BUILT_IN, *(name for name in registered() if name not in BUILT_IN))


def taken_names() -> Mapping[str, str]:
    """Return the packages, by name, that register one of Skyward's own names for another class, which is ignored."""
    return {
        name: entry.value if entry.dist is None else entry.dist.name
        for name, entries in registered().items()
        for entry in entries
        if name in BUILT_IN and entry.value != BUILT_IN[name]
    }


def provider_type(name: str) -> type[Provider]:
    """Return the class of the provider of that name.

    Raises:
        ConfigurationError: there is none, or the package that registers it is broken.
    """
    if name in BUILT_IN:
        module, _, kind = BUILT_IN[name].partition(":")
        return cast("type[Provider]", getattr(importlib.import_module(module), kind))
    entries = registered()
    if name not in entries:
        known = ", ".join(provider_names())
        raise ConfigurationError(
            f"this version of Skyward has no provider {name!r}; it has {known}. If a package of its own provides "
            f"{name!r}, install that package"
        )
    return cast("type[Provider]", load_registered(name, entries[name]))


def provider_parameters(kind: type[Provider]) -> Mapping[str, Field[Any]]:
    """Return the parameters of a provider's class, which are a dataclass's fields; others have none."""
    return {each.name: each for each in fields(kind) if each.init} if is_dataclass(kind) else {}


def secret_parameters(kind: type[Provider]) -> Collection[str]:
    """Return the parameters with secret values: those that are not in the dataclass's ``repr``."""
    return [name for name, each in provider_parameters(kind).items() if not each.repr]


def make_provider(name: str, settings: Mapping[str, Any]) -> Provider:
    """Return the provider of that name with those settings.

    Raises:
        ConfigurationError: there is none of that name, its package is broken, or it refuses the settings.
    """
    kind = provider_type(name)
    parameters = provider_parameters(kind)
    for unknown in settings.keys() - parameters.keys():
        known = ", ".join(parameters) or "none"
        raise ConfigurationError(f"provider {name!r} has no parameter {unknown!r}; it has {known}")
    try:
        made = checked_provider(kind(**settings))
    except TypeError as error:
        raise ConfigurationError(f"provider {name!r} refuses its settings: {error}") from error
    if made.name != name:
        raise ConfigurationError(
            f"the class {kind.__qualname__} is registered as provider {name!r}, but its name is {made.name!r}: its "
            "package has to register it under its own name"
        )
    return made
