"""Providers by name, so that another process can recreate the one that launched a machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from importlib.metadata import Distribution, EntryPoint
from typing import Any, Final, Literal, Protocol, cast, runtime_checkable

from skyward.errors import ConfigurationError
from skyward.providers.base import Instance, Provider, checked_provider

__all__ = [
    "BUILT_IN",
    "GROUP",
    "Admits",
    "Checkable",
    "Entrusts",
    "Finding",
    "MachineSecret",
    "Paced",
    "Sweepable",
    "Tidies",
    "Troubled",
    "Zoned",
    "is_rented",
    "is_this_machine",
    "listing_s",
    "load_registered",
    "make_provider",
    "provider_names",
    "provider_parameters",
    "provider_settings",
    "provider_type",
    "registered",
    "taken_names",
    "unlisted_s",
]

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
        """Return the zones of each of the machine types ``machines``, with the USD an hour on spot. Idempotent.

        A type without zones is not offered; a price of None is unknown.
        """
        ...


@runtime_checkable
class Sweepable(Protocol):
    """Provider that can list Skyward's machines without their ids, which a crash may have lost."""

    async def tagged(self) -> Sequence[Instance]:
        """Return every listed machine of Skyward's with these settings that is not gone, of any pool. Idempotent.

        It waits for no machine that is not listed yet. A class whose machines are listed only some time after their
        launch has the attribute ``listing_s``, that time in seconds, and ``unlisted_s``, the longest that it may be. A
        sweep lists once more after them, before it treats a machine as never made.

        Raises:
            UnreachableError: a host or service that may have such machines did not answer.
        """
        ...


@runtime_checkable
class Admits(Protocol):
    """Provider whose machines admit only the client's own address."""

    async def admit(self, pool_id: str) -> str:
        """Admit this machine's present address to the machines of ``pool_id``, and remove its former ones. Idempotent.

        Returns the address if it was not admitted before, else an empty text. Raises
        :class:`~skyward.errors.SkywardError` when the address or the rules cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSecret:
    """Secret by which a machine can end its own bill. It travels over SSH, and is in no first-boot order and no argv.

    Attributes:
        command: command on the machine that takes the secret from its standard input, in the user's home folder.
        value: the secret.
        renewed_s: time after which a newer one is delivered; infinite for never.
    """

    command: tuple[str, ...]
    value: str = field(repr=False)
    renewed_s: float = math.inf


@runtime_checkable
class Entrusts(Protocol):
    """Provider whose machines need a secret to end their own bill."""

    async def secret(self, instance: Instance) -> MachineSecret | None:
        """Return the secret for a machine that admits logins, a newer one each time it is due; None for none."""
        ...


@runtime_checkable
class Paced(Protocol):
    """Provider that limits how often its machines may be listed."""

    @property
    def look_interval_s(self) -> float:
        """Least number of seconds between two calls of ``describe``."""
        ...


@runtime_checkable
class Troubled(Protocol):
    """Provider that repeats calls on which its API fails, and reports them."""

    @property
    def trouble(self) -> str:
        """Errors of the calls that are being repeated at present; empty for none."""
        ...


@runtime_checkable
class Tidies(Protocol):
    """Provider that creates more for a pool than machines, such as a security group."""

    async def tidy(self, pool_id: str) -> None:
        """Remove everything created for ``pool_id``, unless it has machines. Failures are logged. Idempotent."""
        ...


def provider_settings(provider: Provider) -> dict[str, Any]:
    """Return the settings from which :func:`make_provider` recreates ``provider``, as JSON values.

    A field that is not in the dataclass's ``repr`` is secret and left out.
    """
    parameters = provider_parameters(type(provider)).values()
    values = {each.name: getattr(provider, each.name) for each in parameters if each.repr}
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
    """Return the parameters of a provider's class, which are a dataclass's fields; others have none.

    A field that is not in the dataclass's ``repr`` is secret.
    """
    return {each.name: each for each in fields(kind) if each.init} if is_dataclass(kind) else {}


def is_rented(provider: Provider | type[Provider]) -> bool:
    """Return False if the provider's machines are the user's own, which its class states: ``own_machines = True``."""
    return not getattr(provider, "own_machines", False)


def is_this_machine(provider: Provider | type[Provider]) -> bool:
    """Return True if all nodes run on this machine, which the provider's class states: ``this_machine = True``."""
    return getattr(provider, "this_machine", False)


def listing_s(provider: Provider | Sweepable) -> float:
    """Return the seconds for which a new machine may be missing from ``tagged``: the class's ``listing_s``, else 0."""
    return getattr(provider, "listing_s", 0.0)


def unlisted_s(provider: Provider | Sweepable) -> float:
    """Return the longest time in seconds for which a new machine may be missing from ``tagged``.

    It is the class's ``unlisted_s``, else its :func:`listing_s`.
    """
    return getattr(provider, "unlisted_s", listing_s(provider))


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
