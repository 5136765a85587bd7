"""Choice of the distributions that nodes get, from this environment's (pure)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from skyward.errors import ConfigurationError
from skyward.provision.mirroring.installed import Distribution, marker_environment
from skyward.provision.preparing.distribution import DISTRIBUTION

__all__ = [
    "Chosen",
    "choose",
    "closure",
    "is_accelerators_build",
    "is_fitting",
    "is_vendors_build",
    "public_version",
    "unknown_name",
]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Distribution of this environment, and the decision on it.

    Attributes:
        distribution: the distribution.
        needed_by: names of the chosen ones that require it; empty if it was chosen for itself.
        left_out: the reason for which nodes do not get it; empty if they do.
    """

    distribution: Distribution
    needed_by: tuple[str, ...] = ()
    left_out: str = ""

    @property
    def name(self) -> str:
        """Its canonical name."""
        return self.distribution.name


def choose(
    here: Mapping[str, Distribution],
    *,
    roots: Collection[str] | None,
    exclude: Collection[str] = (),
    engine: Collection[str] = (),
    loaded: Container[str] = (),
) -> Sequence[Chosen]:
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
        Chosen(
            distribution=here[name],
            needed_by=tuple(sorted(each for each in needed[name] if each not in reasons)),
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


def unknown_name(parameter: str, name: str, here: Mapping[str, Distribution], imports: Mapping[str, str]) -> str:
    """Return the message for a name in ``only`` or ``exclude`` that is not installed.

    Args:
        parameter: the parameter's name.
        name: the given name.
        here: the installed distributions.
        imports: names of modules to the distributions that have them.
    """
    if name in imports:
        hint = f"{name} is a module of {imports[name]}: write that"
    else:
        near = difflib.get_close_matches(canonicalize_name(name), here, n=1)
        hint = f"did you mean {near[0]}?" if near else "`skyward env` lists the names"
    return f"{parameter} names {name!r}, which is not installed here: {hint}"


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
            requires = {canonicalize_name(each.name) for each in here[name].requires if _holds(each)}
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
