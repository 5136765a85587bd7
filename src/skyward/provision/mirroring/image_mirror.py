"""ImageMirror: the packages of this environment that a node gets, each with its source, and those that it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from packaging.utils import canonicalize_name, parse_wheel_filename

from skyward.errors import ConfigurationError
from skyward.provision.mirroring.choice import Chosen, choose, is_accelerators_build, public_version, unknown_name
from skyward.provision.mirroring.index_check import check_pins, passable_index, sources_here
from skyward.provision.mirroring.installed import Distribution, InstalledDistributions, Origin, installed_distributions
from skyward.provision.mirroring.program_imports import LoadedNames, distributions_of, needs_of_program
from skyward.provision.mirroring.wheels import local_wheel
from skyward.provision.preparing.distribution import engine_pins

__all__ = ["ImageMirror", "MirroredPackage", "mirror_environment", "mirror_program"]

_TORCH = frozenset({"torch", "torchvision", "torchaudio", "torchtext", "torchdata"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredPackage:
    """Row of the mirror's table.

    Attributes:
        name: canonical name of the distribution.
        version: the installed version.
        source: the place that nodes get it from; empty if they do not get it.
        left_out: the reason for which they do not; empty if they do.
        requirement: the requirement in pip's notation; empty if it is left out.
        wheel: the wheel that is sent; None if nodes get it from elsewhere.
    """

    name: str
    version: str
    source: str = ""
    left_out: str = ""
    requirement: str = ""
    wheel: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMirror:
    """Packages of this environment for nodes.

    Attributes:
        packages: a row for each distribution that was considered, by name.
        index_url: this machine's package index, if it is not the public one and nodes can be given it.
        unchecked: the reason for which no index was asked; empty if one was.
    """

    packages: Sequence[MirroredPackage]
    index_url: str | None = None
    unchecked: str = ""

    @property
    def requirements(self) -> Sequence[str]:
        """Requirements in pip's notation."""
        return [each.requirement for each in self.packages if each.requirement]

    @property
    def wheel_folders(self) -> Sequence[str]:
        """Folders of this machine, each with one wheel."""
        return [str(each.wheel.parent) for each in self.packages if each.wheel is not None]

    def table(self) -> str:
        """Return the packages as text, one a line."""
        rows = [(each.name, each.version, each.source or f"left out: {each.left_out}") for each in self.packages]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"{name:{widths[0]}}  {version:{widths[1]}}  {source}" for name, version, source in rows]
        taken = len(self.requirements)
        return "\n".join([f"Image.mirror: {taken} of {len(rows)} distributions", *lines])

    @property
    def installers_variables(self) -> Mapping[str, str]:
        """Variables for nodes' installers: uv picks PyTorch's build by the machine that it runs on."""
        taken = {each.name for each in self.packages if each.requirement}
        return {"UV_TORCH_BACKEND": "auto"} if taken & _TORCH else {}


def mirror_environment(
    *, only: Sequence[str] | None = None, exclude: Sequence[str] = (), report: Callable[[str], None] | None = None
) -> ImageMirror:
    """Return the mirror of the whole environment, or of some distributions and their requirements. Blocks.

    Builds wheels of local distributions, and asks the package indexes of this machine for the others.

    Args:
        only: names of distributions to take; None takes all.
        exclude: names of distributions to leave out, with everything that requires them.
        report: receives a line before something slow.

    Raises:
        ConfigurationError: a name is unknown, two distributions contradict each other, one exists nowhere, or cannot
            be built here.
    """
    here = installed_distributions()
    roots = None if only is None else _known("only", only, here)
    excluded = _known("exclude", exclude, here)
    chosen = choose(here, roots=roots, exclude=excluded, engine=_engine(), loaded=LoadedNames(here) if roots else ())
    return _mirror(chosen, report)


def mirror_program(report: Callable[[str], None] | None = None) -> ImageMirror:
    """Return the mirror of the distributions that this program's modules import, and of their requirements. Blocks.

    Raises as :func:`mirror_environment` does.
    """
    here = installed_distributions()
    roots = needs_of_program(here)
    return _mirror(choose(here, roots=roots, engine=_engine(), loaded=LoadedNames(here)), report)


def _engine() -> Collection[str]:
    return {canonicalize_name(pin.partition("==")[0]) for pin in engine_pins()}


def _known(parameter: str, names: Sequence[str], here: InstalledDistributions) -> frozenset[str]:
    wrong: list[str] = []
    for name in names:
        if canonicalize_name(name) not in here:
            owners = distributions_of({name: ""}, here)
            wrong.append(unknown_name(parameter, name, here, {name: " or ".join(owners)} if owners else {}))
    if wrong:
        raise ConfigurationError("; ".join(wrong))
    return frozenset(map(canonicalize_name, names))


def _mirror(chosen: Sequence[Chosen], report: Callable[[str], None] | None) -> ImageMirror:
    sources = sources_here()
    taken = [each for each in chosen if not each.left_out]
    pins = {
        each.name: each.distribution.version
        for each in taken
        if each.distribution.origin is Origin.INDEX and not is_accelerators_build(each.distribution.version)
    }
    found = check_pins(pins, sources)
    _refuse_missing([each for each in taken if each.name in found.nowhere])
    variables = {**sources.for_pip(), **sources.for_uv()}

    def row(each: Chosen) -> MirroredPackage:
        local = each.name in found.only_here or each.distribution.origin not in (Origin.INDEX, Origin.ADDRESS)
        if each.left_out or not local:
            return _row(each)
        if report is not None:
            report(f"making a wheel of {each.name} from {each.distribution.place or 'the package sources'}")
        return _with_wheel(each.distribution, local_wheel(each.distribution, variables))

    return ImageMirror(
        packages=[row(each) for each in chosen], index_url=passable_index(sources), unchecked=found.unchecked
    )


def _row(chosen: Chosen) -> MirroredPackage:
    """Return the row of a distribution that comes from an index or a URL, or is left out."""
    each = chosen.distribution
    if chosen.left_out:
        return MirroredPackage(name=each.name, version=each.version, left_out=chosen.left_out)
    if each.origin is Origin.ADDRESS:
        host = urlsplit(each.place).hostname or "its address"
        return MirroredPackage(
            name=each.name, version=each.version, source=host, requirement=f"{each.name} @ {each.place}"
        )
    pinned = public_version(each.version)
    source = "index" if pinned == each.version else "index, the build for the node's processors or GPUs"
    return MirroredPackage(name=each.name, version=each.version, source=source, requirement=f"{each.name}=={pinned}")


def _with_wheel(each: Distribution, wheel: Path) -> MirroredPackage:
    version = str(parse_wheel_filename(wheel.name)[1])  # a version from a repository's state may have moved on
    made = each.origin in (Origin.FOLDER, Origin.REPOSITORY) or not each.place.endswith(".whl")
    place = each.place or "this machine's package sources"
    return MirroredPackage(
        name=each.name,
        version=version,
        source=f"built here from {place}" if made and each.place else f"sent from {place}",
        requirement=f"{each.name}=={version}",
        wheel=wheel,
    )


def _refuse_missing(missing: Sequence[Chosen]) -> None:
    if not missing:
        return
    named = [f"{each.name} {each.distribution.version} ({_why(each)})" for each in missing]
    names = [each.name for each in missing]
    raise ConfigurationError(
        f"no package index of this machine has {', '.join(named)}, and its metadata states no folder to build it from. "
        f"Install it from its folder, name an index in pip's configuration, or leave it out: "
        f"Image.mirror(exclude={names!r})"
    )


def _why(chosen: Chosen) -> str:
    return f"needed by {', '.join(chosen.needed_by)}" if chosen.needed_by else "needed by this program itself"
