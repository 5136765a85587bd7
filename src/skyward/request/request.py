"""``PoolRequest``: the checked parameters of a pool; ``Spot``: the share of machines that may be taken back."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from skyward.errors import ConfigurationError
from skyward.request.accelerators import Accelerator, Accelerators, parse_accelerators
from skyward.request.checks import duration, flag, gibibytes, positive_number, refusal, text, texts, whole_number
from skyward.request.front_ends import COUNTERPARTS
from skyward.request.image import EnvVars, ImageSettings, client_python
from skyward.request.includes import included_files
from skyward.request.instance import InstanceSpec, InstanceWish
from skyward.request.volume import S3Volume, Volume

_LIMITS = 2

Preference: TypeAlias = Literal["price", "order"]
"""Values that ``prefer=`` takes."""


@dataclass(frozen=True, slots=True)
class SpotNever:
    """On demand only. ``Spot.Never`` is its value; calling that gives the same."""

    def __call__(self) -> SpotNever:
        """Return itself, so that ``Spot.Never()`` works too."""
        return self

    def __repr__(self) -> str:
        return "Spot.Never"


class Spot:
    """The strategies of ``ComputePool(spot=...)``.

    The short forms are ``"always"``, ``"if-available"``, ``"never"`` and a share such as ``0.8``.
    """

    @dataclass(frozen=True, slots=True)
    class Always:
        """Spot wherever the provider has a spot market; fails if that market refuses.

        Attributes:
            retries: number of retries of a refused request.
            interval: seconds between two attempts.
        """

        retries: int = 10
        interval: float = 1.0

        def __post_init__(self) -> None:
            whole_number("retries", self.retries, minimum=0)
            _number_within("interval", self.interval, "a number of seconds ≥ 0", upper=float("inf"))

    @dataclass(frozen=True, slots=True)
    class IfAvailable:
        """Spot where available, else on demand."""

    @dataclass(frozen=True, slots=True)
    class Percent:
        """At least this share of the nodes on spot, the others on demand.

        Attributes:
            share: from 0 to 1.
        """

        share: float

        def __post_init__(self) -> None:
            _number_within("share", self.share, "a number from 0 to 1", upper=1.0)

    Never: Final = SpotNever()


SpotStrategy: TypeAlias = Spot.Always | Spot.IfAvailable | Spot.Percent | SpotNever
"""A parsed strategy."""

SpotLike: TypeAlias = SpotStrategy | str | float
"""Values that ``spot=`` takes: a strategy, its short form, or a share from 0 to 1."""


def parse_spot(value: SpotLike) -> SpotStrategy:
    """Return the strategy that ``value`` names. Raises ConfigurationError, which lists them all."""
    match value:
        case Spot.Always() | Spot.IfAvailable() | Spot.Percent() | SpotNever():
            return value
        case "always":
            return Spot.Always()
        case "if-available":
            return Spot.IfAvailable()
        case "never":
            return Spot.Never
        case int() | float() if not isinstance(value, bool) and 0 <= value <= 1:
            return Spot.Percent(float(value))
        case _:
            raise refusal("spot", '"always", "if-available", "never", a share from 0 to 1 or one of Spot.*', value)


def _number_within(parameter: str, value: object, allowed: str, *, upper: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= upper:
        raise refusal(parameter, allowed, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRange:
    """Limits of the size of an elastic pool.

    Attributes:
        minimum: number of nodes that it opens with, and has at least; 0 if it may have none.
        maximum: number of nodes that it has at most.
        idle_s: seconds after which a node without work leaves.
    """

    minimum: int
    maximum: int
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Everything that ``ComputePool`` takes about machines, as checked values (``parse_request`` makes it).

    Attributes:
        nodes: number of machines; of an elastic pool, the maximum.
        elastic: limits of an elastic pool's size; None for a pool of a fixed size.
        machine: the provider's name of the machine type; overrides the requirements below.
        accelerators: kind and number on each node; any of several, all with as many MIG partitions. Empty is none.
        cpu: least number of cores for each worker.
        memory_gib: least main memory for each worker.
        volumes: volumes to mount on every node.
        spot: the share of machines that the provider may take back.
        timeout_s: hard cap on a node's life: from the launch of a rented machine, else from the node's start.
        env: environment of every worker: the image's, overridden by the pool's. Secret.
        concurrency: worker processes on each node, or on each MIG partition.
        image: the environment to install, ``pip`` shorthand included; its ``env`` is the one above.
        collect_metrics: True if nodes report metrics.
        lease_s: seconds for which a node outlives its dead client.
        away_s: seconds for which a node outlives a silent client.
        name: name of the fleet if it is kept; empty for one that ends with its pool.
        keep_s: seconds for which a kept fleet waits for the next client, instead of the two above; else 0.
        results: folder in a writable volume where nodes keep copies of jobs' outcomes; empty for none.
        max_cost: USD that the pool may cost in total; None is no limit.
        max_price_per_hour: USD that each machine may cost an hour; None is no limit.
        prefer: which of several providers comes first: the one with the lower price, or the one that is listed earlier.
        spread: True if the nodes may be of several providers and regions.
        wait_for_capacity_s: seconds for which to keep asking for machines that are sold out.
        one_network: True if the nodes must reach each other.
        service: module of a service to load on the nodes from the start; empty for none. See ``skyward.node.services``.
        service_name: name of that service.
        packages: distributions whose versions the nodes report.
    """

    image: ImageSettings
    spot: SpotStrategy
    nodes: int = 1
    elastic: NodeRange | None = None
    machine: str | None = None
    accelerators: tuple[Accelerator, ...] = ()
    cpu: int | None = None
    memory_gib: float | None = None
    volumes: tuple[Volume, ...] = ()
    timeout_s: float = 3600.0
    env: EnvVars
    concurrency: int = 1
    collect_metrics: bool = True
    lease_s: float = 120.0
    away_s: float = 1800.0
    name: str = ""
    keep_s: float = 0.0
    results: str = ""
    max_cost: float | None = None
    max_price_per_hour: float | None = None
    prefer: Preference = "price"
    spread: bool = False
    wait_for_capacity_s: float = 0.0
    one_network: bool = False
    service: str = ""
    service_name: str = ""
    packages: tuple[str, ...] = COUNTERPARTS

    def size_of_kept(self, nodes: int) -> int:
        """Number of nodes that a kept fleet of so many ``nodes`` is to have; an elastic one goes on with its own."""
        return self.nodes if self.elastic is None else min(max(nodes, self.elastic.minimum), self.nodes)

    @property
    def first_nodes(self) -> int:
        """Number of machines that the pool opens with."""
        return self.elastic.minimum if self.elastic else self.nodes

    def checked_size(self, nodes: object) -> int:
        """Return ``nodes`` if the open pool may have that many. Raises ConfigurationError."""
        if self.elastic is None:
            return checked_nodes(nodes)
        least, most = self.elastic.minimum, self.elastic.maximum
        size = whole_number("nodes", nodes, minimum=least)
        if size > most:
            raise refusal("nodes", f"at most {most}, as the pool has nodes={(least, most)}", nodes)
        return size

    @property
    def accelerator(self) -> Accelerator | None:
        """The only accelerator, as providers see it; the first of several."""
        return self.accelerators[0] if self.accelerators else None

    def accelerator_of(self, spec: InstanceSpec) -> Accelerator | None:
        """Return the accelerator for which a machine of that ``spec`` was bought: the first of several that it has."""
        matching = (one for one in self.accelerators if not InstanceWish(accelerator=one).shortfall(spec))
        return next(matching, self.accelerator)

    @property
    def alternatives(self) -> tuple[PoolRequest, ...]:
        """The requests to make of a provider: one for each accelerator, since each has a single one."""
        if self.machine is not None or not self.accelerators[1:]:
            return (self,)
        return tuple(replace(self, accelerators=(one,)) for one in self.accelerators)

    @property
    def results_location(self) -> str:
        """Place of :attr:`results` in its bucket, ``s3://bucket/folder/``; empty for none."""
        path = PurePosixPath(self.results)
        for volume in self.volumes:
            if path.is_relative_to(volume.mount_path):
                return volume.location + "".join(f"{part}/" for part in path.relative_to(volume.mount_path).parts)
        return ""

    @property
    def workers_per_node(self) -> int:
        """Worker processes on each node: ``concurrency`` times the MIG partitions of the node."""
        return self.concurrency * (self.accelerator.partitions if self.accelerator else 1)

    @property
    def wish(self) -> InstanceWish:
        """Minimum requirements of each machine, for all of its workers together."""
        workers = self.workers_per_node
        return InstanceWish(
            accelerator=self.accelerator,
            cpu=None if self.cpu is None else self.cpu * workers,
            memory_gib=None if self.memory_gib is None else self.memory_gib * workers,
        )


def parse_request(
    *,
    nodes: int | tuple[int, int] = 1,
    idle: str | float | None = None,
    machine: str | None = None,
    accelerator: Accelerators | None = None,
    cpu: int | None = None,
    memory: str | None = None,
    volume: Sequence[Volume] | None = None,
    spot: SpotLike = "always",
    timeout: str | float = 3600,
    env: Mapping[str, str] | None = None,
    concurrency: int = 1,
    image: ImageSettings | None = None,
    pip: Sequence[str] | None = None,
    collect_metrics: bool = True,
    lease: str | float = 120,
    away: str | float = 1800,
    max_cost: float | None = None,
    max_price_per_hour: float | None = None,
    prefer: Preference = "price",
    spread: bool = False,
    wait_for_capacity: str | float | None = None,
    name: str | None = None,
    keep: str | float | None = None,
    results: str | None = None,
) -> PoolRequest:
    """Check every argument of ``ComputePool`` that concerns machines.

    Raises:
        ConfigurationError: a value or a type is wrong; the message names the parameter, the given value and the
            allowed ones. Nothing was started.
    """
    volumes = _volumes(volume)
    elastic = _node_range(nodes, idle)
    complete = _image(image).merged(pip=[*_pip(pip), *_needs(volumes)], env=EnvVars(env)).anchored()
    return PoolRequest(
        nodes=checked_nodes(nodes) if elastic is None else elastic.maximum,
        elastic=elastic,
        machine=None if machine is None else text("machine", machine),
        accelerators=() if accelerator is None else parse_accelerators(accelerator),
        cpu=None if cpu is None else whole_number("cpu", cpu),
        memory_gib=None if memory is None else gibibytes("memory", memory),
        volumes=volumes,
        spot=parse_spot(spot),
        timeout_s=duration("timeout", timeout),
        env=complete.env,
        concurrency=whole_number("concurrency", concurrency),
        image=complete,
        collect_metrics=flag("collect_metrics", collect_metrics),
        lease_s=duration("lease", lease),
        away_s=duration("away", away),
        **_limits(max_cost=max_cost, max_price_per_hour=max_price_per_hour),
        **_over_providers(prefer, spread, wait_for_capacity),
        **_kept(name, keep, _results(results, volumes, keep)),
    )


_FLEET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def fleet_name(value: object) -> str:
    """Return the name of a kept fleet if it can be that of a folder anywhere; else raise ConfigurationError."""
    if not isinstance(value, str) or not _FLEET_NAME.fullmatch(value) or value.endswith("."):
        allowed = "1 to 64 letters, digits, '-', '_' or '.', the first a letter or digit, such as \"llm\""
        raise refusal("name", allowed, value)
    return value


def _kept(name: object, keep: object, results: str) -> dict[str, Any]:
    if keep is None and name is None:
        return {}
    if name is None:
        raise ConfigurationError(f'keep={keep!r} needs a name, by which the fleet is found again: name="llm"')
    if keep is None:
        raise ConfigurationError(f'name={name!r} is the name of a fleet that is kept: add keep="20m", or leave it out')
    return {"name": fleet_name(name), "keep_s": duration("keep", keep), "results": results}


def _results(value: object, volumes: Sequence[Volume], keep: object) -> str:
    if value is None:
        return ""
    path = PurePosixPath(text("results", value))
    if keep is None:
        raise ConfigurationError(f'results={value!r} is for the jobs of a kept pool: add name="llm" and keep="20m"')
    if ".." in path.parts or not any(path.is_relative_to(each.mount_path) for each in volumes if not each.read_only):
        given = ", ".join(f"{each.mount_path} (read-only)" if each.read_only else each.mount_path for each in volumes)
        allowed = f"a folder in a volume of this pool with read_only=False; its volumes: {given or 'none'}"
        raise refusal("results", allowed, value)
    return str(path)


def _node_range(nodes: object, idle: object) -> NodeRange | None:
    if isinstance(nodes, list | range):
        raise refusal("nodes", "a whole number ≥ 1, or a minimum and a maximum such as (0, 8)", cast("object", nodes))
    if not isinstance(nodes, tuple):
        if idle is not None:
            raise ConfigurationError(
                f"idle={idle!r} needs a range such as nodes=(0, 8): nodes={nodes!r} is a pool of a fixed size"
            )
        return None
    limits = cast("tuple[object, ...]", nodes)
    if len(limits) != _LIMITS:
        raise refusal("nodes", "a number, or a minimum and a maximum such as (0, 8)", limits)
    minimum = whole_number("the minimum of nodes", limits[0], minimum=0)
    maximum = whole_number("the maximum of nodes", limits[1])
    if minimum > maximum:
        raise ConfigurationError(f"nodes must be (minimum, maximum), such as {(maximum, minimum)}, got {limits!r}")
    return NodeRange(minimum=minimum, maximum=maximum, idle_s=duration("idle", "5m" if idle is None else idle))


def _pip(value: object) -> Sequence[str]:
    return () if value is None else texts("pip", value)


def _over_providers(prefer: object, spread: object, wait_for_capacity: object) -> dict[str, Any]:
    if prefer not in get_args(Preference):
        raise refusal("prefer", '"price" or "order"', prefer)
    wait_s = 0.0 if wait_for_capacity is None else duration("wait_for_capacity", wait_for_capacity)
    return {"prefer": prefer, "spread": flag("spread", spread), "wait_for_capacity_s": wait_s}


def _limits(**parameters: object) -> dict[str, Any]:
    return {name: None if usd is None else positive_number(name, usd) for name, usd in parameters.items()}


def _image(value: object) -> ImageSettings:
    image = ImageSettings() if value is None else value
    if not isinstance(image, ImageSettings):
        raise refusal("image", "an Image", image)
    here = client_python()
    if image.python is not None and image.python.split(".")[:2] != here.split("."):
        raise ConfigurationError(
            f"image.python must be {here}, the Python that runs this program, got {image.python!r}: "
            "functions are sent as bytecode. Leave it out, or run this program with that Python"
        )
    included_files(image.includes)
    for i, place in enumerate(image.find_links):
        if "://" not in place and not os.path.isabs(place) and not os.path.exists(place):
            raise ConfigurationError(f"image.find_links[{i}] does not exist: there is no {os.path.abspath(place)}")
    return image


def _volumes(value: object) -> tuple[Volume, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise refusal("volume", "a list of S3Volume", value)
    volumes = cast("Sequence[object]", value)
    for i, volume in enumerate(volumes):
        if not isinstance(volume, S3Volume):
            raise refusal(f"volume[{i}]", "an S3Volume", volume)
    checked = tuple(cast("Sequence[Volume]", volumes))
    paths = [PurePosixPath(volume.mount_path) for volume in checked]
    if len(set(paths)) < len(paths) or any(path in other.parents for path in paths for other in paths):
        allowed = "a list of S3Volume with different mount paths, none within another"
        raise refusal("volume", allowed, [volume.mount_path for volume in checked])
    return checked


def _needs(volumes: Sequence[Volume]) -> list[str]:
    """Return the requirements of the volumes on nodes, in the versions installed here."""
    wanted = dict.fromkeys(package for volume in volumes for package in volume.requirements)
    try:
        return [f"{package}=={version(package)}" for package in wanted]
    except PackageNotFoundError as error:
        raise ConfigurationError(f"volume: {error.name} is missing here: pip install {' '.join(wanted)}") from error


def checked_nodes(nodes: object) -> int:
    """Return ``nodes`` if a pool can have that many.

    Raises :class:`~skyward.errors.ConfigurationError`.
    """
    return whole_number("nodes", nodes)


def checked_ranks(parameter: str, ranks: Iterable[object]) -> frozenset[int]:
    """Return ``ranks`` if each is a node's rank. Raises :class:`~skyward.errors.ConfigurationError`."""
    return frozenset(whole_number(f"a rank in {parameter}", rank, minimum=0) for rank in ranks)
