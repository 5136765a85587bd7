"""What a mirror installs on nodes: packages of this environment that they can have; those that a program lacks."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from skyward.environment.index_lookup import (
    Availability,
    check_pins,
    find_conflict,
    passable_index,
    settings_here,
    sources_here,
    sources_of_nodes,
)
from skyward.environment.installed import (
    Distribution,
    InstalledDistributions,
    Origin,
    installed_distributions,
    marker_environment,
    without_implied,
)
from skyward.environment.local_wheels import local_wheel
from skyward.environment.package_sources import variables_for_pip, variables_for_uv
from skyward.environment.program_imports import (
    LoadedNames,
    Needed,
    distributions_of,
    needs_of,
    needs_of_program,
    travels,
)
from skyward.environment.skyward_wheel import engine_pins
from skyward.errors import ConfigurationError
from skyward.request.checks import without_credentials
from skyward.request.distribution_names import DISTRIBUTION
from skyward.request.image import EnvVars, ImageSettings

AnyImage = TypeVar("AnyImage", bound=ImageSettings)

_TORCH = frozenset({"torch", "torchvision", "torchaudio", "torchtext", "torchdata"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredPackage:
    """Distribution of this environment, and how nodes get it.

    Attributes:
        distribution: the distribution.
        needed_by: names of the packages that require it; empty if it was chosen for itself.
        left_out: the reason for which nodes do not get it; empty if they do.
        wheel: the wheel that is sent; None if nodes get it from elsewhere.
    """

    distribution: Distribution
    needed_by: tuple[str, ...] = ()
    left_out: str = ""
    wheel: Path | None = None

    @property
    def name(self) -> str:
        """Its canonical name."""
        return self.distribution.name

    @property
    def version(self) -> str:
        """Its version, that of the wheel if there is one: a version from a repository's state may have moved on."""
        return self.distribution.version if self.wheel is None else str(parse_wheel_filename(self.wheel.name)[1])

    @property
    def note(self) -> str:
        """What the user should know of the source; empty if it is the stated one."""
        return "" if self.left_out else self.distribution.note

    @property
    def requirement(self) -> str:
        """The requirement in pip's notation; empty if it is left out."""
        if self.left_out:
            return ""
        if self.wheel is not None:
            return f"{self.name}=={self.version}"
        if self.distribution.origin is Origin.ADDRESS:
            return f"{self.name} @ {self.distribution.place}"
        return f"{self.name}=={public_version(self.version)}"

    @property
    def source(self) -> str:
        """The place that nodes get it from; empty if they do not get it."""
        origin, place = self.distribution.origin, self.distribution.place
        if self.left_out:
            return ""
        if self.wheel is None and origin is Origin.ADDRESS:
            return urlsplit(place).hostname or "its address"
        if self.wheel is None:
            is_build = is_accelerators_build(self.version)
            return "index, the build for the node's processors or GPUs" if is_build else "index"
        if origin is Origin.FILES:
            return "sent as installed here"
        made = origin in (Origin.FOLDER, Origin.REPOSITORY) or not place.endswith(".whl")
        if made and place:
            return f"built here from {place}"
        return f"sent from {place}" if place else "sent from this machine's package sources"

    @property
    def shown_source(self) -> str:
        """The source with the note on it, or the reason for which there is none."""
        if self.left_out:
            return f"left out: {self.left_out}"
        return f"{self.source} ({self.note})" if self.note else self.source


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
        return [package.requirement for package in self.packages if package.requirement]

    @property
    def wheel_folders(self) -> Sequence[str]:
        """Folders of this machine, each with one wheel."""
        return [str(package.wheel.parent) for package in self.packages if package.wheel is not None]

    def table(self) -> str:
        """Return the packages as text, one a line."""
        rows = [(package.name, package.version, package.shown_source) for package in self.packages]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"{name:{widths[0]}}  {version:{widths[1]}}  {source}" for name, version, source in rows]
        taken = len(self.requirements)
        return "\n".join([f"Image.mirror: {taken} of {len(rows)} distributions", *lines])

    def added_to(self, image: AnyImage) -> AnyImage:
        """Return an image with these packages; its own index, variables and places of wheels come first."""
        taken = {package.name for package in self.packages if package.requirement}
        backend = {"UV_TORCH_BACKEND": "auto"} if taken & _TORCH else {}  # uv picks PyTorch's build by the machine
        return replace(
            image,
            pip=tuple(dict.fromkeys((*self.requirements, *without_implied(image.pip, self.requirements)))),
            find_links=(*image.find_links, *self.wheel_folders),
            pip_index_url=image.pip_index_url or self.index_url,
            env=EnvVars(backend) | image.env,
        )


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
    return _mirror(chosen, ImageSettings(), report, required=roots is not None)


def mirror_program(image: ImageSettings | None = None, report: Callable[[str], None] | None = None) -> ImageMirror:
    """Return the mirror of what this program's modules import, with its requirements, for nodes with an image. Blocks.

    The image's requirements count as ``pip install`` would take them here: what is installed and satisfies one is
    mirrored too; what does not is left to the requirement, and so is everything that only it requires.

    Raises as :func:`mirror_environment` does; also if the image's requirements and the mirrored distributions cannot be
    installed together.
    """
    image = image or ImageSettings()
    here = installed_distributions()
    named = {name: line for line in image.pip if (name := name_in(line))}
    kept = {name for name, line in named.items() if is_fitting(line, here)}
    mirror = _mirror_besides(image, here, named, kept, report)
    if len(kept) == len(image.pip) and "[" not in "".join(image.pip):
        return mirror
    conflict = _conflict(image, mirror)
    if conflict and kept:  # as an installer would, with other versions of what is named
        mirror = _mirror_besides(image, here, named, frozenset(), report)
        conflict = _conflict(image, mirror)
    if conflict:
        raise ConfigurationError(
            f"no machine was requested: pip={without_credentials(repr(list(image.pip)))} and the versions installed "
            f"here, which nodes get, exclude each other. {conflict} Change pip=; or install it here, so that the "
            "versions agree; or list everything and leave the mirror out: Image(mirror=False, pip=[…])"
        )
    return mirror


def _mirror_besides(
    image: ImageSettings,
    here: InstalledDistributions,
    named: Collection[str],
    kept: Collection[str],
    report: Callable[[str], None] | None,
) -> ImageMirror:
    """Return the mirror of what this program imports, and of ``kept``, without the others that the image names."""
    others = here.without({*named} - {*kept})
    roots = {*needs_of_program(here), *kept} & {*others}
    chosen = choose(others, roots=roots, engine=_engine(), loaded=LoadedNames(others))
    return _mirror(chosen, image, report, named=kept)


def _conflict(image: ImageSettings, mirror: ImageMirror) -> str:
    """Return why the image's requirements and a mirror's exclude each other, as far as this machine can tell."""
    own = [line for line in image.pip if name_in(line) and "@" not in line]
    return find_conflict([*mirror.requirements, *own], engine_pins(), sources_here(mirror.added_to(image)))


def name_in(requirement: str) -> str:
    """Return the canonical name in a requirement; empty if it is a path or an address alone."""
    found = re.match(r"[A-Za-z0-9._-]+(?=\s*($|[\[@<>=!~;(]))", requirement)
    return canonicalize_name(found[0]) if found else ""


def _engine() -> Collection[str]:
    return {canonicalize_name(pin.partition("==")[0]) for pin in engine_pins()}


def _known(parameter: str, names: Sequence[str], here: InstalledDistributions) -> frozenset[str]:
    if wrong := [_unknown(parameter, name, here) for name in names if canonicalize_name(name) not in here]:
        raise ConfigurationError("; ".join(wrong))
    return frozenset(map(canonicalize_name, names))


def _unknown(parameter: str, name: str, here: InstalledDistributions) -> str:
    near = difflib.get_close_matches(canonicalize_name(name), here, n=1)
    hint = f"did you mean {near[0]}?" if near else "`skyward env` lists the names"
    if owners := distributions_of({name: ""}, here):
        hint = f"{name} is a module of {' or '.join(owners)}: write that"
    return f"{parameter} names {name!r}, which is not installed here: {hint}"


def _mirror(
    packages: Sequence[MirroredPackage],
    image: ImageSettings,
    report: Callable[[str], None] | None,
    *,
    named: Collection[str] = (),
    required: bool = True,
) -> ImageMirror:
    """Find the source of each package.

    Args:
        packages: the decisions.
        image: the image that the packages are for, whose indexes nodes use.
        report: receives a line before something slow.
        named: distributions that a requirement of the image asks for: without a source they are left to that.
        required: whether a distribution without a version is an error; else it is left out.
    """
    here = sources_here(image)
    packages, found = _looked_up(packages, here, sources_of_nodes(image))
    packages = [_settled(package, found, is_named=package.name in named, required=required) for package in packages]
    _refuse_missing([package for package in packages if not package.left_out and _is_missing(package, found)])
    variables = {**variables_for_pip(here), **variables_for_uv(here)}
    complete: list[MirroredPackage] = []
    failures: list[ConfigurationError] = []
    for package in packages:
        if package.left_out or not (package.name in found.only_here or _is_made_here(package.distribution)):
            complete.append(package)
            continue
        if report is not None:
            report(f"making a wheel of {package.name} from {package.distribution.place or 'the package sources'}")
        try:
            complete.append(replace(package, wheel=local_wheel(package.distribution, variables)))
        except ConfigurationError as error:
            failures.append(error)
    if failures:
        raise ConfigurationError("\n".join(map(str, failures))) from failures[0]
    return ImageMirror(packages=complete, index_url=passable_index(settings_here()), unchecked=found.unchecked)


def _looked_up(
    packages: Sequence[MirroredPackage], here: Mapping[str, str], nodes: Mapping[str, str]
) -> tuple[Sequence[MirroredPackage], Availability]:
    """Look for packages in the indexes; a vendor's build that none has becomes the release it was made from."""
    found = check_pins(_pins(packages), here=here, nodes=nodes)
    builds = {
        package.name for package in packages if package.name in found.nowhere and is_vendors_build(package.version)
    }
    if not builds:
        return packages, found
    packages = [_release(package) if package.name in builds else package for package in packages]
    return packages, check_pins(_pins(packages), here=here, nodes=nodes)


def _pins(packages: Sequence[MirroredPackage]) -> Mapping[str, str]:
    return {
        package.name: package.version
        for package in packages
        if not package.left_out and _is_pinned(package.distribution)
    }


def _is_pinned(distribution: Distribution) -> bool:
    return (
        bool(distribution.version)
        and distribution.origin is Origin.INDEX
        and not is_accelerators_build(distribution.version)
    )


def _release(package: MirroredPackage) -> MirroredPackage:
    version = package.version
    release = replace(package.distribution, version=version.partition("+")[0], note=f"no index has {version}")
    return replace(package, distribution=release)


def _settled(package: MirroredPackage, found: Availability, *, is_named: bool, required: bool) -> MirroredPackage:
    """Return a package with what takes the place of its source, if it has none that is usable."""
    installed = package.distribution
    if package.left_out:
        return package
    if not installed.version and (is_named or not required):
        return replace(package, left_out="its metadata is damaged and states no version: install it again")
    homeless = installed.name in found.nowhere or installed.needs_login
    if homeless and installed.version and installed.pure_files:  # what is installed can run on other machines
        note = installed.note or (
            "its URL held a password" if installed.needs_login else f"no index has {installed.version}"
        )
        return replace(package, distribution=replace(installed, origin=Origin.FILES, note=note))
    if is_named and _is_missing(package, found):
        return replace(package, left_out=f"no index has {installed.version}, and pip= names it")
    return package


def _is_missing(package: MirroredPackage, found: Availability) -> bool:
    nowhere = package.name in found.nowhere and package.distribution.origin is Origin.INDEX
    return nowhere or not package.version


def _is_made_here(distribution: Distribution) -> bool:
    return distribution.needs_login or distribution.origin not in (Origin.INDEX, Origin.ADDRESS)


def _refuse_missing(missing: Sequence[MirroredPackage]) -> None:
    if not missing:
        return
    named = [
        f"{package.name} {package.distribution.version or '(no version)'} ({_why(package)})" for package in missing
    ]
    names = [package.name for package in missing]
    raise ConfigurationError(
        f"no package index of this machine has {', '.join(named)}, and its metadata states no folder to build it from. "
        "Install it from its folder or from an index; or name an index that has it in pip's configuration; or let "
        f"nodes have another version, as pip={names!r} does; or leave it out: Image.mirror(exclude={names!r})"
    )


def _why(package: MirroredPackage) -> str:
    need = f"needed by {', '.join(package.needed_by)}" if package.needed_by else "needed by this program itself"
    damage = "" if package.distribution.version else "; its metadata is damaged: install it again"
    return f"{need}; {package.distribution.note}" if package.distribution.note else f"{need}{damage}"


# --- the choice of packages -----------------------------------------------------------------------------------------

_TOOLS = frozenset(
    {
        *("pip", "setuptools", "wheel", "uv", "build", "twine", "pytest", "ruff", "pyright", "mypy", "debugpy"),
        *("ipykernel", "ipython", "jupyter-client", "jupyter-core", "jupyterlab", "notebook"),
    }
)
"""Distributions for the machine at which a person sits; left out unless another one requires them."""

_OTHER_SYSTEMS = re.compile(r"pywin32(-.*)?|pywinpty|appnope|pyobjc(-.*)?|win32-setctime")
_RUNTIMES = re.compile(r"nvidia-.+|(pytorch-)?triton(-.+)?|cuda-(toolkit|bindings|pathfinder)")
"""Parts of an accelerator's build: each build requires its own."""

_OTHER_CODE = re.compile(r"(^|[._-])(g?[0-9a-f]{7,}|d\d{8}|dirty|local|editable|unknown|untagged)([._-]|$)")
_ACCELERATORS_LABEL = re.compile(r"cpu|cu\d+.*|cuda.*|rocm.*|xpu|gpu")


def choose(
    here: Mapping[str, Distribution],
    *,
    roots: Collection[str] | None,
    exclude: Collection[str] = (),
    engine: Collection[str] = (),
    loaded: Container[str] = (),
) -> Sequence[MirroredPackage]:
    """Return a decision on every distribution that ``roots`` and their requirements name, by name.

    Args:
        here: the installed distributions.
        roots: canonical names to begin with; None means all.
        exclude: canonical names to leave out, with everything that requires them.
        engine: names that nodes have in any case.
        loaded: names that this program has imported: optional requirements of the chosen ones among them are chosen.

    Raises:
        ConfigurationError: two of the chosen ones contradict each other, or Skyward needs an excluded one.
    """
    _refuse_excluded_engine(exclude, engine)
    needed = closure(here, here if roots is None else roots, loaded=loaded)
    reasons: dict[str, str] = dict.fromkeys(exclude, "excluded")
    for name in sorted(needed):
        reason = _reason(name, needed[name], engine, is_root=roots is not None and name in roots)
        if reason:
            reasons.setdefault(name, reason)
    _leave_dependents_out(here, needed, reasons, frozenset(exclude))
    _refuse_contradictions(here, [name for name in needed if name not in reasons])
    return [
        MirroredPackage(
            distribution=here[name],
            needed_by=tuple(sorted(dependent for dependent in needed[name] if dependent not in reasons)),
            left_out=reasons.get(name, ""),
        )
        for name in sorted(needed)
    ]


def closure(
    here: Mapping[str, Distribution], roots: Collection[str], *, loaded: Container[str] = ()
) -> Mapping[str, frozenset[str]]:
    """Return the installed distributions that ``roots`` need on a node, and ``roots``, each with its dependents."""
    found: dict[str, set[str]] = {name: set() for name in roots if name in here}
    extras: dict[str, set[str]] = {name: set() for name in found}
    waiting = list(found)
    while waiting:
        name = waiting.pop()
        for requirement in _required(here[name], extras[name], loaded):
            target = canonicalize_name(requirement.name)
            if target not in here or target == name:
                continue
            new = target not in found or not extras[target].issuperset(requirement.extras)
            found.setdefault(target, set()).add(name)
            extras.setdefault(target, set()).update(requirement.extras)
            if new:
                waiting.append(target)
    return {name: frozenset(dependents) for name, dependents in found.items()}


def is_accelerators_build(version: str) -> bool:
    """Return True if the version's local label names a processor's or GPU's build, such as ``2.13.0+cu130``."""
    return bool(_ACCELERATORS_LABEL.fullmatch(version.partition("+")[2]))


def is_fitting(requirement: str, here: Mapping[str, Distribution]) -> bool:
    """Return True if an installer would keep the installed version for a requirement, whatever its extras add."""
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return False
    installed = here.get(canonicalize_name(parsed.name))
    if installed is None or not installed.version or parsed.url:
        return False
    return not _holds(parsed) or parsed.specifier.contains(installed.version, prereleases=True)


def is_vendors_build(version: str) -> bool:
    """Return True if the local label names who built a release, as ``+computecanada``, and no state of a repository.

    Such a build is compatible with the release (PEP 440); ``+5.g1f3a9c2``, ``+dirty`` and the like are other code.
    """
    label = version.partition("+")[2]
    return bool(label) and not _OTHER_CODE.search(label)


def public_version(version: str) -> str:
    """Return the version without the label of an accelerator's build; other labels stay."""
    return version.partition("+")[0] if is_accelerators_build(version) else version


def _required(distribution: Distribution, extras: Collection[str], loaded: Container[str]) -> Iterator[Requirement]:
    """Yield the requirements that hold on a node, those of extras that were asked for or that are loaded here."""
    for requirement in distribution.requires:
        if _holds(requirement, extras) or _is_optional_and_loaded(requirement, loaded):
            yield requirement


def _holds(requirement: Requirement, extras: Collection[str] = ()) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate(marker_environment(extra)) for extra in ("", *extras))


def _is_optional_and_loaded(requirement: Requirement, loaded: Container[str]) -> bool:
    name = canonicalize_name(requirement.name)
    return name in loaded and name not in _TOOLS and "extra" in str(requirement.marker)


def _reason(name: str, dependents: Collection[str], engine: Collection[str], *, is_root: bool) -> str:
    if name == DISTRIBUTION:
        return "nodes get the Skyward that runs here"
    if name in engine:
        return "comes with Skyward, in this version"
    if _OTHER_SYSTEMS.fullmatch(name):
        return "for another operating system"
    if is_root:
        return ""
    if _RUNTIMES.fullmatch(name):
        return "comes with the build for the node's processors or GPUs"
    if name in _TOOLS and not {*dependents} - {DISTRIBUTION}:
        return "a tool for this machine; only=[…] takes it"
    return ""


def _leave_dependents_out(
    here: Mapping[str, Distribution],
    needed: Mapping[str, Collection[str]],
    reasons: dict[str, str],
    excluded: frozenset[str],
) -> None:
    """Leave out everything that requires an excluded one: an installer would bring that back."""
    waiting = [name for name in excluded if name in needed]
    while waiting:
        gone = waiting.pop()
        for name in needed[gone]:
            requires = {
                canonicalize_name(requirement.name) for requirement in here[name].requires if _holds(requirement)
            }
            if gone in requires and name not in reasons:
                reasons[name] = f"requires {gone}, which is left out"
                waiting.append(name)


def _refuse_excluded_engine(exclude: Collection[str], engine: Collection[str]) -> None:
    if wrong := sorted({*exclude} & {*engine, DISTRIBUTION}):
        raise ConfigurationError(f"exclude names {', '.join(wrong)}, which Skyward itself needs on nodes: leave it out")


def _refuse_contradictions(here: Mapping[str, Distribution], names: Collection[str]) -> None:
    wrong: list[str] = []
    for name in sorted(names):
        for requirement in here[name].requires:
            target = here.get(canonicalize_name(requirement.name))
            if target is None or requirement.url or not _holds(requirement):
                continue
            if target.version and not requirement.specifier.contains(target.version, prereleases=True):
                wrong.append(f"{name} {here[name].version} requires {requirement}, and {target.version} is installed")
    if wrong:
        raise ConfigurationError(
            "distributions of this environment contradict each other, and nodes could not install them together: "
            f"{'; '.join(wrong)}. Install versions that agree, or leave one out: Image.mirror(exclude=[…])"
        )


# --- packages that a function needs and the image lacks -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Distributions that a function needs and its nodes lack.

    Attributes:
        needed: the distributions, by name.
        sure: False if the image has packages unknown here, which may provide the modules.
        mirrors: True if the nodes have what the program was seen to import.
    """

    needed: Sequence[Needed]
    sure: bool = True
    mirrors: bool = False

    @property
    def names(self) -> Sequence[str]:
        """Names of the distributions."""
        return [lacked.name for lacked in self.needed]

    def described(self) -> str:
        """Return the list with the importers, and the ways to give nodes these packages."""
        listed = ", ".join(
            f"{needed.name} (imported by {needed.importer.removesuffix('.__wrapped__')})" for needed in self.needed
        )
        if self.mirrors:
            return f"{listed}. Add them: pip={list(self.names)!r}"
        return (
            f"{listed}. Let nodes have what this program imports, which is the default without Image(mirror=False), "
            f"Image.mirror(…) and SKYWARD_MIRROR=0; or add them: pip={list(self.names)!r}"
        )


def lack_of(function: Callable[..., Any], image: ImageSettings, *, missing: str | None = None) -> Lack:
    """Return the distributions that ``function`` needs, that are installed here, and that ``image`` lacks. Blocks.

    ``missing`` is the name of a module that a node did not find: it is needed in any case. Modules of editable
    distributions travel with calls, and are not lacked.
    """
    modules = {**({missing: "the call"} if missing else {}), **needs_of(function, conditional=missing is not None)}
    if not modules:
        return Lack(needed=())
    here = installed_distributions()
    needed = distributions_of(modules, here)
    names = [name_in(line) for line in image.pip]  # empty for a path or an address
    given = closure(here, [*names, *_engine()])
    included = {PurePath(path).stem for path in image.includes}
    lacking = [
        distribution
        for name, distribution in sorted(needed.items())
        if name not in given
        and distribution.module.partition(".")[0] not in included
        and not travels(distribution.module)
    ]
    sure = here.keys() >= {*names} and "PYTHONPATH" not in image.env
    return Lack(needed=lacking, sure=sure, mirrors=image.mirrors)


def with_all_missing(
    error: ModuleNotFoundError, function: Callable[..., Any], image: ImageSettings
) -> ModuleNotFoundError:
    """Return a node's error with everything that the function needs and the image lacks in its message."""
    lack = lack_of(function, image, missing=error.name)
    if not lack.needed:
        return error
    count = len(lack.needed)
    text = f"{error}; the call needs {'a package' if count == 1 else f'{count} packages'} that its nodes lack: "
    complete = ModuleNotFoundError(text + lack.described(), name=error.name, path=error.path)
    complete.__cause__ = error.__cause__
    for note in getattr(error, "__notes__", ()):
        if "Image(pip=" not in note:  # the message says it for all
            complete.add_note(note)
    return complete
