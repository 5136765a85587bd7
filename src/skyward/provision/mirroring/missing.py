"""Packages that functions need and that an image does not give to nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from skyward.provision.mirroring.choice import closure
from skyward.provision.mirroring.installed import InstalledDistributions, installed_distributions
from skyward.provision.mirroring.program_imports import Needed, distributions_of, needs_of, travels
from skyward.provision.preparing.distribution import engine_pins
from skyward.request.image import Image

__all__ = ["Lack", "lack_of", "with_all_missing"]


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
        return [each.name for each in self.needed]

    def described(self) -> str:
        """Return the list with the importers, and the ways to give nodes these packages."""
        each = ", ".join(
            f"{each.name} (imported by {each.importer.removesuffix('.__wrapped__')})" for each in self.needed
        )
        if self.mirrors:
            return f"{each}. Add them: pip={list(self.names)!r}"
        return (
            f"{each}. Let nodes have what this program imports, which is the default without Image(mirror=False), "
            f"Image.mirror(…) and SKYWARD_MIRROR=0; or add them: pip={list(self.names)!r}"
        )


def lack_of(function: Callable[..., Any], image: Image, *, missing: str | None = None) -> Lack:
    """Return the distributions that ``function`` needs, that are installed here, and that ``image`` lacks. Blocks.

    ``missing`` is the name of a module that a node did not find: it is needed in any case. Modules of editable
    distributions travel with calls, and are not lacked.
    """
    modules = {**({missing: "the call"} if missing else {}), **needs_of(function, conditional=missing is not None)}
    if not modules:
        return Lack(needed=())
    here = installed_distributions()
    needed = distributions_of(modules, here)
    names, unknown = _listed(image, here)
    engine = [canonicalize_name(pin.partition("==")[0]) for pin in engine_pins()]
    given = closure(here, [*names, *engine])
    included = {PurePath(path).stem for path in image.includes}
    lacking = [
        each
        for name, each in sorted(needed.items())
        if name not in given and each.module.partition(".")[0] not in included and not travels(each.module)
    ]
    sure = not unknown and "PYTHONPATH" not in image.env
    return Lack(needed=lacking, sure=sure, mirrors=image.mirrors)


def with_all_missing(error: ModuleNotFoundError, function: Callable[..., Any], image: Image) -> ModuleNotFoundError:
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


def _listed(image: Image, here: InstalledDistributions) -> tuple[Sequence[str], bool]:
    """Return the image's requirements that are installed here, and True if there are others."""
    names: list[str] = []
    unknown = False
    for line in image.pip:
        try:
            name = canonicalize_name(Requirement(line).name)
        except InvalidRequirement:  # a path or an address
            unknown = True
            continue
        names.append(name)
        unknown = unknown or name not in here
    return names, unknown
