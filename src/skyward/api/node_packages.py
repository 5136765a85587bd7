"""Environment of a pool's nodes: the image, and the packages that the program imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import currentframe
from typing import Any, cast

from skyward.api.calls import ComputeFunction
from skyward.distributed._gang import is_gang
from skyward.errors import ConfigurationError
from skyward.providers.base import Provider
from skyward.request.image import ImageSettings
from skyward.request.includes import describe_includes
from skyward.request.request import PoolRequest
from skyward.shipping.project_modules import OWN_PACKAGES

MIRRORING = "mirroring what this program imports"
"""Beginning of the line that lists the mirrored distributions."""
MIRROR_VARIABLE = "SKYWARD_MIRROR"
"""Environment variable: ``0`` does for all pools what ``Image(mirror=False)`` does for one."""
PLAN_FILE = "SKYWARD_PLAN_FILE"
"""Environment variable of a script that ``skyward plan`` runs, and of its children: the file for the plan of a pool."""


def callers_names() -> tuple[Mapping[str, object], ...]:
    """Return the globals of the code that calls Skyward, and the compute functions among its local variables."""
    frame = currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in OWN_PACKAGES:
        frame = frame.f_back
    if frame is None:
        return ()
    # Of the local variables only these, as the pool keeps them: others may be large.
    variables = cast("Mapping[str, object]", frame.f_locals)
    local: dict[str, object] = {}
    local |= {name: value for name, value in variables.items() if isinstance(value, ComputeFunction)}
    return frame.f_globals, local


def with_environment(
    request: PoolRequest, provider: Provider, *, names: Sequence[Mapping[str, object]], report: Callable[[str], None]
) -> PoolRequest:
    """Return the request with the environment that its nodes get. Blocks: reads metadata, builds wheels.

    Args:
        request: the request.
        provider: the machines' provider. Nodes on this machine have what is installed here if that satisfies the image.
        names: variables of the code that makes the pool, whose functions it will probably call.
        report: receives lines for the user.

    Raises:
        ConfigurationError: the mirror cannot be made, it contradicts the image, or no function in ``names`` could run
            on the nodes.
    """
    for line in describe_includes(request.image.includes):
        report(line)
    if provider.this_machine and runs_here(request.image):
        return request
    if not request.image.mirrors or os.environ.get(MIRROR_VARIABLE, "").lower() in ("0", "off", "false", "no"):
        request = replace(request, image=replace(request.image, mirrors=False))
        if not provider.this_machine:
            _refuse_lack(request, names, report)
        return request
    from skyward.environment.image_mirror import mirror_program

    mirror = mirror_program(request.image, report)
    if mirror.unchecked:
        report(f"the mirrored packages were not looked up beforehand: {mirror.unchecked}")
    for package in mirror.packages:
        if package.note:
            report(f"{package.name} {package.version}: {package.note}")
    if mirror.requirements:
        listed = ", ".join(mirror.requirements)
        report(f"{MIRRORING} ({len(mirror.requirements)}): {listed}")
    return replace(request, image=mirror.added_to(request.image))


def refuse_spread_gangs(request: PoolRequest, names: Sequence[Mapping[str, object]]) -> None:
    """Raise ConfigurationError if a function in ``names`` runs on all workers together, and the nodes may be apart."""
    gangs = [name for name, function in _functions(names) if is_gang(function)]
    if request.spread and request.nodes > 1 and gangs:
        raise ConfigurationError(
            f"{gangs[0]} is decorated with skyward.distributed: its workers have to reach each other, and spread=True "
            "lets the nodes come from anywhere; leave spread out, or open one pool for each"
        )


def runs_here(image: ImageSettings) -> bool:
    """Return True if this interpreter satisfies an image: nodes on this machine use it, and install nothing."""
    from skyward.environment.installed import is_satisfied

    return is_satisfied(image.pip)


def _refuse_lack(request: PoolRequest, names: Sequence[Mapping[str, object]], report: Callable[[str], None]) -> None:
    """Raise if no function could run; report those that could not."""
    from skyward.environment.image_mirror import lack_of

    functions = dict(_functions(names))
    lacking = {name: lack for name, function in functions.items() if (lack := lack_of(function, request.image)).needed}
    texts = [f"{name} needs packages that the image lacks: {lack.described()}" for name, lack in lacking.items()]
    if lacking and len(lacking) == len(functions) and all(lack.sure for lack in lacking.values()):
        raise ConfigurationError(f"no machine was requested: {'; '.join(texts)}")
    for text in texts:
        report(text)


def _functions(names: Sequence[Mapping[str, object]]) -> Iterator[tuple[str, Callable[..., Any]]]:
    for scope in names:
        for name, value in list(scope.items()):
            if isinstance(value, ComputeFunction):
                yield name, value.__wrapped__  # as calls send it
