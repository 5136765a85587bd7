"""Vendors with a fake, for tests that hold for every one of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.providers._common.logins import CLIENT_CIDR_VARIABLE
from skyward.providers.base import InstanceState, Provider
from skyward.providers.registry import provider_type
from skyward.testing.aws import Looks
from skyward.testing.hosts import require_sshd
from support.clouds.digital_ocean_api import DigitalOceanApi
from support.clouds.environments import build_environment
from support.clouds.fake_cloud import FakeCloud
from support.clouds.rest_service import load_json
from support.clouds.runpod_api import RunPodApi
from support.clouds.vast_api import STATUSES, VastApi
from support.clouds.verda_api import VerdaApi
from support.ssh_islands import require_namespaces

__all__ = [
    "BOOTED",
    "EACH_KIND",
    "PATH",
    "PROMPT",
    "VENDORS",
    "Vendor",
    "opened",
    "opened_with_hosts",
    "use_own_state",
    "vendor_named",
]

PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
"""Of machines: there is no uv."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """One vendor, and what a test must know of it.

    Attributes:
        name: the provider's name.
        fake: opens an account without anything; takes the folder of its machines and settings of their room.
        machine: a machine type without accelerators.
        usd_per_hour: its price on demand.
        settings: arguments of the provider.
        ends_itself: arguments with which its machines end their own bill, for that account; None for none.
        islands: True if its machines do not reach each other.
        regions: name of the provider's parameter for a place, or for several.
        containers: True if its machines are containers, which end their own bill and have no package index.
    """

    name: str
    fake: Callable[..., FakeCloud]
    machine: str
    usd_per_hour: float
    creating: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ends_itself: Callable[[FakeCloud], Mapping[str, Any]] | None = None
    islands: bool = False
    regions: str = "region"
    containers: bool = False
    described: Callable[[], Sequence[str]] = tuple
    states: Mapping[str, InstanceState] = field(default_factory=dict[str, InstanceState])

    @property
    def kind(self) -> type[Any]:
        """The provider's class."""
        return provider_type(self.name)

    def provider(self, cloud: FakeCloud, **settings: Any) -> Provider:
        """Return a provider of that account."""
        provider: Provider = self.kind(endpoint_url=cloud.endpoint_url, **{**self.settings, **settings})
        return provider


def _reaper(cloud: FakeCloud) -> Mapping[str, Any]:
    assert isinstance(cloud, DigitalOceanApi)
    cloud.tokens["dop_v1_reaper_of_droplets"] = frozenset({"droplet:delete"})
    return {"reaper_token": "dop_v1_reaper_of_droplets"}


def state_words(description: str, schema: str) -> Sequence[str]:
    """Return the words of a vendor's description for a state: those of a schema, else of its ``status``."""
    found = load_json(description)["components"]["schemas"][schema]
    return [str(each) for each in found.get("enum") or found["properties"]["status"]["enum"]]


VENDORS = (
    Vendor(
        name="digitalocean",
        fake=DigitalOceanApi,
        machine="s-2vcpu-4gb",
        usd_per_hour=0.03571,
        creating="POST /v2/droplets",
        ends_itself=_reaper,
        described=lambda: state_words("digitalocean-compute-openapi.json", "droplets_models_droplet"),
        states={
            "new": InstanceState.PENDING,
            "active": InstanceState.RUNNING,
            "off": InstanceState.FAILED,
            "archive": InstanceState.FAILED,
        },
    ),
    Vendor(
        name="verda",
        fake=VerdaApi,
        machine="CPU.4V.16G",
        usd_per_hour=0.0279,
        creating="POST /instances",
        ends_itself=lambda cloud: {"self_destruct": True},
        islands=True,
        described=lambda: state_words("verda-unofficial-patched.json", "Instance"),
        states={
            **dict.fromkeys(
                ("new", "ordered", "provisioning", "validating", "pending", "unknown"), InstanceState.PENDING
            ),
            "running": InstanceState.RUNNING,
            "deleting": InstanceState.STOPPING,
            **dict.fromkeys(("discontinued", "notfound"), InstanceState.GONE),
            **dict.fromkeys(("offline", "error", "installation_failed", "no_capacity"), InstanceState.FAILED),
        },
    ),
    Vendor(
        name="runpod",
        fake=RunPodApi,
        regions="data_centers",
        machine="2x cpu3c",
        usd_per_hour=0.06,
        creating="POST /v2/pods",
        ends_itself=lambda cloud: {},
        islands=True,
        containers=True,
        described=lambda: state_words("runpod-rest-v2-openapi.json", "PodStatus"),
        states={
            "PROVISIONING": InstanceState.PENDING,
            "STARTING": InstanceState.PENDING,
            "RUNNING": InstanceState.RUNNING,
            "EXITED": InstanceState.FAILED,
            "ERROR": InstanceState.FAILED,
            "TERMINATED": InstanceState.GONE,
        },
    ),
    Vendor(
        name="vastai",
        fake=VastApi,
        regions="regions",
        machine="CPU",
        usd_per_hour=0.03 + 40 * 0.15 / 720,
        creating="PUT /api/v0/asks/{ask_id}/",
        ends_itself=lambda cloud: {},
        islands=True,
        containers=True,
        described=lambda: STATUSES,
        states={
            **dict.fromkeys(("created", "loading", "rebooting"), InstanceState.PENDING),
            "running": InstanceState.RUNNING,
            **dict.fromkeys(("exited", "frozen", "offline", "stopped", "unknown"), InstanceState.FAILED),
        },
    ),
)


def vendor_named(name: str) -> Vendor:
    """Return the vendor of that name."""
    return next(each for each in VENDORS if each.name == name)


def _sampled(*often: str) -> list[Any]:
    return [pytest.param(each, marks=() if each.name in often else pytest.mark.full, id=each.name) for each in VENDORS]


BOOTED = _sampled("digitalocean")
"""Vendors for a test that `make test` runs with one vendor of virtual machines: containers' own tests do the like."""
EACH_KIND = _sampled("digitalocean", "runpod")
"""Vendors for a test that `make test` runs with one vendor of virtual machines and one of containers.

The others keep their contract (``tests/contract``), their costs and their failing calls in `make test`.
"""


def use_own_state(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Give this process caches and a ledger in a folder, and a public address for which no service is asked."""
    for name, variable in (("cache", "XDG_CACHE_HOME"), ("state", "XDG_STATE_HOME")):
        patch.setenv(variable, str(folder / name))
    patch.setenv(CLIENT_CIDR_VARIABLE, "203.0.113.7")


PROMPT: Mapping[str, Any] = {"listing_s": 1.0, "look_s": 0.05, "unlisted_s": 1.0, "look_interval_s": 0.1}
"""Class variables of providers whose waits are short."""


@contextmanager
def opened(
    vendor: Vendor,
    patch: pytest.MonkeyPatch,
    folder: Path,
    *,
    machines: bool = False,
    image: sky.Image | None = None,
    looks: Looks | None = None,
    provider: Mapping[str, Any] | None = None,
    **room: Any,
) -> Generator[FakeCloud]:
    """Open an account at a vendor, which this process's provider uses, with caches and a ledger of its own.

    Args:
        vendor: the vendor.
        patch: undone by the caller.
        folder: an existing folder.
        machines: True for a real host per machine.
        image: image of the pools there; None is the default one. Containers find it in the room's ``cache``;
            without that no pool can be opened.
        looks: see :class:`FakeCloud`.
        provider: class variables of the provider.
        **room: settings of the machines' room.
    """
    use_own_state(patch, folder)
    place = folder / "machines" if machines else None
    if machines and vendor.containers:
        require_namespaces()
        if "cache" in room:
            build_environment(image or sky.Image(), room["cache"], folder / "builder")
    try:
        with vendor.fake(place, looks=looks, **room) as cloud:
            cloud.use(patch, vendor.kind, **(provider or {}))
            yield cloud
    finally:
        for name in ("machines", "builder"):
            shutil.rmtree(folder / name, ignore_errors=True)


def opened_with_hosts(
    vendor: Vendor,
    patch: pytest.MonkeyPatch,
    folder: Path,
    cache: Path,
    *,
    image: sky.Image | None = None,
    provider: Mapping[str, Any] | None = PROMPT,
) -> AbstractContextManager[FakeCloud]:
    """Open an account whose machines are real hosts, on which pools can be opened; see :func:`opened`."""
    require_sshd()
    env = {"PATH": PATH, "PIP_CONFIG_FILE": str(cache / "pip.conf")}
    return opened(vendor, patch, folder, machines=True, image=image, provider=provider, cache=cache, env=env)
